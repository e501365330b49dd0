"""The table of lowerings: TensorFlow op type -> how it becomes IR.

A lowering is a function ``fn(c, *operands)`` registered with :func:`lower`; ``c`` is the importer's
:class:`~tf_stitch.graph.lower.context.Context`.  Operands are IR nodes, except those named in ``values``
(NumPy object arrays of Dims: shapes, sizes, starts) and in ``statics`` (NumPy integer arrays known while
rewriting: axes, permutations).  It returns an IR node per output (one node, or a list).

A symbolic rule, registered with :func:`symbolic`, computes small integer results from Dims instead.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...ir.dtypes import DTYPES
from ..shapes import const_size, is_splat
from ..view import GraphView, NodeView

FLOAT = frozenset({"float"})
INT = frozenset({"int", "uint"})
NUM = FLOAT | INT
BOOL = frozenset({"bool"})
ALL = NUM | BOOL
LITERAL_ELEMENTS = 64
LITERAL_BYTES = 1024

Check = Callable[[GraphView, NodeView], str | None]


@dataclass(frozen=True)
class Lowering:
    """How one op type becomes IR.

    Attributes:
      fn: the lowering; None for an op that exists only as a symbolic value.
      values, statics: input indices (negative: from the end) that are shape-like, or must be constants.
      kinds: element kinds that input 0 (or output 0, without inputs) may have.
      check: says why a node cannot be lowered, from its attrs and static shapes alone.
      on_gpu: on a CPU TensorFlow's kernel does less work than the lowering would.
    """

    op: str
    fn: Callable[..., Any] | None
    values: tuple[int, ...] = ()
    statics: tuple[int, ...] = ()
    kinds: frozenset[str] = ALL
    check: Check | None = None
    on_gpu: bool = False


REGISTRY: dict[str, Lowering] = {}
SYMBOLIC: dict[str, Callable[..., Any]] = {}

# Ops that this backend leaves to libraries or to matmul stages.
CONTRACTIONS = frozenset({
    "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
    "MaxPool", "MaxPoolV2", "AvgPool", "MaxPool3D", "AvgPool3D", "_FusedMatMul", "_FusedConv2D", "SparseMatMul", "Conv",
    "Conv2DBackpropInput", "Conv2DBackpropFilter", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter", "_FusedBatchMatMulV2",
    "_FusedDepthwiseConv2dNative", "_FusedConv3D", "_MklFusedBatchMatMulV2", "MaxPoolGrad", "AvgPoolGrad",
    "MaxPool3DGrad", "AvgPool3DGrad", "Conv2DBackpropInputV2", "Conv2DBackpropFilterV2",
})

# Those of them that a GPU program computes itself: by a library's call, or in a kernel.
PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "_FusedMatMul", "Conv2D",
                      "Conv3D", "DepthwiseConv2dNative", "_FusedConv2D", "_FusedConv3D", "_FusedDepthwiseConv2dNative",
                      "MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "Conv2DBackpropInput", "Conv3DBackpropInputV2",
                      "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropInput",
                      "DepthwiseConv2dNativeBackpropFilter", "MaxPoolGrad", "AvgPoolGrad", "MaxPool3DGrad",
                      "AvgPool3DGrad"})

# Ops that move no data: they give another name, shape or description to a tensor.
METADATA = frozenset({
    "Shape", "ShapeN", "Size", "Rank", "Reshape", "Identity", "IdentityN", "StopGradient", "PreventGradient",
    "Snapshot", "ExpandDims", "Squeeze", "Const", "BroadcastGradientArgs", "BroadcastArgs", "EnsureShape", "Bitcast",
})

# Ops whose symbolic result may differ from TensorFlow's where an unknown dim turns out to be 1; what reads it
# as axes computes the same, but it must never be seen as a tensor.
INEXACT = frozenset({"BroadcastGradientArgs"})


def lower(*ops: str, values: tuple[int, ...] = (), statics: tuple[int, ...] = (), kinds: frozenset[str] = ALL,
          check: Check | None = None, on_gpu: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the lowering of the given op types."""
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            REGISTRY[op] = Lowering(op, fn, values, statics, kinds, check, on_gpu)
        return fn

    return add


def symbolic(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the symbolic rule of the given op types.

    ``fn(s)`` reads operands through the :class:`SymContext` ``s`` and returns an object array (or a list, one
    per output); it raises :class:`NotSymbolic` when the result cannot be written with Dims.
    """
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            SYMBOLIC[op] = fn
        return fn

    return add


class NotSymbolic(Exception):
    """A value has no exact form as Dims."""


def is_contraction(op_type: str) -> bool:
    """True for matmuls, convolutions and pools."""
    return op_type in CONTRACTIONS


def is_product(op_type: str) -> bool:
    """True for contractions that a GPU program computes itself."""
    return op_type in PRODUCTS


def needs_gpu(op_type: str) -> bool:
    """True for ops that are taken on a GPU only."""
    entry = REGISTRY.get(op_type)
    return entry is not None and entry.on_gpu


def is_metadata(op_type: str) -> bool:
    """True for ops that compute nothing: shapes, reshapes, identities, constants."""
    return op_type in METADATA


def _indices(wanted: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(i % count for i in wanted if -count <= i < count)


def needs_value(op_type: str, num_inputs: int | None = None) -> tuple[int, ...]:
    """Indices of inputs whose contents (shapes, axes, sizes) shape the result.

    Without ``num_inputs`` an index from the end stays negative.
    """
    entry = REGISTRY.get(op_type)
    wanted = entry.values + entry.statics if entry is not None else ()
    return wanted if num_inputs is None else _indices(wanted, num_inputs)


def operand_kinds(entry: Lowering, count: int) -> tuple[frozenset[int], frozenset[int]]:
    """(value operands, static operands) of a node with ``count`` inputs."""
    return frozenset(_indices(entry.values, count)), frozenset(_indices(entry.statics, count))


def is_literal(view: GraphView, node: NodeView) -> bool:
    """True for a Const that is written into the kernel: small, or one element filling the whole tensor."""
    if node.op != "Const" or node.outputs is None or node.outputs[0] not in DTYPES:
        return False
    size = const_size(node)
    if size <= LITERAL_ELEMENTS and size * DTYPES[node.outputs[0]].size <= LITERAL_BYTES:
        return True
    proto = node.attr_proto("value")
    return proto is not None and is_splat(proto.tensor)


def why_not(view: GraphView, node: NodeView | str) -> str | None:
    """The reason why a node cannot be stitched; None when it can."""
    node = view[node] if isinstance(node, str) else node
    entry = REGISTRY.get(node.op)
    if node.op == "Const":
        if is_literal(view, node):
            return None
        return _dtype_reason(view, node) or "a large constant stays a tensor of the graph"
    if entry is None:
        return f"op {node.op} is not supported"
    return (_dtype_reason(view, node) or _kind_reason(view, node, entry) or _static_reason(view, node, entry)
            or _rank_reason(view, node) or (entry.check(view, node) if entry.check else None))


def _dtype_reason(view: GraphView, node: NodeView) -> str | None:
    refs = [*node.inputs, *((node.name, p) for p in range(view.num_outputs(node.name)))]
    bad = sorted({view.dtype(r) for r in refs} - set(DTYPES))
    return f"element type {', '.join(bad)} is not supported" if bad else None


def _kind_reason(view: GraphView, node: NodeView, entry: Lowering) -> str | None:
    refs = node.inputs[:1] or ((node.name, 0),)
    dtype = view.dtype(refs[0])
    return None if DTYPES[dtype].kind in entry.kinds else f"op {node.op} is not supported for element type {dtype}"


def _rank_reason(view: GraphView, node: NodeView) -> str | None:
    for i, ref in enumerate(node.inputs):
        if view.shape(ref) is None:
            return f"the rank of operand {i} is unknown"
    for port in range(view.num_outputs(node.name)):
        if view.shape((node.name, port)) is None:
            return "the rank of the result is unknown"
    return None


def _static_reason(view: GraphView, node: NodeView, entry: Lowering) -> str | None:
    values, statics = operand_kinds(entry, len(node.inputs))
    for i in sorted(statics):
        if view.constant(node.inputs[i]) is None and view.assumed(node.inputs[i]) is None:
            return f"operand {i} is not a constant"
    for i in sorted(values):
        if None in (view.shape(node.inputs[i]) or ()):
            return f"operand {i} has an unknown length"
    return None
