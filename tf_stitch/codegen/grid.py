"""The text of a grid kernel: the bodies of several kernels behind one entry, which walks a table of problems."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GridKernel:
    """A kernel that runs others in phases (include/ts_grid.h).

    Attributes:
      name: C symbol, derived from a hash of the text.
      text: the definition; the text of its bodies must come before.
      bodies: names of the kernels that it runs; a body's number is its position.
    """

    name: str
    text: str
    bodies: tuple[str, ...]


def emit_grid(bodies: Sequence[str], bases: int, words: int, blocks: int) -> GridKernel:
    """A grid kernel over ``bodies``, for problems of at most ``words`` words whose addresses have ``bases`` bases.

    ``blocks``: how many thread blocks must fit a multiprocessor at once; few leave each more registers.
    """
    cases = "\n".join(f"  TS_CASE({k}, {name})" for k, name in enumerate(bodies))
    text = f"TS_GRID(?, {bases}, {words}, {blocks}) {{\n{cases}\n}}\n"
    name = "ts_grid_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    return GridKernel(name, text.replace("?", name), tuple(bodies))
