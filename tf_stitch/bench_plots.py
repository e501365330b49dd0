"""Bar charts of benchmark rows (matplotlib): a group of bars per workload, a bar per system."""
from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .bench import Row
from .errors import OptionError
from .files import write_whole

SYSTEMS = ("tensorflow", "xla", "jax", "torch", "stitched")
LABELS = {"tensorflow": "TensorFlow", "xla": "XLA", "jax": "JAX", "torch": "PyTorch", "stitched": "tf_stitch"}
COLORS = {"tensorflow": "#9aa0a6", "xla": "#4c78a8", "jax": "#54a24b", "torch": "#e45756", "stitched": "#f2a900"}
WIDE = 20  # times the shortest bar
FIGURES = {  # key of a row: title
    "latency_us": "latency, microseconds (a call and a device sync)",
    "kernels": "kernels per call",
    "gpu_busy_us": "GPU-busy time per call, microseconds",
}


def plot(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws a result document (:func:`tf_stitch.bench.document`) into one image file, a chart per kind of figure.

    Raises OptionError when matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("Plots need matplotlib: pip install matplotlib.") from None
    rows = [Row(**r) for r in document["rows"]]
    charts = {title: found for key, title in FIGURES.items() if (found := bars(rows, key))}
    if not charts:
        raise OptionError("There is nothing to plot: no system ran the model.")
    figure = Figure(figsize=(4.5 * len(charts), 4.0), layout="constrained")
    for k, (title, found) in enumerate(charts.items()):
        draw_bars(figure.add_subplot(1, len(charts), k + 1), found, title)
    figure.suptitle(document["device"], fontsize=9)
    save(figure, path, 150)


def save(figure: Any, path: str | os.PathLike[str], dpi: int) -> None:
    """Writes a figure in the format that the file's name ends in (PNG where it has no end).

    Raises OptionError when that is not known or the file cannot be written.
    """
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=dpi, format=Path(path).suffix[1:] or "png")
        write_whole(path, picture.getvalue())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise OptionError(f"The plot '{os.fspath(path)}' cannot be written: {reason}.") from None


def bars(rows: Sequence[Row], key: str, dynamic: bool = False) -> dict[str, dict[str, float]]:
    """{workload: {system: figure}} of the rows with a known (or an unknown) batch size."""
    out: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.dynamic == dynamic and getattr(r, key):
            out.setdefault(r.workload, {})[r.system] = getattr(r, key)
    return out


def draw_bars(axes: Any, found: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Grouped bars; on a logarithmic axis where some are many times as long as others."""
    systems = [s for s in SYSTEMS if any(s in b for b in found.values())]
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        places = [k for k, b in enumerate(found.values()) if system in b]
        heights = [b[system] for b in found.values() if system in b]
        drawn = axes.bar([k + (i - (len(systems) - 1) / 2) * width for k in places], heights, width,
                         label=LABELS[system], color=COLORS[system])
        axes.bar_label(drawn, fmt="%.0f", fontsize=5, rotation=90, padding=2)
    heights = [x for b in found.values() for x in b.values()]
    if max(heights) > WIDE * min(heights):
        axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.set_xticks(range(len(found)), list(found), rotation=30, ha="right")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, ncols=len(systems))
