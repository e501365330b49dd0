"""Symbolic dims: the normal form, division, bounds and proofs agree with plain integers."""
from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tf_stitch.ir import dims as D

N, M, POSITIVE = D.symbol("n"), D.symbol("m"), D.symbol("p", 1)
I, J = D.symbol("i", 0, N - 1), D.symbol("j", 0, 3)
K = D.symbol("k", 0, D.floordiv(N + 7, 8) - 1)  # a block of eight
V = D.symbol("v", None)
RANGED = {"i": I, "j": J, "k": K}
LEAVES = [N, M, POSITIVE, I, J, K, 0, 1, 2, 3, 4, 5, 8, -1, -3]


class Term:
    """An expression kept as a tree: what plain integers make of it is the truth."""

    def __init__(self, op, *args):
        self.op, self.args = op, args

    def dim(self):
        if self.op == "leaf":
            return self.args[0]
        a, b = (t.dim() for t in self.args)
        return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "//": lambda: D.floordiv(a, b),
                "%": lambda: D.mod(a, b), "min": lambda: D.dmin(a, b), "max": lambda: D.dmax(a, b)}[self.op]()

    def value(self, env):
        if self.op == "leaf":
            return D.evaluate(self.args[0], env)
        a, b = (t.value(env) for t in self.args)
        return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "//": lambda: a // b, "%": lambda: a % b,
                "min": lambda: min(a, b), "max": lambda: max(a, b)}[self.op]()

    def __repr__(self):
        return str(self.args[0]) if self.op == "leaf" else f"({self.args[0]} {self.op} {self.args[1]})"


def leaf(x):
    return Term("leaf", x)


DIVISORS = [leaf(d) for d in (1, 2, 3, 4, 6, 8, POSITIVE, POSITIVE * 4, POSITIVE + 2, N + 1, POSITIVE * (M + 1))]


def grow(children):
    any_two = st.builds(Term, st.sampled_from(["+", "-", "*", "min", "max", "+", "*"]), children, children)
    return any_two | st.builds(Term, st.sampled_from(["//", "%"]), children, st.sampled_from(DIVISORS))


TERMS = st.recursive(st.sampled_from([leaf(x) for x in LEAVES]), grow, max_leaves=10)


@st.composite
def environments(draw):
    """Values within the symbols' bounds; loop variables need n > 0."""
    env = {"n": draw(st.integers(1, 40)), "m": draw(st.integers(0, 9)), "p": draw(st.integers(1, 9))}
    env["i"], env["j"] = draw(st.integers(0, env["n"] - 1)), draw(st.integers(0, 3))
    env["k"] = draw(st.integers(0, (env["n"] + 7) // 8 - 1))
    return env


@given(TERMS, st.lists(environments(), min_size=8, max_size=8))
@settings(max_examples=400, deadline=None)
def test_normal_form_has_the_value_of_the_tree(term, envs):
    d = term.dim()
    for env in envs:
        assert D.evaluate(d, env) == term.value(env)
        assert D.evaluate(D.renormalise(d), env) == term.value(env)


@given(TERMS, st.lists(environments(), min_size=12, max_size=12))
@settings(max_examples=400, deadline=None)
def test_bounds_are_bounds(term, envs):
    d = term.dim()
    low, high = D.lower(d), D.upper(d)
    for env in envs:
        v = D.evaluate(d, env)
        assert low is None or D.evaluate(low, env) <= v
        assert high is None or v <= D.evaluate(high, env)
    for bound in (low, high):
        assert bound is None or not {s.name for s in D.symbols(bound)} & set(RANGED)


@given(TERMS, TERMS, st.lists(environments(), min_size=12, max_size=12))
@settings(max_examples=400, deadline=None)
def test_what_is_proven_holds(a, b, envs):
    x, y = a.dim(), b.dim()
    if D.prove_le(x, y):
        assert all(a.value(env) <= b.value(env) for env in envs)
    if D.prove_nonneg(x):
        assert all(a.value(env) >= 0 for env in envs)


@given(TERMS, TERMS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_arithmetic_laws_hold_syntactically(a, b):
    x, y = a.dim(), b.dim()
    assert x + y == y + x
    assert x * y == y * x
    assert x - x == 0
    assert (x + y) - y == x
    assert hash(x + y) == hash(y + x)


@given(TERMS, st.sampled_from(DIVISORS))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_quotient_and_remainder_recombine(a, b):
    x, y = a.dim(), b.dim()
    whole = D.floordiv(x, y) * y + D.mod(x, y)
    assume(isinstance(y, int) or len(y.terms) == 1)
    assert whole == x or D.renormalise(whole) == x


@given(TERMS, environments())
@settings(max_examples=200, deadline=None)
def test_substitution_commutes_with_evaluation(term, env):
    d = term.dim()
    replaced = D.substitute(d, {"m": N * 2, "p": POSITIVE + 3, "j": 1})
    assert D.evaluate(replaced, env) == D.evaluate(d, {**env, "m": env["n"] * 2, "p": env["p"] + 3, "j": 1})


@pytest.mark.parametrize(("got", "want"), [
    (D.floordiv(N * 4, 4), N), (D.mod(N * 4, 4), 0), (D.floordiv(N * M, M), N), (D.floordiv(I * 4 + J, 4), I),
    (D.mod(I * 4 + J, 4), J), (D.floordiv(M * N + I, N), M), (D.mod(M * N + I, N), I),
    (D.floordiv(D.floordiv(N, 3), 4), D.floordiv(N, 12)), (D.mod(D.mod(N, 12), 4), D.mod(N, 4)),
    (D.floordiv(I * 4 + J, 8), D.floordiv(I, 2)), (D.mod(I * 4 + J, 8), 4 * D.mod(I, 2) + J),
    (8 * D.floordiv(N, 8) + D.mod(N, 8), N), (M * 8 * D.floordiv(N, 8) + M * D.mod(N, 8) + 1, M * N + 1),
    (D.floordiv(N, N + 1), 0), (D.floordiv(I * (M + 2) + M, M + 2), I), (D.mod(I * (M + 2) + M, M + 2), M),
    (D.dmin(N, N + 1), N), (D.dmax(N, 0), N), (D.dmin(3, 5, N + 3), 3), (D.ceildiv(N * 8, 8), N), (D.floordiv(J, 4), 0),
    (D.product([]), 1), (D.product([N, 0]), 0), (N - N, 0), (2 * N - N, N), (D.floordiv(-7, 2), -4), (D.mod(-7, 2), 1),
])
def test_simplifications(got, want):
    assert got == want


@pytest.mark.parametrize(("low", "high"), [
    (D.dmin(N, 1), N), (3 * D.floordiv(N + 2, 3) - 3, N - 1), (D.dmin(K * 8 + 7, N - 1), N - 1), (K * 8, N - 1),
    (I, N - 1), (0, I * J), (J, 3), (D.mod(N, 4), N), (D.mod(N, 4), 3), (D.floordiv(N, 2), N), (N, D.dmax(N, M)),
    (D.dmin(N, M), D.dmax(N, M)), (0, N - D.dmin(N, 2)), (1, POSITIVE), (0, POSITIVE - 1), (N, 8 * D.ceildiv(N, 8)),
    (D.floordiv(I, 4), D.floordiv(N - 1, 4)), (V, V + I), (V, D.dmax(V, N)),
])
def test_proofs(low, high):
    assert D.prove_le(low, high)


@pytest.mark.parametrize(("low", "high"), [
    (1, N), (N, M), (V, N), (0, V), (I, N - 2), (N, 8 * D.floordiv(N, 8)), (D.dmax(N, M), N), (K * 8 + 7, N - 1),
    (1, D.mod(N, 4)), (N * M, N * N), (0, D.floordiv(I - N, POSITIVE)), (V * N, V * N + 1 + V),
])
def test_what_need_not_hold_is_not_proven(low, high):
    assert not D.prove_le(low, high)


def test_a_dim_divided_by_zero_is_an_error():
    with pytest.raises(ZeroDivisionError):
        D.floordiv(N, 0)


def test_an_unbound_symbol_is_named():
    with pytest.raises(KeyError, match="m"):
        D.evaluate(N + M, {"n": 1})


def test_text_reads_well():
    assert str(2 * N * M + D.floordiv(N, 4)) == "div(n,4) + 2*m*n"
    assert D.to_text(7) == "7"


def test_dims_go_from_process_to_process():
    code = ("import pickle, sys; from tf_stitch.ir import dims as D; n = D.symbol('n'); "
            "sys.stdout.buffer.write(pickle.dumps(D.floordiv(n * 3 + 1, 2) + n))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True,
                          env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)})
    want = D.floordiv(N * 3 + 1, 2) + N
    assert {want: "found"}[pickle.loads(done.stdout)] == "found"


@given(st.integers(-50, 50), st.integers(1, 12))
@example(-7, 2)
def test_integers_divide_as_python_does(a, b):
    assert (D.floordiv(a, b), D.mod(a, b), D.ceildiv(a, b)) == (a // b, a % b, math.ceil(a / b))


def test_nested_extremes_are_one():
    """However they came about: a program that was read again has the same sizes."""
    a, b, c = (D.symbol(name, 0) for name in "abc")
    for fold in (D.dmax, D.dmin):
        assert fold(a, b, c) == fold(fold(a, b), c) == fold(c, fold(b, a)) == fold(fold(a, c), fold(b, c))
    assert D.dmax(D.dmax(a, 3), 5) == D.dmax(a, 5) and D.dmax(D.dmin(a, b), c) != D.dmax(a, b, c)
