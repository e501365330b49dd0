"""What the project promises of a GPU, checked against a result document: each promise with its figure, kept or not.

    python -m models.claims [models/results/h200.json]

"yes" is a promise kept, "NO" one that is not, "-" one of which the document does not tell, or a figure for itself.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_stitch.bench import Row, ratio

from . import bench as models_bench
from . import dynamic, restart, xla_compiles

TWICE = ("lr", "w2v", "rnn", "birnn", "dien", "nmt")  # at least twice as fast as XLA
FEWER = ("lr", "w2v", "rnn", "birnn", "speech", "nmt")  # fewer kernels than XLA
OVER_TENSORFLOW = 4.0  # geometric mean
BANDWIDTH = 0.8  # share of the copy bandwidth that the layer-norm block reaches
CHECKS = ("tests", "sanitize", "kernels", "workloads")  # parts of models.gpu_check whose steps pass or fail
LAYERNORM_BYTES = 2 * 4096 * 1024 * 4  # read once, written once


@dataclass(frozen=True)
class Claim:
    """A promise: ``kept`` is None where the document does not tell."""

    what: str
    kept: bool | None
    figure: str

    def __str__(self) -> str:
        return f"{ {True: 'yes', False: 'NO', None: '-'}[self.kept] :>3}  {self.what}: {self.figure}"


def claims(document: Mapping[str, Any]) -> list[Claim]:
    """All promises that the benchmark can check, for a document as ``models.gpu_check`` writes it."""
    rows = [Row(**r) for r in document["rows"]]
    names = list(dict.fromkeys(r.workload for r in rows))
    return [*_checks(document.get("checks") or {}), *_latency(rows, names), *_kernels(rows),
            _bandwidth(rows, document.get("runs") or {}),
            *_compile(rows, names), *_errors(rows), _restart(document.get("restart") or {}),
            *_dynamic(document.get("dynamic") or (), document.get("xla_compiles") or ())]


def _checks(found: Mapping[str, Mapping[str, Any]]) -> Iterable[Claim]:
    for part in CHECKS:
        steps = found.get(part) or {}
        failed = {k: v["error"] for k, v in steps.items() if "error" in v}
        wrong = sum(v.get("wrong", 0) + v.get("failed", 0) for v in steps.values())
        total = sum(v.get("passed", v.get("compared", v.get("calls", 0))) for v in steps.values())
        figure = f"{total} passed, {wrong} failed; {len(failed)} of {len(steps)} steps did not end" if steps else "-"
        figure += "".join(f"; {k}: {v[:200]}" for k, v in failed.items())
        yield Claim(f"GPU check: {part}", not (failed or wrong) if steps else None, figure)


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def _latency(rows: Sequence[Row], names: Sequence[str]) -> Iterable[Claim]:
    for dynamic_batch, label in ((False, ""), (True, ", unknown batch")):
        over = {base: {n: x for n in names if (x := ratio(rows, n, "stitched", base, dynamic_batch))}
                for base in ("tensorflow", "xla")}
        mean = geometric_mean(over["tensorflow"].values())
        yield _at_least(f"TensorFlow's latency over stitched, geometric mean{label}", mean, OVER_TENSORFLOW)
        for n in TWICE:
            yield _at_least(f"XLA's latency over stitched, {n}{label}", over["xla"].get(n), 2.0)
        for n in names:
            if n not in TWICE:
                yield _at_least(f"XLA's latency over stitched, {n}{label}", over["xla"].get(n), 1.0)
        mean = geometric_mean(over["xla"].values())
        yield Claim(f"XLA's latency over stitched, geometric mean{label}", None, _text(mean))
    for n in names:
        best = {r.system: r.latency_us for r in rows if r.workload == n and not r.dynamic and r.latency_us}
        if "stitched" in best and set(best) & {"jax", "torch"}:
            fastest = min(best, key=lambda s: best[s] or 0.0)
            figures = ", ".join(f"{s} {us:.0f}" for s, us in sorted(best.items(), key=lambda item: item[1] or 0.0))
            yield Claim(f"fastest of all systems, {n}", fastest == "stitched", f"{figures} us")


def _kernels(rows: Sequence[Row]) -> Iterable[Claim]:
    count = {(r.workload, r.system): r.kernels for r in rows if not r.dynamic and r.kernels}
    shares = []
    for n in FEWER:
        ours, xla = count.get((n, "stitched")), count.get((n, "xla"))
        if ours and xla:
            shares.append(ours / xla)
        known = bool(ours and xla)
        yield Claim(f"fewer kernels than XLA, {n}", ours < xla if ours and xla else None,
                    f"{ours}, XLA {xla}" if known else "-")
    mean = _text(geometric_mean(shares))
    yield Claim(f"kernels, stitched over XLA, geometric mean of {', '.join(FEWER)}", None, mean)


def _bandwidth(rows: Sequence[Row], runs: Mapping[str, Mapping[str, Any]]) -> Claim:
    """Against the copies of the row's own run."""
    for r in rows:
        copies = runs.get(r.run, {}).get("copy_gb_per_s")
        if (r.workload, r.system, r.dynamic) == ("layernorm", "stitched", False) and r.gpu_busy_us and copies:
            return _at_least("layernorm, share of the copy bandwidth", LAYERNORM_BYTES / r.gpu_busy_us / 1e3 / copies,
                             BANDWIDTH)
    return _at_least("layernorm, share of the copy bandwidth", None, BANDWIDTH)


def _compile(rows: Sequence[Row], names: Sequence[str]) -> Iterable[Claim]:
    seconds = {(r.workload, r.system): r.compile_s for r in rows if not r.dynamic}
    for n in names:
        ours, xla = seconds.get((n, "stitched")), seconds.get((n, "xla"))
        known = ours is not None and xla is not None
        yield Claim(f"compiles sooner than XLA, {n}", ours < xla if ours is not None and xla is not None else None,
                    f"{ours:.2f} s, XLA {xla:.2f} s" if known else "-")


def _errors(rows: Sequence[Row]) -> Iterable[Claim]:
    """Against float64; products in TF32 err as much on every system."""
    for dynamic_batch, label in ((False, ", known batch"), (True, ", unknown batch")):
        found = {r.workload: r for r in rows if r.system == "stitched" and r.dynamic == dynamic_batch
                 and r.max_rel_error is not None}
        bad = [f"{n} {r.max_rel_error:.1e} (allowed {models_bench.allowed_error(r, rows):.1e})"
               for n, r in found.items() if models_bench.is_wrong(r, rows)]
        worst = max(found, key=lambda n: found[n].max_rel_error or 0.0, default="")
        figure = "; ".join(bad) or (f"at most {found[worst].max_rel_error:.1e}, {worst}; {len(found)} workloads"
                                    if worst else "-")
        yield Claim(f"as right as TensorFlow{label}", not bad if found else None, figure)


def _restart(found: Mapping[str, Mapping[str, Any]]) -> Claim:
    seconds = {n: r["first_answer_s"] for n, r in found.items() if "first_answer_s" in r}
    failed = [f"{n}: {r['error']}" for n, r in found.items() if "error" in r]
    text = ", ".join([*(f"{n} {s:.2f}" for n, s in seconds.items()), *failed]) or "-"
    kept = not failed and max(seconds.values()) < restart.LIMIT_S if found else None
    return Claim("a second process answers in under 1 s", kept, text)


def _dynamic(found: Sequence[dict[str, Any]], xla: Sequence[dict[str, Any]]) -> Iterable[Claim]:
    """One rewrite for many batch sizes, and what XLA takes to compile for them."""
    beside = {one["workload"]: xla_compiles.line(one) for one in xla}
    ours = {one["workload"]: one for one in found}
    for name in dict.fromkeys([*ours, *beside]):
        short = dynamic.verdicts(ours[name]) if name in ours else []
        texts = [*([dynamic.line(ours[name])] if name in ours else []), *([beside[name]] if name in beside else []),
                 *short]
        compared = name in ours and bool(ours[name]["samples"])
        yield Claim(f"many batch sizes, {name}", not short if compared or short else None, "; ".join(texts))


def _at_least(what: str, value: float | None, least: float) -> Claim:
    return Claim(f"{what} (at least {least:g})", None if value is None else value >= least, _text(value))


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per promise; exit status 1 when one is not kept."""
    parser = argparse.ArgumentParser("python -m models.claims", description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent / "results" / "h200.json"
    parser.add_argument("document", type=Path, nargs="?", default=default, help="a result file (default: h200.json)")
    found = claims(json.loads(parser.parse_args(argv).document.read_text()))
    print("\n".join(map(str, found)))
    return int(any(c.kept is False for c in found))


if __name__ == "__main__":
    sys.exit(main())
