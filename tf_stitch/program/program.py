"""A program: everything that the StitchedProgram op needs to run a cluster, as plain data.

Built by :mod:`tf_stitch.compiler`, written by :mod:`tf_stitch.program.serialize`, read by
``custom_ops/program.cc``.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.graph import Guard, SymbolSource
from ..ir.separable import Batch


@dataclass(frozen=True)
class Buffer:
    """A tensor of the program.  ``kind``: "input", "output" or "temp"; ``index``: position among its kind."""

    kind: str
    index: int
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class KernelStep:
    """A launch of a generated kernel.  ``buffers`` index Program.buffers; see codegen.kernel.Kernel."""

    kernel: str
    buffers: tuple[int, ...]
    dims: tuple[Dim, ...]
    blocks: Dim
    shared_bytes: Dim
    cost: Dim
    threads: int = 256
    origin: str = ""


# Dims of a library step without which it computes nothing and all of its operands are empty.
RESULT_DIMS = {"matmul": (1, 2), "conv": (0, 2), "conv_filter": (1, 2)}


@dataclass(frozen=True)
class LibraryStep:
    """A call of a library on dense row-major tensors, whose element type is the buffers'.

    ``call`` "matmul": ``buffers`` are (lhs, rhs, [bias,] out), ``dims`` (batch, m, n, k) and ``flags`` (trans_lhs,
    trans_rhs, broadcast_lhs, broadcast_rhs, has_bias), each 0 or 1: out[b] = op(lhs[b]) @ op(rhs[b]) (+ bias along n).
    An operand that is broadcast is one matrix for the whole batch.

    ``call`` "conv": ``buffers`` are (x, w, [bias,] [residual,] out), ``dims`` (batch, channels, out channels, *image,
    *places, *window) and ``flags`` (has_bias, has_residual, relu, groups, *strides, *zeros below, *zeros above,
    *dilations) for 2 or 3 spatial dims: out = conv(x, w) (+ residual) (+ bias) (then ReLU), where x is [batch, *image,
    channels], w [out channels, *window, channels / groups] and out [batch, *places, out channels].

    ``call`` "conv_filter": ``buffers`` are (x, g, dw), ``dims`` and ``flags`` as "conv" has them, the first three flags
    0: dw is the gradient of "conv" by w, where g is that by out; they lie as w and out do.
    """

    call: str
    buffers: tuple[int, ...]
    dims: tuple[Dim, ...]
    flags: tuple[int, ...]
    origin: str = ""


@dataclass(frozen=True)
class AliasStep:
    """Output ``output`` is buffer ``source`` under another shape: no work, the memory is shared."""

    source: int
    output: int
    origin: str = ""


Step = KernelStep | LibraryStep | AliasStep


@dataclass(frozen=True)
class Grid:
    """Kernel steps that one launch runs in phases, with a device-wide barrier between phases; one phase is a pack.

    The steps are Program.steps[first:], ``phases[p]`` of them in phase p; steps of a phase do not depend on each
    other.  Where the launch cannot be made, they run one by one, in order.

    Attributes:
      kernel: the grid kernel (codegen.grid.GridKernel).
      bodies: the kernels that it holds, by number.
      keeps: for each body, how many bytes of operands a block can keep on the chip for the next phase, and the
        positions of the buffers that they are read from.
      bases: inputs and outputs (by buffer) in whose memory the steps' buffers lie; all others lie in the arena.
    """

    kernel: str
    bodies: tuple[str, ...]
    bases: tuple[int, ...]
    first: int
    phases: tuple[int, ...]
    keeps: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def is_pack(self) -> bool:
        """True for steps of a single phase: no barrier, an ordinary launch with all their blocks.

        The kernel's name says that it is made for that.
        """
        return len(self.phases) == 1 and self.kernel.startswith("ts_pack_")

    @property
    def end(self) -> int:
        """The step behind its last one."""
        return self.first + sum(self.phases)


@dataclass
class Program:
    """Steps in order, over buffers, with the symbols and guards they rely on.

    ``code`` maps a target ("x86-64-v3", "sm_90", ...) to machine code that holds every kernel;
    ``text`` is the source of all kernels (kept for aarch64, other chips and for reading).
    ``grids`` are runs of steps, in order, that a GPU may launch at once.
    ``batch`` is the unknown size along which requests may be joined; None where none is proven to be one.
    """

    buffers: list[Buffer]
    steps: list[Step]
    symbols: dict[str, SymbolSource]
    guards: list[Guard]
    text: str = ""
    code: dict[str, bytes] = field(default_factory=dict)
    name: str = ""
    grids: list[Grid] = field(default_factory=list)
    batch: Batch | None = None

    def of_kind(self, kind: str) -> list[Buffer]:
        """The buffers of one kind, by index."""
        return sorted((b for b in self.buffers if b.kind == kind), key=lambda b: b.index)

    def launched(self, size: int = 128) -> list[str]:
        """For each kernel that a run launches, the node that its last result comes from; a grid says what it covers.

        Which ones those are may depend on unknown sizes: they are all taken to be ``size``.
        """
        grids = {g.first: g for g in self.grids}
        inside = {i for g in self.grids for i in range(g.first, g.end)}
        sizes = dict.fromkeys(self.symbols, size)
        found = []
        for i, s in enumerate(self.steps):
            if not isinstance(s, KernelStep) or (i in inside and i not in grids) or not D.evaluate(s.blocks, sizes):
                continue
            if i in grids:
                steps = [x for x in self.steps[i:grids[i].end] if isinstance(x, KernelStep)]
                origins = dict.fromkeys(x.origin or x.kernel for x in steps)
                what = f"{len(steps)} kernels" if grids[i].is_pack else f"{len(grids[i].phases)} phases"
                found.append(f"{steps[-1].origin or steps[-1].kernel} ({what}: {', '.join(origins)})")
            else:
                found.append(s.origin or s.kernel)
        return found

    def holders(self) -> dict[int, int]:
        """For each buffer that does not lie in the arena, the input or output (by buffer) whose memory it is.

        As custom_ops/program.cc has it: a temp that an output is an alias of lives in that output's memory.
        """
        holder = {i: i for i, b in enumerate(self.buffers) if b.kind != "temp"}
        for s in self.steps:
            if isinstance(s, AliasStep):
                if s.source in holder:
                    holder[s.output] = holder[s.source]
                else:
                    holder[s.source] = holder[s.output]
        return holder
