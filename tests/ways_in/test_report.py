"""The report as text, JSON and a page that needs nothing else."""
from __future__ import annotations

import io
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_stitch.graph.rewriter import rewrite
from tf_stitch.report import ClusterReport, GraphReport, LeftNode, Report
from tf_stitch.report_layout import Box, lay_out

from .graphs import NATIVE, build, normal


@pytest.fixture(scope="module")
def report() -> Report:
    def graph():
        x = tf.compat.v1.placeholder(tf.float32, (None, 8), name="x")
        for _ in range(3):
            x = tf.nn.softmax(tf.tanh(tf.matmul(x, tf.constant(normal(8, 8)))) * 2) + x
        tf.identity(tf.strings.as_string(x), name="text")

    return rewrite(build(graph), NATIVE)[1]


def test_numbers(report):
    assert (len(report.clusters), report.kernels, report.stitched_ops) == (3, 3, 12)
    assert (report.ops_before, report.ops_after, report.kernels_after) == (16, 7, 7)
    assert report.coverage == pytest.approx(12 / 13)
    assert "3 stitched ops with 3 kernels replace 12 TensorFlow ops" in report.summary()
    assert Report().coverage == 1.0


def test_one_reason_for_all_that_have_it():
    def graph():
        x = tf.compat.v1.placeholder(tf.float32, None, name="x")
        tf.tanh(tf.exp(tf.tanh(x)))

    assert rewrite(build(graph), NATIVE)[1].reasons() == [("the rank of operand 0 is unknown", 3, ["Tanh", "Exp"])]


def test_json(report):
    found = json.loads(report.to_json())
    assert found["coverage"] == report.coverage and found["ops_before"] == 16
    assert [c["name"] for c in found["graphs"][0]["clusters"]] == [c.name for c in report.clusters]


def test_text(report):
    out = io.StringIO()
    report.print(out)
    text = report.to_text()
    assert text == out.getvalue()
    assert "Stitched" in text and "Softmax" in text and "AsString" in text and "library call" in text


def test_page_is_whole_and_needs_nothing_else(report):
    report.errors = {"serve/<y>": 1e-7}
    page = report.to_html("a <model> & more")
    assert page.startswith("<!DOCTYPE html>") and "a &lt;model&gt; &amp; more" in page and "serve/&lt;y&gt;" in page
    assert not re.search(r"https?://|src=|url\(|@import|<link|<script", page)
    (drawing,) = re.findall(r"<svg.*?</svg>", page, re.S)
    svg = ElementTree.fromstring(drawing)
    boxes = [g.get("class") for g in svg.iter("g")]
    assert sorted(boxes) == ["contraction"] * 3 + ["group"] * 3 + ["left"]
    assert len(list(svg.iter("path"))) >= len(report.graphs[0].edges)
    width, height = float(svg.get("width")), float(svg.get("height"))
    rects = [{k: float(r.get(k)) for k in ("x", "y", "width", "height")} for r in svg.iter("rect")]
    assert all(r["x"] >= 0 and r["x"] + r["width"] <= width and r["y"] + r["height"] <= height for r in rects)
    for i, a in enumerate(rects):
        for b in rects[:i]:
            apart = (a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
                     or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"])
            assert apart
    for target in re.findall(r'href="#(\w+)"', page):
        assert f'id="{target}"' in page


def points(path: str) -> list[tuple[float, float]]:
    """Points along an SVG path of absolute M, V, H and C commands."""
    found: list[tuple[float, float]] = []
    for command, text in re.findall(r"([MVHC])([^MVHC]*)", path):
        n = [float(v) for v in text.split()]
        if command == "M":
            found.append((n[0], n[1]))
            continue
        x, y = found[-1]
        end = (x, n[0]) if command == "V" else (n[0], y)
        curve = np.array([(x, y), *(zip(n[::2], n[1::2], strict=True) if command == "C" else [(x, y), end, end])])
        for t in np.linspace(0, 1, 50):
            found.append(tuple(np.array([(1 - t)**3, 3 * t * (1 - t)**2, 3 * t**2 * (1 - t), t**3]) @ curve))
    return found


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=40),
       st.lists(st.tuples(st.integers(40, 250), st.integers(1, 8)), min_size=15, max_size=15))
@settings(max_examples=100, deadline=None)
def test_edges_pass_between_boxes(edges, sizes):
    boxes = {str(k): Box(str(k), "left", ["x"] * lines, width) for k, (width, lines) in enumerate(sizes)}
    width, height, paths = lay_out(boxes, [(str(a), str(b)) for a, b in dict.fromkeys(edges)])
    assert paths
    for path in paths:
        for x, y in points(path):
            assert 0 <= x <= width and 0 <= y <= height
            assert not any(b.x + 1 < x < b.x + b.width - 1 and b.y + 1 < y < b.y + b.height - 1 for b in boxes.values())


def test_a_loop_can_be_drawn():
    clusters = [ClusterReport(n, [("m", "Mul")], 1, [n], [], []) for n in ("a", "b")]
    edges = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "c")]
    page = Report([GraphReport("f", None, 9, 5, 2, clusters, [LeftNode("c", "Print", "why")], edges)]).to_html()
    assert page.count("<path") == 4


def test_too_many_boxes_are_listed_only():
    left = [LeftNode(f"n{k}", "Print", "why") for k in range(1000)]
    clusters = [ClusterReport("a", [("m", "Mul")], 1, ["a"], [], [])]
    page = Report([GraphReport("f", None, 9, 5, 2, clusters, left, [])]).to_html()
    assert "<svg" not in page and "1001 boxes" in page
