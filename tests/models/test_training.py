"""``enable()`` and ten steps of Keras ``fit``: losses as in plain TensorFlow."""
from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

import tf_stitch
from tf_stitch import runtime

STEPS, BATCH = 10, 16
Builder = Callable[[], keras.Model]
layers = keras.layers


def mlp() -> tuple[keras.Model, np.ndarray]:
    inputs = keras.Input((20,))
    x = layers.BatchNormalization()(layers.Dense(64, "gelu")(inputs))
    x = layers.Dropout(0.1)(layers.Dense(32, "tanh")(x))
    rng = np.random.default_rng(1)
    return keras.Model(inputs, layers.Dense(4)(x)), rng.standard_normal((STEPS * BATCH, 20)).astype(np.float32)


def lstm() -> tuple[keras.Model, np.ndarray]:
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(inputs)
    x = layers.LSTM(24)(x)
    rng = np.random.default_rng(2)
    keep = np.arange(12) < rng.integers(1, 13, STEPS * BATCH)[:, None]
    return keras.Model(inputs, layers.Dense(4)(x)), rng.integers(1, 50, keep.shape).astype(np.int32) * keep


def transformer() -> tuple[keras.Model, np.ndarray]:
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Embedding(50, 32)(inputs)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 8, dropout=0.1)(y, y)
        x = x + layers.Dense(32)(layers.Dense(64, "gelu")(layers.LayerNormalization()(x)))
    x = layers.GlobalAveragePooling1D()(x)
    rng = np.random.default_rng(3)
    return keras.Model(inputs, layers.Dense(4)(x)), rng.integers(0, 50, (STEPS * BATCH, 10)).astype(np.int32)


class Losses(keras.callbacks.Callback):
    """Loss of every step (not the running mean that ``logs`` holds)."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.values.append(float(logs["loss"]))


def losses(build: Callable[[], tuple[keras.Model, np.ndarray]], optimizer: str) -> tuple[list[float], np.ndarray]:
    """Ten steps of ``fit`` from fixed seeds: the losses, and the trained model's predictions."""
    keras.utils.set_random_seed(5)
    model, x = build()
    y = np.random.default_rng(4).integers(0, 4, len(x))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seen = Losses()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[seen])
    return seen.values, model.predict(x[:7], verbose=0)


@pytest.mark.parametrize("build, optimizer", [(mlp, "sgd"), (lstm, "adam"), (transformer, "adam")])
def test_fit_matches_plain_tensorflow(build: Callable[[], tuple[keras.Model, np.ndarray]], optimizer: str) -> None:
    plain, plain_out = losses(build, optimizer)
    before = runtime.counters().stitched
    tf_stitch.enable()
    try:
        stitched, stitched_out = losses(build, optimizer)
    finally:
        tf_stitch.disable()
    assert runtime.counters().stitched >= before + STEPS
    assert len(plain) == STEPS and max(plain) > min(plain)
    np.testing.assert_allclose(stitched, plain, rtol=0, atol=1e-4)
    np.testing.assert_allclose(stitched_out, plain_out, rtol=0, atol=1e-3)


def test_disable_is_plain_tensorflow_again() -> None:
    tf_stitch.enable()
    tf_stitch.disable()
    before = runtime.counters().stitched
    losses(mlp, "sgd")
    assert runtime.counters().stitched == before
