"""IR graph to running code: plan, schedule, emit, compile, run; judged by the interpreter.

Many graphs go into one run of the compiler.
"""
from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from tests.fusion.chains import CHAINS, TRAINING
from tests.ir_graphs import Case, assert_matches, free_symbols, make_case, random_case, random_inputs
from tf_stitch import schedule
from tf_stitch.backend import host
from tf_stitch.compiler import compile_together
from tf_stitch.errors import GuardFailed, Unschedulable
from tf_stitch.fusion import planner
from tf_stitch.fusion.partition import ALWAYS_FLOATING
from tf_stitch.ir import interp
from tf_stitch.options import Options

NATIVE = Options(target="host", levels=())
GRAPHS, BATCH = 420, 35
SIZES = ((0, 1), (1, 2, 3), (5, 16, 17, 33))  # small, odd and larger sizes for unknown dims, a run of each


def check_runs(case: Case, program, seed: int) -> int:
    """Runs a program on several sizes; how many of them its guards let through."""
    runs = 0
    choices: Sequence[Sequence[int]] = SIZES if free_symbols(case.graph) else SIZES[:1]
    for i, sizes in enumerate(choices):
        values = sizes_of(case, seed + i, sizes)
        inputs = random_inputs(case.graph, seed + i, values, special=0.05 if i == 1 else 0.0)
        try:
            want = interp.run(case.graph, inputs)
        except (interp.GuardFailed, IndexError):
            with pytest.raises(GuardFailed):
                host.run(program, inputs)
            continue
        assert_matches(case, want, host.run(program, inputs, shards=1 + i))
        runs += 1
    return runs


def sizes_of(case: Case, seed: int, choices: Sequence[int]) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    return {s: int(rng.choice(choices)) for s in free_symbols(case.graph)}


@pytest.mark.parametrize("batch", range(GRAPHS // BATCH))
def test_random_graphs_run_as_the_interpreter_says(batch):
    seeds = range(batch * BATCH, (batch + 1) * BATCH)
    cases = [random_case(seed) for seed in seeds]
    programs = compile_together([c.graph for c in cases], NATIVE)
    runs = 0
    for seed, case, program in zip(seeds, cases, programs, strict=True):
        try:
            runs += check_runs(case, program, seed)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert runs > len(cases)


def test_graphs_cut_into_many_kernels_hand_values_over(monkeypatch):
    """The same with groups of a few nodes at most: temporaries, their order and multi-output kernels."""
    def small_groups(group, target):
        if sum(n.op not in ALWAYS_FLOATING for n in group.nodes) > 3:
            raise Unschedulable("too large for this test")
        return schedule.build(group, target)

    monkeypatch.setattr(planner, "_schedule_build", lambda: small_groups)
    cases = [make_case(random.Random(1000 + seed), steps=24) for seed in range(40)]
    programs = compile_together([c.graph for c in cases], NATIVE)
    assert sum(len(p.of_kind("temp")) for p in programs) > len(programs)
    for seed, (case, program) in enumerate(zip(cases, programs, strict=True)):
        check_runs(case, program, seed)


def test_chains_of_models_run_for_several_batches():
    graphs = [make() for make in (*CHAINS, *TRAINING)]
    programs = compile_together(graphs, NATIVE)
    for graph, program in zip(graphs, programs, strict=True):
        for sizes in (0, 1, 3, 17):
            inputs = chain_inputs(graph, sizes)
            for want, got in zip(interp.run(graph, inputs), host.run(program, inputs), strict=True):
                scale = np.max(np.abs(want), initial=1.0)
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale, err_msg=graph.name)


def chain_inputs(graph, batch):
    """Inputs where every unknown dim is ``batch`` and integers are small indices."""
    env = dict.fromkeys(free_symbols(graph), batch)
    inputs = random_inputs(graph, 7, env)
    return [np.abs(x) for x in inputs]  # variances and indices are not negative
