"""Changed copies of graphs: nodes are added and taken away, and readers are pointed to what is there instead."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from .control import CONTROL_FLOW, contexts_of
from .shapes import variable_shape
from .variables import free_name
from .view import ARG_OPS, RET_OPS, GraphView, NodeView, Ref, may_have_effects, op_def, reached

MANY_WAITS = 64  # pairs of who waits and for what that a node without a value stands for
ENDS = ARG_OPS | RET_OPS | {"NoOp", "Placeholder", "PlaceholderWithDefault"}
HARMLESS = frozenset({"ReadVariableOp", "Assert"})  # whether they run before another assertion fails matters to nobody
Key = tuple[str, tuple[int, ...], bytes, str]


@dataclass(frozen=True)
class _Made:
    """A new node, the types of what it gives, and what it reads and waits for."""

    node: node_def_pb2.NodeDef
    types: tuple[str, ...]
    inputs: tuple[Ref, ...]
    controls: tuple[str, ...]


def op_node(op: str, name: str, inputs: Iterable[str], device: str, dtype: int | None = None
            ) -> node_def_pb2.NodeDef:
    """A node of an op of at most one element type, which is attribute ``dtype`` of some ops and ``T`` of the others."""
    node = node_def_pb2.NodeDef(name=name, op=op, device=device, input=inputs)
    if dtype is not None:
        signature = op_def(op)
        assert signature is not None
        node.attr["dtype" if any(a.name == "dtype" for a in signature.attr) else "T"].type = dtype
    return node


class Edit:
    """Collects changes to a graph or function body.

    Attributes:
      instead: by a value of the old graph, what is read for it; it may be one that ``instead`` names again.
      waits: by a node that goes, the nodes that are waited for in its place.
    """

    def __init__(self, source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView):
        self.source, self.view = source, view
        self.instead: dict[Ref, Ref] = {}
        self.waits: dict[str, tuple[str, ...]] = {}
        self._taken = set(view.nodes)
        self._numbers: dict[str, int] = {}
        self._made: dict[str, _Made] = {}
        self._constants: dict[Key, str] = {}

    # --- adding -------------------------------------------------------------------------------------

    def add(self, node: node_def_pb2.NodeDef, name: str, types: Sequence[str], inputs: Sequence[Ref],
            controls: Iterable[str] = ()) -> str:
        """Takes a new node in, under a name that begins as given; returns the name.

        ``types`` are those of what it gives.  ``inputs`` may be values of the old graph and of new nodes.
        """
        self._numbers[name] = self._numbers.get(name, -1) + 1
        node.name = free_name(f"{name}_{self._numbers[name]}", self._taken)
        self._made[node.name] = _Made(node, tuple(types), tuple(inputs), tuple(controls))
        return node.name

    def constant(self, value: np.ndarray, device: str, name: str) -> Ref:
        """A Const node on a device, one for equal values."""
        key = value.dtype.str, value.shape, value.tobytes(), device
        if key not in self._constants:
            node = node_def_pb2.NodeDef(op="Const", device=device)
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
            node.attr["dtype"].type = node.attr["value"].tensor.dtype
            self._constants[key] = self.add(node, name, [value.dtype.name], [])
        return self._constants[key], 0

    def mark(self) -> tuple[int, int]:
        """What :meth:`undo` goes back to."""
        return len(self._made), len(self._constants)

    def undo(self, mark: tuple[int, int]) -> None:
        """Takes away the nodes that were added since."""
        for kept, added in zip(mark, (self._made, self._constants), strict=True):
            for key in list(added)[kept:]:  # type: ignore[call-overload]
                del added[key]  # type: ignore[attr-defined]

    def text(self, ref: Ref) -> str:
        """How a value is written as an input."""
        while ref in self.instead:
            ref = self.instead[ref]
        made = self._made.get(ref[0])
        return self.view.output_text(made.node, ref[1]) if made is not None else self.view.ref_text(ref)

    def dtype(self, ref: Ref) -> str:
        """Element type name of a value."""
        return self._made[ref[0]].types[ref[1]] if ref[0] in self._made else self.view.dtype(ref)

    def device(self, ref: Ref) -> str:
        """Where the node is placed that gives a value."""
        return self._made[ref[0]].node.device if ref[0] in self._made else self.view[ref[0]].device

    # --- the copy -----------------------------------------------------------------------------------

    def graph(self, run: Iterable[str] = ()) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
        """The changed copy.

        Args:
          run: names of nodes that must have run, besides those that a function says: a NoOp is in place of what goes.
        """
        out = type(self.source)()
        out.CopyFrom(self.source)
        is_function = isinstance(out, function_pb2.FunctionDef)
        if is_function:
            for arg, ref in zip(out.signature.output_arg, self.view.rets, strict=True):
                out.ret[arg.name] = self.text(ref) if ref in self.instead else out.ret[arg.name]
        target = out.node_def if is_function else out.node
        nodes = [self._rewired(n) for n in target if n.name not in self.waits]
        del target[:]
        target.extend(nodes)
        target.extend(map(self._written, self._made.values()))
        target.extend(node_def_pb2.NodeDef(name=end, op="NoOp", device=self.view[end].device,
                                           input=[f"^{w}" for w in self._waiting([end])])
                      for end in dict.fromkeys([*self.view.control_rets, *sorted(run)]) if end in self.waits)
        return out

    def _rewired(self, node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        """A node that stays, reading what is there now."""
        seen = self.view[node.name]
        out = node_def_pb2.NodeDef()
        out.CopyFrom(node)
        texts = [self.text(ref) if ref in self.instead else text
                 for ref, text in zip(seen.inputs, node.input, strict=False)]
        del out.input[:]
        out.input.extend([*texts, *(f"^{c}" for c in self._waiting(seen.control_inputs))])
        if "_class" in out.attr:
            kept = [s for s in out.attr["_class"].list.s if s.decode().removeprefix("loc:@") not in self.waits]
            out.attr["_class"].list.s[:] = kept
            if not kept:
                del out.attr["_class"]
        return out

    def _written(self, made: _Made) -> node_def_pb2.NodeDef:
        """A new node, reading what is there now that all changes are known."""
        del made.node.input[:]
        made.node.input.extend([*map(self.text, made.inputs), *(f"^{c}" for c in self._waiting(made.controls))])
        return made.node

    def _waiting(self, names: Iterable[str]) -> list[str]:
        """What to wait for in place of nodes some of which are gone."""
        found: dict[str, None] = {}
        for name in names:
            found.update(dict.fromkeys(self._waiting(self.waits[name]) if name in self.waits else [name]))
        return list(found)


def without_relays(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView, keep: Iterable[str]
                   ) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """A copy in which nobody waits for a NoOp that itself only waits: what waits for it waits for the same nodes.

    TensorFlow's constant folding leaves such nodes in the middle of gradients, where they would keep apart what is one
    program.  Those that ``keep`` names stay, those that wait for effects, and those that stand for very many pairs of
    nodes.
    """
    edit, kept = Edit(source, view), set(keep)
    for n in view:
        readers = view.control_consumers(n.name) if n.op == "NoOp" and n.name not in kept else ()
        few = readers and n.control_inputs and len(readers) * len(n.control_inputs) <= MANY_WAITS
        if few and not any(may_have_effects(view[c].op) for c in n.control_inputs):
            edit.waits[n.name] = tuple(n.control_inputs)
    return edit.graph() if edit.waits else source


def asserts_aside(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView, run: Iterable[str],
                  guards: Iterable[set[str]]) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """A copy in which only what has effects waits for assertions that must run in any case (those in ``run``).

    TensorFlow has all that follows wait for them, and them for the device: programs would be cut apart there.  Where
    one fails, the call fails; what was computed beside it nobody sees.  ``guards`` are the ends of conditionals that
    only assert.
    """
    checks = _checks(view, set(run), guards)
    moved = {n.name: checks.intersection(n.control_inputs) for n in view
             if n.name not in checks and not checks.isdisjoint(n.control_inputs)
             and n.op not in CONTROL_FLOW and not _stays(n.op)}
    found = contexts_of(view) if moved else {}
    waits: dict[str, set[str]] = {}
    for name, controls in list(moved.items()):
        effects = [e for e in _after(view, name) if may_have_effects(view[e].op) and view[e].op not in HARMLESS]
        if all(found[e].is_root for e in effects) and found[name].is_root:
            for e in effects:
                waits.setdefault(e, set()).update(controls)
        else:
            del moved[name]
    if not moved:
        return source
    out = type(source)()
    out.CopyFrom(source)
    for node in out.node_def if isinstance(out, function_pb2.FunctionDef) else out.node:
        gone = {f"^{c}" for c in moved.get(node.name, ())}
        more = {f"^{c}" for c in waits.get(node.name, ())} - set(node.input)
        if gone or more:
            node.input[:] = [*(i for i in node.input if i not in gone), *sorted(more)]
    return out


def _checks(view: GraphView, run: set[str], guards: Iterable[set[str]]) -> set[str]:
    """Assertions that run whether or not something waits for them, and what waits for nothing else."""
    checks = {n.name for n in view if n.op == "Assert" and n.name in run}
    for ends in guards:
        if any(r in run for name in ends for r in (name, *view.control_consumers(name))):
            checks |= ends
    for n in view if checks else ():
        if n.op == "NoOp" and n.control_inputs and checks.issuperset(n.control_inputs):
            checks.add(n.name)
    return checks


def _after(view: GraphView, name: str) -> set[str]:
    """What depends on a node."""
    return reached(view.readers(name), view.readers)


def with_known_shapes(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView, keep: Iterable[str],
                      run: Iterable[str]) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """A copy in which sizes are constants where they can be no others, and what they were made of is not asked for.

    They are the shapes of variables, which the gradient of a loop asks for, and numbers whose bounds meet, whatever the
    data is: ``tf.math.bincount`` with as many bins at least as at most.  In place of nodes in ``run``, which must only
    have run, there is a NoOp.
    """
    edit, kept = Edit(source, view), set(keep)
    for n in view:
        value = _only_value(view, n) if n.name not in kept else None
        if value is not None:
            edit.instead[n.name, 0] = edit.constant(value, n.device, f"{n.name}/shape")
            edit.waits[n.name] = tuple(n.control_inputs)
    return edit.graph(run) if edit.instead else source


def _only_value(view: GraphView, n: NodeView) -> np.ndarray | None:
    """What a node gives in every run, if it is one of those that ask for more than is needed to know it."""
    if n.op == "Minimum":
        return view.constant((n.name, 0))
    shape = variable_shape(view, n.inputs[0], assume=False) if n.op == "VariableShape" else None
    if shape is None or None in shape:
        return None
    return np.array(shape, tf.as_dtype(view.dtype((n.name, 0))).as_numpy_dtype)


def without_dead(source: graph_pb2.GraphDef | function_pb2.FunctionDef, view: GraphView, keep: Iterable[str]
                 ) -> graph_pb2.GraphDef | function_pb2.FunctionDef:
    """A copy without the nodes that neither ``keep``, nor what has effects, nor a result depends on."""
    live: set[str] = set()
    stack = [*keep, *(name for name, _ in view.rets), *view.control_rets, *(n.name for n in view if _stays(n.op))]
    while stack:
        name = stack.pop()
        if name in view.nodes and name not in live:
            live.add(name)
            stack.extend((*(src for src, _ in view[name].inputs), *view[name].control_inputs))
    out = type(source)()
    out.CopyFrom(source)
    nodes = out.node_def if isinstance(out, function_pb2.FunctionDef) else out.node
    left = [n for n in nodes if n.name in live]
    kept = [node_def_pb2.NodeDef.FromString(n.SerializeToString()) for n in left]
    del nodes[:]
    nodes.extend(kept)
    return out


def _stays(op: str) -> bool:
    return op in ENDS or may_have_effects(op)
