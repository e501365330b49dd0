"""The workloads once more, over the operations of :mod:`.ops`: ``DEFINITIONS[name](o, weights)(*inputs)``.

``o`` is a library's operations and ``weights`` an iterator over the weights in the order in which the TensorFlow
workload of that name draws them.  Calls are idiomatic for the libraries (linear, layer_norm, attention).  A training
step (:data:`TRAINING`) returns its loss and the new weights.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

Array = Any
Ops = Any
Weights = Iterator[Array]
Layer = Callable[..., Array]

DEFINITIONS: dict[str, Callable[[Ops, Weights], Callable[..., Any]]] = {}
TRAINING = frozenset({"lr", "w2v"})
RATE = 0.1


def _define(make: Callable[[Ops, Weights], Callable[..., Any]]) -> Callable[[Ops, Weights], Callable[..., Any]]:
    DEFINITIONS[make.__name__] = make
    return make


# --- layers ----------------------------------------------------------------------------------------

def _dense(o: Ops, w: Weights, activation: Layer | None = None) -> Layer:
    kernel, bias = next(w), next(w)

    def call(x: Array) -> Array:
        y = o.linear(x, kernel, bias)
        return activation(y) if activation else y

    return call


def _mlp(o: Ops, w: Weights, sizes: list[int], last: Layer) -> Layer:
    count = len(list(pairwise(sizes)))
    layers = [_dense(o, w, o.relu if i + 1 < count else last) for i in range(count)]

    def call(x: Array) -> Array:
        for layer in layers:
            x = layer(x)
        return x

    return call


def _layer_norm(o: Ops, w: Weights, epsilon: float = 1e-5) -> Layer:
    gamma, beta = next(w), next(w)
    return lambda x: o.layer_norm(x, gamma, beta, epsilon)


def _conv_bn(o: Ops, w: Weights, stride: int = 1, activation: Layer | None = None, groups: int = 1) -> Layer:
    kernel, gamma, beta, mean, variance = next(w), next(w), next(w), next(w), next(w)

    def call(x: Array) -> Array:
        y = o.batch_norm(o.conv(x, kernel, stride, groups), gamma, beta, mean, variance, 1e-3)
        return activation(y) if activation else y

    return call


def _lstm(o: Ops, w: Weights, units: int) -> Callable[[list[Array]], list[Array]]:
    """The hidden state of every step of an unrolled LSTM that starts from zero."""
    cell = _lstm_cell(o, w)

    def call(steps: list[Array]) -> list[Array]:
        h = c = o.zeros_like(steps[0], (steps[0].shape[0], units))
        out = []
        for x in steps:
            h, c = cell(x, h, c)
            out.append(h)
        return out

    return call


def _lstm_cell(o: Ops, w: Weights) -> Callable[..., tuple[Array, Array]]:
    kernel, bias = next(w), next(w)

    def call(x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        i, f, g, out = o.split(o.linear(o.concat([x, h], 1), kernel, bias), 4, 1)
        c = o.sigmoid(f + 1.0) * c + o.sigmoid(i) * o.tanh(g)
        return o.sigmoid(out) * o.tanh(c), c

    return call


def _gru_cell(o: Ops, w: Weights) -> Layer:
    kernel, bias, kernel_c, bias_c = next(w), next(w), next(w), next(w)

    def call(x: Array, h: Array, attention: Array | None = None) -> Array:
        r, u = o.split(o.sigmoid(o.linear(o.concat([x, h], 1), kernel, bias)), 2, 1)
        candidate = o.tanh(o.linear(o.concat([x, r * h], 1), kernel_c, bias_c))
        u = u if attention is None else u * attention
        return (1.0 - u) * h + u * candidate

    return call


def _rows(x: Array) -> list[Array]:
    return [x[:, i] for i in range(x.shape[1])]


def _masked(o: Ops, scores: Array, lengths: Array) -> Array:
    """Scores [batch, n], those from a row's length on being -1e9."""
    return o.where(o.arange(scores, scores.shape[1])[None, :] < lengths[:, None], scores, -1e9)


# --- training steps --------------------------------------------------------------------------------

@_define
def lr(o: Ops, w: Weights) -> Callable[..., Any]:
    kernel, bias = next(w), next(w)

    def step(x: Array, labels: Array) -> tuple[Array, list[Array]]:
        def loss(kernel: Array, bias: Array) -> Array:
            return o.cross_entropy(o.matmul(x, kernel) + bias, labels)

        value, grads = o.value_and_grad(loss, (kernel, bias))
        return value, [o.add_to(p, -RATE * g) for p, g in zip((kernel, bias), grads)]

    return step


@_define
def w2v(o: Ops, w: Weights) -> Callable[..., Any]:
    centre, context = next(w), next(w)

    def step(words: Array, targets: Array, negatives: Array) -> tuple[Array, list[Array]]:
        def loss(v: Array, positive: Array, negative: Array) -> Array:
            near, far = o.sum(v * positive, 1), o.matmul(v, o.transpose(negative))
            return o.mean(o.softplus(-near) + o.sum(o.softplus(far), 1), 0)

        rows = (o.take(centre, words), o.take(context, targets), o.take(context, negatives))
        value, (for_words, *rest) = o.value_and_grad(loss, rows)
        ids = o.concat([targets, negatives], 0)
        return value, [o.add_rows(centre, words, -RATE * for_words),
                       o.add_rows(context, ids, -RATE * o.concat(list(rest), 0))]

    return step


# --- recurrent -------------------------------------------------------------------------------------

@_define
def rnn(o: Ops, w: Weights) -> Callable[..., Any]:
    lstm, out = _lstm(o, w, 128), _dense(o, w)
    return lambda x: out(lstm(_rows(x))[-1])


@_define
def birnn(o: Ops, w: Weights) -> Callable[..., Any]:
    ahead, back, out = _lstm(o, w, 128), _lstm(o, w, 128), _dense(o, w)
    return lambda x: out(o.concat([ahead(_rows(x))[-1], back(_rows(x)[::-1])[-1]], 1))


@_define
def speech(o: Ops, w: Weights) -> Callable[..., Any]:
    first, second, out = _lstm(o, w, 512), _lstm(o, w, 512), _dense(o, w)
    return lambda x: o.log_softmax(out(o.stack(second(first(_rows(x))), 1)))


@_define
def nmt(o: Ops, w: Weights) -> Callable[..., Any]:
    words, cells = next(w), [_lstm_cell(o, w), _lstm_cell(o, w)]
    key, mix, out = next(w), _dense(o, w, o.tanh), _dense(o, w)

    def call(memory: Array, lengths: Array, tokens: Array) -> Array:
        zero = o.zeros_like(memory, (memory.shape[0], 512))
        keys = o.matmul(memory, key)
        states, context, outputs = [(zero, zero), (zero, zero)], zero, []
        for word in _rows(o.take(words, tokens)):
            x = o.concat([word, context], 1)
            for i, cell in enumerate(cells):
                states[i] = cell(x, *states[i])
                x = states[i][0]
            weights = o.softmax(_masked(o, o.sum(keys * x[:, None, :], 2), lengths))
            context = mix(o.concat([x, o.sum(memory * weights[:, :, None], 1)], 1))
            outputs.append(context)
        return o.log_softmax(out(o.stack(outputs, 1)))

    return call


# --- recommenders ----------------------------------------------------------------------------------

@_define
def dien(o: Ops, w: Weights) -> Callable[..., Any]:
    items, match = next(w), next(w)
    interest, evolve = _gru_cell(o, w), _gru_cell(o, w)
    score = _mlp(o, w, [128, 200, 80, 2], o.softmax)

    def call(history: Array, lengths: Array, item: Array) -> Array:
        target = o.take(items, item)
        h, states = o.zeros_like(target, target.shape), []
        for x in _rows(o.take(items, history)):
            h = interest(x, h)
            states.append(h)
        logits = o.sum(o.stack(states, 1) * o.matmul(target, match)[:, None, :], 2)
        attention = o.softmax(_masked(o, logits, lengths))
        h = o.zeros_like(target, target.shape)
        for i, x in enumerate(states):
            h = evolve(x, h, attention[:, i:i + 1])
        return score(o.concat([h, target], 1))

    return call


@_define
def dlrm(o: Ops, w: Weights) -> Callable[..., Any]:
    count = 26
    tables = [next(w) for _ in range(count)]
    bottom = _mlp(o, w, [13, 512, 256, 64], o.relu)
    top, last = _mlp(o, w, [415, 512, 256], o.relu), _dense(o, w, o.sigmoid)

    def call(features: Array, ids: Array) -> Array:
        x = bottom(features)
        z = o.stack([x, *(o.take(t, ids[:, i]) for i, t in enumerate(tables))], 1)
        dots = o.matmul(z, o.transpose(z)).reshape(-1, (count + 1) ** 2)
        pairs = [i * (count + 1) + j for i in range(count + 1) for j in range(i)]
        return last(top(o.concat([x, o.columns(dots, pairs)], 1)))

    return call


# --- transformers ----------------------------------------------------------------------------------

HEADS = 12


def _heads(o: Ops, x: Array) -> Array:
    """[b, t, heads * d] -> [b, heads, t, d]."""
    return o.permute(x.reshape(x.shape[0], x.shape[1], HEADS, -1), (0, 2, 1, 3))


def _encoder_layer(o: Ops, w: Weights) -> Layer:
    q, k, v, out = (_dense(o, w) for _ in range(4))
    wide, narrow = _dense(o, w, o.gelu), _dense(o, w)
    first, second = _layer_norm(o, w, 1e-12), _layer_norm(o, w, 1e-12)

    def call(x: Array, bias: Array) -> Array:
        heads = o.attention(*(_heads(o, f(x)) for f in (q, k, v)), bias)
        x = first(x + out(o.permute(heads, (0, 2, 1, 3)).reshape(x.shape)))
        return second(x + narrow(wide(x)))

    return call


@_define
def bert(o: Ops, w: Weights) -> Callable[..., Any]:
    words, places, norm = next(w), next(w), _layer_norm(o, w, 1e-12)
    layers = [_encoder_layer(o, w) for _ in range(4)]
    pool = _dense(o, w, o.tanh)

    def call(tokens: Array, mask: Array) -> tuple[Array, Array]:
        x = norm(o.take(words, tokens) + places)
        bias = (1.0 - o.cast(mask[:, None, None, :], x)) * -1e9
        for layer in layers:
            x = layer(x, bias)
        return x, pool(x[:, 0, :])

    return call


def _decoder_layer(o: Ops, w: Weights) -> Callable[..., tuple[Array, Array, Array]]:
    before, after, qkv, out = _layer_norm(o, w), _layer_norm(o, w), _dense(o, w), _dense(o, w)
    wide, narrow = _dense(o, w, o.gelu_tanh), _dense(o, w)

    def call(x: Array, cache: Array, here: Array, bias: Array) -> tuple[Array, Array, Array]:
        parts = qkv(before(x)).reshape(-1, 3, HEADS, 1, 64)
        q, k, v = parts[:, 0], parts[:, 1], parts[:, 2]
        keys, values = o.where(here, k, cache[:, 0]), o.where(here, v, cache[:, 1])
        x = x + out(o.attention(q, keys, values, bias[None, None, None, :]).reshape(x.shape))
        return x + narrow(wide(after(x))), keys, values

    return call


@_define
def gpt2(o: Ops, w: Weights) -> Callable[..., Any]:
    words, places = next(w), next(w)
    layers, norm = [_decoder_layer(o, w) for _ in range(12)], _layer_norm(o, w)

    def call(token: Array, position: Array, cache: Array) -> tuple[Array, Array]:
        x = o.take(words, token) + o.take(places, position)
        steps = o.arange(x, cache.shape[4])
        here = (steps == position)[:, None]
        bias = o.where(steps <= position, o.zeros_like(x, steps.shape), -1e9)
        new = []
        for i, layer in enumerate(layers):
            x, keys, values = layer(x, cache[:, i], here, bias)
            new.append(o.stack([keys, values], 1))
        return o.matmul(norm(x), o.transpose(words)), o.stack(new, 1)

    return call


@_define
def layernorm(o: Ops, w: Weights) -> Callable[..., Any]:
    norm = _layer_norm(o, w)
    return lambda x: o.softmax(o.gelu(norm(x)))


# --- vision ----------------------------------------------------------------------------------------

def _residual(o: Ops, w: Weights, widens: bool, stride: int) -> Layer:
    first, second = _conv_bn(o, w, stride, o.relu), _conv_bn(o, w)
    short: Layer = _conv_bn(o, w, stride) if widens else lambda x: x
    return lambda x: o.relu(second(first(x)) + short(x))


@_define
def resnet18(o: Ops, w: Weights) -> Callable[..., Any]:
    stem = _conv_bn(o, w, 2, o.relu)
    blocks = [_residual(o, w, widens, 2 if widens else 1) for widens in (0, 0, 1, 0, 1, 0, 1, 0)]
    out = _dense(o, w, o.softmax)

    def call(x: Array) -> Array:
        x = o.max_pool(stem(o.image(x)), 3, 2)
        for block in blocks:
            x = block(x)
        return out(o.pool_all(x))

    return call


def _gates(o: Ops, w: Weights) -> Layer:
    down, up = _dense(o, w, o.relu), _dense(o, w)
    return lambda x: o.scale_channels(x, o.relu6(up(down(o.pool_all(x))) + 3.0) / 6.0)


def _inverted(o: Ops, w: Weights, inputs: int, spec: tuple[int, int, bool, Layer, int]) -> Layer:
    """Expand, depthwise, gates, project; spec: wide, channels, gates, activation, stride."""
    wide, channels, gates, activation, stride = spec
    expand: Layer = _conv_bn(o, w, 1, activation) if wide != inputs else lambda x: x
    depthwise = _conv_bn(o, w, stride, groups=wide)
    gate: Layer = _gates(o, w) if gates else lambda x: x
    project = _conv_bn(o, w)

    def call(x: Array) -> Array:
        y = project(gate(activation(depthwise(expand(x)))))
        return x + y if stride == 1 and inputs == channels else y

    return call


@_define
def mobilenetv3(o: Ops, w: Weights) -> Callable[..., Any]:
    def swish(x: Array) -> Array:
        return x * o.relu6(x + 3.0) / 6.0

    plan = [(16, 16, True, o.relu, 2), (72, 24, False, o.relu, 2), (88, 24, False, o.relu, 1),
            (96, 40, True, swish, 2), (240, 40, True, swish, 1), (240, 40, True, swish, 1), (120, 48, True, swish, 1),
            (144, 48, True, swish, 1), (288, 96, True, swish, 2), (576, 96, True, swish, 1), (576, 96, True, swish, 1)]
    stem, blocks, inputs = _conv_bn(o, w, 2, swish), [], 16
    for spec in plan:
        blocks.append(_inverted(o, w, inputs, spec))
        inputs = spec[1]
    last, head, out = _conv_bn(o, w, 1, swish), _dense(o, w, swish), _dense(o, w)

    def call(x: Array) -> Array:
        x = stem(o.image(x))
        for block in blocks:
            x = block(x)
        return out(head(o.pool_all(last(x))))

    return call
