"""Loops on an NVIDIA GPU: those that are written out, and those whose number of turns is not known."""
from __future__ import annotations

import pytest
import tensorflow as tf

import tf_stitch
from tests.gpu.test_op_gpu import exact_float32  # noqa: F401 (a fixture)
from tests.graph.test_loops import (  # noqa: F401 (fixtures)
    both,
    is_straight,
    ops,
    scan,
    switched_off,
    turns_of,
    unknown_batch,
    x_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_a_known_number_of_steps(ops, batch):  # noqa: F811
    both(scan, x_of(batch, 6, 4), signature=unknown_batch(6, 4))
    assert is_straight(ops)


@pytest.mark.parametrize("layer", ["ConvLSTM1D", "RNN"])
def test_recurrent_layers(ops, layer):  # noqa: F811
    keras = tf.keras
    inner = keras.Input((5, 8, 3) if layer == "ConvLSTM1D" else (5, 3))
    cell = keras.layers.ConvLSTM1D(4, 3) if layer == "ConvLSTM1D" else keras.layers.RNN(keras.layers.LSTMCell(4))
    model = keras.Model(inner, cell(inner))
    both(lambda x: model(x), x_of(2, *inner.shape[1:]), signature=unknown_batch(*inner.shape[1:]))
    assert is_straight(ops)


def test_gradients(ops):  # noqa: F811
    weight = tf.Variable(x_of(4, 4) * 0.3)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(scan(x @ weight)[2] ** 2)
        return loss, tape.gradient(loss, [x, weight])

    both(step, x_of(3, 4, 4))
    assert is_straight(ops)


@pytest.mark.parametrize("most", [0, 2, 5])
def test_an_unknown_number_of_turns(most):
    for n in (0, 1, 2, 4, 7):
        both(lambda x, n, m: turns_of(x, n, m), x_of(3, 4), tf.constant(n), tf.constant(most))


def test_no_turn_computes_its_condition_on_the_device():
    """Both comparisons of a loop over unknown steps are one, which TensorFlow computes on the host."""
    signature = [tf.TensorSpec([None, 3])]
    for steps in (1, 4, 9):
        both(lambda x: tf.scan(lambda a, s: tf.tanh(a) * 2.0 + s, x), x_of(steps, 3), signature=signature)
    report = tf_stitch.reports()[-1][1]
    stitched = [op for graph in report.graphs for c in graph.clusters for _, op in c.nodes]
    left = [x.op for graph in report.graphs for x in graph.left]
    assert "Less" not in stitched and "LogicalAnd" not in stitched and "LogicalAnd" not in left
