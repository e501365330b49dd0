"""What only kernels for a GPU have, given the host's meaning, against the interpreter: transposes, wide accesses."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.codegen import test_random_kernels as random_kernels
from tests.codegen.support import compile_kernels, kernel_of
from tests.codegen.test_kernels import softmax, sums
from tests.codegen.test_programs import decode_step, drawn
from tests.codegen.test_rows import ROWS, agree, block
from tests.ir_graphs import random_inputs
from tf_stitch import compiler
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph
from tf_stitch.schedule import CUDA, HOST, attempt, rows


def transposed(shape, perm, dtype="float32", more: bool = False) -> Graph:
    """A transpose, alone or between other operations of which one result is also wanted as it is."""
    b = Builder()
    x = b.param(shape, dtype, "x")
    if not more:
        return b.finish([b.transpose(x, perm)], "transposed")
    y = b.ew("tanh", x)
    t = b.transpose(b.ew("add", y, y), perm)
    return b.finish([b.ew("mul", t, t), y, b.reduce("max", t, (t.rank - 1,))], "transposed")


@pytest.mark.parametrize("more", [False, True])
def test_transposes_are_staged(more):
    cases = [((64, 96), (1, 0)), ((300, 200), (1, 0)), ((33, 70), (1, 0)), ((5, 40, 64), (0, 2, 1)),
             ((40, 3, 64), (2, 1, 0)), ((None, 64), (1, 0)), ((16, None, 48), (2, 0, 1))]
    graphs = [transposed(shape, perm, more=more) for shape, perm in cases]
    kernels = [kernel_of(g, ROWS) for g in graphs]
    assert more or sum("TS_SHARED" in k.text for k in kernels) >= 5
    library = compile_kernels(kernels, optimize="-O1")
    for graph, kernel in zip(graphs, kernels, strict=True):
        for size in (0, 1, 77):
            inputs = random_inputs(graph, 1, {str(d): size for d in graph.params[0].shape if not isinstance(d, int)})
            agree(graph, inputs, kernel, library, 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "bool"])
def test_transposes_of_other_types(dtype):
    graph = transposed((96, 80), (1, 0), dtype)
    kernel = kernel_of(graph, ROWS)
    assert "TS_SHARED" in kernel.text
    agree(graph, random_inputs(graph, 1), kernel, compile_kernels([kernel]), 0)


def test_a_host_stages_no_transpose():
    assert "TS_SHARED" not in kernel_of(transposed((300, 200), (1, 0)), HOST).text


def test_accesses_are_as_wide_as_types_allow():
    b = Builder()
    x, y = b.param((64, 512), "float32", "x"), b.param((64, 512), "float16", "y")
    v, s = b.param((512,), "float32", "v"), b.param((64,), "float32", "s")
    z = b.ew("mul", b.ew("add", x, b.broadcast_to(v, x.shape)), b.broadcast_to(b.reshape(s, (64, 1)), x.shape))
    graph = b.finish([b.ew("add", z, b.cast(y, "float32")), b.ew("lt", z, x), b.ew("add", y, y)], "wide")
    kernel = kernel_of(graph, ROWS)
    assert "TS_RUN_LOAD(ts_half" in kernel.text and "TS_RUN_LOAD(float" in kernel.text
    assert kernel.text.count("TS_RUN_STORE") == 3
    agree(graph, random_inputs(graph, 1), kernel, compile_kernels([kernel]), 1e-6)
    half = b.finish([b.ew("add", y, y)], "half")
    assert ", 8)" in kernel_of(half, ROWS).text


def test_runs_never_reach_what_a_condition_guards():
    b = Builder()
    x = b.param((40, 64), "float32", "x")
    wide = b.pad(x, (0, 32), (0, 32))
    graph = b.finish([b.ew("add", wide, wide)], "padded")
    kernel = kernel_of(graph, ROWS)
    agree(graph, random_inputs(graph, 1), kernel, compile_kernels([kernel]), 0)


@pytest.mark.parametrize("seed,blocks", [(50_000, {}), (51_000, {"block_work": 32, "min_blocks": 4})])
def test_random_graphs(monkeypatch, seed, blocks):
    monkeypatch.setattr(rows, "SHORT", 2)
    monkeypatch.setattr(attempt, "ACROSS", 2)
    kernels = random_kernels._kernels(seed, replace(ROWS, **blocks))
    assert sum("TS_ROW_TURNS" in k.text or "TS_LANE_RUNS" in k.text for _, _, k in kernels) > 20
    library = compile_kernels([k for _, _, k in kernels], "x86-64-v2", "-O1")
    assert sum(random_kernels._check(s, case, k, library) for s, case, k in kernels) > 2 * len(kernels)


def test_lengths_that_no_access_divides():
    for n in (1, 2, 3, 5, 1023):
        b = Builder()
        x = b.param((n,), "float32", "x")
        graph = b.finish([b.ew("exp", x)], "short")
        kernel = kernel_of(graph, ROWS)
        agree(graph, random_inputs(graph, 1), kernel, compile_kernels([kernel]), 1e-6)
        assert np.isfinite(random_inputs(graph, 1)[0]).all()


def test_few_blocks_that_would_read_much_are_two_kernels():
    assert len(compiler.build_program(sums((4096, 1024), (0,)), CUDA).steps) == 2
    assert len(compiler.build_program(sums((256, 64), (0,)), CUDA).steps) == 1


def test_what_divides_a_row_is_prepared_once():
    (kernel,) = compiler.lay_out(softmax(4096, 1024), CUDA)[1]
    assert kernel.text.count("ts_divisor(") == 1 and "ts_divide(" in kernel.text
    assert "ts_exp_down(" in kernel.text  # x - max(x)
    (kernel,) = compiler.lay_out(softmax(4096, 1024), HOST)[1]
    assert "ts_divi" not in kernel.text and "ts_exp(" in kernel.text


def test_what_a_product_reads_is_divided_before():
    b = Builder()
    scores, values = b.param((12, 128, 128), "float32", "s"), b.param((12, 128, 64), "float32", "v")
    e = b.ew("exp", scores)
    total = b.broadcast_to(b.reshape(b.reduce("sum", e, (2,)), (12, 128, 1)), e.shape)
    graph = b.finish([b.dot(b.ew("div", e, total), values, contract=((2,), (1,)), batch=((0,), (0,)))], "attention")
    kernel = kernel_of(graph, CUDA)
    before, product = kernel.text.split("TS_TILES(")
    assert "ts_divide(" in before and " / v" not in product
    agree(graph, random_inputs(graph, 1), kernel, compile_kernels([kernel]), 1e-5)


def test_a_product_has_loops_of_its_own_and_rows_before_it_are_loaded_together():
    """A cache that is written and multiplied: the product is in tiles, and loads do not wait for stores."""
    graph = decode_step(4, 12, 256, 64)
    kernel = kernel_of(graph, CUDA)
    assert "TS_LANES_FOLD" not in kernel.text and kernel.text.count("TS_TILES(") == 2
    batch, stores = kernel.text.split("TS_BATCH_EACH(")[1:3]
    assert "TS_RUN_LOAD(" in batch and "TS_RUN_STORE(" not in batch
    assert "TS_RUN_STORE(" in stores and "TS_RUN_LOAD(" not in stores
    agree(graph, drawn(graph, {}, 1), kernel, compile_kernels([kernel]), 1e-5)


def test_rows_of_many_blocks_are_loaded_one_by_one():
    """Other blocks work while one waits."""
    assert "TS_BATCHES(" in kernel_of(rows_of(100, 80, 64), CUDA).text
    assert "TS_BATCHES(" not in kernel_of(rows_of(9000, 80, 64), CUDA).text


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_batches_of_any_number_of_rows(dtype):
    graphs = [rows_of(n, m, 64, dtype) for n, m in ((7, 300), (None, 300), (7, None), (3, 1), (1, 33), (66, 300))]
    kernels = [kernel_of(g, CUDA) for g in graphs]
    assert sum("TS_BATCHES(" in k.text for k in kernels) >= 2
    library = compile_kernels(kernels, optimize="-O1")
    for graph, kernel in zip(graphs, kernels, strict=True):
        for size in (0, 1, 5, 66):
            inputs = random_inputs(graph, 1, dict.fromkeys(graph.symbols, size))
            agree(graph, inputs, kernel, library, 1e-3 if dtype == "float16" else 1e-6)


def rows_of(images, rows_each, columns, dtype="float32") -> Graph:
    """Sums over the columns, and rows with the sum of their image taken away."""
    b = Builder()
    x = b.param((images, rows_each, columns), dtype, "x")
    least = b.reduce("min", x, (1,))
    far = b.broadcast_to(b.reshape(least, (x.shape[0], 1, columns)), x.shape)
    return b.finish([least, b.ew("sub", x, far)], "rows_of")


def test_rows_of_several_stages_get_registers():
    assert "TS_KERNEL_WIDE(" in kernel_of(block((4096, 1024)), CUDA).text
    assert "TS_KERNEL_WIDE(" not in kernel_of(block((4096, 256)), CUDA).text + kernel_of(softmax(4096, 1024), CUDA).text
