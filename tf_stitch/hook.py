"""Stitching inside TensorFlow: every function graph passes through the rewriter when Grappler optimizes it.

Grappler runs after autodiff, placement, inlining and lowering, when a function is first run for given input
shapes; so gradients, nested functions, loops, branches and Keras' own train step are covered.  The graph
optimizer is in custom_ops/grappler_hook.cc; it calls back into this module.
"""
from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .errors import OptionError
from .options import Options
from .report import Report

log = logging.getLogger("tf_stitch")

OPTIMIZER = "tf_stitch"
DRIVER = "/dev/nvidiactl"  # is there where NVIDIA's driver is
MARK = "tf_stitch__"  # in the trace name of functions made by tf_stitch.function
INTERRUPTED = -1
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
                             ctypes.c_size_t, ctypes.c_void_p)


class _State:
    """What is turned on in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.everything: Options | None = None  # enable() was called with these options
        self.marked = False                     # tf_stitch.function was used
        self.warned: set[str] = set()
        self.reports: deque[tuple[str, Report]] = deque(maxlen=256)


_state = _State()


def enable(options: Options | None = None) -> None:
    """From now on every ``tf.function`` of the process is stitched, Keras' fit, evaluate and predict included.

    Functions that were traced before are stitched when they are called next; nothing is traced again.  It holds
    for all threads.  Raises LibraryError when the op library does not fit the installed TensorFlow, OptionError or
    CompileError when no code can be built for the GPU that ``options`` names.
    """
    from .compiler import check_target

    options = Options.of(options)
    check_target(options)
    with _state.lock:
        _state.everything = replace(options, levels=())  # code for this machine only
        _arm()
        _shorten(True)


def disable() -> None:
    """Undoes :func:`enable`: functions run plain from their next call on (``tf_stitch.function``'s stay stitched)."""
    with _state.lock:
        _state.everything = None
        _shorten(False)
        if _state.marked:
            _arm()
        else:
            _disarm()


def is_enabled() -> bool:
    """True between enable() and disable()."""
    return _state.everything is not None


def reports() -> list[tuple[str, Report]]:
    """(function name, report) of the graphs stitched so far in this process (the last 256)."""
    return list(_state.reports)


def function(func: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """``tf.function`` whose graphs are stitched, with its gradients and what it calls.

    Takes what tf.function takes; ``func`` may also be a ``tf.function`` already (a stitched one of its Python
    function is returned, with its input signature).  Usable as a decorator with and without arguments.
    """
    if func is None:
        return functools.partial(function, **kwargs)
    import tensorflow as tf
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    from .fast_call import StitchedFunction

    if kwargs.get("jit_compile") or (isinstance(func, Function) and func._jit_compile):
        raise OptionError("tf_stitch.function cannot be combined with jit_compile=True; use one of the two.")
    if isinstance(func, Function):
        kwargs.setdefault("input_signature", func.input_signature)
        kwargs.setdefault("autograph", func._autograph)
        kwargs.setdefault("reduce_retracing", func._reduce_retracing)
        func = func.python_function
    if not callable(func):
        raise OptionError(f"tf_stitch.function wraps a callable, not a {type(func).__name__}.")
    made = tf.function(func, **kwargs)
    made._name = MARK + re.sub(r"\W", "_", made._name)  # the name is how its graphs are known again
    made.__class__ = StitchedFunction
    with _state.lock:
        _state.marked = True
        _arm()
    return made


def watch() -> None:
    """Lets what is stitched already be called the short way (see :mod:`tf_stitch.fast_call`); stitches nothing."""
    with _state.lock:
        _state.marked = True
        _arm()


def _shorten(on: bool) -> None:
    from . import fast_call

    fast_call.everywhere(on)


# --- turning the optimizer on --------------------------------------------------------------------------

def _arm() -> None:
    """Puts the optimizer into the config that functions are called with."""
    _install()
    _look_ahead()
    ctx, config = _config()
    options = config.graph_options.rewrite_options
    if all(o.name != OPTIMIZER for o in options.custom_optimizers):
        options.custom_optimizers.add(name=OPTIMIZER)
        if not options.meta_optimizer_timeout_ms:
            options.meta_optimizer_timeout_ms = -1  # compiling counts as optimizing
    _generation(options)
    _use(ctx, config)


@functools.cache
def _look_ahead() -> None:
    """Where there is a GPU, begins what a first rewrite needs: functions are made a while before they are called."""
    def prepare() -> None:
        from . import compiler

        compiler.prepare()

    if os.path.exists(DRIVER) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
        threading.Thread(target=prepare, daemon=True, name="tf_stitch_look_ahead").start()


def generation() -> str:
    """What is turned on."""
    return repr(_state.everything)


def _generation(options: Any) -> None:
    """Marks the config with what is turned on: TensorFlow optimizes a function once per config."""
    for o in options.custom_optimizers:
        if o.name == OPTIMIZER:
            o.parameter_map["everything"].s = generation().encode()


def _disarm() -> None:
    ctx, config = _config()
    options = config.graph_options.rewrite_options
    rest = [o for o in options.custom_optimizers if o.name != OPTIMIZER]
    if len(rest) < len(options.custom_optimizers):
        del options.custom_optimizers[:]
        options.custom_optimizers.extend(rest)
        if options.meta_optimizer_timeout_ms == -1:
            options.meta_optimizer_timeout_ms = 0
        _use(ctx, config)


def _config() -> tuple[Any, Any]:
    """TensorFlow's eager context, and a copy of the config that its functions' configs start from."""
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context

    ctx = context.context()
    config = config_pb2.ConfigProto()
    if ctx._config is not None:
        config.CopyFrom(ctx._config)
    return ctx, config


def _use(ctx: Any, config: Any) -> None:
    from . import fast_call

    ctx._config = config
    ctx._thread_local_data.function_call_options = None  # made anew from the config at the next call
    fast_call.config_changed()  # other threads: when they next call a tf.function


@functools.cache
def _install() -> None:
    from . import runtime

    runtime.load()
    lib = runtime.library()
    lib.tf_stitch_set_rewriter.restype = None
    lib.tf_stitch_set_rewriter.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.tf_stitch_reply.restype = None
    lib.tf_stitch_reply.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p)
    lib.tf_stitch_set_rewriter(ctypes.cast(_callback, ctypes.c_void_p), interrupt)
    atexit.register(lib.tf_stitch_set_rewriter, None, interrupt)  # no calls into an interpreter that is going away


# --- the call from TensorFlow --------------------------------------------------------------------------

@_CALLBACK
def _callback(item, graph, graph_size, keep, keep_size, answer) -> int:
    name = item.decode(errors="replace")
    try:
        if not graph:
            return int(_wanted(name))
        names = ctypes.string_at(keep, keep_size).decode().split("\n")
        result = _rewrite(name, ctypes.string_at(graph, graph_size), tuple(n for n in names if n))
        if result is not None:
            from . import runtime

            runtime.library().tf_stitch_reply(answer, result, len(result))
        return 1
    except KeyboardInterrupt:  # cannot pass through TensorFlow: the op library has it come again
        return INTERRUPTED
    except Exception as error:  # the graph stays as it is
        _warn(f"A graph was left as it is because stitching it failed ({type(error).__name__}: {error}).")
        return 0


def _warn(text: str) -> None:
    if text not in _state.warned:
        _state.warned.add(text)
        log.warning("%s", text)
        log.debug("traceback", exc_info=True)


def _wanted(name: str) -> bool:
    from .graph.rewriter import FALLBACK_PREFIX

    return (_state.everything is not None or _state.marked) and FALLBACK_PREFIX not in name


def _rewrite(name: str, serialized: bytes, keep: tuple[str, ...]) -> bytes | None:
    """The stitched graph, or None when there is nothing to stitch."""
    from tensorflow.core.framework import graph_pb2

    from . import direct_call, rewrites
    from .graph.reads import read_together
    from .graph.rewriter import rewrite

    everything = _state.everything
    graph = graph_pb2.GraphDef.FromString(serialized)
    direct_call.offer(name, generation(), graph)
    if everything is None and MARK not in name and not any(map(_is_marked, graph.node)):
        return None
    options = replace(everything or Options(levels=()), keep=tuple(n for n in keep if not n.startswith("^")))
    run = [n.removeprefix("^") for n in keep if n.startswith("^")]
    only = None if everything is not None or MARK in name else marked_nodes
    start = time.perf_counter()
    result, report = rewrites.remembered(graph, options, [repr(run), str(only is None)], lambda: rewrite(
        graph, options, functions=False, keep_ends=False, run=run, only=only))
    report.seconds = time.perf_counter() - start
    for why in dict.fromkeys(report.failures):
        _warn(f"Operations stay TensorFlow's because their kernels cannot be compiled here: {why}")
    if not report.clusters:
        return None
    direct_call.offer(name, generation(), result)
    if only is None:
        result = read_together(result, keep)
    _state.reports.append((name, report))
    log.info("%s: %s", name, report.summary())
    for node in result.node:
        if node.op not in ("_Arg", "_DeviceArg"):
            node.attr.pop("_output_shapes", None)  # was put there for this rewrite
    return result.SerializeToString(deterministic=True)


def _is_marked(node: Any) -> bool:
    return any(MARK in f for f in node.experimental_debug_info.original_func_names)


def marked_nodes(graph: Any) -> frozenset[str]:
    """Nodes that come from the bodies of tf_stitch.function's functions, inlined into another function.

    TensorFlow notes on an inlined node the function and the name that it had there; what is in front of that
    name is the name of the call.  Branches and loop bodies inside are known by that prefix.
    """
    prefixes = set()
    for node in graph.node:
        if _is_marked(node):
            info = node.experimental_debug_info
            for func, inner in zip(info.original_func_names, info.original_node_names, strict=False):
                if MARK in func and f"{inner}" in node.name:
                    prefixes.add(node.name[:node.name.index(inner)])
    prefixes.discard("")
    return frozenset(n.name for n in graph.node if _is_marked(n) or n.name.startswith(tuple(prefixes)))
