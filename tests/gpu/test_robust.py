"""What a model must survive on a GPU, by the ways in that users have: other chips, no memory, odd sizes, threads."""
from __future__ import annotations

import concurrent.futures
import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.gpu.test_op_gpu import exact_float32, free_bytes  # noqa: F401 (a fixture)
from tests.op.calls import counted
from tf_stitch import runtime
from tf_stitch.codegen.kernel import INDEX_LIMIT
from tf_stitch.options import Options

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent
v1 = tf.compat.v1


def chain(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.softmax(tf.nn.gelu(x * 2.0 + 1.0) - tf.reduce_mean(x, -1, keepdims=True))


def session_run(graph_def: tf.compat.v1.GraphDef, x: np.ndarray) -> np.ndarray:
    """The output "y" of a graph, its nodes on the GPU."""
    with tf.Graph().as_default():
        tf.import_graph_def(graph_def, name="")
        with v1.Session() as session:
            return session.run("y:0", {"x:0": x})


def rewritten(fn=chain, **options) -> tf.compat.v1.GraphDef:
    with tf.Graph().as_default() as graph, tf.device("/GPU:0"):
        x = v1.placeholder(tf.float32, [None, None], name="x")
        tf.identity(fn(x), name="y")
    out, report = tf_stitch.rewrite_graph_def(graph.as_graph_def(), options=Options(**options))
    assert report.clusters
    return out


def values(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(rows + columns + seed).standard_normal((rows, columns)).astype(np.float32)


# TensorFlow's allocator gives up at once, not after ten seconds of asking again.
NO_RETRIES = """
import tensorflow as tf
from tensorflow.python.eager import context
context.context()._config = tf.compat.v1.ConfigProto()
context.context()._config.gpu_options.experimental.disallow_retry_on_allocation_failure = True
"""


def in_a_process(script: str) -> str:
    """What a script prints, on both streams, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "TF_CPP_MIN_LOG_LEVEL": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


# --- other chips -----------------------------------------------------------------------------------

def test_code_for_an_older_chip_runs_from_its_ptx():
    x = values(33, 100)
    graph = rewritten(target="cuda:sm_80")
    got, ran, fell_back = counted(lambda: session_run(graph, x))
    assert (ran, fell_back) == (1, 0)
    np.testing.assert_allclose(got, chain(tf.constant(x)), rtol=1e-5, atol=1e-7)


def test_code_for_a_newer_chip_runs_tensorflow_and_says_why():
    said = in_a_process("""
import numpy as np
from tests.gpu.test_robust import *
x = values(33, 100)
graph = rewritten(target="cuda:sm_120")
got, ran, fell_back = counted(lambda: session_run(graph, x))
assert (ran, fell_back) == (0, 1), (ran, fell_back)
np.testing.assert_allclose(got, chain(tf.constant(x)), rtol=1e-5, atol=1e-7)
""")
    assert "sm_120" in said and "compute_120" in said  # what it has code for


# --- no memory -------------------------------------------------------------------------------------

def test_exhausted_memory_is_an_error_and_the_next_call_works():
    """256 MiB for TensorFlow: a call that needs more says so, gives back what it took, and smaller ones go on."""
    in_a_process(NO_RETRIES + """
import gc
gpu = tf.config.list_physical_devices("GPU")[0]
tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=256)])
from tests.gpu.test_robust import *
f = tf_stitch.function(lambda x, w: (tf.matmul(tf.nn.gelu(x), w) + 1.0, tf.nn.softmax(x) * 2.0),
                       input_signature=[tf.TensorSpec([None, 1024]), tf.TensorSpec([1024, 1024])])
w = tf.constant(values(1024, 1024))
small = tf.constant(values(512, 1024))
want = [np.asarray(y) for y in f.python_function(small, w)]
def used():
    gc.collect()
    return tf.config.experimental.get_memory_info("GPU:0")["current"]
def grown():  # a few scalars of TensorFlow's own come and go; any of the tensors here is larger
    return used() - before >= 64 << 10
def check():
    got, ran, fell_back = counted(lambda: f(small, w))
    assert ran and not fell_back, (ran, fell_back)
    for g, y in zip(got, want):
        np.testing.assert_allclose(g, y, rtol=1e-2, atol=1e-2)
for _ in range(8):
    check()
before = used()
for attempt in range(4):
    large = tf.zeros([20_000, 1024])  # 78 MiB, and as much for each of the outputs and for what lies between
    try:
        got = f(large, w)
        total = float(tf.reduce_sum(got[1]))  # it fitted after all: then it must be right
        assert abs(total - 2 * 20_000) < 1.0, total
    except tf.errors.ResourceExhaustedError as error:
        assert "allocat" in str(error) and "{{node " in str(error), error
    large = got = None
    check()
    assert not grown(), (used(), before)
huge = tf.zeros([40_000, 1024])
try:
    f(huge, w)
except tf.errors.ResourceExhaustedError as error:
    assert "allocat" in str(error) and "{{node " in str(error), error
else:
    raise AssertionError("160 MiB of input, twice that of output in 256 MiB")
huge = None
check()
assert not grown(), (used(), before)
""")


@pytest.mark.alone
def test_no_memory_beside_tensorflows_own():
    """Code, CUDA graphs and libraries take memory that TensorFlow does not hold: without any, results are right still,
    or an error names what could not be had; with memory again, all is well.
    """
    said = in_a_process(NO_RETRIES + """
import numpy as np
from tests.gpu.test_robust import *
from tf_stitch.backend import cuda
tf.config.experimental.enable_tensor_float_32_execution(False)
w = tf.constant(values(512, 512) / 16)
def model(k):
    def call(x):
        for i in range(4):
            x = chain(tf.matmul(tf.tanh(x), w) + float(k))
        return x
    return tf_stitch.function(call, input_signature=[tf.TensorSpec([None, 512])])
models = {k: model(k) for k in (0, 1, 2, 3, 5)}
def wanted(k, n):  # TensorFlow's own libraries need memory too
    return models[k].python_function(tf.constant(values(n, 512))).numpy()
want = {(k, n): wanted(k, n) for k in models for n in (1, 100, 333, 777, 1000, 2000)}
def judge(k, n):
    np.testing.assert_allclose(models[k](tf.constant(values(n, 512))), want[k, n], rtol=2e-3, atol=1e-5)
judge(0, 2000)
driver, taken = cuda.driver(), []
size = 4 << 30
while size >= 64 << 10:
    try:
        taken.append(driver.mem_alloc(size))
    except driver.MemoryError:
        size //= 2
print("free:", driver.mem_get_info()[0] >> 20, "MiB")
refused = []
def attempt(k, n):
    try:
        judge(k, n)
    except tf.errors.OpError as error:
        assert "OUT_OF_MEMORY" in str(error) or "allocat" in str(error), error
        refused.append(str(error).splitlines()[0][:300])
for n in (1, 100, 333, 1000) * 4:
    attempt(0, n)
for k in range(1, 4):
    attempt(k, 100)
print("refused:", len(refused), *set(refused), sep=" | ")
for memory in taken:
    memory.free()
before = runtime.counters()
for k in (0, 5):
    for n in (1, 100, 777):
        judge(k, n)
after = runtime.counters()
assert after.stitched - before.stitched >= 6 and after.fallbacks == before.fallbacks
""")
    print(said[-2000:])


@pytest.mark.alone
def test_nothing_stays_behind_when_models_come_and_go():
    """Sessions over models that are rewritten anew, each with code and weights of its own."""
    x = values(64, 256)

    def once(k: int) -> None:
        graph = rewritten(lambda x: chain(x + float(k)) * tf.constant(values(1, 256)) + float(k))
        got, ran, _ = counted(lambda: [session_run(graph, x) for _ in range(2)])
        assert ran == 2
        np.testing.assert_allclose(got[0], chain(tf.constant(x + k)) * values(1, 256) + k, rtol=1e-4, atol=1e-5)
        gc.collect()

    for k in range(3):
        once(k)
    before, resident = free_bytes(), _resident()
    for k in range(3, 12):
        once(k)
    assert before - free_bytes() < 8 << 20
    assert _resident() - resident < 100 << 20


@pytest.mark.alone
@pytest.mark.usefixtures("exact_float32")
def test_nothing_grows_with_the_number_of_shapes():
    """Plans, CUDA graphs and what libraries keep are bounded: new shapes push old ones out."""
    ws = [tf.constant(values(64, 64, seed) / 8) for seed in range(4)]

    def layers(x: tf.Tensor) -> tf.Tensor:
        for w in ws:
            x = chain(tf.matmul(tf.tanh(x), w))
        return x

    f = tf_stitch.function(layers, input_signature=[tf.TensorSpec([None, 64])])
    f(tf.zeros([2500, 64]))  # as much of TensorFlow's pool as any size takes

    def calls(sizes: range) -> None:
        for n, _ in itertools.product(sizes, range(6)):
            f(tf.fill([n, 64], 0.5)).numpy()

    def once(sizes: range) -> None:
        _, ran, fell_back = counted(lambda: calls(sizes))
        assert (ran, fell_back) == (6 * len(sizes), 0)
        gc.collect()

    once(range(1, 400))
    before, resident = free_bytes(), _resident()
    once(range(400, 1200))
    assert before - free_bytes() < 32 << 20  # a graph of these takes tens of kB; each size made one
    assert _resident() - resident < 100 << 20
    x = tf.constant(values(777, 64))
    np.testing.assert_allclose(f(x), layers(x), rtol=2e-3, atol=1e-5)


def _resident() -> int:
    """Bytes of this process in the host's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- sizes -----------------------------------------------------------------------------------------

def test_a_shape_outside_the_guards_runs_tensorflow():
    """Two unknown sizes are taken to be equal; where they are not, broadcasting is TensorFlow's."""
    f = tf_stitch.function(lambda x, y: tf.tanh(x + y) * tf.exp(-y) + x,
                           input_signature=[tf.TensorSpec([None, 40]), tf.TensorSpec([None, 40])])
    for n, k in [(7, 7), (7, 1), (1, 7), (9, 9), (0, 0), (0, 1)]:
        x, y = values(n, 40), values(k, 40)
        got = f(x, y)
        np.testing.assert_allclose(got, np.tanh(x + y) * np.exp(-y) + x, rtol=1e-5, atol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError):
        f(values(7, 40), values(3, 40))
    _, ran, fell_back = counted(lambda: f(values(7, 40), values(7, 40)))
    assert (ran, fell_back) == (1, 0)


# Nothing here runs larger sizes. Beyond the limit an op runs TensorFlow's own kernels, and those that count in 32 bits
# skip elements or write out of bounds, which ends the process's CUDA context. That the guards do refuse such sizes is
# checked in tests/fusion/test_compiler.py.

@pytest.mark.parametrize("n", [INDEX_LIMIT - 64, INDEX_LIMIT])
def test_as_many_elements_as_32_bits_count(n):
    """Float16, 4 GiB each way."""
    if free_bytes() < 24 << 30:
        pytest.skip("less than 24 GiB of GPU memory are free")
    f = tf_stitch.function(lambda x: tf.maximum(x * 2.0 - 0.5, 0.25) + tf.square(x),
                           input_signature=[tf.TensorSpec([None], tf.float16)])
    piece = tf.constant(np.random.default_rng(0).random(1 << 20).astype(np.float16))
    x = tf.tile(piece, [-(-n // (1 << 20))])[:n]
    got, ran, fell_back = counted(lambda: f(x))
    assert (ran, fell_back) == (1, 0)
    want = f.python_function(piece)
    for start in [0, 1 << 20, (1 << 30) - (1 << 20), (n >> 20 << 20) - (1 << 20)]:
        tf.debugging.assert_equal(got[start:start + (1 << 20)], want)
    tail = n & ((1 << 20) - 1)
    tf.debugging.assert_equal(got[n - tail:], want[:tail])


def test_rows_up_to_32_bits():
    """Rows of almost 2^31 elements in all: their bytes do not fit 32 bits."""
    if free_bytes() < 24 << 30:
        pytest.skip("less than 24 GiB of GPU memory are free")
    f = tf_stitch.function(lambda x: x * 3.0 - tf.reduce_max(x, -1, keepdims=True),
                           input_signature=[tf.TensorSpec([None, None], tf.float16)])
    rows = tf.constant(np.random.default_rng(1).standard_normal((1 << 7, 1 << 13)).astype(np.float16))
    copies = INDEX_LIMIT >> 20
    x = tf.tile(rows, [copies, 1])
    (got, want), ran, fell_back = counted(lambda: (f(x), f(rows)))
    assert (ran, fell_back) == (2, 0)
    tf.debugging.assert_equal(want, f.python_function(rows))
    for k in (0, copies // 2, copies - 1):
        tf.debugging.assert_equal(got[k << 7:(k + 1) << 7], want)


# --- threads ---------------------------------------------------------------------------

@pytest.mark.usefixtures("exact_float32")
def test_32_threads_on_one_function():
    """Different batch sizes at the same time, from the first call on."""
    w = tf.Variable(values(48, 48))
    f = tf_stitch.function(lambda x: chain(tf.matmul(tf.tanh(x), w)), input_signature=[tf.TensorSpec([None, 48])])
    sizes = [0, 1, 2, 3, 17, 64, 100, 333]
    xs = {n: tf.constant(values(n, 48)) for n in sizes}
    want = {n: np.asarray(chain(tf.matmul(tf.tanh(x), w))) for n, x in xs.items()}
    before = runtime.counters()

    def work(seed: int) -> bool:
        for n in np.random.default_rng(seed).choice(sizes, 20):
            np.testing.assert_allclose(f(xs[n]), want[n], rtol=2e-3, atol=1e-5)
        return True

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))
    after = runtime.counters()
    assert (after.stitched - before.stitched, after.fallbacks - before.fallbacks) == (32 * 20, 0)
