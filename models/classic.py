"""LR and W2V: training steps of small models (the first two workloads of arXiv 1811.05213)."""
from __future__ import annotations

import numpy as np
import tensorflow as tf

from .workload import Function, Inputs, Params, workload

VOCABULARY, DIMS, NEGATIVES = 50_000, 200, 64


def _digits(rng: np.random.Generator, batch: int) -> Inputs:
    return [rng.random((batch, 784), np.float32), rng.integers(0, 10, batch, np.int32)]


@workload("lr", "logistic regression train step, 784-10, batch 100", batch=100, inputs=_digits,
          batched=(True, True), training=True)
def make_lr(p: Params) -> Function:
    w, b = p.normal(784, 10, scale=0.01), p.bias(10)

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = tf.matmul(x, w) + b
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for var, grad in zip((w, b), tape.gradient(loss, (w, b)), strict=True):
            var.assign_sub(0.1 * grad)
        return loss

    return step


def _pairs(rng: np.random.Generator, batch: int) -> Inputs:
    words = [rng.integers(0, VOCABULARY, n, np.int32) for n in (batch, batch, NEGATIVES)]
    return list(words)


@workload("w2v", "skip-gram train step, 50k words, 200 dims, 64 negatives, batch 128", batch=128, inputs=_pairs,
          batched=(True, True, False), training=True)
def make_w2v(p: Params) -> Function:
    centre, context = p.normal(VOCABULARY, DIMS, scale=0.1), p.normal(VOCABULARY, DIMS, scale=0.1)

    def step(words: tf.Tensor, targets: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            v = tf.gather(centre, words)
            positive = tf.reduce_sum(v * tf.gather(context, targets), 1)
            negative = tf.matmul(v, tf.gather(context, negatives), transpose_b=True)
            loss = tf.reduce_mean(tf.nn.softplus(-positive) + tf.reduce_sum(tf.nn.softplus(negative), 1))
        for var, grad in zip((centre, context), tape.gradient(loss, (centre, context)), strict=True):
            var.scatter_sub(tf.IndexedSlices(0.1 * grad.values, grad.indices))
        return loss

    return step
