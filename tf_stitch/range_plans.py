"""A graph of unknown size planned for several ranges of it, side by side.

This process makes the plan for all sizes, where planning takes long processes of their own make the others.  Kernels
that are sure to be part of the program are told of at once, so that they are compiled while others are planned.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .assemble import assemble
from .backend.host import usable_cores
from .codegen.kernel import Kernel
from .fusion import variants
from .fusion.variants import Range
from .ir import dims as D
from .ir.graph import Graph
from .program.join import join_programs
from .program.program import Program
from .schedule.target import Target

log = logging.getLogger("tf_stitch")

Begin = Callable[[str], None]  # told of kernels' text
Laid = tuple[Program, list[Kernel]]

MANY_NODES = 200  # of a graph: fewer are planned before a process has started
FEW_CORES = 4  # with fewer, compilers need them all
START_S = 1.0  # that a process takes to start
MOST_SENT = 64 << 20  # bytes of literals that a process is worth to be sent


@dataclass(frozen=True)
class RangePlan:
    """The plan for a range: which memory its outputs share (variants.shared_memory), what it takes at which size in
    nanoseconds, and the program."""

    memory: list[int]
    ns: dict[int, float]
    lay_out: Callable[[], Laid]


def lay_out(graph: Graph, target: Target, ranges: Sequence[Range], begin: Begin) -> Laid:
    """The program that has a plan for every range that is worth one, and its kernels."""
    *bounded, whole = ranges
    with _Helpers(graph, target, ranges, begin) as helpers:
        general = plan_range(graph, target, whole, ranges)
        kept = [(whole, general, _told(general, begin))]
        for r in reversed(bounded):
            made = helpers.plan(r) or plan_range(graph, target, r, ranges)
            if made.memory == general.memory and variants.pays(made.ns, kept[0][1].ns, r):
                kept.insert(0, (r, made, _told(made, begin)))
    if len(kept) == 1 and whole.least:  # the only plan is for all sizes
        return plan_range(graph, target, Range(whole.size), ()).lay_out()
    kernels = [k for _, _, laid in kept for k in laid[1]]
    programs = [laid[0] for _, _, laid in kept]
    if len(programs) == 1:
        return programs[0], kernels
    size = D.symbol(whole.size.name, whole.size.lo, whole.size.hi)
    return join_programs(programs, variants.active_dims([r for r, _, _ in kept]), {whole.size.name: size},
                         graph), kernels


def plan_range(graph: Graph, target: Target, here: Range, ranges: Sequence[Range]) -> RangePlan:
    """The plan for one range.  Raises Unschedulable when a single node has no schedule."""
    made = variants.draft_graph(here.bounded(graph), target)
    planned = made.planner.graph
    return RangePlan(variants.shared_memory(planned), variants.estimates(made, here, ranges),
                     functools.cache(lambda: assemble(planned, made.finish(), target)))


def _told(plan: RangePlan, begin: Begin) -> Laid:
    laid = plan.lay_out()
    begin(laid[0].text)
    return laid


# --- in processes of their own -----------------------------------------------------------------------

class _Helpers:
    """Processes that plan the ranges but the last one.

    While the plan for all sizes is made, kernels of the others are begun: those of the widest range, and of what then
    pays.  They are sure to be part of the program but for the first, which nearly always is.
    """

    def __init__(self, graph: Graph, target: Target, ranges: Sequence[Range], begin: Begin):
        self.bounded, self.begin = ranges[:-1], begin
        self.made: dict[Range, RangePlan] = {}
        self.lock = threading.Lock()
        jobs = {r: pickle.dumps((graph, target, r, ranges)) for r in ranges[:-1]} if _worth_helpers(graph) else {}
        self.helpers = {r: _Helper(job, functools.partial(self._arrived, r)) for r, job in jobs.items()}

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, *error: object) -> None:
        for h in self.helpers.values():
            h.stop()

    def plan(self, r: Range) -> RangePlan | None:
        """The plan for a range; None where planning here is sooner, or where its process failed."""
        return self.made.get(r) if r in self.helpers and self.helpers[r].is_waited_for() else None

    def _arrived(self, r: Range, answer: bytes) -> None:
        memory, ns, laid = pickle.loads(answer)
        with self.lock:
            self.made[r] = RangePlan(memory, ns, lambda: laid)
            wider: RangePlan | None = None
            for other in reversed(self.bounded):
                made = self.made.get(other)
                if made is None:
                    return
                if wider is None or variants.pays(made.ns, wider.ns, other):
                    wider = made
                    _told(made, self.begin)


def _worth_helpers(graph: Graph) -> bool:
    nodes = graph.nodes()
    sent = sum(v.nbytes for n in nodes for v in n.attrs.values() if isinstance(v, np.ndarray))
    return (len(nodes) >= MANY_NODES and sent <= MOST_SENT and usable_cores() >= FEW_CORES
            and Path(sys.executable or "").name.startswith("python"))


class _Helper:
    """A process that plans a range."""

    def __init__(self, job: bytes, arrived: Callable[[bytes], None]):
        self.arrived = arrived
        self.process: subprocess.Popen[bytes] | None = None
        self.start = time.monotonic()
        folder = str(Path(__file__).parents[1])
        with contextlib.suppress(OSError):  # no process to be had: planned here
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-c", f"from {__name__} import main; main()"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])})
        self.stopped = False
        self.thread = threading.Thread(target=self._talk, args=(job,), daemon=True)
        self.thread.start()

    def _talk(self, job: bytes) -> None:
        answer = b""
        if self.process is not None:
            with contextlib.suppress(OSError, ValueError):  # it died
                answer, _ = self.process.communicate(job)
        if answer and not self.stopped:
            self.arrived(answer)
        elif not self.stopped:
            log.warning("A process that plans kernels ended without an answer; this one plans them.")

    def is_waited_for(self) -> bool:
        """True once it has ended; False where it has hardly started, so that planning here is sooner."""
        if self.thread.is_alive() and time.monotonic() - self.start < START_S:
            return False
        self.thread.join()
        return True

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.kill()
        self.thread.join()


def main() -> None:
    """What such a process does: a job from its standard input, the plan to its standard output."""
    gc.disable()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed must not get between
    _answer(sys.stdin.buffer, out)


def _answer(source: BinaryIO, out: BinaryIO) -> None:
    plan = plan_range(*pickle.load(source))
    program, kernels = plan.lay_out()
    with out:
        pickle.dump((plan.memory, plan.ns, (program, [replace(k, args=()) for k in kernels])), out)
