"""The registry covers the elementwise math that XLA takes; what it leaves out has a reason."""
from __future__ import annotations

import itertools

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import kernels

from tests.graph.support import v1  # noqa: F401  (sets up TensorFlow's logging)
from tf_stitch.graph import lower
from tf_stitch.graph.view import op_def

COMPLEX = "makes or takes complex numbers"
LEFT_OUT = {
    "Angle": COMPLEX, "Complex": COMPLEX, "ComplexAbs": COMPLEX, "Conj": COMPLEX, "Imag": COMPLEX, "Real": COMPLEX,
    "IgammaGradA": "a derivative that is itself a series; only gamma sampling uses it",
    "RandomGammaGrad": "a derivative that is itself a series; only gamma sampling uses it",
    "CheckNumerics": "an assertion: it must stay where TensorFlow can report it",
    "StochasticCastToInt": "random",
    "UniformQuantize": "quantisation", "UniformDequantize": "quantisation",
    "RandomShuffle": "random", "PlaceholderWithDefault": "a feed point, not a computation",
    "FFT": COMPLEX, "FFT2D": COMPLEX, "FFT3D": COMPLEX, "IFFT": COMPLEX, "IFFT2D": COMPLEX, "IFFT3D": COMPLEX,
    "LRNGrad": "a window over channels", "AdjustHue": "an image op", "AdjustSaturation": "an image op",
}


def xla_ops() -> set[str]:
    """Op types that XLA has a CPU kernel for (they register when the first function is compiled)."""
    tf.function(lambda x: x + 1, jit_compile=True)(tf.ones([2]))
    return {k.op for k in kernels.get_all_registered_kernels().kernel if k.device_type == "XLA_CPU_JIT"}


def elementwise(op: str) -> bool:
    """One to three inputs of one shape give one output of that shape, whatever it is (TensorFlow's shape function)."""
    definition = op_def(op)
    if definition is None or definition.is_stateful or len(definition.output_arg) != 1:
        return False
    arity = len(definition.input_arg)
    return 1 <= arity <= 3 and any(
        all(shape_of(op, [shape] * arity, t) == shape for shape in ([2, 3], [5], [2, 3, 4, 6]))
        for t in (tf.float32, tf.int32, tf.bool))


def shape_of(op: str, shapes, dtype) -> list[int] | None:
    """Static shape of the op's result for placeholders of the given shapes; None when it does not fit them."""
    definition = op_def(op)
    g = graph_pb2.GraphDef()
    g.versions.producer = tf.version.GRAPH_DEF_VERSION
    node = g.node.add(name="op", op=op)
    for i, (arg, shape) in enumerate(zip(definition.input_arg, shapes)):
        if arg.type_list_attr or arg.number_attr:
            return None
        p = g.node.add(name=f"p{i}", op="Placeholder")
        p.attr["dtype"].type = arg.type or dtype.as_datatype_enum
        p.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        node.input.append(f"p{i}")
    for a in definition.attr:
        if a.type == "type" and any(arg.type_attr == a.name for arg in definition.input_arg):
            node.attr[a.name].type = dtype.as_datatype_enum
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(g, name="")
    except (ValueError, tf.errors.OpError):
        return None
    shape = graph.get_operation_by_name("op").outputs[0].shape
    return shape.as_list() if shape.is_fully_defined() else None


def test_elementwise_math_of_xla_is_covered():
    ops = {op for op in xla_ops() if not op.startswith(("Xla", "_")) and elementwise(op)}
    assert len(ops) > 90  # the search itself works
    missing = sorted(ops - set(lower.REGISTRY) - set(LEFT_OUT))
    assert not missing, f"XLA takes {missing}; lower them or say why not"


def test_what_is_left_out_is_not_lowered():
    assert not set(LEFT_OUT) & set(lower.REGISTRY)


def test_registered_ops_exist():
    """Every lowering and rule is of an op of this TensorFlow, and its operand indices fit."""
    for op, entry in lower.REGISTRY.items():
        definition = op_def(op)
        assert definition is not None, op
        count = len(definition.input_arg)
        assert all(-count <= i < max(count, 1) for i in itertools.chain(entry.values, entry.statics)), op
        assert entry.fn is not None or op in lower.SYMBOLIC, op


REQUIRED = [
    "Cast", "Select", "SelectV2", "ClipByValue", "Erf", "Erfc", "Sigmoid", "Softplus", "Elu", "Selu", "Relu", "Relu6",
    "LeakyRelu", "ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SigmoidGrad", "TanhGrad",
    "RsqrtGrad", "SqrtGrad", "ReciprocalGrad", "InvGrad", "SoftplusGrad", "SoftsignGrad", "AddN", "BiasAdd",
    "BiasAddGrad", "Softmax", "LogSoftmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits",
    "FusedBatchNorm", "FusedBatchNormV3", "FusedBatchNormGradV3", "MatMul", "BatchMatMul", "BatchMatMulV2",
    "BatchMatMulV3", "Einsum", "L2Loss", "Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin",
    "Cumsum", "Cumprod", "Reshape", "Squeeze", "ExpandDims", "Transpose", "ConcatV2", "Split", "SplitV", "Pack",
    "Unpack", "Slice", "StridedSlice", "StridedSliceGrad", "Pad", "PadV2", "MirrorPad", "MirrorPadGrad", "Tile",
    "BroadcastTo", "Gather", "GatherV2", "GatherNd", "OneHot", "Range", "Fill", "ZerosLike", "OnesLike", "ReverseV2",
    "Shape", "ShapeN", "Size", "Rank", "Identity", "IdentityN", "StopGradient", "PreventGradient", "Conv2D",
    "DepthwiseConv2dNative", "MaxPool", "AvgPool", "BroadcastGradientArgs",
]


def test_required_ops_are_lowered():
    assert not set(REQUIRED) - set(lower.REGISTRY)
