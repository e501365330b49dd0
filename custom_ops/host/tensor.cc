#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <iterator>
#include <limits>

#include "Eigen/Core"
#include "tensorflow/c/tf_tstring.h"

namespace tf_stitch::host {
namespace {

constexpr DTypeInfo kTypes[] = {
    {TF_FLOAT, "float32", "<f4", 'f', 4},
    {TF_DOUBLE, "float64", "<f8", 'f', 8},
    {TF_HALF, "float16", "<f2", 'f', 2},
    {TF_BFLOAT16, "bfloat16", "|V2", 'f', 2},
    {TF_INT8, "int8", "|i1", 'i', 1},
    {TF_INT16, "int16", "<i2", 'i', 2},
    {TF_INT32, "int32", "<i4", 'i', 4},
    {TF_INT64, "int64", "<i8", 'i', 8},
    {TF_UINT8, "uint8", "|u1", 'u', 1},
    {TF_UINT16, "uint16", "<u2", 'u', 2},
    {TF_UINT32, "uint32", "<u4", 'u', 4},
    {TF_UINT64, "uint64", "<u8", 'u', 8},
    {TF_BOOL, "bool", "|b1", 'b', 1},
    {TF_COMPLEX64, "complex64", "<c8", 'c', 8},
    {TF_COMPLEX128, "complex128", "<c16", 'c', 16},
    {TF_STRING, "string", "|S", 's', 0},
};

TF_TString* Strings(const Tensor& t) { return static_cast<TF_TString*>(t.data()); }

// Calls fn with a null pointer of the element's C++ type.
template <class Fn>
auto ByType(TF_DataType dtype, Fn fn) {
  switch (dtype) {
    case TF_FLOAT:
      return fn(static_cast<float*>(nullptr));
    case TF_DOUBLE:
      return fn(static_cast<double*>(nullptr));
    case TF_HALF:
      return fn(static_cast<Eigen::half*>(nullptr));
    case TF_BFLOAT16:
      return fn(static_cast<Eigen::bfloat16*>(nullptr));
    case TF_INT8:
      return fn(static_cast<int8_t*>(nullptr));
    case TF_INT16:
      return fn(static_cast<int16_t*>(nullptr));
    case TF_INT32:
      return fn(static_cast<int32_t*>(nullptr));
    case TF_INT64:
      return fn(static_cast<int64_t*>(nullptr));
    case TF_UINT8:
      return fn(static_cast<uint8_t*>(nullptr));
    case TF_UINT16:
      return fn(static_cast<uint16_t*>(nullptr));
    case TF_UINT32:
      return fn(static_cast<uint32_t*>(nullptr));
    case TF_UINT64:
      return fn(static_cast<uint64_t*>(nullptr));
    case TF_BOOL:
      return fn(static_cast<bool*>(nullptr));
    default:
      throw Failure(std::string("Elements of type ") + InfoOf(dtype).name + " are no numbers here.");
  }
}

std::complex<double> Complex(const Tensor& t, int64_t i) {
  if (t.dtype() == TF_COMPLEX64) return static_cast<std::complex<float>*>(t.data())[i];
  return static_cast<std::complex<double>*>(t.data())[i];
}

// Real numbers, or the parts of complex ones, that must be as near as `scale` says.
struct Worst {
  double difference = 0, scale = 0;
  bool broken = false;

  void Add(double got, double want) {
    if (std::isfinite(want) && std::isfinite(got)) {
      difference = std::max(difference, std::abs(got - want));
      scale = std::max(scale, std::abs(want));
    } else if (!(got == want || (std::isnan(got) && std::isnan(want)))) {
      broken = true;
    }
  }
};

}  // namespace

const DTypeInfo& InfoOf(TF_DataType dtype) {
  auto found = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const DTypeInfo& i) { return i.dtype == dtype; });
  if (found == std::end(kTypes)) {
    throw Failure("Tensors of TensorFlow's type number " + std::to_string(dtype) + " cannot be sent or received here.");
  }
  return *found;
}

Tensor::Tensor(TF_Tensor* owned) : tensor_(owned, TF_DeleteTensor) {}

Tensor::Tensor(TF_DataType dtype, const std::vector<int64_t>& shape) {
  size_t bytes = static_cast<size_t>(InfoOf(dtype).size);
  for (int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(d), &bytes) || bytes > (size_t{1} << 40)) {
      throw Failure("A tensor of shape " + ShapeText(shape) + " cannot be made.");
    }
  }
  TF_Tensor* made = TF_AllocateTensor(dtype, shape.data(), static_cast<int>(shape.size()), bytes);
  if (!made) throw Failure("There is no memory for a tensor of shape " + ShapeText(shape) + ".");
  tensor_.reset(made, TF_DeleteTensor);
  if (bytes) memset(data(), 0, bytes);
}

Tensor::Tensor(const std::vector<std::string>& elements, const std::vector<int64_t>& shape) {
  TF_Tensor* made =
      TF_AllocateTensor(TF_STRING, shape.data(), static_cast<int>(shape.size()), elements.size() * sizeof(TF_TString));
  tensor_.reset(made, [](TF_Tensor* t) {  // the memory is TensorFlow's, what its strings hold is ours
    for (int64_t i = 0; i < TF_TensorElementCount(t); ++i) {
      TF_StringDealloc(static_cast<TF_TString*>(TF_TensorData(t)) + i);
    }
    TF_DeleteTensor(t);
  });
  for (size_t i = 0; i < elements.size(); ++i) {
    TF_StringInit(Strings(*this) + i);
    TF_StringCopy(Strings(*this) + i, elements[i].data(), elements[i].size());
  }
}

std::vector<int64_t> Tensor::shape() const {
  std::vector<int64_t> out;
  for (int i = 0; i < TF_NumDims(tensor_.get()); ++i) out.push_back(TF_Dim(tensor_.get(), i));
  return out;
}

std::string_view Tensor::text(int64_t i) const {
  const TF_TString* s = Strings(*this) + i;
  return {TF_StringGetDataPointer(s), TF_StringGetSize(s)};
}

double ElementAsDouble(const Tensor& t, int64_t i) {
  return ByType(t.dtype(), [&](auto* type) {
    return static_cast<double>(static_cast<std::remove_pointer_t<decltype(type)>*>(t.data())[i]);
  });
}

void SetElement(const Tensor& t, int64_t i, double value) {
  ByType(t.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    static_cast<T*>(t.data())[i] = static_cast<T>(value);
  });
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    out += (i ? ", " : "") + (shape[i] < 0 ? std::string("?") : std::to_string(shape[i]));
  }
  return out + "]";
}

double RelativeError(const Tensor& got, const Tensor& want) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  if (got.dtype() != want.dtype() || got.shape() != want.shape()) return kInfinite;
  char kind = InfoOf(want.dtype()).kind;
  if (kind == 's') {
    for (int64_t i = 0; i < want.size(); ++i) {
      if (got.text(i) != want.text(i)) return kInfinite;
    }
    return 0;
  }
  if (kind != 'f' && kind != 'c') return memcmp(got.data(), want.data(), want.bytes()) ? kInfinite : 0;
  Worst worst;
  for (int64_t i = 0; i < want.size(); ++i) {
    if (kind == 'f') {
      worst.Add(ElementAsDouble(got, i), ElementAsDouble(want, i));
    } else {
      worst.Add(Complex(got, i).real(), Complex(want, i).real());
      worst.Add(Complex(got, i).imag(), Complex(want, i).imag());
    }
  }
  if (worst.broken) return kInfinite;
  return worst.scale > 0 ? worst.difference / worst.scale : worst.difference;
}

}  // namespace tf_stitch::host
