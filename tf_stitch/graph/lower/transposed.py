"""Transposed convolutions: what a convolution's gradient by its image is, as a layer that makes images larger.

With a stride s, element s*q + r of the result (from where the padding begins) is a sum over the filter's elements
r, r + s, r + 2*s, ...: a convolution without stride for each r.  So all results are one convolution of the small image,
whose channels are the r's, laid out in order: no zeros are put between pixels and none are multiplied.
"""
from __future__ import annotations

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import GraphView, NodeView
from .array import sizes_of
from .context import Context
from .nn import channels_first, channels_last, spatial, static_filter
from .registry import INT, lower


def _check(view: GraphView, node: NodeView) -> str | None:
    if any(n.op.startswith(("Conv2DBackpropFilter", "Conv3DBackpropFilter")) for n in view):
        return "the convolutions of a backward pass stay TensorFlow's"
    if not DTYPES[view.dtype((node.name, 0))].is_float:
        return "a transposed convolution of integers is not supported"
    strides, dilations = (set(node.attr(k) or [1]) for k in ("strides", "dilations"))
    if strides != {1} and dilations != {1}:
        return "a transposed convolution with both strides and dilations is not supported"
    return static_filter(view, node)


@lower("Conv2DBackpropInput", "Conv3DBackpropInputV2", values=(0,), kinds=INT, check=_check)
def transposed(c: Context, sizes: np.ndarray, w: Node, g: Node) -> Node:
    g, rank = channels_last(c, g), g.rank - 2
    shape = _shape(c, sizes, w, g)
    strides, dilations = spatial(c, "strides", g.rank), spatial(c, "dilations", g.rank)
    window = [(D.static(k) - 1) * d + 1 for k, d in zip(w.shape[:-2], dilations, strict=True)]
    low = [_low(c, a, g.shape[1 + a], shape[1 + a], window[a], strides[a]) for a in range(rank)]
    taps = [-(-D.static(k) // s) for k, s in zip(w.shape[:-2], strides, strict=True)]
    around = [(t - 1) * d for t, d in zip(taps, dilations, strict=True)]
    y = c.b.conv(g, _filter(c, w, taps, strides), [1] * rank, [(a, a) for a in around], dilations)
    return channels_first(c, _window(c, _interleaved(c, y, strides, shape[-1]), low, shape))


def _shape(c: Context, sizes: np.ndarray, w: Node, g: Node) -> list[Dim]:
    """The image's shape, channels last; TensorFlow also takes its height and width alone."""
    first = str(c.attr("data_format", "NHWC")).startswith("NC")
    known = list(c.static_shape() or [None] * g.rank)
    known = [known[0], *known[2:], known[1]] if first else known
    if sizes.size == g.rank - 2:
        return [g.shape[0], *sizes_of(c, sizes, known[1:-1]), w.shape[-2]]
    order = [0, *range(2, g.rank), 1] if first else range(g.rank)
    shape = sizes_of(c, sizes.reshape(-1)[list(order)], known)
    return [c.b.same_dim(shape[0], g.shape[0], f"{c.node.name}: the image's batch is that of what comes back"),
            *shape[1:-1], c.b.same_dim(shape[-1], w.shape[-2], f"{c.node.name}: the image's channels are the filter's")]


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


def _filter(c: Context, w: Node, taps: list[int], strides: list[int]) -> Node:
    """[*window, in, out] as [*taps, out, r's x in]: taps backwards, the filter filled up with zeros to whole ones."""
    n = len(taps)
    high = [t * s - D.static(k) for t, s, k in zip(taps, strides, w.shape, strict=False)]
    w = c.b.pad(w, [0] * w.rank, [*high, 0, 0])
    w = c.b.reshape(w, [d for pair in zip(taps, strides, strict=True) for d in pair] + list(w.shape[-2:]))
    w = c.b.transpose(w, [*range(0, 2 * n, 2), 2 * n + 1, *range(1, 2 * n, 2), 2 * n])
    w = c.b.reverse(w, range(n))
    return c.b.reshape(w, [*taps, w.shape[n], D.product([*strides, w.shape[-1]])])


def _interleaved(c: Context, y: Node, strides: list[int], channels: Dim) -> Node:
    """[batch, *places, r's x channels] as [batch, *(places x r's), channels]."""
    n, places = len(strides), y.shape[1:-1]
    y = c.b.reshape(y, [y.shape[0], *places, *strides, channels])
    y = c.b.transpose(y, [0, *(a for i in range(n) for a in (1 + i, 1 + n + i)), 2 * n + 1])
    return c.b.reshape(y, [y.shape[0], *(p * s for p, s in zip(places, strides, strict=True)), channels])


def _window(c: Context, y: Node, low: list[Dim], shape: list[Dim]) -> Node:
    """The image within what the filter reaches; what it does not reach is zero."""
    high = [D.dmax(a + d - have, 0) for a, d, have in zip(low, shape[1:-1], y.shape[1:-1], strict=True)]
    y = c.b.pad(y, [0] * y.rank, [0, *high, 0])
    return c.b.slice(y, [0, *low, 0], shape)
