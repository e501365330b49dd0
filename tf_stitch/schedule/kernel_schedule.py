"""What a schedule is: plain data between :mod:`tf_stitch.schedule.build` and :mod:`tf_stitch.codegen`."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..ir.dims import Dim
from ..ir.graph import Node, Shape
from .rules import Box, Index
from .target import Target
from .tile import Axis

SHARED, OUT = "shared", "out"


@dataclass(frozen=True)
class Item:
    """A value that a stage writes.

    Attributes:
      node: whose value it is.
      space: SHARED (on-chip, for the block's box) or OUT (the output buffer in memory).
      body: the node evaluated at every index of the stage's domain; the node itself when it folds (a reduction).
      shift: added to the domain's index to give the index of ``node`` (a piece of a concat); () for none.
      mapped: for each dim of ``node``, the domain dim that indexes it.
      copy: the value is read from shared memory, where an earlier stage put it.
    """

    node: Node
    space: str
    body: Node
    shift: Index = ()
    mapped: tuple[int, ...] = ()
    copy: bool = False


@dataclass
class Stage:
    """A parallel loop over a box, by all threads of a block; a barrier follows.

    Attributes:
      kind: "map", "fold" (reductions of any kind), "arg", "scan", "segment" or "order".
      shape: sizes of the domain's dims; box: what the block covers of them.
      folded: domain dims that the stage reduces or scans over.
      once: numbers of axes along which only the first block does the work (others would write the same).
      hoisted: True when no block differs: done once per call, before the blocks.
      reads: kept values that the items read.
    """

    kind: str
    shape: Shape
    box: Box
    folded: tuple[int, ...]
    items: list[Item]
    once: tuple[int, ...] = ()
    hoisted: bool = False
    reads: set[Node] = field(default_factory=set)


@dataclass(frozen=True)
class RowChain:
    """Consecutive stages of a GPU's block that run row by row: what they hand over of a row stays in registers.

    The rows are all dims but the last of ``stages[0]``; a thread has the same elements of its row in all stages.

    Attributes:
      stages: over whole rows, or over the rows alone (one value each).
      held: values and inputs of whole rows that a later stage reads again, and the stage that has them first: every
        thread keeps its elements.
      lanes: threads that share a row, a power of two.
      run: neighbouring elements that a thread takes at a time.
      short: a thread has few elements of a row: loops over them are unrolled (and arrays of them are registers).
    """

    stages: tuple[Stage, ...]
    held: Mapping[Node, int]
    lanes: int
    run: int
    short: bool


class Slot(NamedTuple):
    """Where a staged value lies in shared memory: bytes from the start, box, and the room per dim."""

    offset: Dim
    box: Box
    room: Shape
    dtype: str


@dataclass
class Part:
    """Independent outputs of a kernel have blocks of their own: a part is one such range of blocks."""

    axes: list[Axis]
    stages: list[Stage]
    slots: Mapping[Node, Slot]
    kept: frozenset[Node]
    read_back: frozenset[Node]  # outputs whose written box the block reads again
    blocks: Dim
    shared_bytes: Dim
    cost: Dim
    block_ns: Callable[[Mapping[str, int]], float] | None = None  # of a GPU's block for products or windows, by sizes
    chains: Sequence[RowChain] = ()


@dataclass
class KernelSchedule:
    """The schedule of one kernel.  ``origin`` maps canonical nodes back to the group's own."""

    target: Target
    parts: list[Part]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    members: frozenset[Node]
    origin: Mapping[Node, Node] = field(default_factory=dict)

    @property
    def blocks(self) -> Dim:
        """Blocks of all parts."""
        total: Dim = 0
        for p in self.parts:
            total = total + p.blocks
        return total
