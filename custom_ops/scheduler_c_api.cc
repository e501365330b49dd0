#include "scheduler_c_api.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "coalescing.h"
#include "files.h"
#include "flat_json.h"
#include "scheduler_error.h"

namespace tf_stitch {
namespace {

constexpr double kMostThreads = 256;  // each lane is one, each worker too

// What a value of an options object may be.
struct Field {
  double least;
  std::function<void(double)> set;
  double most = 1e15;
};

// Reads an options object; "" or a sentence.
std::string ReadOptions(const char* json, const std::map<std::string, Field>& fields,
                        const std::map<std::string, std::function<bool(const std::string&)>>& texts) {
  FlatJson values;
  std::string error = values.Parse(json ? json : "");
  if (!error.empty()) return "The options cannot be read: " + error + ".";
  for (const auto& [name, value] : values.numbers()) {
    auto field = fields.find(name);
    if (field == fields.end()) return "There is no numeric option '" + name + "'.";
    if (value < field->second.least || value > field->second.most) return "Option '" + name + "' is out of range.";
    field->second.set(value);
  }
  for (const auto& [name, value] : values.strings()) {
    auto text = texts.find(name);
    if (text == texts.end()) return "There is no option '" + name + "' that is a string.";
    if (!text->second(value)) return "Option '" + name + "' cannot be '" + value + "'.";
  }
  return "";
}

template <class T>
std::function<void(double)> Into(T* target, double scale = 1) {
  return [target, scale](double value) {
    *target = static_cast<T>(std::min(value * scale, static_cast<double>(std::numeric_limits<T>::max())));
  };
}

std::string ReadSettings(const char* json, CoalescingOptions* out, std::string* estimates) {
  PolicyOptions& policy = out->coalescer.policy;
  return ReadOptions(json,
                     {{"look_ahead_us", {1, Into(&out->coalescer.look_ahead)}},
                      {"alone", {0, Into(&out->coalescer.alone), 1}},
                      {"max_wait_us", {0, Into(&policy.max_wait)}},
                      {"max_pack", {1, Into(&policy.max_pack)}},
                      {"max_instances", {1, Into(&policy.max_instances)}},
                      {"drift", {1, Into(&policy.drift)}},
                      {"under_way", {1, Into(&policy.under_way)}},
                      {"workers", {1, Into(&out->workers), kMostThreads}},
                      {"lanes", {1, Into(&out->lanes), kMostThreads}},
                      {"merge", {0, [&policy](double how) { policy.merge = static_cast<Merge>(how); }, 2}},
                      {"max_merge", {1, Into(&policy.max_merge)}},
                      {"merge_mb", {0, Into(&out->merge_bytes, 1 << 20), 1e6}}},
                     {{"estimates", [estimates](const std::string& s) { return *estimates = s, true; }}});
}

// All that Enable needs to know.
struct Settings {
  CoalescingOptions options;
  std::string estimates_file, estimates;

  std::string Read(const char* json);
};

std::string ReadTenant(const char* json, TenantOptions* out) {
  auto priority = [out](const std::string& s) {
    out->best_effort = s == "best_effort";
    return out->best_effort || s == "latency";
  };
  return ReadOptions(json,
                     {{"slo_ms", {0, Into(&out->slo, 1000)}},
                      {"weight", {1e-6, Into(&out->weight)}},
                      {"max_in_flight", {0, Into(&out->max_in_flight)}},
                      {"max_queue", {0, Into(&out->max_queue)}}},
                     {{"priority", priority}});
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// "" or a sentence.
std::string Settings::Read(const char* json) {
  std::string error = ReadSettings(json, &options, &estimates_file);
  if (!error.empty()) return error;
  estimates = estimates_file.empty() ? "" : ReadFile(estimates_file);
  error = Estimates().Load(estimates);
  return error.empty() ? "" : "The measured times in '" + estimates_file + "' cannot be read: " + error + ".";
}

void Add(const TenantStats& from, TenantStats* to) {
  to->requests += from.requests;
  for (size_t i = 0; i < from.outcomes.size(); ++i) to->outcomes[i] += from.outcomes[i];
  to->missed_deadline += from.missed_deadline;
  to->device_us += from.device_us;
  for (size_t i = 0; i < from.latency_counts.size(); ++i) to->latency_counts[i] += from.latency_counts[i];
  to->latency_sum_ms += from.latency_sum_ms;
}

// One tenant's figures, over all devices.
struct TenantReport {
  TenantOptions options;
  TenantStats stats;
  int64_t in_flight = 0, queued = 0;
  bool throttled = false;
  double drift = 1;
};

std::string Json(const TenantReport& t) {
  auto count = [](int64_t n) { return std::to_string(n); };
  auto outcome = [&](Outcome o) { return count(t.stats.outcomes[static_cast<size_t>(o)]); };
  std::string bounds, counts;
  for (double b : TenantStats::kBoundsMs) bounds += (bounds.empty() ? "" : ", ") + NumberJson(b);
  for (int64_t n : t.stats.latency_counts) counts += (counts.empty() ? "" : ", ") + count(n);
  return std::string("{\"priority\": ") + (t.options.best_effort ? "\"best_effort\"" : "\"latency\"") +
         ", \"slo_ms\": " + NumberJson(static_cast<double>(t.options.slo) / 1000) +
         ", \"throttled\": " + (t.throttled ? "true" : "false") + ", \"requests\": " + count(t.stats.requests) +
         ", \"completed\": " + outcome(Outcome::kCompleted) + ", \"rejected\": " + outcome(Outcome::kRejected) +
         ", \"cancelled\": " + outcome(Outcome::kCancelled) + ", \"failed\": " + outcome(Outcome::kFailed) +
         ", \"missed_deadline\": " + count(t.stats.missed_deadline) + ", \"in_flight\": " + count(t.in_flight) +
         ", \"queued\": " + count(t.queued) + ", \"device_us\": " + NumberJson(t.stats.device_us) +
         ", \"drift\": " + NumberJson(t.drift) + ", \"latency_ms\": {\"bounds\": [" + bounds + "], \"counts\": [" +
         counts + "], \"sum\": " + NumberJson(t.stats.latency_sum_ms) + ", \"count\": " + outcome(Outcome::kCompleted) +
         "}}";
}

std::string Json(const Coalescer::Stats& s) {
  auto per = [](double a, double b) { return NumberJson(b > 0 ? a / b : 0); };
  auto superkernels = static_cast<double>(s.counts.superkernels), steps = static_cast<double>(s.counts.steps);
  return "{\"name\": " + QuotedJson(s.device) + ", \"superkernels\": " + NumberJson(superkernels) +
         ", \"steps\": " + NumberJson(steps) + ", \"coalescing_factor\": " + per(steps, superkernels) +
         ", \"merged_requests\": " + std::to_string(s.counts.merged_requests) +
         ", \"merged_runs\": " + std::to_string(s.counts.merged_runs) +
         ", \"unmerged_requests\": " + std::to_string(s.counts.unmerged_requests) +
         ", \"busy_us\": " + NumberJson(s.counts.busy_us) +
         ", \"busy_share\": " + per(s.counts.busy_us, static_cast<double>(s.uptime)) +
         ", \"held\": " + std::to_string(s.held) + ", \"backlog_us\": " + NumberJson(s.backlog_us) + "}";
}

// All coalescers and tenants.  Lives for ever: ops may run while the process ends.
class Registry {
 public:
  static Registry& Get() {
    static Registry& registry = *new Registry;
    return registry;
  }

  bool on() const { return on_; }

  std::string Enable(const char* json) {
    Settings settings;
    std::string error = settings.Read(json);
    if (!error.empty()) return error;
    std::lock_guard<std::mutex> switching(switching_);
    error = StopAll();
    std::lock_guard<std::mutex> lock(mu_);
    settings_ = std::move(settings);
    on_ = true;
    return error;
  }

  std::string Disable() {
    std::lock_guard<std::mutex> switching(switching_);
    return StopAll();
  }

  std::shared_ptr<Coalescer> Of(const void* key, const MakeDevice& make) {
    std::lock_guard<std::mutex> lock(mu_);
    if (!on_) return nullptr;
    auto found = coalescers_.find(key);
    if (found != coalescers_.end()) return found->second;
    std::unique_ptr<Device> device = make(settings_.options);
    if (!device) return nullptr;
    auto coalescer = std::make_shared<Coalescer>(settings_.options.coalescer, std::move(device), settings_.estimates);
    for (const auto& [name, options] : tenants_) coalescer->SetTenant(name, options);
    return coalescers_[key] = coalescer;
  }

  std::string SetTenant(const char* name, const char* json) {
    if (!name || !*name) return "A tenant needs a name.";
    TenantOptions options;
    std::string error = ReadTenant(json, &options);
    if (!error.empty()) return error;
    std::lock_guard<std::mutex> lock(mu_);
    tenants_[name] = options;
    for (auto& [key, coalescer] : coalescers_) coalescer->SetTenant(name, options);
    return "";
  }

  std::string RemoveTenant(const char* name) {
    std::lock_guard<std::mutex> lock(mu_);
    if (!name || !tenants_.erase(name)) return std::string("There is no tenant '") + (name ? name : "") + "'.";
    for (auto& [key, coalescer] : coalescers_) coalescer->RemoveTenant(name);
    retired_.erase(name);
    return "";
  }

  bool Drain(Micros timeout) {
    Micros end = timeout == kNever ? kNever : NowMicros() + timeout;
    for (auto& coalescer : All()) {
      if (!coalescer->Drain(end == kNever ? kNever : std::max<Micros>(end - NowMicros(), 0))) return false;
    }
    return true;
  }

  std::string Stats() {
    std::lock_guard<std::mutex> lock(mu_);
    std::map<std::string, TenantReport> tenants;
    for (const auto& [name, options] : tenants_) tenants[name].options = options;
    for (const auto& [name, stats] : retired_) Add(stats, &tenants[name].stats);
    std::string devices;
    for (auto& [key, coalescer] : coalescers_) {
      devices += (devices.empty() ? "" : ", ") + Json(coalescer->stats());
      for (const auto& [name, t] : coalescer->tenants()) Report(t, &tenants[name]);
    }
    std::string all;
    for (const auto& [name, t] : tenants) all += (all.empty() ? "" : ", ") + QuotedJson(name) + ": " + Json(t);
    return std::string("{\"enabled\": ") + (on_ ? "true" : "false") + ", \"tenants\": {" + all + "}, \"devices\": [" +
           devices + "]}";
  }

 private:
  Registry() {
    const char* value = getenv("TF_STITCH_COALESCE");
    if (!value || !*value || !strcmp(value, "0")) return;
    std::string error = Enable(strcmp(value, "1") ? value : "");
    if (!error.empty()) fprintf(stderr, "tf_stitch: TF_STITCH_COALESCE is not used: %s\n", error.c_str());
  }

  static void Report(const Policy::Tenant& t, TenantReport* out) {
    Add(t.stats, &out->stats);
    out->in_flight += t.in_flight;
    out->queued += static_cast<int64_t>(t.queue.size());
    out->throttled |= t.throttled;
    out->drift = std::max(out->drift, t.ratio);
  }

  std::vector<std::shared_ptr<Coalescer>> All() {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<std::shared_ptr<Coalescer>> all;
    for (auto& [key, coalescer] : coalescers_) all.push_back(coalescer);
    return all;
  }

  // Ends all coalescers; their figures and measured times are kept.
  std::string StopAll() {
    std::map<const void*, std::shared_ptr<Coalescer>> stopped;
    {
      std::lock_guard<std::mutex> lock(mu_);
      on_ = false;
      stopped.swap(coalescers_);
    }
    Estimates all;
    all.Load(settings_.estimates);
    for (auto& [key, coalescer] : stopped) {
      coalescer->Stop();
      all.Load(coalescer->estimates());
      std::lock_guard<std::mutex> lock(mu_);
      for (const auto& [name, t] : coalescer->tenants()) Add(t.stats, &retired_[name]);
    }
    const std::string& file = settings_.estimates_file;
    if (file.empty() || stopped.empty() || WriteWhole(file, all.Save())) return "";
    return "The file '" + file + "' cannot be written.";
  }

  std::mutex switching_;  // one Enable or Disable at a time
  std::mutex mu_;         // of what follows
  std::atomic<bool> on_{false};
  Settings settings_;
  std::map<const void*, std::shared_ptr<Coalescer>> coalescers_;
  std::map<std::string, TenantOptions> tenants_;
  std::map<std::string, TenantStats> retired_;  // of coalescers that have stopped
};

thread_local std::string g_error;

}  // namespace

int SchedulerResult(std::string error) {
  g_error = std::move(error);
  return g_error.empty() ? 0 : 1;
}

std::shared_ptr<Coalescer> CoalescerOf(const void* key, const MakeDevice& make) {
  Registry& registry = Registry::Get();
  return registry.on() ? registry.Of(key, make) : nullptr;
}

}  // namespace tf_stitch

extern "C" {

using tf_stitch::Registry;
using tf_stitch::SchedulerResult;

int tfs_scheduler_enable(const char* options_json) { return SchedulerResult(Registry::Get().Enable(options_json)); }

int tfs_scheduler_check(const char* options_json) { return SchedulerResult(tf_stitch::Settings().Read(options_json)); }

void tfs_scheduler_disable(void) { SchedulerResult(Registry::Get().Disable()); }

int tfs_scheduler_enabled(void) { return Registry::Get().on(); }

int tfs_scheduler_set_tenant(const char* name, const char* options_json) {
  return SchedulerResult(Registry::Get().SetTenant(name, options_json));
}

int tfs_scheduler_remove_tenant(const char* name) { return SchedulerResult(Registry::Get().RemoveTenant(name)); }

int64_t tfs_scheduler_stats_json(char* buffer, int64_t size) {
  std::string text = Registry::Get().Stats();
  if (buffer && size > 0) {
    size_t length = std::min(text.size(), static_cast<size_t>(size - 1));
    memcpy(buffer, text.data(), length);
    buffer[length] = 0;
  }
  return static_cast<int64_t>(text.size() + 1);
}

int tfs_scheduler_drain(int64_t timeout_ms) {
  constexpr int64_t kLongest = 1'000'000'000'000;  // 30 years: more are no limit, and no clock's numbers
  bool is_limited = timeout_ms >= 0 && timeout_ms < kLongest;
  bool drained = Registry::Get().Drain(is_limited ? timeout_ms * 1000 : tf_stitch::kNever);
  return SchedulerResult(drained ? "" : "Requests are still held after " + std::to_string(timeout_ms) + " ms.");
}

const char* tfs_scheduler_last_error(void) { return tf_stitch::g_error.c_str(); }
}
