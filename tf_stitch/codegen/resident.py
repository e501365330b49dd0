"""Operands that stay on the chip from phase to phase of a grid kernel: the weights of a recurrent cell.

A thread that runs the same body on the same block in the next phase reads the same elements of what does not change,
in the same order.  So what it reads is kept as it comes, 16 bytes of each thread side by side in shared memory
(TS_READ_KEPT), and comes from there when the table says so (codegen/include/ts_grid.h).
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass

SLOT = 16 * 256  # bytes: one access of every thread of a block
ROOM = 48 * SLOT  # kept by one body, at most
_READ = re.compile(r"^(\s*)ts_read<(\d+), (\d+)>\((.*), x(\d+) \+ \((.*)\)\);$")
_LOOP = re.compile(r"^TS_EACH\(\w+, (\d+)\) \{$")
_TILES = re.compile(r"^TS_TILES\(\w+, (\d+), (\d+), \d+\) \{$")
_ONCE = re.compile(r"^(TS_(KERNEL\w*|BLOCKS|SHARES|PART)\(.*\) )?\{$|^if \(.*\) \{$")
_PLACE = re.compile(r"\bn\d+\b")  # a run-time dim, which other phases may have with another value


@dataclass(frozen=True)
class Kept:
    """A kernel that can keep operands.

    Attributes:
      name, text: the kernel, otherwise the same.
      room: bytes that a block keeps.
      inputs: positions of the buffers that they are read from.
    """

    name: str
    text: str
    room: int
    inputs: tuple[int, ...]


def keep_operands(name: str, text: str, constant: Collection[int]) -> Kept | None:
    """The kernel ``name`` so that it can keep what it reads of the inputs at ``constant`` positions; None if nothing.

    Kept are wide reads in products whose number is known, at places that no run-time dim decides.
    """
    out: list[str] = []
    depth: list[int] = []  # how often each open block is run; 0: not known
    room = most = 0
    inputs: set[int] = set()
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("TS_PART("):
            room = 0  # a block is in one part
        m = _READ.match(line)
        times = SLOT
        for n in depth:
            times *= n
        if m and int(m[5]) in constant and not _PLACE.search(m[6]) and 0 < times <= ROOM - room:
            line = f"{m[1]}TS_READ_KEPT({m[2]}, {m[3]}, ({m[4]}), x{m[5]} + ({m[6]}))"
            room += times
            most = max(most, room)
            inputs.add(int(m[5]))
        elif bare.endswith("{"):
            depth.append(_times(bare))
        elif bare == "}":
            depth.pop()
        out.append(line)
    if not inputs:
        return None
    fresh = "\n".join(out) + "\n"
    fresh = fresh.replace(name, "?")
    new = "ts_" + hashlib.sha256(fresh.encode()).hexdigest()[:16]
    return Kept(new, fresh.replace("?", new), most, tuple(sorted(inputs)))


def _times(opening: str) -> int:
    """How often the block that a line opens is run."""
    if m := _LOOP.match(opening):
        return int(m[1])
    if m := _TILES.match(opening):
        return -(-int(m[1]) * int(m[2]) // 256)
    return 1 if _ONCE.match(opening) else 0
