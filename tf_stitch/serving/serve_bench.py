"""Several models under one open-loop load, with the device shared in different ways: ``tf-stitch serve-bench``."""
from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.table import Table

from ..errors import OptionError, StitchError
from . import load
from .load import Client, Outcome
from .policies import OTHERS, POLICIES, Devices, Model, expected, open_session, virtual_gpus
from .processes import ProcessPerModel, get_ready
from .recording import Event, read_trace
from .search import Found, highest_rate

Say = Callable[[str], None]
SIGNATURE = "serving_default"  # what requests run
MOST_REQUESTS = 10_000_000  # of a load: all are drawn beforehand
LEAST_REQUESTS = 300  # of a probe: fewer say too little about the last percent


@dataclass(frozen=True)
class Row:
    """What one policy gave under one load.

    Attributes:
      policy: see policies.py.
      tenants: how many models were served.
      outcome: the figures (None: there are none).
      skipped: why there are none.
      highest: the rate is the highest at which the policy met the SLO (else: a given one).
      coalescing_factor: steps of requests per launch of the scheduler over this load (None without it).
      tried: (rate, share within the SLO, generator's lateness_p99_ms) of every load of the search.
      bad: answers that were wrong and requests that failed, in all loads of the search.
    """

    policy: str
    tenants: int
    outcome: Outcome | None = None
    skipped: str = ""
    highest: bool = False
    coalescing_factor: float | None = None
    tried: Sequence[tuple[float, float, float]] = ()
    bad: int = 0

    def as_json(self) -> dict[str, Any]:
        """One flat object; null for what is infinite (no answer)."""
        flat = asdict(self)
        figures = flat.pop("outcome") or {}
        return finite({**flat, **figures})


@dataclass(frozen=True)
class Plan:
    """How a benchmark goes.

    Attributes:
      policies: in this order.
      seconds: of each load.
      rates: requests a second to send (empty: search the highest rate that meets the SLO).
      trace: requests to send instead of a Poisson process; ``rates`` then are its speeds.
      start, growth: the rate that the search begins with, and the factor by which it goes on (search.py).
      target: share of requests within their SLO that the search asks for.
      probes: loads that a search sends at most.
      also: rates to send after a search.
      common: after its search, send every policy the rates that the policies before it held.
      threads: that submit requests.
      seed: of arrivals.
      scheduler: options of the scheduler.
    """

    policies: Sequence[str] = POLICIES
    seconds: float = 2.0
    rates: Sequence[float] = ()
    trace: Sequence[Event] = ()
    start: float = 50.0
    growth: float = 2.0
    target: float = 0.99
    probes: int = 20
    also: Sequence[float] = ()
    common: bool = False
    threads: int = 1
    seed: int = 0
    scheduler: Mapping[str, Any] | None = None


def run(models: Sequence[Model], plan: Plan, devices: Devices, say: Say = lambda _: None) -> list[Row]:
    """The rows of every policy, in the plan's order.  A policy that cannot be had gives a row that says why."""
    if len({m.client.name for m in models}) < len(models):
        raise OptionError("Two models have one name.")
    if set(plan.policies) & set(OTHERS):
        get_ready()
    models = [m if m.client.expected else replace(m, client=replace(m.client, expected=expected(m))) for m in models]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tf_stitch_bench_") as work:
        for policy in plan.policies:
            also = (*plan.also, *(held(rows) if plan.common else ()))
            rows += _of_policy(policy, models, replace(plan, also=also), devices, Path(work), say)
    return rows


def held(rows: Sequence[Row]) -> list[float]:
    """The highest rates that policies held, to compare latencies of others at."""
    return [r.outcome.offered_rps for r in rows if r.highest and r.outcome]


def _of_policy(policy: str, models: Sequence[Model], plan: Plan, devices: Devices, work: Path, say: Say
               ) -> Iterator[Row]:
    say(f"{policy}: loading {len(models)} models")
    try:
        server = serve(policy, models, devices, work, plan.scheduler)
    except (StitchError, tf.errors.OpError) as error:
        yield Row(policy, len(models), skipped=str(error).splitlines()[0])
        return
    with contextlib.closing(server):
        bench = _Bench(policy, server, [m.client for m in models], plan, say)
        bench.warm_up(plan.rates[0] if plan.rates else plan.start)
        for rate in plan.rates:
            yield bench.row(bench.probe(rate))
        if not plan.rates:
            found = bench.search()
            yield replace(bench.row(found.outcome, found), highest=True)
            for rate in plan.also:
                yield bench.row(bench.probe(rate))


def serve(policy: str, models: Sequence[Model], devices: Devices, work: Path,
          scheduler_options: Mapping[str, Any] | None = None) -> Any:
    """What serves the models and takes loads: an object with ``load``, ``launches`` and ``close``.

    Raises StitchError when the policy cannot be had here.
    """
    if policy in OTHERS:
        return ProcessPerModel(models, mps=policy == "mps", memory_mb=devices.memory_mb)
    return InProcess(open_session(policy, models, devices, work, scheduler_options=scheduler_options), models)


class InProcess:
    """A session that takes loads."""

    def __init__(self, session: Any, models: Sequence[Model]) -> None:
        self.session, self._clients = session, [m.client for m in models]

    def load(self, arrivals: load.Arrivals, threads: int, warm: float) -> Outcome:
        """Sends a load; see load.run."""
        outcome = load.run(self.session.submit, self._clients, arrivals, threads=threads, warm=warm)
        self.session.drain()
        self.session.resume()
        return outcome

    def launches(self) -> tuple[float, float] | None:
        """(superkernels, steps in them) of the scheduler so far; None without it."""
        devices = self.session.stats()["scheduler"].get("devices")
        return (sum(d["superkernels"] for d in devices), sum(d["steps"] for d in devices)) if devices else None

    def close(self) -> None:
        self.session.close()


class _Bench:
    """Loads for one server."""

    def __init__(self, policy: str, server: Any, clients: Sequence[Client], plan: Plan, say: Say) -> None:
        self.policy, self.server, self.clients, self.plan, self.say = policy, server, clients, plan, say
        self._factor: float | None = None
        self._warm: Outcome | None = None

    def probe(self, rate: float) -> Outcome:
        """Sends one load; ``rate`` is the speed where the plan has a trace."""
        arrivals, warm = self._arrivals(rate)
        before = self.server.launches()
        outcome = self.server.load(arrivals, self.plan.threads, warm)
        after = self.server.launches()
        if after:
            launches, steps = (b - a for a, b in zip(before or (0, 0), after))
            self._factor = steps / max(1, launches)
        self.say(f"{self.policy} at {rate:.4g}: {_line(outcome)}")
        return outcome

    def warm_up(self, rate: float) -> None:
        """Sends a load whose latencies count nowhere: so many requests at once are new to what serves them, which makes
        graphs and plans for them.  Its answers count."""
        arrivals, _ = self._arrivals(rate)
        self._warm = self.server.load(arrivals, self.plan.threads, 0.0)

    def _arrivals(self, rate: float) -> tuple[load.Arrivals, float]:
        """Requests to come, and the seconds at the beginning that do not count."""
        plan = self.plan
        if plan.trace:
            return load.replay(self.clients, plan.trace, rate), 0.0
        seconds = max(plan.seconds, min(LEAST_REQUESTS / rate, 3 * plan.seconds))
        return load.poisson(self.clients, rate, 1.1 * seconds, plan.seed), 0.1 * seconds

    def search(self) -> Found:
        """The highest rate; loads are sent until one holds twice, since the best of many tries is a lucky one."""
        plan = self.plan
        found = highest_rate(self.probe, plan.start, target=plan.target, probes=plan.probes,
                             growth=plan.growth)
        rate = found.rate
        for _ in range(4 if rate else 0):
            again = self.probe(rate)
            if again.slo_attainment >= plan.target:
                return Found(rate, again, (*found.tried, (rate, again)))
            rate *= 0.93
        return Found(0.0, found.outcome, found.tried) if not found.outcome else found

    def row(self, outcome: Outcome | None, found: Found | None = None) -> Row:
        tried = [(r, o.slo_attainment, o.lateness_p99_ms) for r, o in found.tried] if found else []
        loads = [o for _, o in found.tried] if found else [outcome]
        return Row(self.policy, len(self.clients), outcome, "" if outcome else "no rate met the SLO",
                   coalescing_factor=self._factor if outcome else None, tried=tried,
                   bad=sum(o.wrong + o.failed for o in (self._warm, *loads) if o))


def _line(o: Outcome) -> str:
    text = (f"{o.slo_attainment:.2%} within the SLO, p50 {o.p50_ms:.2f} ms, p99 {o.p99_ms:.2f} ms, generator "
            f"{o.lateness_p50_ms:.2f} ms late at p50 and {o.lateness_p99_ms:.2f} at p99, p99 from when requests were "
            f"sent {o.from_send_p99_ms:.2f} ms")
    for what in ("rejected", "unanswered", "failed", "wrong"):
        if getattr(o, what):
            text += f", {getattr(o, what)} {what}"
    return text + (f": {o.first_error[:200]}" if o.first_error else "")


def finite(value: Any) -> Any:
    """``value`` for JSON: numbers rounded, None for those that are not finite."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def table(rows: Sequence[Row], title: str = "") -> Table:
    """The rows for people."""
    out = Table(title=title or None)
    for name in ("policy", "tenants", "offered/s", "answered/s", "in SLO", "p50 ms", "p95 ms", "p99 ms", "rejected",
                 "failed", "no answer", "wrong", "worst error", "steps/launch", "generator ms late", "p99 from sent"):
        out.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        o = row.outcome
        if o is None:
            out.add_row(row.policy, str(row.tenants), f"[dim]{row.skipped}[/dim]")
            continue
        factor = "" if row.coalescing_factor is None else f"{row.coalescing_factor:.2f}"
        out.add_row(f"{row.policy}{' (highest)' if row.highest else ''}", str(row.tenants), f"{o.offered_rps:.0f}",
                    f"{o.throughput_rps:.0f}", f"{o.slo_attainment:.2%}", f"{o.p50_ms:.2f}", f"{o.p95_ms:.2f}",
                    f"{o.p99_ms:.2f}", str(o.rejected), str(o.failed), str(o.unanswered), str(o.wrong),
                    f"{o.worst_error:.0e}", factor, f"{o.lateness_p99_ms:.2f}",
                    f"{o.from_send_p99_ms:.2f}")
    return out


# --- the command ------------------------------------------------------------------------------------

def models_of(specs: Sequence[str], slos: Sequence[str], batch: int, trace: Sequence[Event] = ()) -> list[Model]:
    """Models from ``NAME=FOLDER`` and SLOs from ``MS`` or ``NAME=MS``; inputs are drawn, of the shapes of the trace.

    Raises OptionError.
    """
    from .. import saved_model

    default, own = 50.0, {}
    for slo in slos:
        name, equals, text = slo.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf:
            raise OptionError(f"'{slo}' is no SLO; give milliseconds, or NAME=milliseconds.")
        if equals:
            own[name] = value
        else:
            default = value
    out = []
    for spec in specs:
        name, equals, folder = spec.partition("=")
        if not equals or not name or not folder:
            raise OptionError(f"'{spec}' names no model; give NAME=FOLDER.")
        model = saved_model.load(folder)
        signature = saved_model.signature_of(model)
        samples = ([saved_model.inputs_of_shapes(signature, shapes, SIGNATURE) for shapes in _recorded(trace, name)]
                   or [saved_model.sample_inputs(signature, batch, SIGNATURE)])
        out.append(Model(Path(folder), Client(name, own.pop(name, default), samples)))
    if own:
        raise OptionError(f"There is an SLO of '{next(iter(own))}', which is none of the models.")
    return out


def _recorded(trace: Sequence[Event], name: str) -> list[dict[str, tuple[int, ...]]]:
    """The different shapes of a model's requests in a trace.  Raises OptionError where it runs other signatures."""
    events = [e for e in trace if e.tenant == name]
    other = next((e.signature for e in events if e.signature != SIGNATURE), None)
    if other is not None:
        raise OptionError(f"The trace has requests of the signature '{other}' of '{name}'; serve-bench sends those of "
                          f"'{SIGNATURE}' only.")
    return list({tuple(sorted(e.shapes.items())): e.shapes for e in events}.values())


def of_models(args: Any, plan: Plan, say: Say) -> list[Row]:
    """Runs the plan on the models of command line arguments."""
    devices = virtual_gpus(len(args.models), args.gpu_memory_mb)
    return run(models_of(args.models, args.slo_ms, args.batch, plan.trace), plan, devices, say)


def plan_of(args: Any) -> Plan:
    """The plan that command line arguments ask for."""
    trace = read_trace(args.trace) if args.trace else ()
    if args.trace and not trace:
        raise OptionError(f"The trace '{args.trace}' holds no requests.")
    rates = args.rate or ([1.0] if trace else [])
    policies = args.policies.split(",") if args.policies else POLICIES
    unknown = sorted(set(policies) - {*POLICIES, *OTHERS})
    if unknown:
        raise OptionError(f"Policy '{unknown[0]}' is not known; use {', '.join((*POLICIES, *OTHERS))}.")
    if not trace and any(rate * args.seconds > MOST_REQUESTS for rate in rates):
        raise OptionError(f"A load holds {MOST_REQUESTS:,} requests at most; give a lower --rate or fewer --seconds.")
    return Plan(policies=policies, seconds=args.seconds, rates=rates, trace=trace, target=args.target / 100,
                threads=args.threads, seed=args.seed)


def to_json(rows: Sequence[Row], **facts: Any) -> str:
    """The rows, and what they were measured on, as JSON."""
    return json.dumps({**facts, "rows": [r.as_json() for r in rows]}, indent=1)
