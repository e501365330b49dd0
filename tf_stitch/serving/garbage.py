"""Python's garbage collections, kept short while a session serves.

A full collection looks at every object that Python has, half a million with TensorFlow and a few models, and no request
gets on meanwhile: 0.1 s and more, soon after a model was loaded.  So what is there then is put aside (gc.freeze).  The
graph of a model that was closed, tens of megabytes, is garbage that only a full collection finds: there is one when the
models of a session change, now and then.  What it frees, glibc keeps, in an arena for every few threads, a gigabyte
after some tens of models on a machine with many cores: it is told to give that back to the system.
"""
from __future__ import annotations

import ctypes
import functools
import gc
import math
import threading
import time
from collections.abc import Callable

INTERVAL_S = 5.0  # between full collections, at least
_lock = threading.RLock()  # a collection may come to sessions that were dropped, which end in it
_sessions = 0
_closed = False  # a model, since the last full collection
_collected = -math.inf  # when that was


def begin() -> None:
    """A session is there."""
    global _sessions
    with _lock:
        _sessions += 1


def end() -> None:
    """A session has gone; with the last one everything is as without any."""
    global _sessions, _closed
    with _lock:
        _sessions -= 1
        if not _sessions:
            _closed = False
            gc.unfreeze()


def closed() -> None:
    """A model was closed."""
    global _closed
    with _lock:
        _closed = True


def settle(*, full: bool = False) -> None:
    """Puts aside what is there now, but for what is garbage.  Called when the models of a session have changed.

    ``full``: looks at everything and gives free memory back, as is done by itself some time after a model was closed.
    """
    global _closed, _collected
    with _lock:
        full = full or (_closed and time.monotonic() - _collected >= INTERVAL_S)
        if full:
            _closed, _collected = False, time.monotonic()
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if full:
            _trim()(0)


@functools.cache
def _trim() -> Callable[[int], int]:
    """glibc's malloc_trim; other C libraries have none and need none."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is None:
        return lambda pad: 0
    found.argtypes = [ctypes.c_size_t]
    return found
