"""Rounding to quantised levels and back, as quantisation-aware training puts it into graphs."""
from __future__ import annotations

from ...ir.graph import Node
from .context import Context
from .registry import FLOAT, lower


@lower("FakeQuantWithMinMaxArgs", kinds=FLOAT)
def fake_quant_args(c: Context, x: Node) -> Node:
    low, high = (c.b.const(float(c.attr(name)), x.dtype) for name in ("min", "max"))
    return _fake_quant(c, x, low, high, divides=False)


@lower("FakeQuantWithMinMaxVars", kinds=FLOAT)
def fake_quant_vars(c: Context, x: Node, low: Node, high: Node) -> Node:
    return _or_zero(c, _fake_quant(c, x, low, high, divides=True), low, high)


@lower("FakeQuantWithMinMaxVarsPerChannel", kinds=FLOAT)
def fake_quant_channels(c: Context, x: Node, low: Node, high: Node) -> Node:
    return _or_zero(c, _fake_quant(c, x, low, high, divides=False), low, high)


def _or_zero(c: Context, y: Node, low: Node, high: Node) -> Node:
    """An empty range around zero gives zeros."""
    empty = c.b.ew("bit_and", c.b.ew("eq", low, 0.0), c.b.ew("eq", high, 0.0))
    return c.b.select(empty, c.b.const(0, y.dtype), y)


def _fake_quant(c: Context, x: Node, low: Node, high: Node, divides: bool) -> Node:
    """``x`` at the nearest of the levels between ``low`` and ``high``, moved so that zero is one of them.

    TensorFlow's order of roundings; ``divides``: by the step, where its other kernels multiply by its inverse.
    """
    b = c.b
    first, last = float(bool(c.attr("narrow_range", False))), float(2 ** int(c.attr("num_bits", 8)) - 1)
    step = b.ew("div", b.ew("sub", high, low), last - first)
    inverse = b.ew("div", last - first, b.ew("sub", high, low))
    zero = b.ew("sub", first, b.ew("div", low, step))
    zero = b.ew("max", b.ew("min", _rounded(c, zero), last), first)
    low, high = (b.ew("mul", b.ew("sub", end, zero), step) for end in (first, last))
    level_of_zero = b.ew("floor", b.ew("add", b.ew("mul", b.ew("neg", low), inverse), 0.5))
    above = b.ew("sub", b.ew("max", b.ew("min", x, high), low), low)
    levels = b.ew("div", above, step) if divides else b.ew("mul", above, inverse)
    return b.ew("mul", b.ew("floor", b.ew("add", b.ew("sub", levels, level_of_zero), 0.5)), step)


def _rounded(c: Context, x: Node) -> Node:
    """Half up, without the sum that rounds 0.49999997 up."""
    whole = c.b.ew("floor", x)
    return c.b.select(c.b.ew("ge", c.b.ew("sub", x, whole), 0.5), c.b.ew("add", whole, 1.0), whole)
