"""Functions inside of a graph that XLA was to compile (``jit_compile=True``), put in the place of their calls.

Grappler leaves such a call as one node, so what is before and behind it would be programs of their own.  Where all that
the function does can be part of a program, its nodes are; else XLA compiles it as before.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

from tensorflow.core.framework import graph_pb2, node_def_pb2

from .edits import Edit
from .shapes import variable_shape
from .view import ARG_OPS, FuncRef, GraphView, NodeView, Ref, may_have_effects

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
XLA = "_XlaMustCompile"
READ = "ReadVariableOp"


def inlined(source: graph_pb2.GraphDef, view: GraphView, keep: Iterable[str], run: Iterable[str],
            stitches: Callable[[GraphView, NodeView], bool]) -> graph_pb2.GraphDef:
    """The same graph, or a copy with the nodes of XLA's functions where they were called.

    Args:
      source: the graph; ``view`` is of it.
      keep: names of nodes that must still be there.
      run: names of nodes that must have run: a NoOp is in their place.
      stitches: whether a node of a view may be part of a program.
    """
    edit, run = Edit(source, view), set(run)
    read = set(keep) - run
    for n in view:
        body = _body(view, n) if n.op in CALLS and n.attr(XLA) and n.name not in read else None
        if body is not None and all(_may_be_inlined(body, m, stitches) for m in body):
            _put_in(edit, n, body)
    if not edit.waits:
        return source
    out = edit.graph(run)
    assert isinstance(out, graph_pb2.GraphDef)
    return out


def _body(view: GraphView, call: NodeView) -> GraphView | None:
    f = call.attr("f")
    found = view.library.get(f.name) if isinstance(f, FuncRef) else None
    if found is None or found.signature.attr:
        return None
    shapes = {i: s for i, s in enumerate(map(view.shape, call.inputs)) if s is not None}
    handles = {i: s for i, r in enumerate(call.inputs) if (s := variable_shape(view, r)) is not None}
    return GraphView(found, view.library.values(), shapes, handles, view.calls)


def _may_be_inlined(body: GraphView, n: NodeView, stitches: Callable[[GraphView, NodeView], bool]) -> bool:
    if n.op in ARG_OPS or n.op in ("NoOp", "Const", READ):
        return True
    return not may_have_effects(n.op) and stitches(body, n)


def _put_in(edit: Edit, call: NodeView, body: GraphView) -> None:
    """Copies of the body's nodes; who waited for the call waits for the variables' having been read."""
    place: dict[Ref, Ref] = dict(zip([(name, 0) for name in body.args], call.inputs, strict=True))
    reads = []
    for n in body:
        if n.op in ARG_OPS or n.op == "NoOp":
            continue
        assert n.proto is not None and n.outputs is not None
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(n.proto)
        copy.device = call.device
        copy.attr.pop("_class", None)
        controls = call.control_inputs if n.op == READ else ()
        name = edit.add(copy, f"{call.name}/{n.name}", n.outputs, [place[r] for r in n.inputs], controls)
        place.update(((n.name, port), (name, port)) for port in range(len(n.outputs)))
        if n.op == READ:
            reads.append(name)
    edit.instead.update(((call.name, k), place[r]) for k, r in enumerate(body.rets))
    edit.waits[call.name] = (*reads, *call.control_inputs)
