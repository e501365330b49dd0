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

#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_stitch {
namespace {

using tensorflow::DataType;
using tensorflow::Device;
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

// A kernel of TensorFlow's, run inside of another kernel's run.
class Kernel {
 public:
  static absl::Status Make(OpKernelContext* ctx, const tensorflow::NodeDef& node, int graph_def_version,
                           std::unique_ptr<Kernel>* out) {
    auto* device = static_cast<Device*>(ctx->device());
    std::shared_ptr<const tensorflow::NodeProperties> properties;
    TF_RETURN_IF_ERROR(
        tensorflow::NodeProperties::CreateFromNodeDef(node, tensorflow::OpRegistry::Global(), &properties));
    OpKernel* kernel = nullptr;
    TF_RETURN_IF_ERROR(tensorflow::CreateOpKernel(tensorflow::DeviceType(device->device_type()), device,
                                                  device->GetAllocator({}), /*flib=*/nullptr, ctx->resource_manager(),
                                                  properties, graph_def_version, &kernel));
    out->reset(new Kernel(kernel));
    return absl::OkStatus();
  }

  // `result` may be null for an op without one.
  absl::Status Run(OpKernelContext* ctx, std::vector<Tensor> inputs, Tensor* result) {
    std::vector<tensorflow::TensorValue> values;
    for (Tensor& t : inputs) values.emplace_back(&t);
    OpKernelContext::Params params;
    params.op_kernel = kernel_.get();
    params.device = ctx->device();
    params.resource_manager = ctx->resource_manager();
    params.inputs = values;
    params.input_alloc_attrs = inputs_;
    params.output_attr_array = outputs_.data();
    params.op_device_context = ctx->op_device_context();
    params.runner = ctx->runner();
    params.step_id = ctx->step_id();
    OpKernelContext inner(&params);
    static_cast<Device*>(ctx->device())->Compute(kernel_.get(), &inner);
    if (inner.status().ok() && result) *result = *inner.mutable_output(0);
    return inner.status();
  }

 private:
  explicit Kernel(OpKernel* kernel) : kernel_(kernel) {
    for (tensorflow::MemoryType memory : kernel_->input_memory_types()) inputs_.push_back(On(memory));
    for (tensorflow::MemoryType memory : kernel_->output_memory_types()) outputs_.push_back(On(memory));
  }

  static tensorflow::AllocatorAttributes On(tensorflow::MemoryType memory) {
    tensorflow::AllocatorAttributes attributes;
    attributes.set_on_host(memory == tensorflow::HOST_MEMORY);
    return attributes;
  }

  const std::unique_ptr<OpKernel> kernel_;
  std::vector<tensorflow::AllocatorAttributes> inputs_, outputs_;
};

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
    std::unique_ptr<Kernel> difference, write;
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
      TF_RETURN_IF_ERROR(Kernel::Make(ctx, node, graph_def_version_, &made.difference));
    }
    tensorflow::NodeDef node =
        NodeOf("/write", updated ? "AssignAddVariableOp" : "AssignVariableOp", {"variable", "value"});
    (*node.mutable_attr())["dtype"].set_type(types_[i]);
    if (!updated) (*node.mutable_attr())["validate_shape"].set_b(validate_shape_[i]);
    return Kernel::Make(ctx, node, graph_def_version_, &made.write);
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
