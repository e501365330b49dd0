"""Random numbers that follow from a seed on a GPU: those of TensorFlow's CPU, and training steps that use them."""
from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.op.calls import counted

pytestmark = pytest.mark.gpu
layers = keras.layers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_numbers_are_those_of_the_cpu(dtype):
    def draw(seed, x):
        shape = tf.shape(x)
        return (tf.random.stateless_uniform(shape, seed, dtype=dtype),
                tf.random.stateless_normal(shape, seed, dtype=dtype),
                tf.random.stateless_uniform(shape, seed, -9, 1000, dtype=tf.int32))

    f = tf_stitch.function(draw, autograph=False, input_signature=[
        tf.TensorSpec([2], tf.int64), tf.TensorSpec([None, None], dtype)])
    for seed, shape in (((1, 2), (5, 7)), ((-3, 2**40), (128, 1025)), ((0, 0), (1, 1))):
        args = tf.constant(seed, tf.int64), tf.zeros(shape, dtype)
        with tf.device("/CPU:0"):
            want = [t.numpy() for t in draw(*args)]
        got, ran, fell_back = counted(lambda a=args: f(*a))
        assert (ran, fell_back) == (1, 0)
        np.testing.assert_array_equal(got[0].numpy(), want[0])
        np.testing.assert_array_equal(got[2].numpy(), want[2])
        np.testing.assert_allclose(got[1].numpy().astype(float), want[1].astype(float), rtol=0,
                                   atol={"float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 1e-5))


def solid():
    return keras.Sequential([keras.Input((8, 10, 6, 2)), layers.Conv3D(4, 3, padding="same"), layers.MaxPooling3D(2),
                             layers.Conv3D(4, 2), layers.AveragePooling3D(2, padding="same"), layers.Flatten(),
                             layers.Dropout(0.3), layers.Dense(3)])


def resized():
    return keras.Sequential([keras.Input((9, 12, 3)), layers.Conv2D(6, 3, 2, padding="same"),
                             layers.UpSampling2D(2, interpolation="bilinear"), layers.Conv2D(4, 3), layers.Dropout(0.2),
                             layers.Resizing(13, 7, interpolation="nearest"), layers.Conv2D(4, 3),
                             layers.GaussianNoise(0.1), layers.GlobalAveragePooling2D(), layers.Dense(3)])


def normalised():
    """Sums over the images of a small batch in pieces."""
    return keras.Sequential([keras.Input((28, 28, 3)), layers.Conv2D(16, 3, padding="same", use_bias=False),
                             layers.BatchNormalization(), layers.ReLU(), layers.SpatialDropout2D(0.2),
                             layers.MaxPooling2D(), layers.Conv2D(24, 3, padding="same", use_bias=False),
                             layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(3, 2, padding="same"),
                             layers.GlobalAveragePooling2D(), layers.Dense(3)])


@pytest.mark.parametrize("build", [solid, resized, normalised])
@pytest.mark.parametrize("batch", [3, 16])
def test_training_steps(build, batch):
    """Weights after some steps, and the masks' seeds, are those of TensorFlow's CPU."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    rng = np.random.default_rng(batch)
    weights = []
    for device in ("/CPU:0", "/GPU:0"):
        with tf.device(device):
            keras.utils.set_random_seed(0)
            model = build()
            optimizer = keras.optimizers.SGD(0.05)
            optimizer.build(model.trainable_variables)
            rng = np.random.default_rng(batch)
            x = tf.constant(rng.standard_normal((batch, *model.input_shape[1:]), np.float32))

            def step(x, model=model, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
                optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                              strict=True))
                return loss

            if device == "/CPU:0":
                f = tf.function(step, autograph=False)
                for _ in range(4):
                    f(x)
            else:
                f = tf_stitch.function(step, autograph=False)
                for _ in range(4):
                    _, ran, fell_back = counted(lambda f=f, x=x: f(x))
                    assert (ran, fell_back) == (1, 0)
            weights.append([v.numpy().astype(np.float64) for v in model.variables])
    tf.config.experimental.enable_tensor_float_32_execution(True)
    for want, got in zip(*weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * max(1.0, np.abs(want).max()))
