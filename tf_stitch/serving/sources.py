"""What tenants are made of: functions become SavedModels, and SavedModels are stitched, once, into the cache."""
from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from .. import __version__, saved_model
from ..backend.cache import cache_folder
from ..errors import OptionError, SavedModelError
from ..options import Options


def save_function(function: Callable[..., Any], folder: Path, input_signature: Sequence[tf.TensorSpec] | None) -> None:
    """Writes a function, with the variables that it uses, or a Keras model as a SavedModel with one signature.

    Raises OptionError when its arguments' types are not known, SavedModelError when TensorFlow cannot write it.
    """
    if hasattr(function, "export") and input_signature is None:  # a Keras model knows its inputs
        return _exported(function, folder)
    concrete = _concrete(function, input_signature)
    module = tf.Module()
    module.function = concrete
    module.used = list(concrete.graph.variables)
    try:
        tf.saved_model.save(module, os.fspath(folder), signatures=concrete)
    except Exception as error:
        reason = saved_model._first_line(error)
        name = getattr(function, "__name__", "?")
        raise SavedModelError(f"The function '{name}' cannot be saved: {reason}") from None


def _exported(model: Any, folder: Path) -> None:
    try:
        model.export(os.fspath(folder), verbose=False)
    except Exception as error:
        raise SavedModelError(f"The model cannot be exported: {saved_model._first_line(error)}") from None


def _concrete(function: Any, input_signature: Sequence[tf.TensorSpec] | None) -> Any:
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    if isinstance(function, ConcreteFunction):
        return function
    if not isinstance(function, Function):
        function = tf.function(function, autograph=False)
    if input_signature is not None:
        try:
            return function.get_concrete_function(*input_signature)
        except TypeError as error:
            reason = saved_model._first_line(error)
            raise OptionError(f"The function does not take arguments of input_signature ({reason}).") from None
    if function.input_signature is None:
        raise OptionError("The function's arguments have no types; give input_signature=[tf.TensorSpec(...), ...].")
    return function.get_concrete_function()


def stitched_copy(source: Path, options: Options, target: str, verify: bool, parent: Path | None) -> Path:
    """A stitched copy of a SavedModel: in ``parent``, else in the cache folder, where it is made only once.

    Raises what rewrite_saved_model raises.
    """
    if target != "auto":
        options = replace(options, target=target)
    if parent is not None:
        goal = parent / "stitched"
    else:
        goal = cache_folder() / "models" / _key(source, options, verify)
    if (goal / saved_model.MODEL).is_file():
        return goal
    try:
        saved_model.rewrite_saved_model(source, goal, options=options, verify=verify)
    except SavedModelError:
        if not (goal / saved_model.MODEL).is_file():  # another process may have made it meanwhile
            raise
    return goal


def _key(source: Path, options: Options, verify: bool) -> str:
    from ..graph.devices import gpu_target

    h = hashlib.sha256(repr((options, gpu_target(), verify, __version__, tf.__version__)).encode())
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        stat = path.stat()
        h.update(repr((os.fspath(path.relative_to(source)), stat.st_size)).encode())
        h.update(path.read_bytes() if path.name == saved_model.MODEL else str(stat.st_mtime_ns).encode())
    return h.hexdigest()[:40]
