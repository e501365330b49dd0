"""Rewrites of a graph that keep its meaning bit for bit (NaN, infinities and -0.0 included).

Equal computations become one node, no-ops and compositions of views collapse, small constants are folded,
elementwise work on broadcast values is done before the broadcast, and what no output needs goes.

A rule is a function ``rule(s, n) -> Node | None`` in :data:`RULES` under the name of the op it starts from:
``n`` has simplified operands, ``s`` is the :class:`Simplifier` that makes nodes, None means "does not apply".
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from . import dims as D
from .dtypes import DTYPES
from .graph import Graph, Node
from .interp import evaluate
from .ops import OPS, make
from .structural import slice_last
from .verify import sizes_agree

Rule = Callable[["Simplifier", Node], Node | None]
FOLD_LIMIT = 64  # a folded constant has at most this many elements
COMMUTATIVE = {"add", "mul", "max", "min", "bit_and", "bit_or", "bit_xor", "eq", "ne"}

RULES: dict[str, list[Rule]] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ops; rules are tried in the order of the source."""
    def add(fn: Rule) -> Rule:
        for op in ops:
            RULES.setdefault(op, []).append(fn)
        return fn
    return add


def simplify(graph: Graph) -> Graph:
    """An equivalent graph; see the module's first lines.  Params stay as they are."""
    return graph.rebuild(Simplifier(graph).node)


class Simplifier:
    """Makes simplified nodes of one graph; equal nodes are made once."""

    def __init__(self, graph: Graph):
        self._guards = graph.guards
        self._seen: dict[Any, Node] = {}

    def node(self, n: Node, inputs: Sequence[Node]) -> Node:
        """``n`` on other operands, simplified."""
        if n.op == "param":
            return n
        key = (n.op, _unordered(n.op, inputs), attrs_key(n.attrs), n.shape, n.dtype)
        if key not in self._seen:
            unchanged = all(a is b for a, b in zip(inputs, n.inputs, strict=True))
            fresh = n if unchanged else n.with_inputs(inputs)
            self._seen[key] = self._apply(fresh)
        return self._seen[key]

    def _apply(self, n: Node) -> Node:
        for r in (fold, *RULES.get(n.op, ()), sink_broadcast):
            better = r(self, n)
            if better is not None:
                return better
        return n

    def make(self, op: str, inputs: Sequence[Node], attrs: dict[str, Any] | None = None, shape: Sequence[D.Dim] = (),
             dtype: str = "", *, of: Node) -> Node:
        """A simplified new node that takes the origin of ``of``."""
        n = make(op, inputs, attrs, tuple(shape), dtype, of.origin)
        return self.node(n, n.inputs)

    def const(self, value: np.ndarray, of: Node) -> Node:
        return self.make("const", [], {"value": value}, value.shape, of.dtype, of=of)

    def splat(self, value: Any, of: Node) -> Node:
        """A tensor of ``of``'s type, every element ``value``."""
        scalar = self.const(np.asarray(value).astype(DTYPES[of.dtype].numpy), of)
        return scalar if not of.rank else self.make("broadcast", [scalar], {"axes": ()}, of.shape, of=of)

    def reshape(self, x: Node, of: Node) -> Node:
        return self.make("reshape", [x], {}, of.shape, of=of)

    def same_size(self, a: Node, b: Node) -> bool:
        """Provably (or guarded to be) of equal size."""
        return sizes_agree(a.shape, b.shape, self._guards)


def _unordered(op: str, inputs: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(sorted(inputs, key=lambda n: n.id)) if op in COMMUTATIVE else tuple(inputs)


def attrs_key(attrs: dict[str, Any]) -> tuple:
    """A hashable stand-in for attributes (arrays by their bytes, so -0.0 and NaN patterns differ)."""
    return tuple((k, (v.dtype.name, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v)
                 for k, v in sorted(attrs.items()))


# --- what is known of a value ----------------------------------------------------------------------

def constant(n: Node) -> np.ndarray | None:
    """The value of a const, or of a small static broadcast of one."""
    if n.op == "const":
        return n.attrs["value"]
    if n.op == "broadcast" and n.inputs[0].op == "const" and _is_small(n):
        return evaluate(n, [n.inputs[0].attrs["value"]], {})
    return None


def _is_small(n: Node) -> bool:
    return D.all_static(n.shape) and math.prod(n.shape) <= FOLD_LIMIT


def splat_of(n: Node) -> Any:
    """The one value (a NumPy scalar) that all elements have, or None when that is not known."""
    if n.op == "broadcast":
        n = n.inputs[0]
    if n.op == "const" and n.attrs["value"].size == 1:
        return n.attrs["value"].reshape(-1)[0]
    return None


def _is(n: Node, value: float, negative_zero: bool = False) -> bool:
    s = splat_of(n)
    if s is None or s != value:
        return False
    return value != 0 or DTYPES[n.dtype].kind != "float" or bool(np.signbit(s)) == negative_zero


def _is_all_ones(n: Node) -> bool:
    s = splat_of(n)
    return s is not None and DTYPES[n.dtype].kind != "float" and bool(np.invert(s) == 0)


def has_status(n: Node) -> bool:
    """True when the op may report an error while it runs."""
    return "ts_status" in (OPS[n.op].c or "") or n.attrs.get("mode") == "error"


def _kind(n: Node) -> str:
    return DTYPES[n.dtype].kind


# --- constants -------------------------------------------------------------------------------------

def fold(s: Simplifier, n: Node) -> Node | None:
    """Computes small results of constants now."""
    if not n.inputs or not _is_small(n) or n.attr_dims():
        return None
    if n.op == "broadcast" or (n.op == "reshape" and n.inputs[0].op == "broadcast"):
        return None  # stays a broadcast: no memory
    arrays = [a for a in map(constant, n.inputs) if a is not None]
    if len(arrays) < len(n.inputs):
        return None
    try:
        return s.const(np.array(evaluate(n, arrays, {}), order="C"), n)
    except (ZeroDivisionError, IndexError):
        return None  # left for run time, where the op falls back and TensorFlow raises


@rule("const")
def _splat_const(s: Simplifier, n: Node) -> Node | None:
    value = n.attrs["value"]
    if not value.ndim or not value.size:
        return None
    first = value.reshape(-1)[:1]
    if value.tobytes() != first.tobytes() * value.size:
        return None
    return s.splat(first[0], n)


@rule("shape_value")
def _static_shape_value(s: Simplifier, n: Node) -> Node | None:
    return s.const(evaluate(n, [], {}), n) if D.all_static(n.attrs["dims"]) else None


# --- element type ----------------------------------------------------------------------------------

_MANTISSA = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def lossless(a: str, b: str) -> bool:
    """True when every value of element type ``a`` is one of ``b``."""
    x, y = DTYPES[a], DTYPES[b]
    if x.kind == "bool" or a == b:
        return True
    if y.kind == "bool" or (x.kind == "float" and (y.kind != "float" or y.size <= x.size)):
        return False
    if x.kind == "float":
        return True
    bits = 8 * x.size - (x.kind == "int")
    if y.kind == "float":
        return bits <= _MANTISSA[b]
    return y.size > x.size if x.kind == "uint" else y.kind == "int" and y.size >= x.size


@rule("cast")
def _cast(s: Simplifier, n: Node) -> Node | None:
    x = n.inputs[0]
    if x.dtype == n.dtype:
        return x
    if x.op == "cast" and lossless(x.inputs[0].dtype, x.dtype):
        return s.make("cast", x.inputs, {}, (), n.dtype, of=n)
    if x.op == "shape_value" and n.dtype in ("int32", "int64"):
        return s.make("shape_value", [], x.attrs, x.shape, n.dtype, of=n)
    return None


@rule("bitcast")
def _bitcast(s: Simplifier, n: Node) -> Node | None:
    x = n.inputs[0]
    if x.op == "bitcast":
        return s.make("bitcast", x.inputs, {}, (), n.dtype, of=n)
    return x if x.dtype == n.dtype else None


# --- views -----------------------------------------------------------------------------------------

@rule("reshape")
def _reshape(s: Simplifier, n: Node) -> Node | None:
    x = n.inputs[0]
    if x.shape == n.shape:
        return x
    if x.op == "reshape" and s.same_size(x.inputs[0], n):
        return s.reshape(x.inputs[0], n)
    if x.op == "broadcast" and not x.inputs[0].rank:
        return s.make("broadcast", x.inputs, {"axes": ()}, n.shape, of=n)
    if x.op == "shape_value":
        return s.make("shape_value", [], x.attrs, n.shape, n.dtype, of=n)
    return None


@rule("transpose")
def _transpose(s: Simplifier, n: Node) -> Node | None:
    x, perm = n.inputs[0], n.attrs["perm"]
    if x.op == "transpose":
        return s.make("transpose", x.inputs, {"perm": tuple(x.attrs["perm"][p] for p in perm)}, of=n)
    moving = [p for p in perm if x.shape[p] != 1]
    if moving == sorted(moving):
        return s.reshape(x, n)  # only dims of size 1 move, if any
    if x.op == "broadcast":
        place = [perm.index(a) for a in x.attrs["axes"]]
        order = sorted(range(len(place)), key=place.__getitem__)
        inner = s.make("transpose", x.inputs, {"perm": tuple(order)}, of=n)
        return s.make("broadcast", [inner], {"axes": tuple(sorted(place))}, n.shape, of=n)
    return None


@rule("broadcast")
def _broadcast(s: Simplifier, n: Node) -> Node | None:
    x, axes = n.inputs[0], n.attrs["axes"]
    if x.rank == n.rank:
        return x
    if x.op == "broadcast":
        return s.make("broadcast", x.inputs, {"axes": tuple(axes[a] for a in x.attrs["axes"])}, n.shape, of=n)
    if x.op != "const" and all(d == 1 for i, d in enumerate(n.shape) if i not in axes):
        return s.reshape(x, n)
    return None


@rule("slice")
def _slice(s: Simplifier, n: Node) -> Node | None:
    x, starts, steps = n.inputs[0], n.attrs["starts"], n.attrs["steps"]
    tidy = _tidy_slice(n, starts, steps)
    if tidy != n.attrs:
        return s.make("slice", [x], tidy, n.shape, of=n)
    if n.shape == x.shape and all(b == 0 for b in starts) and set(steps) <= {1}:
        return x
    if x.op == "slice":
        inner = zip(x.attrs["starts"], x.attrs["steps"], strict=True)
        attrs = _tidy_slice(n, [b + c * k for (b, k), c in zip(inner, starts, strict=True)],
                            [a * b for a, b in zip(x.attrs["steps"], steps, strict=True)])
        return s.make("slice", x.inputs, attrs, n.shape, of=n)
    if x.op == "broadcast":
        axes = x.attrs["axes"]
        attrs = {"starts": tuple(starts[a] for a in axes), "steps": tuple(steps[a] for a in axes)}
        inner_slice = s.make("slice", x.inputs, attrs, [n.shape[a] for a in axes], of=n)
        return s.make("broadcast", [inner_slice], {"axes": axes}, n.shape, of=n)
    return None


def _tidy_slice(n: Node, starts: Sequence[D.Dim], steps: Sequence[int]) -> dict[str, Any]:
    """Attributes of a slice: where it takes one element the step, and where it takes none the start, is moot."""
    return {"starts": tuple(0 if size == 0 else b for b, size in zip(starts, n.shape, strict=True)),
            "steps": tuple(1 if size in (0, 1) else k for k, size in zip(steps, n.shape, strict=True))}


@rule("slice")
def _slice_of_concat(s: Simplifier, n: Node) -> Node | None:
    """A slice that lies in one piece of a concat reads just that piece."""
    x, starts = n.inputs[0], n.attrs["starts"]
    if x.op != "concat":
        return None
    axis, offset = x.attrs["axis"], 0
    for piece in x.inputs:
        end = offset + piece.shape[axis]
        if _inside(n, axis, offset, end):
            moved = (*starts[:axis], starts[axis] - offset, *starts[axis + 1:])
            return s.make("slice", [piece], {"starts": moved, "steps": n.attrs["steps"]}, n.shape, of=n)
        offset = end
    return None


@rule("slice")
def _slice_of_pad(s: Simplifier, n: Node) -> Node | None:
    """A slice that reads none of the padding reads the padded tensor."""
    x, starts = n.inputs[0], n.attrs["starts"]
    if x.op != "pad" or any(x.attrs["interior"]):
        return None
    low, inner = x.attrs["low"], x.inputs[0]
    if not all(_inside(n, i, b, b + d) for i, (b, d) in enumerate(zip(low, inner.shape, strict=True))):
        return None
    attrs = {"starts": tuple(a - b for a, b in zip(starts, low, strict=True)), "steps": n.attrs["steps"]}
    return s.make("slice", [inner], attrs, n.shape, of=n)


def _inside(n: Node, axis: int, begin: D.Dim, end: D.Dim) -> bool:
    """A slice's axis provably reads [begin, end) only (and also fits there when it is empty)."""
    start, size, step = n.attrs["starts"][axis], n.shape[axis], n.attrs["steps"][axis]
    last = start if size == 0 else slice_last(start, size, step) + 1
    return D.prove_le(begin, start) and D.prove_le(last, end) and D.prove_le(start, end)


@rule("reverse")
def _reverse(s: Simplifier, n: Node) -> Node | None:
    x = n.inputs[0]
    axes = tuple(a for a in n.attrs["axes"] if x.shape[a] != 1)
    if not axes:
        return x
    if x.op == "reverse":
        both = tuple(sorted(set(axes) ^ set(x.attrs["axes"])))
        return s.make("reverse", x.inputs, {"axes": both}, of=n)
    if x.op == "broadcast":
        inner = tuple(i for i, a in enumerate(x.attrs["axes"]) if a in axes)
        return s.make("broadcast", [s.make("reverse", x.inputs, {"axes": inner}, of=n)], x.attrs, n.shape, of=n)
    return s.make("reverse", [x], {"axes": axes}, of=n) if axes != n.attrs["axes"] else None


@rule("pad")
def _pad(s: Simplifier, n: Node) -> Node | None:
    nothing = all(p == 0 for k in ("low", "high", "interior") for p in n.attrs[k])
    return n.inputs[0] if nothing else None


@rule("concat")
def _concat(s: Simplifier, n: Node) -> Node | None:
    axis = n.attrs["axis"]
    pieces: list[Node] = []
    for x in n.inputs:
        nested = x.op == "concat" and x.attrs["axis"] == axis
        pieces += [p for p in (x.inputs if nested else (x,)) if p.shape[axis] != 0]
    pieces = pieces or [n.inputs[0]]
    if len(pieces) == 1:
        return pieces[0]
    return s.make("concat", pieces, {"axis": axis}, of=n) if tuple(pieces) != n.inputs else None


@rule("gather")
def _gather_one(s: Simplifier, n: Node) -> Node | None:
    """A constant scalar index in range is a slice."""
    x, index = n.inputs
    axis = n.attrs["axis"]
    if index.op != "const" or index.rank:
        return None
    at = int(index.attrs["value"])
    if at < 0 or not D.prove_le(at + 1, x.shape[axis]):
        return None
    attrs = {"starts": tuple(at if i == axis else 0 for i in range(x.rank)), "steps": (1,) * x.rank}
    sizes = (*x.shape[:axis], 1, *x.shape[axis + 1:])
    return s.reshape(s.make("slice", [x], attrs, sizes, of=n), n)


# --- reductions ------------------------------------------------------------------------------------

@rule("reduce")
def _reduce_nothing(s: Simplifier, n: Node) -> Node | None:
    """Dims of size 1 need no reduction; a float sum starts at +0.0, which turns -0.0 into 0.0."""
    x, axes, kind = n.inputs[0], n.attrs["axes"], n.attrs["kind"]
    real = tuple(a for a in axes if x.shape[a] != 1)
    if real == axes:
        return None
    if real:
        left = [d for i, d in enumerate(x.shape) if i in real or i not in axes]
        kept = [i for i in range(x.rank) if i in real or i not in axes]
        y = s.make("reshape", [x], {}, left, of=n)
        return s.make("reduce", [y], {"kind": kind, "axes": tuple(kept.index(a) for a in real)}, of=n)
    y = s.reshape(x, n)
    return s.make("add", [y, s.splat(0, n)], of=n) if kind == "sum" and _kind(n) == "float" else y


@rule("reduce")
def _reduce_twice(s: Simplifier, n: Node) -> Node | None:
    """Two reductions are one where regrouping changes nothing."""
    x, kind = n.inputs[0], n.attrs["kind"]
    if x.op != "reduce" or x.attrs["kind"] != kind or (kind in ("sum", "prod") and _kind(n) == "float"):
        return None
    inner = x.inputs[0]
    kept = [i for i in range(inner.rank) if i not in x.attrs["axes"]]
    axes = sorted([*x.attrs["axes"], *(kept[a] for a in n.attrs["axes"])])
    return s.make("reduce", [inner], {"kind": kind, "axes": tuple(axes)}, of=n)


# --- elementwise -----------------------------------------------------------------------------------

@rule("neg", "bit_not")
def _twice(s: Simplifier, n: Node) -> Node | None:
    return n.inputs[0].inputs[0] if n.inputs[0].op == n.op else None


@rule("abs", "floor", "ceil", "rint", "sign")
def _idempotent(s: Simplifier, n: Node) -> Node | None:
    x = n.inputs[0]
    if n.op == "abs" and x.op == "neg" and _kind(n) != "uint":
        return s.make("abs", x.inputs, of=n)
    return x if x.op == n.op else None


@rule("max", "min", "bit_and", "bit_or")
def _same_operands(s: Simplifier, n: Node) -> Node | None:
    return n.inputs[0] if n.inputs[0] is n.inputs[1] else None


@rule("add", "mul", "bit_or", "bit_xor", "bit_and", "sub", "div", "shift_left", "shift_right", "int_div", "int_pow",
      "pow")
def _neutral(s: Simplifier, n: Node) -> Node | None:
    """Operations with their neutral element: x + -0.0, x - 0.0, x * 1, x / 1, x | 0, x << 0, ..."""
    x, y = n.inputs
    is_float = _kind(n) == "float"
    tests: dict[str, Callable[[Node], bool]] = {
        "add": lambda v: _is(v, 0, negative_zero=is_float), "sub": lambda v: _is(v, 0),
        "bit_and": _is_all_ones,
        **dict.fromkeys(("bit_or", "bit_xor", "shift_left", "shift_right"), lambda v: _is(v, 0))}
    neutral = tests.get(n.op, lambda v: _is(v, 1))
    if neutral(y):
        return x
    return y if n.op in COMMUTATIVE and neutral(x) else None


@rule("mul", "bit_and", "bit_or")
def _absorbing(s: Simplifier, n: Node) -> Node | None:
    """Integers only: x * 0, x & 0, x | ~0."""
    if _kind(n) == "float":
        return None
    absorbs = _is_all_ones if n.op == "bit_or" else lambda v: _is(v, 0)
    return next((v for v in n.inputs if absorbs(v)), None)


@rule("sub", "bit_xor")
def _self_inverse(s: Simplifier, n: Node) -> Node | None:
    same = n.inputs[0] is n.inputs[1] and _kind(n) != "float"
    return s.splat(0, n) if same else None


@rule("eq", "le", "ge", "ne", "lt", "gt")
def _compare_self(s: Simplifier, n: Node) -> Node | None:
    same = n.inputs[0] is n.inputs[1] and _kind(n.inputs[0]) != "float"
    return s.splat(n.op in ("eq", "le", "ge"), n) if same else None


@rule("div")
def _divide_by_power_of_two(s: Simplifier, n: Node) -> Node | None:
    x, y = n.inputs
    c = splat_of(y)
    if c is None or not np.isfinite(c) or c == 0 or np.frexp(np.abs(np.float64(c)))[0] != 0.5:
        return None
    with np.errstate(over="ignore"):
        inverse = np.asarray(1 / np.float64(c)).astype(DTYPES[n.dtype].numpy)
    exact = np.isfinite(inverse) and abs(float(inverse)) >= float(_smallest_normal(n.dtype))
    return s.make("mul", [x, s.splat(inverse, n)], of=n) if exact and float(inverse) * float(c) == 1 else None


def _smallest_normal(dtype: str) -> float:
    return float(ml_dtypes.finfo(DTYPES[dtype].numpy).tiny)


@rule("pow")
def _power(s: Simplifier, n: Node) -> Node | None:
    """x ** 2 = x * x, x ** -1 = 1 / x, x ** 0 = 1 (NaN ** 0 too)."""
    x, y = n.inputs
    if _is(y, 2):
        return s.make("mul", [x, x], of=n)
    if _is(y, -1):
        return s.make("div", [s.splat(1, n), x], of=n)
    return s.splat(1, n) if splat_of(y) == 0 else None


@rule("select")
def _select(s: Simplifier, n: Node) -> Node | None:
    c, x, y = n.inputs
    if x is y:
        return x
    if c.op == "bit_not":
        return s.make("select", [c.inputs[0], y, x], of=n)
    chosen = splat_of(c)
    return None if chosen is None else x if chosen else y


def sink_broadcast(s: Simplifier, n: Node) -> Node | None:
    """Computes on the values before they are broadcast: f(broadcast x, broadcast y) = broadcast f(x, y)."""
    if not (OPS[n.op].elementwise or n.op in ("cast", "select", "bitcast")) or has_status(n):
        return None
    spread = [x for x in n.inputs if not (x.op == "broadcast" and x.inputs[0].op == "const" and not x.inputs[0].rank)]
    if not spread:
        inner = [x.inputs[0] for x in n.inputs]
        axes: tuple[int, ...] = ()
    elif all(x.op == "broadcast" and x.attrs["axes"] == spread[0].attrs["axes"] for x in spread):
        axes, small = spread[0].attrs["axes"], spread[0].inputs[0]
        inner = [x.inputs[0] if x in spread else
                 s.make("broadcast", x.inputs, {"axes": ()}, small.shape, of=x) if small.rank else x.inputs[0]
                 for x in n.inputs]
    else:
        return None
    value = s.make(n.op, inner, n.attrs, (), n.dtype, of=n)
    return s.make("broadcast", [value], {"axes": axes}, n.shape, of=n)
