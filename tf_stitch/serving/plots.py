"""Plots of serve-bench (matplotlib, extra [serving])."""
from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from ..bench_plots import save
from ..errors import OptionError
from .serve_bench import Row


def plot(rows: Sequence[Row], path: str | os.PathLike[str], title: str = "") -> None:
    """Draws the rows into an image file: requests a second within the SLO, and how every rate that was tried went.

    Raises OptionError when matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("Plots need matplotlib; install tf-stitch[serving].") from None
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    rates, curves, latencies = figure.subplots(1, 3)
    _bars(rates, [r for r in rows if r.outcome and (r.highest or not _has_highest(rows))])
    _curves(curves, [r for r in rows if r.tried])
    _latencies(latencies, [r for r in rows if r.outcome])
    figure.suptitle(title)
    save(figure, path, 120)


def _has_highest(rows: Sequence[Row]) -> bool:
    return any(r.highest for r in rows)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    bars = axes.bar([r.policy for r in rows], [r.outcome.throughput_rps for r in rows if r.outcome])
    axes.bar_label(bars, fmt="%.0f")
    axes.set_ylabel("answered requests a second")
    axes.set_title("highest rate that meets the SLO" if _has_highest(rows) else "throughput")
    axes.tick_params(axis="x", rotation=30)


def _curves(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        tried = sorted(row.tried)
        axes.semilogx([rate for rate, *_ in tried], [100 * share for _, share, _ in tried], "o-", label=row.policy)
    axes.axhline(99, color="gray", linewidth=0.8)
    axes.set_xlabel("offered requests a second")
    axes.set_ylabel("% within the SLO")
    if rows:
        axes.legend()


def _latencies(axes: Any, rows: Sequence[Row]) -> None:
    places, names = range(len(rows)), []
    for at, name in ((0, "p50_ms"), (1, "p95_ms"), (2, "p99_ms")):
        heights = [getattr(r.outcome, name) for r in rows]
        axes.bar([p + 0.27 * (at - 1) for p in places], [h if math.isfinite(h) else 0 for h in heights], 0.25,
                 label=name.removesuffix("_ms"))
    for row in rows:
        assert row.outcome is not None
        names.append(f"{row.policy}\n{row.outcome.offered_rps:.0f}/s")
    axes.set_xticks(list(places), names, rotation=30)
    axes.set_ylabel("latency, ms")
    axes.set_yscale("log")
    axes.legend()
