#include "runtime_cuda.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <utility>

#include "autotune.h"
#include "counters.h"
#include "cublas_lt.h"
#include "cuda_capture.h"
#include "hash.h"

namespace tf_stitch {
namespace {

constexpr size_t kMinLaunches = 3;                     // fewer are launched as fast one by one
constexpr size_t kSeen = 16;                           // sets of addresses remembered for when they come again
constexpr int kMissesBeforeUpdates = 4;                // addresses that never come again get graphs too
constexpr size_t kLongestLabel = 400;                  // of a launch in the profiler, about
constexpr int64_t kMaxGraphNodes = 1 << 16;            // of all graphs in the process: a node takes about a kilobyte
constexpr size_t kArenas = 4;                          // of a plan: a graph that has one is soon given other addresses
constexpr int64_t kMostOwnBytes = int64_t{32} << 20;   // of an arena that graphs have copies of
constexpr int64_t kMostArenaBytes = int64_t{1} << 28;  // of all of them in the process

std::atomic<int64_t> g_graph_nodes{0};
std::atomic<int64_t> g_arena_bytes{0};

size_t HashOf(const std::vector<void*>& addresses) {
  uint64_t h = kHashOfNothing;
  for (void* a : addresses) h = Mix(h, reinterpret_cast<uint64_t>(a));
  return h;
}

}  // namespace

CudaPlan::CudaPlan(const Program& program, const Plan& plan, std::shared_ptr<CudaCode> code, bool tf32, bool grids)
    : program_(program), plan_(plan), code_(std::move(code)), tf32_(tf32) {
  size_t grid = 0;
  for (size_t i = 0; i < program.steps.size() && error_.empty(); ++i) {
    if (grid < program.grids.size() && program.grids[grid].first == i) {
      size_t g = grid++;
      if (grids && AddGrid(g)) {
        i = program.grids[g].end - 1;
        continue;
      }
    }
    if (program.steps[i].kind == Step::Kind::kAlias || !plan.steps[i].blocks) continue;
    error_ = program.steps[i].kind == Step::Kind::kLibrary ? AddLibraryStep(i, tf32) : AddKernel(i);
    if (!error_.empty()) error_ += " (" + Where(launches_.back()) + ")";
  }
  PlaceWorkspace();
  FindWriters();
  graphs_ = graphs_ && (launches_.size() >= kMinLaunches || counter_bytes_);
  bool calls = std::any_of(launches_.begin(), launches_.end(), [](const Launch& l) { return l.library != nullptr; });
  owns_arenas_ = calls && OwnBytes() > 0 && OwnBytes() <= kMostOwnBytes;
}

CudaPlan::~CudaPlan() {
  if (!graph_) return;
  const cuda::Driver& driver = code_->driver();
  cuda::ScopedContext scope(driver, code_->context());
  g_graph_nodes -= static_cast<int64_t>(instances_.size() * nodes_.size());
  if (!scope.ok()) return;
  std::vector<void*> arenas;
  for (Instance& i : instances_) {
    driver.GraphExecDestroy(i.exec);  // one that still runs is freed when it ends
    if (i.arena) arenas.push_back(i.arena);
  }
  driver.GraphDestroy(graph_);
  GiveBack(arenas);
}

// --- made once ---------------------------------------------------------------------------------------

std::string CudaPlan::AddKernel(size_t step) {
  const Step& s = program_.steps[step];
  const StepPlan& p = plan_.steps[step];
  launches_.push_back({step, step + 1, code_->kernel(step), nullptr, words_.size(), nullptr,
                       static_cast<unsigned>(p.blocks), s.threads, static_cast<unsigned>(p.shared_bytes)});
  // The struct name_problem of ts_cuda.h: addresses, dims, blocks.
  words_.resize(words_.size() + s.buffers.size());
  for (int64_t d : p.dims) words_.push_back(static_cast<uint64_t>(d));
  words_.push_back(static_cast<uint64_t>(p.blocks));
  if (p.blocks > INT_MAX) return "a launch of " + std::to_string(p.blocks) + " blocks is too large";
  if (p.shared_bytes > code_->max_shared_bytes(step)) {
    return "a block needs " + std::to_string(p.shared_bytes) + " bytes of shared memory and may have " +
           std::to_string(code_->max_shared_bytes(step));
  }
  return "";
}

std::string CudaPlan::AddLibraryStep(size_t step, bool tf32) {
  const Step& s = program_.steps[step];
  launches_.push_back({step, step + 1, nullptr, nullptr, words_.size(), nullptr, 0, 0, 0});
  std::string error;
  int dtype = program_.buffers[s.buffers[0]].dtype;
  launches_.back().library = MakeLibraryWork(s, dtype, plan_.steps[step].dims, code_->driver(), tf32, &error);
  if (!launches_.back().library) return error;
  graphs_ = graphs_ && launches_.back().library->has_fixed_nodes();
  return "";
}

// False where the grid's steps are to be launched one by one.
bool CudaPlan::AddGrid(size_t grid) {
  const Grid& g = program_.grids[grid];
  std::string error;
  std::unique_ptr<CudaGrid> made =
      CudaGrid::Make(program_, plan_, g, code_->driver(), code_->context(), code_->grid_kernel(grid),
                     code_->max_shared_bytes_of_grid(grid), kInstances, &error);
  if (!error.empty()) cuda::Note("tf_stitch: the steps of '" + g.kernel + "' are launched one by one: " + error + ".");
  if (!made) return false;
  Launch launch{g.first,        g.end,           made->kernel(),      nullptr, words_.size(), nullptr,
                made->blocks(), made->threads(), made->shared_bytes()};
  words_.resize(words_.size() + made->words());
  launch.grid = std::move(made);
  launches_.push_back(std::move(launch));
  return true;
}

// A buffer is written by the first step that touches it, of those with work: plans for other sizes write the same
// outputs.
void CudaPlan::FindWriters() {
  writers_.assign(program_.buffers.size(), nullptr);
  for (size_t i = 0; i < program_.steps.size(); ++i) {
    const Step& s = program_.steps[i];
    if (s.kind == Step::Kind::kAlias || !plan_.steps[i].blocks) continue;
    for (uint32_t id : s.buffers) {
      if (program_.buffers[id].kind != BufferKind::kInput && !writers_[id]) writers_[id] = &s;
    }
  }
}

// First the parts that library steps share in turn, then the counters of all grids.
void CudaPlan::PlaceWorkspace() {
  int64_t bytes[kParts] = {}, at[kParts] = {};
  size_t turn = 0;
  for (Launch& l : launches_) {
    if (!l.workspace_bytes()) continue;
    l.part = turn++ % kParts;
    bytes[l.part] = std::max(bytes[l.part], static_cast<int64_t>(l.workspace_bytes()));
  }
  for (size_t i = 0; i < kParts; ++i) {
    at[i] = workspace_bytes_;
    workspace_bytes_ += (bytes[i] + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
  }
  counters_at_ = workspace_bytes_;
  for (Launch& l : launches_) {
    l.workspace_at = l.grid ? counters_at_ + counter_bytes_ : at[l.part];
    if (l.grid) counter_bytes_ += static_cast<int64_t>(l.grid->counter_bytes());
  }
  workspace_bytes_ += counter_bytes_;
}

std::string CudaPlan::Where(const Launch& launch) const {
  const Step& s = program_.steps[launch.step];
  if (launch.grid) {
    return "kernel '" + launch.grid->grid().kernel + "' of '" + s.origin + "' to '" +
           program_.steps[launch.end - 1].origin + "'";
  }
  if (s.kind == Step::Kind::kLibrary) return std::string("the ") + Describe(s.call) + " of '" + s.origin + "'";
  return "kernel '" + s.kernel + "' of '" + s.origin + "'";
}

// What the profiler shows: the kernel and the nodes that its steps' last results come from.
std::string CudaPlan::Label(const Launch& launch) const {
  const Step& s = program_.steps[launch.step];
  if (!launch.grid) return LabelOf(s);
  const CudaGrid& grid = *launch.grid;
  std::string label =
      grid.grid().kernel + " " +
      (grid.cooperative() ? std::to_string(grid.phases()) + " phases:" : std::to_string(grid.problems()) + " kernels:");
  const std::string* before = nullptr;
  for (size_t i = launch.step; i < launch.end && label.size() < kLongestLabel; ++i) {
    const std::string& origin = program_.steps[i].origin;
    if (!before || origin != *before) label += " " + origin;
    before = &origin;
  }
  return label;
}

bool CudaPlan::Misaligned(void* const* memory) const {
  for (const Launch& l : launches_) {
    for (size_t i = l.step; i < l.end; ++i) {
      for (uint32_t id : program_.steps[i].buffers) {
        if (reinterpret_cast<uintptr_t>(memory[id]) % cuda::kMatmulAlignment) return true;
      }
    }
  }
  return false;
}

// --- launches ----------------------------------------------------------------------------------------

// All parameter blocks with these addresses.  Grids count in the slot's counters, or in the workspace without a slot.
std::vector<uint64_t> CudaPlan::Words(void* const* memory, void* workspace, size_t slot) const {
  std::vector<uint64_t> words = words_;
  for (const Launch& l : launches_) {
    if (!l.kernel) continue;
    size_t at = l.first_word;
    if (l.grid) {
      uint64_t counters = slot == kNoSlot
                              ? reinterpret_cast<uint64_t>(workspace) + static_cast<uint64_t>(l.workspace_at)
                              : l.grid->counters_of_slot(slot);
      l.grid->FillWords(memory, counters, words.data() + at);
      continue;
    }
    for (uint32_t id : program_.steps[l.step].buffers) words[at++] = reinterpret_cast<uint64_t>(memory[id]);
  }
  return words;
}

std::string CudaPlan::EnqueueLibraryStep(const Launch& launch, void* const* memory, void* workspace,
                                         cuda::Stream stream) const {
  std::vector<void*> buffers;
  for (uint32_t id : program_.steps[launch.step].buffers) buffers.push_back(memory[id]);
  return launch.library->Run(buffers.data(), static_cast<char*>(workspace) + launch.workspace_at, stream);
}

std::string CudaPlan::EnqueueKernel(const Launch& launch, uint64_t* words, cuda::Stream stream) const {
  const cuda::Driver& driver = code_->driver();
  const Launch& l = launch;
  void* parameters[] = {words};
  bool cooperative = l.grid && l.grid->cooperative();
  cuda::Result result = cooperative ? driver.LaunchCooperativeKernel(l.kernel, l.blocks, 1, 1, l.threads, 1, 1,
                                                                     l.shared_bytes, stream, parameters)
                                    : driver.LaunchKernel(l.kernel, l.blocks, 1, 1, l.threads, 1, 1, l.shared_bytes,
                                                          stream, parameters, nullptr);
  return result ? cuda::Describe(code_->driver(), result) : "";
}

void CudaPlan::AppendWords(size_t launch, void* const* memory, std::vector<uint64_t>* out) const {
  const Launch& l = launches_[launch];
  const Step& s = program_.steps[l.step];
  for (uint32_t id : s.buffers) out->push_back(reinterpret_cast<uint64_t>(memory[id]));
  const uint64_t* rest = words_.data() + l.first_word + s.buffers.size();
  out->insert(out->end(), rest, rest + s.dims.size() + 1);
}

std::string CudaPlan::Enqueue(size_t launch, void* const* memory, void* workspace, cuda::Stream stream) const {
  const Launch& l = launches_[launch];
  std::string error;
  if (l.grid) {
    std::vector<uint64_t> words(l.grid->words());
    l.grid->FillWords(memory, reinterpret_cast<uint64_t>(workspace) + l.workspace_at, words.data());
    if (l.grid->cooperative()) error = ClearCounters(l.workspace_at, l.grid->counter_bytes(), workspace, stream);
    if (error.empty()) error = EnqueueKernel(l, words.data(), stream);
  } else if (l.kernel) {
    std::vector<uint64_t> words;
    AppendWords(launch, memory, &words);
    error = EnqueueKernel(l, words.data(), stream);
  } else {
    error = EnqueueLibraryStep(l, memory, workspace, stream);
  }
  return error.empty() ? error : error + " while launching " + Where(l);
}

// Counters that a run outside of graphs uses start at zero.
std::string CudaPlan::ClearCounters(int64_t at, size_t bytes, void* workspace, cuda::Stream stream) const {
  cuda::Result result = code_->driver().MemsetD8Async(static_cast<char*>(workspace) + at, 0, bytes, stream);
  return result ? cuda::Describe(code_->driver(), result) : "";
}

std::string CudaPlan::LaunchAll(void* const* memory, void* workspace, cuda::Stream stream,
                                const Observe* observe) const {
  std::vector<uint64_t> words = Words(memory, workspace, kNoSlot);
  if (counter_bytes_) {
    std::string error = ClearCounters(counters_at_, static_cast<size_t>(counter_bytes_), workspace, stream);
    if (!error.empty()) return error + " while clearing the counters of '" + program_.name + "'";
  }
  for (const Launch& l : launches_) {
    if (observe) {
      const std::string label = Label(l);
      (*observe)(&label);
    }
    std::string error = l.kernel ? EnqueueKernel(l, words.data() + l.first_word, stream)
                                 : EnqueueLibraryStep(l, memory, workspace, stream);
    if (observe) (*observe)(nullptr);
    if (!error.empty()) return error + " while launching " + Where(l);
  }
  return "";
}

std::string CudaPlan::Run(void* const* memory, void* workspace, cuda::Stream stream, bool graphs,
                          const Observe* observe, std::string* note) {
  const cuda::Driver& driver = code_->driver();
  cuda::ScopedContext scope(driver, code_->context());
  int capturing = cuda::kCaptureStatusNone;
  if (!graphs || !graphs_ || observe || driver.StreamIsCapturing(stream, &capturing) || capturing) {
    return LaunchAll(memory, workspace, stream, observe);
  }
  {
    std::lock_guard<std::mutex> lock(mu_);
    bool usable = false;
    // A run that waited for the lock may find that another one has given up, and half a graph left by it.
    std::string error = graphs_ ? Readdress(Addresses(memory, workspace), &usable) : "";
    if (!error.empty()) {  // graphs are only an optimisation: without them all still works
      graphs_ = false;
      usable = false;
      *note = error;
    }
    if (usable) return LaunchFront(stream);
  }
  return LaunchAll(memory, workspace, stream, observe);
}

bool CudaPlan::Replay(void* const* memory, void* workspace, cuda::Stream stream, std::string* error) {
  cuda::ScopedContext scope(code_->driver(), code_->context());
  std::lock_guard<std::mutex> lock(mu_);
  if (!graphs_ || !Find(Addresses(memory, workspace))) return false;
  *error = LaunchFront(stream);
  return true;
}

bool CudaPlan::has_graphs() {
  std::lock_guard<std::mutex> lock(mu_);
  return !instances_.empty();
}

// --- graphs ------------------------------------------------------------------------------------------

// What tells runs apart: the address of every buffer, then the workspace's; null where graphs have their own.
std::vector<void*> CudaPlan::Addresses(void* const* memory, void* workspace) const {
  std::vector<void*> addresses(memory, memory + program_.buffers.size());
  addresses.push_back(workspace);
  return owns_arenas_ ? PlacedIn(nullptr, std::move(addresses)) : addresses;
}

// With what is the arena's, and the workspace, in this one; null: nowhere.
std::vector<void*> CudaPlan::PlacedIn(void* arena, std::vector<void*> addresses) const {
  auto at = [&](int64_t offset) { return arena ? static_cast<char*>(arena) + offset : nullptr; };
  for (size_t i = 0; i < program_.buffers.size(); ++i) {
    if (program_.buffers[i].backing == Backing::kArena) addresses[i] = at(plan_.arena_offset[i]);
  }
  addresses.back() = workspace_bytes_ ? at(plan_.arena_bytes) : nullptr;
  return addresses;
}

// Memory for one more instance; null when there are enough of them, or no memory.
void* CudaPlan::TakeArena() {
  if (instances_.size() >= kArenas) return nullptr;
  void* arena = nullptr;
  cuda::RelaxedCapture relaxed(code_->driver());
  bool fits = (g_arena_bytes += OwnBytes()) <= kMostArenaBytes;
  if (!fits || code_->driver().MemAlloc(&arena, static_cast<size_t>(OwnBytes()))) {
    g_arena_bytes -= OwnBytes();
    return nullptr;
  }
  return arena;
}

// Graphs that use them may still run.
void CudaPlan::GiveBack(const std::vector<void*>& arenas) {
  if (arenas.empty()) return;
  cuda::RelaxedCapture relaxed(code_->driver());
  if (!cuda::WaitForContext(code_->driver())) return;
  for (void* arena : arenas) code_->driver().MemFree(arena);
  g_arena_bytes -= OwnBytes() * static_cast<int64_t>(arenas.size());
}

// The instance with these addresses, which comes to the front; null when there is none.
CudaPlan::Instance* CudaPlan::Find(const std::vector<void*>& addresses) {
  auto found =
      std::find_if(instances_.begin(), instances_.end(), [&](const Instance& i) { return i.addresses == addresses; });
  if (found == instances_.end()) return nullptr;
  misses_ = 0;
  instances_.splice(instances_.begin(), instances_, found);
  return &instances_.front();
}

std::string CudaPlan::LaunchFront(cuda::Stream stream) {
  ++GlobalCounters().graph_launches;
  cuda::Result result = code_->driver().GraphLaunch(instances_.front().exec, stream);
  return result ? cuda::Failed(code_->driver(), result, "launching the graph of '" + program_.name + "'") : "";
}

// Brings the instance with these addresses to the front of instances_; leaves `usable` false when it is better to
// launch without a graph this time.
std::string CudaPlan::Readdress(const std::vector<void*>& addresses, bool* usable) {
  *usable = true;
  if (Find(addresses)) return "";
  size_t hash = HashOf(addresses);
  bool again = std::find(seen_.begin(), seen_.end(), hash) != seen_.end();
  if (!again && ++misses_ <= kMissesBeforeUpdates) {
    if (seen_.size() == kSeen) seen_.erase(seen_.begin());
    seen_.push_back(hash);
    *usable = false;
    return "";
  }
  bool full =
      instances_.size() >= kInstances || g_graph_nodes + static_cast<int64_t>(launches_.size()) > kMaxGraphNodes;
  void* arena = owns_arenas_ && !full ? TakeArena() : nullptr;
  if (!full && (arena || !owns_arenas_)) return NewInstance(addresses, arena);
  if (instances_.empty()) {
    owns_arenas_ = owns_arenas_ && full;  // there is no memory for one: the next runs make graphs without
    *usable = false;
    return "";
  }
  instances_.splice(instances_.begin(), instances_, std::prev(instances_.end()));
  ++GlobalCounters().graph_updates;
  return Update(&instances_.front(), addresses, /*fresh=*/false);
}

bool CudaPlan::Overlap(uint32_t x, uint32_t y) const {
  const Buffer &a = program_.buffers[x], &b = program_.buffers[y];
  if (a.backing != b.backing) return false;
  if (a.backing != Backing::kArena) return a.backing_index == b.backing_index;
  int64_t begin_a = plan_.arena_offset[x], begin_b = plan_.arena_offset[y];
  return x == y || (begin_a < begin_b + plan_.buffer_bytes[y] && begin_b < begin_a + plan_.buffer_bytes[x]);
}

// Whether two steps touch the same memory and one of them writes it.
bool CudaPlan::MustFollow(const Step& later, const Step& earlier) const {
  auto writes = [&](const Step& s, uint32_t id) { return writers_[id] == &s; };
  for (uint32_t x : earlier.buffers) {
    for (uint32_t y : later.buffers) {
      if ((writes(earlier, x) || writes(later, y)) && Overlap(x, y)) return true;
    }
  }
  return false;
}

bool CudaPlan::MustFollow(const Launch& later, const Launch& earlier) const {
  for (size_t i = later.step; i < later.end; ++i) {
    for (size_t j = earlier.step; j < earlier.end; ++j) {
      if (MustFollow(program_.steps[i], program_.steps[j])) return true;
    }
  }
  return false;
}

cuda::KernelNodeParams CudaPlan::NodeParams(const Launch& launch, void** parameters) const {
  cuda::KernelNodeParams params{};
  params.func = launch.kernel;
  params.grid_x = launch.blocks;
  params.grid_y = params.grid_z = params.block_y = params.block_z = 1;
  params.block_x = launch.threads;
  params.shared_bytes = launch.shared_bytes;
  params.kernel_params = parameters;
  return params;
}

// Makes graph_, whose nodes hold these addresses.  An edge leads to a step from each earlier one that it must follow
// and does not follow already by way of others.
std::string CudaPlan::MakeGraph(const std::vector<void*>& memory) {
  const cuda::Driver& driver = code_->driver();
  cuda::Result result = driver.GraphCreate(&graph_, 0);
  if (result) return cuda::Failed(driver, result, "making a graph");
  graph_memory_ = memory;
  std::vector<uint64_t> words = Words(memory.data(), memory.back(), /*slot=*/0);
  std::vector<std::vector<bool>> before(launches_.size());  // all that each launch follows, directly or not
  int64_t last_of_part[kParts];
  std::fill_n(last_of_part, kParts, -1);
  for (size_t i = 0; i < launches_.size(); ++i) {
    const Launch& l = launches_[i];
    std::vector<cuda::GraphNode> after;
    before[i].assign(launches_.size(), false);
    bool has_workspace = l.workspace_bytes();
    for (size_t j = i; j-- > 0;) {
      if (before[i][j]) continue;
      bool shares = has_workspace && static_cast<int64_t>(j) == last_of_part[l.part];
      if (!shares && !MustFollow(l, launches_[j])) continue;
      after.push_back(nodes_[j]);
      before[i][j] = true;
      for (size_t k = 0; k < j; ++k) before[i][k] = before[i][k] || before[j][k];
    }
    if (has_workspace) last_of_part[l.part] = static_cast<int64_t>(i);
    cuda::GraphNode node = nullptr;
    if (l.kernel) {
      void* parameters[] = {words.data() + l.first_word};
      cuda::KernelNodeParams params = NodeParams(l, parameters);
      result = driver.GraphAddKernelNode(&node, graph_, after.data(), after.size(), &params);
      cuda::LaunchAttributeValue value{};
      value.cooperative = 1;
      bool cooperative = l.grid && l.grid->cooperative();
      if (!result && cooperative) result = driver.GraphKernelNodeSetAttribute(node, cuda::kNodeIsCooperative, &value);
    } else {
      cuda::Graph child = nullptr;
      std::string error = code_->Capture(
          [&](cuda::Stream s) { return EnqueueLibraryStep(l, memory.data(), memory.back(), s); }, &child);
      if (!error.empty()) return error;
      result = driver.GraphAddChildGraphNode(&node, graph_, after.data(), after.size(), child);
      driver.GraphDestroy(child);  // the node has a copy
    }
    if (result) return cuda::Failed(driver, result, "adding a node for " + Where(l));
    nodes_.push_back(node);
  }
  return "";
}

// An instance of graph_ for these addresses, at the front.
std::string CudaPlan::NewInstance(const std::vector<void*>& addresses, void* arena) {
  const cuda::Driver& driver = code_->driver();
  std::string error = graph_ ? "" : MakeGraph(arena ? PlacedIn(arena, addresses) : addresses);
  cuda::GraphExec exec = nullptr;
  cuda::Result result = error.empty() ? driver.GraphInstantiate(&exec, graph_, 0) : cuda::kSuccess;
  if (result) error = cuda::Failed(driver, result, "instantiating a graph");
  if (!error.empty()) {
    if (arena) GiveBack({arena});
    return error;
  }
  g_graph_nodes += static_cast<int64_t>(nodes_.size());
  ++GlobalCounters().graph_instances;
  instances_.push_front({{}, graph_memory_, exec, instances_.size(), arena});
  return Update(&instances_.front(), addresses, /*fresh=*/true);
}

// Gives the nodes of an instance other addresses; those of a fresh one have slot 0's counters.  Launches that were
// enqueued before keep theirs.
std::string CudaPlan::Update(Instance* instance, const std::vector<void*>& addresses, bool fresh) {
  const cuda::Driver& driver = code_->driver();
  std::vector<void*> memory = instance->arena ? PlacedIn(instance->arena, addresses) : addresses;
  std::vector<uint64_t> words = Words(memory.data(), memory.back(), instance->slot);
  bool workspace_moved = instance->memory.back() != memory.back();
  for (size_t i = 0; i < launches_.size(); ++i) {
    const Launch& l = launches_[i];
    bool moved =
        (l.workspace_bytes() && workspace_moved) || (l.grid && l.grid->cooperative() && fresh && instance->slot);
    for (size_t k = l.step; k < l.end && !moved; ++k) {
      const std::vector<uint32_t>& buffers = program_.steps[k].buffers;
      moved =
          std::any_of(buffers.begin(), buffers.end(), [&](uint32_t id) { return instance->memory[id] != memory[id]; });
    }
    if (!moved) continue;
    cuda::Result result;
    if (l.kernel) {
      void* parameters[] = {words.data() + l.first_word};
      cuda::KernelNodeParams params = NodeParams(l, parameters);
      result = driver.GraphExecKernelNodeSetParams(instance->exec, nodes_[i], &params);
    } else {
      cuda::Graph child = nullptr;
      std::string error = code_->Capture(
          [&](cuda::Stream s) { return EnqueueLibraryStep(l, memory.data(), memory.back(), s); }, &child);
      if (!error.empty()) return error;
      result = driver.GraphExecChildGraphNodeSetParams(instance->exec, nodes_[i], child);
      driver.GraphDestroy(child);
    }
    if (result) return cuda::Failed(driver, result, "updating the node of " + Where(l));
  }
  instance->addresses = addresses;
  instance->memory = std::move(memory);
  return "";
}

}  // namespace tf_stitch
