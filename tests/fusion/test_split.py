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


@given(reductions())
@settings(max_examples=120, deadline=None)
def test_two_steps_equal_one(case):
    shape, axes, kind, dtype, size, seed = case
    b = Builder()
    x = b.param(shape, dtype)
    graph = b.finish([b.reduce(kind, x, axes)])
    cut = split_reductions(graph, EAGER)
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
