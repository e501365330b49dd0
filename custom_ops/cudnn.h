// Convolutions through cuDNN's backend (graph) API, loaded with dlopen; TensorFlow's GPU wheel brings the library.
//
// The library proposes engines; the fastest is measured once per class of shapes (autotune.h).
#ifndef TF_STITCH_CUSTOM_OPS_CUDNN_H_
#define TF_STITCH_CUSTOM_OPS_CUDNN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

constexpr int kMaxSpatial = 3;

// y = relu(conv(x, w) + residual + bias), the last three optional; the sums are taken in float.  Channels last, dense:
// x [batch, in..., channels_in], w [channels_out, window..., channels_in / groups], bias [channels_out], residual and y
// [batch, out..., channels_out].  Entries past `spatial` are not read.  With `filter_gradient` it is the gradient by w
// of such a convolution instead: dw = sum over batch and places of x and g, where g lies as y does and dw as w does.
struct ConvShape {
  int dtype;    // TensorFlow's DataType number: half, bfloat16 or float
  int spatial;  // 2 or 3
  int64_t batch, channels_in, channels_out, groups;
  std::array<int64_t, kMaxSpatial> in, out, window, strides, low, high, dilations;  // low, high: zeros around x
  bool bias, residual, relu;                                                        // all false with filter_gradient
  bool tf32;                                                                        // float may use TF32 tensor cores
  bool filter_gradient;
};

// A convolution with its plan; any thread may run it.
class Convolution {
 public:
  // The convolution of a shape on the current context's device, made once; the most recently used ones are kept.
  // Returns null and sets `error` when cuDNN is missing or has no engine.  Measures engines where TuningAllowed().
  static std::shared_ptr<const Convolution> Get(const ConvShape& shape, std::string* error);
  ~Convolution();

  size_t workspace_bytes() const;
  // Enqueues the convolution.  `bias` and `residual` may be null when the shape has none.  For the gradient by w, `w`
  // is g and `y` is dw.  "" or the error.
  std::string Run(const void* x, const void* w, const void* bias, const void* residual, void* y, void* workspace,
                  Stream stream) const;

 private:
  Convolution();
  static std::shared_ptr<const Convolution> Make(const ConvShape& shape, std::string* error);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A stream that convolutions run on has a handle of cuDNN's.  A handle cannot be made while the stream is captured, so
// it is made before; without convolutions this does nothing.
void PrepareStream(Stream stream);
// Gives a stream's handle to another one.  Every stream that convolutions may have run on is forgotten before it is
// destroyed.
void ForgetStream(Stream stream);

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_CUDNN_H_
