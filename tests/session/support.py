"""Small functions to serve, and sessions of them."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tf_stitch
from tf_stitch.serving.dispatcher import THREAD_NAME

NATIVE = tf_stitch.Options(levels=())  # code for this machine only builds faster
WIDTH = 8


def soon(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Waits until something holds; False when it does not in time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def workers() -> int:
    """Threads of sessions that are there."""
    return sum(t.name.startswith(THREAD_NAME) for t in threading.enumerate())


def scaled(factor: float):
    """x -> (tanh(x) * factor + 1) * sigmoid(x), stitched when served."""
    weight = tf.Variable(np.float32(factor))

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")])
    def call(x):
        return {"y": (tf.tanh(x) * weight + 1.0) * tf.sigmoid(x)}

    return call


def want(factor: float, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return (np.tanh(x) * factor + 1.0) / (1.0 + np.exp(-x))


def rows(seed: int, count: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def check(answer, factor: float, x: np.ndarray) -> None:
    np.testing.assert_allclose(answer["y"], want(factor, x), rtol=1e-5, atol=1e-6)


class Gate:
    """A function that blocks until it is opened: requests pile up behind it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

        def wait(x):
            self.entered.release()
            assert self.open.wait(120)
            return x

        @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")])
        def call(x):
            y = tf.numpy_function(wait, [x], tf.float32)
            return {"y": tf.ensure_shape(y, [None, WIDTH]) * 2.0 + 1.0}

        self.function = call

    def arrived(self) -> None:
        assert self.entered.acquire(timeout=60)
