"""Variants: plans of one graph for ranges of an unknown size.

Kernels take sizes at run time, but which products are kernels and what their blocks own suits some sizes better than
others: a rewrite for one row multiplies in kernels what one for a thousand rows leaves to the library.  Where the cost
model says so, a program holds plans for several ranges; a size that comes picks one, nothing is compiled again.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import dims as D
from ..ir.graph import Graph, Node, view_source
from . import cost
from .call import LibraryCall
from .columns import split_columns
from .library import has_library, prepare_calls
from .planner import Draft, Planned, draft
from .split import split_reductions

BOUNDS = (1, 4, 16)  # sizes up to which a plan of its own is tried,
FOLDED = 128  # and this one where products fold the unknown: without a bound, only a library does that fast
WORTH = 1.05  # a plan of its own must be so much faster at some size of its range: it is compiled, too


@dataclass(frozen=True)
class Variant:
    """A plan for every size up to ``most`` (None: for all), and the graph that it is of."""

    graph: Graph
    planned: list[Planned]
    most: int | None = None


@dataclass(frozen=True)
class Variants:
    """Plans of a graph, that for the smallest sizes first; the last one is for all sizes.

    The first whose ``most`` is not below the size is the one to run.  ``size`` is the unknown; None for a single plan.
    """

    size: D.Symbol | None
    plans: list[Variant]


def plan_variants(graph: Graph, target: Any) -> Variants:
    """Plans of a graph.  Raises Unschedulable when a single node has no schedule."""
    general = _draft(graph, target)
    size = None if target.grids else _deciding(graph, target)
    if size is None:
        return Variants(None, [Variant(general.planner.graph, general.finish())])
    kept: list[tuple[Draft, int | None]] = [(general, None)]
    for least, most in reversed(_ranges(graph, size)):
        made = _draft(_bounded(graph, size, most), target)
        if _memory(made.planner.graph) == _memory(general.planner.graph) and any(
                _ns(kept[0][0], size, n) > WORTH * _ns(made, size, n) for n in {least, most}):
            kept.insert(0, (made, most))
    plans = [Variant(made.planner.graph, made.finish(), most) for made, most in kept]
    return Variants(size if len(plans) > 1 else None, plans)


def _ranges(graph: Graph, size: D.Symbol) -> list[tuple[int, int]]:
    """(least, most) size of the ranges for which a plan of their own is tried, in order."""
    folded = any(size.name in {s.name for a in n.attrs["contract"][0] for s in D.symbols(n.inputs[0].shape[a])}
                 for n in graph.nodes() if n.op == "dot")
    bounds = [b for b in (*BOUNDS, *([FOLDED] if folded else [])) if not isinstance(size.hi, int) or b < size.hi]
    return [(before + 1, b) for before, b in zip([0, *bounds], bounds, strict=False)]


def _draft(graph: Graph, target: Any) -> Draft:
    return draft(split_reductions(prepare_calls(split_columns(graph, target), target), target), target)


def _deciding(graph: Graph, target: Any) -> D.Symbol | None:
    """The unknown that most products depend on."""
    if not has_library(target):
        return None
    found: Counter[str] = Counter()
    ranges: dict[str, D.Symbol] = {}
    for n in graph.nodes():
        unknowns = _unknowns(n)
        ranges.update((s.name, _narrower(s, ranges.get(s.name, s))) for s in unknowns)
        if n.op in ("dot", "conv"):
            found.update({s.name for s in unknowns})
    usable = [name for name in graph.symbols if name in found and not isinstance(ranges[name].hi, D.Expr)]
    return ranges[max(usable, key=found.__getitem__)] if usable else None


def _narrower(a: D.Symbol, b: D.Symbol) -> D.Symbol:
    """An unknown within the ranges of both: shapes may know more of it than what it is read from."""
    if isinstance(a.hi, D.Expr) or isinstance(b.hi, D.Expr):
        return a if isinstance(a.hi, D.Expr) else b
    lows, highs = ([x for x in pair if x is not None] for pair in ((a.lo, b.lo), (a.hi, b.hi)))
    return D.Symbol(a.name, max(lows, default=None), min(highs, default=None))


def _memory(graph: Graph) -> list[int]:
    """For each output, the param (its complement) or the first output whose memory it shares."""
    first: dict[Node, int] = {p: ~i for i, p in enumerate(graph.params)}
    return [first.setdefault(view_source(o), i) for i, o in enumerate(graph.outputs)]


def _unknowns(n: Node) -> frozenset[D.Symbol]:
    return frozenset().union(*(D.symbols(d) for x in (n, *n.inputs) for d in x.shape))


def _bounded(graph: Graph, size: D.Symbol, most: int) -> Graph:
    """The graph for sizes up to ``most``; 1 is a size of its own, so that a single row is no unknown one."""
    return graph.substitute({size.name: most if most == 1 else D.symbol(size.name, size.lo, most)})


def _ns(plan: Draft, size: D.Symbol, n: int) -> float:
    """Estimated time of a plan when the size is ``n``."""
    model = cost.CostModel(plan.planner.target.name, [{size.name: n}])
    planned = plan.planned
    kinds = Counter(id(p.like or p) for p in planned)
    one_of = {id(p.like or p): p.like or p for p in planned}
    return math.fsum(count * _step_ns(one_of[kind], model) for kind, count in kinds.items())


def _step_ns(p: Planned, model: cost.CostModel) -> float:
    if isinstance(p.scheduled, LibraryCall):
        return model.library_ns(p.scheduled.product)
    return model.estimate(p.group, p.scheduled).ns


def active_dims(variants: Variants) -> Sequence[D.Dim]:
    """For each plan, a dim that is 1 where it is the one to run and 0 elsewhere."""
    if variants.size is None:
        return [1]
    n = D.symbol(variants.size.name, variants.size.lo, variants.size.hi)
    out: list[D.Dim] = []
    before: D.Dim = 0
    for v in variants.plans:
        if v.most is None:
            within: D.Dim = 1
        elif v.most == 1:
            within = _up_to(n, 1) - _up_to(n, 0)
        else:
            within = _up_to(n, v.most)
        out.append(within - before)
        before = before + out[-1]
    return out


def _up_to(n: D.Dim, most: int) -> D.Dim:
    """1 when ``n`` is at most ``most``, else 0."""
    return D.dmin(1, D.dmax(0, most + 1 - n))
