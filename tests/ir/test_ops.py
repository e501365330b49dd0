"""Every primitive: its meaning against plain loops, its type rule against bad operands."""
from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.interp import run
from tf_stitch.ir.ops import OPS, IRError, make


def evaluate(fn, *arrays):
    """The value of ``fn(builder, *params)`` built and simplified for the arrays' shapes, all dims unknown."""
    b = Builder()
    names = {d.numpy: d.name for d in DTYPES.values()}
    params = [b.param([None] * a.ndim, names[a.dtype]) for a in arrays]
    return run(b.finish([fn(b, *params)]), arrays)[0]


def floats(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(dtype)


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4)
SEEDS = st.integers(0, 10**6)

# --- elementwise -----------------------------------------------------------------------------------

_TRUTH = {  # op: (scalar function in float64, values)
    "sqrt": (math.sqrt, (0.1, 2)), "rsqrt": (lambda x: 1 / math.sqrt(x), (0.1, 2)), "exp": (math.exp, (-3, 3)),
    "expm1": (math.expm1, (-1e-3, 1)), "log": (math.log, (0.1, 9)), "log1p": (math.log1p, (-0.1, 0.1)),
    "sigmoid": (lambda x: 1 / (1 + math.exp(-x)), (-9, 9)), "softplus": (lambda x: math.log1p(math.exp(x)), (-9, 9)),
    "sin": (math.sin, (-9, 9)), "cos": (math.cos, (-9, 9)), "tan": (math.tan, (-1, 1)), "asin": (math.asin, (-1, 1)),
    "acos": (math.acos, (-1, 1)), "atan": (math.atan, (-9, 9)), "sinh": (math.sinh, (-3, 3)),
    "cosh": (math.cosh, (-3, 3)), "tanh": (math.tanh, (-3, 3)), "asinh": (math.asinh, (-9, 9)),
    "acosh": (math.acosh, (1.1, 9)), "atanh": (math.atanh, (-0.9, 0.9)), "erf": (math.erf, (-3, 3)),
    "erfc": (math.erfc, (-3, 3)), "lgamma": (math.lgamma, (0.5, 9)), "floor": (math.floor, (-5, 5)),
    "ceil": (math.ceil, (-5, 5)), "rint": (round, (-5, 5)), "abs": (abs, (-5, 5)), "neg": (lambda x: -x, (-5, 5)),
    "sign": (lambda x: (x > 0) - (x < 0), (-5, 5)),
    "erfinv": (lambda x: scipy.special.ndtri((x + 1) / 2) / math.sqrt(2), (-0.9, 0.9)),
    "ndtri": (lambda p: math.sqrt(2) * scipy.special.erfinv(2 * p - 1), (0.1, 0.9)),
    "digamma": (lambda x: (math.lgamma(x + 1e-5) - math.lgamma(x - 1e-5)) / 2e-5, (0.5, 9)),
    "bessel_i0e": (lambda x: scipy.special.iv(0, x) * math.exp(-abs(x)), (-9, 9)),
    "bessel_i1e": (lambda x: scipy.special.iv(1, x) * math.exp(-abs(x)), (-9, 9)),
}


@pytest.mark.parametrize("op", sorted(_TRUTH))
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_unary_functions(op, dtype):
    fn, (lo, hi) = _TRUTH[op]
    x = np.linspace(lo, hi, 101).astype(DTYPES[dtype].numpy)
    x = x[(x.astype(float) >= lo) & (x.astype(float) <= hi)]
    want = np.array([fn(float(v)) for v in x])
    tolerance = {"float32": 2e-6, "float64": 1e-9, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    got = evaluate(lambda b, v: b.ew(op, v), x)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got.astype(float), want, rtol=tolerance, atol=tolerance)


@given(st.integers(-128, 127), st.integers(-128, 127))
def test_integer_arithmetic_is_cs(p, q):
    a, c = np.array([p], np.int8), np.array([q], np.int8)

    def wrap(v):
        return (v + 128) % 256 - 128

    def ew(op):
        return int(evaluate(lambda b, x, y: b.ew(op, x, y), a, c)[0])

    assert ew("add") == wrap(p + q)
    assert ew("sub") == wrap(p - q)
    assert ew("mul") == wrap(p * q)
    assert ew("shift_left") == wrap(p << min(max(q, 0), 7))
    assert ew("shift_right") == p >> min(max(q, 0), 7)
    assert int(evaluate(lambda b, x: b.ew("popcount", x), a)[0]) == bin(p & 255).count("1")
    if q:
        quotient = abs(p) // abs(q) * (1 if p * q >= 0 else -1)
        assert ew("int_div") == wrap(quotient)
        assert ew("int_mod") == wrap(p - quotient * q)
    else:
        with pytest.raises(ZeroDivisionError):
            ew("int_div")
    if 0 <= q < 20:
        assert ew("int_pow") == wrap(p**q)
    if q < 0:
        with pytest.raises(ZeroDivisionError):
            ew("int_pow")


def test_nan_and_signed_zero():
    x = np.array([np.nan, 1, 0.0, -0.0, np.inf], np.float32)
    y = np.array([1, np.nan, 0.0, 0.0, 0.0], np.float32)
    np.testing.assert_array_equal(evaluate(lambda b, p, q: b.ew("max", p, q), x, y), [np.nan, np.nan, 0, 0, np.inf])
    np.testing.assert_array_equal(evaluate(lambda b, p, q: b.ew("min", p, q), x, y), [np.nan, np.nan, 0, 0, 0])
    np.testing.assert_array_equal(evaluate(lambda b, p, q: b.ew("eq", p, q), x, y), [False, False, True, True, False])
    np.testing.assert_array_equal(evaluate(lambda b, p, q: b.ew("div_no_nan", p, q), x, y), [np.nan, np.nan, 0, 0, 0])
    np.testing.assert_array_equal(evaluate(lambda b, p: b.ew("sign", p), x), [np.nan, 1, 0, 0, 1])
    np.testing.assert_array_equal(evaluate(lambda b, p: b.ew("is_nan", p), x), [True, False, False, False, False])


@pytest.mark.parametrize(("op", "operands", "want"), [  # Eigen's values at the borders, seen in TensorFlow 2.21
    ("igamma", (1, 0), 0), ("igamma", (0, 1), np.nan), ("igamma", (-1, 0), 0), ("igammac", (0, 0.5), np.nan),
    ("igamma", (1, -1), np.nan), ("zeta", (1, 2), np.inf), ("zeta", (0.5, 2), np.nan), ("zeta", (2, 0), np.inf),
    ("zeta", (3, -1), np.nan), ("zeta", (np.inf, 2), 0), ("zeta", (np.nan, 0), np.nan), ("polygamma", (0.5, 1), np.nan),
    ("polygamma", (-1, 1), np.nan), ("polygamma", (1, 0), np.inf), ("digamma", (0,), np.nan),
    ("digamma", (-3,), np.nan),
    ("lgamma", (-1,), np.inf), ("lgamma", (-np.inf,), np.inf), ("erfinv", (1,), np.inf), ("erfinv", (2,), np.nan),
    ("ndtri", (0,), -np.inf), ("pow", (-2, 0.5), np.nan), ("pow", (np.nan, 0), 1), ("fmod", (-7, 3), -1),
])
def test_borders(op, operands, want):
    got = evaluate(lambda b, *xs: b.ew(op, *xs), *(np.array([v], np.float32) for v in operands))
    np.testing.assert_array_equal(got, np.array([want], np.float32))


def test_polygamma_and_betainc():
    x = np.linspace(0.5, 5, 20).astype(np.float32)
    for n in (0, 1, 3):
        order = np.full_like(x, n)
        np.testing.assert_allclose(evaluate(lambda b, p, q: b.ew("polygamma", p, q), order, x),
                                   scipy.special.polygamma(n, x.astype(float)), rtol=1e-5)
    a = np.full_like(x, 2.0)
    got = evaluate(lambda b, p, q, r: b.ew("betainc", p, q, r), a, a, np.linspace(0, 1, 20).astype(np.float32))
    t = np.linspace(0, 1, 20)
    np.testing.assert_allclose(got, 3 * t**2 - 2 * t**3, atol=1e-6)  # I_t(2, 2)


@pytest.mark.parametrize("to", sorted(DTYPES))
def test_casts(to):
    x = np.array([0, 1, 2.75, 100], np.float32)
    want = (x != 0) if to == "bool" else np.trunc(x) if DTYPES[to].is_integer else x
    got = evaluate(lambda b, v: b.cast(v, to), x)
    assert got.dtype == DTYPES[to].numpy
    np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want, np.float64))


def test_bitcast():
    x = floats((3, 2))
    np.testing.assert_array_equal(evaluate(lambda b, v: b.bitcast(v, "int32"), x), x.view(np.int32))


# --- movement --------------------------------------------------------------------------------------

@given(SHAPES, st.data())
@settings(max_examples=60, deadline=None)
def test_pad_with_interior(shape, data):
    low, high, interior = ([data.draw(st.integers(0, 2)) for _ in shape] for _ in range(3))
    x = floats(shape)
    got = evaluate(lambda b, v: b.pad(v, low, high, 7.0, interior), x)
    want = x
    for axis, (lo, hi, step) in enumerate(zip(low, high, interior, strict=True)):
        line = np.full((*want.shape[:axis], lo + hi + want.shape[axis] + max(want.shape[axis] - 1, 0) * step,
                        *want.shape[axis + 1:]), 7.0, np.float32)
        for i in range(want.shape[axis]):
            line[(slice(None),) * axis + (lo + i * (step + 1),)] = want.take(i, axis)
        want = line
    np.testing.assert_array_equal(got, want)


@given(SHAPES, st.data())
@settings(max_examples=60, deadline=None)
def test_moves(shape, data):
    x, rank = floats(shape), len(shape)
    perm = data.draw(st.permutations(range(rank)))
    axes = data.draw(st.lists(st.integers(0, rank - 1), unique=True))
    axis = data.draw(st.integers(0, rank - 1))
    np.testing.assert_array_equal(evaluate(lambda b, v: b.transpose(v, perm), x), x.transpose(perm))
    np.testing.assert_array_equal(evaluate(lambda b, v: b.reverse(v, axes), x), np.flip(x, axes))
    np.testing.assert_array_equal(evaluate(lambda b, v: b.concat([v, v, v], axis), x), np.concatenate([x] * 3, axis))
    np.testing.assert_array_equal(evaluate(lambda b, v: b.reshape(v, [v.size]), x), x.reshape(-1))
    index = evaluate(lambda b, v: b.iota(v.shape, axis, "int32"), x)
    np.testing.assert_array_equal(index, np.indices(shape)[axis])
    np.testing.assert_array_equal(evaluate(lambda b, v: b.shape_value(v.shape), x), shape)


@given(SHAPES, st.integers(0, 2), st.data())
@settings(max_examples=80, deadline=None)
def test_gather(shape, index_rank, data):
    batch = data.draw(st.integers(0, len(shape) - 1))
    axis = data.draw(st.integers(batch, len(shape) - 1))
    mode = data.draw(st.sampled_from(["error", "clip", "zero"]))
    x, size = floats(shape), shape[axis]
    rest = [data.draw(st.integers(0, 3)) for _ in range(index_rank)]
    low, high = (0, size - 1) if mode == "error" else (-2, size + 1)
    if size == 0 and (mode != "zero"):
        return
    index = np.random.default_rng(data.draw(SEEDS)).integers(low, high + 1, (*shape[:batch], *rest)).astype(np.int32)
    got = evaluate(lambda b, p, i: b.gather(p, i, axis, batch, mode), x, index)
    want = np.zeros((*shape[:axis], *rest, *shape[axis + 1:]), np.float32)
    for place in itertools.product(*map(range, want.shape)):
        lead, i, tail = place[:axis], place[axis:axis + index_rank], place[axis + index_rank:]
        at = int(index[lead[:batch] + i])
        if mode == "clip":
            at = min(max(at, 0), size - 1)
        want[place] = x[(*lead, at, *tail)] if 0 <= at < size else 0
    np.testing.assert_array_equal(got, want)


@given(SHAPES, st.data())
@settings(max_examples=80, deadline=None)
def test_gather_nd(shape, data):
    batch = data.draw(st.integers(0, len(shape) - 1))
    depth = data.draw(st.integers(0, len(shape) - batch))
    x, count = floats(shape), data.draw(st.integers(0, 3))
    index = np.random.default_rng(data.draw(SEEDS)).integers(-1, 5, (*shape[:batch], count, depth)).astype(np.int64)
    b = Builder()
    p, i = b.param([None] * x.ndim, "float32"), b.param([*[None] * (batch + 1), depth], "int64")
    got = run(b.finish([b.gather_nd(p, i, batch, "zero")]), [x, index])[0]
    want = np.zeros((*shape[:batch], count, *shape[batch + depth:]), np.float32)
    for place in itertools.product(*map(range, want.shape[:batch + 1])):
        at = (*place[:batch], *index[place])
        if all(0 <= k < d for k, d in zip(at, shape)):
            want[place] = x[at]
    np.testing.assert_array_equal(got, want)


def test_indices_out_of_range():
    x, bad = floats((3,)), np.array([0, 3], np.int32)
    for fn in (lambda b, p, i: b.gather(p, i), lambda b, p, i: b.gather_nd(p, b.reshape(i, (2, 1)))):
        with pytest.raises(IndexError, match="The index 3 is outside a dim of 3"):
            evaluate(fn, x, bad)
    with pytest.raises(IndexError):
        evaluate(lambda b, p, i: b.gather(p, i, mode="clip"), floats((0,)), bad)


# --- reductions ------------------------------------------------------------------------------------

@given(SHAPES, st.data())
@settings(max_examples=60, deadline=None)
def test_reductions(shape, data):
    axes = tuple(sorted(data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))))
    x = floats(shape, data.draw(SEEDS))
    starts = {"sum": 0, "prod": 1, "max": -np.inf, "min": np.inf}
    fns = {"sum": lambda a, c: a + c, "prod": lambda a, c: a * c, "max": max, "min": min}
    for kind, start in starts.items():
        got = evaluate(lambda b, v, k=kind: b.reduce(k, v, axes), x)
        want = np.full([d for i, d in enumerate(shape) if i not in axes], start, np.float64)
        for place in itertools.product(*map(range, shape)):
            at = tuple(p for i, p in enumerate(place) if i not in axes)
            want[at] = fns[kind](want[at], float(x[place]))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for kind, want in (("and", (x > 0).all(axes)), ("or", (x > 0).any(axes))):
        got = evaluate(lambda b, v, k=kind: b.reduce(k, b.ew("gt", v, 0.0), axes), x)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_are_rounded_once(dtype):
    x = np.full(20000, 0.1).astype(DTYPES[dtype].numpy)
    want = np.asarray(math.fsum(x.astype(float))).astype(x.dtype)
    for fn in (lambda b, v: b.reduce("sum", v, [0]), lambda b, v: b.dot(v, b.broadcast_to(b.const(1, dtype), v.shape),
                                                                       contract=((0,), (0,)))):
        assert evaluate(fn, x) == want


def test_reductions_of_nothing():
    for dtype, kind, want in (("int32", "max", -2**31), ("uint8", "min", 255), ("float16", "max", -np.inf),
                              ("int64", "prod", 1), ("bool", "and", True), ("bool", "or", False),
                              ("float64", "sum", 0)):
        x = np.zeros((2, 0), DTYPES[dtype].numpy)
        got = evaluate(lambda b, v, k=kind: b.reduce(k, v, [1]), x)
        np.testing.assert_array_equal(got.astype(np.float64), np.full(2, want, np.float64))


def test_nan_in_reductions():
    x = np.array([[1, np.nan], [np.nan, np.nan], [3, 2]], np.float32)
    np.testing.assert_array_equal(evaluate(lambda b, v: b.reduce("max", v, [1]), x), [np.nan, np.nan, 3])
    np.testing.assert_array_equal(evaluate(lambda b, v: b.reduce("sum", v, [1]), x), [np.nan, np.nan, 5])


@pytest.mark.parametrize(("values", "largest", "smallest"), [  # seen in TensorFlow 2.21
    ([np.nan, 1, 2], 2, 1), ([1, np.nan, 2], 2, 0), ([np.nan, np.nan], 0, 0), ([-np.inf, -np.inf], 0, 0),
    ([np.nan, -np.inf], 0, 1), ([2, np.nan, 3, 1], 2, 3), ([np.nan, -np.inf, -np.inf], 0, 1), ([5, 5], 0, 0),
])
def test_arg_reduce(values, largest, smallest):
    for dtype in ("float32", "bfloat16"):
        x = np.array(values, DTYPES[dtype].numpy)
        assert evaluate(lambda b, v: b.arg_reduce("max", v, 0), x) == largest
        assert evaluate(lambda b, v: b.arg_reduce("min", v, 0, "int32"), x) == smallest


@given(SHAPES, st.booleans(), st.booleans(), st.sampled_from(["sum", "prod"]), st.data())
@settings(max_examples=60, deadline=None)
def test_scan(shape, exclusive, reverse, kind, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(np.int32)
    got = evaluate(lambda b, v: b.scan(kind, v, axis, exclusive, reverse), x)
    want = np.zeros_like(x)
    for place in itertools.product(*map(range, shape)):
        k = place[axis]
        line = x[(*place[:axis], slice(None), *place[axis + 1:])]
        part = line[k + exclusive:] if reverse else line[:k + (not exclusive)]
        want[place] = part.sum() if kind == "sum" else part.prod()
    np.testing.assert_array_equal(got, want)


# --- products --------------------------------------------------------------------------------------

@given(st.data())
@settings(max_examples=80, deadline=None)
def test_dot_is_einsum(data):
    letters = data.draw(st.lists(st.sampled_from("bcxy"), max_size=6))
    batch = [c + str(i) for i, c in enumerate(letters) if c == "b"]
    contract = [c + str(i) for i, c in enumerate(letters) if c == "c"]
    size = {a: data.draw(st.integers(0, 3)) for a in (c + str(i) for i, c in enumerate(letters))}
    lhs = data.draw(st.permutations(batch + contract + [a for a in size if a[0] == "x"]))
    rhs = data.draw(st.permutations(batch + contract + [a for a in size if a[0] == "y"]))
    x, y = floats([size[a] for a in lhs]), floats([size[a] for a in rhs], 1)
    axes = [tuple(names.index(a) for a in group) for group in (batch, contract) for names in (lhs, rhs)]
    got = evaluate(lambda b, p, q: b.dot(p, q, axes[:2], axes[2:]), x, y)
    out = batch + [a for a in lhs if a[0] == "x"] + [a for a in rhs if a[0] == "y"]
    code = {a: chr(97 + i) for i, a in enumerate(size)}
    spec = ",".join("".join(code[a] for a in names) for names in (lhs, rhs)) + "->" + "".join(code[a] for a in out)
    np.testing.assert_allclose(got, np.einsum(spec, x.astype(float), y.astype(float)), rtol=1e-5, atol=1e-5)


@given(st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_conv_filter_is_the_adjoint_of_conv(rank, data):
    """sum(g * conv(x, w)) is linear in w, so its gradient is what gives that sum with every w."""
    def draw(low, high):
        return [data.draw(st.integers(low, high)) for _ in range(rank)]

    size, kernel, strides, dilations = draw(0, 6), draw(1, 3), draw(1, 3), draw(1, 2)
    padding = list(zip(draw(0, 2), draw(0, 2), strict=True))
    batch, groups = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 2, 4]))
    x, w = floats((batch, *size, 4)).astype(np.float64), floats((*kernel, 4 // groups, 8), 1).astype(np.float64)
    b = Builder()
    p, q = b.param([None] * (rank + 1) + [4], "float64"), b.param(w.shape, "float64")
    y = run(b.finish([b.conv(p, q, strides, padding, dilations, groups)]), [x, w])[0]
    g = floats(y.shape, 2).astype(np.float64)
    b = Builder()
    p, r = b.param([None] * (rank + 1) + [4], "float64"), b.param([None] * (rank + 1) + [8], "float64")
    (dw,) = run(b.finish([b.conv_filter(p, r, kernel, strides, padding, dilations, groups)]), [x, g])
    assert dw.shape == (8, *kernel, 4 // groups)
    np.testing.assert_allclose(np.sum(np.moveaxis(dw, 0, -1) * w), np.sum(g * y), rtol=1e-9, atol=1e-9)


@given(st.integers(1, 2), st.data())
@settings(max_examples=40, deadline=None)
def test_conv_and_window_are_loops(rank, data):
    def draw(low, high):
        return [data.draw(st.integers(low, high)) for _ in range(rank)]

    size, kernel, strides, dilations = draw(0, 6), draw(1, 3), draw(1, 2), draw(1, 2)
    padding = list(zip(draw(0, 2), draw(0, 2), strict=True))
    groups = data.draw(st.sampled_from([1, 2]))
    x, w = floats((2, *size, 2)), floats((*kernel, 2 // groups, 4), 1)
    b = Builder()
    p, q = b.param([None, *[None] * rank, 2], "float32"), b.param(w.shape, "float32")
    got = run(b.finish([b.conv(p, q, strides, padding, dilations, groups),
                        *(b.window(k, p, kernel, strides, padding) for k in ("max", "sum", "mean"))]), [x, w])
    places = [max(0, (d + lo + hi - (k - 1) * g - 1) // s + 1)
              for d, (lo, hi), k, g, s in zip(size, padding, kernel, dilations, strides, strict=True)]
    want = np.zeros((2, *places, 4))
    for at in itertools.product(*map(range, places)):
        for off in itertools.product(*map(range, kernel)):
            src = [a * s - lo + o * g for a, s, (lo, _), o, g in zip(at, strides, padding, off, dilations, strict=True)]
            if all(0 <= i < d for i, d in zip(src, size, strict=True)):
                for o in range(4):
                    k = o // (4 // groups) * (2 // groups)
                    part = x[(slice(None), *src)][:, k:k + 2 // groups]
                    want[(slice(None), *at, o)] += part @ w[(*off, slice(None), o)]
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
    places = [max(0, (d + lo + hi - k) // s + 1)
              for d, (lo, hi), k, s in zip(size, padding, kernel, strides, strict=True)]
    for kind, value in zip(("max", "sum", "mean"), got[1:], strict=True):
        for at in itertools.product(*map(range, places)):
            box = tuple(slice(max(a * s - lo, 0), max(a * s - lo + k, 0))
                        for a, s, (lo, _), k in zip(at, strides, padding, kernel, strict=True))
            seen = x[(slice(None), *box)].reshape(2, -1, 2).astype(float)
            if seen.shape[1] == 0 and kind != "sum":
                continue  # a window of nothing but padding
            want = getattr(np, kind)(seen, axis=1)
            np.testing.assert_allclose(value[(slice(None), *at)], want, rtol=1e-5, atol=1e-5)


# --- type rules ------------------------------------------------------------------------------------

def _param(*shape, dtype="float32", index=0):
    return make("param", [], {"index": index}, shape, dtype)


N = D.symbol("n")
F, I32, SCALAR = _param(N, 4), _param(N, 4, dtype="int32"), _param()


@pytest.mark.parametrize(("op", "inputs", "attrs", "shape", "dtype"), [
    ("add", [F, _param(4, N)], {}, (), ""), ("add", [F, I32], {}, (), ""), ("add", [F], {}, (), ""),
    ("exp", [I32], {}, (), ""),
    ("add", [F, F], {"extra": 1}, (), ""), ("no_such_op", [F], {}, (), ""), ("bit_and", [F, F], {}, (), ""),
    ("param", [], {"index": 0}, (-1,), "float32"), ("param", [], {"index": 0}, (2,), "complex64"),
    ("const", [], {"value": np.zeros(2, np.float32)}, (), "int32"), ("const", [], {"value": 1}, (), "int32"),
    ("shape_value", [], {"dims": (N, 4)}, (3,), "int32"), ("shape_value", [], {"dims": (N,)}, (1,), "float32"),
    ("iota", [], {"axis": 2}, (2, 2), "int32"), ("cast", [F], {}, (), "string"), ("bitcast", [F], {}, (), "int64"),
    ("select", [F, F, F], {}, (), ""), ("broadcast", [F], {"axes": (1, 0)}, (N, 4), ""),
    ("broadcast", [F], {"axes": (0, 1)}, (N, 5), ""), ("broadcast", [F], {"axes": (0,)}, (N, 4), ""),
    ("reshape", [_param(2, 3)], {}, (4,), ""), ("transpose", [F], {"perm": (0, 0)}, (), ""),
    ("slice", [_param(4)], {"starts": (2,), "steps": (1,)}, (3,), ""),
    ("slice", [F], {"starts": (0,), "steps": (1,)}, (1,), ""),
    ("slice", [_param(4)], {"starts": (0,), "steps": (0,)}, (1,), ""),
    ("slice", [_param(4)], {"starts": (-1,), "steps": (1,)}, (1,), ""),
    ("reverse", [F], {"axes": (2,)}, (), ""), ("reverse", [F], {"axes": (1, 1)}, (), ""),
    ("pad", [F, F], {"low": (0, 0), "high": (0, 0), "interior": (0, 0)}, (), ""),
    ("pad", [F, SCALAR], {"low": (-1, 0), "high": (0, 0), "interior": (0, 0)}, (), ""),
    ("concat", [F, _param(N, 5)], {"axis": 0}, (), ""), ("concat", [], {"axis": 0}, (), ""),
    ("concat", [F, I32], {"axis": 0}, (), ""),
    ("gather", [F, F], {"axis": 0, "batch_dims": 0, "mode": "error"}, (), ""),
    ("gather", [F, I32], {"axis": 0, "batch_dims": 1, "mode": "error"}, (), ""),
    ("gather", [F, I32], {"axis": 0, "batch_dims": 0, "mode": "wrap"}, (), ""),
    ("gather_nd", [F, I32], {"batch_dims": 0, "mode": "error"}, (), ""),
    ("gather_nd", [F, _param(3, N, dtype="int32")], {"batch_dims": 0, "mode": "error"}, (), ""),
    ("reduce", [F], {"kind": "mean", "axes": (0,)}, (), ""), ("reduce", [F], {"kind": "and", "axes": (0,)}, (), ""),
    ("reduce", [F], {"kind": "sum", "axes": (1, 0)}, (), ""),
    ("arg_reduce", [F], {"kind": "max", "axis": 0}, (), "float32"),
    ("scan", [F], {"kind": "max", "axis": 0, "exclusive": False, "reverse": False}, (), ""),
    ("dot", [F, F], {"batch": ((), ()), "contract": ((0,), (1,))}, (), ""),
    ("dot", [F, F], {"batch": ((0,), (0,)), "contract": ((0,), (0,))}, (), ""),
    ("conv", [_param(1, 5, 5, 3), _param(3, 3, 4, 8)],
     {"strides": (1, 1), "padding": ((0, 0), (0, 0)), "dilations": (1, 1), "groups": 1}, (), ""),
    *[("conv_filter", [_param(2, 5, 5, 4), _param(2, *places, 8)],
       {"size": size, "strides": (1, 1), "padding": ((0, 0), (0, 0)), "dilations": (1, 1), "groups": groups}, (), "")
      for places, size, groups in [((4, 3), (3, 3), 1), ((3, 3), (3, 3), 3), ((6, 6), (0, 0), 1), ((3,), (3, 3), 1)]],
    ("window", [_param(1, 5, 3)], {"kind": "min", "size": (2,), "strides": (1,), "padding": ((0, 0),)}, (), ""),
])
def test_bad_nodes_are_refused(op, inputs, attrs, shape, dtype):
    with pytest.raises(IRError, match=rf"unnamed node: {op}: "):
        make(op, inputs, attrs, shape, dtype)


def test_the_table_is_complete():
    for name, op in OPS.items():
        assert op.name == name and callable(op.infer) and callable(op.evaluate)
        assert op.elementwise == (op.c is not None)
        assert not op.elementwise or all(f"{{{i}}}" in op.c for i in range(op.arity))


def test_half_types_compute_in_float32():
    x = np.array([1.0, 3.0], np.float16)
    got = evaluate(lambda b, v: b.ew("exp", v), x)
    np.testing.assert_array_equal(got, np.exp(x.astype(np.float32)).astype(np.float16))
    y = np.array([1.0, 3.0], ml_dtypes.bfloat16)
    assert evaluate(lambda b, v: b.ew("is_nan", v), y).dtype == np.bool_
