"""Draws result documents: latency, kernels and GPU time of every system, and the latency over batch sizes.

``python -m models.report FILE.json`` draws a file's.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SYSTEMS = ("tensorflow", "xla", "jax", "torch", "stitched")
LABELS = {"tensorflow": "TensorFlow", "xla": "XLA", "jax": "JAX", "torch": "PyTorch", "stitched": "tf_stitch"}
COLORS = {"tensorflow": "#9aa0a6", "xla": "#4c78a8", "jax": "#54a24b", "torch": "#e45756", "stitched": "#f2a900"}
FIGURES = (  # key of a row, file, title
    ("latency_us", "latency", "latency, microseconds (a call and a device sync)"),
    ("kernels", "kernels", "kernels per inference"),
    ("gpu_busy_us", "busy", "GPU-busy time per inference, microseconds"),
)


def draw(results: dict[str, Any], stem: Path) -> list[Path]:
    """Draws what a result document holds; returns the files, ``STEM_latency.png`` and so on.

    Raises ModuleNotFoundError without matplotlib (the extra "models" has it).
    """
    written: list[Path] = []
    for key, name, title in FIGURES:
        bars = _bars(results["rows"], key)
        if bars:
            written += _save(_bar_chart(bars, title, results["device"]), stem, name)
    if results.get("dynamic"):
        written += _save(_curves(results["dynamic"], results["device"]), stem, "dynamic")
    return written


def _bars(rows: Sequence[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """{workload: {system: figure}} of the rows with a known batch size."""
    out: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.get(key) and not r.get("dynamic"):
            out.setdefault(r["workload"], {})[r["system"]] = r[key]
    return out


def _bar_chart(bars: dict[str, dict[str, float]], title: str, device: str) -> Any:
    """Grouped bars on a logarithmic axis: a group per workload, a bar per system."""
    from matplotlib.figure import Figure

    systems = [s for s in SYSTEMS if any(s in b for b in bars.values())]
    figure = Figure(figsize=(max(6.0, 1.1 * len(bars)), 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        places = [k for k, b in enumerate(bars.values()) if system in b]
        heights = [b[system] for b in bars.values() if system in b]
        drawn = axes.bar([k + (i - (len(systems) - 1) / 2) * width for k in places], heights, width,
                         label=LABELS[system], color=COLORS[system])
        axes.bar_label(drawn, fmt="%.0f", fontsize=5, rotation=90, padding=2)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(bars)), list(bars), rotation=30, ha="right")
    axes.set_title(f"{title}\n{device}", fontsize=9)
    axes.legend(fontsize=7, ncols=len(systems))
    return figure


def _curves(dynamic: Sequence[dict[str, Any]], device: str) -> Any:
    """Latency over batch sizes: one stitched rewrite for all, and one rewrite or XLA compile for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * len(dynamic), 4.0), layout="constrained")
    for k, found in enumerate(dynamic):
        axes = figure.add_subplot(1, len(dynamic), k + 1)
        axes.plot(found["sizes"], found["latency_us"], ".-", ms=3, lw=0.8, color=COLORS["stitched"],
                  label=f"tf_stitch, one rewrite ({found['compile_s']:.1f} s)")
        samples = found["samples"]
        at = [s["batch"] for s in samples]
        axes.plot(at, [s["static_us"] for s in samples], "x", ms=3, color="black",
                  label="tf_stitch, rewritten for the size")
        on_xla = [s for s in samples if "xla_us" in s]
        axes.plot([s["batch"] for s in on_xla], [s["xla_us"] for s in on_xla], "o", mfc="none", color=COLORS["xla"],
                  label=f"XLA, compiled for the size ({found['xla_mean_compile_s']:.1f} s each)")
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
