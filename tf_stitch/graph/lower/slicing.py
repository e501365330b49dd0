"""StridedSlice's masks, and what they take from each dim."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim

if TYPE_CHECKING:
    from .context import Context


@dataclass(frozen=True)
class Span:
    """What is taken of one dim: ``count`` elements from ``start``, every ``step``-th, after flipping if ``reverse``."""

    start: Dim
    count: Dim
    step: int
    reverse: bool


@dataclass(frozen=True)
class Spans:
    """``axes``: a span per input dim; ``form``: the result's dims in order, an axis number or None for a new dim."""

    axes: list[Span]
    form: list[int | None]

    def result(self, taken: Sequence[Dim]) -> list[Dim]:
        """The result's shape, given the dims after slicing."""
        return [1 if a is None else taken[a] for a in self.form]


@dataclass(frozen=True)
class Entry:
    """One entry of a slice spec that stands for a dim of the input (``index``: its position in begin/end/strides)."""

    index: int | None  # None: the whole dim
    shrink: bool = False


def layout(attr, count: int, rank: int) -> tuple[list[Entry], list[int | None]]:
    """How the ``count`` entries of a spec map to ``rank`` dims: an entry per dim, and the result's form.

    ``attr`` reads the five masks.
    """
    new, shrink, ellipsis = (int(attr(m, 0)) for m in ("new_axis_mask", "shrink_axis_mask", "ellipsis_mask"))
    used = sum(1 for i in range(count) if not (new >> i & 1) and not (ellipsis >> i & 1))
    entries: list[Entry] = []
    form: list[int | None] = []
    for i in range(count):
        if ellipsis >> i & 1:
            for _ in range(rank - used):
                form.append(len(entries))
                entries.append(Entry(None))
        elif new >> i & 1:
            form.append(None)
        else:
            single = bool(shrink >> i & 1)
            if not single:
                form.append(len(entries))
            entries.append(Entry(i, single))
    while len(entries) < rank:
        form.append(len(entries))
        entries.append(Entry(None))
    return entries, form


def spans(c: Context, dims: Sequence[Dim], begin: np.ndarray, end: np.ndarray, strides: np.ndarray) -> Spans:
    """The spans of a StridedSlice over a tensor of shape ``dims``; guards what symbolic bounds leave open."""
    entries, form = layout(c.attr, int(begin.size), len(dims))
    begin_mask, end_mask = int(c.attr("begin_mask", 0)), int(c.attr("end_mask", 0))
    axes = []
    for d, e in zip(dims, entries, strict=True):
        if e.index is None:
            axes.append(Span(0, d, 1, False))
            continue
        i = e.index
        first = None if begin_mask >> i & 1 else begin.reshape(-1)[i]
        last = None if end_mask >> i & 1 else end.reshape(-1)[i]
        step = int(strides.reshape(-1)[i])
        axes.append(_single(c, d, first) if e.shrink else _span(c, d, first, last, step))
    return Spans(axes, form)


def _single(c: Context, d: Dim, index: Dim | None) -> Span:
    """One element; out of range is an error in TensorFlow."""
    at: Dim = 0 if index is None else index
    if D.is_static(at):
        at = at + d if at < 0 else at
    c.b.require("le", 0, at, f"{c.node.name}: an index is not negative")
    c.b.require("le", at + 1, d, f"{c.node.name}: an index is inside its dim")
    return Span(c.b.resolve(at), 1, 1, False)


def _span(c: Context, d: Dim, first: Dim | None, last: Dim | None, step: int) -> Span:
    if step == 0:
        raise ZeroDivisionError("a stride of a slice is 0")
    if step > 0:
        start = 0 if first is None else _bound(c, d, first)
        stop = d if last is None else _bound(c, d, last)
    else:  # the same, seen from the other end
        start = 0 if first is None else _from_end(c, d, first)
        stop = d if last is None else _from_end(c, d, last)
    start, stop, d = (c.b.resolve(v) for v in (start, stop, d))
    span = stop - start
    if D.is_static(span):
        span = max(span, 0)
    else:
        c.b.require("le", 0, span, f"{c.node.name}: a slice ends after its start")
    return Span(start, D.ceildiv(c.b.resolve(span), abs(step)), abs(step), step < 0)


def _bound(c: Context, d: Dim, at: Dim) -> Dim:
    """A start or stop, counted from the front, clamped to the dim."""
    if D.is_static(d) and D.is_static(at):
        return min(max(at + d if at < 0 else at, 0), d)
    if D.is_static(at):
        return _clamp_low(c, d + at) if at < 0 else _clamp_high(c, at, d)
    c.b.require("le", 0, at, f"{c.node.name}: a slice bound is not negative")
    c.b.require("le", c.b.resolve(at), d, f"{c.node.name}: a slice bound is inside its dim")
    return c.b.resolve(at)


def _from_end(c: Context, d: Dim, at: Dim) -> Dim:
    """A start or stop of a backward slice, counted from the last element."""
    if D.is_static(d) and D.is_static(at):
        return d - 1 - min(max(at + d if at < 0 else at, -1), d - 1)
    if D.is_static(at) and at < 0:
        return _clamp_high(c, -1 - at, d)
    c.b.require("le", 0, at, f"{c.node.name}: a slice bound is not negative")
    c.b.require("le", at + 1, d, f"{c.node.name}: a slice bound is inside its dim")
    return d - 1 - c.b.resolve(at)


def _clamp_low(c: Context, at: Dim) -> Dim:
    """``max(at, 0)`` of ``dim - k``: the dim is taken to be large enough."""
    c.b.require("le", 0, at, f"{c.node.name}: a slice bound is inside its dim")
    return c.b.resolve(at)


def _clamp_high(c: Context, at: int, d: Dim) -> Dim:
    """``min(at, dim)``: for 1 the dim is taken to be large enough, else both cases are common."""
    if at == 1:
        c.b.require("le", 1, d, f"{c.node.name}: a slice bound is inside its dim")
        return 1
    return D.dmin(at, d)
