"""What became of a tenant's requests: counts, and a histogram of latencies."""
from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import tensorflow as tf

# Upper bounds in seconds; the last bucket has none.
BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
OUTCOMES = ("answered", "late", "failed", "expired", "cancelled", "rejected")


@dataclass
class Tally:
    """Counts of one tenant.  Its owner holds a lock while it changes.

    Attributes:
      slo_s: what counts as late (None: nothing does).
      submitted: requests that were taken.
      outcomes: answered (in time), late (answered, after the SLO), failed, expired (its timeout passed), cancelled,
        rejected (by the queue or by the scheduler).
      buckets: answers by latency, see BUCKETS.
      seconds: the sum of those latencies.
    """

    slo_s: float | None = None
    submitted: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0

    def count(self, outcome: str) -> None:
        """Counts one request."""
        self.outcomes[outcome] += 1

    def settle(self, latency_s: float, error: BaseException | None, cancelled: bool) -> None:
        """Counts a request that was taken, by how it ended."""
        if cancelled:
            return self.count("cancelled")
        if error is not None:
            return self.count(_kind(error))
        self.count("answered" if self.slo_s is None or latency_s <= self.slo_s else "late")
        self.buckets[bisect_left(BUCKETS, latency_s)] += 1
        self.seconds += latency_s

    @property
    def attainment(self) -> float | None:
        """The share of settled requests, cancelled ones aside, that were answered within the SLO; None before any."""
        kept = self.outcomes["answered"]
        all_of_them = sum(self.outcomes.values()) - self.outcomes["cancelled"]
        return kept / all_of_them if all_of_them and self.slo_s is not None else None


def _kind(error: BaseException) -> str:
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return "rejected"
    return "expired" if isinstance(error, tf.errors.DeadlineExceededError) else "failed"
