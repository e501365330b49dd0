"""Transposed convolutions: what a convolution's gradient by its image is, as a layer that makes images larger.

With a stride s, element s*q + r of the result (from where the padding begins) is a sum over the filter's elements
r, r + s, r + 2*s, ...: a convolution without stride for each r.  So all results are one convolution of the small image,
whose channels are the r's, laid out in order: no zeros are put between pixels and none are multiplied.
"""
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
from .nn import channels_first, channels_last, last_order, spatial, static_filter
from .registry import INT, lower


def _check(view: GraphView, node: NodeView) -> str | None:
    if not DTYPES[view.dtype((node.name, 0))].is_float:
        return "a transposed convolution of integers is not supported"
    strides, dilations = (set(node.attr(k) or [1]) for k in ("strides", "dilations"))
    if strides != {1} and dilations != {1}:
        return "a transposed convolution with both strides and dilations is not supported"
    return static_filter(view, node)


@lower("Conv2DBackpropInput", "Conv3DBackpropInputV2", values=(0,), kinds=INT, check=_check)
def transposed(c: Context, sizes: np.ndarray, w: Node, g: Node) -> Node:
    g = channels_last(c, g)
    depth = D.static(w.shape[-2])
    shape = _shape(c, sizes, depth, g)
    if depth < 1 or D.static(shape[-1]) % depth or D.static(w.shape[-1]) % max(D.static(shape[-1]) // depth, 1):
        c.fail(f"a filter {w!r} does not fit an image of {shape[-1]} channels")
    return _transposed(c, shape, w, g, D.static(shape[-1]) // depth)


@lower("DepthwiseConv2dNativeBackpropInput", values=(0,), kinds=INT, check=_check)
def depthwise_transposed(c: Context, sizes: np.ndarray, w: Node, g: Node) -> Node:
    g = channels_last(c, g)
    *size, channels, multiplier = map(D.static, w.shape)
    shape = _shape(c, sizes, channels, g)
    c.b.same_dim(shape[-1], channels, f"{c.node.name}: the image's channels are the filter's")
    return _transposed(c, shape, c.b.reshape(w, (*size, 1, channels * multiplier)), g, channels)


def _transposed(c: Context, shape: list[Dim], w: Node, g: Node, groups: int) -> Node:
    """The image of ``shape``, channels last; ``w`` is [*window, in / groups, out]."""
    rank = g.rank - 2
    strides, dilations = spatial(c, "strides", g.rank), spatial(c, "dilations", g.rank)
    window = [(D.static(k) - 1) * d + 1 for k, d in zip(w.shape[:-2], dilations, strict=True)]
    low = [_low(c, a, g.shape[1 + a], shape[1 + a], window[a], strides[a]) for a in range(rank)]
    taps = [-(-D.static(k) // s) for k, s in zip(w.shape[:-2], strides, strict=True)]
    around = [(t - 1) * d for t, d in zip(taps, dilations, strict=True)]
    turned = _filter(c, w, taps, strides, groups)
    padding = _exact(around, low, g.shape[1:-1], shape[1:-1]) if set(strides) == {1} else None
    if padding is not None:  # the convolution's result is the image
        return channels_first(c, c.b.conv(g, turned, [1] * rank, padding, dilations, groups))
    y = c.b.conv(g, turned, [1] * rank, [(a, a) for a in around], dilations, groups)
    return channels_first(c, _window(c, _interleaved(c, y, strides, groups, shape[-1]), low, shape))


def _exact(around: list[int], low: list[Dim], small: Sequence[Dim],
           large: Sequence[Dim]) -> list[tuple[int, int]] | None:
    """What to pad with where there are no strides, so that the result is the image; None where that is not known, or
    elements at the ends would have to go."""
    padding = []
    for a, first, n, d in zip(around, low, small, large, strict=True):
        pair = (a - first, d + first - n)  # a result is as large as what is padded, less `a`
        if not D.all_static(pair) or min(map(D.static, pair)) < 0:
            return None
        padding.append((D.static(pair[0]), D.static(pair[1])))
    return padding


def _shape(c: Context, sizes: np.ndarray, channels: int, g: Node) -> list[Dim]:
    """The image's shape, channels last; TensorFlow also takes its height and width alone."""
    order, given = last_order(c, g.rank), c.static_shape()
    known = [given[i] if given else None for i in order]
    if sizes.size == g.rank - 2:
        return [g.shape[0], *sizes_of(c, sizes, known[1:-1]), channels]
    shape = sizes_of(c, sizes.reshape(-1)[order], known)
    return [c.b.same_dim(shape[0], g.shape[0], f"{c.node.name}: the image's batch is that of what comes back"),
            *shape[1:-1], shape[-1] if D.is_static(shape[-1]) else c.b.same_dim(
                shape[-1], channels, f"{c.node.name}: the image's channels are the filter's")]


def _low(c: Context, axis: int, small: Dim, large: Dim, window: int, stride: int) -> Dim:
    """The padding before the image in the convolution that this is the gradient of, whose result must fit."""
    mode, why = c.attr("padding"), f"{c.node.name}: the image's size fits what comes back"
    if mode == "EXPLICIT":
        pairs = list(zip(*[iter(c.attr("explicit_paddings"))] * 2, strict=True))
        pairs = pairs[2:] if str(c.attr("data_format", "NHWC")).startswith("NC") else pairs[1:-1]
        low, total = pairs[axis][0], sum(pairs[axis])
        c.b.same_dim(D.floordiv(large + total - window, stride) + 1, small, why)
        return low
    if mode == "VALID":
        c.b.same_dim(D.floordiv(large - window, stride) + 1, small, why)
        return 0
    c.b.same_dim(D.floordiv(large + stride - 1, stride), small, why)
    return D.floordiv(D.dmax((small - 1) * stride + window - large, 0), 2)


def _filter(c: Context, w: Node, taps: list[int], strides: list[int], groups: int) -> Node:
    """[*window, in, groups x out] as [*taps, out, groups x r's x in]: taps backwards, the filter filled up with zeros
    to whole ones."""
    n, out = len(taps), D.static(w.shape[-1]) // groups
    high = [t * s - D.static(k) for t, s, k in zip(taps, strides, w.shape, strict=False)]
    w = c.b.pad(w, [0] * w.rank, [*high, 0, 0])
    w = c.b.reshape(w, [d for pair in zip(taps, strides, strict=True) for d in pair] + [w.shape[-2], groups, out])
    w = c.b.transpose(w, [*range(0, 2 * n, 2), 2 * n + 2, 2 * n + 1, *range(1, 2 * n, 2), 2 * n])
    w = c.b.reverse(w, range(n))
    return c.b.reshape(w, [*taps, out, D.product([groups, *strides, w.shape[-1]])])


def _interleaved(c: Context, y: Node, strides: list[int], groups: int, channels: Dim) -> Node:
    """[batch, *places, groups x r's x in] as [batch, *(places x r's), channels]."""
    n, places = len(strides), y.shape[1:-1]
    y = c.b.reshape(y, [y.shape[0], *places, groups, *strides, D.static(channels) // groups])
    y = c.b.transpose(y, [0, *(a for i in range(n) for a in (1 + i, 2 + n + i)), 1 + n, 2 * n + 2])
    return c.b.reshape(y, [y.shape[0], *(p * s for p, s in zip(places, strides, strict=True)), channels])


def _window(c: Context, y: Node, low: list[Dim], shape: list[Dim]) -> Node:
    """The image within what the filter reaches; what it does not reach is zero."""
    high = [D.dmax(a + d - have, 0) for a, d, have in zip(low, shape[1:-1], y.shape[1:-1], strict=True)]
    y = c.b.pad(y, [0] * y.rank, [0, *high, 0])
    return c.b.slice(y, [0, *low, 0], shape)
