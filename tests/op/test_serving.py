"""A rewritten model is served by a process that has no Python in it."""
from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tests.op import programs
from tests.op.calls import stitched
from tf_stitch import runtime
from tf_stitch.backend import host
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.program.program import Buffer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    binary = tmp_path_factory.mktemp("serve") / "serve"
    folder = Path(tf.sysconfig.get_lib())
    source = Path(__file__).with_name("serve.cc")
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-isystem", tf.sysconfig.get_include(), str(source),
                    "-o", str(binary), f"-L{folder}", "-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2",
                    f"-Wl,-rpath,{folder}"], check=True)
    return binary


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """[n] -> 4x + 3 in kernels; the fallback says -1, so that it is seen which of them ran.  Below 2 it runs."""
    n = programs.dim("n", 2)
    f32 = "float32"
    program = programs.program(
        [Buffer("input", 0, f32, (n,)), Buffer("output", 0, f32, (n,)), Buffer("temp", 0, f32, (n,))],
        [programs.launch("t_axpb", (0, 2), n), programs.launch("t_axpb", (2, 1), n)], {"n": SymbolSource("dim", 0, 0)})
    module = tf.Module()
    call = stitched(program, lambda x: tf.fill(tf.shape(x), -1.0))
    module.f = tf.function(lambda x: {"y": call(x)}, input_signature=[tf.TensorSpec([None], name="x")], autograph=False)
    folder = tmp_path_factory.mktemp("model") / "1"
    tf.saved_model.save(module, str(folder), signatures=module.f)
    return folder


def names(model: Path) -> list[str]:
    """The operations of the signature's input and output."""
    proto = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    signature = proto.meta_graphs[0].signature_def["serving_default"]
    return [signature.inputs["x"].name.split(":")[0], signature.outputs["y"].name.split(":")[0]]


def test_without_python(server, model):
    done = subprocess.run([server, runtime.LIBRARY, model, *names(model), "5", "1", "200"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [np.array(line.split(), np.float64) for line in done.stdout.splitlines()]
    np.testing.assert_array_equal(rows[0], 4 * np.arange(5) + 3)
    np.testing.assert_array_equal(rows[1], [-1])
    np.testing.assert_array_equal(rows[2], 4 * np.arange(200) + 3)
    needed = subprocess.run(["ldd", runtime.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "libtensorflow" in needed and "libpython" not in needed
