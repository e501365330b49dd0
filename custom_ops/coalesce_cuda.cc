#include "coalesce_cuda.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "autotune.h"
#include "cuda_capture.h"
#include "hash.h"
#include "pause.h"

namespace tf_stitch {
namespace {

// A request that comes late waits for the next superkernel, rather than joining this one on its way: so a unit is
// as long as a graph may well be.
constexpr size_t kLaunchesPerUnit = 256;
constexpr double kLaunchUs = 3;  // guesses, until times are measured
constexpr double kBytesPerUs = 2e6;
constexpr size_t kTableBytes = size_t{64} << 10;
constexpr size_t kTablesKept = 64;
constexpr double kSpinUs = 60;  // a wait that is over by then is not worth a sleep

template <class T>
void Append(const T& value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::mutex& HeldMutex() {
  static auto& mu = *new std::mutex;
  return mu;
}

LaunchList::Held& HeldLists() {
  static auto& held = *new LaunchList::Held;
  return held;
}

// What tells one launch from another, but for addresses; stays the same from process to process.
std::string TextOf(const Program& program, const Plan& plan, size_t step, bool tf32) {
  const Step& s = program.steps[step];
  const StepPlan& p = plan.steps[step];
  std::string out = s.kind == Step::Kind::kLibrary ? "library" : s.kernel;
  for (int64_t flag : FlagsOf(s)) Append(flag, &out);
  Append(tf32, &out);
  Append(s.call, &out);
  Append(program.buffers[s.buffers[0]].dtype, &out);
  for (int64_t n : p.dims) Append(n, &out);
  Append(s.threads, &out);
  Append(p.blocks, &out);
  Append(p.shared_bytes, &out);
  return out;
}

double CostUs(const Program& program, const Plan& plan, size_t step) {
  double bytes = 0;
  for (uint32_t id : program.steps[step].buffers) bytes += static_cast<double>(plan.buffer_bytes[id]);
  return kLaunchUs + bytes / kBytesPerUs;
}

}  // namespace

LaunchList::LaunchList(std::string launches) {
  static uint64_t last = 0;
  std::lock_guard<std::mutex> lock(HeldMutex());
  auto [at, is_new] = HeldLists().try_emplace(std::move(launches));
  if (is_new) at->second.number = ++last;  // never one that a request of a plan that is gone may still have
  ++at->second.holders;
  at_ = at;
}

LaunchList::~LaunchList() {
  std::lock_guard<std::mutex> lock(HeldMutex());
  if (--at_->second.holders == 0) HeldLists().erase(at_);
}

size_t LaunchList::Count() {
  std::lock_guard<std::mutex> lock(HeldMutex());
  return HeldLists().size();
}

CudaWork::CudaWork(const Program& program, const Plan& plan, const CudaPlan& ready, bool may_pack)
    : mergeable(program, plan, ready.tf32() ? "cuda tf32" : "cuda") {
  std::vector<std::string> texts;
  std::string all;
  size_t packed = 0;
  for (size_t i = 0; i < ready.launches(); ++i) {
    size_t step = ready.step(i);
    launches.emplace_back(program, plan, ready, i);
    packed += launches.back().many;
    texts.push_back(TextOf(program, plan, step, ready.tf32()));
    all += texts.back();
    Append(ready.code()->many(step), &all);  // of one module: equal names mean equal code there
    Append(ready.code()->kernel(step), &all);
  }
  list = std::make_unique<LaunchList>(std::move(all));
  // Where some cannot be shared, each request's own graph is cheaper than launches one by one between superkernels.
  worth_packing = may_pack && packed == ready.launches();
  auto made = std::make_shared<Work>();
  for (size_t first = 0; first < ready.launches();) {
    size_t end = worth_packing ? std::min(first + kLaunchesPerUnit, ready.launches()) : ready.launches();
    std::string shape = "cuda";
    double cost = 0;
    for (size_t i = first; i < end; ++i) {
      shape += texts[i];
      cost += CostUs(program, plan, ready.step(i));
    }
    made->units.push_back({(list->number() << 16) + made->units.size(), HashOfBytes(shape), cost,
                           worth_packing ? Company::kGathers : Company::kNone});
    begin.push_back(first);
    first = end;
  }
  begin.push_back(ready.launches());
  made->SetKind();
  work = std::move(made);
}

// --- the device ------------------------------------------------------------------------------------------

CudaDevice::CudaDevice(const cuda::Driver& driver, cuda::Context context, int64_t merge_bytes)
    : driver_(driver),
      context_(context),
      events_(std::make_shared<cuda::EventPool>(driver, context)),
      maker_(std::make_unique<PackMaker>(driver, context)),
      merge_memory_(driver, merge_bytes) {
  cuda::Device device = 0;
  driver.CtxGetDevice(&device);
  name_ = "GPU:" + std::to_string(device);
}

std::unique_ptr<CudaDevice> CudaDevice::Make(const cuda::Driver& driver, cuda::Context context, int lanes,
                                             int64_t merge_bytes, std::string* error) {
  cuda::ScopedContext scope(driver, context);
  std::unique_ptr<CudaDevice> device(new CudaDevice(driver, context, merge_bytes));
  int least = 0, greatest = 0;
  driver.CtxGetStreamPriorityRange(&least, &greatest);
  for (int i = 0; i < lanes && error->empty(); ++i) {
    bool best_effort = lanes > 1 && i + 1 == lanes;
    device->lanes_.emplace_back().streams =
        cuda::LaneStreams::Make(driver, best_effort ? least : greatest, device->events_, error);
  }
  if (error->empty()) device->callers_.streams = cuda::LaneStreams::Make(driver, greatest, device->events_, error);
  return error->empty() ? std::move(device) : nullptr;
}

CudaDevice::~CudaDevice() {
  maker_.reset();  // it makes packs of the lanes
  cuda::ScopedContext scope(driver_, context_);
  lanes_.clear();
  callers_.packs.Clear();
  callers_.streams.reset();
  tables_.clear();
  merge_memory_.Clear();
}

std::vector<LaneKind> CudaDevice::lanes() const {
  if (lanes_.size() == 1) return {LaneKind::kAny};
  std::vector<LaneKind> kinds(lanes_.size(), LaneKind::kLatency);
  kinds.back() = LaneKind::kBestEffort;
  return kinds;
}

std::shared_ptr<cuda::EventTag> CudaDevice::Record(cuda::Stream stream) {
  cuda::ScopedContext scope(driver_, context_);
  return events_->Record(stream);
}

// A superkernel between two events.  Holds what the device still uses.
struct CudaDevice::UnderWay : Device::Ticket {
  explicit UnderWay(CudaDevice* d) : device(d) {}
  ~UnderWay() override {
    cuda::ScopedContext scope(device->driver_, device->context_);
    {
      std::lock_guard<std::mutex> lock(device->mu_);
      for (auto& table : tables) {
        if (device->tables_.size() < kTablesKept) device->tables_.push_back(std::move(table));
      }
    }
    tables.clear();  // frees those that are not kept, which wants the context
  }

  double Wait(std::string* error) override {
    cuda::ScopedContext scope(device->driver_, device->context_);
    cuda::Result result = WaitForEnd();
    float ms = 0;
    if (!result && begin && end) result = device->driver_.EventElapsedTime(&ms, begin.get(), end.get());
    *error = result ? cuda::Failed(device->driver_, result, "running a superkernel") : not_enqueued;
    return static_cast<double>(ms) * 1000;
  }

  bool Ended() override {
    cuda::ScopedContext scope(device->driver_, device->context_);
    return !end || device->driver_.EventQuery(end.get()) != cuda::kNotReady;
  }

  // Looks again and again for a while, then less often: a driver that blocks wakes up late.
  cuda::Result WaitForEnd() const {
    if (!end) return cuda::WaitForContext(device->driver_) ? cuda::kSuccess : cuda::kCaptureUnsupported;
    Micros start = NowMicros();
    while (true) {
      cuda::Result result = device->driver_.EventQuery(end.get());
      if (result != cuda::kNotReady) return result;
      if (static_cast<double>(NowMicros() - start) < kSpinUs) {
        Pause();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      }
    }
  }

  CudaDevice* const device;
  std::shared_ptr<cuda::EventTag> begin, end;
  std::vector<std::shared_ptr<cuda::HostTable>> tables;
  Held held;                 // plans, with their graphs and modules
  std::string not_enqueued;  // why
};

std::shared_ptr<cuda::HostTable> CudaDevice::Table(size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (auto it = tables_.begin(); it != tables_.end(); ++it) {
      if ((*it)->bytes() < bytes) continue;
      std::shared_ptr<cuda::HostTable> found = std::move(*it);
      tables_.erase(it);
      return found;
    }
  }
  return std::make_shared<cuda::HostTable>(driver_, std::max(bytes, kTableBytes));
}

// Its inputs, or what it enqueued on another lane, come first.
std::string CudaDevice::WaitFor(cuda::Stream stream, size_t lane, const CudaRequest& request) {
  cuda::Event event = !request.last_               ? request.inputs.get()
                      : request.last_lane_ != lane ? request.last_.get()
                                                   : nullptr;
  if (!event) return "";
  cuda::Result result = driver_.StreamWaitEvent(stream, event, 0);
  return result ? cuda::Failed(driver_, result, "waiting for a request's inputs") : "";
}

std::unique_ptr<Device::Ticket> CudaDevice::RunAlone(const CudaRequest& request, cuda::Stream stream,
                                                     const std::function<std::string()>& launch, std::string* error) {
  cuda::ScopedContext scope(driver_, context_);
  auto under_way = std::make_unique<UnderWay>(this);
  under_way->held.push_back(request.plan);
  under_way->begin = request.inputs;
  if (!ReplayAlone(request, stream, under_way.get(), error)) *error = launch();
  under_way->end = events_->Record(stream);
  if (error->empty() && !under_way->end) *error = "an event cannot be recorded";
  if (error->empty()) return under_way;
  driver_.StreamSynchronize(stream);  // its table may be on its way, and nobody waits for this ticket
  return nullptr;
}

// By a graph that is at hand: the plan's, where it holds these addresses, or that of a pack of one, which takes any.
// False when nothing was enqueued: there is none, or it is time that the plan makes one.
bool CudaDevice::ReplayAlone(const CudaRequest& request, cuda::Stream stream, UnderWay* under_way, std::string* error) {
  if (!request.graphs || !request.ready->has_graphs()) return false;
  if (request.ready->Replay(request.memory, request.workspace, stream, error)) return true;
  const CudaWork& work = *request.cuda_work;
  if (!work.worth_packing || work.work->units.size() > 1) return false;
  std::vector<CudaRequest*> one{const_cast<CudaRequest*>(&request)};
  std::shared_ptr<const Pack> pack = PackFor(request, 0, 1, &callers_);
  return pack && EnqueuePack(one, *pack, stream, under_way, error);
}

std::unique_ptr<Device::Ticket> CudaDevice::Between(size_t index, const std::vector<Request*>& requests, Held held,
                                                    const std::function<std::string(UnderWay*)>& enqueue,
                                                    std::string* error) {
  cuda::Stream stream = lanes_[index].streams->main();
  auto under_way = std::make_unique<UnderWay>(this);
  under_way->held = std::move(held);
  for (Request* r : requests) {
    auto* request = static_cast<CudaRequest*>(r);
    under_way->held.push_back(request->plan);
    if (error->empty()) *error = WaitFor(stream, index, *request);
  }
  under_way->begin = events_->Record(stream);
  if (error->empty() && !under_way->begin) *error = "an event cannot be recorded";
  if (error->empty()) *error = enqueue(under_way.get());
  under_way->end = events_->Record(stream);
  if (error->empty() && !under_way->end) *error = "an event cannot be recorded";
  under_way->not_enqueued = *error;
  for (Request* r : requests) {
    auto* request = static_cast<CudaRequest*>(r);
    request->last_ = under_way->end;
    request->last_lane_ = index;
  }
  return under_way;
}

std::unique_ptr<Device::Ticket> CudaDevice::Issue(size_t index, std::vector<Member>* members) {
  cuda::ScopedContext scope(driver_, context_);
  cuda::NoTuning no_tuning(true);  // others wait for this lane
  std::vector<Request*> requests;
  for (Member& m : *members) requests.push_back(m.request);
  auto enqueue = [&](UnderWay* under_way) { return Enqueue(&lanes_[index], members, under_way); };
  std::string error;
  std::unique_ptr<Ticket> ticket = Between(index, requests, {}, enqueue, &error);
  for (Member& m : *members) {
    if (!error.empty()) m.failed = true, m.error = error;
  }
  return ticket;
}

std::string CudaDevice::Enqueue(Lane* lane, std::vector<Member>* members, UnderWay* under_way) {
  std::vector<CudaRequest*> requests;
  for (Member& m : *members) requests.push_back(static_cast<CudaRequest*>(m.request));
  size_t unit = members->front().unit;
  std::string error;
  if (unit == 0 && requests.size() == 1) {
    CudaRequest& r = *requests[0];
    bool replayed = r.graphs && r.ready->Replay(r.memory, r.workspace, lane->streams->main(), &error);
    if (replayed) return members->front().count = r.work->units.size(), error;
    if (!r.cuda_work->worth_packing) return EnqueueWhole(lane, &members->front());
  }
  return EnqueueUnit(members, lane, under_way);
}

// All of a request, by its plan.
std::string CudaDevice::EnqueueWhole(Lane* lane, Member* member) {
  auto& r = static_cast<CudaRequest&>(*member->request);
  member->count = r.work->units.size();
  std::string note;
  return r.ready->Run(r.memory, r.workspace, lane->streams->main(), r.graphs, nullptr, &note);
}

// A unit of all members: by one pack where there is one for so many, else by as few as there are.
std::string CudaDevice::EnqueueUnit(std::vector<Member>* members, Lane* lane, UnderWay* under_way) {
  std::vector<CudaRequest*> left;
  for (Member& m : *members) left.push_back(static_cast<CudaRequest*>(m.request));
  size_t unit = members->front().unit;
  std::shared_ptr<const Pack> pack = PackFor(*left[0], unit, left.size(), lane);
  std::string error;
  while (!left.empty() && error.empty()) {
    (*members)[members->size() - left.size()].leads = true;
    if (pack && pack->count() > left.size()) pack = lane->packs.Find(left[0]->work->units[unit].cluster, left.size());
    auto end = left.begin() + static_cast<std::ptrdiff_t>(pack ? pack->count() : 1);
    std::vector<CudaRequest*> first(left.begin(), end);
    if (!pack || !EnqueuePack(first, *pack, lane->streams->main(), under_way, &error)) {
      pack = nullptr;
      end = left.begin() + 1;
      error = EnqueueApart(*left[0], unit, lane);
    }
    left.erase(left.begin(), end);
  }
  return error;
}

// The lane's pack for so many requests, or for the most of them that there is one for; null when there is none.  What
// is missing is made for the next time.
std::shared_ptr<const Pack> CudaDevice::PackFor(const CudaRequest& request, size_t unit, size_t count, Lane* lane) {
  std::shared_ptr<const Pack> found = lane->packs.Find(request.work->units[unit].cluster, count);
  if (found && found->count() == count) return found;
  OrderPack(request, unit, count, lane);
  if (!found) {  // others are made of these meanwhile
    for (size_t few : {4, 2, 1}) {
      if (few < count) OrderPack(request, unit, few, lane);
    }
  }
  return found;
}

void CudaDevice::OrderPack(const CudaRequest& request, size_t unit, size_t count, Lane* lane) {
  const CudaWork* work = request.cuda_work;  // lives with the plan
  uint64_t cluster = work->work->units[unit].cluster;
  if (!lane->packs.Claim(cluster, count)) return;
  auto make = [=, plan = request.plan, code = request.ready->code(), graphs = request.graphs](cuda::Stream stream) {
    std::string error;
    std::shared_ptr<Pack> pack =
        Pack::Make(work->launches, work->begin[unit], work->begin[unit + 1], count, code, lane->streams.get(), &error);
    if (!pack) cuda::Note("tf_stitch: requests run without superkernels: " + error + ".");
    if (pack && graphs) error = pack->Record(stream);
    if (pack && !error.empty()) cuda::Note("tf_stitch: superkernels run without CUDA graphs: " + error + ".");
    lane->packs.Keep(cluster, count, std::move(pack));
  };
  maker_->Add(std::move(make));
}

// Enqueues a pack for requests.  False when nothing was enqueued: there is no memory for their table.
bool CudaDevice::EnqueuePack(const std::vector<CudaRequest*>& requests, const Pack& pack, cuda::Stream stream,
                             UnderWay* under_way, std::string* error) {
  std::vector<PackMember> members;
  for (const CudaRequest* r : requests) members.push_back({&r->cuda_work->launches, r->memory});
  std::shared_ptr<cuda::HostTable> table = Table(pack.table_bytes());
  if (table->bytes() < pack.table_bytes()) {
    cuda::Note("tf_stitch: requests run without superkernels: there is no memory for their tables.");
    return false;
  }
  pack.Fill(members, table->words());
  *error = pack.Enqueue(*table, stream);
  under_way->tables.push_back(std::move(table));
  return true;
}

// Needs no memory and no graph: launches of its own.
std::string CudaDevice::EnqueueApart(const CudaRequest& request, size_t unit, Lane* lane) {
  const CudaWork& work = *request.cuda_work;
  std::string error;
  for (size_t i = work.begin[unit]; i < work.begin[unit + 1] && error.empty(); ++i) {
    error = request.ready->Enqueue(i, request.memory, request.workspace, lane->streams->main());
  }
  return error;
}

}  // namespace tf_stitch
