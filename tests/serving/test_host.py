"""Rewritten models are served by a process that has no Python in it."""
from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from models import load
from tests.serving import support
from tests.serving.support import answer, host
from tf_stitch import runtime


@pytest.fixture(scope="module", autouse=True)
def built():
    support.build()


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return support.marked_model(tmp_path_factory.mktemp("marked") / "1")


class Types(tf.Module):
    """One output per element type that the host reads and writes."""

    @tf.function(input_signature=[
        tf.TensorSpec([None, 2], tf.float64, "d"), tf.TensorSpec([None], tf.int64, "i"),
        tf.TensorSpec([None], tf.string, "s"), tf.TensorSpec([], tf.bool, "b"), tf.TensorSpec([2], tf.uint8, "u"),
        tf.TensorSpec([None], tf.bfloat16, "h"), tf.TensorSpec([None], tf.complex64, "c")])
    def all(self, d, i, s, b, u, h, c):
        return {"d": d * 2, "i": i + 1, "s": tf.strings.join([s, s], "-"), "b": tf.logical_not(b), "u": u + 1,
                "h": h * 2, "c": c * 1j}

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
    def one(self, x):
        return {"y": x + 1, "text": tf.fill([2], b"\xff\x00")}


@pytest.fixture(scope="module")
def types(tmp_path_factory):
    folder, module = tmp_path_factory.mktemp("types") / "1", Types()
    tf.saved_model.save(module, str(folder), signatures={"all": module.all, "serving_default": module.one})
    return folder


def test_kernels_and_fallback(marked):
    for n in (5, 1, 200):
        x = np.arange(n, dtype=np.float32)
        y = answer(marked, json.dumps({"inputs": x.tolist()}))["y"]
        np.testing.assert_array_equal(y, 4 * x + 3 if n > 1 else [-1])


def test_without_compiler_cache_and_home(marked):
    bare = {"PATH": "/nowhere", "HOME": "/nowhere", "TF_STITCH_CACHE": "/nowhere", "CXX": "/nowhere"}
    assert answer(marked, '{"inputs": [1, 2]}', env=bare)["y"] == [7, 11]


def test_no_python_inside():
    for binary in (support.HOST, runtime.LIBRARY):
        needed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        assert "libtensorflow" in needed and "libpython" not in needed
    for binary, flags in ((support.HOST, "-D"), (runtime.LIBRARY, "-D"), (support.ARCHIVE, "")):
        undefined = subprocess.run(["nm", "-u", *flags.split(), binary], capture_output=True, text=True,
                                   check=True).stdout.split()
        assert len(undefined) > 100
        assert not [s for s in undefined if s.startswith(("Py", "_Py"))]


def test_signatures(types):
    text = host("signatures", types).stdout
    assert "serving_default\n  in  x: float32 [?, 3]\n" in text
    assert "  in  h: bfloat16 [?]\n" in text and "  out s: string [?]\n" in text


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_every_type(types, tmp_path, save):
    bf16 = tf.bfloat16.as_numpy_dtype
    given = {"d": np.array([[1.5, -2], [np.inf, np.nan]]), "i": np.array([2**62, -5]),
             "s": np.array(["käse", "", "x" * 40]), "b": np.array(True), "u": np.array([255, 3], np.uint8),
             "h": np.array([1.5, -3], bf16), "c": np.array([1 + 2j], np.complex64)}
    save(tmp_path / "in.npz", **{**given, "not_an_input": np.zeros(3)})
    host("run", types, tmp_path / "in.npz", "--signature", "all", "--output", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as got:
        np.testing.assert_array_equal(got["d"], given["d"] * 2)
        np.testing.assert_array_equal(got["i"], given["i"] + 1)
        np.testing.assert_array_equal([s.decode() for s in got["s"]], [f"{s}-{s}" for s in given["s"]])
        assert got["b"].shape == () and not got["b"]
        np.testing.assert_array_equal(got["u"], [0, 4])
        np.testing.assert_array_equal(got["h"].view(bf16).astype(float), [3, -6])
        np.testing.assert_array_equal(got["c"], [-2 + 1j])
    given["s"] = np.zeros([0], "U1")
    save(tmp_path / "in.npz", **given)
    host("run", types, tmp_path / "in.npz", "--signature", "all", "--output", tmp_path / "out.npz")


def test_json_forms(types):
    for request in ('{"inputs": {"x": [[1, 2, 3]]}}', '{"inputs": [[1, 2, 3]]}', '{"instances": [[1, 2, 3]]}',
                    '{"instances": [{"x": [1, 2, 3]}]}'):
        got = answer(types, request)
        assert got["y"] == [[2, 3, 4]] and got["text"] == [{"b64": "/wA="}] * 2
    special = answer(types, '{"inputs": [["NaN", "-Infinity", 0.1]]}')["y"][0]
    assert np.isnan(special[0]) and special[1] == -np.inf and np.float32(special[2]) == np.float32(1.1)
    assert answer(types, '{"inputs": []}')["y"] == []


@pytest.mark.parametrize("request_, says", [
    ("{", "no JSON object"), ('{"inputs": [[1, 2]]}', r"\[\?, 3\]"),
    ('{"inputs": [[1, 2, 3], [1]]}', "several lengths"),
    ('{"inputs": {"z": 1}}', "lacks 'x'"), ('{"inputs": [["a", 1, 2]]}', "takes numbers"), ("{}", "either"),
    ('{"inputs": 1, "instances": [1]}', "either"), ('{"inputs": [[[1, 2, 3]]]}', "shape")])
def test_bad_requests_end_with_a_sentence(types, request_, says):
    done = host("run", types, "-", stdin=request_, status=1)
    assert re.search(says, done.stderr.splitlines()[-1])


def test_bad_files_and_usage(types, marked, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK no")
    assert "no readable .npz" in host("run", types, tmp_path / "a.npz", status=1).stderr
    np.savez(tmp_path / "b.npz", x=np.zeros((1, 3)))
    assert "float32 (<f4), the request has <f8" in host("run", types, tmp_path / "b.npz", status=1).stderr
    data = bytearray((tmp_path / "b.npz").read_bytes())
    for at in range(0, len(data), 7):  # damage of any kind ends with a sentence or is not noticed, never a crash
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        (tmp_path / "c.npz").write_bytes(damaged)
        if at % 49 == 0:
            assert "tf_stitch_host: " in host("run", types, tmp_path / "c.npz", status=1).stderr
    missing = host("run", types, "-", "--signature", "x", status=1).stderr
    assert "has no signature 'x'; it has 'all', 'serving_default'" in missing
    assert "cannot be loaded" in host("signatures", tmp_path, status=1).stderr
    for usage in (["serve"], ["run", types], ["load", marked, "--thread", "3"], ["load", marked, "--threads", "0"], []):
        host(*usage, status=2)


def test_deadlines_and_wrong_answers_are_counted(types, marked, tmp_path):
    plain = tf.Module()
    plain.f = tf.function(lambda x: {"y": 4 * x + 3.001}, input_signature=[tf.TensorSpec([None], name="x")])
    tf.saved_model.save(plain, str(tmp_path / "1"), signatures=plain.f)
    done = host("load", marked, "--original", tmp_path / "1", "--requests", "20", "--batches", "7", status=1)
    result = json.loads(done.stdout)
    assert result["model"]["wrong"] == 20 and "'y'" in result["first_problem"]

    def slow(x):
        return {"y": tf.while_loop(lambda i: i < 200_000, lambda i: i + 1, [tf.constant(0)], parallel_iterations=1)[0]}

    plain.g = tf.function(slow, input_signature=[tf.TensorSpec([None], name="x")])
    tf.saved_model.save(plain, str(tmp_path / "2"), signatures=plain.g)
    flags = ["--requests", "8", "--batches", "7", "--distinct", "1", "--deadline-ms", "1"]
    assert json.loads(host("load", tmp_path / "2", *flags).stdout)["model"]["late"] == 8


def test_demo_models_under_load(tmp_path):
    for title, plain, stitched in load.prepare(tmp_path, tf_stitch.Options(levels=())):
        result = load.load(plain, stitched, "--requests", "1500", "--threads", "16", "--max-growth-mb", "64")
        assert result["status"] == 0, (title, result["first_problem"])
        assert result["model"]["right"] == 1500 and result["fallback_runs"] == 0
        assert result["stitched_runs"] > 1500
