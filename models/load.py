"""The demo's models, rewritten, in the host program without Python: many requests, every answer checked.

    python -m models.load [--requests N] [--threads N] [--deadline-ms MS] [--both] [--tolerance X] [--out FOLDER]

``make host`` builds the host program.  Exits with 1 when an answer is wrong or fails, or memory grows.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from rich.console import Console
from rich.table import Table

import tf_stitch
from tf_stitch import bench

from .demo import MODELS, save

HOST = Path(__file__).resolve().parent.parent / "build" / "host" / "tf_stitch_host"
INTEGERS = 1000  # the encoder's vocabulary


def prepare(folder: Path, options: tf_stitch.Options | None = None) -> list[tuple[str, Path, Path]]:
    """Saves and rewrites the demo's models; (title, original, rewritten) of each."""
    out = []
    for model in MODELS:
        plain = save(model, folder)
        stitched = plain.with_name(f"{plain.name}_stitched")
        tf_stitch.rewrite_saved_model(plain, stitched, options=options, verify=False)
        out.append((model.title, plain, stitched))
    return out


def load(original: Path, rewritten: Path, *flags: str) -> dict:
    """Runs the host's load generator on a rewritten model; what it printed, and its exit status."""
    done = subprocess.run([HOST, "load", rewritten, "--original", original, "--integers-below", str(INTEGERS), *flags],
                          capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{HOST} failed:\n{done.stderr[-3000:]}")
    return {**json.loads(done.stdout), "status": done.returncode}


def table(rows: Sequence[tuple[str, dict]]) -> Table:
    out = Table(title="Requests to the host without Python")
    for name in ("model", "requests", "right", "late", "wrong or failed", "worst error", "a second", "p50 ms", "p99 ms",
                 "MB warm", "MB after", "fallbacks"):
        out.add_column(name, justify="left" if name == "model" else "right")
    for title, result in rows:
        for kind in ("original", "model"):
            if kind not in result:
                continue
            r = result[kind]
            fallbacks = str(result["fallback_runs"]) if kind == "model" else ""
            out.add_row(title if kind == "model" else f"{title}, TensorFlow", str(result["requests"]), str(r["right"]),
                        str(r["late"]), str(r["wrong"] + r["failed"]), f"{r['worst_error']:.1e}",
                        f"{r['per_second']:.0f}", f"{r['p50_ms']:.1f}", f"{r['p99_ms']:.1f}",
                        f"{r['rss_mb']['warm']:.0f}", f"{r['rss_mb']['after']:.0f}", fallbacks)
    return out


def record(rows: Sequence[tuple[str, dict]], folder: Path) -> None:
    """Writes host.json ({machine, rows}) and host.txt (the table)."""
    facts = bench.machine()
    results = [{"title": title, **result} for title, result in rows]
    bench.write(folder, "host", {"machine": facts, "rows": results}, facts, [table(rows)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load; 0 when all answers are right."""
    parser = argparse.ArgumentParser("python -m models.load", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="in all; each model gets the same share")
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--deadline-ms", type=int, default=60_000)
    parser.add_argument("--both", action="store_true", help="send the load to the original models too")
    parser.add_argument("--tolerance", type=float, default=1e-5,
                        help="largest difference over the largest magnitude of an output (TF32 needs about 3e-3)")
    parser.add_argument("--out", type=Path, help="folder that gets host.json and host.txt")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        models = prepare(Path(temporary))
        flags = ["--requests", str(args.requests // len(models)), "--threads", str(args.threads), "--deadline-ms",
                 str(args.deadline_ms), "--max-growth-mb", "64", "--tolerance", str(args.tolerance),
                 *(["--both"] if args.both else [])]
        rows = [(title, load(plain, stitched, *flags)) for title, plain, stitched in models]
    Console(width=None if sys.stdout.isatty() else 180).print(table(rows))
    if args.out:
        record(rows, args.out)
    for title, result in rows:
        if result["status"]:
            print(f"{title}: {result['first_problem'] or 'memory grew'}")
    return int(any(r["status"] for _, r in rows))


if __name__ == "__main__":
    sys.exit(main())
