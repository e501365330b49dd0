// Which steps of which requests share the next superkernel: the policy, apart from threads and devices.
//
// A request runs a program: units, in order.  Units of one cluster may share a launch.  A superkernel takes the next
// unit of several requests, or the whole of several that may be joined into one (merge.h).  The policy sees time only
// as a number that its caller gives, so tests run it on a virtual clock.  Not thread-safe: its owner (coalescer.h)
// holds a lock.
//
// How it decides.  A unit is due when nothing is to be gained by waiting, or waiting costs too much: its superkernel is
// full, no company is on its way, the request has used up what it may wait in all, or its slack is gone (slack =
// deadline - now - estimated remaining time, with a margin).  Where many run in hardly more time than one
// (Company::kGathers) company gathers by itself: a unit waits while enough superkernels of its cluster are under way,
// and never while there are fewer, so a request alone does not wait, and the busier the device is, the larger
// superkernels get.  Of the due clusters, those of latency-critical tenants come before best effort; then those without
// slack, earliest latest start first; then the one whose tenant has had the least device time for its weight.  Whoever
// is ready in the chosen cluster joins, unless measured times say that so many are better off one by one.
#ifndef TF_STITCH_CUSTOM_OPS_SCHEDULER_H_
#define TF_STITCH_CUSTOM_OPS_SCHEDULER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "estimates.h"

namespace tf_stitch {

using Micros = int64_t;
constexpr Micros kNever = INT64_MAX;

// What waiting for company is good for.
enum class Company : uint8_t {
  kWaits,    // some work is shared: units wait for company that is on its way
  kGathers,  // launches are shared: units wait while others of the cluster are under way
  kNone      // nothing is shared: a unit runs by itself
};

// What a superkernel takes of one request.
struct Unit {
  uint64_t cluster;  // units of equal clusters may share a launch
  uint64_t shape;    // units of equal shapes take equal time
  double cost_us;    // a cost model's guess of that time
  Company company = Company::kWaits;
};

// The units of a program at one set of sizes; requests share it.
struct Work {
  std::vector<Unit> units;
  uint64_t kind = 0;  // equal for equal lists of units

  void SetKind();  // from the units
};

// Which requests may run as one, joined along their batch (merge.h).
struct MergeKey {
  uint64_t key = 0;    // equal for those that may; 0: none may
  uint64_t shape = 0;  // equal for runs that take equal time per number of rows
  int64_t rows = 0;    // elements along the batch
};

struct TenantOptions {
  Micros slo = 0;  // 0: no deadline but the request's own
  bool best_effort = false;
  double weight = 1;
  int max_in_flight = 0, max_queue = 0;  // 0: no limit
};

// Whether requests are joined along their batch.
enum class Merge : uint8_t { kNever, kWhereItPays, kWhereverItCan };

struct PolicyOptions {
  Micros max_wait = 100;  // what a request may wait for company in all
  int max_pack = 64;      // requests in a superkernel
  int max_instances = 4096;
  double drift = 2;   // measured over estimated time, against all tenants', above which a tenant is throttled
  int under_way = 2;  // superkernels of a cluster at a time while more of it gathers
  Merge merge = Merge::kWhereItPays;  // requests along their batch
  int max_merge = 256;                // elements of a joined batch
};

enum class Outcome : uint8_t { kCompleted, kRejected, kCancelled, kFailed };

struct TenantStats {
  static constexpr std::array<double, 16> kBoundsMs = {0.1, 0.2, 0.5, 1,   2,   5,   10,  20,
                                                       50,  100, 200, 500, 1e3, 2e3, 5e3, 1e4};
  int64_t requests = 0;
  std::array<int64_t, 4> outcomes{};  // by Outcome
  int64_t missed_deadline = 0;
  double device_us = 0;
  std::array<int64_t, kBoundsMs.size() + 1> latency_counts{};
  double latency_sum_ms = 0;
};

struct DeviceStats {
  int64_t superkernels = 0, steps = 0;  // a unit of one request is a step
  double busy_us = 0;                   // wall time with a superkernel under way
  // requests that ran joined with others, runs that they were joined to, requests that had to run again by themselves
  int64_t merged_requests = 0, merged_runs = 0, unmerged_requests = 0;
};

// What became of requests that were to run as one: they do, or the device could not join them this time, or can never
// join so many, or their run failed.
enum class Joining : uint8_t { kDone, kNotNow, kNever, kFailed };

// What a lane takes: superkernels led by tenants of one priority, or any.
enum class LaneKind : uint8_t { kAny, kLatency, kBestEffort };

struct Superkernel {
  std::vector<uint64_t> members;  // requests, the leader first
  uint64_t cluster = 0;
  bool gathers = false;
  size_t steps = 0;
  size_t launched = 1;       // superkernels that the device made of it
  bool best_effort = false;  // what the leader's tenant is
  bool joined = false;       // its members run as one, from their first unit to the last
  double estimate_us = 0;
  double lone_us = 0;  // what its steps would take one by one
  bool known = true;   // the estimate comes from measurements
  // (shape, how many of it, cost_us): what the estimate is made of
  struct Part {
    uint64_t shape;
    int count;
    double cost_us;
  };
  std::vector<Part> parts;
  std::vector<std::pair<std::string, double>> shares;  // of the estimate, by tenant
};

class Policy {
 public:
  struct Verdict {
    enum { kHeld, kRejected, kFull } kind;
    std::string why;  // when rejected: a sentence
  };

  Policy(const PolicyOptions& options, Estimates* estimates) : options_(options), estimates_(estimates) {}

  // Priorities count for requests that come later, the rest at once.
  void SetTenant(const std::string& name, const TenantOptions& options);
  void RemoveTenant(const std::string& name);

  // Takes a request in.  `deadline` is kNever where the caller has none: then the tenant's SLO counts.  kFull: nothing
  // was taken, come again when a request has gone.
  Verdict Admit(uint64_t id, const std::string& tenant, std::shared_ptr<const Work> work, Micros deadline, Micros now,
                const MergeKey& merge = {});

  // The superkernel to start now on a lane; its members are under way until Advance or Remove.  False when there is
  // none: then *wake is when to ask again, if nothing happens before (kNever: not before something happens).
  bool Next(LaneKind lane, Micros now, Superkernel* out, Micros* wake);

  // A superkernel of one request of a latency tenant, which was admitted last, when no other such request is held and
  // nothing is to be waited for.
  bool NextAlone(uint64_t id, Micros now, Superkernel* out);

  // The device took `count` units of a member at once: the superkernel's estimate covers them.
  void Extend(Superkernel* superkernel, uint64_t id, size_t count);

  // `count` units of a member were run, or will be before what it issues next.  False when none is left.
  bool Advance(uint64_t id, size_t count, Micros now);

  // A member of a joined superkernel has not run: it begins again, without being joined.
  void Restart(uint64_t id, Micros now);

  // What became of a joined superkernel.
  void Joined(const Superkernel& superkernel, Joining how);

  // Schedules no more of a request, which stays held until Remove.
  void Retire(uint64_t id);

  // A superkernel took `us` on the device.
  void Finished(const Superkernel& superkernel, double us, Micros now);

  // A request has gone; where it was under way or waited makes no difference.
  void Remove(uint64_t id, Outcome outcome, Micros now);

  // The unit that a request is at.
  size_t NextUnit(uint64_t id) const { return entries_.at(id).next; }

  // True while the next unit of a request waits.
  bool Waiting(uint64_t id) const;

  bool any_ready() const { return !ready_.empty(); }
  size_t held() const { return entries_.size(); }
  double backlog_us() const;
  const DeviceStats& device_stats(Micros now);

  struct Tenant {
    std::string name;
    TenantOptions options;
    TenantStats stats;
    int in_flight = 0;
    std::deque<uint64_t> queue;  // wait for in_flight to fall
    double used = 0;             // device time over weight: who has least goes first
    double ratio = 1;            // measured over estimated time, followed
    int measured = 0;
    bool throttled = false;
    bool kept = false;  // set by SetTenant
  };
  const std::map<std::string, Tenant>& tenants() const { return tenants_; }

 private:
  struct Kind;
  enum class State : uint8_t { kQueued, kReady, kUnderWay };
  struct Entry {
    uint64_t id;
    Tenant* tenant;
    std::shared_ptr<const Work> work;
    Kind* kind;
    MergeKey merge;
    Micros arrival, deadline;
    bool best_effort = false;
    size_t next = 0;  // unit
    State state = State::kQueued;
    Micros ready_since = 0, waited = 0;
    bool waits = true;  // for the next request of its kind, where that usually comes soon enough
    size_t place = 0;   // in its cluster's list
  };
  // What requests of equal units have in common.
  struct Kind {
    std::vector<double> remaining_us;  // from unit i to the end; one more entry than units
    int64_t arrivals = 0;
    int64_t computed_at = 0;  // arrivals when remaining_us was computed
    int refused = 0;          // requests, for their own time
    std::vector<int> at;      // requests, neither queued nor gone, by their next unit
    int held = 0;
    Micros last_arrival = 0;
    double gap = 0;            // between arrivals, followed
    int vain = 0, passed = 0;  // waits in a row that brought no company; requests since one waited
  };
  // What joining requests of one shape has come to.
  struct JoinRecord {
    int64_t refused_rows = INT64_MAX;  // so many or more cannot be joined
    int skip = 0, penalty = 0;         // how often it is not tried now, and will not be when it fails again
    bool pays = true;                  // when last asked
  };
  struct Candidate {
    uint64_t cluster = 0;
    bool best_effort = false, urgent = false;
    Micros latest_start = kNever;
    double used = 0;
    Entry* leader = nullptr;
  };

  Tenant* TenantOf(const std::string& name);
  Kind* KindOf(const Work& work, Micros now);
  double Remaining(const Entry& e) const { return e.kind->remaining_us[e.next]; }
  Micros LatestStart(const Entry& e) const;
  double Lone(const Unit& unit) const;
  std::string Inadmissible(const Tenant& tenant, Kind* kind, Micros deadline, Micros now) const;
  int Limit(const Tenant& tenant) const;
  void Activate(Entry* e, Micros now);
  void MakeReady(Entry* e, Micros now);
  void TakeFromList(Entry* e);
  bool CompanyIsBehind(const Entry& e) const;
  Micros DueAt(const Entry& e, bool full) const;
  bool Better(const Candidate& a, const Candidate& b) const;
  void Fill(const Candidate& chosen, size_t most, Micros now, Superkernel* out);
  void Order(std::vector<Entry*>* entries, const Entry* leader) const;
  static bool KeepsCompany(const Entry& e, const Entry& leader);
  void Take(Entry* e, Micros now, Superkernel* out);
  void Begin(const Candidate& chosen, const std::map<Tenant*, double>& lone, Micros now, Superkernel* out);
  bool FillJoined(const Candidate& chosen, Micros now, Superkernel* out);
  std::vector<Entry*> Joinable(const Candidate& chosen, Micros now);
  double JoinedUs(const Entry& e, int64_t rows) const;
  bool JoiningPays(const std::vector<Entry*>& entries, int64_t rows);
  void AddPart(const Unit& unit, Superkernel* out) const;
  void AddPartOfItsOwn(const Unit& unit, Superkernel* out) const;
  bool Pays(const Unit& unit, const Superkernel& superkernel);
  bool MayStart(const Entry& e) const;
  Company CompanyOf(const Entry& e) const;
  void Charge(Tenant* tenant, double us);
  void Drift(Tenant* tenant, double ratio);
  void PromoteQueued(Tenant* tenant, Micros now);
  void Busy(Micros now);
  double Rate() const;

  const PolicyOptions options_;
  Estimates* const estimates_;
  std::map<std::string, Tenant> tenants_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::unordered_map<uint64_t, std::vector<Entry*>> ready_;  // by cluster
  std::unordered_map<uint64_t, Kind> kinds_;
  std::unordered_map<uint64_t, JoinRecord> joins_;  // by shape
  int64_t join_decisions_ = 0;
  size_t held_latency_ = 0, ready_latency_ = 0;  // requests of latency tenants
  double ratio_ = 1;                             // measured over estimated time of all superkernels, followed
  int under_way_ = 0;                            // superkernels
  int best_effort_under_way_ = 0;
  // Superkernels under way, by cluster whose units gather, of latency tenants and of best effort: the former do not
  // wait for the latter.
  std::array<std::unordered_map<uint64_t, int>, 2> gathering_;
  int refused_ = 0;  // times that company was found not to pay
  Micros busy_since_ = 0;
  double lone_us_ = 0, lone_busy_us_ = 0;  // recent work, as alone, and the busy time that it took: decays
  DeviceStats stats_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_SCHEDULER_H_
