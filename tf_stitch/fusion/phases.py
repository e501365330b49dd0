"""Phases: which units may be computed between two points where every block needs what all blocks made.

A heavy op (a reduction, a product) reads whole rows of what it folds.  A block that owns some columns of a product can
go on with elementwise ops, but the next product needs all columns: there a phase ends.  A step of an LSTM is one phase,
its product, bias, gates and cell; layers and directions that do not depend on each other share phases (the wavefront).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

from ..schedule.storage import HEAVY
from .partition import Partition, Unit

MOVES = frozenset({"slice", "transpose", "reverse", "pad", "concat", "gather", "gather_nd", "reshape"})


def phases(parts: Partition, is_product: Callable[[Unit], bool]) -> list[frozenset[Unit]]:
    """Connected units of one phase each, where it has a product that may join others; the first phase first."""
    order = parts.in_order()
    place = _places(parts, order, is_product)
    by_place: dict[int, list[Unit]] = {}
    for u in order:
        by_place.setdefault(place[u], []).append(u)
    found: list[frozenset[Unit]] = []
    for p in sorted(by_place):
        found.extend(c for c in connected(parts, by_place[p]) if len(c) > 1 and any(is_product(u) for u in c))
    return found


def _places(parts: Partition, order: list[Unit], is_product: Callable[[Unit], bool]) -> dict[Unit, int]:
    """The phase of every unit: as early as it can be, but what only moves data goes to the phase that reads it.

    So do products of what is known from the start: they wait for the phase that adds them to something.
    """
    depth: dict[Unit, int] = {}
    for u in order:
        before = max((depth[p] for p in parts.producers(u)), default=0)
        depth[u] = before + any(n.op in HEAVY for n in u.nodes)
    place = dict(depth)
    for u in reversed(order):
        readers = {place[c] for c in parts.consumers(u)}
        moves = all(n.op in MOVES for n in u.nodes) or (depth[u] == 1 and is_product(u))
        if moves and len(readers) == 1 and not u.nodes & parts.required:
            place[u] = max(place[u], *readers)
    return place


def connected(parts: Partition, units: Iterable[Unit]) -> list[frozenset[Unit]]:
    """Weakly connected sets of units, in order."""
    left = dict.fromkeys(units)
    found = []
    while left:
        stack = [next(iter(left))]
        del left[stack[0]]
        members = set(stack)
        while stack:
            u = stack.pop()
            for v in (parts.producers(u) | parts.consumers(u)) & left.keys():
                del left[v]
                members.add(v)
                stack.append(v)
        found.append(frozenset(members))
    return found
