"""Constants that follow from constants and static shapes alone, by the symbolic rules."""
from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.dtypes import DTYPES
from ..view import GraphView, NodeView, Ref
from .registry import SYMBOLIC, NotSymbolic

MAX_ELEMENTS = 64


class _Refuses:
    """Stands for the builder: a rule that needs a guard has no constant result."""

    def __getattr__(self, name: str) -> Any:
        raise NotSymbolic


class StaticContext:
    """What a symbolic rule sees of a node when only constants count."""

    def __init__(self, view: GraphView, node: NodeView):
        self.view, self.node, self.b = view, node, _Refuses()

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attr(name, default)

    @property
    def count(self) -> int:
        return len(self.node.inputs)

    def value(self, i: int) -> np.ndarray:
        found = self.view.constant(self.node.inputs[i])
        if found is None or found.size > MAX_ELEMENTS or found.dtype.kind not in "iub":
            raise NotSymbolic
        return found.astype(object)

    def values(self) -> list[np.ndarray]:
        return [self.value(i) for i in range(self.count)]

    def static(self, i: int) -> np.ndarray:
        value = self.value(i)
        return np.array(value.tolist(), np.int64).reshape(value.shape)

    def dims(self, i: int) -> tuple[int, ...]:
        shape = self.view.proven_shape(self.node.inputs[i])
        if shape is None or None in shape:
            raise NotSymbolic
        return tuple(shape)  # type: ignore[arg-type]


def fold(view: GraphView, ref: Ref) -> np.ndarray | None:
    """The value of a small integer or boolean result, or None when it is not known while rewriting."""
    node = view.nodes.get(ref[0])
    rule = SYMBOLIC.get(node.op) if node is not None else None
    dtype = view.dtype(ref)
    if node is None or rule is None or dtype not in DTYPES or DTYPES[dtype].is_float:
        return None
    try:
        made = rule(StaticContext(view, node))  # type: ignore[arg-type]
        value = made[ref[1]] if isinstance(made, list) else made
        return np.array(value.tolist(), DTYPES[dtype].numpy).reshape(value.shape)
    except (NotSymbolic, ValueError, IndexError, ZeroDivisionError, OverflowError, TypeError):
        return None
