"""Conditionals that TensorFlow has taken apart, put together again as StatelessIf nodes where both branches are cheap.

Where Grappler comes, a ``tf.cond`` is Switch nodes, the nodes of both branches, and Merge nodes.  A program cannot hold
a part of that: what a branch gives that is not taken is no tensor.  As one node it is like any other op
(:mod:`.lower.branches`), and the program's fallback decides as TensorFlow does.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from ..errors import ImportFailed
from ..ir.dtypes import DTYPES
from . import lower
from .bodies import add_functions, add_node, name_by_content
from .control import CONTROL_FLOW, Atom, Context, contexts_of, origin, predicate_name
from .edits import Edit, without_dead
from .importer import import_cluster
from .lower.branches import too_much
from .view import RET_OPS, GraphView, NodeView, Ref, may_have_effects

BRANCH_PREFIX = "tf_stitch_fallback_branch_"  # begins as fallbacks' names do: only they run it, and nothing changes it
READ = "ReadVariableOp"
MOST_TRIED = 32  # conditionals of a graph: shapes are inferred anew after each


def put_together(source: graph_pb2.GraphDef, view: GraphView, keep: Iterable[str],
                 stitches: Callable[[GraphView, NodeView], bool]) -> graph_pb2.GraphDef:
    """The same graph, or a copy in which conditionals whose branches may both be computed are StatelessIf nodes.

    Args:
      source: the graph; ``view`` is of it.
      keep: names of nodes that must still be there; others that nothing depends on may go.
      stitches: whether a node of a view may be part of a program.
    """
    refused, keep = set(keep), set(keep)
    for _ in range(MOST_TRIED if any(n.op == "Switch" for n in view) else 0):
        cond = next((c for c in _conds(view) if refused.isdisjoint(c.names) and _may_be_one(view, c)), None)
        if cond is None:
            break
        changed = _Writer(source, view, cond).graph()
        new = GraphView(changed)
        (node,) = (n for n in new if n.name not in view and n.op == "StatelessIf")
        if stitches(new, node) and _can_be_imported(new, node):
            source = without_dead(changed, new, keep)  # what only steered the branches
            view = GraphView(source)
        else:
            refused |= cond.names
    return source


def _can_be_imported(view: GraphView, node: NodeView) -> bool:
    outputs = [(node.name, k) for k in range(view.num_outputs(node.name))]
    try:
        import_cluster(view, [node.name], list(dict.fromkeys(node.inputs)), outputs)
    except ImportFailed:
        return False
    return True


# --- reading -----------------------------------------------------------------------------------------

@dataclass
class _Cond:
    """A conditional: its switches, what runs where the predicate is false and true, and where both join."""

    predicate: Ref
    switches: dict[str, NodeView] = field(default_factory=dict)
    branches: tuple[dict[str, NodeView], dict[str, NodeView]] = field(default_factory=lambda: ({}, {}))
    joins: dict[str, NodeView] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.switches, *self.branches[0], *self.branches[1], *self.joins}

    def side(self, ref: Ref) -> int | None:
        """The branch that a value is of."""
        if ref[0] in self.switches:
            return ref[1]
        return next((k for k in (0, 1) if ref[0] in self.branches[k]), None)

    def controls(self) -> dict[str, None]:
        """What the conditional waits for."""
        own, nodes = self.names, [*self.switches.values(), *itertools.chain(*(b.values() for b in self.branches)),
                                  *self.joins.values()]
        return dict.fromkeys(c for n in nodes for c in n.control_inputs if c not in own)


def _conds(view: GraphView) -> Iterator[_Cond]:
    """The conditionals of a graph: nodes that switches of one predicate lead to, as far as they hang together."""
    found = contexts_of(view)
    groups: dict[tuple[str, Context], list[NodeView]] = {}
    for n in view:
        if n.op == "Switch" and view[n.inputs[1][0]].op != "LoopCond":
            groups.setdefault((predicate_name(n, view.nodes), found[n.name]), []).append(n)
    for (predicate, outer), switches in groups.items():
        whole = _Cond(switches[0].inputs[1], {n.name: n for n in switches})
        for k in (0, 1):
            inside = Context(outer.frame, outer.alive | {Atom(predicate, k, outer.frame)})
            whole.branches[k].update((n.name, n) for n in view if found[n.name] == inside)
        whole.joins.update((n.name, n) for n in view if n.op == "Merge" and len(n.inputs) == 2
                           and {whole.side(ref) for ref in n.inputs} == {0, 1})
        yield from _parts(whole)


def guards(view: GraphView) -> Iterator[tuple[_Cond, set[str]]]:
    """Each conditional that only asserts something, and the nodes that those wait for who wait for it."""
    for cond in _conds(view):
        effects = {n.op for branch in cond.branches for n in branch.values() if may_have_effects(n.op)}
        ends = set(cond.joins)
        for name in cond.joins:  # the result, by another name, is only waited for
            ends.update(r for r, _, _ in view.consumers(name) if view[r].op == "Identity" and not view.consumers(r))
        if effects == {"Assert"} and all(r in ends for name in cond.joins for r, _, _ in view.consumers(name)):
            yield cond, ends


def _parts(whole: _Cond) -> Iterator[_Cond]:
    """The conditionals that have one predicate, each by itself."""
    owner = {name: name for name in whole.names}

    def root(name: str) -> str:
        while owner[name] != name:
            owner[name] = name = owner[owner[name]]
        return name

    for part in (*whole.branches, whole.joins):
        for n in part.values():
            for src in (*(s for s, _ in n.inputs), *n.control_inputs):
                # what a join gives is from outside for the next conditional
                if src in owner and src not in whole.joins:
                    owner[root(src)] = root(n.name)
    parts: dict[str, _Cond] = {}
    for pick in (lambda c: c.switches, lambda c: c.branches[0], lambda c: c.branches[1], lambda c: c.joins):
        for name, n in pick(whole).items():
            pick(parts.setdefault(root(name), _Cond(whole.predicate)))[name] = n
    yield from (p for p in parts.values() if p.joins)


def _may_be_one(view: GraphView, cond: _Cond) -> bool:
    """Whether nothing of a conditional has effects, takes long or is read elsewhere, and nothing waits for itself."""
    nodes = [n for branch in cond.branches for n in branch.values()]
    may_run = (n.op == READ or not may_have_effects(n.op) for n in nodes)
    if not any(map(view.consumers, cond.joins)) or not all(may_run) or any(
            n.op in CONTROL_FLOW | RET_OPS or n.proto is None for n in nodes):
        return False
    if any(n.op == READ and not _is_initialized(view, n) for n in nodes):
        return False
    own = cond.names
    for n in (*cond.switches.values(), *nodes):
        for reader, _, port in view.consumers(n.name):
            if reader not in cond.joins and cond.side((reader, 0)) != cond.side((n.name, port)):
                return False
        if not own.issuperset(view.control_consumers(n.name)):
            return False
    if any(port or view.dtype((n.name, 0)) not in DTYPES for n in cond.joins.values()
           for _, _, port in view.consumers(n.name)):
        return False
    values = [r for n in (*nodes, *cond.joins.values()) if n.op != READ for r in n.inputs]
    if any(view.dtype(r) not in DTYPES for r in values):
        return False
    dear = (too_much(view, [n for n in branch.values() if n.op not in (READ, "NoOp", "Const")])
            for branch in cond.branches)
    return not any(dear) and not _reaches(view, cond.joins, cond)


def _is_initialized(view: GraphView, read: NodeView) -> bool:
    """False for a variable that the graph itself asks whether it holds something."""
    handle = origin(view, read.inputs[0])
    return all(view[r].op != "VarIsInitializedOp" for r, _, _ in view.consumers(handle[0]))


def _reaches(view: GraphView, start: Iterable[str], cond: _Cond) -> bool:
    """Whether something outside leads from a conditional's results back to it."""
    own = cond.names
    stack, seen = [r for n in start for r in view.readers(n) if r not in cond.joins], set(cond.joins)
    while stack:
        name = stack.pop()
        if name in own:
            return True
        if name not in seen and view[name].op not in ("NextIteration", "RefNextIteration"):
            seen.add(name)
            stack.extend(view.readers(name))
    return False


# --- writing -----------------------------------------------------------------------------------------

class _Writer:
    """Makes one node of a conditional."""

    def __init__(self, source: graph_pb2.GraphDef, view: GraphView, cond: _Cond):
        self.edit, self.view, self.cond = Edit(source, view), view, cond
        self.controls = cond.controls()
        self.args: dict[Ref, str] = {}
        self.outside: dict[str, Ref] = {}  # what of a branch is computed outside: reads, and constants that are tensors

    def graph(self) -> graph_pb2.GraphDef:
        view = self.view
        joins = [n for n in self.cond.joins.values() if view.consumers(n.name)]  # others are only waited for
        results = [[next(r for r in n.inputs if self.cond.side(r) == k) for n in joins] for k in (1, 0)]
        parts = [self._live(ends) for ends in results]
        for ref in (r for nodes, ends in zip(parts, results, strict=True)
                    for r in itertools.chain(*(n.inputs for n in nodes), ends)):
            outer = self._outer(ref)
            if outer is not None:
                self.args.setdefault(outer, f"arg_{len(self.args)}")
        bodies = [self._body(nodes, ends) for nodes, ends in zip(parts, results, strict=True)]
        node = node_def_pb2.NodeDef(op="StatelessIf", device=joins[0].device)
        types = [view.dtype((n.name, 0)) for n in joins]
        node.attr["Tcond"].type = tf.bool.as_datatype_enum
        node.attr["Tin"].list.SetInParent()
        node.attr["Tin"].list.type.extend(tf.as_dtype(self.edit.dtype(r)).as_datatype_enum for r in self.args)
        node.attr["Tout"].list.type.extend(tf.as_dtype(t).as_datatype_enum for t in types)
        node.attr["output_shapes"].list.shape.extend(
            tf.TensorShape(view.proven_shape((n.name, 0))).as_proto() for n in joins)
        for attr, body in zip(lower.branches.BRANCHES, bodies, strict=True):
            node.attr[attr].func.name = body.signature.name
        name = self.edit.add(node, f"{joins[0].name}/both", types, [self.cond.predicate, *self.args], self.controls)
        self.edit.instead.update(((n.name, 0), (name, k)) for k, n in enumerate(joins))
        self.edit.waits.update(dict.fromkeys(self.cond.names, (name,)))
        out = self.edit.graph()
        assert isinstance(out, graph_pb2.GraphDef)
        add_functions(out, bodies)
        return out

    def _live(self, ends: Iterable[Ref]) -> list[NodeView]:
        """The nodes of a branch that its results depend on."""
        live: set[str] = set()
        stack = list(ends)
        while stack:
            ref = stack.pop()
            if ref[0] not in live and self._outer(ref) is None:
                live.add(ref[0])
                stack.extend(self.view[ref[0]].inputs)
        return [n for n in self.view if n.name in live]

    def _outer(self, ref: Ref) -> Ref | None:
        """What a branch reads from outside for a value; None for what it computes itself."""
        n = self.view[ref[0]]
        if ref[0] in self.cond.switches:
            return n.inputs[0]
        if self.cond.side(ref) is None:
            return ref
        if n.op != READ and (n.op != "Const" or lower.is_literal(self.view, n)):
            return None
        if n.name not in self.outside:
            assert n.proto is not None and n.outputs is not None
            copy = node_def_pb2.NodeDef()
            copy.CopyFrom(n.proto)
            inputs = [self._outer(r) or r for r in n.inputs]
            self.outside[n.name] = self.edit.add(copy, f"{n.name}/before", n.outputs, inputs, self.controls), 0
        return self.outside[n.name]

    def _text(self, ref: Ref) -> str:
        outer = self._outer(ref)
        return self.view.body_text(ref) if outer is None else self.args[outer]

    def _body(self, nodes: Iterable[NodeView], ends: Iterable[Ref]) -> function_pb2.FunctionDef:
        fdef, ends = function_pb2.FunctionDef(), list(ends)
        for ref, name in self.args.items():
            fdef.signature.input_arg.add(name=name, type=tf.as_dtype(self.edit.dtype(ref)).as_datatype_enum)
        for n in nodes:
            add_node(fdef, n, map(self._text, n.inputs), n.device)
        for k, ref in enumerate(ends):
            fdef.signature.output_arg.add(name=f"out_{k}", type=tf.as_dtype(self.view.dtype(ref)).as_datatype_enum)
            fdef.ret[f"out_{k}"] = self._text(ref)
        name_by_content(fdef, BRANCH_PREFIX)
        return fdef
