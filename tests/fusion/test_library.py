"""Matrix products as library steps: when, with which flags, and with the interpreter's results."""
from __future__ import annotations

import random

import numpy as np
import pytest

from tests.ir_graphs import assert_matches, random_case, random_inputs
from tf_stitch import compiler
from tf_stitch.backend import host
from tf_stitch.fusion import library
from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.program.program import KernelStep, LibraryStep
from tf_stitch.schedule.target import CUDA

TRANS_LHS, TRANS_RHS, SHARED_LHS, SHARED_RHS, BIAS = range(5)


@pytest.fixture(autouse=True)
def calls_for_all_sizes(monkeypatch):
    """Kernels compute small products themselves; here the calls are what is looked at."""
    monkeypatch.setattr(library, "SMALL_WORK", 0)
    monkeypatch.setattr(library, "FEW_ROWS", 0)


def program_of(make, shapes, dtype="float32", target=CUDA):
    b = Builder()
    b.origin = "node"
    params = [b.param(s, dtype, f"p{i}") for i, s in enumerate(shapes)]
    graph = b.finish([make(b, *params)])
    return graph, compiler.lay_out(graph, target)[0]  # not from the disk: tests change what decides


def check(make, shapes, dtype="float32", unknown=5, tolerance=1e-4, target=CUDA):
    """The library steps of a program, after its results were compared."""
    graph, program = program_of(make, shapes, dtype, target)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([unknown if d is None else d for d in s]).astype(DTYPES[dtype].numpy) for s in shapes]
    for got, want in zip(host.run(program, inputs), interp.run(graph, inputs), strict=True):
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)
    return [s for s in program.steps if isinstance(s, LibraryStep)]


def plain(b, x, y):
    return b.dot(x, y, contract=((1,), (0,)))


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("float64", 1e-10), ("float16", 2e-2),
                                             ("bfloat16", 2e-1)])
def test_a_product_is_a_call(dtype, tolerance):
    (step,) = check(plain, [(300, 200), (200, 400)], dtype, tolerance=tolerance)
    assert step.dims == (1, 300, 400, 200) and step.flags == (0,) * 5 and step.origin == "node"


def test_unknown_rows():
    for rows in (0, 1, 7):
        (step,) = check(plain, [(None, 200), (200, 400)], unknown=rows)
        assert [D.evaluate(d, {"n0": rows}) for d in step.dims[2:]] == [400 * (rows != 1), 200]  # one row is a kernel's


def test_integers_are_no_calls():
    _, program = program_of(plain, [(300, 200), (200, 400)], "int32")
    assert not any(isinstance(s, LibraryStep) for s in program.steps)


def test_transposes_become_flags():
    def both(b, x, y):
        return plain(b, b.transpose(x, (1, 0)), b.transpose(y, (1, 0)))

    (step,) = check(both, [(200, 300), (400, 200)])
    assert (step.flags[TRANS_LHS], step.flags[TRANS_RHS]) == (1, 1)


def test_other_layouts_get_a_transpose():
    def heads(b, x, y):
        x, y = (b.transpose(v, (0, 2, 1, 3)) for v in (x, y))
        return b.dot(x, y, ((0, 1), (0, 1)), ((3,), (3,)))

    shapes = [(2, 256, 3, 256), (2, 320, 3, 256)]
    _, program = program_of(heads, shapes)
    assert [type(s) for s in program.steps].count(KernelStep) == 1  # one kernel moves both operands
    (step,) = check(heads, shapes)
    assert step.dims == (6, 256, 320, 256) and step.flags[TRANS_RHS] == 1


def test_one_matrix_for_the_whole_batch():
    def right(b, x, y):
        return b.dot(x, b.broadcast_to(y, (6, 200, 400)), ((0,), (0,)), ((2,), (1,)))

    (step,) = check(right, [(6, 100, 200), (200, 400)])
    assert step.dims == (1, 600, 400, 200) and step.flags == (0,) * 5

    def left(b, x, y):
        return b.dot(b.broadcast_to(x, (6, 300, 200)), y, ((0,), (0,)), ((2,), (1,)))

    (step,) = check(left, [(300, 200), (6, 200, 400)])
    assert step.dims == (6, 300, 400, 200) and step.flags[SHARED_LHS] == 1


def test_a_bias_joins_the_call_and_relu_does_not():
    """cuBLASLt's ReLU makes 0 of NaN."""
    def layer(b, x, y, v):
        return b.ew("max", b.ew("add", plain(b, x, y), v), b.const(0, "float32"))

    (step,) = check(layer, [(64, 200), (200, 400), (400,)])
    assert step.flags[BIAS] == 1 and len(step.buffers) == 4
    _, program = program_of(layer, [(64, 200), (200, 400), (400,)])
    assert [type(s) for s in program.steps] == [LibraryStep, KernelStep]


def test_doubles_add_their_bias_in_a_kernel():
    (step,) = check(lambda b, x, y, v: b.ew("add", plain(b, x, y), v), [(64, 200), (200, 400), (400,)], "float64")
    assert step.flags[BIAS] == 0


def test_what_is_read_elsewhere_stays_apart():
    def shared(b, x, y, v):
        z = plain(b, x, y)
        return b.ew("mul", b.ew("add", z, v), z)

    (step,) = check(shared, [(64, 200), (200, 400), (400,)])
    assert step.flags[BIAS] == 0


def test_a_sum_along_rows_is_no_bias():
    def rows(b, x, y, v):
        return b.ew("add", plain(b, x, y), b.broadcast_to(b.reshape(v, (400, 1)), (400, 400)))

    (step,) = check(rows, [(400, 200), (200, 400), (400,)])
    assert step.flags[BIAS] == 0


def test_bias_after_a_reshape():
    def dense(b, x, y, v):
        flat = b.reshape(plain(b, b.reshape(x, (64, 200)), y), (4, 16, 400))
        return b.ew("tanh", b.ew("add", flat, v))

    (step,) = check(dense, [(4, 16, 200), (200, 400), (400,)])
    assert step.flags[BIAS] == 1 and step.dims == (1, 64, 400, 200)


def test_light_products_join_kernels():
    def gate(b, x, y, v):
        return b.ew("tanh", b.ew("add", plain(b, x, y), v))

    assert check(gate, [(128, 64), (64, 64), (64,)]) == []
    _, program = program_of(gate, [(128, 64), (64, 64), (64,)])
    assert len(program.steps) == 1


def test_the_host_has_no_library():
    b = Builder()
    x, y = b.param((300, 200), "float32", "x"), b.param((200, 400), "float32", "y")
    program = compiler.build_program(b.finish([plain(b, x, y)]), compiler.of_options(compiler.Options(target="host")))
    assert all(isinstance(s, KernelStep) for s in program.steps)


@pytest.mark.parametrize("first", [0, 100])
def test_random_products_match_the_interpreter(first, monkeypatch):
    monkeypatch.setattr(library, "TINY_WORK", 1)  # the graphs are small: every product may be a call
    monkeypatch.setattr(library, "LIGHT_ELEMENTS", 0)
    monkeypatch.setattr("tf_stitch.fusion.planner.DOT_INLINE_WORK", 0)
    monkeypatch.setattr("tf_stitch.fusion.variants.WORTH", 0.0)  # and every range of sizes has a plan of its own
    calls = 0
    families = (*["dot"] * 5, "arithmetic", "transpose", "reshape", "broadcast", "reduce", "unary")
    cases = [(s, random_case(s, families=families, float_types=random.Random(s).sample(
        ["float32", "float64", "float16", "bfloat16"], 1))) for s in range(first, first + 40)]
    laid = [compiler.lay_out(case.graph, CUDA) for _, case in cases]
    text = compiler.join_texts(k for _, kernels in laid for k in kernels)
    code = host.compile_text(text)
    for (seed, case), (program, _) in zip(cases, laid, strict=True):
        program.code = code
        calls += sum(isinstance(s, LibraryStep) for s in program.steps)
        inputs = random_inputs(case.graph, seed)
        try:
            want = interp.run(case.graph, inputs)
        except (ValueError, IndexError):
            continue
        assert_matches(case, want, host.run(program, inputs), slack=2.0)
    assert calls > 20


def test_calls_stand_together_until_one_reads_what_comes_between():
    def attention(b, x, *weights):
        q, k, v = (plain(b, x, w) for w in weights[:3])
        scores = b.ew("exp", b.ew("sub", q, k))
        mixed = plain(b, scores, weights[3])
        return b.ew("tanh", b.ew("mul", mixed, v))

    shapes = [(300, 200)] + [(200, 200)] * 4
    check(attention, shapes)
    _, program = program_of(attention, shapes)
    kinds = [isinstance(s, LibraryStep) for s in program.steps]
    assert kinds == [True, True, True, False, True, False]  # q, k and v, which does not wait for the scores


@pytest.mark.parametrize("unknown", [None, 5])
def test_what_is_repeated_is_written_for_a_call(unknown):
    """The gradient of a mean over words: nowhere in memory, but long products of it are the library's."""
    def backward(b, x, w):
        spread = b.broadcast_to(b.reshape(x, (x.shape[0], 1, 200)), (x.shape[0], 64, 200))
        return plain(b, b.reshape(spread, (x.shape[0] * 64, 200)), w)

    steps = check(backward, [(unknown, 200), (200, 400)], tolerance=1e-3)
    assert steps and all(s.dims[-1] == 200 for s in steps)
