"""Gradients of convolutions and pools against TensorFlow; sizes known and unknown."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import case, imported, ref_of, run_cases
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

raw = tf.raw_ops


def image(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def places(d: int, k: int, s: int, padding, dilation: int = 1) -> int:
    """The size of a convolution's result for an image of size ``d``."""
    low, high = (0, 0) if isinstance(padding, str) else padding
    return -(-d // s) if padding == "SAME" else (d + low + high - (k - 1) * dilation - 1) // s + 1


def how(strides, padding, dilations=None) -> dict:
    named = {"padding": padding} if isinstance(padding, str) else {
        "padding": "EXPLICIT", "explicit_paddings": [0, 0, *itertools.chain(*padding), 0, 0]}
    return named | {"strides": [1, *strides, 1]} | ({"dilations": [1, *dilations, 1]} if dilations else {})


def pair(padding):
    return (padding, padding) if isinstance(padding, str) else padding


# --- convolutions ----------------------------------------------------------------------------------

WINDOWS = [(1, 1), (2, 2), (3, 3), (4, 3), (5, 2)]


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (2, 1))])
def test_filters(padding):
    cases = []
    for (h, w), k, s in itertools.product([(8, 6), (7, 9)], WINDOWS, [(1, 1), (2, 2), (3, 2)]):
        back = [places(d, kk, ss, p) for d, kk, ss, p in zip((h, w), k, s, pair(padding), strict=True)]

        def build(x, g, size=(*k, 3, 4), s=s):
            return raw.Conv2DBackpropFilter(input=x, filter_sizes=size, out_backprop=g, **how(s, padding))

        x, g = image(2, h, w, 3), image(2, *back, 4)
        c = case(build, x, g, tolerance=3)
        c.shapes = [[None, h, w, 3], [None, *back, 4]]
        c.inputs += [[image(n, h, w, 3), image(n, *back, 4)] for n in (0, 1, 5)]
        cases.append(c)
    assert run_cases(cases).compared == 4 * len(cases)


def test_filters_of_unknown_images_dilations_types_groups_and_three_dims():
    cases = []
    for s, p in itertools.product([(1, 1), (2, 3)], ["SAME", "VALID"]):
        def build(x, g, s=s, p=p):
            return raw.Conv2DBackpropFilter(input=x, filter_sizes=[3, 2, 3, 4], out_backprop=g, **how(s, p))

        def arrays(n, h, w, s=s, p=p):
            return [image(n, h, w, 3), image(n, places(h, 3, s[0], p), places(w, 2, s[1], p), 4)]

        c = case(build, *arrays(2, 8, 7), tolerance=3)
        c.shapes = [[None, None, None, 3], [None, None, None, 4]]
        c.inputs += [arrays(1, 5, 9), arrays(3, 3, 3)]
        cases.append(c)
    for d in ((2, 1), (2, 3)):
        x, g = image(2, 9, 8, 3), image(2, 9 - 2 * d[0], 8 - d[1], 4)
        cases.append(case(lambda x, g, d=d: raw.Conv2DBackpropFilter(
            input=x, filter_sizes=[3, 2, 3, 4], out_backprop=g, **how((1, 1), "VALID", d)), x, g, tolerance=3))
    for dtype in ("float64", "float16", "bfloat16"):
        x, g = image(2, 8, 8, 3, dtype=dtype), image(2, 4, 4, 5, dtype=dtype)
        cases.append(case(lambda x, g: raw.Conv2DBackpropFilter(
            input=x, filter_sizes=[3, 3, 3, 5], out_backprop=g, **how((2, 2), "SAME")), x, g, tolerance=3))
    x, g = image(2, 7, 6, 4, seed=3), image(2, 7, 6, 6)
    cases.append(case(lambda x, g: raw.Conv3DBackpropFilterV2(
        input=x, filter_sizes=[2, 3, 3, 3, 5], out_backprop=g, strides=[1, 2, 2, 2, 1], padding="SAME"),
        image(2, 5, 6, 4, 3), image(2, 3, 3, 2, 5), tolerance=3))
    assert run_cases(cases).compared == 3 * 4 + len(cases) - 4


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise(stride):
    cases = []
    for k, padding, m in itertools.product(WINDOWS, ("SAME", "VALID"), (1, 2)):
        back = [places(d, kk, stride, padding) for d, kk in zip((8, 7), k, strict=True)]
        x, w, g = image(2, 8, 7, 3), image(*k, 3, m), image(2, *back, 3 * m)
        attrs = how((stride, stride), padding)
        cases += [case(lambda x, g, k=k, m=m, a=attrs: raw.DepthwiseConv2dNativeBackpropFilter(
                      input=x, filter_sizes=[*k, 3, m], out_backprop=g, **a), x, g, tolerance=3),
                  case(lambda w, g, a=attrs: raw.DepthwiseConv2dNativeBackpropInput(
                      input_sizes=[2, 8, 7, 3], filter=w, out_backprop=g, **a), w, g, tolerance=3)]
        cases[-2].shapes = [[None, 8, 7, 3], [None, *back, 3 * m]]
    assert run_cases(cases).compared == len(cases)


def test_a_training_step():
    """Sizes come from Shape ops of images with an unknown batch."""
    def step(x, w, v):
        with tf.GradientTape() as tape:
            tape.watch([x, w, v])
            y = tf.nn.relu(tf.nn.conv2d(x, w, 2, "SAME"))
            y = tf.nn.avg_pool2d(y, 2, 2, "VALID")
            y = tf.nn.avg_pool2d(tf.nn.conv2d(y, v, 1, "SAME"), 3, 2, "SAME")
            loss = tf.reduce_sum(y ** 2)
        return tape.gradient(loss, [x, w, v])

    c = case(step, image(2, 17, 16, 3), image(3, 3, 3, 8), image(3, 3, 8, 4), tolerance=10)
    c.shapes[0] = [None, 17, 16, 3]
    c.inputs += [[image(n, 17, 16, 3), *c.inputs[0][1:]] for n in (1, 3)]
    assert run_cases([c]).compared == 3


FIRST = (0, 3, 1, 2)
LAYOUTS = {
    "Conv2DBackpropFilter": lambda x, g, w, **k: raw.Conv2DBackpropFilter(
        input=x, filter_sizes=w.shape, out_backprop=g, padding="SAME", **k),
    "Conv2DBackpropInput": lambda x, g, w, **k: raw.Conv2DBackpropInput(
        input_sizes=tf.shape(x), filter=w, out_backprop=g, padding="SAME", **k),
    "MaxPoolGrad": lambda x, g, w, **k: raw.MaxPoolGrad(orig_input=x, orig_output=g, grad=g, padding="SAME", **k),
    "AvgPoolGrad": lambda x, g, w, **k: raw.AvgPoolGrad(orig_input_shape=tf.shape(x), grad=g, padding="SAME", **k)}


@pytest.mark.parametrize("op", list(LAYOUTS))
@pytest.mark.parametrize("known", [True, False])
def test_channels_first(op, known):
    """TensorFlow's CPU has none of these: they are compared with what the other layout gives."""
    x, w = image(2, 7, 8, 4), image(3, 3, 4, 4)
    g = image(2, 4, 4, 4)
    results = []
    for layout in ("NHWC", "NCHW"):
        turned = layout == "NCHW"
        arrays = [np.ascontiguousarray(a.transpose(FIRST)) if turned else a for a in (x, g)]
        sizes = {name: [1, 1, *values] if turned else [1, *values, 1] for name, values in
                 {"strides": (2, 2), **({"ksize": (3, 3)} if "Pool" in op else {})}.items()}
        graph = tf.Graph()
        with graph.as_default():
            inputs = [tf.compat.v1.placeholder(tf.float32, a.shape if known else [None, *a.shape[1:]]) for a in arrays]
            inputs.append(tf.compat.v1.placeholder(tf.float32, w.shape))
            out = LAYOUTS[op](*inputs, data_format=layout, **sizes)
        ir, refs = imported(GraphView(graph.as_graph_def()), [out])
        values = dict(zip(map(ref_of, inputs), [*arrays, w], strict=True))
        (got,) = interp.run(ir, [values[r] for r in refs])
        results.append(got.transpose(np.argsort(FIRST)) if turned and "Filter" not in op else got)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


# --- pools -----------------------------------------------------------------------------------------

POOLS = [((2, 2), (2, 2)), ((3, 3), (2, 2)), ((3, 2), (1, 1)), ((1, 1), (1, 1)), ((2, 3), (3, 2)), ((5, 7), (1, 1)),
         ((4, 4), (3, 1)), ((1, 2), (2, 2))]


def pool(op: str, size, strides, padding):
    attrs = how(strides, padding) | {"ksize": [1, *size, 1]}
    if op == "AvgPoolGrad":
        return lambda x, g: raw.AvgPoolGrad(orig_input_shape=tf.shape(x), grad=g, **attrs)
    # The result is not read; oneDNN's kernel, which would be taken beside MaxPool, ends the process in a session.
    return lambda x, g: raw.MaxPoolGrad(orig_input=x, orig_output=g, grad=g, **attrs)


def ties(x: np.ndarray) -> np.ndarray:
    """Values of which many are equal, NaN and infinities among them."""
    rng = np.random.default_rng(x.size)
    out = np.round(x)
    flat = out.reshape(-1)
    for value in (np.nan, -np.inf, np.inf, -0.0):
        flat[rng.integers(0, flat.size, flat.size // 8)] = value
    return out


@pytest.mark.parametrize("op", ["AvgPoolGrad", "MaxPoolGrad"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_pools(op, padding):
    cases = []
    for (size, strides), (h, w) in itertools.product(POOLS, [(8, 6), (7, 9), (5, 7), (1, 1), (2, 1)]):
        back = [places(d, k, s, padding) for d, k, s in zip((h, w), size, strides, strict=True)]
        if min(back) < 1:
            continue
        x, g = image(2, h, w, 3), image(2, *back, 3)
        c = case(pool(op, size, strides, padding), x, g)
        c.shapes = [[None, h, w, 3], [None, *back, 3]]
        c.inputs += [[image(0, h, w, 3), image(0, *back, 3)], [image(1, h, w, 3), image(1, *back, 3)]]
        if op == "MaxPoolGrad":
            c.inputs += [[ties(x), g], [np.full_like(x, -np.inf), g], [np.full_like(x, np.nan), g]]
        unknown = case(pool(op, size, strides, padding), x, g)
        unknown.shapes = [[None, None, None, 3], [None, None, None, 3]]
        cases += [c, unknown]
    assert run_cases(cases).compared == sum(len(c.inputs) for c in cases) >= 100


def solid_pool(op: str, size, strides, padding):
    """(the op of images, results and what comes back, the result of an image)"""
    attrs = {"ksize": [1, *size, 1], "strides": [1, *strides, 1], "padding": padding}
    if op == "AvgPool3DGrad":
        return (lambda x, y, g: raw.AvgPool3DGrad(orig_input_shape=tf.shape(x), grad=g, **attrs),
                lambda x: raw.AvgPool3D(input=x, **attrs).numpy())
    return (lambda x, y, g: raw.MaxPool3DGrad(orig_input=x, orig_output=y, grad=g, **attrs),
            lambda x: raw.MaxPool3D(input=x, **attrs).numpy())


@pytest.mark.parametrize("op", ["AvgPool3DGrad", "MaxPool3DGrad"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_pools_of_three_dims(op, padding):
    cases = []
    for (size, strides), whole in itertools.product(
            [((2, 2, 2), (2, 2, 2)), ((3, 3, 3), (2, 2, 2)), ((3, 2, 1), (1, 1, 1)), ((2, 3, 2), (3, 2, 1))],
            [(6, 4, 8), (5, 7, 3), (3, 3, 2)]):
        back = [places(d, k, s, padding) for d, k, s in zip(whole, size, strides, strict=True)]
        if min(back) < 1:
            continue
        build, forward = solid_pool(op, size, strides, padding)
        images = [image(n, *whole, 3) for n in (2, 1)]
        images += [np.round(images[0]), np.zeros_like(images[1])]  # of which many are equal
        c = case(build, *(np.zeros(s, np.float32) for s in ((2, *whole, 3), (2, *back, 3), (2, *back, 3))))
        c.shapes = [[None, *whole, 3], [None, *back, 3], [None, *back, 3]]
        c.inputs = [[x, forward(x), image(len(x), *back, 3)] for x in images]
        unknown = case(build, *c.inputs[0])
        unknown.shapes = [[None, None, None, None, 3]] * 3
        cases += [c, unknown]
    build, forward = solid_pool(op, (2, 2, 2), (2, 2, 2), padding)
    x = image(2, 4, 4, 6, 3, dtype="bfloat16")
    cases.append(case(build, x, forward(x), image(2, 2, 2, 3, 3, dtype="bfloat16"), tolerance=4))
    assert run_cases(cases).compared == sum(len(c.inputs) for c in cases) >= 50


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_pools_of_other_types(dtype):
    cases = []
    for op, (size, strides) in itertools.product(["AvgPoolGrad", "MaxPoolGrad"], POOLS[:4]):
        back = [places(d, k, s, "SAME") for d, k, s in zip((7, 8), size, strides, strict=True)]
        x, g = image(2, 7, 8, 3, dtype=dtype), image(2, *back, 3, dtype=dtype)
        cases.append(case(pool(op, size, strides, "SAME"), x, g, tolerance=4))
    assert run_cases(cases).compared == len(cases)
