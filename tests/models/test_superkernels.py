"""The kernel-level benchmark of superkernels, as far as it goes without a GPU."""
from __future__ import annotations

import json

import numpy as np
import pytest

from models import superkernels


def test_mixed_streams_take_turns():
    shapes = superkernels.shapes_of(superkernels.MIXED, 6)
    assert shapes[:4] == list(superkernels.CONVS.values()) and shapes[4:] == shapes[:2]
    assert superkernels.shapes_of("lstm", 3) == [(1, 4096, 1024)] * 3


@pytest.mark.parametrize("error, right", [(0.0, True), (1e-4, True), (1e-1, False), (np.nan, False)])
def test_products_are_checked(error, right):
    lhs, rhs = superkernels.operands((4, 5, 6), 0)
    out = (lhs @ rhs).astype(np.float32)
    out[1, 2] += error * np.abs(out).max()
    assert superkernels.is_right(out, lhs, rhs) is right


def test_ratios():
    rows = [{"shape": s, "streams": n, "system": system, "us": us}
            for s, own, other in [("conv2", 10, 20), ("conv3", 10, 80), ("lstm", 5, 20)] for n in (2, 64)
            for system, us in [("superkernel", own), ("timeslice", other)]]
    assert superkernels.ratios(rows) == {"timeslice": {"conv2-conv5": 4.0, "lstm": 4.0}}


def test_recorded_results_hold_every_shape(tmp_path):
    record = json.loads((superkernels.RESULTS / "h200_superkernels.json").read_text())
    have = {(r["shape"], r["system"]) for r in record["rows"] if r["streams"] == 64}
    assert {(s, "superkernel") for s in (*superkernels.SHAPES, superkernels.MIXED)} <= have
    assert record["superkernel is faster than"] == superkernels.ratios(record["rows"])
    facts = {k: v for k, v in record.items() if k not in ("superkernel is faster than", "rows")}
    superkernels.write(tmp_path, facts, record["rows"])
    for name in ("h200_superkernels.json", "h200_superkernels.txt"):
        assert (superkernels.RESULTS / name).read_text() == (tmp_path / name).read_text()
