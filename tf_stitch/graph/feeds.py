"""What sessions feed and fetch: a graph of TF1 is run in parts.

A signature may name any tensor as an input.  What reads such a tensor must go on reading the node that gives it, as
feeding puts a value in that node's place.  So while the graph is rewritten, a placeholder that has the tensor as its
default stands between them (:func:`cut`).

What is fetched may need only some of the placeholders, and an op runs as a whole.  So nodes share an op only where they
are needed with the same placeholders fed (:func:`needs`).
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from .variables import free_name
from .view import GraphView

MUST_BE_FED = frozenset({"Placeholder", "PlaceholderV2"})
PLACEHOLDERS = MUST_BE_FED | {"PlaceholderWithDefault"}
Runs = Mapping[frozenset[str], Iterable[str]]  # by the nodes that are fed, the nodes that are fetched then


def cut(graph: graph_pb2.GraphDef, fed: Iterable[str]) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """A graph in which the tensors ``fed`` ("name:port") that are no placeholders are read through placeholders.

    Returns it (the graph itself when there is nothing to do), and by placeholder the tensor that it stands for.
    """
    ops = {n.name: n.op for n in graph.node}
    inside = sorted(t for t in set(map(_written, fed)) if ops.get(t.split(":")[0], "Placeholder") not in PLACEHOLDERS)
    if not inside:
        return graph, {}
    view, taken = GraphView(graph), set(ops)
    stands = {free_name(f"{t.split(':')[0]}/fed", taken): t for t in inside}
    read = {t: name for name, t in stands.items()}
    out = graph_pb2.GraphDef()
    out.CopyFrom(graph)
    for node in out.node:
        node.input[:] = [read.get(_written(i), i) for i in node.input]
    out.node.extend(_placeholder(view, name, tensor) for name, tensor in stands.items())
    return out, stands


def join(graph: graph_pb2.GraphDef, stands: Mapping[str, str]) -> None:
    """Takes the placeholders of :func:`cut` out again."""
    if not stands:
        return
    left = [n for n in graph.node if n.name not in stands]
    for node in left:
        node.input[:] = [stands.get(i, i) for i in node.input]
    kept = graph_pb2.GraphDef(node=left)
    del graph.node[:]
    graph.node.extend(kept.node)


def _written(tensor: str) -> str:
    """A tensor as inputs of nodes are written."""
    return tensor.removesuffix(":0")


def _placeholder(view: GraphView, name: str, tensor: str) -> node_def_pb2.NodeDef:
    source, _, port = tensor.partition(":")
    ref = source, int(port or 0)
    node = node_def_pb2.NodeDef(op="PlaceholderWithDefault", name=name, input=[tensor], device=view[source].device)
    node.attr["dtype"].type = tf.dtypes.as_dtype(view.dtype(ref)).base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(view.proven_shape(ref)).as_proto())
    return node


def runs_of_ends(graph: graph_pb2.GraphDef, keep: Iterable[str]) -> Runs:
    """The runs of a graph whose nodes ``keep``, and those that nothing reads, are each fetched with what it needs."""
    read = {s for sources in _sources(graph).values() for s in sources}
    return runs_of(graph, [*keep, *(n.name for n in graph.node if n.name not in read)])


def runs_of(graph: graph_pb2.GraphDef, fetched: Iterable[str]) -> Runs:
    """The runs of a graph in which each of some nodes is fetched with what it needs."""
    sources = _sources(graph)
    fed = {n.name: frozenset({n.name} if n.op in MUST_BE_FED else ()) for n in graph.node}
    again = True
    while again:  # nodes may come in any order, and loops go back
        again = False
        for name, read in sources.items():
            found = fed[name].union(*(fed[s] for s in read if s in fed))
            again = again or found != fed[name]
            fed[name] = found
    runs: dict[frozenset[str], list[str]] = {}
    for end in dict.fromkeys(fetched):
        runs.setdefault(fed.get(end, frozenset()), []).append(end)
    return runs


def _sources(graph: graph_pb2.GraphDef) -> dict[str, list[str]]:
    """By node the nodes that it reads or waits for."""
    return {n.name: [_written(i).lstrip("^").split(":")[0] for i in n.input] for n in graph.node}


def needs(view: GraphView, runs: Runs) -> dict[str, frozenset[frozenset[str]]]:
    """By node the least that is fed in the runs that need it.

    Nodes of which this is equal may share an op: whoever fetches one of them has fed what the other needs.
    """
    found: dict[str, list[frozenset[str]]] = {}
    for fed, fetched in sorted(runs.items(), key=lambda run: len(run[0])):
        seen: set[str] = set()
        stack = list(fetched)
        while stack:
            name = stack.pop()
            if name in seen or name not in view:
                continue
            seen.add(name)
            least = found.setdefault(name, [])
            if not any(less <= fed for less in least):
                least.append(fed)
            if name not in fed:
                stack.extend((*(source for source, _ in view[name].inputs), *view[name].control_inputs))
    return {name: frozenset(least) for name, least in found.items()}
