"""Readable text of a graph; the same graph always prints the same."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .graph import Graph, Node

_LITERAL = 8  # elements of a const shown in full
_SIGN = {"eq": "==", "le": "<=", "divides": "divided by"}


def to_text(graph: Graph) -> str:
    """One line per node, in order, between a header (params, symbols, guards) and the outputs::

        graph g(%0: [n0,4] float32)
          n0 = dim 0 of %0
          require n0 <= 8          ; reason
          %1 = exp %0 : [n0,4] float32    ; origin
          return %1
    """
    nodes = graph.nodes()
    names = {n: f"%{i}" for i, n in enumerate(nodes)}
    lines = [f"graph {graph.name or '-'}({', '.join(f'{names[p]}: {_type(p)}' for p in graph.params)})"]
    for name, s in graph.symbols.items():
        what = "dim" if s.kind == "dim" else "element"
        lines.append(f"  {name} = {what} {s.index} of {names[graph.params[s.param]]}")
    for g in graph.guards:
        lines.append(f"  require {g.a} {_SIGN[g.kind]} {g.b}" + (f"  ; {g.reason}" if g.reason else ""))
    lines += [f"  {node_text(n, names)}" for n in nodes if n.op != "param"]
    return "\n".join([*lines, f"  return {', '.join(names[o] for o in graph.outputs)}"]) + "\n"


def node_text(n: Node, names: Mapping[Node, str]) -> str:
    """One node as ``%3 = op %1 %2 {attrs} : type  ; origin``."""
    attrs = ", ".join(f"{k}={_attr(v)}" for k, v in sorted(n.attrs.items()))
    parts = [f"{names[n]} = {n.op}", *(names[i] for i in n.inputs), f"{{{attrs}}}" if attrs else "", f": {_type(n)}"]
    return " ".join(p for p in parts if p) + (f"  ; {n.origin}" if n.origin else "")


def _type(n: Node) -> str:
    return f"[{','.join(map(str, n.shape))}] {n.dtype}"


def _attr(v: Any) -> str:
    if isinstance(v, np.ndarray):
        flat = ", ".join(str(e) for e in v.reshape(-1)[:_LITERAL])
        return f"[{flat}{', ...' if v.size > _LITERAL else ''}]"
    if isinstance(v, tuple):
        return f"({', '.join(_attr(e) for e in v)})"
    return str(v)
