"""Coalescing on the CPU through TensorFlow: runs equal lone ones bit for bit; limits, errors, cancellation."""
from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.op import programs
from tests.op.calls import specs_of, stitched
from tests.op.test_op import axpb_in_tf, chain_in_tf, floats
from tf_stitch import runtime

IN_TF = {"axpb": axpb_in_tf, "chain": chain_in_tf, "rowsum": lambda x: tf.reduce_sum(x, 1), "gather": tf.gather}


def library() -> ctypes.CDLL:
    runtime.load()
    lib = runtime.library()
    lib.tfs_scheduler_last_error.restype = ctypes.c_char_p
    lib.tfs_scheduler_stats_json.restype = ctypes.c_int64
    lib.tfs_scheduler_stats_json.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    lib.tfs_scheduler_drain.argtypes = [ctypes.c_int64]
    return lib


def call(name: str, *args) -> None:
    lib = library()
    encoded = [json.dumps(a).encode() if isinstance(a, dict) else a.encode() for a in args]
    if getattr(lib, "tfs_scheduler_" + name)(*encoded):
        raise ValueError(lib.tfs_scheduler_last_error().decode())


def stats() -> dict:
    lib = library()
    needed = lib.tfs_scheduler_stats_json(None, 0)
    buffer = ctypes.create_string_buffer(needed + 4096)
    lib.tfs_scheduler_stats_json(buffer, len(buffer))
    return json.loads(buffer.value)


@contextlib.contextmanager
def coalescing(**options):
    """Coalescing is on; at the end nothing may be left."""
    call("enable", options)
    try:
        yield
        assert library().tfs_scheduler_drain(5000) == 0
        for tenant in stats()["tenants"].values():
            ended = [tenant[k] for k in ("completed", "rejected", "cancelled", "failed")]
            assert tenant["requests"] == sum(ended) and not tenant["in_flight"] and not tenant["queued"]
    finally:
        library().tfs_scheduler_disable()


class Model:
    """A tf.compat.v1 Session with a name, over one StitchedProgram node."""

    def __init__(self, name: str, program_name: str):
        self.program, self.fn = getattr(programs, program_name)(), IN_TF[program_name]
        config = tf.compat.v1.ConfigProto()
        config.experimental.session_metadata.name = name
        with tf.Graph().as_default() as graph:
            self.inputs = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in specs_of(self.program)]
            outputs = stitched(self.program, self.fn)(*self.inputs)
            self.outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        self.session = tf.compat.v1.Session(graph=graph, config=config)

    def __call__(self, *args, timeout_ms=0):
        options = tf.compat.v1.RunOptions(timeout_in_ms=timeout_ms)
        return self.session.run(self.outputs, dict(zip(self.inputs, args, strict=True)), options=options)


def arguments(name: str, seed: int) -> list[np.ndarray]:
    n = [5, 64, 1000, 7001][seed % 4]
    if name == "gather":
        return [floats(50), np.random.default_rng(seed).integers(0, 50, n).astype(np.int32)]
    return {"axpb": [floats(n, 3)], "chain": [floats(n), floats(n) + 1], "rowsum": [floats(n, 11)]}[name]


def test_off_by_default():
    assert library().tfs_scheduler_enabled() == 0


def test_32_threads_of_many_tenants_equal_lone_runs():
    models = [(name, Model(f"tenant_{i}", name)) for i, name in enumerate(list(IN_TF) * 3)]
    cases = [(m, args, m(*args)) for name, m in models for args in (arguments(name, s) for s in range(4))]
    with coalescing(max_wait_us=500):
        def work(seed: int) -> int:
            order = np.random.default_rng(seed).permutation(len(cases))
            for i in order:
                model, args, want = cases[i]
                for got, expected in zip(model(*args), want, strict=True):
                    np.testing.assert_array_equal(got, expected)
            return len(order)

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            runs = sum(pool.map(work, range(64)))
        now = stats()
        assert sum(t["completed"] for name, t in now["tenants"].items() if name.startswith("tenant_")) == runs
        device = now["devices"][0]
        assert device["name"] == "CPU" and device["coalescing_factor"] > 1, device
        assert all(sum(t["latency_ms"]["counts"]) == t["completed"] for t in now["tenants"].values())


@pytest.mark.parametrize("alone", [0, 1])
def test_one_client_gets_right_answers_and_shares_nothing(alone):
    """Whoever runs his requests: his own thread, or a lane."""
    good, bad = Model(f"one_{alone}", "chain"), Model(f"bad_{alone}", "gather")
    args = arguments("chain", 1)
    want = good(*args)
    with coalescing(alone=alone):
        for _ in range(50):
            for got, expected in zip(good(*args), want, strict=True):
                np.testing.assert_array_equal(got, expected)
            with pytest.raises(tf.errors.InvalidArgumentError, match="9"):
                bad(floats(9), np.array([3, 9], np.int32))
        assert library().tfs_scheduler_drain(5000) == 0
        now = stats()
        assert now["tenants"][f"one_{alone}"]["completed"] == now["tenants"][f"bad_{alone}"]["failed"] == 50
        assert now["devices"][0]["coalescing_factor"] == 1


def test_an_error_fails_only_its_own_request():
    bad, good = Model("bad", "gather"), Model("good", "gather")
    x, fine, wrong = floats(9), np.array([1, 8], np.int32), np.array([3, 9], np.int32)
    want = good(x, fine)
    with coalescing(max_wait_us=2000):
        def run(i: int) -> bool:
            if i % 3:
                np.testing.assert_array_equal(good(x, fine), want)
                return False
            with pytest.raises(tf.errors.InvalidArgumentError, match="9"):
                bad(x, wrong)
            return True

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            failed = sum(pool.map(run, range(300)))
        tenants = stats()["tenants"]
        assert tenants["bad"]["failed"] == failed == 100 and tenants["good"]["failed"] == 0


def test_requests_that_cannot_meet_their_deadline_are_rejected():
    model = Model("late", "rowsum")
    x = floats(3000, 3000)
    with coalescing():
        for _ in range(3):
            model(x)
        call("set_tenant", "late", {"slo_ms": 0.001})
        with pytest.raises(tf.errors.ResourceExhaustedError, match="'late' cannot meet its deadline"):
            model(x)
        call("set_tenant", "late", {"slo_ms": 10_000})
        model(x)
        assert stats()["tenants"]["late"]["rejected"] == 1
    call("remove_tenant", "late")


def test_quota():
    model = Model("small", "rowsum")
    x = floats(2000, 2000)
    want = model(x)
    call("set_tenant", "small", {"max_in_flight": 1, "max_queue": 2, "priority": "best_effort", "weight": 0.5})
    with coalescing(workers=1):
        def run(_) -> str:
            try:
                np.testing.assert_array_equal(model(x), want)
                return "right"
            except tf.errors.ResourceExhaustedError as error:
                assert "its queue, which is full" in str(error)
                return "rejected"

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            ends = list(pool.map(run, range(60)))
        tenant = stats()["tenants"]["small"]
        assert tenant["rejected"] == ends.count("rejected") > 0 and ends.count("right") >= 3
        assert tenant["priority"] == "best_effort"
    call("remove_tenant", "small")


def test_a_step_s_timeout_of_centuries_is_none():
    model, x = Model("patient", "rowsum"), floats(64, 11)
    with coalescing(workers=1, alone=0):
        for timeout_ms in (2**63 - 1, 2**62, 10**15):
            (sums,) = model(x, timeout_ms=timeout_ms)
            np.testing.assert_allclose(sums, x.sum(1), rtol=1e-5)
        assert stats()["tenants"]["patient"]["completed"] == 3


def test_cancelled_by_the_step_s_timeout():
    model, other = Model("slow", "rowsum"), Model("other", "rowsum")
    x = floats(3000, 3000)
    want = other(x)
    with coalescing(workers=1):
        def run(i: int) -> int:
            if i % 2:
                np.testing.assert_array_equal(other(x), want)
                return 0
            try:
                model(x, timeout_ms=1 + i % 7)
                return 0
            except (tf.errors.DeadlineExceededError, tf.errors.CancelledError, tf.errors.ResourceExhaustedError):
                return 1

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            ended = sum(pool.map(run, range(200)))
        assert ended > 0 and stats()["tenants"]["other"]["completed"] == 100


@pytest.mark.parametrize("pool", [0, -1])
def test_programs_in_a_row_with_room_for_one(pool):
    """A step goes on with its next program while the lane is busy and nothing more may be held (-1: on no pool)."""
    program, x = programs.axpb(), floats(40, 7)
    with tf.Graph().as_default() as graph:
        node = stitched(program, axpb_in_tf)
        y = given = tf.compat.v1.placeholder(tf.float32, [None, None])
        for _ in range(6):
            y = node(y)
    session = tf.compat.v1.Session(graph=graph)
    options = tf.compat.v1.RunOptions(inter_op_thread_pool=pool)
    want = session.run(y, {given: x})
    with coalescing(max_instances=1, workers=1), concurrent.futures.ThreadPoolExecutor(8) as threads:
        for got in threads.map(lambda _: session.run(y, {given: x}, options=options), range(100)):
            np.testing.assert_array_equal(got, want)


def test_switched_while_requests_come():
    model = Model("switched", "chain")
    x, y = floats(500), floats(500) + 1
    want, stop = model(x, y), threading.Event()

    def run(_) -> int:
        runs = 0
        while not stop.is_set():
            for got, expected in zip(model(x, y), want, strict=True):
                np.testing.assert_array_equal(got, expected)
            runs += 1
        return runs

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run, i) for i in range(4)]
        for i in range(30):
            call("enable", {"workers": 1 + i % 3, "max_instances": 1 + i % 4})
            time.sleep(0.01)
            library().tfs_scheduler_disable()
        stop.set()
        assert all(f.result() > 10 for f in futures)


def test_the_longest_timeout_is_none():
    model = Model("drained", "rowsum")
    with coalescing(alone=0), concurrent.futures.ThreadPoolExecutor(1) as pool:
        for i in range(10):
            request = pool.submit(model, floats(2000, 2000))
            time.sleep(i / 2000)
            assert library().tfs_scheduler_drain(2**63 - 1) == 0
            request.result()


@pytest.mark.parametrize("options, why", [
    ({"max_pack": 0}, "'max_pack' is out of range"), ({"no_such": 1}, "no numeric option 'no_such'"),
    ({"workers": 10**6}, "'workers' is out of range"), ({"lanes": 10**6}, "'lanes' is out of range"),
    ({"estimates": 3}, "no numeric option 'estimates'"), ({"max_wait_us": "long"}, "no option 'max_wait_us' that is")])
def test_wrong_options(options, why):
    with pytest.raises(ValueError, match=why):
        call("enable", options)
    assert library().tfs_scheduler_enabled() == 0


def test_turned_on_by_the_environment():
    script = ("from tests.op.test_coalesce import Model, arguments, stats\n"
              "Model('from_environment', 'chain')(*arguments('chain', 1))\n"
              "now = stats()\n"
              "assert now['enabled'] and now['tenants']['from_environment']['completed'] == 1, now\n")
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TF_STITCH_COALESCE": '{"workers": 1}'},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_measured_times_are_kept(tmp_path):
    file = tmp_path / "times.json"
    model = Model("kept", "axpb")
    for _ in range(2):
        with coalescing(estimates=str(file)):
            model(floats(100, 100))
        times = json.loads(file.read_text())
        assert times and all(t > 0 for t in times.values())
    assert os.listdir(tmp_path) == [file.name]
    other = tmp_path / "times.json.new"  # that another process writes
    other.write_text("{")
    with coalescing(estimates=str(file)):
        model(floats(100, 100))
    assert other.read_text() == "{" and json.loads(file.read_text())
    file.write_text("[1]")
    with pytest.raises(ValueError, match="it is no JSON object"):
        call("enable", {"estimates": str(file)})


def test_numbers_are_those_of_json_in_every_locale(tmp_path):
    """A program that set the locale of its user may write 1,5."""
    (tmp_path / "source").write_text('LC_NUMERIC\ndecimal_point ","\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n')
    made = shutil.which("localedef") and subprocess.run(
        ["localedef", "-c", "-i", tmp_path / "source", "-f", "ANSI_X3.4-1968", tmp_path / "xx_XX"], capture_output=True,
        check=False)
    if not made or not (tmp_path / "xx_XX" / "LC_NUMERIC").exists():
        pytest.skip("no locale can be made here")
    script = ("import json, locale\n"
              "locale.setlocale(locale.LC_NUMERIC, 'xx_XX')\n"
              "assert locale.localeconv()['decimal_point'] == ','\n"
              "from tests.op.test_coalesce import Model, arguments, call, library, stats\n"
              "for _ in range(2):\n"
              "    call('enable', {'drift': 2.5, 'estimates': 'times.json'})\n"
              "    call('set_tenant', 'a', {'slo_ms': 1500.5})\n"
              "    Model('a', 'chain')(*arguments('chain', 1))\n"
              "    assert stats()['tenants']['a']['slo_ms'] == 1500.5\n"
              "    library().tfs_scheduler_disable()\n"
              "assert any(t != int(t) for t in json.load(open('times.json')).values())\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "LOCPATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-2000:]
