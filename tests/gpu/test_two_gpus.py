"""Two GPUs of one process: programs, graphs and memory belong to the GPU that runs them."""
from __future__ import annotations

import concurrent.futures
import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.gpu.kernels import on_gpu
from tests.gpu.random_programs import Drawn
from tests.gpu.test_op_gpu import close, exact_float32, function, small, wanted  # noqa: F401 (a fixture)
from tests.op import programs
from tests.op.calls import counted
from tests.op.test_op import chain_in_tf, check, expect_stitched, floats
from tf_stitch import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(tf.config.list_physical_devices("GPU")) < 2, reason="one GPU")]
PLACES = ("/GPU:0", "/GPU:1")
ROWS = [tf.TensorSpec([None, 64])]


def rows(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.softmax(tf.nn.gelu(x * 2.0 + 1.0) - tf.reduce_mean(x, -1, keepdims=True))


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def near(got: tf.Tensor, want: np.ndarray | tf.Tensor, place: str | None = None) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    assert place is None or got.backing_device.endswith(place[1:])


@contextlib.contextmanager
def all_stitched(runs: int):
    """So many programs run in here, and no fallback."""
    before = runtime.counters()
    yield
    after = runtime.counters()
    counts = after.stitched - before.stitched, after.fallbacks - before.fallbacks
    assert counts == (runs, 0), counts


def side_by_side(work, count: int = 4) -> None:
    """``work(place)`` on both GPUs, by several threads each at once."""
    with concurrent.futures.ThreadPoolExecutor(2 * count) as pool:
        for job in [pool.submit(work, place) for place in PLACES * count]:
            job.result()


def test_one_program():
    x, y = floats(1000), floats(1000)
    fs = [function(on_gpu(programs.chain()), chain_in_tf, device=place) for place in PLACES]
    for f, _ in itertools.product(fs, range(6)):
        expect_stitched(lambda f=f: f(x, y), chain_in_tf(x, y))
    assert {f(x, y)[0].backing_device[-5:] for f in fs} == {"GPU:0", "GPU:1"}
    check(fs[1](x, y), fs[0](x, y))


@pytest.mark.usefixtures("exact_float32")
def test_graphs_and_temporaries_are_each_gpus_own():
    drawn = Drawn(7)
    fs = {p: function(drawn.program, lambda *xs: (xs[0], xs[0], tf.reshape(xs[0], [-1])), device=p) for p in PLACES}

    def work(place: str) -> None:
        for i in range(24):
            xs = small(i, [33, 64][i % 2])
            close(fs[place](*xs), wanted(drawn, xs))

    with all_stitched(2 * 4 * 24):
        side_by_side(work)


@pytest.mark.parametrize("concrete", [False, True])
def test_one_function_called_on_both(concrete):
    """The device scope of the call decides."""
    f = tf_stitch.function(rows, input_signature=ROWS)
    call = f.get_concrete_function() if concrete else f

    def work(place: str) -> None:
        for n in (128, 7, 128, 33) * 4:
            with tf.device(place):
                x = tf.constant(values(n, 64))
                near(call(x), rows(tf.identity(x)), place)

    with all_stitched(2 * 4 * 16):
        side_by_side(work)


def test_functions_placed_inside():
    def made(place: str):
        def call(x: tf.Tensor) -> tf.Tensor:
            with tf.device(place):
                return rows(x)

        return tf_stitch.function(call, input_signature=ROWS)

    fs, x = {p: made(p) for p in PLACES}, values(128, 64)
    want = np.asarray(rows(tf.constant(x)))

    def work(place: str) -> None:
        for _ in range(20):
            near(fs[place](x), want, place)

    with all_stitched(2 * 4 * 20):
        side_by_side(work)


def test_both_in_one_function():
    """Work on each GPU is a program of its own; tensors cross between them."""
    def call(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device(PLACES[0]):
            a = rows(x)
        with tf.device(PLACES[1]):
            b = rows(tf.tanh(a) + x)
        with tf.device(PLACES[0]):
            return tf.exp(b) * a + 1.0, b

    f = tf_stitch.function(call, input_signature=ROWS)
    for n in (16, 1, 128, 16, 16, 16):
        x = tf.constant(values(n, 64))
        with all_stitched(3):
            got = f(x)
        for g, w, place in zip(got, call(x), PLACES, strict=True):
            near(g, w, place)


def test_a_model_whose_variables_lie_on_the_second():
    """Evaluated and trained, called without a device scope and within either GPU's."""
    def model():
        with tf.device(PLACES[1]):
            return [tf.Variable(values(64, 64, seed=k) / 8) for k in (1, 2)]

    def step(ws, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(rows(tf.tanh(x @ ws[0]) @ ws[1])))
        for w, g in zip(ws, tape.gradient(loss, ws), strict=True):
            w.assign_sub(0.5 * g)
        return loss

    mine, plain = model(), model()
    f = tf_stitch.function(lambda x: step(mine, x), input_signature=ROWS)
    g = tf.function(lambda x: step(plain, x), input_signature=ROWS)
    for scope in (contextlib.nullcontext, lambda: tf.device(PLACES[1]), lambda: tf.device(PLACES[0])):
        for n in (32, 5, 32):
            x = tf.constant(values(n, 64))
            with scope():
                got, ran, fell_back = counted(lambda x=x: f(x))
                want = g(x)
            assert ran and not fell_back
            near(got, want)
    for w, v in zip(mine, plain, strict=True):
        near(w.read_value(), v.read_value())
        assert w.device.endswith(PLACES[1][1:])


def test_arguments_on_the_other_gpu():
    """They are copied to where the function runs; results lie where TensorFlow's would."""
    f, plain = (made(lambda x, y: rows(x) * tf.exp(y) + 1.0) for made in (tf_stitch.function, tf.function))
    for place_x, place_y in [*itertools.product(PLACES, repeat=2)] * 3:
        with tf.device(place_x):
            x = tf.constant(values(16, 64))
        with tf.device(place_y):
            y = tf.constant(values(16, 64, seed=3))
        got, want = f(x, y), plain(x, y)
        near(got, want)
        assert (got.device, got.backing_device) == (want.device, want.backing_device)
