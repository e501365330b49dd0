// The policy's part in joining requests along their batch (merge.h): which are joined, and when that is worth it.
#include <algorithm>
#include <map>
#include <vector>

#include "scheduler.h"

namespace tf_stitch {
namespace {

constexpr int kTrials = 3;   // measurements of either way before they are compared
constexpr int kRetry = 32;   // one in so many goes the slower way: times change
constexpr int kPenalty = 8;  // runs of a shape that are not joined after one failed, twice as many each time
constexpr int kMostPenalty = 1024;
constexpr size_t kMostJoins = 4096;  // shapes remembered

Micros Add(Micros a, double us) { return a == kNever ? kNever : a + static_cast<Micros>(us); }

}  // namespace

// What a run of so many rows takes; the rows of a request that runs alone tell how long one takes until that is known.
double Policy::JoinedUs(const Entry& e, int64_t rows) const {
  double each = e.kind->remaining_us[0] / static_cast<double>(std::max<int64_t>(e.merge.rows, 1));
  return estimates_->Of(e.merge.shape, static_cast<int>(std::max<int64_t>(rows, 1)), each);
}

// Requests that share no launches gather all the same where they may be joined.
Company Policy::CompanyOf(const Entry& e) const {
  Company company = e.work->units[e.next].company;
  if (company != Company::kNone || options_.merge == Merge::kNever || e.next > 0 || !e.merge.key) return company;
  auto found = joins_.find(e.merge.shape);
  return found == joins_.end() || found->second.pays ? Company::kGathers : company;
}

// The leader and those that may be joined with it, while there is room.  Nobody is joined that would make a member
// late which would not be late without it.
std::vector<Policy::Entry*> Policy::Joinable(const Candidate& chosen, Micros now) {
  const Entry& leader = *chosen.leader;
  std::vector<Entry*> order, found;
  for (const auto& [cluster, list] : ready_) {
    for (Entry* e : list) {
      if (chosen.best_effort && !e->best_effort) continue;  // as in superkernels
      if (e->next == 0 && e->merge.key == leader.merge.key && KeepsCompany(*e, leader)) order.push_back(e);
    }
  }
  Order(&order, &leader);
  int64_t rows = 0, most = std::min<int64_t>(options_.max_merge, joins_[leader.merge.shape].refused_rows - 1);
  Micros due = kNever;  // the earliest deadline of a member that can be met
  for (Entry* e : order) {
    if (found.size() == static_cast<size_t>(options_.max_pack)) break;
    if (e->merge.rows > most - rows) continue;
    Micros own = Add(now, JoinedUs(*e, e->merge.rows)) <= e->deadline ? e->deadline : kNever;
    Micros both = std::min(due, own);
    if (!found.empty() && Add(now, JoinedUs(*e, rows + e->merge.rows)) > both) continue;
    due = both;
    rows += e->merge.rows;
    found.push_back(e);
  }
  return found;
}

// Whether one run takes no longer than the superkernels that these would make.  Each way is tried before the two are
// compared, and the slower one now and then.
bool Policy::JoiningPays(const std::vector<Entry*>& entries, int64_t rows) {
  const Entry& leader = *entries.front();
  int count = static_cast<int>(std::max<int64_t>(rows, 1));
  if (estimates_->Times(leader.merge.shape, count) < kTrials) return true;
  std::map<const Kind*, std::pair<const Work*, int>> groups;
  for (const Entry* e : entries) {
    auto& [work, members] = groups[e->kind];
    work = e->work.get();
    ++members;
  }
  double apart = 0;
  for (const auto& [kind, group] : groups) {
    const auto& [work, members] = group;
    for (const Unit& u : work->units) {
      if (estimates_->Times(u.shape, members) < kTrials) return false;
      apart += estimates_->Of(u.shape, members, u.cost_us);
    }
  }
  bool pays = joins_[leader.merge.shape].pays = JoinedUs(leader, rows) <= apart;
  return ++join_decisions_ % kRetry == 0 ? !pays : pays;
}

// False when the leader is to go the ordinary way.
bool Policy::FillJoined(const Candidate& chosen, Micros now, Superkernel* out) {
  const Entry& leader = *chosen.leader;
  if (options_.merge == Merge::kNever || leader.next > 0 || !leader.merge.key) return false;
  if (joins_.size() > kMostJoins) joins_.clear();
  JoinRecord& record = joins_[leader.merge.shape];
  if (record.skip > 0) return --record.skip, false;
  std::vector<Entry*> members = Joinable(chosen, now);
  int64_t rows = 0;
  for (const Entry* e : members) rows += e->merge.rows;
  if (members.size() < 2) return false;
  if (options_.merge == Merge::kWhereItPays && !JoiningPays(members, rows)) return false;
  *out = {};
  out->joined = true;
  out->estimate_us = JoinedUs(leader, rows);
  out->known = estimates_->Known(leader.merge.shape);
  out->launched = leader.work->units.size();
  int count = static_cast<int>(std::max<int64_t>(rows, 1));
  out->parts.push_back({leader.merge.shape, count, out->estimate_us / count});
  std::map<Tenant*, double> lone;
  for (Entry* e : members) {
    lone[e->tenant] += std::max(Remaining(*e), 1e-3);
    out->steps += e->work->units.size();
    Take(e, now, out);
  }
  Begin(chosen, lone, now, out);
  return true;
}

void Policy::Joined(const Superkernel& s, Joining how) {
  auto members = static_cast<int64_t>(s.members.size());
  JoinRecord& record = joins_[s.parts.front().shape];
  if (how == Joining::kDone) {
    record.penalty = 0;
    stats_.merged_requests += members;
    ++stats_.merged_runs;
    return;
  }
  stats_.unmerged_requests += members;
  if (how == Joining::kNever) {
    record.refused_rows = std::min<int64_t>(record.refused_rows, s.parts.front().count);
  } else {
    record.penalty = std::clamp(2 * record.penalty, kPenalty, kMostPenalty);
    record.skip = record.penalty;
  }
}

void Policy::Restart(uint64_t id, Micros now) {
  Entry& e = entries_.at(id);
  --e.kind->at[e.next];
  e.next = 0;
  ++e.kind->at[0];
  e.merge = {};
  MakeReady(&e, now);
}

}  // namespace tf_stitch
