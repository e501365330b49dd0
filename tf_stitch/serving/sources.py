"""What tenants are made of: functions become SavedModels, and SavedModels are stitched, once, into the cache."""
from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from .. import plans, saved_model
from ..backend.cache import cache_folder, remove_oldest
from ..errors import OptionError, SavedModelError
from ..options import Options

LOADED_S = 3600  # for so long after it was asked for, a copy may be on its way into memory
DIGEST = "tf_stitch.sha256"  # of a copy in the cache folder: what its files were


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


def stitched_copy(source: Path, options: Options, target: str, verify: bool, own: Path, keep: bool = True) -> Path:
    """A stitched copy of a SavedModel.

    ``keep``: it is made only once, in the cache folder, and made again where it is not what it was.  Where it is not to
    be kept, or that folder cannot be written, it lies in ``own``.  Raises what rewrite_saved_model raises.
    """
    if target != "auto":
        options = replace(options, target=target)
    goal = cache_folder() / "models" / _key(source, options, verify)
    if keep and _is_whole(goal):
        with contextlib.suppress(OSError):  # of a folder that is read only
            os.utime(goal)
        return goal
    place = _new_folder(goal.parent) if keep else None
    made = (place or own) / "stitched"
    try:
        saved_model.rewrite_saved_model(source, made, options=options, verify=verify)
        if place is None:
            return made
        (made / DIGEST).write_text(_digest(made))
        _put(made, goal, place / "damaged")
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
    remove_oldest(goal.parent.iterdir(), LOADED_S)
    return goal


def _new_folder(parent: Path) -> Path | None:
    """A folder to make something in that moves to ``parent``; None where that cannot be written."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".new", dir=parent))
    except OSError:
        return None


def _put(made: Path, goal: Path, aside: Path) -> None:
    """Moves a copy to its place, unless another process has made it meanwhile; what is damaged there goes aside."""
    if goal.exists() and not _is_whole(goal):
        with contextlib.suppress(OSError):  # another process has moved it, or it cannot be moved
            goal.rename(aside)
    try:
        made.rename(goal)
    except OSError as error:
        if not _is_whole(goal):
            raise SavedModelError(f"'{goal}' cannot be written: {error.strerror}.") from None


def _is_whole(copy: Path) -> bool:
    """True when a copy is there as it was made."""
    try:
        return (copy / DIGEST).read_text() == _digest(copy)
    except (OSError, ValueError):
        return False


def _digest(copy: Path) -> str:
    """A hash of a copy's files and their names."""
    h = hashlib.sha256()
    for path in sorted(p for p in copy.rglob("*") if p.is_file() and p != copy / DIGEST):
        with path.open("rb") as f:
            h.update(repr((os.fspath(path.relative_to(copy)), hashlib.file_digest(f, "sha256").hexdigest())).encode())
    return h.hexdigest()


def _key(source: Path, options: Options, verify: bool) -> str:
    from ..graph.devices import gpu_target

    h = hashlib.sha256(repr((options, gpu_target(), verify, plans.sources(), tf.__version__)).encode())
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        stat = path.stat()
        h.update(repr((os.fspath(path.relative_to(source)), stat.st_size)).encode())
        h.update(path.read_bytes() if path.name == saved_model.MODEL else str(stat.st_mtime_ns).encode())
    return h.hexdigest()[:40]
