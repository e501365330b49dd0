"""Processes that are ready at once: forks of one that has imported what they need.

Starting Python and importing NumPy takes longer than most plans, and this process cannot be forked: it has threads.
"""
from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

KEPT_S = 60.0  # the process that is forked ends when it was not asked for so long


class Server:
    """The process that is forked; it ends with this one.

    Where this process is forked by others, its copy starts one of its own.

    Args:
      module: the module that it has imported; a fork calls its ``main`` with its end of a connection.
    """

    def __init__(self, module: str):
        self.module = module
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0.0  # when it was asked for last
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forked)

    def start(self) -> None:
        """Starts the process unless it runs.  Raises OSError when there is none to be had."""
        with self._lock:
            self._started()

    def fork(self) -> socket.socket:
        """A connection to a new process, which ends when it is closed.  Raises OSError where there is no process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._started(), [b"f"], [theirs.fileno()])
                except OSError:  # it has died
                    self._close()
                    socket.send_fds(self._started(), [b"f"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours

    def stop(self) -> None:
        """Ends the process; forks that run go on."""
        with self._lock:
            self._close()

    def _started(self) -> socket.socket:
        self._asked = time.monotonic()
        if self._control is None:
            ours, theirs = socket.socketpair()
            with contextlib.ExitStack() as undo, theirs:
                undo.callback(ours.close)
                # Modules are found where this process found them: a file in the working directory may have their names.
                command = (f"import sys; sys.path[:] = {_path()!r}; from {__name__} import serve; "
                           f"serve({theirs.fileno()}, {self.module!r})")
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()])
                undo.pop_all()
            self._control = ours
            self._look_later(KEPT_S)
        return self._control

    def _look_later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._stop_unless_asked)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # no more threads for this user, or Python is ending
            self._close()
            raise OSError(str(error)) from None

    def _stop_unless_asked(self) -> None:
        with self._lock:
            left = self._asked + KEPT_S - time.monotonic()
            if left <= 0:
                self._close()
            elif self._control is not None:
                self._look_later(left)

    def _forked(self) -> None:
        """In a copy of this process: the other one is asked by that only, and a thread may have held the lock."""
        self._lock = threading.Lock()
        if self._control is not None:
            self._control.close()
        self._control = self._process = None

    def _close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def _path() -> list[str]:
    return [str(Path(__file__).parents[1]), *map(str, sys.path)]


def serve(fd: int, module: str) -> None:
    """What the process does: a fork for every connection that it is sent."""
    main = importlib.import_module(module).main
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: it is the user's process that decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()
    gc.freeze()
    with socket.socket(fileno=fd) as control:
        while True:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not fds:
                return
            if not os.fork():
                break
            os.close(fds[0])
    code = 1
    try:
        threading.Thread(target=_end_with, args=(fds[0],), daemon=True).start()
        with socket.socket(fileno=fds[0]) as connection, contextlib.suppress(BrokenPipeError):
            main(connection)
        code = 0
    finally:
        os._exit(code)


def _end_with(fd: int) -> None:
    """Ends this process when the other end of a connection is closed, whatever it is at."""
    hung_up = select.poll()
    hung_up.register(fd, select.POLLRDHUP)
    hung_up.poll()
    os._exit(0)
