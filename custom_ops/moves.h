// Where tensors lie, and how they come to lie elsewhere.
#ifndef TF_STITCH_CUSTOM_OPS_MOVES_H_
#define TF_STITCH_CUSTOM_OPS_MOVES_H_

#include "tensorflow/core/framework/op_kernel.h"

namespace tf_stitch {

tensorflow::AllocatorAttributes On(tensorflow::MemoryType memory);

// `from` lies in memory of one type of the device's; sets `to` to it or to a copy in memory of the other, which is
// waited for.
absl::Status Move(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& from, tensorflow::MemoryType has,
                  tensorflow::MemoryType wants, tensorflow::Tensor* to);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_MOVES_H_
