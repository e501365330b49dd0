"""Constants that follow from constants and static shapes alone, by the symbolic rules."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES
from ..view import NodeView, Ref
from .context import SymContext
from .registry import SYMBOLIC, NotSymbolic

if TYPE_CHECKING:
    from ..shapes import Inferred

MAX_ELEMENTS = 64


class _Refuses:
    """Stands for the builder: a rule that needs a guard has no constant result."""

    def __getattr__(self, name: str) -> Any:
        raise NotSymbolic


class StaticContext(SymContext):
    """What a symbolic rule sees of a node when only constants count."""

    def __init__(self, known: Inferred, node: NodeView):
        super().__init__(node, known.view, _Refuses())
        self._known = known

    def value(self, i: int) -> np.ndarray:
        found = self._known.constant(self.node.inputs[i])
        if found is None or found.size > MAX_ELEMENTS or found.dtype.kind not in "iub":
            raise NotSymbolic
        return found.astype(object)

    def dims(self, i: int) -> tuple[Dim, ...]:
        shape = self._known.proven.get(self.node.inputs[i])
        if shape is None or None in shape:
            raise NotSymbolic
        return tuple(shape)  # type: ignore[arg-type]


class PartialContext(StaticContext):
    """The same with unknown dims as symbols, so that what does not depend on them is found."""

    def __init__(self, known: Inferred, node: NodeView, done: dict[Ref, np.ndarray | None]):
        super().__init__(known, node)
        self._done = done

    def value(self, i: int) -> np.ndarray:
        found = _partial(self._known, self.node.inputs[i], self._done)
        if found is None:
            raise NotSymbolic
        return found

    def dims(self, i: int) -> tuple[Dim, ...]:
        ref = self.node.inputs[i]
        shape = self._known.shapes.get(ref)
        if shape is None:
            raise NotSymbolic
        return tuple(D.symbol(f"{ref[0]}:{ref[1]}.{k}") if d is None else d for k, d in enumerate(shape))


_FAILURES = (NotSymbolic, ValueError, IndexError, ZeroDivisionError, OverflowError, TypeError)


def _integral_rule(known: Inferred, ref: Ref):
    node = known.view.nodes.get(ref[0])
    dtype = known.view.dtype(ref)
    if node is None or dtype not in DTYPES or DTYPES[dtype].is_float:
        return None
    return SYMBOLIC.get(node.op)


def fold(known: Inferred, ref: Ref) -> np.ndarray | None:
    """The value of a small integer or boolean result, or None when it is not known while rewriting.

    ``known`` gives shapes and constants; the view's own would be asked before they are there.
    """
    rule = _integral_rule(known, ref)
    if rule is None:
        return None
    try:
        made = rule(StaticContext(known, known.view.nodes[ref[0]]))
        value = made[ref[1]] if isinstance(made, list) else made
        return np.array(value.tolist(), DTYPES[known.view.dtype(ref)].numpy).reshape(value.shape)
    except _FAILURES:
        return None


def partial_value(known: Inferred, ref: Ref) -> tuple[int | None, ...] | None:
    """Elements of a small integer result, row-major, None where one depends on an unknown dim; None when even its
    shape is not known.  May rest on assumed shapes."""
    found = _partial(known, ref, {})
    return None if found is None else tuple(v if D.is_static(v) else None for v in found.reshape(-1))


def _common(ref: Ref, values: list[np.ndarray | None]) -> np.ndarray | None:
    """What a list's elements have in common; where they differ, a symbol."""
    first = values[0]
    if first is None or any(v is None or v.shape != first.shape for v in values):
        return None
    out = [D.symbol(f"{ref[0]}[{i}]", None) if len(set(map(str, each))) > 1 else each[0]
           for i, each in enumerate(zip(*(v.reshape(-1) for v in values if v is not None)))]
    common = np.empty(len(out), object)
    common[:] = out
    return common.reshape(first.shape)


def _partial(known: Inferred, ref: Ref, done: dict[Ref, np.ndarray | None]) -> np.ndarray | None:
    if ref in done:
        return done[ref]
    constant = known.assumed.get(ref, known.constant(ref))
    if constant is not None:
        usable = constant.size <= MAX_ELEMENTS and constant.dtype.kind in "iub"
        done[ref] = constant.astype(object) if usable else None
        return done[ref]
    done[ref] = None
    if ref in known.elements:
        done[ref] = _common(ref, [_partial(known, r, done) for r in known.elements[ref]])
        return done[ref]
    rule = _integral_rule(known, ref)
    if rule is not None:
        try:
            made = rule(PartialContext(known, known.view.nodes[ref[0]], done))
            done[ref] = made[ref[1]] if isinstance(made, list) else made
        except _FAILURES:
            pass
    return done[ref]
