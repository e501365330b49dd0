"""Loops whose number of turns is not known: one op each."""
from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_stitch
from tests.graph.test_loops import same, x_of
from tf_stitch import rewrites
from tf_stitch.graph import whiles

WHILES = frozenset(whiles.OPS.values())


@pytest.fixture(autouse=True)
def switched_off():
    yield
    tf_stitch.disable()


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that came of rewriting, the last one last; none is taken from the disk."""
    made = []
    shown = whiles.as_ops

    def spy(*args, **kwargs):
        made.append(shown(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(whiles, "as_ops", spy)
    monkeypatch.setattr(rewrites, "remembered", lambda graph, options, what, make: make())
    return made


def loops(graphs) -> tuple[int, int]:
    """How many loops of the last graph are ops, and how many stayed."""
    ops = [n.op for n in graphs[-1].node]
    return sum(op in WHILES for op in ops), ops.count("LoopCond")


def both(fn, *calls, signature, tol=2e-5) -> None:
    """Calls a function stitched and plain with each of ``calls`` and compares."""
    stitched, plain = (wrap(fn, input_signature=signature) for wrap in (tf_stitch.function, tf.function))
    for args in calls:
        same(stitched(*args), plain(*args), tol)


SEQUENCES = [tf.TensorSpec([None, None, 6], tf.float32)]
CELLS = {"lstm": keras.layers.LSTMCell, "gru": keras.layers.GRUCell, "simple": keras.layers.SimpleRNNCell}


def recurrent(kind: str, units: int, **kwargs) -> keras.layers.Layer:
    keras.utils.set_random_seed(units)
    layer = keras.layers.RNN(CELLS[kind](units), return_sequences=True, return_state=True, **kwargs)
    layer.build((None, None, 6))
    return layer


@settings(max_examples=8, deadline=None)
@given(kind=st.sampled_from(sorted(CELLS)), units=st.integers(1, 17), batch=st.integers(1, 5), backwards=st.booleans(),
       turns=st.lists(st.integers(1, 40), min_size=2, max_size=3))
def test_layers_over_sequences_of_any_length(kind, units, batch, backwards, turns):
    layer = recurrent(kind, units, go_backwards=backwards)
    both(lambda x: layer(x), *[(x_of(batch, t, 6, seed=t),) for t in turns], signature=SEQUENCES)


@pytest.mark.parametrize("kind", sorted(CELLS))
def test_a_layers_loop_is_one_op(graphs, kind):
    layer = recurrent(kind, 5)
    both(lambda x: layer(x), (x_of(3, 1, 6),), (x_of(2, 7, 6),), signature=SEQUENCES)
    assert loops(graphs) == (1, 0)


@pytest.mark.parametrize("kind", sorted(CELLS))
def test_masked_steps_hand_on_the_state(graphs, kind):
    layer = recurrent(kind, 5)
    x = x_of(4, 9, 6).numpy()
    x[0, 3:] = x[1, :2] = x[3] = 0

    def masked(x):
        return layer(x, mask=tf.reduce_any(x != 0, -1))

    both(masked, (tf.constant(x),), (x_of(1, 1, 6),), signature=SEQUENCES)
    assert loops(graphs) == (1, 0)


@settings(max_examples=4, deadline=None)
@given(kind=st.sampled_from(sorted(CELLS)), units=st.integers(1, 9), batch=st.integers(1, 4),
       turns=st.lists(st.integers(1, 20), min_size=2, max_size=2))
def test_gradients_through_loops(kind, units, batch, turns):
    layer = recurrent(kind, units)

    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, *state = layer(x)
            loss = tf.reduce_sum(y * y) + tf.reduce_sum(tf.sin(state[0]))
        return tape.gradient(loss, [x, *[v.value for v in layer.trainable_variables]])

    both(gradients, *[(x_of(batch, t, 6, seed=t),) for t in turns], signature=SEQUENCES, tol=2e-4)


def test_a_loop_and_its_gradients_are_two_ops(graphs):
    layer = recurrent("gru", 5)

    @tf_stitch.function(input_signature=SEQUENCES)
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x)[0])
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    gradients(x_of(2, 3, 6))
    assert loops(graphs) == (2, 0)


def test_fit_over_sequences_of_several_lengths(graphs):
    def fitted():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((None, 6)), keras.layers.Masking(), recurrent_last(5),
                                  keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)  # on a GPU, Keras would choose XLA
        losses = [model.train_on_batch(x_of(4, t, 6, seed=t), x_of(4, 1, seed=t)) for t in (3, 5, 2)]
        return [np.float32(v) for v in losses]

    want = fitted()
    tf_stitch.enable()
    np.testing.assert_allclose(fitted(), want, rtol=1e-4)
    assert loops(graphs) == (2, 0)


def recurrent_last(units: int) -> keras.layers.Layer:
    return keras.layers.RNN(keras.layers.LSTMCell(units))


# --- what loops may do ------------------------------------------------------------------------------------

LOOP = [tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([], tf.int32)]


def counted(n: int) -> tuple[tf.Tensor, tf.Tensor]:
    return x_of(3, 4), tf.constant(n)


def test_any_number_of_turns_none_too(graphs):
    def fn(x, n):
        i, y, z = tf.while_loop(lambda i, *_: i < n, lambda i, y, z: (i + 1, tf.tanh(y) * 2.0, z + y),
                                (0, tf.exp(x), x))
        return i, y, z, tf.sin(y)

    both(fn, counted(0), counted(1), counted(13), signature=LOOP)
    assert loops(graphs) == (1, 0)


def test_variables_that_change_places(graphs):
    def fn(x, n):
        _, a, b, c = tf.while_loop(lambda i, *_: i < n, lambda i, a, b, c: (i + 1, b, a * 0.5 + tf.sin(c), c),
                                   (0, x, x + 1.0, tf.exp(x)))
        return a, b, c

    both(fn, counted(0), counted(1), counted(2), counted(5), signature=LOOP)
    assert loops(graphs) == (1, 0)


def test_a_value_stays_what_it_was_for_who_reads_it_later(graphs):
    """Results are made in the memory of what nobody reads any more, of nothing else."""
    def fn(x, n):
        first = tf.exp(x)

        def body(i, y, w):
            a = tf.linalg.matmul(y, tf.eye(4) * 0.5)
            b = a + 1.0
            c = tf.nn.relu(tf.linalg.matmul(b, w))
            return i + 1, c - a * b, w

        return first, *tf.while_loop(lambda i, *_: i < n, body, (0, first, tf.eye(4))), first

    both(fn, counted(0), counted(3), counted(4), signature=LOOP)
    assert loops(graphs) == (1, 0)


def test_a_condition_that_depends_on_data(graphs):
    def fn(x, n):
        return tf.while_loop(lambda i, y: tf.logical_and(i < n, tf.reduce_max(y) < 50.0),
                             lambda i, y: (i + 1, y * 1.5 + 0.1), (0, tf.abs(x)))

    both(fn, counted(3), counted(100), signature=LOOP)
    assert loops(graphs) == (1, 0)


def test_lists_that_turns_fill_and_read(graphs):
    def fn(x, n):
        ys = tf.TensorArray(tf.float32, n, element_shape=[None, 4], clear_after_read=False)
        ys = ys.write(0, x)

        def body(i, h, ys):
            h = tf.tanh(h + ys.read(i - 1) * 0.3)
            return i + 1, h, ys.write(i, h)

        _, h, ys = tf.while_loop(lambda i, *_: i < n, body, (1, x, ys))
        return h, ys.stack()

    both(fn, counted(1), counted(2), counted(30), signature=LOOP)
    assert loops(graphs) == (1, 0)


def test_several_loops_in_a_graph(graphs):
    def fn(x):
        xs = tf.transpose(x, [1, 0, 2])
        a = tf.scan(lambda a, s: tf.reduce_logsumexp(a[:, :, None] + tf.eye(6), 1) + s, xs[1:], initializer=xs[0])
        b = tf.scan(lambda a, s: tf.reduce_max(a[:, :, None] + tf.eye(6), 1) + s, xs[1:], initializer=xs[0])
        return a[-1], b, tf.argmax(b[-1], -1)

    both(fn, (x_of(2, 2, 6),), (x_of(3, 9, 6),), signature=SEQUENCES)
    assert loops(graphs) == (2, 0)


def test_one_loop_reads_what_another_gave(graphs):
    first, second = recurrent("gru", 6), recurrent("lstm", 3)
    both(lambda x: second(first(x)[0]), (x_of(2, 4, 6),), (x_of(1, 1, 6),), signature=SEQUENCES)
    assert loops(graphs) == (2, 0)


def test_both_directions(graphs):
    layer = keras.layers.Bidirectional(keras.layers.RNN(keras.layers.GRUCell(4), return_sequences=True))
    layer.build((None, None, 6))
    both(lambda x: layer(x), (x_of(2, 5, 6),), (x_of(1, 8, 6),), signature=SEQUENCES)
    assert loops(graphs) == (2, 0)


def test_kernels_that_only_onednn_has(graphs):
    """Of a convolution and its bias Grappler makes a node that TensorFlow exchanges when the graph is about to run."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True)
    layer.build((None, None, 5, 6, 2))
    both(lambda x: layer(x), (x_of(2, 1, 5, 6, 2),), (x_of(1, 4, 5, 6, 2),),
         signature=[tf.TensorSpec([None, None, 5, 6, 2], tf.float32)])
    assert loops(graphs) == (1, 0)


def test_variables_are_read_in_every_call(graphs):
    v = tf.Variable(tf.ones([4]))

    @tf_stitch.function(input_signature=LOOP)
    def fn(x, n):
        return tf.while_loop(lambda i, *_: i < n, lambda i, y: (i + 1, tf.sin(y) * v + 1.0), (0, x))[1]

    before = fn(*counted(2))
    v.assign(tf.zeros([4]))
    same(fn(*counted(2)), tf.ones([3, 4]))
    assert not np.allclose(before, 1.0)
    assert loops(graphs) == (1, 0)


def test_random_numbers_are_drawn_in_every_turn(graphs):
    @tf_stitch.function(input_signature=LOOP)
    def fn(x, n):
        def body(i, y, ys):
            y = tf.exp(-y * y) + tf.random.uniform([3, 4])
            return i + 1, y, tf.concat([ys, y[:1]], 0)

        return tf.while_loop(lambda i, *_: i < n, body, (0, tf.zeros([3, 4]), x[:0]),
                             shape_invariants=(tf.TensorShape([]), tf.TensorShape([3, 4]), tf.TensorShape([None, 4])))

    drawn = fn(*counted(6))[2].numpy() - np.exp(-np.square(np.concatenate([np.zeros((1, 4)), fn(*counted(0))[2]])))[:1]
    assert drawn.shape == (6, 4) and len(np.unique(drawn.round(5), axis=0)) == 6
    assert [n.op for n in graphs[-1].node if n.op in WHILES] == ["StitchedWhile"]


def test_a_loop_in_a_branch(graphs):
    def fn(x, n):
        return tf.cond(tf.reduce_sum(x) > n_float(n), lambda: counting(x, n), lambda: x * 2.0 - tf.exp(x))

    def counting(x, n):
        return tf.while_loop(lambda i, *_: i < n, lambda i, y: (i + 1, tf.tanh(y) * 2.0), (0, x))[1]

    def n_float(n):
        return tf.cast(n, tf.float32) - 3.0

    both(fn, (x_of(3, 4) + 5.0, tf.constant(3)), (x_of(3, 4) - 5.0, tf.constant(3)), signature=LOOP)
    assert loops(graphs) == (1, 0)


# --- what stays TensorFlow's -------------------------------------------------------------------------------

def nested(x, n):
    def body(i, y):
        inner = tf.while_loop(lambda j, _: j < i, lambda j, z: (j + 1, tf.tanh(z) + 0.1), (0, y))[1]
        return i + 1, inner * 0.5 + y

    return tf.while_loop(lambda i, _: i < n, body, (0, tf.exp(x)))


def branching(x, n):
    def body(i, y):
        return i + 1, tf.cond(tf.reduce_sum(y) > 1.0, lambda: tf.tanh(y) * 2.0, lambda: tf.sort(y) * 0.5)

    return tf.while_loop(lambda i, _: i < n, body, (0, x))


def choosing(x, n):
    def body(i, y):
        return i + 1, tf.switch_case(i % 2, [lambda: tf.tanh(y) * 2.0, lambda: tf.sort(y) * 0.5])

    return tf.while_loop(lambda i, _: i < n, body, (0, x))


def while_not_zero(x, n):
    """A While node's condition may be a number."""
    args = [tf.TensorSpec([], tf.int32), tf.TensorSpec([None, 4], tf.float32)]
    cond, body = (tf.function(f, input_signature=args).get_concrete_function()
                  for f in (lambda i, y: i, lambda i, y: (i - 1, tf.tanh(y) * 2.0)))
    return tf.raw_ops.While(input=[n, x], cond=cond, body=body, output_shapes=[[], [None, 4]])


def independent(x, n):
    return tf.map_fn(lambda r: tf.nn.softmax(r) * 2.0 + tf.cast(n, tf.float32), x)


@pytest.mark.parametrize(("fn", "stay"), [(nested, 2), (branching, 1), (choosing, 1), (independent, 1)])
def test_loops_that_stay(graphs, fn, stay):
    both(fn, (x_of(3, 4), tf.constant(2)), (x_of(3, 4), tf.constant(3)), signature=LOOP)
    assert loops(graphs) == (0, stay)


def test_a_loop_with_effects_stays(graphs):
    v = tf.Variable(0.0)

    @tf_stitch.function(input_signature=LOOP)
    def fn(x, n):
        def body(i, y):
            v.assign_add(tf.reduce_sum(y))
            return i + 1, tf.tanh(y) * 2.0

        return tf.while_loop(lambda i, _: i < n, body, (0, tf.ones_like(x)))[1]

    fn(*counted(2))
    assert v.numpy() > 12 and loops(graphs) == (0, 1)


# --- errors ---------------------------------------------------------------------------------------------------

def test_errors_of_a_turn_are_tensorflows(graphs):
    def fn(x, n):
        ys = tf.TensorArray(tf.float32, 3, element_shape=[None, 4])

        def body(i, y, ys):
            y = tf.tanh(y) * 2.0
            return i + 1, y, ys.write(i, y)

        return tf.while_loop(lambda i, *_: i < n, body, (0, x, ys))[2].stack()

    stitched = tf_stitch.function(fn, input_signature=LOOP)
    same(stitched(*counted(3)), tf.function(fn, input_signature=LOOP)(*counted(3)))
    for f in (tf.function(fn, input_signature=LOOP), stitched):
        with pytest.raises(tf.errors.InvalidArgumentError, match="element 3 in a list with 3 elements"):
            f(*counted(5))
    same(stitched(*counted(3)), fn(*counted(3)))  # an error leaves nothing behind
    assert loops(graphs) == (1, 0)


def gathering(x, n):
    """The i-th turn reads the i-th of three rows."""
    return tf.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, tf.gather(y, tf.fill([3], i)) * 1.5 + tf.exp(y)),
                         (0, x))[1]


def test_what_a_program_refuses_its_fallback_says(graphs):
    both(gathering, counted(3), signature=LOOP)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0, 3\)"):
        tf_stitch.function(gathering, input_signature=LOOP)(*counted(5))
    assert loops(graphs) == (1, 0)


def test_threads_share_a_loop(graphs):
    layer = recurrent("gru", 5)
    f, plain = (wrap(lambda x: layer(x), input_signature=SEQUENCES) for wrap in (tf_stitch.function, tf.function))
    inputs = [x_of(2, t, 6, seed=t) for t in range(1, 9)]
    want, got = [plain(x) for x in inputs], [[] for _ in inputs]

    def call(k):
        got[k].extend(f(inputs[k]) for _ in range(20))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for results, w in zip(got, want, strict=True):
        assert len(results) == 20
        for g in results:
            same(g, w)
    assert loops(graphs) == (1, 0)


def test_an_endless_loop_can_be_cancelled(graphs):
    from tensorflow.python.eager import cancellation

    @tf_stitch.function(input_signature=LOOP)
    def fn(x, n):
        return tf.while_loop(lambda i, y: tf.reduce_sum(y) > -1.0, lambda i, y: (i + 1, tf.tanh(tf.abs(y)) + 0.1),
                             (n, tf.abs(x)))[1]

    manager = cancellation.CancellationManager()
    call = manager.get_cancelable_function(fn.get_concrete_function())
    threading.Timer(0.5, manager.start_cancel).start()
    with pytest.raises(tf.errors.CancelledError):
        call(*counted(0))
    assert loops(graphs) == (1, 0)


# --- models that were rewritten before ----------------------------------------------------------------------

class Served(tf.Module):
    """A model with a recurrent layer over sequences of any length."""

    def __init__(self, layer):
        self.layer, self.weights = layer, [w.value for w in layer.weights]
        self.serve = tf.function(lambda x: {"y": self.layer(x)[0]}, input_signature=SEQUENCES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A SavedModel, and its stitched copy."""
    plain, stitched = (str(tmp_path_factory.mktemp("models") / name) for name in ("plain", "stitched"))
    model = Served(recurrent("lstm", 5))
    tf.saved_model.save(model, plain, signatures=model.serve)
    tf_stitch.rewrite_saved_model(plain, stitched, target="host")
    return plain, stitched


def executed(folder: str, x) -> tuple[np.ndarray, list[str]]:
    """A served model's answer, and the ops that TensorFlow ran for it."""
    v1 = tf.compat.v1
    with v1.Session(graph=tf.Graph()) as session:
        signature = v1.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
        trace = v1.RunMetadata()
        y = session.run(signature.outputs["y"].name, {signature.inputs["x"].name: x},
                        options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), run_metadata=trace)
    labels = [n.timeline_label for d in trace.step_stats.dev_stats for n in d.node_stats]
    return y, [label.split(" = ")[-1].split("(")[0] for label in labels]


@pytest.mark.parametrize("turns", [1, 9])
def test_a_served_models_loop_is_one_op(folders, turns):
    x = x_of(3, turns, 6).numpy()
    (want, plain), (got, ops) = (executed(folder, x) for folder in folders)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert "LoopCond" in plain and "LoopCond" not in ops
    assert sum(op in WHILES for op in ops) == 1


def test_a_loaded_model_can_be_differentiated(folders):
    x, found = x_of(2, 4, 6), []
    for folder in folders:
        loaded = tf.saved_model.load(folder)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(loaded.signatures["serving_default"](x=x)["y"] ** 2)
        found.append(tape.gradient(loss, x))
    same(found[1], found[0], 1e-4)


@pytest.mark.parametrize("coalesce", [False, True])
def test_a_session_serves_sequences_of_several_lengths_at_once(folders, coalesce):
    plain = tf.saved_model.load(folders[0]).signatures["serving_default"]
    inputs = [x_of(2, t, 6, seed=t).numpy() for t in range(1, 17)]
    with tf_stitch.StitchSession(coalesce=coalesce, threads=4, reserve=1) as session:
        session.add("a", folders[1])
        session.add("b", folders[1])
        answers = [session.submit(name, {"x": x}) for x in inputs for name in ("a", "b")]
        for k, answer in enumerate(answers):
            want = plain(x=tf.constant(inputs[k // 2]))["y"]
            np.testing.assert_allclose(answer.result(60)["y"], want, rtol=2e-5, atol=2e-5)


def test_what_is_marked(folders):
    """Loops with branches, effects or independent turns are left as they were."""
    from tf_stitch.graph.rewriter import rewrite

    for fn, marked in ((nested, [True, False]), (branching, [False]), (choosing, [False]), (independent, [False]),
                       (while_not_zero, [False])):
        function = tf.function(fn, input_signature=LOOP).get_concrete_function()
        out, _ = rewrite(function.graph.as_graph_def(), tf_stitch.Options(target="host"))
        nodes = [*out.node, *(n for f in out.library.function for n in f.node_def)]
        found = [whiles.MARK in n.attr for n in nodes if n.op in ("While", "StatelessWhile")]
        assert sorted(found) == sorted(marked), fn.__name__
