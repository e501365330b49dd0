"""How much work it is to plan graphs that are wide: it grows with what there is, not with its square."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.fusion.checks import check_plan
from tf_stitch import schedule
from tf_stitch.fusion.planner import plan_scheduled
from tf_stitch.fusion.split import split_reductions
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph
from tf_stitch.schedule.target import CUDA, HOST, Target


def clipped_updates(count: int) -> Graph:
    """Variables that are moved along their gradients, which are clipped by the norm of all of them."""
    b = Builder()
    variables = [b.param((32, 16), "float32") for _ in range(count)]
    gradients = [b.ew("tanh", v) for v in variables]
    squares = [b.reshape(b.reduce("sum", b.ew("mul", g, g), [0, 1]), (1,)) for g in gradients]
    norm = b.ew("sqrt", b.reduce("sum", b.concat(squares, 0), [0]))
    return b.finish([b.ew("sub", v, b.ew("mul", g, b.broadcast_to(norm, g.shape)))
                     for v, g in zip(variables, gradients, strict=True)])


def added_branches(count: int) -> Graph:
    """The sum of rows that are scaled and normalised in so many ways."""
    b = Builder()
    x = b.param((32, 64), "float32")
    total = None
    for k in range(count):
        y = b.ew("mul", x, b.broadcast_to(b.const(np.full(64, k), "float32"), x.shape))
        e = b.ew("exp", b.ew("sub", y, b.broadcast_to(b.reduce("max", y, [1], True), y.shape)))
        z = b.ew("div", e, b.broadcast_to(b.reduce("sum", e, [1], True), y.shape))
        total = z if total is None else b.ew("add", total, z)
    return b.finish([total])


def scheduled_nodes(make: Callable[[int], Graph], count: int, target: Target) -> int:
    """Nodes of all groups that the planner asks a schedule for."""
    known, seen = schedule.Known(), 0

    def build(group, target):
        nonlocal seen
        seen += len(group.nodes)
        return schedule.build(group, target, known=known)

    graph = split_reductions(make(count), target)
    check_plan(graph, [p.group for p in plan_scheduled(graph, target, build)])
    return seen


@pytest.mark.parametrize("target", [HOST, CUDA], ids=lambda t: t.name)
@pytest.mark.parametrize("make", [clipped_updates, added_branches], ids=lambda f: f.__name__)
def test_four_times_the_width_is_about_four_times_the_work(make, target):
    assert scheduled_nodes(make, 160, target) < 6 * scheduled_nodes(make, 40, target)
