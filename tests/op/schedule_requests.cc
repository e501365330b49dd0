// The superkernel scheduler's own tests, without TensorFlow: the policy on a virtual clock, and the coalescer's threads
// over a device that notes what it is asked to run.  Built with sanitizers.
//
//   schedule_requests SEED
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../custom_ops/coalescer.h"

namespace {

using namespace tf_stitch;

std::atomic<int> g_checks{0};
#define CHECK(what)                                                                        \
  do {                                                                                     \
    ++g_checks;                                                                            \
    if (!(what)) fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #what), exit(1); \
  } while (false)

std::shared_ptr<const Work> WorkOf(const std::vector<uint64_t>& clusters, double us = 100) {
  auto work = std::make_shared<Work>();
  for (uint64_t c : clusters) work->units.push_back({c, c, us});
  work->SetKind();
  return work;
}

// --- the policy, on a virtual clock ----------------------------------------------------------------------

struct Clock {
  explicit Clock(const PolicyOptions& options = {}) : policy(options, &estimates) {}

  Policy::Verdict Admit(uint64_t id, const std::string& tenant, std::shared_ptr<const Work> work,
                        Micros deadline = kNever) {
    return policy.Admit(id, tenant, std::move(work), deadline, now);
  }
  bool Held(uint64_t id, const std::string& tenant, std::shared_ptr<const Work> work, Micros deadline = kNever) {
    return Admit(id, tenant, std::move(work), deadline).kind == Policy::Verdict::kHeld;
  }
  // The members of the superkernel that is due now; none when there is none.
  std::vector<uint64_t> Next(LaneKind lane = LaneKind::kAny) {
    Superkernel found;
    if (!policy.Next(lane, now, &found, &wake)) return {};
    last = found;
    return found.members;
  }
  // It takes `us`; members go on or are done.
  void Run(double us) {
    now += static_cast<Micros>(us);
    policy.Finished(last, us, now);
    for (uint64_t id : last.members) {
      if (!policy.Advance(id, 1, now)) policy.Remove(id, Outcome::kCompleted, now);
    }
  }

  Estimates estimates;
  Policy policy;
  Micros now = 1000, wake = kNever;
  Superkernel last;
};

using Ids = std::vector<uint64_t>;

void EarliestDeadlineWhenSlackIsGone() {
  Clock c;
  CHECK(c.Held(1, "a", WorkOf({1}), c.now + 2000));
  CHECK(c.Held(2, "b", WorkOf({2}), c.now + 1000));
  CHECK(c.Held(3, "c", WorkOf({3}), c.now + 1500));
  c.now += 1900;  // no slack is left to any
  CHECK(c.Next() == Ids{2});
  c.Run(100);
  CHECK(c.Next() == Ids{3});
  c.Run(100);
  CHECK(c.Next() == Ids{1});
}

void EqualWorkSharesASuperkernel() {
  Clock c({0, 3, 100, 2});
  for (uint64_t id : {1, 2, 3, 4}) CHECK(c.Held(id, "t" + std::to_string(id), WorkOf({7, 8})));
  CHECK(c.Next().size() == 3);  // max_pack
  Superkernel first = c.last;
  CHECK(c.Next() == Ids{4});
  CHECK(c.Next().empty() && c.wake == kNever);
  c.Run(50);
  CHECK(c.Next() == Ids{4} && c.last.steps == 1);
  c.last = first;
  c.Run(50);
  CHECK(c.Next().size() == 3);
}

void WaitsForCompanyThatIsBehindWithinTheLimit() {
  Clock c({200, 64, 100, 2});
  CHECK(c.Held(1, "a", WorkOf({1, 2, 3})));
  CHECK(c.Next() == Ids{1});
  CHECK(c.Held(2, "b", WorkOf({1, 2, 3})));  // arrives a little later
  c.Run(100);
  CHECK(c.Next() == Ids{2});  // 1 waits at its next unit for 2
  c.Run(100);
  Ids both = c.Next();
  CHECK(both.size() == 2);
}

void StopsWaitingAtItsLimitAndWhenSlackIsGone() {
  Clock c({200, 64, 100, 2});
  CHECK(c.Held(1, "a", WorkOf({1, 2})));
  CHECK(c.Next() == Ids{1});
  CHECK(c.Held(2, "b", WorkOf({1, 2})));
  c.Run(10);
  CHECK(c.Next() == Ids{2});  // under way on a slow lane while 1 waits
  CHECK(c.Next().empty() && c.wake == c.now + 200);
  c.now = c.wake;
  CHECK(c.Next() == Ids{1});

  Clock d({200, 64, 100, 2});
  CHECK(d.Held(1, "a", WorkOf({1, 2}), d.now + 330));  // 150 us of margin over the last unit: 70 us may be waited
  CHECK(d.Next() == Ids{1});
  CHECK(d.Held(2, "b", WorkOf({1, 2})));
  d.Run(110);
  CHECK(d.Next() == Ids{2});
  CHECK(d.Next().empty() && d.wake == d.now + 70);
}

void NoCompanyNoWait() {
  Clock c({500, 64, 100, 2});
  CHECK(c.Held(1, "a", WorkOf({1, 2})));
  CHECK(c.Next() == Ids{1});
  c.Run(10);
  CHECK(c.Next() == Ids{1});
}

void LatencyBeforeBestEffort() {
  Clock c;
  TenantOptions filler;
  filler.best_effort = true;
  c.policy.SetTenant("filler", filler);
  CHECK(c.Held(1, "filler", WorkOf({1, 1, 1})));
  CHECK(c.Held(2, "critical", WorkOf({2, 2})));
  CHECK(c.Next() == Ids{2});
  CHECK(c.Next() == Ids{1});  // nobody critical waits now: it fills
  CHECK(c.Held(3, "filler", WorkOf({4})));
  CHECK(c.Next().empty());                         // one filler at a time while a critical request is held
  CHECK(c.Next(LaneKind::kBestEffort) == Ids{3});  // but on a lane of its own
  CHECK(c.Next(LaneKind::kLatency).empty());
}

// What fills runs when the device has nothing else to do: no critical request goes there, though it would be company.
// `joined`: they could be one run.
void CriticalRequestsDoNotJoinWhatFills(bool joined) {
  PolicyOptions options;
  options.merge = joined ? Merge::kWhereverItCan : Merge::kNever;
  Clock c(options);
  TenantOptions filler;
  filler.best_effort = true;
  c.policy.SetTenant("filler", filler);
  MergeKey merge = joined ? MergeKey{5, 50, 1} : MergeKey{};
  auto hold = [&](uint64_t id, const std::string& tenant) {
    CHECK(c.policy.Admit(id, tenant, WorkOf({1}), kNever, c.now, merge).kind == Policy::Verdict::kHeld);
  };
  for (uint64_t id : {1, 2}) hold(id, "filler");
  for (uint64_t id : {3, 4}) hold(id, "critical");
  Ids found = c.Next(LaneKind::kBestEffort);
  std::sort(found.begin(), found.end());
  CHECK((found == Ids{1, 2}) && c.last.joined == joined);
  c.Run(100);
  found = c.Next(LaneKind::kLatency);
  std::sort(found.begin(), found.end());
  CHECK((found == Ids{3, 4}) && c.last.joined == joined);
}

// More critical requests than the device can do: what has waited for seconds goes first all the same.
void NobodyWaitsForEver() {
  Clock c;
  TenantOptions filler;
  filler.best_effort = true;
  c.policy.SetTenant("filler", filler);
  CHECK(c.Held(1, "filler", WorkOf({1})));
  Micros arrival = c.now;
  for (uint64_t id = 2; id < 42; ++id) CHECK(c.Held(id, "critical", WorkOf({id})));
  while (c.Next() != Ids{1}) {
    CHECK(c.now - arrival < 5000000);
    c.Run(300000);
  }
  CHECK(c.now - arrival >= 5000000);
}

void BestEffortJoinsOnlyWithinSlack() {
  TenantOptions filler;
  filler.best_effort = true;
  for (bool slack : {true, false}) {
    Clock c;
    c.policy.SetTenant("filler", filler);
    CHECK(c.Held(1, "critical", WorkOf({1}), c.now + (slack ? 5000 : 160)));
    CHECK(c.Held(2, "filler", WorkOf({1})));
    CHECK(c.Next().size() == (slack ? 2 : 1) && c.last.members[0] == 1);
  }
}

// A tenant with three times the weight gets three times the device time.
void SharesFollowWeights() {
  Clock c({0, 1, 1000, 10});
  TenantOptions heavy;
  heavy.weight = 3;
  c.policy.SetTenant("heavy", heavy);
  std::map<std::string, int> runs;
  uint64_t id = 1;
  std::map<uint64_t, std::string> names;
  auto add = [&](const std::string& name, uint64_t cluster) {
    names[id] = name;
    CHECK(c.Held(id++, name, WorkOf({cluster})));
  };
  for (int i = 0; i < 5; ++i) add("heavy", 1), add("light", 2);
  for (int i = 0; i < 400; ++i) {
    CHECK(c.Next().size() == 1);
    std::string name = names[c.last.members[0]];
    ++runs[name];
    c.Run(100);
    add(name, name == "heavy" ? 1 : 2);
  }
  CHECK(runs["heavy"] > 280 && runs["heavy"] < 320);
}

void ADeadlineThatIsOverIsRejected() {
  Clock c;
  for (Micros deadline : {c.now, c.now - 1, Micros{0}, INT64_MIN + c.now}) {
    Policy::Verdict v = c.Admit(1, "a", WorkOf({1}), deadline);
    CHECK(v.kind == Policy::Verdict::kRejected && v.why.find("0 ms are left") != std::string::npos);
  }
  CHECK(c.policy.held() == 0 && c.policy.tenants().at("a").in_flight == 0);
  CHECK(c.Held(1, "a", WorkOf({1}), kNever - 1));  // as far away as one can be
  CHECK(c.Next() == Ids{1});
}

void AdmissionLooksAtTheQueue() {
  Clock c;
  CHECK(c.Admit(1, "a", WorkOf({1}), c.now + 99).kind == Policy::Verdict::kRejected);
  CHECK(c.Held(2, "a", WorkOf({1}), c.now + 101));
  Policy::Verdict v = c.Admit(3, "b", WorkOf({2}), c.now + 150);
  CHECK(v.kind == Policy::Verdict::kRejected && v.why.find("'b' cannot meet its deadline") != std::string::npos);
  CHECK(c.Held(4, "b", WorkOf({2}), c.now + 250));
  CHECK(c.Held(5, "c", WorkOf({3}), c.now + 100));  // goes before the others: they have later deadlines
  CHECK(c.policy.tenants().at("b").stats.outcomes[static_cast<size_t>(Outcome::kRejected)] == 1);
  TenantOptions slo;
  slo.slo = 50;
  c.policy.SetTenant("d", slo);
  CHECK(c.Admit(6, "d", WorkOf({1})).kind == Policy::Verdict::kRejected);
}

// Measured times count once there are a few: the first may be those of loading.
void AdmissionFollowsMeasurements() {
  Clock c;
  uint64_t id = 1;
  auto one = [&](double us) {
    CHECK(c.Held(id, "a", WorkOf({1}), c.now + 500));
    CHECK(c.Next() == Ids{id++});
    c.Run(us);
  };
  one(70'000);
  for (int i = 0; i < 2; ++i) one(1000);
  CHECK(c.Admit(id++, "a", WorkOf({1}), c.now + 500).kind == Policy::Verdict::kRejected);
  CHECK(c.Held(id++, "a", WorkOf({1}), c.now + 1100));
}

// A kind that is refused for its time is measured now and then: it may have become faster.
void RefusalsForALongTimeEnd() {
  Clock c;
  uint64_t id = 1;
  for (int i = 0; i < 8; ++i) {
    CHECK(c.Held(id, "a", WorkOf({1})));
    CHECK(c.Next() == Ids{id++});
    c.Run(1000);
  }
  int refused = 0, last = 0;  // requests; the last of them
  for (int i = 1; i <= 400; ++i) {
    c.now += 2000;
    if (c.Admit(id, "a", WorkOf({1}), c.now + 500).kind == Policy::Verdict::kRejected) {
      ++refused, last = i;
    } else {
      CHECK(c.Next() == Ids{id});
      c.Run(100);
    }
    ++id;
  }
  CHECK(refused > 8 && refused < 200 && last < 200);
}

// Several that run at a time are measured, each by itself, though the first of them changes what the others were
// expected to take.
void MeasurementsDoNotCompound() {
  Clock c;
  std::vector<Superkernel> under_way;
  for (uint64_t id = 1; id <= 8; ++id) {
    CHECK(c.Held(id, "a", WorkOf({id}, 100)) && c.Next() == Ids{id});
    c.last.parts[0].shape = 77;
    under_way.push_back(c.last);
  }
  for (const Superkernel& s : under_way) c.policy.Finished(s, 1000, c.now);
  CHECK(c.estimates.Of(77, 1, 100) == 1000);
}

// One measurement far above the others says little, many do.
void OutliersCountLittle() {
  Estimates e;
  for (int i = 0; i < 8; ++i) e.Measured(1, 1, 100);
  e.Measured(1, 1, 90'000);
  CHECK(e.Of(1, 1, 0) < 125);
  for (int i = 0; i < 20; ++i) e.Measured(1, 1, 1000);
  CHECK(e.Of(1, 1, 0) > 900);
}

// Of a latency tenant, while only best effort is held or under way.
void ALatencyRequestMayBeRunByItsCaller() {
  Clock c;
  TenantOptions filler;
  filler.best_effort = true;
  c.policy.SetTenant("batch", filler);
  Superkernel s;
  CHECK(c.Held(1, "batch", WorkOf({1, 2})) && c.Held(2, "batch", WorkOf({1, 2})));
  CHECK(!c.policy.NextAlone(2, c.now, &s));
  CHECK(c.Held(3, "a", WorkOf({1, 2})));
  CHECK(c.policy.NextAlone(3, c.now, &s) && s.members == Ids{3} && !s.best_effort);
  CHECK(c.Held(4, "a", WorkOf({1, 2})));
  CHECK(!c.policy.NextAlone(4, c.now, &s));  // not beside another
  c.policy.Remove(3, Outcome::kCompleted, c.now);
  TenantOptions one;
  one.max_in_flight = 1;
  c.policy.SetTenant("a", one);
  CHECK(c.Held(5, "a", WorkOf({1, 2})));
  c.policy.Remove(4, Outcome::kCompleted, c.now);
  CHECK(c.policy.NextAlone(5, c.now, &s) && s.members == Ids{5});
}

// Waits for the next request only where they usually come soon enough.
void WaitsForArrivalsThatAreUsual() {
  Clock c({100, 64, 1000, 2});
  uint64_t id = 1;
  for (int i = 0; i < 3; ++i) {  // far apart: no wait
    c.now += 1'000'000;
    CHECK(c.Held(id++, "a", WorkOf({1})));
    CHECK(c.Next().size() == 1);
    c.Run(10);
  }
  for (int i = 0; i < 60; ++i) {  // now every 20 us
    c.now += 20;
    CHECK(c.Held(id++, "a", WorkOf({1})));
    if (c.Next().size()) c.Run(1);
  }
  while (c.Next().size()) c.Run(1);
  c.now += 19;
  CHECK(c.Held(id++, "a", WorkOf({1})));
  CHECK(c.Next().empty() && c.wake > c.now && c.wake <= c.now + 100);
}

// One client, who sends a request when the last one is answered, hardly ever waits for a second one; once there is one,
// requests wait again.
void ALoneClientDoesNotWait() {
  Clock c({100, 64, 1000, 2});
  uint64_t id = 1;
  int waited = 0;
  for (int i = 0; i < 1000; ++i) {
    CHECK(c.Held(id++, "a", WorkOf({1})));
    if (c.Next().empty()) {
      ++waited;
      c.now = c.wake;
      CHECK(c.Next().size() == 1);
    }
    c.Run(20);
    c.now += 20;
  }
  CHECK(waited >= 10 && waited < 40);
  for (int i = 0; i < 200; ++i) {
    CHECK(c.Held(id++, "a", WorkOf({1})) && c.Held(id++, "a", WorkOf({1})));
    while (c.Next().empty()) c.now = c.wake;
    c.Run(20);
    c.now += 20;
  }
  CHECK(c.Held(id++, "a", WorkOf({1})));
  CHECK(c.Next().empty() && c.wake > c.now);
}

void QuotasQueueThenReject() {
  Clock c;
  TenantOptions small;
  small.max_in_flight = 1;
  small.max_queue = 2;
  c.policy.SetTenant("small", small);
  CHECK(c.Held(1, "small", WorkOf({1})) && c.Held(2, "small", WorkOf({1})) && c.Held(3, "small", WorkOf({1})));
  Policy::Verdict v = c.Admit(4, "small", WorkOf({1}));
  CHECK(v.kind == Policy::Verdict::kRejected && v.why.find("queue, which is full") != std::string::npos);
  CHECK(c.Held(5, "large", WorkOf({1})));
  Ids ids = c.Next();
  CHECK(ids.size() == 2);  // 1 and 5: the others wait in their tenant's queue
  c.policy.Remove(2, Outcome::kCancelled, c.now);
  c.Run(10);
  CHECK(c.Next() == Ids{3});
  PolicyOptions full;
  full.max_instances = 1;
  Clock d(full);
  CHECK(d.Held(1, "a", WorkOf({1})) && d.Admit(2, "a", WorkOf({1})).kind == Policy::Verdict::kFull);
}

// Work that takes longer than it used to throttles its tenant, until the estimates have caught up.
void DriftThrottles() {
  Clock c({0, 64, 1000, 1.5});
  uint64_t id = 1;
  auto serve = [&](const std::string& name, uint64_t cluster, double us) {
    CHECK(c.Held(id++, name, WorkOf({cluster})));
    CHECK(c.Next().size() == 1);
    c.Run(us);
  };
  for (int i = 0; i < 40; ++i) serve("steady", 1, 50), serve("drifts", 2, 50);
  auto throttled = [&](const std::string& name) { return c.policy.tenants().at(name).throttled; };
  CHECK(!throttled("steady") && !throttled("drifts"));
  double us = 50;
  for (int i = 0; i < 12 && !throttled("drifts"); ++i) serve("steady", 1, 50), serve("drifts", 2, us *= 1.6);
  CHECK(throttled("drifts") && !throttled("steady"));
  CHECK(c.Held(id++, "drifts", WorkOf({1})) && c.Held(id++, "steady", WorkOf({1})));
  CHECK(c.Next().size() == 1);  // it does not share a superkernel with others
  c.Run(50);
  CHECK(c.Next().size() == 1);
  c.Run(50);
  for (int i = 0; i < 100; ++i) serve("steady", 1, 50), serve("drifts", 2, us);
  CHECK(!throttled("drifts"));
}

// Company that was measured to be slower than one by one is hardly sought again; what was not measured is tried, and
// what was slow at first only (code was loaded) is not held against it.
void PacksWhereMeasuredToPay() {
  Clock c({0, 64, 100, 10});
  uint64_t id = 1;
  auto four = [&](double us) {
    for (int i = 0; i < 4; ++i) CHECK(c.Held(id++, "a", WorkOf({1})));
    size_t most = 0, left = 4;
    while (left > 0) {
      size_t members = c.Next().size();
      c.Run(members == 4 ? us : 50 * static_cast<double>(members));
      most = std::max(most, members);
      left -= members;
    }
    return most;
  };
  c.estimates.Measured(1, 1, 50);
  for (int i = 0; i < 3; ++i) CHECK(four(2000) == 4);  // ten times what they take one by one
  int again = 0;
  for (int i = 0; i < 100; ++i) again += four(2000) == 4;
  CHECK(again > 0 && again < 10);
  while (four(60) < 4) {  // it became fast
  }
  for (int i = 0; i < 500; ++i) four(60);
  for (int i = 0; i < 40; ++i) CHECK(four(60) == 4);

  Clock d({0, 64, 100, 10});
  d.estimates.Measured(1, 1, 50);
  auto pair = [&](double us) {
    for (int i = 0; i < 2; ++i) CHECK(d.Held(id++, "a", WorkOf({1})));
    size_t members = d.Next().size();
    d.Run(us);
    return members;
  };
  CHECK(pair(50'000) == 2);
  for (int i = 0; i < 50; ++i) CHECK(pair(60) == 2);
  CHECK(!d.policy.tenants().at("a").throttled);
}

// Where launches are shared, a unit waits for those under way, not for those that may come.
void GathersWhileOthersAreUnderWay() {
  PolicyOptions options;
  options.under_way = 1;
  Clock c(options);
  auto work = std::make_shared<Work>(*WorkOf({1}));
  work->units[0].company = Company::kGathers;
  CHECK(c.Held(1, "a", work));
  CHECK(c.Next() == Ids{1});  // at once
  Superkernel first = c.last;
  for (uint64_t id : {2, 3}) CHECK(c.Held(id, "b", work));
  CHECK(c.Held(4, "c", work, c.now + 1000));
  CHECK(c.Next().empty() && c.wake == c.now + 850);  // when the slack of the last one is gone
  CHECK(c.Held(5, "d", WorkOf({2})));
  CHECK(c.Next() == Ids{5});  // others do not wait for them
  c.last = first;
  c.Run(100);
  CHECK(c.Next().size() == 3);

  auto alone = std::make_shared<Work>(*WorkOf({3}));
  alone->units[0].company = Company::kNone;
  for (uint64_t id : {6, 7}) CHECK(c.Held(id, "a", alone));
  CHECK(c.Next() == Ids{6});
  CHECK(c.Next() == Ids{7});
}

void EstimatesFollowAndAreKept() {
  Estimates e;
  CHECK(e.Of(5, 3, 10) == 30 && !e.Known(5));
  e.Measured(5, 1, 40);
  e.Measured(5, 8, 80);
  CHECK(e.Of(5, 1, 10) == 40 && e.Of(5, 4, 10) == 160 && e.Of(5, 9, 10) == 90);
  for (int i = 0; i < 60; ++i) e.Measured(5, 1, 20);
  CHECK(e.Of(5, 1, 10) > 19.9 && e.Of(5, 1, 10) < 20.1);
  Estimates copy;
  CHECK(copy.Load(e.Save()).empty());
  CHECK(std::abs(copy.Of(5, 9, 10) - 90) < 1e-3 && copy.Save() == e.Save());
  for (const char* bad : {"[", "{\"x\": 1}", "{\"5:0\": -1}", "{\"5:99\": 1}", "{\"5:0\": 1", "{\"5:0\" 1}"}) {
    CHECK(!copy.Load(bad).empty());
  }
}

// --- joined along their batch ------------------------------------------------------------------------------

// A request of `rows` rows that may be joined with those of equal keys.
bool Add(Clock* c, uint64_t id, int64_t rows, uint64_t key = 9, Micros deadline = kNever, double us = 100) {
  uint64_t cluster = 100 + static_cast<uint64_t>(rows);
  MergeKey merge{key, 77, rows};
  return c->policy.Admit(id, "t", WorkOf({cluster, cluster + 1000}, us), deadline, c->now, merge).kind ==
         Policy::Verdict::kHeld;
}

// All that is joined is done.
void RunJoined(Clock* c, double us) {
  c->now += static_cast<Micros>(us);
  c->policy.Joined(c->last, Joining::kDone);
  c->policy.Finished(c->last, us, c->now);
  for (uint64_t id : c->last.members) {
    CHECK(!c->policy.Advance(id, 2, c->now));
    c->policy.Remove(id, Outcome::kCompleted, c->now);
  }
}

PolicyOptions Impatient() {
  PolicyOptions options;
  options.max_wait = 0;
  return options;
}

void RequestsOfOneKeyAreJoinedWhateverTheirSizes() {
  Clock c(Impatient());
  CHECK(Add(&c, 1, 1) && Add(&c, 2, 3) && Add(&c, 3, 1) && Add(&c, 4, 1, 8) && Add(&c, 5, 0));
  CHECK(c.Next().size() == 4 && c.last.joined && c.last.steps == 8 && c.last.parts[0].count == 5);
  Superkernel joined = c.last;
  CHECK(c.Next() == Ids{4} && !c.last.joined);  // of another key, alone
  c.last = joined;
  RunJoined(&c, 100);
  CHECK(c.policy.device_stats(c.now).merged_requests == 4 && c.policy.device_stats(c.now).merged_runs == 1);
  CHECK(c.policy.held() == 1);
}

void JoinedBatchesAreBounded() {
  PolicyOptions options = Impatient();
  options.max_merge = 4;
  Clock c(options);
  CHECK(Add(&c, 1, 2) && Add(&c, 2, 3) && Add(&c, 3, 1) && Add(&c, 4, 2) && Add(&c, 5, 9));
  CHECK((c.Next() == Ids{1, 3}) && c.last.joined);  // 2 + 3 are too many, 2 + 1 + 2 as well
  CHECK((c.Next() == Ids{2}) && !c.last.joined);
  CHECK((c.Next() == Ids{4}) && !c.last.joined && (c.Next() == Ids{5}) && !c.last.joined);
  options.merge = Merge::kNever;
  Clock off(options);
  CHECK(Add(&off, 1, 2) && Add(&off, 2, 2) && off.Next().size() == 2 && !off.last.joined);
}

// Joined or packed, whichever was measured to be faster; both are tried first.
void JoinsWhereMeasuredToPay() {
  for (double us : {20.0, 2000.0}) {
    Clock c(Impatient());
    uint64_t id = 1;
    int joined = 0;
    for (int i = 0; i < 200; ++i) {
      CHECK(Add(&c, id, 1) && Add(&c, id + 1, 1));
      id += 2;
      while (c.Next().size() && !c.last.joined) c.Run(100);
      if (!c.last.joined || c.last.members.empty()) continue;
      ++joined;
      RunJoined(&c, us);
      c.last = {};
    }
    CHECK(us < 100 ? joined > 180 : joined < 20);
    CHECK(joined >= 3 && joined < 198);  // the other way is tried
  }
}

// Nobody is joined that would make another one late.
void JoiningKeepsDeadlines() {
  Clock c(Impatient());
  for (int i = 0; i < 4; ++i) {
    c.estimates.Measured(77, 1, 50);
    c.estimates.Measured(77, 8, 400);
  }
  CHECK(Add(&c, 1, 1, 9, c.now + 300) && Add(&c, 2, 8) && Add(&c, 3, 1));
  CHECK((c.Next() == Ids{1, 3}) && c.last.joined);  // 8 rows more take 450 us
  Clock late(Impatient());
  for (int i = 0; i < 4; ++i) late.estimates.Measured(77, 1, 50);
  CHECK(Add(&late, 1, 1, 9, late.now + 250) && Add(&late, 2, 1));
  late.now += 240;  // it is late whatever is done
  CHECK(late.Next().size() == 2 && late.last.joined);
}

// What could not be joined runs by itself; sizes that never can be are not tried again, failures are for a while.
void WhatCannotBeJoinedRunsApart() {
  Clock c(Impatient());
  auto give_back = [&](Joining how) {
    c.policy.Joined(c.last, how);
    c.last.parts.clear();
    c.policy.Finished(c.last, c.last.estimate_us, c.now);
    for (uint64_t id : c.last.members) c.policy.Restart(id, c.now);
  };
  auto apart = [&] {
    while (c.Next().size()) {
      CHECK(!c.last.joined);
      c.Run(10);
    }
    CHECK(c.policy.held() == 0);
  };
  CHECK(Add(&c, 1, 2) && Add(&c, 2, 2) && c.Next().size() == 2 && c.last.joined);
  give_back(Joining::kNever);
  apart();
  CHECK(Add(&c, 3, 2) && Add(&c, 4, 2) && c.Next().size() == 2 && !c.last.joined);
  c.Run(10);
  apart();
  CHECK(Add(&c, 5, 1) && Add(&c, 6, 1) && c.Next().size() == 2 && c.last.joined);
  // As after a run whose last unit was issued: it begins at the first one again.
  for (uint64_t id : c.last.members) CHECK(!c.policy.Advance(id, 2, c.now));
  for (uint64_t id : c.last.members) c.policy.Retire(id);
  give_back(Joining::kFailed);
  apart();
  uint64_t id = 7;
  int tried = 0;
  for (; tried < 50; ++tried) {
    CHECK(Add(&c, id, 1) && Add(&c, id + 1, 1) && c.Next().size() == 2);
    id += 2;
    if (c.last.joined) break;
    c.Run(10);
    apart();
  }
  CHECK(tried > 4 && tried < 50);
  CHECK(c.policy.device_stats(c.now).unmerged_requests == 4);
}

// --- threads ------------------------------------------------------------------------------------------------

// A request whose units must run one after the other, each once.
class Counting : public Request {
 public:
  enum class Fate { kRuns, kFails, kIsCancelled, kFailsJoined };  // the last: runs, but makes joined runs fail

  void Done(Outcome outcome, const std::string& why) override {
    CHECK(done.fetch_add(1) == 0 && on_device == 0);
    ended = outcome;
    said = why;
    finished = true;
  }

  Fate fate = Fate::kRuns;
  size_t fails_at = 0;
  std::atomic<size_t> next{0};
  std::atomic<int> on_device{0}, done{0};
  std::atomic<bool> finished{false};
  Outcome ended = Outcome::kRejected;
  std::string said;
};

// Runs units, at once or, when it `enqueues`, while somebody waits for the ticket.
class CountingDevice : public Device {
 public:
  CountingDevice(int lanes, bool enqueues, uint64_t seed) : lanes_(lanes), enqueues_(enqueues), seed_(seed) {}
  const std::string& name() const override { return name_; }
  bool enqueues() const override { return enqueues_; }
  std::vector<LaneKind> lanes() const override { return std::vector<LaneKind>(lanes_, LaneKind::kAny); }

  std::unique_ptr<Ticket> Issue(size_t lane, std::vector<Member>* members) override {
    std::minstd_rand rng(static_cast<uint32_t>(seed_ + lane + members->size()));
    uint64_t cluster = members->front().request->work->units[members->front().unit].cluster;
    std::vector<Counting*> on;
    for (Member& m : *members) {
      auto* r = static_cast<Counting*>(m.request);
      CHECK(r->done == 0 && r->next++ == m.unit && r->work->units[m.unit].cluster == cluster);
      m.failed = r->fate == Counting::Fate::kFails && m.unit == r->fails_at;
      if (m.failed) m.error = "unit " + std::to_string(m.unit) + " fails";
      ++r->on_device;
      on.push_back(r);
    }
    most_ = std::max(most_.load(), members->size());
    if (rng() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 300));
    if (enqueues_) return std::make_unique<Later>(std::move(on));
    for (Counting* r : on) --r->on_device;
    return nullptr;
  }
  size_t most() const { return most_; }

  std::unique_ptr<Ticket> IssueJoined(size_t lane, const std::vector<Request*>& requests, Joining* how) override {
    std::minstd_rand rng(static_cast<uint32_t>(seed_ + 7 * lane + requests.size()));
    uint32_t fate = rng() % 8;
    *how = fate == 0 ? Joining::kNotNow : Joining::kDone;
    bool fails = false;
    int64_t rows = 0;
    for (Request* request : requests) {
      auto* r = static_cast<Counting*>(request);
      CHECK(r->done == 0 && r->next == 0 && r->on_device == 0 && r->merge.key == requests[0]->merge.key);
      fails |= r->fate == Counting::Fate::kFailsJoined;
      rows += r->merge.rows;
    }
    CHECK(requests.size() > 1 && rows <= 12);
    if (rows > 10) *how = Joining::kNever;
    if (fails && !enqueues_ && *how == Joining::kDone) *how = Joining::kFailed;
    if (*how != Joining::kDone) return nullptr;
    if (enqueues_) return std::make_unique<LaterJoined>(requests, fails);
    for (Request* request : requests) {
      auto* r = static_cast<Counting*>(request);
      r->next = r->work->units.size();
    }
    return nullptr;
  }

 private:
  struct LaterJoined : Ticket {
    LaterJoined(const std::vector<Request*>& requests, bool f) : fails(f) {
      for (Request* request : requests) on.push_back(static_cast<Counting*>(request));
      for (Counting* r : on) ++r->on_device;
    }
    double Wait(std::string* error) override {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (fails) *error = "a joined run fails";
      for (Counting* r : on) {
        if (!fails) r->next = r->work->units.size();
        --r->on_device;
      }
      return 50;
    }
    bool Ended() override { return false; }
    std::vector<Counting*> on;
    const bool fails;
  };

  struct Later : Ticket {
    explicit Later(std::vector<Counting*> requests) : on(std::move(requests)) {}
    double Wait(std::string*) override {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      for (Counting* r : on) --r->on_device;
      return 50;
    }
    bool Ended() override { return false; }
    std::vector<Counting*> on;
  };
  const std::string name_ = "counting";
  const size_t lanes_;
  const bool enqueues_;
  const uint64_t seed_;
  std::atomic<size_t> most_{0};
};

// The ticket of a request that its caller ran.
struct OverSoon : Device::Ticket {
  double Wait(std::string*) override { return 20; }
  bool Ended() override { return ++asked > 1; }
  int asked = 0;
};

// What a caller does that may have to run its request.
void Submit(Coalescer* coalescer, const std::shared_ptr<Counting>& r, Coalescer::MayRun may_run) {
  Coalescer::Taken taken = coalescer->Submit(r, may_run);
  CHECK(taken == Coalescer::Taken::kHeld ||
        (may_run != Coalescer::MayRun::kNever && taken == Coalescer::Taken::kAlone));
  if (taken == Coalescer::Taken::kHeld) return;
  CHECK(r->on_device == 0 && r->next == 0);
  bool fails = r->fate == Counting::Fate::kFails;
  coalescer->RanAlone(fails ? nullptr : std::make_unique<OverSoon>());
  r->next = r->work->units.size();
  r->said = fails ? "unit " + std::to_string(r->fails_at) + " fails" : "";
  r->ended = fails ? Outcome::kFailed : Outcome::kCompleted;
  ++r->done;
}

// Threads submit requests of several kinds, some of which fail or are cancelled: each is answered once, as it must be.
void NothingIsLostOrDoubled(bool enqueues, int lanes, uint64_t seed) {
  Coalescer::Options options;
  options.policy.max_instances = 24;
  options.policy.max_pack = 8;
  options.policy.max_merge = 12;
  Coalescer coalescer(options, std::make_unique<CountingDevice>(lanes, enqueues, seed), "");
  TenantOptions limited;
  limited.max_in_flight = 2;
  limited.best_effort = true;
  coalescer.SetTenant("t1", limited);
  std::vector<std::shared_ptr<const Work>> works = {WorkOf({1, 2, 3, 2, 1}, 20), WorkOf({1, 2}, 20), WorkOf({4}, 20),
                                                    WorkOf(std::vector<uint64_t>(30, 2), 5)};
  constexpr int kThreads = 6, kEach = 120;
  std::vector<std::vector<std::shared_ptr<Counting>>> all(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::minstd_rand rng(static_cast<uint32_t>(seed * 31 + t + 1));
      for (int i = 0; i < kEach; ++i) {
        auto r = std::make_shared<Counting>();
        r->tenant = "t" + std::to_string(rng() % 3);
        size_t kind = rng() % works.size();
        r->work = works[kind];
        if (kind == 1) r->merge = {5, 50, static_cast<int64_t>(rng() % 4)};
        uint32_t fate = rng() % 6;
        if (fate == 0) {
          r->fate = Counting::Fate::kFails;
          r->fails_at = rng() % r->work->units.size();
        } else if (fate == 1) {
          r->fate = Counting::Fate::kIsCancelled;
        } else if (fate == 2 && rng() % 3 == 0) {
          r->fate = Counting::Fate::kFailsJoined;
        }
        if (r->fate == Counting::Fate::kFails) r->merge = {};
        bool early = rng() % 5 == 0;
        if (r->fate == Counting::Fate::kIsCancelled && early) coalescer.Cancel(r.get());
        all[t].push_back(r);
        Submit(&coalescer, r, static_cast<Coalescer::MayRun>(t % 3));
        if (r->fate == Counting::Fate::kIsCancelled) {
          if (rng() % 2) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 500));
          coalescer.Cancel(r.get());
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(coalescer.Drain(20'000'000));
  int64_t ends[4] = {};
  for (auto& list : all) {
    for (auto& r : list) {
      CHECK(r->done == 1);
      ++ends[static_cast<int>(r->ended)];
      bool fails = r->fate == Counting::Fate::kFails;
      if (fails) CHECK(r->ended == Outcome::kFailed && r->said == "unit " + std::to_string(r->fails_at) + " fails");
      bool runs = r->fate == Counting::Fate::kRuns || r->fate == Counting::Fate::kFailsJoined;
      if (runs) CHECK(r->ended == Outcome::kCompleted);
      if (r->ended == Outcome::kCompleted) CHECK(r->next == r->work->units.size());
    }
  }
  int64_t counted[4] = {}, requests = 0;
  for (const auto& [name, t] : coalescer.tenants()) {
    requests += t.stats.requests;
    for (int i = 0; i < 4; ++i) counted[i] += t.stats.outcomes[i];
    CHECK(t.in_flight == 0 && t.queue.empty());
  }
  CHECK(counted[0] == ends[0] && counted[3] == ends[3] && counted[0] + counted[2] + counted[3] == requests);
  Coalescer::Stats stats = coalescer.stats();
  CHECK(stats.counts.merged_requests >= 2 * stats.counts.merged_runs);
  CHECK(stats.held == 0 && stats.counts.steps >= stats.counts.superkernels);
  coalescer.Stop();
  auto late = std::make_shared<Counting>();
  late->work = works[0];
  CHECK(coalescer.Submit(late) == Coalescer::Taken::kStopped && late->done == 0);
}

// Tenants are given other rights and removed while their requests are on their way, and others cancel those: each is
// answered once, and what is forgotten leaves nothing behind.
void TenantsComeAndGo(bool enqueues, uint64_t seed) {
  Coalescer::Options options;
  options.policy.max_instances = 16;
  Coalescer coalescer(options, std::make_unique<CountingDevice>(2, enqueues, seed), "");
  constexpr int kThreads = 3, kEach = 200;
  std::vector<std::vector<std::shared_ptr<Counting>>> all(kThreads);
  std::mutex mu;
  std::vector<std::shared_ptr<Counting>> sent;  // under the lock
  std::atomic<int> left{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::minstd_rand rng(static_cast<uint32_t>(seed * 17 + t + 1));
      for (int i = 0; i < kEach; ++i) {
        auto r = all[t].emplace_back(std::make_shared<Counting>());
        r->tenant = "t" + std::to_string(rng() % 3);
        r->work = WorkOf({rng() % 2, 2}, 20);
        if (rng() % 8 == 0) r->deadline = NowMicros() - static_cast<Micros>(rng() % 100);
        {
          std::lock_guard<std::mutex> lock(mu);
          sent.push_back(r);
        }
        if (rng() % 16 == 0) coalescer.Cancel(r.get());
        CHECK(coalescer.Submit(r) == Coalescer::Taken::kHeld);
      }
      --left;
    });
  }
  threads.emplace_back([&] {  // the operator
    std::minstd_rand rng(static_cast<uint32_t>(seed));
    while (left) {
      std::string name = "t" + std::to_string(rng() % 3);
      TenantOptions rights;
      rights.max_in_flight = 1 + static_cast<int>(rng() % 2);
      rights.best_effort = rng() % 2;
      rng() % 2 ? coalescer.SetTenant(name, rights) : coalescer.RemoveTenant(name);
      std::this_thread::sleep_for(std::chrono::microseconds(rng() % 100));
    }
  });
  threads.emplace_back([&] {  // clients that change their minds, some when the answer is on its way
    std::minstd_rand rng(static_cast<uint32_t>(seed + 5));
    while (left) {
      std::shared_ptr<Counting> r;
      {
        std::lock_guard<std::mutex> lock(mu);
        if (!sent.empty()) r = sent[sent.size() - 1 - rng() % std::min<size_t>(sent.size(), 8)];
      }
      if (r) coalescer.Cancel(r.get());
      std::this_thread::sleep_for(std::chrono::microseconds(rng() % 50));
    }
  });
  for (std::thread& t : threads) t.join();
  CHECK(coalescer.Drain(20'000'000));
  int64_t ends[4] = {};
  for (auto& list : all) {
    for (auto& r : list) {
      CHECK(r->done == 1 && r->ended != Outcome::kFailed);
      CHECK(r->ended != Outcome::kCompleted || r->next == r->work->units.size());
      ++ends[static_cast<int>(r->ended)];
    }
  }
  for (Outcome outcome : {Outcome::kCompleted, Outcome::kCancelled, Outcome::kRejected}) {
    CHECK(ends[static_cast<int>(outcome)] > 0);
  }
  for (const auto& [name, t] : coalescer.tenants()) CHECK(t.in_flight == 0 && t.queue.empty());
  for (int i = 0; i < 3; ++i) coalescer.RemoveTenant("t" + std::to_string(i));
  CHECK(coalescer.tenants().empty() && coalescer.stats().held == 0);
}

// Issues nothing until it is opened.
class ClosedDevice : public CountingDevice {
 public:
  explicit ClosedDevice(bool enqueues) : CountingDevice(1, enqueues, /*seed=*/3) {}  // of this seed, four are joined
  std::unique_ptr<Ticket> Issue(size_t lane, std::vector<Member>* members) override {
    while (!open) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return CountingDevice::Issue(lane, members);
  }
  std::atomic<bool> open{false};
};

// What comes while the only lane is busy shares the next superkernel, or runs as one; what fails joined runs apart.
void WhatIsHeldTogetherRunsTogether(bool enqueues, bool joined, bool fails) {
  constexpr int kTogether = 4;
  Coalescer::Options options;
  options.policy.merge = Merge::kWhereverItCan;
  auto owned = std::make_unique<ClosedDevice>(enqueues);
  ClosedDevice* device = owned.get();
  Coalescer coalescer(options, std::move(owned), "");
  std::vector<std::shared_ptr<Counting>> all;
  for (int i = 0; i <= kTogether; ++i) {
    auto r = all.emplace_back(std::make_shared<Counting>());
    r->work = WorkOf({i ? 2u : 1u}, 20);
    if (i && joined) r->merge = {5, 50, 1};
    if (i == 1 && fails) r->fate = Counting::Fate::kFailsJoined;
    CHECK(coalescer.Submit(r) == Coalescer::Taken::kHeld);
  }
  device->open = true;
  CHECK(coalescer.Drain(20'000'000));
  for (auto& r : all) CHECK(r->done == 1 && r->ended == Outcome::kCompleted);
  DeviceStats counts = coalescer.stats().counts;
  CHECK(counts.merged_runs == (joined && !fails) && counts.merged_requests == kTogether * counts.merged_runs);
  CHECK(counts.unmerged_requests == (fails ? kTogether : 0));
  CHECK(joined || device->most() == kTogether);
}

struct OverWhen : Device::Ticket {
  explicit OverWhen(const std::atomic<bool>* o) : over(o) {}
  double Wait(std::string*) override { return 20; }
  bool Ended() override { return *over; }
  const std::atomic<bool>* const over;
};

// A request that its caller runs ends, and nobody else comes: what waited for it goes on.
void OthersGoOnAfterARequestAlone(bool enqueues, int max_in_flight, int max_instances) {
  Coalescer::Options options;
  options.policy.max_instances = max_instances;
  Coalescer coalescer(options, std::make_unique<CountingDevice>(1, enqueues, 5), "");
  TenantOptions limited;
  limited.max_in_flight = max_in_flight;
  coalescer.SetTenant("a", limited);
  std::shared_ptr<Counting> requests[2];
  for (auto& r : requests) {
    r = std::make_shared<Counting>();
    r->tenant = "a";
    r->work = WorkOf({1, 2});
  }
  std::atomic<bool> over{false};
  CHECK(coalescer.Submit(requests[0], Coalescer::MayRun::kWhenIdle) == Coalescer::Taken::kAlone);
  coalescer.RanAlone(std::make_unique<OverWhen>(&over));
  std::thread second([&] { CHECK(coalescer.Submit(requests[1]) == Coalescer::Taken::kHeld); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(!requests[1]->finished);
  over = true;
  for (int i = 0; i < 10'000 && !requests[1]->finished; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(requests[1]->finished && requests[1]->ended == Outcome::kCompleted);
  second.join();
}

// Stop answers what is held and lets blocked submitters go.
void StopWithRequestsHeld(bool enqueues) {
  Coalescer::Options options;
  options.policy.max_instances = 2;
  auto coalescer = std::make_unique<Coalescer>(options, std::make_unique<CountingDevice>(1, enqueues, 3), "");
  std::atomic<int> refused{0};
  std::vector<std::shared_ptr<Counting>> all(40);
  std::vector<std::thread> threads;
  for (auto& r : all) {
    r = std::make_shared<Counting>();
    r->work = WorkOf({1, 2, 3}, 50);
  }
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = t; i < all.size(); i += 4) {
        if (coalescer->Submit(all[i]) == Coalescer::Taken::kStopped) ++refused, all[i]->done = 1;
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  coalescer->Stop();
  for (std::thread& t : threads) t.join();
  for (auto& r : all) CHECK(r->done == 1);
  coalescer.reset();
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  EarliestDeadlineWhenSlackIsGone();
  EqualWorkSharesASuperkernel();
  WaitsForCompanyThatIsBehindWithinTheLimit();
  StopsWaitingAtItsLimitAndWhenSlackIsGone();
  NoCompanyNoWait();
  LatencyBeforeBestEffort();
  for (bool joined : {false, true}) CriticalRequestsDoNotJoinWhatFills(joined);
  NobodyWaitsForEver();
  BestEffortJoinsOnlyWithinSlack();
  SharesFollowWeights();
  ADeadlineThatIsOverIsRejected();
  AdmissionLooksAtTheQueue();
  AdmissionFollowsMeasurements();
  RefusalsForALongTimeEnd();
  MeasurementsDoNotCompound();
  OutliersCountLittle();
  ALatencyRequestMayBeRunByItsCaller();
  WaitsForArrivalsThatAreUsual();
  ALoneClientDoesNotWait();
  QuotasQueueThenReject();
  DriftThrottles();
  PacksWhereMeasuredToPay();
  GathersWhileOthersAreUnderWay();
  RequestsOfOneKeyAreJoinedWhateverTheirSizes();
  JoinedBatchesAreBounded();
  JoinsWhereMeasuredToPay();
  JoiningKeepsDeadlines();
  WhatCannotBeJoinedRunsApart();
  EstimatesFollowAndAreKept();
  for (bool enqueues : {false, true}) {
    for (int lanes : {1, 3}) NothingIsLostOrDoubled(enqueues, lanes, seed);
    TenantsComeAndGo(enqueues, seed);
    WhatIsHeldTogetherRunsTogether(enqueues, /*joined=*/false, /*fails=*/false);
    for (bool fails : {false, true}) WhatIsHeldTogetherRunsTogether(enqueues, /*joined=*/true, fails);
    StopWithRequestsHeld(enqueues);
    OthersGoOnAfterARequestAlone(enqueues, /*max_in_flight=*/1, /*max_instances=*/8);
    OthersGoOnAfterARequestAlone(enqueues, /*max_in_flight=*/8, /*max_instances=*/1);
  }
  printf("%d checks\n", g_checks.load());
}
