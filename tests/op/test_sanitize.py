"""The CPU runtime under sanitizers: programs loaded and run from many threads."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.op import programs
from tf_stitch.backend import host
from tf_stitch.program import serialize

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ["tests/op/run_programs.cc", *(f"custom_ops/{name}.cc" for name in (
    "program", "plan", "library_host", "runtime_host"))]


def generated() -> list[bytes]:
    """Programs of the rewriter: rows with unknown sizes, a gather, a reduction of columns."""
    table = np.arange(80, dtype=np.float32).reshape(8, 10)

    def f(x, i):
        y = tf.nn.softmax(tf.tanh(x) * 2 + 1)
        return tf.reduce_sum(y, 0) * 3, tf.sigmoid(tf.gather(table, i)) + 1, tf.transpose(y) - tf.reduce_mean(x)

    signature = [tf.TensorSpec([None, None]), tf.TensorSpec([None], tf.int32)]
    graph = tf.function(f, autograph=False).get_concrete_function(*signature).graph.as_graph_def()
    stitched, _ = tf_stitch.rewrite_graph_def(graph, options=tf_stitch.Options(levels=()))
    return [n.attr["program"].s for n in stitched.node if n.op == "StitchedProgram"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    made = [serialize.dumps(make()) for make in (programs.axpb, programs.chain, programs.rowsum, programs.gather,
                                                 programs.reshape, programs.fill, programs.matmul)]
    for k, data in enumerate(made + generated()):
        (folder / f"{k}").write_bytes(data)
    assert len(list(folder.iterdir())) > len(made)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_threads_agree(files, sanitizer, tmp_path):
    binary = tmp_path / "run_programs"
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}",
                    "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS", *(str(ROOT / s) for s in SOURCES), "-o",
                    str(binary), "-pthread", "-ldl"], check=True)
    done = subprocess.run([binary, "12", *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(re.findall(r"\d+", done.stdout)[0]) > 500
