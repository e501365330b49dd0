"""Nested scopes of kernel text: every value is declared once, in the outermost loop that it does not depend on."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Node
from ..schedule.rules import Index

Key = tuple[Node, Index]


@dataclass
class Scope:
    """One pair of braces: its lines, the symbols it defines and the values declared in it."""

    lines: list[str] = field(default_factory=list)
    symbols: set[str] = field(default_factory=set)
    values: dict[Key, str] = field(default_factory=dict)
    conditional: bool = False


class Scopes:
    """A stack of scopes, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Scope] = [Scope()]

    @property
    def top(self) -> Scope:
        """The innermost open scope."""
        return self.stack[-1]

    def line(self, text: str) -> None:
        """Adds a line to the innermost scope."""
        self.top.lines.append(text)

    def find(self, key: Key) -> str | None:
        """The variable that holds a value at an index, when an open scope has one."""
        for s in reversed(self.stack):
            name = s.values.get(key)
            if name is not None:
                return name
        return None

    def depth_of(self, index: Index) -> int:
        """The innermost scope that an index needs: that of its loops, and not outside a condition."""
        names = {s.name for d in index for s in D.symbols(d)}
        for depth in range(len(self.stack) - 1, 0, -1):
            if self.stack[depth].conditional or not names.isdisjoint(self.stack[depth].symbols):
                return depth
        return 0

    def depth_of_name(self, name: str) -> int | None:
        """The scope that declares a variable of a value, when it is open."""
        for depth in range(len(self.stack) - 1, -1, -1):
            if name in self.stack[depth].values.values():
                return depth
        return None

    @contextmanager
    def at(self, depth: int) -> Iterator[Scope]:
        """Works in an outer scope for a while; what it opens lies before the inner scopes' text."""
        tail = self.stack[depth + 1:]
        del self.stack[depth + 1:]
        try:
            yield self.top
        finally:
            del self.stack[depth + 1:]
            self.stack.extend(tail)

    @contextmanager
    def block(self, header: str, symbols: tuple[str, ...] = (), conditional: bool = False) -> Iterator[Scope]:
        """Opens a scope under ``header`` (a loop or a condition) and adds its text to the parent when done."""
        scope = Scope(symbols=set(symbols), conditional=conditional)
        parent = self.top
        self.stack.append(scope)
        yield scope
        self.stack.pop()
        parent.lines.append(f"{header} {{" if header else "{")
        parent.lines.extend("  " + x for x in scope.lines)
        parent.lines.append("}")


def symbol_names(dims: Index | tuple[Dim, ...]) -> set[str]:
    """Names of the symbols of some dims."""
    return {s.name for d in dims for s in D.symbols(d)}
