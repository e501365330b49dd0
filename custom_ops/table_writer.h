// How a small table comes to the device along with a launch: as the parameter of a kernel that writes it to memory.
#ifndef TF_STITCH_CUSTOM_OPS_TABLE_WRITER_H_
#define TF_STITCH_CUSTOM_OPS_TABLE_WRITER_H_

#include <array>
#include <cstddef>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

// A copy of page-locked memory is made by an engine of its own, and the stream's next kernel begins up to 16 us later
// (H200); with such a kernel before it, 1.3.  The driver copies parameters at once.
class TableWriter {
 public:
  // Of the context that is current, also at its end.  Where the driver takes no such kernel (before CUDA 12.1) it takes
  // no table.
  explicit TableWriter(const Driver& driver);
  TableWriter(const TableWriter&) = delete;
  TableWriter& operator=(const TableWriter&) = delete;
  ~TableWriter();

  bool Takes(size_t bytes) const { return module_ && bytes <= kMostBytes; }

  // Enqueues the writing of `bytes` bytes, a multiple of 8 that it takes, to device memory.  `from` has kMostBytes that
  // can be read, and may be used again at once.
  Result Enqueue(void* to, const void* from, size_t bytes, Stream stream) const;

  // Has a graph, of which `node` was recorded as Enqueue with as many bytes, write other words when it is next
  // launched.
  Result Change(GraphExec graph, GraphNode node, void* to, const void* from, size_t bytes) const;

  // A launch's parameters may have twice as much; but then the host takes 18 us for them, not 5 (as for a copy).
  static constexpr size_t kMostBytes = size_t{16} << 10;

 private:
  Function KernelFor(size_t bytes) const;

  // Words that a kernel's parameter has: the driver copies all of them, so what is little should have few.
  static constexpr std::array<unsigned, 3> kWords = {64, 512, kMostBytes / 8};

  const Driver& driver_;
  Module module_ = nullptr;
  std::array<Function, kWords.size()> kernels_{};
};

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_TABLE_WRITER_H_
