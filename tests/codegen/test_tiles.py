"""Products in kernels of the CUDA target, run on the host: tiles, shares of threads, ranges of what is concatenated."""
from __future__ import annotations

import contextlib
import itertools
import random
import re

import numpy as np
import pytest

from tests.codegen.support import compile_kernels, kernel_of
from tests.ir_graphs import assert_matches, make_case, random_inputs
from tests.random_products import random_product
from tf_stitch.codegen import translation_unit
from tf_stitch.errors import Unschedulable
from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.graph import Graph
from tf_stitch.schedule import CUDA

FAMILIES = ("dot", "dot", "arithmetic", "concat", "slice", "transpose", "reshape", "unary", "cast")
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "float16": 2e-3, "bfloat16": 2e-2}


def matrix_product(rows, inner, columns, dtype="float32", transposed=(False, False), bias=True) -> Graph:
    b = Builder()
    x = b.param((inner, rows) if transposed[0] else (rows, inner), dtype, "x")
    w = b.param((columns, inner) if transposed[1] else (inner, columns), dtype, "w")
    y = b.dot(x, w, contract=((0 if transposed[0] else 1,), (1 if transposed[1] else 0,)))
    if bias:
        y = b.ew("add", y, b.broadcast_to(b.param((columns,), dtype, "b"), y.shape))
    return b.finish([y], "product")


def of_pieces(rows, pieces, columns) -> Graph:
    """A product of inputs that are put together along the folded dim."""
    b = Builder()
    x = b.concat([b.param((rows, p), "float32", f"x{k}") for k, p in enumerate(pieces)], 1)
    return b.finish([b.dot(x, b.param((sum(pieces), columns), "float32", "w"), contract=((1,), (0,)))], "of_pieces")


def of_stack(count, inner, columns) -> Graph:
    """A product of rows that are inputs of their own."""
    b = Builder()
    rows = [b.reshape(b.param((inner,), "float32", f"x{k}"), (1, inner)) for k in range(count)]
    x = b.concat(rows, 0)
    return b.finish([b.dot(x, b.param((inner, columns), "float32", "w"), contract=((1,), (0,)))], "of_stack")


def interactions(batch, count, inner) -> Graph:
    """Every row with every other, rows computed on the way (DLRM)."""
    b = Builder()
    rows = [b.ew("mul", b.param((batch, 1, inner), "float32", f"x{k}"), float(k + 1)) for k in range(count)]
    z = b.concat(rows, 1)
    return b.finish([b.dot(z, z, batch=((0,), (0,)), contract=((2,), (2,)))], "interactions")


def run(graph: Graph, sizes=None, special=0.0, seed=0):
    """(what the CUDA text gives on the host, what the interpreter gives, the text)."""
    kernel = kernel_of(graph, CUDA)
    inputs = random_inputs(graph, seed, sizes or {}, special=special)
    got, status = compile_kernels([kernel], optimize="-O1").run(
        kernel, graph.bind(inputs), dict(zip(graph.params, inputs, strict=True)))
    assert status == 0 and "TILES(t, " in kernel.text
    return [got[o] for o in graph.outputs], interp.run(graph, inputs), kernel.text


def check(graph: Graph, sizes=None, dtype="float32") -> str:
    got, want, text = run(graph, sizes)
    for g, w in zip(got, want, strict=True):
        scale = max(float(np.abs(w.astype(np.float64)).max(initial=0.0)), 1.0)
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=0, atol=TOLERANCE[dtype] * scale)
    return text


def test_random_products():
    """With what models have before and after them, at sizes where tiles, shares and widths end."""
    made = []
    for product in map(random_product, range(60)):
        with contextlib.suppress(Unschedulable):  # more than one kernel
            made.append((product, kernel_of(product.graph, CUDA)))
    assert len(made) > 15
    compiled = compile_kernels([kernel for _, kernel in made], optimize="-O1")
    for product, kernel in made:
        for seed in range(2):
            inputs = product.inputs(seed)
            named = dict(zip(product.graph.params, inputs, strict=True))
            got, status = compiled.run(kernel, product.graph.bind(inputs), named)
            assert status == 0
            product.check(interp.run(product.graph, inputs), [got[o] for o in product.graph.outputs])


@pytest.mark.parametrize("rows,inner,columns", [(1, 1024, 64), (4, 96, 40), (3, 13, 7), (16, 130, 24), (64, 33, 1),
                                                (5, 2, 5), (3, 64, 3), (9, 32, 9)])
def test_sizes_of_every_kind(rows, inner, columns):
    for transposed in itertools.product((False, True), repeat=2):
        check(matrix_product(rows, inner, columns, transposed=transposed))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_float_types(dtype):
    check(matrix_product(6, 72, 48, dtype), dtype=dtype)
    check(matrix_product(2, 17, 48, dtype, (False, True)), dtype=dtype)


def test_unknown_sizes():
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        shape = [None if k in which else size for k, size in enumerate((5, 24, 16))]
        b = Builder()
        x, w = b.param(shape[:2], "float32", "x"), b.param((None if 1 in which else 24, shape[2]), "float32", "w")
        graph = b.finish([b.dot(x, w, contract=((1,), (0,)))], "unknown")
        names = sorted({str(d) for p in graph.params for d in p.shape if not isinstance(d, int)})
        for size in (0, 1, 3, 70, 300):
            check(graph, dict.fromkeys(names, size))


@pytest.mark.parametrize("most", [2, 4, 16])
def test_rows_of_which_there_are_few_are_tiles_of_rows_without_a_loop(most):
    """As many rows to a tile as where their number is known, and no more turns than are sure to be needed."""
    graph, text = matrix_product(None, 256, 2112), ""
    for rows in range(most + 1):
        text = check(graph.substitute({name: D.symbol(name, 0, most) for name in graph.symbols}), {"n0": rows})
    assert re.search(r"TS_FEW_TILES\(t, |TS_TILES\(t, \d+, ", text) and f"TS_EACH(r1, {min(most, 4)})" in text


def test_long_products_stay_accurate():
    rows, inner, columns = 2, 100_000, 8
    graph = matrix_product(rows, inner, columns, bias=False)
    kernel = kernel_of(graph, CUDA)
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0, 1, s).astype(np.float32) for s in ((rows, inner), (inner, columns)))
    got, _ = compile_kernels([kernel], optimize="-O1").run(kernel, {}, dict(zip(graph.params, (x, w), strict=True)))
    want = x.astype(np.float64) @ w.astype(np.float64)
    # one chain here stands for those of all threads that share a tile; a plain float32 loop is off by 1e-5 to 1e-4
    assert np.abs(got[graph.outputs[0]] / want - 1).max() < 4e-6


def test_specials_go_where_they_belong():
    got, want, _ = run(matrix_product(5, 40, 12), special=0.05)
    for g, w in zip(got, want, strict=True):
        assert not np.isfinite(w).all()
        np.testing.assert_array_equal(np.isfinite(g), np.isfinite(w))
        np.testing.assert_allclose(g[np.isfinite(w)], w[np.isfinite(w)], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("pieces", [(28, 128), (5, 64), (4, 4, 4), (0, 8, 3)])
def test_pieces_are_ranges_without_conditions(pieces):
    text = check(of_pieces(3, pieces, 32))
    assert "if (k" not in text and "&&" not in text


def test_many_rows_that_are_inputs_are_found_by_a_table():
    text = check(of_stack(9, 64, 24))
    assert "TS_BUFFER(float" in text and text.count("if (b") == 0


def test_rows_that_are_computed_are_put_together_first():
    text = check(interactions(3, 6, 24))
    product = text[text.index("// dot"):]
    assert "if (i" not in product[:product.index("TS_TILE_JOIN")]


def test_integers():
    b = Builder()
    x, w = b.param((7, 33), "int32", "x"), b.param((33, 12), "int32", "w")
    got, want, _ = run(b.finish([b.dot(x, w, contract=((1,), (0,)))], "integers"))
    np.testing.assert_array_equal(got[0], want[0])


def test_steps_of_an_unrolled_loop_are_one_kernel():
    def step(t):
        b = Builder()
        x, w = b.param((8, 10, 24), "float32", "x"), b.param((24, 16), "float32", "w")
        row = b.reshape(b.slice(x, (0, t, 0), (8, 1, 24)), (8, 24))
        return b.finish([b.dot(row, w, contract=((1,), (0,)))], "step")

    first, second = (kernel_of(step(t), CUDA) for t in (2, 7))
    assert first.text == second.text and first.dims != second.dims
    check(step(7))


def test_random_products_match_the_interpreter():
    kernels = []
    for seed in range(200):
        r = random.Random(seed)
        case = make_case(r, families=FAMILIES, steps=r.randint(1, 5))
        try:
            kernel = kernel_of(case.graph, CUDA) if any(o.op != "param" for o in case.graph.outputs) else None
        except Unschedulable:
            continue
        if kernel is not None and "TILES(t, " in kernel.text:
            kernels.append((seed, case, kernel))
    assert len(kernels) > 40
    library = compile_kernels([k for *_, k in kernels], "x86-64-v2", "-O1")
    compared = 0
    for seed, case, kernel in kernels:
        for trial in range(3):
            inputs = random_inputs(case.graph, seed * 10 + trial)
            try:
                env, want = case.graph.bind(inputs), interp.run(case.graph, inputs)
            except (ValueError, IndexError):
                continue
            given = dict(zip(case.graph.params, inputs, strict=True))
            out, status = library.run(kernel, env, given)
            assert status == 0
            assert_matches(case, want, [given[o] if o in given else out[o] for o in case.graph.outputs], slack=2.0)
            compared += 1
    assert compared > 100


def test_the_text_is_cuda_too(tmp_path):
    """nvcc takes what the host ran: every kind of access and of join."""
    import shutil
    import subprocess

    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    graphs = [matrix_product(6, 72, 48, dtype) for dtype in DTYPES if dtype in TOLERANCE]
    graphs += [of_pieces(3, (28, 128), 32), of_stack(9, 64, 24), interactions(3, 6, 24), matrix_product(None, 40, 24)]
    graphs += [matrix_product(3, 64, 9, transposed=t) for t in itertools.product((False, True), repeat=2)]
    source = tmp_path / "k.cu"
    source.write_text(translation_unit([kernel_of(g, CUDA) for g in graphs], "cuda"))
    subprocess.run([nvcc, "-std=c++17", "-arch=compute_90", "-ptx", "-w", str(source), "-o", str(tmp_path / "k.ptx")],
                   check=True)


@pytest.mark.parametrize("size", [3, 9, 15])
def test_three_neighbours_are_no_wide_access(size):
    """A tile of three columns, or rows, of a dim that lies so in memory."""
    for rows, columns in ((size, 4), (4, size), (size, size)):
        for transposed in itertools.product((False, True), repeat=2):
            text = check(matrix_product(rows, 64, columns, transposed=transposed))
            assert "ts_read<3" not in text
            assert columns != size or "TS_EACH(c1, 3)" in text


@pytest.mark.parametrize("rows", [1, 100])
def test_pieces_of_a_stack_are_not_found_by_conditions(rows):
    """Where one is computed, blocks put together what they read of the stack, however little that lets them do."""
    b = Builder()
    pieces = [b.param((rows, 1, 512), "float32", f"x{k}") for k in range(12)]
    pieces[-1] = b.ew("tanh", pieces[-1])
    stack = b.reshape(b.concat(pieces, 1), (rows * 12, 512))
    graph = b.finish([b.dot(stack, b.param((512, 29), "float32", "w"), contract=((1,), (0,)))])
    assert "&&" not in kernel_of(graph, CUDA).text


def test_rows_of_a_stack_are_read_in_wide_accesses():
    """Eight rows to a tile, each from a buffer of its own that a table names."""
    text = check(of_stack(16, 128, 64 * 132))
    assert "TS_BUFFER" in text and "ts_read<4, 8>(" in text
    assert "ts_read<4" not in check(of_stack(16, 127, 63 * 132))  # rows that begin anywhere
