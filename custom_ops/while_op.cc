// StitchedWhile: a While loop whose turns are run by one kernel, one node after another.
//
// TensorFlow's executor has some thirty nodes besides the body's for every turn of a loop (a Merge, a Switch and a
// NextIteration for each variable of the loop), and each of them costs it what a small kernel takes.  Here the nodes of
// the condition and of the body are put in order once; a turn walks over them.  They are TensorFlow's kernels and
// programs, so what they compute, and their errors, stay what they are.  Nodes that read nothing that a turn changes
// are run once.  tf_stitch/graph/whiles.py decides which loops become this op.
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "known_shapes.h"
#include "moves.h"
#include "op_fallback.h"
#include "tensorflow/core/common_runtime/function_body.h"
#include "tensorflow/core/common_runtime/function_def_utils.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/graph/algorithm.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/profiler/lib/traceme.h"

namespace tf_stitch {
namespace {

using tensorflow::AllocatorAttributes;
using tensorflow::AsyncOpKernel;
using tensorflow::Device;
using tensorflow::FunctionBody;
using tensorflow::MemoryType;
using tensorflow::NameAttrList;
using tensorflow::Node;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorValue;

absl::Status Shapes(tensorflow::shape_inference::InferenceContext* c) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("output_shapes", &shapes));
  return SetShapes(shapes, c);
}

constexpr char kDoc[] = R"doc(
A While whose condition and body are run by one kernel, node after node.

input: the loop's variables at first.
output: the loop's variables when the condition no longer holds.
cond: a function of the variables that gives one truth value.
body: a function of the variables that gives their values in the next turn.
output_shapes: what is known of the results' shapes; empty when nothing is.
)doc";

#define REGISTER_LOOP(name)                    \
  REGISTER_OP(name)                            \
      .Input("input: T")                       \
      .Output("output: T")                     \
      .Attr("T: list(type) >= 0")              \
      .Attr("cond: func")                      \
      .Attr("body: func")                      \
      .Attr("output_shapes: list(shape) = []") \
      .SetShapeFn(Shapes)                      \
      .Doc(kDoc)

REGISTER_LOOP("StitchedWhile").SetIsStateful();
REGISTER_LOOP("StatelessStitchedWhile");  // neither has effects nor sees any
#undef REGISTER_LOOP

// What a node reads: a value's number, and whether nobody reads it afterwards (its memory may then become a result's).
struct Read {
  size_t value = 0;
  bool last = false;
};

// A node of the condition or the body.
struct Step {
  std::unique_ptr<OpKernel> kernel;
  std::vector<Read> reads;
  size_t first_result = 0;  // the value's number
  std::vector<AllocatorAttributes> input_attributes, output_attributes;
  bool is_fixed = false;  // reads nothing that turns change
};

// Turns write to no variable, so all of them read the same.
bool ReadsVariable(const Node& node) {
  return node.type_string() == "ReadVariableOp" || node.type_string() == "VariableShape";
}

// A loop's nodes in the order in which they run.  Values are numbered: first the variables, then what nodes give.
class Turn {
 public:
  Turn(Device* device, tensorflow::ResourceMgr* resources, int graph_def_version)
      : device_(device), resources_(resources), graph_def_version_(graph_def_version) {}

  // `variables` are the memories that the op takes them in.
  absl::Status Make(const FunctionBody& cond, const FunctionBody& body, const std::vector<MemoryType>& variables);

  const std::vector<Step>& steps() const { return steps_; }
  size_t test_at() const { return test_at_; }              // the condition is known before this step
  const Read& test() const { return test_; }               // the condition
  const std::vector<Read>& next() const { return next_; }  // by variable
  bool IsFixed(size_t value) const { return fixed_[value]; }
  bool IsRead(size_t value) const { return read_[value]; }
  MemoryType MemoryOf(size_t value) const { return memory_[value]; }
  size_t size() const { return memory_.size(); }

 private:
  using Numbers = std::unordered_map<const Node*, size_t>;  // by node, its first result

  absl::Status Append(const FunctionBody& function, std::vector<Read>* results);
  absl::Status Append(const Node& node, const Numbers& numbers);
  absl::Status ReadsOf(const Node& node, const Numbers& numbers, std::vector<Read>* reads) const;
  size_t AddValue(MemoryType memory, bool is_fixed);
  void MarkLast();

  Device* const device_;
  tensorflow::ResourceMgr* const resources_;
  const int graph_def_version_;
  std::vector<Step> steps_;
  size_t test_at_ = 0;
  Read test_;
  std::vector<Read> next_;
  std::vector<MemoryType> memory_;  // by value
  std::vector<bool> fixed_, read_;  // by value
};

absl::Status Turn::Make(const FunctionBody& cond, const FunctionBody& body, const std::vector<MemoryType>& variables) {
  if (cond.ret_nodes.size() != 1 || cond.ret_types[0] != tensorflow::DT_BOOL || cond.arg_types != body.arg_types ||
      body.arg_types != body.ret_types || body.arg_types.size() != variables.size()) {
    return absl::InvalidArgumentError("A StitchedWhile needs a condition and a body that take the loop's variables.");
  }
  for (size_t i = 0; i < variables.size(); ++i) {
    const Node* next = body.ret_nodes[i];
    do {
      TF_RETURN_IF_ERROR(next->input_node(0, &next));
    } while (next->IsIdentity());
    AddValue(variables[i], next == body.arg_nodes[i]);
  }
  std::vector<Read> test;
  TF_RETURN_IF_ERROR(Append(cond, &test));
  test_ = test[0];
  test_at_ = steps_.size();
  TF_RETURN_IF_ERROR(Append(body, &next_));
  MarkLast();
  return absl::OkStatus();
}

absl::Status Turn::Append(const FunctionBody& function, std::vector<Read>* results) {
  Numbers numbers;
  for (size_t i = 0; i < function.arg_nodes.size(); ++i) numbers[function.arg_nodes[i]] = i;
  std::vector<Node*> order;
  tensorflow::GetReversePostOrder(*function.graph, &order, tensorflow::NodeComparatorName());
  for (const Node* node : order) {
    if (!node->IsOp() || node->IsArg() || node->IsRetval() || node->type_string() == "NoOp") continue;
    if (node->IsIdentity()) {  // another name of what it reads
      std::vector<Read> of;
      TF_RETURN_IF_ERROR(ReadsOf(*node, numbers, &of));
      numbers[node] = of[0].value;
      continue;
    }
    numbers[node] = memory_.size();
    TF_RETURN_IF_ERROR(Append(*node, numbers));
  }
  for (const Node* node : function.ret_nodes) TF_RETURN_IF_ERROR(ReadsOf(*node, numbers, results));
  return absl::OkStatus();
}

absl::Status Turn::Append(const Node& node, const Numbers& numbers) {
  Step step;
  OpKernel* kernel = nullptr;
  TF_RETURN_IF_ERROR(tensorflow::CreateOpKernel(tensorflow::DeviceType(device_->device_type()), device_,
                                                device_->GetAllocator({}), /*flib=*/nullptr, resources_,
                                                node.properties(), graph_def_version_, &kernel));
  step.kernel.reset(kernel);
  TF_RETURN_IF_ERROR(ReadsOf(node, numbers, &step.reads));
  step.is_fixed = !node.op_def().is_stateful() || ReadsVariable(node);
  for (const Read& r : step.reads) step.is_fixed &= fixed_[r.value];
  for (MemoryType memory : kernel->input_memory_types()) step.input_attributes.push_back(On(memory));
  for (MemoryType memory : kernel->output_memory_types()) step.output_attributes.push_back(On(memory));
  step.first_result = memory_.size();
  for (MemoryType memory : kernel->output_memory_types()) AddValue(memory, step.is_fixed);
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

// Appends what the node reads, in order.
absl::Status Turn::ReadsOf(const Node& node, const Numbers& numbers, std::vector<Read>* reads) const {
  for (int i = 0; i < node.num_inputs(); ++i) {
    const tensorflow::Edge* edge = nullptr;
    TF_RETURN_IF_ERROR(node.input_edge(i, &edge));
    reads->push_back({numbers.at(edge->src()) + static_cast<size_t>(edge->src_output()), false});
  }
  return absl::OkStatus();
}

size_t Turn::AddValue(MemoryType memory, bool is_fixed) {
  memory_.push_back(memory);
  fixed_.push_back(is_fixed);
  read_.push_back(false);
  return memory_.size() - 1;
}

// Variables are there until the body has begun: they are the loop's results where the condition does not hold.
void Turn::MarkLast() {
  std::vector<bool> seen(fixed_);
  auto mark = [&](Read* r, bool may_be_last) {
    r->last = may_be_last && !seen[r->value];
    read_[r->value] = seen[r->value] = true;
  };
  for (size_t i = next_.size(); i-- > 0;) mark(&next_[i], true);
  for (size_t s = steps_.size(); s-- > 0;) {
    if (s + 1 == test_at_) mark(&test_, test_.value >= next_.size());
    std::vector<Read>& reads = steps_[s].reads;
    for (size_t i = reads.size(); i-- > 0;) mark(&reads[i], s >= test_at_ || reads[i].value >= next_.size());
  }
  if (!test_at_) mark(&test_, false);
}

// One run of a loop.
class Run {
 public:
  Run(const Turn& turn, OpKernelContext* ctx, AsyncOpKernel::DoneCallback done);

  // Runs turns until the loop has ended, or until a kernel ends later: that one calls it again.  Deletes itself.
  void Advance();

 private:
  absl::Status Test(bool* holds);
  absl::Status NextTurn();
  absl::Status Start(const Step& step, bool* ends_later);
  bool StartAsync(AsyncOpKernel* kernel);
  absl::Status Finish(const Step& step);
  absl::Status Take(const Read& read, MemoryType wants, Tensor* to);
  absl::Status Give();
  void End(const absl::Status& status);

  const Turn& turn_;
  OpKernelContext* const ctx_;
  const AsyncOpKernel::DoneCallback done_;
  Device* const device_;
  std::vector<Tensor> values_, inputs_;
  std::vector<TensorValue> input_values_;
  OpKernelContext::Params params_;
  std::optional<OpKernelContext> inner_;
  size_t at_ = 0;
  bool is_first_ = true, was_left_ = false;
  std::atomic<bool> one_passed_{false};  // of two: who started a kernel, and the kernel's end
};

Run::Run(const Turn& turn, OpKernelContext* ctx, AsyncOpKernel::DoneCallback done)
    : turn_(turn), ctx_(ctx), done_(std::move(done)), device_(static_cast<Device*>(ctx->device())) {
  values_.resize(turn.size());
  for (int i = 0; i < ctx->num_inputs(); ++i) values_[static_cast<size_t>(i)] = ctx->input(i);
  params_.step_id = ctx->step_id();
  params_.deadline = ctx->deadline();
  params_.device = device_;
  params_.resource_manager = ctx->resource_manager();
  params_.step_container = ctx->step_container();
  params_.rendezvous = ctx->rendezvous();
  params_.collective_executor = ctx->collective_executor();
  params_.session_config = ctx->session_config();
  params_.session_state = ctx->session_state();
  params_.session_metadata = ctx->session_metadata();
  params_.cancellation_manager = ctx->cancellation_manager();
  params_.op_device_context = ctx->op_device_context();
  params_.function_library = ctx->function_library();
  params_.runner = ctx->runner();
  params_.run_all_kernels_inline = ctx->run_all_kernels_inline();
}

void Run::Advance() {
  const std::vector<Step>& steps = turn_.steps();
  absl::Status status;
  if (was_left_) status = Finish(steps[at_++]);
  while (status.ok()) {
    bool holds = true, ends_later = false;
    if (at_ == turn_.test_at()) status = Test(&holds);
    if (!status.ok() || !holds) break;
    if (at_ == steps.size()) {
      status = NextTurn();
    } else if (steps[at_].is_fixed && !is_first_) {
      ++at_;
    } else {
      status = Start(steps[at_], &ends_later);
      if (ends_later) return;
      if (status.ok()) status = Finish(steps[at_++]);
    }
  }
  End(status);
}

absl::Status Run::Test(bool* holds) {
  Tensor test;
  TF_RETURN_IF_ERROR(Take(turn_.test(), tensorflow::HOST_MEMORY, &test));
  if (test.dtype() != tensorflow::DT_BOOL || test.NumElements() != 1) {
    return absl::InvalidArgumentError("The condition of a loop must be one truth value.");
  }
  *holds = *static_cast<const bool*>(test.data());
  return absl::OkStatus();
}

absl::Status Run::NextTurn() {
  if (ctx_->cancellation_manager() && ctx_->cancellation_manager()->IsCancelled()) {
    return absl::CancelledError("Loop execution was cancelled.");
  }
  const std::vector<Read>& next = turn_.next();
  inputs_.resize(next.size());
  for (size_t i = 0; i < next.size(); ++i) {
    if (!turn_.IsFixed(i)) TF_RETURN_IF_ERROR(Take(next[i], turn_.MemoryOf(i), &inputs_[i]));
  }
  for (size_t i = 0; i < next.size(); ++i) {
    if (!turn_.IsFixed(i)) values_[i] = std::move(inputs_[i]);
  }
  at_ = 0;
  is_first_ = false;
  return absl::OkStatus();
}

// Runs a step's kernel; `ends_later`: all that follows is left to the call that comes when it has ended.
absl::Status Run::Start(const Step& step, bool* ends_later) {
  inputs_.resize(step.reads.size());
  input_values_.clear();
  for (size_t i = 0; i < step.reads.size(); ++i) {
    TF_RETURN_IF_ERROR(Take(step.reads[i], step.kernel->input_memory_types()[i], &inputs_[i]));
    input_values_.emplace_back(&inputs_[i]);
  }
  params_.op_kernel = step.kernel.get();
  params_.inputs = input_values_;
  params_.input_alloc_attrs = step.input_attributes;
  params_.output_attr_array = step.output_attributes.data();
  inner_.emplace(&params_);
  // For the profiler, as executors do; programs name themselves.
  tsl::profiler::TraceMe trace([&] { return step.kernel->name() + ":" + step.kernel->type_string(); });
  if (AsyncOpKernel* kernel = step.kernel->AsAsync()) {
    *ends_later = !StartAsync(kernel);
  } else {
    device_->Compute(step.kernel.get(), &*inner_);
  }
  return absl::OkStatus();
}

// True when the kernel has ended.
bool Run::StartAsync(AsyncOpKernel* kernel) {
  one_passed_ = false;
  was_left_ = true;
  device_->ComputeAsync(kernel, &*inner_, [this] {  // a thread that ends kernels must not run what follows
    if (one_passed_.exchange(true)) (*params_.runner)([this] { Advance(); });
  });
  return one_passed_.exchange(true);  // where it has not ended, this run may be gone now
}

absl::Status Run::Finish(const Step& step) {
  was_left_ = false;
  absl::Status status = inner_->status();
  if (!status.ok()) return tensorflow::AttachDef(status, step.kernel->def());
  for (int i = 0; i < inner_->num_outputs(); ++i) {
    size_t number = step.first_result + static_cast<size_t>(i);
    Tensor* result = inner_->mutable_output(i);
    if (!turn_.IsRead(number)) continue;
    if (!result) return absl::InternalError("Node '" + step.kernel->name() + "' of a loop gave no result.");
    values_[number] = std::move(*result);
  }
  inner_.reset();
  inputs_.clear();
  return absl::OkStatus();
}

absl::Status Run::Take(const Read& read, MemoryType wants, Tensor* to) {
  Tensor& value = values_[read.value];
  MemoryType has = turn_.MemoryOf(read.value);
  if (has != wants && ctx_->op_device_context()) {  // a device with a memory of its own
    TF_RETURN_IF_ERROR(Move(ctx_, value, has, wants, to));
    if (read.last) value = Tensor();
  } else if (read.last) {
    *to = std::move(value);
  } else {
    *to = value;
  }
  return absl::OkStatus();
}

// Sets the op's results.
absl::Status Run::Give() {
  for (int i = 0; i < ctx_->num_outputs(); ++i) {
    Tensor result;
    TF_RETURN_IF_ERROR(Take({static_cast<size_t>(i), true}, ctx_->output_memory_type(i), &result));
    ctx_->set_output(i, result);
  }
  return absl::OkStatus();
}

void Run::End(const absl::Status& status) {
  ctx_->SetStatus(status.ok() ? Give() : status);
  AsyncOpKernel::DoneCallback done = done_;
  delete this;
  done();
}

class StitchedWhileOp : public AsyncOpKernel {
 public:
  explicit StitchedWhileOp(OpKernelConstruction* ctx)
      : AsyncOpKernel(ctx), graph_def_version_(ctx->graph_def_version()) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("cond", &cond_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("body", &body_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Turn* turn = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, TurnOf(ctx, &turn), done);
    (new Run(*turn, ctx, std::move(done)))->Advance();
  }

 private:
  absl::Status TurnOf(OpKernelContext* ctx, const Turn** turn) {
    std::lock_guard<std::mutex> lock(mu_);
    if (!turn_) {
      std::unique_ptr<FunctionBody> cond, body;
      TF_RETURN_IF_ERROR(BodyOf(ctx, cond_, &cond));
      TF_RETURN_IF_ERROR(BodyOf(ctx, body_, &body));
      auto made =
          std::make_unique<Turn>(static_cast<Device*>(ctx->device()), ctx->resource_manager(), graph_def_version_);
      std::vector<MemoryType> variables(input_memory_types().begin(), input_memory_types().end());
      TF_RETURN_IF_ERROR(made->Make(*cond, *body, variables));
      turn_ = std::move(made);
    }
    *turn = turn_.get();
    return absl::OkStatus();
  }

  static absl::Status BodyOf(OpKernelContext* ctx, const NameAttrList& function, std::unique_ptr<FunctionBody>* body) {
    if (!ctx->function_library()) return NoFallback();
    const auto* library = ctx->function_library()->GetFunctionLibraryDefinition();
    const tensorflow::FunctionDef* found = library->Find(function.name());
    if (!found) return absl::NotFoundError("Function '" + function.name() + "' of a loop is not in its graph.");
    TF_RETURN_IF_ERROR(
        tensorflow::FunctionDefToBodyHelper(*found, tensorflow::AttrSlice(&function.attr()), library, body));
    return PutInPlace(ctx->device()->name(), body->get());
  }

  // Lets TensorFlow exchange nodes as it does in every graph that is about to run on a device.  On a CPU, oneDNN's
  // kernels take the place of others, and some nodes that Grappler makes have no other kernel that can run them.
  static absl::Status PutInPlace(const std::string& device, FunctionBody* body) {
    for (Node* node : body->graph->op_nodes()) node->set_assigned_device_name(device);
    std::unordered_map<std::string, std::unique_ptr<tensorflow::Graph>> graphs;
    auto& graph = graphs[device];
    graph.reset(body->graph);
    tensorflow::GraphOptimizationPassOptions options;
    options.flib_def = graph->mutable_flib_def();
    options.partition_graphs = &graphs;
    options.is_function_graph = true;
    absl::Status status = tensorflow::OptimizationPassRegistry::Global()->RunGrouping(
        tensorflow::OptimizationPassRegistry::POST_PARTITIONING, options);
    body->graph = graph.release();
    return status;
  }

  const int graph_def_version_;
  NameAttrList cond_, body_;
  std::mutex mu_;
  std::unique_ptr<Turn> turn_;  // made when first needed
};

REGISTER_KERNEL_BUILDER(Name("StitchedWhile").Device(tensorflow::DEVICE_CPU), StitchedWhileOp);
REGISTER_KERNEL_BUILDER(Name("StitchedWhile").Device(tensorflow::DEVICE_GPU), StitchedWhileOp);
REGISTER_KERNEL_BUILDER(Name("StatelessStitchedWhile").Device(tensorflow::DEVICE_CPU), StitchedWhileOp);
REGISTER_KERNEL_BUILDER(Name("StatelessStitchedWhile").Device(tensorflow::DEVICE_GPU), StitchedWhileOp);

}  // namespace
}  // namespace tf_stitch
