"""DIEN and DLRM: embeddings, small dense layers, many small ops."""
from __future__ import annotations

import numpy as np
import tensorflow as tf

from .layers import dense, gru_cell, mlp
from .workload import Function, Inputs, Params, workload

ITEMS, HISTORY, EMBEDDING = 10_000, 20, 64
TABLES, ROWS, DENSE = 26, 10_000, 13


def _clicks(rng: np.random.Generator, batch: int) -> Inputs:
    lengths = rng.integers(HISTORY // 2, HISTORY + 1, batch, np.int32)
    return [rng.integers(0, ITEMS, (batch, HISTORY), np.int32), lengths, rng.integers(0, ITEMS, batch, np.int32)]


@workload("dien", "interest evolution: 20 GRU and 20 AUGRU steps with attention, 64 dims, batch 128", batch=128,
          inputs=_clicks, batched=(True, True, True))
def make_dien(p: Params) -> Function:
    """DIEN (arXiv 1809.03672): interests by a GRU, attention to the target, evolution by an AUGRU, a small MLP."""
    items, match = p.normal(ITEMS, EMBEDDING, scale=0.5), p.weight(EMBEDDING, EMBEDDING)
    interest, evolve = gru_cell(p, EMBEDDING, EMBEDDING), gru_cell(p, EMBEDDING, EMBEDDING)
    score = mlp(p, [2 * EMBEDDING, 200, 80, 2], tf.nn.softmax)

    def call(history: tf.Tensor, lengths: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
        target = tf.gather(items, item)
        h = tf.zeros_like(target)
        states = []
        for x in tf.unstack(tf.gather(items, history), axis=1):
            h = interest(x, h)
            states.append(h)
        seen = tf.stack(states, 1)
        logits = tf.reduce_sum(seen * tf.matmul(target, match)[:, None, :], 2)
        logits = tf.where(tf.sequence_mask(lengths, HISTORY), logits, tf.constant(-1e9, logits.dtype))
        attention = tf.nn.softmax(logits)
        h = tf.zeros_like(target)
        for i, x in enumerate(states):
            h = evolve(x, h, attention[:, i : i + 1])
        return score(tf.concat([h, target], 1))

    return call


def _impressions(rng: np.random.Generator, batch: int) -> Inputs:
    return [rng.random((batch, DENSE), np.float32), rng.integers(0, ROWS, (batch, TABLES), np.int32)]


@workload("dlrm", "DLRM: 13 dense features, 26 tables of 10k x 64, pairwise dots, batch 128", batch=128,
          inputs=_impressions, batched=(True, True))
def make_dlrm(p: Params) -> Function:
    """DLRM (arXiv 1906.00091) with dot interaction."""
    tables = [p.normal(ROWS, EMBEDDING, scale=0.2) for _ in range(TABLES)]
    bottom = mlp(p, [DENSE, 512, 256, EMBEDDING], tf.nn.relu)
    pairs = np.stack(np.tril_indices(TABLES + 1, -1), 1)
    flat = (pairs[:, 0] * (TABLES + 1) + pairs[:, 1]).astype(np.int32)
    top, last = mlp(p, [EMBEDDING + len(flat), 512, 256], tf.nn.relu), dense(p, 256, 1, tf.sigmoid)

    def call(features: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        x = bottom(features)
        rows = [tf.gather(t, ids[:, i]) for i, t in enumerate(tables)]
        z = tf.stack([x, *rows], 1)
        dots = tf.reshape(tf.matmul(z, z, transpose_b=True), [-1, (TABLES + 1) ** 2])
        return last(top(tf.concat([x, tf.gather(dots, flat, axis=1)], 1)))

    return call
