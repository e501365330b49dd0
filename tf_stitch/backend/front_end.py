"""Kernel text to PTX in pieces, side by side, and some of them before it is known what else the text will hold.

nvcc takes a while to start, so its pieces are large ones; NVRTC does not, and compiles each kernel by itself.
"""
from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from ..codegen.unit import SEPARATOR, translation_unit
from . import pieces
from .host import usable_cores

log = logging.getLogger("tf_stitch")

MOST_BEGUN = 1000  # kernels that are compiled before it is known what module they will be part of


class Piece(NamedTuple):
    """What became of some of a text's kernels: their PTX, and their machine code where the compiler makes both."""

    ptx: bytes
    code: bytes = b""


@dataclass(frozen=True)
class FrontEnd:
    """One way to PTX.

    Attributes:
      name: the compilers, their versions and flags: all that pieces depend on besides the text.
      piece: characters of kernel text that are worth a run of the compiler (0: each kernel is).
      run: what becomes of a translation unit.  Raises CompileError.
    """

    name: str
    piece: int
    run: Callable[[str], Piece]

    def compile(self, text: str) -> list[Piece]:
        """The pieces of a text, those that were begun as they are; in the kernels' order.  Raises CompileError."""
        directives, found = pieces.parts(text)[0], pieces.groups(text)
        begun = self._begun(directives, found)
        late = self._submit(directives, [g for g in found if g not in begun], usable_cores())
        _forget(begun.values())
        runs = dict.fromkeys(begun.get(g) or late[g] for g in found)
        return [run.made.result() for run in runs]

    def join(self, text: str, made: Sequence[Piece]) -> bytes:
        """PTX of a text, of its pieces'."""
        if len(made) == 1:
            return made[0].ptx
        try:
            return pieces.join_ptx([piece.ptx.decode() for piece in made]).encode()
        except pieces.JoinError as error:
            log.warning("%s  The kernels are compiled once more, in one piece.", error)
            return self.run(translation_unit(text, "cuda")).ptx

    def begin(self, text: str) -> None:
        """Begins to compile kernels that a text will have; errors come up there."""
        directives = pieces.parts(text)[0]
        with _begun_lock:
            late = [g for g in pieces.groups(text) if (self.name, directives, g) not in _begun]
            runs = self._submit(directives, late, -(-usable_cores() // 2))  # others are compiled beside
            _begun.update({(self.name, directives, g): run for g, run in runs.items()})
            while len(_begun) > MOST_BEGUN:  # of plans that came to nothing
                _forget([next(iter(_begun.values()))])

    def _begun(self, directives: str, found: Sequence[str]) -> dict[str, _Run]:
        """The groups of a text that are compiled already or being compiled.

        What else a run compiles comes with it: where that has kernels of other groups, these would be there twice.
        """
        here = {kernel for g in found for kernel in pieces.parts(g)[1]}
        with _begun_lock:
            runs = {g: _begun[key] for g in found if (key := (self.name, directives, g)) in _begun}
        return {g: run for g, run in runs.items()
                if all(other in runs or here.isdisjoint(pieces.parts(other)[1]) for other in run.groups)}

    def _submit(self, directives: str, found: Sequence[str], most: int) -> dict[str, _Run]:
        """Begins to compile groups, at most ``most`` pieces at a time where a run of the compiler costs something."""
        if not found:
            return {}
        shared = pieces.share_out(found, most, self.piece) if self.piece else pieces.share_out(found, len(found), 1)
        out: dict[str, _Run] = {}
        for some in shared:
            source = translation_unit(directives + SEPARATOR.join(some), "cuda")
            out.update(dict.fromkeys(some, _Run(tuple(some), _threads().submit(self.run, source))))
        return out


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of the compiler: the groups of kernels that it compiles, and what is to come of it."""

    groups: tuple[str, ...]
    made: Future[Piece]


_begun: dict[tuple[str, str, str], _Run] = {}  # by front end, directives and group of kernels
_begun_lock = threading.RLock()


def _forget(runs: Collection[_Run]) -> None:
    """Takes runs out of what was begun, all groups of a run at once: none may come into a module twice."""
    with _begun_lock:
        for key in [k for k, run in _begun.items() if run in runs]:
            del _begun[key]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads that compile or wait for compilers: as many as there are cores."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="tf_stitch_cuda")


def _forked() -> None:
    """A forked process has none of the threads: what they were to compile never comes."""
    global _begun_lock
    _begun_lock = threading.RLock()
    _begun.clear()
    _threads.cache_clear()


os.register_at_fork(after_in_child=_forked)
