"""How convolutions reach a library: as a matrix product, as one over patches, or as a call of their own.

- A window of one element is a matrix product of the (strided) image with the filter as it lies.
- A filter that is larger than all patches of the image (late layers at a small batch) is best read once, as it lies:
  a kernel writes the patches, and a matrix product does the rest.
- So it is wherever requests are to share launches (``Options(superkernels=True)``): products of separate matrices can
  be one call, convolutions with filters of their own cannot.
- Else the library's convolution reads the image.  It wants the filter as [out, *window, in], so a transpose is added,
  which takes the scales that follow (batch normalisation) along.  A bias is part of the call, and with it a sum with
  a tensor and ReLU; without a bias these stay kernels, as cuDNN has no compiled engine for them.
- Depthwise convolutions stay kernels: they do little work for the bytes that they touch.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..ir import dims as D
from ..ir.builder import Builder
from ..ir.dims import Dim
from ..ir.graph import Graph, Node
from .call import DTYPES, TINY_WORK, LibraryCall, repeated_vector, through_views, without_relu

MIN_GROUP_CHANNELS = 8  # fewer channels in a group are no work for a library
CALL_DTYPES = DTYPES - {"float64"}  # of the library's own convolutions
SCALED_DTYPE = "float32"  # a scaled filter of a half type would be rounded once more


def prepare(graph: Graph, products: bool = False) -> Graph:
    """The same graph with convolutions in the forms above; with ``products`` as matrix products where they can be.

    Scaled filters may round differently in the last place.
    """
    if not any(n.op == "conv" for n in graph.nodes()):
        return graph
    tails = _affine_tails(graph, products)
    new: dict[Node, Node] = {}

    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        if node in tails:
            new[node] = _scaled(tails[node], new)
        else:
            fresh = node.with_inputs(inputs)
            new[node] = _form(fresh, products) if node.op == "conv" else fresh
        return new[node]

    return graph.rebuild(one)


def work_of(conv: Node) -> Dim:
    """Multiply-adds of a convolution."""
    return D.product([*conv.shape, *conv.inputs[1].shape[:-1]])


# --- the forms -------------------------------------------------------------------------------------

def _suits(conv: Node) -> bool:
    """True for convolutions that are work for a library."""
    groups = conv.attrs["groups"]
    work = work_of(conv)
    small = isinstance(work, int) and work <= TINY_WORK
    known = conv.dtype in CALL_DTYPES or (conv.dtype in DTYPES and groups == 1)
    return (known and conv.rank in (4, 5) and not small
            and (groups == 1 or D.static(conv.inputs[1].shape[-2]) >= MIN_GROUP_CHANNELS))


def _is_pointwise(conv: Node) -> bool:
    window = conv.inputs[1].shape[:-2]
    return conv.attrs["groups"] == 1 and all(k == 1 for k in window) and not any(map(any, conv.attrs["padding"]))


def _over_patches(conv: Node, products: bool) -> bool:
    """True when the filter is larger than the patches of all images, which must be known to be so, for doubles, and
    where ``products`` are wanted."""
    w = conv.inputs[1]
    patches = D.product([*conv.shape[:-1], *w.shape[:-1]])
    worth = products or conv.dtype not in CALL_DTYPES or (isinstance(patches, int) and patches <= D.static(w.size))
    return conv.attrs["groups"] == 1 and worth


def _form(conv: Node, products: bool) -> Node:
    """A convolution as a library computes it, without what follows."""
    if not _suits(conv):
        return conv
    if _is_pointwise(conv):
        return _product(conv, _strided(conv))
    if _over_patches(conv, products):
        return _product(conv, _patches(conv))
    x, w = conv.inputs
    return _with_filter(conv, x, w.inputs[0] if is_ready(conv) else _turned(w, conv.origin))


def _product(conv: Node, patches: Node) -> Node:
    """The matrix product of [batch, *places, depth] with the filter."""
    b = _builder(conv)
    w = conv.inputs[1]
    matrix = b.reshape(w, (D.product(w.shape[:-1]), w.shape[-1]))
    return b.dot(patches, matrix, contract=((conv.rank - 1,), (0,)))


def _strided(conv: Node) -> Node:
    """The places of the image that a window of one element sees."""
    x, strides = conv.inputs[0], conv.attrs["strides"]
    if all(s == 1 for s in strides):
        return x
    return Node("slice", [x], {"starts": (0,) * x.rank, "steps": (1, *strides, 1)}, (*conv.shape[:-1], x.shape[-1]),
                x.dtype, conv.origin)


def _patches(conv: Node) -> Node:
    """[batch, *places, window x channels]: what each place of the window sees, zeros outside of the image."""
    b = _builder(conv)
    x, attrs = conv.inputs[0], conv.attrs
    spatial = conv.rank - 2
    window = conv.inputs[1].shape[:-2]
    out = x
    for d in range(spatial):  # each step turns an axis into two: places, and the window's elements
        shape = (conv.shape[1 + d], window[d])
        at = b.ew("add", b.ew("mul", b.iota(shape, 0, "int32"), attrs["strides"][d]),
                  b.ew("mul", b.iota(shape, 1, "int32"), attrs["dilations"][d]))
        out = b.gather(out, b.ew("sub", at, attrs["padding"][d][0]), axis=1 + 2 * d, mode="zero")
    places, taps = range(1, 1 + 2 * spatial, 2), range(2, 2 + 2 * spatial, 2)
    out = b.transpose(out, (0, *places, *taps, out.rank - 1))
    return b.reshape(out, (*conv.shape[:-1], D.product([*window, x.shape[-1]])))


def _turned(w: Node, origin: str) -> Node:
    """A filter [*window, in, out] as [out, *window, in] in memory."""
    perm = (w.rank - 1, *range(w.rank - 1))
    return Node("transpose", [w], {"perm": perm}, [w.shape[a] for a in perm], w.dtype, origin)


def _with_filter(conv: Node, x: Node, turned: Node) -> Node:
    """``conv`` of ``x`` with a filter that lies as [out, *window, in]."""
    back = (*range(1, turned.rank), 0)
    w = Node("transpose", [turned], {"perm": back}, [turned.shape[a] for a in back], turned.dtype, conv.origin)
    return Node("conv", [x, w], conv.attrs, conv.shape, conv.dtype, conv.origin)


def _builder(conv: Node) -> Builder:
    b = Builder()
    b.origin = conv.origin
    return b


# --- scales that follow ----------------------------------------------------------------------------

def _affine_tails(graph: Graph, products: bool) -> dict[Node, list[Node]]:
    """By last node: a convolution with the sums and products by channel that follow it, a scale among them."""
    users, kept = graph.users(), set(graph.outputs)
    found = {}
    for conv in users:
        if conv.op != "conv" or conv.dtype != SCALED_DTYPE or not _suits(conv) or _is_pointwise(conv) \
                or _over_patches(conv, products):
            continue
        chain = [conv]
        while chain[-1] not in kept and len(users[chain[-1]]) == 1 and _by_channel(users[chain[-1]][0], chain[-1]):
            chain.append(users[chain[-1]][0])
        while chain[-1].op in ("add", "sub") and not any(n.op == "mul" for n in chain):
            chain.pop()
        if len(chain) > 1:
            found[chain[-1]] = chain
    return found


def _by_channel(node: Node, x: Node) -> Node | None:
    """The vector over channels that ``node`` adds to ``x``, multiplies it by or subtracts from it."""
    if node.op not in ("add", "mul", "sub") or (node.op == "sub" and node.inputs[0] is not x):
        return None
    other = node.inputs[1] if node.inputs[0] is x else node.inputs[0]
    return None if other is x else repeated_vector(other, {other}, x.shape[-1])


def _scaled(chain: Sequence[Node], new: Mapping[Node, Node]) -> Node:
    """A convolution with the scales of its tail in the filter, and one sum after it."""
    conv, b = chain[0], _builder(chain[0])
    scale: Node | None = None
    shift: Node | None = None
    for x, node in pairwise(chain):
        vector = _by_channel(node, x)
        assert vector is not None
        v = b.reshape(new[vector], (conv.shape[-1],))
        if node.op == "mul":
            scale = v if scale is None else b.ew("mul", scale, v)
            shift = shift if shift is None else b.ew("mul", shift, v)
        elif node.op == "sub":
            shift = b.ew("neg", v) if shift is None else b.ew("sub", shift, v)
        else:
            shift = v if shift is None else b.ew("add", shift, v)
    assert scale is not None
    w = b.ew("mul", new[conv.inputs[1]], scale)
    out = _with_filter(conv, new[conv.inputs[0]], _turned(w, conv.origin))
    return out if shift is None else b.ew("add", out, shift)


# --- as a group ------------------------------------------------------------------------------------

def is_ready(conv: Node) -> bool:
    """True for a convolution that a library can do: its filter lies as [out, *window, in]."""
    w = conv.inputs[1]
    return conv.dtype in CALL_DTYPES and w.op == "transpose" and w.attrs["perm"] == (*range(1, w.rank), 0)


def carried(conv: Node) -> tuple[Node, ...]:
    """What belongs to a convolution that is ready: the filter seen the other way round."""
    return (conv.inputs[1],)


def match(conv: Node, out: Node, members: set[Node]) -> LibraryCall | None:
    """The call that computes ``conv`` and what leads from it to ``out``: a bias, and with it a tensor and ReLU."""
    n, relu = without_relu(out)
    bias: Node | None = None
    residual: Node | None = None
    while n is not conv:
        if n.op != "add":
            return None
        inner, other = _towards(conv, n, members)
        vector = repeated_vector(other, members, conv.shape[-1])
        if vector is not None and bias is None:
            bias = through_views(vector, members)
        elif other not in members and other.shape == conv.shape and residual is None:
            residual = other
        else:
            return None
        n = inner
    x, w = through_views(conv.inputs[0], members), conv.inputs[1].inputs[0]
    if bias is None and (relu or residual is not None):
        return None
    args = [a for a in (x, w, bias, residual) if a is not None]
    if conv.inputs[1] not in members or any(a in members for a in args):
        return None
    window = conv.inputs[1].shape[:-2]
    dims = (conv.shape[0], conv.inputs[0].shape[-1], conv.shape[-1], *conv.inputs[0].shape[1:-1], *conv.shape[1:-1],
            *window)
    low, high = zip(*conv.attrs["padding"], strict=True)
    flags = (int(bias is not None), int(residual is not None), int(relu), conv.attrs["groups"],
             *conv.attrs["strides"], *low, *high, *conv.attrs["dilations"])
    groups = conv.attrs["groups"]
    product = (groups, D.product(conv.shape[:-1]), conv.shape[-1] // groups, D.product(conv.inputs[1].shape[:-1]))
    return LibraryCall("conv", (*args, out), dims, flags, product, out.origin or conv.origin)


def _towards(conv: Node, node: Node, members: set[Node]) -> tuple[Node, Node]:
    """The operands of a sum, the one that ``conv`` leads to first."""
    a, b = node.inputs
    stack, seen = [a], set()
    while stack:
        n = stack.pop()
        if n is conv:
            return a, b
        if n not in seen and n in members:
            seen.add(n)
            stack.extend(n.inputs)
    return b, a
