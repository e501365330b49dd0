"""A group that is one library call, and what all kinds of calls ask of the nodes around them."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ir.dims import Dim
from ..ir.graph import Node
from .partition import ALWAYS_FLOATING

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
TINY_WORK = 1 << 14  # multiply-adds: a kernel does less than this while it waits for memory anyway


@dataclass(frozen=True)
class LibraryCall:
    """A group that is one library call; ``call``, ``dims`` and ``flags`` are as in program.LibraryStep.

    ``args`` are the values it reads and, last, the one it writes; ``product`` are the sizes (batch, m, n, k) of the
    matrix product that does the same work.
    """

    call: str
    args: tuple[Node, ...]
    dims: tuple[Dim, ...]
    flags: tuple[int, ...]
    product: tuple[Dim, ...]
    origin: str
    blocks: Dim = 0  # what the planner asks of a schedule


def through_views(n: Node, members: set[Node]) -> Node:
    """What a chain of reshapes among ``members`` shows."""
    while n.op == "reshape" and n in members:
        n = n.inputs[0]
    return n


def in_memory(x: Node) -> Node:
    """``x`` as a library can read it: what every reader would compute for itself is written."""
    source = x
    while source.op == "reshape":
        source = source.inputs[0]
    if source.op not in ALWAYS_FLOATING:
        return x
    return Node("transpose", [x], {"perm": tuple(range(x.rank))}, x.shape, x.dtype, x.origin)


def without_relu(n: Node) -> tuple[Node, bool]:
    """(what ``n`` is the ReLU of, True), or (``n``, False)."""
    if n.op == "max" and (zeros := [x for x in n.inputs if _is_zero(x)]):
        return next(x for x in n.inputs if x is not zeros[0]), True
    return n, False


def _is_zero(x: Node) -> bool:
    while x.op in ("broadcast", "reshape"):
        x = x.inputs[0]
    return x.op == "const" and not np.any(x.attrs["value"])


def repeated_vector(x: Node, members: set[Node], size: Dim) -> Node | None:
    """The vector of ``size`` elements that ``x`` repeats along its last axes, or None."""
    if x.op != "broadcast" or x not in members:
        return None
    source = x.inputs[0]
    real = [axis for axis, d in zip(x.attrs["axes"], source.shape, strict=True) if d != 1]
    return source if real == list(range(x.rank - len(real), x.rank)) and source.size == size else None
