"""Optimizers' ops as plain ones: reads of variables, arithmetic, and writes of what it comes to.

``ResourceApplyAdam`` and its like (tf.compat.v1.train, older Keras) update a variable and its slots in one kernel each.
On a GPU a network has a launch for each of its variables, and no program goes past them.  As plain ops their arithmetic
joins the gradients', and graph/updates.py makes one op of all writes.

Left alone are half types, in which TensorFlow's kernels round otherwise, sizes that are not known, and steps whose new
values would take more than ``updates.MOST_BYTES``.  The formulas are those of TensorFlow's documentation of the ops.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from ..ir.dtypes import DTYPES
from .branches import KEEPS, conditions, run_before
from .control import CONTROL_FLOW, NEXT, origin
from .edits import op_node
from .shapes import variable_shape
from .updates import MOST_BYTES
from .variables import free_name
from .view import GraphView, NodeView, Ref, may_have_effects, op_def

TYPES = frozenset({"float32", "float64"})
READERS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})  # only see effects
Formula = Callable[["_Step"], dict[str, str]]
_formulas: dict[str, Formula] = {}


def _formula(op: str) -> Callable[[Formula], Formula]:
    """Registers how an op computes: inputs' names, as the op has them, to the variables' new values."""
    def register(formula: Formula) -> Formula:
        _formulas[op] = formula
        return formula

    return register


def plain_updates(source: graph_pb2.GraphDef, view: GraphView) -> graph_pb2.GraphDef:
    """The same graph, or a copy in which optimizers' ops are plain ones."""
    steps = [s for n in view if n.op in _formulas and (s := _Step(view, n)).is_good()]
    if not steps or sum(s.bytes for s in steps) > MOST_BYTES or any(n.op in NEXT for n in view):
        return source
    taken, (bit, before), alive = {n.name for n in source.node}, run_before(view), conditions(view)
    touching = [n for n in view if n.proto is not None and not n.is_arg and n.op not in CONTROL_FLOW
                and (may_have_effects(n.op) or n.op in READERS)]
    made: dict[str, list[node_def_pb2.NodeDef]] = {}
    for s in steps:
        earlier = [n for n in touching if before[s.node.name] & bit[n.name]]
        if all(alive[n.name] <= alive[s.node.name] for n in earlier):  # nobody can wait for what may not run
            made[s.node.name] = s.made(taken, earlier)
    out = graph_pb2.GraphDef()
    out.CopyFrom(source)
    del out.node[:]
    for node in source.node:
        out.node.extend(made.get(node.name, (node,)))
    return out


@dataclass
class _Step:
    """The update that one op makes."""

    view: GraphView
    node: NodeView
    nodes: list[node_def_pb2.NodeDef] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        signature = op_def(self.node.op)
        assert signature is not None
        self.inputs = dict(zip((a.name for a in signature.input_arg), self.node.inputs, strict=True))
        self.variables = {k: ref for k, ref in self.inputs.items() if self.view.dtype(ref) == "resource"}
        self.shapes = [variable_shape(self.view, ref, assume=False) for ref in self.variables.values()]
        self.dtype: str = self.node.attr("T")

    def is_good(self) -> bool:
        """Whether its types and sizes are known and fit."""
        shape = self.shapes[0]
        known = shape is not None and None not in shape and all(s == shape for s in self.shapes)
        given = {k: self.view.proven_shape(ref) for k, ref in self.inputs.items() if k not in self.variables}
        handles = {origin(self.view, ref) for ref in self.variables.values()}
        return (known and self.dtype in TYPES and len(handles) == len(self.variables)
                and all(self.view[name].is_arg for name, _ in handles)
                and all(s == (shape if k in ("grad", "delta") else ()) for k, s in given.items()))

    @property
    def bytes(self) -> int:
        return len(self.shapes) * DTYPES[self.dtype].size * math.prod(d or 0 for d in self.shapes[0] or ())

    def made(self, taken: set[str], earlier: Sequence[NodeView]) -> list[node_def_pb2.NodeDef]:
        """The nodes in the op's place; the last one has its name.

        ``earlier`` are nodes before it with effects, or that see some: what is left of the op's place in an order may
        be that its inputs are computed behind them.
        """
        self.taken = taken
        self.reads = {k: self._add("ReadVariableOp", [self.view.ref_text(ref), *self._waits(ref, earlier, READERS)])
                      for k, ref in self.variables.items()}
        for k, value in _formulas[self.node.op](self).items():
            ref = self.variables[k]
            waits = dict.fromkeys([f"^{self.reads[k]}", *self._waits(ref, earlier, frozenset())])
            self._add("AssignVariableOp", [self.view.ref_text(ref), value, *waits])
            self.nodes[-1].attr["validate_shape"].b = True
            self.nodes[-1].attr[KEEPS].b = True
        writes = [f"^{n.name}" for n in self.nodes if n.op == "AssignVariableOp"]
        return [*self.nodes, node_def_pb2.NodeDef(name=self.node.name, op="NoOp", device=self.node.device,
                                                  input=writes)]

    def _waits(self, handle: Ref, earlier: Sequence[NodeView], but: frozenset[str]) -> list[str]:
        """What a read or write waits for: what may touch the variable, but for ops that only read."""
        def touches(n: NodeView) -> bool:
            handles = {origin(self.view, r) for r in n.inputs if self.view.dtype(r) == "resource"}
            return n.op not in but and (not handles or origin(self.view, handle) in handles)

        names = [*self.node.control_inputs, *(n.name for n in earlier if touches(n))]
        return [f"^{name}" for name in dict.fromkeys(names)]

    def _add(self, op: str, inputs: list[str]) -> str:
        name = free_name(f"{self.node.name}/{op}", self.taken)
        self.nodes.append(op_node(op, name, inputs, self.node.device, tf.as_dtype(self.dtype).as_datatype_enum))
        return name

    # --- what formulas are written in ---------------------------------------------------------------

    def __getitem__(self, name: str) -> _Value:
        """An input; of a variable, what it held."""
        return _Value(self, self.reads[name] if name in self.reads else self.view.ref_text(self.inputs[name]))

    def constant(self, value: float) -> _Value:
        name = self._add("Const", [])
        proto = tf.make_tensor_proto(value, self.dtype)
        self.nodes[-1].attr["value"].tensor.CopyFrom(proto)
        return _Value(self, name)

    def compute(self, op: str, *operands: _Value | float) -> _Value:
        values = [x if isinstance(x, _Value) else self.constant(x) for x in operands]
        return _Value(self, self._add(op, [v.text for v in values]))


@dataclass(frozen=True)
class _Value:
    """A value in a formula."""

    step: _Step
    text: str

    def __add__(self, other: _Value | float) -> _Value:
        return self.step.compute("AddV2", self, other)

    def __sub__(self, other: _Value | float) -> _Value:
        return self.step.compute("Sub", self, other)

    def __rsub__(self, other: float) -> _Value:
        return self.step.compute("Sub", other, self)

    def __mul__(self, other: _Value | float) -> _Value:
        return self.step.compute("Mul", self, other)

    def __truediv__(self, other: _Value | float) -> _Value:
        return self.step.compute("RealDiv", self, other)

    def sqrt(self) -> _Value:
        return self.step.compute("Sqrt", self)

    def squared(self) -> _Value:
        return self.step.compute("Square", self)


# --- the ops ------------------------------------------------------------------------------------------

@_formula("ResourceApplyGradientDescent")
def _gradient_descent(s: _Step) -> dict[str, str]:
    return {"var": (s["var"] - s["alpha"] * s["delta"]).text}


@_formula("ResourceApplyMomentum")
def _momentum(s: _Step) -> dict[str, str]:
    accum = s["accum"] * s["momentum"] + s["grad"]
    ahead = s["grad"] + accum * s["momentum"] if s.node.attr("use_nesterov") else accum
    return {"accum": accum.text, "var": (s["var"] - ahead * s["lr"]).text}


@_formula("ResourceApplyKerasMomentum")
def _keras_momentum(s: _Step) -> dict[str, str]:
    step = s["grad"] * s["lr"]
    accum = s["accum"] * s["momentum"] - step
    ahead = accum * s["momentum"] - step if s.node.attr("use_nesterov") else accum
    return {"accum": accum.text, "var": (s["var"] + ahead).text}


@_formula("ResourceApplyAdagrad")
def _adagrad(s: _Step) -> dict[str, str]:
    return _adagrad_with(s, 0.0)


@_formula("ResourceApplyAdagradV2")
def _adagrad_v2(s: _Step) -> dict[str, str]:
    return _adagrad_with(s, s["epsilon"])


def _adagrad_with(s: _Step, epsilon: _Value | float) -> dict[str, str]:
    keeps = not s.node.attr("update_slots")
    accum = s["accum"] if keeps else s["accum"] + s["grad"].squared()
    var = s["var"] - s["grad"] * s["lr"] / (accum.sqrt() + epsilon)
    return {"var": var.text} if keeps else {"accum": accum.text, "var": var.text}


@_formula("ResourceApplyRMSProp")
def _rms_prop(s: _Step) -> dict[str, str]:
    ms = s["ms"] + (s["grad"].squared() - s["ms"]) * (1.0 - s["rho"])
    mom = s["mom"] * s["momentum"] + s["grad"] * s["lr"] / (ms + s["epsilon"]).sqrt()
    return {"ms": ms.text, "mom": mom.text, "var": (s["var"] - mom).text}


@_formula("ResourceApplyCenteredRMSProp")
def _centered_rms_prop(s: _Step) -> dict[str, str]:
    ms = s["ms"] + (s["grad"].squared() - s["ms"]) * (1.0 - s["rho"])
    mg = s["mg"] + (s["grad"] - s["mg"]) * (1.0 - s["rho"])
    mom = s["mom"] * s["momentum"] + s["grad"] * s["lr"] / (ms - mg.squared() + s["epsilon"]).sqrt()
    return {"ms": ms.text, "mg": mg.text, "mom": mom.text, "var": (s["var"] - mom).text}


@_formula("ResourceApplyAdam")
def _adam(s: _Step) -> dict[str, str]:
    rate = s["lr"] * (1.0 - s["beta2_power"]).sqrt() / (1.0 - s["beta1_power"])
    m = s["m"] + (s["grad"] - s["m"]) * (1.0 - s["beta1"])
    v = s["v"] + (s["grad"].squared() - s["v"]) * (1.0 - s["beta2"])
    ahead = m * s["beta1"] + s["grad"] * (1.0 - s["beta1"]) if s.node.attr("use_nesterov") else m
    return {"m": m.text, "v": v.text, "var": (s["var"] - rate * ahead / (v.sqrt() + s["epsilon"])).text}


@_formula("ResourceApplyAdaMax")
def _ada_max(s: _Step) -> dict[str, str]:
    m = s["m"] + (s["grad"] - s["m"]) * (1.0 - s["beta1"])
    v = s.compute("Maximum", s["v"] * s["beta2"], s.compute("Abs", s["grad"]))
    rate = s["lr"] / (1.0 - s["beta1_power"])
    return {"m": m.text, "v": v.text, "var": (s["var"] - rate * m / (v + s["epsilon"])).text}


@_formula("ResourceApplyAdadelta")
def _adadelta(s: _Step) -> dict[str, str]:
    left = 1.0 - s["rho"]
    accum = s["accum"] * s["rho"] + s["grad"].squared() * left
    update = s["grad"] * (s["accum_update"] + s["epsilon"]).sqrt() / (accum + s["epsilon"]).sqrt()
    return {"accum": accum.text, "accum_update": (s["accum_update"] * s["rho"] + update.squared() * left).text,
            "var": (s["var"] - update * s["lr"]).text}
