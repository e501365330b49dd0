"""The measuring code: errors, interleaving, counts, failures, result files."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from models import bench as models_bench
from tf_stitch import bench, bench_plots, cli
from tf_stitch.errors import OptionError, SavedModelError


def test_max_rel_error() -> None:
    a = np.array([1.0, -4.0])
    assert bench.max_rel_error([a], [a]) == 0.0
    assert bench.max_rel_error([a, a + 0.4], [a, a]) == pytest.approx(0.1)
    assert bench.max_rel_error([np.zeros(0)], [np.zeros(0)]) == 0.0
    assert bench.max_rel_error([np.array([0.5])], [np.array([0.0])]) == 0.5
    assert bench.max_rel_error([np.array(["a", "b"], object)], [np.array(["a", "c"], object)]) == np.inf
    assert bench.max_rel_error([np.float32(1.5)], [np.float64(1.0)]) == 0.5
    assert bench.max_rel_error([np.zeros(2)], [np.zeros((2, 1))]) == np.inf


def test_max_rel_error_wants_the_same_nan_and_inf() -> None:
    wild = np.array([np.nan, np.inf, 2.0])
    assert bench.max_rel_error([wild], [wild]) == 0.0
    assert bench.max_rel_error([wild], [np.array([np.nan, -np.inf, 2.0])]) == np.inf
    assert bench.max_rel_error([wild], [np.array([1.0, np.inf, 2.0])]) == np.inf


def test_max_rel_error_refuses_missing_outputs() -> None:
    with pytest.raises(ValueError, match="1 outputs but 0"):
        bench.max_rel_error([np.zeros(2)], [])


def test_interleave_gives_every_system_every_place() -> None:
    log: list[str] = []
    calls = {name: lambda name=name: log.append(name) for name in "abc"}
    samples = bench.interleave(calls, rounds=3, round_s=0.0)
    assert {k: len(v) for k, v in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert "".join(log[-9:]) == "abcbcacab"  # after the warm-up calls


def test_measure_counts_ops_and_keeps_failures() -> None:
    x = tf.ones([4, 8])
    good = tf.function(lambda: tf.nn.softmax(tf.matmul(x, x, transpose_b=True) + 1.0))

    def bad() -> None:
        raise RuntimeError("no such device\nand more")

    rows = bench.measure("w", {"tensorflow": good, "xla": bad}, rounds=2, round_s=0.001)
    row = rows["tensorflow"]
    assert row.ops == row.kernels and row.ops is not None and 2 <= row.ops <= 4
    assert row.min_us is not None and row.latency_us is not None and 0 < row.min_us <= row.latency_us
    assert rows["xla"].note == "RuntimeError: no such device"
    assert rows["xla"].latency_us is None


def test_trace_counts_calls_of_every_op() -> None:
    x = tf.constant(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))

    @tf.function
    def chain(x: tf.Tensor) -> tf.Tensor:
        for _ in range(3):
            x = tf.cumsum(tf.matmul(x, x))
        return x

    chain(x)
    kinds = bench.by_kind(bench.trace(lambda: chain(x)))
    assert set(kinds) & {"MatMul", "_MklMatMul"} and "Cumsum" in kinds


def test_result_files(tmp_path: Path) -> None:
    rows = [bench.Row("w", "tensorflow", 200.0, 190.0, 5, 5, 0.1, 1e-7, 2048), bench.Row("w", "xla", note="Oops: no"),
            bench.Row("w", "stitched", 100.0, 90.0, 1, 2, 0.5, 2e-7, 1024)]
    assert bench.ratio(rows, "w", "stitched") == 2.0
    assert bench.ratio(rows, "w", "xla") is None
    data, text = bench.save(bench.document(rows, bench.machine()), tmp_path / "new", "cpu", ["a line"])
    saved = json.loads(data.read_text())
    assert [r["system"] for r in saved["rows"]] == ["tensorflow", "xla", "stitched"]
    assert {"device", "versions", "commit", "date", "command", "rows"} <= set(saved)
    assert saved["versions"]["tensorflow"] == tf.__version__
    assert all(found in text.read_text() for found in ("2.00x", "Oops: no", "a line"))


def test_ratios_are_taken_round_by_round() -> None:
    rows = [bench.Row("w", "tensorflow", 20.0, rounds_us=[10.0, 20.0, 90.0]),
            bench.Row("w", "stitched", 30.0, rounds_us=[5.0, 30.0, 45.0])]
    assert bench.ratio(rows, "w", "stitched") == 2.0
    assert bench.ratio(rows, "w", "tensorflow", "stitched") == 0.5


def test_a_plot_that_cannot_be_made_loses_no_results(monkeypatch, capsys, tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    folder.mkdir()

    def measured(*args, **more):
        folder.rmdir()  # could be written when the command began
        return [bench.Row("ranker", "xla", latency_us=5.0, rounds_us=[5.0])]

    monkeypatch.setattr(bench, "bench_saved_model", measured)
    assert cli.main(["bench", "ranker", "--json", "--plot", str(folder / "p.png")]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["rows"][0]["workload"] == "ranker"
    assert "plot" in told.err.lower() and told.err.count("\n") == 1


def test_a_saved_model_on_all_systems(tmp_path: Path) -> None:
    module = tf.Module()
    module.scale = tf.Variable(2.0)
    module.f = tf.function(lambda x: {"y": tf.nn.softmax(tf.tanh(x) * module.scale)},
                           input_signature=[tf.TensorSpec([None, 8], tf.float32, "x")])
    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"serve": module.f})
    rows = bench.bench_saved_model(str(tmp_path / "m"), signature="serve", batch=5, rounds=1)
    assert [r.system for r in rows] == list(bench.SYSTEMS) and not any(r.note for r in rows)
    assert all(r.max_rel_error is not None and r.max_rel_error < 1e-6 for r in rows)
    assert rows[2].rewrite_s and rows[2].compile_s and rows[2].compile_s >= rows[2].rewrite_s
    bench_plots.plot(bench.document(rows, bench.machine()), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match="cannot be written"):
        bench_plots.plot(bench.document(rows, bench.machine()), tmp_path / "none" / "p.png")
    with pytest.raises(OptionError, match="'xyz' is not supported"):
        bench_plots.plot(bench.document(rows, bench.machine()), tmp_path / "p.xyz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "p.png"]  # nothing is left of what failed
    with pytest.raises(OptionError, match="nothing to plot"):
        bench_plots.plot(bench.document([bench.Row("w", "xla", note="no")], bench.machine()), tmp_path / "q.png")
    with pytest.raises(OptionError, match="Unknown system tvm"):
        bench.bench_saved_model(str(tmp_path / "m"), systems=["tvm"])
    with pytest.raises(OptionError, match="no signature 'serving_default'"):
        bench.bench_saved_model(str(tmp_path / "m"))
    with pytest.raises(OptionError, match="'serve' takes x"):
        bench.bench_saved_model(str(tmp_path / "m"), signature="serve", inputs={"z": np.ones(3)})
    with pytest.raises(SavedModelError, match="'serve' fails on the sample inputs"):
        bench.bench_saved_model(str(tmp_path / "m"), signature="serve", inputs={"x": np.array(["a"])})
    rows = bench.bench_saved_model(str(tmp_path / "m"), signature="serve", inputs={"serve/x": np.ones((2, 8))},
                                   rounds=1, systems=["stitched"])
    assert rows[0].latency_us and not rows[0].note  # NumPy's doubles are floats to the model


def test_systems_that_all_fail_are_a_failure(monkeypatch, capsys) -> None:
    def fails():
        raise ValueError("no")

    rows = bench.measure("w", {"xla": fails}, rounds=3)
    assert rows["xla"].note == "ValueError: no" and rows["xla"].latency_us is None
    monkeypatch.setattr(bench, "bench_saved_model", lambda *args, **more: list(rows.values()))
    assert cli.main(["bench", "w"]) == 1
    assert "ValueError: no" in capsys.readouterr().out


def test_verdicts_name_what_is_slow_or_wrong() -> None:
    rows = [bench.Row("w", "tensorflow", 100.0), bench.Row("w", "stitched", 110.0, max_rel_error=1e-3)]
    wrong, slow = models_bench.verdicts(rows)
    assert slow == "w: stitched takes 1.10 times the time of tensorflow"
    assert wrong == "w: stitched is off by 1.0e-03 of the largest value"
    rows[1] = bench.Row("w", "stitched", 101.0, max_rel_error=1e-7)
    assert models_bench.verdicts(rows) == []
    rows = [bench.Row("w", "xla", 100.0, kernels=2, compile_s=1.0, gpu_busy_us=9.0),
            bench.Row("w", "stitched", 50.0, kernels=3, compile_s=1.5, gpu_busy_us=12.0), bench.Row("w", "jax", 40.0)]
    assert models_bench.verdicts(rows) == [
        "w: stitched takes 1.25 times the time of jax", "w: stitched has 3 kernels, XLA 2",
        "w: stitched has 12 GPU-busy us, XLA 9", "w: stitched has 1.50 seconds to compile, XLA 1.00"]
    assert bench.over_best(rows, rows[1]) == 0.8


def test_quick_run_writes_all_systems(tmp_path: Path) -> None:
    status = models_bench.main(["--workloads=lr", "--systems=tensorflow,xla,stitched", "--quick", f"--out={tmp_path}"])
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert [r["system"] for r in rows] == ["tensorflow", "xla", "stitched"]
    assert all(r["latency_us"] > 0 and not r["note"] for r in rows)
    assert status == 0


@pytest.mark.parametrize("bad", [["--systems=tvm"], ["--workloads=nope"], ["--rounds=0"]])
def test_bad_arguments(bad: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        models_bench.parse(bad)
    assert end.value.code == 2


def test_a_stitched_op_counts_as_its_kernels() -> None:
    call = tf_stitch.function(lambda x: tf.nn.softmax(tf.tanh(x) + 1.0),
                              input_signature=[tf.TensorSpec([None, 64], tf.float32)])
    x = tf.ones([8, 64])
    call(x)
    traced = bench.trace(lambda: call(x))
    steps = sum(k.calls for k in traced.kernels)
    assert [o.kind for o in traced.ops if o.kind not in bench.FREE_OPS] == ["StitchedProgram"]
    assert bench.counts(traced) == (1, steps) and steps >= 1
