"""Groups of one structure: what differs in sizes only can be one kernel, which takes the sizes at run time.

The updates of many variables or the look-ups of many features are the same few loops over other sizes.  A kernel of
its own for every size takes a compiler minutes; one for all of them is compiled once.  Sizes that are the same in all
groups stay constants.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Node, Shape
from ..ir.ops import OPS
from .collapse import collapse
from .group import Group

# Besides elementwise ops: those whose attributes name dims but no sizes.
LOOSE = frozenset({"cast", "bitcast", "select", "broadcast", "transpose", "reduce", "gather", "gather_nd", "iota"})
STEPS = (8, 4)  # elements of wide accesses: sizes that are multiples of them stay provably so


@dataclass(frozen=True)
class Structure:
    """A group without its sizes.

    Attributes:
      key: equal for groups that differ in sizes only.
      group: the group with as few dims as its ops need (collapse).
      sizes: the sizes that may differ, in the order of nodes and dims; positions correspond between groups.
      origin: for each node of ``group``, inputs first, the node it stands for.
    """

    key: Hashable
    group: Group
    sizes: tuple[Dim, ...]
    origin: tuple[Node, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of ``group``, inputs first."""
        return _nodes(self.group)


def structure(group: Group) -> Structure:
    """The structure of a group."""
    small = collapse(group)
    number = {n: k for k, n in enumerate(_nodes(small.group))}
    members = set(small.group.nodes)
    fixed = _fixed(small.group)
    key: list[Hashable] = []
    sizes: list[Dim] = []
    for n in number:
        own = n in members
        key.append((n.op if own else "input", n.dtype, _attrs(n) if own else (),
                    tuple(number[x] for x in n.inputs) if own else (),
                    n.shape if n in fixed else tuple(map(_kind_of_size, n.shape))))
        sizes += n.shape if n not in fixed else ()
    outputs = tuple(number[o] for o in small.group.outputs)
    return Structure((tuple(key), outputs), small.group, tuple(sizes), tuple(small.origin[n] for n in number))


@dataclass(frozen=True)
class Joined:
    """Groups of one structure as one: ``values`` has for each of them what the group's new unknowns are."""

    group: Group
    values: list[dict[str, Dim]]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of ``group`` in the order of Structure.nodes."""
        return _nodes(self.group)


def join(members: Sequence[Structure]) -> Joined:
    """The group that is any of ``members``, which have one key, when its unknown sizes are theirs."""
    columns = list(zip(*(m.sizes for m in members), strict=True))
    unknown: dict[tuple[Dim, ...], Dim] = {}
    values: list[dict[str, Dim]] = [{} for _ in members]
    for column in columns:
        if len(set(column)) > 1 and column not in unknown:
            name, step = f"size{len(unknown)}", _step(column[0])
            counts = [D.floordiv(size, step) for size in column]
            unknown[column] = step * D.symbol(name, *_bounds(counts))
            for value, count in zip(values, counts, strict=True):
                value[name] = count
    sizes = iter([unknown.get(column, column[0]) for column in columns])
    return Joined(_rebuilt(members[0], sizes), values)


def _rebuilt(like: Structure, sizes: Iterator[Dim]) -> Group:
    """The group with the next of ``sizes`` for each size that may differ."""
    fixed, members = _fixed(like.group), set(like.group.nodes)
    new: dict[Node, Node] = {}
    for n in like.nodes:
        shape: Shape = n.shape if n in fixed else tuple(next(sizes) for _ in n.shape)
        inputs = [new[x] for x in n.inputs] if n in members else []
        new[n] = Node(n.op, inputs, n.attrs, shape, n.dtype, n.origin)
    return Group(tuple(new[n] for n in like.group.nodes), tuple(new[n] for n in like.group.inputs),
                 tuple(new[n] for n in like.group.outputs))


def _nodes(group: Group) -> tuple[Node, ...]:
    return tuple(dict.fromkeys((*group.inputs, *group.nodes)))


def _fixed(group: Group) -> set[Node]:
    """Nodes whose sizes must not change: attributes may depend on them."""
    return {x for n in group.nodes if n.op not in LOOSE and not OPS[n.op].elementwise for x in (n, *n.inputs)}


def _kind_of_size(d: Dim) -> Hashable:
    """What a kernel may rely on of a size that it takes at run time; 0 and 1 are no such sizes."""
    return d if isinstance(d, int) and d < 2 else ("known" if isinstance(d, int) else "unknown", _step(d))


def _step(size: Dim) -> int:
    return next((step for step in STEPS if D.mod(size, step) == 0), 1)


def _bounds(sizes: Sequence[Dim]) -> tuple[int, int | None]:
    """The least and the largest that any of some sizes can be, as far as that is known."""
    least = [max(d, 0) if isinstance(d, int) else 0 for d in map(D.lower, sizes)]
    most = [d for d in map(D.upper, sizes) if isinstance(d, int)]
    return min(least), max(most) if len(most) == len(sizes) else None


def _attrs(node: Node) -> Hashable:
    return tuple((k, (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray | np.generic) else v)
                 for k, v in sorted(node.attrs.items()))
