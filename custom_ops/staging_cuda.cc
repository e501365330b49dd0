#include "staging_cuda.h"

#include <chrono>
#include <cstring>
#include <map>
#include <utility>

#include "pause.h"

namespace tf_stitch::cuda {
namespace {

constexpr size_t kLeastBytes = size_t{16} << 10;
constexpr int kMostLooking = 2;                     // threads: each takes a core
constexpr int kMostUrgent = 8;                      // the same, of streams that go before others
constexpr std::chrono::microseconds kLookFor(500);  // longer waits sleep
constexpr int kMostAsked = 4;                       // blocks, oldest first: where these are not free, hardly any is

size_t BlockBytes(size_t bytes) {
  size_t up = kLeastBytes;
  while (up < bytes) up *= 2;
  return up;
}

}  // namespace

Staging& Staging::Of(const Driver& driver, Context context) {
  static auto& mu = *new std::mutex;
  static auto& all = *new std::map<Context, std::unique_ptr<Staging>>;
  std::lock_guard<std::mutex> lock(mu);
  std::unique_ptr<Staging>& staging = all[context];
  if (!staging) staging = std::make_unique<Staging>(driver, context);
  return *staging;
}

Staging::~Staging() {
  ScopedContext scope(driver_, context_);
  for (const Block& block : blocks_) Free(block);
  for (Event event : events_) driver_.EventDestroy(event);
}

Result Staging::Copy(const std::vector<Piece>& pieces, size_t total, void* to, Stream stream) {
  Block block = Take(total);
  std::vector<char> pageable(block.memory ? 0 : total);
  char* from = block.memory ? block.memory : pageable.data();
  for (const Piece& p : pieces) {
    if (p.bytes) memcpy(from + p.at, p.from, p.bytes);
  }
  Result result = driver_.MemcpyHtoDAsync(to, from, total, stream);
  if (!block.memory) {  // a device that reads pageable memory itself may do so after the copy has returned
    Result waited = driver_.StreamSynchronize(stream);
    return result ? result : waited;
  }
  if (!result) result = driver_.EventRecord(block.copied, stream);
  if (result) driver_.StreamSynchronize(stream);  // nothing else says when the block is free
  std::lock_guard<std::mutex> lock(mu_);
  blocks_.push_back(block);
  return result;
}

Result Staging::Wait(Stream stream) {
  Event event = TakeEvent();
  if (!event) return driver_.StreamSynchronize(stream);
  Result result = driver_.EventRecord(event, stream);
  if (!result) result = WaitFor(event, GoesFirst(driver_, stream) ? kMostUrgent : kMostLooking);
  std::lock_guard<std::mutex> lock(mu_);
  events_.push_back(event);
  return result;
}

// Null when there is none to be had.
Event Staging::TakeEvent() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!events_.empty()) {
      Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  RelaxedCapture relaxed(driver_);
  Event event = nullptr;
  return driver_.EventCreate(&event, kEventDisableTiming | kEventBlockingSync) ? nullptr : event;
}

Result Staging::WaitFor(Event event, int most_looking) {
  Result result = kNotReady;
  if (looking_.fetch_add(1) < most_looking) {
    const auto end = std::chrono::steady_clock::now() + kLookFor;
    while ((result = driver_.EventQuery(event)) == kNotReady && std::chrono::steady_clock::now() < end) {
      Pause();
    }
  }
  --looking_;
  return result == kNotReady ? driver_.EventSynchronize(event) : result;
}

// A block of the size whose copy has run, or a new one; without memory when there is none to be had.
Staging::Block Staging::Take(size_t bytes) {
  bytes = BlockBytes(bytes);
  std::lock_guard<std::mutex> lock(mu_);
  int asked = 0;
  for (auto it = blocks_.begin(); it != blocks_.end() && asked < kMostAsked; ++it) {
    if (it->bytes != bytes) continue;
    ++asked;
    if (driver_.EventQuery(it->copied)) continue;
    Block found = *it;
    blocks_.erase(it);
    return found;
  }
  return bytes_ + bytes <= kMostBytes ? Make(bytes) : Block();
}

Staging::Block Staging::Make(size_t bytes) {
  Block block;
  RelaxedCapture relaxed(driver_);
  void* memory = nullptr;
  if (!driver_.EventCreate(&block.copied, kEventDisableTiming)) {
    if (driver_.MemAllocHost(&memory, bytes)) {
      driver_.EventDestroy(block.copied);
    } else {
      block.memory = static_cast<char*>(memory);
      block.bytes = bytes;
      bytes_ += bytes;
    }
  }
  return block;
}

void Staging::Free(const Block& block) {
  driver_.EventSynchronize(block.copied);
  driver_.EventDestroy(block.copied);
  driver_.MemFreeHost(block.memory);
}

}  // namespace tf_stitch::cuda
