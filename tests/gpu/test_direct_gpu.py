"""Replays on an NVIDIA GPU: where arguments, variables and results lie."""
from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.ways_in.graphs import normal
from tests.ways_in.test_direct_call import check, count, rows  # noqa: F401 (a fixture)

pytestmark = pytest.mark.gpu


def test_integer_arguments_come_from_the_host(count):  # noqa: F811
    table = tf.Variable(normal(50, 16))

    def call(x, i, j):
        return tf.gather(table, i) * x + tf.tanh(tf.gather(table, j)), tf.reduce_sum(tf.gather(table, i) + 1)

    stitched, plain = tf_stitch.function(call), tf.function(call)
    x = tf.constant(normal(16))
    for k in range(6):
        i, j = (tf.constant(np.arange(k + s, k + s + 8, dtype=np.int32)) for s in (0, 20))
        assert "CPU" in i.backing_device and "GPU" in x.backing_device
        check(stitched(x, i, j), plain(x, i, j))
    assert count.replayed == 4


def test_an_argument_on_the_other_device_runs_the_function(count):  # noqa: F811
    f = tf_stitch.function(lambda x: tf.exp(x) * 2 + 1)
    on_gpu = tf.constant(normal(8))
    with tf.device("/CPU:0"):
        on_cpu = tf.identity(on_gpu)
    for _ in range(4):
        f(on_gpu)
    assert count.replayed == 2
    for x in (on_cpu, on_gpu, on_cpu, on_gpu):
        y = f(x)
        np.testing.assert_allclose(y, np.exp(x) * 2 + 1, rtol=1e-5)
        assert "GPU" in y.device
    assert (count.replayed, count.declined) == (4, 2)


def test_integer_results_lie_on_the_host_as_a_functions_do(count):  # noqa: F811
    def call(x):
        values, places = tf.math.top_k(tf.nn.softmax(x), 3)
        return values, places, tf.cast(tf.exp(x) * 2 + 1, tf.int32) * 3

    stitched, plain = tf_stitch.function(call), tf.function(call)
    x = tf.constant(normal(8))
    for _ in range(4):
        for got, want in zip(stitched(x), plain(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
            assert got.backing_device == want.backing_device
    assert (count.replayed, count.declined) == (2, 0)


def test_integers_of_tensorflows_ops_lie_on_the_host_too(count):  # noqa: F811
    def call(x):
        y = tf.nn.softmax(x) * 2 + 1
        return y, tf.cast(tf.where(y > 1.2), tf.int32)

    stitched, plain = tf_stitch.function(call), tf.function(call)
    for k in range(4):
        x = tf.constant(normal(8, seed=k))
        for got, want in zip(stitched(x), plain(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
            assert (got.device, got.backing_device) == (want.device, want.backing_device)
    assert (count.replayed, count.declined) == (2, 0)


def test_results_that_are_arguments(count):  # noqa: F811
    def call(x, i):
        return x, tf.exp(x) * 2 + tf.cast(i, tf.float32), x

    stitched, plain = tf_stitch.function(call), tf.function(call)
    x, i = tf.constant(normal(8)), tf.constant(3)
    for _ in range(5):
        got = stitched(x, i)
        check(got, plain(x, i))
        assert got[0] is not x and got[0].backing_device == x.backing_device
    assert count.replayed == 3


def test_an_argument_on_the_host_is_no_result(count):  # noqa: F811
    stitched, plain = (wrap(lambda x: (x, tf.exp(x) * 2 + 1)) for wrap in (tf_stitch.function, tf.function))
    with tf.device("/CPU:0"):
        x = tf.identity(tf.constant(normal(8)))
    for _ in range(4):
        check(stitched(x), plain(x))
    assert not count.replayed


def test_training_steps(count):  # noqa: F811
    stitched, plain = tf_stitch.function(rows()), tf.function(rows())
    x = tf.constant(normal(3))
    for _ in range(6):
        check(stitched(x), plain(x))
    assert count.replayed == 4


def test_assertions_are_part_of_replays(count):  # noqa: F811
    """Of what lies on the device and on the host; where one fails, the function is called, and says so."""
    v = tf.Variable(1.0)

    def step(x, y):
        checks = [tf.debugging.assert_positive(x), tf.debugging.assert_less(y, 10, message="small labels"),
                  tf.debugging.assert_equal(tf.shape(x)[0], tf.size(y))]
        with tf.control_dependencies(checks):
            v.assign_add(tf.reduce_sum(tf.exp(x) * 2.0))
        return tf.tanh(x) * tf.reduce_sum(tf.cast(y, tf.float32)) + 1.0

    f = tf_stitch.function(step)
    x, y = tf.constant(np.arange(1, 9, dtype=np.float32)), tf.constant(np.arange(8, dtype=np.int32))
    for _ in range(5):
        np.testing.assert_allclose(f(x, y), np.tanh(x) * 28 + 1, rtol=1e-5)
    assert (count.replayed, count.declined) == (3, 0)
    value = v.numpy()
    for bad, said in (((x, y * 9), "small labels"), ((-x, y), "x > 0")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=said):
            f(*bad)
        assert v.numpy() == value
    np.testing.assert_allclose(f(x, y), np.tanh(x) * 28 + 1, rtol=1e-5)
    assert count.replayed == 4


def test_threads_and_results_in_flight(count):  # noqa: F811
    v = tf.Variable(tf.ones([4096]))
    f = tf_stitch.function(lambda x: tf.exp(x) * v + 1)
    xs = [tf.fill([4096], float(k)) for k in range(8)]
    for x in xs[:3]:
        f(x)
    wrong = []

    def work(x, value):
        results = [f(x) for _ in range(200)]
        if any(not np.allclose(r, np.exp(value) + 1, rtol=1e-5) for r in results):
            wrong.append(value)

    threads = [threading.Thread(target=work, args=(x, float(k))) for k, x in enumerate(xs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and count.replayed >= 1600
