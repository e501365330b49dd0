"""The C++ parser and planner under sanitizers, on damaged programs."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.op import programs
from tf_stitch.backend import host
from tf_stitch.program import serialize

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    binary = tmp_path_factory.mktemp("fuzz") / "fuzz_program"
    sources = [ROOT / "tests/op/fuzz_program.cc", ROOT / "custom_ops/program.cc", ROOT / "custom_ops/plan.cc"]
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", *SANITIZE, "-D_GLIBCXX_ASSERTIONS",
                    *map(str, sources), "-o", str(binary)], check=True)
    return binary


def test_damaged_programs_do_no_harm(fuzzer, tmp_path):
    files = []
    for make in (programs.axpb, programs.chain, programs.rowsum, programs.gather, programs.reshape, programs.fill,
                 programs.matmul):
        program = make()
        program.code = {}
        files.append(tmp_path / make.__name__)
        files[-1].write_bytes(serialize.dumps(program, text=False)[9:])
    done = subprocess.run([fuzzer, "1", "30000", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    parsed, usable = map(int, re.findall(r"\d+", done.stdout))
    assert 1000 < parsed < 29000 and usable > 1000
