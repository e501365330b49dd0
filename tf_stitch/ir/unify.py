"""Equalities of symbolic dims met while a graph is built, and what follows from them.

Two unknown dims that an operation needs to be equal are *unified*: one symbol is replaced by the other
side everywhere, and a guard in terms of the original symbols is kept, so the op still compares the real
input dims at run time.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import dims as D
from .dims import Dim, Expr, Symbol
from .graph import Guard
from .ops import IRError


class Unifier:
    """A set of equalities over symbols: a mapping in solved form (no replaced symbol on a right side) and guards."""

    def __init__(self) -> None:
        self.mapping: dict[str, Dim] = {}
        self.guards: list[Guard] = []
        self._rank: dict[str, tuple[int, int]] = {}  # which of two symbols is kept: the smaller rank

    def declare(self, symbol: Symbol, derived: bool) -> None:
        """Registers a symbol; ``derived`` ones (values read from tensors) are replaced before tensor dims."""
        self._rank[symbol.name] = (int(derived), len(self._rank))

    def resolve(self, d: Dim) -> Dim:
        """``d`` with every equality known so far applied."""
        if not isinstance(d, Expr) or not self.mapping:
            return d
        return D.substitute(d, self.mapping)

    def resolve_attr(self, value: Any) -> Any:
        """Resolves the dims inside an attribute value."""
        if isinstance(value, Expr):
            return self.resolve(value)
        return tuple(self.resolve_attr(v) for v in value) if isinstance(value, tuple) else value

    def equate(self, a: Dim, b: Dim, why: str) -> str | None:
        """Makes ``a == b`` hold; returns the name of the symbol that this replaced, if any.

        Raises IRError when the two can never be equal.
        """
        a, b = self.resolve(a), self.resolve(b)
        if a == b:
            return None
        if never_equal(a, b):
            raise IRError(f"{why}: the dims {a} and {b} differ.")
        self.add(Guard("eq", a, b, why))
        solved = self._solve(a, b)
        if solved is None:
            return None
        self._replace(*solved)
        return solved[0]

    def at_least(self, symbol: Symbol, lo: int) -> None:
        """Notes a lower bound of a symbol (a guard must check it)."""
        self._replace(symbol.name, D.symbol(symbol.name, lo, symbol.hi))

    def add(self, guard: Guard) -> None:
        """Records a guard once."""
        if all((g.kind, g.a, g.b) != (guard.kind, guard.a, guard.b) for g in self.guards):
            self.guards.append(guard)

    def _replace(self, name: str, value: Dim) -> None:
        one: Mapping[str, Dim] = {name: value}
        self.mapping = {k: D.substitute(v, one) for k, v in self.mapping.items() if k != name}
        self.mapping[name] = value

    def _solve(self, a: Dim, b: Dim) -> tuple[str, Dim] | None:
        """The best way to express one symbol of ``a == b`` by the rest."""
        found = []
        for s, value in solutions(a - b):
            alone = any(side == _lone(s) for side in (a, b))
            if D.prove_nonneg(value) or alone:
                found.append(((not D.prove_nonneg(value), not isinstance(value, int),
                               tuple(-r for r in self._rank.get(s.name, (0, 0)))), s.name, value))
        if not found:
            return None
        return min(found, key=lambda f: f[0])[1:]


def _lone(s: Symbol) -> Expr:
    return D.symbol(s.name, s.lo, s.hi)


def never_equal(a: Dim, b: Dim) -> bool:
    """True when ``a != b`` follows from the symbols' bounds."""
    return D.prove_le(a + 1, b) or D.prove_le(b + 1, a)


def solutions(difference: Dim) -> list[tuple[Symbol, Dim]]:
    """Every (symbol, value) for which ``difference == 0`` says ``symbol == value``, value free of it."""
    if not isinstance(difference, Expr):
        return []
    found = []
    for monomial, c in difference.terms:
        if len(monomial) != 1 or monomial[0][1] != 1 or not isinstance(monomial[0][0], Symbol):
            continue
        s = monomial[0][0]
        rest = difference - _lone(s) * c
        if s.name in {t.name for t in D.symbols(rest)}:
            continue
        if all(k % c == 0 for _, k in terms(rest)):
            found.append((s, divide_content(rest, -c)))
    return found


def terms(d: Dim) -> tuple:
    """(monomial, coefficient) pairs of a dim."""
    return d.terms if isinstance(d, Expr) else (((), d),) if d else ()


def divide_content(d: Dim, c: int) -> Dim:
    """``d / c`` where ``c`` divides every coefficient."""
    return Expr(tuple((m, k // c) for m, k in d.terms)) if isinstance(d, Expr) else d // c


def strip_common(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Two sizes without the integer and symbol factors that all their terms share.

    Equal results imply ``a == b``; the converse fails only where a stripped symbol is 0.
    """
    both = [*terms(a), *terms(b)]
    if not terms(a) or not terms(b):
        return a, b
    content = math.gcd(*(c for _, c in both))
    shared = dict(both[0][0])
    for m, _ in both[1:]:
        powers = dict(m)
        shared = {atom: min(p, powers.get(atom, 0)) for atom, p in shared.items() if powers.get(atom, 0)}
    factor: Dim = content
    for atom, p in shared.items():
        for _ in range(p):
            factor = factor * Expr(((((atom, 1),), 1),))
    return D.divmod_exact_part(a, factor)[0], D.divmod_exact_part(b, factor)[0]
