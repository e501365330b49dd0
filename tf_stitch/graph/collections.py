"""The collections of a MetaGraph (TF1): lists of nodes, of variables, of the contexts of loops and branches.

TensorFlow's Python looks up the nodes that they name when it loads a model, and fails on one that is gone.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

VALUES = "values_def"  # of a context: all that is in it, for those who go on building the graph


def named(meta: Any) -> Iterator[str]:
    """Nodes that the collections of a MetaGraphDef name, but for those that merely are in a context."""
    for key, collection in meta.collection_def.items():
        yield from map(_node, collection.node_list.value)
        for proto, _ in _protos(key, collection):
            yield from map(_node, _texts(proto))
        for value in collection.any_list.value:  # asset files
            yield from map(_node, _asset_tensors(value))


def forget_gone(meta: Any) -> None:
    """Takes the nodes that are not in the graph any more out of the contexts' lists."""
    there = {n.name for n in meta.graph_def.node}
    for key, collection in meta.collection_def.items():
        for proto, place in _protos(key, collection):
            lists = list(_lists_of_values(proto))
            for values in lists:
                _keep_there(values, there)
            if lists:
                collection.bytes_list.value[place] = proto.SerializeToString(deterministic=True)


def _protos(key: str, collection: Any) -> Iterator[tuple[Any, int]]:
    """The messages of a collection whose kind TensorFlow knows, and their places in it."""
    from google.protobuf.message import DecodeError
    from tensorflow.python.framework import ops

    kind = ops.get_collection_proto_type(key)
    for place, data in enumerate(collection.bytes_list.value if kind is not None else ()):
        try:
            yield kind.FromString(data), place
        except DecodeError:  # somebody's own collection of that name
            return


def _asset_tensors(value: Any) -> Iterator[str]:
    from tensorflow.core.protobuf import meta_graph_pb2

    asset = meta_graph_pb2.AssetFileDef()
    if value.Unpack(asset):
        yield asset.tensor_info.name


def _texts(message: Any) -> Iterator[str]:
    """The strings of a message and of those in it."""
    for field, value in message.ListFields():
        if field.name == VALUES:
            continue
        for v in value if _is_list(value) else (value,):
            if field.message_type is not None:
                yield from _texts(v)
            elif isinstance(v, str):
                yield v


def _lists_of_values(message: Any) -> Iterator[Any]:
    """The ValuesDefs of a context and of those nested in it."""
    for field, value in message.ListFields():
        if field.name == VALUES:
            yield value
        elif field.message_type is not None:
            for v in value if _is_list(value) else (value,):
                yield from _lists_of_values(v)


def _keep_there(values: Any, there: Iterable[str]) -> None:
    outside = {k: v for k, v in values.external_values.items() if _node(v) in there}
    inside = [v for v in values.values if v in outside or (_node(v) in there and v not in values.external_values)]
    del values.values[:]
    values.values.extend(inside)
    values.external_values.clear()
    values.external_values.update(outside)


def _is_list(value: Any) -> bool:
    return not isinstance(value, (str, bytes)) and hasattr(value, "__len__")


def _node(tensor: str) -> str:
    return tensor.removeprefix("^").split(":")[0]
