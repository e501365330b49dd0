"""models.merging on the CPU: every system's row is written, and a wrong answer ends it."""
from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from models import merging


def test_rows_of_every_system(tmp_path):
    done = subprocess.run([sys.executable, "-m", "models.merging", "--models", "rows", "--streams", "3", "--seconds",
                           "0.05", "--target", "host", "--out", str(tmp_path)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "h200_merging.json").read_text())
    assert record["date"] and record["command"] and record["commit"]
    rows = record["rows"]
    assert [r["system"] for r in rows] == list(merging.SYSTEMS)
    assert all(r["us"] > 0 and r["streams"] == 3 for r in rows)
    assert all(r["merged_share"] == 0 for r in rows if r["system"] not in ("merged", "joined"))


def test_a_wrong_answer_is_an_error():
    x = np.ones((1, 4), np.float32)
    with pytest.raises(RuntimeError, match="wrong answer to one of 2 streams"):
        merging.measure(lambda x, count: x * 1.1, [x, x], [x, x], "separate", 0.01)
