"""Plans made with the real schedules: chains of models become one kernel, random graphs are cut validly."""
from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fusion.chains import CHAINS
from tests.fusion.checks import check_plan
from tests.ir_graphs import cases
from tf_stitch.fusion.planner import plan
from tf_stitch.fusion.split import split_reductions
from tf_stitch.ir.builder import Builder
from tf_stitch.schedule.target import CUDA, HOST


@pytest.mark.parametrize("make", CHAINS, ids=lambda f: f.__name__)
def test_a_chain_of_a_model_is_one_kernel(make):
    graph = make()
    groups = plan(graph, HOST)
    check_plan(graph, groups)
    assert len(groups) == 1


def test_a_loss_keeps_its_rows_parallel():
    """Row-wise work and a mean over everything: the rows in one kernel, what is left of the sum in another."""
    b = Builder()
    x, y = b.param((4096, 1024), "float32"), b.param((4096, 1024), "float32")
    shifted = b.ew("sub", x, b.reduce("max", x, [1], True))
    log = b.ew("sub", shifted, b.ew("log", b.reduce("sum", b.ew("exp", shifted), [1], True)))
    graph = split_reductions(b.finish([b.reduce("sum", b.ew("mul", log, y), [0, 1])]), HOST)
    groups = plan(graph, HOST)
    check_plan(graph, groups)
    assert [g.outputs[0].shape for g in groups] == [(4096,), ()]


@given(cases())
@settings(max_examples=150, deadline=None)
def test_random_graphs_are_cut_into_valid_groups(case):
    for target in (HOST, CUDA):
        graph = split_reductions(case.graph, target)
        check_plan(graph, plan(graph, target))
