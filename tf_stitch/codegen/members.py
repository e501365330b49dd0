"""One text for parts of a kernel that are alike: the pieces of a long concat, each of other inputs and other tables.

Such parts have the same text but for the buffers that they read and for numbers in subscripts, bounds and 64-bit
literals.  These come from a table then, which a block's member looks up: a kernel of hundreds of pieces compiles as
fast as one of a few.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..ir.dims import Dim

LEAST = 16  # parts that share a text; fewer compile soon enough, and look nothing up
FIRST = "TS_FIRST"  # stands for a part's first block

# What may differ: an input's name, a 64-bit literal, what a subscript begins with, a bound.
_HOLE = re.compile(r"\bx(?P<input>\d+)\b|\b(?P<wide>\d+)ll\b|(?<=, )(?P<start>\d+)(?= \+ )|(?<=\[)(?P<at>\d+)(?= \+ )"
                   r"|(?P<call>ts_(?:clip_index|in_range)\(\w+, )(?P<bound>\d+)(?=\))")


@dataclass(frozen=True)
class PartText:
    """The lines of a part, in which FIRST stands for its first block, and how many blocks it has."""

    lines: list[str]
    blocks: Dim


@dataclass(frozen=True)
class Members:
    """Parts with one text: those of ``texts``; more than one if they share it."""

    texts: list[PartText]

    @property
    def blocks(self) -> Dim:
        """Of all members."""
        return len(self.texts) * self.texts[0].blocks

    def lines(self, start: Dim, factor: Callable[[Dim], str], table: Callable[[str, str], str],
              type_of: Callable[[str], str]) -> list[str]:
        """The text of all members, whose first block is ``start``.

        ``factor`` gives the text of a dim; ``table`` declares an array (element type, values) and gives its name;
        ``type_of`` gives an input's type.
        """
        first = factor(start)
        if len(self.texts) == 1:
            return [x.replace(FIRST, first) for x in self.texts[0].lines]
        columns = list(zip(*([_value(m) for m in _HOLE.finditer(_text(t))] for t in self.texts), strict=True))
        found = list(_HOLE.finditer(_text(self.texts[0])))
        names: dict[tuple[str, tuple[int, ...]], str] = {}
        for m, column in zip(found, columns, strict=True):
            if len(set(column)) > 1:
                names.setdefault((_kind(m), column), f"ts_c{len(names)}")
        declared = []
        for (kind, column), name in names.items():
            at = f"{table('int64_t', ', '.join(map(str, column)))}[ts_m]"
            if kind == "input":
                declared.append(f"const {type_of(f'x{column[0]}')}* __restrict__ {name} = "
                                f"TS_BUFFER({type_of(f'x{column[0]}')}, {at});")
            else:
                declared.append(f"const {'int64_t' if kind == 'wide' else 'ts_idx'} {name} = {at};")
        values = iter(columns)

        def fill(m: re.Match[str]) -> str:
            name = names.get((_kind(m), next(values)))
            return m[0] if name is None else (m["call"] or "") + name

        count, each = len(self.texts), factor(self.texts[0].blocks)
        text = _HOLE.sub(fill, _text(self.texts[0])).replace(FIRST, f"({first} + ts_m * {each})")
        return [f"TS_PART({first}, {factor(self.blocks)}) {{", f"  TS_MEMBERS(ts_m, {first}, {count}, {each}) {{",
                *("    " + x for x in (*declared, *text.split("\n"))), "  }", "}"]


def members(texts: Sequence[PartText], type_of: Callable[[str], str]) -> list[Members]:
    """All parts, those that can share a text together, in the order of the first of each."""
    keys = [(_skeleton(t, type_of), t.blocks) for t in texts]
    place = {key: k for k, key in reversed(list(enumerate(keys)))}
    order = sorted(range(len(texts)), key=lambda k: (place[keys[k]], k))
    out: list[Members] = []
    for _, same in groupby(order, key=lambda k: place[keys[k]]):
        family = [texts[k] for k in same]
        out += [Members(family)] if len(family) >= LEAST else [Members([t]) for t in family]
    return out


def _text(part: PartText) -> str:
    return "\n".join(part.lines)


def _skeleton(part: PartText, type_of: Callable[[str], str]) -> str:
    return _HOLE.sub(lambda m: f"@{_kind(m)} {type_of(m[0]) if m['input'] else m['call'] or ''}", _text(part))


def _kind(m: re.Match[str]) -> str:
    return "input" if m["input"] else "wide" if m["wide"] else "index"


def _value(m: re.Match[str]) -> int:
    return int(next(m[name] for name in ("input", "wide", "start", "at", "bound") if m[name]))
