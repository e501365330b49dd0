"""Two thousand random graphs: the imported IR against TensorFlow, unknown dims, several sizes."""
from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph import random_graphs
from tests.graph.support import assert_close, imported, ref_of, session
from tf_stitch.errors import ImportFailed
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

GRAPHS, BATCHES = 50, (3, 1, 6)
REFUSALS = ("is not known from shapes", "is not a constant", "-1 beside a dim of 0 is not determined")


def describe(g) -> str:
    ops, stack = {}, [t.op for t in g.outputs]
    while stack:
        op = stack.pop()
        if op.name not in ops:
            inputs, shapes = ', '.join(i.name for i in op.inputs), [t.shape for t in op.outputs]
            ops[op.name] = f"{op.name} = {op.type}({inputs}) {shapes}"
            stack += [i.op for i in op.inputs]
    return "\n".join(reversed(ops.values()))


def is_beside(run, t, got: np.ndarray, feed) -> bool:
    """Whether TensorFlow gives this for inputs that differ in their last places: rounding chooses a kink's gradient."""
    rng = np.random.default_rng(0)
    for _ in range(64):
        near = {p: x * (1 + rng.uniform(-1e-10, 1e-10, x.shape)) if x.dtype == np.float64 else x
                for p, x in feed.items()}
        try:
            assert_close(got, np.asarray(run.run(t, near)), 1e3, t.op.type, floor=1e-4)
        except AssertionError:
            continue
        return True
    return False


def compare(run, view, g, seed: int, wanted) -> tuple[int, int]:
    """(runs compared, runs that fell back)"""
    ir, refs = imported(view, g.outputs)
    done = fell = 0
    for batch, want in zip(BATCHES, wanted, strict=True):
        arrays = dict(zip([ref_of(p) for p in g.placeholders], g.feed(batch, seed + batch), strict=True))
        missing = [r for r in refs if r not in arrays]
        if missing:
            feed = dict(zip(g.placeholders, g.feed(batch, seed + batch), strict=True))
            extra = run.run([run.graph.get_tensor_by_name(f"{n}:{p}") for n, p in missing], feed)
            arrays.update(zip(missing, extra, strict=True))
        try:
            got = interp.run(ir, [arrays[r] for r in refs])
        except interp.GuardFailed:
            fell += 1
            continue
        for a, b, t in zip(got, want, g.outputs, strict=True):
            try:
                assert_close(a, np.asarray(b), 100.0, f"{t.op.type} at batch {batch}", floor=1e-4)
            except AssertionError:
                if not is_beside(run, t, a, dict(zip(g.placeholders, g.feed(batch, seed + batch), strict=True))):
                    raise
        done += 1
    return done, fell


@settings(max_examples=45, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31 - 1))
def test_random_graphs(seed):
    graph = tf.Graph()
    with graph.as_default():
        graphs = [random_graphs.build(seed + i) for i in range(GRAPHS)]
    view = GraphView(graph.as_graph_def())
    done = fell = refused = invalid = 0
    with session(graph) as run:
        for i, g in enumerate(graphs):
            try:
                wanted = [run.run(g.outputs, dict(zip(g.placeholders, g.feed(b, seed + i + b), strict=True)))
                          for b in BATCHES]
            except tf.errors.InvalidArgumentError:  # two unknown dims that were paired differ when run
                invalid += 1
                continue
            try:
                more, less = compare(run, view, g, seed + i, wanted)
            except ImportFailed as e:
                assert any(why in str(e) for why in REFUSALS), f"{e}\n{describe(g)}"
                refused += 1
                continue
            except (AssertionError, ValueError, IndexError) as e:
                raise AssertionError(f"graph {i} of seed {seed}: {type(e).__name__} {e}\n{describe(g)}") from e
            done, fell = done + more, fell + less
    said = f"{refused} refused, {invalid} invalid, {fell} of {done + fell} runs fell back"
    assert refused <= 2 and invalid <= 6 and fell <= GRAPHS * len(BATCHES) * 0.1, said
