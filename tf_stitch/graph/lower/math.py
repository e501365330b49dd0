"""Elementwise math, comparisons, logic, bits, casts and selection."""
from __future__ import annotations

from functools import reduce

import numpy as np

from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import GraphView, NodeView
from .context import Context
from .registry import BOOL, FLOAT, INT, NUM, lower

# TensorFlow op -> (IR op, element kinds of TensorFlow's kernel)
_UNARY = {
    "Neg": ("neg", NUM), "Abs": ("abs", NUM), "Sign": ("sign", NUM), "Floor": ("floor", FLOAT), "Ceil": ("ceil", FLOAT),
    "Rint": ("rint", FLOAT), "Sqrt": ("sqrt", FLOAT), "Rsqrt": ("rsqrt", FLOAT), "Exp": ("exp", FLOAT),
    "Expm1": ("expm1", FLOAT), "Log": ("log", FLOAT), "Log1p": ("log1p", FLOAT), "Sigmoid": ("sigmoid", FLOAT),
    "Softplus": ("softplus", FLOAT), "Sin": ("sin", FLOAT), "Cos": ("cos", FLOAT), "Tan": ("tan", FLOAT),
    "Asin": ("asin", FLOAT), "Acos": ("acos", FLOAT), "Atan": ("atan", FLOAT), "Sinh": ("sinh", FLOAT),
    "Cosh": ("cosh", FLOAT), "Tanh": ("tanh", FLOAT), "Asinh": ("asinh", FLOAT), "Acosh": ("acosh", FLOAT),
    "Atanh": ("atanh", FLOAT), "Erf": ("erf", FLOAT), "Erfc": ("erfc", FLOAT), "Erfinv": ("erfinv", FLOAT),
    "Ndtri": ("ndtri", FLOAT), "Lgamma": ("lgamma", FLOAT), "Digamma": ("digamma", FLOAT),
    "BesselI0e": ("bessel_i0e", FLOAT), "BesselI1e": ("bessel_i1e", FLOAT), "IsNan": ("is_nan", FLOAT),
    "IsInf": ("is_inf", FLOAT), "IsFinite": ("is_finite", FLOAT), "Invert": ("bit_not", INT),
    "LogicalNot": ("bit_not", BOOL), "PopulationCount": ("popcount", INT),
}

_BINARY = {
    "Add": ("add", NUM), "AddV2": ("add", NUM), "Sub": ("sub", NUM), "Mul": ("mul", NUM), "RealDiv": ("div", FLOAT),
    "TruncateDiv": ("int_div", INT), "DivNoNan": ("div_no_nan", FLOAT), "Maximum": ("max", NUM),
    "Minimum": ("min", NUM), "Atan2": ("atan2", FLOAT),
    "NextAfter": ("nextafter", FLOAT), "Igamma": ("igamma", FLOAT),
    "Igammac": ("igammac", FLOAT), "Zeta": ("zeta", FLOAT), "Polygamma": ("polygamma", FLOAT),
    "BitwiseAnd": ("bit_and", INT), "BitwiseOr": ("bit_or", INT), "BitwiseXor": ("bit_xor", INT),
    "LogicalAnd": ("bit_and", BOOL), "LogicalOr": ("bit_or", BOOL), "LeftShift": ("shift_left", INT),
    "RightShift": ("shift_right", INT), "Less": ("lt", NUM), "LessEqual": ("le", NUM), "Greater": ("gt", NUM),
    "GreaterEqual": ("ge", NUM),
}


def _direct(ir_op: str):
    return lambda c, *xs: c.b.ew(ir_op, *xs)


for _tf_op, (_ir_op, _kinds) in {**_UNARY, **_BINARY}.items():
    lower(_tf_op, kinds=_kinds)(_direct(_ir_op))
lower("Betainc", kinds=FLOAT)(_direct("betainc"))


def zero(c: Context, x: Node) -> Node:
    """A scalar zero of the type of ``x``."""
    return c.b.const(0, x.dtype)


def one(c: Context, x: Node) -> Node:
    return c.b.const(1, x.dtype)


# --- arithmetic ------------------------------------------------------------------------------------

@lower("Square", kinds=NUM)
def square(c: Context, x: Node) -> Node:
    return c.b.ew("mul", x, x)


@lower("Reciprocal", "Inv", kinds=FLOAT)
def reciprocal(c: Context, x: Node) -> Node:
    return c.b.ew("div", one(c, x), x)


@lower("Round", kinds=FLOAT)  # of integers TensorFlow's kernel makes 0: left to it
def round_(c: Context, x: Node) -> Node:
    return c.b.ew("rint", x)  # half to even


@lower("Div", kinds=NUM)
def div(c: Context, x: Node, y: Node) -> Node:
    return c.b.ew("div" if c.is_float(x) else "int_div", x, y)


@lower("Pow", kinds=NUM)
def power(c: Context, x: Node, y: Node) -> Node:
    return c.b.ew("pow" if c.is_float(x) else "int_pow", x, y)


@lower("FloorDiv", kinds=NUM)
def floor_div(c: Context, x: Node, y: Node) -> Node:
    if c.is_float(x):
        return c.b.ew("floor", c.b.ew("div", x, y))
    quotient = c.b.ew("int_div", x, y)
    if DTYPES[x.dtype].kind == "uint":
        return quotient
    rest = c.b.ew("sub", x, c.b.ew("mul", quotient, y))
    return c.b.select(_crosses_zero(c, rest, y), c.b.ew("sub", quotient, one(c, x)), quotient)


def _crosses_zero(c: Context, rest: Node, y: Node) -> Node:
    """The remainder is not zero and its sign is not the divisor's."""
    signs = c.b.ew("ne", c.b.ew("lt", rest, zero(c, rest)), c.b.ew("lt", y, zero(c, y)))
    return c.b.ew("bit_and", c.b.ew("ne", rest, zero(c, rest)), signs)


@lower("FloorMod", kinds=NUM)
def floor_mod(c: Context, x: Node, y: Node) -> Node:
    rest = truncate_mod(c, x, y)
    if DTYPES[x.dtype].kind == "uint":
        return rest
    return c.b.select(_crosses_zero(c, rest, y), c.b.ew("add", rest, y), rest)


@lower("Mod", "TruncateMod", kinds=NUM)
def truncate_mod(c: Context, x: Node, y: Node) -> Node:
    return c.b.ew("fmod" if c.is_float(x) else "int_mod", x, y)


@lower("SquaredDifference", kinds=NUM)
def squared_difference(c: Context, x: Node, y: Node) -> Node:
    return square(c, c.b.ew("sub", x, y))


@lower("MulNoNan", kinds=FLOAT)
def mul_no_nan(c: Context, x: Node, y: Node) -> Node:
    return c.b.select(c.b.ew("eq", y, zero(c, y)), zero(c, x), c.b.ew("mul", x, y))


def _zero_wins(ir_op: str, transform: str | None = None):
    """0 where x is 0, else ``op(x, transform(y))``."""
    def fn(c: Context, x: Node, y: Node) -> Node:
        y = c.b.ew(transform, y) if transform else y
        return c.b.select(c.b.ew("eq", x, zero(c, x)), zero(c, x), c.b.ew(ir_op, x, y))

    return fn


lower("Xdivy", kinds=FLOAT)(_zero_wins("div"))
lower("Xlogy", kinds=FLOAT)(_zero_wins("mul", "log"))
lower("Xlog1py", kinds=FLOAT)(_zero_wins("mul", "log1p"))


@lower("AddN", "AccumulateNV2", kinds=NUM)
def add_n(c: Context, *xs: Node) -> Node:
    return reduce(lambda a, b: c.b.ew("add", a, b), xs)


@lower("ClipByValue", kinds=NUM)
def clip_by_value(c: Context, x: Node, low: Node, high: Node) -> Node:
    return c.b.ew("max", c.b.ew("min", x, high), low)


@lower("Cross", kinds=NUM)
def cross(c: Context, x: Node, y: Node) -> Node:
    """The vector product of rows of three."""
    for v in (x, y):
        c.b.same_dim(v.shape[-1], 3, f"{c.node.name}: vectors have three elements")
    turned = [[c.b.gather(v, c.b.const(np.array(order, np.int32)), v.rank - 1, mode="clip")
               for order in ((1, 2, 0), (2, 0, 1))] for v in (x, y)]
    (a, p), (b, q) = turned
    return c.b.ew("sub", c.b.ew("mul", a, q), c.b.ew("mul", p, b))


# --- comparison and selection ----------------------------------------------------------------------

def _comparable(view: GraphView, node: NodeView) -> str | None:
    """With incompatible_shape_error off (Python's ``==`` and ``!=``), shapes that do not broadcast give a scalar.

    Unknown dims are taken to agree, as everywhere; where they do not, a guard leaves the call to TensorFlow.
    """
    if node.attr("incompatible_shape_error", True):
        return None
    shapes = [view.shape(r) or () for r in node.inputs]
    fits = all(a == b or not {a, b}.isdisjoint((None, 1)) for a, b in zip(*(s[::-1] for s in shapes), strict=False))
    return None if fits else "incompatible_shape_error is off and the shapes are incompatible"


lower("Equal", check=_comparable)(_direct("eq"))
lower("NotEqual", check=_comparable)(_direct("ne"))


@lower("ApproximateEqual", kinds=NUM)
def approximate_equal(c: Context, x: Node, y: Node) -> Node:
    if x.rank != y.rank:
        c.fail("its operands differ in rank, which TensorFlow refuses")
    for a, b in zip(x.shape, y.shape, strict=True):
        c.b.same_dim(a, b, f"{c.node.name}: operands of one shape (this op does not broadcast)")
    distance = c.b.ew("abs", c.b.ew("sub", x, y))
    return c.b.ew("lt", distance, c.b.const(float(c.attr("tolerance", 1e-5)), x.dtype))


@lower("SelectV2")
def select_v2(c: Context, condition: Node, x: Node, y: Node) -> Node:
    return c.b.select(condition, x, y)


@lower("Select")
def select(c: Context, condition: Node, x: Node, y: Node) -> Node:
    if condition.rank == 1 and x.rank > 1:  # a vector picks rows
        condition = c.channel(condition, x.rank, 0)
    return c.b.select(condition, x, y)


# --- types -----------------------------------------------------------------------------------------

def _no_truncate(view: GraphView, node: NodeView) -> str | None:
    return "Cast with Truncate is not supported" if node.attr("Truncate", False) else None


@lower("Cast", check=_no_truncate)
def cast(c: Context, x: Node) -> Node:
    return c.b.cast(x, c.dtype)


def _same_size(view: GraphView, node: NodeView) -> str | None:
    a, b = (DTYPES[view.dtype(r)] for r in (node.inputs[0], (node.name, 0)))
    if a.size != b.size or "bool" in (a.kind, b.kind):
        return f"Bitcast from {a.name} to {b.name} changes the element size"
    return None


@lower("Bitcast", check=_same_size)
def bitcast(c: Context, x: Node) -> Node:
    return c.b.bitcast(x, c.dtype)
