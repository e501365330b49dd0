"""Plans made with the real schedules: chains of models become one kernel, random graphs are cut validly."""
from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fusion.chains import CHAINS, batch_norm_training, cross_entropy, norm_backward
from tests.fusion.checks import check_plan
from tests.ir_graphs import cases
from tf_stitch.fusion.planner import plan, plan_scheduled
from tf_stitch.fusion.split import split_reductions
from tf_stitch.ir import dims as D
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


@pytest.mark.parametrize(("make", "kernels"), [(norm_backward, 2), (batch_norm_training, 3), (cross_entropy, 2)])
def test_reductions_across_blocks_cut_a_training_step(make, kernels):
    """A reduction over rows, then more rows: no block may do the work of all the others."""
    graph = split_reductions(make(), HOST)
    planned = plan_scheduled(graph, HOST)
    check_plan(graph, [p.group for p in planned])
    assert len(planned) == kernels
    for part in (part for p in planned for part in p.scheduled.parts):
        serial = [s for s in part.stages if s.hoisted]
        assert all(isinstance(D.product(s.shape), int) and D.product(s.shape) <= 1 << 12 for s in serial)


def test_kernels_hand_over_statistics_not_maps():
    """The centred map is cheap to compute again from the input and its mean: only the mean is written."""
    graph = split_reductions(batch_norm_training(), HOST)
    groups = plan(graph, HOST)
    between = [o for g in groups for o in g.outputs if o not in graph.outputs]
    assert between and all(o.size <= 32 * 64 for o in between)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_random_graphs_are_cut_into_valid_groups(case):
    for target in (HOST, CUDA):
        graph = split_reductions(case.graph, target)
        check_plan(graph, plan(graph, target))
