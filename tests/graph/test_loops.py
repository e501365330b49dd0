"""Loops that are written out, and the lists that their turns hand over."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_stitch
from tf_stitch import rewrites, saved_model
from tf_stitch.graph import edits, loops

CONTROL = {"Enter", "Exit", "NextIteration", "LoopCond", "While", "StatelessWhile"}


@pytest.fixture(autouse=True)
def switched_off():
    yield
    tf_stitch.disable()


@pytest.fixture
def ops(monkeypatch):
    """The ops of functions after loops were written out, those stitched last first."""
    made: list[set[str]] = []
    shown = edits.without_dead

    def spy(source, view, keep):
        out = shown(source, view, keep)
        made.insert(0, {n.op for n in (out.node if hasattr(out, "node") else out.node_def)})
        return out

    monkeypatch.setattr("tf_stitch.graph.rewriter.without_dead", spy)
    monkeypatch.setattr(rewrites, "remembered", lambda graph, options, what, make: make())  # not from the disk
    return made


def is_straight(ops) -> bool:
    """No loop and no use of a list is left of the function stitched last."""
    return bool(ops) and not any(op in CONTROL or (op.startswith("TensorList") and op != "TensorListReserve")
                                 for op in ops[0])


def same(got, want, tol=2e-5) -> None:
    for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=tol, atol=tol)


def both(fn, *args, signature=None) -> None:
    """Calls a function stitched and plain, twice, and compares."""
    stitched, plain = (wrap(fn, input_signature=signature) for wrap in (tf_stitch.function, tf.function))
    for _ in range(2):
        same(stitched(*args), plain(*args))


def x_of(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def unknown_batch(*shape: int) -> list[tf.TensorSpec]:
    return [tf.TensorSpec([None, *shape], tf.float32)]


def scan(x, turns=None):
    """A recurrence over the second dim with its states; ``turns``: how many are allowed."""
    xs = tf.TensorArray(tf.float32, x.shape[1]).unstack(tf.transpose(x, [1, 0, 2]))
    ys = tf.TensorArray(tf.float32, x.shape[1], element_shape=[None, x.shape[2]])

    def body(i, h, ys):
        h = tf.tanh(h * 0.5 + xs.read(i)) * 2.0 - h * 0.1
        return i + 1, h, ys.write(i, h + tf.cast(i, tf.float32))

    i, h, ys = tf.while_loop(lambda i, *_: i < x.shape[1], body, (0, tf.reduce_sum(x, 1), ys), maximum_iterations=turns)
    return i, h, ys.stack() if turns is None else ys.read(0)


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_a_loop_over_a_known_number_of_steps_is_written_out(ops, turns):
    both(scan, x_of(3, turns, 4), signature=unknown_batch(turns, 4))
    assert is_straight(ops)


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_batches_of_any_size(ops, batch):
    both(scan, x_of(batch, 3, 4), signature=unknown_batch(3, 4))
    assert is_straight(ops)


def test_no_turn_at_all(ops):
    def never(x):
        i, y = tf.while_loop(lambda i, y: i < 0, lambda i, y: (i + 1, tf.tanh(y) * 2.0), (0, tf.exp(x) * 3.0))
        return i, y + 1.0

    both(never, x_of(3, 4), signature=unknown_batch(4))
    assert is_straight(ops)


def test_an_empty_list_is_an_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match="empty list"):
        tf_stitch.function(scan, input_signature=unknown_batch(0, 4))(x_of(3, 0, 4))


def test_the_most_turns_end_a_loop(ops):
    both(lambda x: scan(x, 2), x_of(3, 5, 4), signature=unknown_batch(5, 4))
    assert is_straight(ops)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize(("start", "test", "step"), [
    (9, lambda i: i > 0, lambda i: i - 2), (1, lambda i: i <= 64, lambda i: i * 2),
    (3, lambda i: tf.logical_and(i != 7, tf.logical_not(i >= 20)), lambda i: tf.minimum(i + 1, 30)),
    (2**31 - 3, lambda i: i > 0, lambda i: i + 1)])
def test_counters(ops, dtype, start, test, step):
    if dtype == tf.int64 and start > 100:
        start = 2**63 - 3  # wraps around too

    def count(x):
        i, y = tf.while_loop(lambda i, y: test(i), lambda i, y: (step(i), tf.sin(y) + tf.cast(i % 7, tf.float32)),
                             (tf.constant(start, dtype), x))
        return i, y * 2.0 + 1.0

    both(count, x_of(2, 3), signature=unknown_batch(3))
    assert is_straight(ops)


def test_a_condition_on_data_stays(ops):
    def search(x):
        i, y = tf.while_loop(lambda i, y: tf.logical_and(i < 9, tf.reduce_sum(y) < 30.0),
                             lambda i, y: (i + 1, y * 1.5 + 0.1), (0, tf.abs(x)))
        return i, tf.tanh(y) * 2.0

    for seed in range(3):
        both(search, x_of(3, 4, seed=seed), signature=unknown_batch(4))
    assert not ops


def test_a_number_of_turns_that_is_an_argument_stays(ops):
    def count(x, n):
        return tf.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, tf.tanh(y * 1.5) + 0.1), (0, x))

    for n in (0, 1, 5):
        both(count, x_of(3, 4), tf.constant(n))
    assert not ops


def test_effects_stay(ops):
    count = tf.Variable(0.0)

    def add(x):
        def body(i, y):
            count.assign_add(1.0)
            return i + 1, tf.tanh(y * 1.5) + count

        return tf.while_loop(lambda i, y: i < 3, body, (0, x))[1] * 2.0

    stitched = tf_stitch.function(add)(x_of(3, 4))
    assert count.numpy() == 3.0
    count.assign(0.0)
    same(stitched, add(x_of(3, 4)))
    assert not ops


def test_random_numbers_stay(ops):
    def noise(x):
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y + tf.random.uniform(y.shape) + 1.0), (0, x))[1]

    drawn = tf_stitch.function(noise)(tf.zeros([8]))
    assert np.all((drawn >= 3.0) & (drawn < 6.0)) and len(set(drawn.numpy())) == 8
    assert not ops


def test_too_many_turns_stay(ops, monkeypatch):
    monkeypatch.setattr(loops, "MOST_NODES", 10)
    both(scan, x_of(3, 7, 4), signature=unknown_batch(7, 4))
    assert not ops


def test_what_is_read_is_read_before_it_is_written(ops):
    weight = tf.Variable(2.0)

    def step(x):
        weight.assign_add(1.0)
        y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y) * weight + x), (0, x))[1]
        weight.assign(tf.reduce_sum(y) * 0.01)
        return y * weight

    results = []
    for wrap in (tf_stitch.function, tf.function):
        weight.assign(2.0)
        fn = wrap(step)
        results.append([fn(x_of(3, 4)), fn(x_of(3, 4, seed=1)), tf.identity(weight)])
    same(*results)
    assert is_straight(ops)


def test_branches_in_turns(ops):
    def branches(x):
        def body(i, y):
            y = tf.cond(tf.reduce_sum(y) > 0, lambda: tf.tanh(y) * 1.1 + tf.constant([0.1, 0.2]), lambda: y * 0.5 + 1.0)
            return i + 1, tf.cond(i % 2 == 0, lambda: y * 0.9 + 0.1, lambda: tf.exp(y) - 0.3)

        return tf.while_loop(lambda i, y: i < 5, body, (0, x))[1] + 1.0

    for seed in range(4):
        both(branches, x_of(3, 2, seed=seed), signature=unknown_batch(2))
    assert ops and not ops[0] & CONTROL


def test_a_loop_in_a_branch_runs_when_the_branch_is_taken():
    def branch(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: scan(x)[2], lambda: tf.zeros([2, 3, 4]) - 1.0)

    both(branch, tf.ones([3, 2, 4]))
    both(branch, -tf.ones([3, 2, 4]))


def test_loops_in_loops():
    def nested(x):
        def outer(i, y):
            return i + 1, tf.while_loop(lambda j, _: j <= i, lambda j, z: (j + 1, tf.sin(z) * 1.3 + x), (0, y))[1]

        return tf.while_loop(lambda i, y: i < 3, outer, (0, x))[1]

    both(nested, x_of(3, 4), signature=unknown_batch(4))


def test_loops_after_loops(ops):
    def two(x):
        i, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y) * 2.0), (0, x))
        return tf.while_loop(lambda j, z: j < i, lambda j, z: (j + 1, tf.sin(z) + y), (0, y * 0.5))

    both(two, x_of(3, 4), signature=unknown_batch(4))
    assert is_straight(ops)


def test_a_loop_may_be_met_before_one_that_it_reads(ops):
    """The second loop's first node, its counter's, comes early in the graph."""
    def two(x):
        states = scan(x)
        return tf.while_loop(lambda i, *_: i < 8, lambda i, y: (i + 1, tf.tanh(y) + states[1] * states[2][0]),
                             (0, states[1]))[1], states

    both(two, x_of(3, 5, 4))
    assert is_straight(ops)


@pytest.mark.parametrize("turns", [1, 4])
def test_gradients(ops, turns):
    weight = tf.Variable(x_of(4, 4, seed=3) * 0.3)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = tf.zeros([tf.shape(x)[0], 4])
            states = tf.TensorArray(tf.float32, turns)
            _, _, states = tf.while_loop(
                lambda i, *_: i < turns,
                lambda i, h, s: (i + 1, g := tf.tanh(h @ weight + x[:, i] * 0.5), s.write(i, g * 1.5)),
                (0, h, states))
            loss = tf.reduce_mean(states.stack() ** 2)
        return loss, tape.gradient(loss, [x, weight])

    both(step, x_of(3, turns, 4), signature=unknown_batch(turns, 4))
    assert is_straight(ops)


def test_gradients_of_what_is_read_from_a_list(ops):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(scan(x)[2] ** 2)
        return tape.gradient(loss, x)

    both(step, x_of(3, 3, 4))
    assert is_straight(ops)


# --- conditions -----------------------------------------------------------------------------------------

@pytest.fixture
def compared(monkeypatch):
    """Conditions are made simpler as for a GPU; the numbers of loops that were changed."""
    changed: list[bool] = []

    def spy(source, view, keep, most_nodes):
        out = loops.counted(source, view)
        changed.append(out is not source)
        return out

    monkeypatch.setattr(loops, "written_out", spy)
    monkeypatch.setattr(rewrites, "remembered", lambda graph, options, what, make: make())
    return changed


def turns_of(x, n, most, step=1, start=0):
    """A loop over a number of turns that is not known, with two counters."""
    return tf.while_loop(lambda i, y: i < n, lambda i, y: (i + step, tf.tanh(y) * 1.5 + tf.cast(i, tf.float32)),
                         (start, x), maximum_iterations=most)


@pytest.mark.parametrize("most", [0, 2, 5])
def test_one_of_two_equal_counters_is_compared(compared, most):
    fn = tf.function(lambda x, n, m: turns_of(x, n, m))
    for n in (-3, 0, 1, 2, 4, 7):
        both(fn.python_function, x_of(3, 4), tf.constant(n), tf.constant(most))
    assert any(compared)


def test_equal_bounds_are_one(compared):
    def scanned(x):
        return tf.scan(lambda a, s: tf.tanh(a) * 2.0 + s, x)

    for steps in (1, 2, 6):
        both(scanned, x_of(steps, 3), signature=[tf.TensorSpec([None, 3])])
    assert any(compared)


@pytest.mark.parametrize(("step", "start"), [(2, 0), (1, 1), (1, -2)])
def test_different_counters_are_compared_each(compared, step, start):
    for n in (0, 1, 3, 8):
        both(lambda x, n: turns_of(x, n, tf.constant(3), step, start), x_of(3, 4), tf.constant(n))
    assert not any(compared)


def test_a_bound_that_turns_change(compared):
    def shrinking(x, n):
        return tf.while_loop(lambda i, n, y: i < n, lambda i, n, y: (i + 1, n - 1, tf.tanh(y) * 1.5), (0, n, x),
                             maximum_iterations=4)

    for n in (0, 3, 5, 20):
        both(shrinking, x_of(3, 4), tf.constant(n))
    assert any(compared)


@pytest.mark.nvcc
def test_conditions_that_are_functions(tmp_path):
    """A model for a GPU, run on whatever there is."""
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.int32)])
        def __call__(self, x, n):
            counted = turns_of(x[0], n, tf.shape(x)[0])
            return {"scanned": tf.scan(lambda a, s: tf.tanh(a) * 2.0 + s, x), "turns": counted[0], "y": counted[1]}

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "a"), signatures=model.__call__)
    tf_stitch.rewrite_saved_model(tmp_path / "a", tmp_path / "b", target="cuda:sm_90", verify=False)
    loaded = tf.saved_model.load(str(tmp_path / "b"))
    functions = saved_model.read(tmp_path / "b").meta_graphs[0].graph_def.library.function
    conditions = [f for f in functions if f.signature.name.endswith(loops.ONE_COUNTER)]
    assert {"Less", "Minimum"} <= {n.op for f in conditions for n in f.node_def}
    assert all(f.ret[f.signature.output_arg[0].name].split(":")[0] not in
               {n.name for n in f.node_def if n.op == "LogicalAnd"} for f in conditions)
    for rows in (1, 2, 5):
        for n in (-1, 0, 1, 3, 9):
            same(loaded(x_of(rows, 3), tf.constant(n)), model(x_of(rows, 3), tf.constant(n)))


# --- lists -------------------------------------------------------------------------------------------

def raises_alike(fn, *args, signature=None) -> None:
    for wrap in (tf_stitch.function, tf.function):
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.nest.map_structure(np.asarray, wrap(fn, input_signature=signature)(*args))


def test_an_index_out_of_range_is_an_error():
    def far(x):
        xs = tf.TensorArray(tf.float32, 3).unstack(x)
        return tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, tf.tanh(y) + xs.read(i)), (0, x[0]))[1]

    raises_alike(far, x_of(3, 4))


def test_elements_of_different_shapes_are_an_error():
    def grow(x):
        ta = tf.TensorArray(tf.float32, 3, infer_shape=False)
        return tf.while_loop(lambda i, *_: i < 3, lambda i, y, ta: (i + 1, tf.concat([y, x], 0), ta.write(i, y * 2.0)),
                             (0, x * 1.5, ta), shape_invariants=(
                                 tf.TensorShape([]), tf.TensorShape([None, 4]), tf.TensorShape(None)))[2].stack()

    raises_alike(grow, x_of(2, 4))


def test_a_wrong_element_shape_is_an_error():
    def wrong(x):
        handle = tf.raw_ops.TensorListReserve(element_shape=[2, 5], num_elements=3, element_dtype=tf.float32)
        handle = tf.raw_ops.TensorListSetItem(input_handle=handle, index=1, item=tf.tanh(x) * 2.0)
        return tf.raw_ops.TensorListGetItem(input_handle=handle, index=1, element_shape=[2, 5],
                                            element_dtype=tf.float32) + 1.0

    raises_alike(wrong, x_of(2, 4), signature=[tf.TensorSpec([None, None])])


def test_what_was_never_written_is_zero(ops):
    def gaps(x):
        ta = tf.TensorArray(tf.float32, 5, element_shape=[4])
        _, ta = tf.while_loop(lambda i, _: i < 5, lambda i, ta: (i + 2, ta.write(i, x[0] * tf.cast(i + 1, x.dtype))),
                              (0, ta))
        return ta.read(2) + 1.0, ta.read(3) - 1.0, ta.stack() * 2.0

    both(gaps, x_of(2, 4))


def test_the_last_of_several_writes_counts(ops):
    def twice(x):
        ta = tf.TensorArray(tf.float32, 2, clear_after_read=False)
        _, ta = tf.while_loop(lambda i, _: i < 5, lambda i, ta: (i + 1, ta.write(i % 2, x * tf.cast(i, tf.float32))),
                              (0, ta))
        return ta.stack() * 2.0, ta.read(0) + ta.read(1)

    both(twice, x_of(2, 4))


def test_lists_grow_and_shrink(ops):
    def pop(i, handle, y):
        popped = tf.raw_ops.TensorListPopBack(input_handle=handle, element_shape=-1, element_dtype=tf.float32)
        return i + 1, popped.output_handle, tf.ensure_shape(popped.tensor, [2, 4]) * y + 0.5

    def push(i, handle, y):
        return i + 1, tf.raw_ops.TensorListPushBack(input_handle=handle, tensor=y), tf.tanh(y) * 1.5

    def stack(x):
        handle = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32)
        _, handle, y = tf.while_loop(lambda i, *_: i < 4, push, (0, handle, x))
        _, handle, y = tf.while_loop(lambda i, *_: i < 3, pop, (0, handle, y))
        return y, tf.raw_ops.TensorListLength(input_handle=handle)

    both(stack, x_of(2, 4))
    assert is_straight(ops)


def test_more_than_a_list_may_hold_is_an_error():
    def full(x):
        handle = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=2, element_dtype=tf.float32)
        _, handle = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.raw_ops.TensorListPushBack(
            input_handle=h, tensor=x * tf.cast(i, x.dtype))), (0, handle))
        popped = tf.raw_ops.TensorListPopBack(input_handle=handle, element_shape=-1, element_dtype=tf.float32)
        return popped.tensor + 1.0

    raises_alike(full, x_of(2, 4))


@given(st.integers(1, 6), st.integers(0, 3), st.sampled_from(["LSTM", "GRU", "SimpleRNN"]), st.booleans(),
       st.booleans(), st.booleans())
@settings(max_examples=6, deadline=None)
def test_keras_layers(steps, batch, layer, backwards, masked, both_ways):
    keras = tf.keras
    backwards = backwards and not both_ways
    cell = getattr(keras.layers, layer)(5, return_sequences=True, go_backwards=backwards, recurrent_dropout=0.1)
    cell = keras.layers.Bidirectional(cell) if both_ways else cell
    inner = keras.Input((steps, 3))
    x = keras.layers.Masking()(inner) if masked else inner
    model = keras.Model(inner, keras.layers.Dense(2)(cell(x)))
    data = x_of(batch, steps, 3) * tf.cast(x_of(batch, steps, 1, seed=1) > -0.5, tf.float32)
    both(lambda x: model(x), data, signature=unknown_batch(steps, 3))


# --- the other ways in -------------------------------------------------------------------------------

def test_everything_enabled(ops):
    tf_stitch.enable()
    got = tf.function(scan)(x_of(3, 4, 4))
    tf_stitch.disable()
    same(got, tf.function(scan)(x_of(3, 4, 4)))
    assert is_straight(ops)


def test_graph_defs(ops):
    """The functional form: a While node with functions for its condition and body."""
    concrete = tf.function(scan, input_signature=unknown_batch(4, 4)).get_concrete_function()
    graph, report = tf_stitch.rewrite_graph_def(concrete.graph.as_graph_def(), options=tf_stitch.Options(
        levels=(), keep=tuple(t.op.name for t in concrete.outputs)))
    assert is_straight(ops)
    assert report.clusters
    data = x_of(3, 4, 4).numpy()
    with tf.Graph().as_default() as made:
        tf.graph_util.import_graph_def(graph, name="")
        with tf.compat.v1.Session(graph=made) as session:
            got = session.run([t.name for t in concrete.outputs], {concrete.inputs[0].name: data})
    for g, w in zip(got, concrete(tf.constant(data)), strict=True):
        np.testing.assert_allclose(g, w.numpy(), rtol=2e-5, atol=2e-5)


def test_saved_models(ops, tmp_path):
    class Model(tf.Module):
        def __init__(self):
            self.weight = tf.Variable(0.7)

        @tf.function(input_signature=unknown_batch(4, 4))
        def __call__(self, x):
            i, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y) * self.weight + x[:, 0]),
                                 (0, x[:, 1]))
            return {"turns": i, "y": y, "states": scan(x)[2]}

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "a"), signatures=model.__call__)
    tf_stitch.rewrite_saved_model(tmp_path / "a", tmp_path / "b", options=tf_stitch.Options(levels=()))
    assert any(is_straight([made]) for made in ops)
    loaded = tf.saved_model.load(str(tmp_path / "b"))
    want = model(x_of(3, 4, 4))
    same([loaded(x_of(3, 4, 4)), loaded.signatures["serving_default"](x_of(3, 4, 4))], [want, want])
