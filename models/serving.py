"""Sixteen tenants on one device: how many requests a second each way of sharing it serves within the SLO.

    python -m models.serving [--parts search,mixed,soak] [--kinds LIST] [--each N] [--seconds S] [--policies LIST]
                             [--out DIR]

Tenants are ResNet-18, a two-layer LSTM, BERT (4 layers) and DLRM, four of each, with weights of their own, under a
Poisson load of equal shares.  ``search`` finds the highest rate at 99% of requests within the SLO for every policy of
tf_stitch.serving.policies.  ``mixed`` is models.mixed_load: a latency-critical tenant alone and while the others keep
the device full.  ``soak`` is models.soak with these tenants and one that fails.  Answers are compared with those of the
models as TensorFlow made them.
"""
from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tf_stitch
from tf_stitch import bench
from tf_stitch.errors import StitchError
from tf_stitch.serving import processes, serve_bench
from tf_stitch.serving.plots import plot
from tf_stitch.serving.policies import OTHERS, OURS, POLICIES, virtual_gpus

from . import mixed_load, soak
from .serving_tenants import KINDS, prepare, tenants

EACH = 4           # tenants of each, with weights of their own
SLO_MS = 50.0
MEMORY_MB = 6144   # of each virtual GPU
BASES = ("timeslice", "hyperq", "batching", "processes", "mps")
WANTED = {"timeslice": 5.0, "hyperq": 3.0}  # times their rates should be served
GOAL_MARGIN = 1.1  # and so much more, as rates of random arrivals vary


# --- what Python costs ------------------------------------------------------------------------------

def cost(folder: Path, seconds: float = 1.0) -> dict[str, float]:
    """Requests a second of a model that does nothing: one at a time, and with many under way.  It bounds everything."""
    module = tf.Module()
    module.call = tf.function(lambda x: {"y": x + 1.0}, input_signature=[tf.TensorSpec([1], name="x")], autograph=False)
    tf.saved_model.save(module, os.fspath(folder / "nothing"), signatures=module.call)
    inputs = {"x": np.zeros(1, np.float32)}
    with tf_stitch.StitchSession(coalesce=False) as session:
        session.add("nothing", folder / "nothing", stitch=False, device="CPU:0")
        alone, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            session.run("nothing", inputs)
            alone += 1
        many, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + seconds:
            for future in [session.submit("nothing", inputs) for _ in range(500)]:
                future.result()
            many += 500
        return {"one_at_a_time_rps": alone / seconds, "many_rps": many / (time.perf_counter() - begin)}


# --- the command ------------------------------------------------------------------------------------

class Results:
    """What was found so far, on disk after every step: a run that is cut short keeps what it has."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder, self.facts = folder, facts
        self.rows: list[serve_bench.Row] = []
        self.mixed: list[dict[str, Any]] = []
        self.soak: list[dict[str, Any]] = []

    def write(self) -> None:
        """DIR/serving.json, .txt and .png."""
        data = {**self.facts, "rows": [r.as_json() for r in self.rows],
                "mixed": [serve_bench.finite(r) for r in self.mixed], "soak": self.soak}
        bench.write(self.folder, "serving", data, self.facts, self.tables())
        if self.rows:
            plot(self.rows, self.folder / "serving.png", str(self.facts.get("title", "")))

    def tables(self) -> Iterator[Table | str]:
        """What was found so far, for people."""
        if self.rows:
            yield serve_bench.table(self.rows, f"{self.facts['title']}: highest rate at 99% within the SLO")
            yield from _ratios(self.rows)
        if self.mixed:
            yield mixed_load.table(self.mixed)
        for report in self.soak:
            yield from soak.tables(report)


def _ratios(rows: Sequence[serve_bench.Row]) -> Iterator[str]:
    best = {r.policy: r.outcome for r in rows if r.highest and r.outcome}
    for ours, base in itertools.product(OURS, BASES):
        if ours not in best or base not in best:
            continue
        limit = best[base]
        yield (f"{ours} to {base}: {best[ours].throughput_rps / limit.throughput_rps:.2f}x the requests, "
               f"p99 {best[ours].p99_ms:.1f} against {limit.p99_ms:.1f} ms")
        for r in rows:
            o = r.outcome
            if r.policy == ours and o and not r.highest and o.offered_rps > 0.98 * limit.offered_rps:
                yield (f"    at {o.offered_rps:.0f} requests a second, {o.throughput_rps / limit.throughput_rps:.2f}x: "
                       f"p99 {o.p99_ms:.2f} against {limit.p99_ms:.1f} ms")


def _also(policy: str, rows: Sequence[serve_bench.Row]) -> list[float]:
    """Rates to compare our latencies at: those that the others held, and where more than enough is served."""
    best = {r.policy: r.outcome.offered_rps for r in rows if r.highest and r.outcome and r.policy in WANTED}
    goals = [WANTED[base] * rate for base, rate in best.items()]
    return [*best.values(), *([GOAL_MARGIN * max(goals)] if goals else [])] if policy in OURS else []


def _starts(text: str) -> dict[str, float]:
    return {k: float(v) for k, v in (pair.split("=") for pair in text.split(",") if pair)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 when an answer was wrong or failed."""
    parser = argparse.ArgumentParser("python -m models.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="search,mixed,soak")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--kinds", default=",".join(KINDS), help="workloads, comma-separated")
    parser.add_argument("--each", type=int, default=EACH, help="tenants of each, with weights of their own")
    parser.add_argument("--slo-ms", type=float, default=SLO_MS)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--probes", type=int, default=20, help="loads of one search at most")
    parser.add_argument("--start", default="", metavar="POLICY=RATE,...", help="where searches begin (default: 50)")
    parser.add_argument("--growth", type=float, default=2.0, help="factor between the first rates of a search")
    parser.add_argument("--mixed-policies", default="superkernel,stitched,hyperq")
    parser.add_argument("--mixed-rate", type=float, default=200.0, help="of the latency-critical tenant")
    parser.add_argument("--mixed-seconds", type=float, default=12.0, help="of each of the two loads")
    parser.add_argument("--soak-policies", default="superkernel")
    parser.add_argument("--soak-seconds", type=float, default=30.0)
    parser.add_argument("--critical", default="", help="the latency-critical tenant (default: the first)")
    parser.add_argument("--scheduler", default="{}", help="options of the scheduler, as JSON")
    parser.add_argument("--threads", type=int, default=1, help="that submit requests")
    parser.add_argument("--out", type=Path, default=Path("build/serving"))
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="only rewrite the models for a GPU, into DIR")
    parser.add_argument("--target", default="cuda:sm_90", help="of --prepare")
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="use what --prepare wrote instead of rewriting")
    parser.add_argument("--until", type=float, default=math.inf, metavar="S", help="begin nothing after this time")
    args = parser.parse_args(argv)
    if args.prepare:
        prepare(args.kinds.split(","), args.prepare, args.target)
        return 0
    with tempfile.TemporaryDirectory(prefix="tf_stitch_tenants_") as temporary:
        return _Run(args, Path(temporary)).run()


class _Run:
    """One run of the command: its steps, each of which may fail without harm to the others."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.begin = args, folder, time.perf_counter()
        self.kinds = args.kinds.split(",")
        self.parts = args.parts.split(",")
        self.policies = [p for p in args.policies.split(",") if p] if "search" in self.parts else []
        self.soak_policies = args.soak_policies.split(",") if "soak" in self.parts else []
        self.mixed_policies = args.mixed_policies.split(",") if "mixed" in self.parts else []
        if set(self.policies) & set(OTHERS):
            processes.get_ready()
        self.devices = virtual_gpus(len(self.kinds) * args.each, MEMORY_MB)
        title = f"{len(self.kinds) * args.each} tenants ({', '.join(self.kinds)}), SLO {args.slo_ms:.0f} ms"
        self.results = Results(args.out, {"title": title, **bench.machine()})
        self.failed = 0

    def run(self) -> int:
        """All steps; 1 when an answer was wrong or a step failed."""
        args, results = self.args, self.results
        if self.policies:
            results.facts["empty_model"] = cost(self.folder)
            self.say(f"a model that does nothing: {results.facts['empty_model']}")
        used = {*self.policies, *self.mixed_policies, *self.soak_policies}
        self.models = tenants(self.kinds, args.each, self.folder, sorted(used), slo_ms=args.slo_ms,
                              prepared=args.prepared, say=self.say)
        for policy in dict.fromkeys([*self.policies, *self.mixed_policies]):
            if policy in self.policies:
                self.step(f"search of {policy}", lambda policy=policy: self.search(policy))
            if policy in self.mixed_policies:
                self.step(f"mixed load of {policy}", lambda policy=policy: self.mixed(policy))
        for policy in self.soak_policies:
            self.step(f"soak of {policy}", lambda policy=policy: self.soak(policy))
        console = Console(width=200)
        for one in results.tables():
            console.print(one)
        bad = sum(r.bad for r in results.rows) + sum(r["wrong"] + r["failed"] for r in results.mixed)
        self.say(f"written to {args.out}")
        return int(bad + sum(len(r["problems"]) for r in results.soak) + self.failed > 0)

    def step(self, name: str, work: Callable[[], None]) -> None:
        """Runs a step, while there is time, and writes what is there so far."""
        if time.perf_counter() - self.begin > self.args.until:
            self.say(f"no time for the {name}")
            return
        try:
            work()
        except (StitchError, tf.errors.OpError) as error:
            self.failed += 1
            self.say(f"the {name} failed: {type(error).__name__}: {error}")
        self.results.write()

    def search(self, policy: str) -> None:
        """The highest rate of a policy."""
        args = self.args
        plan = serve_bench.Plan(policies=[policy], seconds=args.seconds, start=_starts(args.start).get(policy, 50.0),
                                growth=args.growth, probes=args.probes, threads=args.threads,
                                scheduler=json.loads(args.scheduler), also=_also(policy, self.results.rows))
        self.results.rows += serve_bench.run(self.models, plan, self.devices, self.say)

    def mixed(self, policy: str) -> None:
        """The mixed load under a policy."""
        critical = self.args.critical or self.models[0].client.name
        models = sorted(self.models, key=lambda m: m.client.name != critical)
        self.results.mixed += mixed_load.mixed(models, policy, self.devices, self.folder, self.args.mixed_rate,
                                               self.args.mixed_seconds, self.say)

    def soak(self, policy: str) -> None:
        """models.soak with these tenants, and one that fails for part of its inputs."""
        folder = self.folder / f"soak_{policy}"
        report = soak.held(soak.of_models(self.models, policy, folder), self.args.soak_seconds,
                           device=self.devices.shared, coalesce=policy == "superkernel",
                           config=self.devices.config)
        self.results.soak.append({"title": policy, **report})

    def say(self, text: str) -> None:
        """Prints, with the time since the run began."""
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
