"""Which products a library computes: dense matrix products, with the bias and ReLU that follow them.

A dot whose operands lie in memory as matrices (after transposes are folded into the product's axes) is a call of the
target's library.  What does not lie so gets a transpose of its own first, which is stitched into what computes the
operand.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Graph, Node
from ..ir.structural import dot_free

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
LIGHT_ELEMENTS = 1 << 15  # of one matrix that every block reads again and again: it should stay in the first cache
# Up to so many multiply-adds, or rows, a kernel's product is no slower than a call; beyond, tensor cores pay.
SMALL_WORK, FEW_ROWS = 1 << 24, 16
TINY_WORK = 1 << 14  # multiply-adds: a kernel does less than this while it waits for memory anyway


@dataclass(frozen=True)
class MatmulCall:
    """A group that is one library call: out[b] = op(lhs[b]) @ op(rhs[b]) (+ bias) (then ReLU).

    ``args`` are the values it reads and, last, the one it writes; ``dims`` are (batch, m, n, k), ``flags`` as in
    program.LibraryStep.
    """

    args: tuple[Node, ...]
    dims: tuple[Dim, ...]
    flags: tuple[int, ...]
    origin: str
    blocks: Dim = 0  # what the planner asks of a schedule


def has_library(target: Any) -> bool:
    """True for targets with a matrix library."""
    return not target.is_host


def suits_library(dot: Node, target: Any) -> bool:
    """True for products that the target's library should compute."""
    if not has_library(target) or dot.op != "dot" or dot.dtype not in DTYPES:
        return False
    work = work_of(dot)
    return not (isinstance(work, int) and work <= TINY_WORK)


def work_of(dot: Node) -> Dim:
    """Multiply-adds of a product."""
    return D.product([*dot.shape, *(dot.inputs[0].shape[a] for a in dot.attrs["contract"][0])])


def is_light(dot: Node) -> bool:
    """True for products that a block can do for some rows by itself: what multiplies them is small, and known to be."""
    _, free, contract = _axes(dot, 1)
    right = D.product(dot.inputs[1].shape[a] for a in (*free, *contract))
    return isinstance(right, int) and right <= LIGHT_ELEMENTS


def is_small(dot: Node, size_of: Callable[[Dim], int]) -> bool:
    """True for products that a kernel computes as fast as a library; ``size_of`` gives the size of an unknown dim."""
    (_, left, _), (_, right, contract) = _axes(dot, 0), _axes(dot, 1)
    matrix = D.product(dot.inputs[1].shape[a] for a in (*right, *contract))
    if not isinstance(matrix, int) or dot.dtype not in DTYPES:
        return False
    rows = size_of(D.product(dot.inputs[0].shape[a] for a in left))
    return rows <= FEW_ROWS or size_of(work_of(dot)) <= SMALL_WORK


# --- before planning -------------------------------------------------------------------------------

def prepare_dots(graph: Graph, target: Any) -> Graph:
    """The same graph with transposes folded into products where they can be, and added where a library needs them."""
    if not has_library(target) or not any(n.op == "dot" for n in graph.nodes()):
        return graph

    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        fresh = Node(node.op, inputs, node.attrs, node.shape, node.dtype, node.origin)
        return prepare(fresh, target) if node.op == "dot" else fresh

    return graph.rebuild(one)


def prepare(dot: Node, target: Any) -> Node:
    """A product with both operands ready for the library, where it is the library's."""
    dot = _without_shared_batch(dot)
    for k in (0, 1):
        dot = _fold_transpose(dot, k)
    if suits_library(dot, target):
        for k in (0, 1):
            if _layout(dot, k) is None:
                dot = _add_transpose(dot, k)
    return dot


def _axes(dot: Node, k: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(batch, free, contracted) axes of operand ``k``."""
    batch, contract = dot.attrs["batch"][k], dot.attrs["contract"][k]
    return batch, dot_free(dot.inputs[k].rank, batch, contract), contract


def _with_operand(dot: Node, k: int, x: Node, axes: Callable[[int], int]) -> Node:
    """``dot`` with another operand ``k``, whose axes are renumbered."""
    attrs = dict(dot.attrs)
    for name in ("batch", "contract"):
        pair = list(attrs[name])
        pair[k] = tuple(axes(a) for a in pair[k])
        attrs[name] = tuple(pair)
    inputs = list(dot.inputs)
    inputs[k] = x
    return Node("dot", inputs, attrs, dot.shape, dot.dtype, dot.origin)


def _fold_transpose(dot: Node, k: int) -> Node:
    """Reads through a transpose of operand ``k`` where the result's dims stay in order."""
    x = dot.inputs[k]
    if x.op != "transpose":
        return dot
    perm = x.attrs["perm"]
    folded = _with_operand(dot, k, x.inputs[0], lambda a: perm[a])
    _, before, _ = _axes(dot, k)
    if _axes(folded, k)[1] != tuple(perm[a] for a in before):
        return dot  # free dims would come in another order
    worse = _layout(folded, k) is None and _layout(dot, k) is not None
    return dot if worse else _fold_transpose(folded, k)


def _add_transpose(dot: Node, k: int) -> Node:
    """Operand ``k`` transposed to batch, free, contracted."""
    batch, free, contract = _axes(dot, k)
    perm = (*batch, *free, *contract)
    x = dot.inputs[k]
    moved = Node("transpose", [x], {"perm": perm}, [x.shape[a] for a in perm], x.dtype, dot.origin)
    return _with_operand(dot, k, moved, perm.index)


def _without_shared_batch(dot: Node) -> Node:
    """A right operand that is one matrix for the whole batch makes the batch a free dim of the left one."""
    batch, free, contract = _axes(dot, 1)
    x = dot.inputs[1]
    if not batch or x.op != "broadcast" or set(x.attrs["axes"]) & set(batch):
        return dot
    kept = x.attrs["axes"]
    if tuple(kept) != tuple(sorted(kept)) or len(kept) != len(free) + len(contract):
        return dot
    left, _, left_contract = _axes(dot, 0)
    if left != tuple(range(len(left))):
        return dot  # its free dims would come in another order
    attrs = {"batch": ((), ()), "contract": (left_contract, tuple(kept.index(a) for a in contract))}
    merged = Node("dot", [dot.inputs[0], x.inputs[0]], attrs, dot.shape, dot.dtype, dot.origin)
    return dot if _layout(merged, 0) is None and _layout(dot, 0) is not None else merged


def _layout(dot: Node, k: int) -> bool | None:
    """Whether operand ``k`` is stored transposed (lhs: m x k, rhs: k x n are not); None when it is no dense matrix."""
    batch, free, contract = _axes(dot, k)
    plain = (*batch, *free, *contract) if k == 0 else (*batch, *contract, *free)
    other = (*batch, *contract, *free) if k == 0 else (*batch, *free, *contract)
    rank = dot.inputs[k].rank
    if _in_order(plain, dot.inputs[k].shape, rank):
        return False
    return True if _in_order(other, dot.inputs[k].shape, rank) else None


def _in_order(axes: Sequence[int], shape: Sequence[Dim], rank: int) -> bool:
    """True when ``axes`` are in memory order; where a dim of one element lies does not matter."""
    real = [a for a in axes if shape[a] != 1]
    return real == sorted(real) and len(axes) == rank


# --- as a group ------------------------------------------------------------------------------------

def match(nodes: Iterable[Node], outputs: Sequence[Node], target: Any) -> MatmulCall | None:
    """The library call that computes a group of one product and what may follow it; None when it is no such group."""
    members = set(nodes)
    dots = [n for n in members if n.op == "dot"]
    if len(dots) != 1 or len(outputs) != 1 or not suits_library(dots[0], target):
        return None
    dot = dots[0]
    trans = [_layout(dot, 0), _layout(dot, 1)]
    if None in trans:
        return None
    tail = _tail(outputs[0], dot, members)
    if tail is None:
        return None
    bias, relu = tail
    if bias is not None and target.superkernels:  # batches of separate products have no epilogue
        return None
    (lhs, shared_lhs), (rhs, shared_rhs) = (_shared(dot, k, members) for k in (0, 1))
    args = [_through_views(x, members) for x in (lhs, rhs, bias) if x is not None]
    if any(a in members for a in args):
        return None
    flags = tuple(int(bool(f)) for f in (*trans, shared_lhs, shared_rhs, bias is not None, relu))
    return MatmulCall((*args, outputs[0]), _sizes(dot), flags, outputs[0].origin or dot.origin)


def _sizes(dot: Node) -> tuple[Dim, ...]:
    batch, free, contract = _axes(dot, 0)
    shape = dot.inputs[0].shape
    count = len(batch) + len(free)
    parts = [[shape[a] for a in batch], [shape[a] for a in free], dot.shape[count:], [shape[a] for a in contract]]
    return tuple(D.product(p) for p in parts)


def _shared(dot: Node, k: int, members: set[Node]) -> tuple[Node, bool]:
    """What is read for operand ``k``, and whether it is one matrix for the whole batch."""
    x = dot.inputs[k]
    batch, free, contract = _axes(dot, k)
    if x in members and x.op == "broadcast" and batch and not set(x.attrs["axes"]) & set(batch) \
            and tuple(x.attrs["axes"]) == tuple(sorted((*free, *contract))):
        return x.inputs[0], True
    return x, False


def _tail(out: Node, dot: Node, members: set[Node]) -> tuple[Node | None, bool] | None:
    """(bias, whether ReLU ends it) of what follows the product; None when it is something else."""
    n, relu = out, False
    if n.op == "max" and (zeros := [x for x in n.inputs if _is_zero(x)]):
        n, relu = next(x for x in n.inputs if x is not zeros[0]), True
    n = _through_views(n, members)
    if n is dot:
        return None if relu else (None, False)  # a library has ReLU only after a bias
    if n.op != "add":
        return None
    for a, b in (n.inputs, n.inputs[::-1]):
        bias = _bias(b, dot, members)
        if bias is not None and _through_views(a, members) is dot:
            return bias, relu
    return None


def _through_views(n: Node, members: set[Node]) -> Node:
    while n.op == "reshape" and n in members:
        n = n.inputs[0]
    return n


def _bias(x: Node, dot: Node, members: set[Node]) -> Node | None:
    """The vector along n that ``x`` repeats, or None."""
    if x.op != "broadcast" or x not in members:
        return None
    source, axes = x.inputs[0], tuple(x.attrs["axes"])
    n = _sizes(dot)[2]
    last = tuple(range(x.rank - len(axes), x.rank))
    return source if axes == last and source.size == n else None


def _is_zero(x: Node) -> bool:
    while x.op in ("broadcast", "reshape"):
        x = x.inputs[0]
    return x.op == "const" and not np.any(x.attrs["value"])
