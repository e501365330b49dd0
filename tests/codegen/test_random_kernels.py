"""Random graphs as one kernel each against the interpreter: many kernels in one compiler run."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.codegen.support import compile_kernels, kernel_of
from tests.ir_graphs import assert_matches, random_case, random_inputs, reference
from tf_stitch.backend.host import native_level
from tf_stitch.errors import Unschedulable
from tf_stitch.schedule import HOST

CUTS = (0.0, 0.3, 0.31, 1.0)  # blocks may be run in any ranges
# Small blocks reach edge blocks and axes of every kind with the small sizes of the random graphs.
TARGETS = {"default": HOST, "small blocks": replace(HOST, block_work=16, min_blocks=4),
           "little shared memory": replace(HOST, block_work=64, min_blocks=4, shared_bytes=2048)}
PER_TARGET = 150


def _kernels(first: int, target):
    out = []
    for seed in range(first, first + PER_TARGET):
        case = random_case(seed)
        if all(o.op == "param" for o in case.graph.outputs):
            continue
        try:
            out.append((seed, case, kernel_of(case.graph, target)))
        except Unschedulable:
            continue  # too much on chip, or too much work done twice: the planner splits such groups
    assert len(out) > 0.8 * PER_TARGET
    return out


def _check(seed: int, case, kernel, library) -> int:
    compared = 0
    for trial in range(3):
        inputs = random_inputs(case.graph, seed * 10 + trial, special=0.1 if trial == 2 else 0.0)
        found = reference(case.graph, inputs)
        if found is None:
            continue
        env, want = found
        given = dict(zip(case.graph.params, inputs, strict=True))
        out, status = library.run(kernel, env, given, CUTS)
        assert status == 0, f"seed {seed}: status {status}"
        got = [given[o] if o in given else out[o] for o in case.graph.outputs]
        try:
            # specials leave the intervals that the generator reckons with: then only where NaN and Inf are counts
            assert_matches(case, want, got, slack=2.0 if trial < 2 else 1e9)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}, trial {trial}, sizes {env}: {e}\n{kernel.text}") from None
        compared += 1
    return compared


@pytest.mark.parametrize("number,name", list(enumerate(TARGETS)))
def test_kernels_match_the_interpreter(number, name):
    kernels = _kernels(10_000 + 1000 * number, TARGETS[name])
    # one target as it is shipped, vectors and all; the others for what the schedules do
    flags = (native_level(), "-O3") if name == "default" else ("x86-64-v2", "-O1")
    library = compile_kernels([k for _, _, k in kernels], *flags)
    compared = sum(_check(seed, case, kernel, library) for seed, case, kernel in kernels)
    assert compared > 2 * len(kernels) > PER_TARGET
