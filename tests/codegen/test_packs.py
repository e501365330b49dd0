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


def updates(shapes, kind="adam", dtypes=("float32",)):
    """The step of an optimizer for variables of some shapes, every one of which is a few independent loops."""
    b = Builder()
    outs = []
    rates = {dtype: b.param((), dtype, f"rate {dtype}") for dtype in dtypes}
    for i, shape in enumerate(shapes):
        dtype = dtypes[i % len(dtypes)]
        x, g = b.param(shape, dtype, f"x{i}"), b.param(shape, dtype, f"g{i}")
        rate = b.broadcast_to(rates[dtype], x.shape)
        if kind == "sgd":
            outs.append(b.ew("sub", x, b.ew("mul", g, rate)))
            continue
        m = b.param(shape, dtype, f"m{i}")
        m = b.ew("add", m, b.ew("mul", b.ew("sub", g, m), 0.1))
        if kind == "momentum":
            outs += [m, b.ew("sub", x, b.ew("mul", m, rate))]
            continue
        v = b.ew("mul", b.param(shape, dtype, f"v{i}"), 0.999)
        v = b.ew("add", b.ew("mul", v, v), b.ew("mul", b.ew("mul", g, g), 0.001))
        outs += [m, v, b.ew("sub", x, b.ew("div", b.ew("mul", m, rate), b.ew("add", b.ew("sqrt", v), 0.01)))]
    return b.finish(outs, kind)


def features(count, batch=None, seed=0):
    """Look-ups of many features in tables of their own, each with a norm of its own, all of them outputs."""
    rng, b = random.Random(seed), Builder()
    outs = []
    for i in range(count):
        table = b.param((rng.randint(2, 40), rng.choice([4, 8, 16])), "float32", f"table{i}")
        ids = b.param((batch,), "int32", f"ids{i}")
        rows = b.gather(table, ids)
        outs += [rows, b.ew("sqrt", b.reduce("sum", b.ew("mul", rows, rows), (1,)))]
    return b.finish(outs, "features")


def heads(count, batch=None, width=24, least=3):
    """Many small heads over one input: a product, its bias and a softmax each."""
    b = Builder()
    x = b.param((batch, width), "float32", "x")
    outs = []
    for i in range(count):
        units = least + i % 4
        w, bias = b.param((width, units), "float32", f"w{i}"), b.param((units,), "float32", f"b{i}")
        y = b.dot(x, w, contract=((1,), (0,)))
        e = b.ew("exp", b.ew("add", y, b.broadcast_to(bias, y.shape)))
        total = b.reduce("sum", e, (1,), keepdims=True)
        outs.append(b.ew("div", e, b.broadcast_to(total, e.shape)))
    return b.finish(outs, "heads")


def joined_features(count, batch=None, kinds=3):
    """Features side by side in one matrix: looked up after a modulo, normalised, or as they are."""
    rng, b = random.Random(count), Builder()
    x = b.param((batch, count), "float32", "x")
    pieces = []
    for i in range(count):
        rows = 1 + rng.randint(1, 40)
        if i % kinds == 0:
            ids = b.param((batch,), "int64", f"ids{i}")
            ids = b.ew("int_mod", b.ew("abs", ids), b.broadcast_to(b.const(rows, "int64"), ids.shape))
            pieces.append(b.ew("tanh", b.gather(b.param((rows, 8), "float32", f"table{i}"), ids)))
        elif i % kinds == 1:
            column = b.slice(x, (0, i), (x.shape[0], 1))
            y = b.param((batch, 12), "float32", f"y{i}")
            total = b.reduce("sum", y, (1,), keepdims=True)
            pieces.append(b.ew("mul", b.broadcast_to(total, (total.shape[0], 4)), b.broadcast_to(column, (
                total.shape[0], 4))))
        else:
            pieces.append(b.param((batch, 3), "float32", f"z{i}"))
    return b.finish([b.concat(pieces, 1)], "joined features")


SHAPES = [(1,), (3,), (16,), (10, 10), (33,), (128,), (7, 5), (64, 40), (2, 3, 4), (1000,), (1024, 2), (1, 1), (4100,)]


def mixed(count, seed=0):
    rng = random.Random(seed)
    return [rng.choice(SHAPES) for _ in range(count)]


GRAPHS = {
    "sgd": lambda: updates(mixed(40, 1), "sgd"),
    "momentum": lambda: updates(mixed(24, 2), "momentum", ("float32", "float16", "float64")),
    "adam": lambda: updates(mixed(36, 3)),
    "sizes unknown": lambda: updates([(None, 3)] * 14 + [(None,)] * 14),
    "features": lambda: features(40),
    "features of a few rows": lambda: features(24, 5),
    "heads": lambda: heads(40),
}


@pytest.mark.parametrize("meaning", MEANINGS)
def test_the_pieces_of_a_long_concat_share_texts(meaning):
    graphs = [joined_features(80), joined_features(45, 5), joined_features(60, None, 1)]
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


def drawn(graph, seed, size):
    """Inputs whose integers are valid in every table."""
    inputs = random_inputs(graph, seed, dict.fromkeys(graph.symbols, size))
    return [np.abs(x) % 2 if x.dtype.kind in "iu" else x for x in inputs]


@pytest.mark.parametrize("meaning", MEANINGS)
def test_packs_compute_what_their_members_do(meaning):
    graphs = {name: make() for name, make in GRAPHS.items()}
    programs = {name: compiler.build_program(g, CUDA) for name, g in graphs.items()}
    dll = compiled(programs.values(), MEANINGS[meaning])
    for name, graph in graphs.items():
        program = programs[name]
        assert program.grids and all(g.is_pack for g in program.grids), name
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
    outs = [b.ew("sub", b.param((1 << 21,), "float32"), 1.0) for _ in range(20)]
    outs += [b.ew("exp", b.param((100 + i,), "float32")) for i in range(24)]
    program = compiler.build_program(b.finish(outs), CUDA)
    assert sorted(g.phases for g in program.grids) == [(20,), (24,)]


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
