"""Windows on a GPU (depthwise convolutions, pools): tiles for them, and what they cost.

Threads of a block have neighbouring channels, and each folds the windows of some neighbouring places at a time, as what
these share is loaded once.  Rates were measured on an H200.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Node, Shape
from .kernel_schedule import Stage
from .target import Target
from .tile import Axis, Tile, guess, mean, power_of_two, samples

WINDOWS = frozenset({"conv", "window"})
MOST_TAPS = 64  # places of a window that a thread folds without a loop
MOST_NEIGHBOURS = 8  # windows side by side that it folds at a time
CHANNELS = (32, 64, 128)  # that a block may own
ROWS = (1, 2, 4, None)  # of places that a block may own, None for all
WAIT_NS, LOAD_NS = 840, 33  # until a block has begun, and for each element that its threads load one after the other
START_NS, TAP_NS, ISSUE_NS, STORE_NS = 75, 7.4, 3.1, 13  # of a multiprocessor for a block, and for what all threads do
TOGETHER = 6  # blocks of which one goes on while others wait


def are_windows(nodes: Iterable[Node], target: Target) -> bool:
    """True for a single node, of what may be views, that folds a few known places: a GPU's thread loads all at once."""
    found = [n for n in nodes if n.op != "reshape"]
    return not target.is_host and len(found) == 1 and found[0].op in WINDOWS and taps_of(found[0]) is not None


def taps_of(node: Node) -> int | None:
    """The places that a window has, channels of a convolution included; None where they are many or not known."""
    size = D.product(node.attrs["size"] if node.op == "window" else node.inputs[1].shape[:-1])
    return size if isinstance(size, int) and size <= MOST_TAPS else None


def neighbours(along: Dim, rows: int, lanes: int, threads: int) -> int:
    """How many windows a thread folds at a time: an even share of the places ``along`` a row, of ``rows`` places in
    all for ``lanes`` threads, where all threads of the block have some."""
    if not isinstance(along, int):
        return 1
    most = min(MOST_NEIGHBOURS, -(-rows * lanes // threads))
    return max(k for k in range(1, max(most, 1) + 1) if along % k == 0)


def window_tiles(shape: Shape) -> Iterator[Tile]:
    """Tiles for a result [batch, *places, channels]: some channels of some rows of places, or a part of a row."""
    *lead, along, channels = shape
    for panel in (*CHANNELS, None):
        if panel is not None and panel >= guess(channels):
            continue
        for part in _parts(along):
            for rows in ROWS if lead[1:] else ROWS[:1]:
                if rows is None or rows <= guess(lead[-1]):
                    yield (*(1 for _ in lead[:-1]), rows, part, panel)


def _parts(along: Dim) -> list[int | None]:
    """How much of a row a block may have: all of it, or an even share."""
    if not isinstance(along, int):
        return [1, 2 * MOST_NEIGHBOURS]
    return [None, *((along // 2,) if along % 2 == 0 and along > 2 else ()), *((1,) if along > 1 else ())]


@dataclass(frozen=True)
class WindowTime:
    """The nanoseconds of a multiprocessor that a block takes for its windows, by the sizes of unknown dims.

    Where there are few blocks, they wait for what they load; where there are many, others go on meanwhile.
    """

    stage: Stage
    axes: Sequence[Axis]
    blocks: Dim
    target: Target

    def __call__(self, sizes: Mapping[str, int] | None = None) -> float:
        envs = samples(self.axes, sizes)
        node = self.stage.items[0].node
        extents = [extent for _, extent in self.stage.box[:node.rank]]
        *places, channels = (mean(d, envs, sizes) for d in extents)
        rows = math.prod(places)
        lanes = lanes_of(channels, rows, self.target)
        along = next((d for d in reversed(extents[:-1]) if d != 1), 1)
        many = neighbours(along, rows, lanes, self.target.threads)
        turns = -(-channels // lanes) * -(-rows // many // (self.target.threads // lanes))
        taps = taps_of(node) or 1
        loads = _places(node, many) + (taps if node.op == "conv" else 0)
        waits = WAIT_NS + turns * loads * LOAD_NS
        works = START_NS + turns * (many * taps * TAP_NS + loads * ISSUE_NS + many * STORE_NS)
        together = min(-(-guess(self.blocks, sizes) // self.target.cores), TOGETHER)
        return max(works, waits / max(together, 1))


def lanes_of(channels: int, rows: int, target: Target) -> int:
    """Threads that share a row of so many channels."""
    return min(power_of_two(max(channels, 1)), max(target.threads // power_of_two(max(rows, 1)), target.lanes))


def _places(node: Node, many: int) -> int:
    """Elements of the image that a thread loads for so many windows side by side."""
    if node.op == "window":
        *others, size = node.attrs["size"]
    else:
        *others, size = node.inputs[1].shape[:-2]
    step = node.attrs["strides"][-1]
    return math.prod(others) * min(many * size, (many - 1) * step + size)
