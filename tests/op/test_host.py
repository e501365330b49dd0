"""The host backend: compiler, cache, and the runner that needs no TensorFlow."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.op import programs
from tf_stitch.backend import host
from tf_stitch.errors import CompileError, GuardFailed
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.options import HOST_LEVELS
from tf_stitch.program.program import Buffer


def floats(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 3, 1000])
def test_runs_programs(shards):
    x = floats(7, 33)
    np.testing.assert_allclose(host.run(programs.axpb(), [x], shards)[0], 2 * x + 1, rtol=1e-6)
    np.testing.assert_allclose(host.run(programs.rowsum(), [x], shards)[0], x.sum(1), rtol=1e-4)
    a, b = floats(500), floats(500) + 1
    t = 2 * a + 1
    z, v = host.run(programs.chain(), [a, b], shards)
    np.testing.assert_allclose(v, (t * (2 * t + 1))[:, None], rtol=1e-5)
    np.testing.assert_allclose(z, v[:, 0] * b, rtol=1e-6)


def test_empty_and_reshaped():
    assert host.run(programs.axpb(), [floats(0, 3)])[0].shape == (0, 3)
    x = floats(2, 3)
    np.testing.assert_array_equal(host.run(programs.reshape(), [x])[0], x.reshape(3, 2))
    np.testing.assert_array_equal(host.run(programs.fill(), [np.array([3, -2], np.int32)])[0], [-2, -2, -2])


@pytest.mark.parametrize("make, inputs, message", [
    (programs.chain, lambda: [floats(3), floats(1)], "y has x's length"),
    (programs.axpb, lambda: [floats(3)], "of rank 1 where float32 of rank 2"),
    (programs.axpb, lambda: [np.zeros((2, 2))], "float64 of rank 2 where float32"),
    (programs.fill, lambda: [np.array([1001, 0], np.int32)], "'n' is 1001, outside the range"),
    (programs.gather, lambda: [floats(3), np.array([0, 3], np.int32)], "met an index or a divisor"),
    (programs.gather, lambda: [floats(3)], "takes 2 inputs, 1 are given"),
])
def test_says_where_the_op_would_fall_back(make, inputs, message):
    with pytest.raises(GuardFailed, match=message):
        host.run(make(), inputs())


def test_notices_a_kernel_that_writes_outside():
    n = programs.dim("n")
    program = programs.program(
        [Buffer("input", 0, "float32", (n,)), Buffer("output", 0, "float32", (n,))],
        [programs.launch("t_axpb", (0, 1), n, dims=(n + 1,))], {"n": SymbolSource("dim", 0, 0)})
    with pytest.raises(RuntimeError, match=r"t_axpb .* wrote outside its buffers"):
        host.run(program, [floats(10)])


def test_code_for_every_level_needs_no_library(tmp_path):
    code = host.compile_text(programs.TEXT, HOST_LEVELS)
    assert list(code) == list(HOST_LEVELS) and len(set(code.values())) >= 2
    for blob in code.values():
        path = tmp_path / "k.so"
        path.write_bytes(blob)
        dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        assert "NEEDED" not in dynamic
        assert len(blob) < 30_000


def test_native_level_runs_here():
    assert host.native_levels() == (host.native_level(),)
    assert list(host.compile_text(programs.TEXT)) == [host.native_level()]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def no_compiler(*args):
    raise AssertionError("the compiler was called")


def test_cache_hits_and_damage(cache, monkeypatch):
    text = programs.TEXT + "// of the cache\n"
    first = host.compile_text(text)
    files = [p for p in cache.rglob("*") if p.is_file()]
    assert len(files) == 1 and files[0].suffix == ".so"
    with monkeypatch.context() as m:
        m.setattr(host, "_run_compiler", no_compiler)
        assert host.compile_text(text) == first
        with pytest.raises(AssertionError):
            host.compile_text(text + "//")
    files[0].write_bytes(files[0].read_bytes()[:-50])  # cut short: as if it were not there
    assert host.compile_text(text) == first
    assert len(files[0].read_bytes()) == len(first[host.native_level()]) + 32


def test_cache_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(host, "CACHE", host.Cache("host", ".so"))
    for _ in range(2):
        assert host.compile_text(programs.TEXT)
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_errors_of_the_compiler(cache, monkeypatch):
    with pytest.raises(CompileError, match=r"failed to compile a kernel: .*error.*'nonsense'"):
        host.compile_text("#include <stdint.h>\nnonsense x;\n")
    with pytest.raises(CompileError, match="cannot build code for 'sm_90'"):
        host.compile_text(programs.TEXT, ("sm_90",))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="'no-such-compiler' that CXX names is not there"):
        host.compile_text(programs.TEXT)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CompileError, match="'false' does not work"):
        host.compile_text(programs.TEXT)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CompileError, match=r"No C\+\+ compiler found .* install g\+\+"):
        host.compile_text(programs.TEXT)


def test_a_full_disk_is_said(cache, monkeypatch):
    monkeypatch.setattr(host.tempfile, "tempdir", "/dev/full/x")
    with pytest.raises(CompileError, match="Compiling a kernel failed"):
        host.compile_text(programs.TEXT + "// not in any cache\n")


def test_processes_may_share_a_cache(cache):
    script = ("from tests.op import programs; from tf_stitch.backend import host;"
              "print(len(host.compile_text(programs.TEXT)[host.native_level()]))")
    root = Path(__file__).resolve().parent.parent.parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    runs = [subprocess.Popen([sys.executable, "-c", script], cwd=root, env=env, stdout=subprocess.PIPE)
            for _ in range(4)]
    assert len({r.communicate()[0] for r in runs}) == 1 and all(r.returncode == 0 for r in runs)
    assert not list(cache.rglob(".new*"))
