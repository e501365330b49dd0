"""Building blocks of the workloads, in plain TensorFlow: each draws its weights and returns a function."""
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import tensorflow as tf

from .workload import Params

Layer = Callable[..., tf.Tensor]


def dense(p: Params, inputs: int, units: int, activation: Layer | None = None) -> Layer:
    """[..., inputs] -> [..., units]."""
    w, b = p.weight(inputs, units), p.bias(units)

    def call(x: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(x, [-1, inputs]) if x.shape.rank != 2 else x
        y = tf.nn.bias_add(tf.matmul(flat, w), b)
        y = activation(y) if activation else y
        return tf.reshape(y, tf.concat([tf.shape(x)[:-1], [units]], 0)) if x.shape.rank != 2 else y

    return call


def mlp(p: Params, sizes: list[int], last: Layer | None = None) -> Layer:
    """Dense layers with ReLU between; ``last`` is applied to the last one."""
    pairs = list(pairwise(sizes))
    layers = [dense(p, a, b, tf.nn.relu if i + 1 < len(pairs) else last) for i, (a, b) in enumerate(pairs)]

    def call(x: tf.Tensor) -> tf.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return call


def layer_norm(p: Params, units: int, epsilon: float = 1e-5) -> Layer:
    """Normalises the last axis."""
    gamma, beta = p.normal(units, mean=1.0, scale=0.1), p.bias(units)

    def call(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, epsilon)

    return call


def batch_norm(p: Params, channels: int, epsilon: float = 1e-3) -> Layer:
    """Inference batch norm over NHWC; FusedBatchNormV3 has no float64 kernel, so the reference spells it out."""
    gamma, beta = p.normal(channels, mean=1.0, scale=0.1), p.bias(channels)
    mean, variance = p.bias(channels), p.uniform(channels, low=0.5, high=1.5)

    def fused(x: tf.Tensor) -> tf.Tensor:
        y, _, _ = tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, mean, variance, epsilon, is_training=False)
        return y

    def plain(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, epsilon)

    return plain if p.dtype == tf.float64 else fused


def conv_bn(
    p: Params, size: int, inputs: int, channels: int, stride: int = 1, activation: Layer | None = None
) -> Layer:
    """NHWC convolution, batch norm, activation."""
    w, norm = p.weight(size, size, inputs, channels), batch_norm(p, channels)

    def call(x: tf.Tensor) -> tf.Tensor:
        y = norm(tf.nn.conv2d(x, w, stride, "SAME"))
        return activation(y) if activation else y

    return call


def lstm_cell(p: Params, inputs: int, units: int) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """(x, h, c) -> (h, c)."""
    w, b = p.weight(inputs + units, 4 * units), p.bias(4 * units)

    def call(x: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        gates = tf.nn.bias_add(tf.matmul(tf.concat([x, h], 1), w), b)
        i, f, g, o = tf.split(gates, 4, 1)
        c = tf.sigmoid(f + 1.0) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c

    return call


def gru_cell(p: Params, inputs: int, units: int) -> Layer:
    """(x, h, attention or None) -> h; with attention [batch, 1] it is the AUGRU of DIEN (arXiv 1809.03672, eq. 16)."""
    w, b = p.weight(inputs + units, 2 * units), p.bias(2 * units)
    wc, bc = p.weight(inputs + units, units), p.bias(units)

    def call(x: tf.Tensor, h: tf.Tensor, attention: tf.Tensor | None = None) -> tf.Tensor:
        gates = tf.sigmoid(tf.nn.bias_add(tf.matmul(tf.concat([x, h], 1), w), b))
        r, u = tf.split(gates, 2, 1)
        candidate = tf.tanh(tf.nn.bias_add(tf.matmul(tf.concat([x, r * h], 1), wc), bc))
        u = u if attention is None else u * attention
        return (1.0 - u) * h + u * candidate

    return call


def run_lstm(cell: Layer, steps: list[tf.Tensor], units: int) -> list[tf.Tensor]:
    """Unrolled LSTM from a zero state: the hidden state of every step."""
    h = c = tf.zeros([tf.shape(steps[0])[0], units], steps[0].dtype)
    outputs = []
    for x in steps:
        h, c = cell(x, h, c)
        outputs.append(h)
    return outputs


def split_heads(x: tf.Tensor, heads: int) -> tf.Tensor:
    """[b, t, heads * d] -> [b, heads, t, d]."""
    b, t, d = tf.shape(x)[0], tf.shape(x)[1], x.shape[-1] // heads
    return tf.transpose(tf.reshape(x, [b, t, heads, d]), [0, 2, 1, 3])


def join_heads(x: tf.Tensor) -> tf.Tensor:
    """[b, heads, t, d] -> [b, t, heads * d]."""
    b, heads, t, d = tf.shape(x)[0], x.shape[1], tf.shape(x)[2], x.shape[3]
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [b, t, heads * d])


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
    """Scaled dot-product attention over [b, heads, t, d]; ``bias`` is added to the scores."""
    scores = tf.matmul(q, k, transpose_b=True) * (float(q.shape[-1]) ** -0.5)
    return tf.matmul(tf.nn.softmax(scores if bias is None else scores + bias), v)
