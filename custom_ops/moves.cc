#include "moves.h"

#include "tensorflow/core/framework/device.h"

namespace tf_stitch {

using tensorflow::AllocatorAttributes;
using tensorflow::Device;
using tensorflow::MemoryType;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

AllocatorAttributes On(MemoryType memory) {
  AllocatorAttributes attributes;
  attributes.set_on_host(memory == tensorflow::HOST_MEMORY);
  return attributes;
}

absl::Status Move(OpKernelContext* ctx, const Tensor& from, MemoryType has, MemoryType wants, Tensor* to) {
  if (has == wants || from.NumElements() == 0) {
    *to = from;
    return absl::OkStatus();
  }
  tensorflow::AllocatorAttributes attributes;
  attributes.set_on_host(wants == tensorflow::HOST_MEMORY);
  attributes.set_gpu_compatible(true);
  TF_RETURN_IF_ERROR(ctx->allocate_temp(from.dtype(), from.shape(), to, attributes));
  auto* device = static_cast<Device*>(ctx->device());
  tensorflow::DeviceContext* copier = ctx->op_device_context();
  return wants == tensorflow::HOST_MEMORY ? copier->CopyDeviceTensorToCPUSync(&from, "", device, to)
                                          : copier->CopyCPUTensorToDeviceSync(&from, device, to);
}

}  // namespace tf_stitch
