// Puts new values into variables: the writes of a training step whose arithmetic is in StitchedProgram nodes.
//
// The rewriter (tf_stitch/graph/updates.py) computes a variable's new value from what it read of it, where TensorFlow
// would add to the variable under its lock.  The value takes the variable's place only if nobody wrote to the variable
// since that read.  Whoever writes to a variable without putting another buffer in its place does so only while nobody
// shares its buffer (resource_var.h), and this op's input does: so the variable is as it was read exactly if it still
// has the buffer that was read.  Else, and where reads are copies, TensorFlow's own kernels add the difference.
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "inner_kernel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_stitch {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

REGISTER_OP("StitchedAssign")
    .Input("variables: N * resource")
    .Input("read: Tread")
    .Input("values: T")
    .Attr("N: int >= 1")
    .Attr("T: list(type) >= 1")
    .Attr("Tread: list(type) >= 0")
    .Attr("updated: list(int)")
    .Attr("validate_shape: list(bool)")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(R"doc(
Writes values to variables, in their order.

variables: their handles.
read: values that were read of some of the variables.
values: what to write, one for each variable.
updated: for each of `read`, the variable (an index) that it was read of. Such a variable gets its value as
  AssignAddVariableOp(variable, value - read) would write it.
validate_shape: whether a value must have its variable's shape, by variable; always so for those in `updated`.
)doc");

bool AreSame(const Tensor& a, const Tensor& b) {
  return a.data() == b.data() && a.dtype() == b.dtype() && a.shape() == b.shape() && a.SharesBufferWith(b);
}

class StitchedAssignOp : public OpKernel {
 public:
  explicit StitchedAssignOp(OpKernelConstruction* ctx) : OpKernel(ctx), graph_def_version_(ctx->graph_def_version()) {
    std::vector<int> updated;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &types_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("updated", &updated));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("validate_shape", &validate_shape_));
    first_value_ = count_ + static_cast<int>(updated.size());
    bool good = ctx->num_inputs() == first_value_ + count_ && validate_shape_.size() == types_.size();
    read_.assign(static_cast<size_t>(count_), -1);
    for (size_t i = 0; i < updated.size() && good; ++i) {
      int input = count_ + static_cast<int>(i);
      good = updated[i] >= 0 && updated[i] < count_ && ctx->input_type(input) == types_[updated[i]];
      if (good) read_[updated[i]] = input;
    }
    OP_REQUIRES(
        ctx, good,
        absl::InvalidArgumentError("StitchedAssign needs a type, a value and a validate_shape for each variable, "
                                   "and one of them for each value read."));
  }

  bool IsExpensive() override { return false; }  // no thread of its own is worth it

  void Compute(OpKernelContext* ctx) override {
    for (int i = 0; i < count_; ++i) {
      bool swapped = false;
      OP_REQUIRES_OK(ctx, Swap(ctx, i, &swapped));
      if (!swapped) OP_REQUIRES_OK(ctx, Write(ctx, i));
    }
  }

 private:
  // Puts the value in the variable's place where nothing but that is to be done.
  absl::Status Swap(OpKernelContext* ctx, int i, bool* swapped) const {
    tensorflow::core::RefCountPtr<Var> variable;
    absl::Status found = tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, i), &variable);
    if (!found.ok()) return read_[i] < 0 ? absl::OkStatus() : found;  // an assignment may make the variable
    const Tensor& value = ctx->input(first_value_ + i);
    Tensor old;  // freed without the lock
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* current = variable->tensor();
    *swapped = variable->is_initialized && !variable->copy_on_read_mode.load() && current->dtype() == value.dtype() &&
               current->shape() == value.shape() && (read_[i] < 0 || AreSame(*current, ctx->input(read_[i])));
    if (*swapped) {
      old = std::move(*current);
      *current = value;
    }
    return absl::OkStatus();
  }

  // The write as TensorFlow does it.
  absl::Status Write(OpKernelContext* ctx, int i) {
    Tensor value = ctx->input(first_value_ + i);
    Kernels* kernels = nullptr;
    TF_RETURN_IF_ERROR(KernelsOf(ctx, i, &kernels));
    if (kernels->difference) {
      TF_RETURN_IF_ERROR(kernels->difference->Run(ctx, {value, ctx->input(read_[i])}, &value));
    }
    return kernels->write->Run(ctx, {ctx->input(i), value}, nullptr);
  }

  struct Kernels {
    std::unique_ptr<InnerKernel> difference, write;
  };

  absl::Status KernelsOf(OpKernelContext* ctx, int i, Kernels** out) {
    std::lock_guard<std::mutex> lock(mu_);
    kernels_.resize(static_cast<size_t>(count_));
    Kernels& made = kernels_[i];
    *out = &made;
    if (made.write) return absl::OkStatus();
    bool updated = read_[i] >= 0;
    if (updated) {
      tensorflow::NodeDef node = NodeOf("/difference", "Sub", {"value", "read"});
      (*node.mutable_attr())["T"].set_type(types_[i]);
      TF_RETURN_IF_ERROR(InnerKernel::Make(ctx, node, graph_def_version_, &made.difference));
    }
    tensorflow::NodeDef node =
        NodeOf("/write", updated ? "AssignAddVariableOp" : "AssignVariableOp", {"variable", "value"});
    (*node.mutable_attr())["dtype"].set_type(types_[i]);
    if (!updated) (*node.mutable_attr())["validate_shape"].set_b(validate_shape_[i]);
    return InnerKernel::Make(ctx, node, graph_def_version_, &made.write);
  }

  tensorflow::NodeDef NodeOf(const char* suffix, const char* op, std::initializer_list<const char*> inputs) const {
    tensorflow::NodeDef node;
    node.set_name(name() + suffix);
    node.set_op(op);
    for (const char* input : inputs) node.add_input(input);
    return node;
  }

  const int graph_def_version_;
  int count_ = 0, first_value_ = 0;
  std::vector<DataType> types_;
  std::vector<bool> validate_shape_;
  std::vector<int> read_;  // by variable: the input with what was read of it, or -1
  std::mutex mu_;
  std::vector<Kernels> kernels_;  // by variable, made when first needed
};

REGISTER_KERNEL_BUILDER(Name("StitchedAssign").Device(tensorflow::DEVICE_CPU), StitchedAssignOp);
REGISTER_KERNEL_BUILDER(Name("StitchedAssign").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
                        StitchedAssignOp);

}  // namespace
}  // namespace tf_stitch
