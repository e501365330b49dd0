"""The variables that a SavedModel's checkpoint is restored to are made those that its functions read.

``tf.saved_model.save`` of a Keras 3 layer or model writes two handles for each variable: functions read one, saving and
restoring use a copy of it.  ``tf.saved_model.load`` goes by objects and finds the values all the same; sessions, so
TensorFlow Serving too, run the restore op and then miss every variable.
"""
from __future__ import annotations

from typing import Any

CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def restore_what_is_read(meta: Any) -> None:
    """Changes a MetaGraph in place: a copy that saving and restoring use gives way to what it is a copy of."""
    ends = {n.split(":")[0] for n in (meta.saver_def.save_tensor_name, meta.saver_def.restore_op_name)}
    calls = [n for n in meta.graph_def.node if n.name in ends and n.op in CALLS]
    used = {i for n in calls for i in n.input}
    original = {copy: handle for copy, handle in _copies(meta.graph_def) if copy in used and handle not in used}
    for node in calls:
        node.input[:] = [original.get(i, i) for i in node.input]


def _copies(graph: Any) -> list[tuple[str, str]]:
    """(handle, handle of the variable that its first value is read from)."""
    nodes = {n.name: n for n in graph.node}
    assigns = (n for n in graph.node if n.op == "AssignVariableOp")
    values = ((n.input[0], nodes.get(n.input[1].removesuffix(":0"))) for n in assigns)
    return [(handle, value.input[0]) for handle, value in values if value is not None and value.op == "ReadVariableOp"]
