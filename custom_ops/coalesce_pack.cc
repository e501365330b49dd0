#include "coalesce_pack.h"

#include <algorithm>
#include <utility>

#include "autotune.h"

namespace tf_stitch {
namespace {

constexpr size_t kPacksKept = 64;  // of a lane: a graph's node takes about a kilobyte

// Products that many requests may share a call for: nothing is added to them, and there is something to sum over.
bool IsPlainProduct(const Step& s, const StepPlan& p) {
  return s.kind == Step::Kind::kLibrary && s.call == LibraryCall::kMatmul && !s.matmul.bias && p.dims[3] > 0;
}

uint64_t Word(const void* address) { return reinterpret_cast<uint64_t>(address); }

}  // namespace

PackedLaunch::PackedLaunch(const Program& program, const Plan& plan, const CudaPlan& ready, size_t launch) {
  size_t step = ready.step(launch);
  const Step& s = program.steps[step];
  const StepPlan& p = plan.steps[step];
  if (ready.is_grid(launch)) return;
  if (s.kind == Step::Kind::kKernel) {
    function = ready.code()->many(step);
    many = function != nullptr;
    blocks = p.blocks;
    shared_bytes = p.shared_bytes;
    threads = s.threads;
    buffers = s.buffers;
    ready.AppendWords(launch, std::vector<void*>(program.buffers.size()).data(), &rest);
    rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(buffers.size()));
    what = "kernel '" + s.kernel + "' of '" + s.origin + "'";
  } else if (IsPlainProduct(s, p)) {
    many = true;
    int dtype = program.buffers[s.buffers[0]].dtype;
    int64_t m = p.dims[1], n = p.dims[2], k = p.dims[3], size = DTypeSize(dtype);
    const MatmulFlags& f = s.matmul;
    batch = p.dims[0];
    product = {dtype, m, n, k, f.trans_lhs, f.trans_rhs, ready.tf32()};
    buffers = {s.buffers[0], s.buffers[1], s.buffers.back()};
    stride = {f.broadcast_lhs ? 0 : m * k * size, f.broadcast_rhs ? 0 : k * n * size, m * n * size};
    what = "the matrix products of '" + s.origin + "'";
  }
}

// --- packs -------------------------------------------------------------------------------------------------

std::unique_ptr<Pack> Pack::Make(const std::vector<PackedLaunch>& launches, size_t begin, size_t end, size_t count,
                                 const std::shared_ptr<CudaCode>& code, cuda::LaneStreams* lane, std::string* error) {
  std::unique_ptr<Pack> pack(new Pack(code->driver(), lane, begin, count));
  pack->code_ = code;
  for (size_t i = begin; i < end && error->empty(); ++i) *error = pack->Add(launches[i]);
  if (error->empty() && pack->table_bytes() > cuda::LaneStreams::kTableBytes) *error = "their table would be too large";
  return error->empty() ? std::move(pack) : nullptr;
}

std::string Pack::Add(const PackedLaunch& p) {
  if (p.function) {
    at_.push_back(list_.AddKernel(p.function, p.blocks, p.threads, p.shared_bytes, p.words(), count_, p.what));
    return "";
  }
  return list_.AddProducts({p.product}, {count_ * static_cast<size_t>(p.batch)}, p.what, &at_);
}

void Pack::Fill(const std::vector<PackMember>& members, uint64_t* table) const {
  for (size_t i = 0; i < at_.size(); ++i) {
    for (size_t j = 0; j < count_; ++j) {
      const PackMember& m = members[j];
      const PackedLaunch& p = (*m.launches)[begin_ + i];
      if (p.function) {
        uint64_t* to = table + at_[i] + j * p.words();
        for (uint32_t id : p.buffers) *to++ = Word(m.memory[id]);
        std::copy(p.rest.begin(), p.rest.end(), to);
      } else {
        auto batch = static_cast<size_t>(p.batch);
        size_t array = cuda::LaunchList::ArrayWords(count_ * batch);
        for (size_t k = 0; k < p.stride.size(); ++k) {
          const char* matrix = static_cast<const char*>(m.memory[p.buffers[k]]);
          uint64_t* to = table + at_[i] + k * array + j * batch;
          for (size_t b = 0; b < batch; ++b, matrix += p.stride[k]) to[b] = Word(matrix);
        }
      }
    }
  }
}

// --- kept packs ----------------------------------------------------------------------------------------------

std::shared_ptr<const Pack> PackCache::Find(uint64_t cluster, size_t most) {
  std::lock_guard<std::mutex> lock(mu_);
  entries_.remove_if([](const Entry& e) { return e.pack && !e.pack->is_usable(); });
  auto best = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->cluster != cluster || it->count > most || !it->pack) continue;
    if (best == entries_.end() || it->count > best->count) best = it;
  }
  if (best == entries_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, best);
  return entries_.front().pack;
}

bool PackCache::Claim(uint64_t cluster, size_t count) {
  std::lock_guard<std::mutex> lock(mu_);
  auto is_it = [&](const Entry& e) { return e.cluster == cluster && e.count == count; };
  if (std::any_of(entries_.begin(), entries_.end(), is_it)) return false;
  entries_.push_front({cluster, count, false, nullptr});
  auto oldest = std::find_if(entries_.rbegin(), entries_.rend(), [](const Entry& e) { return e.is_made; });
  if (entries_.size() > kPacksKept && oldest != entries_.rend()) entries_.erase(std::next(oldest).base());
  return true;
}

void PackCache::Keep(uint64_t cluster, size_t count, std::shared_ptr<const Pack> pack) {
  std::lock_guard<std::mutex> lock(mu_);
  for (Entry& e : entries_) {
    if (e.cluster != cluster || e.count != count) continue;
    e.is_made = true;
    e.pack = std::move(pack);
    return;
  }
}

void PackCache::Clear() {
  std::lock_guard<std::mutex> lock(mu_);
  entries_.clear();
}

// --- making them ---------------------------------------------------------------------------------------------

PackMaker::PackMaker(const cuda::Driver& driver, cuda::Context context)
    : driver_(driver), context_(context), thread_([this] { Loop(); }) {}

PackMaker::~PackMaker() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    over_ = true;
    orders_.clear();
  }
  changed_.notify_all();
  thread_.join();
}

void PackMaker::Add(Order order) {
  std::lock_guard<std::mutex> lock(mu_);
  orders_.push_back(std::move(order));
  changed_.notify_all();
}

void PackMaker::Wait() {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait(lock, [this] { return orders_.empty() && !is_busy_; });
}

void PackMaker::Loop() {
  cuda::ScopedContext scope(driver_, context_);
  cuda::NoTuning no_tuning(true);  // the device has requests to run
  cuda::OwnStream stream(driver_);
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    changed_.wait(lock, [this] { return over_ || !orders_.empty(); });
    if (over_) return;
    Order order = std::move(orders_.front());
    orders_.pop_front();
    is_busy_ = true;
    lock.unlock();
    order(stream.get());
    order = nullptr;  // what it held may be given back now
    lock.lock();
    is_busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace tf_stitch
