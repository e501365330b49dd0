"""The iteration domain of a kept value: which loops compute it, and which of them fold."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Node, Shape
from . import rules
from .rules import Box


@dataclass(frozen=True)
class Domain:
    """Loops that compute a node: sizes, the box for a result box, folded dims, and the dim of every result dim."""

    kind: str
    shape: Shape
    box: Box
    folded: tuple[int, ...]
    mapped: tuple[int, ...]


def _extend(node: Node, box: Box, sizes: Shape, kind: str = "fold") -> Domain:
    """Loops over the result, then over the contracted dims."""
    n = node.rank
    return Domain(kind, (*node.shape, *sizes), (*box, *rules.full(sizes)), tuple(range(n, n + len(sizes))),
                  tuple(range(n)))


def domain(node: Node, box: Box) -> Domain:
    """The loops that compute ``box`` of a node kept in memory."""
    if node.op in ("reduce", "arg_reduce"):
        source = node.inputs[0]
        folded = tuple(rules.reduced_axes(node))
        kept = tuple(d for d in range(source.rank) if d not in folded)
        kind = "fold" if node.op == "reduce" else "arg"
        return Domain(kind, source.shape, rules.operand_boxes(node, box)[0], folded, kept)
    if node.op == "scan":
        whole = rules.operand_boxes(node, box)[0]
        return Domain("scan", node.shape, whole, (node.attrs["axis"],), tuple(range(node.rank)))
    if node.op == "order":  # every element is compared with all of its row
        return _extend(node, box, node.shape[-1:], "order")
    if node.op == "segment":
        return Domain("segment", node.shape, box, (), tuple(range(node.rank)))
    if node.op == "dot":
        return _extend(node, box, tuple(node.inputs[0].shape[a] for a in node.attrs["contract"][0]))
    if node.op in ("conv", "conv_filter"):
        return _extend(node, box, node.inputs[1].shape[:-1])
    if node.op == "window":
        return _extend(node, box, tuple(node.attrs["size"]))
    return Domain("map", node.shape, box, (), tuple(range(node.rank)))
