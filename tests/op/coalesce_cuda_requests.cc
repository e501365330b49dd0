// GPU superkernels over a stand-in for the CUDA driver, whose streams run when they like: a thread takes whatever its
// events allow, in a random order.  Every answer must equal that of a lone run bit for bit.
//
//   coalesce_cuda_requests SEED FILE...     the files hold programs (stand_in_driver.h)
#include <thread>

#include "../../custom_ops/autotune.h"
#include "coalesce_cuda_runs.h"

namespace {

std::atomic<int> g_alone{0};  // requests that their callers ran

// What a caller does that may have to run its request.
void Submit(Coalescer* coalescer, CudaDevice* device, const std::shared_ptr<Run>& run, cuda::Stream stream,
            Coalescer::MayRun may_run) {
  Coalescer::Taken taken = coalescer->Submit(run, may_run);
  Must(taken != Coalescer::Taken::kStopped, "the coalescer has stopped");
  if (taken == Coalescer::Taken::kHeld) return;
  std::string error, note;
  auto launch = [&] { return run->ready->Run(run->memory, run->workspace, stream, run->graphs, nullptr, &note); };
  coalescer->RanAlone(device->RunAlone(*run, stream, launch, &error));
  Must(error.empty() && note.empty(), error + note);
  cuda::g_gpu->Synchronize();
  run->Done(Outcome::kCompleted, "");
  ++g_alone;
}

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
        if (i % 4 == 2) device->FinishPacks();  // what has none yet runs one by one
        runs[t][i]->Upload(streams[t]);
        runs[t][i]->inputs = device->Record(streams[t]);
        Submit(&coalescer, device, runs[t][i], streams[t], static_cast<Coalescer::MayRun>(t % 3));
        if ((cancel >> (4 * i)) % 8 == 0) coalescer.Cancel(runs[t][i].get());
      }
    });
  }
  for (auto& t : threads) t.join();
  End(&coalescer, runs, streams);
}

// Requests that find nothing held: their callers run them, by the plan's launches, then by graphs of any addresses.
void ServeOneByOne(const std::deque<Model>& models, uint64_t seed) {
  std::string error;
  std::unique_ptr<CudaDevice> owned =
      CudaDevice::Make(*cuda::LoadDriver(nullptr), nullptr, 2, /*merge_bytes=*/0, &error);
  Must(owned != nullptr, error);
  CudaDevice* device = owned.get();
  Coalescer coalescer({}, std::move(owned), "");
  std::mt19937_64 rng(seed);
  cuda::Stream stream;
  cuda::LoadDriver(nullptr)->StreamCreateWithPriority(&stream, 0, 0);
  std::vector<std::shared_ptr<Run>> runs;  // all live, so that no addresses come again
  for (size_t i = 0; i < 12 * models.size(); ++i) {
    runs.push_back(std::make_shared<Run>(models[i % models.size()], &rng));
    runs.back()->want = runs.back()->Alone(stream);
    runs.back()->Upload(stream);
    runs.back()->inputs = device->Record(stream);
    int before = g_alone;
    device->FinishPacks();
    Submit(&coalescer, device, runs.back(), stream, Coalescer::MayRun::kWhenIdle);
    Must(g_alone == before + 1, "a request that finds nothing held is held");
  }
  coalescer.Stop();
  cuda::LoadDriver(nullptr)->StreamDestroy(stream);
}

// A request for a device without a coalescer.
struct Single {
  Single(CudaDevice* device, const Model& model, cuda::Stream stream, std::mt19937_64* rng)
      : run(std::make_shared<Run>(model, rng)) {
    run->Upload(stream);
    run->inputs = device->Record(stream);
  }
  std::shared_ptr<Run> run;
};

// More superkernels under way than tables are kept for: those that are too many are freed, by whichever thread gives
// a ticket back.
void IssueMany(const Model& model, CudaDevice* device, cuda::Stream stream, std::mt19937_64* rng) {
  constexpr size_t kMany = 80;
  std::vector<Single> all;
  std::vector<std::unique_ptr<Device::Ticket>> tickets;
  for (size_t i = 0; i <= kMany; ++i) {
    all.emplace_back(device, model, stream, rng);
    std::vector<Member> members{{all.back().run.get(), 0}};
    tickets.push_back(device->Issue(0, &members));
    Must(!members[0].failed, members[0].error);
    if (i == 0) device->FinishPacks();
  }
  std::thread([&] {
    for (auto& ticket : tickets) {
      std::string error;
      ticket->Wait(&error);
      Must(error.empty(), error);
    }
    tickets.clear();
  }).join();
}

// A caller's launch that fails leaves nothing on its way: what it would be copied from is used again.
void FailAlone(const Model& model, CudaDevice* device, cuda::Stream stream, std::mt19937_64* rng) {
  auto alone = [&](Single* single) {
    std::string error, note;
    auto launch = [&] {
      return single->run->ready->Run(single->run->memory, single->run->workspace, stream, true, nullptr, &note);
    };
    std::unique_ptr<Device::Ticket> ticket = device->RunAlone(*single->run, stream, launch, &error);
    if (ticket) ticket->Wait(&error);
    device->FinishPacks();
    return error;
  };
  std::deque<Single> all;  // all live, so that no addresses come again
  for (int i = 0; i < 8; ++i) {
    all.emplace_back(device, model, stream, rng);
    Must(alone(&all.back()).empty(), "a request alone fails");
  }
  cuda::EventTag late;
  std::atomic<bool> over{false};
  cuda::g_gpu->Enqueue(stream, {nullptr, 0, &late, 1});
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::lock_guard<std::mutex> lock(cuda::g_gpu->mu);
    over = true;
    late.happened.insert(1);
    cuda::g_gpu->changed.notify_all();
  });
  all.emplace_back(device, model, stream, rng);
  cuda::g_replays = false;
  Must(!alone(&all.back()).empty(), "a graph that cannot be launched is no error");
  cuda::g_replays = true;
  Must(over, "a table is given back before its copy has run");
  opens.join();
  cuda::g_gpu->Synchronize();
}

void RunSingles(const Model& model, uint64_t seed) {
  std::string error;
  std::unique_ptr<CudaDevice> device =
      CudaDevice::Make(*cuda::LoadDriver(nullptr), nullptr, 1, /*merge_bytes=*/0, &error);
  Must(device != nullptr, error);
  std::mt19937_64 rng(seed);
  cuda::Stream stream;
  cuda::LoadDriver(nullptr)->StreamCreateWithPriority(&stream, 0, 0);
  IssueMany(model, device.get(), stream, &rng);
  FailAlone(model, device.get(), stream, &rng);
  cuda::LoadDriver(nullptr)->StreamDestroy(stream);
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
    for (const Model& m : models) {
      Company shares = with_many ? Company::kGathers : Company::kNone;
      Must(m.work->work->units[0].company == shares, "a program is packed without kernels for many, or not with them");
      CudaWork apart(m.program, *m.plan, *m.ready, /*may_pack=*/false);
      Must(apart.work->units[0].company == Company::kNone, "a program is packed that must not be");
      Must(apart.list->number() == m.work->list->number(), "equal launches have different numbers");
    }
    int tables = gpu.tables;
    int replays = gpu.replays, packed_before = gpu.packed, launches_before = gpu.launches;
    ServeOneByOne(models, seed);
    Must(gpu.replays > replays && (gpu.packed > packed_before) == with_many,
         "requests alone use no graphs of any addresses");
    if (with_many) RunSingles(models[0], seed);
    gpu.packed = packed_before;
    gpu.launches = launches_before;
    for (int lanes : {1, 3}) Serve(models, lanes, seed + static_cast<uint64_t>(lanes));
    Must((gpu.tables > tables) == with_many, "no table came as a parameter, or one that nobody needs");
    tables = gpu.tables;
    cuda::g_with_tables = false;
    Serve(models, 2, seed);
    Must(gpu.tables == tables, "a driver that takes no large parameters was given one");
    cuda::g_with_tables = true;
    cuda::g_has_memory = false;  // for tables
    int packed = gpu.packed, launches = gpu.launches;
    Serve(models, 2, seed);
    Must(gpu.packed == packed, "problems were packed without memory for tables");
    cuda::g_has_memory = true;
    gpu.launches = with_many ? launches : launches_before;
  }
  Must(LaunchList::Count() == 0, "lists of launches are left over that no plan has");
  Must(gpu.alive == 0, "device memory, streams or events are left over");
  Must(gpu.packed > gpu.launches / 10, "little was packed");
  Must(g_alone > 0, "no request ran alone");
  printf("%d launches, %d problems packed, %d requests alone\n", gpu.launches.load(), gpu.packed.load(),
         g_alone.load());
}
