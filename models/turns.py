"""Processes that take turns on one machine: what is timed has it to itself, and only what is not timed goes beside it.

A process prepares (:meth:`Turns.preparing`: weights, inputs, references), then has the machine for what it measures
(:meth:`Turns.measuring`): no other process compiles or uses the devices meanwhile, though one may prepare.  While calls
are timed (:meth:`Turns.quiet`, within ``measuring``) none prepares either.
"""
from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Locks in ``folder``, for all the processes that name it; without one a process has the machine to itself."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """For work that is not timed.  Not to be entered by who waits for ``measuring``."""
        return self._alone("prepare")

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        """For compiling, whose time is told, and all use of the devices."""
        return self._alone("measure")

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """For timed calls, within :meth:`measuring`."""
        return self._alone("prepare")

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self.folder:
            yield
            return
        with open(self.folder / what, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, also by the death of the process
            yield
