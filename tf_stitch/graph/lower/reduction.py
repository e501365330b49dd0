"""Reductions, arg-reductions and scans."""
from __future__ import annotations

import numpy as np

from ...ir import dims as D
from ...ir.graph import Node
from .context import Context
from .registry import BOOL, FLOAT, NUM, lower

LONGEST = 1 << 9  # elements of a row whose prefixes are folded one by one


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


@lower("CumulativeLogsumexp", statics=(1,), kinds=FLOAT, on_gpu=True)
def cumulative_logsumexp(c: Context, x: Node, axis: np.ndarray) -> Node:
    """Each prefix is shifted by its own maximum, so that no prefix loses what a later one outweighs."""
    a, b, wide = c.axis(axis, x.rank), c.b, c.wide(x)
    b.require("le", x.shape[a], LONGEST, f"{c.node.name}: short rows")
    last = [i for i in range(x.rank) if i != a] + [a]
    rows = b.transpose(wide, last)
    n = rows.shape[-1]
    place, element = b.iota((n, 1), 0, "int32"), b.iota((1, n), 1, "int32")
    if c.attr("reverse", False):
        place, element = element, place
    counts = b.ew("lt" if c.attr("exclusive", False) else "le", element, place)
    prefixes = b.select(counts, c.expand(rows, [rows.rank - 1]), -np.inf)
    top = b.reduce("max", prefixes, [rows.rank], True)
    top = b.select(b.ew("is_finite", top), top, 0.0)
    total = b.reduce("sum", b.ew("exp", b.ew("sub", prefixes, top)), [rows.rank])
    folded = b.ew("add", b.ew("log", total), b.reshape(top, total.shape))
    return c.like(b.transpose(folded, [last.index(i) for i in range(x.rank)]), x.dtype)


@lower("InTopK", "InTopKV2", kinds=FLOAT)
def in_top_k(c: Context, scores: Node, targets: Node, *k: Node) -> Node:
    """Fewer than k scores of the row are larger than the target's; false where one of them is not finite."""
    b, many = c.b, c.like(k[0], "int64") if k else int(c.attr("k"))
    rows = b.same_dim(scores.shape[0], targets.shape[0], f"{c.node.name}: a target for every row")
    scores, targets = b.reshape(scores, (rows, scores.shape[1])), b.reshape(targets, (rows,))
    at_target = b.gather(scores, c.expand(targets, [1]), axis=1, batch_dims=1, mode="zero")
    inside = b.ew("bit_and", b.ew("ge", targets, 0), b.ew("lt", targets, c.dim_scalar(scores.shape[1], targets.dtype)))
    finite = b.reduce("and", b.ew("is_finite", scores), [1])
    above = b.reduce("sum", b.cast(b.ew("gt", scores, at_target), "int64"), [1])
    return b.ew("bit_and", b.ew("bit_and", inside, finite), b.ew("lt", above, many))
