// Reads many variables in one operation: what a served graph would do in as many, each run.
//
// The session of tf_stitch.serving puts it in place of the reads of stitched functions.  Variables are found by name in
// the first run, and kept; their values are those at the time of each run.
#include <mutex>
#include <string>
#include <vector>

#include "known_shapes.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tf_stitch {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Var;

REGISTER_OP("StitchedVariables")
    .Output("values: dtypes")
    .Attr("dtypes: list(type) >= 1")
    .Attr("containers: list(string)")
    .Attr("names: list(string)")
    .Attr("shapes: list(shape) = []")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) -> absl::Status {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      return SetShapes(shapes, c);
    })
    .Doc("The values of the variables of these names, which nothing updates in part (scatter, sparse optimizers).");

class StitchedVariablesOp : public OpKernel {
 public:
  explicit StitchedVariablesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("containers", &containers_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    size_t count = output_types().size();
    OP_REQUIRES(ctx, containers_.size() == count && names_.size() == count,
                absl::InvalidArgumentError("StitchedVariables needs a container and a name for each output."));
  }

  void Compute(OpKernelContext* ctx) override {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (variables_.empty()) OP_REQUIRES_OK(ctx, Find(ctx));
    }
    for (size_t i = 0; i < variables_.size(); ++i) {
      Var& variable = *variables_[i];
      tensorflow::tf_shared_lock lock(*variable.mu());
      OP_REQUIRES(ctx, variable.is_initialized && !variable.copy_on_read_mode.load(),
                  absl::FailedPreconditionError("Variable '" + names_[i] + "' " +
                                                (variable.is_initialized ? "is updated in part, and StitchedVariables "
                                                                           "hands out whole values only."
                                                                         : "is not initialized.")));
      OP_REQUIRES(ctx, variable.tensor()->dtype() == output_type(static_cast<int>(i)),
                  absl::InvalidArgumentError("Variable '" + names_[i] + "' is of another type."));
      ctx->set_output(static_cast<int>(i), *variable.tensor());
    }
  }

 private:
  absl::Status Find(OpKernelContext* ctx) {
    tensorflow::ResourceMgr* resources = ctx->resource_manager();
    std::vector<tensorflow::core::RefCountPtr<Var>> found(names_.size());
    for (size_t i = 0; i < found.size(); ++i) {
      const std::string& container = containers_[i].empty() ? resources->default_container() : containers_[i];
      Var* variable = nullptr;
      absl::Status status = resources->Lookup(container, names_[i], &variable);
      if (!status.ok()) {  // the code is that of TensorFlow's own reads
        return absl::FailedPreconditionError("Could not find variable '" + names_[i] +
                                             "': it is not initialized, or was deleted.");
      }
      found[i].reset(variable);
    }
    variables_ = std::move(found);
    return absl::OkStatus();
  }

  std::vector<std::string> containers_, names_;
  std::mutex mu_;  // of the search
  std::vector<tensorflow::core::RefCountPtr<Var>> variables_;
};

REGISTER_KERNEL_BUILDER(Name("StitchedVariables").Device(tensorflow::DEVICE_CPU), StitchedVariablesOp);
REGISTER_KERNEL_BUILDER(Name("StitchedVariables").Device(tensorflow::DEVICE_GPU), StitchedVariablesOp);

}  // namespace
}  // namespace tf_stitch
