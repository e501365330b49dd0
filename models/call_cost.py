"""Where the time of one call goes: host and device, TensorFlow, XLA and stitched, the long way in and the short one.

    python -m models.call_cost [--workloads lr,w2v,rnn] [--times 100] [--no-xla] [--out models/results/call_cost.json]

"stitched" is what a user of tf_stitch.function gets: the function's graph replayed without its executor where that can
be.  "function" is the same short way in to the function itself, "long way" TensorFlow's own way in.

"call" is the Python call alone (what it enqueues may still run on a GPU), "synced" the call and a device sync; both are
medians over calls that each begin on an idle device.  "raw" calls the concrete function in TensorFlow's runtime with
its inputs at hand, the least that any way in can do that runs the function.  "op" is what the stitched ops themselves
take on the host, from the profiler; "busy" the time in which a GPU worked.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import tensorflow as tf

import tf_stitch
from tf_stitch import bench, fast_call

from .workload import Instance, Workload
from .workloads import select

Call = Callable[[], Any]
WAYS = ("tensorflow", "xla", "stitched, long way", "stitched, raw", "stitched, function", "stitched")


def _ways(workload: Workload, xla: bool) -> dict[str, tuple[Any, list[tf.Tensor]]]:
    """A function and its arguments for each way to run a workload; a training step has weights of its own."""
    made: dict[str, tuple[Any, list[tf.Tensor]]] = {}

    def instance(way: str, compiled: Callable[[Instance, list[tf.TensorSpec]], Any]) -> None:
        one = workload.instance()
        made[way] = compiled(one, one.signature(workload.batch)), one.inputs()

    instance("tensorflow", lambda i, s: tf.function(i.function, input_signature=s))
    if xla:
        instance("xla", lambda i, s: tf.function(i.function, input_signature=s, jit_compile=True))
    instance("stitched", lambda i, s: tf_stitch.function(i.function, input_signature=s))
    stitched, args = made["stitched"]
    made["stitched, long way"] = (lambda *a: fast_call._long_way(stitched, *a)), args
    made["stitched, raw"] = _raw(stitched, args), args
    instance("stitched, function", _through_function)
    return {way: made[way] for way in WAYS if way in made}


def _through_function(instance: Instance, signature: list[tf.TensorSpec]) -> Callable[..., Any]:
    """The short way in with replays turned off."""
    stitched = tf_stitch.function(instance.function, input_signature=signature)

    def call(*args: tf.Tensor) -> Any:
        os.environ["TF_STITCH_DIRECT_CALLS"] = "0"
        try:
            return stitched(*args)
        finally:
            del os.environ["TF_STITCH_DIRECT_CALLS"]

    return call


def _raw(function: Any, args: list[tf.Tensor]) -> Callable[..., Any]:
    """The concrete function called in TensorFlow's runtime, nothing of Python around it."""
    concrete: list[Any] = []

    def call(*given: tf.Tensor) -> Any:
        if not concrete:
            concrete.append(function.get_concrete_function(*args))
        c = concrete[0]
        ctx = fast_call.context.context()
        return ctx.call_function(c._inference_function.name, [*given, *c.captured_inputs],
                                 len(c.function_type.flat_outputs))

    return call


def timed(call: Call, times: int) -> tuple[float, float]:
    """(call, synced): medians in microseconds."""
    for _ in range(12):
        bench.finish(call())
    alone, synced = [], []
    for _ in range(times):
        start = time.perf_counter()
        result = call()
        middle = time.perf_counter()
        bench.finish(result)
        alone.append(middle - start)
        synced.append(time.perf_counter() - start)
        del result
    return statistics.median(alone) * 1e6, statistics.median(synced) * 1e6


def sync_us(times: int) -> float:
    """A device sync with nothing to wait for, in microseconds."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        bench.finish(None)
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6


def anatomy(workload: Workload, times: int, xla: bool) -> list[dict[str, Any]]:
    """A row per way in, and what the stitched function's call executes."""
    rows = []
    for way, (function, args) in _ways(workload, xla).items():
        call = lambda function=function, args=args: function(*args)  # noqa: E731
        try:
            bench.finish(call()), bench.finish(call())
            traced = bench.trace(lambda call=call: bench.finish(call()))
            alone, synced = timed(call, times)
        except Exception as error:  # a way that cannot run is a row too
            rows.append({"workload": workload.name, "way": way, "note": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        ops, kernels = bench.counts(traced)
        stitched = [o for o in traced.ops if o.kind == "StitchedProgram"]
        left = [f"{o.kind} {o.calls}" for o in traced.ops if o.kind != "StitchedProgram"]
        rows.append({"workload": workload.name, "way": way, "call_us": alone, "synced_us": synced, "ops": ops,
                     "kernels": kernels, "memcpys": sum(k.calls for k in traced.kernels if k.kind == "copy"),
                     "busy_us": traced.gpu_busy_us, "op_us": sum(o.us for o in stitched) if stitched else None,
                     "executed": _count(traced), "others": len(left)})
    return rows


def _count(traced: bench.Trace) -> dict[str, list[float]]:
    """Op type -> [how many, microseconds together]."""
    found: dict[str, list[float]] = {}
    for o in traced.ops:
        entry = found.setdefault(o.kind, [0, 0.0])
        entry[0] += o.calls
        entry[1] = round(entry[1] + o.us, 1)
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table."""
    for r in rows:
        if "note" in r:
            print(f"{r['workload']:10} {r['way']:20} {r['note']}")
            continue
        busy, op = (f"{r[k]:7.0f}" if r[k] is not None else f"{'-':>7}" for k in ("busy_us", "op_us"))
        print(f"{r['workload']:10} {r['way']:20} {r['call_us']:8.0f} {r['synced_us']:8.0f} {busy} {op} {r['ops']:5} "
              f"{r['kernels']:7} {r['memcpys']:7}", flush=True)
        if r["way"] == "stitched":
            print("           ", ", ".join(f"{k} {n} ({us:.0f} us)" for k, (n, us) in r["executed"].items())[:400])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m models.call_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="layernorm,lr,w2v,rnn,dien,nmt,bert", help="comma-separated")
    parser.add_argument("--times", type=int, default=100, help="calls per row (default: %(default)s)")
    parser.add_argument("--no-xla", action="store_true", help="leave XLA out, which takes long to compile")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    print(f"a sync: {sync_us(args.times):.1f} us")
    print(f"{'workload':10} {'way':20} {'call us':>8} {'synced':>8} {'busy':>7} {'op us':>7} {'ops':>5} {'kernels':>7} "
          f"{'memcpys':>7}")
    rows: list[dict[str, Any]] = []
    for workload in select(args.workloads):
        found = anatomy(workload, args.times, not args.no_xla)
        show(found)
        rows += found
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": bench.machine(), "sync_us": sync_us(args.times), "rows": rows},
                                       indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
