// Element types and TensorFlow's Cast, for generated kernels (host C++17 and CUDA).
//
// Storage types: float, double, ts_half, ts_bfloat16, ts_i8 .. ts_u64, bool.  The 16-bit floats are storage
// only: arithmetic on them is float's, rounded once (to nearest, ties to even) when stored.
// Conversions are integer bit tricks without branches, so that loops over them vectorise at any x86-64 level.
//
// Integer arithmetic wraps around: build host code with -fwrapv (nvcc wraps anyway).
#ifndef TS_TYPES_H_
#define TS_TYPES_H_

#ifdef __CUDACC_RTC__  // NVRTC has no headers
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

// TS_FAIL notes what a kernel cannot do; a GPU has no status word, TensorFlow's kernels there go on as well.
#if defined(__CUDACC__)
#define TS_FN __device__ __forceinline__
#define TS_FAIL(status) (void)(status)
#else
#define TS_FN static inline __attribute__((always_inline, unused))
#define TS_FAIL(status) (*(status) = 1)
#endif

typedef int8_t ts_i8;
typedef int16_t ts_i16;
typedef int32_t ts_i32;
typedef int64_t ts_i64;
typedef uint8_t ts_u8;
typedef uint16_t ts_u16;
typedef uint32_t ts_u32;
typedef uint64_t ts_u64;

struct ts_half {
  uint16_t bits;
};
struct ts_bfloat16 {
  uint16_t bits;
};

// --- bit casts ---------------------------------------------------------------------------------------

template <class To, class From>
TS_FN To ts_bitcast(From x) {
  static_assert(sizeof(To) == sizeof(From), "ts_bitcast keeps the element size");
  To y;
#if defined(__CUDACC__)
  memcpy(&y, &x, sizeof(To));
#else
  __builtin_memcpy(&y, &x, sizeof(To));
#endif
  return y;
}

TS_FN ts_u32 ts_bits(float x) { return ts_bitcast<ts_u32>(x); }
TS_FN ts_u64 ts_bits(double x) { return ts_bitcast<ts_u64>(x); }
TS_FN float ts_float_of(ts_u32 b) { return ts_bitcast<float>(b); }
TS_FN double ts_double_of(ts_u64 b) { return ts_bitcast<double>(b); }

// --- runs of neighbours ------------------------------------------------------------------------------

// W elements that begin at a multiple of W: accesses of up to 16 bytes.
template <class T, int W>
struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) ts_run {
  T at[W];
};
#define TS_RUN(T, name, W) ts_run<T, W> name;
#define TS_RUN_LOAD(T, name, x, place, W) const ts_run<T, W> name = *(const ts_run<T, W>*)(x + (place));
#define TS_RUN_STORE(T, name, y, place, W) *(ts_run<T, W>*)(y + (place)) = name;

// --- selects -----------------------------------------------------------------------------------------

// c ? x : y for a condition that is the same in all lanes of a loop.  g++ makes a branch of the plain form, reads
// one side's operands in it, and then does not vectorise the loop.
#if defined(__CUDACC__)
template <class T>
TS_FN T ts_pick(bool c, T x, T y) {
  return c ? x : y;
}
#else
template <class T>
TS_FN T ts_word(T x) {
  return x;
}
TS_FN ts_u32 ts_word(float x) { return ts_bits(x); }
TS_FN ts_u64 ts_word(double x) { return ts_bits(x); }
template <class T>
TS_FN T ts_pick(bool c, T x, T y) {
  auto a = ts_word(x), b = ts_word(y);
  decltype(a) mask = (decltype(a))-(decltype(a))c;
  return ts_bitcast<T>((decltype(a))((a & mask) | (b & ~mask)));
}
#endif

// --- 16-bit floats -----------------------------------------------------------------------------------

TS_FN float ts_to_float(float x) { return x; }
TS_FN double ts_to_float(double x) { return x; }

TS_FN float ts_to_float(ts_bfloat16 x) { return ts_float_of((ts_u32)x.bits << 16); }

#if defined(__CUDACC__)

TS_FN float ts_to_float(ts_half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
TS_FN ts_half ts_to_half(float x) {
  ts_half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

#else

// Exact.  The exponent is moved by a multiplication by 2^112, which also makes denormals normal; Inf and NaN
// get the largest exponent.
TS_FN float ts_to_float(ts_half x) {
  ts_u32 sign = (ts_u32)(x.bits & 0x8000u) << 16;
  ts_u32 rest = (ts_u32)(x.bits & 0x7fffu) << 13;
  // Denormals go through the integer to float conversion: that is exact also when the processor treats
  // float32 denormals as zero, as TensorFlow's threads do.
  float tiny = (float)(ts_i32)(x.bits & 0x7fffu) * 0x1p-24f;
  ts_u32 bits = rest + (112u << 23);
  bits = rest >= (0x7c00u << 13) ? bits + (112u << 23) : bits;
  bits = rest < (0x0400u << 13) ? ts_bits(tiny) : bits;
  return ts_float_of(bits | sign);
}

TS_FN ts_half ts_to_half(float x) {
  ts_u32 b = ts_bits(x);
  ts_u32 sign = (b >> 16) & 0x8000u;
  ts_u32 a = b & 0x7fffffffu;
  // Normal results: subtract the exponent bias, round to even at bit 13.
  ts_u32 normal = (a - (112u << 23) + 0x0fffu + ((a >> 13) & 1u)) >> 13;
  // Denormal results (|x| < 2^-14): adding 0.5 puts the last kept bit at the end of the significand.
  ts_u32 tiny = ts_bits(ts_float_of(a) + 0.5f) - ts_bits(0.5f);
  ts_u32 r = a < (113u << 23) ? tiny : normal;
  r = a >= 0x477ff000u ? 0x7c00u : r;  // 65520 and above round to Inf
  r = a > 0x7f800000u ? (0x7e00u | ((a >> 13) & 0x3ffu)) : r;
  return ts_half{(ts_u16)(r | sign)};
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

TS_FN ts_bfloat16 ts_to_bfloat16(float x) {
  ts_bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

#else

TS_FN ts_bfloat16 ts_to_bfloat16(float x) {
  ts_u32 b = ts_bits(x);
  ts_u32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  ts_u32 nan = (b >> 16) | 0x0040u;
  return ts_bfloat16{(ts_u16)((b & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

#endif

// --- compute types -----------------------------------------------------------------------------------

template <class T> struct ts_compute { typedef T type; };
template <> struct ts_compute<ts_half> { typedef float type; };
template <> struct ts_compute<ts_bfloat16> { typedef float type; };

template <class A, class B> struct ts_is_same { static constexpr bool value = false; };
template <class A> struct ts_is_same<A, A> { static constexpr bool value = true; };
template <class T> constexpr bool ts_is_real = ts_is_same<T, float>::value || ts_is_same<T, double>::value;
template <class T> constexpr bool ts_is_half = ts_is_same<T, ts_half>::value || ts_is_same<T, ts_bfloat16>::value;

// The value in the type that arithmetic uses (16-bit floats: float; others: as they are).
template <class T>
TS_FN typename ts_compute<T>::type ts_load(T x) {
  if constexpr (ts_is_half<T>) return ts_to_float(x);
  else return x;
}

// --- Cast --------------------------------------------------------------------------------------------

// TensorFlow's Cast between any two storage types (truncate=false).  To bool: x != 0 (NaN is true).  Float to
// integer truncates toward zero; out of range (undefined in TensorFlow) the low bits of the 32- or 64-bit
// conversion are taken, which is 0x80.. on x86.  Integers wrap.  To a 16-bit float from double or a wide
// integer: through float, as TensorFlow does.
template <class To, class From>
TS_FN To ts_cast(From x) {
  if constexpr (ts_is_same<To, From>::value) return x;
  else if constexpr (ts_is_half<From>) return ts_cast<To>(ts_to_float(x));
  else if constexpr (ts_is_same<To, ts_half>::value) return ts_to_half((float)x);
  else if constexpr (ts_is_same<To, ts_bfloat16>::value) return ts_to_bfloat16((float)x);
  else if constexpr (ts_is_same<To, bool>::value) return x != (From)0;
  else if constexpr (ts_is_real<From> && !ts_is_real<To> && sizeof(To) < 4) return (To)(ts_i32)x;
  else if constexpr (ts_is_real<From> && ts_is_same<To, ts_u32>::value) return (To)(ts_i64)x;
  else return (To)x;
}

// Rounds a value of the compute type to storage.
template <class To, class From>
TS_FN To ts_store(From x) { return ts_cast<To>(x); }

// The value of the compute type nearest to x that storage can hold.
template <class T>
TS_FN typename ts_compute<T>::type ts_round(typename ts_compute<T>::type x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (ts_is_same<T, ts_bfloat16>::value) {  // a pair of x and 0 is the float
    ts_u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
    return ts_float_of(pair);
  }
#endif
  return ts_load(ts_store<T>(x));
}

#endif  // TS_TYPES_H_
