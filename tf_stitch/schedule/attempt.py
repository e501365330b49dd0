"""The schedule that one tile of one output implies: boxes, stages, shared memory and an estimate of time."""
from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import Unschedulable
from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Node
from . import rules
from .domain import Domain, domain
from .kernel_schedule import OUT, SHARED, Item, Part, RowChain, Slot, Stage
from .labels import Labels, Read, body_operands, operand_labels
from .products import ProductTime, have_products, is_product
from .rows import in_registers, row_chains
from .rules import Box
from .shared import plan_shared
from .storage import HEAVY, Storage, weight
from .target import Target
from .tile import GUESS, Axis, Tags, Tile, axes_of, guess, mean, samples
from .windows import WindowTime, are_windows

BLOCK_OVERHEAD = 300  # element operations that starting a block costs
STAGE_OVERHEAD = 30
FINE_WORK = 20_000  # element operations that are worth a core of their own
PER_CYCLE = 24  # element operations that one host core does in a cycle, seen over typical kernels
TURN, TURN_NS = 4, 200  # elements that a thread of a GPU loads before it waits, and how long that takes it
DROPS = 16  # in how many steps, about, a GPU's block gives up all values that it may compute again
IDLE = 0.25  # blocks that leave all multiprocessors idle but one would have to be so much faster
OPS_PER_NS = 100  # element operations that a multiprocessor of a GPU does in a nanosecond
STREAM = 40  # bytes that a multiprocessor of a GPU reads in a nanosecond,
MEMORY = 4000  # and those that all of them read and write together
FAR = 20 << 20  # bytes of a value that is not in the second-level cache when it is read
ACROSS = 8  # elements along both sides of a transpose from which on staging it pays
TABLES = frozenset({"segment", "search"})  # ops that read their first operand at any index
MERGED = ("map", "fold")  # kinds of stages that may share their loops
LINE = 128  # bytes of a cache line and the one fetched with it: a shorter contiguous run still moves them


_Touched = tuple[Dim, list[Node]]  # elements of a stage, and values in memory that are accessed once for each


class _InMemory(NamedTuple):
    """Stages that keep some values, where these lie, and the bytes that they take on chip."""

    stages: list[Stage]
    chains: list[RowChain]
    slots: Mapping[Node, Slot]
    size: Dim


class Attempt:
    """``part`` is the schedule, ``time`` its estimate in element operations, ``ideal`` what it would be with every
    value computed once and all cores busy, ``waste`` the work over the least possible work.  Of a concat that is the
    only output, ``piece`` is the only operand that is written.

    Raises Unschedulable when the values that a block must keep do not fit on chip.
    """

    def __init__(self, nodes: Sequence[Node], outputs: Sequence[Node], primary: Node, tags: Mapping[Node, Tags],
                 tile: Tile, target: Target, storage: Storage, piece: int | None = None):
        self.piece = piece
        self.nodes, self.outputs, self.target, self.tags = nodes, outputs, target, tags
        self.storage = storage
        self.members = set(nodes)
        self.kept = set(storage.kept)
        self.by_dim = axes_of(primary.shape, tile)
        self.axes: list[Axis] = [a for a in self.by_dim if a is not None]
        once = {number for o in outputs for number in self.own_box(o)[1]}
        self.by_dim = [replace(a, least=1) if a is not None and a.number in once else a for a in self.by_dim]
        self.axes = [a for a in self.by_dim if a is not None]
        self.own = {o: self.own_box(o) for o in outputs}
        self.known: dict[tuple[Node, str], tuple[Item, Domain]] = {}
        self.blocks = D.product(a.count for a in self.axes)
        self.boxes = self._infer()
        self.crossing = {n for n in nodes if self._crosses(n)} if target.has_threads else set()
        self.kept |= self.crossing
        self.part = self._fit()
        self._refuse_long_tables()

    # --- boxes --------------------------------------------------------------------------------------

    def own_box(self, output: Node) -> tuple[Box, tuple[int, ...]]:
        """What of an output a block writes, and the axes along which only the first block writes."""
        tags = self.tags.get(output, (None,) * output.rank)
        found: set[int] = set()
        box: list[rules.Span] = []
        for size, t in zip(output.shape, tags, strict=True):
            axis = self.by_dim[t] if t is not None else None
            if axis is None:
                box.append((0, size))
            else:
                found.add(axis.number)
                box.append((axis.offset, axis.extent))
        return tuple(box), tuple(a.number for a in self.axes if a.number not in found)

    def _infer(self) -> dict[Node, Box]:
        boxes: dict[Node, Box] = {o: box for o, (box, _) in self.own.items()}
        for n in reversed(self.nodes):
            boxes[n] = rules.computed_box(n, boxes[n])
            for x, box in self._operand_boxes(n, boxes[n]):
                if x in self.members:
                    boxes[x] = rules.union(boxes[x], box, x.shape) if x in boxes else box
        return boxes

    def _operand_boxes(self, n: Node, box: Box) -> Iterable[tuple[Node, Box]]:
        """The operands that a node's box reads, each with what it reads of it."""
        k = self._piece_of(n)
        if k is not None:
            return [(n.inputs[k], rules.concat_box(n, k, box))]
        return zip(n.inputs, rules.operand_boxes(n, box), strict=True)

    def _piece_of(self, n: Node) -> int | None:
        """The operand of a concat that is the only one to be written, if so: each of hundreds is a part of its own,
        which must not look at all of them."""
        return self.piece if n in self.storage.outputs else None

    def _crosses(self, n: Node) -> bool:
        """True for a transpose that a GPU should stage: it is read along one dim and written along another.

        Every access to memory is then to whole lines; without, one side would touch a line per element.
        """
        if n.op != "transpose" or not n.rank or n.attrs["perm"][-1] == n.rank - 1 or n.inputs[0] in self.storage.kept:
            return False
        box = self.boxes[n]
        return min(guess(box[-1][1]), guess(box[n.attrs["perm"].index(n.rank - 1)][1])) >= ACROSS

    def _refuse_long_tables(self) -> None:
        """A block that looks rows up may not have to compute all there are of them, when these may be many."""
        seen: set[Node] = set()
        stack = [n for n in self.nodes if n.op in TABLES]
        stack += [n.inputs[0] for n in stack]
        while stack:
            n = stack.pop()
            if n in seen or n not in self.members:
                continue
            seen.add(n)
            if n not in self.kept:
                stack.extend(n.inputs if n.op not in TABLES else ())
            elif not all(isinstance(D.upper(extent), int) for _, extent in self.boxes[n]):
                raise Unschedulable(f"A block would compute all of '{n.origin or n}'; split the group.")

    # --- stages -------------------------------------------------------------------------------------

    def _fit(self) -> Part:
        """Stages and shared memory; keeps fewer values until they fit."""
        made = self._in_memory()
        if not self._has_room(made.size):
            made = self._with_fewer([n for n in self.storage.droppable() if n in self.kept])
        cost = self._estimate(made.stages)
        return Part(self.axes, made.stages, made.slots, frozenset(self.kept), frozenset(self.read_back), self.blocks,
                    made.size, cost, self.block_ns, made.chains)

    def _with_fewer(self, droppable: list[Node]) -> _InMemory:
        """Gives values up that may be computed again, the first first, until the others fit."""
        if self.crossing:
            self.kept -= self.crossing - self.storage.kept
            self.crossing = set()
            made = self._in_memory()
            if self._has_room(made.size):
                return made
        many = 1 if self.target.is_host else max(len(droppable) // DROPS, 1)
        kept = frozenset(self.kept)

        def without(count: int) -> _InMemory:
            self.kept = set(kept.difference(droppable[:count]))
            return self._in_memory()

        made = without(len(droppable))  # first, as it decides for many groups that there is no way
        if not self._has_room(made.size):
            raise self._no_room(made.size)
        counts = [*range(many, len(droppable), many), len(droppable)]
        fewest = bisect.bisect_left(counts, True, hi=max(len(counts) - 1, 0),
                                    key=lambda count: self._has_room(without(count).size))
        return without(counts[fewest]) if len(counts) > 1 else made

    def _no_room(self, size: Dim) -> Unschedulable:
        name = self.outputs[0].origin or self.outputs[0].op
        return Unschedulable(f"A block that computes '{name}' needs {D.to_text(size)} bytes on chip where "
                             f"{self.target.shared_bytes} are allowed; split the group.")

    def _in_memory(self) -> _InMemory:
        stages = self._stages()
        chains = row_chains(stages, self.storage.reads, self.kept, self.target)
        slots, size = plan_shared(stages, self.boxes, in_registers(chains, stages), self.crossing,
                                  chains, for_most=not self.target.is_host)
        return _InMemory(stages, chains, slots, size)

    def _has_room(self, size: Dim) -> bool:
        return guess(size) <= self.target.shared_bytes and (self.target.is_host or isinstance(size, int))

    def _stages(self) -> list[Stage]:
        self.read_back: set[Node] = set()
        self.home: dict[Node, int] = {}  # the stage after which a kept value may be read at any index
        stages: list[Stage] = []
        for n in self.nodes:
            if n in self.kept:
                for item, stage in self._items(n):
                    self._place(item, stage, stages)
        self._drop_local(stages)
        return [*(s for s in stages if s.hoisted), *(s for s in stages if not s.hoisted)]

    def _items(self, n: Node) -> list[tuple[Item, Stage]]:
        box = self.boxes[n]
        if n not in self.storage.outputs:
            return self._compute(n, SHARED, box, ())
        own, once = self.own[n]
        has_readers = bool(self.storage.users[n])
        if own == box and not (once and has_readers) and n not in self.crossing:
            if has_readers:
                self.read_back.add(n)
            return self._compute(n, OUT, own, once)
        copy = Item(n, OUT, n, (), tuple(range(n.rank)), copy=True)
        return [*self._compute(n, SHARED, box, ()), (copy, Stage("map", n.shape, own, (), [copy], once))]

    def _compute(self, n: Node, space: str, box: Box, once: tuple[int, ...]) -> list[tuple[Item, Stage]]:
        if n.op == "concat":
            k = self._piece_of(n)
            return _pieces(n, space, box, once, range(len(n.inputs)) if k is None else [k])
        item, d = self._loops(n, space, box)
        return [(item, _stage(d.kind, d.shape, d.box, d.folded, item, once))]

    def _loops(self, n: Node, space: str, box: Box) -> tuple[Item, Domain]:
        """A value that a stage computes and its loops, made once: stages are put together several times."""
        found = self.known.get((n, space))
        if found is None:
            d = domain(n, box)
            found = self.known[n, space] = Item(n, space, n, (), d.mapped), d
        return found

    def _place(self, item: Item, stage: Stage, stages: list[Stage]) -> None:
        """Puts an item into an existing stage with the same loops, or into a new one."""
        identity = tuple(range(len(stage.shape)))
        reads = self._reads(item)
        first = 0
        for x, labels in reads:
            at_once = labels == identity and x.op not in HEAVY and x.op != "concat" and x not in self.crossing
            first = max(first, self.home[x] + (0 if at_once else 1))
            if not stages[self.home[x]].hoisted:
                stage.hoisted = False
        for k in range(first, len(stages)):
            if self._fits(stages[k], stage):
                _merge(stages[k], stage)
                break
        else:
            k = len(stages)
            stages.append(stage)
        stages[k].reads.update(x for x, _ in reads)
        if item.space == SHARED or item.node in self.read_back or item.node not in self.home:
            self.home[item.node] = max(k, self.home.get(item.node, 0))

    def _fits(self, into: Stage, new: Stage) -> bool:
        """True when two stages may share their loops.

        A GPU's products may not share theirs with anything else: their threads fold register tiles, loaded far ahead.
        """
        if into.hoisted != new.hoisted or into.shape != new.shape or into.box != new.box or into.once != new.once:
            return False
        if not (into.kind in MERGED and new.kind in MERGED) or (into.kind == new.kind and into.folded != new.folded):
            return False
        return self.target.is_host or is_product(into.items[0]) == is_product(new.items[0])  # the others are alike

    def _reads(self, item: Item) -> list[Read]:
        """Kept values that an item reads, each with the domain dims that index it."""
        return [read for read in self.storage.reads.of(item, self.kept) if read[0] in self.members]

    def _drop_local(self, stages: list[Stage]) -> None:
        """A staged value that is only read in its own loop, at the same index, needs no memory."""
        readers: dict[Node, set[int]] = {}
        for k, s in enumerate(stages):
            for x in s.reads:
                readers.setdefault(x, set()).add(k)
        for k, s in enumerate(stages):
            for item in list(s.items):
                n = item.node
                if item.space == SHARED and n not in self.storage.outputs and n.op not in HEAVY \
                        and n.op != "concat" and readers.get(n, set()) == {k} and len(s.items) > 1:
                    s.items.remove(item)
                    s.reads.discard(n)
                    self.kept.discard(n)

    # --- estimate -----------------------------------------------------------------------------------

    def _estimate(self, stages: Sequence[Stage]) -> Dim:
        """Sets ``time`` and ``waste``; returns the cost of a block in cycles of one host core."""
        envs = samples(self.axes)
        block, once, least = float(BLOCK_OVERHEAD), 0.0, 0
        cost: Dim = BLOCK_OVERHEAD * PER_CYCLE // 4
        others = 0.0
        for s in stages:
            per, extra = self._stage_weight(s, envs)
            volume = D.product(e for _, e in s.box)
            many = mean(volume, envs)
            work = many * (per + extra) + STAGE_OVERHEAD
            hoisted = s.hoisted and self.target.is_host  # on a GPU every block does it
            block, once = (block, once + work) if hoisted else (block + work, once)
            least += guess(D.product(s.shape)) * per
            here = D.substitute(volume, envs[0])
            cost = cost + (many if isinstance(here, int) else here) * per
            others += 0.0 if any(map(is_product, s.items)) else self._stage_ns(many, per + extra)
        blocks = guess(self.blocks)
        rounds = -(-blocks // self.target.cores)
        self.time = rounds * block + once
        self.waste = (blocks * (block - BLOCK_OVERHEAD) + once) / max(least, 1)
        self.ideal = least / max(min(self.target.cores, least // FINE_WORK), 1)
        if self.target.has_threads and blocks < self.target.cores:
            self._count_bytes(stages, envs)
        self.block_ns: ProductTime | WindowTime | None = None
        if have_products(self.nodes, self.target):
            self.block_ns = ProductTime(stages, frozenset(self.kept), self.storage.divided(self.kept), self.axes,
                                        self.blocks, self.target.cores)
            touched = [self._touched(s) for s in stages]
            self.time = self._mean_time(functools.partial(self._product_time, self.block_ns, others, touched))
        elif are_windows(self.nodes, self.target):
            self.block_ns = WindowTime(stages[0], self.axes, self.blocks, self.target)
            self.time = self._mean_time(functools.partial(self._window_time, self.block_ns))
        return D.floordiv(cost, PER_CYCLE) + 1

    def _product_time(self, product_ns: ProductTime, others: float, touched: Sequence[_Touched],
                      sizes: Mapping[str, int]) -> float:
        """What a part with products takes at some sizes of unknown dims."""
        blocks = guess(self.blocks, sizes)
        idle = max(1 - blocks / self.target.cores, 0)
        busy = -(-blocks // self.target.cores) * (product_ns(sizes) + others) * (1 + IDLE * idle)
        memory = _far_bytes(touched, sizes) / min(STREAM * max(blocks, 1), MEMORY)
        return max(busy, memory) + min(busy, memory) / 4

    def _mean_time(self, time: Callable[[Mapping[str, int]], float]) -> float:
        times = [time(sizes) for sizes in self._sizes()]
        return sum(times) / len(times)

    def _window_time(self, block_ns: WindowTime, sizes: Mapping[str, int]) -> float:
        """What a part of windows takes at some sizes of unknown dims."""
        return -(-guess(self.blocks, sizes) // self.target.cores) * block_ns(sizes)

    def _touched(self, s: Stage) -> _Touched:
        """The elements of a stage, and what each item of it reads and writes at each."""
        nodes: list[Node] = []
        for i in s.items:
            nodes += {n for n, _ in self.storage.reads.of(i, self.kept)} - self.members
            nodes += [i.node] if i.space == OUT else []
        return D.product(s.shape), nodes

    def _sizes(self) -> list[dict[str, int]]:
        """Sizes of unknown dims that a part should suit: the upper half of a range, or up to the usual size."""
        bounds = {s.name: s.hi if isinstance(s.hi, int) else max(GUESS, s.lo or 0) for s in D.symbols(self.blocks)}
        return [{name: -(-hi * k // 4) for name, hi in bounds.items()} for k in (4, 3, 2)] if bounds else [{}]

    def _stage_ns(self, many: int, weight: float) -> float:
        """What a block of a GPU spends in a stage without products over so many elements of a ``weight`` each: its
        threads wait for what they load."""
        turns = -(-many // (self.target.threads * TURN))
        return turns * TURN_NS + many * weight / OPS_PER_NS

    def _count_bytes(self, stages: Sequence[Stage], envs: Sequence[Mapping[str, int]]) -> None:
        """Makes ``time`` and ``ideal`` at least what reading takes: one multiprocessor alone reads slowly."""
        block, whole = 0, 0
        for s in stages:
            found = {n for i in s.items for n, _ in self.storage.reads.of(i, self.kept)}
            for n in found - self.members:
                if guess(n.size) >= guess(D.product(s.shape)):  # a smaller one is read again and again
                    size = DTYPES[n.dtype].size * OPS_PER_NS // STREAM
                    block += size * mean(D.product(e for _, e in s.box), envs)
                    whole += size * guess(n.size)
        self.time = max(self.time, block)
        self.ideal = max(self.ideal, whole / self.target.cores)

    def _stage_weight(self, stage: Stage, envs: Sequence[Mapping[str, int]]) -> tuple[int, float]:
        """Operations per element of a stage, and what loads and stores cost beyond contiguous ones."""
        total, extra = 0, 0.0
        seen: set[tuple[Node, Labels]] = set()
        for item in stage.items:
            total += 1 + (weight(item.node) if item.body is item.node and not item.copy else 0)
            if item.space == OUT:
                extra += self._strided(item.node, item.mapped, stage, envs)
            stack = list(body_operands(item))
            while stack:
                n, labels = stack.pop()
                if (n, labels) in seen:
                    continue
                seen.add((n, labels))
                if n not in self.members or n in self.kept:
                    total += 1
                    extra += self._strided(n, labels, stage, envs) if n not in self.members else 0.0
                    continue
                total += weight(n)
                stack.extend(operand_labels(n, labels))
        return total, extra

    def _strided(self, n: Node, labels: Labels, stage: Stage, envs: Sequence[Mapping[str, int]]) -> float:
        """Extra cost of reading or writing a tensor in runs shorter than a cache line."""
        if not n.rank:
            return 0.0
        size = DTYPES[n.dtype].size
        last = labels[-1] if labels else None
        run = 1 if last is None else mean(stage.box[last][1], envs)
        run = min(run, guess(n.shape[-1]))
        if run >= guess(n.shape[-1]) or run * size >= LINE:
            return 0.0
        often = 1.0  # the share of the stage's iterations that read another element
        if None not in labels:
            for d in set(range(len(stage.box))) - set(labels):
                often /= max(mean(stage.box[d][1], envs), 1)
        return often * LINE / (max(run, 1) * size)


def _far_bytes(touched: Iterable[_Touched], sizes: Mapping[str, int]) -> int:
    """Bytes that come from memory and go there, of values that are too large for a cache."""
    counts: dict[Node, int] = {}
    for elements, nodes in touched:
        volume = guess(elements, sizes)
        for n in nodes:
            counts[n] = counts.get(n, 0) + volume
    amounts = (min(count, guess(n.size, sizes)) * DTYPES[n.dtype].size for n, count in counts.items())
    return sum(size for size in amounts if size > FAR)


def _stage(kind: str, shape, box: Box, folded: tuple[int, ...], item: Item, once: tuple[int, ...]) -> Stage:
    hoisted = item.space == SHARED and not _of_block(box)
    return Stage(kind, shape, box, folded, [item], once, hoisted)


@functools.lru_cache(maxsize=1 << 12)
def _of_block(box: Box) -> bool:
    """True for a box that differs from block to block."""
    return any(s.name.startswith(("ts_b", "ts_e")) for span in box for d in span for s in D.symbols(d))


def _pieces(n: Node, space: str, box: Box, once: tuple[int, ...], wanted: Iterable[int]) -> list[tuple[Item, Stage]]:
    """A concat in memory is one copy per operand, of those that are ``wanted``: no condition in the loops."""
    out = []
    axis, dims = n.attrs["axis"], tuple(range(n.rank))
    starts = rules.concat_starts(n)
    for k in wanted:
        x, shift = n.inputs[k], tuple(starts[k] if d == axis else 0 for d in dims)
        item = Item(n, space, x, shift, dims)
        out.append((item, _stage("map", x.shape, rules.concat_box(n, k, box), (), item, once)))
    return out


def _merge(into: Stage, new: Stage) -> None:
    into.items.extend(new.items)
    if new.kind == "fold":
        into.kind, into.folded = "fold", new.folded
