"""What a session changes in a graph that it serves: where nodes run, how requests get in, how variables are read.

A request's way through TensorFlow takes longer than its kernels, so a signature of stitched functions gets nodes of its
own beside the graph's: calls are unfolded, one node reads all variables, and stitched ops of a GPU copy what is fed to
the device and what is fetched from it themselves.  TensorFlow would run each call as a graph of its own, read variables
one by one, and let one thread for all requests wait for the end of copies before it goes on.
"""
from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import node_def_pb2, types_pb2

from ..graph.calls import CALLS
from ..graph.rewriter import OP
from ..graph.view import GraphView, may_have_effects

PREFIX = "tf_stitch_served"
VARIABLES = "StitchedVariables"
# Types whose variables lie where the graph is placed; those of others may be elsewhere.
READ_TOGETHER = frozenset({types_pb2.DT_FLOAT, types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_DOUBLE})
# What takes and sets variables as a whole.  TensorFlow copies a variable at each read once something else used it (a
# gather, a scatter, an optimizer), and only its own reads do.
WHOLE = frozenset({"ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "VariableShape",
                   "VarIsInitializedOp", "DisableCopyOnRead"})
XLA = "_XlaMustCompile"
READERS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
Ref = tuple[str, int]


def place(graph_def: Any, device: str) -> None:
    """Puts the nodes that have no device, those of functions too, on ``device`` ("GPU:1").

    Fallbacks of stitched ops are left alone: they run where their op runs.
    """
    nodes = _all_nodes(graph_def)
    fallbacks = {n.attr["fallback"].func.name for n in nodes if n.op == OP}
    functions = (f.node_def for f in graph_def.library.function if f.signature.name not in fallbacks)
    for node in itertools.chain(graph_def.node, *functions):
        if not node.device and node.op != "Placeholder":
            node.device = f"/device:{device}"


def shorten(meta: Any) -> None:
    """Gives the signatures of a MetaGraph, where they are calls of stitched functions, a shorter way through it.

    The nodes that were there stay.  Functions with side effects are called as before.
    """
    graph_def = meta.graph_def
    nodes = {n.name: n for n in graph_def.node}
    library = {f.signature.name: f for f in graph_def.library.function}
    whole = _whole(graph_def, library)
    for number, signature in enumerate(meta.signature_def.values()):
        outputs = [info for info in signature.outputs.values() if info.WhichOneof("encoding") == "name"]
        refs = [_ref(info.name) for info in outputs]
        calls = {ref[0] for ref in refs}
        if len(calls) != 1 or len(outputs) != len(signature.outputs):
            continue
        call = nodes.get(calls.pop())
        if call is None or call.op not in CALLS or not _can_unfold(call, library):
            continue
        if any(x.startswith("^") for x in call.input):  # what has to run before it has effects
            continue
        unfolded = _Unfolded(f"{PREFIX}_{number}", graph_def.library, library)
        results = unfolded.call(call, [_ref(x) for x in call.input])
        if not any(n.op == OP for n in unfolded.nodes) or {name for name, _ in results} & nodes.keys():
            continue
        instead = _read_together(unfolded, whole)
        fetched = [instead.get(results[port][0], results[port]) for _, port in refs]
        _stay_on_host(unfolded.nodes, nodes, fetched)
        graph_def.node.extend(unfolded.nodes)
        for info, ref in zip(outputs, fetched):
            info.name = _text(ref)


def _all_nodes(graph_def: Any) -> list[Any]:
    return [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]


def _ref(text: str) -> Ref:
    name, _, port = text.partition(":")
    return name, int(port or 0)


def _text(ref: Ref) -> str:
    return f"{ref[0]}:{ref[1]}"


# --- calls -------------------------------------------------------------------------------------------

def _can_unfold(call: Any, library: Mapping[str, Any], outer: frozenset[str] = frozenset()) -> bool:
    """True when a call's function does nothing but compute its results from its arguments and variables."""
    name = call.attr["f"].func.name
    function = library.get(name)
    if function is None or name in outer or function.signature.attr or any(
            XLA in attrs and attrs[XLA].b for attrs in (call.attr, function.attr)):
        return False
    return all(_can_unfold(n, library, outer | {name}) if n.op in CALLS else
               n.op in READERS or n.op == OP or not may_have_effects(n.op)
               for n in function.node_def)


class _Unfolded:
    """Nodes of the main graph that do what calls do.  They take what functions compute, not what only has to run."""

    def __init__(self, prefix: str, library: Any, functions: Mapping[str, Any]) -> None:
        self.nodes: list[node_def_pb2.NodeDef] = []
        self._prefix, self._library, self._functions = prefix, library, functions
        self._names = itertools.count()

    def call(self, call: Any, arguments: Sequence[Ref]) -> list[Ref]:
        """Results of a call with ``arguments``, which are refs to the main graph's nodes, as such refs."""
        view = GraphView(self._functions[call.attr["f"].func.name], self._library)
        at = f"{self._prefix}/{next(self._names)}"
        found: dict[Ref, Ref] = {(name, 0): ref for name, ref in zip(view.args, arguments, strict=True)}
        for name in _in_order(view):
            node = view[name]
            inputs = [found[ref] for ref in node.inputs]
            # What is fed cannot be fetched as it is.
            if node.op == "Identity" and inputs[0][0].startswith(self._prefix):
                found[name, 0] = inputs[0]
                continue
            if node.op in CALLS:
                found.update(((name, port), ref) for port, ref in enumerate(self.call(node.proto, inputs)))
                continue
            copy = node_def_pb2.NodeDef(name=f"{at}/{name}", op=node.op, device=node.device, input=map(_text, inputs))
            assert node.proto is not None  # it is no argument
            for key, value in node.proto.attr.items():
                if key != "_class":
                    copy.attr[key].CopyFrom(value)
            self.nodes.append(copy)
            found.update(((name, port), (copy.name, port)) for port in range(len(node.outputs or ())))
        return [found[ref] for ref in view.rets]


def _in_order(view: GraphView) -> Iterator[str]:
    """Names of the nodes that the results need, each after what it reads."""
    needs: dict[str, set[str]] = {}
    work = [name for name, _ in view.rets]
    while work:
        name = work.pop()
        if name not in needs and name not in view.args:
            needs[name] = {ref[0] for ref in view[name].inputs} - set(view.args)
            work.extend(needs[name])
    return iter(graphlib.TopologicalSorter(needs).static_order())


# --- variables -----------------------------------------------------------------------------------------

def _whole(graph_def: Any, library: Mapping[str, Any]) -> dict[str, Any]:
    """The handles, by node, of the graph's variables that are only taken and set as a whole."""
    handles = {n.name: n for n in graph_def.node if n.op == "VarHandleOp" and n.attr["shared_name"].s}
    other = {_variable(n) for f in library.values() for n in f.node_def if n.op == "VarHandleOp"}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    work: list[tuple[Sequence[Any], dict[str, str]]] = [(graph_def.node, {name: name for name in handles})]
    while work:
        nodes, known = work.pop()
        for n in nodes:
            given = tuple(known.get(x.partition(":")[0], "") for x in n.input if not x.startswith("^"))
            function = library.get(n.attr["f"].func.name) if n.op in CALLS else None
            if function is None or any(a.type == types_pb2.DT_RESOURCE for a in function.signature.output_arg):
                other.update(_variable(handles[name]) for name in given if name and n.op not in WHOLE)
            elif any(given) and (function.signature.name, given) not in seen:
                seen.add((function.signature.name, given))
                arguments = (a.name for a in function.signature.input_arg)
                work.append((function.node_def, {a: name for a, name in zip(arguments, given) if name}))
    return {name: n for name, n in handles.items() if _variable(n) not in other}


def _variable(handle: Any) -> tuple[bytes, bytes]:
    return handle.attr["container"].s, handle.attr["shared_name"].s


def _read_together(unfolded: _Unfolded, nodes: Mapping[str, Any]) -> dict[str, Ref]:
    """Puts one node in place of all reads of variables of a device; what there is instead of each, by name.

    ``nodes`` are handles of variables.  Variables that are not floating point, and those of which TensorFlow decides
    where they are, are read as before.
    """
    reads: dict[str, list[Any]] = {}  # by device
    for n in unfolded.nodes:
        handle = nodes.get(_ref(n.input[0])[0]) if n.op == "ReadVariableOp" else None
        if handle is not None and handle.device and handle.device == n.device and (
                handle.attr["dtype"].type in READ_TOGETHER):
            reads.setdefault(n.device, []).append(n)
    instead: dict[str, Ref] = {}
    made = []
    for device, here in reads.items():
        node = node_def_pb2.NodeDef(name=f"{here[0].name}/variables", op=VARIABLES, device=device)
        handles = {n.input[0]: nodes[_ref(n.input[0])[0]] for n in here}
        for handle in handles.values():
            node.attr["dtypes"].list.type.append(handle.attr["dtype"].type)
            node.attr["containers"].list.s.append(handle.attr["container"].s)
            node.attr["names"].list.s.append(handle.attr["shared_name"].s)
            node.attr["shapes"].list.shape.add().CopyFrom(handle.attr["shape"].shape)
        ports = {text: port for port, text in enumerate(handles)}
        instead.update((n.name, (node.name, ports[n.input[0]])) for n in here)
        made.append(node)
    unfolded.nodes = [*made, *(n for n in unfolded.nodes if n.name not in instead)]
    for n in unfolded.nodes:
        n.input[:] = [_text(instead.get(_ref(x)[0], _ref(x))) for x in n.input]
    return instead


# --- arguments and results -----------------------------------------------------------------------------

def _stay_on_host(made: Sequence[Any], nodes: Mapping[str, Any], fetched: Sequence[Ref]) -> None:
    """Stitched ops take what is fed in host memory, and leave there what is only fetched."""
    fed = {name for name, n in nodes.items() if n.op == "Placeholder"}
    ends = set(fetched) - {_ref(x) for n in made for x in n.input}
    for node in made:
        if node.op == OP:
            takes, leaves = node.attr["_input_hostmem"].list.i, node.attr["_output_hostmem"].list.i
            takes[:] = sorted({*takes, *(i for i, x in enumerate(node.input) if _ref(x)[0] in fed)})
            leaves[:] = sorted(port for name, port in ends if name == node.name)
