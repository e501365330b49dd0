"""Conditionals whose branches are both computed: the same numbers as TensorFlow's, and what stays TensorFlow's."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tests.graph.support import case, run_cases, run_graph, session, v1
from tf_stitch.graph import conditionals, edits
from tf_stitch.graph.edits import without_dead
from tf_stitch.graph.rewriter import rewrite
from tf_stitch.graph.view import GraphView
from tf_stitch.options import Options

GPU = Options(target="cuda:sm_90", keep=("y",))
X = np.random.default_rng(0).normal(0, 2, (3, 4)).astype(np.float32)


@pytest.fixture
def taken_apart(monkeypatch):
    """Conditionals are built as Grappler sees them: Switch and Merge nodes."""
    monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", False)


def built(model, shape=(None, 4)) -> v1.GraphDef:
    graph = tf.Graph()
    with graph.as_default():
        tf.identity(model(v1.placeholder(tf.float32, shape, "x")), "y")
    return graph.as_graph_def()


def together(graph) -> list[str]:
    """Ops of the graph with conditionals put together, sorted."""
    made = conditionals.put_together(graph, GraphView(graph), ["y"], lambda view, node: True)
    made = without_dead(made, GraphView(made), ["y"])
    return sorted(n.op for n in made.node if n.op in ("StatelessIf", "Switch", "Merge"))


def same(model, programs: int = 1, xs=(X, -X, X[:1])) -> None:
    """The model is so many programs for a GPU, and gives the same numbers (run by fallbacks here)."""
    graph = built(model)
    out, _ = rewrite(graph, GPU, keep_ends=False)
    ops = [n.op for n in out.node]
    assert ops.count("StitchedProgram") == programs and "Merge" not in ops
    for x in xs:
        np.testing.assert_allclose(run_graph(out, x), run_graph(graph, x), rtol=1e-5)


def positive(x):
    return tf.reduce_sum(x) > 0.0


def test_functional_conditionals_take_the_right_branch():
    """Both values of the condition, several results, what is only passed on, integers, and a branch in a branch."""
    def model(x):
        first, second = tf.cond(positive(x), lambda: (tf.exp(x), tf.shape(x)[0]), lambda: (x, tf.constant(7)))
        inner = tf.cond(positive(x), lambda: tf.cond(tf.reduce_max(x) > 2.0, lambda: x * 2.0, lambda: -x), lambda: x)
        return first, second, inner

    cases = [case(model, x, unknown=unknown) for x in (X, -X, X * 0.1) for unknown in (False, [0])]
    assert run_cases(cases).compared == len(cases)


def test_a_branch_not_taken_may_hold_nan():
    run_cases([case(lambda x: tf.cond(positive(x), lambda: tf.sqrt(x - 100.0), lambda: tf.ones_like(x)), -np.abs(X))])


def test_branches_of_different_size_are_decided_by_tensorflow():
    """What cannot be told while rewriting is a guard, and the program's fallback is the conditional."""
    def model(x):
        return tf.cond(positive(x), lambda: x, lambda: tf.concat([x, x], 0)) * 2.0

    assert run_cases([case(model, X, unknown=[0])], may_fall_back=True).fell_back == 1
    same(model)


def test_conditionals_that_were_taken_apart_are_one_program(taken_apart):
    same(lambda x: tf.nn.relu(v1.cond(positive(x), lambda: tf.tanh(x) * 2.0, lambda: x - 1.0)))


def test_one_after_the_other_and_one_in_another(taken_apart):
    """Also where two have the same condition and the second reads what the first gave."""
    def model(x):
        up = positive(x)
        y = v1.cond(up, lambda: tf.exp(x), lambda: x)
        y = v1.cond(up, lambda: y + 1.0, lambda: y * y)
        return v1.cond(tf.reduce_max(x) > 1.0, lambda: v1.cond(up, lambda: tf.sin(y), lambda: tf.cos(y)), lambda: -y)

    same(model)


def test_variables_that_branches_read(taken_apart):
    """They are read before, and writes that waited for the conditional still come after it."""
    def model(x):
        w = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4, 4], shared_name="w")
        tf.raw_ops.AssignVariableOp(resource=w, value=np.eye(4, dtype=np.float32) * 3.0, name="init")
        y = v1.cond(positive(x), lambda: tf.matmul(x, tf.raw_ops.ReadVariableOp(resource=w, dtype=tf.float32)),
                    lambda: x)
        with tf.control_dependencies([y]):
            after = tf.raw_ops.AssignAddVariableOp(resource=w, value=np.ones((4, 4), np.float32))
        with tf.control_dependencies([after]):
            return tf.identity(y)

    graph = built(model)
    assert together(graph) == ["StatelessIf"]
    made = conditionals.put_together(graph, GraphView(graph), ["y"], lambda view, node: True)
    for x in (X, -X):
        np.testing.assert_allclose(run_graph(made, x), run_graph(graph, x))


@pytest.mark.parametrize("branch", [
    lambda x: tf.random.uniform([4]) + x,                                   # another number each time
    lambda x: tf.gather(x, tf.cast(x[0, 0], tf.int32)) + x,                 # may be an error
    lambda x: tf.nn.conv2d(x[None, :, :, None], tf.ones([2, 2, 1, 1]), 1, "SAME")[0, :, :, 0],  # may take long
    lambda x: tf.matmul(x, tf.ones([4, 300_000]))[:, :4],
    lambda x: sum((tf.sin(x * k) for k in range(60)), x),
])
def test_branches_that_only_run_when_taken(branch, taken_apart):
    assert "StatelessIf" not in together(built(lambda x: v1.cond(positive(x), lambda: branch(x), lambda: x)))


def test_a_variable_that_may_hold_nothing_is_read_where_it_was(taken_apart):
    def model(x):
        w = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4], shared_name="w")
        return v1.cond(tf.raw_ops.VarIsInitializedOp(resource=w),
                       lambda: x + tf.raw_ops.ReadVariableOp(resource=w, dtype=tf.float32), lambda: x * 2.0)

    graph = built(model)
    assert "StatelessIf" not in together(graph)
    np.testing.assert_allclose(run_graph(rewrite(graph, GPU, keep_ends=False)[0], X), X * 2)


def test_results_that_must_stay(taken_apart):
    """A node of a branch that is kept, and a reader of which input a Merge took."""
    graph = built(lambda x: v1.cond(positive(x), lambda: tf.exp(x, name="inside"), lambda: x))
    assert together(graph) == ["StatelessIf"]
    kept = conditionals.put_together(graph, GraphView(graph), ["cond/inside", "y"], lambda view, node: True)
    assert kept is graph
    assert conditionals.put_together(graph, GraphView(graph), ["y"], lambda view, node: False) is graph


def test_a_loop_s_condition_stays_on_the_host(taken_apart):
    """It would be an op of TensorFlow's, as a conditional of what the host computes."""
    def model(x):
        def goes_on(i, y):
            return v1.cond(i < 5, lambda: i < 3, lambda: i < 2)

        return v1.while_loop(goes_on, lambda i, y: (i + 1, tf.tanh(y) * 2.0 + 1.0), [tf.shape(x)[0], x])[1]

    out, _ = rewrite(built(model), GPU, keep_ends=False)
    assert "StatelessIf" not in [n.op for n in out.node] and "Merge" in [n.op for n in out.node]


def asserting(check, effect: bool = False):
    """A model that asserts something in the middle, and may write to a variable then."""
    def model(x):
        y = tf.exp(x) * 2.0
        with tf.control_dependencies([check(tf.reduce_max(y) < 1e6, y)]):
            z = tf.tanh(y) + 1.0
        if effect:
            w = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="w")
            with tf.control_dependencies([z]):
                tf.raw_ops.AssignVariableOp(resource=w, value=1.0, name="written")
        return tf.sqrt(z) * 3.0

    return model


def plain(ok, y):
    return tf.raw_ops.Assert(condition=ok, data=[y], name="check")


def guarded(ok, y):
    """As tf.debugging.Assert makes it."""
    def fails():
        with tf.control_dependencies([tf.raw_ops.Assert(condition=ok, data=[y])]):
            return tf.constant(False)

    with tf.control_dependencies([v1.cond(ok, lambda: tf.constant(True), fails, name="guard")]):
        return tf.no_op("check")


@pytest.mark.parametrize("check", [plain, guarded])
def test_assertions_do_not_cut_programs_apart(check, taken_apart):
    graph = built(asserting(check))
    out, _ = rewrite(graph, GPU, keep_ends=False, run=["check"])
    assert [n.op for n in out.node].count("StitchedProgram") == 1
    g = tf.Graph()
    with g.as_default():
        tf.graph_util.import_graph_def(out, name="")
    with session(g) as s:
        value, _ = s.run(["y:0", g.get_operation_by_name("check")], {"x:0": X})
        np.testing.assert_allclose(value, run_graph(graph, X), 1e-5)
        with pytest.raises(tf.errors.InvalidArgumentError):
            s.run(["y:0", g.get_operation_by_name("check")], {"x:0": X + 100})


@pytest.mark.parametrize("check", [plain, guarded])
def test_what_has_effects_waits_for_assertions(check, taken_apart):
    graph = built(asserting(check, effect=True))
    view = GraphView(graph)
    ends = [e for _, e in conditionals.guards(view)]
    made = edits.asserts_aside(graph, view, ["check"], ends)
    nodes = {n.name: n for n in made.node}
    assert "^check" in nodes["written"].input and not any("^check" in n.input for n in made.node if n.op == "Tanh")
    assert edits.asserts_aside(graph, view, [], ends) is graph  # only who waits for it runs it
