"""One rewrite, many batch sizes, beside a rewrite and an XLA compile for each size.

    python -m models.dynamic [--workloads rnn,dlrm,bert] [--sizes 100] [--samples 5] [--xla-seconds 20]
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from tf_stitch import bench, hook, runtime

from . import bench as models_bench
from .workloads import REGISTRY, Workload

WITHIN = 1.10  # how much slower than its own static rewrite a batch size may be


def experiment(workload: Workload, sizes: Sequence[int], *, samples: int = 5, rounds: int = 10,
               round_s: float = 0.02, xla_seconds: float = 20.0) -> dict[str, Any]:
    """What serving every size of ``sizes`` costs.

    Args:
      workload: the workload.
      sizes: batch sizes, each called with one and the same function.
      samples: for so many of them, evenly spread, the latency is compared with that of a rewrite and of an XLA compile
        for just that size, interleaved.
      rounds, round_s: of the comparison.
      xla_seconds: XLA compiles for further sizes until this time is over; the rest is extrapolated from their mean.

    Returns:
      ``rewrites`` and ``plans``: graphs rewritten and shapes planned after the first call; ``first_call_us`` and
      ``latency_us`` by size (one call, and the least of a few); ``samples``: batch, ``dynamic_us``, ``static_us``,
      ``xla_us``, ``ratio`` (dynamic over static, the median of the rounds), ``static_compile_s``; ``compile_s`` of the
      one rewrite; ``xla_compiled`` sizes, their ``xla_compile_s`` in all, and ``xla_all_s``: that, or its extrapolation
      to all sizes when ``xla_extrapolated``.
    """
    one = models_bench.runner(workload, "stitched", sizes[-1], True)
    compile_s = bench.first_call_s(one)
    rewrites, plans = _rewrites(), runtime.counters().plans
    first, usual = [], []
    for size in sizes:
        args = one.instance.inputs(size)
        times = [_seconds(one.function, args) for _ in range(6)]
        first.append(times[0])
        usual.append(min(times[1:]))
    found = {"workload": workload.name, "sizes": list(sizes), "compile_s": compile_s,
             "rewrites": _rewrites() - rewrites, "plans": runtime.counters().plans - plans,
             "first_call_us": [round(t * 1e6, 1) for t in first], "latency_us": [round(t * 1e6, 1) for t in usual]}
    compared, xla = [], []
    for size in _spread(sizes, samples):
        sample, xla_s = _compare(workload, one, size, rounds, round_s)
        compared.append(sample)
        xla.append(xla_s)
    others = [s for s in sizes if s not in {c["batch"] for c in compared}]
    end = time.monotonic() + xla_seconds
    while others and time.monotonic() < end:
        xla.append(bench.first_call_s(models_bench.runner(workload, "xla", others.pop(), False)))
    mean = statistics.mean(xla)
    return found | {"samples": compared, "worst_ratio": max(c["ratio"] for c in compared), "xla_compiled": len(xla),
                    "xla_compile_s": sum(xla), "xla_mean_compile_s": mean, "xla_all_s": mean * len(sizes),
                    "xla_extrapolated": len(xla) < len(sizes)}


def _rewrites() -> int:
    return len(hook.reports())


def _seconds(function: Any, args: Sequence[Any]) -> float:
    start = time.perf_counter()
    bench.finish(function(*args))
    return time.perf_counter() - start


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    places = np.linspace(0, len(sizes) - 1, min(count, len(sizes))).round().astype(int)
    return [sizes[i] for i in dict.fromkeys(places.tolist())]


def _compare(workload: Workload, one: models_bench.Runner, size: int, rounds: int, round_s: float
             ) -> tuple[dict[str, Any], float]:
    """One size: the function for all sizes, a rewrite for this one, XLA; and XLA's seconds to compile."""
    args = one.instance.inputs(size)
    static, xla = (models_bench.runner(workload, system, size, False) for system in ("stitched", "xla"))
    static_s, xla_s = bench.first_call_s(static), bench.first_call_s(xla)
    calls = {"dynamic": lambda: bench.finish(one.function(*args)), "static": static, "xla": xla}
    times = bench.interleave(calls, rounds, round_s)
    ratio = statistics.median(a / b for a, b in zip(times["dynamic"], times["static"], strict=True))
    medians = {f"{k}_us": round(statistics.median(v) * 1e6, 1) for k, v in times.items()}
    return {"batch": size, **medians, "ratio": round(ratio, 3), "static_compile_s": static_s}, xla_s


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
            f"{max(found['first_call_us']) / 1e3:.1f} ms; at most {found['worst_ratio']:.2f} times a static rewrite's "
            f"time; XLA compiles for {found['xla_all_s']:.0f} s ({about} {found['xla_compiled']} compiles)")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line and a JSON document per workload; exit status 1 when one falls short."""
    parser = argparse.ArgumentParser("python -m models.dynamic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="rnn,dlrm,bert", help="comma-separated (default: %(default)s)")
    parser.add_argument("--sizes", type=int, default=100, help="batch sizes from 1 (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="sizes that are compared (default: %(default)s)")
    parser.add_argument("--xla-seconds", type=float, default=20.0, help="time for more XLA compiles")
    args = parser.parse_args(argv)
    short = []
    for name in args.workloads.split(","):
        found = experiment(REGISTRY[name], range(1, args.sizes + 1), samples=args.samples,
                           xla_seconds=args.xla_seconds)
        short += verdicts(found)
        print(line(found), json.dumps(found), sep="\n", flush=True)
    print("\n".join(short))
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
