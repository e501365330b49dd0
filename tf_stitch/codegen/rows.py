"""The loop of a row chain: one pass over the rows with all its stages inside, rows in the threads' registers."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..ir import dims as D
from ..ir.dtypes import DTYPES
from ..ir.graph import Node
from ..schedule.kernel_schedule import OUT, Item, RowChain, Stage
from ..schedule.rules import Index
from . import contract
from .folds import Fold, Product
from .loops import Loops
from .runs import Runs
from .text import compute_type, rounded, storage_type
from .values import declare, evaluate

if TYPE_CHECKING:
    from .emit import StageEmitter


class Rows(Loops):
    """Emits the stages of a row chain through a StageEmitter.

    A held row is an array of the elements that a thread has; the scope of the row maps the node at the row's index
    to the array's current element, so that later stages find it where they would load it.
    """

    def __init__(self, e: StageEmitter, chain: RowChain):
        super().__init__(e)
        self.chain = chain
        self.lane = len(self.box) - 1
        self.lanes = chain.lanes
        self.size = D.static(self.stage.shape[-1])
        self.arrays = {n: e.fresh("r") for n in chain.held}

    def emit(self) -> None:
        """Adds the loop over rows."""
        with self.rows([d for d in self.loops if d != self.lane], self.lanes):
            row = self.scopes.top
            row.conditional = True  # what only the block determines may still come from a fold of this row
            self.scopes.line("// rows: " + "; ".join(_summary(s) for s in self.chain.stages))
            for n, name in self.arrays.items():
                self.scopes.line(f"TS_ROW({compute_type(n.dtype)}, {name}, {self._shape})")
            for k, s in enumerate(self.chain.stages):
                self.stage = s
                if len(s.shape) == len(self.box):
                    self._whole(s, [n for n, first in self.chain.held.items() if first == k])
                else:
                    self._per_row(s)

    @property
    def _shape(self) -> str:
        return f"{self.size}, {self.lanes}, {self.chain.run}"

    def _whole(self, s: Stage, first: list[Node]) -> None:
        """A stage over the elements of the row, and what its folds give; ``first`` are held from it on.

        What no stage of the chain computes is loaded: inputs, and what a stage before the chain put into shared memory.
        """
        computed = {i.node for i in s.items if not i.copy}
        items = self._fold_items()
        for _, fold, acc in items:
            self.scopes.line(f"{fold.type} {acc} = {fold.start};")
        accumulators = {i.node: (fold, acc) for i, fold, acc in items}
        with self._elements():
            for n in first:
                if n not in computed:
                    self._hold(n, evaluate(self.e, n, self.index))
            for item in s.items:
                if item.node in accumulators and self._folds(item):
                    fold, acc = accumulators[item.node]
                    self.scopes.line(fold.step_lane(acc, self._term(item.node)))
                else:
                    self._element(item)
        for n in first:
            self.scopes.top.values[(n, self.index)] = f"{self.arrays[n]}[j]"
        for item, fold, acc in items:
            self._folded(item, fold, acc)

    def _term(self, n: Node) -> str | Product:
        """What a fold takes: a sum of float products that nothing else reads rounds once per product."""
        x = n.inputs[0]
        exact = DTYPES[x.dtype].is_float and compute_type(x.dtype) == storage_type(x.dtype)
        if n.attrs["kind"] == "sum" and x.op == "mul" and exact and not self.e.in_memory(x) \
                and self.scopes.find((x, self.index)) is None:
            return Product(*(evaluate(self.e, y, self.index) for y in x.inputs))
        return contract.value(self.e, n, self.index)

    @contextmanager
    def _elements(self) -> Iterator[None]:
        """The loop over the thread's elements of the row."""
        width = self.chain.run
        macro = "TS_ROW_TURNS" if self.chain.short else "TS_LONG_ROW_TURNS"
        with self.scopes.block(f"{macro}({self._shape})", ("ts_ts_i",)):
            self.e.runs = Runs(self.e, self.index[-1], width)
            with self.scopes.block(f"TS_ROW_EACH(i{self.lane}, j, {width})", (f"ts_i{self.lane}",)):
                yield
            self.e.runs.finish()
            self.e.runs = None

    def _hold(self, n: Node, value: str) -> None:
        self.scopes.line(f"{self.arrays[n]}[j] = {value};")

    def _element(self, item: Item) -> None:
        value = self._value(item, self.index)
        if item.node in self.arrays and not item.copy:
            self._hold(item.node, value)
        if item.space == OUT or item.node in self.e.part.slots:
            self.scopes.line(self.e.store(item.node, item.space, self.index, value))

    def _folded(self, item: Item, fold: Fold, acc: str) -> None:
        """Joins a fold over the threads of the row; all of them go on with the result."""
        n = item.node
        self.scopes.line(f"{acc} = TS_JOIN_{fold.op.upper()}({acc}, {self.lanes});")
        index = self.index[:-1]
        value = contract.finish(self.e, n, index, fold.result(acc, lane=True))
        self._give(item, index, declare(self.e, n, index, rounded(value, n.dtype)))

    def _per_row(self, s: Stage) -> None:
        """A stage of one value per row: every thread computes it, one writes it."""
        index: Index = self.index[:-1]
        for item in s.items:
            self._give(item, index, self._value(item, index))

    def _give(self, item: Item, index: Index, value: str) -> None:
        if item.space == OUT or item.node in self.e.part.slots:
            with self.scopes.block(f"TS_ONE({self.lanes})"):
                self.scopes.line(self.e.store(item.node, item.space, index, value))


def _summary(s: Stage) -> str:
    return ", ".join(dict.fromkeys(i.node.op for i in s.items))
