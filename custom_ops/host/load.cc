#include "load.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <limits>
#include <mutex>
#include <random>
#include <thread>

namespace tf_stitch::host {
namespace {

using Clock = std::chrono::steady_clock;

Tensor Draw(const Spec& spec, const LoadOptions& options, int64_t batch, std::mt19937_64* rng) {
  std::vector<int64_t> shape = spec.known_rank ? spec.shape : std::vector<int64_t>{-1};
  int64_t count = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0) shape[i] = i == 0 ? batch : options.other_dim;
    count *= shape[i];
  }
  const DTypeInfo& info = InfoOf(spec.dtype);
  if (info.kind == 's') {
    static constexpr const char* kWords[] = {"a", "b", "the", "cat"};
    std::vector<std::string> words(static_cast<size_t>(count));
    for (std::string& word : words) word = kWords[(*rng)() % 4];
    return Tensor(words, shape);
  }
  Tensor out(spec.dtype, shape);
  std::normal_distribution<double> normal;
  if (info.kind == 'c') {
    int64_t parts = 2 * count;
    for (int64_t i = 0; i < parts; ++i) {
      if (spec.dtype == TF_COMPLEX64) static_cast<float*>(out.data())[i] = static_cast<float>(normal(*rng));
      if (spec.dtype == TF_COMPLEX128) static_cast<double*>(out.data())[i] = normal(*rng);
    }
    return out;
  }
  uint64_t below = info.kind == 'b' ? 2 : static_cast<uint64_t>(std::max<int64_t>(options.integers_below, 1));
  for (int64_t i = 0; i < count; ++i) {
    SetElement(out, i, info.kind == 'f' ? normal(*rng) : static_cast<double>((*rng)() % below));
  }
  return out;
}

// What the threads of a run write to.
class Tally {
 public:
  explicit Tally(int64_t requests) { latencies_.reserve(static_cast<size_t>(requests)); }

  void Add(const Case& c, const Answer& answer, double ms, double tolerance) {
    double error = 0;
    std::string problem = answer.code == TF_OK ? Judge(c, answer, tolerance, &error) : answer.message;
    std::lock_guard<std::mutex> lock(mu_);
    latencies_.push_back(ms);
    result_.worst_error = std::max(result_.worst_error, error);
    if (answer.code == TF_DEADLINE_EXCEEDED) {
      ++result_.late;
    } else if (answer.code != TF_OK) {
      ++result_.failed;
    } else {
      ++(problem.empty() ? result_.answered : result_.wrong);
    }
    if (answer.code != TF_DEADLINE_EXCEEDED && !problem.empty() && result_.first_problem.empty()) {
      result_.first_problem = problem;
    }
  }

  LoadResult Take(double seconds) {
    std::sort(latencies_.begin(), latencies_.end());
    auto at = [&](double share) {
      return latencies_.empty() ? 0 : latencies_[static_cast<size_t>(share * (latencies_.size() - 1))];
    };
    result_.p50_ms = at(0.5);
    result_.p99_ms = at(0.99);
    result_.largest_ms = at(1);
    result_.seconds = seconds;
    return result_;
  }

 private:
  static std::string Judge(const Case& c, const Answer& answer, double tolerance, double* worst) {
    for (const auto& [name, want] : c.want) {
      double error = RelativeError(answer.outputs.at(name), want);
      *worst = std::max(*worst, error);
      if (!(error <= tolerance)) {
        return "Output '" + name + "' of '" + c.signature->name + "' differs by " + std::to_string(error) +
               " of its largest value";
      }
    }
    return "";
  }

  std::mutex mu_;
  std::vector<double> latencies_;
  LoadResult result_;
};

}  // namespace

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

NamedTensors DrawInputs(const Signature& signature, const LoadOptions& options, int64_t batch, uint64_t seed) {
  std::mt19937_64 rng(seed);
  NamedTensors out;
  for (const Spec& spec : signature.inputs) out.emplace(spec.name, Draw(spec, options, batch, &rng));
  return out;
}

LoadResult RunLoad(const Model& model, const std::vector<Case>& cases, const LoadOptions& options) {
  for (const Case& c : cases) model.Run(*c.signature, c.inputs, 0);  // graphs are optimised and code loaded once
  Tally tally(options.requests);
  std::atomic<int64_t> next{0}, rss_warm{0}, rss_peak{0};
  const int64_t warm = options.requests / 10, rss_before = ResidentBytes();
  auto work = [&] {
    for (int64_t i = next++; i < options.requests; i = next++) {
      const Case& c = cases[static_cast<size_t>(i) % cases.size()];
      Clock::time_point start = Clock::now();
      Answer answer = model.Run(*c.signature, c.inputs, options.deadline_ms);
      tally.Add(c, answer, std::chrono::duration<double, std::milli>(Clock::now() - start).count(), options.tolerance);
      if (i == warm) rss_warm = ResidentBytes();
      if (i % 64 == 0) {
        int64_t now = ResidentBytes(), peak = rss_peak;
        while (now > peak && !rss_peak.compare_exchange_weak(peak, now)) {
        }
      }
    }
  };
  Clock::time_point start = Clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < options.threads; ++i) threads.emplace_back(work);
  for (std::thread& t : threads) t.join();
  LoadResult result = tally.Take(std::chrono::duration<double>(Clock::now() - start).count());
  result.rss_before = rss_before;
  result.rss_warm = rss_warm;
  result.rss_after = ResidentBytes();
  result.rss_peak = std::max<int64_t>(rss_peak, result.rss_after);
  return result;
}

}  // namespace tf_stitch::host
