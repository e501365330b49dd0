// Loading: which of a program's code fits a device, modules shared by equal code.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "counters.h"
#include "cuda_capture.h"
#include "cudnn.h"
#include "runtime_cuda.h"

namespace tf_stitch {
namespace {

// 10 * major + minor version of the current context's device; 0 when it cannot be asked.
int ComputeCapability(const cuda::Driver& driver) {
  cuda::Device device;
  int major = 0, minor = 0;
  if (driver.CtxGetDevice(&device) || driver.DeviceGetAttribute(&major, cuda::kComputeCapabilityMajor, device) ||
      driver.DeviceGetAttribute(&minor, cuda::kComputeCapabilityMinor, device)) {
    return 0;
  }
  return major * 10 + minor;
}

// The number behind a prefix ("sm_90" -> 90), or -1.
int NumberAfter(std::string_view text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix || text.size() == prefix.size()) return -1;
  int n = 0;
  for (char c : text.substr(prefix.size())) {
    if (c < '0' || c > '9' || n > 1000) return -1;
    n = n * 10 + (c - '0');
  }
  return n;
}

// Machine code runs on its own major version from its minor on; PTX ("compute_NN") on anything from its version on.
const Code* FindCode(const Program& program, int capability) {
  const Code* best = nullptr;
  int best_rank = -1;
  for (const Code& c : program.code) {
    int sm = NumberAfter(c.target, "sm_"), ptx = NumberAfter(c.target, "compute_");
    bool runs = sm >= 0 ? sm / 10 == capability / 10 && sm <= capability : ptx >= 0 && ptx <= capability;
    int rank = sm >= 0 ? 1000 + sm : ptx;
    if (runs && rank > best_rank) best = &c, best_rank = rank;
  }
  return best;
}

std::string Targets(const Program& program) {
  std::string have;
  for (const Code& c : program.code) have += (have.empty() ? "" : ", ") + c.target;
  return have.empty() ? "no device" : have;
}

// Machine code that is loaded by itself, and the kernels in it.
struct Image {
  std::string_view names;  // with spaces between them; empty where it is the only image
  std::string_view code;
};

// The images that machine code is made of; tf_stitch/backend/images.py has the format.  None when some are missing.
std::vector<Image> Images(std::string_view bytes) {
  constexpr std::string_view kMagic = "tf_stitch images\n";
  constexpr size_t kSizes = sizeof(uint32_t) + sizeof(uint64_t);
  if (bytes.substr(0, kMagic.size()) != kMagic) return {{"", bytes}};
  std::vector<Image> out;
  for (bytes.remove_prefix(kMagic.size()); !bytes.empty();) {
    uint32_t named;
    uint64_t coded;
    if (bytes.size() < kSizes) return {};
    std::memcpy(&named, bytes.data(), sizeof(named));
    std::memcpy(&coded, bytes.data() + sizeof(named), sizeof(coded));
    bytes.remove_prefix(kSizes);
    if (named > bytes.size() || coded > bytes.size() - named) return {};
    out.push_back({bytes.substr(0, named), bytes.substr(named, coded)});
    bytes.remove_prefix(named + coded);
  }
  return out;
}

// A module in a context, and what it was loaded from.
struct Module {
  Module(const cuda::Driver& d, cuda::Context c, std::string_view b) : driver(d), context(c), bytes(b) {}
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  ~Module() {
    cuda::ScopedContext scope(driver, context);
    if (!handle || !scope.ok()) return;
    if (cuda::WaitForContext(driver)) driver.ModuleUnload(handle);  // kernels of it may still run
  }

  const cuda::Driver& driver;
  const cuda::Context context;
  const std::string bytes;
  cuda::Module handle = nullptr;
};

// The module with these bytes in the current context, loaded once.
std::shared_ptr<Module> OpenShared(const cuda::Driver& driver, cuda::Context context, std::string_view bytes,
                                   std::string* error) {
  static std::mutex mu;
  static auto& loaded = *new std::multimap<size_t, std::weak_ptr<Module>>;  // by hash; ops may outlive statics
  size_t hash = std::hash<std::string_view>()(bytes);
  std::lock_guard<std::mutex> lock(mu);
  for (auto [it, last] = loaded.equal_range(hash); it != last; ++it) {
    std::shared_ptr<Module> module = it->second.lock();
    if (module && module->context == context && module->bytes == bytes) return module;
  }
  auto module = std::make_shared<Module>(driver, context, bytes);
  cuda::Result result = driver.ModuleLoadDataEx(&module->handle, module->bytes.c_str(), 0, nullptr, nullptr);
  if (result) {
    module->handle = nullptr;
    *error = cuda::Failed(driver, result, "loading its code");
    return nullptr;
  }
  ++GlobalCounters().loads;
  for (auto it = loaded.begin(); it != loaded.end();) it = it->second.expired() ? loaded.erase(it) : std::next(it);
  loaded.emplace(hash, module);
  return module;
}

// Where a program's kernels are: a module for each image.
class Modules {
 public:
  // Loads the images; false and an error when one cannot be.
  bool Load(const cuda::Driver& driver, cuda::Context context, std::string_view bytes, std::string* error) {
    std::vector<Image> images = Images(bytes);
    if (images.empty()) *error = "its code ends in the middle of an image";
    for (const Image& image : images) {
      std::shared_ptr<Module> module = OpenShared(driver, context, image.code, error);
      if (!module) return false;
      modules_.push_back(module);
      if (image.names.empty()) only_ = module.get();
      for (std::string_view rest = image.names; !rest.empty();) {
        size_t end = std::min(rest.find(' '), rest.size());
        by_kernel_.emplace(rest.substr(0, end), module.get());
        rest.remove_prefix(std::min(end + 1, rest.size()));
      }
    }
    return !images.empty();
  }

  // A kernel; an error where there is none of the name.
  cuda::Result Find(const cuda::Driver& driver, const std::string& kernel, cuda::Function* function) const {
    auto at = by_kernel_.find(kernel);
    const Module* module = at == by_kernel_.end() ? only_ : at->second;
    return module ? driver.ModuleGetFunction(function, module->handle, kernel.c_str()) : cuda::kNotFound;
  }

 private:
  std::vector<std::shared_ptr<Module>> modules_;
  std::map<std::string, const Module*, std::less<>> by_kernel_;
  const Module* only_ = nullptr;  // of the image whose kernels are not named
};

// Lets a kernel ask for as much dynamic shared memory as the device has, less what it holds statically; returns that.
int AllowSharedMemory(const cuda::Driver& driver, cuda::Function kernel) {
  cuda::Device device;
  int room = 0, fixed = 0;
  if (driver.CtxGetDevice(&device) || driver.DeviceGetAttribute(&room, cuda::kMaxSharedBytesPerBlock, device) ||
      driver.FuncGetAttribute(&fixed, cuda::kStaticSharedBytes, kernel)) {
    return 0;
  }
  return driver.FuncSetAttribute(kernel, cuda::kMaxDynamicSharedBytes, room - fixed) ? 0 : room - fixed;
}

}  // namespace

std::shared_ptr<CudaCode> CudaCode::Load(const Program& program, cuda::Context context, std::string* error) {
  const cuda::Driver* driver = cuda::LoadDriver(error);
  if (!driver) return nullptr;
  cuda::ScopedContext scope(*driver, context);
  std::shared_ptr<CudaCode> out(new CudaCode(*driver, context));
  out->kernels_.resize(program.steps.size());
  bool any = std::any_of(program.steps.begin(), program.steps.end(),
                         [](const Step& s) { return s.kind == Step::Kind::kKernel; });
  if (!any) return out;
  int capability = ComputeCapability(*driver);
  const Code* code = FindCode(program, capability);
  if (!code) {
    *error = "it has code for " + Targets(program) + ", this GPU is sm_" + std::to_string(capability);
    return nullptr;
  }
  auto modules = std::make_shared<Modules>();
  if (!modules->Load(*driver, context, code->bytes, error)) return nullptr;
  out->modules_ = modules;
  auto find = [&](const std::string& name, Kernel* kernel) {
    cuda::Result result = modules->Find(*driver, name, &kernel->function);
    if (result)
      *error = cuda::Failed(*driver, result, "looking for kernel '" + name + "' in its code for " + code->target);
    if (!result) kernel->max_shared_bytes = AllowSharedMemory(*driver, kernel->function);
    return !result;
  };
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    if (step.kind != Step::Kind::kKernel) continue;
    Kernel& kernel = out->kernels_[i];
    if (!find(step.kernel, &kernel)) return nullptr;
    if (modules->Find(*driver, step.kernel + "_many", &kernel.many)) kernel.many = nullptr;
    if (kernel.many)
      kernel.max_shared_bytes = std::min(kernel.max_shared_bytes, AllowSharedMemory(*driver, kernel.many));
  }
  if (modules->Find(*driver, "ts_copy_pieces", &out->copy_pieces_)) out->copy_pieces_ = nullptr;
  out->grids_.resize(program.grids.size());
  for (size_t i = 0; i < program.grids.size(); ++i) {
    if (!find(program.grids[i].kernel, &out->grids_[i])) return nullptr;
  }
  return out;
}

CudaCode::~CudaCode() {
  if (!capturing_) return;
  cuda::ScopedContext scope(driver_, context_);
  if (!scope.ok()) return;
  cuda::ForgetStream(capturing_);
  driver_.StreamDestroy(capturing_);
}

std::string CudaCode::Capture(const std::function<std::string(cuda::Stream)>& enqueue, cuda::Graph* graph) {
  std::lock_guard<std::mutex> lock(mu_);
  cuda::Result result = 0;
  if (!capturing_) result = driver_.StreamCreate(&capturing_, cuda::kStreamNonBlocking);
  if (result) return cuda::Failed(driver_, result, "making a stream to capture");
  cuda::PrepareStream(capturing_);
  return cuda::Capture(driver_, capturing_, [&] { return enqueue(capturing_); }, graph);
}

}  // namespace tf_stitch
