// What a superkernel enqueues on a GPU: launches over tables of problems, written to the device in one copy.
#ifndef TF_STITCH_CUSTOM_OPS_SUPERKERNEL_CUDA_H_
#define TF_STITCH_CUSTOM_OPS_SUPERKERNEL_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

// Events with times, used again once nobody holds them.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(const Driver& driver, Context context) : driver_(driver), context_(context) {}
  ~EventPool();

  // An event recorded on `stream`; null when the driver fails.  The context must be current.
  std::shared_ptr<EventTag> Record(Stream stream);

 private:
  const Driver& driver_;
  const Context context_;
  std::mutex mu_;
  std::vector<Event> free_;
};

// A stream with others beside it: one lane of a device.
class LaneStreams {
 public:
  // Work that may run beside others: on this stream, with a workspace of kWorkspaceBytes where AddWorkspaces made one.
  using Work = std::function<std::string(Stream stream, void* workspace)>;
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;
  static constexpr size_t kSides = 4;

  // Null with the reason in `error`.  `priority`: lower goes first.  The context must be current.
  static std::unique_ptr<LaneStreams> Make(const Driver& driver, int priority, std::shared_ptr<EventPool> events,
                                           std::string* error);
  ~LaneStreams();

  Stream main() const { return streams_[0]; }

  // Enqueues `copy` beside what main() has, and before what it gets: tables are there before the device wants them.
  std::string CopyAhead(const std::function<std::string(Stream)>& copy);

  // Sees to it that each of `count` pieces of work side by side has a workspace.  "" or the error.
  std::string AddWorkspaces(size_t count);

  // Enqueues pieces of work side by side: after what main() has, before what it gets.  "" or the first error.
  std::string SideBySide(const std::vector<Work>& work);

 private:
  LaneStreams(const Driver& driver, std::shared_ptr<EventPool> events) : driver_(driver), events_(std::move(events)) {}

  const Driver& driver_;
  const std::shared_ptr<EventPool> events_;
  std::vector<Stream> streams_;  // the first is main(), the last one is for copies
  std::vector<void*> workspaces_;
};

// A table in page-locked memory and its place on the device.
class TableMemory {
 public:
  TableMemory(const Driver& driver, size_t bytes);
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;
  ~TableMemory();

  size_t bytes() const { return bytes_; }  // 0: there was not enough memory
  // Enqueues the copy of `words`; "" or the error.  The page-locked side is taken until the copy has run.
  std::string Copy(const std::vector<uint64_t>& words, Stream stream);
  char* device() const { return static_cast<char*>(device_); }

 private:
  const Driver& driver_;
  size_t bytes_;
  void* host_ = nullptr;
  void* device_ = nullptr;
};

// A matrix product out = op(lhs) @ op(rhs) of a superkernel; row-major and dense.
struct Product {
  int dtype;
  int64_t m, n, k;
  bool trans_lhs, trans_rhs, tf32;
  const void *lhs, *rhs;
  void* out;

  bool SameShape(const Product& o) const {
    return dtype == o.dtype && m == o.m && n == o.n && k == o.k && trans_lhs == o.trans_lhs &&
           trans_rhs == o.trans_rhs && tf32 == o.tf32;
  }
};

// The launches of a superkernel, in order.
class LaunchList {
 public:
  LaunchList(const Driver& driver, LaneStreams* streams) : driver_(driver), streams_(*streams) {}

  // A kernel over `count` problems, whose parameter blocks of equal sizes follow each other in `problems`: one launch
  // of its form for many.  `what` names it in errors.
  void AddKernel(Function many, int64_t blocks, unsigned threads, int64_t shared_bytes,
                 const std::vector<uint64_t>& problems, size_t count, std::string what);

  // Independent products: one call for all of a shape; those of different shapes run side by side.  "" or the error.
  std::string AddProducts(const std::vector<Product>& products, const std::string& what);

  // Anything else: pieces that may run side by side.
  void Add(std::vector<LaneStreams::Work> work);

  size_t table_bytes() const { return words_.size() * sizeof(uint64_t); }

  // Copies the tables and enqueues all launches on the lane's main stream.  "" or what failed.
  std::string Enqueue(TableMemory* table);

 private:
  using Launch = std::function<std::string(char* table)>;

  size_t AppendTable(const void* words, size_t bytes);

  const Driver& driver_;
  LaneStreams& streams_;
  std::vector<uint64_t> words_;
  std::vector<Launch> launches_;
};

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_SUPERKERNEL_CUDA_H_
