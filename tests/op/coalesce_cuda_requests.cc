// GPU superkernels over a stand-in for the CUDA driver, whose streams run when they like: a thread takes whatever its
// events allow, in a random order.  Every answer must equal that of a lone run bit for bit.
//
//   coalesce_cuda_requests SEED FILE...     the files hold programs (stand_in_driver.h)
#include <thread>

#include "../../custom_ops/autotune.h"
#include "coalesce_cuda_runs.h"

namespace {

void Serve(const std::deque<Model>& models, int lanes, uint64_t seed) {
  const cuda::Driver& driver = *cuda::LoadDriver(nullptr);
  std::string error;
  std::unique_ptr<CudaDevice> owned = CudaDevice::Make(driver, nullptr, lanes, int64_t{64} << 20, &error);
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
        Must(coalescer.Submit(runs[t][i]) == Coalescer::Taken::kHeld, "the coalescer has stopped");
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
    std::deque<Model> models;
    for (int i = 2; i < argc; ++i) {
      for (int64_t n : {3, 5}) models.emplace_back(argv[i], n);
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
