"""Training steps of networks of convolutions, rewritten for a GPU: one program each, with TensorFlow's numbers.

No GPU is needed: the program's kernels get the host's meaning, its library steps NumPy's.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from tests.codegen.test_programs import EACH, MEANINGS
from tests.ways_in.graphs import build, run, stitched
from tf_stitch import compiler
from tf_stitch.backend import host
from tf_stitch.graph.rewriter import rewrite
from tf_stitch.options import Options
from tf_stitch.program import serialize
from tf_stitch.program.program import LibraryStep, Program

v1 = tf.compat.v1
Layer = Callable[[tf.Tensor, Callable[..., tf.Tensor]], tf.Tensor]


@pytest.fixture(autouse=True)
def no_machine_code(monkeypatch):
    monkeypatch.setattr(compiler, "compile_texts", lambda texts, *args, **kwargs: {t: {} for t in texts})


def plain(x, weight):
    x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, weight(3, 3, 3, 16), 1, "VALID") + weight(16)), 2, 2, "VALID")
    return tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, weight(3, 3, 16, 24), 1, "SAME") + weight(24)), 3, 2, "SAME")


def strided(x, weight):
    y = tf.nn.relu(tf.nn.conv2d(x, weight(5, 5, 3, 16), 2, "SAME"))
    y = tf.nn.conv2d(y, weight(1, 1, 16, 32), 1, "SAME") + tf.nn.conv2d(y, weight(3, 3, 16, 32), 1, "SAME")
    y = v1.nn.fused_batch_norm(y, weight(32), weight(32), is_training=True)[0]
    return tf.nn.avg_pool2d(tf.nn.relu(tf.nn.conv2d(y, weight(3, 3, 32, 16), 2, "VALID")), 3, 1, "SAME")


def depthwise(x, weight):
    x = tf.nn.conv2d(x, weight(3, 3, 3, 12), 2, "SAME")
    x = tf.nn.relu(tf.nn.depthwise_conv2d(x, weight(3, 3, 12, 1), [1, 1, 1, 1], "SAME"))
    return tf.nn.depthwise_conv2d(x, weight(3, 3, 12, 2), [1, 2, 2, 1], "SAME")


def dropped(x, weight):
    """Dropout between a convolution and a pool, and of what the pool gives."""
    y = tf.nn.conv2d(x, weight(3, 3, 3, 8), 1, "SAME")
    y = tf.nn.max_pool2d(tf.nn.relu(tf.nn.experimental.stateless_dropout(y, 0.2, [3, -7])), 2, 2, "VALID")
    return tf.nn.conv2d(tf.nn.experimental.stateless_dropout(y, 0.5, [4, 5]), weight(3, 3, 8, 4), 1, "SAME")


def resized(x, weight):
    y = tf.image.resize(tf.nn.conv2d(x, weight(3, 3, 3, 6), 2, "SAME"), (18, 17))
    return tf.image.resize(tf.nn.conv2d(y, weight(3, 3, 6, 4), 1, "SAME"), (7, 5), method="nearest")


def training_step(layers: Layer, batch: int | None, dtype: str):
    """(graph, feeds for a batch): new weights of a network whose loss is a mean of squares."""
    shapes: list[tuple[int, ...]] = []

    def model():
        x = v1.placeholder(dtype, [batch, 18, 17, 3], name="x")

        def weight(*shape):
            shapes.append(shape)
            weights.append(v1.placeholder(dtype, shape, name=f"w{len(shapes) - 1}"))
            tape.watch(weights[-1])
            return weights[-1]

        weights: list[tf.Tensor] = []
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layers(x, weight)))
        for i, (w, g) in enumerate(zip(weights, tape.gradient(loss, weights), strict=True)):
            tf.subtract(w, 0.1 * g, name=f"new{i}")

    graph = build(model)

    def feeds(rows: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(rows)
        as_type = tf.as_dtype(dtype).as_numpy_dtype
        return {"x:0": rng.standard_normal((rows, 18, 17, 3)).astype(as_type),
                **{f"w{i}:0": (rng.standard_normal(s) * 0.3).astype(as_type) for i, s in enumerate(shapes)}}

    return graph, feeds, [f"new{i}:0" for i in range(len(shapes))]


def calls(program: Program) -> list[str]:
    return [s.call for s in program.steps if isinstance(s, LibraryStep)]


@pytest.mark.parametrize("layers,gradients", [(plain, 2), (strided, 4), (depthwise, 1), (dropped, 2),
                                              (resized, 1)])
@pytest.mark.parametrize("batch", [None, 6])
def test_a_training_step_is_one_program(layers, gradients, batch):
    graph, feeds, outputs = training_step(layers, batch, "float32")
    out, report = rewrite(graph, Options(target="cuda:sm_90", keep=tuple(o[:-2] for o in outputs)))
    (node,) = stitched(out)
    assert {n.op for g in report.graphs for n in g.left} <= {"ZerosLike"}  # of what batch normalisation reserves: dead
    program = serialize.loads(node.attr["program"].s)
    assert calls(program).count("conv_filter") % gradients == 0 < calls(program).count("conv_filter")  # in each plan
    for rows in (1, 6) if batch is None else (batch,):
        agree(graph, feeds(rows), outputs, node, program, 2e-4)


@pytest.mark.parametrize("dtype,tolerance", [("float16", 2e-2), ("bfloat16", 1e-1)])
def test_half_types(dtype, tolerance):
    graph, feeds, outputs = training_step(plain, None, dtype)
    out, _ = rewrite(graph, Options(target="cuda:sm_90", keep=tuple(o[:-2] for o in outputs)))
    (node,) = stitched(out)
    agree(graph, feeds(4), outputs, node, serialize.loads(node.attr["program"].s), tolerance)


@pytest.mark.parametrize("layers", [plain, strided, depthwise, dropped])
@pytest.mark.parametrize("meaning", [m for m in MEANINGS if m != "host"])
def test_thread_by_thread(layers, meaning, monkeypatch):
    """A block's threads in several orders: where a barrier is missing, one of them is wrong."""
    monkeypatch.setattr(host, "HOST_FLAGS", (*(f for f in host.HOST_FLAGS if f not in ("-O3", "-fopenmp-simd")), "-O1"))
    graph, feeds, outputs = training_step(layers, None, "float32")
    out, _ = rewrite(graph, Options(target="cuda:sm_90", keep=tuple(o[:-2] for o in outputs)))
    (node,) = stitched(out)
    program = serialize.loads(node.attr["program"].s)
    by_threads = replace(program, code=host.compile_text(MEANINGS[meaning] + program.text))
    for rows in (1, 3):
        agree(graph, feeds(rows), outputs, node, by_threads, 2e-4, EACH)


def agree(graph, feeds, outputs, node, program, tolerance, shards: int = 1) -> None:
    """The program's outputs are TensorFlow's."""
    inputs = [feeds[name if ":" in name else f"{name}:0"] for name in node.input if not name.startswith("^")]
    got = host.run(program, inputs, shards)
    for name, want in zip(outputs, run(graph, outputs, feeds), strict=True):
        found = [g for g in got if g.shape == want.shape and np.abs(g.astype(float) - want.astype(float)).max(
            initial=0) <= tolerance * max(1.0, np.abs(want.astype(float)).max())]
        assert found, f"{name} is not among the program's outputs"
