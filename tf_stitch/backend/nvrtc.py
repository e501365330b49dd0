"""NVRTC: the CUDA compiler as a library of this process.  It starts no process, reads no headers from the disk, and
compiles on as many threads as call it.  The toolkit, ``tensorflow[and-cuda]`` and PyTorch's and JAX's wheels bring it.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import CompileError
from .cache import first_error

SONAMES = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12")
SWITCH = "TF_STITCH_NVRTC"  # 0: not where there is an nvcc


class Nvrtc:
    """A loaded NVRTC.  Raises OSError when it cannot be loaded.

    Attributes:
      path: the name that it was loaded by.
      release: as (13, 0).
      version: the release as text.
      build: what tells apart the updates of a release too, which all give its version: how long the file is.
    """

    def __init__(self, path: str):
        self.path = path
        self._builtins = _load_builtins(path)
        self.lib = ctypes.CDLL(path)
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.release = major.value, minor.value
        self.version = f"nvrtc {major.value}.{minor.value}"
        self.build = f"{self.version} {os.stat(_file_of(self.lib)).st_size}"

    def compile(self, source: str, flags: Sequence[str]) -> tuple[str, bytes]:
        """PTX and machine code of a translation unit.  Raises CompileError with the first error's line."""
        program = ctypes.c_void_p()
        self._check(self.lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
        try:
            options = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
            if self.lib.nvrtcCompileProgram(program, len(flags), options):
                log = self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
                raise CompileError(f"NVRTC failed to compile a kernel: {first_error(log.rstrip(chr(0)))}")
            ptx = self._read(program, "nvrtcGetPTXSize", "nvrtcGetPTX").rstrip(b"\0").decode()
            return ptx, self._read(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        finally:
            self.lib.nvrtcDestroyProgram(ctypes.byref(program))

    def warm_up(self) -> None:
        """Compiles next to nothing: the first time takes a fifth of a second longer than later ones."""
        self.compile('extern "C" __global__ void nothing() {}', ["--gpu-architecture=sm_90"])

    def chips(self) -> list[str]:
        """The chips that it builds code for, as "sm_90"."""
        count = ctypes.c_int()
        self._check(self.lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self.lib.nvrtcGetSupportedArchs(numbers))
        return [f"sm_{n}" for n in numbers]

    def _read(self, program: ctypes.c_void_p, size_of: str, read: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.lib, size_of)(program, ctypes.byref(size)))
        room = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.lib, read)(program, room))
        return room.raw

    def _check(self, result: int) -> None:
        if result:
            raise CompileError(f"NVRTC failed: {self.lib.nvrtcGetErrorString(result).decode()}.")


class _LinkMap(ctypes.Structure):
    """The beginning of link_map of <link.h>."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _file_of(library: ctypes.CDLL) -> str:
    """The file that a library was loaded from, also where it was named without a folder."""
    found = ctypes.POINTER(_LinkMap)()
    link_map = 2  # RTLD_DI_LINKMAP
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), link_map, ctypes.byref(found)):
        raise OSError(f"It is not known where '{library._name}' was loaded from.")
    return os.fsdecode(found.contents.name)


def _load_builtins(path: str) -> list[ctypes.CDLL]:
    """NVRTC looks its second library up by name only, and finds one that is loaded."""
    out = []
    for name in _others(f"{os.path.dirname(path)}/libnvrtc-builtins.so.*") if os.path.dirname(path) else ():
        with contextlib.suppress(OSError):
            out.append(ctypes.CDLL(name))
    return out


@functools.cache
def find(release: tuple[int, int] | None = None, nvcc: str | None = None) -> Nvrtc | None:
    """The first NVRTC there is, of a release (13, 0) where one is given; those beside ``nvcc`` come first."""
    for path in _places(nvcc):
        with contextlib.suppress(OSError, CompileError):
            found = Nvrtc(path)
            if release in (None, found.release):
                return found
    return None


def beside(nvcc: str, release: tuple[int, int]) -> Nvrtc | None:
    """NVRTC of nvcc's release: it compiles as nvcc does.  None where there is none or it is turned off."""
    return None if os.environ.get(SWITCH, "").strip() == "0" else find(release, nvcc)


def files(nvcc: str | None = None) -> list[str]:
    """The NVRTCs that are found as files, in the order in which :func:`find` tries them."""
    return [path for path in _places(nvcc) if os.path.dirname(path)]


def _places(nvcc: str | None) -> Iterator[str]:
    if nvcc:
        root = Path(os.path.realpath(nvcc)).parents[1]
        for folder in ("lib64", "lib", "targets/*/lib"):
            yield from _others(f"{glob.escape(str(root))}/{folder}/libnvrtc.so.*")
    yield from _wheels()
    yield from SONAMES


def _wheels() -> list[str]:
    """libnvrtc of NVIDIA's wheels, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return sorted((f for p in places for lib in ("cu*/lib", "cuda_nvrtc/lib")
                   for f in _others(f"{p}/{lib}/libnvrtc.so.*")), reverse=True)


def _others(pattern: str) -> list[str]:
    """Files of a pattern, in order; not the alternative builds for old systems."""
    return [f for f in sorted(glob.glob(pattern)) if ".alt." not in f]
