// How one unit of many requests becomes launches over a table: laid out and recorded as a CUDA graph, apart from the
// threads that requests wait for, then replayed.
#ifndef TF_STITCH_CUSTOM_OPS_COALESCE_PACK_H_
#define TF_STITCH_CUSTOM_OPS_COALESCE_PACK_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
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
  // For requests of plans whose launches equal these; the code must be kept while it is made.  Null with the reason in
  // `error`.
  static std::unique_ptr<Pack> Make(const std::vector<PackedLaunch>& launches, size_t begin, size_t end, size_t count,
                                    const std::shared_ptr<CudaCode>& code, cuda::LaneStreams* lane, std::string* error);

  // As LaunchList's.
  std::string Record(cuda::Stream stream) { return list_.Record(stream); }
  std::string Enqueue(const cuda::HostTable& table, cuda::Stream stream) const { return list_.Enqueue(table, stream); }

  // False when the code that it launches is gone.
  bool is_usable() const { return !code_.expired(); }
  size_t count() const { return count_; }
  size_t table_bytes() const { return list_.table_bytes(); }

  // Writes the words of `count` members.
  void Fill(const std::vector<PackMember>& members, uint64_t* table) const;

 private:
  Pack(const cuda::Driver& driver, cuda::LaneStreams* lane, size_t begin, size_t count)
      : list_(driver, lane), begin_(begin), count_(count) {}
  std::string Add(const PackedLaunch& launch);

  cuda::LaunchList list_;
  const size_t begin_, count_;
  std::vector<size_t> at_;  // by launch from begin_: its first word in the table
  std::weak_ptr<CudaCode> code_;
};

// The packs of a lane, the most recently used ones.  Thread-safe: one thread runs packs, another makes them.
class PackCache {
 public:
  // The largest pack of a cluster for no more than so many requests; null when there is none.
  std::shared_ptr<const Pack> Find(uint64_t cluster, size_t most);

  // True once for each pack that is neither there nor being made: whoever asked is to have it made, and kept.
  bool Claim(uint64_t cluster, size_t count);
  void Keep(uint64_t cluster, size_t count, std::shared_ptr<const Pack> pack);  // null: it cannot be made
  void Clear();

 private:
  struct Entry {
    uint64_t cluster;
    size_t count;
    bool is_made;
    std::shared_ptr<const Pack> pack;
  };
  std::mutex mu_;
  std::list<Entry> entries_;  // most recent first
};

// A thread that makes packs, which takes milliseconds: no request waits for that.
class PackMaker {
 public:
  using Order = std::function<void(cuda::Stream)>;  // gets a stream to record on

  PackMaker(const cuda::Driver& driver, cuda::Context context);
  ~PackMaker();  // what was not begun is not made

  void Add(Order order);
  void Wait();  // until all that was ordered is made

 private:
  void Loop();

  const cuda::Driver& driver_;
  const cuda::Context context_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Order> orders_;
  bool is_busy_ = false, over_ = false;
  std::thread thread_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_COALESCE_PACK_H_
