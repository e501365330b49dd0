"""Checks that a graph obeys the IR's rules."""
from __future__ import annotations

from . import dims as D
from .dims import Dim
from .graph import Graph, Guard, Node
from .ops import IRError, result_type


def verify(graph: Graph) -> None:
    """Raises IRError naming the first node, guard or symbol that breaks a rule.

    Every node's type is inferred anew, params are numbered in order, symbols have sources, and a reshape whose
    sizes are not identical is covered by a guard.
    """
    nodes = graph.nodes()
    known = set(nodes)
    for i, p in enumerate(graph.params):
        if p.op != "param" or p.attrs.get("index") != i:
            raise IRError(f"{_at(p)}: is listed as param {i} of the graph, but is {p.op} {p.attrs.get('index')}.")
    for n in nodes:
        if n.op == "param" and not any(n is p for p in graph.params):
            raise IRError(f"{_at(n)}: is a param that the graph does not list.")
        if any(i not in known for i in n.inputs):
            raise IRError(f"{_at(n)}: reads a node outside the graph.")
        _verify_type(n)
        if n.op == "reshape" and not sizes_agree(n.inputs[0].shape, n.shape, graph.guards):
            raise IRError(f"{_at(n)}: {n.inputs[0]!r} need not have the size of {n!r}, and no guard says so.")
    _verify_order(nodes)
    _verify_symbols(graph, nodes)


def _at(n: Node) -> str:
    return f"{n.origin or 'unnamed node'} ({n!r})"


def _verify_type(n: Node) -> None:
    try:
        shape, dtype = result_type(n.op, n.inputs, n.attrs, (n.shape, n.dtype))
    except IRError as e:
        raise IRError(f"{_at(n)}: {e}") from None
    if dtype != n.dtype or len(shape) != n.rank or any(not same(a, b) for a, b in zip(shape, n.shape, strict=True)):
        raise IRError(f"{_at(n)}: the operands give [{', '.join(map(str, shape))}] {dtype}.")


def same(a: Dim, b: Dim) -> bool:
    """Equal once both are in the normal form that a fresh computation gives."""
    return a == b or D.renormalise(a) == D.renormalise(b)


def _verify_order(nodes: list[Node]) -> None:
    seen: set[Node] = set()
    for n in nodes:
        if any(i not in seen for i in n.inputs):
            raise IRError(f"{_at(n)}: depends on itself.")
        seen.add(n)


def _verify_symbols(graph: Graph, nodes: list[Node]) -> None:
    for name, s in graph.symbols.items():
        if not 0 <= s.param < len(graph.params):
            raise IRError(f"The symbol {name} is read from param {s.param}, which the graph does not have.")
        p = graph.params[s.param]
        if (s.kind == "dim" and not 0 <= s.index < p.rank) or s.kind not in ("dim", "value"):
            raise IRError(f"The symbol {name} has no such source as {s.kind} {s.index} of {p!r}.")
    used = used_symbols(graph, nodes)
    missing = used - set(graph.symbols)
    if missing:
        raise IRError(f"The symbols {', '.join(sorted(missing))} have no source.")


def used_symbols(graph: Graph, nodes: list[Node] | None = None) -> set[str]:
    """Names of the symbols that a graph's shapes, attributes and guards mention."""
    found: set[Dim] = {d for g in graph.guards for d in (g.a, g.b)}
    for n in graph.nodes() if nodes is None else nodes:
        found.update(n.shape)
        found.update(n.attr_dims())
    return {s.name for d in found for s in D.symbols(d)}


def sizes_agree(a: tuple[Dim, ...], b: tuple[Dim, ...], guards: list[Guard]) -> bool:
    """True when shapes ``a`` and ``b`` have the same number of elements, given the guards."""
    size_a, size_b = D.product(a), D.product(b)
    if same(size_a, size_b):
        return True
    equal: list[tuple[Dim, Dim]] = []
    for g in guards:
        if g.kind == "eq":
            equal.append((g.a, g.b))
        elif g.kind == "divides":
            equal.append((g.a, D.floordiv(g.a, g.b) * g.b))
    difference = size_a - size_b
    for x, y in equal:
        if x - y != 0 and D.divmod_exact_part(difference, x - y)[1] == 0:
            return True
    return D.product(_agreed(a, equal)) == D.product(_agreed(b, equal))


def _agreed(shape: tuple[Dim, ...], equal: list[tuple[Dim, Dim]]) -> list[Dim]:
    """Each dim replaced by one stand-in for all the dims that guards equate it with."""
    parent: dict[Dim, Dim] = {}

    def find(d: Dim) -> Dim:
        while d in parent:
            d = parent[d]
        return d

    for x, y in equal:
        x, y = find(x), find(y)
        if x != y:
            parent[x] = y
    return [find(d) for d in shape]
