"""Kernel text to PTX in pieces, side by side, and some of them before it is known what else the text will hold.

nvcc takes a while to start, so its pieces are large ones; NVRTC does not, and compiles each kernel by itself.
"""
from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..codegen.unit import translation_unit
from . import pieces
from .host import usable_cores

log = logging.getLogger("tf_stitch")

MOST_BEGUN = 1000  # kernels that are compiled before it is known what module they will be part of


@dataclass(frozen=True)
class FrontEnd:
    """One way to PTX.

    Attributes:
      name: the compiler, its version and flags: all that PTX depends on besides the text.
      piece: characters of kernel text that are worth a run of the compiler (0: each kernel is).
      run: PTX of a translation unit.  Raises CompileError.
    """

    name: str
    piece: int
    run: Callable[[str], bytes]

    def ptx(self, text: str) -> bytes:
        """PTX of kernels; pieces that were begun are taken as they are.  Raises CompileError."""
        begun = self._begun(text)
        made = {**begun, **self._submit(self._late(text, begun, usable_cores()))}
        _forget(begun.values())
        found = [f.result() for f in dict.fromkeys(made[kernel] for kernel in pieces.parts(text)[1])]
        if len(found) == 1:
            return found[0]
        try:
            return pieces.join_ptx([ptx.decode() for ptx in found]).encode()
        except pieces.JoinError as error:
            log.warning("%s  The kernels are compiled once more, in one piece.", error)
            return self.run(translation_unit(text, "cuda"))

    def begin(self, text: str) -> None:
        """Begins to compile kernels that a text will have; errors come up there."""
        with _begun_lock:
            late = self._late(text, self._begun(text), -(-usable_cores() // 2))  # others are compiled beside
            directives = pieces.parts(text)[0]
            _begun.update({(self.name, directives, k): made for k, made in self._submit(late).items()})
            while len(_begun) > MOST_BEGUN:  # of plans that came to nothing
                _forget([next(iter(_begun.values()))])

    def _begun(self, text: str) -> dict[str, Future[bytes]]:
        """The kernels of a text that are compiled already or being compiled, each with the PTX of its piece."""
        directives, kernels = pieces.parts(text)
        with _begun_lock:
            return {k: _begun[key] for k in kernels if (key := (self.name, directives, k)) in _begun}

    def _late(self, text: str, begun: Collection[str], most: int) -> list[str]:
        """Pieces of a text without the kernels that were begun; at most ``most`` where a run costs something."""
        if all(kernel in begun for kernel in pieces.parts(text)[1]):
            return []
        rest = pieces.without(text, begun)
        return pieces.split(rest, most, self.piece) if self.piece else pieces.split(rest, len(rest), 1)

    def _submit(self, parts: Collection[str]) -> dict[str, Future[bytes]]:
        """By kernel, the PTX to come of its piece."""
        out: dict[str, Future[bytes]] = {}
        for part in parts:
            made = _threads().submit(self.run, translation_unit(part, "cuda"))
            out.update(dict.fromkeys(pieces.parts(part)[1], made))
        return out


_begun: dict[tuple[str, str, str], Future[bytes]] = {}  # by front end, directives and kernel: the PTX of its piece
_begun_lock = threading.RLock()


def _forget(made: Collection[Future[bytes]]) -> None:
    """Takes pieces out of what was begun, all kernels of a piece at once: none may come into a module twice."""
    with _begun_lock:
        for key in [k for k, f in _begun.items() if f in made]:
            del _begun[key]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads that compile or wait for compilers: as many as there are cores."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="tf_stitch_cuda")
