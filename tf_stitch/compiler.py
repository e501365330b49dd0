"""From an IR graph to a program: plan, schedule, emit and compile, in this order.

    ir.Graph -> fusion.plan -> schedule.build -> codegen.emit -> grids -> Program text -> backend -> machine code
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from . import grids, plans, range_plans
from .assemble import assemble, join_texts
from .codegen.grid import GridKernel
from .codegen.kernel import WITH_COPIES, WITH_MANY, Kernel
from .codegen.unit import SEPARATOR
from .fusion import variants
from .ir.graph import Graph
from .ir.separable import find_batch
from .options import Options
from .program.program import Program
from .range_plans import Begin
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
    """Machine code by text and level.  Compilers run outside of Python, so threads are enough to run many."""
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


def check_target(options: Options) -> None:
    """Raises where the target that ``options`` names is a GPU that no code can be built for on this machine.

    OptionError when the compiler does not know it, CompileError when there is no compiler.
    """
    from .backend import cuda

    if options.on_gpu:
        cuda.check_target(options.target)


def build_program(graph: Graph, target: Target, begin: Begin | None = None) -> Program:
    """A program without machine code: its text is what both targets' compilers read.

    It comes from the caches where one of them holds it.  ``begin`` as in lay_out.
    """
    return plans.remembered(graph, target, lambda bare: lay_out(bare, target, begin)[0])


def prepare(unknown_sizes: bool = True) -> None:
    """Begins what takes a while and graphs for a GPU need: to find compilers, to start a process for plans."""
    from .backend import cuda

    cuda.prepare()
    if unknown_sizes:
        range_plans.prepare()


def beginner(options: Options) -> Begin | None:
    """What begins to compile kernels while others are planned, None where there is nothing of the kind."""
    from .backend import cuda

    return functools.partial(cuda.begin_text, targets=cuda.targets_of(options.target)) if options.on_gpu else None


def lay_out(graph: Graph, target: Target, begin: Begin | None = None) -> tuple[Program, list[Kernel | GridKernel]]:
    """A program without machine code, and its kernels: those of its steps as they come, then those of its grids.

    ``begin`` is told of kernels that will be part of the program as soon as they are known.
    """
    many = WITH_MANY if target.superkernels else ""
    found = variants.ranges(graph, target)
    if found:
        program, kernels = range_plans.lay_out(graph, target, found, lambda text: begin(many + text) if begin else None)
    else:
        plan = variants.draft_graph(graph, target)
        planned = plan.finish()
        program, kernels = assemble(plan.planner.graph, planned, target)
    program = replace(program, batch=find_batch(graph))
    grid_kernels: list[GridKernel] = []
    if target.superkernels and program.text:
        copies = SEPARATOR + WITH_COPIES if program.batch and not target.is_host else ""
        program = replace(program, text=many + program.text + copies)
    elif target.grids:  # what superkernels pack are single steps
        small = grids.small_steps(plan.planner.graph, planned, target)
        program, grid_kernels, keeping = grids.join_steps(program, small)
        kernels = [replace(k, name=keeping[k.name].name, text=keeping[k.name].text) if k.name in keeping else k
                   for k in kernels]
    return program, [*kernels, *grid_kernels]
