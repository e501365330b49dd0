"""What the products of one block cost on a GPU: multiply-adds, and operands on their way from the second-level cache.

Rates were measured on an H200: they choose tiles, and the planner weighs a kernel's own products against the library's
with them.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Node, view_source
from .kernel_schedule import Item, Stage
from .labels import Labels, dot_operands
from .storage import HEAVY
from .target import Target
from .tile import Axis, guess, mean, samples

RATE = 80  # multiply-adds per ns of one multiprocessor, tensor cores not used
TOTAL, EACH = 5500, 75  # bytes per ns from the second-level cache: all multiprocessors together, and one at most
NEAR = 150  # bytes per ns from the first-level cache or shared memory
KEPT = 160 * 1024  # bytes of operands that stay in the first-level cache until they are read again
LATENCY = 300  # ns of a stage: first loads, sums over threads, barriers
AHEAD = 96 * 1024  # bytes of operands that a block loads before it multiplies: what comes next is loaded meanwhile
LONGER = 0.4  # how much longer operands take for each thread without work: those that load wait more often
TILE = 4  # columns, and rows, of the result that a thread folds together,
THREADS = 256  # of a block
DIVISION_NS = 600  # of a thread for an element whose operand is divided when it is read: nothing is loaded meanwhile
RUN = 64  # bytes: shorter runs of neighbours take as long


def is_product(item: Item) -> bool:
    """True for an item that folds products."""
    return item.node.op == "dot" and item.body is item.node and not item.copy


def have_products(nodes: Iterable[Node], target: Target) -> bool:
    """True for nodes whose tiles :class:`ProductTime` should choose."""
    return not target.is_host and any(n.op == "dot" for n in nodes)


def repeats_rows(nodes: Iterable[Node], is_light: Callable[[Node], bool] = lambda n: False) -> bool:
    """True when a product that is not light is folded again among ``nodes`` (operands first).

    Each block must then compute all columns of that product for its rows, and read all of its right operand.
    """
    whole: set[Node] = set()
    for n in nodes:
        below = any(x in whole for x in n.inputs)
        if below and n.op in HEAVY:
            return True
        if below or (n.op == "dot" and not is_light(n)):
            whole.add(n)
    return False


@dataclass(frozen=True)
class ProductTime:
    """The nanoseconds that a block spends in its stages of products, by the sizes of unknown dims."""

    stages: Sequence[Stage]
    kept: frozenset[Node]
    divided: frozenset[Node]
    axes: Sequence[Axis]
    blocks: Dim
    cores: int

    def __call__(self, sizes: Mapping[str, int] | None = None) -> float:
        envs, usual = samples(self.axes, sizes), samples(self.axes)
        at_once = min(guess(self.blocks, sizes), self.cores)
        return block_ns(self.stages, self.kept, self.divided, at_once, functools.cache(lambda d: mean(d, envs, sizes)),
                        functools.cache(lambda d: mean(d, usual)))


def block_ns(stages: Sequence[Stage], kept: Collection[Node], divided: Collection[Node], at_once: int,
             size: Callable[[Dim], int], made_for: Callable[[Dim], int]) -> float:
    """Nanoseconds that a block spends in stages of products while ``at_once`` blocks run.

    ``divided`` are operands that take a division wherever a thread reads an element.  ``size`` gives the size of an
    unknown extent, ``made_for`` the one that threads are shared out for: where there is less of the result, threads
    have nothing to do.
    """
    recent: dict[Node, int] = {}
    total = 0.0
    far = min(EACH, TOTAL / max(at_once, 1))
    for s in stages:
        items = [i for i in s.items if is_product(i)]
        if not items:
            continue
        box = [size(extent) for _, extent in s.box]
        time, loaded = 0.0, 0
        for x, count in _operands(items, box):
            loaded += count
            time += count / (NEAR if x in kept or _is_near(recent, x, count) else far)
        shared_out = [b if d in s.folded else max(b, made_for(extent))
                      for d, (b, (_, extent)) in enumerate(zip(box, s.box, strict=True))]
        idle = math.prod(shared_out) / max(math.prod(box), 1) - 1  # for each thread that works
        both = len(items) * math.prod(shared_out) / RATE, time * (1 + LONGER * idle)
        total += DIVISION_NS * sum(_evaluations(i, divided, box) for i in items) / THREADS
        total += LATENCY + max(both) + min(both) / max(-(-loaded // AHEAD), 1)
    return total


def _evaluations(item: Item, divided: Collection[Node], box: Sequence[int]) -> float:
    """How often the threads of a block compute elements of operands that they read: each for a few of the others'
    columns, or rows."""
    total = 0.0
    for x, labels in dot_operands(item.node) if divided else ():
        if view_source(x) in divided:
            others = math.prod(b for d, b in enumerate(box) if d not in labels)
            total += math.prod(box[d] for d in labels if d is not None) * max(others / TILE, 1)
    return total


def _operands(items: Iterable[Item], box: Sequence[int]) -> dict[tuple[Node, int], None]:
    """What products read, with the bytes that a block fetches of it."""
    return dict.fromkeys((view_source(x), _bytes(x, labels, box)) for i in items for x, labels in dot_operands(i.node))


def _bytes(x: Node, labels: Labels, box: Sequence[int]) -> int:
    """Bytes of an operand in a box of the product's domain, short runs as long ones."""
    extents = [box[d] for d in labels if d is not None]
    each = DTYPES[x.dtype].size
    run = max(extents[-1] if extents else 1, 1) * each
    return math.prod(extents) * each * max(1, RUN // run)


def _is_near(recent: dict[Node, int], x: Node, count: int) -> bool:
    """True when so little was read since ``x`` that it is in the first-level cache; notes that it is read now."""
    since = 0
    for y in reversed(recent):
        since += recent[y]
        if y is x:
            break
    found = x in recent and since <= KEPT
    recent.pop(x, None)
    recent[x] = count
    return found
