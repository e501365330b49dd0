"""Writes to variables whose new values are computed in programs."""
from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

import tf_stitch
from tf_stitch import hook
from tf_stitch.graph import updates
from tf_stitch.graph.view import GraphView

OP = updates.OP


def commits(graphs) -> list[tf.compat.v1.NodeDef]:
    """The writes of the function stitched last."""
    return [n for n in graphs[-1].node if n.op == OP]


def ops(graphs) -> list[str]:
    return [n.op for n in graphs[-1].node]


def both(make, *calls):
    """Calls a stitched and a plain function of their own variables; compares results and variables."""
    got, want = [], []
    for wrap, out in ((tf_stitch.function, got), (tf.function, want)):
        fn, variables = make()
        fn = wrap(fn)
        for args in calls:
            out.append([r for r in tf.nest.flatten(fn(*args)) if r is not None])
        out.append(variables)
    for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=2e-5, atol=2e-5)


def variable(*values: float, dtype: tf.DType = tf.float32) -> tf.Variable:
    return tf.Variable(values, dtype=dtype)


X = tf.constant([1.0, -2.0, 3.0])


def adam():
    w, m, v = variable(1, 2, 3), variable(0, 0, 0), variable(0, 0, 0)
    t = tf.Variable(0, dtype=tf.int64)

    def step(x):
        g = tf.tanh(w * x)
        t.assign_add(1)
        rate = tf.sqrt(1 - 0.9 ** tf.cast(t, tf.float32))
        m.assign_add((g - m) * 0.1)
        v.assign_add((g * g - v) * 0.01)
        w.assign_sub(rate * m / (tf.sqrt(v) + 1e-3))
        return tf.reduce_sum(g)

    return step, [w, m, v, t]


def test_a_training_step_is_one_program_and_one_write(graphs):
    both(adam, (X,), (X * 2,), (X,))
    assert [n.attr["N"].i for n in commits(graphs)] == [4]
    assert not updates.ARITHMETIC.keys() & set(ops(graphs))
    (cluster,) = hook.reports()[-1][1].clusters
    assert cluster.compute_ops >= 20


def test_reads_after_the_write_see_the_new_value(graphs):
    def make():
        v = variable(1, 2, 3)

        def fn(x):
            before = v + x * 2
            v.assign_sub(tf.exp(x))
            return before, v.read_value() * x + 1, v.read_value()

        return fn, [v]

    both(make, (X,), (X,))
    assert commits(graphs) and ops(graphs).count("ReadVariableOp") == 1


def test_several_sums_are_one_write(graphs):
    """Weight decay, then the step; what is read in between is the value then, rounded as TensorFlow rounds it."""
    def make():
        w, m, unread = variable(1, 2, 3), variable(0, 0, 0), variable(1e8, 1, -1e8)

        def fn(x):
            g = tf.tanh(w * x)
            w.assign_sub(w * 0.1)
            between = w.read_value() * 2.0
            m.assign_add((g - m) * 0.1)
            w.assign_sub(m * x)
            unread.assign_add(tf.exp(x))
            unread.assign_add(tf.exp(x) * 2)
            unread.assign_sub(x * 1e8)
            return between, w + 1.0, tf.reduce_sum(g)

        return fn, [w, m, unread]

    both(make, (X,), (X * 2,), (-X,))
    assert [n.attr["N"].i for n in commits(graphs)] == [3]
    assert not updates.ARITHMETIC.keys() & set(ops(graphs))


def test_sums_with_effects_between_them_stay(graphs):
    def make():
        v = variable(1, 2, 3)

        def fn(x):
            v.assign_add(tf.exp(x) + 1)
            with tf.control_dependencies([tf.py_function(lambda v: None, [v], [])]):
                v.assign_add(tf.exp(x) + 2)
            return v + 1

        return fn, [v]

    both(make, (X,), (-X,))
    assert not commits(graphs)


def test_what_was_written_is_what_is_added(graphs):
    """As RMSprop adds its momentum, which it has just written."""
    def make():
        w, m = variable(1, 2, 3), variable(0, 1, 0)

        def fn(x):
            m.assign(m * 0.9 + tf.exp(x))
            w.assign_sub(m)

        return fn, [w, m]

    both(make, (X,), (X * 2,))
    assert [n.attr["N"].i for n in commits(graphs)] == [2]


def test_assignments_are_handed_on(graphs):
    def make():
        total, count = tf.Variable(0.0), tf.Variable(0.0)

        def fn(x):
            total.assign(total + tf.reduce_sum(x))
            count.assign(count + 3.0)
            return total / count

        return fn, [total, count]

    both(make, (X,), (X * 3,))
    (node,) = commits(graphs)
    assert not node.attr["Tread"].list.type and node.attr["N"].i == 2


def test_what_has_effects_runs_after_the_write(graphs):
    seen = []

    def make():
        v = variable(1, 2, 3)

        def look(x):
            seen.append((x.numpy(), v.numpy()))
            return x

        def fn(x):
            v.assign_add(tf.exp(x) * 2)
            return tf.py_function(look, [v.read_value() * 1.0], tf.float32)

        return fn, [v]

    both(make, (X,), (X,))
    assert len(seen) == 4 and commits(graphs)
    for value, variable_then in seen:
        np.testing.assert_array_equal(value, variable_then)


def test_writes_with_something_between_them_stay_apart(graphs):
    seen = []

    def make():
        a, b = variable(1, 2, 3), variable(4, 5, 6)

        def look(x):
            seen.append((a.numpy().tolist(), b.numpy().tolist()))
            return x

        def fn(x):
            a.assign_add(tf.exp(x) * 2)
            y = tf.py_function(look, [a.read_value()], tf.float32)
            b.assign_add(tf.tanh(tf.ensure_shape(y, [3])) + 1)
            return y

        return fn, [a, b]

    both(make, (X,))
    assert len(commits(graphs)) == 2
    assert seen[0] == seen[1]


def test_a_read_that_something_else_may_have_written_before_stays(graphs):
    def make():
        v = variable(1, 2, 3)

        def fn(x):
            with tf.control_dependencies([v.assign_add(tf.exp(x) * 2)]):
                other = tf.py_function(lambda: v.assign([7.0, 8.0, 9.0]).numpy(), [], tf.float32)
            with tf.control_dependencies([other]):
                return v.read_value() * 2 + 1

        return fn, [v]

    both(make, (X,))
    assert not commits(graphs)


def assigned_and_summed(v, x):
    v.assign(tf.exp(x) + 1)
    v.assign_add(tf.exp(x) + 2)


def in_a_branch(v, x):
    if tf.reduce_sum(x) > 0:
        v.assign_add(tf.exp(x) + 1)


def in_a_loop(v, x):
    for _ in tf.range(3):
        v.assign_add(tf.exp(x) + 1)


def gathered(v, x):
    y = tf.gather(v, [0, 1])
    v.assign_add(tf.exp(x) + tf.reduce_sum(y))


@pytest.mark.parametrize("write", [assigned_and_summed, in_a_branch, in_a_loop, gathered])
def test_other_writes_stay(graphs, write):
    def make():
        v = variable(1, 2, 3)

        def fn(x):
            write(v, x)
            return v + 1

        return fn, [v]

    both(make, (X,), (-X,))
    assert not commits(graphs)


def test_shapes_that_do_not_fit_are_an_error():
    v = variable(1, 2, 3)

    @tf_stitch.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def fn(x):
        v.assign_add(tf.exp(x) + 1)

    fn(X)
    for other in (X[:1], X[:2], tf.zeros([4])):
        with pytest.raises(tf.errors.InvalidArgumentError):
            fn(other)
    np.testing.assert_allclose(v, [1, 2, 3] + np.exp(X) + 1, rtol=1e-6)


def test_an_uninitialized_variable_is_an_error(graphs):
    v = UninitializedVariable(shape=[3], dtype=tf.float32)

    @tf_stitch.function
    def fn(x):
        v.assign_add(tf.exp(x) + 1)

    with pytest.raises((tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)):
        fn(X)
    assert commits(graphs)
    assert not tf.raw_ops.VarIsInitializedOp(resource=v.handle)
    v.assign([1, 2, 3])
    fn(X)
    np.testing.assert_allclose(v, [1, 2, 3] + np.exp(X) + 1, rtol=1e-6)


def test_variables_too_large_for_a_second_copy_are_updated_in_place(graphs, monkeypatch):
    def make():
        small, large = variable(1, 2, 3), tf.Variable(tf.zeros([100]))

        def fn(x):
            large.assign_add(tf.fill([100], tf.reduce_sum(tf.exp(x))) * 2)
            small.assign_add(tf.exp(x) + 1)

        return fn, [small, large]

    monkeypatch.setattr(updates, "MOST_BYTES", 12)
    both(make, (X,), (X,))
    assert [n.attr["N"].i for n in commits(graphs)] == [1] and "AssignAddVariableOp" in ops(graphs)


def test_graphs_that_may_be_run_in_part_stay():
    graph = tf.Graph()
    with graph.as_default():
        v = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[3])
        write = tf.raw_ops.AssignAddVariableOp(resource=v, value=tf.exp(tf.constant([1.0, 2.0, 3.0])))
    source = graph.as_graph_def()
    assert updates.updates_as_values(source, GraphView(source), [write.name], lambda n: True) is source


# --- the op -----------------------------------------------------------------------------------------------

def assign(variables, read, values, updated):
    tf_stitch.runtime.load().stitched_assign(variables=[v.handle for v in variables], read=read, values=values,
                                             updated=updated, validate_shape=[False] * len(values))


def test_the_value_takes_the_place_of_what_was_read():
    v, w = variable(1, 2, 3), variable(1, 2, dtype=tf.float64)
    assign([v, w], [v.read_value()], [X, tf.constant([5.0, 6.0], tf.float64)], [0])
    np.testing.assert_array_equal(v, X)
    np.testing.assert_array_equal(w, [5, 6])


@pytest.mark.parametrize("write", [
    lambda v: v.assign_add([10, 10, 10]), lambda v: v.assign([11, 12, 13]),
    lambda v: v.scatter_add(tf.IndexedSlices([10.0, 10.0, 10.0], [0, 1, 2]))])
def test_a_write_since_the_read_is_not_lost(write):
    v = variable(1, 2, 3)
    read = v.read_value()
    write(v)
    assign([v], [read], [read + 1], [0])
    np.testing.assert_array_equal(v, [12, 13, 14])
    np.testing.assert_array_equal(read, [1, 2, 3])
    v.assign_add([1, 1, 1])
    np.testing.assert_array_equal(v, [13, 14, 15])


def test_a_variable_named_twice_gets_both_updates():
    v = variable(1, 2, 3)
    read = v.read_value()
    assign([v, v], [read, read], [read + 1, read + 2], [0, 1])
    np.testing.assert_array_equal(v, [4, 5, 6])


def test_an_assignment_initializes():
    v = tf.Variable(X, shape=tf.TensorShape(None))
    assign([v], [], [tf.constant([[1.0]])], [])
    np.testing.assert_array_equal(v, [[1.0]])


def check_threads_at_once(size: int) -> None:
    """Raises AssertionError where an update of a variable of ``size`` by four threads is lost."""
    v = tf.Variable(tf.zeros([size], tf.float64))

    @tf_stitch.function
    def fn(x):
        v.assign_add(tf.floor(tf.exp(x) * 0) + 1 + v * 0)

    x = tf.zeros([size], tf.float64)
    fn(x)
    start = threading.Barrier(4)

    def run():
        start.wait()
        for _ in range(200):
            fn(x)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    np.testing.assert_array_equal(v, np.full(size, 801.0))


def test_no_update_of_threads_that_run_at_once_is_lost():
    check_threads_at_once(64)


# --- random functions ---------------------------------------------------------------------------------------

ACTIONS = st.lists(st.tuples(st.sampled_from(["read", "add", "sub", "assign", "mix", "after"]), st.integers(0, 2)),
                   min_size=1, max_size=10)


@given(ACTIONS)
@settings(max_examples=25)
def test_random_functions(actions):
    """What a function reads and writes, in any order, as in TensorFlow."""
    def make():
        variables = [variable(1, 2, 3), variable(-1, 0, 1), variable(0.5, 0.25, 4)]

        def fn(x):
            results = []
            for what, k in actions:
                v = variables[k]
                if what == "read":
                    results.append(v * 2 + x)
                elif what == "add":
                    v.assign_add(tf.tanh(x) + 1)
                elif what == "sub":
                    v.assign_sub(tf.tanh(x * variables[k - 1]) * 0.5)
                elif what == "assign":
                    v.assign(tf.tanh(v) + x)
                elif what == "mix":
                    x = tf.tanh(x + v) - 0.5
                else:
                    with tf.control_dependencies([v.assign_add(tf.cos(x) + 0.5)]):
                        x = x + variables[k - 1]
            return [*results, x + 1]

        return fn, variables

    both(make, (X,), (X * 0.5,))
    hook._state.reports.clear()  # other tests count them, and only the last ones are kept


def test_shapes_of_variables_are_known(graphs):
    """Those of variables that may have another one are asked for."""
    def make():
        fixed = variable(1, 2, 3)
        free = tf.Variable([[1.0, 2.0]], shape=tf.TensorShape([None, 2]))

        def fn(x):
            shapes = [tf.raw_ops.VariableShape(input=v.handle, out_type=t) for v in (fixed, free)
                      for t in (tf.int32, tf.int64)]
            fixed.assign_add(tf.zeros(shapes[0]) + tf.exp(x))
            return tf.zeros(shapes[2]) + free * 2.0, shapes

        return fn, [fixed]

    both(make, (X,))
    left = [n for n in graphs[-1].node if n.op == "VariableShape"]
    assert len(left) == 2 and commits(graphs)
