"""Chains that models are made of, as IR graphs: each should become one kernel."""
from __future__ import annotations

from tf_stitch.ir.builder import Builder


def _norm(b, x, axis_size, eps=1e-6):
    mean = b.ew("mul", b.reduce("sum", x, [-1], True), 1.0 / axis_size)
    centred = b.ew("sub", x, mean)
    var = b.ew("mul", b.reduce("sum", b.ew("mul", centred, centred), [-1], True), 1.0 / axis_size)
    return b.ew("mul", centred, b.ew("rsqrt", b.ew("add", var, eps)))


def _softmax(b, x):
    e = b.ew("exp", b.ew("sub", x, b.reduce("max", x, [-1], True)))
    return b.ew("div", e, b.reduce("sum", e, [-1], True))


def _gelu(b, x):
    return b.ew("mul", b.ew("mul", x, 0.5), b.ew("add", b.ew("erf", b.ew("mul", x, 0.70710678)), 1.0))


def _hswish(b, x):
    return b.ew("mul", x, b.ew("mul", b.ew("min", b.ew("max", b.ew("add", x, 3.0), 0.0), 6.0), 1 / 6))


def norm_gelu_softmax(rows=None, cols=1024):
    b = Builder()
    x, g, c = b.param([rows, cols], "float32"), b.param([cols], "float32"), b.param([cols], "float32")
    y = b.ew("add", b.ew("mul", _norm(b, x, cols), g), c)
    return b.finish([_softmax(b, _gelu(b, y))], "norm_gelu_softmax")


def _batch_norm(b, x, channels):
    gamma, beta, mean, var = (b.param([channels], "float32") for _ in range(4))
    scale = b.ew("mul", b.ew("rsqrt", b.ew("add", var, 1e-3)), gamma)
    return b.ew("add", b.ew("mul", x, scale), b.ew("sub", beta, b.ew("mul", mean, scale)))


def batch_norm_hswish(batch=None, side=14, channels=96):
    b = Builder()
    x = b.param([batch, side, side, channels], "float32")
    return b.finish([_hswish(b, _batch_norm(b, x, channels))], "batch_norm_hswish")


def residual_relu(batch=None, side=14, channels=64):
    """Two branches with their own normalisation, added."""
    b = Builder()
    x, y = (b.param([batch, side, side, channels], "float32") for _ in range(2))
    total = b.ew("add", _batch_norm(b, x, channels), _batch_norm(b, y, channels))
    return b.finish([b.ew("max", total, 0.0)], "residual_relu")


def pooled_norm(batch=None, side=7, channels=96):
    """Normalise, activate, average over space; both the map and the averages are wanted."""
    b = Builder()
    x = b.param([batch, side, side, channels], "float32")
    y = b.ew("mul", x, b.ew("sigmoid", _batch_norm(b, x, channels)))
    return b.finish([y, b.ew("mul", b.reduce("sum", y, [1, 2]), 1.0 / side**2)], "pooled_norm")


def squeeze_excite_gate(batch=None, side=14, channels=72):
    """A gate per channel on a map, with the bias of the layer before it."""
    b = Builder()
    shapes = [batch, side, side, channels], [batch, 1, 1, channels], [channels]
    x, s, bias = (b.param(shape, "float32") for shape in shapes)
    gate = b.ew("mul", b.ew("min", b.ew("max", b.ew("add", b.ew("add", s, bias), 3.0), 0.0), 6.0), 1 / 6)
    return b.finish([b.ew("mul", x, gate)], "squeeze_excite_gate")


def masked_softmax(batch=None, heads=8, length=None):
    b = Builder()
    scores = b.param([batch, heads, length, length], "float32")
    mask = b.param([batch, 1, 1, length], "bool")
    adder = b.ew("mul", b.ew("sub", 1.0, b.cast(mask, "float32")), -1e9)
    scaled = b.ew("add", b.ew("mul", scores, 0.125), adder)
    return b.finish([_softmax(b, scaled)], "masked_softmax")


def lstm_gates(batch=None, units=64):
    b = Builder()
    z, c, bias = (b.param(s, "float32") for s in ([batch, 4 * units], [batch, units], [4 * units]))
    z = b.ew("add", z, bias)
    i, f, g, o = (b.slice(z, [0, k * units], [z.shape[0], units]) for k in range(4))
    new = b.ew("add", b.ew("mul", b.ew("sigmoid", f), c), b.ew("mul", b.ew("sigmoid", i), b.ew("tanh", g)))
    return b.finish([b.ew("mul", b.ew("sigmoid", o), b.ew("tanh", new)), new], "lstm_gates")


def gru_gates(batch=None, units=64):
    b = Builder()
    x, h, state = (b.param([batch, n * units], "float32") for n in (3, 3, 1))
    part = [[b.slice(v, [0, k * units], [v.shape[0], units]) for k in range(3)] for v in (x, h)]
    z = b.ew("sigmoid", b.ew("add", part[0][0], part[1][0]))
    r = b.ew("sigmoid", b.ew("add", part[0][1], part[1][1]))
    new = b.ew("tanh", b.ew("add", part[0][2], b.ew("mul", r, part[1][2])))
    return b.finish([b.ew("add", b.ew("mul", z, state), b.ew("mul", b.ew("sub", 1.0, z), new))], "gru_gates")


def split_heads(batch=None, length=None, heads=4, depth=16):
    """Bias, reshape to heads, transpose."""
    b = Builder()
    x, bias = b.param([batch, length, heads * depth], "float32"), b.param([heads * depth], "float32")
    y = b.reshape(b.ew("add", x, bias), [*x.shape[:2], heads, depth])
    return b.finish([b.transpose(y, [0, 2, 1, 3])], "split_heads")


def embedding_sum_norm(batch=None, length=None, words=100, width=64):
    """Token and position embeddings, added and normalised."""
    b = Builder()
    tokens = b.param([batch, length], "int32")
    table, positions = b.param([words, width], "float32"), b.param([512, width], "float32")
    x = b.ew("add", b.gather(table, tokens), b.slice(positions, [0, 0], [tokens.shape[1], width]))
    g, c = b.param([width], "float32"), b.param([width], "float32")
    return b.finish([b.ew("add", b.ew("mul", _norm(b, x, width), g), c)], "embedding_sum_norm")


def norm_backward(rows=None, cols=256):
    """Gradients of a row normalisation: one per element, and two that sum over rows."""
    b = Builder()
    x, dy, g = b.param([rows, cols], "float32"), b.param([rows, cols], "float32"), b.param([cols], "float32")
    mean = b.ew("mul", b.reduce("sum", x, [-1], True), 1.0 / cols)
    centred = b.ew("sub", x, mean)
    var = b.ew("mul", b.reduce("sum", b.ew("mul", centred, centred), [-1], True), 1.0 / cols)
    inv = b.ew("rsqrt", b.ew("add", var, 1e-5))
    hat = b.ew("mul", centred, inv)
    dhat = b.ew("mul", dy, g)
    m1 = b.ew("mul", b.reduce("sum", dhat, [-1], True), 1.0 / cols)
    m2 = b.ew("mul", b.reduce("sum", b.ew("mul", dhat, hat), [-1], True), 1.0 / cols)
    dx = b.ew("mul", inv, b.ew("sub", b.ew("sub", dhat, m1), b.ew("mul", hat, m2)))
    return b.finish([dx, b.reduce("sum", b.ew("mul", dy, hat), [0]), b.reduce("sum", dy, [0])], "norm_backward")


def batch_norm_training(batch=32, side=14, channels=64):
    """Batch statistics, the normalised map and the new running averages."""
    b = Builder()
    x = b.param([batch, side, side, channels], "float32")
    gamma, beta, old_mean, old_var = (b.param([channels], "float32") for _ in range(4))
    scale = 1.0 / ((batch or 1) * side * side)
    mean = b.ew("mul", b.reduce("sum", x, [0, 1, 2]), scale)
    centred = b.ew("sub", x, mean)
    var = b.ew("mul", b.reduce("sum", b.ew("mul", centred, centred), [0, 1, 2]), scale)
    y = b.ew("add", b.ew("mul", b.ew("mul", centred, b.ew("rsqrt", b.ew("add", var, 1e-3))), gamma), beta)

    def running(old, new):
        return b.ew("add", b.ew("mul", old, 0.9), b.ew("mul", new, 0.1))

    return b.finish([b.ew("max", y, 0.0), running(old_mean, mean), running(old_var, var)], "batch_norm_training")


def cross_entropy(batch=None, classes=1000):
    """Mean loss of one-hot labels and its gradient."""
    b = Builder()
    x, labels = b.param([batch, classes], "float32"), b.param([batch], "int32")
    shifted = b.ew("sub", x, b.reduce("max", x, [-1], True))
    e = b.ew("exp", shifted)
    total = b.reduce("sum", e, [-1], True)
    hot = b.cast(b.ew("eq", b.iota(x.shape, 1, "int32"), b.reshape(labels, [x.shape[0], 1])), "float32")
    loss = b.reduce("sum", b.ew("mul", hot, b.ew("sub", b.ew("log", total), shifted)), [0, 1])
    return b.finish([loss, b.ew("sub", b.ew("div", e, total), hot)], "cross_entropy")


def small_attention(batch=None, heads=2, length=16, depth=8):
    """Scores, softmax and weighted values of a small attention: products inside the kernel."""
    b = Builder()
    q, k, v = (b.param([batch, heads, length, depth], "float32") for _ in range(3))
    scores = b.dot(q, k, ((0, 1), (0, 1)), ((3,), (3,)))
    shares = _softmax(b, b.ew("mul", scores, depth**-0.5))
    return b.finish([b.dot(shares, v, ((0, 1), (0, 1)), ((3,), (2,)))], "small_attention")


CHAINS = [norm_gelu_softmax, batch_norm_hswish, residual_relu, pooled_norm, squeeze_excite_gate, masked_softmax,
          lstm_gates, gru_gates, split_heads, embedding_sum_norm, small_attention]
TRAINING = [norm_backward, batch_norm_training, cross_entropy]
