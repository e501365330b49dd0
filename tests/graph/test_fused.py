"""What Grappler's remapper makes of convolutions and products, against TensorFlow's own kernels."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import assert_close, case, imported, run_cases, session
from tests.graph.test_nn import normal
from tf_stitch.graph import lower
from tf_stitch.graph.lower.fused import ACTIVATIONS, EXTRA_OPERANDS
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

CHANNELS = 5


def fused(op, fused_ops, *operands, **attrs):
    """A node of one of TensorFlow's internal ops, which tf.raw_ops does not show."""
    x, _, *args = operands
    types = dict(T=x.dtype, num_args=len(args), fused_ops=list(fused_ops), epsilon=1e-3, leakyrelu_alpha=0.3, **attrs)
    if op == "_FusedConv2D":
        types |= {"TArgs": [a.dtype for a in args], "num_host_args": 0}
    attrs = {k: attr_value(k, v) for k, v in types.items()}
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(op, list(operands), [x.dtype], name="fused", attrs=attrs).outputs[0]


def attr_value(key, value):
    out = tf.compat.v1.AttrValue()
    if key == "T":
        out.type = value.as_datatype_enum
    elif key == "TArgs":
        out.list.type.extend(t.as_datatype_enum for t in value)
    elif key == "fused_ops":
        out.list.s.extend(v.encode() for v in value)
    elif isinstance(value, list):
        out.list.i.extend(value)
    elif isinstance(value, str):
        out.s = value.encode()
    elif isinstance(value, float):
        out.f = value
    elif isinstance(value, bool):
        out.b = value
    else:
        out.i = value
    return out


def vectors(*fused_ops):
    """The operands of fused ops that are vectors."""
    found = []
    for op in fused_ops:
        found += [normal(CHANNELS, seed=20 + k) for k in range(EXTRA_OPERANDS.get(op, 0))]
    if "FusedBatchNorm" in fused_ops:
        found[-1] = np.abs(found[-1]) + 0.5
    return found


CONV = dict(strides=[1, 2, 1, 1], padding="SAME", dilations=[1, 1, 1, 1])
CONV_OPS = [("BiasAdd",), ("BiasAdd", "Relu"), ("BiasAdd", "Relu6"), ("BiasAdd", "Elu"), ("BiasAdd", "LeakyRelu"),
            ("FusedBatchNorm",), ("FusedBatchNorm", "Relu"), ("FusedBatchNorm", "Relu6"), ("FusedBatchNorm", "Elu"),
            ("FusedBatchNorm", "LeakyRelu")]
MATMUL_OPS = [("BiasAdd",), *(("BiasAdd", a) for a in ("Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"))]


def test_convolutions():
    cases = []
    for ops in CONV_OPS:
        def build(x, w, *args, ops=ops):
            return fused("_FusedConv2D", ops, x, w, *args, **CONV)

        cases.append(case(build, normal(2, 7, 6, 4), normal(3, 2, 4, CHANNELS), *vectors(*ops), tolerance=3))
        cases[-1].shapes[0][0] = None
    assert run_cases(cases).compared == len(cases)


def test_explicit_padding():
    def build(x, w, b):
        return fused("_FusedConv2D", ["BiasAdd", "Relu"], x, w, b, strides=[1, 1, 1, 1], padding="EXPLICIT",
                     explicit_paddings=[0, 0, 1, 2, 0, 3, 0, 0], dilations=[1, 1, 1, 1])

    run_cases([case(build, normal(2, 7, 6, 4), normal(3, 2, 4, CHANNELS), normal(CHANNELS, seed=4))])


def test_products():
    cases = []
    for ops in MATMUL_OPS:
        for ta, tb in ((False, False), (True, True)):
            def build(x, w, *args, ops=ops, ta=ta, tb=tb):
                return fused("_FusedMatMul", ops, x, w, *args, transpose_a=ta, transpose_b=tb)

            x, w = normal(3, 4), normal(4, CHANNELS)
            cases.append(case(build, x.T if ta else x, w.T if tb else w, *vectors(*ops), tolerance=20))
    assert run_cases(cases).compared == len(cases)


def apart(ops, x, args):
    """The fused ops one by one."""
    left = list(args)
    for op in ops:
        if op == "BiasAdd":
            x = tf.nn.bias_add(x, left.pop(0))
        elif op == "Add":
            x = x + left.pop(0)
        else:
            x = {"Relu": tf.nn.relu, "Relu6": tf.nn.relu6, "Elu": tf.nn.elu,
                 "LeakyRelu": lambda v: tf.nn.leaky_relu(v, 0.3), "Tanh": tf.tanh, "Sigmoid": tf.sigmoid,
                 "GeluExact": tf.nn.gelu, "GeluApproximate": lambda v: tf.nn.gelu(v, approximate=True),
                 "_FusedHardSwish": lambda v: v * tf.nn.relu6(v + 3) / 6}[op](x)
    return x


SIMILAR = [("_FusedMatMul", tf.matmul, (3, 4), (4, 5), dict(transpose_a=False, transpose_b=False)),
           ("_FusedConv2D", lambda x, w: tf.nn.conv2d(x, w, CONV["strides"], "SAME"), (2, 7, 6, 4), (3, 2, 4, 5), CONV),
           ("_FusedDepthwiseConv2dNative", lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"),
            (2, 7, 6, 5), (3, 2, 5, 1), CONV | {"strides": [1, 1, 1, 1]}),
           ("_FusedConv3D", lambda x, w: tf.nn.conv3d(x, w, [1, 1, 1, 1, 1], "SAME"), (1, 4, 5, 3, 2),
            (2, 3, 1, 2, 5), dict(strides=[1] * 5, padding="SAME", dilations=[1] * 5))]


@pytest.mark.parametrize("op,plain,shape,filter_shape,attrs", SIMILAR, ids=[s[0] for s in SIMILAR])
def test_they_are_what_they_are_made_of(op, plain, shape, filter_shape, attrs):
    """TensorFlow has kernels of some of them for oneDNN or cuDNN only: compared with the ops apart."""
    for activation in (None, *ACTIVATIONS):
        for ops in ([o for o in ("BiasAdd", *middle, activation) if o] for middle in ((), ("Add",))):
            graph = tf.Graph()
            with graph.as_default():
                x, w = (tf.compat.v1.placeholder(tf.float32, s) for s in (shape, filter_shape))
                bias = tf.compat.v1.placeholder(tf.float32, [CHANNELS])
                want = plain(x, w)
                args = [bias, *([tf.compat.v1.placeholder(tf.float32, want.shape)] if "Add" in ops else [])]
                got, want = fused(op, ops, x, w, *args, **attrs), apart(ops, want, args)
            ir, refs = imported(GraphView(graph.as_graph_def()), [got])
            arrays = {f"{t.op.name}": normal(*t.shape.as_list(), seed=k) for k, t in enumerate([x, w, *args])}
            with session(graph) as run:
                expected = run.run(want, {f"{k}:0": v for k, v in arrays.items()})
            result, = interp.run(ir, [arrays[name] for name, _ in refs])
            assert_close(result, expected, 20, f"{op} {ops}")


def test_what_is_not_supported_has_a_reason():
    with tf.Graph().as_default() as graph:
        x, w = tf.zeros([1, 4, 4, 2]), tf.zeros([2, 2, 2, CHANNELS])
        b = tf.zeros([CHANNELS])
        fused("_FusedConv2D", ["BiasAdd", "Cosine"], x, w, b, **CONV)
        fused("_FusedConv2D", ["Relu"], x, w, b, **CONV)
        fused("_FusedConv2D", ["BiasAdd"], x, w, b, filter_format="OIHW", **CONV)
    view = GraphView(graph.as_graph_def())
    reasons = [lower.why_not(view, n) for n in view if n.op == "_FusedConv2D"]
    assert "Cosine" in reasons[0] and "extra operands" in reasons[1] and "OIHW" in reasons[2]
