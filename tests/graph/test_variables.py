"""Variables that a graph only reads are read once."""
from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.ways_in.graphs import build, stitched
from tf_stitch.graph import variables
from tf_stitch.graph.rewriter import rewrite
from tf_stitch.graph.view import GraphView
from tf_stitch.options import Options


def reads(graph) -> list[str]:
    return [n.name for n in graph.node if n.op == "ReadVariableOp"]


def handle():
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4], shared_name="v")


def read(h, name):
    return tf.raw_ops.ReadVariableOp(resource=h, dtype=tf.float32, name=name)


def test_reads_of_one_variable_become_one():
    def model():
        h = handle()
        tf.exp(read(h, "first") * read(h, "second") + read(h, "third"), name="y")

    graph = build(model)
    assert reads(variables.merge_reads(graph, GraphView(graph))) == ["first"]
    assert reads(variables.merge_reads(graph, GraphView(graph), keep=["third"])) == ["first", "third"]
    merged = variables.merge_reads(graph, GraphView(graph), run=["third"])
    assert reads(merged) == ["first"] and [(n.op, list(n.input)) for n in merged.node if n.name == "third"] == [
        ("NoOp", ["^first"])]
    out, _ = rewrite(graph, Options())
    (node,) = stitched(out)
    assert list(node.input) == ["first"]


def test_reads_around_a_write_stay():
    def model():
        h = handle()
        first = read(h, "first")
        with tf.control_dependencies([first]):
            write = tf.raw_ops.AssignVariableOp(resource=h, value=first + 1.0)
        with tf.control_dependencies([write]):
            second = read(h, "second")
        tf.add(first, second * 2.0, name="y")

    graph = build(model)
    assert variables.merge_reads(graph, GraphView(graph)) is graph


def test_reads_that_wait_for_other_nodes_stay():
    """The first read may wait for what the second one leads to."""
    def model():
        h = handle()
        second = read(h, "second")
        with tf.control_dependencies([tf.exp(second, name="late")]):
            tf.add(read(h, "first"), second, name="y")

    graph = build(model)
    assert reads(variables.merge_reads(graph, GraphView(graph))) == ["second", "first"]


def test_a_function_with_many_reads_gives_the_same_numbers():
    import tf_stitch

    v = tf.Variable(tf.random.stateless_normal([8, 8], [1, 2]))

    def steps(x):
        for _ in range(6):
            x = tf.tanh(tf.matmul(x, v) + v[0])
        return x

    x = tf.random.stateless_normal([3, 8], [3, 4])
    got = tf_stitch.function(steps)
    np.testing.assert_allclose(got(x), tf.function(steps)(x), rtol=1e-5, atol=1e-6)
    v.assign(v * 2.0)
    np.testing.assert_allclose(got(x), tf.function(steps)(x), rtol=1e-5, atol=1e-6)
