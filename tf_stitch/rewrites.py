"""Rewritten graphs kept on disk, so that a second process does not find, import and plan what a first one did.

A key holds the graph, what it is rewritten for, TensorFlow's version, the compilers and the sources of this package.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from . import plans
from .backend import cuda, host
from .backend.cache import FOLDER, LIMIT, Cache, key_of, stamp
from .graph import devices
from .options import Options
from .report import Report

GRAPHS = Cache("graphs", ".graph")
LARGEST = 64 << 20  # bytes of a graph that is kept; weights as constants would fill the disk


def remembered(graph: Any, options: Options, what: Sequence[str], make: Callable[[], tuple[Any, Report]]
               ) -> tuple[Any, Report]:
    """What ``make`` returns of a GraphDef, from the disk where it was made before.

    ``what``: whatever else decides on the result.  Kept are graphs with something stitched in them, but not what might
    come out otherwise another time, because a compiler failed or something unforeseen happened.
    """
    data = graph.SerializeToString(deterministic=True)
    key = key_of([*_here(), repr(options), *what, hashlib.sha256(data).hexdigest()])
    kept = GRAPHS.get(key) if len(data) <= LARGEST else None
    if kept is not None:
        with contextlib.suppress(ValueError):  # what cannot be read is made anew
            return _loads(kept, type(graph))
    result, report = make()
    if report.clusters and not report.failures and not report.untouched():
        made = _dumps(result, report)
        if len(made) <= LARGEST:
            GRAPHS.put(key, made)
    return result, report


def _here() -> list[str]:
    """What the machine, the environment and the versions decide; compilers are only looked for, which is quick."""
    import tensorflow as tf

    built_by = [stamp(cuda.compilers()), host.compiler_stamp()]
    switches = sorted(f"{k}={v}" for k, v in os.environ.items()
                      if k.startswith("TF_STITCH_") and k not in (FOLDER, LIMIT))
    return [plans.sources(), tf.__version__, str(devices.gpu_target()), repr(host.native_levels()), *built_by,
            *switches]


def _dumps(graph: Any, report: Report) -> bytes:
    head = json.dumps(report.to_dict()).encode()
    return len(head).to_bytes(8, "little") + head + graph.SerializeToString(deterministic=True)


def _loads(data: bytes, kind: Any) -> tuple[Any, Report]:
    """Raises ValueError when the data are no graph and report."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        return kind.FromString(data[end:]), Report.from_dict(json.loads(data[8:end]))
    except Exception as error:
        raise ValueError(f"no rewritten graph: {error}") from None
