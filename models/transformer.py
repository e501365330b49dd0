"""BERT encoder and one GPT-2 decode step."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from .layers import attend, dense, join_heads, layer_norm, split_heads
from .workload import Function, Inputs, Params, workload

WIDTH, HEADS, TOKENS = 768, 12, 128
BERT_LAYERS, BERT_WORDS = 4, 30_522
GPT_LAYERS, GPT_WORDS, CONTEXT = 12, 50_257, 256


def _gelu(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.gelu(x)


def _sentence(rng: np.random.Generator, batch: int) -> Inputs:
    lengths = rng.integers(TOKENS // 2, TOKENS + 1, batch)
    mask = (np.arange(TOKENS) < lengths[:, None]).astype(np.int32)
    return [rng.integers(0, BERT_WORDS, (batch, TOKENS), np.int32), mask]


def _encoder_layer(p: Params) -> Callable[..., tf.Tensor]:
    """Post-norm encoder layer (arXiv 1810.04805): (x, score bias) -> x."""
    q, k, v, o = (dense(p, WIDTH, WIDTH) for _ in range(4))
    wide, narrow = dense(p, WIDTH, 4 * WIDTH, _gelu), dense(p, 4 * WIDTH, WIDTH)
    first, second = layer_norm(p, WIDTH, 1e-12), layer_norm(p, WIDTH, 1e-12)

    def call(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        heads = attend(*(split_heads(f(x), HEADS) for f in (q, k, v)), bias)
        x = first(x + o(join_heads(heads)))
        return second(x + narrow(wide(x)))

    return call


@workload("bert", "4 BERT-base layers, 128 tokens, batch 1", batch=1, inputs=_sentence, batched=(True, True))
def make_bert(p: Params) -> Function:
    words, places = p.normal(BERT_WORDS, WIDTH, scale=0.02), p.normal(TOKENS, WIDTH, scale=0.02)
    norm = layer_norm(p, WIDTH, 1e-12)
    layers = [_encoder_layer(p) for _ in range(BERT_LAYERS)]
    pool = dense(p, WIDTH, WIDTH, tf.tanh)

    def call(tokens: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = norm(tf.gather(words, tokens) + places)
        bias = (1.0 - tf.cast(mask[:, None, None, :], x.dtype)) * -1e9
        for layer in layers:
            x = layer(x, bias)
        return x, pool(x[:, 0, :])

    return call


def _decode_inputs(rng: np.random.Generator, batch: int) -> Inputs:
    cache = rng.standard_normal((batch, GPT_LAYERS, 2, HEADS, CONTEXT, WIDTH // HEADS)).astype(np.float32)
    return [rng.integers(0, GPT_WORDS, batch, np.int32), np.array(CONTEXT // 2, np.int32), cache]


def _decoder_layer(p: Params) -> Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """Pre-norm layer with a key/value cache [b, 2, heads, context, d]: (x, cache, here, bias) -> (x, key, value)."""
    before, after = layer_norm(p, WIDTH), layer_norm(p, WIDTH)
    qkv, o = dense(p, WIDTH, 3 * WIDTH), dense(p, WIDTH, WIDTH)
    wide = dense(p, WIDTH, 4 * WIDTH, lambda y: tf.nn.gelu(y, approximate=True))
    narrow = dense(p, 4 * WIDTH, WIDTH)

    def call(x: tf.Tensor, cache: tf.Tensor, here: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, ...]:
        parts = tf.reshape(qkv(before(x)), [-1, 3, HEADS, 1, WIDTH // HEADS])
        q, k, v = parts[:, 0], parts[:, 1], parts[:, 2]
        keys, values = tf.where(here, k, cache[:, 0]), tf.where(here, v, cache[:, 1])
        x = x + o(tf.reshape(attend(q, keys, values, bias), [-1, WIDTH]))
        return x + narrow(wide(after(x))), keys, values

    return call


@workload("gpt2", "one GPT-2 (124M) decode step with a cache of 256 places, batch 1", batch=1, inputs=_decode_inputs,
          batched=(True, False, True))
def make_gpt2(p: Params) -> Function:
    words, places = p.normal(GPT_WORDS, WIDTH, scale=0.02), p.normal(CONTEXT, WIDTH, scale=0.02)
    layers = [_decoder_layer(p) for _ in range(GPT_LAYERS)]
    norm = layer_norm(p, WIDTH)

    def call(token: tf.Tensor, position: tf.Tensor, cache: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.gather(words, token) + tf.gather(places, position)
        steps = tf.range(CONTEXT)
        here = (steps == position)[:, None]
        bias = tf.where(steps <= position, tf.constant(0.0, x.dtype), tf.constant(-1e9, x.dtype))
        new = []
        for i, layer in enumerate(layers):
            x, keys, values = layer(x, cache[:, i], here, bias)
            new.append(tf.stack([keys, values], 1))
        return tf.matmul(norm(x), words, transpose_b=True), tf.stack(new, 1)

    return call
