"""Ops that TensorFlow may place on a CPU, as programs on an NVIDIA GPU: TensorFlow's results."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch

pytestmark = pytest.mark.gpu
ROWS = 9


def integers(x):
    """Products that wrap around, of bytes too; halves, extremes and sums of int32."""
    q = tf.cast(tf.round(x * 40000.0), tf.int32)
    small = tf.cast(tf.round(x * 20.0), tf.int8)
    top, bottom = tf.split(tf.matmul(q, tf.cast(tf.round(x * 90000.0), tf.int32), transpose_a=True), 2, axis=1)
    products = tf.matmul(small, tf.transpose(small), output_type=tf.int32)
    rows = tf.unstack(q, axis=1)
    return (top, bottom, products, tf.argmax(products, 1), tf.reduce_max(q, 0), tf.reduce_sum(q, 1), rows[3] * 2,
            tf.matmul(tf.cast(q, tf.int64), tf.cast(q, tf.int64), transpose_a=True))


def largest(x):
    wide = tf.tile(x, [1, 100]) + tf.cast(tf.range(1200) % 17, tf.float32) * 0.1
    return [*tf.math.top_k(wide, 5), *tf.math.top_k(x, 1), *tf.math.top_k(tf.cast(x * 9.0, tf.int32), 1)]


def images(x):
    image = tf.reshape(tf.tile(x, [1, 4]), [-1, 4, 4, 3])
    boxes = tf.stack([tf.zeros(2), tf.abs(x[0, :2]), tf.ones(2) * 0.7, tf.ones(2) * 1.2], 1)
    patches = tf.image.extract_patches(image, [1, 2, 2, 1], [1, 1, 1, 1], [1, 2, 1, 1], "SAME")
    hsv = tf.image.rgb_to_hsv(tf.nn.sigmoid(image))
    return (tf.image.crop_and_resize(image, boxes, [1, 0], [3, 5]), patches, hsv, tf.image.hsv_to_rgb(hsv * 0.9),
            tf.image.adjust_contrast(image, 1.7), tf.nn.lrn(image, 1, 1.0, 0.2, 0.75),
            tf.linalg.cross(x[:, :3], x[:, 3:6]))


def quantised(x):
    g = tf.sin(x)
    ends = -tf.ones(12), tf.ones(12) * 0.8
    return [tf.quantization.fake_quant_with_min_max_args_gradient(g, x, -1, 1),
            *tf.quantization.fake_quant_with_min_max_vars_gradient(g, x, -0.9, 1.0),
            *tf.quantization.fake_quant_with_min_max_vars_per_channel_gradient(g, x, *ends)]


@pytest.mark.parametrize("fn", [integers, largest, images, quantised])
def test_ops(fn):
    x = np.random.default_rng(0).normal(0, 1, (ROWS, 12)).astype(np.float32)
    with tf.device("/CPU:0"):
        want = [t.numpy() for t in tf.nest.flatten(fn(tf.constant(x)))]
    stitched = tf_stitch.function(fn, input_signature=[tf.TensorSpec([None, 12])])
    for _ in range(3):  # the third call is a replay
        for got, wanted in zip(tf.nest.flatten(stitched(tf.constant(x))), want, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-5, atol=2e-5)
    name = f"{fn.__name__}_"
    left = [n.op for label, r in tf_stitch.reports() if name in label for g in r.graphs for n in g.left]
    assert not left, left
