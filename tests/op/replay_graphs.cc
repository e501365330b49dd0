// Runs programs with the GPU runtime over a stand-in for the CUDA driver, whose kernels are host functions and whose
// graphs run in a random order that their edges allow.  Replayed results must equal launched ones bit for bit.
//
//   replay_graphs SEED FILE...     the files hold programs (stand_in_driver.h)
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../../custom_ops/autotune.h"
#include "../../custom_ops/counters.h"
#include "../../custom_ops/grid_table.h"
#include "stand_in_driver.h"

namespace tf_stitch::cuda {

struct FunctionTag {
  size_t words;
  void (*run)(const uint64_t*);
  std::vector<FunctionTag*> bodies;  // of a grid kernel
  bool pack = false;                 // which one with a single phase is
};
struct Node {
  FunctionTag* function = nullptr;
  bool cooperative = false;
  std::vector<uint64_t> words;
  std::vector<size_t> after;
  std::vector<Node> child;
};
struct GraphNodeTag {
  size_t index;
  GraphTag* graph;
};
struct GraphTag {
  std::vector<Node> nodes;
  std::vector<std::unique_ptr<GraphNodeTag>> handles;
};
struct GraphExecTag : GraphTag {};
struct StreamTag {
  GraphTag* captured = nullptr;
};

namespace {

std::mutex g_mu;
std::mt19937_64 g_rng;
int g_alive = 0;                         // graphs, instances, streams and memory that nobody gave back
std::atomic<int> g_captures{0};          // calls of the library that were recorded
std::atomic<bool> g_has_memory{true};    // for graphs' arenas
std::atomic<int> g_good_calls{INT_MAX};  // until one that makes or changes a graph fails

// A call that fails takes its time, so that other threads wait for what it is part of.
bool Fails() {
  if (--g_good_calls != 0) return false;
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return true;
}

FunctionTag g_axpb{4, Axpb, {}}, g_mul{5, Mul, {}};
FunctionTag g_matmul{5,  // the last word is the address of the workspace
                     [](const uint64_t* w) { Multiply(At(w[0]), At(w[1]), At(w[2]), w[3]); },
                     {}};

// The problems of a grid kernel, phase by phase, in a random order within a phase; its counters must be at zero, a pack
// has none.
void RunGrid(const FunctionTag& grid, const uint64_t* w) {
  const auto* records = reinterpret_cast<const GridRecord*>(w[0]);
  const auto* words = reinterpret_cast<const int64_t*>(w[1]);
  const auto* counters = reinterpret_cast<const uint32_t*>(w[2]);
  const auto end = static_cast<int32_t>(grid.pack ? 1 : w[4]);
  if (grid.pack && (counters || records[w[4]].phase != end)) fprintf(stderr, "a pack's parameter is wrong\n"), abort();
  for (int32_t p = 0; p <= end && !grid.pack; ++p) {
    if (counters[p]) fprintf(stderr, "counters of a grid are not at zero\n"), abort();
  }
  for (const GridRecord* r = records; r->phase < end;) {
    std::vector<const GridRecord*> phase;
    for (int32_t p = r->phase; r->phase == p; ++r) phase.push_back(r);
    std::shuffle(phase.begin(), phase.end(), g_rng);
    for (const GridRecord* problem : phase) {
      std::vector<uint64_t> own;
      for (int32_t i = 0; i < problem->count; ++i) {
        auto word = static_cast<uint64_t>(words[problem->words + i]);
        own.push_back(i < problem->addresses ? w[6 + (word >> 48)] + (word & ((uint64_t{1} << 48) - 1)) : word);
      }
      grid.bodies[static_cast<size_t>(problem->kernel & (kKeeps - 1))]->run(own.data());
    }
  }
}

void RunNode(const Node& node) {
  if (!node.function) return;
  bool grid = !node.function->bodies.empty();
  if ((grid && !node.function->pack) != node.cooperative) fprintf(stderr, "a launch has the wrong kind\n"), abort();
  grid ? RunGrid(*node.function, node.words.data()) : node.function->run(node.words.data());
}

// "t_grid/WORDS/BODY/BODY...", and "ts_pack_/..." for one phase.
FunctionTag* FindFunction(const std::string& name) {
  static std::map<std::string, std::unique_ptr<FunctionTag>> grids;
  if (name == "t_axpb") return &g_axpb;
  if (name == "t_mul") return &g_mul;
  bool pack = !name.rfind("ts_pack_/", 0);
  if (!pack && name.rfind("t_grid/", 0)) return nullptr;
  std::unique_ptr<FunctionTag>& made = grids[name];
  if (!made) {
    std::istringstream parts(name.substr(name.find('/') + 1));
    std::string part;
    std::getline(parts, part, '/');
    made.reset(new FunctionTag{strtoull(part.c_str(), nullptr, 10), nullptr, {}, pack});
    while (std::getline(parts, part, '/')) made->bodies.push_back(FindFunction(part));
  }
  return made.get();
}

// While a product runs its workspace is full of its own number, unless another product uses it, too.
void Begin(const Node& node) {
  for (const Node& n : node.child) Begin(n);
  if (node.function != &g_matmul) return;
  for (size_t i = 0; i < kScratch / 8; ++i) reinterpret_cast<const Node**>(node.words[4])[i] = &node;
}
void Check(const Node& node) {
  for (const Node& n : node.child) Check(n);
  if (node.function != &g_matmul) return;
  for (size_t i = 0; i < kScratch / 8; ++i) {
    if (reinterpret_cast<const Node**>(node.words[4])[i] != &node) fprintf(stderr, "products share memory\n"), abort();
  }
}

// Nodes begin and end in any order that the edges allow.
void RunNodes(const std::vector<Node>& nodes) {
  enum State { kWaits, kRuns, kDone };
  std::vector<State> state(nodes.size(), kWaits);
  for (size_t left = 2 * nodes.size(); left; --left) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < nodes.size(); ++i) {
      bool can = state[i] != kDone;
      for (size_t j : nodes[i].after) can = can && (state[i] == kRuns || state[j] == kDone);
      if (can) ready.push_back(i);
    }
    size_t i = ready[g_rng() % ready.size()];
    if (state[i] == kWaits) {
      Begin(nodes[i]);
      state[i] = kRuns;
      continue;
    }
    Check(nodes[i]);
    RunNode(nodes[i]);
    RunNodes(nodes[i].child);
    state[i] = kDone;
  }
}

void Take(Node* node, FunctionTag* function, void** parameters) {
  const auto* words = static_cast<const uint64_t*>(parameters[0]);
  node->function = function;
  node->words.assign(words, words + function->words);
}

void Enqueue(Stream stream, Node node) {
  if (stream && stream->captured) {
    stream->captured->nodes.push_back(std::move(node));
  } else {
    RunNodes({node});
  }
}

std::vector<size_t> Indices(const GraphNode* after, size_t count) {
  std::vector<size_t> out;
  for (size_t i = 0; i < count; ++i) out.push_back(after[i]->index);
  return out;
}

Result AddNode(GraphNode* out, Graph graph, Node node) {
  graph->handles.push_back(std::make_unique<GraphNodeTag>(GraphNodeTag{graph->nodes.size(), graph}));
  *out = graph->handles.back().get();
  graph->nodes.push_back(std::move(node));
  return 0;
}

Driver Make() {
  Driver d = DriverOfOneDevice();
  d.CtxSynchronize = [] { return 0; };
  d.ModuleGetFunction = [](Function* f, Module, const char* name) {
    *f = FindFunction(name);
    return *f ? 0 : 500;
  };
  d.LaunchKernel = [](Function f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream stream,
                      void** parameters, void**) {
    std::lock_guard<std::mutex> lock(g_mu);
    Node node;
    Take(&node, f, parameters);
    return Enqueue(stream, std::move(node)), 0;
  };
  d.LaunchCooperativeKernel = [](Function f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 Stream stream, void** parameters) {
    std::lock_guard<std::mutex> lock(g_mu);
    Node node;
    node.cooperative = true;
    Take(&node, f, parameters);
    return Enqueue(stream, std::move(node)), 0;
  };
  d.OccupancyMaxActiveBlocksPerMultiprocessor = [](int* n, Function, int, size_t) { return *n = 2, 0; };
  d.MemAlloc = [](void** p, size_t bytes) {
    if (!g_has_memory) return 2;
    return *p = malloc(bytes), ++g_alive, 0;
  };
  d.MemFree = [](void* p) { return free(p), --g_alive, 0; };
  d.MemcpyHtoDAsync = [](void* to, const void* from, size_t bytes, Stream) { return memcpy(to, from, bytes), 0; };
  d.MemsetD8Async = [](void* to, unsigned char value, size_t bytes, Stream) { return memset(to, value, bytes), 0; };
  d.StreamSynchronize = [](Stream) { return 0; };
  d.StreamCreate = [](Stream* s, unsigned) { return *s = new StreamTag, ++g_alive, 0; };
  d.StreamDestroy = [](Stream s) { return delete s, --g_alive, 0; };
  d.StreamIsCapturing = [](Stream s, int* out) { return *out = s->captured != nullptr, 0; };
  d.StreamBeginCapture = [](Stream s, int) { return s->captured = new GraphTag, ++g_captures, ++g_alive, 0; };
  d.StreamEndCapture = [](Stream s, Graph* g) { return *g = s->captured, s->captured = nullptr, 0; };
  d.GraphCreate = [](Graph* g, unsigned) { return *g = new GraphTag, ++g_alive, 0; };
  d.GraphDestroy = [](Graph g) { return delete g, --g_alive, 0; };
  d.GraphAddKernelNode = [](GraphNode* out, Graph g, const GraphNode* after, size_t n, const KernelNodeParams* p) {
    if (Fails()) return 1;
    Node node;
    node.after = Indices(after, n);
    Take(&node, p->func, p->kernel_params);
    return AddNode(out, g, std::move(node));
  };
  d.GraphKernelNodeSetAttribute = [](GraphNode node, int what, const LaunchAttributeValue* value) {
    if (what == kNodeIsCooperative) node->graph->nodes[node->index].cooperative = value->cooperative;
    return 0;
  };
  d.GraphAddChildGraphNode = [](GraphNode* out, Graph g, const GraphNode* after, size_t n, Graph child) {
    if (Fails()) return 1;
    Node node;
    node.after = Indices(after, n);
    node.child = child->nodes;
    return AddNode(out, g, std::move(node));
  };
  d.GraphInstantiate = [](GraphExec* e, Graph g, unsigned long long) {
    *e = new GraphExecTag;
    (*e)->nodes = g->nodes;
    return ++g_alive, 0;
  };
  d.GraphExecKernelNodeSetParams = [](GraphExec e, GraphNode node, const KernelNodeParams* p) {
    if (Fails()) return 1;
    return Take(&e->nodes[node->index], p->func, p->kernel_params), 0;
  };
  d.GraphExecChildGraphNodeSetParams = [](GraphExec e, GraphNode node, Graph child) {
    if (Fails()) return 1;
    return e->nodes[node->index].child = child->nodes, 0;
  };
  d.GraphExecDestroy = [](GraphExec e) { return delete e, --g_alive, 0; };
  d.GraphLaunch = [](GraphExec e, Stream) {
    std::lock_guard<std::mutex> lock(g_mu);
    return RunNodes(e->nodes), 0;
  };
  return d;
}

}  // namespace

void Note(const std::string& note) {
  fprintf(stderr, "%s\n", note.c_str());
  abort();
}

// Uses all of the workspace while it runs.
std::string Matmul::Run(const void* lhs, const void* rhs, const void*, void* out, void* workspace,
                        Stream stream) const {
  uint64_t words[] = {reinterpret_cast<uint64_t>(lhs), reinterpret_cast<uint64_t>(rhs), reinterpret_cast<uint64_t>(out),
                      impl_->n, reinterpret_cast<uint64_t>(workspace)};
  Node node;
  void* parameters[] = {words};
  Take(&node, &g_matmul, parameters);
  std::lock_guard<std::mutex> lock(g_mu);
  Enqueue(stream, std::move(node));
  return "";
}

}  // namespace tf_stitch::cuda

namespace {

using namespace tf_stitch;

// Runs with the same and with other addresses; both ways must agree.  Returns how many runs gave up graphs.
int Check(const Program& program, const Plan& plan, CudaPlan* ready, uint64_t seed) {
  int gave_up = 0;
  std::mt19937_64 rng(seed);
  cuda::StreamTag stream;
  std::vector<std::unique_ptr<Memory>> memories;
  for (int run = 0; run < 60; ++run) {
    if (run < 12 || rng() % 3 == 0) memories.push_back(std::make_unique<Memory>(program, plan, *ready));
    Memory& memory = *memories[memories.size() - 1 - rng() % std::min<size_t>(memories.size(), 1 + run / 10)];
    for (auto& x : memory.inputs) {
      for (float& f : x) f = static_cast<float>(rng() % 5) / 4;
    }
    std::string note;
    std::string error = ready->Run(memory.addresses.data(), memory.workspace, &stream, false, nullptr, &note);
    auto launched = memory.outputs;
    for (auto& x : memory.outputs) x.assign(x.size(), -1);
    error += ready->Run(memory.addresses.data(), memory.workspace, &stream, true, nullptr, &note);
    Must(error.empty(), error);
    gave_up += !note.empty();
    for (size_t i = 0; i < launched.size(); ++i) {
      Must(!memcmp(launched[i].data(), memory.outputs[i].data(), (launched[i].size() - 1) * 4), "replay differs");
    }
  }
  return gave_up;
}

// Several threads run one plan.  Returns how many runs gave up graphs.
int CheckThreads(const Program& program, const Plan& plan, CudaPlan* ready, uint64_t seed) {
  std::atomic<int> gave_up{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] { gave_up += Check(program, plan, ready, seed + 9 * t); });
  }
  for (auto& t : threads) t.join();
  return gave_up;
}

// The driver fails at one of the calls that make and change graphs: the runs at that time and after it go on without.
void CheckFailures(const Program& program, const Plan& plan, const std::shared_ptr<CudaCode>& code, uint64_t seed) {
  for (int good : {1, 2, 4, 7, 15, 40}) {
    cuda::g_good_calls = good;
    CudaPlan ready(program, plan, code, false, false);
    Must(CheckThreads(program, plan, &ready, seed) == 1, "graphs were not given up once");
  }
  cuda::g_good_calls = INT_MAX;
}

// Addresses that never come again: only library calls that touch inputs or outputs are recorded anew, unless there is
// no memory for graphs' own arenas.  Returns the calls recorded per update, of all updates.
double CheckCaptures(const Program& program, const Plan& plan, const std::shared_ptr<CudaCode>& code, bool has_memory) {
  cuda::g_has_memory = has_memory;
  CudaPlan ready(program, plan, code, false, false);
  int outside = 0, all = 0;
  for (size_t i = 0; i < ready.launches(); ++i) {
    const Step& s = program.steps[ready.step(i)];
    if (s.kind != Step::Kind::kLibrary) continue;
    ++all;
    outside += std::any_of(s.buffers.begin(), s.buffers.end(),
                           [&](uint32_t id) { return program.buffers[id].backing != Backing::kArena; });
  }
  cuda::StreamTag stream;
  std::vector<std::unique_ptr<Memory>> memories;
  int before = 0;
  int64_t updates = 0;
  for (int run = 0; run < 60; ++run) {
    if (run == 30) before = cuda::g_captures, updates = GlobalCounters().graph_updates;
    memories.push_back(std::make_unique<Memory>(program, plan, ready));
    std::string note;
    Must(
        ready.Run(memories.back()->addresses.data(), memories.back()->workspace, &stream, true, nullptr, &note).empty(),
        "a run fails");
  }
  int captures = cuda::g_captures - before;
  updates = GlobalCounters().graph_updates - updates;
  Must(!ready.has_graphs() || updates == 30, "graphs get no other addresses");
  Must(captures == updates * (has_memory ? outside : all), "library calls are recorded anew that have not moved");
  cuda::g_has_memory = true;
  return updates ? static_cast<double>(captures) / static_cast<double>(updates) : 0;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = strtoull(argv[1], nullptr, 10);
  int64_t saved = 0;                    // launches, by grids
  double moved = 0, moved_without = 0;  // library calls, with arenas of graphs and without
  for (int i = 2; i < argc; ++i) {
    Loaded loaded;
    loaded.Load(argv[i]);
    const Program& program = loaded.program;
    for (int64_t n : {3, 0, 9, 20}) {
      auto plan = loaded.PlanFor(n, /*grids=*/n != 9);
      auto* ready = static_cast<CudaPlan*>(plan->extra.get());
      saved += static_cast<int64_t>(CudaPlan(program, *plan, loaded.code, false, false).launches()) -
               static_cast<int64_t>(ready->launches());
      Must(CheckThreads(program, *plan, ready, seed) == 0, "graphs were given up");
      if (n == 3) CheckFailures(program, *plan, loaded.code, seed);
      if (n == 3) moved += CheckCaptures(program, *plan, loaded.code, true);
      if (n == 3) moved_without += CheckCaptures(program, *plan, loaded.code, false);
    }
  }
  Must(cuda::g_alive == 0, "graphs, streams or memory are left over");
  Must(moved < moved_without / 2, "graphs have no arenas of their own");
  const Counters& c = GlobalCounters();
  printf("%lld launched, %lld made, %lld updated, %lld saved\n", static_cast<long long>(c.graph_launches),
         static_cast<long long>(c.graph_instances), static_cast<long long>(c.graph_updates),
         static_cast<long long>(saved));
}
