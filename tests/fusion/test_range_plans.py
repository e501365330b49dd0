"""Plans that processes of their own make: the same as those made here, and made here where such a process fails."""
from __future__ import annotations

import pickle
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fusion.test_variants import images, two_layers, weight_gradient
from tf_stitch import compiler, range_plans
from tf_stitch.backend import host
from tf_stitch.codegen.unit import SEPARATOR
from tf_stitch.fusion import variants
from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.digest import digest
from tf_stitch.schedule.target import CUDA


@pytest.fixture
def helped(monkeypatch):
    """Every range but the last one is planned by a process, however small the graph and the machine."""
    help_out = range_plans._Helpers.help

    def waits(self, make):
        while self.left and any(h.thread.is_alive() for h in self.helpers):
            time.sleep(0.01)
        help_out(self, make)

    monkeypatch.setattr(range_plans, "MANY_NODES", 0)
    monkeypatch.setattr(range_plans, "usable_cores", lambda: range_plans.FEW_CORES)
    monkeypatch.setattr(range_plans._Helpers, "help", waits)


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
    range_plans._server.stop()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(bad))
        program = compiler.lay_out(two_layers(), CUDA)[0]
    range_plans._server.stop()
    assert re.search("ended without an answer|could not be started", caplog.text)  # whichever is seen first
    here_only(monkeypatch)
    assert program == compiler.lay_out(two_layers(), CUDA)[0]


def test_without_processes_all_is_planned_here(helped, monkeypatch, caplog):
    def none_left():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(range_plans._server, "fork", none_left)
    program = compiler.lay_out(two_layers(), CUDA)[0]
    assert "could not be started (Resource temporarily unavailable)" in caplog.text
    here_only(monkeypatch)
    assert program == compiler.lay_out(two_layers(), CUDA)[0]


def test_what_no_process_has_begun_is_planned_here(monkeypatch):
    """Processes begin with the widest range, this one with the narrowest."""
    monkeypatch.setattr(range_plans, "MANY_NODES", 0)
    monkeypatch.setattr(range_plans, "usable_cores", lambda: range_plans.FEW_CORES)
    monkeypatch.setattr(range_plans, "_Helper", lambda job, work: nobody())
    graph, here = two_layers(), []
    *found, whole = variants.ranges(graph, CUDA)

    def make(r):
        here.append(r)
        return range_plans.plan_range(graph, CUDA, r, [*found, whole])

    with range_plans._Helpers(graph, CUDA, [*found, whole], lambda text: None) as helpers:
        theirs = helpers.next()
        helpers.help(make)
        made = helpers.plan(found[0])
    own = make(found[0])
    assert theirs == found[-1] and here == [*found[:-1], found[0]]
    assert made is not None and (made.memory, made.times) == (own.memory, own.times)


def nobody():
    return SimpleNamespace(stop=lambda: None)


@pytest.mark.parametrize("late", ["the widest", "the narrowest"])
def test_kernels_of_processes_are_begun_before_the_plan_for_all_sizes(late, helped, monkeypatch):
    """Whichever plan comes first: those of the widest range, and of others where they are faster than it."""
    begun = []
    graph = two_layers()
    found = variants.ranges(graph, CUDA)
    plans = {r: range_plans.plan_range(graph, CUDA, r, found) for r in found[:-1]}
    monkeypatch.setattr(range_plans, "_Helper", lambda job, work: nobody())
    with range_plans._Helpers(graph, CUDA, found, begun.append) as helpers:
        for r in found[:-1] if late == "the widest" else reversed(found[:-1]):
            helpers.arrived(r, plans[r])
    widest = found[-2]
    sure = {plans[widest].lay_out()[0].text}
    wider = plans[widest]
    for r in reversed(found[:-2]):
        if variants.pays(plans[r].times, wider.times, r):
            wider = plans[r]
            sure.add(wider.lay_out()[0].text)
    assert set(begun) == sure and len(sure) > 1


@pytest.mark.parametrize("most", [0, 4])
@pytest.mark.parametrize("first", ["a range", "all sizes"])
def test_few_kernels_are_begun_when_they_are_faster_than_those_for_all_sizes(first, most, helped, monkeypatch):
    """Nobody knows yet of the ranges between; one row has a plan of its own in any case."""
    begun = []
    graph = two_layers()
    found = variants.ranges(graph, CUDA)
    general, *plans = (range_plans.plan_range(graph, CUDA, r, found) for r in (found[-1], *found[:-2]))
    monkeypatch.setattr(range_plans, "MOST_TRIED", most)
    monkeypatch.setattr(range_plans, "_Helper", lambda job, work: nobody())
    with range_plans._Helpers(graph, CUDA, found, begun.append) as helpers:
        if first == "all sizes":
            helpers.compare(general)
        for r, plan in zip(found[:-2], plans, strict=True):
            helpers.arrived(r, plan)
        helpers.compare(general)
    tried = {plan.lay_out()[0].text for r, plan in zip(found[:-2], plans, strict=True)
             if r.most == 1 or (most and variants.pays(plan.times, general.times, r))}
    assert set(begun) == tried and (len(tried) > 1) == (most > 0)


def softmax_rows():
    b = Builder()
    x = b.param((None, 1024), "float32")
    def per_row(kind, y):
        return b.broadcast_to(b.reshape(b.reduce(kind, y, [1]), (*x.shape[:1], 1)), x.shape)

    e = b.ew("exp", b.ew("sub", x, per_row("max", x)))
    return b.finish([b.ew("div", e, per_row("sum", e))])


def test_few_rows_are_a_blocks_and_many_a_warps():
    program, kernels = compiler.lay_out(softmax_rows(), CUDA)
    (few, many), (name,) = program.steps, program.symbols
    lanes = [re.search(r"TS_ROW_TURNS\(1024, (\d+)", k.text)[1] for k in kernels]
    assert lanes == ["256", "32"]
    for rows in (0, 1, 100, 512, 513, 5000):
        here = [D.evaluate(s.blocks, {name: rows}) for s in (few, many)]
        assert here == ([rows, 0] if rows <= 512 else [0, -(-rows // 8)])
    rng = np.random.default_rng(0)
    for rows in (0, 1, 3, 512, 513, 600):
        x = rng.standard_normal((rows, 1024)).astype(np.float32)
        (got,), (want,) = host.run(program, [x]), interp.run(softmax_rows(), [x])
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_plan_for_many_rows_does_not_serve_all(monkeypatch):
    """Where the other plan cannot be used, there is one for all sizes, 0 included."""
    real = range_plans.plan_range
    monkeypatch.setattr(range_plans, "plan_range", lambda *job: replace(real(*job), memory=[job[2].most or 0]))
    program, kernels = compiler.lay_out(softmax_rows(), CUDA)
    (step,), (name,) = program.steps, program.symbols
    assert len(kernels) == 1 and [D.evaluate(step.blocks, {name: n}) > 0 for n in (0, 1, 600)] == [False, True, True]


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
