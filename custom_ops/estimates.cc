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
      if (found->second[b] > 0) return static_cast<double>(found->second[b]) * count;
    }
  }
  return cost_us * count;
}

void Estimates::Measured(uint64_t shape, int count, double us) {
  if (!(us > 0) || !std::isfinite(us) || count < 1) return;
  auto found = times_.find(shape);
  if (found == times_.end()) {
    if (times_.size() >= kMaxShapes) times_.erase(times_.begin());
    found = times_.emplace(shape, Times{}).first;
  }
  float& time = found->second[BucketOf(count)];
  double each = us / count;
  time = static_cast<float>(time > 0 ? time + kFollow * (each - static_cast<double>(time)) : each);
}

std::string Estimates::Save() const {
  std::string out = "{";
  for (const auto& [shape, times] : times_) {
    for (int b = 0; b < kCounts; ++b) {
      if (!(times[b] > 0)) continue;
      char line[80];
      snprintf(line, sizeof line, "%s\n\"%016" PRIx64 ":%d\": %.6g", out.size() > 1 ? "," : "", shape, b,
               static_cast<double>(times[b]));
      out += line;
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
    if (times_.size() < kMaxShapes) times_[shape][bucket] = static_cast<float>(value);
  }
  return "";
}

}  // namespace tf_stitch
