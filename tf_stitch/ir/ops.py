"""The primitive operations: one table entry each, read by the verifier, the interpreter, the schedule
rules and the emitter.  Adding an elementwise op is one line here.

Attrs by op (``Dim`` = int or symbolic):
  param        index:int
  const        value:np.ndarray                     (small literals; large constants are params)
  shape_value  dims:tuple[Dim,...] (flat, row-major) integer tensor whose contents are symbolic dims
  iota         axis:int                             0,1,2,... along axis
  cast         -                                    TensorFlow's Cast (float to int truncates)
  bitcast      -                                    same element size
  select       inputs (cond, x, y), one shape       cond ? x : y
  broadcast    axes:tuple[int]  operand dim i is result dim axes[i] (equal sizes; axes increasing); other dims are new
  reshape      -
  transpose    perm:tuple[int]                      result dim i is operand dim perm[i]
  slice        starts:tuple[Dim], steps:tuple[int>0]
  reverse      axes:tuple[int]
  pad          low:tuple[Dim], high:tuple[Dim], interior:tuple[int]; inputs (x, value scalar)
  concat       axis:int; any number of inputs
  gather       inputs (params, indices); axis:int, batch_dims:int, mode:"error"|"clip"|"zero"
               result = params.shape[:axis] + indices.shape[batch_dims:] + params.shape[axis+1:]
  gather_nd    inputs (params, indices); batch_dims:int, mode as gather
  reduce       kind:"sum"|"prod"|"max"|"min"|"and"|"or"; axes:tuple[int] (sorted; dropped from the shape)
  arg_reduce   kind:"max"|"min"; axis:int           first index of the extreme; NaN counts as in TensorFlow
  scan         kind:"sum"|"prod"; axis:int, exclusive:bool, reverse:bool
  dot          batch:tuple[tuple[int],tuple[int]] and contract:likewise (lhs axes, rhs axes)
               result dims: batch, lhs free, rhs free (each in operand order)
  conv         inputs (x NHWC-like, filter HWIO-like); strides, padding:tuple[(lo,hi)], dilations, groups:int
               spatial rank 1..3, channels last; filter [*k, in/groups, out]
  window       kind:"max"|"sum"|"mean"(mean ignores padding); size, strides, padding over spatial dims, channels last
Elementwise ops take operands of one shape (broadcasts are explicit) and one dtype.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import dims as D
from .dtypes import DTYPES, DType
from .graph import Node, Shape

Type = tuple[Shape, str]  # (shape, dtype name)


class IRError(ValueError):
    """An IR node breaks the rules of its op; the message names op, origin and what is wrong."""


# Cost classes, read by the planner and the schedule: what one element costs to compute again.
FREE, CHEAP, EXPENSIVE = 0, 1, 2


@dataclass(frozen=True)
class OpDef:
    """What an op is.

    ``infer(inputs, attrs)`` gives the result type or raises IRError.  ``evaluate(arrays, attrs,
    shape, dtype)`` is the NumPy meaning; ``shape`` is concrete and attrs hold no symbols.  ``c`` is the
    C++ expression of an elementwise op over operands ``{0} {1} {2}`` of compute type ``{T}``;
    None for the others, which the emitter knows by structure.
    """

    name: str
    arity: int | None
    infer: Callable[[Sequence[Node], Mapping[str, Any]], Type]
    evaluate: Callable[..., np.ndarray] | None = None
    c: str | None = None
    cost: int = CHEAP
    kinds: tuple[str, ...] = ("float", "int", "uint", "bool")

    @property
    def elementwise(self) -> bool:
        return self.c is not None


OPS: dict[str, OpDef] = {}


def register(op: OpDef) -> OpDef:
    """Adds an op to the table (also how an extension adds one)."""
    OPS[op.name] = op
    return op


# --- elementwise -----------------------------------------------------------------------------------

def _same(inputs: Sequence[Node], attrs: Mapping[str, Any]) -> Type:
    first = inputs[0]
    for other in inputs[1:]:
        if other.shape != first.shape or other.dtype != first.dtype:
            raise IRError(f"operands differ: {first} and {other}")
    return first.shape, first.dtype


def _same_bool(inputs: Sequence[Node], attrs: Mapping[str, Any]) -> Type:
    return _same(inputs, attrs)[0], "bool"


def _in_compute_type(fn: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Half types compute in float32 and round once, as the kernels do."""

    def evaluate(arrays, attrs, shape, dtype):
        d: DType = DTYPES[dtype]
        if arrays and arrays[0].dtype.itemsize == 2 and d_kind(arrays[0]) == "float":
            arrays = [a.astype(np.float32) for a in arrays]
        with np.errstate(all="ignore"):
            return np.asarray(fn(*arrays)).astype(d.numpy)

    return evaluate


def d_kind(array: np.ndarray) -> str:
    """The kind ("float", "int", "uint", "bool") of an array's element type."""
    for d in DTYPES.values():
        if d.numpy == array.dtype:
            return d.kind
    raise KeyError(f"element type {array.dtype} is not supported")


FLOAT, INT, NUM = ("float",), ("int", "uint"), ("float", "int", "uint")
INTBOOL, ALL = ("int", "uint", "bool"), ("float", "int", "uint", "bool")


def _elementwise(name: str, arity: int, fn: Callable[..., np.ndarray], c: str, kinds=NUM, cost=CHEAP, infer=_same) -> None:
    register(OpDef(name, arity, infer, _in_compute_type(fn), c, cost, kinds))


def _math(fn: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    """A scalar libm function applied in float64."""
    return np.vectorize(fn, otypes=[np.float64])


def _scipy(name: str) -> Callable[..., np.ndarray]:
    """A SciPy special function, imported only when evaluated (SciPy is a test requirement, not a need)."""

    def call(*arrays):
        import scipy.special  # noqa: PLC0415

        return getattr(scipy.special, name)(*(np.asarray(a, np.float64) for a in arrays))

    return call


def _divide_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """C division: truncates toward zero; kernels report a zero divisor through the status word."""
    safe = np.where(b == 0, 1, b)
    q = np.floor_divide(a, safe)
    return np.where((q < 0) & (q * safe != a), q + 1, q)


def _nan_prop(pick: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return pick  # np.maximum and np.minimum propagate NaN, as TensorFlow's do


def _shift(op: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """TensorFlow clamps the shift count to [0, bits - 1]."""

    def call(a, b):
        return op(a, np.clip(b, 0, a.dtype.itemsize * 8 - 1).astype(a.dtype))

    return call


def _round_half_even(x: np.ndarray) -> np.ndarray:
    return np.rint(x)


def _sign(x: np.ndarray) -> np.ndarray:
    return np.sign(x)


# name, arity, NumPy, C++ (ts_* are in codegen/include), kinds, cost
for _row in [
    ("neg", 1, np.negative, "(-{0})", NUM, CHEAP),
    ("abs", 1, np.abs, "ts_abs({0})", NUM, CHEAP),
    ("sign", 1, _sign, "ts_sign({0})", NUM, CHEAP),
    ("floor", 1, np.floor, "ts_floor({0})", FLOAT, CHEAP),
    ("ceil", 1, np.ceil, "ts_ceil({0})", FLOAT, CHEAP),
    ("rint", 1, _round_half_even, "ts_rint({0})", FLOAT, CHEAP),
    ("sqrt", 1, np.sqrt, "ts_sqrt({0})", FLOAT, EXPENSIVE),
    ("rsqrt", 1, lambda x: 1 / np.sqrt(x), "ts_rsqrt({0})", FLOAT, EXPENSIVE),
    ("exp", 1, np.exp, "ts_exp({0})", FLOAT, EXPENSIVE),
    ("expm1", 1, np.expm1, "ts_expm1({0})", FLOAT, EXPENSIVE),
    ("log", 1, np.log, "ts_log({0})", FLOAT, EXPENSIVE),
    ("log1p", 1, np.log1p, "ts_log1p({0})", FLOAT, EXPENSIVE),
    ("sigmoid", 1, lambda x: 1 / (1 + np.exp(-x)), "ts_sigmoid({0})", FLOAT, EXPENSIVE),
    ("softplus", 1, lambda x: np.logaddexp(x, 0), "ts_softplus({0})", FLOAT, EXPENSIVE),
    ("sin", 1, np.sin, "ts_sin({0})", FLOAT, EXPENSIVE),
    ("cos", 1, np.cos, "ts_cos({0})", FLOAT, EXPENSIVE),
    ("tan", 1, np.tan, "ts_tan({0})", FLOAT, EXPENSIVE),
    ("asin", 1, np.arcsin, "ts_asin({0})", FLOAT, EXPENSIVE),
    ("acos", 1, np.arccos, "ts_acos({0})", FLOAT, EXPENSIVE),
    ("atan", 1, np.arctan, "ts_atan({0})", FLOAT, EXPENSIVE),
    ("sinh", 1, np.sinh, "ts_sinh({0})", FLOAT, EXPENSIVE),
    ("cosh", 1, np.cosh, "ts_cosh({0})", FLOAT, EXPENSIVE),
    ("tanh", 1, np.tanh, "ts_tanh({0})", FLOAT, EXPENSIVE),
    ("asinh", 1, np.arcsinh, "ts_asinh({0})", FLOAT, EXPENSIVE),
    ("acosh", 1, np.arccosh, "ts_acosh({0})", FLOAT, EXPENSIVE),
    ("atanh", 1, np.arctanh, "ts_atanh({0})", FLOAT, EXPENSIVE),
    ("erf", 1, _scipy("erf"), "ts_erf({0})", FLOAT, EXPENSIVE),
    ("erfc", 1, _scipy("erfc"), "ts_erfc({0})", FLOAT, EXPENSIVE),
    ("erfinv", 1, _scipy("erfinv"), "ts_erfinv({0})", FLOAT, EXPENSIVE),
    ("ndtri", 1, _scipy("ndtri"), "ts_ndtri({0})", FLOAT, EXPENSIVE),
    ("lgamma", 1, _scipy("gammaln"), "ts_lgamma({0})", FLOAT, EXPENSIVE),
    ("digamma", 1, _scipy("digamma"), "ts_digamma({0})", FLOAT, EXPENSIVE),
    ("bessel_i0e", 1, _scipy("i0e"), "ts_bessel_i0e({0})", FLOAT, EXPENSIVE),
    ("bessel_i1e", 1, _scipy("i1e"), "ts_bessel_i1e({0})", FLOAT, EXPENSIVE),
    ("bit_not", 1, np.invert, "ts_bit_not({0})", INTBOOL, CHEAP),  # on bool: logical not
    ("popcount", 1, lambda x: np.bitwise_count(x), "ts_popcount({0})", INT, CHEAP),  # result uint8
    ("is_nan", 1, np.isnan, "ts_is_nan({0})", FLOAT, CHEAP),
    ("is_inf", 1, np.isinf, "ts_is_inf({0})", FLOAT, CHEAP),
    ("is_finite", 1, np.isfinite, "ts_is_finite({0})", FLOAT, CHEAP),
    ("add", 2, np.add, "({0} + {1})", NUM, CHEAP),
    ("sub", 2, np.subtract, "({0} - {1})", NUM, CHEAP),
    ("mul", 2, np.multiply, "({0} * {1})", NUM, CHEAP),
    ("div", 2, np.divide, "({0} / {1})", FLOAT, CHEAP),
    ("div_no_nan", 2, lambda a, b: np.where(b == 0, 0, a / np.where(b == 0, 1, b)), "ts_div_no_nan({0}, {1})", FLOAT, CHEAP),
    ("int_div", 2, _divide_int, "ts_int_div({0}, {1}, ts_status)", INT, EXPENSIVE),  # truncates; zero divisor sets the status
    ("int_mod", 2, lambda a, b: a - _divide_int(a, b) * np.where(b == 0, 1, b), "ts_int_mod({0}, {1}, ts_status)", INT, EXPENSIVE),
    ("fmod", 2, np.fmod, "ts_fmod({0}, {1})", FLOAT, EXPENSIVE),  # sign of the dividend
    ("max", 2, np.maximum, "ts_max({0}, {1})", ALL, CHEAP),  # NaN in either gives NaN
    ("min", 2, np.minimum, "ts_min({0}, {1})", ALL, CHEAP),
    ("pow", 2, np.power, "ts_pow({0}, {1})", NUM, EXPENSIVE),
    ("atan2", 2, np.arctan2, "ts_atan2({0}, {1})", FLOAT, EXPENSIVE),
    ("nextafter", 2, np.nextafter, "ts_nextafter({0}, {1})", FLOAT, EXPENSIVE),
    ("igamma", 2, _scipy("gammainc"), "ts_igamma({0}, {1})", FLOAT, EXPENSIVE),
    ("igammac", 2, _scipy("gammaincc"), "ts_igammac({0}, {1})", FLOAT, EXPENSIVE),
    ("zeta", 2, _scipy("zeta"), "ts_zeta({0}, {1})", FLOAT, EXPENSIVE),
    ("polygamma", 2, _scipy("polygamma"), "ts_polygamma({0}, {1})", FLOAT, EXPENSIVE),
    ("betainc", 3, _scipy("betainc"), "ts_betainc({0}, {1}, {2})", FLOAT, EXPENSIVE),
    ("bit_and", 2, np.bitwise_and, "ts_bit_and({0}, {1})", INTBOOL, CHEAP),
    ("bit_or", 2, np.bitwise_or, "ts_bit_or({0}, {1})", INTBOOL, CHEAP),
    ("bit_xor", 2, np.bitwise_xor, "ts_bit_xor({0}, {1})", INTBOOL, CHEAP),
    ("shift_left", 2, _shift(np.left_shift), "ts_shift_left({0}, {1})", INT, CHEAP),
    ("shift_right", 2, _shift(np.right_shift), "ts_shift_right({0}, {1})", INT, CHEAP),
    ("eq", 2, np.equal, "({0} == {1})", ALL, CHEAP),
    ("ne", 2, np.not_equal, "({0} != {1})", ALL, CHEAP),
    ("lt", 2, np.less, "({0} < {1})", ALL, CHEAP),
    ("le", 2, np.less_equal, "({0} <= {1})", ALL, CHEAP),
    ("gt", 2, np.greater, "({0} > {1})", ALL, CHEAP),
    ("ge", 2, np.greater_equal, "({0} >= {1})", ALL, CHEAP),
]:
    _name, _arity, _fn, _c, _kinds, _cost = _row
    _predicate = _name in ("is_nan", "is_inf", "is_finite", "eq", "ne", "lt", "le", "gt", "ge")
    _elementwise(_name, _arity, _fn, _c, _kinds, _cost, _same_bool if _predicate else _same)
