"""Hand-made IR graphs for the planner's tests."""
from __future__ import annotations

import numpy as np

from tf_stitch.ir import dims as D
from tf_stitch.ir.graph import Graph, Node


def param(index, shape, dtype="float32"):
    return Node("param", [], {"index": index}, shape, dtype, f"p{index}")


def ew(op, *xs):
    return Node(op, xs, {}, xs[0].shape, xs[0].dtype, op)


def const(value):
    value = np.asarray(value, np.float32)
    return Node("const", [], {"value": value}, value.shape, "float32", "const")


def reduce(kind, x, axes):
    shape = [d for i, d in enumerate(x.shape) if i not in axes]
    return Node("reduce", [x], {"kind": kind, "axes": tuple(axes)}, shape, x.dtype, f"reduce_{kind}")


def broadcast(x, shape, axes):
    return Node("broadcast", [x], {"axes": tuple(axes)}, shape, x.dtype, "broadcast")


def reshape(x, shape):
    return Node("reshape", [x], {}, shape, x.dtype, "reshape")


def transpose(x, perm):
    return Node("transpose", [x], {"perm": tuple(perm)}, [x.shape[p] for p in perm], x.dtype, "transpose")


def scalar_like(value, x):
    return broadcast(const(value), x.shape, ())


def row_norm(x):
    """(x - mean) * rsqrt(var + eps) over the last axis of a matrix."""
    rows, cols = x.shape
    scale = broadcast(const(1.0 / cols), (rows,), ())
    mean = ew("mul", reduce("sum", x, (1,)), scale)
    centred = ew("sub", x, broadcast(mean, x.shape, (0,)))
    var = ew("mul", reduce("sum", ew("mul", centred, centred), (1,)), scale)
    inv = ew("rsqrt", ew("add", var, broadcast(const(1e-3), (rows,), ())))
    return ew("mul", centred, broadcast(inv, x.shape, (0,)))


def row_exp_share(x):
    """exp(x - max) / sum over the last axis of a matrix."""
    e = ew("exp", ew("sub", x, broadcast(reduce("max", x, (1,)), x.shape, (0,))))
    return ew("div", e, broadcast(reduce("sum", e, (1,)), x.shape, (0,)))


def erf_gate(x):
    return ew("mul", ew("mul", x, scalar_like(0.5, x)),
              ew("add", ew("erf", ew("mul", x, scalar_like(0.70710678, x))), scalar_like(1.0, x)))


def norm_gate_share(rows, cols):
    """The benchmark's chain: normalise rows, erf gate, normalised exponentials."""
    x, g, b = param(0, (rows, cols)), param(1, (cols,)), param(2, (cols,))
    y = ew("add", ew("mul", row_norm(x), broadcast(g, x.shape, (1,))), broadcast(b, x.shape, (1,)))
    return Graph([x, g, b], [row_exp_share(erf_gate(y))])


def symbol(name):
    return D.symbol(name)
