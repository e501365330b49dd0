"""Convolutions as library work: which form each takes, what joins its call, and the interpreter's results."""
from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.fusion.test_library import check, program_of
from tf_stitch.backend import host
from tf_stitch.fusion import library
from tf_stitch.ir import interp
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.program.program import KernelStep, LibraryStep
from tf_stitch.schedule.target import CUDA

SHAPES = [(2, 16, 16, 32), (3, 3, 32, 64)]
VECTOR, IMAGE = (64,), (2, 16, 16, 64)
SAME = ((1, 1), (1, 1))


@pytest.fixture(autouse=True)
def every_product_is_a_call(monkeypatch):
    """The shapes here are small: a kernel would do their products."""
    monkeypatch.setattr(library, "SMALL_WORK", 0)
    monkeypatch.setattr(library, "FEW_ROWS", 0)


def conv(b, x, w):
    return b.conv(x, w, (1, 1), SAME)


def relu(b, x):
    return b.ew("max", x, b.const(0, x.dtype))


def norm(b, x, scale, shift, mean, variance):
    """Inference batch normalisation, as FusedBatchNorm is lowered."""
    channels = (1,) * (x.rank - 1) + (x.shape[-1],)
    scale, shift, mean, variance = (b.reshape(v, channels) for v in (scale, shift, mean, variance))
    factor = b.ew("mul", b.ew("rsqrt", b.ew("add", b.ew("abs", variance), b.const(1e-3, x.dtype))), scale)
    return b.ew("add", b.ew("mul", b.ew("sub", x, mean), factor), shift)


def flags_of(step):
    """(bias, residual, relu, groups)."""
    return step.flags[:4]


def calls(program):
    return [s for s in program.steps if isinstance(s, LibraryStep)]


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("float16", 5e-2), ("bfloat16", 5e-1)])
def test_a_convolution_is_a_call_with_its_filter_turned(dtype, tolerance):
    (step,) = check(conv, SHAPES, dtype, tolerance=tolerance)
    assert step.call == "conv" and step.origin == "node"
    assert step.dims == (2, 32, 64, 16, 16, 16, 16, 3, 3)
    assert step.flags == (0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    _, program = program_of(conv, SHAPES, dtype)
    assert [type(s) for s in program.steps] == [KernelStep, LibraryStep]


def test_a_filter_that_lies_right_is_not_turned():
    def turned(b, x, w):
        return conv(b, x, b.transpose(w, (1, 2, 3, 0)))

    assert len(check(turned, [SHAPES[0], (64, 3, 3, 32)])) == 1
    _, program = program_of(turned, [SHAPES[0], (64, 3, 3, 32)])
    assert [type(s) for s in program.steps] == [LibraryStep]


def test_bias_sum_and_relu_join_the_call():
    def block(b, x, w, v, z):
        return relu(b, b.ew("add", b.ew("add", conv(b, x, w), v), z))

    def other_order(b, x, w, v, z):
        return relu(b, b.ew("add", z, b.ew("add", v, conv(b, x, w))))

    for make in (block, other_order):
        (step,) = check(make, [*SHAPES, VECTOR, IMAGE])
        assert flags_of(step) == (1, 1, 1, 1) and len(step.buffers) == 5


@pytest.mark.parametrize("batch", [1, 2, None])
def test_batch_normalisation_goes_into_the_filter(batch):
    def block(b, x, w, z, *vectors):
        return relu(b, b.ew("add", norm(b, conv(b, x, w), *vectors), z))

    shapes = [(batch, *SHAPES[0][1:]), SHAPES[1], (batch, *IMAGE[1:]), *[VECTOR] * 4]
    plans = 2 if batch is None else 1  # one image has a plan of its own
    assert [flags_of(step) for step in check(block, shapes, tolerance=1e-3)] == [(1, 1, 1, 1)] * plans
    _, program = program_of(block, shapes)
    assert len(program.steps) == 2 * plans  # the filter and the bias, then all the rest


def test_half_types_are_not_scaled():
    def block(b, x, w, *vectors):
        return norm(b, conv(b, x, w), *vectors)

    (step,) = check(block, [*SHAPES, *[VECTOR] * 4], "float16", tolerance=1e-1)
    assert flags_of(step) == (0, 0, 0, 1)


def test_what_is_read_elsewhere_stays_apart():
    def shared(b, x, w, v):
        y = conv(b, x, w)
        return b.ew("mul", relu(b, b.ew("add", y, v)), y)

    (step,) = check(shared, [*SHAPES, VECTOR])
    assert flags_of(step) == (0, 0, 0, 1)


def test_a_sum_of_two_convolutions():
    def both(b, x, w, u, v):
        return relu(b, b.ew("add", b.ew("add", conv(b, x, w), v), conv(b, x, u)))

    first, second = check(both, [*SHAPES, SHAPES[1], VECTOR])
    assert {flags_of(first)[:3], flags_of(second)[:3]} == {(0, 0, 0), (1, 1, 1)}
    assert first.buffers[-1] == second.buffers[3]


@pytest.mark.parametrize("tail", [("relu",), ("sum",), ("sum", "relu")], ids="-".join)
@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("float16", 5e-2)])
def test_sums_and_relu_without_a_bias_are_a_kernel_after_the_call(tail, dtype, tolerance):
    """cuDNN has no compiled engine for them."""
    def block(b, x, w, z):
        y = conv(b, x, w)
        y = b.ew("add", y, z) if "sum" in tail else y
        return relu(b, y) if "relu" in tail else y

    shapes = [*SHAPES, IMAGE]
    (step,) = check(block, shapes, dtype, tolerance=tolerance)
    assert flags_of(step) == (0, 0, 0, 1)
    _, program = program_of(block, shapes, dtype)
    assert [type(s) for s in program.steps] == [KernelStep, LibraryStep, KernelStep]


def test_filters_are_made_ready_by_one_kernel():
    def tower(b, x, *parts):
        for w, v in zip(parts[::2], parts[1::2], strict=True):
            x = relu(b, b.ew("add", conv(b, x, w), v))
        return x

    shapes = [SHAPES[0], SHAPES[1], VECTOR, (3, 3, 64, 64), VECTOR, (3, 3, 64, 32), (32,)]
    _, program = program_of(tower, shapes)
    assert [type(s) for s in program.steps] == [KernelStep, LibraryStep, LibraryStep, LibraryStep]
    assert [flags_of(s)[2] for s in check(tower, shapes, tolerance=1e-2)] == [1, 1, 1]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_window_of_one_element_is_a_product(stride):
    def pointwise(b, x, w):
        return b.conv(x, w, (stride, stride), ((0, 0), (0, 0)))

    (step,) = check(pointwise, [(4, 15, 16, 300), (1, 1, 300, 400)])
    assert step.call == "matmul" and step.dims == (1, 4 * -(-15 // stride) * (16 // stride), 400, 300)


def test_large_filters_multiply_patches():
    def late(b, x, w):
        return b.conv(x, w, (2, 1), ((1, 1), (0, 2)), (1, 2))

    (step,) = check(late, [(1, 9, 7, 64), (3, 3, 64, 256)])
    assert step.call == "matmul" and step.dims == (1, 5 * 5, 256, 9 * 64)
    *_, step = check(late, [(None, 9, 7, 64), (3, 3, 64, 256)], unknown=3)  # the plan for all sizes
    assert step.call == "conv"


@pytest.mark.parametrize("batch", [2, None])
def test_what_requests_are_to_share_multiplies_patches(batch):
    def block(b, x, w, scale, shift, mean, variance):
        return relu(b, norm(b, conv(b, x, w), scale, shift, mean, variance))

    steps = check(block, [(batch, 16, 16, 64), (3, 3, 64, 128), *[(128,)] * 4], tolerance=1e-3,
                  target=replace(CUDA, superkernels=True))
    assert len(steps) == 1 or batch is None  # plans for ranges of an unknown batch
    assert {(s.call, s.flags) for s in steps} == {("matmul", (0,) * 5)}


def test_doubles_multiply_patches():
    (step,) = check(conv, [SHAPES[0], (3, 3, 32, 128)], "float64", tolerance=1e-10)
    assert step.call == "matmul" and step.dims == (1, 512, 128, 288)


def test_depthwise_and_tiny_ones_are_kernels():
    def depthwise(b, x, w):
        return b.conv(x, w, (1, 1), SAME, groups=32)

    assert check(depthwise, [SHAPES[0], (3, 3, 1, 64)]) == []
    assert check(conv, [(1, 3, 3, 4), (3, 3, 4, 8)]) == []


def test_groups_are_calls_when_they_are_wide():
    def grouped(b, x, w):
        return b.conv(x, w, (1, 1), SAME, groups=2)

    (step,) = check(grouped, [SHAPES[0], (3, 3, 16, 64)])
    assert flags_of(step) == (0, 0, 0, 2)


def test_three_spatial_dims():
    def volume(b, x, w):
        return b.conv(x, w, (1, 2, 1), ((1, 0), (1, 1), (0, 2)), (1, 1, 2))

    (step,) = check(volume, [(2, 5, 8, 9, 16), (2, 3, 2, 16, 24)])
    assert step.dims == (2, 16, 24, 5, 8, 9, 5, 4, 9, 2, 3, 2)
    assert step.flags == (0, 0, 0, 1, 1, 2, 1, 1, 1, 0, 0, 1, 2, 1, 1, 2)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_unknown_batch(rows):
    steps = check(conv, [(None, *SHAPES[0][1:]), SHAPES[1]], unknown=rows)
    assert [step.call for step in steps] == ["conv", "conv"]  # one image has a plan of its own


@pytest.mark.parametrize("seed", range(24))
def test_random_convolutions_match_the_interpreter(seed):
    rng = random.Random(seed)
    size = [rng.randint(3, 17) for _ in range(2)]
    window, strides, dilations = ([rng.randint(1, top) for _ in range(2)] for top in (4, 3, 2))
    groups = rng.choice([1, 1, 2])
    channels, results = groups * rng.choice([8, 24]), groups * rng.choice([8, 10])
    padding = [(rng.randint(0, 3), rng.randint(0, 3)) for _ in range(2)]
    batch = rng.choice([None, 1, 4])
    if any(n + sum(p) < (k - 1) * d + 1 for n, p, k, d in zip(size, padding, window, dilations, strict=True)):
        padding = [(p[0] + 4, p[1] + 4) for p in padding]
    tail = rng.sample(["bias", "sum", "relu", "norm"], rng.randint(0, 3))

    def make(b, x, w, *vectors):
        y = b.conv(x, w, strides, padding, dilations, groups)
        for part in tail:
            if part == "relu":
                y = relu(b, y)
            elif part == "norm":
                y = norm(b, y, *vectors[:4])
            else:
                y = b.ew("add", y, vectors[0] if part == "bias" else b.ew("exp", y))
        return y

    shapes = [(batch, *size, channels), (*window, channels // groups, results), *[(results,)] * 4]
    graph, program = program_of(make, shapes)
    values = np.random.default_rng(seed)
    for rows in (2, 0) if batch is None else (batch,):
        inputs = [values.standard_normal([rows if d is None else d for d in s]).astype(DTYPES["float32"].numpy)
                  for s in shapes]
        for got, want in zip(host.run(program, inputs), interp.run(graph, inputs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * max(1.0, np.abs(want).max(initial=0)))


# --- gradients by the filter -------------------------------------------------------------------------

def gradient(size=(3, 3), strides=(1, 1), padding=SAME, groups=1):
    return lambda b, x, g: b.conv_filter(x, g, size, strides, padding, (1, 1), groups)


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("float16", 5e-2), ("bfloat16", 5e-1)])
@pytest.mark.parametrize("batch", [2, None])
def test_a_gradient_by_the_filter_is_a_call_that_reads_the_images(dtype, tolerance, batch):
    shapes = [(batch, 16, 16, 32), (batch, 16, 16, 64)]
    (step,) = check(gradient(), shapes, dtype, tolerance=tolerance)
    assert step.call == "conv_filter" and step.dims[1:] == (32, 64, 16, 16, 16, 16, 3, 3)
    assert step.flags == (0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    _, program = program_of(gradient(), shapes, dtype)
    assert [type(s) for s in program.steps] == [LibraryStep]


def test_what_reads_and_follows_a_gradient_stays_in_kernels():
    def step(b, w, x, g):
        dw = gradient(strides=(2, 2), padding=((0, 1), (0, 1)))(b, b.ew("exp", x), b.ew("mul", g, g))
        return b.ew("sub", w, b.ew("mul", b.transpose(dw, (1, 2, 3, 0)), 0.1))

    (call,) = check(step, [(3, 3, 32, 64), (None, 16, 16, 32), (None, 8, 8, 64)], tolerance=1e-3)
    assert call.call == "conv_filter"


@pytest.mark.parametrize("batch", [2, None])
def test_operands_that_are_views_or_in_no_memory(batch):
    def step(b, x, v, w):
        g = b.broadcast_to(b.ew("mul", v, 2), (x.shape[0], 16, 16, 64))  # as behind a mean over each image
        dw = gradient()(b, b.reshape(x, (x.shape[0], 16, 16, 32)), g)
        dx = b.conv(g, w, (1, 1), SAME)
        return b.ew("add", b.reduce("sum", dx, range(4)), dw)

    found = check(step, [(batch, 256, 32), VECTOR, (3, 3, 64, 32)], tolerance=1e-2)
    assert {s.call for s in found} == {"conv", "conv_filter"}  # for an unknown batch in each of two plans


@pytest.mark.parametrize("groups,channels,form", [(2, 32, ["conv_filter"]), (8, 32, []), (32, 32, []), (16, 16, [])])
def test_groups_of_few_channels_are_sums(groups, channels, form):
    shapes = [(None, 9, 8, channels), (None, 9, 8, 64)]
    assert [s.call for s in check(gradient(groups=groups), shapes, tolerance=1e-3)] == form


def test_doubles_are_products_over_patches():
    shapes = [(None, 9, 8, 16), (None, 9, 8, 32)]
    assert [s.call for s in check(gradient(), shapes, "float64")] == ["matmul"]
    assert [s.call for s in check(gradient(groups=2), shapes, "float64")] == []


def test_gradients_that_share_launches_are_products():
    shapes = [(None, 9, 8, 16), (None, 5, 8, 32)]
    found = check(gradient(strides=(2, 1)), shapes, target=replace(CUDA, superkernels=True))
    assert {s.call for s in found} == {"matmul"}


def test_small_gradients_are_kernels():
    assert check(gradient(), [(1, 4, 4, 3), (1, 4, 4, 8)], tolerance=1e-4) == []


def test_every_form_is_drawn():
    """The shapes above take each way at least once."""
    drawn = [calls(program_of(conv, [shape, w])[1])[0].call for shape, w in
             itertools.product([(1, 7, 7, 64), (2, 32, 32, 64)], [(3, 3, 64, 256)])]
    assert drawn == ["matmul", "conv"]
