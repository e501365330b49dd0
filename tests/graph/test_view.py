"""GraphView: ports, order, shapes of graphs, function bodies, loops, calls and ops that TensorFlow does not know."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tests.graph.support import v1
from tf_stitch.graph import lower
from tf_stitch.graph.importer import import_cluster
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp


def concrete(fn, *specs, **kwargs):
    return tf.function(fn, **kwargs).get_concrete_function(*specs)


def every_shape(view: GraphView):
    return {(n.name, p): view.shape((n.name, p)) for n in view for p in range(view.num_outputs(n.name))}


def multi_output(x, labels, scale):
    a, b = tf.split(x, 2, 1)
    c, d = tf.unstack(tf.stack([a, b]), 2)
    e, f = tf.raw_ops.IdentityN(input=[c + 1.0, tf.cast(d, tf.int32)])
    loss, _ = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=e, labels=labels)
    y, mean, *_ = tf.raw_ops.FusedBatchNormV3(x=tf.reshape(x, [-1, 1, 2, 4]), scale=scale, offset=scale, mean=[],
                                              variance=[])
    values, indices = tf.raw_ops.TopKV2(input=e, k=2)
    return loss, f, y, mean, values, indices


SPECS = (tf.TensorSpec([None, 8]), tf.TensorSpec([None, 4]), tf.TensorSpec([4]))


def test_outputs_after_an_empty_list_have_names():
    def fn(x):
        return tf.raw_ops.RaggedTensorFromVariant(
            encoded_ragged=x, input_ragged_rank=0, output_ragged_rank=0, Tvalues=tf.float32).output_dense_values * 2.0

    body = concrete(fn, tf.TensorSpec([], tf.variant)).function_def
    view = GraphView(body)
    times = next(n for n in view if n.op == "Mul")
    assert view.dtype(times.inputs[0]) == "float32"
    assert view.body_text(times.inputs[0]) == view.ref_text(times.inputs[0]) == times.proto.input[0]


def test_function_body_equals_its_graph():
    """The FunctionDef's port names resolve to the same refs, shapes and dtypes as the graph's."""
    fn = concrete(multi_output, *SPECS)
    graph_view, body = GraphView(fn.graph.as_graph_def()), GraphView(fn.function_def, fn.graph.as_graph_def().library)
    assert body.args == ["x", "labels", "scale"]
    for n in graph_view:
        if n.op == "Placeholder":
            continue
        assert body[n.name].inputs == n.inputs
        for p in range(graph_view.num_outputs(n.name)):
            assert body.shape((n.name, p)) == graph_view.shape((n.name, p)), n
            assert body.dtype((n.name, p)) == graph_view.dtype((n.name, p)), n
    assert [body.dtype(r) for r in body.rets] == ["float32", "int32", "float32", "float32", "float32", "int32"]


def test_ref_text_round_trips():
    """What ref_text writes is what the proto has."""
    fn = concrete(multi_output, *SPECS)
    for view in (GraphView(fn.graph.as_graph_def()), GraphView(fn.function_def)):
        for n in view:
            if n.proto is None:
                continue
            data = [t for t in n.proto.input if not t.startswith("^")]
            wanted = data if view.is_function else [t.removesuffix(":0") for t in data]
            assert [view.ref_text(r) for r in n.inputs] == wanted


def test_topological_order_with_control_edges():
    g = tf.Graph()
    with g.as_default():
        a = tf.constant(1.0, name="z")
        with g.control_dependencies([a]):
            b = v1.placeholder(tf.float32, [], name="a")
        c = tf.add(a, b, name="b")
    graph_def = g.as_graph_def()
    shuffled = graph_pb2.GraphDef()
    shuffled.node.extend(reversed(graph_def.node))
    view = GraphView(shuffled)
    order = list(view.nodes)
    assert order.index("z") < order.index("a") < order.index("b")
    assert view.consumers("z") == [(c.op.name, 0, 0)] and view.control_consumers("z") == ["a"]
    assert view["a"].control_inputs == ("z",)


def test_lowered_loop_has_shapes():
    """Enter, Merge, Switch, NextIteration: what stays the same in a loop is known, what grows is not."""
    def loop(x, w):
        def step(i, h, grown):
            return i + 1, tf.tanh(h @ w), tf.concat([grown, h[:, :1]], 1)

        shapes = [tf.TensorShape([]), x.shape, tf.TensorShape([None, None])]
        return tf.while_loop(lambda i, *_: i < 4, step, [0, x, x[:, :2]], shape_invariants=shapes)[1:]

    fn = concrete(loop, tf.TensorSpec([None, 3]), tf.TensorSpec([3, 3]))
    lowered = convert_variables_to_constants_v2(fn, lower_control_flow=True).graph.as_graph_def()
    view = GraphView(lowered)
    merges = [n for n in view if n.op == "Merge"]
    assert len(merges) >= 3
    shapes = {view.shape((n.name, 0)) for n in merges}
    assert (None, 3) in shapes and (None, None) in shapes and () in shapes
    tanh = next(n for n in view if n.op == "Tanh")
    assert view.shape((tanh.name, 0)) == (None, 3)
    assert lower.why_not(view, tanh) is None
    order = list(view.nodes)
    assert all(order.index(s) < order.index(n.name) for n in view for s, _ in n.inputs if view[s].op != "NextIteration")


def test_nested_lowered_loops():
    def nested(x):
        def inner(y):
            return tf.while_loop(lambda j, _: j < 2, lambda j, y: (j + 1, tf.sin(y)), [0, y])[1]

        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, inner(y) + 1.0), [0, x])[1]

    fn = concrete(nested, tf.TensorSpec([None, 5]))
    view = GraphView(convert_variables_to_constants_v2(fn, lower_control_flow=True).graph.as_graph_def())
    sin = next(n for n in view if n.op == "Sin")
    assert view.shape((sin.name, 0)) == (None, 5)
    assert all(s is not None for (name, _), s in every_shape(view).items()
               if view[name].op in ("Merge", "Switch", "Exit"))


def run_popped_sum(view: GraphView, sums) -> None:
    """A gradient's sum whose axes follow from shapes that come out of tensor lists: imported with guards on them."""
    def popped(n):
        axes = view[n.inputs[1][0]]
        return all(view[name].op == "TensorListPopBack" for name, _ in axes.inputs)

    total = next(n for n in sums if popped(n))
    axes = view[total.inputs[1][0]]
    ir = import_cluster(view, [axes.name, total.name], [total.inputs[0], *axes.inputs], [(total.name, 0)])
    rows, wide = np.arange(15, dtype=np.float32).reshape(5, 3), np.array([5, 3], np.int32)
    np.testing.assert_array_equal(interp.run(ir, [rows, wide, wide])[0], rows)
    with pytest.raises(ValueError):
        interp.run(ir, [rows, np.array([1, 3], np.int32), wide])


def test_gradient_of_a_lowered_loop_has_shapes():
    """The forward loop hands its results to the gradient in tensor lists that do not say what they hold."""
    def loss(x, w):
        h = tf.while_loop(lambda i, _: i < 4, lambda i, h: (i + 1, tf.tanh(h @ w) + h * x), [0, x])[1]
        return tf.gradients(tf.reduce_sum(h), [x, w])

    fn = concrete(loss, tf.TensorSpec([None, 3]), tf.TensorSpec([3, 3]))
    graph_def = convert_variables_to_constants_v2(fn, lower_control_flow=True).graph.as_graph_def()
    view = GraphView(graph_def)
    assert any(n.op == "TensorListPopBack" for n in view)
    floats = [(n.name, p) for n in view for p in range(view.num_outputs(n.name))
              if view.dtype((n.name, p)) == "float32" and view.consumers(n.name) and n.op != "Placeholder"]
    assert all(view.shape(ref) is not None for ref in floats)
    sums = [n for n in view if n.op == "Sum" and view[n.inputs[1][0]].op == "BroadcastGradientArgs"]
    assert sums and all(lower.why_not(view, n) is None for n in sums)
    run_popped_sum(view, sums)
    tanh_grad = next(n for n in view if n.op == "TanhGrad")
    assert view.shape((tanh_grad.name, 0)) == (None, 3)


def test_calls_and_branches_have_shapes():
    inner = tf.function(lambda x: (tf.nn.relu(x), tf.reduce_sum(x, 1)))

    def outer(x, flag):
        a, b = inner(x)
        c = tf.cond(flag, lambda: x * 2.0, lambda: x - 1.0)
        d = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * 2.0), [0, x])[1]
        return a, b, c, d

    graph_def = concrete(outer, tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.bool)).graph.as_graph_def()
    for n in graph_def.node:  # what the nodes say themselves must not be needed
        n.attr.pop("output_shapes", None)
        n.attr.pop("_output_shapes", None)
    view = GraphView(graph_def)
    found = {n.op: [view.shape((n.name, p)) for p in range(view.num_outputs(n.name))] for n in view}
    call = "StatelessPartitionedCall" if "StatelessPartitionedCall" in found else "PartitionedCall"
    assert found[call] == [(None, 3), (None,)]
    assert (None, 3) in found["StatelessIf"] and (None, 3) in found["StatelessWhile"]


def test_variable_shapes():
    v = tf.Variable(np.ones((3, 4), np.float32))
    fn = concrete(lambda x: x @ v + 1.0, tf.TensorSpec([None, 3]))
    body = GraphView(fn.function_def, fn.graph.as_graph_def().library, handle_shapes={1: (3, 4)})
    read = next(n for n in body if n.op == "ReadVariableOp")
    assert body.shape((read.name, 0)) == (3, 4)
    assert body.dtype((body.args[1], 0)) == "resource"
    bare = function_pb2.FunctionDef()
    bare.CopyFrom(fn.function_def)
    bare.arg_attr.clear()
    for n in bare.node_def:
        n.attr.pop("_output_shapes", None)
    told = GraphView(bare, arg_shapes={0: (None, 3)}, handle_shapes={1: (3, 4)})
    product = next(n for n in told if n.op == "MatMul")
    assert told.shape((product.name, 0)) == (None, 4)
    assert told.proven_shape((told.args[0], 0)) is None  # only the caller said so


def test_grappler_arguments():
    """`_Arg` nodes with `_output_shapes`, `_Retval` nodes, internal ops."""
    g = graph_pb2.GraphDef()
    arg = g.node.add(name="x", op="_Arg")
    arg.attr["T"].type = tf.float32.as_datatype_enum
    arg.attr["index"].i = 0
    arg.attr["_output_shapes"].list.shape.add().CopyFrom(tf.TensorShape([None, 4]).as_proto())
    w = g.node.add(name="w", op="Const")
    w.attr["dtype"].type = tf.float32.as_datatype_enum
    w.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.ones((4, 2), np.float32)))
    b = g.node.add(name="b", op="Const")
    b.attr["dtype"].type = tf.float32.as_datatype_enum
    b.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.ones(2, np.float32)))
    m = g.node.add(name="m", op="_FusedMatMul", input=["x", "w", "b"])
    m.attr["T"].type = tf.float32.as_datatype_enum
    m.attr["num_args"].i = 1
    m.attr["fused_ops"].list.s.extend([b"BiasAdd", b"Relu"])
    u = g.node.add(name="u", op="_UnaryOpsComposition", input=["m"])
    u.attr["T"].type = tf.float32.as_datatype_enum
    u.attr["op_names"].list.s.extend([b"Exp", b"Neg"])
    r = g.node.add(name="r", op="_Retval", input=["u"])
    r.attr["T"].type = tf.float32.as_datatype_enum
    r.attr["index"].i = 0
    view = GraphView(g)
    assert view.args == ["x"] and view.rets == [("u", 0)]
    assert view.shape(("m", 0)) == (None, 2) and view.shape(("u", 0)) == (None, 2)
    assert view["m"].attr("fused_ops") == ["BiasAdd", "Relu"]
    ir = import_cluster(view, ["w", "b", "m", "u"], [("x", 0)], [("u", 0)])
    x = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    want = -np.exp(np.maximum(x @ np.ones((4, 2), np.float32) + 1, 0))
    np.testing.assert_allclose(interp.run(ir, [x])[0], want, rtol=1e-5)


def test_unknown_op_is_opaque():
    """A custom op that is not registered: its results have no shape, what does not need it still has one."""
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        tf.identity(x, name="mystery")
        tf.add(g.get_tensor_by_name("mystery:0"), 1.0, name="after")
        tf.exp(x, name="other")
    graph_def = g.as_graph_def()
    node = next(n for n in graph_def.node if n.name == "mystery")
    node.op = "SomebodysOp"
    view = GraphView(graph_def)
    assert view.shape(("mystery", 0)) is None and view.shape(("other", 0)) == (None, 2)
    assert view.dtype(("mystery", 0)) == "float32"  # from who reads it
    assert lower.why_not(view, "mystery") == "op SomebodysOp is not supported"
    assert "rank" in lower.why_not(view, "after")


def test_graph_that_does_not_import():
    """Contradicting shapes: only attrs are left, nothing raises."""
    g = tf.Graph()
    with g.as_default():
        tf.matmul(v1.placeholder(tf.float32, [2, 3], name="a"), v1.placeholder(tf.float32, [3, 4], name="b"), name="m")
    graph_def = g.as_graph_def()
    next(n for n in graph_def.node if n.name == "b").attr["shape"].shape.dim[0].size = 5
    view = GraphView(graph_def)
    assert view.shape(("a", 0)) == (2, 3) and view.shape(("m", 0)) is None


@pytest.mark.parametrize("build, reason", [
    (lambda: tf.identity(v1.placeholder(tf.string, [2])), "string"),
    (lambda: v1.placeholder(tf.complex64, [2]) + 1, "complex64"),
    (lambda: tf.exp(v1.placeholder(tf.float32, None)), "rank"),
    (lambda: tf.linalg.inv(v1.placeholder(tf.float32, [3, 3])), "MatrixInverse"),
    (lambda: tf.reduce_sum(v1.placeholder(tf.float32, [3, 3]), v1.placeholder(tf.int32, [1])), "constant"),
    (lambda: tf.constant(np.arange(100.0, dtype=np.float32)), "large constant"),
])
def test_why_not(build, reason):
    g = tf.Graph()
    with g.as_default():
        out = build()
    view = GraphView(g.as_graph_def())
    said = lower.why_not(view, out.op.name)
    assert said is not None and reason in said


def test_tables():
    assert lower.is_contraction("MatMul") and lower.is_contraction("Conv2D") and not lower.is_contraction("Add")
    assert lower.is_metadata("Reshape") and not lower.is_metadata("Softmax")
    assert lower.needs_value("Reshape") == (1,) and lower.needs_value("ConcatV2", 3) == (2,)
    g = tf.Graph()
    with g.as_default():
        big, small, splat = tf.constant(np.arange(99.0)), tf.constant([1, 2]), tf.zeros([9, 99])
    view = GraphView(g.as_graph_def())
    assert [lower.is_literal(view, view[t.op.name]) for t in (big, small, splat)] == [False, True, True]
