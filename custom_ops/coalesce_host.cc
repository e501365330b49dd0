#include "coalesce_host.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "hash.h"

namespace tf_stitch {
namespace {

constexpr double kCyclesPerUs = 3000;  // a guess, until times are measured

// Products of one element type share a loop, whatever their sizes; so do runs of one kernel.
uint64_t ClusterOf(const Program& program, const HostCode& code, size_t step) {
  const Step& s = program.steps[step];
  if (s.kind == Step::Kind::kLibrary) return static_cast<uint64_t>(program.buffers[s.buffers[0]].dtype);
  return reinterpret_cast<uint64_t>(code.kernel(step));
}

// The same in every process: measured times are kept by it.
uint64_t ShapeOf(const Program& program, const StepPlan& plan, size_t step) {
  const Step& s = program.steps[step];
  uint64_t h = kHashOfNothing;
  std::string name = s.kind == Step::Kind::kLibrary ? NameOf(s.call) : s.kernel;
  for (unsigned char c : "host " + name) h = Mix(h, c);
  for (int64_t flag : FlagsOf(s)) h = Mix(h, static_cast<uint64_t>(flag));
  h = Mix(h, static_cast<uint64_t>(program.buffers[s.buffers[0]].dtype));
  for (int64_t d : plan.dims) h = Mix(h, static_cast<uint64_t>(d));
  return Mix(h, static_cast<uint64_t>(plan.blocks));
}

class HostDevice : public Device {
 public:
  HostDevice(int workers, int64_t merge_bytes)
      : lanes_(static_cast<size_t>(workers), LaneKind::kAny), budget_(merge_bytes) {}

  const std::string& name() const override { return name_; }
  std::vector<LaneKind> lanes() const override { return lanes_; }
  std::unique_ptr<Ticket> Issue(size_t lane, std::vector<Member>* members) override;
  std::unique_ptr<Ticket> IssueJoined(size_t lane, const std::vector<Request*>& requests, Joining* how) override;

 private:
  Joining RunJoined(const HostRequest& first, const Plan& plan, JoinedRun* run);

  const std::string name_ = "CPU";
  const std::vector<LaneKind> lanes_;
  MergeBudget budget_;
};

// A member's step, and the shards of blocks that it adds to the loop.
struct Problem {
  const HostRequest* request;
  size_t step;
  std::vector<void*> buffers;
  int32_t status = 0;
};
struct Shard {
  Problem* problem;
  int64_t begin, end;
};

void Run(const Shard& s) {
  const HostRequest& r = *s.problem->request;
  RunBlocks(*r.program, *r.code, *r.plan, s.problem->step, s.problem->buffers.data(), s.begin, s.end,
            &s.problem->status);
}

std::unique_ptr<Device::Ticket> HostDevice::Issue(size_t, std::vector<Member>* members) {
  std::vector<Problem> problems(members->size());
  std::vector<Shard> shards;
  int64_t cycles = 0;
  const auto& first = static_cast<const HostRequest&>(*members->front().request);
  for (size_t i = 0; i < members->size(); ++i) {
    const auto& r = static_cast<const HostRequest&>(*(*members)[i].request);
    Problem& p = problems[i];
    p.request = &r;
    p.step = r.host_work->steps[(*members)[i].unit];
    for (uint32_t id : r.program->steps[p.step].buffers) p.buffers.push_back(r.memory[id]);
    const StepPlan& s = r.plan->steps[p.step];
    cycles += s.blocks * s.cost;
    int64_t size = ShardSize(s.blocks, s.cost, first.threads);
    for (int64_t begin = 0; begin < s.blocks; begin += size) {
      shards.push_back({&p, begin, std::min(begin + size, s.blocks)});
    }
  }
  // The loop goes over shards; several small problems make one turn of a thread.
  auto total = static_cast<int64_t>(shards.size());
  int64_t turn = ShardSize(total, std::max<int64_t>(cycles / total, 1), first.threads);
  auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) Run(shards[static_cast<size_t>(i)]);
  };
  if (turn >= total) {
    run(0, total);
  } else {
    first.parallel_for(total, turn, run);
  }
  for (size_t i = 0; i < members->size(); ++i) (*members)[i].failed = problems[i].status != 0;
  return nullptr;
}

std::unique_ptr<Device::Ticket> HostDevice::IssueJoined(size_t, const std::vector<Request*>& requests, Joining* how) {
  const auto& first = static_cast<const HostRequest&>(*requests.front());
  std::vector<JoinedRun::Member> members;
  int64_t rows = 0;
  *how = Joining::kNever;
  if (!JoinedRun::MembersOf<HostRequest>(requests, &members, &rows)) return nullptr;
  std::shared_ptr<const Plan> plan = first.joined_plan(JoinedSignature(*first.program, first.plan->signature, rows));
  JoinedRun run;
  if (plan && run.Lay(*first.program, *plan, members).empty()) *how = RunJoined(first, *plan, &run);
  return nullptr;
}

Joining HostDevice::RunJoined(const HostRequest& first, const Plan& plan, JoinedRun* run) {
  int64_t bytes = run->bytes();
  if (!budget_.Take(bytes)) return Joining::kNotNow;
  auto free_all = [&](char* memory) { free(memory), budget_.Give(bytes); };
  std::unique_ptr<char, decltype(free_all)> memory(
      static_cast<char*>(aligned_alloc(kArenaAlignment, static_cast<size_t>(std::max(bytes, kArenaAlignment)))),
      free_all);
  if (!memory) return budget_.Give(bytes), Joining::kNotNow;
  run->Place(memory.get());
  for (const Piece& piece : run->gathers()) CopyPiece(piece);
  if (RunHost(*first.program, *first.code, plan, run->memory(), first.parallel_for, first.threads)) {
    return Joining::kFailed;
  }
  for (const Piece& piece : run->scatters()) CopyPiece(piece);
  return Joining::kDone;
}

}  // namespace

HostWork::HostWork(const Program& program, const HostCode& code, const Plan& plan) : mergeable(program, plan, "host") {
  auto made = std::make_shared<Work>();
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const StepPlan& s = plan.steps[i];
    if (program.steps[i].kind == Step::Kind::kAlias || !s.blocks) continue;
    steps.push_back(i);
    double cost = static_cast<double>(s.blocks) * static_cast<double>(s.cost) / kCyclesPerUs;
    made->units.push_back({ClusterOf(program, code, i), ShapeOf(program, s, i), cost});
  }
  made->SetKind();
  work = std::move(made);
}

std::unique_ptr<Device> MakeHostDevice(int workers, int64_t merge_bytes) {
  return std::make_unique<HostDevice>(workers, merge_bytes);
}

std::unique_ptr<Device::Ticket> HasRun(double us) {
  struct Past : Device::Ticket {
    explicit Past(double us) : us(us) {}
    double Wait(std::string*) override { return us; }
    bool Ended() override { return true; }
    const double us;
  };
  return std::make_unique<Past>(us);
}

}  // namespace tf_stitch
