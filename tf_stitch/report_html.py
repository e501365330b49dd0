"""The report as one HTML page without external assets: numbers, reasons, and each graph's groups as inline SVG."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from .report import ClusterReport, GraphReport, Report
from .report_layout import LINE, Box, lay_out

MAX_BOXES = 600  # a drawing with more is not readable (nor fast); the tables still list everything
CLUSTER_WIDTH, LEFT_WIDTH = 230, 120
KERNELS_SHOWN = 6

STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --soft: #68718a; --paper: #fff; --line: #d8dce6; --group: #e3f0e6;
  --group-line: #3f8f5a; --left: #f4f1ea; --left-line: #b7a678; --contraction: #e6ecf8; --contraction-line: #6d86bf; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #9aa3b8; --paper: #171b24; --line: #363d4d;
  --group: #1f3a2a; --left: #37321f; --contraction: #25304a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0 1rem; } th, td { text-align: left; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; }
  th { white-space: nowrap; } td.n, th.n { text-align: right; }
.numbers { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1rem 0; } .numbers b { display: block;
  font-size: 1.5rem; font-variant-numeric: tabular-nums; } .soft { color: var(--soft); } code { font-size: .87em; }
.drawing { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 6px; }
svg text { font: 11px ui-monospace, monospace; fill: var(--ink); } svg .small { fill: var(--soft); }
svg path { fill: none; stroke: var(--soft); stroke-opacity: .55; } svg rect { stroke-width: 1.2; rx: 5px; }
.group rect { fill: var(--group); stroke: var(--group-line); }
.left rect { fill: var(--left); stroke: var(--left-line); }
.contraction rect { fill: var(--contraction); stroke: var(--contraction-line); } svg a:hover rect { stroke-width: 2.5; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin: 0 .35em 0 1em; border: 1px solid; }
"""


def page(report: Report, title: str) -> str:
    """The whole page."""
    drawn = [g for g in report.graphs if g.clusters]
    parts = [f"<h1>{escape(title)}</h1>", _numbers(report), _errors(report), _reasons(report), _untouched(report)]
    parts += [_graph(k, g) for k, g in enumerate(drawn)]
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
            f"<body>{''.join(parts)}</body></html>\n")


def _numbers(r: Report) -> str:
    shown = [(f"{r.coverage:.0%}", "of the ops outside MatMul, Conv and pools stitched"),
             (f"{r.ops_before} &rarr; {r.ops_after}", "ops that do work"),
             (f"{r.ops_before} &rarr; {r.kernels_after}", "kernels"),
             (str(len(r.clusters)), "stitched ops"), (str(r.kernels), "generated kernels")]
    return '<div class="numbers">' + "".join(f'<div><b>{n}</b><span class="soft">{t}</span></div>'
                                             for n, t in shown) + "</div>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f'<{tag}{" class=n" if i in numeric else ""}>{c}</{tag}>' for i, c in enumerate(row))

    body = "".join(f"<tr>{cells('td', r)}</tr>" for r in rows)
    return f"<table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table>"


def _errors(r: Report) -> str:
    if not r.errors:
        return ""
    rows = [(f"<code>{escape(k)}</code>", f"{v:.2e}") for k, v in r.errors.items()]
    return "<h2>Verification</h2>" + _table(("output", "largest error / output's largest value"), rows, (1,))


def _reasons(r: Report) -> str:
    rows = [(escape(reason), str(count), escape(", ".join(ops[:12]) + (" ..." if len(ops) > 12 else "")))
            for reason, count, ops in r.reasons()]
    found = _table(("reason", "nodes", "ops"), rows, (1,)) if rows else "<p>Nothing.</p>"
    return f"<h2>Left to TensorFlow</h2>{found}"


def _untouched(r: Report) -> str:
    rows = [(f"<code>{escape(name)}</code>", escape(why)) for name, why in r.untouched()]
    return "<h2>Graphs left whole</h2>" + _table(("graph", "reason"), rows) if rows else ""


def _graph(k: int, g: GraphReport) -> str:
    name = f"Function <code>{escape(g.name)}</code>" if g.name else "Main graph"
    anchors = {c.name: f"g{k}c{i}" for i, c in enumerate(g.clusters)}
    legend = ('<p class="soft"><span class="key" style="background:var(--group);border-color:var(--group-line)"></span>'
              'stitched op with its kernels<span class="key" style="background:var(--contraction);'
              'border-color:var(--contraction-line)"></span>MatMul, Conv, pool<span class="key" '
              'style="background:var(--left);border-color:var(--left-line)"></span>other ops left to TensorFlow</p>')
    return (f"<h2>{name}</h2><p class=soft>{g.nodes_before} nodes before, {g.nodes_after} after</p>{legend}"
            f"{_drawing(g, anchors)}{_clusters(g.clusters, anchors)}")


def _clusters(clusters: Sequence[ClusterReport], anchors: Mapping[str, str]) -> str:
    rows = []
    for c in clusters:
        ops = ", ".join(op if n == 1 else f"{op} &times;{n}" for op, n in Counter(o for _, o in c.nodes).most_common())
        names = "".join(f"<div><code>{escape(n)}</code> {escape(op)}</div>" for n, op in c.nodes)
        kernels = "".join(f"<div><code>{escape(x)}</code></div>" for x in c.kernels)
        rows.append((f'<code id="{anchors[c.name]}">{escape(c.name)}</code>', str(c.compute_ops), str(len(c.kernels)),
                     str(c.guards), f"<details><summary>{ops}</summary>{names}</details>"
                     f"<details><summary>last node of each kernel</summary>{kernels}</details>"))
    return _table(("stitched op", "TF ops", "kernels", "guards", "what it holds"), rows, (1, 2, 3))


# --- drawing -----------------------------------------------------------------------------------------

def _drawing(g: GraphReport, anchors: Mapping[str, str]) -> str:
    boxes = _boxes(g, anchors)
    if len(boxes) > MAX_BOXES:
        return f"<p class=soft>{len(boxes)} boxes are too many to draw; the table lists the stitched ops.</p>"
    edges = [(a, b) for a, b in g.edges if a in boxes and b in boxes]
    width, height, paths = lay_out(boxes, edges)
    lines = "".join(f'<path d="{path}"/>' for path in paths)
    shapes = "".join(_shape(b) for b in boxes.values())
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    label = f"groups of {escape(g.name or 'the main graph')}"
    return f'<div class="drawing"><svg role="img" aria-label="{label}" {size}>{lines}{shapes}</svg></div>'


def _boxes(g: GraphReport, anchors: Mapping[str, str]) -> dict[str, Box]:
    boxes = {}
    for c in g.clusters:
        kernels = [_short(x, 32) for x in c.kernels[:KERNELS_SHOWN]]
        more = [f"... {len(c.kernels) - KERNELS_SHOWN} more"] if len(c.kernels) > KERNELS_SHOWN else []
        title = _short(c.name.removesuffix("/stitched"), 32)
        if kernels == [title]:
            kernels = []
        head = f"{c.compute_ops} ops in {len(c.kernels)} kernel{'s' if len(c.kernels) != 1 else ''}"
        boxes[c.name] = Box(c.name, "group", [title, head, *kernels, *more],
                             CLUSTER_WIDTH, anchors[c.name])
    for n in g.left:
        op = _short(n.op, 32)
        width = max(LEFT_WIDTH, 7 * len(op) + 14)
        boxes[n.node] = Box(n.node, "contraction" if n.contraction else "left", [op], width)
    return boxes


def _short(name: str, size: int) -> str:
    return name if len(name) <= size else "..." + name[-(size - 3):]


def _shape(b: Box) -> str:
    texts = "".join(f'<text class="{"small" if i else "head"}" x="{b.x + 8:.0f}" y="{b.y + 16 + LINE * i:.0f}">'
                    f"{escape(t)}</text>" for i, t in enumerate(b.lines))
    inside = (f'<g class="{b.kind}"><title>{escape(b.name)}</title><rect x="{b.x:.0f}" y="{b.y:.0f}" width="{b.width}" '
              f'height="{b.height}"/>{texts}</g>')
    return f'<a href="#{re.sub(r"[^a-z0-9]", "", b.anchor)}">{inside}</a>' if b.anchor else inside
