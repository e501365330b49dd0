// Loops of rewritten models become StitchedWhile nodes where they run.
//
// A SavedModel keeps its While nodes: those who load it may differentiate them.  The rewriter marks those whose turns
// one kernel can run (tf_stitch/graph/whiles.py); before TensorFlow takes a graph's loops apart, this pass puts
// StitchedWhile nodes in their places, in the functions that the graph calls too.  Where a device at hand lacks a
// kernel of a turn's, the loop stays.
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "tensorflow/core/common_runtime/device_set.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/memory_types.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/graph/graph.h"

namespace tf_stitch {
namespace {

using tensorflow::AttrValue;
using tensorflow::FunctionDef;
using tensorflow::FunctionLibraryDefinition;
using tensorflow::Graph;
using tensorflow::GraphOptimizationPassOptions;
using tensorflow::Node;
using tensorflow::NodeDef;

constexpr char kMark[] = "_tf_stitch_turns";

std::vector<std::string> Called(const NodeDef& node) {
  std::vector<std::string> names;
  for (const auto& [name, value] : node.attr()) {
    if (value.has_func()) names.push_back(value.func().name());
    for (const auto& f : value.list().func()) names.push_back(f.name());
  }
  return names;
}

class StitchedWhilePass : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(const GraphOptimizationPassOptions& options) override {
    if (!options.graph || !*options.graph || !options.flib_def) return absl::OkStatus();
    Devices devices = DevicesOf(options);
    std::vector<std::string> functions;
    std::vector<Node*> loops;
    for (Node* node : (*options.graph)->op_nodes()) {
      for (std::string& name : Called(node->def())) functions.push_back(std::move(name));
      if (CanBeOp(node->def(), *options.flib_def, devices)) loops.push_back(node);
    }
    TF_RETURN_IF_ERROR(Rewrite(options.flib_def, std::move(functions), devices));
    for (Node* node : loops) TF_RETURN_IF_ERROR(Replace(options.graph->get(), node));
    return absl::OkStatus();
  }

 private:
  using Devices = std::vector<tensorflow::DeviceType>;

  static Devices DevicesOf(const GraphOptimizationPassOptions& options) {
    Devices devices = {tensorflow::DeviceType(tensorflow::DEVICE_CPU)};
    if (!options.device_set) return devices;
    for (const tensorflow::Device* d : options.device_set->devices()) {
      if (d->device_type() == tensorflow::DEVICE_GPU) devices = {devices[0], tensorflow::DeviceType(d->device_type())};
    }
    return devices;
  }

  // Whether a node is a marked loop with kernels for all devices that it may come to.
  static bool CanBeOp(const NodeDef& node, const FunctionLibraryDefinition& library, const Devices& devices) {
    if (!node.attr().count(kMark) || (node.op() != "While" && node.op() != "StatelessWhile")) return false;
    for (const char* name : {"cond", "body"}) {
      const FunctionDef* f = library.Find(node.attr().at(name).func().name());
      if (!f) return false;
      for (const NodeDef& n : f->node_def()) {
        if (!n.device().empty() && n.device() != node.device()) return false;
        for (const tensorflow::DeviceType& d : devices) {
          if (n.op() != "NoOp" && !tensorflow::KernelDefAvailable(d, n)) return false;
        }
      }
    }
    return true;
  }

  static void MakeOp(NodeDef* node) {
    node->set_op(node->op() == "While" ? "StitchedWhile" : "StatelessStitchedWhile");
    AttrValue host;  // as TensorFlow has loops' variables
    for (int i = 0; i < node->attr().at("T").list().type_size(); ++i) {
      if (tensorflow::MTypeFromDType(node->attr().at("T").list().type(i)) == tensorflow::HOST_MEMORY) {
        host.mutable_list()->add_i(i);
      }
    }
    auto& attrs = *node->mutable_attr();
    for (const char* name : {"_input_hostmem", "_output_hostmem"}) {
      if (host.has_list()) attrs[name] = host;
    }
    for (const char* name : {kMark, "parallel_iterations", "_lower_using_switch_merge", "_num_original_outputs"}) {
      attrs.erase(name);
    }
  }

  // Makes the loops of functions ops, those of the functions that they call too.
  static absl::Status Rewrite(FunctionLibraryDefinition* library, std::vector<std::string> names,
                              const Devices& devices) {
    std::unordered_set<std::string> seen;
    while (!names.empty()) {
      std::string name = std::move(names.back());
      names.pop_back();
      const FunctionDef* f = seen.insert(name).second ? library->Find(name) : nullptr;
      if (!f) continue;
      std::vector<int> loops;
      for (int i = 0; i < f->node_def_size(); ++i) {
        for (std::string& called : Called(f->node_def(i))) names.push_back(std::move(called));
        if (CanBeOp(f->node_def(i), *library, devices)) loops.push_back(i);
      }
      if (loops.empty()) continue;
      FunctionDef changed = *f;
      for (int i : loops) MakeOp(changed.mutable_node_def(i));
      TF_RETURN_IF_ERROR(library->ReplaceFunction(name, changed));
    }
    return absl::OkStatus();
  }

  static absl::Status Replace(Graph* graph, Node* loop) {
    NodeDef def = loop->def();
    MakeOp(&def);
    absl::Status status;
    Node* made = graph->AddNode(def, &status);
    TF_RETURN_IF_ERROR(status);
    made->set_assigned_device_name(loop->assigned_device_name());
    for (const tensorflow::Edge* e : loop->in_edges()) graph->AddEdge(e->src(), e->src_output(), made, e->dst_input());
    std::vector<const tensorflow::Edge*> out(loop->out_edges().begin(), loop->out_edges().end());
    for (const tensorflow::Edge* e : out) {
      Node* reader = e->dst();
      int port = e->src_output(), input = e->dst_input();
      if (e->IsControlEdge()) {
        graph->RemoveControlEdge(e);
        graph->AddControlEdge(made, reader);
      } else {
        TF_RETURN_IF_ERROR(graph->UpdateEdge(made, port, reader, input));
      }
    }
    graph->RemoveNode(loop);
    return absl::OkStatus();
  }
};

REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::PRE_PLACEMENT, 5, StitchedWhilePass);  // lowering: 10

}  // namespace
}  // namespace tf_stitch
