"""What a StitchedProgram costs on a GPU besides its kernels' work: per node, per kernel, with and without CUDA graphs.

    python -m models.op_cost [--out models/results/op_cost.json]

Programs of N dependent kernels over 1024 floats (about 2 us each on the device).  "chained": nodes one behind the
other in one function, time per node; "sync": one node, called and waited for; "moving": as sync, while every output
is kept, so that addresses never repeat.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128)
NODES = 40
TEXT = r"""
struct cost_args { void* buffers[2]; int64_t dims[1]; int64_t blocks; };
extern "C" __global__ void cost_step(const __grid_constant__ cost_args p) {
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
  if (i < p.dims[0]) ((float*)p.buffers[1])[i] = ((const float*)p.buffers[0])[i] * 0.5f + 1.0f;
}
"""


def program(kernels: int) -> bytes:
    """float32 [n] through ``kernels`` kernels."""
    from tf_stitch.backend import cuda
    from tf_stitch.ir import dims as D
    from tf_stitch.ir.graph import SymbolSource
    from tf_stitch.program import serialize
    from tf_stitch.program.program import Buffer, KernelStep, Program

    n = D.symbol("n", 0, None)
    buffers = [Buffer("input", 0, "float32", (n,)), *(Buffer("temp", i, "float32", (n,)) for i in range(kernels - 1)),
               Buffer("output", 0, "float32", (n,))]
    steps = [KernelStep("cost_step", (i, i + 1), (n,), D.ceildiv(n, 256), 0, 1000, 256, f"step_{i}")
             for i in range(kernels)]
    return serialize.dumps(Program(buffers, list(steps), {"n": SymbolSource("dim", 0, 0)}, [], TEXT,
                                   cuda.compile_text(TEXT, ("sm_90", "compute_90")), "cost"))


def chain(data: bytes | None, nodes: int) -> Callable[[Any], Any]:
    """A function of ``nodes`` programs, or of as many sines when there is no program."""
    import tensorflow as tf

    from tf_stitch import runtime

    spec = tf.TensorSpec([None], tf.float32)
    fallback = tf.function(lambda x: x * 0.5 + 1.0, autograph=False).get_concrete_function(spec)

    def call(x):
        fallback.add_to_graph(tf.compat.v1.get_default_graph())
        for _ in range(nodes):
            if data is None:
                x = tf.sin(x)
            else:
                x, = runtime.load().stitched_program(args=[x], Tout=[tf.float32], program=data, fallback=fallback,
                                                     output_shapes=[[None]])
        return x

    return tf.function(call, input_signature=[spec], autograph=False)


def microseconds(f: Callable[[], Any], times: int, keep: bool = False) -> float:
    """The median of ``times`` calls, each waited for."""
    import tensorflow as tf

    for _ in range(30):
        f()
    kept = []
    tf.test.experimental.sync_devices()
    took = []
    for _ in range(times):
        start = time.perf_counter()
        result = f()
        tf.test.experimental.sync_devices()
        took.append(time.perf_counter() - start)
        if keep:
            kept.append(result)
    return statistics.median(took) * 1e6


def measure() -> list[dict[str, Any]]:
    """Rows of this process: graphs are as the environment says."""
    import tensorflow as tf

    with tf.device("/GPU:0"):
        x = tf.random.normal([1024])
        busy = tf.random.normal([4096, 4096])
        for _ in range(300):  # clocks up
            busy = tf.linalg.matmul(busy, busy) * 1e-2
        tf.test.experimental.sync_devices()
    plain = {nodes: chain(None, nodes) for nodes in (0, NODES)}
    empty = {nodes: microseconds(lambda f=f: f(x), 60) for nodes, f in plain.items()}
    rows = [{"kernels": 0, "chained_us": (empty[NODES] - empty[0]) / NODES, "sync_us": empty[0], "moving_us": None,
             "what": "TensorFlow's Sin"}]
    for kernels in SIZES:
        data = program(kernels)
        one, many = chain(data, 1), chain(data, NODES)
        rows.append({"kernels": kernels, "what": "stitched",
                     "chained_us": (microseconds(lambda f=many: f(x), 40) - empty[0]) / NODES,
                     "sync_us": microseconds(lambda f=one: f(x), 100),
                     "moving_us": microseconds(lambda f=one: f(x), 100, keep=True)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser("python -m models.op_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "op_cost.json")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print("ROWS" + json.dumps(measure()))
        return 0
    rows = []
    for graphs in ("1", "0"):
        env = {**os.environ, "TF_STITCH_CUDA_GRAPHS": graphs}
        done = subprocess.run([sys.executable, "-m", "models.op_cost", "--part"], env=env, stdout=subprocess.PIPE,
                              text=True, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("ROWS"))
        rows += [{"graphs": graphs == "1", **row} for row in json.loads(line[4:])]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    import tensorflow as tf

    details = [tf.config.experimental.get_device_details(d) for d in tf.config.list_physical_devices("GPU")]
    args.out.write_text(json.dumps({
        "device": details[0].get("device_name") if details else None, "tensorflow": tf.__version__,
        "date": time.strftime("%Y-%m-%d"), "command": "python -m models.op_cost", "rows": rows}, indent=1) + "\n")
    print(f"{'graphs':>6} {'kernels':>7} {'chained':>9} {'sync':>9} {'moving':>9}  us")
    for r in rows:
        moving = f"{r['moving_us']:9.2f}" if r["moving_us"] is not None else f"{'':9}"
        print(f"{r['graphs']!s:>6} {r['kernels']:7} {r['chained_us']:9.2f} {r['sync_us']:9.2f} {moving}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
