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

constexpr int kEach = 6, kAtATime = 2, kRounds = 2;

// Sends its next request when the last was answered.
class Client {
 public:
  Client(const Model& model, int number) : model_(model), number_(number) {
    cuda::LoadDriver(nullptr)->StreamCreateWithPriority(&stream_, 0, 0);
    want_ = Draw()->Alone(stream_);
  }
  ~Client() { cuda::LoadDriver(nullptr)->StreamDestroy(stream_); }

  // As the op does.
  void Serve(Coalescer* coalescer) {
    auto& device = static_cast<CudaDevice&>(coalescer->device());
    for (int i = 0; i < kEach; ++i) {
      std::shared_ptr<Answered> run = Draw();
      run->Upload(stream_);
      run->inputs = device.Record(stream_);
      Coalescer::Taken taken = coalescer->Submit(run, Coalescer::MayRun::kWhenIdle);
      Must(taken != Coalescer::Taken::kStopped, "the coalescer has stopped");
      if (taken == Coalescer::Taken::kAlone) RunAlone(coalescer, &device, run.get());
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

  void RunAlone(Coalescer* coalescer, CudaDevice* device, Answered* run) {
    std::string error, note;
    auto launch = [&] { return run->ready->Run(run->memory, run->workspace, stream_, run->graphs, nullptr, &note); };
    coalescer->RanAlone(device->RunAlone(*run, stream_, launch, &error));
    Must(error.empty() && note.empty(), error + note);
    std::shared_ptr<cuda::EventTag> end = device->Record(stream_);
    while (cuda::LoadDriver(nullptr)->EventQuery(end.get())) std::this_thread::sleep_for(std::chrono::microseconds(50));
    run->Done(Outcome::kCompleted, "");
  }

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

struct Served {
  double factor = 0;  // problems a superkernel
  double us = 1e9;    // a request, of all clients together
};

// Microseconds a request, of all clients together.
double ServeAll(Clients* clients, Coalescer* coalescer) {
  std::vector<std::thread> threads;
  Micros begin = NowMicros();
  for (Client& c : *clients) threads.emplace_back([&c, coalescer] { c.Serve(coalescer); });
  for (std::thread& t : threads) t.join();
  return static_cast<double>(NowMicros() - begin) / (kEach * static_cast<double>(clients->size()));
}

// Times are those of several rounds, once all is made that is made once.
Served Load(Clients* clients, int max_pack) {
  Coalescer::Options options;
  options.policy.max_pack = max_pack;
  Coalescer coalescer(options, MakeDevice(), "");
  ServeAll(clients, &coalescer);
  static_cast<CudaDevice&>(coalescer.device()).FinishPacks();
  Served served;
  for (int i = 0; i < kRounds; ++i) served.us = std::min(served.us, ServeAll(clients, &coalescer));
  DeviceStats counts = coalescer.stats().counts;
  served.factor = static_cast<double>(counts.steps) / static_cast<double>(counts.superkernels);
  return served;
}

// Nanoseconds a request that `count` of them keep a lane's thread busy.
double HostCost(Clients* clients, size_t count) {
  std::unique_ptr<CudaDevice> device = MakeDevice();
  constexpr int kTimes = 300;
  std::vector<std::shared_ptr<CudaRequest>> runs;
  for (size_t k = 0; k < count; ++k) runs.push_back((*clients)[k].OneRun());
  double ns = 0;
  for (int i = 0; i < kTimes; ++i) {
    std::vector<Member> members;
    for (size_t k = 0; k < count; ++k) members.push_back({runs[k].get(), 0});
    auto begin = std::chrono::steady_clock::now();
    std::unique_ptr<Device::Ticket> ticket = device->Issue(0, &members);
    auto end = std::chrono::steady_clock::now();
    if (i >= kTimes / 2) ns += std::chrono::duration<double, std::nano>(end - begin).count();
    std::string error;
    ticket->Wait(&error);
    Must(error.empty(), error);
  }
  return ns / (kTimes - kTimes / 2) / static_cast<double>(count);
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
    cuda::g_launch_us = 300;
    cuda::g_problem_us = 10;
    gpu.StartClock(kAtATime);
    cuda::g_loaders.clear();
    cuda::g_first_us = 50'000;
    Load(&clients, 64);
    Must(cuda::g_loaders.size() == 1, "requests wait for what is done once");  // one thread has done it all
    cuda::g_first_us = 0;
    Served together = Load(&clients, 64), apart = Load(&clients, 1);
    Must(apart.factor == 1, "requests that share nothing count as shared");
    printf("%.2f problems a superkernel, %.1f us a request, %.1f us without; host: %.0f ns a request, alone %.0f ns\n",
           together.factor, together.us, apart.us, packed, alone);
  }
  Must(gpu.alive == 0, "device memory, streams, events or graphs are left over");
}
