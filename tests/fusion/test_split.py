"""Reductions in two steps mean what one step means."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_stitch.fusion.split import split_reductions
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.verify import verify
from tf_stitch.schedule.target import CUDA, HOST

EAGER = dataclasses.replace(HOST, min_blocks=1 << 40)  # every reduction counts as serial once it is large


def reduces(graph):
    return [n for n in graph.nodes() if n.op == "reduce"]


@st.composite
def reductions(draw):
    shape = draw(st.sampled_from([(1 << 16,), (None,), (128, 640), (None, 48, 5), (24, None, 3, 16),
                                   (512, 3, 64), (65537,)]))
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    kind = draw(st.sampled_from(["sum", "max", "min", "prod"]))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "int32", "uint8", "float64"]))
    return shape, sorted(axes), kind, dtype, draw(st.sampled_from([0, 1, 7, 30])), draw(st.integers(0, 99))


FEW = dataclasses.replace(CUDA, min_blocks=1 << 40)


@given(reductions(), st.sampled_from([EAGER, FEW]))
@settings(max_examples=200, deadline=None)
def test_two_steps_equal_one(case, target):
    shape, axes, kind, dtype, size, seed = case
    b = Builder()
    x = b.param(shape, dtype)
    graph = b.finish([b.reduce(kind, x, axes)])
    cut = split_reductions(graph, target)
    verify(cut)
    if len(reduces(cut)) == 2:
        parts, last = (n.size for n in reduces(cut))
        assert not isinstance(parts, int) or parts >= 8 * last, "the first step is to have many results"
    rng = np.random.default_rng(seed)
    value = rng.integers(-2, 3, [size if d is None else d for d in shape]).astype(DTYPES[dtype].numpy)
    want, got = (interp.run(g, [value])[0] for g in (graph, cut))
    np.testing.assert_array_equal(got, want)  # small integers: exact in every order


@pytest.mark.parametrize(("shape", "axes", "steps"), [
    ((4096, 1024), (0, 1), 2),  # a mean over everything
    ((1 << 20,), (0,), 2),
    ((None, 1000), (0, 1), 2),
    ((None, 7, 7, 64), (0, 1, 2), 2),  # batch statistics
    ((64, 64), (0, 1), 1),  # small: not worth a second step
    ((4096, 1024), (1,), 1),  # 4096 rows are parallel as they are
    ((None,), (0,), 1),  # an unknown length cannot be cut evenly
])
def test_which_reductions_are_cut(shape, axes, steps):
    b = Builder()
    graph = b.finish([b.reduce("sum", b.param(shape, "float32"), axes)])
    assert len(reduces(split_reductions(graph, HOST))) == steps


@pytest.mark.parametrize(("shape", "axes", "parts"), [
    ((64, 32, 32, 32), (0, 1, 2), 256),  # an image has too little for half of the cores: four pieces each
    ((8, 56, 56, 64), (0, 1, 2), 112),  # 16 pieces are wanted, a row of which can be cut into 14
    ((1, 112, 112, 64), (0, 1, 2), 112),
    ((64, 8, 8, 64), (0, 1, 2), 64),  # a piece would have too little to fold
    ((512, 16, 16, 32), (0, 1, 2), 512),
    ((4, 3, 1 << 12, 16), (0, 1, 2), 4096)])
def test_a_gpu_cuts_a_second_axis_where_there_are_few_images(shape, axes, parts):
    b = Builder()
    graph = b.finish([b.reduce("sum", b.ew("mul", b.param(shape, "float32"), 2.0), axes)])
    cut = split_reductions(graph, CUDA)
    verify(cut)
    first, last = reduces(cut)
    assert first.size == parts * shape[-1] and last.size == shape[-1]


def test_what_is_folded_is_computed_in_the_shape_that_it_is_folded_in():
    """A block then owns partial results and what they are made of, which is written as well."""
    b = Builder()
    x, scale, rows = b.param((64, 32, 32, 32), "float32"), b.param((32,), "float32"), b.param((32, 1, 1), "float32")
    y = b.ew("max", b.ew("add", b.ew("mul", x, scale), rows), 0.0)
    graph = b.finish([y, b.reduce("sum", y, (0, 1, 2)), b.reduce("sum", b.ew("mul", y, x), (0, 1, 2))])
    cut = split_reductions(graph, CUDA)
    verify(cut)
    assert {n.shape[:2] for n in cut.nodes() if n.op in ("max", "add", "mul")} == {(64, 4)}
    assert [n.shape for n in reduces(cut)] == [(64, 4, 32), (32,)] * 2
    values = [np.random.default_rng(0).integers(-3, 4, p.shape).astype(np.float32) for p in graph.params]
    for want, got in zip(interp.run(graph, values), interp.run(cut, values), strict=True):
        np.testing.assert_array_equal(got, want)


def test_half_sums_keep_float32_between_the_steps():
    b = Builder()
    graph = b.finish([b.reduce("sum", b.param((4096, 1024), "float16"), (0, 1))])
    cut = split_reductions(graph, HOST)
    assert {n.dtype for n in reduces(cut)} == {"float32"} and cut.outputs[0].dtype == "float16"


@pytest.mark.parametrize(("shape", "axes", "steps"), [
    ((128, 768), (1,), 1), ((128, 8, 768), (1, 2), 1), ((128, None), (1,), 1), ((128, 16384), (1,), 2),
    ((4096, 64), (0,), 2)])
def test_a_gpu_folds_rows_that_a_block_loads_at_once(shape, axes, steps):
    b = Builder()
    graph = b.finish([b.reduce("sum", b.param(shape, "float32"), axes)])
    assert len(reduces(split_reductions(graph, CUDA))) == steps


@pytest.mark.parametrize("target", [CUDA, HOST])
def test_groups_of_channels_are_shared_out_to_a_block_s_threads(target):
    """Few groups lie between folded axes; each would be one thread's.  On a CPU, and of few elements, one step is."""
    b = Builder()
    x, small = b.param((None, 32, 32, 8, 2), "float32"), b.param((None, 4, 4, 8, 2), "float32")
    graph = b.finish([b.reduce("sum", v, [1, 2, 4]) for v in (x, small)], "groups")
    made = split_reductions(graph, target)
    verify(made)
    assert len(reduces(made)) == (3 if target is CUDA else 2)
    arrays = [np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((3, 32, 32, 8, 2), (3, 4, 4, 8, 2))]
    for got, want in zip(interp.run(made, arrays), interp.run(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
