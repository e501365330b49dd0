"""Grid kernels: which steps share a phase, one text for siblings, and phases run through the host's header."""
from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.on_host import OnHost, compiled
from tests.ir_graphs import assert_matches, random_case, random_inputs, reference
from tf_stitch import compiler, grids
from tf_stitch.backend import cuda
from tf_stitch.codegen.resident import keep_operands
from tf_stitch.codegen.siblings import share_texts
from tf_stitch.fusion.runs import arrange
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.options import Options
from tf_stitch.program import serialize
from tf_stitch.program.program import KernelStep, LibraryStep
from tf_stitch.program.table import make_table
from tf_stitch.schedule.target import CUDA, of_options

# Every node a kernel of its own: many steps, many phases.
CUDA = replace(CUDA, grids=True)
TARGET = replace(CUDA, block_work=64, min_blocks=4)


def unrolled(rounds: int = 6, rows: int = 8, width: int = 256, chains: int = 2):
    """A recurrence over slices of an input, chains that do not depend on each other, and their sum."""
    b = Builder()
    x = b.param((rows, rounds, width), "float32", "x")
    w = b.param((width, width), "float32", "w")
    ends = []
    for order in (range(rounds), reversed(range(rounds)))[:chains]:
        h = None
        for t in order:
            part = b.reshape(b.slice(x, (0, t, 0), (rows, 1, width)), (rows, width))
            h = part if h is None else b.ew("add", part, b.ew("tanh", b.dot(h, w, contract=((1,), (0,)))))
        ends.append(h)
    return b.finish([b.ew("add", *ends) if chains == 2 else b.ew("neg", *ends)])


# --- which steps share a phase -----------------------------------------------------------------------

@st.composite
def dags(draw):
    n = draw(st.integers(1, 24))
    after = [frozenset(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else frozenset() for i in range(n)]
    return after, draw(st.lists(st.booleans(), min_size=n, max_size=n))


@given(dags())
@settings(max_examples=300, deadline=None)
def test_runs_keep_the_order_and_share_phases(case):
    after, joins = case
    runs = arrange(after, joins)
    done: set[int] = set()
    for run in runs:
        for phase in run.phases:
            for s in phase:
                assert after[s] <= done, "a step runs before one that it depends on, or beside it"
            done.update(phase)
        assert len(run.steps) == 1 or all(joins[s] for s in run.steps)
        if len(run.steps) > 1:  # no step could be a phase earlier
            level = {s: p for p, phase in enumerate(run.phases) for s in phase}
            assert all(p == max((level[t] + 1 for t in after[s] if t in level), default=0) for s, p in level.items())
    assert sorted(done) == list(range(len(after)))
    assert len(runs) <= len(after)


def test_steps_that_wait_for_nobody_join_one_run():
    # kernels 0, 1, 2; calls 3 and 4 behind 0 and 1; kernels 5 and 6 behind those
    runs = arrange([frozenset()] * 3 + [frozenset({0}), frozenset({1}), frozenset({3}), frozenset({4, 5})],
                   [True, True, True, False, False, True, True])
    assert [r.phases for r in runs] == [((0, 1, 2),), ((3,),), ((4,),), ((5,), (6,))]


# --- one text for siblings ---------------------------------------------------------------------------

def _kernels(graph):
    return [k for k in compiler.lay_out(graph, CUDA)[1] if hasattr(k, "dims")]


def test_rounds_of_an_unrolled_loop_share_texts():
    few, many = (compiler.build_program(unrolled(rounds), CUDA) for rounds in (4, 9))
    (grid,) = many.grids
    assert len(grid.bodies) <= len(few.grids[0].bodies) + 1
    assert len(grid.phases) > len(few.grids[0].phases)


def test_a_report_counts_launches():
    program = compiler.build_program(unrolled(), CUDA)
    (whole,) = program.launched()
    assert f"({len(program.grids[0].phases)} phases: " in whole
    assert len(replace(program, grids=[]).launched()) == sum(program.grids[0].phases)


def test_siblings_take_what_differs_as_dims():
    kernels = _kernels(unrolled())
    texts = {k.name: k.text for k in kernels}
    for k in kernels:
        declared = int(re.search(r"TS_KERNEL\w*\(\w+, \d+, (\d+)", texts[k.name])[1])
        assert declared == len(k.dims) == texts[k.name].count("TS_DIM(")
    assert share_texts(kernels) == kernels, "what is shared already stays as it is"


# --- phases through the host's header ----------------------------------------------------------------

def test_random_graphs_in_phases():
    cases = [(seed, random_case(seed)) for seed in range(30_000, 30_160)]
    made = []
    for seed, case in cases:
        program, kernels = compiler.lay_out(case.graph, TARGET)
        plain = replace(program, grids=[], text=compiler.join_texts(k for k in kernels if hasattr(k, "dims")))
        last = next((i for i, s in enumerate(plain.steps) if not isinstance(s, KernelStep | LibraryStep)),
                    len(plain.steps))
        joined, *_ = grids.join_steps(plain, [isinstance(s, KernelStep) for s in plain.steps[:last]])
        if joined.grids:
            made.append((seed, case, joined))
    assert len(made) > 8
    dll = compiled([p for _, _, p in made])
    compared = 0
    for seed, case, program in made:
        assert serialize.loads(serialize.dumps(program)) == program
        for trial in range(2):
            inputs = random_inputs(case.graph, seed * 10 + trial)
            found = reference(case.graph, inputs)
            if found is None:
                continue
            _, want = found
            on_host = OnHost(program, dll)
            alone = on_host.run(inputs, 0)
            assert_matches(case, want, alone, slack=2.0)
            for blocks in (1, 3, 64):
                for x, y in zip(alone, on_host.run(inputs, blocks), strict=True):
                    np.testing.assert_array_equal(x, y)
            compared += 1
    assert compared > len(made)


@pytest.mark.parametrize("rounds", [3, 8])
def test_an_unrolled_loop_in_phases(rounds):
    graph = unrolled(rounds)
    program = compiler.build_program(graph, TARGET)
    assert program.grids
    rng = np.random.default_rng(rounds)
    inputs = [(rng.standard_normal(p.shape) / 16).astype(np.float32) for p in graph.params]
    (want,) = interp.run(graph, inputs)
    on_host = OnHost(program, compiled([program]))
    for blocks in (0, 1, 5, 200):
        (got,) = on_host.run(inputs, blocks)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(not cuda.shutil.which("nvcc"), reason="needs nvcc")
def test_what_phases_hand_over_is_read_coherently(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_STITCH_CACHE", str(tmp_path))
    program = compiler.build_program(unrolled(), CUDA)
    ptx = cuda.compile_text(program.text, ("compute_90",))["compute_90"].decode()
    assert f".entry {program.grids[0].kernel}" in ptx
    assert "ld.global.nc" not in ptx and "red.release.gpu" in ptx and "fence.acq_rel.gpu" in ptx


# --- operands kept on the chip -----------------------------------------------------------------------

def test_weights_are_kept_from_phase_to_phase(monkeypatch):
    monkeypatch.setenv(grids.KEEP, "1")
    program = compiler.lay_out(unrolled(8, chains=1), CUDA)[0]
    (grid,) = program.grids
    (recurrent,) = [k for k, (room, _) in enumerate(grid.keeps) if room]
    text = program.text[program.text.index(grid.bodies[recurrent]):]
    assert "TS_READ_KEPT(" in text
    table = make_table(program, grid, {}, lambda i: (1, 0) if program.buffers[i].kind == "input" else (0, 64 * i))
    most = table.most_blocks
    assert table.keep(grid, most - 1) == 0, "a thread block with two blocks cannot keep what both read"
    assert table.keep(grid, most) == grid.keeps[recurrent][0] <= 192 * 1024
    flags = [int(k) >> 16 for k in table.records[:-2, 1]]
    first = flags.index(1)
    last = max(i for i, f in enumerate(flags) if f)
    assert flags[:first] == [0] * first and flags[first + 1:last + 1] == [2] * (last - first) and last - first > 3


def test_only_what_never_changes_is_kept():
    text = """TS_KERNEL(ts_0123456789abcdef, 3, 1) {
  TS_IN(float, x0, 0)
  TS_IN(float, x1, 1)
  TS_PART(0, 4) {
    TS_BLOCKS(b, 0, 4) {
      TS_TILES(t, 64, 8, 32) {
        TS_EACH(g, 3) {
          ts_read<4, 1>(w1 + g * 4, x0 + (b * 4));
          ts_read<4, 1>(w2 + g * 4, x1 + (b * 4));
          ts_read<4, 1>(w3 + g * 4, x0 + (n0 * 4 + b));
          const ts_idx k1 = x1[b];
          const ts_idx k2 = k1 * 4 + b;
          ts_read<4, 1>(w5 + g * 4, x0 + (k2));
        }
        TS_LOADED(w5, 12)
        TS_LOADED(w1, 12)
        TS_LOADED(w2, 12)
        TS_LOADED(w3, 12)
        TS_STEPS(s, 0, n0, 4) {
          ts_read<4, 1>(w4 + 0, x0 + (b * 4 + 4));
          TS_LOADED(w4, 4)
        }
      }
    }
  }
}
"""
    kept = keep_operands("ts_0123456789abcdef", text, [0])
    assert kept.inputs == (0,) and kept.room == 2 * 3 * 16 * 256 and kept.name != "ts_0123456789abcdef"
    assert re.findall(r"TS_READ_KEPT\(.*\)", kept.text) == ["TS_READ_KEPT(4, 1, (w1 + g * 4), x0 + (b * 4))"]
    assert re.findall(r"TS_(?:RECALL|KEEP)\(.*\)", kept.text) == ["TS_RECALL(w1)", "TS_KEEP(w1)"]
    assert keep_operands("ts_0123456789abcdef", text, [2]) is None


def test_grids_are_asked_for():
    """By default the steps are launched one by one: as a CUDA graph that was faster."""
    assert not compiler.build_program(unrolled(), of_options(Options(target="cuda:sm_90"))).grids
    assert compiler.build_program(unrolled(), of_options(Options(target="cuda:sm_90", grids=True))).grids
