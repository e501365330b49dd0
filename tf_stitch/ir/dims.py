"""Symbolic dimensions: integers known only at run time, and integer expressions of them.

A :data:`Dim` is a Python ``int`` or an :class:`Expr`.  Expressions are kept in a normal form (a
polynomial with integer coefficients over *atoms*), so equal expressions compare equal and ``n*4//4``
is ``n``.  The same class serves tensor dims (atoms are :class:`Symbol`) and the index expressions of
the code generator (atoms are loop variables with a known range); floor division and modulo are
simplified with those ranges, which is what keeps div and mod out of inner loops.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class Symbol:
    """An unknown integer.  ``lo``/``hi`` are inclusive bounds; ``None`` means unbounded.

    ``hi`` may itself be a Dim (a loop variable runs to ``extent - 1``); ``lo`` is an int or None.
    """

    name: str
    lo: int | None = 0
    hi: Dim | None = None

    def sort_key(self) -> str:
        return self.name


@dataclass(frozen=True)
class Func:
    """An opaque integer function of expressions: ``div`` (floor), ``mod`` (floor), ``min``, ``max``."""

    kind: str
    args: tuple[Dim, ...]

    def sort_key(self) -> str:
        return f"{self.kind}({','.join(map(str, self.args))})"


Atom = Union[Symbol, Func]
Monomial = tuple[tuple[Atom, int], ...]  # ((atom, power), ...), sorted; () is the constant monomial


class Expr:
    """A polynomial over atoms in normal form.  Never constant: constant results are plain ints."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]):
        self.terms = terms
        self._hash = hash(terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self._hash == other._hash and self.terms == other.terms

    def __add__(self, other: Dim) -> Dim:
        return _combine(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return _combine(self, other, -1)

    def __rsub__(self, other: Dim) -> Dim:
        return _combine(_coerce(other), self, -1)

    def __mul__(self, other: Dim) -> Dim:
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in _terms(other):
                m = _mul_monomials(m1, m2)
                out[m] = out.get(m, 0) + c1 * c2
        return _make(out)

    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return mod(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return mod(other, self)

    def __repr__(self) -> str:
        return f"Expr({self})"

    def __str__(self) -> str:
        return to_text(self)


Dim = Union[int, Expr]


def symbol(name: str, lo: int | None = 0, hi: Dim | None = None) -> Expr:
    """The expression that is the single unknown ``name``."""
    return _atom(Symbol(name, lo, hi))


def _atom(atom: Atom) -> Expr:
    return Expr(((((atom, 1),), 1),))


def _coerce(d: Dim) -> Dim:
    return d if isinstance(d, Expr) else int(d)


def _terms(d: Dim) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(d, Expr):
        return d.terms
    return (((), int(d)),) if d else ()


def _term_key(item: tuple[Monomial, int]):
    return [(-p, a.sort_key()) for a, p in item[0]]


def _make(terms: Mapping[Monomial, int]) -> Dim:
    kept = [(m, c) for m, c in terms.items() if c]
    if not kept:
        return 0
    if len(kept) == 1 and kept[0][0] == ():
        return kept[0][1]
    return Expr(tuple(sorted(kept, key=_term_key)))


def _combine(a: Dim, b: Dim, sign: int) -> Dim:
    out = dict(_terms(a))
    for m, c in _terms(b):
        out[m] = out.get(m, 0) + sign * c
    return _make(out)


def _mul_monomials(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for atom, p in b:
        powers[atom] = powers.get(atom, 0) + p
    return tuple(sorted(powers.items(), key=lambda item: item[0].sort_key()))


def _div_monomials(a: Monomial, b: Monomial) -> Monomial | None:
    powers = dict(a)
    for atom, p in b:
        left = powers.get(atom, 0) - p
        if left < 0:
            return None
        powers[atom] = left
        if not left:
            del powers[atom]
    return tuple(sorted(powers.items(), key=lambda item: item[0].sort_key()))


def is_static(d: Dim) -> bool:
    """True for a dim known while rewriting."""
    return not isinstance(d, Expr)


def all_static(dims: Iterable[Dim]) -> bool:
    return all(is_static(d) for d in dims)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dims; 1 for none."""
    return functools.reduce(lambda a, b: a * b, dims, 1)


def divmod_exact_part(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Returns (q, r) with ``a == q*b + r``, q taking every term of ``a`` that ``b``'s lead divides."""
    lead, lead_c = _terms(b)[0]
    quotient: dict[Monomial, int] = {}
    rest = a
    for _ in range(64):  # each step removes a term; the bound only guards against a bug
        for m, c in _terms(rest):
            q = _div_monomials(m, lead)
            if q is not None and c // lead_c and (c % lead_c == 0 or b == lead_c):
                quotient[q] = quotient.get(q, 0) + c // lead_c
                rest = rest - _make({q: c // lead_c}) * b
                break
        else:
            break
    return _make(quotient), rest


def floordiv(a: Dim, b: Dim) -> Dim:
    """``floor(a / b)`` for ``b > 0``; exact parts and provably small remainders are simplified."""
    if isinstance(b, int):
        if b == 0:
            raise ZeroDivisionError("a symbolic dim is divided by zero")
        if b == 1:
            return a
        if isinstance(a, int):
            return a // b
    if a == 0 or a == b:
        return 0 if a == 0 else 1
    q, r = divmod_exact_part(a, b)
    if r == 0 or _within(r, b):
        return q
    if len(_terms(b)) > 1:  # keep multi-term divisors whole
        return _atom(Func("div", (a, b)))
    return q + _atom(Func("div", (r, b)))


def mod(a: Dim, b: Dim) -> Dim:
    """``a - floordiv(a, b) * b`` for ``b > 0``."""
    if isinstance(b, int) and isinstance(a, int):
        return a % b
    if b == 1 or a == 0 or a == b:
        return 0
    r = divmod_exact_part(a, b)[1]
    if r == 0 or _within(r, b):
        return r
    return _atom(Func("mod", (a if len(_terms(b)) > 1 else r, b)))


def ceildiv(a: Dim, b: Dim) -> Dim:
    """``ceil(a / b)`` for ``b > 0``."""
    return floordiv(a + b - 1, b)


def _extremum(kind: str, pick: Callable[..., int], dims: tuple[Dim, ...]) -> Dim:
    flat: list[Dim] = []
    for d in dims:
        if d not in flat:
            flat.append(d)
    ints = [d for d in flat if isinstance(d, int)]
    rest = [d for d in flat if not isinstance(d, int)]
    if ints:
        rest.append(pick(ints))
    dominated = [
        a for a in rest
        if any(a is not b and (prove_le(a, b) if kind == "max" else prove_le(b, a)) for b in rest)
    ]
    rest = [d for d in rest if d not in dominated] or rest[:1]
    if len(rest) == 1:
        return rest[0]
    return _atom(Func(kind, tuple(sorted(rest, key=str))))


def dmin(*dims: Dim) -> Dim:
    """The smallest of dims."""
    return _extremum("min", min, dims)


def dmax(*dims: Dim) -> Dim:
    """The largest of dims."""
    return _extremum("max", max, dims)


def _bounds_of_atom(atom: Atom) -> tuple[Dim | None, Dim | None]:
    if isinstance(atom, Symbol):
        return atom.lo, atom.hi
    if atom.kind == "mod":
        return 0, atom.args[1] - 1
    if atom.kind == "div":
        lo, hi = lower(atom.args[0]), upper(atom.args[0])
        d = atom.args[1]
        lo = 0 if lo is not None and prove_nonneg(lo) else None
        return lo, floordiv(hi, d) if isinstance(hi, int) and isinstance(d, int) else None
    parts = [lower(a) for a in atom.args], [upper(a) for a in atom.args]
    fold = dmin if atom.kind == "min" else dmax
    known = [[p for p in side if p is not None] for side in parts]
    any_lo = atom.kind == "max"  # one known lower bound is enough for max, one upper for min
    lo = fold(*known[0]) if known[0] and (any_lo or len(known[0]) == len(parts[0])) else None
    hi = fold(*known[1]) if known[1] and (not any_lo or len(known[1]) == len(parts[1])) else None
    return lo, hi


def _is_free(atom: Atom) -> bool:
    """An atom with no upper bound (a tensor dim): it stands for itself in bounds."""
    return _bounds_of_atom(atom)[1] is None


def _extreme(d: Dim, want_upper: bool) -> Dim | None:
    """Replaces bounded atoms by the bound that matters; valid because monomials are non-negative."""
    total: Dim = 0
    for m, c in _terms(d):
        value: Dim = c
        for atom, p in m:
            lo, hi = _bounds_of_atom(atom)
            if not isinstance(lo, int) or lo < 0:
                return None
            bound = _atom(atom) if hi is None else hi if want_upper == (c > 0) else lo
            for _ in range(p):
                value = value * bound
        total = total + value
    if isinstance(total, Expr) and not all(_is_free(a) for m, _ in total.terms for a, _ in m):
        return _extreme(total, want_upper)
    return total


def lower(d: Dim) -> Dim | None:
    """A Dim that ``d`` is never below, or None when none is known."""
    return _extreme(d, False)


def upper(d: Dim) -> Dim | None:
    """A Dim that ``d`` never exceeds (free of ranged symbols), or None when none is known."""
    return _extreme(d, True)


def prove_nonneg(d: Dim) -> bool:
    """True when ``d >= 0`` follows from the symbols' bounds.  False means "not known"."""
    least = lower(d)
    if least is None or isinstance(least, int):
        return least is not None and least >= 0
    shifted: Dim = 0  # write every free atom as lo + (atom - lo): then non-negative coefficients suffice
    for m, c in least.terms:
        value: Dim = c
        for atom, p in m:
            lo, _ = _bounds_of_atom(atom)
            for _ in range(p):
                value = value * (_atom(Symbol(f"|{atom.sort_key()}|")) + (lo if isinstance(lo, int) else 0))
        shifted = shifted + value
    return all(c >= 0 for _, c in _terms(shifted))


def prove_le(a: Dim, b: Dim) -> bool:
    """True when ``a <= b`` follows from the symbols' bounds."""
    return prove_nonneg(b - a)


def _within(r: Dim, b: Dim) -> bool:
    """Provably ``0 <= r < b``."""
    lo, hi = lower(r), upper(r)
    return lo is not None and hi is not None and prove_nonneg(lo) and prove_nonneg(b - 1 - hi)


_APPLY: dict[str, Callable[..., Dim]] = {"div": floordiv, "mod": mod, "min": dmin, "max": dmax}


def substitute(d: Dim, mapping: Mapping[str, Dim]) -> Dim:
    """Replaces symbols by name."""
    if isinstance(d, int) or not mapping:
        return d
    total: Dim = 0
    for m, c in d.terms:
        value: Dim = c
        for atom, p in m:
            if isinstance(atom, Symbol):
                new = mapping.get(atom.name)
                factor: Dim = _atom(atom) if new is None else new
            else:
                factor = _APPLY[atom.kind](*(substitute(a, mapping) for a in atom.args))
            for _ in range(p):
                value = value * factor
        total = total + value
    return total


def renormalise(d: Dim) -> Dim:
    """``d`` computed anew from its atoms, so that simplifications that substitution opened up apply."""
    return substitute(d, {"": 0})


def evaluate(d: Dim, env: Mapping[str, int]) -> int:
    """The value of ``d`` when every symbol has the value ``env`` gives.  KeyError names a missing one."""
    if isinstance(d, int):
        return d
    total = 0
    for m, c in d.terms:
        for atom, p in m:
            if isinstance(atom, Symbol):
                v = env[atom.name]
            else:
                args = [evaluate(a, env) for a in atom.args]
                v = {"div": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0,
                     "min": min, "max": max}[atom.kind](*args)
            c *= v**p
        total += c
    return total


def symbols(d: Dim) -> frozenset[Symbol]:
    """Every symbol that ``d`` depends on."""
    if isinstance(d, int):
        return frozenset()
    found: set[Symbol] = set()
    for m, _ in d.terms:
        for atom, _ in m:
            if isinstance(atom, Symbol):
                found.add(atom)
            else:
                found.update(*(symbols(a) for a in atom.args))
    return frozenset(found)


def to_text(d: Dim) -> str:
    """Readable text, e.g. ``2*n*c + div(n,4)``."""
    if isinstance(d, int):
        return str(d)
    parts = []
    for m, c in d.terms:
        factors = [a.sort_key() if p == 1 else f"{a.sort_key()}^{p}" for a, p in m]
        if c != 1 or not factors:
            factors.insert(0, str(c))
        parts.append("*".join(factors))
    return " + ".join(parts)
