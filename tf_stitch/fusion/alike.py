"""When groups are alike: the steps of an unrolled loop, the layers of a tower.  What one of them costs, all do."""
from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ..ir.graph import Node
from ..schedule.group import Group


class Alike:
    """Gives groups keys that are equal when they differ in nothing that a schedule depends on."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, int] = {}
        self._kind_of: dict[Node, int] = {}

    def key(self, group: Group) -> Hashable:
        """The key of a group: its nodes, and which of them and of its inputs each reads."""
        number: dict[Node, int] = {}
        out: list[Hashable] = []
        for n in group.nodes:
            reads = []
            for x in n.inputs:
                if x not in number:
                    number[x] = len(number)
                    out.append(("input", x.shape, x.dtype))
                reads.append(number[x])
            number[n] = len(number)
            out.append((self._kind(n), tuple(reads)))
        return tuple(out), tuple(number[o] for o in group.outputs)

    def _kind(self, n: Node) -> int:
        found = self._kind_of.get(n)
        if found is None:
            attrs = tuple((k, _attr(k, v)) for k, v in sorted(n.attrs.items()))
            kind = (n.op, n.shape, n.dtype, attrs)
            found = self._kind_of[n] = self._kinds.setdefault(kind, len(self._kinds))
        return found


def _attr(name: str, value: Any) -> Hashable:
    if name == "starts":  # where a slice begins changes nothing, but that it begins somewhere does
        return tuple(isinstance(s, int) and s == 0 for s in value)
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray | np.generic) else value
