#include "runtime_host.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <pmmintrin.h>
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "counters.h"
#include "library_host.h"

namespace tf_stitch {
namespace {

std::atomic<CompileFn> g_compile{nullptr};

// The floating-point unit's settings, and those bits of them that flush denormals.
#if defined(__x86_64__)
constexpr uint64_t kFlush = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
uint64_t ControlWord() { return _mm_getcsr(); }
void SetControlWord(uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlush = uint64_t{1} << 24;
uint64_t ControlWord() {
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
void SetControlWord(uint64_t word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
constexpr uint64_t kFlush = 0;
uint64_t ControlWord() { return 0; }
void SetControlWord(uint64_t) {}
#endif

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

bool WriteAll(int fd, std::string_view data) {
  while (!data.empty()) {
    ssize_t n = write(fd, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

// dlopen returns the library that it has under an equal path, and descriptors are used again.  So each load spells the
// path in its own way: bit k of a counter chooses between "/" and "/./".
std::string FreshPath(int fd) {
  static std::atomic<uint64_t> counter{0};
  std::string path = "/proc/self/fd";
  for (uint64_t n = counter++; n; n >>= 1) path += (n & 1) ? "/./" : "//";
  return path + "/" + std::to_string(fd);
}

void* OpenFromMemory(std::string_view bytes, std::string* error) {
  Fd fd(memfd_create("tf_stitch", MFD_CLOEXEC));
  if (fd.get() < 0 || !WriteAll(fd.get(), bytes)) {
    *error = std::string("memfd_create: ") + strerror(errno);
    return nullptr;
  }
  void* handle = dlopen(FreshPath(fd.get()).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) *error = dlerror();
  return handle;
}

// Where memory files may not be run: a file that is gone from its folder as soon as it is loaded.
void* OpenFromFile(std::string_view bytes, std::string* error) {
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder && *folder ? folder : "/tmp") + "/tf_stitch_XXXXXX";
  Fd fd(mkostemp(path.data(), O_CLOEXEC));
  if (fd.get() < 0) {
    *error = path + ": " + strerror(errno);
    return nullptr;
  }
  void* handle = nullptr;
  if (WriteAll(fd.get(), bytes)) {
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) *error = dlerror();
  } else {
    *error = path + ": " + strerror(errno);
  }
  unlink(path.c_str());
  return handle;
}

// A shared object in this process, and what it was loaded from.
struct Library {
  Library(void* h, std::string_view b) : handle(h), bytes(b) {}
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() { dlclose(handle); }

  void* const handle;
  const std::string bytes;
};

// The shared object with these bytes, loaded once per process.
std::shared_ptr<Library> OpenShared(std::string_view bytes, std::string* error) {
  static std::mutex mu;
  static auto& loaded = *new std::multimap<size_t, std::weak_ptr<Library>>;  // by hash; ops may outlive statics
  size_t hash = std::hash<std::string_view>()(bytes);
  std::lock_guard<std::mutex> lock(mu);
  for (auto [it, last] = loaded.equal_range(hash); it != last; ++it) {
    std::shared_ptr<Library> library = it->second.lock();
    if (library && library->bytes == bytes) return library;
  }
  std::string from_memory;
  void* handle = OpenFromMemory(bytes, &from_memory);
  if (!handle) handle = OpenFromFile(bytes, error);
  if (!handle) {
    *error = from_memory + "; " + *error;
    return nullptr;
  }
  ++GlobalCounters().loads;
  for (auto it = loaded.begin(); it != loaded.end();) it = it->second.expired() ? loaded.erase(it) : std::next(it);
  auto library = std::make_shared<Library>(handle, bytes);
  loaded.emplace(hash, library);
  return library;
}

// The machine code to load: the best stored one, else one built from the text.
bool FindCode(const Program& program, std::string* target, std::string_view* bytes, std::string* built,
              std::string* error) {
  for (const std::string& wanted : HostTargets()) {
    for (const Code& c : program.code) {
      if (c.target == wanted) {
        *target = wanted;
        *bytes = c.bytes;
        return true;
      }
    }
  }
  std::string have;
  for (const Code& c : program.code) have += (have.empty() ? "" : ", ") + c.target;
  *error =
      "it has code for " + (have.empty() ? "no processor" : have) + ", this processor runs " + HostTargets().front();
  CompileFn compile = g_compile.load();
  if (!compile || program.text.empty()) return false;
  *target = HostTargets().front();
  auto deliver = [](void* sink, const char* data, size_t size) { static_cast<std::string*>(sink)->assign(data, size); };
  if (compile(program.text.data(), program.text.size(), target->c_str(), deliver, built) != 0 || built->empty()) {
    *error += ", and building it here from its text failed";
    return false;
  }
  *bytes = *built;
  return true;
}

// On-chip scratch: one per thread, kept while small, so that a run allocates nothing.
class Scratch {
 public:
  char* Get(int64_t bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = (std::max<int64_t>(bytes, 1) + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(aligned_alloc(64, static_cast<size_t>(size_)));
      if (!data_) size_ = 0;
    }
    return data_;
  }
  void Trim() {
    if (size_ > (int64_t{4} << 20)) {
      free(data_);
      data_ = nullptr;
      size_ = 0;
    }
  }
  ~Scratch() { free(data_); }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

constexpr int32_t kOutOfMemory = -1;
constexpr int64_t kShardCycles =
    25000;  // a shard should run at least this long: several times what waking a thread costs

void RunKernel(KernelFn kernel, const Problem& problem, int64_t begin, int64_t end, int64_t shared_bytes,
               int32_t* status) {
  static thread_local Scratch scratch;
  char* shared = nullptr;
  if (shared_bytes) {
    shared = scratch.Get(shared_bytes);
    if (!shared) {
      __atomic_store_n(status, kOutOfMemory, __ATOMIC_RELAXED);
      return;
    }
  }
  kernel(&problem, begin, end, shared, status);
  scratch.Trim();
}

}  // namespace

const std::vector<std::string>& HostTargets() {
  static const auto& targets = *new std::vector<std::string>([] {
    std::vector<std::string> names;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) names.push_back("x86-64-v4");
    if (__builtin_cpu_supports("x86-64-v3")) names.push_back("x86-64-v3");
    if (__builtin_cpu_supports("x86-64-v2")) names.push_back("x86-64-v2");
    names.push_back("x86-64");
#elif defined(__aarch64__)
    names.push_back("aarch64");
#else
    names.push_back("unknown");
#endif
    return names;
  }());
  return targets;
}

void SetCompiler(CompileFn compile) { g_compile = compile; }

std::unique_ptr<HostCode> HostCode::Load(const Program& program, std::string* error) {
  auto code = std::make_unique<HostCode>();
  std::string_view bytes;
  std::string built;
  code->kernels_.resize(program.steps.size(), nullptr);
  bool any = std::any_of(program.steps.begin(), program.steps.end(),
                         [](const Step& s) { return s.kind == Step::Kind::kKernel; });
  if (!any) return code;
  if (!FindCode(program, &code->target_, &bytes, &built, error)) return nullptr;
  std::shared_ptr<Library> library = OpenShared(bytes, error);
  if (!library) return nullptr;
  code->library_ = library;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& s = program.steps[i];
    if (s.kind != Step::Kind::kKernel) continue;
    code->kernels_[i] = reinterpret_cast<KernelFn>(dlsym(library->handle, s.kernel.c_str()));
    if (!code->kernels_[i]) {
      *error = "its code for " + code->target_ + " has no kernel '" + s.kernel + "'";
      return nullptr;
    }
  }
  return code;
}

FlushDenormals::FlushDenormals() : before_(ControlWord()) { SetControlWord(before_ | kFlush); }
FlushDenormals::~FlushDenormals() { SetControlWord(before_); }

int64_t ShardSize(int64_t blocks, int64_t cost, int threads) {
  if (threads <= 1) return blocks;
  double cycles = static_cast<double>(blocks) * static_cast<double>(cost);
  int64_t shards = static_cast<int64_t>(std::min(cycles / kShardCycles, 4.0 * threads));
  shards = std::max<int64_t>(1, std::min(shards, blocks));
  return (blocks + shards - 1) / shards;
}

void RunBlocks(const Program& program, const HostCode& code, const Plan& plan, size_t step, void* const* buffers,
               int64_t begin, int64_t end, int32_t* status) {
  FlushDenormals flush;
  const Step& what = program.steps[step];
  const StepPlan& s = plan.steps[step];
  if (what.kind == Step::Kind::kLibrary) {
    RunLibraryBlocks(what, program.buffers[what.buffers[0]].dtype, s, buffers, begin, end);
  } else {
    RunKernel(code.kernel(step), {buffers, s.dims.data(), s.blocks}, begin, end, s.shared_bytes, status);
  }
}

int32_t RunHost(const Program& program, const HostCode& code, const Plan& plan, void* const* memory,
                const ParallelFor& parallel_for, int threads, const Observe* observe) {
  int32_t status = 0;
  std::vector<void*> buffers;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    const StepPlan& s = plan.steps[i];
    if (step.kind == Step::Kind::kAlias || !s.blocks) continue;
    buffers.clear();
    for (uint32_t id : step.buffers) buffers.push_back(memory[id]);
    auto run = [&](int64_t begin, int64_t end) {
      RunBlocks(program, code, plan, i, buffers.data(), begin, end, &status);
    };
    int64_t shard = ShardSize(s.blocks, s.cost, threads);
    if (observe) (*observe)(i, true);
    if (shard >= s.blocks) {
      run(0, s.blocks);
    } else {
      parallel_for(s.blocks, shard, run);
    }
    if (observe) (*observe)(i, false);
    if (status) break;
  }
  return status;
}

}  // namespace tf_stitch
