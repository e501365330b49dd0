"""Recurrent cells on a GPU: a step is one kernel, what does not depend on each other shares it, numbers are right."""
from __future__ import annotations

import numpy as np
import pytest

from tests.ir_graphs import random_inputs
from tf_stitch import compiler
from tf_stitch.backend import host
from tf_stitch.fusion.columns import split_columns
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.program.program import KernelStep
from tf_stitch.schedule import CUDA, HOST

UNITS, FEATURES = 64, 24


def biased(b: Builder, x: Node, w: Node, bias: Node) -> Node:
    y = b.dot(x, w, contract=((1,), (0,)))
    return b.ew("add", y, b.broadcast_to(bias, y.shape))


def part(b: Builder, gates: Node, k: int) -> Node:
    rows = gates.shape[0]
    return b.slice(gates, (0, k * UNITS), (rows, UNITS))


class Lstm:
    def __init__(self, b: Builder, inputs: int, name: str):
        self.b, self.w = b, b.param((inputs + UNITS, 4 * UNITS), "float32", f"{name}_w")
        self.bias = b.param((4 * UNITS,), "float32", f"{name}_b")

    def __call__(self, x: Node, h: Node, c: Node) -> tuple[Node, Node]:
        b = self.b
        gates = biased(b, b.concat([x, h], 1), self.w, self.bias)
        i, f, g, o = (part(b, gates, k) for k in range(4))
        c = b.ew("add", b.ew("mul", b.ew("sigmoid", b.ew("add", f, 1.0)), c),
                 b.ew("mul", b.ew("sigmoid", i), b.ew("tanh", g)))
        return b.ew("mul", b.ew("sigmoid", o), b.ew("tanh", c)), c


class Gru:
    def __init__(self, b: Builder, inputs: int, name: str):
        self.b = b
        self.w, self.bias = b.param((inputs + UNITS, 2 * UNITS), "float32"), b.param((2 * UNITS,), "float32")
        self.wc, self.bc = b.param((inputs + UNITS, UNITS), "float32"), b.param((UNITS,), "float32")

    def __call__(self, x: Node, h: Node) -> Node:
        b = self.b
        gates = b.ew("sigmoid", biased(b, b.concat([x, h], 1), self.w, self.bias))
        r, u = part(b, gates, 0), part(b, gates, 1)
        candidate = b.ew("tanh", biased(b, b.concat([x, b.ew("mul", r, h)], 1), self.wc, self.bc))
        return b.ew("add", b.ew("mul", b.ew("sub", b.broadcast_to(b.const(1.0, "float32"), u.shape), u), h),
                    b.ew("mul", u, candidate))


def rows_of(b: Builder, x: Node, steps: int) -> list[Node]:
    rows = x.shape[0]
    return [b.reshape(b.slice(x, (0, t, 0), (rows, 1, FEATURES)), (rows, FEATURES)) for t in range(steps)]


def zeros(b: Builder, rows) -> Node:
    return b.broadcast_to(b.const(0.0, "float32"), (rows, UNITS))


def one_direction(rows=32, steps=5, directions=1) -> Graph:
    b = Builder()
    x = b.param((rows, steps, FEATURES), "float32", "x")
    ends = []
    for d in range(directions):
        cell, (h, c) = Lstm(b, FEATURES, f"d{d}"), (zeros(b, x.shape[0]),) * 2
        for row in rows_of(b, x, steps)[::-1 if d else 1]:
            h, c = cell(row, h, c)
        ends.append(h)
    return b.finish(ends, "lstm")


def two_layers(rows=2, steps=5) -> Graph:
    b = Builder()
    x = b.param((rows, steps, FEATURES), "float32", "x")
    first, second = Lstm(b, FEATURES, "first"), Lstm(b, UNITS, "second")
    states = [(zeros(b, x.shape[0]),) * 2] * 2
    for row in rows_of(b, x, steps):
        states[0] = first(row, *states[0])
        states[1] = second(states[0][0], *states[1])
    return b.finish([states[1][0]], "layers")


def gru(rows=32, steps=4) -> Graph:
    b = Builder()
    x = b.param((rows, steps, FEATURES), "float32", "x")
    cell, h = Gru(b, FEATURES, "gru"), zeros(b, x.shape[0])
    for row in rows_of(b, x, steps):
        h = cell(row, h)
    return b.finish([h], "gru")


def check(graph: Graph, sizes=None) -> compiler.Program:
    """The program for a GPU, after its kernels were run on the host."""
    program = compiler.build_program(graph, CUDA)
    inputs = [x * np.float32(0.3) for x in random_inputs(graph, 1, sizes or {})]
    for got, want in zip(host.run(program, inputs), interp.run(graph, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert all(isinstance(s, KernelStep) for s in program.steps)
    return program


@pytest.fixture(autouse=True)
def light_is_less(monkeypatch):
    """Small as they are here, a block could do all steps of some rows by itself."""
    from tf_stitch.fusion import library

    monkeypatch.setattr(library, "LIGHT_ELEMENTS", 0)
    monkeypatch.setattr("tf_stitch.fusion.planner.DOT_INLINE_WORK", 0)


def test_a_step_is_a_kernel():
    program = check(one_direction())
    assert len(program.steps) == 5
    names = [s.kernel for s in program.steps]
    assert len(set(names[1:-1])) <= 2 and program.text.count("TS_TILES(") <= 4  # the first and last step differ


def test_directions_share_their_steps():
    assert len(check(one_direction(directions=2)).steps) == 5


def test_layers_go_in_wavefront():
    assert len(check(two_layers()).steps) == 6


def test_a_gru_takes_two_kernels_a_step():
    assert len(check(gru()).steps) <= 8


def test_any_number_of_rows():
    for make in (one_direction, two_layers, gru):
        graph = make(rows=None)
        (rows,) = {str(d) for p in graph.params for d in p.shape if not isinstance(d, int)}
        for n in (0, 1, 3, 40):
            check(graph, {rows: n})


def test_columns_in_runs_get_a_dim_of_their_own():
    graph = one_direction(steps=1)
    split = split_columns(graph, CUDA)
    (dot,) = [n for n in split.nodes() if n.op == "dot"]
    assert dot.shape == (32, 4, UNITS)
    assert split_columns(graph, HOST) is graph
    inputs = random_inputs(graph, 0)
    for a, c in zip(interp.run(split, inputs), interp.run(graph, inputs), strict=True):
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("case", ["unequal", "also whole", "shifted"])
def test_columns_that_are_read_otherwise_stay(case):
    b = Builder()
    x, w = b.param((4, 8), "float32"), b.param((8, 12), "float32")
    y = b.dot(x, w, contract=((1,), (0,)))
    cuts = {"unequal": ((0, 4), (4, 8)), "also whole": ((0, 6), (6, 6)), "shifted": ((1, 4), (5, 4))}[case]
    outputs = [b.ew("exp", b.slice(y, (0, start), (4, size))) for start, size in cuts]
    graph = b.finish([*outputs, *([b.ew("neg", y)] if case == "also whole" else [])])
    assert split_columns(graph, CUDA) is graph
