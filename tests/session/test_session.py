"""StitchSession: answers, versions, limits, ends."""
from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import os
import pickle
import signal
import tempfile
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tf_stitch import warmup
from tf_stitch.errors import OptionError, SavedModelError
from tf_stitch.saved_model import read
from tf_stitch.serving import garbage, scheduler, sources
from tf_stitch.serving.dispatcher import Dispatcher, Request
from tf_stitch.serving.graphs import place, shorten
from tf_stitch.serving.model import ALIGNMENT, LARGE, _aligned
from tf_stitch.serving.sources import save_function, stitched_copy

from .marks import BOTH
from .support import NATIVE, WIDTH, Gate, check, rows, scaled, soon, want, workers


def saved(function, folder):
    module = tf.Module()
    module.f = function
    module.v = list(function.get_concrete_function().graph.variables)
    tf.saved_model.save(module, str(folder), signatures=function)
    return folder


# --- answers ----------------------------------------------------------------------------------------

@BOTH
def test_function(session):
    session.add("a", scaled(2.0), slo_ms=1000)
    x = rows(0, 3)
    check(session.run("a", {"x": x}), 2.0, x)
    check(session.run("a", x), 2.0, x)  # of a single input, the value itself
    check(session.run("a", x.astype(np.float64).tolist()), 2.0, x)
    check(session.submit("a", {"x": x}).result(10), 2.0, x)
    assert session.stats()["tenants"]["a"]["answered"] == 4
    assert session.signature("a") == {"x": tf.TensorSpec([None, WIDTH], tf.float32)}


def test_what_is_served_is_stitched(session):
    session.add("stitched", scaled(2.0))
    session.add("plain", scaled(2.0), stitch=False)
    ops = [{n.op for f in session.v1(name).graph.as_graph_def().library.function for n in f.node_def}
           for name in ("stitched", "plain")]
    assert "StitchedProgram" in ops[0]
    assert "StitchedProgram" not in ops[1]
    x = rows(1, 5)
    np.testing.assert_allclose(session.run("stitched", x)["y"], session.run("plain", x)["y"], rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("stitch", [True, False])
def test_denormals_are_zero_as_in_tensorflows_threads(session, stitch):
    session.add("a", tf.function(lambda x: {"y": tf.abs(x) * 2 + x}, input_signature=[tf.TensorSpec([None, WIDTH])]),
                stitch=stitch)
    for rows_of_it in (1, 2):
        x = np.full((rows_of_it, WIDTH), 2_000_000, np.uint32).view(np.float32)
        assert not session.run("a", x)["y"].view(np.uint32).any()


def test_saved_model_is_stitched_once(session, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path / "cache"))
    folder = saved(scaled(3.0), tmp_path / "model")
    session.add("a", folder)
    copies = list((tmp_path / "cache" / "models").iterdir())
    session.add("b", str(folder))
    assert list((tmp_path / "cache" / "models").iterdir()) == copies and len(copies) == 1
    tf_stitch.rewrite_saved_model(folder, tmp_path / "rewritten", options=NATIVE)
    session.add("c", tmp_path / "rewritten")
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1
    for name in "abc":
        check(session.run(name, rows(2)), 3.0, rows(2))


def test_copies_that_were_not_asked_for_lately_go(session, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TF_STITCH_CACHE_BYTES", "1")
    session.add("a", saved(scaled(3.0), tmp_path / "a"))
    (first,) = (tmp_path / "cache" / "models").iterdir()
    session.add("b", saved(scaled(5.0), tmp_path / "b"))
    assert len(list(first.parent.iterdir())) == 2  # another process may be loading the first one
    os.utime(first, (1000, 1000))
    session.add("c", saved(scaled(7.0), tmp_path / "c"))
    assert len(list(first.parent.iterdir())) == 2 and not first.exists()
    for name, scale in zip("abc", (3.0, 5.0, 7.0), strict=True):
        check(session.run(name, rows(2)), scale, rows(2))
    os.utime(next(first.parent.iterdir()), (1000, 1000))
    session.add("d", tmp_path / "a")
    assert first.exists() and len(list(first.parent.iterdir())) == 2


@pytest.mark.parametrize("damage", [
    lambda f: f.write_bytes(f.read_bytes()[:-9]), lambda f: f.write_bytes(b""), lambda f: f.unlink(),
    lambda f: f.write_bytes(bytes([*f.read_bytes()[:-9], f.read_bytes()[-9] ^ 1, *f.read_bytes()[-8:]]))])
@pytest.mark.parametrize("file", ["saved_model.pb", "variables/variables.data-00000-of-00001", "tf_stitch.sha256"])
def test_a_damaged_copy_in_the_cache_is_made_again(session, tmp_path, monkeypatch, file, damage):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path / "cache"))
    folder = saved(scaled(3.0), tmp_path / "model")
    session.add("a", folder)
    (copy,) = (tmp_path / "cache" / "models").iterdir()
    whole = {f: f.read_bytes() for f in copy.rglob("*") if f.is_file()}
    damage(copy / file)
    session.add("b", folder)
    assert {f: f.read_bytes() for f in copy.rglob("*") if f.is_file()}.keys() == whole.keys()
    assert (copy / "variables/variables.index").read_bytes() == whole[copy / "variables/variables.index"]
    assert [f.name for f in copy.parent.iterdir()] == [copy.name]
    check(session.run("b", rows(2)), 3.0, rows(2))


def test_a_damaged_copy_may_go_while_it_is_looked_at(tmp_path, monkeypatch):
    """Several processes that find one damaged put it aside, and one of them comes first."""
    made, goal, is_whole = tmp_path / "made", tmp_path / "goal", sources._is_whole
    for folder in (made, goal):
        folder.mkdir()
        (folder / "file").write_text("contents")

    def gone_then(copy):
        found = is_whole(copy)
        goal.rename(tmp_path / "aside of another")
        return found

    monkeypatch.setattr(sources, "_is_whole", gone_then)
    sources._put(made, goal, tmp_path / "aside")
    assert (goal / "file").read_text() == "contents" and not made.exists()


def test_a_cache_folder_that_cannot_be_written(session, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path / "file"))
    session.add("a", saved(scaled(3.0), tmp_path / "model"))
    check(session.run("a", rows(2)), 3.0, rows(2))


@BOTH
def test_several_inputs_types_and_signatures(session, tmp_path):
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x"),
                                      tf.TensorSpec([None], tf.int32, name="k"),
                                      tf.TensorSpec([], tf.string, name="word")])
        def mix(self, x, k, word):
            return {"sum": tf.reduce_sum(tf.tanh(x) * 2.0, 1) + tf.cast(k, tf.float32), "word": word + "!"}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.bfloat16, name="h")])
        def half(self, h):
            return {"h": tf.cast(h, tf.float32) * 2.0 + 1.0}

    module = Model()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"mix": module.mix, "half": module.half})
    session.add("m", tmp_path / "m", signature="mix")
    answer = session.run("m", {"x": np.ones((2, 2)), "k": [1, 2], "word": "hi"})
    np.testing.assert_allclose(answer["sum"], 4 * np.tanh(1.0) + np.array([1, 2]), rtol=1e-6)
    assert answer["word"] == b"hi!"
    np.testing.assert_allclose(session.run("m", np.array([1.5], np.float32), signature="half")["h"], [4.0])
    with pytest.raises(OptionError, match="takes 'k', 'word', 'x', and was given x"):
        session.run("m", {"x": np.ones((2, 2), np.float32)})
    with pytest.raises(OptionError, match=r"shape \[2, 3\].*\[\?, 2\]"):
        session.run("m", {"x": np.ones((2, 3)), "k": [1], "word": "a"})
    with pytest.raises(OptionError, match="'k' is of float64, and the signature takes int32"):
        session.run("m", {"x": np.ones((1, 2)), "k": [1.5], "word": "a"})
    with pytest.raises(OptionError, match="'word' is of int64, and the signature takes string"):
        session.run("m", {"x": np.ones((1, 2)), "k": [1], "word": 3})
    with pytest.raises(OptionError, match="'k' is of strings, and the signature takes int32"):
        session.run("m", {"x": np.ones((1, 2)), "k": ["1"], "word": "a"})
    with pytest.raises(OptionError, match="values that int32 cannot"):
        session.run("m", {"x": np.ones((1, 2)), "k": [2**40], "word": "a"})
    with pytest.raises(OptionError, match="no signature 'other'; it has half, mix"):
        session.run("m", {}, signature="other")


@BOTH
def test_many_threads_and_tenants(session):
    factors = {"a": 1.0, "b": 2.0, "c": 3.0}
    for name, factor in factors.items():
        session.add(name, scaled(factor), verify=False)
    failures = []

    def client(seed):
        rng = np.random.default_rng(seed)
        for i in range(40):
            name, x = "abc"[rng.integers(3)], rows(seed * 1000 + i, int(rng.integers(1, 5)))
            try:
                check(session.run(name, x), factors[name], x)
            except AssertionError as error:
                failures.append(error)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    counts = session.stats()["tenants"]
    assert sum(c["answered"] for c in counts.values()) == sum(c["submitted"] for c in counts.values()) == 320
    assert session.stats()["outstanding"] == 0


@BOTH
def test_asyncio(session):
    session.add("a", scaled(2.0))

    async def client():
        xs = [rows(i) for i in range(30)]
        return xs, await asyncio.gather(*(session.arun("a", {"x": x}) for x in xs))

    for x, answer in zip(*asyncio.run(client())):
        check(answer, 2.0, x)


def test_cancelling_an_await_cancels_the_request(session, gate):
    session.add("slow", gate.function, warmup=False, verify=False, stitch=False)

    async def client():
        task = asyncio.ensure_future(session.arun("slow", rows(0)))
        await asyncio.to_thread(gate.arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(client())
    gate.open.set()
    assert session.drain(10)
    assert session.stats()["tenants"]["slow"]["cancelled"] == 1


def test_v1_face(session):
    session.add("a", scaled(2.0))
    face, x = session.v1("a"), rows(3, 2)
    endpoint = session._tenants["a"].model.endpoint()
    fetch, feed = endpoint._fetches[0], endpoint.inputs[0].tensor
    np.testing.assert_allclose(face.run(fetch, {feed: x}), want(2.0, x), rtol=1e-5, atol=1e-6)
    tensor, place_ = face.graph.get_tensor_by_name(fetch), face.graph.get_tensor_by_name(feed)
    found = face.run({"y": tensor, "again": [tensor]}, feed_dict={place_: x})
    np.testing.assert_allclose(found["again"][0], want(2.0, x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.run([tensor], {place_: x})[0], want(2.0, x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.run(tensor, feed_dict={place_: x}), want(2.0, x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(face.make_callable(tensor, [place_])(x), want(2.0, x), rtol=1e-5, atol=1e-6)
    session.swap("a", scaled(5.0))
    np.testing.assert_allclose(face.run(tensor, {place_: x}), want(5.0, x), rtol=1e-5, atol=1e-6)  # the new version
    with pytest.raises(OptionError, match="tensors of a tenant's graph"):
        session.run(tf.Graph())


# --- versions ---------------------------------------------------------------------------------------

@BOTH
def test_swap_under_load(session):
    session.add("a", scaled(1.0))
    stop, bad, seen = threading.Event(), [], set()

    def answered(factor):  # clients on a busy machine may not have come to run yet
        until = time.monotonic() + 60
        while factor not in seen and not bad and time.monotonic() < until:
            time.sleep(0.001)

    def client(seed):
        x = rows(seed)
        while not stop.is_set():
            y = session.run("a", x)["y"]
            fits = [f for f in (1.0, 2.0, 3.0) if np.allclose(y, want(f, x), rtol=1e-5, atol=1e-6)]
            seen.update(fits)
            if len(fits) != 1:
                bad.append(y)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    versions = [session.version("a")]
    answered(1.0)
    for factor in (2.0, 3.0):
        session.swap("a", scaled(factor))
        versions.append(session.version("a"))
        check(session.run("a", rows(9)), factor, rows(9))  # what is submitted after swap() runs the new version
        answered(factor)
    stop.set()
    for t in threads:
        t.join()
    assert not bad and seen == {1.0, 2.0, 3.0} and len(set(versions)) == 3


@BOTH
def test_requests_end_on_the_version_they_came_for(session, gate):
    session.add("a", gate.function, warmup=False, verify=False, stitch=False, max_in_flight=1)
    old = session._tenants["a"].model
    x = rows(4)
    running = session.submit("a", x)
    gate.arrived()
    waiting = session.submit("a", x)
    session.swap("a", scaled(2.0))
    newer = session.submit("a", x)
    assert old.outstanding == 2 and not running.done()
    gate.open.set()
    for future in (running, waiting):
        np.testing.assert_allclose(future.result(10)["y"], x * 2 + 1, rtol=1e-6)
    check(newer.result(10), 2.0, x)
    assert session.drain(10)
    with pytest.raises(RuntimeError, match="closed"):
        old.session.run([])  # given back once its last request was answered


def test_failed_swap_leaves_the_old_version(session, tmp_path):
    session.add("a", scaled(2.0))
    with pytest.raises(SavedModelError, match="does not exist"):
        session.swap("a", tmp_path / "none")
    with pytest.raises(OptionError, match="no types"):
        session.swap("a", lambda x: x + 1)
    check(session.run("a", rows(5)), 2.0, rows(5))
    assert session.version("a") == session.stats()["tenants"]["a"]["version"]


def _pair(x, n):
    return {"y": x * tf.cast(n, tf.float32)}


@pytest.mark.parametrize(("function", "signature", "why"), [
    (lambda x: {"y": x}, [tf.TensorSpec([None, 2])], "it takes 'x', and the old one 'n', 'x'"),
    (_pair, [tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int64)],
     "its input 'n' is int64 \\[\\], and the old one's int32 \\[\\]"),
    (_pair, [tf.TensorSpec([4, 2]), tf.TensorSpec([], tf.int32)],
     "its input 'x' is float32 \\[4, 2\\], and the old one's float32 \\[\\?, 2\\]"),
    (_pair, [tf.TensorSpec([None, 2, 1]), tf.TensorSpec([], tf.int32)], "its input 'x' is float32 \\[\\?, 2, 1\\]"),
    (lambda x, n: {"z": x}, [tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)],
     "its output 'y' is missing, and the old one's of float32"),
    (lambda x, n: {"y": n}, [tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)],
     "its output 'y' is of int32, and the old one's of float32"),
])
def test_a_version_that_does_not_fit_the_requests_is_refused(session, function, signature, why):
    session.add("a", _pair, input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)], stitch=False)
    with pytest.raises(OptionError, match=f"cannot take the old one's requests: of signature 'serving_default', {why}"):
        session.swap("a", function, input_signature=signature, stitch=False)
    np.testing.assert_array_equal(session.run("a", {"x": np.ones((3, 2)), "n": 2})["y"], np.full((3, 2), 2.0))


def test_a_version_that_takes_more_and_gives_more_is_taken(session, tmp_path):
    session.add("a", _pair, input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)], stitch=False)
    more = [tf.TensorSpec([None, None]), tf.TensorSpec(None, tf.int32)]
    session.swap("a", lambda x, n: {**_pair(x, n), "z": x}, input_signature=more, stitch=False)
    assert set(session.run("a", {"x": np.ones((3, 5)), "n": 2})) == {"y", "z"}

    module = tf.Module()
    module.one = tf.function(lambda x: {"y": x}, input_signature=[tf.TensorSpec([2], name="x")])
    module.two = tf.function(lambda x: {"y": x + 1}, input_signature=[tf.TensorSpec([2], name="x")])
    tf.saved_model.save(module, str(tmp_path / "both"), signatures={"one": module.one, "two": module.two})
    tf.saved_model.save(module, str(tmp_path / "first"), signatures={"one": module.one})
    session.add("b", tmp_path / "both", signature="one", stitch=False)
    with pytest.raises(OptionError, match="has no signature 'two', which the old one has"):
        session.swap("b", tmp_path / "first", stitch=False)
    session.swap("b", tmp_path / "both", signature="two", stitch=False)  # the default one becomes another
    np.testing.assert_array_equal(session.run("b", np.zeros(2))["y"], np.ones(2))


def test_function_with_given_signature(session):
    session.add("f", lambda x, n: (tf.tanh(x) * 2.0 + 1.0, x * n), input_signature=[
        tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.float32)])
    answer = session.run("f", {"x": [[0.0, 1.0]], "n": 3})
    np.testing.assert_allclose(answer["output_0"], [[1.0, np.tanh(1.0) * 2 + 1]], rtol=1e-6)
    np.testing.assert_allclose(answer["output_1"], [[0.0, 3.0]])


@BOTH
def test_remove(session, gate):
    session.add("a", gate.function, warmup=False, verify=False, stitch=False)
    future = session.submit("a", rows(0))
    gate.arrived()
    assert session.remove("a", timeout_s=0.01) is False
    with pytest.raises(OptionError, match="no tenant 'a'; there are none"):
        session.submit("a", rows(0))
    gate.open.set()
    np.testing.assert_allclose(future.result(10)["y"], rows(0) * 2 + 1, rtol=1e-6)
    session.add("a", scaled(3.0))  # the name is free again
    check(session.run("a", rows(0)), 3.0, rows(0))
    assert session.remove("a") is True
    assert session.tenants == []


def test_keras_model(session):
    image = tf.keras.Input((4,), name="x")
    model = tf.keras.Model(image, tf.keras.layers.Dense(3, "tanh")(image))
    session.add("k", model)
    x = np.ones((2, 4), np.float32)
    (answer,) = session.run("k", x).values()
    np.testing.assert_allclose(answer, model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stitch", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["part of a module", "the model"])
def test_a_keras_model_that_tensorflow_saved(session, tmp_path, inside, stitch):
    # tf.saved_model.save gives each of its variables two handles: functions read one, the checkpoint fills the other.
    image = tf.keras.Input((4,), name="x")
    model = tf.keras.Model(image, tf.keras.layers.Dense(3, "tanh")(tf.keras.layers.LayerNormalization()(image)))
    function = tf.function(model, input_signature=[tf.TensorSpec([None, 4], name="x")])
    module = tf.Module()
    module.model = module.same = model
    tf.saved_model.save(module if inside else model, os.fspath(tmp_path / "m"), function.get_concrete_function())
    session.add("k", tmp_path / "m", stitch=stitch)
    x = rows(2)[:, :4]
    expected = model(x).numpy()
    (answer,) = session.run("k", x).values()
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)
    tf_stitch.rewrite_saved_model(tmp_path / "m", tmp_path / "s", options=NATIVE)
    with tf.Graph().as_default(), tf.compat.v1.Session() as plain:  # as TensorFlow Serving loads it
        loaded = tf.compat.v1.saved_model.load(plain, ["serve"], os.fspath(tmp_path / "s"))
        signature = loaded.signature_def["serving_default"]
        (given,), (fetched,) = signature.inputs.values(), signature.outputs.values()
        np.testing.assert_allclose(plain.run(fetched.name, {given.name: x}), expected, rtol=1e-5, atol=1e-6)


# --- warm-up ----------------------------------------------------------------------------------------

def test_recorded_warmup_requests(session, tmp_path):
    folder = saved(scaled(2.0), tmp_path / "m")
    tf_stitch.rewrite_saved_model(folder, tmp_path / "s", options=NATIVE, warmup=True)
    found = warmup.recorded(tmp_path / "s")
    assert [(name, {k: v.shape for k, v in inputs.items()}) for name, inputs in found] == [
        ("serving_default", {"x": (b, WIDTH)}) for b in (1, 3, 17)]
    assert all(inputs["x"].dtype == np.float32 for _, inputs in found)
    ran = tf_stitch.runtime.counters().stitched
    session.add("a", tmp_path / "s")
    assert tf_stitch.runtime.counters().stitched - ran == 9
    assert warmup.recorded(folder) == []


def test_damaged_warmup_requests(tmp_path):
    path = tmp_path / warmup.FILE
    path.parent.mkdir()
    for record in (b"\x32\x7f", b"\x0f", b"\x32\x02\x0a\xff"):
        with tf.io.TFRecordWriter(str(path)) as out:
            out.write(record)
        with pytest.raises(SavedModelError, match="cannot be read"):
            warmup.recorded(tmp_path)
    path.write_bytes(b"no record" * 20)
    with pytest.raises(SavedModelError, match="cannot be read"):
        warmup.recorded(tmp_path)


def test_given_warmup_and_none(session):
    ran = tf_stitch.runtime.counters().stitched
    session.add("a", scaled(2.0), warmup=[{"x": rows(0, 2)}, rows(1)], verify=False)
    assert tf_stitch.runtime.counters().stitched - ran == 6
    session.add("b", scaled(2.0), warmup=False, verify=False)
    assert tf_stitch.runtime.counters().stitched - ran == 6
    with pytest.raises(OptionError, match="shape"):
        session.add("c", scaled(2.0), warmup=[np.ones((1, WIDTH + 1))])
    assert session.tenants == ["a", "b"]


# --- errors, limits, order --------------------------------------------------------------------------

@BOTH
def test_errors_fail_only_their_request(session):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, name="i")])
    def take(i):
        return {"y": tf.tanh(tf.gather(tf.constant([1.0, 2.0, 3.0]), i, name="take")) * 2.0}

    session.add("take", take)
    session.add("a", scaled(2.0))
    futures = [session.submit("take", np.array([i % 4], np.int32)) for i in range(40)]
    others = [session.submit("a", rows(i)) for i in range(40)]
    for i, future in enumerate(futures):
        if i % 4 == 3:
            with pytest.raises(tf.errors.InvalidArgumentError, match="take"):
                future.result(10)
        else:
            np.testing.assert_allclose(future.result(10)["y"], [np.tanh(i % 4 + 1.0) * 2], rtol=1e-5)
    for i, future in enumerate(others):
        check(future.result(10), 2.0, rows(i))
    counts = session.stats()["tenants"]
    assert (counts["take"]["failed"], counts["take"]["answered"], counts["a"]["failed"]) == (10, 30, 0)


def test_full_queue_rejects(session, gate):
    session.add("a", gate.function, warmup=False, verify=False, stitch=False, max_queue=3)
    futures = [session.submit("a", rows(i)) for i in range(3)]
    with pytest.raises(tf.errors.ResourceExhaustedError, match="'a' has 3 requests without an answer"):
        session.submit("a", rows(9))
    gate.open.set()
    for i, future in enumerate(futures):
        np.testing.assert_allclose(future.result(10)["y"], rows(i) * 2 + 1, rtol=1e-6)
    counts = session.stats()["tenants"]["a"]
    assert (counts["rejected"], counts["submitted"], counts["answered"]) == (1, 3, 3)
    session.run("a", rows(0))  # there is room again


@BOTH
def test_timeouts(session, gate):
    session.add("a", gate.function, warmup=False, verify=False, stitch=False, max_in_flight=1, slo_ms=5)
    running = session.submit("a", rows(0))
    gate.arrived()
    waiting = session.submit("a", rows(1), timeout_ms=5)
    time.sleep(0.02)
    gate.open.set()
    running.result(10)
    with pytest.raises(tf.errors.DeadlineExceededError, match="over before it ran"):
        waiting.result(10)
    assert session.run("a", rows(0), timeout_ms=5000)["y"].shape == (1, WIDTH)
    counts = session.stats()["tenants"]["a"]
    assert counts["expired"] == 1 and counts["late"] >= 1  # the first one took longer than its SLO


@pytest.mark.parametrize("where", ["its tenant's queue", "the threads' queue"])
def test_a_timeout_ends_a_request_that_waits(session, gate, where):
    few = {"max_in_flight": 1} if where == "its tenant's queue" else {}
    session.add("a", gate.function, warmup=False, verify=False, stitch=False, **few)
    running = [session.submit("a", rows(0)) for _ in range(1 if few else 4)]  # as many as there are threads
    for _ in running:
        gate.arrived()
    ended = threading.Semaphore(0)
    slow = session.submit("a", rows(1), timeout_ms=60_000)
    waiting = [session.submit("a", rows(i), timeout_ms=ms) for i, ms in enumerate((300.0, 50.0, 0.0, 50.0))]
    waiting[0].add_done_callback(lambda _: ended.release())
    waiting[3].cancel()
    began = time.monotonic()
    for future in waiting[:3]:
        with pytest.raises(tf.errors.DeadlineExceededError, match="over before it ran"):
            future.result(10)
    assert 0.2 < time.monotonic() - began < 5 and ended.acquire(timeout=5)
    assert not slow.done() and not any(f.done() for f in running)
    gate.open.set()
    for future in (*running, slow):
        future.result(10)
    assert session.drain(10) and not ended.acquire(blocking=False)
    counts = session.stats()["tenants"]["a"]
    assert (counts["expired"], counts["cancelled"], counts["outstanding"]) == (3, 1, 0)
    assert counts["answered"] == len(running) + 1
    assert session._dispatcher.outstanding == 0 and not session._dispatcher._full


def test_a_callback_of_a_request_that_expired_may_end_its_session(gate):
    before = workers()
    session = tf_stitch.StitchSession(coalesce=False, threads=2, reserve=0, options=NATIVE)
    session.add("a", gate.function, warmup=False, verify=False, stitch=False, max_in_flight=1)
    running, ended = session.submit("a", rows(0)), []
    gate.arrived()
    session.submit("a", rows(1), timeout_ms=20).add_done_callback(lambda _: ended.append(session.close(20)))
    assert soon(lambda: session._closed)
    gate.open.set()
    running.result(10)
    assert soon(lambda: ended == [True]) and soon(lambda: workers() == before)
    assert session._dispatcher.outstanding == 0


@BOTH
def test_cancellation(session, gate):
    session.add("a", gate.function, warmup=False, verify=False, stitch=False, max_in_flight=1)
    running, waiting, kept = (session.submit("a", rows(i)) for i in range(3))
    gate.arrived()
    assert running.cancel() and waiting.cancel()
    with pytest.raises(CancelledError):
        running.result(1)
    gate.open.set()
    np.testing.assert_allclose(kept.result(10)["y"], rows(2) * 2 + 1, rtol=1e-6)
    assert not kept.cancel()  # too late
    assert session.drain(10)
    counts = session.stats()["tenants"]["a"]
    assert (counts["cancelled"], counts["answered"], counts["outstanding"]) == (2, 1, 0)
    assert not gate.entered.acquire(blocking=False) or not gate.entered.acquire(blocking=False)  # one did not run


def test_best_effort_gives_way(gate):
    with tf_stitch.StitchSession(coalesce=False, threads=3, reserve=1, options=NATIVE) as session:
        session.add("batch", gate.function, priority="best_effort", warmup=False, verify=False, stitch=False)
        session.add("a", scaled(2.0), slo_ms=100)
        slow = [session.submit("batch", rows(i)) for i in range(6)]
        gate.arrived()
        gate.arrived()
        check(session.run("a", rows(0)), 2.0, rows(0))  # on the thread that best effort left free
        assert session.stats()["running"] == 2 and not any(f.done() for f in slow)
        gate.open.set()
        wait(slow, 10)
        assert all(f.done() for f in slow)


@pytest.mark.parametrize("beside", [0, 1, 2])
def test_best_effort_begins_when_nobody_else_is_there(gate, beside):
    filler = Gate()
    with tf_stitch.StitchSession(coalesce=False, threads=8, reserve=2, beside=beside) as session:
        plain = {"warmup": False, "verify": False, "stitch": False}
        session.add("batch", filler.function, priority="best_effort", **plain)
        session.add("a", gate.function, **plain)
        urgent = [session.submit("a", rows(0)) for _ in range(2)]
        gate.arrived()
        gate.arrived()
        futures = [session.submit("batch", rows(i)) for i in range(5)]
        for _ in range(beside):
            filler.arrived()
        assert not filler.entered.acquire(timeout=0.2)
        gate.open.set()
        wait(urgent, 10)
        for _ in range(5 - beside):
            filler.arrived()
        filler.open.set()
        assert not wait(futures, 10).not_done


def test_best_effort_does_not_wait_for_ever(gate, monkeypatch):
    monkeypatch.setattr("tf_stitch.serving.dispatcher.LONGEST_WAIT_S", 0.3)
    filler = Gate()
    with tf_stitch.StitchSession(coalesce=False, threads=4, reserve=1, beside=0) as session:
        plain = {"warmup": False, "verify": False, "stitch": False}
        session.add("batch", filler.function, priority="best_effort", **plain)
        session.add("a", gate.function, **plain)
        session.add("b", scaled(2.0), **plain)
        first = session.submit("a", rows(0))
        gate.arrived()
        waiting = session.submit("batch", rows(1))
        check(session.run("b", rows(0)), 2.0, rows(0))
        assert not filler.entered.acquire(timeout=0.4)  # one of the others runs
        check(session.run("b", rows(0)), 2.0, rows(0))
        filler.arrived()  # although it still does
        assert not first.done()
        filler.open.set()
        gate.open.set()
        assert not wait([first, waiting], 10).not_done


def test_no_thread_is_woken_for_what_may_not_run(gate, monkeypatch):
    woken = []
    wake = Dispatcher._wake_one
    monkeypatch.setattr(Dispatcher, "_wake_one", lambda self: woken.append(0) or wake(self))
    with tf_stitch.StitchSession(coalesce=False, threads=8, reserve=6) as session:
        session.add("batch", gate.function, priority="best_effort", warmup=False, verify=False, stitch=False)
        futures = [session.submit("batch", rows(i)) for i in range(2)]
        gate.arrived()
        gate.arrived()
        woken.clear()
        futures += [session.submit("batch", rows(i)) for i in range(20)]
        assert not woken
        gate.open.set()
        assert not wait(futures, 10).not_done


def test_a_request_wakes_one_thread(gate):
    """Whoever comes first for one of two sees the other, for which somebody is on the way."""
    class Woken(list):
        count = 0

        def pop(self):
            self.count += 1
            return super().pop()

    with tf_stitch.StitchSession(coalesce=False, threads=8) as session:
        session.add("a", gate.function, warmup=False, verify=False, stitch=False)
        dispatcher, tenant = session._dispatcher, session._tenants["a"]
        assert soon(lambda: not session.stats()["running"])
        endpoint = tenant.model.endpoint()
        requests = [Request(tenant, tenant.model, endpoint, endpoint.bind(rows(i)), None) for i in range(2)]
        with dispatcher._lock:
            dispatcher._idle = woken = Woken(dispatcher._idle)
            for request in requests:
                dispatcher._take(request)
        gate.arrived()
        gate.arrived()
        assert woken.count == 2
        gate.open.set()
        assert not wait([request.future for request in requests], 10).not_done


def test_few_threads_serve_few_requests():
    """The one that was busy last is woken first: what it needs is in its core's caches."""
    names = set()
    with tf_stitch.StitchSession(coalesce=False, threads=32, options=NATIVE) as session:
        session.add("a", scaled(2.0), verify=False)
        for i in range(100):
            future = session.submit("a", rows(i))
            future.add_done_callback(lambda _: names.add(threading.current_thread().name))
            future.result(20)
    assert len(names) < 16


def test_earliest_deadline_first(gate):
    with tf_stitch.StitchSession(coalesce=False, threads=1, reserve=0) as session:
        session.add("block", gate.function, warmup=False, verify=False, stitch=False)
        for name, slo in (("late", None), ("soon", 50), ("later", 500)):
            session.add(name, scaled(2.0), slo_ms=slo, verify=False, stitch=False)
        session.submit("block", rows(0))
        gate.arrived()
        order = []
        futures = []
        for name in ("late", "later", "soon"):
            future = session.submit(name, rows(1))
            future.add_done_callback(lambda _, name=name: order.append(name))
            futures.append(future)
        gate.open.set()
        wait(futures, 10)
        assert order == ["soon", "later", "late"]


@pytest.mark.parametrize(("options", "message"), [
    ({"slo_ms": 0}, "'slo_ms' is 0"), ({"priority": "low"}, "'low' is not known"), ({"weight": -1}, "'weight'"),
    ({"max_queue": 0}, "'max_queue'"), ({"max_in_flight": 0}, "'max_in_flight'"),
    ({"slo_ms": float("inf")}, "'slo_ms' is inf; it must be a number above 0, and finite"),
    ({"slo_ms": float("nan")}, "'slo_ms' is nan"), ({"slo_ms": "20"}, "'slo_ms' is '20'"),
    ({"max_queue": 0.5}, "'max_queue' is 0.5; it must be a whole number"), ({"warmup": 3}, "'warmup' is 3"),
    ({"input_signature": [tf.TensorSpec([3])]}, "does not take arguments")])
def test_options(session, options, message):
    with pytest.raises(OptionError, match=message):
        session.add("a", scaled(2.0), **options)
    assert session.tenants == []


@pytest.mark.parametrize("name", ["", "a\0b", 3, "\ud800"])
def test_names_that_the_scheduler_could_not_tell_apart(session, name):
    with pytest.raises(OptionError, match="text without NUL"):
        session.add(name, scaled(2.0))


@BOTH
def test_options_that_are_numpys_numbers(session):
    session.add("a", scaled(2.0), slo_ms=np.float32(1000), weight=np.int64(2), max_queue=np.int32(5),
                max_in_flight=np.int16(1))
    check(session.run("a", rows(1), timeout_ms=np.float32(1e6)), 2.0, rows(1))


def test_timeouts_that_are_never_or_past(session):
    session.add("a", scaled(2.0), verify=False)
    for no_number in (float("nan"), "5", True):
        with pytest.raises(OptionError, match="'timeout_ms' is"):
            session.submit("a", rows(1), timeout_ms=no_number)
    for never in (1e300, float("inf")):
        assert session.run("a", rows(1), timeout_ms=never)
    for past in (0, -1):
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run("a", rows(1), timeout_ms=past)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool])
def test_large_arrays_begin_where_tensorflow_takes_them(dtype):
    memory = np.zeros(2 * LARGE + 256, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    for off in (0, 8, 16):
        values = memory[begin + off:begin + off + 2 * LARGE].view(dtype).reshape(2, -1)
        values[1, :5] = [1, 0, 1, 1, 0]
        for array in (values, values[:, ::2], values.T):
            got = _aligned(array)
            assert got.ctypes.data % ALIGNMENT == 0 and got.dtype == dtype and np.array_equal(got, array)
        assert (_aligned(values) is values) == (off == 0)
    text = np.array(["a"] * LARGE, object)
    assert _aligned(text) is text


def test_lists_of_other_lengths(session):
    session.add("a", scaled(2.0), verify=False)
    with pytest.raises(OptionError, match="is no array"):
        session.submit("a", [[1.0], [1.0, 2.0]])


@BOTH
def test_bad_models(session, tmp_path):
    with pytest.raises(SavedModelError, match="does not exist"):
        session.add("a", tmp_path / "none")
    with pytest.raises(OptionError, match="folder or a function, not a int"):
        session.add("a", 3)
    with pytest.raises(OptionError, match="no signature 'b'; it has serving_default"):
        session.add("a", scaled(1.0), signature="b")
    with pytest.raises(SavedModelError, match=r"^The function 'nested' cannot be saved: Got a non-Tensor value"):
        def nested(x):
            return {"a": {"b": x + 1.0}}
        session.add("a", nested, input_signature=[tf.TensorSpec([None])])
    session.add("a", scaled(1.0))
    with pytest.raises(OptionError, match="'a' is there already; swap"):
        session.add("a", scaled(1.0))


@pytest.mark.parametrize(("options", "message"), [
    ({"threads": 0}, "'threads' is 0"), ({"threads": 1.5}, "'threads' is 1.5; it must be a whole number"),
    ({"threads": 2, "reserve": 2}, "'reserve' is 2; it must be at least 0 and below 'threads'"),
    ({"beside": -1}, "'beside' is -1; it must be a whole number, at least 0"), ({"beside": 0.5}, "'beside' is 0.5"),
    ({"config": {}}, "'config' is a dict; it must be a tf.compat.v1.ConfigProto"),
    ({"coalesce": "off"}, "'coalesce' is 'off'; it must be True, False or None")])
def test_options_of_a_session(options, message):
    with pytest.raises(OptionError, match=message):
        tf_stitch.StitchSession(**options)


def test_a_session_that_fails_to_start_leaves_the_scheduler_off(monkeypatch):
    def full(**_):
        raise OSError("no space left")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="no space"):
        tf_stitch.StitchSession(coalesce=True, scheduler_options={"workers": 2})
    monkeypatch.undo()
    tf_stitch.StitchSession(coalesce=True, scheduler_options={"workers": 1}).close()  # other options: none is on


def test_a_signature_of_ragged_tensors_is_refused_by_itself(session, tmp_path):
    spec = [tf.TensorSpec([None, WIDTH], name="x")]
    module = tf.Module()
    module.plain = tf.function(lambda x: {"y": tf.tanh(x) * 2 + 1}, input_signature=spec)
    module.ragged = tf.function(lambda x: {"r": tf.RaggedTensor.from_tensor(tf.tanh(x) * 2)}, input_signature=spec)
    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"serving_default": module.plain, "r": module.ragged})
    session.add("a", tmp_path / "m")
    np.testing.assert_allclose(session.run("a", rows(0))["y"], np.tanh(rows(0)) * 2 + 1, rtol=1e-5)
    with pytest.raises(OptionError, match="'r' of signature 'r' is sparse or ragged"):
        session.run("a", rows(0), signature="r")
    with pytest.raises(OptionError, match="'r' of signature 'r' is sparse or ragged"):
        session.add("b", tmp_path / "m", signature="r")


# --- ends -------------------------------------------------------------------------------------------

def test_drain_and_resume(session, gate):
    session.add("a", gate.function, warmup=False, verify=False, stitch=False)
    future = session.submit("a", rows(0))
    gate.arrived()
    assert session.drain(0.01) is False
    with pytest.raises(tf.errors.UnavailableError, match="draining or closed"):
        session.submit("a", rows(1))
    gate.open.set()
    assert session.drain(10) is True
    assert future.done()
    session.resume()
    assert session.run("a", rows(1))["y"].shape == (1, WIDTH)


def test_close_answers_what_it_took():
    session = tf_stitch.StitchSession(coalesce=False, threads=2, reserve=0, options=NATIVE)
    session.add("a", scaled(2.0))
    futures = [session.submit("a", rows(i)) for i in range(50)]
    threads = workers()
    assert session.close() is True
    for i, future in enumerate(futures):
        check(future.result(0), 2.0, rows(i))
    assert workers() == threads - 2
    with pytest.raises(tf.errors.UnavailableError, match="closed"):
        session.run("a", rows(0))
    with pytest.raises(tf.errors.UnavailableError, match="closed"):
        session.add("b", scaled(1.0))
    assert session.close() is True  # again does nothing


def test_close_cancels_what_waits_too_long(gate):
    session = tf_stitch.StitchSession(coalesce=False, threads=1, reserve=0)
    session.add("a", gate.function, warmup=False, verify=False, stitch=False)
    running, waiting = session.submit("a", rows(0)), session.submit("a", rows(1))
    gate.arrived()
    threading.Timer(0.3, gate.open.set).start()
    assert session.close(timeout_s=0.01) is False
    assert waiting.cancelled()
    assert running.done()


@pytest.mark.parametrize("end", ["close", "drain", "remove"])
def test_a_callback_may_end_its_session(end, gate):
    """Its own request has its answer, and is not waited for; two callbacks do not wait for each other either."""
    before = workers()
    session = tf_stitch.StitchSession(coalesce=False, threads=3, reserve=0)
    both, ended, took = threading.Barrier(2), [], []

    def callback(name):
        both.wait(10)
        began = time.monotonic()
        ended.append(session.remove(name, 20) if end == "remove" else getattr(session, end)(20))
        took.append(time.monotonic() - began)

    for name in "ab":
        session.add(name, gate.function, warmup=False, verify=False, stitch=False)
        session.submit(name, rows(0)).add_done_callback(lambda _, name=name: callback(name))
        gate.arrived()
    gate.open.set()
    assert soon(lambda: len(took) == 2)
    assert ended == [True, True] and max(took) < 5
    assert session.close(5) is True and session._dispatcher.outstanding == 0
    assert soon(lambda: workers() == before)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_callback_that_raises_ends_nothing(session, error, caplog):
    session.add("a", scaled(2.0), verify=False)
    before = workers()

    def callback(_):
        if threading.current_thread().name.startswith("tf_stitch_request"):
            raise error

    for i in range(8):  # more than there are threads
        future = session.submit("a", rows(i))
        future.add_done_callback(callback)
        check(future.result(10), 2.0, rows(i))
    assert session.drain(10) and workers() == before
    assert session.stats()["tenants"]["a"]["answered"] == 8


def test_a_future_that_its_holder_ended_is_let_be(session, gate):
    session.add("a", gate.function, warmup=False, verify=False, stitch=False, max_in_flight=1)
    futures = [session.submit("a", rows(i)) for i in range(6)]  # more than there are threads
    gate.arrived()
    for future in futures:
        future.set_result("mine")
    gate.open.set()
    assert session.drain(10) and session._dispatcher.outstanding == 0
    assert [future.result() for future in futures] == ["mine"] * 6
    session.resume()
    np.testing.assert_allclose(session.run("a", rows(0))["y"], rows(0) * 2 + 1, rtol=1e-6)


def test_a_callback_that_adds_a_tenant_does_not_hold_up_the_end(gate):
    session = tf_stitch.StitchSession(coalesce=False, threads=2, reserve=0, options=NATIVE)
    session.add("a", gate.function, warmup=False, verify=False, stitch=False)
    errors = []

    def callback(_):
        assert soon(lambda: session._closed)
        try:
            session.add("b", scaled(2.0))
        except tf.errors.UnavailableError as error:
            errors.append(error)

    session.submit("a", rows(0)).add_done_callback(callback)
    gate.arrived()
    gate.open.set()
    began = time.monotonic()
    assert session.close(20) is True and time.monotonic() - began < 10
    assert len(errors) == 1


def test_a_collection_may_end_a_session_under_its_own_lock():
    """On one of its threads, or of a caller that holds less than the session."""
    before = workers()
    session = tf_stitch.StitchSession(coalesce=False, threads=3)
    dispatcher, folder = session._dispatcher, session._folder
    session.itself = session  # garbage that only a collection finds
    with dispatcher._lock:
        del session
        gc.collect()
        assert folder.exists()
    assert soon(lambda: workers() == before and not folder.exists())


def test_a_session_is_not_copied(session):
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(session)


@BOTH
def test_a_forked_process_has_no_session(session):
    """It has none of the threads: requests would wait for ever, and so would the end of the session."""
    session.add("a", scaled(2.0), verify=False)
    with session._dispatcher._lock:  # by a thread that the child does not have
        child = os.fork()
    if not child:
        signal.alarm(20)
        if not session.drain() or session.stats()["outstanding"] or session.stats()["running"]:
            os._exit(3)
        try:
            session.submit("a", rows(0))
        except tf.errors.UnavailableError as error:
            os._exit(0 if session.close() and not session._end.alive and "forked" in error.message else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    check(session.run("a", rows(0)), 2.0, rows(0))


def test_dropped_session_gives_back_its_threads():
    before = workers()
    session = tf_stitch.StitchSession(coalesce=False, threads=3)
    folder = session._folder
    assert folder.is_dir() and workers() == before + 3
    del session
    gc.collect()
    assert workers() == before and not folder.exists()


# --- devices ----------------------------------------------------------------------------------------

def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_collections_are_short_while_a_session_serves(monkeypatch):
    monkeypatch.setattr(garbage, "INTERVAL_S", 0.0)
    with tf_stitch.StitchSession(coalesce=False, threads=2, options=NATIVE) as session:
        session.add("a", scaled(2.0))
        graphs = [weakref.ref(session._tenants["a"].model.graph)]
        assert gc.get_freeze_count() > 50_000 and len(gc.get_objects()) < 20_000  # what a full collection looks at
        for factor in range(6):  # old versions are garbage in the end
            session.swap("a", scaled(float(factor)))
            graphs.append(weakref.ref(session._tenants["a"].model.graph))
        assert graphs[-1]() is not None and sum(g() is not None for g in graphs) <= 3
        check(session.run("a", rows(0)), 5.0, rows(0))
    assert gc.get_freeze_count() == 0


def test_a_collection_may_end_a_session_that_was_dropped():
    with tf_stitch.StitchSession(coalesce=False, threads=2, options=NATIVE) as session:
        dropped = tf_stitch.StitchSession(coalesce=False, threads=2, options=NATIVE)
        dropped.itself = dropped  # only a collection finds it
        ended = dropped._end
        del dropped
        settling = threading.Thread(target=garbage.settle, daemon=True)
        settling.start()
        settling.join(60.0)
        assert not settling.is_alive() and not ended.alive
        session.add("a", scaled(2.0))
        check(session.run("a", rows(0)), 2.0, rows(0))


def test_free_memory_goes_back_to_the_system_with_closed_models(monkeypatch):
    monkeypatch.setattr(garbage, "INTERVAL_S", 0.0)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size, count = 100_000, 2000  # below what malloc takes of the system by itself
    with tf_stitch.StitchSession(coalesce=False, threads=2, options=NATIVE) as session:
        session.add("a", scaled(2.0))
        blocks = [libc.malloc(size) for _ in range(count)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        for k, block in enumerate(blocks):
            if k % 16:  # the rest keeps malloc from giving back what lies before it
                libc.free(block)
        before = resident_bytes()
        session.swap("a", scaled(3.0))
        assert before - resident_bytes() > size * count // 2
        for block in blocks[::16]:
            libc.free(block)


def test_device(session):
    session.add("a", scaled(2.0), device="CPU:0")
    graph_def = session.v1("a").graph.as_graph_def()
    fallbacks = [f for f in graph_def.library.function if f.signature.name.startswith("tf_stitch_fallback_")]
    inner = [n for f in graph_def.library.function if f not in fallbacks for n in f.node_def]
    assert inner and all("CPU" in n.device for n in inner)
    assert fallbacks and not any(n.device for f in fallbacks for n in f.node_def)
    check(session.run("a", rows(0)), 2.0, rows(0))


def test_place_keeps_devices():
    graph = tf.Graph()
    with graph.as_default():
        with tf.device("/CPU:0"):
            tf.constant(1.0, name="pinned")
        tf.constant(1.0, name="free")
    graph_def = graph.as_graph_def()
    place(graph_def, "GPU:1")
    assert [(n.name, n.device) for n in graph_def.node] == [("pinned", "/device:CPU:0"), ("free", "/device:GPU:1")]


def served_nodes(session, name):
    """Nodes that the session put beside a tenant's graph."""
    return [n for n in session.v1(name).graph.as_graph_def().node if n.name.startswith("tf_stitch_served")]


def test_served_graphs_are_unfolded(session):
    """No calls, one node that reads the variables; a stitched op of a GPU copies what is fed itself."""
    weights = [tf.Variable(np.float32(v)) for v in (2.0, 3.0)] + [tf.Variable(5)]
    inner = tf.function(lambda x: (tf.tanh(x) * weights[0], tf.sigmoid(x) * weights[1] * weights[0]), autograph=False)

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")], autograph=False)
    def call(x):
        a, b = inner(x)
        return {"y": a + b + tf.cast(weights[2], tf.float32), "w": weights[1].read_value(), "x": x}

    session.add("a", call)
    nodes = served_nodes(session, "a")
    ops = [n.op for n in nodes]
    assert ops.count("StitchedVariables") == 1 and ops.count("ReadVariableOp") == 1  # an integer may lie elsewhere
    assert "StitchedProgram" in ops and not any("Call" in op for op in ops)
    (variables,) = [n for n in nodes if n.op == "StitchedVariables"]
    assert len(variables.attr["names"].list.s) == 2
    for node in nodes:
        if node.op == "StitchedProgram":
            fed = [i for i, x in enumerate(node.input) if x == "serving_default_x"]
            assert set(fed) <= set(node.attr["_input_hostmem"].list.i)
    x = rows(0)
    answer = session.run("a", x)
    sigmoid = 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(answer["y"], np.tanh(x) * 2 + sigmoid * 6 + 5, rtol=1e-5)
    assert answer["w"] == 3.0 and (answer["x"] == x).all()
    assert session.v1("a").run("StatefulPartitionedCall:2", {"serving_default_x:0": x}).shape == x.shape  # it stays


def test_variables_that_a_function_writes_are_read_one_by_one(session):
    count, scale = tf.Variable(np.float32(0.0)), tf.Variable(np.float32(2.0))

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")], autograph=False)
    def call(x):
        y = tf.tanh(x) * scale + tf.sigmoid(x) * count.assign_add(1.0)
        return {"y": y}

    session.add("a", call, warmup=False)
    assert served_nodes(session, "a") == []  # it is called as before
    x = rows(0)
    for i in range(1, 4):
        want = np.tanh(x) * 2 + i / (1 + np.exp(-x))
        np.testing.assert_allclose(session.run("a", x)["y"], want, rtol=1e-5)


def test_variables_that_something_updates_in_part_are_read_one_by_one(session, tmp_path):
    """Only their own reads know to copy them."""
    module = tf.Module()
    module.table = tf.Variable(np.zeros([4, WIDTH], np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")], autograph=False)
    def call(x):
        return {"y": tf.tanh(x) + tf.reduce_sum(module.table)}

    @tf.function(input_signature=[tf.TensorSpec([1, 1], tf.int32, name="i")], autograph=False)
    def update(i):
        module.table.scatter_nd_add(i, tf.ones([1, WIDTH]))
        return {"done": tf.identity(i)}

    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"serving_default": call, "update": update})
    session.add("a", tmp_path / "m", verify=False)
    ops = [n.op for n in served_nodes(session, "a")]
    assert "StitchedProgram" in ops and "ReadVariableOp" in ops and "StitchedVariables" not in ops
    x = rows(0)
    for i in range(3):
        np.testing.assert_allclose(session.run("a", x)["y"], np.tanh(x) + i * WIDTH, rtol=1e-5)
        session.run("a", np.array([[1]], np.int32), signature="update")


def test_variables_that_something_gathers_from_are_read_one_by_one(session):
    """TensorFlow copies them at each read from the first gather on; others of the graph are read together."""
    table = tf.Variable(np.random.default_rng(0).standard_normal([4, WIDTH]).astype(np.float32))
    scale = tf.Variable(np.float32(2.0))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, name="i")], autograph=False)
    def call(i):
        x = tf.tanh(tf.nn.embedding_lookup(table, i)) * scale + 1.0
        return {"y": tf.matmul(x, table, transpose_b=True)}

    session.add("a", call, warmup=False)
    ops = [n.op for n in served_nodes(session, "a")]
    assert {"StitchedProgram", "StitchedVariables", "ResourceGather"} <= set(ops) and ops.count("ReadVariableOp") == 1
    for _ in range(3):
        want = (np.tanh(table.numpy()[[1, 3]]) * 2 + 1) @ table.numpy().T
        np.testing.assert_allclose(session.run("a", np.array([1, 3], np.int32))["y"], want, rtol=1e-4)


def stitched_meta(function, folder):
    """The MetaGraph of a function's stitched SavedModel."""
    save_function(function, folder / "m", None)
    (meta,) = read(stitched_copy(folder / "m", NATIVE, "host", False, folder, keep=False)).meta_graphs
    return meta


def test_a_call_that_waits_for_something_is_left_alone(tmp_path):
    meta = stitched_meta(scaled(2.0), tmp_path)
    (before,) = {o.name.partition(":")[0] for o in meta.signature_def["serving_default"].outputs.values()}
    waiting = type(meta).FromString(meta.SerializeToString())
    (call,) = [n for n in waiting.graph_def.node if n.name == before]
    call.input.append("^" + waiting.graph_def.node.add(name="effect", op="NoOp").name)
    for graph, shorter in ((meta, True), (waiting, False)):
        shorten(graph)
        (output,) = graph.signature_def["serving_default"].outputs.values()
        assert output.name.startswith("tf_stitch_served") == shorter


def test_a_variable_that_is_not_there_is_named(session):
    session.add("a", scaled(2.0), warmup=False)
    graph = session.v1("a").graph
    (name,) = [n.name for n in served_nodes(session, "a") if n.op == "StitchedVariables"]
    with tf.compat.v1.Session(graph=graph) as empty, pytest.raises(
            tf.errors.FailedPreconditionError, match=r"Could not find variable '.+': it is not initialized"):
        empty.run(f"{name}:0")


@pytest.mark.parametrize("device", ["GPU:99", "gpu:0", "CPU", "/CPU:0"])
def test_a_device_that_is_not_there_is_refused(session, device):
    """TensorFlow would run the model on the CPU without a word."""
    with pytest.raises(OptionError, match=f"There is no device '{device}'; there are CPU:0"):
        session.add("a", scaled(2.0), device=device)
    assert session.tenants == []
    session.add("a", scaled(2.0), device="CPU:0")


def test_devices_are_those_of_the_config():
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    with tf_stitch.StitchSession(threads=2, config=config) as session:
        session.add("a", scaled(2.0), device="CPU:1")
        check(session.run("a", rows(0)), 2.0, rows(0))
        with pytest.raises(OptionError, match="there are CPU:0, CPU:1"):
            session.add("b", scaled(2.0), device="CPU:2")


@pytest.mark.parametrize(("devices", "placed"), [(["CPU:0", "GPU:0", "GPU:1"], ["GPU:0", "GPU:1", "GPU:0"]),
                                                 (["CPU:0", "GPU:0"], ["GPU:0"] * 3),
                                                 (["CPU:0", "CPU:1"], ["CPU:0"] * 3)])
def test_tenants_are_spread_over_gpus(session, monkeypatch, devices, placed):
    monkeypatch.setattr("tf_stitch.serving.session.devices", lambda config: devices)
    assert [session._device(None) for _ in range(3)] == placed


# --- the scheduler ----------------------------------------------------------------------------------

def test_tenants_are_known_to_the_scheduler():
    with tf_stitch.StitchSession(coalesce=True, threads=8, options=NATIVE) as session:
        session.add("sched_a", scaled(2.0), slo_ms=500)
        session.add("sched_b", scaled(3.0), priority="best_effort", weight=2.0)
        factors = {"sched_a": 2.0, "sched_b": 3.0}
        futures = [(f, i, session.submit(name, rows(i))) for i in range(40) for name, f in factors.items()]
        for factor, i, future in futures:
            check(future.result(20), factor, rows(i))
        tenants = session.stats()["scheduler"]["tenants"]
        assert tenants["sched_a"]["slo_ms"] == 500 and tenants["sched_a"]["priority"] == "latency"
        assert tenants["sched_b"]["priority"] == "best_effort"
        assert tenants["sched_a"]["completed"] >= 40 and tenants["sched_b"]["completed"] >= 40
        session.remove("sched_a")
        session.swap("sched_b", scaled(4.0))
        check(session.run("sched_b", rows(0)), 4.0, rows(0))
        assert session.stats()["scheduler"]["tenants"]["sched_b"]["completed"] > tenants["sched_b"]["completed"]


def test_sessions_share_the_scheduler():
    with tf_stitch.StitchSession(coalesce=True, threads=2, options=NATIVE) as one:
        one.add("same", scaled(2.0), slo_ms=100)
        with pytest.raises(OptionError, match="share one"):
            tf_stitch.StitchSession(coalesce=True, threads=2, scheduler_options={"max_pack": 3})
        with tf_stitch.StitchSession(coalesce=True, threads=2, options=NATIVE) as other:
            other.add("same", scaled(3.0), slo_ms=200)
            check(other.run("same", rows(0)), 3.0, rows(0))
            known = other.stats()["scheduler"]["tenants"]
            assert (known["same"]["slo_ms"], known["same#2"]["slo_ms"]) == (100, 200)
        check(one.run("same", rows(0)), 2.0, rows(0))  # still coalescing
        assert one.stats()["scheduler"]["enabled"] is True
    assert scheduler.stats()["enabled"] is False


@pytest.mark.parametrize("options, error, why", [
    ({"no_such_option": 1}, scheduler.SchedulerError, "no_such_option"), ([("max_pack", 1)], OptionError, "a list"),
    ({"max_pack": np.int64(3)}, OptionError, "numbers and text")], ids=["unknown", "list", "numpy"])
@pytest.mark.parametrize("coalesce", [False, True])
def test_bad_scheduler_options(coalesce, options, error, why):
    """Also where they would not be used."""
    threads = workers()
    with pytest.raises(error, match=why):
        tf_stitch.StitchSession(coalesce=coalesce, threads=2, scheduler_options=options)
    with tf_stitch.StitchSession(coalesce=True, threads=2, scheduler_options={"max_pack": 8}) as session:
        assert session.coalesce  # the failed one left nothing behind
    assert workers() == threads
