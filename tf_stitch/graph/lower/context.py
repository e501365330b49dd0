"""What a lowering, or a symbolic rule, sees of its node."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ...errors import ImportFailed
from ...ir import dims as D
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES, WIDE
from ...ir.graph import Node
from ..view import GraphView, NodeView, StaticShape
from .registry import NotSymbolic

if TYPE_CHECKING:
    from ...ir.builder import Builder

class SymContext(ABC):
    """What a symbolic rule sees of its node."""

    def __init__(self, node: NodeView, view: GraphView, builder: Any):
        self.node, self.view, self.b = node, view, builder

    @abstractmethod
    def value(self, i: int) -> np.ndarray:
        """Contents of input ``i`` as an object array of Dims.  Raises NotSymbolic when they are not known."""

    @abstractmethod
    def dims(self, i: int) -> tuple[Dim, ...]:
        """Shape of input ``i``.  Raises NotSymbolic when it is not known."""

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attr(name, default)

    @property
    def count(self) -> int:
        """Number of inputs."""
        return len(self.node.inputs)

    def values(self) -> list[np.ndarray]:
        return [self.value(i) for i in range(self.count)]

    def static(self, i: int) -> np.ndarray:
        """Contents of input ``i``.  Raises NotSymbolic unless all are plain integers."""
        found = self.value(i)
        if not D.all_static(found.reshape(-1)):
            raise NotSymbolic
        return np.array(found.tolist(), np.int64).reshape(found.shape)


class Context:
    """One node being lowered, and the builder that its IR goes to."""

    def __init__(self, builder: Builder, view: GraphView, node: NodeView):
        self.b, self.view, self.node = builder, view, node

    def attr(self, name: str, default: Any = None) -> Any:
        """The node's attr, else the op's default, else ``default``."""
        return self.node.attr(name, default)

    def fail(self, reason: str) -> NoReturn:
        error = ImportFailed(f"Node '{self.node.name}' ({self.node.op}) cannot be imported: {reason}.")
        error.node = self.node.name
        raise error

    @property
    def dtype(self) -> str:
        """Element type of output 0."""
        return self.view.dtype((self.node.name, 0))

    def out_dtype(self, port: int) -> str:
        return self.view.dtype((self.node.name, port))

    def static_shape(self, port: int = 0) -> StaticShape:
        """TensorFlow's static shape of an output."""
        return self.view.shape((self.node.name, port))

    # --- small helpers that many lowerings share ----------------------------------------------------

    def axis(self, value: Any, rank: int) -> int:
        """A (possibly negative) axis as an index below ``rank``."""
        a = int(np.asarray(value).reshape(()) if np.ndim(value) == 0 else np.asarray(value).reshape(-1)[0])
        if not -rank <= a < rank:
            self.fail(f"axis {a} is out of range for rank {rank}")
        return a % rank

    def axes(self, values: Any, rank: int) -> tuple[int, ...]:
        """Sorted axes below ``rank``; each may be given once."""
        out = sorted(self.axis(v, rank) for v in np.asarray(values).reshape(-1))
        if len(set(out)) < len(out):
            self.fail("an axis is given twice")
        return tuple(out)

    def full(self, value: Any, shape: Sequence[Dim], dtype: str) -> Node:
        """A tensor filled with one literal."""
        return self.b.broadcast_to(self.b.const(value, dtype), tuple(shape))

    def dim_scalar(self, d: Dim, dtype: str) -> Node:
        """A dim as a scalar tensor."""
        if D.is_static(d):
            return self.b.const(d, dtype)
        wide = self.b.shape_value((d,), (), "int64")
        return wide if dtype == "int64" else self.b.cast(wide, dtype)

    def expand(self, x: Node, axes: Sequence[int]) -> Node:
        """``x`` with dims of size 1 inserted at ``axes`` of the result (increasing)."""
        shape = list(x.shape)
        for a in axes:
            shape.insert(a, 1)
        return self.b.reshape(x, tuple(shape))

    def channel(self, x: Node, rank: int, axis: int) -> Node:
        """A vector as a tensor of ``rank`` dims, its elements along ``axis``, 1 elsewhere."""
        return self.b.reshape(x, tuple(x.shape[0] if i == axis else 1 for i in range(rank)))

    def is_float(self, x: Node) -> bool:
        return DTYPES[x.dtype].is_float

    def wide(self, x: Node) -> Node:
        """A half tensor as float32, others as they are."""
        return self.b.cast(x, WIDE[x.dtype]) if x.dtype in WIDE else x

    def like(self, x: Node, dtype: str) -> Node:
        return x if x.dtype == dtype else self.b.cast(x, dtype)
