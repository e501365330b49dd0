"""A sum over the batch of a product is part of the product: gradients of weights that a batch shares.

The products of the batch are never written, one long product suits a library, and half types are rounded once.
"""
from __future__ import annotations

from ..ir.graph import Graph, Node

TILE = 64 * 64  # results that give the cores work although nothing is left of the batch


def join_sums(graph: Graph) -> Graph:
    """The same graph with sums over batches of products as products.  Floats may round differently."""
    users, kept = graph.users(), set(graph.outputs)

    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        if _sums_batch(node) and len(users[node.inputs[0]]) == 1 and node.inputs[0] not in kept:
            return _joined(node, inputs[0])
        return node.with_inputs(inputs)

    return graph.rebuild(one) if any(map(_sums_batch, graph.nodes())) else graph


def _sums_batch(node: Node) -> bool:
    """True for a sum over dims of a product's batch that leaves enough results."""
    if node.op != "reduce" or node.attrs["kind"] != "sum" or node.inputs[0].op != "dot":
        return False
    batch = len(node.inputs[0].attrs["batch"][0])
    return bool(node.attrs["axes"]) and max(node.attrs["axes"]) < batch and isinstance(node.size, int) \
        and node.size >= TILE


def _joined(total: Node, dot: Node) -> Node:
    """The product that folds what ``total`` sums, in the order in which it lies in memory."""
    axes = total.attrs["axes"]
    batch = tuple(tuple(a for k, a in enumerate(side) if k not in axes) for side in dot.attrs["batch"])
    summed = [(left, right) for k, (left, right) in enumerate(zip(*dot.attrs["batch"], strict=True)) if k in axes]
    folded = sorted([*summed, *zip(*dot.attrs["contract"], strict=True)])
    contract = (tuple(left for left, _ in folded), tuple(right for _, right in folded))
    return Node("dot", dot.inputs, {"batch": batch, "contract": contract}, total.shape, total.dtype, total.origin)
