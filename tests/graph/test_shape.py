"""Shapes computed in the graph: unknown dims, several sizes from one import, gradients of broadcasts."""
from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.graph.support import Case, imported, run_cases, session
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

SIZES = (3, 1, 17, 0)
raw = tf.raw_ops


def ramp(*shape: int) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 7 - 2.5).astype(np.float32).reshape(shape)


def batches(build, *rows: tuple[int, ...], tolerance: float = 4.0) -> Case:
    """A case whose first dim is unknown and runs at several sizes."""
    return Case(build, [[ramp(n, *r) for r in rows] for n in SIZES], [[None, *r] for r in rows], tolerance)


def test_computed_shapes():
    def attention(x):
        n, t = tf.shape(x)[0], tf.shape(x)[1]
        y = tf.reshape(x, tf.stack([n, t, 2, -1]))
        y = tf.transpose(y, [0, 2, 1, 3])
        return tf.reshape(tf.transpose(y, [0, 2, 1, 3]), tf.concat([tf.shape(x)[:-1], [8]], 0))

    cases = [
        batches(attention, (5, 8)),
        batches(lambda x: tf.reshape(x, [tf.shape(x)[0], tf.reduce_prod(tf.shape(x)[1:])]), (3, 4)),
        batches(lambda x: tf.reshape(x, [-1, tf.size(x[0])]), (3, 4)),
        batches(lambda x: tf.zeros(tf.shape(x)) + tf.cast(tf.shape(x)[0], tf.float32), (3,)),
        batches(lambda x: tf.zeros([tf.shape(x)[0] * 2, 3]), (3,)),
        batches(lambda x: tf.tile(x[:, None], [1, tf.shape(x)[1] - 1, 1]), (3,)),
        batches(lambda x: tf.broadcast_to(tf.range(tf.shape(x)[0])[:, None], [tf.shape(x)[0], 4]), (3,)),
        batches(lambda x: tf.range(tf.shape(x)[0] // 2 + 1), (3,)),
        batches(lambda x: tf.zeros([tf.size(x)[...]]), (3,)),  # a StridedSlice of a scalar
        batches(lambda x: tf.reduce_sum(x) / tf.cast(tf.maximum(tf.size(x), 1), tf.float32), (3,)),
        batches(lambda x: tf.fill(tf.concat([tf.shape(x)[:1], [2]], 0), 1.5), (3,)),
        batches(lambda x: tf.expand_dims(x, 1) * tf.ones(tf.stack([1, tf.shape(x)[1], 1])), (3,)),
        batches(lambda x: [tf.shape(x)[0] + 1, tf.shape(x) * 2, tf.cast(tf.size(x), tf.int64) - 1], (3,)),
        batches(lambda x: tf.reshape(tf.concat([x, x], 0), [2, tf.shape(x)[0], -1]), (3,)),
        batches(lambda x: tf.split(x, [1, tf.shape(x)[1] - 1], 1), (3,)),
        batches(lambda x: tf.concat([x, tf.zeros_like(x)[:, :1]], -1), (3,)),
        batches(lambda x: tf.where(tf.shape(x)[1] > 2, x, -x), (3,)),
        batches(lambda x: tf.tensordot(x, tf.ones([4, 5]), [[2], [0]]), (3, 4)),
        batches(lambda x, y: x + y, (3, 4), (1, 4)), batches(lambda x, y: x * y, (4,), (4,)),
        batches(lambda x: tf.linalg.band_part(x, -1, 0) + tf.eye(tf.shape(x)[1]), (4, 4)),
        batches(lambda x: tf.sequence_mask(tf.range(tf.shape(x)[0]), 6), (2,)),
        batches(lambda x: tf.image.flip_left_right(tf.pad(x, [[0, 0], [1, 1], [2, 2], [0, 0]])), (3, 2, 2)),
    ]
    tally = run_cases(cases, may_fall_back=True)
    assert tally.compared + tally.fell_back == len(cases) * len(SIZES)
    assert tally.fell_back <= 6  # an inferred -1 of an empty tensor is TensorFlow's to judge


def test_batch_sizes_never_fall_back():
    """Layers with an unknown batch run at every size, none and one included, from one import."""
    w, b = ramp(8, 4), ramp(4)

    def dense(x):
        return tf.nn.gelu(tf.nn.bias_add(tf.matmul(x, w), b))

    def norm(x):
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, ramp(8), ramp(8), 1e-3)

    cases = [batches(dense, (8,)), batches(norm, (8,)), batches(norm, (5, 8)),
             batches(lambda x: tf.nn.softmax(x), (8,)),
             batches(lambda x: tf.reshape(x, [-1, 2, 4])[:, 1], (8,)),
             batches(lambda x: tf.reduce_mean(x, [1, 2]), (2, 3)),
             batches(lambda x, y: tf.concat([x, y], 1) + 1.0, (2,), (3,))]
    assert run_cases(cases).compared == len(cases) * len(SIZES)


def gradients(build):
    """d(sum of squares)/d(every input), as autodiff writes it with unknown dims."""
    def with_gradients(*xs):
        y = build(*xs)
        return tf.gradients(tf.reduce_sum(y * y), list(xs))

    return with_gradients


def test_gradients_with_unknown_dims():
    cases = [
        batches(gradients(lambda x, y: x * y + x), (3, 4), (3, 4)),
        batches(gradients(lambda x, y: x - y), (3, 4), (1, 4)),
        batches(gradients(lambda x: tf.nn.relu(x) * tf.nn.sigmoid(x)), (3,)),
        batches(gradients(lambda x: tf.nn.softmax(x) / (tf.reduce_max(x, -1, keepdims=True) + 9)), (5,)),
        batches(gradients(lambda x: tf.reduce_mean(tf.tanh(x), 1)), (3, 4)),
        batches(gradients(lambda x: tf.reduce_sum(x, [0, 2])), (3, 4)),
        batches(gradients(lambda x: x[:, 1:] * x[:, :-1]), (4,)),
        batches(gradients(lambda x: tf.split(x, 2, 1)[1]), (4,)),
        batches(gradients(lambda x, y: tf.concat([x, y], 1)), (2,), (3,)),
        batches(gradients(lambda x: tf.transpose(x)), (4,)),
        batches(gradients(lambda x: tf.pad(x, [[0, 0], [1, 2]])), (4,)),
        batches(gradients(lambda x: tf.tile(x, [1, 3])), (2,)),
        batches(gradients(lambda x: tf.math.squared_difference(x, tf.reduce_mean(x, -1, keepdims=True))), (6,)),
        batches(gradients(lambda x: tf.matmul(x, ramp(4, 3))), (4,)),
        batches(gradients(lambda x: tf.nn.bias_add(x, ramp(4))), (4,)),
        batches(gradients(lambda x: tf.reshape(x, [-1, 2]) ** 2.0), (4,)), batches(gradients(tf.nn.elu), (4,)),
        batches(gradients(lambda x: tf.stack([x, x * 2], 1)), (3,)),
        batches(gradients(lambda x: tf.unstack(x, axis=1)[1]), (3,)),
        batches(gradients(lambda x: tf.maximum(x, 0.5) + tf.minimum(x, 0.1)), (3,)),
        batches(gradients(tf.nn.log_softmax), (5,)),
        batches(gradients(lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x), x)), (5,)),
    ]
    tally = run_cases(cases, may_fall_back=True)
    assert tally.compared >= len(cases) * (len(SIZES) - 1)


def test_gradient_axes_outside_the_cluster_are_guarded():
    """A Sum whose axes come from outside is imported for the usual axes; other axes at run time fall back."""
    graph = tf.Graph()
    with graph.as_default():
        x, y, g = (tf.compat.v1.placeholder(tf.float32, s) for s in ([None, 4], [4], [None, 4]))
        _, axes = raw.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.shape(y))
        out = tf.reshape(tf.reduce_sum(g, axes), [4]) * 2.0
    view = GraphView(graph.as_graph_def())
    total = out.op.inputs[0].op.inputs[0].op
    refs = [(total.inputs[0].op.name, 0), (axes.op.name, 1)]
    from tf_stitch.graph.importer import import_cluster

    ir = import_cluster(view, [total.name], refs, [(total.name, 0)])
    data = ramp(3, 4)
    np.testing.assert_allclose(interp.run(ir, [data, np.array([0], np.int32)])[0], data.sum(0), rtol=1e-6)
    for bad in ([1], [], [0, 1]):
        try:
            interp.run(ir, [data, np.array(bad, np.int32)])
        except ValueError:
            continue
        raise AssertionError(f"axes {bad} were taken for [0]")


def test_unknown_dims_that_differ_fall_back():
    """Two unknown dims are taken to agree; at run time one is 1 and stretches, so TensorFlow's nodes must run."""
    graph = tf.Graph()
    with graph.as_default():
        x, y = (tf.compat.v1.placeholder(tf.float32, [None, 4]) for _ in range(2))
        out = tf.exp(x + y)
    ir, _ = imported(GraphView(graph.as_graph_def()), [out])
    np.testing.assert_allclose(interp.run(ir, [ramp(3, 4), ramp(3, 4)])[0], np.exp(2 * ramp(3, 4)), rtol=1e-6)
    try:
        interp.run(ir, [ramp(3, 4), ramp(1, 4)])
    except ValueError:
        pass
    else:
        raise AssertionError("a broadcast of an unknown dim went unnoticed")
    with session(graph) as run:
        assert run.run(out, {x: ramp(3, 4), y: ramp(1, 4)}).shape == (3, 4)


def test_what_grapplers_layout_optimizer_writes():
    """Axes, sizes and paddings of a tensor that was turned to have its channels first."""
    def axes(values, *, back=False):
        formats = ("NCHW", "NHWC") if back else ("NHWC", "NCHW")
        return raw.DataFormatDimMap(x=tf.constant(values), src_format=formats[0], dst_format=formats[1])

    def order(values, src="NHWC", dst="NCHW"):
        return raw.DataFormatVecPermute(x=values, src_format=src, dst_format=dst)

    def sizes(x):
        n, h, w, c = (tf.shape(x)[i] for i in range(4))
        return order(tf.stack([n, h * 2, w, c // 2]))

    cases = [
        batches(lambda x: tf.reduce_sum(x, axes([1, -2])), (2, 3, 4)),
        batches(lambda x: tf.reduce_mean(x, axes([3], back=True), keepdims=True), (2, 3, 4)),
        batches(lambda x: tf.expand_dims(x, axes(-1)), (2, 3, 4)),
        batches(lambda x: tf.zeros(sizes(x)), (2, 3, 4)),
        batches(lambda x: tf.zeros(order(tf.stack([tf.shape(x)[0], 5]))), (2, 3, 4)),
        batches(lambda x: tf.zeros(order(order(tf.shape(x)), "NCHW", "NHWC")), (2, 3, 4)),
        batches(lambda x: tf.pad(x, order(tf.constant([[0, 0], [1, 2], [3, 4], [0, 1]]))), (2, 3, 4)),
        batches(lambda x: tf.slice(x, order(tf.constant([0, 1, 2, 0])), order(tf.constant([-1, 2, 2, 2]))), (2, 6, 8)),
    ]
    assert run_cases(cases).compared == len(SIZES) * len(cases)
