"""What must hold of every plan, whatever the graph and the schedules."""
from __future__ import annotations

from tf_stitch.fusion.partition import ALWAYS_FLOATING
from tf_stitch.fusion.planner import INDEXING, must_write
from tf_stitch.ir.ops import CHEAP, OPS


def check_plan(graph, groups):
    """Raises AssertionError unless ``groups`` compute the graph: exact, in order, closed, without cycles."""
    order = {n: i for i, n in enumerate(graph.nodes())}
    written = set()
    for g in groups:
        assert g.nodes and g.outputs
        assert list(g.nodes) == sorted(set(g.nodes), key=order.__getitem__)
        members = set(g.nodes)
        assert not any(n.op == "param" for n in members)
        assert set(g.outputs) <= members and not set(g.inputs) & members
        assert {i for n in g.nodes for i in n.inputs} <= members | set(g.inputs)
        for i in g.inputs:
            assert i.op == "param" or i in written, f"{i} is read before it is written"
        assert not set(g.outputs) & written, "a value is written twice"
        written |= set(g.outputs)
        assert members == needed_for(g), "a member that no output needs"
    assert set(must_write(graph)) <= written
    used = {i for g in groups for i in g.inputs} | set(must_write(graph))
    assert written <= used, "a value is written that nobody reads"
    check_copies(groups)


def needed_for(group):
    seen, stack = set(), list(group.outputs)
    while stack:
        n = stack.pop()
        if n not in seen and n not in group.inputs:
            seen.add(n)
            stack.extend(n.inputs)
    return seen


def check_copies(groups):
    """A node is in several groups only when that is cheap: a view, indexing, cheap arithmetic or a small value."""
    count = {}
    for g in groups:
        for n in g.nodes:
            count[n] = count.get(n, 0) + 1
    for n, c in count.items():
        if c > 1 and n.op not in ALWAYS_FLOATING | INDEXING:
            assert OPS[n.op].cost <= CHEAP or not isinstance(n.size, int) or n.size <= 1 << 16
