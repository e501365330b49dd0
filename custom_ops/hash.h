// Hashes that are the same in every process.
#ifndef TF_STITCH_CUSTOM_OPS_HASH_H_
#define TF_STITCH_CUSTOM_OPS_HASH_H_

#include <cstdint>
#include <string_view>

namespace tf_stitch {

constexpr uint64_t kHashOfNothing = 1469598103934665603ull;

// The hash of what `h` is the hash of, followed by a word.
inline uint64_t Mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

// FNV-1a.
inline uint64_t HashOfBytes(std::string_view bytes) {
  uint64_t h = kHashOfNothing;
  for (unsigned char c : bytes) h = (h ^ c) * 1099511628211ull;
  return h;
}

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_HASH_H_
