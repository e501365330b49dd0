"""Builds the schedule of a group: tile, boxes, storage, stages, shared memory."""
from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import Unschedulable
from ..ir import dims as D
from ..ir.dtypes import DTYPES
from ..ir.graph import Node, Shape
from . import rules
from .attempt import TABLES, Attempt
from .collapse import collapse
from .domain import domain
from .group import Group
from .kernel_schedule import KernelSchedule, Part
from .labels import Labels, operand_labels
from .products import have_products, repeats_rows
from .storage import HEAVY, SOURCES, Storage
from .target import Target
from .tile import Schedule, Tags, Tile, candidates, guess, product_tiles
from .windows import are_windows, window_tiles

LINES = 128  # bytes that a block should own at least along a contiguous dim: two cache lines
SERIAL = 3  # a group that takes this many times its ideal time is better split,
SMALL_TIME = 200_000  # unless it takes less than this many element operations, about what a kernel costs to start
MANY_NODES = 100  # of a part; then only tiles are tried that are likely to be good
FEW_TILES = 2  # that are tried for products besides those made for them
A_LOAD = 4  # elements of a thread's widest access: with fewer blocks, rows would wait for each other in a loop
LOOKED_UP = 16  # elements, in the time that a row is looked up and folded: each load waits for the one before
MOST_PIECES = 32  # operands of a concat that a block may compute one after the other
GOOD_ENOUGH = 1.2  # a tile that computes at most this many times the least work ends the search


@dataclass
class Known:
    """What calls of :func:`build` for one graph and target tell each other.

    Attributes:
      tiles: the best tile of parts alike, or why they have none.
      parts: the parts of components, by nodes and outputs: most of a group is what it was before it grew.
    """

    tiles: dict[Hashable, Tile | str] = field(default_factory=dict)
    parts: dict[tuple[tuple[Node, ...], tuple[Node, ...]], list[Part]] = field(default_factory=dict)



def build(group: Group, target: Target, wanted: Schedule | None = None,
          known: Known | None = None) -> KernelSchedule:
    """The schedule of a group on a target.

    ``wanted`` is the schedule of the largest output, over its dims after :func:`collapse`; left out, the one with
    the lowest estimated time is taken.  ``known`` remembers between calls what was found of parts.

    Raises Unschedulable when some output's blocks cannot be made to fit the others', or when a block's values
    do not fit on chip; the planner then splits the group.
    """
    small = collapse(group)
    group = small.group
    known = Known() if known is None or wanted else known
    parts: list[Part] = []
    for nodes, outputs in _components(group, target):
        component = tuple(nodes), tuple(outputs)
        if component not in known.parts:
            known.parts[component] = _build_parts(nodes, outputs, target, wanted, known)
        parts += known.parts[component]
    return KernelSchedule(target, parts, group.inputs, group.outputs, frozenset(group.nodes), small.origin)


def _build_parts(nodes: list[Node], outputs: list[Node], target: Target, wanted: Schedule | None,
                 known: Known) -> list[Part]:
    """The part of a component, or one for each piece of a long concat."""
    pieces = [] if wanted else _pieces(nodes, outputs, target)
    if pieces:
        return [_build_piece(k, own, outputs[0], target) for k, own in enumerate(pieces)]
    return [_build_part(nodes, outputs, target, wanted, known)]


def _components(group: Group, target: Target) -> list[tuple[list[Node], list[Node]]]:
    """Weakly connected sets of members: each gets blocks of its own."""
    members = set(group.nodes)
    parent = {n: n for n in group.nodes}

    def find(n: Node) -> Node:
        while parent[n] is not n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    products = have_products(group.nodes, target)
    given = _given(group) if products else {n for n in group.nodes if n.op in SOURCES}
    for n in group.nodes:
        for x in n.inputs:
            if x in members and x not in given:
                parent[find(n)] = find(x)
    if not products:  # they have more to do than to load
        _join_readers(group, find, parent)
    sets: dict[Node, list[Node]] = {}
    for o in group.outputs:
        sets.setdefault(find(o), []).append(o)
    return [(_needed(outputs, members), outputs) for outputs in sets.values()]


def is_long(node: Node) -> bool:
    """True for a concat of so many operands that no block should compute all of them, one after the other."""
    return node.op == "concat" and len(node.inputs) > MOST_PIECES


def _pieces(nodes: list[Node], outputs: list[Node], target: Target) -> list[list[Node]]:
    """For each operand of a long concat, what it and the concat's part need: they get blocks of their own.

    None where the concat is not all there is to write, is read, or where operands share what takes long to compute.
    """
    (last, *others), members = outputs, set(nodes)
    if not target.has_threads or others or not is_long(last) or any(last in n.inputs for n in nodes):
        return []
    found = [[n for n in _needed([x], members)] if x in members else [] for x in last.inputs]
    heavy = [n for own in found for n in own if n.op in HEAVY]
    if len(set(heavy)) < len(heavy) or sum(map(len, found)) > 2 * len(nodes) + len(last.inputs):
        return []
    return [[*own, last] for own in found]


def _build_piece(piece: int, nodes: list[Node], concat: Node, target: Target) -> Part:
    """The part that writes an operand of a concat: blocks own whole runs of it."""
    x, axis = concat.inputs[piece], concat.attrs["axis"]
    tags = _spread(concat, nodes)
    storage = Storage(nodes, [concat], have_products(nodes, target))
    tiles = dict.fromkeys((*tile[:axis], None, *tile[axis + 1:]) for tile in _tiles(x, nodes[:-1] or [x], target))
    return _best(lambda tile: Attempt(nodes, [concat], concat, tags, tile, target, storage, piece), tiles,
                 GOOD_ENOUGH).made.part


def _given(group: Group) -> set[Node]:
    """Members that cost nothing to have twice: literals, and inputs or literals in another shape."""
    found: set[Node] = set()
    for n in group.nodes:
        free = n.op in SOURCES or (n.op in ("broadcast", "reshape") and all(
            x in found or x in group.inputs for x in n.inputs))
        if free and n not in group.outputs:
            found.add(n)
    return found


def _join_readers(group: Group, find: Callable[[Node], Node], parent: dict[Node, Node]) -> None:
    """Outputs of one shape that read a common input share blocks: the input is loaded once."""
    readers: dict[Node, list[Node]] = {x: [] for x in group.inputs if x.rank}
    for n in group.nodes:
        for x in n.inputs:
            if x in readers:
                readers[x].append(n)
    shapes = {find(o): o.shape for o in group.outputs}  # only sets of one shape are joined
    for found in readers.values():
        first: dict[Shape, Node] = {}
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
    return max(outputs, key=lambda o: (guess(o.size), o.rank))  # the first of equal ones


def _build_part(nodes: list[Node], outputs: list[Node], target: Target, wanted: Schedule | None, known: Known) -> Part:
    primary = _primary(outputs)
    tags = _spread(primary, nodes)
    for o in outputs:
        if o.shape == primary.shape and None in tags.get(o, (None,)):
            tags[o] = tuple(range(o.rank))  # not tied to the primary: any split will do
    storage = Storage(nodes, outputs, have_products(nodes, target))

    def attempt(tile: Tile) -> Attempt:
        return Attempt(nodes, outputs, primary, tags, tile, target, storage)

    if wanted:
        return attempt(wanted.tile(primary.shape)).part
    if target.is_host:
        return _chosen(attempt, _tiles(primary, nodes, target), primary, outputs)
    alike = _alike(nodes, outputs, primary)
    found = known.tiles.get(alike)
    if isinstance(found, str):
        raise Unschedulable(found)
    if found is not None:
        with contextlib.suppress(Unschedulable):
            return attempt(found).part
    try:
        if have_products(nodes, target):
            best = _best(attempt, _product_tiles(primary, nodes, target))
            known.tiles[alike] = best.tile
            return best.made.part
        if are_windows(nodes, target):
            best = _best(attempt, dict.fromkeys(window_tiles(primary.shape)))
            known.tiles[alike] = best.tile
            return best.made.part
        return _chosen(attempt, _tiles(primary, nodes, target), primary, outputs)
    except Unschedulable as e:
        known.tiles[alike] = str(e)
        raise


def _chosen(attempt: Callable[[Tile], Attempt], tiles: Iterable[Tile], primary: Node, outputs: list[Node]) -> Part:
    """The part that the best tile gives, if it does not repeat work or leave cores idle."""
    best = _best(attempt, tiles, GOOD_ENOUGH).made
    if best.time > SERIAL * best.ideal + SMALL_TIME and best.part.kept - set(outputs):
        raise Unschedulable(f"Blocks that compute '{primary.origin or primary}' would repeat each other's work or "
                            "leave most cores idle; split the group.")
    return best.part


def _product_tiles(primary: Node, nodes: list[Node], target: Target) -> Iterator[Tile]:
    """Tiles to try for a part with products on a GPU."""
    yield from product_tiles(primary.shape, target.cores, len(nodes) > MANY_NODES and repeats_rows(nodes))
    yield from itertools.islice(_tiles(primary, nodes, target), FEW_TILES)


def _tiles(primary: Node, nodes: list[Node], target: Target) -> Iterator[Tile]:
    """Tiles of the primary that are worth a try, best guess first."""
    total = max((_folded_work(n) for n in nodes), default=1)
    share = max(guess(primary.size), 1)
    least_work = target.threads * A_LOAD if target.has_threads else target.block_work // 4
    per_block = min(max(total // target.min_blocks, least_work), target.block_work)
    if target.is_host and not isinstance(D.upper(primary.size), int):
        per_block = max(per_block, target.block_work // 2)  # the guess says little about how much there is to share
    elements = max(per_block * share // max(total, share), 1)
    least = max(LINES // max(DTYPES[n.dtype].size for n in nodes), 16)
    return candidates(primary.shape, elements, _contiguous_dims(primary, nodes), least)


class _Made(NamedTuple):
    made: Attempt
    tile: Tile


def _best(attempt: Callable[[Tile], Attempt], tiles: Iterable[Tile], good_enough: float = 0.0) -> _Made:
    """The attempt with the lowest estimate, or the first whose waste is small enough."""
    best: _Made | None = None
    reason = Unschedulable("No tile gives a schedule; split the group.")
    for tile in tiles:
        try:
            made = attempt(tile)
        except Unschedulable as e:
            reason = e
            continue
        if best is None or made.time < best.made.time:
            best = _Made(made, tile)
        if made.waste <= good_enough:
            break
    if best is None:
        raise reason
    return best


def _alike(nodes: Sequence[Node], outputs: Sequence[Node], primary: Node) -> Hashable:
    """Equal for parts that differ in constants and in where their slices begin."""
    number = {n: k for k, n in enumerate(nodes)}
    out = []
    for n in nodes:
        attrs = tuple((k, v) for k, v in sorted(n.attrs.items()) if k not in ("value", "starts", "index"))
        inputs = tuple(number.get(x, x.shape) for x in n.inputs)
        out.append((n.op, n.shape, n.dtype, repr(attrs), inputs))
    return tuple(out), tuple(number[o] for o in (primary, *outputs))


def _folded_work(node: Node) -> int:
    if node.op in TABLES:
        return LOOKED_UP * guess(node.size)
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
