"""The loops of a stage: which run over rows, which over lanes, which one after the other.

Lanes are the innermost loop: a vector on the host, the threads of a group on a GPU.  The lane dim is the one
along which most operands are contiguous.  A fold whose lane dim is folded keeps scalar accumulators that the
lanes join; a fold along other dims keeps an accumulator per lane.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
from ml_dtypes import finfo

from ..errors import Unschedulable
from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Node, topological
from ..ir.ops import OPS
from ..schedule.kernel_schedule import OUT, Item
from ..schedule.labels import Labels, body_operands, operand_labels, reads
from ..schedule.products import have_products
from ..schedule.rules import VIEWS, Index
from ..schedule.storage import HEAVY
from ..schedule.tile import guess, largest, power_of_two
from ..schedule.windows import are_windows, neighbours
from . import contract, tiles
from .folds import Fold
from .runs import Runs
from .text import compute_type, literal
from .values import compute, declare, evaluate, seen

if TYPE_CHECKING:
    from .emit import StageEmitter

PIECE = 4096  # the most elements that one float accumulator chain sums before it is added to another
GROUP = 64  # the same where accumulators are per lane
STRIP = 256  # TS_STRIP of ts_host.h
STRIP_SPAN = "t, m"  # the lanes of a strip
TILE = 16  # lanes of one tile of a transpose: a cache line of float32
NARROW = 16  # rows shorter than this run together, so many at a time
LOADS = 32  # of an element, that wait together on a GPU
BATCH = 64  # elements of a thread of a GPU that are loaded or stored together, about
FOLD_BATCH = 8  # the same of what it folds, of each value that it folds and writes
MAX_ROWS = 5  # TS_ROWS5 is the largest
ACCESS = 16  # bytes of a GPU thread's widest access


class Loops:
    """Emits the loops of one stage through a StageEmitter."""

    def __init__(self, e: StageEmitter):
        self.e = e
        self.scopes = e.scopes
        self.stage = e.stage
        self.box = self.stage.box
        self.loops = [d for d, (_, ext) in enumerate(self.box) if not (isinstance(ext, int) and ext == 1)]
        self.index: Index = tuple(
            D.symbol(f"ts_i{d}", 0, size - 1) if d in self.loops else self.box[d][0]
            for d, size in enumerate(self.stage.shape))
        self.lane = self._choose_lane()
        self.lanes = self._group_size()

    # --- mapping ------------------------------------------------------------------------------------

    def _choose_lane(self) -> int | None:
        """The loop along which most of what the stage touches is contiguous."""
        if self.stage.kind == "order":  # the elements, or for one element those that it is compared with
            return next((d for d in self.loops if d >= len(self.stage.shape) - 2), None)
        if self.stage.kind == "segment":
            return max((d for d in self.loops if d > 0), default=None)
        if self.stage.kind in ("scan", "arg") and not [d for d in self.loops if d not in self.stage.folded]:
            return None
        if not self.loops:
            return None
        score = dict.fromkeys(self.loops, 0.0)
        for labels, covered, weight in self._touched():
            if not set(self.loops) <= covered:
                weight *= 0.1  # read once for many elements
            for k, d in enumerate(labels):
                if d in score:
                    score[d] += weight if k == len(labels) - 1 else -weight / 2
        for d in self.loops:
            if largest(self.box[d][1]) < 8:
                score[d] -= 2
        return max(self.loops, key=lambda d: (score[d], d))

    def _touched(self) -> Iterator[tuple[Labels, set[int | None], float]]:
        """Memory that an element touches: its labels, the loops that its index depends on, and a weight.

        An index computed otherwise (a gather, a shifted slice) depends on what the value read there depends on.
        """
        seen = set()
        for item in self.stage.items:
            yield item.mapped, set(item.mapped), 0.1 if self._crosses(item.node) and not item.copy else 1.5
            stack = [(n, labels, set(labels)) for n, labels in body_operands(item)]
            while stack:
                n, labels, covered = stack.pop()
                if (n, labels) in seen:
                    continue
                seen.add((n, labels))
                if self.e.in_memory(n):
                    yield labels, covered, 1.0
                else:
                    stack.extend((x, inner, covered if None in inner else set(inner))
                                 for x, inner in operand_labels(n, labels))

    def _crosses(self, n: Node) -> bool:
        """True for a transpose in shared memory: what matters is how the other side is accessed."""
        return n.op == "transpose" and n in self.e.part.slots

    def _group_size(self) -> int:
        """Threads that share a row on a GPU: a power of two that the lanes fill."""
        target = self.e.kernel.target
        if self.lane is None or target.is_host:
            return 1
        ext = max(largest(self.box[self.lane][1]), 1)
        others = [d for d in self.loops if d != self.lane and d not in self.stage.folded]
        rows = max(largest(D.product(self.box[d][1] for d in others)), 1)
        room = power_of_two(ext)
        if self.stage.kind in ("fold", "order") and self.lane in self.stage.folded:
            return target.threads if rows == 1 and ext > 2 * target.lanes else min(room, target.lanes)
        if not others and isinstance(most := D.upper(self.box[self.lane][1]), int):
            room = power_of_two(max(most, 1))  # there is nothing else for threads to do
        few = target.threads // power_of_two(rows)  # few rows: more threads for each
        return min(room, max(few, target.lanes))

    # --- headers ------------------------------------------------------------------------------------

    def _name(self, d: int) -> str:
        return f"i{d}"

    def _range(self, d: int) -> str:
        off, ext = self.box[d]
        return f"{self._name(d)}, {self.e.dim(off)}, {self.e.dim(ext)}"

    @contextmanager
    def rows(self, dims: Sequence[int], lanes: int, several: bool = False) -> Iterator[None]:
        """Loops over dims, shared out over groups of threads; ``several`` rows are then loaded at a time."""
        with ExitStack() as stack:
            head = list(dims[:MAX_ROWS])
            args = ", ".join([*(self._range(d) for d in head), str(lanes)])
            header = f"{'TS_SEVERAL ' if several and head else ''}TS_ROWS{len(head)}({args})"
            stack.enter_context(self.scopes.block(header, tuple(f"ts_i{d}" for d in head)))
            for d in dims[MAX_ROWS:]:
                stack.enter_context(self.serial(d))
            yield

    @contextmanager
    def serial(self, d: int, header: str = "") -> Iterator[None]:
        """A loop that every thread runs."""
        with self.scopes.block(header or f"TS_SERIAL({self._range(d)})", (f"ts_i{d}",)):
            yield

    @contextmanager
    def lane_loop(self, clauses: str = "", span: str = "", all_lanes: bool = False) -> Iterator[None]:
        """The vector loop; ``span`` replaces the dim's own offset and extent.

        ``all_lanes``: on a GPU, lanes beyond the end of a strip do what the last one does, which saves a branch.
        """
        assert self.lane is not None
        strip = "STRIP_ALL" if all_lanes else "STRIP_LANES"
        kind = strip if span == STRIP_SPAN else "LANES_FOLD" if clauses else "LANES"
        kind += "4" if not span and self._in_fours() else ""
        span = f"{self._name(self.lane)}, {span}" if span else self._range(self.lane)
        macro = f"TS_{kind}({span}, {self.lanes}{f', {clauses}' if clauses else ''})"
        with self.scopes.block(macro, (f"ts_i{self.lane}",)):
            yield

    def _in_fours(self) -> bool:
        """True when every lane of a GPU can take whole runs of four neighbours."""
        assert self.lane is not None
        ext = self.box[self.lane][1]
        return not self.e.kernel.target.is_host and isinstance(ext, int) and ext > 0 and ext % (4 * self.lanes) == 0

    # --- stages -------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Adds the loops of the stage."""
        products = tiles.plan(self)
        if products is not None:
            tiles.Tiles(self, products).emit()
            return
        kept = [d for d in self.loops if d not in self.stage.folded]
        folded = [d for d in self.loops if d in self.stage.folded]
        {"map": self._map, "fold": self._fold, "scan": self._in_order, "arg": self._in_order,
         "segment": self._segment, "order": self._order}[self.stage.kind](kept, folded)

    def _map(self, kept: list[int], folded: list[int]) -> None:
        across = self._across()
        if across is not None:
            self._map_tiles(kept, across)
            return
        if self._is_narrow():
            self._map_narrow(kept)
            return
        width = self._run_width()
        if width > 1:
            self.lanes = min(self.lanes, power_of_two(-(-self._most_lanes() // width)))
        rows = [d for d in kept if d != self.lane]
        batch = self._batch(rows, width)
        if batch > 1:
            self._map_batches(rows, width, batch)
            return
        with self.rows(rows, self.lanes, self._is_across()), ExitStack() as stack:
            if width > 1:
                stack.enter_context(self._run_loop(width))
            elif self.lane is not None:
                stack.enter_context(self.lane_loop())
            self._maps(self.index)

    def _most_lanes(self) -> int:
        """The most elements that there can be along the lanes of runs."""
        most = D.upper(self.box[self.lane or 0][1])
        assert isinstance(most, int), "runs need an extent with a bound"
        return most

    def _batch(self, rows: Sequence[int], width: int) -> int:
        """How many rows of its own a thread of a GPU should load before it stores the first.

        A compiler cannot put a load before a store that may be to the same memory.  Where there are few blocks, no
        other threads work while one waits.
        """
        kernel = self.e.kernel
        if width == 1 or guess(self.e.part.blocks) > kernel.target.min_blocks \
                or self._most_lanes() > self.lanes * width:
            return 1
        groups = kernel.target.threads // self.lanes
        each = -(-largest(D.product(self.box[d][1] for d in rows)) // groups)
        return min(power_of_two(each), max(BATCH // (max(len(self._moved()), 1) * width), 1))

    def _map_batches(self, rows: Sequence[int], width: int, batch: int) -> None:
        """Some rows at a time: values of all of them, then their stores."""
        count = D.product(self.box[d][1] for d in rows)
        with self.scopes.block(f"TS_BATCHES({self.lanes}, {self.e.factor(count)}, {batch})"):
            row = (self.box[self.lane or 0][0], self._most_lanes())
            runs = Runs(self.e, self.index[self.lane or 0], width, batch, row)
            with self._batch_rows(rows, width, batch):
                self.e.runs = runs
                with self.scopes.block(f"TS_RUN_EACH({self._name(self.lane or 0)}, {width})", (f"ts_i{self.lane}",)):
                    self._maps(self.index)
                self.e.runs = None
            with self._batch_rows(rows, width, batch):
                runs.finish()

    @contextmanager
    def _batch_rows(self, rows: Sequence[int], width: int, batch: int) -> Iterator[None]:
        """A loop over the rows of a batch, u being a row's place in it, and in each over the thread's run."""
        with self._batch_places(rows, self.lanes, batch):
            off, ext = self.box[self.lane or 0]
            with self.scopes.block(f"TS_LANE_RUNS({self.e.factor(off)}, {self.e.factor(ext)}, {self.lanes}, {width})",
                                   ("ts_ts_i",)):
                yield

    @contextmanager
    def _batch_places(self, dims: Sequence[int], lanes: int, batch: int) -> Iterator[None]:
        """A loop over the elements of some dims that a group of threads has of a batch, u being a place in it."""
        with self.scopes.block(f"TS_BATCH_EACH(u, {lanes}, {batch})", tuple(f"ts_i{d}" for d in dims)):
            self._places(dims)
            yield

    def _places(self, dims: Sequence[int]) -> None:
        """Declares the indices of some dims whose elements ts_r counts, the last one fastest."""
        rest: Dim = 1
        for d in reversed(dims):
            off, ext = self.box[d]
            place = "ts_r" if isinstance(rest, int) and rest == 1 else f"ts_r / {self.e.factor(rest)}"
            place = place if d == dims[0] else f"{place} % {self.e.factor(ext)}"
            place = place if isinstance(off, int) and off == 0 else f"{self.e.factor(off)} + {place}"
            self.scopes.line(f"const ts_idx {self._name(d)} = {place};")
            rest = rest * ext

    def _is_across(self) -> bool:
        """True for a stage on either side of a staged transpose."""
        return any(self._crosses(n) for n in (*self.stage.reads, *(i.node for i in self.stage.items)))

    def _run_width(self) -> int:
        """Neighbours that a thread of a GPU takes at a time: as many as one access holds of the widest type."""
        if self.lane is None or not self.e.kernel.target.has_threads:
            return 1
        off, ext = self.box[self.lane]
        width = ACCESS // max((DTYPES[n.dtype].size for n in self._moved()), default=ACCESS)
        if self._is_across():
            width = min(width, 2)  # neighbours of a thread are in the same banks as other threads'
        if self._is_short(width):
            return 1
        return width if self._in_runs(ext, width) and D.mod(off, width) == 0 else 1

    def _in_runs(self, ext: Dim, width: int) -> bool:
        """True when an extent is known to be a multiple of ``width``: all of it, or what the last block has left."""
        if isinstance(ext, int):
            return ext > 0 and ext % width == 0
        return any(a.extent == ext and a.chunk % width == 0 and D.mod(a.size, width) == 0 for a in self.e.part.axes)

    def _moved(self) -> set[Node]:
        """What the stage reads from or writes to the kernel's memory along its lanes."""
        moved = {item.node for item in self.stage.items if item.space == OUT and item.mapped[-1] == self.lane}
        return moved | {n for item in self.stage.items for n, labels in reads(item, self.e.in_memory)
                        if labels and labels[-1] == self.lane and n not in self.e.part.slots}

    def _is_short(self, width: int) -> bool:
        """True for what follows a product in so few elements that wide accesses would leave threads idle."""
        kernel = self.e.kernel
        many = guess(D.product(extent for _, extent in self.box))
        return have_products(kernel.schedule.members, kernel.target) and many < width * kernel.target.threads

    @contextmanager
    def _run_loop(self, width: int) -> Iterator[None]:
        """The lane loop, by runs of neighbours."""
        assert self.lane is not None
        off, ext = self.box[self.lane]
        span = f"{self.e.factor(off)}, {self.e.factor(ext)}"
        with self.scopes.block(f"TS_LANE_RUNS({span}, {self.lanes}, {width})", ("ts_ts_i",)):
            self.e.runs = Runs(self.e, self.index[self.lane], width)
            with self.scopes.block(f"TS_RUN_EACH({self._name(self.lane)}, {width})", (f"ts_i{self.lane}",)):
                yield
            self.e.runs.finish()
            self.e.runs = None

    def _across(self) -> int | None:
        """The loop along which some operand is contiguous while the lanes jump: the other side of a transpose."""
        if self.lane is None or not self.e.kernel.target.is_host:
            return None
        votes = [labels[-1] for labels, *_ in self._touched()
                 if labels and labels[-1] not in (None, self.lane) and self.lane in labels]
        return max((d for d in votes if d in self.loops and guess(self.box[d][1]) >= TILE // 2), default=None)

    def _map_tiles(self, kept: list[int], across: int) -> None:
        """A few lanes at a time, so that the lines which the other side touches stay in the cache."""
        assert self.lane is not None
        off, ext = self.box[self.lane]
        o, x = self.e.factor(off), self.e.factor(ext)
        with self.rows([d for d in kept if d not in (self.lane, across)], self.lanes), \
                self.scopes.block(f"TS_STEPS(t, {o}, {x}, {TILE})"), self.serial(across):
            even = isinstance(ext, int) and ext % TILE == 0
            with self.lane_loop("", f"t, {TILE}" if even else f"t, ts_imin({TILE}, {o} + {x} - t)"):
                self._maps(self.index)

    def _is_narrow(self) -> bool:
        """True when rows are shorter than a vector and everything is either contiguous over rows or one row long."""
        d = self.lane
        if d is None or d - 1 not in self.loops or not self.e.kernel.target.is_host:
            return False
        size = self.stage.shape[d]
        if not isinstance(size, int) or not 1 < size < NARROW or self.box[d] != (0, size):
            return False
        return all(labels[-2:] == (d - 1, d) or d - 1 not in covered
                   for labels, covered, _ in self._touched() if None not in covered or d - 1 in covered)

    def _map_narrow(self, kept: list[int]) -> None:
        """Several rows as one run of lanes; values that only depend on the place in the row are laid out once."""
        d = self.lane
        assert d is not None
        size = D.static(self.stage.shape[d])
        run = D.symbol("ts_j", 0, NARROW * size - 1)
        row = D.symbol("ts_r", 0, self.stage.shape[d - 1] - 1)
        place = {d - 1: row + D.floordiv(run, size), d: D.mod(run, size)}
        index = tuple(place.get(k, i) for k, i in enumerate(self.index))
        off, ext = self.box[d - 1]
        o, x = self.e.factor(off), self.e.factor(ext)
        self.e.repeated = (run, NARROW * size)
        with self.rows([k for k in kept if k not in (d - 1, d)], self.lanes), \
                self.scopes.block(f"TS_STEPS(r, {o}, {x}, {NARROW})", ("ts_r",)):
            span = f"j, 0, ts_imin({NARROW * size}, ({o} + {x} - r) * {size}), {self.lanes}"
            with self.scopes.block(f"TS_LANES({span})", ("ts_j",)):
                self._maps(index)

    def _maps(self, index: Index) -> None:
        if not self.e.kernel.target.is_host:
            self._load_first(index)
        for item in self.stage.items:
            if not self._folds(item):
                self._map_item(item, index)

    def _load_first(self, index: Index) -> None:
        """Loads what the items read of the kernel's inputs before anything is computed: the loads wait together."""
        found: dict[tuple[Node, Index], None] = {}
        stack: list[tuple[Node, Index]] = []
        for item in reversed(self.stage.items):
            n = item.node
            if item.copy or item.body is not n:
                stack.append((item.body, index))
            elif OPS[n.op].elementwise:
                stack.extend((x, index) for x in reversed(n.inputs))
        looked_at: set[tuple[Node, Index]] = set()
        while stack and len(found) < LOADS:
            n, at = seen(self.e, *stack.pop())
            if (n, at) in looked_at:
                continue
            looked_at.add((n, at))
            if self.e.in_memory(n) or n.op == "gather":
                if self._is_given(n):
                    found[(n, at)] = None
            elif OPS[n.op].elementwise:
                stack.extend((x, at) for x in reversed(n.inputs))
        for n, at in found:
            evaluate(self.e, n, at)

    def _is_given(self, node: Node) -> bool:
        """True for what is computed of the kernel's inputs alone where it is read."""
        order = topological([node], lambda n: () if self.e.in_memory(n) else n.inputs)
        return not any(self.e.in_memory(n) and n in self.e.kernel.schedule.members for n in order)

    def _folds(self, item: Item) -> bool:
        return item.node.op in HEAVY and item.body is item.node and not item.copy

    def _map_item(self, item: Item, index: Index) -> None:
        value = self._value(item, index)
        where = self._shifted(item, tuple(index[d] for d in item.mapped))
        self.scopes.line(self.e.store(item.node, item.space, where, value))

    def _shifted(self, item: Item, where: Index) -> Index:
        return tuple(a + b for a, b in zip(where, item.shift, strict=True)) if item.shift else where

    def _value(self, item: Item, index: Index) -> str:
        n = item.node
        if item.copy or item.body is not n:
            return evaluate(self.e, item.body, index)
        found = self.scopes.find((n, index))
        if found is not None:
            return found
        with self.scopes.at(self.scopes.depth_of(index)) as scope:  # where later items of the stage look it up
            if n.op in VIEWS:
                value = evaluate(self.e, n.inputs[0], VIEWS[n.op](n, index))
            else:
                text = compute(self.e, n, index)
                value = text if text.isidentifier() else declare(self.e, n, index, text)
            scope.values[(n, index)] = value
        return value

    # --- folds --------------------------------------------------------------------------------------

    def _fold(self, kept: list[int], folded: list[int]) -> None:
        if self.lane is None or self.lane in folded:
            self._fold_lanes(kept, [d for d in folded if d != self.lane])
        else:
            self._fold_columns([d for d in kept if d != self.lane], folded)

    def _fold_items(self) -> list[tuple[Item, Fold, str]]:
        return [(i, contract.fold_of(i.node), self.e.fresh("a")) for i in self.stage.items if self._folds(i)]

    def _fold_lanes(self, kept: list[int], outer: list[int]) -> None:
        """Scalar accumulators per row; lanes fold."""
        items = self._fold_items()
        if outer and not kept and self.lane is not None and not self.e.kernel.target.is_host:
            self._fold_all(items, sorted((*outer, self.lane)))
            return
        with self.rows(kept, self.lanes):
            for _, fold, acc in items:
                self._lines(fold.declare(acc))
            with ExitStack() as stack:
                for d in outer:
                    stack.enter_context(self.serial(d))
                self._fold_pieces(items, bool(outer))
            for _, fold, acc in items:
                self._lines(fold.finish(acc, self.lanes))
            with self.scopes.block(f"TS_ONE({self.lanes})"):
                for item, fold, acc in items:
                    self._store_fold(item, fold, fold.result(acc))

    def _fold_all(self, items: Sequence[tuple[Item, Fold, str]], folded: list[int]) -> None:
        """One result of several dims: the threads share out all of their elements."""
        for _, fold, acc in items:
            self._lines(fold.declare(acc))
        with self._split(folded, 1):
            self._take(items)
        for _, fold, acc in items:
            self._lines(fold.gather(acc, 1))
        with self.rows([], 1):
            for item, fold, acc in items:
                self._store_fold(item, fold, fold.result(acc))

    @contextmanager
    def _split(self, folded: list[int], lanes: int) -> Iterator[None]:
        """A loop over all elements of some dims, which groups of threads share."""
        count = self.e.factor(D.product(self.box[d][1] for d in folded))
        with self.scopes.block(f"TS_SPLIT(ts_r, 0, {count}, {lanes})", tuple(f"ts_i{d}" for d in folded)):
            self._places(folded)
            yield

    def _fold_pieces(self, items: Sequence[tuple[Item, Fold, str]], nested: bool) -> None:
        if self.lane is None:
            self._take(items)
            return
        off, ext = self.box[self.lane]
        long = not isinstance(ext, int) or ext > PIECE
        inexact = any(f.pairwise for _, f, _ in items)
        if not inexact or not (long or nested):
            self._fold_vector(items, "")
            return
        parts = [(i, f, f"{acc}p") for i, f, acc in items]

        def piece(span: str) -> None:
            for _, fold, acc in parts:
                self._lines(fold.declare(acc))
            self._fold_vector(parts, span)
            for (_, fold, part), (_, _, acc) in zip(parts, items, strict=True):
                self._lines(fold.add(acc, part))

        if not long:
            with self.scopes.block(""):
                piece("")
            return
        o, x = self.e.factor(off), self.e.factor(ext)
        with self.scopes.block(f"TS_STEPS(t, {o}, {x}, {PIECE})"):
            piece(f"t, ts_imin({PIECE}, {o} + {x} - t)")

    def _fold_vector(self, items: Sequence[tuple[Item, Fold, str]], span: str) -> None:
        with self.lane_loop(" ".join(f.clauses(acc) for _, f, acc in items), span):
            self._take(items)

    def _take(self, items: Sequence[tuple[Item, Fold, str]]) -> None:
        accumulators = {i.node: (f, acc) for i, f, acc in items}
        for item in self.stage.items:
            if self._folds(item):
                fold, acc = accumulators[item.node]
                self._lines(fold.take(acc, contract.value(self.e, item.node, self.index)))
            else:
                self._map_item(item, self.index)

    def _store_fold(self, item: Item, fold: Fold, value: str) -> None:
        value = contract.finish(self.e, item.node, tuple(self.index[d] for d in item.mapped), value)
        where = tuple(self.index[d] for d in item.mapped)
        self.scopes.line(self.e.store(item.node, item.space, where, value))

    def _fold_columns(self, rows: list[int], folded: list[int]) -> None:
        """An accumulator per lane; the folded dims run one after the other."""
        items = self._fold_items()
        if self._splits(rows, folded, items):
            self._fold_split(items, folded)
            return
        if self._is_window(folded):
            self._fold_window(items, rows, folded)
            return
        with self.rows(rows, self.lanes), self._strip() as (span, slot):
            for _, fold, acc in items:
                self._lane_array(fold.type, acc, fold.start, span, slot)
            with ExitStack() as stack:
                for d in folded[:-1]:
                    stack.enter_context(self.serial(d))
                if folded:
                    self._fold_last(items, folded[-1], span, slot)
                else:
                    self._take_lanes(items, span, slot)
            with self.lane_loop("", span):
                for item, fold, acc in items:
                    self._store_fold(item, fold, fold.result(f"{acc}[{slot}]", lane=True))

    def _splits(self, rows: list[int], folded: list[int], items: Sequence[tuple[Item, Fold, str]]) -> bool:
        """True when groups of threads that have no row of their own should share the folding."""
        target = self.e.kernel.target
        return not target.is_host and not rows and bool(folded) and 2 * self.lanes <= target.threads

    def _fold_split(self, items: Sequence[tuple[Item, Fold, str]], folded: list[int]) -> None:
        """Each group of threads folds every so many-th element; then what the groups have is joined."""
        with self._strip() as (span, slot):
            for _, fold, acc in items:
                self._lane_array(fold.type, acc, fold.start, span, slot)
            if self._writes():
                self._take_batches(items, folded, self.lanes, span, slot)
            else:
                with self._split(folded, self.lanes):
                    self._take_lanes(items, span, slot)
            for _, fold, acc in items:
                self._lines(fold.gather(f"{acc}[0]", self.lanes, lane=True))
            with self.scopes.block(f"TS_ROWS0({self.lanes})"), self.lane_loop("", span):
                for item, fold, acc in items:
                    self._store_fold(item, fold, fold.result(f"{acc}[{slot}]", lane=True))

    def _is_window(self, folded: list[int]) -> bool:
        """True for a GPU's stage whose items fold a few known places, all of which a thread should load at once."""
        return bool(folded) and all(are_windows([i.node], self.e.kernel.target) for i in self.stage.items)

    def _fold_window(self, items: Sequence[tuple[Item, Fold, str]], rows: list[int], folded: list[int]) -> None:
        """Each thread folds the windows of some neighbours at a time: what they share is loaded once."""
        outer, along = rows[:-1], rows[-1] if rows else None
        many = self._neighbours(rows)
        with self._neighbour_rows(outer, along, many), self._strip() as (span, slot):
            for _, fold, acc in items:
                self.scopes.line(f"{fold.type} {acc}[{many}][TS_STRIP_ROOM({self.lanes})];")
                with self.lane_loop("", span):
                    self.scopes.line(f"TS_EACH(u, {many}) {acc}[u][{slot}] = {fold.start};")
            with ExitStack() as stack:
                for d in folded:
                    stack.enter_context(self.serial(d, f"TS_EACH({self._name(d)}, {self.box[d][1]})"))
                stack.enter_context(self.lane_loop("", span, all_lanes=True))
                stack.enter_context(self._each_neighbour(along, many))
                for item, fold, acc in items:
                    value = contract.value(self.e, item.node, self.index)
                    self.scopes.line(fold.step_lane(f"{acc}[u][{slot}]", value))
            with self.lane_loop("", span), self._each_neighbour(along, many):
                for item, fold, acc in items:
                    self._store_fold(item, fold, fold.result(f"{acc}[u][{slot}]", lane=True))

    def _neighbours(self, rows: list[int]) -> int:
        """How many windows, side by side in the last one of these dims, a thread folds at a time."""
        if not rows:
            return 1
        count = largest(D.product(self.box[d][1] for d in rows))
        return neighbours(self.box[rows[-1]][1], count, self.lanes, self.e.kernel.target.threads)

    @contextmanager
    def _neighbour_rows(self, outer: list[int], along: int | None, many: int) -> Iterator[None]:
        """Loops over rows, shared out over groups of threads: those of the dim ``along`` come in groups of ``many``."""
        heads = [self._range(d) for d in outer]
        if along is not None:
            extent = self.box[along][1]
            heads.append(f"w, 0, {self.e.factor(extent) if many == 1 else D.static(extent) // many}")
        header = f"TS_ROWS{len(heads)}({', '.join([*heads, str(self.lanes)])})"
        with self.scopes.block(header, tuple(f"ts_i{d}" for d in outer)):
            yield

    @contextmanager
    def _each_neighbour(self, along: int | None, many: int) -> Iterator[None]:
        """A loop over the rows of a group, u being a row's place in it."""
        with self.scopes.block(f"TS_EACH(u, {many})", () if along is None else (f"ts_i{along}",)):
            if along is not None:
                start = self.e.factor(self.box[along][0])
                self.scopes.line(f"const ts_idx {self._name(along)} = {start} + w * {many} + u;")
            yield

    def _fold_last(self, items: Sequence[tuple[Item, Fold, str]], d: int, span: str, slot: str) -> None:
        off, ext = self.box[d]
        long = not isinstance(ext, int) or ext > 2 * GROUP
        if not long or not any(f.pairwise for _, f, _ in items):
            if self._writes() and not self.e.kernel.target.is_host:
                self._take_batches(items, [d], self.e.kernel.target.threads, span, slot)
                return
            with self.serial(d):
                self._take_lanes(items, span, slot)
            return
        parts = [(i, f, f"{acc}p") for i, f, acc in items]
        o, x = self.e.factor(off), self.e.factor(ext)
        with self.scopes.block(f"TS_STEPS(u, {o}, {x}, {GROUP})"):
            for _, fold, acc in parts:
                self._lane_array(fold.type, acc, fold.start, span, slot)
            with self.serial(d, f"TS_SERIAL({self._name(d)}, u, ts_imin({GROUP}, {o} + {x} - u))"):
                self._take_lanes(parts, span, slot)
            with self.lane_loop("", span):
                for (_, fold, part), (_, _, acc) in zip(parts, items, strict=True):
                    self.scopes.line(fold.step_lane(f"{acc}[{slot}]", f"{part}[{slot}]"))

    def _writes(self) -> list[Item]:
        """What the stage writes to memory of the elements that it folds."""
        return [i for i in self.stage.items if i.space == OUT and not self._folds(i)]

    def _take_batches(self, items: Sequence[tuple[Item, Fold, str]], folded: list[int], lanes: int, span: str,
                      slot: str) -> None:
        """Takes some elements at a time that groups of ``lanes`` threads share, and then writes what is to be written.

        A compiler cannot put a load before a store that may be to the same memory: each element would wait.
        """
        count = D.product(self.box[d][1] for d in folded)
        each = -(-largest(count) // (self.e.kernel.target.threads // lanes))
        batch = min(power_of_two(each), FOLD_BATCH)
        kept = {item.node: f"{self.e.fresh('p')}" for item in self._writes()}
        with self.scopes.block(f"TS_BATCHES({lanes}, {self.e.factor(count)}, {batch})"):
            for node, name in kept.items():
                self.scopes.line(f"{compute_type(node.dtype)} {name}[TS_STRIP_ROOM({self.lanes}) * {batch}];")
            later = {node: f"{name}[{slot} * {batch} + u]" for node, name in kept.items()}
            with self._batch_places(folded, lanes, batch):
                self._take_lanes(items, span, slot, later)
            with self._batch_places(folded, lanes, batch), self.lane_loop("", span):
                for item in self._writes():
                    where = tuple(self.index[d] for d in item.mapped)
                    self.scopes.line(self.e.store(item.node, OUT, self._shifted(item, where), later[item.node]))

    def _take_lanes(self, items: Sequence[tuple[Item, Fold, str]], span: str, slot: str,
                    later: Mapping[Node, str] | None = None) -> None:
        """What the items take of an element; values of ``later`` are put there instead of into memory."""
        accumulators = {i.node: (f, acc) for i, f, acc in items}
        with self.lane_loop("", span, all_lanes=all(map(self._folds, self.stage.items))):
            for item in self.stage.items:
                if self._folds(item):
                    fold, acc = accumulators[item.node]
                    value = contract.value(self.e, item.node, self.index)
                    self.scopes.line(fold.step_lane(f"{acc}[{slot}]", value))
                elif later and item.space == OUT:
                    self.scopes.line(f"{later[item.node]} = {self._value(item, self.index)};")
                else:
                    self._map_item(item, self.index)

    @contextmanager
    def _strip(self) -> Iterator[tuple[str, str]]:
        """A strip of lanes with an accumulator each; gives the span of the lane loop and the slot's index."""
        assert self.lane is not None
        off, ext = self.box[self.lane]
        o, x, i = self.e.factor(off), self.e.factor(ext), self._name(self.lane)
        if self.e.kernel.target.is_host and isinstance(ext, int) and ext <= STRIP:
            with self.scopes.block(""):
                yield f"{o}, {ext}", f"TS_SLOT({i}, {o})"
            return
        with self.scopes.block(f"TS_STEPS(t, {o}, {x}, TS_STRIP({self.lanes}))"):
            self.scopes.line(f"const ts_idx m = ts_imin(TS_STRIP({self.lanes}), {o} + {x} - t);")
            yield STRIP_SPAN, f"TS_SLOT({i}, t)"

    def _lane_array(self, c: str, name: str, start: str, span: str, slot: str) -> None:
        self.scopes.line(f"{c} {name}[TS_STRIP_ROOM({self.lanes})];")
        with self.lane_loop("", span):
            self.scopes.line(f"{name}[{slot}] = {start};")

    # --- orders -------------------------------------------------------------------------------------

    def _order(self, kept: list[int], folded: list[int]) -> None:
        """Every element counts those that come before it, and is written to the place that this gives it.

        A block has some elements of a row: the places that blocks write are different ones and all there are.
        """
        item = self.stage.items[0]
        if item.space != OUT or self.stage.once:
            raise Unschedulable(f"What '{item.node.origin or item.node}' writes must be in memory.")
        fold, count = Fold("sum", item.node.dtype), self.e.fresh("a")
        if self.lane is not None and self.lane not in folded:
            self._order_lanes(item, fold, count, [d for d in kept if d != self.lane])
            return
        with self.rows(kept, self.lanes):
            self._lines(fold.declare(count))
            if self.lane is not None:
                for span, sign in self._compared():
                    with self.lane_loop(fold.clauses(count), span):
                        self.scopes.line(fold.step(count, self._precedes(item.node, sign)))
                self._lines(fold.finish(count, self.lanes))
            with self.scopes.block(f"TS_ONE({self.lanes})"):
                self.scopes.line(self._put(item, fold.result(count)))

    def _order_lanes(self, item: Item, fold: Fold, count: str, rows: list[int]) -> None:
        """An element per lane; groups of threads that have no row of their own share the counting."""
        split = not rows and 2 * self.lanes <= self.e.kernel.target.threads
        compared = len(self.index) - 1
        with nullcontext() if split else self.rows(rows, self.lanes), self._strip() as (lanes, slot):
            self._lane_array(fold.type, count, fold.start, lanes, slot)
            for span, sign in self._compared():
                span = f"{self._name(compared)}, {span}"
                header = f"TS_SPLIT({span}, {self.lanes})" if split else f"TS_SERIAL({span})"
                with self.serial(compared, header), self.lane_loop("", lanes, all_lanes=True):
                    self.scopes.line(fold.step_lane(f"{count}[{slot}]", self._precedes(item.node, sign)))
            if split:
                self._lines(fold.gather(f"{count}[0]", self.lanes, lane=True))
            with self.rows([], self.lanes) if split else nullcontext(), self.lane_loop("", lanes):
                self.scopes.line(self._put(item, fold.result(f"{count}[{slot}]", lane=True)))

    def _compared(self) -> list[tuple[str, str]]:
        """Ranges of what the block's elements are compared with, and how: what lies before or behind all of them needs
        one comparison."""
        (first, many), (_, size) = self.box[-2:]
        ranges = [(0, first, "<="), (first, many, ""), (first + many, size - first - many, "<")]
        return [(f"{self.e.factor(start)}, {self.e.factor(extent)}", sign) for start, extent, sign in ranges
                if extent != 0]

    def _precedes(self, node: Node, sign: str) -> str:
        """Whether the element at the folded index comes before the one at hand, as a number."""
        *row, here, there = self.index
        key, other = (evaluate(self.e, node.inputs[0], (*row, i)) for i in (here, there))
        if sign:
            return f"({other} {sign} {key})"
        return f"({other} < {key} || ({other} == {key} && {self.e.dim(there)} < {self.e.dim(here)}))"

    def _put(self, item: Item, place: str) -> str:
        """Writes which element it is to the place that it has counted."""
        *row, here, _ = self.index
        name = self.e.index_variable(place, item.node.shape[-1])
        return self.e.store(item.node, item.space, (*row, name), f"{compute_type(item.node.dtype)}({self.e.dim(here)})")

    # --- segments -----------------------------------------------------------------------------------

    def _segment(self, kept: list[int], folded: list[int]) -> None:
        """The rows of a segment one after the other, in order: an accumulator per lane, or just one."""
        item = self.stage.items[0]
        fold = contract.fold_of(item.node)
        acc = self.e.fresh("a")
        if self.lane is None:
            with self.rows(kept, 1):
                self._lines(fold.declare(acc))
                with self._segment_rows(item.node) as row:
                    self._lines(fold.take(acc, contract.segment_value(self.e, item.node, self.index, row)))
                self._store_fold(item, fold, fold.result(acc))
            return
        with self.rows([d for d in kept if d != self.lane], self.lanes), self._strip() as (span, slot):
            self._lane_array(fold.type, acc, fold.start, span, slot)
            with self._segment_rows(item.node) as row, self.lane_loop("", span, all_lanes=True):
                value = contract.segment_value(self.e, item.node, self.index, row)
                self.scopes.line(fold.step_lane(f"{acc}[{slot}]", value))
            with self.lane_loop("", span):
                self._store_fold(item, fold, fold.result(f"{acc}[{slot}]", lane=True))

    @contextmanager
    def _segment_rows(self, node: Node) -> Iterator[Dim]:
        """A loop over the rows of the segment at hand; gives the row's index."""
        x, starts = node.inputs
        here = self.index[0]
        rows = x.shape[0]
        first, last = (evaluate(self.e, starts, (s,)) for s in (here, here + 1))
        begin, end = self.e.fresh("k"), self.e.fresh("k")
        for name, bound in ((begin, first), (end, last)):
            self.scopes.line(f"const ts_idx {name} = ts_imin(ts_imax((ts_idx){bound}, 0), {self.e.dim(rows)});")
        name = self.e.fresh("r")
        with self.scopes.block(f"TS_SERIAL({name}, {begin}, {end} - {begin})", (f"ts_{name}",)):
            yield D.symbol(f"ts_{name}", 0, rows - 1)

    # --- scans and arg reductions ---------------------------------------------------------------------

    def _in_order(self, kept: list[int], folded: list[int]) -> None:
        """A loop whose steps depend on each other: scalar per row, or one state per lane."""
        run = self._scan if self.stage.kind == "scan" else self._arg
        item = self.stage.items[0]
        axis = self.stage.folded[0]
        if self.lane is None or self.lane == axis:
            lane, self.lane, self.lanes = self.lane, None, 1
            with self.rows(kept, 1):
                run(item, axis, lambda name: name, lambda c, name, start: self.scopes.line(f"{c} {name} = {start};"),
                    self._no_loop)
            self.lane = lane
            return
        with self.rows([d for d in kept if d != self.lane], self.lanes), self._strip() as (span, slot):
            run(item, axis, lambda name: f"{name}[{slot}]",
                lambda c, name, start: self._lane_array(c, name, start, span, slot),
                lambda: self.lane_loop("", span))

    @contextmanager
    def _no_loop(self) -> Iterator[None]:
        yield

    @contextmanager
    def _along(self, axis: int) -> Iterator[None]:
        if axis in self.loops:
            with self.serial(axis):
                yield
        else:
            yield

    def _scan(self, item: Item, axis: int, at, state, lanes) -> None:
        n = item.node
        fold = Fold(n.attrs["kind"], n.dtype)
        acc = self.e.fresh("a")
        state(fold.type, acc, fold.start)
        index = list(self.index)
        if n.attrs["reverse"]:
            index[axis] = n.shape[axis] - 1 - index[axis]
        where = tuple(index)
        with self._along(axis), lanes():
            value = evaluate(self.e, n.inputs[0], where)
            save = self.e.store(n, item.space, where, fold.result(at(acc), lane=True))
            step = fold.step_lane(at(acc), value)
            self._lines([save, step] if n.attrs["exclusive"] else [step, save])

    def _arg(self, item: Item, axis: int, at, state, lanes) -> None:
        n = item.node
        x = n.inputs[0]
        best, where = self.e.fresh("a"), self.e.fresh("k")
        c = compute_type(x.dtype)
        state(c, best, extreme(x.dtype, n.attrs["kind"]))
        state("ts_i64", where, "0")
        sign = ">" if n.attrs["kind"] == "max" else "<"
        with self._along(axis), lanes():
            value = evaluate(self.e, x, self.index)
            place = self.e.dim(self.index[axis])
            self._lines([f"{at(where)} = {value} {sign} {at(best)} ? (ts_i64)({place}) : {at(where)};",
                         f"{at(best)} = {value} {sign} {at(best)} ? {value} : {at(best)};"])
        with lanes():
            self.scopes.line(self.e.store(n, item.space, tuple(self.index[d] for d in item.mapped),
                                          f"{compute_type(n.dtype)}({at(where)})"))

    def _lines(self, lines: Sequence[str]) -> None:
        for text in lines:
            self.scopes.line(text)


def extreme(dtype: str, kind: str) -> str:
    """What an arg reduction starts from: the lowest (for max) or highest finite value, as Eigen's reducer."""
    d = DTYPES[dtype]
    if d.kind == "bool":
        return "false" if kind == "max" else "true"
    limits = finfo(d.numpy) if d.is_float else np.iinfo(d.numpy)
    return literal(np.asarray(limits.min if kind == "max" else limits.max, d.numpy)[()], dtype)
