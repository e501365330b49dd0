"""Random numbers that follow from a seed: words of a counter-based generator, made into numbers as TensorFlow does.

The mask of a dropout is then part of the kernels that use it; no element waits for another.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ...ir.graph import Node
from ..view import GraphView, NodeView
from .array import sizes_of
from .context import Context
from .registry import INT, lower

PHILOX = (1, 3)  # what an op's `alg` may be: this generator, or the device's own choice, which is this one
SCRAMBLE = 0x02461E293EC8F720  # the key that TensorFlow makes keys of seeds with
SMALLEST = 1e-7  # of what a logarithm is taken
BITS: dict[str, tuple[str, int]] = {  # of a type: unsigned integers of its size, and how many bits are a fraction
    "float32": ("uint32", 23), "float16": ("uint16", 10), "bfloat16": ("uint16", 7), "float64": ("uint64", 52)}

Words = Callable[[Node], Node]  # uint64 numbers of words -> those words, uint32


def _words(c: Context, key: Node, counter: tuple[Node, Node]) -> Words:
    return lambda index: c.b.ew("philox", index, key, *counter)


def _element(c: Context, x: Node, i: int) -> Node:
    return c.b.reshape(c.b.slice(x, (i,), (1,)), ())


def _joined(c: Context, low: Node, high: Node) -> Node:
    """Pairs of words as uint64."""
    low, high = (c.b.cast(x, "uint64") for x in (low, high))
    return c.b.ew("bit_or", low, c.b.ew("shift_left", high, 32))


def _of_seed(c: Context, seed: Node) -> tuple[Node, tuple[Node, Node]]:
    """The key and the counter that TensorFlow makes of a seed of two integers."""
    if seed.shape != (2,):
        c.fail(f"a seed of the shape {seed.shape}")
    seeds = c.b.cast(seed, "uint64")
    start = (_element(c, seeds, 0), _element(c, seeds, 1))
    mixed = _words(c, c.b.const(SCRAMBLE, "uint64"), start)(c.b.iota((4,), 0, "uint64"))
    parts = [_element(c, mixed, i) for i in range(4)]
    return _joined(c, *parts[:2]), (c.b.const(0, "uint64"), _joined(c, *parts[2:]))


@lower("StatelessRandomGetKeyCounter", kinds=INT, on_gpu=True)
def key_counter(c: Context, seed: Node) -> list[Node]:
    key, counter = _of_seed(c, seed)
    return [c.b.reshape(key, (1,)), c.b.concat([c.b.reshape(x, (1,)) for x in counter], 0)]


# --- distributions: (context, words, numbers of elements, element type) -> elements ----------------

def _unit(c: Context, words: Words, at: Node, dtype: str) -> Node:
    """[0, 1): random bits as the fraction of a number from 1 on."""
    kind, bits = BITS[dtype]
    raw = _pair(c, words, at) if kind == "uint64" else c.like(words(at), kind)
    if kind == "uint64":  # a double's first word is the upper one
        raw = c.b.ew("bit_or", c.b.ew("shift_left", raw, 32), c.b.ew("shift_right", raw, 32))
    one = int(np.array(1, DTYPES[dtype].numpy).view(DTYPES[kind].numpy))
    fraction = c.b.ew("bit_and", raw, c.b.const((1 << bits) - 1, kind))
    return c.b.ew("sub", c.b.bitcast(c.b.ew("bit_or", fraction, c.b.const(one, kind)), dtype), c.b.const(1, dtype))


def _pair(c: Context, words: Words, at: Node) -> Node:
    """Words 2 i and 2 i + 1 as one integer."""
    low = c.b.ew("mul", at, 2)
    return _joined(c, words(low), words(c.b.ew("add", low, 1)))


def _normal(c: Context, words: Words, at: Node, dtype: str) -> Node:
    """Box and Muller's pairs: an angle and a radius, of which one element is the sine and the next one the cosine."""
    wide = "float64" if dtype == "float64" else "float32"
    even = c.b.ew("bit_and", at, c.b.const(~1 & (1 << 64) - 1, "uint64"))
    u, v = (_unit(c, words, i, wide) for i in (even, c.b.ew("add", even, 1)))
    radius = c.b.ew("sqrt", c.b.ew("mul", c.b.ew("log", c.b.ew("max", u, SMALLEST)), -2.0))
    angle = c.b.ew("mul", v, 2 * math.pi)
    wave = c.b.select(c.b.ew("eq", at, even), c.b.ew("sin", angle), c.b.ew("cos", angle))
    return c.like(c.b.ew("mul", wave, radius), dtype)


def _bits(c: Context, words: Words, at: Node, dtype: str) -> Node:
    return c.like(_pair(c, words, at) if DTYPES[dtype].size == 8 else words(at), dtype)


def _drawn(c: Context, distribution: Callable[..., Node], shape: np.ndarray, key: Node, counter: tuple[Node, Node],
           *limits: Node) -> Node:
    dims: Sequence[Dim] = sizes_of(c, shape, c.static_shape())
    at = c.b.iota((D.product(dims),), 0, "uint64")
    return c.b.reshape(distribution(c, _words(c, key, counter), at, c.dtype, *limits), dims)


def _integers(c: Context, words: Words, at: Node, dtype: str, low: Node, high: Node) -> Node:
    """From ``low`` to below ``high``; an empty range is an error."""
    unsigned = "uint64" if DTYPES[dtype].size == 8 else "uint32"
    width = c.b.ew("sub", c.b.cast(high, unsigned), c.b.cast(low, unsigned))
    width = c.b.select(c.b.ew("lt", low, high), width, c.b.const(0, unsigned))
    drawn = c.b.ew("int_mod", _bits(c, words, at, unsigned), width)
    return c.b.cast(c.b.ew("add", c.b.cast(low, unsigned), drawn), dtype)


# --- ops -------------------------------------------------------------------------------------------

def _algorithm(view: GraphView, node: NodeView) -> str | None:
    alg = view.constant(node.inputs[3])
    if alg is not None and int(alg) not in PHILOX:
        return "the generator is not Philox"
    shape = view.shape(node.inputs[2])
    return None if shape == (2,) else f"a counter of the shape {shape}"


def _of_key(distribution: Callable[..., Node]) -> Callable[..., Node]:
    def fn(c: Context, shape: np.ndarray, key: Node, counter: Node, alg: np.ndarray, *limits: Node) -> Node:
        return _drawn(c, distribution, shape, c.b.reshape(key, ()), (_element(c, counter, 0), _element(c, counter, 1)),
                      *limits)

    return fn


def _of_two_seeds(distribution: Callable[..., Node]) -> Callable[..., Node]:
    return lambda c, shape, seed, *limits: _drawn(c, distribution, shape, *_of_seed(c, seed), *limits)


for _op, _distribution in (("StatelessRandomUniform", _unit), ("StatelessRandomNormal", _normal),
                           ("StatelessRandomUniformFullInt", _bits), ("StatelessRandomUniformInt", _integers)):
    lower(_op, values=(0,), kinds=INT, on_gpu=True)(_of_two_seeds(_distribution))
    lower(f"{_op}V2", values=(0,), statics=(3,), kinds=INT, check=_algorithm, on_gpu=True)(_of_key(_distribution))
