// Captures of streams, and waiting for a whole context, which do not go together: a driver that is asked to wait for a
// context of which a stream is captured does not wait, and breaks the capture off, whichever threads do so.
#ifndef TF_STITCH_CUSTOM_OPS_CUDA_CAPTURE_H_
#define TF_STITCH_CUSTOM_OPS_CUDA_CAPTURE_H_

#include <chrono>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

// Held shared by whoever captures, alone by whoever waits for a context.
inline std::shared_mutex& CaptureMutex() {
  static auto& mu = *new std::shared_mutex;
  return mu;
}

// Records what `enqueue` enqueues on the stream as a graph, which the caller destroys.  "" or the error; then there is
// none.  `enqueue` must not give device memory or code back: that waits for captures.
inline std::string Capture(const Driver& driver, Stream stream, const std::function<std::string()>& enqueue,
                           Graph* graph) {
  *graph = nullptr;
  std::shared_lock<std::shared_mutex> lock(CaptureMutex());
  Result result = driver.StreamBeginCapture(stream, kCaptureRelaxed);
  if (result) return Failed(driver, result, "starting a capture");
  std::string error = enqueue();
  result = driver.StreamEndCapture(stream, graph);
  if (error.empty() && result) error = Failed(driver, result, "ending a capture");
  if (!error.empty() && *graph) {
    driver.GraphDestroy(*graph);
    *graph = nullptr;
  }
  return error;
}

// Waits until the device has done all that it was given in the current context.  False when that cannot be known,
// because somebody else's capture goes on: what the device may use has to be kept then.
inline bool WaitForContext(const Driver& driver) {
  constexpr std::chrono::milliseconds kAgain(1);
  constexpr int kMost = 1000;
  std::unique_lock<std::shared_mutex> lock(CaptureMutex());
  for (int i = 0; i < kMost; ++i, std::this_thread::sleep_for(kAgain)) {
    // Of a device that has failed nothing runs any more.
    if (driver.CtxSynchronize() != kCaptureUnsupported) return true;
  }
  return false;
}

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_CUDA_CAPTURE_H_
