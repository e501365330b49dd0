"""The host program and models to serve."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

from tests.op import programs
from tests.op.calls import stitched
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.program.program import Buffer

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = ROOT / "build" / "host" / "tf_stitch_host"
ARCHIVE = HOST.with_name("libtf_stitch_ops.a")


def build() -> Path:
    """The host program, up to date (``make host``)."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_host"], cwd=ROOT, check=True,
                   env={**os.environ, "TF_STITCH_WERROR": "1"}, stdout=subprocess.DEVNULL)
    return HOST


def host(*args, status: int = 0, env: dict[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess:
    """Runs the host program, which must end with ``status``."""
    done = subprocess.run([HOST, *map(str, args)], capture_output=True, text=True, check=False, input=stdin,
                          env={**os.environ, **(env or {})})
    assert done.returncode == status, done.stderr[-3000:]
    return done


def answer(model: Path, request: str, **how) -> dict:
    """The outputs of a JSON request."""
    return json.loads(host("run", model, "-", stdin=request, **how).stdout)["outputs"]


def marked_model(folder: Path) -> Path:
    """[n] -> 4x + 3 in kernels; the fallback says -1, so that it is seen which of them ran.  Below 2 it runs."""
    n = programs.dim("n", 2)
    f32 = "float32"
    program = programs.program(
        [Buffer("input", 0, f32, (n,)), Buffer("output", 0, f32, (n,)), Buffer("temp", 0, f32, (n,))],
        [programs.launch("t_axpb", (0, 2), n), programs.launch("t_axpb", (2, 1), n)], {"n": SymbolSource("dim", 0, 0)})
    module = tf.Module()
    call = stitched(program, lambda x: tf.fill(tf.shape(x), -1.0))
    module.f = tf.function(lambda x: {"y": call(x)}, input_signature=[tf.TensorSpec([None], name="x")], autograph=False)
    tf.saved_model.save(module, str(folder), signatures=module.f)
    return folder
