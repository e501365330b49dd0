// A kernel of TensorFlow's, run inside of another kernel's run.
#ifndef TF_STITCH_CUSTOM_OPS_INNER_KERNEL_H_
#define TF_STITCH_CUSTOM_OPS_INNER_KERNEL_H_

#include <memory>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace tf_stitch {

class InnerKernel {
 public:
  // For the device of `ctx`; the node's inputs need no nodes.
  static absl::Status Make(tensorflow::OpKernelContext* ctx, const tensorflow::NodeDef& node, int graph_def_version,
                           std::unique_ptr<InnerKernel>* out);

  // `result` may be null for an op without one.
  absl::Status Run(tensorflow::OpKernelContext* ctx, std::vector<tensorflow::Tensor> inputs,
                   tensorflow::Tensor* result) const;

 private:
  explicit InnerKernel(tensorflow::OpKernel* kernel);

  const std::unique_ptr<tensorflow::OpKernel> kernel_;
  std::vector<tensorflow::AllocatorAttributes> inputs_, outputs_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_INNER_KERNEL_H_
