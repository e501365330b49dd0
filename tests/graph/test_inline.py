"""Functions that XLA was to compile, in the place of their calls where they can be stitched."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import run_graph, v1
from tf_stitch.graph.rewriter import rewrite
from tf_stitch.options import Options

X = np.random.default_rng(0).normal(0, 1, (3, 4)).astype(np.float32)
GPU = Options(target="cuda:sm_90", keep=("y",))


def built(model) -> v1.GraphDef:
    graph = tf.Graph()
    with graph.as_default():
        tf.identity(model(v1.placeholder(tf.float32, [None, 4], "x")), "y")
    return graph.as_graph_def()


def calls(graph) -> int:
    return sum(n.op in ("PartitionedCall", "StatefulPartitionedCall") for n in graph.node)


def test_it_joins_what_is_around_it():
    @tf.function(jit_compile=True)
    def hot(x, w):
        read = tf.raw_ops.ReadVariableOp(resource=w, dtype=tf.float32)
        return tf.nn.softmax(tf.matmul(x, read)) * x, tf.reduce_sum(x, 1, keepdims=True)

    def model(x):
        w = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4, 4], shared_name="w")
        tf.raw_ops.AssignVariableOp(resource=w, value=np.eye(4, dtype=np.float32) * 2, name="init")
        y, total = hot(tf.tanh(x) * 2.0, w)
        again, _ = hot(y, w)
        return again + total * y

    graph = built(model)
    names = [n.name for n in graph.node if n.op == "StatefulPartitionedCall"]
    out, report = rewrite(graph, GPU, keep_ends=False, run=names)
    assert calls(graph) == 2 and calls(out) == 0 and len(report.clusters) == 1
    assert [n.op for n in out.node if n.name in names] == ["NoOp", "NoOp"]
    np.testing.assert_allclose(run_graph(out, X), run_graph(graph, X), rtol=1e-5)


@pytest.mark.parametrize("cold", [
    lambda x: x + tf.random.uniform([4]),
    lambda x: tf.linalg.cholesky(tf.matmul(x, x, transpose_b=True) + 10.0 * tf.eye(tf.shape(x)[0])),
])
def test_what_cannot_be_stitched_stays_xla_s(cold):
    graph = built(lambda x: tf.exp(tf.reduce_sum(tf.function(cold, jit_compile=True)(tf.tanh(x) * 2.0), 1)) * 2.0)
    out, _ = rewrite(graph, GPU, keep_ends=False)
    assert calls(graph) == calls(out) == 1


def test_on_a_cpu_and_where_it_is_fetched_it_stays():
    graph = built(lambda x: tf.function(lambda v: tf.exp(v) * 2.0, jit_compile=True)(x) + 1.0)
    (name,) = (n.name for n in graph.node if n.op == "PartitionedCall")
    for options in (Options(target="host", keep=("y",)), Options(target="cuda:sm_90", keep=("y", name))):
        assert calls(rewrite(graph, options, keep_ends=False)[0]) == 1
