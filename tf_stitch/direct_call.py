"""Runs a function's optimized graph without its executor, where the graph is little more than stitched programs.

What Grappler left of such a function is replayed step by step: each StitchedProgram by its kernel alone
(custom_ops/direct_call.cc), which reads the variables that the function captured, ops on such variables by theirs, and
the few other nodes as eager ops.  Kernels that follow each other are one step, in which what they hand over never
becomes a tensor of Python's.  The steps run in an order of the graph, with what writes to variables last.  A program
that cannot run as it is (another shape than it is made for, say) declines; nothing has been written then, and the
function itself is called.

This uses internals of the one TensorFlow version that the package is built for.
"""
from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.eager import cancellation, context, core
from tensorflow.python.framework import errors_impl
from tensorflow.python.pywrap_tfe import TFE_Py_Execute

from . import runtime
from .graph.control import CONTROL_FLOW
from .graph.guards import OP as GUARD
from .graph.reads import OP as READ
from .graph.updates import OP as ASSIGN
from .graph.view import PROGRAM, RET_OPS, GraphView, NodeView, Ref, op_def

log = logging.getLogger("tf_stitch")

PROGRAMS = frozenset({PROGRAM, GUARD})  # they take what a call has where it lies, or decline
MOST_OPS = {"GPU": 8, "CPU": 2}  # of TensorFlow's own: an eager op takes about 20 us, an executor 50 (more on a GPU)
MOST_STEPS = 16
KEPT_GRAPHS = 64
ALIASES = frozenset({"Identity", "StopGradient", "PreventGradient", "Snapshot"})
FREE = ALIASES | {"NoOp", "_Arg", "_Retval", "Const"}  # run no step
ARGUMENT, CONSTANT, VARIABLE, VALUE = range(4)  # where a kernel's inputs come from, as in direct_call.cc
WRITERS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd",
                     "ResourceScatterSub", "ResourceScatterUpdate", "ResourceApplyGradientDescent", ASSIGN})
READERS = frozenset({"ReadVariableOp", "ResourceGather"})
HOST_TYPES = frozenset({"int32"})  # a function's int32 results lie on the host

_lock = threading.Lock()
_graphs: OrderedDict[tuple[str, str], graph_pb2.GraphDef] = OrderedDict()  # by function and options; most recent last


def offer(name: str, options: str, graph: graph_pb2.GraphDef) -> None:
    """Remembers what a function's graph was optimized to under some options, if it may be one to replay.

    Grappler may come again with what executors run, where reads are one op: what it was made of is remembered then.
    """
    ops = [n.op for n in graph.node if n.op not in FREE and n.op != "ReadVariableOp"]
    if PROGRAM not in ops or READ in ops or len(ops) > MOST_STEPS:
        return
    with _lock:
        _graphs[name, options] = graph
        _graphs.move_to_end((name, options))
        while len(_graphs) > KEPT_GRAPHS:
            _graphs.popitem(last=False)


def enabled() -> bool:
    """False when TF_STITCH_DIRECT_CALLS=0 in the environment turns replays off (for functions not called before)."""
    return os.environ.get("TF_STITCH_DIRECT_CALLS") != "0"


def make(name: str, options: str, order: Sequence[int], captures: Sequence[Any], leaves: Sequence[Any]
         ) -> Direct | None:
    """How to replay a function that was run before; None when that is not to be.

    Args:
      name: the function's name in TensorFlow's runtime.
      options: the options that its graph was stitched with, as :func:`offer` got them.
      order: for each of its inputs that is no capture, the position of that argument in a call's ``leaves``.
      captures: its captured inputs, as eager tensors.
      leaves: the arguments of a call, as eager tensors.
    """
    with _lock:
        graph = _graphs.get((name, options))
    if graph is None or context.context()._thread_local_data.device_name or not enabled() or sys.is_finalizing():
        return None
    try:
        return _Maker(GraphView(graph), order, captures, leaves).make()
    except _No as why:
        log.debug("%s is not replayed: %s", name, why)
        return None


class _No(Exception):
    """The graph cannot be replayed; says why."""


class _Apart(Exception):
    """An op's kernel cannot follow those of programs in one call, as it takes a value in other memory."""

    def __init__(self, node: str):
        super().__init__(node)
        self.node = node


@dataclass(slots=True)
class _Kernels:
    """A step that is programs, and ops on variables behind them: their kernels, which know the values they take."""

    call: int
    writes: bool


@dataclass(slots=True)
class _Op:
    """A step that is an op of TensorFlow's: its kernel alone where there is a ``call`` of it, which takes a fifth of
    the time on the host, and an eager op where that declines (an input lies in other memory, say)."""

    call: int | None
    writes: bool
    name: str
    device: str | None
    inputs: list[int]
    attrs: tuple[Any, ...]
    outputs: int


@dataclass
class Direct:
    """A function's graph, ready to be replayed.

    Attributes:
      results: which values are the function's results; values are the arguments, ``fixed``, then every step's results.
      only: the call of the one step, whose results are the function's, in order.
      unwritten: how many steps come before the first one that writes to a variable.
    """

    context: Any
    fixed: list[Any]
    steps: list[_Kernels | _Op]
    results: list[int]
    only: int | None
    unwritten: int
    owned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        finalizer = weakref.finalize(self, _delete, self.owned)
        finalizer.atexit = False

    def __call__(self, leaves: list[Any]) -> list[Any] | None:
        """The results of a call; None when the function has to be called instead, if only to say what is wrong: its
        errors name nodes.

        Args:
          leaves: the call's arguments, as eager tensors.

        Raises:
          tf.errors.OpError: what went wrong while a step ran, after variables were written to.
        """
        ctx = context.context()
        local = ctx._thread_local_data
        if local.device_name or local.op_callbacks or ctx._context_handle is not self.context \
                or cancellation.context() is not None or not self.owned:
            return None
        if self.only is not None:
            out: list[Any] = []
            return out if _run(self.only, leaves, out) else None
        values = leaves + self.fixed
        try:
            if not self._ran(self.steps[:self.unwritten], values):
                return None
        except errors_impl.OpError:
            return None
        return [values[i] for i in self.results] if self._ran(self.steps[self.unwritten:], values) else None

    def _ran(self, steps: list[_Kernels | _Op], values: list[Any]) -> bool:
        """Runs steps, whose results it appends to ``values``; False when one declined, which has written nothing."""
        for step in steps:
            if step.call is not None and _run(step.call, values, values):
                continue
            if isinstance(step, _Kernels):
                return False
            values += self._execute(step, [values[i] for i in step.inputs])
        return True

    def _execute(self, step: _Op, inputs: list[Any]) -> list[Any]:
        try:
            return TFE_Py_Execute(self.context, step.device, step.name, inputs, step.attrs, step.outputs)
        except core._NotOkStatusException as error:
            raise core._status_to_exception(error) from None


def _run(call: int, inputs: list[Any], results: list[Any]) -> bool:
    code = _library().tf_stitch_direct_call(call, inputs, results)
    if code > 0:
        raise errors_impl.exception_type_from_error_code(code)(None, None, _error())
    return code == 0


def _delete(calls: list[int]) -> None:
    """Deletes programs' calls.  None is left: where garbage is collected, a ``__del__`` may still call the function."""
    while calls:
        runtime.library().tf_stitch_direct_delete(calls.pop())


Input = tuple[int, Any]  # of a kernel: a kind, and a value's number, an eager tensor or a variable's handle


class _Maker:
    """Makes the steps of one graph.

    Values are numbered: the arguments, ``fixed``, then the results of all nodes in the order in which they run.
    """

    def __init__(self, view: GraphView, order: Sequence[int], captures: Sequence[Any], leaves: Sequence[Any]):
        self.view, self.order, self.captures, self.leaves = view, order, captures, leaves
        self.context = context.context()._context_handle
        self.fixed: list[Any] = []
        self.position: dict[Ref, int] = {}  # of values
        self.count = len(leaves)            # values so far
        self.owned: list[int] = []
        self.apart: set[str] = set()        # ops that have to be steps of their own

    def make(self) -> Direct:
        self._arguments()
        nodes = self._ordered()
        parts = self._parts(nodes)
        while True:
            try:
                return self._direct(parts)
            except _Apart as op:
                _delete(self.owned)
                self.apart.add(op.node)
                parts = self._parts(nodes)
            except BaseException:
                _delete(self.owned)
                raise

    def _parts(self, nodes: Sequence[NodeView]) -> list[list[NodeView]]:
        """The nodes of each step: programs with what follows on them, or one op of TensorFlow's."""
        parts: list[list[NodeView]] = []
        for n in nodes:
            if parts and parts[-1][0].op in PROGRAMS and self._follows(n, parts[-1]):
                parts[-1].append(n)
            else:
                parts.append([n])
        own = sum(p[0].op not in PROGRAMS for p in parts)
        device = "GPU" if self._uses_gpu(nodes) else "CPU"
        if own > MOST_OPS[device]:
            raise _No(f"it has {own} ops of TensorFlow's own beside its programs")
        return parts

    def _follows(self, n: NodeView, part: Sequence[NodeView]) -> bool:
        """Whether a kernel may be run behind others, with nothing of Python between them."""
        if n.op in PROGRAMS or n.device != part[0].device:
            return n.device == part[0].device
        inside = {p.name for p in part}
        return n.op in WRITERS | READERS and n.name not in self.apart and all(
            self._handle(ref) is not None if self.view.dtype(ref) == "resource" else self._source(ref)[0] in inside
            for ref in n.inputs)

    def _direct(self, parts: Sequence[Sequence[NodeView]]) -> Direct:
        self._number(parts)
        given = len(self.leaves) + len(self.fixed)
        results = [self._value(r) for r in self.view.rets]
        if any(len(self.leaves) <= i < given for i in results):
            raise _No("a result is a captured tensor")
        if len(parts) == 1 and not self.fixed:
            only = self._kernels(parts[0], range(given), results)
            return Direct(self.context, [], [only], [], only.call, 0, self.owned)
        steps, place = self._steps(parts, results)
        self._to_host(steps, place)
        unwritten = next((i for i, s in enumerate(steps) if s.writes), len(steps))
        return Direct(self.context, self.fixed, steps, [place[i] for i in results], None, unwritten, self.owned)

    def _to_host(self, steps: list[_Kernels | _Op], place: dict[int, int]) -> None:
        """Adds copies of results that an op of TensorFlow's leaves on a GPU and a function hands out on the host."""
        of_ops = {self._source(r) for r in self.view.rets if self.view.dtype(r) in HOST_TYPES and self._is_of_op(r)}
        for ref in sorted(of_ops):
            kind = tf.as_dtype(self.view.dtype(ref)).as_datatype_enum
            steps.append(_Op(None, False, "Identity", self.view[ref[0]].device, [place[self.position[ref]]],
                             ("T", kind), 1))
            place[self.position[ref]] = max(place.values()) + 1

    def _is_of_op(self, ref: Ref) -> bool:
        """Whether an op of TensorFlow's gives a value on a GPU; its Identity of an int32 copies that to the host."""
        n = self.view[self._source(ref)[0]]
        return n.op not in PROGRAMS | FREE and _on_gpu(n.device)

    def _number(self, parts: Sequence[Sequence[NodeView]]) -> None:
        self.position = {ref: i for ref, i in self.position.items() if i < len(self.leaves)}
        self.count, self.fixed = len(self.leaves), []
        for ref in {r for p in parts if p[0].op not in PROGRAMS for r in p[0].inputs} | set(self.view.rets):
            self._fix(ref)
        for n in itertools.chain(*parts):
            for port in range(self.view.num_outputs(n.name)):
                self.position[n.name, port] = self.count
                self.count += 1

    def _steps(self, parts: Sequence[Sequence[NodeView]], results: Sequence[int]
               ) -> tuple[list[_Kernels | _Op], dict[int, int]]:
        """The steps, and where a replay has what is returned: no step gives values that only itself reads."""
        count = givens = len(self.leaves) + len(self.fixed)
        place = {i: i for i in range(givens)}
        copies: dict[int, int] = {}  # a result that is an argument is another tensor
        returned = [i for i in dict.fromkeys(results) if i < givens]
        read = [self._read(p) for p in parts]
        steps: list[_Kernels | _Op] = []
        for k, part in enumerate(parts):
            shown = self._outputs(part)
            if part[0].op not in PROGRAMS:
                steps.append(self._op(part[0], place))
            else:
                needed = set(results).union(*read[k + 1:])
                shown, returned = [i for i in shown if i in needed] + returned, []
                steps.append(self._kernels(part, place, shown))
            at = {i: count + j for j, i in enumerate(shown)}
            count += len(shown)
            place.update((i, k) for i, k in at.items() if i >= givens)
            copies.update((i, k) for i, k in at.items() if i < givens)
        return steps, place | copies

    # --- which nodes, in which order ----------------------------------------------------------------

    def _ordered(self) -> list[NodeView]:
        """The nodes to run, what writes to variables last; a variable that only programs read is read by them."""
        nodes = [n for n in self.view if n.op not in FREE and not self._is_read_by_programs(n)]
        if all(n.op != PROGRAM for n in nodes):
            raise _No("it has no programs")
        late: set[str] = set()  # what waits for something that writes
        for n in self.view:
            if n.op in WRITERS or not late.isdisjoint((*(src for src, _ in n.inputs), *n.control_inputs)):
                late.add(n.name)
        for n in nodes:
            self._check(n, late)
        if self._uses_gpu(nodes):
            self._check_results({(n.name, port) for n in nodes for port in self._fetched(n)})
        return [n for n in nodes if n.name not in late] + [n for n in nodes if n.name in late]

    def _uses_gpu(self, nodes: Iterable[NodeView]) -> bool:
        return any(_on_gpu(n.device) for n in nodes)

    def _check_results(self, fetched: Set[Ref]) -> None:
        """Raises where a function would hand out a result on the host that is not put there."""
        for ref in self.view.rets:
            if self.view.dtype(ref) in HOST_TYPES and self._source(ref) not in fetched and not self._is_of_op(ref):
                raise _No("a result is an integer that functions hand out on the host")
            argument = self.position.get(self._source(ref))  # nothing else has a number yet
            if argument is not None and not _on_gpu(self.leaves[argument].backing_device):
                raise _No("a result is an argument that lies on the host")

    def _is_read_by_programs(self, n: NodeView) -> bool:
        readers = {self.view[reader].op for reader, _, _ in self.view.consumers(n.name)}
        return n.op == "ReadVariableOp" and readers <= PROGRAMS

    def _fetched(self, n: NodeView) -> list[int]:
        """The results of a GPU's program that it puts into host memory: those that functions hand out there."""
        if n.op != PROGRAM or not _on_gpu(n.device):
            return []
        results = {self._source(r) for r in self.view.rets}
        return [port for port, kind in enumerate(n.outputs or ())
                if kind in HOST_TYPES and (n.name, port) in results and not self._is_read_by_steps((n.name, port))]

    def _is_read_by_steps(self, ref: Ref) -> bool:
        """False for a value that is a result of the function and nothing else."""
        readers = [self.view[reader] for reader, _, port in self.view.consumers(ref[0]) if port == ref[1]]
        return any(self._is_read_by_steps((n.name, 0)) if n.op in ALIASES else n.op not in RET_OPS for n in readers)

    def _check(self, n: NodeView, late: set[str]) -> None:
        """Raises unless the node can be a step."""
        if n.op in PROGRAMS:
            if n.name in late:  # it might decline when there is no way back
                raise _No("a program or an assertion waits for a write")
            return
        signature = op_def(n.op)
        known = signature is not None and (n.op in WRITERS | READERS or not signature.is_stateful)
        if not known or n.op in CONTROL_FLOW or any(t.endswith("_ref") for t in n.outputs or ()):
            raise _No(f"op {n.op} is not replayed")

    # --- values -------------------------------------------------------------------------------------

    def _arguments(self) -> None:
        for i, name in enumerate(self.view.args[:len(self.order)]):
            self.position[name, 0] = self.order[i]
        if len(self.view.args) != len(self.order) + len(self.captures):
            raise _No("the graph has other inputs than the function")

    def _source(self, ref: Ref) -> Ref:
        """What a value is, names looked through."""
        while self.view[ref[0]].op in ALIASES:
            ref = self.view[ref[0]].inputs[0]
        return ref

    def _constant(self, ref: Ref) -> Any | None:
        """The eager tensor of a captured input or of a constant; None for other values."""
        name = ref[0]
        node = self.view[name]
        if name in self.view.args[len(self.order):]:
            return self.captures[self.view.args.index(name) - len(self.order)]
        if node.op == "Const":
            with tf.device(node.device or None):
                return tf.constant(node.attr("value"), node.attr("dtype"))
        return None

    def _fix(self, ref: Ref) -> None:
        ref = self._source(ref)
        if ref not in self.position:
            value = self._constant(ref)
            if value is not None:
                self.position[ref] = self.count
                self.count += 1
                self.fixed.append(value)

    def _value(self, ref: Ref) -> int:
        found = self.position.get(self._source(ref))
        if found is None:
            raise _No(f"'{ref[0]}' is not computed by a step")
        return found

    # --- steps --------------------------------------------------------------------------------------

    def _outputs(self, part: Sequence[NodeView]) -> list[int]:
        return [self.position[n.name, port] for n in part for port in range(self.view.num_outputs(n.name))]

    def _read(self, part: Sequence[NodeView]) -> set[int]:
        """The values that a step reads."""
        if part[0].op not in PROGRAMS:
            return {self._value(r) for r in part[0].inputs}
        return {given for n in part for kind, given in self._inputs(n) if kind == ARGUMENT}

    def _op(self, n: NodeView, place: Mapping[int, int]) -> _Op:
        signature = op_def(n.op)
        assert signature is not None
        attrs: list[Any] = []
        for a in signature.attr:
            value = n.attr_proto(a.name)
            if value is not None:
                attrs += [a.name, _attr(value)]
        return _Op(self._kernel(n, place), n.op in WRITERS, n.op, n.device or None,
                   [place[self._value(r)] for r in n.inputs], tuple(attrs), self.view.num_outputs(n.name))

    def _kernel(self, n: NodeView, place: Mapping[int, int]) -> int | None:
        """A call of the kernel of an op on captured variables; None for other ops."""
        if n.op not in WRITERS | READERS or not n.device:
            return None
        given = range(len(self.leaves), len(self.leaves) + len(self.fixed))
        for ref in n.inputs:
            is_handle = self.view.dtype(ref) == "resource"
            if (is_handle and self._handle(ref) is None) or (not is_handle and self._value(ref) in given):
                return None
        return self._kernels([n], place, self._outputs([n])).call

    def _kernels(self, part: Sequence[NodeView], place: Mapping[int, int] | Sequence[int], shown: Sequence[int]
                 ) -> _Kernels:
        """A call of kernels, one behind the other; ``place`` says where a replay has values that are not their own, and
        ``shown`` are the values that it gets of this call.
        """
        own = {i: k for k, i in enumerate(self._outputs(part))}
        call = _new(self.context, part[0].device)
        self.owned.append(call)
        for n in part:
            inputs = [(VALUE, own[given]) if kind == ARGUMENT and given in own
                      else (kind, place[given] if kind == ARGUMENT else given) for kind, given in self._inputs(n)]
            why = _add(call, self._alone(n), inputs, n.op in WRITERS)
            if why and n.op not in PROGRAMS and len(part) > 1:
                raise _Apart(n.name)
            if why:
                raise _No(why)
        _show(call, [(VALUE, own[i]) if i in own else (ARGUMENT, i) for i in shown])
        return _Kernels(call, any(n.op in WRITERS for n in part))

    def _alone(self, n: NodeView) -> bytes:
        """The node for its kernel, which copies what a program does not get, or does not leave, on the device."""
        assert n.proto is not None
        node = node_def_pb2.NodeDef()
        node.CopyFrom(n.proto)
        inputs = self._inputs(n)
        node.input[:] = [f"input_{i}" for i in range(len(inputs))]
        node.attr.pop("_class", None)
        host = {i for i, (kind, given) in enumerate(inputs) if kind != VARIABLE and self._is_on_host(kind, given)}
        if n.op in PROGRAMS and host and _on_gpu(n.device):
            already = node.attr["_input_hostmem"].list.i
            node.attr["_input_hostmem"].list.i[:] = sorted({*already, *host})
        fetched = self._fetched(n)
        if fetched:
            node.attr["_output_hostmem"].list.i[:] = fetched
        return node.SerializeToString()

    def _inputs(self, n: NodeView) -> list[Input]:
        """Where a kernel's inputs come from: values by their numbers, constants, and variables that programs read."""
        if n.op in PROGRAMS:
            return [self._input(ref, n.device) for ref in n.inputs]
        return [(CONSTANT, self._handle(ref)) if self.view.dtype(ref) == "resource" else (ARGUMENT, self._value(ref))
                for ref in n.inputs]

    def _handle(self, ref: Ref) -> Any | None:
        """The handle of a variable that the function captured; None for others."""
        return self._constant(self._source(ref))

    def _input(self, ref: Ref, device: str) -> Input:
        """Of a program on ``device``."""
        ref = self._source(ref)
        node = self.view[ref[0]]
        given = range(len(self.leaves), len(self.leaves) + len(self.fixed))
        if ref in self.position and self.position[ref] not in given:
            if node.op != "_Arg" and node.device != device:  # kernels copy nothing between devices
                raise _No(f"a program reads '{ref[0]}' of another device")
            return ARGUMENT, self.position[ref]
        if node.op == "ReadVariableOp":
            handle = self._handle(node.inputs[0])
            if handle is None or handle.dtype != tf.resource:
                raise _No("a variable is no captured one")
            return VARIABLE, handle
        value = self._constant(ref)
        if value is None:
            raise _No(f"'{ref[0]}' is not computed by a step")
        return CONSTANT, value

    def _is_on_host(self, kind: int, given: Any) -> bool:
        """Whether a constant or one of the call's arguments lies in host memory (on a GPU, integers do)."""
        if kind == ARGUMENT:
            return given < len(self.leaves) and not _on_gpu(self.leaves[given].backing_device)
        return not _on_gpu(given.backing_device)


def _on_gpu(device: str) -> bool:
    return "GPU" in device.upper()


def _attr(value: Any) -> Any:
    """An attr as TFE_Py_Execute takes it."""
    kind = value.WhichOneof("value")
    if kind in ("s", "i", "f", "b", "type"):
        return getattr(value, kind)
    if kind == "shape":
        return None if value.shape.unknown_rank else [d.size if d.size >= 0 else None for d in value.shape.dim]
    if kind == "list":
        for name, items in value.list.ListFields():
            if name.name in ("s", "i", "f", "b", "type"):
                return list(items)
            raise _No(f"an attr that is a list of {name.name}")
        return []
    raise _No("an attr of a kind that is not replayed")


# --- the library ----------------------------------------------------------------------------------------

@functools.cache
def _library() -> ctypes.PyDLL:
    """The library's functions that want the GIL held; connects the library with Python first."""
    lib = runtime.library()
    lib.tf_stitch_direct_error.restype = ctypes.c_char_p
    lib.tf_stitch_direct_delete.restype = None
    lib.tf_stitch_direct_delete.argtypes = [ctypes.c_void_p]
    held = runtime.python_library()
    held.tf_stitch_direct_new.restype = ctypes.c_void_p
    held.tf_stitch_direct_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    ints = ctypes.POINTER(ctypes.c_int)
    held.tf_stitch_direct_add.restype = ctypes.c_int
    held.tf_stitch_direct_add.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ints, ints,
                                          ctypes.py_object, ctypes.c_int]
    held.tf_stitch_direct_results.restype = None
    held.tf_stitch_direct_results.argtypes = [ctypes.c_void_p, ctypes.c_int, ints, ints]
    wrapper = ctypes.CDLL(tf.sysconfig.get_lib() + "/python/lib_pywrap_tensorflow_common.so")
    python = ctypes.pythonapi
    functions = [wrapper._Z18EagerTensor_HandlePK7_object, wrapper._Z21EagerTensorFromHandleP16TFE_TensorHandleb,
                 python.PyList_GetItem, python.PyList_Append, python.Py_DecRef, python.PyEval_SaveThread,
                 python.PyEval_RestoreThread]
    addresses = (ctypes.c_void_p * len(functions))(*(ctypes.cast(f, ctypes.c_void_p) for f in functions))
    held.tf_stitch_direct_python(addresses)
    held.tf_stitch_direct_call.restype = ctypes.c_int
    held.tf_stitch_direct_call.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    return held


def _new(handle: Any, device: str) -> int:
    """A call without kernels, in an eager context."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    call = _library().tf_stitch_direct_new(pointer(handle, None), device.encode())
    if not call:
        raise _No(_error())
    return call


def _add(call: int, node: bytes, inputs: Sequence[Input], writes: bool) -> str:
    """Adds a kernel to a call; "" or why it cannot be one of its kernels."""
    fixed = [given for kind, given in inputs if kind in (CONSTANT, VARIABLE)]
    places = iter(range(len(fixed)))
    indices = [next(places) if kind in (CONSTANT, VARIABLE) else given for kind, given in inputs]
    added = _library().tf_stitch_direct_add(call, node, len(node), len(inputs), _ints([k for k, _ in inputs]),
                                            _ints(indices), fixed, writes)
    return "" if added else _error()


def _show(call: int, results: Sequence[tuple[int, int]]) -> None:
    """Says what a call returns: arguments and values."""
    _library().tf_stitch_direct_results(call, len(results), _ints([k for k, _ in results]),
                                        _ints([i for _, i in results]))


def _ints(values: Sequence[int]) -> Any:
    return (ctypes.c_int * len(values))(*values)


def _error() -> str:
    message: bytes = runtime.library().tf_stitch_direct_error()
    return message.decode(errors="replace") or "TensorFlow gives no reason"
