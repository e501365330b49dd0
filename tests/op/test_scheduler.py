"""The superkernel scheduler without TensorFlow, under sanitizers: its policy on a virtual clock, its threads, and its
GPU side over a stand-in for the driver, whose streams run in any order that events allow."""
from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.random_programs import Drawn
from tests.op import programs
from tf_stitch.backend import host
from tf_stitch.program import serialize

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZERS = ("address,undefined", "thread")
POLICY = ("coalescer", "scheduler", "merge_policy", "estimates", "flat_json")
CUDA = (*POLICY, "autotune", "program", "plan", "cuda_code", "library_cuda", "runtime_cuda", "cuda_grid", "grid_table",
        "superkernel_cuda", "table_writer", "coalesce_pack", "coalesce_cuda", "merge", "merge_cuda")


Build = Callable[[str, tuple[str, ...], str | None], Path]


def compile_with(sanitizer: str | None, *arguments: str | Path) -> None:
    checks = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"] if sanitizer else []
    subprocess.run([*host.find_compiler(), "-std=c++17", "-O1", "-g", *checks, "-D_GLIBCXX_ASSERTIONS", "-pthread",
                    *map(str, arguments)], check=True)


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Build:
    """Builds a test's program from its own file and sources of the op library, which are compiled once."""

    @functools.cache
    def compiled(name: str, sanitizer: str | None) -> Path:
        out = tmp_path_factory.mktemp("objects") / f"{name}.o"
        compile_with(sanitizer, "-c", ROOT / "custom_ops" / f"{name}.cc", "-o", out)
        return out

    def build(main: str, sources: tuple[str, ...], sanitizer: str | None) -> Path:
        binary = tmp_path_factory.mktemp("program") / Path(main).stem
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda name: compiled(name, sanitizer), sources))
        compile_with(sanitizer, ROOT / main, *objects, "-o", binary, "-ldl")
        return binary

    return build


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_policy_and_threads(sanitizer, build):
    binary = build("tests/op/schedule_requests.cc", POLICY, sanitizer)
    for seed in ("1", "2", "3"):
        done = subprocess.run([binary, seed], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert int(re.findall(r"\d+", done.stdout)[0]) > 10_000


def drawn(folder: Path, count: int) -> list[Path]:
    """Files of random programs, with code for a GPU that is none."""
    files = []
    for seed in range(count):
        files.append(folder / f"{seed}")
        program = dataclasses.replace(Drawn(seed, 40).plain, code={"sm_90": b"fake"}, text="")
        files[-1].write_bytes(serialize.dumps(program))
    return files


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_gpu_superkernels(sanitizer, build, tmp_path):
    files = drawn(tmp_path, 2)
    binary = build("tests/op/coalesce_cuda_requests.cc", CUDA, sanitizer)
    for seed in ("1", "2"):
        done = subprocess.run([binary, seed, *map(str, files)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        launches, packed, _ = map(int, re.findall(r"\d+", done.stdout))
        assert packed > launches / 10


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_joined_requests_on_a_gpu(sanitizer, build, tmp_path):
    program = dataclasses.replace(programs.joinable_matrices(), code={"sm_90": b"fake"}, text="")
    file = tmp_path / "program"
    file.write_bytes(serialize.dumps(program))
    binary = build("tests/op/merge_cuda_requests.cc", CUDA, sanitizer)
    for seed in ("1", "2"):
        done = subprocess.run([binary, seed, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        requests, runs, apart = map(int, re.findall(r"\d+", done.stdout))
        assert requests > 2 * runs > 8 and apart > 0


@pytest.mark.parametrize("sanitizer", [None, *SANITIZERS])
def test_clients_of_a_gpu_share_superkernels(sanitizer, build, tmp_path):
    """Sixteen clients, four tenants, two models, on a device that takes time.  What is done once for a number of
    requests (code is loaded, a graph is made) is done by a thread that nobody waits for."""
    binary = build("tests/op/coalesce_cuda_load.cc", CUDA, sanitizer)
    done = subprocess.run([binary, "16", *map(str, drawn(tmp_path, 2))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    problems, packed_us, apart_us, packed_ns, alone_ns = map(float, re.findall(r"[\d.]+", done.stdout))
    assert problems > 1.5 and packed_us < apart_us
    if not sanitizer:
        assert packed_ns < alone_ns / 2
