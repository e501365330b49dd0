// StitchedProgram: the op that runs a stitched cluster.
//
// Registered here with its CPU kernel; stitched_op_gpu.cc has the one for GPUs.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coalesce_host.h"
#include "coalescing.h"
#include "counters.h"
#include "held_call.h"
#include "known_shapes.h"
#include "plan.h"
#include "program.h"
#include "runtime_host.h"
#include "stitched_node.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/profiler/lib/traceme.h"
#include "tensorflow/core/util/determinism.h"

#ifndef TF_STITCH_TF_VERSION  // setup.py gives it
#define TF_STITCH_TF_VERSION "unknown"
#endif

namespace tf_stitch {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;

REGISTER_OP("StitchedProgram")
    .Input("args: Tin")
    .Output("results: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 0")
    .Attr("program: string")
    .Attr("fallback: func")
    .Attr("output_shapes: list(shape) = []")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) -> absl::Status {
      std::vector<PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("output_shapes", &shapes));
      if (!shapes.empty() && static_cast<int>(shapes.size()) != c->num_outputs()) {
        return absl::InvalidArgumentError("StitchedProgram: output_shapes has " + std::to_string(shapes.size()) +
                                          " entries for " + std::to_string(c->num_outputs()) + " outputs.");
      }
      return SetShapes(shapes, c);
    })
    .Doc(R"doc(
Runs a cluster of operations as stitched kernels.

args: the cluster's inputs.
results: the cluster's outputs.
program: the kernels and how to run them, as tf_stitch.program.serialize writes them.
fallback: a function of the operations that this one replaces; it runs where the kernels cannot.
output_shapes: what is known of the results' shapes; empty when nothing is.
)doc");

namespace {

class StitchedProgramOp : public AsyncOpKernel {
 public:
  explicit StitchedProgramOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), node_(ctx, /*on_gpu=*/false) {
    node_.Prepare(ctx, [this] {
      std::string error;
      code_ = HostCode::Load(node_.program(), &error);
      return code_ ? std::string() : error;
    });
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<const Plan> plan = node_.ready() ? node_.PlanFor(ctx, &plans_) : nullptr;
    if (plan && Coalesce(ctx, plan, &done)) return;
    if (plan && RunStitched(ctx, *plan)) {
      done();
    } else {
      node_.fallback().Run(ctx, std::move(done));
    }
  }

 private:
  // A run that the scheduler holds.
  class Held : public HostRequest {
   public:
    Held(StitchedProgramOp* op, OpKernelContext* ctx) : op_(op), call_(ctx) {}
    StitchedNode::Memory* place() { return &place_; }
    HeldCall* call() { return &call_; }

    void Done(Outcome outcome, const std::string& why) override {
      bool fall_back = outcome == Outcome::kFailed && why.empty();
      if (outcome == Outcome::kCompleted) op_->node_.SetOutputs(call_.ctx(), &place_);
      place_ = {};  // while the allocator is sure to live
      if (!fall_back) return call_.End(outcome, why);
      call_.Unwatch();
      call_.Continue([op = op_, ctx = call_.ctx(), done = call_.TakeDone()] { op->node_.fallback().Run(ctx, done); });
    }

   private:
    StitchedProgramOp* const op_;
    StitchedNode::Memory place_;
    HeldCall call_;
  };

  // Hands a run to the scheduler, or runs it here when nobody else is there; false, with `done` kept, without one.
  bool Coalesce(OpKernelContext* ctx, const std::shared_ptr<const Plan>& plan, DoneCallback* done) {
    auto make = [](const CoalescingOptions& options) { return MakeHostDevice(options.workers, options.merge_bytes); };
    std::shared_ptr<Coalescer> coalescer = CoalescerOf(nullptr, make);
    if (!coalescer) return false;
    std::call_once(plan->work_once, [&] { plan->work = std::make_unique<HostWork>(node_.program(), *code_, *plan); });
    auto* work = static_cast<const HostWork*>(plan->work.get());
    if (work->steps.empty()) return false;
    auto held = std::make_shared<Held>(this, ctx);
    if (!node_.Allocate(ctx, *plan, plan->arena_bytes, held->place())) return false;
    held->program = &node_.program();
    held->code = code_.get();
    held->plan = plan;
    held->host_work = work;
    held->work = work->work;
    held->memory = held->place()->addresses.data();
    const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
    held->threads = workers->num_threads;
    held->parallel_for = ParallelForOf(workers);
    if (!tensorflow::OpDeterminismRequired()) held->merge = work->mergeable.KeyOf(this, held->memory);
    held->joined_plan = [this](const Signature& s) { return joined_plans_.Get(node_.program(), s); };
    Coalescer::Taken taken =
        held->call()->Submit(node_.program().name, coalescer, held, Coalescer::MayRun::kWhenIdle, done);
    if (taken == Coalescer::Taken::kAlone) RunAlone(ctx, coalescer.get(), held.get(), done);
    return taken != Coalescer::Taken::kStopped;
  }

  void RunAlone(OpKernelContext* ctx, Coalescer* coalescer, Held* held, DoneCallback* done) {
    Micros begin = NowMicros();
    bool good = RunSteps(ctx, *held->plan, *held->place());
    Micros took = std::max<Micros>(NowMicros() - begin, 1);
    coalescer->RanAlone(good ? HasRun(static_cast<double>(took)) : nullptr);
    if (good) node_.SetOutputs(ctx, held->place());
    *held->place() = {};  // a cancellation may hold the request for longer than the allocator lives
    good ? (*done)() : node_.fallback().Run(ctx, std::move(*done));
  }

  static ParallelFor ParallelForOf(const tensorflow::DeviceBase::CpuWorkerThreads* workers) {
    return [workers](int64_t total, int64_t block, const std::function<void(int64_t, int64_t)>& fn) {
      workers->workers->ParallelFor(total, tensorflow::thread::ThreadPool::SchedulingParams::Fixed(block), fn);
    };
  }

  // Runs the program and sets the outputs; false, with nothing set, when the fallback has to run.
  bool RunStitched(OpKernelContext* ctx, const Plan& plan) {
    StitchedNode::Memory memory;
    if (!node_.Allocate(ctx, plan, plan.arena_bytes, &memory) || !RunSteps(ctx, plan, memory)) return false;
    node_.SetOutputs(ctx, &memory);
    return true;
  }

  // False when a step refuses.
  bool RunSteps(OpKernelContext* ctx, const Plan& plan, const StitchedNode::Memory& memory) {
    const Program& program = node_.program();
    tsl::profiler::TraceMe trace([&] { return "tf_stitch:" + program.name; });
    const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
    int64_t activity = 0;
    Observe observe = [&](size_t step, bool starts) {  // one profiler event per kernel
      if (starts) {
        activity =
            tsl::profiler::TraceMe::ActivityStart([&] { return "tf_stitch_kernel:" + LabelOf(program.steps[step]); });
      } else {
        tsl::profiler::TraceMe::ActivityEnd(activity);
      }
    };
    const Observe* observer = tsl::profiler::TraceMe::Active() ? &observe : nullptr;
    return !RunHost(program, *code_, plan, memory.addresses.data(), ParallelForOf(workers), workers->num_threads,
                    observer);
  }

  StitchedNode node_;
  std::unique_ptr<HostCode> code_;
  PlanCache plans_, joined_plans_;
};

REGISTER_KERNEL_BUILDER(Name("StitchedProgram").Device(tensorflow::DEVICE_CPU), StitchedProgramOp);

}  // namespace
}  // namespace tf_stitch

// --- what tf_stitch/runtime.py calls through ctypes -------------------------------------------------

extern "C" {

// The TensorFlow version that this library was built against.
const char* tf_stitch_built_for() { return TF_STITCH_TF_VERSION; }

// Sets out[0..3] to: stitched runs, fallback runs, plans made, shared objects loaded.
void tf_stitch_counters(int64_t* out) {
  const tf_stitch::Counters& c = tf_stitch::GlobalCounters();
  out[0] = c.stitched;
  out[1] = c.fallbacks;
  out[2] = c.plans;
  out[3] = c.loads;
}

// Sets out[0..2] to: CUDA graphs launched, made, given other addresses.
void tf_stitch_graph_counters(int64_t* out) {
  const tf_stitch::Counters& c = tf_stitch::GlobalCounters();
  out[0] = c.graph_launches;
  out[1] = c.graph_instances;
  out[2] = c.graph_updates;
}

// The code target that this processor runs best.
const char* tf_stitch_host_target() { return tf_stitch::HostTargets().front().c_str(); }

// From now on the calling thread takes denormals for zero, as threads of TensorFlow's pools do.
void tf_stitch_flush_denormals() { static thread_local tf_stitch::FlushDenormals while_it_lives; }

// See CompileFn in runtime_host.h.
void tf_stitch_set_compiler(tf_stitch::CompileFn compile) { tf_stitch::SetCompiler(compile); }

// The newest format version of programs that this library runs.
int tf_stitch_program_version() { return tf_stitch::ProgramVersion(); }

// Parses a program; returns 1, or 0 with the reason in `error` (cut to `size` bytes).  For tests and tools.
int tf_stitch_check_program(const char* data, size_t data_size, char* error, size_t size) {
  tf_stitch::Program program;
  std::string why;
  bool good = tf_stitch::ParseProgram({data, data_size}, &program, &why);
  if (size) {
    strncpy(error, why.c_str(), size - 1);
    error[size - 1] = 0;
  }
  return good;
}
}
