"""The highest rate at which a load still meets its SLO."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .load import Outcome

Probe = Callable[[float], Outcome]
HOPELESS = 0.25  # of the requests within their SLO: no accident, the load is not sent again


@dataclass(frozen=True)
class Found:
    """The highest rate that held, what it gave, and every rate that was tried."""

    rate: float
    outcome: Outcome | None
    tried: tuple[tuple[float, Outcome], ...]


def highest_rate(probe: Probe, start: float, *, target: float = 0.99, precision: float = 0.05, probes: int = 20,
                 limit: float = math.inf, growth: float = 2.0) -> Found:
    """Searches upwards, or downwards, from ``start`` by factors, then by bisection of the rate's logarithm.

    A rate has failed when it failed twice, as other work on the machine may spoil one load, or by far.

    Args:
      probe: sends a load of a rate (requests a second).
      target: share of requests within their SLO that a rate must reach.
      precision: the search ends when the lowest rate that failed is within this share of the highest that held.
      probes: loads sent at most.
      limit: rates above it are not tried.
      growth: the factor; a small one finds the rate sooner where ``start`` is near it.
    """
    tried: list[tuple[float, Outcome]] = []
    low, high, rate = 0.0, math.inf, min(start, limit)
    while len(tried) < probes and high > low * (1 + precision):
        outcome = probe(rate)
        tried.append((rate, outcome))
        if HOPELESS <= outcome.slo_attainment < target and len(tried) < probes:
            outcome = probe(rate)
            tried.append((rate, outcome))
        if outcome.slo_attainment >= target:
            low = max(low, rate)
            if low >= limit:
                break
        else:
            high = min(high, rate)
        if low > 0 and high < math.inf:
            rate = math.sqrt(low * high)
        else:
            rate = min(growth * low, limit) if low else high / growth
    held = [(r, o) for r, o in tried if r == low and o.slo_attainment >= target]
    return Found(low, held[-1][1] if held else None, tuple(tried))
