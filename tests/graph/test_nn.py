"""Neural-network ops against TensorFlow."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import case, has_kernel, run_cases

raw = tf.raw_ops
FLOATS = ["float32", "float64", "float16", "bfloat16"]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def test_bias():
    cases = []
    for dtype in ("float32", "float64", "int32"):
        for shape in [(2, 3, 4, 5), (3, 4), (2, 5, 3), (2, 3, 4, 2, 5)]:
            counted = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
            x = normal(*shape, dtype=dtype) if dtype != "int32" else counted
            for layout in ("NHWC", "NCHW"):
                if layout == "NCHW" and len(shape) == 2:
                    continue
                b = x.reshape(-1)[:shape[1] if layout == "NCHW" else shape[-1]]
                cases.append(case(lambda t, u, f=layout: raw.BiasAdd(value=t, bias=u, data_format=f), x, b,
                                  unknown=[0]))
                if dtype != "int32":
                    cases.append(case(lambda t, f=layout: raw.BiasAddGrad(out_backprop=t, data_format=f), x,
                                      unknown=[0]))
    assert run_cases(cases).compared >= 30


def test_softmax():
    cases = []
    for dtype, shape in itertools.product(FLOATS, [(3, 5), (2, 3, 7), (4,), (0, 3), (2, 1)]):
        x = normal(*shape, dtype=dtype) * np.array(10, tf.as_dtype(dtype).as_numpy_dtype)
        if 0 in shape:
            continue
        for op in (tf.nn.softmax, tf.nn.log_softmax):
            cases.append(case(lambda t, op=op: op(t), x, unknown=[0], tolerance=3))
        if len(shape) > 1:
            cases.append(case(lambda t: tf.nn.softmax(t, axis=0), x, unknown=[1], tolerance=3))
    big = np.array([[1e30, -1e30, 0], [1, 0, 1], [-np.inf, -np.inf, 3]], np.float32)
    cases += [case(tf.nn.softmax, big), case(tf.nn.log_softmax, big)]
    assert run_cases(cases).compared >= 40


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_cross_entropy(dtype):
    x = normal(6, 5, dtype=dtype)
    y = np.abs(normal(6, 5, dtype=dtype, seed=3))
    y[0, 1] = 0
    op = raw.SoftmaxCrossEntropyWithLogits
    cases = [case(lambda a, b: list(op(features=a, labels=b)), *xs, unknown=u, tolerance=3)
             for xs, u in [((x, y), False), ((x, y), [0]), ((x, y[:1]), False), ((x[:1], y), False),
                           ((x[:, :1], y), False)]]
    infinite = x.copy()
    infinite[:, 1] = -np.inf
    zero = y.copy()
    zero[:, 1] = 0
    cases.append(case(lambda a, b: list(op(features=a, labels=b)), infinite, zero))
    for t in (np.int32, np.int64):
        labels = np.array([0, 4, 2, 2, 1, 3], t)
        cases.append(case(lambda a, b: list(raw.SparseSoftmaxCrossEntropyWithLogits(features=a, labels=b)), x, labels,
                          unknown=[0], tolerance=3))
    assert run_cases(cases).compared == 8


def test_sparse_label_out_of_range():
    """A label outside the classes is TensorFlow's error; the graph says so too."""
    x, labels = normal(2, 3), np.array([1, 3], np.int32)
    for port in (0, 1):
        one = case(lambda a, b, p=port: raw.SparseSoftmaxCrossEntropyWithLogits(features=a, labels=b)[p], x,
                   np.array([1, 2], np.int32))
        run_cases([one])
        one.inputs = [[x, labels]]
        with pytest.raises(tf.errors.InvalidArgumentError):
            run_cases([one])


def batch_norm(dtype: str, layout: str, training: bool, factor: float, op: str):
    def build(x, scale, offset, mean, variance):
        extra = {"exponential_avg_factor": factor}
        out = getattr(raw, op)(x=x, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=1e-3,
                               data_format=layout, is_training=training, **extra)
        if not training and dtype != "float32":
            return out.y  # TensorFlow leaves the other results as it found the memory
        return [out.y, out.batch_mean, out.batch_variance, out.reserve_space_1, out.reserve_space_2]

    return build


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_batch_norm(training, dtype):
    cases = []
    for layout, shape, factor in [("NHWC", (3, 4, 5, 6), 1.0), ("NHWC", (2, 1, 1, 3), 0.25),
                                  ("NCHW", (2, 3, 4, 5), 1.0), ("NHWC", (1, 1, 1, 4), 1.0)]:
        if layout == "NCHW" and training:
            continue  # TensorFlow's CPU kernel wants channels last
        channels = shape[1] if layout == "NCHW" else shape[-1]
        s, o, m = (normal(channels, seed=k) for k in range(3))
        v = np.abs(normal(channels, seed=9)) + 0.5
        if training and factor == 1.0:
            m, v = np.zeros(0, np.float32), np.zeros(0, np.float32)
        ops = ["FusedBatchNormV3", "FusedBatchNormV2"] + (["FusedBatchNorm"] if dtype == "float32" else [])
        for op in ops:
            c = case(batch_norm(dtype, layout, training, factor, op), normal(*shape, dtype=dtype), s, o, m, v,
                     tolerance=3)
            c.shapes[0] = [None, None, None, shape[-1]] if layout == "NHWC" else [None, *shape[1:]]
            if has_kernel(op, dtype):
                cases.append(c)
    assert run_cases(cases).compared >= (4 if training else 5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_batch_norm_grad(training, dtype):
    def build(g, x, scale, mean, variance):
        out = raw.FusedBatchNormGradV3(y_backprop=g, x=x, scale=scale, reserve_space_1=mean, reserve_space_2=variance,
                                       reserve_space_3=np.zeros(0, np.float32), epsilon=1e-3, is_training=training)
        return [out.x_backprop, out.scale_backprop, out.offset_backprop]

    cases = []
    for shape in [(3, 4, 5, 6), (2, 1, 2, 3)]:
        x = normal(*shape, dtype=dtype)
        mean = x.astype(np.float32).mean((0, 1, 2))
        variance = x.astype(np.float32).var((0, 1, 2))
        c = case(build, normal(*shape, dtype=dtype, seed=5), x, normal(shape[-1]), mean, variance, tolerance=5)
        c.shapes[0] = [None, *shape[1:]]
        cases.append(c)
    assert run_cases(cases).compared == 2


def test_matmul():
    cases = []
    dtypes = ["float32", "float64", "float16", "bfloat16", "int32", "int64"]
    for dtype, ta, tb in itertools.product(dtypes, [False, True], [False, True]):
        for m, k, n in [(3, 4, 5), (1, 7, 1), (0, 2, 3), (2, 0, 3)]:
            a, b = normal(m, k), normal(k, n, seed=1)
            a, b = ((v * 4).astype(tf.as_dtype(dtype).as_numpy_dtype) for v in (a.T if ta else a, b.T if tb else b))
            cases.append(case(lambda x, y, ta=ta, tb=tb: raw.MatMul(a=x, b=y, transpose_a=ta, transpose_b=tb), a, b,
                              unknown=[0], tolerance=3))
    assert run_cases(cases).compared == len(cases)


def test_batch_matmul():
    cases = []
    for i, (adj_x, adj_y) in enumerate(itertools.product(*[[False, True]] * 2)):
        for lead_a, lead_b in [((2,), (2,)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((), (2,)), ((0,), (1,))]:
            a, b = normal(*lead_a, 3, 4), normal(*lead_b, 4, 5)
            a, b = a.swapaxes(-1, -2) if adj_x else a, b.swapaxes(-1, -2) if adj_y else b
            cases.append(case(lambda x, y, p=adj_x, q=adj_y: raw.BatchMatMulV2(x=x, y=y, adj_x=p, adj_y=q), a, b,
                              unknown=[-1] if i % 2 else False))
            if lead_a == lead_b:
                cases.append(case(lambda x, y, p=adj_x, q=adj_y: raw.BatchMatMul(x=x, y=y, adj_x=p, adj_y=q), a, b,
                                  unknown=[0]))
    for ta, tb, out in [(np.int8, np.int8, tf.int32)]:
        a, b = (np.arange(24).reshape(2, 3, 4) - 9).astype(ta), (np.arange(24).reshape(2, 4, 3) - 5).astype(tb)
        if has_kernel("BatchMatMulV3", "int8", "Ta"):
            cases.append(case(lambda x, y, o=out: raw.BatchMatMulV3(x=x, y=y, Tout=o), a, b))
    assert run_cases(cases).compared >= 24


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)), ("ij,jk->ki", (3, 4), (4, 5)), ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("abc,cde->abde", (2, 3, 4), (4, 5, 2)), ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)), ("ij->ji", (3, 4), None),
    ("ij->j", (3, 4), None), ("ij->", (3, 4), None), ("ii->i", (4, 4), None), ("ii->", (4, 4), None),
    ("iij->j", (3, 3, 2), None), ("i->ii", (3,), None), ("i,j->ij", (3,), (4,)),
    ("...ij,...jk->...ik", (2, 3, 4), (4, 5)),
    ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)), ("...i->...", (2, 3, 4), None), ("ij,ij->ij", (3, 4), (3, 4)),
    ("ij,ij->", (3, 4), (3, 4)), ("aab,bc->ac", (3, 3, 2), (2, 4)), ("...,...->...", (3, 1), (1, 4)),
    ("ab,cd->", (2, 3), (4, 5)),
    ("b...,b...->b...", (2, 3), (2, 1)), ("ijk,kjl->il", (2, 3, 4), (4, 3, 5)), ("ij,jk", (3, 4), (4, 5)),
]


@pytest.mark.parametrize("unknown", [False, True])
def test_einsum(unknown):
    """Ellipsis, repeated labels in operands and result, sums, outer products."""
    cases = []
    for equation, *shapes in EQUATIONS:
        if "->" not in equation:
            continue  # the op itself has explicit equations only
        xs = [normal(*s, seed=i) for i, s in enumerate(shapes) if s is not None]
        hidden = unknown and "..." not in equation
        cases.append(case(lambda *ts, e=equation: raw.Einsum(inputs=list(ts), equation=e), *xs, unknown=hidden))
    assert run_cases(cases).compared == len(cases) >= 20


def test_convolutions():
    """Imported as primitives, all layouts and paddings that the IR expresses."""
    cases = []
    for stride, padding, dilation in [(1, "SAME", 1), (2, "VALID", 1), (2, "SAME", 1), (1, "VALID", 2), (1, "SAME", 2),
                                      (1, "EXPLICIT", 1)]:
        attrs = dict(strides=[1, stride, stride, 1], padding=padding, dilations=[1, dilation, dilation, 1])
        if padding == "EXPLICIT":
            attrs["explicit_paddings"] = [0, 0, 1, 2, 0, 3, 0, 0]
        x, w = normal(2, 7, 6, 4), normal(3, 2, 4, 5)
        cases.append(case(lambda a, b, k=attrs: raw.Conv2D(input=a, filter=b, **k), x, w))
        cases[-1].shapes[0][0] = None
        if padding != "EXPLICIT":
            cases.append(case(lambda a, b, k=attrs: raw.DepthwiseConv2dNative(input=a, filter=b, **k), x,
                              normal(3, 2, 4, 2)))
    cases.append(case(lambda a, b: raw.Conv3D(input=a, filter=b, strides=[1, 1, 2, 1, 1], padding="SAME"),
                      normal(1, 4, 5, 3, 2), normal(2, 3, 1, 2, 3)))
    assert run_cases(cases).compared == len(cases)


def test_pools():
    cases = []
    for op, padding, stride in itertools.product(["MaxPool", "AvgPool"], ["SAME", "VALID"], [1, 2]):
        key = "input" if op == "MaxPool" else "value"
        cases.append(case(lambda a, op=op, k=key, p=padding, s=stride: getattr(raw, op)(
            **{k: a}, ksize=[1, 3, 2, 1], strides=[1, s, s, 1], padding=p), normal(2, 7, 6, 3)))
    for op in ("MaxPool3D", "AvgPool3D"):
        cases.append(case(lambda a, op=op: getattr(raw, op)(input=a, ksize=[1, 2, 2, 2, 1], strides=[1, 2, 1, 2, 1],
                                                            padding="SAME"), normal(1, 4, 5, 3, 2)))
    assert run_cases(cases).compared == 10


def test_images_of_unknown_size():
    """SAME with a stride: how much is padded depends on the size."""
    ops = {
        "Conv2D": lambda x, w, **k: raw.Conv2D(input=x, filter=w, **k),
        "DepthwiseConv2dNative": lambda x, w, **k: raw.DepthwiseConv2dNative(input=x, filter=w, **k),
        "MaxPool": lambda x, w, **k: raw.MaxPool(input=x, ksize=[1, *w.shape[:2], 1], **k),
        "AvgPool": lambda x, w, **k: raw.AvgPool(value=x, ksize=[1, *w.shape[:2], 1], **k),
    }
    cases = []
    for (name, op), stride, window, dtype in itertools.product(
            ops.items(), [(2, 2), (3, 2), (1, 3)], [(3, 3), (1, 2), (2, 5)], ["float32", "float16"]):
        if name == "DepthwiseConv2dNative" and stride[0] != stride[1]:
            continue  # TensorFlow has none
        w = normal(*window, 4, 3, dtype=dtype)
        c = case(lambda x, w, op=op, s=stride: op(x, w, strides=[1, *s, 1], padding="SAME"),
                 normal(2, 7, 6, 4, dtype=dtype), w, tolerance=3)
        c.shapes[0] = [None, None, None, 4]
        c.inputs += [[normal(1, h, v, 4, dtype=dtype), w] for h, v in ((1, 1), (8, 9), (2, 3))]
        cases.append(c)
    x = normal(2, 5, 4, 3, 2)
    for op in (raw.MaxPool3D, raw.AvgPool3D):
        how = dict(ksize=[1, 2, 3, 2, 1], strides=[1, 2, 2, 1, 1], padding="SAME")
        cases.append(case(lambda t, op=op, how=how: op(input=t, **how), x, unknown=[0, 1, 2, 3]))
    assert run_cases(cases).compared == 4 * (len(cases) - 2) + 2


def test_labels_and_logits_of_dims_that_are_not_known_to_agree():
    x, labels = np.random.default_rng(7).normal(0, 1, (2, 3, 5)).astype(np.float32), np.zeros((2, 3), np.int32)
    run_cases([case(lambda a, b: list(raw.SparseSoftmaxCrossEntropyWithLogits(
        features=tf.reshape(a, [-1, 5]), labels=tf.reshape(b, [-1]))), x, labels, unknown=[0, 1])])


def test_local_response_normalisation():
    cases = []
    for channels, radius, beta in itertools.product((1, 3, 12), (0, 1, 5), (0.5, 0.75, 1.0)):
        x = np.random.default_rng(channels).normal(0, 3, (2, 3, 4, channels)).astype(np.float32)
        cases += [case(lambda t, r=radius, e=beta: tf.nn.lrn(t, r, 1.5, 0.3, e), x, unknown=unknown)
                  for unknown in (False, [0, 1, 2])]
    x = x.astype(np.float16)
    cases.append(case(lambda t: tf.nn.lrn(t, 2, 1.0, 0.1, 0.75), x, tolerance=2))
    assert run_cases(cases).compared == len(cases)
