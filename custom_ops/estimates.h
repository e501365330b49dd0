// The performance library: how long work of a shape takes, alone and in company, measured as it runs.
#ifndef TF_STITCH_CUSTOM_OPS_ESTIMATES_H_
#define TF_STITCH_CUSTOM_OPS_ESTIMATES_H_

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace tf_stitch {

// Times by shape (a stable hash of what runs and how large it is) and by how many of that shape share a superkernel:
// one entry per power of two.  Times are those of one problem; they follow measurements by an exponential average.
// Not thread-safe: its owner holds a lock.
class Estimates {
 public:
  // Microseconds that `count` problems of a shape take together.  Counts that were never measured take the time per
  // problem of the next smaller one that was; `cost_us` (a cost model's guess for one) stands in for none.
  double Of(uint64_t shape, int count, double cost_us) const;

  // Whether a shape was ever measured.
  bool Known(uint64_t shape) const { return times_.count(shape) > 0; }

  // How often that many of a shape, or about that many, were measured; counts no further than 255.
  int Times(uint64_t shape, int count) const;

  // Corrects the times of a shape: `count` of them took `us` together.  The first measurements, which hold what is done
  // only once, are forgotten soon, and one that is far above the others counts little.
  void Measured(uint64_t shape, int count, double us);

  // As text, {"SHAPE:LOG2_COUNT": microseconds, ...}; Load adds what a text holds and returns "" or what is wrong.
  std::string Save() const;
  std::string Load(const std::string& json);

 private:
  static constexpr int kCounts = 9;  // 1, 2-3, 4-7, ... 256 and more
  static constexpr size_t kMaxShapes = 1 << 16;
  struct Entry {
    std::array<float, kCounts> us{};  // of one problem; 0: not measured
    std::array<uint8_t, kCounts> measured{};
  };

  static int BucketOf(int count);

  std::unordered_map<uint64_t, Entry> times_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_ESTIMATES_H_
