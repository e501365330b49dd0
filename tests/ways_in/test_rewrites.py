"""Rewritten graphs on disk: found again by what decides on them, and only when they are sure."""
from __future__ import annotations

import shutil

import pytest
import tensorflow as tf

from tests.ways_in.graphs import build, native
from tf_stitch import rewrites
from tf_stitch.backend import cuda, host
from tf_stitch.graph.rewriter import rewrite
from tf_stitch.report import Report


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    return tmp_path


def graph(factor: float = 2.0):
    def model():
        x = tf.compat.v1.placeholder(tf.float32, [None, 8], name="x")
        tf.identity(tf.tanh(x * factor + 1.0) - tf.exp(x), name="y")

    return build(model)


def rewritten(given, options=None, what=()):
    """(graph, report, whether it was made now)."""
    made = []

    def make():
        made.append(True)
        return rewrite(given, options or native(), functions=False)

    return *rewrites.remembered(given, options or native(), what, make), bool(made)


def test_a_second_time_comes_from_the_disk():
    first, report, made = rewritten(graph())
    assert made and report.clusters
    again, known, made = rewritten(graph())
    assert not made and again == first
    assert known.graphs == report.graphs


def test_whatever_decides_on_the_result_makes_another(monkeypatch):
    rewritten(graph())
    assert rewritten(graph(3.0))[2]
    assert rewritten(graph(), native(min_ops=3))[2]
    assert rewritten(graph(), what=["only some nodes"])[2]
    monkeypatch.setenv("TF_STITCH_KEEP_OPERANDS", "1")
    assert rewritten(graph())[2]


def test_another_compiler_makes_another(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("one version")
    monkeypatch.setattr(cuda, "compilers", lambda: [str(nvcc)])
    assert rewritten(graph())[2] and not rewritten(graph())[2]
    nvcc.write_text("another version")
    assert rewritten(graph())[2] and not rewritten(graph())[2]
    cxx = tmp_path / "c++"
    cxx.symlink_to(shutil.which(host.find_compiler()[0]))
    monkeypatch.setenv("CXX", str(cxx))
    assert rewritten(graph())[2] and not rewritten(graph())[2]


def test_what_cannot_be_read_is_made_anew(folder):
    first, *_ = rewritten(graph())
    (kept,) = (folder / "graphs").rglob("*.graph")
    kept.write_bytes(kept.read_bytes()[:-1])
    again, _, made = rewritten(graph())
    assert made and again == first
    (key,) = [kept.stem]
    for data in (b"", b"\0" * 8, (3).to_bytes(8, "little") + b"{}}"):
        rewrites.GRAPHS.put(key, data)
        assert rewritten(graph())[2]


def test_what_may_come_out_otherwise_is_not_kept(folder, monkeypatch):
    given = graph()
    good = rewrite(given, native(), functions=False)
    failed = Report(good[1].graphs, failures=["no compiler"])
    rewrites.remembered(given, native(), (), lambda: (good[0], failed))
    rewrites.remembered(given, native(), (), lambda: (given, Report()))
    monkeypatch.setattr(rewrites, "LARGEST", 10)
    rewrites.remembered(given, native(), (), lambda: good)
    assert not list(folder.rglob("*.graph"))


def test_a_kernel_that_does_not_compile_is_a_failure(monkeypatch):
    from tf_stitch import compiler
    from tf_stitch.errors import CompileError

    def fail(*args, **kwargs):
        raise CompileError("no compiler")

    monkeypatch.setattr(compiler, "compile_texts", fail)
    _, report = rewrite(graph(), native(), functions=False)
    assert len(report.failures) == 1 and not report.clusters
