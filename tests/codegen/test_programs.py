"""Whole programs for a GPU, all their plans, against the interpreter: with the host's meaning and thread by thread.

Memory that nothing wrote holds NaN.  gpu_block.h runs the threads of a block in several orders: where a result depends
on which thread is faster, a barrier is missing or memory is used again too soon.
"""
from __future__ import annotations

import itertools
import platform
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.codegen.support import whole
from tests.codegen.test_rows import soft
from tests.fusion import chains
from tests.ir_graphs import assert_matches, random_case, random_inputs, reference
from tests.random_products import random_product
from tf_stitch import compiler
from tf_stitch.assemble import join_texts
from tf_stitch.backend import host
from tf_stitch.errors import Unschedulable
from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.program.program import Buffer, KernelStep, Program
from tf_stitch.schedule import CUDA, build
from tf_stitch.schedule.kernel_schedule import Part
from tf_stitch.schedule.shared import compute_size

GPU_BLOCK = (Path(__file__).parent / "gpu_block.h").read_text()
MEANINGS = {"host": host.PRELUDE}
if platform.machine() == "x86_64":
    MEANINGS |= {f"threads in order {k}": f"#include <stdint.h>\n#define TS_ORDER {k}\n{GPU_BLOCK}" for k in range(3)}
EACH = 1 << 30  # every block is a call of its own, with fresh memory
TARGETS = {"default": CUDA, "superkernels": replace(CUDA, superkernels=True)}


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """What is compiled here runs once."""
    monkeypatch.setattr(host, "HOST_FLAGS", (*(f for f in host.HOST_FLAGS if f not in ("-O3", "-fopenmp-simd")), "-O1"))


def programs(graphs: list[Graph], meaning: str, target=CUDA) -> list[Program]:
    """The programs of some graphs, with one code for all."""
    laid = [compiler.lay_out(g, target) for g in graphs]
    code = host.compile_text(MEANINGS[meaning] + join_texts([k for _, kernels in laid for k in kernels]))
    return [replace(p, code=code) for p, _ in laid]


def sums_of_tiles(sharing: int, stride: int, each: int, items: int) -> tuple[str, int, int, int]:
    """A kernel in which ``sharing`` threads, ``stride`` apart, add up items of ``each`` sums for two turns of tiles;
    how many tiles and sums of each there are, and the bytes in which they meet."""
    count, tiles = each * items, 2 * 256 // sharing
    parts = max(count * 256 * 8, 1)
    own = "".join(f"""
    TS_TILE_OWN(q, {k * each}, {each}, {sharing}, {stride}) {{
      y0[t * {count} + {k * each} + q] = TS_TILE_SUM(double, a, {k * each}, q, {count}, {sharing}, {stride}, 0);
    }}""" for k in range(items))
    return f"""TS_KERNEL(tile_{sharing}_{stride}_{each}_{items}, 1, 0) {{
  TS_ENTER(32)
  TS_OUT(double, y0, 0)
  TS_TILES(t, {tiles - 1}, {sharing}, {stride}) {{
    double a[{count}];
    TS_SHARES(h, {sharing}, {stride}) {{
      TS_EACH(q, {count}) a[q] = 1e4 * t + q + (double)(1LL << (h % 48)) + h / 48;
    }}
    TS_TILE_JOIN(double, a, {count}, {sharing}, {stride}, 0){own}
  }}
}}""", tiles - 1, count, parts


@pytest.mark.parametrize("meaning", [m for m in MEANINGS if m != "host"])
def test_sums_of_tiles(meaning):
    """Each is written once, by whatever number of threads it is shared, and holds what all of them had."""
    cases = [(s, w, each, items) for s in (1, 2, 8, 16, 64, 256) for w in (1, 4, 16, 32, 128) if s * w <= 256
             for each, items in ((1, 1), (3, 1), (4, 3), (16, 1), (12, 2))]
    made = {case: sums_of_tiles(*case) for case in cases}
    code = host.compile_text(MEANINGS[meaning] + "\n".join(text for text, *_ in made.values()))
    for (sharing, stride, each, items), (_, tiles, count, parts) in made.items():
        step = KernelStep(f"tile_{sharing}_{stride}_{each}_{items}", (0,), (), 1, parts, 1)
        program = Program([Buffer("output", 0, "float64", (tiles, count))], [step], {}, [], code=code)
        (got,) = host.run(program, [])
        h = np.arange(sharing)
        own = (2.0 ** (h % 48) + h // 48).sum()
        want = sharing * (1e4 * np.arange(tiles)[:, None] + np.arange(count)) + own
        np.testing.assert_array_equal(got, want, err_msg=f"{sharing} {stride} {each} {items}")


def drawn(graph: Graph, sizes: dict[str, int], seed: int) -> list[np.ndarray]:
    """Inputs of given sizes; integers are 0 or 1, so that they can be indices."""
    return [x % 2 if x.dtype.kind in "iu" else x for x in random_inputs(graph, seed, sizes)]


def agrees(graph: Graph, program: Program, inputs: list[np.ndarray], what: str) -> None:
    is_near(graph, inputs, host.run(program, inputs, EACH), what)


def is_near(graph: Graph, inputs: list[np.ndarray], got: list[np.ndarray], what: str) -> None:
    for w, g in zip(interp.run(graph, inputs), got, strict=True):
        bound = (0.1 if w.dtype.itemsize < 4 else 1e-3) * max(float(np.abs(w.astype(np.float64)).max(initial=0)), 1e-3)
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=0, atol=bound, err_msg=what)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("meaning", MEANINGS)
def test_random_products(meaning, target):
    cases = [random_product(seed) for seed in range(70_000, 70_024)]
    for case, program in zip(cases, programs([c.graph for c in cases], meaning, TARGETS[target]), strict=True):
        for trial in range(4):
            inputs = case.inputs(trial)
            case.check(interp.run(case.graph, inputs), host.run(program, inputs, EACH))


@pytest.mark.parametrize("meaning", MEANINGS)
def test_random_graphs(meaning):
    cases = [random_case(seed) for seed in range(71_000, 71_030)]
    compared = 0
    for case, program in zip(cases, programs([c.graph for c in cases], meaning), strict=True):
        for trial in range(3):
            inputs = random_inputs(case.graph, trial)
            if (found := reference(case.graph, inputs)) is not None:
                assert_matches(case, found[1], host.run(program, inputs, EACH), slack=2.0)
                compared += 1
    assert compared > len(cases)


def depthwise(batch, size, channels, window, stride, padding) -> Graph:
    """A depthwise convolution, and a pool of its image."""
    b = Builder()
    x, w = b.param((batch, *size, channels), "float32", "x"), b.param((window, window, 1, channels), "float32", "w")
    y = b.conv(x, w, [stride, stride], [padding, padding], [1, 1], channels)
    return b.finish([y, b.window("max", x, [2, 2], [2, 2], [(0, 0), (0, 0)])], "depthwise")


@pytest.mark.parametrize("meaning", MEANINGS)
def test_windows_side_by_side(meaning):
    """Threads that fold several windows at a time: all of a row, of a column, a part of them, or one."""
    graphs = [depthwise(*case) for case in (
        (None, (7, 7), 64, 5, 1, (2, 2)), (3, (14, 14), 40, 5, 1, (2, 2)), (2, (12, 28), 16, 3, 2, (0, 1)),
        (9, (28, 9), 33, 3, 1, (1, 1)), (2, (9, 5), 5, 3, 1, (0, 0)), (40, (14, 2), 8, 3, 1, (1, 1)))]
    found = programs(graphs, meaning)
    counts = {int(n) for p in found for n in re.findall(r"TS_EACH\(u, (\d+)\)", p.text)}
    assert {1, 7} <= counts
    for graph, program in zip(graphs, found, strict=True):
        for batch in (1, 2, 19) if graph.symbols else (1,):
            inputs = drawn(graph, dict.fromkeys(graph.symbols, batch), 3)
            agrees(graph, program, inputs, f"{graph.params[0].shape}, {batch}")


def attention(batch=None, length=40, width=32, dtype="float32") -> Graph:
    """A layer of a transformer: products, masked softmax, residual sum, layer norm, two products."""
    b = Builder()
    x, mask = b.param((batch, length, width), dtype, "x"), b.param((batch, length), dtype, "mask")

    def dense(x, units, name):
        w, bias = b.param((x.shape[-1], units), dtype, name), b.param((units,), dtype, f"{name} bias")
        y = b.dot(x, w, contract=((x.rank - 1,), (0,)))
        return b.ew("add", y, b.broadcast_to(bias, y.shape))

    q, k, v = (dense(x, width, name) for name in "qkv")
    scores = b.dot(q, k, ((0,), (0,)), ((2,), (2,)))
    hidden = b.broadcast_to(b.reshape(b.ew("mul", mask, -100.0), (x.shape[0], 1, length)), scores.shape)
    y = b.dot(soft(b, b.ew("add", b.ew("mul", scores, width ** -0.5), hidden)), v, ((0,), (0,)), ((2,), (1,)))
    x = chains._norm(b, b.ew("add", x, y), width)
    return b.finish([x, dense(b.ew("tanh", dense(x, 2 * width, "up")), width, "down")], "attention")


def masked_attention(batch=None, heads=2, length=40, depth=8, dtype="float32") -> Graph:
    """Attention whose mask is computed once for all rows of a block."""
    b = Builder()
    q, k, v = (b.param((batch, heads, length, depth), dtype, name) for name in "qkv")
    mask = b.param((batch, length), dtype, "mask")
    scores = b.dot(q, k, ((0, 1), (0, 1)), ((3,), (3,)))
    hidden = b.ew("log", b.ew("add", b.ew("mul", mask, mask), 1.0))
    hidden = b.broadcast_to(b.reshape(hidden, (mask.shape[0], 1, 1, length)), scores.shape)
    shares = soft(b, b.ew("sub", scores, hidden))
    return b.finish([b.dot(shares, v, ((0, 1), (0, 1)), ((3,), (2,)))], "masked_attention")


def decode_step(batch=None, heads=3, places=80, depth=16, dtype="float32") -> Graph:
    """Attention of one new word of each row: its key and value are put into caches, which are results too."""
    b = Builder()
    q, k, v = (b.param((batch, heads, depth), dtype, name) for name in "qkv")
    keys, values = (b.param((batch, heads, places, depth), dtype, name) for name in ("keys", "values"))
    shape = (q.shape[0], heads, places, depth)
    here = b.ew("eq", b.iota((places,), 0, "int32"), b.broadcast_to(b.param((), "int32", "place"), (places,)))

    def put(new, cache):
        new = b.broadcast_to(b.reshape(new, (*shape[:2], 1, depth)), shape)
        return b.ew("select", b.broadcast_to(b.reshape(here, (places, 1)), shape), new, cache)

    keys, values = put(k, keys), put(v, values)
    shares = soft(b, b.dot(q, keys, ((0, 1), (0, 1)), ((2,), (3,))))
    return b.finish([keys, values, b.dot(shares, values, ((0, 1), (0, 1)), ((2,), (2,)))], "decode_step")


def recurrent(batch=None, steps=4, width=12, units=20, dtype="float32") -> Graph:
    """The steps of an LSTM."""
    b = Builder()
    xs = b.param((batch, steps, width), dtype, "x")
    n = xs.shape[0]
    w, bias = b.param((width + units, 4 * units), dtype, "w"), b.param((4 * units,), dtype, "bias")
    h, c = (b.broadcast_to(b.const(0.0, dtype), (n, units)) for _ in range(2))
    for t in range(steps):
        x = b.reshape(b.slice(xs, (0, t, 0), (n, 1, width)), (n, width))
        z = b.dot(b.concat([x, h], 1), w, contract=((1,), (0,)))
        z = b.ew("add", z, b.broadcast_to(bias, z.shape))
        i, f, g, o = (b.slice(z, (0, k * units), (n, units)) for k in range(4))
        c = b.ew("add", b.ew("mul", b.ew("sigmoid", f), c), b.ew("mul", b.ew("sigmoid", i), b.ew("tanh", g)))
        h = b.ew("mul", b.ew("sigmoid", o), b.ew("tanh", c))
    return b.finish([h, c], "recurrent")


def turned_norm(batch=None, size=12, channels=8, dtype="float32") -> Graph:
    """Images whose channels are turned to the front, normalised by channel, ReLU, turned back; all of it is kept, as
    a training step does."""
    b = Builder()
    x = b.param((batch, size, size, channels), dtype, "x")
    y = b.transpose(x, (0, 3, 1, 2))

    def average(v):
        return b.ew("mul", b.reduce("sum", v, (2, 3)), size ** -2)

    def spread(v):
        return b.broadcast_to(b.reshape(v, (*y.shape[:2], 1, 1)), y.shape)

    mean = average(y)
    d = b.ew("sub", y, spread(mean))
    variance = average(b.ew("mul", d, d))
    z = b.ew("max", b.ew("mul", d, spread(b.ew("rsqrt", b.ew("add", variance, 1e-3)))), 0.0)
    return b.finish([y, mean, variance, z, b.transpose(z, (0, 2, 3, 1))], "turned_norm")


def channel_norm(batch=None, size=6, channels=8, dtype="float32") -> Graph:
    """Statistics of few channels, as batch normalisation has them; their ends, and whether all of it is finite."""
    b = Builder()
    x = b.param((batch, size, size - 1, channels), dtype, "x")
    each = (0, 1, 2)
    mean = b.ew("mul", b.reduce("sum", x, each), 0.01)
    d = b.ew("sub", x, b.broadcast_to(mean, x.shape))
    spread = b.reduce("sum", b.ew("mul", d, d), each)
    ends = [b.reduce(kind, b.ew("mul", d, 0.5), each) for kind in ("max", "min")]
    finite = b.reduce("and", b.ew("is_finite", b.transpose(x, (3, 1, 2, 0))), (0, 1, 2, 3))
    return b.finish([b.ew("mul", d, b.broadcast_to(spread, x.shape)), *ends, finite], "channel_norm")


def graph_attention(nodes=None, edges=None, heads=2, depth=20) -> Graph:
    """Softmax over the edges that end at a node, and the sum of what they bring."""
    b = Builder()
    x, w = b.param((nodes, heads * depth), "float32", "x"), b.param((heads * depth, heads), "float32", "w")
    source, to = (b.param((edges,), "int32", name) for name in ("source", "to"))
    n, order = x.shape[0], b.order(to)
    starts = b.search(b.gather(to, order), b.iota((n + 1,), 0, "int32"))

    def over_edges(kind, values):
        return b.segment(kind, b.gather(values, order), starts)

    def at_end(values):
        return b.gather(values, to, mode="zero")

    score = b.dot(x, w, contract=((1,), (0,)))
    score = b.ew("add", b.gather(score, source, mode="zero"), at_end(score))
    e = b.ew("exp", b.ew("sub", score, at_end(over_edges("max", score))))
    share = b.ew("div", e, at_end(over_edges("sum", e)))
    rows = b.reshape(b.gather(x, source, mode="zero"), (source.shape[0], heads, depth))
    y = over_edges("sum", b.ew("mul", rows, b.broadcast_to(b.reshape(share, (*share.shape, 1)), rows.shape)))
    return b.finish([b.ew("tanh", y), b.dot(b.reshape(y, x.shape), w, contract=((1,), (0,)))], "graph_attention")


MODELS = {"attention": attention, "half attention": lambda: attention(dtype="float16"),
          "masked attention": masked_attention, "half masked attention": lambda: masked_attention(dtype="bfloat16"),
          "decode step": decode_step, "half decode step": lambda: decode_step(dtype="float16"),
          "recurrent": recurrent, "channel norm": channel_norm,
          "half channel norm": lambda: channel_norm(dtype="float16"), "turned norm": turned_norm,
          "graph attention": graph_attention,
          "masked softmax": chains.masked_softmax, "small attention": chains.small_attention,
          "norm, gelu, softmax": chains.norm_gelu_softmax, "norm backward": chains.norm_backward,
          "embedding": chains.embedding_sum_norm, "cross entropy": chains.cross_entropy}


@pytest.mark.parametrize("meaning", MEANINGS)
def test_models(meaning):
    graphs = [make() for make in MODELS.values()]
    for name, graph, program in zip(MODELS, graphs, programs(graphs, meaning), strict=True):
        for size in (1, 2, 9, 17, 65):
            first, *others = graph.symbols
            sizes = {first: size} | dict.fromkeys(others, 5)
            agrees(graph, program, drawn(graph, sizes, zlib.crc32(name.encode()) + size), f"{name} {sizes}")


@pytest.mark.parametrize("meaning", MEANINGS)
def test_all_threads_fold_few_channels(meaning):
    """However few there are: the groups of threads share what one would fold alone.  NaN stays in its channel."""
    sizes = [(batch, n) for batch in (1, 20) for n in (1, 2, 3, 8, 20, 33)]
    made = programs([channel_norm(batch, channels=n) for batch, n in sizes], meaning)
    for (batch, n), program in zip(sizes, made, strict=True):
        if n >= 8:
            assert all(f"TS_GATHER({fold}, " in program.text for fold in ("SUM", "MAX", "MIN", "AND"))
        graph = channel_norm(batch, channels=n)
        (x,) = random_inputs(graph, batch)
        agrees(graph, program, [x], f"{x.shape}")
        x[batch // 2, 3, 1, -1] = np.nan
        for w, g in zip(interp.run(graph, [x]), host.run(program, [x], EACH), strict=True):
            np.testing.assert_array_equal(np.isnan(g), np.isnan(w))


@pytest.mark.parametrize("meaning", MEANINGS)
def test_orders(meaning):
    """Rows of few and of many elements, one row and several; which elements are equal does not depend on rounding."""
    b, made = Builder(), []
    for shape in ((None,), (None, 5), (3, 300), (None, None)):
        x = b.param(shape, "int32")
        made.append(b.order(x))
    graph = b.finish(made, "orders")
    (program,) = programs([graph], meaning)
    for seed, size in enumerate((0, 1, 2, 7, 33, 260)):
        inputs = [x % 7 for x in random_inputs(graph, seed, dict.fromkeys(graph.symbols, size))]
        for w, g in zip(interp.run(graph, inputs), host.run(program, inputs, EACH), strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("op", ["segment", "search"])
def test_no_block_computes_a_table_that_may_be_long(op):
    """A row of it that is looked up is made by another kernel, unless there are few of them."""
    for size, alone in ((None, True), (9, False)):
        b = Builder()
        x, starts = b.param((size, 4), "float32"), b.param((None,), "int32")
        total = b.reduce("sum", x, [1])
        found = b.segment("max", total, starts) if op == "segment" else b.search(total, b.cast(starts, "float32"))
        graph = b.finish([found, total], op)
        if alone:
            with pytest.raises(Unschedulable, match="would compute all of"):
                build(whole(graph), CUDA)
        else:
            assert build(whole(graph), CUDA).parts


@pytest.mark.skipif(len(MEANINGS) == 1, reason="threads are run on x86-64 only")
def test_a_missing_barrier_is_seen(monkeypatch):
    graph = MODELS["small attention"]()
    (program,) = programs([graph], "host")
    for k in range(2):
        code = host.compile_text(MEANINGS[f"threads in order {k}"] + program.text.replace("TS_BARRIER", ""))
        with pytest.raises(AssertionError):
            agrees(graph, replace(program, code=code), drawn(graph, dict.fromkeys(graph.symbols, 3), 1), "")


def used_together(part: Part) -> Iterator[set[Node]]:
    """The staged values that the stages between two barriers read and write; a row chain has none inside."""
    chained = {id(s) for c in part.chains for s in c.stages}
    for stages in (*(c.stages for c in part.chains), *([s] for s in part.stages if id(s) not in chained)):
        yield {n for s in stages for n in (*s.reads, *(i.node for i in s.items)) if n in part.slots}


def span(part: Part, n: Node) -> tuple[int, int]:
    """Where a staged value begins and ends in shared memory."""
    slot = part.slots[n]
    start = D.static(slot.offset)
    return start, start + D.static(D.product(slot.room)) * compute_size(n)


def test_values_that_are_used_together_lie_apart():
    most = 0
    for graph in (masked_attention(), masked_attention(length=96), chains.small_attention(length=64)):
        for part in build(whole(graph), CUDA).parts:
            assert part.chains
            for nodes in used_together(part):
                most = max(most, len(nodes))
                spans = sorted(span(part, n) for n in nodes)
                assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), graph.name
    assert most > 2
