"""The StitchedProgram op on an NVIDIA GPU: the programs of tests/op with kernels for the GPU."""
from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import gc
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.gpu.kernels import TEXT, code, graph_counters, on_gpu
from tests.gpu.random_programs import Drawn
from tests.op import programs
from tests.op.calls import counted, specs_of, stitched
from tests.op.test_library import DTYPES, FLAGS, SIZES, operands, product
from tests.op.test_op import axpb_in_tf, chain_in_tf, expect_fallback, expect_stitched, floats
from tf_stitch import runtime
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.program import serialize
from tf_stitch.program.program import AliasStep, Buffer

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent


def function(program, fn, like=None, device="/GPU:0", **options):
    """A compiled function of one StitchedProgram node on the GPU."""
    call = stitched(program, fn, like, **options)

    def placed(*args):
        with tf.device(device):
            return call(*args)

    return tf.function(placed, input_signature=specs_of(like or program), autograph=False)


def test_every_shape_from_one_node():
    f = function(on_gpu(programs.axpb()), axpb_in_tf)
    for shape in [(0, 5), (5, 0), (1, 1), (3, 70), (1, 64), (17, 129), (999, 1001)]:
        x = floats(*shape)
        expect_stitched(lambda x=x: f(x), axpb_in_tf(x))
    assert "GPU" in f(floats(2, 2)).device


def test_temporaries_and_an_output_that_is_a_temporary():
    f = function(on_gpu(programs.chain()), chain_in_tf)
    for n in (0, 1, 63, 1000, 100_000):
        x, y = floats(n), floats(n) + 1
        expect_stitched(lambda x=x, y=y: f(x, y), chain_in_tf(x, y))


def test_guard_that_fails_runs_the_fallback():
    f = function(on_gpu(programs.chain()), chain_in_tf)
    x, y = floats(9), floats(1)
    expect_fallback(lambda: f(x, y), chain_in_tf(x, y))
    expect_stitched(lambda: f(x, x), chain_in_tf(x, x))


def test_shared_memory():
    """Past 48 KB, which need an opt-in; past what a block can have TensorFlow runs."""
    f = function(on_gpu(programs.rowsum()), lambda x: tf.reduce_sum(x, 1))
    for shape in [(4000, 300), (3, 0), (0, 4), (2, 12 * 1024), (2, 50_000)]:
        x = floats(*shape)
        result, ran, _ = counted(lambda x=x: f(x))
        assert ran == 1
        np.testing.assert_allclose(result, x.sum(1, dtype=np.float64), rtol=1e-3, atol=0.02)
    x = floats(1, 200_000)
    result, ran, fell_back = counted(lambda: f(x))
    assert (ran, fell_back) == (0, 1)
    np.testing.assert_allclose(result, x.sum(1, dtype=np.float64), rtol=1e-3, atol=0.2)


def test_reshape_shares_memory():
    f = function(on_gpu(programs.reshape()), lambda x: tf.reshape(x, tf.reverse(tf.shape(x), [0])))
    x = tf.constant(floats(4, 6))
    expect_stitched(lambda: f(x), x.numpy().reshape(6, 4))


def test_out_of_range_gathers_give_zero():
    f = function(on_gpu(programs.gather()), tf.gather)
    x = floats(10)
    expect_stitched(lambda: f(x, [9, 10, -1, 3]), np.array([x[9], 0, 0, x[3]]))


def test_sizes_from_values_in_host_memory():
    f = function(on_gpu(programs.fill()), lambda s: tf.fill([s[0]], tf.cast(s[1], tf.int64)), hostmem=[0])
    expect_stitched(lambda: f([3, -7]), np.full(3, -7))
    expect_stitched(lambda: f([0, 1]), np.zeros(0))
    expect_fallback(lambda: f([1001, 5]), np.full(1001, 5))
    without = function(on_gpu(programs.fill()), lambda s: tf.fill([s[0]], tf.cast(s[1], tf.int64)))
    expect_fallback(lambda: without([3, -7]), np.full(3, -7))


def test_values_that_kernels_read_too():
    """A shape vector in host memory that is also gathered by and shown under another shape."""
    n = programs.dim("n", 0, 100)
    program = on_gpu(programs.program(
        [Buffer("input", 0, "int32", (2,)), Buffer("input", 1, "float32", (programs.dim("k"),)),
         Buffer("output", 0, "int64", (n,)), Buffer("output", 1, "float32", (2,)),
         Buffer("output", 2, "int32", (2, 1))],
        [programs.launch("t_fill", (2,), n, 1, (n,)),
         programs.launch("t_gather", (1, 0, 3), 2, 1, (programs.dim("k"),)), AliasStep(0, 4)],
        {"n": SymbolSource("value", 0, 0), "k": SymbolSource("dim", 1, 0)}))
    f = function(program, lambda s, x: (tf.fill([s[0]], tf.cast(s[0], tf.int64)), tf.gather(x, s), s[:, None]),
                 hostmem=[0])
    x = floats(9)
    for a, b in [(3, 0), (0, 8), (5, 5)]:
        expect_stitched(lambda a=a, b=b: f([a, b], x), (np.full(a, a), x[[a, b]], np.array([[a], [b]])))
    expect_fallback(lambda: f([101, 2], floats(200)),
                    (np.full(101, 101), floats(200)[[101, 2]], np.array([[101], [2]])))


def test_integers_in_host_memory_are_copied_together():
    n, k, m = programs.dim("n"), programs.dim("k"), programs.dim("m")
    program = on_gpu(programs.program(
        [Buffer("input", 0, "int32", (k,)), Buffer("input", 1, "float32", (n,)), Buffer("input", 2, "int32", (m,)),
         Buffer("output", 0, "float32", (k,)), Buffer("output", 1, "float32", (m,))],
        [programs.launch("t_gather", (1, 0, 3), k, 1, (n,)), programs.launch("t_gather", (1, 2, 4), m, 1, (n,))],
        {"k": SymbolSource("dim", 0, 0), "n": SymbolSource("dim", 1, 0), "m": SymbolSource("dim", 2, 0)}))
    f = function(program, lambda i, x, j: (tf.gather(x, i), tf.gather(x, j)), hostmem=[0, 2])
    x = floats(50)
    for a, b in [([3], [0, 1, 2]), ([], [49]), (list(range(50)) * 400, [7] * 33), ([], [])]:
        i, j = np.array(a, np.int32), np.array(b, np.int32)
        for _ in range(3):
            expect_stitched(lambda i=i, j=j: f(i, x, j), (x[i], x[j]))


def test_many_aliases():
    n = programs.dim("n")
    f32 = "float32"
    program = on_gpu(programs.program(
        [Buffer("input", 0, f32, (n,)), Buffer("temp", 0, f32, (n,)), Buffer("output", 0, f32, (n,)),
         Buffer("output", 1, f32, (1, n)), Buffer("output", 2, f32, (n, 1)), Buffer("output", 3, f32, (n,))],
        [programs.launch("t_axpb", (0, 1), n), programs.launch("t_axpb", (1, 5), n), AliasStep(1, 2), AliasStep(1, 3),
         AliasStep(5, 4)], {"n": SymbolSource("dim", 0, 0)}))

    def in_tf(x):
        t = 2 * x + 1
        u = 2 * t + 1
        return t, t[None], u[:, None], u

    x = floats(77)
    expect_stitched(lambda: function(program, in_tf)(x), in_tf(x))


@pytest.mark.parametrize("make", [
    lambda good: b"",
    lambda good: serialize.dumps(good)[:-1] + b"?",
    lambda good: serialize.dumps(dataclasses.replace(good, code={"sm_50": code()["sm_90"]})),
    lambda good: serialize.dumps(dataclasses.replace(good, code={"x86-64-v3": b"\x7fELF"})),
    lambda good: serialize.dumps(dataclasses.replace(good, code={"sm_90": b"\x7fELF no"})),
    lambda good: serialize.dumps(dataclasses.replace(good, code={"compute_90": b"no PTX"})),
    lambda good: serialize.dumps(dataclasses.replace(
        good, steps=[dataclasses.replace(good.steps[0], kernel="not_there")])),
])
def test_programs_that_cannot_be_used_run_the_fallback(make):
    """With int32 in device memory, which functions have in host memory."""
    good = on_gpu(programs.gather())
    f = function(make(good), tf.gather, good)
    x = floats(7)
    expect_fallback(lambda: f(x, [6, 0, 2]), x[[6, 0, 2]])


def test_ptx_runs_where_there_is_no_machine_code():
    ptx = {"compute_90": code()["compute_90"]}
    x = floats(5, 4)
    expect_stitched(lambda: function(on_gpu(programs.axpb(), code=ptx), axpb_in_tf)(x), axpb_in_tf(x))


def test_errors_name_the_step():
    program = on_gpu(programs.axpb())
    program.steps = [dataclasses.replace(program.steps[0], threads=4096)]
    f = function(program, axpb_in_tf)
    with pytest.raises(tf.errors.InternalError,
                       match=r"CUDA_ERROR_INVALID_VALUE .* kernel 't_axpb' of 'from_t_axpb'"):
        f(floats(3, 3))
    expect_stitched(lambda: function(on_gpu(programs.axpb()), axpb_in_tf)(floats(3, 3)), axpb_in_tf(floats(3, 3)))


# --- matrix products -------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", list(DTYPES))
def test_products(dtype):
    """Exact but for a bias of half types, which is added to a rounded product, as TensorFlow's operations do it.

    float64 may have no bias: then TensorFlow's operations run.
    """
    for flags in FLAGS:
        f = function(on_gpu(programs.matmul(dtype, flags)), in_tf(flags))
        for sizes in SIZES:
            xs = operands(dtype, flags, sizes)
            want = product(flags, *xs).astype(DTYPES[dtype])
            got, ran, _ = counted(lambda f=f, xs=xs: f(*xs))
            equal_products(got.numpy(), want, flags)
            if dtype != "float64" or not flags[4]:
                assert ran == 1, (flags, sizes)


def equal_products(got, want, flags):
    if flags[4] and want.dtype.itemsize == 2:
        eps = float(ml_dtypes.finfo(want.dtype).eps)
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2 * eps, atol=8 * eps)
    else:
        np.testing.assert_array_equal(got, want)


def in_tf(flags):
    """The fallback of a product; not exact in its rounding of half types, so used where no kernel can be."""
    def call(lhs, rhs, bias=None):
        y = tf.matmul(tf.cast(lhs, tf.float64), tf.cast(rhs, tf.float64), transpose_a=bool(flags[0]),
                      transpose_b=bool(flags[1]))
        y = y if bias is None else y + tf.cast(bias, tf.float64)
        return tf.cast(y, lhs.dtype)

    return call


def test_tf32_follows_tensorflow():
    flags = (0,) * 5
    f = function(on_gpu(programs.matmul("float32", flags)), in_tf(flags))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 1, 512, 512)).astype(np.float32)
    want = product(flags, x, y)
    errors = {}
    try:
        for on in (True, False, True):
            tf.config.experimental.enable_tensor_float_32_execution(on)
            errors[on] = np.abs(f(x, y).numpy() - want).max() / np.abs(want).max()
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)
    assert errors[False] < 2e-6 and 2e-6 < errors[True] < 2e-3


def test_large_products():
    flags = (0, 1, 0, 1, 1)
    f = function(on_gpu(programs.matmul("bfloat16", flags)), in_tf(flags))
    xs = operands("bfloat16", flags, (7, 129, 1031, 515))
    got, want = f(*xs).numpy().astype(np.float32), product(flags, *xs)
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=0.5)  # of sums of hundreds


# --- graphs ----------------------------------------------------------------------------------------

def small(seed, n):
    return [np.random.default_rng([seed, i]).normal(size=(n, n)).astype(np.float32) / max(n, 1) for i in range(3)]


def close(got, want):
    for g, w in zip(got, want, strict=True):
        with np.errstate(all="ignore"):
            w = np.asarray(w, np.float32)
        scale = np.abs(w, where=np.isfinite(w), out=np.zeros_like(w)).max(initial=0)
        np.testing.assert_allclose(g.numpy(), w, rtol=2e-3, atol=1e-4 + 1e-5 * scale)


@pytest.fixture
def exact_float32():
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(True)


def wanted(drawn, xs):
    with np.errstate(all="ignore"):
        return drawn.in_tf(*[x.astype(np.float64) for x in xs])


@pytest.mark.parametrize("seed", range(12))
def test_replay_gives_what_launches_give(seed, exact_float32):
    """The arena's reuse orders the nodes of a graph; addresses repeat and change."""
    drawn = Drawn(seed)
    f = function(drawn.program, lambda *xs: tuple(tf.reshape(x, s) for x, s in zip(
        xs, (tf.shape(xs[0]), tf.shape(xs[0]), [-1]), strict=True)))
    before = graph_counters()
    keep = []
    for round_ in range(24):
        n = [33, 1, 64][round_ // 8]
        xs = small(seed * 100 + round_, n)
        got, ran, _ = counted(lambda xs=xs: f(*xs))
        assert ran == 1
        close(got, wanted(drawn, xs))
        if round_ % 3 == 0:
            keep.append(got)  # other addresses next time
    after = graph_counters()
    assert after[0] > before[0] and after[1] > before[1]


def test_replay_with_addresses_that_never_repeat(exact_float32):
    drawn = Drawn(3)
    f = function(drawn.program, lambda *xs: (xs[0], xs[0], tf.reshape(xs[0], [-1])))
    before = graph_counters()
    keep = []
    for round_ in range(40):
        xs = [tf.constant(x) for x in small(round_, 20)]
        got = f(*xs)
        keep += [*xs, *got]
        close(got, wanted(drawn, [x.numpy() for x in xs]))
    after = graph_counters()
    assert after[2] - before[2] > 10  # graphs were given other addresses
    assert after[1] - before[1] <= 8


def test_replays_in_flight_keep_their_addresses(exact_float32):
    """Results are read only at the end: graphs are changed while earlier launches of them wait."""
    drawn = Drawn(5)
    f = function(drawn.program, lambda *xs: (xs[0], xs[0], tf.reshape(xs[0], [-1])))
    given = [small(i, 256) for i in range(60)]
    results = [f(*xs) for xs in given]
    for xs, got in zip(given, results, strict=True):
        close(got, wanted(drawn, xs))


def test_many_threads_on_one_node(exact_float32):
    drawn = Drawn(9)
    f = function(drawn.program, lambda *xs: (xs[0], xs[0], tf.reshape(xs[0], [-1])))
    f(*small(0, 3))
    before = runtime.counters()

    def work(seed):
        rng = np.random.default_rng(seed)
        for i in range(12):
            xs = small(seed * 50 + i, int(rng.choice([0, 1, 7, 32, 50])))
            close(f(*xs), wanted(drawn, xs))
        return True

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))
    after = runtime.counters()
    assert (after.stitched - before.stitched, after.fallbacks - before.fallbacks) == (32 * 12, 0)


def test_off_by_the_environment():
    script = ("import numpy as np; from tests.gpu.test_op_gpu import *; d = Drawn(1)\n"
              "f = function(d.program, lambda *xs: (xs[0], xs[0], tf.reshape(xs[0], [-1])))\n"
              "for _ in range(9): close(f(*small(1, 8)), wanted(d, small(1, 8)))\n"
              "print(graph_counters())")
    env = {**os.environ, "TF_STITCH_CUDA_GRAPHS": "0", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True,
                          check=False)
    assert done.stdout.endswith("(0, 0, 0)\n"), done.stderr[-2000:]


# --- life ------------------------------------------------------------------------------------------

def free_bytes():
    cuda = ctypes.CDLL("libcuda.so.1")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert cuda.cuDevicePrimaryCtxRelease_v2(device) == 0
    return free.value


@pytest.mark.alone
def test_unloading_leaves_nothing():
    """Sessions come and go, with code of their own and with graphs; TensorFlow's own pool is taken first."""
    x = floats(64, 64)

    def once(k):
        text = TEXT.replace("+ 1.0f", f"+ {k}.0f") + f"__device__ float test_table_{k}[1 << 20];\n" \
            f"extern \"C\" __global__ void t_use_{k}() {{ test_table_{k}[threadIdx.x] = 1; }}\n"
        n, m = programs.dim("n"), programs.dim("m")
        buffers = [Buffer("input", 0, "float32", (n, m)), *(Buffer("temp", i, "float32", (n, m)) for i in range(5)),
                   Buffer("output", 0, "float32", (n, m))]
        program = on_gpu(programs.program(
            buffers, [programs.launch("t_axpb", (i, i + 1), n * m) for i in range(6)],
            {"n": SymbolSource("dim", 0, 0), "m": SymbolSource("dim", 0, 1)}), text)
        want = x
        for _ in range(6):
            want = 2 * want + k
        with tf.Graph().as_default(), tf.device("/GPU:0"):
            given = tf.compat.v1.placeholder(tf.float32, [None, None])
            y = stitched(program, axpb_in_tf)(given)
            with tf.compat.v1.Session() as session:
                for _ in range(5):
                    np.testing.assert_allclose(session.run(y, {given: x}), want, rtol=1e-5)
        gc.collect()

    for k in range(3):
        once(k)
    before = free_bytes()
    for k in range(3, 15):
        once(k)
    assert before - free_bytes() < 16 << 20  # a module that stays would hold 4 MB each


def test_profiler_shows_programs(tmp_path):
    f = function(on_gpu(programs.chain()), chain_in_tf)
    f(floats(5), floats(5))
    tf.profiler.experimental.start(str(tmp_path))
    f(floats(5), floats(5))
    tf.profiler.experimental.stop()
    assert any(b"tf_stitch:by_hand" in p.read_bytes() for p in tmp_path.rglob("*.xplane.pb"))
