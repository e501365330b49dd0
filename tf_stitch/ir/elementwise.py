"""The elementwise operations: one table row each (name, arity, NumPy meaning, C++ text, kinds, cost)."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .dtypes import DTYPES, DType
from .graph import Node
from .opdef import ALL, CHEAP, COSTLY, EXPENSIVE, FLOAT, INT, INTBOOL, NUM, IRError, OpDef, Type, d_kind, register


def _same(inputs: Sequence[Node], attrs: Mapping[str, Any], want: Type) -> Type:
    first = inputs[0]
    for other in inputs[1:]:
        if other.shape != first.shape or other.dtype != first.dtype:
            raise IRError(f"the operands {first!r} and {other!r} differ in shape or dtype.")
    return first.shape, first.dtype


def _same_as(dtype: str) -> Callable[..., Type]:
    return lambda inputs, attrs, want: (_same(inputs, attrs, want)[0], dtype)


def _in_compute_type(fn: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Half types compute in float32 and round once, as the kernels do."""

    def evaluate(arrays, attrs, shape, dtype):
        d: DType = DTYPES[dtype]
        if arrays and arrays[0].dtype.itemsize == 2 and d_kind(arrays[0]) == "float":
            arrays = [a.astype(np.float32) for a in arrays]
        with np.errstate(all="ignore"):
            return np.asarray(fn(*arrays)).astype(d.numpy)

    return evaluate


def _scipy(name: str) -> Callable[..., np.ndarray]:
    """A SciPy special function, imported only when evaluated (SciPy is a test requirement, not a need)."""

    def call(*arrays):
        import scipy.special

        return getattr(scipy.special, name)(*(np.asarray(a, np.float64) for a in arrays))

    return call


def _no_zero(b: np.ndarray) -> np.ndarray:
    if np.any(b == 0):
        raise ZeroDivisionError("An integer is divided by zero.")
    return b


def _divide_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """C division: truncates toward zero.  ZeroDivisionError where kernels set the status word."""
    q = np.floor_divide(a, _no_zero(b))
    return np.where((q < 0) & (q * b != a), q + 1, q).astype(a.dtype)


def _modulo_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """C remainder: sign of the dividend."""
    return a - _divide_int(a, b) * b


def _power_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Wraps around; a negative exponent is an error, as in TensorFlow's CPU kernel."""
    if np.any(b < 0):
        raise ZeroDivisionError("An integer is raised to a negative power.")
    return np.power(a, b)


def _div_no_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, 0, a / np.where(b == 0, 1, b))


def _shift(op: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """TensorFlow clamps the shift count to [0, bits - 1]."""

    def call(a, b):
        return op(a, np.clip(b, 0, a.dtype.itemsize * 8 - 1).astype(a.dtype))

    return call


def _popcount(x: np.ndarray) -> np.ndarray:
    """Bits set in the two's complement form (NumPy counts those of the absolute value)."""
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}"))


def _igamma(name: str) -> Callable[..., np.ndarray]:
    """Regularised incomplete gamma functions with Eigen's values at the borders."""

    def call(a, x):
        outside = (x < 0) | (a <= 0) | np.isnan(a) | np.isnan(x)
        value = np.where(outside, np.nan, _scipy(name)(np.where(outside, 1, a), np.where(outside, 1, x)))
        value = np.where(np.isinf(a) & np.isinf(x) & ~outside, 0, value)
        return np.where(x == 0, 0, value) if name == "gammainc" else value

    return call


def _digamma(x: np.ndarray) -> np.ndarray:
    """Eigen's digamma is NaN at every pole (SciPy's is -inf at 0)."""
    return np.where((x <= 0) & (x == np.floor(x)), np.nan, _scipy("digamma")(x))


def _zeta(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Hurwitz zeta as in Eigen: at a pole q = 0, -1, ... inf for an even x, else NaN."""
    x, q = np.asarray(x, np.float64), np.asarray(q, np.float64)
    pole = (q <= 0) & (q == np.floor(q)) & ~(x <= 1)
    at_pole = np.where(np.fmod(x, 2) == 0, np.inf, np.nan)
    value = np.where(np.isposinf(x) & (q > 0), np.power(np.abs(q), -x), _scipy("zeta")(x, np.where(pole, 1, q)))
    return np.where(pole, at_pole, value)


def _polygamma(n: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(-1)^(n+1) n! zeta(n+1, x); digamma for n = 0; NaN for an order that is not a natural number."""
    n, x = np.asarray(n, np.float64), np.asarray(x, np.float64)
    sign = np.where(np.fmod(n, 2) == 0, -1.0, 1.0)
    value = sign * _scipy("gamma")(n + 1) * _zeta(n + 1, x)
    return np.where((n < 0) | (n != np.floor(n)), np.nan, np.where(n == 0, _digamma(x), value))


def _random_bits(inputs: Sequence[Node], attrs: Mapping[str, Any], want: Type) -> Type:
    shape, dtype = _same(inputs, attrs, want)
    if dtype != "uint64":
        raise IRError(f"the operands are {dtype}, not uint64.")
    return shape, "uint32"


def _philox(index: np.ndarray, key: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    first = low + (index >> np.uint64(2))
    high = high + (first < low)
    words = [first & mask, first >> half, high & mask, high >> half]
    keys = [key & mask, key >> half]
    for _ in range(10):
        a, b = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [(b >> half) ^ words[1] ^ keys[0], b & mask, (a >> half) ^ words[3] ^ keys[1], a & mask]
        keys = [(k + np.uint64(step)) & mask for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return np.choose((index & np.uint64(3)).astype(np.int64), words)


_RESULT = dict.fromkeys(("is_nan", "is_inf", "is_finite", "eq", "ne", "lt", "le", "gt", "ge"), _same_as("bool"))
_RESULT["popcount"] = _same_as("uint8")
_RESULT["philox"] = _random_bits

# name, arity, NumPy, C++ (ts_* are in codegen/include), kinds, cost
_ROWS: list[tuple[str, int, Callable[..., Any], str, tuple[str, ...], int]] = [
    ("neg", 1, np.negative, "(-{0})", NUM, CHEAP),
    ("abs", 1, np.abs, "ts_abs({0})", NUM, CHEAP),
    ("sign", 1, np.sign, "ts_sign({0})", NUM, CHEAP),
    ("floor", 1, np.floor, "ts_floor({0})", FLOAT, CHEAP),
    ("ceil", 1, np.ceil, "ts_ceil({0})", FLOAT, CHEAP),
    ("rint", 1, np.rint, "ts_rint({0})", FLOAT, CHEAP),
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
    ("lgamma", 1, lambda x: np.where(np.isinf(x), np.inf, _scipy("gammaln")(x)), "ts_lgamma({0})", FLOAT, EXPENSIVE),
    ("digamma", 1, _digamma, "ts_digamma({0})", FLOAT, EXPENSIVE),
    ("bessel_i0e", 1, _scipy("i0e"), "ts_bessel_i0e({0})", FLOAT, EXPENSIVE),
    ("bessel_i1e", 1, _scipy("i1e"), "ts_bessel_i1e({0})", FLOAT, EXPENSIVE),
    ("bit_not", 1, np.invert, "ts_bit_not({0})", INTBOOL, CHEAP),  # on bool: logical not
    ("popcount", 1, _popcount, "ts_popcount({0})", INT, CHEAP),  # result uint8
    ("is_nan", 1, np.isnan, "ts_is_nan({0})", FLOAT, CHEAP),
    ("is_inf", 1, np.isinf, "ts_is_inf({0})", FLOAT, CHEAP),
    ("is_finite", 1, np.isfinite, "ts_is_finite({0})", FLOAT, CHEAP),
    ("add", 2, np.add, "({0} + {1})", NUM, CHEAP),
    ("sub", 2, np.subtract, "({0} - {1})", NUM, CHEAP),
    ("mul", 2, np.multiply, "({0} * {1})", NUM, CHEAP),
    ("div", 2, np.divide, "({0} / {1})", FLOAT, CHEAP),
    ("div_no_nan", 2, _div_no_nan, "ts_div_no_nan({0}, {1})", FLOAT, CHEAP),
    # int_div truncates; a zero divisor sets the status, and so does a negative exponent of int_pow
    ("int_div", 2, _divide_int, "ts_int_div({0}, {1}, ts_status)", INT, EXPENSIVE),
    ("int_mod", 2, _modulo_int, "ts_int_mod({0}, {1}, ts_status)", INT, EXPENSIVE),
    ("fmod", 2, np.fmod, "ts_fmod({0}, {1})", FLOAT, EXPENSIVE),  # sign of the dividend
    ("max", 2, np.maximum, "ts_max({0}, {1})", ALL, CHEAP),  # NaN in either gives NaN
    ("min", 2, np.minimum, "ts_min({0}, {1})", ALL, CHEAP),
    ("pow", 2, np.power, "ts_pow({0}, {1})", FLOAT, EXPENSIVE),
    ("int_pow", 2, _power_int, "ts_int_pow({0}, {1}, ts_status)", INT, EXPENSIVE),
    ("atan2", 2, np.arctan2, "ts_atan2({0}, {1})", FLOAT, EXPENSIVE),
    ("nextafter", 2, np.nextafter, "ts_nextafter({0}, {1})", FLOAT, EXPENSIVE),
    ("igamma", 2, _igamma("gammainc"), "ts_igamma({0}, {1})", FLOAT, EXPENSIVE),
    ("igammac", 2, _igamma("gammaincc"), "ts_igammac({0}, {1})", FLOAT, EXPENSIVE),
    ("zeta", 2, _zeta, "ts_zeta({0}, {1})", FLOAT, EXPENSIVE),
    ("polygamma", 2, _polygamma, "ts_polygamma({0}, {1})", FLOAT, EXPENSIVE),
    ("betainc", 3, _scipy("betainc"), "ts_betainc({0}, {1}, {2})", FLOAT, EXPENSIVE),
    ("bit_and", 2, np.bitwise_and, "ts_bit_and({0}, {1})", INTBOOL, CHEAP),
    ("bit_or", 2, np.bitwise_or, "ts_bit_or({0}, {1})", INTBOOL, CHEAP),
    ("bit_xor", 2, np.bitwise_xor, "ts_bit_xor({0}, {1})", INTBOOL, CHEAP),
    ("shift_left", 2, _shift(np.left_shift), "ts_shift_left({0}, {1})", INT, CHEAP),
    ("shift_right", 2, _shift(np.right_shift), "ts_shift_right({0}, {1})", INT, CHEAP),
    # random bits: element `index` of what the generator gives for a key and a counter of two words
    ("philox", 4, _philox, "ts_philox({0}, {1}, {2}, {3})", ("uint",), COSTLY),
    ("eq", 2, np.equal, "({0} == {1})", ALL, CHEAP),
    ("ne", 2, np.not_equal, "({0} != {1})", ALL, CHEAP),
    ("lt", 2, np.less, "({0} < {1})", ALL, CHEAP),
    ("le", 2, np.less_equal, "({0} <= {1})", ALL, CHEAP),
    ("gt", 2, np.greater, "({0} > {1})", ALL, CHEAP),
    ("ge", 2, np.greater_equal, "({0} >= {1})", ALL, CHEAP),
]
for _name, _arity, _fn, _c, _kinds, _cost in _ROWS:
    register(OpDef(_name, _arity, _RESULT.get(_name, _same), _in_compute_type(_fn), _c, _cost, _kinds))
