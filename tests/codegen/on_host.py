"""Runs whole programs with their grids: text for a GPU with the host's meaning, or its threads one by one."""
from __future__ import annotations

import ctypes

import numpy as np

from tests.codegen.support import fenced, fences_hold
from tf_stitch.backend import host
from tf_stitch.ir import dims as D
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.program.program import KernelStep, LibraryStep
from tf_stitch.program.table import make_table


class OnHost:
    """A program's steps and grids, run one after the other from one compiled text."""

    def __init__(self, program, dll):
        self.program, self.dll, self.holders = program, dll, program.holders()

    def run(self, inputs, blocks):
        """Outputs; ``blocks`` thread blocks take turns in a grid (0: its steps run one by one)."""
        p = self.program
        env = host.bind(p, inputs)
        sizes = [int(np.prod([D.evaluate(d, env) for d in b.shape], dtype=np.int64)) * DTYPES[b.dtype].size
                 for b in p.buffers]
        self.offset, at = {}, 0
        for i, size in enumerate(sizes):
            if i not in self.holders:
                self.offset[i], at = at, at + -(-size // 64) * 64 + 64
        self.arena, self.around = fenced(at)
        self.memory = {i: np.ascontiguousarray(inputs[p.buffers[i].index]).reshape(-1).view(np.uint8).copy()
                       if p.buffers[i].kind == "input" else np.full(sizes[i] + 64, 0xFF, np.uint8)
                       for i in set(self.holders.values())}
        starts = {g.first: g for g in p.grids} if blocks else {}
        inside = {i for g in starts.values() for i in range(g.first, g.end)}
        for i, step in enumerate(p.steps):
            if i in starts:
                self._grid(starts[i], env, blocks)
            elif isinstance(step, KernelStep) and i not in inside:
                self._step(step, env)
            elif isinstance(step, LibraryStep):
                arrays = [self._view(b, env) for b in step.buffers]
                host.call_library(step, arrays, env)
        assert fences_hold(self.arena, self.around)
        outputs = sorted((b.index, i) for i, b in enumerate(p.buffers) if b.kind == "output")
        return [self._view(i, env).reshape([D.evaluate(d, env) for d in p.buffers[i].shape]).copy()
                for _, i in outputs]

    def _address(self, i):
        return self.memory[self.holders[i]].ctypes.data if i in self.holders else (
            self.arena.ctypes.data + self.offset[i])

    def _view(self, i, env):
        b = self.program.buffers[i]
        size = int(np.prod([D.evaluate(d, env) for d in b.shape], dtype=np.int64)) * DTYPES[b.dtype].size
        base = self.memory[self.holders[i]] if i in self.holders else self.arena[self.offset[i]:]
        return base[:size].view(DTYPES[b.dtype].numpy)

    def _step(self, step, env):
        buffers = (ctypes.c_void_p * max(len(step.buffers), 1))(*map(self._address, step.buffers))
        dims = (ctypes.c_int64 * max(len(step.dims), 1))(*(D.evaluate(d, env) for d in step.dims))
        blocks = D.evaluate(step.blocks, env)
        problem = (ctypes.c_int64 * 3)(ctypes.addressof(buffers), ctypes.addressof(dims), blocks)
        shared, status = fenced(D.evaluate(step.shared_bytes, env))[0], ctypes.c_int32(0)
        getattr(self.dll, step.kernel)(problem, ctypes.c_int64(0), ctypes.c_int64(blocks),
                                       ctypes.c_void_p(shared.ctypes.data), ctypes.byref(status))
        assert status.value == 0

    def _grid(self, grid, env, blocks):
        def place(i):
            return (1 + grid.bases.index(self.holders[i]), 0) if i in self.holders else (0, self.offset[i])

        table = make_table(self.program, grid, env, place)
        if not table.phases:
            return
        blocks = table.most_blocks if grid.is_pack else blocks
        table.keep(grid, blocks)
        counters = np.zeros(table.phases + 1, np.uint32)
        bases = [self.arena.ctypes.data, *(self._address(b) for b in grid.bases)]
        parameter = np.array([table.records.ctypes.data, table.words.ctypes.data, counters.ctypes.data, 0,
                              table.problems if grid.is_pack else table.phases, -1, *bases], np.int64)
        shared, around = fenced(table.shared_bytes)
        status = ctypes.c_int32(0)
        getattr(self.dll, grid.kernel)(ctypes.c_void_p(parameter.ctypes.data), ctypes.c_int64(blocks),
                                       ctypes.c_void_p(shared.ctypes.data), ctypes.byref(status))
        assert status.value == 0 and fences_hold(shared, around)
        before = table.records[:-2, 7]
        waited = [r for r in table.records[:-2] if r[0]]
        assert all(counters[r[0]] == min(blocks, r[7]) for r in waited), "somebody would wait on"
        assert len(before)


def compiled(programs, meaning=host.PRELUDE):
    """One library of the texts of many programs."""
    texts = dict.fromkeys(part for p in programs for part in p.text.split("\n//\n"))
    return host.load_code(host.compile_text(meaning + "\n".join(texts))[host.native_level()])
