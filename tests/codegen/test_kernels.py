"""Kernels that random graphs do not reach: long sums, specials, failures, unknown sizes at their limits, text."""
from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.codegen.support import compile_kernels, kernel_of
from tests.ir_graphs import random_case
from tf_stitch.codegen import HOST_FLAGS, emit, level_flags, translation_unit
from tf_stitch.errors import Unschedulable
from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.graph import Graph
from tf_stitch.ir.ops import make
from tf_stitch.options import HOST_LEVELS
from tf_stitch.schedule import CUDA, HOST, Schedule, build
from tf_stitch.schedule.group import Group

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def along_rows(b: Builder, row, like):
    """A value per row, for every element of the row."""
    return b.broadcast_to(b.reshape(row, (like.shape[0], 1)), like.shape)


def softmax(rows, cols) -> Graph:
    b = Builder()
    x = b.param((rows, cols), "float32", "x")
    e = b.ew("exp", b.ew("sub", x, along_rows(b, b.reduce("max", x, (1,)), x)))
    return b.finish([b.ew("div", e, along_rows(b, b.reduce("sum", e, (1,)), x))], "softmax")


def standardized(rows, cols) -> Graph:
    """Rows with mean 0 and variance 1, their mean too."""
    b = Builder()
    x = b.param((rows, cols), "float32", "x")
    n = b.cast(b.shape_value((x.shape[1],), (), "int64"), "float32")
    mean = b.ew("div", b.reduce("sum", x, (1,)), b.broadcast_to(n, (x.shape[0],)))
    d = b.ew("sub", x, along_rows(b, mean, x))
    var = b.ew("div", b.reduce("sum", b.ew("mul", d, d), (1,)), b.broadcast_to(n, (x.shape[0],)))
    return b.finish([b.ew("mul", d, along_rows(b, b.ew("rsqrt", b.ew("add", var, 1e-3)), x)), mean], "standardized")


def normalized_channels(batch, size, channels) -> Graph:
    """Inference batch norm and hard swish over NHWC, then the mean of every channel."""
    b = Builder()
    x = b.param((batch, size, size, channels), "float32", "x")
    gamma, beta, mean, var = (b.param((channels,), "float32", n) for n in ("gamma", "beta", "mean", "var"))
    scale = b.ew("mul", gamma, b.ew("rsqrt", b.ew("add", b.ew("abs", var), 1e-3)))
    shift = b.ew("sub", beta, b.ew("mul", mean, scale))
    y = b.ew("add", b.ew("mul", x, b.broadcast_to(scale, x.shape)), b.broadcast_to(shift, x.shape))
    y = b.ew("mul", y, b.ew("min", b.ew("max", b.ew("add", y, 3.0), 0.0), 6.0))
    return b.finish([y, b.reduce("sum", y, (1, 2))], "normalized_channels")


def sums(shape, axes, dtype="float32") -> Graph:
    b = Builder()
    return b.finish([b.reduce("sum", b.param(shape, dtype, "x"), axes)], "sums")


def looked_up(mode) -> Graph:
    b = Builder()
    table, index = b.param((7, 5), "float32", "table"), b.param((None,), "int32", "index")
    return b.finish([b.ew("add", b.gather(table, index, 0, mode=mode), 1.0)], "looked_up")


def divided() -> Graph:
    b = Builder()
    x, y = b.param((33,), "int32", "x"), b.param((33,), "int32", "y")
    return b.finish([b.ew("int_div", x, y)], "divided")


def separate() -> Graph:
    """Outputs that share nothing."""
    b = Builder()
    x, y = b.param((None,), "float32", "x"), b.param((3, None), "float32", "y")
    return b.finish([b.ew("exp", x), b.reduce("max", y, (0,)), b.ew("neg", y)], "separate")


def heads() -> Graph:
    """[batch, time, heads * depth] to [batch, heads, time, depth], any batch and time."""
    b = Builder()
    x = b.param((None, None, 24), "float32", "x")
    n, t, _ = x.shape
    return b.finish([b.transpose(b.reshape(b.ew("mul", x, 2.0), (n, t, 4, 6)), (0, 2, 1, 3))], "heads")


def check(graph: Graph, inputs: list[np.ndarray], tolerance: float, library, kernel) -> None:
    env = graph.bind(inputs)
    want = interp.run(graph, inputs)
    got, status = library.run(kernel, env, dict(zip(graph.params, inputs, strict=True)), (0.0, 0.5, 1.0))
    assert status == 0
    for o, w in zip(graph.outputs, want, strict=True):
        np.testing.assert_allclose(got[o].astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance)


def draw(graph: Graph, sizes: dict[str, int], seed: int = 0) -> list[np.ndarray]:
    from tests.ir_graphs import random_inputs

    return random_inputs(graph, seed, sizes)


@pytest.mark.parametrize("make", [softmax, standardized])
def test_rows_of_any_size(make: Callable[..., Graph]):
    graph = make(None, None)
    kernel = kernel_of(graph)
    library = compile_kernels([kernel])
    names = sorted({s for p in graph.params for d in p.shape for s in [str(d)]})
    for rows in (0, 1, 3, 17, 100):
        for cols in (1, 2, 16, 31, 1000, 5000):
            check(graph, draw(graph, dict(zip(names, (rows, cols), strict=True))), 2e-5, library, kernel)


def test_channels_last_at_any_batch():
    for channels in (3, 16, 24):
        graph = normalized_channels(None, 5, channels)
        kernel = kernel_of(graph)
        library = compile_kernels([kernel])
        (batch,) = {str(d) for p in graph.params for d in p.shape if not isinstance(d, int)}
        for n in (0, 1, 3, 17):
            check(graph, draw(graph, {batch: n}), 1e-4, library, kernel)


@pytest.mark.parametrize("channels", [2, 3, 10, 15])
def test_rows_shorter_than_a_vector_run_together(channels):
    b = Builder()
    x = b.param((None, 5, channels), "float32", "x")
    mean, std = b.param((channels,), "float32", "mean"), b.param((channels,), "float32", "std")
    y = b.ew("mul", b.ew("sub", x, b.broadcast_to(mean, x.shape)), b.broadcast_to(b.ew("exp", std), x.shape))
    graph = b.finish([y, b.cast(b.ew("floor", y), "int32")], "narrow")
    kernel = kernel_of(graph)
    assert f"TS_SERIAL(j, 0, {16 * channels})" in kernel.text  # the channels' values are laid out once
    library = compile_kernels([kernel])
    for n in (0, 1, 3, 500):
        check(graph, draw(graph, {str(x.shape[0]): n}), 1e-6, library, kernel)


@pytest.mark.parametrize("target", [HOST, CUDA], ids=["host", "cuda"])
def test_every_node_alone_has_a_schedule(target):
    for seed in range(150):
        for n in random_case(seed).graph.nodes():
            if n.op != "param":
                emit(build(Group((n,), tuple(dict.fromkeys(n.inputs)), (n,)), target))


def test_a_scalar_may_be_transposed():
    b = Builder()
    x = b.param((), "float32", "x")
    graph = b.raw([b.ew("exp", make("transpose", [x], {"perm": ()}))], "scalar")
    assert kernel_of(graph, CUDA).text and kernel_of(graph).text


def test_heads_are_moved():
    graph = heads()
    kernel = kernel_of(graph)
    library = compile_kernels([kernel])
    names = [str(d) for d in graph.params[0].shape[:2]]
    for n, t in ((0, 4), (1, 1), (2, 130), (3, 0)):
        check(graph, draw(graph, {names[0]: n, names[1]: t}), 0, library, kernel)


@pytest.mark.parametrize("shape,axes", [((1 << 21,), (0,)), ((1 << 16, 8), (0,)), ((4, 1 << 18), (1,)),
                                        ((300, 300, 5), (0, 1))])
def test_long_float_sums_stay_accurate(shape, axes):
    graph = sums(shape, axes)
    kernel = kernel_of(graph)
    x = np.random.default_rng(1).uniform(0, 1, shape).astype(np.float32)
    got, _ = compile_kernels([kernel]).run(kernel, {}, {graph.params[0]: x})
    want = x.astype(np.float64).sum(axis=axes)
    assert np.abs(got[graph.outputs[0]] / want - 1).max() < 1e-6  # a plain float32 loop is off by 1e-5 to 1e-4


def test_half_sums_are_rounded_once():
    graph = sums((64, 4096), (1,), "float16")
    kernel = kernel_of(graph)
    x = np.full((64, 4096), 0.1, np.float16)
    got, _ = compile_kernels([kernel]).run(kernel, {}, {graph.params[0]: x})
    assert (got[graph.outputs[0]] == np.float16(4096 * float(np.float16(0.1)))).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_op_rounds(dtype):
    """Else a value that is computed twice, once from memory, is not equal to itself."""
    b = Builder()
    x = b.param((37, 65), dtype, "x")
    y = b.ew("add", b.ew("mul", x, b.const(0.3, dtype)), b.const(0.1, dtype))
    top = b.broadcast_to(b.reshape(b.reduce("max", y, (0, 1)), (1, 1)), x.shape)
    total = along_rows(b, b.reduce("sum", x, (1,)), x)
    graph = b.finish([y, b.ew("eq", y, top), b.ew("floor", b.ew("mul", y, b.const(8.0, dtype))),
                      b.ew("lt", b.ew("mul", total, b.const(0.7, dtype)), y)], "half")
    kernel = kernel_of(graph)
    value = np.random.default_rng(3).normal(size=(37, 65)).astype(DTYPES[dtype].numpy)
    got, status = compile_kernels([kernel]).run(kernel, {}, {graph.params[0]: value})
    assert not status
    for n, want in zip(graph.outputs, interp.run(graph, [value]), strict=True):
        np.testing.assert_array_equal(got[n], want, err_msg=str(n))
    assert got[graph.outputs[1]].any()


@pytest.mark.parametrize("level", HOST_LEVELS[:2])
def test_products_are_rounded_before_they_are_subtracted(level):
    b = Builder()
    x = b.param((64, 333), "float32", "x")
    y = b.ew("mul", x, b.const(0.3, "float32"))
    graph = b.finish([b.ew("sub", along_rows(b, b.reduce("max", y, (1,)), x), y)], "below_the_top")
    kernel = kernel_of(graph)
    value = np.random.default_rng(3).standard_normal((64, 333)).astype(np.float32)
    got, _ = compile_kernels([kernel], level).run(kernel, {}, {graph.params[0]: value})
    np.testing.assert_array_equal(got[graph.outputs[0]], interp.run(graph, [value])[0])


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_extremes_of_nan_are_nan(kind, axis):
    b = Builder()
    x = b.param((40, 37), "float32", "x")
    graph = b.finish([b.reduce(kind, x, (axis,)), b.arg_reduce(kind, x, axis, "int32")], "extremes")
    kernel = kernel_of(graph)
    library = compile_kernels([kernel], "x86-64-v2")
    data = np.random.default_rng(0).standard_normal((40, 37)).astype(np.float32)
    data[3, 5], data[7], data[:, 9], data[11, 2], data[12, 3] = np.nan, np.nan, -np.inf, np.inf, -np.inf
    got, _ = library.run(kernel, {}, {x: data})
    for o, want in zip(graph.outputs, interp.run(graph, [data]), strict=True):
        np.testing.assert_array_equal(got[o], want)


def test_no_level_uses_mmx_registers(tmp_path):
    """They alias the x87 stack: code that leaves one in use makes a later fmod give NaN."""
    b = Builder()
    x = b.param((40, 37), "float32", "x")
    kernel = kernel_of(b.finish([b.reduce("max", x, (1,)), b.arg_reduce("max", x, 1, "int32")], "extremes"))
    source = tmp_path / "k.cc"
    source.write_text(translation_unit([kernel]))
    for level in HOST_LEVELS:
        command = ["g++", *HOST_FLAGS, f"-march={level}", *level_flags(level), "-S", str(source), "-o", "-"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "%mm" not in text and "%xmm" in text, level


@pytest.mark.parametrize("mode,fails", [("error", True), ("clip", False), ("zero", False)])
def test_indices_out_of_range(mode, fails):
    graph = looked_up(mode)
    kernel = kernel_of(graph)
    library = compile_kernels([kernel])
    table = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    good, bad = np.array([0, 6, 3], np.int32), np.array([2, -1, 7, 2_000_000_000], np.int32)
    for index, status in ((good, 0), (bad, int(fails))):
        env = graph.bind([table, index])
        got, seen = library.run(kernel, env, {graph.params[0]: table, graph.params[1]: index})
        assert seen == status
        if not status:
            np.testing.assert_array_equal(got[graph.outputs[0]], interp.run(graph, [table, index])[0])
    assert kernel.exact is not fails


def test_division_by_zero_sets_the_status():
    graph = divided()
    kernel = kernel_of(graph)
    library = compile_kernels([kernel])
    x, y = np.arange(33, dtype=np.int32) - 16, np.full(33, -3, np.int32)
    got, status = library.run(kernel, {}, {graph.params[0]: x, graph.params[1]: y})
    assert status == 0 and (got[graph.outputs[0]] == np.trunc(x / y)).all()
    y[20] = 0
    assert library.run(kernel, {}, {graph.params[0]: x, graph.params[1]: y})[1] != 0
    assert not kernel.exact


def test_outputs_that_share_nothing_have_blocks_of_their_own():
    graph = separate()
    kernel = kernel_of(graph)
    library = compile_kernels([kernel])
    names = [str(graph.params[0].shape[0]), str(graph.params[1].shape[1])]
    for n, m in ((0, 5), (20_000, 0), (7, 9_000), (0, 0)):
        check(graph, draw(graph, {names[0]: n, names[1]: m}), 1e-5, library, kernel)


def test_outputs_that_read_one_input_share_its_blocks():
    b = Builder()
    x = b.param((None, 64), "float32", "x")
    graph = b.finish([b.ew("exp", x), b.ew("mul", x, 2.0), b.cast(b.ew("floor", x), "int32")], "shared input")
    kernel = kernel_of(graph)
    assert kernel.text.count("TS_PART(") == 1 and kernel.text.count("x0[") == 1
    (rows,) = {str(d) for d in x.shape[:1]}
    library = compile_kernels([kernel])
    for n in (0, 1, 1000):
        check(graph, draw(graph, {rows: n}), 1e-6, library, kernel)


@pytest.mark.parametrize("wanted", [
    Schedule(0, 1), Schedule(0, 3), Schedule(1, 2), Schedule(2, 4), Schedule(0, 100), Schedule(2, 5, "Column"),
    Schedule(1, 6, "Column"), Schedule(0, 2, "Column")], ids=str)
def test_every_schedule_of_a_root_computes_the_same(wanted):
    b = Builder()
    x, y = b.param((5, 6, 7), "float32", "x"), b.param((7, 6, 5), "float32", "y")
    total = b.reduce("sum", b.ew("exp", x), (1,))
    z = b.ew("mul", b.ew("add", x, b.transpose(y, (2, 1, 0))), b.broadcast_to(b.reshape(total, (5, 1, 7)), x.shape))
    graph = b.finish([z, b.reduce("max", z, (0,)), total], "three dims")
    kernel = kernel_of(graph, wanted=wanted)
    check(graph, draw(graph, {}), 1e-5, compile_kernels([kernel], optimize="-O1"), kernel)


@pytest.mark.parametrize("wanted", [Schedule(1, 1), Schedule(1, 2), Schedule(1, 6), Schedule(0, 3)], ids=str)
@pytest.mark.parametrize("target", [HOST, CUDA], ids=lambda t: t.name)
def test_every_schedule_of_an_order_computes_the_same(wanted, target):
    b = Builder()
    x = b.param((3, 6), "int32", "x")
    graph = b.finish([b.order(x)], "order")
    kernel = kernel_of(graph, target, wanted)
    values = [np.random.default_rng(0).integers(0, 4, (3, 6)).astype(np.int32)]
    check(graph, values, 0, compile_kernels([kernel], optimize="-O1"), kernel)


def test_equal_kernels_have_equal_names():
    assert kernel_of(softmax(None, 64)).name == kernel_of(softmax(None, 64)).name
    assert kernel_of(softmax(None, 64)).name != kernel_of(softmax(None, 65)).name


def test_a_block_that_does_not_fit_is_refused():
    with pytest.raises(Unschedulable, match="bytes on chip"):
        kernel_of(softmax(16, 8192), replace(CUDA, row_registers=0, shared_bytes=16))


def test_shared_memory_is_reused_and_within_budget():
    b = Builder()
    x = b.param((256, 512), "float32", "x")
    y = x
    for _ in range(6):  # each stage needs the sum of the one before
        y = b.ew("exp", b.ew("mul", y, 0.01))
        y = b.ew("sub", y, along_rows(b, b.reduce("sum", y, (1,)), y))
    target = replace(CUDA, row_registers=0)
    kernel = kernel_of(b.finish([y], "chain"), target)
    assert isinstance(kernel.shared_bytes, int) and kernel.shared_bytes <= target.shared_bytes
    one = kernel_of(softmax(256, 512), target).shared_bytes
    assert kernel.shared_bytes < 6 * one


def test_text_is_readable():
    b = Builder()
    x, bias = b.param((None, 64), "float32", "x"), b.param((64,), "float32", "bias")
    graph = b.finish([b.ew("max", b.ew("add", x, b.broadcast_to(bias, x.shape)), 0.0)], "bias_relu")
    kernel = kernel_of(graph)
    expected = (Path(__file__).parent / "bias_relu.txt").read_text()
    assert kernel.text.replace(kernel.name, "NAME") == expected


def test_host_text_stands_alone():
    text = translation_unit([kernel_of(softmax(None, 64))])
    assert '#include "' not in text and text.count("TS_KERNEL(ts_") == 1


@pytest.mark.skipif(NVCC is None, reason="nvcc is not here")
def test_cuda_text_compiles(tmp_path):
    graphs = (softmax(8, 300), softmax(None, 64), normalized_channels(2, 9, 24), sums((64, 64), (0,)),
              looked_up("error"), divided())
    kernels = [kernel_of(g, CUDA) for g in graphs]
    for seed in range(25):
        case = random_case(seed)
        if any(o.op != "param" for o in case.graph.outputs):
            try:
                kernels.append(kernel_of(case.graph, CUDA))
            except Unschedulable:
                continue  # unknown sizes that must be kept on chip
    assert len(kernels) > 20
    source = tmp_path / "kernels.cu"
    source.write_text(translation_unit(kernels, "cuda"))
    command = [NVCC, "-std=c++17", "-arch=sm_90", "-cubin", "-O1", "-w", str(source), "-o", str(tmp_path / "k.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def test_hosts_default_fits_the_cache():
    assert kernel_of(softmax(4096, 1024), HOST).shared_bytes <= HOST.shared_bytes


def test_one_condition_for_a_whole_row():
    """A masked recurrent cell: the loop over the row has no branch."""
    kernels, cases = [], []
    for dtype in ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8", "bool"):
        b = Builder()
        mask = b.param((None,), "bool", "mask")
        x, y = b.param((None, 37), dtype, "x"), b.param((None, 37), dtype, "y")
        rows = b.broadcast_to(b.reshape(mask, (mask.shape[0], 1)), x.shape)
        graph = b.finish([b.select(rows, x, y), b.select(rows, y, b.select(rows, y, x))], "masked")
        kernels.append(kernel_of(graph))
        cases.append(graph)
    library = compile_kernels(kernels)
    assert all("ts_pick" in k.text and " ? " not in k.text for k in kernels)
    for graph, kernel in zip(cases, kernels, strict=True):
        (name,) = {str(p.shape[0]) for p in graph.params}
        for n in (0, 1, 5):
            inputs = draw(graph, {name: n}, seed=n)
            if graph.params[1].dtype.startswith("float"):
                inputs[1].reshape(-1)[:3] = (np.nan, np.inf, -0.0)[:inputs[1].size]
            check(graph, inputs, 0, library, kernel)


def test_a_long_chain_needs_no_recursion():
    """More ops inside each other than Python's stack has frames: elementwise ones, views and GELUs."""
    b = Builder()
    x = b.param((None, 5), "float32", "x")
    y = x
    for step in range(300):
        half = b.ew("mul", b.reverse(y, (1,)), 0.5)
        y = b.ew("mul", half, b.ew("erfc", b.ew("mul", y, -math.sqrt(0.5)))) if step % 50 == 0 else b.ew("sin", half)
        y = b.ew("add", y, x)
    for _ in range(250):
        y = b.ew("add", b.select(b.ew("gt", x, 0.1), b.cast(b.cast(y, "float64"), "float32"), x), x)
    graph = b.finish([y], "chain")
    for target in (HOST, CUDA):
        kernel = kernel_of(graph, target)
        inputs = draw(graph, {str(x.shape[0]): 3}, seed=1)
        check(graph, inputs, 1e-5, compile_kernels([kernel], optimize="-O0"), kernel)


def test_conditions_do_not_nest_without_end():
    """Rows that are moved by one again and again, as in the recursion of a transducer's loss."""
    b = Builder()
    x = b.param((None, 9), "float32", "x")
    y, rows = x, x.shape[0]
    for _ in range(120):
        moved = b.concat([b.slice(y, (0, 0), (rows, 1)), b.slice(y, (0, 0), (rows, 8))], 1)
        y = b.ew("add", b.ew("mul", moved, 0.5), x)
    graph = b.finish([y], "moved")
    for target in (HOST, CUDA):
        kernel = kernel_of(graph, target)
        assert len(kernel.text) < 300_000
        inputs = draw(graph, {str(rows): 3}, seed=1)
        check(graph, inputs, 1e-5, compile_kernels([kernel], optimize="-O1"), kernel)


def test_an_order_takes_many_long_rows():
    """Pairs of elements need no numbers: only the elements must have some of 32 bits."""
    b = Builder()
    x = b.param((None, 1000), "int32", "x")
    kernel = kernel_of(b.finish([b.order(x)], "order"), CUDA)
    assert [D.to_text(d) for d in kernel.limits] == [D.to_text(x.shape[0] * 1000)]


def test_what_is_read_twice_at_every_level_is_looked_at_once():
    """2 ** 60 ways lead through this value."""
    b = Builder()
    x, w = b.param((None, 8), "float32", "x"), b.param((8, 8), "float32", "w")
    y = x
    for _ in range(60):
        y = b.ew("mul", b.ew("max", y, 0.0), b.ew("min", y, 1.0))
    for last in (b.dot(y, w, contract=((1,), (0,))), b.ew("add", y, y)):
        graph = b.finish([last], "deep")
        kernel = kernel_of(graph, CUDA)
        inputs = draw(graph, {str(x.shape[0]): 3}, seed=1)[:len(graph.params)]
        check(graph, inputs, 1e-5, compile_kernels([kernel], optimize="-O1"), kernel)
