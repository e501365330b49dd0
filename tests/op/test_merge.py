"""Requests joined along their batch on the CPU, through TensorFlow: answers, sizes, errors, limits."""
from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.ir_graphs import assert_matches, free_symbols, random_case, random_inputs
from tests.op import programs, test_coalesce
from tests.op.calls import stitched
from tests.op.test_coalesce import call, stats
from tests.op.test_op import floats
from tf_stitch.compiler import compile_together
from tf_stitch.ir.graph import Guard
from tf_stitch.ir.interp import run
from tf_stitch.ir.separable import find_batch
from tf_stitch.program import serialize

TABLE, OTHER = floats(50), floats(50) - 3


def joinable_in_tf(x, table, indices):
    picked = tf.gather(table, indices)
    return tf.reduce_sum(x, 1), picked, 2 * table + 1, picked[:, None]


class Model:
    """A session whose requests share a table."""

    def __init__(self, name: str, table=TABLE, program=None):
        config = tf.compat.v1.ConfigProto()
        config.experimental.session_metadata.name = name
        with tf.Graph().as_default() as graph:
            self.inputs = [tf.compat.v1.placeholder(tf.float32, [None, None]),
                           tf.compat.v1.placeholder(tf.int32, [None])]
            variable = tf.compat.v1.Variable(table, use_resource=True)
            node = stitched(program or programs.joinable(), joinable_in_tf)
            self.outputs = node(self.inputs[0], variable.read_value(), self.inputs[1])
            self.start = tf.compat.v1.global_variables_initializer()
        self.session = tf.compat.v1.Session(graph=graph, config=config)
        self.session.run(self.start)

    def __call__(self, x, indices, **options):
        feeds = dict(zip(self.inputs, (x, indices), strict=True))
        return self.session.run(self.outputs, feeds, options=tf.compat.v1.RunOptions(**options))


def request(rows: int, seed: int, columns: int = 40):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, columns)).astype(np.float32), rng.integers(0, 50, rows).astype(np.int32)


def wanted(x, indices, table=TABLE):
    return [x.sum(1), table[indices], 2 * table + 1, table[indices][:, None]]


def close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def coalescing(**options):
    """Requests wait for each other, however short they are."""
    return test_coalesce.coalescing(alone=0, **options)


def merged() -> dict:
    return stats()["devices"][0]


def crowd(work, count: int, threads: int = 16) -> list:
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(count)))


def test_requests_of_all_sizes_get_their_own_answers():
    model = Model("sizes")
    cases = [request(n, i) for i, n in enumerate((1, 0, 3, 1, 17, 2, 0, 64))]
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        crowd(lambda i: close(model(*cases[i % 8]), wanted(*cases[i % 8])), 600)
        now = merged()
        assert now["merged_requests"] > 50 and now["merged_requests"] > 1.5 * now["merged_runs"], now
        assert not now["unmerged_requests"]


def test_requests_without_rows_are_joined_with_each_other():
    model = Model("empty")
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        crowd(lambda i: close(model(*request(0, i)), wanted(*request(0, i))), 200)
        now = merged()
        assert now["merged_requests"] > 20 and not now["unmerged_requests"], now


def test_only_requests_that_share_the_rest_are_joined():
    """Other weights, another width: apart."""
    models = [Model("a"), Model("b", OTHER)]
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        def run(i: int) -> None:
            x, indices = request(1 + i % 3, i, 30 + i // 2 % 2)
            close(models[i % 2](x, indices), wanted(x, indices, OTHER if i % 2 else TABLE))

        crowd(run, 400)
        assert merged()["merged_requests"] > 20


def test_where_it_pays():
    """As it is by default: both ways are tried."""
    model = Model("pays")
    cases = [request(n, i) for i, n in enumerate((1, 2, 1, 3))]
    with coalescing(max_wait_us=2000, workers=1):
        crowd(lambda i: close(model(*cases[i % 4]), wanted(*cases[i % 4])), 400)
        assert merged()["merged_runs"] >= 3, merged()


def test_off():
    model = Model("off")
    with coalescing(max_wait_us=2000, workers=1, merge=0):
        crowd(lambda i: close(model(*request(2, i)), wanted(*request(2, i))), 100)
        assert merged()["merged_runs"] == 0


def test_an_error_fails_only_its_own_request():
    model = Model("errors")
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        def run(i: int) -> bool:
            x, indices = request(2, i)
            if i % 20:
                close(model(x, indices), wanted(x, indices))
                return False
            with pytest.raises(tf.errors.InvalidArgumentError, match="77"):
                model(x, np.array([3, 77], np.int32))
            return True

        failed = sum(crowd(run, 600))
        now, tenant = merged(), stats()["tenants"]["errors"]
        assert tenant["failed"] == failed == 30 and tenant["completed"] == 570
        assert now["merged_requests"] and now["unmerged_requests"] >= 2, now


def test_a_cancelled_request_leaves_the_others_alone():
    model, x = Model("cancelled"), request(300, 1, 3000)
    want = wanted(*x)
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        def run(i: int) -> int:
            if i % 2:
                for g, w in zip(model(*x), want, strict=True):
                    np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3)
                return 0
            try:
                model(*x, timeout_in_ms=1 + i % 9)
                return 0
            except (tf.errors.DeadlineExceededError, tf.errors.CancelledError, tf.errors.ResourceExhaustedError):
                return 1

        assert sum(crowd(run, 200)) > 0


def test_a_guard_that_does_not_hold_for_the_sum():
    """At most three rows: joined while that holds, alone otherwise."""
    n = programs.dim("n")
    program = programs.joinable()
    program.guards.append(Guard("le", n, 3, "at most three rows"))
    model = Model("guarded", program=program)
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        crowd(lambda i: close(model(*request(1, i)), wanted(*request(1, i))), 300)
        now = merged()
        assert now["merged_requests"] and now["merged_requests"] <= 3 * now["merged_runs"], now
        assert 0 < now["unmerged_requests"] < 100, now  # sizes that cannot be are not tried again and again


def test_limits():
    model = Model("limits")
    with coalescing(max_wait_us=2000, workers=1, merge=2, max_merge=4):
        crowd(lambda i: close(model(*request(2, i)), wanted(*request(2, i))), 200)
        now = merged()
        assert now["merged_runs"] and now["merged_requests"] == 2 * now["merged_runs"], now
    with coalescing(max_wait_us=2000, workers=1, merge=2, merge_mb=0):
        crowd(lambda i: close(model(*request(2, i)), wanted(*request(2, i))), 100)
        now = merged()
        assert not now["merged_runs"] and now["unmerged_requests"], now


def test_columns():
    """A batch that is not the outermost dim."""
    node = stitched(programs.columns(), lambda x: tf.reshape(2 * x + 1, [-1]))
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, None])
        y = node(x)
    session = tf.compat.v1.Session(graph=graph)
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        def run(i: int) -> None:
            given = floats(7, i % 5)
            np.testing.assert_array_equal(session.run(y, {x: given}), (2 * given + 1).reshape(-1))

        crowd(run, 400)
        assert merged()["merged_requests"] > 20


@pytest.mark.parametrize("options", [{"merge": 3}, {"max_merge": 0}, {"merge_mb": -1}])
def test_wrong_options(options):
    with pytest.raises(ValueError, match="is out of range"):
        call("enable", options)


def rewritten(f, *specs):
    """A stitched graph, and the programs in it."""
    concrete = tf.function(f, autograph=False).get_concrete_function(*specs)
    graph, _ = tf_stitch.rewrite_graph_def(concrete.graph.as_graph_def(), options=tf_stitch.Options(levels=()))
    found = [serialize.loads(n.attr["program"].s) for n in graph.node if n.op == "StitchedProgram"]
    return graph, concrete, found


def dense(x):
    rng = np.random.default_rng(5)
    for n in (64, 64, 8):
        x = tf.nn.relu(x @ tf.constant(rng.standard_normal((x.shape[1], n)).astype(np.float32) / 8))
    return tf.nn.softmax(x)


def heads(x):
    """Softmax over the steps of each head."""
    batch, steps = tf.shape(x)[0], tf.shape(x)[1]
    parts = tf.transpose(tf.reshape(tf.tanh(x), [batch, steps, 4, 16]), [0, 2, 1, 3])
    return tf.reshape(tf.transpose(tf.nn.softmax(2 * parts, axis=2), [0, 2, 1, 3]), [batch, steps, 64])


@pytest.mark.parametrize("f, shape", [(dense, [None, 64]), (heads, [None, None, 64])])
def test_rewritten_models(f, shape):
    graph, concrete, found = rewritten(f, tf.TensorSpec(shape))
    assert found and all(p.batch is not None for p in found)
    with tf.Graph().as_default() as g:
        outputs = tf.graph_util.import_graph_def(graph, return_elements=[t.name for t in concrete.outputs], name="")
    session = tf.compat.v1.Session(graph=g)
    feed = concrete.inputs[0].name
    cases = [floats(n, *([9, 64][-len(shape) + 1:])) for n in (1, 1, 2, 5)]
    wants = [f(tf.constant(c)) for c in cases]
    with coalescing(max_wait_us=2000, workers=1, merge=2):
        def run(i: int) -> None:
            got = session.run(outputs, {feed: cases[i % 4]})[0]
            np.testing.assert_allclose(got, wants[i % 4], rtol=1e-4, atol=1e-5)

        crowd(run, 400)
        assert merged()["merged_requests"] > 20


def drawn(count: int) -> list:
    """Random cases whose requests may be joined, with what they are joined along."""
    found = []
    for seed in range(1000):
        case = random_case(seed, symbolic=True, float_types=("float32",), int_types=("int32",))
        batch = find_batch(case.graph)
        if batch is not None and not case.graph.guards and any(n.op in ("dot", "reduce") for n in case.graph.nodes()):
            found.append((case, batch, seed))
    return found[:count]


def requests_of(case, batch, seed: int) -> list:
    """Twelve requests of 0 to 3 rows that may be joined."""
    sizes = {s: 3 for s in free_symbols(case.graph)}
    every = [random_inputs(case.graph, seed + n, {**sizes, batch.symbol: n % 4}) for n in range(12)]
    for inputs in every:
        for i, axis in enumerate(batch.inputs):
            if axis is None:
                inputs[i] = every[0][i]
    return every


def serve_drawn(case, batch, program, every) -> int:
    """Serves requests from many threads, each compared with the interpreter; the number of joined runs."""
    given = [i for i, axis in enumerate(batch.inputs) if axis is not None]
    wants = [run(case.graph, inputs) for inputs in every]

    def never(*_):
        return tuple(tf.zeros([0] * o.rank, o.dtype) for o in case.graph.outputs)

    with tf.Graph().as_default() as graph:
        feeds = [tf.compat.v1.placeholder(x.dtype, [None] * x.ndim) if i in given else tf.constant(x)
                 for i, x in enumerate(every[0])]
        outputs = tf.nest.flatten(stitched(program, never, shapes=False)(*feeds))
    session = tf.compat.v1.Session(graph=graph)

    def work(i: int) -> None:
        got = session.run(outputs, {feeds[k]: every[i % 12][k] for k in given})
        assert_matches(case, wants[i % 12], got)

    with coalescing(max_wait_us=2000, workers=1, merge=2):
        crowd(work, 240)
        return merged()["merged_runs"]


def test_random_models():
    """Programs of random graphs without operations that may refuse."""
    cases = [c for c in drawn(10) if not any(n.op.startswith(("gather", "int_")) for n in c[0].graph.nodes())]
    compiled = compile_together([case.graph for case, _, _ in cases], tf_stitch.Options(target="host", levels=()))
    joined = 0
    for (case, batch, seed), program in zip(cases, compiled, strict=True):
        assert program.batch == batch
        joined += serve_drawn(case, batch, program, requests_of(case, batch, seed))
    assert joined > 20
