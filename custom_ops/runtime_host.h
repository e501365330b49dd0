// Runs programs on the CPU: picks the machine code that fits this processor, loads it from memory, runs its kernels.
//
// Plain C++: the thread pool comes in as a function.
#ifndef TF_STITCH_CUSTOM_OPS_RUNTIME_HOST_H_
#define TF_STITCH_CUSTOM_OPS_RUNTIME_HOST_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plan.h"
#include "program.h"

namespace tf_stitch {

// The kernel ABI (docs/architecture.md); the generated text holds the same declarations.
struct Problem {
  void* const* buffers;
  const int64_t* dims;
  int64_t blocks;
};
using KernelFn = void (*)(const Problem* problem, int64_t begin, int64_t end, char* shared, int32_t* status);

// Names of the code targets this processor can run, best first.
const std::vector<std::string>& HostTargets();

// Compiles `text` for `target` and hands the shared object to `deliver(sink, ...)`; returns 0 when it did.  Set by the
// Python side where there is a compiler; a program with no code for this processor is then built from its text.
using CompileFn = int (*)(const char* text, size_t text_size, const char* target,
                          void (*deliver)(void* sink, const char* data, size_t size), void* sink);
void SetCompiler(CompileFn compile);

// parallel_for(total, block, fn) calls fn(begin, end) over [0, total) in shards of `block`, maybe at the same time.
using ParallelFor = std::function<void(int64_t, int64_t, const std::function<void(int64_t, int64_t)>&)>;

// Called before (starts) and after each kernel of a run; for the profiler.
using Observe = std::function<void(size_t step, bool starts)>;

// A program's kernels, loaded.  Equal code is loaded once per process and dropped with its last user.
class HostCode {
 public:
  // Returns null and sets `error` when no code fits this processor or it cannot be loaded.
  static std::unique_ptr<HostCode> Load(const Program& program, std::string* error);

  const std::string& target() const { return target_; }
  KernelFn kernel(size_t step) const { return kernels_[step]; }  // null for steps that are not kernels

 private:
  std::string target_;
  std::shared_ptr<void> library_;
  std::vector<KernelFn> kernels_;  // by step; null for steps that are not kernels
};

// While one lives, the thread takes denormals for zero, as threads of TensorFlow's pools do.  Other threads run blocks
// too (Python's, the scheduler's), and which of them does must not change a result.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  uint64_t before_;
};

// Blocks of a step in one shard of a parallel loop: enough shards to balance, none too short to be worth a thread.
int64_t ShardSize(int64_t blocks, int64_t cost, int threads);

// Runs blocks [begin, end) of one step, which is no alias.  `buffers` are the step's.  Sets `status` when they fail.
void RunBlocks(const Program& program, const HostCode& code, const Plan& plan, size_t step, void* const* buffers,
               int64_t begin, int64_t end, int32_t* status);

// Runs all steps.  `memory` has the address of every buffer of the program.  Returns 0, or the kernels' status: then
// the outputs hold nothing of use.
int32_t RunHost(const Program& program, const HostCode& code, const Plan& plan, void* const* memory,
                const ParallelFor& parallel_for, int threads, const Observe* observe = nullptr);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_RUNTIME_HOST_H_
