"""One generated kernel: its text and how a program calls it."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.dims import Dim
from ..ir.graph import Node

# Begins a text whose kernels also have a form that takes many problems (codegen/include/ts_cuda.h).
WITH_MANY = "#undef TS_MANY_\n#define TS_MANY_(name) TS_MANY_FORM_(name)\n"
WITH_COPIES = "TS_COPY_PIECES\n"  # what joins requests on a GPU (codegen/include/ts_join.h)
INDEX_LIMIT = (1 << 31) - (1 << 20)  # elements that 32-bit indices reach, rounding up to whole blocks included


@dataclass(frozen=True)
class Kernel:
    """A kernel in the text that both targets share (codegen/include gives it meaning).

    Attributes:
      name: C symbol; derived from a hash of the text, so equal kernels of a program or model are one.
      text: the kernel's definition, without includes.
      args: buffers in the kernel's order: the group's inputs it reads, then its outputs, then temps.
      temps: (dtype, element count) of scratch buffers in global memory that the kernel needs.
      dims: run-time integer parameters, in the kernel's order.
      blocks: number of blocks to run (0 when the outputs are empty).
      shared_bytes: on-chip scratch of one block, in bytes.
      cost: estimated cycles of one block on one host core (for the intra-op pool's split).
      threads: threads per block on a GPU.
      limits: unknown sizes that must be at most INDEX_LIMIT: the kernel counts in 32 bits.
      exact: False when the kernel may set the status word (out-of-range index, zero divisor).
    """

    name: str
    text: str
    args: tuple[Node, ...]
    temps: tuple[tuple[str, Dim], ...]
    dims: tuple[Dim, ...]
    blocks: Dim
    shared_bytes: Dim
    cost: Dim
    threads: int = 256
    exact: bool = True
    limits: tuple[Dim, ...] = ()
