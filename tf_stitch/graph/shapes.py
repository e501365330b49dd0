"""Static shapes and small constants of a GraphView, by TensorFlow's own shape inference.

The graph is copied into a form that always imports: nodes get plain names, arguments and ops that this
TensorFlow does not know become placeholders, big constants become placeholders of their shape, private
attrs are dropped.  When the import fails all the same, only what attrs say is known.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_pb2

from .view import ARG_OPS, PASS_THROUGH, GraphView, NodeView, Ref, StaticShape, op_def, shape_tuple

SMALL = 1024  # elements: a constant up to this size is kept as a value
_MAX_PASSES = 3


@dataclass
class Inferred:
    """What shape inference found: ``shapes`` may rest on ``assumed``, ``proven`` does not."""

    view: GraphView
    shapes: dict[Ref, StaticShape] = field(default_factory=dict)
    proven: dict[Ref, StaticShape] = field(default_factory=dict)
    assumed: dict[Ref, np.ndarray] = field(default_factory=dict)
    tensors: dict[Ref, tf.Tensor] = field(default_factory=dict)
    _constants: dict[Ref, np.ndarray | None] = field(default_factory=dict)

    def constant(self, ref: Ref) -> np.ndarray | None:
        if ref not in self._constants:
            self._constants[ref] = self._find_constant(ref)
        return self._constants[ref]

    def _find_constant(self, ref: Ref) -> np.ndarray | None:
        name, port = ref
        node = self.view.nodes.get(name)
        while node is not None and node.op in PASS_THROUGH:
            name, port = node.inputs[0]
            node = self.view.nodes.get(name)
        if node is None:
            return None
        if node.op == "Const":
            return node.attr("value") if const_size(node) <= SMALL else None
        return self._folded((name, port))

    def _folded(self, ref: Ref) -> np.ndarray | None:
        """What TensorFlow itself folds: shape arithmetic on static dims and the like."""
        shape, tensor = self.proven.get(ref), self.tensors.get(ref)
        if tensor is None or shape is None or None in shape or int(np.prod(shape)) > SMALL:
            return None
        if not (tensor.dtype.is_integer or tensor.dtype.is_bool):
            return None
        try:
            return tf.get_static_value(tensor)
        except (ValueError, TypeError, tf.errors.OpError):
            return None


def const_size(node: NodeView) -> int:
    """Number of elements of a Const node, read without decoding the tensor."""
    proto = node.attr_proto("value")
    size = 1
    for d in proto.tensor.tensor_shape.dim if proto is not None else ():
        size *= d.size
    return size


def is_splat(proto: tensor_pb2.TensorProto) -> bool:
    """True when the proto stores one element that fills the whole tensor."""
    stored = (proto.float_val, proto.double_val, proto.half_val, proto.int_val, proto.int64_val, proto.bool_val,
              proto.uint32_val, proto.uint64_val)
    return not proto.tensor_content and sum(len(v) for v in stored) <= 1


def infer(view: GraphView) -> Inferred:
    """Shapes of every value of the view."""
    result = Inferred(view)
    result.shapes = _from_attrs(view)
    for n in range(_MAX_PASSES):
        tensors = _import(view, result.assumed)
        if tensors is None:
            break
        found = {ref: _shape_of(t) for ref, t in tensors.items()}
        result.shapes = {ref: _merge(found.get(ref), result.shapes.get(ref)) for ref in {**found, **result.shapes}}
        if n == 0:
            result.proven, result.tensors = dict(result.shapes), tensors
        if not _assume_gradient_args(result):
            break
    result.proven = result.proven or dict(result.shapes)
    return result


def _shape_of(t: tf.Tensor) -> StaticShape:
    return None if t.shape.rank is None else tuple(t.shape.as_list())


def _merge(a: StaticShape, b: StaticShape) -> StaticShape:
    """Both are true; the first wins where they contradict."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(x if x is not None else y for x, y in zip(a, b, strict=True)) if len(a) == len(b) else a


# --- what attrs say ----------------------------------------------------------------------------------

def _from_attrs(view: GraphView) -> dict[Ref, StaticShape]:
    out: dict[Ref, StaticShape] = {}
    for n in view:
        for port, shape in enumerate(declared_shapes(view, n)):
            if shape is not None:
                out[n.name, port] = shape
    return out


def declared_shapes(view: GraphView, node: NodeView) -> list[StaticShape]:
    """Shapes that the node's own attrs (or the caller's knowledge of an argument) give, by port."""
    if node.op == "Const":
        proto = node.attr_proto("value")
        return [shape_tuple(proto.tensor.tensor_shape)] if proto is not None else []
    listed = node.attr("_output_shapes")
    shapes: list[StaticShape] = list(listed) if isinstance(listed, list) else []
    if node.op in ARG_OPS:
        return [_merge(_argument(view, node, view.arg_shapes), shapes[0] if shapes else None)]
    if node.op in ("Placeholder", "PlaceholderWithDefault") and node.attr_proto("shape") is not None:
        return [_merge(shape_tuple(node.attr_proto("shape").shape), shapes[0] if shapes else None)]
    if node.op == "ReadVariableOp" and node.inputs:
        return [_merge(variable_shape(view, node.inputs[0]), shapes[0] if shapes else None)]
    return shapes


def _argument(view: GraphView, node: NodeView, known: Mapping[int, StaticShape]) -> StaticShape:
    return known.get(view.args.index(node.name)) if node.name in view.args else None


def variable_shape(view: GraphView, handle: Ref) -> StaticShape:
    """Shape of the variable behind a resource handle, through Identity and Enter; None when not known."""
    node = view.nodes.get(handle[0])
    while node is not None and node.op in (*PASS_THROUGH, "Enter") and node.inputs:
        node = view.nodes.get(node.inputs[0][0])
    if node is None:
        return None
    if node.op == "VarHandleOp":
        proto = node.attr_proto("shape")
        return shape_tuple(proto.shape) if proto is not None else None
    if node.op in ARG_OPS:
        listed = node.attr("_handle_shapes")
        own = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
        return _merge(_argument(view, node, view.handle_shapes), own)
    return None


# --- the import --------------------------------------------------------------------------------------

def _import(view: GraphView, constants: Mapping[Ref, np.ndarray]) -> dict[Ref, tf.Tensor] | None:
    """Tensors of a tf.Graph that mirrors the view; None when TensorFlow refuses the graph."""
    copy, places = _copy(view, constants)
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(copy, name="")
    except (ValueError, TypeError, KeyError, AttributeError, tf.errors.OpError):
        return None
    out = {}
    for ref, (name, port) in places.items():
        outputs = graph.get_operation_by_name(name).outputs
        if port < len(outputs):
            out[ref] = outputs[port]
    return out


def _copy(view: GraphView, constants: Mapping[Ref, np.ndarray]) -> tuple[graph_pb2.GraphDef, dict[Ref, Ref]]:
    """The importable copy, and where each ref of the view lives in it."""
    copy = graph_pb2.GraphDef()
    copy.versions.producer = tf.version.GRAPH_DEF_VERSION
    if not view.is_function and view.source.versions.producer:
        copy.versions.CopyFrom(view.source.versions)
    places: dict[Ref, Ref] = {}
    kept: list[tuple[NodeView, node_def_pb2.NodeDef]] = []
    for i, n in enumerate(view):
        stand_in = _stands_in(n)
        for port in range(view.num_outputs(n.name)):
            ref = (n.name, port)
            if stand_in or ref in constants:
                places[ref] = (f"n{i}_{port}", 0)
                copy.node.append(_source_node(view, ref, places[ref][0], constants.get(ref)))
            else:
                places[ref] = (f"n{i}", port)
        if not stand_in and all(src in view.nodes for src, _ in n.inputs):
            kept.append((n, _node_copy(n, f"n{i}")))
    for n, proto in kept:  # last, because inputs of loop back edges name nodes that come later
        proto.input.extend(_graph_text(places[ref]) for ref in n.inputs)
        copy.node.append(proto)
    return copy, places


def _graph_text(ref: Ref) -> str:
    return f"{ref[0]}:{ref[1]}"


def _stands_in(n: NodeView) -> bool:
    """Nodes whose outputs are replaced by placeholders: their shapes come from attrs alone."""
    if n.op in ARG_OPS or n.proto is None:
        return True
    if n.op == "Const":
        return const_size(n) > SMALL
    if n.op == "ReadVariableOp":
        return True
    return op_def(n.op) is None or any(a.WhichOneof("value") == "func" or a.list.func for a in n.proto.attr.values())


def _source_node(view: GraphView, ref: Ref, name: str, value: np.ndarray | None) -> node_def_pb2.NodeDef:
    out = node_def_pb2.NodeDef(name=name)
    if value is not None:
        out.op = "Const"
        out.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        out.attr["dtype"].type = out.attr["value"].tensor.dtype
        return out
    dtype = view.dtype(ref).removesuffix("_ref")
    out.op = "Placeholder"
    out.attr["dtype"].type = tf.as_dtype("float32" if dtype == "invalid" else dtype).as_datatype_enum
    shapes = declared_shapes(view, view.nodes[ref[0]])
    out.attr["shape"].shape.CopyFrom(tf.TensorShape(shapes[ref[1]] if ref[1] < len(shapes) else None).as_proto())
    return out


def _node_copy(n: NodeView, name: str) -> node_def_pb2.NodeDef:
    out = node_def_pb2.NodeDef(name=name, op=n.op)
    known = {a.name for a in op_def(n.op).attr}
    for key, value in n.proto.attr.items():
        if key in known:
            out.attr[key].CopyFrom(value)
    return out


# --- gradients of broadcasts -------------------------------------------------------------------------

def _assume_gradient_args(result: Inferred) -> bool:
    """Decides more BroadcastGradientArgs outputs; False when there is nothing new."""
    new = False
    for n in result.view:
        if n.op != "BroadcastGradientArgs" or (n.name, 0) in result.assumed:
            continue
        shapes = [_shape_value(result, ref) for ref in n.inputs]
        if any(s is None for s in shapes):
            continue
        dtype = tf.as_dtype(n.attr("T", "int32")).as_numpy_dtype
        for port, axes in enumerate(gradient_axes(*shapes)):
            result.assumed[n.name, port] = np.array(axes, dtype)
        new = True
    return new


def gradient_axes(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[list[int], list[int]]:
    """The axes to sum over in each operand's gradient; dims that are not 1 are taken to be equal.

    Follows TensorFlow's BCast: equal shapes need no sums; else dims that are 1 are summed, on both sides where both
    are (which changes nothing).  Dims may be ints, None or symbolic.
    """
    if len(a) == len(b) and all((x == 1) == (y == 1) for x, y in zip(a, b, strict=True)):
        return [], []
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return [i for i in range(rank) if left[i] == 1], [i for i in range(rank) if right[i] == 1]


def _shape_value(result: Inferred, ref: Ref) -> tuple[int | None, ...] | None:
    """The contents of a shape tensor as far as they are known; None when even its length is not."""
    node = result.view.nodes.get(ref[0])
    while node is not None and node.op in PASS_THROUGH:
        ref = node.inputs[0]
        node = result.view.nodes.get(ref[0])
    if node is not None and node.op in ("Shape", "ShapeN"):
        return result.shapes.get(node.inputs[ref[1]])
    value = result.constant(ref)
    return None if value is None else tuple(int(v) for v in value.reshape(-1))
