"""Einsum as transposes, sums, diagonals and one dot."""
from __future__ import annotations

from collections.abc import Sequence

from ...ir import dims as D
from ...ir.graph import Node
from ..view import GraphView, NodeView
from .context import Context
from .registry import NUM, lower

Labels = list[str]


def _terms(equation: str) -> tuple[list[str], str]:
    left, _, right = equation.replace(" ", "").partition("->")
    return left.split(","), right


def _einsum_reason(view: GraphView, node: NodeView) -> str | None:
    inputs, _ = _terms(str(node.attr("equation")))
    if len(inputs) != len(node.inputs) or len(inputs) > 2:
        return f"the equation {node.attr('equation')} has not one or two operands"
    return None


def _expand(term: str, rank: int) -> Labels:
    """Labels of one operand; the dims of an ellipsis are numbered from the right: ``.1``, ``.0``."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f".{i}" for i in reversed(range(hidden))), *after]


def _diagonal(c: Context, x: Node, labels: Labels) -> tuple[Node, Labels]:
    """A label that comes twice takes the diagonal: the other elements are zeroed and summed away."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            a = labels.index(label)
            b = labels.index(label, a + 1)
            size = c.b.same_dim(x.shape[a], x.shape[b], f"{c.node.name}: dims of label {label}")
            x = c.b.reduce("sum", _masked(c, x, a, b, size), [b])
            labels = [*labels[:b], *labels[b + 1:]]
    return x, labels


def _masked(c: Context, x: Node, a: int, b: int, size: D.Dim) -> Node:
    steps = c.b.iota((size,), 0, "int64")
    on = c.b.ew("eq", c.channel(steps, x.rank, a), c.channel(steps, x.rank, b))
    return c.b.select(on, x, c.b.const(0, x.dtype))


def _sum_away(c: Context, x: Node, labels: Labels, keep: Sequence[str]) -> tuple[Node, Labels]:
    gone = [i for i, label in enumerate(labels) if label not in keep]
    return c.b.reduce("sum", x, gone), [label for label in labels if label in keep]


def _drop_ones(c: Context, x: Node, labels: Labels, other: Node, others: Labels) -> tuple[Node, Labels]:
    """An ellipsis dim of 1 that the other operand stretches is dropped here."""
    gone = [i for i, label in enumerate(labels) if label.startswith(".") and x.shape[i] == 1
            and label in others and other.shape[others.index(label)] != 1]
    kept = [i for i in range(x.rank) if i not in gone]
    return c.b.reshape(x, [x.shape[i] for i in kept]), [labels[i] for i in kept]


@lower("Einsum", kinds=NUM, check=_einsum_reason)
def einsum(c: Context, *xs: Node) -> Node:
    terms, result = _terms(str(c.attr("equation")))
    operands = [_diagonal(c, x, _expand(t, x.rank)) for x, t in zip(xs, terms, strict=True)]
    hidden = max(sum(label.startswith(".") for label in labels) for _, labels in operands)
    out = _expand(result, hidden + len(result.replace("...", ""))) if "..." in result else list(result)
    if len(operands) == 1:
        x, labels = _sum_away(c, *operands[0], keep=out)
    else:
        x, labels = _product(c, *operands[0], *operands[1], out)
    return _arrange(c, x, labels, out)


def _product(c: Context, x: Node, left: Labels, y: Node, right: Labels, out: Labels) -> tuple[Node, Labels]:
    (x, left), (y, right) = _drop_ones(c, x, left, y, right), _drop_ones(c, y, right, x, left)
    x, left = _sum_away(c, x, left, [*out, *right])
    y, right = _sum_away(c, y, right, [*out, *left])
    shared = [label for label in left if label in right]
    batch = [label for label in shared if label in out]
    contract = [label for label in shared if label not in out]
    pairs = [tuple(tuple(labels.index(n) for n in names) for labels in (left, right)) for names in (batch, contract)]
    product = c.b.dot(x, y, *pairs)
    free = [[label for label in labels if label not in shared] for labels in (left, right)]
    return product, [*batch, *free[0], *free[1]]


def _arrange(c: Context, x: Node, labels: Labels, out: Labels) -> Node:
    """Result dims in order; a label that the result has twice spreads its dim over a diagonal."""
    unique = list(dict.fromkeys(out))
    x = c.b.transpose(x, [labels.index(label) for label in unique])
    for i, label in enumerate(out):
        first = out.index(label)
        if first == i:
            continue
        size = x.shape[first]
        x = c.b.broadcast_to(c.expand(x, [i]), [*x.shape[:i], size, *x.shape[i:]])
        x = _masked(c, x, first, i, size)
    return x
