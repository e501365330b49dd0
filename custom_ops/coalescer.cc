#include "coalescer.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace tf_stitch {

namespace {

// Nobody tells of the end of a request that its caller runs: while others may wait for it, it is looked for so often.
constexpr Micros kLookAgain = 100;
constexpr int kMostHere = 2;              // superkernels that a thread issues which has other things to do
constexpr unsigned long kSlackNs = 1000;  // of this long is a wait for the device prolonged, not of Linux's 50 us

}  // namespace

Micros NowMicros() {
  using std::chrono::duration_cast, std::chrono::microseconds, std::chrono::steady_clock;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

std::unique_ptr<Device::Ticket> Device::IssueJoined(size_t, const std::vector<Request*>&, Joining* how) {
  *how = Joining::kNever;
  return nullptr;
}

Coalescer::Coalescer(const Options& options, std::unique_ptr<Device> device, const std::string& estimates)
    : options_(options),
      device_(std::move(device)),
      started_(NowMicros()),
      policy_(options.policy, &estimates_),
      lanes_(device_->lanes().size()) {
  estimates_.Load(estimates);
  std::vector<LaneKind> kinds = device_->lanes();
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].kind = kinds[i];  // before any thread looks
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].issuer = std::thread([this, i] { Issue(i); });
    if (device_->enqueues()) lanes_[i].finisher = std::thread([this, i] { Finish(i); });
  }
}

Coalescer::~Coalescer() { Stop(); }

// --- what callers do -----------------------------------------------------------------------------------

Coalescer::Taken Coalescer::Submit(const std::shared_ptr<Request>& request, MayRun may_run) {
  Lock lock(mu_);
  SettleAlone();
  request->id_ = next_id_++;
  Policy::Verdict verdict{Policy::Verdict::kFull, ""};
  while (!stopping_ && !request->cancelled_ && verdict.kind == Policy::Verdict::kFull) {
    verdict =
        policy_.Admit(request->id_, request->tenant, request->work, request->deadline, NowMicros(), request->merge);
    if (verdict.kind == Policy::Verdict::kFull) WaitForRoom(&lock);
  }
  if (verdict.kind == Policy::Verdict::kHeld) {
    if (StartAlone(request->id_, may_run)) return Taken::kAlone;
    requests_.emplace(request->id_, request);
    may_run != MayRun::kNever && device_->enqueues() ? IssueHere(&lock) : Wake();
    return Taken::kHeld;
  }
  if (verdict.kind == Policy::Verdict::kFull && !request->cancelled_) return Taken::kStopped;
  request->outcome_ = verdict.kind == Policy::Verdict::kRejected ? Outcome::kRejected : Outcome::kCancelled;
  request->why_ = std::move(verdict.why);
  Gone gone{request};
  Answer(&gone, &lock);
  return Taken::kHeld;
}

// --- a request alone ---------------------------------------------------------------------------------------

// Whether the request, just admitted, is to be run by its caller now.
bool Coalescer::StartAlone(uint64_t id, MayRun may_run) {
  if (may_run == MayRun::kNever || !options_.alone || alone_.id || stopping_) return false;
  bool idle = requests_.empty() && pending_ == 0;
  Micros now = NowMicros();
  if (!idle && may_run != MayRun::kBesideBestEffort) return false;
  if (!policy_.NextAlone(id, now, &alone_.superkernel)) return false;
  policy_.Extend(&alone_.superkernel, id, SIZE_MAX);
  alone_.superkernel.launched = alone_.superkernel.steps;  // nothing is shared
  alone_.id = id;
  alone_.begin = now;
  return true;
}

void Coalescer::RanAlone(std::unique_ptr<Device::Ticket> ticket) {
  Lock lock(mu_);
  if (ticket) {
    alone_.ticket = std::move(ticket);
  } else {
    policy_.Finished(alone_.superkernel, alone_.superkernel.estimate_us, NowMicros());
    policy_.Remove(alone_.id, Outcome::kFailed, NowMicros());
    alone_ = {};
  }
  room_.notify_all();
}

// Notes the end of a request that ran alone, if it has ended.
void Coalescer::SettleAlone() {
  if (!alone_.ticket || !alone_.ticket->Ended()) return;
  std::string error;
  double us = alone_.ticket->Wait(&error);
  if (!error.empty()) us = alone_.superkernel.estimate_us;
  Micros end = alone_.begin + static_cast<Micros>(us);
  policy_.Finished(alone_.superkernel, us, end);
  policy_.Remove(alone_.id, error.empty() ? Outcome::kCompleted : Outcome::kFailed, end);
  alone_ = {};
}

// Until none runs; false when it does at `end` (kNever: waits for it).
bool Coalescer::WaitForAlone(Micros end, Lock* lock) {
  while (SettleAlone(), alone_.id) {
    if (NowMicros() >= end) return false;
    room_.wait_for(*lock, std::chrono::microseconds(kLookAgain));
  }
  return true;
}

void Coalescer::WaitForRoom(Lock* lock) {
  if (alone_.id) {
    room_.wait_for(*lock, std::chrono::microseconds(kLookAgain));
    SettleAlone();
  } else {
    room_.wait(*lock);
  }
}

// --- what callers do, continued --------------------------------------------------------------------------------

// A lane answers: the caller may hold locks that the answer needs.
void Coalescer::Cancel(Request* request) {
  Lock lock(mu_);
  request->cancelled_ = true;
  room_.notify_all();
  if (!requests_.count(request->id_)) return;
  cancelled_.push_back(request->id_);
  auto asleep = std::find_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.sleeps; });
  if (asleep != lanes_.end()) WakeOne(&*asleep);
}

bool Coalescer::Drain(Micros timeout) {
  Lock lock(mu_);
  Micros end = timeout == kNever ? kNever : NowMicros() + timeout;
  auto idle = [this] { return Idle() && pending_ == 0; };
  if (timeout == kNever) {
    room_.wait(lock, idle);
  } else if (!room_.wait_for(lock, std::chrono::microseconds(timeout), idle)) {
    return false;
  }
  return WaitForAlone(end, &lock);
}

void Coalescer::Stop() {
  {
    Lock lock(mu_);
    stopping_ = true;
    Wake();
    room_.notify_all();
    WaitForAlone(kNever, &lock);
  }
  for (Lane& lane : lanes_) {
    if (lane.issuer.joinable()) lane.issuer.join();
    if (lane.finisher.joinable()) lane.finisher.join();
  }
}

void Coalescer::SetTenant(const std::string& name, const TenantOptions& options) {
  Lock lock(mu_);
  policy_.SetTenant(name, options);
}

void Coalescer::RemoveTenant(const std::string& name) {
  Lock lock(mu_);
  SettleAlone();
  policy_.RemoveTenant(name);
}

Coalescer::Stats Coalescer::stats() {
  Lock lock(mu_);
  SettleAlone();
  Micros now = NowMicros();
  return {device_->name(), policy_.device_stats(now), policy_.held(), policy_.backlog_us(), now - started_};
}

std::map<std::string, Policy::Tenant> Coalescer::tenants() {
  Lock lock(mu_);
  SettleAlone();
  return policy_.tenants();
}

std::string Coalescer::estimates() {
  Lock lock(mu_);
  return estimates_.Save();
}

// --- lanes -----------------------------------------------------------------------------------------------

bool Coalescer::HasRoom(const Lane& lane) const {
  return lane.pending.empty() || lane.ahead_us < static_cast<double>(options_.look_ahead);
}

// The issuer waits until it is woken, or until a time.
void Coalescer::Sleep(Lane* lane, Micros until, Lock* lock) {
  lane->sleeps = true;
  lane->sleeps_until = until;
  if (until == kNever) {
    lane->woken.wait(*lock);
  } else {
    lane->woken.wait_for(*lock, std::chrono::microseconds(std::max<Micros>(until - NowMicros(), 1)));
  }
  lane->sleeps = false;
}

void Coalescer::WakeOne(Lane* lane) {
  lane->sleeps = false;
  lane->woken.notify_one();
}

// There may be something to issue: one lane of each kind has a look, and wakes the next when it leaves something.
void Coalescer::Wake() {
  bool looks[3] = {};
  for (Lane& lane : lanes_) {
    bool& one_looks = looks[static_cast<size_t>(lane.kind)];
    if (stopping_) lane.has_pending.notify_all();
    if (!lane.sleeps || (!stopping_ && (one_looks || !HasRoom(lane)))) continue;
    one_looks = true;
    WakeOne(&lane);
  }
}

// More may be due than what this thread is issuing: where that takes as long as running it, on another lane.  Else this
// thread, or who comes next, issues that too.
void Coalescer::WakeOthers() {
  if (stopping_ || (policy_.any_ready() && !device_->enqueues())) Wake();
}

void Coalescer::Issue(size_t index) {
  Lane& lane = lanes_[index];
  Lock lock(mu_);
  while (!Over()) {
    AnswerCancelled(&lock);
    SettleAlone();
    Micros wake = kNever;
    bool issued = device_->enqueues() ? IssueOnSomeLane(&lock, &wake) : IssueDue(index, &lock, &wake);
    if (!issued && !Over()) {
      if (alone_.id && !requests_.empty()) wake = std::min(wake, NowMicros() + kLookAgain);
      Sleep(&lane, wake, &lock);
    }
  }
  Wake();
}

// Issues what is due on a lane, unless another thread issues there.  False when there was nothing; then *wake is when
// to ask again, as Policy::Next gives it.
bool Coalescer::IssueDue(size_t index, Lock* lock, Micros* wake) {
  Lane& lane = lanes_[index];
  Superkernel superkernel;
  if (lane.is_issuing || !HasRoom(lane)) return false;
  if (!policy_.Next(lane.kind, NowMicros(), &superkernel, wake)) return false;
  lane.is_issuing = true;
  superkernel.joined ? StartJoined(index, std::move(superkernel), lock) : Start(index, std::move(superkernel), lock);
  lane.is_issuing = false;
  return true;
}

// On the lane of each kind that has the least before it: what runs on lanes of their own runs side by side.
bool Coalescer::IssueOnSomeLane(Lock* lock, Micros* wake) {
  size_t best[3] = {SIZE_MAX, SIZE_MAX, SIZE_MAX};
  for (size_t i = 0; i < lanes_.size(); ++i) {
    size_t& best_here = best[static_cast<size_t>(lanes_[i].kind)];
    if (lanes_[i].is_issuing || !HasRoom(lanes_[i])) continue;
    if (best_here == SIZE_MAX || lanes_[i].ahead_us < lanes_[best_here].ahead_us) best_here = i;
  }
  for (size_t i : best) {
    Micros when = kNever;
    if (i != SIZE_MAX && IssueDue(i, lock, &when)) return true;
    *wake = std::min(*wake, when);
  }
  return false;
}

// A caller, or who saw the end of a superkernel, issues what is due itself: no thread has to be woken for it.
void Coalescer::IssueHere(Lock* lock) {
  Micros wake = kNever;
  int issued = 0;
  while (issued < kMostHere && IssueOnSomeLane(lock, &wake)) ++issued;
  if (!policy_.any_ready()) return;
  auto looks = [&](const Lane& lane) { return lane.sleeps && lane.sleeps_until <= wake; };
  if (issued < kMostHere && !alone_.id && std::any_of(lanes_.begin(), lanes_.end(), looks)) return;
  Wake();
}

void Coalescer::Start(size_t index, Superkernel superkernel, Lock* lock) {
  std::vector<Member> members;
  for (uint64_t id : superkernel.members) {
    Member m;
    m.request = requests_.at(id).get();
    m.unit = policy_.NextUnit(id);
    ++m.request->under_way_;
    members.push_back(std::move(m));
  }
  WakeOthers();
  lock->unlock();
  Micros begin = NowMicros();
  std::unique_ptr<Device::Ticket> ticket = device_->Issue(index, &members);
  Micros end = NowMicros();
  lock->lock();
  Gone gone;
  superkernel.launched = 0;
  for (Member& m : members) {
    policy_.Extend(&superkernel, m.request->id_, m.count);
    superkernel.launched += m.leads;
  }
  if (superkernel.launched > 1) superkernel.parts.clear();  // nothing was measured of so many together
  superkernel.launched = std::max<size_t>(superkernel.launched, 1);
  for (Member& m : members) {
    if (!ticket) --m.request->under_way_;
    if (m.failed) {
      End(m.request, Outcome::kFailed, std::move(m.error), &gone);
    } else if (m.request->cancelled_) {
      End(m.request, Outcome::kCancelled, "", &gone);
    } else if (!policy_.Advance(m.request->id_, m.count, end)) {
      End(m.request, Outcome::kCompleted, "", &gone);
    }
  }
  if (ticket) {
    Keep(index, std::move(superkernel), std::move(ticket));
  } else {
    policy_.Finished(superkernel, static_cast<double>(std::max<Micros>(end - begin, 1)), end);
  }
  WakeOthers();
  Answer(&gone, lock);
}

void Coalescer::Finish(size_t index) {
  prctl(PR_SET_TIMERSLACK, kSlackNs);
  Lane& lane = lanes_[index];
  Lock lock(mu_);
  while (true) {
    lane.has_pending.wait(lock, [&] { return !lane.pending.empty() || Over(); });
    if (lane.pending.empty()) return;
    Device::Ticket* ticket = lane.pending.front().ticket.get();
    lock.unlock();
    std::string error;
    double us = ticket->Wait(&error);
    lock.lock();
    Pending done = std::move(lane.pending.front());
    lane.pending.pop_front();
    lane.ahead_us = lane.pending.empty() ? 0 : lane.ahead_us - done.superkernel.estimate_us;
    if (done.superkernel.joined) {
      policy_.Joined(done.superkernel, error.empty() ? Joining::kDone : Joining::kFailed);
      if (!error.empty()) done.superkernel.parts.clear();  // nothing was measured
    }
    policy_.Finished(done.superkernel, error.empty() ? us : done.superkernel.estimate_us, NowMicros());
    Gone gone;
    for (uint64_t id : done.superkernel.members) {
      Request* request = requests_.at(id).get();
      --request->under_way_;
      if (!error.empty() && done.superkernel.joined) {
        Restart(request, &gone);
      } else if (!error.empty()) {
        End(request, Outcome::kFailed, error, &gone);
      } else if (request->ended_) {
        TakeOut(request, &gone);
      }
    }
    SettleAlone();
    IssueHere(&lock);  // before the answers: the device may have nothing to do
    Answer(&gone, &lock);
    lock.unlock();
    done.ticket.reset();  // may give device resources back
    lock.lock();
    --pending_;
    if (stopping_) Wake();
    room_.notify_all();
  }
}

// The whole of requests, as one.
void Coalescer::StartJoined(size_t index, Superkernel superkernel, Lock* lock) {
  std::vector<Request*> requests;
  for (uint64_t id : superkernel.members) {
    requests.push_back(requests_.at(id).get());
    ++requests.back()->under_way_;
  }
  WakeOthers();
  lock->unlock();
  Joining how = Joining::kDone;
  Micros begin = NowMicros();
  std::unique_ptr<Device::Ticket> ticket = device_->IssueJoined(index, requests, &how);
  Micros end = NowMicros();
  lock->lock();
  Gone gone;
  for (Request* request : requests) {
    if (!ticket) --request->under_way_;
    if (how != Joining::kDone) {
      Restart(request, &gone);
    } else {
      policy_.Advance(request->id_, request->work->units.size(), end);
      End(request, request->cancelled_ ? Outcome::kCancelled : Outcome::kCompleted, "", &gone);
    }
  }
  if (!ticket) {
    policy_.Joined(superkernel, how);
    if (how != Joining::kDone) superkernel.parts.clear();  // nothing was measured
    double us = static_cast<double>(std::max<Micros>(end - begin, 1));
    policy_.Finished(superkernel, how == Joining::kDone ? us : superkernel.estimate_us, end);
  } else {
    Keep(index, std::move(superkernel), std::move(ticket));
  }
  WakeOthers();
  Answer(&gone, lock);
}

// A request whose joined run has come to nothing begins again, by itself.
void Coalescer::Restart(Request* request, Gone* gone) {
  request->ended_ = false;
  if (request->cancelled_) return End(request, Outcome::kCancelled, "", gone);
  policy_.Restart(request->id_, NowMicros());
}

// A ticket is waited for by the lane's finisher.
void Coalescer::Keep(size_t index, Superkernel superkernel, std::unique_ptr<Device::Ticket> ticket) {
  Lane& lane = lanes_[index];
  lane.ahead_us += superkernel.estimate_us;
  lane.pending.push_back({std::move(superkernel), std::move(ticket)});
  lane.has_pending.notify_one();
  ++pending_;
}

// --- answers -----------------------------------------------------------------------------------------------

// Nothing more of the request is scheduled.
void Coalescer::End(Request* request, Outcome outcome, std::string why, Gone* gone) {
  request->ended_ = true;
  request->outcome_ = outcome;
  request->why_ = std::move(why);
  TakeOut(request, gone);
}

// Once the device has nothing of it under way, an ended request is to be answered.
void Coalescer::TakeOut(Request* request, Gone* gone) {
  if (request->under_way_ > 0) {
    policy_.Retire(request->id_);
    return;
  }
  policy_.Remove(request->id_, request->outcome_, NowMicros());
  auto found = requests_.find(request->id_);
  gone->push_back(std::move(found->second));
  requests_.erase(found);
  room_.notify_all();  // before it is answered: who gets the answer may be who waits for room
}

// Calls Done, with the lock released.
void Coalescer::Answer(Gone* gone, Lock* lock) {
  if (gone->empty()) return;
  answering_ += gone->size();
  lock->unlock();
  for (std::shared_ptr<Request>& request : *gone) {
    request->Done(request->outcome_, request->why_);
    request.reset();
  }
  lock->lock();
  answering_ -= gone->size();
  room_.notify_all();
  if (stopping_) Wake();
}

void Coalescer::AnswerCancelled(Lock* lock) {
  Gone gone;
  for (uint64_t id : cancelled_) {  // one whose turn it is now ends when it comes back
    auto found = requests_.find(id);
    if (found == requests_.end() || found->second->ended_ || !policy_.Waiting(id)) continue;
    End(found->second.get(), Outcome::kCancelled, "", &gone);
  }
  cancelled_.clear();
  Answer(&gone, lock);
}

}  // namespace tf_stitch
