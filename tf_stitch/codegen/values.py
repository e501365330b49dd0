"""Text of one value at one index: the thread scope of stitching, ops inlined into the loop that reads them.

Values of half types are float32 in registers and on chip, but every op rounds its result, as TensorFlow's does: a
value must be the same where it is kept, where it comes back from memory and where it is computed a second time
(the gradient of a maximum looks for it with "equal").
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import Unschedulable
from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Node, topological
from ..ir.ops import OPS
from ..schedule import rules
from ..schedule.rules import Index
from . import device_forms
from .scope import Key
from .text import compute_type, literal, rounded, storage_type

if TYPE_CHECKING:
    from .emit import StageEmitter

# Results that need no rounding: they are one of the operands, or it without its fraction or sign.
_EXACT = frozenset({"neg", "abs", "sign", "max", "min", "floor", "ceil", "rint"})
MANY_PIECES = 4  # of a concat, for which a table of their addresses pays
DEEP = 32  # values inside each other, from which on what is further below is computed first: Python's stack is limited
_SAME_PLACE = frozenset({"cast", "bitcast", "select"})  # read their operands where they are read, as elementwise ops do
_SIGNED = {"add": "+", "sub": "-", "mul": "*"}  # unsigned arithmetic wraps, signed is undefined


def evaluate(e: StageEmitter, node: Node, index: Index) -> str:
    """A C++ expression (a variable or a literal) for ``node`` at ``index``; declares what it needs."""
    e.nesting += 1
    if e.nesting % DEEP == 0:
        for below in topological([(node, index)], lambda key: _operands(e, *key))[:-1]:
            _evaluate(e, *below)
    text = _evaluate(e, node, index)
    e.nesting -= 1
    return text


def _operands(e: StageEmitter, node: Node, index: Index) -> list[Key]:
    """What a value that is not there yet is computed from under the same conditions."""
    if e.scopes.find((node, index)) is not None or e.in_memory(node):
        return []
    if node.op in rules.VIEWS:
        return [(node.inputs[0], _seen(e, node, rules.VIEWS[node.op](node, index)))]
    if not OPS[node.op].elementwise and node.op not in _SAME_PLACE:
        return []
    cdf = _normal_cdf(e, node, index)
    return [(x, index) for x in (node.inputs if cdf is None else [cdf.x, cdf.factor]) if x is not None]


def _evaluate(e: StageEmitter, node: Node, index: Index) -> str:
    found = e.scopes.find((node, index))
    if found is not None:
        return found
    if node.op == "const" and node.size == 1:
        return literal(node.attrs["value"].reshape(-1)[0], node.dtype)
    view = rules.VIEWS.get(node.op)
    if view is not None and not e.in_memory(node):
        return evaluate(e, node.inputs[0], _seen(e, node, view(node, index)))
    with e.scopes.at(e.scopes.depth_of(index)):
        text = e.load(node, index) if e.in_memory(node) else compute(e, node, index)
        if not text.isidentifier():
            return declare(e, node, index, text)
        e.scopes.top.values[(node, index)] = text
        return text


def _seen(e: StageEmitter, node: Node, index: Index) -> Index:
    """The index of a view's operand, where a slice begins given at run time if the kernel is to be for all of them."""
    start = e.kernel.start(node) if node.op == "slice" else 0
    if start == 0:
        return index
    return tuple(i + start - first if first else i for i, first in zip(index, node.attrs["starts"], strict=True))


def seen(e: StageEmitter, node: Node, index: Index) -> tuple[Node, Index]:
    """What a chain of views and concatenations shows at an index: a node that is neither, or is in memory."""
    while not e.in_memory(node):
        if node.op in rules.VIEWS:
            node, index = node.inputs[0], _seen(e, node, rules.VIEWS[node.op](node, index))
        elif node.op == "concat" and (piece := _piece(node, index)) is not None:
            node, index = piece
        else:
            break
    return node, index


def compute(e: StageEmitter, node: Node, index: Index) -> str:
    """An expression that computes ``node`` at ``index`` from its operands."""
    rule = _RULES.get(node.op) or (_elementwise if OPS[node.op].elementwise else None)
    if rule is None:
        raise Unschedulable(f"Op '{node.op}' of {node.origin or node} cannot be computed in place.")
    return rule(e, node, index)


def declare(e: StageEmitter, node: Node, index: Index, text: str) -> str:
    """Declares a variable for a value in the innermost scope."""
    name = e.fresh("v")
    e.scopes.line(f"const {compute_type(node.dtype)} {name} = {text};")
    e.scopes.top.values[(node, index)] = name
    return name


def wrap(op: str, dtype: str, args: list[str]) -> str | None:
    """Integer arithmetic that wraps around, or None when the op needs no care."""
    d = DTYPES[dtype]
    if not d.is_integer or (d.kind == "uint" and d.size >= 4):
        return None
    wide = "ts_u64" if d.size == 8 else "ts_u32"
    if op == "neg":
        return f"{d.c}(0 - {wide}({args[0]}))"
    if op in _SIGNED:
        return f"{d.c}({wide}({args[0]}) {_SIGNED[op]} {wide}({args[1]}))"
    return None


def _elementwise(e: StageEmitter, node: Node, index: Index) -> str:
    form = None if e.kernel.target.is_host else _device_form(e, node, index)
    if form is not None:
        return form
    args = [evaluate(e, x, index) for x in node.inputs]
    text = OPS[node.op].c
    assert text is not None
    if "ts_status" in text:
        e.may_fail()
    wrapped = wrap(node.op, node.inputs[0].dtype, args) if node.op in ("neg", *_SIGNED) else None
    if wrapped:
        return wrapped
    if node.op == "div":
        text = _quotient(e, node, args[1]) or text
    text = text.format(*args, T=compute_type(node.dtype))
    return text if node.op in _EXACT else rounded(text, node.dtype)


def _device_form(e: StageEmitter, node: Node, index: Index) -> str | None:
    """The text of a computation for which a GPU has a function of its own."""
    if node.op == "exp" and device_forms.is_below_max(node.inputs[0]):
        return rounded(f"ts_exp_down({evaluate(e, node.inputs[0], index)})", node.dtype)
    if node.op == "erfc" and DTYPES[node.dtype].size == 2:  # far more exact than a half, in fewer instructions
        return rounded(f"2.0f * ts_ndtr({evaluate(e, node.inputs[0], index)} * -0x1.6a09e6p+0f)", node.dtype)
    cdf = _normal_cdf(e, node, index)
    if cdf is None:
        return None
    text = f"ts_ndtr({'-' if cdf.negated else ''}{evaluate(e, cdf.x, index)})"
    return text if cdf.factor is None else f"({evaluate(e, cdf.factor, index)} * {text})"


def _normal_cdf(e: StageEmitter, node: Node, index: Index) -> device_forms.NormalCdf | None:
    """What a GPU's own function of the normal distribution computes, where nothing between is needed elsewhere."""
    if e.kernel.target.is_host or node.dtype != "float32":  # half types round between the operations
        return None
    cdf = device_forms.normal_cdf(node, lambda x: not e.in_memory(x))
    return None if cdf is None or e.scopes.find((cdf.tail, index)) is not None else cdf


def _quotient(e: StageEmitter, node: Node, divisor: str) -> str | None:
    """How a GPU divides by what does not change in the loop at hand (a row's sum): the divisor is prepared outside."""
    depth = e.scopes.depth_of_name(divisor)
    if e.kernel.target.is_host or compute_type(node.dtype) != "float" or not divisor.isidentifier() or depth is None \
            or depth == len(e.scopes.stack) - 1:
        return None
    name = e.divisors.get(divisor)
    if name is None:
        name = e.divisors[divisor] = e.fresh("d")
        with e.scopes.at(depth):
            e.scopes.line(f"const ts_divisor_t {name} = ts_divisor({divisor});")
    return f"ts_divide({{0}}, {name})"


def _cast(e: StageEmitter, node: Node, index: Index) -> str:
    x = evaluate(e, node.inputs[0], index)
    to, source = storage_type(node.dtype), storage_type(node.inputs[0].dtype)
    if to == source:
        return x
    if to != compute_type(node.dtype):
        return f"ts_load(ts_cast<{to}>({x}))"
    return f"ts_cast<{to}>({x})"


def _bitcast(e: StageEmitter, node: Node, index: Index) -> str:
    """Of a half in memory its own bits: the float that it is computed with does not keep those of NaN on a GPU."""
    x, at = seen(e, node.inputs[0], index)
    to, source = storage_type(node.dtype), storage_type(x.dtype)
    own_bits = source != compute_type(x.dtype) and e.in_memory(x) and x not in e.part.slots
    bits = e.stored(x, at) if own_bits else f"ts_store<{source}>({evaluate(e, x, at)})"
    return f"ts_load(ts_bitcast<{to}>({bits}))"


def _select(e: StageEmitter, node: Node, index: Index) -> str:
    c, x, y = (evaluate(e, x, index) for x in node.inputs)
    if c in e.scopes.top.values.values():
        return f"{c} ? {x} : {y}"
    return f"ts_pick<{compute_type(node.dtype)}>({c}, {x}, {y})"  # one condition for all turns of the loop


def _const(e: StageEmitter, node: Node, index: Index) -> str:
    values = ", ".join(literal(v, node.dtype) for v in node.attrs["value"].reshape(-1))
    name = e.table(compute_type(node.dtype), values or "0")  # no array of nothing in device code
    return f"{name}[{e.dim(rules.linear(index, node.shape))}]"


def _shape_value(e: StageEmitter, node: Node, index: Index) -> str:
    position = rules.linear(index, node.shape)
    c = compute_type(node.dtype)
    if isinstance(position, int):
        return f"{c}({e.dim(node.attrs['dims'][position])})"
    name = e.table(c, ", ".join(f"{c}({e.dim(d)})" for d in node.attrs["dims"]))
    return f"{name}[{e.dim(position)}]"


def _iota(e: StageEmitter, node: Node, index: Index) -> str:
    return f"ts_load(ts_cast<{storage_type(node.dtype)}>((ts_i64)({e.dim(index[node.attrs['axis']])})))"


def _conditional(e: StageEmitter, node: Node, start: str, cases: list[tuple[str, Callable[[], str]]]) -> str:
    """A variable that is ``start`` unless a condition holds; each case is evaluated only under its condition."""
    name = e.fresh("v")
    e.scopes.line(f"{compute_type(node.dtype)} {name} = {start};")
    for condition, value in cases:
        with e.scopes.block(f"if ({condition})", conditional=True):
            e.scopes.line(f"{name} = {value()};")
    return name


def _named_index(e: StageEmitter, d: Dim, size: Dim) -> Dim:
    """A variable for a non-negative index below ``size``, so that what is computed from it can be simplified."""
    if isinstance(d, int):
        return d
    return e.index_variable(e.dim(d), size)


def _pad(e: StageEmitter, node: Node, index: Index) -> str:
    x, fill = node.inputs
    low, interior = node.attrs["low"], node.attrs["interior"]
    start = evaluate(e, fill, ())
    conditions: list[str] = []
    inner: list[tuple[int, Dim]] = []
    place = list(index)
    for d in range(node.rank):
        if node.shape[d] == x.shape[d] and low[d] == 0:
            continue
        step = interior[d] + 1
        at = index[d] - low[d]
        reach = x.shape[d] * step - interior[d]  # of the operand, gaps included
        if not D.prove_nonneg(at):
            conditions.append(f"{e.dim(index[d])} >= {e.dim(low[d])}")
        if not D.prove_le(at + 1, reach):
            conditions.append(f"{e.dim(at)} < {e.dim(reach)}")
        if step > 1:
            conditions.append(f"ts_floormod({e.dim(at)}, {step}) == 0")
        inner.append((d, at))
        place[d] = at
    if not conditions:
        return evaluate(e, x, tuple(place))

    def value() -> str:
        for d, at in inner:
            where = D.floordiv(at, interior[d] + 1)
            place[d] = _named_index(e, where, x.shape[d])
        return evaluate(e, x, tuple(place))

    return _conditional(e, node, start, [(" && ".join(conditions), value)])


def _piece(node: Node, index: Index) -> tuple[Node, Index] | None:
    """The operand of a concat that an index is known to lie in, and the index there."""
    axis = node.attrs["axis"]
    at = index[axis]
    for x, start in zip(node.inputs, rules.concat_starts(node), strict=True):
        if D.prove_le(start, at) and D.prove_le(at + 1, start + x.shape[axis]):
            return x, (*index[:axis], at - start, *index[axis + 1:])
    return None


def _is_table(node: Node) -> bool:
    """True for a concat of many tensors of one shape, such as a stack."""
    return len(node.inputs) >= MANY_PIECES and len({x.shape for x in node.inputs}) == 1 \
        and D.prove_le(1, node.inputs[0].shape[node.attrs["axis"]])


def _reshaped(e: StageEmitter, node: Node) -> Node:
    """What lies in memory in the order of a node's elements."""
    while node.op == "reshape" and not e.in_memory(node):
        node = node.inputs[0]
    return node


def table_of(e: StageEmitter, node: Node) -> int | None:
    """The first of the kernel's neighbouring buffers that a concat is of, when no condition for each need find them."""
    if node.op != "concat" or not _is_table(node):
        return None
    return e.kernel.first_of([_reshaped(e, x) for x in node.inputs])


def position_in_piece(node: Node, index: Index) -> Dim:
    """Where an element of a concat of tensors of one shape lies in the one that holds it."""
    axis, x = node.attrs["axis"], node.inputs[0]
    return rules.linear((*index[:axis], D.mod(index[axis], x.shape[axis]), *index[axis + 1:]), x.shape)


def looked_up_piece(e: StageEmitter, node: Node, index: Index, first: int) -> str:
    """A pointer to the one of a table's buffers that holds an element."""
    axis = node.attrs["axis"]
    size, c = node.inputs[0].shape[axis], storage_type(node.dtype)
    where = (index[axis],)
    with e.scopes.at(e.scopes.depth_of(where)):
        pointer = e.scopes.find((node, where))
        if pointer is None:
            pointer = e.scopes.top.values[(node, where)] = e.fresh("p")
            piece = e.factor(D.floordiv(index[axis], size))
            e.scopes.line(f"const {c}* {pointer} = TS_BUFFER({c}, {first} + {piece});")
    return pointer


def _concat(e: StageEmitter, node: Node, index: Index) -> str:
    axis = node.attrs["axis"]
    at = index[axis]
    piece = _piece(node, index)
    if piece is not None:
        return evaluate(e, *piece)
    first = table_of(e, node)
    if first is not None:
        text = f"{looked_up_piece(e, node, index, first)}[{e.dim(position_in_piece(node, index))}]"
        return text if storage_type(node.dtype) == compute_type(node.dtype) else f"ts_load({text})"
    cases: list[tuple[str, Callable[[], str]]] = []
    for x, start in zip(node.inputs, rules.concat_starts(node), strict=True):
        size = x.shape[axis]
        if D.prove_le(at + 1, start) or D.prove_le(start + size, at):
            continue

        def value(x: Node = x, start: Dim = start, size: Dim = size) -> str:
            inner = _named_index(e, at - start, size)
            return evaluate(e, x, (*index[:axis], inner, *index[axis + 1:]))

        cases.append((f"{e.dim(at)} >= {e.dim(start)} && {e.dim(at)} < {e.dim(start + size)}", value))
    return _conditional(e, node, "0", cases)


def _looked_up(e: StageEmitter, node: Node, raw: str, size: Dim) -> tuple[Dim, str]:
    """A safe index from an index read from data, and the condition under which it counts ("" for always)."""
    n = e.dim(size)
    mode = node.attrs["mode"]
    if mode == "error" and e.kernel.target.is_host:
        e.may_fail()
        return e.index_variable(f"ts_index({raw}, {n}, ts_status)", size), ""
    at = e.index_variable(f"ts_clip_index({raw}, {n})", size)
    # TensorFlow's kernels raise no errors on a GPU: what lies out of range is zero there
    return at, f"ts_in_range({raw}, {n})" if mode != "clip" else ""


def _gathered(e: StageEmitter, node: Node, conditions: list[str], sizes: list[Dim],
              value: Callable[[], str]) -> str:
    conditions = [c for c in conditions if c]
    conditions += [f"{e.dim(s)} > 0" for s in sizes if not D.prove_nonneg(s - 1)]
    if not conditions:
        return value()
    return _conditional(e, node, "0", [(" && ".join(conditions), value)])


def _gather(e: StageEmitter, node: Node, index: Index) -> str:
    params, indices = node.inputs
    axis, batch = node.attrs["axis"], node.attrs["batch_dims"]
    middle = indices.rank - batch
    raw_index = (*index[:batch], *index[axis:axis + middle])
    with e.scopes.at(e.scopes.depth_of(raw_index)):
        raw = evaluate(e, indices, raw_index)
        at, condition = _looked_up(e, node, raw, params.shape[axis])
    place = (*index[:axis], at, *index[axis + middle:])
    return _gathered(e, node, [condition], [params.shape[axis]], lambda: evaluate(e, params, place))


def _gather_nd(e: StageEmitter, node: Node, index: Index) -> str:
    params, indices = node.inputs
    batch, depth, lead = node.attrs["batch_dims"], D.static(indices.shape[-1]), indices.rank - 1
    at: list[Dim] = []
    conditions: list[str] = []
    with e.scopes.at(e.scopes.depth_of(index[:lead])):
        for j in range(depth):
            raw = evaluate(e, indices, (*index[:lead], j))
            k, condition = _looked_up(e, node, raw, params.shape[batch + j])
            at.append(k)
            conditions.append(condition)
    place = (*index[:batch], *at, *index[lead:])
    return _gathered(e, node, conditions, list(params.shape[batch:batch + depth]), lambda: evaluate(e, params, place))


def _search(e: StageEmitter, node: Node, index: Index) -> str:
    """The place of a query in a sorted row, which is halved until one place is left."""
    table, queries = node.inputs
    batch, size = node.attrs["batch_dims"], table.shape[-1]
    query = evaluate(e, queries, index)
    low, high = e.fresh("k"), e.fresh("k")
    e.scopes.line(f"ts_idx {low} = 0, {high} = {e.dim(size)};")
    with e.scopes.block(f"while ({low} < {high})", conditional=True):
        middle = e.index_variable(f"{low} + ({high} - {low}) / 2", size)
        found = evaluate(e, table, (*index[:batch], middle))
        less = f"{found} < {query}" if node.attrs["side"] == "left" else f"!({query} < {found})"
        e.scopes.line(f"if ({less}) {low} = {e.dim(middle)} + 1; else {high} = {e.dim(middle)};")
    return f"{compute_type(node.dtype)}({low})"


_RULES: dict[str, Callable[[StageEmitter, Node, Index], str]] = {
    "const": _const, "shape_value": _shape_value, "iota": _iota, "cast": _cast, "bitcast": _bitcast,
    "select": _select, "pad": _pad, "concat": _concat, "gather": _gather, "gather_nd": _gather_nd,
    "search": _search,
}
