"""Parallel packing: kernels that do not depend on each other share a launch (FusionStitching, arXiv 1811.05213).

The updates of hundreds of variables, the features of a recommender and the members of an ensemble are small kernels of
which a device could run many at once; what they cost is mostly their launches.  A pack runs them as one: its blocks are
shared out to its members, each of which keeps its own text or, where only sizes differ, shares one (sizes.py).

What may share a launch must not slow a member down.  A kernel that takes much longer than a launch gains nothing and
stays alone; one that fills the device only shares with kernels of the same structure, whose registers are as many as
its own; kernels with products, or with much shared memory, only share with their like.
"""
from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

LEAST = 8  # members; independent launches of a CUDA graph overlap, so that fewer gain little
RATE_NS = 2_000  # a kernel with blocks for all cores that takes longer fills the device: what counts is its rate
PACK_NS = 10_000  # a kernel that is estimated to take longer is not packed: its launch is a small part of that


def fills(ns: float, blocks: int, cores: int) -> bool:
    """True for a kernel of so many blocks, estimated to take ``ns``, that keeps all cores busy for a while."""
    return ns > RATE_NS and blocks >= cores


def runs(after: Sequence[frozenset[int]], kinds: Sequence[Hashable | None]) -> list[tuple[int, ...]]:
    """Steps in an order that can be run, those that share a launch together.

    Args:
      after: for each step, the steps before it in the list that it depends on.
      kinds: which steps may share a launch: those of one kind; None for steps that stay alone.

    A step can run at any level from its earliest to its latest, so that no path gets longer.  The level that most steps
    of a kind can have is theirs; it narrows those of the others, and so on, while at least LEAST can share one.
    """
    levels = _Levels(after)
    free = {s for s, kind in enumerate(kinds) if kind is not None}
    found: list[tuple[int, ...]] = []
    while (best := _most(levels, kinds, free)) is not None:
        kind, level = best
        taken = [s for s in sorted(free, key=lambda s: (levels.latest[s], s))
                 if kinds[s] == kind and levels.fix(s, level)]
        free.difference_update(taken)
        if len(taken) >= LEAST:
            found.append(tuple(sorted(taken)))
    return _in_order(after, found)


class _Levels:
    """The earliest and the latest level of every step."""

    def __init__(self, after: Sequence[frozenset[int]]):
        self.after = after
        self.users: list[list[int]] = [[] for _ in after]
        self.earliest = [0] * len(after)
        for s, operands in enumerate(after):
            for o in operands:
                self.users[o].append(s)
            self.earliest[s] = max((self.earliest[o] + 1 for o in operands), default=0)
        self.latest = [max(self.earliest, default=0)] * len(after)
        for s in reversed(range(len(after))):
            self.latest[s] = min((self.latest[u] - 1 for u in self.users[s]), default=self.latest[s])

    def fix(self, step: int, level: int) -> bool:
        """Gives a step its level, if it can have that; narrows the levels of what depends on it and of its operands."""
        if not self.earliest[step] <= level <= self.latest[step]:
            return False
        self.earliest[step] = self.latest[step] = level
        stack = [step]
        while stack:
            s = stack.pop()
            for u in self.users[s]:
                if self.earliest[u] <= self.earliest[s]:
                    self.earliest[u] = self.earliest[s] + 1
                    stack.append(u)
        stack = [step]
        while stack:
            s = stack.pop()
            for o in self.after[s]:
                if self.latest[o] >= self.latest[s]:
                    self.latest[o] = self.latest[s] - 1
                    stack.append(o)
        return True


def _most(levels: _Levels, kinds: Sequence[Hashable | None], free: set[int]) -> tuple[Hashable, int] | None:
    """The kind and the level that most free steps can share, if they are enough; the last such level."""
    change: dict[Hashable, dict[int, int]] = {}  # how many more steps of a kind can have a level than the one before
    for s in sorted(free):
        of_kind = change.setdefault(kinds[s], {})
        of_kind[levels.earliest[s]] = of_kind.get(levels.earliest[s], 0) + 1
        of_kind[levels.latest[s] + 1] = of_kind.get(levels.latest[s] + 1, 0) - 1
    best, most = None, LEAST
    for kind, of_kind in change.items():
        count = 0
        for level in sorted(of_kind):
            count += of_kind[level]
            if count >= most:
                best, most = (kind, level), count
    return best


def _in_order(after: Sequence[frozenset[int]], packs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Packs and lone steps, operands first; where there is a choice the order is that of the last steps."""
    owner = {s: pack for pack in packs for s in pack}
    units = [owner.get(s, (s,)) for s in range(len(after)) if s not in owner or owner[s][-1] == s]
    number = {s: k for k, unit in enumerate(units) for s in unit}
    before = [{number[o] for s in unit for o in after[s]} for unit in units]
    users: list[list[int]] = [[] for _ in units]
    for k, operands in enumerate(before):
        for o in operands:
            users[o].append(k)
    waits = [len(operands) for operands in before]
    ready = [k for k, count in enumerate(waits) if not count]
    order = []
    while ready:
        k = heapq.heappop(ready)
        order.append(units[k])
        for u in users[k]:
            waits[u] -= 1
            if not waits[u]:
                heapq.heappush(ready, u)
    assert len(order) == len(units), "packs depend on each other"
    return order
