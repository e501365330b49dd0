"""Requests joined along their batch on an NVIDIA GPU: answers are those of lone runs, up to rounding."""
from __future__ import annotations

import concurrent.futures
import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from tests.gpu.test_coalesce_gpu import WIDTH, Tenant, close, rewritten
from tests.op.test_coalesce import coalescing, stats
from tf_stitch.program import serialize

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def graph():
    found = rewritten(None)
    programs = [serialize.loads(n.attr["program"].s) for n in found[0].node if n.op == "StitchedProgram"]
    assert all(p.batch is not None for p in programs)
    return found


def on_device() -> dict:
    return next(d for d in stats()["devices"] if d["name"] == "GPU:0")


def turns(tenant, x):
    """The last answer of requests that follow each other without Python in between."""
    return [tenant.session.run(tenant.last, {tenant.x: x})]


def case(tenant, x):
    """A client, what it sends first, and what it is to get."""
    return functools.partial(turns, tenant), x, turns(tenant, x)


def serve(cases, threads: int = 16, rounds: int = 16) -> None:
    """Requests in random order from many threads, each answer compared."""
    def work(seed: int) -> None:
        for i in np.random.default_rng(seed).permutation(len(cases)):
            tenant, x, want = cases[i]
            close(tenant(x), want)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(rounds)))


def inputs(sizes) -> list[np.ndarray]:
    return [np.random.default_rng(i).standard_normal((n, WIDTH)).astype(np.float32) for i, n in enumerate(sizes)]


def test_sizes_of_one_tenant_are_joined(graph):
    tenant = Tenant(graph, "joined", 1)
    cases = [case(tenant, x) for x in inputs((1, 1, 2, 0, 1, 5, 7, 1))]
    with coalescing(merge=2):
        serve(cases)
        now = on_device()
        assert now["merged_requests"] > now["merged_runs"] > 20 and not now["unmerged_requests"], now


def test_tenants_have_their_own_weights(graph):
    tenants = [Tenant(graph, f"joined_{i}", i) for i in range(3)]
    cases = [case(t, x) for t in tenants for x in inputs((1, 1, 3))]
    with coalescing(merge=2):
        serve(cases)
        assert on_device()["merged_runs"] > 5, on_device()


def test_limits(graph):
    tenant = Tenant(graph, "limits", 1)
    cases = [case(tenant, x) for x in inputs((2, 2, 2))]
    with coalescing(merge=2, max_merge=4):
        serve(cases)
        now = on_device()
        assert now["merged_runs"] and now["merged_requests"] == 2 * now["merged_runs"], now
    with coalescing(merge=2, merge_mb=0):
        serve(cases, rounds=4)
        assert not on_device()["merged_runs"]
    with coalescing(merge=0):
        serve(cases, rounds=4)
        assert not on_device()["merged_runs"] and not on_device()["unmerged_requests"]


def test_steps_first_batches():
    """The batch is the second dim: copies have a step."""
    weights = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16

    def steps_first(x):
        for _ in range(24):  # long enough that others come meanwhile
            x = tf.nn.softmax(tf.tensordot(tf.tanh(x), weights, 1) + tf.reduce_sum(x, 0, keepdims=True))
        return x

    with tf.device("/GPU:0"):
        concrete = tf.function(steps_first, autograph=False).get_concrete_function(tf.TensorSpec([6, None, WIDTH]))
    options = tf_stitch.Options(target="cuda:sm_90", superkernels=True)
    graph, _ = tf_stitch.rewrite_graph_def(concrete.graph.as_graph_def(), options=options)
    found = [serialize.loads(n.attr["program"].s) for n in graph.node if n.op == "StitchedProgram"]
    assert found and all(p.batch is not None and p.batch.inputs[0] == 1 for p in found)
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.allow_growth = True
    with tf.Graph().as_default() as g:
        outputs = tf.graph_util.import_graph_def(graph, return_elements=[t.name for t in concrete.outputs], name="")
    session = tf.compat.v1.Session(graph=g, config=config)
    feed = concrete.inputs[0].name

    def tenant(x):
        return session.run(outputs, {feed: x})

    xs = [np.random.default_rng(n).standard_normal((6, n, WIDTH)).astype(np.float32) for n in (1, 2, 3, 1)]
    cases = [(tenant, x, tenant(x)) for x in xs]
    with coalescing(merge=2, under_way=1):
        serve(cases, threads=32, rounds=64)
        assert on_device()["merged_runs"] > 5, on_device()
