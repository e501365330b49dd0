"""Updates of variables as values, so that a training step's arithmetic is in programs up to the last sum.

TensorFlow adds to a variable by an op of its own (AssignAddVariableOp), and what reads the variable afterwards waits
for that op: an optimizer's step would be cut at every variable.  Where a function writes to a variable once,

    write = AssignAddVariableOp(variable, delta)         value = read + delta
    later = ReadVariableOp(variable) after write    ->    StitchedAssign(variable, read, value)
                                                         later = value

StitchedAssign (custom_ops/assign_op.cc) puts the value in the variable's place without a copy, and adds the difference
where somebody else wrote to the variable since the read; so no update of another thread is lost.  All such writes of a
graph become one op where nothing waits for some of them only.  Several sums to a variable, one after another (weight
decay and the step itself), are one write of what they come to.

What has effects, reads a variable, or is told to wait for ``later`` still runs after the write.  The new values need
memory of their own, so the smallest variables are taken, ``MOST_BYTES`` in all.
"""
from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from ..ir.dtypes import DTYPES
from .branches import KEEPS
from .control import CONTROL_FLOW
from .edits import op_node
from .guards import OP as GUARD
from .shapes import variable_shape
from .variables import free_name
from .view import RET_OPS, GraphView, NodeView, Ref, may_have_effects

OP = "StitchedAssign"
ASSERTIONS = frozenset({"Assert", GUARD})
ARITHMETIC = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
WRITERS = frozenset({*ARITHMETIC, "AssignVariableOp"})
READERS = frozenset({"ReadVariableOp", "VariableShape"})
TYPES = frozenset({"float32", "float64", "float16", "bfloat16", "int64"})  # on a GPU int32 lies in host memory
MOST_BYTES = 512 << 20


@dataclass
class _Update:
    """The writes to a variable, and the reads around them.

    ``writes`` are in order; only sums follow each other.  ``after`` has the reads behind each of them.
    """

    writes: list[NodeView]
    before: list[NodeView]
    after: list[list[NodeView]]
    shape: tuple[int | None, ...] = (0,)  # of the memory that the new value needs
    values: list[str] = field(default_factory=list)  # the inputs that name the values after each write
    kept: str = ""   # the read whose value an AssignVariableOp may write (see branches.py)
    read: str = ""   # the input that names the old one; none for an AssignVariableOp that keeps no value

    @property
    def write(self) -> NodeView:
        """The last write, whose place all have."""
        return self.writes[-1]

    @property
    def value(self) -> str:
        return self.values[-1]

    @property
    def bytes(self) -> int:
        return math.prod(d or 0 for d in self.shape) * DTYPES[self.write.attr("dtype")].size


def updates_as_values(source: graph_pb2.GraphDef, view: GraphView, run: Iterable[str],
                      stitchable: Callable[[NodeView], bool]) -> graph_pb2.GraphDef:
    """The same graph, or a copy in which writes to variables are StitchedAssign ops.

    Args:
      source: the graph of a function, whose variables are ``_Arg`` nodes; other graphs may be run in part, and stay.
      view: of ``source``.
      run: names of nodes that run whenever the function does; only writes among what they and the results need are
        changed.
      stitchable: whether a node may be part of a program; only writes of what such nodes compute are changed.
    """
    ends = [*(n.name for n in view if n.op in RET_OPS), *(name for name in run if name in view.nodes)]
    writes = [n for n in view if n.op in WRITERS and stitchable(view[n.inputs[1][0]])]
    if not writes:
        return source
    written = {w.inputs[0] for w in writes}  # what is read of these is computed, too
    writes += [n for n in view if n.op in ARITHMETIC and (given := view[n.inputs[1][0]]).op == "ReadVariableOp"
               and given.inputs[0] in written]
    order = _Order(view)
    needed = order.up_to(ends)
    certain = [w for w in writes if needed & order.bit[w.name]]
    together: dict[Ref, list[NodeView]] = {}
    for w in certain:
        together.setdefault(w.inputs[0], []).append(w)
    updates = _affordable([u for ws in together.values() if (u := _update(view, order, ws)) is not None])
    return _Edit(source, view, order, updates).graph() if updates else source


class _Order:
    """What runs before what.  Nodes of loops and branches are told apart: they have no place in it."""

    def __init__(self, view: GraphView):
        self.bit = {n.name: 1 << k for k, n in enumerate(view)}
        self.before: dict[str, int] = {}
        self.conditional: set[str] = set()
        self.between: dict[str, int] = {}  # of a node: what comes before something with effects that comes before it
        self.leading = 0  # what has effects, and what comes before that
        acting: set[str] = set()  # nodes that may write to any variable
        for n in view:
            seen = between = 0
            if not _is_pure(n) and n.op not in READERS:
                acting.add(n.name)
            sources = [s for s in (*(r[0] for r in n.inputs), *n.control_inputs) if s in self.before]
            for s in sources:
                seen |= self.before[s] | self.bit[s]
                between |= self.between[s] | (self.before[s] if s in acting else 0)
            self.before[n.name], self.between[n.name] = seen, between
            if n.name in acting:
                self.leading |= seen | self.bit[n.name]
            if n.op in CONTROL_FLOW or not self.conditional.isdisjoint(sources):
                self.conditional.add(n.name)

    def up_to(self, ends: Iterable[str]) -> int:
        """The bits of nodes and of all that runs before them."""
        return functools.reduce(operator.or_, (self.before[n] | self.bit[n] for n in ends), 0)

    def is_before(self, first: str, then: str) -> bool:
        return bool(self.before[then] & self.bit[first])

    def acts_between(self, first: str, then: str) -> bool:
        """Whether anything with effects comes after one node and before another."""
        return bool(self.between[then] & self.bit[first])

    def leads(self, name: str) -> bool:
        """Whether a node has effects or comes before one that has."""
        return bool(self.leading & self.bit[name])


def _update(view: GraphView, order: _Order, writes: Sequence[NodeView]) -> _Update | None:
    """The writes to a variable with its reads; None where they have to stay."""
    handle, device = writes[0].inputs[0], writes[0].device
    names = {w.name for w in writes}
    touching = [view[name] for name, _, port in view.consumers(handle[0]) if port == handle[1]]
    touching = [n for n in touching if n.op != "VariableShape" and n.name not in names]
    dtype = view.dtype(writes[0].inputs[1])
    if not view[handle[0]].is_arg or dtype not in TYPES:
        return None
    if any(w.name in order.conditional or w.device != device or view[w.inputs[1][0]].device != device for w in writes):
        return None
    if any(n.op not in READERS or n.device != device or n.attr("dtype") != dtype or n.name in order.conditional
           for n in touching):
        return None
    chain = sorted(writes, key=lambda w: order.before[w.name].bit_count())
    before = [n for n in touching if order.is_before(n.name, chain[0].name)]
    after = [[n for n in touching if order.is_before(w.name, n.name)
              and (k + 1 == len(chain) or order.is_before(n.name, chain[k + 1].name))] for k, w in enumerate(chain)]
    if len(before) + sum(map(len, after)) != len(touching) \
            or any(order.acts_between(w.name, n.name) for w, reads in zip(chain, after, strict=True) for n in reads):
        return None  # a read at any time, or of what another name of the variable may have been used to write
    if not _follow_each_other(view, order, chain, after):
        return None
    if all(w.op in ARITHMETIC for w in chain):
        shape = variable_shape(view, handle, assume=False)
        if shape is None or None in shape or any(view.proven_shape(w.inputs[1]) != shape for w in chain):
            return None
        return _Update(chain, before, after, shape)
    if len(chain) > 1:
        return None
    kept = chain[0].attr(KEEPS) and next((c for c in chain[0].control_inputs if c in {n.name for n in before}), None)
    return _Update(chain, before, after, kept=kept or "") if kept or not chain[0].attr(KEEPS) else None


def _follow_each_other(view: GraphView, order: _Order, chain: Sequence[NodeView],
                       after: Sequence[Sequence[NodeView]]) -> bool:
    """Nothing with effects is between the writes, nor waits for any but the last of them, unless it is an end."""
    for k, (w, then) in enumerate(itertools.pairwise(chain)):
        if not order.is_before(w.name, then.name) or order.acts_between(w.name, then.name):
            return False
        known = {then.name, *(n.name for n in after[k])}
        for name in view.control_consumers(w.name):
            if name not in known and order.leads(name):
                return False
    return True


def _affordable(updates: Sequence[_Update]) -> list[_Update]:
    """Those that fit into ``MOST_BYTES``, smallest first; an AssignVariableOp has its value anyway."""
    total, left_out = 0, set()
    for u in sorted(updates, key=lambda u: u.bytes):
        total += u.bytes
        if total > MOST_BYTES:
            left_out.add(u.write.name)
    return [u for u in updates if u.write.name not in left_out]


@dataclass
class _Edit:
    """Makes the changed copy of a graph."""

    source: graph_pb2.GraphDef
    view: GraphView
    order: _Order
    updates: Sequence[_Update]
    made: list[node_def_pb2.NodeDef] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.taken = {n.name for n in self.source.node}
        self.by_name = {u.write.name: u for u in self.updates}
        self.earlier = {w.name: u for u in self.updates for w in u.writes[:-1]}
        # reads after a write, and after which one of its variable's
        self.forwarded = {n.name: (u, k) for u in self.updates for k, reads in enumerate(u.after) for n in reads}

    def graph(self) -> graph_pb2.GraphDef:
        for u in self.updates:
            self._value(u)
        waits = self._waits()
        commits = {g[0].write.name: g for g in self._groups(waits)}
        instead = {w.name: name for name, group in commits.items() for u in group for w in u.writes}
        out = graph_pb2.GraphDef()
        out.CopyFrom(self.source)
        del out.node[:]
        for node in (*self.source.node, *self.made):
            name = node.name
            if name in commits:
                node = self._commit(commits[name], waits)
            elif name in instead:
                node = node_def_pb2.NodeDef(name=name, op="NoOp", device=node.device, input=[f"^{instead[name]}"])
            elif name in self.forwarded:
                node = self._forward(node, *self.forwarded[name])
            out.node.append(self._waiting(node, () if name in instead else waits.get(name, ()), instead))
        return out

    # --- values -------------------------------------------------------------------------------------

    def _value(self, u: _Update) -> None:
        """Adds the nodes that compute a variable's new value."""
        first = u.writes[0]
        dtype, device = _type(first), first.device
        if first.op not in ARITHMETIC:
            u.values, read = [self.view.ref_text(first.inputs[1])], u.kept
            if not read:
                return
        else:
            waits = [f"^{c}" for c in first.control_inputs if self.view[c].op not in ASSERTIONS]  # the write waits
            read = u.before[0].name if u.before else self._add(
                "ReadVariableOp", f"{first.name}/read", [self.view.ref_text(first.inputs[0]), *waits], device, dtype)
            self._sum(u, read)
        # Both come from one op: a program that reads the variable by itself hands on what it read.
        both = node_def_pb2.NodeDef(name=free_name(f"{u.write.name}/both", self.taken), op="IdentityN",
                                    device=device, input=[u.value, read])
        both.attr["T"].list.type.extend([dtype, dtype])
        self.made.append(both)
        u.values[-1], u.read = both.name, f"{both.name}:1"

    def _sum(self, u: _Update, value: str) -> None:
        """Adds the nodes that compute what sums to a variable come to."""
        dtype, device = _type(u.write), u.write.device
        for write in u.writes:
            # Other shapes are an error, not a broadcast.  Shapes that are known may rest on there being no error.
            given = self.view.ref_text(write.inputs[1])
            delta = self._add("EnsureShape", f"{write.name}/delta", [given], device, dtype)
            self.made[-1].attr["shape"].shape.CopyFrom(tf.TensorShape(u.shape).as_proto())
            value = self._add(ARITHMETIC[write.op], f"{write.name}/value", [value, delta], device, dtype)
            u.values.append(value)

    def _add(self, op: str, name: str, inputs: Sequence[str], device: str, dtype: int) -> str:
        self.made.append(op_node(op, free_name(name, self.taken), inputs, device, dtype))
        return self.made[-1].name

    def _forward(self, node: node_def_pb2.NodeDef, u: _Update, number: int) -> node_def_pb2.NodeDef:
        """A read after a write: another name of the value then."""
        written = {f"^{w.name}" for w in u.writes}
        controls = [i for i in node.input if i.startswith("^") and i not in written]
        out = node_def_pb2.NodeDef(name=node.name, op="Identity", device=node.device,
                                   input=[u.values[number], *controls])
        out.attr["T"].CopyFrom(node.attr["dtype"])
        if "_output_shapes" in node.attr:
            out.attr["_output_shapes"].CopyFrom(node.attr["_output_shapes"])
        return out

    # --- order --------------------------------------------------------------------------------------

    def _waits(self) -> dict[str, list[str]]:
        """The writes that a node has to wait for now that a read, which it rests on, does not wait for them.

        That is what has effects or may see them, what waits for such a read by a control edge, and where loops and
        branches begin.
        """
        out: dict[str, list[str]] = {}
        behind: dict[str, dict[str, None]] = {}  # writes that a node rests on and does not wait for
        for n in self.view:
            found = {w: None for s in self._sources(n) for w in behind.get(s, ())
                     if not self.order.is_before(n.name, w)}
            if n.name in self.forwarded:
                found[self.forwarded[n.name][0].write.name] = None
            elif found and (not _is_pure(n) or n.op in CONTROL_FLOW or any(c in behind for c in n.control_inputs)):
                out[n.name], found = list(found), {}
            if found:
                behind[n.name] = found
        return out

    def _groups(self, waits: Mapping[str, Sequence[str]]) -> Iterator[list[_Update]]:
        """Writes that become one op: those of a device with nothing between them.

        A node's level counts the times that a path to it leaves the writes.  It never falls along an edge and grows
        where a path leaves them, so a path between two writes of one level meets nothing else.
        """
        level: dict[str, int] = {}
        groups: dict[tuple[str, int], list[_Update]] = {}
        for n in self.view:  # all new edges are between nodes that were in this order before
            sources = [s for s in (*self._sources(n), *waits.get(n.name, ())) if s in level]
            level[n.name] = max((level[s] + (s in self.by_name and n.name not in self.by_name) for s in sources),
                                default=0)
            if n.name in self.by_name:
                groups.setdefault((n.device, level[n.name]), []).append(self.by_name[n.name])
        yield from groups.values()

    def _sources(self, n: NodeView) -> list[str]:
        """What a node of the old graph waits for in the new one, the ops that compute new values looked through."""
        update, number = self.forwarded.get(n.name) or (self.by_name.get(n.name), -1)
        if update is None:
            return [*(r[0] for r in n.inputs), *n.control_inputs]
        writes = update.writes[:number + 1] if number >= 0 else update.writes
        names = {w.name for w in update.writes}
        of_value = [*(w.inputs[1][0] for w in writes), *([update.before[0].name] if update.before else ())]
        waited = [c for w in (n, *(writes if not update.before or number < 0 else ())) for c in w.control_inputs]
        return [*of_value, *dict.fromkeys(c for c in waited if c not in names)]

    def _waiting(self, node: node_def_pb2.NodeDef, more: Sequence[str], instead: Mapping[str, str]
                 ) -> node_def_pb2.NodeDef:
        """The node with what else it waits for; a write is its group's op."""
        out = node_def_pb2.NodeDef()
        out.CopyFrom(node)
        data = [i for i in node.input if not i.startswith("^")]
        controls = [i.removeprefix("^") for i in node.input if i.startswith("^")]
        del out.input[:]
        out.input.extend([*data, *dict.fromkeys(f"^{instead.get(c, c)}" for c in [*controls, *more]
                                                if instead.get(c, c) != node.name)])
        return out

    def _commit(self, group: Sequence[_Update], waits: Mapping[str, Iterable[str]]) -> node_def_pb2.NodeDef:
        inside = {w.name for u in group for w in u.writes}
        controls = dict.fromkeys(c for u in group for w in u.writes for c in (*w.control_inputs, *waits.get(w.name, ()))
                                 if c not in inside)
        updated = [k for k, u in enumerate(group) if u.read]
        node = node_def_pb2.NodeDef(name=group[0].write.name, op=OP, device=group[0].write.device, input=[
            *(self.view.ref_text(u.write.inputs[0]) for u in group), *(u.read for u in group if u.read),
            *(u.value for u in group), *(f"^{c}" for c in controls)])
        types = [_type(u.write) for u in group]
        node.attr["N"].i = len(group)
        node.attr["T"].list.type.extend(types)
        node.attr["Tread"].list.SetInParent()
        node.attr["Tread"].list.type.extend(types[k] for k in updated)
        node.attr["updated"].list.SetInParent()
        node.attr["updated"].list.i.extend(updated)
        node.attr["validate_shape"].list.b.extend(bool(u.write.attr("validate_shape")) for u in group)
        return node


def _type(write: NodeView) -> int:
    """The number of the variable's element type."""
    return tf.as_dtype(write.attr("dtype")).as_datatype_enum


def _is_pure(n: NodeView) -> bool:
    """False for what has effects or may see those of others."""
    return n.op in RET_OPS or not may_have_effects(n.op)
