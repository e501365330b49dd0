"""What a library computes: dense matrix products, with the bias that follows them, and convolutions.

A dot whose operands lie in memory as matrices (after transposes are folded into the product's axes) is a call of the
target's library.  What does not lie so gets a transpose of its own first, which is stitched into what computes the
operand.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Graph, Node
from ..ir.structural import dot_free
from ..schedule.tile import guess
from . import batches, convolutions
from .call import DTYPES, TINY_WORK, LibraryCall, in_memory, repeated_vector, through_views

LIGHT_ELEMENTS = 1 << 15  # of one matrix that every block reads again and again: it should stay in the first cache
# Up to so many multiply-adds, or rows, a kernel's product is no slower than a call; beyond, tensor cores pay.
SMALL_WORK, FEW_ROWS = 1 << 24, 16
UNKNOWN = 4  # times as many where the rows are unknown: there are usually fewer than are reckoned with


def has_library(target: Any) -> bool:
    """True for targets with a matrix library."""
    return not target.is_host


def suits_library(dot: Node, target: Any) -> bool:
    """True for products and convolutions that the target's library should compute."""
    if has_library(target) and dot.op in convolutions.FORMS:
        return convolutions.is_ready(dot)
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
    if not isinstance(D.upper(matrix), int) or dot.dtype not in DTYPES:
        return False
    rows = D.product(dot.inputs[0].shape[a] for a in left)
    most = SMALL_WORK if isinstance(D.upper(rows), int) else UNKNOWN * SMALL_WORK
    return size_of(rows) <= FEW_ROWS or size_of(work_of(dot)) <= most


# --- before planning -------------------------------------------------------------------------------

def prepare_calls(graph: Graph, target: Any) -> Graph:
    """The same graph with convolutions as a library computes them (a matrix product where that is better), and with
    transposes folded into products where they can be, and added where a library needs them."""
    if not has_library(target):
        return graph
    graph = convolutions.prepare(graph, products=target.superkernels)
    if not any(n.op == "dot" for n in graph.nodes()):
        return graph
    graph = batches.join_sums(graph)

    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        fresh = node.with_inputs(inputs)
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
            elif not (is_light(dot) or is_small(dot, guess) or _repeats_matrix(dot, k)):
                dot = _with_operand(dot, k, in_memory(dot.inputs[k]), lambda a: a)
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

def carried(node: Node) -> tuple[Node, ...]:
    """Nodes that belong to a call of the library wherever it is."""
    return convolutions.carried(node) if node.op in convolutions.FORMS else ()


def match(nodes: Iterable[Node], outputs: Sequence[Node], target: Any) -> LibraryCall | None:
    """The library call that computes a group of one product and what may follow it; None when it is no such group."""
    members = set(nodes)
    convs = [n for n in members if n.op in convolutions.FORMS]
    if convs and len(outputs) == 1:
        return convolutions.match(convs[0], outputs[0], members) if suits_library(convs[0], target) else None
    dots = [n for n in members if n.op == "dot"]
    if len(dots) != 1 or len(outputs) != 1 or not suits_library(dots[0], target):
        return None
    dot = dots[0]
    trans = [_layout(dot, 0), _layout(dot, 1)]
    if None in trans:
        return None
    found, bias = _tail(outputs[0], dot, members)
    if not found:
        return None
    if bias is not None and target.superkernels:  # batches of separate products have no epilogue
        return None
    (lhs, shared_lhs), (rhs, shared_rhs) = (_shared(dot, k, members) for k in (0, 1))
    args = [through_views(x, members) for x in (lhs, rhs, bias) if x is not None]
    if any(a in members for a in args):
        return None
    flags = tuple(int(bool(f)) for f in (*trans, shared_lhs, shared_rhs, bias is not None))
    sizes = _sizes(dot)
    return LibraryCall("matmul", (*args, outputs[0]), sizes, flags, sizes, outputs[0].origin or dot.origin)


def _sizes(dot: Node) -> tuple[Dim, ...]:
    batch, free, contract = _axes(dot, 0)
    shape = dot.inputs[0].shape
    count = len(batch) + len(free)
    parts = [[shape[a] for a in batch], [shape[a] for a in free], dot.shape[count:], [shape[a] for a in contract]]
    return tuple(D.product(p) for p in parts)


def _shared(dot: Node, k: int, members: set[Node]) -> tuple[Node, bool]:
    """What is read for operand ``k``, and whether it is one matrix for the whole batch."""
    x = dot.inputs[k]
    if x in members and _repeats_matrix(dot, k):
        return x.inputs[0], True
    return x, False


def _repeats_matrix(dot: Node, k: int) -> bool:
    """True where operand ``k`` is one matrix for the whole batch."""
    x = dot.inputs[k]
    batch, free, contract = _axes(dot, k)
    return x.op == "broadcast" and bool(batch) and not set(x.attrs["axes"]) & set(batch) \
        and tuple(x.attrs["axes"]) == tuple(sorted((*free, *contract)))


def _tail(out: Node, dot: Node, members: set[Node]) -> tuple[bool, Node | None]:
    """(whether ``out`` is the product or its sum with a bias, the bias).

    ReLU stays apart: a library's makes 0 of NaN.  It has no bias for doubles.
    """
    n = through_views(out, members)
    if n is dot:
        return True, None
    for a, b in (n.inputs, n.inputs[::-1]) if n.op == "add" and n.dtype != "float64" else ():
        bias = repeated_vector(b, members, _sizes(dot)[2])
        if bias is not None and through_views(a, members) is dot:
            return True, bias
    return False, None
