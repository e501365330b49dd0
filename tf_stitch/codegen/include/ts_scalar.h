// Scalar functions of double, for the host: sin, cos, tan, pow and fmod, which have no form without branches that
// is both fast and right for all arguments.  They call no library, so that a kernel links with nothing.
#ifndef TS_SCALAR_H_
#define TS_SCALAR_H_

#include "ts_math.h"

#define TS_SCALAR_FN static __attribute__((unused, noinline))

// --- sin, cos, tan -----------------------------------------------------------------------------------

// The bits of 2/pi, 64 zeros before the point first.
static constexpr ts_u64 ts_two_over_pi_[] = {
    0x0000000000000000, 0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041,
    0xfe5163abdebbc561, 0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e,
    0xe88235f52ebb4484, 0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b,
    0x1ff897ffde05980f, 0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d,
    0x7527bac7ebe5f17b, 0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab,
    0xf0cfbc209af4361d,
};

struct ts_angle64_ {
  double r, low;  // r + low in [-pi/4, pi/4]
  int quadrant;
};

// Payne and Hanek: the significand times the bits of 2/pi that matter, modulo 4, in 192-bit integers.
TS_SCALAR_FN ts_angle64_ ts_reduce_large_(double a) {
  ts_u64 bits = ts_bits(a);
  ts_u64 m = (bits & 0x000fffffffffffffull) | 0x0010000000000000ull;
  int e = (int)(bits >> 52) - 1075;  // a = m 2^e; a >= 2^20, so e >= -32
  // The bits of 2/pi of weight 2^-k with k <= e - 2 add multiples of 4: skipped.
  int first = e - 2 + 64, word = first / 64, shift = first % 64;
  ts_u64 w[3];
  for (int i = 0; i < 3; ++i)
    w[i] = shift ? (ts_two_over_pi_[word + i] << shift) | (ts_two_over_pi_[word + i + 1] >> (64 - shift))
                 : ts_two_over_pi_[word + i];
  // p = m w modulo 2^192: the topmost two bits are the quadrant.
  unsigned __int128 low = (unsigned __int128)m * w[2];
  unsigned __int128 mid = (unsigned __int128)m * w[1] + (ts_u64)(low >> 64);
  ts_u64 p2 = (ts_u64)low, p1 = (ts_u64)mid;
  ts_u64 p0 = m * w[0] + (ts_u64)(mid >> 64);
  int quadrant = (int)(p0 >> 62);
  unsigned __int128 fraction = ((unsigned __int128)((p0 << 2) | (p1 >> 62)) << 64) | ((p1 << 2) | (p2 >> 62));
  bool negative = (ts_u64)(fraction >> 127);
  if (negative) {
    fraction = 0 - fraction;
    ++quadrant;
  }
  // Two doubles of the fraction, then times pi/2.
  ts_u64 hi = (ts_u64)(fraction >> 64), lo = (ts_u64)fraction;
  int zeros = hi ? __builtin_clzll(hi) : 64;
  if (zeros) {
    fraction <<= zeros;
    hi = (ts_u64)(fraction >> 64), lo = (ts_u64)fraction;
  }
  double scale = ts_double_of((ts_u64)(1023 - 64 - zeros) << 52);
  double f1 = (double)(hi >> 32) * 0x1p32 * scale;
  double f2 = ((double)(hi & 0xffffffffu) + (double)lo * 0x1p-64) * scale;
  // f1 has 32 bits and pi/2's first part 21: exact.
  double big = f1 * 0x1.921fbp+0;
  double rest = f1 * 0x1.5110b4611a626p-22 + f2 * 0x1.921fb54442d18p+0;
  double r = big + rest;
  double tail = (big - r) + rest;
  return ts_angle64_{negative ? -r : r, negative ? -tail : tail, quadrant & 3};
}

// Cody and Waite: pi/2 in three parts of 33 bits and a last one.
TS_SCALAR_FN ts_angle64_ ts_reduce_small_(double a) {
  double n = ts_rint(a * 0x1.45f306dc9c883p-1);
  double r0 = a - n * 0x1.921fb544p+0;  // exact, as is the next product
  double w = n * 0x1.0b4611a6p-34;
  double r1 = r0 - w;
  double low = (r0 - r1) - w;
  low -= n * 0x1.3198a2ep-69 + n * 0x1.b839a252049c1p-104;
  double r = r1 + low;
  return ts_angle64_{r, (r1 - r) + low, (int)(ts_i64)n & 3};
}
TS_FN ts_angle64_ ts_reduce64_(double a) { return a < 0x1p20 ? ts_reduce_small_(a) : ts_reduce_large_(a); }

TS_FN double ts_sin_unit64_(double r, double low) {
  double z = r * r;
  double p = ts_poly_(z, 0x1.1111111110bb2p-7, -0x1.a01a019e83816p-13, 0x1.71de379654304p-19,
                      -0x1.ae600aca92c64p-26, 0x1.5e0b05bff20f2p-33);
  return r - ((z * (0.5 * low - z * r * p) - low) + z * r * 0x1.5555555555555p-3);
}
TS_FN double ts_cos_unit64_(double r, double low) {
  double z = r * r, half = 0.5 * z;
  double p = ts_poly_(z, 0x1.5555555555555p-5, -0x1.6c16c16c16967p-10, 0x1.a01a019f4e9b4p-16,
                      -0x1.27e4fa17bf139p-22, 0x1.1eeb68cd22f56p-29, -0x1.907d8f29fe831p-37);
  double w = 1.0 - half;
  return w + (((1.0 - w) - half) + (z * z * p - r * low));
}

TS_SCALAR_FN double ts_sin(double x) {
  double a = ts_abs(x);
  if (!(a < ts_inf(0.0))) return ts_nan(0.0);
  if (a < 0x1p-27) return x;
  ts_angle64_ t = ts_reduce64_(a);
  double v = t.quadrant & 1 ? ts_cos_unit64_(t.r, t.low) : ts_sin_unit64_(t.r, t.low);
  return ((t.quadrant & 2) != 0) != (x < 0) ? -v : v;
}
TS_SCALAR_FN double ts_cos(double x) {
  double a = ts_abs(x);
  if (!(a < ts_inf(0.0))) return ts_nan(0.0);
  ts_angle64_ t = ts_reduce64_(a);
  double v = t.quadrant & 1 ? ts_sin_unit64_(t.r, t.low) : ts_cos_unit64_(t.r, t.low);
  return (t.quadrant + 1) & 2 ? -v : v;
}
TS_SCALAR_FN double ts_tan(double x) {
  double a = ts_abs(x);
  if (!(a < ts_inf(0.0))) return ts_nan(0.0);
  if (a < 0x1p-27) return x;
  ts_angle64_ t = ts_reduce64_(a);
  double s = ts_sin_unit64_(t.r, t.low), c = ts_cos_unit64_(t.r, t.low);
  double v = t.quadrant & 1 ? -c / s : s / c;
  return x < 0 ? -v : v;
}

// --- pow ---------------------------------------------------------------------------------------------

// x^y = e^(y log x), the logarithm and its product in long double (64 bits on x86).
TS_SCALAR_FN double ts_pow(double x, double y) {
  if (y == 0 || x == 1) return 1;
  if (x != x || y != y) return ts_nan(0.0);
  double inf = ts_inf(0.0), a = ts_abs(x), ay = ts_abs(y);
  bool whole = ay >= 0x1p52 || ts_rint(y) == y;
  bool odd = whole && ay < 0x1p53 && ts_rint(y * 0.5) != y * 0.5;
  double sign = (ts_bits(x) >> 63) && odd ? -1.0 : 1.0;
  if (ay == inf) return a == 1 ? 1.0 : (a > 1) == (y > 0) ? inf : 0.0;
  if (a == 0 || a == inf) return sign * ((a == 0) == (y > 0) ? 0.0 : inf);
  if (x < 0 && !whole) return ts_nan(0.0);
  double scaled = a < 0x1p-1022 ? a * 0x1p54 : a;
  ts_log_parts64_ e = ts_log_split_(ts_bits(scaled));
  long double k = e.k - (a < 0x1p-1022 ? 54.0 : 0.0);
  long double f = e.m - 1.0, s = f / (2.0L + f), w = s * s;
  long double tail = 0.1090985762052361216048L;
  const long double c[] = {0.1043734389824790726407L, 0.1176782671848401923001L, 0.1333326752761134469558L,
                           0.1538461624110503749267L, 0.1818181817504254429081L, 0.222222222222529769717L,
                           0.2857142857142850059331L, 0.4000000000000000006324L, 0.6666666666666666666666L};
  for (long double next : c) tail = tail * w + next;
  // ln 2 in 40 bits and the rest.
  long double log_a = k * 0x1.62e42fefa2p-1L + (k * 7.37100256516779890183404e-13L + (s * w * tail + 2.0L * s));
  long double t = log_a * y;
  if (t > 710.0L) return sign * inf;
  if (t < -746.0L) return sign * 0.0;
  double high = (double)t;
  return sign * ts_exp_sum_(high, (double)(t - high));
}

// --- fmod --------------------------------------------------------------------------------------------

// Exact: long division of the significands, `Step` bits at a time (64 less those of a significand).
template <class T, class U, int Digits, int Step>
TS_FN T ts_fmod_(T x, T y) {
  T a = ts_abs(x), b = ts_abs(y);
  if (!(a < ts_inf(T(0))) || !(b > T(0))) return ts_nan(T(0));
  if (a < b) return x;
  constexpr U one = (U)1 << Digits;
  U ab = ts_bits(a), bb = ts_bits(b);
  int ea = (int)(ab >> Digits), eb = (int)(bb >> Digits);
  ts_u64 ma = ea ? (ab & (one - 1)) | one : ab, mb = eb ? (bb & (one - 1)) | one : bb;
  int left = (ea ? ea : 1) - (eb ? eb : 1);
  ts_u64 r = ma % mb;
  for (; left > 0 && r != 0; left -= Step) r = (r << (left < Step ? left : Step)) % mb;
  // r in units of b's last place: exact, and without a denormal on the way.
  T ulp_of_one = ts_bitcast<T>((U)(sizeof(T) == 4 ? 127 - Digits : 1023 - Digits) << Digits);
  T result = (T)(ts_i64)r * ulp_of_one * ts_bitcast<T>((U)(eb ? eb : 1) << Digits);
  return ts_bits(x) >> (sizeof(T) * 8 - 1) ? -result : result;
}
TS_SCALAR_FN float ts_fmod(float x, float y) { return ts_fmod_<float, ts_u32, 23, 40>(x, y); }
TS_SCALAR_FN double ts_fmod(double x, double y) { return ts_fmod_<double, ts_u64, 52, 11>(x, y); }

#endif  // TS_SCALAR_H_
