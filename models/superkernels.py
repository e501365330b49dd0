"""Superkernels at kernel level: matrix products of many streams, each with operands in allocations of its own.

    python -m models.superkernels [--streams 2,16,64] [--rounds 8] [--out models/results]

Writes h200_superkernels.json (and .txt): rows {shape, streams, system, us}, us being the time for one product of each;
rounds follow each other as under load.  Systems:

  superkernel   the scheduler's own packing (custom_ops/superkernel_cuda.cc), its host work included
  timeslice     PyTorch, one stream after the other, the device waited for in between
  hyperq        PyTorch, each stream's product on a CUDA stream of its own
  cublas        PyTorch's batched product (cuBLAS) on one stacked tensor: no separate allocations; a lower bound
  timeslice_c, hyperq_c   as above, but cuBLASLt is called from C++, without Python's cost per call

PyTorch runs in a process of its own.  Products are float32 with TF32 allowed, and are compared with float64.
"""
from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
CONVS = {"conv2": (3136, 64, 576), "conv3": (784, 128, 1152), "conv4": (196, 256, 2304), "conv5": (49, 512, 4608)}
SHAPES = {**CONVS, "lstm": (1, 4096, 1024), "matvec": (1, 256, 256)}  # m, n, k
MIXED = "mixed"  # each stream one of CONVS
STREAMS = (2, 4, 8, 16, 32, 64, 128)
HOW = {"superkernel": 0, "timeslice_c": 1, "hyperq_c": 2}
TOLERANCE = 2e-3  # of the largest result: TF32 has 10 bits of mantissa
LONG_US, MOST_ROUNDS = 20e3, 200  # of a measurement: what the host takes to begin and to end is no part of a round


def shapes_of(name: str, streams: int) -> list[tuple[int, int, int]]:
    """(m, n, k) of each stream's product."""
    convs = list(CONVS.values())
    return [convs[i % len(convs)] if name == MIXED else SHAPES[name] for i in range(streams)]


@functools.lru_cache(maxsize=8)
def operands(shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random lhs and rhs; the same for a seed in every process."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)


def is_right(out: np.ndarray, lhs: np.ndarray, rhs: np.ndarray) -> bool:
    """Whether a product is as exact as TF32 lets it be."""
    want = lhs.astype(np.float64) @ rhs.astype(np.float64)
    return bool(np.abs(out - want).max() <= TOLERANCE * np.abs(want).max())


def enough(us: float, rounds: int) -> int:
    """Rounds of so many microseconds that make a measurement."""
    return max(rounds, min(MOST_ROUNDS, round(LONG_US / max(us, 1.0))))


# --- the op library -----------------------------------------------------------------------------------

class Product(ctypes.Structure):
    """tfs_product of custom_ops/scheduler_c_api.h."""

    _fields_ = [("lhs", ctypes.c_void_p), ("rhs", ctypes.c_void_p), ("out", ctypes.c_void_p),
                ("m", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64)]


def _library() -> ctypes.CDLL:
    from tf_stitch import runtime

    runtime.load()
    lib = runtime.library()
    lib.tfs_scheduler_last_error.restype = ctypes.c_char_p
    lib.tfs_run_products.argtypes = [ctypes.POINTER(Product), ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                                     ctypes.POINTER(ctypes.c_double)]
    return lib


def measure_own(name: str, streams: int, rounds: int) -> dict[str, float]:
    """Microseconds by system; raises RuntimeError when a product is wrong or cannot be run."""
    from tf_stitch.backend import cuda

    lib, driver = _library(), cuda.driver()
    products, kept = (Product * streams)(), []
    for i, shape in enumerate(shapes_of(name, streams)):
        m, n, k = shape
        lhs, rhs = operands(shape, i % 4)
        memory = [driver.mem_alloc(size * 4) for size in (m * k, k * n, m * n)]
        driver.memcpy_htod(memory[0], lhs)
        driver.memcpy_htod(memory[1], rhs)
        kept.append((memory, lhs, rhs))
        products[i] = Product(*map(int, memory), m, n, k)
    found = {}
    try:
        for system, how in HOW.items():
            for memory, lhs, rhs in kept:
                driver.memset_d8(memory[2], 0xFF, 4 * lhs.shape[0] * rhs.shape[1])
            times, count = [], rounds
            for _ in range(4):
                us = ctypes.c_double()
                if lib.tfs_run_products(products, streams, 1, how, count, ctypes.byref(us)):
                    raise RuntimeError(lib.tfs_scheduler_last_error().decode())
                times.append(us.value)
                count = enough(times[0], rounds)
            found[system] = statistics.median(times[1:])
            for memory, lhs, rhs in (kept[0], kept[-1], kept[streams // 2]):
                out = np.empty((lhs.shape[0], rhs.shape[1]), np.float32)
                driver.memcpy_dtoh(out, memory[2])
                if not is_right(out, lhs, rhs):
                    raise RuntimeError(f"{system} computes a wrong product: {name}, {streams} streams.")
    finally:
        for memory, _, _ in kept:
            for m in memory:
                m.free()
    return found


# --- PyTorch --------------------------------------------------------------------------------------------

def measure_torch(name: str, streams: int, rounds: int) -> dict[str, float]:
    """Microseconds by system."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    pairs = [[torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda"), torch.empty(m, n, device="cuda")]
             for m, n, k in shapes_of(name, streams)]
    lanes = [torch.cuda.Stream() for _ in range(min(streams, 32))]  # PyTorch has 32 at most
    torch.cuda.synchronize()

    def timeslice() -> None:
        for lhs, rhs, out in pairs:
            torch.mm(lhs, rhs, out=out)
            torch.cuda.synchronize()

    def hyperq() -> None:
        for i, (lhs, rhs, out) in enumerate(pairs):
            with torch.cuda.stream(lanes[i % len(lanes)]):
                torch.mm(lhs, rhs, out=out)

    systems: dict[str, Callable[[], Any]] = {"timeslice": timeslice, "hyperq": hyperq}
    if name != MIXED:
        stacked = [torch.stack([p[i] for p in pairs]) for i in range(2)]
        systems["cublas"] = lambda: torch.bmm(*stacked)
    found = {}
    for system, run in systems.items():
        run()
        times, count = [], rounds
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / count * 1e6)
            count = enough(times[0], rounds)
        found[system] = statistics.median(times[1:])
    return found


# --- the whole --------------------------------------------------------------------------------------------

def rows_of(measure: Callable[[str, int, int], dict[str, float]], streams: Sequence[int],
            rounds: int) -> list[dict[str, Any]]:
    """Rows of every shape and number of streams."""
    rows = []
    for name in (*SHAPES, MIXED):
        for count in streams:
            for system, us in measure(name, count, rounds).items():
                rows.append({"shape": name, "streams": count, "system": system, "us": round(us, 2)})
                print(f"{name:7} {count:4} {system:12} {us:9.1f} us", flush=True)
    return rows


def ratios(rows: Sequence[dict[str, Any]], streams: int = 64) -> dict[str, dict[str, float]]:
    """How many times faster the superkernel is: by system, of conv2 to conv5 (geometric mean) and each other shape."""
    us = {(r["shape"], r["system"]): r["us"] for r in rows if r["streams"] == streams}
    out: dict[str, dict[str, float]] = {}
    for system in dict.fromkeys(s for _, s in us if s != "superkernel"):
        each = {name: us[name, system] / us[name, "superkernel"] for name in (*SHAPES, MIXED) if (name, system) in us}
        convs = [each.pop(name) for name in CONVS if name in each]
        faster = {"conv2-conv5": statistics.geometric_mean(convs), **each}
        out[system] = {k: round(v, 2) for k, v in faster.items()}
    return out


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people: microseconds for one product of each stream, by system."""
    us = {(r["shape"], r["streams"], r["system"]): r["us"] for r in rows}
    systems = list(dict.fromkeys(r["system"] for r in rows))
    out = Table("shape", "streams", *systems)
    for shape, streams in dict.fromkeys((r["shape"], r["streams"]) for r in rows):
        cells = (us.get((shape, streams, s)) for s in systems)
        out.add_row(shape, str(streams), *("-" if v is None else f"{v:.1f}" for v in cells))
    return out


def write(folder: Path, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Writes the record and its table, and returns how many times faster the superkernel is."""
    from tf_stitch import bench

    found = ratios(rows, 64 if any(r["streams"] == 64 for r in rows) else rows[-1]["streams"])
    lines = [f"times as fast as {system}: " + ", ".join(f"{name} {ratio}" for name, ratio in faster.items())
             for system, faster in found.items()]
    record = {**facts, "superkernel is faster than": found, "rows": rows}
    bench.write(folder, "h200_superkernels", record, facts, [table(rows)], lines)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)), help="numbers of streams")
    parser.add_argument("--rounds", type=int, default=8, help="of a measurement at least")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--torch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    streams = [int(s) for s in args.streams.split(",")]
    if args.torch:
        args.torch.write_text(json.dumps(rows_of(measure_torch, streams, args.rounds)))
        return 0
    rows = rows_of(measure_own, streams, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "torch.json")
        subprocess.run([sys.executable, "-m", "models.superkernels", "--torch", str(other), "--streams", args.streams,
                        "--rounds", str(args.rounds)], check=True)
        rows += json.loads(other.read_text())
    from tf_stitch import bench

    print(json.dumps(write(args.out, bench.machine(), rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
