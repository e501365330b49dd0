"""Elementwise ops against TensorFlow's CPU kernels, on ordinary and extreme values."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.support import Case, case, has_kernel, imported, run_cases
from tf_stitch.graph.lower import gradients, math
from tf_stitch.graph.view import GraphView
from tf_stitch.ir import interp

raw = tf.raw_ops
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
UNARY = sorted(set(math._UNARY) | {"Square", "Reciprocal", "Inv", "Round", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu",
                                   "Softsign", "OnesLike", "ZerosLike"})
BINARY = sorted(set(math._BINARY) | {"Div", "Pow", "FloorDiv", "FloorMod", "Mod", "TruncateMod", "SquaredDifference",
                                     "MulNoNan",
                                     "Xdivy", "Xlogy", "Xlog1py", "Equal", "NotEqual", "ApproximateEqual"})
SPECIAL = {"Digamma", "Lgamma", "Igamma", "Igammac", "Zeta", "Polygamma", "Betainc", "Erfinv", "Ndtri", "BesselI0e",
           "BesselI1e", "Pow", "Tan", "Acosh", "Asinh", "Atanh"}
EXTREME = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 6.0, 7.0, 1e-6, -1e-6, 20.0, -20.0]


def np_type(dtype: str):
    return tf.as_dtype(dtype).as_numpy_dtype


def values(dtype: str, seed: int, shape=(9, 7)) -> np.ndarray:
    """Random values with the extremes of the type in front."""
    rng = np.random.default_rng(seed)
    t = np_type(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTS:
        info = np.iinfo(t)
        x = rng.integers(max(info.min, -9), 10, shape).astype(t)
        x.reshape(-1)[:4] = [info.min, info.max, 0, 1]
        return x
    x = rng.normal(size=shape) * 3
    front = min(x.size, len(EXTREME))
    x.reshape(-1)[:front] = rng.permutation(EXTREME)[:front]
    if dtype == "float16":
        x = np.where(np.abs(x) < 1e-4, x * 1e3, x)  # TensorFlow flushes its denormals
    return x.astype(t)


def call(op: str, *xs, **attrs):
    """The op with operands by position."""
    import inspect

    fn = getattr(raw, op)
    names = [n for n in inspect.signature(fn).parameters if n != "name"]
    return fn(**dict(zip(names, xs, strict=False)), **attrs)


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, "bool"))
def test_unary(dtype):
    """Every unary op at every type that both TensorFlow and the registry take."""
    cases = []
    for i, op in enumerate(UNARY):
        if kind(dtype) not in registered(op).kinds or not runs(op, dtype):
            continue
        x = values(dtype, i)
        if op == "Erf":
            x = np.nan_to_num(x.astype(np.float64), posinf=3, neginf=-3).astype(x.dtype)  # Eigen's erf of inf is NaN
        cases.append(case(lambda t, op=op: call(op, t), x, elementwise=True, unknown=[0],
                          tolerance=20.0 if op in SPECIAL else 1.0))
    tally = run_cases(cases)
    assert tally.compared >= {"float": 35, "bool": 2}.get(kind(dtype), 3)


def kind(dtype: str) -> str:
    from tf_stitch.ir.dtypes import DTYPES

    return DTYPES[dtype].kind


def registered(op: str):
    from tf_stitch.graph.lower import REGISTRY

    return REGISTRY[op]


def runs(op: str, dtype: str) -> bool:
    """TensorFlow's op takes the type and has a CPU kernel for it."""
    from tf_stitch.graph.view import dtype_name, op_def

    arg = op_def(op).input_arg[0]
    return has_kernel(op, dtype, arg.type_attr) if arg.type_attr else dtype_name(arg.type) == dtype


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, "bool"))
def test_binary(dtype):
    """Every binary op, with broadcasting both ways."""
    cases = []
    for i, op in enumerate(BINARY):
        if kind(dtype) not in registered(op).kinds or not runs(op, dtype):
            continue
        x, y = values(dtype, i), values(dtype, 100 + i, (7,) if i % 2 else (9, 7))
        if op == "Pow" and dtype in INTS:
            y = np.clip(y, 0, 5).astype(y.dtype)  # a negative power is an error
        if op in ("Div", "FloorDiv", "FloorMod", "Mod", "TruncateMod", "TruncateDiv") and dtype in INTS:
            y = np.where(y == 0, 3, y).astype(y.dtype)
            y = np.where(y == -1, 2, y).astype(y.dtype)  # the most negative number over -1 traps in TensorFlow
        if op in ("LeftShift", "RightShift"):
            y = np.clip(y, 0, 7).astype(y.dtype)
        if op in ("Igamma", "Igammac", "Zeta", "Polygamma"):
            x, y = (np.abs(np.nan_to_num(v.astype(np.float64), posinf=3, neginf=2)) + 1.1 for v in (x, y))
            x = np.round(x) if op == "Polygamma" else x
            x, y = x.astype(np_type(dtype)), y.astype(np_type(dtype))
        swap = i % 3 == 0 and op not in ("Xdivy", "Xlogy", "Xlog1py") and dtype not in INTS
        build = (lambda a, b, op=op: call(op, b, a)) if swap else (lambda a, b, op=op: call(op, a, b))
        cases.append(case(build, x, y, elementwise=True, tolerance=20.0 if op in SPECIAL else 2.0))
    tally = run_cases(cases)
    assert tally.compared >= {"float": 20, "bool": 4}.get(kind(dtype), 10)


GRADS = ["ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SigmoidGrad", "TanhGrad", "RsqrtGrad",
         "SqrtGrad", "ReciprocalGrad", "InvGrad", "SoftplusGrad", "SoftsignGrad"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_ops(dtype):
    cases = []
    for i, op in enumerate(GRADS):
        if not runs(op, dtype):
            continue
        x, y = values(dtype, i), values(dtype, 50 + i)
        cases.append(case(lambda a, b, op=op: call(op, a, b), x, y, elementwise=True, unknown=[0],
                          tolerance=2.0))
    assert run_cases(cases).compared >= 10
    assert all(op in __import__("tf_stitch.graph.lower", fromlist=["REGISTRY"]).REGISTRY for op in GRADS)
    assert gradients.SELU_SCALE > 1


def test_approximate_equal_does_not_broadcast():
    with tf.Graph().as_default() as graph:
        x, y = (tf.compat.v1.placeholder(tf.float32, s) for s in ([None, 3], [1, 3]))
        made = raw.ApproximateEqual(x=x, y=y, tolerance=0.1)
    ir, refs = imported(GraphView(graph.as_graph_def()), [made])
    assert len(refs) == 2
    one, two = np.ones((1, 3), np.float32), np.ones((2, 3), np.float32)
    assert interp.run(ir, [one, one])[0].all()
    with pytest.raises(interp.GuardFailed, match="does not broadcast"):
        interp.run(ir, [two, one])


@pytest.mark.parametrize("op", ["Equal", "NotEqual"])
def test_python_comparison_of_unknown_dims(op):
    """``==`` lets shapes differ: unknown dims are taken to agree, and a guard finds those that do not."""
    def build(x, y):
        return getattr(raw, op)(x=x, y=y, incompatible_shape_error=False)

    a, b = np.arange(12, dtype=np.int32).reshape(3, 4) % 5, np.arange(12, dtype=np.int32).reshape(3, 4) % 3
    runs = Case(build, [[a, b], [a[:2], b[:2]]], [[None, 4]] * 2)
    assert run_cases([runs, case(build, a, b[:, :1], unknown=[0])]).compared == 3
    differs = Case(build, [[a, b[:1]]], [[None, 4]] * 2)
    assert run_cases([differs], may_fall_back=True).fell_back == 1


def test_vector_products():
    rng, cases = np.random.default_rng(3), []
    for dtype in ("float32", "float64", "float16", "int32", "uint8", "int64"):
        x, y = (rng.integers(0, 100, (5, 3)).astype(dtype) for _ in range(2))
        cases += [case(tf.linalg.cross, x, y, unknown=unknown) for unknown in (False, [0], True)]
    assert run_cases(cases).compared == len(cases)
