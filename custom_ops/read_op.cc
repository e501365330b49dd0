// Reads many variables in one operation: an executor's node takes longer than the read.
//
// The hook puts it in place of the reads of a function (tf_stitch/graph/reads.py).  Whatever is not a plain read (a
// variable whose readers must copy, one that is not there) is done by TensorFlow's kernel, with its errors.
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "inner_kernel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_stitch {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

REGISTER_OP("StitchedRead")
    .Input("variables: N * resource")
    .Output("values: dtypes")
    .Attr("N: int >= 1")
    .Attr("dtypes: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) {
        const auto* found = c->input_handle_shapes_and_types(i);
        c->set_output(i, found && !found->empty() ? (*found)[0].shape : c->UnknownShape());
      }
      return absl::OkStatus();
    })
    .Doc("The values of variables, as a ReadVariableOp of each gives them.");

class StitchedReadOp : public OpKernel {
 public:
  explicit StitchedReadOp(OpKernelConstruction* ctx) : OpKernel(ctx), graph_def_version_(ctx->graph_def_version()) {
    OP_REQUIRES(ctx, ctx->num_inputs() == ctx->num_outputs(),
                absl::InvalidArgumentError("StitchedRead needs a type for each variable."));
    kernels_.resize(static_cast<size_t>(ctx->num_inputs()));
  }

  bool IsExpensive() override { return false; }  // no thread of its own is worth it

  void Compute(OpKernelContext* ctx) override {
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (!Share(ctx, i)) OP_REQUIRES_OK(ctx, Read(ctx, i));
    }
  }

 private:
  // Hands out the variable's buffer; false where that is not all there is to do.
  bool Share(OpKernelContext* ctx, int i) const {
    tensorflow::core::RefCountPtr<Var> variable;
    if (!tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, i), &variable).ok()) return false;
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& value = *variable->tensor();
    if (variable->copy_on_read_mode.load() || value.dtype() != output_type(i)) return false;
    ctx->set_output(i, value);
    return true;
  }

  absl::Status Read(OpKernelContext* ctx, int i) {
    InnerKernel* kernel = nullptr;
    TF_RETURN_IF_ERROR(KernelOf(ctx, i, &kernel));
    Tensor value;
    TF_RETURN_IF_ERROR(kernel->Run(ctx, {ctx->input(i)}, &value));
    ctx->set_output(i, value);
    return absl::OkStatus();
  }

  absl::Status KernelOf(OpKernelContext* ctx, int i, InnerKernel** out) {
    std::lock_guard<std::mutex> lock(mu_);
    std::unique_ptr<InnerKernel>& made = kernels_[static_cast<size_t>(i)];
    if (!made) {
      tensorflow::NodeDef node;
      node.set_name(name() + "/read");
      node.set_op("ReadVariableOp");
      node.add_input("variable");
      (*node.mutable_attr())["dtype"].set_type(output_type(i));
      TF_RETURN_IF_ERROR(InnerKernel::Make(ctx, node, graph_def_version_, &made));
    }
    *out = made.get();
    return absl::OkStatus();
  }

  const int graph_def_version_;
  std::mutex mu_;
  std::vector<std::unique_ptr<InnerKernel>> kernels_;  // by variable, made when first needed
};

REGISTER_KERNEL_BUILDER(Name("StitchedRead").Device(tensorflow::DEVICE_CPU), StitchedReadOp);
REGISTER_KERNEL_BUILDER(Name("StitchedRead").Device(tensorflow::DEVICE_GPU).HostMemory("variables"), StitchedReadOp);

}  // namespace
}  // namespace tf_stitch
