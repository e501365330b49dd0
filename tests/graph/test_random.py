"""Random numbers that follow from a seed: those that TensorFlow's kernels give."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import case, run_cases

raw = tf.raw_ops
SEEDS = [(0, 0), (1, 2), (-3, 2**31 - 1), (12345, -2**31)]
SHAPES = [(), (0,), (1,), (3,), (4,), (257,), (5, 3), (2, 0, 7), (3, 4, 6)]
FLOATS = ["float32", "float64", "float16", "bfloat16"]


def seeds(dtype: str = "int32") -> list[list[np.ndarray]]:
    return [[np.array(s, dtype)] for s in SEEDS]


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform(dtype):
    """Bit for bit."""
    cases = []
    for shape in SHAPES:
        for fn in (tf.random.stateless_uniform, lambda s, seed, dtype: raw.StatelessRandomUniform(
                shape=s, seed=seed, dtype=dtype)):
            cases.append(case(lambda s, fn=fn, shape=shape: fn(shape, s, dtype=dtype), np.array(SEEDS[0], np.int32),
                              tolerance=0.0))
            cases[-1].inputs = seeds()
    assert run_cases(cases).compared == len(SEEDS) * len(cases)


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal(dtype):
    """The functions that the radius and the angle go through are rounded differently."""
    cases = []
    for shape in SHAPES:
        for fn in (tf.random.stateless_normal, lambda s, seed, dtype: raw.StatelessRandomNormal(
                shape=s, seed=seed, dtype=dtype)):
            cases.append(case(lambda s, fn=fn, shape=shape: fn(shape, s, dtype=dtype), np.array(SEEDS[0], np.int64),
                              tolerance=2.0))
            cases[-1].inputs = [[np.array(s)] for s in (*SEEDS, (2**62 + 5, -2**61))]
    assert run_cases(cases).compared == (len(SEEDS) + 1) * len(cases)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_integers(dtype):
    cases = []
    for shape in SHAPES:
        cases.append(case(lambda s, shape=shape: tf.random.stateless_uniform(
            shape, s, minval=None, maxval=None, dtype=dtype), np.array(SEEDS[0], np.int32)))
        if dtype.startswith("int"):
            cases.append(case(lambda s, shape=shape: tf.random.stateless_uniform(
                shape, s, minval=tf.constant(-5, dtype), maxval=tf.constant(2**30, dtype), dtype=dtype),
                np.array(SEEDS[0], np.int32)))
    for c in cases:
        c.inputs = seeds()
    assert run_cases(cases).compared == len(SEEDS) * len(cases)


def test_keys_and_counters_are_tensors_too():
    """Counters that overflow a word and both words."""
    cases = [case(lambda seed: raw.StatelessRandomGetKeyCounter(seed=seed), np.array([7, -9], dtype))
             for dtype in (np.int32, np.int64)]
    cases += [case(lambda key, counter: raw.StatelessRandomUniformV2(
        shape=[31], key=key, counter=counter, alg=1), np.array([key], np.uint64), np.array(counter, np.uint64),
        tolerance=0.0) for key, counter in ((5, (0, 0)), (2**63 + 11, (2**32 - 3, 1)), (1, (2**64 - 2, 7)),
                                            (2**64 - 1, (2**64 - 3, 2**64 - 1)))]
    assert run_cases(cases).compared == len(cases)


def test_dropout_of_images_of_an_unknown_size():
    def build(x, seed):
        return tf.nn.experimental.stateless_dropout(x, 0.3, seed)

    c = case(build, np.ones((2, 5, 7), np.float32), np.array([3, 4], np.int32), tolerance=1.0)
    c.shapes[0] = [None, None, 7]
    c.inputs += [[np.full((n, m, 7), 2.0, np.float32), np.array([n, m], np.int32)] for n, m in ((1, 1), (0, 3), (9, 2))]
    assert run_cases([c]).compared == 4


def test_another_generator_stays_tensorflows():
    from tf_stitch.graph import lower
    from tf_stitch.graph.view import GraphView

    with tf.Graph().as_default() as graph:
        out = raw.StatelessRandomUniformV2(shape=[3], key=tf.constant([1], tf.uint64), alg=2,
                                           counter=tf.constant([1], tf.uint64))
    assert "not Philox" in lower.why_not(GraphView(graph.as_graph_def()), out.op.name)
