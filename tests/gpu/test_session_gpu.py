"""StitchSession on two devices of one process (a GPU split in two; two GPUs), with and without coalescing."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

pytestmark = pytest.mark.gpu

SCRIPT = '''
import sys
import numpy as np
import tensorflow as tf
import tf_stitch
from tf_stitch.serving.policies import virtual_gpus

WIDTH = 512

def scaled(factor):
    """Layers of several launches each: the scheduler does not hold programs of fewer than four."""
    weight = tf.Variable(np.eye(WIDTH, dtype=np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")])
    def call(x):
        for _ in range(6):
            x = tf.tanh(x @ weight)
        return {"y": x * factor + 1.0}

    return call

def rows(seed, count=1):
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)

def check(answer, factor, x):
    for _ in range(6):
        x = np.tanh(x)
    np.testing.assert_allclose(answer["y"], x * factor + 1.0, rtol=1e-2, atol=1e-2)  # products in TF32

coalesce, split = sys.argv[1] == "coalescing", sys.argv[2] == "split"
config = virtual_gpus(1, 2048).config if split else None
with tf_stitch.StitchSession(coalesce=coalesce, threads=32, config=config) as session:
    factors = {}
    for k in range(4):
        name, factors[f"t{k}"] = f"t{k}", 1.0 + k
        session.add(name, scaled(factors[name]), device=f"GPU:{k % 2}", slo_ms=1000)
    before = tf_stitch.runtime.counters()
    futures = [(f, i, session.submit(n, rows(i, 1 + i % 4))) for i in range(100) for n, f in factors.items()]
    for factor, i, future in futures:
        check(future.result(60), factor, rows(i, 1 + i % 4))
    after = tf_stitch.runtime.counters()
    assert after.fallbacks == before.fallbacks, "TensorFlow's operations ran"
    assert after.stitched - before.stitched >= 400
    served = [n for n in session.v1("t0").graph.as_graph_def().node if n.op == "StitchedProgram"]
    assert any(n.attr["_input_hostmem"].list.i and n.attr["_output_hostmem"].list.i for n in served)
    placed = {n.device for k in range(4) for n in session.v1(f"t{k}").graph.as_graph_def().node if n.device}
    assert any(d.endswith("GPU:0") for d in placed) and any(d.endswith("GPU:1") for d in placed)
    if coalesce:
        found = session.stats()["scheduler"]["devices"]
        print({d["name"]: (d["superkernels"], d["steps"]) for d in found})
        assert sum(d["steps"] for d in found) >= 400, found
        assert len(found) == (1 if split else 2), found  # a scheduler for each GPU
    session.swap("t1", scaled(9.0))
    check(session.run("t1", rows(0)), 9.0, rows(0))
print("held")
'''


@pytest.mark.parametrize("devices", ["split", "two"])
@pytest.mark.parametrize("how", ["plain", "coalescing"])
def test_two_devices_of_one_process(how, devices):
    if devices == "two" and len(tf.config.list_physical_devices("GPU")) < 2:
        pytest.skip("there is one GPU")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT, how, devices], capture_output=True, text=True, timeout=180,
                          cwd=root, check=False)
    assert done.returncode == 0 and "held" in done.stdout, done.stderr[-3000:]
