"""Work/span fusion: which IR nodes become one kernel (FusionStitching, arXiv 1811.05213, section 4).

No step knows a pattern; a merge happens when it closes no cycle, when ``schedule.build`` finds a consistent
schedule for the union, and when the cost model expects it to pay.  In order:

1. every compute node is a unit; single-user elementwise chains are joined at once (always legal);
2. each connected region is tried as a whole; where that has no schedule or does not pay, groups grow along
   producers, layer by layer of the span, the longest path first;
3. cheap values are computed again by each reader where that beats writing and reading them;
4. independent groups of one layer whose schedules have the same blocks become one multi-output kernel; where there
   are very many, they stay apart and share launches (packs).
"""
from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import schedule
from ..errors import Unschedulable
from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Graph, Node, Shape, topological, view_source
from ..ir.ops import CHEAP, OPS
from ..schedule.build import is_long
from ..schedule.group import Group
from ..schedule.products import repeats_rows
from ..schedule.tile import guess
from . import cost, library, packs
from .alike import Alike
from .call import LibraryCall
from .partition import ALWAYS_FLOATING, Partition, Unit
from .phases import connected, phases
from .span import spans

ALONE = frozenset({"conv", "conv_filter", "window", "order"})  # library-sized work: a kernel of its own
DOT_INLINE_WORK = 64 * 64 * 64  # multiply-adds of one batch entry up to which a dot may join a group
INDEXING = frozenset({"slice", "transpose", "reverse", "pad", "concat", "cast", "select"})
SLACK = 1.15  # how much more computing a union of many units may do than the units do
MOST_PRODUCTS = 12  # in one kernel: each is a text of its own, and compilers take long over long functions
MOST_OUTPUTS = 32  # of a GPU's kernel: one of the new values of many variables would take minutes to find
MOST_READERS = 32  # that join what they read one by one, each with a schedule of all before it; others join by layer
MOST_REFUSALS = 16  # of a unit, after which no other one asks it: each has a schedule made of all that it holds
RUN = 16  # units alike, or of a layer, that are taken one by one
MOST_BESIDE = 3  # library calls that another is moved beside: values that wait long take memory
COPY_NODES = 8  # the longest cheap chain that several groups may each compute for themselves
COPY_BYTES = 1 << 14  # a smaller value costs next to nothing to hand over

Build = Callable[[Group, Any], Any]


@dataclass(frozen=True)
class Planned:
    """A candidate kernel with its estimated time, of which ``compute_ns`` is spent computing.

    ``scheduled`` is its schedule or the library's call.  In a draft it may be None: ``like`` then has that of a group
    that differs in constants and in where slices begin, and takes as long.
    """

    group: Group
    scheduled: Any
    ns: float
    compute_ns: float
    blocks: Dim = 0
    like: Planned | None = None


class _NotAlike(Exception):
    """A group has no schedule although one that seemed to be alike has."""


def plan(graph: Graph, target: Any, build: Build | None = None) -> list[Group]:
    """Groups of a graph, one kernel each, in an order that can be run.

    ``build`` is ``schedule.build`` unless given.  Raises Unschedulable when a single node has no schedule.
    """
    return [p.group for p in plan_scheduled(graph, target, build)]


def plan_scheduled(graph: Graph, target: Any, build: Build | None = None) -> list[Planned]:
    """As :func:`plan`, each group with the schedule that was found for it."""
    return draft(graph, target, build).finish()


def draft(graph: Graph, target: Any, build: Build | None = None) -> Draft:
    """As :func:`plan_scheduled`, but schedules are made where they decide something only."""
    planner = Planner(graph, target, build or _schedule_build())
    return Draft(planner, planner.run())


@dataclass(frozen=True)
class Draft:
    """A plan in which groups alike share a schedule."""

    planner: Planner
    planned: list[Planned]

    def finish(self) -> list[Planned]:
        """The plan with a schedule for every group."""
        p = self.planner
        try:
            final = [p.final(x) for x in self.planned]
        except _NotAlike:
            final = Planner(p.graph, p.target, p.build, share=False).run()
        return side_by_side(final) if p.uses_library else final


def side_by_side(planned: Sequence[Planned]) -> list[Planned]:
    """The plan with library calls moved up to calls before them, where nothing between makes what they read.

    A GPU runs steps that share no memory at the same time, and memory is given to values in this order: a call that
    came later might get that of a value which is no longer needed, and would have to wait for its readers.
    """
    out: list[Planned] = []
    for p in planned:
        out.insert(_place(p, out) if isinstance(p.scheduled, LibraryCall) else len(out), p)
    return out


def _place(call: Planned, before: Sequence[Planned]) -> int:
    """Behind the first of the few calls that it may follow directly; at the end when there is none."""
    reads = {view_source(n) for n in call.group.inputs}
    place, passed = len(before), 0
    for at in range(len(before), 0, -1):
        if not reads.isdisjoint(before[at - 1].group.outputs) or passed == MOST_BESIDE:
            break
        if isinstance(before[at - 1].scheduled, LibraryCall):
            place, passed = at, passed + 1
    return place


def _schedule_build() -> Build:
    return functools.partial(schedule.build, known=schedule.Known())


def must_write(graph: Graph) -> list[Node]:
    """The values that kernels must write: outputs with views looked through, params left out."""
    return [n for n in dict.fromkeys(view_source(o) for o in graph.outputs) if n.op != "param"]


class Planner:
    """One planning run over one graph."""

    def __init__(self, graph: Graph, target: Any, build: Build, share: bool = True):
        self.graph, self.target, self.build = graph, target, build
        self.alike = Alike() if share else None
        self.known: dict[Hashable, Planned | None] = {}
        nodes = graph.nodes()
        self.model = cost.CostModel(target.name, cost.environments(d for n in nodes for d in n.shape))
        self.tried: dict[frozenset[Node], Planned | None] = {}
        self.refused: set[Hashable] = set()  # kinds of pairs that do not pay: what one of them is refused, all are
        self.refusals: Counter[Unit] = Counter()  # by the unit that others asked
        self.uses_library = library.has_library(target)
        self.behind: dict[Node, int] | None = None
        self.inlined: dict[Node, bool] = {}
        self.products: dict[Unit, int] = {}
        self.bit_sets: dict[Unit, int] = {}
        floating = [n for n in nodes if n.op in ALWAYS_FLOATING]
        self.parts = Partition(graph, must_write(graph), [*floating, *self.shown(nodes)])

    def shown(self, nodes: Sequence[Node]) -> list[Node]:
        """Slices of params that products in kernels read: as cheap to read as the params."""
        if not self.uses_library:
            return []
        given: set[Node] = set()
        for n in nodes:
            if n.op == "param" or (n.op in ("slice", "reshape") and n.inputs[0] in given):
                given.add(n)
        far = {x for n in nodes if n.op == "dot" and not self.inlines(n) for x in map(view_source, n.inputs)}
        return [n for n in nodes if n in given and n.op == "slice" and n not in far]

    def run(self) -> list[Planned]:
        """The plan, as a draft."""
        self.join_epilogues()
        self.join_chains()
        self.split_unschedulable()
        self.join_phases()
        for region in self.regions():
            if not self.take_whole(region):
                self.grow(region)
        self.take_shown()
        self.copy_cheap_values()
        self.merge_layers()
        return [self.planned(u.nodes) for u in self.parts.in_order()]

    # --- candidates ---------------------------------------------------------------------------------

    def alone(self, unit: Unit) -> bool:
        """True for a unit that holds library-sized work."""
        return any(n.op in ALONE or (n.op == "dot" and not self.inlines(n)) for n in unit.nodes)

    def inlines(self, dot: Node) -> bool:
        """True for a product that may be part of a kernel."""
        if dot not in self.inlined:
            self.inlined[dot] = _small_dot(dot) or (self.uses_library and (library.is_light(dot) or all(
                library.is_small(dot, functools.partial(cost.value_of, env=env)) for env in self.model.envs)))
        return self.inlined[dot]

    def candidate(self, nodes: frozenset[Node]) -> Planned | None:
        """The kernel for ``nodes``, or None when it has no schedule; remembered."""
        if nodes not in self.tried:
            self.tried[nodes] = self.attempt(nodes)
        return self.tried[nodes]

    def attempt(self, nodes: frozenset[Node]) -> Planned | None:
        """Schedules ``nodes`` as they are now."""
        group = self.parts.group(nodes)
        call = library.match(group.nodes, group.outputs, self.target) if self.uses_library else None
        if call is None:
            return self._kernel(group)
        ns = self.model.library_ns(call.product)
        own = self._kernel(group) if call.call == "matmul" and all(
            n.op != "dot" or self.inlines(n) for n in group.nodes) else None
        return own if own is not None and own.ns <= ns else Planned(group, call, ns, 0.0)

    def _kernel(self, group: Group) -> Planned | None:
        """A kernel of its own for a group, or None when it has no schedule."""
        if self.uses_library and (repeats_rows(group.nodes, lambda n: _small_dot(n) or library.is_light(n))
                                  or sum(n.op == "dot" for n in group.nodes) > MOST_PRODUCTS
                                  or len(group.outputs) > MOST_OUTPUTS
                                  or any(x not in group.inputs for n in group.nodes for x in n.inputs if is_long(x))):
            return None
        if self.alike is None:
            return self._scheduled(group)
        key = self.alike.key(group)
        if key not in self.known:
            self.known[key] = self._scheduled(group)
            return self.known[key]
        found = self.known[key]
        return found and replace(found, group=group, scheduled=None, like=found)

    def _scheduled(self, group: Group) -> Planned | None:
        try:
            scheduled = self.build(group, self.target)
        except Unschedulable:
            return None
        estimate = self.model.estimate(group, scheduled)
        return Planned(group, scheduled, estimate.ns, estimate.compute_ns, scheduled.blocks)

    def final(self, planned: Planned) -> Planned:
        """With a schedule of its own, where so far a group alike had one."""
        if planned.scheduled is not None:
            return planned
        found = self._scheduled(planned.group)
        if found is None:
            raise _NotAlike
        return found

    def planned(self, nodes: frozenset[Node]) -> Planned:
        found = self.candidate(nodes)
        if found is None:
            raise Unschedulable(f"{self._name(nodes)} has no schedule for target '{self.target.name}'; "
                                "the cluster stays TensorFlow's.")
        return found

    def _name(self, nodes: frozenset[Node]) -> str:
        last = max(nodes, key=self.parts.rank_of.__getitem__)
        return f"{last.op} of '{last.origin}'"

    def pays(self, units: frozenset[Unit]) -> bool:
        """True when the union of units has a schedule that is no slower than the units one by one."""
        merged = self.candidate(frozenset().union(*(u.nodes for u in units)))
        if merged is None:
            return False
        apart = [self.candidate(u.nodes) for u in units]
        # fsum is exact: sets have no order, and a plan must not depend on one
        return any(a is None for a in apart) or merged.ns <= math.fsum(a.ns for a in apart if a)

    # --- steps --------------------------------------------------------------------------------------

    def join_epilogues(self) -> None:
        """Gives a library's call what only follows it and is part of it: a bias, and a convolution a sum and ReLU."""
        parts = self.parts
        for n in parts.order if self.uses_library else ():
            if n not in parts.owner or not library.suits_library(n, self.target):
                continue
            nodes, last = frozenset([n, *library.carried(n)]), n
            while last not in parts.required and len(parts.users[last]) == 1:
                last = next(iter(parts.users[last]))
                group = parts.group(nodes | {last})
                if len(parts.owner[last].nodes) > 1 or library.match(group.nodes, [last], self.target) is None:
                    break
                nodes |= {last}
            if len(nodes) > 1:
                parts.contract([parts.owner[m] for m in nodes])

    def join_chains(self) -> None:
        """Joins an elementwise node to its only user when that is elementwise too: same shape, no cycle."""
        parts = self.parts
        for n in reversed(parts.order):
            if n not in parts.owner or n in parts.required or not OPS[n.op].elementwise:
                continue
            users = parts.users[n]
            if len(users) != 1:
                continue
            user = next(iter(users))
            if OPS[user.op].elementwise and user.shape == n.shape:
                both = [parts.owner[n], parts.owner[user]]
                if not any(self.alone(u) for u in both):
                    parts.contract(both)

    def join_phases(self) -> None:
        """Joins a product in a kernel with what follows it up to the next product, and with what it only moves."""
        if not self.uses_library:
            return
        for units in phases(self.parts, self._is_product):
            if not any(self.alone(u) for u in units) and not self.parts.makes_cycle(units) and self.pays(units):
                self.parts.contract(units)

    def _is_product(self, unit: Unit) -> bool:
        return any(n.op == "dot" for n in unit.nodes) and not self.alone(unit)

    def regions(self) -> list[frozenset[Unit]]:
        """Weakly connected sets of units, cut at work that stays a kernel of its own."""
        units = [u for u in self.parts.units if not self.alone(u) and not self._only_shows(u)]
        return connected(self.parts, sorted(units, key=lambda u: u.id))

    def _only_shows(self, unit: Unit) -> bool:
        """True for outputs that only pick from other outputs: no group should grow around them."""
        sources = {s for n in unit.nodes for s in self.parts.sources(n)} - unit.nodes
        return (all(n.op in INDEXING for n in unit.nodes) and bool(sources & self.parts.required)
                and not self.parts.consumers(unit))

    def take_shown(self) -> None:
        """Lets kernels write what only shows their outputs, where that pays."""
        for u in self.parts.in_order():
            if self._only_shows(u):
                for p in sorted(self.parts.producers(u), key=self.parts.first):  # sets have no order
                    both = frozenset((u, p))
                    if not self.alone(p) and not self.parts.makes_cycle(both) and self.pays(both):
                        self.parts.contract(both)
                        break

    def take_whole(self, region: frozenset[Unit]) -> bool:
        """Makes a region one kernel when it is legal and costs nothing."""
        return len(region) < 2 or self.try_run(region) is not None

    def grow(self, region: frozenset[Unit]) -> None:
        """Grows groups from the roots of a region along producers until nothing more can join."""
        alive = set(region)
        settled: set[Unit] = set()
        while layer := self._next_layer(alive, settled):
            for seed in layer:
                if seed in alive:
                    settled.add(self.grow_one(seed, alive))

    def _next_layer(self, alive: set[Unit], settled: set[Unit]) -> list[Unit]:
        """What is not settled of the first layer where anything is not."""
        layers = ([u for u in layer if u not in settled] for layer in self._layers(alive))
        return next(filter(None, layers), [])

    def _layers(self, units: set[Unit]) -> list[list[Unit]]:
        """The layers of some units, roots first."""
        return spans([u for u in self.parts.in_order() if u in units], self.parts.producers).layers()

    def grow_one(self, unit: Unit, alive: set[Unit]) -> Unit:
        """Takes producers into ``unit``: nearest layer first, in a layer the longest path first.

        Whole runs of producers are tried at once, half as many after each refusal, so that a group of n
        units takes about log n schedules instead of n.
        """
        refused: set[Unit] = set()
        step = len(alive)
        while True:
            ahead = self.ahead(unit, alive, refused)
            merged = None
            while merged is None and (step := min(step, len(ahead))) > 1:
                merged = self.try_run(frozenset((unit, *ahead[:step])))
                step = step * 2 if merged else step // 2
            if merged is None:
                near = self.parts.producers(unit)
                merged = next((m for p in ahead if p in near and (m := self.try_merge(unit, p, refused))), None)
                step = 2
            if merged is None:
                return unit
            alive &= self.parts.units
            alive.add(merged)
            unit = merged

    def ahead(self, unit: Unit, alive: set[Unit], refused: set[Unit]) -> list[Unit]:
        """Units that ``unit`` may take, in the order it should: direct and indirect producers."""
        found: set[Unit] = set()
        stack = [unit]
        behind = self.behind_library(unit)
        while stack:
            for u in self.parts.producers(stack.pop()):
                if u in alive and u not in found and u not in refused and self.refusals[u] < MOST_REFUSALS \
                        and not (behind and behind & self.bits(u)):
                    found.add(u)
                    stack.append(u)
        if len(found) < 2:
            return list(found)
        found.add(unit)
        s = spans(topological([unit], lambda u: list(self.parts.producers(u) & found)), self.parts.producers)
        found.discard(unit)
        return sorted(found, key=lambda u: (s.span[u], -s.depth[u], u.id))

    def too_many_products(self, units: Iterable[Unit]) -> bool:
        """True for units that hold more products than a kernel may: known without looking at their groups."""
        return self.uses_library and sum(map(self._count_products, units)) > MOST_PRODUCTS

    def _count_products(self, unit: Unit) -> int:
        if unit not in self.products:
            self.products[unit] = sum(n.op == "dot" for n in unit.nodes)
        return self.products[unit]

    def bits(self, unit: Unit) -> int:
        """The nodes of a unit as a bit set."""
        if unit not in self.bit_sets:
            self.bit_sets[unit] = sum(1 << self.parts.rank_of[n] for n in unit.nodes)
        return self.bit_sets[unit]

    def behind_library(self, unit: Unit) -> int:
        """Nodes from which a path to ``unit`` leads through work that stays a kernel of its own; they cannot join."""
        if self.behind is None:
            self.behind = self._find_behind()
        out = 0
        for n in unit.nodes:
            out |= self.behind[n]
        return out

    def _find_behind(self) -> dict[Node, int]:
        alone = {n for u in self.parts.units if self.alone(u) for n in u.nodes}
        before: dict[Node, int] = {}
        behind: dict[Node, int] = {}
        for n in self.parts.order:
            before[n] = behind[n] = 0
            for x in self.parts.sources(n):
                before[n] |= before[x] | 1 << self.parts.rank_of[x]
                behind[n] |= before[x] if x in alone else behind[x]
        return behind

    def try_run(self, units: frozenset[Unit]) -> Unit | None:
        """Joins many units at once, if that costs no parallelism and no work."""
        return self.parts.contract(units) if self.is_free(units) else None

    def is_free(self, units: frozenset[Unit]) -> bool:
        """True when the union is legal and computes about as fast as its units do, each with its own blocks.

        Launches and memory traffic that the union saves do not count: they could pay for a poor union where a
        smaller one would save nearly as much.
        """
        if self.too_many_products(units) or self.parts.makes_cycle(units):
            return False
        merged = self.candidate(frozenset().union(*(u.nodes for u in units)))
        if merged is None:
            return False
        apart = [self.candidate(u.nodes) for u in units]
        if not all(apart):
            return True
        return merged.compute_ns <= SLACK * math.fsum(a.compute_ns for a in apart if a) + self.model.launches_ns

    def try_merge(self, unit: Unit, producer: Unit, refused: set[Unit]) -> Unit | None:
        both = frozenset((unit, producer))
        kind = self.kind_of_pair(unit, producer)
        if kind not in self.refused:
            if self.parts.makes_cycle(both):
                return None  # may become possible once what lies between has joined
            if len(self.parts.written(producer.nodes)) <= MOST_READERS and self.pays(both):
                return self.parts.contract(both)
        self._refuse(kind, [producer])
        refused.add(producer)
        return None

    def _refuse(self, kind: Hashable | None, units: Iterable[Unit]) -> None:
        """Remembers what did not pay, and with which units."""
        self.refusals.update(units)
        if kind is not None:
            self.refused.add(kind)

    def kind(self, unit: Unit) -> int | None:
        """Equal for units alike; None where it is not known which are."""
        planned = self.candidate(unit.nodes) if self.alike else None
        return None if planned is None or isinstance(planned.scheduled, LibraryCall) else id(planned.like or planned)

    def kind_of_pair(self, unit: Unit, producer: Unit) -> Hashable | None:
        """Equal for pairs of units alike that hand over values alike and share inputs alike."""
        kinds = self.kind(unit), self.kind(producer)
        if None in kinds:
            return None
        parts = self.parts
        mine = parts.reads(unit)
        handed = [(*_looks(n), parts.users[n] <= unit.nodes | producer.nodes, n in parts.required)
                  for n in mine & producer.nodes]
        shared = [_looks(n) for n in mine & parts.reads(producer)]
        return *kinds, frozenset(Counter(handed).items()), frozenset(Counter(shared).items())

    def split_unschedulable(self) -> None:
        """Takes apart a unit that has no schedule (only chains joined without asking can be one)."""
        for u in list(self.parts.units):
            if len(u.nodes) > 1 and self.candidate(u.nodes) is None:
                fresh = self.parts.replace(u, ([n] for n in u.nodes))
                self.grow(frozenset(fresh))

    def copy_cheap_values(self) -> None:
        """Lets readers compute cheap values themselves where that beats writing and reading them."""
        self.tried = {u.nodes: self.candidate(u.nodes) for u in self.parts.units}  # others will not be what they were
        self.refusals.clear()  # those were of readers
        for u in reversed(self.parts.in_order()):
            if u not in self.parts.units or self.alone(u) or self._is_product(u) \
                    or (self._copyable(u) and (self._copy_alike(u) or self.try_copies(u.nodes))):
                continue
            for v in self.parts.written(u.nodes):
                if v in self.parts.owner and v not in self.parts.required and self._worth_a_copy(v):
                    self.try_copies(self._chain(v))

    def _copy_alike(self, unit: Unit) -> bool:
        """Lets the reader of many values alike compute all of them, rather than ask for one after the other."""
        readers = self.parts.consumers(unit)
        widest = max(readers, key=lambda r: (len(r.nodes), r.id), default=unit)
        if len(self.parts.reads(widest)) <= RUN:
            return False
        kind = widest, self.kind_of_copies(unit.nodes, readers)
        if None in kind or kind in self.refused:
            return False
        alike = [u for u in self.parts.producers(widest) if not self.alone(u) and self._copyable(u)
                 and kind[1] == self.kind_of_copies(u.nodes, self.parts.consumers(u))]
        if len(alike) > RUN and self.try_copies(frozenset().union(*(u.nodes for u in alike))):
            return True
        self.refused.add(kind)
        return False

    def _copyable(self, unit: Unit) -> bool:
        """Nothing in it must be written, and computing it again is cheap or tiny."""
        if unit.nodes & self.parts.required:
            return False
        cheap = len(unit.nodes) <= COPY_NODES and all(_cheap(n) for n in unit.nodes)
        return cheap or self.model.copy_ns(unit.nodes) < self.model.launches_ns

    def _worth_a_copy(self, node: Node) -> bool:
        return _cheap(node) and self.model.bytes_of(node) >= COPY_BYTES

    def _chain(self, node: Node) -> frozenset[Node]:
        """``node`` and the cheap values of its unit that it is made of, down to values that are written anyway."""
        unit = self.parts.owner[node]
        written = set(self.parts.written(unit.nodes))
        chain: set[Node] = set()
        stack = [node]
        while stack and len(chain) < COPY_NODES:
            n = stack.pop()
            chain.add(n)
            stack.extend(s for s in self.parts.sources(n) if s in unit.nodes and s not in chain | written
                         and self._worth_a_copy(s))
        return frozenset(chain)

    def try_copies(self, nodes: frozenset[Node]) -> bool:
        """Lets ``nodes`` float if the kernels around them get faster in sum."""
        parts = self.parts
        around = parts.around(nodes)
        if any(self.alone(u) for u in around) or not any(parts.consumers(parts.owner[n]) for n in nodes):
            return False
        readers = {parts.owner[r] for n in nodes for r in parts.users[n]} - {parts.owner[n] for n in nodes}
        kind = self.kind_of_copies(nodes, readers)
        if kind in self.refused or any(self.refusals[u] >= MOST_REFUSALS for u in readers):
            return False
        before, state, tried = math.fsum(self.planned(u.nodes).ns for u in around), parts.state(), self.tried
        parts.let_float(nodes)
        near = parts.around(nodes)
        stale = {u.nodes for u in (*around, *near)}
        self.tried = {k: v for k, v in tried.items() if k not in stale}
        after = [self.candidate(u.nodes) for u in near]
        if all(after) and math.fsum(a.ns for a in after if a) < before:
            return True
        parts.restore(state)
        self.tried = tried
        self._refuse(kind, readers)
        return False

    def kind_of_copies(self, nodes: frozenset[Node], readers: Iterable[Unit]) -> Hashable | None:
        """Equal for values alike that as many units of each kind read."""
        kinds = Counter(map(self.kind, readers))
        return None if self.alike is None or None in kinds else (self.alike.key(self.parts.group(nodes)),
                                                                 frozenset(kinds.items()))

    def merge_layers(self) -> None:
        """Merges independent groups of one layer into multi-output kernels; the same blocks go together first."""
        self._merge_layer(self._before_convolutions())
        for layer in spans(self.parts.in_order(), self.parts.producers).layers():
            self._merge_layer(layer)

    def _merge_layer(self, layer: Iterable[Unit]) -> None:
        by_blocks: dict[Any, list[Unit]] = {}
        for u in self._left_to_merge([u for u in layer if not self.alone(u)]):
            by_blocks.setdefault(self.planned(u.nodes).blocks, []).append(u)
        merged = [self._merge_all(same) for same in by_blocks.values()]
        if len(merged) > 1:
            self._merge_all(merged)

    def _left_to_merge(self, units: list[Unit]) -> list[Unit]:
        """Units of a layer but for small ones that are more than a kernel may hold: those are packed."""
        if not self.target.packs:
            return units
        small = [u for u in units if self._is_small(self.planned(u.nodes))]
        packed: set[Unit] = set()
        for products, most in ((False, MOST_OUTPUTS), (True, MOST_PRODUCTS)):
            some = [u for u in small if self._is_product(u) == products]
            if sum(len(self.parts.written(u.nodes)) for u in some) > most:
                packed.update(some)
        return [u for u in units if u not in packed]

    def _is_small(self, planned: Planned) -> bool:
        """True for a kernel that may be packed with any."""
        ns = self.model.step_ns(planned.ns)
        return ns <= packs.PACK_NS and not packs.fills(ns, guess(planned.blocks), self.target.cores)

    def _before_convolutions(self) -> list[Unit]:
        """Units that convolutions read and that wait for no library: filters and biases can all be made ready first."""
        found: dict[Unit, None] = {}
        for u in self.parts.in_order() if self.uses_library else ():
            if not self.alone(u) and self.parts.producers(u) <= found.keys() \
                    and any(n.op == "conv" for c in self.parts.consumers(u) for n in c.nodes):
                found[u] = None
        return list(found)

    def _merge_all(self, units: list[Unit]) -> Unit:
        """Merges into the first unit what pays; returns it.  Halves first, so that n units take n log n outputs."""
        if len(units) > RUN and not self.uses_library:  # there, a kernel has few outputs
            half = len(units) // 2
            units = [self._merge_all(units[:half]), self._merge_all(units[half:])]
        kept = units[0]
        for u in units[1:]:
            both = frozenset((kept, u))
            if not self.parts.makes_cycle(both) and self.pays(both):
                kept = self.parts.contract(both)
        return kept


def _looks(node: Node) -> tuple[Shape, str]:
    return node.shape, node.dtype


def _cheap(node: Node) -> bool:
    """An element costs little to compute wherever it is read."""
    op = OPS[node.op]
    return node.op in INDEXING or (op.elementwise and op.cost <= CHEAP)


def _small_dot(node: Node) -> bool:
    """A batched product whose one batch entry is small (and known to be)."""
    batch = len(node.attrs["batch"][0])
    contract = D.product(node.inputs[0].shape[a] for a in node.attrs["contract"][0])
    work = D.product(node.shape[batch:]) * contract
    return isinstance(work, int) and work <= DOT_INLINE_WORK
