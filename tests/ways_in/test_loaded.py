"""Signatures of loaded models, and concrete functions, called the short way."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tf_stitch import direct_call, fast_call

from .graphs import normal

pytestmark = pytest.mark.usefixtures("switched_off")


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = tf.Variable(normal(8)), tf.Variable(normal(8, seed=1))

    @tf.function(input_signature=[tf.TensorSpec([None, 8], name="x"), tf.TensorSpec([8], name="y")])
    def call(self, x, y):
        z = tf.tanh(x) * self.scale + self.shift
        return {"soft": tf.nn.softmax(z * y), "total": tf.reduce_sum(z, 1)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(plain, rewritten)"""
    plain, rewritten = (str(tmp_path_factory.mktemp(n) / "model") for n in ("plain", "rewritten"))
    model = Model()
    tf.saved_model.save(model, plain, signatures={"serving_default": model.call})
    tf_stitch.rewrite_saved_model(plain, rewritten)
    return plain, rewritten


@pytest.fixture
def ways(monkeypatch):
    """Counts the calls that took the short way, and those that were replayed."""
    count = {"short": 0, "replayed": 0}
    run, replay = fast_call._run, direct_call.Direct.__call__

    def counted_run(*args):
        count["short"] += 1
        return run(*args)

    def counted_replay(*args):
        out = replay(*args)
        count["replayed"] += out is not None
        return out

    monkeypatch.setattr(fast_call, "_run", counted_run)
    monkeypatch.setattr(direct_call.Direct, "__call__", counted_replay)
    return count


X, Y = tf.constant(normal(5, 8, seed=2)), tf.constant(normal(8, seed=3))


def same(got, want) -> None:
    assert sorted(got) == sorted(want)
    for k, v in want.items():
        assert got[k].dtype == v.dtype and got[k].shape == v.shape
        np.testing.assert_allclose(got[k], v, rtol=1e-5, atol=1e-6)


def test_signatures_are_replayed(folders, ways):
    plain = tf.saved_model.load(folders[0]).signatures["serving_default"]
    stitched = tf_stitch.load_saved_model(folders[1]).signatures["serving_default"]
    for n in (5, 3, 5, 3, 1, 1, 1):
        for _ in range(2):
            same(stitched(x=X[:n], y=Y), plain(x=X[:n], y=Y))
    assert ways["replayed"] == ways["short"] == 8  # all but the first two of each size


def test_a_loaded_models_variables_are_read_at_every_call(folders, ways):
    model = tf_stitch.load_saved_model(folders[1])
    stitched = model.signatures["serving_default"]
    for k in range(5):
        model.scale.assign(tf.fill([8], float(k)))
        want = np.sum(np.tanh(X) * k + model.shift.numpy(), 1)
        np.testing.assert_allclose(stitched(x=X, y=Y)["total"], want, rtol=1e-4, atol=1e-5)
    assert ways["replayed"] == 3


def test_gradients_and_wrong_calls_are_as_before(folders, ways):
    plain_model, model = tf.saved_model.load(folders[0]), tf_stitch.load_saved_model(folders[1])
    plain, stitched = plain_model.signatures["serving_default"], model.signatures["serving_default"]
    for _ in range(4):
        stitched(x=X, y=Y)
    before = ways["short"]
    grads = []
    for f, variable in ((plain, plain_model.scale), (stitched, model.scale)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(f(x=X, y=Y)["total"])
        grads.append(tape.gradient(loss, variable))
    np.testing.assert_allclose(grads[1], grads[0], rtol=1e-5)
    for wrong in ({"x": X}, {"x": X, "y": Y, "z": Y}, {"x": X, "y": tf.constant("text")}):
        for f in (plain, stitched):
            with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError)):
                f(**wrong)
    assert ways["short"] == before
    outer = tf.function(lambda x: stitched(x=x, y=Y)["total"])
    np.testing.assert_allclose(outer(X), plain(x=X, y=Y)["total"], rtol=1e-5)


def test_enable_shortens_what_tensorflow_loads(folders, ways):
    signatures = [tf.saved_model.load(f).signatures["serving_default"] for f in folders]
    want = signatures[0](x=X, y=Y)
    tf_stitch.enable()
    for f in signatures:
        for _ in range(4):
            same(f(x=X, y=Y), want)
    assert ways["replayed"] == 4
    tf_stitch.disable()
    for f in signatures:
        for _ in range(3):
            same(f(x=X, y=Y), want)
    assert ways["short"] == 4


def test_concrete_functions_take_what_they_took(ways):
    f = tf.function(lambda x, k, pair: (tf.exp(x) * k + pair["a"], {"b": [pair["b"] * 2 + x, None]}))
    pair = {"a": tf.ones([3]), "b": tf.zeros([3])}
    x = tf.constant(normal(3))
    concrete = f.get_concrete_function(x, 3.0, pair)
    want = concrete(x, 3.0, pair)
    tf_stitch.enable()
    for _ in range(4):
        got = concrete(x, 3.0, pair)
        tf.nest.assert_same_structure(got, want)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
        np.testing.assert_allclose(got[1]["b"][0], want[1]["b"][0], rtol=1e-5)
    assert ways["short"] == 2
    for _ in range(3):
        with pytest.raises(TypeError):
            concrete(x, 4.0, pair)  # traced with another literal
        with pytest.raises(TypeError):
            concrete(tf.constant(normal(4)), 3.0, pair)


def test_loading_stitches_nothing(folders):
    tf_stitch.load_saved_model(folders[1])
    before = tf_stitch.reports()
    f = tf.function(lambda x: tf.exp(x) * 2 + 1)
    for _ in range(3):
        f(X)
    assert [id(report) for _, report in tf_stitch.reports()] == [id(report) for _, report in before]
