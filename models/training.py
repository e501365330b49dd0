"""Training steps of Keras models with Adam: plain, compiled by XLA, and stitched.

    python -m models.training [--models mlp,cnn,transformer] [--systems tensorflow,xla,stitched] [--out DIR]

A step is ``model.train_step`` in a function, on the same batch each time.  Ops and kernels are counted by the profiler;
``error`` is the largest relative difference of a variable from TensorFlow's after ten steps.  Adam's epsilon is 1e-3:
a smaller one makes steps of the rounding errors of gradients that are zero.
"""
from __future__ import annotations

import argparse
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

STEPS = 10  # before the weights are compared
layers = keras.layers


def mlp() -> tuple[keras.Model, tuple[int, ...]]:
    return keras.Sequential([keras.Input((784,)), layers.Dense(512, "relu"), layers.Dense(256, "relu"),
                             layers.Dense(10)]), (128, 784)


def cnn() -> tuple[keras.Model, tuple[int, ...]]:
    body: list[Any] = [keras.Input((32, 32, 3))]
    for channels in (32, 64, 64):
        body += [layers.Conv2D(channels, 3, padding="same", use_bias=False), layers.BatchNormalization(),
                 layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*body, layers.GlobalAveragePooling2D(), layers.Dense(10)]), (64, 32, 32, 3)


def transformer() -> tuple[keras.Model, tuple[int, ...]]:
    """Two layers of width 128 over vectors."""
    inputs = keras.Input((64, 128))
    x = inputs
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 32)(y, y)
        x = x + layers.Dense(128)(layers.Dense(512, "gelu")(layers.LayerNormalization()(x)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), (16, 64, 128)


MODELS: dict[str, Callable[[], Any]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
SYSTEMS: dict[str, Callable[[Any], Any]] = {
    "tensorflow": tf.function, "xla": lambda f: tf.function(f, jit_compile=True), "stitched": tf_stitch.function}


@dataclass
class Step:
    """One system's training step, with weights of its own."""

    system: str
    model: keras.Model
    call: Callable[[], Any]
    compile_s: float
    weights: list[np.ndarray]  # after STEPS steps
    ops: int
    kernels: int


def make(name: str, system: str) -> Step:
    """Builds the model, runs its first steps, and counts what one of them executes."""
    keras.utils.set_random_seed(0)
    model, shape = MODELS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-3), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    x, y = tf.constant(rng.standard_normal(shape, np.float32)), tf.constant(rng.integers(0, 10, shape[0]))
    step = SYSTEMS[system](lambda x, y: model.train_step((x, y)))

    def call() -> Any:
        return bench.finish(step(x, y))

    compile_s = bench.first_call_s(call)
    traced = bench.trace(call)
    for _ in range(STEPS - 3):
        call()
    weights = [v.numpy().astype(np.float64) for v in model.variables]
    return Step(system, model, call, compile_s, weights, *bench.counts(traced))


def error(got: Sequence[np.ndarray], want: Sequence[np.ndarray], least: float = 1e-3) -> float:
    """The largest difference of an array, over its norm and that of elements of ``least`` (some stay zero).

    The least of a variable is a step of the optimizer.
    """
    return max(float(np.linalg.norm(g - w) / (np.linalg.norm(w) + least * w.size**0.5))
               for g, w in zip(got, want, strict=True))


def run(name: str, systems: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measures one model: a row per system."""
    steps = [make(name, s) for s in systems]
    times = bench.interleave({s.system: s.call for s in steps}, rounds)
    return [{"model": name, "system": s.system, "median_us": 1e6 * float(np.median(times[s.system])),
             "min_us": 1e6 * min(times[s.system]), "ops": s.ops, "kernels": s.kernels, "compile_s": s.compile_s,
             "error": error(s.weights, steps[0].weights)} for s in steps]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    out = Table("model", "system", "median us", "min us", "ops", "kernels", "compile s", "error")
    for r in rows:
        out.add_row(r["model"], r["system"], f"{r['median_us']:.0f}", f"{r['min_us']:.0f}", str(r["ops"]),
                    str(r["kernels"]), f"{r['compile_s']:.1f}", f"{r['error']:.1e}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for training.json and training.txt")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        rows += run(name, args.systems.split(","), args.rounds)
        Console(width=120).print(table(rows[-len(args.systems.split(",")):]))
        if args.out:
            facts = bench.machine()
            bench.write(args.out, "training", {"machine": facts, "rows": rows}, facts, [table(rows)])


if __name__ == "__main__":
    main()
