"""Image ops and transposed convolutions against TensorFlow; sizes known and unknown."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import case, run_cases
from tf_stitch.graph import lower
from tf_stitch.graph.view import GraphView

raw = tf.raw_ops
FLAGS = [(False, False), (True, False), (False, True)]  # align_corners, half_pixel_centers


def image(*shape: int, dtype: str = "float32") -> np.ndarray:
    x = np.random.default_rng(sum(shape)).uniform(-90, 90, shape)
    return x.astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize("op", ["ResizeBilinear", "ResizeNearestNeighbor"])
def test_resize(op):
    def build(size, corners, half):
        return lambda t: getattr(raw, op)(images=t, size=size, align_corners=corners, half_pixel_centers=half)

    sizes = [(5, 7, 10, 14), (10, 9, 5, 3), (4, 4, 4, 4), (1, 6, 3, 1), (3, 1, 1, 5), (7, 5, 16, 3), (24, 30, 7, 11)]
    cases = []
    for (h, w, *new), (corners, half) in itertools.product(sizes, FLAGS):
        x = image(2, h, w, 3)
        cases += [case(build(new, corners, half), x), case(build(new, corners, half), x, unknown=[0, 1, 2])]
    for dtype in ("float64", "float16", "bfloat16", "uint8", "int32", "int8"):
        cases.append(case(build([6, 4], False, True), np.abs(image(2, 4, 6, 2)).astype(dtype)
                          if dtype != "bfloat16" else image(2, 4, 6, 2, dtype=dtype)))
    assert run_cases(cases).compared == len(cases)


@pytest.mark.parametrize("op", ["ResizeBilinearGrad", "ResizeNearestNeighborGrad"])
def test_gradients_of_resizing(op):
    def build(old, corners, half):
        flags = {"align_corners": corners, "half_pixel_centers": half}
        if op == "ResizeBilinearGrad":
            return lambda g, x: raw.ResizeBilinearGrad(grads=g, original_image=x, **flags)
        return lambda g, x: raw.ResizeNearestNeighborGrad(grads=g, size=old, **flags)

    sizes = [(5, 7, 10, 14), (10, 9, 5, 3), (4, 4, 4, 4), (1, 6, 3, 1), (3, 1, 1, 5), (7, 5, 16, 3), (24, 30, 7, 11)]
    cases = []
    for (h, w, *new), (corners, half) in itertools.product(sizes, FLAGS):
        c = case(build([h, w], corners, half), image(2, *new, 3), image(2, h, w, 3))
        c.shapes = [[None, *new, 3], [None, h, w, 3]]
        c.inputs += [[image(1, *new, 3), image(1, h, w, 3)]]
        cases.append(c)
    assert run_cases(cases).compared == 2 * len(cases)


def test_a_gradient_of_resizing_needs_known_sides():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, None, 4, 3])
        out = raw.ResizeBilinearGrad(grads=tf.zeros([1, 8, 8, 3]), original_image=x)
    assert "unknown" in lower.why_not(GraphView(graph.as_graph_def()), out.op.name)


def test_resize_by_a_factor_of_an_unknown_size():
    cases = []
    for method in ("bilinear", "nearest"):
        c = case(lambda t, m=method: tf.image.resize(t, tf.shape(t)[1:3] * 2, method=m), image(2, 5, 3, 4),
                 unknown=[0, 1, 2])
        c.inputs += [[image(1, 8, 2, 4)], [image(3, 1, 1, 4)], [image(0, 2, 2, 4)]]
        cases.append(c)
    assert run_cases(cases).compared == 8


def test_infinities_and_nan_next_to_each_other():
    x = image(1, 3, 3, 1)
    x[0, 1, 1], x[0, 0, 2], x[0, 2, 0] = np.nan, np.inf, -np.inf
    cases = [case(lambda t, s=s: tf.image.resize(t, s), x, unknown=u) for s in ([6, 6], [3, 3], [3, 5], [2, 5])
             for u in ([], [0, 1, 2])]
    assert run_cases(cases).compared == 8


def transposed(places, strides, padding, dilations, filter_shape):
    rank = len(strides)
    op = raw.Conv2DBackpropInput if rank == 2 else raw.Conv3DBackpropInputV2

    def build(g, w):
        size = {"input_sizes": [*places, filter_shape[-2]]}
        how = {"padding": padding} if isinstance(padding, str) else {
            "padding": "EXPLICIT", "explicit_paddings": [0, 0, *itertools.chain(*padding), 0, 0]}
        return op(filter=w, out_backprop=g, strides=[1, *strides, 1], dilations=[1, *dilations, 1], **size, **how)

    return build


def small(d: int, k: int, s: int, padding) -> int:
    """The size of the convolution's result for an image of size ``d``."""
    low, high = (0, 0) if isinstance(padding, str) else padding
    return -(-d // s) if padding == "SAME" else (d + low + high - k) // s + 1


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (2, 1))])
def test_transposed_convolutions(padding):
    cases = []
    for (h, w), k, s in itertools.product([(8, 6), (7, 9), (11, 5)], [(1, 1), (2, 2), (3, 3), (4, 3), (5, 2)],
                                          [(1, 1), (2, 2), (3, 2), (2, 1)]):
        pads = padding if not isinstance(padding, str) else (padding, padding)
        places = [small(d, kk, ss, p) for d, kk, ss, p in zip((h, w), k, s, pads, strict=True)]
        g, f = image(2, *places, 4), image(*k, 3, 4)
        build = transposed((2, h, w), s, padding, (1, 1), (*k, 3, 4))
        cases += [case(build, g, f, tolerance=3), case(build, g, f, unknown=[], tolerance=3)]
        cases[-1].shapes[0] = [None, None, None, 4]
    assert run_cases(cases).compared == len(cases) == 120


def test_transposed_convolutions_with_dilations_types_and_three_dims():
    cases = []
    for d in ((2, 1), (2, 3)):
        g, f = image(2, 6, 8, 4), image(3, 2, 3, 4)
        h, w = 6 + 2 * d[0], 8 + d[1]
        cases.append(case(transposed((2, h, w), (1, 1), "VALID", d, (3, 2, 3, 4)), g, f, tolerance=3))
    for dtype in ("float64", "float16", "bfloat16"):
        g, f = image(2, 4, 4, 3, dtype=dtype), image(3, 3, 5, 3, dtype=dtype)
        cases.append(case(transposed((2, 8, 8), (2, 2), "SAME", (1, 1), (3, 3, 5, 3)), g, f, tolerance=3))
    g, f = image(2, 3, 4, 2, 3), image(2, 3, 3, 5, 3)
    cases.append(case(transposed((2, 6, 8, 4), (2, 2, 2), "SAME", (1, 1, 1), (2, 3, 3, 5, 3)), g, f, tolerance=3))
    assert run_cases(cases).compared == len(cases)


def test_layers_that_make_images_larger():
    """As Keras writes them: the size asked for comes from the image's."""
    def layer(k, s, padding):
        def build(x, w):
            h = [tf.shape(x)[1 + a] * s + (max(k - s, 0) if padding == "VALID" else 0) for a in range(2)]
            return tf.nn.conv2d_transpose(x, w, tf.stack([tf.shape(x)[0], *h, 5]), s, padding)

        return build

    cases = []
    for k, s, padding in itertools.product((1, 2, 3, 4, 5), (1, 2, 3), ("SAME", "VALID")):
        c = case(layer(k, s, padding), image(2, 4, 3, 6), image(k, k, 5, 6), tolerance=3)
        c.shapes[0] = [None, None, None, 6]
        c.inputs.append([image(1, 1, 7, 6), image(k, k, 5, 6)])
        cases.append(c)
    cases.append(case(lambda x, w: raw.Conv2DBackpropInput(input_sizes=[8, 6], filter=w, out_backprop=x, padding="SAME",
                                                           strides=[1, 2, 2, 1]),
                      image(2, 4, 3, 6), image(3, 3, 5, 6), tolerance=3))
    assert run_cases(cases).compared == 2 * len(cases) - 1


def test_transposed_convolutions_of_groups():
    """As the gradients of convolutions with several groups have them; strides make one of the phases a part of each."""
    cases = []
    for groups, s, padding in itertools.product((1, 2, 4), ((1, 1), (2, 2), (3, 2)), ("SAME", "VALID")):
        places = [small(d, 3, ss, padding) for d, ss in zip((8, 7), s, strict=True)]

        def build(g, w, groups=groups, s=s, padding=padding):
            return raw.Conv2DBackpropInput(input_sizes=[2, 8, 7, 3 * groups], filter=w, out_backprop=g,
                                           strides=[1, *s, 1], padding=padding)

        cases.append(case(build, image(2, *places, 8), image(3, 3, 3, 8), tolerance=3))
    assert run_cases(cases).compared == len(cases)


def test_crops():
    """Boxes inside, across the border, upside down, of no size; of one and of several pixels; types."""
    boxes = np.array([[0, 0, 1, 1], [0.1, 0.25, 0.6, 0.8], [-0.5, -0.2, 1.3, 1.1], [0.9, 0.8, 0.1, 0.2],
                      [0.5, 0.5, 0.5, 0.5], [2, 2, 3, 3]], np.float32)
    of = np.array([0, 1, 1, 0, 2, 1], np.int32)
    cases = []
    methods = ("bilinear", "nearest")
    for size, method, outside in itertools.product([(3, 4), (1, 5), (6, 1), (1, 1)], methods, (0.0, -7.0)):
        c = case(lambda x, b, i, s=size, m=method, o=outside: tf.image.crop_and_resize(x, b, i, s, m, o),
                 image(3, 6, 5, 2), boxes, of)
        c.shapes = [[None, None, None, 2], [None, 4], [None]]
        c.inputs += [[image(3, 1, 7, 2), boxes[:3], of[:3]], [image(3, 6, 5, 2), boxes[:0], of[:0]]]
        cases.append(c)
    for dtype in ("float64", "float16", "uint8", "int32"):
        cases.append(case(lambda x, b, i: tf.image.crop_and_resize(x, b, i, [4, 3]),
                          np.abs(image(3, 6, 5, 2)).astype(dtype), boxes, of))
    assert run_cases(cases).compared == sum(len(c.inputs) for c in cases)


def test_patches():
    cases = []
    for size, strides, rates, padding in itertools.product([(2, 2), (3, 1), (1, 4)], [(1, 1), (2, 3), (3, 3)],
                                                           [(1, 1), (2, 1)], ["VALID", "SAME"]):
        c = case(lambda x, k=size, s=strides, r=rates, p=padding: tf.image.extract_patches(
            x, [1, *k, 1], [1, *s, 1], [1, *r, 1], p), image(2, 8, 7, 3))
        cases.append(c)
        c = case(c.build, image(2, 8, 7, 3), unknown=[0, 1, 2])
        c.inputs += [[image(1, 5, 4, 3)], [image(0, 9, 9, 3)]]
        cases.append(c)
    for dtype in ("int64", "uint8", "float16", "bfloat16"):
        cases.append(case(lambda x: tf.image.extract_patches(x, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID"),
                          np.abs(image(2, 8, 8, 3)).astype(tf.as_dtype(dtype).as_numpy_dtype)))
    assert run_cases(cases).compared == sum(len(c.inputs) for c in cases)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_colours(dtype):
    """Greys, black, equal channels, values below 0 and above 1, infinities (what NaN gives depends on TensorFlow's
    device)."""
    special = [[0, 0, 0], [1, 1, 1], [.5, .5, .2], [.2, .5, .5], [.5, .2, .5], [-1, -2, -3], [2, 0, -1],
               [np.inf, 0, 0], [np.inf, np.inf, 1], [0, -np.inf, 1]]
    x = np.concatenate([np.random.default_rng(0).uniform(0, 1, (60, 3)), special]).astype(dtype)
    cases = [case(fn, x.reshape(*shape, 3), unknown=unknown) for fn in (tf.image.rgb_to_hsv, tf.image.hsv_to_rgb)
             for shape, unknown in (((70,), True), ((1, 70), [0]), ((1, 70, 1), [1]))]
    if dtype == "float32":
        y = np.random.default_rng(1).uniform(0, 1, (2, 5, 4, 3)).astype(dtype)
        for contrast in (0.0, 0.5, -1.0, 2.5):
            cases += [case(lambda t, k=contrast: tf.raw_ops.AdjustContrastv2(images=t, contrast_factor=k), v,
                           unknown=unknown) for v in (y, y[0]) for unknown in (False, range(v.ndim - 1))]
    assert run_cases(cases).compared == len(cases)
