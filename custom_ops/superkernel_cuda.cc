#include "superkernel_cuda.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cublas_batched.h"

namespace tf_stitch::cuda {
namespace {

constexpr int64_t kMostProblems = 65535;  // of a launch: blockIdx.y

}  // namespace

// --- events and streams ---------------------------------------------------------------------------------

EventPool::~EventPool() {
  ScopedContext scope(driver_, context_);
  if (!scope.ok()) return;
  for (Event e : free_) driver_.EventDestroy(e);
}

std::shared_ptr<EventTag> EventPool::Record(Stream stream) {
  Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (!event && driver_.EventCreate(&event, 0)) return nullptr;
  auto give_back = [pool = shared_from_this()](Event e) {
    std::lock_guard<std::mutex> lock(pool->mu_);
    pool->free_.push_back(e);
  };
  std::shared_ptr<EventTag> held(event, give_back);
  return driver_.EventRecord(event, stream) ? nullptr : held;
}

std::unique_ptr<LaneStreams> LaneStreams::Make(const Driver& driver, int priority, std::shared_ptr<EventPool> events,
                                               std::string* error) {
  std::unique_ptr<LaneStreams> lane(new LaneStreams(driver, std::move(events)));
  lane->workspaces_.resize(kSides, nullptr);
  for (size_t i = 0; i <= kSides; ++i) {
    Stream stream = nullptr;
    Result result = driver.StreamCreateWithPriority(&stream, kStreamNonBlocking, priority);
    if (result) return *error = Failed(driver, result, "making a stream"), nullptr;
    lane->streams_.push_back(stream);
  }
  return lane;
}

std::string LaneStreams::AddWorkspaces(size_t count) {
  for (size_t i = 0; i < std::min(count, kSides); ++i) {
    Result result = workspaces_[i] ? kSuccess : driver_.MemAlloc(&workspaces_[i], kWorkspaceBytes);
    if (result) return Failed(driver_, result, "allocating a workspace");
  }
  return "";
}

LaneStreams::~LaneStreams() {
  for (Stream s : streams_) {
    driver_.StreamSynchronize(s);
    driver_.StreamDestroy(s);
  }
  for (void* w : workspaces_) {
    if (w) driver_.MemFree(w);
  }
}

std::string LaneStreams::CopyAhead(const std::function<std::string(Stream)>& copy) {
  std::string error = copy(streams_.back());
  if (!error.empty()) return error;
  std::shared_ptr<EventTag> copied = events_->Record(streams_.back());
  bool good = copied && !driver_.StreamWaitEvent(streams_[0], copied.get(), 0);
  return good ? "" : "the streams of a superkernel cannot be joined";
}

std::string LaneStreams::SideBySide(const std::vector<Work>& work) {
  if (work.size() == 1) return work[0](streams_[0], workspaces_[0]);
  size_t used = std::min(work.size(), kSides);
  std::shared_ptr<EventTag> fork = events_->Record(streams_[0]);
  bool good = fork != nullptr;
  for (size_t i = 1; i < used && good; ++i) good = !driver_.StreamWaitEvent(streams_[i], fork.get(), 0);
  if (!good) return "the streams of a superkernel cannot be forked";
  std::string error;
  for (size_t i = 0; i < work.size() && error.empty(); ++i) error = work[i](streams_[i % used], workspaces_[i % used]);
  for (size_t i = 1; i < used; ++i) {  // joined after an error too: what runs must not outlive the superkernel
    std::shared_ptr<EventTag> join = events_->Record(streams_[i]);
    if (!join || driver_.StreamWaitEvent(streams_[0], join.get(), 0)) good = false;
  }
  return error.empty() && !good ? "the streams of a superkernel cannot be joined" : error;
}

// --- tables ------------------------------------------------------------------------------------------------

TableMemory::TableMemory(const Driver& driver, size_t bytes) : driver_(driver), bytes_(bytes) {
  if (driver.MemAllocHost(&host_, bytes)) host_ = nullptr;
  if (!host_ || driver.MemAlloc(&device_, bytes)) device_ = nullptr;
  if (!device_) bytes_ = 0;
}

TableMemory::~TableMemory() {
  if (device_) driver_.MemFree(device_);
  if (host_) driver_.MemFreeHost(host_);
}

std::string TableMemory::Copy(const std::vector<uint64_t>& words, Stream stream) {
  size_t bytes = words.size() * sizeof(uint64_t);
  if (bytes > bytes_) return "there is no memory for a superkernel's table";
  if (!bytes) return "";
  memcpy(host_, words.data(), bytes);
  Result result = driver_.MemcpyHtoDAsync(device_, host_, bytes, stream);
  return result ? Failed(driver_, result, "copying a superkernel's table") : "";
}

// --- launches ------------------------------------------------------------------------------------------------

size_t LaunchList::AppendTable(const void* words, size_t bytes) {
  size_t at = words_.size();
  words_.resize(at + (bytes + 15) / 16 * 2);  // each table begins at a multiple of 16 bytes
  memcpy(words_.data() + at, words, bytes);
  return at * sizeof(uint64_t);
}

void LaunchList::AddKernel(Function many, int64_t blocks, unsigned threads, int64_t shared_bytes,
                           const std::vector<uint64_t>& problems, size_t count, std::string what) {
  size_t at = AppendTable(problems.data(), problems.size() * sizeof(uint64_t));
  launches_.push_back([this, many, blocks, threads, shared_bytes, count, at,
                       what = std::move(what)](char* table) -> std::string {
    if (static_cast<int64_t>(count) > kMostProblems) return "a superkernel has too many problems";
    void* address = table + at;
    void* parameters[] = {&address};
    Result result =
        driver_.LaunchKernel(many, static_cast<unsigned>(blocks), static_cast<unsigned>(count), 1, threads, 1, 1,
                             static_cast<unsigned>(shared_bytes), streams_.main(), parameters, nullptr);
    return result ? Failed(driver_, result, "launching " + what + " for " + std::to_string(count) + " requests") : "";
  });
}

std::string LaunchList::AddProducts(const std::vector<Product>& products, const std::string& what) {
  struct Call {
    std::shared_ptr<const PointerBatch> batch;
    size_t lhs, rhs, out;  // where its arrays begin
  };
  auto calls = std::make_shared<std::vector<Call>>();
  std::vector<bool> taken(products.size(), false);
  for (size_t first = 0; first < products.size(); ++first) {
    if (taken[first]) continue;
    const Product& p = products[first];
    std::vector<const void*> lhs, rhs;
    std::vector<void*> out;
    for (size_t i = first; i < products.size(); ++i) {
      if (taken[i] || !products[i].SameShape(p)) continue;
      taken[i] = true;
      lhs.push_back(products[i].lhs);
      rhs.push_back(products[i].rhs);
      out.push_back(products[i].out);
    }
    MatmulShape shape{};
    shape.dtype = p.dtype;
    shape.batch = static_cast<int64_t>(lhs.size());
    shape.m = p.m;
    shape.n = p.n;
    shape.k = p.k;
    shape.trans_lhs = p.trans_lhs;
    shape.trans_rhs = p.trans_rhs;
    shape.tf32 = p.tf32;
    std::string error;
    Call call{PointerBatch::Get(shape, &error), 0, 0, 0};
    if (!call.batch) return error;
    if (call.batch->workspace_bytes() > LaneStreams::kWorkspaceBytes) return "a product needs too large a workspace";
    size_t bytes = lhs.size() * sizeof(void*);
    call.lhs = AppendTable(lhs.data(), bytes);
    call.rhs = AppendTable(rhs.data(), bytes);
    call.out = AppendTable(out.data(), bytes);
    calls->push_back(std::move(call));
  }
  std::string error = streams_.AddWorkspaces(calls->size());
  if (!error.empty()) return error;
  launches_.push_back([this, calls, what](char* table) {
    std::vector<LaneStreams::Work> work;
    for (const Call& c : *calls) {
      work.push_back([&c, table](Stream stream, void* workspace) {
        auto array = [table](size_t at) { return reinterpret_cast<void**>(table + at); };
        return c.batch->Run(array(c.lhs), array(c.rhs), array(c.out), workspace, stream);
      });
    }
    std::string error = streams_.SideBySide(work);
    return error.empty() ? error : error + " (" + what + ")";
  });
  return "";
}

void LaunchList::Add(std::vector<LaneStreams::Work> work) {
  launches_.push_back([this, work = std::move(work)](char*) { return streams_.SideBySide(work); });
}

std::string LaunchList::Enqueue(TableMemory* table) {
  std::string error;
  if (!words_.empty()) error = streams_.CopyAhead([&](Stream stream) { return table->Copy(words_, stream); });
  for (size_t i = 0; i < launches_.size() && error.empty(); ++i) error = launches_[i](table->device());
  return error;
}

}  // namespace tf_stitch::cuda
