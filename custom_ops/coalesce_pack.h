// How one unit of many requests becomes launches over a table: laid out once, recorded as a CUDA graph, then replayed.
#ifndef TF_STITCH_CUSTOM_OPS_COALESCE_PACK_H_
#define TF_STITCH_CUSTOM_OPS_COALESCE_PACK_H_

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "plan.h"
#include "program.h"
#include "runtime_cuda.h"
#include "superkernel_cuda.h"

namespace tf_stitch {

// What a launch that many requests share wants to know of each: a kernel its parameter block, a matrix product where
// its matrices lie.  The same for all runs of a plan, but for addresses.
struct PackedLaunch {
  // The launch of a plan; `many` is false where requests cannot share it.
  PackedLaunch(const Program& program, const Plan& plan, const CudaPlan& ready, size_t launch);

  bool many = false;
  cuda::Function function = nullptr;  // a kernel's form for many; null for products
  int64_t blocks = 0, shared_bytes = 0;
  unsigned threads = 0;
  cuda::ProductShape product{};     // of a library step
  std::vector<uint32_t> buffers;    // whose addresses come first; of a product: lhs, rhs, out
  std::vector<uint64_t> rest;       // of a kernel: the words behind its addresses
  int64_t batch = 0;                // of a product: its matrices
  std::array<int64_t, 3> stride{};  // of a product: bytes from one matrix to the next
  std::string what;                 // in errors

  size_t words() const { return buffers.size() + rest.size(); }
};

// A request's share in a pack.
struct PackMember {
  const std::vector<PackedLaunch>* launches;  // of its plan
  void* const* memory;
};

// Launches [begin, end), all of them `many`, of `count` requests over the table of a lane.
class Pack {
 public:
  // For requests of plans whose launches equal these.  Null with the reason in `error`.
  static std::unique_ptr<Pack> Make(const std::vector<PackedLaunch>& launches, size_t begin, size_t end, size_t count,
                                    const std::shared_ptr<CudaCode>& code, bool graphs, cuda::LaneStreams* lane,
                                    std::string* error);
  ~Pack();

  // False when the code that it launches is gone.
  bool is_usable() const { return !code_.expired(); }
  size_t table_bytes() const { return list_.table_bytes(); }

  // Writes the words of `count` members.
  void Fill(const std::vector<PackMember>& members, uint64_t* table) const;

  // Enqueues the launches on the lane; the first run does so one by one, later ones as a graph.  "" or what failed.
  std::string Run();

  // Records the graph, so that they can run on a stream that is no lane's.  "" or why it cannot be.
  std::string Prepare() { return graph_ ? "" : Record(); }
  std::string RunOn(cuda::Stream stream);

 private:
  Pack(const cuda::Driver& driver, cuda::LaneStreams* lane, size_t begin, size_t count, bool graphs)
      : driver_(driver), lane_(lane), list_(driver, lane), begin_(begin), count_(count), graphs_(graphs) {}
  std::string Add(const PackedLaunch& launch);
  std::string Record();

  const cuda::Driver& driver_;
  cuda::LaneStreams* const lane_;
  cuda::LaunchList list_;
  const size_t begin_, count_;
  bool graphs_;
  int runs_ = 0;
  std::vector<size_t> at_;  // by launch from begin_: its first word in the table
  std::weak_ptr<CudaCode> code_;
  cuda::GraphExec graph_ = nullptr;
};

// The packs of a lane, the most recently used ones.
class PackCache {
 public:
  // The pack of a cluster for so many requests; null when there is none.
  Pack* Find(uint64_t cluster, size_t count);
  Pack* Keep(uint64_t cluster, size_t count, std::unique_ptr<Pack> pack);

 private:
  struct Entry {
    uint64_t cluster;
    size_t count;
    std::unique_ptr<Pack> pack;
  };
  std::list<Entry> entries_;  // most recent first
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_COALESCE_PACK_H_
