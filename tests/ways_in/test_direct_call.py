"""Replays of a function's optimized graph give what the function gives."""
from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation, context
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

import tf_stitch
from tf_stitch import bench, direct_call

from .graphs import normal, tensor

pytestmark = pytest.mark.usefixtures("switched_off")


class Counted:
    replayed = 0
    declined = 0


@pytest.fixture
def count(monkeypatch):
    """Counts the replays, and those that declined."""
    counted = Counted()
    run = direct_call.Direct.__call__

    def spy(self, leaves):
        out = run(self, leaves)
        counted.replayed += out is not None
        counted.declined += out is None
        return out

    monkeypatch.setattr(direct_call.Direct, "__call__", spy)
    return counted


def check(got, want) -> None:
    tf.nest.assert_same_structure(got, want, check_types=True)
    for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape and g.device == w.device
        np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=1e-5, atol=1e-6)


def pair(make, **kwargs):
    """(stitched, plain) functions, each of its own variables."""
    return tf_stitch.function(make(), **kwargs), tf.function(make(), **kwargs)


A, B = tensor(3), tensor(3, seed=1)


def one():
    return lambda x: tf.exp(x) * 2 + 1


def several():
    return lambda x, y: {"a": tf.exp(x) * y + 1, "b": [tf.tanh(y) * 2 + x, tf.reduce_sum(x * y + 1)]}


def swapped():
    return lambda x, y, k=2.0: tf.exp(y) * k - x


def weights():
    v, w = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([0.5, 0.25, 0.125])
    return lambda x: (tf.exp(x) * v + w, tf.tanh(x) * w - v)


def captured():
    c = tf.constant([0.5, 1.5, 2.5])
    return lambda x: tf.exp(x) * c + 1


def counter():
    v = tf.Variable([1.0, 2.0, 3.0])

    def call(x):
        y = tf.exp(x) * v + 1
        v.assign_add(y * 0.5)
        return y

    return call


def before_and_after():
    v = tf.Variable([1.0, 2.0, 3.0])

    def call(x):
        before = tf.exp(x) * v + 1
        v.assign_sub(before * 0.5)
        return before, v.read_value()

    return call


def rows():
    table = tf.Variable(normal(10, 3))

    def call(x):
        ids = tf.constant([1, 7, 1])
        found = tf.gather(table, ids)
        table.scatter_sub(tf.IndexedSlices(tf.exp(x) * found * 0.1 + 0.01, ids))
        return tf.reduce_sum(tf.exp(x) * found + 1)

    return call


def products():
    """Two ops of TensorFlow's on a CPU, a program, and the write."""
    v = tf.Variable([1.0, 2.0, 3.0])
    w = tf.constant(normal(3, 3))

    def call(x):
        y = tf.matmul(x[None], w)
        v.assign_sub(tf.reshape(tf.exp(-y * y), [3]) + 0.5)
        return v * 2

    return call


FUNCTIONS = {"one": (one, (A,)), "several results": (several, (A, B)), "swapped": (swapped, (A, B)),
             "literal": (swapped, (A, B, 3.0)), "weights": (weights, (A,)), "captured tensor": (captured, (A,)),
             "products": (products, (A,)), "assign": (counter, (A,)), "before and after": (before_and_after, (A,)),
             "NumPy": (one, (normal(3),)), "empty": (one, (tf.zeros([0]),))}


@pytest.mark.parametrize("make, args", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_same_as_the_function(count, make, args):
    stitched, plain = pair(make)
    for _ in range(6):
        check(stitched(*args), plain(*args))
    assert count.replayed == 4 and not count.declined


def test_sparse_updates(count):
    """Gathers, a program and updates: four steps on a GPU; on a CPU an executor is as fast."""
    stitched, plain = pair(rows)
    for _ in range(5):
        check(stitched(A), plain(A))
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    assert count.replayed == (3 if on_gpu else count.replayed)


@pytest.mark.parametrize("make", [counter, before_and_after, rows])
def test_ops_on_variables_are_run_by_their_kernels(count, monkeypatch, make):
    """No step of these functions is an eager op, which would take most of a call's time."""
    monkeypatch.setattr(direct_call, "MOST_OPS", {"CPU": 8, "GPU": 8})
    eager = []
    execute = direct_call.Direct._execute
    monkeypatch.setattr(direct_call.Direct, "_execute", lambda *a: eager.append(a[1].name) or execute(*a))
    stitched, plain = pair(make)
    for _ in range(5):
        check(stitched(A), plain(A))
    assert count.replayed >= 3 and not count.declined
    constants = {"ResourceGather", "ResourceScatterSub"} if make is rows else set()  # their indices are no argument
    assert set(eager) <= constants


def test_an_error_of_a_variables_kernel_is_tensorflows(count, monkeypatch):
    monkeypatch.setattr(direct_call, "MOST_OPS", {"CPU": 8, "GPU": 8})

    def make():
        table = tf.Variable(normal(10, 3))

        def call(x, ids):
            found = tf.gather(table, ids)
            table.scatter_sub(tf.IndexedSlices(tf.exp(x) * found * 0.1 + 0.01, ids))
            return tf.reduce_sum(tf.exp(x) * found + 1)

        return call

    stitched, plain = pair(make)
    ids = tf.constant([1, 7, 1])
    for _ in range(4):
        check(stitched(A, ids), plain(A, ids))
    if not tf.config.list_physical_devices("GPU"):  # there, TensorFlow gathers zeros
        with pytest.raises(tf.errors.InvalidArgumentError, match="10"):
            stitched(A, tf.constant([1, 10, 1]))
    check(stitched(A, ids), plain(A, ids))
    assert count.replayed >= 3


def test_one_replay_serves_all_shapes(count):
    made = []
    f = tf_stitch.function(lambda x, y: tf.nn.softmax(x) * 2 + y,
                           input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([4])])
    for n in range(1, 20):
        for _ in range(3):
            x, y = tensor(n, 4, seed=n), tensor(4, seed=n + 50)
            np.testing.assert_allclose(f(x, y), tf.nn.softmax(x) * 2 + y, rtol=1e-5, atol=1e-6)
        made += [id(r.direct) for r in f._tf_stitch_routes.values() if r is not None]
    assert len(set(made)) == 1 and count.replayed >= 19


def test_a_shape_that_the_kernels_are_not_for_runs_the_function(count):
    """Unknown dims that must be equal: with sizes 1 and n TensorFlow broadcasts."""
    f = tf_stitch.function(lambda x, y: tf.exp(x) * y + 1,
                           input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    for _ in range(4):
        np.testing.assert_allclose(f(A, B), np.exp(A) * B + 1, rtol=1e-5)
    replayed = count.replayed
    assert replayed == 2
    for _ in range(4):
        np.testing.assert_allclose(f(A, tf.constant([2.0])), np.exp(A) * 2 + 1, rtol=1e-5)
    np.testing.assert_allclose(f(A, B), np.exp(A) * B + 1, rtol=1e-5)
    assert count.replayed + count.declined == 5


def test_variables_are_read_at_every_call(count):
    v = tf.Variable([1.0, 2.0, 3.0], shape=[None])
    f = tf_stitch.function(lambda x: tf.exp(x) * v + 1)
    for value in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0], [1.0, 1.0, 1.0]):
        v.assign(value)
        for _ in range(3):
            np.testing.assert_allclose(f(A), np.exp(A) * value + 1, rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError):
        v.assign([1.0, 2.0])
        f(A)
    v.assign([2.0, 2.0, 2.0])
    np.testing.assert_allclose(f(A), np.exp(A) * 2 + 1, rtol=1e-5)
    assert count.replayed


def test_results_do_not_share_the_memory_of_variables_with_sparse_updates():
    v = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    f = tf_stitch.function(lambda x: (tf.reshape(v, [4]), tf.exp(x) * 2 + 1))
    update = tf.IndexedSlices(tf.constant([[10.0, 10.0]]), tf.constant([0]))
    v.scatter_add(update)
    kept = []
    for i in range(5):
        kept.append((f(A)[0], 1.0 + 10 * (i + 1)))
        v.scatter_add(update)
    for got, first in kept:
        np.testing.assert_allclose(got, [first, first + 1, 3, 4])


def test_variables_with_sparse_updates_are_read(count):
    v = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    f = tf_stitch.function(lambda x: tf.exp(x) * v + 1)
    x = tensor(2, 2)
    for i in range(6):
        np.testing.assert_allclose(f(x), np.exp(x) * v.numpy() + 1, rtol=1e-5)
        v.scatter_add(tf.IndexedSlices(tf.constant([[1.0, 0.5]]), tf.constant([i % 2])))
    assert count.replayed == 4


def test_a_variable_that_a_program_reads_twice_is_locked_once(count, monkeypatch):
    """Beside writers, a second lock of the same mutex may wait for one that waits for the first."""
    made = []
    add = direct_call._add
    monkeypatch.setattr(direct_call, "_add", lambda call, node, inputs, writes: made.append(
        [kind for kind, _ in inputs]) or add(call, node, inputs, writes))
    v = tf.Variable(np.ones((64, 8), np.float32))

    @tf_stitch.function(autograph=False)
    def f(x):
        first = v.read_value()
        with tf.control_dependencies([x]):  # reads that wait for different nodes are not merged
            second = v.read_value()
        return tf.tanh(first * 2 + x) * tf.exp(-second)

    x, stop = tensor(64, 8), threading.Event()
    row = tf.IndexedSlices(tf.ones((1, 8)), tf.constant([7]))
    v.scatter_update(row)

    def write():
        while not stop.is_set():
            v.scatter_update(row)

    writers = [threading.Thread(target=write, daemon=True) for _ in range(3)]
    for t in writers:
        t.start()
    got = [f(x) for _ in range(300)]
    stop.set()
    for t in writers:
        t.join(60)
    assert [kinds.count(direct_call.VARIABLE) for kinds in made] == [2] and count.replayed > 250
    for y in got:
        np.testing.assert_allclose(y, np.tanh(2 + x.numpy()) * np.exp(-1), rtol=1e-5)


@pytest.mark.parametrize("look", ["tape", "accumulator", "device", "callback", "cancellation", "async", "eager"])
def test_who_looks_on_sees_the_function(count, look):
    """What must see the function's call, or ask more of it than a replay can do."""
    f = tf_stitch.function(lambda x: tf.exp(x) * 2 + 1)
    for _ in range(3):
        f(A)
    before, want = count.replayed, np.exp(A) * 2 + 1
    assert before == 1
    seen = []
    if look == "tape":
        with tf.GradientTape() as tape:
            tape.watch(A)
            y = f(A)
        np.testing.assert_allclose(tape.gradient(y, A), np.exp(A) * 2, rtol=1e-5)
    elif look == "accumulator":
        with tf.autodiff.ForwardAccumulator(A, tf.ones(3)) as forward:
            y = f(A)
        np.testing.assert_allclose(forward.jvp(y), np.exp(A) * 2, rtol=1e-5)
    elif look == "device":
        with tf.device("/cpu:0"):
            y = f(A)
    elif look == "callback":
        def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
            seen.append(op_type)

        op_callbacks.add_op_callback(callback)
        try:
            y = f(A)
        finally:
            op_callbacks.remove_op_callback(callback)
        assert seen
    elif look == "cancellation":
        with cancellation.CancellationManagerContext(cancellation.CancellationManager()):
            y = f(A)
    elif look == "async":
        with context.execution_mode(context.ASYNC):
            y = f(A)
            np.testing.assert_allclose(y, want, rtol=1e-5)
    else:
        tf.config.run_functions_eagerly(True)
        try:
            y = f(A)
        finally:
            tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(y, want, rtol=1e-5)
    assert count.replayed == before
    np.testing.assert_allclose(f(A), want, rtol=1e-5)


def test_threads(count):
    """Threads of one function, whose variable another one assigns to: every result is of one of its values."""
    v = tf.Variable(tf.ones([64]))
    f = tf_stitch.function(lambda x: tf.exp(x) * v + 1)
    x = tf.zeros([64])
    for _ in range(3):
        f(x)
    wrong, stop = [], threading.Event()

    def call():
        for _ in range(300):
            y = f(x).numpy()
            if len(set(y)) != 1 or y[0] not in (2.0, 3.0):
                wrong.append(y)

    def assign():
        while not stop.is_set():
            v.assign(tf.fill([64], 2.0))
            v.assign(tf.fill([64], 1.0))

    writer = threading.Thread(target=assign)
    writer.start()
    callers = [threading.Thread(target=call) for _ in range(6)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    stop.set()
    writer.join()
    assert not wrong and count.replayed > 1000


def test_errors_of_steps_are_tensorflows(count):
    table = tf.Variable(normal(5, 3))

    def call(x, i):
        return tf.exp(tf.gather(table, i)) * x + 1

    stitched, plain = tf_stitch.function(call), tf.function(call)
    i = tf.constant([0, 4])
    for _ in range(4):
        check(stitched(A, i), plain(A, i))
    if not tf.config.list_physical_devices("GPU"):  # there, TensorFlow gathers zeros
        with pytest.raises(tf.errors.InvalidArgumentError):
            stitched(A, tf.constant([0, 5]))
    check(stitched(A, i), plain(A, i))


def test_errors_before_writes_name_the_node(count):
    spec = [tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)]  # of any rank: the reshape stays TensorFlow's

    @tf_stitch.function(input_signature=spec)
    def call(x, shape):
        return tf.reshape(tf.exp(x) * 2 + 1, shape, name="other_shape") * 2

    for _ in range(4):
        call(tf.ones([6]), tf.constant([2, 3]))
    assert count.replayed
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"node other_shape defined at(.|\n)*requested shape"):
        call(tf.ones([6]), tf.constant([4, 4]))


def test_denormals_are_zero_on_every_way(count):
    """TensorFlow's threads flush them, Python's do not: which thread a kernel runs on changes no result."""
    scale = tf.Variable(np.float32(1))
    x = tf.constant(np.full((2, 10), 2_000_000, np.uint32).view(np.float32))

    def call(x):
        scale.assign_add(tf.reduce_sum(tf.abs(x) * 3 + x))
        return tf.reduce_sum(tf.abs(x) * 3 + x, 1)

    stitched = tf_stitch.function(call)
    for _ in range(5):
        assert not stitched(x).numpy().view(np.uint32).any()
    assert count.replayed


def test_what_is_not_replayed(count):
    """Random ops have a state of their own in the function; a result that is captured lies where it was made."""
    c = tf.constant([5.0])

    def noise(x):
        return tf.exp(x) * 2 + tf.random.uniform([3], seed=1)

    f, g = tf_stitch.function(noise), tf_stitch.function(lambda x: (c, tf.exp(x) * 2 + 1))
    for _ in range(4):
        f(A)
        np.testing.assert_array_equal(g(A)[0], c)
    assert not count.replayed and not count.declined


def between_programs(x):
    y = tf.exp(x) * 2 + 1
    return x, tf.linalg.inv(y[None, :1]) + 1, x, y


@pytest.mark.parametrize("make", [lambda: lambda x: (tf.exp(x) * 2 + 1, x, x), lambda: between_programs],
                         ids=["one step", "several"])
def test_results_that_are_arguments(count, make):
    """They are other tensors, as a function's are."""
    stitched, plain = pair(make)
    for x in (A, A, A, B, B):
        got = stitched(x)
        check(got, plain(x))
        assert len({id(t) for t in (x, *got)}) == 1 + len({id(t) for t in got}) and all(t is not x for t in got)
    assert count.replayed == 3 and not count.declined


def step(*variables):
    """Several updates, one of which is read again, and a result that is an argument."""
    def call(x):
        for v in variables:
            v.assign_add(tf.tanh(v * x) + 0.5)
        return variables[0].read_value() * 2, x

    return call


def test_only_results_become_tensors(count, monkeypatch):
    """The values of 40 variables stay in C++."""
    made = []
    run = direct_call._run
    monkeypatch.setattr(direct_call, "MOST_STEPS", 100)
    monkeypatch.setattr(direct_call, "_run", lambda call, inputs, results: (
        run(call, inputs, results), made.append(len(results)))[0])
    variables = [tf.Variable(normal(3, seed=k)) for k in range(40)]
    copies = [tf.Variable(v) for v in variables]
    stitched, plain = tf_stitch.function(step(*variables)), tf.function(step(*copies))
    for _ in range(5):
        check(stitched(A), plain(A))
    for v, c in zip(variables, copies, strict=True):
        np.testing.assert_allclose(v, c, rtol=1e-5)
    assert count.replayed == 3 and set(made) == {2}


def test_a_variable_with_sparse_updates_is_read_and_written_in_one_call(count):
    """It is locked while a program that reads it is run, and written to after that."""
    variables, copies = ([tf.Variable(normal(3, seed=k)) for k in range(3)] for _ in range(2))
    stitched, plain = tf_stitch.function(step(*variables)), tf.function(step(*copies))
    for k in range(8):
        if k > 3:  # reads are copies from now on
            for v in (variables[1], copies[1]):
                v.scatter_add(tf.IndexedSlices(tf.constant([0.5]), tf.constant([k % 3])))
        check(stitched(A), plain(A))
    for v, c in zip(variables, copies, strict=True):
        np.testing.assert_allclose(v, c, rtol=1e-5)
    assert count.replayed + count.declined == 6


def test_values_that_were_read_stay_as_they_are(count):
    """A result of a call shares no memory that a later call writes to."""
    v = tf.Variable(normal(3))

    def call(x):
        before = v.read_value() * 1.5
        v.assign_add(tf.exp(x) * 0.25)
        return before, v.read_value()

    stitched = tf_stitch.function(call)
    value, results = v.numpy(), []
    for _ in range(7):
        results.append((stitched(A), value * 1.5, value + np.exp(A) * 0.25))
        value = value + np.exp(A) * 0.25
        v.assign_add(tf.ones(3))
        value = value + 1
    for got, *want in results:
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5)
    assert count.replayed == 5


def test_an_uninitialized_variable_is_tensorflows_error(count):
    v = UninitializedVariable(shape=[3], dtype=tf.float32)
    stitched = tf_stitch.function(step(v))
    for _ in range(3):
        with pytest.raises((tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)):
            stitched(A)
        assert not tf.raw_ops.VarIsInitializedOp(resource=v.handle)
    v.assign([1.0, 2.0, 3.0])
    for _ in range(4):
        stitched(A)
    want = np.float32([1, 2, 3])
    for _ in range(4):
        want = want + np.tanh(want * A) + 0.5
    np.testing.assert_allclose(v, want, rtol=1e-5)
    assert count.replayed >= 2


def test_the_profiler_shows_function_and_programs(count):
    f = tf_stitch.function(lambda x: tf.exp(x) * 2 + 1)
    for _ in range(3):
        f(A)
    before = count.replayed
    traced = bench.trace(lambda: f(A))
    assert count.replayed == before + 1
    assert [(o.kind, o.calls) for o in traced.ops] == [("StitchedProgram", 1)]


def test_the_profiler_shows_ops_that_programs_are_run_beside(count):
    f = tf_stitch.function(products())
    for _ in range(3):
        f(A)
    before = count.replayed
    traced = bench.trace(lambda: f(A))
    assert count.replayed == before + 1
    assert {o.kind: o.calls for o in traced.ops if o.kind not in bench.FREE_OPS} == {
        "StridedSlice": 1, "MatMul": 1, "StitchedProgram": 1, "StitchedAssign": 1}


def test_it_can_be_turned_off(count, monkeypatch):
    monkeypatch.setenv("TF_STITCH_DIRECT_CALLS", "0")
    f = tf_stitch.function(lambda x: tf.exp(x) * 2 + 1)
    for _ in range(4):
        np.testing.assert_allclose(f(A), np.exp(A) * 2 + 1, rtol=1e-5)
    assert not count.replayed


def test_enable_and_disable(count):
    f = tf.function(lambda x: tf.exp(x) * 2 + 1)
    for on in (True, False, True):
        tf_stitch.enable() if on else tf_stitch.disable()
        before = count.replayed
        for _ in range(5):
            np.testing.assert_allclose(f(A), np.exp(A) * 2 + 1, rtol=1e-5)
        assert (count.replayed > before) == on
    before = count.replayed
    tf_stitch.enable(tf_stitch.Options(skip_ops=("Exp",)))
    for _ in range(4):
        np.testing.assert_allclose(f(A), np.exp(A) * 2 + 1, rtol=1e-5)
    routes = [r for r in f._tf_stitch_routes.values() if r is not None]
    assert all(len(r.direct.steps) == 2 for r in routes if r.direct is not None)  # Exp stays TensorFlow's


def test_a_replaced_capture_counts(count):
    c = tf.constant([0.5, 1.5, 2.5])
    f = tf_stitch.function(lambda x: tf.exp(x) * c + 1)
    for _ in range(3):
        f(A)
    f.get_concrete_function(A).set_external_captures([tf.constant([10.0, 20.0, 30.0])])
    for _ in range(4):
        np.testing.assert_allclose(f(A), np.exp(A) * [10, 20, 30] + 1, rtol=1e-5)


def test_nothing_is_kept_alive():
    def make():
        big = tf.Variable(tf.zeros(1000))
        f = tf_stitch.function(lambda x: tf.exp(x) * big + 1)
        for _ in range(4):
            f(tf.constant(1.0))
        direct, = [r.direct for r in f._tf_stitch_routes.values() if r is not None]
        return weakref.ref(f), weakref.ref(big), weakref.ref(direct)

    refs = make()
    gc.collect()
    assert [r() for r in refs] == [None, None, None]


def test_functions_of_a_model_under_enable(count):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(normal(4, 4))

        @tf.function
        def __call__(self, x):
            return tf.nn.softmax(tf.matmul(x, self.w) * 2 + 1)

    tf_stitch.enable()
    model, x = Model(), tensor(2, 4)
    for _ in range(5):
        np.testing.assert_allclose(model(x), tf.nn.softmax(np.matmul(x, model.w.numpy()) * 2 + 1), rtol=1e-5)
    assert count.replayed


def test_garbage_that_calls_its_function():
    """Python may have finalized the replay, and freed what it runs, before it lets the rest of a cycle say good-bye."""
    class Model:
        def __init__(self):
            self.call = tf_stitch.function(lambda x: tf.nn.softmax(tf.exp(x) * 2.0) + 1.0)

        def __del__(self):
            last.append(self.call(x).numpy())

    x, last = tensor(3, 5), []
    model = Model()
    want = model.call(x)
    for _ in range(3):
        model.call(x)
    model.call.owner = model  # a cycle
    del model
    gc.collect()
    np.testing.assert_array_equal(last, [want])


@pytest.mark.parametrize("calls", [1, 3])
def test_calls_while_python_ends(calls):
    script = f"""
import tensorflow as tf, tf_stitch
call = tf_stitch.function(lambda x: tf.nn.softmax(tf.exp(x) * 2.0) + 1.0)
x = tf.ones([3, 5])
class Last:
    def __del__(self):
        print(call(x).shape)
for _ in range({calls}):
    call(x)
last = call.last = Last()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "(3, 5)\n" and "Exception" not in done.stderr
