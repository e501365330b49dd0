#include "cudnn.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "autotune.h"
#include "lru_cache.h"
#include "nvidia_library.h"

namespace tf_stitch::cuda {
namespace {

// Opaque handles and enums of cuDNN 9's graph API (cudnn_graph.h; the same numbers as in cuDNN 8).
using Handle = LibraryHandle;
using Descriptor = void*;
using Status = LibraryStatus;

enum DescriptorType {
  kPointwise = 0,
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kEngineHeuristic = 4,
  kExecutionPlan = 5,
  kKnobChoice = 7,
  kConvolutionForward = 10,
  kConvolutionFilterGradient = 11,
  kPointwiseOperation = 13,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
};

enum AttributeType {
  kTypeHandle = 0,
  kTypeDataType = 1,
  kTypeBoolean = 2,
  kTypeInt64 = 3,
  kTypeFloat = 4,
  kTypeVoidPointer = 6,
  kTypeConvolutionMode = 7,
  kTypeHeuristicMode = 8,
  kTypeKnobType = 9,
  kTypeNanPropagation = 10,
  kTypeNumericalNote = 11,
  kTypePointwiseMode = 14,
  kTypeDescriptor = 15,
  kTypeBehaviorNote = 19,
};

enum Attribute {
  kPointwiseMode = 0,
  kPointwisePrecision = 1,
  kPointwiseNan = 2,
  kConvComputeType = 100,
  kConvMode = 101,
  kConvDilations = 102,
  kConvStrides = 103,
  kConvPostPaddings = 104,
  kConvPrePaddings = 105,
  kConvSpatialDims = 106,
  kHeuristicMode = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kConfigEngine = 300,
  kConfigKnobChoices = 302,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kKnobChoiceType = 600,
  kKnobChoiceValue = 601,
  kForwardAlpha = 700,
  kForwardBeta = 701,
  kForwardConv = 702,
  kForwardW = 703,
  kForwardX = 704,
  kForwardY = 705,
  kGradientAlpha = 712,
  kGradientBeta = 713,
  kGradientConv = 714,
  kGradientDw = 715,
  kGradientX = 716,
  kGradientDy = 717,
  kPointwiseDescriptor = 750,
  kPointwiseX = 751,
  kPointwiseB = 752,
  kPointwiseY = 753,
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorDataType = 901,
  kTensorDims = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorVirtual = 907,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineIndex = 1301,
  kEngineNumericalNotes = 1303,
  kEngineBehaviorNotes = 1305,
};

constexpr int kCrossCorrelation = 1, kAdd = 0, kReluForward = 100, kPropagateNan = 1;
constexpr int kModeA = 3, kModeFallback = 2;
enum NumericalNote {
  kNoteTensorCore = 0,
  kNoteDownConvertInputs = 1,
  kNoteReducedReduction = 2,
  kNoteFft = 3,
  kNoteNondeterministic = 4,
  kNoteWinograd = 5,
  kNoteWinograd4 = 6,
  kNoteWinograd6 = 7,
  kNoteWinograd13 = 8,
  kNotes = 32,
};
constexpr int kNoteRuntimeCompilation = 0;

constexpr int64_t kAlignment = 16;  // bytes that every operand's address is a multiple of
constexpr int64_t kWorkspaceLimit = int64_t{64} << 20;
constexpr size_t kTuningBytes = size_t{4} << 30;  // operands that take more are not measured
constexpr int64_t kProposals = 16;
constexpr size_t kConvolutionsKept = 2048;

struct Api {
  size_t (*GetVersion)();
  const char* (*GetErrorString)(Status);
  Status (*Create)(Handle*);
  Status (*SetStream)(Handle, Stream);
  Status (*CreateDescriptor)(int, Descriptor*);
  Status (*DestroyDescriptor)(Descriptor);
  Status (*Set)(Descriptor, int, int, int64_t, const void*);
  Status (*Get)(Descriptor, int, int, int64_t, int64_t*, void*);
  Status (*Finalize)(Descriptor);
  Status (*Execute)(Handle, Descriptor, Descriptor);
};

Library<Api> LoadLibrary() {
  Library<Api> out;
  LibraryFile file({"libcudnn.so.9"}, {"libcudnn.so.9"});
  file.Need("cudnnGetVersion", &out.api.GetVersion);
  file.Need("cudnnGetErrorString", &out.api.GetErrorString);
  file.Need("cudnnCreate", &out.api.Create);
  file.Need("cudnnSetStream", &out.api.SetStream);
  file.Need("cudnnBackendCreateDescriptor", &out.api.CreateDescriptor);
  file.Need("cudnnBackendDestroyDescriptor", &out.api.DestroyDescriptor);
  file.Need("cudnnBackendSetAttribute", &out.api.Set);
  file.Need("cudnnBackendGetAttribute", &out.api.Get);
  file.Need("cudnnBackendFinalize", &out.api.Finalize);
  file.Need("cudnnBackendExecute", &out.api.Execute);
  out.error = file.error();
  return out;
}

std::string Failed(const Api& api, Status status, const char* doing) {
  return std::string(api.GetErrorString(status)) + " while " + doing;
}

using Session = DeviceSession<Api>;

// The handles that a session runs convolutions with, one for each stream: cuDNN makes a stream that a handle gets wait
// for the stream that it had, which may be gone by then, or be captured by another thread.  Its session's lock is held.
class StreamHandles {
 public:
  // The stream's handle, made when there is none.
  Status Get(const Api& api, Stream stream, Handle* handle) {
    auto found = used_.find(stream);
    if (found != used_.end()) return *handle = found->second, 0;
    RelaxedCapture relaxed(*LoadDriver(nullptr));
    Status status = 0;
    Handle made = nullptr;
    if (!free_.empty()) {
      made = free_.back();
      free_.pop_back();
    } else {
      status = api.Create(&made);
    }
    if (!status) status = api.SetStream(made, stream);
    if (!status) used_[stream] = *handle = made;
    return status;
  }

  // The handle of a stream that is about to end waits on a stream that does not.
  void Forget(const Api& api, Stream stream) {
    auto found = used_.find(stream);
    if (found == used_.end()) return;
    if (!parked_ && LoadDriver(nullptr)->StreamCreate(&parked_, kStreamNonBlocking)) parked_ = nullptr;
    if (parked_ && !api.SetStream(found->second, parked_)) free_.push_back(found->second);
    used_.erase(found);
  }

 private:
  std::map<Stream, Handle> used_;
  std::vector<Handle> free_;
  Stream parked_ = nullptr;
};

// By session; sessions are never given back.
std::mutex& HandlesMutex() {
  static auto& mu = *new std::mutex;
  return mu;
}
std::map<Session*, StreamHandles>& Handles() {
  static auto& handles = *new std::map<Session*, StreamHandles>;
  return handles;
}
StreamHandles& HandlesOf(Session* session) {
  std::lock_guard<std::mutex> lock(HandlesMutex());
  return Handles()[session];
}

// A descriptor that is destroyed with this.  The first status that is not success is kept, and nothing is done after
// it.
class Owned {
 public:
  Owned() = default;
  Owned(const Api& api, int type) : api_(&api) { status_ = api.CreateDescriptor(type, &descriptor_); }
  Owned(Owned&& other) noexcept { *this = std::move(other); }
  Owned& operator=(Owned&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(descriptor_, other.descriptor_);
    std::swap(status_, other.status_);
    return *this;
  }
  ~Owned() {
    if (descriptor_) api_->DestroyDescriptor(descriptor_);
  }

  Descriptor get() const { return descriptor_; }
  Status status() const { return status_; }

  template <class T>
  Owned& Set(int attribute, int type, const T* values, int64_t count = 1) {
    if (!status_) status_ = api_->Set(descriptor_, attribute, type, count, values);
    return *this;
  }
  Owned& Set(int attribute, int type, int value) { return Set(attribute, type, &value); }
  Owned& Link(int attribute, const Owned& other) {
    if (!status_) status_ = other.status_;
    Descriptor descriptor = other.descriptor_;
    return Set(attribute, kTypeDescriptor, &descriptor);
  }
  Owned& Finish() {
    if (!status_) status_ = api_->Finalize(descriptor_);
    return *this;
  }

  // Up to `count` values of an attribute.
  template <class T>
  std::vector<T> Get(int attribute, int type, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    int64_t found = 0;
    if (status_ || api_->Get(descriptor_, attribute, type, count, &found, values.data())) found = 0;
    values.resize(static_cast<size_t>(std::clamp<int64_t>(found, 0, count)));
    return values;
  }

  // Descriptors that an attribute holds: the library fills ones that are made before.
  std::vector<Owned> GetDescriptors(int attribute, int type, int64_t count) const {
    std::vector<Owned> made;
    std::vector<Descriptor> raw;
    for (int64_t i = 0; i < count; ++i) {
      made.emplace_back(*api_, type);
      raw.push_back(made.back().descriptor_);
    }
    int64_t found = 0;
    if (status_ || api_->Get(descriptor_, attribute, kTypeDescriptor, count, &found, raw.data())) found = 0;
    made.resize(static_cast<size_t>(std::clamp<int64_t>(found, 0, count)));
    return made;
  }

 private:
  const Api* api_ = nullptr;
  Descriptor descriptor_ = nullptr;
  Status status_ = 0;
};

constexpr int kFloat = 0;  // what is summed up in

// cudnnDataType of an element type; -1 for those that have no convolution here.
int TypeOf(int dtype) {
  switch (dtype) {
    case 1:
      return kFloat;
    case 14:
      return 9;
    case 19:
      return 2;
    default:
      return -1;
  }
}

enum TensorId : int64_t { kIdX = 1, kIdW, kIdBias, kIdResidual, kIdY, kIdConv, kIdSum, kIdBiased };

// The operations of a shape, as cuDNN's patterns of fused kernels have them: convolution, sum, bias, ReLU.
class OperationGraph {
 public:
  OperationGraph(Session& session, const ConvShape& s) : api_(*session.api), s_(s) {
    type_ = TypeOf(s.dtype);
    Owned x = Tensor(kIdX, s.batch, s.channels_in, s.in.data());
    Owned w = Tensor(kIdW, s.channels_out, s.channels_in / s.groups, s.window.data());
    bool last = !s.residual && !s.bias && !s.relu;
    Owned y = Image(last ? kIdY : kIdConv);
    operations_.push_back(s.filter_gradient ? FilterGradient(x, w, y) : Forward(x, w, y));
    if (s.residual) y = Then(kAdd, std::move(y), Image(kIdResidual), s.bias || s.relu ? kIdSum : kIdY);
    if (s.bias) {
      constexpr int64_t kOnes[kMaxSpatial] = {1, 1, 1};
      y = Then(kAdd, std::move(y), Tensor(kIdBias, 1, s.channels_out, kOnes), s.relu ? kIdBiased : kIdY);
    }
    if (s.relu) y = Then(kReluForward, std::move(y), Owned(), kIdY);
    graph_ = Owned(api_, kOperationGraph);
    std::vector<Descriptor> raw;
    Status status = 0;
    for (const Owned& o : operations_) {
      raw.push_back(o.get());
      if (!status) status = o.status();
    }
    graph_.Set(kGraphHandle, kTypeHandle, &session.handle);
    graph_.Set(kGraphOperations, kTypeDescriptor, raw.data(), static_cast<int64_t>(raw.size()));
    if (!status) graph_.Finish();
    status_ = status ? status : graph_.status();
  }

  Status status() const { return status_; }
  const Owned& get() const { return graph_; }

 private:
  bool IsVirtual(int64_t id) const { return id > kIdY; }

  // Channels last in memory; cuDNN names the dims batch, channels, spatial.
  Owned Tensor(int64_t id, int64_t batch, int64_t channels, const int64_t* spatial) const {
    std::vector<int64_t> dims{batch, channels}, strides{0, 1};
    int64_t stride = channels;
    dims.insert(dims.end(), spatial, spatial + s_.spatial);
    strides.resize(dims.size());
    for (size_t i = dims.size(); i-- > 2;) {
      strides[i] = stride;
      stride *= dims[i];
    }
    strides[0] = stride;
    Owned out(api_, kTensor);
    // What lies between the operations is summed up in float.
    out.Set(kTensorDataType, kTypeDataType, IsVirtual(id) ? kFloat : type_);
    out.Set(kTensorDims, kTypeInt64, dims.data(), static_cast<int64_t>(dims.size()));
    out.Set(kTensorStrides, kTypeInt64, strides.data(), static_cast<int64_t>(strides.size()));
    out.Set(kTensorId, kTypeInt64, &id).Set(kTensorAlignment, kTypeInt64, &kAlignment);
    bool is_virtual = IsVirtual(id);
    if (is_virtual) out.Set(kTensorVirtual, kTypeBoolean, &is_virtual);
    return std::move(out.Finish());
  }

  Owned Image(int64_t id) const { return Tensor(id, s_.batch, s_.channels_out, s_.out.data()); }

  Owned Geometry() const {
    Owned conv(api_, kConvolution);
    int64_t spatial = s_.spatial;
    conv.Set(kConvComputeType, kTypeDataType, kFloat).Set(kConvMode, kTypeConvolutionMode, kCrossCorrelation);
    conv.Set(kConvSpatialDims, kTypeInt64, &spatial).Set(kConvStrides, kTypeInt64, s_.strides.data(), spatial);
    conv.Set(kConvDilations, kTypeInt64, s_.dilations.data(), spatial);
    conv.Set(kConvPrePaddings, kTypeInt64, s_.low.data(), spatial);
    conv.Set(kConvPostPaddings, kTypeInt64, s_.high.data(), spatial);
    return std::move(conv.Finish());
  }

  Owned Forward(const Owned& x, const Owned& w, const Owned& y) const {
    const float one = 1, zero = 0;
    Owned out(api_, kConvolutionForward);
    out.Link(kForwardConv, Geometry()).Link(kForwardX, x).Link(kForwardW, w).Link(kForwardY, y);
    out.Set(kForwardAlpha, kTypeFloat, &one).Set(kForwardBeta, kTypeFloat, &zero);
    return std::move(out.Finish());
  }

  Owned FilterGradient(const Owned& x, const Owned& dw, const Owned& dy) const {
    const float one = 1, zero = 0;
    Owned out(api_, kConvolutionFilterGradient);
    out.Link(kGradientConv, Geometry()).Link(kGradientX, x).Link(kGradientDw, dw).Link(kGradientDy, dy);
    out.Set(kGradientAlpha, kTypeFloat, &one).Set(kGradientBeta, kTypeFloat, &zero);
    return std::move(out.Finish());
  }

  // Adds an elementwise operation of x and b (none where b is empty); returns its result.
  Owned Then(int mode, Owned x, const Owned& b, int64_t id) {
    Owned pointwise(api_, kPointwise), out(api_, kPointwiseOperation), y = Image(id);
    pointwise.Set(kPointwiseMode, kTypePointwiseMode, mode).Set(kPointwisePrecision, kTypeDataType, kFloat);
    if (mode == kReluForward) pointwise.Set(kPointwiseNan, kTypeNanPropagation, kPropagateNan);
    pointwise.Finish();
    out.Link(kPointwiseDescriptor, pointwise).Link(kPointwiseX, x);
    if (b.get()) out.Link(kPointwiseB, b);
    operations_.push_back(std::move(out.Link(kPointwiseY, y).Finish()));
    return y;
  }

  const Api& api_;
  const ConvShape& s_;
  int type_;
  std::vector<Owned> operations_;
  Owned graph_;
  Status status_ = 0;
};

// An engine with its knobs, made ready.
struct Proposal {
  Owned config, plan;
  int64_t workspace = 0;
  std::string name;
};

// "index:knob=value,..."
std::string NameOf(const Owned& config, const Owned& engine) {
  std::vector<int64_t> index = engine.Get<int64_t>(kEngineIndex, kTypeInt64, 1);
  std::string name = std::to_string(index.empty() ? -1 : index[0]) + ":";
  for (const Owned& knob : config.GetDescriptors(kConfigKnobChoices, kKnobChoice, 64)) {
    std::vector<int> type = knob.Get<int>(kKnobChoiceType, kTypeKnobType, 1);
    std::vector<int64_t> value = knob.Get<int64_t>(kKnobChoiceValue, kTypeInt64, 1);
    if (!type.empty() && !value.empty()) name += std::to_string(type[0]) + "=" + std::to_string(value[0]) + ",";
  }
  return name;
}

// Whether an engine computes what TensorFlow's users expect, the same in every run, and needs no compiler.
bool Acceptable(const Owned& engine, const ConvShape& s) {
  for (int note : engine.Get<int>(kEngineNumericalNotes, kTypeNumericalNote, kNotes)) {
    if (note == kNoteTensorCore && s.dtype == 1 && !s.tf32) return false;
    if (note == kNoteDownConvertInputs || note == kNoteReducedReduction || note == kNoteNondeterministic) return false;
    if (note == kNoteWinograd6 || note == kNoteWinograd13) return false;  // too inexact
    // A gradient's sums are over all images and places, those of transforms' rounding errors, too.
    if (s.filter_gradient && (note == kNoteFft || note == kNoteWinograd || note == kNoteWinograd4)) return false;
  }
  for (int note : engine.Get<int>(kEngineBehaviorNotes, kTypeBehaviorNote, kNotes)) {
    if (note == kNoteRuntimeCompilation) return false;
  }
  return true;
}

// Engines that can run the graph, the library's favourite first.
std::vector<Proposal> Propose(Session& session, const OperationGraph& graph, const ConvShape& s) {
  const Api& api = *session.api;
  std::vector<Proposal> out;
  for (int mode : {kModeA, kModeFallback}) {
    if (!out.empty()) break;
    Owned heuristic(api, kEngineHeuristic);
    heuristic.Link(kHeuristicGraph, graph.get()).Set(kHeuristicMode, kTypeHeuristicMode, mode).Finish();
    for (Owned& config : heuristic.GetDescriptors(kHeuristicResults, kEngineConfig, kProposals)) {
      std::vector<Owned> engine = config.GetDescriptors(kConfigEngine, kEngine, 1);
      if (engine.empty() || !Acceptable(engine[0], s)) continue;
      Proposal p;
      p.plan = Owned(api, kExecutionPlan);
      p.plan.Set(kPlanHandle, kTypeHandle, &session.handle).Link(kPlanConfig, config).Finish();
      if (p.plan.status()) continue;
      std::vector<int64_t> workspace = p.plan.Get<int64_t>(kPlanWorkspace, kTypeInt64, 1);
      p.workspace = workspace.empty() ? 0 : workspace[0];
      if (p.workspace > kWorkspaceLimit) continue;
      p.name = NameOf(config, engine[0]);
      p.config = std::move(config);
      out.push_back(std::move(p));
    }
  }
  return out;
}

int64_t Volume(const std::array<int64_t, kMaxSpatial>& dims, int spatial) {
  int64_t out = 1;
  for (int i = 0; i < spatial; ++i) out *= dims[i];
  return out;
}

size_t ElementBytes(int dtype) { return dtype == 1 ? 4 : 2; }

// Scratch memory for a run of a shape; x is null when there is not enough.
struct Operands {
  Operands(const Driver& driver, const ConvShape& s) {
    auto up = [&](int64_t elements) {
      return (static_cast<size_t>(elements) * ElementBytes(s.dtype) + 255) / 256 * 256;
    };
    const size_t image = up(s.batch * Volume(s.in, s.spatial) * s.channels_in);
    const size_t filter = up(s.channels_out * Volume(s.window, s.spatial) * s.channels_in / s.groups);
    const size_t result = up(s.batch * Volume(s.out, s.spatial) * s.channels_out), vector = up(s.channels_out);
    const size_t all = image + filter + vector + 2 * result;
    if (all > kTuningBytes) return;
    memory = std::make_unique<Scratch>(driver, kWorkspaceLimit + all);
    if (!memory->get()) return;
    workspace = memory->get();
    x = workspace + kWorkspaceLimit;
    w = x + image;
    bias = w + filter;
    residual = bias + vector;
    y = residual + result;
  }

  std::unique_ptr<Scratch> memory;
  char *workspace = nullptr, *x = nullptr, *w = nullptr, *bias = nullptr, *residual = nullptr, *y = nullptr;
};

}  // namespace

struct Convolution::Impl {
  ConvShape shape{};
  Session* session = nullptr;
  StreamHandles* handles = nullptr;
  Proposal chosen;

  Status Enqueue(const Proposal& p, const void* x, const void* w, const void* bias, const void* residual, void* y,
                 void* workspace, Stream stream) const {
    const Api& api = *session->api;
    std::vector<int64_t> ids{kIdX, kIdW, kIdY};
    if (shape.filter_gradient) std::swap(ids[1], ids[2]);  // y's place is read, w's is written
    std::vector<const void*> pointers{x, w, y};
    if (shape.bias) {
      ids.push_back(kIdBias);
      pointers.push_back(bias);
    }
    if (shape.residual) {
      ids.push_back(kIdResidual);
      pointers.push_back(residual);
    }
    Owned pack(api, kVariantPack);
    pack.Set(kPackIds, kTypeInt64, ids.data(), static_cast<int64_t>(ids.size()));
    pack.Set(kPackPointers, kTypeVoidPointer, pointers.data(), static_cast<int64_t>(pointers.size()));
    pack.Set(kPackWorkspace, kTypeVoidPointer, &workspace).Finish();
    if (pack.status()) return pack.status();
    std::lock_guard<std::mutex> lock(session->mu);  // of plans, too
    Handle handle = nullptr;
    Status status = handles->Get(api, stream, &handle);
    return status ? status : api.Execute(handle, p.plan.get(), pack.get());
  }

  Status Enqueue(const Proposal& p, const Operands& at, Stream stream) const {
    const bool gradient = shape.filter_gradient;
    return Enqueue(p, at.x, gradient ? at.y : at.w, at.bias, at.residual, gradient ? at.w : at.y, at.workspace, stream);
  }

  std::string Key(const Driver& driver) const {
    const ConvShape& s = shape;
    std::string key = "cudnn " + std::to_string(session->api->GetVersion()) + ", " + DeviceKey(driver) +
                      (s.filter_gradient ? ", filter gradient" : ", conv");
    auto add = [&](int64_t v) { key += " " + std::to_string(v); };
    for (int64_t v : {int64_t{s.dtype}, int64_t{s.spatial}, SizeClass(s.batch), s.channels_in, s.channels_out, s.groups,
                      int64_t{s.bias}, int64_t{s.residual}, int64_t{s.relu}, int64_t{s.tf32}}) {
      add(v);
    }
    for (const auto* list : {&s.in, &s.window, &s.strides, &s.low, &s.high, &s.dilations}) {
      for (int i = 0; i < s.spatial; ++i) add((*list)[i]);
    }
    return key;
  }

  // Takes the proposal that was chosen before, or the fastest one (the first where nothing may be measured) that keeps
  // NaN; false with the reason in `error`.
  bool Choose(std::vector<Proposal> proposals, std::string* error) {
    const Driver& driver = *LoadDriver(nullptr);
    const bool tune = TuningAllowed() && proposals.size() > 1;
    std::string key = Key(driver);
    std::optional<std::string> before = TuningAllowed() ? ReadChoice(key) : std::nullopt;
    auto known = std::find_if(proposals.begin(), proposals.end(), [&](const Proposal& p) { return before == p.name; });
    if (known != proposals.end() || !(tune || shape.relu)) {
      chosen = std::move(known != proposals.end() ? *known : proposals.front());
      return true;
    }
    Operands memory(driver, shape);
    if (!memory.x && shape.relu) {
      *error = "there is no memory to try a convolution with ReLU in";
      return false;
    }
    while (!proposals.empty()) {
      int best = tune && memory.x ? FastestOf(driver, memory, proposals) : -1;
      auto it = proposals.begin() + std::max(best, 0);
      if (!shape.relu || KeepsNan(driver, memory, *it)) {
        chosen = std::move(*it);
        if (best >= 0) WriteChoice(key, chosen.name);
        return true;
      }
      proposals.erase(it);
    }
    *error = "no engine of cuDNN keeps NaN in a convolution with ReLU";
    return false;
  }

  // The fastest of some proposals, or -1 when none could be measured.
  int FastestOf(const Driver& driver, const Operands& at, const std::vector<Proposal>& proposals) const {
    return Fastest(driver, static_cast<int>(proposals.size()), [&](int i, int, Stream stream) -> std::string {
      Status status = Enqueue(proposals[i], at, stream);
      return status ? Failed(*session->api, status, "measuring a convolution") : "";
    });
  }

  // Whether an engine's ReLU of NaN is NaN, as TensorFlow's is.
  bool KeepsNan(const Driver& driver, const Operands& at, const Proposal& p) const {
    const size_t element = ElementBytes(shape.dtype);
    int64_t middle = shape.batch / 2;  // of the result, where the window meets the image
    for (int i = 0; i < shape.spatial; ++i) middle = middle * shape.out[i] + shape.out[i] / 2;
    char value[4] = {};  // of NaN a ReLU makes NaN or 0
    OwnStream stream(driver);
    return stream.get() && !driver.MemsetD8Async(at.x, 0xFF, at.y - at.x, stream.get()) &&
           !Enqueue(p, at, stream.get()) &&
           !driver.MemcpyDtoHAsync(value, at.y + middle * shape.channels_out * element, element, stream.get()) &&
           !driver.StreamSynchronize(stream.get()) &&
           std::any_of(value, value + element, [](char c) { return c != 0; });
  }
};

Convolution::Convolution() : impl_(std::make_unique<Impl>()) {}
Convolution::~Convolution() = default;
size_t Convolution::workspace_bytes() const { return static_cast<size_t>(impl_->chosen.workspace); }

std::shared_ptr<const Convolution> Convolution::Get(const ConvShape& s, std::string* error) {
  Device device = 0;
  LoadDriver(nullptr)->CtxGetDevice(&device);
  auto key = std::make_tuple(device, s.dtype, s.spatial, s.batch, s.channels_in, s.channels_out, s.groups, s.in,
                             s.window, s.strides, s.low, s.high, s.dilations, s.bias, s.residual, s.relu, s.tf32,
                             s.filter_gradient, TuningAllowed());
  static auto& mu = *new std::mutex;
  static auto& convolutions = *new LruCache<decltype(key), std::shared_ptr<const Convolution>>(kConvolutionsKept);
  std::lock_guard<std::mutex> lock(mu);
  if (const auto* found = convolutions.Find(key)) return *found;
  std::shared_ptr<const Convolution> made = Make(s, error);
  if (made) convolutions.Add(key, made);
  return made;
}

std::shared_ptr<const Convolution> Convolution::Make(const ConvShape& s, std::string* error) {
  if (TypeOf(s.dtype) < 0) {
    *error = "cuDNN has no convolution of element type " + std::to_string(s.dtype);
    return nullptr;
  }
  std::shared_ptr<Convolution> out(new Convolution());
  Impl& impl = *out->impl_;
  impl.shape = s;
  impl.session = SessionOfCurrentDevice(LoadLibrary, Failed, error);
  if (!impl.session) return nullptr;
  impl.handles = &HandlesOf(impl.session);
  std::vector<Proposal> proposals;
  {
    std::lock_guard<std::mutex> lock(impl.session->mu);
    OperationGraph graph(*impl.session, s);
    if (graph.status()) {
      *error = Failed(*impl.session->api, graph.status(), "describing a convolution");
      return nullptr;
    }
    proposals = Propose(*impl.session, graph, s);
  }
  if (proposals.empty()) {
    *error = "cuDNN has no engine for a convolution";
    return nullptr;
  }
  return impl.Choose(std::move(proposals), error) ? out : nullptr;
}

std::string Convolution::Run(const void* x, const void* w, const void* bias, const void* residual, void* y,
                             void* workspace, Stream stream) const {
  Status status = impl_->Enqueue(impl_->chosen, x, w, bias, residual, y, workspace, stream);
  return status ? Failed(*impl_->session->api, status, "running a convolution") : "";
}

void PrepareStream(Stream stream) {
  Device device = 0;
  LoadDriver(nullptr)->CtxGetDevice(&device);
  std::lock_guard<std::mutex> lock(HandlesMutex());
  for (auto& [session, handles] : Handles()) {
    if (session->device != device) continue;
    std::lock_guard<std::mutex> session_lock(session->mu);
    Handle handle = nullptr;
    handles.Get(*session->api, stream, &handle);  // what fails here fails again where it is told
  }
}

void ForgetStream(Stream stream) {
  std::lock_guard<std::mutex> lock(HandlesMutex());
  for (auto& [session, handles] : Handles()) {
    std::lock_guard<std::mutex> session_lock(session->mu);
    handles.Forget(*session->api, stream);
  }
}

}  // namespace tf_stitch::cuda
