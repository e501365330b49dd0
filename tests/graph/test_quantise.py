"""Quantisation-aware training's ops against TensorFlow, element by element: levels must be the same."""
from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

from tests.graph.support import case, run_cases

quant = tf.quantization
BITS = [(8, False), (8, True), (4, False), (16, True), (2, False)]
RANGES = [(-6.0, 6.0), (0.0, 6.0), (-1.0, 0.0), (-0.1, 1.7), (-3.3, 0.2)]


def values(*shape: int) -> np.ndarray:
    x = np.random.default_rng(len(shape)).normal(0, 4, shape).astype(np.float32)
    x.reshape(-1)[:6] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-30]
    return x


def test_ranges_in_attributes_and_tensors():
    cases = []
    for (bits, narrow), (low, high) in itertools.product(BITS, RANGES):
        how = {"num_bits": bits, "narrow_range": narrow}
        cases.append(case(lambda x, a=low, b=high, k=how: quant.fake_quant_with_min_max_args(x, a, b, **k),
                          values(40, 9), unknown=[0], elementwise=True))
        cases.append(case(lambda x, a, b, k=how: quant.fake_quant_with_min_max_vars(x, a, b, **k), values(40, 9),
                          np.float32(low), np.float32(high), unknown=[], elementwise=True))
    cases.append(case(quant.fake_quant_with_min_max_vars, values(3, 4), np.float32(0), np.float32(0)))
    # ranges that zero is not in are moved to it
    cases += [case(quant.fake_quant_with_min_max_vars, values(30, 4), np.float32(a), np.float32(b), elementwise=True)
              for a, b in ((1.0, 3.0), (-4.0, -2.0))]
    assert run_cases(cases).compared == len(cases)


def test_a_range_for_each_channel():
    lows, highs = (np.array([r[k] for r in [*RANGES, (0.0, 0.0)]], np.float32) for k in (0, 1))
    cases = [case(lambda x, a, b, n=bits, w=narrow: quant.fake_quant_with_min_max_vars_per_channel(x, a, b, n, w),
                  values(*shape, 6), lows, highs, elementwise=True)
             for bits, narrow in BITS for shape in ((), (20,), (3, 5), (2, 3, 4))]
    assert run_cases(cases).compared == len(cases)
