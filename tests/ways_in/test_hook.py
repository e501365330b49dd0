"""Stitching through Grappler: enable(), disable(), tf_stitch.function; gradients, control flow, Keras."""
from __future__ import annotations

import concurrent.futures
import logging
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tf_stitch import compiler, hook, runtime
from tf_stitch.errors import OptionError
from tf_stitch.graph import rewriter

from .graphs import normal

pytestmark = pytest.mark.usefixtures("switched_off")


@pytest.fixture
def enabled():
    tf_stitch.enable()
    return ran()


def ran() -> int:
    return runtime.counters().stitched


def names() -> list[str]:
    return [name for name, _ in tf_stitch.reports()]


def block(x):
    """Layer norm, GELU and softmax by hand."""
    mean = tf.reduce_mean(x, -1, keepdims=True)
    y = (x - mean) * tf.math.rsqrt(tf.reduce_mean((x - mean) ** 2, -1, keepdims=True) + 1e-3)
    return tf.nn.softmax(tf.nn.gelu(y) * 2)


def nested(x):
    inner = tf.function(block)
    return inner(x) + tf.function(lambda z: inner(z * 2) * tf.exp(z * 0.1))(x)


def branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x) * 2 + 1, lambda: tf.exp(x) - 1) * 3


def loop(x):
    def body(i, y):
        y = tf.cond(i % 2 == 0, lambda: tf.tanh(y * 1.1) + 0.1, lambda: tf.nn.softplus(y) - 0.3)
        return i + 1, y * 0.9 + x * 0.1

    return tf.while_loop(lambda i, y: i < 5, body, (tf.constant(0), x))[1]


def case(x):
    index = tf.cast(tf.reduce_max(tf.abs(x)), tf.int32)
    return tf.switch_case(index, [lambda: tf.exp(x) * 2 + 1, lambda: tf.tanh(x) * 2, lambda: tf.sin(x) - x * 2]) * 1.5


def loop_between(x):
    """What every turn of the loop reads is read after it, too: the two readers are no one op."""
    kept = tf.tanh(x * 0.2) * 0.5 + 1
    y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y) * 0.5 + kept), (tf.constant(0), x * 0.3))[1]
    return tf.exp(y * 0.1) + kept * 0.5


FUNCTIONS = {f.__name__: f for f in (block, nested, branch, loop, loop_between, case)}


def with_gradient(fn, x: np.ndarray):
    v = tf.Variable(x)
    with tf.GradientTape() as tape:
        y = fn(v)
        loss = tf.reduce_sum(y * y)
    return y.numpy(), tape.gradient(loss, v).numpy()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_gradient(name, enabled):
    fn = FUNCTIONS[name]
    stitched = tf.function(fn)
    for k, rows in enumerate((3, 1, 17)):
        x = normal(rows, 6, seed=k) * (k + 0.3)
        for got, want in zip(with_gradient(stitched, x), with_gradient(fn, x), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert ran() > enabled
    assert any("backward" in n for n in names())


def test_unknown_batch_is_stitched_once(enabled):
    fn = tf.function(block, input_signature=[tf.TensorSpec([None, 6])])
    before, fallbacks = tf_stitch.reports(), runtime.counters().fallbacks
    for rows in (4, 0, 1, 9):
        x = normal(rows, 6)
        np.testing.assert_allclose(fn(x), block(x), rtol=2e-5, atol=1e-6)
    known = {id(report) for _, report in before}  # the last 256 are kept: their number may stay
    assert sum(id(report) not in known for _, report in tf_stitch.reports()) == 1
    assert runtime.counters().fallbacks == fallbacks


def test_second_derivatives(enabled):
    def second(fn):
        x = tf.Variable(normal(4, 3))
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(fn(x) ** 3)
            g = inner.gradient(y, x)
        return outer.gradient(g, x).numpy()

    np.testing.assert_allclose(second(tf.function(block)), second(block), rtol=1e-3, atol=1e-5)


def test_functions_traced_before_and_after(enabled):
    tf_stitch.disable()
    fn = tf.function(block)
    x = normal(5, 4)
    want = fn(x).numpy()
    before = ran()
    tf_stitch.enable()
    np.testing.assert_allclose(fn(x), want, rtol=2e-5, atol=1e-6)
    assert ran() > before and fn.experimental_get_tracing_count() == 1
    tf_stitch.disable()
    before = ran()
    np.testing.assert_array_equal(fn(x), want)
    assert ran() == before
    assert not tf_stitch.is_enabled()


def test_threads_that_ran_functions_before_follow_enable_and_disable():
    f = tf.function(block)
    x = normal(4, 32)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        def count() -> int:
            before = ran()
            pool.submit(f, x).result()
            return ran() - before

        assert count() == 0
        tf_stitch.enable()
        assert count() > 0
        tf_stitch.disable()
        assert count() == 0


def test_enable_twice_and_with_options():
    tf_stitch.enable()
    tf_stitch.enable(tf_stitch.Options(target="host", levels=(), skip_ops=("Tanh",)))
    x = normal(5, 4)
    np.testing.assert_allclose(tf.function(lambda x: tf.tanh(tf.exp(x) * 2) * 3 + 1)(x), np.tanh(np.exp(x) * 2) * 3 + 1,
                               rtol=1e-5)
    left = {n.op: n.reason for n in tf_stitch.reports()[-1][1].left}
    assert "skip_ops" in left["Tanh"]


def test_decorator_forms():
    @tf_stitch.function
    def plain(x):
        return block(x)

    @tf_stitch.function(input_signature=[tf.TensorSpec([None, 4])], reduce_retracing=True)
    def signed(x):
        return block(x)

    class Layer:
        scale = 2.0

        @tf_stitch.function
        def call(self, x):
            return block(x) * self.scale

    x, layer = normal(5, 4), Layer()
    wrapped, anonymous = tf_stitch.function(tf.function(block)), tf_stitch.function(lambda x: block(x))
    for fn, want in ((plain, block(x)), (signed, block(x)), (layer.call, block(x) * 2), (wrapped, block(x)),
                     (anonymous, block(x))):
        before = ran()
        np.testing.assert_allclose(fn(x), want, rtol=2e-5, atol=1e-6)
        assert ran() > before
    for got, want in zip(with_gradient(plain, x), with_gradient(block, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert any("backward_tf_stitch__plain" in n for n in names())


def test_only_the_decorated_function_is_stitched():
    @tf_stitch.function
    def inner(x):
        return loop(branch(x)) * 2 + 1

    outer = tf.function(lambda x: tf.sin(tf.cos(inner(tf.exp(x * 0.1) * 0.1)) * 2) + 1)
    x = normal(5, 4)
    before = ran()
    np.testing.assert_allclose(outer(x), outer.python_function(x), rtol=2e-5, atol=1e-6)
    assert ran() > before
    report = [r for name, r in tf_stitch.reports() if hook.MARK not in name][-1]
    outside = {n.op for n in report.left if "outside" in n.reason}
    assert {"Sin", "Cos"} <= outside
    assert {"Tanh", "Softplus"} <= {op for c in report.clusters for _, op in c.nodes}
    alone = tf.function(lambda x: tf.exp(x) * 2 + 1)
    before = ran()
    alone(x)
    assert ran() == before


def test_decorator_refuses_what_it_cannot_do():
    with pytest.raises(OptionError, match="jit_compile"):
        tf_stitch.function(block, jit_compile=True)
    with pytest.raises(OptionError, match="jit_compile"):
        tf_stitch.function(tf.function(block, jit_compile=True))
    with pytest.raises(OptionError, match="callable"):
        tf_stitch.function(3)


def test_xla_functions_are_left_alone(enabled):
    inner = tf.function(block, jit_compile=True)
    outer = tf.function(lambda x: tf.tanh(inner(tf.exp(x) * 2)) * 2 + 1)
    x = normal(5, 4)
    np.testing.assert_allclose(inner(x), block(x), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(outer(x), tf.tanh(block(tf.exp(x) * 2)) * 2 + 1, rtol=2e-5, atol=1e-6)
    assert not any(op == "Softmax" for _, r in tf_stitch.reports()[-1:] for c in r.clusters for _, op in c.nodes)


def test_side_effects_keep_their_order(enabled):
    v = tf.Variable(1.0)

    @tf.function
    def fn(x):
        y = tf.exp(x) * v + 1
        v.assign(tf.reduce_sum(y) * 0.5 + 1)
        z = tf.tanh(y) * v + v
        v.assign_add(tf.reduce_mean(z) * 2 + 1)
        return z * v

    x = normal(4)
    got, state = fn(x).numpy(), v.numpy()
    v.assign(1.0)
    want = fn.python_function(x).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(state, v.numpy(), rtol=1e-6)


def test_datasets_and_text(enabled):
    data = tf.data.Dataset.range(6).map(lambda i: tf.exp(tf.cast(i, tf.float32) * -0.5) * 2 + 1)
    np.testing.assert_allclose(list(data.as_numpy_iterator()), np.exp(np.arange(6) * -0.5) * 2 + 1, rtol=1e-6)
    fn = tf.function(lambda s: tf.exp(tf.cast(tf.strings.length(s), tf.float32) * 0.1) * 2)
    np.testing.assert_allclose(fn(tf.constant(["a", "bcd"])), np.exp([0.1, 0.3]) * 2, rtol=1e-6)


def test_many_threads(enabled):
    fn = tf.function(block)
    xs = [normal(3 + k % 3, 6, seed=k) for k in range(12)]
    barrier = threading.Barrier(4)

    def work(k: int) -> None:
        if k < 4:
            barrier.wait(30)
        np.testing.assert_allclose(fn(xs[k]), block(xs[k]), rtol=2e-5, atol=1e-6)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(12)))


def test_an_error_in_the_rewriter_leaves_the_graph(enabled, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("not today")

    monkeypatch.setattr(rewriter, "rewrite", broken)
    fn = tf.function(block)
    x = normal(5, 4)
    with caplog.at_level(logging.WARNING, "tf_stitch"):
        np.testing.assert_allclose(fn(x), block(x), rtol=2e-5, atol=1e-6)
        fn(normal(6, 4))
    assert [r.message for r in caplog.records if "not today" in r.message] == [
        "A graph was left as it is because stitching it failed (RuntimeError: not today)."]


def test_a_compiler_that_is_not_there_is_told_once(enabled, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with caplog.at_level(logging.WARNING, "tf_stitch"):
        for width in (5, 6):
            x = normal(width, 4)
            np.testing.assert_allclose(tf.function(block)(x), block(x), rtol=2e-5, atol=1e-6)
    assert [r.message for r in caplog.records if r.name == "tf_stitch"] == [
        "Operations stay TensorFlow's because their kernels cannot be compiled here: The C++ compiler "
        "'/no/such/compiler' that CXX names is not there; install it or unset CXX."]


def test_settings_of_tensorflow_keep_the_hook(enabled):
    tf.config.optimizer.set_experimental_options({"constant_folding": True})
    before = ran()
    x = normal(3, 4)
    np.testing.assert_allclose(tf.function(block)(x), block(x), rtol=2e-5, atol=1e-6)
    assert ran() > before


def test_the_config_is_as_before_after_disable():
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context

    def optimizers() -> list[str]:
        data = context.context().function_call_options.config_proto_serialized
        config = config_pb2.ConfigProto.FromString(data)
        return [o.name for o in config.graph_options.rewrite_options.custom_optimizers]

    marked, hook._state.marked = hook._state.marked, False
    try:
        tf_stitch.enable()
        assert optimizers() == [hook.OPTIMIZER]
        tf_stitch.disable()
        assert optimizers() == []
    finally:
        hook._state.marked = marked


def test_the_process_ends_well():
    code = ("import tensorflow as tf, tf_stitch; tf_stitch.enable(); "
            "f = tf.function(lambda x: tf.exp(x) * 2 + 1); print(float(f(0.0)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "3.0", done.stderr[-2000:]


# --- Keras -------------------------------------------------------------------------------------------

def mlp():
    return [tf.keras.layers.Dense(16, "gelu"), tf.keras.layers.LayerNormalization(), tf.keras.layers.Dense(8, "tanh"),
            tf.keras.layers.BatchNormalization()]


def recurrent():
    return [tf.keras.layers.Reshape((4, 2)), tf.keras.layers.LSTM(6), tf.keras.layers.Dropout(0.0)]


@pytest.mark.parametrize("layers", [mlp, recurrent])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_keras_fit_and_predict(layers, optimizer):
    x, y = normal(40, 8), normal(40, 1, seed=1)
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((8,)), *layers(), tf.keras.layers.Dense(1)])
    weights = model.get_weights()

    def train() -> tuple[list[float], np.ndarray]:
        model.set_weights(weights)
        model.compile(optimizer, "mse")
        losses = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"]
        return losses, model.predict(x, verbose=0)

    want, predicted = train()
    tf_stitch.enable()
    before = ran()
    got, stitched = train()
    assert ran() > before
    np.testing.assert_allclose(got, want, rtol=1e-4)
    np.testing.assert_allclose(stitched, predicted, rtol=1e-3, atol=1e-4)


def test_where_there_is_a_gpu_the_compiler_is_found_ahead(monkeypatch, tmp_path):
    """When a function is made, not when it is first called; nothing is begun where there is no driver, or no GPU."""
    begun = []
    monkeypatch.setattr(compiler, "prepare", lambda: begun.append(threading.current_thread().name))
    (tmp_path / "driver").touch()
    for driver, devices in (("none", None), ("driver", "-1"), ("driver", None)):
        monkeypatch.setattr(hook, "DRIVER", str(tmp_path / driver))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if devices:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        hook._look_ahead.cache_clear()
        tf_stitch.function(lambda x: x + 1)
        for thread in threading.enumerate():
            if thread.name == "tf_stitch_look_ahead":
                thread.join()
        assert len(begun) == (driver == "driver" and devices is None)
    assert begun == ["tf_stitch_look_ahead"]


def test_an_interrupt_while_a_graph_is_stitched_arrives(monkeypatch):
    """Ctrl-C while kernels are compiled: it is not lost, and the function runs afterwards."""
    def interrupted(*args):
        raise KeyboardInterrupt

    f = tf_stitch.function(lambda x: tf.exp(x) * 2.0 + 1.0)
    monkeypatch.setattr(hook, "_rewrite", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            f(tf.ones(3))
            for _ in range(10):  # where the next bytecode is
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    np.testing.assert_allclose(f(tf.ones(3)), np.full(3, 2 * np.e + 1), rtol=1e-6)
