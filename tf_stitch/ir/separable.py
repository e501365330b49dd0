"""Proves that a graph treats the elements along one unknown dim, the batch, apart from each other.

Then requests that share all other inputs may run as one: their inputs joined along the batch, one run, its outputs
taken apart again.  :func:`find_batch` says along which symbol and how the batch lies in inputs and outputs.

A value's elements are numbered in row-major order.  A *reading* (axis, outer, inner) of a value says that its dim
``axis`` has outer * b * inner elements, of which number ``(o * b + k) * inner + i`` belongs to element k of the batch,
and that the value there depends on element k of the inputs alone.  A value may have several readings: zeros of [b * t]
do not depend on the batch however it is read.  A value without any is refused: it mixes elements, or uses the size of
the batch as a number.  One rule per primitive says which readings of the operands are readings of the result (the way
that a vectorising map is derived, as JAX's vmap and the named axes of GSPMD, arXiv 2105.04663); an op without a rule is
refused.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from . import dims as D
from .dims import Dim, Expr
from .graph import Graph, Node, Shape
from .ops import OPS

Reading = tuple[int, Dim, Dim]  # axis, outer, inner
Readings = frozenset[Reading]
State = Readings | None  # None: neither the shape nor an element depends on the batch
_REFUSED: Readings = frozenset()


@dataclass(frozen=True)
class Batch:
    """Along which unknown size, and where, requests may be joined.

    Attributes:
      symbol: the size; the sum of the requests' own when they are joined.
      inputs: for each param the dim whose size is the symbol; None for one that must be the same in all requests.
      outputs: for each output (dim, inner): elements of the batch alternate there every ``inner`` positions; None for
        one that does not depend on the batch.
    """

    symbol: str
    inputs: tuple[int | None, ...]
    outputs: tuple[tuple[int, Dim] | None, ...]


def find_batch(graph: Graph) -> Batch | None:
    """The batch of a graph; None when no symbol is proven to be one.

    Of several the one that lies furthest out in the inputs: joining copies fewer, longer pieces there.
    """
    sizes = [name for name, source in graph.symbols.items() if source.kind == "dim"]
    carriers = {name: [_axis_of(p.shape, name) for p in graph.params] for name in sizes}
    candidates = [name for name in sizes if any(a is not None for a in carriers[name])]
    candidates.sort(key=lambda name: sum(a for a in carriers[name] if a is not None))
    return next((b for name in candidates if (b := _batch_along(graph, name, carriers[name]))), None)


def _axis_of(shape: Shape, name: str) -> int | None:
    """The dim that is just the symbol."""
    return next((i for i, d in enumerate(shape) if isinstance(d, Expr) and str(d) == name), None)


def _batch_along(graph: Graph, name: str, inputs: Sequence[int | None]) -> Batch | None:
    batch = next(p.shape[a] for p, a in zip(graph.params, inputs, strict=True) if a is not None)
    states = _Proof(name, batch).states(graph)
    outputs: list[tuple[int, Dim] | None] = []
    for o in graph.outputs:
        state = states[o]
        if state is not None and not state:
            return None
        outputs.append(None if state is None else min(((a, inner) for a, _, inner in state), key=str))
    if all(o is None for o in outputs) or any(states[p] == _REFUSED for p in graph.params):
        return None
    return Batch(name, tuple(inputs), tuple(outputs))


class _Proof:
    """Readings of every value along one symbol."""

    def __init__(self, name: str, batch: Dim):
        self.name, self.batch = name, batch

    def states(self, graph: Graph) -> dict[Node, State]:
        """The readings of all nodes."""
        found: dict[Node, State] = {}
        for n in graph.nodes():
            found[n] = self.state(n, [found[i] for i in n.inputs])
        return found

    def state(self, n: Node, operands: Sequence[State]) -> State:
        """The readings of a node, given those of its operands."""
        if any(s is not None and not s for s in operands):
            return _REFUSED
        if all(s is None for s in operands) and not any(map(self.depends, (*n.shape, *n.attr_dims()))):
            return None
        rule = _elementwise if OPS[n.op].elementwise else _RULES.get(n.op)
        readings = rule(self, n, operands) if rule else ()
        return frozenset(r for r in readings if self.fits(n.shape, r))

    def depends(self, d: Dim) -> bool:
        """True when a dim changes with the batch."""
        return any(s.name == self.name for s in D.symbols(d))

    def dims(self, shape: Shape) -> list[int]:
        """The dims of a shape that change with the batch."""
        return [i for i, d in enumerate(shape) if self.depends(d)]

    def fits(self, shape: Shape, reading: Reading) -> bool:
        """True when a reading is one of a shape: the batch is in its dim once, and in no other."""
        axis, outer, inner = reading
        parts = (outer, inner, *shape[:axis], *shape[axis + 1:])
        return outer * self.batch * inner == shape[axis] and not any(map(self.depends, parts))

    def anyhow(self, shape: Shape) -> Iterator[Reading]:
        """The readings of a value that is the same along the one dim that changes with the batch."""
        axes = self.dims(shape)
        if len(axes) == 1 and (rest := quotient(shape[axes[0]], self.batch)) is not None:
            for inner in _divisors(rest):
                outer = quotient(rest, inner)
                assert outer is not None
                yield axes[0], outer, inner


def quotient(a: Dim, b: Dim) -> Dim | None:
    """``a / b`` when the division is exact whatever the symbols are."""
    if b == 0:
        return None
    q, rest = D.divmod_exact_part(a, b)
    return q if rest == 0 else None


def _divisors(d: Dim) -> Sequence[Dim]:
    """Ways to take factors out of a dim: 1, itself, and for a product of symbols all that divide it."""
    if not isinstance(d, Expr):
        return [k for k in range(1, min(d, 64) + 1) if d % k == 0] + ([d] if d > 64 else [])
    if len(d.terms) > 1:
        return [1, d]
    monomial, c = d.terms[0]
    atoms = [D.Expr(((((atom, 1),), 1),)) for atom, power in monomial for _ in range(power)][:4]
    subsets = itertools.chain.from_iterable(itertools.combinations(atoms, k) for k in range(len(atoms) + 1))
    return list(dict.fromkeys(D.product((k, *s)) for s in subsets for k in _divisors(abs(c))))


# --- rules -----------------------------------------------------------------------------------------------
#
# A rule gets the readings of the operands, None for one that does not depend on the batch, and gives candidates:
# those that do not fit the result's shape are dropped.  It may assume that no operand is refused.

Operands = Sequence[State]
Rule = Callable[[_Proof, Node, Operands], Iterable[Reading]]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


def _all(operands: Operands) -> Readings:
    """The readings that all operands have; none when one of them cannot depend on the batch."""
    first, *rest = operands
    for s in rest:
        first = None if first is None or s is None else first & s
    return first or _REFUSED


@_rule("cast", "bitcast", "select")
def _elementwise(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    return _all(operands)


@_rule("param")
def _param(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """A request's part of a joined input is a range of a dim that is the batch and nothing else."""
    return [(a, 1, 1) for a in proof.dims(n.shape)]


@_rule("iota")
def _iota(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    return (r for r in proof.anyhow(n.shape) if r[0] != n.attrs["axis"])


@_rule("broadcast")
def _broadcast(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    if operands[0] is None:
        return proof.anyhow(n.shape)
    return [(n.attrs["axes"][a], outer, inner) for a, outer, inner in operands[0]]


@_rule("reshape")
def _reshape(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """Row-major numbers of elements stay, so what lies outside the batch stays, and with it what lies inside.

    One of the two has to be proven: the sizes of both shapes are equal, if only by a guard.
    """
    axes = proof.dims(n.shape)
    if len(axes) != 1:
        return
    axis, shape = axes[0], n.inputs[0].shape
    for a, outer, inner in operands[0] or ():
        outside = quotient(D.product(shape[:a]) * outer, D.product(n.shape[:axis]))
        if outside is not None and (rest := quotient(n.shape[axis], proof.batch * outside)) is not None:
            yield axis, outside, rest
        inside = quotient(D.product(shape[a + 1:]) * inner, D.product(n.shape[axis + 1:]))
        if inside is not None and (rest := quotient(n.shape[axis], proof.batch * inside)) is not None:
            yield axis, rest, inside


@_rule("transpose")
def _transpose(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    return [(n.attrs["perm"].index(a), outer, inner) for a, outer, inner in operands[0] or ()]


@_rule("slice")
def _slice(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """Along the batch: whole batches of those that lie behind each other."""
    starts, steps = n.attrs["starts"], n.attrs["steps"]
    for a, _, inner in operands[0] or ():
        if steps[a] == 1 and not any(proof.depends(s) for i, s in enumerate(starts) if i != a):
            first, many = (quotient(d, proof.batch * inner) for d in (starts[a], n.shape[a]))
            if first is not None and many is not None and not proof.depends(first):
                yield a, many, inner


@_rule("reverse")
def _reverse(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    return [r for r in operands[0] or () if r[0] not in n.attrs["axes"]]


@_rule("pad")
def _pad(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    x, value = operands
    low, high, interior = (n.attrs[k] for k in ("low", "high", "interior"))
    if value is not None or any(map(proof.depends, (*low, *high))):
        return ()
    return [r for r in x or () if low[r[0]] == high[r[0]] == interior[r[0]] == 0]


@_rule("concat")
def _concat(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """Along the batch, batches lie behind each other afterwards."""
    axis = n.attrs["axis"]
    yield from (r for r in _all(operands) if r[0] != axis)
    for inner in {r[2] for r in operands[0] or () if r[0] == axis}:
        parts = [[outer for a, outer, i in s or () if a == axis and i == inner] for s in operands]
        if all(parts):
            total: Dim = 0
            for p in parts:
                total = total + p[0]
            yield axis, total, inner


@_rule("gather")
def _gather(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """From a table by indices of the batch, by fixed indices from each element, or each from its own table."""
    (params, indices), axis, shared = operands, n.attrs["axis"], n.attrs["batch_dims"]
    grows = n.inputs[1].rank - shared
    if params is None:
        return [(axis + a - shared, outer, inner) for a, outer, inner in indices or ()]
    if indices is None:
        return [(a if a < axis else a + grows - 1, outer, inner) for a, outer, inner in params if a != axis]
    return [r for r in params & indices if r[0] < shared]


@_rule("gather_nd")
def _gather_nd(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    (params, indices), shared = operands, n.attrs["batch_dims"]
    places = n.inputs[1].rank - 1
    kept = shared + D.static(n.inputs[1].shape[-1])  # the first dim of params that is not indexed
    if params is None:
        return [r for r in indices or () if r[0] < places]
    if indices is None:
        return [(a - kept + places, outer, inner) for a, outer, inner in params if a >= kept]
    return [r for r in params & indices if r[0] < shared]


@_rule("order")
def _order(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    return [r for r in operands[0] or () if r[0] != n.rank - 1]


@_rule("search")
def _search(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """In a table of all, or each row of queries in its own."""
    table, queries = operands
    if table is None:
        return queries or ()
    return [r for r in _all(operands) if r[0] < n.attrs["batch_dims"]]


@_rule("segment")
def _segment(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """Rows that are folded together must be those of one request."""
    x, starts = operands
    return [r for r in x or () if r[0] > 0] if starts is None else ()


@_rule("reduce")
def _reduce(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    gone = n.attrs["axes"]
    return [(a - sum(g < a for g in gone), outer, inner) for a, outer, inner in operands[0] or () if a not in gone]


@_rule("arg_reduce")
def _arg_reduce(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    gone = n.attrs["axis"]
    return [(a - (gone < a), outer, inner) for a, outer, inner in operands[0] or () if a != gone]


@_rule("scan")
def _scan(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    return [r for r in operands[0] or () if r[0] != n.attrs["axis"]]


@_rule("dot")
def _dot(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    """The batch is a dim that only one operand has, or a batch dim of the product."""
    (x, y), batch, contract = operands, n.attrs["batch"], n.attrs["contract"]
    free = [[i for i in range(o.rank) if i not in batch[k] and i not in contract[k]] for k, o in enumerate(n.inputs)]
    if x is not None and y is not None:
        here, there = ({(by.index(a), outer, inner) for a, outer, inner in s if a in by}
                       for by, s in zip(batch, (x, y), strict=True))
        return here & there
    k, first = (0, len(batch[0])) if x is not None else (1, len(batch[0]) + len(free[0]))
    return [(first + free[k].index(a), outer, inner) for a, outer, inner in operands[k] or () if a in free[k]]


@_rule("conv_filter")
def _sum_over_images(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    return ()


@_rule("conv", "window")
def _images(proof: _Proof, n: Node, operands: Operands) -> Iterable[Reading]:
    if any(s is not None for s in operands[1:]):
        return ()
    return [r for r in operands[0] or () if r[0] == 0]
