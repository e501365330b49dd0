"""Symbolic rules: small integer tensors computed from shapes, as arrays of Dims."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ..shapes import gradient_axes
from .array import range_count
from .registry import REGISTRY, Lowering, NotSymbolic, symbolic
from .slicing import layout

if TYPE_CHECKING:
    from .context import SymContext


def dims_array(values: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Dims as an object array (of rank 1 unless ``shape`` is given)."""
    values = list(values)
    out = np.empty(len(values), object)
    for i, v in enumerate(values):
        out[i] = v
    return out if shape is None else out.reshape(shape)


def as_array(value: Any) -> np.ndarray:
    """An object array; NumPy gives bare objects where rank 0 is meant."""
    return value if isinstance(value, np.ndarray) else dims_array([value], ())


# --- where dims come from --------------------------------------------------------------------------

@symbolic("Shape")
def shape(s: SymContext) -> np.ndarray:
    return dims_array(s.dims(0))


@symbolic("ShapeN")
def shape_n(s: SymContext) -> list[np.ndarray]:
    return [dims_array(s.dims(i)) for i in range(s.count)]


@symbolic("Size")
def size(s: SymContext) -> np.ndarray:
    return as_array(D.product(s.dims(0)))


@symbolic("Rank")
def rank(s: SymContext) -> np.ndarray:
    return as_array(len(s.dims(0)))


# --- arithmetic ------------------------------------------------------------------------------------

def _nonneg(d: Dim) -> bool:
    return D.prove_nonneg(d) if not D.is_static(d) else d >= 0


def _positive(s: SymContext, b: Dim) -> Dim:
    """A divisor that is a dim must be positive; TensorFlow fails on 0 as well."""
    if D.is_static(b):
        if b <= 0:
            raise NotSymbolic
        return b
    s.b.require("le", 1, b, f"{s.node.name}: a divisor is positive")
    return s.b.resolve(b)


def _floor_div(s: SymContext, a: Dim, b: Dim) -> Dim:
    if D.all_static((a, b)) and b != 0:
        return a // b
    return D.floordiv(a, _positive(s, b))


def _floor_mod(s: SymContext, a: Dim, b: Dim) -> Dim:
    if D.all_static((a, b)) and b != 0:
        return a % b
    return D.mod(a, _positive(s, b))


def _truncate_div(s: SymContext, a: Dim, b: Dim) -> Dim:
    if not _nonneg(a):
        raise NotSymbolic
    return _floor_div(s, a, _positive(s, b))


def _truncate_mod(s: SymContext, a: Dim, b: Dim) -> Dim:
    if not _nonneg(a):
        raise NotSymbolic
    return _floor_mod(s, a, _positive(s, b))


def _squared_difference(s: SymContext, a: Dim, b: Dim) -> Dim:
    return (a - b) * (a - b)


_BINARY: dict[str, Callable[[Any, Dim, Dim], Dim]] = {
    "Add": lambda s, a, b: a + b, "AddV2": lambda s, a, b: a + b, "Sub": lambda s, a, b: a - b,
    "Mul": lambda s, a, b: a * b, "Maximum": lambda s, a, b: D.dmax(a, b), "Minimum": lambda s, a, b: D.dmin(a, b),
    "FloorDiv": _floor_div, "FloorMod": _floor_mod, "Div": _truncate_div, "TruncateDiv": _truncate_div,
    "Mod": _truncate_mod, "TruncateMod": _truncate_mod, "SquaredDifference": _squared_difference,
}


def _decide(yes: bool, no: bool) -> bool:
    if not yes and not no:
        raise NotSymbolic
    return yes


def _less(a: Dim, b: Dim) -> bool:
    return _decide(D.prove_le(a + 1, b), D.prove_le(b, a))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a) == bool(b)
    return _decide(a == b, D.prove_le(a + 1, b) or D.prove_le(b + 1, a))


_PREDICATES: dict[str, Callable[[Any, Any], bool]] = {
    "Less": _less, "Greater": lambda a, b: _less(b, a), "LessEqual": lambda a, b: not _less(b, a),
    "GreaterEqual": lambda a, b: not _less(a, b), "Equal": _equal, "NotEqual": lambda a, b: not _equal(a, b),
    "LogicalAnd": lambda a, b: a and b, "LogicalOr": lambda a, b: a or b,
}


def _fits(s: SymContext, value: np.ndarray) -> np.ndarray:
    """Known results outside the element type wrap around in TensorFlow; those stay tensors."""
    kind = DTYPES[s.view.dtype((s.node.name, 0))]
    if kind.is_integer:
        info = np.iinfo(kind.numpy)
        for v in value.reshape(-1):
            if D.is_static(v) and not info.min <= v <= info.max:
                raise NotSymbolic
    return value


def _elementwise(fn: Callable[..., Any], with_context: bool) -> Callable[[SymContext], np.ndarray]:
    def rule(s: SymContext) -> np.ndarray:
        a, b = s.value(0), s.value(1)
        if s.view.dtype(s.node.inputs[0]) not in _TRACKED:
            raise NotSymbolic
        each = np.frompyfunc((lambda x, y: fn(s, x, y)) if with_context else fn, 2, 1)
        return _fits(s, as_array(each(a, b)))

    return rule


_TRACKED = ("int32", "int64", "bool")  # narrower types wrap around too easily

for _op, _rule in _BINARY.items():
    symbolic(_op)(_elementwise(_rule, True))
for _op, _predicate in _PREDICATES.items():
    symbolic(_op)(_elementwise(_predicate, False))


@symbolic("Minimum")
def minimum(s: SymContext) -> np.ndarray:
    """Also where a maximum keeps an unknown number from being less than the other one: ``min(8, max(8, data))``."""
    try:
        return _elementwise(_BINARY["Minimum"], True)(s)
    except NotSymbolic:
        for limit, other in ((0, 1), (1, 0)):
            if s.dims(other) == () and s.view[s.node.inputs[other][0]].op == "Maximum":
                bound = s.value(limit)
                if bound.shape == () and any(D.prove_le(bound.item(), d) for d in _constants_of(s, other)):
                    return bound
        raise


def _constants_of(s: SymContext, i: int) -> Iterator[int]:
    """The constants that the node behind input ``i`` reads."""
    for name, _ in s.view[s.node.inputs[i][0]].inputs:
        value = s.view[name].attr("value") if s.view[name].op == "Const" else None
        if value is not None and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iu":
            yield int(value)


@symbolic("Neg")
def neg(s: SymContext) -> np.ndarray:
    return as_array(np.frompyfunc(lambda d: -d, 1, 1)(s.value(0)))


@symbolic("Square")
def square(s: SymContext) -> np.ndarray:
    return _fits(s, as_array(np.frompyfunc(lambda d: d * d, 1, 1)(s.value(0))))


@symbolic("LogicalNot")
def logical_not(s: SymContext) -> np.ndarray:
    return as_array(np.frompyfunc(lambda d: not d, 1, 1)(s.value(0)))


@symbolic("AddN")
def add_n(s: SymContext) -> np.ndarray:
    total = s.value(0)
    for i in range(1, s.count):
        total = as_array(total + s.value(i))
    return _fits(s, total)


@symbolic("Cast")
def cast(s: SymContext) -> np.ndarray:
    source, target = s.attr("SrcT"), s.attr("DstT")
    if target not in ("int32", "int64") or DTYPES[source].is_float:
        raise NotSymbolic
    return _fits(s, as_array(np.frompyfunc(lambda d: int(d) if isinstance(d, bool) else d, 1, 1)(s.value(0))))


@symbolic("Select", "SelectV2")
def select(s: SymContext) -> np.ndarray:
    condition = s.value(0)
    if not all(isinstance(v, (bool, int)) for v in condition.reshape(-1)):
        raise NotSymbolic
    x, y = s.value(1), s.value(2)
    if s.node.op == "Select" and condition.ndim == 1 and x.ndim > 1:
        condition = condition.reshape(-1, *([1] * (x.ndim - 1)))
    return as_array(np.frompyfunc(lambda c, a, b: a if c else b, 3, 1)(condition, x, y))


def _fold(fn: Callable[[list[Dim]], Any]) -> Callable[[SymContext], np.ndarray]:
    def rule(s: SymContext) -> np.ndarray:
        x = s.value(0)
        axes = tuple(sorted({int(a) % max(x.ndim, 1) for a in s.static(1).reshape(-1)}))
        if x.ndim == 0 or not axes:
            return x
        kept = [i for i in range(x.ndim) if i not in axes]
        rows = x.transpose(*kept, *axes).reshape(int(np.prod([x.shape[i] for i in kept], dtype=int)), -1)
        out = dims_array([fn(list(row)) for row in rows], tuple(x.shape[i] for i in kept))
        if s.attr("keep_dims", False):
            out = out.reshape(tuple(1 if i in axes else d for i, d in enumerate(x.shape)))
        return _fits(s, out)

    return rule


def _extreme(fn: Callable[..., Dim]) -> Callable[[list[Dim]], Dim]:
    def fold(row: list[Dim]) -> Dim:
        if not row:
            raise NotSymbolic
        return fn(*row)

    return fold


symbolic("Prod")(_fold(D.product))
symbolic("Sum")(_fold(lambda row: sum(row[1:], row[0]) if row else 0))
symbolic("Max")(_fold(_extreme(D.dmax)))
symbolic("Min")(_fold(_extreme(D.dmin)))
symbolic("All")(_fold(lambda row: all(row)))
symbolic("Any")(_fold(lambda row: any(row)))


# --- moving elements -------------------------------------------------------------------------------

@symbolic("Identity", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape")
def identity(s: SymContext) -> np.ndarray:
    return s.value(0)


@symbolic("IdentityN")
def identity_n(s: SymContext) -> list[np.ndarray]:
    return s.values()


@symbolic("Pack")
def pack(s: SymContext) -> np.ndarray:
    return np.stack(s.values(), axis=int(s.attr("axis", 0)))


@symbolic("Unpack")
def unpack(s: SymContext) -> list[np.ndarray]:
    x = np.moveaxis(s.value(0), int(s.attr("axis", 0)), 0)
    return [as_array(part) for part in x]


@symbolic("ConcatV2")
def concat_v2(s: SymContext) -> np.ndarray:
    *xs, axis = s.values()
    return np.concatenate(xs, axis=int(axis.reshape(-1)[0]))


@symbolic("Split")
def split(s: SymContext) -> list[np.ndarray]:
    return list(np.split(s.value(1), int(s.attr("num_split")), axis=int(s.static(0).reshape(-1)[0])))


@symbolic("SplitV")
def split_v(s: SymContext) -> list[np.ndarray]:
    x, sizes, axis = s.value(0), list(s.static(1).reshape(-1)), int(s.static(2).reshape(-1)[0])
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[axis] - sum(sizes) - 1
    return list(np.split(x, np.cumsum(sizes)[:-1], axis=axis))


@symbolic("Slice")
def slice_(s: SymContext) -> np.ndarray:
    x, begin, count = s.value(0), s.static(1).reshape(-1), s.static(2).reshape(-1)
    at = tuple(slice(b, None if n == -1 else b + n) for b, n in zip(begin, count, strict=True))
    return as_array(x[at])


@symbolic("StridedSlice")
def strided_slice(s: SymContext) -> np.ndarray:
    x = s.value(0)
    begin, end, strides = (s.static(i).reshape(-1) for i in (1, 2, 3))
    entries, form = layout(s.attr, len(begin), x.ndim)
    begin_mask, end_mask = int(s.attr("begin_mask", 0)), int(s.attr("end_mask", 0))
    at: list[slice] = []
    for e in entries:
        if e.index is None:
            at.append(slice(None))
            continue
        i = e.index
        first = None if begin_mask >> i & 1 else int(begin[i])
        if e.shrink:
            first = first or 0
            at.append(slice(first, first + 1 if first != -1 else None))
        else:
            at.append(slice(first, None if end_mask >> i & 1 else int(end[i]), int(strides[i])))
    taken = as_array(x[tuple(at)])
    if any(e.shrink and n != 1 for e, n in zip(entries, taken.shape, strict=True)):
        raise NotSymbolic  # out of range: TensorFlow's own error
    return taken.reshape([1 if a is None else taken.shape[a] for a in form])


@symbolic("Reshape")
def reshape(s: SymContext) -> np.ndarray:
    return s.value(0).reshape(tuple(int(d) for d in s.static(1).reshape(-1)))


@symbolic("Squeeze")
def squeeze(s: SymContext) -> np.ndarray:
    axes = s.attr("squeeze_dims") or None
    return as_array(np.squeeze(s.value(0), axis=tuple(axes) if axes else None))


@symbolic("ExpandDims")
def expand_dims(s: SymContext) -> np.ndarray:
    return np.expand_dims(s.value(0), int(s.static(1).reshape(-1)[0]))


@symbolic("Transpose")
def transpose(s: SymContext) -> np.ndarray:
    return s.value(0).transpose(s.static(1).reshape(-1))


@symbolic("ReverseV2")
def reverse_v2(s: SymContext) -> np.ndarray:
    return np.flip(s.value(0), axis=tuple(int(a) for a in s.static(1).reshape(-1)))


@symbolic("Gather", "GatherV2")
def gather(s: SymContext) -> np.ndarray:
    x, indices = s.value(0), s.static(1)
    axis = int(s.static(2).reshape(-1)[0]) if s.count > 2 else 0
    if int(s.attr("batch_dims", 0)) or np.any(indices < 0) or np.any(indices >= x.shape[axis]):
        raise NotSymbolic
    return as_array(np.take(x, indices, axis=axis))


@symbolic("Fill")
def fill(s: SymContext) -> np.ndarray:
    shape_ = tuple(int(d) for d in s.static(0).reshape(-1))
    return dims_array([s.value(1).reshape(-1)[0]] * int(np.prod(shape_, dtype=int)), shape_)


def _like(number: int) -> Callable[[SymContext], np.ndarray]:
    def rule(s: SymContext) -> np.ndarray:
        dims = s.dims(0)
        count = D.product(dims)
        if not D.is_static(count) or count > 64 or not D.all_static(dims):
            raise NotSymbolic
        value: int | bool = bool(number) if s.view.dtype((s.node.name, 0)) == "bool" else number
        return dims_array([value] * count, tuple(dims))

    return rule


symbolic("ZerosLike")(_like(0))
symbolic("OnesLike")(_like(1))


@symbolic("Tile")
def tile(s: SymContext) -> np.ndarray:
    return np.tile(s.value(0), tuple(int(m) for m in s.static(1).reshape(-1)))


@symbolic("BroadcastTo")
def broadcast_to(s: SymContext) -> np.ndarray:
    return np.broadcast_to(s.value(0), tuple(int(d) for d in s.static(1).reshape(-1)))


@symbolic("Range")
def range_(s: SymContext) -> np.ndarray:
    first, last, step = (s.value(i).reshape(-1)[0] for i in range(3))
    if not D.is_static(step) or not D.is_static(last - first):
        raise NotSymbolic
    return dims_array([first + i * step for i in range(D.static(range_count(s, first, last, step)))])


@symbolic("InvertPermutation")
def invert_permutation(s: SymContext) -> np.ndarray:
    perm = s.static(0).reshape(-1)
    if sorted(perm) != list(range(len(perm))):
        raise NotSymbolic
    return dims_array(int(i) for i in np.argsort(perm))


@symbolic("DataFormatDimMap")
def data_format_dim_map(s: SymContext) -> np.ndarray:
    """Axes of a layout as axes of another one (Grappler's layout optimizer puts these before reductions)."""
    old, new = _layouts(s)
    axes = s.static(0)
    if any(not -len(old) <= a < len(old) for a in axes.reshape(-1)):
        raise NotSymbolic
    return dims_array((new.index(old[a]) for a in axes.reshape(-1)), axes.shape)


@symbolic("DataFormatVecPermute")
def data_format_vec_permute(s: SymContext) -> np.ndarray:
    """A vector over the dims of a layout, or pairs for them, in the order of another one."""
    old, new = _layouts(s)
    value = s.value(0)
    if len(value) == len(old) - 2:  # the spatial dims alone
        old, new = ([d for d in names if d not in "NC"] for names in (old, new))
    if value.ndim not in (1, 2) or len(value) != len(old):
        raise NotSymbolic
    return value[[old.index(d) for d in new]]


def _layouts(s: SymContext) -> tuple[list[str], list[str]]:
    """The names of the dims before and after."""
    old, new = (list(str(s.attr(name, default))) for name, default in (("src_format", "NHWC"), ("dst_format", "NCHW")))
    if sorted(old) != sorted(new):
        raise NotSymbolic
    return old, new


@symbolic("DynamicStitch")
def dynamic_stitch(s: SymContext) -> np.ndarray:
    n = s.count // 2
    indices, data = [s.static(i) for i in range(n)], [s.value(n + i) for i in range(n)]
    length = max((int(i.max()) for i in indices if i.size), default=-1) + 1
    if any(d.ndim != i.ndim for d, i in zip(data, indices, strict=True)):
        raise NotSymbolic
    out: list[Any] = [None] * length
    for i, d in zip(indices, data, strict=True):
        for k, v in zip(i.reshape(-1), d.reshape(-1), strict=True):
            out[int(k)] = v
    if any(v is None for v in out):
        raise NotSymbolic
    return dims_array(out)


@symbolic("ListDiff")
def list_diff(s: SymContext) -> list[np.ndarray]:
    x, y = s.static(0).reshape(-1).tolist(), set(s.static(1).reshape(-1).tolist())
    kept = [i for i, v in enumerate(x) if v not in y]
    return [dims_array(x[i] for i in kept), dims_array(kept)]


@symbolic("ConcatOffset")
def concat_offset(s: SymContext) -> list[np.ndarray]:
    axis, shapes = int(s.static(0).reshape(-1)[0]), [s.value(i) for i in range(1, s.count)]
    out, start = [], 0
    for one in shapes:
        out.append(dims_array(start if i == axis % one.size else 0 for i in range(one.size)))
        start = start + one[axis]
    return out


# --- broadcasting ----------------------------------------------------------------------------------

def _aligned(a: np.ndarray, b: np.ndarray) -> list[tuple[Dim, Dim]]:
    rank_ = max(a.size, b.size)
    return list(zip([1] * (rank_ - a.size) + list(a), [1] * (rank_ - b.size) + list(b), strict=True))


@symbolic("BroadcastArgs")
def broadcast_args(s: SymContext) -> np.ndarray:
    return dims_array(s.b.broadcast_shape([list(s.value(0)), list(s.value(1))]))


@symbolic("BroadcastGradientArgs")
def broadcast_gradient_args(s: SymContext) -> list[np.ndarray]:
    """Unknown dims are taken to agree (guarded).  Where one turns out to be 1, an axis more may be summed than
    TensorFlow names or the other way round; it has one element, and what follows reshapes to the operand's shape."""
    a, b = s.value(0), s.value(1)
    for left, right in _aligned(a, b):
        if left != 1 and right != 1:
            s.b.same_dim(left, right, f"{s.node.name}: dims broadcast together")
    return [dims_array(axes) for axes in gradient_axes(tuple(a), tuple(b))]


# These ops have no tensor form: they are only ever known from shapes.
for _op in ("InvertPermutation", "DynamicStitch", "ListDiff", "ConcatOffset", "BroadcastArgs", "BroadcastGradientArgs",
            "DataFormatDimMap", "DataFormatVecPermute"):
    REGISTRY[_op] = Lowering(_op, None)
