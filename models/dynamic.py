"""One rewrite, many batch sizes, beside a rewrite for each of some sizes.

    python -m models.dynamic [--workloads lr,rnn,dlrm] [--sizes 100] [--compared 1,3,8,19,33,100] [--seconds 150]

Each workload has a process of its own.  All of them prepare side by side - the one rewrite, those for single sizes -
until half of the time is over; then they measure one after the other, while nothing else runs.  What XLA's compiles
for the same sizes take is :mod:`models.xla_compiles`'s.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import numpy as np
import tensorflow as tf

from tf_stitch import bench, hook, runtime

from . import bench as models_bench
from .workloads import REGISTRY, Workload, select

ROOT = Path(__file__).resolve().parents[1]
WITHIN = 1.10  # how much slower than its own static rewrite a batch size may be
DOUBTFUL = 1.05  # a ratio that is measured again, longer: one of many sizes looks slow by chance
AGAIN = 4  # so many times the rounds
TRACED = 5  # calls whose time on the GPU is averaged
TELLING = "1,3,8,19,33,100"  # one row, a few, within and just beyond ranges that have plans of their own, many
SHARE_TO_PREPARE = 0.5  # of the time


def spread(sizes: Sequence[int], count: int) -> list[int]:
    """``count`` of the sizes, evenly spread, both ends among them."""
    places = np.linspace(0, len(sizes) - 1, min(count, len(sizes))).round().astype(int)
    return [sizes[i] for i in dict.fromkeys(places.tolist())]


def spread_first(sizes: Sequence[int]) -> list[int]:
    """The sizes in an order whose beginnings are spread, too."""
    return list(dict.fromkeys(size for count in range(1, len(sizes) + 1) for size in spread(sizes, count)))


def which(compared: str, sizes: Sequence[int]) -> list[int]:
    """The sizes to compare: "6" is so many, spread; "1,19,100" are these, as far as they are among ``sizes``."""
    if "," not in compared:
        return spread(sizes, int(compared))
    return [size for size in map(int, compared.split(",")) if size in sizes]


# --- a workload's process, from outside ---------------------------------------------------------------

class Comparison:
    """A process that prepares a workload's rewrites, then waits, and measures when it is told to."""

    def __init__(self, name: str, process: subprocess.Popen[str]):
        self.name, self.process = name, process
        self.waiter = threading.Thread(target=self._first_line, daemon=True)
        self.waiter.start()

    def _first_line(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def wait(self, seconds: float) -> None:
        """Returns once it has all that it will measure, or is dead; ends it when it does not get ready in time."""
        self.waiter.join(max(0.0, seconds))
        if self.waiter.is_alive():
            self.process.kill()
            self.waiter.join()

    def result(self, seconds: float = float("inf")) -> dict[str, Any]:
        """What it measures, as :func:`measured` returns it; sizes that come after ``seconds`` are left out.

        Raises RuntimeError when the process died, or was ended because it was not ready in time.
        """
        self.waiter.join()
        text = ""
        with contextlib.suppress(BrokenPipeError):
            text, _ = self.process.communicate(f"{seconds}\n")
        if self.process.returncode or not text:
            raise RuntimeError(f"the process that compares batch sizes of {self.name} ended with status "
                               f"{self.process.returncode}")
        return json.loads(text.splitlines()[-1])


@contextlib.contextmanager
def prepare(workload: Workload, sizes: Sequence[int], at: Sequence[int], *, rounds: int = 10, round_s: float = 0.005,
            xla_latencies: int = 0, seconds: float = float("inf"), cache: Path | None = None) -> Iterator[Comparison]:
    """Begins what :func:`measured` measures, in another process, which it ends at last.

    Args:
      workload: the workload.
      sizes: batch sizes, each called with one and the same function; the first call of all has the last one.
      at: of these, sizes that are compared with rewrites for just that size.
      rounds, round_s: of the comparison.
      xla_latencies: so many of the compared sizes are timed on XLA, too.
      seconds: no more rewrites are begun then: but for the first, sizes that have none by then are not compared.
      cache: folder of compiled kernels and plans (None: nothing is taken from a cache).
    """
    command = [sys.executable, "-m", "models.dynamic", "--here", f"--workloads={workload.name}",
               f"--called={sizes[0]},{sizes[-1]}", f"--rounds={rounds}", f"--round-s={round_s}",
               f"--until={time.time() + seconds}", f"--compared={','.join(map(str, at))},",
               f"--xla-at={','.join(map(str, spread(at, xla_latencies)))}", *([f"--cache={cache}"] if cache else [])]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Comparison(workload.name, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def experiments(workloads: Sequence[Workload], sizes: Sequence[int], at: Sequence[int], end: float, *,
                cache: Path | None = None, **how: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """For each workload its name and what measures it (:meth:`Comparison.result`), after all were prepared.

    Args:
      workloads: prepared side by side until half of the time is over, then measured one after the other.
      sizes, at, how: see :func:`prepare`.
      end: when all should be over; what one leaves of its part of the time the next ones have.
      cache: folder with a cache for each workload, by its name (None: nothing is taken from a cache).
    """
    seconds = (end - time.time()) * SHARE_TO_PREPARE
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(prepare(w, sizes, at, seconds=seconds, cache=cache and cache / w.name, **how))
                   for w in workloads]
        for comparison in running:
            comparison.wait((end - time.time()) / 2)  # the rewrite that it began last may take long
        for k, comparison in enumerate(running):
            yield comparison.name, functools.partial(_in_turn, comparison, len(running) - k, end)


def _in_turn(comparison: Comparison, left: int, end: float) -> dict[str, Any]:
    """Measures in its share of the time, of which ``left`` workloads have equal ones."""
    return comparison.result((end - time.time()) / left)


# --- a workload's process, from inside ----------------------------------------------------------------

def _here(workload: Workload, args: argparse.Namespace) -> None:
    """Prepares, says so, and measures when told to."""
    first, last = map(int, args.called.split(","))
    sizes = range(first, last + 1)
    with models_bench.cache(args.cache) if args.cache else models_bench.fresh_cache():
        one = models_bench.runner(workload, "stitched", last, True)
        compile_s = bench.first_call_s(one)
        made: dict[int, dict[str, bench.Call]] = {}  # by size
        for size in spread_first([int(s) for s in args.compared.split(",") if s]):
            if not made or time.time() < args.until:
                made[size] = _calls(workload, one, size)
        for size in (int(s) for s in args.xla_at.split(",") if s):
            if size in made and time.time() < args.until:
                made[size]["xla"] = _for_size(workload, "xla", _first_rows(one, size))
                made[size]["xla"]()
        print("ready", flush=True)
        seconds = sys.stdin.readline()
        if seconds:  # else the process that waits for this one is gone
            found = measured(workload, one, sizes, made, args.rounds, args.round_s, time.time() + float(seconds))
            print(json.dumps({**found, "compile_s": compile_s}))


def _calls(workload: Workload, one: models_bench.Runner, size: int) -> dict[str, bench.Call]:
    """The function for all sizes, whose first call with this one is timed later, and a rewrite for this one."""
    args = _first_rows(one, size)
    static = _for_size(workload, "stitched", args)
    static()
    return {"dynamic": lambda: bench.finish(one.function(*args)), "static": static}


def _first_rows(one: models_bench.Runner, size: int) -> list[Any]:
    """Arguments for a batch size, of those for the largest one: to draw them anew takes long."""
    return [x[:size] if batched else x for x, batched in zip(one.args, one.instance.workload.batched, strict=True)]


def _for_size(workload: Workload, system: str, args: list[Any]) -> models_bench.Runner:
    """The workload under a system that knows the size of its arguments."""
    instance = workload.instance()
    signature = [tf.TensorSpec(x.shape, x.dtype) for x in args]
    return models_bench.Runner(instance, models_bench.COMPILE[system](instance.function, signature), args)


def measured(workload: Workload, one: models_bench.Runner, sizes: Sequence[int],
             compared: Mapping[int, Mapping[str, bench.Call]], rounds: int, round_s: float, end: float
             ) -> dict[str, Any]:
    """What serving every size of ``sizes`` costs, until the time is ``end``.

    Args:
      workload: the workload.
      one: its one rewrite, called before with the last size only.
      sizes: batch sizes that it is called with, in half of the time.
      compared: by batch size, "dynamic" (the one rewrite), "static" (one for just that size), perhaps "xla"; those but
        the first were called before.
      rounds, round_s: of the comparison, which is interleaved.
      end: no more sizes are compared then.

    Returns:
      ``sizes``: those called; ``rewrites`` and ``plans``: graphs rewritten and shapes planned meanwhile;
      ``first_call_us`` and ``latency_us`` by size (one call, and the least of a few); ``samples``: batch,
      ``dynamic_us``, ``static_us``, ``ratio`` (dynamic over static, the median of the rounds), on a GPU
      ``dynamic_busy_us`` and ``static_busy_us`` (kernels and copies of a call), some with ``xla_us``;
      ``worst_ratio``, None without samples.
    """
    called = _called(one, sizes, time.time() + (end - time.time()) / 2)
    samples = [_sample(size, calls, rounds, round_s) for size, calls in compared.items() if time.time() < end]
    return {"workload": workload.name, **called, "samples": sorted(samples, key=lambda s: s["batch"]),
            "worst_ratio": max((s["ratio"] for s in samples), default=None)}


def _called(one: models_bench.Runner, sizes: Sequence[int], end: float) -> dict[str, Any]:
    """Calls with one size after the other."""
    rewrites, plans = len(hook.reports()), runtime.counters().plans
    first: list[float] = []
    usual: list[float] = []
    for size in sizes:
        if time.time() > end:
            break
        args = _first_rows(one, size)
        times = [_seconds(one.function, args) for _ in range(6)]
        first.append(times[0])
        usual.append(min(times[1:]))
    return {"sizes": list(sizes[:len(first)]), "rewrites": len(hook.reports()) - rewrites,
            "plans": runtime.counters().plans - plans, "first_call_us": [round(t * 1e6, 1) for t in first],
            "latency_us": [round(t * 1e6, 1) for t in usual]}


def _seconds(function: Any, args: Sequence[Any]) -> float:
    start = time.perf_counter()
    bench.finish(function(*args))
    return time.perf_counter() - start


def _sample(size: int, calls: Mapping[str, bench.Call], rounds: int, round_s: float) -> dict[str, Any]:
    times = bench.interleave(dict(calls), rounds, round_s)
    if _ratio(times) > DOUBTFUL:
        times = bench.interleave(dict(calls), AGAIN * rounds, round_s)
    medians = {f"{k}_us": round(statistics.median(v) * 1e6, 1) for k, v in times.items()}
    busy = {f"{k}_busy_us": us for k in ("dynamic", "static") if (us := _busy_us(calls[k])) is not None}
    return {"batch": size, **medians, **busy, "ratio": round(_ratio(times), 3)}


def _ratio(times: Mapping[str, Sequence[float]]) -> float:
    return statistics.median(a / b for a, b in zip(times["dynamic"], times["static"], strict=True))


def _busy_us(call: bench.Call) -> float | None:
    """Microseconds that a call keeps a GPU busy, by the profiler; None without a GPU."""
    us = bench.trace(lambda: [call() for _ in range(TRACED)]).gpu_busy_us
    return None if us is None else round(us / TRACED, 1)


# --- what it says -------------------------------------------------------------------------------------

def verdicts(found: Mapping[str, Any]) -> list[str]:
    """What falls short: something was rewritten again, or a size is slower than with a rewrite of its own."""
    out = []
    if found["rewrites"]:
        out.append(f"{found['workload']}: {found['rewrites']} rewrites after the first")
    out += [f"{found['workload']}, batch {s['batch']}: {s['ratio']:.2f} times the time of a rewrite for this size"
            for s in found["samples"] if s["ratio"] > WITHIN]
    return out


def line(found: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    slowest = max(found["first_call_us"], default=0.0) / 1e3
    batches = ", ".join(str(s["batch"]) for s in found["samples"])
    compared = f"batches {batches} take at most {found['worst_ratio']:.2f} times a static rewrite's time" \
        if found["samples"] else "no size was compared"
    return (f"{found['workload']}, {len(found['sizes'])} batch sizes: {found['rewrites']} rewrites and "
            f"{found['plans']} plans after one rewrite of {found['compile_s']:.1f} s; slowest first call "
            f"{slowest:.1f} ms; {compared}")


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines: what calls of the one rewrite take over those of a rewrite for their size, a row for each workload."""
    sizes = sorted({s["batch"] for found in rows for s in found["samples"]})
    if not sizes:
        return []
    lines = ["", "One rewrite for all batch sizes over one for each: latency (time on the GPU), by batch size",
             f"{'':12}" + "".join(f"{size:>14}" for size in sizes)]
    for found in rows:
        cells = {s["batch"]: _cell(s) for s in found["samples"]}
        lines.append(f"{found['workload']:12}" + "".join(f"{cells.get(size, '-'):>14}" for size in sizes))
    return lines


def _cell(sample: Mapping[str, Any]) -> str:
    busy = f" ({sample['dynamic_busy_us'] / sample['static_busy_us']:.2f})" if "static_busy_us" in sample else ""
    return f"{sample['ratio']:.2f}{busy}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line and a JSON document per workload; exit status 1 when one falls short."""
    parser = argparse.ArgumentParser("python -m models.dynamic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="lr,rnn,dlrm", help="comma-separated (default: %(default)s)")
    parser.add_argument("--sizes", type=int, default=100, help="batch sizes from 1 (default: %(default)s)")
    parser.add_argument("--compared", default=TELLING, help="of them compared with rewrites of their own: "
                        "comma-separated, or how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=150.0, help="in all (default: %(default)s)")
    parser.add_argument("--xla-latencies", type=int, default=0, help="compared sizes to be timed on XLA, too")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds of a comparison")
    parser.add_argument("--round-s", type=float, default=0.005, help="seconds of a round for each system")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels and plans (default: a new one)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--called", default="", help=argparse.SUPPRESS)
    parser.add_argument("--xla-at", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        _here(REGISTRY[args.workloads], args)
        return 0
    sizes, short = range(1, args.sizes + 1), []
    for _, measure in experiments(select(args.workloads), sizes, which(args.compared, sizes),
                                  time.time() + args.seconds, rounds=args.rounds, round_s=args.round_s,
                                  xla_latencies=args.xla_latencies, cache=args.cache):
        found = measure()
        short += verdicts(found)
        print(line(found), json.dumps(found), sep="\n", flush=True)
    print("\n".join(short))
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
