"""Rounding to quantised levels and back, as quantisation-aware training puts it into graphs."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ml_dtypes import finfo

from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import GraphView, NodeView
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
    step, inverse, low, high = _nudged(c, low, high)
    level_of_zero = b.ew("floor", b.ew("add", b.ew("mul", b.ew("neg", low), inverse), 0.5))
    above = b.ew("sub", b.ew("max", b.ew("min", x, high), low), low)
    levels = b.ew("div", above, step) if divides else b.ew("mul", above, inverse)
    return b.ew("mul", b.ew("floor", b.ew("add", b.ew("sub", levels, level_of_zero), 0.5)), step)


def _nudged(c: Context, low: Node, high: Node) -> tuple[Node, Node, Node, Node]:
    """(size of a level, levels per unit, range moved so that zero is a level)."""
    b = c.b
    first, last = float(bool(c.attr("narrow_range", False))), float(2 ** int(c.attr("num_bits", 8)) - 1)
    step = b.ew("div", b.ew("sub", high, low), last - first)
    inverse = b.ew("div", last - first, b.ew("sub", high, low))
    zero = b.ew("sub", first, b.ew("div", low, step))
    zero = b.ew("max", b.ew("min", _rounded(c, zero), last), first)
    low, high = (b.ew("mul", b.ew("sub", end, zero), step) for end in (first, last))
    return step, inverse, low, high


@lower("FakeQuantWithMinMaxArgsGradient", kinds=FLOAT)
def fake_quant_args_grad(c: Context, g: Node, x: Node) -> Node:
    _, _, low, high = _nudged(c, *(c.b.const(float(c.attr(name)), x.dtype) for name in ("min", "max")))
    inside = c.b.ew("bit_and", c.b.ew("ge", x, low), c.b.ew("le", x, high))
    return c.b.ew("mul", g, c.b.cast(inside, g.dtype))


@lower("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient", kinds=FLOAT)
def fake_quant_vars_grad(c: Context, g: Node, x: Node, low: Node, high: Node) -> list[Node]:
    """What is inside the range hands its gradient on, what is outside gives it to that end of the range."""
    b, rest = c.b, range(x.rank - low.rank)
    _, _, first, last = _nudged(c, low, high)
    empty = b.ew("bit_and", b.ew("eq", low, 0.0), b.ew("eq", high, 0.0))
    inside = b.ew("bit_and", b.ew("ge", x, first), b.ew("le", x, last))
    passed = b.select(empty, g, b.ew("mul", g, b.cast(inside, g.dtype)))
    ends = [b.reduce("sum", b.ew("mul", g, b.cast(b.ew(side, x, end), g.dtype)), rest)
            for side, end in (("lt", first), ("gt", last))]
    return [passed, *(b.select(empty, b.const(0, g.dtype), end) for end in ends)]


def _rounded(c: Context, x: Node) -> Node:
    """Half up, without the sum that rounds 0.49999997 up."""
    whole = c.b.ew("floor", x)
    return c.b.select(c.b.ew("ge", c.b.ew("sub", x, whole), 0.5), c.b.ew("add", whole, 1.0), whole)


def _one_range(view: GraphView, node: NodeView) -> str | None:
    """TensorFlow's kernels refuse ranges that are given for each index of an axis."""
    given = node.attr("range_given", False) and node.attr("axis", -1) != -1
    return "ranges are given for each index of an axis" if given else None


@lower("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4", kinds=FLOAT, check=_one_range)
def quantize_and_dequantize(c: Context, x: Node, low: Node, high: Node) -> Node:
    return _there_and_back(c, x, low, high, int(c.attr("num_bits", 8)))


@lower("QuantizeAndDequantizeV3", statics=(3,), kinds=FLOAT, check=_one_range)
def quantize_and_dequantize_bits(c: Context, x: Node, low: Node, high: Node, bits: np.ndarray) -> Node:
    return _there_and_back(c, x, low, high, int(bits.reshape(())))


def _there_and_back(c: Context, x: Node, low: Node, high: Node, bits: int) -> Node:
    """``x`` in whole steps of a scale with 0 on it, for the tensor or for each index of an axis.

    The range is given, and clips, or is that of the values.  TensorFlow's kernel copies it to the host first.
    """
    b, axis, given = c.b, int(c.attr("axis", -1)), bool(c.attr("range_given", False))
    if given:
        low = _in_order(c, low, high)
    else:
        low, high = (b.reduce(kind, x, [i for i in range(x.rank) if i != axis]) for kind in ("min", "max"))
        if axis != -1:
            low, high = (c.channel(end, x.rank, axis) for end in (low, high))
    scale, step, low, high = _scale(c, low, high, *_levels(c, bits))
    if given:
        x = b.ew("max", b.ew("min", x, high), low)
    scaled = b.ew("mul", x, scale)
    half_up = c.attr("round_mode", "HALF_TO_EVEN") == "HALF_UP"
    return b.ew("mul", b.ew("floor", b.ew("add", scaled, 0.5)) if half_up else b.ew("rint", scaled), step)


def _in_order(c: Context, low: Node, high: Node) -> Node:
    """``low``, or the error of a range whose ends are the wrong way round."""
    place = c.b.select(c.b.ew("gt", low, high), c.b.const(-1, "int32"), 0)
    return c.b.gather(c.b.reshape(low, (1,)), place)


def _levels(c: Context, bits: int) -> tuple[int, int]:
    """The first and the last whole number of a scale."""
    if not c.attr("signed_input", True):
        return 0, 2 ** bits - 1
    return -2 ** (bits - 1) + bool(c.attr("narrow_range", False)), 2 ** (bits - 1) - 1


def _scale(c: Context, low: Node, high: Node, first: int, last: int) -> Sequence[Node]:
    """(levels per unit, size of a level, range) such that both ends fit: the end that is the farther one decides."""
    b, none = c.b, c.b.const(float(finfo(DTYPES[low.dtype].numpy).max), low.dtype)
    per_low, per_high = (b.select(b.ew("gt", b.ew("mul", end, float(level)), 0.0),
                                  b.ew("div", b.const(float(level), end.dtype), end), none)
                         for end, level in ((low, first), (high, last)))
    by_low = b.ew("lt", per_low, per_high)
    step = b.select(by_low, b.ew("div", low, float(first)), b.ew("div", high, float(last)))
    return (b.select(by_low, per_low, per_high), step, b.select(by_low, low, b.ew("mul", step, float(first))),
            b.select(by_low, b.ew("mul", step, float(last)), high))
