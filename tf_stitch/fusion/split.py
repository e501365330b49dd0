"""Splits reductions that would leave most cores idle into two: partial results in parallel, then the rest.

A reduction to few elements (a loss, a bias gradient, batch statistics) has few independent results, so one
block, or a handful, would walk all of its operand.  Reducing all axes but one first, or slices of the one
axis, gives independent partial results; what is left is small.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Graph, Node

SMALL_WORK = 1 << 16  # elements that one block reduces in less time than a second kernel takes
ROW = 1 << 13  # elements of a row that the threads of a GPU's block load at once
PARTS = (16, 1024)  # how many partial results per result are worth having, if the axis can be cut so


def split_reductions(graph: Graph, target: Any) -> Graph:
    """The same graph with every serial reduction in two steps.  Floats may round differently in the last place."""
    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        fresh = node.with_inputs(inputs)
        return split(fresh, target) if node.op == "reduce" else fresh

    return graph.rebuild(one) if any(n.op == "reduce" and is_serial(n, target) for n in graph.nodes()) else graph


def is_serial(node: Node, target: Any) -> bool:
    """True when a reduction has too few results to keep the cores busy, and may be large."""
    work, results = D.upper(node.inputs[0].size), node.size
    if not isinstance(results, int) or (isinstance(work, int) and work < SMALL_WORK):
        return False
    last_kept = node.inputs[0].rank - 1 not in node.attrs["axes"]
    if not last_kept and target.row_registers and _folded(node) <= ROW:
        return False
    panel = target.vector_bytes // DTYPES[node.dtype].size if last_kept else 1  # neighbours that go together
    return results < target.min_blocks * max(1, panel)


def _folded(node: Node) -> float:
    size = D.upper(D.product(node.inputs[0].shape[a] for a in node.attrs["axes"]))
    return size if isinstance(size, int) else math.inf


def split(node: Node, target: Any) -> Node:
    """``node`` in two steps when it is serial and its axes allow it."""
    axes = node.attrs["axes"]
    if not is_serial(node, target):
        return node
    x, wide = node.inputs[0], _accumulator(node)
    x = x if wide == x.dtype else Node("cast", [x], {}, x.shape, wide, node.origin)
    outer = next((a for a in axes if _many(x.shape[a])), None)
    if len(axes) > 1 and outer is not None:
        out = _two_steps(node, x, outer, [a for a in axes if a != outer])
    elif len(axes) == 1 and (parts := _parts(x.shape[axes[0]])):
        a = axes[0]
        cut = (*x.shape[:a], parts, x.shape[a] // parts, *x.shape[a + 1:])
        out = _two_steps(node, Node("reshape", [x], {}, cut, wide, node.origin), a, [a + 1])
    else:
        return node
    return out if wide == node.dtype else Node("cast", [out], {}, node.shape, node.dtype, node.origin)


def _accumulator(node: Node) -> str:
    """Partial sums of half types stay float32: they are rounded once, as one reduction would."""
    d = DTYPES[node.dtype]
    return "float32" if d.is_float and d.size == 2 and node.attrs["kind"] in ("sum", "prod") else node.dtype


def _two_steps(node: Node, x: Node, outer: int, inner: Sequence[int]) -> Node:
    first = _reduce(node, x, inner)
    return _reduce(node, first, [outer - sum(a < outer for a in inner)])


def _reduce(like: Node, x: Node, axes: Sequence[int]) -> Node:
    shape = [d for i, d in enumerate(x.shape) if i not in axes]
    return Node("reduce", [x], {**like.attrs, "axes": tuple(axes)}, shape, x.dtype, like.origin)


def _many(d: Dim) -> bool:
    return not isinstance(d, int) or d >= PARTS[0] // 2


def _parts(d: Dim) -> int | None:
    """The divisor of a known dim nearest to the middle of PARTS, None when there is none in it."""
    if not D.is_static(d):
        return None
    low, high = PARTS
    fitting = [k for k in range(low, min(high, int(d)) + 1) if int(d) % k == 0]
    return min(fitting, key=lambda k: abs(k - 128), default=None)
