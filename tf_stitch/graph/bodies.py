"""Functions that are made of a graph's nodes."""
from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tensorflow.core.framework import function_pb2, graph_pb2

from .view import NodeView


def add_node(body: function_pb2.FunctionDef, n: NodeView, inputs: Iterable[str], device: str = "") -> None:
    """Adds a copy of a node; attributes with an underscore, which are of the node's place, stay behind."""
    node = body.node_def.add(name=n.name, op=n.op, input=inputs, device=device)
    for key, value in n.proto.attr.items() if n.proto is not None else ():
        if not key.startswith("_"):
            node.attr[key].CopyFrom(value)


def name_by_content(body: function_pb2.FunctionDef, prefix: str) -> None:
    """Names a function that has no name yet by a hash of what it holds, so equal ones are one."""
    body.signature.name = prefix + hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()[:20]


def add_functions(graph: graph_pb2.GraphDef, bodies: Iterable[function_pb2.FunctionDef]) -> None:
    """Adds the functions whose names a graph's library does not have."""
    there = {f.signature.name for f in graph.library.function}
    graph.library.function.extend({b.signature.name: b for b in bodies if b.signature.name not in there}.values())
