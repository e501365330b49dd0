"""Segments, scattered rows, the largest elements of rows and places in sorted rows, against TensorFlow."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.support import Case, case, has_kernel, imported, ref_of, run_cases, spec
from tf_stitch.errors import ImportFailed
from tf_stitch.graph.lower import segments
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

raw = tf.raw_ops
NUMBERS = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int16"]
KINDS = ["Sum", "Prod", "Max", "Min"]


def numbers(rng: np.random.Generator, dtype: str, shape, scale: float = 3) -> np.ndarray:
    """Whole numbers, so that some are equal."""
    x = np.round(rng.normal(size=shape) * scale)
    return (np.abs(x) if dtype.startswith("u") else x).astype(tf.as_dtype(dtype).as_numpy_dtype)


def segment_case(kind: str, x: np.ndarray, ids: np.ndarray, count: int, unknown) -> Case:
    op = getattr(raw, f"UnsortedSegment{kind}")
    return case(lambda x, i: op(data=x, segment_ids=i, num_segments=count), x, ids, unknown=unknown, tolerance=2)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_unsorted_segments(dtype):
    """Indices below zero are left out; segments without rows; no rows, no segments; indices of two dims."""
    rng, cases = np.random.default_rng(1), []
    for kind in (k for k in KINDS if has_kernel(f"UnsortedSegment{k}", dtype)):
        for rows, inner, count in [(0, (4,), 3), (5, (2,), 0), (7, (), 3), (20, (3, 2), 6), (1, (1,), 1), (9, (0,), 2)]:
            x = numbers(rng, dtype, (rows, *inner), 1)
            ids = rng.integers(-2, max(count, 0), rows).astype(rng.choice(["int32", "int64"]))
            cases += [segment_case(kind, x, ids, count, unknown) for unknown in (False, True)]
        x = numbers(rng, dtype, (3, 4, 2), 1)
        cases.append(segment_case(kind, x, rng.integers(-1, 5, (3, 4)).astype("int32"), 5, [0, 1]))
    assert run_cases(cases).compared == len(cases) > 20


def test_number_of_segments_from_a_shape():
    x, ids, like = np.ones((6, 2), np.float32), np.array([0, 3, 3, -1, 1, 0], np.int32), np.zeros((5, 1), np.float32)
    run_cases([case(lambda x, i, y: raw.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=tf.shape(y)[0]), x, ids,
                    like, unknown=True)])


@pytest.mark.parametrize("kind", ["Max", "Min"])
def test_infinities(kind):
    """A maximum of what is minus infinity everywhere is the lowest finite number, as of no rows."""
    values = np.array([-np.inf, -np.inf, np.inf, 1, np.inf, np.inf, -np.inf, 2], np.float32)
    ids = np.array([0, 0, 1, 1, 2, 2, 4, 4], np.int32)
    run_cases([segment_case(kind, values.astype(t), ids, 6, False) for t in ("float32", "float64", "float16")])


@given(st.lists(st.tuples(st.integers(-3, 6), st.integers(-9, 9)), max_size=40), st.integers(0, 6),
       st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_any_segments(rows, count, kind):
    ids = np.array([min(i, count - 1) for i, _ in rows], np.int32)
    run_cases([segment_case(kind, np.array([v for _, v in rows], np.int64), ids, count, True)])


def evaluated(build, *inputs, unknown=True) -> list[np.ndarray]:
    """What the IR of an op gives; ImportFailed when it stays TensorFlow's."""
    graph = tf.Graph()
    with graph.as_default():
        given = [tf.compat.v1.placeholder(x.dtype, spec(x, unknown)) for x in inputs]
        made = build(*given)
    ir, refs = imported(GraphView(graph.as_graph_def()), made if isinstance(made, list) else [made])
    values = {ref_of(t): x for t, x in zip(given, inputs, strict=True)}
    return interp.run(ir, [values[r] for r in refs])


def test_indices_that_are_too_large_count_for_nothing():
    """As in TensorFlow's kernels for a GPU; those for a CPU raise an error."""
    x, ids = np.arange(1, 5, dtype=np.float32), np.array([0, 7, 1, 2], np.int32)
    (got,) = evaluated(lambda x, i: raw.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=2), x, ids)
    assert got.tolist() == [1, 3]


def test_nan_stays():
    """Wherever it is; in TensorFlow it depends on the order."""
    x, ids = np.array([np.nan, 1, 2, np.nan], np.float32), np.array([0, 0, 1, 1], np.int32)
    for kind in KINDS:
        op = getattr(raw, f"UnsortedSegment{kind}")
        (got,) = evaluated(lambda x, i, op=op: op(data=x, segment_ids=i, num_segments=2), x, ids)
        assert np.isnan(got).all()


def test_many_indices_stay_tensorflows():
    n = segments.LONGEST + 1
    x, ids = np.zeros(n, np.float32), np.zeros(n, np.int32)

    def build(x, i):
        return raw.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=2)

    with pytest.raises(ImportFailed, match="more than 32768 indices"):
        evaluated(build, x, ids, unknown=False)
    with pytest.raises(interp.GuardFailed):
        evaluated(build, x, ids)
    with pytest.raises(ImportFailed, match="may take many indices"):
        evaluated(lambda x, i: raw.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=n), x, ids)


SCATTERS = [((5, 3), (4,), 1), ((5, 3), (2, 2), 2), ((4,), (6,), 1), ((3, 4, 2), (5,), 2), ((4, 2), (0,), 1),
            ((3, 1), (1,), 1)]  # shape of the result, dims of the indices, parts of an index


def scatter(op: str):
    """A function of (tensor, indices, updates); ScatterNd takes the shape of the tensor."""
    if op == "ScatterNd":
        return lambda t, i, u: raw.ScatterNd(indices=i, updates=u, shape=tf.shape(t, out_type=i.dtype))
    return lambda t, i, u: getattr(raw, op)(tensor=t, indices=i, updates=u)


@pytest.mark.parametrize("op", ["ScatterNd", *(f"TensorScatter{k}" for k in ("Add", "Sub", "Max", "Min", "Update"))])
def test_scattered_rows(op):
    """Places that are named several times, no updates, every part of an index."""
    rng, cases = np.random.default_rng(4), []
    dtypes = [*NUMBERS, "bool"] if op == "TensorScatterUpdate" else NUMBERS
    for dtype, (shape, lead, parts) in itertools.product(dtypes, SCATTERS):
        if not has_kernel(op, dtype):
            continue
        indices = np.stack([rng.integers(0, d, lead) for d in shape[:parts]], -1).astype(rng.choice(["int32", "int64"]))
        given = numbers(rng, dtype, shape), indices, numbers(rng, dtype, lead + shape[parts:])
        cases += [case(scatter(op), *given, unknown=unknown, tolerance=4) for unknown in (False, [0])]
    assert run_cases(cases).compared == len(cases) > 50


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-9, 9)), max_size=30),
       st.sampled_from(["ScatterNd", "TensorScatterUpdate", "TensorScatterAdd", "TensorScatterMax"]))
@settings(max_examples=60, deadline=None)
def test_any_scattered_elements(found, op):
    indices = np.array([f[:2] for f in found], np.int32).reshape(-1, 2)
    updates = np.array([f[2] for f in found], np.int64)
    run_cases([case(scatter(op), np.arange(12, dtype=np.int64).reshape(3, 4), indices, updates, unknown=[0])])


@pytest.mark.parametrize("op", ["ScatterNd", "TensorScatterAdd", "TensorScatterUpdate"])
def test_places_outside_are_left_out(op):
    """As in TensorFlow's kernels for a GPU: an index with any part out of range."""
    x, indices = np.zeros((2, 3), np.float32), np.array([[0, 3], [1, -1], [2, 0], [-1, 5], [1, 2]], np.int32)
    updates = np.arange(1, 6, dtype=np.float32)
    (got,) = evaluated(scatter(op), x, indices, updates, unknown=[0])
    assert got.tolist() == [[0, 0, 0], [0, 0, 5]]


def test_scatters_that_stay_tensorflows():
    many, large = segments.LONGEST + 1, segments.LARGEST + 1
    for shape, lead, unknown, reason in [((2,), (many,), False, "more than 32768 indices"),
                                         ((3,), (2,), True, "unknown"),
                                         ((large,), (1,), False, "more than 1048576 elements")]:
        given = np.zeros(shape, np.int32), np.zeros((*lead, 1), np.int32), np.zeros(lead, np.int32)
        with pytest.raises(ImportFailed, match=reason):
            evaluated(scatter("TensorScatterAdd"), *given, unknown=unknown)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_top_k(dtype):
    """Equal elements in their order; 0 and -0 are equal; infinities; all elements, and none."""
    rng, cases = np.random.default_rng(2), []
    for shape in [(5,), (3, 7), (2, 3, 4), (0, 4), (3, 1), (4, 0)]:
        for k in {0, min(1, shape[-1]), min(3, shape[-1]), shape[-1]}:
            x = numbers(rng, dtype, shape)
            if x.size and not np.issubdtype(x.dtype, np.integer):
                x.reshape(-1)[rng.integers(0, x.size, 3)] = [np.inf, -np.inf, -0.0]
            cases += [case(lambda t, k=k: list(raw.TopKV2(input=t, k=k)), x, unknown=unknown)
                      for unknown in (False, range(len(shape) - 1))]
    assert run_cases(cases).compared == len(cases)


def test_nan_is_the_largest():
    x = np.array([[1, np.nan, 3, -np.nan, np.inf]], np.float32)
    values, places = evaluated(lambda t: list(raw.TopKV2(input=t, k=3)), x, unknown=[0])
    assert places.tolist() == [[1, 3, 4]] and np.isnan(values[0, :2]).all() and values[0, 2] == np.inf


def test_the_largest_of_long_rows_and_as_many_as_there_are():
    """One of any number of elements; some of many; a number that follows from a size."""
    rng, cases = np.random.default_rng(4), []
    for dtype, size in itertools.product(("float32", "int32", "uint8"), (1, 5, 3000)):
        cases.append(case(lambda t: list(raw.TopKV2(input=t, k=1)), numbers(rng, dtype, (4, size)), unknown=True))
    cases.append(case(lambda t: list(raw.TopKV2(input=t, k=1)), np.full((2, 3), np.iinfo(np.int32).min, np.int32)))
    cases.append(case(lambda t: list(raw.TopKV2(input=t, k=7)), numbers(rng, "float32", (3, 1000)), unknown=[0]))
    cases.append(case(lambda t, u: list(tf.math.top_k(t, tf.minimum(tf.shape(u)[0], 4))), numbers(rng, "int32", (3, 9)),
                      np.zeros(3, np.float32), unknown=[0]))
    assert run_cases(cases).compared == len(cases)


def test_rows_of_unknown_or_great_length_stay_tensorflows():
    for shape, unknown, reason in [((2, 2049), [0], "more than 2048 elements"), ((2, 5), True, "unknown"),
                                   ((600, 1000), False, "many rows")]:
        with pytest.raises(ImportFailed, match=reason):
            evaluated(lambda t: list(raw.TopKV2(input=t, k=2)), np.zeros(shape, np.float32), unknown=unknown)


@pytest.mark.parametrize("op", ["LowerBound", "UpperBound"])
def test_places_in_sorted_rows(op):
    """Equal elements, rows and queries without elements, NaN among both."""
    rng, cases = np.random.default_rng(3), []
    sizes = [(3, 7, 5), (1, 1, 1), (2, 0, 3), (0, 3, 2), (2, 40, 0), (1, 100, 9)]
    for dtype, (rows, size, queries), out in itertools.product(["float32", "float64", "int32", "int64", "int16"], sizes,
                                                               ["int32", "int64"]):
        table, values = np.sort(numbers(rng, dtype, (rows, size)), -1), numbers(rng, dtype, (rows, queries))
        if dtype == "float32" and size == 100:
            table[0, [50, 97, 98, 99]], values[0, :2] = np.nan, np.nan
        cases += [case(lambda t, v, o=out: getattr(raw, op)(sorted_inputs=t, values=v, out_type=o), table, values,
                       unknown=unknown) for unknown in (False, True)]
    assert run_cases(cases).compared == len(cases)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_buckets(dtype):
    """On boundaries, between and outside of them, NaN; boundaries are float32 whatever is put into buckets."""
    floats = [-5, -1, -0.3, 0, 0.1, 0.3, 1, 7, np.nan, np.inf, -np.inf]
    x = np.array(floats if "float" in dtype else range(-5, 6), dtype)
    cases = [case(lambda x, b=bounds: raw.Bucketize(input=x, boundaries=b), x.reshape(-1, 1), unknown=unknown)
             for bounds in ([], [0.0], [-1.0, -0.3, 0.1, 0.1, 1.0]) for unknown in (False, True)]
    assert run_cases(cases).compared == len(cases)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_counts(dtype):
    """Rows and single ones, weights, whether there is one at all; numbers beyond the last bin; no elements, no bins."""
    rng, cases = np.random.default_rng(2), []
    for shape, size, ids in itertools.product([(0,), (7,), (3, 5), (2, 0)], (0, 1, 6), ("int32", "int64")):
        x, weights = rng.integers(0, 8, shape).astype(ids), rng.normal(0, 4, shape).astype(dtype)
        for binary, unknown in itertools.product((False, True), (False, [0], True)):
            cases.append(case(lambda x, n=size, b=binary: raw.DenseBincount(
                input=x, size=tf.constant(n, x.dtype), weights=tf.constant([], dtype), binary_output=b), x,
                unknown=unknown))
            cases.append(case(lambda x, w, n=size, b=binary: raw.DenseBincount(
                input=x, size=tf.constant(n, x.dtype), weights=w, binary_output=b), x, weights, unknown=unknown))
    assert run_cases(cases, may_fall_back=True).compared > len(cases) * 0.9


def test_many_elements_and_bins_stay_tensorflows():
    c = case(lambda x: raw.DenseBincount(input=x, size=5000, weights=tf.constant([], tf.float32)),
             np.zeros(1000, np.int32))
    with pytest.raises(AssertionError, match=r"compare|elements and bins"):
        run_cases([c])
