"""Packs: programs whose independent kernels share launches, through the host's header and thread by thread."""
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.on_host import OnHost, compiled
from tests.codegen.test_grids import unrolled
from tests.codegen.test_programs import MEANINGS
from tests.ir_graphs import random_inputs
from tests.pack_graphs import GRAPHS, SHAPES, drawn, heads, joined_features, mixed, updates
from tf_stitch import compiler
from tf_stitch.backend import cuda, host
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.program import serialize
from tf_stitch.schedule import CUDA

NVCC = pytest.mark.skipif(not cuda.shutil.which("nvcc"), reason="needs nvcc")


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """What is compiled here runs once."""
    monkeypatch.setattr(host, "HOST_FLAGS", (*(f for f in host.HOST_FLAGS if f not in ("-O3", "-fopenmp-simd")), "-O1"))


@pytest.mark.parametrize("meaning", MEANINGS)
def test_the_pieces_of_a_long_concat_share_texts(meaning):
    graphs = [joined_features(80), joined_features(60, 5), joined_features(60, None, 1)]
    programs = [compiler.build_program(g, CUDA) for g in graphs]
    assert all(len(p.launched()) == 1 and p.text.count("TS_MEMBERS(") for p in programs)
    assert len(programs[2].text) < 1.2 * len(compiler.build_program(joined_features(40, None, 1), CUDA).text)
    dll = compiled(programs, MEANINGS[meaning])
    for graph, program in zip(graphs, programs, strict=True):
        for size in (0, 1, 6, 300) if graph.symbols else (0,):
            check(graph, program, random_inputs(graph, size + 1, dict.fromkeys(graph.symbols, size)), dll)


def check(graph, program, inputs, dll):
    on_host = OnHost(program, dll)
    want, apart = interp.run(graph, inputs), on_host.run(inputs, 0)
    for w, x, y in zip(want, apart, on_host.run(inputs, 1), strict=True):
        np.testing.assert_array_equal(x, y)
        bound = (2e-2 if w.dtype == np.float16 else 1e-4) * max(float(np.abs(w).max(initial=0)), 1e-3)
        np.testing.assert_allclose(y.astype(np.float64), w.astype(np.float64), rtol=0, atol=bound)


@pytest.mark.parametrize("meaning", MEANINGS)
def test_packs_compute_what_their_members_do(meaning):
    graphs = {name: make() for name, make in GRAPHS.items()}
    programs = {name: compiler.build_program(g, CUDA) for name, g in graphs.items()}
    dll = compiled(programs.values(), MEANINGS[meaning])
    for name, graph in graphs.items():
        program = programs[name]
        assert program.grids and all(g.is_pack for g in program.grids), name
        assert all(len(g.bodies) <= 20 for g in program.grids), name
        assert serialize.loads(serialize.dumps(program)) == program
        for size in (0, 1, 6, 300) if graph.symbols else (0,):
            check(graph, program, drawn(graph, size + 1, size), dll)


@given(st.lists(st.one_of(st.sampled_from(SHAPES), st.tuples(st.integers(0, 70), st.integers(0, 40))), min_size=8,
                max_size=60), st.sampled_from(["sgd", "momentum", "adam"]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_variables_of_any_sizes(shapes, kind, halves):
    graph = updates(shapes, kind, ("float32", "float16") if halves else ("float32",))
    program = compiler.build_program(graph, CUDA)
    check(graph, program, random_inputs(graph, 1), compiled([program]))


def test_hundreds_of_variables_are_one_launch_and_a_few_texts():
    rng = random.Random(7)
    shapes = [(rng.randint(2, 300), rng.choice([1, 8, 10, 64])) for _ in range(600)]
    program = compiler.build_program(updates(shapes, "sgd"), CUDA)
    (pack,) = program.grids
    assert len(program.launched()) == 1 and pack.phases == (600,)
    assert len(pack.bodies) <= 4
    assert "600 kernels" in program.launched()[0]


def test_a_launch_names_no_more_than_its_parameter_holds(monkeypatch):
    monkeypatch.setattr("tf_stitch.packs.MOST_BASES", 50)
    graph = updates(mixed(60, 5), "sgd")
    program = compiler.build_program(graph, CUDA)
    assert len(program.grids) > 3 and all(len(g.bases) <= 50 for g in program.grids)
    check(graph, program, random_inputs(graph, 2), compiled([program]))


def test_large_kernels_stay_alone_and_those_that_fill_the_device_keep_to_their_like():
    program = compiler.build_program(updates([*[(8 << 20,)] * 9, *mixed(40)], "sgd"), CUDA)
    assert [g.phases for g in program.grids] == [(40,)] and len(program.launched()) > 1
    b = Builder()
    outs = [b.ew("sub", b.param((1 << 21,), "float32"), 1.0) for _ in range(40)]
    outs += [b.ew("exp", b.param((100 + i,), "float32")) for i in range(40)]
    program = compiler.build_program(b.finish(outs), CUDA)
    assert sorted(g.phases for g in program.grids) == [(8,), (40,)]  # 32 of the large ones are one kernel


def test_superkernels_and_grids_have_no_packs():
    graph = updates(mixed(40), "sgd")
    assert not compiler.build_program(graph, replace(CUDA, superkernels=True)).grids
    (grid,) = compiler.build_program(unrolled(), replace(CUDA, grids=True)).grids
    assert not grid.is_pack


def test_a_plan_for_every_range_has_packs_of_its_own():
    program = compiler.build_program(heads(40, width=512, least=64), CUDA)
    firsts = [g.first for g in program.grids]
    assert len(program.grids) > 1 and firsts == sorted(firsts)
    for g in program.grids:
        assert all(program.steps[s].kernel in g.bodies for s in range(g.first, g.end))


@NVCC
def test_packs_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    program = compiler.build_program(updates(mixed(60, 5), "adam"), CUDA)
    ptx = cuda.compile_text(program.text, ("compute_90",))["compute_90"].decode()
    assert all(f".entry {g.kernel}" in ptx for g in program.grids)
    (entry,) = [part for part in ptx.split(".visible") if f".entry {program.grids[0].kernel}" in part]
    assert "vote.sync.ballot" in entry and "ld.global.v4" in entry.replace(".nc", "").replace(".L1", "")
    assert ".local" not in entry, "an address that is not known to be global, or registers on the stack"
