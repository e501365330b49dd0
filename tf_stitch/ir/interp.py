"""The reference interpreter: what a graph means, in NumPy."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import dims as D
from .dims import Expr
from .dtypes import DTYPES
from .graph import Graph, Guard, Node
from .ops import OPS


class GuardFailed(ValueError):
    """The inputs break a guard; the op would run the original nodes."""

    def __init__(self, guard: Guard, env: Mapping[str, int]):
        self.guard = guard
        a, b = (D.evaluate(d, env) for d in (guard.a, guard.b))
        super().__init__(f"{guard.reason or 'guard'}: {guard.a} {guard.kind} {guard.b} does not hold ({a} and {b}).")


def run(graph: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs for concrete inputs.

    Raises GuardFailed when a guard does not hold, ValueError when an input's shape or dtype does not fit,
    IndexError for a gather index out of range, ZeroDivisionError for an integer divisor of zero.
    Floats are summed in float64 and rounded once, so the result can judge a kernel's own rounding.
    """
    inputs = [np.asarray(x) for x in inputs]
    for p, x in zip(graph.params, inputs, strict=True):
        if x.dtype != DTYPES[p.dtype].numpy:
            raise ValueError(f"{p.origin}: {x.dtype} given where {p.dtype} is expected")
    env = graph.symbol_values(inputs)
    for g in graph.guards:
        if not g.holds(env):
            raise GuardFailed(g, env)
    graph.bind(inputs)
    values = evaluate_nodes(graph.nodes(), dict(zip(graph.params, inputs, strict=True)), env)
    return [values[o] for o in graph.outputs]


def evaluate_nodes(nodes: Sequence[Node], values: dict[Node, np.ndarray],
                   env: Mapping[str, int]) -> dict[Node, np.ndarray]:
    """Adds to ``values`` the value of every node (operands first) not in it yet."""
    for n in nodes:
        if n not in values:
            values[n] = evaluate(n, [values[i] for i in n.inputs], env)
    return values


def evaluate(n: Node, arrays: Sequence[np.ndarray], env: Mapping[str, int]) -> np.ndarray:
    """The value of one node; the result has exactly the node's shape and dtype."""
    shape = tuple(D.evaluate(d, env) for d in n.shape)
    out = OPS[n.op].evaluate(list(arrays), {k: concrete(v, env) for k, v in n.attrs.items()}, shape, n.dtype)
    if out.shape != shape or out.dtype != DTYPES[n.dtype].numpy:
        raise AssertionError(f"{n.origin} ({n!r}): the interpreter made {out.shape} {out.dtype}")
    return out


def concrete(value: Any, env: Mapping[str, int]) -> Any:
    """An attribute value with its symbols replaced by numbers."""
    if isinstance(value, Expr):
        return D.evaluate(value, env)
    return tuple(concrete(v, env) for v in value) if isinstance(value, tuple) else value
