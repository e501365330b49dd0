"""The generator of random graphs: what it makes is valid, covers every op, and its tolerances are sound."""
from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings

from tests.ir_graphs import EPS, assert_matches, cases, free_symbols, random_case, random_inputs
from tf_stitch.ir.interp import evaluate, run
from tf_stitch.ir.ops import OPS
from tf_stitch.ir.printer import to_text
from tf_stitch.ir.verify import verify

NOT_IN_KERNELS = {"conv", "conv_filter", "window"}


def test_every_primitive_is_drawn():
    seen = collections.Counter(n.op for s in range(1500) for n in random_case(s).graph.nodes())
    assert set(seen) == set(OPS) - NOT_IN_KERNELS


@given(cases())
@settings(max_examples=100, deadline=None)
def test_graphs_verify_and_run_at_every_size(case):
    verify(case.graph)
    for size in (0, 1, 2, 5):
        outputs = run(case.graph, random_inputs(case.graph, size, dict.fromkeys(free_symbols(case.graph), size), 0.05))
        assert_matches(case, outputs, outputs)


_EXACT_OPS = {"max", "min", "neg", "abs", "sign", "floor", "ceil", "rint", "fmod", "nextafter", "cast", "select",
              "broadcast", "reshape", "transpose", "slice", "reverse", "pad", "concat", "gather", "gather_nd", "iota",
              "const", "param"}


def perturbed(graph, inputs, rng):
    """The outputs when every rounded float result is off by up to one rounding more."""
    env = graph.bind(inputs)
    values = dict(zip(graph.params, inputs, strict=True))
    for n in graph.nodes():
        if n in values:
            continue
        x = evaluate(n, [values[i] for i in n.inputs], env)
        picks = n.op in ("reduce", "segment") and n.attrs["kind"] in ("max", "min")
        if n.dtype in EPS and n.op not in _EXACT_OPS and not picks:
            wide = x.astype(np.float64)
            whole = wide == np.round(wide)  # sums of whole numbers are exact in every implementation
            wide = np.where(whole, wide, wide * (1 + EPS[n.dtype] * rng.choice((-1.0, 1.0), x.shape)))
            x = wide.astype(x.dtype)
        values[n] = x
    return [values[o] for o in graph.outputs]


@pytest.mark.parametrize("special", [0.0, 0.05])
def test_tolerances_allow_other_roundings(special):
    for seed in range(400):
        case = random_case(seed)
        inputs = random_inputs(case.graph, seed, special=special)
        with np.errstate(all="ignore"):
            assert_matches(case, run(case.graph, inputs), perturbed(case.graph, inputs, np.random.default_rng(seed)))


def test_a_wrong_result_leaves_the_tolerance():
    case = random_case(4, families=("arithmetic", "unary"), float_types=("float32",), symbolic=False)
    inputs = random_inputs(case.graph, 1)
    want = run(case.graph, inputs)
    wrong = [w + np.float32(0.01 * np.max(np.abs(w), initial=1)) if w.dtype == np.float32 else w for w in want]
    assert any(w.dtype == np.float32 and w.size for w in want)
    with pytest.raises(AssertionError, match="differs by"):
        assert_matches(case, want, wrong)


def test_the_same_seed_gives_the_same_graph():
    for seed in range(20):
        assert to_text(random_case(seed).graph) == to_text(random_case(seed).graph)
