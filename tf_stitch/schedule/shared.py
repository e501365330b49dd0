"""Shared-memory planning: where each staged value lies, and which values share space.

Space is shared by liveness (FusionStitching, arXiv 1811.05213, section 5.1.3): a slot is free again after the
last stage that reads it.  The stages of a row chain are one in time: threads that have rows of their own do not wait
for each other between them.  Hoisted values live through all blocks.  Slots of unknown size come last and share
nothing; on a GPU, a slot of a size that has a bound gets room for the most.
"""
from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Mapping, Sequence

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Node, Shape
from .kernel_schedule import SHARED, RowChain, Slot, Stage
from .rules import Box

ALIGN = 64


def plan_shared(stages: Sequence[Stage], boxes: Mapping[Node, Box],
                elsewhere: Collection[Node] = (), across: Collection[Node] = (),
                chains: Sequence[RowChain] = (), for_most: bool = False) -> tuple[dict[Node, Slot], Dim]:
    """A slot for every staged value that is not kept ``elsewhere``, and the bytes that a block needs.

    Rows of values in ``across`` are one element apart: neighbours of a column lie in different banks.  With
    ``for_most``, unknown dims are taken as large as they can be.
    """
    life = {n: span for n, span in _lifetimes(stages, chains).items() if n not in elsewhere}
    placed: list[tuple[int, int, int, int]] = []  # offset, bytes, first stage, last stage
    slots: dict[Node, Slot] = {}
    unknown: list[tuple[Node, Shape, Dim]] = []
    top = 0
    for n, (first, last) in life.items():
        room = room_of(n, boxes[n])
        room = tuple(map(_bound, room)) if for_most else room
        room = (*room[:-1], room[-1] + 1) if n in across else room
        size = D.product(room) * compute_size(n)
        if not isinstance(size, int):
            unknown.append((n, room, size))
            continue
        size = _align(size)
        offset = _first_fit(placed, size, first, last)
        bisect.insort(placed, (offset, size, first, last))
        slots[n] = Slot(offset, boxes[n], room, n.dtype)
        top = max(top, offset + size)
    total: Dim = top
    for n, room, size in unknown:
        slots[n] = Slot(total, boxes[n], room, n.dtype)
        total = total + D.ceildiv(size, ALIGN) * ALIGN
    return slots, total


def compute_size(n: Node) -> int:
    """Bytes of an element in shared memory: half types are kept as float32."""
    return 4 if DTYPES[n.dtype].compute == "float" else DTYPES[n.dtype].size


def _lifetimes(stages: Sequence[Stage], chains: Sequence[RowChain]) -> dict[Node, tuple[int, int]]:
    """The first and last stage in which each staged value is in use."""
    life: dict[Node, tuple[int, int]] = {}
    spans = _spans(stages, chains)
    for (first, last), s in zip(spans, stages, strict=True):
        for item in s.items:
            if item.space == SHARED:
                life[item.node] = (0, len(stages)) if s.hoisted else _hull((first, last), life.get(item.node))
    for span, s in zip(spans, stages, strict=True):
        for n in s.reads:
            if n in life:
                life[n] = (life[n][0], max(life[n][1], span[1]))
    return life


def _spans(stages: Sequence[Stage], chains: Sequence[RowChain]) -> list[tuple[int, int]]:
    """For each stage the stages that run while it does, first and last: itself, or its chain."""
    at = {id(s): k for k, s in enumerate(stages)}
    spans = [(k, k) for k in range(len(stages))]
    for c in chains:
        first, last = at[id(c.stages[0])], at[id(c.stages[-1])]
        spans[first:last + 1] = [(first, last)] * (last + 1 - first)
    return spans


def _hull(a: tuple[int, int], b: tuple[int, int] | None) -> tuple[int, int]:
    return a if b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _first_fit(placed: Sequence[tuple[int, int, int, int]], size: int, first: int, last: int) -> int:
    """The lowest offset that no value alive at the same time covers; ``placed`` is in order."""
    offset = 0
    for o, b, f, l in placed:
        if f <= last and first <= l:
            if offset + size <= o:
                break
            offset = max(offset, o + b)
    return offset


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def room_of(n: Node, box: Box) -> Shape:
    """The most elements that a block's box has along every dim."""
    return tuple(_most(ext, size) for (_, ext), size in zip(box, n.shape, strict=True))


def _bound(d: Dim) -> Dim:
    """The most that a dim can be where that is a number, else the dim."""
    most = D.upper(d)
    return most if isinstance(most, int) else d


@functools.lru_cache(maxsize=1 << 12)
def _most(ext: Dim, size: Dim) -> Dim:
    limits = {s.name: s.hi for s in D.symbols(ext) if s.name.startswith("ts_e") and s.hi is not None}
    if any(s.name.startswith("ts_b") for s in D.symbols(ext)):
        bound = D.upper(ext)
        return size if bound is None or any(s.name.startswith("ts_") for s in D.symbols(bound)) else D.dmin(bound, size)
    return D.substitute(ext, limits)
