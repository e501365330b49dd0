#include "stitched_node.h"

#include <mutex>
#include <unordered_set>
#include <utility>

#include "counters.h"
#include "environment.h"
#include "trust.h"

namespace tf_stitch {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

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
std::string CheckTypes(const Program& program, tensorflow::DataTypeSlice in, tensorflow::DataTypeSlice out) {
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

// Why the native code in a node is not trusted, or "".
std::string Refused(const tensorflow::NodeDef& node) {
  auto text = [&node](const char* attr) -> std::string_view {
    const tensorflow::AttrValue* value = tensorflow::AttrSlice(node).Find(attr);
    return value ? std::string_view(value->s()) : std::string_view();
  };
  return WhyNotAllowed(text("program"), text(kSignatureAttr));
}

}  // namespace

void WarnOnce(const std::string& message) {
  static auto& mu = *new std::mutex;
  static auto& said = *new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(mu);
  if (said.size() < 1000 && said.insert(message).second) LOG(WARNING) << message;
}

StitchedNode::StitchedNode(OpKernelConstruction* ctx, bool on_gpu) : name_(ctx->def().name()) {
  tensorflow::NameAttrList function;
  OP_REQUIRES_OK(ctx, ctx->GetAttr("fallback", &function));
  fallback_ = std::make_unique<Fallback>(std::move(function), on_gpu);
}

void StitchedNode::Prepare(OpKernelConstruction* ctx, const std::function<std::string()>& load) {
  if (!ctx->status().ok() || IsOn("TF_STITCH_DISABLE", false)) return;
  if (std::string refused = Refused(ctx->def()); !refused.empty()) {
    return WarnOnce("tf_stitch: " + refused + "; TensorFlow's operations run instead of stitched ones.");
  }
  std::string why = Parse(ctx);
  if (why.empty()) why = load();
  program_.code = {};  // loaded by now
  program_.text = {};
  ready_ = why.empty();
  if (ready_) return;
  WarnOnce("tf_stitch: the program of node '" + name_ + "' cannot be used: " + why +
           "; its TensorFlow operations run instead.");
}

std::string StitchedNode::Parse(OpKernelConstruction* ctx) {
  const tensorflow::AttrValue* attr = tensorflow::AttrSlice(ctx->def()).Find("program");
  std::string error;
  if (!attr) return "the attr 'program' is missing";
  if (!ParseProgram(attr->s(), &program_, &error)) return "the attr 'program' is corrupt: " + error;
  return CheckTypes(program_, ctx->input_types(), ctx->output_types());
}

std::shared_ptr<const Plan> StitchedNode::PlanFor(OpKernelContext* ctx, PlanCache* plans) const {
  static thread_local Signature signature;
  if (!ReadSignature(program_, ctx, &signature)) return nullptr;
  std::shared_ptr<const Plan> plan = plans->Get(program_, signature);
  if (plan->usable) return plan;
  VLOG(1) << name_ << " runs its TensorFlow operations: " << plan->why_not;
  return nullptr;
}

bool StitchedNode::Allocate(OpKernelContext* ctx, const Plan& plan, int64_t arena_bytes, Memory* memory) const {
  if (memory->inputs.empty()) {
    for (int i = 0; i < ctx->num_inputs(); ++i) memory->inputs.push_back(&ctx->input(i));
  }
  if (arena_bytes && !ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({arena_bytes}), &memory->arena).ok()) {
    return false;
  }
  auto& outputs = memory->outputs;
  outputs.resize(program_.outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Buffer& b = program_.buffers[program_.outputs[i]];
    if (b.backing != Backing::kOutput || b.backing_index != i) continue;
    tensorflow::AllocatorAttributes attributes = ctx->output_alloc_attr(static_cast<int>(i));
    if (attributes.on_host()) attributes = {};  // kernels write where they run
    if (!ctx->allocate_temp(static_cast<DataType>(b.dtype), TensorShape(plan.output_dims[i]), &outputs[i], attributes)
             .ok()) {
      return false;
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {  // outputs that share another tensor's memory
    const Buffer& b = program_.buffers[program_.outputs[i]];
    if (b.backing == Backing::kOutput && b.backing_index == i) continue;
    const Tensor& source = b.backing == Backing::kInput ? *memory->inputs[b.backing_index] : outputs[b.backing_index];
    if (!outputs[i].BitcastFrom(source, static_cast<DataType>(b.dtype), TensorShape(plan.output_dims[i])).ok()) {
      return false;
    }
  }
  memory->addresses.resize(program_.buffers.size());
  for (size_t id = 0; id < program_.buffers.size(); ++id) {
    const Buffer& b = program_.buffers[id];
    memory->addresses[id] = b.backing == Backing::kInput    ? memory->inputs[b.backing_index]->data()
                            : b.backing == Backing::kOutput ? outputs[b.backing_index].data()
                            : plan.arena_bytes ? static_cast<char*>(memory->arena.data()) + plan.arena_offset[id]
                                               : nullptr;
  }
  return true;
}

void StitchedNode::SetOutputs(OpKernelContext* ctx, Memory* memory) const {
  for (size_t i = 0; i < memory->outputs.size(); ++i) {
    ctx->set_output(static_cast<int>(i), std::move(memory->outputs[i]));
  }
  ++GlobalCounters().stitched;
}

}  // namespace tf_stitch
