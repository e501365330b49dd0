"""One rewrite, many batch sizes, beside a rewrite and an XLA compile for each size.

    python -m models.dynamic [--workloads layernorm,rnn,dlrm] [--sizes 100] [--compared 100] [--xla-seconds 20]

The rewrites for single sizes are made by several processes side by side, which then wait and are timed one after the
other; what compiles in a time that is told does so alone.  Those of several workloads can all be made first
(:func:`prepare`).
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import numpy as np

from tf_stitch import bench, hook, runtime

from . import bench as models_bench
from .workloads import REGISTRY, Workload

ROOT = Path(__file__).resolve().parents[1]
WITHIN = 1.10  # how much slower than its own static rewrite a batch size may be
DOUBTFUL = 1.05  # a ratio that is measured again, longer: one of a hundred sizes looks slow by chance
AGAIN = 4  # so many times the rounds


def experiment(workload: Workload, sizes: Sequence[int], *, compared: int = 100, rounds: int = 10,
               round_s: float = 0.005, xla_latencies: int = 5, xla_seconds: float = 20.0,
               processes: int = 0, ahead: Comparison | None = None) -> dict[str, Any]:
    """What serving every size of ``sizes`` costs.

    Args:
      workload: the workload.
      sizes: batch sizes, each called with one and the same function.
      compared: for so many of them, evenly spread, the latency is compared with that of a rewrite for just that size,
        interleaved.
      rounds, round_s: of the comparison.
      xla_latencies: so many of the compared sizes are timed on XLA, too.
      xla_seconds: XLA compiles size after size until this time is over; the rest is extrapolated from their mean.
      processes: how many make the rewrites for single sizes (0: three for four cores).
      ahead: what :func:`prepare` began; it is used up, and the five arguments that it got do not count.

    Returns:
      ``rewrites`` and ``plans``: graphs rewritten and shapes planned after the first call; ``first_call_us`` and
      ``latency_us`` by size (one call, and the least of a few); ``samples``: batch, ``dynamic_us``, ``static_us``,
      ``ratio`` (dynamic over static, the median of the rounds), some with ``xla_us``; ``worst_ratio``; ``compile_s``
      of the one rewrite; ``xla_compiled`` sizes, their ``xla_compile_s`` in all, and ``xla_all_s``: that, or its
      extrapolation to all sizes when ``xla_extrapolated``.
    """
    say = _progress(workload.name)
    found = _one_for_all(workload, sizes)
    say(f"{len(sizes)} sizes called, {found['rewrites']} rewrites after the first, of {found['compile_s']:.1f} s")
    with contextlib.ExitStack() as stack:
        ready = ahead or stack.enter_context(prepare(workload, sizes, compared=compared, rounds=rounds, round_s=round_s,
                                                     xla_latencies=xla_latencies, processes=processes))
        samples = ready.samples()
    say(f"{len(samples)} sizes compared")
    xla = list(_xla_compiles(workload, _spread(sizes, len(sizes))[::-1], xla_seconds))
    say(f"{len(xla)} XLA compiles in {sum(xla):.1f} s")
    return found | {"samples": samples, "worst_ratio": max(s["ratio"] for s in samples), "xla_compiled": len(xla),
                    "xla_compile_s": sum(xla), "xla_mean_compile_s": statistics.mean(xla),
                    "xla_all_s": statistics.mean(xla) * len(sizes), "xla_extrapolated": len(xla) < len(sizes)}


def _progress(name: str) -> Callable[[str], None]:
    start = time.monotonic()
    return lambda what: print(f"  {name}, after {time.monotonic() - start:.0f} s: {what}", file=sys.stderr, flush=True)


def _one_for_all(workload: Workload, sizes: Sequence[int]) -> dict[str, Any]:
    """One function called with every size."""
    one = models_bench.runner(workload, "stitched", sizes[-1], True)
    compile_s = bench.first_call_s(one)
    rewrites, plans = _rewrites(), runtime.counters().plans
    first, usual = [], []
    for size in sizes:
        args = one.instance.inputs(size)
        times = [_seconds(one.function, args) for _ in range(6)]
        first.append(times[0])
        usual.append(min(times[1:]))
    return {"workload": workload.name, "sizes": list(sizes), "compile_s": compile_s,
            "rewrites": _rewrites() - rewrites, "plans": runtime.counters().plans - plans,
            "first_call_us": [round(t * 1e6, 1) for t in first], "latency_us": [round(t * 1e6, 1) for t in usual]}


def _rewrites() -> int:
    return len(hook.reports())


def _seconds(function: Any, args: Sequence[Any]) -> float:
    start = time.perf_counter()
    bench.finish(function(*args))
    return time.perf_counter() - start


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    places = np.linspace(0, len(sizes) - 1, min(count, len(sizes))).round().astype(int)
    return [sizes[i] for i in dict.fromkeys(places.tolist())]


def _spread_first(sizes: Sequence[int]) -> list[int]:
    """The sizes in an order whose beginnings are spread, too."""
    return list(dict.fromkeys(size for count in range(1, len(sizes) + 1) for size in _spread(sizes, count)))


def _xla_compiles(workload: Workload, sizes: Sequence[int], seconds: float) -> Iterator[float]:
    """Seconds of XLA's compile for each size, at least one, until ``seconds`` are over."""
    end = time.monotonic() + seconds
    for k, size in enumerate(sizes):
        if k and time.monotonic() > end:
            return
        yield bench.first_call_s(models_bench.runner(workload, "xla", size, False))


# --- rewrites for single sizes, in processes of their own -------------------------------------------

class Comparison:
    """Processes that each hold the function for all sizes and rewrites for some of them."""

    def __init__(self, running: Sequence[subprocess.Popen[str]]):
        self.running, self.awaited = running, list(running)

    def wait(self) -> None:
        """Returns once they have all that they will time."""
        while self.awaited:
            self.awaited.pop().stdout.readline()

    def samples(self) -> list[dict[str, Any]]:
        """A sample for each size; raises RuntimeError when a process dies."""
        self.wait()
        return sorted((s for p in self.running for s in _timed(p)), key=lambda s: s["batch"])


@contextlib.contextmanager
def prepare(workload: Workload, sizes: Sequence[int], *, compared: int, rounds: int = 10, round_s: float = 0.005,
            xla_latencies: int = 5, processes: int = 0, seconds: float = float("inf")) -> Iterator[Comparison]:
    """Begins what :func:`experiment` compares, whose arguments these are; ends what is not used of it.

    After ``seconds`` no more rewrites are made: sizes that have none by then are not compared.
    """
    at = _spread(sizes, compared)
    xla = _spread(at, xla_latencies)
    count = min(processes or max(1, len(os.sched_getaffinity(0)) * 3 // 4), len(at))
    running: list[subprocess.Popen[str]] = []
    try:
        for k in range(count):
            running.append(_process(workload.name, at[k::count], xla, rounds, round_s, time.time() + seconds))
        yield Comparison(running)
    finally:
        for p in running:
            if p.poll() is None:
                p.kill()
                p.communicate()


def _process(name: str, sizes: Sequence[int], xla: Sequence[int], rounds: int, round_s: float,
             end: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "models.dynamic", "--here", f"--workloads={name}", f"--rounds={rounds}",
               f"--round-s={round_s}", f"--until={end}", "--at", *map(str, sizes),
               "--xla-at", *(str(s) for s in sizes if s in xla)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _timed(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Lets a process measure; the others wait."""
    text, _ = process.communicate("go\n")
    if process.returncode or not text:
        raise RuntimeError(f"a process that compares batch sizes died with status {process.returncode}")
    return json.loads(text.splitlines()[-1])


def _compare_here(workload: Workload, args: argparse.Namespace) -> None:
    """Prepares, says so, and measures when told to."""
    one = models_bench.runner(workload, "stitched", args.at[-1], True)
    one()
    made = {}
    for size in _spread_first(args.at):
        if not made or time.time() < args.until:
            made[size] = _calls(workload, one, size, size in args.xla_at)
    print("ready", flush=True)
    if sys.stdin.readline():  # else the process that waits for this one is gone
        print(json.dumps([_sample(size, calls, args.rounds, args.round_s) for size, calls in made.items()]))


def _calls(workload: Workload, one: models_bench.Runner, size: int, xla: bool) -> dict[str, bench.Call]:
    """The function for all sizes, a rewrite for this one, perhaps XLA: each called once."""
    args = one.instance.inputs(size)
    calls: dict[str, bench.Call] = {"dynamic": lambda: bench.finish(one.function(*args)),
                                    "static": models_bench.runner(workload, "stitched", size, False)}
    if xla:
        calls["xla"] = models_bench.runner(workload, "xla", size, False)
    for call in calls.values():
        call()
    return calls


def _sample(size: int, calls: dict[str, bench.Call], rounds: int, round_s: float) -> dict[str, Any]:
    times = bench.interleave(calls, rounds, round_s)
    if _ratio(times) > DOUBTFUL:
        times = bench.interleave(calls, AGAIN * rounds, round_s)
    medians = {f"{k}_us": round(statistics.median(v) * 1e6, 1) for k, v in times.items()}
    return {"batch": size, **medians, "ratio": round(_ratio(times), 3)}


def _ratio(times: dict[str, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(times["dynamic"], times["static"], strict=True))


# --- what it says -----------------------------------------------------------------------------------

def verdicts(found: dict[str, Any]) -> list[str]:
    """What falls short: something was rewritten again, or a size is slower than with a rewrite of its own."""
    out = []
    if found["rewrites"]:
        out.append(f"{found['workload']}: {found['rewrites']} rewrites after the first")
    out += [f"{found['workload']}, batch {s['batch']}: {s['ratio']:.2f} times the time of a rewrite for this size"
            for s in found["samples"] if s["ratio"] > WITHIN]
    return out


def line(found: dict[str, Any]) -> str:
    """The result in a sentence."""
    about = "extrapolated from" if found["xla_extrapolated"] else "measured:"
    return (f"{found['workload']}, {len(found['sizes'])} batch sizes: {found['rewrites']} rewrites and "
            f"{found['plans']} plans after one rewrite of {found['compile_s']:.1f} s; slowest first call "
            f"{max(found['first_call_us']) / 1e3:.1f} ms; {len(found['samples'])} sizes take at most "
            f"{found['worst_ratio']:.2f} times a static rewrite's time; "
            f"XLA compiles for {found['xla_all_s']:.0f} s ({about} {found['xla_compiled']} compiles)")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line and a JSON document per workload; exit status 1 when one falls short."""
    parser = argparse.ArgumentParser("python -m models.dynamic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="layernorm,rnn,dlrm", help="comma-separated (default: %(default)s)")
    parser.add_argument("--sizes", type=int, default=100, help="batch sizes from 1 (default: %(default)s)")
    parser.add_argument("--compared", type=int, default=100, help="of them compared with rewrites of their own")
    parser.add_argument("--xla-seconds", type=float, default=20.0, help="time for XLA compiles, per workload")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds of a comparison")
    parser.add_argument("--round-s", type=float, default=0.005, help="seconds of a round for each system")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--at", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--xla-at", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        _compare_here(REGISTRY[args.workloads], args)
        return 0
    short = []
    for name in args.workloads.split(","):
        found = experiment(REGISTRY[name], range(1, args.sizes + 1), compared=args.compared, rounds=args.rounds,
                           round_s=args.round_s, xla_seconds=args.xla_seconds)
        short += verdicts(found)
        print(line(found), json.dumps(found), sep="\n", flush=True)
    print("\n".join(short))
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
