"""Random matrix products, with what models have before and after them, at sizes where tiles, shares and widths end."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tf_stitch.ir import dims as D
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.graph import Graph, Node

SIZES = (*range(1, 14), 15, 16, 17, 20, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 130)
UNKNOWN = (0, 1, 2, 3, 4, 5, 7, 9, 16, 17, 33, 64, 100)  # sizes that an unknown dim has at run time
TYPES = ("float32",) * 5 + ("float16", "bfloat16", "float64")
TOLERANCE = {"float32": 1e-4, "float64": 1e-10, "float16": 3e-2, "bfloat16": 2e-1}  # of the largest value
BEFORE = ("nothing", "nothing", "scaled", "relu", "joined", "gathered", "turned")
AFTER = ("nothing", "bias", "bias", "gelu", "residual", "softmax", "sum", "product", "split")


@dataclass(frozen=True)
class Product:
    """``graph`` and the ``dtype`` of its floats; ``kind`` says what it is made of."""

    graph: Graph
    dtype: str
    kind: str

    def inputs(self, seed: int) -> list[np.ndarray]:
        """Standard normal values, indices within their bounds, and sizes for what is unknown."""
        rng = np.random.default_rng(seed)
        env = {s.name: int(rng.choice(UNKNOWN)) for p in self.graph.params for d in p.shape for s in D.symbols(d)}
        return [_drawn(rng, tuple(D.evaluate(d, env) for d in p.shape), p.dtype) for p in self.graph.params]

    def check(self, want: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> None:
        """Raises AssertionError where results differ by more than rounding explains."""
        for w, g in zip(want, got, strict=True):
            w, g = w.astype(np.float64), g.astype(np.float64)
            bound = TOLERANCE[self.dtype] * max(1.0, float(np.abs(w).max(initial=0.0)))
            np.testing.assert_allclose(g, w, rtol=0, atol=bound, err_msg=self.kind)


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int32":
        return np.zeros(shape, np.int32)
    from tf_stitch.ir.dtypes import DTYPES

    return rng.standard_normal(shape).astype(DTYPES[dtype].numpy)


def random_product(seed: int) -> Product:
    """The product of a seed."""
    r = random.Random(seed)
    b, dtype = Builder(), r.choice(TYPES)
    rows, inner, columns = (r.choice(SIZES) for _ in range(3))
    batch = [r.choice((1, 2, 3, 5))] if r.random() < 0.2 else []
    unknown = r.choice(("", "", "rows", "rows", "rows", "batch", "inner"))
    before, after = r.choice(BEFORE), r.choice(AFTER)
    x = _before(b, r, before, [None if unknown == "batch" else d for d in batch], None if unknown == "rows" else rows,
                None if unknown == "inner" and before in ("nothing", "relu") else inner, dtype)
    y, turned = _weights(b, r, x, columns, dtype)
    outputs = _after(b, after, _dot(b, x, y, turned), dtype)
    sizes = f"[{batch} {rows} {inner}] x {columns}{' turned' * turned}"
    kind = f"seed {seed}: {before}, {sizes}, {after}, {unknown} unknown"
    return Product(b.finish(outputs, f"product{seed}"), dtype, kind)


def _before(b: Builder, r: random.Random, kind: str, batch: list, rows: int | None, inner: int | None,
            dtype: str) -> Node:
    """The left operand, [*batch, rows, inner]."""
    if kind == "joined" and inner is not None and inner > 1:
        cut = r.randint(1, inner - 1)
        first = b.param((*batch, rows, cut), dtype, "x0")
        return b.concat([first, b.param((*_sizes(first.shape[:-1]), inner - cut), dtype, "x1")], first.rank - 1)
    if kind == "gathered" and not batch and rows is not None and inner is not None:
        return b.gather(b.param((7, inner), dtype, "table"), b.param((rows,), "int32", "at"), 0)
    if kind == "turned":
        x = b.param((*batch, inner, rows), dtype, "x")
        return b.transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))
    x = b.param((*batch, rows, inner), dtype, "x")
    if kind == "scaled":
        return b.ew("mul", x, 0.5)
    return b.ew("max", x, 0.0) if kind == "relu" else x


def _weights(b: Builder, r: random.Random, x: Node, columns: int, dtype: str) -> tuple[Node, bool]:
    """The right operand, and whether its columns come before what is folded."""
    turned = r.random() < 0.4
    (inner,) = _sizes(x.shape[-1:])
    return b.param((*_sizes(x.shape[:-2]), *((columns, inner) if turned else (inner, columns))), dtype, "w"), turned


def _dot(b: Builder, x: Node, y: Node, turned: bool) -> Node:
    lead = tuple(range(x.rank - 2))
    return b.dot(x, y, (lead, lead), ((x.rank - 1,), (y.rank - 1 if turned else y.rank - 2,)))


def _after(b: Builder, kind: str, y: Node, dtype: str) -> list[Node]:
    if kind in ("bias", "gelu"):
        y = b.ew("add", y, b.broadcast_to(b.param((y.shape[-1],), dtype, "b"), y.shape))
        return [b.ew("mul", y, b.ew("tanh", y)) if kind == "gelu" else y]
    if kind == "residual":
        return [b.ew("add", y, b.param(_sizes(y.shape), dtype, "r"))]
    if kind == "softmax":
        shifted = b.ew("sub", y, b.reduce("max", y, (y.rank - 1,), keepdims=True))
        e = b.ew("exp", shifted)
        return [b.ew("div", e, b.reduce("sum", e, (y.rank - 1,), keepdims=True))]
    if kind == "sum":
        return [y, b.reduce("sum", y, (y.rank - 1,))]
    if kind == "product":
        return [_dot(b, b.ew("tanh", y), b.param((*_sizes((*y.shape[:-2], y.shape[-1])), 3), dtype, "v"), False)]
    if kind == "split" and y.shape[-1] % 2 == 0:
        half = y.shape[-1] // 2
        lead, sizes = [0] * (y.rank - 1), [*y.shape[:-1], half]
        return [b.slice(y, [*lead, 0], sizes), b.ew("tanh", b.slice(y, [*lead, half], sizes))]
    return [y]


def _sizes(shape: Sequence[D.Dim]) -> list[int | None]:
    """The sizes of another input with these dims: unknown where they are; what uses both says that they are equal."""
    return [d if isinstance(d, int) else None for d in shape]
