"""Optimizers' ops as plain ones update variables as TensorFlow's kernels do."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_stitch.graph import optimizers, rewriter, updates

from .test_updates import both

raw = tf.raw_ops
LR = {"lr": 0.05}
BETAS = {**LR, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
RMS = {**LR, "rho": 0.9, "momentum": 0.5, "epsilon": 1e-3}
OPS = {  # op: (slots, numbers, attributes)
    "GradientDescent": ((), {"alpha": 0.1}, {}),
    "Momentum": (("accum",), {**LR, "momentum": 0.9}, {}),
    "Momentum, ahead": (("accum",), {**LR, "momentum": 0.9}, {"use_nesterov": True}),
    "KerasMomentum": (("accum",), {**LR, "momentum": 0.9}, {}),
    "KerasMomentum, ahead": (("accum",), {**LR, "momentum": 0.9}, {"use_nesterov": True}),
    "Adagrad": (("accum",), LR, {}),
    "Adagrad, fixed": (("accum",), LR, {"update_slots": False}),
    "AdagradV2": (("accum",), {**LR, "epsilon": 1e-3}, {}),
    "RMSProp": (("ms", "mom"), RMS, {}),
    "CenteredRMSProp": (("mg", "ms", "mom"), RMS, {}),
    "Adam": (("m", "v"), {**BETAS, "beta1_power": 0.9, "beta2_power": 0.99}, {}),
    "Adam, ahead": (("m", "v"), {**BETAS, "beta1_power": 0.9, "beta2_power": 0.99}, {"use_nesterov": True}),
    "AdaMax": (("m", "v"), {**BETAS, "beta1_power": 0.9}, {}),
    "Adadelta": (("accum", "accum_update"), {**LR, "rho": 0.9, "epsilon": 1e-3}, {})}
X, Y = tf.constant([[1.0, -2.0, 3.0]]), tf.constant([[-0.5, 0.25, 2.0]])


@pytest.fixture
def graphs(graphs, monkeypatch):
    """The graphs with plain ops and writes as values; a CPU gets them, too."""
    monkeypatch.setattr(rewriter, "plain_ops_pay", lambda options: True)
    return graphs


def ops(graphs) -> list[str]:
    return [n.op for n in graphs[-1].node]


def step(name: str, dtype: tf.DType = tf.float32):
    op = f"ResourceApply{name.split(',')[0]}"
    slots, numbers, attributes = OPS[name]

    def make():
        var = tf.Variable([[1.0, 2.0, -3.0]], dtype=dtype)
        kept = {s: tf.Variable(tf.fill([1, 3], tf.cast(2.0 if s == "ms" else 0.5, dtype))) for s in slots}

        def fn(x):
            x = tf.cast(x, dtype)
            grad = tf.tanh(var * x) + x
            given = {k: tf.constant(v, dtype) for k, v in numbers.items()}
            given["delta" if name == "GradientDescent" else "grad"] = grad
            getattr(raw, op)(var=var.handle, **{k: s.handle for k, s in kept.items()}, **given, **attributes)
            return tf.reduce_sum(grad), var.read_value() * 2

        return fn, [var, *kept.values()]

    return make


@pytest.mark.parametrize("name", OPS)
def test_every_op(graphs, name):
    both(step(name), *[(x,) for x in (X, Y, X, X, Y, Y, X, Y)])
    assert not any(op.startswith("ResourceApply") for op in ops(graphs)) and ops(graphs).count(updates.OP) == 1


def test_every_op_is_tested():
    assert {f"ResourceApply{name.split(',')[0]}" for name in OPS} == optimizers._formulas.keys()


def test_double_precision(graphs):
    both(step("Adam", tf.float64), (X,), (Y,), (X,))
    assert "ResourceApplyAdam" not in ops(graphs)


def test_half_types_stay(graphs):
    both(step("Momentum", tf.float16), (X,))
    assert "ResourceApplyMomentum" in ops(graphs)


def test_unknown_sizes_stay(graphs):
    def make():
        var = tf.Variable([1.0, 2.0], shape=[None])

        def fn(x):
            raw.ResourceApplyGradientDescent(var=var.handle, alpha=0.1, delta=x)
            return var * 2

        return fn, [var]

    both(make, (tf.constant([3.0, -1.0]),))
    assert "ResourceApplyGradientDescent" in ops(graphs)


def test_large_steps_stay(graphs, monkeypatch):
    monkeypatch.setattr(optimizers, "MOST_BYTES", 23)
    both(step("Momentum"), (X,))
    assert "ResourceApplyMomentum" in ops(graphs)
    monkeypatch.setattr(optimizers, "MOST_BYTES", 24)
    both(step("Momentum"), (X,))
    assert "ResourceApplyMomentum" not in ops(graphs)


def test_a_variable_twice_and_two_steps_in_a_row(graphs):
    def make():
        var, accum = tf.Variable([1.0, 2.0]), tf.Variable([0.5, 0.5])

        def fn(x):
            before = var * 3
            for rate in (0.1, 0.2):
                raw.ResourceApplyMomentum(var=var.handle, accum=accum.handle, lr=rate, momentum=0.9, grad=var * x)
            between = accum * 2
            accum.assign(accum * 0.5)
            raw.ResourceApplyMomentum(var=var.handle, accum=accum.handle, lr=0.1, momentum=0.9, grad=x)
            return before, between, var + accum

        return fn, [var, accum]

    both(make, *[(tf.constant([s, -0.5]),) for s in (1.0, 2.0, -1.0)])
    assert "ResourceApplyMomentum" not in ops(graphs)


def test_in_a_branch(graphs):
    def make():
        fn, variables = step("Adam")()

        def conditional(x):
            return tf.cond(tf.reduce_sum(x) > 1.9, lambda: fn(x)[0], lambda: tf.constant(0.0))

        return conditional, variables

    both(make, (X,), (Y,), (X,))
    assert not {"Switch", "ResourceApplyAdam"} & set(ops(graphs))


def test_behind_a_branch_that_stays(graphs):
    """Who waits for what may not run does not run."""
    def make():
        var, other = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([1.0, 2.0, 3.0])

        def fn(x, i):
            if i < 3:
                var.assign_add(x[0] * tf.gather(var, i))
            for v in (var, other):
                raw.ResourceApplyGradientDescent(var=v.handle, alpha=0.1, delta=v * x[0])
            return var + other

        return fn, [var, other]

    both(make, *[(X, tf.constant(i)) for i in (1, 5, 2, 6)])
    assert "Switch" in ops(graphs)


def test_all_writes_of_a_step_are_one(graphs):
    def make():
        weights = [tf.Variable(np.linspace(-1, 1, n, dtype=np.float32)) for n in (3, 3)]
        slots = [tf.Variable(tf.zeros(3)) for _ in range(4)]

        def fn(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(weights[0] * x) * weights[1])
            for w, g, m, v in zip(weights, tape.gradient(loss, weights), slots[::2], slots[1::2], strict=True):
                raw.ResourceApplyAdam(var=w.handle, m=m.handle, v=v.handle, beta1_power=0.9, beta2_power=0.99, lr=0.1,
                                      beta1=0.9, beta2=0.99, epsilon=1e-3, grad=g)
            return loss

        return fn, [*weights, *slots]

    both(make, *[(X[0] * s,) for s in (1.0, 0.5, 2.0)])
    commit, = (n for n in graphs[-1].node if n.op == updates.OP)
    assert commit.attr["N"].i == 6


def test_an_uninitialized_variable_is_an_error(graphs):
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    import tf_stitch

    accum, var = UninitializedVariable(shape=[2], dtype=tf.float32), tf.Variable([1.0, 2.0])

    @tf_stitch.function
    def fn(x):
        raw.ResourceApplyMomentum(var=var.handle, accum=accum.handle, lr=0.1, momentum=0.9, grad=tf.exp(x))

    for _ in range(3):
        with pytest.raises((tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)):
            fn(tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(var, [1.0, 2.0])
    assert "ResourceApplyMomentum" not in ops(graphs)
