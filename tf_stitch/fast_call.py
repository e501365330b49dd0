"""A short way into a traced ``tf.function``.

``tf.function`` spends about 100 us of Python per call on finding the concrete function and on ordering its inputs.
Both follow from the arguments' structure, element types and shapes, so they are looked up here by that key.
A call takes the short way when its arguments are eager tensors, plain NumPy arrays and Python literals, in plain
tuples, lists and dicts, when its key was seen before, and when nothing looks on: no gradient tape or forward
accumulator, no graph being built, no distribution strategy.  Every other call takes TensorFlow's own way: tracing,
errors and all.  What the function itself costs then, :mod:`tf_stitch.direct_call` mostly spares too.

This uses internals of the one TensorFlow version that the package is built for.
"""
from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import (
    atomic_function,
    concrete_function,
    eager_function_run,
    function_context,
    function_type_utils,
    polymorphic_function,
)
from tensorflow.python.framework import constant_op, dtypes, ops
from tensorflow.python.framework.tensor import TensorSpec
from tensorflow.python.ops import array_ops
from tensorflow.python.profiler import trace
from tensorflow.python.pywrap_tfe import TFE_Py_TapeSetIsEmpty, TFE_Py_TapeSetPossibleGradientTypes
from tensorflow.python.saved_model import save_context
from tensorflow.python.util import traceback_utils

from . import direct_call, hook

CAPACITY = 512  # keys kept per function; one that meets more starts over
LITERALS = frozenset({bool, int, float, str, type(None)})
HANDLES = frozenset({dtypes.resource.as_datatype_enum, dtypes.variant.as_datatype_enum})
_EagerTensor: type = ops.EagerTensor
_told = polymorphic_function._frequent_tracing_detector_manager


@dataclass(frozen=True, slots=True)
class _Route:
    """How calls of one key are made.

    Attributes:
      name: of the function in TensorFlow's runtime.
      order: for each of its inputs that is no capture, the position of that leaf.
      plain: the leaves are the inputs, in order.
      concrete: what the route was made for; ``captures`` is what it captured then.
      outputs: how many tensors it returns.
      single: it returns one tensor and nothing around it.
      direct: replays the function without its executor; None where that cannot be.
    """

    name: bytes
    order: tuple[int, ...]
    plain: bool
    concrete: Any
    captures: list[Any]
    outputs: int
    single: bool
    direct: direct_call.Direct | None


class _Routes(dict[tuple[Any, ...], "_Route | None"]):
    """The routes of one function, by key; None for a key that was seen once or has no route."""

    made_at = (-1, -1)  # how many concrete functions there were, and the version of the config

    def __reduce__(self) -> Any:
        return _Routes, ()  # a copy of the function starts anew


_long_way = polymorphic_function.Function.__call__


@functools.wraps(_long_way)  # AutoGraph must take it for TensorFlow's own
def _short_way(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _call(self, args, kwargs)


class StitchedFunction(polymorphic_function.Function):
    """A ``tf.function`` with the short way in."""

    __call__ = _short_way


@functools.wraps(_long_way)
def _plain_way(self: Any, *args: Any, **kwargs: Any) -> Any:
    _look_again()
    return _long_way(self, *args, **kwargs)


_long_concrete_way = concrete_function.ConcreteFunction.__call__


@functools.wraps(_long_concrete_way)
def _short_concrete_way(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_concrete(self, args, kwargs)


def everywhere(on: bool) -> None:
    """Gives every ``tf.function`` and concrete function of the process the short way in, or takes it away again."""
    polymorphic_function.Function.__call__ = _short_way if on else _plain_way
    concrete_function.ConcreteFunction.__call__ = _short_concrete_way if on else _long_concrete_way


def shorten(concrete: Any) -> None:
    """Gives one concrete function, a loaded model's signature say, the short way in."""
    concrete.__class__ = _shortened(concrete.__class__)


@functools.cache
def _shortened(kind: Any) -> type:
    return type(kind.__name__, (kind,), {"__call__": _short_concrete_way, "__module__": kind.__module__})


_config_version = 0
_seen = threading.local()  # .version: of the config that a thread's calls use


def config_changed() -> None:
    """Every thread keeps what it made of TensorFlow's config; from its next call on it makes it anew."""
    global _config_version
    _config_version += 1


def _look_again() -> None:
    if getattr(_seen, "version", 0) != _config_version:
        _seen.version = _config_version
        context.context()._thread_local_data.function_call_options = None


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _look_again()
    key: list[Any] = []
    leaves: list[Any] = []
    if (function._jit_compile or not _nothing_looks_on() or not _flatten(args, key, leaves)
            or (kwargs and not _flatten(kwargs, key, leaves))):
        return _long_way(function, *args, **kwargs)
    routes = _routes_of(function, len(function._function_cache))
    whole = tuple(key)
    route = routes.get(whole)
    if route is not None:
        tensors = [_tensor(x) for x in leaves]
        if _is_open(route, tensors):
            _told.called_without_tracing(function._key_for_call_stats)
            return _run(route, tensors)
    result = _long_way(function, *args, **kwargs)
    routes = _routes_of(function, len(function._function_cache))
    # Found when it comes again.
    routes[whole] = _find(functools.partial(_look_up, function), args, kwargs, leaves) if whole in routes else None
    return result


def _call_concrete(concrete: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _look_again()
    key: list[Any] = []
    leaves: list[Any] = []
    if (not _nothing_looks_on() or not _flatten(args, key, leaves) or (kwargs and not _flatten(kwargs, key, leaves))):
        return _long_concrete_way(concrete, *args, **kwargs)
    routes, whole = _routes_of(concrete, 1), tuple(key)
    route = routes.get(whole)
    if route is not None:
        tensors = [_tensor(x) for x in leaves]
        if _is_open(route, tensors):
            return _run(route, tensors)
    result = _long_concrete_way(concrete, *args, **kwargs)
    routes[whole] = _find(functools.partial(_bind, concrete), args, kwargs, leaves) if whole in routes else None
    return result


def _routes_of(function: Any, traces: int) -> _Routes:
    """The routes; none after a new trace, which may fit arguments better than the one that they led to."""
    routes = function.__dict__.get("_tf_stitch_routes")
    now = (traces, _config_version)
    if routes is None or routes.made_at != now or len(routes) > CAPACITY:
        routes = function._tf_stitch_routes = _Routes()
        routes.made_at = now
    return routes


def _nothing_looks_on() -> bool:
    stack = ops._default_graph_stack
    return (not eager_function_run.RUN_FUNCTIONS_EAGERLY
            and context.context()._thread_local_data.is_eager
            and not stack.stack
            and not stack.get_default()._distribution_strategy_stack
            and TFE_Py_TapeSetIsEmpty()
            and not save_context.in_save_context())


def _flatten(value: Any, key: list[Any], leaves: list[Any]) -> bool:
    """Appends what ``value`` is to ``key`` and its arrays to ``leaves``; False when it is nothing plain."""
    kind = type(value)
    if kind is _EagerTensor:
        enum = value._datatype_enum()
        key += (enum, value._shape_tuple())
        leaves.append(value)
        return enum not in HANDLES
    if kind is np.ndarray:
        key += (value.dtype, value.shape)
        leaves.append(value)
        return value.dtype.kind in "fiubc"
    if kind in LITERALS:
        key += (kind, value)
        return True
    if kind is tuple or kind is list:
        key += (kind, len(value))
        return all([_flatten(v, key, leaves) for v in value])
    if kind is dict:
        key += (kind, tuple(value))
        return all([_flatten(v, key, leaves) for v in value.values()])
    return False


def _tensor(leaf: Any) -> Any:
    return leaf if type(leaf) is _EagerTensor else constant_op.convert_to_eager_tensor(leaf, context.context())


def _is_open(route: _Route, leaves: list[Any]) -> bool:
    """False when this call must take the long way after all: somebody replaced a capture, or forward accumulators
    watch what the function reads.
    """
    captured = route.concrete._captured_inputs
    return (len(captured) == len(route.captures) and all(map(operator.is_, captured, route.captures))
            and not TFE_Py_TapeSetPossibleGradientTypes(leaves) and not TFE_Py_TapeSetPossibleGradientTypes(captured))


def _run(route: _Route, leaves: list[Any]) -> Any:
    try:
        if trace.enabled():  # the profiler shows the function's name, as it does for TensorFlow's own way
            with trace.Trace(route.concrete._func_graph.name, tf_function_call="notTraced-short"):
                outputs = _outputs(route, leaves)
        else:
            outputs = _outputs(route, leaves)
    except Exception as error:
        _explain(route, error)
        raise AssertionError from error  # not reached
    return outputs[0] if route.single else route.concrete.function_type.pack_output(outputs)


def _outputs(route: _Route, leaves: list[Any]) -> Any:
    outputs = route.direct(leaves) if route.direct is not None else None
    if outputs is not None:
        return outputs
    inputs = leaves if route.plain else [leaves[i] for i in route.order]
    return context.context().call_function(route.name, [*inputs, *route.captures], route.outputs)


@traceback_utils.filter_traceback
def _explain(route: _Route, error: Exception) -> None:
    """Raises the error of a run with the words that TensorFlow gives it."""
    with atomic_function.InterpolateRuntimeError(route.concrete._inference_function):
        raise error


def _find(look_up: Callable[..., tuple[Any, list[Any]]], args: tuple[Any, ...], kwargs: dict[str, Any],
          leaves: list[Any]) -> _Route | None:
    """The route of a call that was just made the long way; None when there is none.

    ``look_up`` is done once with the arguments themselves, once with tensors that all differ, to see where each of them
    goes.
    """
    marks = [array_ops.identity(_tensor(x)) for x in leaves]
    rest = iter(marks)
    marked_args, marked_kwargs = _replace(args, rest), _replace(kwargs, rest)
    try:
        concrete, inputs = look_up(marked_args, marked_kwargs)
    except (TypeError, ValueError):
        return None  # the signature takes an array of another element type; as a tensor it would be refused
    if concrete is None or concrete is not look_up(args, kwargs)[0]:
        return None
    number = {id(mark): i for i, mark in enumerate(marks)}
    if any(id(x) not in number for x in inputs):
        return None  # made from something else: a default value, a literal that the signature makes a tensor
    captures = list(concrete._captured_inputs)
    results = concrete.function_type.flat_outputs
    if any(type(x) is not _EagerTensor for x in captures) or any(r.dtype.as_datatype_enum in HANDLES for r in results):
        return None
    order = tuple(number[id(x)] for x in inputs)
    name, tensors = concrete._inference_function.name, [_tensor(x) for x in leaves]
    return _Route(name, order, order == tuple(range(len(leaves))), concrete, captures, len(results),
                  type(concrete.function_type.output) is TensorSpec, _direct(concrete, order, captures, tensors))


def _direct(concrete: Any, order: tuple[int, ...], captures: list[Any], tensors: list[Any]
            ) -> direct_call.Direct | None:
    """How to replay a concrete function: one for all shapes that lead to it."""
    made = concrete.__dict__.setdefault("_tf_stitch_direct", {})
    options = hook.generation()
    key = (options, order, tuple(t.backing_device for t in tensors))
    with_captures, direct = made.get(key, ((), None))
    if len(with_captures) != len(captures) or not all(map(operator.is_, with_captures, captures)) or key not in made:
        direct = direct_call.make(concrete._inference_function.name.decode(), options, order, captures, tensors)
        made[key] = captures, direct
    return direct


def _look_up(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The concrete function that a call leads to (None when it would be traced), and its inputs but captures.

    Follows Function._call and tracing_compilation.call_function, without tracing.
    """
    config = (function._no_variable_creation_config if function._created_variables
              else function._variable_creation_config)
    if config is None or config.function_captures.by_ref_external:
        return None, []
    bound = function_type_utils.canonicalize_function_inputs(
        args, kwargs, function._function_type, function._default_values, function._is_pure)
    signature = config.input_signature
    lead = bound.args if signature is None else (*signature, *bound.args[len(signature):])
    kind, _ = function_type_utils.make_canonicalized_monomorphic_type(
        lead, bound.kwargs, config.function_captures.capture_types, config.polymorphic_type)
    concrete = config.function_cache.lookup(kind, function_context.make_function_context(config.scope_type))
    if concrete is None:
        return None, []
    to = concrete.function_type
    return concrete, to.unpack_inputs(to.bind(*bound.args, **bound.kwargs))


def _bind(concrete: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """As :func:`_look_up`, for a concrete function (only its structured signature)."""
    to = concrete.function_type
    if to is None:
        return None, []
    return concrete, to.unpack_inputs(function_type_utils.canonicalize_function_inputs(args, kwargs, to))


def _replace(value: Any, leaves: Iterator[Any]) -> Any:
    """``value`` with its arrays replaced, in the order of :func:`_flatten`."""
    if type(value) in (_EagerTensor, np.ndarray):
        return next(leaves)
    if type(value) in (tuple, list):
        return type(value)(_replace(v, leaves) for v in value)
    if type(value) is dict:
        return {k: _replace(v, leaves) for k, v in value.items()}
    return value
