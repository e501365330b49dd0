"""Builds IR graphs: NumPy broadcasting, fresh symbols for unknown dims, unification of dims that must agree."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from . import dims as D
from .dims import Dim, Expr, Symbol
from .dtypes import DTYPES, of_numpy
from .graph import Graph, Guard, Node, Shape, SymbolSource
from .ops import IRError, make
from .simplify import simplify
from .structural import slice_last, window_dim
from .unify import Unifier, strip_common
from .verify import used_symbols, verify

Scalar = Union[bool, int, float, np.generic]
Operand = Union[Node, Scalar]


class Builder:
    """Makes the nodes of one graph.

    Every method checks its operands and raises IRError (naming ``origin``) when they do not fit.  Dims of
    nodes already made are updated in place when unification replaces a symbol, so ``node.shape`` is always
    current; dims that a caller holds on to are brought up to date by :meth:`resolve`.

    Attributes:
      origin: name of the TensorFlow node being lowered; goes into nodes, guards and messages.
    """

    def __init__(self) -> None:
        self.origin = ""
        self.params: list[Node] = []
        self.symbols: dict[str, SymbolSource] = {}
        self._numbers = itertools.count()
        self._unifier = Unifier()
        self._mentions: dict[str, list[Node]] = {}  # symbol name -> nodes whose shape or attrs hold it

    # --- dims --------------------------------------------------------------------------------------

    def resolve(self, d: Dim) -> Dim:
        """``d`` with every equality found so far applied."""
        return self._unifier.resolve(d)

    def same_dim(self, a: Dim, b: Dim, why: str = "") -> Dim:
        """The dim that ``a`` and ``b`` both are, after making sure (by a guard if need be) that they agree.

        A symbol that stands alone on a side is replaced by the other side.  Raises IRError when the two can
        never be equal.
        """
        why = why or f"{self.origin}: dims must agree"
        replaced = self._unifier.equate(a, b, why)
        if replaced is not None:
            self._refresh(replaced)
        return self.resolve(a)

    def require(self, kind: str, a: Dim, b: Dim, why: str = "") -> None:
        """Relies on ``a == b`` ("eq"), ``a <= b`` ("le") or ``b`` dividing ``a`` ("divides").

        Nothing is recorded when it follows from the symbols' bounds; IRError when it can never hold.
        """
        why = why or f"{self.origin}: relies on {kind}"
        a, b = self.resolve(a), self.resolve(b)
        if kind == "eq":
            self.same_dim(a, b, why)
        elif kind == "le":
            self._require_le(a, b, why)
        elif kind == "divides":
            if (D.is_static(b) and b <= 0) or (D.all_static((a, b)) and a % b):
                raise IRError(f"{why}: {b} does not divide {a}.")
            if D.prove_le(1, b) and D.mod(a, b) == 0:
                return
            self._unifier.add(Guard(kind, a, b, why))
        else:
            raise IRError(f"{why}: there is no guard of kind '{kind}'.")

    def _require_le(self, a: Dim, b: Dim, why: str) -> None:
        if D.prove_le(a, b):
            return
        if D.prove_le(b + 1, a):
            raise IRError(f"{why}: {a} exceeds {b}.")
        self._unifier.add(Guard("le", a, b, why))
        lone = _lone_symbol(b)
        if lone is not None and isinstance(a, int) and (lone.lo is None or lone.lo < a):
            self._unifier.at_least(lone, a)
            self._refresh(lone.name)

    def _refresh(self, name: str) -> None:
        """Brings nodes that mention a replaced symbol up to date."""
        for n in self._mentions.pop(name, ()):
            n.shape = tuple(self.resolve(d) for d in n.shape)
            n.attrs = {k: self._unifier.resolve_attr(v) for k, v in n.attrs.items()}
            self._index(n)

    def _index(self, n: Node) -> None:
        for s in {s.name for d in (*n.shape, *n.attr_dims()) for s in D.symbols(d)}:
            self._mentions.setdefault(s, []).append(n)

    def _dims(self, dims: Sequence[Dim]) -> Shape:
        return tuple(self.resolve(d if isinstance(d, Expr) else int(d)) for d in dims)

    def _fresh(self, prefix: str, lo: int | None, source: SymbolSource) -> Dim:
        name = f"{prefix}{next(self._numbers)}"
        self.symbols[name] = source
        self._unifier.declare(Symbol(name, lo), derived=source.kind == "value")
        return D.symbol(name, lo)

    def _make(self, op: str, inputs: Sequence[Node], attrs: dict[str, Any] | None = None, shape: Sequence[Dim] = (),
              dtype: str = "") -> Node:
        n = make(op, inputs, attrs, tuple(shape), dtype, self.origin)
        self._index(n)
        return n

    def _fit(self, x: Node, shape: Sequence[Dim]) -> Node:
        """``x`` under a shape that is known (or guarded) to be equal to its own."""
        shape = self._dims(shape)
        return x if x.shape == shape else self._make("reshape", [x], {}, shape)

    def _agree(self, shapes: Sequence[Sequence[Dim]], why: str) -> Shape:
        """One shape that all of ``shapes`` (of one rank) are."""
        out = tuple(shapes[0])
        for other in shapes[1:]:
            out = tuple(self.same_dim(a, b, why) for a, b in zip(out, other, strict=True))
        return self._dims(out)

    # --- sources -----------------------------------------------------------------------------------

    def param(self, shape: Sequence[int | None], dtype: str, origin: str = "") -> Node:
        """An input of the graph; None makes a fresh symbol bound to that dim."""
        index = len(self.params)
        dims = [self._fresh("n", 0, SymbolSource("dim", index, i)) if d is None else int(d)
                for i, d in enumerate(shape)]
        n = make("param", [], {"index": index}, tuple(dims), dtype, origin or self.origin or f"param {index}")
        self._index(n)
        self.params.append(n)
        return n

    def value_symbol(self, param_node: Node, flat_index: int) -> Dim:
        """The dim that is element ``flat_index`` of an integer param (unbounded; may be negative)."""
        if param_node.op != "param" or not DTYPES[param_node.dtype].is_integer:
            raise IRError(f"{self.origin}: {param_node!r} is no integer param whose elements can be dims.")
        source = SymbolSource("value", param_node.attrs["index"], flat_index)
        for name, s in self.symbols.items():
            if s == source:
                return self.resolve(D.symbol(name, None))
        return self._fresh("v", None, source)

    def const(self, value: Any, dtype: str | None = None) -> Node:
        """A literal.  Python numbers are int32, float32 or bool unless ``dtype`` says otherwise."""
        if dtype is None:
            dtype = {bool: "bool", int: "int32", float: "float32"}.get(type(value))
        array = np.asarray(value)
        array = array.astype(DTYPES[dtype].numpy) if dtype else array
        return self._make("const", [], {"value": array}, array.shape, of_numpy(array.dtype))

    def shape_value(self, dims: Sequence[Dim], shape: Sequence[int] | None = None, dtype: str = "int32") -> Node:
        """An integer tensor of static ``shape`` (default: a vector) whose elements are ``dims``, row-major."""
        dims = self._dims(dims)
        shape = (len(dims),) if shape is None else tuple(shape)
        if D.all_static(dims):
            return self.const(np.array(dims, np.int64).reshape(shape), dtype)
        return self._make("shape_value", [], {"dims": dims}, shape, dtype)

    def iota(self, shape: Sequence[Dim], axis: int, dtype: str) -> Node:
        """0, 1, 2, ... along ``axis``."""
        return self._make("iota", [], {"axis": self._axis(axis, len(shape))}, self._dims(shape), dtype)

    # --- elementwise -------------------------------------------------------------------------------

    def ew(self, op: str, *xs: Operand) -> Node:
        """An elementwise op with NumPy broadcasting; Python scalars take the dtype of the tensors."""
        return self._make(op, self._broadcast(self._nodes(xs)))

    def select(self, c: Node, x: Operand, y: Operand) -> Node:
        """``c ? x : y`` with NumPy broadcasting."""
        return self._make("select", self._broadcast([c, *self._nodes((x, y))]))

    def cast(self, x: Node, dtype: str) -> Node:
        """TensorFlow's Cast."""
        return x if x.dtype == dtype else self._make("cast", [x], {}, (), dtype)

    def bitcast(self, x: Node, dtype: str) -> Node:
        """The same bits as another element type of the same size."""
        return x if x.dtype == dtype else self._make("bitcast", [x], {}, (), dtype)

    def _nodes(self, xs: Sequence[Operand]) -> list[Node]:
        dtype = next((x.dtype for x in xs if isinstance(x, Node)), None)
        return [x if isinstance(x, Node) else self.const(x, dtype) for x in xs]

    def broadcast_shape(self, shapes: Sequence[Sequence[Dim]]) -> Shape:
        """The NumPy broadcast of shapes.  Unknown dims are taken to agree: only a static 1 stretches."""
        rank = max(len(s) for s in shapes)
        out: list[Dim] = [1] * rank
        for shape in shapes:
            for i, d in enumerate(self._dims(shape), rank - len(shape)):
                have = self.resolve(out[i])
                if have == 1:
                    out[i] = d
                elif d != 1:
                    out[i] = self.same_dim(have, d, f"{self.origin}: dims broadcast together")
        return self._dims(out)

    def _broadcast(self, xs: Sequence[Node]) -> list[Node]:
        shape = self.broadcast_shape([x.shape for x in xs])
        return [self.broadcast_to(x, shape) for x in xs]

    # --- shape -------------------------------------------------------------------------------------

    def broadcast_to(self, x: Node, shape: Sequence[Dim]) -> Node:
        """NumPy's broadcast_to; only dims that are statically 1 (or missing) stretch."""
        shape = self._dims(shape)
        lead = len(shape) - x.rank
        if lead < 0:
            raise IRError(f"{self.origin}: {x!r} has more dims than the shape {shape_text(shape)}.")
        stretched = [d == 1 and self.resolve(shape[lead + i]) != 1 for i, d in enumerate(x.shape)]
        axes = tuple(lead + i for i, s in enumerate(stretched) if not s)
        for a in axes:
            self.same_dim(shape[a], x.shape[a - lead], f"{self.origin}: dims broadcast together")
        shape = self._dims(shape)
        x = self._fit(x, [shape[a] for a in axes])
        return x if len(axes) == len(shape) else self._make("broadcast", [x], {"axes": axes}, shape)

    def reshape(self, x: Node, shape: Sequence[Dim]) -> Node:
        """The same elements, row-major, under another shape; one entry may be -1."""
        shape = self._dims(shape)
        if any(isinstance(d, int) and d == -1 for d in shape):
            shape = self._infer_dim(x, shape)
        why = f"{self.origin}: reshape of {shape_text(x.shape)} to {shape_text(shape)}"
        have, new = x.size, D.product(shape)
        if have != new and not D.all_static((have, new)):
            self.same_dim(*strip_common(have, new), why)
        return self._fit(x, shape)

    def _infer_dim(self, x: Node, shape: Shape) -> Shape:
        at = [i for i, d in enumerate(shape) if d == -1]
        others = D.product(d for i, d in enumerate(shape) if i not in at)
        if len(at) > 1 or others == 0:
            raise IRError(f"{self.origin}: the shape {shape_text(shape)} does not tell its -1.")
        return tuple(D.floordiv(x.size, others) if i in at else d for i, d in enumerate(shape))

    def transpose(self, x: Node, perm: Sequence[int]) -> Node:
        """Result dim i is operand dim perm[i]."""
        perm = tuple(int(p) for p in perm)
        return x if perm == tuple(range(x.rank)) else self._make("transpose", [x], {"perm": perm})

    def slice(self, x: Node, starts: Sequence[Dim], sizes: Sequence[Dim], steps: Sequence[int] | None = None) -> Node:
        """``sizes[i]`` elements from ``starts[i]``, every ``steps[i]``-th (steps positive)."""
        starts, sizes = self._dims(starts), self._dims(sizes)
        steps = tuple(int(s) for s in steps) if steps is not None else (1,) * x.rank
        if not len(starts) == len(sizes) == len(steps) == x.rank:
            raise IRError(f"{self.origin}: a slice of {x!r} needs {x.rank} starts, sizes and steps.")
        for i, (start, size, step) in enumerate(zip(starts, sizes, steps, strict=True)):
            why = f"{self.origin}: a slice stays inside dim {i}"
            if D.all_static((start, size, x.shape[i])):
                continue  # the type rule checks it
            self._require_le(0, self.resolve(start), why)
            self._require_le(0, self.resolve(size), why)
            self._require_le(slice_last(self.resolve(start), self.resolve(size), step), x.shape[i] - 1, why)
        starts, sizes = self._dims(starts), self._dims(sizes)
        if sizes == x.shape and not any(starts) and set(steps) <= {1}:
            return x
        return self._make("slice", [x], {"starts": starts, "steps": steps}, sizes)

    def reverse(self, x: Node, axes: Sequence[int]) -> Node:
        """Flips the given axes."""
        axes = self._axes(axes, x.rank)
        return self._make("reverse", [x], {"axes": axes}) if axes else x

    def pad(self, x: Node, low: Sequence[Dim], high: Sequence[Dim], value: Operand = 0,
            interior: Sequence[int] | None = None) -> Node:
        """Adds ``low``/``high`` elements at the ends and ``interior`` between neighbours of each dim."""
        value = value if isinstance(value, Node) else self.const(value, x.dtype)
        for p in self._dims((*low, *high)):
            self._require_le(0, p, f"{self.origin}: padding is not negative")
        low, high = self._dims(low), self._dims(high)
        interior = tuple(int(i) for i in interior) if interior is not None else (0,) * x.rank
        if not any((*low, *high, *interior)):
            return x
        return self._make("pad", [x, value], {"low": low, "high": high, "interior": interior})

    def concat(self, xs: Sequence[Node], axis: int) -> Node:
        """Joins along ``axis``."""
        if not xs or any(x.rank != xs[0].rank for x in xs):
            raise IRError(f"{self.origin}: concat needs operands of one rank.")
        axis = self._axis(axis, xs[0].rank)
        others = [[d for i, d in enumerate(x.shape) if i != axis] for x in xs]
        agreed = self._agree(others, f"{self.origin}: dims of concat agree")
        xs = [self._fit(x, (*agreed[:axis], x.shape[axis], *agreed[axis:])) for x in xs]
        return xs[0] if len(xs) == 1 else self._make("concat", xs, {"axis": axis})

    # --- reads by index ----------------------------------------------------------------------------

    def gather(self, params: Node, indices: Node, axis: int = 0, batch_dims: int = 0, mode: str = "error") -> Node:
        """GatherV2; ``mode`` says what an index out of range gives: the error status, the nearest, or zero."""
        params, indices = self._batched(params, indices, batch_dims)
        attrs = {"axis": self._axis(axis, params.rank), "batch_dims": batch_dims, "mode": mode}
        return self._make("gather", [params, indices], attrs)

    def gather_nd(self, params: Node, indices: Node, batch_dims: int = 0, mode: str = "error") -> Node:
        """GatherNd with leading batch dims."""
        params, indices = self._batched(params, indices, batch_dims)
        return self._make("gather_nd", [params, indices], {"batch_dims": batch_dims, "mode": mode})

    def _batched(self, x: Node, y: Node, batch: int) -> tuple[Node, Node]:
        if not 0 <= batch <= min(x.rank, y.rank):
            raise IRError(f"{self.origin}: batch_dims {batch} exceeds the rank of {x!r} or {y!r}.")
        agreed = self._agree([x.shape[:batch], y.shape[:batch]], f"{self.origin}: batch dims agree")
        return self._fit(x, agreed + x.shape[batch:]), self._fit(y, agreed + y.shape[batch:])

    def order(self, keys: Node, dtype: str = "int32") -> Node:
        """The places that elements of the last dim come from when they are put in ascending order; a stable sort."""
        if keys.rank and keys.shape[-1] == 1:
            return self.broadcast_to(self.const(0, dtype), keys.shape)
        return self._make("order", [keys], {}, (), dtype)

    def search(self, table: Node, queries: Node, side: str = "left", batch_dims: int = 0,
               dtype: str = "int32") -> Node:
        """How many elements of each query's row of a sorted table are less ("left"), or less or equal ("right")."""
        table, queries = self._batched(table, queries, batch_dims)
        return self._make("search", [table, queries], {"side": side, "batch_dims": batch_dims}, (), dtype)

    def segment(self, kind: str, x: Node, starts: Node) -> Node:
        """Row s of the result folds rows ``starts[s]`` to ``starts[s + 1]`` of ``x``."""
        return self._make("segment", [x, starts], {"kind": kind})

    # --- reductions and products -------------------------------------------------------------------

    def reduce(self, kind: str, x: Node, axes: Sequence[int], keepdims: bool = False) -> Node:
        """Reduces ``axes`` by "sum", "prod", "max", "min", "and" or "or"; no axes: ``x`` itself."""
        axes = self._axes(axes, x.rank)
        out = self._make("reduce", [x], {"kind": kind, "axes": axes}) if axes else x
        kept = tuple(1 if i in axes else d for i, d in enumerate(x.shape))
        return self._fit(out, kept) if keepdims else out

    def arg_reduce(self, kind: str, x: Node, axis: int, dtype: str = "int64") -> Node:
        """Index of the first extreme along ``axis``."""
        return self._make("arg_reduce", [x], {"kind": kind, "axis": self._axis(axis, x.rank)}, (), dtype)

    def scan(self, kind: str, x: Node, axis: int, exclusive: bool = False, reverse: bool = False) -> Node:
        """Running "sum" or "prod"."""
        attrs = {"kind": kind, "axis": self._axis(axis, x.rank), "exclusive": bool(exclusive), "reverse": bool(reverse)}
        return self._make("scan", [x], attrs)

    def dot(self, x: Node, y: Node, batch: Sequence[Sequence[int]] = ((), ()),
            contract: Sequence[Sequence[int]] = ((), ())) -> Node:
        """Sums products over ``contract`` axes for every index of ``batch`` axes (each: lhs axes, rhs axes).

        Result dims: batch, lhs free, rhs free.
        """
        pairs = [tuple(self._axis(a, n.rank) for a in axes)
                 for two in (batch, contract) for n, axes in zip((x, y), two, strict=True)]
        (bx, by, cx, cy) = pairs
        if len(bx) != len(by) or len(cx) != len(cy):
            raise IRError(f"{self.origin}: dot axes {batch} and {contract} do not pair up.")
        for i, j in zip(bx + cx, by + cy, strict=True):
            self.same_dim(x.shape[i], y.shape[j], f"{self.origin}: dims multiplied together agree")
        to_x = dict(zip(by + cy, bx + cx, strict=True))
        y = self._fit(y, [x.shape[to_x[j]] if j in to_x else d for j, d in enumerate(y.shape)])
        return self._make("dot", [x, y], {"batch": (bx, by), "contract": (cx, cy)})

    def conv(self, x: Node, w: Node, strides: Sequence[int], padding: Sequence[tuple[int, int]],
             dilations: Sequence[int] | None = None, groups: int = 1) -> Node:
        """Convolution of channels-last ``x`` with a static filter [*k, in/groups, out]."""
        dilations = tuple(dilations) if dilations is not None else (1,) * len(strides)
        if not D.all_static(w.shape):
            raise IRError(f"{self.origin}: the filter {w!r} must have a static shape.")
        if x.rank != w.rank:
            raise IRError(f"{self.origin}: {x!r} and {w!r} differ in rank.")
        self.same_dim(x.shape[-1], w.shape[-2] * groups, f"{self.origin}: channels agree")
        x = self._fit(x, (*x.shape[:-1], w.shape[-2] * groups))
        attrs = {"strides": tuple(strides), "padding": tuple((int(a), int(b)) for a, b in padding),
                 "dilations": dilations, "groups": groups}
        return self._make("conv", [x, w], attrs)

    def conv_filter(self, x: Node, g: Node, size: Sequence[int], strides: Sequence[int],
                    padding: Sequence[tuple[int, int]], dilations: Sequence[int], groups: int = 1) -> Node:
        """The gradient of ``conv(x, w)`` by its filter as [out, *size, in/groups]; ``g`` is that by its result."""
        if x.rank != g.rank:
            raise IRError(f"{self.origin}: {x!r} and {g!r} differ in rank.")
        lists = zip(x.shape[1:-1], size, strides, padding, dilations, strict=True)
        want = (x.shape[0], *(window_dim(d, k, s, a, b, far) for d, k, s, (a, b), far in lists))
        for d, e in zip(want, g.shape, strict=False):
            self.same_dim(d, e, f"{self.origin}: what comes back has the size of the convolution's result")
        x, g = self._fit(x, x.shape), self._fit(g, (*want, g.shape[-1]))
        attrs = {"size": tuple(size), "strides": tuple(strides), "dilations": tuple(dilations), "groups": groups,
                 "padding": tuple((int(a), int(b)) for a, b in padding)}
        return self._make("conv_filter", [x, g], attrs)

    def window(self, kind: str, x: Node, size: Sequence[int], strides: Sequence[int],
               padding: Sequence[tuple[int, int]]) -> Node:
        """Pooling over the spatial dims of a channels-last ``x``."""
        return self._make("window", [x], {"kind": kind, "size": tuple(size), "strides": tuple(strides),
                                          "padding": tuple((int(a), int(b)) for a, b in padding)})

    def _axis(self, axis: int, rank: int) -> int:
        if not -rank <= axis < rank:
            raise IRError(f"{self.origin}: axis {axis} is outside rank {rank}.")
        return int(axis) % rank

    def _axes(self, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        out = sorted(self._axis(a, rank) for a in axes)
        if len(set(out)) != len(out):
            raise IRError(f"{self.origin}: axes {tuple(axes)} repeat.")
        return tuple(out)

    # --- end ---------------------------------------------------------------------------------------

    def finish(self, outputs: Sequence[Node], name: str = "") -> Graph:
        """The graph of everything that ``outputs`` need, simplified and verified."""
        graph = drop_symbols(simplify(self.raw(outputs, name)))
        verify(graph)
        return graph

    def raw(self, outputs: Sequence[Node], name: str = "") -> Graph:
        """The graph as it was built."""
        return Graph(list(self.params), list(outputs), list(self._unifier.guards), dict(self.symbols), name)


def drop_symbols(graph: Graph) -> Graph:
    """The same graph without the symbols that nothing mentions."""
    used = used_symbols(graph)
    graph.symbols = {k: v for k, v in graph.symbols.items() if k in used}
    return graph


def _lone_symbol(d: Dim) -> Symbol | None:
    if isinstance(d, Expr) and len(d.terms) == 1 and d.terms[0][1] == 1:
        m = d.terms[0][0]
        if len(m) == 1 and m[0][1] == 1 and isinstance(m[0][0], Symbol):
            return m[0][0]
    return None


def shape_text(shape: Sequence[Dim]) -> str:
    """A shape for messages, e.g. ``[n0, 4]``."""
    return "[" + ", ".join(map(str, shape)) + "]"
