// Matrix products through cuBLASLt, loaded with dlopen; TensorFlow's GPU wheel brings the library.
//
// The library proposes algorithms (tiles, split-K, ...); the fastest is measured once per class of shapes (autotune.h).
#ifndef TF_STITCH_CUSTOM_OPS_CUBLAS_LT_H_
#define TF_STITCH_CUSTOM_OPS_CUBLAS_LT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

constexpr uintptr_t kMatmulAlignment = 16;  // bytes that every operand's address is a multiple of

// out[b] = op(lhs[b]) @ op(rhs[b]) (+ bias along n), all row-major and densely packed.  The library's ReLU is not used:
// with TF32 it makes 0 of NaN.  Nor is its GELU: its tanh is off by 2e-6.
struct MatmulShape {
  int dtype;                          // TensorFlow's DataType number: half, bfloat16, float or double
  int64_t batch, m, n, k;             // lhs m x k, rhs k x n, out m x n
  bool trans_lhs, trans_rhs;          // the operand is stored transposed
  bool broadcast_lhs, broadcast_rhs;  // one matrix for the whole batch
  bool bias;
  bool tf32;              // float may use TF32 tensor cores
  bool pointers = false;  // lhs, rhs and out are arrays of `batch` addresses in device memory; no bias, no broadcast
};

// A product with its descriptors and chosen algorithm; any thread may run it.
class Matmul {
 public:
  // The product of a shape on the current context's device, made once; the most recently used ones are kept.  Returns
  // null and sets `error` when cuBLASLt is missing or has no algorithm.  Measures algorithms where TuningAllowed().
  static std::shared_ptr<const Matmul> Get(const MatmulShape& shape, std::string* error);
  ~Matmul();

  size_t workspace_bytes() const;
  // Enqueues the product.  `bias` may be null when the shape has none.  "" or the error.
  std::string Run(const void* lhs, const void* rhs, const void* bias, void* out, void* workspace, Stream stream) const;

 private:
  Matmul();
  static std::shared_ptr<const Matmul> Make(const MatmulShape& shape, std::string* error);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_CUBLAS_LT_H_
