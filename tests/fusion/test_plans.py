"""Programs on disk: what a second process takes from the first one, and when it does not."""
from __future__ import annotations

import dataclasses
import importlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir_graphs import random_case
from tf_stitch import compiler, plans, schedule
from tf_stitch.assemble import assemble
from tf_stitch.errors import Unschedulable
from tf_stitch.fusion.partition import Unit
from tf_stitch.fusion.planner import plan_scheduled
from tf_stitch.ir import dims as D
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


def step(origin: str, reason: str = "", **options) -> Graph:
    """A graph as a step of a loop leaves it: the same as another step's but for names."""
    made = graph(origin=origin, **options)
    guard = Guard("le", made.params[0].shape[0], 1 << 20, reason)
    return dataclasses.replace(made, guards=[*made.guards, guard], name=origin)


@pytest.fixture
def planned(monkeypatch) -> list[Graph]:
    """What is planned from now on."""
    calls: list[Graph] = []
    real = compiler.lay_out
    monkeypatch.setattr(compiler, "lay_out", lambda g, *more: calls.append(g) or real(g, *more))
    return calls


@pytest.mark.parametrize("target", [HOST, CUDA])
def test_graphs_that_differ_in_names_are_planned_once(target, planned) -> None:
    made = [compiler.build_program(step(f"turn_{k}", f"turn_{k}: dims broadcast"), target) for k in range(5)]
    assert len(planned) == 1
    for k, program in enumerate(made):
        assert program.name == f"turn_{k}"
        assert {s.origin for s in program.steps} == {f"turn_{k}"}
        assert f"turn_{k}: dims broadcast" in {g.reason for g in program.guards}
        assert program == compiler.lay_out(step(f"turn_{k}", f"turn_{k}: dims broadcast"), target)[0]


def test_what_decides_on_a_plan_is_told_apart(planned) -> None:
    kinds = [step("a"), step("a", rows=7), step("a", rows=8), step("a", scale=3.0), step("a", hi=8), step("a", hi=9)]
    made = [compiler.build_program(g, target) for g in kinds for target in (HOST, CUDA, CUDA.with_shared(1024))]
    assert len(planned) == len(made) == 18


def test_bounds_of_a_size_are_told_apart() -> None:
    bounded = [graph().substitute({"n0": D.symbol("n0", 0, most)}) for most in (None, 4, 5)]
    assert len({digest(plans.without_names(g)[0]) for g in bounded}) == 3


@given(seed=st.integers(0, 1 << 32), others=st.lists(st.integers(0, 1 << 32), max_size=3),
       target=st.sampled_from([HOST, CUDA]))
@settings(max_examples=60, deadline=None)
def test_a_program_from_memory_is_the_one_that_planning_gives(seed, others, target) -> None:
    for k in others:
        compiler.build_program(random_case(k).graph, target)
    first, again = (compiler.build_program(random_case(seed).graph, target) for _ in range(2))
    assert first == again == compiler.lay_out(random_case(seed).graph, target)[0]


def test_a_failure_names_the_node(monkeypatch) -> None:
    def no_schedule(group, target, **options):
        raise Unschedulable("no tile")

    monkeypatch.setattr(schedule, "build", no_schedule)
    with pytest.raises(Unschedulable, match="of 'where/it/is' has no schedule"):
        compiler.build_program(graph(origin="where/it/is"), HOST)


def test_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(plans, "MOST_RECENT", 3)
    for rows in range(2, 9):
        compiler.build_program(graph(rows), HOST)
        assert len(plans._recent) <= 3
    monkeypatch.setattr(plans, "SHORT", 10)
    compiler.build_program(graph(99), HOST)
    assert all(len(p.text) > 10 for p in plans._recent.values())
    assert not any(p.buffers[0].shape == (99, 96) for p in plans._recent.values())


def test_threads_get_their_own_names() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda k: compiler.build_program(step(f"turn_{k}"), HOST), range(64)))
    assert [p.name for p in made] == [f"turn_{k}" for k in range(64)]
    assert [{s.origin for s in p.steps} for p in made] == [{f"turn_{k}"} for k in range(64)]


@given(seed=st.integers(0, 1 << 32), target=st.sampled_from([HOST, CUDA]))
@settings(max_examples=60, deadline=None)
def test_parts_that_are_known_are_those_that_would_be_built(seed, target) -> None:
    tiles = schedule.Known().tiles

    def anew(group, target):
        return schedule.build(group, target, known=schedule.Known(tiles))

    graph = random_case(seed).graph
    remembering = assemble(graph, plan_scheduled(graph, target), target)[0]
    assert assemble(graph, plan_scheduled(graph, target, anew), target)[0] == remembering


def test_parts_of_a_growing_kernel_are_built_once(monkeypatch) -> None:
    built: list[int] = []
    module = importlib.import_module("tf_stitch.schedule.build")
    real = module._build_part
    monkeypatch.setattr(module, "_build_part", lambda nodes, *more: built.append(len(nodes)) or real(nodes, *more))
    b = Builder()
    outputs = [b.reduce("sum", b.ew("exp", b.param((64, k), "float32", f"x{k}")), (1,)) for k in range(40, 52)]
    planned = plan_scheduled(b.finish(outputs), CUDA)
    assert len(planned) == 1  # twelve parts, one launch
    assert len(built) <= 4 * len(outputs)


@pytest.mark.parametrize("seed", [3, 192])  # of 192, either of two kernels may write what only shows their outputs
def test_a_plan_depends_on_no_order_of_sets(seed, monkeypatch) -> None:
    graph, made = random_case(seed).graph, set()
    for salt in range(8):
        monkeypatch.setattr(Unit, "__hash__", lambda self, salt=salt: hash((salt, self.id)))
        made.add(compiler.lay_out(graph, CUDA)[0].text)
    assert len(made) == 1
