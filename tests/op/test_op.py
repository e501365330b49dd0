"""The StitchedProgram op, run by TensorFlow on programs written by hand."""
from __future__ import annotations

import concurrent.futures
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.op import programs
from tests.op.calls import counted, specs_of, stitched
from tf_stitch import runtime
from tf_stitch.backend import host
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.program import serialize
from tf_stitch.program.program import AliasStep, Buffer


def axpb_in_tf(x):
    return 2 * x + 1


def chain_in_tf(x, y):
    t = 2 * x + 1
    v = t * (2 * t + 1)
    return v * y, v[:, None]


def function(program, fn, like=None, **options):
    """A compiled function of one StitchedProgram node."""
    return tf.function(stitched(program, fn, like, **options), input_signature=specs_of(like or program),
                       autograph=False)


def floats(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def expect_stitched(call, want, times=1):
    result, ran, fell_back = counted(call)
    assert (ran, fell_back) == (times, 0)
    check(result, want)


def expect_fallback(call, want):
    result, ran, fell_back = counted(call)
    assert (ran, fell_back) == (0, 1)
    check(result, want)


def check(result, want):
    for r, w in zip(tf.nest.flatten(result), tf.nest.flatten(want), strict=True):
        np.testing.assert_allclose(r.numpy(), w, rtol=1e-5, atol=1e-6)
        assert r.shape == np.shape(w)


def test_every_shape_from_one_node():
    f = function(programs.axpb(), axpb_in_tf)
    for shape in [(0, 5), (5, 0), (1, 1), (3, 70), (1, 64), (17, 129), (999, 1001)]:
        x = floats(*shape)
        expect_stitched(lambda x=x: f(x), axpb_in_tf(x))


def test_temporaries_and_an_output_that_is_a_temporary():
    f = function(programs.chain(), chain_in_tf)
    for n in (0, 1, 63, 1000, 100_000):
        x, y = floats(n), floats(n) + 1
        expect_stitched(lambda x=x, y=y: f(x, y), chain_in_tf(x, y))


def test_guard_that_fails_runs_the_fallback():
    f = function(programs.chain(), chain_in_tf)
    x, y = floats(9), floats(1)
    expect_fallback(lambda: f(x, y), chain_in_tf(x, y))
    expect_fallback(lambda: f(x, y), chain_in_tf(x, y))  # also from the plan cache
    expect_stitched(lambda: f(x, x), chain_in_tf(x, x))


def test_shared_memory_in_parallel():
    f = function(programs.rowsum(), lambda x: tf.reduce_sum(x, 1))
    for shape in [(4000, 300), (3, 0), (0, 4), (1, 2_000_000)]:
        x = floats(*shape)
        result, ran, _ = counted(lambda x=x: f(x))
        assert ran == 1
        np.testing.assert_allclose(result, x.sum(1, dtype=np.float64), rtol=1e-3, atol=0.2)


def test_reshape_shares_memory():
    f = function(programs.reshape(), lambda x: tf.reshape(x, tf.reverse(tf.shape(x), [0])))
    x = tf.constant(floats(4, 6))
    expect_stitched(lambda: f(x), x.numpy().reshape(6, 4))
    y = f(x)
    pointers = [np.from_dlpack(tf.identity(t)).ctypes.data for t in (x, y)]
    assert pointers[0] == pointers[1]


def test_aliases_of_outputs_and_of_one_temporary():
    """Outputs 0 and 1 are both the temp; output 2 is output 3, which a kernel writes."""
    n = programs.dim("n")
    f32 = "float32"
    program = programs.program(
        [Buffer("input", 0, f32, (n,)), Buffer("temp", 0, f32, (n,)), Buffer("output", 0, f32, (n,)),
         Buffer("output", 1, f32, (1, n)), Buffer("output", 2, f32, (n, 1)), Buffer("output", 3, f32, (n,))],
        [programs.launch("t_axpb", (0, 1), n), programs.launch("t_axpb", (1, 5), n), AliasStep(1, 2), AliasStep(1, 3),
         AliasStep(5, 4)], {"n": SymbolSource("dim", 0, 0)})

    def in_tf(x):
        t = 2 * x + 1
        u = 2 * t + 1
        return t, t[None], u[:, None], u

    x = floats(77)
    expect_stitched(lambda: function(program, in_tf)(x), in_tf(x))


def test_sizes_from_values():
    f = function(programs.fill(), lambda s: tf.fill([s[0]], tf.cast(s[1], tf.int64)))
    expect_stitched(lambda: f([3, -7]), np.full(3, -7))
    expect_stitched(lambda: f([0, 1]), np.zeros(0))
    expect_fallback(lambda: f([1001, 5]), np.full(1001, 5))  # past the range that the program allows
    with pytest.raises(tf.errors.InvalidArgumentError):
        f([-1, 5])


def test_status_gives_tensorflow_s_own_error():
    f = function(programs.gather(), tf.gather)
    x = floats(10)
    expect_stitched(lambda: f(x, [9, 0, 3]), x[[9, 0, 3]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[1\] = 10 is not in \[0, 10\)"):
        f(x, [0, 10])
    expect_stitched(lambda: f(x, [1]), x[[1]])


@pytest.mark.parametrize("damage", [
    lambda data: b"",
    lambda data: data[:40],
    lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    lambda data: serialize.dumps(programs.chain()),  # sound, but of another cluster
    lambda data: serialize.dumps(dataclasses.replace(programs.axpb(), code={host.native_level(): b"\x7fELF no"})),
    lambda data: data.replace(b"t_axpb", b"t_AXPB"),
    lambda data: serialize.dumps(dataclasses.replace(
        programs.axpb(), steps=[dataclasses.replace(programs.axpb().steps[0], kernel="not_there")])),
])
def test_programs_that_cannot_be_used_run_the_fallback(damage):
    good = programs.axpb()
    f = function(damage(serialize.dumps(good)), axpb_in_tf, good)
    x = floats(5, 4)
    expect_fallback(lambda: f(x), axpb_in_tf(x))


def test_no_code_for_this_processor():
    """Built from the text where there is one; else TensorFlow runs."""
    x = floats(5, 4)
    foreign = {"x86-64-v9": b"not for us"}
    expect_stitched(lambda: function(programs.axpb(code=foreign), axpb_in_tf)(x), axpb_in_tf(x))
    expect_fallback(lambda: function(programs.axpb(code=foreign, text=""), axpb_in_tf)(x), axpb_in_tf(x))
    broken = programs.axpb(code={}, text="#include <nothing_of_this_name.h>\n")
    expect_fallback(lambda: function(broken, axpb_in_tf)(x), axpb_in_tf(x))


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("TF_STITCH_DISABLE", "1")
    x = floats(5, 4)
    expect_fallback(lambda: function(programs.axpb(), axpb_in_tf)(x), axpb_in_tf(x))


def test_static_shapes_and_ranks_are_checked():
    """A model may be called with shapes that the program was not made for."""
    program = programs.program([Buffer("input", 0, "float32", (4,)), Buffer("output", 0, "float32", (4,))],
                               [programs.launch("t_axpb", (0, 1), 4)])
    call = stitched(program, axpb_in_tf, shapes=False)
    f = tf.function(call, input_signature=[tf.TensorSpec(None, tf.float32)], autograph=False)
    assert f.get_concrete_function().output_shapes.rank is None
    expect_stitched(lambda: f(floats(4)), axpb_in_tf(floats(4)))
    for shape in [(5,), (4, 1), ()]:
        expect_fallback(lambda shape=shape: f(floats(*shape)), axpb_in_tf(floats(*shape)))


def test_shapes_of_the_node():
    concrete = function(programs.chain(), chain_in_tf).get_concrete_function()
    assert [s.as_list() for s in concrete.output_shapes] == [[None], [None, 1]]


def test_many_signatures():
    f = function(programs.axpb(), axpb_in_tf)
    for n in list(range(300)) + [0, 299, 150]:
        x = floats(n, 2)
        expect_stitched(lambda x=x: f(x), axpb_in_tf(x))


def test_many_threads_on_one_node():
    f = function(programs.chain(), chain_in_tf)
    f(floats(3), floats(3))
    before = runtime.counters()

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(25):
            n = int(rng.integers(0, 3000))
            x, y = rng.normal(size=(2, n)).astype(np.float32)
            check(f(x, y), chain_in_tf(x, y))
        return True

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))
    after = runtime.counters()
    assert (after.stitched - before.stitched, after.fallbacks - before.fallbacks) == (32 * 25, 0)


def test_fallbacks_and_kernels_at_the_same_time():
    f = function(programs.gather(), tf.gather)

    def work(seed):
        rng = np.random.default_rng(seed)
        for i in range(15):
            x, idx = rng.normal(size=50).astype(np.float32), rng.integers(0, 50, 20)
            if i % 3 == 0:
                idx[4] = 50
                with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
                    f(x, idx.astype(np.int32))
            else:
                check(f(x, idx.astype(np.int32)), x[idx])
        return True

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_equal_code_is_loaded_once_and_other_code_is_not_mixed_up():
    x = floats(8, 8)
    keep = [function(programs.axpb(), axpb_in_tf) for _ in range(3)]
    keep[0](x)
    before = runtime.counters().loads
    for f in keep:
        expect_stitched(lambda f=f: f(x), axpb_in_tf(x))
    assert runtime.counters().loads == before
    for k in range(5):  # the same kernel name in each
        text = programs.TEXT.replace("y[i] = 2.0f * x[i] + 1.0f", f"y[i] = 2.0f * x[i] + {k}.5f")
        program = programs.axpb(code=host.compile_text(text, host.native_levels()), text=text)
        keep.append(function(program, axpb_in_tf))
        expect_stitched(lambda k=k: keep[-1](x), 2 * x + k + 0.5)
    assert runtime.counters().loads == before + 5


def test_gradients():
    """First and second order, through the function that the node carries."""
    f = function(programs.chain(), chain_in_tf)
    x, y = tf.constant(floats(6)), tf.constant(floats(6) + 2)

    def derivatives(fn):
        with tf.GradientTape() as outer:
            outer.watch((x, y))
            with tf.GradientTape() as tape:
                tape.watch((x, y))
                z, v = fn(x, y)
                loss = tf.reduce_sum(z * z) + tf.reduce_sum(v)
            first = tape.gradient(loss, (x, y))
            total = tf.reduce_sum(first[0] * first[1])
        return [*first, *outer.gradient(total, (x, y))]

    for ours, wanted in zip(derivatives(tf.function(lambda a, b: f(a, b))), derivatives(chain_in_tf), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4)


def test_gradient_with_integer_inputs_and_an_input_given_twice():
    f = function(programs.gather(), tf.gather)
    g = function(programs.chain(), chain_in_tf)
    x, idx = tf.constant(floats(5)), tf.constant([1, 1, 4])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        picked, squared = f(x, idx), g(x, x)[0]
        wanted = chain_in_tf(x, x)[0]
    np.testing.assert_array_equal(tf.convert_to_tensor(tape.gradient(picked, x)), [0, 2, 0, 0, 1])
    np.testing.assert_allclose(tape.gradient(squared, x), tape.gradient(wanted, x), rtol=1e-4)


def test_in_loops_branches_and_nested_functions():
    f = function(programs.axpb(), axpb_in_tf)

    @tf.function(input_signature=specs_of(programs.axpb()))
    def loop(x):
        for i in tf.range(5):
            if i % 2 == 0:
                x = f(x)
            else:
                x = tf.function(lambda y: f(y) - 1.0)(x)
        return x

    x = floats(3, 3)
    want = x
    for i in range(5):
        want = axpb_in_tf(want) - (i % 2)
    expect_stitched(lambda: loop(x), want, times=5)


def test_in_a_map_function_with_a_small_pool():
    f = function(programs.axpb(), axpb_in_tf)
    data = tf.data.Dataset.from_tensor_slices(floats(20, 4, 3)).map(f, num_parallel_calls=4).batch(20)
    check(next(iter(data)), axpb_in_tf(floats(20, 4, 3)))


def test_in_a_graph_session():
    """TensorFlow 1 sessions, where functions live in the graph."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None])
        y = tf.compat.v1.placeholder(tf.float32, [None])
        z, _ = stitched(programs.chain(), chain_in_tf)(x, y)
        with tf.compat.v1.Session() as session:
            a, b = floats(12), floats(12) * 2
            np.testing.assert_allclose(session.run(z, {x: a, y: b}), chain_in_tf(a, b)[0], rtol=1e-5)
            np.testing.assert_allclose(session.run(z, {x: a, y: b[:1]}), chain_in_tf(a, b[:1])[0], rtol=1e-5)


def test_saved_and_loaded(tmp_path):
    module = tf.Module()
    module.scale = tf.Variable(3.0)
    inner = stitched(programs.chain(), chain_in_tf)
    module.f = tf.function(lambda x, y: inner(x * module.scale, y)[0], input_signature=specs_of(programs.chain()),
                           autograph=False)
    tf.saved_model.save(module, str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    x, y = floats(11), floats(11)
    expect_stitched(lambda: loaded.f(x, y), chain_in_tf(3 * x, y)[0])
    expect_fallback(lambda: loaded.f(x, y[:1]), chain_in_tf(3 * x, y[:1])[0])
    with tf.GradientTape() as tape:  # fine-tuning
        loss = tf.reduce_sum(loaded.f(x, y))
    slope = tape.gradient(loss, loaded.scale)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(chain_in_tf(x * module.scale, y)[0])
    np.testing.assert_allclose(slope, tape.gradient(loss, module.scale), rtol=1e-4)


def test_bad_attrs_are_refused_with_a_sentence():
    data = serialize.dumps(programs.axpb())

    @tf.function
    def f(x):
        return runtime.load().stitched_program(args=[x], Tout=[tf.float32], program=data,
                                               fallback=tf.function(axpb_in_tf).get_concrete_function(x),
                                               output_shapes=[[None], [None]])

    with pytest.raises(ValueError, match="output_shapes has 2 entries for 1 outputs"):
        f(floats(2, 2))


def test_library_and_python_agree_on_this_machine():
    assert runtime.library().tf_stitch_host_target().decode() == host.native_level()
    assert runtime.library().tf_stitch_built_for().decode() == tf.__version__ == runtime.built_for()
