"""Gradients of convolutions by their filters, and of pools.

A pool's gradient is gathered: an element of the image asks the few windows that hold it for what they give back.  No
two threads write to one place, so that results are the same in every run.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ...ir.structural import window_dim
from ..view import GraphView, NodeView
from .array import sizes_of
from .context import Context
from .nn import channels_first, channels_last, last_order, layout_reason, padding_of, plain_pool, spatial, with_padding
from .registry import FLOAT, INT, lower

# --- convolutions ----------------------------------------------------------------------------------


def _static_result(view: GraphView, node: NodeView) -> str | None:
    if None in (view.shape((node.name, 0)) or (None,)):
        return "the filter's shape is not static"
    return layout_reason(node)


def _filter_gradient(c: Context, x: Node, g: Node, size: Sequence[int], depth: int, channels: int) -> Node:
    """[*size, depth, channels] of images and what comes back, channels last; images have groups of ``depth``."""
    why = f"{c.node.name}: the channels are those of the filter"
    x = _with_channels(c, x, x.shape[-1] if D.is_static(x.shape[-1]) else depth, why)
    g = _with_channels(c, g, channels, why)
    strides, dilations = spatial(c, "strides", x.rank), spatial(c, "dilations", x.rank)
    groups = D.static(x.shape[-1]) // depth if depth else 1
    window = [(k - 1) * d + 1 for k, d in zip(size, dilations, strict=True)]
    x, padding = with_padding(c, x, padding_of(c, x.shape[1:-1], window, strides))
    out = c.b.conv_filter(x, g, size, strides, padding, dilations, groups)
    return c.b.transpose(out, [*range(1, out.rank), 0])


@lower("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", values=(1,), kinds=FLOAT, check=_static_result)
def filter_gradient(c: Context, x: Node, sizes: np.ndarray, g: Node) -> Node:
    *size, depth, channels = _static_sizes(c, sizes)
    return _filter_gradient(c, channels_last(c, x), channels_last(c, g), size, depth, channels)


@lower("DepthwiseConv2dNativeBackpropFilter", values=(1,), kinds=FLOAT, check=_static_result)
def depthwise_filter_gradient(c: Context, x: Node, sizes: np.ndarray, g: Node) -> Node:
    *size, channels, multiplier = _static_sizes(c, sizes)
    x = _with_channels(c, channels_last(c, x), channels, f"{c.node.name}: the image's channels are the filter's")
    out = _filter_gradient(c, x, channels_last(c, g), size, 1, channels * multiplier)
    return c.b.reshape(out, [*size, channels, multiplier])


def _with_channels(c: Context, x: Node, channels: Dim, why: str) -> Node:
    return c.b.reshape(x, [*x.shape[:-1], c.b.same_dim(x.shape[-1], channels, why)])


def _static_sizes(c: Context, sizes: np.ndarray) -> list[int]:
    return [D.static(d) for d in sizes_of(c, sizes, c.static_shape())]


# --- pools -----------------------------------------------------------------------------------------

def _is_average(view: GraphView, node: NodeView) -> str | None:
    if not DTYPES[view.dtype((node.name, 0))].is_float:
        return "a mean of integers is not supported"
    return plain_pool(view, node)


@lower("AvgPoolGrad", "AvgPool3DGrad", values=(0,), kinds=INT, check=_is_average)
def average_pool_grad(c: Context, sizes: np.ndarray, g: Node) -> Node:
    """Each window gives every element of the image in it the same share."""
    g = channels_last(c, g)
    shape = _image_shape(c, sizes, g)
    pool = _Pool(c, shape[1:-1], g)
    share = c.b.ew("div", c.wide(g), c.b.cast(pool.counts(), c.wide(g).dtype))
    return channels_first(c, c.like(pool.total(pool.seen(share)), g.dtype))


@lower("MaxPoolGrad", kinds=FLOAT, check=plain_pool)
def max_pool_grad(c: Context, x: Node, y: Node, g: Node) -> Node:
    """The first element of a window that is its maximum takes all, as in TensorFlow's CPU kernel."""
    x, g = channels_last(c, x), channels_last(c, g)
    g = _like_result(c, x, g)
    pool = _Pool(c, x.shape[1:-1], g)
    taken = c.b.ew("eq", pool.seen(pool.winners(x)), pool.taps())
    parts = c.b.select(taken, pool.seen(c.wide(g)), c.b.const(0, c.wide(g).dtype))
    return channels_first(c, c.like(pool.total(parts), x.dtype))


@lower("MaxPool3DGrad", kinds=FLOAT, check=plain_pool)
def max_pool_3d_grad(c: Context, x: Node, y: Node, g: Node) -> Node:
    """Every element of a window that equals its maximum takes all, as in TensorFlow's CPU kernel."""
    x, y, g = (channels_last(c, a) for a in (x, y, g))
    y, g = (_like_result(c, x, a) for a in (y, g))
    pool = _Pool(c, x.shape[1:-1], g)
    taken = c.b.ew("eq", pool.elements(x), pool.seen(y))
    parts = c.b.select(taken, pool.seen(c.wide(g)), c.b.const(0, c.wide(g).dtype))
    return channels_first(c, c.like(pool.total(parts), g.dtype))


def _like_result(c: Context, x: Node, g: Node) -> Node:
    """What has the result's shape, with the batch and the channels of the image."""
    why = f"{c.node.name}: batch and channels of image and result"
    return c.b.reshape(g, [c.b.same_dim(g.shape[0], x.shape[0], why), *g.shape[1:-1],
                           c.b.same_dim(g.shape[-1], x.shape[-1], why)])


def _image_shape(c: Context, sizes: np.ndarray, g: Node) -> list[Dim]:
    """The image's shape, channels last."""
    order, known = last_order(c, g.rank), c.static_shape()
    shape = sizes_of(c, sizes.reshape(-1)[order], None if known is None else [known[i] for i in order])
    for i in (0, g.rank - 1):
        shape[i] = c.b.same_dim(shape[i], g.shape[i], f"{c.node.name}: batch and channels of image and result")
    return shape


class _Pool:
    """A pool's windows and the elements of its image, seen from each other.

    ``seen`` and ``taps`` have the dims [batch, row, its windows, column, its windows, channels]: as many windows for
    each element as can hold one.  Where windows lie side by side there is one, and an element's row is two dims, those
    of its window and of its place in there: what is asked of each other then lies in one block of a kernel.
    """

    def __init__(self, c: Context, image: Sequence[Dim], g: Node):
        self.c, self.image, self.places = c, list(image), list(g.shape[1:-1])
        rank = len(self.image) + 2
        self.size, self.strides = spatial(c, "ksize", rank), spatial(c, "strides", rank)
        padding = padding_of(c, self.image, self.size, self.strides)
        self.low, self.high = [a for a, _ in padding], [b for _, b in padding]
        for d, (n, k, s) in enumerate(zip(self.image, self.size, self.strides, strict=True)):
            want = D.floordiv(n + s - 1, s) if c.attr("padding") == "SAME" else window_dim(
                n, k, s, D.static(self.low[d]), D.static(self.high[d]))
            c.b.same_dim(want, self.places[d], f"{c.node.name}: what comes back has the size of the pool's result")
        self.windows = tuple(2 + 2 * d for d in range(len(self.image)))
        self.whole = all(low == 0 for low in self.low)  # windows begin in the image
        self.tiles = (self.whole and self.size == self.strides
                      and all(D.prove_le(n * k, d) for n, k, d in zip(self.places, self.size, self.image, strict=True)))
        self._at = [self._windows_of(d) for d in range(len(self.image))]

    def _number(self, d: Dim) -> Node:
        return self.c.dim_scalar(d, "int32")

    def _windows_of(self, d: int) -> tuple[Node, Node]:
        """[element, window]: the places of windows along an axis that hold the element, -1 for none, and where in the
        window it is."""
        b, size, stride, places = self.c.b, self.size[d], self.strides[d], self.places[d]
        if self.tiles:
            return b.iota((places, 1), 0, "int32"), b.iota((1, size), 1, "int32")
        most = -(-size // stride)
        all_of_them = D.is_static(places) and D.static(places) <= most
        shape = (self.image[d], D.static(places) if all_of_them else most)
        at = b.ew("add", b.iota(shape, 0, "int32"), self._number(self.low[d]))
        turn = b.iota(shape, 1, "int32")
        place = turn if all_of_them else b.ew("sub", b.ew("int_div", at, stride), turn)
        tap = b.ew("sub", at, b.ew("mul", place, stride))
        inside = b.ew("bit_and", b.ew("ge", tap, 0), b.ew("lt", tap, size))
        return b.select(inside, place, b.const(-1, "int32")), tap

    def elements(self, x: Node) -> Node:
        """The image with the dims of what is ``seen``."""
        if not self.tiles:
            return self.c.expand(x, self.windows)
        covered = [p * k for p, k in zip(self.places, self.size, strict=True)]
        x = self.c.b.slice(x, [0] * x.rank, [x.shape[0], *covered, x.shape[-1]])
        return self.c.b.reshape(x, [x.shape[0], *self._pairs(), x.shape[-1]])

    def _pairs(self) -> list[Dim]:
        return [d for pair in zip(self.places, self.size, strict=True) for d in pair]

    def seen(self, values: Node) -> Node:
        """What every window that holds an element has; 0 where there are fewer windows."""
        if self.tiles:
            return self.c.expand(values, self.windows)
        for d, (place, _) in enumerate(self._at):
            values = self.c.b.gather(values, place, axis=1 + 2 * d, mode="zero")
        return values

    def total(self, parts: Node) -> Node:
        """The image of what each element gets from the windows that hold it."""
        b, n = self.c.b, len(self.image)
        if not self.tiles:
            return b.reduce("sum", parts, self.windows)
        batch, channels = parts.shape[0], parts.shape[-1]
        covered = [p * k for p, k in zip(self.places, self.size, strict=True)]
        parts = b.reshape(b.broadcast_to(parts, [batch, *self._pairs(), channels]), [batch, *covered, channels])
        return b.pad(parts, [0] * (n + 2), [0, *(d - c for d, c in zip(self.image, covered, strict=True)), 0])

    def taps(self) -> Node:
        """The number of an element in each window that holds it, row by row."""
        n = 2 * len(self.image) + 2
        return self._numbers([self.c.b.reshape(tap, [tap.shape[i - 1 - 2 * d] if 0 <= i - 1 - 2 * d < 2 else 1
                                                     for i in range(n)]) for d, (_, tap) in enumerate(self._at)])

    def _numbers(self, taps: Sequence[Node]) -> Node:
        """The numbers, row by row, of the elements of a window with these places along its axes."""
        out = taps[0]
        for size, tap in zip(self.size[1:], taps[1:], strict=True):
            out = self.c.b.ew("add", self.c.b.ew("mul", out, size), tap)
        return out

    def winners(self, x: Node) -> Node:
        """[batch, *places, channels]: the number of each window's first maximum.

        A NaN is one where it is the first element of the image in its window, and never else.  Where all others are
        infinite, the lowest number counts as -inf.
        """
        b, n = self.c.b, len(self.image)
        first = self._firsts()
        lowest, highest = (b.const(v, x.dtype) for v in (-np.inf, np.inf))
        seen = self.elements(x) if self.tiles else self._held(b.pad(x, [0, *self.low, 0], [0, *self.high, 0], lowest))
        seen = b.transpose(seen, [0, *range(1, 1 + 2 * n, 2), *range(2, 2 + 2 * n, 2), 1 + 2 * n])
        seen = b.reshape(seen, [x.shape[0], *self.places, D.product(self.size), x.shape[-1]])
        number = b.reshape(b.iota((D.product(self.size),), 0, "int32"), [*(1,) * (1 + n), D.product(self.size), 1])
        is_first = b.ew("eq", number, self.c.expand(first, [1 + n]))
        seen = b.select(b.ew("is_nan", seen), b.select(is_first, highest, lowest), seen)
        found = b.arg_reduce("max", seen, 1 + n, "int32")  # 0 where nothing is larger than the lowest number
        return found if self.whole else b.select(b.ew("eq", found, 0), first, found)

    def _held(self, x: Node) -> Node:
        """[batch, row of places, rows of a window, column, columns, channels]: what each window holds."""
        b = self.c.b
        for d in range(len(self.image)):
            shape = (self.places[d], self.size[d])
            at = b.ew("add", b.ew("mul", b.iota(shape, 0, "int32"), self.strides[d]), b.iota(shape, 1, "int32"))
            x = b.gather(x, at, axis=1 + 2 * d, mode="clip")
        return x

    def _firsts(self) -> Node:
        """[1, *places, 1]: the number of the first element of the image in each window."""
        b, n = self.c.b, len(self.image)
        if self.whole:
            return b.broadcast_to(b.const(0, "int32"), (1,) * (n + 2))
        taps = []
        for d in range(n):
            start = b.ew("mul", b.iota((self.places[d],), 0, "int32"), self.strides[d])
            tap = b.ew("max", b.ew("sub", self._number(self.low[d]), start), 0)
            taps.append(b.reshape(tap, [self.places[d] if i == 1 + d else 1 for i in range(n + 2)]))
        return self._numbers(taps)

    def counts(self) -> Node:
        """[*places, 1]: how many elements of the image each window holds."""
        b, n = self.c.b, len(self.image)
        out = b.const(1, "int32")
        for d in range(n):
            start = b.ew("sub", b.ew("mul", b.iota((self.places[d],), 0, "int32"), self.strides[d]),
                         self._number(self.low[d]))
            end = b.ew("min", b.ew("add", start, self.size[d]), self._number(self.image[d]))
            count = b.ew("sub", end, b.ew("max", start, 0))
            out = b.ew("mul", out, b.reshape(count, [self.places[d] if i == d else 1 for i in range(n + 1)]))
        return out
