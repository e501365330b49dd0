"""Random IR graphs over every primitive that a kernel can hold, with inputs and a bound on rounding errors.

    case = random_case(seed)                        # or: @given(cases())
    inputs = random_inputs(case.graph, seed)        # symbolic dims get random sizes, 0 and 1 included
    assert_matches(case, run(case.graph, inputs), kernel_outputs)

The generator tracks an interval and an error bound for every float value and applies an operation only where
both stay small, so a result that leaves its tolerance is wrong and not just rounded another way.  Operations
that jump (floor, comparisons, argmax, float to int) only read values that every implementation computes exactly.
The bounds hold for params as :func:`random_inputs` draws them and symbolic dims up to ``LARGEST``.
"""
from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

with contextlib.suppress(ImportError):  # only cases() needs it
    from hypothesis import strategies as st

from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dims import Dim
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.ir.ops import OPS

LARGEST = 160  # symbolic dims may be as large as this
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17)  # what symbolic dims are by default
FLOATS, INTS = ("float32", "float64", "float16", "bfloat16"), ("int32", "int64", "int8", "int16", "uint8", "uint32")
EPS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# error allowed, relative to the interval
_WORST = {"float64": 1e-11, "float32": 2e-4, "float16": 0.05, "bfloat16": 0.25}
_HIGHEST = {"float64": 1e5, "float32": 1e4, "float16": 500.0, "bfloat16": 1e4}
FLOAT_RANGE, INT_RANGE = 2.0, 20  # params lie in +-FLOAT_RANGE, +-INT_RANGE (unsigned: from 0)

INEXACT, EXACT, MOVED = 0, 1, 2  # MOVED: an input's own bits


@dataclass(frozen=True)
class Info:
    """What is known of a value: its interval, an absolute error bound, and how far it is reproducible."""

    lo: float
    hi: float
    error: float = 0.0
    exact: int = EXACT

    @property
    def largest(self) -> float:
        return max(abs(self.lo), abs(self.hi))


@dataclass(frozen=True)
class Case:
    """A graph and, per output, the largest difference that rounding can explain (0 for integers)."""

    graph: Graph
    tolerances: tuple[float, ...]


class Refused(Exception):
    """The operation drawn does not suit the operands drawn; another is tried."""


# name: (domain, Lipschitz constant on it, result interval, rounding errors in eps)
_UNARY: dict[str, tuple[tuple[float, float], float, tuple[float, float], float]] = {
    "exp": ((-4, 3), 20.1, (0.018, 20.1), 8), "expm1": ((-3, 3), 20.1, (-0.96, 19.1), 8),
    "log": ((0.1, 50), 10, (-2.4, 4), 8), "log1p": ((-0.8, 50), 5, (-1.7, 4), 8),
    "sqrt": ((0.05, 100), 2.3, (0.2, 10), 4), "rsqrt": ((0.05, 100), 45, (0.1, 4.5), 8),
    "sigmoid": ((-1e4, 1e4), 0.25, (0, 1), 8), "softplus": ((-20, 20), 1, (0, 20.1), 8),
    "sin": ((-10, 10), 1, (-1, 1), 8), "cos": ((-10, 10), 1, (-1, 1), 8), "tan": ((-1.2, 1.2), 7.7, (-2.6, 2.6), 8),
    "asin": ((-0.9, 0.9), 2.3, (-1.2, 1.2), 8), "acos": ((-0.9, 0.9), 2.3, (0.4, 2.7), 8),
    "atan": ((-1e4, 1e4), 1, (-1.6, 1.6), 8), "sinh": ((-3, 3), 10.1, (-10.1, 10.1), 16),
    "cosh": ((-3, 3), 10.1, (1, 10.1), 16), "tanh": ((-1e4, 1e4), 1, (-1, 1), 8),
    "asinh": ((-1e3, 1e3), 1, (-7.7, 7.7), 16), "acosh": ((1.5, 50), 0.9, (0.9, 4.7), 16),
    "atanh": ((-0.9, 0.9), 5.3, (-1.5, 1.5), 16), "erf": ((-1e4, 1e4), 1.2, (-1, 1), 8),
    "erfc": ((-5, 1e3), 1.2, (0, 2), 16), "erfinv": ((-0.8, 0.8), 2.1, (-1, 1), 32),
    "ndtri": ((0.1, 0.9), 5.8, (-1.3, 1.3), 32), "lgamma": ((0.5, 20), 3, (-0.2, 39.5), 32),
    "digamma": ((0.5, 20), 5, (-2, 3), 64), "bessel_i0e": ((-10, 10), 0.7, (0.1, 1), 32),
    "bessel_i1e": ((-10, 10), 0.7, (-0.3, 0.3), 32),
}
# name: (domains, one Lipschitz constant each, result interval, rounding errors in eps)
_SPECIAL: dict[str, tuple[tuple[tuple[float, float], ...], tuple[float, ...], tuple[float, float], float]] = {
    "pow": (((0.3, 3), (-2.5, 2.5)), (60, 20), (0.04, 16), 32),
    "atan2": (((-5, 5), (0.5, 5)), (2, 2), (-1.6, 1.6), 8),
    "igamma": (((0.5, 5), (0.1, 5)), (2, 2), (0, 1), 200), "igammac": (((0.5, 5), (0.1, 5)), (2, 2), (0, 1), 200),
    "zeta": (((1.5, 4), (0.5, 4)), (20, 120), (0.005, 20), 200),
    "betainc": (((0.5, 4), (0.5, 4), (0.05, 0.95)), (3, 3, 10), (0, 1), 400),
}
# may leave their domain when the operand is exact
_OUTSIDE = ("log", "log1p", "sqrt", "asin", "acos", "acosh", "atanh")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def _eps(dtype: str) -> float:
    return EPS.get(dtype, 0.0)


class Maker:
    """Draws one graph.  Every ``_op_*`` method adds a node or raises Refused."""

    def __init__(self, r: random.Random, symbolic: bool, float_types: Sequence[str], int_types: Sequence[str]):
        self.r, self.b = r, Builder()
        self.float_types, self.int_types = tuple(float_types), tuple(int_types)
        self.info: dict[Node, Info] = {}
        self.pool: list[Node] = []
        self.axes: list[Dim | None] = [r.choice((1, 2, 3, 4, 5, 8)) for _ in range(2)]
        self.symbols: list[Dim | None] = [None] * r.choice((1, 1, 2)) if symbolic else []  # None: not bound yet
        if r.random() < 0.08:
            self.axes.append(0)

    def attempt(self, step: Callable[[], object]) -> bool:
        """Runs a step; takes back its values and inputs when it is refused."""
        values, params = len(self.pool), len(self.b.params)
        try:
            step()
            return True
        except Refused:
            del self.pool[values:], self.b.params[params:]
            gone = {k for k, source in self.b.symbols.items() if source.param >= params}
            self.b.symbols = {k: v for k, v in self.b.symbols.items() if k not in gone}
            unifier = self.b._unifier
            unifier.guards = [g for g in unifier.guards
                              if not gone & {s.name for d in (g.a, g.b) for s in D.symbols(d)}]
            return False

    # --- values --------------------------------------------------------------------------------

    def add(self, n: Node, info: Info) -> Node:
        """Accepts a node if its size, interval and error are reasonable."""
        degree = max((sum(p for _, p in m) for m, _ in getattr(n.size, "terms", ())), default=0)
        fixed = np.prod([d for d in n.shape if isinstance(d, int)] or [1])
        if n.rank > 5 or degree > 2 or fixed > (64 if degree == 2 else 1024):
            raise Refused
        if n.dtype in EPS:
            if info.largest > _HIGHEST[n.dtype] or info.error > _WORST[n.dtype] * max(1.0, info.largest):
                raise Refused
        else:
            info = Info(info.lo, info.hi, 0.0, max(info.exact, EXACT))
        self.info[n] = info
        self.pool.append(n)
        return n

    def rounded(self, n: Node, lo: float, hi: float, error: float, roundings: float = 1.0) -> Node:
        """Adds a float result that is rounded; integer results are exact."""
        extra = roundings * _eps(n.dtype) * max(abs(lo), abs(hi), 1e-3)
        return self.add(n, Info(lo, hi, error + extra, INEXACT))

    def like(self, n: Node, *sources: Node, exact: int | None = None) -> Node:
        """Adds a result that only moves or picks elements of ``sources``."""
        infos = [self.info[s] for s in sources]
        level = min(i.exact for i in infos) if exact is None else exact
        return self.add(n, Info(min(i.lo for i in infos), max(i.hi for i in infos), max(i.error for i in infos), level))

    def pick(self, test: Callable[[Node], bool] = lambda n: True) -> Node:
        """A value so far, later ones more often."""
        found = [n for n in self.pool if test(n)]
        if not found:
            raise Refused
        return found[-1 - int(len(found) * self.r.random() ** 2)]

    def floating(self, n: Node) -> bool:
        return n.dtype in EPS

    def integer(self, n: Node) -> bool:
        return DTYPES[n.dtype].is_integer

    def exactly(self, n: Node) -> bool:
        return self.info[n].exact >= EXACT

    def fit(self, x: Node, lo: float, hi: float) -> Node:
        """``x`` squashed into an interval unless it lies there already."""
        i = self.info[x]
        if lo <= i.lo and i.hi <= hi:
            return x
        s = self.unary("sigmoid", x)
        scaled = self.rounded(self.b.ew("mul", s, hi - lo), 0, hi - lo, self.info[s].error * (hi - lo))
        slack = 4 * _eps(x.dtype) * max(abs(lo), abs(hi))
        return self.rounded(self.b.ew("add", scaled, lo), lo - slack, hi + slack, self.info[scaled].error)

    def unary(self, op: str, x: Node) -> Node:
        """A smooth function of a value in its domain."""
        _, lipschitz, (lo, hi), roundings = _UNARY[op]
        return self.rounded(self.b.ew(op, x), lo, hi, lipschitz * self.info[x].error, roundings)

    # --- sources -------------------------------------------------------------------------------

    def param(self, shape: Sequence[Dim | None], dtype: str) -> Node:
        """A new input; a dim that is None or a symbol is unknown and unified with what the symbol was before."""
        n = self.b.param([d if isinstance(d, int) else None for d in shape], dtype, f"x{len(self.b.params)}")
        for i, d in enumerate(shape):
            if isinstance(d, D.Expr):
                self.b.same_dim(d, n.shape[i], f"dim {i} of {n.origin} agrees")
        d = DTYPES[dtype]
        top = {"float": FLOAT_RANGE, "bool": 1}.get(d.kind, INT_RANGE)
        return self.add(n, Info(0 if d.kind in ("uint", "bool") else -top, top, 0.0, MOVED))

    def axis(self) -> Dim | None:
        """A dim for a new param: static, known symbol, or a fresh one."""
        return self.r.choice([*self.axes, *self.symbols, *self.symbols])

    def new_param(self) -> None:
        rank = self.r.choice((0, 1, 2, 2, 3, 3, 4))
        dtype = self.r.choice([self.r.choice(self.float_types)] * 4 + [self.r.choice(self.int_types)] * 2 + ["bool"])
        shape: list[Dim | None] = []
        fresh: list[tuple[int, int]] = []
        for i in range(rank):
            k = self.r.randrange(len(self.axes) + 2 * len(self.symbols))
            if k < len(self.axes):
                shape.append(self.axes[k])
                continue
            s = (k - len(self.axes)) % len(self.symbols)
            shape.append(self.symbols[s])
            if self.symbols[s] is None and all(s != t for _, t in fresh):
                fresh.append((i, s))
        n = self.param(shape, dtype)
        for i, s in fresh:
            self.symbols[s] = n.shape[i]
        return n

    def mate(self, *xs: Node, dtype: str | None = None, test: Callable[[Node], bool] = lambda n: True) -> Node:
        """A value that broadcasts with all of ``xs``: one that exists, or a new input (dtype: the first's)."""
        dtype = dtype or xs[0].dtype
        whole = self.b.broadcast_shape([x.shape for x in xs])

        def fits(n: Node) -> bool:
            pairs = zip(reversed(n.shape), reversed(whole))
            return n.dtype == dtype and all(a == b or 1 in (a, b) for a, b in pairs) and test(n)

        if self.r.random() < 0.7 and any(fits(n) for n in self.pool):
            return self.pick(fits)
        shape = [1 if self.r.random() < 0.25 else d for d in whole][self.r.choice((0, 0, 0, 1)):]
        n = self.param(shape, dtype)
        if not test(n):
            raise Refused
        return n

    # --- operations ------------------------------------------------------------------------------

    def op_unary(self) -> None:
        x = self.pick(self.floating)
        op = self.r.choice(list(_UNARY))
        if op in _OUTSIDE and self.exactly(x) and self.r.random() < 0.3:
            n = self.b.ew(op, x)
            self.add(n, Info(-100, 100, 16 * _eps(n.dtype) * 100, INEXACT))
            return
        self.unary(op, self.fit(x, *_UNARY[op][0]))

    def op_special(self) -> None:
        op = self.r.choice(list(_SPECIAL))
        domains, lipschitz, (lo, hi), roundings = _SPECIAL[op]
        xs: list[Node] = [self.pick(self.floating)]
        while len(xs) < len(domains):
            xs.append(self.mate(*xs))
        xs = [self.fit(x, *d) for x, d in zip(xs, domains, strict=True)]
        error = sum(k * self.info[a].error for k, a in zip(lipschitz, xs, strict=True))
        self.rounded(self.b.ew(op, *xs), lo, hi, error, roundings)

    def op_polygamma(self) -> None:
        x = self.fit(self.pick(self.floating), 0.5, 5)
        self.rounded(self.b.ew("polygamma", float(self.r.choice((0, 1, 2))), x), -20, 6, 100 * self.info[x].error, 200)

    def op_exact_unary(self) -> None:
        x = self.pick(lambda n: n.dtype != "bool")
        i = self.info[x]
        if self.integer(x):
            n = self.b.ew(self.r.choice(("neg", "abs", "sign", "bit_not", "popcount")), x)
            self.add(n, Info(-1e4, 1e4))
        elif self.exactly(x) and self.r.random() < 0.6:
            n = self.b.ew(self.r.choice(("floor", "ceil", "rint", "sign")), x)
            self.add(n, Info(i.lo - 1, i.hi + 1, 0.0, EXACT))
        elif self.r.random() < 0.5:
            self.add(self.b.ew("neg", x), Info(-i.hi, -i.lo, i.error, min(i.exact, EXACT)))
        else:
            self.add(self.b.ew("abs", x), Info(0 if i.lo < 0 < i.hi else min(abs(i.lo), abs(i.hi)), i.largest, i.error,
                                               min(i.exact, EXACT)))

    def op_predicate(self) -> None:
        x = self.pick(lambda n: self.floating(n) and self.exactly(n))
        self.add(self.b.ew(self.r.choice(("is_nan", "is_inf", "is_finite")), x), Info(0, 1))

    def op_arithmetic(self) -> None:
        x = self.pick(lambda n: n.dtype != "bool")
        y = self.mate(x) if self.r.random() < 0.8 else None
        op = self.r.choice(("add", "sub", "mul", "mul", "max", "min"))
        literal = self.r.choice((-1, 0, 1, 2, 3)) if self.integer(x) else self.r.choice((-1.5, 0.0, 0.25, 1.0, 2.0))
        if DTYPES[x.dtype].kind == "uint":
            literal = abs(literal)
        a, c = self.info[x], self.info[y] if y is not None else Info(literal, literal)
        n = self.b.ew(op, x, y if y is not None else literal)
        if op in ("max", "min"):
            self.add(n, Info(min(a.lo, c.lo), max(a.hi, c.hi), max(a.error, c.error), min(a.exact, c.exact, EXACT)))
            return
        if op == "mul":
            ends = [p * q for p in (a.lo, a.hi) for q in (c.lo, c.hi)]
            self.rounded(n, min(ends), max(ends), a.largest * c.error + c.largest * a.error)
        elif op == "add":
            self.rounded(n, a.lo + c.lo, a.hi + c.hi, a.error + c.error)
        else:
            self.rounded(n, a.lo - c.hi, a.hi - c.lo, a.error + c.error)

    def op_divide(self) -> None:
        x = self.pick(lambda n: n.dtype != "bool")
        if self.integer(x):
            y = self.b.ew("bit_or", self.mate(x), 1)
            self.add(self.b.ew(self.r.choice(("int_div", "int_mod")), x, y), Info(-1e4, 1e4))
            return
        y = self.mate(x)
        i = self.info[x]
        if self.r.random() < 0.3 and self.exactly(x) and self.exactly(y):
            y = self.b.ew("floor", y)  # whole numbers, zeros among them: x / 0 is 0 here
            self.rounded(self.b.ew("div_no_nan", x, y), -i.largest, i.largest, 0.0, 2)
            return
        y = self.fit(y, 0.5, 3)
        error = 2 * i.error + 4 * i.largest * self.info[y].error
        self.rounded(self.b.ew("div", x, y), -2 * i.largest, 2 * i.largest, error)

    def op_fmod(self) -> None:
        x = self.pick(lambda n: self.floating(n) and self.exactly(n))
        y = self.b.ew("add", self.b.ew("abs", self.b.ew("rint", self.mate(x, test=self.exactly))), 1.0)
        i = self.info[x]
        self.add(self.b.ew("fmod", x, y), Info(-i.largest, i.largest, 0.0, EXACT))

    def op_nextafter(self) -> None:
        x = self.pick(lambda n: n.dtype in ("float32", "float64") and self.exactly(n))
        y = self.mate(x, test=self.exactly)
        self.like(self.b.ew("nextafter", x, y), x, exact=EXACT)

    def op_bits(self) -> None:
        x = self.pick(lambda n: not self.floating(n))
        if x.dtype == "bool" and self.r.random() < 0.3:
            n = self.b.ew("bit_not", x)
        elif x.dtype == "bool" or self.r.random() < 0.6:
            n = self.b.ew(self.r.choice(("bit_and", "bit_or", "bit_xor")), x, self.mate(x))
        elif self.r.random() < 0.5:
            n = self.b.ew(self.r.choice(("shift_left", "shift_right")), x, self.mate(x))
        else:
            n = self.b.ew("int_pow", x, self.b.ew("bit_and", self.mate(x), 3))
        self.add(n, Info(-1e4, 1e4))

    def op_random(self) -> None:
        """Random words of places, keys and counters that are computed."""
        parts = [self.pick(self.integer)]
        while len(parts) < OPS["philox"].arity:
            parts.append(self.mate(*parts))
        self.add(self.b.ew("philox", *(self.b.cast(x, "uint64") for x in parts)), Info(-1e4, 1e4))

    def op_compare(self) -> None:
        x = self.pick(self.exactly)
        y = self.mate(x, test=self.exactly)
        self.add(self.b.ew(self.r.choice(_COMPARE), x, y), Info(0, 1))

    def op_cast(self) -> None:
        x = self.pick()
        i = self.info[x]
        to = self.r.choice((*self.float_types, *self.int_types, "bool"))
        if self.floating(x) and to not in EPS:
            if not self.exactly(x):
                raise Refused
            if to != "bool":  # NaN and what the type cannot hold have no defined conversion
                finite = self.b.select(self.b.ew("is_finite", x), x, 0.0)
                x = self.b.ew("min", self.b.ew("max", finite, 0.0 if DTYPES[to].kind == "uint" else -100.0), 100.0)
                i = Info(-100, 100)
            self.add(self.b.cast(x, to), Info(i.lo, i.hi))
        elif to in EPS:
            if not self.floating(x):  # integers wrap, so their true interval is the type's
                x = self.b.ew("bit_and", x, 63) if self.integer(x) else x
                i = Info(0, 63)
            narrowing = 0.0 if self.floating(x) and EPS[to] <= _eps(x.dtype) else EPS[to] * max(i.largest, 1e-3)
            level = EXACT if i.exact >= EXACT else INEXACT
            self.add(self.b.cast(x, to), Info(i.lo - narrowing, i.hi + narrowing,
                                              0.0 if level else i.error + narrowing, level))
        else:
            self.add(self.b.cast(x, to), Info(-1e4, 1e4))

    def op_bitcast(self) -> None:
        x = self.pick(lambda n: (self.info[n].exact >= MOVED and n.dtype != "bool") or self.integer(n))
        same = [d for d in self.int_types if DTYPES[d].size == DTYPES[x.dtype].size and d != x.dtype]
        if not same:
            raise Refused
        self.add(self.b.bitcast(x, self.r.choice(same)), Info(-1e4, 1e4))

    def op_select(self) -> None:
        x = self.pick()
        c = self.mate(x, dtype="bool")
        y = self.mate(x, c)
        self.like(self.b.select(c, x, y), x, y)

    def op_broadcast(self) -> None:
        x = self.pick(lambda n: n.rank < 4)
        shape = [self.known_axis() if d == 1 and self.r.random() < 0.7 else d for d in x.shape]
        self.like(self.b.broadcast_to(x, [*(self.known_axis() for _ in range(self.r.choice((0, 1, 1, 2)))), *shape]), x)

    def op_insert_dim(self) -> None:
        """A broadcast whose new dim is in the middle."""
        x = self.pick(lambda n: 0 < n.rank < 4)
        at = self.r.randint(1, x.rank)
        y = self.b.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))
        self.like(self.b.broadcast_to(y, (*x.shape[:at], self.known_axis(), *x.shape[at:])), x)

    def known_axis(self) -> Dim:
        dims = [s for s in (self.axis() for _ in range(4)) if s is not None]
        return self.r.choice(dims) if dims else 3

    def op_reshape(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        shape, kind = list(x.shape), self.r.randrange(5)
        at = self.r.randrange(len(shape))
        if kind == 0:
            shape = [D.product(shape)]
        elif kind == 1 and len(shape) > 1:
            at = self.r.randrange(len(shape) - 1)
            shape[at:at + 2] = [shape[at] * shape[at + 1]]
        elif kind == 2 and isinstance(shape[at], int) and shape[at] > 3:
            factor = self.r.choice([f for f in range(2, shape[at] + 1) if shape[at] % f == 0])
            shape[at:at + 1] = [shape[at] // factor, factor]
        elif kind == 3:
            shape.insert(at, 1)
        elif 1 in shape:
            shape.remove(1)
        elif isinstance(shape[at], D.Expr):  # a merge of a symbol and a static dim, split the other way round
            static = [i for i, d in enumerate(shape) if isinstance(d, int)]
            if not static:
                raise Refused
            shape[at], shape[static[0]] = shape[static[0]], shape[at]
        else:
            raise Refused
        self.like(self.b.reshape(x, shape), x)

    def op_transpose(self) -> None:
        x = self.pick(lambda n: n.rank > 1)
        perm = list(range(x.rank))
        self.r.shuffle(perm)
        self.like(self.b.transpose(x, perm), x)

    def op_slice(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        starts, sizes, steps = [], [], []
        for d in x.shape:
            start, size, step = self.cut(d) if self.r.random() < 0.6 else (0, d, 1)
            starts.append(start), sizes.append(size), steps.append(step)
        self.like(self.b.slice(x, starts, sizes, steps), x)

    def cut(self, d: Dim) -> tuple[Dim, Dim, int]:
        """Start, size and step of a slice that fits any size of ``d``."""
        step = self.r.choice((1, 1, 1, 2, 3))
        if isinstance(d, int):
            start = self.r.randint(0, d)
            return start, self.r.randint(0, max(0, -(-(d - start) // step))), step
        start = D.dmin(d, self.r.choice((0, 0, 1, 2)))
        left = D.ceildiv(d - start, step)
        return start, D.dmin(left, self.r.choice((1, 2, 4))) if self.r.random() < 0.3 else left, step

    def op_reverse(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        self.like(self.b.reverse(x, self.r.sample(range(x.rank), self.r.randint(1, x.rank))), x)

    def op_pad(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        low, high = ([self.r.choice((0, 0, 1, 2)) for _ in x.shape] for _ in range(2))
        interior = [self.r.choice((0, 0, 0, 0, 0, 1, 2)) for _ in x.shape]
        value = self.r.choice((0, 1))
        n = self.b.pad(x, low, high, value, interior)
        i = self.info[x]
        self.add(n, Info(min(i.lo, value), max(i.hi, value), i.error, i.exact))

    def op_concat(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        axis = self.r.randrange(x.rank)

        def fits(n: Node) -> bool:
            return n.rank == x.rank and n.dtype == x.dtype and all(
                a == b for i, (a, b) in enumerate(zip(n.shape, x.shape, strict=True)) if i != axis)

        xs = [x]
        for _ in range(self.r.choice((1, 1, 2))):
            other = (*x.shape[:axis], self.known_axis(), *x.shape[axis + 1:])
            xs.append(self.pick(fits) if self.r.random() < 0.6 else self.param(other, x.dtype))
        self.like(self.b.concat(xs, axis), *xs)

    def op_gather(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        batch = self.r.choice((0, 0, 1)) if x.rank > 1 else 0
        axis = self.r.randrange(batch, x.rank)
        size = x.shape[axis]
        lead = list(x.shape[:batch])
        if isinstance(size, int) and size > 0:
            index, mode = self.index_into(lead, size), self.r.choice(("error", "error", "clip", "zero"))
            if mode != "error":
                index = self.b.ew("sub", index, 1)
        elif self.r.random() < 0.5:
            index, mode = self.b.reverse(self.b.iota([*lead, size], batch, "int32"), [batch]), "error"
        else:
            index, mode = self.param([*lead, self.r.choice((1, 3))], self.r.choice(("int32", "int64"))), "zero"
        exact = min(self.info[x].exact, EXACT if mode == "zero" else MOVED)
        i = self.info[x]
        self.add(self.b.gather(x, index, axis, batch, mode), Info(min(i.lo, 0), max(i.hi, 0), i.error, exact))

    def index_into(self, lead: list[Dim], size: int) -> Node:
        """Integers in [0, size) with leading dims ``lead`` and up to two more."""
        rest = [self.known_axis() for _ in range(self.r.choice((0, 1, 1, 2)))]
        raw = self.param([*lead, *rest], self.r.choice(("int32", "int64")))
        return self.b.ew("int_mod", self.b.ew("abs", raw), size)

    def op_gather_nd(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        batch = self.r.choice((0, 0, 1)) if x.rank > 1 else 0
        depth = self.r.randint(0 if self.r.random() < 0.1 else 1, min(2, x.rank - batch))
        sizes = x.shape[batch:batch + depth]
        parts, static = [], all(isinstance(s, int) and s > 0 for s in sizes)
        lead = [*x.shape[:batch], self.known_axis()]
        for s in sizes:
            raw = self.param([*lead, 1], "int32")
            parts.append(self.b.ew("int_mod", self.b.ew("abs", raw), s) if static else raw)
        index = self.b.concat(parts, len(lead)) if parts else self.param([*lead, 0], "int32")
        mode = "error" if static and self.r.random() < 0.7 else "zero"
        i = self.info[x]
        exact = min(i.exact, EXACT if mode == "zero" else MOVED)
        self.add(self.b.gather_nd(x, index, batch, mode), Info(min(i.lo, 0), max(i.hi, 0), i.error, exact))

    def op_order(self) -> None:
        x = self.pick(lambda n: n.rank > 0 and self.integer(n))
        self.add(self.b.order(x), Info(0, LARGEST, 0.0, EXACT))

    def op_search(self) -> None:
        """Places of integers in 0, 1, 2, ..., in some rows of it or in one."""
        x = self.pick(lambda n: n.rank > 0 and n.dtype in ("int32", "int64"))
        rows = self.r.random() < 0.5
        table = self.b.iota((*x.shape[:-1], 7) if rows else (7,), x.rank - 1 if rows else 0, x.dtype)
        found = self.b.search(table, x, self.r.choice(("left", "right")), x.rank - 1 if rows else 0)
        self.add(found, Info(0, 7, 0.0, EXACT))

    def op_segment(self) -> None:
        x = self.pick(lambda n: n.rank > 0 and n.dtype != "bool")
        starts = sorted(self.r.randint(0, 9) for _ in range(self.r.randint(2, 5)))
        kind, i, n = self.r.choice(("sum", "max", "min")), self.info[x], self.count([x.shape[0]])
        out = self.b.segment(kind, x, self.b.const(np.array(starts, np.int32)))
        if kind == "sum":
            self.rounded(out, min(0, i.lo * n), max(0, i.hi * n), n * i.error, 2 + n)
        elif self.floating(x):  # nothing folded is an infinity, and a rounded 0 times that another than 0 times it
            finite = self.b.select(self.b.ew("is_finite", out), out, 0.0)
            self.add(finite, Info(min(i.lo, 0), max(i.hi, 0), i.error, min(i.exact, EXACT)))
        else:
            self.add(out, Info(-1e4, 1e4))

    def op_iota(self) -> None:
        shape = [self.known_axis() for _ in range(self.r.choice((1, 1, 2, 3)))]
        dtype = self.r.choice((*self.int_types, *self.float_types))
        self.add(self.b.iota(shape, self.r.randrange(len(shape)), dtype), Info(0, LARGEST, 0.0, EXACT))

    def op_shape_value(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        if self.r.random() < 0.5:
            n = self.b.shape_value(x.shape, None, self.r.choice(("int32", "int64")))
        else:
            n = self.b.shape_value([x.size], [], "int32")
        self.add(n, Info(0, LARGEST**2))

    def count(self, dims: Sequence[Dim]) -> int:
        """The largest number of elements that dims may hold."""
        return int(np.prod([d if isinstance(d, int) else LARGEST for d in dims] or [1], dtype=np.int64))

    def op_reduce(self) -> None:
        x = self.pick(lambda n: n.rank > 0)
        axes = self.r.sample(range(x.rank), self.r.randint(1, min(2, x.rank)))
        keep = self.r.random() < 0.4
        n = self.count([x.shape[a] for a in axes])
        kinds = ("and", "or") if x.dtype == "bool" else ("sum", "sum", "max", "min", "prod")
        kind = self.r.choice(kinds)
        if kind == "prod" and self.floating(x):
            x, n = (self.fit(x, 0.6, 1.4), 8) if n <= 8 else (self.fit(x, 0.98, 1.02), min(n, LARGEST))
        i = self.info[x]
        out = self.b.reduce(kind, x, axes, keep)
        if kind == "sum":
            self.rounded(out, min(0, i.lo * n), max(0, i.hi * n), n * i.error, 2 + n**0.5)
        elif kind == "prod" and self.floating(x):
            if self.count([x.shape[a] for a in axes]) > n:
                raise Refused
            top = i.largest**n
            self.rounded(out, 0, top, n * top * i.error, 2 + n)
        elif self.floating(x):  # an empty reduction gives an infinity, which stays one
            self.add(out, Info(i.lo, i.hi, i.error, min(i.exact, EXACT)))
        else:
            self.add(out, Info(-1e4, 1e4))

    def op_softmax(self) -> None:
        """A reduction in the middle of a chain that returns to the full shape."""
        x = self.pick(lambda n: self.floating(n) and n.rank > 0)
        axis = self.r.randrange(x.rank)
        top = self.like(self.b.reduce("max", x, [axis], True), x, exact=INEXACT)
        i = self.info[x]
        centred = self.rounded(self.b.ew("sub", x, top), i.lo - i.hi, 0, 2 * i.error)
        if self.info[centred].lo < -20:
            raise Refused
        e = self.rounded(self.b.ew("exp", centred), 0, 1, self.info[centred].error, 8)
        n = self.count([x.shape[axis]])
        total = self.rounded(self.b.reduce("sum", e, [axis], True), 1, n, n * self.info[e].error, 2 + n**0.5)
        error = self.info[e].error + self.info[total].error
        self.rounded(self.b.ew("div", e, total), 0, 1, error, 2)

    def op_arg_reduce(self) -> None:
        x = self.pick(lambda n: n.rank > 0 and n.dtype != "bool" and self.exactly(n))
        dtype = self.r.choice(("int32", "int64"))
        n = self.b.arg_reduce(self.r.choice(("max", "min")), x, self.r.randrange(x.rank), dtype)
        self.add(n, Info(0, 1e4))

    def op_scan(self) -> None:
        x = self.pick(lambda n: n.rank > 0 and n.dtype != "bool")
        axis = self.r.randrange(x.rank)
        n, kind = self.count([x.shape[axis]]), self.r.choice(("sum", "sum", "prod"))
        if kind == "prod" and self.floating(x):
            x = self.fit(x, 0.6, 1.4) if n <= 8 else self.fit(x, 0.98, 1.02)
        i = self.info[x]
        out = self.b.scan(kind, x, axis, self.r.random() < 0.4, self.r.random() < 0.4)
        if kind == "sum":
            self.rounded(out, min(0, i.lo * n), max(0, i.hi * n), n * i.error, 2 + n)
        else:
            top = max(1.0, i.largest) ** n if self.floating(x) else 1e4
            self.rounded(out, 0, top, n * top * i.error, 2 + n)

    def op_dot(self) -> None:
        x = self.pick(lambda n: n.rank > 0 and n.dtype != "bool")
        axes = list(range(x.rank))
        self.r.shuffle(axes)
        batch = axes[:self.r.choice((0, 0, 1))] if x.rank > 1 else []
        contract = axes[len(batch):len(batch) + self.r.choice((1, 1, 1, 2))]
        free = [self.known_axis() for _ in range(self.r.choice((0, 1, 1)))]
        dims = [x.shape[a] for a in (*batch, *contract)] + free
        order = list(range(len(dims)))
        self.r.shuffle(order)
        y = self.param([dims[i] for i in order], x.dtype)
        where = [order.index(i) for i in range(len(dims))]
        by, cy = where[:len(batch)], where[len(batch):len(batch) + len(contract)]
        if self.r.random() < 0.3:
            out = self.b.dot(y, x, (by, batch), (cy, contract))
        else:
            out = self.b.dot(x, y, (batch, by), (contract, cy))
        n, a, c = self.count([x.shape[k] for k in contract]), self.info[x], self.info[y]
        top = n * a.largest * c.largest
        self.rounded(out, -top, top, n * (a.largest * c.error + c.largest * a.error), 2 + n**0.5)


_FAMILIES = tuple(m[3:] for m in dir(Maker) if m.startswith("op_"))
_OFTEN = {"arithmetic": 4, "unary": 3, "reduce": 3, "select": 2, "reshape": 2, "transpose": 2, "slice": 2,
          "broadcast": 2, "insert_dim": 2, "dot": 2, "concat": 2}


def make_case(r: random.Random, *, symbolic: bool | None = None, steps: int | None = None,
              families: Sequence[str] = _FAMILIES, float_types: Sequence[str] = FLOATS,
              int_types: Sequence[str] = INTS, simplified: bool = True) -> Case:
    """Draws a graph with ``r``.

    Args:
      symbolic: whether inputs may have unknown dims (None: drawn).
      steps: number of operations to add (None: drawn, 2 to 14).
      families: names of Maker's ``op_`` methods to draw from.
      float_types, int_types: element types to draw from.
      simplified: False leaves the graph as it was built.
    """
    m = Maker(r, r.random() < 0.7 if symbolic is None else symbolic, float_types, int_types)
    while len(m.b.params) < r.choice((1, 2, 3)):
        m.attempt(m.new_param)
    weighted = [f for f in families for _ in range(_OFTEN.get(f, 1))]
    steps = r.randint(2, 14) if steps is None else steps
    done = tries = 0
    while done < steps and tries < 20 * steps:
        tries += 1
        done += m.attempt(getattr(m, "op_" + r.choice(weighted)))
    used = {i for n in m.pool for i in n.inputs}
    ends = [n for n in m.pool if n not in used and n.op != "param"] or [n for n in m.pool if n.op != "param"] or m.pool
    outputs = [ends[-1], *r.sample(ends, min(len(ends), r.choice((0, 1, 2))))]
    if r.random() < 0.2:
        outputs.append(r.choice(m.pool))
    outputs = list(dict.fromkeys(outputs))
    graph = (m.b.finish if simplified else m.b.raw)(outputs, "random")
    return Case(graph, tuple(4 * m.info[o].error for o in outputs))


def random_case(seed: int, **options) -> Case:
    """The graph of a seed; options as :func:`make_case`."""
    return make_case(random.Random(seed), **options)


def random_graph(seed: int, **options) -> Graph:
    """Just the graph of :func:`random_case`."""
    return random_case(seed, **options).graph


def cases(**options) -> st.SearchStrategy[Case]:
    """Hypothesis: random cases, shrunk by simpler choices."""
    return st.randoms(use_true_random=False).map(lambda r: make_case(r, **options))


def free_symbols(graph: Graph) -> list[str]:
    """The symbols that an input's sizes depend on, sorted; the others follow from the guards."""
    return sorted({s.name for p in graph.params for d in p.shape for s in D.symbols(d)})


def random_sizes(graph: Graph, seed: int, choices: Sequence[int] = SIZES) -> dict[str, int]:
    """A size for every free symbol."""
    r = random.Random(seed)
    return {s: r.choice(choices) for s in free_symbols(graph)}


def random_inputs(graph: Graph, seed: int, sizes: Mapping[str, int] | None = None,
                  special: float = 0.0) -> list[np.ndarray]:
    """Inputs for a graph of this module: floats in +-2, integers in +-20.

    ``sizes`` gives every free symbol's value (default: :func:`random_sizes`); ``special`` is the share of
    float elements that become NaN, an infinity or -0.0.
    """
    env = dict(random_sizes(graph, seed) if sizes is None else sizes)
    rng = np.random.default_rng(seed)
    return [_random_array(rng, tuple(D.evaluate(d, env) for d in p.shape), p.dtype, special) for p in graph.params]


def reference(graph: Graph, inputs: Sequence[np.ndarray]) -> tuple[dict[str, int], list[np.ndarray]] | None:
    """Its symbols' values and what the interpreter gives; None for sizes that the graph does not allow."""
    try:
        env = graph.bind(inputs)
        return (env, interp.run(graph, inputs)) if all(guard.holds(env) for guard in graph.guards) else None
    except (ValueError, IndexError):
        return None


def _random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, special: float) -> np.ndarray:
    d = DTYPES[dtype]
    if d.kind == "bool":
        return rng.random(shape) < 0.5
    if d.is_integer:
        return rng.integers(0 if d.kind == "uint" else -INT_RANGE, INT_RANGE + 1, shape).astype(d.numpy)
    x = np.asarray(rng.uniform(-FLOAT_RANGE, FLOAT_RANGE, shape))
    odd = rng.random(shape) < special
    return np.where(odd, rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0]), shape), x).astype(d.numpy)


def assert_matches(case: Case, want: Sequence[np.ndarray], got: Sequence[np.ndarray], slack: float = 1.0) -> None:
    """Raises AssertionError when outputs differ by more than rounding explains (times ``slack``)."""
    assert len(want) == len(got)
    for i, (w, g, tolerance) in enumerate(zip(want, got, case.tolerances, strict=True)):
        assert w.shape == g.shape and w.dtype == g.dtype, f"output {i}: {g.shape} {g.dtype}, not {w.shape} {w.dtype}"
        if w.dtype.name not in EPS:
            assert np.array_equal(w, g), f"output {i}: {np.sum(w != g)} of {w.size} integers differ"
            continue
        w, g = w.astype(np.float64), g.astype(np.float64)
        plain = np.isfinite(w) & np.isfinite(g)
        assert np.array_equal(w[~plain], g[~plain], equal_nan=True), f"output {i}: NaN or infinity in other places"
        worst = np.max(np.abs(w[plain] - g[plain]), initial=0.0)
        assert worst <= slack * tolerance, f"output {i}: differs by {worst}, tolerance {slack * tolerance}"
