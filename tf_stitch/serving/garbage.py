"""Python's garbage collections, kept short while a session serves.

A full collection looks at every object that Python has, half a million with TensorFlow and a few models, and no request
gets on meanwhile: 0.1 s and more, soon after a model was loaded.  So what is there then is put aside (gc.freeze).  The
graph of a model that was closed, tens of megabytes, is garbage that only a full collection finds: there is one when the
models of a session change, now and then.
"""
from __future__ import annotations

import gc
import math
import threading
import time

INTERVAL_S = 5.0  # between full collections, at least
_lock = threading.Lock()
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


def settle() -> None:
    """Puts aside what is there now, but for what is garbage.  Called when the models of a session have changed."""
    global _closed, _collected
    with _lock:
        if _closed and time.monotonic() - _collected >= INTERVAL_S:
            _closed, _collected = False, time.monotonic()
            gc.unfreeze()
        gc.collect()
        gc.freeze()
