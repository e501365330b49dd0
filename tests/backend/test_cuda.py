"""Compiling for GPUs on a machine that needs none."""
from __future__ import annotations

import os
import shutil
import signal
import sys

import numpy as np
import pytest

from tests.ir_graphs import random_case
from tf_stitch import compiler
from tf_stitch.backend import cache, cuda, images, nvrtc
from tf_stitch.errors import CompileError, DeviceError
from tf_stitch.ir.builder import Builder
from tf_stitch.options import Options
from tf_stitch.program.program import KernelStep, LibraryStep
from tf_stitch.schedule.target import CUDA

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def softmax_graph(rows: int | None = None):
    b = Builder()
    b.origin = "x"
    x = b.param((rows, 96), "float32", "x")
    y = b.ew("exp", x)
    total = b.broadcast_to(b.reduce("sum", y, (1,), keepdims=True), y.shape)
    return b.finish([b.ew("div", y, total)])


@needs_nvcc
def test_compile_graph_gives_cubin_and_ptx(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    program = compiler.compile_graph(softmax_graph(), Options(target="cuda:sm_90"))
    assert set(program.code) == {"sm_90", "compute_90"}
    assert all(image.code[:4] == b"\x7fELF" for image in images.unpack(program.code["sm_90"]))
    ptx = program.code["compute_90"].decode()
    assert ".target sm_90" in ptx and program.steps[0].kernel in ptx
    assert len(list(tmp_path.rglob("*.cubin"))) == len(list(tmp_path.rglob("*.ptx"))) == 1


@needs_nvcc
def test_code_comes_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    text = compiler.build_program(softmax_graph(), CUDA).text
    made = cuda.compile_text(text, ("sm_90",))
    monkeypatch.setattr(type(cuda.find_compiler()), "make", lambda *args: pytest.fail("compiled again"))
    assert cuda.compile_text(text, ("sm_90",)) == made


@needs_nvcc
def test_a_forked_process_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    cuda.compile_text(compiler.build_program(softmax_graph(), CUDA).text, ("compute_90",))  # its threads are there
    text = compiler.build_program(softmax_graph(5), CUDA).text
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)  # it would wait for ever for threads that it does not have
            os._exit(0 if cuda.compile_text(text, ("compute_90",)) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@needs_nvcc
def test_random_graphs_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    kernels = [k for seed in range(700, 740) for k in compiler.lay_out(random_case(seed).graph, CUDA)[1]]
    assert len(kernels) > 30
    assert cuda.compile_text(compiler.join_texts(kernels), ("compute_90",))["compute_90"]


@needs_nvcc
def test_errors_name_the_line(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    with pytest.raises(CompileError, match=r"(nvcc|NVRTC) failed to compile a kernel: .*error"):
        cuda.compile_text("this is no kernel\n", ("compute_90",))
    with pytest.raises(CompileError, match="cannot build code for 'sm_x'"):
        cuda.compile_text("", ("sm_x",))


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("TF_STITCH_NVCC", "no-such-nvcc")
    with pytest.raises(CompileError, match="'no-such-nvcc' that TF_STITCH_NVCC names"):
        cuda.compile_text("", ("sm_90",))
    monkeypatch.delenv("TF_STITCH_NVCC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    with pytest.raises(CompileError, match=r"pip install 'tensorflow\[and-cuda\]'"):
        cuda.compile_text("", ("sm_90",))


@needs_nvcc
def test_which_compiler_is_used(monkeypatch):
    """NVRTC where it is of nvcc's release; it alone where there is no nvcc."""
    found = nvrtc.find()
    if found is None:
        pytest.skip("needs NVRTC")
    monkeypatch.setenv(nvrtc.SWITCH, "0")
    nvcc = cuda.find_compiler()
    assert isinstance(nvcc, cuda.Nvcc)
    monkeypatch.delenv(nvrtc.SWITCH)
    assert isinstance(cuda.find_compiler(), cuda.Library) == (nvrtc.beside(nvcc.path, nvcc.release) is not None)
    assert nvrtc.beside(nvcc.path, found.release) is not None and nvrtc.beside(nvcc.path, (1, 0)) is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert isinstance(cuda.find_compiler(), cuda.Library)


def test_updates_of_a_release_share_no_code(monkeypatch):
    library = nvrtc.find()
    if library is None:
        pytest.skip("needs NVRTC")
    assert library.build == f"{library.version} {os.path.getsize(nvrtc._file_of(library.lib))}"
    name = cuda.Library(library).front_end("90").name
    monkeypatch.setattr(library, "build", f"{library.version} 1")
    assert cuda.Library(library).front_end("90").name != name


def test_nvrtc_alone(monkeypatch, tmp_path):
    if nvrtc.find() is None:
        pytest.skip("needs NVRTC")
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    text = compiler.build_program(softmax_graph(), CUDA).text
    made = cuda.compile_text(text)
    assert all(image.code[:4] == b"\x7fELF" for image in images.unpack(made["sm_90"]))
    assert b".target sm_90" in made["compute_90"]
    with pytest.raises(CompileError, match=r"NVRTC failed to compile a kernel: .*error"):
        cuda.compile_text("this is no kernel\n", ("sm_90",))


def test_running_needs_pycuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    cuda.driver.cache_clear()
    program = compiler.build_program(softmax_graph(2), CUDA)
    with pytest.raises(DeviceError, match=r"pip install 'tf-stitch\[cuda\]'"):
        cuda.run(program, [np.ones((2, 96), np.float32)])


def test_targets_of_an_option():
    assert cuda.targets_of("cuda:sm_90") == ("sm_90", "compute_90")
    assert cache.first_error("warning: a\nx.cu(3): error: b\n") == "x.cu(3): error: b"


def test_unknown_sizes_are_guarded_and_counted_in_32_bits():
    program = compiler.build_program(softmax_graph(None), CUDA)
    assert "TS_ENTER(32)" in program.text and "TS_ENTER(64)" not in program.text
    (guard,) = program.guards
    (name,) = program.symbols
    assert guard.holds({name: 1 << 20}) and not guard.holds({name: 1 << 25})


def dense_graph():
    b = Builder()
    x, w, v = (b.param(s, "float32", n) for s, n in (((None, 4096), "x"), ((4096, 4096), "w"), ((4096,), "v")))
    y = b.dot(x, w, contract=((1,), (0,)))
    return b.finish([b.ew("max", b.ew("add", y, v), 0.0)])


@needs_nvcc
def test_code_for_superkernels(monkeypatch, tmp_path):
    """Each kernel also takes many problems, and products leave their bias to kernels."""
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    for wanted in (False, True):
        program = compiler.compile_graph(dense_graph(), Options(target="cuda:sm_90", superkernels=wanted))
        kernels = [s.kernel for s in program.steps if isinstance(s, KernelStep)]
        ptx = program.code["compute_90"].decode()
        assert kernels and all((f"{k}_many(" in ptx) == wanted for k in kernels)
        products = [s for s in program.steps if isinstance(s, LibraryStep)]
        assert products and all((len(s.buffers) == 4) != wanted for s in products)


def test_images_are_read_as_they_were_written():
    made = [images.Image(("a", "a_many"), b"one"), images.Image((), b""), images.Image(("b",), bytes(300))]
    whole = images.pack(made)
    assert images.unpack(whole) == made
    assert images.pack(made[:1]) == b"one" and images.unpack(b"one") == [images.Image((), b"one")]
    ends = {len(images.pack(made[:k])) for k in (2, 3)} | {len(images.MAGIC)}
    first = len(images.MAGIC) + 12 + len("a a_many") + len("one")
    for end in range(len(images.MAGIC), len(whole)):
        if end not in ends | {first}:
            with pytest.raises(CompileError, match="in the middle of an image"):
                images.unpack(whole[:end])
