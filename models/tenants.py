"""Threads that each send a request when the last one is answered, to a few tenants: what superkernels give end to end.

    python -m models.tenants [--kinds bert,dlrm] [--each 2] [--threads 1,4,16] [--seconds 1] [--options JSON ...]
                             [--prepared DIR] [--out DIR]

Writes h200_tenants.json: rows {policy, options, threads, requests_per_s, p50_ms, p99_ms, coalescing_factor, wrong,
by_kind: {kind: {requests_per_s, p50_ms, p99_ms}}}.
Policies: "tensorflow" (the models as they are), "stitched" (each request its own launches or CUDA graph, on
TensorFlow's stream) and "superkernel" (through the scheduler, once with each of the given options).  Every tenant has
weights of its own; tenants of one kind are equal but for those.  Answers are compared with TensorFlow's.  A policy that
is named twice is measured twice.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import CallableOptions

from tf_stitch import bench
from tf_stitch.serving import scheduler
from tf_stitch.serving.policies import Model

from .serving_tenants import tenants

RESULTS = Path(__file__).resolve().parent / "results"
POLICIES = ("tensorflow", "stitched", "superkernel")
TOLERANCE = 2e-2  # of the largest value: products may be summed in another order, in TF32


class Tenant:
    """A model in a TensorFlow session of its own; called with a sample's number, says whether the answer is right."""

    def __init__(self, model: Model, policy: str) -> None:
        config = tf.compat.v1.ConfigProto()
        config.experimental.session_metadata.name = model.client.name
        config.gpu_options.allow_growth = True
        self._session = tf.compat.v1.Session(graph=tf.Graph(), config=config)
        self.kind = model.client.name.rsplit("_", 1)[0]
        folder = model.copies.get(policy, model.folder)
        with self._session.graph.as_default():
            loaded = tf.compat.v1.saved_model.load(self._session, ["serve"], os.fspath(folder))
        signature = loaded.signature_def["serving_default"]
        names = sorted(signature.outputs)
        feeds = sorted(signature.inputs)
        options = CallableOptions(feed=[signature.inputs[n].name for n in feeds],
                                  fetch=[signature.outputs[n].name for n in names])
        self._run = self._session._make_callable_from_options(options)  # what a server calls: no Python per request
        self._samples = [[np.asarray(s[n]) for n in feeds] for s in model.client.samples]
        self._want = [[np.asarray(w[n]) for n in names] for w in model.client.expected or []]

    def __call__(self, i: int, check: bool = True) -> bool:
        k = i % len(self._samples)
        got = self._run(*self._samples[k])
        return not check or all(np.abs(g - w).max() <= TOLERANCE * max(np.abs(w).max(), 1e-3)
                                for g, w in zip(got, self._want[k], strict=True))

    def close(self) -> None:
        self._session.close()


@contextlib.contextmanager
def coalescing(options: dict[str, Any] | None) -> Iterator[None]:
    """The scheduler is on, unless ``options`` is None."""
    if options is None:
        yield
        return
    scheduler.acquire(options)
    try:
        yield
    finally:
        scheduler.release()


def _counts() -> tuple[float, float]:
    devices = scheduler.stats().get("devices", [])
    return sum(d["superkernels"] for d in devices), sum(d["steps"] for d in devices)


def load(served: Sequence[Tenant], threads: int, seconds: float) -> dict[str, Any]:
    """Thread i sends to tenant i, i + threads, ...; only one answer in eight is compared, for its cost."""
    latencies: list[list[float]] = [[] for _ in range(threads)]
    wrong = [0] * threads
    start, stop = threading.Barrier(threads + 1), threading.Event()

    def client(t: int) -> None:
        tenant = served[t % len(served)]
        start.wait()
        i = t
        while not stop.is_set():
            begin = time.perf_counter()
            wrong[t] += not tenant(i, check=i % 8 == 0)
            latencies[t].append(time.perf_counter() - begin)
            i += 1

    workers = [threading.Thread(target=client, args=(t,)) for t in range(threads)]
    for w in workers:
        w.start()
    before = _counts()
    start.wait()
    begin = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for w in workers:
        w.join()
    taken = time.perf_counter() - begin
    after = _counts()
    superkernels = after[0] - before[0]
    kinds: dict[str, list[float]] = {}
    for t, each in enumerate(latencies):
        kinds.setdefault(served[t % len(served)].kind, []).extend(each)
    return {"threads": threads, **_figures([s for each in latencies for s in each], taken), "wrong": sum(wrong),
            "coalescing_factor": round((after[1] - before[1]) / superkernels, 2) if superkernels else None,
            "by_kind": {k: _figures(v, taken) for k, v in kinds.items()}}


def _figures(seconds: Sequence[float], taken: float) -> dict[str, float]:
    p50, p99 = (round(float(np.percentile(seconds, q)) * 1e3, 3) for q in (50, 99))
    return {"requests_per_s": round(len(seconds) / taken, 1), "p50_ms": p50, "p99_ms": p99}


def measure(models: Sequence[Model], policy: str, variants: Sequence[dict[str, Any] | None], threads: Sequence[int],
            seconds: float) -> list[dict[str, Any]]:
    """Rows of one policy."""
    rows = []
    served = [Tenant(m, policy) for m in models]
    try:
        for options in variants:
            with coalescing(options):
                for tenant in served:
                    for i in range(4):
                        tenant(i)
                load(served, max(threads), 2 * seconds)  # times are measured and graphs are made
                for count in threads:
                    row = {"policy": policy, "options": options, **load(served, count, seconds)}
                    rows.append(row)
                    print(row, flush=True)
    finally:
        for tenant in served:
            tenant.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default="bert,dlrm", help="of models.serving_tenants")
    parser.add_argument("--each", type=int, default=2, help="tenants of each kind")
    parser.add_argument("--threads", default="1,4,16", help="clients")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--options", nargs="*", default=["{}"], metavar="JSON", help="of the scheduler")
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="what models.serving --prepare wrote")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args(argv)
    threads = [int(t) for t in args.threads.split(",")]
    policies = args.policies.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tf_stitch_tenants_") as temporary:
        models = tenants(args.kinds.split(","), args.each, Path(temporary), list(dict.fromkeys(policies)),
                         prepared=args.prepared)
        for policy in policies:
            variants = [json.loads(o) for o in args.options] if policy == "superkernel" else [None]
            rows += measure(models, policy, variants, threads, args.seconds)
    record = {**bench.machine(), "command": " ".join(["python", "-m", "models.tenants", *sys.argv[1:]]), "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "h200_tenants.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(r["wrong"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
