// What a shape function knows of an op's outputs from an attribute.
#ifndef TF_STITCH_CUSTOM_OPS_KNOWN_SHAPES_H_
#define TF_STITCH_CUSTOM_OPS_KNOWN_SHAPES_H_

#include <vector>

#include "tensorflow/core/framework/shape_inference.h"

namespace tf_stitch {

// Outputs have these shapes, those behind the list's end unknown ones.
inline absl::Status SetShapes(const std::vector<tensorflow::PartialTensorShape>& shapes,
                              tensorflow::shape_inference::InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) {
    tensorflow::shape_inference::ShapeHandle shape = c->UnknownShape();
    if (i < static_cast<int>(shapes.size())) {
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[static_cast<size_t>(i)], &shape));
    }
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_KNOWN_SHAPES_H_
