"""Warm-up requests for TensorFlow Serving: assets.extra/tf_serving_warmup_requests of a SavedModel.

Serving sends these to a model before it says that it is ready (tensorflow_serving/g3doc/saved_model_warmup.md).  The
file is a TFRecord of PredictionLog protos.  Only a few fields of them are needed, so their bytes are written here
rather than by tensorflow-serving-api: a message is a sequence of (field number, length, bytes).
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MOST = 1000  # records that Serving takes

# Field numbers of tensorflow_serving/apis/{prediction_log,predict,model}.proto.
_PREDICT_LOG, _REQUEST = 6, 1          # PredictionLog.predict_log, PredictLog.request
_MODEL_SPEC, _INPUTS = 1, 2            # PredictRequest
_NAME, _SIGNATURE_NAME = 1, 3          # ModelSpec
_KEY, _VALUE = 1, 2                    # an entry of a map


def write(folder: Path, inputs: Mapping[str, Any] | None = None) -> int:
    """Writes requests for every signature of the SavedModel ``folder``: ``inputs`` where they hold all of its inputs,
    else drawn ones of batch sizes 1, 3 and 17 (those that the model takes).  Returns how many.

    Raises SavedModelError when no inputs could be drawn, or the file cannot be written.
    """
    import tensorflow as tf

    from .saved_model import _disk_errors, signatures

    found = signatures(folder)
    records = [prediction_log(name, request) for name in sorted(found)  # a proto's map has no order
               for request in _requests(found[name], inputs or {})][:MOST]
    path = folder / FILE
    with _disk_errors(folder):
        path.parent.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(os.fspath(path)) as out:
            for record in records:
                out.write(record)
    return len(records)


def _requests(signature: Any, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    from .errors import SavedModelError
    from .saved_model import _NOT_DRAWN, BATCHES, _drawn, _given, _has_unknown, _run

    given = _given(signature, inputs) if inputs else None
    if given is not None:
        return [_typed(signature, given)]
    out: list[Mapping[str, Any]] = []
    for batch in BATCHES if _has_unknown(signature) else BATCHES[:1]:
        for drawn in _drawn(signature, batch):
            try:
                _run(signature, drawn)
            except SavedModelError:
                continue
            out.append(_typed(signature, drawn))
            break
    if not out:
        raise SavedModelError(_NOT_DRAWN.format(signature.name))
    return out


def _typed(signature: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    return {k: tf.make_tensor_proto(v, signature.inputs[k].dtype) for k, v in inputs.items()}


def prediction_log(signature: str, inputs: Mapping[str, Any], model: str = "") -> bytes:
    """The bytes of a PredictionLog of one PredictRequest.  ``inputs``: TensorProtos by name."""
    spec = _field(_NAME, model.encode()) * bool(model) + _field(_SIGNATURE_NAME, signature.encode())
    request = _field(_MODEL_SPEC, spec)
    for name, tensor in sorted(inputs.items()):
        value = tensor.SerializeToString(deterministic=True)
        request += _field(_INPUTS, _field(_KEY, name.encode()) + _field(_VALUE, value))
    return _field(_PREDICT_LOG, _field(_REQUEST, request))


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# --- reading -----------------------------------------------------------------------------------------

def recorded(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(signature, inputs as arrays by name) of every warm-up request of a SavedModel; [] when it has none.

    Raises SavedModelError when the file cannot be read.
    """
    import tensorflow as tf

    from .errors import SavedModelError

    path = folder / FILE
    if not path.is_file():
        return []
    try:
        records = [bytes(r.numpy()) for r in tf.data.TFRecordDataset(os.fspath(path)).take(MOST)]
        return [request for request in map(_request_of, records) if request is not None]
    except (tf.errors.OpError, ValueError, IndexError, KeyError) as error:
        raise SavedModelError(f"'{path}' cannot be read: {error}") from None


def _request_of(record: bytes) -> tuple[str, dict[str, Any]] | None:
    """The request of a PredictionLog; None when it is no PredictRequest."""
    import tensorflow as tf
    from tensorflow.core.framework import tensor_pb2

    predict = _fields(record).get(_PREDICT_LOG)
    if not predict:
        return None
    request = _fields(_fields(predict[0])[_REQUEST][0])
    spec = _fields(request.get(_MODEL_SPEC, [b""])[0])
    inputs = {}
    for entry in map(_fields, request.get(_INPUTS, [])):
        tensor = tf.make_ndarray(tensor_pb2.TensorProto.FromString(entry[_VALUE][0]))
        inputs[entry[_KEY][0].decode()] = tensor
    return spec.get(_SIGNATURE_NAME, [b"serving_default"])[0].decode(), inputs


def _fields(data: bytes) -> dict[int, list[bytes]]:
    """The length-delimited fields of a message by number; those of other kinds are skipped."""
    out: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == 2:
            size, at = _read_varint(data, at)
            if at + size > len(data):
                raise ValueError("a record ends too early")
            out.setdefault(tag >> 3, []).append(data[at:at + size])
            at += size
        elif kind == 0:
            _, at = _read_varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("a record is no PredictionLog")
    return out


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
