// The TensorFlow side of a run that the scheduler holds: its tenant, its deadline, its cancellation, its end.
#ifndef TF_STITCH_CUSTOM_OPS_HELD_CALL_H_
#define TF_STITCH_CUSTOM_OPS_HELD_CALL_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "coalescer.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_stitch {

// A call of an asynchronous op's kernel.
class HeldCall {
 public:
  explicit HeldCall(tensorflow::OpKernelContext* ctx) : ctx_(ctx) {}

  tensorflow::OpKernelContext* ctx() const { return ctx_; }

  // Hands the request over; it is cancelled when the step is.  Where it is held, its Done has to call End, or Unwatch
  // and what TakeDone gives; else `done` is left alone.  `program` names the tenant where the session does not.  A
  // caller that `may_run` it may have to (Coalescer::Submit).
  Coalescer::Taken Submit(const std::string& program, const std::shared_ptr<Coalescer>& coalescer,
                          const std::shared_ptr<Request>& request, Coalescer::MayRun may_run,
                          tensorflow::AsyncOpKernel::DoneCallback* done);

  // Sets the status that an outcome means (none: it is kCompleted) and ends the call.
  void End(Outcome outcome, const std::string& why);

  // The request is no longer cancelled with the step.
  void Unwatch();
  tensorflow::AsyncOpKernel::DoneCallback TakeDone() { return std::move(done_); }

  // Runs `what` on another thread: whoever calls this is a lane, which others wait for.
  void Continue(std::function<void()> what) const;

 private:
  void Describe(const std::string& program, Request* request) const;
  bool Watch(const std::shared_ptr<Coalescer>& coalescer, const std::shared_ptr<Request>& request);

  tensorflow::OpKernelContext* ctx_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  tensorflow::CancellationToken token_ = tensorflow::CancellationManager::kInvalidToken;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_HELD_CALL_H_
