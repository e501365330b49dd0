#include "library_cuda.h"

#include <algorithm>
#include <utility>

#include "cublas_lt.h"
#include "cudnn.h"

namespace tf_stitch {
namespace {

class MatmulWork : public LibraryWork {
 public:
  MatmulWork(const MatmulFlags& flags, std::shared_ptr<const cuda::Matmul> product)
      : flags_(flags), product_(std::move(product)) {}

  size_t workspace_bytes() const override { return product_->workspace_bytes(); }
  std::string Run(void* const* buffers, void* workspace, cuda::Stream stream) const override {
    const void* bias = flags_.bias ? buffers[2] : nullptr;
    return product_->Run(buffers[0], buffers[1], bias, buffers[flags_.bias ? 3 : 2], workspace, stream);
  }

 private:
  const MatmulFlags flags_;
  const std::shared_ptr<const cuda::Matmul> product_;
};

// Sums over nothing, which the libraries do not take: zeros, or the product of zeros for its bias.  The result is the
// third buffer, or with a bias the fourth.
class EmptySum : public LibraryWork {
 public:
  // `product` is null without a bias; else it multiplies a column by a row, both of up to `zero_bytes`.
  EmptySum(const cuda::Driver& driver, size_t out_bytes, std::shared_ptr<const cuda::Matmul> product, size_t zero_bytes)
      : driver_(driver),
        out_bytes_(out_bytes),
        product_(std::move(product)),
        zero_bytes_((zero_bytes + 255) / 256 * 256) {}

  size_t workspace_bytes() const override { return product_ ? zero_bytes_ + product_->workspace_bytes() : 0; }
  bool has_fixed_nodes() const override { return false; }

  std::string Run(void* const* buffers, void* workspace, cuda::Stream stream) const override {
    void* zeros = product_ ? workspace : buffers[2];
    cuda::Result result = driver_.MemsetD8Async(zeros, 0, product_ ? zero_bytes_ : out_bytes_, stream);
    if (result) return cuda::Describe(driver_, result);
    if (!product_) return "";
    return product_->Run(zeros, zeros, buffers[2], buffers[3], static_cast<char*>(workspace) + zero_bytes_, stream);
  }

 private:
  const cuda::Driver& driver_;
  const size_t out_bytes_;
  const std::shared_ptr<const cuda::Matmul> product_;
  const size_t zero_bytes_;
};

std::unique_ptr<LibraryWork> MakeMatmul(const MatmulFlags& f, int dtype, const std::vector<int64_t>& d,
                                        const cuda::Driver& driver, bool tf32, std::string* error) {
  cuda::MatmulShape shape{dtype,           d[0],   d[1], d[2], d[3], f.trans_lhs, f.trans_rhs, f.broadcast_lhs,
                          f.broadcast_rhs, f.bias, tf32};
  std::shared_ptr<const cuda::Matmul> product;
  const size_t element = static_cast<size_t>(DTypeSize(dtype));
  if (d[3] > 0) {
    product = cuda::Matmul::Get(shape, error);
    return product ? std::make_unique<MatmulWork>(f, product) : nullptr;
  }
  if (f.bias) {  // all rows of all matrices at once
    shape.m = d[0] * d[1];
    shape.batch = shape.k = 1;
    shape.trans_lhs = shape.trans_rhs = shape.broadcast_lhs = shape.broadcast_rhs = false;
    product = cuda::Matmul::Get(shape, error);
    if (!product) return nullptr;
  }
  return std::make_unique<EmptySum>(driver, element * static_cast<size_t>(d[0] * d[1] * d[2]), product,
                                    element * static_cast<size_t>(std::max(d[0] * d[1], d[2])));
}

class ConvWork : public LibraryWork {
 public:
  ConvWork(const ConvFlags& flags, std::shared_ptr<const cuda::Convolution> conv)
      : flags_(flags), conv_(std::move(conv)) {}

  size_t workspace_bytes() const override { return conv_->workspace_bytes(); }
  std::string Run(void* const* buffers, void* workspace, cuda::Stream stream) const override {
    size_t next = 2;
    const void* bias = flags_.bias ? buffers[next++] : nullptr;
    const void* residual = flags_.residual ? buffers[next++] : nullptr;
    return conv_->Run(buffers[0], buffers[1], bias, residual, buffers[next], workspace, stream);
  }

 private:
  const ConvFlags flags_;
  const std::shared_ptr<const cuda::Convolution> conv_;
};

std::unique_ptr<LibraryWork> MakeConv(const Step& step, int dtype, const std::vector<int64_t>& d,
                                      const cuda::Driver& driver, bool tf32, std::string* error) {
  const ConvFlags& f = step.conv;
  cuda::ConvShape shape{};
  shape.filter_gradient = step.call == LibraryCall::kConvFilter;
  shape.dtype = dtype;
  shape.spatial = static_cast<int>(f.spatial());
  shape.batch = d[0];
  shape.channels_in = d[1];
  shape.channels_out = d[2];
  shape.groups = f.groups;
  const int64_t* sizes = d.data() + 3;
  for (auto* list : {&shape.in, &shape.out, &shape.window}) {
    std::copy_n(sizes, f.spatial(), list->begin());
    sizes += f.spatial();
  }
  std::copy(f.strides.begin(), f.strides.end(), shape.strides.begin());
  std::copy(f.low.begin(), f.low.end(), shape.low.begin());
  std::copy(f.high.begin(), f.high.end(), shape.high.begin());
  std::copy(f.dilations.begin(), f.dilations.end(), shape.dilations.begin());
  shape.bias = f.bias;
  shape.residual = f.residual;
  shape.relu = f.relu;
  shape.tf32 = tf32;
  if (shape.filter_gradient) {
    auto volume = [&](int64_t size, const std::array<int64_t, cuda::kMaxSpatial>& dims) {
      for (int i = 0; i < shape.spatial; ++i) size *= dims[i];
      return size;
    };
    if (volume(shape.batch, shape.out) == 0 || volume(1, shape.in) == 0) {
      int64_t size = volume(shape.channels_out * (shape.channels_in / shape.groups), shape.window);
      return std::make_unique<EmptySum>(driver, static_cast<size_t>(size * DTypeSize(dtype)), nullptr, 0);
    }
  }
  std::shared_ptr<const cuda::Convolution> conv = cuda::Convolution::Get(shape, error);
  return conv ? std::make_unique<ConvWork>(f, std::move(conv)) : nullptr;
}

}  // namespace

std::unique_ptr<LibraryWork> MakeLibraryWork(const Step& step, int dtype, const std::vector<int64_t>& dims,
                                             const cuda::Driver& driver, bool tf32, std::string* error) {
  return step.call == LibraryCall::kMatmul ? MakeMatmul(step.matmul, dtype, dims, driver, tf32, error)
                                           : MakeConv(step, dtype, dims, driver, tf32, error);
}

}  // namespace tf_stitch
