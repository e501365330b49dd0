"""Rewriting for a GPU, on a machine that needs none: what joins clusters, what stays on the host, what runs instead."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.graph.test_fused import fused
from tests.ways_in.graphs import build, run, stitched
from tf_stitch import compiler, hook
from tf_stitch.graph import devices
from tf_stitch.graph.rewriter import rewrite
from tf_stitch.ir import dims as D
from tf_stitch.options import Options
from tf_stitch.program import serialize
from tf_stitch.program.program import LibraryStep

GPU = Options(target="cuda:sm_90")
v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def no_machine_code(monkeypatch):
    """Machine code is not what these tests are about; without it the op runs the original nodes."""
    monkeypatch.setattr(compiler, "compile_texts", lambda texts, *args, **kwargs: {t: {} for t in texts})


def for_gpu(fn: Callable[[], object], options: Options = GPU):
    """(original graph, rewritten graph, report) of what ``fn`` adds to an empty graph."""
    graph = build(fn)
    return graph, *rewrite(graph, options)


def program_of(node):
    return serialize.loads(node.attr["program"].s)


def test_products_join_and_the_original_runs_on_a_cpu():
    def model():
        x = v1.placeholder(tf.float32, [None, 300], name="x")
        w = v1.placeholder(tf.float32, [300, 1000], name="w")
        h = tf.nn.gelu(tf.matmul(x, w) + 1.0)
        tf.nn.softmax(tf.matmul(h, w, transpose_b=True), name="y")

    graph, out, report = for_gpu(model)
    (node,) = stitched(out)
    program = program_of(node)
    (rows,) = program.symbols
    calls = {count: sum(isinstance(s, LibraryStep) and all(D.evaluate(d, {rows: count}) for d in s.dims)
                        for s in program.steps) for count in (1, 40, 1000)}
    assert calls == {1: 0, 40: 2, 1000: 2}  # those of few rows are kernels'; one plan runs
    assert not [n for g in report.graphs for n in g.left]
    rng = np.random.default_rng(0)
    feeds = {"x:0": rng.standard_normal((5, 300), np.float32), "w:0": rng.standard_normal((300, 1000), np.float32)}
    np.testing.assert_allclose(run(out, ["y:0"], feeds)[0], run(graph, ["y:0"], feeds)[0], rtol=1e-4, atol=1e-6)


def test_placement_decides():
    def two():
        x = v1.placeholder(tf.float32, [8, 8], name="x")
        with tf.device("/device:CPU:0"):
            a = tf.tanh(tf.exp(x) + 1.0)
        with tf.device("/device:GPU:0"):
            tf.tanh(tf.exp(a) * 2.0, name="y")

    _, out, report = for_gpu(two)
    (node,) = stitched(out)
    assert devices.is_gpu(node.device)
    assert any("the target is the GPU" in n.reason for g in report.graphs for n in g.left)


def test_sizes_of_what_lies_on_the_host_join():
    """TensorFlow places the Size of an integer argument on the CPU; it reads no data, so its place does not matter."""
    def two():
        x = v1.placeholder(tf.float32, [None, 8], name="x")
        i = v1.placeholder(tf.int32, [None], name="i")
        with tf.device("/device:CPU:0"):
            n = tf.size(i, name="n")
        with tf.device("/device:GPU:0"):
            tf.exp(x) / tf.cast(n, tf.float32) + tf.cast(i, tf.float32)[:, None]

    _, out, report = for_gpu(two)
    (node,) = stitched(out)
    assert len(node.input) == 2 and not [n for n in out.node if n.op == "Size"]
    assert not [n for g in report.graphs for n in g.left]


def test_what_tensorflow_can_only_do_on_a_cpu_joins():
    """TensorFlow has no kernel of these for a GPU, so it puts them on the CPU; a program computes them where it is."""
    def model(nearby: str):
        x = v1.placeholder(tf.float32, [4, 6], name="x")
        w = v1.placeholder(tf.int32, [6, 3], name="w")
        with tf.device(nearby):
            q = tf.cast(tf.round(x * 20.0), tf.int32)
        with tf.device("/device:CPU:0"):
            top, bottom = tf.split(tf.matmul(q, w), 2)
            best = tf.argmax(bottom, 1)
        with tf.device(nearby):
            tf.tanh(tf.cast(top, tf.float32) + tf.cast(best, tf.float32)[:, None], name="y")

    _, out, report = for_gpu(lambda: model("/device:GPU:0"))
    (node,) = stitched(out)
    assert devices.is_gpu(node.device) and len(node.input) == 2
    assert not [n for g in report.graphs for n in g.left]
    _, out, _ = for_gpu(lambda: model(""))
    assert {"MatMul", "Split", "ArgMax"} <= {n.op for n in out.node}  # nothing near them is on a GPU


def test_auto_is_the_host_without_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "gpu_target", lambda: None)
    assert devices.resolve(Options(), []).target == "host"
    monkeypatch.setattr(devices, "gpu_target", lambda: "cuda:sm_90")
    assert devices.resolve(Options(), []).target == "cuda:sm_90"
    assert devices.resolve(Options(), ["/device:CPU:0"]).target == "host"
    assert devices.resolve(Options(), ["/device:CPU:0", "/device:GPU:0"]).target == "cuda:sm_90"
    assert devices.resolve(Options(target="host"), ["/device:GPU:0"]).target == "host"


def test_integers_that_tensorflow_reads_on_the_host_stay():
    def loop():
        n = v1.placeholder(tf.int32, [], name="n")
        x = v1.placeholder(tf.float32, [None], name="x")
        count = tf.abs(n + 3) * 2  # feeds a shape that TensorFlow's op reads
        noise = tf.random.uniform([count])
        tf.identity(tf.tanh(tf.exp(x) + 1.0), name="y")
        tf.identity(noise, name="z")

    _, out, _ = for_gpu(loop)
    kept = {n.op for n in out.node}
    assert {"Abs", "Mul", "Pack", "RandomUniform"} <= kept
    assert {"Exp", "Tanh"}.isdisjoint(kept)
    assert not any(i.split(":")[0] == "n" for node in stitched(out) for i in node.input)


def test_sizes_in_an_input_are_read_on_the_host():
    def model(twice: bool):
        x = v1.placeholder(tf.float32, [None], name="x")
        n = v1.placeholder(tf.int32, [1], name="n")
        y = tf.tile(tf.exp(x)[None, :], tf.concat([n, [1]], 0)) + 1.0
        if twice:
            y = y * tf.cast(n, tf.float32)
        tf.tanh(y, name="y")

    for twice in (False, True):
        graph, out, _ = for_gpu(lambda twice=twice: model(twice))
        (node,) = stitched(out)
        host = list(node.attr["_input_hostmem"].list.i)
        program = program_of(node)
        assert host == sorted({s.param for s in program.symbols.values() if s.kind == "value"})
        ids = {i for i, b in enumerate(program.buffers) if b.kind == "input" and b.index in host}
        assert not any(ids & set(getattr(s, "buffers", ())) for s in program.steps)
        assert [i.split(":")[0] for i in node.input].count("n") == 1 + twice
        feeds = {"x:0": np.ones(4, np.float32), "n:0": np.array([3], np.int32)}
        np.testing.assert_allclose(run(out, ["y:0"], feeds)[0], run(graph, ["y:0"], feeds)[0], rtol=1e-5)


def test_gathers_from_variables_that_are_only_read_join(monkeypatch):
    class Model(tf.Module):
        def __init__(self):
            self.table = tf.Variable(np.arange(40, dtype=np.float32).reshape(10, 4))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
        def read(self, ids):
            return tf.tanh(tf.gather(self.table, ids)) + 1.0

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
        def write(self, ids):
            y = tf.tanh(tf.gather(self.table, ids)) + 1.0
            self.table.scatter_sub(tf.IndexedSlices(y, ids))
            return y

    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
    model, plain, ids = Model(), Model(), tf.constant([1, 3, 3])
    want = [np.asarray(getattr(plain, name)(ids)) for name in ("read", "write")]
    tf_stitch.enable(GPU)
    try:
        for name, expected, kept in zip(("read", "write"), want, (False, True), strict=True):
            np.testing.assert_allclose(getattr(model, name)(ids), expected, rtol=1e-6)
            graph = hook.reports()[-1][1].graphs[0]
            assert len(graph.clusters) == 1
            assert any(n.op == "ResourceGather" for n in graph.left) == kept
    finally:
        tf_stitch.disable()


def test_a_network_of_convolutions_is_one_program():
    def model():
        x = v1.placeholder(tf.float32, [2, 20, 20, 3], name="x")
        for i, (size, channels) in enumerate([(3, 32), (3, 64), (1, 64)]):
            w = v1.placeholder(tf.float32, [size, size, x.shape[-1], channels], name=f"w{i}")
            scale, shift, mean, variance = (v1.placeholder(tf.float32, [channels], name=f"v{i}{j}") for j in range(4))
            y = tf.nn.conv2d(x, w, 2 if i == 1 else 1, "SAME")
            y = v1.nn.fused_batch_norm(y, scale, shift, mean, variance, is_training=False)[0]
            x = tf.nn.max_pool2d(tf.nn.relu(y), 2, 1, "VALID")
        d = v1.placeholder(tf.float32, [3, 3, 64, 1], name="d")
        tf.identity(tf.nn.avg_pool2d(tf.nn.depthwise_conv2d(x, d, [1, 1, 1, 1], "SAME"), 2, 2, "SAME"), name="y")

    graph, out, report = for_gpu(model)
    (node,) = stitched(out)
    assert [s.call for s in program_of(node).steps if isinstance(s, LibraryStep)][:2] == ["conv", "conv"]
    assert not [n for g in report.graphs for n in g.left]
    rng = np.random.default_rng(0)
    feeds = {f"{n.name}:0": rng.uniform(0.1, 1.0, [d.size for d in n.attr["shape"].shape.dim]).astype(np.float32)
             for n in graph.node if n.op == "Placeholder"}
    np.testing.assert_allclose(run(out, ["y:0"], feeds)[0], run(graph, ["y:0"], feeds)[0], rtol=1e-4)


def test_measurements_can_be_turned_off():
    def model():
        tf.tanh(v1.placeholder(tf.float32, [8], name="x") + 1.0, name="y")

    for options, want in ((GPU, False), (Options(target="cuda:sm_90", autotune=False), True)):
        (node,) = stitched(for_gpu(model, options)[1])
        assert ("_autotune" in node.attr) == want


def test_what_grapplers_remapper_makes_of_batch_normalisation():
    def model():
        x = v1.placeholder(tf.float32, [1, 28, 28, 64], name="x")
        w = v1.placeholder(tf.float32, [3, 3, 64, 64], name="w")
        vectors = [v1.placeholder(tf.float32, [64], name=f"v{i}") for i in range(4)]
        for _ in range(2):
            x = v1.nn.fused_batch_norm(tf.nn.conv2d(x, w, 1, "SAME"), *vectors, is_training=False)[0]
        tf.identity(x, name="y")

    graph = build(model)
    for n in graph.node:
        if n.op == "FusedBatchNormV3":
            n.op, n.attr["activation_mode"].s, n.attr["num_side_inputs"].i = "_FusedBatchNormEx", b"Relu", 0
    out, report = rewrite(graph, GPU)
    (node,) = stitched(out)
    assert [s.flags[:4] for s in program_of(node).steps if isinstance(s, LibraryStep)] == [(1, 0, 1, 1)] * 2
    assert not [n for g in report.graphs for n in g.left]


def test_what_grapplers_remapper_makes_of_convolutions():
    def model():
        x, w, b = (v1.placeholder(tf.float32, s, name=n) for n, s in (
            ("x", [1, 28, 28, 64]), ("w", [3, 3, 64, 64]), ("b", [64])))
        for _ in range(2):
            x = fused("_FusedConv2D", ["BiasAdd", "Relu"], x, w, b, strides=[1, 1, 1, 1], padding="SAME",
                      dilations=[1, 1, 1, 1])
        tf.identity(x, name="y")

    _, out, report = for_gpu(model)
    (node,) = stitched(out)
    assert [s.flags[:3] for s in program_of(node).steps if isinstance(s, LibraryStep)] == [(1, 0, 1)] * 2
    assert not [n for g in report.graphs for n in g.left]


@pytest.mark.parametrize("writes", [False, True])
def test_turned_reductions_join_programs(writes):
    """In training steps too."""
    def model():
        x = v1.placeholder(tf.float32, [None, 8, 12, 12], name="x")
        axes = tf.raw_ops.DataFormatDimMap(x=tf.constant([0, 1, 2]), src_format="NHWC", dst_format="NCHW")
        mean = tf.reduce_mean(tf.exp(x) + 1.0, axes)
        tf.tanh(mean * 2.0, name="y")
        if writes:
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[8])
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.sqrt(mean) + 1.0)

    for options in (GPU, Options(target="host")):
        _, out, _ = for_gpu(model, options)
        assert stitched(out)
        assert not any(n.op in ("Mean", "DataFormatDimMap") for n in out.node)


def test_the_shape_of_a_pooled_image_is_computed_where_its_gradient_reads_it():
    def model():
        x = v1.placeholder(tf.float32, [None, 12, 12, 8], name="x")
        shape = tf.shape(tf.exp(x) * 2.0)
        gradient = tf.nn.tanh(v1.placeholder(tf.float32, [None, 6, 6, 8], name="g") + 1.0)
        tf.raw_ops.AvgPoolGrad(orig_input_shape=shape, grad=gradient, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1],
                               padding="VALID", name="y")

    _, out, _ = for_gpu(model, Options(target="cuda:sm_90", skip_ops=("AvgPoolGrad",)))
    assert stitched(out)
    by_name = {n.name: n for n in out.node}
    pooled = next(n for n in out.node if n.op == "AvgPoolGrad")
    assert by_name[pooled.input[0].split(":")[0]].op == "Shape"


def test_folds_by_index_join_on_a_gpu_only():
    """On a CPU TensorFlow's kernels do less work."""
    def model():
        x, ids = v1.placeholder(tf.float32, [None, 8], name="x"), v1.placeholder(tf.int32, [None], name="ids")
        rows = tf.math.unsorted_segment_mean(tf.tanh(x), ids, 5)
        values, places = tf.math.top_k(tf.nn.softmax(rows), 2)
        tf.exp(values - tf.cast(places, tf.float32), name="y")

    graph, out, report = for_gpu(model)
    assert len(stitched(out)) == 1 and not [n for g in report.graphs for n in g.left]
    _, _, report = for_gpu(model, Options(target="host", levels=()))
    left = {n.op: n.reason for g in report.graphs for n in g.left}
    assert left["UnsortedSegmentSum"] == "op UnsortedSegmentSum is taken on a GPU only"
    assert left["TopKV2"] == "op TopKV2 is taken on a GPU only"
    feeds = {"x:0": np.arange(48, dtype=np.float32).reshape(6, 8) % 5, "ids:0": np.array([0, 4, 4, -1, 2, 0], np.int32)}
    np.testing.assert_allclose(run(out, ["y:0"], feeds)[0], run(graph, ["y:0"], feeds)[0], rtol=1e-5)
