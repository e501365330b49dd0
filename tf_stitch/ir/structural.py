"""The operations that are not elementwise: type rule and NumPy meaning of each (attrs: see ops.py)."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from . import dims as D
from .dims import Dim
from .dtypes import DTYPES
from .graph import Node
from .opdef import ALL, CHEAP, EXPENSIVE, FREE, INT, NUM, IRError, OpDef, Type, d_kind, register

Inputs = Sequence[Node]
Attrs = Mapping[str, Any]
MODES = ("error", "clip", "zero")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise IRError(message)


def _axis(axis: int, rank: int) -> int:
    _check(isinstance(axis, int) and 0 <= axis < rank, f"axis {axis} is outside rank {rank}.")
    return axis


def _distinct(axes: Sequence[int], rank: int) -> None:
    for a in axes:
        _axis(a, rank)
    _check(len(set(axes)) == len(axes), f"axes {tuple(axes)} repeat.")


def _want(want: Type) -> Type:
    _check(want[1] in DTYPES, f"element type '{want[1]}' is not known.")
    for d in want[0]:
        _check(not D.is_static(d) or d >= 0, f"dim {d} is negative.")
    return want


def _integer_result(want: Type) -> str:
    _check(want[1] in DTYPES and DTYPES[want[1]].is_integer, f"the result type '{want[1]}' is no integer type.")
    return want[1]


# --- sources ---------------------------------------------------------------------------------------

def _param(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    return _want(want)


def _no_value(arrays, attrs, shape, dtype):
    raise IRError("a param has no value of its own; the caller gives it.")


def _const(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    value = attrs["value"]
    _check(isinstance(value, np.ndarray), "a const needs a NumPy array.")
    _check(want[1] in DTYPES and DTYPES[want[1]].numpy == value.dtype, f"a const of {value.dtype} is no '{want[1]}'.")
    return value.shape, want[1]


def _shape_value(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    dtype = _integer_result(want)
    _check(D.all_static(want[0]), "the shape of a shape_value must be static.")
    _check(D.product(want[0]) == len(attrs["dims"]), f"{len(attrs['dims'])} dims do not fill the shape {want[0]}.")
    return want[0], dtype


def _iota(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    _axis(attrs["axis"], len(want[0]))
    _check(want[1] in DTYPES and want[1] != "bool", f"iota of '{want[1]}' has no meaning.")
    return _want(want)


def _eval_iota(arrays, attrs, shape, dtype):
    axis = attrs["axis"]
    line = np.arange(shape[axis]).astype(DTYPES[dtype].numpy)
    return np.broadcast_to(line.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)


# --- element type ----------------------------------------------------------------------------------

def _cast(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    _check(want[1] in DTYPES, f"element type '{want[1]}' is not known.")
    return inputs[0].shape, want[1]


def _eval_cast(arrays, attrs, shape, dtype):
    """C conversion.  Float to integer out of range is undefined there and unspecified here."""
    x, d = arrays[0], DTYPES[dtype]
    with np.errstate(all="ignore"):
        return x.astype(d.numpy)


def _bitcast(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    _check(want[1] in DTYPES and DTYPES[want[1]].size == DTYPES[inputs[0].dtype].size,
           f"{inputs[0].dtype} and '{want[1]}' differ in size.")
    _check("bool" not in (want[1], inputs[0].dtype) or want[1] == inputs[0].dtype, "bool cannot be bitcast.")
    return inputs[0].shape, want[1]


def _select(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    c, x, y = inputs
    _check(c.dtype == "bool", f"the condition {c!r} is not bool.")
    _check(c.shape == x.shape == y.shape and x.dtype == y.dtype, f"the operands {c!r}, {x!r} and {y!r} differ.")
    return x.shape, x.dtype


# --- shape -----------------------------------------------------------------------------------------

def _broadcast(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, axes = inputs[0], attrs["axes"]
    shape = _want((want[0], x.dtype))[0]
    _distinct(axes, len(shape))
    _check(len(axes) == x.rank and list(axes) == sorted(axes), f"axes {axes} must increase, one per operand dim.")
    for i, a in enumerate(axes):
        _check(x.shape[i] == shape[a], f"operand dim {i} is {x.shape[i]}, result dim {a} is {shape[a]}.")
    return shape, x.dtype


def _eval_broadcast(arrays, attrs, shape, dtype):
    aligned = [1] * len(shape)
    for size, a in zip(arrays[0].shape, attrs["axes"], strict=True):
        aligned[a] = size
    return np.broadcast_to(arrays[0].reshape(aligned), shape)


def _reshape(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    """Symbolic sizes are checked by the verifier, which knows the guards."""
    shape, dtype = _want((want[0], inputs[0].dtype))
    have, new = inputs[0].size, D.product(shape)
    _check(not D.all_static((have, new)) or have == new, f"{have} elements cannot take the shape {shape}.")
    return shape, dtype


def _transpose(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, perm = inputs[0], attrs["perm"]
    _check(sorted(perm) == list(range(x.rank)), f"{perm} is no permutation of {x.rank} axes.")
    return tuple(x.shape[p] for p in perm), x.dtype


def slice_last(start: Any, size: Any, step: int) -> Any:
    """The index of the last element that a slice of ``size`` > 0 elements reads."""
    return start + (size - 1) * step


def _slice(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, starts, steps = inputs[0], attrs["starts"], attrs["steps"]
    shape = _want((want[0], x.dtype))[0]
    _check(len(starts) == len(steps) == len(shape) == x.rank, "starts, steps and sizes must have one entry per dim.")
    for d, start, size, step in zip(x.shape, starts, shape, steps, strict=True):
        _check(isinstance(step, int) and step > 0, f"step {step} is not positive.")
        if isinstance(d, int) and isinstance(start, int) and isinstance(size, int):
            inside = start >= 0 and (slice_last(start, size, step) < d if size else start <= d)
            _check(inside, f"{size} elements from {start} by {step} leave a dim of {d}.")
    return shape, x.dtype


def _eval_slice(arrays, attrs, shape, dtype):
    x = arrays[0]
    for d, start, size, step in zip(x.shape, attrs["starts"], shape, attrs["steps"], strict=True):
        if size and not (start >= 0 and slice_last(start, size, step) < d):
            raise IndexError(f"A slice of {size} elements from {start} by {step} leaves a dim of {d}.")
    if 0 in shape:
        return np.empty(shape, x.dtype)
    return x[tuple(slice(b, slice_last(b, n, s) + 1, s)
                   for b, n, s in zip(attrs["starts"], shape, attrs["steps"], strict=True))]


def _reverse(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    _distinct(attrs["axes"], inputs[0].rank)
    return inputs[0].shape, inputs[0].dtype


def padded_dim(d: Dim, low: Dim, high: Dim, interior: int) -> Dim:
    """The size of a padded dim: ``interior`` elements go between neighbours."""
    return low + d + high + (D.dmax(d - 1, 0) * interior if interior else 0)


def _pad(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, value = inputs
    low, high, interior = attrs["low"], attrs["high"], attrs["interior"]
    _check(value.shape == () and value.dtype == x.dtype, f"the pad value {value!r} is no {x.dtype} scalar.")
    _check(len(low) == len(high) == len(interior) == x.rank, "low, high and interior must have one entry per dim.")
    for p in (*low, *high, *interior):
        _check(not D.is_static(p) or p >= 0, f"padding {p} is negative.")
    return tuple(padded_dim(*e) for e in zip(x.shape, low, high, interior, strict=True)), x.dtype


def _eval_pad(arrays, attrs, shape, dtype):
    x, value = arrays
    if any(p < 0 for p in (*attrs["low"], *attrs["high"])):
        raise IndexError("A dim is padded by a negative number of elements.")
    out = np.full(shape, value[()], x.dtype)
    if x.size:
        out[tuple(slice(lo, lo + (d - 1) * (i + 1) + 1, i + 1)
                  for lo, d, i in zip(attrs["low"], x.shape, attrs["interior"], strict=True))] = x
    return out


def _concat(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    first, axis = inputs[0], _axis(attrs["axis"], inputs[0].rank)
    for other in inputs[1:]:
        same = [a == b for i, (a, b) in enumerate(zip(first.shape, other.shape)) if i != axis]
        _check(other.rank == first.rank and all(same) and other.dtype == first.dtype,
               f"{first!r} and {other!r} do not fit along axis {axis}.")
    total: Dim = 0
    for x in inputs:
        total = total + x.shape[axis]
    return first.shape[:axis] + (total,) + first.shape[axis + 1:], first.dtype


# --- reads by index --------------------------------------------------------------------------------

def _indexed(inputs: Inputs, attrs: Attrs) -> tuple[Node, Node, int]:
    params, indices = inputs
    batch = attrs["batch_dims"]
    _check(DTYPES[indices.dtype].is_integer, f"the indices {indices!r} are no integers.")
    _check(attrs["mode"] in MODES, f"mode '{attrs['mode']}' is none of {', '.join(MODES)}.")
    _check(0 <= batch <= min(params.rank, indices.rank), f"batch_dims {batch} exceeds a rank.")
    _check(params.shape[:batch] == indices.shape[:batch], f"the batch dims of {params!r} and {indices!r} differ.")
    return params, indices, batch


def _gather(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    params, indices, batch = _indexed(inputs, attrs)
    axis = _axis(attrs["axis"], params.rank)
    _check(axis >= batch, f"axis {axis} is a batch dim.")
    return params.shape[:axis] + indices.shape[batch:] + params.shape[axis + 1:], params.dtype


def _in_range(index: np.ndarray, size, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices made safe, and which ones were in range; IndexError in mode "error", or to clip to an empty dim."""
    index = index.astype(np.int64)
    valid = (index >= 0) & (index < size)
    if not valid.all() and (mode == "error" or (mode == "clip" and np.any(np.asarray(size) == 0))):
        sizes = np.broadcast_to(size, index.shape)
        raise IndexError(f"The index {index[~valid].flat[0]} is outside a dim of {sizes[~valid].flat[0]}.")
    return np.clip(index, 0, np.maximum(np.asarray(size) - 1, 0)), valid | (mode == "clip")


def _eval_gather(arrays, attrs, shape, dtype):
    x, raw = arrays
    axis, batch = attrs["axis"], attrs["batch_dims"]
    index, keep = _in_range(raw, x.shape[axis], attrs["mode"])
    if 0 in shape or x.size == 0:
        return np.zeros(shape, x.dtype)
    lead, mid, rest = x.shape[:batch], x.shape[batch:axis], x.shape[axis + 1:]
    n = int(np.prod(lead, dtype=np.int64))
    flat = x.reshape(n, int(np.prod(mid, dtype=np.int64)), x.shape[axis], int(np.prod(rest, dtype=np.int64)))
    where = index.reshape(n, 1, -1, 1)
    out = np.take_along_axis(flat, where, axis=2)
    return np.where(keep.reshape(where.shape), out, np.zeros((), x.dtype)).reshape(shape)


def _gather_nd(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    params, indices, batch = _indexed(inputs, attrs)
    _check(indices.rank > batch, "gather_nd needs an index dim after the batch dims.")
    depth = indices.shape[-1]
    if not isinstance(depth, int) or batch + depth > params.rank:
        raise IRError(f"an index of {depth} parts does not fit {params!r}.")
    return indices.shape[:-1] + params.shape[batch + depth:], params.dtype


def _eval_gather_nd(arrays, attrs, shape, dtype):
    x, raw = arrays
    batch, depth = attrs["batch_dims"], raw.shape[-1]
    lead, rest = x.shape[:batch], x.shape[batch + depth:]
    n = int(np.prod(lead, dtype=np.int64))
    sizes = np.array(x.shape[batch:batch + depth], np.int64)
    index, keep = _in_range(raw, sizes, attrs["mode"]) if depth else (raw.astype(np.int64), np.ones(raw.shape, bool))
    if 0 in shape or x.size == 0:
        return np.zeros(shape, x.dtype)
    flat = x.reshape(n, *sizes, int(np.prod(rest, dtype=np.int64)))
    count = int(np.prod(raw.shape[batch:-1], dtype=np.int64))
    index, keep = index.reshape(n, count, depth), keep.all(axis=-1).reshape(n, count, 1)
    out = flat[(np.arange(n)[:, None], *np.moveaxis(index, -1, 0))]
    return np.where(keep, out, np.zeros((), x.dtype)).reshape(shape)


def _order(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    _check(inputs[0].rank >= 1, f"{inputs[0]!r} has no last dim to put in order.")
    return inputs[0].shape, _integer_result(want)


def _search(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    table, queries = inputs
    batch = attrs["batch_dims"]
    _check(attrs["side"] in ("left", "right"), f"side '{attrs['side']}' is neither left nor right.")
    _check(table.dtype == queries.dtype, f"{table!r} and {queries!r} differ in dtype.")
    _check(batch == table.rank - 1 and batch <= queries.rank, f"batch_dims {batch} do not fit {table!r}, {queries!r}.")
    _check(table.shape[:batch] == queries.shape[:batch], f"the batch dims of {table!r} and {queries!r} differ.")
    return queries.shape, _integer_result(want)


def _eval_search(arrays, attrs, shape, dtype):
    """Halves the range that a place is in, as std::lower_bound and std::upper_bound do, also where there is NaN."""
    table, queries = arrays
    lead, size = table.shape[:-1], table.shape[-1]
    count = int(np.prod(lead, dtype=np.int64))
    rows, q = table.reshape(count, size), queries.reshape(count, int(np.prod(shape[len(lead):], dtype=np.int64)))
    low, high = np.zeros(q.shape, np.int64), np.full(q.shape, size, np.int64)
    while (left := low < high).any():
        middle = low + (high - low) // 2
        x = np.take_along_axis(rows, np.minimum(middle, size - 1), axis=1)
        up = left & (x < q if attrs["side"] == "left" else ~(q < x))
        low, high = np.where(up, middle + 1, low), np.where(left & ~up, middle, high)
    return low.astype(DTYPES[dtype].numpy).reshape(shape)


# --- reductions ------------------------------------------------------------------------------------

_REDUCERS: dict[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]] = {
    "sum": (NUM, np.sum), "prod": (NUM, np.prod), "max": (ALL, np.max), "min": (ALL, np.min),
    "and": (("bool",), np.all), "or": (("bool",), np.any),
}


def identity(kind: str, dtype: str) -> np.ndarray:
    """The value of a reduction over no elements (also the pad value of a max window)."""
    d = DTYPES[dtype]
    if kind in ("sum", "or"):
        return np.zeros((), d.numpy)
    if kind in ("prod", "and"):
        return np.ones((), d.numpy)
    if d.kind == "float":
        return np.array(-np.inf if kind == "max" else np.inf).astype(d.numpy)
    if d.kind == "bool":
        return np.array(kind == "min")
    info = np.iinfo(d.numpy)
    return np.array(info.min if kind == "max" else info.max, d.numpy)


def _accumulate(x: np.ndarray) -> np.ndarray:
    """Floats in float64: the reference is to be the exact result, rounded once.

    Row-major, so that the order of summation does not depend on how the operand came about.
    """
    return x.astype(np.float64, order="C") if d_kind(x) == "float" else x


def _reduce(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, axes, kind = inputs[0], attrs["axes"], attrs["kind"]
    _check(kind in _REDUCERS, f"kind '{kind}' is none of {', '.join(_REDUCERS)}.")
    _check(DTYPES[x.dtype].kind in _REDUCERS[kind][0], f"'{kind}' of {x.dtype} has no meaning.")
    _distinct(axes, x.rank)
    _check(list(axes) == sorted(axes), f"axes {axes} are not sorted.")
    return tuple(d for i, d in enumerate(x.shape) if i not in axes), x.dtype


def _eval_reduce(arrays, attrs, shape, dtype):
    x, kind, axes, d = arrays[0], attrs["kind"], attrs["axes"], DTYPES[dtype]
    if x.size == 0:
        return np.full(shape, identity(kind, dtype)[()], d.numpy)
    with np.errstate(all="ignore"):
        kwargs = {"dtype": np.float64 if d.is_float else d.numpy} if kind in ("sum", "prod") else {}
        return np.asarray(_REDUCERS[kind][1](_accumulate(x), axis=axes, **kwargs)).astype(d.numpy)


def _segment(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, starts = inputs
    _check(attrs["kind"] in ("sum", "prod", "max", "min"), f"kind '{attrs['kind']}' is none of sum, prod, max, min.")
    _check(x.rank >= 1 and starts.rank == 1, f"{x!r} needs rows, {starts!r} one dim.")
    _check(DTYPES[starts.dtype].is_integer, f"the starts {starts!r} are no integers.")
    return (starts.shape[0] - 1, *x.shape[1:]), x.dtype


def _eval_segment(arrays, attrs, shape, dtype):
    x, starts = arrays
    kind, d = attrs["kind"], DTYPES[dtype]
    out = np.full(shape, identity(kind, dtype)[()], d.numpy)
    if out.size == 0:
        return out
    starts, wide = np.clip(starts.astype(np.int64), 0, len(x)), _accumulate(x)
    with np.errstate(all="ignore"):
        for s, (begin, end) in enumerate(itertools.pairwise(starts)):
            if begin < end:
                kwargs = {"dtype": wide.dtype} if kind in ("sum", "prod") else {}
                out[s] = _REDUCERS[kind][1](wide[begin:end], axis=0, **kwargs).astype(d.numpy)
    return out


def _arg_reduce(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, axis = inputs[0], _axis(attrs["axis"], inputs[0].rank)
    _check(attrs["kind"] in ("max", "min"), f"kind '{attrs['kind']}' is neither max nor min.")
    return x.shape[:axis] + x.shape[axis + 1:], _integer_result(want)


def _eval_arg_reduce(arrays, attrs, shape, dtype):
    """First index of what beats the start value, the type's lowest (highest) finite number; else 0.

    So NaN never wins and neither does -inf for max: that is Eigen's reducer.
    """
    x, axis, d = arrays[0], attrs["axis"], DTYPES[dtype]
    if 0 in shape or x.shape[axis] == 0:
        return np.zeros(shape, d.numpy)
    is_max = attrs["kind"] == "max"
    if d_kind(x) == "float":
        limit = float(ml_dtypes.finfo(x.dtype).max) * (-1 if is_max else 1)
        x = (np.fmax if is_max else np.fmin)(x.astype(np.float64), limit)
    return np.asarray((np.argmax if is_max else np.argmin)(x, axis=axis)).astype(d.numpy)


def _scan(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    _axis(attrs["axis"], inputs[0].rank)
    _check(attrs["kind"] in ("sum", "prod"), f"kind '{attrs['kind']}' is neither sum nor prod.")
    return inputs[0].shape, inputs[0].dtype


def _eval_scan(arrays, attrs, shape, dtype):
    x, axis, kind, d = arrays[0], attrs["axis"], attrs["kind"], DTYPES[dtype]
    if 0 in shape:
        return np.zeros(shape, d.numpy)
    x = np.moveaxis(_accumulate(x), axis, 0)
    if attrs["reverse"]:
        x = x[::-1]
    if attrs["exclusive"]:
        first = np.full((1, *x.shape[1:]), identity(kind, dtype)[()]).astype(x.dtype)
        x = np.concatenate([first, x[:-1]])
    with np.errstate(all="ignore"):
        x = (np.cumsum if kind == "sum" else np.cumprod)(x, axis=0, dtype=x.dtype)
    return np.moveaxis(x[::-1] if attrs["reverse"] else x, 0, axis).astype(d.numpy)


# --- products --------------------------------------------------------------------------------------

def dot_free(rank: int, batch: Sequence[int], contract: Sequence[int]) -> tuple[int, ...]:
    """The axes of a dot operand that are neither batch nor contracted, in order."""
    return tuple(i for i in range(rank) if i not in batch and i not in contract)


def _dot(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, y = inputs
    (bx, by), (cx, cy) = attrs["batch"], attrs["contract"]
    _distinct((*bx, *cx), x.rank)
    _distinct((*by, *cy), y.rank)
    _check(x.dtype == y.dtype, f"{x!r} and {y!r} differ in dtype.")
    for name, p, q in (("batch", bx, by), ("contracted", cx, cy)):
        _check(len(p) == len(q) and all(x.shape[i] == y.shape[j] for i, j in zip(p, q, strict=True)),
               f"the {name} dims of {x!r} and {y!r} differ.")
    free = [x.shape[i] for i in dot_free(x.rank, bx, cx)] + [y.shape[i] for i in dot_free(y.rank, by, cy)]
    return tuple(x.shape[i] for i in bx) + tuple(free), x.dtype


def _eval_dot(arrays, attrs, shape, dtype):
    (bx, by), (cx, cy) = attrs["batch"], attrs["contract"]
    x, y = (_accumulate(a) for a in arrays)

    def matrix(a, batch, contract, contract_last):
        free = dot_free(a.ndim, batch, contract)
        order = (*batch, *free, *contract) if contract_last else (*batch, *contract, *free)
        n, k, f = (int(np.prod([a.shape[i] for i in axes], dtype=np.int64)) for axes in (batch, contract, free))
        return np.ascontiguousarray(a.transpose(order).reshape((n, f, k) if contract_last else (n, k, f)))

    with np.errstate(all="ignore"):
        out = np.matmul(matrix(x, bx, cx, True), matrix(y, by, cy, False))
        return out.reshape(shape).astype(DTYPES[dtype].numpy)


def window_dim(d: Dim, size: int, stride: int, lo: int, hi: int, dilation: int = 1) -> Dim:
    """The number of places where a window fits into a padded dim."""
    span = (size - 1) * dilation + 1
    return D.dmax(D.floordiv(d + lo + hi - span, stride) + 1, 0)


def _spatial(x: Node, attrs: Attrs, size: Sequence[int], dilations: Sequence[int]) -> tuple[Dim, ...]:
    rank = x.rank - 2
    _check(1 <= rank <= 3, f"{x!r} has no 1 to 3 spatial dims between batch and channels.")
    lists = (attrs["strides"], attrs["padding"], size, dilations)
    _check(all(len(v) == rank for v in lists), f"strides, padding, size and dilations need {rank} entries.")
    _check(all(s >= 1 for v in (attrs["strides"], dilations) for s in v), "strides and dilations must be positive.")
    return tuple(window_dim(d, k, s, p[0], p[1], dil) for d, s, p, k, dil in zip(x.shape[1:-1], *lists, strict=True))


def _conv(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, w = inputs
    groups = attrs["groups"]
    _check(w.rank == x.rank and w.dtype == x.dtype, f"{x!r} and {w!r} differ in rank or dtype.")
    kernel = w.shape
    if not D.all_static(kernel) or not D.is_static(x.shape[-1]):
        raise IRError("the filter and the channels must be static.")
    spatial = _spatial(x, attrs, kernel[:-2], attrs["dilations"])
    _check(groups >= 1 and x.shape[-1] == w.shape[-2] * groups and w.shape[-1] % groups == 0,
           f"{groups} groups do not fit {x!r} and {w!r}.")
    return (x.shape[0], *spatial, w.shape[-1]), x.dtype


def _conv_filter(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, g = inputs
    groups, size = attrs["groups"], attrs["size"]
    _check(g.rank == x.rank and g.dtype == x.dtype, f"{x!r} and {g!r} differ in rank or dtype.")
    if not D.all_static((x.shape[-1], g.shape[-1])):
        raise IRError("the channels must be static.")
    _check(all(s >= 1 for s in size), "the window is empty.")
    places = _spatial(x, attrs, size, attrs["dilations"])
    _check(g.shape[:-1] == (x.shape[0], *places), f"{g!r} does not have the places of a convolution of {x!r}.")
    _check(groups >= 1 and x.shape[-1] % groups == 0 and g.shape[-1] % groups == 0,
           f"{groups} groups do not fit {x!r} and {g!r}.")
    return (g.shape[-1], *size, x.shape[-1] // groups), x.dtype


def _eval_conv_filter(arrays, attrs, shape, dtype):
    x, g = (_accumulate(a) for a in arrays)
    out = np.zeros(shape, x.dtype)
    if out.size and x.size and g.size:
        with np.errstate(all="ignore"):
            for offset, seen in _windows(x, attrs, attrs["size"], attrs["dilations"], g.shape[1:-1], 0):
                parts = (np.split(a.reshape(-1, a.shape[-1]), attrs["groups"], axis=1) for a in (g, seen))
                out[(slice(None), *offset)] = np.concatenate([a.T @ b for a, b in zip(*parts, strict=True)])
    return out.astype(DTYPES[dtype].numpy)


def _windows(x: np.ndarray, attrs: Attrs, size, dilations, spatial, fill):
    """Yields (offset, the padded input seen from that offset at every place of the window)."""
    padded = np.pad(x, [(0, 0), *attrs["padding"], (0, 0)], constant_values=fill)
    for offset in itertools.product(*map(range, size)):
        yield offset, padded[(slice(None), *(
            slice(o * d, o * d + (n - 1) * s + 1, s)
            for o, d, n, s in zip(offset, dilations, spatial, attrs["strides"], strict=True)), slice(None))]


def _eval_conv(arrays, attrs, shape, dtype):
    x, w = (_accumulate(a) for a in arrays)
    out = np.zeros(shape, x.dtype)
    if out.size == 0 or x.shape[-1] == 0:
        return out.astype(DTYPES[dtype].numpy)
    groups = attrs["groups"]
    with np.errstate(all="ignore"):
        for offset, seen in _windows(x, attrs, w.shape[:-2], attrs["dilations"], shape[1:-1], 0):
            parts = zip(np.split(seen, groups, axis=-1), np.split(w[offset], groups, axis=-1), strict=True)
            out += np.concatenate([a @ b for a, b in parts], axis=-1)
        return out.astype(DTYPES[dtype].numpy)


def _window(inputs: Inputs, attrs: Attrs, want: Type) -> Type:
    x, kind = inputs[0], attrs["kind"]
    _check(kind in ("max", "sum", "mean"), f"kind '{kind}' is none of max, sum, mean.")
    _check(all(s >= 1 for s in attrs["size"]), "the window is empty.")
    spatial = _spatial(x, attrs, attrs["size"], (1,) * len(attrs["size"]))
    return (x.shape[0], *spatial, x.shape[-1]), x.dtype


def _eval_window(arrays, attrs, shape, dtype):
    x, kind, size, d = _accumulate(arrays[0]), attrs["kind"], attrs["size"], DTYPES[dtype]
    if 0 in shape:
        return np.zeros(shape, d.numpy)
    start = identity("max", dtype).astype(x.dtype) if kind == "max" else np.zeros((), x.dtype)
    ones = (1,) * len(size)
    out, count = np.full(shape, start), np.zeros(shape, x.dtype)
    with np.errstate(all="ignore"):
        for _, seen in _windows(x, attrs, size, ones, shape[1:-1], start):
            out = np.maximum(out, seen) if kind == "max" else out + seen
        if kind == "mean":
            for _, seen in _windows(np.ones_like(x), attrs, size, ones, shape[1:-1], 0):
                count += seen
            out = out / count if d.is_float else out // count
        return out.astype(d.numpy)


# name, arity, infer, evaluate, cost, kinds, attrs
for _row in [
    ("param", 0, _param, _no_value, FREE, ALL, ("index",)),
    ("const", 0, _const, lambda a, attrs, shape, dtype: attrs["value"], FREE, ALL, ("value",)),
    ("shape_value", 0, _shape_value,
     lambda a, attrs, shape, dtype: np.array(attrs["dims"], np.int64).astype(DTYPES[dtype].numpy).reshape(shape),
     FREE, ALL, ("dims",)),
    ("iota", 0, _iota, _eval_iota, FREE, ALL, ("axis",)),
    ("cast", 1, _cast, _eval_cast, CHEAP, ALL, ()),
    ("bitcast", 1, _bitcast, lambda a, attrs, shape, dtype: a[0].view(DTYPES[dtype].numpy), FREE, ALL, ()),
    ("select", 3, _select, lambda a, attrs, shape, dtype: np.where(*a), CHEAP, ALL, ()),
    ("broadcast", 1, _broadcast, _eval_broadcast, FREE, ALL, ("axes",)),
    ("reshape", 1, _reshape, lambda a, attrs, shape, dtype: a[0].reshape(shape), FREE, ALL, ()),
    ("transpose", 1, _transpose, lambda a, attrs, shape, dtype: a[0].transpose(attrs["perm"]), FREE, ALL, ("perm",)),
    ("slice", 1, _slice, _eval_slice, FREE, ALL, ("starts", "steps")),
    ("reverse", 1, _reverse, lambda a, attrs, shape, dtype: np.flip(a[0], attrs["axes"]), FREE, ALL, ("axes",)),
    ("pad", 2, _pad, _eval_pad, CHEAP, ALL, ("low", "high", "interior")),
    ("concat", None, _concat, lambda a, attrs, shape, dtype: np.concatenate(a, attrs["axis"]), CHEAP, ALL, ("axis",)),
    ("gather", 2, _gather, _eval_gather, CHEAP, ALL, ("axis", "batch_dims", "mode")),
    ("gather_nd", 2, _gather_nd, _eval_gather_nd, CHEAP, ALL, ("batch_dims", "mode")),
    ("order", 1, _order,
     lambda a, attrs, shape, dtype: np.argsort(a[0], axis=-1, kind="stable").astype(DTYPES[dtype].numpy),
     EXPENSIVE, INT, ()),
    ("search", 2, _search, _eval_search, EXPENSIVE, NUM, ("side", "batch_dims")),
    ("segment", 2, _segment, _eval_segment, EXPENSIVE, NUM, ("kind",)),
    ("reduce", 1, _reduce, _eval_reduce, EXPENSIVE, ALL, ("kind", "axes")),
    ("arg_reduce", 1, _arg_reduce, _eval_arg_reduce, EXPENSIVE, ALL, ("kind", "axis")),
    ("scan", 1, _scan, _eval_scan, EXPENSIVE, NUM, ("kind", "axis", "exclusive", "reverse")),
    ("dot", 2, _dot, _eval_dot, EXPENSIVE, NUM, ("batch", "contract")),
    ("conv", 2, _conv, _eval_conv, EXPENSIVE, NUM, ("strides", "padding", "dilations", "groups")),
    ("conv_filter", 2, _conv_filter, _eval_conv_filter, EXPENSIVE, NUM,
     ("size", "strides", "padding", "dilations", "groups")),
    ("window", 1, _window, _eval_window, EXPENSIVE, NUM, ("kind", "size", "strides", "padding")),
]:
    _name, _arity, _infer, _evaluate, _cost, _kinds, _attrs = _row
    register(OpDef(_name, _arity, _infer, _evaluate, None, _cost, _kinds, _attrs))
