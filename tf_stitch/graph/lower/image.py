"""Images: resizing, and its gradients."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import GraphView, NodeView
from .array import sizes_of
from .context import Context
from .registry import FLOAT, NUM, lower

IMAGE_AXES = (1, 2)  # of [batch, height, width, channels]
LONGEST = 1 << 9  # pixels of a side: their places are tables in the text of kernels


def _places(c: Context, x: Node, axis: int, count: Dim, shift: float) -> Node:
    """Where along an axis of ``x`` each of ``count`` results looks, as float32: (i + 1/2) * scale - ``shift`` where
    pixels have their place in the middle, else i * scale.
    """
    b = c.b
    steps = b.cast(b.iota((count,), 0, "int32"), "float32")
    scale = _scale(c, x.shape[axis], count)
    if c.attr("half_pixel_centers", False):
        return b.ew("sub", b.ew("mul", b.ew("add", steps, 0.5), scale), shift)
    return b.ew("mul", steps, scale)


def _scale(c: Context, old: Dim, new: Dim) -> Node:
    """Pixels of the image per pixel of the result, rounded once, as TensorFlow does."""
    corners = bool(c.attr("align_corners", False))
    if D.is_static(old) and D.is_static(new):
        apart = int(corners and new > 1)
        return c.b.const(np.float32(int(old) - apart) / np.float32(int(new) - apart), "float32")
    a, b = (c.dim_scalar(d, "float32") for d in (old, new))
    plain = c.b.ew("div", a, b)
    if not corners:
        return plain
    return c.b.select(c.b.ew("gt", b, 1.0), c.b.ew("div", c.b.ew("sub", a, 1.0), c.b.ew("sub", b, 1.0)), plain)


def _wanted(c: Context, x: Node, size: np.ndarray) -> list[Dim]:
    """The height and width asked for; an image must have pixels to look at."""
    for axis in IMAGE_AXES:
        c.b.require("le", 1, x.shape[axis], f"{c.node.name}: the image has pixels")
    wanted = sizes_of(c, size, (c.static_shape() or ())[1:3])
    for d in wanted:
        c.b.require("le", 1, d, f"{c.node.name}: the result has pixels")
    return wanted


@lower("ResizeNearestNeighbor", values=(1,), kinds=NUM)
def resize_nearest(c: Context, x: Node, size: np.ndarray) -> Node:
    for axis, count in zip(IMAGE_AXES, _wanted(c, x, size), strict=True):
        at = _places(c, x, axis, count, 0.0)
        whole = c.b.ew("floor", at)
        if c.attr("align_corners", False):  # half away from zero; adding 1/2 first would round 0.49999997 up
            whole = c.b.select(c.b.ew("ge", c.b.ew("sub", at, whole), 0.5), c.b.ew("add", whole, 1.0), whole)
        x = c.b.gather(x, c.b.cast(whole, "int32"), axis, mode="clip")
    return x


@lower("ResizeBilinear", values=(1,), kinds=NUM)
def resize_bilinear(c: Context, x: Node, size: np.ndarray) -> Node:
    """TensorFlow's order of sums, columns first; an image that keeps its size is copied, infinities too."""
    counts = _wanted(c, x, size)
    x = c.b.cast(x, "float32")
    pairs = [(x.shape[axis], count) for axis, count in zip(IMAGE_AXES, counts, strict=True)]
    if all(old == new for old, new in pairs):
        return x
    at = [_places(c, x, axis, count, 0.5) for axis, count in zip(IMAGE_AXES, counts, strict=True)]
    (a, b), (p, q) = (_neighbours(c, row, 2, at[1]) for row in _neighbours(c, x, 1, at[0]))
    mixed = _between(c, _between(c, a, b, at[1], 2), _between(c, p, q, at[1], 2), at[0], 1)
    if any(D.is_static(new - old) and new != old for old, new in pairs):  # they differ by a number: never equal
        return mixed
    same = [c.b.ew("eq", c.dim_scalar(old, "int64"), c.dim_scalar(new, "int64")) for old, new in pairs]
    return c.b.select(c.b.ew("bit_and", *same), a, mixed)


def _neighbours(c: Context, x: Node, axis: int, at: Node) -> list[Node]:
    """The elements on both sides of each place."""
    sides = (c.b.cast(c.b.ew(side, at), "int32") for side in ("floor", "ceil"))
    return [c.b.gather(x, side, axis, mode="clip") for side in sides]


def _between(c: Context, x: Node, y: Node, at: Node, axis: int) -> Node:
    share = c.channel(c.b.ew("sub", at, c.b.ew("floor", at)), 4, axis)
    return c.b.ew("add", x, c.b.ew("mul", c.b.ew("sub", y, x), share))


# --- gradients -------------------------------------------------------------------------------------

def _static_sides(view: GraphView, node: NodeView) -> str | None:
    for shape in (view.shape(node.inputs[0]), view.shape((node.name, 0))):
        sides = (shape or (None,) * 4)[1:3]
        if None in sides or not all(0 < d <= LONGEST for d in sides if d is not None):
            return f"the sides of an image are unknown, empty or longer than {LONGEST}"
    return None


def _static_places(c: Context, old: int, new: int, shift: float) -> np.ndarray:
    """As :func:`_places`, of known sizes."""
    apart = int(bool(c.attr("align_corners", False)) and new > 1)
    scale, steps = np.float32(old - apart) / np.float32(new - apart), np.arange(new, dtype=np.float32)
    if c.attr("half_pixel_centers", False):
        return (steps + np.float32(0.5)) * scale - np.float32(shift)
    return steps * scale


def _collected(c: Context, g: Node, axis: int, size: int, sides: Sequence[tuple[np.ndarray, np.ndarray]]) -> Node:
    """What each of ``size`` pixels along an axis gave to the pixels of ``g``, whose ``sides`` say at which pixel each
    of them looked and with which weight: no two threads add to one place."""
    given = [(int(min(max(place, 0), size - 1)), j, weight) for places, weights in sides
             for j, (place, weight) in enumerate(zip(places, weights, strict=True)) if weight]
    takers: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    for pixel, j, weight in sorted(given):
        takers[pixel].append((j, weight))
    most = max(map(len, takers))
    at, share = np.full((size, most), -1, np.int32), np.zeros((size, most), DTYPES[g.dtype].numpy)
    for pixel, row in enumerate(takers):
        for k, (j, weight) in enumerate(row):
            at[pixel, k], share[pixel, k] = j, weight
    seen = c.b.gather(g, c.b.const(at), axis, mode="zero")
    weights = c.b.reshape(c.b.const(share), [size, most, *(1,) * (seen.rank - axis - 2)])
    return c.b.reduce("sum", c.b.ew("mul", seen, weights), (axis + 1,))


@lower("ResizeNearestNeighborGrad", values=(1,), kinds=FLOAT, check=_static_sides)
def resize_nearest_grad(c: Context, g: Node, size: np.ndarray) -> Node:
    out = c.wide(g)
    wanted = sizes_of(c, size, (c.static_shape() or ())[1:3])
    for axis, old in zip(IMAGE_AXES, map(D.static, wanted), strict=True):
        places = _static_places(c, old, D.static(g.shape[axis]), 0.0)
        whole = np.floor(places)
        whole = np.where(places - whole >= 0.5, whole + 1, whole) if c.attr("align_corners", False) else whole
        out = _collected(c, out, axis, old, [(whole, np.ones_like(whole))])
    return c.like(out, g.dtype)


@lower("ResizeBilinearGrad", kinds=FLOAT, check=_static_sides)
def resize_bilinear_grad(c: Context, g: Node, x: Node) -> Node:
    out = c.wide(g)
    for axis in IMAGE_AXES:
        places = _static_places(c, D.static(x.shape[axis]), D.static(g.shape[axis]), 0.5)
        share = places - np.floor(places)
        out = _collected(c, out, axis, D.static(x.shape[axis]),
                         [(np.floor(places), 1 - share), (np.ceil(places), share)])
    return c.like(out, c.dtype)
