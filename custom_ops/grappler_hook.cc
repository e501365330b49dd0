// The Grappler hook: a custom graph optimizer named "tf_stitch" that hands each graph to Python.
//
// Python registers one callback (tf_stitch_set_rewriter).  It is first asked whether it wants an item at all
// (no graph given), then gets the serialized GraphDef with the names that must survive, and answers through
// tf_stitch_reply.  No callback or no answer leaves the graph as it was: the optimizer never fails.

#include <atomic>
#include <cstddef>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/grappler/costs/graph_properties.h"
#include "tensorflow/core/grappler/grappler_item.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer_registry.h"
#include "tensorflow/core/grappler/utils.h"

namespace {

// Item id; graph (null: only asks whether the item is wanted); keep: names, each ended by '\n', with a '^' in front
// when the node must only run; place for the answer. Returns 0 when the item is not wanted, kInterrupted after Ctrl-C.
using Rewriter = int (*)(const char* id, const char* graph, size_t graph_size, const char* keep, size_t keep_size,
                         void* answer);

using Interrupt = void (*)();  // PyErr_SetInterrupt

constexpr int kInterrupted = -1;

std::atomic<Rewriter> g_rewriter{nullptr};
std::atomic<Interrupt> g_interrupt{nullptr};

// The item that Python was interrupted at: Grappler asks once more, and Python would take the next interrupt there.
thread_local std::string t_interrupted;

// Whether Python answers.  An exception cannot pass through here: an interrupt comes again once Python goes on.
template <typename... Args>
bool Ask(Rewriter rewriter, const std::string& id, Args... args) {
  if (!t_interrupted.empty() && id == t_interrupted) return false;
  t_interrupted.clear();
  const int said = rewriter(id.c_str(), args...);
  if (said == kInterrupted) {
    t_interrupted = id;
    g_interrupt.load()();
  }
  return said > 0;
}

struct Answer {
  bool given = false;
  std::string graph;
};

}  // namespace

extern "C" {

void tf_stitch_set_rewriter(Rewriter rewriter, Interrupt interrupt) {
  g_interrupt.store(interrupt);
  g_rewriter.store(rewriter);
}

void tf_stitch_reply(void* answer, const char* graph, size_t size) {
  auto* a = static_cast<Answer*>(answer);
  a->graph.assign(graph, size);
  a->given = true;
}
}

namespace tensorflow {
namespace grappler {
namespace {

// The graph with `_output_shapes` on every node whose shapes Grappler can infer.
GraphDef Annotated(const GrapplerItem& item) {
  GraphDef graph = item.graph;
  GraphProperties properties(item);
  if (!properties.InferStatically(/*assume_valid_feeds=*/false).ok()) return graph;
  GraphDef annotated = graph;
  return properties.AnnotateOutputShapes(&annotated).ok() ? annotated : graph;
}

// Names of the nodes that must stay.  A function's control outputs (its keep_ops) must run; nobody reads their data.
std::string NodesToKeep(const GrapplerItem& item) {
  bool is_function = false;
  for (const NodeDef& node : item.graph.node()) is_function |= node.op() == "_Arg" || node.op() == "_Retval";
  std::unordered_set<std::string> run;
  if (is_function) run.insert(item.keep_ops.begin(), item.keep_ops.end());
  for (const std::string& fetch : item.fetch) run.erase(NodeName(fetch));
  for (const auto& feed : item.feed) run.erase(NodeName(feed.first));
  std::string keep;
  for (const std::string& name : item.NodesToPreserve()) keep += (run.count(name) ? "^" : "") + name + "\n";
  return keep;
}

class StitchOptimizer : public CustomGraphOptimizer {
 public:
  absl::Status Init(const RewriterConfig_CustomGraphOptimizer*) override { return absl::OkStatus(); }
  std::string name() const override { return "tf_stitch"; }
  bool UsesFunctionLibrary() const override { return true; }

  absl::Status Optimize(Cluster*, const GrapplerItem& item, GraphDef* optimized) override {
    *optimized = item.graph;
    Rewriter rewriter = g_rewriter.load();
    if (rewriter == nullptr || !Ask(rewriter, item.id, nullptr, 0, nullptr, 0, nullptr)) return absl::OkStatus();
    const std::string keep = NodesToKeep(item);
    const std::string graph = Annotated(item).SerializeAsString();
    Answer answer;
    Ask(rewriter, item.id, graph.data(), graph.size(), keep.data(), keep.size(), &answer);
    GraphDef result;
    if (answer.given && result.ParseFromString(answer.graph)) optimized->Swap(&result);
    return absl::OkStatus();
  }
};

REGISTER_GRAPH_OPTIMIZER_AS(StitchOptimizer, "tf_stitch");

}  // namespace
}  // namespace grappler
}  // namespace tensorflow
