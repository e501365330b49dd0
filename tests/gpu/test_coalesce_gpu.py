"""Coalescing on an NVIDIA GPU: concurrent requests share launches, and their answers are those of lone runs."""
from __future__ import annotations

import concurrent.futures
import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.gpu.kernels import on_gpu
from tests.op import programs
from tests.op.calls import specs_of, stitched
from tests.op.test_coalesce import call, coalescing, stats
from tests.op.test_op import chain_in_tf, floats
from tf_stitch.ir import dims as D
from tf_stitch.program import serialize
from tf_stitch.program.program import LibraryStep

pytestmark = pytest.mark.gpu

DEPTH, WIDTH = 6, 512
FEW, ROWS = 64, 96  # kernels multiply up to FEW rows, the library multiplies ROWS
DEEP = 32  # layers that keep the device busy for longer than TensorFlow needs for a turn of sixteen clients
TURNS = 25  # requests that a client sends without Python in between


def layers(x, *weights):
    """Dense layers with an attention-like product of batches in between."""
    for i in range(0, len(weights), 2):
        x = tf.nn.relu(x @ weights[i] + weights[i + 1])
    heads = tf.reshape(x, [-1, 4, WIDTH // 4])
    return tf.nn.softmax(tf.linalg.matmul(heads, heads, transpose_b=True)), tf.reduce_sum(x, 1)


def library_calls(programs, rows: int) -> int:
    """How many products of so many rows the library computes."""
    sizes = {symbol: rows for p in programs for symbol in p.symbols}
    return sum(isinstance(s, LibraryStep) and all(D.evaluate(d, sizes) for d in s.dims)
               for p in programs for s in p.steps)


@functools.cache
def rewritten(rows: int | None, depth: int = DEPTH):
    """The layers as a stitched graph whose kernels can take many requests; weights are its arguments.

    Where the number of rows is unknown, kernels multiply FEW of them and fewer.
    """
    specs = [tf.TensorSpec([rows, WIDTH]), *[tf.TensorSpec([WIDTH, WIDTH]), tf.TensorSpec([WIDTH])] * depth]
    with tf.device("/GPU:0"):
        concrete = tf.function(layers, autograph=False).get_concrete_function(*specs)
    options = tf_stitch.Options(target="cuda:sm_90", superkernels=True)
    stitched, _ = tf_stitch.rewrite_graph_def(concrete.graph.as_graph_def(), options=options)
    programs = [serialize.loads(n.attr["program"].s) for n in stitched.node if n.op == "StitchedProgram"]
    assert programs
    for few in range(1, FEW + 1) if rows is None else ():
        assert not library_calls(programs, few)
    assert library_calls(programs, rows or ROWS) == depth
    return stitched, [t.name for t in concrete.inputs], [t.name for t in concrete.outputs], rows, depth


@pytest.fixture(scope="module")
def graph():
    return rewritten(None)


class Tenant:
    """A session of its own with weights of its own, which stay on the device."""

    def __init__(self, graph, name: str, seed: int):
        definition, inputs, outputs, rows, depth = graph
        rng = np.random.default_rng(seed)
        config = tf.compat.v1.ConfigProto()
        config.experimental.session_metadata.name = name
        config.gpu_options.allow_growth = True
        with tf.Graph().as_default() as g, tf.device("/GPU:0"):
            self.x = tf.compat.v1.placeholder(tf.float32, [rows, WIDTH])
            shapes = [[WIDTH, WIDTH], [WIDTH]] * depth
            weights = [tf.compat.v1.Variable(rng.standard_normal(s).astype(np.float32) / 16, use_resource=True)
                       for s in shapes]
            names = [n.split(":")[0] for n in inputs]
            feeds = dict(zip(names, [self.x, *[w.read_value() for w in weights]], strict=True))
            self.outputs = tf.graph_util.import_graph_def(definition, feeds, outputs, name="")
            self.last = self._turns(definition, feeds, outputs)
            start = tf.compat.v1.global_variables_initializer()
        self.session = tf.compat.v1.Session(graph=g, config=config)
        self.session.run(start)

    def _turns(self, definition, feeds, outputs):
        """TURNS requests one after the other, each from the last one's answer, which goes by way of the host."""
        name = next(k for k, v in feeds.items() if v is self.x)

        def turn(i, x):
            here = {k: x if k == name else tf.identity(v) for k, v in feeds.items()}
            _, sums = tf.graph_util.import_graph_def(definition, here, outputs, name="turn")
            with tf.device("/CPU:0"):
                seen = tf.tanh(sums)
            return i + 1, x + 0.01 * seen[:, None]

        return tf.while_loop(lambda i, _: i < TURNS, turn, [0, self.x], parallel_iterations=1)[1]

    def __call__(self, x, **options):
        return self.session.run(self.outputs, {self.x: x}, options=tf.compat.v1.RunOptions(**options))


def close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-2, atol=1e-2)  # batches of products may sum in another order, in TF32


def gpu_stats():
    now = stats()
    return now, next(d for d in now["devices"] if d["name"] == "GPU:0")


@pytest.mark.parametrize("rows", [None, ROWS])
def test_many_tenants_of_one_model(rows):
    tenants = [Tenant(rewritten(rows), f"{rows}_rows_{i}", i) for i in range(6)]
    sizes = (1, 1, 7, 32) if rows is None else (rows, rows)
    xs = [np.random.default_rng(i).standard_normal((n, WIDTH)).astype(np.float32) for i, n in enumerate(sizes)]
    cases = [(t, x, t(x)) for t in tenants for x in xs]
    with coalescing():
        def work(seed: int) -> int:
            for i in np.random.default_rng(seed).permutation(len(cases)):
                tenant, x, want = cases[i]
                close(tenant(x), want)
            return len(cases)

        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            runs = sum(pool.map(work, range(48)))
        now, _ = gpu_stats()
        completed = sum(t["completed"] for n, t in now["tenants"].items() if n.startswith(f"{rows}_rows_"))
        assert completed >= runs and completed % runs == 0  # a request runs each program of its graph once


def test_sixteen_clients_of_four_tenants_of_two_models_share_launches():
    cases = []
    for rows, many in ((None, FEW), (ROWS, ROWS)):
        tenants = [Tenant(rewritten(rows, DEEP), f"client_of_{rows}_{i}", i) for i in range(2)]
        xs = [np.random.default_rng(i).standard_normal((many, WIDTH)).astype(np.float32) for i in range(2)]
        cases += [(t, x, t.session.run(t.last, {t.x: x})) for t in tenants for x in xs]
    with coalescing():
        def client(i: int) -> None:
            tenant, x, want = cases[i % len(cases)]
            for _ in range(4):
                close([tenant.session.run(tenant.last, {tenant.x: x})], [want])

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(client, range(16)))
        now, device = gpu_stats()
        completed = sum(t["completed"] for n, t in now["tenants"].items() if n.startswith("client_of_"))
        assert completed >= 16 * 4 * TURNS and completed % (16 * 4 * TURNS) == 0
        assert device["coalescing_factor"] > 1.5, device


def test_a_request_alone_waits_for_nobody(graph):
    tenant, x = Tenant(graph, "lone", 3), np.ones((7, WIDTH), np.float32)
    want = tenant(x)
    with coalescing(max_wait_us=1_000_000):
        for _ in range(50):
            close(tenant(x), want)
        now, device = gpu_stats()
        assert now["tenants"]["lone"]["completed"] % 50 == 0 and device["coalescing_factor"] == 1
        assert now["tenants"]["lone"]["latency_ms"]["sum"] < 50 * 20


def test_equal_groups_give_equal_answers(graph):
    """A request's answer does not depend on whose company it had."""
    tenants = [Tenant(graph, f"equal_{i}", i) for i in range(4)]
    x = np.random.default_rng(5).standard_normal((4, WIDTH)).astype(np.float32)
    with coalescing(max_wait_us=5000), concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [list(pool.map(lambda t: t(x), tenants)) for _ in range(30)]
    for again in answers[1:]:
        for got, want in zip(again, answers[0], strict=True):
            close(got, want)


def test_cancelled_and_late_requests_leave_others_alone(graph):
    good, slow = Tenant(graph, "good", 1), Tenant(graph, "slow", 2)
    x, large = np.ones((3, WIDTH), np.float32), np.ones((5_000, WIDTH), np.float32)
    want = good(x)
    slow(large)
    call("set_tenant", "slow", {"priority": "best_effort", "max_in_flight": 2})
    with coalescing():
        def run(i: int) -> int:
            if i % 3:
                close(good(x), want)
                return 0
            try:
                slow(large, timeout_in_ms=1 + i % 5)
                return 0
            except (tf.errors.DeadlineExceededError, tf.errors.CancelledError, tf.errors.ResourceExhaustedError):
                return 1

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            sum(pool.map(run, range(240)))
        completed = stats()["tenants"]["good"]["completed"]
        assert completed >= 160 and completed % 160 == 0
    call("remove_tenant", "slow")


def test_programs_whose_kernels_take_one_problem_run_side_by_side():
    program = on_gpu(programs.chain())
    node = stitched(program, chain_in_tf)

    @tf.function(input_signature=specs_of(program), autograph=False)
    def f(x, y):
        with tf.device("/GPU:0"):
            return node(x, y)

    cases = [(floats(n), floats(n) + 1) for n in (10, 1000, 70_001)]
    wants = [[t.numpy() for t in f(x, y)] for x, y in cases]
    with coalescing(max_wait_us=500), concurrent.futures.ThreadPoolExecutor(8) as pool:
        def run(i: int) -> None:
            for got, want in zip(f(*cases[i % 3]), wants[i % 3], strict=True):
                np.testing.assert_array_equal(got, want)

        list(pool.map(run, range(300)))
