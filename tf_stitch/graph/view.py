"""A read-only view of a GraphDef or of a FunctionDef body, with the protos hidden.

A value is named by a *ref* ``(node name, output port)``; ports count the flat outputs of a node, also in
function bodies, where the proto writes ``node:out_arg:index`` instead.
"""
from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2, op_def_pb2
from tensorflow.python.framework import op_def_registry

Ref = tuple[str, int]
StaticShape = tuple[int | None, ...] | None

ARG_OP = "_Arg"
ARG_OPS = frozenset({"_Arg", "_DeviceArg"})
RET_OPS = frozenset({"_Retval", "_DeviceRetval"})
PASS_THROUGH = frozenset({"Identity", "StopGradient", "PreventGradient", "Snapshot"})
LOOP_BACK = frozenset({"NextIteration", "RefNextIteration"})
PROGRAM = "StitchedProgram"


@dataclass(frozen=True)
class FuncRef:
    """A function-valued attr: the function's name and its own attrs."""

    name: str
    attrs: Mapping[str, Any]


@functools.cache
def op_def(op: str) -> op_def_pb2.OpDef | None:
    """The registered definition of an op type; None when this TensorFlow does not know it."""
    return op_def_registry.get(op)


def may_have_effects(op: str) -> bool:
    """True for an op type that has effects or sees those of others, or that this TensorFlow does not know."""
    signature = op_def(op)
    return signature is None or signature.is_stateful


@functools.cache
def dtype_name(enum: int) -> str:
    """TensorFlow's name of a DataType number, e.g. ``float32``; ``invalid`` for 0 and unknown numbers."""
    try:
        return tf.dtypes.as_dtype(enum).name
    except TypeError:
        return "invalid"


def reached(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """Some names, and all that follow on them."""
    seen, stack = set(start), list(start)
    while stack:
        new = {*following(stack.pop())} - seen
        seen |= new
        stack.extend(new)
    return seen


def _body_text(name: str, bases: Mapping[str, int], port: int) -> str:
    """How a function body names an output; ``bases`` are in order, and an empty list begins where what follows does."""
    arg, base = [(arg, base) for arg, base in bases.items() if base <= port][-1]
    return f"{name}:{arg}:{port - base}"


def shape_tuple(proto) -> StaticShape:
    """A TensorShapeProto as a tuple; None for an unknown rank."""
    if proto.unknown_rank:
        return None
    return tuple(int(d.size) if d.size >= 0 else None for d in proto.dim)


def _text(s: bytes) -> str | bytes:
    try:
        return s.decode()
    except UnicodeDecodeError:
        return s


def attr_value(a: attr_value_pb2.AttrValue) -> Any:
    """An attr as a Python value: dtypes are names, shapes tuples, tensors NumPy arrays."""
    kind = a.WhichOneof("value")
    if kind == "list":
        return _list_value(a.list)
    return _SCALAR[kind](a) if kind in _SCALAR else None


_SCALAR = {
    "s": lambda a: _text(a.s),
    "i": lambda a: a.i,
    "f": lambda a: a.f,
    "b": lambda a: a.b,
    "type": lambda a: dtype_name(a.type),
    "shape": lambda a: shape_tuple(a.shape),
    "tensor": lambda a: tf.make_ndarray(a.tensor),
    "func": lambda a: FuncRef(a.func.name, {k: attr_value(v) for k, v in a.func.attr.items()}),
}


def _list_value(values: attr_value_pb2.AttrValue.ListValue) -> list[Any]:
    for field, items in values.ListFields():
        if field.name == "s":
            return [_text(s) for s in items]
        if field.name == "type":
            return [dtype_name(t) for t in items]
        if field.name == "shape":
            return [shape_tuple(s) for s in items]
        if field.name == "tensor":
            return [tf.make_ndarray(t) for t in items]
        if field.name == "func":
            return [FuncRef(f.name, {k: attr_value(v) for k, v in f.attr.items()}) for f in items]
        return list(items)
    return []


class NodeView:
    """One node.  ``proto`` is the NodeDef, or None for a function argument.

    Attributes:
      name, op, device: as in the proto; an argument has op ``_Arg``.
      inputs: data inputs as refs, in order.
      control_inputs: names of nodes that must run before.
      outputs: dtype name per output port; None when the op is not registered (see ``GraphView.dtype``).
    """

    __slots__ = ("_attrs", "_cache", "control_inputs", "device", "inputs", "name", "op", "outputs", "proto")

    def __init__(self, name: str, op: str, device: str, inputs: Sequence[Ref], control_inputs: Sequence[str],
                 outputs: list[str] | None, proto: node_def_pb2.NodeDef | None,
                 attrs: Mapping[str, attr_value_pb2.AttrValue]):
        self.name, self.op, self.device = name, op, device
        self.inputs: tuple[Ref, ...] = tuple(inputs)
        self.control_inputs: tuple[str, ...] = tuple(control_inputs)
        self.outputs = outputs
        self.proto = proto
        self._attrs = attrs
        self._cache: dict[str, Any] = {}

    @property
    def is_arg(self) -> bool:
        return self.op in ARG_OPS

    def attr(self, name: str, default: Any = None) -> Any:
        """The attr's value, else the op's own default, else ``default``."""
        if name not in self._cache:
            raw = self.attr_proto(name)
            self._cache[name] = default if raw is None else attr_value(raw)
        value = self._cache[name]
        return default if value is None else value

    def attr_proto(self, name: str) -> attr_value_pb2.AttrValue | None:
        """The attr as a proto, or None; op defaults are filled in."""
        if name in self._attrs:
            return self._attrs[name]
        return _defaults(self.op).get(name)

    @property
    def attrs(self) -> dict[str, Any]:
        """All attrs, op defaults included."""
        return {k: self.attr(k) for k in {**_defaults(self.op), **self._attrs}}

    def __repr__(self) -> str:
        return f"{self.op}({self.name})"


@functools.cache
def _defaults(op: str) -> dict[str, attr_value_pb2.AttrValue]:
    definition = op_def(op)
    if definition is None:
        return {}
    return {a.name: a.default_value for a in definition.attr if a.HasField("default_value")}


class GraphView:
    """A GraphDef, or the body of a FunctionDef, as named nodes in topological order.

    Args:
      source: a GraphDef or a FunctionDef.
      library: functions that nodes may call: a FunctionDefLibrary or FunctionDefs; for a GraphDef its own library.
      arg_shapes: shapes of a FunctionDef's arguments by index, where the caller knows more than the body says.
      handle_shapes: likewise the shapes of the variables behind resource arguments.
      calls: a cache that views of one library may share.

    Attributes:
      nodes: name -> NodeView, in topological order (edges out of NextIteration do not count).
      args: names of argument nodes, by index; rets: refs of returned values (FunctionDef, or `_Retval` inputs).
    """

    def __init__(self, source: graph_pb2.GraphDef | function_pb2.FunctionDef,
                 library: function_pb2.FunctionDefLibrary | Iterable[function_pb2.FunctionDef] | None = None,
                 arg_shapes: Mapping[int, StaticShape] | None = None,
                 handle_shapes: Mapping[int, StaticShape] | None = None,
                 calls: dict[Any, list[StaticShape] | None] | None = None):
        self.source = source
        self.is_function = isinstance(source, function_pb2.FunctionDef)
        functions = source.library.function if library is None and not self.is_function else library
        self.library = {f.signature.name: f for f in getattr(functions, "function", functions) or ()}
        self.arg_shapes = dict(arg_shapes or {})
        self.handle_shapes = dict(handle_shapes or {})
        self.calls = calls if calls is not None else {}  # results of functions called, shared by views of one library
        self.control_rets: tuple[str, ...] = ()
        unordered = self._read_function() if self.is_function else self._read_graph()
        self.nodes: dict[str, NodeView] = {n.name: n for n in _topological(unordered)}
        if not self.is_function:
            self._find_args()

    # --- reading ------------------------------------------------------------------------------------

    def _read_graph(self) -> dict[str, NodeView]:
        out = {}
        for proto in self.source.node:
            data, control = _split_inputs(proto.input)
            out[proto.name] = self._node(proto, [_graph_ref(t) for t in data], control)
        return out

    def _find_args(self) -> None:
        args = [n for n in self.nodes.values() if n.op in ARG_OPS]
        rets = [n for n in self.nodes.values() if n.op in RET_OPS]
        self.args = [n.name for n in sorted(args, key=lambda n: n.attr("index", 0))]
        self.rets = [n.inputs[0] for n in sorted(rets, key=lambda n: n.attr("index", 0)) if n.inputs]

    def _read_function(self) -> dict[str, NodeView]:
        fdef = self.source
        out: dict[str, NodeView] = {}
        for i, arg in enumerate(fdef.signature.input_arg):
            attrs = dict(fdef.arg_attr[i].attr) if i in fdef.arg_attr else {}
            types = _arg_types(arg, fdef.attr)
            out[arg.name] = NodeView(arg.name, ARG_OP, "", (), (), types, None, attrs)
        self.args = list(out)
        self._port_base = {n.name: self._bases(n) for n in fdef.node_def}
        for proto in fdef.node_def:
            data, control = _split_inputs(proto.input)
            out[proto.name] = self._node(proto, [self._function_ref(t) for t in data], control)
        self.rets = [self._function_ref(fdef.ret[a.name]) for a in fdef.signature.output_arg]
        self.control_rets = tuple(fdef.control_ret.values())
        return out

    def _signature(self, op: str) -> op_def_pb2.OpDef | None:
        if op in self.library:
            return self.library[op].signature
        return op_def(op)

    def _bases(self, proto: node_def_pb2.NodeDef) -> dict[str, int]:
        """First flat port of each output arg of a node."""
        bases: dict[str, int] = {}
        port = 0
        signature = self._signature(proto.op)
        for arg in signature.output_arg if signature else ():
            bases[arg.name] = port
            port += len(_arg_types(arg, _AttrsOf(proto)))
        return bases

    def _function_ref(self, text: str) -> Ref:
        parts = text.split(":")
        if len(parts) == 1:
            return parts[0], 0
        if len(parts) == 2:  # an argument that is a list
            return parts[0], int(parts[1])
        return parts[0], self._port_base[parts[0]].get(parts[1], 0) + int(parts[2])

    def _node(self, proto: node_def_pb2.NodeDef, inputs: Sequence[Ref], control: Sequence[str]) -> NodeView:
        signature = self._signature(proto.op)
        types = None
        if signature is not None:
            types = [t for arg in signature.output_arg for t in _arg_types(arg, _AttrsOf(proto))]
        return NodeView(proto.name, proto.op, proto.device, inputs, control, types, proto, proto.attr)

    # --- structure ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> NodeView:
        return self.nodes[name]

    def __contains__(self, name: str) -> bool:
        return name in self.nodes

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    @functools.cached_property
    def _consumers(self) -> dict[str, list[tuple[str, int, int]]]:
        out: dict[str, list[tuple[str, int, int]]] = {name: [] for name in self.nodes}
        for n in self.nodes.values():
            for i, (src, port) in enumerate(n.inputs):
                if src in out:
                    out[src].append((n.name, i, port))
        return out

    @functools.cached_property
    def _control_consumers(self) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {name: [] for name in self.nodes}
        for n in self.nodes.values():
            for src in n.control_inputs:
                if src in out:
                    out[src].append(n.name)
        return out

    def consumers(self, name: str) -> list[tuple[str, int, int]]:
        """Who reads the node's data: (reader, reader's input index, port read)."""
        return self._consumers[name]

    def control_consumers(self, name: str) -> list[str]:
        """Nodes with a control edge from this node."""
        return self._control_consumers[name]

    def readers(self, name: str) -> list[str]:
        """Nodes that read the node's data or wait for it."""
        return [*(reader for reader, _, _ in self.consumers(name)), *self.control_consumers(name)]

    def port_base(self, name: str) -> dict[str, int]:
        """First flat port of each output arg of a node."""
        proto = self.nodes[name].proto
        return {} if proto is None else self._bases(proto)

    def ref_text(self, ref: Ref) -> str:
        """How the proto writes a ref as an input of a node of this graph or function body."""
        name, port = ref
        if not self.is_function:
            return f"{name}:{port}" if port else name
        proto = self.nodes[name].proto
        if proto is None:
            return f"{name}:{port}" if port else name
        return self.output_text(proto, port)

    def output_text(self, proto: node_def_pb2.NodeDef, port: int) -> str:
        """How an output of a node, which need not be in the view yet, is written as an input of others."""
        if not self.is_function:
            return f"{proto.name}:{port}" if port else proto.name
        return _body_text(proto.name, self._bases(proto), port)

    def body_text(self, ref: Ref) -> str:
        """How a function body names an output of a node."""
        return _body_text(ref[0], self.port_base(ref[0]), ref[1])

    # --- types and values ---------------------------------------------------------------------------

    def dtype(self, ref: Ref) -> str:
        """Element type name of a value, e.g. ``float32``, ``resource``; ``invalid`` when it is not known."""
        name, port = ref
        node = self.nodes.get(name)
        if node is None or node.outputs is None:
            return self._dtype_from_readers(ref)
        return node.outputs[port] if port < len(node.outputs) else "invalid"

    def _dtype_from_readers(self, ref: Ref) -> str:
        for reader, index, port in self._consumers.get(ref[0], ()):
            node = self.nodes[reader]
            if port == ref[1] and node.proto is not None:
                types = input_types(node, self._signature(node.op))
                if index < len(types):
                    return types[index]
        return "invalid"

    def num_outputs(self, name: str) -> int:
        """Number of output ports; for an op that is not registered, as many as are read."""
        node = self.nodes[name]
        if node.outputs is not None:
            return len(node.outputs)
        return max((port + 1 for _, _, port in self.consumers(name)), default=0)

    @functools.cached_property
    def place(self) -> dict[str, int]:
        """The position of every node in topological order."""
        return {name: k for k, name in enumerate(self.nodes)}

    @functools.cached_property
    def has_references(self) -> bool:
        """True when some value is a reference variable's."""
        return any(t.endswith("_ref") for n in self for t in n.outputs or ())

    @functools.cached_property
    def _shapes(self):
        from .shapes import infer

        return infer(self)

    def shape(self, ref: Ref) -> StaticShape:
        """Static shape of a value, None dims unknown; None when the rank is unknown.

        May rest on the values that :meth:`assumed` gives; :meth:`proven_shape` does not.
        """
        return self._shapes.shapes.get(ref)

    def proven_shape(self, ref: Ref) -> StaticShape:
        """As :meth:`shape`, but only what holds in every run (for declaring the shapes of new nodes)."""
        return self._shapes.proven.get(ref)

    def constant(self, ref: Ref) -> np.ndarray | None:
        """The value when it is a small known constant (at most 1,024 elements), else None."""
        return self._shapes.constant(ref)

    def partial(self, ref: Ref) -> tuple[int | None, ...] | None:
        """Elements of a small integer value, row-major, None where one is unknown; None when all are.

        May rest on assumptions, as :meth:`shape` does; who uses it must guard it.
        """
        return self._shapes.partial(ref)

    def assumed(self, ref: Ref) -> np.ndarray | None:
        """The value of a small integer result if unknown dims that broadcast together are equal and not 1
        (BroadcastGradientArgs and what is computed from it), and if callers give the shapes they seem to; else None.

        Who uses it must guard it.
        """
        return self._shapes.assumed_value(ref)


class _AttrsOf:
    """Attr lookup of a NodeDef with op defaults, shaped like a proto map."""

    def __init__(self, proto: node_def_pb2.NodeDef):
        self._attrs, self._defaults = proto.attr, _defaults(proto.op)

    def __contains__(self, name: str) -> bool:
        return name in self._attrs or name in self._defaults

    def __getitem__(self, name: str) -> attr_value_pb2.AttrValue:
        return self._attrs[name] if name in self._attrs else self._defaults[name]


def _arg_types(arg: op_def_pb2.OpDef.ArgDef, attrs) -> list[str]:
    """Dtype names of the flat values of one arg; ``invalid`` where an attr is missing."""
    if arg.type_list_attr:
        return [dtype_name(t) for t in attrs[arg.type_list_attr].list.type] if arg.type_list_attr in attrs else []
    enum = arg.type or (attrs[arg.type_attr].type if arg.type_attr and arg.type_attr in attrs else 0)
    name = dtype_name(enum)
    if arg.is_ref and not name.endswith("_ref"):
        name += "_ref"
    count = attrs[arg.number_attr].i if arg.number_attr and arg.number_attr in attrs else 1
    return [name] * count


def input_types(node: NodeView, signature: op_def_pb2.OpDef | None) -> list[str]:
    """Dtype names that a node's signature wants for its data inputs; [] when the op is not known."""
    if signature is None or node.proto is None:
        return []
    return [t.removesuffix("_ref") for arg in signature.input_arg for t in _arg_types(arg, _AttrsOf(node.proto))]


def _split_inputs(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    data: list[str] = []
    control: list[str] = []
    for t in texts:
        (control if t.startswith("^") else data).append(t.removeprefix("^"))
    return data, control


def _graph_ref(text: str) -> Ref:
    name, _, port = text.rpartition(":")
    return (name, int(port)) if name and port.isdigit() else (text, 0)


def _topological(nodes: Mapping[str, NodeView]) -> list[NodeView]:
    """Sources first, ties in the given order; edges out of NextIteration (loop back edges) do not count.

    Nodes on any other cycle come last, in the given order.
    """
    rank = {name: i for i, name in enumerate(nodes)}
    readers: dict[str, list[str]] = {name: [] for name in nodes}
    waits = dict.fromkeys(nodes, 0)
    for n in nodes.values():
        for src in {s for s, _ in n.inputs} | set(n.control_inputs):
            if src in nodes and nodes[src].op not in LOOP_BACK:
                readers[src].append(n.name)
                waits[n.name] += 1
    ready = [rank[name] for name, w in waits.items() if not w]
    heapq.heapify(ready)
    names = list(nodes)
    order: list[NodeView] = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(nodes[name])
        for r in readers[name]:
            waits[r] -= 1
            if not waits[r]:
                heapq.heappush(ready, rank[r])
    if len(order) < len(nodes):
        done = {n.name for n in order}
        order.extend(n for n in nodes.values() if n.name not in done)
    return order
