"""What must hold on a GPU, in one command: kernels against the interpreter, workloads against TensorFlow, a benchmark.

    python -m models.gpu_check [--out DIR] [--minutes 8.5] [--parts kernels,workloads,bench] [--rounds 10]

Each part runs in a process of its own and writes DIR/PART.json after every step; a process that dies is started again
behind the step that killed it, and a second run goes on where the first one ended.  DIR/summary.txt is the end's table.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

PARTS = ("kernels", "workloads", "bench")
SHARE = {"kernels": 0.3, "workloads": 0.3, "bench": 1.0}  # of the time that is left
CHUNKS, PER_CHUNK = 12, 25
WRONG = 1e-4  # of an output's largest value, without TF32
FATAL = ("CUDA_ERROR", "cuMemcpy", "cuLaunch", "cuCtx", "illegal memory", "launch failed", "Cuda")
FLOATS = (("float32", "float64", "float16", "bfloat16"), ("float32",), ("float16",), ("bfloat16",))


class Record:
    """Results by step, on disk after every one."""

    def __init__(self, path: Path):
        self.path = path
        self.steps: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, step: str, result: Any) -> None:
        self.steps[step] = result
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.steps, indent=1, default=str) + "\n")
        os.replace(new, self.path)


def walk(record: Record, steps: Iterable[tuple[str, Callable[[], Any]]], end: float) -> None:
    """Runs the steps that have no result yet, while there is time."""
    for name, work in steps:
        if name in record.steps:
            continue
        if time.time() > end:
            print(f"  no time for {name} and what follows", flush=True)
            return
        record.put(name, {"error": "the process died"})
        start = time.time()
        try:
            result = work()
        except Exception as error:
            traceback.print_exc(limit=4)
            result = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        result["seconds"] = round(time.time() - start, 2)
        record.put(name, result)
        print(f"  {name}: {_short(result)}", flush=True)
        if any(word in str(result.get("error", "")) for word in FATAL):
            os._exit(3)  # the device's context is lost; a new process goes on


def _short(result: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()
                     if not isinstance(v, list | dict))


# --- kernels: random graphs against the interpreter ------------------------------------------------

def kernels(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Chunks of random graphs; the compilers of later chunks run while earlier ones are checked."""
    from tf_stitch.backend import cuda

    target = "sm_90" if args.dry else cuda.device_target()
    pool = ThreadPoolExecutor(2 if args.dry else os.cpu_count() or 1)
    jobs = [pool.submit(_compiled, chunk, target) for chunk in range(args.chunks)]
    for chunk, job in enumerate(jobs):
        yield f"chunk {chunk}", lambda chunk=chunk, job=job: _check_chunk(chunk, job, args.dry)
    pool.shutdown(cancel_futures=True)


def _compiled(chunk: int, target: str) -> list[tuple[int, Any, Any]]:
    from tests.ir_graphs import random_case
    from tf_stitch import compiler
    from tf_stitch.backend import cuda
    from tf_stitch.schedule.target import CUDA

    floats = FLOATS[chunk % len(FLOATS)]
    seeds = range(1000 * chunk, 1000 * chunk + PER_CHUNK)
    cases = [(seed, random_case(seed, float_types=floats)) for seed in seeds]
    laid = [compiler.lay_out(case.graph, CUDA) for _, case in cases]
    text = compiler.join_texts([k for _, made in laid for k in made])
    code = cuda.compile_text(text, (target,)) if text else {}
    for program, _ in laid:
        program.code = code
    return [(seed, case, program) for (seed, case), (program, _) in zip(cases, laid, strict=True)]


def _check_chunk(chunk: int, job: Future[list[tuple[int, Any, Any]]], dry: bool) -> dict[str, Any]:
    from tests.ir_graphs import assert_matches, random_inputs
    from tf_stitch.backend import cuda, host
    from tf_stitch.errors import GuardFailed
    from tf_stitch.ir import interp

    run = host.run if dry else cuda.run
    compared, wrong = 0, []
    for seed, case, program in job.result():
        for trial in range(2):
            inputs = random_inputs(case.graph, seed * 10 + trial)
            try:
                want = interp.run(case.graph, inputs)
            except (ValueError, IndexError, ZeroDivisionError):
                continue  # sizes that the graph does not allow
            try:
                got = run(program, inputs)
                assert_matches(case, want, got, slack=2.0)
                compared += 1
            except GuardFailed:
                continue
            except AssertionError as error:
                wrong.append(f"seed {seed}, trial {trial}: {str(error)[:300]}")
    return {"compared": compared, "wrong": len(wrong), "what": wrong}


# --- workloads: stitched against TensorFlow --------------------------------------------------------

def workloads(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every workload, known and unknown batch."""
    import tensorflow as tf

    from .workloads import select

    tf.config.experimental.enable_tensor_float_32_execution(False)
    for dynamic in (False, True):
        for w in select(args.workloads):
            yield f"{w.name}{' dynamic' if dynamic else ''}", lambda w=w, dynamic=dynamic: _check_workload(w, dynamic)


def _check_workload(workload: Any, dynamic: bool) -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    import tf_stitch
    from tf_stitch import bench, hook, runtime

    batches = [workload.batch] if not dynamic else [workload.batch, max(1, workload.batch // 2), 3]
    instances = [workload.instance() for _ in range(2)]
    signature = instances[0].signature(None if dynamic else workload.batch)
    plain = tf.function(instances[0].function, input_signature=signature)
    stitched = tf_stitch.function(instances[1].function, input_signature=signature)
    before, worst = runtime.counters(), 0.0
    calls = 0
    for batch in batches:
        args = instances[0].inputs(batch)
        for _ in range(3):  # the first call launches, later ones replay
            want = instances[0].results(plain, args)
            got = instances[1].results(stitched, args)
            calls += 1
            worst = max(worst, bench.max_rel_error([np.asarray(g) for g in got], [np.asarray(w) for w in want]))
    after = runtime.counters()
    reports = [r for _, r in hook.reports()][-1:]
    if not worst < WRONG:
        raise AssertionError(f"stitched and TensorFlow differ by {worst:.1e} of the largest value")
    return {"max_difference": worst, "calls": calls, "stitched_runs": after.stitched - before.stitched,
            "fallbacks": after.fallbacks - before.fallbacks, "programs": [len(r.clusters) for r in reports],
            "left": [f"{n.op}: {n.reason}" for r in reports for g in r.graphs for n in g.left][:20]}


# --- the benchmark ---------------------------------------------------------------------------------

def benchmark(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A row per workload and system."""
    from dataclasses import asdict

    from tf_stitch import bench

    from . import bench as models_bench
    from .workloads import select

    options = models_bench.parse([f"--rounds={args.rounds}", "--round-s=0.05", f"--systems={args.systems}"])

    def one(workload: Any) -> dict[str, Any]:
        with models_bench.fresh_cache():
            rows = models_bench.run(workload, options)
        return {"rows": [asdict(r) for r in rows],
                **{r.system: f"{r.kernels} kernels {r.latency_us and round(r.latency_us)} us {r.note}" for r in rows}}

    yield "machine", bench.machine
    yield "copy bandwidth", _copy_bandwidth
    for w in select(args.workloads):
        yield w.name, lambda w=w: one(w)
    yield "batch sizes", lambda: _batch_sizes("dlrm", 100, 8)


def _copy_bandwidth() -> dict[str, Any]:
    """Bytes read and written per second by copies of 256 MiB on the device, by the profiler."""
    import tensorflow as tf

    from tf_stitch import bench

    x = tf.zeros([64 << 20])
    bench.trace(lambda: bench.finish(tf.raw_ops.DeepCopy(x=x)))
    times = [t.gpu_busy_us for t in (bench.trace(lambda: bench.finish(tf.raw_ops.DeepCopy(x=x))) for _ in range(5))]
    known = [t for t in times if t]
    return {"gb_per_s": 2 * x.shape[0] * 4 / min(known) / 1e3 if known else None}


def _batch_sizes(name: str, count: int, xla_count: int) -> dict[str, Any]:
    """One rewrite, many batch sizes: seconds of every first call, rewrites and plans; XLA compiles some beside it."""
    from tf_stitch import hook, runtime

    from . import bench as models_bench
    from .workloads import REGISTRY

    workload = REGISTRY[name]
    stitched = models_bench.runner(workload, "stitched", None, True)
    stitched()
    rewrites, plans = len(hook.reports()), runtime.counters().plans
    first = []
    for batch in range(1, count + 1):
        args = stitched.instance.inputs(batch)
        start = time.perf_counter()
        models_bench.bench.finish(stitched.function(*args))
        first.append(time.perf_counter() - start)
    xla = []
    for batch in range(1, xla_count + 1):
        fixed = models_bench.runner(workload, "xla", batch, False)
        start = time.perf_counter()
        fixed()
        xla.append(time.perf_counter() - start)
    return {"workload": name, "sizes": count, "rewrites": len(hook.reports()) - rewrites,
            "plans": runtime.counters().plans - plans, "first_calls_s": sum(first), "worst_first_call_s": max(first),
            "xla_sizes": xla_count, "xla_compile_s": sum(xla)}


RUN = {"kernels": kernels, "workloads": workloads, "bench": benchmark}


# --- the command -----------------------------------------------------------------------------------

def summary(out: Path) -> str:
    """What is known so far, as text."""
    from rich.console import Console

    from tf_stitch import bench

    lines = []
    for part in PARTS:
        record = Record(out / f"{part}.json")
        bad = {k: v["error"] for k, v in record.steps.items() if "error" in v}
        lines.append(f"{part}: {len(record.steps)} steps, {len(bad)} failed")
        lines += [f"  {k}: {v}" for k, v in bad.items()]
        for name, r in record.steps.items():
            if part == "workloads" and "error" not in r:
                lines.append(f"  {name}: difference {r['max_difference']:.1e}, {r['stitched_runs']} stitched runs, "
                             f"{r['fallbacks']} fallbacks")
        if part == "kernels":
            results = [v for v in record.steps.values() if "compared" in v]
            lines.append(f"  {sum(v['compared'] for v in results)} compared, {sum(v['wrong'] for v in results)} wrong")
            lines += [f"  {line}" for v in results for line in v["what"]]
    record = Record(out / "bench.json")
    rows = [bench.Row(**r) for v in record.steps.values() for r in v.get("rows", ())]
    if rows:
        facts = record.steps["machine"]
        bench.save(rows, facts, out, "table")
        (out / "device.json").write_text(json.dumps(_for_the_record(facts, record), indent=1) + "\n")
        with (out / "table.txt").open() as text:
            lines.append(text.read())
        Console(width=200).print(bench.table(rows, facts))
    return "\n".join(lines) + "\n"


def _for_the_record(facts: dict[str, Any], record: Record) -> dict[str, Any]:
    """The benchmark as models/results keeps it: what the figures depend on, then a row per workload and system."""
    versions = {k: facts[k] for k in ("tensorflow", "tf_stitch", "keras", "numpy", "python", "compiler")}
    other = {k: v for k, v in record.steps.items() if k in ("copy bandwidth", "batch sizes")}
    return {"device": ", ".join([*facts["gpus"], facts["cpu"]]), "versions": versions,
            **{k: facts[k] for k in ("commit", "date", "command")}, **other,
            "rows": [r for v in record.steps.values() for r in v.get("rows", ())]}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m models.gpu_check", description=(__doc__ or "").splitlines()[0])
    out = Path(os.environ.get("OUT", "gpu_check"))
    parser.add_argument("--out", type=Path, default=out, help="results folder")
    parser.add_argument("--minutes", type=float, default=8.5, help="when to stop (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--workloads", default="", help="comma-separated (default: all)")
    parser.add_argument("--systems", default="tensorflow,xla,stitched", help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds of the benchmark")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help=f"chunks of {PER_CHUNK} random graphs")
    parser.add_argument("--dry", action="store_true", help="without a GPU: CUDA text is compiled, the host's is run")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; use {', '.join(PARTS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the parts in processes of their own; exit status 1 when something failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        walk(Record(args.out / f"{args.part}.json"), RUN[args.part](args), args.end)
        return 0
    end = time.time() + 60 * args.minutes
    for part in args.parts.split(","):
        until = time.time() + (end - time.time()) * SHARE[part]
        print(f"{part}: {until - time.time():.0f} s", flush=True)
        for _ in range(6):  # a process that died is started again
            command = [sys.executable, "-m", "models.gpu_check", *argv, f"--part={part}", f"--end={until}"]
            try:
                if subprocess.run(command, check=False, timeout=max(5, end - time.time())).returncode == 0:
                    break
            except subprocess.TimeoutExpired:
                print("  out of time", flush=True)
                break
    text = summary(args.out)
    (args.out / "summary.txt").write_text(text)
    print(text, flush=True)
    return int("failed\n" in text.replace(" 0 failed", "") or ", 0 wrong" not in text)


if __name__ == "__main__":
    sys.exit(main())
