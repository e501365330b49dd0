"""The load generator, the search, traces, and serve-bench with tiny models."""
from __future__ import annotations

import json
import math
import multiprocessing
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tf_stitch import cli
from tf_stitch.errors import OptionError
from tf_stitch.serving import load, processes, recording, serve_bench
from tf_stitch.serving.load import Client, Outcome
from tf_stitch.serving.policies import POLICIES, Devices, Model, batched, open_session
from tf_stitch.serving.processes import ProcessError
from tf_stitch.serving.recording import Event, read_trace, write_trace
from tf_stitch.serving.search import highest_rate

from .support import WIDTH, check, rows, scaled, want
from .test_session import saved

X = {"x": np.zeros(1, np.float32)}


def clients(*shares, slo_ms=50.0):
    return [Client(f"c{i}", slo_ms, [X, X], share=s) for i, s in enumerate(shares)]


# --- arrivals ---------------------------------------------------------------------------------------

def test_poisson_arrivals():
    arrivals = load.poisson(clients(3.0, 1.0), 2000.0, 10.0, seed=1)
    gaps = np.diff(arrivals.times)
    assert abs(arrivals.rate / 2000 - 1) < 0.03 and (gaps > 0).all()
    assert abs(gaps.std() / gaps.mean() - 1) < 0.05  # exponential
    assert abs((arrivals.clients == 0).mean() - 0.75) < 0.02
    assert set(arrivals.samples.tolist()) == {0, 1}
    again = load.poisson(clients(3.0, 1.0), 2000.0, 10.0, seed=1)
    assert (again.times == arrivals.times).all() and (again.clients == arrivals.clients).all()


def test_loads_one_after_the_other_count_as_one():
    some = clients(1.0)

    def part(times, latencies, errors, wrong):
        arrivals = load.Arrivals(np.array(times), np.zeros(len(times), int), np.zeros(len(times), int))
        done = arrivals.times + np.array(latencies)
        return arrivals, load.Measured(arrivals.times + 0.001, done, errors, wrong, 0.1 * wrong, times[-1])

    slices = [part([0.1, 0.2, 1.0], [0.01, 0.02, 0.03], {}, 0), part([0.5, 2.0], [0.04, np.inf], {1: (True, "no")}, 1)]
    arrivals, measured = load.one_after_the_other(slices)
    assert arrivals.times.tolist() == [0.1, 0.2, 1.0, 1.5, 3.0]
    outcome = load.summary(some, arrivals, measured, 0.0)
    assert (outcome.requests, outcome.answered, outcome.rejected, outcome.wrong) == (5, 4, 1, 1)
    assert outcome.p50_ms == pytest.approx(30) and outcome.p99_ms == math.inf and outcome.worst_error == 0.1
    assert outcome.lateness_p99_ms == pytest.approx(1) and outcome.first_error == "no" and measured.errors.keys() == {4}
    assert measured.finished == 3.0


def test_replay():
    some = [Client("a", 10, [{"x": np.zeros((1, 2))}, {"x": np.zeros((3, 2))}]), Client("b", 10, [{"x": np.zeros(1)}])]
    events = [Event(5.0, "a", "s", {"x": (3, 2)}), Event(5.5, "b", "s", {"x": (9,)}),
              Event(7.0, "a", "s", {"x": (1, 2)})]
    arrivals = load.replay(some, events, speed=2.0)
    assert arrivals.times.tolist() == [0.0, 0.25, 1.0]
    assert arrivals.clients.tolist() == [0, 1, 0]
    assert arrivals.samples.tolist() == [1, 0, 0]  # by shape, where there is one
    with pytest.raises(OptionError, match="requests of 'z', which is none of the models"):
        load.replay(some, [Event(0.0, "z", "s", {})])
    with pytest.raises(OptionError, match="no requests"):
        load.replay(some, [])


# --- the generator ----------------------------------------------------------------------------------

def test_open_loop_counts_from_the_arrival():
    """A server that stalls once makes every request behind the stall late, though each is served at once."""
    lock = threading.Lock()

    def serve(index):
        with lock:
            time.sleep(0.2 if index == 0 else 0)
        return {"y": np.zeros(1)}

    with ThreadPoolExecutor(4) as pool:
        count = iter(range(1000))
        outcome = load.run(lambda *_: pool.submit(serve, next(count)), clients(1.0, slo_ms=100.0),
                           load.Arrivals(np.linspace(0, 0.4, 41), np.zeros(41, int), np.zeros(41, int)))
    assert outcome.answered == outcome.requests == 41
    assert 0.6 < outcome.slo_attainment < 0.85  # those of the first 100 ms were late
    assert 150 < outcome.p99_ms < 260 and outcome.p50_ms < 60


def test_a_late_generator_is_told_from_a_slow_server():
    """The first request takes long to submit: those behind it come late, and are answered at once."""
    def submit(*_):
        time.sleep(0.3 if next(count) == 0 else 0)
        future = Future()
        future.set_result({"y": np.zeros(1)})
        return future

    count = iter(range(1000))
    outcome = load.run(submit, clients(1.0, slo_ms=100.0),
                       load.Arrivals(np.linspace(0, 0.4, 400), np.zeros(400, int), np.zeros(400, int)))
    assert outcome.lateness_p99_ms > 200 and outcome.p99_ms > 200 and outcome.lateness_p50_ms > 50
    assert outcome.from_send_p99_ms < 100  # but of the first one


def test_outcomes_are_told_apart():
    def submit(name, inputs):
        future: Future = Future()
        k = next(count)
        if k % 5 == 0:
            raise tf.errors.ResourceExhaustedError(None, None, "full")
        if k % 5 == 1:
            future.set_exception(tf.errors.InvalidArgumentError(None, None, "bad"))
        elif k % 5 == 2:
            pass  # never answered
        else:
            future.set_result({"y": np.ones(1, np.float32)})
        return future

    count = iter(range(1000))
    some = [Client("c", 20.0, [X], expected=[{"y": np.full(1, 1.0 if k else 2.0, np.float32)}]) for k in range(1)]
    arrivals = load.Arrivals(np.linspace(0, 0.05, 50), np.zeros(50, int), np.zeros(50, int))
    outcome = load.run(submit, some, arrivals, threads=1)
    assert (outcome.requests, outcome.answered, outcome.rejected, outcome.failed, outcome.unanswered) == (
        50, 20, 10, 10, 10)
    assert outcome.wrong == 20 and outcome.worst_error == pytest.approx(0.5)
    assert outcome.p99_ms == math.inf and outcome.slo_attainment == pytest.approx(0.4)
    assert outcome.first_error in ("full", "bad")


def test_best_effort_and_warm_up_do_not_count():
    def submit(name, inputs):
        future: Future = Future()
        if name == "fast" or next(late):
            future.set_result({})
        return future

    late = iter([False] * 10 + [True] * 1000)
    some = [Client("fast", 50.0, [X]), Client("bulk", 50.0, [X], best_effort=True)]
    arrivals = load.Arrivals(np.linspace(0, 0.1, 20), np.arange(20) % 2, np.zeros(20, int))
    outcome = load.run(submit, some, arrivals, threads=1, warm=0.05)
    assert outcome.slo_attainment == 1.0 and outcome.requests == 10 and outcome.unanswered == 5
    assert outcome.by_client["bulk"]["slo_attainment"] == 0.0


# --- the search -------------------------------------------------------------------------------------

def outcome(share):
    return Outcome(1.0, 1.0, share, 1.0, 1.0, 1.0, 1, 1, 0, 0, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize("growth", [1.25, 2.0])
@pytest.mark.parametrize("start", [10.0, 700.0, 100_000.0])
def test_search_finds_the_limit(start, growth):
    found = highest_rate(lambda rate: outcome(1.0 if rate <= 1000 else 0.5), start, precision=0.02, probes=80,
                         growth=growth)
    assert 1000 / 1.02 <= found.rate <= 1000
    assert found.outcome is not None and found.outcome.slo_attainment == 1.0


def test_search_forgives_one_bad_load():
    failed = set()

    def probe(rate):
        if rate not in failed:
            failed.add(rate)
            return outcome(0.5)
        return outcome(1.0 if rate <= 1000 else 0.5)

    assert 900 <= highest_rate(probe, 100.0, probes=60).rate <= 1000


def test_search_near_its_start_sends_few_loads():
    rates = []

    def probe(rate):
        rates.append(rate)
        return outcome(1.0 if rate <= 1000 else 0.1)  # by far: not sent again

    assert highest_rate(probe, 900.0, growth=1.25).rate == pytest.approx(1000, rel=0.06)
    assert rates[0] == 900.0 and len(rates) <= 5 and len(set(rates)) == len(rates)


def test_search_without_success_or_without_end():
    found = highest_rate(lambda rate: outcome(0.0), 100.0, probes=6)
    assert found.rate == 0 and found.outcome is None and len(found.tried) == 6
    assert highest_rate(lambda rate: outcome(1.0), 100.0, limit=1000.0).rate == 1000.0


# --- traces -----------------------------------------------------------------------------------------

def test_recording(session, tmp_path):
    session.add("a", scaled(2.0))
    session.add("b", scaled(3.0), verify=False)
    path = tmp_path / "trace.jsonl"
    with session.record(path):
        with pytest.raises(OptionError, match="recorded to"):
            session.record(tmp_path / "other")
        session.run("a", rows(0, 2))
        session.run("b", rows(0, 3))
    session.run("a", rows(0))  # is not recorded
    events = read_trace(path)
    assert [(e.tenant, e.signature, e.shapes) for e in events] == [
        ("a", "serving_default", {"x": (2, WIDTH)}), ("b", "serving_default", {"x": (3, WIDTH)})]
    assert 0 <= events[0].t < events[1].t < 10
    write_trace(tmp_path / "again", events)
    assert read_trace(tmp_path / "again") == events


@pytest.mark.parametrize("chunk", [1, 4096])
def test_a_full_disk_ends_the_recording_only(session, monkeypatch, caplog, chunk):
    monkeypatch.setattr(recording, "CHUNK", chunk)
    session.add("a", scaled(2.0), verify=False)
    with session.record("/dev/full"):
        for k in range(200):
            check(session.run("a", rows(k)), 2.0, rows(k))
    assert [r.message for r in caplog.records if r.name == "tf_stitch"] == [
        "The trace '/dev/full' cannot be written (No space left on device); the recording ends."]
    assert session._recorder is None


@pytest.mark.parametrize(("text", "message"), [
    ("", "no trace of version"), ('{"tf_stitch_trace": 9}\n', "version"), ("hello\n", "no JSON"), ("[]\n", "version"),
    ('{"tf_stitch_trace": 1}\n{"t": 0}\n', "lacks"), ('{"tf_stitch_trace": 1}\n[]\n', "lacks"),
    ('{"tf_stitch_trace": 1}\n{"t": NaN, "tenant": "a", "signature": "s", "shapes": {}}\n', "lacks t"),
    ('{"tf_stitch_trace": 1}\n{"t": 0, "tenant": "a", "signature": "s", "shapes": {"x": [Infinity]}}\n', "lacks")])
def test_bad_traces(tmp_path, text, message):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(OptionError, match=message):
        read_trace(tmp_path / "trace")
    with pytest.raises(OptionError, match="cannot be read"):
        read_trace(tmp_path / "none")


# --- policies and the benchmark ---------------------------------------------------------------------

@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    return [Model(saved(scaled(float(k)), folder / f"m{k}"), Client(f"m{k}", 200.0, [{"x": rows(i)} for i in range(3)]))
            for k in (1, 2)]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_gives_right_answers(policy, models, tmp_path):
    with open_session(policy, models, Devices(), tmp_path, threads=8) as session:
        futures = [(k, i, session.submit(f"m{k}", {"x": rows(i, 1 + i % 3)})) for i in range(20) for k in (1, 2)]
        for k, i, future in futures:
            check(future.result(20), float(k), rows(i, 1 + i % 3))


def test_batching_merges_requests(models, tmp_path):
    batched(models[0], tmp_path / "b")
    model = tf.saved_model.load(str(tmp_path / "b"))
    graph_def = model.signatures["serving_default"].graph.as_graph_def()
    assert "BatchFunction" in {n.op for f in graph_def.library.function for n in f.node_def}
    np.testing.assert_allclose(model.signatures["serving_default"](x=tf.constant(rows(1)))["y"], want(1.0, rows(1)),
                               rtol=1e-5, atol=1e-6)


def test_benchmark_at_given_rates(models):
    plan = serve_bench.Plan(policies=("timeslice", "stitched"), seconds=0.2, rates=(100.0, 300.0))
    found = serve_bench.run(models, plan, Devices())
    assert [(r.policy, r.tenants) for r in found] == [(p, 2) for p in plan.policies for _ in plan.rates]
    for row in found:
        o = row.outcome
        assert o.answered == o.requests > 0 and o.wrong == o.failed == o.rejected == o.unanswered == 0
        assert row.bad == 0 and o.worst_error < 1e-5 and 0 < o.p50_ms <= o.p95_ms <= o.p99_ms
        assert set(o.by_client) == {"m1", "m2"}
        assert json.loads(json.dumps(row.as_json()))["throughput_rps"] > 50


@pytest.mark.parametrize("wrong_load", [None, 0, 1])
def test_a_benchmark_warms_up_and_looks_at_those_answers_too(wrong_load):
    """The first load is the slow one, and is in no row; a wrong answer of it is."""
    class Server:
        loads = 0

        def load(self, arrivals, threads, warm):
            p99_ms = 3.0 if self.loads else 1000.0
            wrong = int(self.loads == wrong_load)
            outcome = Outcome(arrivals.rate, arrivals.rate, 1.0, 1.0, 2.0, p99_ms, 1, 1, 0, 0, 0, wrong, 0.0, 0.0)
            self.loads += 1
            return outcome

        def launches(self):
            return None

    bench = serve_bench._Bench("stitched", Server(), clients(1.0), serve_bench.Plan(seconds=0.1), lambda _: None)
    bench.warm_up(50.0)
    row = bench.row(bench.probe(50.0))
    assert row.outcome.p99_ms == 3.0 and row.bad == (wrong_load is not None)


@pytest.mark.slow
def test_a_process_for_each_model(models):
    plan = serve_bench.Plan(policies=("processes", "mps"), seconds=0.2, rates=(50.0,))
    alone, mps = serve_bench.run(models, plan, Devices())
    assert alone.outcome.answered == alone.outcome.requests > 5
    assert alone.outcome.wrong == alone.outcome.failed == 0 and alone.outcome.worst_error < 1e-5
    assert all(c["throughput_rps"] > 0 for c in alone.outcome.by_client.values())
    assert mps.outcome is not None or "MPS cannot be started" in mps.skipped


def test_a_process_that_fails():
    mine, its = multiprocessing.Pipe()
    alive, dead = SimpleNamespace(is_alive=lambda: True), SimpleNamespace(is_alive=lambda: False)
    its.send("OptionError: no such model")
    with pytest.raises(ProcessError, match="failed: OptionError: no such model"):
        processes._receive(mine, alive)
    with pytest.raises(ProcessError, match="ended early"):
        processes._receive(mine, dead)
    its.close()
    with pytest.raises(ProcessError, match="ended early"):
        processes._receive(mine, alive)


def test_benchmark_notices_wrong_answers(models):
    wrong = [Model(m.folder, Client(m.client.name, 200.0, m.client.samples, [{"y": want(9.0, s["x"]).astype(np.float32)}
                                                                           for s in m.client.samples]))
             for m in models]
    plan = serve_bench.Plan(policies=("stitched",), seconds=0.1, rates=(100.0,))
    row = serve_bench.run(wrong, plan, Devices())[0]
    assert row.bad >= row.outcome.wrong > 0


def test_command(models, tmp_path, capsys):
    specs = [f"{m.client.name}={m.folder}" for m in models]
    assert cli.main(["serve-bench", *specs, "--policies", "timeslice,stitched", "--seconds", "0.1", "--slo-ms", "500",
                     "--slo-ms", "m1=400", "--rate", "50", "--plot", str(tmp_path / "p.png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["policy"] for r in found["rows"]] == ["timeslice", "stitched"]
    assert {"policy", "tenants", "throughput_rps", "slo_attainment", "p50_ms", "p99_ms"} <= set(found["rows"][0])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    write_trace(tmp_path / "t", [Event(0.01 * i, "m1", "serving_default", {"x": (1, WIDTH)}) for i in range(10)])
    assert cli.main(["serve-bench", *specs, "--policies", "stitched", "--trace", str(tmp_path / "t")]) == 0
    assert "stitched" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--seed", "-1"], ["--target", "101"], ["--rate", "nan"]])
def test_command_usage(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["serve-bench", "a=b", *wrong])
    assert raised.value.code == 2 and wrong[1] in capsys.readouterr().err


def test_a_trace_without_requests(models, tmp_path, capsys):
    write_trace(tmp_path / "t", [])
    assert cli.main(["serve-bench", f"a={models[0].folder}", "--trace", str(tmp_path / "t")]) == 1
    assert "holds no requests" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["a"], "names no model"), (["a=/nowhere"], "does not exist"), (["--policies", "x", "a=b"], "'x' is not known"),
    (["--slo-ms", "b=3", "{}"], "none of the models"), (["--slo-ms", "x", "{}"], "is no SLO"),
    (["--slo-ms", "0", "{}"], "is no SLO"), (["--slo-ms", "a=nan", "{}"], "is no SLO"),
    (["--rate", "1e9", "{}"], "10,000,000 requests at most"),
    (["--trace", "/nowhere", "{}"], "cannot be read")])
def test_command_errors(arguments, message, models, capsys):
    spec = f"a={models[0].folder}"
    assert cli.main(["serve-bench", *(a.replace("{}", spec) for a in arguments)]) == 1
    assert message in capsys.readouterr().err


def test_a_trace_is_sent_with_its_shapes(models):
    specs = [f"m1={models[0].folder}", f"m2={models[1].folder}"]
    trace = [Event(0.001 * i, "m1", "serving_default", {"x": (i % 3, WIDTH)}) for i in range(6)]
    found, other = serve_bench.models_of(specs, ["500"], 4, trace)
    assert sorted(s["x"].shape for s in found.client.samples) == [(0, WIDTH), (1, WIDTH), (2, WIDTH)]
    assert [s["x"].shape for s in other.client.samples] == [(4, WIDTH)]  # it has no requests in the trace
    arrivals = load.replay([found.client, other.client], trace)
    assert [found.client.samples[s]["x"].shape[0] for s in arrivals.samples] == [0, 1, 2, 0, 1, 2]
    row, = serve_bench.run([found, other], serve_bench.Plan(("stitched",), rates=[1.0], trace=trace), Devices())
    assert row.outcome.answered == 6 and not row.bad


@pytest.mark.parametrize(("event", "message"), [
    (Event(0, "m1", "serving_default", {"x": (1, WIDTH + 1)}), "takes 'x' .*, not 'x' "),
    (Event(0, "m1", "serving_default", {"x": (-1, WIDTH)}), "not 'x' "),
    (Event(0, "m1", "serving_default", {}), "not nothing"),
    (Event(0, "m1", "other", {"x": (1, WIDTH)}), "requests of the signature 'other' of 'm1'")])
def test_a_trace_of_other_requests_than_the_model_takes(models, event, message):
    with pytest.raises(OptionError, match=message):
        serve_bench.models_of([f"m1={models[0].folder}"], [], 1, [event])


def test_search_of_a_policy(models):
    plan = serve_bench.Plan(policies=("stitched", "hyperq"), seconds=0.05, start=20.0, probes=4, common=True)
    found = serve_bench.run(models, plan, Devices())
    assert found[0].highest and found[0].outcome.offered_rps > 0 and len(found[0].tried) >= 4
    assert [(r.policy, r.highest) for r in found] == [("stitched", True), ("hyperq", True), ("hyperq", False)]
    assert found[2].outcome.requests == pytest.approx(found[0].outcome.requests, rel=0.5)  # at one rate
