#include "library_host.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace tf_stitch {
namespace {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

float FromBits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
uint32_t ToBits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

float Widen(Bfloat16 x) { return FromBits(static_cast<uint32_t>(x.bits) << 16); }
float Widen(Half x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7FFF;
  if (rest >= 0x7C00) return FromBits(sign | 0x7F800000 | (rest & 0x3FF) << 13);  // infinite or NaN
  // Threads of TensorFlow flush denormals, so these come from an integer.
  float value = rest < 0x400 ? static_cast<float>(rest) * 0x1p-24f : FromBits((rest << 13) + (uint32_t{112} << 23));
  return FromBits(sign | ToBits(value));
}
float Widen(float x) { return x; }
double Widen(double x) { return x; }

// Round to nearest, ties to even.
void Narrow(float x, Bfloat16* out) {
  uint32_t bits = ToBits(x);
  bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  out->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
void Narrow(float x, Half* out) {
  uint32_t bits = ToBits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF, half;
  if (rest > 0x7F800000) {
    half = 0x7E00;
  } else if (rest >= 0x47800000) {  // 2^16
    half = 0x7C00;
  } else if (rest < 0x38800000) {  // below 2^-14: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits
    half = ToBits(FromBits(rest) + 0.5f) - ToBits(0.5f);
  } else {
    half = (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}
template <class T>
void Narrow(T x, T* out) {
  *out = x;
}

template <class T>
void Rows(const MatmulFlags& f, const std::vector<int64_t>& dims, void* const* buffers, int64_t begin, int64_t end) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  int64_t m = dims[1], n = dims[2], k = dims[3];
  const T *lhs = static_cast<const T*>(buffers[0]), *rhs = static_cast<const T*>(buffers[1]);
  const T* bias = f.bias ? static_cast<const T*>(buffers[2]) : nullptr;
  T* out = static_cast<T*>(buffers[f.bias ? 3 : 2]);
  std::vector<Wide> sums(static_cast<size_t>(n));
  for (int64_t row = begin; row < end; ++row) {
    int64_t b = row / m, i = row % m;
    const T* x = lhs + (f.broadcast_lhs ? 0 : b * m * k) + (f.trans_lhs ? i : i * k);
    const T* y = rhs + (f.broadcast_rhs ? 0 : b * k * n);
    int64_t x_step = f.trans_lhs ? m : 1, y_row = f.trans_rhs ? 1 : n, y_column = f.trans_rhs ? k : 1;
    std::fill(sums.begin(), sums.end(), Wide{0});
    for (int64_t l = 0; l < k; ++l) {
      Wide factor = Widen(x[l * x_step]);
      for (int64_t j = 0; j < n; ++j) sums[j] += factor * Widen(y[l * y_row + j * y_column]);
    }
    for (int64_t j = 0; j < n; ++j) {
      Narrow(bias ? sums[j] + Widen(bias[j]) : sums[j], &out[row * n + j]);
    }
  }
}

// The pixel of all images that a place of the result sees under a tap of its window; -1 outside.
int64_t PixelUnder(const ConvFlags& f, size_t spatial, const int64_t* in, const int64_t* out, const int64_t* window,
                   int64_t place, int64_t tap) {
  int64_t pixel = 0, scale = 1;
  for (size_t i = spatial; i-- > 0; place /= out[i], tap /= window[i], scale *= in[i]) {
    const int64_t at = place % out[i] * f.strides[i] - f.low[i] + tap % window[i] * f.dilations[i];
    if (at < 0 || at >= in[i]) return -1;
    pixel += at * scale;
  }
  return pixel + place * scale;  // what is left of the place is the image
}

// All channels of the places [begin, end) of a convolution's result.
template <class T>
void Places(const ConvFlags& f, const std::vector<int64_t>& dims, void* const* buffers, int64_t begin, int64_t end) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const size_t spatial = f.spatial();
  const int64_t channels = dims[1] / f.groups, all_channels = dims[1], out_channels = dims[2];
  const int64_t *in = dims.data() + 3, *out = in + spatial, *window = out + spatial;
  const T *x = static_cast<const T*>(buffers[0]), *w = static_cast<const T*>(buffers[1]);
  const T* bias = f.bias ? static_cast<const T*>(buffers[2]) : nullptr;
  const T* residual = f.residual ? static_cast<const T*>(buffers[f.bias ? 3 : 2]) : nullptr;
  T* y = static_cast<T*>(buffers[2 + f.bias + f.residual]);
  int64_t taps = 1;
  for (size_t i = 0; i < spatial; ++i) taps *= window[i];
  std::vector<Wide> sums(static_cast<size_t>(out_channels));
  for (int64_t place = begin; place < end; ++place) {
    std::fill(sums.begin(), sums.end(), Wide{0});
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t pixel = PixelUnder(f, spatial, in, out, window, place, tap);
      if (pixel < 0) continue;
      for (int64_t o = 0; o < out_channels; ++o) {
        const T* from = x + pixel * all_channels + o / (out_channels / f.groups) * channels;
        const T* filter = w + (o * taps + tap) * channels;
        for (int64_t c = 0; c < channels; ++c) sums[o] += Widen(from[c]) * Widen(filter[c]);
      }
    }
    for (int64_t o = 0; o < out_channels; ++o) {
      Wide sum = sums[o];
      if (residual) sum += Widen(residual[place * out_channels + o]);
      if (bias) sum += Widen(bias[o]);
      Narrow(f.relu && sum < 0 ? Wide{0} : sum, &y[place * out_channels + o]);
    }
  }
}

// Rows [begin, end) of a convolution's gradient by its filter, each of the channels that lead to one tap of one
// channel.
template <class T>
void FilterRows(const ConvFlags& f, const std::vector<int64_t>& dims, void* const* buffers, int64_t begin,
                int64_t end) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const size_t spatial = f.spatial();
  const int64_t channels = dims[1] / f.groups, all_channels = dims[1], out_channels = dims[2];
  const int64_t *in = dims.data() + 3, *out = in + spatial, *window = out + spatial;
  const T *x = static_cast<const T*>(buffers[0]), *g = static_cast<const T*>(buffers[1]);
  T* dw = static_cast<T*>(buffers[2]);
  int64_t taps = 1, places = dims[0];
  for (size_t i = 0; i < spatial; ++i) {
    taps *= window[i];
    places *= out[i];
  }
  std::vector<Wide> sums(static_cast<size_t>(channels));
  for (int64_t row = begin; row < end; ++row) {
    const int64_t o = row / taps, group = o / (out_channels / f.groups);
    std::fill(sums.begin(), sums.end(), Wide{0});
    for (int64_t place = 0; place < places; ++place) {
      int64_t pixel = PixelUnder(f, spatial, in, out, window, place, row % taps);
      if (pixel < 0) continue;
      const T* from = x + pixel * all_channels + group * channels;
      Wide factor = Widen(g[place * out_channels + o]);
      for (int64_t c = 0; c < channels; ++c) sums[c] += factor * Widen(from[c]);
    }
    for (int64_t c = 0; c < channels; ++c) Narrow(sums[c], &dw[row * channels + c]);
  }
}

template <class T>
void Blocks(const Step& step, const StepPlan& plan, void* const* buffers, int64_t begin, int64_t end) {
  if (step.call == LibraryCall::kMatmul) return Rows<T>(step.matmul, plan.dims, buffers, begin, end);
  if (step.call == LibraryCall::kConvFilter) return FilterRows<T>(step.conv, plan.dims, buffers, begin, end);
  Places<T>(step.conv, plan.dims, buffers, begin, end);
}

}  // namespace

void RunLibraryBlocks(const Step& step, int dtype, const StepPlan& plan, void* const* buffers, int64_t begin,
                      int64_t end) {
  switch (dtype) {
    case 1:
      return Blocks<float>(step, plan, buffers, begin, end);
    case 2:
      return Blocks<double>(step, plan, buffers, begin, end);
    case 14:
      return Blocks<Bfloat16>(step, plan, buffers, begin, end);
    case 19:
      return Blocks<Half>(step, plan, buffers, begin, end);
    default:
      return;  // the parser lets no other type through
  }
}

}  // namespace tf_stitch
