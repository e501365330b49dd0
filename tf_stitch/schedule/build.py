"""Builds the schedule of a group: tile, boxes, storage, stages, shared memory."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import Unschedulable
from ..fusion.group import Group
from ..ir import dims as D
from ..ir.dtypes import DTYPES
from ..ir.graph import Node, Shape
from . import rules
from .attempt import Attempt
from .collapse import collapse
from .domain import domain
from .kernel_schedule import KernelSchedule, Part
from .labels import Labels, operand_labels
from .storage import HEAVY, SOURCES, Storage
from .target import Target
from .tile import Schedule, Tags, candidates, guess

LINES = 128  # bytes that a block should own at least along a contiguous dim: two cache lines
SERIAL = 3  # a group that takes this many times its ideal time is better split,
SMALL_TIME = 200_000  # unless it takes less than this many element operations, about what a kernel costs to start
GOOD_ENOUGH = 1.2  # a tile that computes at most this many times the least work ends the search


def build(group: Group, target: Target, wanted: Schedule | None = None) -> KernelSchedule:
    """The schedule of a group on a target.

    ``wanted`` is the schedule of the largest output, over its dims after :func:`collapse`; left out, the one with
    the lowest estimated time is taken.

    Raises Unschedulable when some output's blocks cannot be made to fit the others', or when a block's values
    do not fit on chip; the planner then splits the group.
    """
    small = collapse(group)
    group = small.group
    parts = [_build_part(nodes, outputs, target, wanted) for nodes, outputs in _components(group)]
    return KernelSchedule(target, parts, group.inputs, group.outputs, frozenset(group.nodes), small.origin)


def _components(group: Group) -> list[tuple[list[Node], list[Node]]]:
    """Weakly connected sets of members: each gets blocks of its own."""
    members = set(group.nodes)
    parent = {n: n for n in group.nodes}

    def find(n: Node) -> Node:
        while parent[n] is not n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for n in group.nodes:
        for x in n.inputs:
            if x in members and x.op not in SOURCES:
                parent[find(n)] = find(x)
    _join_readers(group, find, parent)
    sets: dict[Node, list[Node]] = {}
    for o in group.outputs:
        sets.setdefault(find(o), []).append(o)
    return [(_needed(outputs, members), outputs) for outputs in sets.values()]


def _join_readers(group: Group, find: Callable[[Node], Node], parent: dict[Node, Node]) -> None:
    """Outputs of one shape that read a common input share blocks: the input is loaded once."""
    readers: dict[Node, list[Node]] = {}
    for n in group.nodes:
        for x in n.inputs:
            if x in group.inputs and x.rank:
                readers.setdefault(x, []).append(n)
    for found in readers.values():
        first: dict[Shape, Node] = {}
        shapes = {find(o): o.shape for o in group.outputs}
        for n in found:
            root = find(n)
            if root in shapes:
                parent[root] = find(first.setdefault(shapes[root], root))


def _needed(outputs: Iterable[Node], members: set[Node]) -> list[Node]:
    """Members that outputs depend on, operands first."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(o, False) for o in outputs]
    while stack:
        n, done = stack.pop()
        if done:
            order.append(n)
        elif n not in seen and n in members:
            seen.add(n)
            stack.append((n, True))
            stack.extend((x, False) for x in n.inputs)
    return order


def _primary(outputs: Iterable[Node]) -> Node:
    return max(outputs, key=lambda o: (guess(o.size), o.rank, -o.id))


def _build_part(nodes: list[Node], outputs: list[Node], target: Target, wanted: Schedule | None) -> Part:
    primary = _primary(outputs)
    tags = _spread(primary, nodes)
    for o in outputs:
        if o.shape == primary.shape and None in tags.get(o, (None,)):
            tags[o] = tuple(range(o.rank))  # not tied to the primary: any split will do
    total = max((_folded_work(n) for n in nodes), default=1)
    share = max(guess(primary.size), 1)
    per_block = min(max(total // target.min_blocks, target.block_work // 4), target.block_work)
    if not isinstance(primary.size, int):
        per_block = max(per_block, target.block_work // 2)  # the guess says little about how much there is to share
    elements = max(per_block * share // max(total, share), 1)
    wide = _contiguous_dims(primary, nodes)
    least = max(LINES // max(DTYPES[n.dtype].size for n in nodes), 16)
    storage = Storage(nodes, outputs)
    best: Attempt | None = None
    reason = f"No tile of '{primary.origin or primary}' gives a schedule; split the group."
    for tile in [wanted.tile(primary.shape)] if wanted else candidates(primary.shape, elements, wide, least):
        try:
            attempt = Attempt(nodes, outputs, primary, tags, tile, target, storage)
        except Unschedulable as e:
            reason = str(e)
            continue
        if best is None or attempt.time < best.time:
            best = attempt
        if attempt.waste <= GOOD_ENOUGH:
            break
    if best is None:
        raise Unschedulable(reason)
    if wanted is None and best.time > SERIAL * best.ideal + SMALL_TIME and best.part.kept - set(outputs):
        raise Unschedulable(f"Blocks that compute '{primary.origin or primary}' would repeat each other's work or "
                            "leave most cores idle; split the group.")
    return best.part


def _folded_work(node: Node) -> int:
    return guess(D.product(domain(node, rules.full(node.shape)).shape)) if node.op in HEAVY else guess(node.size)


def _spread(primary: Node, nodes: Sequence[Node]) -> dict[Node, Tags]:
    """The primary's dim that every dim of every node is, where ties prove it (None elsewhere)."""
    members = set(nodes)
    links: dict[Node, list[tuple[Node, int, int]]] = {}
    for n in nodes:
        for k, there, here in rules.ties(n):
            x = n.inputs[k]
            links.setdefault(n, []).append((x, here, there))
            links.setdefault(x, []).append((n, there, here))
    tags: dict[Node, list[int | None]] = {primary: list(range(primary.rank))}
    queue = [(primary, d) for d in range(primary.rank)]
    for n, d in queue:
        tag = tags[n][d]
        for other, here, there in links.get(n, ()):
            if here != d:
                continue
            have = tags.setdefault(other, [None] * other.rank)
            if have[there] is None and tag not in have and other.shape[there] == n.shape[d]:
                have[there] = tag
                if other in members:
                    queue.append((other, there))
    return {n: tuple(t) for n, t in tags.items()}


def _contiguous_dims(primary: Node, nodes: Sequence[Node]) -> list[int]:
    """Dims of the primary along which it or an input that it depends on is contiguous in memory."""
    members = set(nodes)
    found = {primary.rank - 1} if primary.rank else set()
    seen: set[tuple[Node, Labels]] = set()
    stack: list[tuple[Node, Labels]] = [(primary, tuple(range(primary.rank)))]
    while stack:
        n, labels = stack.pop()
        if (n, labels) in seen:
            continue
        seen.add((n, labels))
        if n in members:
            stack.extend(operand_labels(n, labels))
        elif labels and labels[-1] is not None and n.rank > 1:
            found.add(labels[-1])
    if primary.rank and not any(labels and labels[-1] == primary.rank - 1 for n, labels in seen if n not in members):
        found.discard(primary.rank - 1)  # rows of a reduction: any number of results will do
    return sorted(found)
