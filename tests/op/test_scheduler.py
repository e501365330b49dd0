"""The superkernel scheduler without TensorFlow, under sanitizers: its policy on a virtual clock, its threads."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tf_stitch.backend import host

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ["tests/op/schedule_requests.cc", *(f"custom_ops/{name}.cc" for name in (
    "coalescer", "scheduler", "estimates", "flat_json"))]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_policy_and_threads(sanitizer, tmp_path):
    binary = tmp_path / "schedule_requests"
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}",
                    "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS", *(str(ROOT / s) for s in SOURCES), "-o",
                    str(binary), "-pthread"], check=True)
    for seed in ("1", "2", "3"):
        done = subprocess.run([binary, seed], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert int(re.findall(r"\d+", done.stdout)[0]) > 10_000
