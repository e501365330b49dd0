"""What the planner hands to the schedule: a set of IR nodes that become one kernel."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Node


@dataclass(frozen=True)
class Group:
    """One kernel to be.

    Attributes:
      nodes: members, operands first (no params, no consts larger than a literal: those are inputs).
      inputs: nodes outside the group that members read, in a stable order.
      outputs: members whose value is written to memory (read by other groups or by the program's user).
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
