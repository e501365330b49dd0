"""Branches that are so cheap that both are computed, and the results of one are taken.

A condition on data makes TensorFlow, and XLA, wait for the device before they know what to run next.  What a branch
that is not taken computes is read by nobody; where it would be an error, as an index out of range, it is not computed.
"""
from __future__ import annotations

import math

from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import ARG_OPS, FuncRef, GraphView, NodeView
from .context import Context
from .registry import BOOL, is_contraction, is_literal, is_metadata, lower, why_not

MOST_OPS = 40           # of a branch
MOST_WEIGHTS = 1 << 20  # elements of what a branch multiplies by
MAY_FAIL = frozenset({"Gather", "GatherV2", "GatherNd", "SparseSoftmaxCrossEntropyWithLogits",
                      "QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3", "QuantizeAndDequantizeV4"})
INTEGER_MAY_FAIL = frozenset({"FloorDiv", "FloorMod", "Div", "Mod", "TruncateDiv", "TruncateMod", "Pow"})
BRANCHES = ("then_branch", "else_branch")


def too_much(view: GraphView, nodes: list[NodeView]) -> str | None:
    """Why these nodes of a branch are not to be computed where it is not taken; None when they may be."""
    count = 0
    for n in nodes:
        reason = why_not(view, n)
        if reason is None and (n.op in MAY_FAIL or (n.op in INTEGER_MAY_FAIL and _is_integer(view, n))):
            reason = "it may be an error"
        if reason is None and is_contraction(n.op) and _weights(view, n) > MOST_WEIGHTS:
            reason = "it is a large product"
        if reason is not None:
            return f"of '{n.name}' ({n.op}): {reason}"
        count += not is_metadata(n.op)
    return f"of {count} ops: that many" if count > MOST_OPS else None


def _is_integer(view: GraphView, n: NodeView) -> bool:
    return not DTYPES[view.dtype((n.name, 0))].is_float


def _weights(view: GraphView, n: NodeView) -> float:
    shape = view.shape(n.inputs[1])
    if n.op not in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedMatMul", "Einsum") \
            or shape is None or None in shape:
        return math.inf
    return math.prod(d for d in shape if d is not None)


def bodies(view: GraphView, node: NodeView) -> list[GraphView] | None:
    """Views of both branches; None where one is not known."""
    found = [view.library.get(f.name) if isinstance(f, FuncRef) else None for f in map(node.attr, BRANCHES)]
    if any(f is None or f.signature.attr or f.control_ret for f in found):
        return None
    shapes = {i: s for i, s in enumerate(map(view.shape, node.inputs[1:])) if s is not None}
    return [GraphView(f, view.library.values(), shapes, calls=view.calls) for f in found]


def body_nodes(view: GraphView) -> list[NodeView]:
    """What a branch computes; constants that are no literals are told by :func:`why_not`."""
    return [n for n in view if n.op not in ARG_OPS and not is_literal(view, n) and n.op != "NoOp"]


def _dear(view: GraphView, node: NodeView) -> str | None:
    if view.shape(node.inputs[0]) != ():
        return "the condition may not be one truth value"
    branches = bodies(view, node)
    if branches is None:
        return "a branch is not known"
    reasons = [too_much(b, body_nodes(b)) for b in branches]
    reason = next((r for r in reasons if r is not None), None)
    return None if reason is None else f"only the branch that is taken is computed, because {reason}"


@lower("StatelessIf", kinds=BOOL, check=_dear, on_gpu=True)
def stateless_if(c: Context, condition: Node, *args: Node) -> list[Node]:
    """Both branches, and the results of the one that is taken; they are taken to agree in shape."""
    from ..importer import import_body  # the walk needs the table of lowerings

    then, other = (import_body(view, c.b, args) for view in bodies(c.view, c.node) or ())
    results = []
    for x, y in zip(then, other, strict=True):
        if x.rank != y.rank:
            c.fail("its branches give results of different rank")
        shape = tuple(c.b.same_dim(a, b, f"{c.node.name}: its branches agree") for a, b in
                      zip(x.shape, y.shape, strict=True))
        results.append(c.b.select(condition, c.b.reshape(x, shape), c.b.reshape(y, shape)))
    return results
