"""Requests of one model at batch 1, from many streams: joined along the batch, packed launch by launch, or separate.

    python -m models.merging [--streams 4,16,64] [--seconds 0.4] [--models mlp,lstm,bert] [--out models/results]

Writes h200_merging.json: rows {model, streams, system, us, merged_share}, where us is wall time over answers (of all
streams together) and merged_share the share of requests that ran joined.  Each stream is a session call that runs the
model again and again in a loop of the graph, so that Python's cost per call is in none of them.  Systems:

  merged        the scheduler (custom_ops/scheduler.h) may join requests (custom_ops/merge.h)
  joined        it joins them wherever it can, though it be slower
  superkernel   the scheduler without that: requests share launches, each with its own matrices
  separate      no scheduler: TensorFlow's stream takes one request after the other
  one_batch     one stream whose requests have as many rows as there are streams: what joining could reach at best

Every answer is compared with that of a lone request.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import tf_stitch
from tf_stitch import bench
from tf_stitch.serving import scheduler

RESULTS = Path(__file__).resolve().parent / "results"
STREAMS = (4, 16, 64)
MERGE = {"superkernel": 0, "merged": 1, "joined": 2}
SYSTEMS = (*MERGE, "separate", "one_batch")
TOLERANCE = 2e-2  # of the largest result: products may be in TF32, whose sums depend on the batch


def mlp(x, *weights):
    """Dense layers: x [b, n], weights [n, n]."""
    for w in weights:
        x = tf.nn.relu(x @ w)
    return x


def lstm(x, w, b):
    """The last state: x [b, steps, n], w [2 n, 4 n], b [4 n]."""
    n = w.shape[1] // 4
    h = c = tf.zeros([tf.shape(x)[0], n])
    for t in range(x.shape[1]):
        i, j, f, o = tf.split(tf.concat([x[:, t], h], 1) @ w + b, 4, 1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(c)
    return h


def normed(x):
    mean = tf.reduce_mean(x, -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(tf.reduce_mean(tf.square(x - mean), -1, keepdims=True) + 1e-6)


def bert(x, *weights):
    """Encoder layers: x [b, tokens, n]; weights of a layer [n, 3 n], [n, n], [n, 4 n], [4 n, n]."""
    batch, (tokens, n), heads = tf.shape(x)[0], x.shape[1:], 4
    for i in range(0, len(weights), 4):
        qkv, out, up, down = weights[i:i + 4]
        parts = tf.reshape(tf.reshape(x, [-1, n]) @ qkv, [batch, tokens, 3, heads, n // heads])
        q, k, v = tf.unstack(tf.transpose(parts, [2, 0, 3, 1, 4]))
        mixed = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * (n // heads) ** -0.5) @ v
        mixed = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, n]) @ out
        x = normed(x + tf.reshape(mixed, [batch, tokens, n]))
        hidden = tf.nn.gelu(tf.reshape(x, [-1, n]) @ up) @ down
        x = normed(x + tf.reshape(hidden, [batch, tokens, n]))
    return x[:, 0]


def rows(x):
    """No products, for machines without a GPU: x [b, n]."""
    return tf.nn.softmax(normed(tf.tanh(x) * 2 + 1))


# name: function, dims of an input but for the batch, shapes of weights
MODELS: dict[str, tuple[Callable[..., Any], list[int], list[list[int]]]] = {
    "mlp": (mlp, [1024], [[1024, 1024]] * 4),
    "mlp_4096": (mlp, [4096], [[4096, 4096]] * 4),
    "lstm": (lstm, [16, 512], [[1024, 2048], [2048]]),
    "lstm_2048": (lstm, [8, 2048], [[4096, 8192], [8192]]),
    "bert": (bert, [64, 256], [[256, 768], [256, 256], [256, 1024], [1024, 256]] * 2),
    "bert_768": (bert, [16, 768], [[768, 2304], [768, 768], [768, 3072], [3072, 768]] * 4),
    "rows": (rows, [1024], []),
}


def rewritten(name: str, target: str) -> tuple[tf.compat.v1.GraphDef, list[str], str]:
    """A model's stitched graph, the names of its inputs (weights come after x) and of its output."""
    f, dims, shapes = MODELS[name]
    specs = [tf.TensorSpec([None, *dims]), *(tf.TensorSpec(s) for s in shapes)]
    with tf.device("/GPU:0" if target.startswith("cuda") else "/CPU:0"):
        concrete = tf.function(f, autograph=False).get_concrete_function(*specs)
    options = tf_stitch.Options(target=target, superkernels=True)
    graph, report = tf_stitch.rewrite_graph_def(concrete.graph.as_graph_def(), options=options)
    if not any(n.op == "StitchedProgram" for n in graph.node):
        raise RuntimeError(f"Nothing of {name} is stitched: {report}")
    return graph, [t.name for t in concrete.inputs], concrete.outputs[0].name


class Loop:
    """A session that runs a model as often as it is told, one run after the other."""

    def __init__(self, name: str, graph: tf.compat.v1.GraphDef, inputs: Sequence[str], output: str, device: str):
        _, dims, shapes = MODELS[name]
        rng = np.random.default_rng(7)
        config = tf.compat.v1.ConfigProto()
        config.gpu_options.allow_growth = True
        config.experimental.session_metadata.name = name
        with tf.Graph().as_default() as g, tf.device(device):
            weights = [tf.compat.v1.Variable((rng.standard_normal(s) / max(s[0], 1) ** 0.5).astype(np.float32),
                                             use_resource=True) for s in shapes]
            read = [w.read_value() for w in weights]
            self.x = tf.compat.v1.placeholder(tf.float32, [None, *dims])
            with tf.device("/CPU:0"):
                self.count = tf.compat.v1.placeholder(tf.int32, [])

            def run(i, x, _):
                feeds = dict(zip((n.split(":")[0] for n in inputs), [x, *read], strict=True))
                (y,) = tf.graph_util.import_graph_def(graph, feeds, [output], name="model")
                with tf.control_dependencies([y]):
                    return i + 1, tf.identity(x), y

            start = [tf.constant(0), tf.identity(self.x), tf.zeros([tf.shape(self.x)[0], self.width(name)])]
            shapes_of = [tf.TensorShape([]), self.x.shape, tf.TensorShape([None, None])]
            self.y = tf.compat.v1.while_loop(lambda i, x, y: i < self.count, run, start, shapes_of,
                                             parallel_iterations=1)[2]
            first = tf.compat.v1.global_variables_initializer()
        self.session = tf.compat.v1.Session(graph=g, config=config)
        self.session.run(first)

    @staticmethod
    def width(name: str) -> int:
        _, dims, shapes = MODELS[name]
        return shapes[0][1] // 4 if MODELS[name][0] is lstm else dims[-1]

    def __call__(self, x: np.ndarray, count: int) -> np.ndarray:
        return self.session.run(self.y, {self.x: x, self.count: count})


@contextlib.contextmanager
def scheduled(system: str) -> Iterator[None]:
    """The scheduler as a system has it."""
    if system not in MERGE:
        yield
        return
    scheduler.acquire({"merge": MERGE[system]})
    try:
        yield
    finally:
        scheduler.release()


def counted() -> tuple[int, int]:
    """(requests, those of them that ran joined) so far."""
    found = scheduler.stats()
    merged = sum(d["merged_requests"] for d in found.get("devices", []))
    return sum(t["completed"] for t in found.get("tenants", {}).values()), merged


def measure(loop: Loop, xs: Sequence[np.ndarray], wants: Sequence[np.ndarray], system: str,
            seconds: float) -> dict[str, float]:
    """Microseconds per answer and the share that ran joined.  Raises RuntimeError for a wrong answer."""
    if system == "one_batch":
        xs, wants = [np.concatenate(xs)], [np.concatenate(wants)]
    streams = len(wants[0]) if system == "one_batch" else len(xs)
    with scheduled(system), concurrent.futures.ThreadPoolExecutor(len(xs)) as pool:
        def go(count: int) -> float:
            begin = time.perf_counter()
            for got, want in zip(pool.map(lambda x: loop(x, count), xs), wants, strict=True):
                if not np.abs(got - want).max() <= TOLERANCE * np.abs(want).max():
                    raise RuntimeError(f"{system} gives a wrong answer to one of {streams} streams.")
            return time.perf_counter() - begin

        go(60)  # plans, graphs, measured times
        count = max(20, int(100 * seconds / 2 / max(go(100), 1e-6)))
        before = counted()
        elapsed = min(go(count) for _ in range(2))
        requests, merged = (b - a for a, b in zip(before, counted(), strict=True))
    return {"us": elapsed * 1e6 / count / streams, "merged_share": merged / requests if requests else 0.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--models", default=",".join(name for name in MODELS if name != "rows"))
    parser.add_argument("--seconds", type=float, default=0.4, help="of one measurement")
    parser.add_argument("--target", default="cuda:sm_90" if tf.config.list_physical_devices("GPU") else "host")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    tf.compat.v1.disable_control_flow_v2()
    device = "/GPU:0" if args.target.startswith("cuda") else "/CPU:0"
    rows, facts = [], bench.machine()
    for name in args.models.split(","):
        loop = Loop(name, *rewritten(name, args.target), device)
        rng = np.random.default_rng(1)
        xs = [rng.standard_normal((1, *MODELS[name][1])).astype(np.float32) for _ in range(64)]
        wants = [loop(x, 1) for x in xs]
        for streams in map(int, args.streams.split(",")):
            for system in SYSTEMS:
                found = measure(loop, xs[:streams], wants[:streams], system, args.seconds)
                rows.append({"model": name, "streams": streams, "system": system, **found})
                print(f"{name:6} {streams:3} {system:12} {found['us']:9.2f} us/answer  joined "
                      f"{found['merged_share']:.2f}", flush=True)
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "h200_merging.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
