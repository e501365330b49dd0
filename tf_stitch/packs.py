"""Parallel packing of a plan: kernels that do not depend on each other become one launch.

Which ones do is fusion.packs' to say.  A pack is a grid of one phase (program.program.Grid): its kernel holds each body
once and finds its blocks' problem in a table (codegen/include/ts_grid.h).
"""
from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from . import grids, schedule
from .codegen import emit
from .codegen.grid import GridKernel
from .codegen.kernel import Kernel
from .codegen.unit import SEPARATOR, blocks_wanted, kernel_texts
from .errors import Unschedulable
from .fusion import cost, packs
from .fusion.call import LibraryCall
from .fusion.planner import Planned
from .ir import dims as D
from .ir.dims import Dim
from .ir.graph import Graph, view_source
from .program.program import Grid, KernelStep, Program
from .schedule import sizes
from .schedule.target import Target
from .schedule.tile import guess, power_of_two

Work = Kernel | LibraryCall

SHARED = 24 << 10  # bytes of shared memory up to which a multiprocessor has room for as many blocks as threads
FEW_BODIES = 8  # of a pack: more of them, and kernels of one structure become one
MOST_BASES = 4000  # bases travel in the launch's parameter, which has 32764 bytes (from sm_70 and CUDA 12.1 on)


@dataclass(frozen=True)
class Packing:
    """Kernels and calls in an order that can be run; ``sizes`` of those in a row share a launch."""

    work: list[Work]
    sizes: list[int]


def pack(graph: Graph, planned: Sequence[Planned], work: Sequence[Work], target: Target) -> Packing:
    """Arranges the kernels of a plan in packs, where ``target`` has any."""
    if not target.packs or len(planned) < packs.LEAST:
        return Packing(list(work), [1] * len(work))
    kinds = _kinds(graph, planned, work, target)
    runs = packs.runs(_dependences(planned), kinds)
    out: list[Work] = []
    for run in runs:
        members = {s: work[s] for s in run}
        if len(run) > 1:
            kernels = {s: w for s, w in members.items() if isinstance(w, Kernel)}
            members |= _joined({s: planned[s] for s in run}, kernels, target)
        out += [members[s] for s in _longest_first(members)]
    return Packing(out, [len(run) for run in runs])


def with_grids(program: Program, steps: Sequence[int]) -> tuple[Program, list[GridKernel]]:
    """The program with a grid of one phase for all steps that share a launch, and the grids' kernels."""
    holders = program.holders()
    launches = [r for end, count in zip(itertools.accumulate(steps), steps, strict=True)
                for r in _launches(program, end - count, end, holders)]
    if not launches:
        return program, []
    wanted = {name: blocks_wanted(text) for name, text in kernel_texts(program.text).items()}
    made: list[Grid] = []
    kernels: dict[str, GridKernel] = {}
    for start, end in launches:
        members = [_kernel_step(program, s) for s in range(start, end)]
        bases = tuple(dict.fromkeys(holders[b] for s in members for b in s.buffers if b in holders))
        grid, kernel = grids.grid_of(members, bases, start, (len(members),), wanted, 1)
        made.append(grid)
        kernels[kernel.name] = kernel
    text = SEPARATOR.join([program.text, *(k.text for k in kernels.values())])
    return replace(program, grids=made, text=text), list(kernels.values())


def _launches(program: Program, first: int, end: int, holders: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Ranges of steps [first, end) that are packed, each with as many bases as a launch has room for."""
    bases: set[int] = set()
    start = first
    for s in range(first, end):
        own = {holders[b] for b in _kernel_step(program, s).buffers if b in holders} if end - first > 1 else set()
        if len(bases | own) > MOST_BASES:
            if s - start > 1:
                yield start, s
            start, bases = s, set()
        bases |= own
    if end - start > 1:
        yield start, end


def _kernel_step(program: Program, step: int) -> KernelStep:
    found = program.steps[step]
    assert isinstance(found, KernelStep), "only kernels are packed"
    return found


def _dependences(planned: Sequence[Planned]) -> list[frozenset[int]]:
    """For each kernel or call, those that make what it reads."""
    writer = {o: i for i, p in enumerate(planned) for o in p.group.outputs}
    sources = [{view_source(n) for n in p.group.inputs} for p in planned]
    return [frozenset(writer[n] for n in reads if n in writer) for reads in sources]


def _kinds(graph: Graph, planned: Sequence[Planned], work: Sequence[Work], target: Target) -> list[Hashable | None]:
    """What may share a launch, by step (fusion.packs.runs)."""
    model = cost.CostModel(target.name, cost.environments(d for n in graph.nodes() for d in n.shape))
    return [_kind(p, w, model.step_ns(p.ns), target) if isinstance(w, Kernel) else None
            for p, w in zip(planned, work, strict=True)]


def _kind(planned: Planned, kernel: Kernel, ns: float, target: Target) -> Hashable | None:
    """What may share a launch with a kernel that is estimated to take ``ns``."""
    if ns > packs.PACK_NS:
        return None
    fills = packs.fills(ns, guess(kernel.blocks), target.cores)
    return (*_like(kernel), sizes.structure(planned.group).key) if fills else _like(kernel)


def _like(kernel: Kernel) -> tuple[int, int]:
    """What a kernel needs of a multiprocessor: registers, as the number of blocks it wants there, and shared memory."""
    shared = guess(kernel.shared_bytes)
    return blocks_wanted(kernel.text), power_of_two(shared) if shared > SHARED else 0


def _joined(planned: Mapping[int, Planned], kernels: Mapping[int, Kernel], target: Target) -> dict[int, Work]:
    """Kernels by step, one text for those of one structure, where the members of a pack have many texts."""
    if len({k.name for k in kernels.values()}) <= FEW_BODIES:
        return {}
    families: dict[Hashable, dict[int, sizes.Structure]] = {}
    for s, p in planned.items():
        found = sizes.structure(p.group)
        families.setdefault(found.key, {})[s] = found
    out: dict[int, Work] = {}
    for family in families.values():
        if len({kernels[s].name for s in family}) > 1:
            out.update(_one_text(family, kernels, target))
    return out


def _one_text(family: Mapping[int, sizes.Structure], kernels: Mapping[int, Kernel], target: Target) -> dict[int, Work]:
    """Kernels of one structure with one text, if that has a schedule and needs what theirs do."""
    joined = sizes.join(list(family.values()))
    try:
        kernel = emit(schedule.build(joined.group, target))
    except Unschedulable:
        return {}
    number = {n: k for k, n in enumerate(joined.nodes)}
    out: dict[int, Work] = {}
    for (s, own), values in zip(family.items(), joined.values, strict=True):
        made = _with_sizes(replace(kernel, args=tuple(own.origin[number[a]] for a in kernel.args)), values)
        if _like(made) != _like(kernels[s]):
            return {}
        out[s] = made
    return out


def _with_sizes(k: Kernel, values: Mapping[str, Dim]) -> Kernel:
    """A kernel some of whose unknown sizes are known."""
    def put(d: Dim) -> Dim:
        return D.substitute(d, values)

    return replace(k, temps=tuple((t, put(n)) for t, n in k.temps), dims=tuple(map(put, k.dims)), blocks=put(k.blocks),
                   shared_bytes=put(k.shared_bytes), cost=put(k.cost),
                   limits=tuple(d for d in map(put, k.limits) if not isinstance(d, int)))


def _longest_first(members: Mapping[int, Work]) -> list[int]:
    """Steps whose blocks have more to do begin first: short ones fill what they leave at the end."""
    return sorted(members, key=lambda s: -guess(w.cost) if isinstance(w := members[s], Kernel) else 0)
