"""Rewrites of a graph that keep its meaning exactly: equal nodes are shared, no-ops go."""
from __future__ import annotations

from typing import Any

import numpy as np

from .graph import Graph, Node


def simplify(graph: Graph) -> Graph:
    """An equivalent graph in which equal computations are one node."""
    seen: dict[Any, Node] = {}

    def one(n: Node, inputs: tuple[Node, ...]) -> Node:
        if n.op == "param":
            return n
        key = (n.op, inputs, attrs_key(n.attrs), n.shape, n.dtype)
        if key not in seen:
            same = all(a is b for a, b in zip(inputs, n.inputs, strict=True))
            seen[key] = n if same else Node(n.op, inputs, n.attrs, n.shape, n.dtype, n.origin)
        return seen[key]

    return graph.rebuild(one)


def attrs_key(attrs: dict[str, Any]) -> tuple:
    """A hashable stand-in for attributes (arrays by their bytes, so -0.0 and NaN patterns differ)."""
    return tuple((k, (v.dtype.name, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v)
                 for k, v in sorted(attrs.items()))
