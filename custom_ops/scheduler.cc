#include "scheduler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "hash.h"

namespace tf_stitch {
namespace {

constexpr double kMargin = 1.5;        // estimates are trusted this far where slack is concerned
constexpr size_t kLookBack = 64;       // company that is further behind than this many units is not waited for
constexpr int64_t kEstimatesAge = 64;  // requests of a kind after which its remaining times are computed anew
constexpr double kOverdue = 3;         // times the usual gap between arrivals
constexpr Micros kLongestGap = 10;     // between arrivals, in max_wait
constexpr int kMostVain = 6;           // waits in vain that count: then one request in 64 waits
constexpr size_t kMaxKinds = 1024;     // remembered without a request
constexpr size_t kMaxTenants = 4096;   // remembered without a request, unless they were set
constexpr double kFollow = 0.1;        // weight of a new measurement
constexpr double kLargestRatio = 10;
constexpr int kMeasurements = 16;         // before a tenant is judged
constexpr int kThrottledShare = 4;        // a throttled tenant has a fourth of its requests in flight, at least one
constexpr double kLoss = 1.5;             // company that takes this much longer than one by one is no gain
constexpr int kTrials = 3;                // measurements before that is believed: the first are slow
constexpr int kRetry = 32;                // one in so many refusals is tried anyway: times change
constexpr int kProbe = 8;                 // likewise of requests that are refused for their own time
constexpr Micros kLongestWait = 5000000;  // after it a request goes first, whatever its priority: none waits for ever
constexpr double kRateWindowUs = 500000;  // busy time that the rate of work is taken over

std::string Milliseconds(double us) {
  char text[32];
  snprintf(text, sizeof text, "%.3g ms", us / 1000);
  return text;
}

Micros Plus(Micros a, double us) { return a == kNever ? kNever : a + static_cast<Micros>(us); }

}  // namespace

void Work::SetKind() {
  kind = kHashOfNothing;
  for (const Unit& u : units) kind = Mix(Mix(kind, u.cluster), u.shape);
}

// --- tenants -----------------------------------------------------------------------------------------

Policy::Tenant* Policy::TenantOf(const std::string& name) {
  auto [found, is_new] = tenants_.try_emplace(name);
  if (!is_new) return &found->second;
  found->second.name = name;
  if (tenants_.size() > kMaxTenants) {  // names that requests brought, with nothing held
    for (auto it = tenants_.begin(); it != tenants_.end();) {
      bool idle = !it->second.kept && it->second.in_flight == 0 && it->second.queue.empty() && it != found;
      it = idle ? tenants_.erase(it) : std::next(it);
    }
  }
  return &found->second;
}

void Policy::SetTenant(const std::string& name, const TenantOptions& options) {
  Tenant* tenant = TenantOf(name);
  tenant->options = options;
  tenant->kept = true;
}

void Policy::RemoveTenant(const std::string& name) {
  auto found = tenants_.find(name);
  if (found == tenants_.end()) return;
  SetTenant(name, {});
  found->second.kept = false;
  if (found->second.in_flight == 0 && found->second.queue.empty()) tenants_.erase(found);
}

int Policy::Limit(const Tenant& tenant) const {
  int limit = tenant.options.max_in_flight > 0 ? tenant.options.max_in_flight : INT32_MAX;
  if (!tenant.throttled) return limit;
  return std::max(1, std::min(limit, options_.max_pack) / kThrottledShare);
}

void Policy::Charge(Tenant* tenant, double us) { tenant->used += us / tenant->options.weight; }

// A tenant whose work takes longer than estimated, more so than everybody's, is held back until the estimates have
// caught up.
void Policy::Drift(Tenant* tenant, double ratio) {
  tenant->ratio += kFollow * (ratio - tenant->ratio);
  if (++tenant->measured < kMeasurements) return;
  double back = 1 + (options_.drift - 1) / 2;
  tenant->throttled = tenant->ratio > ratio_ * (tenant->throttled ? back : options_.drift);
}

// --- admission ---------------------------------------------------------------------------------------

Policy::Kind* Policy::KindOf(const Work& work, Micros now) {
  if (kinds_.size() > kMaxKinds) {
    for (auto it = kinds_.begin(); it != kinds_.end();) it = it->second.held ? std::next(it) : kinds_.erase(it);
  }
  Kind& kind = kinds_[work.kind];
  if (kind.arrivals == 0) kind.at.assign(work.units.size() + 1, 0);
  // Longer gaps all mean the same, that nobody is worth waiting for, and are forgotten faster so.
  double gap = static_cast<double>(std::min(now - kind.last_arrival, kLongestGap * options_.max_wait));
  kind.gap = kind.arrivals > 1 ? kind.gap + kFollow * (gap - kind.gap) : gap;
  kind.last_arrival = now;
  if (++kind.arrivals >= kind.computed_at + std::min(kind.computed_at, kEstimatesAge)) {
    kind.computed_at = kind.arrivals;
    kind.remaining_us.assign(work.units.size() + 1, 0);
    for (size_t i = work.units.size(); i-- > 0;) {
      const Unit& u = work.units[i];
      kind.remaining_us[i] = kind.remaining_us[i + 1] + Lone(u);
    }
  }
  return &kind;
}

// What a unit takes by itself.  Until it was measured a few times, a longer time than the cost model's is not believed:
// the first runs load code, and who is refused for such a time is never measured again.
double Policy::Lone(const Unit& u) const {
  double us = estimates_->Of(u.shape, 1, u.cost_us);
  return estimates_->Times(u.shape, 1) < kTrials ? std::min(us, u.cost_us) : us;
}

// Work done per busy microsecond, in microseconds that it would take alone: how much coalescing and lanes gain.
double Policy::Rate() const { return lone_busy_us_ > 1000 ? std::max(lone_us_ / lone_busy_us_, 0.1) : 1; }

double Policy::backlog_us() const {
  double sum = 0;
  for (const auto& [id, e] : entries_) sum += Remaining(e);
  return sum;
}

// Why a request cannot meet its deadline behind those that go first, or "".
std::string Policy::Inadmissible(const Tenant& tenant, Kind* kind, Micros deadline, Micros now) const {
  if (deadline == kNever) return "";
  double ahead = 0;
  for (const auto& [id, e] : entries_) {
    bool first = e.best_effort != tenant.options.best_effort ? tenant.options.best_effort : e.deadline <= deadline;
    if (first) ahead += Remaining(e);
  }
  double own = kind->remaining_us[0], wait = ahead / Rate();
  auto left = static_cast<double>(deadline - now);
  if (left >= wait + own) return "";
  bool is_own_fault = left > 0 && left < own && kind->held == 0;
  if (is_own_fault && ++kind->refused % kProbe == 0) return "";  // its time is measured again
  return "A request of tenant '" + tenant.name +
         "' cannot meet its deadline: " + Milliseconds(static_cast<double>(std::max<Micros>(deadline - now, 0))) +
         " are left, about " + Milliseconds(wait) + " of work go first and its own takes " + Milliseconds(own) + ".";
}

Policy::Verdict Policy::Admit(uint64_t id, const std::string& name, std::shared_ptr<const Work> work, Micros deadline,
                              Micros now, const MergeKey& merge) {
  if (entries_.size() >= static_cast<size_t>(options_.max_instances)) return {Verdict::kFull, ""};
  Tenant* tenant = TenantOf(name);
  ++tenant->stats.requests;
  if (deadline == kNever && tenant->options.slo > 0) deadline = now + tenant->options.slo;
  Kind* kind = KindOf(*work, now);
  std::string why = Inadmissible(*tenant, kind, deadline, now);
  bool waits = tenant->in_flight >= Limit(*tenant);
  if (why.empty() && waits && tenant->options.max_queue > 0 &&
      tenant->queue.size() >= static_cast<size_t>(tenant->options.max_queue)) {
    why = "Tenant '" + name + "' has " + std::to_string(tenant->in_flight) + " requests in flight and " +
          std::to_string(tenant->queue.size()) + " in its queue, which is full; send fewer at a time.";
  }
  if (!why.empty()) {
    ++tenant->stats.outcomes[static_cast<size_t>(Outcome::kRejected)];
    return {Verdict::kRejected, why};
  }
  Entry& e = entries_[id];
  e.id = id;
  e.tenant = tenant;
  e.work = std::move(work);
  e.kind = kind;
  e.merge = merge;
  e.arrival = now;
  e.deadline = deadline;
  e.best_effort = tenant->options.best_effort;
  e.waits = ++kind->passed >= 1 << kind->vain;
  if (e.waits) kind->passed = 0;
  held_latency_ += !e.best_effort;
  ++kind->held;
  if (waits) {
    tenant->queue.push_back(id);
  } else {
    Activate(&e, now);
  }
  return {Verdict::kHeld, ""};
}

void Policy::Activate(Entry* e, Micros now) {
  if (e->tenant->in_flight++ == 0) {
    // Time that a tenant did not ask for is not owed to it later.
    double least = INFINITY;
    for (const auto& [name, t] : tenants_) {
      if (t.in_flight > 0 && &t != e->tenant) least = std::min(least, t.used);
    }
    if (std::isfinite(least)) e->tenant->used = std::max(e->tenant->used, least);
  }
  ++e->kind->at[0];
  MakeReady(e, now);
}

void Policy::PromoteQueued(Tenant* tenant, Micros now) {
  while (!tenant->queue.empty() && tenant->in_flight < Limit(*tenant)) {
    uint64_t id = tenant->queue.front();
    tenant->queue.pop_front();
    Activate(&entries_.at(id), now);
  }
}

// --- the ready lists -----------------------------------------------------------------------------------

void Policy::MakeReady(Entry* e, Micros now) {
  std::vector<Entry*>& list = ready_[e->work->units[e->next].cluster];
  e->state = State::kReady;
  e->ready_since = now;
  e->place = list.size();
  list.push_back(e);
  ready_latency_ += !e->best_effort;
}

void Policy::TakeFromList(Entry* e) {
  auto found = ready_.find(e->work->units[e->next].cluster);
  std::vector<Entry*>& list = found->second;
  list[e->place] = list.back();
  list[e->place]->place = e->place;
  list.pop_back();
  if (list.empty()) ready_.erase(found);
  ready_latency_ -= !e->best_effort;
}

bool Policy::Waiting(uint64_t id) const {
  auto found = entries_.find(id);
  return found != entries_.end() && found->second.state != State::kUnderWay;
}

void Policy::Extend(Superkernel* superkernel, uint64_t id, size_t count) {
  const Entry& e = entries_.at(id);
  for (size_t i = e.next + 1; i < std::min(e.next + count, e.work->units.size()); ++i) {
    if (superkernel->members.size() > 1) {
      AddPart(e.work->units[i], superkernel);
    } else {  // units of one request run one after the other, also those of one shape
      AddPartOfItsOwn(e.work->units[i], superkernel);
    }
    superkernel->lone_us += e.kind->remaining_us[i] - e.kind->remaining_us[i + 1];
    ++superkernel->steps;
  }
}

bool Policy::Advance(uint64_t id, size_t count, Micros now) {
  Entry& e = entries_.at(id);
  --e.kind->at[e.next];
  e.next = std::min(e.next + count, e.work->units.size());
  ++e.kind->at[e.next];
  if (e.next == e.work->units.size()) return false;
  MakeReady(&e, now);
  return true;
}

void Policy::Retire(uint64_t id) {
  Entry& e = entries_.at(id);
  if (e.state == State::kReady) TakeFromList(&e);
  if (e.state == State::kReady) e.state = State::kUnderWay;
}

void Policy::Remove(uint64_t id, Outcome outcome, Micros now) {
  auto found = entries_.find(id);
  if (found == entries_.end()) return;
  Entry& e = found->second;
  Tenant* tenant = e.tenant;
  TenantStats& stats = tenant->stats;
  ++stats.outcomes[static_cast<size_t>(outcome)];
  if (outcome == Outcome::kCompleted) {
    double ms = static_cast<double>(now - e.arrival) / 1000;
    size_t bucket = 0;
    while (bucket < TenantStats::kBoundsMs.size() && ms > TenantStats::kBoundsMs[bucket]) ++bucket;
    ++stats.latency_counts[bucket];
    stats.latency_sum_ms += ms;
    stats.missed_deadline += now > e.deadline;
  }
  --e.kind->held;
  held_latency_ -= !e.best_effort;
  if (e.state == State::kQueued) {
    tenant->queue.erase(std::find(tenant->queue.begin(), tenant->queue.end(), id));
  } else {
    if (e.state == State::kReady) TakeFromList(&e);
    --e.kind->at[e.next];
    --tenant->in_flight;
  }
  entries_.erase(found);
  PromoteQueued(tenant, now);
}

// --- choosing --------------------------------------------------------------------------------------------

Micros Policy::LatestStart(const Entry& e) const {
  return std::min(Plus(e.deadline, -kMargin * Remaining(e)), e.arrival + kLongestWait);
}

// Whether a request of the same kind is a little behind.
bool Policy::CompanyIsBehind(const Entry& e) const {
  for (size_t back = 1; back <= std::min(e.next, kLookBack); ++back) {
    if (e.kind->at[e.next - back] > 0) return true;
  }
  return false;
}

// Whether few enough superkernels of an entry's cluster are under way for the next one to go.
bool Policy::MayStart(const Entry& e) const {
  const auto& counts = gathering_[e.best_effort];
  auto found = counts.find(e.work->units[e.next].cluster);
  return found == counts.end() || found->second < options_.under_way;
}

// When an entry is to be issued though it could have more company: where none is behind, once the next request of its
// kind is overdue.  Few wait where that is in vain: requests of one client, each sent when the last one is answered,
// come soon after each other and never meet.
Micros Policy::DueAt(const Entry& e, bool full) const {
  if (full) return e.ready_since;
  Company company = CompanyOf(e);
  if (company == Company::kNone) return e.ready_since;
  if (company == Company::kGathers) return MayStart(e) ? e.ready_since : LatestStart(e);
  Micros until = std::min(e.ready_since + std::max<Micros>(options_.max_wait - e.waited, 0), LatestStart(e));
  if (CompanyIsBehind(e)) return until;
  bool usual = e.next == 0 && e.waits && e.kind->gap < static_cast<double>(options_.max_wait);
  return usual ? std::min(until, Plus(e.kind->last_arrival, kOverdue * e.kind->gap)) : e.ready_since;
}

bool Policy::Better(const Candidate& a, const Candidate& b) const {
  if (!b.leader) return true;
  if (a.best_effort != b.best_effort) return b.best_effort;
  if (a.urgent != b.urgent) return a.urgent;
  if (a.urgent && a.latest_start != b.latest_start) return a.latest_start < b.latest_start;
  if (a.used != b.used) return a.used < b.used;
  return a.leader->id < b.leader->id;
}

bool Policy::Next(LaneKind lane, Micros now, Superkernel* out, Micros* wake) {
  *wake = kNever;
  // On a lane that takes all, best effort runs one superkernel at a time, and only when no latency tenant waits; but
  // what has waited for very long counts as a latency tenant's: they may be more than the device can do.
  bool may_fill = lane == LaneKind::kBestEffort || (lane == LaneKind::kAny && ready_latency_ == 0 &&
                                                    (best_effort_under_way_ == 0 || held_latency_ == 0));
  Candidate best;
  for (auto& [cluster, list] : ready_) {
    Candidate c;
    Micros due_at = kNever;
    bool full = list.size() >= static_cast<size_t>(options_.max_pack);
    for (Entry* e : list) {
      bool fills = e->best_effort && (lane != LaneKind::kAny || now - e->arrival < kLongestWait);
      if (fills ? !may_fill : lane == LaneKind::kBestEffort) continue;
      due_at = std::min(due_at, DueAt(*e, full));
      Candidate mine{cluster, fills, LatestStart(*e) <= now, LatestStart(*e), e->tenant->used, e};
      if (Better(mine, c)) c = mine;
    }
    if (!c.leader) continue;
    if (due_at > now) {
      *wake = std::min(*wake, due_at);
    } else if (Better(c, best)) {
      best = c;
    }
  }
  if (!best.leader) return false;
  if (!FillJoined(best, now, out)) Fill(best, static_cast<size_t>(options_.max_pack), now, out);
  return true;
}

bool Policy::NextAlone(uint64_t id, Micros now, Superkernel* out) {
  Entry& e = entries_.at(id);
  if (e.best_effort || held_latency_ > 1 || e.state != State::kReady || DueAt(e, false) > now) return false;
  Fill({e.work->units[e.next].cluster, false, false, kNever, 0, &e}, 1, now, out);
  return true;
}

void Policy::AddPartOfItsOwn(const Unit& u, Superkernel* out) const {
  out->known = out->known && estimates_->Known(u.shape);
  out->estimate_us += estimates_->Of(u.shape, 1, u.cost_us);
  out->parts.push_back({u.shape, 1, u.cost_us});
}

void Policy::AddPart(const Unit& u, Superkernel* out) const {
  auto found = std::find_if(out->parts.begin(), out->parts.end(),
                            [&](const Superkernel::Part& p) { return p.shape == u.shape; });
  if (found == out->parts.end()) found = out->parts.insert(found, {u.shape, 0, u.cost_us});
  out->known = out->known && estimates_->Known(u.shape);
  out->estimate_us -= found->count ? estimates_->Of(u.shape, found->count, u.cost_us) : 0;
  ++found->count;
  out->estimate_us += estimates_->Of(u.shape, found->count, u.cost_us);
}

// Whether one more of a unit's shape is no loss.  Numbers that were hardly measured are tried, and now and then one
// that was found to be a loss: what was slow once (code that was loaded, a device that others used) would stay so for
// ever.
bool Policy::Pays(const Unit& u, const Superkernel& s) {
  int count = 1;
  for (const Superkernel::Part& p : s.parts) count += p.shape == u.shape ? p.count : 0;
  if (count == 1 || estimates_->Times(u.shape, count) < kTrials) return true;
  bool pays = estimates_->Of(u.shape, count, u.cost_us) <= kLoss * count * estimates_->Of(u.shape, 1, u.cost_us);
  return pays || ++refused_ % kRetry == 0;
}

// The leader first, then latency tenants, the most urgent first.
void Policy::Order(std::vector<Entry*>* entries, const Entry* leader) const {
  std::sort(entries->begin(), entries->end(), [&](const Entry* a, const Entry* b) {
    if (a == leader || b == leader) return a == leader && b != leader;
    bool x = a->best_effort, y = b->best_effort;
    if (x != y) return y;
    Micros s = LatestStart(*a), t = LatestStart(*b);
    return s != t ? s < t : a->id < b->id;
  });
}

// A throttled tenant's requests keep to themselves.
bool Policy::KeepsCompany(const Entry& e, const Entry& leader) {
  return e.tenant == leader.tenant || (!e.tenant->throttled && !leader.tenant->throttled);
}

// Makes an entry a member.
void Policy::Take(Entry* e, Micros now, Superkernel* out) {
  out->members.push_back(e->id);
  e->waited += now - e->ready_since;
  TakeFromList(e);
  e->state = State::kUnderWay;
}

// A superkernel with all its members starts; `lone` is what each tenant's part would take one by one.
void Policy::Begin(const Candidate& chosen, const std::map<Tenant*, double>& lone, Micros now, Superkernel* out) {
  for (const auto& [tenant, us] : lone) out->lone_us += us;
  for (const auto& [tenant, us] : lone) {
    out->shares.emplace_back(tenant->name, us / out->lone_us);
    Charge(tenant, out->estimate_us * us / out->lone_us);
  }
  Kind* kind = chosen.leader->kind;
  if (out->members.size() > 1) {
    kind->vain = 0;
  } else if (chosen.leader->next == 0 && now > chosen.leader->ready_since) {
    kind->vain = std::min(kind->vain + 1, kMostVain);
  }
  out->best_effort = chosen.best_effort;
  out->cluster = chosen.cluster;
  out->gathers = CompanyOf(*chosen.leader) == Company::kGathers;
  Busy(now);
  ++under_way_;
  best_effort_under_way_ += chosen.best_effort;
  if (out->gathers) ++gathering_[chosen.best_effort][chosen.cluster];
}

// The leader, then all that are ready in its cluster, `most` in all.  Best effort joins a latency tenant only within
// its slack; a latency tenant never joins what fills, which the device leaves until it has nothing else to do.
void Policy::Fill(const Candidate& chosen, size_t most, Micros now, Superkernel* out) {
  *out = {};
  Entry* leader = chosen.leader;
  if (leader->work->units[leader->next].company == Company::kNone) most = 1;
  std::vector<Entry*> order = ready_.at(chosen.cluster);
  Order(&order, leader);
  std::map<Tenant*, double> lone;
  Micros least_latest = kNever;  // of the latency tenants in it
  for (Entry* e : order) {
    if (out->members.size() == most) break;
    if (!KeepsCompany(*e, *leader) || (chosen.best_effort && !e->best_effort)) continue;
    if (!Pays(e->work->units[e->next], *out)) continue;
    if (e->best_effort && !chosen.best_effort && Plus(now, out->estimate_us) > least_latest) continue;
    if (!e->best_effort) least_latest = std::min(least_latest, LatestStart(*e));
    AddPart(e->work->units[e->next], out);
    lone[e->tenant] += std::max(Remaining(*e) - e->kind->remaining_us[e->next + 1], 1e-3);
    Take(e, now, out);
  }
  out->steps = out->members.size();
  Begin(chosen, lone, now, out);
}

// --- measuring -------------------------------------------------------------------------------------------

// Adds the time since the last call when a superkernel was under way.
void Policy::Busy(Micros now) {
  if (under_way_ > 0) {
    auto us = static_cast<double>(std::max<Micros>(now - busy_since_, 0));
    stats_.busy_us += us;
    lone_busy_us_ += us;
  }
  busy_since_ = std::max(busy_since_, now);
}

const DeviceStats& Policy::device_stats(Micros now) {
  Busy(now);
  return stats_;
}

void Policy::Finished(const Superkernel& s, double us, Micros now) {
  Busy(now);
  --under_way_;
  best_effort_under_way_ -= s.best_effort;
  if (s.gathers && --gathering_[s.best_effort][s.cluster] == 0) gathering_[s.best_effort].erase(s.cluster);
  stats_.superkernels += static_cast<int64_t>(s.launched);
  stats_.steps += static_cast<int64_t>(s.steps);
  lone_us_ += s.lone_us;
  if (lone_busy_us_ > kRateWindowUs) lone_us_ /= 2, lone_busy_us_ /= 2;
  double ratio = s.estimate_us > 0 ? us / s.estimate_us : 1;
  double capped = std::min(ratio, kLargestRatio);  // one hiccup says little
  bool known = s.known && std::all_of(s.parts.begin(), s.parts.end(), [&](const Superkernel::Part& p) {
                 return estimates_->Times(p.shape, p.count) >= kTrials;
               });
  if (known) ratio_ += kFollow / 4 * (capped - ratio_);
  for (const auto& [name, share] : s.shares) {
    auto found = tenants_.find(name);
    if (found == tenants_.end()) continue;
    found->second.stats.device_us += us * share;
    Charge(&found->second, (us - s.estimate_us) * share);
    if (known) Drift(&found->second, capped);
    PromoteQueued(&found->second, now);  // its limit may have changed
  }
  double whole = 0;  // as estimated now: others may have been measured since this one began
  for (const Superkernel::Part& p : s.parts) whole += estimates_->Of(p.shape, p.count, p.cost_us);
  std::vector<double> measured;
  for (const Superkernel::Part& p : s.parts) {
    measured.push_back(us * estimates_->Of(p.shape, p.count, p.cost_us) / whole);
  }
  for (size_t i = 0; i < measured.size(); ++i) estimates_->Measured(s.parts[i].shape, s.parts[i].count, measured[i]);
}

}  // namespace tf_stitch
