#include "cublas_batched.h"

#include <algorithm>
#include <climits>
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

// Opaque handle and enums of cublas_api.h.
using Handle = LibraryHandle;
using Status = LibraryStatus;

constexpr int kAlgoDefault = -1;
constexpr size_t kWorkspace = size_t{32} << 20;
constexpr size_t kBatchesKept = 1024;

struct Api {
  Status (*Create)(Handle*);
  Status (*SetStream)(Handle, Stream);
  Status (*SetWorkspace)(Handle, void*, size_t);
  Status (*GetVersion)(Handle, int*);
  Status (*Batched)(Handle, int, int, int, int, int, const void*, const void* const*, int, int, const void* const*, int,
                    int, const void*, void* const*, int, int, int, int, int);
};

Library<Api> LoadLibrary() {
  Library<Api> out;
  LibraryFile file({"libcublas.so.13", "libcublas.so.12"}, {"libcublas.so.12", "libcublas.so.13"});
  file.Need("cublasCreate_v2", &out.api.Create);
  file.Need("cublasSetStream_v2", &out.api.SetStream);
  file.Need("cublasSetWorkspace_v2", &out.api.SetWorkspace);
  file.Need("cublasGetVersion_v2", &out.api.GetVersion);
  file.Need("cublasGemmBatchedEx", &out.api.Batched);
  out.error = file.error();
  return out;
}

std::string Failed(const Api&, Status status, const char* doing) {
  return "cuBLAS status " + std::to_string(status) + " while " + doing;
}

using Session = DeviceSession<Api>;

int Version(const Session& session) {
  int version = 0;
  session.api->GetVersion(session.handle, &version);
  return version;
}

// Makes `call` on a stream with a workspace of kWorkspace bytes.
template <class Call>
Status With(Session* session, Stream stream, void* workspace, const Call& call) {
  std::lock_guard<std::mutex> lock(session->mu);
  Status status = session->api->SetStream(session->handle, stream);  // this takes the workspace away
  if (!status) status = session->api->SetWorkspace(session->handle, workspace, kWorkspace);
  return status ? status : call(session->handle);
}

}  // namespace

struct PointerBatch::Impl {
  MatmulShape shape{};
  Session* session = nullptr;        // null: cuBLASLt's
  std::shared_ptr<const Matmul> lt;  // null: cuBLAS's
  int type = 0, compute = 0;

  // Row-major out = lhs @ rhs is the column-major out' = rhs' @ lhs'.
  Status RunBlas(const void* const* lhs, const void* const* rhs, void* const* out, void* workspace, Stream stream) {
    const MatmulShape& s = shape;
    int m = static_cast<int>(s.m), n = static_cast<int>(s.n), k = static_cast<int>(s.k);
    BlasFactors factors = BlasFactorsOf(type);
    return With(session, stream, workspace, [&](Handle handle) {
      return session->api->Batched(handle, s.trans_rhs ? kOpT : kOpN, s.trans_lhs ? kOpT : kOpN, n, m, k, factors.one,
                                   rhs, type, s.trans_rhs ? k : n, lhs, type, s.trans_lhs ? m : k, factors.zero, out,
                                   type, n, static_cast<int>(s.batch), compute, kAlgoDefault);
    });
  }

  std::string Run(bool with_lt, const void* const* lhs, const void* const* rhs, void* const* out, void* workspace,
                  Stream stream, const std::shared_ptr<const Matmul>& product) {
    if (with_lt) return product->Run(lhs, rhs, nullptr, const_cast<void**>(out), workspace, stream);
    Status status = RunBlas(lhs, rhs, out, workspace, stream);
    return status ? Failed(*session->api, status, "running a batch of matrix products") : "";
  }

  // Whether cuBLASLt's choice is faster than cuBLAS's.
  bool LtIsFaster(const std::shared_ptr<const Matmul>& product) {
    const Driver& driver = *LoadDriver(nullptr);
    std::string key = "cublas " + std::to_string(Version(*session)) + ", " + DeviceKey(driver) + ", pointers " +
                      std::to_string(shape.dtype) + " " + std::to_string(SizeClass(shape.batch));
    for (int64_t v : {SizeClass(shape.m), shape.n, shape.k, int64_t{shape.trans_lhs}, int64_t{shape.trans_rhs},
                      int64_t{shape.tf32}}) {
      key += " " + std::to_string(v);
    }
    if (!TuningAllowed()) return true;
    if (std::optional<std::string> choice = ReadChoice(key)) return *choice == "lt";
    size_t element = type == 1 ? 8 : type == 0 ? 4 : 2;
    size_t lhs = Up(element * shape.m * shape.k), rhs = Up(element * shape.k * shape.n),
           out = Up(element * shape.m * shape.n);
    size_t batch = static_cast<size_t>(shape.batch), table = Up(3 * batch * sizeof(void*));
    size_t distinct = std::min(batch, kTuningBytes / (lhs + rhs + out));  // the arrays repeat their addresses
    if (!distinct) return true;
    Scratch memory(driver, kWorkspace + table + distinct * (lhs + rhs + out));
    if (!memory.get()) return true;
    char* at = memory.get() + kWorkspace + table;
    std::vector<const char*> addresses;
    for (size_t size : {lhs, rhs, out}) {
      for (size_t i = 0; i < batch; ++i) addresses.push_back(at + i % distinct * size);
      at += distinct * size;
    }
    auto* arrays = reinterpret_cast<void**>(memory.get() + kWorkspace);
    OwnStream own(driver);
    if (!own.get() || driver.MemcpyHtoDAsync(arrays, addresses.data(), addresses.size() * sizeof(char*), own.get()) ||
        driver.StreamSynchronize(own.get())) {
      return true;
    }
    int best = Fastest(driver, 2, [&](int i, int, Stream stream) {
      return Run(i == 0, arrays, arrays + batch, arrays + 2 * batch, memory.get(), stream, product);
    });
    if (best >= 0) WriteChoice(key, best == 0 ? "lt" : "blas");
    return best <= 0;
  }

  static constexpr size_t kTuningBytes = size_t{512} << 20;
  static size_t Up(size_t bytes) { return (bytes + 255) / 256 * 256; }
};

PointerBatch::PointerBatch() : impl_(std::make_unique<Impl>()) {}
PointerBatch::~PointerBatch() = default;

size_t PointerBatch::workspace_bytes() const { return impl_->lt ? impl_->lt->workspace_bytes() : kWorkspace; }

std::shared_ptr<const PointerBatch> PointerBatch::Get(const MatmulShape& shape, std::string* error) {
  MatmulShape s = shape;
  s.pointers = true;
  if (s.bias || s.broadcast_lhs || s.broadcast_rhs) {
    *error = "a batch of separate matrix products has no bias and no broadcast";
    return nullptr;
  }
  if (s.m < 1 || s.n < 1 || s.k < 1 || s.batch < 1 || s.m > INT_MAX || s.n > INT_MAX || s.k > INT_MAX ||
      s.batch > INT_MAX) {
    *error = "a batch of separate matrix products is empty or too large";
    return nullptr;
  }
  Device device = 0;
  LoadDriver(nullptr)->CtxGetDevice(&device);
  auto key =
      std::make_tuple(device, s.dtype, s.batch, s.m, s.n, s.k, s.trans_lhs, s.trans_rhs, s.tf32, TuningAllowed());
  static auto& mu = *new std::mutex;
  static auto& batches = *new LruCache<decltype(key), std::shared_ptr<const PointerBatch>>(kBatchesKept);
  std::lock_guard<std::mutex> lock(mu);
  if (const auto* found = batches.Find(key)) return *found;
  std::shared_ptr<PointerBatch> made(new PointerBatch());
  Impl& impl = *made->impl_;
  impl.shape = s;
  std::tie(impl.type, impl.compute) = BlasTypes(s.dtype, s.tf32);
  if (impl.type < 0) {
    *error = "cuBLAS has no product of element type " + std::to_string(s.dtype);
    return nullptr;
  }
  std::string without_lt;
  std::shared_ptr<const Matmul> product = Matmul::Get(s, &without_lt);  // null before CUDA 12.6
  impl.session = SessionOfCurrentDevice(LoadLibrary, Failed, error);
  if (!product && !impl.session) return nullptr;
  if (product && (!impl.session || impl.LtIsFaster(product))) impl.lt = std::move(product);
  batches.Add(key, made);
  return made;
}

std::string PointerBatch::Run(const void* const* lhs, const void* const* rhs, void* const* out, void* workspace,
                              Stream stream) const {
  return impl_->Run(impl_->lt != nullptr, lhs, rhs, out, workspace, stream, impl_->lt);
}

}  // namespace tf_stitch::cuda
