"""SavedModel folders in and out, verification, bad input, and the command."""
from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.message import EncodeError

import tf_stitch
from tf_stitch import cli, files, saved_model
from tf_stitch.errors import OptionError, SavedModelError, VerifyError
from tf_stitch.graph import lower

from .graphs import NATIVE, normal


class Scorer(tf.Module):
    """State, two signatures, a gather, a loop, an asset."""

    def __init__(self, asset: str) -> None:
        self.table = tf.Variable(normal(8, 4))
        self.calls = tf.Variable(0.0)
        self.asset = tf.saved_model.Asset(asset)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
    def score(self, x):
        self.calls.assign_add(1.0)
        return {"probability": tf.nn.softmax(tf.matmul(x, self.table, transpose_b=True)), "calls": self.calls * 2 + 0.5}

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x"), tf.TensorSpec([None], tf.int32, name="ids")])
    def mix(self, x, ids):
        y = tf.gather(self.table, ids)
        z = tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, tf.tanh(z) * 2 + 0.1), (tf.constant(0), x))[1]
        return {"mixed": tf.reduce_sum(tf.sigmoid(z)[:, None] * tf.exp(y)[None], axis=1)}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "words.txt").write_text("a\nb\n")
    module = Scorer(str(folder / "words.txt"))
    tf.saved_model.save(module, str(folder / "plain"), signatures={"score": module.score, "mix": module.mix})
    (folder / "plain" / "keras_metadata.pb").write_bytes(b"kept")
    return folder / "plain"


@pytest.fixture(scope="module")
def done(source: Path) -> tuple[Path, tf_stitch.Report]:
    goal = source.parent / "stitched"
    return goal, tf_stitch.rewrite_saved_model(source, goal, options=NATIVE)


def entries(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_round_trip(source, done):
    goal, report = done
    assert report.clusters and report.coverage > 0.5
    assert entries(goal) == entries(source)
    assert (goal / "keras_metadata.pb").read_bytes() == b"kept"
    assert (goal / "assets" / "words.txt").read_text() == "a\nb\n"
    assert (goal / "fingerprint.pb").read_bytes() != (source / "fingerprint.pb").read_bytes()
    assert set(report.errors) == {"score/probability", "score/calls", "mix/mixed"}
    assert max(report.errors.values()) < 1e-5
    assert not list(goal.parent.glob(".*"))


def test_state_and_shapes_live_on(source, done):
    plain, stitched = saved_model.load(source), saved_model.load(done[0])
    for name in ("score", "mix"):
        assert plain.signatures[name].structured_input_signature == stitched.signatures[name].structured_input_signature
        shapes = [{k: t.shape.as_list() for k, t in m.signatures[name].structured_outputs.items()}
                  for m in (plain, stitched)]
        assert shapes[0] == shapes[1]
    for batch in (3, 1, 17):
        x = tf.constant(normal(batch, 4))
        want, got = plain.signatures["score"](x=x), stitched.signatures["score"](x=x)
        np.testing.assert_allclose(got["probability"], want["probability"], rtol=1e-5)
        assert got["calls"].numpy() == want["calls"].numpy()
    stitched.table.assign(stitched.table * 0)  # variables are variables still
    np.testing.assert_allclose(stitched.signatures["score"](x=x)["probability"], 1 / 8, rtol=1e-6)


def test_a_stitched_model_can_be_trained_further(source, done):
    def gradient(model):
        x = tf.Variable(normal(3, 4))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model.mix(x, tf.constant([1, 2]))["mixed"] ** 2)
        return tape.gradient(loss, x)

    want, got = gradient(saved_model.load(source)), gradient(saved_model.load(done[0]))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_gradients_that_a_model_brings_along_stay(tmp_path):
    """Every swish of a SavedModel has a function with its gradient, which serving never runs."""
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
        def __call__(self, x):
            return tf.nn.silu(tf.nn.silu(tf.exp(x)) * 2.0) + 1.0

    module = Model()
    tf.saved_model.save(module, str(tmp_path / "plain"))
    report = tf_stitch.rewrite_saved_model(tmp_path / "plain", tmp_path / "stitched", options=NATIVE, verify=False)
    left = [g for g in report.graphs if g.untouched and "gradient" in g.untouched]
    assert len(left) >= 2 and all(g.name.startswith("__inference_internal_grad_fn") and not g.left for g in left)
    assert report.clusters and report.coverage == 1.0
    x = tf.constant(normal(3, 4))
    gradients = []
    for model in (module, tf.saved_model.load(str(tmp_path / "stitched"))):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        gradients.append(tape.gradient(y, x))
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-5)


def test_rewriting_the_rewritten_model_changes_nothing(done, tmp_path):
    tf_stitch.rewrite_saved_model(done[0], tmp_path / "again", options=NATIVE, verify=False)
    assert (tmp_path / "again" / "saved_model.pb").read_bytes() == (done[0] / "saved_model.pb").read_bytes()


def test_graph_of_tensorflow_1(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, (None, 4), name="x")
        w = tf.compat.v1.get_variable("w", initializer=normal(4, 4), use_resource=True)
        y = tf.multiply(tf.exp(tf.matmul(x, w)), 2.0, name="y")
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.saved_model.simple_save(session, str(tmp_path / "plain"), {"x": x}, {"y": y})
    report = tf_stitch.rewrite_saved_model(tmp_path / "plain", tmp_path / "stitched", options=NATIVE)
    assert len(report.clusters) == 1 and max(report.errors.values()) < 1e-5


def test_graph_of_tensorflow_1_as_it_was_trained(tmp_path):
    """Loading looks up what makes variables and what is in loops and branches; training goes on after a rewrite."""
    v1, x = tf.compat.v1, normal(3, 4)
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            given, turns = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.int32, (), "turns")
            w = v1.get_variable("w", (4, 4), use_resource=True)
            y = tf.while_loop(lambda i, t: i < turns, lambda i, t: (i + 1, tf.tanh(t @ w) * 0.5 + t), (0, given))[1]
            y = tf.cond(tf.reduce_sum(given) > 0, lambda: tf.nn.softmax(y * 2 + 1), lambda: tf.tanh(y) - 1)
            y = tf.identity(y, "y")
            v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(y ** 2))
            session.run(v1.global_variables_initializer())
            v1.saved_model.simple_save(session, str(tmp_path / "plain"), {"x": given, "turns": turns}, {"y": y})
    finally:
        v1.enable_control_flow_v2()
    report = tf_stitch.rewrite_saved_model(tmp_path / "plain", tmp_path / "stitched", options=NATIVE)
    assert len(report.clusters) >= 3 and max(report.errors.values()) < 1e-5
    assert all("gradients" not in node for c in report.clusters for node, _ in c.nodes)
    found = {}
    for kind in ("plain", "stitched"):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.saved_model.loader.load(session, ["serve"], str(tmp_path / kind))
            runs = [session.run("y:0", {"x:0": x * sign, "turns:0": n}) for sign, n in ((1, 0), (-1, 3))]
            session.run(v1.get_collection("train_op"), {"x:0": x, "turns:0": 2})
            found[kind] = [*runs, session.run(v1.global_variables()[0])]
            session.run(v1.global_variables_initializer())
    for got, want in zip(found["stitched"], found["plain"], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


class Uneven(tf.Module):
    """A ragged input, and outputs that are ragged and sparse."""

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.float32)])
    def f(self, x):
        even = tf.math.softplus(x.to_tensor()) * 2 + 1
        return {"sum": tf.reduce_sum(even, 1), "ragged": x.with_values(tf.tanh(x.values) * 2 + 1),
                "sparse": tf.sparse.from_dense(even)}


def test_ragged_and_sparse_tensors_are_compared(tmp_path):
    module = Uneven()
    tf.saved_model.save(module, str(tmp_path / "plain"), signatures=module.f)
    report = tf_stitch.rewrite_saved_model(tmp_path / "plain", tmp_path / "stitched", options=NATIVE)
    assert report.clusters and max(report.errors.values()) < 1e-5
    names = {key.split("/")[1] for key in report.errors}
    assert names == {"sum", "ragged[0]", "ragged[1]", "sparse[0]", "sparse[1]", "sparse[2]"}


def test_given_inputs(source, tmp_path):
    np.savez(tmp_path / "in.npz", **{"score/x": normal(2, 4), "mix/x": normal(5, 4), "mix/ids": np.array([7, 0])})
    report = tf_stitch.rewrite_saved_model(source, tmp_path / "a", options=NATIVE, inputs=tmp_path / "in.npz")
    assert len(report.errors) == 3
    with pytest.raises(OptionError, match="lack 'ids' of the signature 'mix'"):
        tf_stitch.rewrite_saved_model(source, tmp_path / "b", options=NATIVE, inputs={"mix/x": normal(5, 4)})
    with pytest.raises(SavedModelError, match="fails on the sample inputs"):
        bad = {"mix/x": normal(5, 4), "mix/ids": np.array([99], np.int32)}
        tf_stitch.rewrite_saved_model(source, tmp_path / "b", options=NATIVE, inputs=bad)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("got, want, error", [
    ([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, 2.1], [1.0, 2.0], 0.05), ([np.nan, 1.0], [np.nan, 1.0], 0.0),
    ([np.inf, 1.0], [np.inf, 1.0], 0.0), ([np.nan, 1.0], [1.0, 1.0], np.inf), ([1.0, 1.0], [np.inf, 1.0], np.inf),
    ([0.5], [0.0], 0.5), ([1.0], [1.0, 1.0], np.inf), ([], [], 0.0)])
def test_relative_error(got, want, error):
    assert saved_model.relative_error(np.array(got), np.array(want)) == pytest.approx(error, rel=1e-6)


def test_relative_error_of_other_types():
    assert saved_model.relative_error(np.array([b"a"], object), np.array([b"b"], object)) == np.inf
    assert saved_model.relative_error(np.array([True]), np.array([True])) == 0
    assert saved_model.relative_error(np.array([1.0], np.float32), np.array([1.0])) == np.inf


def test_tolerance_is_the_element_types(tmp_path):
    def judge(got, want):
        errors: dict = {}
        saved_model._record(errors, "f", {"y": got}, {"y": want})
        saved_model._judge(errors, tmp_path)

    ids = np.array([30_000, 7])
    judge(ids, ids)
    judge(np.float32([1, 1 + 5e-5]), np.float32([1, 1]))
    for got, want in [(ids + [1, 0], ids), (np.array([1, 1 + 5e-5]), np.ones(2)), (ids == 7, ids != 7),
                      (np.float32([1, 1.001]), np.float32([1, 1]))]:
        with pytest.raises(VerifyError, match="Output 'f/y'"):
            judge(got, want)


def test_models_are_compared_without_tf32(monkeypatch):
    """On a GPU, products round to 11 bits else: less than a wrong number, more than the tolerance."""
    seen = []

    def runs(*args):
        seen.append(tf.config.experimental.tensor_float_32_execution_enabled())
        return iter([({"y": np.ones(1)}, {"y": np.ones(1)})])

    monkeypatch.setattr(saved_model, "signatures", lambda folder: {"f": None})
    monkeypatch.setattr(saved_model, "_runs", runs)
    for was in (False, True):
        tf.config.experimental.enable_tensor_float_32_execution(was)
        assert saved_model.compare("a", "b") == {"f/y": 0.0}
        assert tf.config.experimental.tensor_float_32_execution_enabled() is was
    assert seen == [False, False]


# --- bad input ---------------------------------------------------------------------------------------

def rewrite(src, dst, **options):
    return tf_stitch.rewrite_saved_model(src, dst, options=NATIVE, **options)


def test_sources_that_are_none(source, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, text in (("nothing", "does not exist"), ("file", "is a file"), ("empty", "holds no saved_model.pb")):
        with pytest.raises(SavedModelError, match=text):
            rewrite(tmp_path / name, tmp_path / "out")
    shutil.copytree(source, tmp_path / "damaged")
    (tmp_path / "damaged" / "saved_model.pb").write_bytes((source / "saved_model.pb").read_bytes()[:1000])
    with pytest.raises(SavedModelError, match="damaged"):
        rewrite(tmp_path / "damaged", tmp_path / "out")
    (tmp_path / "damaged" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(SavedModelError, match="no graph"):
        rewrite(tmp_path / "damaged", tmp_path / "out")
    shutil.copytree(source, tmp_path / "text")
    (tmp_path / "text" / "saved_model.pb").rename(tmp_path / "text" / "saved_model.pbtxt")
    with pytest.raises(SavedModelError, match="as text"):
        rewrite(tmp_path / "text", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_goals_that_cannot_be(source, tmp_path):
    with pytest.raises(SavedModelError, match="source itself"):
        rewrite(source, source, overwrite=True)
    with pytest.raises(SavedModelError, match="inside the source"):
        rewrite(source, source / "deep")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").write_text("years of work")
    with pytest.raises(SavedModelError, match="exists already"):
        rewrite(source, tmp_path / "there")
    with pytest.raises(SavedModelError, match="no SavedModel"):
        rewrite(source, tmp_path / "there", overwrite=True)
    with pytest.raises(SavedModelError, match="cannot be written"):
        rewrite(source, tmp_path / "there" / "thesis.txt" / "out")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there/thesis.txt", "link"):
        with pytest.raises(SavedModelError, match="is no folder; it is not overwritten"):
            rewrite(source, tmp_path / name, overwrite=True)
    assert (tmp_path / "there" / "thesis.txt").read_text() == "years of work"


def test_overwrite(source, done, tmp_path):
    shutil.copytree(source, tmp_path / "out")
    rewrite(source, tmp_path / "out", overwrite=True, verify=False)
    assert (tmp_path / "out" / "saved_model.pb").read_bytes() == (done[0] / "saved_model.pb").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saved_model.shutil, "copytree", full)
    with pytest.raises(SavedModelError, match="the disk is full"):
        rewrite(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_the_old_model_outlives_a_failed_overwrite(source, tmp_path, monkeypatch, error):
    goal = tmp_path / "out"
    shutil.copytree(source, goal)
    rename = os.rename

    def fails(a, b):
        if Path(b) == goal and Path(a).name != "model":
            raise error
        rename(a, b)

    monkeypatch.setattr(saved_model.os, "rename", fails)
    with pytest.raises(SavedModelError if isinstance(error, OSError) else KeyboardInterrupt):
        rewrite(source, goal, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert entries(goal) == entries(source)


def test_a_model_too_large_to_write(source, tmp_path):
    class Huge:
        def SerializeToString(self, deterministic):
            raise EncodeError("Failed to serialize proto")

    with pytest.raises(SavedModelError, match="larger than the 2 GB"):
        saved_model._fill(Huge(), source, tmp_path / "out")


def test_a_wrong_number_is_found_and_nothing_written(source, tmp_path, monkeypatch):
    monkeypatch.setitem(lower.REGISTRY, "Tanh", lower.REGISTRY["Sin"])
    with pytest.raises(VerifyError, match="Output 'mix/mixed' of the rewritten model differs"):
        rewrite(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_no_signatures(tmp_path):
    module = tf.Module()
    module.f = tf.function(lambda x: tf.exp(x) * 2, input_signature=[tf.TensorSpec([None])])
    module.g = tf.function(lambda x: tf.exp(x) * 3, input_signature=[tf.TensorSpec([None])])
    tf.saved_model.save(module, str(tmp_path / "plain"))
    with pytest.raises(SavedModelError, match="no signature"):
        rewrite(tmp_path / "plain", tmp_path / "out")
    rewrite(tmp_path / "plain", tmp_path / "out", verify=False)
    x = tf.constant([1.0, 2.0])
    np.testing.assert_allclose(saved_model.load(tmp_path / "out").f(x), np.exp([1.0, 2.0]) * 2, rtol=1e-6)


def test_missing_signature(done):
    with pytest.raises(OptionError, match=r"no signature 'serve'; it has 'score', 'mix'|'mix', 'score'"):
        saved_model.signature_of(saved_model.load(done[0]), "serve")


def test_string_inputs_and_unknown_ranks(tmp_path):
    class Words(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words"), tf.TensorSpec(None, name="any")])
        def f(self, words, any):
            lengths = tf.cast(tf.strings.length(words), tf.float32)
            return {"y": tf.exp(lengths * -0.5) * 2, "z": tf.exp(any) * 2, "upper": tf.strings.upper(words)}

    module = Words()
    tf.saved_model.save(module, str(tmp_path / "plain"), signatures=module.f)
    report = rewrite(tmp_path / "plain", tmp_path / "out")
    assert len(report.clusters) == 1 and max(report.errors.values()) < 1e-5
    assert any("rank" in r for r, _, _ in report.reasons())


# --- the command -------------------------------------------------------------------------------------

def test_command_rewrite(source, tmp_path, capsys):
    goal = str(tmp_path / "out")
    page = tmp_path / "report.html"
    assert cli.main(["rewrite", str(source), goal, "--native", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "Stitched" in out and "score/probability" in out and f"Written: {goal}" in out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["rewrite", str(source), goal, "--native"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("tf-stitch: ") and "--overwrite" in captured.err
    assert captured.err.count("\n") == 1 and not captured.out
    assert cli.main(["rewrite", str(source), goal, "--native", "--overwrite", "--no-verify", "-q"]) == 0
    captured = capsys.readouterr()
    assert not captured.out and not captured.err


def test_command_explain_json(source, capsys):
    assert cli.main(["explain", str(source), "--native", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stitched_ops"] > 0 and found["kernels_after"] < found["ops_before"]
    assert any(c["nodes"] for g in found["graphs"] for c in g["clusters"])


@pytest.mark.parametrize("arguments, text", [
    (["explain", "/no/such/folder"], "does not exist"),
    (["explain", "{src}", "--target", "tpu"], "Target 'tpu' is not known"),
    (["explain", "{src}", "--native", "--html", "/no/such/folder/x.html"], "cannot be written"),
    (["rewrite", "{src}", "{out}", "--inputs", "/no/such.npz"], "cannot be read"),
    (["bench", "{src}", "--signature", "serve", "--rounds", "1"], "no signature 'serve'"),
])
def test_command_errors_are_one_sentence(source, tmp_path, capsys, arguments, text):
    filled = [a.format(src=source, out=tmp_path / "out") for a in arguments]
    assert cli.main(filled) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("tf-stitch: ") and text in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_inputs_that_cannot_be_used(source, tmp_path, capsys):
    np.savez(tmp_path / "good.npz", x=np.ones(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:60])
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "single.npy", np.ones(3))
    np.savez(tmp_path / "others.npz", of_another_model=np.ones(3))
    for name, text in (("cut.npz", "no .npz file"), ("empty.npz", "no .npz file"), ("single.npy", "no .npz file"),
                       ("others.npz", "(of_another_model) are of no signature: 'score' takes ")):
        assert cli.main(["rewrite", str(source), str(tmp_path / "out"), "--inputs", str(tmp_path / name)]) == 1
        captured = capsys.readouterr()
        assert text in captured.err and captured.err.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_a_model_without_its_variables_is_named(source, tmp_path):
    shutil.copytree(source, tmp_path / "cut")
    for path in (tmp_path / "cut" / "variables").iterdir():
        path.write_bytes(b"")
    with pytest.raises(SavedModelError, match=f"'{tmp_path / 'cut'}' cannot be loaded"):
        tf_stitch.rewrite_saved_model(tmp_path / "cut", tmp_path / "out", options=NATIVE)


def test_what_does_not_fit_into_memory_is_a_sentence(source, capsys):
    assert cli.main(["bench", str(source), "--signature", "score", "--batch", "9" * 14]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("tf-stitch: There is not enough memory (") and captured.err.count("\n") == 1


def test_files_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    files.write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "old").read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    files.write_whole("/dev/null", b"it is still a device")
    assert not Path("/dev/null").is_file()

    def full(self, data):
        open(self, "wb").close()
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        files.write_whole(tmp_path / "old", b"newer")
    assert (tmp_path / "old").read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 2


def test_command_usage(capsys):
    for arguments in ([], ["rewrite"], ["explain", "x", "--min-ops", "none"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(arguments)
        assert raised.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "option"), [("rewrite", "--html"), ("explain", "--html"), ("bench", "--plot"),
                                                 ("serve-bench", "--plot")])
def test_a_file_that_cannot_be_written_is_told_before_the_work(source, tmp_path, capsys, command, option):
    models = {"rewrite": [str(source), str(tmp_path / "out")], "serve-bench": [f"m={source}"]}
    given = models.get(command, [str(source)])
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "file", "there is no folder")):
        assert cli.main([command, *given, option, str(path)]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"tf-stitch: '{path}' cannot be written: {why}") and not captured.out
    assert not any(tmp_path.iterdir())


def test_importing_is_cheap_and_names_are_there():
    code = "import sys, tf_stitch; assert 'tensorflow' not in sys.modules; tf_stitch.Options; tf_stitch.enable"
    assert os.spawnv(os.P_WAIT, os.sys.executable, [os.sys.executable, "-c", code]) == 0
    assert all(hasattr(tf_stitch, name) for name in tf_stitch.__all__)
    with pytest.raises(AttributeError):
        tf_stitch.nothing  # noqa: B018


def test_nothing_stitched_is_said(source, tmp_path, capsys):
    assert cli.main(["rewrite", str(source), str(tmp_path / "out"), "--native", "--no-verify", "-q",
                     "--min-ops", "1000"]) == 0
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("tf-stitch: Nothing was stitched: ") and captured.err.count("\n") == 1


@pytest.mark.nvcc
@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="the kernels run on a GPU")
def test_a_gpu_model_verified_without_a_gpu_says_so(source, tmp_path):
    report = tf_stitch.rewrite_saved_model(source, tmp_path / "out", target="cuda:sm_90")
    assert report.clusters and "no GPU here" in " ".join(report.notes) and report.to_dict()["notes"] == report.notes


def test_options_from_lists():
    options = tf_stitch.Options(levels=[], keep=["a"], skip_ops=iter(["Tanh"]))
    assert hash(options) == hash(tf_stitch.Options(levels=(), keep=("a",), skip_ops=("Tanh",)))


@pytest.mark.nvcc
def test_a_gpu_that_no_code_can_be_built_for_is_an_error(source, tmp_path, capsys):
    assert cli.main(["rewrite", str(source), str(tmp_path / "out"), "--target", "cuda:sm_999"]) == 1
    message = capsys.readouterr().err
    assert "'cuda:sm_999' is none that" in message and "sm_90, " in message and message.count("\n") == 1
    for call in (lambda o: tf_stitch.rewrite_graph_def(tf.Graph().as_graph_def(), options=o), tf_stitch.enable):
        with pytest.raises(tf_stitch.OptionError, match="'cuda:sm_01' is none that"):
            call(tf_stitch.Options(target="cuda:sm_01"))
    assert not (tmp_path / "out").exists() and not tf_stitch.is_enabled()


def test_a_gpu_that_there_is_no_compiler_for_is_an_error(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_STITCH_NVCC", "no-such-nvcc")
    with pytest.raises(tf_stitch.CompileError, match="'no-such-nvcc'"):
        tf_stitch.rewrite_saved_model(source, tmp_path / "out", target="cuda:sm_90")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options, says", [
    (lambda: tf_stitch.Options(min_ops=-1), "at least 1"),
    (lambda: tf_stitch.Options(min_ops=True), "must be an integer"),
    (lambda: tf_stitch.Options(shared_bytes=-5), "at least 0"),
    (lambda: tf_stitch.Options(skip_ops="Tanh"), "takes a tuple of strings"),
    (lambda: tf_stitch.Options(keep=("a", 3)), "takes a tuple of strings"),
    (lambda: tf_stitch.Options(superkernels="no"), "must be True or False"),
    (lambda: tf_stitch.Options(autotune=None), "must be True or False"),
    (lambda: tf_stitch.Options(keep=None), "'keep' is None; it takes a tuple of strings"),
    (lambda: tf_stitch.Options(target=3), "Target '3' is not known"),
    (lambda: tf_stitch.Options(target="cuda:sm_9"), "Target 'cuda:sm_9' is not known"),
    (lambda: tf_stitch.enable(options={"min_ops": 3}), "not a dict"),
    (lambda: tf_stitch.enable({"min_ops": 3}), "not a dict"),
])
def test_options_that_cannot_be(options, says):
    with pytest.raises(tf_stitch.OptionError, match=says):
        options()
    assert not tf_stitch.is_enabled()
