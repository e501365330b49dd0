#include "cuda_grid.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda_capture.h"

namespace tf_stitch {
namespace {

constexpr size_t kLine = 128;    // counters of different slots share no cache line
constexpr int64_t kRounds = 16;  // blocks that a thread block may run per phase, on average
constexpr int64_t kFull = 16;    // blocks per multiprocessor of a kernel that fills the device, twice over

size_t Aligned(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

// --- device memory -----------------------------------------------------------------------------------

std::unique_ptr<DeviceBytes> DeviceBytes::Upload(const cuda::Driver& driver, cuda::Context context,
                                                 const std::vector<char>& bytes, std::string* error) {
  std::unique_ptr<DeviceBytes> out(new DeviceBytes(driver, context));
  int mode = cuda::kCaptureRelaxed;  // another thread may be capturing
  driver.ThreadExchangeStreamCaptureMode(&mode);
  cuda::Stream stream = nullptr;
  cuda::Result result = driver.MemAlloc(&out->address_, bytes.size());
  if (result) out->address_ = nullptr;
  if (!result) result = driver.StreamCreate(&stream, cuda::kStreamNonBlocking);
  if (!result) result = driver.MemcpyHtoDAsync(out->address_, bytes.data(), bytes.size(), stream);
  if (!result) result = driver.StreamSynchronize(stream);
  if (stream) driver.StreamDestroy(stream);
  driver.ThreadExchangeStreamCaptureMode(&mode);
  if (!result) return out;
  *error = cuda::Failed(driver, result, "copying a table of " + std::to_string(bytes.size()) + " bytes");
  return nullptr;
}

DeviceBytes::~DeviceBytes() {
  if (!address_) return;
  cuda::ScopedContext scope(driver_, context_);
  if (!scope.ok()) return;
  int mode = cuda::kCaptureRelaxed;
  driver_.ThreadExchangeStreamCaptureMode(&mode);
  if (cuda::WaitForContext(driver_)) driver_.MemFree(address_);  // kernels that read it may still run
  driver_.ThreadExchangeStreamCaptureMode(&mode);
}

// --- grids -------------------------------------------------------------------------------------------

std::unique_ptr<CudaGrid> CudaGrid::Make(const Program& program, const Plan& plan, const Grid& grid,
                                         const cuda::Driver& driver, cuda::Context context, cuda::Function kernel,
                                         int64_t max_shared_bytes, size_t slots, std::string* error) {
  std::unique_ptr<CudaGrid> out(new CudaGrid(program, plan, grid));
  out->kernel_ = kernel;
  bool pays = false;
  *error = out->Prepare(driver, max_shared_bytes, &pays);
  if (!error->empty() || !pays) return nullptr;
  const GridTable& table = out->table_;
  size_t records = table.records.size() * sizeof(GridRecord), words = table.words.size() * sizeof(int64_t);
  std::vector<char> bytes(Aligned(records + words) + slots * Aligned(out->counter_bytes()));
  memcpy(bytes.data(), table.records.data(), records);
  memcpy(bytes.data() + records, table.words.data(), words);
  out->device_ = DeviceBytes::Upload(driver, context, bytes, error);
  return out->device_ ? std::move(out) : nullptr;
}

// Finds how many thread blocks the launch gets; "" or what failed.
std::string CudaGrid::Prepare(const cuda::Driver& driver, int64_t max_shared_bytes, bool* pays) {
  *pays = false;
  threads_ = program_.steps[grid_.first].threads;
  for (size_t i = grid_.first; i < grid_.end; ++i) {
    if (program_.steps[i].threads != threads_) return "";
    for (uint32_t id : program_.steps[i].buffers) {
      if (program_.buffers[id].backing == Backing::kArena) arena_buffer_ = id;
    }
  }
  if (!MakeGridTable(program_, plan_, grid_, &table_) || table_.shared_bytes > max_shared_bytes) return "";
  return cooperative() ? PrepareCooperative(driver, max_shared_bytes, pays) : PreparePack(driver, pays);
}

// Where the sizes at hand make members that fill the device, each is as fast alone, with its own registers.
std::string CudaGrid::PreparePack(const cuda::Driver& driver, bool* pays) {
  cuda::Device device;
  int processors = 0;
  cuda::Result result = driver.CtxGetDevice(&device);
  if (!result) result = driver.DeviceGetAttribute(&processors, cuda::kMultiprocessors, device);
  if (result) return cuda::Failed(driver, result, "asking how many multiprocessors there are");
  auto count = static_cast<int64_t>(problems());
  *pays = count > 1 && table_.blocks <= kFull * processors * count;
  blocks_ = static_cast<unsigned>(table_.blocks);
  return "";
}

std::string CudaGrid::PrepareCooperative(const cuda::Driver& driver, int64_t max_shared_bytes, bool* pays) {
  if (phases() < 2) return "";
  cuda::Device device;
  int processors = 0, cooperative = 0, resident = 0;
  cuda::Result result = driver.CtxGetDevice(&device);
  if (!result) result = driver.DeviceGetAttribute(&processors, cuda::kMultiprocessors, device);
  if (!result) result = driver.DeviceGetAttribute(&cooperative, cuda::kCooperativeLaunch, device);
  if (!result) {
    result = driver.OccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel_, static_cast<int>(threads_),
                                                              static_cast<size_t>(table_.shared_bytes));
  }
  if (result) return cuda::Failed(driver, result, "asking how many blocks of '" + grid_.kernel + "' fit");
  int64_t room = int64_t{processors} * resident;
  *pays = cooperative && room && table_.blocks <= kRounds * room * static_cast<int64_t>(phases());
  blocks_ = static_cast<unsigned>(std::min(room, table_.most_blocks));
  return *pays ? KeepOperands(driver, processors, max_shared_bytes) : "";
}

// Keeps operands on the chip if all blocks of the launch stay resident.
std::string CudaGrid::KeepOperands(const cuda::Driver& driver, int64_t processors, int64_t max_shared_bytes) {
  GridTable plain = table_;
  kept_ = MarkKept(grid_, blocks_, &table_);
  int64_t at = (table_.shared_bytes + 15) / 16 * 16;
  int resident = 0;
  cuda::Result result = cuda::kSuccess;
  if (kept_ && at + kept_ <= max_shared_bytes) {
    result = driver.OccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel_, static_cast<int>(threads_),
                                                              static_cast<size_t>(at + kept_));
  }
  if (!result && processors * resident >= int64_t{blocks_}) {
    kept_at_ = at;
  } else {
    table_ = std::move(plain);
  }
  return result ? cuda::Failed(driver, result, "asking how many blocks of '" + grid_.kernel + "' fit") : "";
}

uint64_t CudaGrid::counters_of_slot(size_t slot) const {
  size_t table = table_.records.size() * sizeof(GridRecord) + table_.words.size() * sizeof(int64_t);
  return device_->address() + Aligned(table) + slot * Aligned(counter_bytes());
}

void CudaGrid::FillWords(void* const* memory, uint64_t counters, uint64_t* words) const {
  auto address = [&](uint32_t id) { return reinterpret_cast<uint64_t>(memory[id]); };
  *words++ = device_->address();
  *words++ = device_->address() + table_.records.size() * sizeof(GridRecord);
  *words++ = counter_bytes() ? counters : 0;
  *words++ = 0;
  *words++ = cooperative() ? phases() : problems();
  *words++ = static_cast<uint64_t>(kept_at_);
  *words++ = arena_buffer_ < 0 ? 0 : address(static_cast<uint32_t>(arena_buffer_)) - plan_.arena_offset[arena_buffer_];
  for (uint32_t id : grid_.bases) *words++ = address(id);
}

}  // namespace tf_stitch
