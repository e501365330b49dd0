"""Ops that move, select and make elements, against TensorFlow; shapes known and unknown."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.support import case, imported, run_cases
from tf_stitch.errors import ImportFailed
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

raw = tf.raw_ops


def ramp(*shape: int, dtype=np.float32) -> np.ndarray:
    return (np.arange(int(np.prod(shape)), dtype=np.int64) % 120).astype(dtype).reshape(shape)


def both(build, *arrays, hide=(0,)):
    """The same case with static shapes and with unknown dims."""
    return [case(build, *arrays), case(build, *arrays, unknown=list(hide))]


def test_names_and_shapes():
    x = ramp(3, 1, 4)
    cases = [
        *both(lambda t: tf.identity(t), x), *both(lambda t: list(raw.IdentityN(input=[t, t + 1])), x),
        *both(lambda t: tf.reshape(t, [-1, 2]), x), *both(lambda t: tf.reshape(t, [4, -1, 1]), x),
        *both(lambda t: tf.reshape(t, [-1]), x), *both(lambda t: tf.reshape(t, [tf.shape(t)[0], 4]), x),
        *both(lambda t: tf.squeeze(t, [1]), x), *both(lambda t: tf.squeeze(t, [-2]), x), case(tf.squeeze, x),
        *both(lambda t: tf.expand_dims(t, 0), x), *both(lambda t: tf.expand_dims(t, -1), x),
        *both(lambda t: tf.expand_dims(t, 2), x), *both(lambda t: tf.transpose(t, [2, 0, 1]), x),
        *both(lambda t: tf.transpose(t, [-1, 1, 0]), x), *both(lambda t: tf.ensure_shape(t, [3, 1, None]), x),
        *both(lambda t: raw.Snapshot(input=t), x), *both(lambda t: tf.stop_gradient(t), x),
        *both(lambda t: tf.raw_ops.PreventGradient(input=t), x),
        *both(lambda t: [tf.shape(t), tf.size(t), tf.rank(t), *tf.shape_n([t, t[0]])], x),
        *both(lambda t: [tf.shape(t, tf.int64), tf.size(t, tf.int64)], x),
    ]
    assert run_cases(cases).compared == len(cases)


def test_joining_and_cutting():
    x, y = ramp(4, 6), ramp(4, 6) + 1
    cases = [
        *both(lambda a, b: tf.concat([a, b], 0), x, y), *both(lambda a, b: tf.concat([a, b, a], -1), x, y),
        *both(lambda a: tf.concat([a], 1), x), *both(lambda a, b: raw.Concat(concat_dim=1, values=[a, b]), x, y),
        *both(lambda a: tf.split(a, 3, 1), x), *both(lambda a: tf.split(a, 2, 0), x),
        *both(lambda a: tf.split(a, 2, -1), x),
        *both(lambda a: tf.split(a, [1, 2, 3], 1), x), *both(lambda a: tf.split(a, [1, -1, 2], -1), x),
        *both(lambda a: tf.split(a, [1, -1], 0), x), *both(lambda a, b: tf.stack([a, b], 0), x, y),
        *both(lambda a, b: tf.stack([a, b], -1), x, y), *both(lambda a, b: tf.stack([a, b], 1), x, y),
        *both(lambda a: tf.unstack(a, 6, 1), x), *both(lambda a: tf.unstack(a, 4, 0), x),
        *both(lambda a: tf.unstack(a, 6, -1), x), *both(lambda a: tf.slice(a, [1, 2], [2, -1]), x),
        *both(lambda a: tf.slice(a, [0, 1], [-1, 3]), x), *both(lambda a: tf.reverse(a, [1]), x),
        *both(lambda a: tf.reverse(a, [0, -1]), x), *both(lambda a: raw.Reverse(tensor=a, dims=[True, False]), x),
        *both(lambda a: tf.roll(a, [1, -2], [0, 1]), x), *both(lambda a: tf.roll(a, 7, 1), x),
        *both(lambda a: tf.roll(a, [1, 1], [1, 1]), x),
    ]
    assert run_cases(cases).compared == len(cases)


def random_spec(rng: np.random.Generator, shape):
    """A StridedSlice spec: begins, ends, strides and the five masks, always valid for the shape."""
    begin, end, stride, masks = [], [], [], dict.fromkeys(
        ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0)
    dims, at, ellipsis = list(shape), 0, False
    while at < len(dims) or rng.random() < 0.2:
        bit, kind = 1 << len(begin), rng.random()
        if len(begin) > 6:
            break
        b, e, s = 0, 0, 1
        if kind < 0.12:
            masks["new_axis_mask"] |= bit
        elif kind < 0.2 and not ellipsis:
            masks["ellipsis_mask"] |= bit
            ellipsis, at = True, at + int(rng.integers(0, len(dims) - at + 1))
        elif at >= len(dims):
            break
        else:
            d = dims[at]
            at += 1
            if kind < 0.4 and d:
                masks["shrink_axis_mask"] |= bit
                b = int(rng.integers(-d, d))
                e = b + 1
            else:
                b, e = (int(v) for v in rng.integers(-d - 2, d + 3, 2))
                s = int(rng.choice([1, 1, 2, 3, -1, -2]))
                masks["begin_mask"] |= bit if rng.random() < 0.3 else 0
                masks["end_mask"] |= bit if rng.random() < 0.3 else 0
        begin.append(b)
        end.append(e)
        stride.append(s)
    return begin, end, stride, masks


def fix_ellipsis(spec, rank: int) -> bool:
    """The spec must not name more dims than there are."""
    begin, _, _, m = spec
    used = sum(1 for i in range(len(begin)) if not (m["ellipsis_mask"] | m["new_axis_mask"]) >> i & 1)
    return used <= rank


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**31))
def test_strided_slice(seed):
    """Random masks and strides, and the gradient op for each, 30 slices a graph."""
    rng = np.random.default_rng(seed)
    cases = []
    while len(cases) < 60:
        shape = tuple(int(d) for d in rng.integers(0 if rng.random() < 0.1 else 1, 6, int(rng.integers(1, 5))))
        spec = random_spec(rng, shape)
        if not spec[0] or not fix_ellipsis(spec, len(shape)):
            continue
        begin, end, stride, masks = spec
        x = ramp(*shape)
        args = dict(begin=np.array(begin, np.int32), end=np.array(end, np.int32), strides=np.array(stride, np.int32),
                    **masks)
        with tf.Graph().as_default():
            try:
                out = raw.StridedSlice(input=tf.constant(x), **args).shape.as_list()
            except ValueError:
                continue
        cases.append(case(lambda t, k=args: raw.StridedSlice(input=t, **k), x))
        cases.append(case(lambda t, s=shape, k=args: raw.StridedSliceGrad(shape=np.array(s, np.int32), dy=t, **k),
                          ramp(*out)))
    assert run_cases(cases).compared == len(cases)


def test_strided_slice_unknown_dims():
    """Python slices of dims that are not known; bounds that do not fit fall back, never a wrong result."""
    slices = [np.s_[1:], np.s_[:-1], np.s_[::2], np.s_[::-1], np.s_[0], np.s_[-1], np.s_[2:5], np.s_[:, None, ..., 1],
              np.s_[..., -2:], np.s_[3:1:-1], np.s_[:3, ::-1], np.s_[1:-1], np.s_[-3:], np.s_[:, 1:, None]]
    cases = []
    for s in slices:
        c = case(lambda t, s=s: t[s], ramp(6, 4, 3), unknown=True)
        c.inputs += [[ramp(n, 4, 3)] for n in (1, 2, 9) if not isinstance(s, int) or n]
        cases.append(c)
    tally = run_cases(cases, may_fall_back=True)
    assert tally.compared + tally.fell_back == 4 * len(slices) and tally.compared >= 3 * len(slices)


def test_slice_at_run_time():
    """Starts and sizes that come from tensors become value symbols."""
    x, i = ramp(6, 4), np.array(2, np.int32)
    cases = [
        case(lambda t, k: t[k], x, i), case(lambda t, k: t[k:], x, i), case(lambda t, k: t[:k], x, i),
        case(lambda t, k: t[k:k + 2], x, i), case(lambda t, k: tf.slice(t, [k, 0], [2, -1]), x, i),
        case(lambda t, k: tf.slice(t, [0, k], [-1, 1]), x, i), case(lambda t, k: tf.tile(t, [k, 1]), x, i),
        case(lambda t, k: tf.fill([k, 3], t[0, 1]), x, i), case(lambda t, k: tf.reshape(t, [k, -1]), x, i),
        case(lambda t, k: tf.range(k, k + 5) + tf.shape(t)[0], x, i),
        case(lambda t, k: tf.one_hot(k, k + 3) + t[0, 0], x, i),
        case(lambda t, k: tf.broadcast_to(t[0], [k, 4]), x, i), case(lambda t, k: tf.pad(t, [[k, 1], [0, k]]), x, i),
        case(lambda t, k: tf.zeros([k, k * 2]) + t[0, 0], x, i), case(lambda t, k: tf.split(t, [k, 6 - k], 0), x, i),
    ]
    for c in cases:
        c.inputs.append([x, np.array(3, np.int32)])
        c.inputs.append([x, np.array(1, np.int32)])
    cases[3].inputs.pop()
    tally = run_cases(cases, may_fall_back=True)
    assert tally.compared >= 2 * len(cases)


def test_value_symbols_fall_back():
    """A start that turns out negative is for TensorFlow to read from the end: a guard fails, no wrong number."""
    c = case(lambda t, k: t[k], ramp(6, 4), np.array(-1, np.int32))
    assert run_cases([c], may_fall_back=True).fell_back == 1
    c = case(lambda t, k: tf.reshape(t, [k, 4]), ramp(6, 4), np.array(-1, np.int32))
    assert run_cases([c], may_fall_back=True).fell_back == 1


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_padding(dtype):
    x = ramp(3, 4, dtype=dtype)
    pads = [[[1, 2], [0, 3]], [[0, 0], [0, 0]], [[2, 1], [3, 3]]]
    cases = []
    for p in pads:
        cases += both(lambda t, p=p: tf.pad(t, p), x)
        cases += both(lambda t, p=p: tf.pad(t, p, constant_values=7), x)
        for mode, most in (("SYMMETRIC", 3), ("REFLECT", 2)):
            q = np.minimum(np.array(p), [[most], [most]]).astype(np.int32)
            cases += both(lambda t, q=q, m=mode: tf.pad(t, q, m), x)
            out = ramp(*(np.array(x.shape) + q.sum(1)), dtype=dtype)
            cases += both(lambda t, q=q, m=mode: raw.MirrorPadGrad(input=t, paddings=q, mode=m), out, hide=[])
    assert run_cases(cases).compared == len(cases)


def test_reflecting_an_empty_dim_is_tensorflow_s_error():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        y = [tf.pad(tf.tanh(x), [[0, 0], [1, 1]], mode) for mode in ("REFLECT", "SYMMETRIC")]
    reflected, symmetric = (imported(GraphView(graph.as_graph_def()), [t])[0] for t in y)
    empty = np.zeros((0, 4), np.float32)
    with pytest.raises(interp.GuardFailed, match="reflects no empty dim"):
        interp.run(reflected, [empty])
    assert interp.run(symmetric, [empty])[0].shape == (0, 6)


def test_repeating_and_making():
    x = ramp(3, 1, 4)
    cases = [
        *both(lambda t: tf.tile(t, [2, 3, 1]), x), *both(lambda t: tf.tile(t, [1, 1, 1]), x),
        *both(lambda t: tf.tile(t, [0, 2, 2]), x), *both(lambda t: tf.broadcast_to(t, [2, 3, 5, 4]), x, hide=[]),
        *both(lambda t: tf.broadcast_to(t, tf.concat([tf.shape(t)[:1], [5, 4]], 0)), x),
        *both(lambda t: tf.zeros_like(t), x), *both(lambda t: tf.ones_like(t), x),
        *both(lambda t: tf.fill(tf.shape(t), 2.5), x), *both(lambda t: tf.fill([2, 3], t[0, 0, 1]), x),
        *both(lambda t: tf.range(tf.shape(t)[0]), x), *both(lambda t: tf.range(1, 12, 3) + tf.shape(t)[0], x),
        *both(lambda t: tf.range(9, 0, -2) + tf.shape(t)[0], x),
        *both(lambda t: tf.linspace(t[0, 0, 0], t[0, 0, 1], 5), x),
        *both(lambda t: raw.LinSpace(start=t[0, 0, 0], stop=t[0, 0, 3], num=4), x),
    ]
    assert run_cases(cases).compared == len(cases)


def test_reading_by_index():
    x, i = ramp(5, 3, 4), np.array([[4, 0], [2, 2], [1, 3]], np.int32)
    b = np.array([[1, 0, 2], [2, 2, 1], [0, 0, 0], [1, 1, 1], [2, 0, 1]], np.int64)
    cases = [
        *both(lambda t, k: tf.gather(t, k), x, i), *both(lambda t, k: tf.gather(t, k % 3, axis=1), x, i),
        *both(lambda t, k: tf.gather(t, k % 3, axis=-1), x, i),
        *both(lambda t, k: raw.Gather(params=t, indices=k), x, i),
        *both(lambda t, k: tf.gather(t, k, batch_dims=1, axis=1), x, b),
        *both(lambda t, k: tf.gather(t, k, batch_dims=1, axis=2), x, b),
        *both(lambda t, k: tf.gather(t, k, batch_dims=-1), x, b[:, :1].repeat(1, 1)),
        *both(lambda t, k: tf.gather_nd(t, k % 3), x, i), *both(lambda t, k: tf.gather_nd(t, k[:, :1]), x, i),
        *both(lambda t, k: tf.gather(t, k[0, 0]), x, i),
        case(lambda t, k: tf.reverse_sequence(t, k, seq_axis=1, batch_axis=0), x, np.array([0, 1, 2, 3, 3], np.int32)),
        case(lambda t, k: tf.reverse_sequence(t, k, seq_axis=0, batch_axis=2), x, np.array([0, 5, 2, 3], np.int64)),
    ]
    for axis, dtype in itertools.product((-1, 0, 1), (np.int32, np.int64, np.uint8)):
        cases += both(lambda k, a=axis: tf.one_hot(k, 4, 5.0, -1.0, axis=a), i.astype(dtype))
    cases += both(lambda k: tf.one_hot(k, 3), np.array([-1, 2, 5], np.int32))
    assert run_cases(cases).compared == len(cases)


def test_blocks_and_matrices():
    x = ramp(2, 4, 6, 8)
    m = ramp(2, 4, 4) + 1
    cases = [
        *both(lambda t: tf.nn.space_to_depth(t, 2), x), *both(lambda t: tf.nn.depth_to_space(t, 2), x),
        *both(lambda t: tf.space_to_batch(t, [2, 3], [[1, 1], [0, 3]]), x),
        *both(lambda t: tf.batch_to_space(t, [2, 2], [[1, 0], [0, 2]]), ramp(8, 3, 4, 5), hide=[1, 2]),
        *both(lambda t: raw.SpaceToBatch(input=t, paddings=[[1, 1], [0, 2]], block_size=2), x),
        *both(lambda t: raw.BatchToSpace(input=t, crops=[[1, 0], [0, 2]], block_size=2), ramp(8, 3, 4, 5), hide=[1, 2]),
        *both(lambda t: tf.linalg.band_part(t, 1, 0), m), *both(lambda t: tf.linalg.band_part(t, -1, 2), m),
        *both(lambda t: raw.MatrixDiag(diagonal=t), m), *both(lambda t: tf.linalg.diag(t), m),
        *both(lambda t: raw.MatrixDiagPart(input=t), m), *both(lambda t: tf.linalg.diag_part(t), m),
        case(lambda t: raw.MatrixDiagPart(input=t[:, :3]), m), case(lambda t: raw.MatrixDiagPart(input=t[:, :, :2]), m),
        *both(lambda t, d: raw.MatrixSetDiag(input=t, diagonal=d), m, ramp(2, 4)),
        case(lambda t, d: tf.linalg.set_diag(t[:, :3], d[:, :3]), m, ramp(2, 4)),
        case(lambda t, d: tf.linalg.set_diag(t[:, :, :3], d[:, :3]), m, ramp(2, 4)),
        case(lambda t: raw.Diag(diagonal=t), ramp(2, 3)), case(lambda t: raw.DiagPart(input=t), ramp(2, 3, 2, 3)),
    ]
    assert run_cases(cases).compared == len(cases)


def test_selection_and_casts():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 3)).astype(np.float32) * 50
    c = x > 0
    cases = [
        *both(lambda p, a, b: raw.Select(condition=p, x=a, y=b), c, x, y),
        *both(lambda p, a, b: raw.Select(condition=p[:, 0], x=a, y=b), c, x, y),
        *both(lambda p, a, b: raw.Select(condition=p[0, 0], x=a, y=b), c, x, y),
        *both(lambda p, a, b: tf.where(p, a, 0.0), c, x, y),
        *both(lambda p, a, b: tf.where(p[0], a, b[:1]), c, x, y, hide=[1]),
        *both(lambda a: raw.ClipByValue(t=a, clip_value_min=-1.5, clip_value_max=3.0), x),
        *both(lambda a, b: raw.ClipByValue(t=a, clip_value_min=b - 2, clip_value_max=b + 1), x, y),
        *both(lambda a, b: tf.add_n([a, b, a]), x, y), *both(lambda a, b: tf.clip_by_value(a, b - 2, b + 1), x, y),
    ]
    types = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"]
    small = np.array([[-3.7, -0.5, 0.0], [0.5, 2.5, 100.2]])
    for a, b in itertools.permutations(types, 2):
        unsigned = "uint" in b or "uint" in a
        source = (np.abs(small) if unsigned else small).astype(tf.as_dtype(a).as_numpy_dtype)
        cases.append(case(lambda t, b=b: tf.cast(t, b), source, unknown=[0]))
    cases.append(case(lambda t: tf.bitcast(t, tf.int32), x))
    cases.append(case(lambda t: tf.bitcast(t, tf.float16), np.array([1, 15360], np.int16)))
    assert run_cases(cases).compared == len(cases)


def test_a_band_wider_than_the_matrix_is_refused_as_tensorflow_does():
    with tf.Graph().as_default() as graph:
        known, unknown = tf.compat.v1.placeholder(tf.float32, [3, 3]), tf.compat.v1.placeholder(tf.float32, [None, 3])
        width = tf.compat.v1.placeholder(tf.int32, [])
        made = [tf.linalg.band_part(known, 4, 0), tf.linalg.band_part(unknown, 2, width)]
    view = GraphView(graph.as_graph_def())
    with pytest.raises(ImportFailed, match="inside the matrix"):
        imported(view, made[:1])
    ir, _ = imported(view, made[1:])
    x = ramp(3, 3)
    for at in (-1, 0, 3):
        (got,) = interp.run(ir, [x, np.array(at, np.int32)])
        np.testing.assert_array_equal(got, tf.linalg.band_part(x, 2, at))
    for bad in [(ramp(1, 3), 0), (x, 4)]:
        with pytest.raises(interp.GuardFailed, match="inside the matrix"):
            interp.run(ir, [bad[0], np.array(bad[1], np.int32)])
