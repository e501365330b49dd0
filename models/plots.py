"""Draws result documents: latency, kernels and GPU time of every system, and the latency over batch sizes.

``python -m models.report FILE.json`` draws a file's.
"""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_stitch.bench import Row
from tf_stitch.bench_plots import COLORS, FIGURES, bars, draw_bars

NAMES = {"latency_us": "latency", "kernels": "kernels", "gpu_busy_us": "busy"}  # of files, by key of a row
BATCHES = {False: ("", ""), True: ("_any", ", the batch size unknown to the system")}  # end of the name, of the title
CURVES = 4  # in a row


def draw(results: dict[str, Any], stem: Path) -> list[Path]:
    """Draws what a result document holds; returns the files, ``STEM_latency.png`` and so on.

    Raises ModuleNotFoundError without matplotlib (the extra "models" has it).
    """
    from matplotlib.figure import Figure

    rows = [Row(**r) for r in results["rows"]]
    written: list[Path] = []
    for dynamic, (ending, about) in BATCHES.items():
        for key, title in FIGURES.items():
            found = bars(rows, key, dynamic)
            if found:
                figure = Figure(figsize=(max(6.0, 1.1 * len(found)), 4.5), layout="constrained")
                draw_bars(figure.add_subplot(), found, f"{title}{about}\n{results['device']}")
                written += _save(figure, stem, NAMES[key] + ending)
    if results.get("dynamic"):
        curves = _curves(results["dynamic"], results.get("xla_compiles") or (), results["device"])
        written += _save(curves, stem, "dynamic")
    return written


def _curves(dynamic: Sequence[dict[str, Any]], xla: Sequence[dict[str, Any]], device: str) -> Any:
    """Latency over batch sizes: one stitched rewrite for all, and one rewrite or XLA compile for each."""
    from matplotlib.figure import Figure

    each = {one["workload"]: f" ({statistics.mean(one['compile_s']):.1f} s each)" for one in xla}
    columns = min(len(dynamic), CURVES)
    rows = -(-len(dynamic) // columns)
    figure = Figure(figsize=(5.0 * columns, 4.0 * rows), layout="constrained")
    for k, found in enumerate(dynamic):
        axes = figure.add_subplot(rows, columns, k + 1)
        axes.plot(found["sizes"], found["latency_us"], ".-", ms=3, lw=0.8, color=COLORS["stitched"],
                  label=f"tf_stitch, one rewrite ({found['compile_s']:.1f} s)")
        samples = found["samples"]
        at = [s["batch"] for s in samples]
        axes.plot(at, [s["static_us"] for s in samples], "x", ms=3, color="black",
                  label="tf_stitch, rewritten for the size")
        on_xla = [s for s in samples if "xla_us" in s]
        axes.plot([s["batch"] for s in on_xla], [s["xla_us"] for s in on_xla], "o", mfc="none", color=COLORS["xla"],
                  label=f"XLA, compiled for the size{each.get(found['workload'], '')}")
        axes.set_title(found["workload"], fontsize=9)
        axes.set_xlabel("batch size")
        axes.set_ylabel("microseconds")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)
    figure.suptitle(device, fontsize=8)
    return figure


def _save(figure: Any, stem: Path, name: str) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}_{name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
