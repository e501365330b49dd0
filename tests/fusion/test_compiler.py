"""The driver: buffers and steps of programs, aliases, and how often the compiler runs."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fusion.chains import lstm_gates, norm_gelu_softmax, small_attention
from tf_stitch import assemble, compiler
from tf_stitch.backend import host
from tf_stitch.codegen.kernel import INDEX_LIMIT
from tf_stitch.errors import CompileError
from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.options import Options
from tf_stitch.program.program import AliasStep, KernelStep
from tf_stitch.schedule.target import CUDA, HOST

NATIVE = Options(target="host", levels=())


def views_and_duplicates():
    """Outputs that are inputs, views, literals, sizes, or each other."""
    b = Builder()
    x = b.param([None, 6], "float32")
    y = b.ew("exp", x)
    flat = b.reshape(y, [x.size])
    literal = b.const(np.arange(3, dtype=np.int32))
    sizes = b.shape_value(x.shape, None, "int64")
    return b.finish([x, b.reshape(x, [x.size]), y, flat, y, literal, sizes, b.reshape(flat, [x.shape[0], 2, 3])])


def kernels(program):
    return [s for s in program.steps if isinstance(s, KernelStep)]


def aliases(program):
    return [s for s in program.steps if isinstance(s, AliasStep)]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_outputs_that_are_views_share_memory(rows):
    graph = views_and_duplicates()
    program = compiler.compile_graph(graph, NATIVE)
    x = np.linspace(-1, 1, rows * 6, dtype=np.float32).reshape(rows, 6)
    for got, want in zip(host.run(program, [x]), interp.run(graph, [x]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.dtype == want.dtype and got.shape == want.shape
    assert len(kernels(program)) == 1 and len(aliases(program)) == 5
    assert not program.of_kind("temp")


def test_a_program_of_views_alone_needs_no_code():
    b = Builder()
    x = b.param([4, None], "int8")
    program = compiler.compile_graph(b.finish([b.reshape(x, [x.size]), x]), NATIVE)
    assert not program.text and not program.code and len(aliases(program)) == 2
    value = np.arange(12, dtype=np.int8).reshape(4, 3)
    flat, same = host.run(program, [value])
    np.testing.assert_array_equal(flat, value.reshape(-1))
    np.testing.assert_array_equal(same, value)


def test_values_between_kernels_are_temps():
    b = Builder()
    x, w = b.param([64, 96], "float32"), b.param([96, 96], "float32")
    graph = b.finish([b.ew("tanh", b.dot(b.ew("exp", x), w, contract=((1,), (0,))))])
    program = compiler.compile_graph(graph, NATIVE)
    assert len(kernels(program)) == 3 and [t.shape for t in program.of_kind("temp")] == [(64, 96), (64, 96)]
    inputs = [np.random.default_rng(0).uniform(-1, 1, p.shape).astype(np.float32) for p in graph.params]
    np.testing.assert_allclose(host.run(program, inputs)[0], interp.run(graph, inputs)[0], rtol=0, atol=1e-5)


def test_equal_programs_are_compiled_once_and_progress_is_told(monkeypatch):
    runs, told = [], []
    monkeypatch.setattr(host, "compile_text", lambda text, levels: runs.append((text, levels)) or {levels[0]: b"code"})
    graphs = [lstm_gates(), lstm_gates(), norm_gelu_softmax()]
    options = Options(target="host", levels=("x86-64-v2", "x86-64-v3"))
    programs = compiler.compile_many(graphs, options, progress=lambda done, total, what: told.append((done, total)))
    assert len(runs) == 4 and len(set(runs)) == 4  # two texts, two levels
    assert programs[0].text == programs[1].text and set(programs[0].code) == {"x86-64-v2", "x86-64-v3"}
    assert told == [(1, 3), (2, 3), (3, 3), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_failing_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        compiler.compile_graph(lstm_gates(), NATIVE)


def test_text_can_be_had_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for target in (HOST, CUDA):
        program = compiler.build_program(small_attention(), target)
        assert "TS_KERNEL" in program.text and not program.code


def unknown_sizes(kind: str):
    """A graph over tensors of n elements, or n rows of 64, that a kernel of the kind computes."""
    b = Builder()
    x = b.param([None] if kind == "flat" else [None, 64], "float16")
    y = b.ew("exp", x)
    if kind == "rows":
        y = b.ew("div", y, b.broadcast_to(b.reduce("sum", y, (1,), keepdims=True), y.shape))
    elif kind == "chain of rows":
        for _ in range(3):
            y = b.ew("exp", b.ew("sub", y, b.broadcast_to(b.reduce("max", y, (1,), keepdims=True), y.shape)))
    elif kind == "columns":
        y = b.reduce("sum", y, (0,))
    elif kind == "tiles":
        y = b.ew("exp", b.transpose(y, (1, 0)))
    return b.finish([y])


@pytest.mark.parametrize("superkernels", [False, True])
@pytest.mark.parametrize("kind", ["flat", "rows", "chain of rows", "columns", "tiles"])
def test_sizes_past_32_bits_are_refused_by_a_guard(kind, superkernels):
    """On a GPU kernels count in 32 bits, so no larger tensor may reach them."""
    graph = unknown_sizes(kind)
    program = compiler.build_program(graph, replace(CUDA, superkernels=superkernels))
    (symbol,) = program.symbols
    most = INDEX_LIMIT if kind == "flat" else INDEX_LIMIT // 64

    def accepted(n: int) -> bool:
        return all(g.holds({symbol: n}) for g in program.guards)

    assert kernels(program)
    assert accepted(most) and not accepted(most + 1)
    assert not any(accepted(n) for n in (1 << 31, (1 << 31) + 12_345, 1 << 32, 1 << 40))


def test_one_size_written_in_two_ways_is_still_guarded():
    """Each of the two is provably no larger than the other; leaving out both would leave the size unguarded."""
    n, m = D.symbol("n"), D.symbol("m")
    one, other = D.dmax(n, m) * 4, D.dmax(n * 4, m * 4)
    assert one != other and D.prove_le(one, other) and D.prove_le(other, one)
    assert assemble._largest([one, other]) == [one]
    assert assemble._largest([n, n + m, 7, D.symbol("k", 0, 9), m]) == [n + m]


def test_plans_for_ranges_are_not_compared_with_each_other(monkeypatch):
    """What says which plan runs makes sizes of different plans hard to compare: minutes for tens of kernels."""
    hard = []
    monkeypatch.setattr(assemble.D, "prove_le", lambda a, b, real=D.prove_le: hard.append(b - a) or real(a, b))
    b = Builder()
    x = b.param((None, 512), "float32")
    h = b.ew("tanh", b.dot(x, b.param((512, 1024), "float32"), contract=((1,), (0,))))
    graph = b.finish([b.ew("sigmoid", b.dot(h, b.param((1024, 300), "float32"), contract=((1,), (0,)))), h])
    program, _ = compiler.lay_out(graph, CUDA)
    assert len({s.blocks for s in kernels(program)}) > 1 and any("min(" in str(s.blocks) for s in kernels(program))
    assert hard and not any("min(" in str(d) for d in hard)
