// Calls StitchedProgram kernels from Python, with no TensorFlow function around them, and kernels of ops on variables.
//
// A function that became such kernels needs no executor: they get the eager tensors that the call has, the variables
// that the function captured and what the kernels before them gave; only the function's results become eager tensors
// (a training step has a thousand values of variables that nobody else ever sees).  What such a call cannot do it
// declines before anything has been written, and the caller calls the function (or the eager op) instead.  Not part of
// a server's build.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/synchronization/notification.h"
#include "moves.h"
#include "op_fallback.h"
#include "runtime_host.h"
#include "tensorflow/c/eager/tfe_context_internal.h"
#include "tensorflow/c/eager/tfe_tensorhandle_internal.h"
#include "tensorflow/core/common_runtime/eager/context.h"
#include "tensorflow/core/common_runtime/eager/tensor_handle.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/profiler/lib/traceme.h"
#include "tensorflow/core/public/version.h"

struct _object;  // Python's
using PyObject = _object;

namespace tf_stitch {
namespace {

using tensorflow::AllocatorAttributes;
using tensorflow::AsyncOpKernel;
using tensorflow::Device;
using tensorflow::EagerContext;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::TensorHandle;
using tensorflow::TensorValue;
using tensorflow::Var;

// What is used of Python and of TensorFlow's Python library.  Python gives the addresses: this library does not depend
// on either.
struct Python {
  TFE_TensorHandle* (*handle_of)(const PyObject*);         // of an eager tensor, borrowed
  PyObject* (*tensor_of)(TFE_TensorHandle*, bool packed);  // takes the handle
  PyObject* (*list_item)(PyObject*, intptr_t);             // borrowed
  int (*append)(PyObject* list, PyObject*);
  void (*drop)(PyObject*);
  void* (*release_gil)();
  void (*take_gil)(void*);
};

Python g_python;

class WithoutGil {
 public:
  WithoutGil() : thread_(g_python.release_gil()) {}
  ~WithoutGil() { g_python.take_gil(thread_); }

 private:
  void* const thread_;
};

// Where an input of a kernel comes from: the call's argument `index`, `fixed` (a constant or a variable's handle), or
// the value `index` of those that the kernels before it gave, counted through.
struct Source {
  enum Kind : int { kArgument = 0, kConstant = 1, kVariable = 2, kValue = 3 } kind;
  int index;
  Tensor fixed;
  Var* variable = nullptr;  // kept by the handle in `fixed`
};

enum Result : int { kDone = 0, kDeclined = -1 };  // others: an absl::StatusCode

thread_local std::string t_error;

// The values of variables for one run.  A variable whose readers must copy (it gets sparse updates) is not copied but
// stays locked while the run is enqueued.
class Variables {
 public:
  ~Variables() {
    for (Var* v : locked_) v->mu()->unlock_shared();
  }

  // True when a result shares the memory of a variable whose readers must copy.
  bool Share(const Tensor& result) const {
    return std::any_of(locked_.begin(), locked_.end(), [&](Var* v) { return result.SharesBufferWith(*v->tensor()); });
  }

  // False when the variable holds nothing.  Call by increasing address of the variables' locks.
  bool Read(Var* variable, Tensor* value) {
    if (!locked_.empty() && locked_.back() == variable) {  // a second read would wait for a writer that waits for us
      *value = *variable->tensor();
      return true;
    }
    variable->mu()->lock_shared();
    bool good = variable->is_initialized && variable->tensor()->IsInitialized();
    if (good) *value = *variable->tensor();
    if (good && variable->copy_on_read_mode.load()) {
      locked_.push_back(variable);
    } else {
      variable->mu()->unlock_shared();
    }
    return good;
  }

 private:
  absl::InlinedVector<Var*, 4> locked_;
};

// A kernel, where its inputs come from and in which memory they lie.
struct Step {
  Step(std::unique_ptr<OpKernel> made, std::vector<Source> from, bool is_writer);

  std::unique_ptr<OpKernel> kernel;
  std::vector<Source> sources;  // by input
  bool writes;                  // to variables
  std::vector<size_t> by_lock;  // inputs that are variables, in the order in which they are locked
  absl::InlinedVector<AllocatorAttributes, 8> input_attributes, output_attributes;
};

Step::Step(std::unique_ptr<OpKernel> made, std::vector<Source> from, bool is_writer)
    : kernel(std::move(made)), sources(std::move(from)), writes(is_writer) {
  for (tensorflow::MemoryType memory : kernel->input_memory_types()) input_attributes.push_back(On(memory));
  for (tensorflow::MemoryType memory : kernel->output_memory_types()) output_attributes.push_back(On(memory));
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].kind == Source::kVariable) by_lock.push_back(i);
  }
  std::sort(by_lock.begin(), by_lock.end(), [this](size_t a, size_t b) {
    return std::less<void*>()(sources[a].variable->mu(), sources[b].variable->mu());
  });
}

// Kernels of one device that run one after the other.
class DirectCall {
 public:
  DirectCall(EagerContext* context, Device* device) : context_(context), device_(device) {}

  // Null, and `why` says it, when there is no such device.
  static std::unique_ptr<DirectCall> Make(EagerContext* context, const std::string& device_name, std::string* why);

  // Adds the kernel of a node; false, with nothing added, when it cannot be one of this call's.
  bool Add(const tensorflow::NodeDef& node, std::vector<Source> sources, bool writes, std::string* why);

  // What the call returns: arguments (kArgument; other eager tensors of the same memory) and values (kValue).
  void SetResults(std::vector<Source> results) { results_ = std::move(results); }

  int Call(PyObject* arguments, PyObject* results) const;

 private:
  // An argument as a kernel takes it.
  struct Slot {
    int argument;
    tensorflow::DataType dtype;
    Device* memory;
  };
  using Values = std::vector<Tensor>;

  std::string WhyNot(const Step& step) const;
  std::vector<TensorHandle*> Handles(PyObject* arguments) const;
  bool Arguments(const std::vector<TensorHandle*>& handles, std::vector<Tensor>* given) const;
  absl::Status RunAll(std::vector<Tensor>* given, Values* values, bool* written) const;
  absl::Status Run(const Step& step, std::vector<Tensor>* given, Values* values) const;
  absl::Status Compute(const Step& step, const absl::InlinedVector<TensorValue, 8>& inputs, Variables* variables,
                       Values* values) const;
  void Append(TensorHandle* handle, PyObject* results) const;
  Device* MemoryOf(const AllocatorAttributes& attributes) const {
    return attributes.on_host() ? context_->HostCPU() : device_;
  }

  EagerContext* const context_;
  Device* const device_;
  std::vector<Step> steps_;
  std::vector<Slot> slots_;                  // by the `index` of kArgument sources
  std::vector<Device*> memory_;              // by value
  std::vector<tensorflow::DataType> types_;  // by value
  std::vector<Source> results_;
};

std::unique_ptr<DirectCall> DirectCall::Make(EagerContext* context, const std::string& device_name, std::string* why) {
  Device* device = nullptr;
  absl::Status status = context->FindDeviceFromName(device_name.c_str(), &device);
  if (!status.ok()) return *why = std::string(status.message()), nullptr;
  return std::make_unique<DirectCall>(context, device);
}

bool DirectCall::Add(const tensorflow::NodeDef& node, std::vector<Source> sources, bool writes, std::string* why) {
  std::shared_ptr<const tensorflow::NodeProperties> properties;
  absl::Status status =
      tensorflow::NodeProperties::CreateFromNodeDef(node, tensorflow::OpRegistry::Global(), &properties);
  OpKernel* kernel = nullptr;
  if (status.ok()) {
    status = tensorflow::CreateOpKernel(tensorflow::DeviceType(device_->device_type()), device_,
                                        device_->GetAllocator({}), /*flib=*/nullptr, device_->resource_manager(),
                                        properties, TF_GRAPH_DEF_VERSION, &kernel);
  }
  if (!status.ok()) return *why = std::string(status.message()), false;
  std::unique_ptr<OpKernel> owned(kernel);
  if (kernel->num_inputs() != static_cast<int>(sources.size())) return *why = "the node has other inputs", false;
  for (Source& s : sources) {
    if (s.kind != Source::kVariable) continue;
    const ResourceHandle& handle = s.fixed.scalar<ResourceHandle>()();
    absl::StatusOr<Var*> found = handle.GetResource<Var>();
    if (!handle.IsRefCounting() || !found.ok() || handle.device() != device_->name()) {
      return *why = "a variable is on another device or does not belong to its handle", false;
    }
    s.variable = *found;
  }
  Step step(std::move(owned), std::move(sources), writes);
  if (*why = WhyNot(step); !why->empty()) return false;
  for (size_t i = 0; i < step.sources.size(); ++i) {
    Source& s = step.sources[i];
    if (s.kind != Source::kArgument) continue;
    slots_.push_back({s.index, kernel->input_type(static_cast<int>(i)), MemoryOf(step.input_attributes[i])});
    s.index = static_cast<int>(slots_.size()) - 1;
  }
  for (int i = 0; i < kernel->num_outputs(); ++i) {
    memory_.push_back(MemoryOf(step.output_attributes[static_cast<size_t>(i)]));
    types_.push_back(kernel->output_type(i));
  }
  steps_.push_back(std::move(step));
  return true;
}

// What the kernels before a step give must be what it takes; "" or why not.
std::string DirectCall::WhyNot(const Step& step) const {
  for (size_t i = 0; i < step.sources.size(); ++i) {
    const Source& s = step.sources[i];
    if (s.kind != Source::kValue) continue;
    auto value = static_cast<size_t>(s.index);
    if (value >= memory_.size()) return "no kernel before it gives value " + std::to_string(s.index);
    if (types_[value] != step.kernel->input_type(static_cast<int>(i))) return "a value is of another type";
    if (memory_[value] != MemoryOf(step.input_attributes[i])) return "a value lies in other memory";
  }
  return "";
}

// The caller's tensors by slot; `arguments` keeps them.
std::vector<TensorHandle*> DirectCall::Handles(PyObject* arguments) const {
  std::vector<TensorHandle*> handles;
  for (const Slot& slot : slots_) {
    PyObject* item = g_python.list_item(arguments, slot.argument);
    handles.push_back(tensorflow::TensorHandleFromInterface(tensorflow::unwrap(g_python.handle_of(item))));
  }
  return handles;
}

// Finds the arguments, by slot; false when one lies elsewhere than its kernel takes it and TensorFlow has made no copy
// of it there.  May wait for a thread whose ops are asynchronous.
bool DirectCall::Arguments(const std::vector<TensorHandle*>& handles, std::vector<Tensor>* given) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    TensorHandle* handle = handles[i];
    if (handle->Type() != TensorHandle::LOCAL || handle->dtype != slots_[i].dtype) return false;
    const Tensor* tensor = nullptr;
    absl::Status found = handle->DeviceOrHostCPU(*context_) == slots_[i].memory
                             ? handle->Tensor(&tensor)
                             : handle->TensorFromDevice(slots_[i].memory, &tensor);
    if (!found.ok()) return false;
    given->push_back(*tensor);
  }
  return true;
}

// `written` tells whether a step that writes to variables has begun.
absl::Status DirectCall::RunAll(std::vector<Tensor>* given, Values* values, bool* written) const {
  values->reserve(memory_.size());  // they stay where they are
  for (const Step& step : steps_) {
    *written |= step.writes;
    TF_RETURN_IF_ERROR(Run(step, given, values));
  }
  return absl::OkStatus();
}

// Nothing that runs here makes a result of an input's memory, but for an assignment; and who writes to a variable
// copies what is shared before.  So inputs need no reference of their own.
absl::Status DirectCall::Run(const Step& step, std::vector<Tensor>* given, Values* values) const {
  Variables variables;  // a later step may write to those that this one keeps locked
  std::vector<Tensor> read(step.by_lock.size());
  absl::InlinedVector<TensorValue, 8> inputs(step.sources.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Source& s = step.sources[i];
    auto index = static_cast<size_t>(s.index);
    if (s.kind == Source::kArgument) inputs[i] = TensorValue(&(*given)[index]);
    if (s.kind == Source::kConstant) inputs[i] = TensorValue(const_cast<Tensor*>(&s.fixed));
    if (s.kind == Source::kValue) inputs[i] = TensorValue(&(*values)[index]);
  }
  for (size_t k = 0; k < read.size(); ++k) {
    size_t i = step.by_lock[k];
    if (!variables.Read(step.sources[i].variable, &read[k]) ||
        read[k].dtype() != step.kernel->input_type(static_cast<int>(i))) {
      return NoFallback();
    }
    inputs[i] = TensorValue(&read[k]);
  }
  return Compute(step, inputs, &variables, values);
}

// Appends the kernel's results to `values`.
absl::Status DirectCall::Compute(const Step& step, const absl::InlinedVector<TensorValue, 8>& inputs,
                                 Variables* variables, Values* values) const {
  tensorflow::DeviceContext* device_context = nullptr;
  TF_RETURN_IF_ERROR(device_->TryGetDeviceContext(&device_context));
  tensorflow::core::ScopedUnref unref(device_context);
  OpKernelContext::Params params;
  params.op_kernel = step.kernel.get();
  params.device = device_;
  params.resource_manager = device_->resource_manager();
  params.inputs = inputs;
  params.input_alloc_attrs = step.input_attributes;
  params.output_attr_array = const_cast<AllocatorAttributes*>(step.output_attributes.data());
  params.op_device_context = device_context;
  params.runner = context_->runner();
  OpKernelContext op_context(&params);
  // For the profiler, as executors do; programs name themselves.
  tsl::profiler::TraceMe trace([&] { return step.kernel->name() + ":" + step.kernel->type_string(); });
  FlushDenormals flush;  // as where TensorFlow runs the kernel
  if (AsyncOpKernel* kernel = step.kernel->AsAsync()) {
    absl::Notification done;
    device_->ComputeAsync(kernel, &op_context, [&done] { done.Notify(); });
    done.WaitForNotification();
  } else {
    device_->Compute(step.kernel.get(), &op_context);
  }
  if (!op_context.status().ok()) return op_context.status();
  for (int i = 0; i < op_context.num_outputs(); ++i) {
    values->push_back(std::move(*op_context.mutable_output(i)));
    if (variables->Share(values->back())) return NoFallback();
  }
  return absl::OkStatus();
}

int DirectCall::Call(PyObject* arguments, PyObject* results) const {
  if (context_->Executor().Async() || context_->ShouldStoreGraphs()) return kDeclined;
  std::vector<TensorHandle*> handles = Handles(arguments);
  Values values;
  absl::Status status;
  bool written = false;
  {
    WithoutGil without;
    std::vector<Tensor> given;
    status = Arguments(handles, &given) ? RunAll(&given, &values, &written) : NoFallback();
  }
  if (!status.ok() && !written) return kDeclined;  // the function's errors name nodes
  if (!status.ok()) {
    t_error = std::string(status.message());
    return static_cast<int>(status.code());
  }
  for (const Source& result : results_) {
    if (result.kind == Source::kArgument) {
      PyObject* item = g_python.list_item(arguments, result.index);
      TensorHandle* handle = tensorflow::TensorHandleFromInterface(tensorflow::unwrap(g_python.handle_of(item)));
      handle->Ref();
      Append(handle, results);
    } else {
      auto index = static_cast<size_t>(result.index);
      Device* memory = context_->CanonicalDevice(memory_[index]);
      Tensor value = values[index];
      Append(TensorHandle::CreateLocalHandle(std::move(value), memory, device_, context_), results);
    }
  }
  WithoutGil without;  // others may go on while many tensors are freed
  values.clear();
  return kDone;
}

// Takes the handle.
void DirectCall::Append(TensorHandle* handle, PyObject* results) const {
  PyObject* tensor = g_python.tensor_of(tensorflow::wrap(handle), /*packed=*/false);
  g_python.append(results, tensor);
  g_python.drop(tensor);
}

}  // namespace
}  // namespace tf_stitch

// --- what tf_stitch/direct_call.py calls through ctypes; it holds the GIL ---------------------------

extern "C" {

// Addresses, in the order of struct Python.
void tf_stitch_direct_python(void* const* addresses) {
  static_assert(sizeof(tf_stitch::Python) == 7 * sizeof(void*));
  std::copy(addresses, addresses + 7, reinterpret_cast<void**>(&tf_stitch::g_python));
}

// Makes a call without kernels.  Null when there can be no such call; tf_stitch_direct_error says why.
void* tf_stitch_direct_new(TFE_Context* context, const char* device) {
  auto* eager = tensorflow::ContextFromInterface(tensorflow::unwrap(context));
  return tf_stitch::DirectCall::Make(eager, device, &tf_stitch::t_error).release();
}

// Adds the kernel of a node (a serialized NodeDef).  Input i comes from the call's argument indices[i] (kinds[i] = 0),
// from the eager tensor indices[i] of `fixed`: a constant (1), or the handle of a variable to be read (2), or is the
// result indices[i] of those of the kernels before it (3).  `writes`: to variables.  0 when it cannot be one of this
// call's; tf_stitch_direct_error says why.
int tf_stitch_direct_add(void* call, const char* node, size_t node_size, int inputs, const int* kinds,
                         const int* indices, PyObject* fixed, int writes) {
  using tf_stitch::Source;
  tensorflow::NodeDef def;
  if (!def.ParseFromArray(node, static_cast<int>(node_size))) return tf_stitch::t_error = "no NodeDef", 0;
  std::vector<Source> sources;
  for (int i = 0; i < inputs; ++i) {
    sources.push_back({static_cast<Source::Kind>(kinds[i]), indices[i], {}});
    if (kinds[i] != Source::kConstant && kinds[i] != Source::kVariable) continue;
    PyObject* item = tf_stitch::g_python.list_item(fixed, indices[i]);
    const tensorflow::Tensor* tensor = nullptr;
    auto* handle = tensorflow::TensorHandleFromInterface(tensorflow::unwrap(tf_stitch::g_python.handle_of(item)));
    absl::Status status = handle->Tensor(&tensor);
    if (!status.ok()) return tf_stitch::t_error = std::string(status.message()), 0;
    sources.back().fixed = *tensor;
  }
  tf_stitch::WithoutGil without;  // loading code may wait for a thread that waits for the GIL
  return static_cast<tf_stitch::DirectCall*>(call)->Add(def, std::move(sources), writes != 0, &tf_stitch::t_error);
}

// Says what a call returns: arguments (kinds[i] = 0) and results of its kernels (3).
void tf_stitch_direct_results(void* call, int results, const int* kinds, const int* indices) {
  using tf_stitch::Source;
  std::vector<Source> all;
  for (int i = 0; i < results; ++i) all.push_back({static_cast<Source::Kind>(kinds[i]), indices[i], {}});
  static_cast<tf_stitch::DirectCall*>(call)->SetResults(std::move(all));
}

void tf_stitch_direct_delete(void* call) { delete static_cast<tf_stitch::DirectCall*>(call); }

// Appends the results to a list.  0; -1 when the function has to be called instead; else an error's code, whose message
// tf_stitch_direct_error gives.
int tf_stitch_direct_call(void* call, PyObject* arguments, PyObject* results) {
  return static_cast<tf_stitch::DirectCall*>(call)->Call(arguments, results);
}

const char* tf_stitch_direct_error() { return tf_stitch::t_error.c_str(); }
}
