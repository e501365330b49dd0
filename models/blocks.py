"""Single blocks: memory-bound chains without a library call."""
from __future__ import annotations

import numpy as np
import tensorflow as tf

from .layers import layer_norm
from .workload import Function, Inputs, Params, workload


def _rows(rng: np.random.Generator, batch: int) -> Inputs:
    return [rng.standard_normal((batch, 1024)).astype(np.float32)]


@workload("layernorm", "layer norm + GELU + softmax, 4096 x 1024 float32", batch=4096, inputs=_rows)
def make_layernorm(p: Params) -> Function:
    norm = layer_norm(p, 1024)
    return lambda x: tf.nn.softmax(tf.nn.gelu(norm(x)))
