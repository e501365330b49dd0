// A stand-in for the CUDA driver and the matrix library, for tests of superkernels without a GPU: streams run when they
// like, a thread takes whatever events allow, in a random order.  With a clock it also takes time: launches last, and
// the streams of a device run side by side.
#ifndef TF_STITCH_TESTS_OP_STAND_IN_GPU_H_
#define TF_STITCH_TESTS_OP_STAND_IN_GPU_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../custom_ops/coalesce_cuda.h"
#include "../../custom_ops/cublas_batched.h"
#include "stand_in_driver.h"

namespace tf_stitch::cuda {

struct FunctionTag {
  size_t words;
  bool many;
  void (*run)(const uint64_t*);
};
// An event may be recorded again before its last record is reached; who waits for the earlier record does not notice.
struct EventTag {
  uint64_t asked = 0;           // how often it was recorded
  std::set<uint64_t> happened;  // which of these records were reached
  std::chrono::steady_clock::time_point when{};
  Graph recorded = nullptr;  // the graph that it was last recorded in
};
// What a stream, or a graph, has to run.
struct Op {
  std::function<void()> run;
  double us = 0;         // that it lasts, where the device has a clock
  Event wait = nullptr;  // until this record of it was reached
  uint64_t count = 0;
};
struct GraphTag {
  std::vector<Op> ops;
};
struct GraphExecTag {
  std::vector<Op> ops;
  std::shared_ptr<EventTag> ran = std::make_shared<EventTag>();  // its last launch: launches of it wait for each other
};
struct StreamTag {
  std::deque<Op> ops;
  std::chrono::steady_clock::time_point busy_until{};
  Graph recorded = nullptr;  // what it gets goes there
};

namespace {

using Time = std::chrono::steady_clock::time_point;

// The device: a thread that runs the fronts of streams.
class Gpu {
 public:
  explicit Gpu(uint64_t seed) : rng_(seed), thread_([this] { Loop(); }) {}
  ~Gpu() {
    {
      std::lock_guard<std::mutex> lock(mu);
      over_ = true;
    }
    changed.notify_all();
    thread_.join();
  }
  void Enqueue(Stream stream, Op op) {
    std::lock_guard<std::mutex> lock(mu);
    if (stream->recorded) return stream->recorded->ops.push_back(std::move(op));
    stream->ops.push_back(std::move(op));
    changed.notify_all();
  }
  void Synchronize() {
    std::unique_lock<std::mutex> lock(mu);
    changed.wait(lock, [this] {
      for (Stream s : streams) {
        if (!s->ops.empty()) return false;
      }
      return true;
    });
  }
  // From now on what runs lasts as long as it says, and so much may run at a time.
  void StartClock(int at_a_time) {
    std::lock_guard<std::mutex> lock(mu);
    clock_ = true;
    at_a_time_ = at_a_time;
  }

  std::mutex mu;  // also of all streams and events
  std::condition_variable changed;
  std::vector<Stream> streams;
  std::atomic<int> alive{0}, launches{0}, packed{0}, replays{0}, tables{0};

 private:
  // Starts what may run; true when the front of a stream has run for as long as it lasts.
  bool Ended(Stream s) {
    const Op& op = s->ops.front();
    if (op.wait && !op.wait->happened.count(op.count)) return false;
    if (!clock_ || op.us == 0) return true;
    Time now = std::chrono::steady_clock::now();
    if (s->busy_until == Time{} && running_ < at_a_time_) {
      s->busy_until = now + std::chrono::nanoseconds(static_cast<int64_t>(op.us * 1000));
      ++running_;
    }
    return s->busy_until != Time{} && s->busy_until <= now;
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mu);
    while (true) {
      std::vector<Stream> ready;
      Time next = Time::max();
      for (size_t i = 0, first = rng_(); i < streams.size(); ++i) {  // whoever is asked first may start first
        Stream s = streams[(first + i) % streams.size()];
        if (s->ops.empty()) continue;
        if (Ended(s)) ready.push_back(s);
        if (s->busy_until != Time{}) next = std::min(next, s->busy_until);
      }
      if (ready.empty()) {
        if (over_) return;
        next == Time::max() ? changed.wait(lock) : (void)changed.wait_until(lock, next);
        continue;
      }
      Stream s = ready[rng_() % ready.size()];
      Op op = std::move(s->ops.front());
      if (op.run) op.run();
      if (s->busy_until != Time{}) s->busy_until = Time{}, --running_;
      s->ops.pop_front();
      changed.notify_all();
      if (rng_() % 8 == 0) {  // others may enqueue meanwhile
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
      }
    }
  }

  std::mt19937_64 rng_;
  bool over_ = false, clock_ = false;
  int at_a_time_ = 1, running_ = 0;
  std::thread thread_;
};

Gpu* g_gpu;

FunctionTag g_axpb{4, false, Axpb}, g_mul{5, false, Mul}, g_axpb_many{4, true, Axpb}, g_mul_many{5, true, Mul};
// Pieces that joined requests copy; the table is the host's, read when the launch runs.
void Copy(const uint64_t* w) { CopyPiece(*reinterpret_cast<const Piece*>(w)); }
FunctionTag g_copy_pieces{sizeof(Piece) / 8, true, Copy};
// Kernels whose parameter is a table, by its words: little ones, and those of all tables that come so.
FunctionTag g_table_64{64, false, nullptr}, g_table_512{512, false, nullptr}, g_table_2048{2048, false, nullptr};
bool g_with_many = true;
std::atomic<bool> g_with_tables{true};  // false: the driver takes no such kernels
thread_local int t_contexts = 0;        // that this thread has made current
std::atomic<bool> g_has_memory{true};
std::atomic<bool> g_copies{true};   // false: launches of ts_copy_pieces fail
std::atomic<bool> g_replays{true};  // false: launches of graphs fail
// Where the device has a clock: a launch, and each further problem in it; then what the host waits for at the first
// launch for a number of problems (a driver loads code), and which threads did.
double g_launch_us = 0, g_problem_us = 0, g_first_us = 0;
std::set<std::thread::id> g_loaders;

double Lasts(size_t problems, bool packed) {
  static std::set<size_t> known;  // under the device's lock
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    first = packed && known.insert(problems).second;
    if (first) g_loaders.insert(std::this_thread::get_id());
  }
  if (first) std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<int64_t>(g_first_us * 1000)));
  return g_launch_us + g_problem_us * static_cast<double>(problems - 1);
}

// The driver takes all words of the parameter, whether or not they count, when the kernel is launched.
Op TableWritten(Function f, void** parameters) {
  const auto* words = static_cast<const uint64_t*>(parameters[0]);
  auto* to = *static_cast<char**>(parameters[1]);
  size_t bytes = *static_cast<unsigned*>(parameters[2]) * sizeof(uint64_t);
  ++g_gpu->tables;
  return {[=, copy = std::vector<uint64_t>(words, words + f->words)] { memcpy(to, copy.data(), bytes); }};
}

// What a launch with these parameters runs.
Op Launched(Function f, unsigned count, void** parameters) {
  if (!f->run) return TableWritten(f, parameters);
  if (f->many) {
    const auto* table = *static_cast<const uint64_t* const*>(parameters[0]);
    auto all = [f, table, count] {
      ++g_gpu->launches;
      g_gpu->packed += static_cast<int>(count);
      for (unsigned i = 0; i < count; ++i) f->run(table + i * f->words);
    };
    return {all, Lasts(count, true)};
  }
  const auto* words = static_cast<const uint64_t*>(parameters[0]);
  std::vector<uint64_t> copy(words, words + f->words);
  auto one = [f, copy] {
    ++g_gpu->launches;
    f->run(copy.data());
  };
  return {one, Lasts(1, false)};
}

Result Launch(Function f, unsigned, unsigned count, unsigned, unsigned, unsigned, unsigned, unsigned, Stream stream,
              void** parameters, void**) {
  if (f == &g_copy_pieces && !g_copies) return 700;
  return g_gpu->Enqueue(stream, Launched(f, count, parameters)), 0;
}

Result Record(Event e, Stream s) {
  uint64_t count = 0;
  {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    e->recorded = s->recorded;
    if (s->recorded) return 0;  // the order of a graph's nodes is that in which they were recorded
    count = ++e->asked;
  }
  auto happen = [e, count] {
    e->happened.insert(count);
    e->when = std::chrono::steady_clock::now();
  };
  return g_gpu->Enqueue(s, {happen}), 0;
}

Result Wait(Stream s, Event e, unsigned) {
  uint64_t count = 0;
  {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    if (e->recorded) return s->recorded = e->recorded, 0;
    count = e->asked;
  }
  return g_gpu->Enqueue(s, {nullptr, 0, e, count}), 0;
}

Result EndCapture(Stream s, Graph* graph) {
  std::lock_guard<std::mutex> lock(g_gpu->mu);
  *graph = s->recorded;
  for (Stream each : g_gpu->streams) {
    if (each->recorded == *graph) each->recorded = nullptr;
  }
  return 0;
}

constexpr size_t kFirstNode = 1;  // null is no node

Result AddNode(GraphNode* node, Graph graph, Op op) {
  *node = reinterpret_cast<GraphNode>(graph->ops.size() + kFirstNode);  // a node is its place
  return graph->ops.push_back(std::move(op)), 0;
}

// The ops of a child graph as one.
Op Together(Graph child) {
  Op all;
  for (const Op& op : child->ops) all.us += op.us;
  all.run = [ops = child->ops] {
    for (const Op& op : ops) op.run();
  };
  return all;
}

Result Replay(GraphExec exec, Stream stream) {
  if (!g_replays) return 700;
  ++g_gpu->replays;
  std::lock_guard<std::mutex> lock(g_gpu->mu);
  std::shared_ptr<EventTag> ran = exec->ran;
  if (ran->asked) stream->ops.push_back({nullptr, 0, ran.get(), ran->asked});
  stream->ops.insert(stream->ops.end(), exec->ops.begin(), exec->ops.end());
  stream->ops.push_back({[ran, count = ++ran->asked] { ran->happened.insert(count); }});
  return g_gpu->changed.notify_all(), 0;
}

void AddGraphs(Driver* d) {
  d->StreamCreate = [](Stream* s, unsigned) { return LoadDriver(nullptr)->StreamCreateWithPriority(s, 0, 0); };
  d->StreamBeginCapture = [](Stream s, int) {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    return s->recorded = new GraphTag, 0;
  };
  d->StreamEndCapture = EndCapture;
  d->GraphCreate = [](Graph* g, unsigned) { return *g = new GraphTag, 0; };
  d->GraphDestroy = [](Graph g) { return delete g, 0; };
  d->GraphAddKernelNode = [](GraphNode* node, Graph g, const GraphNode*, size_t, const KernelNodeParams* p) {
    return AddNode(node, g, Launched(p->func, p->grid_y, p->kernel_params));
  };
  d->GraphGetRootNodes = [](Graph g, GraphNode* node, size_t* count) {  // each op waits for the one before
    *count = !g->ops.empty();
    *node = reinterpret_cast<GraphNode>(kFirstNode);
    return 0;
  };
  d->GraphAddChildGraphNode = [](GraphNode* node, Graph g, const GraphNode*, size_t, Graph child) {
    return AddNode(node, g, Together(child));
  };
  d->GraphInstantiate = [](GraphExec* exec, Graph g, unsigned long long) {
    return *exec = new GraphExecTag{g->ops}, ++g_gpu->alive, 0;
  };
  d->GraphExecDestroy = [](GraphExec exec) { return delete exec, --g_gpu->alive, 0; };
  d->GraphExecKernelNodeSetParams = [](GraphExec exec, GraphNode node, const KernelNodeParams* p) {
    return exec->ops[reinterpret_cast<size_t>(node) - kFirstNode] = Launched(p->func, p->grid_y, p->kernel_params), 0;
  };
  d->GraphExecChildGraphNodeSetParams = [](GraphExec exec, GraphNode node, Graph child) {
    return exec->ops[reinterpret_cast<size_t>(node) - kFirstNode] = Together(child), 0;
  };
  d->GraphLaunch = Replay;
}

Driver Make() {
  Driver d = DriverOfOneDevice();
  d.CtxSynchronize = [] { return g_gpu->Synchronize(), 0; };
  d.CtxGetStreamPriorityRange = [](int* least, int* greatest) { return *least = 0, *greatest = -5, 0; };
  d.ModuleLoadDataEx = [](Module* m, const void* bytes, unsigned, int*, void**) {
    *m = reinterpret_cast<Module>(&g_with_many);
    bool is_text = !memcmp(bytes, ".ver", 4);
    return is_text ? (g_with_tables ? 0 : 222) : memcmp(bytes, "fake", 4) ? 200 : 0;
  };
  d.ModuleGetFunction = [](Function* f, Module, const char* name) {
    std::string n = name;
    *f = n == "t_axpb" ? &g_axpb : n == "t_mul" ? &g_mul : nullptr;
    if (n == "ts_copy_pieces") *f = &g_copy_pieces;
    for (Function table : {&g_table_64, &g_table_512, &g_table_2048}) {
      if (n == "ts_write_table_" + std::to_string(table->words)) *f = table;
    }
    if (g_with_many && n == "t_axpb_many") *f = &g_axpb_many;
    if (g_with_many && n == "t_mul_many") *f = &g_mul_many;
    return *f ? 0 : 500;
  };
  d.LaunchKernel = Launch;
  d.CtxPushCurrent = [](Context) { return ++t_contexts, 0; };
  d.CtxPopCurrent = [](Context*) { return --t_contexts, 0; };
  d.MemAlloc = [](void** at, size_t bytes) { return t_contexts ? (*at = malloc(bytes), ++g_gpu->alive, 0) : 201; };
  d.MemFree = [](void* at) { return t_contexts ? (free(at), --g_gpu->alive, 0) : 201; };
  d.MemAllocHost = [](void** at, size_t bytes) {
    if (!g_has_memory || !t_contexts) return g_has_memory ? 201 : 2;
    return *at = malloc(bytes), ++g_gpu->alive, 0;
  };
  d.MemFreeHost = d.MemFree;
  d.MemcpyHtoDAsync = [](void* to, const void* from, size_t bytes, Stream s) {
    return g_gpu->Enqueue(s, {[=] { memcpy(to, from, bytes); }}), 0;
  };
  d.StreamCreateWithPriority = [](Stream* s, unsigned, int) {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    g_gpu->streams.push_back(*s = new StreamTag);
    return ++g_gpu->alive, 0;
  };
  d.StreamDestroy = [](Stream s) {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    g_gpu->streams.erase(std::find(g_gpu->streams.begin(), g_gpu->streams.end(), s));
    return delete s, --g_gpu->alive, 0;
  };
  d.StreamSynchronize = [](Stream) { return g_gpu->Synchronize(), 0; };
  d.StreamIsCapturing = [](Stream, int* out) { return *out = 0, 0; };
  d.StreamWaitEvent = Wait;
  d.EventCreate = [](Event* e, unsigned) { return *e = new EventTag, ++g_gpu->alive, 0; };
  d.EventDestroy = [](Event e) { return delete e, --g_gpu->alive, 0; };
  d.EventRecord = Record;
  d.EventQuery = [](Event e) {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    return e->happened.count(e->asked) ? kSuccess : kNotReady;
  };
  d.EventElapsedTime = [](float* ms, Event begin, Event end) {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    *ms = std::max(std::chrono::duration<float, std::milli>(end->when - begin->when).count(), 0.001f);
    return 0;
  };
  AddGraphs(&d);
  return d;
}

}  // namespace

// Products write all over their workspace.
std::string Matmul::Run(const void* lhs, const void* rhs, const void*, void* out, void* workspace,
                        Stream stream) const {
  auto one = [=, n = impl_->n] {
    ++g_gpu->launches;
    memset(workspace, 7, 64);
    Multiply(static_cast<const float*>(lhs), static_cast<const float*>(rhs), static_cast<float*>(out), n);
  };
  g_gpu->Enqueue(stream, {one, Lasts(1, false)});
  return "";
}

struct PointerBatch::Impl {
  uint64_t n, batch;
};
PointerBatch::PointerBatch() : impl_(std::make_unique<Impl>()) {}
PointerBatch::~PointerBatch() = default;
std::shared_ptr<const PointerBatch> PointerBatch::Get(const MatmulShape& shape, std::string*) {
  std::shared_ptr<PointerBatch> out(new PointerBatch);
  *out->impl_ = {static_cast<uint64_t>(shape.n), static_cast<uint64_t>(shape.batch)};
  return out;
}
size_t PointerBatch::workspace_bytes() const { return 64; }
std::string PointerBatch::Run(const void* const* lhs, const void* const* rhs, void* const* out, void* workspace,
                              Stream stream) const {
  auto all = [=, n = impl_->n, batch = impl_->batch] {
    ++g_gpu->launches;
    g_gpu->packed += static_cast<int>(batch);
    memset(workspace, 7, 64);
    for (uint64_t i = 0; i < batch; ++i) {
      Multiply(static_cast<const float*>(lhs[i]), static_cast<const float*>(rhs[i]), static_cast<float*>(out[i]), n);
    }
  };
  g_gpu->Enqueue(stream, {all, Lasts(impl_->batch, true)});
  return "";
}

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_TESTS_OP_STAND_IN_GPU_H_
