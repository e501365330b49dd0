"""The short way into a traced function gives what TensorFlow's own way gives."""
from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import namedtuple

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tf_stitch import fast_call

from .graphs import normal, tensor

pytestmark = pytest.mark.usefixtures("switched_off")

Pair = namedtuple("Pair", ["a", "b"])


@pytest.fixture
def short(monkeypatch):
    """Counts the calls that took the short way."""
    count = [0]
    run = fast_call._run

    def counted(*args):
        count[0] += 1
        return run(*args)

    monkeypatch.setattr(fast_call, "_run", counted)
    return count


def same(got, want) -> None:
    """Equal values, types and structures."""
    tf.nest.assert_same_structure(got, want, check_types=True)
    for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert type(g) is type(w)
        if isinstance(w, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
            assert g.dtype == w.dtype and g.shape == w.shape
        if isinstance(w, tf.Tensor):
            np.testing.assert_array_equal(g.numpy(), w.numpy())


VARIABLE = tf.Variable([1.0, 2.0, 3.0])
CAPTURED = tf.constant([0.5, 1.5, 2.5])


def several(x, y, *rest, scale=2.0, flag=True, **more):
    out = {"sum": x + y * scale, "pair": Pair(x, [y, None]), "count": tf.size(x)}
    if flag:
        out["flag"] = tf.exp(x) * 2 + 1
    for k, v in enumerate(rest):
        out[f"rest{k}"] = v * 2
    return {**out, **{k: v - 1 for k, v in more.items()}}


def state(x):
    return VARIABLE * x + CAPTURED


def nested(box):
    return box["b"][0] - box["a"], box["b"][1]


def ragged(x):
    return tf.RaggedTensor.from_row_lengths(x, [1, 2]), tf.sparse.from_dense(x)


def nothing(x):
    VARIABLE.assign_add(tf.zeros_like(VARIABLE) * tf.reduce_sum(x))


def default(x, y=1, *, z=CAPTURED):
    return x * y + z


A, B = tensor(3), tensor(3, seed=1)
CALLS = {
    "one": (lambda x: tf.exp(x) * 2 + 1, (A,), {}, True),
    "two of one tensor": (lambda x, y: x - 2 * y, (A, A), {}, True),
    "keywords": (several, (), {"y": B, "x": A}, True),
    "literals": (several, (A, B), {"scale": 3.0, "flag": False}, True),
    "varargs": (several, (A, B, B, A), {"other": A, "extra": B}, True),
    "variables": (state, (A,), {}, True),
    "nested": (nested, ({"b": (A, "text"), "a": B},), {}, True),
    "empty": (lambda x: x * 2 + 1, (tf.zeros((0, 3)),), {}, True),
    "scalar": (lambda x: x * 2 + 1, (tf.constant(3),), {}, True),
    "string": (lambda x: x, (tf.constant(["a", "b"]),), {}, True),
    "bool, half": (lambda x, y: tf.where(x, y, y * 2), (tf.constant([True, False]), tf.ones(2, tf.float16)), {}, True),
    "numpy": (lambda x, y: x * 2 + y, (normal(3), normal(3, seed=1)), {}, True),
    "numpy float64": (lambda x: x * 2 + 1, (np.arange(3.0),), {}, True),
    "numpy order": (lambda x: x * 2 + 1, (np.asfortranarray(normal(3, 4))[::2],), {}, True),
    "python only": (lambda n: tf.range(n), (5,), {}, True),
    "composite results": (ragged, (A,), {}, True),
    "no result": (nothing, (A,), {}, True),
    "an argument unused": (lambda x, y: x + 1, (A, B), {}, True),
    "tensor default": (default, (A,), {}, False),
    "namedtuple": (lambda p: p.a + p.b, (Pair(A, B),), {}, False),
    "variable argument": (lambda v: v * 2 + 1, (VARIABLE,), {}, False),
    "ragged argument": (lambda r: r * 2.0, (tf.ragged.constant([[1.0], [2.0, 3.0]]),), {}, False),
    "numpy scalar": (lambda x: x * 2 + 1, (np.float32(2),), {}, False),
}


@pytest.mark.parametrize("fn, args, kwargs, fast", CALLS.values(), ids=CALLS)
def test_the_same_as_tf_function(short, fn, args, kwargs, fast):
    plain, mine = tf.function(fn), tf_stitch.function(fn)
    for _ in range(4):
        same(mine(*args, **kwargs), plain(*args, **kwargs))
    assert short[0] == (2 if fast else 0)
    assert mine.experimental_get_tracing_count() == plain.experimental_get_tracing_count() == 1


def test_new_types_and_shapes_are_traced_as_before(short):
    traces = []

    @tf_stitch.function
    def f(x, k=1):
        traces.append((x.shape, x.dtype, k))
        return x * k + 1

    for x in (A, tensor(4), tensor(3, 1), tf.constant([1, 2, 3]), tensor(4)):
        for k in (1, 2, True):
            for _ in range(3):
                same(f(x, k), x * k + 1 if k is not True else f.python_function(x, k))
    assert len(set(traces)) >= 8 and short[0] > 0
    count = f.experimental_get_tracing_count()
    for _ in range(3):
        f(tensor(4), 2)
    assert f.experimental_get_tracing_count() == count


@pytest.mark.parametrize("first, then", [(None, 3), (3, None)])
def test_the_trace_that_tf_function_would_take(short, first, then):
    def f(x):
        return tf.constant(-1 if x.shape[0] is None else x.shape[0]) + 0 * tf.size(x)

    plain, mine = tf.function(f), tf_stitch.function(f)
    for size in (first, then):
        for g in (plain, mine):
            g.get_concrete_function(tf.TensorSpec([size], tf.float32))
        assert [int(mine(A)) for _ in range(4)] == [int(plain(A)) for _ in range(4)]
        assert [int(mine(tensor(4))) for _ in range(4)] == [int(plain(tensor(4))) for _ in range(4)]
    assert short[0] > 4


def test_input_signature(short):
    spec = [tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([], tf.int32)]
    plain = tf.function(lambda x, n: x * tf.cast(n, x.dtype), input_signature=spec)
    mine = tf_stitch.function(lambda x, n: x * tf.cast(n, x.dtype), input_signature=spec)
    for x in (tensor(2, 3), tensor(5, 3), tensor(0, 3), normal(4, 3)):
        for _ in range(3):
            same(mine(x, tf.constant(2)), plain(x, tf.constant(2)))
            same(mine(x, 2), plain(x, 2))
            same(mine(n=tf.constant(3), x=x), plain(n=tf.constant(3), x=x))
    assert short[0] == 4 * 2 and mine.experimental_get_tracing_count() == 1
    for wrong in ((tensor(3), tf.constant(2)), (tf.constant([[1, 2, 3]]), tf.constant(2)), (tensor(2, 3),)):
        for _ in range(3):
            with pytest.raises(TypeError) as want:
                plain(*wrong)
            with pytest.raises(TypeError) as got:
                mine(*wrong)
            assert str(got.value).split("Received")[0] == str(want.value).split("Received")[0]


def test_arrays_that_a_signature_casts_take_the_long_way(short):
    f = tf_stitch.function(lambda x: x * 2 + 1, input_signature=[tf.TensorSpec([None], tf.float32)])
    for array in (np.array([0.25, 0.5]), np.array([1, 2])):
        for _ in range(4):
            same(f(array), tf.constant(array * 2 + 1, tf.float32))
    assert not short[0]


def test_reduce_retracing():
    plain = tf.function(lambda x: x * 2 + 1, reduce_retracing=True)
    mine = tf_stitch.function(lambda x: x * 2 + 1, reduce_retracing=True)
    for n in (1, 2, 3, 3, 3, 4, 2, 1, 1, 1):
        same(mine(tensor(n)), plain(tensor(n)))
    assert mine.experimental_get_tracing_count() == plain.experimental_get_tracing_count()


def test_errors_of_a_run_read_the_same(short):
    def f(x, i):
        tf.debugging.assert_less(i, 3, "too large")
        return tf.gather(x, i) * 2 + 1

    plain, mine = tf.function(f), tf_stitch.function(f)
    for _ in range(3):
        same(mine(A, tf.constant(1)), plain(A, tf.constant(1)))
    with pytest.raises(tf.errors.InvalidArgumentError) as want:
        plain(A, tf.constant(7))
    before = short[0]
    with pytest.raises(tf.errors.InvalidArgumentError) as got:
        mine(A, tf.constant(7))
    assert short[0] == before + 1
    assert "too large" in got.value.message and "Detected at node" in got.value.message
    assert got.value.message.split("\n")[0] == want.value.message.split("\n")[0]
    same(mine(A, tf.constant(2)), plain(A, tf.constant(2)))


def test_gradients_take_the_long_way(short):
    f = tf_stitch.function(lambda x: tf.reduce_sum(tf.tanh(x * VARIABLE)))
    for _ in range(3):
        f(A)
    before = short[0]
    with tf.GradientTape() as tape:
        tape.watch(A)
        y = f(A)
    dx, dv = tape.gradient(y, [A, VARIABLE])
    slope = 1 - np.tanh(A.numpy() * VARIABLE.numpy()) ** 2
    np.testing.assert_allclose(dx, slope * VARIABLE.numpy(), rtol=1e-5)
    np.testing.assert_allclose(dv, slope * A.numpy(), rtol=1e-5)
    with tf.autodiff.ForwardAccumulator(A, tf.ones(3)) as forward:
        y = f(A)
    np.testing.assert_allclose(forward.jvp(y), np.sum(slope * VARIABLE.numpy()), rtol=1e-5)
    assert short[0] == before
    f(A)
    assert short[0] == before + 1


def test_calls_inside_functions_strategies_and_eager_mode_take_the_long_way(short):
    ran = []

    def body(x):
        ran.append(tf.executing_eagerly())
        return tf.exp(x) * 2 + (1.0 if tf.reduce_sum(x) > 0 else 0.0)

    f = tf_stitch.function(body)
    for _ in range(3):
        want = f(A)
    before, traced = short[0], len(ran)
    outer = tf.function(lambda x: f(x) + 1)
    same(outer(A), want + 1)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        same(f(A), want)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        np.testing.assert_allclose(session.run(f(tf.constant(A.numpy()))), want)
    tf.config.run_functions_eagerly(True)
    try:
        f(A)
    finally:
        tf.config.run_functions_eagerly(False)
    assert short[0] == before and ran[-1] is True and len(ran) > traced
    for _ in range(3):
        same(f(A), want)
    assert short[0] == before + 1  # there are new traces: the way is looked for again


def test_autograph_calls_it_as_it_is(short):
    inner = tf_stitch.function(lambda x: x if tf.reduce_sum(x) > 0 else -x)

    @tf.function
    def outer(x):
        for _ in tf.range(3):
            x = inner(x) + inner(-x)
        return x

    same(outer(tf.constant([1.0, 2.0])), tf.constant([8.0, 16.0]))
    tf_stitch.enable()
    again = tf.function(outer.python_function)
    same(again(tf.constant([1.0, 2.0])), tf.constant([8.0, 16.0]))


def test_variables_made_on_the_first_call(short):
    made = []

    @tf_stitch.function
    def f(x):
        if not made:
            made.append(tf.Variable(x * 2))
        return made[0].assign_add(x)

    assert [float(f(tf.constant(1.0))) for _ in range(5)] == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert short[0] > 0


def test_methods_and_copies(short):
    class Model(tf.Module):
        def __init__(self, k):
            super().__init__()
            self.k = tf.Variable(k)

        @tf_stitch.function
        def __call__(self, x):
            return tf.exp(x) * self.k + 1

    one, two = Model(1.0), Model(2.0)
    for _ in range(4):
        np.testing.assert_allclose(one(A), np.exp(A) + 1, rtol=1e-6)
        np.testing.assert_allclose(two(A), np.exp(A) * 2 + 1, rtol=1e-6)
    assert short[0] == 4
    two.k.assign(3.0)
    np.testing.assert_allclose(two(A), np.exp(A) * 3 + 1, rtol=1e-6)
    f = tf_stitch.function(lambda x: x + 1)
    assert not copy.copy(fast_call._Routes({"key": None}))
    assert isinstance(f, type(tf.function(lambda: 0)))


def test_nothing_is_kept_alive():
    def make():
        big = tf.Variable(tf.zeros(1000))
        f = tf_stitch.function(lambda x: x + big)
        for _ in range(4):
            f(tf.constant(1.0))
        return weakref.ref(f), weakref.ref(big)

    refs = make()
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_a_replaced_capture_counts(short):
    f = tf_stitch.function(lambda x: x + CAPTURED)
    for _ in range(3):
        f(A)
    concrete = f.get_concrete_function(A)
    concrete.set_external_captures([tf.constant([10.0, 20.0, 30.0])])
    np.testing.assert_allclose(f(A), A.numpy() + [10, 20, 30], rtol=1e-6)
    np.testing.assert_allclose(f(A), A.numpy() + [10, 20, 30], rtol=1e-6)


def test_a_deferred_capture_is_read_at_every_call():
    value = [1.0]

    @tf_stitch.function
    def f(x):
        graph = tf.compat.v1.get_default_graph()
        return x + graph.capture_call_time_value(lambda: tf.constant(value[0]), tf.TensorSpec([], tf.float32))

    for k in range(5):
        value[0] = float(k)
        np.testing.assert_allclose(f(A), A.numpy() + k, rtol=1e-6)


def test_devices_and_many_keys(short):
    f = tf_stitch.function(lambda x, k: x * 2 + k)
    with tf.device("/cpu:0"):
        for _ in range(3):
            same(f(A, 1), A * 2 + 1)
    g = tf_stitch.function(lambda x: x * 2 + 1, input_signature=[tf.TensorSpec([None], tf.float32)])
    for n in range(fast_call.CAPACITY + 10):
        g(tf.zeros(n))
    assert len(g._tf_stitch_routes) <= fast_call.CAPACITY + 1
    for _ in range(3):
        same(g(A), A * 2 + 1)


def test_threads(short):
    f = tf_stitch.function(lambda x, y: tf.nn.softmax(x) * 2 + y)
    inputs = [(tensor(n, 4, seed=n), tensor(4, seed=n + 100)) for n in range(1, 9)]
    wrong = []

    def work(x, y):
        for _ in range(60):
            got = f(x, y)
            if not np.allclose(got, tf.nn.softmax(x) * 2 + y, rtol=1e-5):
                wrong.append(x.shape)

    threads = [threading.Thread(target=work, args=pair) for pair in inputs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and short[0] > 0


def test_enable_shortens_every_function_and_disable_lengthens_them_again(short):
    f = tf.function(lambda x: tf.exp(x) * 2 + 1)
    want = f(A)
    tf_stitch.enable()
    for _ in range(4):
        np.testing.assert_allclose(f(A), want, rtol=1e-6)
    assert short[0] == 2
    tf_stitch.disable()
    for _ in range(3):
        same(f(A), want)
    assert short[0] == 2


def test_jit_compile_under_enable_takes_the_long_way(short):
    tf_stitch.enable()
    f = tf.function(lambda x: tf.exp(x) * 2 + 1, jit_compile=True)
    for _ in range(4):
        np.testing.assert_allclose(f(A), np.exp(A) * 2 + 1, rtol=1e-5)
    assert short[0] == 0
