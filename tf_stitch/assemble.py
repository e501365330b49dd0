"""From a plan to a program: its kernels' texts, and which buffers they and the library's calls read and write."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import codegen, packs
from .codegen.grid import GridKernel
from .codegen.kernel import INDEX_LIMIT, Kernel
from .codegen.siblings import share_texts
from .codegen.unit import SEPARATOR
from .fusion.call import LibraryCall
from .fusion.planner import Planned
from .ir import dims as D
from .ir.dims import Dim
from .ir.graph import Graph, Guard, Node, view_source
from .program.program import AliasStep, Buffer, KernelStep, LibraryStep, Program, Step
from .schedule.target import Target


def join_texts(kernels: Iterable[Kernel | GridKernel]) -> str:
    """One text with every kernel once."""
    return SEPARATOR.join({k.name: k.text for k in kernels}.values())


def make_kernels(planned: Iterable[Planned], target: Target) -> list[Kernel | LibraryCall]:
    """The kernels and library calls of a plan, in the order they run."""
    work = [p.scheduled if isinstance(p.scheduled, LibraryCall) else codegen.emit(p.scheduled) for p in planned]
    if target.is_host:
        return work
    shared = iter(share_texts([w for w in work if isinstance(w, Kernel)]))
    return [next(shared) if isinstance(w, Kernel) else w for w in work]


def assemble(graph: Graph, planned: Iterable[Planned], target: Target) -> tuple[Program, list[Kernel | GridKernel]]:
    """The program of a plan, and its kernels: those of its steps as they come, then those of its packs."""
    planned = list(planned)
    packing = packs.pack(graph, planned, make_kernels(planned, target), target)
    program, grids = packs.with_grids(_Assembler(graph).program(packing.work), packing.sizes)
    return program, [*(k for k in packing.work if isinstance(k, Kernel)), *grids]


def _largest(sizes: Iterable[Dim]) -> list[Dim]:
    """Those of ``sizes`` that may exceed what 32-bit indices reach, without those that another one is never below."""
    kept: list[Dim] = []
    for d in dict.fromkeys(sizes):
        if not any(D.prove_le(d, e) for e in (INDEX_LIMIT, *kept)):
            kept = [*(e for e in kept if not D.prove_le(e, d)), d]
    return kept


class _Assembler:
    """Lays kernels over buffers: which tensor is an input, an output or a temporary of the program."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        self.inputs = [self._buffer("input", i, p.dtype, p.shape) for i, p in enumerate(graph.params)]
        self.outputs = [self._buffer("output", i, o.dtype, o.shape) for i, o in enumerate(graph.outputs)]
        self.temps = 0
        self.place = dict(zip(graph.params, self.inputs, strict=True))  # where a value lies; views are looked through
        for buffer, o in zip(self.outputs, graph.outputs, strict=True):
            self.place.setdefault(view_source(o), buffer)  # a reshaped result is written where it is wanted

    def _buffer(self, kind: str, index: int, dtype: str, shape: Sequence[Dim]) -> int:
        self.buffers.append(Buffer(kind, index, dtype, tuple(shape)))
        return len(self.buffers) - 1

    def _temp(self, dtype: str, shape: Sequence[Dim]) -> int:
        self.temps += 1
        return self._buffer("temp", self.temps - 1, dtype, shape)

    def _place_of(self, node: Node) -> int:
        """The buffer of a value, made when it is a value between kernels."""
        source = view_source(node)
        if source not in self.place:
            self.place[source] = self._temp(source.dtype, source.shape)
        return self.place[source]

    def _add_kernel(self, kernel: Kernel) -> None:
        args = [self._place_of(n) for n in kernel.args] + [self._temp(t, (count,)) for t, count in kernel.temps]
        origin = kernel.args[-1].origin if kernel.args else ""
        self.steps.append(KernelStep(kernel.name, tuple(args), kernel.dims, kernel.blocks, kernel.shared_bytes,
                                     kernel.cost, kernel.threads, origin))

    def _add_call(self, call: LibraryCall) -> None:
        args = tuple(self._place_of(n) for n in call.args)
        self.steps.append(LibraryStep(call.call, args, tuple(call.dims), call.flags, call.origin))

    def _add_aliases(self) -> None:
        """Outputs that are an input, another output, or either under another shape."""
        for buffer, o in zip(self.outputs, self.graph.outputs, strict=True):
            source = self.place[view_source(o)]
            if source != buffer:
                self.steps.append(AliasStep(source, buffer, o.origin))

    def program(self, work: Sequence[Kernel | LibraryCall]) -> Program:
        """The program that does ``work``, in its order."""
        for w in work:
            if isinstance(w, Kernel):
                self._add_kernel(w)
            else:
                self._add_call(w)
        self._add_aliases()
        kernels = [w for w in work if isinstance(w, Kernel)]
        guards = [*self.graph.guards, *(Guard("le", d, INDEX_LIMIT, "32-bit indices reach every element")
                                        for d in _largest(d for k in kernels for d in k.limits))]
        return Program(self.buffers, self.steps, dict(self.graph.symbols), guards, join_texts(kernels),
                       name=self.graph.name)
