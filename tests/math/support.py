"""A shared object with one loop per operation and element type, built from the headers as kernels are."""
from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from tf_stitch.backend.host import INCLUDE, LINK, LINK_LAST, supported_levels
from tf_stitch.codegen.unit import HOST_FLAGS
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.ops import OPS

FLAGS = [flag for flag in HOST_FLAGS if not flag.startswith("-fvisibility")]
CXX = shutil.which("g++")
LEVELS = [level for level in supported_levels() if level != "x86-64"]
_TUNE = {"x86-64-v4": ["-mprefer-vector-width=512"]}

# Operations that a loop on the host must vectorise (float32; the others of these also in float64).
VECTOR_FLOAT = [
    "exp", "expm1", "log", "log1p", "sigmoid", "softplus", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sqrt", "rsqrt", "floor", "ceil", "rint", "abs", "sign", "max",
    "min", "div_no_nan", "pow", "atan2", "nextafter"]
SCALAR_DOUBLE = ("sin", "cos", "tan", "pow")

# Element types with loops in the shared object: every compute type of an operation would take minutes.
_TYPES = ("float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "bool")


def elementwise():
    """(name, dtype, OpDef) of everything the table allows."""
    for name, op in OPS.items():
        if op.c is not None:
            for dtype in DTYPES.values():
                if dtype.kind in op.kinds and dtype.compute == dtype.c and (name != "philox" or dtype.name == "uint64"):
                    yield name, dtype, op


def loop(name: str, dtype, op) -> str:
    """A loop applying one operation; one line, so that the compiler's notes name it by its line."""
    args = "xyzw"[: op.arity]
    operands = ", ".join(f"const {dtype.c}* __restrict {a}" for a in args)
    value = op.c.format(*(f"{a}[i]" for a in args), T=dtype.c)
    out = "bool" if name in ("is_nan", "is_inf", "is_finite", "eq", "ne", "lt", "le", "gt", "ge") else (
        {"popcount": "ts_u8", "philox": "ts_u32"}.get(name, dtype.c))
    return (f'extern "C" void f_{name}_{dtype.name}({operands}, {out}* __restrict r, ts_i64 n, ts_i32* ts_status) '
            f"{{ (void)ts_status; _Pragma(\"omp simd\") for (ts_i64 i = 0; i < n; ++i) r[i] = ({out})({value}); }}")


def casts() -> list[str]:
    """Loops over ts_cast between every two storage types."""
    return [f'extern "C" void c_{a.name}_{b.name}(const {a.c}* __restrict x, {b.c}* __restrict r, ts_i64 n) '
            f'{{ _Pragma("omp simd") for (ts_i64 i = 0; i < n; ++i) r[i] = ts_cast<{b.c}>(x[i]); }}'
            for a in DTYPES.values() for b in DTYPES.values()]


@functools.cache
def lines() -> tuple[str, ...]:
    """Source of the shared object."""
    loops = [loop(*entry) for entry in elementwise() if entry[1].name in _TYPES or entry[0] == "philox"]
    return ('#include "ts_math.h"', *loops, *casts())


class Library:
    """The loops at one x86-64 level; ``vectorised`` holds the names of those that the compiler vectorised."""

    def __init__(self, level: str):
        folder = Path(tempfile.mkdtemp(prefix="ts_math_"))
        source, target = folder / "loops.cc", folder / "loops.so"
        source.write_text("\n".join(lines()) + "\n")
        march = [] if level == "aarch64" else [f"-march={level}"]
        command = [CXX, *FLAGS, *march, *_TUNE.get(level, []), "-fopt-info-vec-optimized", "-I", str(INCLUDE), *LINK,
                   str(source), "-o", str(target), *LINK_LAST]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        self.dll = ctypes.CDLL(str(target))
        self.path = target
        self.level = level
        numbers = {int(m) for m in re.findall(r"loops\.cc:(\d+):\d+: optimized: loop vectorized", done.stderr)}
        names = [re.findall(r"void (\w+)\(", text) for text in lines()]
        self.vectorised = {names[k - 1][0] for k in numbers}
        shutil.rmtree(folder, ignore_errors=True)

    def __call__(self, name: str, *xs: np.ndarray, out=None) -> tuple[np.ndarray, int]:
        """The operation on equal-shaped arrays of one type: (result, status word)."""
        xs = [np.ascontiguousarray(x) for x in xs]
        dtype = next(d for d in DTYPES.values() if d.numpy == xs[0].dtype)
        result = np.empty(xs[0].shape, out or xs[0].dtype)
        status = ctypes.c_int32(0)
        getattr(self.dll, f"f_{name}_{dtype.name}")(*(_pointer(x) for x in (*xs, result)), ctypes.c_int64(result.size),
                                                    ctypes.byref(status))
        return result, status.value

    def cast(self, x: np.ndarray, source: str, target: str) -> np.ndarray:
        """ts_cast of an array."""
        x = np.ascontiguousarray(x)
        result = np.empty(x.shape, DTYPES[target].numpy)
        getattr(self.dll, f"c_{source}_{target}")(_pointer(x), _pointer(result), ctypes.c_int64(x.size))
        return result


def _pointer(x: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


library = functools.cache(Library)


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| in units of the last place of the result type; NaN and infinities must agree (else inf).

    ``want`` is of a type with more digits, or float64 rounded from an exact value.
    """
    kind = got.dtype.type
    with np.errstate(all="ignore"):
        rounded = want.astype(kind)
        unit = np.spacing(np.abs(rounded)).astype(want.dtype)
        error = np.abs(got.astype(want.dtype) - want) / unit
        both_nan = np.isnan(got) & np.isnan(want)
        # next to the overflow limit either side of it is within the bound
        edge = np.isinf(got) != np.isinf(rounded)
        near = np.abs(np.where(np.isinf(got), want, got.astype(want.dtype))) >= want.dtype.type(np.finfo(kind).max) * (
            1 - want.dtype.type(np.finfo(kind).eps))
        error = np.where(both_nan | (got == rounded), 0, error)
        error = np.where(edge & near & (np.sign(got) == np.sign(rounded)), 1, error)
    return np.where(np.isnan(error), np.inf, error)
