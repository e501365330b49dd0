"""Symbolic dimensions: integers known only at run time, and integer expressions of them.

A :data:`Dim` is a Python ``int`` or an :class:`Expr`.  Expressions are kept in a normal form (a
polynomial with integer coefficients over *atoms*), so equal expressions compare equal and ``n*4//4``
is ``n``.  The same class serves tensor dims (atoms are :class:`Symbol`) and the index expressions of
the code generator (atoms are loop variables with a known range); floor division and modulo are
simplified with those ranges, which is what keeps div and mod out of inner loops.
"""
from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, Union

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@dataclass(frozen=True)
class Symbol:
    """An unknown integer.  ``lo``/``hi`` are inclusive bounds; ``None`` means unbounded.

    ``hi`` may itself be a Dim (a loop variable runs to ``extent - 1``); ``lo`` is an int or None.
    """

    name: str
    lo: int | None = 0
    hi: Dim | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.lo, self.hi))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):  # the hash is this process's own
        return Symbol, (self.name, self.lo, self.hi)

    @property
    def key(self) -> str:
        """Text that orders atoms."""
        return self.name


@dataclass(frozen=True)
class Func:
    """An opaque integer function of expressions: ``div`` (floor), ``mod`` (floor), ``min``, ``max``."""

    kind: str
    args: tuple[Dim, ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.args))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return Func, (self.kind, self.args)

    @functools.cached_property
    def key(self) -> str:
        """Text that orders atoms."""
        return f"{self.kind}({','.join(map(str, self.args))})"


Atom = Union[Symbol, Func]
Monomial = tuple[tuple[Atom, int], ...]  # ((atom, power), ...), sorted; () is the constant monomial
_memo = functools.lru_cache(maxsize=1 << 16)


class Expr:
    """A polynomial over atoms in normal form.  Never constant: constant results are plain ints."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]):
        self.terms = terms
        self._hash = hash(terms)

    def __reduce__(self):
        return Expr, (self.terms,)

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
        return _multiply(self, other)

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


@_memo
def symbol(name: str, lo: int | None = 0, hi: Dim | None = None) -> Expr:
    """The expression that is the single unknown ``name``."""
    return _atom(Symbol(name, lo, hi))


@_memo
def _atom(atom: Atom) -> Expr:
    return Expr(((((atom, 1),), 1),))


def _coerce(d: Dim) -> Dim:
    return d if isinstance(d, Expr) else int(d)


def _terms(d: Dim) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(d, Expr):
        return d.terms
    return (((), int(d)),) if d else ()


def _term_key(item: tuple[Monomial, int]):
    return [(-p, a.key) for a, p in item[0]]


def _make(terms: Mapping[Monomial, int]) -> Dim:
    kept = [(m, c) for m, c in terms.items() if c]
    if not kept:
        return 0
    if len(kept) == 1:
        return kept[0][1] if not kept[0][0] else Expr(tuple(kept))
    for m, c in kept:
        for atom, p in m:
            if p == 1 and isinstance(atom, Func) and atom.kind == "mod":
                whole = _recombine(terms, m, c, atom)
                if whole is not None:
                    return whole
    return Expr(tuple(sorted(kept, key=_term_key)))


def _recombine(terms: Mapping[Monomial, int], m: Monomial, c: int, mod_atom: Func) -> Dim | None:
    """``c*M*(b*div(r,b) + mod(r,b))`` is ``c*M*r``: takes the two together when both are there."""
    r, b = mod_atom.args
    divs = {a for other in terms for a, _ in other if isinstance(a, Func) and a.kind == "div"}
    if not divs:
        return None
    rest = _make({tuple(f for f in m if f[0] != mod_atom): c})
    same_remainder = [a.args[0] for a in divs if a.args[1] == b and a.args[0] != r and mod(*a.args) == _atom(mod_atom)]
    for whole in (r, *sorted(same_remainder, key=str)):
        left = dict(terms)
        if all(left.pop(other, None) == k for other, k in _terms(rest * b * floordiv(whole, b))) and m in left:
            del left[m]
            return _make(left) + rest * whole
    return None


@_memo
def _combine(a: Dim, b: Dim, sign: int) -> Dim:
    out = dict(_terms(a))
    for m, c in _terms(b):
        out[m] = out.get(m, 0) + sign * c
    return _make(out)


@_memo
def _multiply(a: Dim, b: Dim) -> Dim:
    out: dict[Monomial, int] = {}
    for m1, c1 in _terms(a):
        for m2, c2 in _terms(b):
            m = _mul_monomials(m1, m2)
            out[m] = out.get(m, 0) + c1 * c2
    return _make(out)


def _mul_monomials(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    powers = dict(a)
    for atom, p in b:
        powers[atom] = powers.get(atom, 0) + p
    return tuple(sorted(powers.items(), key=lambda item: item[0].key))


def _div_monomials(a: Monomial, b: Monomial) -> Monomial | None:
    powers = dict(a)
    for atom, p in b:
        left = powers.get(atom, 0) - p
        if left < 0:
            return None
        powers[atom] = left
        if not left:
            del powers[atom]
    return tuple(sorted(powers.items(), key=lambda item: item[0].key))


def is_static(d: Dim) -> TypeIs[int]:
    """True for a dim known while rewriting."""
    return not isinstance(d, Expr)


def static(d: Dim) -> int:
    """A dim that must be known by now, as an int."""
    assert isinstance(d, int), d
    return d


def all_static(dims: Iterable[Dim]) -> TypeGuard[Sequence[int]]:
    return all(is_static(d) for d in dims)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dims; 1 for none."""
    out: Dim = 1
    for d in dims:
        out = out * d
    return out


def _division_steps(a: Dim, b: Dim) -> Iterator[tuple[Dim, Dim]]:
    """Pairs (q, r) with ``a == q*b + r``, one more term of ``a`` divided in each, terms of high degree first."""
    lead, lead_c = max(_terms(b), key=_degree)
    quotient: Dim = 0
    for _ in range(64):  # each step removes a term; the bound only guards against a bug
        for m, c in sorted(_terms(a), key=_degree, reverse=True):
            q = _div_monomials(m, lead)
            if q is not None and c // lead_c and (c % lead_c == 0 or b == lead_c):
                step = _make({q: c // lead_c})
                quotient, a = quotient + step, a - step * b
                yield quotient, a
                break
        else:
            return


def _degree(term: tuple[Monomial, int]) -> int:
    return sum(p for _, p in term[0])


@_memo
def divmod_exact_part(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Returns (q, r) with ``a == q*b + r``, q taking every term of ``a`` that ``b``'s lead divides."""
    last = collections.deque(_division_steps(a, b), maxlen=1)
    return last[0] if last else (0, a)


def _divmod(a: Dim, b: Dim) -> tuple[Dim, Dim, bool]:
    """(q, r, whether ``0 <= r < b``) with ``a == q*b + r``."""
    if _within(a, b):
        return 0, a, True
    if len(_terms(b)) > 1:  # taking a term out leaves others behind: stop as soon as the rest is small
        for q, r in _division_steps(a, b):
            if r == 0 or _within(r, b):
                return q, r, True
    q, r = divmod_exact_part(a, b)
    return q, r, r == 0 or _within(r, b)


@_memo
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
    q, r, done = _divmod(a, b)
    if done:
        return q
    common = _common_factor(r, b)
    if common is not None:
        return q + floordiv(common[1], common[2])
    inner = _inner_div(r)
    if inner is not None:  # floor(floor(x / d) / b) is floor(x / (d * b))
        return q + floordiv(inner[0], inner[1] * b)
    if len(_terms(b)) > 1:  # keep multi-term divisors whole
        return _atom(Func("div", (a, b)))
    return q + _atom(Func("div", (r, b)))


@_memo
def mod(a: Dim, b: Dim) -> Dim:
    """``a - floordiv(a, b) * b`` for ``b > 0``."""
    if isinstance(b, int) and isinstance(a, int):
        return a % b
    if b == 1 or a == 0 or a == b:
        return 0
    a = _without_inner_mod(a, b)
    _, r, done = _divmod(a, b)
    if done:
        return r
    common = _common_factor(r, b)
    if common is not None:
        return common[0] * mod(common[1], common[2]) + (r - common[0] * common[1])
    if len(_terms(b)) > 1:
        return _atom(Func("mod", (a, b)))
    return _atom(Func("mod", (r, b)))


def _common_factor(a: Dim, b: Dim) -> tuple[Dim, Dim, Dim] | None:
    """(g, a', b') with ``b == g*b'`` and ``0 <= a - g*a' < g``: then a div b is a' div b', with g > 1."""
    if len(_terms(b)) != 1:
        return None
    monomial, c = _terms(b)[0]
    ints = {math.gcd(c, k) for _, k in _terms(a)} - {1}
    factors: list[Dim] = [*sorted(ints, reverse=True)]
    for atom, _ in monomial:
        factors += [_atom(atom), _atom(atom) * c] if abs(c) != 1 else [_atom(atom)]
    for g in factors:
        quotient, rest = divmod_exact_part(b, g)
        if rest != 0 or quotient == 1:
            continue
        part, small = divmod_exact_part(a, g)
        if part != 0 and (small == 0 or _within(small, g)):
            return g, part, quotient
    return None


def _inner_div(r: Dim) -> tuple[Dim, Dim] | None:
    """(x, d) when ``r`` is ``div(x, d)``."""
    if isinstance(r, Expr) and len(r.terms) == 1 and r.terms[0][1] == 1 and len(r.terms[0][0]) == 1:
        atom, p = r.terms[0][0][0]
        if p == 1 and isinstance(atom, Func) and atom.kind == "div":
            return atom.args[0], atom.args[1]
    return None


def _without_inner_mod(a: Dim, b: Dim) -> Dim:
    """``a`` with ``mod(x, m)`` replaced by ``x`` where ``b`` divides ``m``: the same modulo ``b``."""
    for m, c in _terms(a):
        for atom, p in m:
            if p == 1 and isinstance(atom, Func) and atom.kind == "mod" and divmod_exact_part(atom.args[1], b)[1] == 0:
                factor = _make({tuple(f for f in m if f[0] != atom): c})
                return _without_inner_mod(a - factor * _atom(atom) + factor * atom.args[0], b)
    return a


def ceildiv(a: Dim, b: Dim) -> Dim:
    """``ceil(a / b)`` for ``b > 0``."""
    return floordiv(a + b - 1, b)


@_memo
def _parts_of(kind: str, d: Dim) -> tuple[Dim, ...]:
    """What a dim is the extremum of; of others the dim itself."""
    if isinstance(d, Expr) and len(d.terms) == 1 and d.terms[0][1] == 1 and len(d.terms[0][0]) == 1:
        (atom, power), = d.terms[0][0]
        if power == 1 and isinstance(atom, Func) and atom.kind == kind:
            return atom.args
    return (d,)


@_memo
def _extremum(kind: str, pick: Callable[..., int], dims: tuple[Dim, ...]) -> Dim:
    flat: list[Dim] = []
    for d in dims:
        flat.extend(p for p in _parts_of(kind, d) if p not in flat)
    ints = [d for d in flat if isinstance(d, int)]
    rest: list[Dim] = [d for d in flat if not isinstance(d, int)]
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


# --- bounds ----------------------------------------------------------------------------------------
#
# A *free* atom has no upper bound (a tensor dim, or a function of such): it stands for itself in bounds.  The
# others are *ranged* (a loop variable, a remainder): they are replaced by what bounds them.

@_memo
def _is_free(atom: Atom) -> bool:
    if isinstance(atom, Symbol):
        return atom.hi is None
    return atom.kind != "mod" and all(_is_free(a) for d in atom.args for m, _ in _terms(d) for a, _ in m)


@_memo
def _bounds_of_atom(atom: Atom) -> tuple[Dim | None, Dim | None]:
    """(lower, upper), None where nothing is known.  A free atom's lower bound is an int or None."""
    if isinstance(atom, Symbol):
        return atom.lo, atom.hi
    if _is_free(atom):
        return _least_int(atom), None
    if atom.kind == "mod":
        return 0, atom.args[1] - 1
    lows, highs = [lower(a) for a in atom.args], [upper(a) for a in atom.args]
    if atom.kind == "div":
        lo = None if lows[0] is None else floordiv(lows[0], atom.args[1])
        hi = None if highs[0] is None else floordiv(highs[0], atom.args[1])
        return lo, hi
    fold, one_low = (dmin, False) if atom.kind == "min" else (dmax, True)
    return _fold_known(fold, lows, one_low), _fold_known(fold, highs, not one_low)


def _fold_known(fold: Callable[..., Dim], parts: list[Dim | None], one_is_enough: bool) -> Dim | None:
    known = [p for p in parts if p is not None]
    return fold(*known) if known and (one_is_enough or len(known) == len(parts)) else None


def _least_int(atom: Func) -> int | None:
    """An integer that a function of free symbols is never below."""
    least = [_int_below(a) for a in atom.args]
    if atom.kind == "div":
        return 0 if least[0] is not None and least[0] >= 0 else None
    known = [k for k in least if k is not None]
    if atom.kind == "max":
        return max(known, default=None)
    return min(known) if len(known) == len(least) else None


def _int_below(d: Dim) -> int | None:
    """An integer that ``d`` is never below, when that is plain to see."""
    total = 0
    for m, c in _terms(d):
        if m and c < 0:
            return None
        for atom, p in m:
            low = _bounds_of_atom(atom)[0]
            if not isinstance(low, int) or low < 0:
                return None
            c *= low**p
        total += c
    return total


def _nonneg_atom(atom: Atom) -> bool:
    lo = _bounds_of_atom(atom)[0]
    return lo is not None and (lo >= 0 if isinstance(lo, int) else prove_nonneg(lo))


def _extreme(d: Dim, want_upper: bool) -> Dim | None:
    """Replaces ranged atoms by the bound that matters; in products that needs non-negative factors."""
    total: Dim = 0
    for m, c in _terms(d):
        if (len(m) > 1 or (m and m[0][1] > 1)) and not all(_nonneg_atom(a) for a, _ in m):
            return None
        value: Dim = c
        for atom, p in m:
            lo, hi = _bounds_of_atom(atom)
            bound = _atom(atom) if _is_free(atom) else hi if want_upper == (c > 0) else lo
            if bound is None:
                return None
            for _ in range(p):
                value = value * bound
        total = total + value
    if isinstance(total, Expr) and total != d and not all(_is_free(a) for m, _ in total.terms for a, _ in m):
        return _extreme(total, want_upper)
    return total


@_memo
def lower(d: Dim) -> Dim | None:
    """A Dim of free symbols that ``d`` is never below, or None when none is known."""
    return _extreme(d, False)


@_memo
def upper(d: Dim) -> Dim | None:
    """A Dim of free symbols that ``d`` never exceeds, or None when none is known."""
    return _extreme(d, True)


@_memo
def prove_nonneg(d: Dim, depth: int = 3) -> bool:
    """True when ``d >= 0`` follows from the symbols' bounds.  False means "not known"."""
    if isinstance(d, int):
        return d >= 0
    least = lower(d)
    if least is not None and _plainly_nonneg(least):
        return True
    bounds = [e for e in dict.fromkeys((d, least)) if isinstance(e, Expr)]
    return depth > 0 and any(_prove_by(e, m, c, atom, depth - 1) for e in bounds for m, c in e.terms
                             for atom, p in m if p == 1 and isinstance(atom, Func))


def _plainly_nonneg(d: Dim) -> bool:
    """Writes every free atom as lo + (atom - lo): then non-negative coefficients suffice."""
    if isinstance(d, int):
        return d >= 0
    shifted: Dim = 0
    for m, c in d.terms:
        value: Dim = c
        for atom, p in m:
            lo = _bounds_of_atom(atom)[0]
            if not isinstance(lo, int):
                return False
            for _ in range(p):
                value = value * (_atom(Symbol(f"|{atom.key}|")) + lo)
        shifted = shifted + value
    return all(c >= 0 for _, c in _terms(shifted))


def _prove_by(d: Expr, m: Monomial, c: int, atom: Func, depth: int) -> bool:
    """Proves ``d >= 0`` through what is known of one function in the term ``c*m`` of ``d``."""
    others = tuple(f for f in m if f[0] != atom)
    if not all(_nonneg_atom(a) for a, _ in others):
        return False
    factor = _make({others: c})

    def with_bound(bound: Dim) -> bool:
        return prove_nonneg(d - factor * _atom(atom) + factor * bound, depth)

    if atom.kind in ("min", "max"):
        # the value is one of the arguments; in one direction any argument is a bound
        return (any if (c < 0) == (atom.kind == "min") else all)(with_bound(a) for a in atom.args)
    r, b = atom.args
    if atom.kind == "mod":
        return c < 0 and prove_nonneg(r, 0) and with_bound(r)
    share, rest = divmod_exact_part(factor, b)  # r - b + 1 <= b * div(r, b) <= r
    if rest == 0:
        return prove_nonneg(d - factor * _atom(atom) + share * (r if c < 0 else r - b + 1), depth)
    return c < 0 and prove_nonneg(r, 0) and with_bound(r)


def prove_le(a: Dim, b: Dim) -> bool:
    """True when ``a <= b`` follows from the symbols' bounds."""
    return prove_nonneg(b - a)


def _within(r: Dim, b: Dim) -> bool:
    """Provably ``0 <= r < b``."""
    return prove_nonneg(r) and prove_nonneg(b - 1 - r)


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


_VALUE: dict[str, Callable[..., int]] = {
    "div": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0, "min": min, "max": max}


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
                v = _VALUE[atom.kind](*(evaluate(a, env) for a in atom.args))
            c *= v**p
        total += c
    return total


@_memo
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
        factors = [a.key if p == 1 else f"{a.key}^{p}" for a, p in m]
        if c != 1 or not factors:
            factors.insert(0, str(c))
        parts.append("*".join(factors))
    return " + ".join(parts)
