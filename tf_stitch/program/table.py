"""The table that a grid kernel walks (codegen/include/ts_grid.h), for one shape signature.

The same as custom_ops/grid_table.cc makes.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..ir import dims as D
from .program import Grid, KernelStep, Program

BASE_SHIFT = 48  # an address word is base << BASE_SHIFT | offset
KEEPS, RECALLS = 1 << 16, 1 << 17  # added to a record's kernel
RECORD = ("phase", "kernel", "words", "addresses", "count", "begin", "end", "before")


@dataclass(frozen=True)
class Table:
    """Records and words of a grid.

    Attributes:
      records: [problems + 2, 8] int32, the columns of RECORD; the last two end the table.
      words: int64.
      phases: how many phases have work.
      most_blocks: of the phase that has the most.
      shared_bytes: on-chip scratch of one block.
    """

    records: np.ndarray
    words: np.ndarray
    phases: int
    most_blocks: int
    shared_bytes: int

    @property
    def problems(self) -> int:
        """How many there are."""
        return len(self.records) - 2

    def keep(self, grid: Grid, thread_blocks: int) -> int:
        """Marks problems whose operands the next phase finds on the chip; bytes that a block keeps, at most.

        A problem keeps what it reads for one of the same body, blocks and operands in the next phase, where no thread
        block has two blocks of either phase.
        """
        room = 0
        rows = [list(map(int, r)) for r in self.records[:-2]]
        total = {r[0]: max(x[6] for x in rows if x[0] == r[0]) for r in rows}

        def operands(r: list[int]) -> tuple[int, ...]:
            return tuple(int(self.words[r[2] + i]) for i in grid.keeps[r[1]][1])

        for i, r in enumerate(rows):
            if not grid.keeps[r[1]][0] or total[r[0]] > thread_blocks:
                continue
            for j, other in enumerate(rows):
                if (other[0] == r[0] + 1 and total[other[0]] <= thread_blocks and other[5:7] == r[5:7]
                        and other[1] == r[1] and operands(other) == operands(r)):
                    self.records[j, 1] |= RECALLS
                    if not self.records[i, 1] & RECALLS:
                        self.records[i, 1] |= KEEPS
                    room = max(room, grid.keeps[r[1]][0])
        return room

    def first_of(self, phase: int) -> int:
        """The record that a phase begins with."""
        return int(np.searchsorted(self.records[:, 0], phase))


def make_table(program: Program, grid: Grid, env: Mapping[str, int], place: Callable[[int], tuple[int, int]]) -> Table:
    """The table of a grid where the symbols have the values ``env``.

    ``place(buffer)`` is (base, offset in bytes): base 0 is the arena, base k input or output ``grid.bases[k - 1]``.
    """
    records: list[list[int]] = []
    words: list[int] = []
    phase = before = most = shared = 0
    step = grid.first
    for size in grid.phases:
        blocks = 0
        for s in program.steps[step:step + size]:
            assert isinstance(s, KernelStep)
            count = D.evaluate(s.blocks, env)
            if not count:
                continue
            addresses = [base << BASE_SHIFT | offset for base, offset in map(place, s.buffers)]
            dims = [D.evaluate(d, env) for d in s.dims]
            records.append([phase, grid.bodies.index(s.kernel), len(words), len(addresses), len(addresses) + len(dims),
                            blocks, blocks + count, before])
            words += addresses + dims
            blocks += count
            shared = max(shared, D.evaluate(s.shared_bytes, env))
        step += size
        if blocks:
            phase, before, most = phase + 1, blocks, max(most, blocks)
    records += [[phase] + [0] * 7] * 2
    return Table(np.array(records, np.int32), np.array(words, np.int64), phase, most, shared)
