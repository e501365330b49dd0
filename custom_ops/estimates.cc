#include "estimates.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "flat_json.h"

namespace tf_stitch {
namespace {

constexpr double kFollow = 0.2;  // weight of a new measurement
constexpr uint8_t kCold = 4;     // measurements of which the least counts: they hold what is done only once
// Times its estimate, what a measurement counts at most.  A request of the shape that does what is done only once for
// its own model takes a hundred times as long.
constexpr float kMost = 2;

}  // namespace

int Estimates::BucketOf(int count) {
  int bucket = 0;
  while (count > 1 && bucket + 1 < kCounts) count /= 2, ++bucket;
  return bucket;
}

double Estimates::Of(uint64_t shape, int count, double cost_us) const {
  auto found = times_.find(shape);
  if (found != times_.end()) {
    for (int b = BucketOf(count); b >= 0; --b) {
      if (found->second.us[b] > 0) return static_cast<double>(found->second.us[b]) * count;
    }
  }
  return cost_us * count;
}

int Estimates::Times(uint64_t shape, int count) const {
  auto found = times_.find(shape);
  return found == times_.end() ? 0 : found->second.measured[BucketOf(count)];
}

void Estimates::Measured(uint64_t shape, int count, double us) {
  if (!(us > 0) || !std::isfinite(us) || count < 1) return;
  auto found = times_.find(shape);
  if (found == times_.end()) {
    if (times_.size() >= kMaxShapes) times_.erase(times_.begin());
    found = times_.emplace(shape, Entry{}).first;
  }
  float& time = found->second.us[BucketOf(count)];
  uint8_t& measured = found->second.measured[BucketOf(count)];
  auto each = static_cast<float>(us / count);
  if (measured < kCold) {
    time = time > 0 ? std::min(time, each) : each;
  } else {
    time += static_cast<float>(kFollow) * (std::min(each, kMost * time) - time);
  }
  if (measured < UINT8_MAX) ++measured;
}

std::string Estimates::Save() const {
  std::string out = "{";
  for (const auto& [shape, entry] : times_) {
    for (int b = 0; b < kCounts; ++b) {
      if (!(entry.us[b] > 0)) continue;
      char key[40];
      snprintf(key, sizeof key, "%s\n\"%016" PRIx64 ":%d\": ", out.size() > 1 ? "," : "", shape, b);
      out += key + NumberJson(static_cast<double>(entry.us[b]), 6);
    }
  }
  return out + "\n}\n";
}

std::string Estimates::Load(const std::string& json) {
  FlatJson values;
  std::string error = values.Parse(json);
  if (!error.empty()) return error;
  for (const auto& [key, value] : values.numbers()) {
    char* end = nullptr;
    uint64_t shape = strtoull(key.c_str(), &end, 16);
    int bucket = *end == ':' ? atoi(end + 1) : -1;
    if (bucket < 0 || bucket >= kCounts || !(value > 0)) return "'" + key + "' is no measured time";
    if (times_.size() >= kMaxShapes) continue;
    Entry& entry = times_[shape];
    entry.us[bucket] = static_cast<float>(value);
    entry.measured[bucket] = UINT8_MAX;
  }
  return "";
}

}  // namespace tf_stitch
