"""Folds of the rows that share an index, and the largest elements of rows: by order instead of by atomic additions.

Indices are put in order first.  What belongs together then lies together, and is folded in the order in which it came:
a result is the same in every run, which TensorFlow's own kernels for a GPU do not promise.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ml_dtypes import finfo

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import GraphView, NodeView, Ref
from .array import sizes_of
from .context import Context
from .registry import ALL, INT, NUM, lower

LONGEST = 1 << 15  # indices: counting takes the square of it, 0.2 ms on an H200
LARGEST = 1 << 20  # elements of a tensor of which some rows are changed
NARROW, WIDEST = 1 << 9, 1 << 11  # elements of a row whose largest are wanted: of any number of rows, at most
ORDERED = 1 << 29  # pairs of elements of wider rows that are compared: 0.1 ms on an H200
COMPARED = 1 << 22  # pairs of an element and a bin that are counted by comparing: some microseconds


# --- segments --------------------------------------------------------------------------------------

def _is_long(view: GraphView, node: NodeView) -> str | None:
    """Where many segments are known, as of an embedding's gradient, many indices are likely."""
    shape, count = view.shape(node.inputs[1]) or (), view.constant(node.inputs[2])
    known = math.prod(d for d in shape if d is not None)
    if known <= LONGEST and None in shape and count is not None and int(count) > LONGEST:
        return f"op {node.op} may take many indices: how many is unknown, and there are more than {LONGEST} segments"
    return f"op {node.op} takes more than {LONGEST} indices" if known > LONGEST else None


@dataclass(frozen=True)
class Bins:
    """Where rows lie that are put in the order of their indices: those of index s from ``starts[s]`` on."""

    order: Node
    starts: Node

    def rows(self, c: Context, x: Node) -> Node:
        """The rows of ``x`` in order."""
        return c.b.gather(x, self.order, mode="clip")


def bins(c: Context, ids: Node, count: Dim) -> Bins:
    """Puts the rows of ``count`` indices in order; other indices come before the first or after the last of them."""
    c.b.require("le", ids.shape[0], LONGEST, f"{c.node.name}: few indices")
    order = c.b.order(ids)
    sorted_ids = c.b.gather(ids, order, mode="clip")
    return Bins(order, c.b.search(sorted_ids, c.b.iota((count + 1,), 0, ids.dtype)))


def fold(c: Context, kind: str, x: Node, where: Bins) -> Node:
    """The rows of each index folded, half types in float32."""
    wide = c.wide(x) if kind in ("sum", "prod") else x
    return c.like(c.b.segment(kind, where.rows(c, wide), where.starts), x.dtype)


def _unsorted(kind: str):
    def fn(c: Context, x: Node, ids: Node, count: np.ndarray) -> Node:
        """Negative indices count for nothing, and on a GPU neither do those that are too large."""
        (segments,) = count.reshape(-1)
        c.b.require("le", 0, segments, f"{c.node.name}: the number of segments is not negative")
        lead = [c.b.same_dim(d, x.shape[i], f"{c.node.name}: an index for every row") for i, d in enumerate(ids.shape)]
        n = D.product(lead)
        where = bins(c, c.b.reshape(ids, (n,)), segments)
        return _bounded(c, kind, fold(c, kind, c.b.reshape(x, (n, *x.shape[ids.rank:])), where))

    return fn


def _bounded(c: Context, kind: str, x: Node) -> Node:
    """A maximum begins with the lowest finite number, not with minus infinity."""
    if kind not in ("max", "min") or not c.is_float(x):
        return x
    limit = float(finfo(DTYPES[x.dtype].numpy).max)
    return c.b.ew(kind, x, c.b.const(-limit if kind == "max" else limit, x.dtype))


for _op, _kind in (("UnsortedSegmentSum", "sum"), ("UnsortedSegmentProd", "prod"), ("UnsortedSegmentMax", "max"),
                   ("UnsortedSegmentMin", "min")):
    lower(_op, values=(2,), kinds=NUM, check=_is_long, on_gpu=True)(_unsorted(_kind))


# --- scattered rows --------------------------------------------------------------------------------

def _is_large(view: GraphView, node: NodeView) -> str | None:
    """TensorFlow may write into the tensor itself."""
    known = math.prod(d for d in view.shape(node.inputs[0]) or () if d is not None)
    if known > LARGEST:
        return f"op {node.op} changes a tensor of more than {LARGEST} elements"
    return _many_places(view, node.inputs[1], node)


def _scatters_many(view: GraphView, node: NodeView) -> str | None:
    return _many_places(view, node.inputs[0], node)


def _many_places(view: GraphView, indices: Ref, node: NodeView) -> str | None:
    shape = view.shape(indices) or (None,)
    if not shape[-1]:
        return "it is unknown how many dims an index has, or it has none"
    many = math.prod(d for d in shape[:-1] if d is not None) > LONGEST
    return f"op {node.op} takes more than {LONGEST} indices" if many else None


def _positions(c: Context, indices: Node, sizes: Sequence[Dim]) -> Node:
    """Row-major numbers of the places that ``indices`` name, in one dim; -1 where a part of one is out of range."""
    n = D.product(indices.shape[:-1])
    parts = c.b.reshape(indices, (n, len(sizes)))
    at, inside = c.full(0, (n,), indices.dtype), c.full(True, (n,), "bool")
    for k, size in enumerate(sizes):
        part, limit = c.b.reshape(c.b.slice(parts, (0, k), (n, 1)), (n,)), c.dim_scalar(size, indices.dtype)
        inside = c.b.ew("bit_and", inside, c.b.ew("bit_and", c.b.ew("ge", part, 0), c.b.ew("lt", part, limit)))
        at = c.b.ew("add", c.b.ew("mul", at, limit), part)
    return c.b.select(inside, at, -1)


def _scattered(c: Context, indices: Node, updates: Node, shape: Sequence[Dim]) -> tuple[Bins, Node]:
    """The bins of a result's rows and the updates as rows; ``shape`` is that of the result."""
    if c.attr("bad_indices_policy") == "ERROR":
        c.fail("an index out of range is to be an error")
    depth, lead = D.static(indices.shape[-1]), indices.rank - 1
    if depth > len(shape) or updates.rank != lead + len(shape) - depth:
        c.fail(f"updates of rank {updates.rank} do not fit indices of {depth} parts into rank {len(shape)}")
    for i, d in enumerate((*indices.shape[:-1], *shape[depth:])):
        c.b.same_dim(updates.shape[i], d, f"{c.node.name}: the updates are rows of the result")
    places = _positions(c, indices, shape[:depth])
    return bins(c, places, D.product(shape[:depth])), c.b.reshape(updates, (places.shape[0], *shape[depth:]))


@lower("ScatterNd", values=(2,), kinds=INT, check=_scatters_many, on_gpu=True)
def scatter_nd(c: Context, indices: Node, updates: Node, shape: np.ndarray) -> Node:
    """The sum of the updates of each place; on a GPU those outside count for nothing."""
    if DTYPES[updates.dtype].kind == "bool":
        c.fail("TensorFlow's sum of truth values has no meaning here")
    dims = sizes_of(c, shape, c.static_shape())
    where, rows = _scattered(c, indices, updates, dims)
    return c.b.reshape(fold(c, "sum", rows, where), dims)


def _tensor_scatter(kind: str, combine: str):
    def fn(c: Context, x: Node, indices: Node, updates: Node) -> Node:
        """Half types are rounded once for each place."""
        where, rows = _scattered(c, indices, updates, x.shape)
        found = c.b.reshape(fold(c, kind, rows, where), x.shape)
        return c.b.ew(combine, x, found)

    return fn


for _op, _kind, _combine in (("TensorScatterAdd", "sum", "add"), ("TensorScatterSub", "sum", "sub"),
                             ("TensorScatterMax", "max", "max"), ("TensorScatterMin", "min", "min")):
    lower(_op, kinds=NUM, check=_is_large, on_gpu=True)(_tensor_scatter(_kind, _combine))


@lower("TensorScatterUpdate", kinds=ALL, check=_is_large, on_gpu=True)
def tensor_scatter_update(c: Context, x: Node, indices: Node, updates: Node) -> Node:
    """Of several updates of a place the last one stays."""
    where, rows = _scattered(c, indices, updates, x.shape)
    count = where.starts.shape[0] - 1
    first, end = (c.b.slice(where.starts, (i,), (count,)) for i in (0, 1))
    last = c.b.gather(where.order, c.b.ew("sub", end, 1), mode="zero")
    new = c.b.gather(rows, last, mode="zero")
    written = c.b.reshape(c.b.ew("lt", first, end), (count, *(1 for _ in new.shape[1:])))
    return c.b.reshape(c.b.select(written, new, c.b.reshape(x, new.shape)), x.shape)


# --- the largest elements --------------------------------------------------------------------------

def _is_wide(view: GraphView, node: NodeView) -> str | None:
    shape = view.shape(node.inputs[0]) or (None,)
    if _takes_one(view, node):
        return None
    if shape[-1] is None:
        return "the length of the rows is unknown"
    if shape[-1] > WIDEST:
        return f"op {node.op} takes rows of more than {WIDEST} elements"
    pairs = math.prod(d for d in shape if d is not None) * shape[-1]
    return f"op {node.op} takes many rows of more than {NARROW} elements" if shape[-1] > NARROW and pairs > ORDERED \
        else None


def _takes_one(view: GraphView, node: NodeView) -> bool:
    k = view.constant(node.inputs[1])
    return k is not None and bool(np.all(k == 1))


def descending(c: Context, x: Node) -> Node:
    """Integers that are ordered as ``x`` is from its largest element down: NaN first, 0 and -0 alike."""
    if not c.is_float(x):
        return c.b.ew("bit_not", x)
    wide = c.wide(x)
    bits = "int64" if wide.dtype == "float64" else "int32"
    largest = np.iinfo(bits).max
    raw = c.b.bitcast(c.b.select(c.b.ew("eq", wide, 0), 0, wide), bits)
    rising = c.b.select(c.b.ew("lt", raw, 0), c.b.ew("bit_xor", raw, largest), raw)
    return c.b.ew("bit_not", c.b.select(c.b.ew("is_nan", wide), largest, rising))


@lower("TopKV2", values=(1,), kinds=NUM, check=_is_wide, on_gpu=True)
def top_k(c: Context, x: Node, k: np.ndarray) -> list[Node]:
    """Of equal elements the first comes first; NaN counts as larger than any number."""
    (many,) = sizes_of(c, k, (c.static_shape() or (None,))[-1:])
    n = x.shape[-1]
    c.b.require("le", many, n, f"{c.node.name}: rows have as many elements as are wanted")
    if many == 1:
        found = c.expand(c.b.arg_reduce("min", descending(c, x), x.rank - 1, "int32"), [x.rank - 1])
    else:
        if not (D.is_static(n) and n <= NARROW):
            c.b.require("le", n, WIDEST, f"{c.node.name}: short rows")
            c.b.require("le", x.size * n, ORDERED, f"{c.node.name}: few rows")
        found = c.b.slice(c.b.order(descending(c, x)), (0,) * x.rank, (*x.shape[:-1], many))
    return [c.b.gather(x, found, x.rank - 1, x.rank - 1, "clip"), c.like(found, c.out_dtype(1))]


def _bound(side: str):
    def fn(c: Context, table: Node, values: Node) -> Node:
        return c.b.search(table, values, side, 1, c.dtype)

    return fn


lower("LowerBound", kinds=NUM)(_bound("left"))
lower("UpperBound", kinds=NUM)(_bound("right"))


@lower("Bucketize", kinds=NUM)
def bucketize(c: Context, x: Node) -> Node:
    """How many boundaries, which are float32, are not above an element."""
    table = c.b.const(np.array(c.attr("boundaries") or [], np.float32), "float32")
    kind = "float64" if x.dtype == "float64" else "float32"
    return c.b.search(c.like(table, kind), c.like(x, kind), "right", 0, "int32")


# --- counts ----------------------------------------------------------------------------------------

def _counts_many(view: GraphView, node: NodeView) -> str | None:
    known = math.prod(d for d in view.shape(node.inputs[0]) or () if d is not None)
    size = view.constant(node.inputs[1])
    if known * (int(size) if size is not None and size.ndim == 0 else 1) > COMPARED:
        return f"op {node.op} compares more than {COMPARED} pairs of an element and a bin"
    return None


@lower("DenseBincount", values=(1,), kinds=INT, check=_counts_many, on_gpu=True)
def dense_bincount(c: Context, x: Node, size: np.ndarray, weights: Node) -> Node:
    """How often each number below ``size`` occurs in a row, or the sum of the weights there; others count nothing."""
    (bins_,) = sizes_of(c, size, (c.static_shape() or (None,))[-1:])
    lead, n = x.shape[:-1], x.shape[-1]
    c.b.require("le", x.size * bins_, COMPARED, f"{c.node.name}: few elements and bins")
    numbers = c.b.reshape(c.b.iota((bins_,), 0, x.dtype), (bins_, 1))
    hits = c.b.ew("eq", numbers, c.b.reshape(x, (*lead, 1, n)))
    if c.attr("binary_output", False):
        return c.like(c.b.reduce("or", hits, [x.rank]), c.dtype)
    worth = c.b.const(1, c.dtype)
    if not (D.is_static(weights.size) and weights.size == 0):
        worth = c.b.reshape(c.b.broadcast_to(weights, x.shape), (*lead, 1, n))
    return c.b.reduce("sum", c.b.select(hits, worth, 0), [x.rank])
