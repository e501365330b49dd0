"""Rewriting GraphDefs: what is spliced in gives the same numbers, and all that others rely on is kept."""
from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import convert_to_constants

import tf_stitch
from tf_stitch import compiler, runtime
from tf_stitch.errors import CompileError, ImportFailed, OptionError
from tf_stitch.graph import rewriter
from tf_stitch.graph.rewriter import FALLBACK_PREFIX, rewrite

from .graphs import NATIVE, build, by_name, check, native, normal, run, stitched

v1 = tf.compat.v1


def placeholder(name: str = "x", shape=(None, 8), dtype=tf.float32):
    return v1.placeholder(dtype, shape, name=name)


def test_chain_around_a_matmul_with_unknown_batch():
    def graph():
        x = placeholder()
        a = tf.nn.relu(x * 2 + 1)
        c = tf.tanh(tf.matmul(a, tf.constant(normal(8, 8)), name="b")) + a
        tf.identity(tf.nn.softmax(c) * 3, name="y")

    feeds = [{"x:0": normal(n, 8, seed=n)} for n in (0, 1, 3, 17)]
    out, report = check(build(graph), ["y:0"], *feeds, clusters=2)
    assert report.coverage == 1.0
    assert [n.op for n in out.node if n.op == "MatMul"] == ["MatMul"]
    shapes = [s for n in stitched(out) for s in n.attr["output_shapes"].list.shape]
    assert [[d.size for d in s.dim] for s in shapes] == [[-1, 8], [-1, 8]]


def test_the_kernels_ran_not_the_fallback():
    gd = build(lambda: tf.identity(tf.exp(placeholder()) * 2 + 1, name="y"))
    out, _ = rewrite(gd, NATIVE)
    before = runtime.counters()
    run(out, ["y:0"], {"x:0": normal(3, 8)})
    after = runtime.counters()
    assert after.stitched == before.stitched + 1 and after.fallbacks == before.fallbacks


def test_names_that_may_be_fetched_stay():
    def graph():
        x = placeholder()
        a = tf.exp(x, name="a")
        b = tf.multiply(a, 2.0, name="b")
        tf.split(b + 1.0, 2, axis=1, name="ends")

    out, _ = check(build(graph), ["a:0", "ends:0", "ends:1"], {"x:0": normal(5, 8)}, keep=["a"])
    nodes = by_name(out)
    assert nodes["a"].op == "Identity" and nodes["ends"].op == "IdentityN"
    assert "b" not in nodes and nodes["x"].op == "Placeholder"


def test_names_that_must_only_run_hold_no_data():
    def graph():
        a = tf.exp(placeholder(), name="a")
        with tf.control_dependencies([a]):
            tf.identity(tf.multiply(a, 2.0) + 1.0, name="y")

    gd = build(graph)
    out, _ = rewrite(gd, NATIVE, run=["a"])
    (node,) = stitched(out)
    assert by_name(out)["a"].op == "NoOp" and list(by_name(out)["a"].input) == [f"^{node.name}"]
    assert len(node.attr["Tout"].list.type) == 1
    feed = {"x:0": normal(3, 8)}
    np.testing.assert_allclose(run(out, ["y:0"], feed), run(gd, ["y:0"], feed), rtol=1e-5)


def test_multi_output_nodes_keep_their_ports():
    def graph():
        x = placeholder(shape=(None, 6))
        parts = tf.split(x * 2 + 1, 3, axis=1)
        tf.matmul(parts[2], tf.exp(parts[0]), transpose_b=True, name="y")
        tf.identity(tf.unstack(parts[1] - 1, axis=1)[1], name="z")

    check(build(graph), ["y:0", "z:0"], {"x:0": normal(4, 6)})


def test_control_edges_move_to_the_stitched_node():
    def graph():
        v = v1.get_variable("v", initializer=1.0, use_resource=True)
        x = placeholder(shape=())
        with tf.control_dependencies([v.assign_add(x)]):
            a = tf.exp(x) * 2
            b = a + 1
        with tf.control_dependencies([b]):
            tf.identity(v.read_value(), name="after")
        tf.identity(b, name="y")

    gd = build(graph)
    init = ["v/Assign"]
    out, _ = check(gd, ["y:0", "after:0"], {"x:0": np.float32(0.5)}, clusters=1, init=init)
    (node,) = stitched(out)
    (assign,) = [n.name for n in gd.node if n.op == "AssignAddVariableOp"]
    assert f"^{assign}" in node.input
    reads = [n for n in out.node if n.op == "ReadVariableOp" and f"^{node.name}" in n.input]
    assert reads
    assert all(i.startswith("^") for i in node.input[1:])


def test_nodes_that_only_wait_do_not_split_a_cluster():
    """What TensorFlow's constant folding leaves of the shapes of a gradient; one that is kept still waits."""
    def graph():
        x = placeholder()
        a = tf.exp(x) + 1.0
        with tf.control_dependencies([a]):
            relay = tf.no_op("relay")
            end = tf.no_op("end")
        with tf.control_dependencies([relay]):
            second = tf.no_op("second")
        with tf.control_dependencies([second, end]):
            tf.multiply(tf.tanh(a), 2.0, name="y")

    out, report = check(build(graph), ["y:0"], {"x:0": normal(3, 8)}, clusters=1)
    assert not any(n.op == "NoOp" for n in out.node) and report.coverage == 1.0
    out, _ = check(build(graph), ["y:0"], {"x:0": normal(3, 8)}, clusters=2, keep=["end"])
    assert by_name(out)["end"].input


def test_side_effects_split_clusters_and_stay_in_order():
    def graph():
        v = v1.get_variable("v", initializer=2.0, use_resource=True)
        x = placeholder(shape=())
        a = tf.exp(x) * 2 + 1
        with tf.control_dependencies([v.assign(a)]):
            tf.identity(tf.tanh(v.read_value() * a) + a, name="y")

    check(build(graph), ["y:0"], {"x:0": np.float32(0.3)}, clusters=2, init=["v/Assign"])


def test_cycle_hazard_through_a_diamond():
    def graph():
        x = placeholder(shape=(8, 8))
        a = tf.exp(x) * 0.1
        b = tf.matmul(a, a)
        c = tf.tanh(b) + 1
        d = tf.matmul(c, a)
        tf.identity((d + c) * a + b, name="y")

    check(build(graph), ["y:0"], {"x:0": normal(8, 8)})


def test_large_constants_are_inputs_and_small_ones_are_not():
    def graph():
        x = placeholder(shape=(None, 2000))
        y = tf.exp(x + tf.constant(normal(2000), name="big")) * tf.constant(2.0, name="two")
        tf.reduce_sum(y, axis=1, name="y")

    out, _ = check(build(graph), ["y:0"], {"x:0": normal(3, 2000)}, clusters=1, rtol=1e-5)
    (node,) = stitched(out)
    assert set(node.input) == {"x", "big"} and "two" not in by_name(out)


def test_shape_arithmetic_is_symbolic():
    def graph():
        x = placeholder(shape=(None, None, 4))
        s = tf.shape(x)
        y = tf.reshape(tf.exp(x) + 1, [s[0] * s[1], 2, 2])
        tf.identity(tf.transpose(y, [0, 2, 1]) * tf.cast(s[0], tf.float32), name="y")

    feeds = [{"x:0": normal(a, b, 4)} for a, b in ((1, 1), (3, 5), (0, 2))]
    before = runtime.counters().fallbacks
    out, _ = check(build(graph), ["y:0"], *feeds, clusters=1)
    (node,) = stitched(out)
    assert list(node.input) == ["x"] and runtime.counters().fallbacks == before


def test_failed_guards_run_the_original_nodes():
    """The batch dims of two inputs are taken to be equal; broadcasting a 1 goes to the fallback."""
    def graph():
        tf.identity(tf.exp(placeholder("x")) * placeholder("z") + 1, name="y")

    check(build(graph), ["y:0"], {"x:0": normal(4, 8), "z:0": normal(4, 8)}, {"x:0": normal(4, 8), "z:0": normal(1, 8)})


def test_errors_of_the_original_nodes_stay():
    def graph():
        table = placeholder(shape=(None, 4))
        tf.identity(tf.gather(table, placeholder("i", (None,), tf.int32)) * 2 + 1, name="y")

    out, _ = check(build(graph), ["y:0"], {"x:0": normal(5, 4), "i:0": np.array([0, 4], np.int32)}, clusters=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[1\] = 9 is not in \[0, 5\)"):
        run(out, ["y:0"], {"x:0": normal(5, 4), "i:0": np.array([0, 9], np.int32)})


def test_colocation_with_a_removed_node_is_repaired():
    gd = build(lambda: tf.matmul(tf.exp(placeholder(shape=(8, 8))) * 2, tf.ones((8, 8)), name="m"))
    by_name(gd)["m"].attr["_class"].list.s.append(b"loc:@mul")
    out, _ = check(gd, ["m:0"], {"x:0": normal(8, 8)}, clusters=1)
    (node,) = stitched(out)
    assert by_name(out)["m"].attr["_class"].list.s == [f"loc:@{node.name}".encode()]


def test_colocation_with_what_went_with_a_loop_is_dropped():
    def graph():
        x = placeholder(shape=(3, 4))
        y = tf.scan(lambda a, t: tf.tanh(a * t) + 1, x)
        tf.identity(tf.gradients(tf.reduce_sum(y), x)[0], name="y")

    check(build(graph), ["y:0"], {"x:0": normal(3, 4)}, clusters=None)  # TensorFlow imports it


def test_devices_are_kept():
    def graph():
        with tf.device("/device:CPU:0"):
            tf.identity(tf.exp(placeholder()) * 2 + 1, name="y")

    out, _ = check(build(graph), ["y:0"], {"x:0": normal(2, 8)}, clusters=1)
    (node,) = stitched(out)
    assert node.device == "/device:CPU:0"


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "int64", "uint8"])
def test_other_types(dtype):
    def graph():
        x = placeholder(dtype=tf.as_dtype(dtype))
        tf.identity((x + x) * x - 1, name="y")

    x = (normal(3, 8) * 3).astype(tf.as_dtype(dtype).as_numpy_dtype)
    gd = build(graph)
    out, report = rewrite(gd, NATIVE)
    assert len(report.clusters) == 1
    (want,), (got,) = run(gd, ["y:0"], {"x:0": x}), run(out, ["y:0"], {"x:0": x})
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-12)
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


# --- functions and control flow ----------------------------------------------------------------------

def function_graph(fn, *specs: tf.TensorSpec):
    """The concrete function of ``fn`` as a GraphDef that calls it: functional control flow, nothing inlined."""
    concrete = tf.function(fn, autograph=False).get_concrete_function(*specs)
    return build(lambda: tf.identity(concrete(*(placeholder(f"x{i}", s.shape, s.dtype) for i, s in enumerate(specs))),
                                     name="y"))


def body(x):
    def step(i, y):
        return i + 1, tf.cond(tf.reduce_sum(y) > 0, lambda: tf.tanh(y) * 2 - 1, lambda: tf.exp(y) * 0.5 + 1)

    return tf.while_loop(lambda i, y: i < 4, step, (tf.constant(0), x))[1]


FEEDS = [{"x0:0": normal(3, 4, seed=s) + s - 1} for s in range(3)]


def test_functions_of_the_library_are_rewritten():
    gd = function_graph(lambda x: tf.nn.softmax(body(x) * 2), tf.TensorSpec([None, 4]))
    out, report = check(gd, ["y:0"], *FEEDS, rtol=1e-5)
    touched = {g.name for g in report.graphs if g.clusters}
    assert any("true" in n for n in touched) and any("false" in n for n in touched)
    signatures = {f.signature.name: f.signature for f in out.library.function}
    for f in gd.library.function:
        assert signatures[f.signature.name] == f.signature


def test_lowered_loops_and_branches():
    concrete = tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec([None, 4], name="x0"))
    frozen = convert_to_constants.convert_variables_to_constants_v2(concrete, lower_control_flow=True)
    gd, end = frozen.graph.as_graph_def(), frozen.outputs[0].name
    assert {"Switch", "Merge", "Enter", "Exit"} <= {n.op for n in gd.node}
    feeds = [{frozen.inputs[0].name: f["x0:0"]} for f in FEEDS]
    _, report = check(gd, [end], *feeds, rtol=1e-5, keep=[end.split(":")[0]])
    assert len(report.clusters) >= 3


def test_control_flow_of_version_1():
    context_was = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        gd = build(lambda: tf.identity(tf.exp(body(placeholder("x0", (None, 4)))) * 2, name="y"))
    finally:
        if context_was:
            tf.compat.v1.enable_control_flow_v2()
    assert {"Switch", "Merge", "Enter", "NextIteration", "Exit"} <= {n.op for n in gd.node}
    _, report = check(gd, ["y:0"], *FEEDS, rtol=1e-5)
    assert len(report.clusters) >= 3


def test_side_effects_of_a_function_still_happen():
    v = tf.Variable(1.0)

    def fn(x):
        y = tf.exp(x) * 2 + 1
        v.assign_add(tf.reduce_sum(y) * 0 + 1)
        return tf.tanh(y) * v

    concrete = tf.function(fn).get_concrete_function(tf.TensorSpec([4]))
    _, report = rewrite(concrete.graph.as_graph_def(), NATIVE)
    assert report.clusters
    got = tf_stitch_function(fn, tf.TensorSpec([4]))(tf.zeros(4))
    assert v.numpy() == 2.0
    np.testing.assert_allclose(got, np.tanh(3.0) * 2.0 * np.ones(4), rtol=1e-6)


def tf_stitch_function(fn, *specs):
    return tf_stitch.function(fn).get_concrete_function(*specs)


def test_functions_that_xla_compiles_stay():
    inner = tf.function(lambda x: tf.exp(x) * 2 + 1, jit_compile=True)
    gd = function_graph(lambda x: inner(x) * 2 + 1, tf.TensorSpec([None, 4]))
    out, report = rewrite(gd, NATIVE)
    xla = [g for g in report.graphs if g.untouched and "XLA" in g.untouched]
    assert len(xla) == 1 and not xla[0].clusters
    assert sorted(n.op for n in xla[0].left) == ["AddV2", "Exp", "Mul"] and report.coverage == 2 / 5
    original = {f.signature.name: f for f in gd.library.function}
    (kept,) = [f for f in out.library.function if f.signature.name == xla[0].name]
    assert kept == original[kept.signature.name]


def test_equal_clusters_share_one_fallback():
    def graph():
        x = placeholder(shape=(8, 8))
        for k in range(3):
            with tf.name_scope(f"layer{k}"):
                x = tf.matmul(tf.exp(x * 0.1) * 0.1, tf.ones((8, 8)))
        tf.identity(x, name="y")

    out, _ = rewrite(build(graph), NATIVE)
    nodes = stitched(out)
    assert len(nodes) == 3
    assert {n.attr["program"].s for n in nodes} and len({n.attr["program"].s for n in nodes}) <= 3
    names = {n.attr["fallback"].func.name for n in nodes}
    assert names == {f.signature.name for f in out.library.function}
    assert all(n.startswith(FALLBACK_PREFIX) for n in names)


# --- what cannot be stitched -------------------------------------------------------------------------

def test_unsupported_things_stay_with_their_reasons():
    def graph():
        s = v1.placeholder(tf.string, [None], name="s")
        tf.identity(tf.strings.lower(s), name="lower")
        u = v1.placeholder(tf.float32, None, name="u")
        tf.identity(tf.exp(u) * 2, name="y")

    gd = build(graph)
    out, report = rewrite(gd, NATIVE)
    assert out == gd and not report.clusters
    text = " ".join(r for r, _, _ in report.reasons())
    assert "string" in text or "not supported" in text
    assert "rank" in text


def test_a_failing_import_leaves_just_that_node(monkeypatch):
    real = rewriter.import_cluster

    def broken(view, nodes, inputs, outputs, name=""):
        if "Tan" in {view[n].op for n in nodes}:
            raise ImportFailed("Node 'Tan' (Tan) cannot be imported: not today.")
        return real(view, nodes, inputs, outputs, name)

    monkeypatch.setattr(rewriter, "import_cluster", broken)
    gd = build(lambda: tf.identity(tf.exp(tf.tan(tf.exp(placeholder()) * 0.1) * 2) + 1, name="y"))
    out, report = check(gd, ["y:0"], {"x:0": normal(2, 8)}, clusters=2)
    assert ("Node 'Tan' (Tan) cannot be imported: not today.", 1, ["Tan"]) in report.reasons()
    assert "Tan" in {n.op for n in out.node}


def test_a_bug_in_a_pass_leaves_the_cluster(monkeypatch):
    def broken(graph, target, begin):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(compiler, "build_program", broken)
    gd = build(lambda: tf.identity(tf.exp(placeholder()) * 2 + 1, name="y"))
    out, report = rewrite(gd, NATIVE)
    assert out == gd
    assert report.reasons()[0][0] == "ZeroDivisionError: oops"


def test_a_failing_compiler_leaves_the_cluster_that_fails(monkeypatch):
    real = compiler.compile_texts

    def broken(texts, options, tell, workers=0):
        if any("ts_tanh" in t or "tanh" in t for t in texts):
            raise CompileError("g++ failed to compile a kernel: internal compiler error")
        return real(texts, options, tell, workers)

    monkeypatch.setattr(compiler, "compile_texts", broken)

    def graph():
        x = placeholder(shape=(8, 8))
        tf.identity(tf.tanh(tf.matmul(tf.exp(x) * 2, x)) * 2, name="y")

    out, report = check(build(graph), ["y:0"], {"x:0": normal(8, 8)}, clusters=1)
    assert "Tanh" in {n.op for n in out.node}
    assert any("internal compiler error" in r for r, _, _ in report.reasons())


def test_a_missing_compiler_leaves_everything(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    gd = build(lambda: tf.identity(tf.exp(placeholder()) * 2.5 + 1.5, name="y"))
    out, report = rewrite(gd, NATIVE)
    assert out == gd
    assert "no-such-compiler" in report.reasons()[0][0]


def test_options():
    gd = build(lambda: tf.identity(tf.exp(placeholder()) * 2 + 1, name="y"))
    assert not rewrite(gd, native(min_ops=4))[1].clusters
    assert not rewrite(gd, native(skip_ops=("Exp", "Mul", "AddV2")))[1].clusters
    with pytest.raises(OptionError, match="keep"):
        tf_stitch.rewrite_graph_def(gd, options=native(keep=("nothing",)))
    with pytest.raises(OptionError, match="GraphDef"):
        tf_stitch.rewrite_graph_def(b"graph")
    with pytest.raises(OptionError, match="Target"):
        tf_stitch.rewrite_graph_def(gd, target="tpu")
    assert tf_stitch.rewrite_graph_def(gd, options=NATIVE)[1].clusters


def test_an_empty_graph():
    gd = v1.GraphDef()
    out, report = rewrite(gd, NATIVE)
    assert out == gd and report.coverage == 1.0 and report.summary()


def test_names_are_unique_and_stable():
    def graph():
        x = placeholder()
        tf.identity(tf.exp(x) * 2, name="y")
        tf.identity(x, name="y/stitched")

    out, _ = rewrite(build(graph), NATIVE)
    assert len({n.name for n in out.node}) == len(out.node)
    again, _ = rewrite(build(graph), NATIVE)
    assert again.SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)


def test_eager_context_is_left_alone():
    options = context.context().function_call_options
    rewrite(build(lambda: tf.identity(tf.exp(placeholder()) * 2, name="y")), NATIVE)
    assert context.context().function_call_options is options


def test_a_cluster_of_constants_only():
    """TensorFlow's own constant folding then runs the op while it optimizes."""
    def graph():
        big = tf.constant(normal(3, 700), name="big")
        tf.add(tf.exp(big) * 2, placeholder(shape=(None, 700)), name="y")

    gd = build(graph)
    out, report = rewrite(gd, NATIVE)
    assert len(report.clusters) == 1
    only_constants, _ = rewrite(build(lambda: tf.identity(tf.exp(tf.constant(normal(3, 700))) * 2, name="y")), NATIVE)
    assert stitched(only_constants)
    with tf.Graph().as_default() as g, v1.Session(graph=g) as session:
        tf.graph_util.import_graph_def(only_constants, name="")
        np.testing.assert_allclose(session.run("y:0"), np.exp(normal(3, 700)) * 2, rtol=1e-6)
    with tf.Graph().as_default() as g, v1.Session(graph=g) as session:
        tf.graph_util.import_graph_def(out, name="")
        got = session.run("y:0", {"x:0": normal(3, 700)})
    np.testing.assert_allclose(got, run(gd, ["y:0"], {"x:0": normal(3, 700)})[0], rtol=1e-6, atol=1e-6)


def test_threads_may_rewrite_at_the_same_time():
    def graph():
        x = placeholder()
        for k in range(6):
            x = tf.matmul(tf.nn.softmax(x * (k + 2)) + tf.reduce_mean(x, 1, keepdims=True), tf.constant(normal(8, 8)))
        tf.identity(tf.exp(x) + 1, name="y")

    gd = build(graph)
    want = rewrite(gd, NATIVE)[0].SerializeToString(deterministic=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for out, _ in pool.map(lambda _: rewrite(gd, NATIVE), range(8)):
            assert out.SerializeToString(deterministic=True) == want


def test_a_reference_variable_is_copied_before_it_is_overwritten():
    def graph():
        x = placeholder(shape=(None, 4))
        v = v1.get_variable("v", [4], initializer=v1.ones_initializer(), use_resource=False)
        shown = tf.identity(tf.reshape(tf.maximum(v * 1.0, v * 1.0), [2, 2]), name="shown")
        y = tf.identity(tf.tanh(tf.exp(x) * v) + 1, name="y")
        with tf.control_dependencies([shown, y]):
            v1.assign_add(v, tf.fill([4], 5.0), name="changed")
        v1.global_variables_initializer()

    plain = build(graph)
    out, report = rewrite(plain, native(keep=("shown", "y", "changed")))
    assert report.clusters and any("reference variable" in n.reason for n in report.left)
    results = []
    for graph_def in (plain, out):
        with tf.Graph().as_default(), v1.Session() as session:
            tf.import_graph_def(graph_def, name="")
            session.run("init")
            results.append(session.run(["shown:0", "y:0", "changed:0"], {"x:0": normal(3, 4)}))
    assert (results[0][0] == 1).all()
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_dead_code_of_functions_goes():
    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def f(x):
        tf.tanh(tf.matmul(x, tf.constant(normal(8, 8))) * 2 + 1)
        tf.raw_ops.Assert(condition=tf.reduce_max(x) < 100.0, data=[x])
        return tf.exp(x) * 2

    with tf.Graph().as_default() as graph:
        tf.identity(f(placeholder()), name="y")
    before = graph.as_graph_def()
    out, report = check(before, ["y:0"], {"x:0": normal(3, 8)})
    ops = [[n.op for fn in g.library.function if FALLBACK_PREFIX not in fn.signature.name for n in fn.node_def]
           for g in (before, out)]
    assert "MatMul" in ops[0] and "MatMul" not in ops[1] and "Tanh" not in ops[1]
    assert "Assert" in ops[0] and "Assert" in ops[1]
    assert report.coverage == 1.0
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(out, ["y:0"], {"x:0": normal(3, 8) + 200})


def test_a_reference_to_nothing_leaves_the_graph_as_it_was(monkeypatch):
    gd = build(lambda: tf.strings.as_string(tf.tanh(tf.compat.v1.placeholder(tf.float32, (4,), name="x")) * 2 + 1))
    assert rewrite(gd, native(min_ops=1))[1].clusters
    monkeypatch.setattr(rewriter._Edit, "node", lambda self, node: node)  # forgets that inputs have moved
    out, report = rewrite(gd, native(min_ops=1))
    assert out == gd and not report.clusters
    assert "which the rewritten graph does not hold" in report.untouched()[0][1]
