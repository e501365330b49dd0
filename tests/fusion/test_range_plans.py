"""Plans that processes of their own make: the same as those made here, and made here where such a process fails."""
from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest

from tests.fusion.test_variants import images, two_layers, weight_gradient
from tf_stitch import compiler, range_plans
from tf_stitch.codegen.unit import SEPARATOR
from tf_stitch.fusion import variants
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.digest import digest
from tf_stitch.schedule.target import CUDA


@pytest.fixture
def helped(monkeypatch):
    """Every range but the last one is planned by a process, however small the graph and the machine."""
    for name in ("MANY_NODES", "FEW_CORES", "START_S"):
        monkeypatch.setattr(range_plans, name, 0)


def here_only(monkeypatch):
    monkeypatch.setattr(range_plans, "_worth_helpers", lambda graph: False)


@pytest.mark.parametrize("make", [two_layers, weight_gradient, images], ids=lambda f: f.__name__)
def test_a_process_makes_the_same_plan(make, helped, monkeypatch):
    monkeypatch.setattr(variants, "WORTH", 0.0)  # every range has its plan
    planned = []
    real = range_plans.plan_range
    monkeypatch.setattr(range_plans, "plan_range", lambda *job: planned.append(job[2].most) or real(*job))
    program, kernels = compiler.lay_out(make(), CUDA)
    assert planned == [None]
    here_only(monkeypatch)
    alone, same = compiler.lay_out(make(), CUDA)
    assert len(planned) > 2 and program == alone
    assert [(k.name, k.text, k.dims) for k in kernels] == [(k.name, k.text, k.dims) for k in same]


def test_a_process_that_fails_is_made_up_for(helped, monkeypatch, tmp_path, caplog):
    bad = tmp_path / "python"
    bad.write_text("#!/bin/sh\nexit 3\n")
    bad.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(bad))
        program = compiler.lay_out(two_layers(), CUDA)[0]
    assert "ended without an answer" in caplog.text
    here_only(monkeypatch)
    assert program == compiler.lay_out(two_layers(), CUDA)[0]


def test_what_has_hardly_started_is_not_waited_for(helped, monkeypatch):
    monkeypatch.setattr(range_plans, "START_S", 1e9)
    helper = range_plans._Helper(b"no job")
    helper.thread.join()
    assert helper.plan() is None
    helper.stop()


def test_kernels_are_told_of_as_soon_as_they_are_sure(monkeypatch):
    here_only(monkeypatch)
    told = []
    program, _ = compiler.lay_out(two_layers(), CUDA, told.append)
    assert len(told) > 1  # the plan for all sizes, and another
    assert {k for text in told for k in text.split(SEPARATOR)} == set(program.text.split(SEPARATOR))


def test_deep_graphs_can_be_sent():
    b = Builder()
    x = y = b.param((None, 8), "float32")
    for _ in range(5000):
        y = b.ew("add", y, b.broadcast_to(b.const(np.ones(8), "float32"), x.shape))
    graph = b.finish([y])
    sent = pickle.loads(pickle.dumps(graph))
    assert digest(sent) == digest(graph)
    assert [n.op for n in sorted(sent.nodes(), key=lambda n: n.id)] == \
        [n.op for n in sorted(graph.nodes(), key=lambda n: n.id)]
