"""Reads of variables: one read where a graph has many, and gathers from variables made to join clusters.

TensorFlow reads a variable anew at every use, so the weights of an unrolled loop would look like other weights at every
step.  A ResourceGather becomes ReadVariableOp and GatherV2, a ResourceGatherNd becomes ReadVariableOp and GatherNd.

Reading a variable hands out its buffer without a copy; it is copied only where something else writes to the variable
while the value is held, or after sparse updates.  So gathers read only variables that the graph does not write to.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from .shapes import variable_shape
from .view import RET_OPS, GraphView, Ref

GATHERS = {"ResourceGather": "GatherV2", "ResourceGatherNd": "GatherNd"}  # from a variable: the same from a tensor
READERS = frozenset({*GATHERS, "ReadVariableOp", "VariableShape"})
WRITERS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})


def read_before_gathers(source: graph_pb2.GraphDef | function_pb2.FunctionDef,
                        view: GraphView) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """The same graph, or a copy in which gathers from variables of known shape are gathers from what was read."""
    chosen = {n.name for n in view if n.op in GATHERS and _touched_by(view, n.inputs[0]) <= READERS
              and variable_shape(view, n.inputs[0]) is not None}
    if not chosen:
        return source
    out = type(source)()
    out.CopyFrom(source)
    nodes = out.node_def if isinstance(out, function_pb2.FunctionDef) else out.node
    taken = {n.name for n in nodes}
    # What must run is known by name.  In a function that is the read, so that the gather may join a cluster.
    renamed = {}
    if view.is_function or any(n.op in RET_OPS for n in view):
        renamed = {name: free_name(f"{name}/gather", taken) for name in chosen}
    for n in nodes:
        n.input[:] = [i if i.startswith("^") else _renamed(i, renamed) for i in n.input]
    if isinstance(out, function_pb2.FunctionDef):
        for key, ref in out.ret.items():
            out.ret[key] = _renamed(ref, renamed)
    made = [m for n in nodes for m in (_replaced(n, view, taken, renamed.get(n.name)) if n.name in chosen else [n])]
    copies = [node_def_pb2.NodeDef.FromString(m.SerializeToString()) for m in made]
    del nodes[:]
    nodes.extend(copies)
    return out


def merge_reads(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView,
                keep: Iterable[str] = (), run: Iterable[str] = ()) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """The same graph, or a copy in which reads of a variable that may happen at the same time are one.

    Only reads that wait for the same nodes are merged: no cycle can come of it, and no write is between them.  Reads
    that nothing mentions any more go, except those in ``keep``; in place of those in ``run``, which must only have run,
    there is a NoOp.
    """
    first: dict[tuple, str] = {}
    instead: dict[str, str] = {}
    for n in view:
        if n.op == "ReadVariableOp" and n.proto is not None and _touched_by(view, n.inputs[0]) <= READERS | WRITERS:
            key = (n.inputs[0], n.proto.attr["dtype"].type, frozenset(i for i in n.proto.input if i.startswith("^")))
            into = first.setdefault(key, n.name)
            if into != n.name:
                instead[n.name] = into
    if not instead:
        return source
    out = type(source)()
    out.CopyFrom(source)
    is_function = isinstance(out, function_pb2.FunctionDef)
    nodes = out.node_def if is_function else out.node
    run = set(run) - set(keep)
    mentioned = set(keep) | run | ({*out.control_ret.values(), *(r.split(":")[0] for r in out.ret.values())}
                             if is_function else set())
    for node in nodes:
        inputs = dict.fromkeys((k if not text.startswith("^") else -1, _renamed(text, instead))
                               for k, text in enumerate(node.input))
        node.input[:] = [text for _, text in inputs]
        mentioned.update(text.split(":")[0].removeprefix("^") for text in node.input)
    gone = set(instead) - mentioned
    left = [node_def_pb2.NodeDef(name=n.name, op="NoOp", device=n.device, input=[f"^{instead[n.name]}"])
            if n.name in instead and n.name in run else node_def_pb2.NodeDef.FromString(n.SerializeToString())
            for n in nodes if n.name not in gone]
    del nodes[:]
    nodes.extend(left)
    return out


def _renamed(text: str, instead: Mapping[str, str]) -> str:
    """An input that names another node where ``instead`` says so."""
    sign = "^" if text.startswith("^") else ""
    name, *port = text.removeprefix("^").split(":")
    return sign + ":".join([instead.get(name, name), *port])


def _touched_by(view: GraphView, handle: Ref) -> set[str]:
    """The ops that take a variable."""
    return {view[reader].op for reader, _, port in view.consumers(handle[0]) if port == handle[1]}


def _replaced(node: node_def_pb2.NodeDef, view: GraphView, taken: set[str],
              name: str | None) -> Iterable[node_def_pb2.NodeDef]:
    """A read and a gather instead of a gather from a variable; the read has its name if the gather is given another."""
    body = view.is_function
    read = node_def_pb2.NodeDef(name=node.name if name else free_name(f"{node.name}/read", taken),
                                op="ReadVariableOp", device=node.device,
                                input=[node.input[0], *(i for i in node.input if i.startswith("^"))])
    read.attr["dtype"].type = node.attr["dtype"].type
    gather = node_def_pb2.NodeDef()
    gather.CopyFrom(node)
    gather.name, gather.op = name or node.name, GATHERS[node.op]
    gather.input[0] = f"{read.name}:value:0" if body else read.name
    gather.attr.pop("validate_indices", None)  # SavedModels leave out what has its default
    gather.attr["Tparams"].type = node.attr["dtype"].type
    del gather.attr["dtype"]
    if gather.op == "GatherNd":
        return read, gather
    axis = node_def_pb2.NodeDef(name=free_name(f"{node.name}/axis", taken), op="Const", device=node.device)
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(node.attr["batch_dims"].i, tf.int32))
    gather.input.insert(2, f"{axis.name}:output:0" if body else axis.name)
    gather.attr["Taxis"].type = tf.int32.as_datatype_enum
    return read, axis, gather


def free_name(name: str, taken: set[str]) -> str:
    """A name that is not taken, which it is from now on."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
