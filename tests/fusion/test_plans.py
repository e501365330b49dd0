"""Programs on disk: what a second process takes from the first one, and when it does not."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.ir_graphs import random_case
from tf_stitch import compiler, plans
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.digest import digest
from tf_stitch.ir.graph import Graph, Guard
from tf_stitch.schedule.target import CUDA, HOST


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))


def graph(rows: int | None = None, scale: float = 2.0, origin: str = "x", hi: int | None = None) -> Graph:
    b = Builder()
    b.origin = origin
    x = b.param((rows, 96), "float32", "x")
    y = b.ew("mul", b.ew("exp", x), b.broadcast_to(b.const(np.full((96,), scale), "float32"), x.shape))
    made = b.finish([y, b.reduce("sum", y, (1,))])
    return made if hi is None else dataclasses.replace(made, guards=[Guard("le", made.params[0].shape[0], hi)])


def test_the_same_graph_has_the_same_digest() -> None:
    assert digest(graph()) == digest(graph())
    assert len({digest(g) for g in [graph(), graph(7), graph(scale=3.0), graph(origin="y"), graph(hi=8)]}) == 5
    swapped = graph()
    assert digest(Graph(swapped.params, swapped.outputs[::-1], swapped.guards, swapped.symbols)) != digest(swapped)


def test_literals_count_in_full() -> None:
    def const(last: float) -> Graph:
        b = Builder()
        values = np.zeros(1000)
        values[-1] = last
        return b.finish([b.ew("neg", b.const(values, "float32"))])

    assert digest(const(1.0)) != digest(const(2.0))


def test_nothing_is_planned_twice(monkeypatch) -> None:
    first = compiler.build_program(graph(), CUDA)
    monkeypatch.setattr(compiler, "lay_out", lambda *args: pytest.fail("planned again"))
    assert compiler.build_program(graph(), CUDA) == first


@pytest.mark.parametrize("other", [lambda: (graph(), HOST), lambda: (graph(), CUDA.with_shared(1024)),
                                   lambda: (graph(scale=4.0), CUDA)])
def test_what_differs_is_planned_anew(monkeypatch, other) -> None:
    compiler.build_program(graph(), CUDA)
    calls = []
    real = compiler.lay_out
    monkeypatch.setattr(compiler, "lay_out", lambda *args: calls.append(args) or real(*args))
    compiler.build_program(*other())
    assert len(calls) == 1


def test_an_edited_package_plans_anew(monkeypatch) -> None:
    compiler.build_program(graph(), CUDA)
    monkeypatch.setattr(plans, "sources", lambda: "edited")
    calls = []
    real = compiler.lay_out
    monkeypatch.setattr(compiler, "lay_out", lambda *args: calls.append(args) or real(*args))
    compiler.build_program(graph(), CUDA)
    assert len(calls) == 1


def test_damage_is_survived(tmp_path) -> None:
    first = compiler.build_program(graph(), CUDA)
    (path,) = tmp_path.rglob("*.program")
    path.write_bytes(path.read_bytes()[:-40])
    assert compiler.build_program(graph(), CUDA) == first
    (again,) = tmp_path.rglob("*.program")
    plans.PROGRAMS.put(again.stem, b"no program")  # whole, but of another format
    assert compiler.build_program(graph(), CUDA) == first


@pytest.mark.parametrize("target", [HOST, CUDA])
def test_random_graphs_come_back_as_they_were(target, monkeypatch) -> None:
    made = [compiler.build_program(random_case(seed).graph, target) for seed in range(40)]
    monkeypatch.setattr(compiler, "lay_out", lambda *args: pytest.fail("planned again"))
    assert [compiler.build_program(random_case(seed).graph, target) for seed in range(40)] == made
