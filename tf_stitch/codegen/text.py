"""C++ text of dims, literals and types."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..ir import dims as D
from ..ir.dims import Dim, Func, Symbol
from ..ir.dtypes import DTYPES

Namer = Callable[[Symbol], str]


def dim_text(d: Dim, name: Namer) -> str:
    """The C++ expression of a dim; ``name`` gives the variable of a symbol."""
    if isinstance(d, int):
        return str(d)
    parts: list[str] = []
    for monomial, c in d.terms:
        factors = [_atom(a, name) for a, power in monomial for _ in range(power)]
        if abs(c) != 1 or not factors:
            factors.append(str(abs(c)))
        sign = "-" if c < 0 else "+"
        parts.append(f"{sign} {' * '.join(factors)}" if parts else ("-" if c < 0 else "") + " * ".join(factors))
    return " ".join(parts)


def _atom(a: Symbol | Func, name: Namer) -> str:
    if isinstance(a, Symbol):
        return name(a)
    args = [dim_text(x, name) for x in a.args]
    if a.kind in ("min", "max"):
        out = args[0]
        for x in args[1:]:
            out = f"ts_i{a.kind}({out}, {x})"
        return out
    exact = isinstance(a.args[1], int) and D.prove_nonneg(a.args[0])
    if exact:
        return f"(({args[0]}) {'/' if a.kind == 'div' else '%'} {args[1]})"
    return f"ts_floor{a.kind}({args[0]}, {args[1]})"


def factor_text(d: Dim, name: Namer) -> str:
    """As :func:`dim_text`, in parentheses when it is a sum."""
    text = dim_text(d, name)
    return text if (isinstance(d, int) and d >= 0) or " " not in text else f"({text})"


def storage_type(dtype: str) -> str:
    """The C++ type of an element in memory."""
    return DTYPES[dtype].c


def compute_type(dtype: str) -> str:
    """The C++ type that arithmetic on an element uses."""
    return DTYPES[dtype].compute


def rounded(text: str, dtype: str) -> str:
    """An expression of the compute type, rounded to what memory of the type can hold."""
    c = storage_type(dtype)
    return text if c == compute_type(dtype) else f"ts_round<{c}>({text})"


def literal(value: np.generic | np.ndarray, dtype: str) -> str:
    """A C++ literal of the compute type that has exactly ``value`` (one element)."""
    d = DTYPES[dtype]
    if d.kind == "bool":
        return "true" if value else "false"
    if d.is_float:
        return _float_literal(float(value), d.compute)
    v = int(value)
    if d.size < 8:
        return f"{d.c}({v})"
    if d.kind == "uint":
        return f"{d.c}({v}ull)"
    return f"{d.c}({v}ll)" if v != -(1 << 63) else f"{d.c}(-{(1 << 63) - 1}ll - 1)"


def _float_literal(x: float, c: str) -> str:
    zero = "0.0f" if c == "float" else "0.0"
    if math.isnan(x):
        return f"ts_nan({zero})"
    if math.isinf(x):
        return f"ts_inf({zero})" if x > 0 else f"(-ts_inf({zero}))"
    text = repr(float(np.float32(x))) if c == "float" else repr(x)
    if c == "float":
        text = str(np.float32(x))
        text = text if any(ch in text for ch in ".en") else text + ".0"
        text += "f"
    return f"({text})" if text.startswith("-") else text
