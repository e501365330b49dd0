"""The scheduler in the op library (custom_ops/scheduler_c_api.h): one per process, shared by its sessions."""
from __future__ import annotations

import ctypes
import functools
import itertools
import json
import threading
from collections.abc import Mapping
from typing import Any

from .. import runtime
from ..errors import OptionError, StitchError

_lock = threading.RLock()  # garbage may be collected under it, and sessions in that end
_users = 0
_names: set[str] = set()
_options: dict[str, Any] = {}


class SchedulerError(StitchError):
    """The op library's scheduler refused what it was asked for."""


def acquire(options: Mapping[str, Any]) -> None:
    """Turns coalescing on for the process, or joins those that have.

    Raises OptionError when they did so with other options, SchedulerError when it refuses them.
    """
    global _users, _options
    encoded = _json(options)
    with _lock:
        if _users and dict(options) != _options:
            raise OptionError(f"The scheduler runs with the options {_options} already; all sessions of a process "
                              "share one.")
        if not _users:
            _check(_library().tfs_scheduler_enable(encoded))
            _options = dict(options)
        _users += 1


def check(options: Mapping[str, Any]) -> None:
    """Checks options as :func:`acquire` does, and turns nothing on.  Raises OptionError, SchedulerError."""
    _check(_library().tfs_scheduler_check(_json(options)))


def release() -> None:
    """Undoes :func:`acquire`; the last one turns coalescing off."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            _library().tfs_scheduler_disable()


def add_tenant(name: str) -> str:
    """Makes a tenant that nothing is promised to yet; the name that the scheduler knows it by.

    That is another one where another session of the process has a tenant of this name.
    """
    with _lock:
        key = next(k for k in itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2))) if k not in _names)
        set_tenant(key, {})
        _names.add(key)
    return key


def set_tenant(key: str, options: Mapping[str, Any]) -> None:
    """Tells what a tenant's requests are due and may use: slo_ms, priority, weight, max_in_flight, max_queue."""
    _check(_library().tfs_scheduler_set_tenant(key.encode(), _json(options)))


def remove_tenant(key: str) -> None:
    """Forgets a tenant; its name is free again."""
    with _lock:
        _check(_library().tfs_scheduler_remove_tenant(key.encode()))
        _names.discard(key)


def stats() -> dict[str, Any]:
    """What the scheduler counted."""
    lib = _library()
    size = lib.tfs_scheduler_stats_json(None, 0)
    while True:
        buffer = ctypes.create_string_buffer(size + 256)
        need = lib.tfs_scheduler_stats_json(buffer, len(buffer))
        if need < len(buffer):
            return json.loads(buffer.value or b"{}")
        size = need


@functools.cache
def _library() -> ctypes.CDLL:
    runtime.load()
    lib = runtime.library()
    lib.tfs_scheduler_enable.argtypes = [ctypes.c_char_p]
    lib.tfs_scheduler_check.argtypes = [ctypes.c_char_p]
    lib.tfs_scheduler_disable.restype = None
    lib.tfs_scheduler_set_tenant.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    lib.tfs_scheduler_remove_tenant.argtypes = [ctypes.c_char_p]
    lib.tfs_scheduler_stats_json.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    lib.tfs_scheduler_stats_json.restype = ctypes.c_int64
    lib.tfs_scheduler_last_error.restype = ctypes.c_char_p
    return lib


def _check(status: int) -> None:
    if status != 0:
        raise SchedulerError((_library().tfs_scheduler_last_error() or b"unknown").decode(errors="replace"))


def _json(options: Mapping[str, Any]) -> bytes:
    if not isinstance(options, Mapping):
        raise OptionError(f"The scheduler's options are a {type(options).__name__}; they must be a dict.")
    try:
        return json.dumps({k: v for k, v in options.items() if v is not None}).encode()
    except TypeError as error:
        raise OptionError(f"The scheduler's options are numbers and text by name ({error}).") from None
