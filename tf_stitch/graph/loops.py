"""Loops that take a known number of turns, written out: their turns become nodes one after another.

A loop is a While node with functions for its condition and body, or, where Grappler comes, what TensorFlow makes of
one: Enter, Merge, Switch, NextIteration and Exit nodes in a frame.  Both are read as a :class:`Loop`.  Its turns are
followed with the integers and truth values that are known (counters, sizes, bounds): as long as the condition is known
to hold, the body is copied once more, with the loop's variables in place of what it reads.  What is the same in all
turns is there once.  A loop stays as it was where its condition is ever not known, where a turn has effects, in another
loop or a branch, and where more than ``MOST_NODES`` nodes would come of it.
"""
from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from .control import CONTROL_FLOW, ENTER, EXIT, NEXT, Context, contexts_of
from .edits import Edit
from .shapes import const_size, is_loop_merge
from .variables import GATHERS
from .view import ARG_OPS, PASS_THROUGH, FuncRef, GraphView, NodeView, Ref, may_have_effects

MOST_NODES = 2500  # that compute something and come of all loops of a graph: planning them takes seconds
ELEMENTS = 64      # of an integer tensor whose value is followed
ONE_COUNTER = "_one_counter"  # ends the name of a function that is a loop's condition
WHILES = frozenset({"While", "StatelessWhile"})
READS = frozenset({"ReadVariableOp", "VariableShape", *GATHERS})  # see effects, have none
FREE = PASS_THROUGH | {"Const"}  # compute nothing
BRANCHES = frozenset({"Switch", "Merge", "_SwitchN"})


@dataclass(frozen=True, eq=False)
class _Known:
    """A value that is known while rewriting, and the device of the node that computed it."""

    value: np.ndarray
    device: str

    @property
    def key(self) -> tuple[str, tuple[int, ...], bytes, str]:
        return self.value.dtype.str, self.value.shape, self.value.tobytes(), self.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


Value = Ref | _Known  # what a loop's variable is in a turn: a tensor of the new graph, or a number


class _Stays(Exception):
    """The loop cannot be written out."""


def written_out(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView, keep: Iterable[str],
                most_nodes: int) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """The same graph, or a copy in which loops of a known number of turns are straight graphs.

    Args:
      source: a graph or a function's body; ``view`` is of it.
      keep: names of nodes that must still be there; a loop that holds one stays.
      most_nodes: how many nodes may come of the loops.
    """
    keep, edit = set(keep), Edit(source, view)
    writer = _Writer(edit, most_nodes)
    for loop in loops_of(view):
        if keep.isdisjoint(loop.inside):
            writer.write_out(loop)
    return edit.graph() if edit.waits else source


def counted(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView
            ) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """The same graph, or a copy in which loops that compare two counters compare one.

    TensorFlow's loops test ``turns < most_turns and i < n``.  On a GPU the two comparisons run on the host, "and" on
    the device, so that every turn waits for the device.  Where both counters are always equal, one is compared with
    the smaller bound instead; where both bounds are equal, the counter that is ahead.
    """
    edit = Edit(source, view)
    for loop in loops_of(view, in_branches=True):
        if loop.tests is view:
            _compare_one(edit, loop, view)
    return edit.graph() if edit.instead else source


def counted_functions(graph: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The same graph, or a copy in which conditions of While nodes compare one counter, as :func:`counted` has it.

    Such a condition is a new function, whose name ends with ``ONE_COUNTER``.
    """
    out = graph_pb2.GraphDef()
    out.CopyFrom(graph)
    made: dict[str, function_pb2.FunctionDef] = {}
    for body in (out, *out.library.function):
        nodes = {n.name: n for n in (body.node_def if isinstance(body, function_pb2.FunctionDef) else body.node)}
        if any(n.op in WHILES for n in nodes.values()):
            view = GraphView(body, graph.library)
            for n in (n for n in view if n.op in WHILES):
                test = _counted_function(view, n)
                if test is not None:
                    made[test.signature.name] = test
                    nodes[n.name].attr["cond"].func.name = test.signature.name
    out.library.function.extend(made.values())
    return out if made else graph


def _counted_function(view: GraphView, n: NodeView) -> function_pb2.FunctionDef | None:
    """The condition of a While node with one comparison; None where it has no other two."""
    loop = _of_functions(view, n)
    if loop is None:
        return None
    edit = Edit(loop.tests.source, loop.tests)
    _compare_one(edit, loop, view)
    if not edit.instead:
        return None
    out = edit.graph()
    digest = hashlib.sha256(out.SerializeToString(deterministic=True)).hexdigest()  # loops may share a condition
    out.signature.name = f"{out.signature.name}_{digest[:8]}{ONE_COUNTER}"
    return out


def _compare_one(edit: Edit, loop: Loop, outside: GraphView) -> None:
    """Puts one comparison in the place of two."""
    both = loop.tests[plain(loop.tests, loop, loop.test)[0]]
    tests = [loop.tests[ref[0]] for ref in both.inputs] if both.op == "LogicalAnd" else []
    if [(t.op, t.attr("T")) for t in tests] == [("Less", "int32")] * 2:
        test = _one_test(edit, loop, outside, *tests)
        if test is not None:
            edit.instead[loop.test] = test


def _counter(loop: Loop, outside: GraphView, variable: Ref | None) -> tuple[int, int] | None:
    """Where a variable of a loop begins and what each turn adds to it; None where that is not known."""
    if variable not in loop.next:
        return None
    start = outside.constant(loop.initial[variable])
    add = loop.turns[plain(loop.turns, loop, loop.next[variable])[0]]
    if start is None or start.shape or add.op != "AddV2":
        return None
    for k in (0, 1):
        step = loop.turns.constant(add.inputs[k])
        if step is not None and not step.shape and plain(loop.turns, loop, add.inputs[1 - k]) == variable:
            return int(start), int(step)
    return None


def plain(view: GraphView, loop: Loop, ref: Ref) -> Ref:
    """The value of a turn or a condition that another one is a name of."""
    while True:
        if ref in loop.same:
            ref = loop.same[ref]
        elif view[ref[0]].op in PASS_THROUGH:
            ref = view[ref[0]].inputs[0]
        else:
            return ref


def _one_test(edit: Edit, loop: Loop, outside: GraphView, first: NodeView, second: NodeView) -> Ref | None:
    """A comparison that holds where two do; None where none is known."""
    a, b = (_counter(loop, outside, loop.test_args.get(t.inputs[0])) for t in (first, second))
    if a is None or b is None:
        return None
    if _bound(loop, first.inputs[1]) == _bound(loop, second.inputs[1]) and a[1] == b[1] == 1:
        return (first if a[0] >= b[0] else second).name, 0  # who counts by one reaches a bound before it wraps around
    if a != b or first.proto is None:
        return None
    least, test = node_def_pb2.NodeDef(op="Minimum", device=first.device), node_def_pb2.NodeDef()
    least.attr["T"].type = tf.int32.as_datatype_enum
    test.CopyFrom(first.proto)
    bound = edit.add(least, f"{first.name}/bound", ["int32"], [first.inputs[1], second.inputs[1]]), 0
    return edit.add(test, f"{first.name}/one", ["bool"], [first.inputs[0], bound], first.control_inputs), 0


def _bound(loop: Loop, ref: Ref) -> tuple[str, Ref]:
    """What a turn compares with: the value outside, where no turn changes it."""
    variable = loop.test_args.get(ref)
    if variable is not None and (variable not in loop.next
                                 or plain(loop.turns, loop, loop.next[variable]) == variable):
        return "outside", loop.initial[variable]
    return "test", ref


# --- reading loops -----------------------------------------------------------------------------------

@dataclass
class Loop:
    """The parts of a loop.

    Attributes:
      name: what names of new nodes begin with.
      inside: names of the nodes that go when the loop is written out.
      initial: by the ref that turns read, the value outside: of the loop's variables, and of what stays the same.
      next: by a variable's ref, that of its value in the next turn.
      same: by a ref that turns read too, the variable.
      test: the condition in ``tests``, a view in which ``test_args`` are names of variables.
      turns: the view that holds the body.
      body: nodes of a turn, operands first.
      exits: by the ref of a result, the variable.
      after: names of nodes that turns wait for.
    """

    name: str
    inside: set[str]
    initial: dict[Ref, Ref]
    next: dict[Ref, Ref]
    same: dict[Ref, Ref]
    tests: GraphView
    test: Ref
    test_args: dict[Ref, Ref]
    turns: GraphView
    body: list[NodeView]
    exits: dict[Ref, Ref]
    after: tuple[str, ...]

    @functools.cached_property
    def has_branches(self) -> bool:
        return any(n.op in BRANCHES for n in self.body)


def loops_of(view: GraphView, *, in_branches: bool = False) -> Iterator[Loop]:
    """The loops that are in no other loop and, without ``in_branches``, in no branch, those first whose results others
    may read."""
    if not any(n.op in WHILES or n.op in ENTER for n in view):
        return
    found = contexts_of(view)
    frames: dict[str, list[NodeView]] = {}
    for n in view:
        inner = found[n.inputs[0][0]] if n.op in EXIT else found[n.name]
        if inner.frame:
            frames.setdefault(inner.frame[0], []).append(n)
    for n in view:
        loop = None
        if n.op in WHILES and found[n.name].is_root:
            loop = _of_functions(view, n)
        elif n.op in ENTER and len(found[n.name].frame) == 1:  # the frame's first node
            nodes = frames.pop(found[n.name].frame[0], [])
            alive = any(found[m.name].alive for m in nodes if m.op in ENTER)
            loop = _of_frame(view, nodes, found) if nodes and (in_branches or not alive) else None
        if loop is not None:
            yield loop


def _of_frame(view: GraphView, nodes: Sequence[NodeView], found: Mapping[str, Context]) -> Loop | None:
    """The loop of a frame and its exits; None where it is not what TensorFlow makes of a While, or holds another."""
    enters = {n.name: n for n in nodes if n.op in ENTER}
    heads = {n.name: n for n in nodes if is_loop_merge(view, n)}
    conds = [n for n in nodes if n.op == "LoopCond"]
    exits = [n for n in nodes if n.op in EXIT]
    if len(conds) != 1 or any(
            n.op.startswith("Ref") or len(found[n.name].frame) != (n.op not in EXIT) for n in nodes):
        return None
    switches = {n.name: n for n in nodes if n.op == "Switch" and n.inputs[1] == (conds[0].name, 0)}
    initial = {(name, 0): n.inputs[0] for name, n in enters.items()}
    nexts: dict[Ref, Ref] = {}
    for name, n in heads.items():
        first, back = n.inputs[0], n.inputs[-1]
        if len(n.inputs) != 2 or first[0] not in enters or view[back[0]].op not in NEXT \
                or any(port for _, _, port in view.consumers(name)):
            return None
        initial[name, 0], nexts[name, 0] = initial[first], view[back[0]].inputs[0]
    if any(n.inputs[0] not in nexts for n in switches.values()) or any(
            n.inputs[0][0] not in switches or n.inputs[0][1] for n in exits):
        return None
    own = {*enters, *heads, *switches, conds[0].name, *(n.name for n in exits)}
    return Loop(
        conds[0].name.rpartition("/")[0] or "loop", {n.name for n in nodes}, initial, nexts,
        {(name, 1): n.inputs[0] for name, n in switches.items()}, view, conds[0].inputs[0], {r: r for r in initial},
        view, [n for n in nodes if n.op not in NEXT and n.name not in own],
        {(n.name, 0): switches[n.inputs[0][0]].inputs[0] for n in exits},
        tuple(dict.fromkeys(c for n in enters.values() for c in n.control_inputs)))


def _of_functions(view: GraphView, n: NodeView) -> Loop | None:
    """The loop of a While node; None where its functions are not known or their types are not fixed."""
    found = [view.library.get(f.name) if isinstance(f, FuncRef) else None for f in (n.attr("cond"), n.attr("body"))]
    if any(f is None or f.signature.attr for f in found):
        return None
    tests, turns = (GraphView(f, view.library.values(), calls=view.calls) for f in found)
    args = [(name, 0) for name in turns.args]
    return Loop(
        n.name, {n.name}, dict(zip(args, n.inputs, strict=True)), dict(zip(args, turns.rets, strict=True)), {},
        tests, tests.rets[0], dict(zip([(name, 0) for name in tests.args], args, strict=True)),
        turns, [m for m in turns if m.op not in ARG_OPS], {(n.name, k): ref for k, ref in enumerate(args)},
        n.control_inputs)


def _may_be_copied(n: NodeView) -> bool:
    """Whether a node of a body has no effects and is no part of another loop."""
    if n.op in READS or n.op == "NoOp" or n.op in BRANCHES:
        return True
    return n.op not in CONTROL_FLOW and not may_have_effects(n.op)


# --- numbers -----------------------------------------------------------------------------------------

FOLDS: dict[str, Callable[..., Any]] = {
    "Identity": lambda a: a, "AddV2": np.add, "Add": np.add, "Sub": np.subtract, "Mul": np.multiply,
    "Minimum": np.minimum, "Maximum": np.maximum, "Less": np.less, "LessEqual": np.less_equal, "Greater": np.greater,
    "GreaterEqual": np.greater_equal, "Equal": np.equal, "NotEqual": np.not_equal, "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or, "LogicalNot": np.logical_not, "Range": np.arange,
    "Max": lambda a, axes: np.max(a, tuple(axes.flat)),
}


def _is_followed(value: np.ndarray) -> bool:
    return value.dtype.kind in "iub" and value.size <= ELEMENTS


def _folded(n: NodeView, env: Mapping[Ref, Value]) -> np.ndarray | None:
    """A node's result where it follows from numbers that are known."""
    if n.op == "Const":
        value = np.asarray(n.attr("value")) if const_size(n) <= ELEMENTS else None
        return value if value is not None and _is_followed(value) else None
    args = [env[ref] for ref in n.inputs]
    if n.op not in FOLDS or n.attr("keep_dims") or not all(isinstance(a, _Known) for a in args):
        return None
    with np.errstate(over="ignore"):  # integers wrap around, as TensorFlow's do
        return np.asarray(FOLDS[n.op](*(a.value for a in args)))  # type: ignore[union-attr]


def _value(view: GraphView, env: dict[Ref, Value], ref: Ref) -> np.ndarray | None:
    """A value of a condition, where it is known; what was found on the way is put into ``env``."""
    if ref not in env:
        n = view[ref[0]]
        if n.op in FOLDS and any(_value(view, env, r) is None for r in n.inputs):
            return None
        value = _folded(n, env) if n.op in FOLDS else view.constant(ref)
        if value is None or not _is_followed(value):
            return None
        env[ref] = _Known(value, n.device)
    found = env[ref]
    return found.value if isinstance(found, _Known) else None


# --- writing -----------------------------------------------------------------------------------------

@dataclass
class _Turns:
    """What came of a loop so far: how many nodes that compute something, the copies that see variables, and of each
    node of the body its last copy with what that was made of."""

    count: int = 0
    reads: list[str] = field(default_factory=list)
    last: dict[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)


class _Writer:
    """Puts the turns of loops in their places."""

    def __init__(self, edit: Edit, most_nodes: int):
        self.edit, self.room = edit, most_nodes
        self.left: dict[Ref, Value] = {}  # what loops that are gone gave

    def write_out(self, loop: Loop) -> None:
        """Puts the turns of a loop in its place, or changes nothing where it has to stay."""
        mark = self.edit.mark()
        try:
            turns, last = self._turns(loop)
        except _Stays:
            self.edit.undo(mark)
            return
        self.room -= turns.count
        self.edit.waits.update(dict.fromkeys(loop.inside, (*turns.reads, *loop.after)))
        for ref, variable in loop.exits.items():
            self.left[ref] = value = self._left(loop, last[variable], turns.reads)
            self.edit.instead[ref] = self._ref(value)

    def _turns(self, loop: Loop) -> tuple[_Turns, dict[Ref, Value]]:
        """All turns of a loop, and what its variables are after them."""
        if not all(map(_may_be_copied, loop.body)):
            raise _Stays
        turns = _Turns()
        now = {ref: self._outside(value) for ref, value in loop.initial.items()}
        while self._goes_on(loop, now):
            env = self._turn(loop, turns, now)
            now = {**now, **{variable: env[ref] for variable, ref in loop.next.items()}}
        return turns, now

    def _outside(self, ref: Ref) -> Value:
        """A value from outside of the loop: a number where it is known."""
        view, source = self.edit.view, ref
        while source not in self.left:
            n = view.nodes.get(source[0])
            if n is None or n.op not in PASS_THROUGH or n.control_inputs:
                break
            source = n.inputs[0]
        if source in self.left:
            return self.left[source]
        known: dict[Ref, Value] = {}
        return ref if _value(view, known, ref) is None else known[ref]

    def _goes_on(self, loop: Loop, now: Mapping[Ref, Value]) -> bool:
        holds = _value(loop.tests, {inner: now[outer] for inner, outer in loop.test_args.items()}, loop.test)
        if holds is None or holds.shape or holds.dtype != bool:
            raise _Stays
        return bool(holds)

    def _turn(self, loop: Loop, turns: _Turns, now: Mapping[Ref, Value]) -> dict[Ref, Value]:
        """Adds one turn; returns what each value of the body is in it."""
        env = {**now, **{name: now[ref] for name, ref in loop.same.items()}}
        here: dict[str, str] = {}
        for n in loop.body:
            # No node of a body has effects; only in branches, which may not be taken, waiting means something.
            controls = [here[c] for c in n.control_inputs if c in here] if loop.has_branches else []
            if n.op in READS:
                controls.extend(loop.after)
            value = None if controls else _folded(n, env)
            if value is not None:
                env[n.name, 0] = _Known(value, n.device)
            elif n.op != "NoOp" or controls:
                here[n.name] = name = self._copy(loop, turns, n, [env[ref] for ref in n.inputs], controls)
                env.update(((n.name, port), (name, port)) for port in range(len(n.outputs or ())))
        return env

    def _copy(self, loop: Loop, turns: _Turns, n: NodeView, inputs: Sequence[Value], controls: Sequence[str]) -> str:
        """The name of a node's copy in a turn; that of the turn before where it would be the same."""
        made_of = (*inputs, *controls)
        if n.name in turns.last and turns.last[n.name][0] == made_of:
            return turns.last[n.name][1]
        if n.proto is None or n.outputs is None or turns.count >= self.room:
            raise _Stays
        out = node_def_pb2.NodeDef()
        out.CopyFrom(n.proto)
        out.attr.pop("_class", None)  # nodes are placed with others that may be gone
        name = n.name if n.name.startswith(loop.name) else f"{loop.name}/{n.name}"
        name = self.edit.add(out, f"{name}/turn", n.outputs, [self._ref(v) for v in inputs], controls)
        turns.last[n.name] = made_of, name
        turns.count += n.op not in FREE and "TensorList" not in n.op
        if n.op in READS:
            turns.reads.append(name)
        return name

    def _left(self, loop: Loop, value: Value, reads: Sequence[str]) -> Value:
        """What is read for a loop's result; who reads it may rely on all turns having read their variables."""
        if isinstance(value, _Known) or not reads:
            return value
        dtype = self.edit.dtype(value)
        out = node_def_pb2.NodeDef(op="Identity", device=self.edit.device(value))
        out.attr["T"].type = tf.as_dtype(dtype).as_datatype_enum
        return self.edit.add(out, f"{loop.name}/left", [dtype], [value], reads), 0

    def _ref(self, value: Value) -> Ref:
        return self.edit.constant(value.value, value.device, "number") if isinstance(value, _Known) else value
