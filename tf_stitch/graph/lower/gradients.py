"""Gradient ops of elementwise functions, with the corner cases of TensorFlow's CPU kernels."""
from __future__ import annotations

from ...ir.graph import Node
from .context import Context
from .math import one, zero
from .registry import FLOAT, NUM, lower

SELU_SCALE = 1.0507009873554804934193349852946
SELU_SCALE_ALPHA = 1.7580993408473768599402175208123


def _step(c: Context, g: Node, x: Node, upper: float | None = None) -> Node:
    """``g`` where 0 < x (< upper), else g * 0: the kernel multiplies, so a NaN in ``g`` stays."""
    inside = c.b.ew("gt", x, zero(c, x))
    if upper is not None:
        inside = c.b.ew("bit_and", inside, c.b.ew("lt", x, c.b.const(upper, x.dtype)))
    return c.b.ew("mul", g, c.b.cast(inside, g.dtype))


@lower("ReluGrad", kinds=NUM)
def relu_grad(c: Context, g: Node, x: Node) -> Node:
    return _step(c, g, x)


@lower("Relu6Grad", kinds=NUM)
def relu6_grad(c: Context, g: Node, x: Node) -> Node:
    return _step(c, g, x, 6)


@lower("LeakyReluGrad", kinds=FLOAT)
def leaky_relu_grad(c: Context, g: Node, x: Node) -> Node:
    alpha = c.b.const(float(c.attr("alpha", 0.2)), g.dtype)
    return c.b.select(c.b.ew("gt", x, zero(c, x)), g, c.b.ew("mul", g, alpha))


@lower("EluGrad", kinds=FLOAT)
def elu_grad(c: Context, g: Node, y: Node) -> Node:
    return c.b.select(c.b.ew("lt", y, zero(c, y)), c.b.ew("mul", c.b.ew("add", y, one(c, y)), g), g)


@lower("SeluGrad", kinds=FLOAT)
def selu_grad(c: Context, g: Node, y: Node) -> Node:
    below = c.b.ew("mul", g, c.b.ew("add", y, c.b.const(SELU_SCALE_ALPHA, y.dtype)))
    return c.b.select(c.b.ew("lt", y, zero(c, y)), below, c.b.ew("mul", g, c.b.const(SELU_SCALE, g.dtype)))


@lower("SigmoidGrad", kinds=FLOAT)
def sigmoid_grad(c: Context, y: Node, g: Node) -> Node:
    return c.b.ew("mul", c.b.ew("mul", g, y), c.b.ew("sub", one(c, y), y))


@lower("TanhGrad", kinds=FLOAT)
def tanh_grad(c: Context, y: Node, g: Node) -> Node:
    return c.b.ew("mul", g, c.b.ew("sub", one(c, y), c.b.ew("mul", y, y)))


def _unless_zero(c: Context, g: Node, value: Node) -> Node:
    """0 where the incoming gradient is 0, whatever ``value`` is."""
    return c.b.select(c.b.ew("eq", g, zero(c, g)), zero(c, g), value)


@lower("ReciprocalGrad", "InvGrad", kinds=FLOAT)
def reciprocal_grad(c: Context, y: Node, g: Node) -> Node:
    return _unless_zero(c, g, c.b.ew("mul", c.b.ew("neg", c.b.ew("mul", y, y)), g))


@lower("SqrtGrad", kinds=FLOAT)
def sqrt_grad(c: Context, y: Node, g: Node) -> Node:
    return _unless_zero(c, g, c.b.ew("div", c.b.ew("mul", g, c.b.const(0.5, g.dtype)), y))


@lower("RsqrtGrad", kinds=FLOAT)
def rsqrt_grad(c: Context, y: Node, g: Node) -> Node:
    scaled = c.b.ew("mul", c.b.const(-0.5, g.dtype), c.b.ew("mul", g, y))
    return _unless_zero(c, g, c.b.ew("mul", scaled, c.b.ew("mul", y, y)))


@lower("SoftplusGrad", kinds=FLOAT)
def softplus_grad(c: Context, g: Node, x: Node) -> Node:
    return c.b.ew("div", g, c.b.ew("add", c.b.ew("exp", c.b.ew("neg", x)), one(c, x)))


@lower("SoftsignGrad", kinds=FLOAT)
def softsign_grad(c: Context, g: Node, x: Node) -> Node:
    base = c.b.ew("add", c.b.ew("abs", x), one(c, x))
    return c.b.ew("div", g, c.b.ew("mul", base, base))
