"""Metrics: the values that Prometheus reads, and how they are served."""
from __future__ import annotations

import os
import signal
import socket
import urllib.request

import pytest
import tensorflow as tf

import tf_stitch
from tf_stitch.errors import OptionError
from tf_stitch.serving.metrics import SessionCollector, _of_scheduler
from tf_stitch.serving.tally import BUCKETS, Tally

from .marks import BOTH
from .support import NATIVE, rows, scaled

prometheus = pytest.importorskip("prometheus_client")


def test_values(session, gate):
    registry = prometheus.CollectorRegistry()
    registry.register(SessionCollector(session))
    session.add("a", scaled(2.0), slo_ms=10_000)
    session.add("slow", gate.function, slo_ms=1e-3, max_in_flight=1, warmup=False, verify=False, stitch=False)
    for i in range(5):
        session.run("a", rows(i))
    futures = [session.submit("slow", rows(i)) for i in range(3)]
    gate.arrived()

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    assert value("tf_stitch_queue_depth", tenant="slow") == 2
    assert value("tf_stitch_running", tenant="slow") == 1
    assert value("tf_stitch_queue_depth", tenant="a") == 0
    futures[2].cancel()
    gate.open.set()
    assert session.drain(10)
    assert value("tf_stitch_requests_total", tenant="a", outcome="answered") == 5
    assert value("tf_stitch_requests_total", tenant="slow", outcome="late") == 2
    assert value("tf_stitch_requests_total", tenant="slow", outcome="cancelled") == 1
    assert value("tf_stitch_slo_attainment_ratio", tenant="a") == 1
    assert value("tf_stitch_slo_attainment_ratio", tenant="slow") == 0
    assert value("tf_stitch_latency_seconds_count", tenant="a") == 5
    assert value("tf_stitch_latency_seconds_bucket", tenant="a", le="5.0") == 5
    assert value("tf_stitch_latency_seconds_bucket", tenant="slow", le="+Inf") == 2
    assert 0 < value("tf_stitch_latency_seconds_sum", tenant="a") < 10
    assert value("tf_stitch_queue_depth", tenant="slow") == 0


@BOTH
def test_what_the_scheduler_adds(session):
    registry = prometheus.CollectorRegistry()
    registry.register(SessionCollector(session))
    session.add("metered", scaled(2.0), slo_ms=10_000)
    for i in range(20):
        session.run("metered", rows(i))
    used = registry.get_sample_value("tf_stitch_device_seconds_total", {"tenant": "metered"})
    factor = registry.get_sample_value("tf_stitch_coalescing_factor", {"device": "CPU"})
    if session.coalesce:
        assert 0 < used < 10 and factor >= 1
        assert registry.get_sample_value("tf_stitch_throttled", {"tenant": "metered"}) == 0
    else:
        assert used is None and factor is None


def test_served_over_http():
    with tf_stitch.StitchSession(coalesce=False, threads=1, metrics_port=0, options=NATIVE) as session:
        session.add("a", scaled(2.0))
        session.run("a", rows(0))
        url = f"http://localhost:{session.metrics_port}/metrics"
        text = urllib.request.urlopen(url).read().decode()
        assert 'tf_stitch_requests_total{outcome="answered",tenant="a"} 1.0' in text
        with pytest.raises(OptionError, match="cannot be served on port"):
            tf_stitch.StitchSession(coalesce=False, threads=1, metrics_port=session.metrics_port)
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=1)


def test_a_forked_process_leaves_the_port_to_its_parent():
    """The port is free once the parent's session is closed, though the child lives."""
    session = tf_stitch.StitchSession(coalesce=False, threads=1, metrics_port=0, options=NATIVE)
    port, (parent, end) = session.metrics_port, os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        os.close(end)
        os.read(parent, 1)  # until the parent closes its end
        os._exit(0 if session.metrics_port is None and session.close() else 1)
    try:
        assert urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=5).status == 200
        session.close()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were closed do not count
            other.bind(("", port))
            other.listen()
    finally:
        os.close(end)
        assert os.waitpid(child, 0)[1] == 0
        os.close(parent)


def test_tally():
    tally = Tally(0.01)
    assert tally.attainment is None
    tally.settle(0.01, None, False)      # due at 10 ms: in time, and in the bucket that ends there
    tally.settle(0.0101, None, False)
    tally.settle(9.0, None, False)
    tally.settle(0.001, tf.errors.InvalidArgumentError(None, None, ""), False)
    tally.settle(0.001, tf.errors.DeadlineExceededError(None, None, ""), False)
    tally.settle(0.001, tf.errors.ResourceExhaustedError(None, None, ""), False)
    tally.settle(0.001, None, True)
    assert tally.outcomes == {"answered": 1, "late": 2, "failed": 1, "expired": 1, "cancelled": 1, "rejected": 1}
    assert tally.attainment == 1 / 6
    at = BUCKETS.index(0.01)
    assert tally.buckets[at] == 1 and tally.buckets[at + 1] == 1 and tally.buckets[-1] == 1 and sum(tally.buckets) == 3


def test_what_the_scheduler_says():
    found = {m.name: m.samples for m in _of_scheduler({"devices": [
        {"name": "GPU:0", "coalescing_factor": 4.5, "busy_share": 0.75, "held": 3, "merged_requests": 12,
         "merged_runs": 5}]})}
    assert [(s.labels, s.value) for s in found["tf_stitch_coalescing_factor"]] == [({"device": "GPU:0"}, 4.5)]
    assert [s.value for s in found["tf_stitch_merged_requests"]] == [12]
    assert [s.value for s in found["tf_stitch_merged_runs"]] == [5]
    assert [s.value for s in found["tf_stitch_gpu_busy_ratio"]] == [0.75]
    assert [s.value for s in found["tf_stitch_scheduler_depth"]] == [3]
    assert list(_of_scheduler({})) == []
