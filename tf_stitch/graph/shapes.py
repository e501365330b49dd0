"""Static shapes and small constants of a GraphView, by TensorFlow's own shape inference.

The graph is copied into a form that always imports: nodes get plain names, arguments, function calls and ops
that this TensorFlow does not know become placeholders, big constants become placeholders of their shape,
private attrs are dropped, and loops are cut at their Merge nodes.  Shapes around loops and calls are found by
importing again until nothing changes.  When an import fails all the same, only what attrs say is known.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_pb2

from .tensor_lists import elements
from .view import ARG_OPS, LOOP_BACK, PASS_THROUGH, FuncRef, GraphView, NodeView, Ref, StaticShape, op_def, shape_tuple

SMALL = 1024  # elements: a constant up to this size is kept as a value
_MAX_PASSES = 20
_ALIASES = frozenset({"Enter", "RefEnter", "Exit", "RefExit", "NextIteration", "RefNextIteration", "LoopCond"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_BRANCHES = {"If": ("then_branch", "else_branch"), "StatelessIf": ("then_branch", "else_branch"),
             "Case": ("branches",), "StatelessCase": ("branches",)}
_WHILES = frozenset({"While", "StatelessWhile"})

# Results whose shape TensorFlow does not infer, as its CPU kernels make them.
_KERNEL_SHAPES: dict[tuple[str, int], StaticShape] = {(op, 5): (0,) for op in ("FusedBatchNormV3", "_FusedBatchNormEx")}

Shapes = dict[Ref, StaticShape]
Arguments = tuple[tuple[StaticShape, StaticShape], ...]  # of a call: (shape, shape of the variable behind a resource)


@dataclass
class Inferred:
    """What shape inference found: ``shapes`` may rest on ``assumed`` values and on what callers said, ``proven``
    holds in every run."""

    view: GraphView
    shapes: Shapes = field(default_factory=dict)
    proven: Shapes = field(default_factory=dict)
    assumed: dict[Ref, np.ndarray] = field(default_factory=dict)
    elements: dict[Ref, tuple[Ref, ...]] = field(default_factory=dict)  # read from a list -> put into it
    _constants: dict[Ref, np.ndarray | None] = field(default_factory=dict)

    def constant(self, ref: Ref) -> np.ndarray | None:
        if ref not in self._constants:
            self._constants[ref] = self._find_constant(ref)
        return self._constants[ref]

    def partial(self, ref: Ref) -> tuple[int | None, ...] | None:
        """Elements of a small integer value, as far as they are known."""
        from .lower.folding import partial_value  # the rules need this module

        return partial_value(self, ref)

    def assumed_value(self, ref: Ref) -> np.ndarray | None:
        """What follows from ``assumed`` values and assumed shapes."""
        if ref in self.assumed:
            return self.assumed[ref]
        node, shape = self.view.nodes.get(ref[0]), self.shapes.get(ref)
        value = self.partial(ref) if node is not None and shape is not None and len(shape) <= 1 else None
        if value is None or None in value:
            return None
        dtype = tf.as_dtype(self.view.dtype(ref)).as_numpy_dtype
        return np.array(value, dtype).reshape(() if shape == () else (-1,))

    def _find_constant(self, ref: Ref) -> np.ndarray | None:
        name, port = ref
        node = self.view.nodes.get(name)
        while node is not None and node.op in PASS_THROUGH:
            name, port = node.inputs[0]
            node = self.view.nodes.get(name)
        if node is None:
            return None
        if node.op == "Const":
            return np.asarray(node.attr("value")) if const_size(node) <= SMALL else None
        from .lower.folding import fold  # the rules need this module

        return fold(self, (name, port))


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
    result = Inferred(view, elements=elements(view))
    result.proven = _settle(view, assume=False, constants={})
    result.shapes = result.proven
    if view.arg_shapes or view.handle_shapes:
        result.shapes = _settle(view, assume=True, constants={})
    for _ in range(_MAX_PASSES):  # sums over decided axes give the next gradient's shape
        if not _assume_gradient_args(result):
            break
        result.shapes = _settle(view, assume=True, constants=result.assumed)
    result.shapes = {**result.shapes, **_kernel_shapes(view, result.shapes)}
    return result


def _kernel_shapes(view: GraphView, shapes: Shapes) -> Shapes:
    return {(n.name, port): shape for n in view for (op, port), shape in _KERNEL_SHAPES.items()
            if n.op == op and shapes.get((n.name, port)) is None}


def _settle(view: GraphView, assume: bool, constants: Mapping[Ref, np.ndarray]) -> Shapes:
    """Imports until the shapes around loops and calls no longer change."""
    declared = _from_attrs(view, assume)
    tensors: dict[Ref, tf.Tensor] = {}
    fixed: Shapes = {}
    cells = _cells(view)
    for n in range(_MAX_PASSES + 1):
        if n == _MAX_PASSES:  # no end in sight: loops stay unknown
            fixed = {ref: s for ref, s in fixed.items() if ref not in {c.ref for c in cells}}
        tensors = _import(view, declared, fixed, constants) or {}
        shapes = {**declared, **{ref: merge(_shape_of(t), declared.get(ref)) for ref, t in tensors.items()}}
        if n == _MAX_PASSES or not tensors:
            return shapes
        if not _update_cells(cells, shapes, fixed) | _update_calls(view, shapes, fixed, assume):
            return shapes
    raise AssertionError("the loop returns in its last pass")


def _shape_of(t: tf.Tensor) -> StaticShape:
    return None if t.shape.rank is None else tuple(t.shape.as_list())


def merge(a: StaticShape, b: StaticShape) -> StaticShape:
    """What two true statements say together; the first wins where they contradict."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(x if x is not None else y for x, y in zip(a, b, strict=True)) if len(a) == len(b) else a


def relax(*shapes: StaticShape) -> StaticShape:
    """What all shapes have in common."""
    if any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
        return None
    return tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*shapes, strict=True))


# --- what attrs say ----------------------------------------------------------------------------------

def _from_attrs(view: GraphView, assume: bool) -> Shapes:
    out: Shapes = {}
    for n in view:
        for port, shape in enumerate(_declared(view, n, assume)):
            if shape is not None:
                out[n.name, port] = shape
    return out


def _declared(view: GraphView, node: NodeView, assume: bool) -> list[StaticShape]:
    """Shapes that the node's own attrs (or, with ``assume``, the function's callers) give, by port."""
    if node.op == "Const":
        proto = node.attr_proto("value")
        return [shape_tuple(proto.tensor.tensor_shape)] if proto is not None else []
    shapes = _listed(node, "_output_shapes") or _listed(node, "output_shapes")
    first = shapes[0] if shapes else None
    if node.op in ARG_OPS:
        return [merge(_argument(view, node, view.arg_shapes) if assume else None, first)]
    shape = node.attr_proto("shape")
    if node.op in ("Placeholder", "PlaceholderWithDefault") and shape is not None:
        return [merge(shape_tuple(shape.shape), first)]
    if node.op == "ReadVariableOp" and node.inputs:
        return [merge(variable_shape(view, node.inputs[0], assume), first)]
    return shapes


def _listed(node: NodeView, attr: str) -> list[StaticShape]:
    value = node.attr(attr)
    return list(value) if isinstance(value, list) and all(s is None or isinstance(s, tuple) for s in value) else []


def _argument(view: GraphView, node: NodeView, known: Mapping[int, StaticShape]) -> StaticShape:
    return known.get(view.args.index(node.name)) if node.name in view.args else None


def variable_shape(view: GraphView, handle: Ref, assume: bool = True) -> StaticShape:
    """Shape of the variable behind a resource handle, through Identity, Enter and loops; None when not known."""
    node = view.nodes.get(handle[0])
    for _ in range(len(view)):
        if node is None or not node.inputs or node.op not in (*PASS_THROUGH, "Enter", "Merge", "Switch"):
            break
        node = view.nodes.get(node.inputs[0][0])
    if node is None:
        return None
    if node.op == "VarHandleOp":
        proto = node.attr_proto("shape")
        return shape_tuple(proto.shape) if proto is not None else None
    if node.op in ARG_OPS:
        listed = _listed(node, "_handle_shapes")
        known = _argument(view, node, view.handle_shapes) if assume else None
        return merge(known, listed[0] if len(listed) == 1 else None)
    return None


# --- the import --------------------------------------------------------------------------------------

def _import(view: GraphView, declared: Shapes, fixed: Shapes,
            constants: Mapping[Ref, np.ndarray]) -> dict[Ref, tf.Tensor] | None:
    """Tensors of a tf.Graph that mirrors the view; None when TensorFlow refuses the graph."""
    copy, places = _copy(view, declared, fixed, constants)
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


def _copy(view: GraphView, declared: Shapes, fixed: Shapes,
          constants: Mapping[Ref, np.ndarray]) -> tuple[graph_pb2.GraphDef, dict[Ref, Ref]]:
    """The importable copy, and where each ref of the view lives in it."""
    copy = graph_pb2.GraphDef()
    copy.versions.producer = tf.version.GRAPH_DEF_VERSION
    if not view.is_function and view.source.versions.producer:
        copy.versions.CopyFrom(view.source.versions)
    places: dict[Ref, Ref] = {}
    for i, n in enumerate(view):
        stand_in = _stands_in(view, n)
        for port in range(view.num_outputs(n.name)):
            ref = (n.name, port)
            if ref in constants or stand_in or ref in fixed:
                places[ref] = (f"n{i}_{port}", 0)
                copy.node.append(_constant_node(places[ref][0], constants[ref]) if ref in constants else
                                 _placeholder(view, ref, places[ref][0], _stand_in_shape(view, ref, fixed, declared)))
            else:
                places[ref] = (f"n{i}", port)
        if not stand_in:
            proto = _node_copy(n, f"n{i}")
            proto.input.extend(f"{places[ref][0]}:{places[ref][1]}" for ref in n.inputs)
            copy.node.append(proto)
    return copy, places


def _stand_in_shape(view: GraphView, ref: Ref, fixed: Shapes, declared: Shapes) -> StaticShape:
    if is_loop_merge(view, view.nodes[ref[0]]) and ref[1] == 1:
        return ()  # which input came
    return merge(fixed.get(ref), declared.get(ref))


def _stands_in(view: GraphView, n: NodeView) -> bool:
    """Nodes whose outputs are replaced by placeholders: their shapes are found in other ways."""
    if n.op in ARG_OPS or n.proto is None or n.op == "ReadVariableOp" or is_loop_merge(view, n):
        return True
    if n.op == "Const":
        return const_size(n) > SMALL
    if op_def(n.op) is None or any(src not in view.nodes for src, _ in n.inputs):
        return True
    return any(a.WhichOneof("value") == "func" or a.list.func for a in n.proto.attr.values())


def is_loop_merge(view: GraphView, n: NodeView) -> bool:
    """True for the Merge at a loop's head."""
    return n.op in ("Merge", "RefMerge") and any(_is_back(view, ref) for ref in n.inputs)


def _is_back(view: GraphView, ref: Ref) -> bool:
    return ref[0] in view.nodes and view.nodes[ref[0]].op in LOOP_BACK


def _constant_node(name: str, value: np.ndarray) -> node_def_pb2.NodeDef:
    out = node_def_pb2.NodeDef(name=name, op="Const")
    out.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    out.attr["dtype"].type = out.attr["value"].tensor.dtype
    return out


def _placeholder(view: GraphView, ref: Ref, name: str, shape: StaticShape) -> node_def_pb2.NodeDef:
    out = node_def_pb2.NodeDef(name=name, op="Placeholder")
    dtype = view.dtype(ref).removesuffix("_ref")
    out.attr["dtype"].type = tf.as_dtype("float32" if dtype == "invalid" else dtype).as_datatype_enum
    out.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    return out


def _node_copy(n: NodeView, name: str) -> node_def_pb2.NodeDef:
    if n.op in _ALIASES:  # TensorFlow forgets shapes at loop borders
        out = node_def_pb2.NodeDef(name=name, op="Identity")
        element = n.attr_proto("T")
        out.attr["T"].type = element.type if element is not None else tf.bool.as_datatype_enum  # LoopCond has no T
        return out
    out = node_def_pb2.NodeDef(name=name, op=n.op)
    definition = op_def(n.op)
    known = {a.name for a in definition.attr} if definition is not None else set()
    for key, value in n.proto.attr.items() if n.proto is not None else ():
        if key in known:
            out.attr[key].CopyFrom(value)
    return out


# --- loops and calls ---------------------------------------------------------------------------------

@dataclass
class _Cell:
    """A value that is one of ``sources`` at run time: a loop variable, or an element read from a tensor list.

    ``start`` are those that its first guess comes from; ``base`` is what TensorFlow knows of it in any case.
    """

    ref: Ref
    start: tuple[Ref, ...]
    sources: tuple[Ref, ...]
    base: StaticShape = None
    tightened: int = 0

    def first(self, shapes: Shapes) -> StaticShape:
        known = [s for s in (shapes.get(r) for r in self.start) if s is not None]
        return merge(shapes.get(self.ref), relax(*known)) if known else None

    def common(self, shapes: Shapes, *more: StaticShape) -> StaticShape:
        return merge(relax(*more, *(shapes.get(r) for r in self.sources)), self.base)


def _cells(view: GraphView) -> list[_Cell]:
    loops = [_Cell((n.name, 0), tuple(r for r in n.inputs if not _is_back(view, r)), n.inputs)
             for n in view if is_loop_merge(view, n)]
    return loops + [_Cell(ref, pushed, pushed) for ref, pushed in elements(view).items()]


def _update_cells(cells: list[_Cell], shapes: Shapes, fixed: Shapes) -> bool:
    """A loop variable has at first its initial shape; what an iteration contradicts is forgotten.

    Nothing is forgotten while first guesses are still being made: an inner loop's may need an outer loop's.  When
    all is at rest, guesses that were made too early may become sharper (twice at most, so that this ends).
    """
    new: Shapes = {}
    for c in cells:
        guess = c.first(shapes) if c.ref not in fixed else None
        if guess is not None and guess != shapes.get(c.ref):
            c.base, new[c.ref] = shapes.get(c.ref), guess
    if not new:
        kept = {c.ref: c.common(shapes, fixed[c.ref]) for c in cells if c.ref in fixed}
        new = {ref: shape for ref, shape in kept.items() if shape != fixed[ref]}
    if not new:
        for c in cells:
            sharper = c.common(shapes) if c.ref in fixed and c.tightened < 2 else None
            if sharper is not None and sharper != fixed[c.ref]:
                c.tightened, new[c.ref] = c.tightened + 1, sharper
    fixed.update(new)
    return bool(new)


def _update_calls(view: GraphView, shapes: Shapes, fixed: Shapes, assume: bool) -> bool:
    changed = False
    for n in view:
        made = _call_shapes(view, n, shapes, assume) if n.proto is not None else None
        for port, shape in enumerate(made or ()):
            if shape is not None and fixed.get((n.name, port)) != shape:
                fixed[n.name, port], changed = shape, True
    return changed


def _call_shapes(view: GraphView, n: NodeView, shapes: Shapes, assume: bool) -> list[StaticShape] | None:
    """Shapes that a call returns, from its functions' bodies."""
    def args(refs: Iterable[Ref]) -> Arguments:
        return tuple((shapes.get(r), variable_shape(view, r, assume) if view.dtype(r) == "resource" else None)
                     for r in refs)

    if n.op in view.library:
        return _returned(view, n.op, args(n.inputs))
    if n.op in _CALLS:
        return _returned(view, _function(n, "f"), args(n.inputs))
    if n.op in _BRANCHES:
        bodies = [b for attr in _BRANCHES[n.op] for b in _as_list(n.attr(attr))]
        made = [_returned(view, b.name, args(n.inputs[1:])) for b in bodies]
        return [relax(*port) for port in zip(*made, strict=False)] if all(made) else None
    if n.op in _WHILES:
        return _while_shapes(view, n, args(n.inputs))
    return None


def _as_list(value: Any) -> list[FuncRef]:
    return value if isinstance(value, list) else [value] if isinstance(value, FuncRef) else []


def _function(n: NodeView, attr: str) -> str:
    value = n.attr(attr)
    return value.name if isinstance(value, FuncRef) else ""


def _while_shapes(view: GraphView, n: NodeView, state: Arguments):
    for _ in range(_MAX_PASSES):
        made = _returned(view, _function(n, "body"), state)
        if made is None or len(made) != len(state):
            return None
        new = tuple((relax(old, out), handle) for (old, handle), out in zip(state, made, strict=True))
        if new == state:
            return [shape for shape, _ in state]
        state = new
    return None


def _returned(view: GraphView, name: str, args: Arguments) -> list[StaticShape] | None:
    """Shapes that a library function returns for arguments of the given (shape, variable's shape)."""
    body = view.library.get(name)
    key = (name, args)
    if body is None or view.calls.get(key, ()) is None:  # None: being worked out further up, the function calls itself
        return None
    if key not in view.calls:
        view.calls[key] = None
        shapes = {i: s for i, (s, _) in enumerate(args) if s is not None}
        handles = {i: h for i, (_, h) in enumerate(args) if h is not None}
        inner = GraphView(body, view.library.values(), shapes, handles, view.calls)
        found = _settle(inner, assume=True, constants={})
        view.calls[key] = [found.get(r) for r in inner.rets]
    return view.calls[key]


# --- gradients of broadcasts -------------------------------------------------------------------------

def _assume_gradient_args(result: Inferred) -> bool:
    """Decides more BroadcastGradientArgs outputs; False when there is nothing new."""
    new = False
    for n in result.view:
        if n.op != "BroadcastGradientArgs" or (n.name, 0) in result.assumed:
            continue
        left, right = (result.partial(ref) for ref in n.inputs)
        if left is None or right is None:
            continue
        dtype = tf.as_dtype(n.attr("T", "int32")).as_numpy_dtype
        for port, axes in enumerate(gradient_axes(left, right)):
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
