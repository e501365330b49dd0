#include "superkernel_cuda.h"

#include <algorithm>
#include <utility>

#include "cublas_batched.h"
#include "cuda_capture.h"
#include "cudnn.h"

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
  for (size_t i = 0; i < kSides; ++i) {
    Stream stream = nullptr;
    Result result = driver.StreamCreateWithPriority(&stream, kStreamNonBlocking, priority);
    if (result) return *error = Failed(driver, result, "making a stream"), nullptr;
    lane->streams_.push_back(stream);
  }
  Result result = driver.MemAlloc(&lane->table_, kTableBytes);
  if (result) return *error = Failed(driver, result, "allocating the table of a lane"), nullptr;
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
    ForgetStream(s);
    driver_.StreamDestroy(s);
  }
  for (void* w : workspaces_) {
    if (w) driver_.MemFree(w);
  }
  if (table_) driver_.MemFree(table_);
}

std::string LaneStreams::BringTable(const HostTable& from, size_t bytes, Stream stream) {
  if (!bytes) return "";
  if (bytes > kTableBytes) return "a superkernel's table is too large";
  Result result = writer_.Takes(bytes) ? writer_.Enqueue(table_, from.words(), bytes, stream)
                                       : driver_.MemcpyHtoDAsync(table_, from.words(), bytes, stream);
  return result ? Failed(driver_, result, "bringing a superkernel's table to the device") : "";
}

std::string LaneStreams::SideBySide(const std::vector<Work>& work, Stream stream) {
  if (work.size() == 1) return work[0](stream, workspaces_[0]);
  size_t used = std::min(work.size(), kSides);
  std::shared_ptr<EventTag> fork = events_->Record(stream);
  bool good = fork != nullptr;
  for (size_t i = 1; i < used && good; ++i) good = !driver_.StreamWaitEvent(streams_[i], fork.get(), 0);
  if (!good) return "the streams of a superkernel cannot be forked";
  std::string error;
  for (size_t i = 0; i < work.size() && error.empty(); ++i) {
    error = work[i](i % used ? streams_[i % used] : stream, workspaces_[i % used]);
  }
  for (size_t i = 1; i < used; ++i) {  // joined after an error too: what runs must not outlive the superkernel
    std::shared_ptr<EventTag> join = events_->Record(streams_[i]);
    if (!join || driver_.StreamWaitEvent(stream, join.get(), 0)) good = false;
  }
  return error.empty() && !good ? "the streams of a superkernel cannot be joined" : error;
}

// --- tables and launches ---------------------------------------------------------------------------------

HostTable::HostTable(const Driver& driver, size_t bytes)
    : driver_(driver), bytes_(std::max(bytes, TableWriter::kMostBytes)) {
  if (driver.MemAllocHost(&words_, bytes_)) words_ = nullptr;
  if (!words_) bytes_ = 0;
}

HostTable::~HostTable() {
  if (words_) driver_.MemFreeHost(words_);
}

LaunchList::~LaunchList() {
  if (graph_) driver_.GraphExecDestroy(graph_);  // one that still runs is freed when it ends
}

size_t LaunchList::Reserve(size_t words) {
  size_t at = words_;
  words_ += ArrayWords(words);
  return at;
}

size_t LaunchList::AddKernel(Function many, int64_t blocks, unsigned threads, int64_t shared_bytes, size_t words,
                             size_t count, std::string what) {
  size_t at = Reserve(words * count);
  launches_.push_back([this, many, blocks, threads, shared_bytes, count, at,
                       what = std::move(what)](Stream stream) -> std::string {
    if (static_cast<int64_t>(count) > kMostProblems) return "a superkernel has too many problems";
    void* address = streams_.table() + at * sizeof(uint64_t);
    void* parameters[] = {&address};
    Result result = driver_.LaunchKernel(many, static_cast<unsigned>(blocks), static_cast<unsigned>(count), 1, threads,
                                         1, 1, static_cast<unsigned>(shared_bytes), stream, parameters, nullptr);
    return result ? Failed(driver_, result, "launching " + what + " for " + std::to_string(count) + " requests") : "";
  });
  return at;
}

std::string LaunchList::AddProducts(const std::vector<ProductShape>& shapes, const std::vector<size_t>& counts,
                                    const std::string& what, std::vector<size_t>* at) {
  std::string error = streams_.AddWorkspaces(shapes.size());
  std::vector<LaneStreams::Work> work;
  for (size_t i = 0; i < shapes.size() && error.empty(); ++i) {
    const ProductShape& p = shapes[i];
    MatmulShape shape{};
    shape.dtype = p.dtype;
    shape.batch = static_cast<int64_t>(counts[i]);
    shape.m = p.m;
    shape.n = p.n;
    shape.k = p.k;
    shape.trans_lhs = p.trans_lhs;
    shape.trans_rhs = p.trans_rhs;
    shape.tf32 = p.tf32;
    std::shared_ptr<const PointerBatch> batch = PointerBatch::Get(shape, &error);
    if (!batch) return error;
    if (batch->workspace_bytes() > LaneStreams::kWorkspaceBytes) return "a product needs too large a workspace";
    size_t array = ArrayWords(counts[i]), first = Reserve(3 * array);
    at->push_back(first);
    work.push_back([this, batch = std::move(batch), array, first](Stream stream, void* workspace) {
      auto** lhs = reinterpret_cast<void**>(streams_.table()) + first;
      return batch->Run(lhs, lhs + array, lhs + 2 * array, workspace, stream);
    });
  }
  if (!error.empty()) return error;
  launches_.push_back([this, work = std::move(work), what](Stream stream) {
    std::string error = streams_.SideBySide(work, stream);
    return error.empty() ? error : error + " (" + what + ")";
  });
  return "";
}

// A table that the writer takes is a parameter of the graph's first node: the host has one command to give.
std::string LaunchList::Record(Stream stream) {
  const TableWriter& writer = streams_.writer();
  bool writes = words_ && writer.Takes(table_bytes());
  std::vector<char> later(TableWriter::kMostBytes);
  auto all = [&] {
    Result result = writes ? writer.Enqueue(streams_.table(), later.data(), table_bytes(), stream) : kSuccess;
    return result ? Failed(driver_, result, "recording a table") : EnqueueLaunches(stream);
  };
  Graph graph = nullptr;
  std::string error = Capture(driver_, stream, all, &graph);
  if (!error.empty()) return error;
  size_t one = 1;
  Result result = writes ? driver_.GraphGetRootNodes(graph, &writes_table_, &one) : kSuccess;
  if (!result) result = driver_.GraphInstantiate(&graph_, graph, 0);
  driver_.GraphDestroy(graph);
  if (result) {
    graph_ = nullptr;
  } else if (writes) {  // what cannot be changed is of no use
    result = writer.Change(graph_, writes_table_, streams_.table(), later.data(), table_bytes());
  }
  if (!result) return "";
  if (graph_) driver_.GraphExecDestroy(graph_);
  graph_ = nullptr;
  return Failed(driver_, result, "instantiating a graph");
}

std::string LaunchList::Enqueue(const HostTable& table, Stream stream) const {
  if (!graph_ || !writes_table_) {
    std::string error = streams_.BringTable(table, table_bytes(), stream);
    if (!error.empty()) return error;
  }
  if (!graph_) return EnqueueLaunches(stream);
  Result result = kSuccess;
  if (writes_table_) {
    result = streams_.writer().Change(graph_, writes_table_, streams_.table(), table.words(), table_bytes());
  }
  if (!result) result = driver_.GraphLaunch(graph_, stream);
  return result ? Failed(driver_, result, "launching the graph of a superkernel") : "";
}

std::string LaunchList::EnqueueLaunches(Stream stream) const {
  std::string error;
  for (size_t i = 0; i < launches_.size() && error.empty(); ++i) error = launches_[i](stream);
  return error;
}

}  // namespace tf_stitch::cuda
