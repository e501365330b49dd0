// Tensors of TensorFlow's C API as values, for the host program.
#ifndef TF_STITCH_CUSTOM_OPS_HOST_TENSOR_H_
#define TF_STITCH_CUSTOM_OPS_HOST_TENSOR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tensorflow/c/c_api.h"

namespace tf_stitch::host {

// What ends a command; the text is one sentence for the user.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A tensor; copies share its memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(TF_DataType dtype, const std::vector<int64_t>& shape);          // zeros; not for strings
  Tensor(const std::vector<std::string>&, const std::vector<int64_t>&);  // strings
  explicit Tensor(TF_Tensor* owned);                                     // a result of TensorFlow's

  TF_DataType dtype() const { return TF_TensorType(tensor_.get()); }
  std::vector<int64_t> shape() const;
  int64_t size() const { return TF_TensorElementCount(tensor_.get()); }
  size_t bytes() const { return TF_TensorByteSize(tensor_.get()); }
  void* data() const { return TF_TensorData(tensor_.get()); }
  std::string_view text(int64_t i) const;  // element of a string tensor
  TF_Tensor* get() const { return tensor_.get(); }

 private:
  std::shared_ptr<TF_Tensor> tensor_;
};

using NamedTensors = std::map<std::string, Tensor>;

// What the host knows of an element type.
struct DTypeInfo {
  TF_DataType dtype;
  const char* name;  // TensorFlow's
  const char* npy;   // NumPy's, little-endian; bfloat16 is bytes to NumPy
  char kind;         // 'f' float, 'i' signed, 'u' unsigned, 'b' bool, 'c' complex, 's' string
  int size;          // bytes of an element; 0 for strings
};
const DTypeInfo& InfoOf(TF_DataType dtype);  // throws Failure for a type that the host cannot handle

// Numeric elements as doubles: exact but for 64-bit integers past 2^53.  Not for complex numbers and strings.
double ElementAsDouble(const Tensor& t, int64_t i);
void SetElement(const Tensor& t, int64_t i, double value);

std::string ShapeText(const std::vector<int64_t>& shape);  // "[?, 3]"; -1 is unknown

// The worst difference of two tensors over the largest magnitude in `want`; infinite when types, shapes, NaNs or
// infinities differ, or any integer, bool or string does.
double RelativeError(const Tensor& got, const Tensor& want);

}  // namespace tf_stitch::host

#endif  // TF_STITCH_CUSTOM_OPS_HOST_TENSOR_H_
