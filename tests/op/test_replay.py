"""CUDA-graph replay over a stand-in for the driver: the order of nodes, other addresses, threads, no leaks."""
from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from tests.gpu.random_programs import Drawn
from tf_stitch import grids
from tf_stitch.backend import host
from tf_stitch.program import serialize
from tf_stitch.program.program import KernelStep

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ["tests/op/replay_graphs.cc", "custom_ops/program.cc", "custom_ops/plan.cc", "custom_ops/cuda_code.cc",
           "custom_ops/library_cuda.cc",
           "custom_ops/runtime_cuda.cc", "custom_ops/cuda_grid.cc", "custom_ops/grid_table.cc"]


def in_phases(program):
    """With grids, whose kernels' names tell the stand-in what they hold."""
    joined, *_ = grids.join_steps(program, [isinstance(s, KernelStep) for s in program.steps[:-1]])
    assert joined.grids
    named = [dataclasses.replace(g, kernel="/".join(["t_grid", str(7 + len(g.bases)), *g.bodies]))
             for g in joined.grids]
    return dataclasses.replace(joined, grids=named)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for seed in range(6):
        program = dataclasses.replace(in_phases(Drawn(seed).plain), code={"sm_90": b"fake"}, text="")
        (folder / f"{seed}").write_bytes(serialize.dumps(program))
    return sorted(folder.iterdir())


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_replay_equals_launches(programs, sanitizer, tmp_path):
    binary = tmp_path / "replay"
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}",
                    "-fno-sanitize-recover=all", *(str(ROOT / s) for s in SOURCES), "-o", str(binary), "-pthread",
                    "-ldl"], check=True)
    done = subprocess.run([binary, "1", *map(str, programs)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    launched, made, updated, saved = map(int, re.findall(r"\d+", done.stdout))
    assert launched > 500 and made > 50 and updated > 50 and saved > 100
