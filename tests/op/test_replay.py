"""CUDA-graph replay over a stand-in for the driver: the order of nodes, other addresses, threads, no leaks."""
from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.random_programs import Drawn
from tests.op import programs
from tf_stitch import grids
from tf_stitch.backend import host, images
from tf_stitch.ir import dims as D
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.program import serialize
from tf_stitch.program.program import Buffer, Grid, KernelStep

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [f"custom_ops/{name}.cc" for name in (
    "program", "plan", "cuda_code", "library_cuda", "runtime_cuda", "cuda_grid", "grid_table")]


def in_phases(program):
    """With grids, whose kernels' names tell the stand-in what they hold."""
    joined, *_ = grids.join_steps(program, [isinstance(s, KernelStep) for s in program.steps[:-1]])
    assert joined.grids
    named = [dataclasses.replace(g, kernel="/".join(["t_grid", str(7 + len(g.bases)), *g.bodies]))
             for g in joined.grids]
    return dataclasses.replace(joined, grids=named)


def in_ranges(seed):
    """Plans for sizes up to 5 and for others, which both write the values: all of them are outputs."""
    rng, n = np.random.default_rng(seed), programs.dim("n")
    values = [Buffer("output", i, "float32", (n, n)) for i in range(12)]
    few = D.dmin(1, D.dmax(0, 6 - n))
    steps = []
    for active in (few, 1 - few):
        for out in range(1, len(values) + 1):
            a, b = (int(x) for x in rng.integers(max(0, out - 3), out, 2))
            step = programs.launch("t_mul", (a, b, out), n * n) if rng.random() < 0.5 else \
                programs.launch("t_axpb", (a, out), n * n)
            steps.append(dataclasses.replace(step, blocks=step.blocks * active))
    return programs.program([Buffer("input", 0, "float32", (n, n)), *values], steps, {"n": SymbolSource("dim", 0, 0)})


def in_packs(seed):
    """Two layers of kernels that do not depend on each other, a pack each; the second reads some of the first."""
    rng, n, width = np.random.default_rng(seed), programs.dim("n"), 9
    inputs = [Buffer("input", i, "float32", (n, n)) for i in range(3)]
    temps = [Buffer("temp", i, "float32", (n, n)) for i in range(width)]
    outputs = [Buffer("output", i, "float32", (n, n)) for i in range(width)]
    steps, before = [], range(3)
    for first in (3, 3 + width):
        for out in range(first, first + width):
            a, b = (int(x) for x in rng.choice(before, 2))
            steps.append(programs.launch("t_mul", (a, b, out), n * n) if rng.random() < 0.5 else
                         programs.launch("t_axpb", (a, out), n * n))
        before = range(first, first + width)
    packs = [Grid("/".join(["ts_pack_", str(7 + len(bases)), "t_axpb", "t_mul"]), ("t_axpb", "t_mul"), bases, first,
                  (width,), ((0, ()), (0, ())))
             for first, bases in ((0, (0, 1, 2)), (width, tuple(range(3 + width, 3 + 2 * width))))]
    return programs.program([*inputs, *temps, *outputs], steps, {"n": SymbolSource("dim", 0, 0)}, grids=packs)


def coded(program, code):
    return serialize.dumps(dataclasses.replace(program, code={"sm_90": code}, text=""))


def in_images(program):
    """Code in which each kernel is an image."""
    steps = [s for s in program.steps if isinstance(s, KernelStep)]
    kernels = sorted({k.kernel for k in (*steps, *program.grids)})
    return images.pack([images.Image((k, f"{k}_many"), b"fake") for k in kernels])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    made = [*(in_phases(Drawn(seed).plain) for seed in range(6)), in_ranges(0), in_ranges(1), in_packs(0), in_packs(1)]
    for k, program in enumerate(made):
        (folder / f"{k}").write_bytes(coded(program, in_images(program) if k % 2 else b"fake"))
    return sorted(folder.iterdir())


def built(folder, *flags, main="replay_graphs"):
    binary = folder / main
    sources = [str(ROOT / s) for s in (f"tests/op/{main}.cc", *SOURCES)]
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", *flags, *sources, "-o", str(binary), "-pthread",
                    "-ldl"], check=True)
    return binary


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_replay_equals_launches(files, sanitizer, tmp_path):
    binary = built(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    done = subprocess.run([binary, "1", *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    launched, made, updated, saved = map(int, re.findall(r"\d+", done.stdout))
    assert launched > 500 and made > 50 and updated > 50 and saved > 100


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_what_is_given_back_waits_for_the_device_and_nobody_for_it(sanitizer, tmp_path):
    """Captures go on meanwhile: a driver would break one off when it is asked to wait for the context."""
    binary = built(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", main="giving_back")
    done = subprocess.run([binary], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_code_that_is_not_whole_is_an_error(tmp_path):
    """Wherever it ends: in an image, or with one that lacks a kernel."""
    binary = built(tmp_path, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = in_ranges(0)
    whole = in_images(program)
    ends = [len(images.MAGIC), *range(len(images.MAGIC) + 1, len(whole), 7)]
    for end in ends:
        (tmp_path / "program").write_bytes(coded(program, whole[:end]))
        done = subprocess.run([binary, "1", str(tmp_path / "program")], capture_output=True, text=True, check=False)
        assert done.returncode and re.search("in the middle of an image|looking for kernel", done.stderr), end
