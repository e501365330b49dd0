"""Plans for ranges of an unknown size: which runs when, and that every one gives the interpreter's results."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from tests.op.calls import counted, specs_of, stitched
from tf_stitch import compiler, schedule
from tf_stitch.backend import host
from tf_stitch.fusion import variants
from tf_stitch.fusion.planner import _NotAlike, draft, plan_scheduled
from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.options import Options
from tf_stitch.program.program import RESULT_DIMS, KernelStep, LibraryStep, Program
from tf_stitch.schedule.group import Group
from tf_stitch.schedule.target import CUDA, HOST, of_options

SIZES = (0, 1, 2, 4, 5, 16, 17, 40, 100, 129)


def plain(b, x, y):
    return b.dot(x, y, contract=((1,), (0,)))


def two_layers():
    """Large weights: few rows are a kernel's, many the library's."""
    b = Builder()
    x = b.param((None, 512), "float32")
    h = b.ew("tanh", plain(b, x, b.param((512, 1024), "float32")))
    return b.finish([b.ew("sigmoid", plain(b, h, b.param((1024, 300), "float32"))), h])


def weight_gradient():
    """A product that folds the unknown, and an output that is an input."""
    b = Builder()
    x, g = b.param((None, 784), "float32"), b.param((None, 10), "float32")
    product = b.dot(x, b.ew("mul", g, g), contract=((0,), (0,)))
    return b.finish([product, b.reshape(x, x.shape), b.reduce("sum", g, [0])])


def training_step():
    """Softmax regression: what is folded over the unknown is small enough to be in every block's memory."""
    b = Builder()
    x, w, wanted = (b.param(s, "float32") for s in ((None, 512), (512, 10), (None, 10)))
    wanted = b.reshape(wanted, (x.shape[0], 10))

    def per_row(kind, y):
        return b.broadcast_to(b.reshape(b.reduce(kind, y, [1]), (x.shape[0], 1)), y.shape)

    logits = plain(b, x, w)
    e = b.ew("exp", b.ew("sub", logits, per_row("max", logits)))
    slope = b.ew("sub", b.ew("div", e, per_row("sum", e)), wanted)
    return b.finish([b.ew("sub", w, b.dot(x, slope, contract=((0,), (0,))))])


def images():
    """A convolution of the library's, whose filter and bias a kernel turns."""
    b = Builder()
    x, w, bias = (b.param(s, "float32") for s in ((None, 9, 9, 32), (3, 3, 32, 64), (64,)))
    y = b.conv(x, w, [1, 1], [(1, 1), (1, 1)], [1, 1], 1)
    y = b.ew("max", b.ew("add", y, b.reshape(bias, (1, 1, 1, 64))), b.const(0, "float32"))
    return b.finish([plain(b, b.reduce("sum", y, [1, 2]), b.param((64, 1000), "float32"))])


def ran(program: Program, size: int) -> list:
    """The steps that a run does something in."""
    env = dict.fromkeys(program.symbols, size)
    return [s for s in program.steps
            if (isinstance(s, KernelStep) and D.evaluate(s.blocks, env))
            or (isinstance(s, LibraryStep) and all(D.evaluate(s.dims[i], env) for i in RESULT_DIMS[s.call]))]


@pytest.mark.parametrize("make", [two_layers, weight_gradient, training_step, images], ids=lambda f: f.__name__)
def test_every_size_gives_the_interpreters_results(make, monkeypatch):
    monkeypatch.setattr(variants, "WORTH", 0.0)  # every range has its plan
    graph = make()
    program = compiler.lay_out(graph, CUDA)[0]
    rng = np.random.default_rng(0)
    steps = set()
    for size in SIZES:
        inputs = [rng.standard_normal([D.evaluate(d, dict.fromkeys(graph.symbols, size)) for d in p.shape]
                                      ).astype(np.float32) for p in graph.params]
        for got, want in zip(host.run(program, inputs), interp.run(graph, inputs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max(initial=1))
        if size:
            steps.add(tuple(map(id, ran(program, size))))
    assert len(steps) == len(variants.ranges(graph, CUDA))


def test_shapes_hold_for_all_sizes():
    """The plan for most sizes knows that there are more rows than a slice takes."""
    b = Builder()
    x = b.param((None, 1024), "float32")
    sums = b.reduce("sum", x, [1])
    graph = b.finish([b.slice(sums, [0], [D.dmin(4, x.shape[0])]), b.ew("mul", x, b.reshape(sums, (x.shape[0], 1)))])
    program = compiler.lay_out(graph, CUDA)[0]
    assert len(variants.ranges(graph, CUDA)) > 1
    for size in (0, 1, 3, 4, 600):
        inputs = [np.random.default_rng(size).standard_normal((size, 1024)).astype(np.float32)]
        for got, want in zip(host.run(program, inputs), interp.run(graph, inputs), strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_one_plan_runs_at_a_time():
    found = variants.ranges(two_layers(), CUDA)
    assert found[-1].most is None and len(found) > 1
    bounds = [r.most for r in found[:-1]]
    for size in SIZES:
        here = [D.evaluate(d, {found[-1].size.name: size}) for d in variants.active_dims(found)]
        first = next((k for k, most in enumerate(bounds) if size <= most and (most > 1 or size == 1)), len(bounds))
        assert here == [int(k == first) for k in range(len(here))]


def test_what_a_plan_of_its_own_must_gain():
    def times(work=100.0, **ns):
        return {int(n[1:]): variants.Time(t, work) for n, t in ns.items()}

    size = D.Symbol("n", 0)
    one, few, rows = variants.Range(size, 1, 1), variants.Range(size, 2, 4), variants.Range(size, 0, 512)
    assert variants.pays(times(_1=100.0), times(_1=100.0), one)
    assert not variants.pays(times(_2=100.0, _4=100.0), times(_2=101.0, _4=102.0), few)
    assert variants.pays(times(_2=100.0, _4=100.0), times(_2=90.0, _4=104.0), few)
    assert variants.pays(times(50.0, _2=100.0, _4=100.0), times(_2=100.0, _4=102.0), few)
    assert variants.pays(times(_0=100.0, _512=100.0), times(_0=90.0, _512=90.0), rows)


def test_starting_kernels_is_no_work():
    graph = two_layers()
    found = variants.ranges(graph, CUDA)
    times = variants.estimates(variants.draft_graph(graph, CUDA), found[-1], found)
    assert times and all(0 < t.work_ns < t.ns for t in times.values())


def test_a_size_with_a_bound_takes_no_more_kernels_than_a_known_one():
    """What a block hands over of all rows lies on chip where there is room for the most that there can be."""
    graph = training_step()
    program = compiler.lay_out(graph, CUDA)[0]
    for size in (2, 3, 4, 7, 8, 16, 100, 128):
        known = compiler.lay_out(graph.substitute(dict.fromkeys(graph.symbols, size)), CUDA)[0]
        assert len(ran(program, size)) == len(known.steps) <= 2


def test_few_rows_need_no_library():
    program = compiler.lay_out(two_layers(), CUDA)[0]
    assert not any(isinstance(s, LibraryStep) for s in ran(program, 1))
    assert sum(isinstance(s, LibraryStep) for s in ran(program, 1000)) == 2


def test_known_sizes_and_other_targets_have_one_plan():
    b = Builder()
    known = b.finish([plain(b, b.param((8, 512), "float32"), b.param((512, 1024), "float32"))])
    assert not variants.ranges(known, CUDA)
    for target in (HOST, of_options(Options(target="cuda:sm_90", grids=True))):
        assert not variants.ranges(two_layers(), target)


def test_requests_that_are_to_share_launches_have_the_plans_of_those_that_are_not():
    """A request of one row is as fast alone: its products are kernels, which many requests can share too."""
    options = Options(target="cuda:sm_90")
    alone, shared = (compiler.lay_out(two_layers(), of_options(o))[0]
                     for o in (options, replace(options, superkernels=True)))
    for size in SIZES[1:]:
        assert [type(s) for s in ran(shared, size)] == [type(s) for s in ran(alone, size)]


@pytest.mark.parametrize("make", [two_layers, images], ids=lambda f: f.__name__)
def test_the_op_runs_the_plan_of_the_size(make, monkeypatch):
    monkeypatch.setattr(variants, "WORTH", 0.0)
    graph = make()
    program = compiler.lay_out(graph, CUDA)[0]
    program = replace(program, code=host.compile_text(program.text))
    results = program.of_kind("output")

    def never(*args):
        return [tf.zeros([0] * len(b.shape), b.dtype) for b in results]

    f = tf.function(stitched(program, never), input_signature=specs_of(program), autograph=False)
    rng = np.random.default_rng(0)
    for size in SIZES:
        inputs = [rng.standard_normal([D.evaluate(d, dict.fromkeys(graph.symbols, size)) for d in p.shape]
                                      ).astype(np.float32) for p in graph.params]
        got, stitched_runs, _ = counted(lambda inputs=inputs: tf.nest.flatten(f(*inputs)))
        assert stitched_runs == 1
        for g, want in zip(got, interp.run(graph, inputs), strict=True):
            np.testing.assert_allclose(g.numpy(), want, rtol=1e-3, atol=1e-4 * np.abs(want).max(initial=1))


def test_steps_of_a_loop_are_scheduled_once_while_planning():
    """Each of 30 cells is a kernel; what decides is looked at for one of them."""
    b = Builder()
    h = b.param((32, 512), "float32")
    x, w = b.param((32, 30, 512), "float32"), b.param((512, 512), "float32")
    for t in range(30):
        here = b.reshape(b.slice(x, (0, t, 0), (32, 1, 512)), (32, 512))
        h = b.ew("tanh", b.ew("add", plain(b, h, w), here))
    graph = b.finish([h])
    built = []
    real = schedule.build
    made = draft(graph, CUDA, lambda group, target: (built.append(group), real(group, target))[1])
    assert len(made.planned) == 30 and len(built) < 20
    plans = made.finish()
    assert all(p.scheduled is not None for p in plans)
    assert [p.group.outputs for p in plans] == [p.group.outputs for p in plan_scheduled(graph, CUDA)]


def test_what_only_seemed_alike_is_planned_anew(monkeypatch):
    graph = two_layers()
    made = draft(graph, CUDA)
    monkeypatch.setattr(made.planner, "final", lambda planned: (_ for _ in ()).throw(_NotAlike()))
    assert [p.group for p in made.finish()] == [p.group for p in plan_scheduled(graph, CUDA)]


@pytest.mark.parametrize("steps, far", [(64, False), (256, True)])
def test_what_comes_from_memory_is_shared_out_to_all_multiprocessors(steps, far) -> None:
    """A decoder's attention over its cache: fewer blocks than that do not read as fast as memory is.

    Where the cache is in the GPU's own, as after the kernel before, fewer have less to do.
    """
    b = Builder()
    cache = b.param((None, 12, steps, 64), "float32")
    n = cache.shape[0]
    weights = b.reshape(b.slice(cache, (0, 0, 0, 0), (n, 12, steps, 1)), (n, 12, steps))
    graph = b.finish([b.dot(weights, cache, batch=((0, 1), (0, 1)), contract=((2,), (2,)))])
    size = next(iter(D.symbols(n)))
    small = variants.Range(size, 33, 64).bounded(graph)
    nodes = tuple(node for node in small.nodes() if node.op != "param")
    (part,) = schedule.build(Group(nodes, tuple(small.params), tuple(small.outputs)), CUDA).parts
    assert (D.evaluate(part.blocks, {size.name: 33}) >= CUDA.cores) is far
