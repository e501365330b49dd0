// Chooses the fastest of several ways to do one thing by timing them on the device, and keeps choices on disk.
//
// Plain C++ over the CUDA driver API.  TF_STITCH_AUTOTUNE=0 turns measurements off: then the first way is taken, which
// is the library's own heuristic, and two runs of a program always take the same one.
#ifndef TF_STITCH_CUSTOM_OPS_AUTOTUNE_H_
#define TF_STITCH_CUSTOM_OPS_AUTOTUNE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

// False when TF_STITCH_AUTOTUNE=0 and while this thread forbids it.
bool TuningAllowed();

// Forbids measurements by this thread while it lives (a stream is being captured; results must be deterministic).
class NoTuning {
 public:
  explicit NoTuning(bool forbid);
  NoTuning(const NoTuning&) = delete;
  NoTuning& operator=(const NoTuning&) = delete;
  ~NoTuning();

 private:
  bool before_;
};

// A stream that waits for no other, so that nothing of TensorFlow's, least of all a capture, is disturbed.
class OwnStream {
 public:
  explicit OwnStream(const Driver& driver);
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream();
  Stream get() const { return stream_; }  // null when it could not be made

 private:
  const Driver& driver_;
  Stream stream_ = nullptr;
};

// Device memory that is all zero.  The current context's; empty when there is not enough.
class Scratch {
 public:
  Scratch(const Driver& driver, size_t bytes);
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();
  char* get() const { return memory_; }

 private:
  const Driver& driver_;
  char* memory_ = nullptr;
};

// Enqueues the work of one candidate; `round` counts 0, 1, ... so that operands can change place in memory between
// rounds.  "" or an error.
using RunCandidate = std::function<std::string(int candidate, int round, Stream stream)>;

constexpr int kTuningRounds = 8;            // `round` is below this
constexpr double kTuningMilliseconds = 40;  // of one choice; the first few candidates are timed in any case

// A size that stands for all sizes which share a choice: itself up to 16, then the next power of two.
int64_t SizeClass(int64_t size);

// The fastest candidate of 0 .. count - 1, or -1 when none could be timed.  Each is run as a CUDA graph on a stream of
// its own.  A candidate that fails or cannot be captured is left out.  Candidates that come first win ties of 3%.
int Fastest(const Driver& driver, int count, const RunCandidate& run, double milliseconds = kTuningMilliseconds);

// Choices of this process and on disk, a file each in the cache folder (TF_STITCH_CACHE).  `key` says all that the
// choice depends on: device, driver, library version, shape and flags.  A damaged file counts as none and is noted.
std::optional<std::string> ReadChoice(const std::string& key);
void WriteChoice(const std::string& key, const std::string& choice);

// "H200, driver 13000": the part of a key that all choices on the current context's device share.
std::string DeviceKey(const Driver& driver);

// Takes what users should know: that a file is damaged, that the folder cannot be written.  Standard error by default.
void SetNoteHandler(void (*handler)(const std::string&));
void Note(const std::string& note);

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_AUTOTUNE_H_
