"""What a schedule must know of the machine that a kernel is for."""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..options import Options


@dataclass(frozen=True)
class Target:
    """The limits and habits of one kind of device.

    Attributes:
      name: "host" or "cuda"; picks the header that gives the kernel text its meaning.
      shared_bytes: on-chip bytes that one block may use.
      vector_bytes: bytes of the widest vector register (host) or of one thread's access (cuda).
      threads: threads per block (1 on the host: a block is one task).
      lanes: threads of a block that reduce together with shuffles (the warp).
      min_blocks: blocks that keep the device busy; a schedule with fewer splits further when it can.
      block_work: elements of work that one block should have when there are many blocks.
      cores: cores or multiprocessors that the cost model counts on.
      superkernels: kernels also in a form that takes many requests' problems, library products without an epilogue.
      grids: runs of small kernels as one cooperative kernel each.
      row_registers: 32-bit registers of a thread that may hold elements of a row from stage to stage (0: on-chip memory
        holds them, as on a host, where it is the cache).
    """

    name: str
    shared_bytes: int
    vector_bytes: int
    threads: int
    lanes: int
    min_blocks: int
    block_work: int
    cores: int
    superkernels: bool = False
    grids: bool = False
    row_registers: int = 0

    @property
    def is_host(self) -> bool:
        return self.name == "host"

    @property
    def packs(self) -> bool:
        """True where independent kernels share a launch; superkernels pack those of requests instead."""
        return self.name == "cuda" and not self.superkernels and not self.grids

    @property
    def has_threads(self) -> bool:
        """True when a block's work is shared out to threads; tests give such text the host's meaning."""
        return self.threads > 1

    def with_shared(self, shared_bytes: int) -> Target:
        """The same target with another on-chip budget."""
        return replace(self, shared_bytes=shared_bytes)


HOST = Target("host", shared_bytes=256 * 1024, vector_bytes=64, threads=1, lanes=1, min_blocks=32,
              block_work=8192, cores=16)
CUDA = Target("cuda", shared_bytes=36 * 1024, vector_bytes=16, threads=256, lanes=32, min_blocks=264,
              block_work=8192, cores=132, row_registers=64)


def of_options(options: Options) -> Target:
    """The target that options name ("auto" is the host here; the ways in resolve it before)."""
    gpu = replace(CUDA, superkernels=options.superkernels, grids=options.grids)
    target = gpu if options.target.startswith("cuda") else HOST
    return target.with_shared(options.shared_bytes) if options.shared_bytes else target
