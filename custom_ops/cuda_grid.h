// A grid kernel made ready for one plan: its table in device memory, how many thread blocks it gets, its parameter.
// A pack, a grid of one phase, gets as many thread blocks as its steps have blocks, and counts nothing.
#ifndef TF_STITCH_CUSTOM_OPS_CUDA_GRID_H_
#define TF_STITCH_CUSTOM_OPS_CUDA_GRID_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "grid_table.h"
#include "plan.h"
#include "program.h"

namespace tf_stitch {

// Bytes in device memory, freed once the device has finished.
class DeviceBytes {
 public:
  // Copies `bytes` to the current context, which is `context`; null with `error` where that fails.
  static std::unique_ptr<DeviceBytes> Upload(const cuda::Driver& driver, cuda::Context context,
                                             const std::vector<char>& bytes, std::string* error);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }

 private:
  DeviceBytes(const cuda::Driver& driver, cuda::Context context) : driver_(driver), context_(context) {}

  const cuda::Driver& driver_;
  const cuda::Context context_;
  void* address_ = nullptr;
};

// The barrier between phases counts thread blocks, so each run that may overlap with others needs counters of its own:
// the plan's graphs have slots here, which every run leaves at zero; other runs bring counters that they have zeroed.
class CudaGrid {
 public:
  // Null where the steps had better be launched one by one; `error` says why if that is a failure.  The context must
  // be current.  `kernel` may have `max_shared_bytes` of dynamic shared memory.
  static std::unique_ptr<CudaGrid> Make(const Program& program, const Plan& plan, const Grid& grid,
                                        const cuda::Driver& driver, cuda::Context context, cuda::Function kernel,
                                        int64_t max_shared_bytes, size_t slots, std::string* error);

  const Grid& grid() const { return grid_; }
  cuda::Function kernel() const { return kernel_; }
  unsigned blocks() const { return blocks_; }
  unsigned threads() const { return threads_; }
  unsigned shared_bytes() const { return static_cast<unsigned>(kept_at_ < 0 ? table_.shared_bytes : kept_at_ + kept_); }
  size_t phases() const { return table_.first_record.size(); }
  size_t problems() const { return table_.records.size() - 2; }

  // A cooperative launch's thread blocks may wait for each other.
  bool cooperative() const { return !grid_.is_pack(); }

  // Bytes of the counters that a run needs.
  size_t counter_bytes() const { return cooperative() ? 4 * (1 + phases()) : 0; }
  uint64_t counters_of_slot(size_t slot) const;

  // The parameter (struct ts_grid of ts_grid.h) has this many words of 64 bits.
  size_t words() const { return 7 + grid_.bases.size(); }
  void FillWords(void* const* memory, uint64_t counters, uint64_t* words) const;

 private:
  CudaGrid(const Program& program, const Plan& plan, const Grid& grid) : program_(program), plan_(plan), grid_(grid) {}

  std::string Prepare(const cuda::Driver& driver, int64_t max_shared_bytes, bool* pays);
  std::string PrepareCooperative(const cuda::Driver& driver, int64_t max_shared_bytes, bool* pays);
  std::string PreparePack(const cuda::Driver& driver, bool* pays);
  std::string KeepOperands(const cuda::Driver& driver, int64_t processors, int64_t max_shared_bytes);

  const Program& program_;
  const Plan& plan_;
  const Grid& grid_;
  cuda::Function kernel_ = nullptr;
  unsigned blocks_ = 0, threads_ = 0;
  GridTable table_;                      // its contents are in device_
  int64_t kept_at_ = -1, kept_ = 0;      // operands kept in shared memory: where they begin, bytes; nothing if negative
  int64_t arena_buffer_ = -1;            // any buffer of the steps that lies in the arena
  std::unique_ptr<DeviceBytes> device_;  // records, words, counters of all slots
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_CUDA_GRID_H_
