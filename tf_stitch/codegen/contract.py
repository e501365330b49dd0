"""What a fold takes at every index of its domain: reductions, products, convolutions and windows alike."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Node, view_source
from ..schedule.labels import dot_operands
from ..schedule.rules import Index
from .folds import Fold, Product
from .text import compute_type
from .values import evaluate, wrap

if TYPE_CHECKING:
    from .emit import StageEmitter


def fold_of(node: Node) -> Fold:
    """The fold that computes a node."""
    kind = {"dot": "sum", "conv": "sum", "conv_filter": "sum"}.get(node.op) or node.attrs["kind"]
    return Fold("sum" if kind == "mean" else kind, node.dtype)


def value(e: StageEmitter, node: Node, index: Index) -> str | Product:
    """The value that ``node``'s fold takes at an index of its domain."""
    if node.op == "reduce":
        return evaluate(e, node.inputs[0], index)
    return {"dot": _dot, "conv": _conv, "conv_filter": _conv_filter, "window": _window}[node.op](e, node, index)


def segment_value(e: StageEmitter, node: Node, index: Index, row: Dim) -> str:
    """What a segment takes of one of its rows, at an index of the result."""
    return evaluate(e, node.inputs[0], (row, *index[1:]))


def finish(e: StageEmitter, node: Node, where: Index, folded: str) -> str:
    """The node's value from what its fold gave; a mean window divides by the places inside the input."""
    if node.op != "window" or node.attrs["kind"] != "mean":
        return folded
    counts = []
    for d, (size, stride, (low, _)) in enumerate(zip(node.attrs["size"], node.attrs["strides"], node.attrs["padding"],
                                                     strict=True)):
        start = where[d + 1] * stride - low
        end = D.dmin(start + size, node.inputs[0].shape[d + 1])
        counts.append(f"({e.dim(end - D.dmax(start, 0))})")
    return f"({folded}) / {compute_type(node.dtype)}({' * '.join(counts)})"


def _product(e: StageEmitter, dtype: str, a: str, b: str) -> str:
    c = compute_type(dtype)
    name = e.fresh("v")
    e.scopes.line(f"const {c} {name} = {wrap('mul', dtype, [a, b]) or f'{a} * {b}'};")
    return name


def factor(node: Node, k: int, index: Index) -> tuple[Node, Index]:
    """Operand ``k`` of a product, and its index for an index of the product's domain."""
    x, labels = dot_operands(node)[k]
    return x, tuple(index[d] for d in labels if d is not None)


def pair(e: StageEmitter, dtype: str, a: str, b: str) -> str | Product:
    """What a sum of products takes."""
    return Product(a, b) if DTYPES[dtype].is_float else _product(e, dtype, a, b)


def _dot(e: StageEmitter, node: Node, index: Index) -> str | Product:
    return pair(e, node.dtype, *(evaluate(e, *factor(node, k, index)) for k in (0, 1)))


def _inside(e: StageEmitter, index: Index, x: Node, starts: list) -> tuple[list[str], Index]:
    """Conditions for spatial positions to lie in ``x``, and variables for them."""
    conditions, place = [], []
    for d, at in enumerate(starts):
        size = x.shape[d + 1]
        if not D.prove_nonneg(at):
            conditions.append(f"{e.dim(at)} >= 0")
        if not D.prove_le(at + 1, size):
            conditions.append(f"{e.dim(at)} < {e.dim(size)}")
        place.append(at)
    return conditions, tuple(place)


def _guarded(e: StageEmitter, dtype: str, start: str, conditions: list[str], make) -> str:
    if not conditions:
        return make()
    name = e.fresh("v")
    e.scopes.line(f"{compute_type(dtype)} {name} = {start};")
    with e.scopes.block(f"if ({' && '.join(conditions)})", conditional=True):
        e.scopes.line(f"{name} = {make()};")
    return name


def _positions(e: StageEmitter, x: Node, place: Index) -> Index:
    """Index variables in range, declared where the conditions hold."""
    return tuple(p if isinstance(p, int) else e.index_variable(e.dim(p), x.shape[d + 1]) for d, p in enumerate(place))


def _conv(e: StageEmitter, node: Node, index: Index) -> str | Product:
    x, filt = node.inputs
    spatial = x.rank - 2
    attrs = node.attrs
    kernel, channel = index[node.rank:node.rank + spatial], index[-1]
    starts = [index[d + 1] * attrs["strides"][d] - attrs["padding"][d][0] + kernel[d] * attrs["dilations"][d]
              for d in range(spatial)]
    conditions, place = _inside(e, index, x, starts)
    out = index[node.rank - 1]
    per_group = filt.shape[-1] // attrs["groups"]
    first = D.floordiv(out, per_group) * filt.shape[-2] if attrs["groups"] > 1 else 0

    def factors(at: Index) -> tuple[str, str]:
        return evaluate(e, x, (index[0], *at, first + channel)), evaluate(e, filt, (*kernel, channel, out))

    def make() -> str:
        return _product(e, node.dtype, *factors(_positions(e, x, place) if conditions else place))

    if DTYPES[node.dtype].is_float and _may_read_ahead(e, x, filt):
        return Product(*factors(_nearest(e, x, place)), " && ".join(conditions))
    return _guarded(e, node.dtype, "0", conditions, make)


def _conv_filter(e: StageEmitter, node: Node, index: Index) -> str:
    x, g = node.inputs
    spatial = x.rank - 2
    attrs = node.attrs
    out, tap, channel = index[0], index[1:1 + spatial], index[node.rank - 1]
    image, place = index[node.rank], index[node.rank + 1:]
    starts = [place[d] * attrs["strides"][d] - attrs["padding"][d][0] + tap[d] * attrs["dilations"][d]
              for d in range(spatial)]
    conditions, pixel = _inside(e, index, x, starts)
    first = D.floordiv(out, g.shape[-1] // attrs["groups"]) * node.shape[-1] if attrs["groups"] > 1 else 0

    def make() -> str:
        at = _positions(e, x, pixel) if conditions else pixel
        a = evaluate(e, x, (image, *at, first + channel))
        return _product(e, node.dtype, a, evaluate(e, g, (image, *place, out)))

    return _guarded(e, node.dtype, "0", conditions, make)


def _may_read_ahead(e: StageEmitter, x: Node, filt: Node) -> bool:
    """True on a GPU where both operands only have to be loaded: without a branch many loads are under way at a time."""
    return (not e.kernel.target.is_host and e.in_memory(view_source(x)) and e.in_memory(view_source(filt))
            and all(D.prove_le(1, size) for size in x.shape[1:-1]))


def _nearest(e: StageEmitter, x: Node, place: Index) -> Index:
    """Index variables for the positions in ``x`` that are nearest to ``place``."""
    found: list[Dim] = []
    for d, p in enumerate(place):
        size = x.shape[d + 1]
        low = e.dim(p) if D.prove_nonneg(p) else f"ts_imax({e.dim(p)}, 0)"
        inside = D.prove_nonneg(p) and D.prove_le(p + 1, size)
        found.append(p if inside else e.index_variable(f"ts_imin({low}, {e.dim(size - 1)})", size))
    return tuple(found)


def _window(e: StageEmitter, node: Node, index: Index) -> str:
    x = node.inputs[0]
    spatial = x.rank - 2
    attrs = node.attrs
    starts = [index[d + 1] * attrs["strides"][d] - attrs["padding"][d][0] + index[node.rank + d]
              for d in range(spatial)]
    conditions, place = _inside(e, index, x, starts)
    start = fold_of(node).start if attrs["kind"] == "max" else "0"
    start = f"{compute_type(node.dtype)}({start})" if not DTYPES[node.dtype].is_float else start

    def make() -> str:
        at = _positions(e, x, place) if conditions else place
        return evaluate(e, x, (index[0], *at, index[node.rank - 1]))

    return _guarded(e, node.dtype, start, conditions, make)
