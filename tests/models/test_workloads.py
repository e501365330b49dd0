"""Every benchmark workload, stitched, against its float64 instance and with an unknown batch dim."""
from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_stitch
from models.workloads import REGISTRY, select
from tf_stitch import bench, runtime

# Batches other than the benchmark's; a workload that is not named runs its own.
SMALL = {"layernorm": 33, "rnn": 5, "birnn": 3, "dien": 7, "dlrm": 5}
TOLERANCE = 1e-5
HEAVY = {"gpt2"}  # 124M weights: too much for the suite; the benchmark checks it


@pytest.mark.parametrize("name", [n for n in REGISTRY if n not in HEAVY])
def test_stitched_workload_is_right(name: str) -> None:
    workload, batch = REGISTRY[name], SMALL.get(name)
    twin, stitched, plain = workload.instance(tf.float64), workload.instance(), workload.instance()
    reference = twin.results(tf.function(twin.function), twin.inputs(batch))
    before = runtime.counters()
    call = tf_stitch.function(stitched.function, input_signature=stitched.signature(None))
    got = stitched.results(call, stitched.inputs(batch))
    assert runtime.counters().stitched > before.stitched
    assert runtime.counters().fallbacks == before.fallbacks
    own = bench.max_rel_error(plain.results(tf.function(plain.function), plain.inputs(batch)), reference)
    assert bench.max_rel_error(got, reference) <= max(TOLERANCE, 2 * own)


@pytest.mark.parametrize("name", ["layernorm", "dien", "bert"])
def test_one_trace_serves_other_batches(name: str) -> None:
    workload = REGISTRY[name]
    stitched, plain = workload.instance(), workload.instance()
    call = tf_stitch.function(stitched.function, input_signature=stitched.signature(None))
    for batch in (1, 2, 5):
        args = stitched.inputs(batch)
        assert bench.max_rel_error(stitched.results(call, args), plain.results(plain.function, args)) <= TOLERANCE


def test_weights_and_inputs_are_the_same_every_time() -> None:
    first, second = (REGISTRY["lr"].instance() for _ in range(2))
    for a, b in zip(first.params.variables + first.inputs(), second.params.variables + second.inputs()):
        np.testing.assert_array_equal(a, b)


def test_select_names_what_is_unknown() -> None:
    assert [w.name for w in select("rnn, lr")] == ["rnn", "lr"]
    with pytest.raises(ValueError, match="Unknown workload nope; use layernorm"):
        select("lr,nope")
