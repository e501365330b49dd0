"""The proof that requests may be joined along a batch: what it accepts is so, and what must be refused is."""
from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir_graphs import SIZES, assert_matches, cases, free_symbols, random_case, random_inputs
from tf_stitch.ir import dims as D
from tf_stitch.ir import separable
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.interp import GuardFailed, run
from tf_stitch.ir.ops import OPS
from tf_stitch.ir.separable import find_batch

RAISED = (IndexError, ZeroDivisionError)


def flat(x: np.ndarray, where: tuple[int, D.Dim], size: int, env: dict[str, int]) -> np.ndarray:
    """An output as [outside, batch, inside]."""
    axis, inner = where
    inside = D.evaluate(inner, env) * int(np.prod(x.shape[axis + 1:], dtype=np.int64))
    return x.reshape(-1 if size * inside else 0, size, inside)


def draw(graph, batch, r: random.Random, count: int):
    """Inputs of ``count`` requests that may be joined, and their sizes along the batch."""
    env = {s: r.choice(SIZES) for s in free_symbols(graph)}
    sizes = [r.choice((0, 1, 1, 2, 3, 5)) for _ in range(count)]
    every = [random_inputs(graph, r.randrange(1 << 30), {**env, batch.symbol: n}, 0.02) for n in sizes]
    for inputs in every:
        for i, axis in enumerate(batch.inputs):
            if axis is None:
                inputs[i] = every[0][i]
    return every, sizes


def join(batch, every):
    return [parts[0] if axis is None else np.concatenate(parts, axis)
            for axis, parts in zip(batch.inputs, zip(*every, strict=True), strict=True)]


def check(case, batch, r: random.Random, count: int) -> bool:
    """Whether the requests drawn could be judged: joined or alone, answers are equal."""
    graph = case.graph
    every, sizes = draw(graph, batch, r, count)
    try:
        alone = [run(graph, inputs) for inputs in every]
        together = run(graph, join(batch, every))
    except GuardFailed:
        return False
    except RAISED:
        with pytest.raises(RAISED):  # then one of them alone raises too
            for inputs in every:
                run(graph, inputs)
        return False
    wanted, got = [], []
    for k, where in enumerate(batch.outputs):
        if where is None:
            wanted.append(alone[0][k])
            got.append(together[k])
            assert all(a[k].tobytes() == alone[0][k].tobytes() for a in alone)
            continue
        parts = [flat(a[k], where, n, graph.bind(x)) for a, n, x in zip(alone, sizes, every, strict=True)]
        whole = flat(together[k], where, sum(sizes), graph.bind(join(batch, every)))
        outside, inside = whole.shape[0], whole.shape[2]
        wanted.append(np.concatenate([p.reshape(outside, -1, inside) for p in parts], 1) if whole.size else whole)
        got.append(whole)
    assert_matches(case, wanted, got)
    return True


@given(cases(symbolic=True), st.randoms(use_true_random=False), st.integers(2, 3))
@settings(max_examples=150, deadline=None)
def test_joined_requests_get_the_answers_of_lone_ones(case, r, count):
    batch = find_batch(case.graph)
    if batch is not None:
        check(case, batch, r, count)


def test_many_random_graphs():
    """A good share is accepted, with every op that has a rule; all that is accepted is right."""
    symbolic = accepted = judged = 0
    ops: set[str] = set()
    for seed in range(2500):
        case = random_case(seed, symbolic=True, steps=seed % 6 + 1)
        symbolic += bool(free_symbols(case.graph))
        batch = find_batch(case.graph)
        if batch is None:
            continue
        accepted += 1
        ops |= {n.op for n in case.graph.nodes()}
        judged += check(case, batch, random.Random(seed), 2)
    assert accepted > symbolic / 4 and judged > accepted / 2
    assert set(separable._RULES) - {"conv", "conv_filter", "window"} <= ops


def test_every_op_is_known():
    assert {n for n, op in OPS.items() if not op.elementwise} == set(separable._RULES) | {"const", "shape_value"}


# --- by hand ---------------------------------------------------------------------------------------------

def batch_of(make, *shapes, dtype="float32"):
    """The batch of what ``make(builder, *params)`` gives; None in a shape is an unknown dim."""
    b = Builder()
    params = [b.param(s, dtype, f"x{i}") for i, s in enumerate(shapes)]
    out = make(b, *params)
    return find_batch(b.finish(list(out) if isinstance(out, tuple) else [out], "by hand"))


def softmax(b, x, axis):
    e = b.ew("exp", b.ew("sub", x, b.reduce("max", x, [axis], True)))
    return b.ew("div", e, b.reduce("sum", e, [axis], True))


def along(b, x, value):
    """A vector of the batch beside the rows of x."""
    return b.ew("add", x, b.reshape(value, (x.shape[0], 1)))


REFUSED = {
    "softmax over the batch": lambda b, x: softmax(b, x, 0),
    "centred by the batch": lambda b, x: b.ew("sub", x, b.reduce("sum", x, [0], True)),
    "running sum": lambda b, x: b.scan("sum", x, 0, False, False),
    "reversed": lambda b, x: b.reverse(x, [0]),
    "padded": lambda b, x: b.pad(x, (1, 0), (0, 0)),
    "position in the batch": lambda b, x: b.ew("add", x, b.iota(x.shape, 0, "float32")),
    "the size as a number": lambda b, x: b.ew("mul", x, b.cast(b.shape_value([x.shape[0]], (), "int32"), "float32")),
    "mean over the batch": lambda b, x: b.ew("div", b.reduce("sum", x, [0]), b.cast(
        b.shape_value([x.shape[0]], (), "int32"), "float32")),
    "first row": lambda b, x: b.slice(x, (0, 0), (1, 4)),
    "largest row": lambda b, x: b.arg_reduce("max", x, 0, "int32"),
    "each with each": lambda b, x: b.dot(x, x, ((), ()), ((1,), (1,))),
    "gram matrix": lambda b, x: b.dot(x, x, ((), ()), ((0,), (0,))),
    "rows by computed indices": lambda b, x: b.gather(x, b.cast(b.reduce("sum", x, [1]), "int32"), 0, 0, "clip"),
    "elements taken out of their rows": lambda b, x: softmax(b, b.reshape(x, (4, x.shape[0])), 0),
    "twice as long": lambda b, x: b.ew("add", b.reshape(b.concat([x, x], 0), (x.shape[0], 2, 4)), 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    assert batch_of(REFUSED[name], (None, 4)) is None


def test_a_square_of_the_batch_is_refused():
    b = Builder()
    x = b.param([None, None], "float32", "x")
    b.same_dim(x.shape[0], x.shape[1], "square")
    assert find_batch(b.finish([b.ew("exp", x)], "square")) is None


ACCEPTED = {
    "rows": (lambda b, x: softmax(b, x, 1), (0,), ((0, 1),)),
    "two batches and back": (lambda b, x: b.slice(b.ew("exp", b.concat([x, x], 0)), (x.shape[0], 0), x.shape),
                             (0,), ((0, 1),)),
    "positions in a row": (lambda b, x: b.ew("add", x, b.iota(x.shape, 1, "float32")), (0,), ((0, 1),)),
    "zeros of its size": (lambda b, x: b.concat([x, b.broadcast_to(b.const(0.0, "float32"), x.shape)], 1),
                          (0,), ((0, 1),)),
    "flattened": (lambda b, x: b.reshape(x, (x.shape[0] * 4,)), (0,), ((0, 4),)),
    "turned": (lambda b, x: b.transpose(softmax(b, x, 1), (1, 0)), (0,), ((1, 1),)),
    "beside a constant": (lambda b, x: (b.ew("neg", x), b.const(2.0, "float32")), (0,), ((0, 1), None)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    make, inputs, outputs = ACCEPTED[name]
    batch = batch_of(make, (None, 4))
    assert batch is not None and (batch.inputs, batch.outputs) == (inputs, outputs)


def test_weights_are_shared():
    def layer(b, x, w):
        return b.dot(x, w, ((), ()), ((1,), (0,)))

    assert batch_of(layer, (None, 4), (4, 8)).inputs == (0, None)
    assert batch_of(layer, (None, 4), (4, None)).inputs == (0, None)  # rather than along the columns


def test_the_outermost_of_several():
    batch = batch_of(lambda b, x: b.ew("exp", x), (None, None, 4))
    assert batch.inputs == (0,) and batch.outputs == ((0, 1),)


def test_an_image_stays_whole():
    def convolution(b, x):
        w = b.const(np.ones((3, 3, 2, 4), np.float32), "float32")
        return b.conv(x, w, strides=(1, 1), padding=((1, 1), (1, 1)), dilations=(1, 1), groups=1)

    assert batch_of(convolution, (None, 8, 8, 2)).inputs == (0,)
    assert batch_of(convolution, (2, None, 8, 2)) is None
    assert batch_of(lambda b, x: b.conv_filter(x, x, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), (None, 8, 8, 2)) is None
