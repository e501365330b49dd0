// What the process's stitched ops have done so far; read by tests, reports and metrics.
#ifndef TF_STITCH_CUSTOM_OPS_COUNTERS_H_
#define TF_STITCH_CUSTOM_OPS_COUNTERS_H_

#include <atomic>
#include <cstdint>

namespace tf_stitch {

struct Counters {
  std::atomic<int64_t> stitched{0};         // runs of a program's own kernels
  std::atomic<int64_t> fallbacks{0};        // runs of a fallback function
  std::atomic<int64_t> plans{0};            // shape signatures planned
  std::atomic<int64_t> loads{0};            // shared objects and GPU modules loaded (equal code counts once)
  std::atomic<int64_t> graph_launches{0};   // runs of CUDA graphs
  std::atomic<int64_t> graph_instances{0};  // CUDA graphs made
  std::atomic<int64_t> graph_updates{0};    // CUDA graphs that were given other addresses
};

inline Counters& GlobalCounters() {
  static auto& counters = *new Counters;
  return counters;
}

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_COUNTERS_H_
