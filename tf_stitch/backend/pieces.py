"""Large CUDA texts are compiled in pieces, side by side, and their PTX is joined: one module as before, sooner.

The front end, which takes most of the time, uses one core; the assembler (ptxas) splits its work by itself.
"""
from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

from ..codegen.unit import SEPARATOR
from ..errors import CompileError

PIECE = 4000  # characters: what takes nvcc about half as long to compile as it takes to start
_NAME = re.compile(r"\bts_[0-9a-f]{16}")  # of a kernel
_HEADER = (".version", ".target", ".address_size")
_SHARED = (".extern", ".weak")
_GLOBAL = (".visible", *_SHARED)
_FUNCTION = re.compile(r"[^=;{]*?\.(?:func|entry)\s*(?:\([^)]*\)\s*)?([\w$]+)")
_VARIABLE = re.compile(r"[^=;({]*?([\w$]+)\s*(?:\[\w*\]\s*)*(?:=|;)")

_CONSTANT = re.compile(r"^\.global [^;={(]*?([\w$]+)(?: = [\w.]+)?;\n", re.M)  # of one element
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.M)
_WORD = re.compile(r"[\w$]+")


class JoinError(CompileError):
    """PTX that this module does not understand; the text must be compiled as a whole."""


def share_out(found: Sequence[str], most: int, piece: int) -> list[list[str]]:
    """Groups of kernels, in at most ``most`` lists of about the same length, of ``piece`` characters or
    more where there are so many."""
    count = max(1, min(most, len(found), sum(map(len, found)) // piece))
    bins: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for i in sorted(range(len(found)), key=lambda i: -len(found[i])):
        least = sizes.index(min(sizes))
        bins[least].append(i)
        sizes[least] += len(found[i])
    return [[found[i] for i in sorted(b)] for b in bins]


def groups(text: str) -> list[str]:
    """A text's kernels, without directives; those that name one another (one calls another's body, for example) are
    one group, in their order."""
    kernels = parts(text)[1]
    return [SEPARATOR.join(kernels[i] for i in group) for group in _together(kernels)]


def parts(text: str) -> tuple[str, list[str]]:
    """Directives of the preprocessor that a text begins with, and its kernels."""
    directives = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return directives, text[len(directives):].split(SEPARATOR)


def _together(kernels: Sequence[str]) -> list[list[int]]:
    """Indices of kernels, those that share a kernel's name in one list."""
    first: dict[str, int] = {}
    parent = list(range(len(kernels)))

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, text in enumerate(kernels):
        for name in set(_NAME.findall(text)):
            parent[find(i)] = find(first.setdefault(name, i))
    groups: dict[int, list[int]] = {}
    for i in range(len(kernels)):
        groups.setdefault(find(i), []).append(i)
    return list(groups.values())


def join_ptx(pieces: Sequence[str]) -> str:
    """One PTX module of several: the first one's header, and what is shared (``.extern``, ``.weak``) once.

    What is local to a piece gets a name of its own: pieces may hold functions of one name that differ, as the compiler
    fits a local function to its callers.  Raises JoinError.
    """
    head: dict[str, None] = {}
    shared: set[str] = set()
    body: list[str] = []
    for i, piece in enumerate(pieces):
        statements = _statements(piece)
        local = [_name(s) for s in statements if not s.startswith((*_GLOBAL, *_HEADER))]
        rename = re.compile(r"(?<![\w$])(" + "|".join(map(re.escape, local)) + r")(?![\w$])") if local and i else None
        for s in statements:
            if s.startswith(_HEADER):
                head.setdefault(s)
            elif not s.startswith(_SHARED) or _name(s) not in shared:
                shared |= {_name(s)} if s.startswith(_SHARED) else set()
                body.append(rename.sub(rf"\1__{i}", s) if rename else s)
    return "\n".join([*head, *body]) + "\n"


def entries(ptx: str) -> tuple[str, ...]:
    """The names of the kernels in PTX."""
    return tuple(_ENTRY.findall(ptx))


def without_unused(ptx: str) -> str:
    """PTX without the constants that nothing in it reads: NVRTC leaves all of the headers' in, nvcc does not."""
    named = Counter(_WORD.findall(ptx))
    return _CONSTANT.sub(lambda found: found[0] if named[found[1]] > 1 else "", ptx)


def _name(statement: str) -> str:
    """What a module-level statement declares."""
    found = _FUNCTION.match(statement) or _VARIABLE.match(statement)
    if found is None:
        raise JoinError(f"The PTX statement '{statement.splitlines()[0]}' is of no known kind.")
    return found[1]


def _statements(ptx: str) -> list[str]:
    """Module-level directives and functions, without comments between them."""
    out: list[str] = []
    lines: list[str] = []
    depth = 0
    for line in ptx.splitlines():
        bare = line.partition("//")[0]
        if not lines and not bare.strip():
            continue
        lines.append(line.lstrip() if not lines else line)
        depth += bare.count("{") - bare.count("}") + bare.count("(") - bare.count(")")
        ended = bare.rstrip().endswith((";", "}")) or bare.lstrip().startswith(_HEADER)
        if depth == 0 and ended:
            out.append("\n".join(lines))
            lines = []
    return [*out, "\n".join(lines)] if lines else out
