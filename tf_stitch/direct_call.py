"""Runs a function's optimized graph without its executor, where the graph is little more than stitched programs.

What Grappler left of such a function is replayed step by step: each StitchedProgram by its kernel alone
(custom_ops/direct_call.cc), which reads the variables that the function captured, ops on such variables by theirs, and
the few other nodes as eager ops.  The steps run in an order of the graph, with what writes to variables last.  A
program that cannot run as it is (another shape than it is made for, say) declines; nothing has been written then, and
the function itself is called.

This uses internals of the one TensorFlow version that the package is built for.
"""
from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.eager import cancellation, context, core
from tensorflow.python.framework import errors_impl
from tensorflow.python.pywrap_tfe import TFE_Py_Execute

from . import runtime
from .graph.control import CONTROL_FLOW
from .graph.view import GraphView, NodeView, Ref, op_def

log = logging.getLogger("tf_stitch")

STITCHED = "StitchedProgram"
ASSIGN = "StitchedAssign"
MOST_OPS = {"GPU": 8, "CPU": 2}  # of TensorFlow's own: an eager op takes about 20 us, an executor 50 (more on a GPU)
MOST_STEPS = 16
KEPT_GRAPHS = 64
ALIASES = frozenset({"Identity", "StopGradient", "PreventGradient", "Snapshot"})
FREE = ALIASES | {"NoOp", "_Arg", "_Retval", "Const"}  # run no step
ARGUMENT, CONSTANT, VARIABLE = range(3)  # kinds of a program's inputs, as in direct_call.cc
WRITERS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd",
                     "ResourceScatterSub", "ResourceScatterUpdate", "ResourceApplyGradientDescent", ASSIGN})
READERS = frozenset({"ReadVariableOp", "ResourceGather"})
HOST_TYPES = frozenset({"int32"})  # a function's int32 results lie on the host, a GPU kernel's do not

_lock = threading.Lock()
_graphs: OrderedDict[tuple[str, str], graph_pb2.GraphDef] = OrderedDict()  # by function and options; most recent last


def offer(name: str, options: str, graph: graph_pb2.GraphDef) -> None:
    """Remembers what a function's graph was optimized to under some options, if it may be one to replay."""
    ops = [n.op for n in graph.node if n.op not in FREE and n.op != "ReadVariableOp"]
    if STITCHED not in ops or len(ops) > MOST_STEPS:
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


@dataclass(slots=True)
class _Program:
    """A step that is a stitched program, by its kernel, which knows the values that it takes."""

    call: int


@dataclass(slots=True)
class _Op:
    """A step that is an op of TensorFlow's: its kernel alone where there is a ``call`` of it, which takes a fifth of
    the time on the host, and an eager op where that declines (an input lies in other memory, say)."""

    call: int | None
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
      only: the graph is one program, whose results are the function's, in order.
      unwritten: how many steps come before the first one that writes to a variable.
    """

    context: Any
    fixed: list[Any]
    steps: list[_Program | _Op]
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
        try:
            if self.only is not None:
                out: list[Any] = []
                return out if _run(self.only, leaves, out) else None
            values = leaves + self.fixed
            if not self._ran(self.steps[:self.unwritten], values):
                return None
        except errors_impl.OpError:
            return None
        return [values[i] for i in self.results] if self._ran(self.steps[self.unwritten:], values) else None

    def _ran(self, steps: list[_Program | _Op], values: list[Any]) -> bool:
        """Runs steps, whose results it appends to ``values``; False when one declined."""
        for step in steps:
            if step.call is not None and _run(step.call, values, values):
                continue
            if isinstance(step, _Program):
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
        message = runtime.library().tf_stitch_direct_error().decode(errors="replace")
        raise errors_impl.exception_type_from_error_code(code)(None, None, message)
    return code == 0


def _delete(calls: list[int]) -> None:
    """Deletes programs' calls.  None is left: where garbage is collected, a ``__del__`` may still call the function."""
    while calls:
        runtime.library().tf_stitch_direct_delete(calls.pop())


class _Maker:
    """Makes the steps of one graph."""

    def __init__(self, view: GraphView, order: Sequence[int], captures: Sequence[Any], leaves: Sequence[Any]):
        self.view, self.order, self.captures, self.leaves = view, order, captures, leaves
        self.context = context.context()._context_handle
        self.fixed: list[Any] = []
        self.position: dict[Ref, int] = {}  # of values
        self.count = len(leaves)            # values so far
        self.owned: list[int] = []

    def make(self) -> Direct:
        nodes = self._ordered()
        self._arguments()
        for ref in {r for n in nodes if n.op != STITCHED for r in n.inputs} | set(self.view.rets):
            self._fix(ref)
        steps: list[_Program | _Op] = []
        try:
            for n in nodes:
                steps.append(self._program(n) if n.op == STITCHED else self._op(n))
                for port in range(self.view.num_outputs(n.name)):
                    self.position[n.name, port] = self.count
                    self.count += 1
            return self._direct(steps)
        except BaseException:
            _delete(self.owned)
            raise

    def _direct(self, steps: list[_Program | _Op]) -> Direct:
        given = len(self.leaves) + len(self.fixed)
        results = [self._value(r) for r in self.view.rets]
        if any(i < given for i in results):
            raise _No("a result is an input")
        first = steps[0]
        whole = len(steps) == 1 and not self.fixed and results == list(range(given, self.count))
        only = first.call if whole and isinstance(first, _Program) else None
        writes = (i for i, s in enumerate(steps) if isinstance(s, _Op) and s.name in WRITERS)
        return Direct(self.context, self.fixed, steps, results, only, next(writes, len(steps)), self.owned)

    # --- which nodes, in which order ----------------------------------------------------------------

    def _ordered(self) -> list[NodeView]:
        """The nodes to run, what writes to variables last; a variable that only programs read is read by them."""
        nodes = [n for n in self.view if n.op not in FREE and not self._is_read_by_programs(n)]
        programs = sum(n.op == STITCHED for n in nodes)
        own = sum(n.op not in (STITCHED, ASSIGN) for n in nodes)
        device = "GPU" if any(_on_gpu(n.device) for n in nodes) else "CPU"
        if not programs or own > MOST_OPS[device]:
            raise _No(f"it has {programs} programs and {own} ops of TensorFlow's own")
        late: set[str] = set()  # what waits for something that writes
        for n in self.view:
            if n.op in WRITERS or not late.isdisjoint((*(src for src, _ in n.inputs), *n.control_inputs)):
                late.add(n.name)
        for n in nodes:
            self._check(n, late)
        if device == "GPU" and any(self.view.dtype(r) in HOST_TYPES for r in self.view.rets):
            raise _No("a result is an integer that functions hand out on the host")
        return [n for n in nodes if n.name not in late] + [n for n in nodes if n.name in late]

    def _is_read_by_programs(self, n: NodeView) -> bool:
        readers = {self.view[reader].op for reader, _, _ in self.view.consumers(n.name)}
        return n.op == "ReadVariableOp" and readers <= {STITCHED}

    def _check(self, n: NodeView, late: set[str]) -> None:
        """Raises unless the node can be a step."""
        if n.op == STITCHED:
            if n.name in late:  # it might decline when there is no way back
                raise _No("a program waits for a write")
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

    def _op(self, n: NodeView) -> _Op:
        signature = op_def(n.op)
        assert signature is not None
        attrs: list[Any] = []
        for a in signature.attr:
            value = n.attr_proto(a.name)
            if value is not None:
                attrs += [a.name, _attr(value)]
        return _Op(self._kernel(n), n.op, n.device or None, [self._value(r) for r in n.inputs], tuple(attrs),
                   self.view.num_outputs(n.name))

    def _kernel(self, n: NodeView) -> int | None:
        """A call of the kernel of an op on captured variables; None for other ops."""
        if n.op not in WRITERS | READERS or not n.device:
            return None
        given = range(len(self.leaves), len(self.leaves) + len(self.fixed))
        inputs: list[tuple[int, Any]] = []
        for ref in n.inputs:
            is_handle = self.view.dtype(ref) == "resource"
            found = self._constant(self._source(ref)) if is_handle else self._value(ref)
            if found is None or (not is_handle and found in given):
                return None
            inputs.append((CONSTANT if is_handle else ARGUMENT, found))
        return self._call(n, inputs)

    def _program(self, n: NodeView) -> _Program:
        inputs = [self._input(ref, n.device) for ref in n.inputs]
        host = {i for i, (kind, given) in enumerate(inputs) if kind != VARIABLE and self._is_on_host(kind, given)}
        return _Program(self._call(n, inputs, host))

    def _call(self, n: NodeView, inputs: Sequence[tuple[int, Any]], host: Set[int] = frozenset()) -> int:
        """A call of a node's kernel alone; ``host`` are the inputs that lie in host memory."""
        assert n.proto is not None
        fixed = [given for kind, given in inputs if kind != ARGUMENT]
        places = iter(range(len(fixed)))
        indices = [given if kind == ARGUMENT else next(places) for kind, given in inputs]
        node = node_def_pb2.NodeDef()
        node.CopyFrom(n.proto)
        node.input[:] = [f"input_{i}" for i in range(len(inputs))]
        node.attr.pop("_class", None)
        if host and _on_gpu(n.device):  # the kernel copies what it does not get on the device
            already = node.attr["_input_hostmem"].list.i
            node.attr["_input_hostmem"].list.i[:] = sorted({*already, *host})
        call = _new(self.context, n.device, node.SerializeToString(), [kind for kind, _ in inputs], indices, fixed)
        self.owned.append(call)
        return call

    def _input(self, ref: Ref, device: str) -> tuple[int, Any]:
        """Of a program on ``device``: an argument's position, a constant's value or a variable's handle."""
        ref = self._source(ref)
        node = self.view[ref[0]]
        given = range(len(self.leaves), len(self.leaves) + len(self.fixed))
        if ref in self.position and self.position[ref] not in given:
            if node.op != "_Arg" and node.device != device:  # kernels copy nothing between devices
                raise _No(f"a program reads '{ref[0]}' of another device")
            return ARGUMENT, self.position[ref]
        if node.op == "ReadVariableOp":
            handle = self._constant(self._source(node.inputs[0]))
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
    ints = ctypes.POINTER(ctypes.c_int)
    held.tf_stitch_direct_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t,
                                          ctypes.c_int, ints, ints, ctypes.py_object]
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


def _new(handle: Any, device: str, node: bytes, kinds: list[int], indices: list[int], fixed: list[Any]) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    array = ctypes.c_int * len(kinds)
    call = _library().tf_stitch_direct_new(pointer(handle, None), device.encode(), node, len(node), len(kinds),
                                           array(*kinds), array(*indices), fixed)
    if not call:
        raise _No(runtime.library().tf_stitch_direct_error().decode(errors="replace"))
    return call
