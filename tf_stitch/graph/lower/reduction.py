"""Reductions, arg-reductions and scans."""
from __future__ import annotations

import numpy as np

from ...ir import dims as D
from ...ir.graph import Node
from .context import Context
from .registry import BOOL, FLOAT, NUM, lower


def _reduced(kind: str):
    def fn(c: Context, x: Node, axes: np.ndarray) -> Node:
        return c.b.reduce(kind, x, c.axes(axes, x.rank), bool(c.attr("keep_dims", False)))

    return fn


for _op, _kind, _kinds in [("Sum", "sum", NUM), ("Prod", "prod", NUM), ("Max", "max", NUM), ("Min", "min", NUM),
                           ("All", "and", BOOL), ("Any", "or", BOOL)]:
    lower(_op, statics=(1,), kinds=_kinds)(_reduced(_kind))


def mean_over(c: Context, x: Node, axes: tuple[int, ...], keepdims: bool = False) -> Node:
    """The mean over axes: sum, then division by the count (integers truncate; no elements give NaN)."""
    total = c.b.reduce("sum", x, axes, keepdims)
    count = c.dim_scalar(D.product(x.shape[a] for a in axes), x.dtype)
    return c.b.ew("div" if c.is_float(x) else "int_div", total, count)


@lower("Mean", statics=(1,), kinds=NUM)
def mean(c: Context, x: Node, axes: np.ndarray) -> Node:
    wide = c.wide(x)
    out = mean_over(c, wide, c.axes(axes, x.rank), bool(c.attr("keep_dims", False)))
    return c.like(out, x.dtype)


@lower("EuclideanNorm", statics=(1,), kinds=FLOAT)
def euclidean_norm(c: Context, x: Node, axes: np.ndarray) -> Node:
    wide = c.wide(x)
    total = c.b.reduce("sum", c.b.ew("mul", wide, wide), c.axes(axes, x.rank), bool(c.attr("keep_dims", False)))
    return c.like(c.b.ew("sqrt", total), x.dtype)


@lower("L2Loss", kinds=FLOAT)
def l2_loss(c: Context, x: Node) -> Node:
    wide = c.wide(x)
    total = c.b.reduce("sum", c.b.ew("mul", wide, wide), range(x.rank))
    return c.like(c.b.ew("mul", total, c.b.const(0.5, wide.dtype)), x.dtype)


def _arg(kind: str):
    def fn(c: Context, x: Node, axis: np.ndarray) -> Node:
        a = c.axis(axis, x.rank)
        c.b.require("le", 1, x.shape[a], f"{c.node.name}: TensorFlow refuses an empty axis")
        return c.b.arg_reduce(kind, x, a, c.dtype)

    return fn


lower("ArgMax", statics=(1,))(_arg("max"))
lower("ArgMin", statics=(1,))(_arg("min"))


def _scan(kind: str):
    def fn(c: Context, x: Node, axis: np.ndarray) -> Node:
        exclusive, reverse = bool(c.attr("exclusive", False)), bool(c.attr("reverse", False))
        return c.b.scan(kind, x, c.axis(axis, x.rank), exclusive, reverse)

    return fn


lower("Cumsum", statics=(1,), kinds=NUM)(_scan("sum"))
lower("Cumprod", statics=(1,), kinds=NUM)(_scan("prod"))
