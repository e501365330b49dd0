"""Open-loop load: requests come when they come, whether or not the ones before have been answered.

Arrivals are drawn (or read from a trace) before the load begins.  A thread waits for the next one's time and submits
all that are due, ahead of other threads where the system lets it.  Latencies count from the time at which a request was
to come, so a generator that falls behind shows in them; how far it fell behind, and the latency from when a request was
really sent, are part of the result.
"""
from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import OptionError
from ..saved_model import relative_error
from .recording import Event

Inputs = Mapping[str, np.ndarray]
Submit = Callable[[str, Inputs], "Future[dict[str, np.ndarray]]"]
GRACE = 2.0          # of the longest SLO: what is unanswered this long after the last arrival is given up
TICK_S = 2e-4        # the least that a generator sleeps: each time it wakes up costs as much as a short request
URGENT = -10         # how nice a generator is to other threads
CHECKED = 64         # answers of a load that are compared with the expected ones, at most
TOLERANCE = 2e-2     # of an output's largest value; TF32 and other summation orders differ by less


@dataclass(frozen=True)
class Client:
    """Whose requests a load holds.

    Attributes:
      name: the tenant.
      slo_ms: when an answer is due, from the request's arrival.
      samples: inputs that its requests have, in turn.
      expected: right answers to the samples (empty: answers are not checked).
      share: of all requests.
      best_effort: its requests keep no SLO.
    """

    name: str
    slo_ms: float
    samples: Sequence[Inputs]
    expected: Sequence[Mapping[str, np.ndarray]] = ()
    share: float = 1.0
    best_effort: bool = False


@dataclass(frozen=True)
class Arrivals:
    """Requests to come: times in seconds, ascending; for each the index of its client and of its sample."""

    times: np.ndarray
    clients: np.ndarray
    samples: np.ndarray

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.times) / self.seconds

    @property
    def seconds(self) -> float:
        return max(float(self.times[-1]), 1e-9) if len(self.times) else 0.0


def poisson(clients: Sequence[Client], rate: float, seconds: float, seed: int = 0) -> Arrivals:
    """A Poisson process of ``rate`` requests a second, split among the clients by their shares."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / rate, max(1, math.ceil(rate * seconds))))
    shares = np.array([c.share for c in clients], float)
    who = rng.choice(len(clients), len(times), p=shares / shares.sum())
    return Arrivals(times, who, rng.integers(0, 1 << 30, len(times)) % np.array([len(c.samples) for c in clients])[who])


def replay(clients: Sequence[Client], events: Sequence[Event], speed: float = 1.0) -> Arrivals:
    """The requests of a trace, ``speed`` times as fast; samples are those of the recorded shapes where there are some.

    Raises OptionError when the trace has tenants that are no clients, or no requests.
    """
    index = {c.name: i for i, c in enumerate(clients)}
    missing = sorted({e.tenant for e in events} - set(index))
    if missing or not events:
        raise OptionError(f"The trace has requests of '{missing[0]}', which is none of the models."
                          if missing else "The trace holds no requests.")
    by_shape = [_by_shape(c) for c in clients]
    who = [index[e.tenant] for e in events]
    samples = []
    for n, (i, event) in enumerate(zip(who, events)):
        fitting = by_shape[i].get(_key(event.shapes), range(len(clients[i].samples)))
        samples.append(fitting[n % len(fitting)])
    times = (np.array([e.t for e in events]) - events[0].t) / speed
    return Arrivals(times, np.array(who), np.array(samples))


def _by_shape(client: Client) -> dict[Any, list[int]]:
    out: dict[Any, list[int]] = {}
    for i, sample in enumerate(client.samples):
        out.setdefault(_key({k: np.shape(v) for k, v in sample.items()}), []).append(i)
    return out


def _key(shapes: Mapping[str, tuple[int, ...]]) -> Any:
    return tuple(sorted((k, tuple(v)) for k, v in shapes.items()))


@dataclass
class Outcome:
    """What a load gave.  Latencies are in milliseconds, from the time at which a request was to come.

    Attributes:
      offered_rps, throughput_rps: requests to come and answered requests, a second.
      slo_attainment: share of all requests of clients with an SLO that were answered within it.
      p50_ms, p95_ms, p99_ms: of all those requests; infinite when so many had no answer.
      requests, answered, rejected, failed, unanswered: counts of all requests.
      wrong: answers that were compared with the expected ones and differ.
      worst_error: the largest difference seen, relative to the output's largest value.
      lateness_p50_ms, lateness_p99_ms: how far behind the generator submitted.
      from_send_p99_ms: p99_ms, had each request's time been when it was submitted.
      by_client: p50_ms, p99_ms, slo_attainment, throughput_rps of each client.
      first_error: one of the errors.
    """

    offered_rps: float
    throughput_rps: float
    slo_attainment: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    requests: int
    answered: int
    rejected: int
    failed: int
    unanswered: int
    wrong: int
    worst_error: float
    lateness_p99_ms: float
    by_client: dict[str, dict[str, float]] = field(default_factory=dict)
    first_error: str = ""
    lateness_p50_ms: float = 0.0
    from_send_p99_ms: float = math.nan


@dataclass
class Measured:
    """What happened to each request of a load.

    Attributes:
      sent, done: when it was submitted and answered, in seconds from the load's beginning (infinite: it was not).
      errors: by request, whether it was rejected (else: failed), and the message.
      wrong, worst_error: as in Outcome.
      finished: when the load was over.
    """

    sent: np.ndarray
    done: np.ndarray
    errors: dict[int, tuple[bool, str]]
    wrong: int
    worst_error: float
    finished: float


def run(submit: Submit, clients: Sequence[Client], arrivals: Arrivals, *, threads: int = 1, warm: float = 0.0
        ) -> Outcome:
    """Sends a load and waits for its answers.

    Args:
      submit: takes a request without waiting for its answer.
      threads: that submit.
      warm: seconds at the beginning whose requests are sent but not counted.
    """
    return summary(clients, arrivals, measure(submit, clients, arrivals, time.perf_counter() + 0.01, threads), warm)


def measure(submit: Submit, clients: Sequence[Client], arrivals: Arrivals, begin: float, threads: int = 1) -> Measured:
    """Sends a load from ``begin`` on (by time.perf_counter, which all processes of a machine share)."""
    load = _Load(submit, clients, arrivals, begin)
    workers = [threading.Thread(target=load.send, args=(i, threads), daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    load.settle(GRACE * max(c.slo_ms for c in clients) / 1e3)
    return load.measured()


def summary(clients: Sequence[Client], arrivals: Arrivals, measured: Measured, warm: float) -> Outcome:
    """What a load gave, from what happened to each request; requests of the first ``warm`` seconds do not count."""
    times, who, done = arrivals.times, arrivals.clients, measured.done
    counted = times >= warm
    answered = counted & np.isfinite(done)
    latency = (done - times) * 1e3
    limits = np.array([c.slo_ms for c in clients])[who]
    promised = counted & ~np.array([c.best_effort for c in clients])[who]
    judged = promised if promised.any() else counted
    errors = [error for i, error in measured.errors.items() if counted[i]]
    rejected = sum(was_rejected for was_rejected, _ in errors)
    last = float(done[answered].max()) if answered.any() else measured.finished
    seconds = max(max(last, arrivals.seconds) - warm, 1e-9)
    p50, p95, p99 = _percentiles(latency[judged])
    late_ms = (measured.sent - times) * 1e3
    return Outcome(
        offered_rps=arrivals.rate, throughput_rps=float(answered.sum() / seconds),
        slo_attainment=float((latency[judged] <= limits[judged]).mean()) if judged.any() else 0.0, p50_ms=p50,
        p95_ms=p95, p99_ms=p99, requests=int(counted.sum()), answered=int(answered.sum()), rejected=rejected,
        failed=len(errors) - rejected, unanswered=int((counted & ~answered).sum()) - len(errors), wrong=measured.wrong,
        worst_error=measured.worst_error, lateness_p99_ms=float(np.percentile(late_ms, 99)),
        lateness_p50_ms=float(np.percentile(late_ms, 50)),
        from_send_p99_ms=_percentiles((done - measured.sent)[judged] * 1e3)[2],
        by_client={c.name: _summary(latency[counted & (who == i)], c.slo_ms, seconds) for i, c in enumerate(clients)},
        first_error=errors[0][1] if errors else "")


def one_after_the_other(slices: Sequence[tuple[Arrivals, Measured]]) -> tuple[Arrivals, Measured]:
    """Loads of the same clients as one: each begins where the arrivals of the one before end."""
    begins = np.cumsum([0.0, *(arrivals.seconds for arrivals, _ in slices)])
    firsts = np.cumsum([0, *(len(arrivals.times) for arrivals, _ in slices)]).tolist()
    arrivals = Arrivals(np.concatenate([a.times + begin for (a, _), begin in zip(slices, begins)]),
                        np.concatenate([a.clients for a, _ in slices]), np.concatenate([a.samples for a, _ in slices]))
    errors = {first + i: error for (_, m), first in zip(slices, firsts) for i, error in m.errors.items()}
    return arrivals, Measured(np.concatenate([m.sent + begin for (_, m), begin in zip(slices, begins)]),
                              np.concatenate([m.done + begin for (_, m), begin in zip(slices, begins)]), errors,
                              sum(m.wrong for _, m in slices), max(m.worst_error for _, m in slices),
                              float(begins[-2] + slices[-1][1].finished))


class _Load:
    """One load on its way."""

    def __init__(self, submit: Submit, clients: Sequence[Client], arrivals: Arrivals, begin: float) -> None:
        count = len(arrivals.times)
        self.submit, self.clients, self.arrivals, self.begin = submit, clients, arrivals, begin
        self.sent, self.done = np.full(count, np.inf), np.full(count, np.inf)
        self.futures: list[Future[Any] | None] = [None] * count
        self.errors: dict[int, BaseException] = {}
        self.kept: dict[int, Any] = {}
        every = max(1, count // CHECKED)
        self.checked = {i for i in range(0, count, every) if clients[arrivals.clients[i]].expected}

    def send(self, first: int, step: int) -> None:
        """Submits every ``step``-th request at its time."""
        times, who, which = (a.tolist() for a in (self.arrivals.times, self.arrivals.clients, self.arrivals.samples))
        names, samples = [c.name for c in self.clients], [c.samples for c in self.clients]
        clock, sleep, begin, submit, sent = time.perf_counter, time.sleep, self.begin, self.submit, self.sent
        with contextlib.suppress(OSError):  # only some may
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), URGENT)
        for i in range(first, len(times), step):
            left = begin + times[i] - clock()
            if left > 0:
                sleep(max(left, TICK_S))
            sent[i] = clock() - begin
            try:
                future = submit(names[who[i]], samples[who[i]][which[i]])
            except tf.errors.OpError as error:
                self.errors[i] = error
                continue
            self.futures[i] = future
            future.add_done_callback(_Note(self, i))

    def settle(self, seconds: float) -> None:
        """Waits for answers; what has none by then is cancelled."""
        for future in wait([f for f in self.futures if f is not None], seconds).not_done:
            future.cancel()

    def measured(self) -> Measured:
        errors = {i: (isinstance(e, tf.errors.ResourceExhaustedError), str(e)[:500]) for i, e in self.errors.items()}
        return Measured(self.sent, self.done, errors, *self._judged(), time.perf_counter() - self.begin)

    def _judged(self) -> tuple[int, float]:
        """How many of the answers that were kept are wrong, and the worst error."""
        wrong, worst = 0, 0.0
        for i, answer in self.kept.items():
            client = self.clients[self.arrivals.clients[i]]
            want = client.expected[self.arrivals.samples[i]]
            error = max((relative_error(np.asarray(answer[k]), np.asarray(v)) for k, v in want.items()), default=0.0)
            wrong, worst = wrong + (not error <= TOLERANCE), max(worst, error)
        return wrong, worst


class _Note:
    """Notes when a request was answered."""

    __slots__ = ("index", "load")

    def __init__(self, load: _Load, index: int) -> None:
        self.load, self.index = load, index

    def __call__(self, future: Future[Any]) -> None:
        now = time.perf_counter()
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.load.errors[self.index] = error
            return
        self.load.done[self.index] = now - self.load.begin
        if self.index in self.load.checked:
            self.load.kept[self.index] = future.result()
        self.load.futures[self.index] = None  # the answer itself is not needed any more


def _percentiles(latency_ms: np.ndarray) -> tuple[float, float, float]:
    if not len(latency_ms):
        return math.inf, math.inf, math.inf
    ordered = np.sort(latency_ms)  # np.percentile would interpolate with infinity
    at = [min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1) for q in (0.5, 0.95, 0.99)]
    return float(ordered[at[0]]), float(ordered[at[1]]), float(ordered[at[2]])


def _summary(latency_ms: np.ndarray, slo_ms: float, seconds: float) -> dict[str, float]:
    p50, _, p99 = _percentiles(latency_ms)
    return {"p50_ms": p50, "p99_ms": p99, "throughput_rps": float(np.isfinite(latency_ms).sum() / seconds),
            "slo_attainment": float((latency_ms <= slo_ms).mean()) if len(latency_ms) else 0.0}
