"""Images: resizing and its gradients, crops, patches, colours."""
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
from .nn import padding_of
from .reduction import mean_over
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
        if c.attr("align_corners", False):
            whole = _half_up(c, at)
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


# --- crops and patches ------------------------------------------------------------------------------

@lower("CropAndResize", values=(3,), kinds=NUM)
def crop_and_resize(c: Context, x: Node, boxes: Node, of_image: Node, size: np.ndarray) -> Node:
    """Boxes (top, left, bottom, right; 0 and 1 are the middles of the outer pixels) of images, at one size."""
    b, (height, width) = c.b, _wanted(c, x, size)
    n = b.same_dim(boxes.shape[0], of_image.shape[0], f"{c.node.name}: an image for every box")
    ends = [b.reshape(b.slice(boxes, (0, k), (n, 1)), (n, 1)) for k in range(4)]
    rows, columns = (_crop_places(c, ends[k], ends[k + 2], x.shape[1 + k], count, k)
                     for k, count in enumerate((height, width)))
    image = b.gather(b.iota((x.shape[0],), 0, "int64"), of_image)  # itself, or the error of what is out of range
    pixels = b.reshape(x, (D.product(x.shape[:3]), x.shape[3]))

    def at(row: str, column: str) -> Node:
        y, z = (b.cast(b.ew(side, v), "int64") for side, v in ((row, rows), (column, columns)))
        line = b.ew("add", b.ew("mul", b.reshape(image, (n, 1, 1)), c.dim_scalar(x.shape[1], "int64")), y)
        place = b.ew("add", b.ew("mul", line, c.dim_scalar(x.shape[2], "int64")), z)
        return b.cast(b.gather(pixels, place, mode="zero"), "float32")

    inside = b.ew("bit_and", *(b.ew("bit_and", b.ew("ge", v, 0.0), b.ew("le", v, c.dim_scalar(d - 1, "float32")))
                               for v, d in ((rows, x.shape[1]), (columns, x.shape[2]))))
    if c.attr("method", "bilinear") == "nearest":
        rows, columns = (_half_up(c, v) for v in (rows, columns))
        found = at("floor", "floor")
    else:
        right, below = (c.expand(b.ew("sub", v, b.ew("floor", v)), [3]) for v in (columns, rows))
        top, bottom = (_mixed(c, at(side, "floor"), at(side, "ceil"), right) for side in ("floor", "ceil"))
        found = _mixed(c, top, bottom, below)
    return b.select(c.expand(inside, [3]), found, float(c.attr("extrapolation_value", 0.0)))


def _crop_places(c: Context, low: Node, high: Node, d: Dim, count: Dim, axis: int) -> Node:
    """Where the pixels of boxes look along an axis of the image, in TensorFlow's order of roundings."""
    b, last = c.b, c.dim_scalar(d - 1, "float32")
    if D.is_static(count) and count == 1:
        places = b.ew("mul", b.ew("mul", b.ew("add", low, high), 0.5), last)
    else:
        c.b.require("le", 2, count, f"{c.node.name}: crops of several pixels")
        step = b.ew("div", b.ew("mul", b.ew("sub", high, low), last), c.dim_scalar(count - 1, "float32"))
        steps = b.cast(b.iota((1, count), 1, "int32"), "float32")
        places = b.ew("add", b.ew("mul", low, last), b.ew("mul", steps, step))
    return c.expand(places, [2 - axis])


def _half_up(c: Context, x: Node) -> Node:
    """What is not negative, to the nearest number; adding 1/2 first would round 0.49999997 up."""
    whole = c.b.ew("floor", x)
    return c.b.select(c.b.ew("ge", c.b.ew("sub", x, whole), 0.5), c.b.ew("add", whole, 1.0), whole)


def _mixed(c: Context, x: Node, y: Node, share: Node) -> Node:
    return c.b.ew("add", x, c.b.ew("mul", c.b.ew("sub", y, x), share))


@lower("ExtractImagePatches")
def extract_patches(c: Context, x: Node) -> Node:
    """The pixels under a window at each of its places, one behind the other."""
    size, strides, rates = ([int(v) for v in c.attr(name)][1:3] for name in ("ksizes", "strides", "rates"))
    spans = [(k - 1) * r + 1 for k, r in zip(size, rates, strict=True)]
    padding = padding_of(c, x.shape[1:3], spans, strides)
    x = c.b.pad(x, [0, *(low for low, _ in padding), 0], [0, *(high for _, high in padding), 0])
    counts: list[Dim] = []
    for axis, (k, s, r, span) in enumerate(zip(size, strides, rates, spans, strict=True)):
        c.b.require("le", span, x.shape[1 + 2 * axis], f"{c.node.name}: a window fits into the image")
        counts.append(D.floordiv(c.b.resolve(x.shape[1 + 2 * axis]) - span, s) + 1)
        first, within = c.b.iota((counts[-1], 1), 0, "int32"), c.b.iota((1, k), 1, "int32")
        places = c.b.ew("add", c.b.ew("mul", first, s), c.b.ew("mul", within, r))
        x = c.b.gather(x, places, 1 + 2 * axis, mode="clip")
    x = c.b.transpose(x, [0, 1, 3, 2, 4, 5])
    return c.b.reshape(x, [x.shape[0], *counts, size[0] * size[1] * x.shape[5]])


# --- colours ---------------------------------------------------------------------------------------

def _split_colours(c: Context, x: Node) -> list[Node]:
    """Three channels, each [..., 1]."""
    c.b.same_dim(x.shape[-1], 3, f"{c.node.name}: three channels")
    lead = list(x.shape[:-1])
    return [c.b.slice(x, [0] * len(lead) + [k], [*lead, 1]) for k in range(3)]


@lower("RGBToHSV", kinds=FLOAT)
def rgb_to_hsv(c: Context, x: Node) -> Node:
    b, (red, green, blue) = c.b, _split_colours(c, x)
    value, least = (b.ew(kind, b.ew(kind, red, green), blue) for kind in ("max", "min"))
    spread = b.ew("sub", value, least)
    saturation = b.select(b.ew("gt", value, 0.0), b.ew("div", spread, value), b.const(0, x.dtype))
    norm = b.ew("mul", b.ew("div", 1.0, spread), _share(c, x, 1))
    from_red, from_green, from_blue = (b.ew("mul", norm, b.ew("sub", p, q))
                                       for p, q in ((green, blue), (blue, red), (red, green)))
    hue = b.select(b.ew("eq", green, value), b.ew("add", from_green, _share(c, x, 2)),
                   b.ew("add", from_blue, _share(c, x, 4)))
    hue = b.select(b.ew("eq", red, value), from_red, hue)
    hue = b.select(b.ew("gt", spread, 0.0), hue, b.const(0, x.dtype))
    return b.concat([b.select(b.ew("lt", hue, 0.0), b.ew("add", hue, 1.0), hue), saturation, value], x.rank - 1)


def _share(c: Context, x: Node, sixths: int) -> Node:
    """So many sixths, rounded as a division in the type of ``x`` is."""
    return c.b.ew("div", c.b.const(sixths, x.dtype), c.b.const(6, x.dtype))


@lower("HSVToRGB", kinds=FLOAT)
def hsv_to_rgb(c: Context, x: Node) -> Node:
    b, (hue, saturation, value) = c.b, _split_colours(c, x)
    hue, grey = b.ew("mul", hue, 6.0), b.ew("sub", 1.0, saturation)
    away = [b.ew("abs", b.ew("sub", hue, middle)) for middle in (3.0, 2.0, 4.0)]
    shares = [b.ew("sub", away[0], 1.0), *(b.ew("sub", 2.0, d) for d in away[1:])]
    shares = [b.ew("min", b.ew("max", s, 0.0), 1.0) for s in shares]
    return b.concat([b.ew("mul", b.ew("add", grey, b.ew("mul", saturation, s)), value) for s in shares], x.rank - 1)


@lower("AdjustContrastv2", kinds=FLOAT)
def adjust_contrast(c: Context, x: Node, factor: Node) -> Node:
    """The distance of each pixel from its channel's mean over the image, times a factor."""
    wide = c.wide(x)
    mean = mean_over(c, wide, (x.rank - 3, x.rank - 2), True)
    factor = c.b.reshape(c.like(factor, wide.dtype), ())
    return c.like(c.b.ew("add", c.b.ew("mul", c.b.ew("sub", wide, mean), factor), mean), x.dtype)


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
