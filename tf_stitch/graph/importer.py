"""A cluster of TensorFlow nodes becomes an IR graph.

Each node in topological order either becomes IR nodes (its lowering), or, when it computes small integers
from shapes, an array of Dims (its symbolic rule).  A symbolic result becomes a tensor only where one is read.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ImportFailed
from ..ir import dims as D
from ..ir.builder import Builder
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Graph, Node
from ..ir.ops import IRError
from . import lower
from .lower.context import Context, SymContext
from .lower.registry import LITERAL_ELEMENTS, NotSymbolic, operand_kinds
from .view import ARG_OPS, GraphView, NodeView, Ref

MAX_SYMBOLIC = 64  # elements of a value that is tracked as Dims


def import_cluster(view: GraphView, nodes: Iterable[str], inputs: Sequence[Ref], outputs: Sequence[Ref],
                   name: str = "") -> Graph:
    """The IR of a cluster.

    Args:
      view: the graph that holds the cluster.
      nodes: names of the cluster's nodes.
      inputs: values from outside that the nodes read; each becomes a param, in this order.  Constants outside
        may be left out: a literal one is read from the view.
      outputs: values of the nodes that the outside reads; they become the graph's outputs, in this order.

    Raises:
      ImportFailed: a node has no lowering, or its types, shapes or attrs are beyond the IR; it names the node.
    """
    importer = _Importer(view, set(nodes), inputs)
    importer.run()
    return importer.finish(outputs, name)


def import_body(view: GraphView, builder: Builder, args: Sequence[Node]) -> list[Node]:
    """What a function's body gives for arguments that are IR tensors of ``builder``, to which its nodes go.

    Raises ImportFailed as :func:`import_cluster` does.
    """
    importer = _Importer(view, {n.name for n in view if n.op not in ARG_OPS | {"NoOp"}}, (), builder)
    importer.tensors.update(((name, 0), arg) for name, arg in zip(view.args, args, strict=True))
    origin = builder.origin
    importer.run()
    results = [importer.tensor(ref) for ref in view.rets]
    builder.origin = origin
    return results


class _Importer:
    def __init__(self, view: GraphView, members: set[str], inputs: Sequence[Ref], builder: Builder | None = None):
        self.view, self.members = view, members
        self.b = builder or Builder()
        self.tensors: dict[Ref, Node] = {}
        self.symbols: dict[Ref, np.ndarray] = {}
        self.demanded: dict[Ref, np.ndarray | None] = {}
        self.params: dict[Ref, Node] = {}
        for ref in inputs:
            self.params[ref] = self.tensors[ref] = self._param(ref)

    def _fail(self, node: str, reason: str) -> ImportFailed:
        op = self.view[node].op if node in self.view else "missing"
        error = ImportFailed(f"Node '{node}' ({op}) cannot be imported: {reason.rstrip('.')}.")
        error.node = node
        return error

    def _param(self, ref: Ref) -> Node:
        shape, dtype = self.view.shape(ref), self.view.dtype(ref)
        if shape is None:
            raise self._fail(ref[0], f"the rank of output {ref[1]} is unknown")
        if dtype not in DTYPES:
            raise self._fail(ref[0], f"element type {dtype} is not supported")
        return self.b.param(shape, dtype, origin=f"{ref[0]}:{ref[1]}" if ref[1] else ref[0])

    # --- the walk -----------------------------------------------------------------------------------

    def run(self) -> None:
        for name in sorted(self.members & self.view.nodes.keys(), key=self.view.place.__getitem__):
            node = self.view[name]
            reason = lower.why_not(self.view, node)
            if reason is not None:
                raise self._fail(node.name, reason)
            self.b.origin = node.name
            try:
                self._node(node)
            except (IRError, ZeroDivisionError, OverflowError) as e:
                raise self._fail(node.name, str(e)) from e

    def _node(self, node: NodeView) -> None:
        if node.op == "Const":
            self.tensors[node.name, 0] = self._constant(node)
            return
        results = self._symbolic(node, demand=False)
        if results is not None:
            for port, value in enumerate(results):
                self.symbols[node.name, port] = value
            return
        entry = lower.REGISTRY[node.op]
        c = Context(self.b, self.view, node)
        if entry.fn is None:
            self._only_symbolic(c, node)
            return
        made = entry.fn(c, *self._operands(c, node, entry))
        for port, tensor in enumerate(made if isinstance(made, (list, tuple)) else [made]):
            self._check(c, port, tensor)
            self.tensors[node.name, port] = tensor

    def _only_symbolic(self, c: Context, node: NodeView) -> None:
        """An op without a tensor form, computed from integers that come from outside."""
        results = self._symbolic(node, demand=True)
        if results is None:
            c.fail("its result is not known from shapes")
        for port, value in enumerate(results):
            self.symbols[node.name, port] = value

    def _check(self, c: Context, port: int, tensor: Node) -> None:
        """A lowering that disagrees with TensorFlow about rank or dtype is a bug; it must not reach a kernel."""
        want = c.static_shape(port)
        if want is not None and len(want) != tensor.rank:
            c.fail(f"output {port} came out with rank {tensor.rank} where TensorFlow infers {len(want)}")
        if tensor.dtype != c.out_dtype(port):
            c.fail(f"output {port} came out as {tensor.dtype} where TensorFlow infers {c.out_dtype(port)}")

    def _operands(self, c: Context, node: NodeView, entry: lower.Lowering) -> list[Any]:
        values, statics = operand_kinds(entry, len(node.inputs))
        out: list[Any] = []
        for i, ref in enumerate(node.inputs):
            if i in statics:
                out.append(self._static(c, i, ref))
            elif i in values:
                out.append(self._value(c, i, ref))
            else:
                out.append(self.tensor(ref))
        return out

    def _constant(self, node: NodeView) -> Node:
        value = np.asarray(node.attr("value"))
        dtype = self.view.dtype((node.name, 0))
        if value.size > LITERAL_ELEMENTS:
            fill = value.reshape(-1)[0]
            return self.b.broadcast_to(self.b.const(fill, dtype), value.shape)
        return self.b.const(value, dtype)

    # --- operands -----------------------------------------------------------------------------------

    def tensor(self, ref: Ref) -> Node:
        """The value as an IR tensor."""
        if ref in self.tensors:
            return self.tensors[ref]
        if ref in self.symbols:
            self.tensors[ref] = self._shape_tensor(ref, self.symbols[ref])
            return self.tensors[ref]
        node = self.view.nodes.get(ref[0])
        if node is not None and lower.is_literal(self.view, node):
            self.tensors[ref] = self._constant(node)
            return self.tensors[ref]
        raise self._fail(ref[0], f"its output {ref[1]} is read by the cluster but is not among the cluster's inputs")

    def _shape_tensor(self, ref: Ref, value: np.ndarray) -> Node:
        node = self.view[ref[0]]
        if node.op in lower.INEXACT:
            raise self._fail(ref[0], "its result is not known exactly enough to be a tensor")
        dtype = self.view.dtype(ref)
        flat = tuple(value.reshape(-1))
        if D.all_static(flat):
            return self.b.const(np.array(value.tolist(), DTYPES[dtype].numpy).reshape(value.shape), dtype)
        return self.b.shape_value(flat, value.shape, dtype)

    def dims_of(self, ref: Ref) -> tuple[Dim, ...]:
        """Shape of a value."""
        if ref in self.symbols and ref not in self.tensors:
            return tuple(self.symbols[ref].shape)
        return self.tensor(ref).shape

    def _static(self, c: Context, i: int, ref: Ref) -> np.ndarray:
        value = self.view.constant(ref)
        if value is not None:
            return np.asarray(value)
        found = self.symbol(ref, demand=False)
        if found is not None and D.all_static(found.reshape(-1)):
            return np.array(found.tolist(), np.int64).reshape(found.shape)
        assumed = self.view.assumed(ref)
        if assumed is None or ref not in self.params:
            c.fail(f"operand {i} ('{ref[0]}') is not a constant")
        param = self.params[ref]
        for k, v in enumerate(assumed.reshape(-1)):
            self.b.require("eq", self.b.value_symbol(param, k), int(v), f"{c.node.name}: axes that were assumed")
        return assumed

    def _value(self, c: Context, i: int, ref: Ref) -> np.ndarray:
        found = self.symbol(ref, demand=True)
        if found is None:
            c.fail(f"operand {i} ('{ref[0]}') is not known from shapes")
        return found

    def symbol(self, ref: Ref, demand: bool) -> np.ndarray | None:
        """The value as Dims, or None.  With ``demand`` small integer params become value symbols."""
        if ref in self.symbols:
            self.symbols[ref] = _resolved(self.b, self.symbols[ref])
            return self.symbols[ref]
        constant = self.view.constant(ref)
        if constant is not None:
            return _objects(constant) if constant.size <= MAX_SYMBOLIC and constant.dtype.kind in "iub" else None
        if not demand:
            return None
        if ref not in self.demanded:
            self.demanded[ref] = self._demand(ref)
        found = self.demanded[ref]
        return None if found is None else _resolved(self.b, found)

    def _demand(self, ref: Ref) -> np.ndarray | None:
        if ref in self.params:
            return self._param_symbols(ref)
        if ref[0] not in self.members:
            return None
        results = self._symbolic(self.view[ref[0]], demand=True)
        return None if results is None else results[ref[1]]

    def _param_symbols(self, ref: Ref) -> np.ndarray | None:
        param = self.params[ref]
        count = D.product(param.shape)
        if not DTYPES[param.dtype].is_integer or not D.all_static(param.shape) or not D.is_static(count) \
                or count > MAX_SYMBOLIC:
            return None
        flat = [self.b.value_symbol(param, k) for k in range(count)]
        known = self.view.partial(ref) or (None,) * count
        flat = [v if k is None else self.b.same_dim(v, k, f"{ref[0]}: its value as it is known")
                for v, k in zip(flat, known, strict=True)]
        return _object_array(flat, param.shape)

    def _symbolic(self, node: NodeView, demand: bool) -> list[np.ndarray] | None:
        rule = lower.SYMBOLIC.get(node.op)
        if rule is None or not self._integral(node):
            return None
        try:
            made = rule(_Imported(self, node, demand))
        except (NotSymbolic, ValueError, IndexError):
            return None
        results = made if isinstance(made, list) else [made]
        return results if all(r.size <= MAX_SYMBOLIC for r in results) else None

    def _integral(self, node: NodeView) -> bool:
        """Only small integer (or bool) results are worth tracking."""
        for port in range(self.view.num_outputs(node.name)):
            shape, dtype = self.view.shape((node.name, port)), self.view.dtype((node.name, port))
            if DTYPES[dtype].is_float or shape is None or len(shape) > 2:
                return False
        return True

    # --- the end ------------------------------------------------------------------------------------

    def finish(self, outputs: Sequence[Ref], name: str) -> Graph:
        try:
            return self.b.finish([self.tensor(ref) for ref in outputs], name)
        except IRError as e:
            raise ImportFailed(f"Cluster '{name}' cannot be imported: {str(e).rstrip('.')}.") from e


class _Imported(SymContext):
    """A symbolic rule's view of a node that is imported; ``demand`` as in :meth:`_Importer.symbol`."""

    def __init__(self, importer: _Importer, node: NodeView, demand: bool):
        super().__init__(node, importer.view, importer.b)
        self._importer, self._demand = importer, demand

    def value(self, i: int) -> np.ndarray:
        found = self._importer.symbol(self.node.inputs[i], self._demand)
        if found is None:
            raise NotSymbolic
        return found

    def dims(self, i: int) -> tuple[Dim, ...]:
        try:
            return self._importer.dims_of(self.node.inputs[i])
        except ImportFailed:
            raise NotSymbolic from None


def _object_array(flat: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    out = np.empty(len(flat), object)
    for i, v in enumerate(flat):
        out[i] = v
    return out.reshape(tuple(shape))


def _resolved(b: Builder, value: np.ndarray) -> np.ndarray:
    """The same dims after the equalities found since."""
    return _object_array([b.resolve(d) for d in value.reshape(-1)], value.shape)


def _objects(value: np.ndarray) -> np.ndarray:
    return _object_array([v for v in value.reshape(-1).tolist()], value.shape)
