// Holds requests and runs their programs as superkernels: threads and lifetimes around the policy (scheduler.h).
//
// Plain C++: what a superkernel does is a Device's matter (coalesce_host.h, coalesce_cuda.h), what a request is, and
// what becomes of it, the op's.
#ifndef TF_STITCH_CUSTOM_OPS_COALESCER_H_
#define TF_STITCH_CUSTOM_OPS_COALESCER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "scheduler.h"

namespace tf_stitch {

// The clock of deadlines: steady, in microseconds.
Micros NowMicros();

// One run of a program.
class Request {
 public:
  virtual ~Request() = default;

  // Called exactly once when the request was submitted, from any thread, with no lock held, and when nothing of it is
  // under way on the device.  kCompleted: all units have run.  Else `why` says what happened, or is "": then, after
  // kFailed, the device refused to compute and what the program replaces has to run.
  virtual void Done(Outcome outcome, const std::string& why) = 0;

  std::string tenant;
  std::shared_ptr<const Work> work;  // at least one unit
  MergeKey merge;
  Micros deadline = kNever;

 private:
  friend class Coalescer;
  uint64_t id_ = 0;
  int under_way_ = 0;  // superkernels on the device that hold units of it
  bool cancelled_ = false;
  bool ended_ = false;  // as follows; answered when nothing is under way
  Outcome outcome_ = Outcome::kCompleted;
  std::string why_;
};

// A request's part in a superkernel.
struct Member {
  Request* request;
  size_t unit;
  size_t count = 1;    // units that were run: a device may run more than the one where nobody else is concerned
  bool leads = false;  // it shares its launches with members behind it, not with those before
  bool failed = false;
  std::string error;  // when failed: as Request::Done's `why`
};

class Device {
 public:
  // A superkernel that was enqueued.  Wait blocks until it has run and returns the microseconds that it took; `error`
  // says why it did not run right: then its members fail.
  struct Ticket {
    virtual ~Ticket() = default;
    virtual double Wait(std::string* error) = 0;
    virtual bool Ended() = 0;  // whether Wait would return at once
  };

  virtual ~Device() = default;
  virtual const std::string& name() const = 0;
  virtual std::vector<LaneKind> lanes() const = 0;
  virtual bool enqueues() const { return false; }  // whether Issue ever gives tickets

  // Runs one unit of each member and returns null, or enqueues them and returns a ticket: then what is enqueued for a
  // member next, on whichever lane, comes after.  One call per lane at a time.  A member that fails does not hurt the
  // others.
  virtual std::unique_ptr<Ticket> Issue(size_t lane, std::vector<Member>* members) = 0;

  // Runs all units of requests of one merge key as one request.  Sets `how`; unless it is kDone nothing of them is
  // under way, and null is returned.  A ticket's error means that none of them has run.
  virtual std::unique_ptr<Ticket> IssueJoined(size_t lane, const std::vector<Request*>& requests, Joining* how);
};

class Coalescer {
 public:
  struct Options {
    PolicyOptions policy;
    Micros look_ahead = 200;  // device time that a lane may have enqueued when it enqueues more
    bool alone = true;        // callers may run requests themselves
  };
  struct Stats {
    std::string device;
    DeviceStats counts;
    size_t held = 0;
    double backlog_us = 0;
    Micros uptime = 0;
  };

  Coalescer(const Options& options, std::unique_ptr<Device> device, const std::string& estimates);
  ~Coalescer();  // stops

  // What becomes of a request.
  enum class Taken : uint8_t {
    kHeld,     // it is answered by Done
    kStopped,  // nothing: the coalescer has stopped; Done is not called
    kAlone     // its caller is to run it, at once and whole, and then to call RanAlone; Done is not called
  };

  // When a caller may run a request itself, which then need not change hands.
  enum class MayRun : uint8_t {
    kNever,
    kWhenIdle,          // nothing else is held or under way
    kBesideBestEffort,  // or only best effort is: the device does first what the caller enqueues
  };

  // Takes a request; while max_instances are held, blocks.
  Taken Submit(const std::shared_ptr<Request>& request, MayRun may_run = MayRun::kNever);

  // Its caller has enqueued a request that was to run alone; without a ticket it failed.
  void RanAlone(std::unique_ptr<Device::Ticket> ticket);

  // Makes a submitted request end soon with kCancelled, unless it is done by then.  Never blocks for long.
  void Cancel(Request* request);

  // Waits until nothing is held; false when `timeout` (kNever: none) passed before.
  bool Drain(Micros timeout);

  // Takes no more requests, answers all that are held, ends the threads.
  void Stop();

  Device& device() const { return *device_; }
  void SetTenant(const std::string& name, const TenantOptions& options);
  void RemoveTenant(const std::string& name);
  Stats stats();
  std::map<std::string, Policy::Tenant> tenants();
  std::string estimates();  // as Estimates::Save gives them

 private:
  struct Pending {
    Superkernel superkernel;
    std::unique_ptr<Device::Ticket> ticket;
  };
  struct Lane {
    LaneKind kind;
    std::deque<Pending> pending;
    double ahead_us = 0;      // estimated time of what is pending
    bool is_issuing = false;  // some thread is
    bool sleeps = false;      // the issuer, until it is woken
    Micros sleeps_until = 0;
    std::condition_variable woken, has_pending;
    std::thread issuer, finisher;
  };
  // A request that its caller runs.  What it took is noted when somebody next asks: nobody waits for it.
  struct Alone {
    uint64_t id = 0;  // 0: there is none
    Superkernel superkernel;
    Micros begin = 0;
    std::unique_ptr<Device::Ticket> ticket;  // null until it was enqueued
  };
  using Gone = std::vector<std::shared_ptr<Request>>;
  using Lock = std::unique_lock<std::mutex>;

  void Issue(size_t lane);
  bool IssueDue(size_t lane, Lock* lock, Micros* wake);
  bool IssueOnSomeLane(Lock* lock, Micros* wake);
  void IssueHere(Lock* lock);
  void Finish(size_t lane);
  void Start(size_t lane, Superkernel superkernel, Lock* lock);
  void StartJoined(size_t lane, Superkernel superkernel, Lock* lock);
  void Restart(Request* request, Gone* gone);
  void Keep(size_t lane, Superkernel superkernel, std::unique_ptr<Device::Ticket> ticket);
  void End(Request* request, Outcome outcome, std::string why, Gone* gone);
  void TakeOut(Request* request, Gone* gone);
  void Answer(Gone* gone, Lock* lock);
  void AnswerCancelled(Lock* lock);
  bool StartAlone(uint64_t id, MayRun may_run);
  void SettleAlone();
  bool WaitForAlone(Micros end, Lock* lock);
  void WaitForRoom(Lock* lock);
  bool HasRoom(const Lane& lane) const;
  void Sleep(Lane* lane, Micros until, Lock* lock);
  void Wake();
  void WakeOthers();
  void WakeOne(Lane* lane);
  bool Idle() const { return requests_.empty() && answering_ == 0; }
  bool Over() const { return stopping_ && Idle() && pending_ == 0; }

  const Options options_;
  const std::unique_ptr<Device> device_;
  const Micros started_;

  std::mutex mu_;
  std::condition_variable room_;  // a request has gone
  Estimates estimates_;
  Policy policy_;
  std::unordered_map<uint64_t, std::shared_ptr<Request>> requests_;
  std::vector<uint64_t> cancelled_;  // to be answered by a lane
  std::vector<Lane> lanes_;
  Alone alone_;
  uint64_t next_id_ = 1;
  size_t answering_ = 0, pending_ = 0;
  bool stopping_ = false;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_COALESCER_H_
