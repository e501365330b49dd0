"""What importing tf_stitch does, in fresh processes."""
from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch

from .graphs import NATIVE, normal

LOAD = """
model = tf.saved_model.load({path!r})
np.save({out!r}, model(tf.constant(np.load({given!r}))))
"""


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    module = tf.Module()
    module.__call__ = tf.function(lambda x: tf.nn.softmax(tf.exp(x) * 2 + 1), input_signature=[
        tf.TensorSpec([None, 8], tf.float32)])
    tf.saved_model.save(module, str(folder / "plain"))
    report = tf_stitch.rewrite_saved_model(folder / "plain", folder / "stitched", options=NATIVE, verify=False)
    assert report.clusters
    given = normal(5, 8)
    np.save(folder / "given.npy", given)
    return folder, np.asarray(module.__call__(tf.constant(given)))


@pytest.mark.parametrize("imports", [
    "import tf_stitch, numpy as np, tensorflow as tf",
    "import numpy as np, tensorflow as tf, tf_stitch",
    "import tf_stitch.ir.graph, keras, numpy as np, tensorflow as tf",
])
def test_a_rewritten_model_loads_whatever_is_imported_first(model, imports):
    folder, want = model
    out = str(folder / "out.npy")
    fresh(imports + LOAD.format(path=str(folder / "stitched"), given=str(folder / "given.npy"), out=out))
    np.testing.assert_allclose(np.load(out), want, rtol=2e-6)


def test_importing_it_imports_no_tensorflow():
    assert fresh("import sys, tf_stitch.ir.graph, tf_stitch.options; print('tensorflow' in sys.modules)") == "False\n"


def test_a_missing_op_library_is_a_warning(tmp_path):
    code = ("import pathlib, tf_stitch, tf_stitch.runtime as r; r.LIBRARY = pathlib.Path('nowhere/_ops.so')\n"
            "import tensorflow as tf; print(int(tf.constant(1) + 1))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n" and "op library is not built" in done.stderr
