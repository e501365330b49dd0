"""The text of a grid kernel: the bodies of several kernels behind one entry, which walks a table of problems.

That of a pack, which has one phase, is launched with all its blocks; each finds its problem in the table.
"""
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
    return _emit("grid", bodies, bases, words, blocks)


def emit_pack(bodies: Sequence[str], bases: int, words: int, blocks: int) -> GridKernel:
    """As :func:`emit_grid`, for problems of a single phase."""
    return _emit("pack", bodies, bases, words, blocks)


def _emit(form: str, bodies: Sequence[str], bases: int, words: int, blocks: int) -> GridKernel:
    cases = "\n".join(f"  TS_CASE({k}, {name})" for k, name in enumerate(bodies))
    text = f"TS_{form.upper()}(?, {bases}, {words}, {blocks}) {{\n{cases}\n}}\n"
    name = f"ts_{form}_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    return GridKernel(name, text.replace("?", name), tuple(bodies))
