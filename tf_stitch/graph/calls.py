"""What is known of functions' arguments from the nodes that call them."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
T = TypeVar("T")


def known_arguments(graph: graph_pb2.GraphDef, known: Mapping[str, T]) -> dict[str, dict[int, T]]:
    """What all calls of a function agree on, by the function's name and its argument's position.

    Args:
      known: something about first outputs of nodes of the main graph, by the node's name.
    """
    library = {f.signature.name: f for f in graph.library.function}
    found: dict[str, dict[int, T]] = {}
    work: list[tuple[Iterable[node_def_pb2.NodeDef], Mapping[str, T]]] = [(graph.node, known)]
    while work:
        nodes, here = work.pop()
        for name, given in (call for node in nodes for call in _calls(node, here)):
            before = found.get(name)
            now = given if before is None else {i: v for i, v in before.items() if i in given and given[i] == v}
            if name not in library or now == before:
                continue
            found[name] = now
            arguments = library[name].signature.input_arg
            work.append((library[name].node_def, {arguments[i].name: v for i, v in now.items()}))
    return found


def _calls(node: node_def_pb2.NodeDef, known: Mapping[str, T]) -> Iterator[tuple[str, dict[int, T]]]:
    """The functions that a node names, and what is known of their arguments: nothing, unless it is a plain call."""
    names = [(text[:-2] if text.endswith(":0") else text) for text in node.input if not text.startswith("^")]
    given = {i: known[name] for i, name in enumerate(names) if name in known} if node.op in CALLS else {}
    for attr in node.attr.values():
        for function in ([attr.func] if attr.HasField("func") else attr.list.func):
            yield function.name, given


def annotate_variables(graph: graph_pb2.GraphDef) -> None:
    """Writes to functions' resource arguments the shapes of the variables that they are called with."""
    handles = {n.name: (n.attr["shape"].shape.SerializeToString(), n.attr["dtype"].type) for n in graph.node
               if n.op == "VarHandleOp"}
    library = {f.signature.name: f for f in graph.library.function}
    for name, known in known_arguments(graph, handles).items():
        for i, (shape, dtype) in known.items():
            attrs = library[name].arg_attr[i].attr
            if "_handle_shapes" not in attrs:
                attrs["_handle_shapes"].list.shape.add().ParseFromString(shape)
                attrs["_handle_dtypes"].list.type.append(dtype)
