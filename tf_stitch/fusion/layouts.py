"""Channels stay last where a graph of images turns them to the front and back.

TensorFlow's layout optimizer has convolutions of float32 on a GPU read channels first, and so all that lies between
them.  The library's convolutions want them last, so each was turned back.  What is computed of turned images is
computed as they lie, and the result turned; two turns that meet are none.  Images of unknown size stay turned: a sum
over one is a block's, and channels first it has one for each channel.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir import dims as D
from ..ir.graph import Graph, Node
from ..ir.ops import OPS
from ..ir.simplify import simplify
from .partition import ALWAYS_FLOATING

IMAGES = frozenset({"conv", "conv_filter", "window"})
RANKS = (4, 5)  # of images and volumes with a batch
PER_DIM = {"pad": ("low", "high", "interior"), "slice": ("starts", "steps")}  # attributes with a value for each dim
FLOATING = ALWAYS_FLOATING - {"reshape"}  # what every reader computes for itself, in whatever order


def keep_channels_last(graph: Graph) -> Graph:
    """The same graph with images turned as late as can be.  Floats may be summed in another order."""
    if not any(_is_turned(n) for n in graph.nodes()) or not any(n.op in IMAGES for n in graph.nodes()):
        return graph
    return simplify(graph.rebuild(lambda n, inputs: _later(n, inputs) or n.with_inputs(inputs)))


def _to_front(rank: int) -> tuple[int, ...]:
    return (0, rank - 1, *range(1, rank - 1))


def _to_back(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _is_turned(x: Node) -> bool:
    """True for images of known size whose channels were turned from the back to the front."""
    return x.op == "transpose" and x.rank in RANKS and x.attrs["perm"] == _to_front(x.rank) \
        and D.all_static(x.shape[1:])


def _later(node: Node, inputs: Sequence[Node]) -> Node | None:
    """``node`` computed of images as they lie, and turned; None where it cannot be."""
    if not any(map(_is_turned, inputs)):
        return None
    if OPS[node.op].elementwise or node.op in ("cast", "select"):
        lying = [y for x in inputs if (y := _lying(x)) is not None]
        return _turned(node, lying, node.attrs) if len(lying) == len(inputs) else None
    if node.op == "concat" and all(map(_is_turned, inputs)):
        axis = _to_front(node.rank)[node.attrs["axis"]]
        return _turned(node, [x.inputs[0] for x in inputs], {**node.attrs, "axis": axis})
    if node.op in PER_DIM and _is_turned(inputs[0]):
        attrs = {name: tuple(node.attrs[name][a] for a in _to_back(node.rank)) for name in PER_DIM[node.op]}
        return _turned(node, [inputs[0].inputs[0], *inputs[1:]], {**node.attrs, **attrs})
    if node.op == "reduce":
        return _reduced(node, inputs[0])
    if node.op == "transpose":
        front = _to_front(node.rank)
        return _transpose(node, inputs[0].inputs[0], tuple(front[p] for p in node.attrs["perm"]))
    return None


def _lying(x: Node) -> Node | None:
    """``x`` with its channels last; None for what would have to be turned in memory."""
    if _is_turned(x):
        return x.inputs[0]
    if x.op not in FLOATING or x.rank not in RANKS:
        return None
    return _transpose(x, x, _to_back(x.rank))


def _turned(like: Node, inputs: Sequence[Node], attrs: dict[str, Any]) -> Node:
    shape = [like.shape[a] for a in _to_back(like.rank)]
    made = Node(like.op, inputs, attrs, shape, like.dtype, like.origin)
    return _transpose(like, made, _to_front(like.rank))


def _reduced(node: Node, x: Node) -> Node | None:
    """A reduction of what lies behind a turn, where that leaves its dims in order."""
    front = _to_front(x.rank)
    left = [front[a] for a in range(x.rank) if a not in node.attrs["axes"]]
    if left != sorted(left):
        return None
    axes = tuple(sorted(front[a] for a in node.attrs["axes"]))
    return Node("reduce", x.inputs, {**node.attrs, "axes": axes}, node.shape, node.dtype, node.origin)


def _transpose(like: Node, x: Node, perm: tuple[int, ...]) -> Node:
    if perm == tuple(range(x.rank)):
        return x
    return Node("transpose", [x], {"perm": perm}, [x.shape[a] for a in perm], x.dtype, like.origin)
