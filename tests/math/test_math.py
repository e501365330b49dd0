"""The math headers against NumPy, SciPy, mpmath and TensorFlow: accuracy, borders, integers, casts."""
from __future__ import annotations

import ml_dtypes
import mpmath
import numpy as np
import pytest
import scipy.special as sp

from tests.math.support import CXX, LEVELS, library, ulps
from tf_stitch.ir.dtypes import DTYPES

pytestmark = [pytest.mark.skipif(CXX is None or not LEVELS, reason="needs g++ and an x86-64-v2 processor"),
              pytest.mark.filterwarnings("ignore::RuntimeWarning")]

f32, f64 = np.float32, np.float64


@pytest.fixture(params=LEVELS, scope="module")
def lib(request):
    return library(request.param)


def every_float32(count: int = 1 << 17) -> np.ndarray:
    """A sweep over all bit patterns, and the ones where functions change their ways."""
    sweep = np.arange(0, 2**32, 2**32 // count + 1, dtype=np.uint64).astype(np.uint32).view(f32)
    marks = f32([0, 1, 2, 3, 0.5, 0.8, 1.1, 1 / 3, 2 / 3, 0.25, 88.72283, 87.3, 103.97, 104, 89, 9.0, 9.125, 3.9375, 4,
                 np.pi, np.pi / 2, np.pi / 4, 3 * np.pi / 4, np.e, 1e10, 2.0**42, 2.0**85, 3.4028235e38, 1.1754944e-38,
                 1e-45, 1e-40, 2.0**23, 2.0**24, 2.0**28, 16777215, np.inf])
    near = np.concatenate([marks, np.nextafter(marks, f32(0)), np.nextafter(marks, f32(np.inf))])
    dense = np.linspace(-12, 12, 20001).astype(f32)
    return np.concatenate([sweep, near, -near, dense, f32([np.nan])])


def _softplus(x):
    return np.where(np.isnan(x), x, np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


UNARY = {
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "erf": sp.erf, "erfc": sp.erfc, "sigmoid": _sigmoid,
    "softplus": _softplus, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
}


@pytest.mark.parametrize("name", UNARY)
def test_float32_within_two_ulp(lib, name):
    x = every_float32()
    got, _ = lib(name, x)
    with np.errstate(all="ignore"):
        want = UNARY[name](x.astype(f64))
        sign = np.signbit(want) == np.signbit(got)
    error = ulps(got, want)
    worst = int(np.argmax(error))
    assert error[worst] <= 2, (x[worst], got[worst], want[worst])
    assert np.all(sign | np.isnan(want)), x[~sign]


MP = {
    "exp": mpmath.exp, "expm1": mpmath.expm1, "log": mpmath.log, "log1p": mpmath.log1p, "sin": mpmath.sin,
    "cos": mpmath.cos, "tan": mpmath.tan, "asin": mpmath.asin, "acos": mpmath.acos, "atan": mpmath.atan,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "asinh": mpmath.asinh, "acosh": mpmath.acosh,
    "atanh": mpmath.atanh, "erf": mpmath.erf, "erfc": mpmath.erfc,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)), "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
}
UNIT = ("asin", "acos", "atanh")


def _float64_samples(name: str, rng: np.random.Generator) -> np.ndarray:
    def signed(low, high, n=150):
        return 10 ** rng.uniform(low, high, n) * rng.choice([-1, 1], n)

    if name in UNIT:
        return np.concatenate([rng.uniform(-1, 1, 200), signed(-20, 0), 1 - 10 ** rng.uniform(-15, 0, 100)])
    if name == "acosh":
        return np.concatenate([1 + 10 ** rng.uniform(-12, 2, 200), 10 ** rng.uniform(0, 300, 200)])
    if name == "log":
        return np.concatenate([10 ** rng.uniform(-320, 308, 200), 1 + signed(-12, -0.5)])
    if name == "log1p":
        return np.concatenate([signed(-30, -0.01), 10 ** rng.uniform(0, 308, 150)])
    if name in ("sin", "cos", "tan"):
        near = np.rint(rng.uniform(1, 1e6, 150)) * (np.pi / 2)
        return np.concatenate([signed(-8, 2), near, signed(2, 308), [6381956970095103 * 2.0**797, 2.0**20]])
    if name == "asinh":
        return np.concatenate([signed(-20, 2), signed(2, 308)])
    return np.concatenate([signed(-20, 2), signed(-1, 1), rng.uniform(-700, 700, 150), rng.uniform(-26, 26, 150)])


@pytest.mark.parametrize("name", MP)
def test_float64_within_four_ulp(lib, name):
    x = _float64_samples(name, np.random.default_rng(7))
    got, _ = lib(name, x)
    with mpmath.workdps(420 if name in ("sin", "cos", "tan") else 60):
        want = [MP[name](mpmath.mpf(float(v))) for v in x]
        for v, g, w in zip(x, got, want, strict=True):
            rounded = float(w)
            if not np.isfinite(rounded) or rounded == 0 or not np.isfinite(g):
                assert g == rounded or abs(g - rounded) <= 5e-324, (v, g, rounded)
                continue
            assert abs(mpmath.mpf(float(g)) - w) <= 4 * mpmath.mpf(float(np.spacing(abs(rounded)))), (v, g, rounded)


@pytest.mark.parametrize("name", UNARY)
def test_float64_borders(lib, name):
    x = f64([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 5e-324, -5e-324, 1e308, -1e308, 2, -2])
    got, _ = lib(name, x)
    with np.errstate(all="ignore"):
        want = UNARY[name](x)
    assert np.array_equal(np.isnan(got), np.isnan(want)), (x, got, want)
    same = (got == want) | np.isnan(want) | (np.abs(got - want) <= 4 * np.spacing(np.abs(want)))
    assert same.all(), (x[~same], got[~same], want[~same])
    assert np.array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)]), (x, got, want)


SPECIALS = f32([0.0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 2.5, 1e-30, -1e-30, 1e30, -1e30, 16777216, -16777217, np.inf,
                -np.inf, np.nan])
BINARY = {"pow": np.power, "atan2": np.arctan2, "fmod": np.fmod, "nextafter": np.nextafter}


def _pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    a, b = (v.ravel() for v in np.meshgrid(SPECIALS, SPECIALS))
    x = (10 ** rng.uniform(-4, 4, 20000) * rng.choice([-1, 1], 20000)).astype(f32)
    y = np.where(rng.random(20000) < 0.5, rng.normal(0, 8, 20000), np.rint(rng.normal(0, 8, 20000))).astype(f32)
    wide = rng.integers(0, 2**32, (2, 20000), dtype=np.uint32).view(f32)
    return np.concatenate([a, x, wide[0]]), np.concatenate([b, y, wide[1]])


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("kind", [f32, f64])
def test_binary_floats(lib, name, kind):
    x, y = (v.astype(kind) for v in _pairs(np.random.default_rng(3)))
    got, _ = lib(name, x, y)
    with np.errstate(all="ignore"):
        if name == "nextafter":
            want = np.nextafter(x, y)
        else:
            want = BINARY[name](x.astype(f64), y.astype(f64))
        error = ulps(got, want) if kind is f32 or name != "pow" else ulps(got, want.astype(f64))
    exact = name in ("fmod", "nextafter")
    bad = error > (0 if exact else 2)
    assert not bad.any(), (x[bad][:5], y[bad][:5], got[bad][:5], want[bad][:5])
    zero = (want == 0) & (got == 0)
    assert np.array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("kind", [f32, f64])
def test_selections_and_rounding(lib, kind):
    x, y = (v.astype(kind) for v in _pairs(np.random.default_rng(5)))
    with np.errstate(all="ignore"):
        for name, want in {"max": np.maximum(x, y), "min": np.minimum(x, y),
                           "div_no_nan": np.where(y == 0, 0, x / np.where(y == 0, 1, y)).astype(kind)}.items():
            assert np.array_equal(lib(name, x, y)[0], want, equal_nan=True), name
        half = np.concatenate([x, np.arange(-40, 40).astype(kind) / 2])
        for name, want in {"floor": np.floor(half), "ceil": np.ceil(half), "rint": np.rint(half), "abs": np.abs(half),
                           "sign": np.sign(half), "neg": -half}.items():
            assert np.array_equal(lib(name, half)[0], want, equal_nan=True), name
        for name, fn in {"is_nan": np.isnan, "is_inf": np.isinf, "is_finite": np.isfinite}.items():
            assert np.array_equal(lib(name, half, out=np.bool_)[0], fn(half)), name


# --- special functions -------------------------------------------------------------------------------

def _specials(rng: np.random.Generator) -> dict:
    """name -> (arguments, reference)."""
    pos = 10 ** rng.uniform(-3, 5, 400)
    many = np.concatenate([pos, rng.uniform(0, 10, 200), rng.uniform(-20, 0, 200)])
    unit = np.concatenate([rng.uniform(0, 1, 300), 10 ** rng.uniform(-30, 0, 200), 1 - 10 ** rng.uniform(-7, 0, 200)])
    a = 10 ** rng.uniform(-2, 4, 600)
    x = np.where(rng.random(600) < 0.5, a * 10 ** rng.uniform(-1, 1, 600),
                 np.abs(a + np.sqrt(a) * rng.normal(0, 2, 600)))
    b = 10 ** rng.uniform(-2, 3, 600)
    s, q = 1 + 10 ** rng.uniform(-3, 2, 600), 10 ** rng.uniform(-2, 3, 600)
    n = rng.integers(0, 12, 600).astype(f64)
    odd = 2 * unit - 1
    bessel = np.concatenate([rng.uniform(-60, 60, 300), pos, -pos])
    return {
        "lgamma": ((many,), sp.gammaln), "digamma": ((many,), sp.digamma), "erfinv": ((odd,), sp.erfinv),
        "ndtri": ((unit,), sp.ndtri), "bessel_i0e": ((bessel,), sp.i0e), "bessel_i1e": ((bessel,), sp.i1e),
        "igamma": ((a, x), sp.gammainc), "igammac": ((a, x), sp.gammaincc), "zeta": ((s, q), sp.zeta),
        "polygamma": ((n, q), lambda n, q: sp.polygamma(n.astype(int), q)),
        "betainc": ((a, b, rng.uniform(0, 1, 600)), sp.betainc),
    }


@pytest.mark.parametrize("name", _specials(np.random.default_rng(0)))
def test_special_functions(lib, name):
    args, reference = _specials(np.random.default_rng(11))[name]
    with np.errstate(all="ignore"):
        want = reference(*args)
        got, _ = lib(name, *args)
        # absolute 1e-13 near zeros of the function
        assert np.allclose(got, want, rtol=2e-10, atol=1e-13, equal_nan=True), _worst(args, got, want)
        single = [v.astype(f32) for v in args]
        want32 = reference(*(v.astype(f64) for v in single))
        error = ulps(lib(name, *single)[0], want32)
    small = (np.abs(want32) < 1e-6) & (np.abs(lib(name, *single)[0] - want32) < 1e-12)
    assert np.all((error <= 2) | small), _worst(single, error, want32)


def _worst(args, got, want):
    k = int(np.nanargmax(np.abs(got - want)))
    return [v[k] for v in args], got[k], want[k]


def test_special_borders_follow_tensorflow(lib):
    tf = pytest.importorskip("tensorflow")
    grid = f32([0, -0.0, 1, -1, 2, -2, 0.5, -0.5, np.inf, -np.inf, np.nan, 3])
    a, x = (v.ravel() for v in np.meshgrid(grid, grid))
    for name in ("igamma", "igammac", "zeta", "polygamma"):
        _like(lib(name, a, x)[0], getattr(tf.math, name)(a, x).numpy(), name, a, x)
    for name in ("lgamma", "digamma", "erfinv", "ndtri", "bessel_i0e", "bessel_i1e"):
        _like(lib(name, grid)[0], getattr(tf.math, name)(grid).numpy(), name, grid)
    thin = f32([0, -1, 1, 0.5, np.inf, np.nan])
    a, b, x = (v.ravel() for v in np.meshgrid(thin, thin, f32([0, 1, 0.5, -0.1, 1.1, np.nan])))
    _like(lib("betainc", a, b, x)[0], tf.math.betainc(a, b, x).numpy(), "betainc", a, b, x)


def _like(got, want, name, *args):
    same = (got == want) | (np.isnan(got) & np.isnan(want)) | np.isclose(got, want, rtol=2e-5)
    assert same.all(), (name, [v[~same] for v in args], got[~same], want[~same])


def test_zeta_of_far_negative_arguments(lib):
    q = f64([-20000.5, -20000.25, -1e15 + 0.5, -3.25])
    for order in (2.0, 3.0):
        part = q - np.floor(q)
        sign = 1 if order == 2 else -1
        want = sp.zeta(order, part) + sign * (sp.zeta(order, 1 - part) - sp.zeta(order, 1 - q))
        assert np.allclose(lib("zeta", np.full(4, order), q)[0], want, rtol=1e-12, atol=1e-12)


# --- integers ----------------------------------------------------------------------------------------

INTS = ("int8", "int32", "int64", "uint8", "uint32")


def _integers(name: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    kind = np.dtype(name)
    info = np.iinfo(kind)
    marks = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7, 31, 8], kind)
    marks = np.concatenate([marks, (-marks.astype(np.int64)).astype(kind)])
    a, b = (v.ravel() for v in np.meshgrid(marks, marks))
    more = rng.integers(info.min, info.max, (2, 500), dtype=kind, endpoint=True)
    return np.concatenate([a, more[0]]), np.concatenate([b, more[1]])


@pytest.mark.parametrize("name", INTS)
def test_integers(lib, name):
    a, b = _integers(name, np.random.default_rng(1))
    bits = a.dtype.itemsize * 8
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    count = np.clip(b, 0, bits - 1).astype(a.dtype)
    want = {
        "max": np.maximum(a, b), "min": np.minimum(a, b), "bit_and": a & b, "bit_or": a | b, "bit_xor": a ^ b,
        "shift_left": np.left_shift(a, count), "shift_right": np.right_shift(a, count), "add": a + b, "mul": a * b,
    }
    for op, value in want.items():
        assert np.array_equal(lib(op, a, b)[0], value), op
    with np.errstate(all="ignore"):
        for op, value in {"abs": np.abs(a), "sign": np.sign(a), "neg": -a, "bit_not": ~a}.items():
            assert np.array_equal(lib(op, a)[0], value), op
    ones = np.array([bin(int(v)).count("1") for v in a.view(unsigned)], np.uint8)
    assert np.array_equal(lib("popcount", a, out=np.uint8)[0], ones)


@pytest.mark.parametrize("name", INTS)
def test_integer_division(lib, name):
    a, b = _integers(name, np.random.default_rng(2))
    exact = [(int(p), int(q)) for p, q in zip(a, b, strict=True)]
    quotient = [0 if q == 0 else abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1) for p, q in exact]
    rest = [0 if q == 0 else p - q * d for (p, q), d in zip(exact, quotient, strict=True)]
    got, status = lib("int_div", a, b)
    assert np.array_equal(got, _wrap(quotient, a.dtype)) and status == 1
    got, status = lib("int_mod", a, b)
    assert np.array_equal(got, _wrap(rest, a.dtype)) and status == 1
    some = b != 0
    assert lib("int_div", a[some], b[some])[1] == 0 and lib("int_mod", a[some], b[some])[1] == 0


@pytest.mark.parametrize("name", INTS)
def test_integer_power(lib, name):
    a, b = _integers(name, np.random.default_rng(4))
    b = (b % 70).astype(a.dtype)
    bits = a.dtype.itemsize * 8
    got, status = lib("int_pow", a, b)
    assert np.array_equal(got, _wrap([pow(int(p), int(q), 1 << bits) for p, q in zip(a, b, strict=True)], a.dtype))
    assert status == 0
    if name.startswith("int"):
        got, status = lib("int_pow", a, np.full_like(b, -1))
        assert status == 1 and not got.any()


def test_random_bits(lib):
    """The known answers that the generator's authors give."""
    known = [((0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
             ((2**64 - 1,) * 3, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
             ((0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E), "d16cfe09 94fdcceb 5001e420 24126ea1")]
    for parts, words in known:
        got, _ = lib("philox", np.arange(4, dtype=np.uint64), *(np.full(4, p, np.uint64) for p in parts), out=np.uint32)
        assert [f"{w:08x}" for w in got] == words.split()
    across = lib("philox", np.array([7], np.uint64), *(np.array([p], np.uint64) for p in (5, 2**64 - 1, 8)),
                 out=np.uint32)
    assert across[0] == lib("philox", np.array([3], np.uint64), *(np.array([p], np.uint64) for p in (5, 0, 9)),
                            out=np.uint32)[0], "the counter's upper word counts on"


def _wrap(values: list[int], dtype: np.dtype) -> np.ndarray:
    mask = (1 << dtype.itemsize * 8) - 1
    return np.array([v & mask for v in values], np.dtype(f"u{dtype.itemsize}")).view(dtype)


def test_bool(lib):
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    for op, value in {"max": a | b, "min": a & b, "bit_and": a & b, "bit_or": a | b, "bit_xor": a ^ b,
                      "lt": ~a & b}.items():
        assert np.array_equal(lib(op, a, b)[0], value), op
    assert np.array_equal(lib("bit_not", a)[0], ~a)


# --- storage types and Cast --------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_value(lib, name):
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name].numpy)
    for target in (f32, f64):
        assert np.array_equal(lib.cast(x, name, np.dtype(target).name), x.astype(target), equal_nan=True)
    back = lib.cast(x.astype(f32), "float32", name)
    nan = np.isnan(x.astype(f32))
    assert np.array_equal(back.view(np.uint16)[~nan], x.view(np.uint16)[~nan]) and np.isnan(back[nan].astype(f32)).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_to_half(lib, name):
    kind = DTYPES[name].numpy
    values = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(f32)
    values = np.sort(values[np.isfinite(values)])
    middle = ((values[1:].astype(f64) + values[:-1]) / 2).astype(f32)  # ties, exact in float32
    x = np.concatenate([every_float32(), middle, np.nextafter(middle, f32(np.inf)), np.nextafter(middle, f32(-np.inf))])
    with np.errstate(all="ignore"):
        want = x.astype(kind)
    got = lib.cast(x, "float32", name)
    nan = np.isnan(x)
    assert np.array_equal(got.view(np.uint16)[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(got[nan].astype(f32)).all()


@pytest.mark.parametrize("source", DTYPES)
def test_casts_in_range(lib, source):
    kind = DTYPES[source].numpy
    base = np.array([0, 1, 2, 3, 5, 100, 127], f64)
    fractions = np.concatenate([base, -base, base / 4, -base / 4, [0.5, -0.5, -0.75, 1.75]])
    x = (fractions if DTYPES[source].is_float else base if DTYPES[source].kind != "int" else
         np.concatenate([base, -base])).astype(kind)
    for target, d in DTYPES.items():
        y = x
        if d.kind == "uint" and DTYPES[source].is_float:
            y = x[x.astype(f64) > -1]
        if d.kind == "bool":
            want = y.astype(f32) != 0
        else:
            want = y.astype(f32).astype(d.numpy) if kind == ml_dtypes.bfloat16 else y.astype(d.numpy)
        assert np.array_equal(lib.cast(y, source, target), want), (source, target)


def test_cast_wraps_and_nan(lib):
    wide = np.array([300, -1, 2**31, 2**40 + 7, -(2**63)], np.int64)
    for target in ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"):
        assert np.array_equal(lib.cast(wide, "int64", target), wide.astype(target)), target
    nan = f32([np.nan, 0.0, -0.0, 1e-45])
    assert lib.cast(nan, "float32", "bool").tolist() == [True, False, False, True]
    big = f64([1e300, -1e300, 1.8e19, 2.0**63])
    assert lib.cast(big, "float64", "float32").tolist() == [np.inf, -np.inf, f32(1.8e19), 2.0**63]
    assert lib.cast(big[2:], "float64", "uint64").tolist() == [int(1.8e19), 2**63]
