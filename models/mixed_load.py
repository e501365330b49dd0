"""A steady load of one latency-critical tenant, alone and while other tenants keep the device full as best effort.

The two loads take turns, round by round, with the same arrivals, as latencies of one load vary over time too; which
comes first alternates, and a round of each to warm up does not count.  How the 99th percentiles compare comes with the
interval that holds it with 95% confidence, from rounds drawn again and again out of those that there were (a bootstrap
of pairs).
"""
from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.table import Table

from tf_stitch.serving import load
from tf_stitch.serving.load import Client
from tf_stitch.serving.policies import Devices, Model, open_session

FLOOD = 2           # requests that a best-effort tenant always has under way
FILL_S = 0.2        # until best effort has filled the device
ROUNDS = 12
RESAMPLES = 2000
CONFIDENCE = 0.95
PARTS = ("alone", "mixed")


def mixed(models: Sequence[Model], policy: str, devices: Devices, work: Path, rate: float, seconds: float,
          say: Callable[[str], None] = print, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """The first model's latencies, alone and while the others keep the device full: a row of each.

    ``rate`` is in requests a second; each of the two loads lasts ``seconds``, split among ``rounds``.
    """
    critical, *fill = models
    others = [replace(m, client=replace(m.client, best_effort=True)) for m in fill]
    with contextlib.closing(open_session(policy, [critical, *others], devices, work)) as session:
        parts = {part: Part(part, critical.client) for part in PARTS}
        for turn in range(-1, rounds):
            arrivals = load.poisson([critical.client], rate, seconds / rounds, seed=turn + 1)
            for name in PARTS if turn % 2 == 0 else PARTS[::-1]:
                part = parts[name] if turn >= 0 else Part(name, critical.client)
                part.send(session, arrivals, [o.client for o in others])
    rows = [{"policy": policy, "tenants": len(models), **part.row(), **compared(parts["alone"], part)}
            for part in parts.values()]
    for row in rows:
        say(f"{policy}, {row['tenant']} {row['part']}: p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms, "
            f"best effort {row['best_effort_rps']:.0f} a second")
    low, high = rows[-1]["p99_to_alone_interval"]
    say(f"{policy}: p99 {rows[-1]['p99_to_alone']:.2f} times that of alone, {low:.2f} to {high:.2f}")
    return rows


@dataclass
class Part:
    """The rounds of one of the two loads of the latency-critical client."""

    name: str
    client: Client
    rounds: list[tuple[load.Arrivals, load.Measured]] = field(default_factory=list)
    filled: int = 0     # answers to best effort meanwhile
    failed: int = 0     # and failures
    seconds: float = 0.0

    def send(self, session: Any, arrivals: load.Arrivals, others: Sequence[Client]) -> None:
        """Sends a round of it, beside a flood of the others' requests where the load is a mixed one."""
        with Flood(session, others if self.name == "mixed" else []) as flood:
            before, begin = flood.answered, time.perf_counter()
            self.rounds.append((arrivals, load.measure(session.submit, [self.client], arrivals, begin + 0.01, 1)))
            self.seconds += time.perf_counter() - begin
            self.filled += flood.answered - before
        self.failed += flood.failed

    @property
    def latencies_ms(self) -> list[np.ndarray]:
        """Of every round's requests; infinite where there was no answer."""
        return [(measured.done - arrivals.times) * 1e3 for arrivals, measured in self.rounds]

    def row(self) -> dict[str, Any]:
        """What all rounds gave, and each one's p99."""
        figures = asdict(load.summary([self.client], *load.one_after_the_other(self.rounds), 0.0))
        del figures["by_client"]
        return {"part": self.name, "tenant": self.client.name, **figures,
                "p99_ms_of_rounds": [p99([each]) for each in self.latencies_ms],
                "best_effort_rps": self.filled / self.seconds, "best_effort_failed": self.failed}


def p99(rounds: Sequence[np.ndarray]) -> float:
    """The 99th percentile of all requests of some rounds."""
    ordered = np.sort(np.concatenate(rounds))  # np.percentile would interpolate with infinity
    return float(ordered[math.ceil(0.99 * len(ordered)) - 1])


def compared(alone: Part, part: Part) -> dict[str, Any]:
    """How a load's p99 compares with that of alone, and the interval of that with CONFIDENCE."""
    base, its = alone.latencies_ms, part.latencies_ms
    draws = np.random.default_rng(0).integers(0, len(base), (RESAMPLES, len(base)))
    ratios = [p99([its[i] for i in draw]) / p99([base[i] for i in draw]) for draw in draws]
    ends = [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2]
    return {"p99_to_alone": p99(its) / p99(base),
            "p99_to_alone_interval": [float(v) for v in np.quantile(ratios, ends, method="nearest")]}


class Flood:
    """Keeps FLOOD requests of every client under way until it ends."""

    def __init__(self, session: Any, clients: Sequence[Client]) -> None:
        self.answered = self.failed = 0
        self._session, self._clients = session, clients
        self._stop = False
        self._lock = threading.Lock()

    def __enter__(self) -> Flood:
        for client in self._clients:
            for i in range(FLOOD):
                self._send(client, i)
        if self._clients:
            time.sleep(FILL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._session.drain(30)
        self._session.resume()

    def _send(self, client: Client, i: int) -> None:
        try:
            future = self._session.submit(client.name, client.samples[i % len(client.samples)])
        except (tf.errors.ResourceExhaustedError, tf.errors.UnavailableError):
            return
        future.add_done_callback(lambda done: self._next(client, i + 1, done))

    def _next(self, client: Client, i: int, done: Any) -> None:
        with self._lock:
            if done.exception() is None:
                self.answered += 1
            else:
                self.failed += 1
        if not self._stop:
            self._send(client, i)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    out = Table(title="One latency-critical tenant; the others fill the device as best effort")
    for name in ("policy", "tenant", "load", "requests", "p50 ms", "p95 ms", "p99 ms", "of rounds", "p99 to alone",
                 f"with {CONFIDENCE:.0%}", "generator ms late", "best effort/s", "wrong", "failed"):
        out.add_column(name, justify="left" if name in ("policy", "tenant", "load") else "right")
    for r in rows:
        each, (low, high) = r["p99_ms_of_rounds"], r["p99_to_alone_interval"]
        out.add_row(r["policy"], r["tenant"], r["part"], str(r["requests"]), f"{r['p50_ms']:.2f}", f"{r['p95_ms']:.2f}",
                    f"{r['p99_ms']:.2f}", f"{min(each):.2f} to {max(each):.2f}", f"{r['p99_to_alone']:.2f}x",
                    f"{low:.2f} to {high:.2f}", f"{r['lateness_p99_ms']:.2f}", f"{r['best_effort_rps']:.0f}",
                    str(r["wrong"]), str(r["failed"] + r["best_effort_failed"]))
    return out
