"""Ops that Grappler's own optimizers make out of others."""
from __future__ import annotations

import math
from collections.abc import Sequence

from ...ir.graph import Node
from ..view import GraphView, NodeView
from .context import Context
from .nn import (
    bias_add,
    channel_axis,
    conv,
    depthwise_conv,
    elu,
    fused_batch_norm,
    matmul,
    relu,
    relu6,
    static_filter,
)
from .reduction import mean_over
from .registry import FLOAT, REGISTRY, lower


def _leaky(c: Context, x: Node) -> Node:
    alpha = c.b.const(float(c.attr("leakyrelu_alpha", 0.2)), x.dtype)
    return c.b.select(c.b.ew("gt", x, c.b.const(0, x.dtype)), x, c.b.ew("mul", x, alpha))


def _gelu_exact(c: Context, x: Node) -> Node:
    inner = c.b.ew("erf", c.b.ew("mul", x, c.b.const(math.sqrt(0.5), x.dtype)))
    return _gelu(c, x, inner)


def _gelu_approximate(c: Context, x: Node) -> Node:
    cube = c.b.ew("mul", c.b.ew("mul", x, x), x)
    inner = c.b.ew("add", x, c.b.ew("mul", cube, c.b.const(0.044715, x.dtype)))
    return _gelu(c, x, c.b.ew("tanh", c.b.ew("mul", inner, c.b.const(math.sqrt(2 / math.pi), x.dtype))))


def _gelu(c: Context, x: Node, inner: Node) -> Node:
    half = c.b.ew("mul", x, c.b.const(0.5, x.dtype))
    return c.b.ew("mul", half, c.b.ew("add", inner, c.b.const(1, x.dtype)))


def _hard_swish(c: Context, x: Node) -> Node:
    gate = relu6(c, c.b.ew("add", x, c.b.const(3, x.dtype)))
    return c.b.ew("mul", x, c.b.ew("mul", gate, c.b.const(1 / 6, x.dtype)))


ACTIVATIONS = {
    "Relu": relu, "Relu6": relu6, "Elu": elu, "LeakyRelu": _leaky, "GeluExact": _gelu_exact,
    "GeluApproximate": _gelu_approximate, "Tanh": lambda c, x: c.b.ew("tanh", x),
    "Sigmoid": lambda c, x: c.b.ew("sigmoid", x), "_FusedHardSwish": _hard_swish,
}
EXTRA_OPERANDS = {"BiasAdd": 1, "Add": 1, "FusedBatchNorm": 4}


def _epilogue_reason(view: GraphView, node: NodeView) -> str | None:
    fused = list(node.attr("fused_ops") or [])
    unknown = [op for op in fused if op not in EXTRA_OPERANDS and op not in ACTIVATIONS]
    if unknown:
        return f"fused op {', '.join(map(str, unknown))} is not supported"
    if int(node.attr("num_args", 0)) != sum(EXTRA_OPERANDS.get(op, 0) for op in fused) or node.attr("num_host_args", 0):
        return "its extra operands are not those of its fused ops"
    return None


def _epilogue(c: Context, out: Node, args: Sequence[Node]) -> Node:
    """What the fused ops make of a product, each with its own operands."""
    left = list(args)
    for op in c.attr("fused_ops") or []:
        if op == "BiasAdd":
            out = bias_add(c, out, left.pop(0))
        elif op == "Add":
            out = c.b.ew("add", out, left.pop(0))
        elif op == "FusedBatchNorm":
            out = _normalised(c, out, *(left.pop(0) for _ in range(4)))
        else:
            out = ACTIVATIONS[op](c, out)
    return out


def _normalised(c: Context, x: Node, scale: Node, offset: Node, mean: Node, variance: Node) -> Node:
    """Batch normalisation with given statistics, as TensorFlow fuses it: one factor and one summand per channel."""
    inv = c.b.ew("rsqrt", c.b.ew("add", variance, c.b.const(float(c.attr("epsilon", 1e-4)), variance.dtype)))
    centred = c.b.ew("sub", x, _per_channel(c, x, mean))
    scaled = c.b.ew("mul", centred, _per_channel(c, x, c.b.ew("mul", inv, scale)))
    return c.b.ew("add", scaled, _per_channel(c, x, offset))


def _per_channel(c: Context, x: Node, vector: Node) -> Node:
    return c.channel(vector, x.rank, channel_axis(c, x.rank))


@lower("_FusedMatMul", kinds=FLOAT, check=_epilogue_reason)
def fused_matmul(c: Context, x: Node, y: Node, *args: Node) -> Node:
    return _epilogue(c, matmul(c, x, y), args)


def _convolution_reason(view: GraphView, node: NodeView) -> str | None:
    if node.attr("filter_format", "HWIO") != "HWIO":
        return f"filter format {node.attr('filter_format')} is not supported"
    return static_filter(view, node) or _epilogue_reason(view, node)


@lower("_FusedConv2D", "_FusedConv3D", kinds=FLOAT, check=_convolution_reason)
def fused_conv(c: Context, x: Node, w: Node, *args: Node) -> Node:
    return _epilogue(c, conv(c, x, w), args)


@lower("_FusedDepthwiseConv2dNative", kinds=FLOAT, check=_convolution_reason)
def fused_depthwise_conv(c: Context, x: Node, w: Node, *args: Node) -> Node:
    return _epilogue(c, depthwise_conv(c, x, w), args)


def _unary_reason(view: GraphView, node: NodeView) -> str | None:
    unknown = [op for op in node.attr("op_names") or [] if op not in REGISTRY]
    return f"op {', '.join(map(str, unknown))} is not supported" if unknown else None


@lower("_UnaryOpsComposition", kinds=FLOAT, check=_unary_reason)
def unary_ops_composition(c: Context, x: Node) -> Node:
    for op in c.attr("op_names") or []:
        fn = REGISTRY[op].fn
        assert fn is not None  # no unary op is only symbolic
        x = fn(c, x)
    return x


def _norm_reason(view: GraphView, node: NodeView) -> str | None:
    mode = node.attr("activation_mode", "Identity")
    if node.attr("is_training", True):
        return "in training its gradient reads what cuDNN leaves there"
    return None if mode in ("Identity", "Relu") else f"activation {mode} is not supported"


@lower("_FusedBatchNormEx", kinds=FLOAT, check=_norm_reason)
def fused_batch_norm_ex(c: Context, *operands: Node) -> list[Node]:
    y, *rest = fused_batch_norm(c, *operands[:5])
    for side in operands[5:]:
        y = c.b.ew("add", y, side)
    if c.attr("activation_mode", "Identity") == "Relu":
        y = relu(c, y)
    return [y, *rest]


@lower("_MklLayerNorm", kinds=FLOAT)
def layer_norm(c: Context, x: Node, scale: Node, offset: Node) -> Node:
    wide, axis = c.wide(x), x.rank - 1
    centred = c.b.ew("sub", wide, mean_over(c, wide, (axis,), True))
    variance = mean_over(c, c.b.ew("mul", centred, centred), (axis,), True)
    inv = c.b.ew("rsqrt", c.b.ew("add", variance, c.b.const(float(c.attr("epsilon", 1e-3)), wide.dtype)))
    y = c.b.ew("add", c.b.ew("mul", c.b.ew("mul", centred, inv), c.wide(scale)), c.wide(offset))
    return c.like(y, x.dtype)


@lower("_MklSwish", kinds=FLOAT)
def swish(c: Context, x: Node) -> Node:
    return c.b.ew("mul", x, c.b.ew("sigmoid", x))
