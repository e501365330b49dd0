"""The memory-bound cases: they are what they say they are, and compute what the interpreter does."""
from __future__ import annotations

import shutil

import numpy as np
import pytest

from models import memory_bound
from tests.ir_graphs import random_inputs
from tf_stitch import compiler
from tf_stitch.backend import host
from tf_stitch.ir import interp
from tf_stitch.schedule.target import CUDA


@pytest.mark.parametrize("operation", memory_bound.OPERATIONS)
def test_cases_compute_what_the_interpreter_does(operation):
    graph = memory_bound.make(operation, (40, 96), "float32")
    inputs = random_inputs(graph, 1)
    got = host.run(compiler.build_program(graph, compiler.of_options(compiler.Options())), inputs)
    for g, w in zip(got, interp.run(graph, inputs), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


def test_bytes_are_those_of_inputs_and_outputs():
    program = compiler.build_program(memory_bound.make("block", (4096, 1024), "float32"), CUDA)
    assert memory_bound.moved_bytes(program) == 2 * 4096 * 1024 * 4 + 2 * 1024 * 4
    assert len(program.steps) == 1


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_dry_run_compiles(tmp_path, capsys):
    assert memory_bound.main(["--dry", "--cases", "swish", "--out", str(tmp_path / "rows.json")]) == 0
    assert "swish" in capsys.readouterr().out and (tmp_path / "rows.json").exists()
    with pytest.raises(SystemExit):
        memory_bound.main(["--cases", "nothing"])
