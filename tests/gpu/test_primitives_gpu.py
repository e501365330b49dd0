"""Every primitive and random graphs of them on an NVIDIA GPU, judged by the interpreter."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.codegen.test_programs import decode_step, drawn, is_near
from tests.gpu.test_op_gpu import exact_float32, function  # noqa: F401 (a fixture)
from tests.ir_graphs import FLOATS, assert_matches, random_case, random_inputs
from tests.op.calls import counted
from tests.primitives import forms, judge
from tf_stitch import compiler
from tf_stitch.backend import cuda
from tf_stitch.compiler import compile_together
from tf_stitch.errors import GuardFailed
from tf_stitch.ir import interp
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.options import Options
from tf_stitch.program.program import KernelStep, LibraryStep, Program
from tf_stitch.schedule import CUDA

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
GRAPHS, BATCH = 240, 40


def compiled(graphs) -> list[Program]:
    return compile_together(graphs, Options(target=f"cuda:{cuda.device_target()}"))


def run(program: Program, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Kernels by the driver alone, into memory full of NaN; what has library calls, as a node of TensorFlow."""
    if not any(isinstance(s, LibraryStep) for s in program.steps):
        return cuda.run(program, inputs)
    f = function(program, never(program))
    result, ran, fell_back = counted(lambda: f(*inputs))
    assert (ran, fell_back) == (1, 0), "TensorFlow's operations ran"
    return [x.numpy() for x in tf.nest.flatten(result)]


def test_kernels_are_timed():
    case = random_case(0, symbolic=False, float_types=("float32",))
    program, = compiled([case.graph])
    inputs = random_inputs(case.graph, 0)
    for step in program.steps:
        if isinstance(step, KernelStep):
            assert 0 < cuda.time_kernel(program, inputs, step, rounds=3) < 1e5


def never(program: Program):
    """A fallback that gives away that it ran."""
    return lambda *xs: [tf.zeros([0] * len(b.shape), b.dtype) for b in program.of_kind("output")]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_primitives(dtype):
    made = forms(dtype)
    compared, wrong = judge(zip(made, compiled([f.graph for f in made]), strict=True), run)
    assert not wrong, "\n".join(wrong)
    assert compared > 4 * len(made)


@pytest.mark.parametrize("batch", range(GRAPHS // BATCH))
def test_random_graphs(batch):
    """Four sizes each, 0 and 1 among them; a quarter of the batches each of one float type or of all."""
    floats = (FLOATS, ("float32",), ("float16",), ("bfloat16",))[batch % 4]
    cases = [random_case(50_000 + BATCH * batch + i, float_types=floats) for i in range(BATCH)]
    compared = 0
    for i, (case, program) in enumerate(zip(cases, compiled([c.graph for c in cases]), strict=True)):
        for trial in range(4):
            # specials leave the intervals that tolerances are reckoned with: then only where they are counts
            inputs = random_inputs(case.graph, 10 * i + trial, special=0.1 if trial == 3 else 0.0)
            try:
                want = interp.run(case.graph, inputs)
            except (interp.GuardFailed, ValueError, IndexError, ZeroDivisionError):
                continue  # sizes that the graph does not allow
            try:
                assert_matches(case, want, run(program, inputs), slack=1e9 if trial == 3 else 2.0)
                compared += 1
            except GuardFailed:
                continue
            except AssertionError as error:
                raise AssertionError(f"seed {50_000 + BATCH * batch + i}, trial {trial}: {error}") from None
    assert compared > 2 * BATCH


def test_decode_steps():
    """Caches that are written and multiplied: rows of few blocks are loaded together, for a known and any batch."""
    graphs = [decode_step(), decode_step(dtype="float16"), decode_step(4, 12, 256, 64)]
    assert all("TS_BATCHES(" in compiler.lay_out(g, CUDA)[0].text for g in graphs[::2])
    for graph, program in zip(graphs, compiled(graphs), strict=True):
        for size in (1, 2, 9, 17, 65) if graph.symbols else (4,):
            inputs = drawn(graph, dict.fromkeys(graph.symbols, size), size)
            is_near(graph, inputs, cuda.run(program, inputs), f"{graph.name} {size}")
