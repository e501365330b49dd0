"""Assertions of a function as one op, in graphs for a GPU: what holds, what fails and how, what must not move."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.ways_in.test_direct_call import count  # noqa: F401 (a fixture)
from tf_stitch import compiler, direct_call, rewrites
from tf_stitch.graph import devices, guards, rewriter
from tf_stitch.graph.view import GraphView
from tf_stitch.options import Options

check = tf.debugging


@pytest.fixture
def graphs(monkeypatch):
    """The graphs for a GPU that functions get; all runs on the CPU, so programs run their fallbacks."""
    found: list = []

    def offer(name, options, graph):
        found.append(graph)

    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
    monkeypatch.setattr(compiler, "compile_texts", lambda texts, *args, **kwargs: {t: {} for t in texts})
    monkeypatch.setattr(direct_call, "offer", offer)
    tf_stitch.enable(Options(target="cuda:sm_90"))
    yield found
    tf_stitch.disable()


def ops(graph) -> list[str]:
    return [n.op for n in graph.node]


def checked(x, y):
    """Two assertions about data, one about sizes; what they show and what is computed have values in common."""
    n = tf.shape(x)[0]
    check.assert_equal(n, tf.shape(y)[0], message="as many of both")
    check.assert_less(y, 10, message="small labels")
    check.assert_non_negative(tf.exp(x) - 1.0, message="positive scores")
    z = tf.nn.softmax(x * 2.0 + 1.0)
    return z * tf.reduce_sum(tf.cast(y, tf.float32)), tf.reduce_sum(z, 0)


SIGNATURE = [tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32)]


def test_assertions_are_one_op(graphs):
    f, plain = (tf.function(checked, input_signature=SIGNATURE) for _ in range(2))
    x, y = np.random.default_rng(0).uniform(0, 1, (6, 4)).astype(np.float32), np.arange(6, dtype=np.int32)
    got = f(x, y)
    found = ops(graphs[-1])
    assert found.count(guards.OP) == 1 and found.count("StitchedProgram") == 1
    assert not {"Switch", "Merge", "Assert", "LogicalAnd", "LessEqual"} & set(found)
    tf_stitch.disable()
    for a, b in zip(got, plain(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("case", ["labels", "scores", "sizes", "two"])
def test_what_fails_raises_tensorflows_error(graphs, case):
    x, y = np.full((3, 4), 0.5, np.float32), np.array([1, 2, 3], np.int32)
    bad = {"labels": (x, y * 7), "scores": (-x, y), "sizes": (x, y[:2]), "two": (-x, y * 7)}[case]
    f = tf.function(checked, input_signature=SIGNATURE)
    f(x, y)
    assert guards.OP in ops(graphs[-1])
    with pytest.raises(tf.errors.InvalidArgumentError) as stitched:
        f(*bad)
    tf_stitch.disable()
    with pytest.raises(tf.errors.InvalidArgumentError) as plain:
        tf.function(checked, input_signature=SIGNATURE)(*bad)
    said = [[text for text in ("small labels", "positive scores", "as many of both") if text in str(e.value)]
            for e in (stitched, plain)]
    assert said[0] and (case == "two" or said[0] == said[1]), f"{stitched.value} where TensorFlow says {plain.value}"


def test_nothing_is_written_where_an_assertion_fails(graphs):
    v = tf.Variable(1.0)

    @tf.function(input_signature=[tf.TensorSpec([3])])
    def step(x):
        with tf.control_dependencies([check.assert_positive(x), check.assert_less(x, 5.0)]):
            v.assign_add(tf.reduce_sum(tf.exp(x) * 2.0))
        return tf.tanh(x) + v

    step(np.ones(3, np.float32))
    assert ops(graphs[-1]).count(guards.OP) == 1 and "Assert" not in ops(graphs[-1])
    value = v.numpy()
    assert value == pytest.approx(1 + 6 * np.e, rel=1e-5)
    for bad in (-1.0, 7.0):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(np.full(3, bad, np.float32))
    assert v.numpy() == value


def test_an_assertion_about_what_a_write_gave_stays_behind_it(graphs):
    """It reads what waits for the first one: they cannot be checked at one time."""
    v = tf.Variable(1.0)

    @tf.function(input_signature=[tf.TensorSpec([3])])
    def step(x):
        with tf.control_dependencies([check.assert_positive(x)]):
            y = v.assign_add(tf.reduce_sum(tf.exp(x) * 2.0))
        check.assert_less(y + 1.0, 100.0)
        return y * 2.0

    assert step(np.ones(3, np.float32)).numpy() == pytest.approx(2 + 12 * np.e, rel=1e-5)
    assert ops(graphs[-1]).count(guards.OP) == 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(np.full(3, -1.0, np.float32))
    assert v.numpy() == pytest.approx(1 + 6 * np.e, rel=1e-5)  # the first assertion was in front of the write
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(np.full(3, 4.0, np.float32))
    assert v.numpy() > 300  # the second one behind it


def test_assertions_in_loops_and_branches_stay(graphs):
    @tf.function(input_signature=[tf.TensorSpec([3]), tf.TensorSpec([], tf.int32)])
    def f(x, n):
        for _ in tf.range(n):
            check.assert_less(x, 50.0)
            x = tf.exp(x * 0.1) + 1.0
        return x * 2.0

    f(np.ones(3, np.float32), 4)
    assert guards.OP not in ops(graphs[-1])
    with pytest.raises(tf.errors.InvalidArgumentError):
        f(np.full(3, 60.0, np.float32), 1)


def test_replays_decline_where_an_assertion_fails(count, monkeypatch):  # noqa: F811
    """With programs for the host, in a graph as a GPU has it: the function is called only to raise the error."""
    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
    place, edited = rewriter._place, []

    def edited_as_for_a_gpu(*args, **kwargs):
        edited.append(True)
        try:
            return place(*args, **kwargs)
        finally:
            edited.pop()

    monkeypatch.setattr(Options, "on_gpu", property(lambda options: bool(edited)))
    monkeypatch.setattr(rewriter, "_place", edited_as_for_a_gpu)
    monkeypatch.setattr(rewrites, "remembered", lambda graph, options, more, make: make())
    def step(x, y):
        check.assert_positive(x)
        check.assert_less(y, 10, message="small labels")
        return tf.tanh(x) * tf.cast(y, tf.float32) + 1.0

    f = tf_stitch.function(step)
    x, y = tf.constant([1.0, 2.0, 3.0]), tf.constant([1, 2, 3])
    for _ in range(5):
        np.testing.assert_allclose(f(x, y), np.tanh(x) * y.numpy() + 1, rtol=1e-6)
    assert (count.replayed, count.declined) == (3, 0)
    for bad in ((x, y * 9), (-x, y)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="small labels" if bad[0] is x else "x > 0"):
            f(*bad)
    assert (count.replayed, count.declined) == (3, 2)
    np.testing.assert_allclose(f(x, y), np.tanh(x) * y.numpy() + 1, rtol=1e-6)
    assert count.replayed == 4


def test_sizes_shown_are_found_however_many_ways_lead_to_them():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.int32, [None])
        data, size = x, tf.size(x)
        for _ in range(64):  # 2 ** 64 paths
            data, size = data + data, size + size
    view, found = GraphView(graph.as_graph_def()), {}
    guards._find_copies(view, [data.op.name, size.op.name], found)
    assert sum(n.op == "AddV2" for n in found.values()) == 64 and sum(n.op == "Size" for n in found.values()) == 1
    assert size.op.name in found and not {data.op.name, x.op.name} & found.keys()
