"""Programs kept on disk, so that a second process does not plan again what a first one planned.

A key holds the graph, the target and the sources of this package: another version, or an edited one, plans anew.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from .backend.cache import Cache, key_of
from .errors import ProgramError
from .grids import KEEP
from .ir.digest import digest
from .ir.graph import Graph
from .program import serialize
from .program.program import Program
from .schedule.target import Target

PROGRAMS = Cache("plans", ".program")


def remembered(graph: Graph, target: Target, make: Callable[[], Program]) -> Program:
    """The program that ``make`` builds of a graph, from the disk where it was built before."""
    key = key_of([sources(), repr(target), digest(graph), os.environ.get(KEEP, "")])
    data = PROGRAMS.get(key)
    if data is not None:
        with contextlib.suppress(ProgramError):  # what cannot be read is made anew
            return serialize.loads(data)
    program = make()
    data = serialize.dumps(program)
    if serialize.loads(data) == program:
        PROGRAMS.put(key, data)
    return program


@functools.cache
def sources() -> str:
    """A hash of this package's Python."""
    root = Path(__file__).parent
    h = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        h.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return h.hexdigest()
