"""Runs small TensorFlow graphs both ways: TensorFlow's own kernels, and import_cluster plus the interpreter."""
from __future__ import annotations

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels

from tf_stitch.errors import ImportFailed
from tf_stitch.graph import lower
from tf_stitch.graph.importer import import_cluster
from tf_stitch.graph.view import GraphView, Ref
from tf_stitch.ir import interp
from tf_stitch.ir.graph import Graph

v1 = tf.compat.v1

# Largest error relative to the output's largest value; TensorFlow's own float32 kernels are that far off.
RTOL = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@functools.cache
def has_kernel(op: str, dtype: str, attr: str = "T") -> bool:
    """TensorFlow has a CPU kernel of the op for the type."""
    wanted = tf.as_dtype(dtype).as_datatype_enum
    for k in kernels.get_registered_kernels_for_op(op).kernel:
        limits = [c for c in k.constraint if c.name == attr]
        if k.device_type == "CPU" and all(wanted in c.allowed_values.list.type for c in limits):
            return True
    return False


def session(graph: tf.Graph) -> v1.Session:
    """A session that runs the nodes as they are, with no graph optimizer."""
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1,
                            use_per_session_threads=True)  # else the first session's numbers are the process's
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    return v1.Session(graph=graph, config=config)


def run_graph(graph: tf.compat.v1.GraphDef, x: np.ndarray) -> np.ndarray:
    """``y`` of a graph for its placeholder ``x``, without any optimizer.

    Variables get the values of their initializers, whose names begin with "init".
    """
    g = tf.Graph()
    with g.as_default():
        tf.graph_util.import_graph_def(graph, name="")
    with session(g) as s:
        for n in graph.node:
            if n.name.startswith("init"):
                s.run(n.name)
        return s.run("y:0", {"x:0": x})


def spec(x: np.ndarray, unknown: bool | Sequence[int] = False) -> list[int | None]:
    """The shape of ``x`` with all, none, or the listed dims unknown."""
    hidden = range(x.ndim) if unknown is True else () if unknown is False else unknown
    return [None if i in hidden else d for i, d in enumerate(x.shape)]


@dataclass
class Case:
    """One graph: ``build`` makes the outputs from placeholders, ``inputs`` feed them (several runs allowed)."""

    build: Callable[..., object]
    inputs: list[list[np.ndarray]]
    shapes: list[list[int | None]]
    tolerance: float = 1.0
    elementwise: bool = False  # every element must be close by itself
    outputs: list[tf.Tensor] = field(default_factory=list)
    placeholders: list[tf.Tensor] = field(default_factory=list)


def case(build: Callable[..., object], *inputs: np.ndarray, unknown: bool | Sequence[int] = False,
         tolerance: float = 1.0, elementwise: bool = False) -> Case:
    """A case with one run; ``unknown`` says which dims the graph does not know."""
    arrays = [np.asarray(x) for x in inputs]
    return Case(build, [arrays], [spec(x, unknown) for x in arrays], tolerance, elementwise)


OUTSIDE = {"Placeholder", "UnsortedSegmentSum"}  # what a cluster never holds


def cluster_of(view: GraphView, outputs: Sequence[Ref]) -> tuple[list[str], list[Ref]]:
    """Everything behind the outputs, and what it reads that is not part of it (placeholders, large constants, ...)."""
    nodes: dict[str, None] = {}
    inputs: dict[Ref, None] = {}
    stack = [name for name, _ in outputs]
    while stack:
        name = stack.pop()
        if name in nodes:
            continue
        nodes[name] = None
        for ref in view[name].inputs:
            source = view[ref[0]]
            if source.op in OUTSIDE or (source.op == "Const" and not lower.is_literal(view, source)):
                inputs[ref] = None
            else:
                stack.append(ref[0])
    return list(nodes), list(inputs)


def ref_of(t: tf.Tensor) -> Ref:
    return t.op.name, t.value_index


def imported(view: GraphView, outputs: Sequence[tf.Tensor]) -> tuple[Graph, list[Ref]]:
    refs = [ref_of(t) for t in outputs]
    nodes, inputs = cluster_of(view, refs)
    return import_cluster(view, nodes, inputs, refs, name="case"), inputs


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float, what: str, elementwise: bool = False,
                 floor: float = 1e-30) -> None:
    """Equal shape, dtype, NaN and Inf; finite values within the tolerance of the largest, or each of its own.

    ``floor``: a largest value that is smaller is taken to be left over from cancellation.
    """
    assert got.shape == want.shape, f"{what}: shape {got.shape}, TensorFlow {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, TensorFlow {want.dtype}"
    rtol = RTOL.get(str(want.dtype))
    if rtol is None:
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    np.testing.assert_array_equal(np.where(np.isfinite(a), 0, a), np.where(finite, 0, b), err_msg=what)
    if elementwise:
        rtol *= tolerance  # the small absolute part: TensorFlow's expm1 and tanh lose digits near 0
        np.testing.assert_allclose(a[finite], b[finite], rtol=rtol, atol=rtol * 1e-2, err_msg=what)
        return
    scale = np.abs(b[finite]).max(initial=0.0)
    worst = np.abs(a[finite] - b[finite]).max(initial=0.0)
    assert worst <= rtol * tolerance * max(scale, floor) + 1e-37, f"{what}: error {worst} of {scale}\n{got}\n{want}"


@dataclass
class Tally:
    """What run_cases did: runs compared, and runs whose guards did not hold."""

    compared: int = 0
    fell_back: int = 0


def run_cases(cases: Sequence[Case], may_fall_back: bool = False) -> Tally:
    """Builds all cases in one graph, runs them both ways and compares."""
    graph = tf.Graph()
    with graph.as_default():
        for c in cases:
            c.placeholders = [v1.placeholder(x.dtype, s) for x, s in zip(c.inputs[0], c.shapes, strict=True)]
            made = c.build(*c.placeholders)
            c.outputs = [tf.convert_to_tensor(t) for t in (made if isinstance(made, (list, tuple)) else [made])]
    view = GraphView(graph.as_graph_def())
    tally = Tally()
    with session(graph) as run:
        failures = []
        for number, c in enumerate(cases):
            try:
                _run_case(run, view, c, f"case {number}: {[t.op.name for t in c.outputs]}", may_fall_back, tally)
            except (AssertionError, ImportFailed, ZeroDivisionError, IndexError) as e:
                failures.append(f"{type(e).__name__}: {e}")
    assert not failures, f"{len(failures)} of {len(cases)} cases:\n" + "\n".join(failures)
    return tally


def _run_case(run: v1.Session, view: GraphView, c: Case, what: str, may_fall_back: bool, tally: Tally) -> None:
    ir, refs = imported(view, c.outputs)
    extra = [run.graph.get_tensor_by_name(f"{n}:{p}") for n, p in refs]
    for arrays in c.inputs:
        feed = dict(zip(c.placeholders, arrays, strict=True))
        want, given = run.run((c.outputs, extra), feed)
        try:
            got = interp.run(ir, given)
        except interp.GuardFailed as e:
            assert may_fall_back, f"{what}: {e}"
            tally.fell_back += 1
            continue
        for g, w, t in zip(got, want, c.outputs, strict=True):
            assert_close(g, np.asarray(w), c.tolerance, f"{what} ({t.op.type})", c.elementwise)
        tally.compared += 1
