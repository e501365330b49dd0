"""What XLA takes to compile workloads for many batch sizes, each of which one rewrite serves (:mod:`models.dynamic`).

    python -m models.xla_compiles [--workloads lr,rnn] [--sizes 100] [--processes 0] [--seconds 300]

Processes compile side by side, a size each; a workload after the other, until its share of the time is over.  How long
a compile takes is measured in its process, so it is longer than it would be alone on the machine: a result tells how
many processes and cores there were.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

from tf_stitch import bench

from . import bench as models_bench
from .dynamic import spread_first
from .workloads import REGISTRY, Workload, select

ROOT = Path(__file__).resolve().parents[1]


def experiments(workloads: Sequence[Workload], sizes: Sequence[int], end: float, processes: int = 0
                ) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """For each workload its name and what compiles it for sizes of ``sizes``, in an order whose beginnings are spread.

    Args:
      workloads: one after the other; what one leaves of its part of the time the next ones have.
      sizes: batch sizes.
      end: when no more compiles are begun, but for the first of a workload.
      processes: that compile side by side (0: three for four cores).

    A result holds ``workload``; ``of``: how many sizes there are; ``sizes`` and ``compile_s``: those compiled, and the
    seconds of each one's first call beyond a usual one; ``wall_s``: how long all took together; ``processes`` and
    ``cores``.  Raises RuntimeError when a process dies or cannot compile the workload.
    """
    count = processes or max(1, len(os.sched_getaffinity(0)) * 3 // 4)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(_Worker())) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(_Worker.start, workers))
        for k, w in enumerate(workloads):
            yield w.name, functools.partial(_compiled, w.name, sizes, workers, end, len(workloads) - k)


def _compiled(name: str, sizes: Sequence[int], workers: Sequence[_Worker], end: float, left: int) -> dict[str, Any]:
    """Compiles in its share of the time, of which ``left`` workloads have equal ones."""
    start = time.time()
    until = start + (end - start) / left
    waiting, lock = spread_first(sizes), threading.Lock()
    seconds: dict[int, float] = {}

    def work(worker: _Worker) -> None:
        while True:
            with lock:
                if not waiting or (len(waiting) < len(sizes) and time.time() > until):
                    return
                size = waiting.pop(0)
            seconds[size] = worker.compile_s(name, size)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(work, workers))
    done = sorted(seconds)
    return {"workload": name, "of": len(sizes), "sizes": done, "compile_s": [round(seconds[s], 2) for s in done],
            "wall_s": round(time.time() - start, 1), "processes": len(workers),
            "cores": len(os.sched_getaffinity(0))}


class _Worker:
    """A process that compiles what it is told to."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process where it does not run, and waits until it has compiled something small.

        Raises RuntimeError when it dies.
        """
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", "models.xla_compiles", "--here"]
            self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE)
            self._answer()

    def compile_s(self, name: str, size: int) -> float:
        """Seconds of a compile.  Raises RuntimeError when the process dies or cannot do it."""
        self.start()
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(f"{name} {size}\n")
        self.process.stdin.flush()
        answer = self._answer()
        if isinstance(answer, str):
            raise RuntimeError(f"XLA cannot compile {name} for batch {size}: {answer}")
        return answer

    def _answer(self) -> float | str:
        assert self.process is not None and self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"a process that compiles with XLA died with status {self.process.wait()}")
        return json.loads(text)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def _here() -> None:
    """Compiles what comes, a workload's name and a batch size a line; answers with the seconds, or with why not."""
    models_bench.start("xla")
    print(0.0, flush=True)
    for text in sys.stdin:
        name, size = text.split()
        try:
            answer: float | str = bench.first_call_s(models_bench.runner(REGISTRY[name], "xla", int(size), False))
        except Exception as error:  # what one size cannot do others may
            answer = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps(answer), flush=True)


def line(found: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    total, mean, count = sum(found["compile_s"]), statistics.mean(found["compile_s"]), len(found["sizes"])
    if count == found["of"]:
        took = f"XLA compiles the {count} sizes in {total:.0f} s in all"
    else:
        took = f"XLA compiles {count} of {found['of']} sizes in {total:.0f} s in all: {mean * found['of']:.0f} s for " \
               "every size, were they like these"
    return (f"{took} ({mean:.1f} s each, by {found['processes']} processes side by side on {found['cores']} cores, in "
            f"{found['wall_s']:.0f} s)")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line and a JSON document per workload."""
    parser = argparse.ArgumentParser("python -m models.xla_compiles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="", help="comma-separated (default: all)")
    parser.add_argument("--sizes", type=int, default=100, help="batch sizes from 1 (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=0, help="side by side (default: three for four cores)")
    parser.add_argument("--seconds", type=float, default=300.0, help="in all (default: %(default)s)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        _here()
        return 0
    for _, compiled in experiments(select(args.workloads), range(1, args.sizes + 1), time.time() + args.seconds,
                                   args.processes):
        found = compiled()
        print(f"{found['workload']}: {line(found)}", json.dumps(found), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
