"""A graph of unknown size planned for several ranges of it, side by side.

This process makes the plan for all sizes, where planning takes long processes of their own make the others.  Kernels
that are sure to be part of the program are told of at once, so that they are compiled while others are planned.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import forks
from .assemble import assemble
from .backend.host import usable_cores
from .codegen.grid import GridKernel
from .codegen.kernel import Kernel
from .codegen.unit import SEPARATOR
from .fusion import variants
from .fusion.variants import Range, Time
from .ir import dims as D
from .ir.graph import Graph
from .program.join import join_programs
from .program.program import Program
from .schedule.target import Target

log = logging.getLogger("tf_stitch")

Begin = Callable[[str], None]  # told of kernels' text
Laid = tuple[Program, list[Kernel | GridKernel]]

MANY_NODES = 24  # of a graph: fewer are planned before a process has read them
FEW_CORES = 4  # with fewer, compilers need them all
CORES_EACH = 2  # cores for each such process
MOST_TRIED = 4  # kernels of a plan that are compiled before it is known that it pays
MOST_SENT = 64 << 20  # bytes of literals that a process is worth to be sent


@dataclass(frozen=True)
class RangePlan:
    """The plan for a range: which memory its outputs share (variants.shared_memory), what it takes at which size, and
    the program."""

    memory: list[int]
    times: dict[int, Time]
    lay_out: Callable[[], Laid]


def lay_out(graph: Graph, target: Target, ranges: Sequence[Range], begin: Begin) -> Laid:
    """The program that has a plan for every range that is worth one, and its kernels."""
    *bounded, whole = ranges
    begin = functools.cache(begin)  # of each text once: what is kept was begun when it arrived
    with _Helpers(graph, target, ranges, begin) as helpers:
        general = plan_range(graph, target, whole, ranges)
        kept = [(whole, general, _told(general, begin))]
        helpers.compare(general)
        helpers.help(lambda r: plan_range(graph, target, r, ranges))
        for r in reversed(bounded):
            made = helpers.plan(r) or plan_range(graph, target, r, ranges)
            if made.memory == general.memory and variants.pays(made.times, kept[0][1].times, r):
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


def _always(laid: Laid) -> Callable[[], Laid]:
    return lambda: laid


def _told(plan: RangePlan, begin: Begin) -> Laid:
    laid = plan.lay_out()
    begin(laid[0].text)
    return laid


# --- in processes of their own -----------------------------------------------------------------------

class _Helpers:
    """Processes that plan ranges, beginning with the widest; this one makes the plan for all sizes, then plans for the
    narrowest.

    While ranges are planned, kernels of those that are ready are begun: those of the widest range, and of what then
    pays.  They are sure to be part of the program but for the first, which nearly always is.  Few kernels are begun as
    soon as they are faster than those for all sizes: wider ranges take longer to plan, and cores have nothing to do.
    """

    def __init__(self, graph: Graph, target: Target, ranges: Sequence[Range], begin: Begin):
        self.bounded, self.begin = ranges[:-1], begin
        self.made: dict[Range, RangePlan] = {}
        self.general: RangePlan | None = None  # the plan for all sizes, when there is one
        self.lock = threading.Lock()
        count = min(usable_cores() // CORES_EACH, len(self.bounded)) if _worth_helpers(graph) else 0
        self.left = list(self.bounded) if count else []  # what nobody plans yet
        self.ended = {r: threading.Event() for r in self.left}
        job = pickle.dumps((graph, target, ranges)) if count else b""
        self.helpers: list[_Helper] = []
        try:
            self.helpers += (_Helper(job, self) for _ in range(count))
        except OSError as error:
            log.warning("A process that plans kernels could not be started (%s); others do its work.",
                        error.strerror or error)

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.left.clear()
        for h in self.helpers:
            h.stop()

    def help(self, make: Callable[[Range], RangePlan]) -> None:
        """Has this process make the plans, from the narrowest range on, that no other one has begun."""
        while self.helpers and (r := self.next(0)):
            plan = make(r)
            plan.lay_out()  # no other thread should have to
            self.arrived(r, plan)

    def plan(self, r: Range) -> RangePlan | None:
        """The plan for a range; None where it is to be made here, because there is no other process or it failed."""
        if r in self.ended and self.helpers:
            self.ended[r].wait()
        return self.made.get(r)

    def next(self, at: int = -1) -> Range | None:
        """The range to plan next, of those that are left the widest or at a position; None when there are no more."""
        with self.lock:
            return self.left.pop(at) if self.left else None

    def compare(self, general: RangePlan) -> None:
        """Takes the plan for all sizes, and begins kernels of those that are likely to be part of the program, too."""
        with self.lock:
            self.general = general
            for r, plan in self.made.items():
                self._try(r, plan)

    def _try(self, r: Range, plan: RangePlan) -> None:
        small = plan.lay_out()[0].text.count(SEPARATOR) < MOST_TRIED
        likely = self.general is not None and plan.memory == self.general.memory \
            and variants.pays(plan.times, self.general.times, r)
        if variants.is_sure(r) or (small and likely):
            _told(plan, self.begin)

    def arrived(self, r: Range, plan: RangePlan) -> None:
        """Takes the plan for a range, and begins the kernels that are then sure."""
        with self.lock:
            self.made[r] = plan
            self.ended[r].set()
            self._try(r, plan)
            wider: RangePlan | None = None
            for other in reversed(self.bounded):
                made = self.made.get(other)
                if made is None:
                    return
                if wider is None or variants.pays(made.times, wider.times, other):
                    wider = made
                    _told(made, self.begin)


_server = forks.Server(__name__)


def prepare() -> None:
    """Starts the process that others are forked from, where those are of use: a graph of unknown size is to come."""
    if _usable():
        with contextlib.suppress(OSError):  # it comes up again where a plan is to be made
            _server.start()


def _worth_helpers(graph: Graph) -> bool:
    nodes = graph.nodes()
    sent = sum(v.nbytes for n in nodes for v in n.attrs.values() if isinstance(v, np.ndarray))
    return len(nodes) >= MANY_NODES and sent <= MOST_SENT and _usable()


def _usable() -> bool:
    return usable_cores() >= FEW_CORES and Path(sys.executable or "").name.startswith("python")


class _Helper:
    """A process that plans one range after the other."""

    def __init__(self, job: bytes, work: _Helpers):
        self.job, self.work = job, work
        self.stopped = False
        self.connection = _server.fork()
        self.thread = threading.Thread(target=self._talk, daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # no more threads for this user, or Python is ending
            self.connection.close()
            raise OSError(str(error)) from None

    def _talk(self) -> None:
        r = None
        try:
            with self.connection.makefile("rwb") as stream:
                stream.write(self.job)
                stream.flush()
                pickle.load(stream)  # it has read the graph
                while r := self.work.next():
                    pickle.dump(r, stream)
                    stream.flush()
                    memory, times, laid = pickle.load(stream)
                    self.work.arrived(r, RangePlan(memory, times, _always(laid)))
        except Exception as error:  # it died
            if not self.stopped:
                log.warning("A process that plans kernels ended without an answer (%s); this one plans them.",
                            type(error).__name__)
        if r is not None:
            self.work.ended[r].set()

    def stop(self) -> None:
        """Ends the process, whatever it is at."""
        self.stopped = True
        with contextlib.suppress(OSError):  # it has died
            self.connection.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.connection.close()


def main(connection: socket.socket) -> None:
    """What such a process does: it is sent a graph, then ranges, whose plans it answers with."""
    with connection.makefile("rwb") as stream:
        graph, target, ranges = pickle.load(stream)
        pickle.dump("ready", stream)
        stream.flush()
        while True:
            try:
                r = pickle.load(stream)
            except EOFError:
                return
            plan = plan_range(graph, target, r, ranges)
            program, kernels = plan.lay_out()
            sent = [replace(k, args=()) if isinstance(k, Kernel) else k for k in kernels]
            pickle.dump((plan.memory, plan.times, (program, sent)), stream)
            stream.flush()
