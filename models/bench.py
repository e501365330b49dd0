"""The benchmark: every workload on TensorFlow, XLA and tf_stitch, in one process and interleaved.

    python -m models.bench [--workloads lr,rnn] [--systems tensorflow,stitched] [--batches both] [--peers jax,torch]
                           [--rounds 20] [--quick] [--profile] [--plots]

Writes models/results/NAME.json and NAME.txt.  Every workload is listed, those where tf_stitch loses too.  The stitched
system is ``tf_stitch.function``, called as any user calls it; peers run in processes of their own (models/peers).
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from tf_stitch import bench

from . import plots, reference
from .peers import session
from .turns import Turns
from .workloads import REGISTRY, Instance, Workload, select

TOLERANCE = 1e-5  # of the largest value
SLACK = 4  # times TensorFlow's own error
NO_ROUNDING = 1e-2  # more than TF32 makes of any workload
RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = {"known": (False,), "unknown": (True,), "both": (False, True)}  # is the batch dim unknown to the systems?


class Runner:
    """A workload compiled by one system; a training step has weights of its own."""

    def __init__(self, instance: Instance, function: Callable[..., Any], args: list[tf.Tensor]):
        self.instance, self.function, self.args = instance, function, args
        trained = instance.params.variables if instance.workload.training else []
        self.weights = [(v, v.numpy()) for v in trained]

    def __call__(self) -> Any:
        return bench.finish(self.function(*self.args))

    def results(self) -> list[np.ndarray]:
        """What a call from the weights of the beginning gives; a training step's new weights are part of it."""
        for variable, value in self.weights:
            variable.assign(value)
        return self.instance.results(self.function, self.args)


Function = Callable[..., Any]


def _tensorflow(function: Function, signature: list[tf.TensorSpec]) -> Function:
    return tf.function(function, input_signature=signature)


def _xla(function: Function, signature: list[tf.TensorSpec]) -> Function:
    return tf.function(function, input_signature=signature, jit_compile=True)


def _stitched(function: Function, signature: list[tf.TensorSpec]) -> Function:
    import tf_stitch

    return tf_stitch.function(function, input_signature=signature)


COMPILE = {"tensorflow": _tensorflow, "xla": _xla, "stitched": _stitched}
COMPILERS = ("xla", "stitched")  # whose first call is compared; TensorFlow's is made while others may measure
FIXED = ("xla",)  # compiled for one batch size, whatever the signature says


def runner(workload: Workload, system: str, batch: int | None, dynamic: bool) -> Runner:
    """The workload under a system; ``dynamic`` leaves the batch dim unknown to it."""
    instance = workload.instance()
    signature = instance.signature(None if dynamic else batch or workload.batch)
    return Runner(instance, COMPILE[system](instance.function, signature), instance.inputs(batch))


def run(workload: Workload, args: argparse.Namespace) -> list[bench.Row]:
    """Measures one workload on every system, for the known and for an unknown batch size, all interleaved."""
    turns = Turns(args.turns, args.lane)
    for system in args.systems if args.turns else ():
        with turns.busy():
            start(system)
    with turns.busy():
        runners = {(s, d): runner(workload, s, args.batch, d) for d in args.shapes for s in args.systems
                   if not (d and s in FIXED and False in args.shapes)}
    rows = {_label(*key): bench.Row(workload.name, _label(*key)) for key in runners}
    plain, compiled = ({_label(*key): call for key, call in runners.items() if (key[0] in COMPILERS) is wanted}
                       for wanted in (False, True))
    good: dict[str, bench.Call] = {}
    with turns.busy():
        good |= bench.first_calls(rows, plain)
    with turns.lane():
        note = _Rewrites()
        for name, call in compiled.items():
            with turns.busy():
                good |= bench.first_calls(rows, {name: call}, note)
        with turns.quiet():
            bench.observe(rows, {name: good[name] for name in rows if name in good}, args.rounds, args.round_s)
        with turns.busy():
            working = {key: call for key, call in runners.items() if _label(*key) in good}
            results = {} if args.no_errors else {key: call.results() for key, call in working.items()}
            for key in working if args.profile else ():
                _print_profile(workload, key, args)
    for key in runners:
        rows[_label(*key)].system, rows[_label(*key)].dynamic = key
    with turns.busy():
        wanted = reference.read(reference.path_of(args.reference, workload.name), "output") if results else []
        for key, found in results.items():
            rows[_label(*key)].max_rel_error = bench.max_rel_error(found, wanted)
    return _in_order(list(rows.values()), args)


def start(system: str) -> None:
    """What the first call of any function in a process loads is not in the first workload's compile time."""
    def small(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        y = tf.nn.conv2d(x, w, 1, "SAME")
        return tf.nn.softmax(tf.linalg.matmul(y, y, transpose_b=True))

    given = tf.ones([1, 8, 8, 4]), tf.ones([3, 3, 4, 4])
    bench.finish(COMPILE[system](small, [tf.TensorSpec(t.shape, t.dtype) for t in given])(*given))


def _print_profile(workload: Workload, key: tuple[str, bool], args: argparse.Namespace) -> None:
    system, dynamic = key
    young = runner(workload, system, args.batch, dynamic)
    young(), young()  # the first calls compile and fill caches
    title = f"{workload.name} on {_label(system, dynamic)}"
    args.console.print(bench.profile_table(bench.trace(young), title, args.profile))


def _label(system: str, dynamic: bool) -> str:
    return f"{system}, any batch" if dynamic else system


class _Rewrites:
    """Notes in a system's row how long tf_stitch rewrote during its first call, and says that it is over."""

    def __init__(self) -> None:
        self.seen = len(self._reports())

    @staticmethod
    def _reports() -> list[Any]:
        from tf_stitch import hook

        return hook.reports()

    def __call__(self, row: bench.Row) -> None:
        fresh = self._reports()[self.seen:]
        self.seen += len(fresh)
        if fresh:
            row.rewrite_s = sum(report.seconds for _, report in fresh)
        print(f"  {row.workload}: {row.system} compiled in {row.compile_s:.2f} s", file=sys.stderr, flush=True)


def _in_order(rows: list[bench.Row], args: argparse.Namespace) -> list[bench.Row]:
    """By batch (known, unknown), then by system; what compiles for one size stands in both, as what it is."""
    if set(args.shapes) == {False, True}:
        how = "compiled for the measured batch"
        rows += [replace(r, dynamic=True, how=how) for r in rows if r.system in FIXED and not r.dynamic]
    return sorted(rows, key=lambda r: (r.dynamic, args.systems.index(r.system)))


def peaks_here(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Peak bytes of a call, by workload and system (with ", any batch"); a system that fails is left out."""
    found: dict[str, dict[str, int]] = {}
    for workload in args.workloads:
        for dynamic in args.shapes:
            for system in args.systems:
                call = runner(workload, system, args.batch, dynamic)
                with contextlib.suppress(Exception):  # the timed run reports the failure
                    call()
                    found.setdefault(workload.name, {})[_label(system, dynamic)] = bench.peak_bytes(call)
    return found


def peaks(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """The same from another process, whose CPU allocator counts every byte (and would distort the timing here)."""
    names = ",".join(w.name for w in args.workloads)
    command = [sys.executable, "-m", "models.bench", "--peaks", f"--workloads={names}",
               f"--systems={','.join(args.systems)}", f"--batches={args.batches}",
               *([f"--batch={args.batch}"] if args.batch else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=RESULTS.parents[1],
                         env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"})
    return json.loads(run.stdout.splitlines()[-1])


def is_wrong(row: bench.Row, rows: Sequence[bench.Row]) -> bool:
    """True when a system's error is too large beside TensorFlow's, and TensorFlow's when it is no rounding."""
    if row.max_rel_error is None:
        return False
    return not row.max_rel_error <= (NO_ROUNDING if row.system == "tensorflow" else allowed_error(row, rows))


def allowed_error(row: bench.Row, rows: Sequence[bench.Row]) -> float:
    """What is no mistake beside TensorFlow's own error on a workload (a GPU multiplies in TF32 by default)."""
    own = [r.max_rel_error for r in rows if (r.workload, r.system) == (row.workload, "tensorflow") and r.max_rel_error]
    return max(TOLERANCE, SLACK * max(own, default=0.0))


def verdicts(rows: list[bench.Row]) -> list[str]:
    """What falls short: a system that cannot run a workload or is wrong; where stitched is not the fastest (by 2%),
    runs more kernels than XLA, keeps the GPU busy longer or compiles longer."""
    out = []
    for r in rows:
        label = f"{r.workload}: {_label(r.system, r.dynamic)}"
        if r.note:
            out.append(f"{label} cannot run it: {r.note}")
        if is_wrong(r, rows):
            out.append(f"{label} is off by {r.max_rel_error:.1e} of the largest value")
        if r.system == "stitched":
            out += [f"{label} {short}" for short in _shortfalls(r, rows)]
    return out


def _shortfalls(row: bench.Row, rows: list[bench.Row]) -> Iterator[str]:
    others = [r for r in rows if (r.workload, r.dynamic) == (row.workload, row.dynamic) and r.system != row.system]
    for other in others:
        faster = bench.ratio(rows, row.workload, row.system, other.system, row.dynamic)
        if faster is not None and faster < 0.98:
            yield f"takes {1 / faster:.2f} times the time of {other.system}"
    for xla in (r for r in others if r.system == "xla"):
        for name, key, form in (("kernels", "kernels", "{}"), ("GPU-busy us", "gpu_busy_us", "{:.0f}"),
                                ("seconds to compile", "compile_s", "{:.2f}")):
            ours, theirs = getattr(row, key), getattr(xla, key)
            if ours is not None and theirs is not None and ours > theirs:
                yield f"has {form.format(ours)} {name}, XLA {form.format(theirs)}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m models.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="", help=f"comma-separated, of {', '.join(REGISTRY)} (default: all)")
    parser.add_argument("--systems", default=",".join(bench.SYSTEMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--round-s", type=float, default=0.1, help="seconds a round gives a system")
    parser.add_argument("--batch", type=int, help="batch size (default: the workload's own)")
    parser.add_argument("--batches", choices=SHAPES, default="known",
                        help="whether the systems know the batch size (default: %(default)s)")
    parser.add_argument("--peers", default="", help="comma-separated: jax, torch, or a mode, as torch:max-autotune")
    parser.add_argument("--peer-seconds", type=float, default=600, help="time for the peers")
    parser.add_argument("--reference", type=Path, help="folder of the float64 results (default: computed anew)")
    parser.add_argument("--quick", action="store_true", help="few short rounds, and no float64 run")
    parser.add_argument("--no-errors", action="store_true", help="skip the float64 run")
    parser.add_argument("--profile", type=int, nargs="?", const=15, default=0, metavar="N",
                        help="print the N ops and kernels that take longest")
    parser.add_argument("--warm-cache", action="store_true", help="let stitched kernels come from the cache on disk")
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", action="store_true", help="print the rows as JSON, one line, instead of files")
    parser.add_argument("--turns", type=Path, help="folder of locks that several benchmarks on a machine share")
    parser.add_argument("--lane", type=int, default=0, help="with --turns: which of them share this one's cores")
    parser.add_argument("--plots", action="store_true", help="draw the results, too (PNG and SVG; needs matplotlib)")
    parser.add_argument("--name", default="", help="name of the result files (default: cpu or gpu)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(argv)
    args.systems = [s.strip() for s in args.systems.split(",")]
    unknown = [s for s in args.systems if s not in COMPILE]
    if unknown:
        parser.error(f"unknown system {', '.join(unknown)}; use {', '.join(COMPILE)}")
    args.peers = [p.strip() for p in args.peers.split(",") if p.strip()]
    if not all(map(session.modes, args.peers)):
        parser.error(f"unknown peer; use {', '.join(session.MODES)}, or torch:max-autotune")
    args.shapes = SHAPES[args.batches]
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.quick:
        args.rounds, args.round_s, args.no_errors = min(args.rounds, 5), 0.02, True
    try:
        args.workloads = select(args.workloads)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 when a result is wrong or a system failed."""
    args = parse(argv)
    if args.peaks:
        print(json.dumps(peaks_here(args)))
        return 0
    with contextlib.nullcontext() if args.warm_cache else fresh_cache():
        return _print_rows(args) if args.rows else _main(args)


def _print_rows(args: argparse.Namespace) -> int:
    args.console = Console(stderr=True, width=180)
    print(json.dumps([asdict(row) for workload in args.workloads for row in run(workload, args)]))
    return 0


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Stitched kernels are compiled anew, as on the first use of a model."""
    with tempfile.TemporaryDirectory() as folder, cache(folder):
        yield


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """The process's environment has ``values`` until the body ends."""
    before = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextlib.contextmanager
def cache(folder: str | Path) -> Iterator[None]:
    """Compiled kernels are kept in, and come from, a folder."""
    with environment({"TF_STITCH_CACHE": str(folder)}):
        yield


def peer_rows(args: argparse.Namespace) -> tuple[list[bench.Row], dict[str, str]]:
    """Rows of JAX and PyTorch, and their versions.  The files in ``args.reference`` must hold the weights."""
    found = list(session.rows(args.peers, [w.name for w in args.workloads], args.reference, args.peer_seconds,
                              rounds=args.rounds, round_s=args.round_s))
    return summed_up(found)


def summed_up(found: Sequence[dict[str, Any]]) -> tuple[list[bench.Row], dict[str, str]]:
    """The best row of each peer for each workload, and the peers' versions."""
    return [row_of(r) for r in session.best(found)], {r["system"]: r["version"] for r in found if "version" in r}


def row_of(found: dict[str, Any]) -> bench.Row:
    """A peer's row; what other modes took is put into words."""
    others = "; ".join(f"{how}: {us if isinstance(us, str) else f'{us:.0f} us'}"
                       for how, us in found.get("others_us", {}).items())
    how = found["how"] + (f" ({others})" if others else "")
    known = {f.name for f in fields(bench.Row)}
    return bench.Row(**{**{k: v for k, v in found.items() if k in known}, "how": how})


def by_workload(rows: list[bench.Row], workloads: Sequence[Workload]) -> list[bench.Row]:
    """Rows in the order of the workloads, those of a workload together."""
    order = [w.name for w in workloads]
    return sorted(rows, key=lambda r: (order.index(r.workload), r.dynamic))


def _main(args: argparse.Namespace) -> int:
    args.console = Console(width=None if sys.stdout.isatty() else 180)
    with contextlib.ExitStack() as stack:
        args.reference = args.reference or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.peers or not args.no_errors:
            with args.console.status("float64 results"):
                reference.compute(args.reference, [w.name for w in args.workloads], batch=args.batch,
                                  weights=bool(args.peers))
        rows, facts = _measure(args)
    document = bench.document(rows, facts)
    args.console.print(bench.table(document))
    found = verdicts(rows)
    for line in found:
        args.console.print(line)
    data, text = bench.save(document, args.out, args.name or ("gpu" if facts["gpus"] else "cpu"), ["", *found])
    drawn = plots.draw(document, args.out / data.stem) if args.plots else []
    args.console.print("Written: " + ", ".join(str(p) for p in (data, text, *drawn)))
    return int(any((r.note and r.system in COMPILE) or is_wrong(r, rows) for r in rows))


def _measure(args: argparse.Namespace) -> tuple[list[bench.Row], dict[str, Any]]:
    rows: list[bench.Row] = []
    facts = bench.machine()
    with Progress(console=args.console, transient=True) as progress:
        task = progress.add_task("", total=len(args.workloads) + bool(args.peers))
        for workload in args.workloads:
            progress.update(task, description=f"{workload.name}: {workload.about}")
            rows += run(workload, args)
            progress.advance(task)
        if args.peers:
            progress.update(task, description=f"{', '.join(args.peers)}")
            more, facts["peers"] = peer_rows(args)
            rows = by_workload([*rows, *more], args.workloads)
    if not (args.quick or facts["gpus"]):
        measured = peaks(args)
        for r in rows:
            if r.system in COMPILE:
                r.peak_bytes = measured.get(r.workload, {}).get(_label(r.system, r.dynamic))
    return rows, facts


if __name__ == "__main__":
    sys.exit(main())
