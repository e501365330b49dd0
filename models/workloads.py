"""Every workload of the benchmark; importing this module fills the registry."""
from __future__ import annotations

from . import blocks, classic, recommender, recurrent, transformer, vision  # noqa: F401  (each registers its own)
from .workload import REGISTRY, Instance, Workload

__all__ = ["REGISTRY", "Instance", "Workload", "select"]


def select(names: str = "") -> list[Workload]:
    """The workloads of a comma-separated list ("" is all of them).

    Raises:
      ValueError: a name is not known.
    """
    wanted = [n.strip() for n in names.split(",") if n.strip()] or list(REGISTRY)
    unknown = [n for n in wanted if n not in REGISTRY]
    if unknown:
        raise ValueError(f"Unknown workload {', '.join(unknown)}; use {', '.join(REGISTRY)}.")
    return [REGISTRY[n] for n in wanted]
