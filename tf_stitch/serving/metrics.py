"""Prometheus metrics of a session, made from its counts when they are asked for (extra [serving])."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from ..errors import OptionError
from .tally import BUCKETS, OUTCOMES

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
except ImportError:
    raise OptionError("Metrics need prometheus-client; install tf-stitch[serving].") from None


class SessionCollector:
    """The metrics of one session; register it with a CollectorRegistry.

    tf_stitch_requests_total{tenant, outcome}: requests by how they ended: answered (in time), late (answered after the
      SLO), failed, expired (their own timeout passed), cancelled, rejected.
    tf_stitch_latency_seconds{tenant}: histogram, from taking a request to its answer.
    tf_stitch_slo_attainment_ratio{tenant}: share of requests, cancelled ones aside, answered within the SLO.
    tf_stitch_queue_depth{tenant}: requests that wait for a thread; tf_stitch_running{tenant}: those that have one.
    tf_stitch_coalescing_factor{device}: steps of requests per launch of the scheduler.
    tf_stitch_gpu_busy_ratio{device}: share of the time since coalescing was turned on that the device had work.
    tf_stitch_scheduler_depth{device}: requests that the scheduler holds.
    tf_stitch_merged_requests_total{device}: requests that ran joined with others along their batch;
      tf_stitch_merged_runs_total{device}: the runs that they were joined to.
    tf_stitch_device_seconds_total{tenant}: device time of its steps.
    tf_stitch_throttled{tenant}: 1 while it is held back because it drifts.
    """

    def __init__(self, session: Any) -> None:
        self._session = weakref.ref(session)

    def collect(self) -> Iterator[Any]:
        session = self._session()
        if session is None:
            return
        requests = CounterMetricFamily("tf_stitch_requests", "Requests by how they ended.",
                                       labels=["tenant", "outcome"])
        latency = HistogramMetricFamily("tf_stitch_latency_seconds", "From taking a request to its answer.",
                                        labels=["tenant"])
        attainment = GaugeMetricFamily("tf_stitch_slo_attainment_ratio", "Share answered within the SLO.",
                                       labels=["tenant"])
        depth = GaugeMetricFamily("tf_stitch_queue_depth", "Requests that wait for a thread.", labels=["tenant"])
        running = GaugeMetricFamily("tf_stitch_running", "Requests that run.", labels=["tenant"])
        for tenant in session._all_tenants():
            tally, label = tenant.tally, [tenant.name]
            for outcome in OUTCOMES:
                requests.add_metric([tenant.name, outcome], tally.outcomes[outcome])
            latency.add_metric(label, _cumulative(list(tally.buckets)), tally.seconds)
            if tally.attainment is not None:
                attainment.add_metric(label, tally.attainment)
            depth.add_metric(label, tenant.outstanding - tenant.running)
            running.add_metric(label, tenant.running)
        yield from (requests, latency, attainment, depth, running)
        stats = session.stats()["scheduler"]
        yield from _of_scheduler(stats)
        yield from _of_tenants(stats, {tenant.key: tenant.name for tenant in session._all_tenants()})


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    out, total = [], 0
    for bound, count in zip([*map(str, BUCKETS), "+Inf"], buckets):
        total += count
        out.append((bound, float(total)))
    return out


OF_SCHEDULER = (("coalescing_factor", "tf_stitch_coalescing_factor", "Steps of requests per launch."),
                ("busy_share", "tf_stitch_gpu_busy_ratio", "Share of the time that the device had work."),
                ("held", "tf_stitch_scheduler_depth", "Requests that the scheduler holds."))
COUNTED_BY_SCHEDULER = (("merged_requests", "tf_stitch_merged_requests", "Requests that ran joined with others."),
                        ("merged_runs", "tf_stitch_merged_runs", "Runs that requests were joined to."))


def _of_scheduler(stats: dict[str, Any]) -> Iterator[Any]:
    devices = stats.get("devices", [])
    for kind, figures in ((GaugeMetricFamily, OF_SCHEDULER), (CounterMetricFamily, COUNTED_BY_SCHEDULER)):
        for key, name, text in figures:
            family = kind(name, text, labels=["device"])
            for device in devices:
                family.add_metric([device["name"]], device[key])
            if devices:
                yield family


def _of_tenants(stats: dict[str, Any], names: dict[str, str]) -> Iterator[Any]:
    found = {names[key]: figures for key, figures in stats.get("tenants", {}).items() if key in names}
    used = CounterMetricFamily("tf_stitch_device_seconds", "Device time of a tenant's steps.", labels=["tenant"])
    throttled = GaugeMetricFamily("tf_stitch_throttled", "1 while a tenant is held back.", labels=["tenant"])
    for name, figures in found.items():
        used.add_metric([name], figures["device_us"] * 1e-6)
        throttled.add_metric([name], float(figures["throttled"]))
    if found:
        yield from (used, throttled)


class MetricsServer:
    """Serves a session's metrics over HTTP from a registry of their own."""

    def __init__(self, session: Any, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(SessionCollector(session))
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except (OSError, OverflowError, TypeError) as error:
            raise OptionError(f"Metrics cannot be served on port {port!r}: {str(error).rstrip('.')}.") from None
        self.port: int = self._server.server_address[1]

    def forked(self) -> None:
        """In a forked process, which has no thread of the server's: gives back its share of the port."""
        self._server.socket.close()

    def close(self) -> None:
        """Ends the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
