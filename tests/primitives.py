"""Every primitive of the IR in graphs of its own, with inputs that reach its corners.

    made = forms("float16")
    compared, wrong = judge(zip(made, compile_together([f.graph for f in made], options)), host.run)

Sizes are unknown where the op allows it, 0 and 1 among those that are tried.  Elementwise operations come from the
table of operations and get NaN, infinities, signed zeros and the ends of integer ranges; the others have an entry in
``_STRUCTURAL``.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tf_stitch.ir import dims as D
from tf_stitch.ir import interp
from tf_stitch.ir.builder import Builder
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.ir.ops import OPS
from tf_stitch.program.program import Program

Array = np.ndarray
Draw = Callable[[np.random.Generator, tuple[int, ...], str], Array]

FLOATS = ("float32", "float16", "bfloat16", "float64")
EPS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float64": 1e-300, "float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}  # kernels may flush
# what unknown sizes are, by how many there are
SIZES: dict[int, list[tuple[int, ...]]] = {
    0: [()], 1: [(0,), (1,), (2,), (7,), (33,), (128,), (1000,), (4099,)],
    2: [(0, 5), (5, 0), (1, 1), (3, 7), (64, 33), (130, 257)], 3: [(0, 2, 3), (1, 1, 1), (2, 3, 5), (17, 9, 33)]}


@dataclass(frozen=True)
class Form:
    """A way to use an op.

    Attributes:
      op, name: the op, and what is special about this use of it.
      graph: the op's operands are the inputs (or made of them).
      draws: for each input, how its values are drawn.
      tolerance: allowed error: times the last place of the result, and times that of the sum of the absolute terms.
    """

    op: str
    name: str
    graph: Graph
    draws: tuple[Draw, ...]
    tolerance: tuple[float, float] = (0.0, 0.0)

    def inputs(self) -> Iterator[list[Array]]:
        """Inputs for every choice of sizes; the same in every run."""
        names = sorted({s.name for p in self.graph.params for d in p.shape for s in D.symbols(d)})
        for k, sizes in enumerate(SIZES[len(names)]):
            env, rng = dict(zip(names, sizes, strict=True)), np.random.default_rng(k)
            yield [draw(rng, tuple(D.evaluate(d, env) for d in p.shape), p.dtype)
                   for p, draw in zip(self.graph.params, self.draws, strict=True)]

    def check(self, want: Sequence[Array], got: Sequence[Array]) -> None:
        """Raises AssertionError where outputs differ from the interpreter's by more than rounding explains."""
        for w, g in zip(want, got, strict=True):
            assert (w.shape, w.dtype) == (g.shape, g.dtype), f"{g.shape} {g.dtype}, not {w.shape} {w.dtype}"
            name = w.dtype.name
            if name not in EPS:
                assert np.array_equal(w, g), f"{np.sum(w != g)} of {w.size} differ: {_first(w, g, w != g)}"
                continue
            a, b = w.astype(np.float64), g.astype(np.float64)
            with np.errstate(all="ignore"):
                places, terms = self.tolerance
                allowed = 2 * EPS[name] * places * np.abs(a) + terms + (SMALLEST[name] if places else 0)
                ok = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= allowed)
            assert ok.all(), f"{np.sum(~ok)} of {w.size} differ: {_first(w, g, ~ok)}"


def _first(want: Array, got: Array, bad: Array) -> str:
    at = tuple(int(i[0]) for i in np.nonzero(bad)) if bad.ndim else ()
    return f"at {at} {got[at]!r}, not {want[at]!r}"


# --- values ----------------------------------------------------------------------------------------

def plain(low: float = -2.0, high: float = 2.0) -> Draw:
    """Uniform values; integers within the range as well."""
    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
        d = DTYPES[dtype]
        if d.kind == "bool":
            return rng.random(shape) < 0.5
        if d.is_integer:
            least = max(0, int(low)) if d.kind == "uint" else int(low)
            return rng.integers(least, int(high) + 1, shape).astype(d.numpy)
        return np.asarray(rng.uniform(low, high, shape)).astype(d.numpy)

    return draw


def special(share: float = 0.1) -> Draw:
    """As plain, but a share of the elements is NaN, an infinity or -0; of integers, an end of their range."""
    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
        d, x = DTYPES[dtype], plain(-20, 20)(rng, shape, dtype)
        if d.kind == "bool":
            return x
        ends = [np.nan, np.inf, -np.inf, -0.0] if d.is_float else [np.iinfo(d.numpy).min, np.iinfo(d.numpy).max]
        return np.where(rng.random(shape) < share, rng.choice(np.array(ends, d.numpy), shape), x)

    return draw


def integers(low: int, high: int) -> Draw:
    """Indices from ``low`` to ``high``."""
    return lambda rng, shape, dtype: rng.integers(low, high + 1, shape).astype(DTYPES[dtype].numpy)


_ODD = {1: [0.0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 2.5, -7, 9, 88, -88, 1e-30, -1e-30, 1e30, -1e30, 16777216, np.inf,
            -np.inf, np.nan],
        2: [0.0, -0.0, 1, -1, 2, -3, 0.5, 2.5, 1e-30, -1e30, np.inf, -np.inf, np.nan],
        3: [0.0, 1, -1, 0.5, 2.5, np.nan]}


def _corner(operand: int, arity: int, low: float, high: float, positive: bool = False) -> Draw:
    """Values of one operand of an elementwise op: together the operands take all pairs of odd values, as far as there
    are elements, then values in an interval."""
    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
        d = DTYPES[dtype]
        if d.is_float:
            with np.errstate(over="ignore"):
                odd = np.array(_ODD[arity]).astype(d.numpy)
        elif d.kind == "bool":
            odd = np.array([False, True])
        else:
            info = np.iinfo(d.numpy)
            odd = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7, 31, 8], d.numpy)
        if positive:
            odd = odd[odd > 0]
        (n,) = shape
        pairs = np.array(list(itertools.product(odd, repeat=arity)), d.numpy)[:, operand]
        x = plain(low, high)(rng, shape, dtype)
        x[:len(pairs)] = np.random.default_rng(n).permutation(pairs)[:n] if n < len(pairs) else pairs
        return x

    return draw


# --- elementwise -----------------------------------------------------------------------------------

_EXACT = {"neg", "abs", "sign", "floor", "ceil", "rint", "add", "sub", "mul", "max", "min", "fmod", "nextafter"}
# Intervals of the operands (default: +-8) and errors in units of the last place (default: 4).
_INTERVALS: dict[str, tuple[tuple[float, float], ...]] = {
    "igamma": ((0.1, 9), (0.1, 9)), "igammac": ((0.1, 9), (0.1, 9)), "zeta": ((1.1, 9), (0.1, 9)),
    "polygamma": ((0, 3), (0.1, 9)), "betainc": ((0.1, 9), (0.1, 9), (0, 1)), "pow": ((0, 9), (-4, 4)),
    "int_pow": ((-9, 9), (0, 9)), "int_div": ((-99, 99), (1, 9)), "int_mod": ((-99, 99), (1, 9)),
    "erfinv": ((-1, 1),), "ndtri": ((0, 1),), "atanh": ((-1, 1),), "asin": ((-1, 1),),
    "acos": ((-1, 1),), "lgamma": ((0.01, 30),), "digamma": ((0.01, 30),)}
_PLACES = dict.fromkeys(("erfc", "erfinv", "ndtri", "lgamma", "digamma", "bessel_i0e", "bessel_i1e", "igamma",
                         "igammac", "zeta", "polygamma", "betainc"), 32.0)
_POSITIVE = {"int_div", "int_mod", "int_pow"}  # of the second operand: else an error
# SciPy's values at their borders are not Eigen's, which kernels have: tests/math compares those with TensorFlow.
_INSIDE = {"zeta", "polygamma", "betainc"}
_ONLY = {"philox": "uint64"}


def _elementwise(name: str, dtype: str) -> Form:
    op, b = OPS[name], Builder()
    arity = op.arity or 1
    xs = [b.param((None,), dtype) for _ in range(arity)]
    graph = b.finish([b.ew(name, *xs)], name)
    intervals = _INTERVALS.get(name, ((-8, 8),) * arity)
    draws = tuple(plain(low, high) if name in _INSIDE else _corner(i, arity, low, high, i > 0 and name in _POSITIVE)
                  for i, (low, high) in enumerate(intervals))
    places = 0.0 if name in _EXACT else _PLACES.get(name, 4.0)
    if name in _PLACES and dtype == "float64":
        places *= 1000  # SciPy's own errors
    return Form(name, "", graph, draws, (places, 0.0))


# --- the others ------------------------------------------------------------------------------------

Make = Callable[..., "Node | Sequence[Node]"]
T = "T"  # the type under test
MOVED, SUMMED, RUNNING, PRODUCT = (0.0, 0.0), (8.0, 0.0), (64.0, 0.0), (1.0, 1e-3)


@dataclass(frozen=True)
class _Use:
    """``make(b, *params)`` of params with these shapes and types; how they are drawn, and the tolerance."""

    name: str
    make: Make
    params: tuple[tuple[tuple[int | None, ...], str], ...]
    draws: tuple[Draw, ...] = ()
    tolerance: tuple[float, float] = MOVED
    kinds: tuple[str, ...] = ("float", "int", "uint", "bool")


def _use(name: str, make: Make, *shapes: Sequence[int | None], index: Draw | None = None, **more: Any) -> _Use:
    """Params of the type under test; with ``index`` the last one is int32."""
    params = [(tuple(s), T) for s in shapes]
    draws = [special()] * len(params)
    if index is not None:
        params[-1], draws[-1] = (params[-1][0], "int32"), index
    return _Use(name, make, tuple(params), more.pop("draws", tuple(draws)), **more)


def _cast_forms() -> list[_Use]:
    # a double becomes a half by way of a float, as in TensorFlow: rounded twice
    return [_use(f"to {to}", lambda b, x, to=to: b.cast(x, to), (None, 3), draws=(plain(0, 100),),
                 tolerance=(1.0, 0.0)) for to in DTYPES]


def _reduce_forms() -> list[_Use]:
    places = {"last": ((None, None), (1,)), "first": ((None, None), (0,)), "middle": ((None, None, 5), (1,)),
              "all": ((None, None), (0, 1)), "outer": ((None, 9, None), (0, 2)), "long": ((3, 70_000), (1,)),
              "tall": ((70_000, 3), (0,))}
    kinds = {"sum": (SUMMED, plain(0.1, 1), ("float", "int", "uint")), "max": (MOVED, special(0.01), None),
             "min": (MOVED, special(0.01), None), "and": (MOVED, plain(), ("bool",)), "or": (MOVED, plain(), ("bool",))}
    out = []
    for (kind, (tolerance, draw, types)), (where, (shape, axes)) in itertools.product(kinds.items(), places.items()):
        out.append(_use(f"{kind} {where}", lambda b, x, k=kind, a=axes: b.reduce(k, x, a), shape, draws=(draw,),
                        tolerance=tolerance, **({"kinds": types} if types else {})))
    products = _use("prod", lambda b, x: b.reduce("prod", x, (1,)), (None, 6), draws=(plain(0.5, 2),),
                    tolerance=(8.0, 0.0), kinds=("float", "int", "uint"))
    return [*out, products, _use("sum of NaN", lambda b, x: b.reduce("sum", x, (1,)), (None, 6), tolerance=(8.0, 1e-4),
                                 kinds=("float",))]


def _scan_forms() -> list[_Use]:
    number = ("float", "int", "uint")
    flags = list(itertools.product((False, True), repeat=2))
    sums = [_use(f"sum exclusive={e} reverse={r}", lambda b, x, e=e, r=r: b.scan("sum", x, 1, e, r), (None, None),
                 draws=(plain(0.1, 1),), tolerance=RUNNING, kinds=number) for e, r in flags]
    return [*sums, _use("sum of columns", lambda b, x: b.scan("sum", x, 0), (None, 7), draws=(plain(0.1, 1),),
                        tolerance=RUNNING, kinds=number),
            _use("prod", lambda b, x: b.scan("prod", x, 1), (None, 5), draws=(plain(0.5, 2),), tolerance=(8.0, 0.0),
                 kinds=number)]


def _dot_forms() -> list[_Use]:
    def use(name: str, x: tuple, y: tuple, batch: tuple = ((), ()), contract: tuple = ((1,), (0,))) -> _Use:
        return _use(name, lambda b, p, q: b.dot(p, q, batch, contract), x, y, draws=(plain(-1, 1), plain(-1, 1)),
                    tolerance=PRODUCT, kinds=("float", "int", "uint"))

    return [use("matrices", (None, 37), (37, 29)), use("one row", (1, 130), (130, 70)), use("vector", (None,), (None,),
            contract=((0,), (0,))), use("column", (None, 33), (33, 1)), use("unknown depth", (9, None), (None, 17)),
            use("transposed", (33, None), (29, 33), contract=((0,), (1,))),
            use("three columns", (None, 64), (64, 3)), use("nine rows", (32, 9), (32, None), contract=((0,), (0,))),
            use("outer", (None,), (7,), contract=((), ())),
            use("batch", (None, 5, 16), (None, 16, 7), ((0,), (0,)), ((2,), (1,))),
            use("two axes", (None, 3, 8), (8, 3, 6), contract=((1, 2), (1, 0)))]


def _conv_forms() -> list[_Use]:
    def use(name: str, x: tuple, w: tuple, strides: tuple, padding: tuple, dilations: tuple | None = None,
            groups: int = 1) -> _Use:
        return _use(name, lambda b, p, q: b.conv(p, q, strides, padding, dilations, groups), x, w,
                    draws=(plain(-1, 1), plain(-1, 1)), tolerance=PRODUCT, kinds=("float",))

    two = ((1, 1), (1, 1))
    return [use("one dim", (None, 19, 4), (3, 4, 6), (1,), ((1, 1),)),
            use("two dims", (None, 9, 7, 3), (3, 3, 3, 8), (1, 1), two),
            use("strides", (None, 9, 8, 4), (3, 2, 4, 6), (2, 1), ((1, 0), (0, 1))),
            use("dilations", (None, 11, 9, 4), (3, 3, 4, 6), (1, 1), ((2, 2), (1, 2)), (2, 1)),
            use("groups", (None, 6, 6, 8), (3, 3, 4, 6), (1, 1), two, None, 2),
            use("depthwise", (None, 7, 7, 6), (3, 3, 1, 6), (1, 1), two, None, 6),
            use("single element", (None, 5, 5, 16), (1, 1, 16, 24), (1, 1), ((0, 0), (0, 0))),
            use("three dims", (None, 5, 4, 6, 2), (2, 2, 3, 2, 4), (1, 2, 1), ((0, 1), (0, 0), (1, 1)))]


def _conv_filter_forms() -> list[_Use]:
    def use(name: str, x: tuple, g: tuple, size: tuple, strides: tuple, padding: tuple, dilations: tuple | None = None,
            groups: int = 1) -> _Use:
        dilations = dilations or (1,) * len(size)
        return _use(name, lambda b, p, q: b.conv_filter(p, q, size, strides, padding, dilations, groups), x, g,
                    draws=(plain(-1, 1), plain(-1, 1)), tolerance=PRODUCT, kinds=("float",))

    two = ((1, 1), (1, 1))
    return [use("one dim", (40, 19, 4), (40, 19, 6), (3,), (1,), ((1, 1),)),
            use("two dims", (3, 9, 7, 3), (3, 9, 7, 8), (3, 3), (1, 1), two),
            use("strides", (3, 9, 8, 4), (3, 4, 8, 6), (3, 2), (2, 1), ((1, 0), (0, 1))),
            use("dilations", (3, 11, 9, 4), (3, 11, 10, 6), (3, 3), (1, 1), ((2, 2), (1, 2)), (2, 1)),
            use("groups", (3, 6, 6, 8), (3, 6, 6, 6), (3, 3), (1, 1), two, None, 2),
            use("depthwise", (3, 7, 7, 6), (3, 7, 7, 6), (3, 3), (1, 1), two, None, 6),
            use("single element", (3, 5, 5, 16), (3, 5, 5, 24), (1, 1), (1, 1), ((0, 0), (0, 0))),
            use("no images", (0, 5, 5, 3), (0, 5, 5, 4), (3, 3), (1, 1), two),
            use("no places", (3, 2, 5, 3), (3, 0, 3, 4), (3, 3), (1, 1), ((0, 0), (0, 0))),
            use("three dims", (3, 5, 4, 6, 2), (3, 5, 2, 6, 4), (2, 2, 3), (1, 2, 1), ((0, 1), (0, 0), (1, 1)))]


def _window_forms() -> list[_Use]:
    def use(kind: str, shape: tuple, size: tuple, strides: tuple, padding: tuple) -> _Use:
        return _use(f"{kind} {len(size)}d {size}", lambda b, x: b.window(kind, x, size, strides, padding), shape,
                    draws=(special(0.02) if kind == "max" else plain(0, 2),),
                    tolerance=MOVED if kind == "max" else SUMMED, kinds=("float",))

    shapes = [((None, 9, 8, 5), (3, 2), (2, 1), ((1, 1), (0, 1))), ((None, 19, 3), (4,), (3,), ((0, 0),)),
              ((None, 4, 5, 6, 2), (2, 2, 2), (1, 2, 2), ((0, 0), (1, 0), (0, 0)))]
    return [use(kind, *shape) for kind in ("max", "sum", "mean") for shape in shapes]


def _gather_forms() -> list[_Use]:
    wild, fair = integers(-3, 12), integers(0, 8)
    return [_use("rows", lambda b, x, i: b.gather(x, i), (9, None), (None,), index=fair),
            _use("columns", lambda b, x, i: b.gather(x, i, 1), (None, 9), (2, None), index=fair),
            _use("clip", lambda b, x, i: b.gather(x, i, 0, 0, "clip"), (9, 5), (None,), index=wild),
            _use("zero", lambda b, x, i: b.gather(x, i, 0, 0, "zero"), (9, 5), (None,), index=wild),
            _use("batch", lambda b, x, i: b.gather(x, i, 1, 1), (3, 9, None), (3, None), index=fair)]


def _gather_nd_forms() -> list[_Use]:
    return [_use("pairs", lambda b, x, i: b.gather_nd(x, i), (7, 9, 4), (None, 2), index=integers(0, 6)),
            _use("zero", lambda b, x, i: b.gather_nd(x, i, 0, "zero"), (7, 9), (None, 2), index=integers(-2, 10)),
            _use("batch", lambda b, x, i: b.gather_nd(x, i, 1), (3, 9, 4), (3, None, 1), index=integers(0, 8))]


def ordered(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Rows in ascending order, with equal neighbours among them."""
    return np.sort(plain(0, 60)(rng, shape, dtype), axis=-1)


def _order_forms() -> list[_Use]:
    return [_use(f"{name} from {least}", lambda b, x: b.order(x), shape, draws=(draw,), kinds=("int", "uint"))
            for least, draw in ((0, plain(0, 9)), ("the ends", special(0.3)))
            for name, shape in (("one row", (None,)), ("rows", (None, None)), ("short rows", (None, 5)),
                                ("long rows", (3, 300)))]


def _search_forms() -> list[_Use]:
    def use(name: str, side: str, batch: int, *shapes: tuple) -> _Use:
        return _use(f"{name} {side}", lambda b, x, q: b.search(x, q, side, batch), *shapes,
                    draws=(ordered, plain(0, 60)), kinds=("float", "int", "uint"))

    return [use(name, side, *rest) for side in ("left", "right") for name, *rest in (
        ("one row", 0, (None,), (None,)), ("own rows", 1, (3, None), (3, None)), ("scalar", 0, (None,), ()))]


def _segment_forms() -> list[_Use]:
    number = ("float", "int", "uint")
    kinds = {"sum": (SUMMED, plain(0.1, 1)), "prod": ((8.0, 0.0), plain(0.5, 1.5)), "max": (MOVED, special(0.01)),
             "min": (MOVED, special(0.01))}
    shapes = {"rows": (None, 5), "elements": (None,), "images": (None, 2, 37)}

    def use(kind: str, name: str) -> _Use:
        tolerance, draw = kinds[kind]
        return _use(f"{kind} of {name}", lambda b, x, i: b.segment(kind, x, i), shapes[name], (9,),
                    draws=(draw, lambda rng, shape, dtype: np.sort(integers(-3, 40)(rng, shape, dtype))),
                    index=ordered, tolerance=tolerance, kinds=number)

    ragged = _use("any starts", lambda b, x, i: b.segment("max", x, b.concat([i, b.const([7], i.dtype)], 0)),
                  (None, 3), (None,), index=integers(-3, 40), kinds=number)
    return [*(use(kind, name) for kind in kinds for name in shapes), ragged]


def _slices(b: Builder, x: Node) -> Node:
    return b.slice(x, (3, 1), (5, D.floordiv(x.shape[1] + 1, 2) - 1), (2, 2))


_STRUCTURAL: dict[str, list[_Use]] = {
    "param": [_use("as it is", lambda b, x: [x, b.reshape(x, (-1,))], (None, 3))],
    "const": [_use("of the type", lambda b, x: b.select(
        b.ew("eq", x, x), x, b.const(np.arange(6).reshape(2, 3) % 2, x.dtype)), (2, 3))],
    "shape_value": [_use("sizes", lambda b, x: b.shape_value((x.shape[1], 7, x.size), dtype="int64"), (None, None))],
    "iota": [_use(f"axis {a}", lambda b, x, a=a: b.iota(x.shape, a, "int32"), (None, None)) for a in (0, 1)],
    "cast": _cast_forms(),
    "bitcast": [_use(f"to {to}", lambda b, x, to=to: b.bitcast(x, to), (None, 3))
                for to in ("int8", "uint16", "int32", "int64", "float32", "float16", "uint64", "uint8")],
    "select": [_Use("by mask", lambda b, c, x, y: b.select(c, x, y), (((None, 9), "bool"), ((None, 9), T), ((9,), T)),
                    (plain(), special(), special()))],
    "broadcast": [_use("rows", lambda b, x, like: b.broadcast_to(x, (like.shape[0], 7, 3)), (3,), (None,)),
                  _use("columns", lambda b, x, like: b.broadcast_to(b.reshape(x, (-1, 1)), (x.shape[0], like.shape[0])),
                       (None,), (None,)),
                  _use("scalar", lambda b, x, like: b.broadcast_to(x, like.shape), (), (None, None))],
    "reshape": [_use("split", lambda b, x: b.reshape(x, (-1, 2, 3)), (None, 6)),
                _use("joined", lambda b, x: b.reshape(b.select(b.ew("eq", x, x), x, x), (-1,)), (None, 3, 5))],
    "transpose": [_use(str(p), lambda b, x, p=p: b.transpose(x, p), (None, None, 5)[:len(p)])
                  for p in ((1, 0), (0, 2, 1), (2, 1, 0), (1, 2, 0), (1, 0, 2))],
    "slice": [_use("steps", _slices, (12, None)),
              _use("inside", lambda b, x: b.slice(x, (0, 1, 2), (x.shape[0], 3, 1)), (None, 5, 4))],
    "reverse": [_use(str(a), lambda b, x, a=a: b.reverse(x, a), (None, None)) for a in ((0,), (1,), (0, 1))],
    "pad": [_use("ends", lambda b, x: b.pad(x, (1, 2), (3, 0), 1), (None, None)),
            _use("between", lambda b, x: b.pad(x, (0, 1), (2, 0), 0, (1, 2)), (None, 5))],
    "concat": [_use(f"axis {a} of {n}", lambda b, *xs, a=a: b.concat(xs, a), *[(4, None) if a else (None, 3)] * n)
               for a, n in ((0, 2), (1, 2), (0, 3), (1, 3))],
    "gather": _gather_forms(),
    "gather_nd": _gather_nd_forms(),
    "order": _order_forms(),
    "search": _search_forms(),
    "segment": _segment_forms(),
    "reduce": _reduce_forms(),
    "arg_reduce": [_use(f"{kind} {axis}", lambda b, x, k=kind, a=axis: b.arg_reduce(k, x, a, "int64"), (None, 9)[::s],
                        kinds=("float", "int", "uint"))
                   for kind in ("max", "min") for axis, s in ((1, 1), (0, -1))],
    "scan": _scan_forms(),
    "dot": _dot_forms(),
    "conv": _conv_forms(), "conv_filter": _conv_filter_forms(),
    "window": _window_forms(),
}


def _fits(use: _Use, op: str, dtype: str) -> bool:
    d = DTYPES[dtype]
    if op == "bitcast":
        to = use.name.removeprefix("to ")
        return d.kind != "bool" and d.size == DTYPES[to].size and dtype != to
    return d.kind in use.kinds and d.kind in OPS[op].kinds and not (op == "cast" and use.name == f"to {dtype}")


def _structural(op: str, use: _Use, dtype: str) -> Form:
    b = Builder()
    made = use.make(b, *(b.param(shape, dtype if t == T else t) for shape, t in use.params))
    graph = b.finish([made] if isinstance(made, Node) else list(made), f"{op} {use.name}")
    places, terms = use.tolerance
    if dtype == "float64":
        places, terms = 8 * places, 1e-9 * terms
    return Form(op, use.name, graph, use.draws, (places, terms))


def forms(dtype: str) -> list[Form]:
    """Every use of every op that takes elements of this type."""
    elementwise = [_elementwise(name, dtype) for name, op in OPS.items()
                   if op.elementwise and DTYPES[dtype].kind in op.kinds and _ONLY.get(name, dtype) == dtype]
    return elementwise + [_structural(op, use, dtype) for op, uses in _STRUCTURAL.items() for use in uses
                          if _fits(use, op, dtype)]


def judge(made: Iterable[tuple[Form, Program]], run: Callable[[Program, list[Array]], list[Array]]
          ) -> tuple[int, list[str]]:
    """How many runs of the forms' programs were compared with the interpreter, and what was wrong with which."""
    compared, wrong = 0, []
    for form, program in made:
        for inputs in form.inputs():
            try:
                want = interp.run(form.graph, inputs)
            except interp.GuardFailed:
                continue  # sizes that the op does not allow
            try:
                form.check(want, run(program, inputs))
                compared += 1
            except AssertionError as error:
                wrong.append(f"{form.op} {form.name} of {[x.shape for x in inputs]}: {error}"[:300])
    return compared, wrong
