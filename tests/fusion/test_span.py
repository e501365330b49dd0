"""Spans and layers against a brute-force search of paths."""
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tf_stitch.fusion.span import spans


@st.composite
def dags(draw):
    n = draw(st.integers(1, 9))
    return {i: draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(n)}


def longest(start, step):
    return max((1 + longest(i, step) for i in step(start)), default=0)


@given(dags())
@settings(max_examples=200, deadline=None)
def test_span_and_depth_are_longest_paths(reads):
    users = {n: [u for u in reads if n in reads[u]] for n in reads}
    s = spans(list(reads), reads.__getitem__)
    assert s.span == {n: longest(n, users.__getitem__) for n in reads}
    assert s.depth == {n: longest(n, reads.__getitem__) for n in reads}
    assert s.work == len(reads)
    assert s.critical_path == max(s.span.values())


@given(dags())
@settings(max_examples=100, deadline=None)
def test_layers_hold_independent_nodes_longest_path_first(reads):
    s = spans(list(reads), reads.__getitem__)
    for layer in s.layers():
        assert all(not reads[n] & set(layer) for n in layer)
        lengths = [s.length_through(n) for n in layer]
        assert lengths == sorted(lengths, reverse=True)


def test_weights_count_instead_of_nodes():
    reads = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    s = spans(list(reads), reads.__getitem__, {"a": 1, "b": 10, "c": 1, "d": 1}.__getitem__)
    assert (s.span["a"], s.span["b"], s.work, s.critical_path) == (11, 1, 13, 11)
