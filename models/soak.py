"""Load with everything that goes wrong in a service, for as long as you like; every answer is checked.

    python -m models.soak [--minutes M] [--budget S] [--tenants toys|real] [--gpu] [--clients N] [--rate R]
                          [--out FILE.json]

Clients send requests to random tenants, cancel some and give some little time.  Meanwhile an operator adds and removes
tenants, swaps their versions, and sends bursts that their queues cannot hold; one tenant fails for part of its inputs.
It must hold that every request ends exactly once, that each answer is that of a version which was current when the
request was sent, that the session's counts agree with the clients', that memory stays flat, and that the session closes
cleanly.  "toys" are small functions whose inputs never repeat; "real" are those of models.serving, and a toy.

Memory is that of the tenants that are there, and of requests under way.  So every few seconds the operator brings back
the tenants of the beginning, drains the session and has free memory given back to the system; what the process holds
then is what is compared, in the second half of the run.  It grows when a line through it rises (by the median of all
pairs' slopes) and its least values do, too: those of the last quarter against those of the one before.  What comes and
goes, as a saw-tooth or once, does one of the two; a leak does both.  What is freed must go back to the system for that,
which two pools would keep, touched bit by bit: TensorFlow's own of the host's memory, and what glibc's malloc holds for
each of many threads (up to 8 arenas per core).  So the command has TensorFlow use malloc
(TF_ONEDNN_USE_SYSTEM_ALLOCATOR), and malloc few arenas.

Latencies are not judged, so other work on the machine does no harm.  They are shown, against the SLO, for requests that
nobody cancelled, that had no timeout of their own, and whose tenant was not overloaded by a burst meanwhile.  The
report is written after every look at memory, so a run that is cut short leaves one too; SIGTERM and SIGINT end a run as
its time does, and the report says so.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import itertools
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__":  # before anything has threads
    os.environ.setdefault("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "1")
    ctypes.CDLL(None).mallopt(-8, 4)  # M_ARENA_MAX

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tf_stitch
from tf_stitch import bench
from tf_stitch.errors import OptionError
from tf_stitch.saved_model import relative_error
from tf_stitch.serving import garbage, scheduler
from tf_stitch.serving.dispatcher import THREAD_NAME
from tf_stitch.serving.load import TOLERANCE
from tf_stitch.serving.policies import Model

from .held_memory import Held
from .serving_tenants import COPIES, tenants

WINDOW = 8              # requests of one client that are under way at once
QUEUE, BURST = 32, 600  # a tenant's max_queue; requests sent at once
SLO_MS = 200.0          # of every tenant
CHECK_S = 5.0           # between looks at what memory is held
LEAST_CHECKS = 3        # of memory in the last quarter, and in the one before, to judge whether it grows
# What it may grow by in the second half of a run; the GPU's is taken in large blocks, and so is what libraries keep.
GROWTH_MB = {"resident": 64, "heap": 32, "tensors": 32, "gpu": 128}
CLOSING_S = 15.0        # of a budget, for the end
WIDTH = 16

Inputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A model in several versions, and what is right for it.

    Attributes:
      name: what its tenants are called, with a number.
      versions: a SavedModel folder of each.
      draw: inputs of a request.
      right: (version, inputs, answer or error) -> whether that is how it should have ended.
      permanent: it is never removed, nor warmed up: it fails for part of its inputs.
    """

    name: str
    versions: Sequence[Path]
    draw: Callable[[np.random.Generator], Inputs]
    right: Callable[[int, Inputs, Any], bool]
    permanent: bool = False


@dataclass
class Live:
    """A tenant that clients may send requests to."""

    name: str
    subject: Subject
    allowed: frozenset[int]
    best_effort: bool
    bursts: int = 0  # begun and ended: odd while one is under way


@dataclass(slots=True)
class Sent:
    """A request under way; ``ends``: when it ended, each time that it did."""

    tenant: Live
    inputs: Inputs
    allowed: frozenset[int]
    bursts: int
    timeout_ms: float | None
    future: Future[Any]
    at: float
    ends: list[float]


@dataclass
class Counts:
    """What became of requests, as the clients saw it."""

    of: collections.Counter[str] = field(default_factory=collections.Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, count: int = 1) -> None:
        with self.lock:
            self.of[what] += count


class Latencies:
    """Of requests, against an SLO: counts by latency, each bucket ending 5% above the one before."""

    FIRST_S, STEP = 1e-5, math.log(1.05)

    def __init__(self, slo_s: float) -> None:
        self.slo_s, self.within, self.rejected = slo_s, 0, 0
        self._buckets: collections.Counter[int] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, seconds: float | None) -> None:
        """Counts a request: answered after ``seconds``, or rejected (None)."""
        with self._lock:
            if seconds is None:
                self.rejected += 1
                return
            self.within += seconds <= self.slo_s
            self._buckets[max(0, math.ceil(math.log(max(seconds, self.FIRST_S) / self.FIRST_S) / self.STEP))] += 1

    def report(self) -> dict[str, Any]:
        """Requests, the share within the SLO, and percentiles of those that were answered (to 5%)."""
        with self._lock:
            answered = self._buckets.total()
            requests = answered + self.rejected
            return {"requests": requests, "slo_attainment": self.within / requests if requests else None,
                    "p50_ms": self._percentile_ms(0.5), "p99_ms": self._percentile_ms(0.99)}

    def _percentile_ms(self, share: float) -> float | None:
        left = share * self._buckets.total()
        for bucket, count in sorted(self._buckets.items()):
            left -= count
            if left <= 0:
                return 1e3 * self.FIRST_S * math.exp(bucket * self.STEP)
        return None


class Soak:
    """Clients and an operator at work on one session."""

    def __init__(self, session: tf_stitch.StitchSession, subjects: Sequence[Subject], clients: int, seed: int = 0,
                 device: str | None = None, check_s: float = CHECK_S, stop: threading.Event | None = None,
                 note: Callable[[dict[str, Any]], None] | None = None, rate: float = math.inf,
                 slo_ms: float = SLO_MS) -> None:
        """``rate``: requests a second, bursts aside; more are not sent.  ``stop`` ends the run early; ``note`` gets the
        report so far after every look at memory."""
        self.session, self.subjects, self.seed = session, subjects, seed
        self.device, self.check_s, self._note = device, check_s, note
        self.rate, self.slo_ms = rate, slo_ms
        self.counts = Counts()
        self.latencies = {what: Latencies(slo_ms / 1e3) for what in ("latency", "best_effort")}
        self.problems: list[str] = []
        self.memory: list[tuple[float, Held]] = []  # when, with the tenants of the beginning and nothing under way
        self._tallies: list[Any] = []  # the session's own counts, those of removed tenants too
        self._live: list[Live] = []
        self._numbers = itertools.count()
        self._stop = stop or threading.Event()
        self._clients = clients
        self._draws = np.random.default_rng([seed, clients])  # the operator's

    def run(self, seconds: float) -> dict[str, Any]:
        """Runs for a while and gives the report; ``problems`` in it is empty when all held."""
        for subject in self.subjects:
            self._add(subject)
        threads = [threading.Thread(target=self._guard, args=(self._client, i)) for i in range(self._clients)]
        threads.append(threading.Thread(target=self._guard, args=(self._operator, 0)))
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        early = self._stop.wait(seconds)
        self._stop.set()
        for thread in threads:
            thread.join()
        return {**self._report(time.monotonic() - begin), "ended_early": early}

    def _guard(self, work: Callable[[int], None], argument: int) -> None:
        try:
            work(argument)
        except Exception as error:
            self._problem(f"{work.__name__} ended with {type(error).__name__}: {error}")
            self._stop.set()

    def _problem(self, text: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(text[:500])

    # --- clients ------------------------------------------------------------------------------------

    def _client(self, number: int) -> None:
        rng = np.random.default_rng([self.seed, number])
        under_way: collections.deque[Sent] = collections.deque()
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = max(due, time.monotonic() - 1.0) + rng.exponential(self._clients / self.rate)
            sent = self._send(rng)
            if sent is not None:
                under_way.append(sent)
            while under_way and (len(under_way) >= WINDOW or under_way[0].future.done()):
                self._check(under_way.popleft())
        while under_way:
            self._check(under_way.popleft())

    def _send(self, rng: np.random.Generator) -> Sent | None:
        live = self._live
        tenant = live[rng.integers(len(live))]
        inputs = tenant.subject.draw(rng)
        timeout_ms = float(rng.choice([1.0, 5.0])) if rng.random() < 0.03 else None
        try:
            sent = self._submit(tenant, inputs, timeout_ms)
        except (OptionError, tf.errors.UnavailableError):
            self.counts.add("not taken")  # the tenant was gone, or the session drained
            time.sleep(0.001)
            return None
        except tf.errors.ResourceExhaustedError:
            self.counts.add("rejected by the queue")
            time.sleep(0.001)
            return None
        if rng.random() < 0.03:
            sent.future.cancel()
        return sent

    def _submit(self, tenant: Live, inputs: Inputs, timeout_ms: float | None = None) -> Sent:
        before, bursts, at = tenant.allowed, tenant.bursts, time.monotonic()
        future = self.session.submit(tenant.name, inputs, timeout_ms=timeout_ms)
        sent = Sent(tenant, inputs, before | tenant.allowed, bursts, timeout_ms, future, at, [])
        future.add_done_callback(lambda _: self._ended(sent))
        return sent

    def _ended(self, sent: Sent) -> None:
        sent.ends.append(time.monotonic())
        self.counts.add("ended")

    def _check(self, sent: Sent) -> None:
        tenant, timeout_ms = sent.tenant, sent.timeout_ms
        self.counts.add("sent")
        try:
            ended: Any = sent.future.result(60)
        except CancelledError:
            self.counts.add("cancelled")
            return
        except TimeoutError:
            self._problem(f"A request to {tenant.name} had no answer after a minute.")
            self.counts.add("lost")
            return
        except Exception as error:
            ended = error
        kind = _kind(ended)
        self.counts.add(kind)
        self._time(sent, kind)
        if kind == "expired":
            if timeout_ms is None:
                self._problem(f"A request to {tenant.name} without a timeout expired: {ended}")
        elif kind == "rejected":
            if "cannot meet its deadline" not in str(ended):  # the scheduler's admission control
                self._problem(f"A request to {tenant.name} was rejected: {ended}")
        elif not any(tenant.subject.right(v, sent.inputs, ended) for v in sent.allowed):
            self.counts.add("wrong")
            self._problem(f"{tenant.name}, versions {sorted(sent.allowed)}: {str(ended)[:300]}")

    def _time(self, sent: Sent, kind: str) -> None:
        """Counts a request against the SLO, where its tenant was not overloaded and nothing else was to end it."""
        tenant = sent.tenant
        if sent.timeout_ms is not None or kind not in ("answered", "rejected"):
            return
        if sent.bursts % 2 == 0 and sent.bursts == tenant.bursts:
            end = sent.ends[0] if sent.ends else time.monotonic()  # callbacks run after waiters were woken
            seconds = end - sent.at if kind == "answered" else None
            self.latencies["best_effort" if tenant.best_effort else "latency"].add(seconds)

    # --- the operator -------------------------------------------------------------------------------

    def _operator(self, _: int) -> None:
        rng = random.Random(self.seed)
        works = [self._operator_adds, self._operator_swaps, self._operator_bursts, self._operator_removes]
        first = list(works)  # each of them at least once
        begin = checked = time.monotonic()
        while not self._stop.wait(0.2):
            (first.pop(0) if first else rng.choice(works))(rng)
            if time.monotonic() - checked >= self.check_s and not self._stop.is_set():
                self._check_memory(begin)
                checked = time.monotonic()
                if self._note is not None:
                    self._note(self._summary(checked - begin, finished=False))

    # What a service would run before a version's first real request.
    def _warmup(self, subject: Subject) -> bool | list[Inputs]:
        return not subject.permanent and [subject.draw(self._draws)]

    def _operator_adds(self, rng: random.Random) -> None:
        if len(self._live) < 2 * len(self.subjects):
            self._add(rng.choice([s for s in self.subjects if not s.permanent]))
            self.counts.add("tenants added")

    def _add(self, subject: Subject) -> None:
        name, version, best_effort = f"{subject.name}_{next(self._numbers)}", 0, len(self._live) % 3 == 0
        self.session.add(name, subject.versions[version], stitch=False, slo_ms=self.slo_ms, max_queue=QUEUE,
                         priority="best_effort" if best_effort else "latency", warmup=self._warmup(subject),
                         device=self.device)
        self._tallies.append(self.session._tenants[name].tally)
        self._live = [*self._live, Live(name, subject, frozenset({version}), best_effort)]

    def _operator_removes(self, rng: random.Random) -> None:
        able = [t for t in self._live if not t.subject.permanent]
        if len(able) > 2:
            self._remove(rng.choice(able))

    def _remove(self, tenant: Live) -> None:
        self._live = [t for t in self._live if t is not tenant]
        if not self.session.remove(tenant.name, timeout_s=60):
            self._problem(f"{tenant.name} could not be removed within a minute.")
        self.counts.add("tenants removed")

    def _operator_swaps(self, rng: random.Random) -> None:
        tenant = rng.choice([t for t in self._live if len(t.subject.versions) > 1])
        (old,), new = tenant.allowed, rng.randrange(len(tenant.subject.versions))
        tenant.allowed = frozenset({old, new})
        self.session.swap(tenant.name, tenant.subject.versions[new], stitch=False, warmup=self._warmup(tenant.subject))
        tenant.allowed = frozenset({new})
        self.counts.add("versions swapped")

    def _operator_bursts(self, rng: random.Random) -> None:
        draws = np.random.default_rng(rng.randrange(1 << 30))
        tenant, under_way = rng.choice(self._live), []
        all_inputs = [tenant.subject.draw(draws) for _ in range(BURST)]  # drawn before: sent faster than answered
        tenant.bursts += 1
        for inputs in all_inputs:
            try:
                under_way.append(self._submit(tenant, inputs))
            except tf.errors.ResourceExhaustedError:
                self.counts.add("rejected by the queue")
        for sent in under_way:
            self._check(sent)
        tenant.bursts += 1
        self.counts.add("bursts")

    def _check_memory(self, begin: float) -> None:
        """Notes what the tenants of the beginning hold when nothing is under way."""
        for subject in self.subjects:
            mine = [t for t in self._live if t.subject is subject]
            for tenant in mine[1:]:
                self._remove(tenant)
            if not mine:
                self._add(subject)
                self.counts.add("tenants added")
        if not self.session.drain(60):
            self._problem("The session could not be drained within a minute.")
        garbage.settle(full=True)
        self.memory.append((time.monotonic() - begin, Held.now()))
        self.session.resume()

    # --- the end ------------------------------------------------------------------------------------

    def _report(self, seconds: float) -> dict[str, Any]:
        if not self.session.drain(60):
            self._problem("The session could not be drained within a minute.")
        self._agree()
        for what, grown in self._growth().items():
            if grown is not None and grown > GROWTH_MB[what]:
                self._problem(f"Memory ({what}) grew by {grown:.0f} MB in the second half of the run.")
        held = sum(d["held"] for d in scheduler.stats().get("devices", [])) if self.session.coalesce else 0
        if held:
            self._problem(f"The scheduler still holds {held} requests.")
        return self._summary(seconds, finished=True)

    def _growth(self) -> dict[str, float | None]:
        times = [at for at, _ in self.memory]
        return {what: _growth(times, [getattr(held, what) for _, held in self.memory])
                for what in Held.__annotations__}

    def _summary(self, seconds: float, *, finished: bool) -> dict[str, Any]:
        ops = tf_stitch.runtime.counters()
        with self.counts.lock:
            counts = dict(sorted(self.counts.of.items()))
        return {"seconds": round(seconds, 1), "finished": finished, "coalesce": self.session.coalesce,
                "problems": list(self.problems), "counts": counts,
                "requests_per_second": counts.get("sent", 0) / seconds,
                "slo_ms": self.slo_ms, "not_overloaded": {k: v.report() for k, v in self.latencies.items()},
                "stitched_runs": ops.stitched, "fallback_runs": ops.fallbacks, "growth_mb": self._growth(),
                "memory_mb": [{"seconds": at, **asdict(held)} for at, held in self.memory]}

    def _agree(self) -> None:
        """Compares the session's counts with the clients'."""
        mine, its = self.counts.of, collections.Counter[str]()
        for tally in self._tallies:
            its.update(tally.outcomes)
            its["submitted"] += tally.submitted
        if self.session.stats()["outstanding"]:
            self._problem(f"The session still has {self.session.stats()['outstanding']} requests.")
        pairs = {"submitted": (its["submitted"], mine["sent"]),
                 "answered": (its["answered"] + its["late"], mine["answered"]),
                 "failed": (its["failed"], mine["failed"]), "cancelled": (its["cancelled"], mine["cancelled"]),
                 "expired": (its["expired"], mine["expired"]),
                 "rejected": (its["rejected"], mine["rejected by the queue"] + mine["rejected"])}
        if mine["ended"] + mine["lost"] != mine["sent"]:
            self._problem(f"{mine['sent']} requests ended {mine['ended']} times.")
        for what, (session, clients) in pairs.items():
            if session != clients:
                self._problem(f"The session counts {session} {what}, its clients {clients}.")


def _kind(ended: Any) -> str:
    if not isinstance(ended, Exception):
        return "answered"
    if isinstance(ended, tf.errors.ResourceExhaustedError):
        return "rejected"
    return "expired" if isinstance(ended, tf.errors.DeadlineExceededError) else "failed"


def _growth(times: Sequence[float], values: Sequence[float]) -> float | None:
    """By how much the second half rises: along its Theil-Sen line, or by its least values, whichever is less.

    These are twice what the last quarter's least is above that of the one before.  None when either has few values.
    """
    t, y = np.asarray(times, float), np.asarray(values, float)
    half, last = (t >= share * t[-1] if len(t) else t > 0 for share in (0.5, 0.75))
    if min(last.sum(), (half & ~last).sum()) < LEAST_CHECKS:
        return None
    least = 2 * (y[last].min() - y[half & ~last].min())
    t, y = t[half], y[half]
    i, j = np.triu_indices(len(t), 1)
    line = np.median((y[j] - y[i]) / (t[j] - t[i])) * (t[-1] - t[0])
    return round(float(min(line, least)), 1)


# --- subjects ---------------------------------------------------------------------------------------

def toys(folder: Path, count: int = 4, options: tf_stitch.Options | None = None) -> list[Subject]:
    """Small functions whose inputs never repeat, and one that fails for part of them."""
    found = []
    with ThreadPoolExecutor() as pool:
        for k in range(count):
            factors = [1.0 + k + 0.25 * v for v in range(3)]
            folders = [pool.submit(_stitched, _toy(f, faulty=k == 0), folder / f"toy{k}_{v}", options)
                       for v, f in enumerate(factors)]
            found.append((k, factors, folders))
    return [Subject(f"toy{k}", [f.result() for f in folders], _draw_toy, _right_toy(factors, faulty=k == 0),
                    permanent=k == 0) for k, factors, folders in found]


def _toy(factor: float, faulty: bool) -> tf.Module:
    module = tf.Module()
    module.weight = tf.Variable(np.float32(factor))

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        checks = [tf.debugging.Assert(tf.reduce_all(x < 2.5), ["too large"])] if faulty else []
        with tf.control_dependencies(checks):
            return {"y": (tf.tanh(x) * module.weight + 1.0) * tf.sigmoid(x)}

    module.call = tf.function(call, autograph=False, input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, "x")])
    return module


def _stitched(module: tf.Module, folder: Path, options: tf_stitch.Options | None) -> Path:
    tf.saved_model.save(module, os.fspath(folder), signatures=module.call)
    stitched = folder.with_name(folder.name + "_stitched")
    tf_stitch.rewrite_saved_model(folder, stitched, options=options, verify=False)
    return stitched


def _draw_toy(rng: np.random.Generator) -> Inputs:
    return {"x": rng.standard_normal((int(rng.integers(1, 5)), WIDTH)).astype(np.float32)}


def _right_toy(factors: Sequence[float], faulty: bool) -> Callable[[int, Inputs, Any], bool]:
    def right(version: int, inputs: Inputs, ended: Any) -> bool:
        x = inputs["x"].astype(np.float64)
        if faulty and (x >= 2.5).any():
            return isinstance(ended, tf.errors.InvalidArgumentError) and "too large" in str(ended)
        want = (np.tanh(x) * factors[version] + 1.0) / (1.0 + np.exp(-x))
        return isinstance(ended, dict) and ended["y"].shape == want.shape and bool(
            np.allclose(ended["y"], want, rtol=1e-5, atol=1e-6))

    return right


def real(models: Sequence[Model], policy: str) -> list[Subject]:
    """Models of models.serving_tenants: those of a kind are its versions.  ``policy``: whose copies are served."""
    kinds = dict.fromkeys(m.client.name.rpartition("_")[0] for m in models)
    found = []
    for kind in kinds:
        versions = [m for m in models if m.client.name.rpartition("_")[0] == kind]
        samples = versions[0].client.samples  # they have the same
        found.append(Subject(kind, [m.copies[policy] for m in versions], _draw_of(samples),
                             _right_of(samples, [m.client.expected for m in versions])))
    return found


def _draw_of(samples: Sequence[Inputs]) -> Callable[[np.random.Generator], Inputs]:
    return lambda rng: samples[rng.integers(len(samples))]


def _right_of(samples: Sequence[Inputs], answers: Sequence[Sequence[Inputs]]) -> Callable[[int, Inputs, Any], bool]:
    index = {id(s): i for i, s in enumerate(samples)}

    def right(version: int, inputs: Inputs, ended: Any) -> bool:
        want = answers[version][index[id(inputs)]]
        return isinstance(ended, dict) and all(relative_error(ended[k], v) <= TOLERANCE for k, v in want.items())

    return right


def held(subjects: Sequence[Subject], seconds: float, *, clients: int = 8, seed: int = 0, device: str | None = None,
         stop: threading.Event | None = None, note: Callable[[dict[str, Any]], None] | None = None,
         rate: float = math.inf, slo_ms: float = SLO_MS, **options: Any) -> dict[str, Any]:
    """The report of a soak of a new session, which is closed at its end; ``device`` is where its models are."""
    with tf_stitch.StitchSession(**options) as session:
        report = Soak(session, subjects, clients, seed, device, stop=stop, note=note, rate=rate, slo_ms=slo_ms
                      ).run(seconds)
    left = sum(t.name.startswith(THREAD_NAME) for t in threading.enumerate())
    if left:
        report["problems"].append(f"{left} threads are left.")
    return report


def of_models(models: Sequence[Model], policy: str, folder: Path) -> list[Subject]:
    """Models of models.serving_tenants, and a toy that fails for part of its inputs."""
    return [*real(models, policy), *toys(folder, 1, COPIES[policy])]


# --- the command --------------------------------------------------------------------------------------

def tables(report: dict[str, Any]) -> Iterator[Table | str]:
    """A report for people."""
    memory = Table(title=f"Memory in MB, with the same tenants and nothing under way: {report['title']}")
    for name in ("seconds", *Held.__annotations__):
        memory.add_column(name, justify="right")
    for row in report["memory_mb"]:
        memory.add_row(*(f"{v:.1f}" for v in row.values()))
    yield memory
    slo = Table(title=f"Requests of tenants that were not overloaded, against an SLO of {report['slo_ms']:g} ms")
    for name in ("priority", "requests", "within the SLO", "p50 ms", "p99 ms"):
        slo.add_column(name, justify="right")
    for priority, row in report["not_overloaded"].items():
        if row["requests"]:
            slo.add_row(priority, str(row["requests"]), f"{row['slo_attainment']:.2%}",
                        *("" if row[p] is None else f"{row[p]:.1f}" for p in ("p50_ms", "p99_ms")))
    yield slo
    yield (f"{report['seconds']} s, {report['requests_per_second']:.0f} requests a second: {report['counts']}\n"
           f"in the second half of the run, memory grew by {report['growth_mb']} MB; "
           f"problems: {report['problems'] or 'none'}{_how_it_ended(report)}")


def _how_it_ended(report: dict[str, Any]) -> str:
    if not report["finished"]:
        return "; the run was cut short"
    return "; the run was ended early" if report["ended_early"] else ""


def _subjects(args: argparse.Namespace, folder: Path) -> list[Subject]:
    if args.tenants == "toys":
        return toys(folder)
    policy = "superkernel" if args.coalesce else "stitched"
    kinds = args.kinds.split(",")
    return of_models(tenants(kinds, args.each, folder, (policy,), prepared=args.prepared), policy, folder)


@contextlib.contextmanager
def _at_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set until the body ends, also where a shell in the background ignores SIGINT."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak; 1 when something did not hold."""
    parser = argparse.ArgumentParser("python -m models.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--budget", type=float, default=math.inf, metavar="S",
                        help="end early so that all takes so many seconds, but for the import of TensorFlow")
    parser.add_argument("--tenants", choices=("toys", "real"), default="toys")
    parser.add_argument("--kinds", default="resnet18,speech,bert,dlrm", help="of real tenants")
    parser.add_argument("--each", type=int, default=2, help="versions of real tenants")
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="what models.serving --prepare wrote")
    parser.add_argument("--gpu", action="store_true", help="fail where TensorFlow sees no GPU")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float, default=math.inf, metavar="R",
                        help="requests a second at most, bursts aside")
    parser.add_argument("--slo-ms", type=float, default=SLO_MS)
    parser.add_argument("--coalesce", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the report there, and as text beside it")
    args = parser.parse_args(argv)
    if args.gpu and not tf.config.list_physical_devices("GPU"):
        print("error: TensorFlow sees no GPU here, so nothing was run.", file=sys.stderr)
        return 1
    begin, facts = time.monotonic(), bench.machine()

    def finish(report: dict[str, Any]) -> dict[str, Any]:
        report["title"] = f"{'superkernels' if args.coalesce else 'stitched'}, {args.tenants} tenants"
        if args.out:
            bench.write(args.out.parent, args.out.stem, {"machine": facts, **report}, facts, tables(report))
        return report

    with _at_signals() as stop, tempfile.TemporaryDirectory(prefix="tf_stitch_soak_") as temporary:
        subjects = _subjects(args, Path(temporary))
        seconds = min(args.minutes * 60, args.budget - CLOSING_S - (time.monotonic() - begin))
        report = finish(held(subjects, max(seconds, 0.0), clients=args.clients, seed=args.seed, stop=stop, note=finish,
                             rate=args.rate, slo_ms=args.slo_ms, coalesce=args.coalesce))
    console = Console(width=200)
    for one in tables(report):
        console.print(one)
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
