"""The headers compile for every operation and type of the table; hot loops vectorise; nothing is linked."""
from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.math.support import CXX, FLAGS, LEVELS, SCALAR_DOUBLE, VECTOR_FLOAT, elementwise, library, lines, loop
from tf_stitch.backend.host import INCLUDE

pytestmark = pytest.mark.skipif(CXX is None or not LEVELS, reason="needs g++ and an x86-64-v2 processor")
NVCC = shutil.which("nvcc")


def test_every_operation_compiles(tmp_path):
    source = tmp_path / "all.cc"
    source.write_text("\n".join(['#include "ts_math.h"', *(loop(*entry) for entry in elementwise())]))
    flags = [f for f in FLAGS if f != "-w"]
    done = subprocess.run([CXX, *flags, "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fsyntax-only", "-I", str(INCLUDE),
                           str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ts_math.h" not in done.stderr and "ts_elementary.h" not in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("level", LEVELS)
def test_loops_vectorise(level):
    vectorised = library(level).vectorised
    assert {f"f_{name}_float32" for name in VECTOR_FLOAT} <= vectorised
    assert {f"f_{name}_float64" for name in VECTOR_FLOAT if name not in SCALAR_DOUBLE} <= vectorised
    halves = {f"c_{a}_{b}" for a, b in [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16"),
                                        ("float32", "bfloat16")]}
    assert halves <= vectorised


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize("level", LEVELS)
def test_hot_loops_call_nothing(level, tmp_path):
    wanted = [text for text in lines() if any(f" f_{name}_float32(" in text for name in VECTOR_FLOAT)]
    source, target = tmp_path / "hot.cc", tmp_path / "hot.o"
    source.write_text("\n".join(['#include "ts_math.h"', *wanted]))
    subprocess.run([CXX, *FLAGS, f"-march={level}", "-I", str(INCLUDE), "-c", str(source), "-o", str(target)],
                   check=True)
    text = subprocess.run(["objdump", "-d", str(target)], capture_output=True, text=True, check=True).stdout
    bodies = re.split(r"^[0-9a-f]+ <", text, flags=re.M)[1:]
    hot = [body for body in bodies if body.startswith("f_")]
    assert len(hot) >= len(VECTOR_FLOAT)
    for body in hot:
        assert not re.search(r"\bcall", body), body.split(">", 1)[0]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("level", ["x86-64", *LEVELS])
def test_no_library_is_needed(level, tmp_path):
    source, target = tmp_path / "all.cc", tmp_path / "all.o"
    floats = [loop(*entry) for entry in elementwise() if entry[1].name in ("float32", "float64")]
    source.write_text("\n".join(['#include "ts_math.h"', *floats]))
    subprocess.run([CXX, *FLAGS, "-O1", f"-march={level}", "-I", str(INCLUDE), "-c", str(source), "-o", str(target)],
                   check=True)
    undefined = subprocess.run(["nm", "-u", str(target)], capture_output=True, text=True, check=True).stdout.split()
    assert set(undefined) <= {"U", "_GLOBAL_OFFSET_TABLE_", "memcpy", "memset"}


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_cuda_compiles(tmp_path):
    source = tmp_path / "all.cu"
    loops = [loop(*entry).replace('extern "C" void', 'extern "C" __global__ void').replace('_Pragma("omp simd")', "")
             for entry in elementwise() if entry[1].name in ("float32", "float64", "int8", "int64", "uint32", "bool")]
    source.write_text("\n".join(['#include "ts_math.h"', *loops]))
    done = subprocess.run([NVCC, "-std=c++17", "-arch=sm_90", "-ptx", "-w", "-I", str(INCLUDE), str(source), "-o",
                           str(tmp_path / "all.ptx")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
