"""Neural-network ops: activations, bias, softmax and losses, batch normalisation, products, convolutions, pools."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.graph import Node
from ..view import GraphView, NodeView
from .context import Context
from .gradients import SELU_SCALE, SELU_SCALE_ALPHA
from .math import one, zero
from .reduction import mean_over
from .registry import FLOAT, NUM, lower

# --- activations -----------------------------------------------------------------------------------

@lower("Relu", kinds=NUM)
def relu(c: Context, x: Node) -> Node:
    return c.b.ew("max", x, zero(c, x))


@lower("Relu6", kinds=NUM)
def relu6(c: Context, x: Node) -> Node:
    return c.b.ew("min", c.b.ew("max", x, zero(c, x)), c.b.const(6, x.dtype))


@lower("LeakyRelu", kinds=FLOAT)
def leaky_relu(c: Context, x: Node) -> Node:
    alpha = c.b.const(float(c.attr("alpha", 0.2)), x.dtype)
    return c.b.select(c.b.ew("gt", x, zero(c, x)), x, c.b.ew("mul", x, alpha))


@lower("Elu", kinds=FLOAT)
def elu(c: Context, x: Node) -> Node:
    return c.b.select(c.b.ew("lt", x, zero(c, x)), c.b.ew("expm1", x), x)


@lower("Selu", kinds=FLOAT)
def selu(c: Context, x: Node) -> Node:
    below = c.b.ew("mul", c.b.const(SELU_SCALE_ALPHA, x.dtype), c.b.ew("expm1", x))
    return c.b.select(c.b.ew("lt", x, zero(c, x)), below, c.b.ew("mul", c.b.const(SELU_SCALE, x.dtype), x))


@lower("Softsign", kinds=FLOAT)
def softsign(c: Context, x: Node) -> Node:
    return c.b.ew("div", x, c.b.ew("add", c.b.ew("abs", x), one(c, x)))


# --- bias ------------------------------------------------------------------------------------------

def channel_axis(c: Context, rank: int) -> int:
    """The channel axis that data_format names."""
    return 1 if str(c.attr("data_format", "NHWC")).startswith("NC") else rank - 1


@lower("BiasAdd", "BiasAddV1", kinds=NUM)
def bias_add(c: Context, x: Node, bias: Node) -> Node:
    return c.b.ew("add", x, c.channel(bias, x.rank, channel_axis(c, x.rank)))


@lower("BiasAddGrad", kinds=NUM)
def bias_add_grad(c: Context, g: Node) -> Node:
    axis = channel_axis(c, g.rank)
    return c.b.reduce("sum", g, [i for i in range(g.rank) if i != axis])


# --- softmax and losses ----------------------------------------------------------------------------

def _shifted(c: Context, x: Node) -> tuple[Node, Node, Node]:
    """(x - max, exp of it, its sum) along the last axis; the last keeps its dim."""
    shifted = c.b.ew("sub", x, c.b.reduce("max", x, [x.rank - 1], True))
    e = c.b.ew("exp", shifted)
    return shifted, e, c.b.reduce("sum", e, [x.rank - 1], True)


@lower("Softmax", kinds=FLOAT)
def softmax(c: Context, x: Node) -> Node:
    _, e, total = _shifted(c, c.wide(x))
    return c.like(c.b.ew("div", e, total), x.dtype)


@lower("LogSoftmax", kinds=FLOAT)
def log_softmax(c: Context, x: Node) -> Node:
    shifted, _, total = _shifted(c, c.wide(x))
    return c.like(c.b.ew("sub", shifted, c.b.ew("log", total)), x.dtype)


@lower("SoftmaxCrossEntropyWithLogits", kinds=FLOAT)
def softmax_cross_entropy(c: Context, logits: Node, labels: Node) -> list[Node]:
    dtype = logits.dtype
    shape = c.b.broadcast_shape([logits.shape, labels.shape])
    logits, labels = (c.wide(c.b.broadcast_to(x, shape)) for x in (logits, labels))
    shifted, e, total = _shifted(c, logits)
    term = c.b.ew("mul", labels, c.b.ew("sub", c.b.ew("log", total), shifted))
    backprop = c.b.ew("sub", c.b.ew("div", e, total), labels)
    return [c.like(c.b.reduce("sum", term, [1]), dtype), c.like(backprop, dtype)]


@lower("SparseSoftmaxCrossEntropyWithLogits", kinds=FLOAT)
def sparse_softmax_cross_entropy(c: Context, logits: Node, labels: Node) -> list[Node]:
    dtype, wide = logits.dtype, c.wide(logits)
    labels = c.b.reshape(labels, wide.shape[:1])
    shifted, e, total = _shifted(c, wide)
    classes = c.b.iota((wide.shape[1],), 0, labels.dtype)
    labels = c.b.gather(classes, labels)  # the label itself, or the error of a label that is out of range
    hit = c.b.ew("eq", c.b.reshape(classes, (1, wide.shape[1])), c.expand(labels, [1]))
    backprop = c.b.ew("sub", c.b.ew("div", e, total), c.b.cast(hit, wide.dtype))
    at_label = c.b.reduce("sum", c.b.select(hit, shifted, zero(c, shifted)), [1])
    loss = c.b.ew("sub", c.b.reshape(c.b.ew("log", total), at_label.shape), at_label)
    return [c.like(loss, dtype), c.like(backprop, dtype)]


# --- normalisation by neighbours -------------------------------------------------------------------

@lower("LRN", kinds=FLOAT, on_gpu=True)  # TensorFlow's on a CPU spreads NaN over all channels
def local_response(c: Context, x: Node) -> Node:
    """Each channel over a power of the squares of those around it."""
    radius, wide = int(c.attr("depth_radius", 5)), c.wide(x)
    rows = c.b.reshape(c.b.ew("mul", wide, wide), (D.product(x.shape[:-1]), x.shape[-1], 1))
    around = c.b.reshape(c.b.window("sum", rows, [2 * radius + 1], [1], [(radius, radius)]), x.shape)
    bias, alpha, beta = (float(c.attr(name, value)) for name, value in (("bias", 1), ("alpha", 1), ("beta", 0.5)))
    scale = c.b.ew("add", c.b.ew("mul", around, alpha), bias)
    return c.like(c.b.ew("mul", wide, c.b.ew("pow", scale, -beta)), x.dtype)


# --- batch normalisation ---------------------------------------------------------------------------

def _channels(c: Context, x: Node) -> tuple[int, list[int]]:
    axis = channel_axis(c, x.rank)
    return axis, [i for i in range(x.rank) if i != axis]


def _unused(c: Context, count: int, dtype: str) -> list[Node]:
    return [c.b.const([], dtype) for _ in range(count)]


@lower("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", kinds=FLOAT)
def fused_batch_norm(c: Context, x: Node, scale: Node, offset: Node, mean: Node, variance: Node) -> list[Node]:
    axis, rest = _channels(c, x)
    training = bool(c.attr("is_training", True))
    wide = c.like(x, scale.dtype)
    if training:
        used_mean = mean_over(c, wide, tuple(rest))
        centred = c.b.ew("sub", wide, c.channel(used_mean, x.rank, axis))
        used_variance = mean_over(c, c.b.ew("mul", centred, centred), tuple(rest))
        results = _moving(c, wide, rest, (used_mean, used_variance), (mean, variance))
    else:
        used_mean, used_variance = mean, variance
        centred = c.b.ew("sub", wide, c.channel(mean, x.rank, axis))
        results = [mean, variance]
    epsilon = c.b.const(float(c.attr("epsilon", 1e-4)), scale.dtype)
    factor = c.b.ew("mul", c.b.ew("rsqrt", c.b.ew("add", used_variance, epsilon)), scale)
    y = c.b.ew("add", c.b.ew("mul", centred, c.channel(factor, x.rank, axis)), c.channel(offset, x.rank, axis))
    return [c.like(y, x.dtype), *results, used_mean, used_variance,
            *(_unused(c, 1, c.out_dtype(5)) if c.view.num_outputs(c.node.name) == 6 else [])]


def _moving(c: Context, x: Node, rest: list[int], batch: tuple[Node, Node], old: tuple[Node, Node]) -> list[Node]:
    """The running statistics: the variance is made unbiased (Bessel), both are averaged with the old ones."""
    count = D.product(x.shape[a] for a in rest)
    bessel = c.b.ew("div", c.dim_scalar(count, x.dtype), c.dim_scalar(D.dmax(count - 1, 1), x.dtype))
    new = [batch[0], c.b.ew("mul", batch[1], bessel)]
    factor = float(c.attr("exponential_avg_factor", 1.0))
    if factor == 1.0:
        return new
    keep, take = c.b.const(1 - factor, x.dtype), c.b.const(factor, x.dtype)
    return [c.b.ew("add", c.b.ew("mul", keep, o), c.b.ew("mul", take, n)) for o, n in zip(old, new, strict=True)]


@lower("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", kinds=FLOAT)
def fused_batch_norm_grad(c: Context, g: Node, x: Node, scale: Node, mean: Node, variance: Node,
                          *reserve: Node) -> list[Node]:
    axis, rest = _channels(c, x)
    dy, wide = c.like(g, scale.dtype), c.like(x, scale.dtype)
    epsilon = c.b.const(float(c.attr("epsilon", 1e-4)), scale.dtype)
    inv = c.b.ew("rsqrt", c.b.ew("add", variance, epsilon))
    centred = c.b.ew("sub", wide, c.channel(mean, x.rank, axis))
    sum_dy = c.b.reduce("sum", dy, rest)
    sum_dy_x = c.b.reduce("sum", c.b.ew("mul", dy, centred), rest)
    factor = c.channel(c.b.ew("mul", inv, scale), x.rank, axis)
    if c.attr("is_training", True):
        count = c.dim_scalar(D.product(x.shape[a] for a in rest), scale.dtype)
        along = c.b.ew("mul", c.b.ew("div", sum_dy_x, count), c.b.ew("mul", inv, inv))
        dy = c.b.ew("sub", dy, c.channel(c.b.ew("div", sum_dy, count), x.rank, axis))
        dy = c.b.ew("sub", dy, c.b.ew("mul", centred, c.channel(along, x.rank, axis)))
    dx = c.like(c.b.ew("mul", dy, factor), x.dtype)
    return [dx, c.b.ew("mul", sum_dy_x, inv), sum_dy, *_unused(c, 2, scale.dtype)]


# --- products --------------------------------------------------------------------------------------

@lower("MatMul", kinds=NUM)
def matmul(c: Context, x: Node, y: Node) -> Node:
    left = 0 if c.attr("transpose_a", False) else 1
    right = 1 if c.attr("transpose_b", False) else 0
    return c.b.dot(x, y, contract=((left,), (right,)))


@lower("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", kinds=NUM)
def batch_matmul(c: Context, x: Node, y: Node) -> Node:
    out = c.dtype
    x, y = c.like(x, out), c.like(y, out)
    lead = c.b.broadcast_shape([x.shape[:-2], y.shape[:-2]])
    if not lead:
        batch: tuple[int, ...] = ()
    else:
        batch = tuple(range(len(lead)))
        x, y = (c.b.broadcast_to(v, (*lead, *v.shape[-2:])) for v in (x, y))
    n = len(batch)
    left = n if c.attr("adj_x", False) else n + 1
    right = n + 1 if c.attr("adj_y", False) else n
    return c.b.dot(x, y, (batch, batch), ((left,), (right,)))


# --- convolutions and pools: channels last, static filters ------------------------------------------

def spatial(c: Context, name: str, rank: int) -> list[int]:
    """The spatial part of a per-dim attr (strides, ksize, dilations)."""
    values = list(c.attr(name) or [1] * rank)
    return values[2:] if str(c.attr("data_format", "NHWC")).startswith("NC") else values[1:-1]


def last_order(c: Context, rank: int) -> list[int]:
    """The dims of a tensor in the op's layout, as :func:`channels_last` puts them in order."""
    return [0, *range(2, rank), 1] if str(c.attr("data_format", "NHWC")).startswith("NC") else list(range(rank))


def channels_last(c: Context, x: Node) -> Node:
    """Tensors with channels first are turned; others stay."""
    order = last_order(c, x.rank)
    return x if order == list(range(x.rank)) else c.b.transpose(x, order)


def channels_first(c: Context, y: Node) -> Node:
    """Undoes :func:`channels_last`."""
    if not str(c.attr("data_format", "NHWC")).startswith("NC"):
        return y
    return c.b.transpose(y, [0, y.rank - 1, *range(1, y.rank - 1)])


def padding_of(c: Context, image: Sequence[Dim], size: Sequence[int],
               strides: Sequence[int]) -> list[tuple[Dim, Dim]]:
    """(low, high) per dim of an image for SAME, VALID or EXPLICIT; ``size`` is the dilated window."""
    mode = c.attr("padding")
    if mode == "VALID":
        return [(0, 0)] * len(size)
    if mode == "EXPLICIT":
        pairs = list(zip(*[iter(c.attr("explicit_paddings"))] * 2, strict=True))
        return pairs[2:] if str(c.attr("data_format", "NHWC")).startswith("NC") else pairs[1:-1]
    out = []
    for d, k, s in zip(image, size, strides, strict=True):
        # One place every s elements: the last one ends so far behind the image's end.
        total = k - 1 if s == 1 else D.dmax(D.floordiv(d + s - 1, s) * s - s + k - d, 0)
        low = D.floordiv(total, 2)
        out.append((low, total - low))
    return out


def with_padding(c: Context, x: Node, padding: Sequence[tuple[Dim, Dim]],
                 value: Any = 0) -> tuple[Node, list[tuple[int, int]]]:
    """The image and the static padding that is left to do: what depends on an unknown size is done here."""
    if all(D.all_static(pair) for pair in padding):
        return x, [(D.static(a), D.static(b)) for a, b in padding]
    low, high = zip(*padding, strict=True)
    return c.b.pad(x, [0, *low, 0], [0, *high, 0], c.b.const(value, x.dtype)), [(0, 0)] * len(padding)


def _convolve(c: Context, x: Node, w: Node, groups: int) -> Node:
    strides, dilations = spatial(c, "strides", x.rank), spatial(c, "dilations", x.rank)
    size = [(D.static(k) - 1) * d + 1 for k, d in zip(w.shape[:-2], dilations, strict=True)]
    x, padding = with_padding(c, x, padding_of(c, x.shape[1:-1], size, strides))
    return channels_first(c, c.b.conv(x, w, strides, padding, dilations, groups))


def static_filter(view: GraphView, node: NodeView) -> str | None:
    """Why a convolution's filter or layout cannot be used; None when it can."""
    if None in (view.shape(node.inputs[1]) or (None,)):
        return "the filter's shape is not static"
    return layout_reason(node)


def layout_reason(node: NodeView) -> str | None:
    """Why a node's data format cannot be used; None when it can."""
    layout = str(node.attr("data_format", "NHWC"))
    return None if layout in ("NHWC", "NCHW", "NDHWC", "NCDHW") else f"data format {layout} is not supported"


@lower("Conv2D", "Conv3D", kinds=FLOAT, check=static_filter)
def conv(c: Context, x: Node, w: Node) -> Node:
    x = channels_last(c, x)
    channels = x.shape[-1]
    if not D.is_static(channels):
        channels = c.b.same_dim(channels, w.shape[-2], f"{c.node.name}: channels of image and filter")
    depth = D.static(w.shape[-2])
    return _convolve(c, x, w, D.static(channels) // depth if depth else 1)


@lower("DepthwiseConv2dNative", kinds=FLOAT, check=static_filter)
def depthwise_conv(c: Context, x: Node, w: Node) -> Node:
    *k, channels, multiplier = map(D.static, w.shape)
    return _convolve(c, channels_last(c, x), c.b.reshape(w, (*k, 1, channels * multiplier)), channels)


def plain_pool(view: GraphView, node: NodeView) -> str | None:
    """Why a pool's data format or window cannot be used; None when it can."""
    per_dim = [node.attr(k) or [] for k in ("ksize", "strides")]
    channel = 1 if str(node.attr("data_format", "NHWC")).startswith("NC") else -1
    if any(v and (v[0] != 1 or v[channel] != 1) for v in per_dim):
        return "pooling over batch or channels is not supported"
    return layout_reason(node)


@lower("MaxPool", "MaxPool3D", kinds=FLOAT, check=plain_pool)
def max_pool(c: Context, x: Node) -> Node:
    x = channels_last(c, x)
    size, strides = spatial(c, "ksize", x.rank), spatial(c, "strides", x.rank)
    x, padding = with_padding(c, x, padding_of(c, x.shape[1:-1], size, strides), -np.inf)
    return channels_first(c, c.b.window("max", x, size, strides, padding))


@lower("AvgPool", "AvgPool3D", kinds=FLOAT, check=plain_pool)
def average_pool(c: Context, x: Node) -> Node:
    """Means over what lies in the image."""
    x = channels_last(c, x)
    size, strides = spatial(c, "ksize", x.rank), spatial(c, "strides", x.rank)
    wanted = padding_of(c, x.shape[1:-1], size, strides)
    image, padding = with_padding(c, x, wanted)
    if image is x:
        return channels_first(c, c.b.window("mean", x, size, strides, padding))
    inside, _ = with_padding(c, c.full(1, (1, *x.shape[1:-1], 1), "float32"), wanted)
    total, count = (c.b.window("sum", c.wide(v), size, strides, padding) for v in (image, inside))
    return channels_first(c, c.like(c.b.ew("div", total, c.like(count, total.dtype)), x.dtype))
