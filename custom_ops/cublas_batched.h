// Matrix products whose operands lie in separate allocations, many in one launch: what a superkernel of library calls
// is.
#ifndef TF_STITCH_CUSTOM_OPS_CUBLAS_BATCHED_H_
#define TF_STITCH_CUSTOM_OPS_CUBLAS_BATCHED_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cublas_lt.h"
#include "cuda_driver.h"

namespace tf_stitch::cuda {

// Products of one shape: out[i] = op(lhs[i]) @ op(rhs[i]), where lhs, rhs and out are arrays of `shape.batch`
// addresses. The faster of cuBLASLt's algorithms and cuBLAS's own choice is measured once per class of shapes
// (autotune.h).  Any thread may run it.
class PointerBatch {
 public:
  // The shape has no epilogue and broadcasts nothing; its `pointers` is set here.  Null with the reason in `error`.
  static std::shared_ptr<const PointerBatch> Get(const MatmulShape& shape, std::string* error);
  ~PointerBatch();

  size_t workspace_bytes() const;
  // Enqueues the products.  The arrays lie in device memory and hold addresses that are multiples of kMatmulAlignment;
  // they are read when the products run.  "" or the error.
  std::string Run(const void* const* lhs, const void* const* rhs, void* const* out, void* workspace,
                  Stream stream) const;

 private:
  PointerBatch();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_CUBLAS_BATCHED_H_
