"""The C++ parser and planner under sanitizers, on damaged programs and on the fuzzer's corpus."""
from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.op import programs
from tf_stitch.backend import host
from tf_stitch.ir.separable import Batch
from tf_stitch.program import serialize

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = Path(__file__).with_name("corpus")
SOURCES = [ROOT / "tests/op/fuzz_program.cc", ROOT / "custom_ops/program.cc", ROOT / "custom_ops/plan.cc",
           ROOT / "custom_ops/grid_table.cc", ROOT / "custom_ops/merge.cc"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    binary = tmp_path_factory.mktemp("fuzz") / "fuzz_program"
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", *SANITIZE, "-D_GLIBCXX_ASSERTIONS",
                    *map(str, SOURCES), "-o", str(binary)], check=True)
    return binary


def fuzz(fuzzer, rounds, files):
    """(programs parsed, plans that could be used, pairs of requests joined)"""
    done = subprocess.run([fuzzer, "1", str(rounds), *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(map(int, re.findall(r"\d+", done.stdout)))


def test_damaged_programs_do_no_harm(fuzzer, tmp_path):
    files = []
    for make in (programs.axpb, programs.chain, programs.rowsum, programs.gather, programs.reshape, programs.fill,
                 programs.matmul, programs.phased, programs.joinable, programs.columns):
        program = make()
        program.code = {}
        files.append(tmp_path / make.__name__)
        files[-1].write_bytes(serialize.dumps(program, text=False)[9:])
    assert fuzz(fuzzer, 0, files)[0] == len(files)
    parsed, usable, joined = fuzz(fuzzer, 30000, files)
    assert 1000 < parsed < 29000 and usable > 1000 and joined > 500


LIES = [((0, 2), (0, 1), None, (0, 1)), ((0, programs.dim("m")), (0, 1), None, (0, 1)), (None, (0, 1), None, (0, 1)),
        ((0, 1), (0, 1), (0, 1), (0, 1)), ((0, 1), (0, 0), None, None), ((0, -1), (0, 1), None, (0, 1))]


@pytest.mark.parametrize("lie", LIES)
def test_what_a_program_claims_of_its_batch_is_checked(fuzzer, tmp_path, lie):
    program = dataclasses.replace(programs.joinable(), code={}, batch=Batch("n", (0, None, 0), lie))
    file = tmp_path / "lie"
    file.write_bytes(serialize.dumps(program, text=False)[9:])
    fuzz(fuzzer, 300, [file])


def test_the_corpus(fuzzer):
    """What libFuzzer found worth keeping (make fuzz), as it is and damaged further."""
    files = sorted(CORPUS.iterdir())
    assert len(files) > 50 and sum(f.stat().st_size for f in files) < 300_000
    parsed, usable, _ = fuzz(fuzzer, 0, files)
    assert 20 < parsed < len(files) and usable > 20
    fuzz(fuzzer, 20000, files)


def clang() -> str | None:
    names = [os.environ.get("CLANG", ""), "clang++", *(f"clang++-{v}" for v in range(21, 12, -1))]
    return next((name for name in names if name and shutil.which(name)), None)


def test_libfuzzer(tmp_path):
    """The libFuzzer target builds and runs a little; `make fuzz` runs it for long."""
    compiler = clang()
    if compiler is None:
        pytest.skip("no clang here (apt-get install clang)")
    binary = tmp_path / "fuzzer"
    built = subprocess.run([compiler, "-std=c++17", "-O1", "-g", "-fsanitize=fuzzer,address,undefined",
                            "-fno-sanitize-recover=all", "-DTF_STITCH_LIBFUZZER", *map(str, SOURCES), "-o",
                            str(binary)], capture_output=True, text=True, check=False)
    if "libclang_rt" in built.stderr:
        pytest.skip("clang has no libFuzzer here (apt-get install libclang-rt-dev)")
    assert built.returncode == 0, built.stderr[-3000:]
    (tmp_path / "new").mkdir()  # inputs that reach more are written to the first folder
    done = subprocess.run([binary, "-runs=3000", "-seed=1", "-rss_limit_mb=2048", "new", CORPUS], capture_output=True,
                          text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
