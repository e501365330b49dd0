"""Reductions, arg-reductions and scans against TensorFlow."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import case, has_kernel, imported, run_cases
from tf_stitch.errors import ImportFailed
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

raw = tf.raw_ops
SHAPES = [(4, 3, 5), (1, 6), (7,), (0, 3), (3, 0), ()]


def random(dtype: str, shape, seed: int, nans: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    t = tf.as_dtype(dtype).as_numpy_dtype
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if np.dtype(t).kind in "iu":
        return rng.integers(0 if np.dtype(t).kind == "u" else -5, 6, shape).astype(t)
    x = rng.normal(size=shape)
    if nans and x.size:
        x.reshape(-1)[rng.integers(0, x.size, 3)] = [np.nan, np.inf, -np.inf]
    return x.astype(t)


def axes_of(rank: int, rng: np.random.Generator):
    """Some axes, positive or negative, also none and a bare number."""
    chosen = [int(a) - (rank if rng.integers(2) else 0) for a in np.flatnonzero(rng.integers(0, 2, rank))]
    return chosen[0] if len(chosen) == 1 and rng.integers(2) else chosen


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("op", ["Sum", "Prod", "Max", "Min", "Mean", "EuclideanNorm"])
def test_reductions(op, dtype):
    if op == "EuclideanNorm" and not dtype.startswith(("float", "bfloat")):
        pytest.skip("taken for floats only")
    if not has_kernel(op, dtype):
        pytest.skip("TensorFlow has no kernel")
    cases = []
    for seed, shape in enumerate(SHAPES * 3):
        rng = np.random.default_rng(seed)
        axes = np.array(axes_of(len(shape), rng), np.int32 if seed % 2 else np.int64)
        if op == "Mean" and dtype[0] in "iu" and 0 in shape:
            continue  # an integer mean of nothing divides by zero
        x = random(dtype, shape, seed, nans=op in ("Max", "Min") and seed % 3 == 0)
        keep = bool(rng.integers(2))
        for unknown in (False, True):
            cases.append(case(lambda t, a=axes, k=keep: getattr(raw, op)(input=t, axis=a, keep_dims=k), x,
                              unknown=unknown,
                              tolerance=4))
    assert run_cases(cases).compared >= 20


@pytest.mark.parametrize("op", ["All", "Any"])
def test_logical(op):
    cases = [case(lambda t, a=axes, k=keep: getattr(raw, op)(input=t, axis=np.array(a, np.int32), keep_dims=k),
                  random("bool", (3, 2, 4), 7), unknown=[0])
             for axes, keep in itertools.product([[0], [1, -1], [0, 1, 2], [], -2], [False, True])]
    cases.append(case(lambda t: getattr(raw, op)(input=t, axis=[0]), np.zeros((0, 3), bool)))
    assert run_cases(cases).compared == 11


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_arg_reductions(op):
    """First of equal extremes; NaN as in TensorFlow; every output type."""
    cases = []
    for seed, (dtype, out) in enumerate(itertools.product(["float32", "float64", "float16", "int32", "uint8", "bool"],
                                                          ["int64", "int32"])):
        if not has_kernel(op, dtype):
            continue
        for axis in (0, -1, 1):
            x = random(dtype, (5, 6, 3), seed, nans=seed % 2 == 0)
            if dtype.startswith("float"):
                x = np.round(x)  # ties
            cases.append(case(lambda t, a=axis, o=out: getattr(raw, op)(input=t, dimension=a, output_type=o), x,
                              unknown=[1]))
    nan = np.full((3, 4), np.nan, np.float32)
    lowest = np.full((3, 4), -np.inf if op == "ArgMax" else np.inf, np.float32)
    lowest[1, 2] = np.nan
    for x in (nan, lowest):
        cases.append(case(lambda t: getattr(raw, op)(input=t, dimension=1, output_type=tf.int64), x))
    assert run_cases(cases).compared >= 20


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_an_empty_axis_is_refused_as_tensorflow_does(op):
    with tf.Graph().as_default() as graph:
        known, unknown = tf.compat.v1.placeholder(tf.float32, [3, 0]), tf.compat.v1.placeholder(tf.float32, [3, None])
        made = [getattr(raw, op)(input=t, dimension=1) for t in (known, unknown)]
    view = GraphView(graph.as_graph_def())
    with pytest.raises(ImportFailed, match="empty axis"):
        imported(view, made[:1])
    ir, _ = imported(view, made[1:])
    with pytest.raises(interp.GuardFailed, match="empty axis"):
        interp.run(ir, [np.zeros((3, 0), np.float32)])


@pytest.mark.parametrize("op", ["Cumsum", "Cumprod"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
def test_scans(op, dtype):
    cases = []
    for axis, exclusive, reverse in itertools.product([0, 1, -1], [False, True], [False, True]):
        for shape in [(4, 5, 3), (0, 3), (1, 1)]:
            x = random(dtype, shape, axis + 5)
            a = axis if axis < len(shape) else 0
            how = {"axis": a, "exclusive": exclusive, "reverse": reverse}
            cases.append(case(lambda t, k=how: getattr(raw, op)(x=t, **k), x, unknown=[0], tolerance=4))
    assert run_cases(cases).compared == len(cases)


def test_l2_loss():
    cases = [case(lambda t: tf.nn.l2_loss(t), random(d, s, 3), unknown=[0], tolerance=4)
             for d in ("float32", "float64", "float16", "bfloat16") for s in [(4, 5), (0,), (17,)]]
    assert run_cases(cases).compared == 12


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_cumulative_logsumexp(dtype):
    """Prefixes far below the row's maximum keep their digits; infinities; no elements; both flags, any axis."""
    x = np.random.default_rng(3).normal(0, 3, (3, 6, 4)).astype(dtype)
    x[0, :, 0] = [-60, -50, 0, 10, 60, -60]
    x[0, :3, 1] = -np.inf
    x[1, 2, 1] = np.inf
    cases = [case(lambda x, a=axis, e=exclusive, r=reverse: raw.CumulativeLogsumexp(
                      x=x, axis=a, exclusive=e, reverse=r), data, unknown=unknown, elementwise=dtype != "float16")
             for data in (x, x[:, :0]) for axis in (0, 1, -1) for exclusive in (False, True)
             for reverse in (False, True) for unknown in (False, True)]
    assert run_cases(cases).compared == len(cases)


def test_targets_among_the_largest():
    """Ties count for the target, targets outside and rows with what is not finite never do; k of 0 and beyond."""
    x = np.round(np.random.default_rng(4).normal(0, 2, (40, 6))).astype(np.float32)
    x[3, 2], x[4, 1], x[5, 0] = np.nan, np.inf, -np.inf
    cases = []
    for ids in ("int32", "int64"):
        targets = np.random.default_rng(5).integers(-1, 8, 40).astype(ids)
        for k in (0, 1, 2, 6, 9):
            cases += [case(lambda x, t, k=k: raw.InTopKV2(predictions=x, targets=t, k=tf.cast(k, t.dtype)), x, targets,
                           unknown=unknown) for unknown in (False, [0], True)]
            cases.append(case(lambda x, t, k=k: raw.InTopK(predictions=x, targets=t, k=k), x, targets))
    assert run_cases(cases).compared == len(cases)
