"""RNN, BiRNN, Speech and NMT: unrolled recurrent networks."""
from __future__ import annotations

import numpy as np
import tensorflow as tf

from .layers import dense, lstm_cell, run_lstm
from .workload import Function, Inputs, Params, workload

SOURCE, STEPS, UNITS, VOCABULARY = 32, 4, 512, 8_000


def _images(rng: np.random.Generator, batch: int) -> Inputs:
    return [rng.random((batch, 28, 28), np.float32)]


@workload("rnn", "LSTM over 28 rows of 28, 128 units, batch 128", batch=128, inputs=_images)
def make_rnn(p: Params) -> Function:
    cell, out = lstm_cell(p, 28, 128), dense(p, 128, 10)
    return lambda x: out(run_lstm(cell, tf.unstack(x, axis=1), 128)[-1])


@workload("birnn", "forward and backward LSTM over 28 rows, 128 units each, batch 128", batch=128, inputs=_images)
def make_birnn(p: Params) -> Function:
    ahead, back, out = lstm_cell(p, 28, 128), lstm_cell(p, 28, 128), dense(p, 256, 10)

    def call(x: tf.Tensor) -> tf.Tensor:
        rows = tf.unstack(x, axis=1)
        return out(tf.concat([run_lstm(ahead, rows, 128)[-1], run_lstm(back, rows[::-1], 128)[-1]], 1))

    return call


def _frames(rng: np.random.Generator, batch: int) -> Inputs:
    return [rng.standard_normal((batch, 40, 80)).astype(np.float32)]


@workload("speech", "2 LSTM layers of 512 over 40 frames of 80, 29 characters, batch 1", batch=1, inputs=_frames)
def make_speech(p: Params) -> Function:
    first, second, out = lstm_cell(p, 80, UNITS), lstm_cell(p, UNITS, UNITS), dense(p, UNITS, 29)

    def call(x: tf.Tensor) -> tf.Tensor:
        hidden = run_lstm(second, run_lstm(first, tf.unstack(x, axis=1), UNITS), UNITS)
        return tf.nn.log_softmax(out(tf.stack(hidden, 1)))

    return call


def _translation(rng: np.random.Generator, batch: int) -> Inputs:
    memory = rng.standard_normal((batch, SOURCE, UNITS)).astype(np.float32)
    lengths = rng.integers(SOURCE // 2, SOURCE + 1, batch, np.int32)
    return [memory, lengths, rng.integers(0, VOCABULARY, (batch, STEPS), np.int32)]


@workload("nmt", "2-layer LSTM decoder of 512 with attention over 32 words, 4 given words, batch 4", batch=4,
          inputs=_translation, batched=(True, True, True))
def make_nmt(p: Params) -> Function:
    """Luong attention with input feeding (arXiv 1508.04025); the words are given, as in scoring."""
    words = p.normal(VOCABULARY, UNITS, scale=0.5)
    cells = [lstm_cell(p, 2 * UNITS, UNITS), lstm_cell(p, UNITS, UNITS)]
    key, mix, out = p.weight(UNITS, UNITS), dense(p, 2 * UNITS, UNITS, tf.tanh), dense(p, UNITS, VOCABULARY)

    def call(memory: tf.Tensor, lengths: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
        zero = tf.zeros([tf.shape(memory)[0], UNITS], memory.dtype)
        keys = tf.reshape(tf.matmul(tf.reshape(memory, [-1, UNITS]), key), [-1, SOURCE, UNITS])
        hidden = tf.sequence_mask(lengths, SOURCE)
        states, context, outputs = [[zero, zero], [zero, zero]], zero, []
        for word in tf.unstack(tf.gather(words, tokens), axis=1):
            x = tf.concat([word, context], 1)
            for i, cell in enumerate(cells):
                states[i] = list(cell(x, *states[i]))
                x = states[i][0]
            scores = tf.reduce_sum(keys * x[:, None, :], 2)
            weights = tf.nn.softmax(tf.where(hidden, scores, tf.constant(-1e9, scores.dtype)))
            read = tf.reduce_sum(memory * weights[:, :, None], 1)
            context = mix(tf.concat([x, read], 1))
            outputs.append(context)
        return tf.nn.log_softmax(out(tf.stack(outputs, 1)))

    return call
