"""Labels: which loop of a stage indexes each dim of what the stage reads (None: an index computed otherwise)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from ..ir.graph import Node
from . import rules
from .kernel_schedule import Item

Labels = tuple[int | None, ...]
Read = tuple[Node, Labels]


def body_operands(item: Item) -> Sequence[tuple[Node, Labels]]:
    """What an item evaluates at every index of its domain, with the domain dims that index it."""
    n = item.node
    identity = tuple(range(n.rank))
    if item.copy or item.body is not n:
        return [(item.body, identity)]
    if n.op in ("reduce", "arg_reduce", "scan"):
        return [(n.inputs[0], tuple(range(n.inputs[0].rank)))]
    if n.op == "order":
        return [(n.inputs[0], identity), (n.inputs[0], (*identity[:-1], n.rank))]
    if n.op == "segment":
        return [(n.inputs[0], (None, *identity[1:])), (n.inputs[1], (None,))]
    return dot_operands(n) if n.op == "dot" else operand_labels(n, identity)


def dot_operands(dot: Node) -> Sequence[Read]:
    """The operands of a product with the dims of its domain that index them: the result's, then the contracted ones."""
    found = dot.derived.get("operands")
    if found is None:
        found = dot.derived["operands"] = _dot_operands(dot)
    return found


def _dot_operands(dot: Node) -> list[Read]:
    out = []
    for (x, labels), axes in zip(operand_labels(dot, tuple(range(dot.rank))), dot.attrs["contract"], strict=True):
        folded = {a: dot.rank + j for j, a in enumerate(axes)}
        out.append((x, tuple(folded.get(a, d) for a, d in enumerate(labels))))
    return out


def operand_labels(n: Node, labels: Labels) -> Sequence[tuple[Node, Labels]]:
    """The operands of an inlined node with their labels."""
    found = n.derived.get(labels)
    if found is None:
        found = n.derived[labels] = _operand_labels(n, labels)
    return found


def _operand_labels(n: Node, labels: Labels) -> Sequence[tuple[Node, Labels]]:
    out: list[list[int | None]] = [[None] * x.rank for x in n.inputs]
    if n.op == "reshape" and n.rank and n.inputs[0].rank:
        for run, source in rules.factor(n.shape, n.inputs[0].shape):
            if run and source:  # the last dims of a run are contiguous on both sides
                out[0][source[-1]] = labels[run[-1]]
        return [(n.inputs[0], tuple(out[0]))]
    for k, there, here in rules.ties(n):
        out[k][there] = labels[here]
    return [(x, tuple(o)) for x, o in zip(n.inputs, out, strict=True)]


def reads(item: Item, stop: Callable[[Node], bool]) -> list[tuple[Node, Labels]]:
    """The nodes that an item reads where ``stop`` holds, each with the domain dims that index it."""
    found: dict[tuple[Node, Labels], None] = {}
    seen: set[tuple[Node, Labels]] = set()
    stack = list(body_operands(item))
    while stack:
        n, labels = stack.pop()
        if (n, labels) in seen:
            continue
        seen.add((n, labels))
        if stop(n):
            found[(n, labels)] = None
        else:
            stack.extend(operand_labels(n, labels))
    return list(found)


class Reads:
    """What items of a part read: values kept in memory and those of others, each with the domain dims that index it.

    Tiles are tried one after another, and each asks again.  What was found holds as long as the kept values in it are
    kept, and none that was looked through is.
    """

    def __init__(self, members: AbstractSet[Node]):
        self.members = members
        self._found: dict[tuple[Node, Node, bool], list[tuple[list[Read], set[Node], set[Node]]]] = {}

    def of(self, item: Item, kept: AbstractSet[Node]) -> list[Read]:
        """The nodes that an item reads when the values in ``kept`` are in memory."""
        known = self._found.setdefault((item.node, item.body, item.copy), [])
        for found, ends, within in known:
            if ends <= kept and within.isdisjoint(kept):
                return found
        passed: set[Node] = set()

        def stop(n: Node) -> bool:
            passed.add(n)
            return n in kept or n not in self.members

        found = reads(item, stop)
        ends = {n for n, _ in found}
        known.append((found, ends & self.members, passed - ends))
        return found
