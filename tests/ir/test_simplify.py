"""Simplification keeps every bit of a graph's meaning and does what it is for."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir_graphs import cases, random_case, random_inputs
from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.ir.interp import run
from tf_stitch.ir.simplify import lossless, simplify
from tf_stitch.ir.verify import verify


def assert_identical(a: np.ndarray, b: np.ndarray) -> None:
    """Equal with the sign of zeros; NaNs count as equal."""
    assert a.dtype == b.dtype and a.shape == b.shape
    wide = (a.astype(np.float64), b.astype(np.float64)) if a.dtype.kind not in "iub" else (a, b)
    np.testing.assert_array_equal(*wide)
    if a.dtype.kind not in "iub":
        nan = np.isnan(wide[0])
        np.testing.assert_array_equal(np.signbit(wide[0][~nan]), np.signbit(wide[1][~nan]))


def check_same_meaning(graph: Graph, seed: int) -> Graph:
    simple = simplify(graph)
    verify(simple)
    for k in range(2):
        inputs = random_inputs(graph, seed + k, special=0.1 * k)
        for a, b in zip(run(graph, inputs), run(simple, inputs), strict=True):
            assert_identical(a, b)
    return simple


@given(cases(simplified=False), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_meaning_is_kept_bit_for_bit(case, seed):
    check_same_meaning(case.graph, seed)


def test_meaning_is_kept_on_a_fixed_set():
    for seed in range(600):
        check_same_meaning(random_case(seed, simplified=False).graph, seed)


def test_a_second_pass_finds_nothing_more():
    for seed in range(200):
        once = random_case(seed).graph
        assert len(simplify(once).nodes()) == len(once.nodes())
