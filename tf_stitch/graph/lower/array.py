"""Ops that move, select or make elements."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import GraphView, NodeView
from .context import Context
from .registry import INT, lower
from .slicing import Span, spans


def sizes_of(c: Context, value: np.ndarray, known: Sequence[int | None] | None = None) -> list[Dim]:
    """A shape operand as dims that are not negative; where TensorFlow knows one, that number is taken."""
    out: list[Dim] = []
    for i, d in enumerate(value.reshape(-1)):
        want = known[i] if known is not None and i < len(known) else None
        if not D.is_static(d) and want is not None:
            d = c.b.same_dim(d, want, f"{c.node.name}: dim {i} of the result")
        c.b.require("le", 0, d, f"{c.node.name}: a size is not negative")
        out.append(c.b.resolve(d))
    return [c.b.resolve(d) for d in out]


# --- names and shapes ------------------------------------------------------------------------------

@lower("Identity", "StopGradient", "PreventGradient", "Snapshot")
def identity(c: Context, x: Node) -> Node:
    return x


@lower("IdentityN")
def identity_n(c: Context, *xs: Node) -> list[Node]:
    return list(xs)


@lower("EnsureShape")
def ensure_shape(c: Context, x: Node) -> Node:
    want = c.attr("shape")
    if want is None:
        return x
    if len(want) != x.rank:
        c.fail(f"the input has rank {x.rank}, shape {want} is asked for")
    for d, w in zip(x.shape, want, strict=True):
        if w is not None:
            c.b.same_dim(d, w, f"{c.node.name}: the shape that is asked for")
    return x


@lower("Shape")
def shape(c: Context, x: Node) -> Node:
    return c.b.shape_value(x.shape, (x.rank,), c.dtype)


@lower("ShapeN")
def shape_n(c: Context, *xs: Node) -> list[Node]:
    return [c.b.shape_value(x.shape, (x.rank,), c.dtype) for x in xs]


@lower("Size")
def size(c: Context, x: Node) -> Node:
    return c.b.shape_value((x.size,), (), c.dtype)


@lower("Rank")
def rank(c: Context, x: Node) -> Node:
    return c.b.const(x.rank, c.dtype)


@lower("Reshape", values=(1,))
def reshape(c: Context, x: Node, target: np.ndarray) -> Node:
    wanted = list(target.reshape(-1))
    free = [i for i, d in enumerate(wanted) if D.is_static(d) and d == -1]
    known = list(c.static_shape() or ())
    for i in free:  # TensorFlow may know what -1 stands for
        wanted[i] = known[i] if i < len(known) and known[i] is not None else -1
    unknown = [i for i in free if wanted[i] == -1]
    fixed = iter(sizes_of(c, np.array([d for i, d in enumerate(wanted) if i not in unknown], object),
                          [k for i, k in enumerate(known) if i not in unknown]))
    dims: list[Dim] = [-1 if i in unknown else next(fixed) for i in range(len(wanted))]
    if unknown:
        dims[unknown[0]] = _missing_dim(c, x, [d for i, d in enumerate(dims) if i not in unknown])
    return c.b.reshape(x, dims)


def _missing_dim(c: Context, x: Node, others: Sequence[Dim]) -> Dim:
    """What -1 stands for: the size over the product of the other dims, which must divide it."""
    total, product = x.size, D.product(others)
    if D.is_static(product) and product == 0:
        if not D.all_static((*x.shape, *others)):
            c.fail("-1 beside a dim of 0 is not determined")
        return D.floordiv(D.product(d for d in x.shape if d), D.product(d for d in others if d))  # as TensorFlow does
    if not _zeros_cancel(x, others):
        c.b.require("le", 1, product, f"{c.node.name}: TensorFlow leaves out dims of 0 when it works out -1")
        total, product = c.b.resolve(x.size), c.b.resolve(product)
    if D.mod(total, product) != 0:
        c.b.require("divides", total, product, f"{c.node.name}: the size for -1")
    return D.floordiv(c.b.resolve(x.size), c.b.resolve(product))


def _zeros_cancel(x: Node, others: Sequence[Dim]) -> bool:
    """Dims that may be 0 are dims of the input as well, and the rest of the input is static: 0 / 0 is no question."""
    left = list(x.shape)
    for d in others:
        if D.is_static(d) or D.prove_le(1, d):
            continue
        if d not in left:
            return False
        left.remove(d)
    return D.all_static(left) or all(D.is_static(d) for d in others)


@lower("Squeeze")
def squeeze(c: Context, x: Node) -> Node:
    listed = c.attr("squeeze_dims") or []
    axes = set(c.axes(listed, x.rank)) if listed else {i for i, d in enumerate(x.shape) if D.is_static(d) and d == 1}
    for a in axes:
        c.b.same_dim(x.shape[a], 1, f"{c.node.name}: a squeezed dim is 1")
    return c.b.reshape(x, [d for i, d in enumerate(x.shape) if i not in axes])


@lower("ExpandDims", statics=(1,))
def expand_dims(c: Context, x: Node, axis: np.ndarray) -> Node:
    return c.expand(x, [c.axis(axis, x.rank + 1)])


@lower("Transpose", "ConjugateTranspose", statics=(1,))
def transpose(c: Context, x: Node, perm: np.ndarray) -> Node:
    return c.b.transpose(x, [c.axis(p, x.rank) for p in perm.reshape(-1)])


# --- joining and cutting ---------------------------------------------------------------------------

@lower("ConcatV2", statics=(-1,))
def concat_v2(c: Context, *operands) -> Node:
    *xs, axis = operands
    return c.b.concat(xs, c.axis(axis, xs[0].rank))


@lower("Concat", statics=(0,))
def concat(c: Context, axis: np.ndarray, *xs: Node) -> Node:
    return c.b.concat(xs, c.axis(axis, xs[0].rank))


def cut(c: Context, x: Node, axis: int, start: Dim, count: Dim) -> Node:
    """``count`` elements from ``start`` along one axis."""
    starts = [start if i == axis else 0 for i in range(x.rank)]
    return c.b.slice(x, starts, [count if i == axis else d for i, d in enumerate(x.shape)])


@lower("Split", statics=(0,))
def split(c: Context, axis: np.ndarray, x: Node) -> list[Node]:
    a, count = c.axis(axis, x.rank), int(c.attr("num_split"))
    c.b.require("divides", x.shape[a], count, f"{c.node.name}: the dim splits evenly")
    part = D.floordiv(x.shape[a], count)
    return [cut(c, x, a, i * part, part) for i in range(count)]


@lower("SplitV", values=(1,), statics=(2,))
def split_v(c: Context, x: Node, parts: np.ndarray, axis: np.ndarray) -> list[Node]:
    a = c.axis(axis, x.rank)
    sizes = list(parts.reshape(-1))
    free = [i for i, d in enumerate(sizes) if D.is_static(d) and d == -1]
    rest = sizes_of(c, np.array([d for i, d in enumerate(sizes) if i not in free], object))
    total: Dim = 0
    for d in rest:
        total = total + d
    if free:
        rest.insert(free[0], x.shape[a] - total)
    else:
        c.b.same_dim(x.shape[a], total, f"{c.node.name}: the parts make the whole")
    out: list[Node] = []
    start: Dim = 0
    for d in rest:
        out.append(cut(c, x, a, start, d))
        start = start + d
    return out


@lower("Pack")
def pack(c: Context, *xs: Node) -> Node:
    axis = c.axis(c.attr("axis", 0), xs[0].rank + 1)
    return c.b.concat([c.expand(x, [axis]) for x in xs], axis)


@lower("Unpack")
def unpack(c: Context, x: Node) -> list[Node]:
    axis, count = c.axis(c.attr("axis", 0), x.rank), int(c.attr("num"))
    c.b.same_dim(x.shape[axis], count, f"{c.node.name}: the number of outputs")
    rest = [d for i, d in enumerate(x.shape) if i != axis]
    return [c.b.reshape(cut(c, x, axis, i, 1), rest) for i in range(count)]


@lower("Slice", values=(1, 2))
def slice_(c: Context, x: Node, begin: np.ndarray, count: np.ndarray) -> Node:
    starts = sizes_of(c, begin)
    rests = [d - s if D.is_static(n) and n == -1 else n
             for d, s, n in zip(x.shape, starts, count.reshape(-1), strict=True)]
    return c.b.slice(x, starts, sizes_of(c, np.array(rests, object), c.static_shape()))


@lower("StridedSlice", values=(1, 2), statics=(3,))
def strided_slice(c: Context, x: Node, begin: np.ndarray, end: np.ndarray, strides: np.ndarray) -> Node:
    parts = spans(c, x.shape, begin, end, strides)
    x = c.b.reverse(x, [i for i, s in enumerate(parts.axes) if s.reverse])
    x = c.b.slice(x, [s.start for s in parts.axes], [s.count for s in parts.axes], [s.step for s in parts.axes])
    return c.b.reshape(x, parts.result(x.shape))


@lower("StridedSliceGrad", values=(0, 1, 2), statics=(3,))
def strided_slice_grad(c: Context, target: np.ndarray, begin: np.ndarray, end: np.ndarray, strides: np.ndarray,
                       g: Node) -> Node:
    dims = sizes_of(c, target, c.static_shape())
    parts = spans(c, dims, begin, end, strides)
    g = c.b.reshape(g, [s.count for s in parts.axes])
    high = [_after(c.b.resolve(d), s) for d, s in zip(dims, parts.axes, strict=True)]
    g = c.b.pad(g, [s.start for s in parts.axes], high, 0, [s.step - 1 for s in parts.axes])
    g = c.b.reshape(g, dims)
    return c.b.reverse(g, [i for i, s in enumerate(parts.axes) if s.reverse])


def _after(d: Dim, s: Span) -> Dim:
    """Elements of a dim behind the last one that the slice takes."""
    gaps = D.dmax(s.count - 1, 0) * (s.step - 1) if s.step > 1 else 0
    return d - s.start - s.count - gaps


@lower("ReverseV2", statics=(1,))
def reverse_v2(c: Context, x: Node, axes: np.ndarray) -> Node:
    return c.b.reverse(x, c.axes(axes, x.rank))


@lower("Reverse", statics=(1,))
def reverse(c: Context, x: Node, flags: np.ndarray) -> Node:
    return c.b.reverse(x, [i for i, f in enumerate(flags.reshape(-1)) if f])


@lower("Roll", statics=(1, 2))
def roll(c: Context, x: Node, shifts: np.ndarray, axes: np.ndarray) -> Node:
    for shift, axis in zip(shifts.reshape(-1), axes.reshape(-1), strict=True):
        a = c.axis(axis, x.rank)
        d = x.shape[a]
        if D.is_static(d):
            shift = int(shift) % d if d else 0
        by = int(shift) if shift >= 0 else d + int(shift)
        if not (D.is_static(by) and by == 0):
            x = c.b.concat([cut(c, x, a, d - by, by), cut(c, x, a, 0, d - by)], a)
    return x


# --- padding and repeating -------------------------------------------------------------------------

def _pairs(c: Context, x: Node, paddings: np.ndarray) -> tuple[list[Dim], list[Dim]]:
    flat = sizes_of(c, paddings)
    if len(flat) != 2 * x.rank:
        c.fail(f"{len(flat)} paddings are given for rank {x.rank}")
    return flat[::2], flat[1::2]


@lower("Pad", values=(1,))
def pad(c: Context, x: Node, paddings: np.ndarray) -> Node:
    return c.b.pad(x, *_pairs(c, x, paddings), c.b.const(0, x.dtype))


@lower("PadV2", values=(1,))
def pad_v2(c: Context, x: Node, paddings: np.ndarray, value: Node) -> Node:
    return c.b.pad(x, *_pairs(c, x, paddings), value)


def _edge(c: Context) -> int:
    """1 when the border element itself is not repeated."""
    return 1 if c.attr("mode") == "REFLECT" else 0


@lower("MirrorPad", values=(1,))
def mirror_pad(c: Context, x: Node, paddings: np.ndarray) -> Node:
    edge = _edge(c)
    for a, (low, high) in enumerate(zip(*_pairs(c, x, paddings), strict=True)):
        d = x.shape[a]
        if edge:  # also where nothing is padded
            c.b.require("le", 1, d, f"{c.node.name}: TensorFlow reflects no empty dim")
        before = [c.b.reverse(cut(c, x, a, edge, low), [a])] if low != 0 else []
        after = [c.b.reverse(cut(c, x, a, d - edge - high, high), [a])] if high != 0 else []
        x = c.b.concat([*before, x, *after], a)
    return x


@lower("MirrorPadGrad", values=(1,))
def mirror_pad_grad(c: Context, g: Node, paddings: np.ndarray) -> Node:
    edge = _edge(c)
    for a, (low, high) in enumerate(zip(*_pairs(c, g, paddings), strict=True)):
        d = g.shape[a] - low - high
        out = cut(c, g, a, low, d)
        if low != 0:
            out = c.b.ew("add", out, _placed(c, c.b.reverse(cut(c, g, a, 0, low), [a]), a, edge, d - edge - low))
        if high != 0:
            mirrored = c.b.reverse(cut(c, g, a, low + d, high), [a])
            out = c.b.ew("add", out, _placed(c, mirrored, a, d - edge - high, edge))
        g = out
    return g


def _placed(c: Context, x: Node, axis: int, low: Dim, high: Dim) -> Node:
    """``x`` among zeros along one axis."""
    lows, highs = ([v if i == axis else 0 for i in range(x.rank)] for v in (low, high))
    return c.b.pad(x, lows, highs)


@lower("Tile", values=(1,))
def tile(c: Context, x: Node, multiples: np.ndarray) -> Node:
    times = sizes_of(c, multiples)
    apart: list[Dim] = []
    spread: list[Dim] = []
    for m, d in zip(times, x.shape, strict=True):
        if m == 1:
            apart, spread = [*apart, d], [*spread, d]
        elif d == 1:
            apart, spread = [*apart, 1], [*spread, m]
        else:
            apart, spread = [*apart, 1, d], [*spread, m, d]
    wide = c.b.broadcast_to(c.b.reshape(x, apart), spread)
    return c.b.reshape(wide, [m * d for m, d in zip(times, x.shape, strict=True)])


@lower("BroadcastTo", values=(1,))
def broadcast_to(c: Context, x: Node, target: np.ndarray) -> Node:
    return c.b.broadcast_to(x, sizes_of(c, target, c.static_shape()))


# --- reading by index ------------------------------------------------------------------------------

@lower("Gather")
def gather(c: Context, params: Node, indices: Node) -> Node:
    return c.b.gather(params, indices, 0)


@lower("GatherV2", statics=(2,))
def gather_v2(c: Context, params: Node, indices: Node, axis: np.ndarray) -> Node:
    batch = int(c.attr("batch_dims", 0))
    return c.b.gather(params, indices, c.axis(axis, params.rank), batch + indices.rank if batch < 0 else batch)


def _static_depth(view: GraphView, node: NodeView) -> str | None:
    s = view.shape(node.inputs[1])
    return "the number of index parts is unknown" if not s or s[-1] is None else None


@lower("GatherNd", check=_static_depth)
def gather_nd(c: Context, params: Node, indices: Node) -> Node:
    mode = "zero" if c.attr("bad_indices_policy", "") == "IGNORE" else "error"
    return c.b.gather_nd(params, indices, 0, mode)


@lower("ReverseSequence")
def reverse_sequence(c: Context, x: Node, lengths: Node) -> Node:
    batch, seq = int(c.attr("batch_dim", 0)) % x.rank, int(c.attr("seq_dim")) % x.rank
    perm = [batch, seq, *(i for i in range(x.rank) if i not in (batch, seq))]
    x = c.b.transpose(x, perm)
    steps = c.b.cast(c.b.iota((1, x.shape[1]), 1, "int64"), lengths.dtype)
    last = c.expand(lengths, [1])
    flipped = c.b.ew("sub", c.b.ew("sub", last, c.b.const(1, lengths.dtype)), steps)
    where = c.b.select(c.b.ew("lt", steps, last), flipped, steps)
    out = c.b.gather(x, where, axis=1, batch_dims=1)
    return c.b.transpose(out, [perm.index(i) for i in range(x.rank)])


@lower("OneHot", values=(1,), kinds=INT)
def one_hot(c: Context, indices: Node, depth: np.ndarray, on: Node, off: Node) -> Node:
    axis = int(c.attr("axis", -1))
    axis = indices.rank if axis == -1 else axis
    count = sizes_of(c, depth, (c.static_shape() or ())[axis:axis + 1])[0]
    if DTYPES[indices.dtype].size < 4:
        indices = c.b.cast(indices, "int32")
    steps = c.b.iota((count,), 0, indices.dtype)
    hit = c.b.ew("eq", c.expand(indices, [axis]), c.channel(steps, indices.rank + 1, axis))
    return c.b.select(hit, on, off)


# --- making ----------------------------------------------------------------------------------------

@lower("Fill", values=(0,))
def fill(c: Context, dims: np.ndarray, value: Node) -> Node:
    return c.b.broadcast_to(value, sizes_of(c, dims, c.static_shape()))


@lower("ZerosLike")
def zeros_like(c: Context, x: Node) -> Node:
    return c.full(0, x.shape, x.dtype)


@lower("OnesLike")
def ones_like(c: Context, x: Node) -> Node:
    return c.full(1, x.shape, x.dtype)


def _range_reason(view: GraphView, node: NodeView) -> str | None:
    if not DTYPES[view.dtype((node.name, 0))].is_float:
        return None if view.constant(node.inputs[2]) is not None else "the step of Range is not a constant"
    return None if all(view.constant(r) is not None for r in node.inputs) else "a float Range needs constant operands"


@lower("Range", values=(0, 1), statics=(2,), kinds=INT, check=_range_reason)
def range_(c: Context, start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Node:
    first, last, step = start.reshape(-1)[0], limit.reshape(-1)[0], int(delta.reshape(-1)[0])
    count = range_count(c, first, last, step)
    known = (c.static_shape() or (None,))[0]
    if known is not None:
        count = c.b.same_dim(count, known, f"{c.node.name}: the length")
    out = c.b.iota((count,), 0, c.dtype)
    out = c.b.ew("mul", out, c.b.const(step, c.dtype)) if step != 1 else out
    return out if D.is_static(first) and first == 0 else c.b.ew("add", out, c.dim_scalar(first, c.dtype))


def range_count(c, first: Dim, last: Dim, step: int) -> Dim:
    """Number of elements of range(first, last, step); the range must not run the wrong way."""
    if step == 0:
        raise ZeroDivisionError("the step of a range is 0")
    distance = last - first if step > 0 else first - last
    if D.is_static(distance):
        return max(-(-distance // abs(step)), 0)
    c.b.require("le", 0, distance, f"{c.node.name}: the range runs forward")
    return D.ceildiv(c.b.resolve(distance), abs(step))


@lower("LinSpace", statics=(2,))
def lin_space(c: Context, start: Node, stop: Node, num: np.ndarray) -> Node:
    count = int(num.reshape(-1)[0])
    if count == 1:
        return c.b.reshape(start, (1,))
    steps = c.b.iota((count,), 0, "int32")
    step = c.b.ew("div", c.b.ew("sub", stop, start), c.b.const(count - 1, start.dtype))
    value = c.b.ew("add", start, c.b.ew("mul", step, c.b.cast(steps, start.dtype)))
    return c.b.select(c.b.ew("eq", steps, c.b.const(count - 1, "int32")), stop, value)


# --- blocks ----------------------------------------------------------------------------------------

def _block_layout(view: GraphView, node: NodeView) -> str | None:
    layout = node.attr("data_format", "NHWC")
    return None if layout in ("NHWC", "NCHW") else f"data format {layout} is not supported"


def _part(c: Context, d: Dim, block: int) -> Dim:
    c.b.require("divides", d, block, f"{c.node.name}: the block size divides the dim")
    return D.floordiv(d, block)


@lower("SpaceToDepth", check=_block_layout)
def space_to_depth(c: Context, x: Node) -> Node:
    k = int(c.attr("block_size"))
    if c.attr("data_format", "NHWC") == "NCHW":
        n, ch, h, w = x.shape[0], x.shape[1], _part(c, x.shape[2], k), _part(c, x.shape[3], k)
        x = c.b.transpose(c.b.reshape(x, [n, ch, h, k, w, k]), [0, 3, 5, 1, 2, 4])
        return c.b.reshape(x, [n, ch * (k * k), h, w])
    n, h, w, ch = x.shape[0], _part(c, x.shape[1], k), _part(c, x.shape[2], k), x.shape[3]
    x = c.b.transpose(c.b.reshape(x, [n, h, k, w, k, ch]), [0, 1, 3, 2, 4, 5])
    return c.b.reshape(x, [n, h, w, ch * (k * k)])


@lower("DepthToSpace", check=_block_layout)
def depth_to_space(c: Context, x: Node) -> Node:
    k = int(c.attr("block_size"))
    if c.attr("data_format", "NHWC") == "NCHW":
        n, ch, h, w = x.shape[0], _part(c, x.shape[1], k * k), x.shape[2], x.shape[3]
        x = c.b.transpose(c.b.reshape(x, [n, k, k, ch, h, w]), [0, 3, 4, 1, 5, 2])
        return c.b.reshape(x, [n, ch, h * k, w * k])
    n, h, w, ch = x.shape[0], x.shape[1], x.shape[2], _part(c, x.shape[3], k * k)
    x = c.b.transpose(c.b.reshape(x, [n, h, w, k, k, ch]), [0, 1, 3, 2, 4, 5])
    return c.b.reshape(x, [n, h * k, w * k, ch])


@lower("SpaceToBatchND", values=(2,), statics=(1,))
def space_to_batch(c: Context, x: Node, block: np.ndarray, paddings: np.ndarray) -> Node:
    blocks = [int(k) for k in block.reshape(-1)]
    m, flat = len(blocks), sizes_of(c, paddings)
    tail = [0] * (x.rank - 1 - m)
    x = c.b.pad(x, [0, *flat[::2], *tail], [0, *flat[1::2], *tail], c.b.const(0, x.dtype))
    parts = [_part(c, d, k) for d, k in zip(x.shape[1:], blocks, strict=False)]
    rest = list(x.shape[1 + m:])
    apart = [x.shape[0], *(v for pair in zip(parts, blocks, strict=True) for v in pair), *rest]
    perm = [*(2 + 2 * i for i in range(m)), 0, *(1 + 2 * i for i in range(m)), *range(1 + 2 * m, len(apart))]
    n = x.shape[0] * D.product(blocks)
    return c.b.reshape(c.b.transpose(c.b.reshape(x, apart), perm), [n, *parts, *rest])


@lower("BatchToSpaceND", values=(2,), statics=(1,))
def batch_to_space(c: Context, x: Node, block: np.ndarray, crops: np.ndarray) -> Node:
    blocks = [int(k) for k in block.reshape(-1)]
    m, flat = len(blocks), sizes_of(c, crops)
    n = _part(c, x.shape[0], D.static(D.product(blocks)))
    space, rest = list(x.shape[1:1 + m]), list(x.shape[1 + m:])
    perm = [m, *(v for i in range(m) for v in (m + 1 + i, i)), *range(1 + 2 * m, 1 + 2 * m + len(rest))]
    x = c.b.transpose(c.b.reshape(x, [*blocks, n, *space, *rest]), perm)
    x = c.b.reshape(x, [n, *(d * k for d, k in zip(space, blocks, strict=True)), *rest])
    counts = [d - lo - hi for d, lo, hi in zip(x.shape[1:1 + m], flat[::2], flat[1::2], strict=True)]
    return c.b.slice(x, [0, *flat[::2], *([0] * len(rest))], [n, *counts, *rest])


@lower("SpaceToBatch", values=(1,))
def space_to_batch_2d(c: Context, x: Node, paddings: np.ndarray) -> Node:
    return space_to_batch(c, x, np.full(2, int(c.attr("block_size"))), paddings)


@lower("BatchToSpace", values=(1,))
def batch_to_space_2d(c: Context, x: Node, crops: np.ndarray) -> Node:
    return batch_to_space(c, x, np.full(2, int(c.attr("block_size"))), crops)


# --- matrices --------------------------------------------------------------------------------------

def _row_and_column(c: Context, rows: Dim, columns: Dim) -> tuple[Node, Node]:
    """Index of row and of column of a matrix, to be broadcast."""
    return c.b.iota((rows, 1), 0, "int64"), c.b.iota((1, columns), 1, "int64")


@lower("MatrixBandPart", values=(1, 2))
def matrix_band_part(c: Context, x: Node, lower_: np.ndarray, upper: np.ndarray) -> Node:
    rows, columns = x.shape[-2:]
    row, column = _row_and_column(c, rows, columns)
    below = _band(c, c.b.ew("sub", row, column), lower_.reshape(-1)[0], rows)
    above = _band(c, c.b.ew("sub", column, row), upper.reshape(-1)[0], columns)
    return c.b.select(c.b.ew("bit_and", below, above), x, c.b.const(0, x.dtype))


def _band(c: Context, distance: Node, width: Dim, size: Dim) -> Node:
    """Inside the band; a negative width keeps all, one larger than the dim is an error in TensorFlow."""
    c.b.require("le", width, size, f"{c.node.name}: a band is inside the matrix")
    at = c.dim_scalar(c.b.resolve(width), "int64")
    return c.b.ew("bit_or", c.b.ew("lt", at, c.b.const(0, "int64")), c.b.ew("le", distance, at))


def _main_diagonal(view: GraphView, node: NodeView) -> str | None:
    """V2 and V3 take an offset k; only the main diagonal is expressed."""
    if not node.op.endswith(("V2", "V3")):
        return None
    at = {"MatrixDiagV2": 1, "MatrixDiagV3": 1, "MatrixDiagPartV2": 1, "MatrixDiagPartV3": 1}.get(node.op, 2)
    k = view.constant(node.inputs[at])
    if k is None or np.any(k != 0):
        return "only the main diagonal (k = 0) is supported"
    sizes = [view.constant(r) for r in node.inputs[2:4]] if node.op.startswith("MatrixDiagV") else []
    return "num_rows and num_cols are not supported" if any(s is None or np.any(s != -1) for s in sizes) else None


@lower("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", check=_main_diagonal)
def matrix_diag(c: Context, x: Node, *rest: Node) -> Node:
    row, column = _row_and_column(c, x.shape[-1], x.shape[-1])
    fill_value = rest[3] if len(rest) == 4 else c.b.const(0, x.dtype)
    return c.b.select(c.b.ew("eq", row, column), c.expand(x, [x.rank]), fill_value)


def _static_matrix(view: GraphView, node: NodeView) -> str | None:
    s = view.shape(node.inputs[0])
    if s is None or len(s) < 2 or None in s[-2:]:
        return "the matrix dims are not static"
    return _main_diagonal(view, node)


@lower("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3", check=_static_matrix)
def matrix_diag_part(c: Context, x: Node, *rest: Node) -> Node:
    lead, (rows, columns) = list(x.shape[:-2]), x.shape[-2:]
    flat = c.b.reshape(x, [*lead, rows * columns])
    zeros, length = [0] * len(lead), min(D.static(rows), D.static(columns))
    return c.b.slice(flat, [*zeros, 0], [*lead, length], [*([1] * len(lead)), D.static(columns) + 1])


@lower("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3", check=_static_matrix)
def matrix_set_diag(c: Context, x: Node, diagonal: Node, *rest: Node) -> Node:
    rows, columns = map(D.static, x.shape[-2:])
    row, column = _row_and_column(c, rows, columns)
    along = c.expand(diagonal, [diagonal.rank if rows <= columns else diagonal.rank - 1])
    return c.b.select(c.b.ew("eq", row, column), along, x)


def _static_input(view: GraphView, node: NodeView) -> str | None:
    return "the dims are not static" if None in (view.shape(node.inputs[0]) or (None,)) else None


@lower("Diag", check=_static_input)
def diag(c: Context, x: Node) -> Node:
    flat = c.b.reshape(x, [x.size])
    row, column = _row_and_column(c, x.size, x.size)
    out = c.b.select(c.b.ew("eq", row, column), c.expand(flat, [1]), c.b.const(0, x.dtype))
    return c.b.reshape(out, [*x.shape, *x.shape])


@lower("DiagPart", check=_static_input)
def diag_part(c: Context, x: Node) -> Node:
    half = x.shape[:x.rank // 2]
    n = D.static(D.product(half))
    return c.b.reshape(c.b.slice(c.b.reshape(x, [n * n]), [0], [n], [n + 1]), half)


