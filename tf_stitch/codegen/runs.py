"""Runs of neighbouring elements: what a thread of a GPU loads or stores with one wide access."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Node
from ..schedule import rules
from ..schedule.rules import Index, Span
from .scope import symbol_names
from .text import storage_type

if TYPE_CHECKING:
    from .emit import StageEmitter

START = D.symbol("ts_ts_i")  # the first of a run's neighbours


class Runs:
    """The accesses of one loop over runs, which has a scope per run and one per element in it.

    Attributes:
      lane: the index of an element, START + ts_w.
      width: elements of a run; START is a multiple of it.
      batch: how many rows' runs are loaded before any is stored, in loops of u (1: there are no such loops),
      row: where these begin and how long they are,
      outside: the depth of the scope around these loops.
    """

    def __init__(self, e: StageEmitter, lane: Dim, width: int, batch: int = 1, row: Span = (0, 0)):
        self.e, self.lane, self.width, self.batch, self.row = e, lane, width, batch, row
        self.outside = len(e.scopes.stack) - 1
        self.depth = self.outside + (2 if batch > 1 else 0)
        self.loads: dict[tuple[Node, Dim], str] = {}
        self.stores: list[tuple[str, Node, Dim]] = []

    def load(self, node: Node, index: Index) -> str | None:
        """An element of ``node`` out of a run that is loaded before the run's elements; None when that cannot be."""
        start = self._start(node, index)
        if start is None:
            return None
        name = self.loads.get((node, start))
        if name is None:
            name = self.loads[(node, start)] = self.e.fresh("p")
            with self.e.scopes.at(self.depth):
                self.e.scopes.line(f"TS_RUN_LOAD({storage_type(node.dtype)}, {name}, {self.e.buffer_pointer(node)}, "
                                   f"{self.e.dim(start)}, {self.width})")
        return f"{name}.at[ts_w]"

    def place(self, node: Node, index: Index) -> str | None:
        """The lvalue of an element of a run that is stored after the run's elements; None when that cannot be."""
        start = self._start(node, index)
        if start is None:
            return None
        name = self._declare(storage_type(node.dtype))
        self.stores.append((name, node, start))
        return f"{name}.at[ts_w]"

    def _declare(self, c: str) -> str:
        """A run to be stored, or one for each row of a batch; gives the one at hand."""
        name, text = self.e.fresh("p"), f"TS_RUN({c}, {{}}, {self.width})"
        off, ext = map(self.e.dim, self.row)
        if self.batch > 1:
            text = f"TS_BATCH_RUNS({c}, {{}}, {self.batch}, {ext}, {self.width})"
        with self.e.scopes.at(self.outside):
            self.e.scopes.line(text.format(name))
        return name if self.batch == 1 else f"TS_BATCH_RUN({name}, {off}, {self.width})"

    def finish(self) -> None:
        """Adds the stores, in a run's scope."""
        for name, node, start in self.stores:
            self.e.scopes.line(f"TS_RUN_STORE({storage_type(node.dtype)}, {name}, {self.e.buffer_pointer(node)}, "
                               f"{self.e.dim(start)}, {self.width})")

    def _start(self, node: Node, index: Index) -> Dim | None:
        """Where the run begins that an element is in, when all of it is there to be accessed."""
        scopes = self.e.scopes
        rest = rules.linear(index, node.shape) - self.lane
        if symbol_names((self.lane,)) & symbol_names((rest,)) or D.mod(rest, self.width) != 0:
            return None
        if any(s.conditional for s in scopes.stack[self.depth + 1:]) or scopes.depth_of((rest,)) > self.depth:
            return None
        return rest + START
