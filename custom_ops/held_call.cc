#include "held_call.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace tf_stitch {
namespace {

using tensorflow::CancellationManager;

// Steps whose executor has no threads of its own (RunOptions.inter_op_thread_pool -1) go on here.
tensorflow::thread::ThreadPool& Threads() {
  static auto& threads =
      *new tensorflow::thread::ThreadPool(tensorflow::Env::Default(), "tf_stitch_answers",
                                          std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 4, 16));
  return threads;
}

absl::Status StatusOf(Outcome outcome, const std::string& name, const std::string& why) {
  switch (outcome) {
    case Outcome::kCompleted:
      return absl::OkStatus();
    case Outcome::kRejected:
      return absl::ResourceExhaustedError(why);
    case Outcome::kCancelled:
      return absl::CancelledError("StitchedProgram '" + name + "' was cancelled.");
    case Outcome::kFailed:
      return absl::InternalError("StitchedProgram '" + name + "': " + why + ".");
  }
  return absl::OkStatus();
}

}  // namespace

void HeldCall::Continue(std::function<void()> what) const {
  if (ctx_->run_all_kernels_inline()) {
    Threads().Schedule(std::move(what));
  } else {
    (*ctx_->runner())(std::move(what));
  }
}

void HeldCall::Describe(const std::string& program, Request* request) const {
  const tensorflow::SessionMetadata* metadata = ctx_->session_metadata();
  request->tenant = metadata && !metadata->name().empty() ? metadata->name() : program;
  if (std::optional<absl::Time> deadline = ctx_->deadline()) {
    Micros now = NowMicros(), left = absl::ToInt64Microseconds(*deadline - absl::Now());
    request->deadline = left < kNever - now ? now + left : kNever;  // a timeout of centuries is none
  }
}

bool HeldCall::Watch(const std::shared_ptr<Coalescer>& coalescer, const std::shared_ptr<Request>& request) {
  CancellationManager* manager = ctx_->cancellation_manager();
  if (!manager) return true;
  token_ = manager->get_cancellation_token();
  bool watched = manager->RegisterCallback(token_, [coalescer, request] { coalescer->Cancel(request.get()); });
  if (!watched) token_ = CancellationManager::kInvalidToken;
  return watched;
}

Coalescer::Taken HeldCall::Submit(const std::string& program, const std::shared_ptr<Coalescer>& coalescer,
                                  const std::shared_ptr<Request>& request, Coalescer::MayRun may_run,
                                  tensorflow::AsyncOpKernel::DoneCallback* done) {
  Describe(program, request.get());
  done_ = *done;
  if (!Watch(coalescer, request)) {
    End(Outcome::kCancelled, "");
    return Coalescer::Taken::kHeld;
  }
  Coalescer::Taken taken = coalescer->Submit(request, may_run);
  if (taken != Coalescer::Taken::kHeld) Unwatch();
  return taken;
}

// A cancellation that is going on now finds a request that is done.
void HeldCall::Unwatch() {
  if (token_ != CancellationManager::kInvalidToken) ctx_->cancellation_manager()->TryDeregisterCallback(token_);
  token_ = CancellationManager::kInvalidToken;
}

void HeldCall::End(Outcome outcome, const std::string& why) {
  Unwatch();
  absl::Status status = StatusOf(outcome, ctx_->op_kernel().name(), why);
  if (!status.ok()) ctx_->SetStatus(status);
  Continue(std::move(done_));
}

}  // namespace tf_stitch
