"""Processes that share a machine: nothing else runs while calls are timed, and what compiles has cores of its own.

The cores are divided among lanes.  A process belongs to a lane: it prepares (weights, inputs, references) beside what
others do, then has the lane for itself (:meth:`Turns.lane`) and compiles there.  While it times calls
(:meth:`Turns.quiet`) no process of any lane prepares or compiles (:meth:`Turns.busy`).
"""
from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Locks in ``folder``, for all the processes that name it; without one a process has the machine to itself."""

    def __init__(self, folder: Path | None = None, lane: int = 0):
        self.folder, self.number = folder, lane
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def lane(self) -> contextlib.AbstractContextManager[None]:
        """For compiling, whose time is told, and all use of the devices that follows."""
        return self._held(f"lane{self.number}", fcntl.LOCK_EX)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """For all work that is not timed call by call, in short pieces: who waits for quiet goes first.

        Within it a process waits for no other turn.
        """
        with contextlib.ExitStack() as stack:
            with self._held("door", fcntl.LOCK_EX):  # shut while somebody waits for quiet or has it
                stack.enter_context(self._held("machine", fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """For timed calls."""
        with self._held("door", fcntl.LOCK_EX), self._held("machine", fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _held(self, what: str, how: int) -> Iterator[None]:
        if not self.folder:
            yield
            return
        with open(self.folder / what, "w") as file:
            fcntl.flock(file, how)  # given back when the file is closed, also by the death of the process
            yield
