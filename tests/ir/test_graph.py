"""Verifier, printer, interpreter and the graph's own methods."""
from __future__ import annotations

import numpy as np
import pytest

from tests.ir_graphs import random_case
from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Guard, Node, SymbolSource, topological
from tf_stitch.ir.interp import GuardFailed, run
from tf_stitch.ir.ops import IRError
from tf_stitch.ir.printer import to_text
from tf_stitch.ir.verify import sizes_agree, verify

N, M, K = D.symbol("n"), D.symbol("m"), D.symbol("k")


def param(index=0, shape=(N,), dtype="float32", origin="x"):
    return Node("param", [], {"index": index}, shape, dtype, origin)


def graph(outputs, params=(), guards=(), symbols=None):
    symbols = {"n": SymbolSource("dim", 0, 0)} if symbols is None else symbols
    return Graph(list(params), list(outputs), list(guards), symbols)


# --- verifier --------------------------------------------------------------------------------------

def test_a_good_graph_passes():
    x = param()
    verify(graph([Node("exp", [x], {}, (N,), "float32")], [x]))


def _cycle():
    x = param()
    a = Node("exp", [x], {}, (N,), "float32", "a")
    a.inputs = (Node("neg", [a], {}, (N,), "float32", "b"),)
    return graph([a], [x])


def _bad_graphs():
    x, y = param(), param(1, (M,))
    unlisted = param(1, (N,), origin="unlisted")
    yield "wrong shape", graph([Node("exp", [x], {}, (4,), "float32", "e")], [x]), r"e \(.*operands give \[n\] float32"
    yield "wrong dtype", graph([Node("exp", [x], {}, (N,), "float64", "e")], [x]), r"e \(.*operands give"
    yield "wrong rank", graph([Node("exp", [x], {}, (N, 1), "float32", "e")], [x]), r"e \(.*operands give"
    yield "wrong arity", graph([Node("add", [x], {}, (N,), "float32", "e")], [x]), "takes 2 operands"
    yield "wrong kind", graph([Node("bit_not", [x], {}, (N,), "float32", "e")], [x]), "does not take float32"
    yield "unknown op", graph([Node("frobnicate", [x], {}, (N,), "float32")], [x]), "no IR op 'frobnicate'"
    yield "missing attr", graph([Node("transpose", [x], {}, (N,), "float32")], [x]), "has the attributes"
    yield "unlisted param", graph([unlisted], [x]), "does not list"
    yield "wrong index", graph([], [param(1)]), "is listed as param 0"
    yield "not a param", graph([], [Node("exp", [x], {}, (N,), "float32")]), "is listed as param 0"
    yield "no source", graph([y], [x, y]), "m have no source"
    yield "symbol of a guard", graph([x], [x], [Guard("eq", N, K)]), "k have no source"
    yield "source of no param", graph([x], [x], symbols={"n": SymbolSource("dim", 3, 0)}), "param 3"
    yield "source of no dim", graph([x], [x], symbols={"n": SymbolSource("dim", 0, 1)}), "no such source"
    yield "strange source", graph([x], [x], symbols={"n": SymbolSource("attr", 0, 0)}), "no such source"
    yield "reshape", graph([Node("reshape", [x], {}, (4,), "float32", "r")], [x]), r"r \(.*no guard says so"
    yield "cycle", _cycle(), "depends on itself|reads a node"


@pytest.mark.parametrize(("bad", "message"), [pytest.param(g, m, id=i) for i, g, m in _bad_graphs()])
def test_bad_graphs_are_refused(bad, message):
    with pytest.raises(IRError, match=message):
        verify(bad)


def test_a_guarded_reshape_passes():
    x = param()
    verify(graph([Node("reshape", [x], {}, (4,), "float32")], [x], [Guard("eq", N, 4)]))


@pytest.mark.parametrize(("a", "b", "guards", "agree"), [
    ((N, 4), (2, N * 2), [], True), ((N,), (M,), [], False), ((N,), (M,), [Guard("eq", M, N)], True),
    ((N, K), (M, K), [Guard("eq", N, M)], True), ((N, M), (K, K), [Guard("eq", N, K), Guard("eq", M, K)], True),
    ((N,), (D.floordiv(N, 4), 4), [], False), ((N,), (D.floordiv(N, 4), 4), [Guard("divides", N, 4)], True),
    ((N,), (M,), [Guard("le", N, M)], False), ((2 * N,), (3 * M,), [Guard("eq", N * 2, M * 3)], True),
    ((2 * N, K), (K * 3, M), [Guard("eq", N * 2, M * 3)], True), ((N,), (N, 1, 1), [], True),
])
def test_sizes_agree(a, b, guards, agree):
    assert sizes_agree(a, b, guards) == agree


# --- printer ---------------------------------------------------------------------------------------

def test_the_printed_text():
    b = Builder()
    b.origin = "node"
    x, y = b.param([None, 4], "float32", "x"), b.param([None], "int32", "y")
    rows = b.gather(x, y)
    out = b.reduce("sum", b.ew("mul", rows, b.const([1.0, 2.0, 3.0, 4.0], "float32")), [1])
    b.require("le", x.shape[0], 9, "nine")
    b.same_dim(x.shape[0], y.shape[0], "equal")
    assert to_text(b.finish([out, rows], "g")) == """\
graph g(%0: [n0,4] float32, %1: [n0] int32)
  n0 = dim 0 of %0
  n1 = dim 0 of %1
  require n0 <= 9  ; nine
  require n0 == n1  ; equal
  %2 = gather %0 %1 {axis=0, batch_dims=0, mode=error} : [n0,4] float32  ; node
  %3 = const {value=[1.0, 2.0, 3.0, 4.0]} : [4] float32  ; node
  %4 = broadcast %3 {axes=(1)} : [n0,4] float32  ; node
  %5 = mul %2 %4 : [n0,4] float32  ; node
  %6 = reduce %5 {axes=(1), kind=sum} : [n0] float32  ; node
  return %6, %2
"""


def test_long_constants_are_cut():
    const = Node("const", [], {"value": np.arange(9)}, (9,), "int64")
    assert "[0, 1, 2, 3, 4, 5, 6, 7, ...]" in to_text(Graph([], [const]))


# --- interpreter -----------------------------------------------------------------------------------

def test_inputs_that_do_not_fit_are_refused():
    b = Builder()
    x = b.param([None, 2], "float32", "x")
    g = b.finish([b.ew("exp", x)])
    for bad, message in ((np.zeros(3, np.float32), "x: rank 1"), (np.zeros((3, 3), np.float32), r"x: shape \(3, 3\)"),
                         (np.zeros((3, 2), np.float64), "x: float64 given")):
        with pytest.raises(ValueError, match=message):
            run(g, [bad])
    with pytest.raises(ValueError, match="argument"):
        run(g, [])


def test_a_value_that_is_missing_is_named():
    b = Builder()
    shape = b.param([None], "int32", "shape")
    v = b.value_symbol(shape, 2)
    b.require("le", 0, v)
    with pytest.raises(ValueError, match="shape: has no element 2"):
        run(b.finish([b.iota([v], 0, "int32")]), [np.zeros(2, np.int32)])


def test_a_failed_guard_says_what_and_why():
    b = Builder()
    x = b.param([None], "float32", "x")
    b.require("le", x.shape[0], 2, "at most two")
    with pytest.raises(GuardFailed, match=r"at most two: n0 le 2 does not hold \(3 and 2\)") as e:
        run(b.finish([x]), [np.zeros(3, np.float32)])
    assert e.value.guard.kind == "le"


@pytest.mark.parametrize(("kind", "a", "b", "holds"), [
    ("eq", 3, 3, True), ("eq", 3, 4, False), ("le", 3, 3, True), ("le", 4, 3, False), ("divides", 6, 3, True),
    ("divides", 7, 3, False), ("divides", 7, 0, False),
])
def test_guards(kind, a, b, holds):
    assert Guard(kind, N, M).holds({"n": a, "m": b}) == holds


def test_outputs_may_repeat_and_be_inputs():
    b = Builder()
    x = b.param([None], "float32")
    a = np.ones(3, np.float32)
    for out in run(b.finish([x, x, b.const(1.0)]), [a])[:2]:
        np.testing.assert_array_equal(out, a)


# --- graph -----------------------------------------------------------------------------------------

def test_substitute_keeps_guards_and_sources():
    x, y = param(), param(1, (M,))
    both = Node("concat", [x, y], {"axis": 0}, (N + M,), "float32")
    cut = Node("slice", [both], {"starts": (M,), "steps": (1,)}, (N,), "float32")
    symbols = {"n": SymbolSource("dim", 0, 0), "m": SymbolSource("dim", 1, 0)}
    g = graph([cut], [x, y], [Guard("eq", M, N)], symbols).substitute({"m": N})
    verify(g)
    assert g.outputs[0].attrs["starts"] == (N,) and g.params[1].shape == (N,)
    assert g.guards == [Guard("eq", M, N)] and g.symbols == symbols


def test_a_deep_graph_needs_no_recursion():
    b = Builder()
    x = b.param([2], "float32")
    y = x
    for _ in range(5000):
        y = b.ew("sin", y)
    g = b.finish([y])
    assert len(topological(g.outputs)) == 5001
    assert np.isfinite(run(g, [np.ones(2, np.float32)])[0]).all()


def test_users():
    for seed in range(30):
        g = random_case(seed).graph
        users = g.users()
        assert set(users) == set(g.nodes())
        assert all(n in users[i] for n in g.nodes() for i in n.inputs)
        assert sum(map(len, users.values())) == sum(len(set(n.inputs)) for n in g.nodes())
