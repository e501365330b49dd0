"""``tf-stitch doctor``: what was found on this machine, what is missing and how to get it."""
from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from .errors import StitchError

FOUND, MISSING, PROBLEM = "found", "missing", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
      name: what it is.
      status: "found", "missing" or "problem" (there, but not usable).
      detail: version or place, or what is wrong.
      advice: how to get it; "" when found.
      needed: what it is needed for.
      required: whether rewriting a model for the CPU needs it.
    """

    name: str
    status: str
    detail: str
    advice: str = ""
    needed: str = ""
    required: bool = False


@dataclass(frozen=True)
class _Sought:
    name: str
    needed: str
    required: bool = False

    def found(self, detail: str) -> Finding:
        return Finding(self.name, FOUND, detail, "", self.needed, self.required)

    def missing(self, detail: str, advice: str) -> Finding:
        return Finding(self.name, MISSING, detail, advice, self.needed, self.required)

    def problem(self, detail: str, advice: str) -> Finding:
        return Finding(self.name, PROBLEM, detail, advice, self.needed, self.required)


def examine() -> list[Finding]:
    """Looks for everything; no check stops the others."""
    return [_guarded(check) for check in CHECKS]


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        return Finding(name, PROBLEM, f"looking for it failed: {error}", "please report this")


def _tensorflow() -> Finding:
    sought = _Sought("TensorFlow", "everything", required=True)
    try:
        version = importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError:
        return sought.missing("not installed", "pip install 'tensorflow~=2.21.0'")
    try:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow as tf
    except ImportError as error:
        return sought.problem(f"{version} cannot be imported: {error}",
                              "pip install --force-reinstall 'tensorflow~=2.21.0'")
    return sought.found(tf.__version__)


def _op_library() -> Finding:
    from . import runtime

    sought = _Sought("Op library", "running rewritten models", required=True)
    try:
        runtime.load()
    except (StitchError, ImportError) as error:
        status = PROBLEM if runtime.LIBRARY.exists() else MISSING
        advice = "pip install 'setuptools>=77' wheel && pip install --no-build-isolation ."
        return replace(sought.missing(str(error), advice), status=status)
    return sought.found(f"{runtime.LIBRARY}, built for TensorFlow {runtime.built_for()}")


def _compiler() -> Finding:
    from .backend import host

    sought = _Sought("C++ compiler", "rewriting models for the CPU", required=True)
    try:
        command = host.find_compiler()
        version = host.compiler_version(command)
    except StitchError as error:
        return sought.missing(str(error), "apt-get install g++")
    return sought.found(f"{' '.join(command)}: {version}")


# A kernel as the emitter's are: it says through its output that it ran.
_PROBE = """#include <stdint.h>
struct ts_problem { void* const* buffers; const int64_t* dims; int64_t blocks; };
extern "C" __attribute__((visibility("default"))) void tf_stitch_probe(
    const ts_problem* p, int64_t begin, int64_t end, char*, int32_t*) {
  for (int64_t i = begin; i < end; ++i) ((int64_t*)p->buffers[0])[i] = p->dims[0] + i;
}
"""


def _kernels() -> Finding:
    """Builds a kernel and runs it."""
    from .backend import host
    from .program.program import Buffer, KernelStep, Program

    sought = _Sought("Kernels", "running rewritten models", required=True)
    step = KernelStep("tf_stitch_probe", (0,), (40,), 3, 0, 1)
    program = Program([Buffer("output", 0, "int64", (3,))], [step], {}, [], _PROBE)
    try:
        result = host.run(program, [])[0].tolist()
    except (StitchError, OSError) as error:
        return sought.problem(str(error), "see 'C++ compiler' above")
    if result != [40, 41, 42]:
        return sought.problem("a kernel that was built here gives wrong results", "try another compiler: set CXX")
    return sought.found("one was built and run here")


def _processor() -> Finding:
    from .backend import host

    level = host.native_level()
    sought = _Sought("Processor", "stitched kernels on the CPU")
    if level in ("x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"):
        return sought.found(f"{level}, {os.cpu_count()} cores")
    return sought.problem(f"{level} ({platform.machine()})",
                          "models run, but with TensorFlow's own kernels: x86-64-v2 or aarch64 is needed")


def _cache() -> Finding:
    from .backend import cache

    folder = cache.cache_folder()
    sought = _Sought("Cache folder", "not compiling the same kernels again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return sought.problem(f"{folder} cannot be written: {error.strerror}",
                              "set TF_STITCH_CACHE to a folder that can be written")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return sought.found(f"{folder}, {size / 1e6:.1f} MB")


def _gpu() -> Finding:
    sought = _Sought("GPU", "the GPU backend")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return sought.missing("no NVIDIA driver (libcuda.so.1)", "on a machine with an NVIDIA GPU, install its driver")
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return sought.problem("there is a driver, but TensorFlow sees no GPU",
                              "pip install 'tensorflow[and-cuda]~=2.21.0'")
    names = [tf.config.experimental.get_device_details(g).get("device_name", g.name) for g in gpus]
    return sought.found(", ".join(names))


def _cuda_compiler() -> Finding:
    from .backend import cuda

    sought = _Sought("CUDA compiler", "rewriting models for a GPU")
    try:
        found = cuda.find_compiler()
    except StitchError as error:
        return sought.missing(str(error), "install the CUDA toolkit, or pip install 'tensorflow[and-cuda]~=2.21.0'")
    return sought.found(f"{found.path}: {found.version}")


def _pycuda() -> Finding:
    sought = _Sought("PyCUDA", "running GPU kernels without TensorFlow, as tests and benchmarks do")
    try:
        return sought.found(importlib.metadata.version("pycuda"))
    except importlib.metadata.PackageNotFoundError:
        return sought.missing("not installed", "pip install 'tf-stitch[cuda]'")


CHECKS: tuple[Callable[[], Finding], ...] = (_tensorflow, _op_library, _compiler, _kernels, _processor, _cache, _gpu,
                                             _cuda_compiler, _pycuda)


def main(json_output: bool = False, quiet: bool = False) -> int:
    """Prints the findings; returns 1 when something that CPU rewriting needs is missing, else 0."""
    findings = examine()
    lacking = [f for f in findings if f.required and f.status != FOUND]
    if json_output:
        print(json.dumps({"ok": not lacking, "findings": [asdict(f) for f in findings]}, indent=1))
    elif not quiet:
        _print(findings, lacking)
    elif lacking:
        print("\n".join(f"{f.name}: {f.detail}" for f in lacking))
    return 1 if lacking else 0


def _print(findings: list[Finding], lacking: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = {FOUND: "green", MISSING: "yellow", PROBLEM: "red"}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "what was found", "how to get it"):
        table.add_column(heading, overflow="fold")
    for f in findings:
        advice = f"{f.advice} (for {f.needed})" if f.advice else ""
        table.add_row(f.name, Text(f.status, style["problem" if f in lacking else f.status]), Text(f.detail),
                      Text(advice))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width
    console.print(table)
    console.print("\n" + ("Rewriting for the CPU needs what is red above." if lacking else
                          "tf_stitch can rewrite and run models for the CPU here."))
