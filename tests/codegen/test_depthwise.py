"""Depthwise convolutions as kernels of the CUDA target, run on the host."""
from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.support import compile_kernels, kernel_of
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph
from tf_stitch.schedule import CUDA


def depthwise(size, channels, window, stride, padding) -> Graph:
    b = Builder()
    x = b.param((2, size, size, channels), "float32", "x")
    w = b.param((window, window, channels, 1), "float32", "w")
    w = b.reshape(w, (window, window, 1, channels))
    return b.finish([b.conv(x, w, [stride, stride], [padding, padding], [1, 1], channels)], "depthwise")


@pytest.mark.parametrize("size,channels,window,stride,padding", [
    (14, 40, 5, 1, (2, 2)), (8, 33, 3, 2, (0, 1)), (9, 8, 3, 2, (1, 1)), (2, 5, 5, 1, (2, 2)), (1, 3, 3, 1, (1, 1))])
def test_padding_needs_no_branch(size, channels, window, stride, padding):
    """What lies beyond the border is 0, even where the element that is read in its place is infinite or NaN."""
    graph = depthwise(size, channels, window, stride, padding)
    kernel = kernel_of(graph, CUDA)
    product = kernel.text[kernel.text.index("// conv"):]
    assert "ts_pick<float>(" in product and "if (" not in product
    x, w = (np.random.default_rng(k).standard_normal(p.shape).astype(np.float32) for k, p in enumerate(graph.params))
    x[0, 0, 0], x[1, -1, -1] = np.inf, np.nan
    inputs = [x, w]
    got, status = compile_kernels([kernel]).run(kernel, graph.bind(inputs),
                                                dict(zip(graph.params, inputs, strict=True)))
    assert status == 0
    np.testing.assert_allclose(got[graph.outputs[0]], interp.run(graph, inputs)[0], rtol=1e-5, atol=1e-5)


def test_images_that_may_be_empty_are_not_read_ahead():
    b = Builder()
    x, w = b.param((1, None, 4, 8), "float32", "x"), b.param((3, 3, 1, 8), "float32", "w")
    graph = b.finish([b.conv(x, w, [1, 1], [(1, 1), (1, 1)], [1, 1], 8)])
    text = kernel_of(graph, CUDA).text
    assert "ts_pick<float>(" not in text and "if (" in text
