"""Memory-bound kernels: which share of the device's copy bandwidth they reach, without TensorFlow.

    python -m models.memory_bound [--cases block,softmax] [--out FILE.json] [--dry]

Copies are measured in the same run: the driver's (cuMemcpyDtoD) and a kernel's.  Every case runs on buffers that take
turns, so that nothing of a run is left in the second-level cache for the next ("cold"), and on the same buffers again
("warm").  Bytes are those of inputs and outputs, each moved once.  ``--dry`` compiles only; it needs no GPU.
"""
from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tf_stitch import compiler
from tf_stitch.backend import cuda
from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.program.program import KernelStep, Program
from tf_stitch.schedule.target import CUDA

CACHE = 200 << 20  # bytes that buffers must have together to leave nothing in the cache
LAUNCHES, ROUNDS = 20, 7
AHEAD = 1 << 30  # bytes of the copy that keeps the device busy while launches queue up
COPY = 'extern "C" __global__ void copy(const float4* x, float4* y) { int64_t i = blockIdx.x * 256ll + threadIdx.x; ' \
       "y[i] = x[i]; }"


# --- cases -------------------------------------------------------------------------------------------

def _rows(b: Builder, per_row: Node, like: Node) -> Node:
    return b.broadcast_to(b.reshape(per_row, (*like.shape[:-1], 1)), like.shape)


def _softmax(b: Builder, x: Node) -> Node:
    e = b.ew("exp", b.ew("sub", x, _rows(b, b.reduce("max", x, (1,)), x)))
    return b.ew("div", e, _rows(b, b.reduce("sum", e, (1,)), x))


def _norm(b: Builder, x: Node) -> Node:
    n = x.shape[1]
    gain, bias = b.param((n,), x.dtype, "gain"), b.param((n,), x.dtype, "bias")
    mean = b.ew("mul", b.reduce("sum", x, (1,)), b.const(1 / D.static(n), x.dtype))
    d = b.ew("sub", x, _rows(b, mean, x))
    variance = b.ew("mul", b.reduce("sum", b.ew("mul", d, d), (1,)), b.const(1 / D.static(n), x.dtype))
    scale = _rows(b, b.ew("rsqrt", b.ew("add", variance, b.const(1e-5, x.dtype))), x)
    return b.ew("add", b.ew("mul", b.ew("mul", d, scale), b.broadcast_to(gain, x.shape)), b.broadcast_to(bias, x.shape))


def _gelu(b: Builder, x: Node) -> Node:
    tail = b.ew("erfc", b.ew("mul", b.ew("neg", x), b.const(np.sqrt(0.5), x.dtype)))
    return b.ew("mul", b.ew("mul", x, b.const(0.5, x.dtype)), tail)


def _residual(b: Builder, x: Node) -> Node:
    return _norm(b, b.ew("add", x, b.param(x.shape, x.dtype, "z")))


def _bias_gelu(b: Builder, x: Node) -> Node:
    return _gelu(b, b.ew("add", x, b.broadcast_to(b.param(x.shape[1:], x.dtype, "bias"), x.shape)))


OPERATIONS: dict[str, Callable[[Builder, Node], Node]] = {
    "block": lambda b, x: _softmax(b, _gelu(b, _norm(b, x))),  # models/blocks.py
    "softmax": _softmax, "norm": _norm, "residual": _residual, "bias_gelu": _bias_gelu,
    "map": lambda b, x: b.ew("add", b.ew("mul", x, b.const(2.0, x.dtype)), b.param(x.shape, x.dtype, "y")),
    "swish": lambda b, x: b.ew("mul", x, b.ew("sigmoid", x)),
    "row_sums": lambda b, x: b.reduce("sum", x, (1,)), "column_sums": lambda b, x: b.reduce("sum", x, (0,)),
    "transpose": lambda b, x: b.transpose(x, (1, 0)),
}
CASES: list[tuple[str, tuple[int, int], str]] = [
    ("block", (4096, 1024), "float32"), ("block", (65536, 1024), "float32"), ("block", (32, 1024), "float32"),
    ("softmax", (4096, 1024), "float32"), ("softmax", (32768, 128), "float32"), ("softmax", (4096, 1000), "float32"),
    ("softmax", (2048, 4096), "float32"), ("softmax", (1024, 30000), "float32"),
    ("softmax", (32768, 1024), "bfloat16"), ("norm", (4096, 1024), "float32"), ("norm", (65536, 768), "float32"),
    ("residual", (16384, 768), "float32"), ("residual", (4096, 4096), "float32"),
    ("residual", (16384, 768), "bfloat16"), ("bias_gelu", (4096, 4096), "float32"),
    ("bias_gelu", (8192, 4096), "float16"), ("map", (128, 1024), "float32"), ("map", (4096, 1024), "float32"),
    ("map", (65536, 1024), "float32"), ("map", (65536, 1024), "float16"), ("swish", (16384, 1024), "float32"),
    ("row_sums", (65536, 4096), "float32"), ("column_sums", (4096, 1024), "float32"),
    ("column_sums", (65536, 1024), "float32"), ("column_sums", (262144, 64), "float32"),
    ("transpose", (4096, 4096), "float32"), ("transpose", (16384, 8192), "float32"),
    ("transpose", (8192, 8192), "float16")]


def make(operation: str, shape: tuple[int, int], dtype: str) -> Graph:
    """The graph of a case."""
    b = Builder()
    return b.finish([OPERATIONS[operation](b, b.param(shape, dtype, "x"))], operation)


def moved_bytes(program: Program) -> int:
    """Bytes of a program's inputs and outputs."""
    return sum(int(np.prod(b.shape, dtype=np.int64)) * DTYPES[b.dtype].size
               for b in program.buffers if b.kind in ("input", "output"))


# --- measuring ---------------------------------------------------------------------------------------

class Clock:
    """Times what is enqueued: a long copy goes first, so that the device never waits for the host."""

    def __init__(self, driver: Any):
        self.driver = driver
        self.memory = [driver.mem_alloc(AHEAD) for _ in range(2)]

    def __call__(self, launches: list[Callable[[], Any]]) -> float:
        """Microseconds of one of the launches: the median of rounds."""
        times = []
        for _ in range(ROUNDS):
            start, end = self.driver.Event(), self.driver.Event()
            self.driver.memcpy_dtod_async(*self.memory, AHEAD)
            start.record()
            for launch in launches:
                launch()
            end.record()
            end.synchronize()
            times.append(start.time_till(end) * 1e3 / len(launches))
        return statistics.median(times)

    def copies(self) -> dict[str, float]:
        """GB/s that copies of 256 MiB read and write."""
        size, (to, source) = 256 << 20, self.memory
        kernel = self.driver.module_from_buffer(
            cuda.compile_text(COPY, (cuda.device_target(),))[cuda.device_target()]).get_function("copy")
        by_driver = self([lambda: self.driver.memcpy_dtod_async(to, source, size)] * 5)
        by_kernel = self([lambda: kernel(source, to, block=(256, 1, 1), grid=(size // 4096, 1))] * 5)
        return {"driver": 2 * size / by_driver / 1e3, "kernel": 2 * size / by_kernel / 1e3}


def measure(program: Program, clock: Clock) -> tuple[float, float]:
    """Microseconds of a run on buffers that take turns, and of one on the same buffers."""
    rng = np.random.default_rng(0)
    inputs = [np.resize(rng.standard_normal(1 << 20), D.product(b.shape)).astype(DTYPES[b.dtype].numpy).reshape(b.shape)
              for b in sorted((b for b in program.buffers if b.kind == "input"), key=lambda b: b.index)]
    sets = [cuda.Loaded(program, inputs) for _ in range(min(1 + CACHE // moved_bytes(program), LAUNCHES))]
    try:
        runs = [s.prepared() for s in sets]
        clock([runs[0]])
        return clock([runs[i % len(runs)] for i in range(LAUNCHES)]), clock([runs[0]] * LAUNCHES)
    finally:
        for s in sets:
            s.free()


class Shares:
    """Measures cases against the copies of the same run; with ``dry`` it only compiles them."""

    def __init__(self, dry: bool = False):
        self.clock = None if dry else Clock(cuda.driver())

    @functools.cached_property
    def copies(self) -> dict[str, float]:
        """GB/s of copies."""
        return self.clock.copies() if self.clock else {}

    def row(self, operation: str, shape: tuple[int, int], dtype: str) -> dict[str, Any]:
        """What a case moves, how long it takes, and its share of the faster copy's bandwidth."""
        program = compiler.build_program(make(operation, shape, dtype), CUDA)
        moved = moved_bytes(program)
        row = {"case": operation, "shape": shape, "dtype": dtype, "bytes": moved,
               "kernels": sum(isinstance(s, KernelStep) for s in program.steps)}
        if self.clock is None:
            cuda.compile_text(program.text)
            return row
        best = max(self.copies.values())
        for name, us in zip(("cold", "warm"), measure(program, self.clock), strict=True):
            row |= {f"{name}_us": us, f"{name}_share": moved / us / 1e3 / best}
        return row


def main(argv: list[str] | None = None) -> int:
    """Prints a line per case."""
    parser = argparse.ArgumentParser("python -m models.memory_bound", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="", help=f"comma-separated, of {', '.join(OPERATIONS)} (default: all)")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument("--dry", action="store_true", help="compile only")
    args = parser.parse_args(argv)
    wanted = [c for c in args.cases.split(",") if c]
    unknown = set(wanted) - set(OPERATIONS)
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; use {', '.join(OPERATIONS)}")
    shares = Shares(args.dry)
    done: list[dict[str, Any]] = []
    for one in [lambda: {"case": "copy", **shares.copies},
                *(lambda c=c: shares.row(*c) for c in CASES if not wanted or c[0] in wanted)]:
        done.append(row := one())
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(done, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
