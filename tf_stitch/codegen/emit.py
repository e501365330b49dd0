"""Emits a kernel: block composition of stages, each with its own loops, handing values over in shared memory."""
from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from ..ir import dims as D
from ..ir.dims import Dim, Expr, Symbol
from ..ir.graph import Node
from ..schedule import rules
from ..schedule.kernel_schedule import KernelSchedule, Part, RowChain, Stage
from ..schedule.products import have_products
from ..schedule.rows import USUAL
from ..schedule.rules import Index
from ..schedule.storage import HEAVY
from ..schedule.tile import guess
from .kernel import INDEX_LIMIT, Kernel
from .loops import Loops
from .members import FIRST, Members, PartText, members
from .rows import Rows
from .runs import Runs
from .scope import Scopes, symbol_names
from .text import compute_type, dim_text, factor_text, rounded, storage_type

INLINE_SOURCES = frozenset({"const", "iota", "shape_value"})
_PLACEHOLDER = "TS_NAME"
_INPUT = re.compile(r"\bx\d+\b")


class KernelEmitter:
    """State of one kernel: names of buffers, dims and tables, in order of first use."""

    def __init__(self, schedule: KernelSchedule):
        self.schedule = schedule
        self.target = schedule.target
        self.inputs: dict[Node, str] = {}
        self.outputs = {o: f"y{k}" for k, o in enumerate(schedule.outputs)}
        self.dims: dict[str, Symbol] = {}
        self.starts: dict[Node, Expr] = {}
        self.tables: dict[tuple[str, str], str] = {}
        self.exact = True
        self.count = 0
        self.scopes = Scopes()
        # threads' sums meet behind the staged values
        self.staged = 0 if self.target.is_host else max(D.static(p.shared_bytes) for p in schedule.parts)
        self.scratch_bytes = 0

    def scratch(self, size: int) -> int:
        """Where scratch of a stage lies in shared memory: bytes from the start."""
        self.scratch_bytes = max(self.scratch_bytes, size)
        return self.staged

    def symbol_name(self, s: Symbol) -> str:
        """The variable of a symbol: a loop, a block's place, or a run-time dim."""
        if s.name.startswith("ts_"):
            return s.name[3:]
        self.dims.setdefault(s.name, s)
        return f"n{list(self.dims).index(s.name)}"

    def dim(self, d: Dim) -> str:
        """C++ text of a dim."""
        return dim_text(d, self.symbol_name)

    def factor(self, d: Dim) -> str:
        """C++ text of a dim, safe as a factor."""
        return factor_text(d, self.symbol_name)

    def start(self, node: Node) -> Dim:
        """Where a slice of an input begins, as a run-time dim on a GPU: steps of an unrolled loop are one kernel then.

        Not so for slices of rows, whose alignment should be known, and of more than one dim.
        """
        cut = [d for d, first in enumerate(node.attrs["starts"]) if first != 0]
        if self.target.is_host or len(cut) != 1 or cut[0] == node.rank - 1 or node.inputs[0] in self.schedule.members:
            return 0
        first = node.attrs["starts"][cut[0]]
        if not isinstance(first, int):
            return 0
        name = f"start{list(self.starts).index(node) if node in self.starts else len(self.starts)}"
        return self.starts.setdefault(node, D.symbol(name, first, first))

    def fresh(self, prefix: str) -> str:
        """A new variable name."""
        self.count += 1
        return f"{prefix}{self.count}"

    def input_name(self, node: Node) -> str:
        """The pointer of a group input."""
        return self.inputs.setdefault(node, f"x{len(self.inputs)}")

    def first_of(self, nodes: Sequence[Node]) -> int | None:
        """The first of the buffers of some inputs when these are neighbours in this order; they are made so if new."""
        if self.target.is_host or any(n in self.schedule.members for n in nodes) or len(set(nodes)) < len(nodes):
            return None
        if not any(n in self.inputs for n in nodes):
            for n in nodes:
                self.input_name(n)
        known = list(self.inputs)
        first = known.index(nodes[0]) if nodes[0] in self.inputs else len(known)
        return first if known[first:first + len(nodes)] == list(nodes) else None

    def table(self, c: str, values: str) -> str:
        """A constant array declared at the top of the kernel."""
        return self.tables.setdefault((c, values), f"t{len(self.tables)}")

    # --- text ---------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        """The kernel: its text and how it is called."""
        first: Dim = 0
        for alike in self._members():
            self.scopes.stack[0].lines += alike.lines(first, self.factor, self.table, self._input_type)
            first = first + alike.blocks
        text = self._text()
        name = "ts_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        args = (*self.inputs, *self.outputs)
        shared = D.dmax(*(p.shared_bytes for p in self.schedule.parts)) + self.scratch_bytes
        cost = D.dmax(*(p.cost for p in self.schedule.parts))
        origin = self.schedule.origin
        return Kernel(name, text.replace(_PLACEHOLDER, name), tuple(origin.get(a, a) for a in args), (),
                      tuple(self._value(s) for s in self.dims.values()), self.schedule.blocks,
                      shared, cost, self.target.threads, self.exact, self._limits())

    def _members(self) -> list[Members]:
        """The texts of all parts; on a GPU, those that are alike together."""
        texts = [self._part(part) for part in self.schedule.parts]
        return [Members([t]) for t in texts] if self.target.is_host else members(texts, self._input_type)

    def _input_type(self, name: str) -> str:
        """The storage type of an input, by its pointer's name."""
        return storage_type(list(self.inputs)[int(name[1:])].dtype)

    def _value(self, s: Symbol) -> Dim:
        """What is passed for a run-time dim."""
        return s.lo or 0 if any(s in D.symbols(d) for d in self.starts.values()) else D.symbol(s.name, s.lo, s.hi)

    def _text(self) -> str:
        bits = 32 if self._small() else 64
        names = [*self.inputs.values(), *self.outputs.values()]
        lines = [self._header(len(names)), f"  TS_ENTER({bits})"]
        used = set(_INPUT.findall("\n".join(self.scopes.stack[0].lines)))
        for k, (node, name) in enumerate(zip((*self.inputs, *self.outputs), names, strict=True)):
            if name.startswith("x") and name not in used:
                continue  # found in a table
            macro = "TS_IN" if name.startswith("x") else "TS_OUT"
            lines.append(f"  {macro}({storage_type(node.dtype)}, {name}, {k})")
        lines += [f"  TS_DIM(n{k}, {k})" for k in range(len(self.dims))]
        lines += [f"  {'' if 'n' in v else 'static '}const {c} {name}[] = {{{v}}};" if not c.startswith("bool") else
                  f"  const {c} {name}[] = {{{v}}};" for (c, v), name in self.tables.items()]
        lines += ["  " + x for x in self.scopes.stack[0].lines]
        return "\n".join([*lines, "}", ""])

    def _header(self, buffers: int) -> str:
        """The macro that begins the kernel."""
        args = f"{_PLACEHOLDER}, {buffers}, {len(self.dims)}"
        if not have_products(self.schedule.members, self.target):
            return f"TS_KERNEL_WIDE({args}, 3) {{" if self._holds_much() else f"TS_KERNEL({args}) {{"
        return f"TS_KERNEL_WIDE({args}, {1 if guess(self.schedule.blocks) <= self.target.cores else 2}) {{"

    def _holds_much(self) -> bool:
        """True where threads hold long rows, of which several stages make others, and need registers for both."""
        return any(c.short and len(c.held) > 2 and D.static(c.stages[0].shape[-1]) > USUAL // 2 * c.lanes
                   for p in self.schedule.parts for c in p.chains)

    def _sizes(self) -> list[Dim]:
        """How many elements there are to count, of every tensor and every fold's domain."""
        nodes = {*self.inputs, *self.outputs, *self.schedule.members}
        folded = [s.shape for p in self.schedule.parts for s in p.stages if s.kind != "order"]  # no pairs are numbered
        return [n.size for n in nodes] + [D.product(s) for s in folded]

    def _small(self) -> bool:
        """True when 32-bit indices are enough: for every known size, and on a GPU assumed of the others."""
        unknown_too = not self.target.is_host
        return all(s <= INDEX_LIMIT if isinstance(s, int) else unknown_too for s in self._sizes())

    def _limits(self) -> tuple[Dim, ...]:
        """The unknown sizes that 32-bit indices assume to be small."""
        if self.target.is_host or not self._small():
            return ()
        unknown = {s for s in self._sizes() if not isinstance(s, int) and not D.prove_le(s, INDEX_LIMIT)}
        return tuple(sorted(unknown, key=D.to_text))

    def _part(self, part: Part) -> PartText:
        """The text of a part; its variables are its own."""
        self.count, lines, count = 0, self.scopes.stack[0].lines, self.factor(part.blocks)
        with self.scopes.block(f"TS_PART({FIRST}, {count})"):
            for s in part.stages:
                if s.hoisted:
                    StageEmitter(self, part, s).emit()
            with self.scopes.block(f"TS_BLOCKS(b, {FIRST}, {count})"):
                self._place(part)
                self._stages(part)
        self.scopes.stack[0].lines = []
        return PartText(lines, part.blocks)

    def _stages(self, part: Part) -> None:
        """The stages of a block, chains of them in one loop."""
        chains = {id(c.stages[0]): c for c in part.chains}
        inside = {id(s) for c in part.chains for s in c.stages}
        for s in part.stages:
            if id(s) in chains:
                ChainEmitter(self, part, chains[id(s)]).emit()
            elif not s.hoisted and id(s) not in inside:
                StageEmitter(self, part, s).emit()

    def _place(self, part: Part) -> None:
        """The block's index along every axis, and its extents."""
        rest: Dim = 1
        for k, axis in reversed(list(enumerate(part.axes))):
            index = "b" if isinstance(rest, int) and rest == 1 else f"b / {self.factor(rest)}"
            if k:
                index = f"({index}) % {self.factor(axis.count)}" if "/" in index else f"b % {self.factor(axis.count)}"
            self.scopes.line(f"const ts_idx b{axis.number} = {index};")
            rest = rest * axis.count
        for axis in part.axes:
            if axis.ragged:
                left = self.dim(axis.size - axis.offset)
                self.scopes.line(f"const ts_idx e{axis.number} = ts_imin({axis.chunk}, {left});")


class StageEmitter:
    """Emits one stage; the view of the kernel that :mod:`values` works on."""

    def __init__(self, kernel: KernelEmitter, part: Part, stage: Stage):
        self.kernel, self.part, self.stage = kernel, part, stage
        self.scopes = kernel.scopes
        self.pointers: dict[Node, str] = {}
        self.repeated: tuple[Expr, int] | None = None  # the lanes of a run of short rows, and how many
        self.tables_of_runs: dict[tuple[Node, Index], str] = {}
        self.runs: Runs | None = None
        self.divisors: dict[str, str] = {}  # of a variable that divides: what is prepared for it
        self.floor = 0  # depth of the stage's own scope
        self.nesting = 0  # of values that are being computed

    dim = property(lambda self: self.kernel.dim)
    factor = property(lambda self: self.kernel.factor)
    fresh = property(lambda self: self.kernel.fresh)
    table = property(lambda self: self.kernel.table)

    def may_fail(self) -> None:
        """Notes that the kernel may set the status."""
        self.kernel.exact = False

    def in_memory(self, node: Node) -> bool:
        """True when a node's value is read from a buffer or from shared memory."""
        if node.op in INLINE_SOURCES:
            return False
        return node not in self.kernel.schedule.members or node in self.part.kept

    def index_variable(self, text: str, size: Dim) -> Dim:
        """Declares an index variable in [0, size) in the innermost scope and returns it as a dim."""
        name = self.fresh("k")
        self.scopes.line(f"const ts_idx {name} = {text};")
        self.scopes.top.symbols.add(f"ts_{name}")
        return D.symbol(f"ts_{name}", 0, size - 1)

    def shared_pointer(self, node: Node) -> str:
        """The pointer to a staged value."""
        name = self.pointers.get(node)
        if name is None:
            name = self.pointers[node] = f"s{list(self.part.slots).index(node)}"
        return name

    def buffer_pointer(self, node: Node) -> str:
        """The pointer to a value in memory."""
        return self.kernel.outputs.get(node) or self.kernel.input_name(node)

    def position(self, node: Node, index: Index) -> Dim:
        """Where an element lies in its buffer or in its part of shared memory: elements from the start."""
        if node not in self.part.slots:
            return rules.linear(index, node.shape)
        slot = self.part.slots[node]
        return rules.linear(tuple(i - off for i, (off, _) in zip(index, slot.box, strict=True)), slot.room)

    def pointer(self, node: Node, shared: bool) -> str:
        """The pointer to where a value is kept."""
        return self.shared_pointer(node) if shared else self.buffer_pointer(node)

    def place(self, node: Node, index: Index, shared: bool) -> str:
        """The lvalue of an element."""
        at = self.position(node, index) if shared else rules.linear(index, node.shape)
        return f"{self.pointer(node, shared)}[{self.dim(at)}]"

    def address(self, node: Node, index: Index) -> str:
        """The address of an element that is read."""
        return f"{self.pointer(node, node in self.part.slots)} + ({self.dim(self.position(node, index))})"

    def load(self, node: Node, index: Index) -> str:
        """An expression that reads an element, in the compute type."""
        shared = node in self.part.slots
        run = self._repeated(node, index)
        if run:
            return run
        text = self.place(node, index, shared) if shared else self.stored(node, index)
        return text if shared or storage_type(node.dtype) == compute_type(node.dtype) else f"ts_load({text})"

    def stored(self, node: Node, index: Index) -> str:
        """An expression that reads an element of a value in the kernel's memory, in the storage type."""
        return (self.runs.load(node, index) if self.runs else None) or self.place(node, index, shared=False)

    def _repeated(self, node: Node, index: Index) -> str:
        """An element of a table of what ``node`` is at every place of a run, when only that place matters."""
        if self.repeated is None:
            return ""
        run, length = self.repeated
        if symbol_names(index) != symbol_names((run,)) or run in index:
            return ""
        (name,) = symbol_names((run,))
        table = self.tables_of_runs.get((node, index))
        if table is None:
            table = self.tables_of_runs[(node, index)] = self.fresh("p")
            repeated, self.repeated = self.repeated, None
            with self.scopes.at(self.floor):
                self.scopes.line(f"{compute_type(node.dtype)} {table}[{length}];")
                with self.scopes.block(f"TS_SERIAL({name[3:]}, 0, {length})", (name,)):
                    self.scopes.line(f"{table}[{name[3:]}] = {self.load(node, index)};")
            self.repeated = repeated
        return f"{table}[{name[3:]}]"

    def store(self, node: Node, space: str, index: Index, value: str) -> str:
        """A statement that writes an element."""
        shared = space == "shared"
        text = self.runs.place(node, index) if self.runs and not shared else None
        text = text or self.place(node, index, shared)
        if shared and node.op in HEAVY:
            value = rounded(value, node.dtype)  # as it would be in memory
        same = shared or storage_type(node.dtype) == compute_type(node.dtype)
        return f"{text} = {value};" if same else f"{text} = ts_store<{storage_type(node.dtype)}>({value});"

    def emit(self) -> None:
        """Adds the stage's text to the innermost scope."""
        s = self.stage
        what = ", ".join(dict.fromkeys(f"{i.node.op}{'' if i.space == 'shared' else ' out'}" for i in s.items))
        self.scopes.line(f"// {what}")
        once = " && ".join(f"b{k} == 0" for k in s.once)
        with self.scopes.block(f"if ({once})" if once else "", conditional=True) as scope:
            self.floor = len(self.scopes.stack) - 1
            Loops(self).emit()
            scope.lines[:0] = self._pointers()
        self.scopes.line("TS_BARRIER")

    def _pointers(self) -> list[str]:
        """Declares the staged values that were used."""
        return [f"TS_SHARED({compute_type(n.dtype)}, {name}, {self.dim(self.part.slots[n].offset)})"
                for n, name in self.pointers.items()]


class ChainEmitter(StageEmitter):
    """Emits a row chain."""

    def __init__(self, kernel: KernelEmitter, part: Part, chain: RowChain):
        super().__init__(kernel, part, chain.stages[0])
        self.chain = chain

    def emit(self) -> None:
        """Adds the chain's text to the innermost scope."""
        with self.scopes.block("", conditional=True) as scope:
            self.floor = len(self.scopes.stack) - 1
            Rows(self, self.chain).emit()
            scope.lines[:0] = self._pointers()
        if self.pointers or self.chain.stages[-1] is not self.part.stages[-1]:
            self.scopes.line("TS_BARRIER")


def emit(schedule: KernelSchedule) -> Kernel:
    """The kernel of a schedule.  Raises Unschedulable when a node cannot be expressed."""
    return KernelEmitter(schedule).kernel()


