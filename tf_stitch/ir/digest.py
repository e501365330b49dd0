"""A graph's fingerprint: equal for graphs that any pass treats alike, in every process."""
from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import dims as D
from .graph import Graph


def digest(graph: Graph) -> str:
    """A hash of everything that a graph is, names and contents of literals included, as hexadecimal text."""
    nodes = graph.nodes()
    place = {n: i for i, n in enumerate(nodes)}
    h = hashlib.sha256()

    def put(*parts: Any) -> None:
        h.update("\0".join(map(_text, parts)).encode() + b"\n")

    put("graph", graph.name, len(graph.params), *(place[p] for p in graph.params))
    put("outputs", *(place[o] for o in graph.outputs))
    for name, s in graph.symbols.items():
        put("symbol", name, s.kind, s.param, s.index)
    for g in graph.guards:
        put("guard", g.kind, g.a, g.b, g.reason)
    for n in nodes:
        put(n.op, n.dtype, n.origin, n.shape, *(place[i] for i in n.inputs))
        for key, value in sorted(n.attrs.items()):
            put(key, value)
    put("bounds", *_bounds(d for n in nodes for d in (*n.shape, *n.attr_dims())))
    return h.hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if isinstance(value, tuple):
        return f"({','.join(map(_text, value))})"
    return value if isinstance(value, str) else f"{type(value).__name__}:{value}"


def _bounds(dims: Iterable[D.Dim]) -> list[str]:
    """Every symbol with its bounds; an expression's text has only the names."""
    symbols = {s for d in dims for s in D.symbols(d)}
    return sorted(f"{s.name} {s.lo} {s.hi}" for s in symbols)
