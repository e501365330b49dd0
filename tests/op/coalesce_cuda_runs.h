// Requests for tests of GPU superkernels over the stand-in driver: their inputs arrive when their stream gets there,
// and their answers must equal those of lone runs bit for bit.
#ifndef TF_STITCH_TESTS_OP_COALESCE_CUDA_RUNS_H_
#define TF_STITCH_TESTS_OP_COALESCE_CUDA_RUNS_H_

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "stand_in_gpu.h"

namespace {

using namespace tf_stitch;
using Floats = std::vector<float>;

// A program from a file, for n rows and columns.
struct Model : Loaded {
  Model(const char* path, int64_t n) {
    Load(path);
    plan = PlanFor(n, /*grids=*/true);
    ready = static_cast<CudaPlan*>(plan->extra.get());
    work = std::make_unique<CudaWork>(program, *plan, *ready);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

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

// Ends a coalescer whose requests, some of them cancelled, are all submitted: each must have an answer, most of them a
// result.  What it had done by then.
template <class Request>
DeviceStats End(Coalescer* coalescer, const std::vector<std::vector<std::shared_ptr<Request>>>& requests,
                const std::vector<cuda::Stream>& streams) {
  Must(coalescer->Drain(60'000'000), "requests are held for ever");
  DeviceStats stats = coalescer->stats().counts;
  coalescer->Stop();
  cuda::g_gpu->Synchronize();
  size_t all = 0, completed = 0;
  for (const auto& each : requests) {
    for (const auto& request : each) {
      Must(request->done, "a request has no answer");
      completed += request->completed;
    }
    all += each.size();
  }
  for (cuda::Stream s : streams) cuda::LoadDriver(nullptr)->StreamDestroy(s);
  Must(completed > all / 2, "too few requests complete");
  return stats;
}

}  // namespace

#endif  // TF_STITCH_TESTS_OP_COALESCE_CUDA_RUNS_H_
