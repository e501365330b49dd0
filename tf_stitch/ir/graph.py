"""The IR: an immutable DAG of primitive operations over typed, statically ranked tensors."""
from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from . import dims as D
from .dims import Dim

Shape = tuple[Dim, ...]
T = TypeVar("T")


class Node:
    """One operation and its single result.  Compared by identity.

    Attributes:
      op: name in :data:`tf_stitch.ir.ops.OPS`.
      inputs: operand nodes.
      attrs: what the op needs beside operands (see ops.py for each op's attrs).
      shape: result dims (each an int or a symbolic Expr).
      dtype: result element type name.
      origin: name of the TensorFlow node it came from, for messages.
      derived: what passes found out about the node alone and ask again; they choose the keys.
    """

    __slots__ = ("attrs", "derived", "dtype", "id", "inputs", "op", "origin", "shape")
    _ids = itertools.count()  # shared by all threads: drawing from it is atomic

    def __init__(self, op: str, inputs: Sequence[Node], attrs: Mapping[str, Any], shape: Sequence[Dim],
                 dtype: str, origin: str = ""):
        self.op = op
        self.inputs = tuple(inputs)
        self.attrs = dict(attrs)
        self.shape: Shape = tuple(shape)
        self.dtype = dtype
        self.origin = origin
        self.derived: dict[Any, Any] = {}
        self.id = next(Node._ids)  # creation order: a stable tie-break for every pass

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """Number of elements."""
        return D.product(self.shape)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """A new node, the same but for its operands."""
        return Node(self.op, inputs, self.attrs, self.shape, self.dtype, self.origin)

    def attr_dims(self) -> list[Dim]:
        """The symbolic dims inside the attributes (shape_value, slice starts, padding)."""
        found: list[Dim] = []
        todo = list(self.attrs.values())
        while todo:
            v = todo.pop()
            if isinstance(v, D.Expr):
                found.append(v)
            elif isinstance(v, tuple):
                todo.extend(v)
        return found

    def __repr__(self) -> str:
        dims = ",".join(D.to_text(d) for d in self.shape)
        return f"%{self.id}:{self.op}[{dims}]{self.dtype}"


@dataclass(frozen=True)
class Guard:
    """A condition that the rewrite relies on and the op checks at run time; else the fallback runs.

    ``kind``: "eq" (a == b), "le" (a <= b), "divides" (a % b == 0).
    """

    kind: str
    a: Dim
    b: Dim
    reason: str = ""

    def holds(self, env: Mapping[str, int]) -> bool:
        a, b = D.evaluate(self.a, env), D.evaluate(self.b, env)
        return {"eq": a == b, "le": a <= b, "divides": b != 0 and a % b == 0}[self.kind]


@dataclass(frozen=True)
class SymbolSource:
    """Where a symbol's value is read at run time.

    ``kind`` "dim": dim ``index`` of param ``param``.  ``kind`` "value": element ``index`` (flat) of
    the integer param ``param``, whose contents must be in host memory.
    """

    kind: str
    param: int
    index: int


@dataclass
class Graph:
    """A function from params to outputs, with the guards it relies on."""

    params: list[Node]
    outputs: list[Node]
    guards: list[Guard] = field(default_factory=list)
    symbols: dict[str, SymbolSource] = field(default_factory=dict)
    name: str = ""

    def nodes(self) -> list[Node]:
        """Every node that the outputs need, and all params, operands first."""
        return topological([*self.params, *self.outputs])

    def users(self) -> dict[Node, list[Node]]:
        """For each node, the nodes that read it (an entry per node, repeated operands counted once)."""
        out: dict[Node, list[Node]] = {n: [] for n in self.nodes()}
        for n in out:
            for i in dict.fromkeys(n.inputs):
                out[i].append(n)
        return out

    def symbol_values(self, inputs: Sequence[Any]) -> dict[str, int]:
        """Values of all symbols for concrete inputs (NumPy arrays).

        Raises ValueError when an input's rank does not fit its param or a value symbol's element is missing.
        """
        for p, x in zip(self.params, inputs, strict=True):
            if len(x.shape) != p.rank:
                raise ValueError(f"{p.origin}: rank {len(x.shape)} given where {p.rank} is expected")
        env = {}
        for name, s in self.symbols.items():
            x = inputs[s.param]
            if s.kind == "value" and s.index >= x.size:
                raise ValueError(f"{self.params[s.param].origin}: has no element {s.index}, which is a dim")
            env[name] = int(x.shape[s.index] if s.kind == "dim" else x.reshape(-1)[s.index])
        return env

    def bind(self, inputs: Sequence[Any]) -> dict[str, int]:
        """Values of all symbols for concrete inputs, whose shapes are checked too.

        Raises ValueError when an input's rank or shape does not fit its param.
        """
        env = self.symbol_values(inputs)
        for p, x in zip(self.params, inputs, strict=True):
            want = tuple(D.evaluate(d, env) for d in p.shape)
            if tuple(x.shape) != want:
                raise ValueError(f"{p.origin}: shape {tuple(x.shape)} given where {want} is expected")
        return env

    def __reduce__(self) -> tuple[Callable[..., Graph], tuple[Any, ...]]:
        """Node by node in the order they were made, which is kept: pickle itself would follow operands, too deep."""
        nodes = sorted(self.nodes(), key=operator.attrgetter("id"))
        place = {n: i for i, n in enumerate(nodes)}
        rows = [(n.op, [place[x] for x in n.inputs], n.attrs, n.shape, n.dtype, n.origin) for n in nodes]
        return _graph_of, (rows, [place[p] for p in self.params], [place[o] for o in self.outputs], self.guards,
                           self.symbols, self.name)

    def rebuild(self, fn: Callable[[Node, tuple[Node, ...]], Node]) -> Graph:
        """A new graph, each node replaced by ``fn(node, new_inputs)``."""
        new: dict[Node, Node] = {}
        for n in self.nodes():
            new[n] = fn(n, tuple(new[i] for i in n.inputs))
        return Graph([new[p] for p in self.params], [new[o] for o in self.outputs], list(self.guards),
                     dict(self.symbols), self.name)

    def substitute(self, mapping: Mapping[str, Dim]) -> Graph:
        """The same graph with symbols replaced in every shape and attr.

        Guards and symbol sources stay as they are: they speak of what the op reads at run time, and a guard
        ``m == n`` that justified replacing m by n must not turn into ``n == n``.
        """
        def attr(v):
            if isinstance(v, D.Expr):
                return D.substitute(v, mapping)
            return tuple(attr(e) for e in v) if isinstance(v, tuple) else v

        return self.rebuild(lambda n, inputs: Node(
            n.op, inputs, {k: attr(v) for k, v in n.attrs.items()}, [D.substitute(d, mapping) for d in n.shape],
            n.dtype, n.origin))


def _graph_of(rows: Sequence[tuple[Any, ...]], params: Sequence[int], outputs: Sequence[int], *more: Any) -> Graph:
    """A graph that was pickled."""
    nodes: list[Node] = []
    for op, inputs, *others in rows:
        nodes.append(Node(op, [nodes[i] for i in inputs], *others))
    return Graph([nodes[p] for p in params], [nodes[o] for o in outputs], *more)


def view_source(node: Node) -> Node:
    """The node whose memory ``node`` shares: itself, or what a chain of reshapes views."""
    while node.op == "reshape":
        node = node.inputs[0]
    return node


def topological(roots: Iterable[T], operands: Callable[[T], Sequence[T]] = operator.attrgetter("inputs")) -> list[T]:
    """Operands first; iterative, so deep graphs do not hit the recursion limit."""
    order: list[T] = []
    seen: set[T] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            n, expanded = stack.pop()
            if expanded:
                order.append(n)
            elif n not in seen:
                seen.add(n)
                stack.append((n, True))
                stack.extend((i, False) for i in reversed(operands(n)) if i not in seen)
    return order
