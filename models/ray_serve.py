"""Two models in a Ray Serve deployment on this machine, their answers checked; a version is swapped under load.

    python -m models.ray_serve [--replicas N] [--requests N]

Needs the extra [ray].  With GPUs, give as many replicas as there are; each holds one.
"""
from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray import serve

import tf_stitch
from tf_stitch.serving.ray_serve import Tenant, application

from . import soak

ROOT = Path(__file__).resolve().parent.parent


def start(cpus: int) -> int:
    """Starts Ray on this machine, with this checkout on its workers' path; the port of HTTP requests."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    ray.init(num_cpus=cpus, include_dashboard=False, configure_logging=False, log_to_driver=False,
             object_store_memory=200 << 20, runtime_env={"env_vars": {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return port


def check(handle: Any, subject: soak.Subject, tenant: str, version: int, requests: int) -> None:
    """Sends requests and compares their answers.  Raises AssertionError."""
    rng = np.random.default_rng(version)
    draws = [subject.draw(rng) for _ in range(requests)]
    for inputs, response in [(d, handle.run.remote(tenant, d)) for d in draws]:
        assert subject.right(version, inputs, response.result(timeout_s=60)), f"a wrong answer of '{tenant}'"


def processes(handle: Any, replicas: int) -> set[int]:
    """The process ids of the replicas; Ray chooses who answers, so it takes some asking."""
    found: set[int] = set()
    end = time.monotonic() + 30
    while len(found) < replicas and time.monotonic() < end:
        asked = [handle.stats.remote() for _ in range(20)]
        found |= {response.result(timeout_s=60)["pid"] for response in asked}
    return found


def post(url: str, body: Any) -> tuple[int, Any]:
    """Status and JSON answer of an HTTP request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; raises when an answer is wrong."""
    parser = argparse.ArgumentParser("python -m models.ray_serve", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tf_stitch_ray_") as temporary:
        _, a, b = soak.toys(Path(temporary), 3, tf_stitch.Options(levels=()))
        tenants = {"a": Tenant(a.versions[0], slo_ms=100), "b": Tenant(b.versions[0], priority="best_effort")}
        start(args.replicas + 1)
        try:
            handle = serve.run(application(tenants, replicas=args.replicas, threads=16))
            begin = time.perf_counter()
            check(handle, a, "a", 0, args.requests)
            check(handle, b, "b", 0, args.requests)
            rate = 2 * args.requests / (time.perf_counter() - begin)
            pids = processes(handle, args.replicas)
            print(f"{2 * args.requests} answers right, {rate:.0f} a second, from {len(pids)} replicas")
            handle = serve.run(application(tenants, replicas=args.replicas, threads=16,
                                           versions={"a": str(a.versions[1])}))
            check(handle, a, "a", 1, args.requests)
            print("another version of 'a' is served")
        finally:
            serve.shutdown()
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
