"""Ops that Grappler's own optimizers make out of others."""
from __future__ import annotations

import math

from ...ir.graph import Node
from ..view import GraphView, NodeView
from .context import Context
from .nn import bias_add, elu, fused_batch_norm, matmul, relu, relu6
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


ACTIVATIONS = {
    "Relu": relu, "Relu6": relu6, "Elu": elu, "LeakyRelu": _leaky, "GeluExact": _gelu_exact,
    "GeluApproximate": _gelu_approximate, "Tanh": lambda c, x: c.b.ew("tanh", x),
    "Sigmoid": lambda c, x: c.b.ew("sigmoid", x),
}


def _epilogue_reason(view: GraphView, node: NodeView) -> str | None:
    fused = list(node.attr("fused_ops") or [])
    unknown = [op for op in fused if op not in ("BiasAdd", "Add") and op not in ACTIVATIONS]
    if unknown:
        return f"fused op {', '.join(map(str, unknown))} is not supported"
    return None if int(node.attr("num_args", 0)) == fused.count("BiasAdd") + fused.count("Add") else (
        "its extra operands are not just a bias and a sum")


@lower("_FusedMatMul", kinds=FLOAT, check=_epilogue_reason)
def fused_matmul(c: Context, x: Node, y: Node, *args: Node) -> Node:
    out, left = matmul(c, x, y), list(args)
    for op in c.attr("fused_ops") or []:
        if op == "Add":
            out = c.b.ew("add", out, left.pop(0))
        else:
            out = bias_add(c, out, left.pop(0)) if op == "BiasAdd" else ACTIVATIONS[op](c, out)
    return out


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
