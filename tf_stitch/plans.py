"""Programs kept in memory and on disk, so that nothing is planned twice: neither the steps of a loop that was written
out, the layers of a tower, nor by a second process what a first one planned.

A key holds the graph without the names of what it came from, the target and the sources of this package: another
version, or an edited one, plans anew.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from .backend.cache import Cache, cache_folder, key_of
from .errors import ProgramError, StitchError
from .grids import KEEP
from .ir.digest import digest
from .ir.graph import Graph, Guard, Node
from .program import serialize
from .program.program import Program
from .schedule.target import Target

PROGRAMS = Cache("plans", ".program")
MOST_RECENT = 128  # programs that stay in memory,
SHORT = 1 << 18  # if their text is no longer than this

_recent: OrderedDict[tuple[Path, str], Program] = OrderedDict()
_lock = threading.Lock()


def remembered(graph: Graph, target: Target, make: Callable[[Graph], Program]) -> Program:
    """The program that ``make`` builds of a graph, from memory or the disk where it was built before."""
    bare, names = without_names(graph)
    key = key_of([sources(), repr(target), digest(bare), os.environ.get(KEEP, "")])
    program = _known(key)
    if program is None:
        try:
            program = _made(key, lambda: make(bare))
        except StitchError:
            return make(graph)  # fails again, and names the node
    return _with_names(program, names, graph.name)


def without_names(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """The same graph with numbers for the names that messages need, and the name of every number."""
    numbers: dict[str, str] = {}

    def number(name: str) -> str:
        return name and numbers.setdefault(name, f"#{len(numbers)}")

    bare = graph.rebuild(lambda n, inputs: Node(n.op, inputs, n.attrs, n.shape, n.dtype, number(n.origin)))
    bare.guards = [replace(g, reason=number(g.reason)) for g in graph.guards]
    bare.name = ""
    return bare, {n: name for name, n in numbers.items()}


def _with_names(program: Program, names: Mapping[str, str], name: str) -> Program:
    """A program of a graph that had no names; what only planning names stays as it is."""
    def named(guard: Guard) -> Guard:
        return replace(guard, reason=names.get(guard.reason, guard.reason))

    return replace(program, steps=[replace(s, origin=names.get(s.origin, s.origin)) for s in program.steps],
                   guards=[named(g) for g in program.guards], name=name)


def _known(key: str) -> Program | None:
    here = (cache_folder(), key)
    with _lock:
        if here in _recent:
            _recent.move_to_end(here)
            return _recent[here]
    data = PROGRAMS.get(key)
    with contextlib.suppress(ProgramError):  # what cannot be read is made anew
        return None if data is None else _kept(here, serialize.loads(data))
    return None


def _made(key: str, make: Callable[[], Program]) -> Program:
    program = make()
    data = serialize.dumps(program)
    if serialize.loads(data) == program:
        PROGRAMS.put(key, data)
    return _kept((cache_folder(), key), program)


def _kept(here: tuple[Path, str], program: Program) -> Program:
    """The program, kept in memory for who asks next if it is short."""
    if len(program.text) <= SHORT:
        with _lock:
            _recent[here] = program
            while len(_recent) > MOST_RECENT:
                _recent.popitem(last=False)
    return program


@functools.cache
def sources() -> str:
    """A hash of this package's Python."""
    root = Path(__file__).parent
    h = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        h.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return h.hexdigest()
