"""Which steps share a launch, and groups that differ in sizes only."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.support import whole
from tf_stitch.fusion import packs
from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.schedule import sizes


@st.composite
def dags(draw):
    n = draw(st.integers(1, 60))
    width = draw(st.integers(1, 30))
    after = [frozenset(draw(st.sets(st.integers(max(0, i - width), i - 1), max_size=2))) if i else frozenset()
             for i in range(n)]
    return after, draw(st.lists(st.sampled_from(["a", "a", "a", "b", None]), min_size=n, max_size=n))


def longest(after, runs):
    """Launches on the longest path."""
    owner = {s: k for k, run in enumerate(runs) for s in run}
    depth: dict[int, int] = {}
    for k, run in enumerate(runs):
        depth[k] = 1 + max((depth[owner[o]] for s in run for o in after[s]), default=0)
    return max(depth.values())


@given(dags())
@settings(max_examples=300, deadline=None)
def test_packs_keep_the_order_and_lengthen_no_path(case):
    after, kinds = case
    runs = packs.runs(after, kinds)
    done: set[int] = set()
    for run in runs:
        assert all(after[s] <= done for s in run), "a step runs before one that it depends on, or beside it"
        done.update(run)
        assert len(run) == 1 or (len(run) >= packs.LEAST and len({kinds[s] for s in run} - {None}) == 1)
    assert sorted(s for run in runs for s in run) == list(range(len(after)))
    assert longest(after, runs) <= longest(after, [(s,) for s in range(len(after))])


def packed(after, kinds):
    return sorted(len(run) for run in packs.runs(after, kinds) if len(run) > 1)


def test_updates_wait_for_the_last_gradient():
    """A step of training: each layer's gradient feeds its update and the gradient of the layer before."""
    layers = 20
    after = [frozenset(), *(frozenset([i]) for i in range(layers - 1))]  # gradients, one after the other
    after += [frozenset([i]) for i in range(layers)]  # updates
    runs = packs.runs(after, ["small"] * 2 * layers)
    assert packed(after, ["small"] * 2 * layers) == [layers]
    assert runs[-1] == tuple(range(layers, 2 * layers))


def test_what_a_chain_waits_for_is_made_ready_together():
    """Filters that are turned for convolutions: each is wanted at another time, all can be made at the start."""
    layers = 12
    after: list[frozenset[int]] = []
    for i in range(layers):
        after += [frozenset(), frozenset([2 * i, 2 * i - 1] if i else [0])]  # a filter, its convolution
    kinds = ["small", None] * layers
    assert packed(after, kinds) == [layers]


def test_towers_are_packed_layer_by_layer():
    towers, layers = 9, 3
    after = [frozenset([i - 1]) if i % layers else frozenset() for i in range(towers * layers)]
    assert packed(after, ["small"] * len(after)) == [towers] * layers
    assert packed(after[:-2 * layers], ["small"] * (len(after) - 2 * layers)) == []
    assert packed(after, [None] * len(after)) == []


# --- groups of one structure -------------------------------------------------------------------------

def update(shape, rate=0.1, dtype="float32"):
    b = Builder()
    x, g = b.param(shape, dtype), b.param(shape, dtype)
    return whole(b.finish([b.ew("sub", x, b.ew("mul", g, b.broadcast_to(b.const(rate, dtype), shape)))]))


def look_up(rows, count, depth):
    b = Builder()
    return whole(b.finish([b.ew("tanh", b.gather(b.param((rows, depth), "float32"), b.param((count,), "int32")))]))


def test_sizes_are_all_that_may_differ():
    key = sizes.structure(update((12, 8))).key
    assert key == sizes.structure(update((40,))).key, "neighbouring dims are one"
    assert key != sizes.structure(update((12, 8), rate=0.2)).key
    assert key != sizes.structure(update((12, 8), dtype="float16")).key
    assert key != sizes.structure(update((7,))).key, "wide accesses need multiples"
    assert key != sizes.structure(update((1,))).key
    assert key != sizes.structure(update((0,))).key


def test_equal_sizes_stay_constants():
    members = [sizes.structure(look_up(rows, 32, depth)) for rows, depth in ((1000, 16), (40, 8), (64, 16))]
    assert len({m.key for m in members}) == 1
    joined = sizes.join(members)
    table, indices = joined.group.inputs
    assert indices.shape == (32,)
    assert [tuple(D.evaluate(d, v) for d in table.shape) for v in joined.values] == [(1000, 16), (40, 8), (64, 16)]
    (out,) = joined.group.outputs
    assert out.shape == (32, table.shape[1]), "sizes that are equal in all members are one size"


def test_unknown_sizes_join_too():
    members = [sizes.structure(look_up(40, None, depth)) for depth in (8, 16)]
    joined = sizes.join(members)
    (out,) = joined.group.outputs
    for values, member in zip(joined.values, members, strict=True):
        (want,) = member.group.outputs
        assert tuple(D.substitute(d, values) for d in out.shape) == want.shape
    assert sizes.structure(look_up(40, 32, 8)).key != members[0].key


def test_sizes_that_attributes_depend_on_stay():
    def cut(n):
        b = Builder()
        return whole(b.finish([b.ew("neg", b.slice(b.param((n, 8), "float32"), (2, 0), (n - 2, 8)))]))

    assert sizes.structure(cut(10)).key != sizes.structure(cut(18)).key


@pytest.mark.parametrize("shapes", [[(4,), (8, 8)], [(3,), (5, 7), (1001,)], [(2, 8), (16,), (1024, 3)]])
def test_joined_groups_have_their_members_sizes(shapes):
    members = [sizes.structure(update(s)) for s in shapes]
    joined = sizes.join(members) if len({m.key for m in members}) == 1 else None
    if joined is None:
        joined = sizes.join(members[:1])
        members, shapes = members[:1], shapes[:1]
    for values, shape in zip(joined.values, shapes, strict=True):
        assert {D.evaluate(n.size, values) for n in joined.nodes if n.rank} == {int(np.prod(shape))}
