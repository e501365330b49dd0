"""Traces of requests: who, when, and with which shapes; recorded from a session, replayed by serve-bench.

A trace file is JSON lines.  The first is ``{"tf_stitch_trace": 1}``, the format's version.  Every other is a request:

    {"t": 0.0132, "tenant": "ranker", "signature": "serving_default", "shapes": {"x": [1, 64]}}

``t`` is seconds since the recording began, ascending up to reordering by a few microseconds.  Values are not recorded.
"""
from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError

log = logging.getLogger("tf_stitch")

VERSION = 1
CHUNK = 4096  # requests kept in memory between writes


@dataclass(frozen=True, slots=True)
class Event:
    """A request of a trace."""

    t: float
    tenant: str
    signature: str
    shapes: dict[str, tuple[int, ...]]


class Recorder:
    """Writes the requests of a session to a trace file until it is closed.

    Where the file cannot be written any more a warning says so and the recording ends; requests go on.
    """

    def __init__(self, path: str | os.PathLike[str], on_close: Callable[[], None] = lambda: None) -> None:
        self.path = Path(path)
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (closed by close())
        except OSError as error:
            raise OptionError(f"The trace '{self.path}' cannot be written: {error.strerror}.") from None
        self._file.write(json.dumps({"tf_stitch_trace": VERSION}) + "\n")
        self._begin = time.perf_counter()
        self._lock = threading.Lock()
        self._pending: list[Any] = []
        self._on_close = on_close

    def note(self, tenant: str, request: Any) -> None:
        """Records a request that was just taken."""
        with self._lock:
            if self._file.closed:
                return
            self._pending.append((request.submitted, tenant, request.endpoint, [a.shape for a in request.arrays]))
            if len(self._pending) >= CHUNK:
                self._write(last=False)

    def close(self) -> None:
        """Writes what is left and ends the recording."""
        self._on_close()
        with self._lock:
            if not self._file.closed:
                self._write(last=True)

    def _write(self, last: bool) -> None:
        try:
            self._flush()
            if last:
                self._file.close()
        except OSError as error:
            log.warning("The trace '%s' cannot be written (%s); the recording ends.", self.path, error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()  # is closed then, though what is left of it cannot be written either
            self._on_close()

    def _flush(self) -> None:
        for submitted, tenant, endpoint, shapes in self._pending:
            shapes = {i.name: list(shape) for i, shape in zip(endpoint.inputs, shapes)}
            line = {"t": round(max(0.0, submitted - self._begin), 6), "tenant": tenant, "signature": endpoint.name,
                    "shapes": shapes}
            self._file.write(json.dumps(line) + "\n")
        self._pending.clear()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: str | os.PathLike[str]) -> list[Event]:
    """The requests of a trace file, by time.  Raises OptionError when it cannot be read or is no trace."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.strip()]
    except OSError as error:
        raise OptionError(f"The trace '{os.fspath(path)}' cannot be read: {error.strerror}.") from None
    except ValueError:
        raise OptionError(f"'{os.fspath(path)}' is no trace: a line of it is no JSON.") from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get("tf_stitch_trace") != VERSION:
        raise OptionError(f"'{os.fspath(path)}' is no trace of version {VERSION}.")
    try:
        events = [Event(float(e["t"]), str(e["tenant"]), str(e["signature"]),
                        {str(k): tuple(int(d) for d in v) for k, v in e["shapes"].items()}) for e in lines[1:]]
        if not all(math.isfinite(e.t) for e in events):
            raise ValueError("a time that is none")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise OptionError(f"'{os.fspath(path)}' is no trace: a request lacks t, tenant, signature or shapes.") from None
    return sorted(events, key=lambda e: e.t)


def write_trace(path: str | os.PathLike[str], events: Sequence[Event]) -> None:
    """Writes a trace file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps({"tf_stitch_trace": VERSION}) + "\n")
        for e in events:
            file.write(json.dumps({"t": e.t, "tenant": e.tenant, "signature": e.signature,
                                   "shapes": {k: list(v) for k, v in e.shapes.items()}}) + "\n")
