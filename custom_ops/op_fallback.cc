#include "op_fallback.h"

#include <memory>
#include <string>
#include <utility>

#include "counters.h"
#include "moves.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/memory_types.h"

namespace tf_stitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::Device;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::MemoryType;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status SetOutputs(OpKernelContext* ctx, const std::vector<Tensor>& results, bool on_gpu) {
  bool fits = static_cast<int>(results.size()) == ctx->num_outputs();
  for (int i = 0; fits && i < ctx->num_outputs(); ++i) fits = results[i].dtype() == ctx->expected_output_dtype(i);
  if (!fits) {
    return absl::InvalidArgumentError("The fallback function of a StitchedProgram returns other types than " +
                                      ctx->op_kernel().name() + " has outputs; rewrite the model again.");
  }
  for (int i = 0; i < ctx->num_outputs(); ++i) {
    Tensor result = results[i];
    if (on_gpu) {
      MemoryType has = tensorflow::MTypeFromDType(result.dtype());
      TF_RETURN_IF_ERROR(Move(ctx, results[i], has, ctx->output_memory_type(i), &result));
    }
    ctx->set_output(i, result);
  }
  return absl::OkStatus();
}

}  // namespace

constexpr char kNoFallback[] = "tf_stitch/no_fallback";  // a status payload

absl::Status NoFallback() {
  absl::Status status = absl::FailedPreconditionError("There is no function library to run a stitched fallback with.");
  status.SetPayload(kNoFallback, absl::Cord());
  return status;
}

bool IsNoFallback(const absl::Status& status) { return !status.ok() && status.GetPayload(kNoFallback).has_value(); }

struct Fallback::State {
  FunctionLibraryRuntime::Options options;
  std::vector<Tensor> inputs, results;
};

void Fallback::Run(OpKernelContext* ctx, AsyncOpKernel::DoneCallback done) {
  if (!ctx->function_library()) {
    ctx->SetStatus(NoFallback());
    return done();
  }
  auto state = std::make_shared<State>();
  state->options.runner = ctx->runner();
  state->options.run_all_kernels_inline = ctx->run_all_kernels_inline();
  auto finish = [this, ctx, state, done](const absl::Status& status) {
    ctx->SetStatus(status.ok() ? SetOutputs(ctx, state->results, on_gpu_) : status);
    done();
  };
  Start(ctx, state.get(), [this, ctx, finish](const absl::Status& status) {
    // Whoever calls back may be the thread that the device's copies depend on: it must not wait for one.
    if (on_gpu_) {
      (*ctx->runner())([finish, status] { finish(status); });
    } else {
      finish(status);
    }
  });
}

void Fallback::Start(OpKernelContext* ctx, State* state, FunctionLibraryRuntime::DoneCallback done) {
  ++GlobalCounters().fallbacks;
  FunctionLibraryRuntime* lib = ctx->function_library();
  FunctionLibraryRuntime::Handle handle = 0;
  absl::Status status = Instantiate(lib, ctx, &handle);
  for (int i = 0; i < ctx->num_inputs() && status.ok(); ++i) {
    state->inputs.push_back(ctx->input(i));
    if (!on_gpu_) continue;
    MemoryType wants = tensorflow::MTypeFromDType(ctx->input_dtype(i));
    status = Move(ctx, ctx->input(i), ctx->input_memory_type(i), wants, &state->inputs.back());
  }
  if (!status.ok()) return done(status);
  FunctionLibraryRuntime::Options& options = state->options;
  options.rendezvous = ctx->rendezvous();
  options.cancellation_manager = ctx->cancellation_manager();
  options.collective_executor = ctx->collective_executor();
  options.stats_collector = ctx->stats_collector();
  options.step_container = ctx->step_container();
  if (on_gpu_) {  // copies between memories go through a rendezvous: one of its own for each run
    options.rendezvous = nullptr;
    options.create_rendezvous = true;
    options.source_device = lib->device() ? lib->device()->name() : "";
  }
  lib->Run(options, handle, state->inputs, &state->results, std::move(done));
}

// Where the arguments are and the results are wanted, for a function that is placed anew.
absl::Status Fallback::Place(FunctionLibraryRuntime* lib, OpKernelContext* ctx,
                             FunctionLibraryRuntime::InstantiateOptions* options) const {
  Device* cpu = nullptr;
  TF_RETURN_IF_ERROR(lib->device_mgr()->LookupDevice("CPU:0", &cpu));
  auto device_of = [&](tensorflow::DataType dtype) {
    return tensorflow::MTypeFromDType(dtype) == tensorflow::HOST_MEMORY ? cpu->name() : lib->device()->name();
  };
  options->target = lib->device()->name();
  options->is_multi_device_function = true;
  for (int i = 0; i < ctx->num_inputs(); ++i) options->input_devices.push_back(device_of(ctx->input_dtype(i)));
  for (int i = 0; i < ctx->num_outputs(); ++i) {
    options->output_devices.push_back(device_of(ctx->expected_output_dtype(i)));
  }
  return absl::OkStatus();
}

absl::Status Fallback::Instantiate(FunctionLibraryRuntime* lib, OpKernelContext* ctx,
                                   FunctionLibraryRuntime::Handle* handle) {
  std::lock_guard<std::mutex> lock(mu_);
  auto found = handles_.find(lib);
  if (found != handles_.end()) {
    *handle = found->second;
    return absl::OkStatus();
  }
  tensorflow::AttrSlice attrs(&function_.attr());
  FunctionLibraryRuntime::InstantiateOptions options;
  if (on_gpu_ && lib->device()) TF_RETURN_IF_ERROR(Place(lib, ctx, &options));
  TF_RETURN_IF_ERROR(lib->Instantiate(function_.name(), attrs, options, handle));
  handles_.emplace(lib, *handle);
  return absl::OkStatus();
}

}  // namespace tf_stitch
