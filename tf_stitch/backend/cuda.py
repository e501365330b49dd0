"""The CUDA backend: kernel text to PTX with NVRTC or nvcc, PTX to a cubin with nvcc; a runner on PyCUDA.

Compiling needs no GPU and no PyCUDA.  PyCUDA is imported only to load, launch and time kernels without TensorFlow.
Environment: ``TF_STITCH_NVCC`` names the compiler, ``TF_STITCH_NVRTC=0`` leaves all work to its processes; see
:mod:`.cache` for where compiled code is kept.
"""
from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..codegen.unit import translation_unit
from ..errors import CompileError, DeviceError, OptionError
from ..ir import dims as D
from ..ir.dtypes import DTYPES
from ..program.program import AliasStep, Buffer, Grid, KernelStep, LibraryStep, Program
from ..program.table import make_table
from . import images, nvrtc, pieces
from .cache import Cache, first_error, key_of
from .front_end import FrontEnd, Piece
from .host import bind, call_library, usable_cores

CACHES = {"compute": Cache("cuda", ".ptx"), "sm": Cache("cuda", ".cubin")}  # by kind of code
DEFAULT_TARGETS = ("sm_90", "compute_90")

# No contraction into FMAs, as on the host (codegen.unit): each op rounds as TensorFlow's does.  Division and roots
# stay exact (nvcc's default), denormals are kept.
FLAGS = ("-std=c++17", "-fmad=false")
NVCC = "TF_STITCH_NVCC"  # names the compiler
NOTHING_KEPT = (1 << 64) - 1  # ts_grid.kept: -1
NVCC_FLAGS = ("-w",)
# Flags of NVRTC, and the releases that they came with: kernels need no runtime, and are kept by this package.
SINCE = {"--minimal": (12, 4), "-no-cache": (12, 9)}
SPLITS_SINCE = (12, 0)  # the release of the assembler that can work on several cores
_RELEASE = re.compile(r"\bcuda_(\d+)\.(\d+)")
_TARGET = re.compile(r"(sm|compute)_(\d{2,3})")


# --- compiling -------------------------------------------------------------------------------------

def compile_text(text: str, targets: Sequence[str] = DEFAULT_TARGETS) -> dict[str, bytes]:
    """Compiles kernels for each target: "sm_NN" gives machine code (see :mod:`.images`), "compute_NN" PTX that newer
    chips can run.

    ``text`` is the kernels' text without headers.  Code comes from the cache where it holds it.  Raises CompileError
    with the compiler's first error line.
    """
    compiler = find_compiler()
    kinds: dict[str, list[str]] = {}
    for target in dict.fromkeys(targets):
        kind, number = _parse(target)
        kinds.setdefault(number, []).append(kind)
    return {f"{kind}_{number}": code for number, wanted in kinds.items()
            for kind, code in compiler.build(text, wanted, number).items()}


@functools.cache
def prepare() -> None:
    """Begins to look for compilers and to load them, while something else is done."""
    def look() -> None:
        with contextlib.suppress(CompileError):  # comes up again where something is to be compiled
            found = find_compiler()
            if isinstance(found, Library):
                found.library.warm_up()

    threading.Thread(target=look, daemon=True, name="tf_stitch_prepare").start()


def begin_text(text: str, targets: Sequence[str] = DEFAULT_TARGETS) -> None:
    """Begins to compile kernels that will be part of a text which compile_text is given; errors come up there."""
    with contextlib.suppress(CompileError):
        compiler = find_compiler()
        for number in {_parse(target)[1] for target in targets}:
            compiler.front_end(number).begin(text)


def targets_of(target: str) -> tuple[str, ...]:
    """The code targets of an option "cuda:sm_NN": its cubin, and PTX for chips that come later."""
    _, number = _parse(target.removeprefix("cuda:"))
    return f"sm_{number}", f"compute_{number}"


def check_target(target: str) -> None:
    """Raises OptionError unless code can be built for an option "cuda:sm_NN", CompileError without a compiler."""
    compiler = find_compiler()
    chips = compiler.chips()
    if target.removeprefix("cuda:") not in chips:
        raise OptionError(f"Target '{target}' is none that '{compiler.path}' builds code for; it builds for "
                          f"{', '.join(chips)}.")


def _parse(target: str) -> tuple[str, str]:
    match = _TARGET.fullmatch(target)
    if match is None:
        raise CompileError(f"The CUDA backend cannot build code for '{target}'; name a chip as sm_90 or compute_90.")
    return match[1], match[2]


class Compiler:
    """Kernel text to PTX ("compute") and machine code ("sm") for a chip."""

    def __init__(self, path: str, version: str):
        self.path, self.version = path, version

    def chips(self) -> list[str]:
        """The chips that it builds code for, as "sm_90"."""
        raise NotImplementedError

    def front_end(self, number: str) -> FrontEnd:
        """What compiles for a chip."""
        raise NotImplementedError

    def build(self, text: str, kinds: Sequence[str], number: str) -> dict[str, bytes]:
        """Code by kind, from the cache where it holds it.  Raises CompileError."""
        source, name = translation_unit(text, "cuda"), self.front_end(number).name
        keys = {k: key_of([self.version, name, k, source]) for k in CACHES}
        found = {k: code for k in kinds if (code := CACHES[k].get(keys[k])) is not None}
        if len(found) < len(kinds):
            made = self.make(text, kinds, number)
            for kind, code in made.items():
                CACHES[kind].put(keys[kind], code)
            found.update(made)
        return {k: found[k] for k in kinds}

    def make(self, text: str, kinds: Sequence[str], number: str) -> dict[str, bytes]:
        """Code of these kinds, and of others where they come with them.  Raises CompileError."""
        raise NotImplementedError


class Nvcc(Compiler):
    """nvcc of the CUDA toolkit, for lack of an NVRTC: its front end makes PTX, of which its assembler makes a cubin."""

    def __init__(self, path: str):
        super().__init__(path, _nvcc_version(path, os.stat(path).st_mtime_ns))

    def chips(self) -> list[str]:
        return _said(self.path, "--list-gpu-code").split()

    @property
    def release(self) -> tuple[int, int]:
        """As (13, 0)."""
        found = _RELEASE.search(self.version)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def front_end(self, number: str) -> FrontEnd:
        flags = [f"-arch=compute_{number}", "-ptx", *FLAGS, *NVCC_FLAGS]
        return FrontEnd(" ".join([self.path, *flags]), pieces.PIECE,
                        lambda source: Piece(self._run(source.encode(), ".cu", flags)))

    def make(self, text: str, kinds: Sequence[str], number: str) -> dict[str, bytes]:
        front = self.front_end(number)
        made = {"compute": front.join(text, front.compile(text))}
        if "sm" in kinds:
            flags = [f"-arch=sm_{number}", "-cubin"]
            if self.release >= SPLITS_SINCE:
                flags += ["-Xptxas", "--split-compile=0"]  # as many threads as there are cores
            made["sm"] = self._run(made["compute"], ".ptx", flags)
        return made

    def _run(self, source: bytes, suffix: str, flags: Sequence[str]) -> bytes:
        try:
            with _process_slots(), tempfile.TemporaryDirectory(prefix="tf_stitch_") as folder:
                given, made = Path(folder, "kernels" + suffix), Path(folder, "kernels.out")
                given.write_bytes(source)
                done = subprocess.run([self.path, *flags, str(given), "-o", str(made)], capture_output=True,
                                      text=True, check=False, env={**os.environ, "LC_ALL": "C"})
                if done.returncode:
                    raise CompileError(f"nvcc failed to compile a kernel: {first_error(done.stdout + done.stderr)}")
                return made.read_bytes()
        except OSError as error:
            raise CompileError(f"Compiling a kernel failed: {error.strerror} ({error.filename}).") from None


_find_lock = threading.Lock()


@functools.cache
def _process_slots() -> threading.BoundedSemaphore:
    """As many compilers at a time as there are cores, whatever the number of texts and their pieces."""
    return threading.BoundedSemaphore(usable_cores())


def _forked() -> None:
    """In a forked process threads that are not there may hold these."""
    global _find_lock
    _find_lock = threading.Lock()
    _process_slots.cache_clear()


os.register_at_fork(after_in_child=_forked)


class Library(Compiler):
    """NVRTC: compiles and assembles each kernel by itself, so that all are ready soon after the last one is known."""

    def __init__(self, library: nvrtc.Nvrtc):
        super().__init__(library.path, library.version)
        self.library = library

    def chips(self) -> list[str]:
        return self.library.chips()

    def front_end(self, number: str) -> FrontEnd:
        own = [flag for flag, since in SINCE.items() if self.library.release >= since]
        flags = [f"--gpu-architecture=sm_{number}", *FLAGS, "-w", *own]
        return FrontEnd(" ".join([self.library.build, *flags]), 0, lambda source: self._run(source, flags))

    def _run(self, source: str, flags: Sequence[str]) -> Piece:
        ptx, code = self.library.compile(source, flags)
        return Piece(pieces.without_unused(ptx).encode(), code)

    def make(self, text: str, kinds: Sequence[str], number: str) -> dict[str, bytes]:
        front = self.front_end(number)
        made = front.compile(text)
        code = images.pack([images.Image(pieces.entries(piece.ptx.decode()), piece.code) for piece in made])
        return {"compute": front.join(text, made), "sm": code}


def find_compiler() -> Compiler:
    """NVRTC of nvcc's release, else nvcc, else any NVRTC.  Raises CompileError when there is neither."""
    with _find_lock:  # who comes while another looks gets what that finds
        return _find_compiler()


def compilers() -> list[str]:
    """The files of the compilers that there are, looked for but not run."""
    nvcc = _find_nvcc()
    return [*([nvcc] if nvcc else []), *nvrtc.files(nvcc)]


def _find_nvcc() -> str | None:
    wanted = os.environ.get(NVCC, "").strip()
    return shutil.which(wanted or "nvcc") or (None if wanted else shutil.which("/usr/local/cuda/bin/nvcc"))


def _find_compiler() -> Compiler:
    wanted, path = os.environ.get(NVCC, "").strip(), _find_nvcc()
    if path:
        nvcc = Nvcc(path)
        library = nvrtc.beside(path, nvcc.release)
        return Library(library) if library else nvcc
    if wanted:
        raise CompileError(f"The CUDA compiler '{wanted}' that TF_STITCH_NVCC names is not there; install it or unset "
                           "TF_STITCH_NVCC.")
    found = nvrtc.find()
    if found is None:
        raise CompileError("No CUDA compiler found: install the CUDA toolkit (nvcc), or NVRTC with "
                           "pip install 'tensorflow[and-cuda]'.")
    return Library(found)


@functools.lru_cache(maxsize=8)
def _nvcc_version(path: str, mtime: int) -> str:
    """The line that tells builds apart, "Build cuda_13.0.r13.0/compiler.36424714_0"."""
    return _said(path, "--version").strip().splitlines()[-1]


def _said(path: str, question: str) -> str:
    try:
        done = subprocess.run([path, question], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"The CUDA compiler '{path}' cannot be run: {error.strerror}.") from None
    if done.returncode:
        raise CompileError(f"The CUDA compiler '{path}' does not work: {first_error(done.stdout + done.stderr)}")
    return done.stdout


# --- running without TensorFlow --------------------------------------------------------------------

@functools.cache
def driver() -> Any:
    """PyCUDA's driver module with the first GPU's primary context current."""
    try:
        import pycuda.driver as found
    except ImportError as error:
        raise DeviceError("Running kernels without TensorFlow needs PyCUDA: pip install 'tf-stitch[cuda]' "
                           f"({error}).") from None
    try:
        found.init()
        context = found.Device(0).retain_primary_context()
        context.push()
        atexit.register(context.pop)  # PyCUDA aborts the process over one that is left
    except found.Error as error:
        raise DeviceError(f"No GPU can be used: {error}.") from None
    return found


def device_target() -> str:
    """The code target of the first GPU, e.g. "sm_90"."""
    major, minor = driver().Device(0).compute_capability()
    return f"sm_{major}{minor}"


def code_for_device(program: Program) -> bytes:
    """The program's code for the first GPU, built from its text when it has none."""
    target = device_target()
    if target in program.code:
        return program.code[target]
    return compile_text(program.text, (target,))[target]


class Loaded:
    """A program with its module loaded and its buffers in device memory, for one set of inputs."""

    def __init__(self, program: Program, inputs: Sequence[np.ndarray]):
        self.driver, self.program = driver(), program
        arrays = [np.asarray(x, order="C") for x in inputs]
        self.env = bind(program, arrays)
        kernels = [s for s in program.steps if isinstance(s, KernelStep)]
        self.module = _module(code_for_device(program)) if kernels else None
        self.share = {s.output: s.source for s in program.steps if isinstance(s, AliasStep)}
        self.memory = [self._place(b, arrays) for b in program.buffers]

    def _place(self, b: Buffer, arrays: Sequence[np.ndarray]) -> Any:
        size = int(np.prod(self._concrete(b.shape), dtype=np.int64)) * DTYPES[b.dtype].size
        memory = self.driver.mem_alloc(max(size, 16))
        if b.kind == "input" and size:
            self.driver.memcpy_htod(memory, arrays[b.index].reshape(-1).view(np.uint8))
        else:
            self.driver.memset_d8(memory, 0xFF, max(size, 16))  # NaN for floats: what nothing writes is seen
        return memory

    def _concrete(self, dims: Sequence[D.Dim]) -> tuple[int, ...]:
        return tuple(D.evaluate(d, self.env) for d in dims)

    def _address(self, buffer: int) -> int:
        return int(self.memory[self._source(buffer)])

    def _source(self, buffer: int) -> int:
        while buffer in self.share:
            buffer = self.share[buffer]
        return buffer

    def launch(self) -> None:
        """Runs all steps; library steps run on the host."""
        grids = {g.first: g for g in self.program.grids}
        inside = {i for g in self.program.grids for i in range(g.first, g.end)}
        for i, step in enumerate(self.program.steps):
            if i in grids:
                self.launch_grid(grids[i])
            elif i in inside:
                continue
            elif isinstance(step, KernelStep):
                self.launch_kernel(step)
            elif isinstance(step, LibraryStep):
                self._call(step)

    def launch_kernel(self, step: KernelStep) -> None:
        """Enqueues one kernel."""
        self.prepare(step)()

    def prepared(self) -> Callable[[], None]:
        """What enqueues all kernels with little work of the host's; library steps are left out."""
        launches = [self.prepare(s) for s in self.program.steps if isinstance(s, KernelStep)]

        def launch() -> None:
            for one in launches:
                one()

        return launch

    def prepare(self, step: KernelStep) -> Callable[[], object]:
        """What enqueues one kernel."""
        blocks = D.evaluate(step.blocks, self.env)
        if not blocks:
            return lambda: None
        assert self.module is not None
        function = self.module.get_function(step.kernel)
        shared = D.evaluate(step.shared_bytes, self.env)
        if shared > 40 * 1024:
            function.set_attribute(self.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        words = [self._address(b) for b in step.buffers] + [*self._concrete(step.dims), blocks]
        argument = np.array(words, np.int64 if min(words) < 0 else np.uint64)
        return functools.partial(function, argument, block=(step.threads, 1, 1), grid=(blocks, 1), shared=shared)

    def launch_grid(self, grid: Grid) -> None:
        """Enqueues a grid kernel, once for each phase: PyCUDA makes no cooperative launches."""
        holders = self.program.holders()
        place = {i: (1 + grid.bases.index(holders[i]), 0) if i in holders else (0, self._address(i))
                 for s in self.program.steps[grid.first:grid.end] for i in getattr(s, "buffers", ())}
        table = make_table(self.program, grid, self.env, place.__getitem__)
        if not table.phases:
            return
        assert self.module is not None
        function = self.module.get_function(grid.kernel)
        if table.shared_bytes > 40 * 1024:
            function.set_attribute(self.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, table.shared_bytes)
        records, words = (self._on_device(x) for x in (table.records, table.words))
        bases = [0, *(self._address(b) for b in grid.bases)]
        for phase in range(table.phases):
            ends = (0, table.problems) if grid.is_pack else (table.first_of(phase), phase + 1)
            argument = np.array([int(records), int(words), 0, *ends, NOTHING_KEPT, *bases], np.uint64)
            function(argument, block=(self._threads(grid), 1, 1), grid=(table.most_blocks, 1),
                     shared=table.shared_bytes)
        self.driver.Context.synchronize()  # before the table is freed

    def _threads(self, grid: Grid) -> int:
        (threads,) = {s.threads for s in self.program.steps[grid.first:grid.end] if isinstance(s, KernelStep)}
        return threads

    def _on_device(self, array: np.ndarray) -> Any:
        memory = self.driver.mem_alloc(max(array.nbytes, 16))
        if array.nbytes:
            self.driver.memcpy_htod(memory, array.reshape(-1).view(np.uint8))
        return memory

    def _call(self, step: LibraryStep) -> None:
        arrays = [self.read(b).reshape(-1) for b in step.buffers]
        call_library(step, arrays, self.env)
        if arrays[-1].size:
            self.driver.memcpy_htod(self.memory[self._source(step.buffers[-1])], arrays[-1].view(np.uint8))

    def read(self, buffer: int) -> np.ndarray:
        """A buffer's contents."""
        b = self.program.buffers[buffer]
        out = np.empty(self._concrete(b.shape), DTYPES[b.dtype].numpy)
        if out.size:
            self.driver.memcpy_dtoh(out.reshape(-1).view(np.uint8), self.memory[self._source(buffer)])
        return out

    def outputs(self) -> list[np.ndarray]:
        """The program's outputs."""
        ids = [i for i, b in enumerate(self.program.buffers) if b.kind == "output"]
        return [self.read(i) for i in sorted(ids, key=lambda i: self.program.buffers[i].index)]

    def free(self) -> None:
        """Gives the device memory back."""
        for memory in self.memory:
            memory.free()
        self.memory = []


class _Modules:
    """The images of machine code, loaded."""

    def __init__(self, code: bytes):
        self.modules = [(image.names, driver().module_from_buffer(image.code)) for image in images.unpack(code)]

    def get_function(self, kernel: str) -> Any:
        """A kernel of one of them."""
        return next(module for names, module in self.modules if not names or kernel in names).get_function(kernel)


@functools.lru_cache(maxsize=32)
def _module(code: bytes) -> _Modules:
    return _Modules(code)


@contextlib.contextmanager
def loaded(program: Program, inputs: Sequence[np.ndarray]) -> Iterator[Loaded]:
    """A program ready to be launched; its memory is freed at the end."""
    made = Loaded(program, inputs)
    try:
        yield made
    finally:
        made.free()


def run(program: Program, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a program on the first GPU; library steps are computed by NumPy.

    Raises GuardFailed where the op would run the fallback, DeviceError without PyCUDA or a GPU.
    """
    with loaded(program, inputs) as ready:
        ready.launch()
        ready.driver.Context.synchronize()
        return ready.outputs()


def time_kernel(program: Program, inputs: Sequence[np.ndarray], step: KernelStep, rounds: int = 20) -> float:
    """Microseconds that one launch of a kernel of the program takes on the first GPU: the median over rounds."""
    with loaded(program, inputs) as ready:
        ready.launch()
        times = []
        for _ in range(rounds):
            start, end = ready.driver.Event(), ready.driver.Event()
            start.record()
            ready.launch_kernel(step)
            end.record()
            end.synchronize()
            times.append(start.time_till(end) * 1e3)
        return statistics.median(times)
