"""Branches that are written out do what the branch taken does."""
from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_stitch
from tf_stitch import rewrites
from tf_stitch.graph import branches, rewriter, updates
from tf_stitch.graph.control import CONTROL_FLOW

from .test_updates import both, variable

X, Y = tf.constant([1.0, -2.0, 3.0]), tf.constant([-1.0, 0.5, 0.0])


@pytest.fixture
def graphs(graphs, monkeypatch):
    """The graphs behind the step; branches are written out on a CPU, too."""
    monkeypatch.setattr(rewriter, "plain_ops_pay", lambda options: True)
    return graphs


def is_written_out(graphs) -> bool:
    return bool(graphs) and all(n.op not in CONTROL_FLOW for n in graphs[-1].node)


def both_ways(make):
    """Calls that take either branch, in turn."""
    both(make, *[(x * s,) for s in (1.0, -1.0, 0.5) for x in (X, Y)])


def left_out():
    """A step that is left out where the sum is not positive."""
    w, m, skipped = variable(1, 2, 3), variable(0, 0, 0), tf.Variable(0, dtype=tf.int64)

    def step(x):
        def then():
            m.assign_add((x - m) * 0.1)
            w.assign_sub(tf.sqrt(m * m + 1) * 0.5)
            return tf.constant(1.0)

        def other():
            skipped.assign_add(1)
            return tf.constant(0.0)

        return tf.cond(tf.reduce_sum(x) > 0, then, other) + tf.reduce_sum(tf.exp(x)), w.read_value() * 2

    return step, [w, m, skipped]


def nested():
    """As a loss scale is adapted: one variable is written in three branches, another in two."""
    good, scale, w = tf.Variable(1.0), tf.Variable(8.0), variable(1, 2, 3)

    def step(x):
        if tf.reduce_all(x > -1.5):
            w.assign_sub(tf.tanh(x) / scale)
            if good > 1.5:
                good.assign(0.0)
                scale.assign(scale * 2)
            else:
                good.assign_add(1.0)
        else:
            good.assign(0.0)
            scale.assign(scale / 2)
        return scale * 1.5 + w

    return step, [good, scale, w]


def reads_between_writes():
    v = variable(1, 2, 3)

    def step(x):
        before = v * 1.5
        if tf.reduce_sum(x) > 0:
            v.assign_add(x)
            first = v * 2
            v.assign_add(first)
            v.assign(v * 0.5)
            y = v + first
        else:
            y = v - x
        return before, y, v * 3

    return step, [v]


def values_that_nobody_takes():
    """Not a number, and too large, where the branch is not taken."""
    v = variable(1, 2, 3)

    def step(x):
        if tf.reduce_min(x) > 0.0:
            y = tf.math.log(x) / (x - tf.reduce_min(x))
            v.assign(y)
        else:
            y = tf.exp(x * 1000.0)
            v.assign_add(tf.tanh(x))
        return y

    return step, [v]


def two_in_a_row():
    v, w = variable(1, 2, 3), variable(0, 0, 0)

    def step(x):
        if tf.reduce_sum(x) > 0:
            v.assign_add(x)
        w.assign_add(v * 0.25)
        if tf.reduce_sum(w) > 2:
            v.assign_sub(w)
            w.assign(w * 0.5)
        return v + w

    return step, [v, w]


def a_variable_before():
    v = variable(1, 2, 3)

    def step(x):
        v.assign_add(tf.exp(x))
        if tf.reduce_sum(v) > 20:
            v.assign(v * 0.1)
        v.assign_sub(x)
        return v * 2

    return step, [v]


@pytest.mark.parametrize("make", [left_out, nested, reads_between_writes, values_that_nobody_takes,
                                  two_in_a_row, a_variable_before])
def test_the_same_as_the_branch_taken(graphs, make):
    both_ways(make)
    assert is_written_out(graphs)


def test_all_writes_are_one(graphs):
    both_ways(left_out)
    commit, = (n for n in graphs[-1].node if n.op == updates.OP)
    assert commit.attr["N"].i == 3 and len(commit.attr["updated"].list.i) == 3
    assert not any(n.op.startswith("Assign") for n in graphs[-1].node)


def one_stays():
    """What is behind a branch that stays may have to wait for it."""
    v, w = variable(1, 2, 3), variable(0, 0, 0)

    def step(x, i):
        if i < 3:
            v.assign_add(x * tf.gather(v, i))
        if i > 1:
            v.assign_add(x)
        if i > 0:
            w.assign_add(x)
        return v * 2 + w

    return step, [v, w]


def gathers():
    v = variable(1, 2, 3)

    def step(x, i):
        if i < 3:  # reads out of bounds where it is not
            v.assign_add(x * tf.gather(v, i))
        return v * 2

    return step, [v]


def divides():
    v = tf.Variable([1, 2, 3], dtype=tf.int64)

    def step(x, i):
        if i > 3:
            v.assign(v // tf.cast(i - 4, tf.int64))
        return v * 2

    return step, [v]


def asserts():
    v = variable(1, 2, 3)

    def step(x, i):
        if i < 3:
            tf.debugging.assert_less(i, 3)
            v.assign_add(x)
        return v * 2

    return step, [v]


def loops():
    v = variable(1, 2, 3)

    def step(x, i):
        if i < 3:
            while i < 3:
                v.assign_add(x)
                i += 1
        return v * 2

    return step, [v]


def draws():
    v = variable(1, 2, 3)

    def step(x, i):
        if i < 3:
            v.assign_add(x * 0 + tf.round(tf.random.uniform([3]) * 0.1))
        return v * 2

    return step, [v]


@pytest.mark.parametrize("make", [one_stays, gathers, divides, asserts, loops, draws])
def test_branches_that_may_fail_or_do_more_stay(graphs, make):
    both(make, *[(X, tf.constant(i)) for i in (1, 5, 2, 6)])
    assert graphs and not is_written_out(graphs)


def test_branches_with_unknown_or_large_sizes_stay(graphs, monkeypatch):
    def step(x):
        if tf.reduce_sum(x) > 0:
            x = x * 2 + 1
        return tf.exp(-x)

    for x in (X, Y, -X):
        got = tf_stitch.function(step, input_signature=[tf.TensorSpec([None])])(x)
        np.testing.assert_allclose(got, tf.function(step)(x), rtol=1e-6)
    assert not is_written_out(graphs)
    tf_stitch.function(step)(X)
    assert is_written_out(graphs)
    monkeypatch.setattr(branches, "MOST_BYTES", 11)
    tf_stitch.function(step)(X)
    assert not is_written_out(graphs)


def test_an_error_of_what_is_before_is_raised(graphs):
    v = variable(1, 2, 3)

    @tf_stitch.function
    def step(x, i):
        y = tf.gather(v, i)
        if y > 0:
            v.assign_add(x)
        return v * 2

    step(X, 1)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(X, 7)
    np.testing.assert_array_equal(v, [2, 0, 6])


def test_a_write_of_another_thread_is_not_lost(graphs):
    """A branch that is not taken changes nothing, whoever writes while it is decided."""
    v, steps = tf.Variable(tf.zeros([64])), 300

    @tf_stitch.function
    def step(x):
        if tf.reduce_sum(x) > 0:
            v.assign_add(x)
        return v * 2

    step(tf.ones([64]))
    assert is_written_out(graphs)

    def work(x):
        for _ in range(steps):
            step(x)

    def add():
        for _ in range(steps):
            v.assign_add(tf.fill([64], 1.0))

    threads = [threading.Thread(target=work, args=(tf.fill([64], s),)) for s in (1.0, -1.0)]
    threads.append(threading.Thread(target=add))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    np.testing.assert_array_equal(v, np.full(64, 2 * steps + 1))


def test_keras_scales_losses(graphs):
    """Steps whose gradients are finite, and some whose are not."""
    keras = tf.keras

    def made(wrap):
        keras.utils.set_random_seed(0)
        dtype = keras.DTypePolicy("mixed_float16")
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu", dtype=dtype),
                                  keras.layers.Dense(4, dtype="float32")])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2, epsilon=1e-3), initial_scale=64.0,
                                                        dynamic_growth_steps=2)
        optimizer.build(model.trainable_variables)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x)))
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
            return loss

        step = wrap(step)
        x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
        losses = [step(tf.constant(x * s)) for s in (1, 1, 1, 3e4, 1, 1, 3e4, 1)]
        return [np.asarray(r) for r in (*losses, *(v.value for v in (*model.variables, *optimizer.variables)))]

    got, want = made(tf_stitch.function), made(tf.function)
    assert is_written_out(graphs)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-3, atol=2e-4)


ACTIONS = st.deferred(lambda: st.one_of(
    st.tuples(st.sampled_from(["add", "assign", "read"]), st.integers(0, 2)),
    st.tuples(st.just("if"), st.integers(0, 2), st.lists(ACTIONS, max_size=3), st.lists(ACTIONS, max_size=3))))


@settings(max_examples=12, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=4))
def test_random_branches(actions):
    def make():
        variables = [tf.Variable(float(k + 1)) for k in range(3)]

        def run(action, total):
            kind, k = action[:2]
            v = variables[k]
            if kind == "add":
                v.assign_add(tf.tanh(total) + 0.25)
            elif kind == "assign":
                v.assign(tf.tanh(total + v) * 2)
            elif kind == "read":
                total = total + v * 0.5
            else:
                total = tf.cond(tf.tanh(v * 3 + total) > 0.1, lambda: run_all(action[2], total),
                                lambda: run_all(action[3], total))
            return total

        def run_all(actions, total):
            for action in actions:
                total = run(action, total)
            return total * 0.75

        return lambda x: run_all(actions, tf.reduce_sum(x)), variables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriter, "plain_ops_pay", lambda options: True)
        patch.setattr(rewrites, "remembered", lambda graph, options, what, make: make())
        both(make, *[(x * s,) for s in (1.0, -1.0, 0.5) for x in (X, Y)])
