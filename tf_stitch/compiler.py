"""From an IR graph to a program: plan, schedule, emit and compile, in this order.

    ir.Graph -> fusion.plan -> schedule.build -> codegen.emit -> grids -> Program text -> backend -> machine code
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from . import codegen, grids, plans
from .codegen.grid import GridKernel
from .codegen.kernel import INDEX_LIMIT, WITH_COPIES, WITH_MANY, Kernel
from .codegen.siblings import share_texts
from .codegen.unit import SEPARATOR
from .fusion.call import LibraryCall
from .fusion.planner import Planned
from .fusion.variants import active_dims, plan_variants
from .ir import dims as D
from .ir.dims import Dim
from .ir.graph import Graph, Guard, Node, view_source
from .ir.separable import find_batch
from .options import Options
from .program.program import RESULT_DIMS, AliasStep, Buffer, KernelStep, LibraryStep, Program, Step
from .schedule.target import Target, of_options

Progress = Callable[[int, int, str], None]  # (steps done, steps in all, what was just done)


def compile_graph(graph: Graph, options: Options, target: Target | None = None,
                  progress: Progress | None = None) -> Program:
    """The program of a graph, with machine code for every level that ``options`` names.

    Raises Unschedulable when a node has no schedule and CompileError when the compiler is missing or fails.
    """
    return compile_many([graph], options, target, progress)[0]


def compile_many(graphs: Sequence[Graph], options: Options, target: Target | None = None,
                 progress: Progress | None = None, workers: int = 0) -> list[Program]:
    """Programs of several graphs; the compilers run side by side, and equal texts are compiled once.

    ``workers`` is how many compilers run at a time (0: one per usable core).  Errors as compile_graph's.
    """
    tell = progress or (lambda done, total, what: None)
    programs = []
    for i, g in enumerate(graphs):
        programs.append(build_program(g, target or of_options(options)))
        tell(i + 1, len(graphs), f"planned {g.name or i}")
    code = compile_texts([p.text for p in programs], options, tell, workers)
    return [replace(p, code=code[p.text]) for p in programs]


def compile_together(graphs: Sequence[Graph], options: Options, target: Target | None = None) -> list[Program]:
    """As compile_many, but all kernels go into one text and the programs share its code.

    One run of the compiler serves many small graphs; right where the code stays in this process (tests).
    """
    target = target or of_options(options)
    laid = [lay_out(g, target) for g in graphs]
    text = join_texts([k for _, kernels in laid for k in kernels])
    code = compile_texts([text], options, lambda done, total, what: None)[text]
    return [replace(p, code=code) for p, _ in laid]


def compile_texts(texts: Sequence[str], options: Options, tell: Progress,
                  workers: int = 0) -> dict[str, dict[str, bytes]]:
    """Machine code by text and level.  Each compiler is a process, so threads are enough to run many."""
    from .backend import cuda, host

    on_gpu = options.target.startswith("cuda")
    levels = cuda.targets_of(options.target) if on_gpu else options.levels or host.native_levels()
    compile_text = cuda.compile_text if on_gpu else host.compile_text
    # a cubin is made from PTX: one job makes both
    jobs = [(t, some) for t in dict.fromkeys(texts) if t for some in ([levels] if on_gpu else [(x,) for x in levels])]
    out: dict[str, dict[str, bytes]] = {t: {} for t in texts}
    with ThreadPoolExecutor(workers or host.usable_cores()) as pool:
        codes = pool.map(lambda job: compile_text(*job), jobs)
        for i, ((text, some), code) in enumerate(zip(jobs, codes, strict=True)):
            out[text].update(code)
            tell(i + 1, len(jobs), f"compiled for {' and '.join(some)}")
    return out


def build_program(graph: Graph, target: Target) -> Program:
    """A program without machine code: its text is what both targets' compilers read.

    It comes from the cache on disk where that holds it.
    """
    return plans.remembered(graph, target, lambda: lay_out(graph, target)[0])


def lay_out(graph: Graph, target: Target) -> tuple[Program, list[Kernel | GridKernel]]:
    """A program without machine code, and its kernels: those of its steps as they come, then those of its grids."""
    variants = plan_variants(graph, target)
    assembler = _Assembler(graph, variants.size)
    kernels: list[Kernel] = []
    for variant, active in zip(variants.plans, active_dims(variants), strict=True):
        work = make_kernels(variant.planned, target)
        assembler.add(variant.graph, work, active)
        kernels += [k for k in work if isinstance(k, Kernel)]
    program = replace(assembler.program(kernels), batch=find_batch(graph))
    grid_kernels: list[GridKernel] = []
    if target.superkernels and program.text:
        copies = SEPARATOR + WITH_COPIES if program.batch and not target.is_host else ""
        program = replace(program, text=WITH_MANY + program.text + copies)
    elif target.grids:  # what superkernels pack are single steps
        (plan,) = variants.plans
        small = grids.small_steps(plan.graph, plan.planned, target)
        program, grid_kernels, keeping = grids.join_steps(program, small)
        kernels = [replace(k, name=keeping[k.name].name, text=keeping[k.name].text) if k.name in keeping else k
                   for k in kernels]
    return program, [*kernels, *grid_kernels]


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


def _largest(sizes: Iterable[Dim]) -> list[Dim]:
    """Those of ``sizes`` that may exceed what 32-bit indices reach, without those that another one is never below."""
    kept: list[Dim] = []
    for d in dict.fromkeys(sizes):
        if not any(D.prove_le(d, e) for e in (INDEX_LIMIT, *kept)):
            kept = [*(e for e in kept if not D.prove_le(e, d)), d]
    return kept


class _Assembler:
    """Lays kernels over buffers: which tensor is an input, an output or a temporary of the program.

    Where another variant (see fusion.variants) is to run, steps have no blocks and temporaries no bytes.
    """

    def __init__(self, graph: Graph, size: D.Symbol | None):
        self.graph = graph
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        self.inputs = [self._buffer("input", i, p.dtype, p.shape) for i, p in enumerate(graph.params)]
        self.outputs = [self._buffer("output", i, o.dtype, o.shape) for i, o in enumerate(graph.outputs)]
        self.sources = self.outputs  # where each output lies
        self.temps = 0
        self.limits: dict[Dim, None] = {}
        self.whole = {} if size is None else {size.name: D.symbol(size.name, size.lo, size.hi)}
        self.place: dict[Node, int] = {}  # where a value of the variant at hand lies; views are looked through
        self.active: Dim = 1

    def add(self, variant: Graph, work: Sequence[Kernel | LibraryCall], active: Dim = 1) -> None:
        """Adds the steps of a plan that runs where ``active`` is 1, not 0; its graph computes what the others do."""
        self.active = active
        self.place = dict(zip(variant.params, self.inputs, strict=True))
        for buffer, o in zip(self.outputs, variant.outputs, strict=True):
            self.place.setdefault(view_source(o), buffer)  # a reshaped result is written where it is wanted
        self.sources = [self.place[view_source(o)] for o in variant.outputs]
        for w in work:
            if isinstance(w, Kernel):
                self._add_kernel(w)
            else:
                self._add_call(w)
        largest = _largest(d for w in work if isinstance(w, Kernel) for d in w.limits)
        self.limits.update((self._dim(d) * active, None) for d in largest)

    def _buffer(self, kind: str, index: int, dtype: str, shape: Sequence[Dim]) -> int:
        self.buffers.append(Buffer(kind, index, dtype, tuple(shape)))
        return len(self.buffers) - 1

    def _temp(self, dtype: str, shape: Sequence[Dim]) -> int:
        self.temps += 1
        shape = [self._dim(d) for d in shape]
        return self._buffer("temp", self.temps - 1, dtype, [*(d * self.active for d in shape[:1]), *shape[1:]])

    def _dim(self, d: Dim) -> Dim:
        """A dim of the variant's graph in terms of the program's own unknowns, which may have any size."""
        return D.substitute(d, self.whole)

    def _place_of(self, node: Node) -> int:
        """The buffer of a value, made when it is a value between kernels."""
        source = view_source(node)
        if source not in self.place:
            self.place[source] = self._temp(source.dtype, source.shape)
        return self.place[source]

    def _add_kernel(self, kernel: Kernel) -> None:
        args = [self._place_of(n) for n in kernel.args] + [self._temp(t, (count,)) for t, count in kernel.temps]
        origin = kernel.args[-1].origin if kernel.args else ""
        blocks, shared_bytes, cost = map(self._dim, (kernel.blocks, kernel.shared_bytes, kernel.cost))
        self.steps.append(KernelStep(kernel.name, tuple(args), tuple(map(self._dim, kernel.dims)), blocks * self.active,
                                     shared_bytes, cost, kernel.threads, origin))

    def _add_call(self, call: LibraryCall) -> None:
        args = tuple(self._place_of(n) for n in call.args)
        dims = [self._dim(d) * (self.active if i in RESULT_DIMS[call.call] else 1) for i, d in enumerate(call.dims)]
        self.steps.append(LibraryStep(call.call, args, tuple(dims), call.flags, call.origin))

    def _add_aliases(self) -> None:
        """Outputs that are an input, another output, or either under another shape."""
        for buffer, source, o in zip(self.outputs, self.sources, self.graph.outputs, strict=True):
            if source != buffer:
                self.steps.append(AliasStep(source, buffer, o.origin))

    def program(self, kernels: Iterable[Kernel]) -> Program:
        """The program of all plans that were added."""
        self._add_aliases()
        guards = [*self.graph.guards, *(Guard("le", d, INDEX_LIMIT, "32-bit indices reach every element")
                                        for d in self.limits)]
        return Program(self.buffers, self.steps, dict(self.graph.symbols), guards, join_texts(kernels),
                       name=self.graph.name)
