// Copies of many pieces at once: what joins requests along their batch and takes their answers apart again
// (custom_ops/merge.h).
#ifndef TS_JOIN_H_
#define TS_JOIN_H_

#include "ts_types.h"

// `rows` runs of `bytes` bytes; the next run lies a step further on either side.  As custom_ops/merge.h has it.
struct ts_piece {
  const char* from;
  char* to;
  int64_t rows, bytes, from_step, to_step;
};

template <class T>
static __device__ void ts_copy_as(const ts_piece& p) {
  const int64_t width = p.bytes / (int64_t)sizeof(T), count = p.rows * width;
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t row = p.rows == 1 ? 0 : i / width, at = i - row * width;
    ((T*)(p.to + row * p.to_step))[at] = ((const T*)(p.from + row * p.from_step))[at];
  }
}

// In accesses as wide as both sides allow.
static __device__ void ts_copy(const ts_piece& p) {
  const int64_t together = (int64_t)p.from | (int64_t)p.to | p.bytes | (p.rows == 1 ? 0 : p.from_step | p.to_step);
  if (together % 16 == 0) {
    ts_copy_as<uint4>(p);
  } else if (together % 4 == 0) {
    ts_copy_as<uint32_t>(p);
  } else {
    ts_copy_as<uint8_t>(p);
  }
}

// A text with this line has a kernel ts_copy_pieces; blockIdx.y is the piece.
#define TS_COPY_PIECES                                                                                 \
  extern "C" __global__ void __launch_bounds__(256) ts_copy_pieces(const ts_piece* __restrict__ all) { \
    ts_copy(all[blockIdx.y]);                                                                          \
  }

#endif  // TS_JOIN_H_
