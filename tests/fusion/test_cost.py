"""What kernels are estimated to cost on a GPU decides as measurements on an H200 do."""
from __future__ import annotations

import pytest

from tests.codegen.support import whole
from tests.codegen.test_rows import soft
from tf_stitch.fusion import cost, variants
from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph
from tf_stitch.schedule import CUDA, build
from tf_stitch.schedule.tile import product_tiles


def lstm_step(rows: int, units: int = 128, features: int = 28) -> Graph:
    b = Builder()
    x = b.concat([b.param((rows, features), "float32", "x"), b.param((rows, units), "float32", "h")], 1)
    c, w = b.param((rows, units), "float32", "c"), b.param((features + units, 4, units), "float32", "w")
    z = b.dot(x, w, contract=((1,), (0,)))
    i, f, g, o = (b.reshape(b.slice(z, (0, k, 0), (rows, 1, units)), (rows, units)) for k in range(4))
    c = b.ew("add", b.ew("mul", b.ew("sigmoid", f), c), b.ew("mul", b.ew("sigmoid", i), b.ew("tanh", g)))
    return b.finish([b.ew("mul", b.ew("sigmoid", o), b.ew("tanh", c)), c], "lstm_step")


@pytest.mark.parametrize("rows,each", [(8, 1), (19, 2), (24, 2), (32, 2), (48, 4), (100, 8)])
def test_rows_of_a_block_are_those_that_were_fastest(rows, each):
    (part,) = build(whole(lstm_step(rows)), CUDA).parts
    assert [a.chunk for a in part.axes] == [each, 16]


def attended(rows=None, words: int = 32, units: int = 512) -> Graph:
    """Attention over some words, and a layer of its result."""
    b = Builder()
    q, keys = b.param((rows, units), "float32", "q"), b.param((rows, words, units), "float32", "keys")
    shape = (q.shape[0], words, units)
    scores = b.reduce("sum", b.ew("mul", keys, b.broadcast_to(b.reshape(q, (shape[0], 1, units)), shape)), (2,))
    shares = b.broadcast_to(b.reshape(soft(b, scores), (*shape[:2], 1)), shape)
    context = b.reduce("sum", b.ew("mul", keys, shares), (1,))
    w = b.param((2 * units, units), "float32", "w")
    return b.finish([b.ew("tanh", b.dot(b.concat([context, q], 1), w, contract=((1,), (0,))))], "attended")


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_blocks_of_a_product_do_not_all_wait_for_the_same(rows):
    """Each of them would fold all words before it could begin; whether the number of rows is known or not."""
    assert len(variants.draft_graph(attended(rows), CUDA).planned) == 2
    graph = attended()
    (here,) = [r for r in variants.ranges(graph, CUDA) if r.most == rows]
    assert len(variants.draft_graph(here.bounded(graph), CUDA).planned) == 2


def test_a_range_of_sizes_is_planned_for_its_upper_half():
    sizes = [cost.environments([D.symbol("n", lo, hi)]) for lo, hi in ((1, 32), (17, 32), (0, None), (300, None))]
    assert sizes == [[{"n": 17}, {"n": 32}], [{"n": 17}, {"n": 32}], [{"n": 4}, {"n": 256}], [{"n": 300}, {"n": 300}]]


@pytest.mark.parametrize("rows", [D.symbol("n", 0, 64), D.symbol("n", 0)])
def test_fewer_rows_are_tried_where_their_number_is_unknown(rows):
    """Twelve heads each: with 33 rows, blocks of 8 heads are half as many as there are cores."""
    known, unknown = (set(product_tiles((n, 12, 64), CUDA.cores)) for n in (64, rows))
    assert (1, 4, None) in unknown - known
