"""Programs that compute the same, for ranges of an unknown size, as one: only the one whose range it is does anything.

Where another program is to run, steps have no blocks and temporaries no bytes; what runs programs need not know.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..codegen.unit import SEPARATOR
from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Graph, Guard
from .program import RESULT_DIMS, AliasStep, Buffer, Grid, KernelStep, LibraryStep, Program, Step


def join_programs(programs: Sequence[Program], active: Sequence[Dim], whole: Mapping[str, Dim],
                  graph: Graph) -> Program:
    """The program of several.

    Args:
      programs: whose inputs and outputs share memory alike in all; the last one is for all sizes that others are not.
      active: for each, a dim that is 1 where it is to run and 0 elsewhere.
      whole: the unknown by its name, as it is where no range bounds it.
      graph: what they compute; its guards begin each program's, which may have others of its own.
    """
    general = programs[-1]
    sides = {"input": graph.params, "output": graph.outputs}  # whose shapes hold for all sizes
    buffers = [Buffer(b.kind, b.index, b.dtype, tuple(D.substitute(d, whole) for d in sides[b.kind][b.index].shape))
               for b in general.buffers if b.kind != "temp"]  # these come first, in every program
    temps, steps, grids = 0, list[Step](), list[Grid]()
    own: dict[Guard, None] = {}
    for program, here in zip(programs, active, strict=True):
        scale = _Scale(here, whole)
        place = list(range(len(buffers) - temps))
        for b in program.buffers[len(place):]:
            place.append(len(buffers))
            buffers.append(Buffer("temp", temps, b.dtype, scale.first(b.shape)))
            temps += 1
        grids += [replace(g, first=len(steps) + g.first, bases=tuple(place[b] for b in g.bases))
                  for g in program.grids]
        steps += [scale.step(s, place) for s in program.steps if not isinstance(s, AliasStep)]
        own.update(dict.fromkeys(Guard(g.kind, scale(g.a), scale.dim(g.b), g.reason)
                                 for g in program.guards[len(graph.guards):]))
    steps += [s for s in general.steps if isinstance(s, AliasStep)]
    text = SEPARATOR.join(dict.fromkeys(part for p in programs for part in p.text.split(SEPARATOR) if part))
    return Program(buffers, steps, general.symbols, [*graph.guards, *own], text, name=general.name, grids=grids)


class _Scale:
    """Dims of a program in terms of the whole unknown, and so that they are 0 where the program is not to run."""

    def __init__(self, active: Dim, whole: Mapping[str, Dim]):
        self.active, self.whole = active, whole

    def dim(self, d: Dim) -> Dim:
        return D.substitute(d, self.whole)

    def __call__(self, d: Dim) -> Dim:
        return self.dim(d) * self.active

    def first(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """A shape without elements where the program is not to run."""
        return (*map(self, shape[:1]), *map(self.dim, shape[1:]))

    def step(self, s: KernelStep | LibraryStep, place: Sequence[int]) -> Step:
        buffers = tuple(place[b] for b in s.buffers)
        if isinstance(s, KernelStep):
            return KernelStep(s.kernel, buffers, tuple(map(self.dim, s.dims)), self(s.blocks),
                              self.dim(s.shared_bytes), self.dim(s.cost), s.threads, s.origin)
        results = RESULT_DIMS[s.call]
        dims = tuple(self(d) if i in results else self.dim(d) for i, d in enumerate(s.dims))
        return LibraryStep(s.call, buffers, dims, s.flags, s.origin)
