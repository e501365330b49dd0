"""A short form of models.soak: tenants added, removed, swapped, failing, cancelled, overloaded."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
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
    assert report["counts"]["ended"] == report["counts"]["sent"]
    assert all(row["requests"] > 0 for row in report["not_overloaded"].values())
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
    with tf_stitch.StitchSession(coalesce=False, threads=4, options=NATIVE) as session:
        run = soak.Soak(session, subjects, clients=1)
        run.counts.add("ended")  # one request twice
        report = run.run(0.3)
    assert len(report["problems"]) == 1 and "requests ended" in report["problems"][0]


def _rises(value, seconds=300.0, every=5.0):
    times = [every * i for i in range(1, int(seconds / every) + 1)]
    return soak._growth(times, [value(t) for t in times])


def test_soak_judges_how_memory_grows_in_the_second_half():
    assert soak._growth([], []) is None
    assert soak._growth([5.0 * i for i in range(8)], [0.0] * 8) is None  # too few
    flat = {"constant": lambda t: 100.0, "falls": lambda t: 200.0 - t / 9,
            "warm-up": lambda t: 100.0 + 90.0 * (t < 140),
            "saw-tooth": lambda t: 100.0 + 30.0 * (t % 35), "step early": lambda t: 900.0 * (t > 130),
            "step late": lambda t: 100.0 + 900.0 * (t > 230), "peaks": lambda t: 100.0 + 400.0 * (t % 40 == 0)}
    for name, value in flat.items():
        assert _rises(value) <= 1.0, name
    leak = 0.4  # MB a second: 60 in the second half
    for name, value in flat.items():
        least = 30.0 if name == "falls" else 50.0
        assert _rises(lambda t, value=value: value(t) + leak * t) >= least, name


@pytest.mark.parametrize("leak_mb", [0, 16])
def test_soak_notices_a_leak(subjects, leak_mb):
    stop, kept = threading.Event(), []

    def note(report):
        kept.append(np.ones(leak_mb << 17))
        if len(report["memory_mb"]) >= 5 * soak.LEAST_CHECKS:
            stop.set()

    with tf_stitch.StitchSession(coalesce=False, threads=4, options=NATIVE) as session:
        report = soak.Soak(session, subjects[:2], clients=2, check_s=0.1, stop=stop, note=note, rate=200.0).run(300.0)
    found = [problem.split()[1] for problem in report["problems"]]
    assert found == ([] if not leak_mb else ["(resident)", "(heap)"]), (report["growth_mb"], report["memory_mb"])


def test_soak_shows_what_tenants_get_that_are_not_overloaded():
    latencies = soak.Latencies(slo_s=0.1)
    assert latencies.report() == {"requests": 0, "slo_attainment": None, "p50_ms": None, "p99_ms": None}
    for _ in range(98):
        latencies.add(0.01)
    latencies.add(1.0)
    latencies.add(None)
    report = latencies.report()
    assert report["requests"] == 100 and report["slo_attainment"] == 0.98
    assert 10.0 <= report["p50_ms"] <= 10.5 and 1000.0 <= report["p99_ms"] <= 1050.0
    latencies.add(0.01)
    assert latencies.report()["p99_ms"] <= 10.5


def test_soak_without_a_gpu_refuses_to_stand_for_one_with(monkeypatch, capsys):
    monkeypatch.setattr(soak.tf.config, "list_physical_devices", lambda kind: [])
    assert soak.main(["--gpu", "--budget", "0"]) == 1
    assert "sees no GPU" in capsys.readouterr().err


def test_soak_that_is_cut_short_leaves_a_report(subjects, tmp_path):
    stop, notes = threading.Event(), []
    with tf_stitch.StitchSession(coalesce=False, threads=4, options=NATIVE) as session:
        def note(report):
            notes.append(report)
            stop.set()

        report = soak.Soak(session, subjects, clients=2, check_s=0.1, stop=stop, note=note).run(60.0)
    assert report["finished"] and report["problems"] == [] and report["seconds"] < 50 and report["ended_early"]
    assert "ended early" in list(soak.tables({**report, "title": "toys"}))[-1]
    assert len(notes) == 1 and not notes[0]["finished"] and len(notes[0]["memory_mb"]) == 1
    notes[0]["title"] = "toys"
    assert "cut short" in list(soak.tables(notes[0]))[-1]


def test_soak_whose_budget_is_used_up_ends_at_once(tmp_path):
    out, handler = tmp_path / "soak.json", signal.getsignal(signal.SIGTERM)
    assert soak.main(["--budget", "0", "--clients", "2", "--no-coalesce", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["finished"] and report["problems"] == [] and report["seconds"] < 60 and not report["ended_early"]
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_soak_in_the_background_ends_at_a_signal_with_a_whole_report(tmp_path, number):
    """A shell has what it starts in the background ignore SIGINT."""
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "models.soak", "--minutes", "10", "--clients", "2", "--rate", "100",
               "--no-coalesce", "--out", str(out)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TF_STITCH_COMMIT": "abc"},
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        try:
            end = time.monotonic() + 240
            while not out.exists() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            assert not json.loads(out.read_text())["finished"], (tmp_path / "log").read_text()[-2000:]
            process.send_signal(number)
            assert process.wait(120) == 0, (tmp_path / "log").read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    report = json.loads(out.read_text())
    assert report["finished"] and report["ended_early"] and report["problems"] == []
    assert report["machine"]["commit"] == "abc" and report["counts"]["answered"] > 0


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
