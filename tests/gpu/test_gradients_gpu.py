"""Gradients of convolutions and pools on a GPU: against TensorFlow's float64 on the CPU, the same bits each time."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.op.calls import counted
from tests.op.test_library import DTYPES

pytestmark = pytest.mark.gpu

# batch, image, channels, results, window, strides, padding, groups
CONVOLUTIONS = [
    (8, (28, 28), 1, 32, (3, 3), (1, 1), "VALID", 1), (4, (32, 32), 3, 64, (7, 7), (2, 2), "SAME", 1),
    (4, (14, 14), 64, 32, (3, 3), (1, 1), "SAME", 1), (3, (15, 12), 24, 16, (3, 3), (2, 2), "VALID", 1),
    (2, (9, 11), 7, 13, (3, 2), (2, 1), "SAME", 1), (4, (13, 13), 32, 48, (1, 1), (1, 1), "SAME", 1),
    (4, (14, 14), 32, 64, (1, 1), (2, 2), "SAME", 1), (2, (17, 17), 16, 16, (2, 2), (1, 1), "VALID", 1),
    (2, (10, 10), 32, 64, (3, 3), (1, 1), "SAME", 2), (1, (8, 8), 128, 128, (3, 3), (1, 1), "SAME", 1),
    (2, (8, 9), 8, 8, (5, 4), (3, 2), [[0, 0], [2, 1], [1, 2], [0, 0]], 1),
    (16, (3, 3), 64, 32, (3, 3), (1, 1), "VALID", 1)]
POOLS = [((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME"), ((3, 2), (1, 1), "SAME"), ((2, 3), (3, 2), "VALID")]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def full_precision():
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(True)


def compare(step, arrays, dtype, tolerance) -> None:
    """All gradients that ``step`` returns on the GPU and on the CPU."""
    arrays = [np.asarray(a).astype(DTYPES[dtype]) for a in arrays]
    with tf.device("/CPU:0"):
        want = [t.numpy() for t in step(*(tf.constant(a.astype(np.float64)) for a in arrays))]
    spec = [tf.TensorSpec(a.shape, dtype) for a in arrays]  # an unknown batch would take several plans, and longer
    f = tf_stitch.function(step, input_signature=spec, autograph=False)
    inputs = [tf.constant(a) for a in arrays]
    first = None
    for _ in range(3):
        got, ran, fell_back = counted(lambda: f(*inputs))
        assert (ran, fell_back) == (1, 0)
        bits = [t.numpy().tobytes() for t in got]
        assert first is None or bits == first, "another result in another run"
        first = bits
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g.numpy().astype(np.float64), w, rtol=0, atol=tolerance * np.abs(w).max())


@pytest.mark.parametrize("case,dtype", [(c, "float32") for c in CONVOLUTIONS] + [
    (c, dtype) for dtype in ("float16", "bfloat16") for c in CONVOLUTIONS[::4]], ids=str)
def test_convolutions(case, dtype):
    batch, size, channels, results, window, strides, padding, groups = case

    def step(x, w, v):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            parts = groups if x.dtype == tf.float64 else 1  # TensorFlow's CPU has no gradients of groups
            y = tf.concat([tf.nn.conv2d(a, b, [1, *strides, 1], padding) for a, b in
                           zip(tf.split(x, parts, 3), tf.split(w, parts, 3), strict=True)], 3)
            loss = tf.reduce_sum(y * v, axis=[1, 2, 3])
        return tape.gradient(loss, [x, w])

    rng = np.random.default_rng(0)
    compare(step, [rng.standard_normal((batch, *size, channels)),
                   rng.standard_normal((*window, channels // groups, results)) / 8,
                   rng.standard_normal(results)], dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolutions(stride, dtype):
    def step(x, w, v):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.nn.depthwise_conv2d(x, w, [1, stride, stride, 1], "SAME")
            loss = tf.reduce_sum(y * v, axis=[1, 2, 3])
        return tape.gradient(loss, [x, w])

    rng = np.random.default_rng(0)
    compare(step, [rng.standard_normal((4, 14, 15, 24)), rng.standard_normal((3, 3, 24, 2)) / 4,
                   rng.standard_normal(48)], dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("values", ["normal", "ties"])
def test_pools(values, dtype):
    """The first maximum takes all, whatever else is as large."""
    def step(x):
        found = []
        for k, (size, strides, padding) in enumerate(POOLS):
            for pool in (tf.nn.max_pool2d, tf.nn.avg_pool2d):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = pool(x, size, strides, padding)
                    weights = tf.reshape(tf.range(y.shape[1] * y.shape[2]) % (7 + k), [1, *y.shape[1:3], 1])
                    loss = tf.reduce_sum(y * tf.cast(weights, x.dtype), axis=[1, 2, 3])
                found.append(tape.gradient(loss, x))
        return found

    x = np.random.default_rng(0).standard_normal((3, 12, 13, 10))
    compare(step, [np.round(x) if values == "ties" else x], dtype, TOLERANCE[dtype])
