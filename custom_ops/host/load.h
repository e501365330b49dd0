// A load generator: many threads, checked answers, deadlines, latencies, and the memory of the process.
#ifndef TF_STITCH_CUSTOM_OPS_HOST_LOAD_H_
#define TF_STITCH_CUSTOM_OPS_HOST_LOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace tf_stitch::host {

struct LoadOptions {
  int threads = 8;
  int64_t requests = 1000;
  int64_t deadline_ms = 0;                    // 0: none
  std::vector<int64_t> batches = {1, 3, 17};  // sizes of unknown first dims
  int64_t other_dim = 16;                     // size of other unknown dims
  int64_t integers_below = 16;                // drawn integers lie in [0, integers_below)
  int distinct = 4;                           // drawn requests of each batch size
  double tolerance = 1e-5;                    // largest difference over the largest magnitude, per output
  uint64_t seed = 1;
};

// A request and what the original model answers.
struct Case {
  const Signature* signature;
  NamedTensors inputs, want;
};

struct LoadResult {
  int64_t answered = 0, wrong = 0, late = 0, failed = 0;  // `late`: the deadline passed first
  double worst_error = 0, seconds = 0;
  double p50_ms = 0, p99_ms = 0, largest_ms = 0;
  std::string first_problem;
  // Resident bytes of the process before the first request, after a tenth of the requests, at most, at the end.
  int64_t rss_before = 0, rss_warm = 0, rss_peak = 0, rss_after = 0;
};

// Inputs drawn for a signature: normal floats, small integers, short strings.
NamedTensors DrawInputs(const Signature& signature, const LoadOptions& options, int64_t batch, uint64_t seed);

// Sends the cases in turn from all threads at once, after each was sent once.
LoadResult RunLoad(const Model& model, const std::vector<Case>& cases, const LoadOptions& options);

int64_t ResidentBytes();

}  // namespace tf_stitch::host

#endif  // TF_STITCH_CUSTOM_OPS_HOST_LOAD_H_
