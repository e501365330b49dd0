"""Measures a workload in JAX or PyTorch and prints its row, with the keys of :class:`tf_stitch.bench.Row`, as JSON.

    python -m models.peers jax|torch WORKLOAD --folder DIR [--mode max-autotune]

DIR holds the files of :mod:`models.reference` (made with ``--weights``).  MODE is torch.compile's; jax.jit has none.
TensorFlow is not imported.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..reference import path_of, read
from .definitions import DEFINITIONS, TRAINING
from .ops import JaxOps, TorchOps

MODES = ("max-autotune", "reduce-overhead", "default")
Profile = tuple[int, int, float]  # kernels, copies and fills, microseconds in which the GPU ran any of them


class Jax:
    """jax.jit: the weights are arguments; a training step's are donated and replaced."""

    def __init__(self, mode: str):
        import jax

        self.jax, self.ops, self.version = jax, JaxOps(), jax.__version__
        self.label = "jax.jit"

    def prepare(self, name: str, weights: list[np.ndarray], inputs: list[np.ndarray]) -> Callable[[], Any]:
        trains = name in TRAINING
        state = [self.ops.prepare(w) for w in weights]
        given = [self.jax.device_put(x) for x in inputs]

        def run(weights: list[Any], *xs: Any) -> Any:
            return DEFINITIONS[name](self.ops, iter(weights))(*xs)

        step = self.jax.jit(run, donate_argnums=0 if trains else ())

        def call() -> Any:
            nonlocal state
            if not trains:
                return self.jax.block_until_ready(step(state, *given))
            loss, state = self.jax.block_until_ready(step(state, *given))
            return loss, state

        return call

    def arrays(self, outputs: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in self.jax.tree.leaves(outputs)]

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """XLA's allocator keeps one peak for the whole process, which says nothing of a call."""
        return None

    def profile(self, call: Callable[[], Any]) -> Profile | None:
        with tempfile.TemporaryDirectory() as folder:
            with self.jax.profiler.trace(folder):
                call()
            events = [e for path in Path(folder).rglob("*.xplane.pb")
                      for plane in self.jax.profiler.ProfileData.from_file(str(path)).planes
                      if plane.name.startswith("/device:GPU")
                      for line in plane.lines if line.name.startswith("Stream") for e in line.events]
        return _profile((e.name, e.start_ns, e.duration_ns) for e in events)


class Torch:
    """torch.compile over a module whose parameters are the weights; TF32 products, as TensorFlow's default is."""

    def __init__(self, mode: str):
        import torch

        self.torch, self.ops, self.version = torch, TorchOps(), torch.__version__
        self.mode, self.label = mode, f"torch.compile({mode})"
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True

    def prepare(self, name: str, weights: list[np.ndarray], inputs: list[np.ndarray]) -> Callable[[], Any]:
        torch, ops = self.torch, self.ops

        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.held = torch.nn.ParameterList(torch.nn.Parameter(ops.prepare(w), False) for w in weights)

            def forward(self, *xs: Any) -> Any:
                return DEFINITIONS[name](ops, iter(list(self.held)))(*xs)

        torch._dynamo.reset()
        given = [torch.from_numpy(np.array(x)).to(ops.device) for x in inputs]
        compiled = torch.compile(Module(), mode=None if self.mode == "default" else self.mode)

        def call() -> Any:
            with torch.no_grad():
                out = compiled(*given)
            if ops.device == "cuda":
                torch.cuda.synchronize()
            return out

        return call

    def arrays(self, outputs: Any) -> list[np.ndarray]:
        return [x.cpu().numpy() for x in self.torch.utils._pytree.tree_leaves(outputs)]

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        if self.ops.device != "cuda":
            return None
        self.torch.cuda.reset_peak_memory_stats()
        before = self.torch.cuda.memory_allocated()
        call()
        return self.torch.cuda.max_memory_allocated() - before

    def profile(self, call: Callable[[], Any]) -> Profile | None:
        from torch.profiler import ProfilerActivity, profile

        if self.ops.device != "cuda":
            return None
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
        gpu = self.torch.autograd.DeviceType.CUDA
        return _profile((e.name, e.time_range.start * 1e3, e.time_range.elapsed_us() * 1e3)
                        for e in found.events() if e.device_type == gpu)


PEERS = {"jax": Jax, "torch": Torch}


def _profile(events: Any) -> Profile | None:
    """Kernels, copies and busy time of (name, start ns, length ns) events; None when there are none (on a CPU)."""
    kernels = copies = 0
    busy = end = 0.0
    for name, start, length in sorted(events, key=lambda e: e[1]):
        copy = name.lower().startswith(("memcpy", "memset"))
        kernels, copies = kernels + (not copy), copies + copy
        busy += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    return (kernels, copies, busy / 1e3) if kernels else None


def measure(peer: Any, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compile time, error, memory, kernels and latency of one workload."""
    path = path_of(args.folder, name)
    call = peer.prepare(name, read(path, "weight"), read(path, "input"))
    start = time.perf_counter()
    outputs = call()
    first = time.perf_counter() - start
    row: dict[str, Any] = {"max_rel_error": _error(peer.arrays(outputs), read(path, "output"))}
    del outputs
    call(), call()  # torch records CUDA graphs in the calls after the first
    if args.wait:
        print("compiled", flush=True)
        sys.stdin.readline()
    row["peak_bytes"] = peer.peak_bytes(call)
    profiled = peer.profile(call)
    if profiled:
        row["kernels"], row["memcpys"], row["gpu_busy_us"] = profiled
    times = _times(call, args.rounds, args.round_s)
    return row | {"latency_us": statistics.median(times) * 1e6, "min_us": min(times) * 1e6,
                  "rounds_us": [round(t * 1e6, 2) for t in times],
                  "compile_s": max(0.0, first - statistics.median(times))}


def _times(call: Callable[[], Any], rounds: int, round_s: float) -> list[float]:
    """Mean seconds of a call, round by round."""
    start = time.perf_counter()
    call(), call(), call()
    count = max(1, min(1000, int(3 * round_s / (time.perf_counter() - start))))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
    return times


def _error(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Largest difference over the largest value, worst output."""
    if len(outputs) != len(reference):
        raise ValueError(f"There are {len(outputs)} outputs but {len(reference)} reference outputs.")
    worst = 0.0
    for got, want in zip(outputs, reference):
        if got.shape != want.shape:
            raise ValueError(f"An output has shape {got.shape} but the reference has {want.shape}.")
        scale = np.abs(want).max() or 1.0
        worst = max(worst, float(np.abs(got.astype(np.float64) - want).max() / scale))
    return worst


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The row of the workload; a library that cannot run it gives a row that says why."""
    row: dict[str, Any] = {"workload": args.workload, "system": args.peer, "note": "", "how": args.peer}
    try:
        peer = PEERS[args.peer](args.mode)
        row |= {"how": peer.label, "version": peer.version}
        row |= measure(peer, args.workload, args)
    except Exception as error:
        row["note"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    return row


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m models.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=PEERS, help="the library")
    parser.add_argument("workload", choices=DEFINITIONS, help="the workload")
    parser.add_argument("--folder", type=Path, required=True, help="files of models.reference, made with --weights")
    parser.add_argument("--mode", choices=MODES, default="max-autotune", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=20, help="rounds (default: %(default)s)")
    parser.add_argument("--round-s", type=float, default=0.05, help="seconds of a round (default: %(default)s)")
    parser.add_argument("--wait", action="store_true", help="print 'compiled', then measure when a line can be read")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; exit status 1 when the workload could not be run."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    row = run(parse(argv))
    print(json.dumps(row), flush=True)
    return int(bool(row["note"]))


if __name__ == "__main__":
    sys.exit(main())
