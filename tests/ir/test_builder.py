"""The builder: broadcasting, unknown dims that must agree, guards that the op checks at run time."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Guard, SymbolSource
from tf_stitch.ir.interp import GuardFailed, run
from tf_stitch.ir.ops import IRError


def array(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(dtype)


@pytest.fixture
def b():
    builder = Builder()
    builder.origin = "node"
    return builder


# --- unification -----------------------------------------------------------------------------------

def test_unknown_dims_that_must_agree_become_one_symbol_and_a_guard_of_both_sources(b):
    x, y = b.param([None, 4], "float32", "x"), b.param([None, 4], "float32", "y")
    n, m = x.shape[0], y.shape[0]
    graph = b.finish([b.ew("add", x, y)])
    assert y.shape[0] == n != m
    assert graph.symbols == {"n0": SymbolSource("dim", 0, 0), "n1": SymbolSource("dim", 1, 0)}
    assert [(g.kind, g.a, g.b) for g in graph.guards] == [("eq", n, m)]
    assert run(graph, [array(3, 4), array(3, 4)])[0].shape == (3, 4)
    for rows in (1, 2, 0):
        with pytest.raises(GuardFailed, match="node: dims broadcast together"):
            run(graph, [array(3, 4), array(rows, 4)])


def test_nodes_made_before_a_unification_follow_it(b):
    x, y = b.param([None], "float32"), b.param([None], "float32")
    before = b.ew("exp", y)
    size = b.shape_value([y.shape[0] + 1])
    held = y.shape[0]
    b.ew("add", x, y)
    assert before.shape == x.shape
    assert size.attrs["dims"] == (x.shape[0] + 1,)
    assert b.resolve(held) == x.shape[0]
    assert b.same_dim(held, x.shape[0]) == x.shape[0]


def test_equalities_chain(b):
    xs = [b.param([None], "float32", f"x{i}") for i in range(5)]
    total = b.ew("add", b.ew("add", xs[3], xs[4]), b.ew("add", xs[0], xs[1]))
    b.ew("mul", xs[1], xs[2])
    graph = b.finish([b.ew("sub", b.ew("add", total, xs[2]), 1.0)])
    assert len({p.shape for p in graph.params}) == 1
    assert len(graph.guards) == 4
    arrays = [array(6, seed=i) for i in range(5)]
    np.testing.assert_allclose(run(graph, arrays)[0], sum(arrays) - 1, rtol=1e-5, atol=1e-6)
    for wrong in range(5):
        with pytest.raises(GuardFailed):
            run(graph, [array(1) if i == wrong else a for i, a in enumerate(arrays)])


def test_a_lone_symbol_takes_an_expression(b):
    x, y, z = (b.param([None], "float32") for _ in range(3))
    graph = b.finish([b.ew("add", b.concat([x, y], 0), z)])
    assert graph.params[2].shape == (x.shape[0] + y.shape[0],)
    assert run(graph, [array(2), array(3), array(5)])[0].shape == (5,)
    with pytest.raises(GuardFailed):
        run(graph, [array(2), array(3), array(4)])


def test_a_symbol_takes_a_number(b):
    x, y = b.param([None], "float32"), b.param([4], "float32")
    graph = b.finish([b.ew("add", x, y)])
    assert graph.params[0].shape == (4,)
    with pytest.raises(GuardFailed):
        run(graph, [array(1), array(4)])


def test_an_offset_is_solved_so_that_dims_stay_non_negative(b):
    x, y = b.param([None], "float32"), b.param([None], "float32")
    b.same_dim(x.shape[0] + 2, y.shape[0])
    assert y.shape == (x.shape[0] + 2,)
    z, w = b.param([None], "float32"), b.param([None], "float32")
    b.same_dim(z.shape[0] - 3, w.shape[0])
    assert z.shape == (w.shape[0] + 3,)


def test_sums_that_have_no_solution_are_guarded_and_reshaped(b):
    x, y = b.param([None], "float32"), b.param([None], "float32")
    graph = b.finish([b.ew("add", b.concat([x, x], 0), b.concat([y, y, y], 0))])
    assert "reshape" in [n.op for n in graph.nodes()]
    a, c = array(3), array(2)
    np.testing.assert_allclose(run(graph, [a, c])[0], np.tile(a, 2) + np.tile(c, 3), rtol=1e-6)
    with pytest.raises(GuardFailed):
        run(graph, [array(3), array(3)])


def test_a_symbol_inside_a_function_of_itself_is_only_guarded(b):
    x = b.param([None], "float32")
    n = x.shape[0]
    b.same_dim(D.floordiv(n, 2) * 2, n)
    assert x.shape == (n,)
    graph = b.finish([x])
    run(graph, [array(4)])
    with pytest.raises(GuardFailed):
        run(graph, [array(5)])


def test_both_dims_of_one_input(b):
    x = b.param([None, None], "float32")
    graph = b.finish([b.ew("add", x, b.transpose(x, [1, 0]))])
    assert graph.params[0].shape[0] == graph.params[0].shape[1]
    run(graph, [array(3, 3)])
    with pytest.raises(GuardFailed):
        run(graph, [array(3, 1)])


@pytest.mark.parametrize(("a", "c"), [(3, 4), (D.symbol("n"), -1), (D.symbol("n"), D.symbol("n") + 1)])
def test_dims_that_can_never_agree_are_an_error(b, a, c):
    with pytest.raises(IRError, match=r"why: the dims .* differ"):
        b.same_dim(a, c, "why")


def test_a_value_symbol_gives_way_to_a_tensor_dim(b):
    x, shape = b.param([None, 6], "float32"), b.param([2], "int32")
    v = b.value_symbol(shape, 0)
    assert b.value_symbol(shape, 0) == v
    graph = b.finish([b.reshape(x, [v, 2, 3])])
    assert graph.outputs[0].shape == (x.shape[0], 2, 3)
    run(graph, [array(5, 6), np.array([5, 0], np.int32)])
    with pytest.raises(GuardFailed):
        run(graph, [array(5, 6), np.array([4, 0], np.int32)])


def test_a_bound_that_is_required_is_known_afterwards(b):
    shape = b.param([2], "int32")
    v = b.value_symbol(shape, 1)
    assert not D.prove_nonneg(v)
    b.require("le", 0, v, "size is not negative")
    assert D.prove_nonneg(b.resolve(v))
    graph = b.finish([b.iota([v], 0, "int32")])
    assert graph.guards == [Guard("le", 0, v, "size is not negative")]
    np.testing.assert_array_equal(run(graph, [np.array([0, 3], np.int32)])[0], [0, 1, 2])
    with pytest.raises(GuardFailed):
        run(graph, [np.array([0, -1], np.int32)])


def test_require(b):
    n = b.param([None], "float32").shape[0]
    b.require("le", 0, n), b.require("eq", n, n), b.require("divides", n * 4, 2)
    assert b.raw([]).guards == []
    b.require("divides", n, 4, "four")
    b.require("le", n, 100, "small"), b.require("le", n, 100, "small again")
    assert [g.kind for g in b.raw([]).guards] == ["divides", "le"]
    for kind, p, q in (("le", n + 1, n), ("divides", 5, 2), ("divides", n, 0), ("like", n, n)):
        with pytest.raises(IRError):
            b.require(kind, p, q)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2)), max_size=8), st.randoms())
@settings(max_examples=150, deadline=None)
def test_guards_hold_exactly_when_the_original_equalities_do(pairs, r):
    """Whatever is unified in whatever order: the guards of a graph say what was asked, in terms of the inputs."""
    b = Builder()
    params = [b.param([None], "float32") for _ in range(6)]
    symbols = [p.shape[0] for p in params]
    asked = []
    for i, j, offset in pairs:
        try:
            b.same_dim(symbols[i] + offset, symbols[j])
        except IRError:
            continue
        asked.append((i, j, offset))
    graph = b.finish(list(params))
    for _ in range(20):
        sizes = [r.randint(0, 3) for _ in params]
        for i, j, offset in asked if r.random() < 0.7 else ():
            sizes[j] = sizes[i] + offset
        want = all(sizes[i] + offset == sizes[j] for i, j, offset in asked)
        env = {f"n{i}": s for i, s in enumerate(sizes)}
        assert all(g.holds(env) for g in graph.guards) == want
        if want:
            assert [o.shape for o in run(graph, [array(s) for s in sizes])] == [(s,) for s in sizes]


# --- broadcasting ----------------------------------------------------------------------------------

@given(st.lists(st.integers(1, 3), max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_static_broadcasting_is_numpys(shape, data):
    b = Builder()
    shapes = []
    for _ in range(3):
        cut = data.draw(st.integers(0, len(shape)))
        shapes.append([data.draw(st.sampled_from([1, d])) for d in shape[cut:]])
    xs = [b.param(s, "float32") for s in shapes]
    graph = b.finish([b.select(b.ew("lt", xs[0], xs[1]), xs[2], b.ew("mul", xs[0], xs[1]))])
    arrays = [array(*s, seed=i) for i, s in enumerate(shapes)]
    want = np.where(arrays[0] < arrays[1], arrays[2], arrays[0] * arrays[1])
    np.testing.assert_array_equal(run(graph, arrays)[0], want)


def test_a_static_one_stretches_and_an_unknown_dim_does_not(b):
    x, bias, row = b.param([None, 3], "float32"), b.param([3], "float32"), b.param([1, 3], "float32")
    graph = b.finish([b.ew("add", b.ew("mul", x, row), bias)])
    assert graph.guards == []
    assert run(graph, [array(0, 3), array(3), array(1, 3)])[0].shape == (0, 3)


def test_scalars_take_the_tensors_type(b):
    x = b.param([2], "int64")
    y = b.ew("add", 1, x)
    assert (y.dtype, y.shape) == ("int64", (2,))
    assert (b.const(1).dtype, b.const(1.0).dtype, b.const(True).dtype) == ("int32", "float32", "bool")
    assert b.const(np.float64(1)).dtype == "float64"


def test_broadcast_to(b):
    x = b.param([None, 1], "float32")
    graph = b.finish([b.broadcast_to(x, (2, x.shape[0], 5))])
    assert [n.op for n in graph.nodes()] == ["param", "reshape", "broadcast"]
    a = array(3, 1)
    np.testing.assert_array_equal(run(graph, [a])[0], np.broadcast_to(a, (2, 3, 5)))
    with pytest.raises(IRError, match="more dims"):
        b.broadcast_to(x, (3,))


# --- shapes ----------------------------------------------------------------------------------------

def test_reshape_infers_one_dim(b):
    x = b.param([None, 4], "float32")
    assert b.reshape(x, (-1,)).shape == (x.shape[0] * 4,)
    assert b.reshape(x, (x.shape[0], 2, -1)).shape == (x.shape[0], 2, 2)
    assert b.reshape(b.reshape(x, (-1, 2)), (x.shape[0], -1)).shape == x.shape
    for bad in ((-1, -1), (-1, 0)):
        with pytest.raises(IRError, match="-1"):
            b.reshape(x, bad)
    with pytest.raises(IRError):
        b.reshape(b.param([4], "float32"), (5,))


def test_reshape_to_a_size_that_may_not_divide_is_guarded(b):
    x = b.param([None, 3], "float32")
    graph = b.finish([b.reshape(x, (-1, 2))])
    assert run(graph, [array(4, 3)])[0].shape == (6, 2)
    with pytest.raises(GuardFailed):
        run(graph, [array(3, 3)])


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.integers(1, 3))
def test_slices_of_unknown_dims_are_guarded_unless_proven(n, start, size, step):
    b = Builder()
    x = b.param([None], "float32")
    graph = b.finish([b.slice(x, [start], [size], [step])])
    fits = start + (size - 1) * step < n and (size > 0 or start <= n)
    if fits:
        np.testing.assert_array_equal(run(graph, [array(n)])[0], array(n)[start:start + size * step:step])
    elif size:
        with pytest.raises(GuardFailed):
            run(graph, [array(n)])


def test_provable_slices_need_no_guard(b):
    x = b.param([None], "float32")
    n = x.shape[0]
    one = D.dmin(n, 1)
    for start, size, step in ((0, n, 1), (one, n - one, 1), (0, D.ceildiv(n, 3), 3), (0, D.dmin(n, 2), 1)):
        b.slice(x, [start], [size], [step])
    assert b.raw([]).guards == []


def test_keepdims_and_negative_axes(b):
    x = b.param([None, 3, 4], "float32")
    assert b.reduce("sum", x, [-1, 1], keepdims=True).shape == (x.shape[0], 1, 1)
    assert b.reduce("sum", x, []) is x
    with pytest.raises(IRError, match="repeat"):
        b.reduce("sum", x, [1, -2])
    with pytest.raises(IRError, match="outside rank"):
        b.reduce("sum", x, [3])


def test_dot_unifies_what_it_contracts(b):
    x, y = b.param([None, None, 3], "float32"), b.param([None, None, 5], "float32")
    graph = b.finish([b.dot(x, y, ((0,), (0,)), ((1,), (1,)))])
    p, q = array(2, 4, 3), array(2, 4, 5, seed=1)
    np.testing.assert_allclose(run(graph, [p, q])[0], np.einsum("bki,bkj->bij", p, q), rtol=1e-5, atol=1e-6)
    with pytest.raises(GuardFailed):
        run(graph, [p, array(2, 1, 5)])


def test_messages_name_the_node(b):
    b.origin = "model/dense/BiasAdd"
    with pytest.raises(IRError, match=r"^model/dense/BiasAdd: "):
        b.ew("add", b.param([2], "float32"), b.param([3], "float32"))
    with pytest.raises(IRError, match=r"^model/dense/BiasAdd: exp: 'exp' does not take int32 operands"):
        b.ew("exp", b.param([2], "int32"))


def test_symbols_that_nothing_mentions_go(b):
    shape = b.param([3], "int32")
    b.value_symbol(shape, 0)
    assert b.finish([shape]).symbols == {}


def test_a_value_that_is_read_twice_is_one_symbol_with_the_bound_found_so_far(b):
    x, sizes = b.param([None, 4], "float32", "x"), b.param([2], "int32", "sizes")
    first = b.value_symbol(sizes, 0)
    cut = b.slice(x, [0, 0], [first, 4])          # makes the size at least 0
    early = b.shape_value([first])
    again = b.value_symbol(sizes, 0)
    assert again == b.resolve(first) and [s.lo for s in D.symbols(again)] == [0]
    padded = b.pad(x, [again - 2, 0], [0, 0])     # and here at least 2 in effect, with a guard
    late = b.iota([b.value_symbol(sizes, 0)], 0, "int32")
    graph = b.finish([cut, early, padded, late])
    shown = {s for n in graph.nodes() for d in (*n.shape, *n.attr_dims()) for s in D.symbols(d) if s.name == "v1"}
    assert len(shown) == 1, shown
    out = run(graph, [array(5, 4), np.array([3, 9], np.int32)])
    assert [o.shape for o in out] == [(3, 4), (1,), (6, 4), (3,)]
    for wrong in (-1, 1, 6):
        with pytest.raises(GuardFailed):
            run(graph, [array(5, 4), np.array([wrong, 9], np.int32)])
