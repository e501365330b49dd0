"""Signatures of TF1 models whose inputs are tensors in the middle of the graph."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tf_stitch.graph import feeds
from tf_stitch.saved_model import read, stitched_nodes

from .graphs import NATIVE, normal

v1 = tf.compat.v1


@pytest.fixture
def model(tmp_path):
    """An encoder and its decoder share a tensor, the second part of a split; a Const is fed, and an Identity."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        seen = tf.identity(x, name="seen")
        keep = tf.constant(0.5, name="keep")
        left, right = tf.split(tf.exp(seen * keep) - 1.0, 2, axis=1, name="halves")
        y = tf.nn.softmax(right * 2.0 + tf.tanh(right), name="y")
        z = tf.tanh(left * 3.0) + y
        signatures = {
            "serving_default": ({"x": seen, "keep": keep}, {"z": z}),
            "encode": ({"x": x}, {"code": right}),
            "decode": ({"code": right}, {"y": y}),
        }
        builder = v1.saved_model.Builder(str(tmp_path / "a"))
        builder.add_meta_graph_and_variables(session, ["serve"], {
            name: v1.saved_model.predict_signature_def(*ends) for name, ends in signatures.items()})
        builder.save()
    return tmp_path / "a"


def answers(folder):
    """What each signature gives in a session, and in a function of the loaded model."""
    inputs = {"serving_default": {"x": normal(4, 6), "keep": np.float32(0.25)}, "encode": {"x": normal(4, 6)},
              "decode": {"code": normal(4, 3)}}
    out = []
    with tf.Graph().as_default(), v1.Session() as session:
        signatures = v1.saved_model.load(session, ["serve"], str(folder)).signature_def
        for name, given in inputs.items():
            fed = {signatures[name].inputs[k].name: v for k, v in given.items()}
            out += [session.run(o.name, fed) for o in signatures[name].outputs.values()]
    loaded = tf.saved_model.load(str(folder))
    for name, given in inputs.items():
        out += loaded.signatures[name](**{k: tf.constant(v) for k, v in given.items()}).values()
    return out


def test_what_is_fed_is_read(model, tmp_path):
    report = tf_stitch.rewrite_saved_model(model, tmp_path / "b", options=NATIVE)
    assert report.clusters and max(report.errors.values()) < 1e-5
    for got, want in zip(answers(tmp_path / "b"), answers(model), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_session_feeds_it_too(model, tmp_path):
    tf_stitch.rewrite_saved_model(model, tmp_path / "b", options=NATIVE)
    with tf_stitch.StitchSession() as session:
        for name in ("a", "b"):
            session.add(name, tmp_path / name)
        code = normal(4, 3)
        want, got = (session.run(name, {"code": code}, signature="decode")["y"] for name in ("a", "b"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_no_placeholder_is_left(model, tmp_path):
    tf_stitch.rewrite_saved_model(model, tmp_path / "b", options=NATIVE, verify=False)
    before, after = read(model), read(tmp_path / "b")
    graph = after.meta_graphs[0].graph_def
    assert len(list(stitched_nodes(after))) > 1
    assert [n.name for n in graph.node if n.op == "Placeholder"] == ["x"]
    assert any("halves:1" in n.input for n in graph.node)
    assert not feeds.cut(before.meta_graphs[0].graph_def, {"x:0", "not there:0"})[1]


def test_parts_need_only_their_own_placeholders():
    """Predictions without the label, one tower without the other, a regularizer with nothing."""
    with tf.Graph().as_default() as graph:
        x, label = v1.placeholder(tf.float32, [None, 6], name="x"), v1.placeholder(tf.float32, [None, 6], name="label")
        w = tf.constant(normal(6), name="w")
        logits = tf.tanh(x * w) * 2.0
        tf.nn.softmax(logits, name="p")
        tf.reduce_mean(tf.square(logits - label) * tf.exp(-label), name="loss")
        tf.nn.softmax(tf.tanh(label) * 3.0, name="other")
        tf.exp(tf.reduce_sum(w * w + 1.0) * 0.1, name="regularizer")
    gd, report = tf_stitch.rewrite_graph_def(graph.as_graph_def(), options=NATIVE)
    assert report.clusters
    fed = {"x:0": normal(4, 6), "label:0": normal(4, 6) * 2}
    for end, needs in {"p": ["x:0"], "loss": ["x:0", "label:0"], "other": ["label:0"], "regularizer": []}.items():
        given = {k: fed[k] for k in needs}
        got, want = (_run(g, f"{end}:0", given) for g in (gd, graph.as_graph_def()))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_graph_with_one_result_stays_whole():
    with tf.Graph().as_default() as graph:
        a, b, c = (v1.placeholder(tf.float32, [None, 6], name=n) for n in "abc")
        tf.nn.softmax(tf.tanh(a * 2.0) + tf.exp(b) * tf.sigmoid(c))
    assert len(tf_stitch.rewrite_graph_def(graph.as_graph_def(), options=NATIVE)[1].clusters) == 1


def _run(graph_def, fetched, fed):
    with tf.Graph().as_default() as graph, v1.Session() as session:
        tf.import_graph_def(graph_def, name="")
        return session.run(graph.get_tensor_by_name(fetched), fed)
