"""Sums over batches of products that become products, against the interpreter."""
from __future__ import annotations

import numpy as np
import pytest

from tests.ir_graphs import random_inputs
from tf_stitch.fusion.batches import join_sums
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.ir.verify import verify


def gradient(shapes, batch, contract, axes, dtype="float32", more=lambda b, products: []) -> Graph:
    """The gradient of weights that a batch shares: products of each member, summed; and what else reads these."""
    b = Builder()
    x, y = (b.param(s, dtype, name) for s, name in zip(shapes, "xy", strict=True))
    products = b.dot(x, y, batch, contract)
    return b.finish([b.reduce("sum", products, axes), *more(b, products)], "gradient")


def joined(graph: Graph, sizes=None, tolerance=1e-4) -> list[Node]:
    """The sums that are left, after the results were compared."""
    made = join_sums(graph)
    verify(made)
    inputs = random_inputs(graph, 1, sizes)
    for got, want in zip(interp.run(made, inputs), interp.run(graph, inputs), strict=True):
        bound = tolerance * float(np.abs(want.astype(np.float64)).max())
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=bound)
    return [n for n in made.nodes() if n.op == "reduce"]


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 1e-1), ("int32", 0)])
def test_a_sum_over_a_batch_is_part_of_the_product(dtype, tolerance):
    graph = gradient([(None, 9, 80), (None, 9, 70)], ((0,), (0,)), ((1,), (1,)), [0], dtype)
    assert not joined(graph, dict.fromkeys(graph.symbols, 5), tolerance)


@pytest.mark.parametrize("axes,left", [([0], 0), ([1], 0), ([0, 1], 0), ([2], 1), ([0, 3], 1)])
def test_some_dims_of_a_batch_or_all_of_them(axes, left):
    """A sum over what is no batch stays."""
    graph = gradient([(2, 6, 3, 70), (3, 70, 6, 2)], ((0, 2), (3, 0)), ((1,), (2,)), axes)
    assert len(joined(graph)) == left


def test_what_is_folded_comes_in_the_order_of_memory():
    """So that a library finds matrices."""
    made = join_sums(gradient([(4, 9, 80), (4, 9, 70)], ((0,), (0,)), ((1,), (1,)), [0]))
    (dot,) = (n for n in made.nodes() if n.op == "dot")
    assert dot.attrs == {"batch": ((), ()), "contract": ((0, 1), (0, 1))} and dot.shape == (80, 70)


def test_products_that_others_read_stay():
    shapes, sides = [(4, 9, 80), (4, 9, 70)], (((0,), (0,)), ((1,), (1,)), [0])
    assert joined(gradient(shapes, *sides, more=lambda b, products: [products]))
    assert joined(gradient(shapes, *sides, more=lambda b, products: [b.ew("neg", products)]))


def test_few_results_keep_their_batch():
    """It is what gives the cores work."""
    assert joined(gradient([(4, 900, 8), (4, 900, 7)], ((0,), (0,)), ((1,), (1,)), [0]))
    b = Builder()
    x, y = b.param((4, 9, 80), "float32"), b.param((4, 9, 70), "float32")
    products = b.dot(x, y, ((0,), (0,)), ((1,), (1,)))
    assert joined(b.finish([b.reduce("max", products, [0])]))  # nor is it a sum
