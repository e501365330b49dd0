"""Errors of a rewritten model are TensorFlow's: its class, and the original node's name."""
from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.op.calls import counted
from tests.serving import support
from tf_stitch.saved_model import load

F, I = tf.float32, tf.int32
RNG = np.random.default_rng(0)


def spec(shape, dtype=F):
    return tf.TensorSpec(shape, dtype)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values):
    return np.array(values, np.int32)


def around(x):
    """Compute that is always stitched."""
    return tf.tanh(x * 2 + 1) * tf.sigmoid(x)


# name of the node that fails -> (function, specs, good inputs, bad inputs)
CASES = {
    "add_rows": (lambda x, y: around(tf.add(around(x), y, name="add_rows")), [spec([None]), spec([None])],
                 [floats(4), floats(4)], [floats(4), floats(3)]),
    "take": (lambda x, i: around(tf.gather(around(x), i, name="take")), [spec([None, 3]), spec([None], I)],
             [floats(4, 3), ints(3, 0)], [floats(4, 3), ints(3, 4)]),
    "take_nd": (lambda x, i: around(tf.gather_nd(around(x), i, name="take_nd")), [spec([None, 3]), spec([None, 2], I)],
                [floats(4, 3), ints(3, 0)[None]], [floats(4, 3), ints(1, -1)[None]]),
    "total": (lambda x, a: around(tf.reduce_sum(around(x), a, name="total")), [spec([None, 3]), spec([], I)],
              [floats(4, 3), ints(1)[0]], [floats(4, 3), ints(2)[0]]),
    "join": (lambda x, a: around(tf.concat([around(x), x], a, name="join")), [spec([None, 3]), spec([], I)],
             [floats(4, 3), ints(1)[0]], [floats(4, 3), ints(-3)[0]]),
    "join_rows": (lambda x, y: around(tf.concat([around(x), y], 1, name="join_rows")),
                  [spec([None, None]), spec([None, None])], [floats(4, 3), floats(4, 1)], [floats(4, 3), floats(3, 3)]),
    "running": (lambda x, a: around(tf.cumsum(around(x), a, name="running")), [spec([None, 3]), spec([], I)],
                [floats(4, 3), ints(1)[0]], [floats(4, 3), ints(5)[0]]),
    "fold": (lambda x, k: around(tf.reshape(around(x), [-1, k], name="fold")), [spec([None, 3]), spec([], I)],
             [floats(4, 3), ints(6)[0]], [floats(4, 3), ints(5)[0]]),
    "cut": (lambda x, b: around(tf.slice(around(x), [b, 0], [2, 3], name="cut")), [spec([None, 3]), spec([], I)],
            [floats(4, 3), ints(2)[0]], [floats(4, 3), ints(3)[0]]),
    "halves": (lambda x: around(tf.split(around(x), 2, name="halves")[0]), [spec([None])], [floats(4)], [floats(5)]),
    "choose": (lambda c, x, y: around(tf.where(tf.greater(c, 0), around(x), y, name="choose")),
               [spec([None]), spec([None]), spec([None])], [floats(4), floats(4), floats(4)],
               [floats(4), floats(4), floats(5)]),
    "div": (lambda x, k: tf.cast(tf.math.floordiv(x * 2 + k, k, name="div"), F) + 1, [spec([None], I), spec([], I)],
            [ints(1, 2), ints(3)[0]], [ints(1, 2), ints(0)[0]]),
}


def named_output(fn):
    return lambda *args: {"y": fn(*args)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model with a signature per case: (original, rewritten), and their folders."""
    support.build()
    folder, module = tmp_path_factory.mktemp("errors"), tf.Module()
    signatures = {}
    for name, (fn, specs, _, _) in CASES.items():
        named = [tf.TensorSpec(s.shape, s.dtype, f"in_{i}") for i, s in enumerate(specs)]
        signatures[name] = tf.function(named_output(fn), input_signature=named, autograph=False)
        setattr(module, f"f_{name}", signatures[name])
    tf.saved_model.save(module, str(folder / "plain"), signatures=signatures)
    tf_stitch.rewrite_saved_model(folder / "plain", folder / "stitched", verify=False,
                                  options=tf_stitch.Options(levels=()))
    return load(folder / "plain"), load(folder / "stitched"), folder


def call(model, name, inputs):
    return model.signatures[name](**{f"in_{i}": tf.constant(x) for i, x in enumerate(inputs)})["y"]


def failure(model, name, inputs):
    with pytest.raises(tf.errors.OpError) as caught:
        call(model, name, inputs)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_class_and_node(models, name):
    plain, stitched, _ = models
    _, _, good, bad = CASES[name]
    result, ran, _ = counted(lambda: call(stitched, name, good))
    assert ran >= 1
    np.testing.assert_allclose(result, call(plain, name, good), rtol=1e-5, atol=1e-6)
    want, got = failure(plain, name, bad), failure(stitched, name, bad)
    assert got[0] is want[0]
    assert re.search(rf"\b{name}\b", want[1])
    assert re.search(rf"\b{name}\b", got[1]), got[1]
    np.testing.assert_allclose(call(stitched, name, good), result)  # the op goes on


def test_in_the_host_too(models, tmp_path):
    *_, folder = models
    for name in ("add_rows", "take", "fold"):
        np.savez(tmp_path / "in.npz", **{f"in_{i}": x for i, x in enumerate(CASES[name][3])})
        says = [support.host("run", folder / model, tmp_path / "in.npz", "--signature", name, status=1).stderr
                for model in ("plain", "stitched")]
        codes = [re.search(r"tf_stitch_host: error (\d+):", text)[1] for text in says]
        assert codes[0] == codes[1] == str(tf.errors.INVALID_ARGUMENT)
        assert all(re.search(rf"\b{name}\b", text) for text in says)
