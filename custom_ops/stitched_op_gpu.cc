// The GPU kernel of the StitchedProgram op: TensorFlow's stream and allocator, the CUDA driver for the rest.
//
// Inputs that a program reads as "value" symbols must lie in host memory: the node's attr `_input_hostmem` (a list of
// input positions, which TensorFlow honours for every op) names them, and the rewriter sets it.  Where kernels read
// such an input too, it is copied to the device.  Outputs that are wanted in host memory (the attr `_output_hostmem`)
// are copied there, and the run waits for that: who fetches them need not ask the device again.
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autotune.h"
#include "coalesce_cuda.h"
#include "coalescing.h"
#include "cublas_lt.h"
#include "environment.h"
#include "held_call.h"
#include "runtime_cuda.h"
#include "staging_cuda.h"
#include "stitched_node.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/tensor_float_32_utils.h"
#include "tensorflow/core/profiler/lib/traceme.h"
#include "tensorflow/core/util/determinism.h"
#include "xla/stream_executor/stream.h"

namespace tf_stitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

bool GraphsEnabled() {
  static const bool enabled = IsOn("TF_STITCH_CUDA_GRAPHS", true);
  return enabled;
}

// Without grids all steps are launches of their own.
bool GridsEnabled() {
  static const bool enabled = IsOn("TF_STITCH_GRIDS", true);
  return enabled;
}

cuda::Stream StreamOf(stream_executor::Stream* stream) {
  return static_cast<cuda::Stream>(stream->platform_specific_handle().stream);
}

class StitchedProgramGpuOp : public AsyncOpKernel {
 public:
  explicit StitchedProgramGpuOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), node_(ctx, /*on_gpu=*/true) {
    if (!ctx->GetAttr("_autotune", &autotune_).ok()) autotune_ = true;
    node_.Prepare(ctx, [this, ctx] { return Load(ctx); });
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Ended ended = node_.ready() ? RunStitched(ctx, &done) : Ended::kNot;
    if (ended == Ended::kNow) {
      done();
    } else if (ended == Ended::kNot) {
      node_.fallback().Run(ctx, std::move(done));
    }
  }

 private:
  // How a run ended: with outputs or an error, not at all (the fallback has to run), or the scheduler has it.
  enum class Ended { kNow, kNot, kLater };

  // A run's tensors.
  struct Place {
    StitchedNode::Memory memory;
    std::vector<Tensor> copies;  // of inputs that lie in host memory
  };

  // A run that the scheduler holds.
  class Held : public CudaRequest {
   public:
    Held(StitchedProgramGpuOp* op, OpKernelContext* ctx) : op_(op), call_(ctx) {}
    Place* place() { return &place_; }
    HeldCall* call() { return &call_; }

    void Done(Outcome outcome, const std::string& why) override {
      if (outcome == Outcome::kCompleted && !op_->fetched_.empty()) return Fetch();
      if (outcome == Outcome::kCompleted) op_->node_.SetOutputs(call_.ctx(), &place_.memory);
      place_ = {};  // while the allocator is sure to live
      call_.End(outcome, why);
    }

   private:
    // Copies take their time, and a lane has none: another thread waits for them.
    void Fetch() {
      call_.Unwatch();
      call_.Continue([op = op_, ctx = call_.ctx(), done = call_.TakeDone(),
                      place = std::make_shared<Place>(std::move(place_))]() mutable {
        op->Finish(ctx, op->SetOutputs(ctx, &place->memory));
        place = nullptr;
        done();
      });
    }

    StitchedProgramGpuOp* const op_;
    Place place_;
    HeldCall call_;
  };

  std::string Load(OpKernelConstruction* ctx) {
    std::string error = CheckMemory();
    if (!error.empty()) return error;
    cuda::SetNoteHandler(&WarnOnce);
    const cuda::Driver* driver = cuda::LoadDriver(&error);
    if (!driver) return error;
    const auto* info = ctx->device()->tensorflow_accelerator_device_info();
    if (!info || !info->stream) return "the device has no CUDA stream";
    cuda::Context context;
    cuda::Result result = driver->StreamGetCtx(StreamOf(info->stream), &context);
    if (result) return cuda::Failed(*driver, result, "asking for the stream's context");
    code_ = CudaCode::Load(node_.program(), context, &error);
    for (const Step& s : node_.program().steps) {
      has_float_products_ |= s.kind == Step::Kind::kLibrary && node_.program().buffers[s.buffers[0]].dtype == 1;
    }
    return code_ ? "" : error;
  }

  bool IsCaptured(cuda::Stream stream) const {
    int status = cuda::kCaptureStatusNone;
    return code_->driver().StreamIsCapturing(stream, &status) || status != cuda::kCaptureStatusNone;
  }

  bool OnHost(const Buffer& input) const { return input_memory_types()[input.index] == tensorflow::HOST_MEMORY; }

  // Finds the inputs to copy; says what lies in the wrong memory.
  std::string CheckMemory() {
    for (const Symbol& s : node_.program().symbols) {
      if (s.kind == SymbolKind::kValue && !OnHost(node_.program().buffers[node_.program().inputs[s.param]])) {
        return "size '" + s.name + "' is read from input " + std::to_string(s.param) +
               ", which is not in host memory; the attr _input_hostmem must name it";
      }
    }
    for (uint32_t id : node_.program().inputs) {
      const Buffer& b = node_.program().buffers[id];
      if (OnHost(b) && (b.first_step >= 0 || AliasedOnDevice(b.index))) copied_.push_back(b.index);
    }
    for (uint32_t id : node_.program().outputs) {
      const Buffer& b = node_.program().buffers[id];
      if (output_memory_types()[b.index] != tensorflow::HOST_MEMORY) continue;
      bool copied = std::find(copied_.begin(), copied_.end(), b.backing_index) != copied_.end();
      if (b.backing == Backing::kInput && !copied &&
          OnHost(node_.program().buffers[node_.program().inputs[b.backing_index]])) {
        continue;
      }
      fetched_.push_back(b.index);
    }
    return "";
  }

  bool AliasedOnDevice(uint32_t input) const {
    for (uint32_t id : node_.program().outputs) {
      const Buffer& b = node_.program().buffers[id];
      if (b.backing == Backing::kInput && b.backing_index == input &&
          output_memory_types()[b.index] == tensorflow::DEVICE_MEMORY) {
        return true;
      }
    }
    return false;
  }

  Ended RunStitched(OpKernelContext* ctx, DoneCallback* done) {
    bool tf32 = has_float_products_ && tensorflow::tensor_float_32_execution_enabled();
    std::shared_ptr<const Plan> plan = node_.PlanFor(ctx, &plans_[tf32]);
    if (!plan) return Ended::kNot;
    tsl::profiler::TraceMe trace([this] { return "tf_stitch:" + node_.program().name; });
    std::call_once(plan->extra_once, [&] {
      cuda::ScopedContext scope(code_->driver(), code_->context());
      cuda::NoTuning no_tuning(IsCaptured(StreamOf(ctx->op_device_context()->stream())) ||
                               tensorflow::OpDeterminismRequired() || !autotune_);
      plan->extra = std::make_unique<CudaPlan>(node_.program(), *plan, code_, tf32, GridsEnabled());
    });
    auto* ready = static_cast<CudaPlan*>(plan->extra.get());
    if (!ready->error().empty()) return Refuse(ready->error());

    cuda::Stream stream = StreamOf(ctx->op_device_context()->stream());
    bool held_at_all = ready->launches() >= kLaunchesWorthHolding && !IsCaptured(stream);
    std::shared_ptr<Coalescer> coalescer = held_at_all ? CoalescerHere() : nullptr;
    std::shared_ptr<Held> held = coalescer ? std::make_shared<Held>(this, ctx) : nullptr;
    Place own;
    Place& place = held ? *held->place() : own;
    std::string error;
    if (!CopyInputs(ctx, stream, &place, &error)) return error.empty() ? Ended::kNot : Finish(ctx, error);
    StitchedNode::Memory& memory = place.memory;
    if (!node_.Allocate(ctx, *plan, plan->arena_bytes + ready->workspace_bytes(), &memory)) return Ended::kNot;
    if (ready->Misaligned(memory.addresses.data())) {
      return Refuse("a tensor does not begin at a multiple of 16 bytes");
    }
    void* workspace = ready->workspace_bytes() ? static_cast<char*>(memory.arena.data()) + plan->arena_bytes : nullptr;
    Coalescer::Taken taken =
        held ? Coalesce(coalescer, held, plan, workspace, stream, done) : Coalescer::Taken::kStopped;
    if (taken == Coalescer::Taken::kHeld) return Ended::kLater;
    std::string note;
    auto launch = [&] { return Launch(ready, memory.addresses.data(), workspace, stream, &note); };
    if (taken == Coalescer::Taken::kAlone) {
      auto& device = static_cast<CudaDevice&>(coalescer->device());
      coalescer->RanAlone(device.RunAlone(*held, stream, launch, &error));
    } else {
      error = launch();
    }
    if (!note.empty()) {
      WarnOnce("tf_stitch: node '" + name() + "' runs without CUDA graphs: " + note + ".");
    }
    if (error.empty()) error = SetOutputs(ctx, &memory);
    place = {};  // a cancellation may hold the request for longer than the allocator lives
    return Finish(ctx, error);
  }

  // The plan of requests joined; called where the context is current.
  std::shared_ptr<const Plan> JoinedPlan(const Signature& signature, bool tf32) {
    std::shared_ptr<const Plan> plan = joined_plans_[tf32].Get(node_.program(), signature);
    if (!plan->usable) return plan;
    std::call_once(plan->extra_once, [&] {
      plan->extra = std::make_unique<CudaPlan>(node_.program(), *plan, code_, tf32, GridsEnabled());
    });
    return static_cast<CudaPlan*>(plan->extra.get())->error().empty() ? plan : nullptr;
  }

  // Sets what was computed, in the memory where it is wanted.  "" or the error.
  std::string SetOutputs(OpKernelContext* ctx, StitchedNode::Memory* memory) const {
    std::string error = fetched_.empty() ? "" : CopyToHost(ctx, memory);
    if (error.empty()) node_.SetOutputs(ctx, memory);
    return error;
  }

  // Puts outputs that are wanted there into host memory, and waits for that.
  std::string CopyToHost(OpKernelContext* ctx, StitchedNode::Memory* memory) const {
    const cuda::Driver& driver = code_->driver();
    cuda::Stream stream = StreamOf(ctx->op_device_context()->stream());
    cuda::ScopedContext scope(driver, code_->context());
    if (IsCaptured(stream)) return "outputs in host memory cannot be part of a CUDA graph";
    tensorflow::AllocatorAttributes host;
    host.set_on_host(true);
    host.set_gpu_compatible(true);
    std::vector<Tensor> copies(fetched_.size());
    for (size_t k = 0; k < copies.size(); ++k) {
      const Tensor& output = memory->outputs[fetched_[k]];
      absl::Status status = ctx->allocate_temp(output.dtype(), output.shape(), &copies[k], host);
      if (!status.ok()) return std::string(status.message());
    }
    cuda::Result result = cuda::kSuccess;
    for (size_t k = 0; k < copies.size(); ++k) {
      const Tensor& output = memory->outputs[fetched_[k]];
      size_t bytes = copies[k].TotalBytes();
      if (bytes && !result) result = driver.MemcpyDtoHAsync(copies[k].data(), output.data(), bytes, stream);
    }
    cuda::Result waited = cuda::Staging::Of(driver, code_->context()).Wait(stream);
    if (!result) result = waited;
    for (size_t k = 0; k < copies.size(); ++k) memory->outputs[fetched_[k]] = std::move(copies[k]);
    return result ? cuda::Failed(driver, result, "copying outputs to host memory") : "";
  }

  // The scheduler of this device; null while coalescing is off.
  std::shared_ptr<Coalescer> CoalescerHere() const {
    return CoalescerOf(code_->context(), [this](const CoalescingOptions& options) -> std::unique_ptr<Device> {
      std::string error;
      auto device = CudaDevice::Make(code_->driver(), code_->context(), options.lanes, options.merge_bytes, &error);
      if (!device) WarnOnce("tf_stitch: requests are not coalesced on this GPU: " + error + ".");
      return device;
    });
  }

  // Hands a run to the scheduler; `done` is left alone unless it is held.
  Coalescer::Taken Coalesce(const std::shared_ptr<Coalescer>& coalescer, const std::shared_ptr<Held>& held,
                            const std::shared_ptr<const Plan>& plan, void* workspace, cuda::Stream stream,
                            DoneCallback* done) {
    auto* ready = static_cast<CudaPlan*>(plan->extra.get());
    std::call_once(plan->work_once, [&] {
      plan->work = std::make_unique<CudaWork>(node_.program(), *plan, *ready, !tensorflow::OpDeterminismRequired());
    });
    const auto* work = static_cast<const CudaWork*>(plan->work.get());
    held->program = &node_.program();
    held->plan = plan;
    held->ready = ready;
    held->cuda_work = work;
    held->work = work->work;
    held->memory = held->place()->memory.addresses.data();
    if (!tensorflow::OpDeterminismRequired()) held->merge = work->mergeable.KeyOf(this, held->memory);
    held->joined_plan = [this, tf32 = ready->tf32()](const Signature& s) { return JoinedPlan(s, tf32); };
    held->workspace = workspace;
    held->graphs = GraphsEnabled();
    held->inputs = static_cast<CudaDevice&>(coalescer->device()).Record(stream);
    if (!held->inputs) return Coalescer::Taken::kStopped;
    auto may_run =
        cuda::GoesFirst(code_->driver(), stream) ? Coalescer::MayRun::kBesideBestEffort : Coalescer::MayRun::kWhenIdle;
    return held->call()->Submit(node_.program().name, coalescer, held, may_run, done);
  }

  std::string Launch(CudaPlan* ready, void* const* addresses, void* workspace, cuda::Stream stream,
                     std::string* note) const {
    if (!tsl::profiler::TraceMe::Active() || GraphsEnabled()) {
      return ready->Run(addresses, workspace, stream, GraphsEnabled(), nullptr, note);
    }
    int64_t activity = 0;
    CudaPlan::Observe observe = [&](const std::string* what) {  // one profiler event per launch
      if (what) {
        activity = tsl::profiler::TraceMe::ActivityStart([&] { return "tf_stitch_kernel:" + *what; });
      } else {
        tsl::profiler::TraceMe::ActivityEnd(activity);
      }
    };
    return ready->Run(addresses, workspace, stream, false, &observe, note);
  }

  // The fallback runs; why is said once.
  Ended Refuse(const std::string& why) const {
    WarnOnce("tf_stitch: a run of node '" + name() + "' cannot use its program: " + why +
             "; its TensorFlow operations run instead.");
    return Ended::kNot;
  }

  // Sets the error, if there is one.
  Ended Finish(OpKernelContext* ctx, const std::string& error) const {
    if (!error.empty()) ctx->SetStatus(absl::InternalError("StitchedProgram '" + name() + "': " + error + "."));
    return Ended::kNow;
  }

  // Fills the place's inputs, with copies of those that lie in host memory and are used on the device, and of those
  // that do not begin where wide accesses can (a slice of a larger tensor may not).  False when memory is short, or
  // with an `error`.
  bool CopyInputs(OpKernelContext* ctx, cuda::Stream stream, Place* place, std::string* error) const {
    std::vector<uint32_t> misaligned;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Tensor& input = ctx->input(i);
      place->memory.inputs.push_back(&input);
      if (input_memory_types()[i] == tensorflow::DEVICE_MEMORY && IsMisaligned(input)) {
        misaligned.push_back(static_cast<uint32_t>(i));
      }
    }
    if (copied_.empty() && misaligned.empty()) return true;
    cuda::ScopedContext scope(code_->driver(), code_->context());
    place->copies.reserve(copied_.size() + misaligned.size());
    if (!copied_.empty() && !CopyFromHost(ctx, stream, place, error)) return false;
    for (uint32_t i : misaligned) {
      const Tensor& from = ctx->input(static_cast<int>(i));
      Tensor to;
      if (!ctx->allocate_temp(from.dtype(), from.shape(), &to).ok()) return false;
      cuda::Result result = code_->driver().MemcpyDtoDAsync(to.data(), from.data(), from.TotalBytes(), stream);
      if (result) return *error = CannotCopy(result, i), false;
      place->copies.push_back(std::move(to));
      place->memory.inputs[i] = &place->copies.back();
    }
    return true;
  }

  // All inputs in host memory go to the device as one copy.
  bool CopyFromHost(OpKernelContext* ctx, cuda::Stream stream, Place* place, std::string* error) const {
    std::vector<cuda::Staging::Piece> pieces;
    size_t total = 0;
    for (uint32_t i : copied_) {
      const Tensor& from = ctx->input(static_cast<int>(i));
      pieces.push_back({from.data(), from.TotalBytes(), total});
      total += (from.TotalBytes() + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
    }
    Tensor all;
    auto shape = tensorflow::TensorShape({static_cast<int64_t>(total)});
    if (!ctx->allocate_temp(tensorflow::DT_UINT8, shape, &all).ok()) return false;
    absl::Status status;
    for (size_t k = 0; k < copied_.size() && status.ok(); ++k) {
      const Tensor& from = ctx->input(static_cast<int>(copied_[k]));
      auto at = static_cast<int64_t>(pieces[k].at), bytes = static_cast<int64_t>(pieces[k].bytes);
      place->copies.emplace_back();
      status = place->copies.back().BitcastFrom(all.Slice(at, at + bytes), from.dtype(), from.shape());
      place->memory.inputs[copied_[k]] = &place->copies.back();
    }
    if (!status.ok()) return *error = std::string(status.message()), false;
    if (!total) return true;
    if (IsCaptured(stream)) return *error = "inputs in host memory cannot be part of a CUDA graph", false;
    cuda::Staging& staging = cuda::Staging::Of(code_->driver(), code_->context());
    cuda::Result result = staging.Copy(pieces, total, all.data(), stream);
    return !result || (*error = CannotCopy(result, copied_.front()), false);
  }

  std::string CannotCopy(cuda::Result result, uint32_t input) const {
    return cuda::Failed(code_->driver(), result, "copying input " + std::to_string(input));
  }

  static bool IsMisaligned(const Tensor& t) {
    return t.TotalBytes() && reinterpret_cast<uintptr_t>(t.data()) % cuda::kMatmulAlignment;
  }

  StitchedNode node_;
  std::shared_ptr<CudaCode> code_;
  bool autotune_ = true;             // the node's attr `_autotune`, which the rewriter sets where it is off
  std::vector<uint32_t> copied_;     // inputs in host memory that are used on the device too
  std::vector<uint32_t> fetched_;    // outputs that are made on the device and wanted in host memory
  bool has_float_products_ = false;  // then TF32 makes other products, and other plans
  PlanCache plans_[2];               // without and with TF32
  PlanCache joined_plans_[2];        // likewise, of requests joined
};

REGISTER_KERNEL_BUILDER(Name("StitchedProgram").Device(tensorflow::DEVICE_GPU), StitchedProgramGpuOp);

}  // namespace
}  // namespace tf_stitch
