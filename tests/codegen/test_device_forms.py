"""Computations that a GPU has a function for: which are found, and their text given the host's meaning."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codegen.support import compile_kernels, kernel_of
from tests.codegen.test_rows import agree
from tests.ir_graphs import random_inputs
from tf_stitch.codegen import device_forms
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.schedule import CUDA, HOST

ROOT = float(np.sqrt(0.5))


def _scaled(b: Builder, x: Node, how: str, scale: float) -> Node:
    """scale * x, as one of the ways to write it."""
    c = b.const(abs(scale) if how == "inner" or how == "outer" else scale, x.dtype)
    if how == "inner":
        return b.ew("mul", b.ew("neg", x) if scale < 0 else x, c)
    if how == "outer":
        y = b.ew("mul", c, x)
        return b.ew("neg", y) if scale < 0 else y
    return b.ew("div", x, b.const(1 / scale, x.dtype)) if how == "div" else b.ew("mul", x, c)


def _tail(b: Builder, x: Node, how: str, complement: bool, sign: int) -> Node:
    """Twice the normal distribution at sign * x."""
    if complement:
        return b.ew("erfc", _scaled(b, x, how, -sign * ROOT))
    return b.ew("add", b.const(1.0, x.dtype), b.ew("erf", _scaled(b, x, how, sign * ROOT)))


def _product(b: Builder, x: Node, tail: Node, order: str) -> Node:
    half = b.const(0.5, x.dtype)
    return {"(x/2)E": lambda: b.ew("mul", b.ew("mul", x, half), tail),
            "E(x/2)": lambda: b.ew("mul", tail, b.ew("mul", half, x)),
            "(xE)/2": lambda: b.ew("mul", half, b.ew("mul", x, tail)),
            "E/2": lambda: b.ew("mul", tail, half)}[order]()


def gelu(order: str = "(x/2)E", how: str = "inner", complement: bool = True, sign: int = 1,
         dtype: str = "float32") -> Graph:
    b = Builder()
    x = b.param((40, 64), dtype, "x")
    return b.finish([_product(b, x, _tail(b, x, how, complement, sign), order)], "gelu")


@given(st.sampled_from(["(x/2)E", "E(x/2)", "(xE)/2", "E/2"]), st.sampled_from(["inner", "outer", "div", "mul"]),
       st.booleans(), st.sampled_from([1, -1]))
def test_gelu_is_found_however_it_is_written(order, how, complement, sign):
    graph = gelu(order, how, complement, sign)
    found = device_forms.normal_cdf(graph.outputs[0], lambda n: n.op != "param")
    assert found is not None and found.x is graph.params[0]
    assert found.negated == (sign < 0) and (found.factor is None) == (order == "E/2")


def test_text_of_gelu():
    graphs = [gelu("(x/2)E", "inner", True, 1), gelu("(xE)/2", "div", False, 1), gelu("E/2", "mul", True, -1),
              gelu("E(x/2)", "outer", False, -1)]
    kernels = [kernel_of(g, CUDA) for g in graphs]
    assert all(k.text.count("ts_ndtr(") == 1 and "ts_erf" not in k.text for k in kernels)
    library = compile_kernels(kernels, optimize="-O1")
    special = np.float32([0, -0.0, np.inf, np.nan, 14, -14, 1e-40, -1e-40, 1e38, -13.5])
    for graph, kernel in zip(graphs, kernels, strict=True):
        inputs = random_inputs(graph, 1)
        inputs[0][0, :special.size] = special
        agree(graph, inputs, kernel, library, 1e-6)


def test_float64_has_no_such_function():
    assert "ts_ndtr(" not in kernel_of(gelu(dtype="float64"), CUDA).text


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_half_types_round_between_the_operations(dtype, tolerance):
    graph = gelu(dtype=dtype)
    kernel = kernel_of(graph, CUDA)
    (tail,) = [line for line in kernel.text.splitlines() if "ts_ndtr(" in line]
    assert "2.0f * ts_ndtr(" in tail and "ts_round<" in tail  # erfc of the rounded argument
    agree(graph, random_inputs(graph, 1), kernel, compile_kernels([kernel]), tolerance)


def test_a_host_has_not():
    assert "ts_ndtr(" not in kernel_of(gelu(), HOST).text


@pytest.mark.parametrize("scale", [0.7, 0.70711, 0.5])
def test_other_scales_are_others(scale):
    b = Builder()
    x = b.param((40, 64), "float32", "x")
    tail = b.ew("erfc", b.ew("mul", x, b.const(-scale, "float32")))
    graph = b.finish([_product(b, x, tail, "(x/2)E")], "other")
    text = kernel_of(graph, CUDA).text
    assert "ts_ndtr(" not in text and "ts_erfc(" in text


def test_a_tail_that_is_also_a_result_is_computed_once():
    b = Builder()
    x = b.param((40, 64), "float32", "x")
    tail = _tail(b, x, "inner", True, 1)
    kernel = kernel_of(b.finish([tail, _product(b, x, tail, "(x/2)E")], "both"), CUDA)
    assert "ts_ndtr(" not in kernel.text and kernel.text.count("ts_erfc(") == 1
