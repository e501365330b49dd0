"""Quantisation-aware training's ops against TensorFlow, element by element: levels must be the same."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import case, imported, run_cases
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

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


def test_quantised_and_back():
    """Given and found ranges, both roundings, an axis, types, ends of which either decides; a range of nothing."""
    cases = []
    x = np.random.default_rng(5).normal(0, 2, (6, 4, 5)).astype(np.float32)
    for dtype, signed, narrow, bits, mode, axis in itertools.product(
            ("float32", "float64"), (True, False), (False, True), (4, 8), ("HALF_TO_EVEN", "HALF_UP"),
            (-1, 1)):
        how = {"signed_input": signed, "num_bits": bits, "round_mode": mode, "narrow_range": narrow, "axis": axis}
        found = 0.0 if axis == -1 else np.zeros(4)
        cases.append(case(lambda x, k=how, r=found, t=dtype: tf.raw_ops.QuantizeAndDequantizeV4(
            input=tf.cast(x, t), input_min=tf.cast(r, t), input_max=tf.cast(r, t), **k), x, unknown=[0]))
        for low, high in ((-1.0, 1.5), (-3.0, 0.5), (0.25, 1.0)) if axis == -1 else ():
            cases.append(case(lambda x, k=how, a=low, b=high, t=dtype: tf.raw_ops.QuantizeAndDequantizeV4(
                input=tf.cast(x, t), input_min=tf.cast(a, t), input_max=tf.cast(b, t), range_given=True, **k), x,
                unknown=[0]))
    cases.append(case(lambda x: tf.raw_ops.QuantizeAndDequantizeV3(
        input=x, input_min=0.0, input_max=0.0, num_bits=6, range_given=False), x))
    cases += [case(lambda x: tf.raw_ops.QuantizeAndDequantizeV2(input=x, input_min=0.0, input_max=0.0),
                   np.full((3,), v, np.float32)) for v in (0.0, 1.0, -1.0)]
    assert run_cases(cases).compared == len(cases)


def test_a_range_the_wrong_way_round_is_an_error():
    def build(x):
        return tf.raw_ops.QuantizeAndDequantizeV2(input=x, input_min=1.0, input_max=-1.0, range_given=True)

    graph = tf.Graph()
    with graph.as_default():
        out = build(tf.compat.v1.placeholder(tf.float32, [3]))
    ir, _ = imported(GraphView(graph.as_graph_def()), [out])
    with pytest.raises(IndexError):
        interp.run(ir, [np.ones(3, np.float32)])


def test_gradients():
    """Ranges around zero, beside it, and of nothing; values at their ends, and that are no numbers."""
    cases = []
    g = np.random.default_rng(9).uniform(0.1, 1, (40, 4)).astype(np.float32)  # sums that cancel have few digits
    for (bits, narrow), (low, high) in itertools.product(BITS, [*RANGES, (1.0, 3.0), (-4.0, -2.0)]):
        how = {"num_bits": bits, "narrow_range": narrow}
        x = values(40, 4)
        x[5, :2] = low, high
        cases.append(case(lambda g, x, a=low, b=high, k=how: quant.fake_quant_with_min_max_args_gradient(
            g, x, a, b, **k), g, x, unknown=[0], elementwise=True))
        cases.append(case(lambda g, x, a, b, k=how: list(quant.fake_quant_with_min_max_vars_gradient(
            g, x, a, b, **k)), g, x, np.float32(low), np.float32(high), unknown=[]))
    cases.append(case(lambda g, x, a, b: list(quant.fake_quant_with_min_max_vars_gradient(g, x, a, b)), g,
                      values(40, 4), np.float32(0), np.float32(0)))
    lows, highs = (np.array([r[k] for r in [*RANGES[:3], (0.0, 0.0)]], np.float32) for k in (0, 1))
    for shape in ((4,), (20, 4), (2, 3, 5, 4)):
        g = np.random.default_rng(len(shape)).normal(0, 1, shape).astype(np.float32)
        x = np.random.default_rng(8).normal(0, 4, shape).astype(np.float32)
        cases.append(case(lambda g, x, a, b: list(quant.fake_quant_with_min_max_vars_per_channel_gradient(g, x, a, b)),
                          g, x, lows, highs))
    assert run_cases(cases).compared == len(cases)
