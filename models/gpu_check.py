"""What must hold on a GPU, in one command: tests, kernels against the interpreter, workloads against TensorFlow, a
benchmark.

    python -m models.gpu_check [--out DIR] [--minutes 8.5] [--parts tests,sanitize,kernels,workloads,bench,...]

Parts: ``tests`` pytest on tests/gpu; ``kernels`` every primitive and random graphs against the interpreter;
``sanitize`` some of them under compute-sanitizer; ``workloads`` stitched against TensorFlow; ``bench`` TensorFlow, XLA
and stitched, the batch known and unknown; ``dynamic`` one rewrite for many batch sizes; ``xla_compiles`` XLA's compiles
for these; ``restart`` a second process with a full cache; ``peers`` JAX and PyTorch.  Each runs in a process of its own
and writes DIR/PART.json after every step; a process that dies is started again behind the step that killed it, and a
second run goes on where the first one ended.  At the end DIR/summary.txt, DIR/results.json and .txt (tables, promises
kept or not) and plots are made of all that is known.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from xml.etree import ElementTree

from . import reference

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

WEIGHTS = {"tests": 1.5, "sanitize": 1.0, "kernels": 1.0, "workloads": 1.0, "memory": 0.7, "bench": 5.0,
           "dynamic": 1.5, "xla_compiles": 3.0, "restart": 1.0, "peers": 3.0}  # of the time
PARTS = tuple(WEIGHTS)
ROOT = Path(__file__).resolve().parents[1]
STARTED = 2  # processes in a lane of the benchmark: starting TensorFlow takes longer than measuring most workloads
LANE_CORES = 8  # at least, in each of two lanes
CHUNKS, PER_CHUNK = 12, 25
PRODUCTS = 40  # of a chunk
FOR_THE_LAST_S = 75  # of the tests part: for tests that run alone
WRONG = 1e-4  # of an output's largest value, without TF32
FATAL = ("CUDA_ERROR", "cuMemcpy", "cuLaunch", "cuCtx", "illegal memory", "launch failed", "Cuda")
TYPES = "float32,float16,bfloat16,float64,int32,int64,uint8,bool"
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


# --- tests and sanitizers --------------------------------------------------------------------------

def tests(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The tests that need a GPU: side by side those that may be, then those that measure the GPU's memory."""
    yield "side by side", lambda: _pytest(args, "gpu and not alone", args.workers, args.end - FOR_THE_LAST_S)
    yield "alone", lambda: _pytest(args, "gpu and alone", 0, args.end)


def _pytest(args: argparse.Namespace, marks: str, workers: int, end: float) -> dict[str, Any]:
    """Counts of a pytest run; names and reasons of what failed and what was skipped are in ``what``.

    Its own output is added to pytest.log beside the results.  Raises when there is no report of it.
    """
    with tempfile.TemporaryDirectory() as folder, (args.out / "pytest.log").open("a") as log:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", *args.tests.split(","), "-m", marks, "-n", str(workers), "-rfs",
                   "-vv", "--tb=short", "--durations=15", "-p", "no:cacheprovider", f"--junitxml={report}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(max(20.0, end - time.time()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it still reports what it did
            process.wait(15)
        if not report.exists():
            raise AssertionError(f"pytest ended with exit status {process.returncode} and no report")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "what": []}
    if process.returncode not in (0, 1, 5):  # done, with failures, no such tests
        found["what"].append(f"pytest did not run all tests: exit status {process.returncode}")
        found["failed"] += 1
    for case in cases:
        kind, message = _outcome(case)
        found[kind] += 1
        if kind != "passed":
            found["what"].append(f"{kind}: {case.get('classname')}::{case.get('name')}: {message[:400]}")
    return found


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    """How a test of a JUnit report ended, and why."""
    for tag, kind in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return kind, " ".join((found.get("message") or "").split())
    return "passed", ""


def sanitize(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Kernels under compute-sanitizer's tools."""
    for tool in args.tools.split(","):
        yield tool, lambda tool=tool: _sanitized(tool, args)


def _sanitized(tool: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a tool finds in primitives of three types, four chunks of random graphs and two of products.

    Raises when it finds anything, or a result is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        check = ["-m", "models.gpu_check", f"--out={folder}", "--minutes=4", "--parts=kernels", "--chunks=4",
                 "--products=2", "--types=float32,bfloat16,int32"]
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all",
                   sys.executable, *check]
        done = subprocess.run(command, cwd=ROOT, text=True, check=False, timeout=max(20.0, args.end - time.time()),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        steps = Record(Path(folder, "kernels.json")).steps.values()
    compared, wrong = (sum(v.get(k, 0) for v in steps) for k in ("compared", "wrong"))
    said = [line.strip("= ") for line in done.stdout.splitlines() if "SUMMARY" in line]
    if done.returncode or wrong or not compared:
        raise AssertionError(f"exit status {done.returncode}, {compared} compared, {wrong} wrong, {'; '.join(said)}")
    return {"compared": compared, "wrong": wrong, "summary": "; ".join(said)}


# --- kernels: primitives and random graphs against the interpreter ------------------------------------------------

def kernels(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every primitive, random graphs and products in chunks; later compilers run while earlier kernels are checked."""
    from tests.ir_graphs import random_case
    from tests.primitives import forms
    from tests.random_products import random_product
    from tf_stitch.backend import cuda

    target = "sm_90" if args.dry else cuda.device_target()
    pool = ThreadPoolExecutor(2 if args.dry else os.cpu_count() or 1)
    steps = []
    for dtype in filter(None, args.types.split(",")):
        made = forms(dtype)
        job = pool.submit(_compiled, [f.graph for f in made], target)
        steps.append((f"primitives {dtype}", lambda made=made, job=job: _check_forms(made, job, args.dry)))
    for chunk in range(args.chunks):
        seeds = range(1000 * chunk, 1000 * chunk + PER_CHUNK)
        cases = {seed: random_case(seed, float_types=FLOATS[chunk % len(FLOATS)]) for seed in seeds}
        job = pool.submit(_compiled, [c.graph for c in cases.values()], target)
        steps.append((f"chunk {chunk}", lambda cases=cases, job=job: _check_cases(cases, job, args.dry)))
    for chunk in range(args.products):
        drawn = [random_product(seed) for seed in range(PRODUCTS * chunk, PRODUCTS * (chunk + 1))]
        job = pool.submit(_compiled, [p.graph for p in drawn], target)
        steps.append((f"products {chunk}", lambda drawn=drawn, job=job: _check_products(drawn, job, args.dry)))
    yield from steps
    pool.shutdown(cancel_futures=True)


def _compiled(graphs: Sequence[Any], target: str) -> list[Any]:
    from tf_stitch import compiler
    from tf_stitch.options import Options

    return compiler.compile_together(graphs, Options(target=f"cuda:{target}"))


def _runner(dry: bool) -> Callable[..., list[Any]]:
    from tf_stitch.backend import cuda, host

    return host.run if dry else cuda.run


def _check_forms(made: Sequence[Any], job: Future[list[Any]], dry: bool) -> dict[str, Any]:
    from tests.primitives import judge

    compared, wrong = judge(zip(made, job.result(), strict=True), _runner(dry))
    return {"compared": compared, "wrong": len(wrong), "what": wrong}


def _check_cases(cases: Mapping[int, Any], job: Future[list[Any]], dry: bool) -> dict[str, Any]:
    from tests.ir_graphs import assert_matches, random_inputs
    from tf_stitch.errors import GuardFailed
    from tf_stitch.ir import interp

    run = _runner(dry)
    compared, wrong = 0, []
    for (seed, case), program in zip(cases.items(), job.result(), strict=True):
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


def _check_products(drawn: Sequence[Any], job: Future[list[Any]], dry: bool) -> dict[str, Any]:
    from tf_stitch.ir import interp

    run = _runner(dry)
    compared, wrong = 0, []
    for product, program in zip(drawn, job.result(), strict=True):
        for trial in range(2):
            inputs = product.inputs(trial)
            try:
                product.check(interp.run(product.graph, inputs), run(program, inputs))
                compared += 1
            except AssertionError as error:
                wrong.append(f"{product.kind}, sizes {[x.shape for x in inputs]}: {str(error)[:300]}")
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


# --- memory-bound kernels --------------------------------------------------------------------------

def memory(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Single kernels' shares of the copy bandwidth."""
    from . import memory_bound

    shares = memory_bound.Shares(args.dry)
    yield "copy", lambda: dict(shares.copies)
    for operation, (rows, columns), dtype in memory_bound.CASES:
        yield (f"{operation} {rows} x {columns} {dtype}",
               lambda case=(operation, (rows, columns), dtype): shares.row(*case))


# --- the benchmark ---------------------------------------------------------------------------------

def benchmark(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A row per workload and system, the batch size known and unknown; each workload in a process of its own.

    Some processes live at a time: two lanes compile, each on half of the cores, while others start and prepare, and
    one alone times calls (:mod:`models.turns`).  Nothing compiles while the float64 results are computed.
    """
    from .turns import Turns
    from .workloads import select

    done = Record(args.out / "bench.json").steps
    names = [w.name for w in select(args.workloads) if w.name not in done]
    lanes = _lanes()
    free = SimpleQueue[tuple[int, list[int]]]()
    for room in [*enumerate(lanes)] * STARTED:
        free.put(room)
    pool = ThreadPoolExecutor(STARTED * len(lanes))
    with contextlib.ExitStack() as stack:
        for lane in range(len(lanes)):
            stack.enter_context(Turns(args.scratch / "turns", lane).lane())
        jobs = {name: pool.submit(_rows_of, name, free, args) for name in names}
        reference.compute(args.scratch / "reference", names)
        if "layernorm" in names:
            yield "copy bandwidth", _copy_bandwidth
    for name, job in jobs.items():
        yield name, job.result
    pool.shutdown(cancel_futures=True)


def _lanes() -> list[list[int]]:
    """The cores of each lane of the benchmark."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return [cores[:half], cores[half:]] if half >= LANE_CORES else [cores]


def _rows_of(name: str, free: SimpleQueue[tuple[int, list[int]]], args: argparse.Namespace) -> dict[str, Any]:
    """The rows of a workload, measured in a lane that has room for its process."""
    lane, cores = free.get()
    try:
        os.sched_setaffinity(0, cores)  # this thread's, and so that of the processes that it starts
        return _rows_in(lane, len(cores), name, args)
    finally:
        free.put((lane, cores))


def _rows_in(lane: int, cores: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The rows of a workload, the cores that it had, and the load of the machine before."""
    left, load = args.end - time.time(), os.getloadavg()[0]
    if left < 5:
        raise TimeoutError("no time was left")
    command = [sys.executable, "-m", "models.bench", "--rows", "--warm-cache", f"--workloads={name}",
               f"--rounds={args.rounds}", f"--round-s={args.round_s}", f"--systems={args.systems}",
               f"--batches={args.batches}", f"--reference={args.scratch / 'reference'}",
               f"--turns={args.scratch / 'turns'}", f"--lane={lane}"]
    run = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=left, check=False,
                         env={**os.environ, "TF_STITCH_CACHE": str(args.scratch / "cache" / name)})
    if run.returncode:
        raise RuntimeError(f"the process of {name} died with status {run.returncode}")
    rows = json.loads(run.stdout.splitlines()[-1])
    return {"rows": rows, "load_average": load, "cores": cores,
            **{f"{r['system']}{' dynamic' if r['dynamic'] else ''}": r["note"] or
               f"{r['kernels']} kernels {r['latency_us']:.0f} us {r['compile_s']:.1f} s error {r['max_rel_error']:.0e}"
               for r in rows}}


def _copy_bandwidth() -> dict[str, Any]:
    """Bytes read and written per second by copies of 256 MiB on the device, by the profiler."""
    import tensorflow as tf

    from tf_stitch import bench

    x = tf.zeros([64 << 20])
    bench.trace(lambda: bench.finish(tf.raw_ops.DeepCopy(x=x)))
    times = [t.gpu_busy_us for t in (bench.trace(lambda: bench.finish(tf.raw_ops.DeepCopy(x=x))) for _ in range(5))]
    known = [t for t in times if t]
    return {"gb_per_s": 2 * x.shape[0] * 4 / min(known) / 1e3 if known else None}


def dynamic_batches(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One rewrite for many batch sizes.  All workloads are prepared first, in half of the time."""
    from . import dynamic
    from .workloads import select

    done, sizes = Record(args.out / "dynamic.json").steps, range(1, args.sizes + 1)
    at = dynamic.which(args.compared or dynamic.TELLING, sizes)
    yield from dynamic.experiments([w for w in select(args.dynamic) if w.name not in done], sizes, at, args.end,
                                   cache=args.dynamic_cache, xla_latencies=args.xla_latencies)


def compiles_of_xla(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """XLA's compiles for the batch sizes that one rewrite serves, by processes side by side."""
    from . import xla_compiles
    from .workloads import select

    done = Record(args.out / "xla_compiles.json").steps
    yield from xla_compiles.experiments([w for w in select(args.dynamic) if w.name not in done],
                                        range(1, args.sizes + 1), args.end, args.xla_processes)


def second_process(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A second process with a full cache; several at a time start TensorFlow."""
    from . import restart
    from .workloads import select

    folders = {w.name: args.scratch / "cache" / w.name for w in select(args.workloads)}
    caches = {name: (folder, not folder.exists()) for name, folder in folders.items()}
    for name, found in restart.second_processes(caches, jobs=args.jobs):
        yield name, lambda found=found: found


def other_libraries(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """JAX and PyTorch, a row per workload and mode."""
    from .peers import session
    from .workloads import select

    names = [w.name for w in select(args.workloads)]
    reference.compute(args.scratch / "reference", names, weights=True)
    left = args.end - time.time()
    for row in session.rows(args.peers.split(","), names, args.scratch / "reference", left, rounds=args.rounds,
                            round_s=args.round_s):
        yield f"{row['workload']}, {row['how']}", lambda row=row: {"rows": [row], **row}


def machine(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the figures depend on."""
    from tf_stitch import bench

    said = {"command": args.command, "cores_of_a_workload": len(_lanes()[0])}
    said |= {"commit": args.commit} if args.commit else {}
    yield "machine", lambda: bench.machine() | said


RUN = {"machine": machine, "tests": tests, "sanitize": sanitize, "kernels": kernels, "workloads": workloads,
       "memory": memory, "bench": benchmark, "dynamic": dynamic_batches, "xla_compiles": compiles_of_xla,
       "restart": second_process, "peers": other_libraries}
REPORTED = ("bench", "dynamic", "xla_compiles", "restart", "peers")  # whose figures are in a report of models.report


# What is said of a step that did not fail, by part.
DETAILS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tests": lambda v: f"{v['passed']} passed, {v['failed']} failed, {v['skipped']} skipped, {v['seconds']:.0f} s",
    "sanitize": lambda v: f"{v['compared']} compared, {v['wrong']} wrong; {v['summary']}",
    "kernels": lambda v: f"{v['compared']} compared, {v['wrong']} wrong",
    "workloads": lambda v: f"difference {v['max_difference']:.1e}, {v['stitched_runs']} stitched runs, "
                           f"{v['fallbacks']} fallbacks",
    "restart": lambda v: f"first answer after {v['first_answer_s']:.2f} s, of which rewriting {v['rewrite_s']:.2f} s; "
                         f"{v['fallbacks']} fallbacks",
}


# --- the command -----------------------------------------------------------------------------------

def summary(out: Path, parts: Sequence[str]) -> str:
    """What is known so far, as text."""
    records = {part: Record(out / f"{part}.json").steps for part in PARTS}
    facts = Record(out / "machine.json").steps.get("machine", {})
    lines = [f"{k}: {v}" for k, v in facts.items() if k != "seconds"]
    for part in parts:
        bad = {k: v["error"] for k, v in records[part].items() if "error" in v}
        lines.append(f"{part}: {len(records[part])} steps, {len(bad)} failed")
        lines += [f"  {k}: {v}" for k, v in bad.items()]
        lines += [f"  {k}: {DETAILS[part](v)}" for k, v in records[part].items()
                  if part in DETAILS and "error" not in v]
        lines += [f"  {line}" for v in records[part].values() for line in v.get("what", ())]
    if any(records[p] for p in REPORTED):
        from . import report

        report.write(report.merged([out]), out / "results")
        lines.append((out / "results.txt").read_text())
    return "\n".join(lines) + "\n"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m models.gpu_check", description=(__doc__ or "").splitlines()[0])
    out = Path(os.environ.get("OUT", "gpu_check"))
    parser.add_argument("--out", type=Path, default=out, help="results folder")
    parser.add_argument("--minutes", type=float, default=8.5, help="when to stop (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--workloads", default="", help="comma-separated (default: all)")
    parser.add_argument("--systems", default="tensorflow,xla,stitched", help="comma-separated (default: %(default)s)")
    parser.add_argument("--batches", choices=("known", "unknown", "both"), default="both", help="of the benchmark")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds of the benchmark")
    parser.add_argument("--round-s", type=float, default=0.03, help="seconds of a round for each system")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help=f"chunks of {PER_CHUNK} random graphs")
    parser.add_argument("--products", type=int, default=4, help=f"chunks of {PRODUCTS} random products")
    parser.add_argument("--types", default=TYPES, help="of primitives, comma-separated (default: %(default)s)")
    parser.add_argument("--tools", default="memcheck,racecheck", help="of the sanitize part (default: %(default)s)")
    parser.add_argument("--tests", default="tests/gpu", help="files of the tests part (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=6, help="of the tests part (default: %(default)s)")
    parser.add_argument("--dynamic", default="", help="workloads of dynamic and xla_compiles (default: all)")
    parser.add_argument("--sizes", type=int, default=100, help="batch sizes of these parts, from 1")
    parser.add_argument("--compared", default="", help="of them compared with static rewrites: comma-separated, or "
                        "how many (default: six that models.dynamic finds telling)")
    parser.add_argument("--dynamic-cache", type=Path, help="folder with a kernel cache for each workload of that "
                        "part (default: kernels are compiled anew)")
    parser.add_argument("--xla-latencies", type=int, default=0, help="compared sizes that are timed on XLA, too")
    parser.add_argument("--xla-processes", type=int, default=0, help="of xla_compiles (default: three for four cores)")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time in the restart part")
    parser.add_argument("--peers", default="jax,torch", help="of the peers part, or a mode as torch:max-autotune")
    parser.add_argument("--scratch", type=Path, help="folder of float64 results and kernel caches (default: a new one)")
    parser.add_argument("--dry", action="store_true", help="without a GPU: CUDA text is compiled, the host's is run")
    parser.add_argument("--commit", default="", help="what the results name as the commit, where there is no git")
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=RUN, help=argparse.SUPPRESS)
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
    with tempfile.TemporaryDirectory() as folder:
        argv = [*argv, f"--command={' '.join(['python', '-m', 'models.gpu_check', *argv])}"]
        if args.scratch is None:
            args.scratch, argv = Path(folder), [*argv, f"--scratch={folder}"]
        _run_parts(args, argv, end)
    parts = args.parts.split(",")
    text = summary(args.out, parts)
    (args.out / "summary.txt").write_text(text)
    print(text, flush=True)
    steps = [Record(args.out / f"{part}.json").steps for part in parts]
    return int(any(not s or any("error" in v or v.get("failed") or v.get("wrong") for v in s.values()) for s in steps))


def _run_parts(args: argparse.Namespace, argv: Sequence[str], end: float) -> None:
    """Gives each part its share of the time; what one leaves the next ones have."""
    parts = args.parts.split(",")
    command = [sys.executable, "-m", "models.gpu_check", *argv]
    facts = subprocess.Popen([*command, "--part=machine", f"--end={end}"])  # beside the first part's start
    for k, part in enumerate(parts):
        share = WEIGHTS[part] / sum(WEIGHTS[p] for p in parts[k:])
        until = time.time() + (end - time.time()) * share
        print(f"{part}: {until - time.time():.0f} s", flush=True)
        for _ in range(6):  # a process that died is started again
            left = max(5, end - time.time())
            try:
                if subprocess.run([*command, f"--part={part}", f"--end={until}"], check=False,
                                  timeout=left).returncode == 0:
                    break
            except subprocess.TimeoutExpired:
                print("  out of time", flush=True)
                break
    facts.wait()


if __name__ == "__main__":
    sys.exit(main())
