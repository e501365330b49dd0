// Requests of many clients, each with one under way at a time, over a stand-in for a GPU on which launches last:
// whether they share superkernels, and what that costs the host.
//
//   coalesce_cuda_load CLIENTS FILE...     the files hold programs (stand_in_driver.h)
//
// Prints: problems a superkernel, microseconds a request, the same without superkernels; then nanoseconds of the host's
// for each request of a superkernel and for one that runs alone, on a device that takes no time.
#include <thread>

#include "../../custom_ops/autotune.h"
#include "coalesce_cuda_runs.h"

namespace {

constexpr int kEach = 24, kAtATime = 2;

// Sends its next request when the last was answered.
class Client {
 public:
  Client(const Model& model, int number) : model_(model), number_(number) {
    cuda::LoadDriver(nullptr)->StreamCreateWithPriority(&stream_, 0, 0);
    want_ = Draw()->Alone(stream_);
  }
  ~Client() { cuda::LoadDriver(nullptr)->StreamDestroy(stream_); }

  void Serve(Coalescer* coalescer) {
    for (int i = 0; i < kEach; ++i) {
      std::shared_ptr<Answered> run = Draw();
      run->Upload(stream_);
      run->inputs = static_cast<CudaDevice&>(coalescer->device()).Record(stream_);
      Must(coalescer->Submit(run) == Coalescer::Taken::kHeld, "the coalescer has stopped");
      std::unique_lock<std::mutex> lock(run->mu);
      run->changed.wait(lock, [&] { return run->answered; });
    }
  }

  std::shared_ptr<CudaRequest> OneRun() const { return Draw(); }

 private:
  struct Answered : Run {
    using Run::Run;
    void Done(Outcome outcome, const std::string& why) override {
      Run::Done(outcome, why);
      std::lock_guard<std::mutex> lock(mu);
      answered = true;
      changed.notify_all();
    }
    std::mutex mu;
    std::condition_variable changed;
    bool answered = false;
  };

  // A request like all of this client's.
  std::shared_ptr<Answered> Draw() const {
    std::mt19937_64 rng(static_cast<uint64_t>(number_));
    auto run = std::make_shared<Answered>(model_, &rng);
    run->want = want_;
    run->tenant = "tenant_" + std::to_string(number_ % 4);
    return run;
  }

  const Model& model_;
  const int number_;
  cuda::Stream stream_;
  std::vector<Floats> want_;
};

std::unique_ptr<CudaDevice> MakeDevice() {
  std::string error;
  std::unique_ptr<CudaDevice> device =
      CudaDevice::Make(*cuda::LoadDriver(nullptr), nullptr, 4, int64_t{64} << 20, &error);
  Must(device != nullptr, error);
  return device;
}

using Clients = std::deque<Client>;

// Microseconds a request; `factor` is that of the device.
double Load(Clients* clients, int max_pack, double* factor) {
  Coalescer::Options options;
  options.policy.max_pack = max_pack;
  Coalescer coalescer(options, MakeDevice(), "");
  std::vector<std::thread> threads;
  Micros begin = NowMicros();
  for (Client& c : *clients) threads.emplace_back([&c, &coalescer] { c.Serve(&coalescer); });
  for (std::thread& t : threads) t.join();
  double us = static_cast<double>(NowMicros() - begin) / (kEach * static_cast<double>(clients->size()));
  DeviceStats counts = coalescer.stats().counts;
  *factor = static_cast<double>(counts.steps) / static_cast<double>(counts.superkernels);
  return us;
}

// Nanoseconds a request that `count` of them keep a lane's thread busy.
double HostCost(Clients* clients, size_t count) {
  std::unique_ptr<CudaDevice> device = MakeDevice();
  constexpr int kRounds = 300;
  std::vector<std::shared_ptr<CudaRequest>> runs;
  for (size_t k = 0; k < count; ++k) runs.push_back((*clients)[k].OneRun());
  double ns = 0;
  for (int i = 0; i < kRounds; ++i) {
    std::vector<Member> members;
    for (size_t k = 0; k < count; ++k) members.push_back({runs[k].get(), 0});
    auto begin = std::chrono::steady_clock::now();
    std::unique_ptr<Device::Ticket> ticket = device->Issue(0, &members);
    auto end = std::chrono::steady_clock::now();
    if (i >= kRounds / 2) ns += std::chrono::duration<double, std::nano>(end - begin).count();
    std::string error;
    ticket->Wait(&error);
    Must(error.empty(), error);
  }
  return ns / (kRounds - kRounds / 2) / static_cast<double>(count);
}

}  // namespace

int main(int argc, char** argv) {
  cuda::Gpu gpu(1);
  cuda::g_gpu = &gpu;
  cuda::SetNoteHandler([](const std::string& note) { Must(false, note); });
  {
    std::deque<Model> models;
    for (int i = 2; i < argc; ++i) models.emplace_back(argv[i], 3);
    Clients clients, equal;
    for (int i = 0; i < atoi(argv[1]); ++i) clients.emplace_back(models[static_cast<size_t>(i) % models.size()], i);
    for (int i = 0; i < 16; ++i) equal.emplace_back(models[0], i);
    double packed = HostCost(&equal, 16), alone = HostCost(&equal, 1);
    cuda::g_launch_us = 50;
    cuda::g_problem_us = 2;
    cuda::g_first_us = 100'000;
    gpu.StartClock(kAtATime);
    double factor = 0, again = 0, one = 0;
    Load(&clients, 64, &factor);  // slow at first
    double us = Load(&clients, 64, &again), us_apart = Load(&clients, 1, &one);
    Must(one == 1, "requests that share nothing count as shared");
    printf("%.2f problems a superkernel, %.1f us a request, %.1f us without; host: %.0f ns a request, alone %.0f ns\n",
           factor, us, us_apart, packed, alone);
  }
  Must(gpu.alive == 0, "device memory, streams, events or graphs are left over");
}
