#include "cublas_lt.h"

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

// Opaque handles and enums of cublasLt.h (stable since CUDA 11).
using Handle = LibraryHandle;
using Desc = void*;
using Layout = void*;
using Preference = void*;
using Status = LibraryStatus;

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

constexpr int kDescTransA = 3, kDescTransB = 4, kDescEpilogue = 7, kDescBiasPointer = 8;
constexpr int kLayoutBatchCount = 5, kLayoutStride = 6, kLayoutBatchMode = 8;
constexpr int kBatchOfPointers = 1;
constexpr int kPreferenceWorkspace = 1, kPreferenceReductions = 3;
constexpr uint32_t kReduceInComputeType = 2;
constexpr int kPreferenceAlignments[] = {5, 6, 7, 8};  // of A, B, C, D
constexpr uint32_t kAlignment = kMatmulAlignment;
constexpr int kEpilogueDefault = 1, kEpilogueBias = 4;
constexpr size_t kWorkspaceLimit = size_t{32} << 20;
constexpr size_t kProductsKept = 4096;
constexpr int kProposals = 12, kProposalsWithoutWorkspace = 4;
constexpr size_t kTuningBytes = size_t{512} << 20;  // operands that take more are not measured; arrays repeat addresses
constexpr size_t kColdBytes = size_t{96} << 20;     // operands rotate through this much, past the second-level cache

struct Api {
  size_t (*GetVersion)();
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
  Status (*AlgoCheck)(Handle, Desc, Layout, Layout, Layout, Layout, const Algo*, HeuristicResult*);
  Status (*Run)(Handle, Desc, const void*, const void*, Layout, const void*, Layout, const void*, const void*, Layout,
                void*, Layout, const Algo*, void*, size_t, Stream);
};

Library<Api> LoadLibrary() {
  Library<Api> out;
  LibraryFile file({"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"},
                   {"libcublasLt.so.12", "libcublasLt.so.13", "libcublasLt.so"});
  file.Need("cublasLtGetVersion", &out.api.GetVersion);
  file.Need("cublasLtCreate", &out.api.Create);
  file.Need("cublasLtMatmulDescCreate", &out.api.DescCreate);
  file.Need("cublasLtMatmulDescDestroy", &out.api.DescDestroy);
  file.Need("cublasLtMatmulDescSetAttribute", &out.api.DescSet);
  file.Need("cublasLtMatrixLayoutCreate", &out.api.LayoutCreate);
  file.Need("cublasLtMatrixLayoutDestroy", &out.api.LayoutDestroy);
  file.Need("cublasLtMatrixLayoutSetAttribute", &out.api.LayoutSet);
  file.Need("cublasLtMatmulPreferenceCreate", &out.api.PreferenceCreate);
  file.Need("cublasLtMatmulPreferenceDestroy", &out.api.PreferenceDestroy);
  file.Need("cublasLtMatmulPreferenceSetAttribute", &out.api.PreferenceSet);
  file.Need("cublasLtMatmulAlgoGetHeuristic", &out.api.Heuristic);
  file.Need("cublasLtMatmulAlgoCheck", &out.api.AlgoCheck);
  file.Need("cublasLtMatmul", &out.api.Run);
  out.error = file.error();
  return out;
}

std::string Failed(const Api&, Status status, const char* doing) {
  return "cuBLASLt status " + std::to_string(status) + " while " + doing;
}

}  // namespace

struct Matmul::Impl {
  MatmulShape shape{};
  const Api* api = nullptr;
  Handle handle = nullptr;
  Desc desc = nullptr;
  Layout a = nullptr, b = nullptr, c = nullptr;
  Algo algo{};
  size_t workspace = 0;
  int type = 0, compute = 0;
  std::mutex mu;  // the descriptor holds the bias's address of the run at hand

  ~Impl() {
    if (desc) api->DescDestroy(desc);
    for (Layout l : {a, b, c}) {
      if (l) api->LayoutDestroy(l);
    }
  }

  // cuBLASLt is column-major: a row-major out = lhs @ rhs is the column-major out' = rhs' @ lhs'.
  Status Describe() {
    const MatmulShape& s = shape;
    int trans_a = s.trans_rhs ? kOpT : kOpN, trans_b = s.trans_lhs ? kOpT : kOpN;
    int epilogue = s.bias ? kEpilogueBias : kEpilogueDefault;
    Status status = api->DescCreate(&desc, compute, type == 1 ? 1 : 0);
    if (!status) status = api->DescSet(desc, kDescTransA, &trans_a, sizeof trans_a);
    if (!status) status = api->DescSet(desc, kDescTransB, &trans_b, sizeof trans_b);
    if (!status) status = api->DescSet(desc, kDescEpilogue, &epilogue, sizeof epilogue);
    if (!status) status = NewLayout(&a, s.trans_rhs ? s.k : s.n, s.trans_rhs ? s.n : s.k, s.broadcast_rhs);
    if (!status) status = NewLayout(&b, s.trans_lhs ? s.m : s.k, s.trans_lhs ? s.k : s.m, s.broadcast_lhs);
    if (!status) status = NewLayout(&c, s.n, s.m, false);
    return status;
  }

  Status NewLayout(Layout* out, int64_t rows, int64_t cols, bool broadcast) const {
    Status status =
        api->LayoutCreate(out, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), rows ? rows : 1);
    int32_t count = static_cast<int32_t>(shape.batch);
    int64_t stride = broadcast ? 0 : rows * cols;
    if (!status) status = api->LayoutSet(*out, kLayoutBatchCount, &count, sizeof count);
    if (!status && !shape.pointers) status = api->LayoutSet(*out, kLayoutStride, &stride, sizeof stride);
    if (!status && shape.pointers) {
      status = api->LayoutSet(*out, kLayoutBatchMode, &kBatchOfPointers, sizeof kBatchOfPointers);
    }
    return status;
  }

  // Adds what the library proposes, the best first, to `found`; what is there already is left out.
  Status Propose(int count, size_t workspace_limit, std::vector<HeuristicResult>* found) const {
    Preference preference = nullptr;
    std::vector<HeuristicResult> fresh(count);
    int returned = 0;
    Status status = api->PreferenceCreate(&preference);
    if (!status) {
      status = api->PreferenceSet(preference, kPreferenceWorkspace, &workspace_limit, sizeof workspace_limit);
    }
    for (int attribute : kPreferenceAlignments) {
      if (!status) status = api->PreferenceSet(preference, attribute, &kAlignment, sizeof kAlignment);
    }
    // Sums of parts of the folded dim are not rounded to half types.  A library that does not know this goes on.
    if (!status) {
      api->PreferenceSet(preference, kPreferenceReductions, &kReduceInComputeType, sizeof kReduceInComputeType);
    }
    if (!status) status = api->Heuristic(handle, desc, a, b, c, c, preference, count, fresh.data(), &returned);
    if (preference) api->PreferenceDestroy(preference);
    for (int i = 0; i < returned && !status; ++i) {
      auto same = [&](const HeuristicResult& r) { return !memcmp(&r.algo, &fresh[i].algo, sizeof(Algo)); };
      if (!fresh[i].state && std::none_of(found->begin(), found->end(), same)) found->push_back(fresh[i]);
    }
    return status;
  }

  void Take(const HeuristicResult& proposal) {
    algo = proposal.algo;
    workspace = proposal.workspace_size;
  }

  std::string Key(const Driver& driver) const {
    const MatmulShape& s = shape;
    std::string key = "cublasLt " + std::to_string(api->GetVersion()) + ", " + DeviceKey(driver) + ", matmul";
    for (int64_t v :
         {int64_t{s.dtype}, SizeClass(s.batch), SizeClass(s.m), s.n, s.k, int64_t{s.trans_lhs}, int64_t{s.trans_rhs},
          int64_t{s.broadcast_lhs}, int64_t{s.broadcast_rhs}, int64_t{s.bias}, int64_t{s.tf32}, int64_t{s.pointers}}) {
      key += " " + std::to_string(v);
    }
    return key;
  }

  // Takes an algorithm that was chosen before for this class of shapes, if it can do this shape.
  bool TakeChosen(const std::string& key) {
    std::optional<std::string> chosen = ReadChoice(key);
    if (!chosen || chosen->size() != sizeof(Algo)) return false;
    HeuristicResult result{};
    memcpy(&result.algo, chosen->data(), sizeof(Algo));
    Algo wanted = result.algo;
    if (api->AlgoCheck(handle, desc, a, b, c, c, &wanted, &result) || result.state) return false;
    if (result.workspace_size > kWorkspaceLimit) return false;
    result.algo = wanted;
    Take(result);
    return true;
  }

  // Takes the fastest of some proposals; returns false when none could be measured.
  bool TakeFastest(const Driver& driver, const std::vector<HeuristicResult>& proposals);

  Status Enqueue(const Algo& which, size_t workspace_bytes, const void* lhs, const void* rhs, const void* bias,
                 void* out, void* workspace_memory, Stream stream) {
    auto [one, zero] = BlasFactorsOf(type);
    std::unique_lock<std::mutex> lock(mu, std::defer_lock);
    if (shape.bias) {
      lock.lock();
      Status status = api->DescSet(desc, kDescBiasPointer, &bias, sizeof bias);
      if (status) return status;
    }
    return api->Run(handle, desc, one, rhs, a, lhs, b, zero, out, c, out, c, &which, workspace_memory, workspace_bytes,
                    stream);
  }
};

namespace {

// Operands in scratch memory.  Those of each round lie elsewhere, as a program's weights are not in the cache when
// they are needed; one set is enough where it fills the cache by itself.
class Operands {
 public:
  Operands(const Driver& driver, const MatmulShape& s, size_t element) {
    lhs_ = Up(element * s.m * s.k);
    rhs_ = Up(element * s.k * s.n);
    out_ = Up(element * s.m * s.n);
    batch_ = static_cast<size_t>(s.batch);
    distinct_ = s.pointers ? std::min(batch_, kTuningBytes / (lhs_ + rhs_ + out_)) : batch_;
    if (!distinct_) return;
    size_t sets[] = {lhs_ * (s.broadcast_lhs ? 1 : distinct_), rhs_ * (s.broadcast_rhs ? 1 : distinct_),
                     out_ * distinct_, Up(element * s.n), s.pointers ? Up(3 * sizeof(void*) * batch_) : 0};
    for (size_t i = 0; i < 5; ++i) {
      begin_[i] = set_;
      set_ += sets[i];
    }
    if (!s.pointers && set_ > kTuningBytes) return;
    count_ = std::min<size_t>(kTuningRounds, kColdBytes / set_ + 1);
    workspace_ = set_ * count_;
    scratch_ = std::make_unique<Scratch>(driver, workspace_ + kWorkspaceLimit);
    if (scratch_->get() && s.pointers && !FillPointers(driver)) scratch_ = nullptr;
  }

  bool ok() const { return scratch_ && scratch_->get(); }
  char* lhs(int round) const { return At(round, pointers() ? 4 : 0); }
  char* rhs(int round) const { return At(round, pointers() ? 4 : 1) + (pointers() ? batch_ * sizeof(void*) : 0); }
  char* out(int round) const { return At(round, pointers() ? 4 : 2) + (pointers() ? 2 * batch_ * sizeof(void*) : 0); }
  char* bias(int round) const { return At(round, 3); }
  char* workspace() const { return scratch_->get() + workspace_; }

 private:
  static size_t Up(size_t bytes) { return (bytes + 255) / 256 * 256; }
  bool pointers() const { return begin_[4] != set_; }
  char* At(int round, int part) const { return scratch_->get() + round % count_ * set_ + begin_[part]; }

  bool FillPointers(const Driver& driver) {
    OwnStream stream(driver);
    if (!stream.get()) return false;
    for (size_t set = 0; set < count_; ++set) {
      std::vector<char*> table;
      size_t sizes[] = {lhs_, rhs_, out_};
      for (int part = 0; part < 3; ++part) {
        char* first = At(static_cast<int>(set), part);
        for (size_t i = 0; i < batch_; ++i) table.push_back(first + i % distinct_ * sizes[part]);
      }
      char* to = At(static_cast<int>(set), 4);
      if (driver.MemcpyHtoDAsync(to, table.data(), table.size() * sizeof(char*), stream.get())) return false;
      if (driver.StreamSynchronize(stream.get())) return false;
    }
    return true;
  }

  size_t lhs_, rhs_, out_, batch_, distinct_;  // bytes of one matrix; products, and those that share no memory
  size_t begin_[5] = {}, set_ = 0, count_ = 0, workspace_ = 0;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace

bool Matmul::Impl::TakeFastest(const Driver& driver, const std::vector<HeuristicResult>& proposals) {
  size_t element = type == 1 ? 8 : type == 0 ? 4 : 2;
  double bytes = 1.0 * element * (shape.pointers ? 1 : shape.batch) *
                 (1.0 * shape.m * shape.k + 1.0 * shape.k * shape.n + 1.0 * shape.m * shape.n);
  if (bytes > kTuningBytes) return false;
  Operands memory(driver, shape, element);
  if (!memory.ok()) return false;
  int best = Fastest(driver, static_cast<int>(proposals.size()), [&](int i, int round, Stream stream) -> std::string {
    Status status = Enqueue(proposals[i].algo, proposals[i].workspace_size, memory.lhs(round), memory.rhs(round),
                            memory.bias(round), memory.out(round), memory.workspace(), stream);
    return status ? Failed(*api, status, "measuring a matrix product") : "";
  });
  if (best < 0) return false;
  Take(proposals[best]);
  return true;
}

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
                             s.broadcast_rhs, s.bias, s.tf32, s.pointers, TuningAllowed());
  static std::mutex mu;
  static auto& products = *new LruCache<decltype(key), std::shared_ptr<const Matmul>>(kProductsKept);
  std::lock_guard<std::mutex> lock(mu);
  if (const auto* found = products.Find(key)) return *found;
  std::shared_ptr<const Matmul> made = Make(s, error);
  if (made) products.Add(key, made);
  return made;
}

std::shared_ptr<const Matmul> Matmul::Make(const MatmulShape& s, std::string* error) {
  if (s.batch > INT32_MAX) {
    *error = "cuBLASLt has no product of " + std::to_string(s.batch) + " matrices at once";
    return nullptr;
  }
  std::shared_ptr<Matmul> out(new Matmul());
  Impl& impl = *out->impl_;
  impl.shape = s;
  auto* session = SessionOfCurrentDevice(LoadLibrary, Failed, error);  // cuBLASLt binds a handle to the current context
  if (!session) return nullptr;
  impl.api = session->api;
  impl.handle = session->handle;
  std::tie(impl.type, impl.compute) = BlasTypes(s.dtype, s.tf32);
  if (impl.type < 0) {
    *error = "cuBLASLt has no product of element type " + std::to_string(s.dtype);
    return nullptr;
  }
  Status status = impl.Describe();
  if (status) {
    *error = Failed(*impl.api, status, "describing a matrix product");
    return nullptr;
  }
  const Driver& driver = *LoadDriver(nullptr);
  std::string key = impl.Key(driver);
  if (TuningAllowed() && impl.TakeChosen(key)) return out;
  std::vector<HeuristicResult> proposals;
  status = impl.Propose(TuningAllowed() ? kProposals : 1, kWorkspaceLimit, &proposals);
  if (status || proposals.empty()) {
    *error = Failed(*impl.api, status, "choosing an algorithm");
    return nullptr;
  }
  impl.Take(proposals.front());
  if (!TuningAllowed()) return out;
  impl.Propose(kProposalsWithoutWorkspace, 0, &proposals);  // more of them; those with a workspace are enough
  if (impl.TakeFastest(driver, proposals)) {
    WriteChoice(key, std::string(reinterpret_cast<const char*>(&impl.algo), sizeof(Algo)));
  }
  return out;
}

std::string Matmul::Run(const void* lhs, const void* rhs, const void* bias, void* out, void* workspace,
                        Stream stream) const {
  Status status = impl_->Enqueue(impl_->algo, impl_->workspace, lhs, rhs, bias, out, workspace, stream);
  return status ? Failed(*impl_->api, status, "running a matrix product") : "";
}

}  // namespace tf_stitch::cuda
