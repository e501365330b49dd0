// Requests joined along their batch on a GPU, over the stand-in driver: of all sizes, of two tables, on streams that
// run when they like, with copies that fail and without memory.  Every answer must equal that of a lone run bit for
// bit.
//
//   merge_cuda_requests SEED FILE     the file holds programs.joinable_matrices()
#include <map>
#include <thread>

#include "../../custom_ops/autotune.h"
#include "coalesce_cuda_runs.h"

namespace {

constexpr int64_t kColumns = 3, kTable = 4;

struct Program1 : Loaded {
  // The plan for so many rows.
  std::shared_ptr<const Plan> For(int64_t rows) {
    Signature signature{rows, kColumns, rows, kColumns, kTable, kColumns, rows};
    return For(signature);
  }
  std::shared_ptr<const Plan> For(const Signature& signature) {
    std::lock_guard<std::mutex> lock(mu);
    std::shared_ptr<const Plan>& plan = plans[signature];
    if (plan) return plan;
    std::unique_ptr<Plan> made = MakePlan(program, signature);
    Must(made->usable, made->why_not);
    auto ready = std::make_unique<CudaPlan>(program, *made, code, false, /*grids=*/false);
    Must(ready->error().empty(), ready->error());
    made->work = std::make_unique<CudaWork>(program, *made, *ready);
    made->extra = std::move(ready);
    return plan = std::move(made);
  }

  std::mutex mu;
  std::map<Signature, std::shared_ptr<const Plan>> plans;
};

// A request whose inputs, but for the shared table, arrive on the device when its stream gets there.
class Joinable : public CudaRequest {
 public:
  Joinable(Program1* p, int64_t rows, Floats* table, std::mt19937_64* rng) : table_(table) {
    plan = p->For(rows);
    ready = static_cast<CudaPlan*>(plan->extra.get());
    cuda_work = static_cast<const CudaWork*>(plan->work.get());
    buffers_ = std::make_unique<Memory>(p->program, *plan, *ready);
    for (Floats& x : buffers_->inputs) {
      for (float& f : x) f = static_cast<float>((*rng)() % 5) / 4;
    }
    values_ = buffers_->inputs;
    for (Floats& x : buffers_->inputs) x.assign(x.size(), -9);
    buffers_->addresses[p->program.inputs[2]] = table_->data();
    Want(rows);
    program = &p->program;
    Request::work = cuda_work->work;
    memory = buffers_->addresses.data();
    workspace = buffers_->workspace;
    merge = cuda_work->mergeable.KeyOf(p, memory);
    joined_plan = [p](const Signature& s) { return p->For(s); };
    Must(merge.key && merge.rows == rows, "a request cannot be joined");
  }

  void Upload(cuda::Stream stream) {
    cuda::g_gpu->Enqueue(stream, {[this] { buffers_->inputs = values_; }});
  }

  void Done(Outcome outcome, const std::string& why) override {
    Must(!done.exchange(true), "a request is answered twice");
    Must(outcome == Outcome::kCompleted || outcome == Outcome::kCancelled, "a request fails: " + why);
    if (outcome == Outcome::kCancelled) return;
    for (size_t i = 0; i < want_.size(); ++i) {
      Must(std::equal(want_[i].begin(), want_[i].end(), buffers_->outputs[i].begin()), "an answer is wrong");
    }
    completed = true;
  }

  std::atomic<bool> done{false}, completed{false};

 private:
  void Want(int64_t rows) {
    size_t count = static_cast<size_t>(rows * kColumns);
    want_.resize(3);
    for (size_t i = 0; i < count; ++i) want_[0].push_back((2 * values_[0][i] + 1) * values_[1][i]);
    for (size_t i = 0; i < static_cast<size_t>(kTable); ++i) want_[1].push_back(2 * (*table_)[i] + 1);
    for (size_t i = 0; i < count; ++i) want_[2].push_back(2 * values_[3][i] + 1);
  }

  Floats* const table_;
  std::unique_ptr<Memory> buffers_;
  std::vector<Floats> values_, want_;
};

DeviceStats Serve(Program1* program, int lanes, uint64_t seed, int64_t merge_bytes) {
  const cuda::Driver& driver = *cuda::LoadDriver(nullptr);
  std::string error;
  std::unique_ptr<CudaDevice> owned = CudaDevice::Make(driver, nullptr, lanes, merge_bytes, &error);
  Must(owned != nullptr, error);
  CudaDevice* device = owned.get();
  Coalescer::Options options;
  options.policy.max_merge = 9;
  options.policy.under_way = 1;
  Coalescer coalescer(options, std::move(owned), "");
  constexpr size_t kThreads = 6, kEach = 20;
  std::vector<cuda::Stream> streams(kThreads);
  std::vector<std::vector<std::shared_ptr<Joinable>>> all(kThreads);
  std::mt19937_64 rng(seed);
  std::vector<Floats> tables = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  for (size_t t = 0; t < kThreads; ++t) {
    driver.StreamCreateWithPriority(&streams[t], 0, 0);
    for (size_t i = 0; i < kEach; ++i) {
      all[t].push_back(std::make_shared<Joinable>(program, static_cast<int64_t>(rng() % 4), &tables[t % 2], &rng));
      all[t].back()->tenant = "t" + std::to_string(rng() % 2);
    }
  }
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t, draws = rng()] {
      for (size_t i = 0; i < kEach; ++i) {
        all[t][i]->Upload(streams[t]);
        all[t][i]->inputs = device->Record(streams[t]);
        Must(coalescer.Submit(all[t][i]) == Coalescer::Taken::kHeld, "the coalescer has stopped");
        if ((draws >> (3 * i)) % 8 == 0) coalescer.Cancel(all[t][i].get());
      }
    });
  }
  for (auto& t : threads) t.join();
  return End(&coalescer, all, streams);
}

}  // namespace

int main(int, char** argv) {
  uint64_t seed = strtoull(argv[1], nullptr, 10);
  cuda::Gpu gpu(seed);
  cuda::g_gpu = &gpu;
  cuda::SetNoteHandler([](const std::string&) {});
  int64_t requests = 0, runs = 0, apart = 0;
  {
    Program1 program;
    program.Load(argv[2]);
    for (int lanes : {1, 3}) {
      DeviceStats stats = Serve(&program, lanes, seed, int64_t{64} << 20);
      requests += stats.merged_requests;
      runs += stats.merged_runs;
      Must(stats.unmerged_requests == 0, "requests are not joined though they could be");
    }
    Must(Serve(&program, 2, seed, 1000).merged_runs == 0, "more memory is taken than there is");
    cuda::g_has_memory = false;
    Must(Serve(&program, 2, seed, int64_t{64} << 20).merged_runs == 0, "memory comes from nowhere");
    cuda::g_has_memory = true;
    cuda::g_copies = false;
    DeviceStats failed = Serve(&program, 2, seed, int64_t{64} << 20);
    Must(failed.merged_runs == 0, "runs succeed without copies");
    apart = failed.unmerged_requests;
    cuda::g_copies = true;
  }
  Must(gpu.alive == 0, "device memory, streams or events are left over");
  printf("%ld requests as %ld, %ld apart\n", static_cast<long>(requests), static_cast<long>(runs),
         static_cast<long>(apart));
}
