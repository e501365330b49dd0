"""ResNet-18 and MobileNetV3 at batch 1."""
from __future__ import annotations

import numpy as np
import tensorflow as tf

from .layers import Layer, batch_norm, conv_bn, dense
from .workload import Function, Inputs, Params, workload


def _image(rng: np.random.Generator, batch: int) -> Inputs:
    return [rng.random((batch, 224, 224, 3), np.float32)]


def _residual(p: Params, inputs: int, channels: int, stride: int) -> Layer:
    """Two 3x3 convolutions and a shortcut (arXiv 1512.03385)."""
    first, second = conv_bn(p, 3, inputs, channels, stride, tf.nn.relu), conv_bn(p, 3, channels, channels)
    short = conv_bn(p, 1, inputs, channels, stride) if stride > 1 or inputs != channels else tf.identity
    return lambda x: tf.nn.relu(second(first(x)) + short(x))


@workload("resnet18", "ResNet-18, 224 x 224, batch 1", batch=1, inputs=_image)
def make_resnet18(p: Params) -> Function:
    stem = conv_bn(p, 7, 3, 64, 2, tf.nn.relu)
    plan = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
            (512, 512, 1)]
    blocks = [_residual(p, *sizes) for sizes in plan]
    out = dense(p, 512, 1000, tf.nn.softmax)

    def call(x: tf.Tensor) -> tf.Tensor:
        x = tf.nn.max_pool2d(stem(x), 3, 2, "SAME")
        for block in blocks:
            x = block(x)
        return out(tf.reduce_mean(x, [1, 2]))

    return call


def _squeeze_excite(p: Params, channels: int) -> Layer:
    """Channel gates (arXiv 1709.01507) with a hard sigmoid."""
    small = max(8, (channels // 4 + 7) // 8 * 8)
    down, up = dense(p, channels, small, tf.nn.relu), dense(p, small, channels)

    def call(x: tf.Tensor) -> tf.Tensor:
        gate = tf.nn.relu6(up(down(tf.reduce_mean(x, [1, 2]))) + 3.0) / 6.0
        return x * gate[:, None, None, :]

    return call


def _hard_swish(x: tf.Tensor) -> tf.Tensor:
    return x * tf.nn.relu6(x + 3.0) / 6.0


def _inverted(p: Params, inputs: int, spec: tuple[int, int, int, bool, Layer, int]) -> Layer:
    """Expand, depthwise, gates, project (arXiv 1905.02244); spec: size, wide, channels, gates, activation, stride."""
    size, wide, channels, gates, activation, stride = spec
    expand = conv_bn(p, 1, inputs, wide, 1, activation) if wide != inputs else tf.identity
    filters = p.normal(size, size, wide, 1, scale=1.0 / size)
    norm = batch_norm(p, wide)
    gate = _squeeze_excite(p, wide) if gates else tf.identity
    project = conv_bn(p, 1, wide, channels)

    def call(x: tf.Tensor) -> tf.Tensor:
        y = norm(tf.nn.depthwise_conv2d(expand(x), filters, [1, stride, stride, 1], "SAME"))
        y = project(gate(activation(y)))
        return x + y if stride == 1 and inputs == channels else y

    return call


@workload("mobilenetv3", "MobileNetV3-Small, 224 x 224, logits, batch 1", batch=1, inputs=_image)
def make_mobilenetv3(p: Params) -> Function:
    relu, swish = tf.nn.relu, _hard_swish
    plan: list[tuple[int, int, int, bool, Layer, int]] = [
        (3, 16, 16, True, relu, 2), (3, 72, 24, False, relu, 2), (3, 88, 24, False, relu, 1),
        (5, 96, 40, True, swish, 2), (5, 240, 40, True, swish, 1), (5, 240, 40, True, swish, 1),
        (5, 120, 48, True, swish, 1), (5, 144, 48, True, swish, 1), (5, 288, 96, True, swish, 2),
        (5, 576, 96, True, swish, 1), (5, 576, 96, True, swish, 1),
    ]
    stem, blocks, inputs = conv_bn(p, 3, 3, 16, 2, swish), [], 16
    for spec in plan:
        blocks.append(_inverted(p, inputs, spec))
        inputs = spec[2]
    last, head = conv_bn(p, 1, inputs, 576, 1, swish), dense(p, 576, 1024, swish)
    out = dense(p, 1024, 1000)

    def call(x: tf.Tensor) -> tf.Tensor:
        x = stem(x)
        for block in blocks:
            x = block(x)
        return out(head(tf.reduce_mean(last(x), [1, 2])))

    return call
