"""Row chains: the text that a GPU runs, given the host's meaning, against the interpreter; what chains there are."""
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.codegen.support import Library, compile_kernels, kernel_of, whole
from tests.codegen.test_kernels import NVCC, along_rows, softmax
from tests.ir_graphs import random_inputs
from tf_stitch.backend import cuda
from tf_stitch.codegen import Kernel
from tf_stitch.errors import Unschedulable
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.schedule import CUDA, HOST, build

ROWS = replace(CUDA, name="host")  # schedules as for a GPU, text for the host


def normalized(b: Builder, x: Node) -> Node:
    """Layer normalisation of the last dim with gain and bias."""
    n, last = x.shape[-1], (x.rank - 1,)
    gain, bias = (b.param((n,), x.dtype, name) for name in ("gain", "bias"))
    mean = b.ew("mul", b.reduce("sum", x, last), b.const(1 / n, x.dtype))
    d = b.ew("sub", x, per_row(b, mean, x))
    variance = b.ew("mul", b.reduce("sum", b.ew("mul", d, d), last), b.const(1 / n, x.dtype))
    scale = b.ew("rsqrt", b.ew("add", variance, b.const(1e-3, x.dtype)))
    y = b.ew("mul", b.ew("mul", d, per_row(b, scale, x)), b.broadcast_to(gain, x.shape))
    return b.ew("add", y, b.broadcast_to(bias, x.shape))


def per_row(b: Builder, row: Node, like: Node) -> Node:
    return b.broadcast_to(b.reshape(row, (*like.shape[:-1], 1)), like.shape)


def gelu(b: Builder, x: Node) -> Node:
    inner = b.ew("mul", b.ew("neg", x), b.const(np.sqrt(0.5), x.dtype))
    return b.ew("mul", b.ew("mul", x, b.const(0.5, x.dtype)), b.ew("erfc", inner))


def soft(b: Builder, x: Node) -> Node:
    last = (x.rank - 1,)
    e = b.ew("exp", b.ew("sub", x, per_row(b, b.reduce("max", x, last), x)))
    return b.ew("div", e, per_row(b, b.reduce("sum", e, last), x))


def block(shape, dtype="float32") -> Graph:
    """Layer norm, GELU and softmax."""
    b = Builder()
    return b.finish([soft(b, gelu(b, normalized(b, b.param(shape, dtype, "x"))))], "block")


def residual(shape, dtype="float32") -> Graph:
    """A residual sum that is also a result, its layer norm, and the norm's largest value of every row."""
    b = Builder()
    x, z = b.param(shape, dtype, "x"), b.param(shape, dtype, "z")
    s = b.ew("add", x, z)
    y = normalized(b, s)
    return b.finish([s, y, b.reduce("max", y, (len(shape) - 1,))], "residual")


def turned(rows, n, dtype="float32") -> Graph:
    """An image whose channels are turned to the front, which is a result too, and every channel normalised."""
    b = Builder()
    x = b.transpose(b.param((n, rows), dtype, "x"), (1, 0))
    return b.finish([x, normalized(b, x)], "turned")


def counted(shape) -> Graph:
    """Integers: how far every element is above the row's least, and whether any is at its double."""
    b = Builder()
    x = b.param(shape, "int32", "x")
    above = b.ew("sub", x, per_row(b, b.reduce("min", x, (1,)), x))
    return b.finish([above, b.reduce("or", b.ew("eq", above, x), (1,)), b.reduce("sum", above, (1,))], "counted")


def chains(graph: Graph, target=CUDA):
    return [c for p in build(whole(graph), target).parts for c in p.chains]


def agree(graph: Graph, inputs, kernel: Kernel, library: Library, tolerance: float) -> None:
    want = interp.run(graph, inputs)
    got, status = library.run(kernel, graph.bind(inputs), dict(zip(graph.params, inputs, strict=True)), (0, 0.4, 1))
    assert status == 0
    for o, w in zip(graph.outputs, want, strict=True):
        np.testing.assert_allclose(got[o].astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance)


MAKERS = {"block": block, "residual": residual, "softmax": lambda shape: softmax(*shape)}


@pytest.mark.parametrize("name", MAKERS)
def test_rows_of_many_lengths(name):
    graphs = [MAKERS[name]((max(70, 40_000 // n), n)) for n in (32, 33, 50, 96, 128, 1000, 8192, 20_001)]
    kernels = [kernel_of(g, ROWS) for g in graphs]
    assert all("ROW_TURNS(" in k.text for k in kernels)
    library = compile_kernels(kernels, optimize="-O1")
    for graph, kernel in zip(graphs, kernels, strict=True):
        agree(graph, random_inputs(graph, 1), kernel, library, 1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_any_number_of_rows(name):
    graphs = [MAKERS[name]((None, n)) for n in (768, 1024, 5000)]
    kernels = [kernel_of(g, ROWS) for g in graphs]
    assert all("ROW_TURNS(" in k.text for k in kernels)
    library = compile_kernels(kernels, optimize="-O1")
    for graph, kernel in zip(graphs, kernels, strict=True):
        for count in (0, 1, 3, 20):
            inputs = random_inputs(graph, count, {str(graph.params[0].shape[0]): count})
            agree(graph, inputs, kernel, library, 1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_rows_of_other_types(dtype):
    graphs = [make((5, n), dtype) for make in (block, residual) for n in (100, 256)]
    kernels = [kernel_of(g, ROWS) for g in graphs]
    library = compile_kernels(kernels, optimize="-O1")
    slack = {"float16": 2e-2, "bfloat16": 0.15, "float64": 1e-11}[dtype]
    for graph, kernel in zip(graphs, kernels, strict=True):
        agree(graph, random_inputs(graph, 1), kernel, library, slack)


def test_rows_of_several_dims_and_of_integers():
    graphs = [block((30, 40, 64)), block((70, 1, 512)), residual((20, 1, 30, 40)), counted((700, 96)),
              counted((300, 33))]
    kernels = [kernel_of(g, ROWS) for g in graphs]
    assert all("ROW_TURNS(" in k.text for k in kernels)
    library = compile_kernels(kernels, optimize="-O1")
    for graph, kernel in zip(graphs, kernels, strict=True):
        agree(graph, random_inputs(graph, 1), kernel, library, 1e-4)


def test_rows_that_a_stage_before_the_chain_made():
    """The first stage that has a row of what lies in shared memory loads it, if only to write it to an output."""
    graphs = [turned(8, 96), turned(16, 36, "float64"), turned(32, 32, "bfloat16"), turned(64, 32), turned(4, 64)]
    kernels = [kernel_of(g, ROWS) for g in graphs]
    assert all("// rows: transpose" in k.text for k in kernels)
    assert sum("// transpose" in k.text for k in kernels) == 4
    library = compile_kernels(kernels, optimize="-O1")
    for graph, kernel in zip(graphs, kernels, strict=True):
        agree(graph, random_inputs(graph, 1), kernel, library, 0.15 if graph.params[0].dtype == "bfloat16" else 1e-4)


def test_specials_stay_in_their_rows():
    graph = block((6, 64))
    kernel = kernel_of(graph, ROWS)
    inputs = random_inputs(graph, 2)
    x = inputs[0]
    x[1, 3], x[2, 5], x[3, 0], x[4, :] = np.nan, np.inf, -np.inf, 7.0
    agree(graph, inputs, kernel, compile_kernels([kernel]), 1e-4)
    want = interp.run(graph, inputs)[0]
    assert np.isnan(want[1:4]).all() and np.isfinite(want[[0, 4, 5]]).all()


def random_rows(seed: int) -> Graph:
    """A random graph of values of rows and values per row, all of them in [-2, 2]."""
    r, b = random.Random(seed), Builder()
    shape = (r.choice((1, 2, 16, 300, 1000)), r.choice((32, 40, 63, 100, 256, 1030)))
    dtype = r.choice(("float32", "float32", "float64", "bfloat16"))
    wide, narrow = [b.param(shape, dtype, "x"), b.param(shape, dtype, "z")], []
    wide.append(b.broadcast_to(b.param(shape[1:], dtype, "v"), shape))
    if r.random() < 0.3:
        wide.append(b.transpose(b.param(shape[::-1], dtype, "t"), (1, 0)))

    def bounded(x: Node) -> Node:
        return b.ew(r.choice(("tanh", "sin", "erf", "sigmoid")), x)

    for _ in range(r.randint(4, 12)):
        kind, x = r.choice(("join", "join", "fold", "fold", "spread", "row")), r.choice(wide)
        if kind == "join":
            wide.append(bounded(b.ew(r.choice(("add", "mul", "sub", "max")), x, r.choice(wide))))
        elif kind == "fold":
            how = r.choice(("sum", "max", "min"))
            row = b.reduce(how, x, (1,))
            narrow.append(b.ew("mul", row, b.const(1 / shape[1], dtype)) if how == "sum" else row)
        elif narrow and kind == "row":
            narrow.append(bounded(b.ew("add", r.choice(narrow), r.choice(narrow))))
        elif narrow:
            at = along_rows(b, r.choice(narrow), x)
            y = b.ew("div", x, b.ew("add", b.ew("abs", at), b.const(1.0, dtype)))
            wide.append(b.ew("add", x, bounded(at)) if r.random() < 0.5 else y)
    made = [*wide[3:], *narrow]
    outputs = {made[-1], *r.sample(made, min(3, len(made)))}
    return b.finish(list(outputs), f"random {seed}")


def test_random_rows():
    kernels = []
    for seed in range(120):
        graph = random_rows(seed)
        try:
            kernels.append((seed, graph, kernel_of(graph, ROWS)))
        except Unschedulable:
            continue  # too few rows for a GPU: the planner splits
    assert sum("ROW_TURNS(" in k.text for _, _, k in kernels) > 60
    library = compile_kernels([k for _, _, k in kernels], "x86-64-v2", "-O1")
    for seed, graph, kernel in kernels:
        half = graph.params[0].dtype == "bfloat16"
        try:
            agree(graph, random_inputs(graph, seed), kernel, library, 0.1 if half else 1e-4)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}\n{kernel.text}") from None


def test_what_a_chain_holds():
    (c,) = chains(block((4096, 1024)))
    assert c.lanes == 32 and c.run == 4 and len(c.held) == 3  # the input, the GELU, the exponentials
    (part,) = build(whole(block((4096, 1024))), CUDA).parts
    assert part.shared_bytes == 0
    (c,) = chains(block((2048, 8192)))
    assert c.lanes == 256
    assert chains(block((4096, 1024), "float16"))[0].run == 8
    (c,) = chains(softmax(64, 30000))
    assert not c.held and not c.short  # too long: loaded again
    assert not chains(softmax(None, None))
    assert not chains(block((4096, 1024)), HOST)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_chains_compile_for_a_gpu():
    made = [kernel_of(g, CUDA) for g in (block((None, 1000)), block((64, 1024), "bfloat16"), residual((None, 2000)),
                                         residual((9, 512), "float64"), counted((5, 4096)))]
    text = "\n".join(k.text for k in made)
    assert text.count("TS_ROW(") > len(made)
    assert cuda.compile_text(text, ("sm_90", "compute_75"))
