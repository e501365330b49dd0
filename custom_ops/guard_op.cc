// All assertions of a function in one op: where they hold, it does nothing.
//
// TensorFlow makes a conditional of each assertion: a switch for every tensor that its message may show, a copy of its
// condition to the host, a merge to wait for.  The rewriter (tf_stitch/graph/guards.py) has one condition computed
// where the others are, of all of them; only where it does not hold TensorFlow's own nodes run, and say what is wrong.
#include <memory>
#include <string>
#include <utility>

#include "cuda_driver.h"
#include "op_fallback.h"
#include "staging_cuda.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "xla/stream_executor/stream.h"

namespace tf_stitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("StitchedGuard")
    .Input("holds: bool")
    .Input("args: Tin")
    .Attr("Tin: list(type) >= 0")
    .Attr("fallback: func")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle scalar;
      return c->WithRank(c->input(0), 0, &scalar);
    })
    .Doc(R"doc(
Runs a function that raises an error, unless a condition holds.

holds: a scalar.
args: what the function takes besides the condition, which is its first argument.
fallback: a function without results.
)doc");

// A kernel; `on_gpu`: the condition lies on the device.
class StitchedGuardOp : public AsyncOpKernel {
 public:
  StitchedGuardOp(OpKernelConstruction* ctx, bool on_gpu) : AsyncOpKernel(ctx), on_gpu_(on_gpu) {
    tensorflow::NameAttrList function;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fallback", &function));
    fallback_ = std::make_unique<Fallback>(std::move(function), on_gpu);
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Tensor holds = ctx->input(0);
    OP_REQUIRES_ASYNC(ctx, tensorflow::TensorShapeUtils::IsScalar(holds.shape()),
                      absl::InvalidArgumentError("The condition of a StitchedGuard is no scalar."), done);
    if (on_gpu_ && ctx->input_memory_type(0) == tensorflow::DEVICE_MEMORY) {
      OP_REQUIRES_OK_ASYNC(ctx, Fetch(ctx, &holds), done);
    }
    if (holds.scalar<bool>()()) return done();
    fallback_->Run(ctx, std::move(done));
  }

 private:
  // Puts a tensor of the device into host memory, and waits for that.
  static absl::Status Fetch(OpKernelContext* ctx, Tensor* tensor) {
    tensorflow::AllocatorAttributes host;
    host.set_on_host(true);
    host.set_gpu_compatible(true);
    Tensor copy;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensor->dtype(), tensor->shape(), &copy, host));
    std::string error;
    const cuda::Driver* driver = cuda::LoadDriver(&error);
    if (!driver) return absl::InternalError(error);
    auto stream = static_cast<cuda::Stream>(ctx->op_device_context()->stream()->platform_specific_handle().stream);
    cuda::Context context;
    cuda::Result result = driver->StreamGetCtx(stream, &context);
    if (!result) {
      cuda::ScopedContext scope(*driver, context);
      result = driver->MemcpyDtoHAsync(copy.data(), tensor->data(), copy.TotalBytes(), stream);
      cuda::Result waited = cuda::Staging::Of(*driver, context).Wait(stream);
      if (!result) result = waited;
    }
    if (result) return absl::InternalError(cuda::Failed(*driver, result, "reading a condition"));
    *tensor = std::move(copy);
    return absl::OkStatus();
  }

  const bool on_gpu_;
  std::unique_ptr<Fallback> fallback_;
};

class StitchedGuardCpuOp : public StitchedGuardOp {
 public:
  explicit StitchedGuardCpuOp(OpKernelConstruction* ctx) : StitchedGuardOp(ctx, /*on_gpu=*/false) {}
};

class StitchedGuardGpuOp : public StitchedGuardOp {
 public:
  explicit StitchedGuardGpuOp(OpKernelConstruction* ctx) : StitchedGuardOp(ctx, /*on_gpu=*/true) {}
};

REGISTER_KERNEL_BUILDER(Name("StitchedGuard").Device(tensorflow::DEVICE_CPU), StitchedGuardCpuOp);
REGISTER_KERNEL_BUILDER(Name("StitchedGuard").Device(tensorflow::DEVICE_GPU), StitchedGuardGpuOp);

}  // namespace
}  // namespace tf_stitch
