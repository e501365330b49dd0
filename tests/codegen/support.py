"""Compiles kernels of many groups in one run and calls them through ctypes, without the op."""
from __future__ import annotations

import ctypes
import itertools
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tf_stitch.codegen import HOST_FLAGS, Kernel, emit, level_flags, translation_unit
from tf_stitch.ir import dims as D
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.graph import Graph, Node
from tf_stitch.schedule import HOST, Schedule, Target, build
from tf_stitch.schedule.group import Group


class Problem(ctypes.Structure):
    _fields_ = [("buffers", ctypes.POINTER(ctypes.c_void_p)), ("dims", ctypes.POINTER(ctypes.c_int64)),
                ("blocks", ctypes.c_int64)]


def whole(graph: Graph) -> Group:
    """The group that holds a graph's every compute node."""
    nodes = [n for n in graph.nodes() if n.op != "param"]
    outputs = tuple(dict.fromkeys(o for o in graph.outputs if o.op != "param"))
    return Group(tuple(nodes), tuple(graph.params), outputs)


def kernel_of(graph: Graph, target: Target = HOST, wanted: Schedule | None = None) -> Kernel:
    """One kernel for a whole graph."""
    return emit(build(whole(graph), target, wanted))


FENCE = 256  # bytes around every buffer that no kernel may touch


def fenced(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A 64-byte aligned byte array of ``size`` and the whole memory it lies in."""
    memory = np.full(size + 2 * FENCE + 64, 0xFF, np.uint8)
    start = FENCE + -(memory.ctypes.data + FENCE) % 64
    return memory[start:start + size], memory


def fences_hold(part: np.ndarray, memory: np.ndarray) -> bool:
    """True when nothing outside ``part`` was written."""
    start = part.ctypes.data - memory.ctypes.data
    return bool((memory[:start] == 0xFF).all() and (memory[start + part.size:] == 0xFF).all())


@dataclass
class Library:
    """Compiled kernels."""

    dll: ctypes.CDLL

    def run(self, kernel: Kernel, env: Mapping[str, int], values: Mapping[Node, np.ndarray],
            splits: Sequence[float] = (0.0, 1.0)) -> tuple[dict[Node, np.ndarray], int]:
        """Outputs of a kernel (by node) and its status; the blocks are run in the ranges that ``splits`` cut."""
        arrays, outputs, checks = [], {}, []
        for n in kernel.args:
            if n in values:
                arrays.append(np.ascontiguousarray(values[n]))
                continue
            shape = tuple(D.evaluate(d, env) for d in n.shape)
            dtype = DTYPES[n.dtype].numpy
            part, memory = fenced(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            outputs[n] = part.view(dtype).reshape(shape)
            outputs[n][...] = np.asarray(77).astype(dtype)
            checks.append((part, memory))
            arrays.append(part)
        pointers = (ctypes.c_void_p * max(len(arrays), 1))(*[a.ctypes.data for a in arrays])
        dims = (ctypes.c_int64 * max(len(kernel.dims), 1))(*[D.evaluate(d, env) for d in kernel.dims])
        blocks = D.evaluate(kernel.blocks, env)
        problem = Problem(pointers, dims, blocks)
        checks.append(fenced(D.evaluate(kernel.shared_bytes, env)))
        status = ctypes.c_int32(0)
        function = getattr(self.dll, kernel.name)
        cuts = [round(s * blocks) for s in splits]
        for begin, end in itertools.pairwise(cuts):
            function(ctypes.byref(problem), ctypes.c_int64(begin), ctypes.c_int64(end),
                     ctypes.c_void_p(checks[-1][0].ctypes.data), ctypes.byref(status))
        assert all(fences_hold(*c) for c in checks), f"{kernel.name} wrote outside a buffer"
        return outputs, status.value


def compile_kernels(kernels: Sequence[Kernel], level: str = "x86-64-v3", optimize: str = "-O3") -> Library:
    """Compiles kernels with g++ into one library."""
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "k.cc", folder / "k.so"
    source.write_text(translation_unit(kernels, "host"))
    command = ["g++", *HOST_FLAGS, f"-march={level}", *level_flags(level), optimize, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return Library(ctypes.CDLL(str(library)))
