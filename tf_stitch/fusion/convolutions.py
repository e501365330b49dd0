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
- Gradients by a filter are the library's where the convolutions are; else they are products over patches as well, and
  those of depthwise convolutions sums.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..ir import dims as D
from ..ir.builder import Builder
from ..ir.dims import Dim
from ..ir.dtypes import WIDE
from ..ir.graph import Graph, Node
from .call import DTYPES, TINY_WORK, LibraryCall, in_memory, repeated_vector, through_views, without_relu

MIN_GROUP_CHANNELS = 8  # fewer channels in a group are no work for a library
CALL_DTYPES = DTYPES - {"float64"}  # of the library's own convolutions
SCALED_DTYPE = "float32"  # a scaled filter of a half type would be rounded once more


def prepare(graph: Graph, products: bool = False) -> Graph:
    """The same graph with convolutions in the forms above; with ``products`` as matrix products where they can be.

    Scaled filters may round differently in the last place.
    """
    if not any(n.op in FORMS for n in graph.nodes()):
        return graph
    tails = _affine_tails(graph, products)
    new: dict[Node, Node] = {}

    def one(node: Node, inputs: tuple[Node, ...]) -> Node:
        if node in tails:
            new[node] = _scaled(tails[node], new)
        else:
            fresh = node.with_inputs(inputs)
            new[node] = FORMS[node.op](fresh, products) if node.op in FORMS else fresh
        return new[node]

    return graph.rebuild(one)


def work_of(conv: Node) -> Dim:
    """Multiply-adds of a convolution or of its gradient by the filter."""
    return D.product([*conv.shape, *conv.inputs[1].shape[:-1]])


# --- the forms -------------------------------------------------------------------------------------

def _suits(conv: Node) -> bool:
    """True for convolutions and their gradients by filters that are work for a library."""
    groups = conv.attrs["groups"]
    work = work_of(conv)
    small = isinstance(work, int) and work <= TINY_WORK
    depth = conv.shape[-1] if conv.op == "conv_filter" else conv.inputs[1].shape[-2]
    known = conv.dtype in CALL_DTYPES or (conv.dtype in DTYPES and groups == 1)
    return known and conv.rank in (4, 5) and not small and (groups == 1 or D.static(depth) >= MIN_GROUP_CHANNELS)


def _is_pointwise(conv: Node) -> bool:
    window = conv.inputs[1].shape[:-2]
    return conv.attrs["groups"] == 1 and all(k == 1 for k in window) and not any(map(any, conv.attrs["padding"]))


def _over_patches(conv: Node, products: bool) -> bool:
    """True when the filter is larger than the patches of all images, which must be known to be so, for doubles, and
    where ``products`` are wanted."""
    w = conv.inputs[1]
    patches = D.upper(D.product([*conv.shape[:-1], *w.shape[:-1]]))
    worth = products or conv.dtype not in CALL_DTYPES or (isinstance(patches, int) and patches <= D.static(w.size))
    return conv.attrs["groups"] == 1 and worth


def _form(conv: Node, products: bool) -> Node:
    """A convolution as a library computes it, without what follows."""
    if not _suits(conv):
        return conv
    if _is_pointwise(conv):
        return _product(conv, _strided(conv))
    if _over_patches(conv, products):
        patches = _patches(conv, conv.inputs[1].shape[:-2], conv.shape[1:-1])
        return _product(conv, _builder(conv).reshape(patches, (*conv.shape[:-1], D.product(conv.inputs[1].shape[:-1]))))
    x, w = conv.inputs
    return _with_filter(conv, in_memory(x), w.inputs[0] if is_ready(conv) else _turned(w, conv.origin))


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


def _filter_form(grad: Node, products: bool) -> Node:
    """A convolution's gradient by its filter as a library computes it."""
    if _is_light(grad):
        return _sum_over_patches(grad)
    if not _suits(grad):
        return grad
    if grad.dtype in CALL_DTYPES and not (products and grad.attrs["groups"] == 1):
        return grad.with_inputs(tuple(map(in_memory, grad.inputs)))
    b = _builder(grad)
    g, size = grad.inputs[1], grad.attrs["size"]
    patches = _patches(grad, size, g.shape[1:-1])
    patches = b.reshape(patches, (*g.shape[:-1], D.product(grad.shape[1:])))
    places = tuple(range(g.rank - 1))
    return b.reshape(b.dot(g, patches, contract=(places, places)), grad.shape)


def _is_light(grad: Node) -> bool:
    """True for groups that no library takes: many sums instead of products of matrices."""
    few = D.static(grad.shape[-1]) < MIN_GROUP_CHANNELS or grad.dtype not in CALL_DTYPES
    return grad.attrs["groups"] > 1 and few and grad.dtype in DTYPES


def _sum_over_patches(grad: Node) -> Node:
    """The sum over batch and places of patches times what comes back, taken in float32 at least."""
    b = _builder(grad)
    g = grad.inputs[1]
    groups, size, depth = grad.attrs["groups"], grad.attrs["size"], grad.shape[-1]
    wide = WIDE.get(grad.dtype, grad.dtype)
    per_group, places = D.static(g.shape[-1]) // groups, g.shape[:-1]
    ones, n = (1,) * len(size), len(places)
    patches = b.reshape(_patches(grad, size, places[1:]), (*places, *size, groups, depth, 1))
    factors = [b.cast(patches, wide), b.cast(b.reshape(g, (*places, *ones, groups, 1, per_group)), wide)]
    whole = (*places, *size, groups, depth, per_group)
    total = b.reduce("sum", b.ew("mul", *(b.broadcast_to(f, whole) for f in factors)), range(n))
    m = len(size)  # [*size, groups, depth, per group] as [groups, per group, *size, depth]
    return b.reshape(b.cast(b.transpose(total, (m, m + 2, *range(m), m + 1)), grad.dtype), grad.shape)


def _patches(conv: Node, window: Sequence[Dim], places: Sequence[Dim]) -> Node:
    """[batch, *places, *window, channels]: what each place of the window sees, zeros outside of the image."""
    b = _builder(conv)
    x, attrs = conv.inputs[0], conv.attrs
    spatial = conv.rank - 2
    out = x
    for d in range(spatial):  # each step turns an axis into two: places, and the window's elements
        shape = (places[d], window[d])
        at = b.ew("add", b.ew("mul", b.iota(shape, 0, "int32"), attrs["strides"][d]),
                  b.ew("mul", b.iota(shape, 1, "int32"), attrs["dilations"][d]))
        out = b.gather(out, b.ew("sub", at, attrs["padding"][d][0]), axis=1 + 2 * d, mode="zero")
    return b.transpose(out, (0, *range(1, 1 + 2 * spatial, 2), *range(2, 2 + 2 * spatial, 2), out.rank - 1))


def _turned(w: Node, origin: str) -> Node:
    """A filter [*window, in, out] as [out, *window, in] in memory."""
    perm = (w.rank - 1, *range(w.rank - 1))
    return Node("transpose", [w], {"perm": perm}, [w.shape[a] for a in perm], w.dtype, origin)


def _with_filter(conv: Node, x: Node, turned: Node) -> Node:
    """``conv`` of ``x`` with a filter that lies as [out, *window, in]."""
    back = (*range(1, turned.rank), 0)
    w = Node("transpose", [turned], {"perm": back}, [turned.shape[a] for a in back], turned.dtype, conv.origin)
    return Node("conv", [x, w], conv.attrs, conv.shape, conv.dtype, conv.origin)


FORMS = {"conv": _form, "conv_filter": _filter_form}


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
    """True for what a library can do: a convolution whose filter lies as [out, *window, in], and a gradient by it."""
    if conv.op == "conv_filter":
        return conv.dtype in CALL_DTYPES and _suits(conv)
    w = conv.inputs[1]
    return conv.dtype in CALL_DTYPES and w.op == "transpose" and w.attrs["perm"] == (*range(1, w.rank), 0)


def carried(conv: Node) -> tuple[Node, ...]:
    """What belongs to what is ready: a convolution's filter seen the other way round."""
    return (conv.inputs[1],) if conv.op == "conv" else ()


def match(conv: Node, out: Node, members: set[Node]) -> LibraryCall | None:
    """The call that computes ``conv`` and what leads from it to ``out``: a bias, and with it a tensor and ReLU.  A
    gradient by a filter stands alone."""
    if conv.op == "conv_filter":
        return _gradient_call(conv, members) if out is conv else None
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
    dims = _dims(conv.inputs[0], conv.shape, conv.inputs[1].shape[:-2])
    flags = (int(bias is not None), int(residual is not None), int(relu), *_geometry(conv))
    groups = conv.attrs["groups"]
    product = (groups, D.product(conv.shape[:-1]), conv.shape[-1] // groups, D.product(conv.inputs[1].shape[:-1]))
    return LibraryCall("conv", (*args, out), dims, flags, product, out.origin or conv.origin)


def _gradient_call(grad: Node, members: set[Node]) -> LibraryCall | None:
    x, g = grad.inputs
    args = [through_views(a, members) for a in (x, g)]
    if any(a in members for a in args):
        return None
    groups = grad.attrs["groups"]
    product = (groups, grad.shape[0] // groups, D.product(grad.shape[1:]), D.product(g.shape[:-1]))
    return LibraryCall("conv_filter", (*args, grad), _dims(x, g.shape, grad.attrs["size"]), (0, 0, 0, *_geometry(grad)),
                       product, grad.origin)


def _dims(x: Node, result: Sequence[Dim], window: Sequence[Dim]) -> tuple[Dim, ...]:
    return (x.shape[0], x.shape[-1], result[-1], *x.shape[1:-1], *result[1:-1], *window)


def _geometry(conv: Node) -> tuple[int, ...]:
    low, high = zip(*conv.attrs["padding"], strict=True)
    return (conv.attrs["groups"], *conv.attrs["strides"], *low, *high, *conv.attrs["dilations"])


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
