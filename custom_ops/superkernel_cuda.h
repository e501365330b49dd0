// What a superkernel enqueues on a GPU: launches over a table of problems, which is brought to the device before them.
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
#include "table_writer.h"

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

// Page-locked memory that a table is written to.  It is taken until the table is on the device.
class HostTable {
 public:
  // Of `bytes` at least.
  HostTable(const Driver& driver, size_t bytes);
  HostTable(const HostTable&) = delete;
  HostTable& operator=(const HostTable&) = delete;
  ~HostTable();

  size_t bytes() const { return bytes_; }  // 0: there was not enough memory
  uint64_t* words() const { return static_cast<uint64_t*>(words_); }

 private:
  const Driver& driver_;
  size_t bytes_;
  void* words_ = nullptr;
};

// A stream with others beside it: one lane of a device.  What is enqueued on a lane runs in order.
class LaneStreams {
 public:
  // Work that may run beside others: on this stream, with a workspace of kWorkspaceBytes where AddWorkspaces made one.
  using Work = std::function<std::string(Stream stream, void* workspace)>;
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;
  static constexpr size_t kTableBytes = size_t{2} << 20;
  static constexpr size_t kSides = 4;

  // Null with the reason in `error`.  `priority`: lower goes first.  The context must be current.
  static std::unique_ptr<LaneStreams> Make(const Driver& driver, int priority, std::shared_ptr<EventPool> events,
                                           std::string* error);
  ~LaneStreams();

  Stream main() const { return streams_[0]; }

  // Enqueues the way of a table's first bytes to where the lane's launches find it, on the stream that they are on:
  // what was enqueued before may still read the last table.  "" or the error.
  std::string BringTable(const HostTable& from, size_t bytes, Stream stream);
  const TableWriter& writer() const { return writer_; }
  char* table() const { return static_cast<char*>(table_); }

  // Sees to it that each of `count` pieces of work side by side has a workspace.  "" or the error.
  std::string AddWorkspaces(size_t count);

  // Enqueues pieces of work side by side: after what `stream` has, before what it gets.  "" or the first error.
  std::string SideBySide(const std::vector<Work>& work, Stream stream);

 private:
  LaneStreams(const Driver& driver, std::shared_ptr<EventPool> events)
      : driver_(driver), writer_(driver), events_(std::move(events)) {}

  const Driver& driver_;
  const TableWriter writer_;
  const std::shared_ptr<EventPool> events_;
  std::vector<Stream> streams_;  // the first is main()
  std::vector<void*> workspaces_;
  void* table_ = nullptr;
};

// Matrix products out = op(lhs) @ op(rhs) of one shape; row-major and dense.
struct ProductShape {
  int dtype;
  int64_t m, n, k;
  bool trans_lhs, trans_rhs, tf32;
};

// The launches of a superkernel, in order, over a table that lies on the lane.  It holds no addresses but the table's:
// the same list may be enqueued again and again over tables with other words.
class LaunchList {
 public:
  LaunchList(const Driver& driver, LaneStreams* streams) : driver_(driver), streams_(*streams) {}
  LaunchList(const LaunchList&) = delete;
  LaunchList& operator=(const LaunchList&) = delete;
  ~LaunchList();

  // A kernel over `count` problems, one launch of its form for many; `what` names it in errors.  Returns the word of
  // the table where the problems' parameter blocks, `words` each, follow each other.
  size_t AddKernel(Function many, int64_t blocks, unsigned threads, int64_t shared_bytes, size_t words, size_t count,
                   std::string what);

  // Independent products: one call for each shape, of `counts[i]` of them, side by side.  `at[i]` is the word of the
  // table where the addresses of lhs, then rhs, then out begin, each ArrayWords(counts[i]) long.  "" or the error.
  std::string AddProducts(const std::vector<ProductShape>& shapes, const std::vector<size_t>& counts,
                          const std::string& what, std::vector<size_t>* at);

  static size_t ArrayWords(size_t count) { return (count + 1) / 2 * 2; }  // arrays begin at multiples of 16 bytes

  size_t table_bytes() const { return words_ * sizeof(uint64_t); }

  // Records the launches as a graph, on a stream that nothing else uses.  "" or why they cannot be: then they are
  // enqueued one by one.
  std::string Record(Stream stream);

  // Enqueues the way of their table to the device, and all launches.  "" or what failed.
  std::string Enqueue(const HostTable& table, Stream stream) const;

 private:
  using Launch = std::function<std::string(Stream)>;

  size_t Reserve(size_t words);
  std::string EnqueueLaunches(Stream stream) const;

  const Driver& driver_;
  LaneStreams& streams_;
  size_t words_ = 0;
  std::vector<Launch> launches_;
  GraphExec graph_ = nullptr;
  GraphNode writes_table_ = nullptr;  // of the graph; null: the table is brought before it
};

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_SUPERKERNEL_CUDA_H_
