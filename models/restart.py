"""How soon a new process answers when its kernels are in the cache on disk.

    python -m models.restart [--workloads rnn,bert] [--folder CACHE] [--jobs 1]

For each workload a process rewrites it (which fills the cache where it is empty), then a second process is timed from
the call that rewrites to the first answer; TensorFlow's start (import, devices, its CUDA libraries) and tracing come
before the clock.  Several processes may start at a time (``--jobs``): the clock runs in one of them at a time, once all
caches are full.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from .turns import Turns

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1.0  # a second process should answer within this time


def second_process(name: str, cache: Path, dynamic: bool = False, fill: bool = True) -> dict[str, Any]:
    """Seconds of the second process: ``first_answer_s``, of which ``rewrite_s`` to rewrite; ``trace_s`` before it.

    ``cache`` keeps compiled kernels; with ``fill`` a first process makes sure that they are there, and its figures
    are ``cold``.
    """
    ((_, found),) = second_processes({name: (cache, fill)}, dynamic)
    return found


def second_processes(caches: Mapping[str, tuple[Path, bool]], dynamic: bool = False,
                     jobs: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    """As second_process for each workload's cache; ``jobs`` processes at a time start, one at a time is timed."""
    with tempfile.TemporaryDirectory() as turns, ThreadPoolExecutor(jobs) as pool:
        cold = {n: pool.submit(_process, n, cache, dynamic) for n, (cache, fill) in caches.items() if fill}
        wait(cold.values())
        warm = {n: pool.submit(_process, n, cache, dynamic, turns) for n, (cache, _) in caches.items()}
        for name, job in warm.items():
            yield name, job.result() | ({"cold": cold[name].result()} if name in cold else {})


def _process(name: str, cache: Path, dynamic: bool, turns: str = "") -> dict[str, Any]:
    command = [sys.executable, "-m", "models.restart", "--here", f"--workloads={name}",
               *(["--dynamic"] if dynamic else []), *([f"--turns={turns}"] if turns else [])]
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "TF_STITCH_CACHE": str(cache)}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["the process died"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def _measure_here(name: str, dynamic: bool, turns: Turns) -> dict[str, Any]:
    start = time.perf_counter()
    import tensorflow as tf

    import tf_stitch
    from tf_stitch import bench, hook, runtime

    from .workloads import REGISTRY

    workload = REGISTRY[name]
    runtime.load()
    _start_libraries(tf)
    instance = workload.instance()
    args = instance.inputs()
    signature = instance.signature(None if dynamic else workload.batch)
    made = tf_stitch.function(instance.function, input_signature=signature)
    ready = time.perf_counter()
    with turns.quiet():
        start_tracing = time.perf_counter()
        made.get_concrete_function()
        traced = time.perf_counter()
        for x in tf.nest.flatten(made(*args)):
            x.numpy()
        answered = time.perf_counter()
    rewritten = sum(report.seconds for _, report in hook.reports())
    bench.finish(made(*args))
    return {"start_s": ready - start, "trace_s": traced - start_tracing, "first_answer_s": answered - traced,
            "rewrite_s": rewritten, "fallbacks": runtime.counters().fallbacks}


def _start_libraries(tf: Any) -> None:
    """What any model on a GPU makes TensorFlow load: its BLAS and its convolutions."""
    x = tf.ones([1, 8, 8, 4])
    tf.linalg.matmul(x, x, transpose_b=True).numpy()
    tf.nn.conv2d(x, tf.ones([3, 3, 4, 4]), 1, "SAME").numpy()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per workload; exit status 1 when one took longer than a second."""
    parser = argparse.ArgumentParser("python -m models.restart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="", help="comma-separated (default: all)")
    parser.add_argument("--folder", type=Path, help="the cache (default: an empty one)")
    parser.add_argument("--jobs", type=int, default=1, help="workloads at a time (default: %(default)s)")
    parser.add_argument("--dynamic", action="store_true", help="with an unknown batch size")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        print(json.dumps(_measure_here(args.workloads, args.dynamic, Turns(args.turns))))
        return 0
    from .workloads import select

    slow = False
    with tempfile.TemporaryDirectory() as scratch:
        caches = {w.name: (args.folder or Path(scratch), True) for w in select(args.workloads)}
        for name, found in second_processes(caches, args.dynamic, args.jobs):
            slow |= found.get("first_answer_s", LIMIT_S) >= LIMIT_S
            print(name, json.dumps(found), flush=True)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
