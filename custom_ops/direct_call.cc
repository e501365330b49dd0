// Calls a StitchedProgram kernel from Python, with no TensorFlow function around it, and kernels of ops on variables.
//
// A function that became one StitchedProgram needs no executor: the kernel gets the eager tensors that the call has and
// the variables that the function captured, and its results become eager tensors.  What such a call cannot do it
// declines before anything has happened, and the caller calls the function (or the eager op) instead.  Not part of a
// server's build.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/synchronization/notification.h"
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

// Where an input of the kernel comes from: the call's argument `index`, or `fixed`, a constant or a variable's handle.
struct Source {
  enum Kind : int { kArgument = 0, kConstant = 1, kVariable = 2 } kind;
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

class DirectCall {
 public:
  DirectCall(EagerContext* context, Device* device, std::unique_ptr<OpKernel> kernel, std::vector<Source> sources)
      : context_(context), device_(device), kernel_(std::move(kernel)), sources_(std::move(sources)) {
    for (int i = 0; i < kernel_->num_inputs(); ++i) input_attributes_.push_back(On(kernel_->input_memory_types()[i]));
    for (int i = 0; i < kernel_->num_outputs(); ++i) {
      output_attributes_.push_back(On(kernel_->output_memory_types()[i]));
    }
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (sources_[i].kind == Source::kVariable) by_lock_.push_back(i);
    }
    std::sort(by_lock_.begin(), by_lock_.end(), [this](size_t a, size_t b) {
      return std::less<void*>()(sources_[a].variable->mu(), sources_[b].variable->mu());
    });
  }

  // Says why there can be no such call in `why`.
  static std::unique_ptr<DirectCall> Make(EagerContext* context, const std::string& device_name,
                                          const tensorflow::NodeDef& node, std::vector<Source> sources,
                                          std::string* why);

  int Call(PyObject* arguments, PyObject* results);

 private:
  static AllocatorAttributes On(tensorflow::MemoryType memory) {
    AllocatorAttributes attributes;
    attributes.set_on_host(memory == tensorflow::HOST_MEMORY);
    return attributes;
  }

  absl::InlinedVector<TensorHandle*, 8> Handles(PyObject* arguments) const;
  bool Arguments(const absl::InlinedVector<TensorHandle*, 8>& handles, absl::InlinedVector<Tensor, 8>* inputs) const;
  absl::Status Run(absl::InlinedVector<Tensor, 8>* inputs, Variables* variables, std::vector<Tensor>* outputs) const;
  Device* MemoryOf(const AllocatorAttributes& attributes) const {
    return attributes.on_host() ? context_->HostCPU() : device_;
  }

  EagerContext* const context_;
  Device* const device_;
  const std::unique_ptr<OpKernel> kernel_;
  const std::vector<Source> sources_;  // by input
  std::vector<size_t> by_lock_;        // inputs that are variables, in the order in which they are locked
  absl::InlinedVector<AllocatorAttributes, 8> input_attributes_, output_attributes_;
};

std::unique_ptr<DirectCall> DirectCall::Make(EagerContext* context, const std::string& device_name,
                                             const tensorflow::NodeDef& node, std::vector<Source> sources,
                                             std::string* why) {
  Device* device = nullptr;
  absl::Status status = context->FindDeviceFromName(device_name.c_str(), &device);
  std::shared_ptr<const tensorflow::NodeProperties> properties;
  if (status.ok()) {
    status = tensorflow::NodeProperties::CreateFromNodeDef(node, tensorflow::OpRegistry::Global(), &properties);
  }
  OpKernel* kernel = nullptr;
  if (status.ok()) {
    status = tensorflow::CreateOpKernel(tensorflow::DeviceType(device->device_type()), device, device->GetAllocator({}),
                                        /*flib=*/nullptr, device->resource_manager(), properties, TF_GRAPH_DEF_VERSION,
                                        &kernel);
  }
  if (!status.ok()) return *why = std::string(status.message()), nullptr;
  std::unique_ptr<OpKernel> owned(kernel);
  if (kernel->num_inputs() != static_cast<int>(sources.size())) {
    return *why = "the node has other inputs", nullptr;
  }
  for (Source& s : sources) {
    if (s.kind != Source::kVariable) continue;
    const ResourceHandle& handle = s.fixed.scalar<ResourceHandle>()();
    absl::StatusOr<Var*> found = handle.GetResource<Var>();
    if (!handle.IsRefCounting() || !found.ok() || handle.device() != device->name()) {
      return *why = "a variable is on another device or does not belong to its handle", nullptr;
    }
    s.variable = *found;
  }
  return std::make_unique<DirectCall>(context, device, std::move(owned), std::move(sources));
}

// The caller's tensors by input, null for what it does not give.
absl::InlinedVector<TensorHandle*, 8> DirectCall::Handles(PyObject* arguments) const {
  absl::InlinedVector<TensorHandle*, 8> handles(sources_.size(), nullptr);
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].kind != Source::kArgument) continue;
    PyObject* item = g_python.list_item(arguments, sources_[i].index);
    handles[i] = tensorflow::TensorHandleFromInterface(tensorflow::unwrap(g_python.handle_of(item)));
  }
  return handles;
}

// Fills in the inputs but for variables; false when one lies elsewhere than the kernel takes it and TensorFlow has made
// no copy of it there.  May wait for a thread whose ops are asynchronous.
bool DirectCall::Arguments(const absl::InlinedVector<TensorHandle*, 8>& handles,
                           absl::InlinedVector<Tensor, 8>* inputs) const {
  inputs->resize(sources_.size());
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].kind == Source::kConstant) (*inputs)[i] = sources_[i].fixed;
    TensorHandle* handle = handles[i];
    if (!handle) continue;
    Device* memory = MemoryOf(input_attributes_[i]);
    if (handle->Type() != TensorHandle::LOCAL || handle->dtype != kernel_->input_type(static_cast<int>(i))) {
      return false;
    }
    const Tensor* tensor = nullptr;
    absl::Status found = handle->DeviceOrHostCPU(*context_) == memory ? handle->Tensor(&tensor)
                                                                      : handle->TensorFromDevice(memory, &tensor);
    if (!found.ok()) return false;
    (*inputs)[i] = *tensor;
  }
  return true;
}

absl::Status DirectCall::Run(absl::InlinedVector<Tensor, 8>* inputs, Variables* variables,
                             std::vector<Tensor>* outputs) const {
  for (size_t i : by_lock_) {
    if (!variables->Read(sources_[i].variable, &(*inputs)[i]) ||
        (*inputs)[i].dtype() != kernel_->input_type(static_cast<int>(i))) {
      return NoFallback();
    }
  }
  absl::InlinedVector<TensorValue, 8> values;
  for (Tensor& t : *inputs) values.emplace_back(&t);
  tensorflow::DeviceContext* device_context = nullptr;
  TF_RETURN_IF_ERROR(device_->TryGetDeviceContext(&device_context));
  tensorflow::core::ScopedUnref unref(device_context);
  OpKernelContext::Params params;
  params.op_kernel = kernel_.get();
  params.device = device_;
  params.resource_manager = device_->resource_manager();
  params.inputs = values;
  params.input_alloc_attrs = input_attributes_;
  params.output_attr_array = output_attributes_.data();
  params.op_device_context = device_context;
  params.runner = context_->runner();
  OpKernelContext op_context(&params);
  // For the profiler, as executors do; programs name themselves.
  tsl::profiler::TraceMe trace([this] { return kernel_->name() + ":" + kernel_->type_string(); });
  FlushDenormals flush;  // as where TensorFlow runs the kernel
  if (AsyncOpKernel* kernel = kernel_->AsAsync()) {
    absl::Notification done;
    device_->ComputeAsync(kernel, &op_context, [&done] { done.Notify(); });
    done.WaitForNotification();
  } else {
    device_->Compute(kernel_.get(), &op_context);
  }
  if (!op_context.status().ok()) return op_context.status();
  for (int i = 0; i < op_context.num_outputs(); ++i) {
    outputs->push_back(*op_context.mutable_output(i));
    if (variables->Share(outputs->back())) return NoFallback();
  }
  return absl::OkStatus();
}

int DirectCall::Call(PyObject* arguments, PyObject* results) {
  if (context_->Executor().Async() || context_->ShouldStoreGraphs()) return kDeclined;
  absl::InlinedVector<TensorHandle*, 8> handles = Handles(arguments);  // `arguments` keeps them
  std::vector<Tensor> outputs;
  absl::Status status;
  {
    WithoutGil without;
    absl::InlinedVector<Tensor, 8> inputs;
    Variables variables;
    status = Arguments(handles, &inputs) ? Run(&inputs, &variables, &outputs) : NoFallback();
  }
  if (IsNoFallback(status)) return kDeclined;
  if (!status.ok()) {
    t_error = std::string(status.message());
    return static_cast<int>(status.code());
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    Device* memory = context_->CanonicalDevice(MemoryOf(output_attributes_[i]));
    TensorHandle* handle = TensorHandle::CreateLocalHandle(std::move(outputs[i]), memory, device_, context_);
    PyObject* tensor = g_python.tensor_of(tensorflow::wrap(handle), /*packed=*/false);
    g_python.append(results, tensor);
    g_python.drop(tensor);
  }
  return kDone;
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

// Makes a call of a node (a serialized NodeDef) on a device.  Input i comes from the call's argument indices[i]
// (kinds[i] = 0), or from the eager tensor indices[i] of `fixed`: a constant (1), or the handle of a variable to be
// read (2).  Null when there can be no such call; tf_stitch_direct_error says why.
void* tf_stitch_direct_new(TFE_Context* context, const char* device, const char* node, size_t node_size, int inputs,
                           const int* kinds, const int* indices, PyObject* fixed) {
  using tf_stitch::Source;
  tensorflow::NodeDef def;
  if (!def.ParseFromArray(node, static_cast<int>(node_size))) return tf_stitch::t_error = "no NodeDef", nullptr;
  std::vector<Source> sources;
  for (int i = 0; i < inputs; ++i) {
    sources.push_back({static_cast<Source::Kind>(kinds[i]), indices[i], {}});
    if (kinds[i] == Source::kArgument) continue;
    PyObject* item = tf_stitch::g_python.list_item(fixed, indices[i]);
    const tensorflow::Tensor* tensor = nullptr;
    auto* handle = tensorflow::TensorHandleFromInterface(tensorflow::unwrap(tf_stitch::g_python.handle_of(item)));
    absl::Status status = handle->Tensor(&tensor);
    if (!status.ok()) return tf_stitch::t_error = std::string(status.message()), nullptr;
    sources.back().fixed = *tensor;
  }
  auto* eager = tensorflow::ContextFromInterface(tensorflow::unwrap(context));
  tf_stitch::WithoutGil without;  // loading code may wait for a thread that waits for the GIL
  return tf_stitch::DirectCall::Make(eager, device, def, std::move(sources), &tf_stitch::t_error).release();
}

void tf_stitch_direct_delete(void* call) { delete static_cast<tf_stitch::DirectCall*>(call); }

// Appends the results to a list.  0; -1 when the function has to be called instead; else an error's code, whose message
// tf_stitch_direct_error gives.
int tf_stitch_direct_call(void* call, PyObject* arguments, PyObject* results) {
  return static_cast<tf_stitch::DirectCall*>(call)->Call(arguments, results);
}

const char* tf_stitch_direct_error() { return tf_stitch::t_error.c_str(); }
}
