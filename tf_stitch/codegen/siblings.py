"""One text for kernels that differ only in where they read and write, as the steps of an unrolled loop do.

Such kernels have the same text but for constants that begin subscripts of buffers (``x0[84 + i0 * 784 + i1]``).  Those
become run-time dims, so that a program holds one kernel where it had as many as the loop has rounds.
"""
from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace

from .kernel import Kernel

# The constant that a subscript begins with, or what is added to an address.
_START = re.compile(r"\b([xy]\d+(?:\[| \+ \())(?:(\d+)( \+ |(?=[\])])))?")
_HEADER = re.compile(r"(TS_KERNEL\w*)\(\w+, (\d+), \d+")
_DECLARED = re.compile(r"(.*^  TS_(?:IN|OUT|DIM)\([^\n]*\n)", re.M | re.S)
WIDEST = 16  # elements of one access: constants that are multiples of it, or of a part of it, stay provably so


def share_texts(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The same kernels in the same order, where siblings have one text and take what differs as dims."""
    families: dict[str, list[Kernel]] = {}
    for k in kernels:
        families.setdefault(_skeleton(k), []).append(k)
    shared: dict[str, Kernel] = {}
    for family in families.values():
        distinct = list({k.name: k for k in family}.values())
        if len(distinct) > 1:
            shared.update(zip((k.name for k in distinct), _joined(distinct), strict=True))
    return [_as(k, shared[k.name]) if k.name in shared else k for k in kernels]


def _as(kernel: Kernel, twin: Kernel) -> Kernel:
    """``kernel`` with the text of one that has the same text as it."""
    return replace(kernel, name=twin.name, text=twin.text, dims=(*kernel.dims, *twin.dims[len(kernel.dims):]))


def _skeleton(kernel: Kernel) -> str:
    """The text without its name and the constants that subscripts begin with."""
    return _START.sub(lambda m: m[1] + _hole(m), kernel.text.replace(kernel.name, "?"))


def _hole(m: re.Match[str]) -> str:
    return "@" if m[2] is not None and not m[3] else "@ + "


def _constants(kernel: Kernel) -> list[int]:
    return [int(m[2] or 0) for m in _START.finditer(kernel.text)]


def _joined(family: Sequence[Kernel]) -> list[Kernel]:
    """Kernels of one skeleton with one text."""
    columns = list(zip(*(_constants(k) for k in family), strict=True))
    first = len(family[0].dims)
    holes = [c for c in dict.fromkeys(columns) if len(set(c)) > 1]
    steps = {c: math.gcd(WIDEST, *c) for c in holes}
    names = {c: f"n{first + i}" if steps[c] == 1 else f"{steps[c]} * n{first + i}" for i, c in enumerate(holes)}
    at = iter(columns)

    def fill(m: re.Match[str]) -> str:
        column = next(at)
        return m[0] if column not in names else m[1] + names[column] + (" + " if _hole(m) != "@" else "")

    text = _START.sub(fill, family[0].text)
    added = "".join(f"  TS_DIM(n{first + i}, {first + i})\n" for i in range(len(holes)))
    text = _HEADER.sub(rf"\1(?, \2, {first + len(holes)}", text)
    text = _DECLARED.sub(lambda m: m[1] + added, text, count=1)
    name = "ts_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    text = text.replace("?", name, 1)
    return [replace(k, name=name, text=text, dims=(*k.dims, *(c[i] // steps[c] for c in holes)))
            for i, k in enumerate(family)]
