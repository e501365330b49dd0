"""Which values of a group are kept, and which are computed again where they are read.

A value is *inlined* unless keeping it pays: results of reductions, dots and scans are always kept; elementwise
values are kept when they are expensive and read by several stages, or when a broadcast would compute them again
for every element of an outer dim (FusionStitching's size analysis, arXiv 1811.05213, section 5.1).
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from ..ir import dims as D
from ..ir.graph import Node, view_source
from ..ir.ops import COSTLY, EXPENSIVE, OPS
from .labels import Reads
from .rules import VIEWS

HEAVY = frozenset({"order", "segment", "reduce", "arg_reduce", "scan", "dot", "conv", "conv_filter", "window"})
SOURCES = frozenset({"param", "const", "iota", "shape_value"})
_WEIGHT = {"gather": 4, "gather_nd": 6, "pad": 2, "concat": 2, "cast": 1, "bitcast": 0, "select": 1, "reduce": 1,
           "dot": 2, "conv": 3, "conv_filter": 3, "window": 3, "scan": 8, "arg_reduce": 4, "order": 4,
           "search": 24, "segment": 8}
TALL = 8  # pieces of a concat from which on each element's piece is no longer found by conditions
CONDITIONAL = frozenset({"concat", "pad", "gather", "gather_nd"})
NESTED = 24  # conditions inside each other, about: texts grow with the square of it
KEEP_WEIGHT = 8  # recomputing less than this in another stage is cheaper than a trip through shared memory


def weight(node: Node) -> int:
    """About how many vector instructions one element of a node costs."""
    if node.op in SOURCES or node.op in VIEWS:
        return 0
    if node.op in _WEIGHT:
        return _WEIGHT[node.op]
    return {EXPENSIVE: 12, COSTLY: 60}.get(OPS[node.op].cost, 1)


def _unshaped(node: Node) -> Node:
    while node.op == "reshape":
        node = node.inputs[0]
    return node


def _unmoved(node: Node, axes: Sequence[int]) -> tuple[Node, tuple[int, ...]]:
    """What a chain of transposes, and of reshapes that leave some axes as they are, shows, and these axes there."""
    while node.op in ("transpose", "reshape"):
        before = [node.attrs["perm"][a] if node.op == "transpose" else _before_reshape(node, a) for a in axes]
        if None in before:
            break
        axes, node = [a for a in before if a is not None], node.inputs[0]
    return node, tuple(axes)


def _before_reshape(node: Node, axis: int) -> int | None:
    """The axis of a reshape's operand with the size and the stride of one of its own; None when there is none."""
    x, stride = node.inputs[0], D.product(node.shape[axis + 1:])
    return next((a for a in range(x.rank) if x.shape[a] == node.shape[axis] and D.product(x.shape[a + 1:]) == stride),
                None)


class Storage:
    """The choice for one set of nodes.  ``kept`` are the nodes whose values live in memory, in order; ``reads`` tells
    what is read for any choice.

    ``in_tiles``: products are computed in tiles (on a GPU), whose operands should be read without conditions.
    """

    def __init__(self, nodes: Sequence[Node], outputs: Iterable[Node], in_tiles: bool = False):
        self.nodes = list(nodes)
        self.members = set(nodes)
        self.reads = Reads(self.members)
        self.outputs = set(outputs)
        self.users: dict[Node, list[Node]] = {n: [] for n in nodes}
        for n in nodes:
            for x in dict.fromkeys(n.inputs):
                if x in self.members:
                    self.users[x].append(n)
        self.kept: set[Node] = {n for n in nodes if n in self.outputs or n.op in HEAVY}
        self._keep_before_broadcasts()
        self._keep_shared_work()
        self.nested: set[Node] = set()  # below them, conditions would lie too deep in each other
        self._keep_nested()
        self.tall: set[Node] = set()  # stacks of so many pieces that products cannot look for each element's
        if in_tiles:
            self._keep_stacks()
            self._keep_operands()

    def _weight_to_kept(self, node: Node) -> int:
        """Work of computing one element of ``node`` from kept values and inputs."""
        seen: set[Node] = set()
        stack, total = [node], 0
        while stack:
            n = stack.pop()
            if n in seen or n not in self.members or (n is not node and n in self.kept):
                continue
            seen.add(n)
            total += weight(n)
            stack.extend(n.inputs)
        return total

    def _producer(self, node: Node) -> Node:
        """The node that computes what a chain of views shows."""
        while node in self.members and node.op in VIEWS and node not in self.kept and node.op != "broadcast":
            node = node.inputs[0]
        return node

    def _keep_before_broadcasts(self) -> None:
        for b in self.nodes:
            if b.op != "broadcast" or b.inputs[0].rank == 0:
                continue
            x = self._producer(b.inputs[0])
            if x not in self.members or x in self.kept or x.op in SOURCES or x.op in VIEWS:
                continue
            axes = b.attrs["axes"]
            new = [d for d in range(b.rank) if d not in axes and b.shape[d] != 1]
            outer = any(d < max(axes) for d in new)
            if new and self._weight_to_kept(x) >= (1 if outer else KEEP_WEIGHT):
                self.kept.add(x)

    def _keep_shared_work(self) -> None:
        chosen = []
        sinks: dict[Node, frozenset[Node]] = {}
        for n in reversed(self.nodes):
            reached: set[Node] = set()
            for u in self.users[n]:
                reached |= {u} if u in self.kept else sinks[u]
            sinks[n] = frozenset(reached)
            if n not in self.kept and n.op not in VIEWS and n.op not in SOURCES and len(reached) > 1 \
                    and self._weight_to_kept(n) >= KEEP_WEIGHT:
                self.kept.add(n)
                chosen.append(n)
        for n in reversed(chosen):  # operands first: what a kept operand already saves does not count twice
            self.kept.discard(n)
            if self._weight_to_kept(n) >= KEEP_WEIGHT:
                self.kept.add(n)

    def _keep_nested(self) -> None:
        """Conditions (which piece of a concat, outside of a pad) do not lie in each other without end."""
        depth: dict[Node, int] = {}
        for n in self.nodes:
            depth[n] = 0
            if n not in self.kept:
                depth[n] = max((depth.get(x, 0) for x in n.inputs), default=0) + (n.op in CONDITIONAL)
            if depth[n] > NESTED:
                depth[n] = 0
                self.kept.add(n)
                self.nested.add(n)

    def _keep_stacks(self) -> None:
        """A concat that a product reads across its pieces is put together first."""
        for n in self.nodes:
            for x, contract in zip(n.inputs, n.attrs["contract"], strict=True) if n.op == "dot" else ():
                source, axes = _unmoved(x, contract)
                computed = any(p in self.members for p in map(_unshaped, source.inputs))
                if source.op == "concat" and source in self.members and computed \
                        and source.attrs["axis"] not in axes and len(source.inputs) > 2:
                    self.kept.add(source)
                    self.tall |= {source} if len(source.inputs) >= TALL else set()

    def _keep_operands(self) -> None:
        """What takes work and a product reads is computed once, not by every thread that reads it."""
        for n in self.nodes:
            for x in n.inputs if n.op == "dot" else ():
                source = self._producer(x)
                if source in self.members and source.op not in VIEWS and self._divides(source, self.kept):
                    self.kept.add(source)

    def divided(self, kept: AbstractSet[Node]) -> frozenset[Node]:
        """Operands of products that threads divide where they read them, when the values in ``kept`` are in memory."""
        found = set()
        for n in self.nodes:
            for x in n.inputs if n.op == "dot" else ():
                source = self._producer(x)
                if source in self.members and source not in kept and source.op not in VIEWS \
                        and self._divides(source, kept):
                    found.add(view_source(x))
        return frozenset(found)

    def _divides(self, node: Node, kept: AbstractSet[Node]) -> bool:
        """True where an element takes a division or an expensive function of kept values and inputs.

        What a broadcast repeats threads compute outside of their loops.
        """
        seen: set[Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n in seen or n in kept or n not in self.members or n.op == "broadcast":
                continue
            if n.op == "div" or weight(n) >= KEEP_WEIGHT:
                return True
            seen.add(n)
            stack.extend(n.inputs)
        return False

    def droppable(self) -> list[Node]:
        """Kept values that may be computed again instead, in the order that seeds the shrinking.

        First cheap elementwise results, then expensive ones with one user, then with several.
        """
        def order(n: Node) -> tuple[bool, int, int]:
            work = self._weight_to_kept(n)
            return work >= 12, len(self.users[n]), work

        bound = self.outputs | self.tall | self.nested
        free = [n for n in self.nodes if n in self.kept and n not in bound and n.op not in HEAVY]
        return sorted(free, key=order)

    def order(self) -> list[Node]:
        """Kept nodes, operands first."""
        return [n for n in self.nodes if n in self.kept]
