"""Assertions put together: one op that does nothing where all of them hold.

    Switch, Assert, Merge ... of each    ->    StitchedGuard(holds1 and holds2 ..., what their messages show)

On a GPU the host waits for each condition, and hands over what each message may show; an executor runs ten nodes for
each.  The conditions become one, which programs compute with everything else; StitchedGuard (custom_ops/guard_op.cc)
reads it once, and runs TensorFlow's own nodes, as a function, only where it does not hold: they raise the error.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from . import devices
from .bodies import add_functions, add_node, name_by_content
from .clusters import SHAPE_OPS
from .conditionals import guards
from .control import contexts_of
from .edits import Edit, op_node, without_dead
from .lower import SYMBOLIC
from .view import GraphView, NodeView, Ref, reached

OP = "StitchedGuard"
PREFIX = "tf_stitch_fallback_guard_"  # begins as fallbacks' names do: only they run it, and nothing changes it
UNCOPIED = frozenset({"resource", "variant"})


@dataclass(frozen=True)
class _Guard:
    """An assertion.

    Attributes:
      condition: what must hold.
      nodes: its own nodes, in order.
      ends: those of them that others wait for.
      copies: constants and sizes that they read, computed again where the assertion fails.
    """

    condition: Ref
    nodes: tuple[NodeView, ...]
    ends: frozenset[str]
    copies: tuple[NodeView, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(n.name for n in self.nodes)

    @property
    def outside(self) -> list[Ref]:
        """What it reads."""
        own = self.names.union(n.name for n in self.copies)
        return [r for n in (*self.copies, *self.nodes) for r in n.inputs if r[0] not in own]


def joined(source: graph_pb2.GraphDef, view: GraphView, keep: Iterable[str], run: Iterable[str],
           stitches: Callable[[NodeView], bool]) -> graph_pb2.GraphDef:
    """The same graph, or a copy in which the assertions of each device are one op.

    Args:
      source: the graph; ``view`` is of it.
      keep: names of nodes that must still be there.
      run: names of nodes that must have run: a NoOp is in place of those that go.
      stitches: whether a node may be part of a program: what decides about an assertion has to be.
    """
    keep, run = set(keep), set(run)
    places: dict[str, list[_Guard]] = {}
    for guard in _guards(view):
        if keep.isdisjoint(guard.names) and stitches(view[guard.condition[0]]) and _may_move(view, guard, run):
            places.setdefault(devices.home(view, view[guard.condition[0]]), []).append(guard)
    if not places:
        return source
    edit, made = Edit(source, view), []
    for device, found in places.items():
        found = _without_cycles(view, found)
        body, args = _function(view, found)
        made.append(body)
        _add(edit, device, found, body, args, stitches)
    out = edit.graph(run)
    assert isinstance(out, graph_pb2.GraphDef)
    add_functions(out, made)
    return without_dead(out, GraphView(out), keep | run)


# --- reading -----------------------------------------------------------------------------------------

def _guards(view: GraphView) -> Iterator[_Guard]:
    """Assertions that run in any case, and conditionals that do nothing but assert."""
    found = contexts_of(view)
    for cond, ends in guards(view):
        if all(found[name].is_root for name in cond.switches):
            own = cond.names | ends
            yield _guard(view, cond.predicate, [n for n in view if n.name in own], ends)
    for n in view:
        if n.op == "Assert" and found[n.name].is_root:
            yield _guard(view, n.inputs[0], [n], {n.name})


def _guard(view: GraphView, condition: Ref, nodes: list[NodeView], ends: set[str]) -> _Guard:
    own = {n.name for n in nodes}
    copies: dict[str, NodeView] = {}
    _find_copies(view, [r[0] for n in nodes for r in n.inputs if r[0] not in own], copies)
    return _Guard(condition, tuple(nodes), frozenset(ends), tuple(n for n in view if n.name in copies))


def _find_copies(view: GraphView, names: Iterable[str], found: dict[str, NodeView]) -> None:
    """Adds those of ``names``, and of what they read, that are constants or follow from shapes.

    Each is asked once: there may be as many ways to one as there are paths of a graph.
    """
    seen: set[str] = set()
    stack = list(names)
    while stack:
        n = view[stack[-1]]
        made = n.op == "Const" or n.op in SHAPE_OPS
        sources = {src for src, _ in n.inputs} if n.op in SYMBOLIC and not made else set()
        if n.name not in seen:  # once more when all that it reads has been asked
            seen.add(n.name)
            stack.extend(sources - seen)
            continue
        stack.pop()
        if made or (sources and found.keys() >= sources):
            found[n.name] = n


def _may_move(view: GraphView, guard: _Guard, run: set[str]) -> bool:
    """Whether nothing but its ends is seen from outside, and it is sure to run."""
    own = guard.names
    if not any(r in run for name in guard.ends for r in (name, *view.control_consumers(name))):
        return False
    for name in own:
        if any(r not in own for r, _, _ in view.consumers(name)):
            return False
        if name not in guard.ends and (name in run or not own.issuperset(view.control_consumers(name))):
            return False
    return all(view.dtype(r) not in UNCOPIED for r in guard.outside) and view.shape(guard.condition) == ()


def _without_cycles(view: GraphView, found: list[_Guard]) -> list[_Guard]:
    """Those that can be checked at one time: none needs what waits for another one, other than by itself."""
    place = {name: i for i, name in enumerate(view.nodes)}
    kept: list[_Guard] = []
    names: set[str] = set()
    after: set[str] = set()
    for guard in sorted(found, key=lambda g: max(place[name] for name in g.names)):
        direct = {*(r[0] for r in guard.outside), *_controls(view, guard)} - names
        needs = reached(direct, lambda name: (*(r[0] for r in view[name].inputs), *view[name].control_inputs))
        if needs.isdisjoint(after):
            kept.append(guard)
            names |= guard.names
            after = (after | reached(guard.ends, view.readers)) - names
    return kept


def _controls(view: GraphView, guard: _Guard) -> list[str]:
    """What it waits for; NoOps stand for what they wait for."""
    found: dict[str, None] = {}
    stack = [c for n in guard.nodes for c in n.control_inputs]
    while stack:
        name = stack.pop()
        if view[name].op == "NoOp":
            stack.extend(view[name].control_inputs)
        elif name not in guard.names:
            found[name] = None
    return list(found)


# --- writing -----------------------------------------------------------------------------------------

def _function(view: GraphView, found: Iterable[_Guard]) -> tuple[function_pb2.FunctionDef, list[Ref]]:
    """The nodes of assertions as a function of a condition, which it ignores, and of what they read."""
    fdef = function_pb2.FunctionDef()
    args: dict[Ref, str] = {}
    fdef.signature.input_arg.add(name="holds", type=tf.bool.as_datatype_enum)
    inside = {name for guard in found for name in guard.names}
    for guard in found:
        for ref in guard.outside:
            args.setdefault(ref, f"arg_{len(args)}")
    for ref, name in args.items():
        fdef.signature.input_arg.add(name=name, type=tf.as_dtype(view.dtype(ref)).as_datatype_enum)
    nodes = {n: None for guard in found for n in (*guard.copies, *guard.nodes)}
    for n in nodes:
        controls = [f"^{c}" for c in n.control_inputs if c in inside]
        add_node(fdef, n, [*(args.get(r) or view.body_text(r) for r in n.inputs), *controls])
    for end in sorted(name for guard in found for name in guard.ends):
        fdef.control_ret[end] = end
        fdef.signature.control_output.append(end)
    fdef.signature.is_stateful = True
    name_by_content(fdef, PREFIX)
    return fdef, list(args)


def _add(edit: Edit, device: str, found: Iterable[_Guard], body: function_pb2.FunctionDef, args: list[Ref],
         stitches: Callable[[NodeView], bool]) -> None:
    """The op in place of the assertions, and its condition."""
    view = edit.view
    conditions = list(dict.fromkeys(guard.condition for guard in found))
    holds = conditions[0]
    for other in conditions[1:]:
        holds = edit.add(op_node("LogicalAnd", "", [], device), f"{holds[0]}/all", ["bool"], [holds, other]), 0
    node = node_def_pb2.NodeDef(op=OP, device=device)
    node.attr["Tin"].list.SetInParent()
    node.attr["Tin"].list.type.extend(tf.as_dtype(view.dtype(r)).as_datatype_enum for r in args)
    node.attr["fallback"].func.name = body.signature.name
    # what TensorFlow's ops give of these types lies on the host
    host = [1 + i for i, r in enumerate(args) if view.dtype(r) in devices.HOST_INTEGERS and not stitches(view[r[0]])]
    if host:
        node.attr["_input_hostmem"].list.i.extend(host)
    inside = {name for guard in found for name in guard.names}
    controls = {c: None for guard in found for c in _controls(view, guard) if c not in inside}
    name = edit.add(node, f"{conditions[0][0]}/guard", [], [holds, *args], controls)
    for guard in found:
        edit.waits.update(dict.fromkeys(guard.names, (name,)))
