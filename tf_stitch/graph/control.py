"""Where a node runs: the while frame it is in and the control-flow branches that must be taken for it to run.

TensorFlow's lowered control flow marks the tensors of a branch not taken as *dead*; an op with a dead
input does not run (Merge excepted).  One op may only replace ops that are dead or alive together, so a
cluster's members must have equal contexts.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .view import GraphView, NodeView, Ref

ENTER = frozenset({"Enter", "RefEnter"})
EXIT = frozenset({"Exit", "RefExit"})
MERGE = frozenset({"Merge", "RefMerge"})
NEXT = frozenset({"NextIteration", "RefNextIteration"})
SWITCH = frozenset({"Switch", "RefSwitch", "_SwitchN"})
CONTROL_FLOW = ENTER | EXIT | MERGE | NEXT | SWITCH | {"LoopCond"}

Frame = tuple[str, ...]


@dataclass(frozen=True)
class Atom:
    """A condition for being alive: ``branch`` of a switch on ``source``, or that ``source`` (a merge) is alive."""

    source: str
    branch: int
    frame: Frame


@dataclass(frozen=True)
class Context:
    """The while frames a node is inside of, outermost first, and the conditions under which it runs."""

    frame: Frame = ()
    alive: frozenset[Atom] = frozenset()

    @property
    def is_root(self) -> bool:
        """Outside every loop and branch."""
        return not self.frame and not self.alive


@dataclass(frozen=True)
class Flow:
    """What control flow needs to know of a node: its op, (name, port) inputs, control inputs, attributes."""

    name: str
    op: str
    inputs: tuple[tuple[str, int], ...]
    controls: tuple[str, ...]
    frame_name: str = ""  # of an Enter
    branches: int = 2     # of a Switch


def is_back_edge(source_op: str, target_op: str) -> bool:
    """True for the one kind of edge that closes a cycle: a loop variable's next value."""
    return source_op in NEXT and target_op in MERGE


def contexts(order: Iterable[Flow], ops: Mapping[str, str]) -> dict[str, Context]:
    """The context of each node.  ``order`` is topological when back edges are left out."""
    done: dict[str, Context] = {}
    flows: dict[str, Flow] = {}
    for node in order:
        flows[node.name] = node
        arriving = [_through(done[src], flows[src], port, flows) for src, port in node.inputs if src in done]
        controls = [done[src] for src in node.controls if src in done]
        if node.op in MERGE:
            done[node.name] = _merge(node, arriving, controls, ops)
        else:
            done[node.name] = _step(node, _all_of(arriving + controls))
    return done


def contexts_of(view: GraphView) -> dict[str, Context]:
    """The context of each node of a view."""
    flows = (Flow(n.name, n.op, n.inputs, n.control_inputs, n.attr("frame_name", "") if n.op in ENTER else "")
             for n in view)
    return contexts(flows, {n.name: n.op for n in view})


def _all_of(contexts_: list[Context]) -> Context:
    frame = max((c.frame for c in contexts_), key=len, default=())
    return Context(frame, frozenset().union(*(c.alive for c in contexts_)))


def _through(context: Context, source: Flow, port: int, flows: Mapping[str, Flow]) -> Context:
    """The context of the tensor ``source:port``: a switch's output is alive only when its branch is taken."""
    if source.op not in SWITCH:
        return context
    return Context(context.frame, context.alive | {Atom(predicate_name(source, flows), port, context.frame)})


def predicate_name(switch: Flow | NodeView, nodes: Mapping[str, Flow] | Mapping[str, NodeView]) -> str:
    """What decides a switch, through names that it is given on the way."""
    name, port = switch.inputs[1]
    while name in nodes and nodes[name].op == "Identity":
        name, port = nodes[name].inputs[0]
    return f"{name}:{port}"


def origin(view: GraphView, ref: Ref) -> Ref:
    """What a value is, outside of switches and names."""
    while (n := view[ref[0]]).op in SWITCH or n.op == "Identity":
        ref = n.inputs[0]
    return ref


def _step(node: Flow, incoming: Context) -> Context:
    if node.op in ENTER:
        return Context((*incoming.frame, node.frame_name), incoming.alive)
    if node.op in EXIT:  # alive whenever the loop ran: the conditions from outside the loop
        outer = incoming.frame[:-1]
        return Context(outer, frozenset(a for a in incoming.alive if len(a.frame) <= len(outer)))
    return incoming


def _merge(node: Flow, arriving: list[Context], controls: list[Context], ops: Mapping[str, str]) -> Context:
    both = _all_of(arriving + controls)
    if any(ops.get(src) in NEXT for src, _ in node.inputs):
        # Loop variables of one frame are alive together: one shared condition for all of them.
        return Context(both.frame, both.alive | {Atom("/".join(both.frame), -1, both.frame)})
    # What it waits for may be dead: executors look at a merge's data alone.
    common = frozenset.intersection(*(c.alive for c in arriving)) if arriving else frozenset()
    rest = [c.alive - common for c in arriving]
    if not _complete(rest):
        common |= {Atom(node.name, -1, both.frame)}
    return Context(both.frame, common)


def _complete(rest: list[frozenset[Atom]]) -> bool:
    """True when exactly one of the alternatives is always taken: the branches of one two-way switch."""
    atoms = [next(iter(r)) for r in rest if len(r) == 1]
    return len(atoms) == len(rest) == 2 and atoms[0].source == atoms[1].source and \
        atoms[0].frame == atoms[1].frame and {a.branch for a in atoms} == {0, 1}
