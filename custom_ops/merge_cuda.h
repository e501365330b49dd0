// Joined runs (merge.h) on a GPU: their memory, and the launches that gather inputs and scatter outputs.
#ifndef TF_STITCH_CUSTOM_OPS_MERGE_CUDA_H_
#define TF_STITCH_CUSTOM_OPS_MERGE_CUDA_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "merge.h"

namespace tf_stitch {

// Device memory with a table of pieces in page-locked memory, which the device reads where it lies.
class MergeBlock {
 public:
  MergeBlock(const cuda::Driver& driver, int64_t bytes, int64_t table_bytes);
  MergeBlock(const MergeBlock&) = delete;
  MergeBlock& operator=(const MergeBlock&) = delete;
  ~MergeBlock();

  bool good() const { return memory_ && table_; }
  int64_t bytes() const { return bytes_; }
  int64_t table_bytes() const { return table_bytes_; }
  char* memory() const { return static_cast<char*>(memory_); }
  Piece* table() const { return static_cast<Piece*>(table_); }

  const void* last = nullptr;  // the plan that used it last

 private:
  const cuda::Driver& driver_;
  const int64_t bytes_, table_bytes_;
  void* memory_ = nullptr;
  void* table_ = nullptr;
};

// Blocks of one context, used again: equal runs get equal addresses, so their CUDA graphs can be replayed.
class MergeMemory {
 public:
  MergeMemory(const cuda::Driver& driver, int64_t bytes) : driver_(driver), most_(bytes) {}

  // A block for a run of a plan, held until the device is done with it: the one that the plan used last, if nobody has
  // it.  Null when joined runs would take too much.  The context must be current.
  std::shared_ptr<MergeBlock> Take(const void* plan, int64_t bytes, size_t pieces);

  // Frees what nobody holds; the context must be current.
  void Clear();

 private:
  MergeBlock* TakeFree(const void* plan, int64_t bytes, int64_t table_bytes);
  void Give(MergeBlock* block);

  const cuda::Driver& driver_;
  const int64_t most_;
  std::mutex mu_;
  int64_t taken_ = 0;                              // by all blocks
  std::vector<std::unique_ptr<MergeBlock>> free_;  // most recently used last
};

// Enqueues copies of pieces, which lie in the table of a block, by the kernel ts_copy_pieces.  "" or the error.
std::string EnqueuePieces(const cuda::Driver& driver, cuda::Function copy_pieces, const std::vector<Piece>& pieces,
                          Piece* table, cuda::Stream stream);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_MERGE_CUDA_H_
