"""Functions of very many small, independent parts: plain, compiled by XLA, and stitched.

    python -m models.many [--cases sgd-600,adam-200,recommender,heads] [--systems tensorflow,xla,stitched] [--out DIR]

Optimizer steps for hundreds of variables of 1 to a million elements, a recommender with 200 features, 64 heads, and
hundreds of updates in several types.  What such functions cost is mostly launches: kernels are counted and timed by
the profiler (``busy us``), ``median us`` is a call with its results, ``error`` the largest relative difference from
TensorFlow's results and variables after ten calls.
"""
from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tf_stitch
from tf_stitch import bench

from . import training

STEPS = 10  # calls before results are compared
FEATURES, DENSE, BATCH = 200, 40, 64
HEADS = 64
SYSTEMS: dict[str, Callable[[Any], Any]] = {
    "tensorflow": tf.function, "xla": lambda f: tf.function(f, jit_compile=True), "stitched": tf_stitch.function}


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and the variables that it changes."""

    function: Callable[..., Any]
    inputs: list[tf.Tensor]
    variables: list[tf.Variable]


def shapes(count: int) -> list[tuple[int, ...]]:
    """Sizes of a network's variables: many biases and scales, matrices, a few of up to a million elements."""
    rng = np.random.default_rng(count)
    units, large = (1, 8, 10, 16, 32, 48, 64, 100, 128, 256), (512, 1000, 1024)
    found: list[tuple[int, ...]] = []
    for kind in rng.random(count):
        if kind < 0.45:
            found.append((int(rng.choice(units)),))
        else:
            sides = units if kind < 0.97 else large
            found.append((int(rng.choice(sides)), int(rng.choice(sides))))
    return found


def updates(optimizer: Callable[[], keras.optimizers.Optimizer], count: int) -> Case:
    """A step of an optimizer, whose gradients are made of one number that is given."""
    rng = np.random.default_rng(0)
    variables = [keras.Variable(rng.standard_normal(s), dtype="float32") for s in shapes(count)]
    made = optimizer()
    made.build(variables)

    def step(scale: tf.Tensor) -> Any:
        made.apply([tf.convert_to_tensor(v) * tf.cast(scale, v.dtype) for v in variables], variables)
        return scale

    return Case(step, [tf.constant(0.01)], [v.value for v in (*variables, *made.variables)])


def plain_updates(count: int) -> Case:
    """Gradient descent in types that the optimizers of Keras do not mix."""
    rng = np.random.default_rng(0)
    types = [("float32", "float16", "float64", "bfloat16")[i % 4] for i in range(count)]
    variables = [tf.Variable(tf.cast(rng.standard_normal(s), t)) for s, t in zip(shapes(count), types, strict=True)]

    def step(scale: tf.Tensor) -> Any:
        for v in variables:
            v.assign_sub(v * tf.cast(scale, v.dtype))
        return scale

    return Case(step, [tf.constant(0.01)], variables)


def recommender() -> Case:
    """200 features, hashed and looked up in tables of their own, 40 dense ones, put into buckets, and an MLP."""
    rng = np.random.default_rng(0)
    rows = [int(n) for n in rng.integers(50, 5000, FEATURES)]
    tables = [tf.Variable(rng.standard_normal((n, 16), np.float32)) for n in rows]
    scales = [tf.Variable(rng.standard_normal(16).astype(np.float32)) for _ in rows]
    buckets = [tf.Variable(rng.standard_normal((11, 16), np.float32)) for _ in range(DENSE)]
    edges = tf.constant(np.linspace(-2, 2, 10), tf.float32)
    sizes = [(FEATURES + DENSE) * 16, 256, 64, 1]
    dense = [tf.Variable(rng.standard_normal(s, np.float32) * s[0] ** -0.5) for s in itertools.pairwise(sizes)]

    def call(ids: list[tf.Tensor], values: tf.Tensor) -> tf.Tensor:
        parts = [tf.tanh(tf.gather(t, tf.math.floormod(i, n)) * s)
                 for t, i, n, s in zip(tables, ids, rows, scales, strict=True)]
        for k, table in enumerate(buckets):
            column = values[:, k]
            place = tf.reduce_sum(tf.cast(column[:, None] >= edges, tf.int32), 1)
            parts.append(tf.gather(table, place) * column[:, None])
        x = tf.concat(parts, 1)
        for w in dense[:-1]:
            x = tf.nn.relu(x @ w)
        return tf.sigmoid(x @ dense[-1])

    ids = [tf.constant(rng.integers(0, 1 << 30, BATCH), tf.int64) for _ in rows]
    return Case(call, [ids, tf.constant(rng.standard_normal((BATCH, DENSE)), tf.float32)], [])


def heads() -> Case:
    """A trunk and 64 heads of two layers, with 2 to 9 classes each."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> tf.Variable:
        return tf.Variable(rng.standard_normal(shape).astype(np.float32) * shape[0] ** -0.5)

    trunk = weight(64, 128)
    layers = [(weight(128, 32), weight(32), weight(32, 2 + k % 8), weight(2 + k % 8)) for k in range(HEADS)]

    def call(x: tf.Tensor) -> list[tf.Tensor]:
        x = tf.nn.relu(x @ trunk)
        return [tf.nn.softmax(tf.nn.relu(x @ w + a) @ v + b) for w, a, v, b in layers]

    return Case(call, [tf.constant(rng.standard_normal((16, 64)), tf.float32)], [])


CASES: dict[str, Callable[[], Case]] = {
    **{f"sgd-{n}": lambda n=n: updates(lambda: keras.optimizers.SGD(0.1), n) for n in (50, 200, 600)},
    "momentum-200": lambda: updates(lambda: keras.optimizers.SGD(0.1, momentum=0.9), 200),
    **{f"adam-{n}": lambda n=n: updates(lambda: keras.optimizers.Adam(1e-3, epsilon=1e-3), n) for n in (50, 200, 600)},
    "types-200": lambda: plain_updates(200), "recommender": recommender, "heads": heads}


@dataclass
class Made:
    """One system's function, with variables of its own."""

    system: str
    call: Callable[[], Any]
    compile_s: float
    results: list[np.ndarray]
    ops: int
    kernels: int
    busy_us: float | None


def make(name: str, system: str) -> Made:
    """Builds a case, calls it for the first time, and counts what a call executes."""
    case = CASES[name]()
    function = SYSTEMS[system](case.function)

    def call() -> Any:
        return bench.finish(function(*case.inputs))

    compile_s = bench.first_call_s(call)
    traced = bench.trace(call)
    for _ in range(STEPS - 3):
        call()
    results = [x.numpy().astype(np.float64) for x in (*tf.nest.flatten(call()), *case.variables)]
    ops, kernels = bench.counts(traced)
    print(f"{name}, {system}: {ops} ops, {kernels} kernels, compiled in {compile_s:.1f} s", flush=True)
    return Made(system, call, compile_s, results, ops, kernels, traced.gpu_busy_us)


def run(name: str, systems: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measures one case: a row per system."""
    made = [make(name, s) for s in systems]
    times = bench.interleave({m.system: m.call for m in made}, rounds)
    return [{"case": name, "system": m.system, "median_us": 1e6 * float(np.median(times[m.system])),
             "busy_us": m.busy_us, "ops": m.ops, "kernels": m.kernels, "compile_s": m.compile_s,
             "error": training.error(m.results, made[0].results, 1e-2)} for m in made]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    out = Table("case", "system", "median us", "busy us", "ops", "kernels", "compile s", "error")
    for r in rows:
        busy = "-" if r["busy_us"] is None else f"{r['busy_us']:.0f}"
        out.add_row(r["case"], r["system"], f"{r['median_us']:.0f}", busy, str(r["ops"]), str(r["kernels"]),
                    f"{r['compile_s']:.1f}", f"{r['error']:.1e}")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models.many", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for many.json and many.txt")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name in args.cases.split(","):
        rows += run(name, args.systems.split(","), args.rounds)
        Console(width=120).print(table(rows[-len(args.systems.split(",")):]))
        if args.out:
            bench.write(args.out, "many", rows, bench.machine(), [table(rows)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
