"""What an IR operation is: the table that ``elementwise`` and ``structural`` fill and every pass reads."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import DTYPES
from .graph import Node, Shape

Type = tuple[Shape, str]  # (shape, dtype name)


class IRError(ValueError):
    """An IR node breaks the rules of its op; the message names op, origin and what is wrong."""


# Cost classes, read by the planner and the schedule: what one element costs to compute again.
FREE, CHEAP, EXPENSIVE, COSTLY = 0, 1, 2, 3

FLOAT, INT, NUM = ("float",), ("int", "uint"), ("float", "int", "uint")
INTBOOL, ALL = ("int", "uint", "bool"), ("float", "int", "uint", "bool")


@dataclass(frozen=True)
class OpDef:
    """What an op is.

    Attributes:
      arity: number of operands; None for any number (at least one).
      infer: ``infer(inputs, attrs, want)`` gives the result type or raises IRError.  ``want`` is the type the
        node is to have; ops whose result the operands do not determine (reshape, cast, ...) check and return it.
      evaluate: ``evaluate(arrays, attrs, shape, dtype)``, the NumPy meaning; shape is concrete and attrs hold
        no symbols.
      c: C++ expression of an elementwise op over operands ``{0} {1} {2}`` of compute type ``{T}``; None for
        the others, which the emitter knows by structure.  Text that names ``ts_status`` may set the status.
      cost: FREE, CHEAP, EXPENSIVE (a function such as e^x) or COSTLY (several of them).
      kinds: kinds of element type that the operands may have.
      attrs: the attributes a node must have, no more and no fewer.
    """

    name: str
    arity: int | None
    infer: Callable[[Sequence[Node], Mapping[str, Any], Type], Type]
    evaluate: Callable[..., np.ndarray]
    c: str | None = None
    cost: int = CHEAP
    kinds: tuple[str, ...] = ALL
    attrs: tuple[str, ...] = ()

    @property
    def elementwise(self) -> bool:
        return self.c is not None


OPS: dict[str, OpDef] = {}


def register(op: OpDef) -> OpDef:
    """Adds an op to the table (also how an extension adds one)."""
    OPS[op.name] = op
    return op


def result_type(op: str, inputs: Sequence[Node], attrs: Mapping[str, Any], want: Type = ((), "")) -> Type:
    """The type of ``op`` applied to ``inputs``; ``want`` is what ops like reshape and cast are to give.

    Raises IRError when the op is unknown or operands, attrs or ``want`` break its rules.
    """
    d = OPS.get(op)
    if d is None:
        raise IRError(f"There is no IR op '{op}'.")
    if (d.arity is None and not inputs) or (d.arity is not None and len(inputs) != d.arity):
        raise IRError(f"'{op}' takes {d.arity or 'some'} operands, not {len(inputs)}.")
    if set(attrs) != set(d.attrs):
        raise IRError(f"'{op}' has the attributes {sorted(d.attrs)}, not {sorted(attrs)}.")
    for x in inputs:
        if DTYPES[x.dtype].kind not in d.kinds:
            raise IRError(f"'{op}' does not take {x.dtype} operands.")
    return d.infer(inputs, attrs, want)


def make(op: str, inputs: Sequence[Node], attrs: Mapping[str, Any] | None = None, shape: Shape = (),
         dtype: str = "", origin: str = "") -> Node:
    """A node of a checked type; ``shape`` and ``dtype`` matter only where the operands do not determine them.

    Raises IRError naming op and origin.
    """
    attrs = attrs or {}
    try:
        shape, dtype = result_type(op, inputs, attrs, (tuple(shape), dtype))
    except IRError as e:
        raise IRError(f"{origin or 'unnamed node'}: {op}: {e}") from None
    return Node(op, inputs, attrs, shape, dtype, origin)


def d_kind(array: np.ndarray) -> str:
    """The kind ("float", "int", "uint", "bool") of an array's element type."""
    for d in DTYPES.values():
        if d.numpy == array.dtype:
            return d.kind
    raise KeyError(f"element type {array.dtype} is not supported")
