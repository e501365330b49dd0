"""Reads of many variables as one op give what each of them gives."""
from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

import tf_stitch
from tests.ways_in.graphs import normal
from tf_stitch.graph import reads

from .test_updates import both

COUNT = 12
X = tf.constant([1.0, -2.0, 3.0])


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that executors run; none is replayed without one."""
    made: list[graph_pb2.GraphDef] = []
    join = reads.read_together

    def spy(*args):
        made.append(join(*args))
        return made[-1]

    monkeypatch.setattr(reads, "read_together", spy)
    monkeypatch.setenv("TF_STITCH_DIRECT_CALLS", "0")
    return made


def sizes(graphs) -> list[int]:
    """How many reads each of the ops in the last graph is."""
    return sorted(n.attr["N"].i for n in graphs[-1].node if n.op == reads.OP)


def variables(dtype: tf.DType = tf.float32) -> list[tf.Variable]:
    return [tf.Variable(tf.cast(normal(3, seed=k) * 4, dtype)) for k in range(COUNT)]


def test_a_training_step(graphs):
    def make():
        vs = variables()

        def step(x):
            for v in vs:
                v.assign_add(tf.tanh(v * x))
            return tf.add_n([v * 2 for v in vs])

        return step, vs

    both(make, (X,), (-X,), (X,))
    assert sizes(graphs) == [COUNT] and not any(n.op == "ReadVariableOp" for n in graphs[-1].node)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16, tf.int64, tf.uint8, tf.bool],
                         ids=lambda t: t.name)
def test_types(graphs, dtype):
    def make():
        vs, others = variables(dtype), variables()
        return lambda x: tf.add_n([tf.exp(x) * tf.cast(v, tf.float32) + o
                                   for v, o in zip(vs, others, strict=True)]), [*others]

    both(make, (X,), (-X,))
    assert sizes(graphs) == [2 * COUNT]


def test_integers_of_the_host_stay(graphs):
    def make():
        vs, others = variables(tf.int32), variables()
        return lambda x: tf.add_n([tf.exp(x) * tf.cast(v, tf.float32) + o
                                   for v, o in zip(vs, others, strict=True)]), [*others]

    both(make, (X,), (-X,))
    assert sizes(graphs) == [COUNT]


def test_reads_before_and_after_a_write_are_apart(graphs):
    def make():
        vs = variables()

        def step(x):
            before = tf.add_n([tf.tanh(v * x) for v in vs])
            for v in vs:
                v.scatter_add(tf.IndexedSlices(x[:1], tf.constant([1])))
            return before, tf.add_n([tf.tanh(v * x) for v in vs])

        return step, vs

    both(make, (X,), (-X,), (X,))
    assert sizes(graphs) == [COUNT]  # each of the others waits for a write of its own


def test_what_is_read_of_sparsely_updated_variables_are_copies(graphs):
    vs = variables()
    vs[3].scatter_add(tf.IndexedSlices(tf.constant([1.0]), [1]))  # from now on, it is written to in place
    before = [v.numpy() for v in vs]

    @tf_stitch.function
    def read(x):
        return [v.read_value() for v in vs], tf.exp(x) * vs[0] + 1

    got, _ = read(X)
    assert sizes(graphs) == [COUNT]
    for v in vs:
        v.scatter_add(tf.IndexedSlices(tf.constant([1.0]), [1]))
        v.assign_add(tf.ones(3))
    for g, b in zip(got, before, strict=True):
        np.testing.assert_array_equal(g, b)


def test_an_uninitialized_variable_is_tensorflows_error(graphs):
    missing = UninitializedVariable(shape=[3], dtype=tf.float32, name="not_there")
    vs = [*variables(), missing]

    def fn(x):
        return tf.add_n([tf.exp(x) * v + 1 for v in vs])

    stitched = tf_stitch.function(fn)
    for f in (tf.function(fn), stitched):
        with pytest.raises((tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)):
            f(X)
    assert sizes(graphs) == [COUNT + 1]
    missing.assign([1.0, 2.0, 3.0])
    np.testing.assert_allclose(stitched(X), tf.function(fn)(X), rtol=1e-6)


def test_few_reads_stay(graphs):
    vs = variables()[:reads.FEWEST - 1]
    f = tf_stitch.function(lambda x: tf.add_n([tf.exp(x) * v + 1 for v in vs]))
    f(X)
    assert sizes(graphs) == []


def test_values_are_whole_while_others_write(graphs):
    vs = [tf.Variable(tf.zeros([256])) for _ in range(COUNT)]
    f = tf_stitch.function(lambda x: [v * 2 + x for v in vs])
    x, stop = tf.zeros([256]), threading.Event()
    f(x)

    def write():
        k = 0.0
        while not stop.is_set():
            k += 1
            for v in vs:
                v.assign(tf.fill([256], k))

    thread = threading.Thread(target=write)
    thread.start()
    results = [f(x) for _ in range(200)]
    stop.set()
    thread.join()
    assert sizes(graphs) == [COUNT]
    for values in results:
        for value in values:
            assert len(np.unique(value)) == 1


def test_nodes_that_must_be_there_are_there():
    """Those that only have to run become nodes that wait for the reads."""
    vs = variables()

    @tf.function
    def f():
        return tf.add_n([v.read_value() for v in vs])

    graph = f.get_concrete_function().graph.as_graph_def()
    for n in graph.node:
        if n.op == "Placeholder":
            n.op = "_Arg"
            n.attr["T"].CopyFrom(n.attr["dtype"])
            del n.attr["dtype"]
    names = [n.name for n in graph.node if n.op == "ReadVariableOp"]
    out = reads.read_together(graph, [names[0], f"^{names[1]}"])
    nodes = {n.name: n for n in out.node}
    joined, = (n for n in out.node if n.op == reads.OP)
    assert nodes[names[0]].op == "ReadVariableOp" and joined.attr["N"].i == COUNT - 1
    assert nodes[names[1]].op == "NoOp" and list(nodes[names[1]].input) == [f"^{joined.name}"]
    assert not set(names[2:]) & nodes.keys()


def test_keras_fit(graphs):
    keras = tf.keras

    def fitted(stitched: bool):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
        rng = np.random.default_rng(0)
        data = rng.standard_normal((64, 8), np.float32), rng.standard_normal((64, 4), np.float32)
        if stitched:
            tf_stitch.enable()
        try:
            history = model.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        finally:
            tf_stitch.disable()
        return [np.asarray(history), *model.get_weights()]

    for got, want in zip(fitted(True), fitted(False), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert any(n.op == reads.OP for g in graphs for n in g.node)
