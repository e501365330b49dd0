// Superkernels on a GPU: requests of equal programs and sizes as launches over tables, on the scheduler's own streams.
#ifndef TF_STITCH_CUSTOM_OPS_COALESCE_CUDA_H_
#define TF_STITCH_CUSTOM_OPS_COALESCE_CUDA_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "coalesce_pack.h"
#include "coalescer.h"
#include "merge.h"
#include "merge_cuda.h"
#include "plan.h"
#include "program.h"
#include "runtime_cuda.h"
#include "superkernel_cuda.h"

namespace tf_stitch {

// Runs of fewer launches than this gain less from company than it costs to hold them and to tell of their end.
constexpr size_t kLaunchesWorthHolding = 4;

// A number for a list of launches, the same for equal lists as long as anyone holds one of them.
class LaunchList {
 public:
  explicit LaunchList(std::string launches);
  ~LaunchList();
  LaunchList(const LaunchList&) = delete;
  LaunchList& operator=(const LaunchList&) = delete;

  uint64_t number() const { return at_->second.number; }
  static size_t Count();  // different lists that are held

  struct Holders {
    uint64_t number = 0;
    size_t holders = 0;
  };
  using Held = std::map<std::string, Holders>;

 private:
  Held::iterator at_;
};

// What requests of one plan share; kept with the plan.
//
// A unit is a run of launches.  Plans whose launches are equal (kernels, sizes, library calls), whatever their weights,
// have equal clusters: their requests are packed launch by launch.  A plan with little that can be packed is one unit,
// whose requests run side by side.
struct CudaWork : PlanExtra {
  // Without `may_pack` requests share no launches: a product's sums may be added in another order for more of them.
  CudaWork(const Program& program, const Plan& plan, const CudaPlan& ready, bool may_pack = true);

  std::unique_ptr<LaunchList> list;
  std::shared_ptr<const Work> work;
  std::vector<size_t> begin;  // by unit: its first launch; then the number of launches
  std::vector<PackedLaunch> launches;
  bool worth_packing = false;
  Mergeable mergeable;
};

// A run of a program on a GPU.  What it points to must live until Done.
class CudaRequest : public Request {
 public:
  const Program* program = nullptr;
  std::shared_ptr<const Plan> plan;
  CudaPlan* ready = nullptr;
  const CudaWork* cuda_work = nullptr;
  void* const* memory = nullptr;  // device address of every buffer of the program
  void* workspace = nullptr;
  PlanFor joined_plan;                     // its `extra` is a CudaPlan; called with the context current
  bool graphs = true;                      // it may run as a CUDA graph
  std::shared_ptr<cuda::EventTag> inputs;  // its memory may be used once this has happened

 private:
  friend class CudaDevice;
  std::shared_ptr<cuda::EventTag> last_;  // its last unit was enqueued before this, on lane last_lane_
  size_t last_lane_ = 0;
};

// Runs CudaRequests of one context.
class CudaDevice : public Device {
 public:
  // Null with the reason in `error`.  Of several lanes the last one is for best effort.  Joined runs take no more than
  // `merge_bytes` of memory together.
  static std::unique_ptr<CudaDevice> Make(const cuda::Driver& driver, cuda::Context context, int lanes,
                                          int64_t merge_bytes, std::string* error);
  ~CudaDevice() override;

  const std::string& name() const override { return name_; }
  std::vector<LaneKind> lanes() const override;
  bool enqueues() const override { return true; }
  std::unique_ptr<Ticket> Issue(size_t lane, std::vector<Member>* members) override;
  std::unique_ptr<Ticket> IssueJoined(size_t lane, const std::vector<Request*>& requests, Joining* how) override;

  // Waits until every superkernel that requests so far would have used has its graph.
  void FinishPacks() { maker_->Wait(); }

  // An event on a stream of the context's; null when the driver fails.
  std::shared_ptr<cuda::EventTag> Record(cuda::Stream stream);

  // Enqueues a request on its caller's stream, after its `inputs`; one at a time.  Where no graph is at hand that holds
  // its addresses, `launch` may be called, which does it.  Null with the reason in `error` when it cannot be run.
  std::unique_ptr<Ticket> RunAlone(const CudaRequest& request, cuda::Stream stream,
                                   const std::function<std::string()>& launch, std::string* error);

 private:
  struct UnderWay;

  struct Lane {
    std::unique_ptr<cuda::LaneStreams> streams;
    PackCache packs;
  };

  using Held = std::vector<std::shared_ptr<const void>>;

  CudaDevice(const cuda::Driver& driver, cuda::Context context, int64_t merge_bytes);
  // What `enqueue` enqueues, once the requests' inputs are there; a ticket holds `held` until it has run.
  std::unique_ptr<Ticket> Between(size_t lane, const std::vector<Request*>& requests, Held held,
                                  const std::function<std::string(UnderWay*)>& enqueue, std::string* error);
  std::string WaitFor(cuda::Stream stream, size_t lane, const CudaRequest& request);
  std::string Enqueue(Lane* lane, std::vector<Member>* members, UnderWay* under_way);
  static std::string EnqueueWhole(Lane* lane, Member* member);
  std::string EnqueueUnit(std::vector<Member>* members, Lane* lane, UnderWay* under_way);
  std::shared_ptr<const Pack> PackFor(const CudaRequest& request, size_t unit, size_t count, Lane* lane);
  void OrderPack(const CudaRequest& request, size_t unit, size_t count, Lane* lane);
  bool EnqueuePack(const std::vector<CudaRequest*>& requests, const Pack& pack, cuda::Stream stream,
                   UnderWay* under_way, std::string* error);
  bool ReplayAlone(const CudaRequest& request, cuda::Stream stream, UnderWay* under_way, std::string* error);
  static std::string EnqueueApart(const CudaRequest& request, size_t unit, Lane* lane);
  std::shared_ptr<cuda::HostTable> Table(size_t bytes);

  const cuda::Driver& driver_;
  const cuda::Context context_;
  std::string name_;
  std::shared_ptr<cuda::EventPool> events_;
  std::deque<Lane> lanes_;
  Lane callers_;  // of requests that run alone, on their callers' streams
  std::unique_ptr<PackMaker> maker_;
  std::mutex mu_;
  std::vector<std::shared_ptr<cuda::HostTable>> tables_;
  MergeMemory merge_memory_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_COALESCE_CUDA_H_
