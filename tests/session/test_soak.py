"""A short form of models.soak: tenants added, removed, swapped, failing, cancelled, overloaded."""
from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace

import pytest

import tf_stitch
from models import mixed_load, serving, soak
from tf_stitch.serving import serve_bench
from tf_stitch.serving.load import Outcome

from .support import NATIVE, workers


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return soak.toys(tmp_path_factory.mktemp("toys"), 3, NATIVE)


@pytest.mark.parametrize("coalesce", [False, True], ids=["plain", "coalescing"])
def test_soak(subjects, coalesce):
    threads = workers()
    with tf_stitch.StitchSession(coalesce=coalesce, threads=16, options=NATIVE) as session:
        report = soak.Soak(session, subjects, clients=4, seed=3).run(3.0)
    assert report["problems"] == []
    for what in ("answered", "failed", "cancelled", "rejected by the queue", "versions swapped"):
        assert report["counts"].get(what, 0) > 0, what
    assert workers() == threads


def test_soak_notices_wrong_answers_and_counts(subjects):
    with tf_stitch.StitchSession(coalesce=False, threads=4, options=NATIVE) as session:
        wrong = [replace(s, right=lambda version, inputs, ended: False) for s in subjects]
        assert any("versions" in p for p in soak.Soak(session, wrong, clients=1).run(0.3)["problems"])
    with tf_stitch.StitchSession(coalesce=False, threads=4, options=NATIVE) as session:
        run = soak.Soak(session, subjects, clients=1)
        run.counts.add("answered")  # one more than there were
        report = run.run(0.3)
    assert len(report["problems"]) == 1 and "answered, its clients" in report["problems"][0]


def test_soak_judges_the_slope_of_memory():
    times = [5.0 * i for i in range(30)]
    assert soak._growth(times[:5], times[:5]) is None  # too few
    assert soak._growth(times, [100.0 + 90.0 * (i < 8) for i in range(30)]) == 0.0  # what is only at the beginning
    assert soak._growth(times, [100.0 + 50.0 * (i % 7 == 0) for i in range(30)]) == 0.0  # what comes and goes
    assert soak._growth(times, [100.0 + 2.0 * i + 30.0 * (i % 5 == 0) for i in range(30)]) == pytest.approx(38.0)


def test_soak_that_is_cut_short_leaves_a_report(subjects, tmp_path):
    stop, notes = threading.Event(), []
    with tf_stitch.StitchSession(coalesce=False, threads=4, options=NATIVE) as session:
        def note(report):
            notes.append(report)
            stop.set()

        report = soak.Soak(session, subjects, clients=2, check_s=0.1, stop=stop, note=note).run(60.0)
    assert report["finished"] and report["problems"] == [] and report["seconds"] < 50
    assert len(notes) == 1 and not notes[0]["finished"] and len(notes[0]["memory_mb"]) == 1
    notes[0]["title"] = "toys"
    assert "cut short" in list(soak.tables(notes[0]))[1]


def test_soak_whose_budget_is_used_up_ends_at_once(tmp_path):
    out, handler = tmp_path / "soak.json", signal.getsignal(signal.SIGTERM)
    assert soak.main(["--budget", "0", "--clients", "2", "--no-coalesce", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["finished"] and report["problems"] == [] and report["seconds"] < 60
    assert signal.getsignal(signal.SIGTERM) == handler


def test_benchmark_of_real_tenants(tmp_path):
    assert serving.main(["--kinds", "rnn", "--each", "2", "--policies", "stitched", "--seconds", "0.1", "--probes", "2",
                         "--mixed-policies", "stitched", "--mixed-seconds", "0.2", "--soak-seconds", "1", "--out",
                         str(tmp_path)]) == 0
    found = json.loads((tmp_path / "serving.json").read_text())
    assert found["rows"][0]["policy"] == "stitched" and found["rows"][0]["throughput_rps"] > 0
    assert [(r["part"], r["wrong"]) for r in found["mixed"]] == [("alone", 0), ("mixed", 0)]
    assert found["mixed"][1]["best_effort_rps"] > 0
    assert all(len(r["p99_ms_of_rounds"]) == mixed_load.ROUNDS for r in found["mixed"])
    assert found["mixed"][0]["p99_to_alone_interval"] == [1.0, 1.0]
    low, high = found["mixed"][1]["p99_to_alone_interval"]
    assert low <= found["mixed"][1]["p99_to_alone"] <= high
    (report,) = found["soak"]
    assert report["problems"] == [] and report["counts"]["answered"] > 0 and report["counts"]["failed"] > 0
    assert "1.00x" in (tmp_path / "serving.txt").read_text()


def _row(policy, rate, p99_ms, highest=True):
    outcome = Outcome(rate, rate, 0.99, 1.0, 2.0, p99_ms, 100, 100, 0, 0, 0, 0, 0.0, 0.0)
    return serve_bench.Row(policy, 16, outcome, highest=highest)


def test_latencies_are_compared_at_the_rates_of_others():
    rows = [_row("timeslice", 100.0, 30.0), _row("hyperq", 200.0, 40.0), serve_bench.Row("mps", 16, skipped="none")]
    assert serving._also("hyperq", rows[:1]) == []
    assert serving._also("stitched", rows) == [100.0, 200.0, pytest.approx(660.0)]  # 1.1 times three times hyperq's
    rows += [_row("stitched", 1000.0, 45.0), _row("stitched", 100.0, 5.0, False), _row("stitched", 660.0, 20.0, False)]
    assert [line.strip() for line in serving._ratios(rows)] == [
        "stitched to timeslice: 10.00x the requests, p99 45.0 against 30.0 ms",
        "at 100 requests a second, 1.00x: p99 5.00 against 30.0 ms",
        "at 660 requests a second, 6.60x: p99 20.00 against 30.0 ms",
        "stitched to hyperq: 5.00x the requests, p99 45.0 against 40.0 ms",
        "at 660 requests a second, 3.30x: p99 20.00 against 40.0 ms"]
