"""Random TensorFlow graphs of many ops over a few placeholders with unknown dims.

Floats are float64, so that what TensorFlow's kernels lose to rounding stays far below what a wrong lowering
changes; ops that jump (floor, comparisons, argmax) only read values that are exact.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
F, I = tf.float64, tf.int32


@dataclass
class RandomGraph:
    """A graph inside the current tf.Graph: placeholders, outputs, and what feeds them for a batch size."""

    rng: np.random.Generator
    placeholders: list[tf.Tensor] = field(default_factory=list)
    outputs: list[tf.Tensor] = field(default_factory=list)
    pool: list[tf.Tensor] = field(default_factory=list)
    exact: set[str] = field(default_factory=set)

    def feed(self, batch: int, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        out = []
        for p in self.placeholders:
            shape = [batch if d is None else d for d in p.shape.as_list()]
            x = rng.integers(-8, 9, shape) / 4 if p.dtype == F else rng.integers(-3, 6, shape)
            out.append(np.asarray(x, p.dtype.as_numpy_dtype))
        return out


def build(seed: int, steps: int = 8) -> RandomGraph:
    """Adds a random graph to the current tf.Graph."""
    g = RandomGraph(np.random.default_rng(seed))
    for _ in range(int(g.rng.integers(1, 4))):
        shape = [None] * bool(g.rng.random() < 0.8) + [int(d) for d in g.rng.integers(1, 5, int(g.rng.integers(1, 3)))]
        p = v1.placeholder(F if g.rng.random() < 0.85 else I, shape)
        g.placeholders.append(p)
        g.pool.append(p)
        g.exact.add(p.name)
    made = 0
    for _ in range(steps * 4):
        if made >= steps:
            break
        made += step(g)
    wanted = [t for t in g.pool if all(t is not p for p in g.placeholders)] or [tf.identity(g.pool[0]) + 0]
    g.outputs = wanted[-int(g.rng.integers(1, 4)):]
    add_gradients(g)
    g.outputs = [t if t.op.type != "UnsortedSegmentSum" else t + 0 for t in g.outputs]
    return g


def add_gradients(g: RandomGraph) -> None:
    """Sometimes the gradients of the last float output, as autodiff writes them with unknown dims."""
    floats = [t for t in g.outputs if t.dtype == F]
    inputs = [p for p in g.placeholders if p.dtype == F]
    if not floats or not inputs or g.rng.random() > 0.35:
        return
    try:
        made = tf.gradients(tf.reduce_sum(floats[-1] * 0.5), inputs)
    except (LookupError, ValueError, TypeError):  # an op without gradient
        return
    g.outputs += [tf.convert_to_tensor(t) for t in made if t is not None]


def step(g: RandomGraph) -> bool:
    """One more op; False when the one that was drawn does not fit."""
    x = pick(g, lambda t: True)
    options = MENU[x.dtype] + MENU[None]
    op = options[int(g.rng.integers(len(options)))]
    made = op(g, x)
    if made is None:
        return False
    new = list(made) if isinstance(made, (list, tuple)) else [made]
    keeps = op.__name__ in KEEP_EXACT
    for t in new:
        if t.shape.rank is None or t.shape.rank > 5 or (t.shape.num_elements() or 0) > 4000:
            return False
        if (x.name in g.exact and keeps) or t.dtype != F:
            g.exact.add(t.name)
        g.pool.append(t)
    return True


def pick(g: RandomGraph, fits: Callable[[tf.Tensor], bool]) -> tf.Tensor:
    """A tensor of the pool, later ones more often."""
    good = [t for t in g.pool if fits(t)]
    weights = np.arange(1, len(good) + 1.0)
    return good[int(g.rng.choice(len(good), p=weights / weights.sum()))]


def static(t: tf.Tensor, axis: int) -> int | None:
    return t.shape.as_list()[axis]


def axis_of(g: RandomGraph, t: tf.Tensor) -> int | None:
    return int(g.rng.integers(t.shape.rank)) if t.shape.rank else None


def static_axis(g: RandomGraph, t: tf.Tensor) -> int | None:
    """An axis whose size is known and not 0."""
    good = [i for i, d in enumerate(t.shape.as_list()) if d]
    return int(g.rng.choice(good)) if good else None


def constant(g: RandomGraph, shape, dtype) -> tf.Tensor:
    values = g.rng.integers(1, 9, shape)
    return tf.constant(values / 4 if dtype == F else values, dtype)


# --- elementwise -----------------------------------------------------------------------------------

UNARY = [tf.tanh, tf.sigmoid, tf.nn.relu, tf.nn.relu6, tf.nn.elu, tf.nn.selu, tf.nn.softplus, tf.nn.softsign, tf.abs,
         tf.negative, tf.sin, tf.cos, tf.atan, tf.square, tf.math.erf, tf.nn.leaky_relu, tf.asinh, tf.nn.gelu,
         tf.nn.silu,
         lambda x: tf.exp(-tf.abs(x)), lambda x: tf.math.log1p(tf.abs(x)), lambda x: tf.sqrt(tf.abs(x) + 0.5),
         lambda x: tf.math.rsqrt(x * x + 1.0), lambda x: tf.math.expm1(-tf.abs(x)), lambda x: 1.0 / (1.5 + tf.abs(x)),
         lambda x: tf.clip_by_value(x, -1.0, 0.75), lambda x: x ** 2.0, tf.zeros_like, tf.ones_like, tf.stop_gradient]


def unary(g, x):
    return UNARY[int(g.rng.integers(len(UNARY)))](x)


JUMPS = [tf.floor, tf.math.ceil, tf.round, tf.sign, tf.math.rint, lambda x: tf.cast(x, I),
         lambda x: tf.math.floordiv(x, 0.75),
         lambda x: tf.math.floormod(x, 0.75), lambda x: tf.cast(x > 0.25, F), lambda x: tf.where(x >= 0.0, x, -2.0 * x),
         lambda x: tf.cast(tf.logical_or(x < 0.0, tf.equal(x, 1.0)), F)]


def jump(g, x):
    if x.name not in g.exact:
        return None
    return JUMPS[int(g.rng.integers(len(JUMPS)))](x)


def partner(g, x):
    """Something that broadcasts with ``x``."""
    shape = x.shape.as_list()
    same = [t for t in g.pool if t.dtype == x.dtype and t.shape.as_list() == shape]
    if same and g.rng.random() < 0.6:
        return same[int(g.rng.integers(len(same)))]
    tail = [1 if d is None or g.rng.random() < 0.3 else d for d in shape]
    return constant(g, tail[int(g.rng.integers(len(tail) + 1)):], x.dtype)


BINARY = [tf.add, tf.subtract, tf.multiply, tf.maximum, tf.minimum, tf.math.squared_difference,
          lambda a, b: tf.math.divide_no_nan(a, tf.abs(b) + 0.5), lambda a, b: a / (tf.abs(b) + 0.5),
          lambda a, b: tf.atan2(a, tf.abs(b) + 0.5), lambda a, b: tf.add_n([a + 0 * b, a * b + 0 * a])]


def binary(g, x):
    y = partner(g, x)
    a, b = (x, y) if g.rng.integers(2) else (y, x)
    return BINARY[int(g.rng.integers(len(BINARY)))](a, b)


INT_UNARY = [tf.negative, tf.abs, tf.square, lambda x: x % 3, lambda x: x // 2, lambda x: tf.bitwise.bitwise_xor(x, 5),
             lambda x: tf.cast(x, F) * 0.5, lambda x: tf.maximum(x, 1), lambda x: tf.bitwise.left_shift(x, 2), tf.sign,
             lambda x: tf.where(x > 1, x, -x), lambda x: tf.math.floormod(x, -3), lambda x: tf.truncatediv(x, 2)]


def int_unary(g, x):
    return INT_UNARY[int(g.rng.integers(len(INT_UNARY)))](x)


def int_binary(g, x):
    y = partner(g, x)
    return [tf.add, tf.subtract, tf.multiply, tf.maximum, tf.bitwise.bitwise_and][int(g.rng.integers(5))](x, y)


def one_hot(g, x):
    return tf.one_hot(x, int(g.rng.integers(1, 5)), axis=int(g.rng.integers(-1, x.shape.rank + 1)), dtype=F)


# --- reductions, scans, products -------------------------------------------------------------------

def reduction(g, x):
    axes = [i for i in range(x.shape.rank) if g.rng.integers(2)]
    fns = [tf.reduce_sum, tf.reduce_max, tf.reduce_min] + ([tf.reduce_mean, tf.reduce_prod] if x.dtype == F else [])
    return fns[int(g.rng.integers(len(fns)))](x, axes, keepdims=bool(g.rng.integers(2)))


def normalise(g, x):
    axis = static_axis(g, x)
    if axis is None:
        return None
    return [tf.nn.softmax, tf.nn.log_softmax, lambda t, axis: t - tf.reduce_mean(t, axis, keepdims=True),
            lambda t, axis: tf.math.l2_normalize(t, axis)][int(g.rng.integers(4))](x, axis=axis)


def scan(g, x):
    axis = axis_of(g, x)
    if axis is None:
        return None
    fn = tf.cumsum if g.rng.random() < 0.7 else tf.math.cumprod
    return fn(x, axis, exclusive=bool(g.rng.integers(2)), reverse=bool(g.rng.integers(2)))


def argmax(g, x):
    axis = static_axis(g, x)
    if axis is None or x.name not in g.exact:
        return None
    return (tf.argmax if g.rng.integers(2) else tf.argmin)(x, axis, output_type=I)


def matmul(g, x):
    if x.shape.rank < 2 or not static(x, -1):
        return None
    w = constant(g, [static(x, -1), int(g.rng.integers(1, 5))], F)
    return tf.matmul(x, w) if x.shape.rank == 2 else tf.einsum("...i,ij->...j", x, w)


def outer(g, x):
    if x.shape.rank not in (2, 3):
        return None
    return tf.matmul(x, x, transpose_b=True) if x.shape.rank == 3 else tf.einsum("bi,bj->bij", x, x)


def bias(g, x):
    if x.shape.rank < 2 or not static(x, -1):
        return None
    return tf.nn.bias_add(x, constant(g, [static(x, -1)], x.dtype))


# --- moving elements -------------------------------------------------------------------------------

def reshape(g, x):
    dims = tf.unstack(tf.shape(x)) if g.rng.integers(2) else None
    kind = int(g.rng.integers(4))
    if kind == 0:
        return tf.reshape(x, [-1])
    if kind == 1 and x.shape.rank >= 2:
        lead = dims[0] if dims else -1
        rest = x.shape.as_list()[1:]
        return tf.reshape(x, tf.stack([lead, int(np.prod(rest))])) if None not in rest else None
    if kind == 2 and dims:
        return tf.reshape(x, tf.stack([*dims[:1], 1, *dims[1:]])) if x.shape.rank else None
    return tf.expand_dims(x, int(g.rng.integers(-1, x.shape.rank + 1)))


def squeeze(g, x):
    ones = [i for i, d in enumerate(x.shape.as_list()) if d == 1]
    return tf.squeeze(x, [int(g.rng.choice(ones))]) if ones else None


def transpose(g, x):
    return tf.transpose(x, g.rng.permutation(x.shape.rank).tolist())


def concat(g, x):
    axis = axis_of(g, x)
    if axis is None:
        return None
    return tf.concat([x, x + tf.ones([], x.dtype)] if g.rng.integers(2) else [x, x, -x], axis)


def stack(g, x):
    return tf.stack([x, -x], axis=int(g.rng.integers(-1, x.shape.rank + 1)))


def unstack(g, x):
    axis = static_axis(g, x)
    return tf.unstack(x, axis=axis) if axis is not None and static(x, axis) <= 4 else None


def split(g, x):
    axis = static_axis(g, x)
    if axis is None:
        return None
    size = static(x, axis)
    if g.rng.integers(2):
        parts = [p for p in (1, 2, 3, size) if size % p == 0]
        return tf.split(x, int(g.rng.choice(parts)), axis)
    first = int(g.rng.integers(0, size + 1))
    return tf.split(x, [first, size - first] if g.rng.integers(2) else [first, -1], axis)


def strided(g, x):
    spec: list = []
    for d in x.shape.as_list():
        kind = int(g.rng.integers(6))
        if d is None:
            spec.append([slice(None), slice(None, None, -1), slice(None, None, 2)][kind % 3])
        elif kind == 0 and d:
            spec.append(int(g.rng.integers(-d, d)))
        else:
            a, b = sorted(int(v) for v in g.rng.integers(0, d + 1, 2))
            spec.append([slice(a, b), slice(a, None), slice(None, None, -1), slice(b, a, -1) if a else slice(None),
                         slice(a, b, 2)][kind - 1])
    if g.rng.random() < 0.2:
        spec.insert(int(g.rng.integers(len(spec) + 1)), None)
    return x[tuple(spec)]


def pad(g, x):
    if not x.shape.rank:
        return None
    amounts = [[int(v) for v in g.rng.integers(0, 3, 2)] for _ in range(x.shape.rank)]
    if g.rng.random() < 0.3 and all(d and d > 2 for d in x.shape.as_list()):
        return tf.pad(x, amounts, "REFLECT" if g.rng.integers(2) else "SYMMETRIC")
    return tf.pad(x, amounts, constant_values=tf.constant(2, x.dtype))


def tile(g, x):
    if g.rng.random() < 0.3 and x.shape.rank:
        return tf.tile(x[None], tf.stack([tf.shape(x)[0], *[1] * x.shape.rank]))
    return tf.tile(x, [int(v) for v in g.rng.integers(1, 3, x.shape.rank)])


def reverse(g, x):
    axis = axis_of(g, x)
    return None if axis is None else tf.reverse(x, [axis])


def roll(g, x):
    axis = static_axis(g, x)
    return None if axis is None else tf.roll(x, int(g.rng.integers(-3, 4)), axis)


def gather(g, x):
    axis = static_axis(g, x)
    if axis is None:
        return None
    index = tf.constant(g.rng.integers(0, static(x, axis),
                                       [int(v) for v in g.rng.integers(1, 4, int(g.rng.integers(0, 3)))]), I)
    return tf.gather(x, index, axis=axis)


def gather_nd(g, x):
    if not x.shape.rank or not static(x, 0):
        return None
    return tf.gather_nd(x, tf.constant(g.rng.integers(0, static(x, 0), [3, 1]), I))


def broadcast(g, x):
    return tf.broadcast_to(x[None], tf.concat([[2], tf.shape(x)], 0))


def like_shape(g, x):
    dtype = x.dtype
    kind = int(g.rng.integers(4))
    if kind == 0:
        return x + tf.cast(tf.shape(x)[0], dtype) if x.shape.rank else None
    if kind == 1:
        return tf.zeros(tf.shape(x), dtype) + x
    if kind == 2:
        return tf.fill(tf.concat([tf.shape(x), [2]], 0), tf.constant(3, dtype))
    return tf.range(tf.shape(x)[0] + 1) if x.shape.rank else None


def band(g, x):
    if x.shape.rank < 2:
        return None
    return tf.linalg.band_part(x, int(g.rng.integers(-1, 2)), int(g.rng.integers(-1, 2)))


def select(g, x):
    y = partner(g, x)
    condition = tf.constant(bool(g.rng.integers(2))) if g.rng.integers(2) else pick(g, lambda t: t.name in g.exact)
    if condition.dtype != tf.bool:
        if condition.shape.as_list() != x.shape.as_list():
            return None
        condition = condition > tf.constant(0, condition.dtype)
    return tf.where(condition, x, y)


MOVES = [reshape, squeeze, transpose, concat, stack, unstack, split, strided, pad, tile, reverse, roll, gather,
         gather_nd,
         broadcast, like_shape, band, select]
MENU = {F: [unary, unary, unary, jump, binary, binary, binary, reduction, normalise, scan, argmax, matmul, outer, bias],
        I: [int_unary, int_unary, int_binary, one_hot, reduction, argmax], None: MOVES}
KEEP_EXACT = {f.__name__ for f in MOVES} | {"jump"}
