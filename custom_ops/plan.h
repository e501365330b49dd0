// What a program needs for one shape signature: sizes, arena offsets and launch parameters, all evaluated.
#ifndef TF_STITCH_CUSTOM_OPS_PLAN_H_
#define TF_STITCH_CUSTOM_OPS_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lru_cache.h"
#include "program.h"

namespace tf_stitch {

// Input dims (in order) followed by the values of the "value" symbols (in order).  Ranks are the program's own, so
// equal signatures mean equal plans.
using Signature = std::vector<int64_t>;

struct StepPlan {
  int64_t blocks = 0;
  int64_t shared_bytes = 0;
  int64_t cost = 0;           // cycles of one block
  std::vector<int64_t> dims;  // the kernel's run-time integers
};

// What a device keeps with a plan, made by the plan's first run there and dropped with the plan.
struct PlanExtra {
  virtual ~PlanExtra() = default;
};

// Immutable once made (but for `extra` and `work`, each made once), so any number of threads may run from it.
struct Plan {
  bool usable = false;
  std::string why_not;  // set when not usable: which guard or size does not hold

  Signature signature;                            // what it was made for
  std::vector<std::vector<int64_t>> output_dims;  // by output
  std::vector<int64_t> batch_inner;               // by output: Batch::Place::inner; of a program with a batch
  std::vector<int64_t> buffer_bytes;              // by buffer
  std::vector<int64_t> arena_offset;              // by buffer; only for arena buffers
  int64_t arena_bytes = 0;
  std::vector<StepPlan> steps;  // by step; empty entries for aliases

  mutable std::once_flag extra_once;
  mutable std::unique_ptr<PlanExtra> extra;
  mutable std::once_flag work_once;  // as above, by the first run that is coalesced
  mutable std::unique_ptr<PlanExtra> work;
};

// Arena offsets are multiples of this; so are the sizes that a GPU allocates.
constexpr int64_t kArenaAlignment = 256;

// Evaluates the program for a signature.  Never fails: a plan that cannot be used says why.
std::unique_ptr<Plan> MakePlan(const Program& program, const Signature& signature);

// Plans by signature, the most recently used ones.  Thread-safe.
class PlanCache {
 public:
  explicit PlanCache(size_t capacity = 128) : plans_(capacity) {}

  // The plan for a signature, made when it is not there.
  std::shared_ptr<const Plan> Get(const Program& program, const Signature& signature);

 private:
  struct Hash {
    size_t operator()(const Signature& s) const;
  };

  std::mutex mu_;
  LruCache<Signature, std::shared_ptr<const Plan>, Hash> plans_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_PLAN_H_
