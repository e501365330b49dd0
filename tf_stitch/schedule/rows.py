"""Row chains: stages of a block that hand over rows in registers instead of shared memory.

Softmax, normalisation and the like fold every row and read it again.  When all stages share the rows out to threads in
the same way, a thread only reads back what it wrote itself: no memory and no barrier is needed, only the folds join.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import dims as D
from ..ir.dtypes import DTYPES
from ..ir.graph import Node
from .kernel_schedule import OUT, SHARED, Item, RowChain, Stage
from .labels import Reads
from .storage import SOURCES
from .target import Target
from .tile import guess, power_of_two

USUAL = 32  # elements of a row that a thread has at most, unless the row needs more: enough loads in flight
SHORT = 32  # rows shorter than this stay in the general form
SEGMENT = 128  # bytes that the threads of a short row read at once
WIDE = 16  # bytes of the widest access
INLINE = SOURCES - {"param"}


def row_chains(stages: Sequence[Stage], reads: Reads, kept: set[Node], target: Target) -> list[RowChain]:
    """The row chains among the stages of a block that keep the values in ``kept``, in order."""
    if not target.row_registers:
        return []
    chains: list[RowChain] = []
    run: list[Stage] = []
    for s in [*stages, None]:
        if s is not None and _continues(run, s, reads, kept):
            run.append(s)
            continue
        chain = _chain(run, reads, kept, target) if run else None
        chains += [chain] if chain else []
        run = [s] if s is not None and _is_whole(s) else []
    return chains


def in_registers(chains: Sequence[RowChain], stages: Sequence[Stage]) -> set[Node]:
    """Staged values that no stage outside their chain reads: they need no shared memory."""
    found: set[Node] = set()
    for c in chains:
        inside = {id(s) for s in c.stages}
        elsewhere = {n for s in stages if id(s) not in inside for n in s.reads}
        elsewhere |= {i.node for s in stages if id(s) not in inside for i in s.items}
        found |= {i.node for s in c.stages for i in s.items if i.space == SHARED and i.node not in elsewhere}
    return found


def _is_whole(s: Stage) -> bool:
    """True for a stage over whole rows of known length that folds them, if anything, to one value each."""
    if s.hoisted or s.once or not s.shape or s.kind not in ("map", "fold"):
        return False
    lane = len(s.shape) - 1
    size = s.shape[lane]
    return (isinstance(size, int) and size >= SHORT and s.box[lane] == (0, size)
            and s.folded == ((lane,) if s.kind == "fold" else ()) and all(_is_plain(i, lane) for i in s.items))


def _is_plain(i: Item, lane: int) -> bool:
    """True when an item writes the value at its stage's own index, or a row's fold at the row's.

    A staged transpose goes through shared memory for the sake of its other side.
    """
    if i.node.op == "transpose" and i.space == SHARED:
        return False
    if i.node.op == "reduce" and not i.copy:
        return i.body is i.node and i.mapped == tuple(range(lane))
    return i.body is i.node and not i.shift and i.mapped == tuple(range(lane + 1))


def _is_per_row(s: Stage, first: Stage) -> bool:
    """True for a stage with one value for each row of ``first``."""
    return (s.kind == "map" and not s.hoisted and not s.once and (s.shape, s.box) == (first.shape[:-1], first.box[:-1])
            and all(_is_plain(i, len(s.shape) - 1) for i in s.items))


def _continues(run: Sequence[Stage], s: Stage, reads: Reads, kept: set[Node]) -> bool:
    """True when a stage shares rows with those before and reads what they made only at its own index."""
    if not run:
        return False
    first = run[0]
    if not (_is_whole(s) and (s.shape, s.box) == (first.shape, first.box)) and not _is_per_row(s, first):
        return False
    made = {i.node for t in run for i in t.items}
    return all(labels == tuple(range(x.rank)) for i in s.items for x, labels in reads.of(i, kept) if x in made)


def _chain(run: Sequence[Stage], reads: Reads, kept: set[Node], target: Target) -> RowChain | None:
    """The chain of some stages, or None when it does not pay or its rows do not fit in registers."""
    first = run[0]
    if len(run) == 1 and first.kind == "map":
        return None
    whole = tuple(range(len(first.shape)))
    spans: dict[Node, list[int]] = {}  # first and last stage that has a row in hand
    made: set[Node] = set()
    stored = {i.node for s in run for i in s.items if i.space == OUT and not i.copy}
    moved = {i.node for s in run for i in s.items if i.space == OUT and i.mapped == whole}
    for k, s in enumerate(run):
        for x, labels in (r for i in s.items for r in reads.of(i, kept)):
            if labels == whole and (x in made or (x not in reads.members and x.op not in INLINE)):
                spans.setdefault(x, [k, k])[1] = k
        for i in s.items:
            made.add(i.node)
            if i.mapped == whole:
                spans.setdefault(i.node, [k, k])
    moved |= spans.keys() - made
    widest = max((DTYPES[n.dtype].size for n in moved), default=4)
    need = {n: span for n, span in spans.items() if span[0] < span[1]}
    while True:
        room = target.row_registers // max(*_words(need, len(run)), 1)
        lanes, neighbours, elements = _lanes(first, widest, room, target)
        if elements <= room or not need:
            held = {n: span[0] for n, span in need.items()}
            return RowChain(tuple(run), held, lanes, neighbours, elements <= room)
        again = [n for n in need if n not in made or n in stored]  # these can also be loaded again
        if not again:
            return None
        del need[again[-1]]


def _words(need: dict[Node, list[int]], stages: int) -> list[int]:
    """Registers that an element of a row takes between a stage and the next."""
    return [sum(max(DTYPES[n.dtype].size // 4, 1) for n, (a, b) in need.items() if a <= k < b) for k in range(stages)]


def _lanes(first: Stage, widest: int, room: int, target: Target) -> tuple[int, int, int]:
    """Threads per row, the neighbours that each takes at a time, and how many elements of a row it has."""
    size = D.static(first.shape[-1])
    neighbours = math.gcd(size, WIDE // widest)
    runs = size // neighbours
    rows = max(guess(D.product(ext for _, ext in first.box[:-1])), 1)
    least = max(-(-size // min(max(room, 1), USUAL)), target.threads // power_of_two(rows),
                SEGMENT // (neighbours * widest), 1)
    lanes = min(power_of_two(least), power_of_two(runs), target.lanes)
    if least > target.lanes and 2 * runs >= target.threads:
        lanes = target.threads  # a warp or all of the block: what lies between would need barriers of its own
    return lanes, neighbours, -(-runs // lanes) * neighbours
