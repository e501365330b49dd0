"""Branches that only compute and write to variables, written out: both are computed, and what is written is selected.

A ``tf.cond`` keeps apart what is before it, in it and behind it, the host waits for its condition, and its writes to
variables are ops of their own: one of each variable, where an optimizer's step is in a branch (Keras'
LossScaleOptimizer: "are all gradients finite?").  On a GPU,

    if p: v.assign_add(d)       ->    read = v;  AssignVariableOp(v, p ? read + d : read)

and the arithmetic joins what is around it; graph/updates.py then makes one op of all writes.  That is done where

* all ops of both branches are elementwise or reductions, which cannot fail, of static shapes, and reads and writes of
  variables whose shapes fit: nothing else happens in a branch that is not taken;
* what the branches read and write has no more than ``MOST_BYTES``: so much is moved each time.

Several writes of branches to a variable are one.  It is marked (``KEEPS``): where no branch writes, it keeps the value
of the read that it waits for first.  If another thread wrote since, what the branch changed is added
(custom_ops/assign_op.cc).
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from ..ir.dtypes import DTYPES
from .control import CONTROL_FLOW, MERGE, SWITCH, Atom, Flow, contexts, origin, predicate_name
from .edits import op_node
from .shapes import variable_shape
from .variables import free_name
from .view import GraphView, NodeView, Ref, may_have_effects

KEEPS = "_tf_stitch_keeps"
MOST_BYTES = 128 << 20
READERS = frozenset({"ReadVariableOp"})
SUMS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
WRITERS = frozenset({*SUMS, "AssignVariableOp"})
HARMLESS = frozenset({
    "Abs", "Add", "AddN", "AddV2", "All", "Any", "BroadcastTo", "Cast", "Ceil", "Const", "DivNoNan", "Equal", "Erf",
    "Exp", "ExpandDims", "Expm1", "Fill", "Floor", "Greater", "GreaterEqual", "Identity", "IsFinite", "IsInf", "IsNan",
    "L2Loss", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Max", "Maximum", "Mean",
    "Min", "Minimum", "Mul", "MulNoNan", "Neg", "NoOp", "NotEqual", "OnesLike", "Pow", "RealDiv", "Reciprocal", "Relu",
    "Reshape", "Round", "Rsqrt", "Select", "SelectV2", "Sigmoid", "Sign", "Sqrt", "Square", "SquaredDifference",
    "Squeeze", "StopGradient", "Sub", "Sum", "Tanh", "Transpose", "Xdivy", "Xlogy", "ZerosLike"})
FAIL_ON_INTEGERS = frozenset({"Pow", "Reciprocal"})
Alive = frozenset[Atom]


def written_out(source: graph_pb2.GraphDef, view: GraphView, keep: Iterable[str]) -> graph_pb2.GraphDef:
    """The same graph, or a copy in which such branches are plain ops.

    ``keep`` names nodes that must still be there.
    """
    if not any(n.op in SWITCH for n in view) or any(n.op in CONTROL_FLOW - SWITCH - MERGE for n in view):
        return source
    graph = _Graph(view)
    groups: list[_Group] = []
    for g in _groups(graph):
        if _Check(graph, g, frozenset(keep), groups).is_good():
            groups.append(g)
    return _Edit(source, graph, groups).graph() if groups else source


class _Graph:
    """What is asked of a graph.

    Attributes:
      alive: the conditions under which each node runs.
    """

    def __init__(self, view: GraphView):
        self.view = view
        self.alive = conditions(view)
        self.bit, self.before = run_before(view)

    def is_before(self, first: NodeView, then: NodeView) -> bool:
        return bool(self.before[then.name] & self.bit[first.name])

    def alive_through(self, ref: Ref) -> Alive:
        """The conditions under which a value is there."""
        n = self.view[ref[0]]
        if n.op not in SWITCH:
            return self.alive[n.name]
        return self.alive[n.name] | {Atom(predicate_name(n, self.view.nodes), ref[1], ())}

    def data(self, ref: Ref) -> Ref:
        """What a value is, outside of switches and names."""
        return origin(self.view, ref)

    def variable(self, n: NodeView) -> Ref | None:
        """The one that a node reads or writes."""
        return self.data(n.inputs[0]) if n.op in READERS | WRITERS else None

    def acting_before(self, group: _Group, handle: Ref) -> list[NodeView]:
        """What reads or may write a variable before a group's nodes do, and is none of them."""
        inside = {n.name for n in (*group.inside, *group.switches)}
        earlier = functools.reduce(operator.or_, (self.before[n.name] for n in group.inside
                                                  if self.variable(n) == handle))
        return [n for n in self.view if earlier & self.bit[n.name] and n.name not in inside and self._acts(n, handle)]

    def _acts(self, n: NodeView, handle: Ref) -> bool:
        if n.op in READERS | WRITERS:
            return self.variable(n) == handle
        return n.op not in CONTROL_FLOW | {"NoOp"} and not n.is_arg and may_have_effects(n.op)


def conditions(view: GraphView) -> dict[str, Alive]:
    """The conditions under which each node of a graph without loops runs."""
    # Whether what a merge waits for has run says nothing about whether the merge does.
    flows = (Flow(n.name, n.op, n.inputs, () if n.op in MERGE else n.control_inputs) for n in view)
    return {name: c.alive for name, c in contexts(flows, {n.name: n.op for n in view}).items()}


def run_before(view: GraphView) -> tuple[dict[str, int], dict[str, int]]:
    """A bit for each node of a graph without loops, and the bits of all nodes that run before it."""
    bit = {n.name: 1 << k for k, n in enumerate(view)}
    before: dict[str, int] = {}
    for n in view:
        sources = [*(name for name, _ in n.inputs), *n.control_inputs]
        before[n.name] = functools.reduce(operator.or_, (before[s] | bit[s] for s in sources), 0)
    return bit, before


def _are_exclusive(a: Alive, b: Alive) -> bool:
    """Whether never both are alive."""
    return any(x.source == y.source and x.branch != y.branch for x in a for y in b)


@dataclass
class _Group:
    """Branches that are inside of each other, or of one condition."""

    inside: list[NodeView] = field(default_factory=list)  # nodes of branches, in order
    merges: list[NodeView] = field(default_factory=list)  # where the outermost branches end
    switches: list[NodeView] = field(default_factory=list)


def _groups(graph: _Graph) -> list[_Group]:
    together: list[set[str]] = []
    for atoms in {a for a in graph.alive.values() if a}:
        joined = {a.source for a in atoms}
        apart = []
        for other in together:
            if joined.isdisjoint(other):
                apart.append(other)
            else:
                joined |= other
        together = [*apart, joined]
    of: dict[str, _Group] = {}
    for sources in together:
        of.update(dict.fromkeys(sources, _Group()))
    for n in graph.view:
        if n.op in SWITCH:
            predicate = predicate_name(n, graph.view.nodes)
            if predicate in of:  # else nobody reads what it gives
                of[predicate].switches.append(n)
        elif graph.alive[n.name]:
            of[next(iter(graph.alive[n.name])).source].inside.append(n)
        elif n.op in MERGE:
            ended = {a.source for ref in n.inputs for a in graph.alive_through(ref)}
            for g in {id(of[s]): of[s] for s in ended}.values():
                g.merges.append(n)
    found = {id(g): g for g in of.values() if g.switches}.values()
    return sorted(found, key=lambda g: min(graph.bit[n.name] for n in g.switches))


@dataclass
class _Check:
    """Says whether branches can be written out."""

    graph: _Graph
    group: _Group
    keep: frozenset[str]
    others: list[_Group]  # that come before and are written out

    def is_good(self) -> bool:
        g = self.group
        ends = [*g.merges, *(n for n in g.inside if n.op in MERGE)]
        variables = {v for n in g.inside if (v := self.graph.variable(n)) is not None}
        return (bool(g.merges) and self._is_one_place() and all(map(self._is_switch_good, g.switches))
                and all(map(self._is_end_good, ends)) and all(map(self._is_node_good, g.inside))
                and all(map(self._is_variable_good, variables)) and self._bytes() <= MOST_BYTES)

    def _is_one_place(self) -> bool:
        """No branch of a condition begins behind the end of another one's."""
        return not any(self.graph.is_before(end, begin) for end in self.group.merges for begin in self.group.switches)

    def _is_switch_good(self, n: NodeView) -> bool:
        return n.op == "Switch" and n.name not in self.keep and self._is_place_good(n)

    def _is_place_good(self, n: NodeView) -> bool:
        alive = self.graph.alive[n.name]
        return all(a.branch in (0, 1) and not a.frame for a in alive) and not _are_exclusive(alive, alive)

    def _is_end_good(self, n: NodeView) -> bool:
        view = self.graph.view
        read = view.consumers(n.name)
        if n.op != "Merge" or len(n.inputs) != 2 or any(port for _, _, port in read):
            return False
        a, b = map(self.graph.alive_through, n.inputs)
        shapes = {view.proven_shape(ref) for ref in n.inputs}
        return not read or (len(a ^ b) == 2 and _are_exclusive(a, b) and len(shapes) == 1
                            and _is_static(shapes.pop()) and view.dtype((n.name, 0)) in DTYPES)

    def _is_node_good(self, n: NodeView) -> bool:
        if not self._is_place_good(n):
            return False
        if n.op in READERS | WRITERS | MERGE:
            return n.op in READERS or n.name not in self.keep
        if n.op not in HARMLESS:
            return False
        outputs = [(n.name, port) for port in range(self.graph.view.num_outputs(n.name))]
        types = [self.graph.view.dtype(ref) for ref in outputs]
        if types == ["resource"]:
            return n.op == "Identity" and n.name not in self.keep
        if any(t not in DTYPES for t in types) or (n.op in FAIL_ON_INTEGERS and not DTYPES[types[0]].is_float):
            return False
        return all(self._size(ref) <= MOST_BYTES for ref in outputs)

    def _is_variable_good(self, handle: Ref) -> bool:
        """Its reads and writes have an order, and what is written has its type and shape."""
        view, shape = self.graph.view, variable_shape(self.graph.view, handle, assume=False)
        nodes = [n for n in self.group.inside if self.graph.variable(n) == handle]
        writes = [n for n in nodes if n.op in WRITERS]
        types = {n.attr("dtype") for n in nodes} | {view.dtype(w.inputs[1]) for w in writes}
        if not view[handle[0]].is_arg or not _is_static(shape) or len(types) != 1 or not types <= DTYPES.keys():
            return False
        if any(view.proven_shape(w.inputs[1]) != shape for w in writes) or len({n.device for n in nodes}) != 1:
            return False
        plain = {n.name for g in self.others for n in g.inside}
        if any(self.graph.alive[n.name] and n.name not in plain for n in self.graph.acting_before(self.group, handle)):
            return False  # nobody can wait for what may not run
        return all(n is w or self.graph.is_before(n, w) or self.graph.is_before(w, n)
                   or _are_exclusive(self.graph.alive[n.name], self.graph.alive[w.name]) for n in nodes for w in writes)

    def _bytes(self) -> int:
        """Of what comes into the branches."""
        return sum(map(self._size, {self.graph.data(n.inputs[0]) for n in self.group.switches}))

    def _size(self, ref: Ref) -> int:
        """The bytes of a value or of a variable; more than can be where they are not known."""
        view = self.graph.view
        dtype, shape = view.dtype(ref), view.proven_shape(ref)
        if dtype == "resource":
            types = {n.attr("dtype") for n in self.group.inside if self.graph.variable(n) == ref}
            dtype, shape = next(iter(types), "bool"), variable_shape(view, ref, assume=False) if types else ()
        known = shape is not None and None not in shape and dtype in DTYPES
        return DTYPES[dtype].size * math.prod(d or 0 for d in shape or ()) if known else MOST_BYTES + 1


def _is_static(shape: tuple[int | None, ...] | None) -> bool:
    return shape is not None and None not in shape


@dataclass
class _Edit:
    """Makes the changed copy of a graph."""

    source: graph_pb2.GraphDef
    facts: _Graph
    groups: list[_Group]
    made: list[node_def_pb2.NodeDef] = field(default_factory=list)
    instead: dict[Ref, str] = field(default_factory=dict)
    nodes: dict[str, node_def_pb2.NodeDef | None] = field(default_factory=dict)  # what becomes of a node; None: it goes
    known: dict[tuple[Alive, str], str] = field(default_factory=dict)            # conditions that are nodes

    def __post_init__(self) -> None:
        self.view, self.alive = self.facts.view, self.facts.alive
        self.taken = {n.name for n in self.source.node}

    def graph(self) -> graph_pb2.GraphDef:
        for g in self.groups:
            self._write_out(g)
        out = graph_pb2.GraphDef()
        out.CopyFrom(self.source)
        del out.node[:]
        for node in self.source.node:
            changed = self.nodes[node.name] if node.name in self.nodes else self._rewired(node)
            if changed is not None:
                out.node.append(changed)
        out.node.extend(self.made)
        return out

    def _rewired(self, node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        seen = self.view[node.name]
        gone = [c for c in seen.control_inputs if c in self.nodes and self.nodes[c] is None]
        if not gone and not any(r in self.instead for r in seen.inputs):
            return node
        out = node_def_pb2.NodeDef()
        out.CopyFrom(node)
        out.input[:] = [*map(self.text, seen.inputs), *(f"^{c}" for c in seen.control_inputs if c not in gone)]
        return out

    def text(self, ref: Ref) -> str:
        """How a value is written as an input."""
        n = self.view[ref[0]]
        while n.op in SWITCH and n.name in self.nodes:
            ref = n.inputs[0]
            n = self.view[ref[0]]
        return self.instead.get(ref) or self.view.ref_text(ref)

    def _write_out(self, g: _Group) -> None:
        for n in g.switches:
            self.nodes[n.name] = None
        touched = dict.fromkeys(v for n in g.inside if (v := self.facts.variable(n)) is not None)
        variables = {v: _Variable(self, g, v) for v in touched}
        for n in g.inside:
            variable = self.facts.variable(n)
            if variable is not None:
                variables[variable].meet(n)
            elif n.op in MERGE:
                self._select(n, ())
            elif n.op != "NoOp":
                self.nodes[n.name] = None if self.view.dtype((n.name, 0)) == "resource" else self._copy(n)
        finals = [w for v in variables.values() if (w := v.write()) is not None]
        for n in g.merges:
            self._select(n, finals)

    def _copy(self, n: NodeView) -> node_def_pb2.NodeDef:
        """A node that now runs always, and waits for nothing but what it reads."""
        assert n.proto is not None
        out = node_def_pb2.NodeDef()
        out.CopyFrom(n.proto)
        out.input[:] = [self.text(r) for r in n.inputs]
        out.attr.pop("_class", None)
        return out

    def _select(self, n: NodeView, waits: Iterable[str]) -> None:
        """The end of a branch."""
        controls = [f"^{w}" for w in waits]
        if not self.view.consumers(n.name):
            self.nodes[n.name] = node_def_pb2.NodeDef(name=n.name, op="NoOp", device=n.device, input=controls)
            return
        a, b = map(self.facts.alive_through, n.inputs)
        atom, = a - b
        taken, other = n.inputs if atom.branch else n.inputs[::-1]
        inputs = [self._literal(Atom(atom.source, 1, ()), n.device), self.text(taken), self.text(other), *controls]
        dtype = tf.as_dtype(self.view.dtype((n.name, 0))).as_datatype_enum
        self.nodes[n.name] = op_node("SelectV2", n.name, inputs, n.device, dtype)

    # --- new nodes ----------------------------------------------------------------------------------

    def add(self, op: str, name: str, inputs: list[str], device: str, dtype: int | None = None) -> str:
        self.made.append(op_node(op, free_name(name, self.taken), inputs, device, dtype))
        return self.made[-1].name

    def condition(self, alive: Alive, device: str) -> str:
        """The input that says whether all of these hold."""
        if len(alive) == 1:
            return self._literal(next(iter(alive)), device)
        if (alive, device) not in self.known:
            first = min(alive, key=lambda a: (a.source, a.branch))
            both = [self.condition(alive - {first}, device), self._literal(first, device)]
            self.known[alive, device] = self.add("LogicalAnd", "taken", both, device)
        return self.known[alive, device]

    def _literal(self, atom: Atom, device: str) -> str:
        name, port = atom.source.rsplit(":", 1)
        holds = self.text((name, int(port)))
        key = frozenset({atom}), device
        if atom.branch == 0 and key not in self.known:
            self.known[key] = self.add("LogicalNot", f"{name}/not", [holds], device)
        return holds if atom.branch else self.known[key]


class _Variable:
    """The reads and writes of a variable in branches."""

    def __init__(self, edit: _Edit, group: _Group, handle: Ref):
        self.edit, self.facts, self.handle = edit, edit.facts, handle
        touching = [n for n in group.inside if self.facts.variable(n) == handle]
        self.device = touching[0].device
        self.dtype = tf.as_dtype(touching[0].attr("dtype")).as_datatype_enum
        self.text = edit.view.ref_text(handle)
        before = self.facts.acting_before(group, handle)
        self.waits = self._waits(before)
        self.read = edit.add("ReadVariableOp", f"{touching[0].name}/outside", [
            self.text, *self._waits(n for n in before if n.op not in READERS)], self.device, self.dtype)
        self.written: list[tuple[NodeView, str]] = []  # writes, and the variable's value behind each

    def _waits(self, nodes: Iterable[NodeView]) -> list[str]:
        """Inputs that wait for nodes: for those of branches before, at the ends of these, which wait for all writes."""
        names: dict[str, None] = {}
        for n in nodes:
            group = next((g for g in self.edit.groups if n in g.inside), None)
            ends = [n] if group is None else [m for m in group.merges if self.facts.is_before(n, m)]
            names.update(dict.fromkeys(f"^{m.name}" for m in ends))
        return list(names)

    def meet(self, n: NodeView) -> None:
        """Gives a read its value, or notes what a write writes; nodes come in order."""
        now = self._value(n)
        if n.op in READERS:
            self.edit.instead[n.name, 0] = now
            self.edit.nodes[n.name] = op_node("Identity", n.name, [now], n.device, self.dtype)
            return
        given = self.edit.text(n.inputs[1])
        if n.op in SUMS:
            given = self.edit.add(SUMS[n.op], f"{n.name}/value", [now, given], n.device, self.dtype)
        self.written.append((n, given))
        self.edit.nodes[n.name] = None

    def _value(self, n: NodeView | None) -> str:
        """The variable's value where a node is; behind all branches for None."""
        value, here = self.read, frozenset[Atom]() if n is None else self.facts.alive[n.name]
        for write, new in self.written:
            if n is None or self.facts.is_before(write, n):
                rest = self.facts.alive[write.name] - here
                value = new if not rest else self.edit.add(
                    "SelectV2", f"{write.name}/kept", [self.edit.condition(rest, self.device), new, value],
                    self.device, self.dtype)
        return value

    def write(self) -> str | None:
        """Makes the one write, which waits for the read first; None where nothing is written."""
        if not self.written:
            return None
        inputs = [self.text, self._value(None), f"^{self.read}", *self.waits]
        name = self.edit.add("AssignVariableOp", f"{self.written[-1][0].name}/all", inputs, self.device, self.dtype)
        self.edit.made[-1].attr["validate_shape"].b = True
        self.edit.made[-1].attr[KEEPS].b = True
        return name
