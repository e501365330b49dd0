"""The peers: their definitions compute what the workloads compute; processes that fail or are late leave rows."""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from models import bench as models_bench
from models import reference
from models.peers import session
from models.peers.definitions import DEFINITIONS, TRAINING
from models.workloads import REGISTRY
from tf_stitch import bench

SOME = ("lr", "dien", "mobilenetv3")  # a training step, a recurrent network, convolutions


def test_every_workload_is_defined() -> None:
    assert set(DEFINITIONS) == set(REGISTRY)
    assert {n for n, w in REGISTRY.items() if w.training} == TRAINING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reference")
    reference.compute(made, SOME, weights=True)
    return made


def test_references_hold_outputs_weights_and_inputs(folder: Path) -> None:
    path = reference.path_of(folder, "lr")
    loss, w, b = reference.read(path, "output")
    assert loss.dtype == w.dtype == np.float64 and w.shape == (784, 10) and b.shape == (10,)
    assert [a.dtype for a in reference.read(path, "weight")] == [np.float32] * 2
    assert [a.shape for a in reference.read(path, "input")] == [(100, 784), (100,)]
    stamp = path.stat().st_mtime_ns
    reference.compute(folder, ["lr"])  # what is there is taken
    assert path.stat().st_mtime_ns == stamp


def test_a_reference_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)float64 results of nope could not be computed.*KeyError"):
        reference.compute(tmp_path, ["nope"])


@pytest.mark.slow
def test_jax_computes_the_same(folder: Path) -> None:
    pytest.importorskip("jax")
    found = list(session.rows(["jax"], SOME, folder, 300, rounds=2, round_s=0.01))
    rows, versions = models_bench.summed_up(found)
    assert sorted((r.workload, r.system, r.note) for r in rows) == sorted((n, "jax", "") for n in SOME)
    assert all(r.max_rel_error is not None and r.max_rel_error < 1e-5 for r in rows)
    assert all(r.latency_us and r.min_us and r.compile_s and len(r.rounds_us) == 2 for r in rows)
    assert set(versions) == {"jax"}


def test_late_and_dead_processes_leave_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def process(peer, workload, mode, *_):
        row = f'{{"workload": "{workload}", "system": "jax", "note": "", "how": "x", "latency_us": 1.0}}'
        script = {"lr": "import time; print('compiled', flush=True); time.sleep(60)",
                  "bert": "import time; time.sleep(60)",
                  "dien": "import sys; print('no such GPU', file=sys.stderr); sys.exit(3)",
                  "mobilenetv3": f"print('compiled', flush=True); input(); print('{row}')"}[workload]
        return session._Process(peer, workload, mode, [sys.executable, "-c", script])

    monkeypatch.setattr(session, "_process", process)
    monkeypatch.setattr(session, "PATIENCE_S", 2.0)
    start = time.monotonic()
    found = {r["workload"]: r for r in session.rows(["jax"], [*SOME, "bert"], folder, 9.0)}
    assert time.monotonic() - start < 20
    assert found["lr"]["note"] == found["bert"]["note"] == "not measured: the time was over"
    assert found["dien"]["note"] == "the process died: no such GPU"
    assert found["mobilenetv3"]["latency_us"] == 1.0


def test_the_best_mode_is_kept() -> None:
    def row(how, us, note=""):
        return {"workload": "w", "system": "torch", "how": how, "latency_us": us, "note": note, "version": "9"}

    (kept,), versions = models_bench.summed_up([row("a", 5.0), row("b", 3.0), row("c", None, "no")])
    assert kept == bench.Row("w", "torch", 3.0, how="b (a: 5 us; c: no)")
    assert versions == {"torch": "9"}


def test_nothing_of_tensorflow_is_needed() -> None:
    """A peer's process must not take GPU memory for TensorFlow."""
    script = "import sys, models.peers.__main__, models.peers.session; sys.exit('tensorflow' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", script],
                      {**os.environ, "PYTHONPATH": str(root)}) == 0


def test_modes():
    assert session.modes("torch") == [("torch", "reduce-overhead"), ("torch", "max-autotune")]
    assert session.modes("torch:max-autotune") == [("torch", "max-autotune")]
    assert session.modes("jax") == [("jax", "")] and not session.modes("torch:fast") and not session.modes("other")
