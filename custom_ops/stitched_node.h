// What the CPU and the GPU kernel of the StitchedProgram op share.
#ifndef TF_STITCH_CUSTOM_OPS_STITCHED_NODE_H_
#define TF_STITCH_CUSTOM_OPS_STITCHED_NODE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/container/inlined_vector.h"
#include "op_fallback.h"
#include "plan.h"
#include "program.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_stitch {

// Logs each distinct message once per process: a node may be instantiated many times.
void WarnOnce(const std::string& message);

// A StitchedProgram node: its program and its fallback function.  A kernel runs the program where it can, and else the
// fallback, which holds the operations that the node replaced.
class StitchedNode {
 public:
  // Where a run's buffers lie.
  struct Memory {
    absl::InlinedVector<const tensorflow::Tensor*, 16> inputs;
    absl::InlinedVector<tensorflow::Tensor, 4> outputs;
    tensorflow::Tensor arena;
    absl::InlinedVector<void*, 32> addresses;  // by buffer
  };

  StitchedNode(tensorflow::OpKernelConstruction* ctx, bool on_gpu);

  // Parses and checks the program, then calls `load`, which says why the program cannot be used, or "".  Without it,
  // and after a failure (which is logged), only the fallback runs.
  void Prepare(tensorflow::OpKernelConstruction* ctx, const std::function<std::string()>& load);

  // The plan for the inputs at hand; null when the kernels cannot run them.
  std::shared_ptr<const Plan> PlanFor(tensorflow::OpKernelContext* ctx, PlanCache* plans) const;

  // Fills `memory`, whose inputs may be set already; the arena gets `arena_bytes`.  False when memory is short.
  bool Allocate(tensorflow::OpKernelContext* ctx, const Plan& plan, int64_t arena_bytes, Memory* memory) const;

  void SetOutputs(tensorflow::OpKernelContext* ctx, Memory* memory) const;

  const std::string& name() const { return name_; }
  const Program& program() const { return program_; }
  bool ready() const { return ready_; }  // false: only the fallback runs
  Fallback& fallback() { return *fallback_; }

 private:
  std::string Parse(tensorflow::OpKernelConstruction* ctx);

  const std::string name_;
  std::unique_ptr<Fallback> fallback_;
  Program program_;
  bool ready_ = false;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_STITCHED_NODE_H_
