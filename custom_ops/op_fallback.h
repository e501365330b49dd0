// Runs the operations that a StitchedProgram node replaced.
#ifndef TF_STITCH_CUSTOM_OPS_OP_FALLBACK_H_
#define TF_STITCH_CUSTOM_OPS_OP_FALLBACK_H_

#include <functional>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_stitch {

// The status of a run that would need the fallback where there is no function library to run it with.
absl::Status NoFallback();
bool IsNoFallback(const absl::Status& status);

// A node's fallback function, instantiated once for each runtime that asks.
//
// On a GPU the function's operations are placed again (some may have CPU kernels only), and its arguments and results
// lie where functions have them: int32 in host memory, the rest on the device.  What lies elsewhere is copied, and
// waited for.
class Fallback {
 public:
  Fallback(tensorflow::NameAttrList function, bool on_gpu) : function_(std::move(function)), on_gpu_(on_gpu) {}

  void Run(tensorflow::OpKernelContext* ctx, tensorflow::AsyncOpKernel::DoneCallback done);

 private:
  using Runtime = tensorflow::FunctionLibraryRuntime;
  struct State;

  // Runs the function with state->options, whose runner is set; `state` must live until `done` is called.
  void Start(tensorflow::OpKernelContext* ctx, State* state, Runtime::DoneCallback done);
  absl::Status Instantiate(Runtime* lib, tensorflow::OpKernelContext* ctx, Runtime::Handle* handle);
  absl::Status Place(Runtime* lib, tensorflow::OpKernelContext* ctx, Runtime::InstantiateOptions* options) const;

  const tensorflow::NameAttrList function_;
  const bool on_gpu_;
  std::mutex mu_;
  std::unordered_map<Runtime*, Runtime::Handle> handles_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_OP_FALLBACK_H_
