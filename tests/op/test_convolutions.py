"""Convolutions as library steps, on the CPU: results against the interpreter, what a damaged program may not do."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.op import programs
from tests.op.calls import counted, specs_of, stitched
from tests.op.test_library import DTYPES, changed
from tf_stitch import runtime
from tf_stitch.backend import host
from tf_stitch.ir import dims as D
from tf_stitch.ir.ops import OPS
from tf_stitch.program import serialize

VARIANTS = [
    {}, {"bias": 1}, {"residual": 1}, {"bias": 1, "residual": 1}, {"bias": 1, "residual": 1, "relu": 1},
    {"relu": 1}, {"bias": 1, "relu": 1},
    {"groups": 2, "bias": 1, "relu": 1}, {"groups": 6, "results": 12},
    {"window": (1, 1), "strides": (1, 1), "low": (0, 0), "high": (0, 0), "dilations": (1, 1)},
    {"image": (1, 1), "low": (3, 3), "high": (3, 3)}, {"channels": 1, "results": 1, "bias": 1},
    {"image": (4, 5, 6), "window": (2, 3, 1), "strides": (1, 2, 3), "low": (1, 0, 0), "high": (0, 1, 2),
     "dilations": (2, 1, 1), "bias": 1, "residual": 1, "relu": 1},
    {"image": (2, 2), "window": (4, 4), "strides": (1, 1), "low": (0, 0), "high": (1, 1), "dilations": (1, 1)},
]


def operands(program, batch, seed=0):
    """Small multiples of 1/4: exact in every type, so that rounding shows only in the sum."""
    rng = np.random.default_rng(seed)
    shapes = [[D.evaluate(d, {"batch": batch}) for d in b.shape] for b in program.of_kind("input")]
    return [(rng.integers(-8, 9, shape) / 4).astype(DTYPES[program.buffers[0].dtype]) for shape in shapes]


def attrs_of(step, spatial):
    """The attrs of the primitive that a step computes."""
    strides, low, high, dilations = (tuple(step.flags[4 + i * spatial:4 + (i + 1) * spatial]) for i in range(4))
    return {"strides": strides, "padding": tuple(zip(low, high, strict=True)), "dilations": dilations,
            "groups": step.flags[3]}


def convolved(program, x, w, *rest):
    """The definition, in float64."""
    step = program.steps[0]
    attrs, (has_bias, has_residual, relu, *_) = attrs_of(step, x.ndim - 2), step.flags
    shape = [D.evaluate(d, {"batch": len(x)}) for d in program.of_kind("output")[0].shape]
    y = OPS["conv"].evaluate([x.astype(np.float64), np.moveaxis(w, 0, -1).astype(np.float64)], attrs, tuple(shape),
                             "float64")
    y = y + (rest[0].astype(np.float64) if has_bias else 0) + (rest[-1].astype(np.float64) if has_residual else 0)
    return np.maximum(y, 0) if relu else y


def filter_gradient(program, x, g):
    """The definition, in float64."""
    step, spatial = program.steps[0], x.ndim - 2
    attrs = attrs_of(step, spatial) | {"size": step.dims[-spatial:]}
    return OPS["conv_filter"].evaluate([x.astype(np.float64), g.astype(np.float64)], attrs,
                                       program.of_kind("output")[0].shape, "float64")


def never(x, *args):
    return tf.zeros([0] * x.shape.rank, x.dtype)


def check_everywhere(program, dtype, meaning):
    """A call alone in a program gives what it means: after serialising, by the host's runner and by the op."""
    assert serialize.loads(serialize.dumps(program)) == program
    f = tf.function(stitched(program, never), input_signature=specs_of(program), autograph=False)
    for batch in (2, 1, 0):
        xs = operands(program, batch)
        want = meaning(program, *xs).astype(DTYPES[dtype])
        np.testing.assert_array_equal(host.run(program, xs)[0], want)
        got, ran, _ = counted(lambda xs=xs: f(*xs))
        assert ran == 1
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_convolutions(dtype, variant):
    check_everywhere(programs.conv(dtype, **variant), dtype, convolved)


GRADIENTS = [v for v in VARIANTS if not {"bias", "residual", "relu"} & set(v)] + [
    {"groups": 2}, {"channels": 1, "results": 1},
    {"image": (4, 5, 6), "window": (2, 3, 1), "strides": (1, 2, 3), "low": (1, 0, 0), "high": (0, 1, 2),
     "dilations": (2, 1, 1)}]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", GRADIENTS, ids=str)
def test_gradients_by_the_filter(dtype, variant):
    check_everywhere(programs.conv(dtype, gradient=True, **variant), dtype, filter_gradient)


def test_nan_passes_relu():
    program = programs.conv(bias=1, relu=1)
    x, w, v = operands(program, 1)
    v[3] = np.nan
    f = tf.function(stitched(program, never), input_signature=specs_of(program), autograph=False)
    for got in (f(x, w, v).numpy(), host.run(program, [x, w, v])[0]):
        np.testing.assert_array_equal(np.isnan(got), np.broadcast_to(np.arange(10) == 3, got.shape))


def flags(**changes):
    """The flags of programs.conv() with entries replaced by position."""
    out = list(programs.conv().steps[0].flags)
    for at, value in changes.items():
        out[int(at[1:])] = value
    return tuple(out)


@pytest.mark.parametrize("changes, message", [
    ({"flags": (0,) * 11}, "has not 12 or 16 flags"),
    ({"flags": flags(_0=2)}, "flag 2 does not exist"),
    ({"flags": flags(_0=1)}, "another number of operands"),
    ({"flags": flags(_3=0)}, "a stride, a dilation or groups of 0"),
    ({"flags": flags(_4=0)}, "a stride, a dilation or groups of 0"),
    ({"flags": flags(_11=0)}, "a stride, a dilation or groups of 0"),
    ({"flags": flags(_6=1 << 40)}, "does not exist"),
    ({"dims": (1,) * 8}, "another number of dims"),
    ({"buffers": (0, 1, 0)}, "a convolution writes an input"),
    ({"buffers": (0, 1, 7)}, "buffer 7 does not exist"),
])
def test_what_the_parser_refuses(changes, message):
    assert message in runtime.check_program(serialize.dumps(changed(programs.conv(), **changes)))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_gradient_has_no_bias_sum_or_relu(at):
    bad = changed(programs.conv(gradient=True), flags=flags(**{f"_{at}": 1}))
    assert "gradient by its filter has a bias, a sum or a ReLU" in runtime.check_program(serialize.dumps(bad))


@pytest.mark.parametrize("at, value", [(0, 3), (0, -1), (1, 12), (2, 11), (3, 10), (5, 6), (7, 4), (7, 0)])
def test_sizes_of_gradients_past_the_buffers_run_the_fallback(at, value):
    good = programs.conv(gradient=True)
    dims = list(good.steps[0].dims)
    dims[at] = value
    bad = changed(good, dims=tuple(dims))
    f = tf.function(stitched(bad, lambda x, g: tf.fill([10, 3, 2, 6], 7.0)), input_signature=specs_of(bad),
                    autograph=False)
    result, ran, fell_back = counted(lambda: f(*operands(good, 2)))
    assert (ran, fell_back) == (0, 1)
    assert (result.numpy() == 7).all()


def test_types_that_have_no_convolution():
    program = programs.conv()
    program.buffers = [dataclasses.replace(b, dtype="int32") for b in program.buffers]
    assert "a convolution has elements of type 3" in runtime.check_program(serialize.dumps(program))


@pytest.mark.parametrize("at, value", [
    (0, 3), (0, -1), (1, 12), (1, 1 << 62), (2, 11), (3, 10), (3, -9), (3, 1 << 62), (5, 6), (5, 1 << 40), (7, 4),
    (7, 0), (7, 1 << 62),
])
def test_sizes_past_the_buffers_run_the_fallback(at, value):
    """A damaged program must not read or write outside."""
    good = programs.conv()
    dims = list(good.steps[0].dims)
    dims[at] = value
    bad = changed(good, dims=tuple(dims))
    f = tf.function(stitched(bad, lambda x, w: tf.fill(tf.stack([tf.shape(x)[0], 5, 7, 10]), 7.0)),
                    input_signature=specs_of(bad), autograph=False)
    result, ran, fell_back = counted(lambda: f(*operands(good, 2)))
    assert (ran, fell_back) == (0, 1)
    assert (result.numpy() == 7).all()


def test_groups_that_do_not_divide_the_channels_run_the_fallback():
    bad = changed(programs.conv(), flags=flags(_3=4))
    f = tf.function(stitched(bad, lambda x, w: tf.fill(tf.stack([tf.shape(x)[0], 5, 7, 10]), 7.0)),
                    input_signature=specs_of(bad), autograph=False)
    _, ran, fell_back = counted(lambda: f(*operands(programs.conv(), 2)))
    assert (ran, fell_back) == (0, 1)
