"""The programs of tests/op/programs.py with their kernels written for a GPU."""
from __future__ import annotations

import ctypes
import dataclasses
import functools

from tf_stitch import runtime
from tf_stitch.backend import cuda
from tf_stitch.program.program import Program

TEXT = r"""
template <int NB, int ND> struct test_args { void* buffers[NB]; int64_t dims[ND]; int64_t blocks; };
#define TEST_KERNEL(name, NB, ND) extern "C" __global__ void name(const __grid_constant__ test_args<NB, ND> p)

// 64 elements of a block of 256 threads, as the host's kernels have it
#define TEST_EACH(i, n) if (const int64_t i = blockIdx.x * int64_t(64) + threadIdx.x; threadIdx.x < 64 && i < (n))

TEST_KERNEL(t_axpb, 2, 1) {
  TEST_EACH(i, p.dims[0]) ((float*)p.buffers[1])[i] = 2.0f * ((const float*)p.buffers[0])[i] + 1.0f;
}
TEST_KERNEL(t_mul, 3, 1) {
  TEST_EACH(i, p.dims[0])
    ((float*)p.buffers[2])[i] = ((const float*)p.buffers[0])[i] * ((const float*)p.buffers[1])[i];
}
TEST_KERNEL(t_rowsum, 2, 1) {
  extern __shared__ char test_shared[];
  float* row = (float*)test_shared;
  const float* x = (const float*)p.buffers[0] + blockIdx.x * p.dims[0];
  for (int64_t i = threadIdx.x; i < p.dims[0]; i += blockDim.x) row[i] = x[i];
  __syncthreads();
  if (threadIdx.x) return;
  float sum = 0;
  for (int64_t i = 0; i < p.dims[0]; ++i) sum += row[i];
  ((float*)p.buffers[1])[blockIdx.x] = sum;
}
TEST_KERNEL(t_gather, 3, 1) {
  if (threadIdx.x) return;
  int32_t at = ((const int32_t*)p.buffers[1])[blockIdx.x];
  ((float*)p.buffers[2])[blockIdx.x] = at < 0 || at >= p.dims[0] ? 0.0f : ((const float*)p.buffers[0])[at];
}
TEST_KERNEL(t_fill, 1, 1) {
  if (!threadIdx.x) ((int64_t*)p.buffers[0])[blockIdx.x] = p.dims[0];
}
"""


@functools.cache
def code(text: str = TEXT) -> dict[str, bytes]:
    """Machine code of ``text`` for the GPU at hand, and PTX."""
    return cuda.compile_text(text)


def on_gpu(program: Program, text: str = TEXT, **changes) -> Program:
    """A program of tests/op/programs.py with GPU code in place of the host's."""
    kernels = any(getattr(s, "kernel", None) for s in program.steps)
    return dataclasses.replace(program, **{"text": text, "code": code(text) if kernels else {}, **changes})


def graph_counters() -> tuple[int, int, int]:
    """CUDA graphs launched, made, given other addresses, so far in this process."""
    runtime.load()
    values = (ctypes.c_int64 * 3)()
    runtime.library().tf_stitch_graph_counters(values)
    return tuple(values)
