"""Copies of inputs through page-locked memory, over a stand-in for the driver whose streams run late."""
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tf_stitch.backend import host

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    made = tmp_path_factory.mktemp("staging") / "copies"
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", "-fsanitize=address,undefined",
                    "-fno-sanitize-recover=all", str(ROOT / "tests/op/staging_copies.cc"),
                    str(ROOT / "custom_ops/staging_cuda.cc"), "-o", str(made), "-pthread"], check=True)
    return made


@pytest.mark.parametrize("how, least, most", [("small", 5, 600), ("large", 5, 200), ("no-memory", 0, 0)])
def test_copies_take_what_was_there(binary, how, least, most):
    """``large``: more is on its way than may be page-locked; ``no-memory``: none can be had.  Blocks are used again."""
    done = subprocess.run([binary, how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert least <= int(done.stdout) <= most


def test_who_waits_for_an_urgent_stream_looks(binary):
    """Looking is for a few threads, as each takes a core; one with a stream of high priority does so all the same."""
    done = subprocess.run([binary, "waits"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
