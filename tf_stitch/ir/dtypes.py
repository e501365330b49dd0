"""Element types: one table that every package reads (names are TensorFlow's)."""
from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type.  ``c`` is the C++ storage type, ``compute`` the type that arithmetic uses."""

    name: str
    kind: str  # "float", "int", "uint", "bool"
    size: int  # bytes
    numpy: np.dtype
    c: str
    compute: str

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")


def _d(name: str, kind: str, np_type, c: str, compute: str = "") -> DType:
    return DType(name, kind, np.dtype(np_type).itemsize, np.dtype(np_type), c, compute or c)


DTYPES: dict[str, DType] = {d.name: d for d in [
    _d("float32", "float", np.float32, "float"),
    _d("float64", "float", np.float64, "double"),
    _d("float16", "float", np.float16, "ts_half", "float"),
    _d("bfloat16", "float", ml_dtypes.bfloat16, "ts_bfloat16", "float"),
    _d("int8", "int", np.int8, "ts_i8"),
    _d("int16", "int", np.int16, "ts_i16"),
    _d("int32", "int", np.int32, "ts_i32"),
    _d("int64", "int", np.int64, "ts_i64"),
    _d("uint8", "uint", np.uint8, "ts_u8"),
    _d("uint16", "uint", np.uint16, "ts_u16"),
    _d("uint32", "uint", np.uint32, "ts_u32"),
    _d("uint64", "uint", np.uint64, "ts_u64"),
    _d("bool", "bool", np.bool_, "bool"),
]}

# What sums and products over many elements are computed in: half types would lose digits with every step.
WIDE = {"float16": "float32", "bfloat16": "float32"}


def dtype(name: str) -> DType:
    """The entry for a name; KeyError when tf_stitch has no such element type."""
    return DTYPES[name]


def of_numpy(np_dtype) -> str:
    """The name of a NumPy dtype; KeyError when tf_stitch has no such element type."""
    wanted = np.dtype(np_dtype)
    for d in DTYPES.values():
        if d.numpy == wanted:
            return d.name
    raise KeyError(f"element type {wanted} is not supported")
