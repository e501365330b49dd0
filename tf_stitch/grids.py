"""Grid-scope stitching of a program: runs of small kernel steps become one launch each.

Which steps share a phase is fusion.runs' to say, what a grid kernel's text is codegen.grid's, and the table that it
walks is made for each shape signature (program.table here, custom_ops/grid_table.cc in the op).
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .codegen.grid import GridKernel, emit_grid, emit_pack
from .codegen.resident import Kept, keep_operands
from .codegen.unit import SEPARATOR, blocks_wanted, kernel_texts
from .fusion import cost
from .fusion.planner import Planned
from .fusion.runs import Run, arrange
from .ir.graph import Graph
from .program.program import AliasStep, Grid, KernelStep, Program
from .schedule.target import Target

STEP_NS = 30_000  # a step estimated to take longer fills the device by itself
KEEP = "TF_STITCH_KEEP_OPERANDS"  # "1": weights stay on the chip between phases; off until it is measured to pay
LEAST_BLOCKS = 2  # of a grid on a multiprocessor at once, where its kernels do not say
MAX_BASES = 256  # bases travel in the launch's parameter, which has 4 KB


def small_steps(graph: Graph, planned: Sequence[Planned], target: Target) -> list[bool]:
    """For each step of a plan, whether it may be part of a grid."""
    model = cost.CostModel(target.name, cost.environments(d for n in graph.nodes() for d in n.shape))
    return [hasattr(p.scheduled, "parts") and model.step_ns(p.ns) <= STEP_NS for p in planned]


def join_steps(program: Program, small: Sequence[bool]) -> tuple[Program, list[GridKernel], dict[str, Kept]]:
    """The program with its steps in an order that has long runs of ``small`` ones, those runs as grids.

    ``small`` says for each step but the aliases, which come last, whether it may be part of one.  Returned are also
    the grid kernels, and by their former names kernels that now can keep operands.
    """
    runs = arrange(_dependences(program)[:len(small)], small)
    inside = [s for run in runs if len(run.steps) > 1 for s in run.steps]
    program, keeping = _keep_operands(program, inside) if os.environ.get(KEEP) == "1" else (program, {})
    keeps = {k.name: (k.room, k.inputs) for k in keeping.values()}
    order: list[int] = []
    grids: list[Grid] = []
    kernels: dict[str, GridKernel] = {}
    holders = program.holders()
    wanted = {name: blocks_wanted(text) for name, text in kernel_texts(program.text).items()}
    for run in runs:
        if len(run.steps) > 1:
            made = _join(program, run, len(order), holders, keeps, wanted)
            if made is not None:
                grids.append(made[0])
                kernels[made[1].name] = made[1]
        order += run.steps
    if not grids:
        return program, [], keeping
    steps = [program.steps[s] for s in (*order, *range(len(order), len(program.steps)))]
    text = SEPARATOR.join([program.text, *(k.text for k in kernels.values())])
    return replace(program, steps=steps, grids=grids, text=text), list(kernels.values()), keeping


def _keep_operands(program: Program, steps: Sequence[int]) -> tuple[Program, dict[str, Kept]]:
    """Kernels that run several times among ``steps`` keep what they always read from the same inputs.

    Not those that share a multiprocessor: they have no registers to spare.
    """
    uses: dict[str, list[tuple[int, ...]]] = {}
    for s in (program.steps[i] for i in steps):
        if isinstance(s, KernelStep):
            uses.setdefault(s.kernel, []).append(s.buffers)
    texts = kernel_texts(program.text)
    keeping: dict[str, Kept] = {}
    for kernel, buffers in uses.items():
        constant = [i for i, same in enumerate(zip(*buffers, strict=True))
                    if len(set(same)) == 1 and program.buffers[same[0]].kind == "input"]
        suits = len(buffers) > 1 and blocks_wanted(texts[kernel]) == 1
        kept = keep_operands(kernel, texts[kernel], constant) if suits else None
        if kept is not None:
            keeping[kernel] = kept
            texts[kernel] = kept.text
    if not keeping:
        return program, {}
    renamed = [replace(s, kernel=keeping[s.kernel].name) if isinstance(s, KernelStep) and s.kernel in keeping else s
               for s in program.steps]
    return replace(program, steps=renamed, text=SEPARATOR.join(texts.values())), keeping


def _join(program: Program, run: Run, first: int, holders: dict[int, int],
          keeps: dict[str, tuple[int, tuple[int, ...]]], wanted: dict[str, int]) -> tuple[Grid, GridKernel] | None:
    """The grid of a run; None when it touches more inputs and outputs than a launch can name.

    ``wanted``: how many blocks a kernel wants on a multiprocessor at once, for those that say so.
    """
    steps = [s for s in (program.steps[i] for i in run.steps) if isinstance(s, KernelStep)]
    bases = tuple(dict.fromkeys(holders[b] for s in steps for b in s.buffers if b in holders))
    if len(bases) >= MAX_BASES:
        return None
    return grid_of(steps, bases, first, tuple(len(p) for p in run.phases), wanted, LEAST_BLOCKS, keeps)


def grid_of(steps: Sequence[KernelStep], bases: tuple[int, ...], first: int, phases: tuple[int, ...],
            wanted: Mapping[str, int], least: int, keeps: Mapping[str, tuple[int, tuple[int, ...]]] | None = None
            ) -> tuple[Grid, GridKernel]:
    """The grid of steps that are the program's from ``first`` on, and its kernel.

    Args:
      bases: the buffers that its launch names.
      phases: how many of the steps each phase has.
      wanted: how many blocks a kernel wants on a multiprocessor at once, for those that say so; ``least`` of the grid
        where none does.
      keeps: what kernels keep in shared memory (program.program.Grid).
    """
    words = max(len(s.buffers) + len(s.dims) for s in steps)
    bodies = tuple(dict.fromkeys(s.kernel for s in steps))
    blocks = max(wanted.get(b, 0) for b in bodies) or least
    kernel = (emit_pack if len(phases) == 1 else emit_grid)(bodies, 1 + len(bases), words, blocks)
    return Grid(kernel.name, bodies, bases, first, phases, tuple((keeps or {}).get(b, (0, ())) for b in bodies)), kernel


def _dependences(program: Program) -> list[frozenset[int]]:
    """For each step, the earlier ones whose results it reads; a buffer is written by the first step that names it."""
    writer: dict[int, int] = {}
    after = []
    for i, s in enumerate(program.steps):
        used = () if isinstance(s, AliasStep) else s.buffers
        after.append(frozenset(writer[b] for b in used if b in writer))
        for b in used:
            if program.buffers[b].kind != "input":
                writer.setdefault(b, i)
    return after
