"""Float64 results of the workloads, computed on the CPU, one process a workload, and kept in files.

    python -m models.reference --folder DIR [--workloads lr,rnn] [--batch 8] [--weights]

DIR/NAME.npz holds ``output_I``; with ``--weights`` also the float32 ``weight_I`` and ``input_I``, for systems that
share no code with TensorFlow.  A file that is there is taken as it is.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def path_of(folder: Path, name: str) -> Path:
    """Where a workload's arrays are kept."""
    return folder / f"{name}.npz"


def read(path: Path, kind: str) -> list[np.ndarray]:
    """The arrays of one kind ("output", "weight" or "input") in their order."""
    with np.load(path) as data:
        count = sum(k.startswith(f"{kind}_") for k in data.files)
        return [data[f"{kind}_{i}"] for i in range(count)]


def compute(folder: Path, names: Sequence[str], *, batch: int | None = None, weights: bool = False,
            workers: int = 0) -> None:
    """Files for all names, ``workers`` processes at a time (0: one per usable core).

    Raises RuntimeError with what the first process that failed printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [n for n in names if not path_of(folder, n).exists()]
    running: list[tuple[str, subprocess.Popen[str]]] = []
    limit = workers or len(os.sched_getaffinity(0))
    while waiting or running:
        while waiting and len(running) < limit:
            name = waiting.pop(0)
            running.append((name, _start(folder, name, batch, weights)))
        name, process = running.pop(0)
        text, _ = process.communicate()
        if process.returncode:
            for _, other in running:
                other.kill()
            raise RuntimeError(f"The float64 results of {name} could not be computed: {text[-2000:]}")


def _start(folder: Path, name: str, batch: int | None, weights: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "models.reference", f"--folder={folder}", f"--workloads={name}", "--here",
               *([f"--batch={batch}"] if batch else []), *(["--weights"] if weights else [])]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _compute_here(folder: Path, name: str, batch: int | None, weights: bool) -> None:
    import tensorflow as tf

    from .workloads import REGISTRY

    workload = REGISTRY[name]
    twin = workload.instance(tf.float64)
    arrays = {f"output_{i}": a for i, a in enumerate(twin.results(tf.function(twin.function), twin.inputs(batch)))}
    if weights:
        single = workload.instance()
        arrays |= {f"weight_{i}": v.numpy() for i, v in enumerate(single.params.variables)}
        arrays |= {f"input_{i}": x.numpy() for i, x in enumerate(single.inputs(batch))}
    new = path_of(folder, name).with_suffix(f".{os.getpid()}.npz")
    np.savez(new, **arrays)
    os.replace(new, path_of(folder, name))


def main(argv: Sequence[str] | None = None) -> int:
    """Computes the files that are missing."""
    parser = argparse.ArgumentParser("python -m models.reference", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the files go")
    parser.add_argument("--workloads", default="", help="comma-separated (default: all)")
    parser.add_argument("--batch", type=int, help="batch size (default: the workload's own)")
    parser.add_argument("--weights", action="store_true", help="keep weights and inputs too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        _compute_here(args.folder, args.workloads, args.batch, args.weights)
    else:
        from .workloads import select

        compute(args.folder, [w.name for w in select(args.workloads)], batch=args.batch, weights=args.weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
