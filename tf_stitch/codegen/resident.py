"""Operands that stay on the chip from phase to phase of a grid kernel: the weights of a recurrent cell.

A thread that runs the same body on the same block in the next phase reads the same elements of what does not change,
in the same order.  So what it has loaded is kept as it lies in its registers, 16 bytes of each thread side by side in
shared memory, and comes from there when the table says so (codegen/include/ts_grid.h).
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass

SLOT = 16 * 256  # bytes: four floats of every thread of a block
ROOM = 48 * SLOT  # kept by one body, at most
_FLOATS = re.compile(r"^  TS_IN\(float, x(\d+), \d+\)$", re.M)
_READ = re.compile(r"^(\s*)ts_read<(\d+), (\d+)>\((w\d+) (.*), x(\d+) \+ \((.*)\)\);$")
_LOADED = re.compile(r"^(\s*)TS_LOADED\((w\d+), (\d+)\)$")
_LOOP = re.compile(r"^TS_EACH\(\w+, (\d+)\) \{$")
_TILES = re.compile(r"^TS_TILES\(\w+, (\d+), (\d+), \d+\) \{$")
_ONCE = re.compile(r"^(TS_(KERNEL\w*|BLOCKS|SHARES|PART)\(.*\) )?\{$")
_INDEX = re.compile(r"^const ts_idx (\w+) = (.*);$")
_VARIES = re.compile(r"\[|\b[nv]\d+\b|ts_load")  # run-time dims and what is read from memory: others in other phases
_NAME = re.compile(r"\b[a-z]\w*")


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

    Kept are arrays of floats that products load in wide accesses, if all of an array is read at places that no run-time
    dim decides, and how often that happens is known.
    """
    lines = text.splitlines()
    constant = set(constant) & set(map(int, _FLOATS.findall(text)))
    arrays, room = _arrays(lines, constant)
    if not arrays:
        return None
    inputs: set[int] = set()
    out: list[str] = []
    for line in lines:
        if (m := _READ.match(line)) and m[4] in arrays:
            inputs.add(int(m[6]))
            out.append(f"{m[1]}TS_READ_KEPT({m[2]}, {m[3]}, ({m[4]} {m[5]}), x{m[6]} + ({m[7]}))")
        elif (m := _LOADED.match(line)) and m[2] in arrays:
            out += [f"{m[1]}TS_RECALL({m[2]})", line, f"{m[1]}TS_KEEP({m[2]})"]
        else:
            out.append(line)
    fresh = "\n".join(out).replace(name, "?") + "\n"
    new = "ts_" + hashlib.sha256(fresh.encode()).hexdigest()[:16]
    return Kept(new, fresh.replace("?", new), room, tuple(sorted(inputs)))


def _arrays(lines: list[str], constant: Collection[int]) -> tuple[set[str], int]:
    """The arrays that are kept, and the most bytes that a block needs for them."""
    refused: set[str] = set()
    vary: set[str] = set()  # indices that may have other values in other phases

    def varies(index: str) -> bool:
        return bool(_VARIES.search(index)) or not vary.isdisjoint(_NAME.findall(index))

    for line in lines:
        if (m := _INDEX.match(line.strip())) and varies(m[2]):
            vary.add(m[1])
        elif (m := _READ.match(line)) and ((m[2], m[3]) != ("4", "1") or int(m[6]) not in constant or varies(m[7])):
            refused.add(m[4])
    kept: set[str] = set()
    depth: list[int] = []  # how often each open block is run; 0: not known
    used = most = 0
    for line in map(str.strip, lines):
        m = _LOADED.match(line)
        if line.startswith("TS_PART("):
            used = 0  # a block is in one part
        if m and m[2] not in refused and int(m[3]) % 4 == 0:
            size = SLOT * int(m[3]) // 4
            for n in depth:
                size *= n
            if 0 < size <= ROOM - used:
                used += size
                most = max(most, used)
                kept.add(m[2])
        elif line.endswith("{"):
            depth.append(_times(line))
        elif line == "}":
            depth.pop()
    return kept, most


def _times(opening: str) -> int:
    """How often the block that a line opens is run."""
    if m := _LOOP.match(opening):
        return int(m[1])
    if m := _TILES.match(opening):
        return -(-int(m[1]) * int(m[2]) // 256)
    return 1 if _ONCE.match(opening) else 0
