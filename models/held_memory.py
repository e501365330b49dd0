"""What the process holds of memory, on the host and on the GPU."""
from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

MB = 2**20
PROCESSES, MOST_PROCESSES, UNKNOWN = "nvmlDeviceGetComputeRunningProcesses_v3", 256, 2**64 - 1


@dataclass(frozen=True)
class Held:
    """In MB.

    Attributes:
      resident: of the process, on the host.
      heap: of it, what malloc has given out (glibc's mallinfo2: without what is free but not given back).
      tensors: on the GPUs, what TensorFlow's allocator has given out.
      gpu: what the process has taken of all GPUs: TensorFlow's pool, and what the driver, libraries and this project's
        op library allocate.  Where the driver does not say whose memory is whose: what is taken of the first GPU.
    """

    resident: float
    heap: float
    tensors: float
    gpu: float

    @staticmethod
    def now() -> Held:
        """What is held now."""
        return Held(_resident_mb(), _heap_mb(), _tensors_mb(), _gpu_mb())


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / MB


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


@functools.cache
def _mallinfo() -> ctypes._CFuncPtr:
    found = ctypes.CDLL(None).mallinfo2
    found.restype = _MallInfo
    return found


def _heap_mb() -> float:
    info = _mallinfo()()
    return (info.uordblks + info.hblkhd) / MB


def _tensors_mb() -> float:
    if not tf.config.list_physical_devices("GPU"):
        return 0.0
    gpus = (d.name.rpartition("device:")[2] for d in tf.config.list_logical_devices("GPU"))
    return sum(tf.config.experimental.get_memory_info(gpu)["current"] for gpu in gpus) / MB


def _gpu_mb() -> float:
    if not tf.config.list_logical_devices("GPU"):
        return 0.0
    return _own_gpu_mb() or _taken_gpu_mb()


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h."""

    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint)]


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL("libnvidia-ml.so.1")
        return found if found.nvmlInit_v2() == 0 and hasattr(found, PROCESSES) else None
    except OSError:
        return None


def _own_gpu_mb() -> float:
    """This process's, of all GPUs; 0 where the driver does not say."""
    nvml, gpus, taken = _nvml(), ctypes.c_uint(), 0
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus)):
        return 0.0
    for gpu in range(gpus.value):
        handle, count, infos = ctypes.c_void_p(), ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        if nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(handle)) == 0 and (
                getattr(nvml, PROCESSES)(handle, ctypes.byref(count), infos) == 0):
            taken += sum(p.used for p in infos[:count.value] if p.pid == os.getpid() and p.used != UNKNOWN)
    return taken / MB


def _taken_gpu_mb() -> float:
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    try:
        _check(cuda.cuCtxPushCurrent_v2(context))
        try:
            _check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(0)
    return (total.value - free.value) / MB


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"The GPU's memory cannot be asked for: CUDA error {result}.")
