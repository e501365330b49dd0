"""Load with everything that goes wrong in a service, for as long as you like; every answer is checked.

    python -m models.soak [--minutes M] [--budget S] [--tenants toys|real] [--clients N] [--out FILE.json]

Clients send requests to random tenants, cancel some and give some little time.  Meanwhile an operator adds and removes
tenants, swaps their versions, and sends bursts that their queues cannot hold; one tenant fails for part of its inputs.
It must hold that every request ends exactly once, that each answer is that of a version which was current when the
request was sent, that the session's counts agree with the clients', that memory stays flat, and that the session closes
cleanly.  "toys" are small functions whose inputs never repeat; "real" are those of models.serving, and a toy.

Memory is that of the tenants that are there, and of requests under way.  So every few seconds the operator brings back
the tenants of the beginning, drains the session and has free memory given back to the system; what the process holds
then is what is compared: a line through the last two thirds of it, by the median of all pairs' slopes, must not rise.
Latencies are not judged, so other work on the machine does no harm.  The report is written after every such look, so a
run that is cut short leaves one too; SIGTERM ends a run as its time does.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
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
CHECK_S = 5.0           # between looks at what memory is held
LEAST_CHECKS = 6        # to judge whether it grows: a third of them to warm up, two thirds to judge
GROWTH_MB = 64          # what it may grow by in the last two thirds of a run
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
      permanent: it is never removed.
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


@dataclass
class Counts:
    """What became of requests, as the clients saw it."""

    of: collections.Counter[str] = field(default_factory=collections.Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, count: int = 1) -> None:
        with self.lock:
            self.of[what] += count


class Soak:
    """Clients and an operator at work on one session."""

    def __init__(self, session: tf_stitch.StitchSession, subjects: Sequence[Subject], clients: int, seed: int = 0,
                 device: str | None = None, check_s: float = CHECK_S, stop: threading.Event | None = None,
                 note: Callable[[dict[str, Any]], None] | None = None) -> None:
        """``stop`` ends the run early; ``note`` gets the report so far after every look at memory."""
        self.session, self.subjects, self.seed = session, subjects, seed
        self.device, self.check_s, self._note = device, check_s, note
        self.counts = Counts()
        self.problems: list[str] = []
        self.memory: list[tuple[float, Held]] = []  # when, with the tenants of the beginning and nothing under way
        self._tallies: list[Any] = []  # the session's own counts, those of removed tenants too
        self._live: list[Live] = []
        self._numbers = itertools.count()
        self._stop = stop or threading.Event()
        self._clients = clients

    def run(self, seconds: float) -> dict[str, Any]:
        """Runs for a while and gives the report; ``problems`` in it is empty when all held."""
        for subject in self.subjects:
            self._add(subject)
        threads = [threading.Thread(target=self._guard, args=(self._client, i)) for i in range(self._clients)]
        threads.append(threading.Thread(target=self._guard, args=(self._operator, 0)))
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        self._stop.wait(seconds)
        self._stop.set()
        for thread in threads:
            thread.join()
        return self._report(time.monotonic() - begin)

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
        under_way: collections.deque[Any] = collections.deque()
        while not self._stop.is_set():
            sent = self._send(rng)
            if sent is not None:
                under_way.append(sent)
            if len(under_way) >= WINDOW:
                self._check(*under_way.popleft())
        while under_way:
            self._check(*under_way.popleft())

    def _send(self, rng: np.random.Generator) -> Any:
        live = self._live
        tenant = live[rng.integers(len(live))]
        inputs = tenant.subject.draw(rng)
        before = tenant.allowed
        timeout_ms = float(rng.choice([1.0, 5.0])) if rng.random() < 0.03 else None
        try:
            future = self.session.submit(tenant.name, inputs, timeout_ms=timeout_ms)
        except (OptionError, tf.errors.UnavailableError):
            self.counts.add("not taken")  # the tenant was gone, or the session drained
            time.sleep(0.001)
            return None
        except tf.errors.ResourceExhaustedError:
            self.counts.add("rejected by the queue")
            time.sleep(0.001)
            return None
        ends = self._count_ends(future)
        if rng.random() < 0.03:
            future.cancel()
        return tenant, inputs, before | tenant.allowed, future, ends, timeout_ms

    def _count_ends(self, future: Future[Any]) -> list[int]:
        ends: list[int] = []
        future.add_done_callback(lambda _: ends.append(1))
        return ends

    def _check(self, tenant: Live, inputs: Inputs, allowed: frozenset[int], future: Future[Any], ends: list[int],
               timeout_ms: float | None) -> None:
        self.counts.add("sent")
        try:
            ended: Any = future.result(60)
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
        if len(ends) > 1:
            self._problem(f"A request to {tenant.name} ended {len(ends)} times.")
        if kind == "expired":
            if timeout_ms is None:
                self._problem(f"A request to {tenant.name} without a timeout expired: {ended}")
        elif kind == "rejected":
            if "cannot meet its deadline" not in str(ended):  # the scheduler's admission control
                self._problem(f"A request to {tenant.name} was rejected: {ended}")
        elif not any(tenant.subject.right(v, inputs, ended) for v in allowed):
            self.counts.add("wrong")
            self._problem(f"{tenant.name}, versions {sorted(allowed)}: {str(ended)[:300]}")

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

    def _operator_adds(self, rng: random.Random) -> None:
        if len(self._live) < 2 * len(self.subjects):
            self._add(rng.choice([s for s in self.subjects if not s.permanent]))
            self.counts.add("tenants added")

    def _add(self, subject: Subject) -> None:
        name, version = f"{subject.name}_{next(self._numbers)}", 0
        self.session.add(name, subject.versions[version], stitch=False, slo_ms=1000, max_queue=QUEUE,
                         priority="latency" if len(self._live) % 3 else "best_effort", warmup=False,
                         device=self.device)
        self._tallies.append(self.session._tenants[name].tally)
        self._live = [*self._live, Live(name, subject, frozenset({version}))]

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
        self.session.swap(tenant.name, tenant.subject.versions[new], stitch=False, warmup=False)
        tenant.allowed = frozenset({new})
        self.counts.add("versions swapped")

    def _operator_bursts(self, rng: random.Random) -> None:
        draws = np.random.default_rng(rng.randrange(1 << 30))
        tenant, futures = rng.choice(self._live), []
        for inputs in [tenant.subject.draw(draws) for _ in range(BURST)]:  # drawn before: sent faster than answered
            try:
                future = self.session.submit(tenant.name, inputs)
                futures.append((tenant, inputs, tenant.allowed, future, self._count_ends(future), None))
            except tf.errors.ResourceExhaustedError:
                self.counts.add("rejected by the queue")
        for sent in futures:
            self._check(*sent)
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
            if grown is not None and grown > GROWTH_MB:
                self._problem(f"Memory ({what}) grew by {grown:.0f} MB in the last two thirds of the run.")
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
    """By how much the last two thirds rise, along their Theil-Sen line; None when there are too few values."""
    if len(values) < LEAST_CHECKS:
        return None
    t, y = (np.asarray(a[len(values) // 3:], float) for a in (times, values))
    i, j = np.triu_indices(len(t), 1)
    return round(float(np.median((y[j] - y[i]) / (t[j] - t[i])) * (t[-1] - t[0])), 1)


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
         **options: Any) -> dict[str, Any]:
    """The report of a soak of a new session, which is closed at its end; ``device`` is where its models are."""
    with tf_stitch.StitchSession(**options) as session:
        report = Soak(session, subjects, clients, seed, device, stop=stop, note=note).run(seconds)
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
    yield (f"{report['seconds']} s, {report['requests_per_second']:.0f} requests a second: {report['counts']}\n"
           f"in the last two thirds of the run, memory grew by {report['growth_mb']} MB; "
           f"problems: {report['problems'] or 'none'}{'' if report['finished'] else '; the run was cut short'}")


def _subjects(args: argparse.Namespace, folder: Path) -> list[Subject]:
    if args.tenants == "toys":
        return toys(folder)
    policy = "superkernel" if args.coalesce else "stitched"
    kinds = args.kinds.split(",")
    return of_models(tenants(kinds, args.each, folder, (policy,), prepared=args.prepared), policy, folder)


@contextlib.contextmanager
def _at_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets until the body ends."""
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


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
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--coalesce", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the report there, and as text beside it")
    args = parser.parse_args(argv)
    begin, facts = time.monotonic(), bench.machine()

    def finish(report: dict[str, Any]) -> dict[str, Any]:
        report["title"] = f"{'superkernels' if args.coalesce else 'stitched'}, {args.tenants} tenants"
        if args.out:
            bench.write(args.out.parent, args.out.stem, {"machine": facts, **report}, facts, tables(report))
        return report

    with _at_sigterm() as stop, tempfile.TemporaryDirectory(prefix="tf_stitch_soak_") as temporary:
        subjects = _subjects(args, Path(temporary))
        seconds = min(args.minutes * 60, args.budget - CLOSING_S - (time.monotonic() - begin))
        report = finish(held(subjects, max(seconds, 0.0), clients=args.clients, seed=args.seed, stop=stop, note=finish,
                             coalesce=args.coalesce))
    console = Console(width=200)
    for one in tables(report):
        console.print(one)
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
