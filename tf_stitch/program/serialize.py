"""The byte format of a program: what travels in the op's ``program`` attr (read by custom_ops/program.cc).

    "TFSP"  version: byte  crc32 of the rest, from version 3 on xor the version: 4 bytes, little-endian
    9 or 10 sections in this order, each: tag: byte (1..10)  length  contents
      1 names        count, strings                  strings below are indices into this list; then the program's name
      2 symbols      count, (name, flags: byte, param, index, [lo], [hi])   flags: 1 "value", 2 has lo, 4 has hi
      3 expressions  count, (op: byte, operands)     operands are earlier entries; see _OPS
      4 buffers      count, (kind: byte, index, dtype: byte, dims)          dtype: TensorFlow's DataType number
      5 steps        count, (kind: byte, origin, ...)
                       0 kernel: kernel, buffers, dims, blocks, shared bytes, cost, threads
                       1 alias: source buffer, output buffer
                       2 library: call, buffers, dims, flags (see program.LibraryStep)
      6 guards       count, (kind: byte, a, b, reason)
      7 code         count, (target, bytes)
      8 text         bytes
      9 grids        count, (kernel, bodies: count, (kernel, bytes kept, positions kept),
                                      base buffers, first step, phases: count, steps - 1 of each)
     10 batch        symbol, inputs: count, dim + 1 of each (0: not along the batch),     only of a program that has one
                     outputs: count, (dim + 1, the expression `inner`) of each, or just 0 (see ir.separable.Batch)

Numbers are LEB128, signed ones zigzag; strings and bytes carry their length.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ..errors import ProgramError
from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Guard, SymbolSource
from ..ir.separable import Batch
from .program import AliasStep, Buffer, Grid, KernelStep, LibraryStep, Program, Step

MAGIC, VERSION = b"TFSP", 3
OLDEST = 2  # that is read: a GPU's code is one image there
_HEADER = len(MAGIC) + 1 + 4
_OPS = ("const", "symbol", "add", "mul", "div", "mod", "min", "max")
_BUFFER_KINDS = ("input", "output", "temp")
_GUARD_KINDS = ("eq", "le", "divides")
_SYMBOL_KINDS = ("dim", "value")
_STEP_KINDS = (KernelStep, AliasStep, LibraryStep)

# TensorFlow's DataType numbers (types.proto); they never change.
DTYPE_NUMBERS = {"float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "int64": 9, "bool": 10,
                 "bfloat16": 14, "uint16": 17, "float16": 19, "uint32": 22, "uint64": 23}
_DTYPE_NAMES = {number: name for name, number in DTYPE_NUMBERS.items()}

T = TypeVar("T")


class _Writer:
    """Appends numbers and bytes."""

    def __init__(self) -> None:
        self.out = bytearray()

    def byte(self, value: int) -> None:
        self.out.append(value)

    def unsigned(self, value: int) -> None:
        while value > 0x7F:
            self.out.append(value & 0x7F | 0x80)
            value >>= 7
        self.out.append(value)

    def signed(self, value: int) -> None:
        if not -(1 << 63) <= value < 1 << 63:
            raise ProgramError(f"A size of {value} in the program does not fit into 64 bits.")
        self.unsigned(value << 1 if value >= 0 else (-value << 1) - 1)

    def bytes(self, data: bytes | bytearray) -> None:
        self.unsigned(len(data))
        self.out += data

    def list(self, items: Sequence[T], write: Callable[[T], None]) -> None:
        self.unsigned(len(items))
        for item in items:
            write(item)


class _Table(dict):
    """Gives each distinct key the next number."""

    def number(self, key) -> int:
        return self.setdefault(key, len(self))


class _Exprs:
    """Flattens dims into the expression table; equal parts are stored once."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.numbers = {name: i for i, name in enumerate(symbols)}
        self.table = _Table()
        self.seen: dict[str, D.Symbol] = {}  # with their bounds
        self.memo: dict[Dim, int] = {}

    def number(self, dim: Dim) -> int:
        """The table entry that holds ``dim``."""
        if not isinstance(dim, D.Expr):
            return self.table.number(("const", int(dim)))
        if dim not in self.memo:
            self.memo[dim] = self._fold("add", [self._monomial(m, c) for m, c in dim.terms])
        return self.memo[dim]

    def _fold(self, op: str, entries: Iterable[int]) -> int:
        first, *rest = entries
        for entry in rest:
            first = self.table.number((op, first, entry))
        return first

    def _monomial(self, atoms: D.Monomial, coefficient: int) -> int:
        factors = [self._atom(a) for a, power in atoms for _ in range(power)]
        if coefficient != 1 or not factors:
            factors.append(self.number(coefficient))
        return self._fold("mul", factors)

    def _atom(self, atom: D.Atom) -> int:
        if isinstance(atom, D.Func):
            return self._fold(atom.kind, [self.number(a) for a in atom.args])
        if atom.name not in self.numbers:
            raise ProgramError(f"The program uses the size '{atom.name}', which none of its inputs gives.")
        self.seen[atom.name] = _narrowed(self.seen.get(atom.name, atom), atom)
        return self.table.number(("symbol", self.numbers[atom.name]))


def _narrowed(a: D.Symbol, b: D.Symbol) -> D.Symbol:
    """A symbol within both ranges: a guard holds it as it came, the shapes with what the guard makes sure of."""
    if a == b:
        return a
    if isinstance(a.hi, D.Expr) or isinstance(b.hi, D.Expr):
        raise ProgramError(f"The range of the size '{a.name}' depends on another size.")
    lows, highs = ([x for x in pair if x is not None] for pair in ((a.lo, b.lo), (a.hi, b.hi)))
    return D.Symbol(a.name, max(lows, default=None), min(highs, default=None))


def dumps(program: Program, text: bool = True) -> bytes:
    """The program as bytes.  ``text=False`` leaves the kernels' source out.

    Raises ProgramError for a size that needs more than 64 bits or that no input gives.
    """
    names, exprs = _Table(), _Exprs(list(program.symbols))
    sections = [_Writer() for _ in range(10)]
    w_names, w_symbols, w_exprs, w_buffers, w_steps, w_guards, w_code, w_text, w_grids, w_batch = sections
    name = names.number(program.name)
    w_buffers.list(program.buffers, lambda b: _write_buffer(w_buffers, b, exprs))
    w_steps.list(program.steps, lambda s: _write_step(w_steps, s, names, exprs))
    w_guards.list(program.guards, lambda g: _write_guard(w_guards, g, names, exprs))
    if program.batch is not None:
        _write_batch(w_batch, program.batch, exprs)
    w_symbols.list(list(program.symbols.items()), lambda s: _write_symbol(w_symbols, *s, names, exprs))
    w_exprs.list(list(exprs.table), lambda e: _write_expr(w_exprs, e))
    w_code.list(sorted(program.code.items()), lambda c: _write_code(w_code, *c, names))
    w_grids.list(program.grids, lambda g: _write_grid(w_grids, g, names))
    w_text.bytes(program.text.encode() if text else b"")
    w_names.list(list(names), lambda n: w_names.bytes(n.encode()))
    w_names.unsigned(name)
    whole = _Writer()
    for tag, section in enumerate(sections, 1):
        if section is not w_batch or program.batch is not None:
            whole.byte(tag)
            whole.bytes(section.out)
    return seal(bytes(whole.out))


def seal(payload: bytes) -> bytes:
    """Sections with the header in front."""
    return MAGIC + bytes([VERSION]) + _checksum(payload, VERSION).to_bytes(4, "little") + payload


def _write_symbol(w: _Writer, name: str, source: SymbolSource, names: _Table, exprs: _Exprs) -> None:
    symbol = exprs.seen.get(name, D.Symbol(name, None, None))  # one that nothing uses has no range to keep
    if isinstance(symbol.hi, D.Expr):
        raise ProgramError(f"The range of the size '{name}' depends on another size.")
    w.unsigned(names.number(name))
    w.byte(_SYMBOL_KINDS.index(source.kind) | 2 * (symbol.lo is not None) | 4 * (symbol.hi is not None))
    w.unsigned(source.param)
    w.unsigned(source.index)
    for bound in (symbol.lo, symbol.hi):
        if bound is not None:
            w.signed(bound)


def _write_expr(w: _Writer, entry: tuple) -> None:
    op, *operands = entry
    w.byte(_OPS.index(op))
    for operand in operands:
        w.signed(operand) if op == "const" else w.unsigned(operand)


def _write_buffer(w: _Writer, b: Buffer, exprs: _Exprs) -> None:
    w.byte(_BUFFER_KINDS.index(b.kind))
    w.unsigned(b.index)
    w.byte(DTYPE_NUMBERS[b.dtype])
    w.list(b.shape, lambda d: w.unsigned(exprs.number(d)))


def _write_step(w: _Writer, s: Step, names: _Table, exprs: _Exprs) -> None:
    w.byte(_STEP_KINDS.index(type(s)))
    w.unsigned(names.number(s.origin))
    if isinstance(s, AliasStep):
        w.unsigned(s.source)
        w.unsigned(s.output)
        return
    if isinstance(s, LibraryStep):
        w.unsigned(names.number(s.call))
        w.list(s.buffers, w.unsigned)
        w.list(s.dims, lambda d: w.unsigned(exprs.number(d)))
        w.list(s.flags, w.unsigned)
        return
    w.unsigned(names.number(s.kernel))
    w.list(s.buffers, w.unsigned)
    w.list(s.dims, lambda d: w.unsigned(exprs.number(d)))
    for dim in (s.blocks, s.shared_bytes, s.cost):
        w.unsigned(exprs.number(dim))
    w.unsigned(s.threads)


def _write_guard(w: _Writer, g: Guard, names: _Table, exprs: _Exprs) -> None:
    w.byte(_GUARD_KINDS.index(g.kind))
    w.unsigned(exprs.number(g.a))
    w.unsigned(exprs.number(g.b))
    w.unsigned(names.number(g.reason))


def _write_grid(w: _Writer, g: Grid, names: _Table) -> None:
    w.unsigned(names.number(g.kernel))
    w.list(list(zip(g.bodies, g.keeps, strict=True)), lambda body: _write_body(w, body[0], *body[1], names))
    w.list(g.bases, w.unsigned)
    w.unsigned(g.first)
    w.list(g.phases, lambda count: w.unsigned(count - 1))


def _write_body(w: _Writer, kernel: str, room: int, inputs: tuple[int, ...], names: _Table) -> None:
    w.unsigned(names.number(kernel))
    w.unsigned(room)
    w.list(inputs, w.unsigned)


def _write_batch(w: _Writer, b: Batch, exprs: _Exprs) -> None:
    w.unsigned(exprs.numbers[b.symbol])
    w.list(b.inputs, lambda axis: w.unsigned(0 if axis is None else axis + 1))
    w.list(b.outputs, lambda where: _write_place(w, where, exprs))


def _write_place(w: _Writer, where: tuple[int, Dim] | None, exprs: _Exprs) -> None:
    w.unsigned(0 if where is None else where[0] + 1)
    if where is not None:
        w.unsigned(exprs.number(where[1]))


def _write_code(w: _Writer, target: str, code: bytes, names: _Table) -> None:
    w.unsigned(names.number(target))
    w.bytes(code)


class _Reader:
    """Reads what _Writer wrote; IndexError and ValueError mean corrupt data."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if value >= 1 << 64:
            raise ValueError("a number is too long")
        return value

    def signed(self) -> int:
        value = self.unsigned()
        return value >> 1 if value % 2 == 0 else -(value + 1 >> 1)

    def bytes(self) -> bytes:
        n = self.unsigned()
        if n > len(self.data) - self.at:
            raise ValueError("a list is longer than the data")
        self.at += n
        return self.data[self.at - n:self.at]

    def list(self, read: Callable[[], T]) -> list[T]:
        n = self.unsigned()
        if n > len(self.data) - self.at:
            raise ValueError("a list is longer than the data")
        return [read() for _ in range(n)]

    def at_end(self) -> bool:
        return self.at == len(self.data)

    def finish(self) -> None:
        if not self.at_end():
            raise ValueError("there are bytes left over")


def _checksum(payload: bytes | bytearray, version: int) -> int:
    """A damaged version does not go unnoticed either."""
    return zlib.crc32(payload) ^ (version if version > OLDEST else 0)


def loads(data: bytes) -> Program:
    """The program that :func:`dumps` wrote.  Raises ProgramError when the bytes are not one."""
    if data[:4] != MAGIC or len(data) < _HEADER:
        raise ProgramError("The bytes are not a tf_stitch program: they do not start as one does.")
    if not OLDEST <= data[4] <= VERSION:
        raise ProgramError(f"The program has format version {data[4]}, this tf_stitch reads versions {OLDEST} to "
                           f"{VERSION}; rewrite the model again.")
    if _checksum(data[_HEADER:], data[4]) != int.from_bytes(data[5:_HEADER], "little"):
        raise ProgramError("The program is corrupt: its checksum does not match.")
    try:
        return _read(_Reader(data[_HEADER:]))
    except (IndexError, KeyError, ValueError, ZeroDivisionError) as error:
        raise ProgramError(f"The program is corrupt: {error}.") from None


def _read(all_: _Reader) -> Program:
    sections = []
    for tag in range(1, 11):
        if tag == 10 and all_.at_end():
            break
        if all_.byte() != tag:
            raise ValueError("its sections are out of order")
        sections.append(_Reader(all_.bytes()))
    all_.finish()
    r_names, r_symbols, r_exprs, r_buffers, r_steps, r_guards, r_code, r_text, r_grids, *r_batch = sections
    names = r_names.list(lambda: r_names.bytes().decode())
    title = names[r_names.unsigned()]
    symbols = r_symbols.list(lambda: _read_symbol(r_symbols, names))
    exprs: list[Dim] = []
    r_exprs.list(lambda: exprs.append(_read_expr(r_exprs, exprs, symbols)))
    program = Program(
        buffers=r_buffers.list(lambda: _read_buffer(r_buffers, exprs)),
        steps=r_steps.list(lambda: _read_step(r_steps, names, exprs)),
        symbols={symbol.name: source for symbol, source in symbols},
        guards=r_guards.list(lambda: _read_guard(r_guards, names, exprs)),
        code=dict(r_code.list(lambda: (names[r_code.unsigned()], r_code.bytes()))),
        text=r_text.bytes().decode(), name=title,
        grids=r_grids.list(lambda: _read_grid(r_grids, names)),
        batch=_read_batch(r_batch[0], symbols, exprs) if r_batch else None)
    for section in sections:
        section.finish()
    return program


def _read_symbol(r: _Reader, names: list[str]) -> tuple[D.Symbol, SymbolSource]:
    name, flags = names[r.unsigned()], r.byte()
    source = SymbolSource(_SYMBOL_KINDS[flags & 1], r.unsigned(), r.unsigned())
    lo = r.signed() if flags & 2 else None
    hi = r.signed() if flags & 4 else None
    return D.Symbol(name, lo, hi), source


def _read_expr(r: _Reader, exprs: list[Dim], symbols: list[tuple[D.Symbol, SymbolSource]]) -> Dim:
    op = _OPS[r.byte()]
    if op == "const":
        return r.signed()
    if op == "symbol":
        symbol = symbols[r.unsigned()][0]
        return D.symbol(symbol.name, symbol.lo, symbol.hi)
    a, b = exprs[r.unsigned()], exprs[r.unsigned()]
    return {"add": lambda: a + b, "mul": lambda: a * b, "div": lambda: D.floordiv(a, b), "mod": lambda: D.mod(a, b),
            "min": lambda: D.dmin(a, b), "max": lambda: D.dmax(a, b)}[op]()


def _read_buffer(r: _Reader, exprs: list[Dim]) -> Buffer:
    kind, index, dtype = _BUFFER_KINDS[r.byte()], r.unsigned(), _DTYPE_NAMES[r.byte()]
    return Buffer(kind, index, dtype, tuple(r.list(lambda: exprs[r.unsigned()])))


def _read_step(r: _Reader, names: list[str], exprs: list[Dim]) -> Step:
    kind, origin = r.byte(), names[r.unsigned()]
    if kind >= len(_STEP_KINDS):
        raise ValueError(f"step kind {kind} is not known")
    if _STEP_KINDS[kind] is AliasStep:
        return AliasStep(r.unsigned(), r.unsigned(), origin)
    kernel, buffers = names[r.unsigned()], tuple(r.list(r.unsigned))
    dims = tuple(r.list(lambda: exprs[r.unsigned()]))
    if _STEP_KINDS[kind] is LibraryStep:
        return LibraryStep(kernel, buffers, dims, tuple(r.list(r.unsigned)), origin)
    blocks, shared_bytes, cost = (exprs[r.unsigned()] for _ in range(3))
    return KernelStep(kernel, buffers, dims, blocks, shared_bytes, cost, r.unsigned(), origin)


def _read_grid(r: _Reader, names: list[str]) -> Grid:
    kernel = names[r.unsigned()]
    bodies = r.list(lambda: (names[r.unsigned()], (r.unsigned(), tuple(r.list(r.unsigned)))))
    return Grid(kernel, tuple(b for b, _ in bodies), tuple(r.list(r.unsigned)), r.unsigned(),
                tuple(r.list(lambda: r.unsigned() + 1)), tuple(k for _, k in bodies))


def _read_batch(r: _Reader, symbols: list[tuple[D.Symbol, SymbolSource]], exprs: list[Dim]) -> Batch:
    name = symbols[r.unsigned()][0].name
    inputs = r.list(lambda: _axis(r.unsigned()))
    outputs = r.list(lambda: None if (axis := _axis(r.unsigned())) is None else (axis, exprs[r.unsigned()]))
    return Batch(name, tuple(inputs), tuple(outputs))


def _axis(number: int) -> int | None:
    return number - 1 if number else None


def _read_guard(r: _Reader, names: list[str], exprs: list[Dim]) -> Guard:
    kind = _GUARD_KINDS[r.byte()]
    a, b = exprs[r.unsigned()], exprs[r.unsigned()]
    return Guard(kind, a, b, names[r.unsigned()])
