"""The demo: a Keras CNN and a Transformer encoder, saved, rewritten, run and compared.

    python -m models.demo [--keep FOLDER]

Exits with 1 when an output differs from TensorFlow's by more than 1e-5 of its largest value.
"""
from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what matters comes as an exception

import numpy as np
from rich.console import Console
from rich.table import Table

import tf_stitch
from tf_stitch.quiet import quiet_stderr

with quiet_stderr():
    import keras
    import tensorflow as tf

    from tf_stitch import bench

    tf.config.list_logical_devices()  # looks for GPUs

BATCHES, TOLERANCE, ROUNDS = (1, 3, 17), 1e-5, 20
layers = keras.layers


@dataclass(frozen=True)
class Model:
    """A Keras model to show, its input's name, and how to draw a batch."""

    title: str
    build: Callable[[], keras.Model]
    draw: Callable[[np.random.Generator, int], np.ndarray]


def cnn() -> keras.Model:
    """A small image classifier: convolutions, batch norm, channel gates."""
    image = keras.Input((32, 32, 3), name="x")
    x = layers.Rescaling(1 / 255)(image)
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = layers.Activation("silu")(layers.BatchNormalization()(x))
        gate = layers.Dense(filters, "sigmoid")(layers.Dense(8, "relu")(layers.GlobalAveragePooling2D()(x)))
        x = x * layers.Reshape((1, 1, filters))(gate)
    x = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, layers.Dense(10, "softmax")(x), name="cnn")


def encoder() -> keras.Model:
    """A Transformer encoder with padding: two layers of width 64, four heads."""
    tokens = keras.Input((32,), dtype="int32", name="x")
    places = layers.Embedding(32, 64)(keras.ops.arange(32))
    x = layers.Embedding(1000, 64, mask_zero=True)(tokens) + places
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16)(y, y)
        y = layers.Dense(256, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(64)(y)
    x = layers.LayerNormalization()(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, layers.Dense(5, "softmax")(x), name="encoder")


def _pixels(rng: np.random.Generator, batch: int) -> np.ndarray:
    return rng.integers(0, 256, (batch, 32, 32, 3)).astype(np.float32)


def _tokens(rng: np.random.Generator, batch: int) -> np.ndarray:
    keep = np.arange(32) < rng.integers(8, 33, batch)[:, None]
    return rng.integers(1, 1000, (batch, 32), np.int32) * keep.astype(np.int32)


MODELS = (Model("Keras CNN", cnn, _pixels), Model("Transformer encoder", encoder, _tokens))


@dataclass(frozen=True)
class Shown:
    """What is printed of one model."""

    title: str
    report: tf_stitch.Report
    seconds: float
    errors: dict[int, float]
    latency_us: dict[str, float]

    @property
    def right(self) -> bool:
        return bool(self.report.clusters) and all(e <= TOLERANCE for e in self.errors.values())


def save(model: Model, folder: Path) -> Path:
    """Exports a model with seeded weights; returns where it is."""
    keras.utils.set_random_seed(1)
    net, rng = model.build(), np.random.default_rng(1)
    for layer in net.layers:  # trained-looking statistics: the initial 0 and 1 would hide mistakes
        if isinstance(layer, layers.BatchNormalization):
            layer.moving_mean.assign(0.1 * rng.standard_normal(layer.moving_mean.shape))
            layer.moving_variance.assign(rng.uniform(0.5, 1.5, layer.moving_variance.shape))
    net.export(str(folder / net.name), verbose=False)
    return folder / net.name


def show(model: Model, folder: Path) -> Shown:
    """Saves, rewrites and runs a model; compares it with TensorFlow at every batch size."""
    plain_path = str(save(model, folder))
    stitched_path, rng = f"{plain_path}_stitched", np.random.default_rng(2)
    start = time.perf_counter()
    report = tf_stitch.rewrite_saved_model(plain_path, stitched_path, verify=False)
    seconds = time.perf_counter() - start
    plain, stitched = (tf.saved_model.load(p).signatures["serving_default"] for p in (plain_path, stitched_path))
    inputs = {b: {"x": tf.constant(model.draw(rng, b))} for b in BATCHES}
    errors = {b: bench.max_rel_error(_arrays(stitched(**x)), _arrays(plain(**x))) for b, x in inputs.items()}
    one = inputs[BATCHES[0]]
    times = bench.interleave({"tensorflow": lambda: plain(**one), "stitched": lambda: stitched(**one)}, ROUNDS, 0.02)
    return Shown(model.title, report, seconds, errors, {k: statistics.median(v) * 1e6 for k, v in times.items()})


def _arrays(outputs: dict[str, tf.Tensor]) -> list[np.ndarray]:
    return [outputs[k].numpy() for k in sorted(outputs)]


def table(shown: Sequence[Shown]) -> Table:
    out = Table(title="Saved with model.export(), rewritten once, run at batch sizes "
                      f"{', '.join(map(str, BATCHES))}")
    out.add_column("")
    for s in shown:
        out.add_column(s.title, justify="right")

    def row(name: str, text: Callable[[Shown], str]) -> None:
        out.add_row(name, *map(text, shown))

    row("ops before -> after", lambda s: f"{s.report.ops_before} -> {s.report.ops_after}")
    row("kernels before -> after", lambda s: f"{s.report.ops_before} -> {s.report.kernels_after}")
    row("stitched, outside MatMul and Conv", lambda s: f"{s.report.coverage:.0%}")
    row("rewrite", lambda s: f"{s.seconds:.1f} s")
    for b in BATCHES:
        row(f"largest relative difference, batch {b}", lambda s, b=b: f"{s.errors[b]:.1e}")
    row("TensorFlow, batch 1", lambda s: f"{s.latency_us['tensorflow']:.0f} us")
    row("stitched, batch 1", lambda s: f"{s.latency_us['stitched']:.0f} us")
    row("speed-up", lambda s: f"{s.latency_us['tensorflow'] / s.latency_us['stitched']:.2f}x")
    row("equal to TensorFlow", lambda s: "yes" if s.right else "NO")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; 0 when every output is right."""
    parser = argparse.ArgumentParser("python -m models.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder to keep the saved and the rewritten models in")
    args = parser.parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        taken = [str(folder / m) for m in ("cnn_stitched", "encoder_stitched") if (folder / m).exists()]
        if taken:
            parser.error(f"{taken[0]} exists; give another folder to --keep")
        with console.status("Saving, rewriting and running two models"):
            shown = [show(m, folder) for m in MODELS]
    console.print(table(shown))
    wrong = [s.title for s in shown if not s.right]
    if wrong:
        console.print(f"Wrong or nothing stitched: {', '.join(wrong)}")
    elif args.keep:
        console.print(f"Kept in {args.keep}: serve cnn_stitched and encoder_stitched like any SavedModel.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
