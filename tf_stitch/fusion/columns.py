"""Products whose columns are read in runs: the gates of an LSTM or GRU, the queries, keys and values of attention.

``dot(x, w)[..., k * n:(k + 1) * n]`` for every k becomes a product with a column dim of its own for k, so that a block
that owns some units of a cell owns just these units of every gate, and the whole cell can be one kernel.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ir.dims import Dim
from ..ir.graph import Graph, Node
from ..ir.ops import OPS
from ..ir.structural import dot_free

MOST_RUNS = 16


@dataclass(frozen=True)
class Runs:
    """A product, the elementwise values made of it, and the slices of these: ``count`` runs of ``size`` columns."""

    dot: Node
    values: frozenset[Node]
    slices: frozenset[Node]
    count: int
    size: int

    def shape(self, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """A shape with the columns in two dims."""
        return (*shape[:-1], self.count, self.size)


def split_columns(graph: Graph, target: Any) -> Graph:
    """The same graph with the columns of products in two dims where everything reads them in equal runs."""
    if target.is_host or not any(n.op == "slice" for n in graph.nodes()):
        return graph
    users = graph.users()
    kept = set(graph.outputs)
    found = [r for n in users if n.op == "dot" and (r := _runs(n, users, kept)) is not None]
    if not found:
        return graph
    owner = {n: r for r in found for n in (*r.values, *r.slices)}

    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        runs = owner.get(node)
        return node.with_inputs(inputs) if runs is None else _split(node, inputs, runs)

    return graph.rebuild(one)


def _runs(dot: Node, users: Mapping[Node, list[Node]], kept: set[Node]) -> Runs | None:
    """How the columns of a product are read; None unless in equal runs by slices alone."""
    free = dot_free(dot.inputs[1].rank, dot.attrs["batch"][1], dot.attrs["contract"][1])
    columns = dot.shape[-1] if dot.rank else 0
    if len(free) != 1 or not isinstance(columns, int):
        return None
    values, slices, stack = {dot}, set(), [dot]
    while stack:
        n = stack.pop()
        if n in kept:
            return None
        for u in users[n]:
            if (OPS[u.op].elementwise or u.op == "cast") and u.shape == dot.shape:
                if u not in values:
                    values.add(u)
                    stack.append(u)
            elif u.op == "slice" and _is_run(u):
                slices.add(u)
            else:
                return None
    sizes = {s.shape[-1] for s in slices}
    size = next(iter(sizes), 0)
    if len(sizes) != 1 or not isinstance(size, int) or not 0 < size < columns or columns % size \
            or columns // size > MOST_RUNS or any(s.attrs["starts"][-1] % size for s in slices):
        return None
    return Runs(dot, frozenset(values), frozenset(slices), columns // size, size)


def _is_run(n: Node) -> bool:
    """True for a slice of neighbouring columns of every row."""
    return (n.attrs["starts"][:-1] == (0,) * (n.rank - 1) and n.attrs["steps"] == (1,) * n.rank
            and n.shape[:-1] == n.inputs[0].shape[:-1] and isinstance(n.attrs["starts"][-1], int))


def _split(node: Node, inputs: tuple[Node, ...], runs: Runs) -> Node:
    """A node of ``runs`` with the columns in two dims; a slice then has its own shape again."""
    if node in runs.slices:
        x = inputs[0]
        first = node.attrs["starts"][-1] // runs.size
        taken = Node("slice", inputs, {"starts": (*(0,) * (x.rank - 2), first, 0), "steps": (1,) * x.rank},
                     (*x.shape[:-2], 1, runs.size), node.dtype, node.origin)
        return Node("reshape", [taken], {}, node.shape, node.dtype, node.origin)
    if node is runs.dot:
        return _split_dot(node, inputs, runs)
    pairs = zip(node.inputs, inputs, strict=True)
    inputs = tuple(new if old in runs.values else _split_operand(old, new, runs) for old, new in pairs)
    return Node(node.op, inputs, node.attrs, runs.shape(node.shape), node.dtype, node.origin)


def _split_dot(dot: Node, inputs: tuple[Node, ...], runs: Runs) -> Node:
    left, right = inputs
    (axis,) = dot_free(right.rank, dot.attrs["batch"][1], dot.attrs["contract"][1])
    shape = (*right.shape[:axis], runs.count, runs.size, *right.shape[axis + 1:])
    right = Node("reshape", [right], {}, shape, right.dtype, dot.origin)
    attrs = {k: (dot.attrs[k][0], tuple(a + (a > axis) for a in dot.attrs[k][1])) for k in ("batch", "contract")}
    return Node("dot", [left, right], attrs, runs.shape(dot.shape), dot.dtype, dot.origin)


def _split_operand(old: Node, new: Node, runs: Runs) -> Node:
    """Another operand of an elementwise value."""
    shape, last = runs.shape(old.shape), old.rank - 1
    if old.op != "broadcast":
        return Node("reshape", [new], {}, shape, old.dtype, old.origin)
    source, axes = new.inputs[0], old.attrs["axes"]
    if last in axes:
        source = Node("reshape", [source], {}, runs.shape(source.shape), source.dtype, old.origin)
        axes = (*axes, last + 1)
    return Node("broadcast", [source], {"axes": axes}, shape, old.dtype, old.origin)
