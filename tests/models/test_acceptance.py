"""Whole models, saved, rewritten once and run at several batch sizes: equal outputs, dims, coverage.

Reduced sizes by default; TF_STITCH_FULL=1 adds the full ones (minutes).
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from models.acceptance import REGISTRY, Arrays, Case
from tf_stitch import bench, runtime
from tf_stitch.options import Options
from tf_stitch.report import Report

BATCHES = (1, 3, 17)
TOLERANCE = 1e-5
COVERAGE = 0.70
HERE = Options(levels=())  # code for this machine only: a third of the compile time
full_only = pytest.mark.skipif(not os.environ.get("TF_STITCH_FULL"), reason="full sizes: set TF_STITCH_FULL=1")


def outputs(model: Any, signature: str, inputs: Arrays) -> list[np.ndarray]:
    """Outputs of a loaded SavedModel's signature, in sorted name order."""
    found = model.signatures[signature](**{k: tf.constant(v) for k, v in inputs.items()})
    return [found[k].numpy() for k in sorted(found)]


def calls(case: Case) -> Iterator[tuple[str, Arrays]]:
    for signature, draw in case.samples.items():
        for batch in BATCHES:
            yield signature, draw(np.random.default_rng(batch), batch)


def allowed(plain: list[np.ndarray], stitched: list[np.ndarray], case: Case, signature: str, inputs: Arrays) -> str:
    """What is wrong with the stitched outputs ("" when nothing is).

    They may differ from TensorFlow's by 1e-5 of the largest value, or be no further from the float64 run than twice
    TensorFlow's own float32 distance.
    """
    error = bench.max_rel_error(stitched, plain)
    if error <= TOLERANCE:
        return ""
    if case.stateful:
        return f"differs from TensorFlow by {error:.1e}"
    reference = case.reference(signature, inputs)
    own, ours = bench.max_rel_error(plain, reference), bench.max_rel_error(stitched, reference)
    if ours <= 2 * own:
        return ""
    return f"differs from TensorFlow by {error:.1e}; from float64: TensorFlow {own:.1e}, stitched {ours:.1e}"


def same_signatures(plain: Any, stitched: Any) -> None:
    """Names, dtypes and static shapes (unknown dims too) of all inputs and outputs are kept."""
    assert list(plain.signatures) == list(stitched.signatures)
    for name, signature in plain.signatures.items():
        other = stitched.signatures[name]
        assert signature.structured_input_signature == other.structured_input_signature
        mine = {k: (t.dtype, t.shape.as_list()) for k, t in signature.structured_outputs.items()}
        assert mine == {k: (t.dtype, t.shape.as_list()) for k, t in other.structured_outputs.items()}
        assert all(shape[:1] == [None] for _, shape in mine.values()) or name == "observe"


def check(name: str, case: Case, folder: Path) -> Report:
    """Saves, rewrites, compares; returns the report."""
    case.save(str(folder / "plain"))
    report = tf_stitch.rewrite_saved_model(str(folder / "plain"), str(folder / "stitched"), options=HERE, verify=False)
    plain, stitched = (tf.saved_model.load(str(folder / kind)) for kind in ("plain", "stitched"))
    same_signatures(plain, stitched)
    before = runtime.counters()
    for signature, inputs in calls(case):
        want, got = outputs(plain, signature, inputs), outputs(stitched, signature, inputs)
        wrong = allowed(want, got, case, signature, inputs)
        assert not wrong, f"{name}, {signature}, batch {len(next(iter(inputs.values())))}: {wrong}"
    after = runtime.counters()
    assert after.stitched > before.stitched
    assert after.fallbacks == before.fallbacks, "a guard failed: one rewrite must serve every batch size"
    return report


@pytest.mark.parametrize("name", REGISTRY)
def test_model(name: str, tmp_path: Path) -> None:
    report = check(name, REGISTRY[name].build(False), tmp_path)
    if REGISTRY[name].floating:
        assert report.coverage >= COVERAGE, report.reasons()


@full_only
@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
def test_full_size_model(name: str, tmp_path: Path) -> None:
    check(name, REGISTRY[name].build(True), tmp_path)
