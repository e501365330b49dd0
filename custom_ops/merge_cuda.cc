#include "merge_cuda.h"

#include <algorithm>
#include <utility>

#include "autotune.h"
#include "coalesce_cuda.h"

namespace tf_stitch {
namespace {

constexpr int64_t kLeastBytes = int64_t{1} << 20;
constexpr int64_t kLeastTable = int64_t{16} << 10;
constexpr int64_t kMostPieces = 65535;        // of a launch: blockIdx.y
constexpr int64_t kBytesOfBlock = 16 * 1024;  // what a thread block copies
constexpr unsigned kThreads = 256;

// Sizes that are taken are powers of two, so that a block serves many runs.
int64_t SizeOf(int64_t bytes, int64_t least) {
  int64_t size = least;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

MergeBlock::MergeBlock(const cuda::Driver& driver, int64_t bytes, int64_t table_bytes)
    : driver_(driver), bytes_(bytes), table_bytes_(table_bytes) {
  if (driver.MemAlloc(&memory_, static_cast<size_t>(bytes))) memory_ = nullptr;
  if (!memory_ || driver.MemAllocHost(&table_, static_cast<size_t>(table_bytes))) table_ = nullptr;
}

MergeBlock::~MergeBlock() {
  if (memory_) driver_.MemFree(memory_);
  if (table_) driver_.MemFreeHost(table_);
}

// The lock is held.
MergeBlock* MergeMemory::TakeFree(const void* plan, int64_t bytes, int64_t table_bytes) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if ((*it)->bytes() != bytes || (*it)->table_bytes() < table_bytes) continue;
    best = it;
    if ((*it)->last == plan) break;
  }
  if (best == free_.end()) return nullptr;
  MergeBlock* found = best->release();
  free_.erase(best);
  return found;
}

std::shared_ptr<MergeBlock> MergeMemory::Take(const void* plan, int64_t bytes, size_t pieces) {
  if (bytes > most_) return nullptr;
  int64_t size = SizeOf(bytes, kLeastBytes);
  int64_t table = SizeOf(static_cast<int64_t>(pieces * sizeof(Piece)), kLeastTable);
  auto give = [this](MergeBlock* block) { Give(block); };
  std::lock_guard<std::mutex> lock(mu_);
  if (MergeBlock* found = TakeFree(plan, size, table)) {
    found->last = plan;
    return {found, give};
  }
  while (taken_ + size > most_ && !free_.empty()) {
    taken_ -= free_.front()->bytes();
    free_.erase(free_.begin());
  }
  if (taken_ + size > most_) return nullptr;
  auto block = std::make_unique<MergeBlock>(driver_, size, table);
  if (!block->good()) return nullptr;
  taken_ += size;
  block->last = plan;
  return {block.release(), give};
}

void MergeMemory::Give(MergeBlock* block) {
  std::lock_guard<std::mutex> lock(mu_);
  free_.emplace_back(block);
}

void MergeMemory::Clear() {
  std::lock_guard<std::mutex> lock(mu_);
  for (const auto& block : free_) taken_ -= block->bytes();
  free_.clear();
}

std::string EnqueuePieces(const cuda::Driver& driver, cuda::Function copy_pieces, const std::vector<Piece>& pieces,
                          Piece* table, cuda::Stream stream) {
  if (pieces.empty()) return "";
  std::copy(pieces.begin(), pieces.end(), table);
  int64_t most = 0;
  for (const Piece& p : pieces) most = std::max(most, p.rows * p.bytes);
  auto blocks = static_cast<unsigned>(std::clamp<int64_t>((most + kBytesOfBlock - 1) / kBytesOfBlock, 1, 64));
  void* parameters[] = {&table};
  cuda::Result result = driver.LaunchKernel(copy_pieces, blocks, static_cast<unsigned>(pieces.size()), 1, kThreads, 1,
                                            1, 0, stream, parameters, nullptr);
  return result ? cuda::Failed(driver, result, "copying joined requests") : "";
}

// --- the device ------------------------------------------------------------------------------------------------

std::unique_ptr<Device::Ticket> CudaDevice::IssueJoined(size_t lane, const std::vector<Request*>& requests,
                                                        Joining* how) {
  cuda::ScopedContext scope(driver_, context_);
  cuda::NoTuning no_tuning(true);  // others wait for this lane
  auto& first = static_cast<CudaRequest&>(*requests.front());
  std::vector<JoinedRun::Member> members;
  int64_t rows = 0;
  *how = Joining::kNever;
  if (!JoinedRun::MembersOf<CudaRequest>(requests, &members, &rows)) return nullptr;
  cuda::Function copy_pieces = first.ready->code()->copy_pieces();
  std::shared_ptr<const Plan> plan = first.joined_plan(JoinedSignature(*first.program, first.plan->signature, rows));
  JoinedRun run;
  if (!copy_pieces || !plan || !run.Lay(*first.program, *plan, members).empty()) return nullptr;
  size_t pieces = run.gathers().size() + run.scatters().size();
  if (static_cast<int64_t>(pieces) > kMostPieces) return nullptr;
  auto* ready = static_cast<CudaPlan*>(plan->extra.get());
  std::shared_ptr<MergeBlock> block = merge_memory_.Take(plan.get(), run.bytes() + ready->workspace_bytes(), pieces);
  *how = block ? Joining::kDone : Joining::kNotNow;
  if (!block) return nullptr;
  run.Place(block->memory());
  if (ready->Misaligned(run.memory())) return *how = Joining::kNever, nullptr;
  void* workspace = block->memory() + run.bytes();
  cuda::Stream stream = lanes_[lane].streams->main();
  auto enqueue = [&](UnderWay*) {
    std::string error = EnqueuePieces(driver_, copy_pieces, run.gathers(), block->table(), stream), note;
    if (error.empty()) error = ready->Run(run.memory(), workspace, stream, first.graphs, nullptr, &note);
    if (!error.empty()) return error;
    return EnqueuePieces(driver_, copy_pieces, run.scatters(), block->table() + run.gathers().size(), stream);
  };
  std::string error;  // the ticket's
  return Between(lane, requests, {plan, block}, enqueue, &error);
}

}  // namespace tf_stitch
