"""Warm-up requests for TensorFlow Serving, read back with its own protos."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_stitch import cli, saved_model, warmup

prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")


class Two(tf.Module):
    """Two signatures, three element types."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x"), tf.TensorSpec([None], tf.string, name="s")])
    def first(self, x, s):
        return {"y": tf.nn.softmax(x * 2 + 1), "n": tf.strings.length(s)}

    @tf.function(input_signature=[tf.TensorSpec([2], tf.int32, name="k")])
    def second(self, k):
        return {"z": tf.square(k) + 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, module = tmp_path_factory.mktemp("two") / "1", Two()
    tf.saved_model.save(module, str(folder), signatures={"first": module.first, "second": module.second})
    return folder


def logs(folder):
    records = [r.numpy() for r in tf.data.TFRecordDataset(str(folder / warmup.FILE))]
    out = [prediction_log_pb2.PredictionLog.FromString(r) for r in records]
    assert all(r == log.SerializeToString(deterministic=True) for r, log in zip(records, out))  # no unknown fields
    return [log.predict_log.request for log in out]


def test_drawn_requests(model, tmp_path):
    assert cli.main(["rewrite", str(model), str(tmp_path / "1"), "--native", "--warmup", "--no-verify", "-q"]) == 0
    requests = logs(tmp_path / "1")
    assert [r.model_spec.signature_name for r in requests] == ["first"] * 3 + ["second"]
    for request, batch in zip(requests[:3], saved_model.BATCHES):
        x, s = (tf.make_ndarray(request.inputs[name]) for name in "xs")
        assert x.shape == (batch, 4) and x.dtype == np.float32 and s.shape == (batch,)
    assert tf.make_ndarray(requests[3].inputs["k"]).dtype == np.int32
    signatures = saved_model.signatures(tmp_path / "1")
    for request in requests:  # the model takes them
        arrays = {k: tf.make_ndarray(v) for k, v in request.inputs.items()}
        assert saved_model._run(signatures[request.model_spec.signature_name], arrays)


def test_given_requests(model, tmp_path):
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.savez(tmp_path / "in.npz", **{"first/x": x, "first/s": np.array(["a", "b"])})
    saved_model.rewrite_saved_model(model, tmp_path / "1", verify=False, inputs=tmp_path / "in.npz", warmup=True,
                                    options=saved_model.Options(levels=()))
    first, *others = logs(tmp_path / "1")
    np.testing.assert_array_equal(tf.make_ndarray(first.inputs["x"]), x)
    assert [r.model_spec.signature_name for r in others] == ["second"]


def test_none_without_asking(model, tmp_path):
    assert cli.main(["rewrite", str(model), str(tmp_path / "1"), "--native", "--no-verify", "-q"]) == 0
    assert not (tmp_path / "1" / warmup.FILE).exists()
