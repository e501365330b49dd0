#include "model.h"

#include <cstdlib>
#include <memory>

#include "tensorflow/core/protobuf/config.pb.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace tf_stitch::host {
namespace {

constexpr char kInitSignature[] = "__saved_model_init_op";

struct Status {
  TF_Status* status = TF_NewStatus();
  Status() = default;
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  ~Status() { TF_DeleteStatus(status); }
  TF_Code code() const { return TF_GetCode(status); }
};

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

// "node:1"
TF_Output Place(TF_Graph* graph, const std::string& name) {
  size_t colon = name.rfind(':');
  std::string node = name.substr(0, colon);
  int port = colon == std::string::npos ? 0 : atoi(name.c_str() + colon + 1);
  TF_Operation* operation = TF_GraphOperationByName(graph, node.c_str());
  if (!operation || port < 0 || port >= TF_OperationNumOutputs(operation)) {
    throw Failure("A signature names the tensor '" + name + "', which the model's graph does not have.");
  }
  return {operation, port};
}

Spec ReadSpec(TF_Graph* graph, const std::string& name, const tensorflow::TensorInfo& info) {
  if (info.name().empty()) throw Failure("'" + name + "' is no dense tensor.");
  Spec spec{
      name, Place(graph, info.name()), static_cast<TF_DataType>(info.dtype()), !info.tensor_shape().unknown_rank(), {}};
  for (const auto& dim : info.tensor_shape().dim()) spec.shape.push_back(dim.size());
  return spec;
}

void CheckInput(const Signature& signature, const Spec& spec, const Tensor& tensor) {
  std::string where = "Input '" + spec.name + "' of '" + signature.name + "' ";
  if (tensor.dtype() != spec.dtype) {
    throw Failure(where + "is " + InfoOf(spec.dtype).name + ", the request has " + InfoOf(tensor.dtype()).name + ".");
  }
  std::vector<int64_t> shape = tensor.shape();
  bool fits = !spec.known_rank || shape.size() == spec.shape.size();
  for (size_t i = 0; fits && spec.known_rank && i < shape.size(); ++i) {
    fits = spec.shape[i] < 0 || spec.shape[i] == shape[i];
  }
  if (!fits)
    throw Failure(where + "has shape " + ShapeText(spec.shape) + ", the request has " + ShapeText(shape) + ".");
}

}  // namespace

Model::Model(const std::string& folder, int threads) : folder_(folder), graph_(TF_NewGraph()) {
  Status status;
  std::unique_ptr<TF_SessionOptions, void (*)(TF_SessionOptions*)> options(TF_NewSessionOptions(),
                                                                           TF_DeleteSessionOptions);
  tensorflow::ConfigProto config;
  config.set_inter_op_parallelism_threads(threads);
  config.set_intra_op_parallelism_threads(threads);
  config.mutable_gpu_options()->set_allow_growth(true);
  std::string bytes = config.SerializeAsString();
  TF_SetConfig(options.get(), bytes.data(), bytes.size(), status.status);
  std::unique_ptr<TF_Buffer, void (*)(TF_Buffer*)> meta_graph(TF_NewBuffer(), TF_DeleteBuffer);
  const char* tag = "serve";
  session_ = TF_LoadSessionFromSavedModel(options.get(), nullptr, folder.c_str(), &tag, 1, graph_, meta_graph.get(),
                                          status.status);
  if (status.code() != TF_OK) {
    std::string why = FirstLine(TF_Message(status.status));
    TF_DeleteGraph(graph_);
    throw Failure("'" + folder + "' cannot be loaded: " + why);
  }
  ReadSignatures(*meta_graph);
}

void Model::ReadSignatures(const TF_Buffer& meta_graph) {
  tensorflow::MetaGraphDef meta;
  if (!meta.ParseFromArray(meta_graph.data, static_cast<int>(meta_graph.length))) {
    throw Failure("The signatures of '" + folder_ + "' cannot be read.");
  }
  for (const auto& [name, def] : meta.signature_def()) {
    if (name == kInitSignature) continue;
    Signature signature{name, {}, {}};
    for (const auto& [input, info] : std::map(def.inputs().begin(), def.inputs().end())) {
      signature.inputs.push_back(ReadSpec(graph_, input, info));
    }
    for (const auto& [output, info] : std::map(def.outputs().begin(), def.outputs().end())) {
      signature.outputs.push_back(ReadSpec(graph_, output, info));
    }
    signatures_.emplace(name, std::move(signature));
  }
}

Model::~Model() {
  Status status;
  if (session_) {
    TF_CloseSession(session_, status.status);
    TF_DeleteSession(session_, status.status);
  }
  TF_DeleteGraph(graph_);
}

const Signature& Model::signature(const std::string& name) const {
  auto found = signatures_.find(name);
  if (found != signatures_.end()) return found->second;
  std::string has;
  for (const auto& [other, unused] : signatures_) has += (has.empty() ? "'" : ", '") + other + "'";
  throw Failure("'" + folder_ + "' has no signature '" + name + "'; it has " + (has.empty() ? "none" : has) + ".");
}

Answer Model::Run(const Signature& signature, const NamedTensors& inputs, int64_t deadline_ms) const {
  std::vector<TF_Output> feeds, fetches;
  std::vector<TF_Tensor*> values, results(signature.outputs.size(), nullptr);
  for (const Spec& spec : signature.inputs) {
    auto found = inputs.find(spec.name);
    if (found == inputs.end()) throw Failure("The request lacks '" + spec.name + "' of '" + signature.name + "'.");
    CheckInput(signature, spec, found->second);
    feeds.push_back(spec.place);
    values.push_back(found->second.get());
  }
  for (const Spec& spec : signature.outputs) fetches.push_back(spec.place);
  Status status;
  std::unique_ptr<TF_Buffer, void (*)(TF_Buffer*)> run_options(nullptr, TF_DeleteBuffer);
  if (deadline_ms > 0) {
    tensorflow::RunOptions options;
    options.set_timeout_in_ms(deadline_ms);
    std::string bytes = options.SerializeAsString();
    run_options.reset(TF_NewBufferFromString(bytes.data(), bytes.size()));
  }
  TF_SessionRun(session_, run_options.get(), feeds.data(), values.data(), static_cast<int>(feeds.size()),
                fetches.data(), results.data(), static_cast<int>(fetches.size()), nullptr, 0, nullptr, status.status);
  Answer answer;
  answer.code = status.code();
  if (answer.code != TF_OK) {
    answer.message = TF_Message(status.status);
    return answer;
  }
  for (size_t i = 0; i < results.size(); ++i) answer.outputs.emplace(signature.outputs[i].name, Tensor(results[i]));
  return answer;
}

}  // namespace tf_stitch::host
