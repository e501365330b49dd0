"""The CPU backend: kernel text to machine code with g++ or clang++, and a runner that needs no TensorFlow.

Compiled code is kept on disk (see :mod:`.cache`).  Environment: ``CXX`` picks the compiler.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..codegen.unit import HOST_FLAGS, level_flags
from ..errors import CompileError, GuardFailed
from ..ir import dims as D
from ..ir.dtypes import DTYPES
from ..ir.ops import OPS
from ..options import HOST_LEVELS
from ..program.program import RESULT_DIMS, AliasStep, Buffer, KernelStep, LibraryStep, Program
from .cache import INCLUDE, Cache, first_error, key_of, stamp

CACHE = Cache("host", ".so")
PRELUDE = '#include "ts_host.h"\n'

# No libm, no libstdc++: the code must load in any process and on any distribution.
LINK = ("-nostdlib",
        "-Wl,--gc-sections,-Bsymbolic,-s,--build-id=none,-z,max-page-size=4096,-z,noseparate-code")
LINK_LAST = ("-lgcc",)

# Processor flags (as /proc/cpuinfo spells them) that each x86-64 level adds to the one before.
_LEVEL_FLAGS = {
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
_MARCH = {**{level: f"-march={level}" for level in (*HOST_LEVELS, "x86-64")}, "aarch64": "-march=armv8-a"}


# --- this machine ----------------------------------------------------------------------------------

@functools.cache
def supported_levels() -> tuple[str, ...]:
    """Code targets that this machine runs, best first (as HostTargets in custom_ops/runtime_host.cc)."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ("aarch64",)
    if machine not in ("x86_64", "amd64"):
        return (machine,)
    levels, flags = ["x86-64"], _cpu_flags()
    for level, needed in _LEVEL_FLAGS.items():
        if not flags.issuperset(needed):
            break
        levels.insert(0, level)
    return tuple(levels)


def native_level() -> str:
    """The best code target of this machine, e.g. "x86-64-v3" or "aarch64"."""
    return supported_levels()[0]


def native_levels() -> tuple[str, ...]:
    """What ``Options(levels=())`` stands for."""
    return (native_level(),)


def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def usable_cores() -> int:
    """Cores that this process may use, at most 16: more compilers at a time only cost memory."""
    return min(len(os.sched_getaffinity(0)), 16)


# --- the compiler ----------------------------------------------------------------------------------

def find_compiler() -> list[str]:
    """The C++ compiler's command.  Raises CompileError when there is none."""
    wanted = os.environ.get("CXX", "").strip()
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    for name in names:
        if shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    if wanted:
        raise CompileError(f"The C++ compiler '{wanted}' that CXX names is not there; install it or unset CXX.")
    raise CompileError(f"No C++ compiler found (tried {', '.join(names)}); install g++ or set CXX.")


def compiler_stamp() -> str:
    """The compiler's command and what tells its file apart from another version's; "" where there is none."""
    try:
        command = find_compiler()
    except CompileError:
        return ""
    return "\n".join([*command, stamp([os.path.realpath(shutil.which(command[0]) or command[0])])])


def compiler_version(command: Sequence[str]) -> str:
    """The first line that the compiler prints of itself."""
    path = shutil.which(command[0]) or command[0]
    return _version_of(tuple(command), os.stat(path).st_mtime_ns if os.path.exists(path) else 0)


@functools.lru_cache(maxsize=16)
def _version_of(command: tuple[str, ...], mtime: int) -> str:
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"The C++ compiler '{command[0]}' cannot be run: {error.strerror}.") from None
    if result.returncode:
        raise CompileError(f"The C++ compiler '{command[0]}' does not work: {first_error(result.stderr)}")
    return result.stdout.partition("\n")[0]


def compile_text(text: str, levels: Sequence[str] = ()) -> dict[str, bytes]:
    """Compiles kernels for each level (of ``supported_levels`` and more; () is this machine's best).

    ``text`` is the kernels' text; unless it begins with an include, what gives it its meaning is included first.
    A compiler that builds for another kind of processor than a level's leaves that level out and builds for its own.
    Returns a shared object per level, taken from the cache where it holds it.  Raises CompileError, with the
    compiler's first error line, when that fails.
    """
    levels = tuple(dict.fromkeys(levels)) or native_levels()
    unknown = [level for level in levels if level not in _MARCH]
    if unknown:
        raise CompileError(f"The host backend cannot build code for '{unknown[0]}'; it builds for {', '.join(_MARCH)}.")
    levels = tuple(level for level in levels if _same_family(level)) or native_levels()
    source = text if text.lstrip().startswith("#include") else PRELUDE + text
    command = find_compiler()
    jobs = [functools.partial(_build, source, level, command) for level in levels]
    if len(jobs) == 1:
        return {levels[0]: jobs[0]()}
    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        return dict(zip(levels, pool.map(lambda job: job(), jobs), strict=True))


def _same_family(level: str) -> bool:
    return (level == "aarch64") == (native_level() == "aarch64")


def _build(source: str, level: str, command: list[str]) -> bytes:
    flags = [*HOST_FLAGS, _MARCH[level], *level_flags(level)]
    key = _key(source, compiler_version(command), command, flags)
    code = CACHE.get(key)
    if code is None:
        code = _run_compiler(source, command, flags)
        CACHE.put(key, code)
    return code


def _run_compiler(source: str, command: list[str], flags: list[str]) -> bytes:
    try:
        with tempfile.TemporaryDirectory(prefix="tf_stitch_") as folder:
            cpp, so = Path(folder, "kernels.cc"), Path(folder, "kernels.so")
            cpp.write_text(source)
            result = subprocess.run([*command, *flags, f"-I{INCLUDE}", str(cpp), *LINK, "-o", str(so), *LINK_LAST],
                                    capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
            if result.returncode:
                raise CompileError(f"{command[0]} failed to compile a kernel: {first_error(result.stderr)}")
            return so.read_bytes()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CompileError(f"Compiling a kernel failed: {error.strerror}{where}.") from None


def _key(source: str, version: str, command: Sequence[str], flags: Sequence[str]) -> str:
    return key_of((version, *command, *flags, *LINK, *LINK_LAST, source))


# --- running without TensorFlow --------------------------------------------------------------------

class _Problem(ctypes.Structure):
    _fields_ = [("buffers", ctypes.POINTER(ctypes.c_void_p)), ("dims", ctypes.POINTER(ctypes.c_int64)),
                ("blocks", ctypes.c_int64)]


_loaded: dict[str, ctypes.CDLL] = {}
_load_lock = threading.Lock()


def load_code(code: bytes) -> ctypes.CDLL:
    """The shared object with these bytes, loaded into this process (once)."""
    key = hashlib.sha256(code).hexdigest()
    with _load_lock:
        if key not in _loaded:
            with tempfile.NamedTemporaryFile(prefix="tf_stitch_", suffix=".so") as f:
                f.write(code)
                f.flush()
                _loaded[key] = ctypes.CDLL(f.name)
        return _loaded[key]


def code_for_this_machine(program: Program) -> bytes:
    """The program's best code for this machine, built from its text when it has none."""
    for level in supported_levels():
        if level in program.code:
            return program.code[level]
    return compile_text(program.text)[native_level()]


def bind(program: Program, inputs: Sequence[np.ndarray]) -> dict[str, int]:
    """The values of the program's symbols.  Raises GuardFailed where the op would run the fallback."""
    params = program.of_kind("input")
    if len(params) != len(inputs):
        raise GuardFailed(f"The program takes {len(params)} inputs, {len(inputs)} are given.")
    for i, (b, x) in enumerate(zip(params, inputs, strict=True)):
        if x.ndim != len(b.shape) or x.dtype != DTYPES[b.dtype].numpy:
            raise GuardFailed(f"Input {i} is {x.dtype} of rank {x.ndim} where {b.dtype} of rank {len(b.shape)} "
                              "is expected.")
    env: dict[str, int] = {}
    for name, source in program.symbols.items():
        x = inputs[source.param]
        if source.kind == "value" and source.index >= x.size:
            raise GuardFailed(f"Input {source.param} has no element {source.index}.")
        env[name] = int(x.shape[source.index] if source.kind == "dim" else x.reshape(-1)[source.index])
    for symbol in _symbols_of(program):
        lo, hi = symbol.lo, symbol.hi
        if (lo is not None and env[symbol.name] < lo) or (isinstance(hi, int) and env[symbol.name] > hi):
            raise GuardFailed(f"Size '{symbol.name}' is {env[symbol.name]}, outside the range that the kernels "
                              "are made for.")
    for i, (b, x) in enumerate(zip(params, inputs, strict=True)):
        want = _concrete(b.shape, env)
        if x.shape != want:
            raise GuardFailed(f"Input {i} has the shape {x.shape} where {want} is expected.")
    for guard in program.guards:
        if not guard.holds(env):
            raise GuardFailed(f"A guard does not hold: {guard.reason or guard.kind}.")
    return env


def _symbols_of(program: Program) -> frozenset[D.Symbol]:
    dims = [d for b in program.buffers for d in b.shape]
    dims += [d for g in program.guards for d in (g.a, g.b)]
    for s in program.steps:
        if isinstance(s, KernelStep):
            dims += [*s.dims, s.blocks, s.shared_bytes, s.cost]
        elif isinstance(s, LibraryStep):
            dims += s.dims
    return frozenset().union(*(D.symbols(d) for d in dims))


def _concrete(shape: Sequence[D.Dim], env: dict[str, int]) -> tuple[int, ...]:
    return tuple(D.evaluate(d, env) for d in shape)


class _Memory:
    """An aligned block with a margin on both sides, to see a kernel that writes outside of it."""

    MARGIN = 256
    FILL = 0xA5

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.raw = np.full(nbytes + 3 * self.MARGIN, self.FILL, np.uint8)
        self.start = self.MARGIN + -(self.raw.ctypes.data) % self.MARGIN
        self.bytes = self.raw[self.start:self.start + nbytes]
        self.poison()

    def poison(self) -> None:
        """Makes floats NaN, so that what a kernel forgets to write is seen."""
        self.bytes.fill(0xFF)

    @property
    def address(self) -> int:
        return self.raw.ctypes.data + self.start

    def intact(self) -> bool:
        """True when nothing was written outside."""
        outside = self.raw[:self.start], self.raw[self.start + self.nbytes:]
        return all(bool((part == self.FILL).all()) for part in outside)


def run(program: Program, inputs: Sequence[np.ndarray], shards: int = 1) -> list[np.ndarray]:
    """Runs a program's kernels on this machine, as the op does.

    ``shards``: in how many calls the blocks of each kernel are run.  Raises GuardFailed where the op would run the
    fallback (sizes, guards, a kernel that meets a bad index or divisor), RuntimeError when a kernel writes outside its
    buffers.
    """
    arrays = [np.asarray(x, order="C") for x in inputs]
    env = bind(program, arrays)
    kernels = any(isinstance(s, KernelStep) for s in program.steps)
    library = load_code(code_for_this_machine(program)) if kernels else None
    memory: list[np.ndarray | _Memory] = [
        arrays[b.index] if b.kind == "input" else _Memory(_nbytes(b, env)) for b in program.buffers]
    share = _shared_memory(program)
    for step in program.steps:
        if isinstance(step, KernelStep):
            _launch(library, step, [memory[share.get(i, i)] for i in step.buffers], env, shards)
        elif isinstance(step, LibraryStep):
            call_library(step, [_elements(program.buffers[i], memory[share.get(i, i)]) for i in step.buffers], env)
    return [_result(program, i, memory[share.get(i, i)], env) for i in _output_ids(program)]


def _output_ids(program: Program) -> list[int]:
    ids = [i for i, b in enumerate(program.buffers) if b.kind == "output"]
    return sorted(ids, key=lambda i: program.buffers[i].index)


def _shared_memory(program: Program) -> dict[int, int]:
    """For each aliased output, the buffer whose memory it is."""
    share: dict[int, int] = {}
    for step in program.steps:
        if isinstance(step, AliasStep):
            share[step.output] = share.get(step.source, step.source)
    return share


def _nbytes(b: Buffer, env: dict[str, int]) -> int:
    return int(np.prod(_concrete(b.shape, env), dtype=np.int64)) * DTYPES[b.dtype].size


def _elements(b: Buffer, memory: np.ndarray | _Memory) -> np.ndarray:
    """A buffer's elements, flat and in place."""
    data = memory.bytes if isinstance(memory, _Memory) else memory.reshape(-1).view(np.uint8)
    return data.view(DTYPES[b.dtype].numpy)


def _result(program: Program, i: int, memory: np.ndarray | _Memory, env: dict[str, int]) -> np.ndarray:
    b = program.buffers[i]
    return _elements(b, memory).copy().reshape(_concrete(b.shape, env))


def call_library(step: LibraryStep, buffers: Sequence[np.ndarray], env: dict[str, int]) -> None:
    """What a library step means; half types accumulate and add in float32 and round once."""
    if step.call not in _CALLS:
        raise GuardFailed(f"The library call '{step.call}' of '{step.origin}' is not known here.")
    out, dims = buffers[-1], _concrete(step.dims, env)
    if not all(dims[i] for i in RESULT_DIMS[step.call]):
        return
    wide = out.dtype if out.dtype.itemsize > 2 else np.dtype(np.float32)
    y = _CALLS[step.call](dims, step.flags, [x.astype(wide) for x in buffers[:-1]])
    out[:] = y.reshape(-1).astype(out.dtype)


def _call_matmul(dims: Sequence[int], flags: Sequence[int], operands: Sequence[np.ndarray]) -> np.ndarray:
    batch, m, n, k = dims
    trans_lhs, trans_rhs, broadcast_lhs, broadcast_rhs, has_bias = flags
    lhs, rhs, *bias = operands

    def matrices(x: np.ndarray, rows: int, columns: int, transposed: int, broadcast: int) -> np.ndarray:
        shape = (columns, rows) if transposed else (rows, columns)
        x = x.reshape(1 if broadcast else batch, *shape)
        return x.swapaxes(1, 2) if transposed else x

    y = matrices(lhs, m, k, trans_lhs, broadcast_lhs) @ matrices(rhs, k, n, trans_rhs, broadcast_rhs)
    return np.broadcast_to(y + bias[0] if has_bias else y, (batch, m, n))


def _call_conv(dims: Sequence[int], flags: Sequence[int], operands: Sequence[np.ndarray]) -> np.ndarray:
    batch, channels, results, *_ = dims
    has_bias, has_residual, relu, groups, *_ = flags
    (image, places, window), attrs = _conv_sizes(dims), _conv_attrs(dims, flags)
    x, w, *rest = operands
    x = x.reshape(batch, *image, channels)
    w = np.moveaxis(w.reshape(results, *window, channels // groups), 0, -1)
    y = OPS["conv"].evaluate([x, w], attrs, (batch, *places, results), str(x.dtype))
    if has_residual:
        y = y + rest[has_bias].reshape(y.shape)
    y = y + rest[0] if has_bias else y
    return np.where(y < 0, 0, y) if relu else y


def _call_conv_filter(dims: Sequence[int], flags: Sequence[int], operands: Sequence[np.ndarray]) -> np.ndarray:
    batch, channels, results, *_ = dims
    (image, places, window), attrs = _conv_sizes(dims), _conv_attrs(dims, flags)
    x, g = operands[0].reshape(batch, *image, channels), operands[1].reshape(batch, *places, results)
    return OPS["conv_filter"].evaluate([x, g], attrs | {"size": window},
                                       (results, *window, channels // flags[3]), str(x.dtype))


def _conv_sizes(dims: Sequence[int]) -> list[tuple[int, ...]]:
    """Image, places and window."""
    spatial = (len(dims) - 3) // 3
    return [tuple(dims[3 + i * spatial:3 + (i + 1) * spatial]) for i in range(3)]


def _conv_attrs(dims: Sequence[int], flags: Sequence[int]) -> dict[str, object]:
    spatial = (len(dims) - 3) // 3
    strides, low, high, dilations = (tuple(flags[4 + i * spatial:4 + (i + 1) * spatial]) for i in range(4))
    return {"strides": strides, "padding": tuple(zip(low, high, strict=True)), "dilations": dilations,
            "groups": flags[3]}


_CALLS = {"matmul": _call_matmul, "conv": _call_conv, "conv_filter": _call_conv_filter}


def _launch(library: ctypes.CDLL | None, step: KernelStep, memory: list[np.ndarray | _Memory], env: dict[str, int],
            shards: int) -> None:
    blocks = D.evaluate(step.blocks, env)
    if not blocks:
        return
    kernel = getattr(library, step.kernel)
    kernel.restype, kernel.argtypes = None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
                                             ctypes.c_void_p]
    addresses = [m.address if isinstance(m, _Memory) else m.ctypes.data for m in memory]
    dims = _concrete(step.dims, env)
    problem = _Problem((ctypes.c_void_p * len(addresses))(*addresses), (ctypes.c_int64 * len(dims))(*dims), blocks)
    shared = _Memory(D.evaluate(step.shared_bytes, env))
    status = ctypes.c_int32(0)
    size = -(-blocks // max(1, min(shards, blocks)))
    for begin in reversed(range(0, blocks, size)):  # in no useful order: blocks must not depend on each other
        shared.poison()
        kernel(ctypes.byref(problem), begin, min(begin + size, blocks), shared.address, ctypes.byref(status))
    if not all(m.intact() for m in [*memory, shared] if isinstance(m, _Memory)):
        raise RuntimeError(f"Kernel {step.kernel} ({step.origin}) wrote outside its buffers.")
    if status.value:
        raise GuardFailed(f"Kernel {step.kernel} ({step.origin}) met an index or a divisor that it cannot use.")
