"""Library calls on an NVIDIA GPU: convolutions of every kind, measured algorithms, operands at odd places."""
from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.gpu.kernels import on_gpu
from tests.gpu.test_op_gpu import function, in_tf
from tests.op import programs
from tests.op.calls import counted
from tests.op.test_convolutions import GRADIENTS, VARIANTS, convolved, filter_gradient, never, operands
from tests.op.test_library import DTYPES

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent
# What plans ask of the library: a sum with a tensor or ReLU only with a bias.
PLANNED = [v for v in VARIANTS if "bias" in v or not v.keys() & {"residual", "relu"}]


@pytest.fixture
def unfused():
    """TensorFlow's remapper off: it makes one op of some of these layers, which leaves nothing to stitch."""
    tf.config.optimizer.set_experimental_options({"remapping": False})
    yield
    tf.config.optimizer.set_experimental_options({"remapping": True})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", PLANNED, ids=str)
def test_convolutions(dtype, variant):
    program = programs.conv(dtype, **variant)
    f = function(on_gpu(program), never)
    eps = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    for batch in (2, 1, 0):
        xs = operands(program, batch)
        want = convolved(program, *xs)
        got, ran, _ = counted(lambda f=f, xs=xs: f(*xs))
        assert ran == 1
        np.testing.assert_allclose(got.numpy().astype(np.float64), want, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", GRADIENTS, ids=str)
def test_gradients_by_the_filter(dtype, variant):
    """Sums of multiples of 1/16: exact in float32, rounded once.  One engine of cuDNN's is off by 3e-6 all the same."""
    program = programs.conv(dtype, gradient=True, **variant)
    f = function(on_gpu(program), never)
    for batch in (5, 1, 0):
        xs = operands(program, batch)
        want = filter_gradient(program, *xs).astype(DTYPES[dtype])
        got, ran, _ = counted(lambda f=f, xs=xs: f(*xs))
        assert ran == 1
        exact, scale = want.astype(np.float64), np.abs(want.astype(np.float64)).max()
        np.testing.assert_allclose(got.numpy().astype(np.float64), exact, rtol=0,
                                   atol=1e-5 * scale if dtype == "float32" else 0)


@pytest.mark.parametrize("dtype,tolerance", [("float32", 3e-3), ("float16", 2e-2), ("bfloat16", 1e-1)])
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("parts", [("relu",), ("sum",), ("sum", "relu")], ids="-".join)
def test_sums_and_relu_without_a_bias_are_stitched(parts, dtype, tolerance):
    rng = np.random.default_rng(0)
    x, w, z = (tf.constant(rng.normal(size=s) * scale, dtype) for s, scale in
               (((4, 28, 28, 64), 1), ((3, 3, 64, 64), 1 / 24), ((4, 28, 28, 64), 1)))

    def block(x, w, z):
        y = tf.nn.conv2d(x, w, 1, "SAME")
        y = y + z if "sum" in parts else y
        return tf.tanh(tf.nn.relu(y) if "relu" in parts else y)

    with tf.device("/CPU:0"):
        want = block(*(tf.cast(a, tf.float64) for a in (x, w, z))).numpy()
    f = tf_stitch.function(block, autograph=False)
    got, ran, fell_back = counted(lambda: f(x, w, z))
    assert (ran, fell_back) == (1, 0)
    np.testing.assert_allclose(got.numpy().astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tf32", [True, False])
def test_relu_keeps_nan(dtype, tf32):
    try:
        tf.config.experimental.enable_tensor_float_32_execution(tf32)
        for sizes in ({}, {"channels": 64, "results": 64}, {"channels": 3, "results": 16, "image": (32, 32)}):
            program = programs.conv(dtype, bias=1, relu=1, **sizes)
            x, w, v = operands(program, 1)
            v[3] = np.nan
            got = function(on_gpu(program), never)(x, w, v).numpy().astype(np.float32)
            np.testing.assert_array_equal(np.isnan(got), np.broadcast_to(np.arange(len(v)) == 3, got.shape))
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def test_tf32_follows_tensorflow():
    program = programs.conv(image=(32, 32), window=(3, 3), channels=64, results=64)
    f = function(on_gpu(program), never)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=x.shape).astype(np.float32) for x in operands(program, 2)]
    want = convolved(program, *xs)
    errors = {}
    try:
        for on in (True, False, True):
            tf.config.experimental.enable_tensor_float_32_execution(on)
            errors[on] = np.abs(f(*xs).numpy() - want).max() / np.abs(want).max()
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)
    assert errors[False] < 2e-6 and 2e-6 < errors[True] < 2e-3


def test_operands_that_do_not_begin_at_16_bytes():
    """A slice along the first axis shares its tensor's memory."""
    f = function(on_gpu(programs.matmul("float32")), in_tf((0,) * 5))
    rng = np.random.default_rng(0)
    for cut in (1, 2, 3):
        x, y = (tf.constant(rng.integers(-8, 9, (cut + 2, 5, 7)) / 4, tf.float32) for _ in range(2))
        y = tf.transpose(y, [0, 2, 1])
        with tf.device("/GPU:0"):
            x, y = tf.identity(x)[cut:], tf.identity(y)[cut:]
        got, ran, _ = counted(lambda x=x, y=y: f(x, y))
        assert ran == 1
        np.testing.assert_array_equal(got, x.numpy() @ y.numpy())


class Layer:
    """A convolution drawn by a seed, with batch normalisation or a bias, an activation and a pool after it."""

    def __init__(self, seed, dtype):
        rng = random.Random(seed)
        self.size, self.window = [rng.randint(7, 33) for _ in range(2)], [rng.randint(1, 4) for _ in range(2)]
        self.channels, results = rng.choice([3, 8, 24, 40]), rng.choice([8, 17, 32])
        self.depthwise = rng.random() < 0.25
        self.strides = [1, 1] if self.depthwise else rng.choice([[1, 1], [2, 2], [2, 1]])
        dilates = self.strides == [1, 1] and not self.depthwise
        self.dilations = [rng.randint(1, 2) if dilates else 1 for _ in range(2)]
        explicit = [[rng.randint(0, 2), rng.randint(0, 2)] for _ in range(2)]
        self.padding = rng.choice(["SAME", "VALID"] if self.depthwise else ["SAME", "VALID", explicit])
        self.norm, self.relu = dtype == "float32" and rng.random() < 0.6, rng.random() < 0.6
        self.pool = rng.choice([None, tf.nn.max_pool2d, tf.nn.avg_pool2d])
        self.results = self.channels * 2 if self.depthwise else results
        values = np.random.default_rng(seed)
        shape = [self.channels, 2 if self.depthwise else results]
        w = values.normal(size=[*self.window, *shape]) / np.sqrt(np.prod(self.window) * self.channels)
        x = values.normal(size=[rng.choice([1, 2, 5]), *self.size, self.channels])
        self.args = [a.astype(DTYPES[dtype]) for a in
                     (x, w, *(values.uniform(0.5, 1.5, self.results) for _ in range(4)))]

    def __call__(self, x, w, scale, shift, mean, variance, layout="NHWC"):
        def dims(values):
            return [1, *values, 1] if layout == "NHWC" else [1, 1, *values]

        padding = self.padding
        if isinstance(padding, list):
            padding = [[0, 0], *padding, [0, 0]] if layout == "NHWC" else [[0, 0], [0, 0], *padding]
        if self.depthwise:
            y = tf.nn.depthwise_conv2d(x, w, dims([1, 1]), padding, layout)
        else:
            y = tf.nn.conv2d(x, w, dims(self.strides), padding, layout, dims(self.dilations))
        if self.norm:
            inv = tf.math.rsqrt(variance + 1e-3) if x.dtype == tf.float64 else None  # which fused_batch_norm has not
            y = (y - mean) * (inv * scale) + shift if inv is not None else tf.compat.v1.nn.fused_batch_norm(
                y, scale, shift, mean, variance, 1e-3, layout, is_training=False)[0]
        else:
            y = tf.nn.bias_add(y, shift, layout)
        y = tf.nn.relu(y) if self.relu else tf.tanh(y)
        return self.pool(y, 2, 2, "SAME", layout) if self.pool else y


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("dtype,tolerance", [("float32", 3e-3), ("float16", 2e-2), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("seed", range(10))
def test_random_layers_match_tensorflow(seed, layout, dtype, tolerance):
    """Rewritten functions on the GPU against TensorFlow's float64 on the CPU; half of them do not know their batch."""
    layer = Layer(seed, dtype)
    with tf.device("/CPU:0"):
        want = layer(*(tf.constant(a.astype(np.float64)) for a in layer.args)).numpy()
    args = list(layer.args)
    args[0] = args[0] if layout == "NHWC" else np.ascontiguousarray(np.moveaxis(args[0], -1, 1))
    spec = [tf.TensorSpec(a.shape, dtype) for a in args]
    spec[0] = tf.TensorSpec([None if seed % 2 else args[0].shape[0], *args[0].shape[1:]], dtype)
    f = tf_stitch.function(lambda *xs: layer(*xs, layout=layout), input_signature=spec, autograph=False)
    args = [tf.constant(a) for a in args]
    got, ran, fell_back = counted(lambda: f(*args))
    got = got.numpy().astype(np.float64)
    assert ran == 1 and fell_back == 0
    got = got if layout == "NHWC" else np.moveaxis(got, 1, -1)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


SCRIPT = """
import numpy as np
from tests.gpu.kernels import on_gpu
from tests.gpu.test_op_gpu import function
from tests.op import programs
from tests.op.test_convolutions import never, operands
program = programs.conv(image=(28, 28), window=(3, 3), channels=64, results=64, bias=1, relu=1)
f = function(on_gpu(program), never)
xs = operands(program, 1)
y = f(*xs).numpy()
m = function(on_gpu(programs.matmul("float32")), never)
m(np.ones((1, 64, 768), np.float32), np.ones((1, 768, 768), np.float32))
print("sum", float(y.sum()))
"""


def run_script(folder, **env):
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=ROOT,
                          env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "TF_STITCH_CACHE": str(folder), **env})
    assert done.returncode == 0, done.stderr[-3000:]
    return float(re.search("sum (.*)", done.stdout)[1]), done.stderr


def test_choices_are_kept_and_a_damaged_file_is_noted(tmp_path):
    first, log = run_script(tmp_path)
    files = sorted((tmp_path / "choices").glob("*.txt"))
    assert len(files) == 2 and "damaged" not in log
    before = [f.read_bytes() for f in files]
    assert all(b.startswith(b"tf_stitch choice 1\n") for b in before)
    again, log = run_script(tmp_path)
    assert [f.read_bytes() for f in files] == before and again == pytest.approx(first)
    files[0].write_bytes(before[0][:-4] + b"0000")
    files[1].write_bytes(b"")
    third, log = run_script(tmp_path)
    assert log.count("is damaged and not used") == 2 and third == pytest.approx(first)
    assert all(f.read_bytes().startswith(b"tf_stitch choice 1\n") for f in files)


def test_nothing_is_measured_when_that_is_off(tmp_path):
    run_script(tmp_path, TF_STITCH_AUTOTUNE="0")
    assert not (tmp_path / "choices").exists()
