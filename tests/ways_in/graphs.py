"""What the tests of the ways in share: building, running and rewriting small graphs."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_stitch
from tf_stitch.graph.rewriter import OP, rewrite
from tf_stitch.options import Options
from tf_stitch.report import Report

NATIVE = Options(target="host", levels=())  # code for this machine only: compiles faster

tf_stitch.load_library()


def native(**options: Any) -> Options:
    return Options(target="host", levels=(), **options)


def build(fn: Callable[[], Any]) -> tf.compat.v1.GraphDef:
    """The GraphDef of what ``fn`` adds to an empty graph."""
    with tf.Graph().as_default() as graph:
        fn()
    return graph.as_graph_def()


def run(graph_def: Any, fetches: Sequence[str], feeds: dict[str, np.ndarray],
        init: Sequence[str] = ()) -> list[np.ndarray]:
    """Runs a GraphDef as it is: no optimizer of TensorFlow changes it."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            if init:
                session.run(list(init))
            return session.run(list(fetches), feeds)


def stitched(graph_def: Any) -> list[Any]:
    """The StitchedProgram nodes of the graph and its functions."""
    functions = [n for f in graph_def.library.function for n in f.node_def]
    return [n for n in [*graph_def.node, *functions] if n.op == OP]


def check(graph_def: Any, fetches: Sequence[str], *feeds: dict[str, np.ndarray], clusters: int | None = None,
          init: Sequence[str] = (), keep: Sequence[str] = (), rtol: float = 2e-6) -> tuple[Any, Report]:
    """Rewrites, runs both graphs on each of ``feeds`` and compares; returns the rewritten graph and the report.

    Also checks what holds for every rewrite: the input graph is not changed, and a second rewrite changes nothing.
    """
    before = graph_def.SerializeToString(deterministic=True)
    options = native(keep=tuple(keep))
    out, report = rewrite(graph_def, options)
    assert graph_def.SerializeToString(deterministic=True) == before
    again, _ = rewrite(out, options)
    assert again.SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)
    if clusters is not None:
        assert len(report.clusters) == len(stitched(out)) == clusters, report.reasons()
    for feed in feeds:
        for want, got in zip(run(graph_def, fetches, feed, init), run(out, fetches, feed, init), strict=True):
            np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6)
            assert got.dtype == want.dtype
    return out, report


def by_name(graph_def: Any) -> dict[str, Any]:
    return {n.name: n for n in graph_def.node}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensor(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(normal(*shape, seed=seed))
