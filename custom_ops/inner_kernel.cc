#include "inner_kernel.h"

#include "moves.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"

namespace tf_stitch {

using tensorflow::AllocatorAttributes;
using tensorflow::Device;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status InnerKernel::Make(OpKernelContext* ctx, const tensorflow::NodeDef& node, int graph_def_version,
                               std::unique_ptr<InnerKernel>* out) {
  auto* device = static_cast<Device*>(ctx->device());
  std::shared_ptr<const tensorflow::NodeProperties> properties;
  TF_RETURN_IF_ERROR(
      tensorflow::NodeProperties::CreateFromNodeDef(node, tensorflow::OpRegistry::Global(), &properties));
  OpKernel* kernel = nullptr;
  TF_RETURN_IF_ERROR(tensorflow::CreateOpKernel(tensorflow::DeviceType(device->device_type()), device,
                                                device->GetAllocator({}), /*flib=*/nullptr, ctx->resource_manager(),
                                                properties, graph_def_version, &kernel));
  out->reset(new InnerKernel(kernel));
  return absl::OkStatus();
}

absl::Status InnerKernel::Run(OpKernelContext* ctx, std::vector<Tensor> inputs, Tensor* result) const {
  std::vector<tensorflow::TensorValue> values;
  for (Tensor& t : inputs) values.emplace_back(&t);
  OpKernelContext::Params params;
  params.op_kernel = kernel_.get();
  params.device = ctx->device();
  params.resource_manager = ctx->resource_manager();
  params.inputs = values;
  params.input_alloc_attrs = inputs_;
  params.output_attr_array = const_cast<AllocatorAttributes*>(outputs_.data());
  params.op_device_context = ctx->op_device_context();
  params.runner = ctx->runner();
  params.step_id = ctx->step_id();
  OpKernelContext inner(&params);
  static_cast<Device*>(ctx->device())->Compute(kernel_.get(), &inner);
  if (inner.status().ok() && result) *result = *inner.mutable_output(0);
  return inner.status();
}

InnerKernel::InnerKernel(OpKernel* kernel) : kernel_(kernel) {
  for (tensorflow::MemoryType memory : kernel_->input_memory_types()) inputs_.push_back(On(memory));
  for (tensorflow::MemoryType memory : kernel_->output_memory_types()) outputs_.push_back(On(memory));
}

}  // namespace tf_stitch
