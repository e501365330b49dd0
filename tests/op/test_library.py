"""Library steps: matrix products inside programs, on the CPU, against NumPy."""
from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.op import programs
from tests.op.calls import counted, specs_of, stitched
from tf_stitch import runtime
from tf_stitch.backend import host
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.program import serialize
from tf_stitch.program.program import Buffer, LibraryStep

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32),
          "float64": np.dtype(np.float64)}
SIZES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 17, 33, 65), (0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)]
FLAGS = [f for f in itertools.product((0, 1), repeat=5) if not (f[2] and f[3])]


def operands(dtype, flags, sizes, seed=0):
    """Small multiples of 1/4: exact in every type, so that rounding shows only in the sum."""
    trans_lhs, trans_rhs, broadcast_lhs, broadcast_rhs, has_bias = flags
    batch, m, n, k = sizes
    shapes = [(1 if broadcast_lhs else batch, *((k, m) if trans_lhs else (m, k))),
              (1 if broadcast_rhs else batch, *((n, k) if trans_rhs else (k, n)))] + [(n,)] * has_bias
    rng = np.random.default_rng(seed)
    return [(rng.integers(-8, 9, shape) / 4).astype(DTYPES[dtype]) for shape in shapes]


def product(flags, lhs, rhs, bias=None):
    """The definition, in float64."""
    lhs, rhs = (x.astype(np.float64).swapaxes(1, 2) if t else x.astype(np.float64)
                for x, t in ((lhs, flags[0]), (rhs, flags[1])))
    y = lhs @ rhs
    return y if bias is None else y + bias.astype(np.float64)


def function(program, fn):
    return tf.function(stitched(program, fn), input_signature=specs_of(program), autograph=False)


def never(*args):
    return tf.raw_ops.Identity(input=tf.zeros([1, 1, 1], args[0].dtype))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_products(dtype):
    for flags in FLAGS:
        program = programs.matmul(dtype, flags)
        assert serialize.loads(serialize.dumps(program)) == program
        f = function(program, never) if flags in FLAGS[::5] else None
        for sizes in SIZES:
            xs = operands(dtype, flags, sizes)
            want = product(flags, *xs).astype(DTYPES[dtype])
            np.testing.assert_array_equal(host.run(program, xs)[0], want, err_msg=f"{flags} {sizes}")
            if f is not None:
                got, ran, _ = counted(lambda f=f, xs=xs: f(*xs))
                assert ran == 1
                np.testing.assert_array_equal(got.numpy(), want, err_msg=f"{flags} {sizes}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_and_specials_of_half_types(dtype):
    """A product with 1 gives every number of the type back (TensorFlow's threads flush denormals of float32)."""
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    f = function(programs.matmul(dtype), never)
    got = f(every.reshape(1, -1, 1), np.ones((1, 1, 1), DTYPES[dtype])).numpy().reshape(-1)
    wide = every.astype(np.float32)
    normal = np.abs(wide) >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wide))
    np.testing.assert_array_equal(got[normal], every[normal])
    every = every[normal & np.isfinite(wide)]
    pairs = np.random.default_rng(1).choice(every, (1, 20000, 2))
    with np.errstate(over="ignore"):
        want = pairs.astype(np.float32).sum(-1, dtype=np.float32, keepdims=True)
        want[np.abs(want) < np.finfo(np.float32).tiny] = 0
        want = want.astype(DTYPES[dtype])
    got = f(pairs, np.ones((1, 2, 1), DTYPES[dtype])).numpy()
    np.testing.assert_array_equal(got, want)


def test_between_kernels():
    """2x + 1, then the product, then doubled again; sizes known at run time, in parallel."""
    m, n, k = (programs.dim(name) for name in "mnk")
    f32 = "float32"
    program = programs.program(
        [Buffer("input", 0, f32, (m, k)), Buffer("input", 1, f32, (k, n)), Buffer("output", 0, f32, (m, n)),
         Buffer("temp", 0, f32, (m, k)), Buffer("temp", 1, f32, (m, n))],
        [programs.launch("t_axpb", (0, 3), m * k), LibraryStep("matmul", (3, 1, 4), (1, m, n, k), (0,) * 5, "dot"),
         programs.launch("t_axpb", (4, 2), m * n)],
        {"m": SymbolSource("dim", 0, 0), "k": SymbolSource("dim", 0, 1), "n": SymbolSource("dim", 1, 1)})
    f = function(program, lambda x, y: 2 * ((2 * x + 1) @ y) + 1)
    for sizes in [(1, 1, 1), (200, 300, 100), (1, 500, 64)]:
        x, y = operands(f32, (0,) * 5, (1, *sizes))
        x, y = x[0], y[0]
        got, ran, _ = counted(lambda x=x, y=y: f(x, y))
        assert ran == 1
        np.testing.assert_allclose(got, 2 * ((2 * x + 1) @ y) + 1, rtol=1e-5, atol=1e-4)


def changed(program, **changes):
    return dataclasses.replace(program, steps=[dataclasses.replace(program.steps[0], **changes)])


@pytest.mark.parametrize("changes, message", [
    ({"call": "sort"}, "the library call 'sort' is not known"),
    ({"flags": (0,) * 6}, "has not 5 flags"),
    ({"flags": (0, 0, 0, 0, 2)}, "flag 2 does not exist"),
    ({"flags": (0, 0, 0, 0, 1)}, "another number of operands"),
    ({"dims": (1, 2, 3)}, "has not 4 dims"),
    ({"buffers": (0, 1, 0)}, "writes an input"),
    ({"buffers": (0, 1, 9)}, "buffer 9 does not exist"),
])
def test_what_the_parser_refuses(changes, message):
    assert message in runtime.check_program(serialize.dumps(changed(programs.matmul(), **changes)))


def test_types_that_have_no_product():
    program = programs.matmul()
    program.buffers = [dataclasses.replace(b, dtype="int32") for b in program.buffers]
    assert "elements of type 3" in runtime.check_program(serialize.dumps(program))
    program.buffers[0] = dataclasses.replace(program.buffers[0], dtype="float32")
    assert "operands of several types" in runtime.check_program(serialize.dumps(program))


@pytest.mark.parametrize("dims", [
    lambda b, m, n, k: (b + 1, m, n, k), lambda b, m, n, k: (b, m + 1, n, k), lambda b, m, n, k: (b, m, n + 1, k),
    lambda b, m, n, k: (b, m, n, k + 1), lambda b, m, n, k: (b, 0 - m, n, k), lambda b, m, n, k: (b, m, n, 0 - k),
    lambda b, m, n, k: (1 << 62, m, n, 1 << 62), lambda b, m, n, k: (b, m, n, 1 << 40),
])
def test_sizes_past_the_buffers_run_the_fallback(dims):
    """A damaged program must not read or write outside."""
    good = programs.matmul(flags=(0, 0, 0, 0, 1))
    bad = changed(good, dims=dims(*good.steps[0].dims))
    f = function(bad, lambda x, y, b: x @ y + b)
    xs = operands("float32", good.steps[0].flags, (2, 3, 5, 7))
    result, ran, fell_back = counted(lambda: f(*xs))
    assert (ran, fell_back) == (0, 1)
    np.testing.assert_allclose(result, product(good.steps[0].flags, *xs), rtol=1e-6)
