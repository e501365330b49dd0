"""Rewrites a group so that its tensors have as few dims as its ops need.

Dims of size 1 go, and neighbouring dims that no op of the group tells apart become one: a bias over NHWC becomes
[N*H*W, C], an elementwise chain becomes one long dim.  Loops get long and index arithmetic short.  Reshapes
tie nothing: row-major order stays what it is.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import dims as D
from ..ir.graph import Node
from . import rules
from .group import Group

Segments = list[list[int]]  # of a node's dims: which are one; a squeezed dim is in none
_WHOLE = frozenset({"conv", "conv_filter", "window"})  # their dims have fixed meanings
_FREE_NEW = frozenset({"broadcast"})  # result dims that no operand has may merge


Place = tuple[Node, int]  # a dim of a node


class _Classes:
    """Union-find over the dims of nodes, with a mark that one member gives to its whole class."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.first = dict(zip(nodes, itertools.accumulate((n.rank for n in nodes), initial=0), strict=False))
        self.parent = list(range(sum(n.rank for n in nodes)))
        self.marked = [False] * len(self.parent)

    def _find(self, a: Place) -> int:
        parent, k = self.parent, self.first[a[0]] + a[1]
        while parent[k] != k:
            parent[k] = k = parent[parent[k]]
        return k

    def join(self, a: Place, b: Place) -> None:
        i, j = self._find(a), self._find(b)
        if i != j:
            self.parent[i] = j
            self.marked[j] = self.marked[j] or self.marked[i]

    def mark(self, a: Place) -> None:
        self.marked[self._find(a)] = True

    def is_marked(self, a: Place) -> bool:
        return self.marked[self._find(a)]


@dataclass(frozen=True)
class Collapsed:
    """The rewritten group and, for each of its nodes, the node it stands for."""

    group: Group
    origin: Mapping[Node, Node]


def collapse(group: Group) -> Collapsed:
    """The group with dims squeezed and merged."""
    given, members = set(group.inputs), set(group.nodes)
    nodes = [*group.inputs, *(n for n in group.nodes if n not in given)]
    segments = _segments(nodes, members)
    new: dict[Node, Node] = {}
    for n in nodes:
        new[n] = _rebuilt(n, n in members, segments, new)
    rebuilt = Group(tuple(new[n] for n in group.nodes), tuple(new[n] for n in group.inputs),
                    tuple(new[n] for n in group.outputs))
    return Collapsed(rebuilt, {v: k for k, v in new.items()})


def _ties(n: Node) -> Sequence[rules.Tie]:
    """Ties that must survive: a reshape has none."""
    return [] if n.op == "reshape" else rules.ties(n)


# --- which dims go, which merge ----------------------------------------------------------------------

def _segments(nodes: list[Node], members: set[Node]) -> dict[Node, Segments]:
    keep = _Classes(nodes)
    for n in nodes:
        for d, size in enumerate(n.shape):
            if size != 1:
                keep.mark((n, d))
        if n in members:
            _tie_sizes(n, keep)
    live = {n: [d for d in range(n.rank) if keep.is_marked((n, d))] for n in nodes}
    apart = _Classes(nodes)
    for n in nodes:
        if n in members:
            _tie_boundaries(n, live, apart)
    out: dict[Node, Segments] = {}
    for n in nodes:
        segs: Segments = []
        for k, d in enumerate(live[n]):
            if k and not apart.is_marked((n, live[n][k - 1])):
                segs[-1].append(d)
            else:
                segs.append([d])
        out[n] = segs
    return out


def _tie_sizes(n: Node, keep: _Classes) -> None:
    """Dims that must be squeezed together, and dims that an attribute names and so must stay."""
    for k, there, here in _ties(n):
        keep.join((n.inputs[k], there), (n, here))
    if n.op in _WHOLE:
        for x in (n, *n.inputs):
            for d in range(x.rank):
                keep.mark((x, d))
        return
    if n.op == "dot":
        for a, b in zip(*n.attrs["contract"], strict=True):
            keep.join((n.inputs[0], a), (n.inputs[1], b))
    if n.op == "reduce":
        return
    for place in _links(n)[1]:
        keep.mark(place)


def _named_dims(n: Node) -> Iterable[tuple[Node, int]]:
    """Dims that have no partner of the same size and index, or that an attribute names."""
    tied_here = {here for _, _, here in _ties(n)}
    if n.op in ("slice", "pad", "concat", "reverse", "scan"):
        for d in range(n.rank):
            if d not in tied_here:
                yield n, d
                for x in n.inputs:
                    if x.rank == n.rank:
                        yield x, d
    elif n.op in ("gather", "gather_nd"):
        for k, x in enumerate(n.inputs):
            tied = {there for j, there, _ in _ties(n) if j == k}
            for d in range(x.rank):
                if d not in tied:
                    yield x, d
    elif n.op == "order":
        yield from ((x, x.rank - 1) for x in (n, *n.inputs))
    elif n.op == "search":
        yield n.inputs[0], n.inputs[0].rank - 1
    elif n.op == "segment":
        yield from ((x, 0) for x in (n, *n.inputs))
    elif n.op == "arg_reduce":
        yield n.inputs[0], n.attrs["axis"]
    elif n.op == "iota":
        yield n, n.attrs["axis"]


def _pairs(live: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(live))


def _tie_boundaries(n: Node, live: Mapping[Node, list[int]], apart: _Classes) -> None:
    """A boundary (node, d) lies after live dim d.  Joined boundaries merge together or not at all."""
    if n.op == "reshape":
        _match_runs(n, live, apart)
        return
    maps, rigid = _links(n)
    for x in {n, *n.inputs}:
        for a, b in _pairs(live[x]):
            if (x, a) in rigid or (x, b) in rigid:
                apart.mark((x, a))
    for a, b in _pairs(live[n]):
        for x, m in zip(n.inputs, maps, strict=True):
            _match(n, (a, b), x, (m.get(a), m.get(b)), live, apart)
    for k, x in enumerate(n.inputs):
        back = {there: here for here, there in maps[k].items()}
        for a, b in _pairs(live[x]):
            if a in back or b in back:
                _match(x, (a, b), n, (back.get(a), back.get(b)), live, apart)
            elif n.op == "dot":
                _match_contracted(n, k, (a, b), live, apart)


def _links(n: Node) -> tuple[list[dict[int, int]], set[tuple[Node, int]]]:
    """For each operand, the operand's dim by the result's where they are tied; and the dims that merge with none."""
    found = n.derived.get("links")
    if found is None:
        maps = [{here: there for j, there, here in _ties(n) if j == k} for k in range(len(n.inputs))]
        whole = ((x, d) for x in (n, *n.inputs) for d in range(x.rank))
        found = n.derived["links"] = maps, set(whole if n.op in _WHOLE else _named_dims(n))
    return found


def _match_runs(n: Node, live: Mapping[Node, list[int]], apart: _Classes) -> None:
    """A reshape keeps the boundaries between runs of dims of equal size: both sides merge there or neither does."""
    x = n.inputs[0]
    if D.product(n.shape) == 0:
        return
    for here, there in rules.factor(n.shape, x.shape)[:-1]:
        ends = [[d for d in live[y] if d < run.stop] for y, run in ((n, here), (x, there))]
        if all(ends) and all(len(e) < len(live[y]) for e, y in zip(ends, (n, x), strict=True)):
            apart.join((n, ends[0][-1]), (x, ends[1][-1]))


def _match(x: Node, pair: tuple[int, int], y: Node, other: tuple[int | None, int | None],
           live: Mapping[Node, list[int]], apart: _Classes) -> None:
    """Joins the boundary between two dims of x with that of the same two dims of y, where there is one."""
    if other == (None, None):
        return
    if None not in other and other in _pairs(live[y]):
        apart.join((x, pair[0]), (y, other[0]))
    else:
        apart.mark((x, pair[0]))


def _match_contracted(n: Node, k: int, pair: tuple[int, int], live: Mapping[Node, list[int]], apart: _Classes) -> None:
    mine, theirs = n.attrs["contract"][k], n.attrs["contract"][1 - k]
    partner = dict(zip(mine, theirs, strict=True))
    _match(n.inputs[k], pair, n.inputs[1 - k], (partner.get(pair[0]), partner.get(pair[1])), live, apart)


# --- rewriting -------------------------------------------------------------------------------------

def _rebuilt(n: Node, is_member: bool, segments: Mapping[Node, Segments], new: Mapping[Node, Node]) -> Node:
    """The node over merged dims: one for all groups that merge them alike, so that what is derived of it is kept."""
    known = n.derived.setdefault("rebuilt", {})
    key = (is_member, tuple(map(tuple, segments[n])), tuple(new[x] for x in n.inputs) if is_member else ())
    if key not in known:
        known[key] = _rebuild(n, is_member, segments, new)
    return known[key]


def _rebuild(n: Node, is_member: bool, segments: Mapping[Node, Segments], new: Mapping[Node, Node]) -> Node:
    segs = segments[n]
    shape = tuple(D.product(n.shape[d] for d in s) for s in segs)
    if n.op == "const":
        return Node("const", (), {"value": n.attrs["value"].reshape(shape)}, shape, n.dtype, n.origin)
    if not is_member:
        return Node("param", (), {"index": 0}, shape, n.dtype, n.origin)
    inputs = tuple(new[x] for x in n.inputs)
    if n.op == "reduce" and not _at(segments[n.inputs[0]], n.attrs["axes"]):
        return Node("reshape", inputs, {}, shape, n.dtype, n.origin)  # every reduced dim has size 1
    rule = _ATTRS.get(n.op)
    attrs = rule(n, segs, [segments[x] for x in n.inputs]) if rule else n.attrs
    return Node(n.op, inputs, attrs, shape, n.dtype, n.origin)


def _at(segs: Segments, dims: Iterable[int]) -> tuple[int, ...]:
    """The segments that dims lie in, in the dims' order; squeezed dims have none."""
    out: list[int] = []
    for d in dims:
        for k, s in enumerate(segs):
            if d in s and k not in out:
                out.append(k)
    return tuple(out)


def _one(segs: Segments, d: int) -> int:
    return _at(segs, (d,))[0]


def _per_dim(values: tuple, segs: Segments, plain: Any) -> tuple:
    """An attribute with a value per dim; merged dims have the value that means "untouched"."""
    return tuple(values[s[0]] if len(s) == 1 else plain for s in segs)


def _broadcast(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {"axes": tuple(_one(segs, n.attrs["axes"][s[0]]) for s in source[0])}


def _transpose(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {"perm": tuple(_one(source[0], n.attrs["perm"][s[0]]) for s in segs)}


def _slice(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {"starts": _per_dim(n.attrs["starts"], segs, 0), "steps": _per_dim(n.attrs["steps"], segs, 1)}


def _pad(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {k: _per_dim(n.attrs[k], segs, 0) for k in ("low", "high", "interior")}


def _axis(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {**n.attrs, "axis": _one(segs, n.attrs["axis"])}


def _gather(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {**n.attrs, "axis": _one(source[0], n.attrs["axis"]),
            "batch_dims": len(_at(source[0], range(n.attrs["batch_dims"])))}


def _gather_nd(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {**n.attrs, "batch_dims": len(_at(source[0], range(n.attrs["batch_dims"])))}


def _dot(n: Node, segs: Segments, source: list[Segments]) -> dict[str, Any]:
    return {k: tuple(_at(s, axes) for s, axes in zip(source, n.attrs[k], strict=True)) for k in ("batch", "contract")}


_ATTRS = {
    "broadcast": _broadcast, "transpose": _transpose, "slice": _slice, "pad": _pad, "concat": _axis, "scan": _axis,
    "iota": _axis, "gather": _gather, "gather_nd": _gather_nd, "dot": _dot,
    "search": lambda n, segs, source: {**n.attrs, "batch_dims": len(source[0]) - 1},
    "reverse": lambda n, segs, source: {"axes": _at(segs, n.attrs["axes"])},
    "reduce": lambda n, segs, source: {**n.attrs, "axes": _at(source[0], n.attrs["axes"])},
    "arg_reduce": lambda n, segs, source: {**n.attrs, "axis": _one(source[0], n.attrs["axis"])},
}
