"""Tensor lists whose elements are known values: who reads an element, or all of them, reads the values themselves.

Loops that are written out (:mod:`.loops`) keep their inputs and results in such lists, and hand what their gradients
need over in them.  A list is a value: each op that changes one makes a new one.  So the elements of a list are found by
walking forward from where it is made.  What TensorFlow checks (that an index is in range, that an element has the shape
that a list says) must be certain; else the list, and all that is made of it, stays as it is.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from .control import contexts_of
from .edits import Edit
from .view import GraphView, NodeView, Ref, StaticShape

MOST_ELEMENTS = 4096


@dataclass(frozen=True)
class _Row:
    """A part of the tensor that a list was made of."""

    tensor: Ref
    index: int


Element = Ref | _Row | None  # None: nothing was put there


@dataclass(frozen=True)
class _List:
    """A list's elements, its element type, and the shape that all elements must have as far as it is fixed."""

    elements: tuple[Element, ...]
    dtype: str
    shape: StaticShape
    most: int = -1  # elements that may be pushed; -1: any number


class _Unknown(Exception):
    """What an op does to a list is not certain."""


def read_through(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView
                 ) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """The same graph, or a copy in which reads of lists with known elements are these elements.

    What made the lists stays, without readers.  Lists in loops and branches stay too.
    """
    reader = _Reader(Edit(source, view))
    has_lists = any(n.op in ("EmptyTensorList", "TensorListReserve", "TensorListFromTensor") for n in view)
    found = contexts_of(view) if has_lists else {}
    for n in view:
        if has_lists and n.op in _OPS and found[n.name].is_root:
            reader.take(n)
    return reader.edit.graph() if reader.edit.instead else source


class _Reader:
    """Follows lists through a graph."""

    def __init__(self, edit: Edit):
        self.edit, self.view = edit, edit.view
        self.lists: dict[Ref, _List] = {}
        self.numbers: dict[Ref, np.ndarray] = {}  # what is known of lists: lengths, shapes
        self.shapes: dict[Ref, StaticShape] = {}  # of new nodes
        self.rows: dict[tuple[Ref, int, str], Ref] = {}

    def take(self, n: NodeView) -> None:
        """Notes which list a node makes, or what is to be read instead of what it gives."""
        with contextlib.suppress(_Unknown):
            _OPS[n.op](self, n)

    # --- what is known ------------------------------------------------------------------------------

    def list(self, ref: Ref) -> _List:
        if ref not in self.lists:
            raise _Unknown
        return self.lists[ref]

    def number(self, ref: Ref) -> np.ndarray:
        value = self.numbers[ref] if ref in self.numbers else self.view.constant(ref)
        if value is None:
            raise _Unknown
        return value

    def integer(self, ref: Ref) -> int:
        value = self.number(ref)
        if value.shape:
            raise _Unknown
        return int(value)

    def shape_value(self, ref: Ref) -> StaticShape:
        """A shape given as a tensor: -1 where a size, a scalar -1 where the rank is not fixed."""
        value = self.number(ref)
        if value.shape == () and value == -1:
            return None
        if value.ndim != 1 or (value < -1).any():
            raise _Unknown
        return tuple(None if d == -1 else int(d) for d in value)

    def shape(self, e: Ref | _Row) -> StaticShape:
        """The shape that an element has in every run."""
        if isinstance(e, _Row):
            shape = self.view.proven_shape(e.tensor)
            return None if shape is None else shape[1:]
        return self.shapes[e] if e in self.shapes else self.view.proven_shape(e)

    def check(self, want: StaticShape, e: Ref | _Row) -> None:
        """Raises where an element might not have a shape that TensorFlow requires."""
        have = self.shape(e)
        if want is not None and (have is None or len(have) != len(want) or any(
                w is not None and w != h for w, h in zip(want, have, strict=True))):
            raise _Unknown

    # --- what is made -------------------------------------------------------------------------------

    def made(self, op: str, n: NodeView, inputs: Sequence[Ref], dtype: str, **integers: int) -> Ref:
        """A new node with one result, where ``n`` is."""
        node = node_def_pb2.NodeDef(op=op, device=n.device)
        node.attr["T"].type = tf.as_dtype(dtype).as_datatype_enum
        if op == "StridedSlice":
            node.attr["Index"].type = tf.int32.as_datatype_enum
        for name, value in integers.items():
            node.attr[name].i = value
        return self.edit.add(node, f"{n.name}/element", [dtype], inputs), 0

    def constant(self, n: NodeView, value: np.ndarray) -> Ref:
        return self.edit.constant(value, n.device, "number")

    def tensor(self, n: NodeView, e: Element, dtype: str) -> Ref:
        """An element as a tensor, for ``n``."""
        if e is None:
            raise _Unknown
        if not isinstance(e, _Row):
            return e
        key = e.tensor, e.index, n.device
        if key not in self.rows:
            begin, end, step = (self.constant(n, np.array([k], np.int32)) for k in (e.index, e.index + 1, 1))
            self.rows[key] = self.made("StridedSlice", n, [e.tensor, begin, end, step], dtype, shrink_axis_mask=1)
        return self.rows[key]

    def element(self, n: NodeView, items: _List, index: int, shape: Ref, port: int) -> None:
        """``n`` gives an element."""
        if not 0 <= index < len(items.elements) or items.dtype != n.attr("element_dtype"):
            raise _Unknown
        found = items.elements[index]
        if found in self.lists:  # a list of lists
            self.lists[n.name, port] = self.lists[found]
        if found is None:
            found = self.zeros(n, items, shape)
        self.edit.instead[n.name, port] = self.tensor(n, found, items.dtype)

    def zeros(self, n: NodeView, items: _List, shape: Ref) -> Ref:
        """What is read where nothing was put; TensorFlow takes its shape from all that it knows."""
        known = [s for s in (items.shape, self.shape_value(shape)) if s is not None]
        if items.dtype == "variant" or not known or None in known[0] or any(s != known[0] for s in known):
            raise _Unknown
        size = self.constant(n, np.array(known[0], np.int32))
        zero = self.constant(n, np.zeros((), tf.as_dtype(items.dtype).as_numpy_dtype))
        node = node_def_pb2.NodeDef(op="Fill", device=n.device)
        node.attr["T"].type = tf.as_dtype(items.dtype).as_datatype_enum
        node.attr["index_type"].type = tf.int32.as_datatype_enum
        return self.edit.add(node, f"{n.name}/zeros", [items.dtype], [size, zero]), 0

    # --- the ops ------------------------------------------------------------------------------------

    def empty(self, n: NodeView) -> None:
        self.lists[n.name, 0] = _List((), n.attr("element_dtype"), self.shape_value(n.inputs[0]),
                                      self.integer(n.inputs[1]))

    def reserve(self, n: NodeView) -> None:
        count = self.integer(n.inputs[1])
        if not 0 <= count <= MOST_ELEMENTS:
            raise _Unknown
        self.lists[n.name, 0] = _List((None,) * count, n.attr("element_dtype"), self.shape_value(n.inputs[0]))

    def from_tensor(self, n: NodeView) -> None:
        shape = self.view.proven_shape(n.inputs[0])
        if not shape or shape[0] is None or shape[0] > MOST_ELEMENTS:
            raise _Unknown
        want = self.shape_value(n.inputs[1])
        rows = tuple(_Row(n.inputs[0], k) for k in range(shape[0]))
        self.check(want, _Row(n.inputs[0], 0))
        self.lists[n.name, 0] = _List(rows, n.attr("element_dtype"), want)

    def same(self, n: NodeView) -> None:
        self.lists[n.name, 0] = self.list(n.inputs[0])

    def push(self, n: NodeView) -> None:
        items = self.list(n.inputs[0])
        self.check(items.shape, n.inputs[1])
        if items.dtype != n.attr("element_dtype") or items.most == len(items.elements):
            raise _Unknown
        self.lists[n.name, 0] = replace(items, elements=(*items.elements, n.inputs[1]))

    def pop(self, n: NodeView) -> None:
        items = self.list(n.inputs[0])
        self.element(n, items, len(items.elements) - 1, n.inputs[1], 1)
        self.lists[n.name, 0] = replace(items, elements=items.elements[:-1])

    def set(self, n: NodeView) -> None:
        items, index = self.list(n.inputs[0]), self.integer(n.inputs[1])
        self.check(items.shape, n.inputs[2])
        if items.dtype != n.attr("element_dtype") or not 0 <= index < len(items.elements):
            raise _Unknown
        elements = (*items.elements[:index], n.inputs[2], *items.elements[index + 1:])
        self.lists[n.name, 0] = replace(items, elements=elements)

    def get(self, n: NodeView) -> None:
        self.element(n, self.list(n.inputs[0]), self.integer(n.inputs[1]), n.inputs[2], 0)

    def stack(self, n: NodeView) -> None:
        """All elements as one tensor.  Pack refuses elements of different shapes, as TensorFlow's own op does."""
        items, want = self.list(n.inputs[0]), self.shape_value(n.inputs[1])
        count = n.attr("num_elements", -1)
        if not items.elements or items.dtype in ("variant", "resource") or items.dtype != n.attr("element_dtype") \
                or count not in (-1, len(items.elements)):
            raise _Unknown
        for e in items.elements:
            if e is None:
                raise _Unknown
            self.check(want, e)
        tensors = [self.tensor(n, e, items.dtype) for e in items.elements]
        self.edit.instead[n.name, 0] = self.made("Pack", n, tensors, items.dtype, N=len(tensors), axis=0)

    def sum(self, n: NodeView) -> None:
        """Lists added element by element: gradients of what many turns read."""
        first, *rest = (self.list(ref) for ref in n.inputs)
        total = first.elements
        for items in rest:
            if (items.dtype, items.shape, len(items.elements)) != (first.dtype, first.shape, len(total)):
                raise _Unknown
            pairs = zip(total, items.elements, strict=True)
            total = tuple(b if a is None else a if b is None else self.added(n, a, b, first.dtype) for a, b in pairs)
        self.lists[n.name, 0] = replace(first, elements=total, most=-1)

    def added(self, n: NodeView, a: Ref | _Row, b: Ref | _Row, dtype: str) -> Ref:
        if self.shape(a) is None or self.shape(a) != self.shape(b):
            raise _Unknown
        total = self.made("AddV2", n, [self.tensor(n, a, dtype), self.tensor(n, b, dtype)], dtype)
        self.shapes[total] = self.shape(a)
        return total

    def zeros_like(self, n: NodeView) -> None:
        """A list of zeros.  Where nothing was put there still is nothing."""
        items = self.list(n.inputs[0])
        zeros = tuple(e and self.zero(n, e, items.dtype) for e in items.elements)
        self.lists[n.name, 0] = replace(items, elements=zeros)

    def zero(self, n: NodeView, e: Ref | _Row, dtype: str) -> Ref:
        if dtype == "variant":
            raise _Unknown
        made = self.made("ZerosLike", n, [self.tensor(n, e, dtype)], dtype)
        self.shapes[made] = self.shape(e)
        return made

    def length(self, n: NodeView) -> None:
        self.is_number(n, np.array(len(self.list(n.inputs[0]).elements), np.int32))

    def element_shape(self, n: NodeView) -> None:
        shape, dtype = self.list(n.inputs[0]).shape, tf.as_dtype(n.attr("shape_type")).as_numpy_dtype
        self.is_number(n, np.array(-1 if shape is None else [-1 if d is None else d for d in shape], dtype))

    def is_number(self, n: NodeView, value: np.ndarray) -> None:
        self.numbers[n.name, 0] = value
        self.edit.instead[n.name, 0] = self.constant(n, value)


_OPS: dict[str, Callable[[_Reader, NodeView], None]] = {
    "EmptyTensorList": _Reader.empty, "TensorListReserve": _Reader.reserve,
    "TensorListFromTensor": _Reader.from_tensor, "Identity": _Reader.same, "TensorListPushBack": _Reader.push,
    "TensorListPopBack": _Reader.pop, "TensorListSetItem": _Reader.set, "TensorListGetItem": _Reader.get,
    "TensorListStack": _Reader.stack, "TensorListLength": _Reader.length,
    "TensorListElementShape": _Reader.element_shape, "AddN": _Reader.sum, "ZerosLike": _Reader.zeros_like,
}
