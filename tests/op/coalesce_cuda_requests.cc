// GPU superkernels over a stand-in for the CUDA driver, whose streams run when they like: a thread takes whatever its
// events allow, in a random order.  Every answer must equal that of a lone run bit for bit.
//
//   coalesce_cuda_requests SEED FILE...     the files hold programs (stand_in_driver.h)
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../custom_ops/autotune.h"
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
};
struct StreamTag {
  struct Op {
    std::function<void()> run;
    Event wait = nullptr;  // until this record of it was reached
    uint64_t count = 0;
  };
  std::deque<Op> ops;
};

namespace {

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
  void Enqueue(Stream stream, StreamTag::Op op) {
    std::lock_guard<std::mutex> lock(mu);
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

  std::mutex mu;  // also of all streams and events
  std::condition_variable changed;
  std::vector<Stream> streams;
  std::atomic<int> alive{0}, launches{0}, packed{0};

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mu);
    while (true) {
      std::vector<Stream> ready;
      for (Stream s : streams) {
        if (s->ops.empty()) continue;
        const StreamTag::Op& op = s->ops.front();
        if (!op.wait || op.wait->happened.count(op.count)) ready.push_back(s);
      }
      if (ready.empty()) {
        if (over_) return;
        changed.wait(lock);
        continue;
      }
      Stream s = ready[rng_() % ready.size()];
      StreamTag::Op op = std::move(s->ops.front());
      if (op.run) op.run();
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
  bool over_ = false;
  std::thread thread_;
};

Gpu* g_gpu;

FunctionTag g_axpb{4, false, Axpb}, g_mul{5, false, Mul}, g_axpb_many{4, true, Axpb}, g_mul_many{5, true, Mul};
bool g_with_many = true;
std::atomic<bool> g_has_memory{true};

Result Launch(Function f, unsigned, unsigned count, unsigned, unsigned, unsigned, unsigned, unsigned, Stream stream,
              void** parameters, void**) {
  ++g_gpu->launches;
  if (f->many) {
    g_gpu->packed += static_cast<int>(count);
    const auto* table = *static_cast<const uint64_t* const*>(parameters[0]);
    auto all = [f, table, count] {
      for (unsigned i = 0; i < count; ++i) f->run(table + i * f->words);
    };
    return g_gpu->Enqueue(stream, {all}), 0;
  }
  const auto* words = static_cast<const uint64_t*>(parameters[0]);
  std::vector<uint64_t> copy(words, words + f->words);
  return g_gpu->Enqueue(stream, {[f, copy] { f->run(copy.data()); }}), 0;
}

Result Record(Event e, Stream s) {
  uint64_t count = 0;
  {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    count = ++e->asked;
  }
  return g_gpu->Enqueue(s, {[e, count] { e->happened.insert(count); }}), 0;
}

Driver Make() {
  Driver d = DriverOfOneDevice();
  d.CtxSynchronize = [] { return g_gpu->Synchronize(), 0; };
  d.CtxGetStreamPriorityRange = [](int* least, int* greatest) { return *least = 0, *greatest = -5, 0; };
  d.ModuleGetFunction = [](Function* f, Module, const char* name) {
    std::string n = name;
    *f = n == "t_axpb" ? &g_axpb : n == "t_mul" ? &g_mul : nullptr;
    if (g_with_many && n == "t_axpb_many") *f = &g_axpb_many;
    if (g_with_many && n == "t_mul_many") *f = &g_mul_many;
    return *f ? 0 : 500;
  };
  d.LaunchKernel = Launch;
  d.MemAlloc = [](void** at, size_t bytes) { return *at = malloc(bytes), ++g_gpu->alive, 0; };
  d.MemFree = [](void* at) { return free(at), --g_gpu->alive, 0; };
  d.MemAllocHost = [](void** at, size_t bytes) {
    if (!g_has_memory) return 2;
    return *at = malloc(bytes), ++g_gpu->alive, 0;
  };
  d.MemFreeHost = [](void* at) { return free(at), --g_gpu->alive, 0; };
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
  d.StreamWaitEvent = [](Stream s, Event e, unsigned) {
    uint64_t count = 0;
    {
      std::lock_guard<std::mutex> lock(g_gpu->mu);
      count = e->asked;
    }
    return g_gpu->Enqueue(s, {nullptr, e, count}), 0;
  };
  d.EventCreate = [](Event* e, unsigned) { return *e = new EventTag, ++g_gpu->alive, 0; };
  d.EventDestroy = [](Event e) { return delete e, --g_gpu->alive, 0; };
  d.EventRecord = Record;
  d.EventQuery = [](Event e) {
    std::lock_guard<std::mutex> lock(g_gpu->mu);
    return e->happened.count(e->asked) ? kSuccess : kNotReady;
  };
  d.EventElapsedTime = [](float* ms, Event, Event) { return *ms = 0.02f, 0; };
  return d;
}

}  // namespace

// Products write all over their workspace.
std::string Matmul::Run(const void* lhs, const void* rhs, const void*, void* out, void* workspace,
                        Stream stream) const {
  g_gpu->Enqueue(stream, {[=, n = impl_->n] {
                   memset(workspace, 7, 64);
                   Multiply(static_cast<const float*>(lhs), static_cast<const float*>(rhs), static_cast<float*>(out),
                            n);
                 }});
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
  ++g_gpu->launches;
  g_gpu->packed += static_cast<int>(impl_->batch);
  g_gpu->Enqueue(stream, {[=, n = impl_->n, batch = impl_->batch] {
                   memset(workspace, 7, 64);
                   for (uint64_t i = 0; i < batch; ++i) {
                     Multiply(static_cast<const float*>(lhs[i]), static_cast<const float*>(rhs[i]),
                              static_cast<float*>(out[i]), n);
                   }
                 }});
  return "";
}

}  // namespace tf_stitch::cuda

namespace {

using namespace tf_stitch;
using Floats = std::vector<float>;

struct Model : Loaded {
  std::shared_ptr<Plan> plan;
  CudaPlan* ready;
  std::unique_ptr<CudaWork> work;
};

// A request whose inputs arrive on the device when its stream gets there.
class Run : public CudaRequest {
 public:
  Run(const Model& m, std::mt19937_64* rng) : buffers_(m.program, *m.plan, *m.ready) {
    for (Floats& x : buffers_.inputs) {
      values_.emplace_back(x.size() - 1);
      for (float& f : values_.back()) f = static_cast<float>((*rng)() % 5) / 4;
      x.assign(x.size(), -9);
    }
    program = &m.program;
    plan = m.plan;
    ready = m.ready;
    cuda_work = m.work.get();
    Request::work = m.work->work;
    memory = buffers_.addresses.data();
    workspace = buffers_.workspace;
    graphs = false;
  }

  void Upload(cuda::Stream stream) {
    cuda::g_gpu->Enqueue(stream, {[this] {
                           for (size_t i = 0; i < values_.size(); ++i) {
                             std::copy(values_[i].begin(), values_[i].end(), buffers_.inputs[i].begin());
                           }
                         }});
  }

  // What a lone run gives.
  std::vector<Floats> Alone(cuda::Stream stream) {
    Upload(stream);
    std::string note;
    std::string error = ready->Run(memory, workspace, stream, false, nullptr, &note);
    Must(error.empty(), error);
    cuda::g_gpu->Synchronize();
    std::vector<Floats> out = buffers_.outputs;
    for (Floats& x : buffers_.outputs) x.assign(x.size(), -1);
    for (Floats& x : buffers_.inputs) x.assign(x.size(), -9);
    return out;
  }

  void Done(Outcome outcome, const std::string& why) override {
    Must(!done.exchange(true), "a request is answered twice");
    Must(outcome == Outcome::kCompleted || outcome == Outcome::kCancelled, "a request fails: " + why);
    if (outcome == Outcome::kCancelled) return;
    for (size_t i = 0; i < buffers_.outputs.size(); ++i) {
      Must(!memcmp(buffers_.outputs[i].data(), want[i].data(), (want[i].size() - 1) * 4),
           "a request's answer is wrong");
    }
    completed = true;
  }

  std::vector<Floats> want;
  std::atomic<bool> done{false}, completed{false};

 private:
  Memory buffers_;
  std::vector<Floats> values_;  // of the inputs, but for the element too many
};

void Serve(const std::vector<Model>& models, int lanes, uint64_t seed) {
  const cuda::Driver& driver = *cuda::LoadDriver(nullptr);
  std::string error;
  std::unique_ptr<CudaDevice> owned = CudaDevice::Make(driver, nullptr, lanes, &error);
  Must(owned != nullptr, error);
  CudaDevice* device = owned.get();
  Coalescer::Options options;
  options.policy.max_wait = 300;
  options.policy.max_pack = 6;
  Coalescer coalescer(options, std::move(owned), "");
  TenantOptions filler;
  filler.best_effort = true;
  coalescer.SetTenant("t2", filler);
  constexpr size_t kThreads = 4, kEach = 12;
  std::vector<cuda::Stream> streams(kThreads);
  std::vector<std::vector<std::shared_ptr<Run>>> runs(kThreads);
  std::mt19937_64 rng(seed);
  for (size_t t = 0; t < kThreads; ++t) {
    driver.StreamCreateWithPriority(&streams[t], 0, 0);
    for (size_t i = 0; i < kEach; ++i) {
      runs[t].push_back(std::make_shared<Run>(models[rng() % models.size()], &rng));
      runs[t].back()->want = runs[t].back()->Alone(streams[t]);
      runs[t].back()->tenant = "t" + std::to_string(rng() % 3);
    }
  }
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t, cancel = rng()] {
      for (size_t i = 0; i < kEach; ++i) {
        runs[t][i]->Upload(streams[t]);
        runs[t][i]->inputs = device->Record(streams[t]);
        Must(coalescer.Submit(runs[t][i]), "the coalescer has stopped");
        if ((cancel >> (4 * i)) % 8 == 0) coalescer.Cancel(runs[t][i].get());
      }
    });
  }
  for (auto& t : threads) t.join();
  Must(coalescer.Drain(60'000'000), "requests are held for ever");
  coalescer.Stop();
  cuda::g_gpu->Synchronize();
  size_t completed = 0;
  for (auto& each : runs) {
    for (auto& run : each) {
      Must(run->done, "a request has no answer");
      completed += run->completed;
    }
  }
  for (cuda::Stream s : streams) driver.StreamDestroy(s);
  Must(completed > kThreads * kEach / 2, "too few requests complete");
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = strtoull(argv[1], nullptr, 10);
  cuda::Gpu gpu(seed);
  cuda::g_gpu = &gpu;
  cuda::SetNoteHandler([](const std::string&) {});
  for (bool with_many : {true, false}) {
    cuda::g_with_many = with_many;
    std::vector<Model> models(static_cast<size_t>(argc - 2) * 2);
    for (size_t i = 0; i < models.size(); ++i) {
      Model& m = models[i];
      m.Load(argv[2 + i / 2]);
      m.plan = m.PlanFor(i % 2 ? 5 : 3, /*grids=*/true);
      m.ready = static_cast<CudaPlan*>(m.plan->extra.get());
      m.work = std::make_unique<CudaWork>(m.program, *m.plan, *m.ready);
    }
    for (int lanes : {1, 3}) Serve(models, lanes, seed + static_cast<uint64_t>(lanes));
    cuda::g_has_memory = false;  // for tables
    int packed = gpu.packed, launches = gpu.launches;
    Serve(models, 2, seed);
    Must(gpu.packed == packed, "problems were packed without memory for tables");
    cuda::g_has_memory = true;
    gpu.launches = launches;
  }
  Must(gpu.alive == 0, "device memory, streams or events are left over");
  Must(gpu.packed > gpu.launches / 4, "little was packed");
  printf("%d launches, %d problems packed\n", gpu.launches.load(), gpu.packed.load());
}
