"""cuDNN through its loader's path, over libraries that stand in for NVIDIA's: call sequence, choices, errors, leaks."""
from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tf_stitch.backend import host

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ["tests/op/library_calls.cc", *(f"custom_ops/{name}.cc" for name in (
    "autotune", "cublas_lt", "cuda_driver", "cudnn", "library_cuda", "library_host", "program"))]
CASES = ["plain", "relu", "all", "sum", "volume", "gradient"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The program, and the libraries under their names."""
    made = tmp_path_factory.mktemp("fake")
    source = (ROOT / "tests/op/fake_nvidia.cc").read_text()
    wanted = re.findall(r'find\("(cu\w+)"', (ROOT / "custom_ops/cuda_driver.cc").read_text())
    missing = [name for name in wanted if f"int {name}(" not in source]
    (made / "fake_missing.inc").write_text("".join(f"FAKE_MISSING({name})\n" for name in missing))
    compiler = [*host.find_compiler(), "-std=c++17", "-O1", "-g", "-pthread"]
    subprocess.run([*compiler, "-shared", "-fPIC", f"-I{made}", str(ROOT / "tests/op/fake_nvidia.cc"), "-o",
                    str(made / "libcuda.so.1"), "-Wl,-soname,libcuda.so.1"], check=True)
    subprocess.run([*compiler, *(str(ROOT / s) for s in SOURCES), "-o", str(made / "calls"), "-ldl"], check=True)
    (made / "libcudnn.so.9").symlink_to(made / "libcuda.so.1")
    return made


def run(folder, cache, **env):
    done = subprocess.run([folder / "calls"], capture_output=True, text=True, check=False,
                          env={**os.environ, "LD_LIBRARY_PATH": str(folder), "TF_STITCH_CACHE": str(cache), **env})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), done.stderr


def choices(cache):
    """The engines in the files of choices, by file."""
    return {f.name: bytes.fromhex(f.read_text().splitlines()[2]).decode() for f in (cache / "choices").glob("*.txt")}


def test_results_and_choices(folder, tmp_path):
    """The fastest engine that needs no compiler, is deterministic, and keeps NaN where there is a ReLU."""
    lines, log = run(folder, tmp_path)
    assert lines == [f"{name}:  equal, workspace 1000" for name in CASES * 2] and not log
    assert sorted(choices(tmp_path).values()) == ["12:2=7,"] * 4 + ["13:2=7,"] * 2
    again, _ = run(folder, tmp_path, FAKE_NO_MEMORY="1")  # nothing to measure: the files say all
    assert again == lines


def test_without_measurements_the_first_that_keeps_nan(folder, tmp_path):
    lines, log = run(folder, tmp_path, TF_STITCH_AUTOTUNE="0")
    assert lines == [f"{name}:  equal, workspace 1000" for name in CASES * 2] and not log
    assert not (tmp_path / "choices").exists()


def test_damaged_choices_are_noted_and_made_again(folder, tmp_path):
    run(folder, tmp_path)
    files = sorted((tmp_path / "choices").glob("*.txt"))
    before = {f.name: f.read_text() for f in files}
    files[0].write_text("")
    files[1].write_text(before[files[1].name].replace("tf_stitch", "tf_stitsh"))
    files[2].write_text(before[files[2].name][:-3])
    lines, log = run(folder, tmp_path)
    assert log.count("is damaged and not used") == 3 and lines[0].endswith("equal, workspace 1000")
    assert {f.name: f.read_text() for f in files} == before
    assert len(list((tmp_path / "choices").iterdir())) == len(files)  # no temporary file is left


def test_a_folder_that_cannot_be_written_is_noted(folder, tmp_path):
    (tmp_path / "file").write_text("")
    lines, log = run(folder, tmp_path / "file")
    assert "cannot be written" in log and lines[0].endswith("equal, workspace 1000")


def test_no_memory(folder, tmp_path):
    """Nothing is measured; ReLU cannot be tried, so that TensorFlow has to do it."""
    lines, _ = run(folder, tmp_path, FAKE_NO_MEMORY="1")
    want = {name: f"{name}:  equal, workspace 1000" for name in CASES}
    want.update({name: f"{name}: there is no memory to try a convolution with ReLU in" for name in ("relu", "all")})
    assert lines == [want[name] for name in CASES * 2]


def test_no_engine(folder, tmp_path):
    lines, _ = run(folder, tmp_path, FAKE_NO_PLANS="1")
    assert lines == [f"{name}: cuDNN has no engine for a convolution" for name in CASES * 2]


def test_no_library(folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "libcuda.so.1").symlink_to(folder / "libcuda.so.1")
    (alone / "calls").symlink_to(folder / "calls")
    lines, _ = run(alone, tmp_path)
    assert lines[0] == "plain: libcudnn.so.9 cannot be loaded; install tensorflow[and-cuda]"
