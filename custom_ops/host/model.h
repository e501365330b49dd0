// A SavedModel in a session of TensorFlow's C API.
#ifndef TF_STITCH_CUSTOM_OPS_HOST_MODEL_H_
#define TF_STITCH_CUSTOM_OPS_HOST_MODEL_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensor.h"
#include "tensorflow/c/c_api.h"

namespace tf_stitch::host {

// An input or output of a signature.
struct Spec {
  std::string name;
  TF_Output place;
  TF_DataType dtype;
  bool known_rank;
  std::vector<int64_t> shape;  // -1: unknown
};

struct Signature {
  std::string name;
  std::vector<Spec> inputs, outputs;
};

// What a request gave: the outputs, or why there are none.
struct Answer {
  TF_Code code = TF_OK;
  std::string message;
  NamedTensors outputs;
};

class Model {
 public:
  // Loads the MetaGraph "serve" of a folder, with `threads` threads for each of TensorFlow's two pools (0: its own
  // choice).  Throws Failure.
  Model(const std::string& folder, int threads);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  ~Model();

  const std::map<std::string, Signature>& signatures() const { return signatures_; }
  const Signature& signature(const std::string& name) const;  // throws Failure

  // Runs a request; thread-safe.  `deadline_ms` 0: none.  Throws Failure when inputs do not fit the signature.
  Answer Run(const Signature& signature, const NamedTensors& inputs, int64_t deadline_ms) const;

 private:
  void ReadSignatures(const TF_Buffer& meta_graph);

  std::string folder_;
  TF_Graph* graph_;
  TF_Session* session_ = nullptr;
  std::map<std::string, Signature> signatures_;
};

}  // namespace tf_stitch::host

#endif  // TF_STITCH_CUSTOM_OPS_HOST_MODEL_H_
