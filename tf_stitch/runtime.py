"""Loads the op library into TensorFlow and connects it with Python: gradient, source builds, counters.

Only needed where Python runs anyway; a server loads ``_ops.so`` alone (see docs).
"""
from __future__ import annotations

import ctypes
import functools
import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import StitchError
from .program.serialize import VERSION

log = logging.getLogger("tf_stitch")

LIBRARY = Path(__file__).resolve().parent / "_ops.so"
_lock = threading.Lock()


class LibraryError(StitchError, ImportError):
    """The op library is missing or does not fit the installed TensorFlow."""


@dataclass(frozen=True)
class Counters:
    """What the stitched ops of this process have done so far.

    Attributes:
      stitched: runs of a program's own kernels.
      fallbacks: runs of the original TensorFlow operations in an op.
      plans: shape signatures planned.
      loads: shared objects loaded (equal code counts once).
    """

    stitched: int
    fallbacks: int
    plans: int
    loads: int


def built_for() -> str | None:
    """The TensorFlow version that the op library was built against; None when there is no library.

    Raises LibraryError when the file beside the library, which says so, cannot be read.
    """
    if not LIBRARY.exists():
        return None
    record = LIBRARY.with_suffix(".json")
    try:
        return str(json.loads(record.read_text())["tensorflow"])
    except (OSError, ValueError, KeyError, TypeError):
        raise LibraryError(f"tf_stitch's op library cannot be used: '{record}', which says what TensorFlow it was "
                           "built for, is missing or damaged; install tf_stitch again.") from None


def check() -> None:
    """Raises LibraryError unless the op library is there and fits the installed TensorFlow."""
    import tensorflow as tf

    built = built_for()
    if built is None:
        raise LibraryError("tf_stitch's op library is not built; run 'make build' in its source tree, or install "
                           "tf_stitch with 'pip install --no-build-isolation .'.")
    if built.split(".")[:2] != tf.__version__.split(".")[:2]:
        raise LibraryError(f"tf_stitch's op library was built for TensorFlow {built} and this is TensorFlow "
                           f"{tf.__version__}; install tf_stitch again to build it for this version.")


def load() -> Any:
    """Loads the op library once and returns its module (``stitched_program`` is the op).  Raises LibraryError."""
    import tensorflow  # noqa: F401  before the lock: whoever watches for its import calls this function

    with _lock:
        return _load()


@functools.cache
def _load() -> Any:
    import tensorflow as tf

    check()
    try:
        module = tf.load_op_library(str(LIBRARY))
    except tf.errors.OpError as error:
        raise LibraryError(f"tf_stitch's op library cannot be loaded ({str(error.message).splitlines()[0]}); "
                           "install tf_stitch again to build it for this TensorFlow.") from None
    _check_age()
    _register_gradient()
    library().tf_stitch_set_compiler(_compile_callback)
    return module


def _check_age() -> None:
    """Raises LibraryError where the op library cannot run the programs that this Python writes."""
    reads = library().tf_stitch_program_version()
    if reads < VERSION:
        raise LibraryError(f"tf_stitch's op library is older than its Python (it reads programs up to version {reads}, "
                           f"not {VERSION}); run 'make build' in its source tree, or install tf_stitch again.")


class _ByName:
    """Functions of the op library, whose absence is an error that tells what to do."""

    def __getitem__(self, name: Any) -> Any:
        try:
            return super().__getitem__(name)  # type: ignore[misc]
        except AttributeError:
            raise LibraryError(f"tf_stitch's op library is older than its Python (it has no '{name}'); run 'make "
                               "build' in its source tree, or install tf_stitch again.") from None


class _Library(_ByName, ctypes.CDLL):
    pass


class _PythonLibrary(_ByName, ctypes.PyDLL):
    pass


@functools.cache
def python_library() -> ctypes.PyDLL:
    """The op library's functions that want Python's lock held.  Raises LibraryError."""
    return _PythonLibrary(str(LIBRARY))


@functools.cache
def library() -> ctypes.CDLL:
    """The op library's plain C functions.  Raises LibraryError."""
    lib = _Library(str(LIBRARY))
    lib.tf_stitch_built_for.restype = ctypes.c_char_p
    lib.tf_stitch_host_target.restype = ctypes.c_char_p
    lib.tf_stitch_set_compiler.restype = None
    lib.tf_stitch_set_compiler.argtypes = [_COMPILE]
    lib.tf_stitch_counters.restype = None
    lib.tf_stitch_counters.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    lib.tf_stitch_check_program.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return lib


def counters() -> Counters:
    """What the stitched ops of this process have done so far."""
    load()
    values = (ctypes.c_int64 * 4)()
    library().tf_stitch_counters(values)
    return Counters(*values)


def check_program(data: bytes) -> str:
    """What is wrong with a program's bytes, as the op sees it; "" when nothing is."""
    load()
    error = ctypes.create_string_buffer(1000)
    good = library().tf_stitch_check_program(data, len(data), error, len(error))
    return "" if good else error.value.decode(errors="replace")


# --- programs with no code for this processor are built from their text ------------------------------

_DELIVER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
_COMPILE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, _DELIVER, ctypes.c_void_p)


@_COMPILE
def _compile_callback(text, size, target, deliver, sink) -> int:  # called from TensorFlow's threads
    from .backend import host

    try:
        level = target.decode()
        code = host.compile_text(ctypes.string_at(text, size).decode(), (level,))[level]
    except (StitchError, UnicodeDecodeError) as error:
        log.warning("A stitched program has no code for this processor and cannot be built here: %s", error)
        return 1
    deliver(sink, code, len(code))
    return 0


# --- gradient --------------------------------------------------------------------------------------

def _register_gradient() -> None:
    import tensorflow as tf

    tf.RegisterGradient("StitchedProgram")(_gradient)


def _gradient(op: Any, *grads: Any) -> list[Any]:
    """Differentiates the operations that the op replaced; they stay in the graph, so higher orders work too.

    This is for models that were rewritten before (a loaded SavedModel); ``enable()`` rewrites after autodiff.
    """
    import tensorflow as tf
    from tensorflow.python.framework import function_def_to_graph

    name = op.get_attr("fallback").name
    function = function_def_to_graph.get_function_def(name, None if tf.executing_eagerly() else op.graph)
    if function is None:
        raise StitchError(f"The gradient of '{op.name}' needs the function '{name}', which is not in its graph.")
    if not tf.executing_eagerly():
        return _differentiate(function, op.inputs, grads)

    @tf.function(autograph=False)
    def backward(inputs, grads):
        found = _differentiate(function, inputs, grads)
        return [tf.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]

    result = backward(list(op.inputs), list(grads))
    return [g if x.dtype.is_floating else None for x, g in zip(op.inputs, result)]


def _differentiate(function: Any, inputs: Any, grads: Any) -> list[Any]:
    """Gradients of a FunctionDef's outputs with respect to ``inputs``, in the current graph."""
    import tensorflow as tf
    from tensorflow.python.framework import function_def_to_graph

    xs = [tf.identity(x) for x in inputs]  # an input given twice is two variables here
    graph_def, flat = function_def_to_graph.function_def_to_graph_def(function, [x.shape for x in xs])
    feeds = {flat[arg.name]: x for arg, x in zip(function.signature.input_arg, xs)}
    names = [flat[function.ret[arg.name]] for arg in function.signature.output_arg]
    ys = tf.graph_util.import_graph_def(graph_def, feeds, names, name="stitched_gradient")
    used = [(y, g) for y, g in zip(ys, grads) if g is not None and y.dtype.is_floating]
    wanted = [i for i, x in enumerate(xs) if x.dtype.is_floating]
    found = tf.gradients([y for y, _ in used], [xs[i] for i in wanted], [g for _, g in used]) if used else []
    out: list[Any] = [None] * len(xs)
    for i, g in zip(wanted, found):
        out[i] = g
    return out
