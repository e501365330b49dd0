#include "cublas_lt.h"

#include <dlfcn.h>

#include <list>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace tf_stitch::cuda {
namespace {

// Opaque handles and enums of cublasLt.h (stable since CUDA 11).
using Handle = void*;
using Desc = void*;
using Layout = void*;
using Preference = void*;
using Status = int;

struct Algo {
  uint64_t data[8];
};
struct HeuristicResult {
  Algo algo;
  size_t workspace_size;
  Status state;
  float waves_count;
  int reserved[4];
};

constexpr int kCompute32F = 68, kCompute64F = 70, kComputeFastTf32 = 77;
constexpr int kDescTransA = 3, kDescTransB = 4, kDescEpilogue = 7, kDescBiasPointer = 8;
constexpr int kLayoutBatchCount = 5, kLayoutStride = 6;
constexpr int kPreferenceWorkspace = 1;
constexpr int kPreferenceAlignments[] = {5, 6, 7, 8};  // of A, B, C, D
constexpr uint32_t kAlignment = kMatmulAlignment;
constexpr int kEpilogueDefault = 1, kEpilogueRelu = 2, kEpilogueBias = 4, kEpilogueReluBias = 6;
constexpr int kOpN = 0, kOpT = 1;
constexpr size_t kWorkspaceLimit = size_t{32} << 20;
constexpr size_t kProductsKept = 4096;

struct Api {
  Status (*Create)(Handle*);
  Status (*DescCreate)(Desc*, int, int);
  Status (*DescDestroy)(Desc);
  Status (*DescSet)(Desc, int, const void*, size_t);
  Status (*LayoutCreate)(Layout*, int, uint64_t, uint64_t, int64_t);
  Status (*LayoutDestroy)(Layout);
  Status (*LayoutSet)(Layout, int, const void*, size_t);
  Status (*PreferenceCreate)(Preference*);
  Status (*PreferenceDestroy)(Preference);
  Status (*PreferenceSet)(Preference, int, const void*, size_t);
  Status (*Heuristic)(Handle, Desc, Layout, Layout, Layout, Layout, Preference, int, HeuristicResult*, int*);
  Status (*Run)(Handle, Desc, const void*, const void*, Layout, const void*, Layout, const void*, const void*, Layout,
                void*, Layout, const Algo*, void*, size_t, Stream);
};

struct Library {
  Api api{};
  std::string error;
};

Library LoadLibrary() {
  Library out;
  void* handle = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
    // One that TensorFlow has loaded already comes first, whatever the search path says.
    if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  }
  for (const char* name : {"libcublasLt.so.12", "libcublasLt.so.13", "libcublasLt.so"}) {
    if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (!handle) {
    out.error = "libcublasLt.so.12 cannot be loaded; install tensorflow[and-cuda]";
    return out;
  }
  auto find = [&](const char* name, auto* fn) {
    *fn = reinterpret_cast<std::remove_pointer_t<decltype(fn)>>(dlsym(handle, name));
    if (!*fn && out.error.empty()) out.error = std::string("libcublasLt has no ") + name;
  };
  find("cublasLtCreate", &out.api.Create);
  find("cublasLtMatmulDescCreate", &out.api.DescCreate);
  find("cublasLtMatmulDescDestroy", &out.api.DescDestroy);
  find("cublasLtMatmulDescSetAttribute", &out.api.DescSet);
  find("cublasLtMatrixLayoutCreate", &out.api.LayoutCreate);
  find("cublasLtMatrixLayoutDestroy", &out.api.LayoutDestroy);
  find("cublasLtMatrixLayoutSetAttribute", &out.api.LayoutSet);
  find("cublasLtMatmulPreferenceCreate", &out.api.PreferenceCreate);
  find("cublasLtMatmulPreferenceDestroy", &out.api.PreferenceDestroy);
  find("cublasLtMatmulPreferenceSetAttribute", &out.api.PreferenceSet);
  find("cublasLtMatmulAlgoGetHeuristic", &out.api.Heuristic);
  find("cublasLtMatmul", &out.api.Run);
  return out;
}

const Api* LoadApi(std::string* error) {
  static const Library& library = *new Library(LoadLibrary());
  if (library.error.empty()) return &library.api;
  *error = library.error;
  return nullptr;
}

std::string Failed(Status status, const char* doing) {
  return "cuBLASLt status " + std::to_string(status) + " while " + doing;
}

// One handle per device: cuBLASLt binds a handle to the context that is current when it is made.
Handle HandleOf(const Api& api, Device device, std::string* error) {
  static std::mutex mu;
  static auto& handles = *new std::map<Device, Handle>;
  std::lock_guard<std::mutex> lock(mu);
  Handle& handle = handles[device];
  if (!handle) {
    Status status = api.Create(&handle);
    if (status) {
      *error = Failed(status, "making a handle");
      handle = nullptr;
    }
  }
  return handle;
}

// cudaDataType and compute type of an element type; {-1, -1} for those that have no product here.
std::pair<int, int> TypesOf(int dtype, bool tf32) {
  switch (dtype) {
    case 1:
      return {0, tf32 ? kComputeFastTf32 : kCompute32F};
    case 2:
      return {1, kCompute64F};
    case 19:
      return {2, kCompute32F};
    case 14:
      return {14, kCompute32F};
    default:
      return {-1, -1};
  }
}

}  // namespace

struct Matmul::Impl {
  const Api* api = nullptr;
  Handle handle = nullptr;
  Desc desc = nullptr;
  Layout a = nullptr, b = nullptr, c = nullptr;
  Algo algo{};
  size_t workspace = 0;
  bool bias = false;
  bool relu = false;
  bool is_double = false;
  int compute = 0, type = 0, trans_a = kOpN, trans_b = kOpN;

  ~Impl() {
    if (desc) api->DescDestroy(desc);
    for (Layout l : {a, b, c}) {
      if (l) api->LayoutDestroy(l);
    }
  }

  std::mutex mu;  // the descriptor holds the bias's address of the run at hand

  Status NewDesc(Desc* out) const {
    Status status = api->DescCreate(out, compute, type == 1 ? 1 : 0);
    if (!status) status = api->DescSet(*out, kDescTransA, &trans_a, sizeof trans_a);
    if (!status) status = api->DescSet(*out, kDescTransB, &trans_b, sizeof trans_b);
    int epilogue = bias ? (relu ? kEpilogueReluBias : kEpilogueBias) : relu ? kEpilogueRelu : kEpilogueDefault;
    if (!status) status = api->DescSet(*out, kDescEpilogue, &epilogue, sizeof epilogue);
    return status;
  }

  Status NewLayout(Layout* out, int64_t rows, int64_t cols, int64_t batch, bool broadcast) const {
    Status status =
        api->LayoutCreate(out, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), rows ? rows : 1);
    int32_t count = static_cast<int32_t>(batch);
    int64_t stride = broadcast ? 0 : rows * cols;
    if (!status) status = api->LayoutSet(*out, kLayoutBatchCount, &count, sizeof count);
    if (!status) status = api->LayoutSet(*out, kLayoutStride, &stride, sizeof stride);
    return status;
  }
};

Matmul::Matmul() : impl_(std::make_unique<Impl>()) {}
Matmul::~Matmul() = default;
size_t Matmul::workspace_bytes() const { return impl_->workspace; }

std::shared_ptr<const Matmul> Matmul::Get(const MatmulShape& shape, std::string* error) {
  MatmulShape s = shape;
  if (s.broadcast_rhs && !s.broadcast_lhs && !s.trans_lhs) {  // one product of all rows
    s.m *= s.batch;
    s.batch = 1;
    s.broadcast_rhs = false;
  }
  Device device = 0;
  LoadDriver(nullptr)->CtxGetDevice(&device);
  auto key = std::make_tuple(device, s.dtype, s.batch, s.m, s.n, s.k, s.trans_lhs, s.trans_rhs, s.broadcast_lhs,
                             s.broadcast_rhs, s.bias, s.relu, s.tf32);
  using Entry = std::pair<decltype(key), std::shared_ptr<const Matmul>>;
  static std::mutex mu;
  static auto& entries = *new std::list<Entry>;  // most recent first
  static auto& by_key = *new std::map<decltype(key), std::list<Entry>::iterator>;
  std::lock_guard<std::mutex> lock(mu);
  auto found = by_key.find(key);
  if (found != by_key.end()) {
    entries.splice(entries.begin(), entries, found->second);
    return found->second->second;
  }
  std::shared_ptr<const Matmul> made = Make(s, device, error);
  if (!made) return nullptr;
  entries.emplace_front(key, made);
  by_key[key] = entries.begin();
  if (entries.size() > kProductsKept) {
    by_key.erase(entries.back().first);
    entries.pop_back();
  }
  return made;
}

std::shared_ptr<const Matmul> Matmul::Make(const MatmulShape& s, Device device, std::string* error) {
  const Api* api = LoadApi(error);
  if (!api) return nullptr;
  if (s.batch > INT32_MAX) {
    *error = "cuBLASLt has no product of " + std::to_string(s.batch) + " matrices at once";
    return nullptr;
  }
  std::shared_ptr<Matmul> out(new Matmul());
  Impl& impl = *out->impl_;
  impl.api = api;
  impl.handle = HandleOf(*api, device, error);
  if (!impl.handle) return nullptr;
  std::tie(impl.type, impl.compute) = TypesOf(s.dtype, s.tf32);
  if (impl.type < 0) {
    *error = "cuBLASLt has no product of element type " + std::to_string(s.dtype);
    return nullptr;
  }
  impl.bias = s.bias;
  impl.relu = s.relu;
  impl.is_double = s.dtype == 2;
  // cuBLASLt is column-major: a row-major out = lhs @ rhs is the column-major out' = rhs' @ lhs'.
  impl.trans_a = s.trans_rhs ? kOpT : kOpN;
  impl.trans_b = s.trans_lhs ? kOpT : kOpN;
  Status status = impl.NewDesc(&impl.desc);
  if (!status) {
    status = impl.NewLayout(&impl.a, s.trans_rhs ? s.k : s.n, s.trans_rhs ? s.n : s.k, s.batch, s.broadcast_rhs);
  }
  if (!status) {
    status = impl.NewLayout(&impl.b, s.trans_lhs ? s.m : s.k, s.trans_lhs ? s.k : s.m, s.batch, s.broadcast_lhs);
  }
  if (!status) status = impl.NewLayout(&impl.c, s.n, s.m, s.batch, false);
  Preference preference = nullptr;
  if (!status) status = api->PreferenceCreate(&preference);
  HeuristicResult found{};
  int count = 0;
  if (!status) status = api->PreferenceSet(preference, kPreferenceWorkspace, &kWorkspaceLimit, sizeof kWorkspaceLimit);
  for (int attribute : kPreferenceAlignments) {
    if (!status) status = api->PreferenceSet(preference, attribute, &kAlignment, sizeof kAlignment);
  }
  if (!status) {
    status = api->Heuristic(impl.handle, impl.desc, impl.a, impl.b, impl.c, impl.c, preference, 1, &found, &count);
  }
  if (preference) api->PreferenceDestroy(preference);
  if (status || !count) {
    *error = Failed(status, "choosing an algorithm");
    return nullptr;
  }
  impl.algo = found.algo;
  impl.workspace = found.workspace_size;
  return out;
}

std::string Matmul::Run(const void* lhs, const void* rhs, const void* bias, void* out, void* workspace,
                        Stream stream) const {
  const Impl& impl = *impl_;
  const float one_f = 1, zero_f = 0;
  const double one_d = 1, zero_d = 0;
  const void* one = impl.is_double ? static_cast<const void*>(&one_d) : &one_f;
  const void* zero = impl.is_double ? static_cast<const void*>(&zero_d) : &zero_f;
  std::unique_lock<std::mutex> lock(impl_->mu, std::defer_lock);
  Status status = 0;
  if (impl.bias) {
    lock.lock();
    status = impl.api->DescSet(impl.desc, kDescBiasPointer, &bias, sizeof bias);
  }
  if (!status) {
    status = impl.api->Run(impl.handle, impl.desc, one, rhs, impl.a, lhs, impl.b, zero, out, impl.c, out, impl.c,
                           &impl.algo, workspace, impl.workspace, stream);
  }
  return status ? Failed(status, "running a matrix product") : "";
}

}  // namespace tf_stitch::cuda
