// Elementary functions for the host, written so that g++ vectorises loops over them at every x86-64 level: no
// branches, no tables, no library calls.  The exceptions are in ts_scalar.h.
//
// Error bounds, in units of the last place of the result, over all arguments: float at most 2, double at most 4
// (most are below 1.5; tests/math measures them).  NaN, infinities, signed zeros and denormals are those of C's
// libm.  No function needs fused multiply-add; with it the error gets smaller.  -ffast-math breaks them.
//
// Three kinds: float functions of their own where speed matters most (exp, tanh, erf, sigmoid, log), float ones that
// compute in double with short polynomials (erfc, expm1, softplus), and double ones, which the other float functions
// round.  The polynomials are minimax or Chebyshev fits made for this file.
#ifndef TS_ELEMENTARY_H_
#define TS_ELEMENTARY_H_

// --- float: exp, sigmoid -----------------------------------------------------------------------------

// e^x = 2^n e^r, n = round(x / ln 2): Cody and Waite's reduction.  Adding 1.5 * 2^23 rounds, and leaves n in
// the low bits.
struct ts_exp_parts_ {
  float p;   // e^r - 1
  ts_u32 n;  // n in the exponent field
};
TS_FN ts_exp_parts_ ts_exp_split_(float x) {
  float t = x * 0x1.715476p+0f + 0x1.8p23f;
  float n = t - 0x1.8p23f;
  float r = x - n * 0x1.62e4p-1f;
  r = r - n * 0x1.7f7d1cp-20f;
  float w = r * r;
  float low = 0x1.555492p-3f * r + 0x1.fffffcp-2f;
  float high = 0x1.1239c6p-7f * r + 0x1.5558bcp-5f;
  high = 0x1.6a415ep-10f * w + high;
  return ts_exp_parts_{(high * w + low) * w + r, ts_bits(t) << 23};
}

// min(|x|, top), compared as integers: one instruction where a float compare and select that keeps NaN are two
// and slower.  NaN becomes top; callers put it back.
TS_FN float ts_abs_up_to_(float x, float top) {
  ts_i32 a = (ts_i32)(ts_bits(x) & 0x7fffffffu), t = (ts_i32)ts_bits(top);
  return ts_float_of((ts_u32)(a < t ? a : t));
}
TS_FN float ts_with_sign_(float magnitude, float sign) {
  return ts_float_of(ts_bits(magnitude) | (ts_bits(sign) & 0x80000000u));
}

// The power of two is applied in two steps, so that overflow and denormal results come out of the second.
TS_FN float ts_exp(float x) {
  ts_exp_parts_ e = ts_exp_split_(ts_with_sign_(ts_abs_up_to_(x, 104.0f), x));
  bool neg = x < 0.0f;
  float s = ts_float_of(e.n + (neg ? (127u + 64) << 23 : (127u - 64) << 23));
  float r = (e.p + 1.0f) * s * (neg ? 0x1p-64f : 0x1p64f);
  return x != x ? x : r;
}

// With e = e^-|x|: 1 / (1 + e) or e / (1 + e), corrected for the rounding of both terms.
TS_FN float ts_sigmoid(float x) {
  ts_exp_parts_ parts = ts_exp_split_(-ts_abs_up_to_(x, 104.0f));
  float p = parts.p + 1.0f;
  float p_low = (1.0f - p) + parts.p;
  float s = ts_float_of(parts.n + ((127u + 64) << 23));
  float e = p * s * 0x1p-64f;
  float d = 1.0f + e;
  float d_low = (1.0f - d) + e;
  float q = (x < 0.0f ? e : 1.0f) / d;
  float r = q + q * ((x < 0.0f ? p_low : 0.0f) - d_low);
  return x != x ? x : r;
}

// --- float: tanh, erf --------------------------------------------------------------------------------

// Two polynomials each, both evaluated: near zero that of f(x) / x - 1 in x^2; elsewhere what gives 1 - f, of
// which only the absolute error counts.

// Large: 1 - 2 / (1 + e^2a), e^2a = 2^n 2^f.
TS_FN float ts_tanh(float x) {
  float a = ts_abs_up_to_(x, 9.125f);
  float z = a * a, z2 = z * z;
  float s01 = -0x1.55553ep-2f * z;
  float s23 = -0x1.b92b2ep-5f * z + 0x1.110b58p-3f;
  float s45 = -0x1.e5e53ep-8f * z + 0x1.5d160ep-6f;
  float small = ((0x1.a008c0p-10f * z2 + s45) * z2 + s23) * z2 + s01;
  float t = a * 0x1.715476p+1f + 0x1.8p23f;
  float n = t - 0x1.8p23f;
  float f = a * 0x1.715476p+1f - n, f2 = f * f;
  float e01 = 0x1.62e430p-1f * f + 1.0f;
  float e23 = 0x1.c6af7cp-5f * f + 0x1.ebfbdcp-3f;
  float e45 = 0x1.5f082ep-10f * f + 0x1.3b2de0p-7f;
  float e = ((0x1.416b60p-13f * f2 + e45) * f2 + e23) * f2 + e01;
  e = ts_float_of(ts_bits(e) + (ts_bits(t) << 23));
  float large = 1.0f - 2.0f / (1.0f + e);
  float r = ts_with_sign_(a < 0.8f ? a * small + a : large, x);
  return x != x ? x : r;
}

// Large: 1 - q(a)^8, q the eighth root of erfc.
TS_FN float ts_erf(float x) {
  float a = ts_abs_up_to_(x, 3.9375f);
  float z = a * a, z2 = z * z;
  float s23 = -0x1.b793f4p-6f * z + 0x1.ce269ap-4f;
  float s45 = -0x1.918112p-11f * z + 0x1.51349ep-8f;
  float small = (0x1.1c0d62p-14f * z2 + s45) * z2 + s23;
  small = (small * z - 0x1.812718p-2f) * z + 0x1.06eba6p-3f;
  float q23 = -0x1.ad6aecp-7f * a - 0x1.e5138cp-5f;
  float q45 = -0x1.59c6c2p-9f * a + 0x1.c0070ap-7f;
  float q = (0x1.5ab6e6p-13f * z + q45) * z + q23;
  q = (q * a - 0x1.2c1d8ap-3f) * a + 0x1.005140p+0f;
  float q2 = q * q, q4 = q2 * q2;
  float r = ts_with_sign_(a < 1.16f ? a * small + a : 1.0f - q4 * q4, x);
  return x != x ? x : r;
}

// --- float: log --------------------------------------------------------------------------------------

// x = 2^k m, 2/3 <= m < 4/3; log m = f - f^2/2 + f^3 P(f), f = m - 1.  A denormal is first made normal by
// taking its bits as an integer.
TS_FN float ts_log(float x) {
  ts_u32 b = ts_bits(x);
  bool tiny = b < 0x00800000u;
  float scaled = (float)(ts_i32)(b & 0x007fffffu);
  ts_u32 c = tiny ? ts_bits(scaled) : b;
  ts_i32 k = (ts_i32)(c - 0x3f2aaaabu) >> 23;
  float f = ts_float_of(c - ((ts_u32)k << 23)) - 1.0f;
  float n = (float)k - (tiny ? 149.0f : 0.0f);
  float w = f * f;
  float low = -0x1.fffefcp-3f * f + 0x1.555506p-2f;
  float c23 = -0x1.559c44p-3f * f + 0x1.99d044p-3f;
  float c45 = -0x1.f332f0p-4f * f + 0x1.1ed664p-3f;
  float c67 = -0x1.07c8b8p-3f * f + 0x1.1e6778p-3f;
  float high = (c67 * w + c45) * w + c23;
  float p = high * w + low;
  float r = n * 0x1.7f7d1cp-20f + (p * f - 0.5f) * w;
  r = (r + f) + n * 0x1.62e4p-1f;
  r = x == 0.0f ? -ts_inf(0.0f) : r;
  r = x < 0.0f ? ts_nan(0.0f) : r;
  return x < ts_inf(0.0f) ? r : x;  // +Inf and NaN as they are
}

// --- float: sin, cos, tan ----------------------------------------------------------------------------

// |x| / 2pi modulo 1, as a quadrant and the angle left in it: Payne and Hanek's reduction in double, right for
// every float.  |x| = 2^(43g) b with b < 2^42; the four pieces are 2^(43g) / 2pi less a multiple of 2^24, in
// 29-bit steps, so that the products with b's 24 bits are exact and whole turns drop out of them.
struct ts_angle_ {
  double r;  // in [-pi/4, pi/4]
  ts_u32 quadrant;
};
TS_FN double ts_mod1_(double y) { return y - ts_rint(y); }
TS_FN ts_angle_ ts_reduce_(float x) {
  double a = (double)ts_abs(x);
  bool g1 = a >= 0x1p42, g2 = a >= 0x1p85;
  double b = a * (g2 ? 0x1p-86 : g1 ? 0x1p-43 : 1.0);
  double y1 = ts_mod1_(b * (g2 ? 0x1.3f84eafp+23 : g1 ? 0x1.b72722p+18 : 0x1.4p-3));
  double y2 = ts_mod1_(b * (g2 ? 0x1.47d4d37p-6 : g1 ? 0x1.529fc2p-11 : 0x1.7cc1b7p-9));
  double y3 = ts_mod1_(b * (g2 ? 0x1.c0db628p-36 : g1 ? 0x1.d5f47d4p-37 : 0x1.391054ap-36));
  double y4 = b * (g2 ? 0x1.5993c439041fep-64 : g1 ? 0x1.a6ee06db14acdp-66 : 0x1.fc2757d1f534ep-66);
  double t = 4.0 * (y1 + y2 + y3) + 0x1.8p52;
  double f = ((y1 - 0.25 * (t - 0x1.8p52)) + y2) + (y3 + y4);
  return ts_angle_{f * 0x1.921fb54442d18p+2, (ts_u32)ts_bits(t)};
}

TS_FN float ts_sin_unit_(float r, float z) {
  float p = (-0x1.9952fap-13f * z + 0x1.110776p-7f) * z - 0x1.555546p-3f;
  return p * (z * r) + r;
}
TS_FN float ts_cos_unit_(float z) {
  float p = (0x1.99e80cp-16f * z - 0x1.6c0c28p-10f) * z + 0x1.55554ap-5f;
  return p * (z * z) + (1.0f - 0.5f * z);
}
TS_FN float ts_sin(float x) {
  ts_angle_ angle = ts_reduce_(x);
  float r = (float)angle.r, z = r * r;
  float v = (angle.quadrant & 1) ? ts_cos_unit_(z) : ts_sin_unit_(r, z);
  ts_u32 sign = (angle.quadrant & 2) << 30;
  return ts_float_of(ts_bits(v) ^ sign ^ (ts_bits(x) & 0x80000000u));
}
TS_FN float ts_cos(float x) {
  ts_angle_ angle = ts_reduce_(x);
  float r = (float)angle.r, z = r * r;
  float v = (angle.quadrant & 1) ? ts_sin_unit_(r, z) : ts_cos_unit_(z);
  ts_u32 sign = ((angle.quadrant + 1) & 2) << 30;
  return ts_float_of(ts_bits(v) ^ sign);
}
// The quotient in double, of polynomials good to 2^-35.
TS_FN float ts_tan(float x) {
  ts_angle_ angle = ts_reduce_(x);
  double r = angle.r, z = r * r;
  double s = ts_horner_(z, -0x1.555555545df18p-3, 0x1.11110deef0ae3p-7, -0x1.a013a740c35cep-13,
                        0x1.6dbded5452c9bp-19) * (z * r) + r;
  double c = ts_horner_(z, 0x1.5555555502c6dp-5, -0x1.6c16bf54be1f5p-10, 0x1.a015c4462d9e2p-16,
                        -0x1.25243c2f39550p-22) * (z * z) + (1.0 - 0.5 * z);
  bool odd = angle.quadrant & 1;
  double v = (odd ? -c : s) / (odd ? s : c);
  return ts_float_of(ts_bits((float)v) ^ (ts_bits(x) & 0x80000000u));
}

// --- double ------------------------------------------------------------------------------------------

// Integers below 2^51 in magnitude are kept in the low bits of 1.5 * 2^52 + n: x86-64 has no vector
// conversion between double and 64-bit integers before v4.
#define TS_ROUNDER_ 0x1.8p52

// (e^r - 1 - r) / r^2, |r| <= ln(2) / 2.
TS_FN double ts_exp_tail_(double r) {
  return ts_poly_(r, 0x1.0000000000000p-1, 0x1.5555555555556p-3, 0x1.5555555553d63p-5, 0x1.11111111109b3p-7,
                  0x1.6c16c1788bd90p-10, 0x1.a01a01a7c41d5p-13, 0x1.a019b90d2ae7ap-16, 0x1.71de0dae63bb3p-19,
                  0x1.289185613a3d6p-22, 0x1.af38a9b0ec855p-26);
}
struct ts_exp_parts64_ {
  double r;
  ts_u64 n;  // n in the exponent field
};
TS_FN ts_exp_parts64_ ts_exp_split_(double x) {
  double t = x * 0x1.71547652b82fep+0 + TS_ROUNDER_;
  double n = t - TS_ROUNDER_;
  double r = (x - n * 0x1.62e42fefap-1) - n * 0x1.cf79abc9e3b3ap-40;
  return ts_exp_parts64_{r, ts_bits(t) << 52};
}

// e^(x + low), |low| small against x's last place or 1, times 2^512 for x < 0 and 2^-512 for others: the
// product with ts_exp_unscale_ then overflows or becomes denormal in one rounding.
TS_FN double ts_exp_scaled_(double x, double low) {
  double c = x < -746.0 ? -746.0 : x;
  c = c > 710.0 ? 710.0 : c;
  ts_exp_parts64_ e = ts_exp_split_(c);
  double r = e.r + low;
  double p = (ts_exp_tail_(r) * (r * r) + r) + 1.0;
  return p * ts_double_of(e.n + (x < 0.0 ? 1535ull << 52 : 511ull << 52));
}
TS_FN double ts_exp_unscale_(double x) { return x < 0.0 ? 0x1p-512 : 0x1p512; }
TS_FN double ts_exp_sum_(double x, double low) { return ts_exp_scaled_(x, low) * ts_exp_unscale_(x); }
TS_FN double ts_exp(double x) { return ts_exp_sum_(x, 0.0); }

TS_FN double ts_expm1(double x) {
  double c = x < -40.0 ? -40.0 : x;
  c = c > 710.0 ? 710.0 : c;
  ts_exp_parts64_ e = ts_exp_split_(c);
  double p = ts_exp_tail_(e.r) * (e.r * e.r) + e.r;
  bool large = x > 50.0;  // 2^n is kept below overflow by halving
  double s = ts_double_of(e.n + (large ? 1022ull << 52 : 1023ull << 52));
  double r = p * s + (s - 1.0);
  r = large ? r + r : r;
  return ts_abs(x) < 0x1p-54 ? x : r;  // keeps -0 and denormals
}

TS_FN double ts_sigmoid(double x) {
  double e = ts_exp(-ts_abs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

TS_FN double ts_tanh(double x) {
  double a = ts_abs(x);
  double e = ts_expm1(-2.0 * a);  // in (-1, 0]
  double r = -e / (e + 2.0);
  return ts_double_of(ts_bits(r) | (ts_bits(x) & 0x8000000000000000ull));
}

// log(1 + f) for sqrt(1/2) - 1 <= f <= sqrt(2) - 1, plus k log 2:
// log(1 + f) = 2 atanh(s), s = f / (2 + f), as f - (f^2/2 - s (f^2/2 + s^2 R(s^2))).
TS_FN double ts_log_core_(double f, double k) {
  double s = f / (2.0 + f);
  double w = s * s;
  double half = 0.5 * f * f;
  double r = w * ts_poly_(w, 0x1.5555555555558p-1, 0x1.99999999952ccp-2, 0x1.2492492df3ba9p-2, 0x1.c71c62e26208bp-3,
                          0x1.7462b58e46ebep-3, 0x1.39fe42e9740a7p-3, 0x1.2b59b713616c9p-3);
  return k * 0x1.62e42fefap-1 + (f - (half - (s * (half + r) + k * 0x1.cf79abc9e3b3ap-40)));
}

// x = 2^k m, sqrt(1/2) <= m < sqrt(2), for normal positive x.
struct ts_log_parts64_ {
  double m, k;
  ts_u64 power;  // bits of 2^k less those of 1
};
TS_FN ts_log_parts64_ ts_log_split_(ts_u64 bits) {
  ts_u64 up = bits - 0x3fe6a09e667f3bcdull + 0x3ff0000000000000ull;  // exponent field: k + 1023
  ts_u64 field = up >> 52;
  double k = ts_double_of(field | 0x4330000000000000ull) - (0x1p52 + 1023.0);
  ts_u64 power = (field << 52) - 0x3ff0000000000000ull;
  return ts_log_parts64_{ts_double_of(bits - power), k, power};
}

TS_FN double ts_log(double x) {
  ts_u64 b = ts_bits(x);
  bool tiny = b < 0x0010000000000000ull;
  // A denormal's bits, as an integer, are 2^1074 times its value.
  double scaled = ts_double_of(b | 0x4330000000000000ull) - 0x1p52;
  ts_log_parts64_ e = ts_log_split_(tiny ? ts_bits(scaled) : b);
  double r = ts_log_core_(e.m - 1.0, e.k - (tiny ? 1074.0 : 0.0));
  r = x == 0.0 ? -ts_inf(0.0) : r;
  r = x < 0.0 ? ts_nan(0.0) : r;
  return x < ts_inf(0.0) ? r : x;
}

// 1 + x = 2^k m; m - 1 = 2^-k x + (2^-k - 1) rounds once.  Beyond 2^60 the 1 is nothing.
TS_FN double ts_log1p(double x) {
  bool huge = x > 0x1p60;
  ts_log_parts64_ e = ts_log_split_(ts_bits(huge ? x : 1.0 + x));
  double scale = ts_double_of(0x3ff0000000000000ull - (huge ? 0 : e.power));
  double f = huge ? e.m - 1.0 : x * scale + (scale - 1.0);
  double r = ts_log_core_(f, e.k);
  r = x == -1.0 ? -ts_inf(0.0) : r;
  r = x < -1.0 ? ts_nan(0.0) : r;
  r = ts_abs(x) < 0x1p-54 ? x : r;
  return x < ts_inf(0.0) ? r : x;
}

TS_FN double ts_softplus(double x) {
  double r = (x > 0.0 ? x : 0.0) + ts_log1p(ts_exp(-ts_abs(x)));
  return x != x ? x : r;
}

// sinh and cosh: e^a is taken as 2 e^(a - ln 2) so that it overflows only where the result does.
TS_FN double ts_sinh(double x) {
  double a = ts_abs(x);
  double t = ts_expm1(a > 40.0 ? 0.0 : a);
  double e = ts_exp_sum_(a, 0.0);
  double half = ts_exp_sum_(a * 0.5, 0.0);
  double r = a > 700.0 ? 0.5 * half * half : a > 40.0 ? 0.5 * e : 0.5 * (t + t / (t + 1.0));
  return ts_double_of(ts_bits(r) | (ts_bits(x) & 0x8000000000000000ull));
}
TS_FN double ts_cosh(double x) {
  double a = ts_abs(x);
  double e = ts_exp_sum_(a, 0.0);
  double half = ts_exp_sum_(a * 0.5, 0.0);
  return a > 700.0 ? 0.5 * half * half : 0.5 * e + 0.5 / e;
}

TS_FN double ts_asinh(double x) {
  double a = ts_abs(x);
  bool huge = a > 0x1p28;
  double c = huge ? 1.0 : a;
  double w = c * c;
  double t = c + w / (1.0 + ts_sqrt(w + 1.0));
  double r = ts_log1p(huge ? a - 1.0 : t) + (huge ? 0x1.62e42fefa39efp-1 : 0.0);
  return ts_double_of(ts_bits(r) | (ts_bits(x) & 0x8000000000000000ull));
}
TS_FN double ts_acosh(double x) {
  bool huge = x > 0x1p28;
  double t = (huge ? 1.0 : x) - 1.0;
  double u = t + ts_sqrt(2.0 * t + t * t);
  double r = ts_log1p(huge ? x - 1.0 : u) + (huge ? 0x1.62e42fefa39efp-1 : 0.0);
  return x < 1.0 ? ts_nan(0.0) : r;
}
TS_FN double ts_atanh(double x) {
  double a = ts_abs(x);
  double r = 0.5 * ts_log1p(2.0 * a / (1.0 - a));
  r = a == 1.0 ? ts_inf(0.0) : r;
  r = a > 1.0 ? ts_nan(0.0) : r;
  return ts_double_of(ts_bits(r) | (ts_bits(x) & 0x8000000000000000ull));
}

// (atan(t) - t) / t^3 in z = t^2, |t| <= tan(pi/8).
TS_FN double ts_atan_tail_(double z) {
  return ts_poly_(z, -0x1.5555555555555p-2, 0x1.9999999999953p-3, -0x1.249249248d7dcp-3, 0x1.c71c71c303dbbp-4,
                  -0x1.745d165dc9713p-4, 0x1.3b1392d519db1p-4, -0x1.110e87b4357d2p-4, 0x1.e19a0bfa3eef9p-5,
                  -0x1.ac7a5a79b3f26p-5, 0x1.74dccfb93fff0p-5, -0x1.1b311bb48c215p-5, 0x1.0acd9e91a5a35p-6);
}
// atan of 0 <= q <= 1.
TS_FN double ts_atan_unit_(double q) {
  bool high = q > 0x1.a8279ap-2;
  double t = high ? (q - 1.0) / (q + 1.0) : q;
  double z = t * t;
  double r = ts_atan_tail_(z) * (z * t) + (high ? 0x1.1a62633145c07p-55 : 0.0) + t;
  return r + (high ? 0x1.921fb54442d18p-1 : 0.0);
}
TS_FN double ts_atan(double x) {
  double a = ts_abs(x);
  bool big = a > 1.0;
  double r = ts_atan_unit_(big ? 1.0 / a : a);
  r = big ? 0x1.921fb54442d18p+0 - (r - 0x1.1a62633145c07p-54) : r;
  return ts_double_of(ts_bits(r) | (ts_bits(x) & 0x8000000000000000ull));
}
TS_FN double ts_atan2(double y, double x) {
  double ay = ts_abs(y), ax = ts_abs(x);
  bool steep = ay > ax;
  double low = steep ? ax : ay, high = steep ? ay : ax;
  double q = low / high;
  q = high == 0.0 ? 0.0 : q;
  q = low == ts_inf(0.0) ? 1.0 : q;
  double r = ts_atan_unit_(q);
  r = steep ? 0x1.921fb54442d18p+0 - (r - 0x1.1a62633145c07p-54) : r;
  r = ts_bits(x) >> 63 ? 0x1.921fb54442d18p+1 - (r - 0x1.1a62633145c07p-53) : r;
  r = ts_double_of(ts_bits(r) | (ts_bits(y) & 0x8000000000000000ull));
  return x != x || y != y ? ts_nan(0.0) : r;
}

// (asin(t) - t) / t^3 in z = t^2, |t| <= 0.5.
TS_FN double ts_asin_tail_(double z) {
  return ts_poly_(z, 0x1.5555555555556p-3, 0x1.3333333332ec4p-4, 0x1.6db6db6e3292ep-5, 0x1.f1c71c1d4aa0dp-6,
                  0x1.6e8bb1d89492bp-6, 0x1.1c4d343fa57f6p-6, 0x1.c9cf3759fd8ffp-7, 0x1.78246f32d075cp-7,
                  0x1.524ea8b3aad31p-7, 0x1.653a8f8cfd43cp-8, 0x1.1d661531b222ep-6, -0x1.e7a24f548c99fp-7,
                  0x1.d78189767524ep-6);
}
// Above 0.5: asin(a) = pi/2 - 2 asin(sqrt((1 - a) / 2)).
TS_FN double ts_asin(double x) {
  double a = ts_abs(x);
  bool high = a > 0.5;
  double z = high ? 0.5 - 0.5 * a : a * a;
  double t = high ? ts_sqrt(z) : a;
  double r = ts_asin_tail_(z) * (z * t) + t;
  r = high ? 0x1.921fb54442d18p+0 - (2.0 * r - 0x1.1a62633145c07p-54) : r;
  return ts_double_of(ts_bits(r) | (ts_bits(x) & 0x8000000000000000ull));
}
TS_FN double ts_acos(double x) {
  double a = ts_abs(x);
  bool high = a > 0.5;
  double z = high ? 0.5 - 0.5 * a : a * a;
  double t = high ? ts_sqrt(z) : a;
  double r = ts_asin_tail_(z) * (z * t) + t;
  double below = 0x1.921fb54442d18p+0 - ((x < 0.0 ? -r : r) - 0x1.1a62633145c07p-54);
  double above = x < 0.0 ? 0x1.921fb54442d18p+1 - (2.0 * r - 0x1.1a62633145c07p-53) : 2.0 * r;
  return high ? above : below;
}

// e^(a^2) erfc(a) (1 + 2a) in t = (a - 3) / (a + 3), a >= 0.9; e^(-a^2) with the low part of a^2 by itself.
TS_FN double ts_erfc_positive_(double a) {
  double c = a > 28.0 ? 28.0 : a;
  double t = (c - 3.0) / (c + 3.0);
  double p = ts_poly_(t, 0x1.40c522d7e4987p+0, -0x1.15c084bb9e900p-3, -0x1.85a15c58aa3c0p-5, 0x1.098366a5b4e9bp-3,
                      -0x1.e88b803a4dfb2p-4, 0x1.17ca2877c4cfdp-4, -0x1.8574c40980d37p-6, 0x1.4b884eb2e519ap-9,
                      0x1.ef1bdae710bd1p-10, -0x1.98db6357f0fddp-11, -0x1.b910fed0339ebp-14, 0x1.065be85acc1f3p-13,
                      0x1.4b972970cfe48p-18, -0x1.5167c9bc79088p-16, -0x1.77d38feb65a7ap-21, 0x1.d434de58c9dbbp-19,
                      0x1.348361ca8f322p-22, -0x1.4c1da0b469eb0p-21, -0x1.00b89ad03ce59p-24, 0x1.5ae617ab86376p-24);
  double h = ts_double_of(ts_bits(c) & 0xfffffffff8000000ull);
  double low = (h - c) * (h + c);
  double tail = p / (1.0 + 2.0 * c);
  double w = -h * h;
  return ts_exp_scaled_(w, low) * tail * ts_exp_unscale_(w);
}
// erf(x) / x - 1 in z = x^2, |x| <= 1.
TS_FN double ts_erf_tail_(double z) {
  return ts_poly_(z, 0x1.06eba8214db68p-3, -0x1.812746b0379c0p-2, 0x1.ce2f21a040f20p-4, -0x1.b82ce31202513p-6,
                  0x1.565bccfa1cce7p-8, -0x1.c02db0604590bp-11, 0x1.f9a2bdb8fcb67p-14, -0x1.f4ca7a42278fdp-17,
                  0x1.b981799c363d2p-20, -0x1.5c10c8957465dp-23, 0x1.d75aba73d5ca8p-27, -0x1.ac641bc040b16p-31);
}
TS_FN double ts_erf(double x) {
  double a = ts_abs(x);
  double small = ts_erf_tail_(a < 1.0 ? a * a : 1.0) * a + a;
  double r = a < 1.0 ? small : 1.0 - ts_erfc_positive_(a);
  return ts_double_of(ts_bits(r) | (ts_bits(x) & 0x8000000000000000ull));
}
TS_FN double ts_erfc(double x) {
  double a = ts_abs(x);
  double small = ts_erf_tail_(a < 1.0 ? a * a : 1.0) * x + x;
  double large = ts_erfc_positive_(a);
  large = x < 0.0 ? 2.0 - large : large;
  return a < 1.0 ? 1.0 - small : large;
}

// --- float in double, with polynomials good to 2^-28 -------------------------------------------------

// 2^t = 2^n 2^r, n = round(t); |t| < 1000.
struct ts_exp2_parts_ {
  double r, scale;  // scale: 2^n
};
TS_FN ts_exp2_parts_ ts_exp2_split_(double t) {
  double u = t + TS_ROUNDER_;
  return ts_exp2_parts_{t - (u - TS_ROUNDER_), ts_double_of((ts_bits(u) << 52) + 0x3ff0000000000000ull)};
}
TS_FN double ts_exp2_short_(double t) {
  ts_exp2_parts_ e = ts_exp2_split_(t);
  return e.scale * ts_poly_(e.r, 0x1.0000000262490p+0, 0x1.62e430c82ad2cp-1, 0x1.ebfbdadb1ec92p-3,
                            0x1.c6aed45fc363ep-5, 0x1.3b2dbc5fde846p-7, 0x1.5f4597e8eaa6cp-10, 0x1.41d3131f6d1d1p-13);
}

// e^(-a^2) q P(q), q = 1 / (a + 3): one formula for all a >= 0.
TS_FN float ts_erfc(float x) {
  double a = (double)ts_abs_up_to_(x, 10.125f);
  double q = 1.0 / (a + 3.0);
  double p = ts_poly_(q, 0x1.20d2f07d69820p-1, 0x1.b2b3768054129p+0, 0x1.286c525e2c6e0p+2, 0x1.f0a27f6ded60fp+3,
                      -0x1.71038c6da9b80p-4, 0x1.241410ee50ccbp+8, -0x1.deb7a55d5ab28p+9, 0x1.b54c88f0e1286p+11,
                      -0x1.6617a2f6b1fccp+12, 0x1.99d3ba125e54ap+11);
  float r = (float)(ts_exp2_short_(a * a * -0x1.71547652b82fep+0) * (p * q));
  r = x < 0.0f ? 2.0f - r : r;
  return x != x ? x : r;
}

// 2^n (2^r - 1) + (2^n - 1).
TS_FN float ts_expm1(float x) {
  float c = x < 89.0f ? x : 89.0f;
  c = c > -20.0f ? c : -20.0f;
  ts_exp2_parts_ e = ts_exp2_split_((double)c * 0x1.71547652b82fep+0);
  double p = e.r * ts_poly_(e.r, 0x1.62e42fefd3401p-1, 0x1.ebfbe04547abep-3, 0x1.c6b08cb12cf24p-5,
                            0x1.3b2a1c16baab6p-7, 0x1.5d88bdd90ac86p-10, 0x1.443f81c80f90ep-13, 0x1.ffcbdcc2e645fp-17);
  float r = (float)(p * e.scale + (e.scale - 1.0));
  return x != x ? x : ts_with_sign_(r, x);
}

// max(x, 0) + e P(e), e = e^-|x|: log(1 + e) = e P(e).
TS_FN float ts_softplus(float x) {
  double e = ts_exp2_short_((double)ts_abs_up_to_(x, 105.0f) * -0x1.71547652b82fep+0);
  double p = ts_poly_(e, 0x1.fffffff99db8ap-1, -0x1.fffff38a4f169p-2, 0x1.55534e1aebc06p-2, -0x1.ffbd4337b45f1p-3,
                      0x1.975ccd7a9ec7bp-3, -0x1.49d8347b1af82p-3, 0x1.fca8b9c9b58fep-4, -0x1.51ae6bdafb819p-4,
                      0x1.53ca1b9d17064p-5, -0x1.b7566fe241a69p-7, 0x1.0a1b8810d09bcp-9);
  float r = (float)(e * p + (double)(x > 0.0f ? x : 0.0f));
  return x != x ? x : r;
}

// --- float by way of double --------------------------------------------------------------------------

#define TS_BY_DOUBLE_(name) \
  TS_FN float name(float x) { return (float)name((double)x); }
TS_BY_DOUBLE_(ts_log1p)
TS_BY_DOUBLE_(ts_sinh)
TS_BY_DOUBLE_(ts_cosh)
TS_BY_DOUBLE_(ts_asinh)
TS_BY_DOUBLE_(ts_acosh)
TS_BY_DOUBLE_(ts_atanh)
TS_BY_DOUBLE_(ts_asin)
TS_BY_DOUBLE_(ts_acos)
TS_BY_DOUBLE_(ts_atan)
TS_FN float ts_atan2(float y, float x) { return (float)ts_atan2((double)y, (double)x); }

// x^y = 2^(y log2|x|), in double: that has the 8 bits more that y log2|x| needs.
TS_FN float ts_pow(float x, float y) {
  double a = ts_abs((double)x), b = y;
  double at_zero = b < 0.0 ? 1e4 : -1e4;
  double t = a == 0.0 ? at_zero : ts_log(a) * b;
  float r = (float)ts_exp(t);
  // Selects on float lanes only, one condition each: the vectoriser mixes no masks of two widths.
  float h = 0.5f * y;
  bool whole = ts_floor(y) == y, even = ts_floor(h) == h;
  ts_u32 sign = even ? 0u : ts_bits(x) & 0x80000000u;
  r = ts_float_of(ts_bits(r) ^ (whole ? sign : 0u));
  float negative = whole ? r : ts_nan(0.0f);
  negative = x == -ts_inf(0.0f) ? r : negative;
  r = x < 0.0f ? negative : r;
  r = y != y ? y : r;
  float minus_one = ts_abs(y) == ts_inf(0.0f) ? 1.0f : r;
  r = x == -1.0f ? minus_one : r;
  r = x == 1.0f ? 1.0f : r;
  return y == 0.0f ? 1.0f : r;
}

#include "ts_scalar.h"

#endif  // TS_ELEMENTARY_H_
