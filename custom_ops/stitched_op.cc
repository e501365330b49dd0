// StitchedProgram: the op that runs a stitched cluster.
//
// Its kernel runs the program's own kernels where it can, and else the fallback function, which holds the nodes that
// the op replaced.  Registered here for the CPU.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "counters.h"
#include "plan.h"
#include "program.h"
#include "runtime_host.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/profiler/lib/traceme.h"

#ifndef TF_STITCH_TF_VERSION  // setup.py gives it
#define TF_STITCH_TF_VERSION "unknown"
#endif

namespace tf_stitch {

using tensorflow::AsyncOpKernel;
using tensorflow::DataType;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::NameAttrList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;

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
      for (int i = 0; i < c->num_outputs(); ++i) {
        tensorflow::shape_inference::ShapeHandle shape = c->UnknownShape();
        if (!shapes.empty()) TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        c->set_output(i, shape);
      }
      return absl::OkStatus();
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

bool Disabled() {
  const char* value = getenv("TF_STITCH_DISABLE");
  return value && *value && strcmp(value, "0") != 0;
}

// Logs each distinct message once per process: a node may be instantiated many times.
void WarnOnce(const std::string& message) {
  static auto& mu = *new std::mutex;
  static auto& said = *new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(mu);
  if (said.size() < 1000 && said.insert(message).second) LOG(WARNING) << message;
}

// Element `i` of an integer tensor in host memory.
int64_t ElementOf(const Tensor& t, int64_t i) {
  switch (t.dtype()) {
    case tensorflow::DT_INT8:
      return static_cast<const int8_t*>(t.data())[i];
    case tensorflow::DT_INT16:
      return static_cast<const int16_t*>(t.data())[i];
    case tensorflow::DT_INT32:
      return static_cast<const int32_t*>(t.data())[i];
    case tensorflow::DT_INT64:
      return static_cast<const int64_t*>(t.data())[i];
    case tensorflow::DT_UINT8:
      return static_cast<const uint8_t*>(t.data())[i];
    case tensorflow::DT_UINT16:
      return static_cast<const uint16_t*>(t.data())[i];
    case tensorflow::DT_UINT32:
      return static_cast<const uint32_t*>(t.data())[i];
    default:
      return static_cast<int64_t>(static_cast<const uint64_t*>(t.data())[i]);
  }
}

// Checks ranks and reads what a plan depends on; false when the inputs cannot be the program's.
bool ReadSignature(const Program& program, OpKernelContext* ctx, Signature* signature) {
  signature->clear();
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    const TensorShape& shape = ctx->input(static_cast<int>(i)).shape();
    int rank = shape.dims();
    if (rank != static_cast<int>(program.buffers[program.inputs[i]].shape.size())) return false;
    for (int d = 0; d < rank; ++d) signature->push_back(shape.dim_size(d));
  }
  for (const Symbol& s : program.symbols) {
    if (s.kind != SymbolKind::kValue) continue;
    const Tensor& t = ctx->input(static_cast<int>(s.param));
    if (s.index >= static_cast<uint64_t>(t.NumElements())) return false;
    signature->push_back(ElementOf(t, static_cast<int64_t>(s.index)));
  }
  return true;
}

// What the program says of inputs and outputs must be what the node says; an error phrase, or "".
std::string CheckTypes(const Program& program, const tensorflow::DataTypeVector& in,
                       const tensorflow::DataTypeVector& out) {
  if (program.inputs.size() != in.size()) return "it is made for another number of inputs";
  if (program.outputs.size() != out.size()) return "it is made for another number of outputs";
  for (size_t i = 0; i < in.size(); ++i) {
    if (program.buffers[program.inputs[i]].dtype != in[i]) return "input " + std::to_string(i) + " has another type";
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (program.buffers[program.outputs[i]].dtype != out[i]) return "output " + std::to_string(i) + " has another type";
  }
  return "";
}

// The node's fallback function, instantiated once for each runtime that asks.
class Fallback {
 public:
  explicit Fallback(NameAttrList function) : function_(std::move(function)) {}

  void Run(OpKernelContext* ctx, AsyncOpKernel::DoneCallback done) {
    ++GlobalCounters().fallbacks;
    FunctionLibraryRuntime* lib = ctx->function_library();
    OP_REQUIRES_ASYNC(ctx, lib != nullptr, absl::InternalError("No function library to run a stitched fallback with."),
                      done);
    FunctionLibraryRuntime::Handle handle = 0;
    OP_REQUIRES_OK_ASYNC(ctx, Instantiate(lib, &handle), done);
    auto* state = new State;
    state->options.rendezvous = ctx->rendezvous();
    state->options.cancellation_manager = ctx->cancellation_manager();
    state->options.collective_executor = ctx->collective_executor();
    state->options.stats_collector = ctx->stats_collector();
    state->options.step_container = ctx->step_container();
    state->options.runner = ctx->runner();
    state->options.run_all_kernels_inline = ctx->run_all_kernels_inline();
    state->inputs.reserve(ctx->num_inputs());
    for (int i = 0; i < ctx->num_inputs(); ++i) state->inputs.push_back(ctx->input(i));
    lib->Run(state->options, handle, state->inputs, &state->results, [ctx, state, done](const absl::Status& status) {
      std::unique_ptr<State> owned(state);
      ctx->SetStatus(status);
      if (status.ok()) SetOutputs(ctx, state->results);
      done();
    });
  }

 private:
  struct State {
    FunctionLibraryRuntime::Options options;
    std::vector<Tensor> inputs, results;
  };

  static void SetOutputs(OpKernelContext* ctx, const std::vector<Tensor>& results) {
    bool fits = static_cast<int>(results.size()) == ctx->num_outputs();
    for (int i = 0; fits && i < ctx->num_outputs(); ++i) fits = results[i].dtype() == ctx->expected_output_dtype(i);
    if (!fits) {
      ctx->SetStatus(absl::InvalidArgumentError("The fallback function of a StitchedProgram returns other types than " +
                                                ctx->op_kernel().name() + " has outputs; rewrite the model again."));
      return;
    }
    for (int i = 0; i < ctx->num_outputs(); ++i) ctx->set_output(i, results[i]);
  }

  absl::Status Instantiate(FunctionLibraryRuntime* lib, FunctionLibraryRuntime::Handle* handle) {
    std::lock_guard<std::mutex> lock(mu_);
    auto found = handles_.find(lib);
    if (found != handles_.end()) {
      *handle = found->second;
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(lib->Instantiate(function_.name(), tensorflow::AttrSlice(&function_.attr()), handle));
    handles_.emplace(lib, *handle);
    return absl::OkStatus();
  }

  const NameAttrList function_;
  std::mutex mu_;
  std::unordered_map<FunctionLibraryRuntime*, FunctionLibraryRuntime::Handle> handles_;
};

class StitchedProgramOp : public AsyncOpKernel {
 public:
  explicit StitchedProgramOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    NameAttrList function;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fallback", &function));
    fallback_ = std::make_unique<Fallback>(function);
    if (Disabled()) return;
    std::string why = Prepare(ctx);
    if (code_) return;
    WarnOnce("tf_stitch: the program of node '" + name() + "' cannot be used: " + why +
             "; its TensorFlow operations run instead.");
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    if (code_ && RunStitched(ctx)) {
      done();
    } else {
      fallback_->Run(ctx, std::move(done));
    }
  }

 private:
  // Sets code_, or returns why the program cannot be used.
  std::string Prepare(OpKernelConstruction* ctx) {
    const tensorflow::AttrValue* attr = tensorflow::AttrSlice(ctx->def()).Find("program");
    std::string error;
    if (!attr) return "the attr 'program' is missing";
    if (!ParseProgram(attr->s(), &program_, &error)) return "the attr 'program' is corrupt: " + error;
    error = CheckTypes(program_, input_types(), output_types());
    if (!error.empty()) return error;
    code_ = HostCode::Load(program_, &error);
    program_.code = {};  // loaded by now
    program_.text = {};
    return error;
  }

  // Runs the program's kernels and sets the outputs; false when the fallback has to run (nothing is set then).
  bool RunStitched(OpKernelContext* ctx) {
    static thread_local Signature signature;
    if (!ReadSignature(program_, ctx, &signature)) return false;
    std::shared_ptr<const Plan> plan = plans_.Get(program_, signature);
    if (!plan->usable) {
      VLOG(1) << name() << " runs its TensorFlow operations: " << plan->why_not;
      return false;
    }
    tsl::profiler::TraceMe trace([this] { return "tf_stitch:" + program_.name; });
    absl::InlinedVector<Tensor, 4> outputs(program_.outputs.size());
    Tensor arena;
    absl::InlinedVector<void*, 32> memory(program_.buffers.size());
    if (!Allocate(ctx, *plan, &outputs, &arena, memory.data())) return false;
    const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
    auto parallel_for = [workers](int64_t total, int64_t block, const std::function<void(int64_t, int64_t)>& fn) {
      workers->workers->ParallelFor(total, tensorflow::thread::ThreadPool::SchedulingParams::Fixed(block), fn);
    };
    int64_t activity = 0;
    Observe observe = [&](size_t step, bool starts) {  // one profiler event per kernel
      if (starts) {
        activity = tsl::profiler::TraceMe::ActivityStart([&] { return "tf_stitch_kernel:" + Label(step); });
      } else {
        tsl::profiler::TraceMe::ActivityEnd(activity);
      }
    };
    const Observe* observer = tsl::profiler::TraceMe::Active() ? &observe : nullptr;
    if (RunHost(program_, *code_, *plan, memory.data(), parallel_for, workers->num_threads, observer) != 0) {
      return false;
    }
    for (size_t i = 0; i < outputs.size(); ++i) ctx->set_output(static_cast<int>(i), std::move(outputs[i]));
    ++GlobalCounters().stitched;
    return true;
  }

  // What the profiler shows for a step: the kernel, and the node that its last result comes from.
  std::string Label(size_t step) const { return program_.steps[step].kernel + " " + program_.steps[step].origin; }

  // Fills outputs, arena and the address of each buffer; false when memory is short.
  bool Allocate(OpKernelContext* ctx, const Plan& plan, absl::InlinedVector<Tensor, 4>* outputs, Tensor* arena,
                void** memory) {
    if (plan.arena_bytes && !ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({plan.arena_bytes}), arena).ok()) {
      return false;
    }
    for (size_t i = 0; i < outputs->size(); ++i) {
      const Buffer& b = program_.buffers[program_.outputs[i]];
      if (b.backing != Backing::kOutput || b.backing_index != i) continue;
      tensorflow::AllocatorAttributes attributes = ctx->output_alloc_attr(static_cast<int>(i));
      if (!ctx->allocate_temp(static_cast<DataType>(b.dtype), TensorShape(plan.output_dims[i]), &(*outputs)[i],
                              attributes)
               .ok()) {
        return false;
      }
    }
    for (size_t i = 0; i < outputs->size(); ++i) {  // outputs that share another tensor's memory
      const Buffer& b = program_.buffers[program_.outputs[i]];
      if (b.backing == Backing::kOutput && b.backing_index == i) continue;
      const Tensor& source =
          b.backing == Backing::kInput ? ctx->input(static_cast<int>(b.backing_index)) : (*outputs)[b.backing_index];
      if (!(*outputs)[i].BitcastFrom(source, static_cast<DataType>(b.dtype), TensorShape(plan.output_dims[i])).ok()) {
        return false;
      }
    }
    for (size_t id = 0; id < program_.buffers.size(); ++id) {
      const Buffer& b = program_.buffers[id];
      memory[id] = b.backing == Backing::kInput    ? ctx->input(static_cast<int>(b.backing_index)).data()
                   : b.backing == Backing::kOutput ? (*outputs)[b.backing_index].data()
                   : plan.arena_bytes              ? static_cast<char*>(arena->data()) + plan.arena_offset[id]
                                                   : nullptr;
    }
    return true;
  }

  std::unique_ptr<Fallback> fallback_;
  Program program_;
  std::unique_ptr<HostCode> code_;  // null: only the fallback runs
  PlanCache plans_;
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

// The code target that this processor runs best.
const char* tf_stitch_host_target() { return tf_stitch::HostTargets().front().c_str(); }

// See CompileFn in runtime_host.h.
void tf_stitch_set_compiler(tf_stitch::CompileFn compile) { tf_stitch::SetCompiler(compile); }

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
