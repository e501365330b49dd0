"""Packs on an NVIDIA GPU: kernels that share a launch, and pieces of a long concat, against the interpreter."""
from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf

from tests.gpu.test_op_gpu import exact_float32, function  # noqa: F401 (a fixture)
from tests.gpu.test_primitives_gpu import compiled, never
from tests.op.calls import counted
from tests.pack_graphs import GRAPHS, drawn, joined_features, updates
from tf_stitch.backend import cuda
from tf_stitch.ir import interp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]


def hundreds():
    """Enough variables for several launches, whose parameters are as large as they may be."""
    rng = random.Random(3)
    return updates([(rng.randint(1, 200), rng.choice([1, 3, 8, 10])) for _ in range(700)])


MADE = {**GRAPHS, "hundreds": hundreds, "joined features": lambda: joined_features(80),
        "joined features of a few rows": lambda: joined_features(60, 5)}


@pytest.fixture(scope="module")
def programs():
    graphs = {name: make() for name, make in MADE.items()}
    return dict(zip(graphs, zip(graphs.values(), compiled(list(graphs.values())), strict=True), strict=True))


def close(want: list[np.ndarray], got: list[np.ndarray], what: str) -> None:
    for w, g in zip(want, got, strict=True):
        bound = (2e-2 if w.dtype == np.float16 else 1e-4) * max(float(np.abs(w).max(initial=0)), 1e-3)
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=0, atol=bound, err_msg=what)


def cases(graph):
    return (0, 1, 6, 300, 5000) if graph.symbols else (0,)


@pytest.mark.parametrize("name", MADE)
def test_kernels(name, programs):
    graph, program = programs[name]
    for size in cases(graph):
        inputs = drawn(graph, size + 1, size)
        close(interp.run(graph, inputs), cuda.run(program, inputs), f"{name} {size}")


@pytest.mark.parametrize("name", MADE)
def test_in_tensorflow(name, programs):
    """By way of CUDA graphs, too: each call has other addresses."""
    graph, program = programs[name]
    f = function(program, never(program))
    for size in cases(graph):
        for turn in range(3):
            inputs = drawn(graph, size + turn, size)
            result, ran, fell_back = counted(lambda inputs=inputs: f(*inputs))
            assert (ran, fell_back) == (1, 0), "TensorFlow's operations ran"
            close(interp.run(graph, inputs), [x.numpy() for x in tf.nest.flatten(result)], f"{name} {size}")
