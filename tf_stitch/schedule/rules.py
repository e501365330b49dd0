"""The propagation rules: one per primitive.

Each rule answers three questions about a node:

* *boxes*: given the box of the result that a block needs, which box of each operand it needs (bounds
  inference as in Halide, Ragan-Kelley et al., PLDI 2013, section 4.2);
* *index*: given an index of the result, which index of a view's operand it reads;
* *ties*: which result dims are the same axis as which operand dims, so that a split of one is the same
  split of the other (what FusionStitching calls propagating a schedule, arXiv 1811.05213, section 4).

A box is one ``(offset, extent)`` pair per dim; both are Dims over the block's symbols.  Boxes may be larger
than needed, never smaller.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from ..errors import Unschedulable
from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Node, Shape
from ..ir.ops import OPS

Span = tuple[Dim, Dim]  # offset, extent
Box = tuple[Span, ...]
Index = tuple[Dim, ...]
Tie = tuple[int, int, int]  # operand number, operand dim, result dim


def full(shape: Shape) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, d) for d in shape)


def is_full(span: Span, size: Dim) -> bool:
    """True when a span is provably the whole dim."""
    return span == (0, size)


def union(a: Box, b: Box, shape: Shape) -> Box:
    """A box that covers both; a dim whose hull cannot be proven becomes the whole dim."""
    return tuple(_hull(x, y, size) for x, y, size in zip(a, b, shape, strict=True))


def _hull(a: Span, b: Span, size: Dim) -> Span:
    if a == b:
        return a
    for x, y in ((a, b), (b, a)):
        if D.prove_le(x[0], y[0]) and D.prove_le(y[0] + y[1], x[0] + x[1]):
            return x
    off = D.dmin(a[0], b[0])
    if off in (a[0], b[0]) and D.prove_nonneg(a[1]) and D.prove_nonneg(b[1]):
        end = D.dmax(a[0] + a[1], b[0] + b[1])
        if end in (a[0] + a[1], b[0] + b[1]):
            return off, end - off
    return 0, size


# --- reshape ---------------------------------------------------------------------------------------

Factor = tuple[range, range]  # dims of the first shape, dims of the second shape


@functools.lru_cache(maxsize=1 << 12)
def factor(a: Shape, b: Shape) -> Sequence[Factor]:
    """Cuts two shapes of equal size into the shortest runs of dims whose products are equal."""
    out: list[Factor] = []
    i = j = 0
    while i < len(a) and j < len(b):
        i0, j0, pa, pb = i, j, a[i], b[j]
        i, j = i + 1, j + 1
        while pa != pb and (i < len(a) or j < len(b)):
            grow_a = i < len(a) and (j == len(b) or _divides(pa, pb))
            if grow_a:
                pa, i = pa * a[i], i + 1
            else:
                pb, j = pb * b[j], j + 1
        out.append((range(i0, i), range(j0, j)))
    if i < len(a) or j < len(b):  # what is left has size 1
        last = out.pop() if out else (range(0), range(0))
        out.append((range(last[0].start, len(a)), range(last[1].start, len(b))))
    return out


def _divides(p: Dim, q: Dim) -> bool:
    return p == 1 or (p != 0 and q != 0 and (p, q) != (q, p) and D.mod(q, p) == 0)


def _interval(box: Box, shape: Shape) -> Span | None:
    """The linear interval that a box covers when it is contiguous."""
    start: Dim = 0
    length: Dim = 1
    open_dim = False
    for (off, ext), size in zip(box, shape, strict=True):
        start = start * size + off
        if not open_dim and ext == 1:
            continue
        if not open_dim:
            length, open_dim = ext, True
        elif is_full((off, ext), size):
            length = length * size
        else:
            return None
    return start, length


def _from_interval(start: Dim, length: Dim, shape: Shape) -> Box:
    """The box of a shape that covers a linear interval; the whole shape when that is all that is known."""
    for k, size in enumerate(shape):
        rest = D.product(shape[k + 1:])
        if rest == 0:
            break
        if D.mod(start, rest) != 0 or D.mod(length, rest) != 0:
            continue
        first, many = D.floordiv(start, rest), D.floordiv(length, rest)
        if k == 0:
            return ((first, many), *full(shape[1:]))
        off = D.mod(first, size)
        stays = D.prove_le(off + many, size) or (D.mod(size, many) == 0 and D.mod(first, many) == 0)
        if many == 0 or not stays:  # it may cross into the next row of dim k - 1
            continue
        lead: list[Span] = []
        up = D.floordiv(first, size)
        for d in reversed(shape[1:k]):
            lead.insert(0, (D.mod(up, d), 1))
            up = D.floordiv(up, d)
        return ((up, 1), *lead, (off, many), *full(shape[k + 1:]))
    return full(shape)


def _reshape_box(node: Node, box: Box) -> list[Box]:
    source = node.inputs[0].shape
    if D.product(source) == 0:
        return [full(source)]
    out: list[Span] = []
    for here, there in factor(node.shape, source):
        part = tuple(box[d] for d in here)
        sizes = tuple(node.shape[d] for d in here)
        target = tuple(source[d] for d in there)
        if len(here) == len(there) == 1:
            out.extend(part)
            continue
        interval = None if part == full(sizes) else _interval(part, sizes)
        out.extend(_from_interval(*interval, target) if interval else full(target))
    return [tuple(out)]


def linear(index: Sequence[Dim], shape: Shape) -> Dim:
    """The row-major position of an index."""
    total: Dim = 0
    for i, size in zip(index, shape, strict=True):
        total = total * size + i
    return total


def delinear(position: Dim, shape: Shape) -> Index:
    """The index of a row-major position."""
    out: list[Dim] = []
    for k, size in reversed(list(enumerate(shape))):
        out.insert(0, position if k == 0 else D.mod(position, size))
        if k:
            position = D.floordiv(position, size)
    return tuple(out)


def _reshape_index(node: Node, index: Index) -> Index:
    source = node.inputs[0].shape
    out: list[Dim] = [0] * len(source)
    if D.product(source) == 0:
        return tuple(out)  # nothing is read
    for here, there in factor(node.shape, source):
        position = linear([index[d] for d in here], tuple(node.shape[d] for d in here))
        for d, i in zip(there, delinear(position, tuple(source[d] for d in there)), strict=True):
            out[d] = i
    return tuple(out)


# --- structural boxes ------------------------------------------------------------------------------

def _clip(off: Dim, ext: Dim, size: Dim) -> Span:
    start = D.dmin(D.dmax(off, 0), size)
    return start, D.dmin(D.dmax(off + ext, 0), size) - start


def _slice_box(node: Node, box: Box) -> list[Box]:
    return [tuple((o * st + s, (e - 1) * st + 1) for (o, e), s, st in
                  zip(box, node.attrs["starts"], node.attrs["steps"], strict=True))]


def _reverse_box(node: Node, box: Box) -> list[Box]:
    axes = node.attrs["axes"]
    return [tuple((size - o - e, e) if d in axes else (o, e)
                  for d, ((o, e), size) in enumerate(zip(box, node.shape, strict=True)))]


def _pad_box(node: Node, box: Box) -> list[Box]:
    out: list[Span] = []
    for d, size in enumerate(node.inputs[0].shape):
        low, inner = node.attrs["low"][d], node.attrs["interior"][d]
        if inner or (is_full(box[d], node.shape[d]) and size != node.shape[d]):
            out.append((0, size))
        elif size == node.shape[d] and low == 0:
            out.append(box[d])
        else:
            out.append(_clip(box[d][0] - low, box[d][1], size))
    return [tuple(out), ()]


def concat_starts(node: Node) -> tuple[Dim, ...]:
    """Where each operand of a concat begins along its axis."""
    found = node.derived.get("starts")
    if found is None:
        sizes = [x.shape[node.attrs["axis"]] for x in node.inputs]
        found = node.derived["starts"] = tuple(itertools.accumulate(sizes[:-1], initial=0))
    return found


def concat_box(node: Node, operand: int, box: Box) -> Box:
    """What a box of a concat reads of one operand."""
    axis = node.attrs["axis"]
    size = node.inputs[operand].shape[axis]
    whole = is_full(box[axis], node.shape[axis])
    span = (0, size) if whole else _clip(box[axis][0] - concat_starts(node)[operand], box[axis][1], size)
    return (*box[:axis], span, *box[axis + 1:])


def _concat_box(node: Node, box: Box) -> list[Box]:
    return [concat_box(node, k, box) for k in range(len(node.inputs))]


def _gather_box(node: Node, box: Box) -> list[Box]:
    params, indices = node.inputs
    axis, batch = node.attrs["axis"], node.attrs["batch_dims"]
    middle = indices.rank - batch
    params_box = (*box[:axis], (0, params.shape[axis]), *box[axis + middle:])
    return [params_box, (*box[:batch], *box[axis:axis + middle])]


def _gather_nd_box(node: Node, box: Box) -> list[Box]:
    params, indices = node.inputs
    batch = node.attrs["batch_dims"]
    depth = indices.shape[-1]
    lead = indices.rank - 1
    params_box = (*box[:batch], *full(params.shape[batch:batch + depth]), *box[lead:])
    return [params_box, (*box[:lead], (0, depth))]


def _order_box(node: Node, box: Box) -> list[Box]:
    return [(*box[:-1], (0, node.shape[-1]))]


def _search_box(node: Node, box: Box) -> list[Box]:
    batch = node.attrs["batch_dims"]
    return [(*box[:batch], (0, node.inputs[0].shape[-1])), box]


def _segment_box(node: Node, box: Box) -> list[Box]:
    x = node.inputs[0]
    return [((0, x.shape[0]), *box[1:]), ((box[0][0], box[0][1] + 1),)]


def _reduce_box(node: Node, box: Box) -> list[Box]:
    source, axes = node.inputs[0].shape, reduced_axes(node)
    kept = iter(box)
    return [tuple((0, size) if d in axes else next(kept) for d, size in enumerate(source))]


def reduced_axes(node: Node) -> tuple[int, ...]:
    """The operand axes that a reduce or arg_reduce folds."""
    return node.attrs["axes"] if node.op == "reduce" else (node.attrs["axis"],)


def _scan_box(node: Node, box: Box) -> list[Box]:
    axis = node.attrs["axis"]
    return [tuple((0, node.shape[d]) if d == axis else span for d, span in enumerate(box))]


def dot_axes(node: Node) -> tuple[list[int], list[int]]:
    """Free axes of both operands of a dot, in operand order."""
    lhs, rhs = node.inputs
    (lb, rb), (lc, rc) = node.attrs["batch"], node.attrs["contract"]
    return ([a for a in range(lhs.rank) if a not in (*lb, *lc)], [a for a in range(rhs.rank) if a not in (*rb, *rc)])


def _dot_box(node: Node, box: Box) -> list[Box]:
    (lb, rb), (lc, rc) = node.attrs["batch"], node.attrs["contract"]
    lfree, rfree = dot_axes(node)
    n = len(lb)
    out = []
    for x, batch, contract, free, first in ((node.inputs[0], lb, lc, lfree, n),
                                            (node.inputs[1], rb, rc, rfree, n + len(lfree))):
        spans: list[Span] = [(0, 1)] * x.rank
        for k, a in enumerate(batch):
            spans[a] = box[k]
        for k, a in enumerate(free):
            spans[a] = box[first + k]
        for a in contract:
            spans[a] = (0, x.shape[a])
        out.append(tuple(spans))
    return out


def _conv_box(node: Node, box: Box) -> list[Box]:
    x, filt = node.inputs
    return [(box[0], *full(x.shape[1:])), (*full(filt.shape[:-1]), box[-1])]


def _conv_filter_box(node: Node, box: Box) -> list[Box]:
    x, g = node.inputs
    return [full(x.shape), (*full(g.shape[:-1]), box[0])]


def _window_box(node: Node, box: Box) -> list[Box]:
    return [(box[0], *full(node.inputs[0].shape[1:-1]), box[-1])]


def _same_box(node: Node, box: Box) -> list[Box]:
    return [box for _ in node.inputs]


def computed_box(node: Node, box: Box) -> Box:
    """The box that is computed when ``box`` is needed: a scan runs along its whole axis."""
    return _scan_box(node, box)[0] if node.op == "scan" else box


def _no_box(node: Node, box: Box) -> list[Box]:
    return []


_BOXES: dict[str, Callable[[Node, Box], list[Box]]] = {
    "param": _no_box, "const": _no_box, "shape_value": _no_box, "iota": _no_box,
    "cast": _same_box, "bitcast": _same_box, "select": _same_box,
    "broadcast": lambda n, b: [tuple(b[a] for a in n.attrs["axes"])],
    "transpose": lambda n, b: [tuple(b[n.attrs["perm"].index(d)] for d in range(n.rank))],
    "reshape": _reshape_box, "slice": _slice_box, "reverse": _reverse_box, "pad": _pad_box, "concat": _concat_box,
    "gather": _gather_box, "gather_nd": _gather_nd_box, "order": _order_box, "search": _search_box,
    "segment": _segment_box, "reduce": _reduce_box, "arg_reduce": _reduce_box,
    "scan": _scan_box, "dot": _dot_box, "conv": _conv_box, "conv_filter": _conv_filter_box,
    "window": _window_box,
}


def operand_boxes(node: Node, box: Box) -> list[Box]:
    """For each operand of ``node``, the box that computing ``box`` of its result reads.

    Raises Unschedulable for a primitive that has no rule.
    """
    rule = _BOXES.get(node.op) or (_same_box if OPS[node.op].elementwise else None)
    if rule is None:
        raise Unschedulable(f"Op '{node.op}' of {node.origin or node} has no schedule rule; leave it out of the group.")
    return rule(node, box)


# --- views: an index of the result to the index of the one operand ---------------------------------

VIEWS: dict[str, Callable[[Node, Index], Index]] = {
    "broadcast": lambda n, i: tuple(i[a] for a in n.attrs["axes"]),
    "transpose": lambda n, i: tuple(i[n.attrs["perm"].index(d)] for d in range(n.rank)),
    "reshape": _reshape_index,
    "slice": lambda n, i: tuple(x * st + s for x, s, st in zip(i, n.attrs["starts"], n.attrs["steps"], strict=True)),
    "reverse": lambda n, i: tuple(size - 1 - x if d in n.attrs["axes"] else x
                                  for d, (x, size) in enumerate(zip(i, n.shape, strict=True))),
}


# --- ties ------------------------------------------------------------------------------------------

def _pointwise_ties(node: Node) -> list[Tie]:
    return [(k, d, d) for k, x in enumerate(node.inputs) if x.rank == node.rank for d in range(node.rank)]


def _unchanged_ties(node: Node) -> list[Tie]:
    """Dims that a slice, pad, concat, reverse or scan leaves alone."""
    def same(d: int, x: Node) -> bool:
        attrs = node.attrs
        if node.op == "slice":
            return attrs["starts"][d] == 0 and attrs["steps"][d] == 1 and x.shape[d] == node.shape[d]
        if node.op == "pad":
            return attrs["low"][d] == 0 and attrs["high"][d] == 0 and attrs["interior"][d] == 0
        if node.op == "reverse":
            return d not in attrs["axes"]
        return d != attrs["axis"]

    return [(k, d, d) for k, x in enumerate(node.inputs) if x.rank == node.rank and node.rank
            for d in range(node.rank) if same(d, x)]


def _reduce_ties(node: Node) -> list[Tie]:
    kept = [d for d in range(node.inputs[0].rank) if d not in reduced_axes(node)]
    return [(0, d, r) for r, d in enumerate(kept)]


def _reshape_ties(node: Node) -> list[Tie]:
    if D.product(node.shape) == 0:
        return []
    return [(0, there[0], here[0]) for here, there in factor(node.shape, node.inputs[0].shape)
            if len(here) == len(there) == 1]


def _gather_ties(node: Node) -> list[Tie]:
    params, indices = node.inputs
    axis, batch = node.attrs["axis"], node.attrs["batch_dims"]
    middle = indices.rank - batch
    ties = [(0, d, d) for d in range(axis)]
    ties += [(0, d, d - 1 + middle) for d in range(axis + 1, params.rank)]
    ties += [(1, d, d) for d in range(batch)]
    return ties + [(1, d, axis + d - batch) for d in range(batch, indices.rank)]


def _gather_nd_ties(node: Node) -> list[Tie]:
    params, indices = node.inputs
    batch, depth, lead = node.attrs["batch_dims"], D.static(indices.shape[-1]), indices.rank - 1
    ties = [(1, d, d) for d in range(lead)] + [(0, d, d) for d in range(batch)]
    return ties + [(0, d, d - batch - depth + lead) for d in range(batch + depth, params.rank)]


def _search_ties(node: Node) -> list[Tie]:
    return [(0, d, d) for d in range(node.attrs["batch_dims"])] + [(1, d, d) for d in range(node.rank)]


def _dot_ties(node: Node) -> list[Tie]:
    (lb, rb), _ = node.attrs["batch"], node.attrs["contract"]
    lfree, rfree = dot_axes(node)
    n = len(lb)
    return ([(0, a, k) for k, a in enumerate(lb)] + [(1, a, k) for k, a in enumerate(rb)]
            + [(0, a, n + k) for k, a in enumerate(lfree)] + [(1, a, n + len(lfree) + k) for k, a in enumerate(rfree)])


def _conv_ties(node: Node) -> list[Tie]:
    x, w = node.inputs
    ties = [(0, 0, 0), (1, w.rank - 1, node.rank - 1)]
    depthwise = node.attrs["groups"] == x.shape[-1] == node.shape[-1]
    return [*ties, (0, x.rank - 1, node.rank - 1)] if depthwise else ties


_TIES: dict[str, Callable[[Node], list[Tie]]] = {
    "broadcast": lambda n: [(0, d, a) for d, a in enumerate(n.attrs["axes"])],
    "transpose": lambda n: [(0, p, d) for d, p in enumerate(n.attrs["perm"])],
    "reshape": _reshape_ties, "slice": _unchanged_ties, "reverse": _unchanged_ties, "pad": _unchanged_ties,
    "concat": _unchanged_ties, "scan": _unchanged_ties, "gather": _gather_ties, "gather_nd": _gather_nd_ties,
    "order": lambda n: [(0, d, d) for d in range(n.rank - 1)], "search": _search_ties,
    "segment": lambda n: [(0, d, d) for d in range(1, n.rank)],
    "reduce": _reduce_ties, "arg_reduce": _reduce_ties, "dot": _dot_ties,
    "conv": _conv_ties, "conv_filter": lambda n: [(1, n.rank - 1, 0)],
    "window": lambda n: [(0, 0, 0), (0, n.rank - 1, n.rank - 1)],
}


def ties(node: Node) -> Sequence[Tie]:
    """Result dims that are the same axis (same size, same index) as an operand's dim."""
    found = node.derived.get("ties")
    if found is None:
        found = node.derived["ties"] = _TIES.get(node.op, _pointwise_ties)(node)
    return found
