// Copies through page-locked memory over a stand-in for the CUDA driver whose streams run late: what a copy takes must
// be what was there when it was enqueued.  Prints the blocks made.  And who looks, while it waits, and who sleeps.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../custom_ops/staging_cuda.h"
#include "stand_in_load.h"

namespace tf_stitch::cuda {

struct EventTag {
  bool done = true;
};
struct StreamTag {
  int priority = 0;
  std::deque<std::function<void()>> work;
};

namespace {

std::mutex g_mu;
std::map<const char*, size_t> g_locked;  // page-locked memory: where it begins, how long it is
size_t g_locked_bytes = 0, g_most_bytes = 0;
int g_made = 0, g_events = 0;
bool g_no_memory = false;
std::atomic<int> g_staying{0};  // threads that look until g_over
std::atomic<bool> g_over{false};
thread_local bool t_stays = false;                    // this thread is one of them
thread_local bool t_looked = false, t_slept = false;  // which of the two it did first

void RunSome(Stream stream, size_t count) {
  std::lock_guard<std::mutex> lock(g_mu);
  for (; count && !stream->work.empty(); --count) {
    stream->work.front()();
    stream->work.pop_front();
  }
}

Driver Make() {
  Driver d{};
  d.CtxPushCurrent = [](Context) { return 0; };
  d.CtxPopCurrent = [](Context*) { return 0; };
  d.ThreadExchangeStreamCaptureMode = [](int*) { return 0; };
  d.EventCreate = [](Event* e, unsigned) { return *e = new EventTag, ++g_events, 0; };
  d.EventDestroy = [](Event e) { return delete e, --g_events, 0; };
  d.EventQuery = [](Event e) {
    t_looked |= !t_slept;
    if (t_stays) {
      for (++g_staying; !g_over;) std::this_thread::yield();
    }
    std::lock_guard<std::mutex> lock(g_mu);
    return e->done ? 0 : kNotReady;
  };
  d.EventSynchronize = [](Event e) {
    t_slept |= !t_looked;
    while (LoadDriver(nullptr)->EventQuery(e)) std::this_thread::yield();
    return 0;
  };
  d.EventRecord = [](Event e, Stream s) {
    std::lock_guard<std::mutex> lock(g_mu);
    e->done = false;
    return s->work.push_back([e] { e->done = true; }), 0;
  };
  d.MemAllocHost = [](void** p, size_t bytes) {
    std::lock_guard<std::mutex> lock(g_mu);
    if (g_no_memory) return 2;
    *p = malloc(bytes);
    g_locked[static_cast<char*>(*p)] = bytes;
    g_locked_bytes += bytes;
    g_most_bytes = std::max(g_most_bytes, g_locked_bytes);
    return ++g_made, 0;
  };
  d.MemFreeHost = [](void* p) {
    std::lock_guard<std::mutex> lock(g_mu);
    auto it = g_locked.find(static_cast<char*>(p));
    g_locked_bytes -= it->second;
    g_locked.erase(it);
    return free(p), 0;
  };
  d.MemcpyHtoDAsync = [](void* to, const void* from, size_t bytes, Stream s) {
    std::lock_guard<std::mutex> lock(g_mu);
    return s->work.push_back([=] { memcpy(to, from, bytes); }), 0;  // of pageable memory too: a device may read that
  };
  d.StreamGetPriority = [](Stream s, int* out) { return *out = s->priority, 0; };
  d.StreamSynchronize = [](Stream s) { return RunSome(s, SIZE_MAX), 0; };
  return d;
}

}  // namespace
}  // namespace tf_stitch::cuda

namespace {

using namespace tf_stitch::cuda;

struct Copied {
  std::string want;
  std::vector<char> got;
};

// Copies of two pieces from memory that changes right after each.
void CopyMany(Staging* staging, uint64_t seed, size_t most) {
  std::mt19937_64 rng(seed);
  StreamTag stream;
  std::deque<Copied> all;
  for (int i = 0; i < 300; ++i) {
    std::string first(rng() % most + 1, static_cast<char>('a' + rng() % 26)), second(rng() % most, 'z');
    size_t at = (first.size() + 255) / 256 * 256;
    all.push_back({first + std::string(at - first.size(), '?') + second, std::vector<char>(at + second.size(), '?')});
    Copied& c = all.back();
    if (staging->Copy({{first.data(), first.size(), 0}, {second.data(), second.size(), at}}, c.got.size(), c.got.data(),
                      &stream)) {
      fprintf(stderr, "a copy failed\n"), exit(1);
    }
    first.assign(first.size(), '!');
    second.assign(second.size(), '!');
    if (rng() % 3 == 0) RunSome(&stream, rng() % 40);
  }
  std::atomic<bool> waited{false};
  std::thread device([&] {
    while (!waited) RunSome(&stream, 3);
  });
  if (staging->Wait(&stream)) fprintf(stderr, "a wait failed\n"), exit(1);
  waited = true;
  device.join();
  if (!stream.work.empty()) fprintf(stderr, "a wait ended early\n"), exit(1);
  for (const Copied& c : all) {
    for (size_t i = 0; i < c.want.size(); ++i) {
      if (c.want[i] != '?' && c.want[i] != c.got[i]) fprintf(stderr, "a copy took other bytes\n"), exit(1);
    }
  }
}

// True when a thread that waits for a stream of this priority looks, while others already do so for two streams.
bool Looks(int priority) {
  Staging staging(*LoadDriver(nullptr), nullptr);
  g_staying = 0, g_over = false;
  StreamTag busy[2], mine;
  mine.priority = priority;
  std::vector<std::thread> threads;
  for (StreamTag& stream : busy) {
    threads.emplace_back([&] { t_stays = true, staging.Wait(&stream); });
  }
  while (g_staying < 2) std::this_thread::yield();
  std::atomic<bool> waited{false};
  bool slept = false;
  std::thread device([&] {
    while (!waited) RunSome(&mine, 1);
    for (StreamTag& stream : busy) RunSome(&stream, 1);
    g_over = true;
  });
  std::thread one([&] { staging.Wait(&mine), slept = t_slept, waited = true; });
  one.join(), device.join();
  for (auto& t : threads) t.join();
  return !slept;
}

}  // namespace

int main(int argc, char** argv) {
  std::string how = argc > 1 ? argv[1] : "";
  if (how == "waits") {
    for (int priority : {0, -1}) printf("%d\n", Looks(priority));
    return 0;
  }
  g_no_memory = how == "no-memory";
  {
    Staging staging(*LoadDriver(nullptr), nullptr);
    std::vector<std::thread> threads;
    size_t most = how == "large" ? size_t{4} << 20 : 40000;
    for (uint64_t t = 0; t < (how == "large" ? 1 : 4); ++t) threads.emplace_back(CopyMany, &staging, t, most);
    for (auto& t : threads) t.join();
  }
  if (g_locked_bytes || g_events) fprintf(stderr, "memory or events are left over\n"), exit(1);
  if (g_most_bytes > Staging::kMostBytes) fprintf(stderr, "too much memory\n"), exit(1);
  printf("%d\n", g_made);
}
