// The elementwise functions that generated kernels call (the "c" column of ir/ops.py), for host and CUDA.
//
// Operands are of one compute type: float, double, an integer type or bool.  C++ promotes small integers in
// expressions, so operands that are not plain variables of that type need a cast first (ts_i8(a + b)).
#ifndef TS_MATH_H_
#define TS_MATH_H_

#include "ts_poly.h"
#include "ts_types.h"

#if defined(__CUDACC__)
#define TS_LIBM_(name) ::name
#else
#define TS_LIBM_(name) __builtin_##name
#endif

template <class T> constexpr bool ts_is_signed = !ts_is_same<T, bool>::value && T(-1) < T(0);
template <class T> struct ts_unsigned { typedef T type; };
template <> struct ts_unsigned<ts_i8> { typedef ts_u8 type; };
template <> struct ts_unsigned<ts_i16> { typedef ts_u16 type; };
template <> struct ts_unsigned<ts_i32> { typedef ts_u32 type; };
template <> struct ts_unsigned<ts_i64> { typedef ts_u64 type; };

// --- classification ----------------------------------------------------------------------------------

TS_FN float ts_nan(float) { return ts_float_of(0x7fc00000u); }
TS_FN double ts_nan(double) { return ts_double_of(0x7ff8000000000000ull); }
TS_FN float ts_inf(float) { return ts_float_of(0x7f800000u); }
TS_FN double ts_inf(double) { return ts_double_of(0x7ff0000000000000ull); }

template <class T> TS_FN bool ts_is_nan(T x) { return x != x; }
template <class T> TS_FN bool ts_is_inf(T x) { return (x < 0 ? -x : x) == ts_inf(x); }
template <class T> TS_FN bool ts_is_finite(T x) { return (x < 0 ? -x : x) < ts_inf(x); }

// --- exact functions ---------------------------------------------------------------------------------

#if defined(__CUDACC__)
TS_FN float ts_abs(float x) { return ::fabsf(x); }  // part of the instruction that reads it
TS_FN double ts_abs(double x) { return ::fabs(x); }
#else
TS_FN float ts_abs(float x) { return ts_float_of(ts_bits(x) & 0x7fffffffu); }
TS_FN double ts_abs(double x) { return ts_double_of(ts_bits(x) & 0x7fffffffffffffffull); }
#endif
// |INT_MIN| wraps to INT_MIN, as in TensorFlow.
template <class T>
TS_FN T ts_abs(T x) {
  typedef typename ts_unsigned<T>::type U;
  return x < T(0) ? (T)(U)(0u - (U)x) : x;
}

// NaN gives NaN, +-0 gives 0.
template <class T>
TS_FN T ts_sign(T x) {
  T s = (T)((T)(x > T(0)) - (T)(x < T(0)));
  if constexpr (ts_is_real<T>) return x != x ? x : s;
  else return s;
}

#define TS_UNARY_LIBM_(ts_name, name)                       \
  TS_FN float ts_name(float x) { return TS_LIBM_(name##f)(x); } \
  TS_FN double ts_name(double x) { return TS_LIBM_(name)(x); }
#define TS_BINARY_LIBM_(ts_name, name)                                        \
  TS_FN float ts_name(float x, float y) { return TS_LIBM_(name##f)(x, y); }       \
  TS_FN double ts_name(double x, double y) { return TS_LIBM_(name)(x, y); }

TS_UNARY_LIBM_(ts_sqrt, sqrt)

#if defined(__SSE2__) && !defined(__SSE4_1__)

// No rounding instruction: adding and taking away the power of two from which on floats are integers rounds.
template <class T>
TS_FN T ts_rint(T x) {
  constexpr T big = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52);
  T a = ts_abs(x), r = a < big ? (a + big) - big : a;
  return ts_bits(x) >> (sizeof(T) * 8 - 1) ? -r : r;
}
template <class T>
TS_FN T ts_floor(T x) {
  T r = ts_rint(x);
  return r > x ? r - T(1) : r;
}
template <class T>
TS_FN T ts_ceil(T x) { return -ts_floor(-x); }

#else

TS_UNARY_LIBM_(ts_floor, floor)
TS_UNARY_LIBM_(ts_ceil, ceil)
TS_UNARY_LIBM_(ts_rint, rint)

#endif

#if !defined(__CUDACC__)
TS_FN float ts_rsqrt(float x) { return 1.0f / ts_sqrt(x); }
#endif
TS_FN double ts_rsqrt(double x) { return 1.0 / ts_sqrt(x); }

// NaN in either operand gives NaN.  On bool: or, and.
template <class T>
TS_FN T ts_max(T a, T b) {
  T m = a > b ? a : b;  // b when either is NaN
  if constexpr (ts_is_real<T>) return a != a ? a : m;
  else return m;
}
template <class T>
TS_FN T ts_min(T a, T b) {
  T m = a < b ? a : b;
  if constexpr (ts_is_real<T>) return a != a ? a : m;
  else return m;
}

// Many divided by one; a GPU prepares the divisor (ts_device.h).
#if !defined(__CUDACC__)
typedef float ts_divisor_t;
TS_FN ts_divisor_t ts_divisor(float s) { return s; }
TS_FN float ts_divide(float x, ts_divisor_t s) { return x / s; }
#endif

// 0 where the divisor is 0, even for NaN / 0.
template <class T>
TS_FN T ts_div_no_nan(T a, T b) { return b == T(0) ? T(0) : a / b; }

template <class T> struct ts_bits_of { typedef ts_u32 type; };
template <> struct ts_bits_of<double> { typedef ts_u64 type; };

// The next value after x in the direction of y.
template <class T>
TS_FN T ts_nextafter(T x, T y) {
  typedef typename ts_bits_of<T>::type U;
  U away = (x < y) == (x > T(0)) ? (U)1 : (U)-1;
  U sign = ts_bits(y) >> (sizeof(T) * 8 - 1) << (sizeof(T) * 8 - 1);
  // Tests of the bits see denormals also where the processor takes them for zero.
  bool zero = (U)(ts_bits(x) << 1) == 0;
  T r = ts_bitcast<T>(zero ? (U)(sign | 1) : (U)(ts_bits(x) + away));
  r = x == y ? y : r;
  return x != x || y != y ? ts_nan(T(0)) : r;
}

// --- integers ----------------------------------------------------------------------------------------

// Truncating division.  A zero divisor sets *status and gives 0; the smallest integer by -1 wraps.
template <class T>
TS_FN T ts_int_div(T a, T b, ts_i32* status) {
  if (b == T(0)) {
    TS_FAIL(status);
    return T(0);
  }
  if constexpr (ts_is_signed<T>) {
    if (b == T(-1)) return (T)(0 - (typename ts_unsigned<T>::type)a);
  }
  return (T)(a / b);
}

// Remainder with the sign of the dividend.  A zero divisor sets *status and gives 0.
template <class T>
TS_FN T ts_int_mod(T a, T b, ts_i32* status) {
  if (b == T(0)) {
    TS_FAIL(status);
    return T(0);
  }
  if constexpr (ts_is_signed<T>) {
    if (b == T(-1)) return T(0);
  }
  return (T)(a % b);
}

template <class T>
TS_FN T ts_bit_not(T x) {
  if constexpr (ts_is_same<T, bool>::value) return !x;
  else return (T)~x;
}
template <class T> TS_FN T ts_bit_and(T a, T b) { return (T)(a & b); }
template <class T> TS_FN T ts_bit_or(T a, T b) { return (T)(a | b); }
template <class T> TS_FN T ts_bit_xor(T a, T b) { return (T)(a ^ b); }

// Number of one bits (TensorFlow's PopulationCount gives uint8).
template <class T>
TS_FN ts_u8 ts_popcount(T x) {
  ts_u64 v = (typename ts_unsigned<T>::type)x;
  v = v - ((v >> 1) & 0x5555555555555555ull);
  v = (v & 0x3333333333333333ull) + ((v >> 2) & 0x3333333333333333ull);
  v = (v + (v >> 4)) & 0x0f0f0f0f0f0f0f0full;
  v = v + (v >> 8);
  v = v + (v >> 16);
  v = v + (v >> 32);
  return (ts_u8)(v & 0x7f);
}

// Word `index` of what Philox4x32-10 gives for a key and a counter of two words (Salmon et al. 2011): four words for
// each value of the counter.
TS_FN ts_u32 ts_philox(ts_u64 index, ts_u64 key, ts_u64 low, ts_u64 high) {
  ts_u64 first = low + (index >> 2);
  high += first < low ? 1 : 0;
  ts_u32 x0 = (ts_u32)first, x1 = (ts_u32)(first >> 32), x2 = (ts_u32)high, x3 = (ts_u32)(high >> 32);
  ts_u32 k0 = (ts_u32)key, k1 = (ts_u32)(key >> 32);
  for (int round = 0; round < 10; ++round) {
    ts_u64 a = (ts_u64)x0 * 0xd2511f53u, b = (ts_u64)x2 * 0xcd9e8d57u;
    x0 = (ts_u32)(b >> 32) ^ x1 ^ k0;
    x1 = (ts_u32)b;
    x2 = (ts_u32)(a >> 32) ^ x3 ^ k1;
    x3 = (ts_u32)a;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  ts_u32 even = index & 2 ? x2 : x0, odd = index & 2 ? x3 : x1;
  return index & 1 ? odd : even;
}

// TensorFlow clamps the shift count to [0, bits - 1].
template <class T>
TS_FN T ts_shift_count_(T n) {
  constexpr T top = (T)(sizeof(T) * 8 - 1);
  T m = n > top ? top : n;
  return m < T(0) ? T(0) : m;
}
template <class T>
TS_FN T ts_shift_left(T a, T n) {
  typedef typename ts_unsigned<T>::type U;
  return (T)(U)((U)a << (U)ts_shift_count_(n));
}
// Arithmetic for signed types.
template <class T>
TS_FN T ts_shift_right(T a, T n) { return (T)(a >> ts_shift_count_(n)); }

// --- elementary functions ----------------------------------------------------------------------------

#if defined(__CUDACC__)

#define TS_CUDA_UNARY_(name) TS_UNARY_LIBM_(ts_##name, name)
TS_CUDA_UNARY_(exp)
TS_FN double ts_exp_down(double x) { return ts_exp(x); }
TS_CUDA_UNARY_(expm1)
TS_CUDA_UNARY_(log)
TS_CUDA_UNARY_(log1p)
TS_CUDA_UNARY_(sin)
TS_CUDA_UNARY_(cos)
TS_CUDA_UNARY_(tan)
TS_CUDA_UNARY_(asin)
TS_CUDA_UNARY_(acos)
TS_CUDA_UNARY_(atan)
TS_CUDA_UNARY_(sinh)
TS_CUDA_UNARY_(cosh)
TS_CUDA_UNARY_(tanh)
TS_CUDA_UNARY_(asinh)
TS_CUDA_UNARY_(acosh)
TS_CUDA_UNARY_(atanh)
TS_CUDA_UNARY_(erf)
TS_FN double ts_erfc(double x) { return ::erfc(x); }
TS_BINARY_LIBM_(ts_atan2, atan2)
TS_BINARY_LIBM_(ts_pow, pow)
TS_BINARY_LIBM_(ts_fmod, fmod)

#include "ts_device.h"

TS_FN double ts_sigmoid(double x) {
  double e = ts_exp(-ts_abs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}
template <class T>
TS_FN T ts_softplus(T x) {
  T r = (x > T(0) ? x : T(0)) + ts_log1p(ts_exp(-ts_abs(x)));
  return x != x ? x : r;
}

#else

#include "ts_elementary.h"

// What texts for a GPU use (ts_device.h): e^x for x <= 0, the normal distribution.
template <class T>
TS_FN T ts_exp_down(T x) {
  return ts_exp(x);
}
TS_FN float ts_ndtr(float x) { return (float)(0.5 * ts_erfc((double)x * -0x1.6a09e667f3bcdp-1)); }

#endif

// --- integer power -----------------------------------------------------------------------------------

// Wraps around.  A negative exponent sets *status and gives 0 (TensorFlow raises an error).
template <class T>
TS_FN T ts_int_pow(T a, T n, ts_i32* status) {
  typedef typename ts_unsigned<T>::type U;
  if (n < T(0)) {
    TS_FAIL(status);
    return T(0);
  }
  ts_u64 result = 1, base = (U)a;
  for (U left = (U)n; left != 0; left = (U)(left >> 1)) {
    result = (left & 1) ? result * base : result;
    base *= base;
  }
  return (T)(U)result;
}

#include "ts_special.h"

#endif  // TS_MATH_H_
