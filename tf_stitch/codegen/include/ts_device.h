// Functions of their own for CUDA, float only, where the library's cost too many instructions: a kernel that moves 8
// bytes per element has time for about 75.
//
// Error bounds, in units of the last place of the result (tests/gpu/test_device_math.py measures them): ts_divide 1 for
// divisors in [2^-126, 2^100] and 8 for others, ts_rsqrt 2, ts_exp_down 5 (3 down to -60), ts_sigmoid 5, ts_erfc 7,
// ts_ndtr 7 + 1.4 x^2, which is what rounding x / sqrt 2 costs erfc of it; results of the last four below about 2^-126
// are 0.  NaN and infinities as in C's libm.
#ifndef TS_DEVICE_H_
#define TS_DEVICE_H_

#include "ts_poly.h"

#if __CUDA_ARCH__ >= 800
// One instruction; NaN in either operand gives NaN.
TS_FN float ts_max(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
TS_FN float ts_min(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
#endif

// The special function unit: within 1 and 2 ulp.  Denormal results of 2^x are 0.
TS_FN float ts_fast_rcp_(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
TS_FN float ts_fast_exp2_(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// x y + z clamped to [0, 1], NaN to 0.
TS_FN float ts_fma_unit_(float x, float y, float z) {
  float r;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z));
  return r;
}
// 1 for x > 0, else 0.
TS_FN float ts_step_(float x) {
  float r;
  asm("set.gt.f32.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(x));
  return r;
}

TS_FN float ts_rsqrt(float x) { return ::rsqrtf(x); }

// --- division of many by one -------------------------------------------------------------------------

// x / s = x (high + low), the reciprocal in two parts, costs one rounding.  Both have the sign of s and neither is 0, so
// that an infinite x keeps its own.  A divisor whose reciprocal overflows (below 2^-128) counts as 0.
struct ts_divisor_t {
  float high, low;
};
TS_FN ts_divisor_t ts_divisor(float s) {
  float r0;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r0) : "f"(s));
  if (!(ts_abs(r0) > 0.0f && ts_abs(r0) < ts_inf(0.0f))) return ts_divisor_t{r0, r0};  // of 0, infinity and NaN
  float r = ts_fma_(r0, ts_fma_(-r0, s, 1.0f), r0);
  float high = ts_fma_(r, -0x1p-22f, r);  // less than the reciprocal
  float low = ts_max(ts_fma_(-high, s, 1.0f) * ts_abs(r), 0x1p-149f);
  return ts_divisor_t{high, s < 0.0f ? -low : low};
}
TS_FN float ts_divide(float x, ts_divisor_t s) { return ts_fma_(x, s.high, x * s.low); }

// --- elementary functions ----------------------------------------------------------------------------

// e^x for x <= 0: 2^h e^t with h = x / ln 2, a little more than that in magnitude, so that t is never negative: clamping it
// to [0, 1] costs nothing and makes 0 of the NaN that an infinite x gives.
TS_FN float ts_exp_down(float x) {
  float h = x * 0x1.71547ap+0f;
  float t = ts_fma_unit_(h, -0x1.62e430p-1f, x);
  float e = ts_fast_exp2_(h);
  return ts_fma_(e, t, e);
}

// With e = e^-|x|: 1 / (1 + e) or e / (1 + e).
TS_FN float ts_sigmoid(float x) {
  float e = ts_exp_down(-ts_abs(x)), d = 1.0f + e;
  float r = ts_fast_rcp_(d);
  r = ts_fma_(r, ts_fma_(-r, d, 1.0f), r);
  return (x < 0.0f ? e : 1.0f) * r;
}

// e^-a^2 N(a) / D(a), a = |x|: a^2 = s + rest, e^-s = 2^h e^t with h = -s / ln 2 rounded.  N / D is a minimax fit of
// e^a^2 erfc(a), times what the rounding of ln 2 costs 2^h.
TS_FN float ts_erfc(float x) {
  float a = ts_min(ts_abs(x), 9.5f), s = a * a;
  float n = ts_fma_(ts_fma_(0x1.070a80p-5f, s, ts_fma_(0x1.cefa08p-3f, a, 0x1.7342cap-1f)), s,
                    ts_fma_(0x1.3b7dd4p+0f, a, 1.0f));
  float d = ts_fma_(ts_fma_(ts_fma_(0x1.d238eep-5f, a, 0x1.9a54b6p-2f), s, ts_fma_(0x1.503088p+0f, a, 0x1.31c93cp+1f)), s,
                    ts_fma_(0x1.2e2da8p+1f, a, 1.0f));
  float h = s * -0x1.715476p+0f;
  float t = ts_fma_(h, -0x1.62e430p-1f, -s) - ts_fma_(a, a, -s);
  float y = n * ts_fast_exp2_(h) * ts_fast_rcp_(d);
  y = ts_fma_(y, t, y);
  return ts_abs(ts_fma_(x < 0.0f ? 1.0f : 0.0f, 2.0f, -y));
}

// The normal distribution: e^(-a^2 / 2) N(a) / D(a) for -a = -|x|, one less that for x > 0.  N / D is a minimax fit of
// Phi(-a) e^(a^2 / 2), times what the rounding of the exponent's factor costs; 0 from 14 on.
TS_FN float ts_ndtr(float x) {
  float a = ts_min(ts_abs(x), 14.0f);
  float n = ts_horner_(a, 0x1.bf802cp+3f, 0x1.313eeep+3f, 0x1.814bd2p+1f, 0x1.986130p-2f);
  float d = ts_horner_(a, 0x1.bf802cp+4f, 0x1.4b263ap+5f, 0x1.910650p+4f, 0x1.e22f0ap+2f, 1.0f);
  float m = n * ts_fast_exp2_(a * a * -0x1.715476p-1f);
  return ts_abs(ts_fma_(-m, ts_fast_rcp_(d), ts_step_(x)));
}

#endif  // TS_DEVICE_H_
