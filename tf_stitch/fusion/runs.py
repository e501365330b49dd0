"""Grid-scope stitching: in which order steps run, and which runs of them become phases of one launch.

Steps of one span level (work/span analysis, FusionStitching, arXiv 1811.05213, section 4.1) do not depend on each
other and share a phase; a device-wide barrier separates phases (AStitch, ASPLOS 2022: global stitching).  Large
kernels and library calls stay launches of their own; they cut the steps into runs.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_STEPS = 2  # a launch of a single step gains nothing


@dataclass(frozen=True)
class Run:
    """Steps by number; ``phases`` is a single phase of a single step for a launch of its own."""

    phases: tuple[tuple[int, ...], ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps, in an order in which they may run one by one."""
        return tuple(s for phase in self.phases for s in phase)


def arrange(after: Sequence[frozenset[int]], joins: Sequence[bool]) -> list[Run]:
    """Runs, in an order that keeps every step behind the earlier steps ``after[step]``.

    Steps that may join others (``joins``) are taken as long as any is ready, then all others that are, and so on;
    or the others first, whichever gives fewer launches.
    """
    return min((_alternate(after, joins, first) for first in (True, False)), key=len)


def _alternate(after: Sequence[frozenset[int]], joins: Sequence[bool], joining: bool) -> list[Run]:
    done: set[int] = set()
    left = list(range(len(after)))
    runs: list[Run] = []
    while left:
        phases = _levels(left, after, joins, joining, done)
        taken = sorted(s for phase in phases for s in phase)
        if joining and len(taken) >= MIN_STEPS:
            runs.append(Run(tuple(map(tuple, phases))))
        else:
            runs.extend(Run(((s,),)) for s in taken)
        done.update(taken)
        left = [s for s in left if s not in done]
        joining = not joining
    return runs


def _levels(left: Sequence[int], after: Sequence[frozenset[int]], joins: Sequence[bool], joining: bool,
            done: set[int]) -> list[list[int]]:
    """The steps of a kind that can run once ``done`` have, by level."""
    level: dict[int, int] = {}
    for s in left:
        if joins[s] == joining and all(t in done or t in level for t in after[s]):
            level[s] = max((level[t] + 1 for t in after[s] if t in level), default=0)
    phases: list[list[int]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for s, at in level.items():
        phases[at].append(s)
    return phases
