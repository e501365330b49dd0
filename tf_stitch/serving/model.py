"""One version of a served model: its graph in a session of its own, and a short way into each signature."""
from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.saved_model import loader_impl

from ..errors import OptionError, SavedModelError
from ..restored import restore_what_is_read
from ..saved_model import INIT_SIGNATURE, _first_line, read, stitched_nodes
from . import garbage
from .graphs import place, shorten

TAGS = {"serve"}
INTEGERS, NUMBERS = "iu", "biuf"  # kinds of NumPy's types
ALIGNMENT = 64    # bytes: TensorFlow takes arrays that begin at a multiple of it as they are
LARGE = 1 << 14   # bytes of an array whose copy is worth a thought
# RunOptions.inter_op_thread_pool: the graph runs on the thread that asks; behind what the scheduler held of it, on the
# thread that brings the answer.
ON_CALLER = -1
_versions = itertools.count(1)  # a session's (name, version) must be its own in the process
# A run ends when its own results are there, not when everything that others queued on the stream is done.  TensorFlow
# has no option for it and looks when a session is made.  Set once, here: other threads may read the environment later.
os.environ.setdefault("TF_SYNC_ON_FINISH", "0")


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a signature: element type, and shape with None for unknown dims (None: unknown rank)."""

    name: str
    tensor: str
    dtype: np.dtype
    shape: tuple[int | None, ...] | None

    def array(self, value: Any) -> np.ndarray:
        """``value`` as an array that fits.  Raises OptionError."""
        if type(value) is not np.ndarray or value.dtype != self.dtype:
            value = self._converted(value)
        shape = self.shape
        if shape is not None and (len(shape) != value.ndim or any(
                want is not None and want != got for want, got in zip(shape, value.shape))):
            raise OptionError(f"Input '{self.name}' has shape {_dims(value.shape)}, and the signature takes "
                              f"{_dims(shape)}.")
        return value

    def takes(self, other: Input) -> bool:
        """Whether all that fits ``other`` fits."""
        if self.dtype != other.dtype or self.shape is None:
            return self.dtype == other.dtype
        return other.shape is not None and len(self.shape) == len(other.shape) and all(
            mine in (None, its) for mine, its in zip(self.shape, other.shape))

    def text(self) -> str:
        """Type and shape."""
        return f"{tf.as_dtype(self.dtype).name} {'of any rank' if self.shape is None else _dims(self.shape)}"

    def _converted(self, value: Any) -> np.ndarray:
        try:
            raw = np.asarray(value)
        except ValueError as error:  # a list of lists of other lengths, say
            raise OptionError(f"Input '{self.name}' is no array ({error}).") from None
        if not _converts(raw.dtype, self.dtype):
            given = {"O": "objects", "S": "strings", "U": "strings"}.get(raw.dtype.kind, raw.dtype.name)
            raise OptionError(f"Input '{self.name}' is of {given}, and the signature takes "
                              f"{tf.as_dtype(self.dtype).name}.")
        converted = raw.astype(self.dtype)
        if raw.dtype.kind in INTEGERS and self.dtype.kind in INTEGERS and not np.array_equal(raw, converted):
            raise OptionError(f"Input '{self.name}' holds values that {self.dtype.name} cannot.")
        return converted


def _converts(kind: np.dtype, to: np.dtype) -> bool:
    """True when values may be converted: text to text, integers to integers that hold them, numbers to floats."""
    if to.kind == "O":
        return kind.kind in "OSU"
    return (np.can_cast(kind, to, "same_kind") or (kind.kind in INTEGERS and to.kind in INTEGERS)
            or (kind.kind in NUMBERS and tf.as_dtype(to).is_floating))


def _dims(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in shape)}]"


class Endpoint:
    """A signature of a served model: what it takes, what it gives, and a prebuilt way in."""

    def __init__(self, name: str, session: Any, definition: Any) -> None:
        self.name = name
        self.inputs = tuple(_input(key, info) for key, info in sorted(definition.inputs.items()))
        self.outputs = tuple(sorted(definition.outputs))
        self._types = {key: tf.as_dtype(info.dtype) for key, info in definition.outputs.items()}
        self._fetches = [definition.outputs[key].name for key in self.outputs]
        self._session = session
        self._lock = threading.Lock()
        self._callable: Callable[..., list[Any]] | None = None

    def prepare(self) -> Endpoint:
        """Builds the way in, once: TensorFlow optimizes and places the graph here."""
        with self._lock:
            if self._callable is None:
                options = config_pb2.CallableOptions(feed=[i.tensor for i in self.inputs], fetch=self._fetches,
                                                     run_options=self._run_options())
                self._callable = self._session._make_callable_from_options(options)
        return self

    def bind(self, inputs: Any) -> list[np.ndarray]:
        """The arrays to feed.  ``inputs``: values by name, or the value itself where there is one input.

        Raises OptionError when they do not fit.
        """
        mine = self.inputs
        if not isinstance(inputs, Mapping):
            if len(mine) != 1:
                raise OptionError(f"Signature '{self.name}' takes {self._names()}; give them by name.")
            return [mine[0].array(inputs)]
        if len(inputs) != len(mine) or any(i.name not in inputs for i in mine):
            raise OptionError(f"Signature '{self.name}' takes {self._names()}, and was given "
                              f"{', '.join(sorted(map(str, inputs))) or 'nothing'}.")
        return [i.array(inputs[i.name]) for i in mine]

    def __call__(self, arrays: Sequence[np.ndarray], timeout_ms: int = 0) -> dict[str, np.ndarray]:
        """Outputs by name.  Blocks; other Python threads run meanwhile.  Raises what TensorFlow raises."""
        arrays = [_aligned(a) if a.nbytes >= LARGE else a for a in arrays]
        if timeout_ms:
            values = self._run_until(arrays, timeout_ms)
        else:
            call = self._callable or self.prepare()._callable
            assert call is not None
            values = call(*arrays)
        return dict(zip(self.outputs, values))

    def specs(self) -> dict[str, tf.TensorSpec]:
        """The inputs' types and shapes by name."""
        return {i.name: tf.TensorSpec(i.shape, tf.as_dtype(i.dtype) if i.dtype.kind != "O" else tf.string)
                for i in self.inputs}

    def why_not_for(self, old: Endpoint) -> str:
        """Why this signature cannot take what ``old`` takes, and give what it gives; "" where it can."""
        mine, its = ({i.name: i for i in e.inputs} for e in (self, old))
        if mine.keys() != its.keys():
            return f"it takes {self._names()}, and the old one {old._names()}"
        for name, i in mine.items():
            if not i.takes(its[name]):
                return f"its input '{name}' is {i.text()}, and the old one's {its[name].text()}"
        for name, kind in old._types.items():
            if self._types.get(name) != kind:
                has = f"of {self._types[name].name}" if name in self._types else "missing"
                return f"its output '{name}' is {has}, and the old one's of {kind.name}"
        return ""

    def _run_until(self, arrays: Sequence[np.ndarray], timeout_ms: int) -> list[Any]:
        graph = self._session.graph
        options = pywrap_tf_session.TF_NewBufferFromString(self._run_options(timeout_ms).SerializeToString())
        try:
            feeds = {graph.get_tensor_by_name(i.tensor)._as_tf_output(): a for i, a in zip(self.inputs, arrays)}
            fetches = [graph.get_tensor_by_name(name)._as_tf_output() for name in self._fetches]
            return pywrap_tf_session.TF_SessionRun_wrapper(self._session._session, options, feeds, fetches, [], None)
        finally:
            pywrap_tf_session.TF_DeleteBuffer(options)

    def _run_options(self, timeout_ms: int = 0) -> Any:
        return config_pb2.RunOptions(timeout_in_ms=timeout_ms, inter_op_thread_pool=ON_CALLER)

    def _names(self) -> str:
        return ", ".join(f"'{i.name}'" for i in self.inputs) or "no inputs"


def _aligned(array: np.ndarray) -> np.ndarray:
    """The array, or a copy that begins where TensorFlow wants it to: its own copy would be made under Python's lock."""
    if array.dtype.kind == "O" or array.ctypes.data % ALIGNMENT == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    copy = memory[begin:begin + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def _composite(definition: Any) -> str | None:
    """The name of an input or output of a signature that is several tensors (sparse, ragged)."""
    ends = (*definition.inputs.items(), *definition.outputs.items())
    return next((name for name, info in ends if info.WhichOneof("encoding") != "name"), None)


def _input(name: str, info: Any) -> Input:
    shape = None if info.tensor_shape.unknown_rank else tuple(
        None if d.size < 0 else d.size for d in info.tensor_shape.dim)
    return Input(name, info.name, np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype), shape)


class ServedModel:
    """A SavedModel in a tf.compat.v1.Session.

    Attributes:
      version: a number that no other served model of the process has.
      folder: where it was loaded from.
      device: where its nodes were placed ("" where TensorFlow chooses).
      outstanding: requests that were taken for it and have no answer yet; the dispatcher counts them.
      retired: no further request comes; it is closed when the last one is answered.
    """

    def __init__(self, folder: Path, tenant: str, *, device: str = "", signature: str | None = None,
                 config: Any = None) -> None:
        """Loads the MetaGraph "serve".  Raises SavedModelError, OptionError when it has no such signature.

        ``tenant`` is the name that the scheduler knows its requests by.
        """
        read(folder)
        self.folder, self.device, self.version = folder, device, next(_versions)
        self.outstanding, self.retired = 0, False
        self.graph = tf.Graph()
        self.session = _new_session(self.graph, _config(config, tenant, self.version))
        try:
            definitions = {name: d for name, d in self._load(folder, device).items()
                           if name != INIT_SIGNATURE and d.outputs}
            self._composite = {name: of for name, d in definitions.items() if (of := _composite(d)) is not None}
            self.endpoints = {name: Endpoint(name, self.session, d) for name, d in definitions.items()
                              if name not in self._composite}
            self.default = self._default(signature)
            self.endpoint().prepare()
        except (OptionError, SavedModelError):
            self.close()
            raise
        except Exception as error:
            self.close()
            raise SavedModelError(f"'{folder}' cannot be loaded by TensorFlow: {_first_line(error)}") from None

    def endpoint(self, signature: str | None = None) -> Endpoint:
        """A signature, the default one where none is named.  Raises OptionError."""
        found = self.endpoints.get(signature or self.default)
        if found is None:
            self._check_plain(signature)
            raise OptionError(f"The model has no signature '{signature}'; it has {', '.join(sorted(self.endpoints))}.")
        return found

    def check_replaces(self, old: ServedModel) -> None:
        """Raises OptionError when this version has no signature for requests that ``old`` takes."""
        for name, before in old.endpoints.items():
            after = self.default if name == old.default else name
            if after not in self.endpoints:
                raise OptionError(f"The new version has no signature '{after}', which the old one has.")
            why = self.endpoints[after].why_not_for(before)
            if why:
                raise OptionError(f"The new version cannot take the old one's requests: of signature '{after}', {why}.")

    def _check_plain(self, signature: str | None) -> None:
        if signature in self._composite:
            raise OptionError(f"'{self._composite[signature]}' of signature '{signature}' is sparse or ragged; "
                              "StitchSession serves plain ones.")

    def close(self) -> None:
        """Gives back the session and what it holds.  Requests that still run end with an error."""
        self.session.close()
        garbage.closed()

    def _load(self, folder: Path, device: str) -> dict[str, Any]:
        loader = loader_impl.SavedModelLoader(os.fspath(folder))
        try:
            meta = loader.get_meta_graph_def_from_tags(TAGS)
        except RuntimeError:
            raise SavedModelError(f"'{folder}' holds no graph for serving (tag 'serve').") from None
        if device:
            place(meta.graph_def, device)
        restore_what_is_read(meta)
        shorten(meta)
        with self.graph.as_default():
            saver, _ = loader.load_graph(self.graph, TAGS)
            loader.restore_variables(self.session, saver)
            loader.run_init_ops(self.session, TAGS)
        return dict(meta.signature_def)

    def _default(self, signature: str | None) -> str:
        names = sorted(self.endpoints)
        several = "serving_default" in {*names, *self._composite} or len(names) != 1
        wanted = signature or ("serving_default" if several else names[0])
        if wanted not in names:
            self._check_plain(wanted)
            has = f"it has {', '.join(names)}" if names else "it has none"
            raise OptionError(f"The model has no signature '{wanted}'; {has}.")
        return wanted


def devices(config: Any) -> list[str]:
    """The devices that served models may be placed on ("CPU:0", "GPU:1"), where sessions start from ``config``."""
    with _new_session(tf.Graph(), _config(config, "", 0)) as session:
        return [d.name.rpartition("device:")[2] for d in session.list_devices()]


def is_stitched(folder: Path) -> bool:
    """True when a SavedModel holds stitched ops.  Raises SavedModelError."""
    return any(True for _ in stitched_nodes(read(folder)))


def _config(base: Any, tenant: str, version: int) -> Any:
    config = config_pb2.ConfigProto()
    if base is not None:
        config.CopyFrom(base)
    config.allow_soft_placement = True
    config.gpu_options.allow_growth = True
    config.experimental.session_metadata.name = tenant
    config.experimental.session_metadata.version = version
    return config


def _new_session(graph: Any, config: Any) -> Any:
    return tf.compat.v1.Session(graph=graph, config=config)
