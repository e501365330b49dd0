"""Reads of many variables as one op: an executor takes longer for a node than for what a ReadVariableOp does.

Only reads of a function's arguments that wait for the same nodes become one (custom_ops/read_op.cc): no cycle can come
of it, and no write is between them.
"""
from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from ..ir.dtypes import DTYPES
from .edits import Edit
from .view import GraphView, NodeView

OP = "StitchedRead"
FEWEST = 8  # reads that are worth it
HOST_TYPES = frozenset({"int32"})  # on a GPU they would lie in host memory


def read_together(graph: graph_pb2.GraphDef, keep: Iterable[str]) -> graph_pb2.GraphDef:
    """The same graph, or a copy with such ops.

    Args:
      graph: of a function, run as a whole.
      keep: names of nodes that must still be there; with a "^" those that need only be there and run.
    """
    keep = frozenset(keep)
    view = GraphView(graph)
    groups: dict[tuple[str, frozenset[str]], list[NodeView]] = {}
    for n in view:
        if n.op == "ReadVariableOp" and n.name not in keep and view[n.inputs[0][0]].op == "_Arg" \
                and view.dtype((n.name, 0)) in DTYPES.keys() - HOST_TYPES:
            groups.setdefault((n.device, frozenset(n.control_inputs)), []).append(n)
    found = [reads for reads in groups.values() if len(reads) >= FEWEST]
    if not found:
        return graph
    edit = Edit(graph, view)
    for reads in found:
        _join(edit, reads)
    out = edit.graph(name.removeprefix("^") for name in keep if name.startswith("^"))
    assert isinstance(out, graph_pb2.GraphDef)
    return out


def _join(edit: Edit, reads: list[NodeView]) -> None:
    types = [edit.view.dtype((n.name, 0)) for n in reads]
    node = node_def_pb2.NodeDef(op=OP, device=reads[0].device)
    node.attr["N"].i = len(reads)
    node.attr["dtypes"].list.type.extend(tf.as_dtype(t).as_datatype_enum for t in types)
    name = edit.add(node, f"{reads[0].name}/all", types, [n.inputs[0] for n in reads], reads[0].control_inputs)
    for k, n in enumerate(reads):
        edit.instead[n.name, 0] = name, k
        edit.waits[n.name] = (name,)
