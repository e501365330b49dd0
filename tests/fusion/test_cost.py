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


def depthwise_ns(batch: int, size: int, channels: int, window: int, stride: int) -> float:
    """The estimate for a depthwise convolution with padding to the size that its stride gives."""
    b = Builder()
    x, w = b.param((batch, size, size, channels), "float32"), b.param((window, window, 1, channels), "float32")
    places = -(-size // stride)
    zeros = max((places - 1) * stride + window - size, 0)
    y = b.conv(x, w, (stride, stride), [(zeros // 2, zeros - zeros // 2)] * 2, groups=channels)
    group = whole(b.finish([y]))
    return cost.CostModel("cuda", [{}]).estimate(group, build(group, CUDA)).ns


@pytest.mark.parametrize("case,us", [
    ((1, 28, 88, 3, 1), 2.6), ((1, 14, 240, 5, 1), 3.5), ((8, 7, 576, 5, 1), 6.2), ((8, 28, 96, 5, 2), 4.8),
    ((33, 14, 240, 5, 1), 15.0), ((33, 7, 576, 5, 1), 7.1), ((100, 28, 88, 3, 1), 38.7), ((100, 56, 72, 3, 2), 65.3),
    ((100, 14, 240, 5, 1), 61.1), ((100, 14, 288, 5, 2), 14.3)])
def test_depthwise_convolutions_take_about_what_was_measured(case, us):
    """Without them, plans for ranges of batch sizes had estimates of 10 us for what took 290."""
    assert us / 1.8 < depthwise_ns(*case) / 1e3 < us * 1.8


@pytest.mark.parametrize("rows,columns,inner,us", [
    (1024, 512, 512, 8.1), (4900, 576, 96, 8.9), (4900, 96, 576, 12.7), (19600, 40, 240, 10.6), (19600, 256, 128, 15.7),
    (19600, 512, 512, 47.3), (4900, 1024, 576, 30.8), (78400, 24, 88, 12.9), (78400, 72, 16, 14.7)])
def test_products_of_a_library_take_about_what_was_measured(rows, columns, inner, us):
    assert us / 1.6 < cost.CostModel("cuda", [{}]).library_ns((1, rows, columns, inner)) / 1e3 < us * 1.6


@pytest.mark.parametrize("rows", [100, None])
def test_what_a_product_divides_is_divided_once(rows):
    """Where threads divide what they read, a product of up to 128 rows took 87 us, else 5."""
    b = Builder()
    x, w = b.param((rows, 576), "float32", "x"), b.param((576, 144), "float32", "w")
    y = b.dot(b.ew("div", x, 49.0), w, contract=((1,), (0,)))
    bias = b.broadcast_to(b.param((144,), "float32", "bias"), y.shape)
    graph = b.finish([b.ew("max", b.ew("add", y, bias), 0.0)])
    for name in graph.symbols:
        graph = variants.Range(D.Symbol(name, 0, None), 65, 128).bounded(graph)
    (part,) = build(whole(graph), CUDA).parts
    assert [n.op for n in part.kept if n.op == "div"] == ["div"]
