// Superkernels on the CPU: one parallel loop over the blocks of many problems.
#ifndef TF_STITCH_CUSTOM_OPS_COALESCE_HOST_H_
#define TF_STITCH_CUSTOM_OPS_COALESCE_HOST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "coalescer.h"
#include "merge.h"
#include "plan.h"
#include "program.h"
#include "runtime_host.h"

namespace tf_stitch {

// What requests of one plan share; kept with the plan.  `work` has one unit for each step that has something to do.
struct HostWork : PlanExtra {
  HostWork(const Program& program, const HostCode& code, const Plan& plan);

  std::shared_ptr<const Work> work;
  std::vector<size_t> steps;  // by unit
  Mergeable mergeable;
};

// A run of a program on the CPU.  What it points to must live until Done.
class HostRequest : public Request {
 public:
  const Program* program = nullptr;
  const HostCode* code = nullptr;
  std::shared_ptr<const Plan> plan;
  const HostWork* host_work = nullptr;
  void* const* memory = nullptr;  // address of every buffer of the program
  ParallelFor parallel_for;
  int threads = 1;  // of parallel_for
  PlanFor joined_plan;
};

// Runs HostRequests, `workers` superkernels at a time.  Joined runs take no more than `merge_bytes` of memory together.
std::unique_ptr<Device> MakeHostDevice(int workers, int64_t merge_bytes);

// The ticket of a request that its caller has run, for Coalescer::RanAlone.
std::unique_ptr<Device::Ticket> HasRun(double us);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_COALESCE_HOST_H_
