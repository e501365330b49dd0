"""Reductions as text: how each kind starts, takes a value, joins partial results and ends.

A float maximum keeps a plain maximum and a NaN flag: both vectorise, a NaN-propagating maximum does not.
Long float sums are summed in pieces, so the error does not grow with the length.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.dtypes import DTYPES
from ..ir.structural import identity
from .text import compute_type, literal


@dataclass(frozen=True)
class Product:
    """Two float factors: a sum takes their product with one rounding, as matrix products do, ``when`` that holds."""

    a: str
    b: str
    when: str = ""


@dataclass(frozen=True)
class Fold:
    """One reduction of values of ``dtype``.  ``kind`` is "sum", "prod", "max", "min", "and" or "or"."""

    kind: str
    dtype: str

    @property
    def type(self) -> str:
        """The accumulator's type: integers wrap as unsigned, bools count as int."""
        d = DTYPES[self.dtype]
        if d.kind == "bool":
            return "int"
        if d.is_integer and self.kind in ("sum", "prod"):
            return "ts_u64" if d.size == 8 else "ts_u32"
        if d.is_integer and d.size < 4:
            return "ts_i32"
        return d.compute

    @property
    def op(self) -> str:
        """The operation; a bool maximum is an "or"."""
        if DTYPES[self.dtype].kind == "bool":
            return {"max": "or", "min": "and"}.get(self.kind, self.kind)
        return self.kind

    @property
    def flagged(self) -> bool:
        """True when NaNs are tracked in a flag of their own."""
        return self.kind in ("max", "min") and DTYPES[self.dtype].is_float

    @property
    def start(self) -> str:
        """The value of a fold of nothing."""
        if self.type == "int":
            return "1" if self.op == "and" else "0"
        return f"{self.type}({literal(identity(self.kind, self.dtype)[()], self.dtype)})"

    def step(self, acc: str, value: str | Product) -> str:
        """The statement that takes a value (or joins a partial result) into ``acc``."""
        if isinstance(value, Product):
            taken = f"ts_fma_({value.a}, {value.b}, {acc})"
            return f"{acc} = {f'ts_pick<{self.type}>({value.when}, {taken}, {acc})' if value.when else taken};"
        if self.op in ("sum", "prod"):
            value = value if DTYPES[self.dtype].is_float else f"{self.type}({value})"
            return f"{acc} {'+' if self.op == 'sum' else '*'}= {value};"
        if self.op in ("and", "or"):
            return f"{acc} {'&' if self.op == 'and' else '|'}= {value};"
        return f"{acc} = {value} {'>' if self.op == 'max' else '<'} {acc} ? {value} : {acc};"

    def step_lane(self, acc: str, value: str | Product) -> str:
        """As :meth:`step` where the accumulator is one of many lanes: NaN goes into it."""
        if self.flagged:
            return f"{acc} = ts_{self.op}({acc}, {value});"
        return self.step(acc, value)

    def clauses(self, acc: str) -> str:
        """The OpenMP clauses of a vector loop that folds into ``acc``."""
        sign = {"sum": "+", "prod": "*", "and": "&", "or": "|"}.get(self.op, self.op)
        return f"reduction({sign}:{acc})" + (f" reduction(|:{acc}_nan)" if self.flagged else "")

    def declare(self, acc: str) -> list[str]:
        """Declares an accumulator, and its NaN flag."""
        lines = [f"{self.type} {acc} = {self.start};"]
        return [*lines, f"int {acc}_nan = 0;"] if self.flagged else lines

    def take(self, acc: str, value: str | Product) -> list[str]:
        """Statements that take a value into a flagged accumulator."""
        lines = [self.step(acc, value)]
        return [*lines, f"{acc}_nan |= {value} != {value};"] if self.flagged else lines

    def add(self, acc: str, part: str) -> list[str]:
        """Statements that join a partial accumulator into another."""
        lines = [self.step(acc, part)]
        return [*lines, f"{acc}_nan |= {part}_nan;"] if self.flagged else lines

    def finish(self, acc: str, lanes: int) -> list[str]:
        """Statements that join the lanes of a group."""
        lines = [f"{acc} = TS_JOIN_{self.op.upper()}({acc}, {lanes});"]
        return [*lines, f"{acc}_nan = TS_JOIN_OR({acc}_nan, {lanes});"] if self.flagged else lines

    def gather(self, acc: str, lanes: int, lane: bool = False) -> list[str]:
        """Statements that join what the groups of a block have, lane by lane, for the first group."""
        lines = [f"TS_GATHER({self.op.upper()}, {acc}, {lanes})"]
        return [*lines, f"TS_GATHER(OR, {acc}_nan, {lanes})"] if self.flagged and not lane else lines

    def result(self, acc: str, lane: bool = False) -> str:
        """The folded value, of the compute type."""
        c = compute_type(self.dtype)
        if self.flagged and not lane:
            return f"{acc}_nan ? ts_nan({c}(0)) : {acc}"
        if self.type == "int":
            return f"{acc} != 0"
        return acc if self.type == c else f"{c}({acc})"

    @property
    def pairwise(self) -> bool:
        """True when a long fold must be done in pieces to stay accurate."""
        return self.kind == "sum" and DTYPES[self.dtype].is_float
