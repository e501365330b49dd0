"""The parts of the GPU check that a machine without one can run: many sizes, a second process, promises, plots."""
from __future__ import annotations

import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from models import dynamic, gpu_check, report, restart, xla_compiles
from models.claims import claims
from models.claims import main as claims_main
from models.workloads import REGISTRY
from tf_stitch import bench

ROW = {"latency_us": 10.0, "rounds_us": [10.0], "kernels": 2, "compile_s": 1.0, "gpu_busy_us": 8.0}


def test_one_rewrite_serves_many_sizes() -> None:
    """All workloads are prepared before the first one measures."""
    sizes, made, end = range(1, 13), [], time.time() + 300
    for name, measure in dynamic.experiments([REGISTRY["lr"], REGISTRY["layernorm"]], sizes, [1, 7, 12], end,
                                             rounds=2, round_s=0.005, xla_latencies=2):
        made.append(measure())
        assert made[-1]["workload"] == name
    for found in made:
        assert found["rewrites"] == 0 and found["sizes"] == [*sizes]
        assert [(s["batch"], "xla_us" in s) for s in found["samples"]] == [(1, True), (7, False), (12, True)]
        assert all(s["ratio"] > 0 and s["static_us"] > 0 for s in found["samples"])
        assert found["worst_ratio"] == max(s["ratio"] for s in found["samples"])
        assert len(found["latency_us"]) == len(found["first_call_us"]) == 12
        assert found["compile_s"] > 0
    assert made[0]["plans"] == 11  # the last size was the first call
    assert "lr, 12 batch sizes: 0 rewrites and 11 plans" in dynamic.line(made[0])
    assert "batches 1, 7, 12 take at most" in dynamic.line(made[0])
    head, *rows = dynamic.table(made)[2:]
    assert head.split() == ["1", "7", "12"] and [row.split()[0] for row in rows] == ["lr", "layernorm"]


def test_no_more_is_compared_than_there_is_time_for() -> None:
    """One size has a rewrite in any case; what is measured then ends in time."""
    with dynamic.prepare(REGISTRY["lr"], range(1, 13), [1, 5, 12], rounds=1, round_s=0.001, seconds=0.0) as ahead:
        found = ahead.result()
        assert [s["batch"] for s in found["samples"]] == [1]
    with dynamic.prepare(REGISTRY["lr"], range(1, 13), [1, 5], rounds=1, round_s=0.001) as ahead:
        found = ahead.result(0.0)
    assert found["samples"] == found["sizes"] == [] and found["worst_ratio"] is None
    assert "no size was compared" in dynamic.line(found)
    assert dynamic.table([found]) == dynamic.table([]) == []


def test_who_is_not_ready_in_time_is_ended() -> None:
    with dynamic.prepare(REGISTRY["lr"], range(1, 13), [1]) as ahead:
        ahead.wait(0.0)
        with pytest.raises(RuntimeError, match="batch sizes of lr ended with status -9"):
            ahead.result()


def test_which_sizes_are_compared() -> None:
    assert dynamic.which("1,3,8,200", range(1, 101)) == [1, 3, 8]
    assert dynamic.which("3", range(1, 100)) == [1, 50, 99]
    ordered = dynamic.spread_first(range(1, 6))
    assert ordered[:3] == [1, 5, 3] and sorted(ordered) == [*range(1, 6)]


def test_compiles_of_xla() -> None:
    """Workers go on to the next workload; each workload has its share of the time."""
    found = {name: compiled() for name, compiled in xla_compiles.experiments(
        [REGISTRY["lr"], REGISTRY["layernorm"]], range(1, 4), time.time() + 600, processes=2)}
    assert [*found] == ["lr", "layernorm"]
    for one in found.values():
        assert one["sizes"] == [1, 2, 3] and one["of"] == 3 and all(s > 0 for s in one["compile_s"])
        assert one["processes"] == 2
        assert "XLA compiles the 3 sizes in" in xla_compiles.line(one)
    for _, late in xla_compiles.experiments([REGISTRY["lr"]], range(1, 4), time.time(), processes=1):
        assert late()["sizes"] == [1]  # one in any case


def test_a_share_of_compiles_is_said_to_be_one() -> None:
    found = {"workload": "w", "of": 100, "sizes": [1, 100], "compile_s": [2.0, 4.0], "wall_s": 4.1, "processes": 2,
             "cores": 16}
    assert xla_compiles.line(found) == (
        "XLA compiles 2 of 100 sizes in 6 s in all: 300 s for every size, were they like these (3.0 s each, by 2 "
        "processes side by side on 16 cores, in 4 s)")


def test_verdicts_on_many_sizes() -> None:
    found = {"workload": "w", "rewrites": 2, "samples": [{"batch": 3, "ratio": 1.2}, {"batch": 4, "ratio": 1.0}]}
    assert dynamic.verdicts(found) == ["w: 2 rewrites after the first",
                                       "w, batch 3: 1.20 times the time of a rewrite for this size"]


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    found = restart.second_process("lr", tmp_path)
    assert found["fallbacks"] == found["cold"]["fallbacks"] == 0
    assert 0 < found["rewrite_s"] < found["first_answer_s"]
    assert found["rewrite_s"] < found["cold"]["rewrite_s"]
    kept = {p: p.stat().st_ino for p in tmp_path.rglob("*") if p.is_file()}  # of a file written anew: another
    again = restart.second_process("lr", tmp_path, fill=False)
    assert kept == {p: p.stat().st_ino for p in tmp_path.rglob("*") if p.is_file()}
    assert again["fallbacks"] == 0
    assert "error" in restart.second_process("nope", tmp_path, fill=False)


def document(stitched: dict, xla: dict, **more) -> dict:
    rows = [bench.Row("lr", "tensorflow", 50.0, rounds_us=[50.0]), bench.Row("lr", "xla", **{**ROW, **xla}),
            bench.Row("lr", "stitched", **{**ROW, **stitched}), bench.Row("layernorm", "stitched", **ROW)]
    return {**bench.document(rows, bench.machine()), **more}


def verdict(found: dict, what: str) -> bool | None:
    (claim,) = [c for c in claims(found) if c.what.startswith(what)]
    return claim.kept


@pytest.mark.parametrize("us, kernels, compile_s, kept", [(4.0, 1, 0.5, True), (6.0, 2, 1.5, False)])
def test_promises_are_kept_or_not(us, kernels, compile_s, kept) -> None:
    made = document({"latency_us": us, "rounds_us": [us], "kernels": kernels, "compile_s": compile_s}, {})
    assert verdict(made, "XLA's latency over stitched, lr (at least 2)") is kept
    assert verdict(made, "fewer kernels than XLA, lr") is kept
    assert verdict(made, "compiles sooner than XLA, lr") is kept
    assert verdict(made, "XLA's latency over stitched, rnn (") is None  # not measured
    assert verdict(made, "a second process") is None


def test_more_promises() -> None:
    runs = {"": {"copy_gb_per_s": 4300.0}}  # the run of the rows
    assert verdict(document({}, {}, runs=runs), "layernorm, share of the copy bandwidth") is True
    busy = document({}, {}, runs=runs)
    busy["rows"][-1]["gpu_busy_us"] = 20.0
    assert verdict(busy, "layernorm, share of the copy bandwidth") is False
    assert verdict(document({}, {}, restart={"lr": {"first_answer_s": 0.4}}), "a second process") is True
    assert verdict(document({}, {}, restart={"lr": {"first_answer_s": 1.4}}), "a second process") is False
    assert verdict(document({}, {}, restart={"lr": {"error": "no"}}), "a second process") is False
    right = document({"max_rel_error": 3e-5}, {})
    right["rows"][0]["max_rel_error"] = 1e-5
    assert verdict(right, "as right as TensorFlow, known") is True  # TensorFlow itself errs by a third of it
    right["rows"][0]["max_rel_error"] = 1e-8
    assert verdict(right, "as right as TensorFlow, known") is False
    assert verdict(document({}, {}, checks={"tests": {"a.py": {"passed": 3}}}), "GPU check: tests") is True
    for step in ({"error": "it died"}, {"passed": 3, "failed": 1}):
        bad = {"tests": {"a.py": {"passed": 3}, "b.py": step}}
        assert verdict(document({}, {}, checks=bad), "GPU check: tests") is False
    faster = document({}, {})
    faster["rows"].append({**faster["rows"][2], "system": "torch", "latency_us": 3.0})
    assert verdict(faster, "fastest of all systems, lr") is False


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = {"workload": "lr", "sizes": [1, 2], "latency_us": [3.0, 4.0], "compile_s": 1.0,
             "samples": [{"batch": 1, "static_us": 3.0, "xla_us": 5.0, "ratio": 1.0},
                         {"batch": 2, "static_us": 3.0, "ratio": 1.2}], "rewrites": 0, "plans": 1,
             "first_call_us": [9.0, 9.0], "worst_ratio": 1.2}
    xla = {"workload": "lr", "of": 2, "sizes": [1], "compile_s": [2.0], "wall_s": 2.0, "processes": 1, "cores": 2}
    (tmp_path / "r.json").write_text(json.dumps(document({}, {}, dynamic=[curve], xla_compiles=[xla])))
    assert report.main([str(tmp_path / "r.json")]) == 0
    assert claims_main([str(tmp_path / "r.json")]) == 1  # promises are broken
    text = (tmp_path / "r.txt").read_text()
    assert "lr, batch 2: 1.20 times the time of a rewrite" in text and "XLA compiles 1 of 2 sizes in 2 s" in text
    made = {p.name for p in tmp_path.iterdir()} - {"r.json", "r.txt"}
    assert made == {f"r_{n}.{kind}" for n in ("latency", "kernels", "busy", "dynamic") for kind in ("png", "svg")}
    assert all((tmp_path / n).stat().st_size > 2000 for n in made)


def test_runs_are_merged(tmp_path: Path) -> None:
    """Rows name their run; where two runs measured the same row, the later one counts."""
    def run(name: str, commit: str, **parts: dict) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        facts = {"machine": {**bench.machine(), "commit": commit, "gpus": ["A GPU"]}}
        for part, steps in {"machine": facts, **parts}.items():
            (folder / f"{part}.json").write_text(json.dumps(steps))
        return folder

    def rows(us: float, *names: str) -> dict:
        return {n: {"rows": [{"workload": n, "system": "stitched", "latency_us": us}]} for n in names}

    first = run("first", "abc", bench={**rows(5.0, "rnn", "lr"), "w2v": {"error": "the process died"}})
    second = run("second", "def", bench=rows(3.0, "lr"), restart={"lr": {"first_answer_s": 0.5}}, peers={
        "lr, jax": {"rows": [{"workload": "lr", "system": "jax", "how": "jax.jit", "note": "", "latency_us": 9.0,
                              "version": "1.0"}]}})
    made = report.merged([first, second], ["a note"])
    found = [(r["workload"], r["system"], r["latency_us"], r["run"]) for r in made["rows"]]
    assert found == [("lr", "jax", 9.0, "second"), ("lr", "stitched", 3.0, "second"), ("rnn", "stitched", 5.0, "first")]
    assert made["commit"] == "abc; def" and made["device"].startswith("A GPU") and made["versions"]["jax"] == "1.0"
    assert made["claims"]["fastest of all systems, lr"]["kept"] is True
    assert made["claims"]["a second process answers in under 1 s"]["kept"] is True
    report.write(made, tmp_path / "r")
    text = (tmp_path / "r.txt").read_text()
    assert all(s in text for s in ("not measured: bench, w2v: the process died", "Run second:", "a note", "jax.jit"))
    with pytest.raises(FileNotFoundError):
        report.merged([tmp_path])


def test_steps_are_written_as_they_end(tmp_path: Path) -> None:
    record = gpu_check.Record(tmp_path / "part.json")

    def bad():
        raise ValueError("no")

    gpu_check.walk(record, [("a", lambda: {"x": 1}), ("b", bad)], end=1e12)
    gpu_check.walk(record, [("late", lambda: {"x": 2})], end=0.0)
    steps = json.loads((tmp_path / "part.json").read_text())
    assert steps["a"]["x"] == 1 and steps["b"]["error"] == "ValueError: no" and "late" not in steps
    again = gpu_check.Record(tmp_path / "part.json")
    gpu_check.walk(again, [("a", bad)], end=1e12)  # has a result
    assert again.steps["a"]["x"] == 1


def test_outcomes_of_tests_are_read_from_their_report() -> None:
    report = ElementTree.fromstring(
        "<testsuite><testcase name='a'/><testcase name='b'><failure message='x is&#10; wrong'>...</failure></testcase>"
        "<testcase name='c'><skipped message='one GPU'/></testcase><testcase name='d'><error message='no'/></testcase>"
        "</testsuite>")
    found = [gpu_check._outcome(case) for case in report.iter("testcase")]
    assert found == [("passed", ""), ("failed", "x is wrong"), ("skipped", "one GPU"), ("failed", "no")]


def test_what_failed_is_in_the_summary(tmp_path: Path) -> None:
    record = gpu_check.Record(tmp_path / "tests.json")
    record.put("alone", {"passed": 3, "failed": 1, "skipped": 0, "seconds": 2.0, "what": ["failed: tests.gpu::f: no"]})
    text = gpu_check.summary(tmp_path, ["tests"])
    assert "  alone: 3 passed, 1 failed, 0 skipped, 2 s" in text and "  failed: tests.gpu::f: no" in text
