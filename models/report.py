"""Result files from what was measured: a JSON document, and from it alone the readable table, promises and plots.

    python -m models.report models/results/h200.json                      # h200.txt and h200_*.png, .svg anew
    python -m models.report --merge DIR... --out models/results/h200.json  # the same from folders of models.gpu_check

Each folder is a run: its rows name it, and "runs" in the document holds the run's machine, date, commit and command.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_stitch import bench, bench_plots

from . import bench as models_bench
from . import dynamic, plots
from .claims import CHECKS, claims
from .workloads import REGISTRY

Steps = dict[str, dict[str, Any]]
FIGURES = ("dynamic", "xla_compiles", "restart")  # parts whose steps are figures, a workload each


def merged(folders: Sequence[Path], notes: Sequence[str] = ()) -> dict[str, Any]:
    """One document of the folders that ``models.gpu_check`` filled; where two measured the same, the later one counts.

    Raises FileNotFoundError when a folder does not tell its machine.
    """
    runs: dict[str, dict[str, Any]] = {}
    rows: dict[tuple[str, str, bool], bench.Row] = {}
    more: dict[str, dict[str, Any]] = {part: {} for part in (*FIGURES, *CHECKS)}
    for folder in folders:
        runs[folder.name] = facts = _steps(folder, "machine", needed=True)["machine"]
        measured = _steps(folder, "bench")
        facts["copy_gb_per_s"] = measured.pop("copy bandwidth", {}).get("gb_per_s")
        peers, facts["peers"] = models_bench.summed_up(_rows(_steps(folder, "peers")))
        for row in [*(bench.Row(**r) for r in _rows(measured)), *peers]:
            row.run = folder.name
            rows[row.workload, row.system, row.dynamic] = row
        for part, found in more.items():
            found |= {k: v | {"run": folder.name} for k, v in _steps(folder, part).items()}
        facts["missing"] = {f"{part}, {k}": v["error"] for part in ("bench", "peers", *FIGURES)
                            for k, v in _steps(folder, part).items() if "error" in v}
    sizes, xla = ([v for v in more[part].values() if "error" not in v] for part in ("dynamic", "xla_compiles"))
    made = bench.document(_ordered(rows.values()), _common(list(runs.values())), runs=runs, dynamic=sizes,
                          xla_compiles=xla, restart=more["restart"], checks={k: more[k] for k in CHECKS},
                          notes=list(notes))
    return made | {"claims": {c.what: {"kept": c.kept, "figure": c.figure} for c in claims(made)}}


def _steps(folder: Path, part: str, needed: bool = False) -> Steps:
    path = folder / f"{part}.json"
    return json.loads(path.read_text()) if needed or path.exists() else {}


def _rows(steps: Steps) -> list[dict[str, Any]]:
    return [r for v in steps.values() for r in v.get("rows", ())]


def _ordered(rows: Any) -> list[bench.Row]:
    """By workload, the known batch first, then by system."""
    workloads, systems = list(REGISTRY), list(bench_plots.SYSTEMS)
    return sorted(rows, key=lambda r: (workloads.index(r.workload), r.dynamic, systems.index(r.system)))


def _common(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of all runs: what differs is listed."""
    facts = dict(runs[0])
    for key in ("commit", "command", "cores"):
        facts[key] = "; ".join(dict.fromkeys(str(r[key]) for r in runs))
    facts["date"] = " to ".join(dict.fromkeys((min(r["date"] for r in runs), max(r["date"] for r in runs))))
    facts["load_average"] = max(r["load_average"] for r in runs)
    facts["peers"] = {k: v for r in runs for k, v in r["peers"].items()}
    return facts


def lines(document: Mapping[str, Any]) -> list[str]:
    """What stands below the table: one rewrite for all batch sizes, promises kept or not, what falls short, what is
    missing, the runs, notes."""
    rows = [bench.Row(**r) for r in document["rows"]]
    runs = document.get("runs") or {}
    out = [*dynamic.table(document.get("dynamic") or ())]
    out += ["", *map(str, claims(document)), "", "Falls short:", *(models_bench.verdicts(rows) or ["nothing"])]
    out += ["", *(f"{r.workload}, {r.system}: {r.how}" for r in rows if r.how and not r.dynamic)]
    for name, facts in runs.items():
        known = {k: v for k, v in facts.items() if k != "missing" and v not in (None, {})}
        out += ["", f"Run {name}:", *(f"  {k}: {v}" for k, v in known.items())]
        out += [f"  not measured: {k}: {v}" for k, v in facts.get("missing", {}).items()]
    return [*out, "", *document.get("notes", ())]


def write(document: dict[str, Any], stem: Path) -> list[Path]:
    """STEM.json, STEM.txt and the plots; without matplotlib no plots, which is said."""
    files = list(bench.save(document, stem.parent, stem.name, lines(document)))
    try:
        return files + plots.draw(document, stem)
    except ModuleNotFoundError as error:
        print(f"No plots: {error}. Where it is installed: python -m models.report {files[0]}")
        return files


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files."""
    parser = argparse.ArgumentParser("python -m models.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*", help="JSON documents whose text and plots are made anew")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="DIR", help="folders of models.gpu_check")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the document that --merge makes")
    parser.add_argument("--note", action="append", default=[], metavar="TEXT", help="a line for the end of the text")
    args = parser.parse_args(argv)
    if bool(args.merge) != bool(args.out) or not (args.merge or args.results):
        parser.error("name JSON documents, or --merge DIR... with --out FILE.json")
    documents = {path: json.loads(path.read_text()) for path in args.results}
    if args.merge:
        documents[args.out] = merged(args.merge, args.note)
    for path, document in documents.items():
        for made in write(document, path.with_suffix("")):
            print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
