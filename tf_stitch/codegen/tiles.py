"""Products on a GPU: the threads of a block share out register tiles of the result and ranges of the folded dim.

A tile is a few rows (a free dim of the left operand) by a few columns (a free dim of the right one): every element
that a thread reads then takes part in several products.  Where a block has fewer tiles than threads, several threads
share a tile: each folds every so many-th run of elements, and their sums are added, always in the same order.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Node, topological
from ..ir.ops import OPS
from ..schedule import rules
from ..schedule.labels import body_operands, operand_labels
from ..schedule.products import is_product
from ..schedule.rules import Index
from ..schedule.tile import guess, largest, power_of_two
from . import contract
from .text import compute_type
from .values import evaluate, looked_up_piece, position_in_piece, seen, table_of

if TYPE_CHECKING:
    from .loops import Loops

CHAIN = 128  # the most products that one float32 accumulator chain sums before it is added to another
WIDE = 4  # elements of one wide access
ACCESSES = (2, 4, 8)  # elements that wide accesses can read; three neighbours are read one by one
SUMS = 32  # sums of all items that a thread keeps in registers, at most
ROWS, MANY_ROWS = 8, 16  # of a tile, at most, where a block has so many
LOADS = 96  # elements that a thread loads before it folds them, at most
ACROSS = 8  # threads that read one row together where the folded dim is the contiguous one: a cache line


@dataclass(frozen=True)
class Split:
    """How a block's threads share a stage.

    Attributes:
      rows, columns: of a tile; ``sharing`` threads fold a tile together, ``stride`` threads apart.
      run: neighbouring elements of the folded dim that a thread takes at a time.
    """

    rows: int
    columns: int
    sharing: int
    stride: int
    run: int


@dataclass(frozen=True)
class Plan:
    """The dims of a stage's products: ``row`` and ``column`` are tiled (None: there is no such loop), ``along`` is
    folded in runs, ``outer`` and ``folded`` are the other loops."""

    row: int | None
    column: int | None
    outer: tuple[int, ...]
    along: int
    folded: tuple[int, ...]
    split: Split


def plan(loops: Loops) -> Plan | None:
    """How to compute a stage that holds nothing but products with the same loops; None for any other stage."""
    stage, target = loops.stage, loops.e.kernel.target
    nodes = [i.node for i in stage.items]
    if target.is_host or stage.kind != "fold" or not all(map(is_product, stage.items)):
        return None
    first = nodes[0]
    if any((n.dtype, n.attrs["batch"], n.attrs["contract"]) != (first.dtype, first.attrs["batch"],
           first.attrs["contract"]) or [x.rank for x in n.inputs] != [x.rank for x in first.inputs] for n in nodes):
        return None
    folded = [d for d in loops.loops if d in stage.folded]
    if not folded:
        return None
    return _plan(loops, first, folded)


def _plan(loops: Loops, dot: Node, folded: list[int]) -> Plan:
    size = [largest(ext) for _, ext in loops.box]
    owner = {here: k for k, _, here in rules.ties(dot)}
    batch = set(range(len(dot.attrs["batch"][0])))
    free = [[d for d in loops.loops if d not in batch and owner.get(d) == k] for k in (0, 1)]
    contiguous = [_contiguous(loops, k) for k in (0, 1)]
    row, column = (_tiled(f, c, size) for f, c in zip(free, contiguous, strict=True))
    along = max(folded, key=lambda d: (d in contiguous, size[d], d))
    outer = tuple(d for d in loops.loops if d not in loops.stage.folded and d not in (row, column))
    split = _split(loops, row, column, outer, along, contiguous)
    return Plan(row, column, outer, along, tuple(d for d in folded if d != along), split)


def _tiled(free: Sequence[int], contiguous: int | None, size: Sequence[int]) -> int | None:
    """Which of an operand's free dims is cut into tiles: the contiguous one, else the longest."""
    return max(free, key=lambda d: (d == contiguous, size[d], d), default=None)


def _contiguous(loops: Loops, k: int) -> int | None:
    """The loop along which what operand ``k`` of the first product reads is contiguous."""
    node, labels = body_operands(loops.stage.items[0])[k]
    while not loops.e.in_memory(node):
        inner = [(x, at) for x, at in operand_labels(node, labels) if x.rank]
        if not inner:
            return None
        node, labels = max(inner, key=lambda pair: guess(pair[0].size))
    return labels[-1] if labels else None


def _split(loops: Loops, row: int | None, column: int | None, outer: Sequence[int], along: int,
           contiguous: Sequence[int | None]) -> Split:
    threads, items = loops.e.kernel.target.threads, len(loops.stage.items)
    sizes = [1 if d is None else max(largest(loops.box[d][1]), 1) for d in (row, column)]
    others = max(largest(D.product(loops.box[d][1] for d in outer)), 1)
    run = _run(loops, along)
    length = max(largest(loops.box[along][1]) // run, 1)
    tile = [_tile(loops, row, sizes[0], ROWS if sizes[0] >= MANY_ROWS else WIDE), _tile(loops, column, sizes[1])]
    while items * tile[0] * tile[1] > SUMS and max(tile) > 1:
        tile[tile.index(max(tile))] //= 2
    across = contiguous[1] == along or (contiguous[0] == along and sizes[1] == 1)  # the larger operand
    count = others * -(-sizes[0] // tile[0]) * -(-sizes[1] // tile[1])
    sharing = min(max(threads // power_of_two(count), ACROSS if across else 1), _power_below(length))
    return Split(tile[0], tile[1], sharing, 1 if across else threads // sharing, run)


def _tile(loops: Loops, d: int | None, size: int, most: int = WIDE) -> int:
    """Elements of a tile along a free dim; they divide a known extent, of an unknown one the last tile may be partial.
    """
    if d is None:
        return 1
    ext = loops.box[d][1]
    if isinstance(ext, int):
        return next(n for n in (8, 4, 2, 3, 1) if n <= most and ext % n == 0)
    return WIDE if size >= WIDE else _power_below(size)


def _run(loops: Loops, along: int) -> int:
    """Elements of the folded dim that one wide access reads, where they divide every range."""
    cuts = _cuts(loops, along)
    return next((n for n in (WIDE, 2) if all(isinstance(c, int) and c % n == 0 for c in cuts)), 1)


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _cuts(loops: Loops, along: int) -> list[Dim]:
    """Where the folded dim begins, where the pieces of concatenated operands meet, and where it ends."""
    offset, extent = loops.box[along]
    found: dict[Dim, None] = {offset: None}
    for item in loops.stage.items:
        for k, x in enumerate(item.node.inputs):
            axis = item.node.attrs["contract"][k][along - item.node.rank]
            for start in _pieces(loops, x, axis):
                found[start] = None
    inside = [c for c in found if isinstance(c, int)]
    if len(inside) < len(found) or not isinstance(extent, int):
        return [offset, offset + extent]
    return [*sorted(inside), offset + extent]


def _pieces(loops: Loops, x: Node, axis: int) -> Iterator[Dim]:
    """Where the pieces begin of what is concatenated along an axis of ``x``."""
    def joins(n: Node) -> bool:
        return n.op == "concat" and n.attrs["axis"] == axis and not loops.e.in_memory(n)

    def behind(n: Node) -> list[Node]:
        through = (OPS[n.op].elementwise or n.op in ("cast", "concat")) and not joins(n) and not loops.e.in_memory(n)
        return [y for y in n.inputs if y.rank == n.rank] if through else []

    for n in topological([x], behind):
        if joins(n):
            yield from (s for s, p in zip(rules.concat_starts(n), n.inputs, strict=True) if p.shape[axis] != 0)


Side = tuple[str, int | None, int]  # the first row or column of a tile, its dim and how many there are


@dataclass(frozen=True)
class Range:
    """A range of the folded dim in which every operand is one tensor."""

    start: Dim
    length: Dim


@dataclass(frozen=True)
class Segment:
    """Some rounds of a range, ``start`` elements behind its start: in a round every sharing thread takes a run.

    ``partial``: the range may end before the rounds do.
    """

    range: Range
    start: Dim
    rounds: int
    partial: bool


def _depends_on(d: Dim, symbol: str) -> bool:
    return any(s.name == symbol for s in D.symbols(d))


class Tiles:
    """Emits a stage of products by a plan."""

    def __init__(self, loops: Loops, plan: Plan):
        self.loops, self.plan, self.split = loops, plan, plan.split
        self.e, self.scopes, self.box = loops.e, loops.scopes, loops.box
        self.items = loops.stage.items
        self.fold = contract.fold_of(self.items[0].node)
        self.each = self.split.rows * self.split.columns
        self.sums = self.each * len(self.items)

    def emit(self) -> None:
        """Adds the loops of the stage."""
        s, parts = self.split, self.e.kernel.scratch(self._scratch())
        size = f"{self.sums}, {s.sharing}, {s.stride}"
        with self.scopes.block(f"{self._macro()}(t, {self.e.dim(self._count())}, {s.sharing}, {s.stride})", ("ts_t",)):
            self._places()
            acc = self._sums("a")
            self._all_ranges(acc)
            self.scopes.line(f"TS_TILE_JOIN({self.fold.type}, {acc}, {size}, {parts})")
            for k, item in enumerate(self.items):
                with self._own(k) as (q, where):
                    total = f"TS_TILE_SUM({self.fold.type}, {acc}, {k * self.each}, {q}, {size}, {parts})"
                    value = contract.finish(self.e, item.node, where, self._result(total))
                    self.scopes.line(self.e.store(item.node, item.space, tuple(where[d] for d in item.mapped), value))

    def _scratch(self) -> int:
        """Bytes in which the sums of threads of different warps meet."""
        s, target = self.split, self.e.kernel.target
        near = min(s.sharing, max(target.lanes // s.stride, 1))
        size = 8 if self.fold.type in ("double", "ts_u64") else 4
        return 0 if near == s.sharing else self.sums * target.threads // near * size

    def _result(self, total: str) -> str:
        name = self.e.fresh("v")
        self.scopes.line(f"const {self.fold.type} {name} = {total};")
        return self.fold.result(name, lane=True)

    # --- places -------------------------------------------------------------------------------------

    def _many(self, d: int | None, each: int) -> Dim:
        """Tiles along a dim."""
        if d is None:
            return 1
        extent = self.box[d][1]
        return 1 if D.prove_le(1, extent) and D.prove_le(extent, each) else D.ceildiv(extent, each)

    def _count(self) -> Dim:
        p, s = self.plan, self.split
        tiled = (self._many(p.row, s.rows), self._many(p.column, s.columns))
        return D.product([*(self.box[d][1] for d in p.outer), *tiled])

    def _macro(self) -> str:
        """The loop over tiles; where their number is unknown but surely not too large, there is none."""
        count, groups = self._count(), self.e.kernel.target.threads // self.split.sharing
        return "TS_FEW_TILES" if not isinstance(count, int) and D.prove_le(count, groups) else "TS_TILES"

    def _places(self) -> None:
        """The first row and column of the tile, and its index along the other dims."""
        p, s = self.plan, self.split
        rest: Dim = 1
        tiled = [("c", p.column, s.columns)]
        order = [*tiled, *((None, d, 1) for d in reversed(p.outer)), ("r", p.row, s.rows)]
        for k, (name, d, each) in enumerate(order):
            many = self._many(d, each)
            at = "t" if rest == 1 else f"t / {self.e.factor(rest)}"
            last = all(self._many(other, n) == 1 for _, other, n in order[k + 1:])
            if many == 1:
                at = "0"
            elif not last:
                at = f"({at}) % {self.e.factor(many)}"
            rest = rest * many
            if name:
                self.scopes.line(f"const ts_idx {name} = {f'({at}) * {each}' if each > 1 else at};")
            elif d is not None:
                self.scopes.line(f"const ts_idx i{d} = {self._shifted(d, at)};")
                self.scopes.top.symbols.add(f"ts_i{d}")

    def _inside(self, d: int, first: str, k: str, each: int) -> str:
        """The index of element ``k`` of a tile along ``d``; the last element again where the tile reaches beyond."""
        at = f"{first} + {k}" if each > 1 else first
        if self._is_ragged(d, each):
            at = f"ts_imin({at}, {self.e.dim(self.box[d][1])} - 1)"
        return self._shifted(d, at)

    def _shifted(self, d: int, at: str) -> str:
        """The index of what lies at ``at`` of the stage's part of a dim."""
        offset = self.box[d][0]
        return at if offset == 0 else f"{self.e.dim(offset)} + {at}"

    def _is_ragged(self, d: int, each: int) -> bool:
        """True when the last tile along a dim may reach beyond its end."""
        ext = self.box[d][1]
        return each > 1 and not (isinstance(ext, int) and ext % each == 0)

    @contextmanager
    def _along_tile(self, d: int | None, first: str, k: str, each: int) -> Iterator[None]:
        """A loop over the rows or columns of a tile; defines their index."""
        with self.scopes.block(f"TS_EACH({k}, {each})", () if d is None else (f"ts_i{d}",)):
            if d is not None:
                self.scopes.line(f"const ts_idx i{d} = {self._inside(d, first, k, each)};")
            yield

    # --- folding ------------------------------------------------------------------------------------

    def _sums(self, prefix: str) -> str:
        name = self.e.fresh(prefix)
        self.scopes.line(f"{self.fold.type} {name}[{self.sums}];")
        self.scopes.line(f"TS_EACH(q, {self.sums}) {name}[q] = {self.fold.start};")
        return name

    def _all_ranges(self, acc: str) -> None:
        with ExitStack() as stack:
            for d in self.plan.folded:
                stack.enter_context(self.loops.serial(d))
            batch: list[Segment] = []
            for start, end in itertools.pairwise(_cuts(self.loops, self.plan.along)):
                if isinstance(start, int) and isinstance(end, int):
                    self._known_range(acc, start, end - start, batch)
                else:
                    self._loop(acc, Range(start, end - start), end - start, self._rounds(end - start), partial=True)
            self._batch(acc, batch)

    def _rounds(self, length: Dim) -> int:
        """Rounds whose elements a thread loads together where the length is unknown: no more than it can have."""
        most, at_once = D.upper(length), self.split.run * self.split.sharing
        rounds = max(self._most() // 2, 1)
        return min(rounds, max(-(-most // at_once), 1)) if isinstance(most, int) else rounds

    def _known_range(self, acc: str, start: int, length: int, batch: list[Segment]) -> None:
        """Folds a range: whole batches in a loop, what is left joins ``batch``, which is folded when it is full."""
        round_ = self.split.run * self.split.sharing
        rounds, rest = divmod(length, round_)
        most = self._most()
        whole = rounds // most * most if rounds > 2 * most else 0
        if whole:
            self._loop(acc, Range(start, length), whole * round_, most)
        left = [Segment(Range(start, length), k * round_, min(most, rounds - k), False)
                for k in range(whole, rounds, most)]
        if rest:
            left.append(Segment(Range(start, length), rounds * round_, 1, True))
        for s in left:
            if batch and sum(x.rounds for x in batch) + s.rounds > most:
                self._batch(acc, batch)
                batch.clear()
            batch.append(s)

    def _loop(self, acc: str, whole: Range, length: Dim, rounds: int, partial: bool = False) -> None:
        """Folds the first ``length`` elements of a range, some rounds at a time and in pieces where it may be long.

        ``partial``: the length is unknown, so no round is known to be whole.
        """
        step = rounds * self.split.run * self.split.sharing
        piece = max(CHAIN // (rounds * self.split.run), 1) * step
        segment = Segment(whole, D.symbol("ts_s", 0, None), rounds, partial)
        x = self.e.factor(length)
        if D.prove_le(length, piece) or not (partial or self.fold.pairwise):
            with self.scopes.block(f"TS_STEPS(s, 0, {x}, {step})", ("ts_s",)):
                self._batch(acc, [segment])
            return
        with self.scopes.block(f"TS_STEPS(u, 0, {x}, {piece})"):
            part = self._sums("p")
            with self.scopes.block(f"TS_STEPS(s, u, ts_imin({piece}, {x} - u), {step})", ("ts_s",)):
                self._batch(part, [segment])
            self.scopes.line(f"TS_EACH(q, {self.sums}) {acc}[q] += {part}[q];")

    def _most(self) -> int:
        """Rounds whose elements a thread loads before it folds any: so many loads are under way together."""
        s = self.split
        return max(LOADS // (s.run * (s.rows + s.columns * len(self.items))), 1)

    def _batch(self, acc: str, batch: Sequence[Segment]) -> None:
        """Loads what some rounds read, then folds it."""
        if not batch:
            return
        s = self.split
        with self.scopes.block(f"TS_SHARES(h, {s.sharing}, {s.stride})", ("ts_h",)):
            loaded = [(x, self._load(x)) for x in batch]
            for segment, names in loaded:
                self._fold_segment(acc, segment, names)

    def _first(self, segment: Segment) -> str:
        """Text of where the thread's run of round ``g`` of a segment begins."""
        s = self.split
        own = "h" if s.run == 1 else f"{s.run} * h"
        far = "" if segment.rounds == 1 else f" + g * {s.run * s.sharing}"
        start = "" if segment.start == 0 else f"{self.e.factor(segment.start)} + "
        return f"{start}{own}{far}"

    def _load(self, segment: Segment) -> list[list[str]]:
        """Arrays with what the operands of every item are in a segment, for all of its elements and the whole tile."""
        s, p = self.split, self.plan
        count = segment.rounds * s.run
        whole = segment.range
        known: dict[tuple, str] = {}
        names = []
        k = self.e.fresh("k")
        at = D.symbol(f"ts_{k}", 0, whole.length - 1) + whole.start
        index = tuple(at if d == p.along else i for d, i in enumerate(self.loops.index))
        sides = (("r", p.row, s.rows), ("c", p.column, s.columns))
        wanted = []
        for item in self.items:
            pair = []
            for number, side in enumerate(sides):
                key = contract.factor(item.node, number, index)
                if key not in known:
                    known[key] = self.e.fresh("w")
                    self.scopes.line(f"{compute_type(key[0].dtype)} {known[key]}[{count * side[2]}];")
                    wanted.append((*key, known[key], side))
                pair.append(known[key])
            names.append(pair)
        with self.scopes.block(f"TS_EACH(g, {segment.rounds})", ("ts_g",)):
            first = self._first(segment)
            if segment.partial:
                first = f"ts_imin({first}, {self.e.dim(whole.length - s.run)})"
            self.scopes.line(f"const ts_idx {k}_first = {first};")
            for node, place, name, side in wanted:
                self._load_run(node, place, name, side, k)
        for _, _, name, (_, _, each) in wanted:
            self.scopes.line(f"TS_LOADED({name}, {count * each})")
        return names

    def _load_run(self, node: Node, place: Index, name: str, side: Side, k: str) -> None:
        """Fills one run's part of the array of an operand: by wide accesses where it lies so in memory."""
        letter, d, each = side
        run = self.split.run
        along, across = self._wide(node, place, k, run), self._wide(node, place, f"i{d}", each)
        if along:
            with self._along_tile(d, letter, f"{letter}1", each):
                self.scopes.line(f"const ts_idx {k} = {k}_first;")
                self.scopes.line(f"ts_read<{run}, {each}>({name} + g * {run * each} + {letter}1, {along()});")
            return
        with self.scopes.block(f"TS_EACH(v, {run})", (f"ts_{k}",)):
            self.scopes.line(f"const ts_idx {k} = {k}_first + v;")
            if across and d is not None:
                with self.scopes.block("", (f"ts_i{d}",)):
                    self.scopes.line(f"const ts_idx i{d} = {self._inside(d, letter, '0', 1)};")
                    self.scopes.line(f"ts_read<{each}, 1>({name} + (g * {run} + v) * {each}, {across()});")
                return
            with self._along_tile(d, letter, f"{letter}1", each):
                self.scopes.line(f"{name}[(g * {run} + v) * {each} + {letter}1] = {evaluate(self.e, node, place)};")

    def _wide(self, node: Node, place: Index, symbol: str, count: int) -> Callable[[], str] | None:
        """The address of ``count`` neighbours along a symbol, where they are neighbours in memory and well aligned."""
        if count not in ACCESSES or (symbol.startswith("i") and self._is_ragged(int(symbol[1:]), count)):
            return None
        node, place = seen(self.e, node, place)
        name, first = f"ts_{symbol}", table_of(self.e, node)
        if self.e.in_memory(node):
            at = self.e.position(node, place)
        elif first is not None and not _depends_on(place[node.attrs["axis"]], name):
            at = position_in_piece(node, place)
        else:
            return None
        here = D.symbol(name)
        if D.substitute(at, {name: here + 1}) - D.substitute(at, {name: here}) != 1:
            return None
        offset = self.box[int(symbol[1:])][0] if symbol.startswith("i") else 0
        if D.mod(D.substitute(at, {name: offset + here * count}), count) != 0:
            return None
        if first is None:
            return lambda: self.e.address(node, place)
        return lambda: f"{looked_up_piece(self.e, node, place, first)} + ({self.e.dim(at)})"

    def _fold_segment(self, acc: str, segment: Segment, names: Sequence[Sequence[str]]) -> None:
        s = self.split
        with self.scopes.block(f"TS_EACH(g, {segment.rounds})"), ExitStack() as stack:
            if segment.partial:
                inside = f"{self._first(segment)} < {self.e.dim(segment.range.length)}"
                stack.enter_context(self.scopes.block(f"if ({inside})", conditional=True))
            for loop in (f"TS_EACH(v, {s.run})", f"TS_EACH(r1, {s.rows})", f"TS_EACH(c1, {s.columns})"):
                stack.enter_context(self.scopes.block(loop))
            for k, (item, (a, b)) in enumerate(zip(self.items, names, strict=True)):
                q = f"{acc}[{k * self.each} + r1 * {s.columns} + c1]"
                at = f"g * {s.run} + v"
                pair = contract.pair(self.e, item.node.dtype, f"{a}[({at}) * {s.rows} + r1]",
                                     f"{b}[({at}) * {s.columns} + c1]")
                self.scopes.line(self.fold.step(q, pair))

    # --- results ------------------------------------------------------------------------------------

    @contextmanager
    def _own(self, k: int) -> Iterator[tuple[str, Index]]:
        """The sums of item ``k`` that this thread writes: which of the item's, and its index."""
        p, s = self.plan, self.split
        header = f"TS_TILE_OWN(q, {k * self.each}, {self.each}, {s.sharing}, {s.stride})"
        places = (("r", p.row, f"q / {s.columns}", s.rows), ("c", p.column, f"q % {s.columns}", s.columns))
        real = [(first, d, at, each) for first, d, at, each in places if d is not None]
        with self.scopes.block(header, tuple(f"ts_i{d}" for _, d, _, _ in real)), ExitStack() as stack:
            conditions = []
            for first, d, at, each in real:
                text = f"{first} + {at}" if each > 1 else first
                if self._is_ragged(d, each):
                    conditions.append(f"{text} < {self.e.dim(self.box[d][1])}")
                self.scopes.line(f"const ts_idx i{d} = {self._shifted(d, text)};")
            if conditions:
                stack.enter_context(self.scopes.block(f"if ({' && '.join(conditions)})", conditional=True))
            yield "q", self.loops.index
