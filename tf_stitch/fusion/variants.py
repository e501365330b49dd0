"""Variants: plans of one graph for ranges of an unknown size.

Kernels take sizes at run time, but which products are kernels and what their blocks own suits some sizes better than
others: a rewrite for one row multiplies in kernels what one for a thousand rows leaves to the library.  Where the cost
model says so, a program holds plans for several ranges; a size that comes picks one, nothing is compiled again.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..ir import dims as D
from ..ir.graph import Graph, Node, view_source
from . import cost
from .call import LibraryCall
from .columns import split_columns
from .layouts import keep_channels_last
from .library import has_library, prepare_calls
from .planner import Draft, Planned, draft
from .split import split_reductions

BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)  # sizes up to which a plan of its own is tried: it suits their upper half;
ROWS = 512  # this one where no products but rows are folded: more are a warp's each, fewer a block's
WORTH = 1.03  # a plan of its own must save so much of its work at some size of its range: it is compiled, too
START_NS = 1300.0  # of a kernel's time: what every one takes, whatever it does


class Time(NamedTuple):
    """Estimated nanoseconds of a plan at a size, and those that are left without starting kernels."""

    ns: float
    work_ns: float


@dataclass(frozen=True)
class Range:
    """Sizes from ``least`` to ``most`` of an unknown, or all sizes where ``most`` is None."""

    size: D.Symbol
    least: int = 0
    most: int | None = None

    def bounded(self, graph: Graph) -> Graph:
        """The graph for sizes up to ``most``; 1 is a size of its own, so that a single row is no unknown one.

        Where a range begins only counts for the last one: plans for fewer may not pay.
        """
        if self.most is None and not self.least:
            return graph
        least = self.size.lo if self.most else self.least
        return graph.substitute({self.size.name: 1 if self.most == 1 else D.symbol(self.size.name, least, self.most)})


def ranges(graph: Graph, target: Any) -> list[Range]:
    """The ranges for which a plan of their own may pay, in order, the last one without an end; none for one plan."""
    if target.grids or not has_library(target):
        return []
    size = _deciding(graph, lambda n: n.op in ("dot", "conv"))
    if size is None:
        size = _deciding(graph, _folds_rows)
        return [] if size is None or isinstance(size.hi, int) else [Range(size, 0, ROWS), Range(size, ROWS + 1)]
    bounds = [b for b in BOUNDS if not isinstance(size.hi, int) or b < size.hi]
    return [*(Range(size, before + 1, b) for before, b in zip([0, *bounds], bounds, strict=False)), Range(size)]


def _folds_rows(n: Node) -> bool:
    """True for a reduction of rows of known length."""
    return n.op == "reduce" and n.rank > 0 and tuple(n.attrs["axes"]) == (n.inputs[0].rank - 1,) \
        and isinstance(n.inputs[0].shape[-1], int)


def draft_graph(graph: Graph, target: Any) -> Draft:
    """A draft of a graph's plan.  Raises Unschedulable when a single node has no schedule."""
    graph = keep_channels_last(graph) if has_library(target) else graph
    return draft(split_reductions(prepare_calls(split_columns(graph, target), target), target), target)


def estimates(plan: Draft, here: Range, found: Sequence[Range]) -> dict[int, Time]:
    """What a plan takes at the ends of all ranges that its own one holds, by size."""
    ends = {n for r in found if r.most is not None for n in (r.least, r.most)}
    return {n: _time(plan, here.size, n) for n in sorted(ends) if here.most is None or n <= here.most}


def pays(own: Mapping[int, Time], wider: Mapping[int, Time], here: Range) -> bool:
    """True where a range's own plan is faster than the one for more sizes, at an end of the range."""
    assert here.most is not None
    return is_sure(here) or any(wider[n].ns - own[n].ns > (WORTH - 1) * own[n].work_ns
                                for n in (here.least, here.most))


def is_sure(here: Range) -> bool:
    """True where a plan of a range's own always pays.

    One from 0 on does: the estimates do not know how threads share out rows.  So does that for one row, where no size
    is unknown: it gains more than estimates know of, and is wanted most often.
    """
    return not here.least or here.most == 1


def _deciding(graph: Graph, decides: Callable[[Node], bool]) -> D.Symbol | None:
    """The unknown that most of the nodes that decide depend on."""
    found: Counter[str] = Counter()
    ranges: dict[str, D.Symbol] = {}
    for n in graph.nodes():
        unknowns = _unknowns(n)
        ranges.update((s.name, _narrower(s, ranges.get(s.name, s))) for s in unknowns)
        if decides(n):
            found.update({s.name for s in unknowns})
    usable = [name for name in graph.symbols if name in found and not isinstance(ranges[name].hi, D.Expr)]
    return ranges[max(usable, key=found.__getitem__)] if usable else None


def _narrower(a: D.Symbol, b: D.Symbol) -> D.Symbol:
    """An unknown within the ranges of both: shapes may know more of it than what it is read from."""
    if isinstance(a.hi, D.Expr) or isinstance(b.hi, D.Expr):
        return a if isinstance(a.hi, D.Expr) else b
    lows, highs = ([x for x in pair if x is not None] for pair in ((a.lo, b.lo), (a.hi, b.hi)))
    return D.Symbol(a.name, max(lows, default=None), min(highs, default=None))


def shared_memory(graph: Graph) -> list[int]:
    """For each output, the param (its complement) or the first output whose memory it shares."""
    first: dict[Node, int] = {p: ~i for i, p in enumerate(graph.params)}
    return [first.setdefault(view_source(o), i) for i, o in enumerate(graph.outputs)]


def _unknowns(n: Node) -> frozenset[D.Symbol]:
    return frozenset().union(*(D.symbols(d) for x in (n, *n.inputs) for d in x.shape))


def _time(plan: Draft, size: D.Symbol, n: int) -> Time:
    """Estimated time of a plan when the size is ``n``."""
    model = cost.CostModel(plan.planner.target.name, [{size.name: n}])
    planned = plan.planned
    kinds = Counter(id(p.like or p) for p in planned)
    one_of = {id(p.like or p): p.like or p for p in planned}
    ns = math.fsum(count * _step_ns(one_of[kind], model) for kind, count in kinds.items())
    return Time(ns, max(ns - START_NS * sum(not isinstance(p.scheduled, LibraryCall) for p in planned), 0.0))


def _step_ns(p: Planned, model: cost.CostModel) -> float:
    if isinstance(p.scheduled, LibraryCall):
        return model.library_ns(p.scheduled.product)
    return model.estimate(p.group, p.scheduled).ns


def active_dims(kept: Sequence[Range]) -> list[D.Dim]:
    """For each range, a dim that is 1 where its plan is the one to run and 0 elsewhere.

    That is the first whose ``most`` is not below the size; the last range is that of all sizes.
    """
    size = kept[-1].size
    n = D.symbol(size.name, size.lo, size.hi)
    out: list[D.Dim] = []
    before: D.Dim = 0
    for r in kept:
        if r.most is None:
            within: D.Dim = 1
        elif r.most == 1:
            within = _up_to(n, 1) - _up_to(n, 0)
        else:
            within = _up_to(n, r.most)
        out.append(within - before)
        before = before + out[-1]
    return out


def _up_to(n: D.Dim, most: int) -> D.Dim:
    """1 when ``n`` is at most ``most``, else 0."""
    return D.dmin(1, D.dmax(0, most + 1 - n))
