"""Computations for which a GPU has a function of its own (ts_device.h), found by their nodes.

A form is only used where none of the nodes between its operands and its result is in memory: then nothing but the
result is needed.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..ir.graph import Node
from ..ir.simplify import splat_of

Plain = Callable[[Node], bool]  # true for a node that is computed where it is read
_NEAR = 2.0**-22  # of a constant that float32 rounded, or that was computed in float32


@dataclass(frozen=True)
class NormalCdf:
    """``factor`` (None: 1) times Phi(x), or Phi(-x) where ``negated``; Phi is the normal distribution's.

    ``tail`` is the node that gives twice Phi.
    """

    x: Node
    negated: bool
    tail: Node
    factor: Node | None = None


def is_below_max(d: Node) -> bool:
    """True for x - max(x) along some axes, which is at most 0."""
    if d.op != "sub":
        return False
    x, top = d.inputs
    if top.op == "broadcast" and top.attrs["axes"] == tuple(range(x.rank)) and top.inputs[0].op == "reshape":
        source, kept = top.inputs[0].inputs[0], [k for k in range(x.rank) if top.inputs[0].shape[k] != 1]
    elif top.op == "broadcast":
        source, kept = top.inputs[0], list(top.attrs["axes"])
    else:
        return False
    return (source.op == "reduce" and source.attrs["kind"] == "max" and source.inputs[0] is x
            and [k for k in range(x.rank) if k not in source.attrs["axes"] and x.shape[k] != 1]
            == [k for k in kept if x.shape[k] != 1])


def normal_cdf(n: Node, plain: Plain) -> NormalCdf | None:
    """GELU's a / 2 * erfc(-x / sqrt 2) or a / 2 * (1 + erf(x / sqrt 2)), its products in any order."""
    if n.op != "mul":
        return None
    for u, v in _orders(n):
        halved = _other(u, 0.5) if u.op == "mul" and plain(u) else None
        if halved is not None and (tail := _twice_cdf(v, plain)) is not None:
            return replace(tail, factor=halved)
        if _is(u, 0.5) and plain(v):
            return _twice_cdf(v, plain) or (_product(v, plain) if v.op == "mul" else None)
    return None


def _orders(n: Node) -> tuple[tuple[Node, Node], tuple[Node, Node]]:
    x, y = n.inputs
    return (x, y), (y, x)


def _product(n: Node, plain: Plain) -> NormalCdf | None:
    """A factor times twice Phi."""
    for a, v in _orders(n):
        if (tail := _twice_cdf(v, plain)) is not None:
            return replace(tail, factor=a)
    return None


def _twice_cdf(n: Node, plain: Plain) -> NormalCdf | None:
    """erfc(-x / sqrt 2) or 1 + erf(x / sqrt 2)."""
    if not plain(n):
        return None
    if n.op == "erfc":
        scaled = _scaled(n.inputs[0], plain)
        return scaled and NormalCdf(scaled[0], not scaled[1], n)
    inner = _other(n, 1.0) if n.op == "add" else None
    scaled = _scaled(inner.inputs[0], plain) if inner is not None and inner.op == "erf" and plain(inner) else None
    return scaled and NormalCdf(*scaled, n)


def _scaled(t: Node, plain: Plain) -> tuple[Node, bool] | None:
    """The x of x / sqrt 2 or -x / sqrt 2, and whether it is negated."""
    if not plain(t):
        return None
    if t.op == "neg":
        inner = _scaled(t.inputs[0], plain)
        return inner and (inner[0], not inner[1])
    x, scale = _split(t)
    if x is None or abs(abs(scale) * math.sqrt(2) - 1) > _NEAR:
        return None
    negated = scale < 0
    while x.op == "neg" and plain(x):
        x, negated = x.inputs[0], not negated
    return x, negated


def _split(t: Node) -> tuple[Node | None, float]:
    """x and c of t = x * c, c a constant."""
    if t.op == "div" and (c := splat_of(t.inputs[1])) is not None and c != 0:
        return t.inputs[0], 1 / float(c)
    if t.op == "mul":
        for x, y in _orders(t):
            if (c := splat_of(y)) is not None:
                return x, float(c)
    return None, 0.0


def _is(n: Node, value: float) -> bool:
    c = splat_of(n)
    return c is not None and np.ndim(c) == 0 and float(c) == value


def _other(n: Node, value: float) -> Node | None:
    """The operand of n whose other operand is a constant."""
    x, y = n.inputs
    return x if _is(y, value) else y if _is(x, value) else None
