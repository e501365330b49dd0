"""The schedule language: how the dims of a root are cut into thread blocks.

A FusionStitching schedule (arXiv 1811.05213, section 4) is ``(split_dim, sword, sched_type)``.  Row: the dims
left of split_dim and ``split_dim / sword`` make the blocks, the block owns the rest; Column is the mirror image.
Here both are cases of a *tile*: one chunk per dim, None where the block owns the whole dim.  A tile can also cut
two dims at once, which is what keeps both sides of a transpose in whole cache lines.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir import dims as D
from ..ir.dims import Dim, Expr
from ..ir.graph import Shape

Tile = tuple[int | None, ...]
Tags = tuple[int | None, ...]
SAMPLES = 5  # blocks that are looked at where a block's work differs from block to block
BEYOND = 8  # sizes are reckoned to be so many times the least one, where that is large
GUESS = 128  # a size to reckon with where a dim is unknown; only speed depends on it


@dataclass(frozen=True)
class Schedule:
    """``(split_dim, sword, sched_type)`` of a root; ``sched_type`` is "Row" or "Column"."""

    split_dim: int
    sword: int
    sched_type: str = "Row"

    def tile(self, shape: Shape) -> Tile:
        """The chunk of every dim."""
        def chunk(d: int) -> int | None:
            if d == self.split_dim:
                return self.sword
            outside = d < self.split_dim if self.sched_type == "Row" else d > self.split_dim
            return 1 if outside else None

        return tuple(chunk(d) for d in range(len(shape)))


@dataclass(frozen=True)
class Axis:
    """One cut dim of the root: ``number`` names it, blocks along it own ``chunk`` elements each.

    There are at least ``least`` blocks: 1 where the first block also writes an output that lacks the dim, and
    must do so when the dim is empty.
    """

    number: int
    size: Dim
    chunk: int
    least: int = 0

    @functools.cached_property
    def block(self) -> Expr:
        """The block's index along this axis."""
        return D.symbol(f"ts_b{self.number}", 0, self.count - 1)

    @functools.cached_property
    def count(self) -> Dim:
        """Blocks along this axis."""
        count = D.ceildiv(self.size, self.chunk)
        return D.dmax(count, self.least) if self.least else count

    @functools.cached_property
    def offset(self) -> Dim:
        """The first element that the block owns."""
        return self.block * self.chunk

    @functools.cached_property
    def ragged(self) -> bool:
        """True when the last block may own fewer than ``chunk`` elements."""
        maybe_empty = self.least > 0 and not D.prove_le(1, self.size)
        return maybe_empty or D.mod(self.size, self.chunk) != 0

    @functools.cached_property
    def extent(self) -> Dim:
        """Elements that the block owns: ``chunk``, or a symbol when the last block is ragged."""
        return D.symbol(f"ts_e{self.number}", 0 if self.least else 1, self.chunk) if self.ragged else self.chunk


def guess(d: Dim, sizes: Mapping[str, int] | None = None) -> int:
    """A number for a dim: its value, or what it is when every unknown is what ``sizes`` says, else GUESS."""
    if isinstance(d, int):
        return d
    return D.evaluate(d, _guesses(d, sizes)) if sizes else _usual(d)


@functools.lru_cache(maxsize=1 << 14)
def _usual(d: Expr) -> int:
    return D.evaluate(d, _guesses(d, None))


def largest(d: Dim) -> int:
    """A number for a dim as :func:`guess` gives, for the sampled block that has the most of it."""
    if isinstance(d, int):
        return d
    usual = _guesses(d, None)
    last = {name: n for name, n in usual.items() if name.startswith("ts_b")}
    if not last:
        return D.evaluate(d, usual)
    return max(D.evaluate(d, usual | {name: n * k // (SAMPLES - 1) for name, n in last.items()})
               for k in range(SAMPLES))


def _guesses(d: Expr, sizes: Mapping[str, int] | None) -> dict[str, int]:
    """A number for every symbol of an expression, within its bounds."""
    env = {}
    for s in D.symbols(d):
        size = (sizes or {}).get(s.name, max(GUESS, BEYOND * (s.lo or 0)))
        hi = s.hi if isinstance(s.hi, int) else size
        env[s.name] = max(min(size, hi), s.lo or 0)
    return env


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def samples(axes: Sequence[Axis], sizes: Mapping[str, int] | None = None) -> list[dict[str, int]]:
    """Blocks that stand for all: a box may differ from block to block (the pieces of a concat)."""
    extents = {f"ts_e{a.number}": max(min(a.chunk, guess(a.size, sizes)), 1) for a in axes}
    last = {f"ts_b{a.number}": max(guess(a.count, sizes) - 1, 0) for a in axes}
    return [extents | {name: block * k // (SAMPLES - 1) for name, block in last.items()} for k in range(SAMPLES)]


def mean(d: Dim, envs: Sequence[Mapping[str, int]], sizes: Mapping[str, int] | None = None) -> int:
    """The mean of a dim over sampled blocks."""
    if isinstance(d, int):
        return d
    if not any(s.name.startswith("ts_b") for s in D.symbols(d)):
        envs = envs[:1]
    usual = _guesses(d, sizes)
    return sum(D.evaluate(d, {**usual, **env}) for env in envs) // len(envs)


def axes_of(shape: Shape, tile: Tile) -> list[Axis | None]:
    """The axis of every dim; None where the block owns the whole dim."""
    numbers = itertools.count()
    return [None if c is None or (isinstance(s, int) and c >= s) else Axis(next(numbers), s, c)
            for s, c in zip(shape, tile, strict=True)]


def fill(shape: Shape, elements: int, whole: Sequence[int] = (), wide: Sequence[int] = (), least: int = 1) -> Tile:
    """A tile of about ``elements`` elements.

    Dims in ``whole`` are not cut; dims in ``wide`` (contiguous in some operand) get at least ``least`` elements; what
    is left goes to the dims from the last to the first, so that a block owns contiguous memory.
    """
    chunks: list[int | None] = [1] * len(shape)
    have = 1
    for d in whole:
        chunks[d], have = None, have * max(guess(shape[d]), 1)
    for d in wide:
        if chunks[d] is not None:
            chunks[d] = min(least, max(guess(shape[d]), 1)) if isinstance(shape[d], int) else least
            have *= chunks[d] or 1
    for d in reversed(range(len(shape))):
        if chunks[d] is None:
            continue
        start = chunks[d] or 1
        room = max(elements * start // have, 1)
        size = shape[d]
        if isinstance(size, int) and room >= size:
            chunks[d] = None
            have = have // start * max(size, 1)
        else:
            chunk = max(_round(room, size), start)
            chunks[d] = chunk
            have = have // start * (chunk if isinstance(size, int) else min(chunk, GUESS))
    return tuple(chunks)


def _round(room: int, size: Dim) -> int:
    """A chunk near ``room``: a power of two, or an even share of a static size."""
    power = 1 << (room.bit_length() - 1)
    if isinstance(size, int) and size > 0:
        for count in range(-(-size // room), 2 * -(-size // room) + 1):
            if size % count == 0 and (size // count) * 4 >= room * 3:
                return size // count
    return power


def candidates(shape: Shape, elements: int, wide: Sequence[int], least: int) -> Iterator[Tile]:
    """Tiles to try, best guess first: nothing forced, one dim whole, Row forms, Column forms, one block."""
    n = len(shape)
    seen: set[Tile] = set()
    whole_sets = [(), *((d,) for d in reversed(range(n))), *(tuple(range(n - k, n)) for k in range(2, n)),
                  *(tuple(range(k)) for k in range(2, n)), tuple(range(n))]
    for whole in whole_sets:
        tile = fill(shape, elements, whole, wide, least)
        if tile not in seen:
            seen.add(tile)
            yield tile


PANELS = (16, 32, 64)  # columns of a product that a block may own
FEW_ROWS = 16  # rows that one block may own although fewer would do for all cores to have one
MANY_ROWS = (64, 128, 256)  # of which a core may take several blocks one after the other: the last ones end together
SMALLER = (2, 4, 8)  # by these, rows of a block are fewer where there may be fewer than are reckoned with


def product_tiles(shape: Shape, cores: int, whole_rows: bool = False) -> Iterator[Tile]:
    """Tiles for products on a GPU: some columns, or whole rows, and as many rows as give every core a block."""
    if not shape:
        return
    *lead, columns = shape
    rows = max(guess(D.product(lead)), 1)
    for panel in (None,) if whole_rows else (*PANELS, None):
        if panel is not None and panel >= guess(columns):
            continue
        across = 1 if panel is None else -(-guess(columns) // panel)
        share = max(-(-rows * across // cores), 1)
        chunk = power_of_two(share)
        known = all(isinstance(d, int) for d in lead)  # else there may be fewer rows, and all cores should have some
        fewer = () if known else (max(chunk // k, 1) for k in SMALLER)
        turns = (k for k in MANY_ROWS if k < chunk)
        for many in sorted({chunk, min(2 * chunk, rows), min(max(chunk, FEW_ROWS), rows), *fewer, *turns}):
            yield (*_rows(lead, many), panel)


def _rows(lead: Sequence[Dim], chunk: int) -> Tile:
    """A tile over the row dims of about ``chunk`` rows: the last dims first."""
    out: list[int | None] = []
    for size in reversed(lead):
        known = max(guess(size), 1)
        whole = isinstance(size, int) and size <= chunk
        out.insert(0, None if whole else max(min(chunk, known), 1))
        chunk = max(chunk // known, 1) if whole else 1
    return tuple(out)
