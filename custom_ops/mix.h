// Hashes of what is made of words and texts; the same in every process.
#ifndef TF_STITCH_CUSTOM_OPS_MIX_H_
#define TF_STITCH_CUSTOM_OPS_MIX_H_

#include <cstdint>
#include <string_view>

namespace tf_stitch {

constexpr uint64_t kMixStart = 1469598103934665603ull;

inline uint64_t Mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

inline uint64_t Mix(uint64_t h, std::string_view text) {
  for (char c : text) h = Mix(h, static_cast<uint64_t>(static_cast<unsigned char>(c)));
  return h;
}

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_MIX_H_
