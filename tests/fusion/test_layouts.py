"""Images whose channels are turned to the front: computed as they lie, with the interpreter's results."""
from __future__ import annotations

import numpy as np
import pytest

from tests.ir_graphs import random_inputs
from tf_stitch.fusion.layouts import keep_channels_last
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.ir.verify import verify

FRONT, BACK = (0, 3, 1, 2), (0, 2, 3, 1)


def conv(b: Builder, x: Node, depth: int, name: str) -> Node:
    """A convolution channels first, as one of channels last between turns."""
    w = b.param((3, 3, x.shape[1], depth), "float32", name)
    return b.transpose(b.conv(b.transpose(x, BACK), w, (1, 1), ((1, 1), (1, 1))), FRONT)


def each(b: Builder, v: Node, like: Node) -> Node:
    """A value for each channel, everywhere."""
    return b.broadcast_to(b.reshape(v, (1, like.shape[1], 1, 1)), like.shape)


def normalised(b: Builder, x: Node) -> Node:
    mean = b.ew("mul", b.reduce("sum", x, (0, 2, 3)), 0.01)
    d = b.ew("sub", x, each(b, mean, x))
    return b.ew("mul", d, each(b, b.ew("rsqrt", b.ew("add", b.reduce("sum", b.ew("mul", d, d), (0, 2, 3)), 1.0)), x))


def step(batch=None) -> Graph:
    """A residual block and what a training step sums of it."""
    b = Builder()
    x = b.transpose(b.param((batch, 6, 5, 4), "float32", "image"), FRONT)
    y = b.ew("max", normalised(b, conv(b, x, 4, "one")), 0.0)
    z = b.ew("add", normalised(b, conv(b, y, 4, "two")), x)
    where = b.ew("select", b.ew("gt", z, 0.0), z, b.broadcast_to(b.const(0.5, "float32"), z.shape))
    return b.finish([b.transpose(where, BACK), b.reduce("max", z, (1,)), b.reduce("sum", z, (2, 3)),
                     b.reduce("sum", b.cast(z, "float64"), (0, 1, 2, 3))], "step")


def moved(batch=None) -> Graph:
    """Channels joined, borders added and left out."""
    b = Builder()
    x = conv(b, b.transpose(b.param((batch, 6, 5, 4), "float32", "image"), FRONT), 3, "one")
    y = b.pad(x, (0, 0, 1, 2), (0, 1, 0, 1), 7.0)
    y = b.slice(b.concat([y, b.ew("neg", y)], 1), (0, 1, 2, 0), (y.shape[0], 6, 5, 4), (1, 1, 1, 2))
    return b.finish([b.transpose(y, BACK)], "moved")


def check(graph: Graph) -> Graph:
    made = keep_channels_last(graph)
    verify(made)
    for size in (1, 3):
        inputs = random_inputs(graph, size, dict.fromkeys(graph.symbols, size))
        for got, want in zip(interp.run(made, inputs), interp.run(graph, inputs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    return made


def turns(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if n.op == "transpose" and n.rank == 4]


@pytest.mark.parametrize("make", [step, moved])
@pytest.mark.parametrize("batch", [None, 2])
def test_nothing_is_turned_between_convolutions(make, batch):
    graph = make(batch)
    assert len(turns(graph)) >= 2 and not turns(check(graph))


def test_results_come_in_the_order_that_is_wanted():
    """They are turned where nothing turns them back; what comes in turned stays so, and what it meets is."""
    b = Builder()
    x = b.transpose(b.param((2, 6, 5, 4), "float32"), FRONT)
    y = conv(b, x, 4, "filter")
    other = b.param((2, 4, 6, 5), "float32")
    rows = b.reduce("sum", y, (3,))
    graph = b.finish([b.ew("tanh", y), b.ew("add", y, other), b.ew("exp", rows)], "turned")
    assert {n.attrs["perm"] for n in turns(check(graph))} == {FRONT}


def test_graphs_without_images_stay():
    """Heads that are turned to the front are nothing that a convolution reads."""
    b = Builder()
    x = b.transpose(b.param((2, 6, 5, 4), "float32"), FRONT)
    graph = b.finish([b.transpose(b.ew("tanh", x), BACK)], "heads")
    assert keep_channels_last(graph) is graph
