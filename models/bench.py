"""The benchmark: every workload on TensorFlow, XLA and tf_stitch, in one process and interleaved.

    python -m models.bench [--workloads lr,rnn] [--systems tensorflow,stitched] [--rounds 20] [--quick] [--profile]

Writes models/results/NAME.json and NAME.txt.  Every workload is listed, those where tf_stitch loses too.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from tf_stitch import bench

from .workloads import REGISTRY, Instance, Workload, select

RESULTS = Path(__file__).resolve().parent / "results"
TOLERANCE = 1e-5
SLACK = 4  # how much more than TensorFlow's own error is still no mistake (a GPU multiplies in TF32 by default)


@dataclass
class Runner:
    """A workload compiled by one system; a training step has weights of its own."""

    instance: Instance
    function: Callable[..., Any]
    args: list[tf.Tensor]

    def __call__(self) -> Any:
        return bench.finish(self.function(*self.args))


def _tensorflow(instance: Instance, signature: list[tf.TensorSpec]) -> Callable[..., Any]:
    return tf.function(instance.function, input_signature=signature)


def _xla(instance: Instance, signature: list[tf.TensorSpec]) -> Callable[..., Any]:
    return tf.function(instance.function, input_signature=signature, jit_compile=True)


def _stitched(instance: Instance, signature: list[tf.TensorSpec]) -> Callable[..., Any]:
    import tf_stitch

    return tf_stitch.function(instance.function, input_signature=signature)


COMPILE = {"tensorflow": _tensorflow, "xla": _xla, "stitched": _stitched}


def runner(workload: Workload, system: str, batch: int | None, dynamic: bool) -> Runner:
    """The workload under a system; ``dynamic`` leaves the batch dim unknown to it."""
    instance = workload.instance()
    signature = instance.signature(None if dynamic else batch or workload.batch)
    return Runner(instance, COMPILE[system](instance, signature), instance.inputs(batch))


def errors(workload: Workload, systems: Sequence[str], batch: int | None, dynamic: bool) -> dict[str, float]:
    """Largest error of one call against the float64 instance, from fresh weights; failing systems are left out."""
    twin = workload.instance(tf.float64)
    reference = twin.results(tf.function(twin.function), twin.inputs(batch))
    found = {}
    for system in systems:
        fresh = runner(workload, system, batch, dynamic)
        found[system] = bench.max_rel_error(fresh.instance.results(fresh.function, fresh.args), reference)
    return found


def run(workload: Workload, args: argparse.Namespace) -> list[bench.Row]:
    """Measures one workload on every system."""
    batch, dynamic = args.batch, args.dynamic
    runners = {s: runner(workload, s, batch, dynamic) for s in args.systems}
    rows = bench.measure(workload.name, dict(runners), rounds=args.rounds, round_s=args.round_s)
    good = [s for s in args.systems if not rows[s].note]
    for system, error in ({} if args.no_errors else errors(workload, good, batch, dynamic)).items():
        rows[system].max_rel_error = error
    if args.profile:
        for system in good:
            young = runner(workload, system, batch, dynamic)
            young(), young()  # the first calls compile and fill caches
            title = f"{workload.name} on {system}"
            args.console.print(bench.profile_table(bench.trace(young), title, args.profile))
    return list(rows.values())


def peaks_here(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Peak bytes of a call, by workload and system; a system that fails is left out."""
    found: dict[str, dict[str, int]] = {}
    for workload in args.workloads:
        for system in args.systems:
            call = runner(workload, system, args.batch, args.dynamic)
            with contextlib.suppress(Exception):  # the timed run reports the failure
                call()
                found.setdefault(workload.name, {})[system] = bench.peak_bytes(call)
    return found


def peaks(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """The same from another process, whose CPU allocator counts every byte (and would distort the timing here)."""
    names = ",".join(w.name for w in args.workloads)
    command = [sys.executable, "-m", "models.bench", "--peaks", f"--workloads={names}",
               f"--systems={','.join(args.systems)}", *(["--dynamic"] if args.dynamic else []),
               *([f"--batch={args.batch}"] if args.batch else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=RESULTS.parents[1],
                         env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"})
    return json.loads(run.stdout.splitlines()[-1])


def is_wrong(row: bench.Row, rows: Sequence[bench.Row]) -> bool:
    """True when a system's error is too large, by itself and beside TensorFlow's."""
    if row.max_rel_error is None:
        return False
    own = [r.max_rel_error for r in rows if (r.workload, r.system) == (row.workload, "tensorflow")]
    base = own[0] if row.system != "tensorflow" and own and own[0] is not None else 0.0
    return not row.max_rel_error <= max(TOLERANCE, SLACK * base)


def verdicts(rows: list[bench.Row]) -> list[str]:
    """What falls short: slower than TensorFlow by more than 2%, or wrong."""
    out = []
    for r in rows:
        faster = bench.ratio(rows, r.workload, r.system)
        if r.note:
            out.append(f"{r.workload}: {r.system} cannot run it: {r.note}")
        if r.system == "stitched" and faster is not None and faster < 0.98:
            out.append(f"{r.workload}: stitched takes {1 / faster:.2f} times TensorFlow's time")
        if is_wrong(r, rows):
            out.append(f"{r.workload}: {r.system} is off by {r.max_rel_error:.1e} of the largest value")
    return out


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m models.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="", help=f"comma-separated, of {', '.join(REGISTRY)} (default: all)")
    parser.add_argument("--systems", default=",".join(bench.SYSTEMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--round-s", type=float, default=0.1, help="seconds a round gives a system")
    parser.add_argument("--batch", type=int, help="batch size (default: the workload's own)")
    parser.add_argument("--dynamic", action="store_true", help="leave the batch dim unknown")
    parser.add_argument("--quick", action="store_true", help="few short rounds, and no float64 run")
    parser.add_argument("--no-errors", action="store_true", help="skip the float64 run")
    parser.add_argument("--profile", type=int, nargs="?", const=15, default=0, metavar="N",
                        help="print the N ops and kernels that take longest")
    parser.add_argument("--warm-cache", action="store_true", help="let stitched kernels come from the cache on disk")
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help="name of the result files (default: cpu or gpu)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(argv)
    args.systems = [s.strip() for s in args.systems.split(",")]
    unknown = [s for s in args.systems if s not in COMPILE]
    if unknown:
        parser.error(f"unknown system {', '.join(unknown)}; use {', '.join(COMPILE)}")
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
        return _main(args)


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Stitched kernels are compiled anew, as on the first use of a model."""
    old = os.environ.get("TF_STITCH_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TF_STITCH_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("TF_STITCH_CACHE")
            if old is not None:
                os.environ["TF_STITCH_CACHE"] = old


def _main(args: argparse.Namespace) -> int:
    args.console = Console()
    rows: list[bench.Row] = []
    facts = bench.machine()
    with Progress(console=args.console, transient=True) as progress:
        task = progress.add_task("", total=len(args.workloads))
        for workload in args.workloads:
            progress.update(task, description=f"{workload.name}: {workload.about}")
            rows += run(workload, args)
            progress.advance(task)
    if not (args.quick or facts["gpus"]):
        measured = peaks(args)
        for r in rows:
            r.peak_bytes = measured.get(r.workload, {}).get(r.system)
    args.console.print(bench.table(rows, facts))
    found = verdicts(rows)
    for line in found:
        args.console.print(line)
    name = args.name or ("gpu" if facts["gpus"] else "cpu")
    data, text = bench.save(rows, facts, args.out, name)
    args.console.print(f"Written: {data} and {text}")
    wrong = any(r.note or is_wrong(r, rows) for r in rows)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
