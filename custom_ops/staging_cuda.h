// Page-locked memory that inputs go to a GPU through: the driver copies from it without waiting for the stream.  And
// waiting for a stream.
//
// Plain C++ over the CUDA driver API.
#ifndef TF_STITCH_CUSTOM_OPS_STAGING_CUDA_H_
#define TF_STITCH_CUSTOM_OPS_STAGING_CUDA_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

// Blocks of page-locked memory, each used again once the copy from it has run.  Thread-safe.
class Staging {
 public:
  // Bytes of all blocks together; a copy beyond it is from pageable memory, which may wait for the stream.
  static constexpr size_t kMostBytes = size_t{256} << 20;

  // What lies in ordinary memory and where it goes, from the beginning of the device's memory.
  struct Piece {
    const void* from;
    size_t bytes, at;
  };

  Staging(const Driver& driver, Context context) : driver_(driver), context_(context) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The context's, made by the first call and kept for ever.
  static Staging& Of(const Driver& driver, Context context);

  // Enqueues the copy of all pieces to `to`, which has `total` bytes.  Their memory may be given back when this
  // returns.  The context must be current, and the stream not be captured.
  Result Copy(const std::vector<Piece>& pieces, size_t total, void* to, Stream stream);

  // Waits until the device has done what the stream has now.  A few threads at a time look again and again, more of
  // streams of high priority; the others sleep, and wake later.
  Result Wait(Stream stream);

 private:
  struct Block {
    char* memory = nullptr;
    size_t bytes = 0;
    Event copied = nullptr;
  };

  Event TakeEvent();
  Result WaitFor(Event event, int most_looking);
  Block Take(size_t bytes);
  Block Make(size_t bytes);
  void Free(const Block& block);

  const Driver& driver_;
  const Context context_;
  std::mutex mu_;
  std::vector<Block> blocks_;  // that nobody fills, oldest first; their copies may still run
  size_t bytes_ = 0;           // of all blocks
  std::vector<Event> events_;  // that nobody waits for
  std::atomic<int> looking_{0};
};

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_STAGING_CUDA_H_
