"""Splits reductions that would leave most cores idle into two: partial results in parallel, then the rest.

A reduction to few elements (a loss, a bias gradient, batch statistics) has few independent results, so one
block, or a handful, would walk all of its operand.  Reducing all axes but one first, or slices of the one
axis, gives independent partial results; what is left is small.  Where a GPU has more cores than that axis has elements
(the images of a small batch), a second axis is cut into pieces.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Graph, Node, Shape
from ..ir.ops import OPS

SMALL_WORK = {True: 1 << 14, False: 1 << 16}  # elements that a GPU's block, a CPU's reduces while a kernel starts
ROW = 1 << 13  # elements of a row that the threads of a GPU's block load at once
PARTS = (16, 1024)  # how many partial results per result are worth having, if the axis can be cut so
STRADDLED = 1 << 8  # elements on both sides of a kept axis that a block's threads should share
GROUPS = 64  # kept elements that leave threads idle
LEAST = {True: 64, False: 1024}  # elements that a GPU's block folds of each of neighbouring results, of one


@dataclass(frozen=True)
class Cut:
    """An axis seen as two: so many pieces, and what a piece holds."""

    axis: int
    pieces: int

    def shape(self, shape: Shape) -> Shape:
        a = self.axis
        return (*shape[:a], self.pieces, D.static(shape[a]) // self.pieces, *shape[a + 1:])

    def place(self, axis: int) -> int:
        """Where an axis, or the first of the two, is then."""
        return axis + (axis > self.axis)


@dataclass(frozen=True)
class Steps:
    """``inner`` axes are folded first, ``kept`` ones then; both count as the cut has them."""

    kept: tuple[int, ...]
    inner: tuple[int, ...]
    cut: Cut | None = None


def split_reductions(graph: Graph, target: Any) -> Graph:
    """The same graph with every serial reduction in two steps.  Floats may round differently in the last place."""
    serial = {n: _steps(n, target) for n in graph.nodes() if n.op == "reduce" and is_serial(n, target)}
    finer = _finer(serial)

    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        if node in finer:
            return _view(_cut_up(node, inputs, finer[node]), node.shape)
        fresh = node.with_inputs(inputs)
        return split(fresh, target) if node in serial else fresh

    return graph.rebuild(one) if serial else graph


def is_serial(node: Node, target: Any) -> bool:
    """True when a reduction has too few results to keep the cores, or a block's threads, busy, and may be large."""
    if target.has_threads and _straddles(node) and _folded(node) >= STRADDLED:
        return True
    work, results = D.upper(node.inputs[0].size), node.size
    if not isinstance(results, int) or (isinstance(work, int) and work < SMALL_WORK[target.has_threads]):
        return False
    last_kept = node.inputs[0].rank - 1 not in node.attrs["axes"]
    if not last_kept and target.row_registers and _folded(node) <= ROW:
        return False
    panel = target.vector_bytes // DTYPES[node.dtype].size if last_kept else 1  # neighbours that go together
    return results < target.min_blocks * max(1, panel)


def _straddles(node: Node) -> bool:
    """True where few elements are kept between folded axes, for each of the first axis (groups of channels): a thread
    for each of them would fold alone."""
    axes, shape = node.attrs["axes"], node.inputs[0].shape
    kept = [a for a in range(1, len(shape)) if a not in axes]
    few = D.upper(D.product(shape[a] for a in kept))
    return 0 not in axes and any(min(axes) < a < max(axes) for a in kept) and isinstance(few, int) and few <= GROUPS


def _folded(node: Node) -> float:
    size = D.upper(D.product(node.inputs[0].shape[a] for a in node.attrs["axes"]))
    return size if isinstance(size, int) else math.inf


def split(node: Node, target: Any) -> Node:
    """``node`` in two steps when it is serial and its axes allow it."""
    steps = _steps(node, target) if is_serial(node, target) else None
    if steps is None:
        return node
    x, wide = node.inputs[0], _accumulator(node)
    x = _view(x, steps.cut.shape(x.shape)) if steps.cut else x
    x = x if wide == x.dtype else Node("cast", [x], {}, x.shape, wide, node.origin)
    out = _two_steps(node, x, steps)
    return out if wide == node.dtype else Node("cast", [out], {}, node.shape, node.dtype, node.origin)


def _steps(node: Node, target: Any) -> Steps | None:
    """How to fold the axes of a serial reduction in two steps; None where they do not allow it."""
    axes, shape = node.attrs["axes"], node.inputs[0].shape
    if len(axes) == 1:
        (a,) = axes
        parts = _parts(shape[a])
        return Steps((a,), (a + 1,), Cut(a, parts)) if parts else None
    outer = next((a for a in axes if _many(shape[a])), None)
    if outer is None:
        return None
    inner = tuple(a for a in axes if a != outer)
    cut = _second(node, outer, inner, target)
    if cut is None:
        return Steps((outer,), inner)
    kept = tuple(sorted((cut.place(outer), cut.axis)))
    return Steps(kept, tuple(sorted(a + 1 if a == cut.axis else cut.place(a) for a in inner)), cut)


def _second(node: Node, outer: int, inner: Sequence[int], target: Any) -> Cut | None:
    """The cut of a second axis that gives all cores of a GPU partial results; None where ``outer`` does."""
    shape = node.inputs[0].shape
    known = D.upper(shape[outer])
    if not target.has_threads or not isinstance(known, int) or not D.is_static(node.size):
        return None
    wanted = target.min_blocks // (max(1, known) * -(-D.static(node.size) // target.lanes))
    folded = D.upper(D.product(shape[a] for a in inner))
    most = folded // LEAST[len(shape) - 1 not in node.attrs["axes"]] if isinstance(folded, int) else math.inf
    pieces = {a: _pieces(shape[a], wanted, most) for a in inner}
    best = max(pieces, key=lambda a: (pieces[a], -abs(a - outer)))
    return Cut(best, pieces[best]) if pieces[best] > 1 else None


def _pieces(size: Dim, wanted: int, most: float) -> int:
    """The divisor of a known size that is nearest to what is wanted, of those that leave enough to fold."""
    if not D.is_static(size):
        return 1
    fitting = [k for k in range(1, D.static(size) + 1) if D.static(size) % k == 0 and k <= most]
    return min(fitting, key=lambda k: abs(k - wanted), default=1)


def _accumulator(node: Node) -> str:
    """Partial sums of half types stay float32: they are rounded once, as one reduction would."""
    d = DTYPES[node.dtype]
    return "float32" if d.is_float and d.size == 2 and node.attrs["kind"] in ("sum", "prod") else node.dtype


def _two_steps(node: Node, x: Node, steps: Steps) -> Node:
    """Neighbouring axes that are kept are one axis of the second step."""
    first = _reduce(node, x, steps.inner)
    left = [k - sum(a < k for a in steps.inner) for k in steps.kept]
    if len(left) > 1 and left[1] == left[0] + 1:
        a = left.pop(0)
        first = _view(first, (*first.shape[:a], first.shape[a] * first.shape[a + 1], *first.shape[a + 2:]))
        left = [a]
    return _reduce(node, first, left)


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


# --- cutting up what is folded ---------------------------------------------------------------------

def _finer(serial: Mapping[Node, Steps | None]) -> dict[Node, Cut]:
    """Elementwise values that are folded after a second axis was cut, and what they are made of.

    They are computed in the cut shape, so that a block that owns partial results owns what they are folded from too.
    """
    found: dict[Node, Cut] = {}
    for node, steps in serial.items():
        todo = [node.inputs[0]] if steps is not None and len(steps.kept) > 1 else []
        while todo:
            n = todo.pop()
            if n not in found and (OPS[n.op].elementwise or n.op in ("cast", "select", "broadcast")):
                assert steps is not None and steps.cut is not None
                found[n] = steps.cut
                todo.extend(() if n.op == "broadcast" else n.inputs)
    return found


def _cut_up(node: Node, inputs: Sequence[Node], cut: Cut) -> Node:
    """An elementwise node, or a broadcast, in the cut shape."""
    attrs = node.attrs
    if node.op == "broadcast":
        axes = attrs["axes"]
        inputs = [_view(x, Cut(axes.index(cut.axis), cut.pieces).shape(x.shape)) if cut.axis in axes else x
                  for x in inputs]
        attrs = {"axes": tuple(b for a in axes for b in ((a, a + 1) if a == cut.axis else (cut.place(a),)))}
    else:
        inputs = [_view(x, cut.shape(x.shape)) for x in inputs]
    return Node(node.op, inputs, attrs, cut.shape(node.shape), node.dtype, node.origin)


def _view(x: Node, shape: Shape) -> Node:
    """A value in another shape; a reshape of a reshape is one, or none."""
    while x.op == "reshape" and x.shape != shape:
        x = x.inputs[0]
    return x if x.shape == shape else Node("reshape", [x], {}, shape, x.dtype, x.origin)
