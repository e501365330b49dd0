"""The planner on hand-made graphs, with schedules that a small stand-in grants or refuses."""
from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fusion import small_graphs as S
from tests.fusion.checks import check_plan
from tf_stitch.errors import Unschedulable
from tf_stitch.fusion import planner
from tf_stitch.fusion.planner import plan
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.schedule.target import CUDA, HOST


@dataclass(frozen=True)
class FakeSchedule:
    blocks: object


def grant(group, target):
    """Every group has a schedule: a block per leading row of its first output."""
    shape = group.outputs[0].shape
    return FakeSchedule(shape[0] if shape else 1)


def grant_up_to(limit):
    def build(group, target):
        if len(group.nodes) > limit:
            raise Unschedulable("too large")
        return grant(group, target)
    return build


def test_norm_gate_share_is_one_group():
    for rows in (4096, S.symbol("n")):
        graph = S.norm_gate_share(rows, 1024)
        groups = plan(graph, HOST, grant)
        check_plan(graph, groups)
        assert len(groups) == 1 and set(groups[0].inputs) == set(graph.params)


def test_values_and_their_statistics_both_leave_one_group():
    x = S.param(0, (64, 128))
    y = S.ew("exp", x)
    graph = Graph([x], [y, S.reduce("sum", y, (1,))])
    groups = plan(graph, HOST, grant)
    check_plan(graph, groups)
    assert len(groups) == 1 and len(groups[0].outputs) == 2


def test_independent_groups_of_a_layer_share_a_launch():
    xs = [S.param(i, (64, 32)) for i in range(3)]
    graph = Graph(xs, [S.ew("exp", x) for x in xs])
    groups = plan(graph, HOST, grant)
    check_plan(graph, groups)
    assert len(groups) == 1


def test_a_full_reduction_does_not_serialise_a_large_chain():
    x = S.param(0, (4096, 4096))

    def one_block_when_reduced_fully(group, target):
        return FakeSchedule(1 if group.outputs[-1].shape == () else 4096)

    graph = Graph([x], [S.reduce("sum", S.reduce("sum", S.row_exp_share(x), (1,)), (0,))])
    groups = plan(graph, HOST, one_block_when_reduced_fully)
    check_plan(graph, groups)
    assert [g.outputs[0].shape for g in groups] == [(4096,), ()]


def test_large_products_stay_alone():
    x, w = S.param(0, (512, 512)), S.param(1, (512, 512))
    y = Node("dot", [S.ew("exp", x), w], {"batch": ((), ()), "contract": ((1,), (0,))}, (512, 512), "float32", "dot")
    graph = Graph([x, w], [S.ew("tanh", y)])
    groups = plan(graph, HOST, grant)
    check_plan(graph, groups)
    assert [[n.op for n in g.nodes] for g in groups] == [["exp"], ["dot"], ["tanh"]]


def test_broadcast_between_groups_is_not_written():
    x, w = S.param(0, (512, 512)), S.param(1, (512, 512))
    dot = Node("dot", [x, w], {"batch": ((), ()), "contract": ((1,), (0,))}, (512, 512), "float32", "dot")
    row = S.ew("exp", S.param(2, (512,)))
    b = S.broadcast(row, (512, 512), (1,))
    graph = Graph([x, w, row.inputs[0]], [S.ew("add", dot, b), S.ew("mul", x, b)])
    groups = plan(graph, HOST, grant)
    check_plan(graph, groups)
    assert all(n.op != "broadcast" for g in groups for n in g.outputs)


def test_outputs_that_are_views_need_no_kernel():
    x = S.param(0, (6, 4))
    y = S.ew("exp", x)
    graph = Graph([x], [S.reshape(x, (24,)), S.reshape(y, (24,)), x, y, y])
    groups = plan(graph, HOST, grant)
    check_plan(graph, groups)
    assert [g.outputs for g in groups] == [(y,)]


def test_a_node_without_schedule_is_reported_by_name():
    x = S.param(0, (6, 4))
    graph = Graph([x], [S.ew("exp", x)])
    with pytest.raises(Unschedulable, match="exp of 'exp'"):
        plan(graph, HOST, grant_up_to(0))


@st.composite
def random_graphs(draw):
    """DAGs of elementwise ops, reductions, broadcasts and reshapes over (n, 8) matrices and (n,) vectors."""
    n = draw(st.sampled_from([4, 4096, S.symbol("n")]))
    nodes = [S.param(0, (n, 8)), S.param(1, (n,))]
    params = list(nodes)
    for _ in range(draw(st.integers(1, 18))):
        x = draw(st.sampled_from(nodes))
        kind = draw(st.sampled_from(["unary", "binary", "reduce", "reshape", "transpose"]))
        if kind == "unary":
            nodes.append(S.ew(draw(st.sampled_from(["exp", "neg"])), x))
        elif kind == "binary":
            y = draw(st.sampled_from([m for m in nodes if m.rank == x.rank] or [x]))
            nodes.append(S.ew("add", x, y if y.shape == x.shape else x))
        elif kind == "reduce" and x.rank == 2:
            r = S.reduce("sum", x, (1,))
            nodes += [r, S.broadcast(r, x.shape, (0,))]
        elif kind == "reshape" and x.rank == 2:
            nodes.append(S.reshape(S.ew("neg", S.reshape(x, (x.size,))), x.shape))
        elif kind == "transpose" and x.rank == 2:
            nodes.append(S.transpose(S.ew("neg", S.transpose(x, (1, 0))), (1, 0)))
    outputs = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4))
    return Graph(params, outputs)


def refuse_some(seed):
    """Grants or refuses groups of more than one unit by a hash: any pattern of answers must be survived."""
    def build(group, target):
        big = sum(n.op not in ("broadcast", "reshape") for n in group.nodes) > 1
        if big and (sum(n.id for n in group.nodes) * 2654435761 + seed) % 5 < 2:
            raise Unschedulable("refused")
        return FakeSchedule((len(group.nodes) * 7 + seed) % 3 * 32 + 1)
    return build


@given(random_graphs(), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_any_answers_of_the_schedule_give_a_valid_plan(graph, seed):
    check_plan(graph, plan(graph, HOST, refuse_some(seed)))


@pytest.mark.parametrize("target", [HOST, CUDA], ids=["host", "cuda"])
def test_a_gpus_kernels_have_few_outputs(target):
    """New values of many variables, which share a rate: planning one kernel of all takes too long."""
    b = Builder()
    rate = b.ew("exp", b.param((), "float32", "t"))
    given = [b.param((64,), "float32", f"v{k}") for k in range(80)]
    graph = b.finish([b.ew("mul", v, b.broadcast_to(rate, (64,))) for v in given])
    groups = plan(graph, target)
    assert set(graph.outputs) <= {n for g in groups for n in g.outputs}
    most = max(len(g.outputs) for g in groups)
    assert most == 80 if target is HOST else most <= planner.MOST_OUTPUTS < 80


def test_many_readers_of_a_value_take_few_schedules():
    """Gradients that are clipped by their common norm: each reader with a schedule of all before it would be n * n."""
    work, x = [], S.param(0, (8, 32))
    shared = S.reduce("sum", S.ew("exp", x), (0, 1))
    ys = [S.param(k + 1, (8 + k, 32)) for k in range(256)]
    graph = Graph([x, *ys], [S.ew("mul", y, S.broadcast(shared, y.shape, ())) for y in ys])

    def not_all(group, target):
        work.append(len(group.outputs))
        if shared in group.nodes and len(group.outputs) > 200:
            raise Unschedulable("one block")
        return FakeSchedule(1)

    groups = plan(graph, HOST, not_all)
    check_plan(graph, groups)
    assert len(groups) <= 4 and sum(work) < 256 * 50
