"""Training steps on an NVIDIA GPU: variables whose new values are computed in programs."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.gpu.test_op_gpu import exact_float32  # noqa: F401 (a fixture)
from tests.graph import test_branches as branches
from tests.graph import test_optimizers as optimizers
from tests.graph.conftest import graphs  # noqa: F401 (a fixture)
from tests.graph.test_updates import (
    adam,
    assign,
    both,
    check_threads_at_once,
    commits,
    ops,
    variable,
)
from tests.ways_in.graphs import normal
from tests.ways_in.test_direct_call import count  # noqa: F401 (a fixture)

pytestmark = pytest.mark.gpu
DTYPES = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int64]
X = tf.constant([1.0, -2.0, 3.0])


def test_a_training_step_is_replayed_as_one_program_and_one_write(graphs, count):  # noqa: F811
    both(adam, *[(X * k,) for k in range(1, 8)])
    assert [n.attr["N"].i for n in commits(graphs)] == [4] and "GPU" in commits(graphs)[0].device
    assert "AssignAddVariableOp" not in ops(graphs)
    assert count.replayed >= 4 and not count.declined


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.name)
def test_every_type(dtype):
    def make():
        v = variable(1, 2, 3, dtype=dtype)

        def fn(x):
            v.assign_add(x * x + 1)
            v_now = v.read_value()
            return v_now * 2 + x

        return fn, [v]

    x = tf.constant([1, 2, 3], dtype)
    both(make, (x,), (x,), (x,), (x,))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("write", [
    lambda v: v.assign_add(tf.constant([10, 10, 10], v.dtype)),
    lambda v: v.assign(tf.constant([11, 12, 13], v.dtype)),
    lambda v: v.scatter_add(tf.IndexedSlices(tf.constant([10, 10, 10], v.dtype), [0, 1, 2]))])
def test_a_write_since_the_read_is_not_lost(write, dtype):
    v = variable(1, 2, 3, dtype=dtype)
    read = v.read_value()
    write(v)
    assign([v], [read], [read + 1], [0])
    np.testing.assert_array_equal(tf.cast(v, tf.float64), [12, 13, 14])
    np.testing.assert_array_equal(tf.cast(read, tf.float64), [1, 2, 3])


@pytest.mark.parametrize("make", [branches.left_out, branches.nested, branches.reads_between_writes,
                                  branches.values_that_nobody_takes, branches.two_in_a_row])
def test_branches_are_written_out(graphs, make):  # noqa: F811
    branches.both_ways(make)
    assert branches.is_written_out(graphs)


def test_a_step_with_a_scaled_loss_is_one_program(graphs):  # noqa: F811
    branches.test_keras_scales_losses(graphs)
    assert ops(graphs).count("AssignVariableOp") <= 1  # the count of steps is an integer on the host


@pytest.mark.parametrize("name", ["Momentum, ahead", "CenteredRMSProp", "Adam", "Adadelta"])
def test_optimizers_ops(graphs, name):  # noqa: F811
    optimizers.test_every_op(graphs, name)


def test_no_update_of_threads_that_run_at_once_is_lost():
    check_threads_at_once(4096)


@pytest.mark.usefixtures("exact_float32")
def test_many_steps_of_many_variables():
    """Buffers change hands in every step; graphs and memory must follow."""
    def make():
        weights = [tf.Variable(normal(64, 8 * k, seed=k)) for k in range(1, 9)]
        moments = [tf.Variable(tf.zeros_like(w)) for w in weights]

        def fn(x):
            loss = 0.0
            for w, m in zip(weights, moments, strict=True):
                y = tf.tanh(tf.matmul(x, w))
                loss += tf.reduce_mean(y * y)
                m.assign_add((tf.matmul(x, y, transpose_a=True) - m) * 0.1)
                w.assign_sub(m * 0.01)
            return loss

        return fn, [*weights, *moments]

    x = tf.constant(normal(32, 64) * 0.1)
    both(make, *[(x,)] * 50)


def gradients_of_normalised_images(wrap):
    """Results for several batch sizes, then the averages that batch normalisation keeps."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((12, 12, 3)), layers.Conv2D(8, 3, padding="same", use_bias=False), layers.BatchNormalization(),
        layers.ReLU(), layers.MaxPool2D(), layers.Conv2D(16, 3, 2), layers.LayerNormalization(),
        layers.Activation("gelu"), layers.AveragePooling2D(2), layers.Flatten(), layers.Dense(10)])

    def fn(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        return loss, tape.gradient(loss, model.trainable_variables)

    step = wrap(fn, input_signature=[tf.TensorSpec([None, 12, 12, 3]), tf.TensorSpec([None], tf.int32)])
    got = [step(tf.constant(normal(n, 12, 12, 3, seed=n)), tf.range(n) % 10) for n in (1, 2, 8, 1)]
    return [np.asarray(r) for r in (*tf.nest.flatten(got), *model.non_trainable_variables)]


@pytest.mark.usefixtures("exact_float32")
def test_gradients_of_normalised_images():
    """The layout optimizer turns the images; a batch of one has kernels that keep whole rows."""
    for got, want in zip(*map(gradients_of_normalised_images, (tf_stitch.function, tf.function)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * np.abs(want).max())


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_keras(name):
    from models import training

    plain, stitched = (training.make(name, s) for s in ("tensorflow", "stitched"))
    assert training.error(stitched.weights, plain.weights) < 1e-2
    assert stitched.kernels < plain.kernels / 3
