// What is given back while others go on, over a stand-in for the CUDA driver that does not wait for a context of which
// a stream is captured, and breaks the capture off: device memory goes when the device is known to be done with it, and
// captures succeed.  And who wants a plan does not wait for one that is dropped.
#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "../../custom_ops/cuda_capture.h"
#include "stand_in_driver.h"

namespace tf_stitch::cuda {

struct StreamTag {
  bool broken = false;
};
struct GraphTag {};

void Note(const std::string&) {}

// No product is run here.
std::string Matmul::Run(const void*, const void*, const void*, void*, void*, Stream) const { return ""; }

namespace {

std::mutex g_mu;
std::set<Stream> g_captured;
std::set<void*> g_allocated;
std::atomic<int> g_too_early{0};
thread_local bool t_waited = false;  // this thread, for the context, since it last freed anything

Driver Make() {
  Driver d = DriverOfOneDevice();
  d.StreamCreate = [](Stream* s, unsigned) { return *s = new StreamTag, 0; };
  d.StreamDestroy = [](Stream s) { return delete s, 0; };
  d.StreamSynchronize = [](Stream) { return 0; };
  d.StreamBeginCapture = [](Stream s, int) {
    std::lock_guard<std::mutex> lock(g_mu);
    s->broken = false;
    return g_captured.insert(s), 0;
  };
  d.StreamEndCapture = [](Stream s, Graph* graph) {
    std::lock_guard<std::mutex> lock(g_mu);
    g_captured.erase(s);
    *graph = s->broken ? nullptr : new GraphTag;
    return s->broken ? 901 : 0;
  };
  d.GraphDestroy = [](Graph g) { return delete g, 0; };
  d.CtxSynchronize = [] {
    std::lock_guard<std::mutex> lock(g_mu);
    for (Stream s : g_captured) s->broken = true;
    t_waited = g_captured.empty();
    return t_waited ? 0 : kCaptureUnsupported;
  };
  d.MemAlloc = [](void** at, size_t bytes) {
    std::lock_guard<std::mutex> lock(g_mu);
    return g_allocated.insert(*at = malloc(bytes)), 0;
  };
  d.MemFree = [](void* at) {
    g_too_early += !t_waited;
    t_waited = false;
    std::lock_guard<std::mutex> lock(g_mu);
    return g_allocated.erase(at), free(at), 0;
  };
  d.MemcpyHtoDAsync = [](void* to, const void* from, size_t bytes, Stream) { return memcpy(to, from, bytes), 0; };
  return d;
}

}  // namespace
}  // namespace tf_stitch::cuda

namespace {

using namespace tf_stitch;
using namespace std::chrono_literals;

void AllocateAndFree() {
  std::string error;
  Must(DeviceBytes::Upload(*cuda::LoadDriver(nullptr), nullptr, std::vector<char>(64, 1), &error) != nullptr, error);
}

// Threads that capture, and threads that give memory back.
void CaptureMeanwhile() {
  std::string error;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([] {
      std::string error;
      std::shared_ptr<CudaCode> code = CudaCode::Load(Program(), nullptr, &error);
      for (int i = 0; i < 100; ++i) {
        cuda::Graph graph = nullptr;
        error = code->Capture([](cuda::Stream) { return std::this_thread::sleep_for(100us), std::string(); }, &graph);
        Must(error.empty(), error);
        cuda::LoadDriver(nullptr)->GraphDestroy(graph);
      }
    });
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) AllocateAndFree();
    });
  }
  for (std::thread& t : threads) t.join();
  Must(cuda::g_allocated.empty(), "memory is left over");
}

// A capture of somebody else's, which takes a while or does not end.
void CaptureOfOthers(std::chrono::milliseconds lasts, bool is_kept) {
  cuda::StreamTag stream;
  const cuda::Driver& driver = *cuda::LoadDriver(nullptr);
  driver.StreamBeginCapture(&stream, cuda::kCaptureRelaxed);
  auto freed = std::async(std::launch::async, AllocateAndFree);
  std::this_thread::sleep_for(lasts);
  if (is_kept) freed.get();
  cuda::Graph graph = nullptr;
  driver.StreamEndCapture(&stream, &graph);
  if (!is_kept) freed.get();
  driver.GraphDestroy(graph);
  Must(cuda::g_allocated.size() == is_kept, "memory is freed that may be used, or kept that is not");
}

// One of two plans goes, which takes until somebody else was given a plan.
void DropPlan() {
  struct Slow : PlanExtra {
    explicit Slow(std::future<void> f) : until(std::move(f)) {}
    ~Slow() override { Must(until.wait_for(10s) == std::future_status::ready, "who wants a plan waits for another"); }
    std::future<void> until;
  };
  const Program program;
  PlanCache plans(1);
  std::promise<void> given;
  plans.Get(program, {1})->extra = std::make_unique<Slow>(given.get_future());
  std::atomic<bool> drops{false};
  std::thread dropping([&] { drops = true, plans.Get(program, {2}); });
  while (!drops) std::this_thread::yield();
  std::this_thread::sleep_for(20ms);
  plans.Get(program, {2});
  given.set_value();
  dropping.join();
}

}  // namespace

int main() {
  CaptureMeanwhile();
  CaptureOfOthers(20ms, /*is_kept=*/false);
  CaptureOfOthers(0ms, /*is_kept=*/true);
  DropPlan();
  Must(cuda::g_too_early == 0, "memory is freed before the device is known to be done with it");
  for (void* kept : cuda::g_allocated) free(kept);
}
