"""tf-stitch doctor."""
from __future__ import annotations

import json
import subprocess

import pytest

from tf_stitch import doctor, runtime
from tf_stitch.backend import host


def findings():
    return {f.name: f for f in doctor.examine()}


def test_all_that_the_cpu_needs_is_found(capsys):
    assert doctor.main(json_output=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert {f["name"]: f["status"] for f in told["findings"] if f["required"]} == {
        "TensorFlow": "found", "Op library": "found", "C++ compiler": "found", "Kernels": "found"}


def test_text_names_everything(capsys):
    assert doctor.main() == 0
    out = capsys.readouterr().out
    for name in ("TensorFlow", "Op library", "C++ compiler", "Kernels", "Processor", "Cache folder", "GPU",
                 "CUDA compiler", "PyCUDA"):
        assert name in out


def test_no_compiler(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert findings()["C++ compiler"].status == "missing"
    assert "g++" in findings()["C++ compiler"].advice
    assert doctor.main(quiet=True) == 1
    assert "C++ compiler" in capsys.readouterr().out


def test_cuda_compiler_is_the_one_that_kernels_are_compiled_with(monkeypatch, tmp_path):
    stand_in = tmp_path / "nvcc"
    stand_in.write_text("#!/bin/sh\necho Build cuda_99.9\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("TF_STITCH_NVCC", str(stand_in))
    assert findings()["CUDA compiler"].detail == f"{stand_in}: Build cuda_99.9"
    monkeypatch.setenv("TF_STITCH_NVCC", str(tmp_path / "none"))
    found = findings()["CUDA compiler"]
    assert found.status == "missing" and "TF_STITCH_NVCC" in found.detail and not found.required


def test_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path / "file" / "cache"))
    found = findings()["Cache folder"]
    assert found.status == "problem" and "TF_STITCH_CACHE" in found.advice


@pytest.fixture
def other_library(monkeypatch, tmp_path):
    """Stands for a process that has not loaded the library yet."""
    monkeypatch.setattr(runtime, "LIBRARY", tmp_path / "_ops.so")
    monkeypatch.setattr(runtime, "_load", runtime._load.__wrapped__)
    return tmp_path / "_ops.so"


def test_library_that_is_missing(other_library):
    assert findings()["Op library"].status == "missing"
    with pytest.raises(runtime.LibraryError, match="is not built; run 'make build'"):
        runtime.load()


def test_library_for_another_tensorflow(other_library):
    other_library.write_bytes(b"")
    other_library.with_suffix(".json").write_text('{"tensorflow": "2.19.1"}')
    assert findings()["Op library"].status == "problem"
    with pytest.raises(runtime.LibraryError, match=r"built for TensorFlow 2\.19\.1 and this is TensorFlow 2\."):
        runtime.load()


@pytest.mark.parametrize("record", [None, "", "[]", "{}"])
def test_library_without_its_record(other_library, record):
    other_library.write_bytes(b"")
    if record is not None:
        other_library.with_suffix(".json").write_text(record)
    assert findings()["Op library"].status == "problem"
    with pytest.raises(runtime.LibraryError, match=r"_ops\.json', which says what .* is missing or damaged"):
        runtime.load()


def test_library_that_cannot_be_loaded(other_library):
    import tensorflow as tf

    other_library.write_bytes(b"no ELF file")
    other_library.with_suffix(".json").write_text(json.dumps({"tensorflow": tf.__version__}))
    with pytest.raises(runtime.LibraryError, match="cannot be loaded"):
        runtime.load()


def test_library_that_is_older_than_its_python(other_library):
    """A source tree that was updated and not built again."""
    source = other_library.with_suffix(".cc")
    source.write_text('extern "C" const char* tf_stitch_built_for() { return ""; }')
    subprocess.run([*host.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(other_library)], check=True)
    with pytest.raises(runtime.LibraryError, match=r"older than its Python \(it has no 'tf_stitch_\w+'\); run 'make"):
        runtime.library.__wrapped__()
    with pytest.raises(runtime.LibraryError, match="no 'tf_stitch_direct_new'"):
        runtime.python_library.__wrapped__().tf_stitch_direct_new  # noqa: B018


def test_library_that_cannot_read_what_this_python_writes(monkeypatch):
    runtime._check_age()
    monkeypatch.setattr(runtime, "VERSION", runtime.VERSION + 1)
    with pytest.raises(runtime.LibraryError, match=r"older than its Python \(it reads programs up to version \d, not"):
        runtime._check_age()


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch):
    def _broken():
        raise ValueError("oh")

    monkeypatch.setattr(doctor, "CHECKS", (_broken, *doctor.CHECKS))
    assert findings()["broken"].detail == "looking for it failed: oh"
    assert len(findings()) == len(doctor.CHECKS)
