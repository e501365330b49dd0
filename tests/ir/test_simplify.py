"""Simplification keeps every bit of a graph's meaning and does what it is for."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir_graphs import cases, random_case, random_inputs
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.graph import Graph
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


# --- single rules, on values where a careless rule goes wrong -------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, -3.25, np.inf, -np.inf, np.nan, 1e-30, 3e38]


def build(fn, dtype="float32", shape=(None,)):
    """The raw graph of ``fn(builder, x)`` and its simplification, checked to mean the same on special values."""
    b = Builder()
    x = b.param(shape, dtype, "x")
    graph = b.raw([fn(b, x)])
    simple = simplify(graph)
    verify(simple)
    values = np.array(SPECIAL if DTYPES[dtype].is_float else [0, 1, 2, 7, 100]).astype(DTYPES[dtype].numpy)
    inputs = [np.resize(values, [len(values) if d is None else d for d in shape])]
    with np.errstate(all="ignore"):
        for a, c in zip(run(graph, inputs), run(simple, inputs), strict=True):
            assert_identical(a, c)
    return simple


def ops_of(graph):
    return [n.op for n in graph.nodes() if n.op not in ("param", "const", "broadcast")]


@pytest.mark.parametrize("fn", [
    lambda b, x: b.ew("add", x, -0.0), lambda b, x: b.ew("sub", x, 0.0), lambda b, x: b.ew("mul", x, 1.0),
    lambda b, x: b.ew("div", x, 1.0), lambda b, x: b.ew("neg", b.ew("neg", x)), lambda b, x: b.ew("max", x, x),
    lambda b, x: b.ew("pow", x, 1.0), lambda b, x: b.reverse(b.reverse(x, [0]), [0]),
    lambda b, x: b.cast(b.cast(x, "float64"), "float32"), lambda b, x: b.select(b.ew("lt", x, 1.0), x, x),
    lambda b, x: b.reshape(b.reshape(x, (*x.shape, 1)), x.shape), lambda b, x: b.select(b.const(True), x, 0.0),
    lambda b, x: b.bitcast(b.bitcast(x, "int32"), "float32"), lambda b, x: b.concat([x, b.slice(x, [0], [0])], 0),
    lambda b, x: b.slice(b.pad(x, [1], [2]), [1], x.shape), lambda b, x: b.slice(b.concat([x, x], 0), x.shape, x.shape),
])
def test_no_ops_vanish(fn):
    assert ops_of(build(fn)) == []


@pytest.mark.parametrize(("fn", "ops"), [
    (lambda b, x: b.ew("add", x, 0.0), ["add"]),  # -0.0 + 0.0 is 0.0
    (lambda b, x: b.ew("sub", x, -0.0), ["sub"]),
    (lambda b, x: b.ew("mul", x, 0.0), ["mul"]), (lambda b, x: b.ew("sub", x, x), ["sub"]),
    (lambda b, x: b.ew("eq", x, x), ["eq"]), (lambda b, x: b.ew("div", x, 3.0), ["div"]),
    (lambda b, x: b.ew("div", x, 4.0), ["mul"]), (lambda b, x: b.ew("div", x, -0.5), ["mul"]),
    (lambda b, x: b.ew("div", x, 2.0**-149), ["div"]),  # its inverse is no float32
    (lambda b, x: b.ew("pow", x, 2.0), ["mul"]), (lambda b, x: b.ew("pow", x, 0.0), []),
    (lambda b, x: b.ew("pow", x, -1.0), ["div"]), (lambda b, x: b.ew("pow", x, 0.5), ["pow"]),
    (lambda b, x: b.cast(b.cast(x, "float16"), "float32"), ["cast", "cast"]),
    (lambda b, x: b.ew("abs", b.ew("neg", x)), ["abs"]),
    (lambda b, x: b.ew("add", b.ew("exp", x), b.ew("exp", x)), ["exp", "add"]),
    (lambda b, x: b.reduce("sum", b.reshape(x, (*x.shape, 1)), [1]), ["add"]),
    (lambda b, x: b.reduce("max", b.reshape(x, (*x.shape, 1)), [1]), []),
    (lambda b, x: b.transpose(b.reshape(x, (*x.shape, 1)), [1, 0]), ["reshape"]),
])
def test_what_is_left_of_a_float_expression(fn, ops):
    assert ops_of(build(fn)) == ops


@pytest.mark.parametrize(("fn", "ops"), [
    (lambda b, x: b.ew("add", x, 0), []), (lambda b, x: b.ew("mul", x, 0), []), (lambda b, x: b.ew("sub", x, x), []),
    (lambda b, x: b.ew("bit_xor", x, x), []), (lambda b, x: b.ew("bit_and", x, -1), []),
    (lambda b, x: b.ew("bit_or", x, 0), []), (lambda b, x: b.ew("shift_left", x, 0), []),
    (lambda b, x: b.ew("eq", x, x), []), (lambda b, x: b.ew("lt", x, x), []), (lambda b, x: b.ew("int_div", x, 1), []),
    (lambda b, x: b.cast(b.cast(x, "int64"), "int32"), []),
    (lambda b, x: b.cast(b.cast(x, "int8"), "int32"), ["cast", "cast"]),
])
def test_what_is_left_of_an_integer_expression(fn, ops):
    assert ops_of(build(fn, "int32")) == ops


def test_work_on_broadcast_values_comes_before_the_broadcast():
    graph = build(lambda b, x: b.ew("exp", b.ew("mul", b.broadcast_to(x, (5, *x.shape)), 2.0)))
    assert {n.op: n.rank for n in graph.nodes() if n.op in ("exp", "mul")} == {"exp": 1, "mul": 1}


def test_an_integer_division_is_not_moved_out_of_an_empty_broadcast():
    b = Builder()
    x = b.param((), "int32")
    graph = b.finish([b.ew("int_div", b.broadcast_to(x, (0,)), b.broadcast_to(x, (0,)))])
    assert run(graph, [np.int32(0)])[0].shape == (0,)


def test_folding_leaves_errors_for_run_time():
    b = Builder()
    graph = b.finish([b.ew("int_div", b.const([4, 2]), b.const([2, 0]))])
    with pytest.raises(ZeroDivisionError):
        run(graph, [])


def test_constants_are_folded_and_splats_need_no_memory():
    b = Builder()
    graph = b.finish([b.ew("add", b.const([1.0, 2.0], "float32"), b.const([0.5, 0.5], "float32")),
                      b.const(np.zeros((100, 100), np.float32))])
    assert [n.op for n in graph.outputs] == ["const", "broadcast"]
    np.testing.assert_array_equal(graph.outputs[0].attrs["value"], [1.5, 2.5])


@given(st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES)), st.integers(0, 2**32 - 1))
def test_lossless_casts_lose_nothing(a, b, seed):
    if lossless(a, b):
        d = DTYPES[a]
        bits = np.random.default_rng(seed).integers(0, 256, 64 * d.size, dtype=np.uint8)
        x = (bits & 1).view(np.bool_) if a == "bool" else bits.view(d.numpy)
        with np.errstate(all="ignore"):
            assert_identical(x.astype(DTYPES[b].numpy).astype(d.numpy), x)


def test_slices_of_empty_slices():
    b = Builder()
    x = b.param((2,), "float32")
    graph = b.finish([b.slice(b.slice(x, [1], [0], [3]), [0], [0], [3])])
    assert graph.outputs[0].attrs == {"starts": (0,), "steps": (1,)}
