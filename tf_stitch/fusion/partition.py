"""The state of planning: a partition of a graph's compute nodes into units, contracted step by step.

*Floating* nodes (literals, iota, broadcasts and other values that cost nothing to compute again) belong to
no unit: every group that reads one computes its own copy, so they never cross a kernel boundary.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from ..ir.graph import Graph, Node, topological
from ..schedule.group import Group

ALWAYS_FLOATING = frozenset({"const", "iota", "shape_value", "broadcast", "reshape"})


class Unit:
    """A set of nodes that will be one kernel.  Compared by identity."""

    __slots__ = ("id", "nodes")
    _ids = itertools.count()

    def __init__(self, nodes: Iterable[Node]):
        self.nodes = frozenset(nodes)
        self.id = next(Unit._ids)


class Partition:
    """Units over a graph and the data flow between them.

    Attributes:
      order: every node of the graph, operands first; ``rank_of`` gives positions in it.
      floating: nodes that each reader computes for itself.
      required: nodes whose value must be in memory (outputs that are not views of something else).
    """

    def __init__(self, graph: Graph, required: Iterable[Node], floating: Iterable[Node]):
        self.order = graph.nodes()
        self.rank_of = {n: i for i, n in enumerate(self.order)}
        self._readers = graph.users()
        self.required = frozenset(required)
        self.floating = set(floating)
        self.owner: dict[Node, Unit] = {}
        self.units: set[Unit] = set()
        self._first: dict[Unit, int] = {}
        self._in_order: list[Unit] | None = None
        for n in self.needed():
            self._own(Unit([n]))
        self._connect()

    def _connect(self) -> None:
        """Data flow between units, floating nodes looked through."""
        self._sources: dict[Node, tuple[Node, ...]] = {}
        self._reads: dict[Unit, frozenset[Node]] = {}
        self._feeds: dict[Unit, frozenset[Node]] = {}
        self.users: dict[Node, set[Node]] = {n: set() for n in self.owner}
        for n in self.owner:
            for s in self.sources(n):
                if s in self.users:
                    self.users[s].add(n)

    def needed(self) -> list[Node]:
        """Nodes that some required value depends on and that get a unit, in order."""
        seen: set[Node] = set()
        stack = list(self.required)
        while stack:
            n = stack.pop()
            if n not in seen:
                seen.add(n)
                stack.extend(n.inputs)
        return [n for n in self.order if n in seen and n.op != "param"
                and (n not in self.floating or n in self.required)]

    def _own(self, unit: Unit) -> None:
        self._in_order = None
        self.units.add(unit)
        for n in unit.nodes:
            self.owner[n] = unit

    def sources(self, node: Node) -> tuple[Node, ...]:
        """The nodes that ``node`` reads once floating operands are looked through; cached."""
        found = self._sources.get(node)
        if found is None:
            out: dict[Node, None] = {}
            stack = list(reversed(node.inputs))
            seen: set[Node] = set()
            while stack:
                i = stack.pop()
                if i in seen:
                    continue
                seen.add(i)
                if i in self.floating:
                    stack.extend(reversed(i.inputs))
                else:
                    out[i] = None
            found = self._sources[node] = tuple(out)
        return found

    def reads(self, unit: Unit) -> frozenset[Node]:
        """Nodes outside of ``unit`` that it reads, floating ones looked through; cached."""
        found = self._reads.get(unit)
        if found is None:
            found = self._reads[unit] = frozenset(s for n in unit.nodes for s in self.sources(n)) - unit.nodes
        return found

    def feeds(self, unit: Unit) -> frozenset[Node]:
        """Nodes outside of ``unit`` that read it; cached."""
        found = self._feeds.get(unit)
        if found is None:
            found = self._feeds[unit] = frozenset(u for n in unit.nodes for u in self.users[n]) - unit.nodes
        return found

    def producers(self, unit: Unit) -> set[Unit]:
        """Units whose values ``unit`` reads."""
        owner = self.owner
        return {owner[s] for s in self.reads(unit) if s in owner}

    def consumers(self, unit: Unit) -> set[Unit]:
        """Units that read a value of ``unit``."""
        owner = self.owner
        return {owner[u] for u in self.feeds(unit)}

    def makes_cycle(self, merged: frozenset[Unit]) -> bool:
        """True when contracting ``merged`` would close a cycle: a path leaves the set and comes back."""
        stack = [c for u in merged for c in self.consumers(u) if c not in merged]
        seen = set(stack)
        while stack:
            for c in self.consumers(stack.pop()):
                if c in merged:
                    return True
                if c not in seen:
                    seen.add(c)
                    stack.append(c)
        return False

    def contract(self, merged: Iterable[Unit]) -> Unit:
        """Replaces units by their union."""
        merged = list(merged)
        unit = Unit(n for u in merged for n in u.nodes)
        self._reads[unit] = frozenset().union(*map(self.reads, merged)) - unit.nodes
        self._feeds[unit] = frozenset().union(*map(self.feeds, merged)) - unit.nodes
        self._first[unit] = min(map(self.first, merged))
        self.units.difference_update(merged)
        self._own(unit)
        return unit

    def replace(self, old: Unit, parts: Iterable[Iterable[Node]]) -> list[Unit]:
        """Replaces a unit by units over ``parts`` of its nodes."""
        self._in_order = None
        self.units.discard(old)
        fresh = [Unit(p) for p in parts]
        for u in fresh:
            self._own(u)
        return fresh

    def let_float(self, nodes: Iterable[Node]) -> None:
        """Takes nodes out of their units: from now on every reader computes them for itself."""
        nodes = set(nodes)
        readers = self._readers_of(nodes) | nodes
        before = {n: self.sources(n) for n in readers}
        for u in {self.owner[n] for n in nodes}:
            self.replace(u, [left] if (left := u.nodes - nodes) else [])
        for n in nodes:
            del self.owner[n]
        self.floating |= nodes
        self._reconnect(nodes, before)

    def _reconnect(self, floating: set[Node], before: Mapping[Node, tuple[Node, ...]]) -> None:
        """Data flow after some nodes began to float; ``before`` has the sources of these and of all their readers."""
        for n in before:
            del self._sources[n]
        touched = set(before)
        for n, old in before.items():
            new = self.sources(n) if n in self.owner else ()
            for s in {*old, *new} & self.users.keys():
                self.users[s] = self.users[s] | {n} if s in new else self.users[s] - {n}
            touched.update(old, new)
        for n in floating:
            del self.users[n]
        for u in {self.owner[n] for n in touched if n in self.owner}:
            self._reads.pop(u, None)
            self._feeds.pop(u, None)

    def state(self) -> tuple:
        """What :meth:`restore` needs to come back to this partition."""
        return (set(self.floating), dict(self.owner), set(self.units), dict(self._sources), dict(self.users),
                dict(self._reads), dict(self._feeds))

    def restore(self, state: tuple) -> None:
        """Comes back to an earlier partition."""
        (self.floating, self.owner, self.units, self._sources, self.users, self._reads, self._feeds) = state
        self._in_order = None

    def around(self, nodes: Iterable[Node]) -> set[Unit]:
        """Units that hold, read or feed any of ``nodes``, floating or not."""
        out: set[Unit] = set()
        for n in nodes:
            if n in self.owner:
                out.add(self.owner[n])
            out |= {self.owner[s] for s in self.sources(n) if s in self.owner}
        return out | {self.owner[r] for r in self._readers_of(nodes) if r in self.owner}

    def _readers_of(self, nodes: Iterable[Node]) -> set[Node]:
        """Nodes that read any of ``nodes``, floating ones looked through and counted too."""
        found: set[Node] = set()
        stack = list(nodes)
        while stack:
            for r in self._readers[stack.pop()]:
                if r not in found:
                    found.add(r)
                    if r in self.floating:
                        stack.append(r)
        return found

    def written(self, nodes: frozenset[Node]) -> list[Node]:
        """Members of a would-be unit that something outside of it reads, in order."""
        out = [n for n in nodes if n in self.required or not self.users[n] <= nodes]
        return sorted(out, key=self.rank_of.__getitem__)

    def group(self, nodes: frozenset[Node]) -> Group:
        """The kernel that computes ``nodes``, with its own copies of floating operands."""
        members: set[Node] = set(nodes)
        reads: set[Node] = set()
        stack = list(nodes)
        while stack:
            for i in stack.pop().inputs:
                if i in members:
                    continue
                if i in self.floating:
                    members.add(i)
                    stack.append(i)
                else:
                    reads.add(i)
        rank = self.rank_of.__getitem__
        return Group(tuple(sorted(members, key=rank)), tuple(sorted(reads - members, key=rank)),
                     tuple(self.written(nodes)))

    def in_order(self) -> list[Unit]:
        """Units in topological order, producers first, ties by position in the graph; kept until units change."""
        if self._in_order is None:
            self._in_order = topological(sorted(self.units, key=self.first),
                                         lambda u: sorted(self.producers(u), key=self.first))
        return self._in_order

    def first(self, unit: Unit) -> int:
        """The position in the graph of a unit's first node; cached."""
        found = self._first.get(unit)
        if found is None:
            found = self._first[unit] = min(map(self.rank_of.__getitem__, unit.nodes))
        return found
