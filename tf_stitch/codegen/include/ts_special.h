// Special functions: float is computed in double.  They loop and branch, so they do not vectorise.
//
// Domain corners (poles, NaN, Inf) follow TensorFlow's CPU kernels.  Methods: DLMF (dlmf.nist.gov) chapters 5, 8,
// 10, 25; Lentz's continued fractions; Halley's iteration for the inverses.
#ifndef TS_SPECIAL_H_
#define TS_SPECIAL_H_

#include "ts_math.h"

#if defined(__CUDACC__)
#define TS_SPECIAL_FN static __device__ __noinline__
#else
#define TS_SPECIAL_FN static __attribute__((unused, noinline))
#endif

constexpr double TS_PI = 3.14159265358979323846;
constexpr double TS_EPS = 0x1p-53;

// --- lgamma, digamma ---------------------------------------------------------------------------------

// log Gamma(2 + d), |d| <= 0.5.
TS_SPECIAL_FN double ts_lgamma_near_2_(double d) {
  double p = ts_poly_(d, 0x1.b0ee6072093cep-2, 0x1.4a34cc4a60fa6p-2, -0x1.13e001a55760ap-4, 0x1.51322ac7d848ap-6,
                      -0x1.e404fc218dbaep-8, 0x1.7add6eadb5317p-9, -0x1.38ac5c2d48207p-10, 0x1.0b36af8779ca0p-11,
                      -0x1.d3fd4b679c1c4p-13, 0x1.a127afee53e7dp-14, -0x1.78de9ab752b81p-15, 0x1.580e0afa55850p-16,
                      -0x1.3cb3be36ad88bp-17, 0x1.258f3057730fap-18, -0x1.1276ebd557fb0p-19, 0x1.012012be3900ap-20,
                      -0x1.ce17528bcf460p-22, 0x1.b40adb09a1e12p-23, -0x1.2009c1a550d0dp-23, 0x1.11fa5e7c86f7bp-24);
  return d * p;
}
// log|Gamma(x)|: a polynomial around 2, the recurrence down to it from x < 8 and up to it from below 1.5, Stirling's
// series (DLMF 5.11.1) above; reflection (5.5.3) for negative x.
TS_SPECIAL_FN double ts_lgamma_positive_(double x) {
  if (x >= 8) {
    if (x > 1e306) return x * (ts_log(x) - 1);
    double r = 1 / x, w = r * r;
    double series = r * ts_horner_(w, 1.0 / 12, -1.0 / 360, 1.0 / 1260, -1.0 / 1680, 1.0 / 1188, -691.0 / 360360,
                                   1.0 / 156, -3617.0 / 122400);
    return (x - 0.5) * (ts_log(x) - 1) + (0.41893853320467274178 + series);
  }
  double product = 1, below = 0;
  for (; x > 2.5; x -= 1) product *= x - 1;
  if (x < 0.5) {
    below = ts_log(x * (x + 1));
    x += 2;
  } else if (x < 1.5) {
    below = ts_log1p(x - 1);
    x += 1;
  }
  return ts_lgamma_near_2_(x - 2) - below + (product == 1 ? 0.0 : ts_log(product));
}
TS_SPECIAL_FN double ts_lgamma(double x) {
  if (x != x) return x;
  double inf = ts_inf(0.0);
  if (ts_abs(x) == inf) return inf;
  if (x > 0) return x < 1e-300 ? -ts_log(x) : ts_lgamma_positive_(x);
  double part = x - ts_rint(x);
  if (part == 0) return inf;
  if (x > -1e-20) return -ts_log(-x);
  return ts_log(TS_PI / ts_abs(x * ts_sin(TS_PI * part))) - ts_lgamma_positive_(-x);
}
TS_FN float ts_lgamma(float x) { return (float)ts_lgamma((double)x); }

// Upward recurrence to x >= 10, then the asymptotic series (DLMF 5.11.2); reflection (5.5.4) for x < 0.
TS_SPECIAL_FN double ts_digamma(double x) {
  if (x == 0 || x == -ts_inf(0.0)) return ts_nan(0.0);
  if (x == ts_inf(0.0)) return x;
  double shift = 0;
  if (x < 0) {
    double whole = ts_rint(x);
    if (whole == x) return ts_nan(0.0);
    shift = -TS_PI / ts_tan(TS_PI * (x - whole));
    x = 1 - x;
  }
  for (; x < 10; x += 1) shift -= 1 / x;
  double r = 1 / x, w = r * r;
  double series = w * (1.0 / 12 - w * (1.0 / 120 - w * (1.0 / 252 - w * (1.0 / 240 - w * (1.0 / 132 -
                  w * (691.0 / 32760 - w * (1.0 / 12)))))));
  return ts_log(x) - 0.5 * r - series + shift;
}
TS_FN float ts_digamma(float x) { return (float)ts_digamma((double)x); }

// --- inverses of the error function and of the normal distribution ----------------------------------

// z with erf(z) = y, |y| <= 0.5: Halley's iteration from the Maclaurin series of the inverse.
TS_SPECIAL_FN double ts_erfinv_centre_(double y) {
  double w = y * y * (TS_PI / 4);
  double z = y * 0.88622692545275801365 * (1 + w * (1.0 / 3 + w * (7.0 / 30 + w * (127.0 / 630))));
  for (int i = 0; i < 3; ++i) {
    double u = (ts_erf(z) - y) * 0.88622692545275801365 * ts_exp(z * z);
    z -= u / (1 + z * u);
  }
  return z;
}

// z with erfc(z) = q, 0 < q <= 0.5: Halley's iteration from Abramowitz and Stegun 26.2.23.
TS_SPECIAL_FN double ts_erfcinv_tail_(double q) {
  double t = ts_sqrt(-2 * ts_log(0.5 * q));
  double z = (t - (2.515517 + t * (0.802853 + t * 0.010328)) /
                  (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))) * 0.70710678118654752440;
  for (int i = 0; i < 3; ++i) {
    double u = (ts_erfc(z) - q) * -0.88622692545275801365 / ts_exp(-z * z);
    z -= u / (1 + z * u);
  }
  return z;
}

TS_FN double ts_erfinv(double y) {
  double a = ts_abs(y);
  if (a == 1) return y * ts_inf(0.0);
  if (!(a < 1)) return ts_nan(0.0);
  if (a <= 0.5) return ts_erfinv_centre_(y);
  double z = ts_erfcinv_tail_(1 - a);
  return y < 0 ? -z : z;
}
TS_FN float ts_erfinv(float y) { return (float)ts_erfinv((double)y); }

TS_FN double ts_ndtri(double p) {
  if (p == 0) return -ts_inf(0.0);
  if (p == 1) return ts_inf(0.0);
  if (!(p > 0 && p < 1)) return ts_nan(0.0);
  double y = (p - 0.5) * 2;
  double z = ts_abs(y) <= 0.5 ? ts_erfinv_centre_(y)
             : y < 0          ? -ts_erfcinv_tail_(2 * p)
                              : ts_erfcinv_tail_(2 * (1 - p));
  return z * 1.41421356237309504880;
}
TS_FN float ts_ndtri(float p) { return (float)ts_ndtri((double)p); }

// --- incomplete gamma --------------------------------------------------------------------------------

// x^a e^-x / Gamma(a).
TS_SPECIAL_FN double ts_igamma_prefix_(double a, double x) {
  if (a < 20 || ts_abs(x - a) > 0.4 * a)
    return ts_exp(a * ts_log(x) - x - ts_lgamma(a));
  // Near x = a: Gamma(a) by Stirling's series, a (log(1 + m) - m) with m = x / a - 1 by its own series, so
  // that nothing large cancels.
  double m = (x - a) / a, term = m * m, sum = 0;
  for (int k = 2; k < 80; ++k, term *= -m) sum -= term / k;
  double w = 1 / (a * a);
  double stirling = (1.0 / 12 - w * (1.0 / 360 - w * (1.0 / 1260 - w * (1.0 / 1680 - w / 1188)))) / a;
  return ts_exp(a * sum - stirling) * ts_sqrt(a / (2 * TS_PI));
}

// P(a, x) by its power series (DLMF 8.7.1), best for x < a + 1.
TS_SPECIAL_FN double ts_igamma_series_(double a, double x) {
  double prefix = ts_igamma_prefix_(a, x);
  double term = 1 / a, sum = term;
  for (int k = 1; k < 100000 && term > sum * TS_EPS; ++k) sum += term *= x / (a + k);
  return prefix * sum;
}

// Q(a, x) by its continued fraction (DLMF 8.9.2), modified Lentz, for x >= a + 1.
TS_SPECIAL_FN double ts_igammac_fraction_(double a, double x) {
  double prefix = ts_igamma_prefix_(a, x);
  double b = x + 1 - a, c = 1e300, d = 1 / b, h = d;
  for (int k = 1; k < 100000; ++k) {
    double an = -k * (k - a);
    b += 2;
    d = an * d + b;
    c = b + an / c;
    d = d == 0 ? 1e300 : 1 / d;
    c = c == 0 ? 1e-300 : c;
    double step = d * c;
    h *= step;
    if (ts_abs(step - 1) <= 2 * TS_EPS) break;
  }
  return prefix * h;
}

// Q(a, x) for x < 1 and a <= 0.5, where 1 - P cancels: with e^l = x^a / Gamma(1 + a), DLMF 8.7.1 gives
// P = e^l (1 + a S), so Q = -(e^l - 1) - e^l a S.
TS_SPECIAL_FN double ts_igammac_small_(double a, double x) {
  double l = a * ts_log(x) - (ts_lgamma_near_2_(a) - ts_log1p(a));
  double power = 1, sum = 0;
  for (int k = 1; k < 40; ++k) {
    power *= -x / k;
    sum += power / (a + k);
  }
  return -ts_expm1(l) - ts_exp(l) * a * sum;
}

TS_SPECIAL_FN double ts_igamma(double a, double x) {
  if (x == 0) return 0;
  if (x != x || a != a || x < 0 || a <= 0) return ts_nan(0.0);
  if (a == ts_inf(0.0)) return 0;
  if (x == ts_inf(0.0)) return 1;
  return x > 1 && x > a ? 1 - ts_igammac_fraction_(a, x) : ts_igamma_series_(a, x);
}
TS_SPECIAL_FN double ts_igammac(double a, double x) {
  if (x != x || a != a || x < 0 || a <= 0) return ts_nan(0.0);
  if (x == 0) return 1;
  if (a == ts_inf(0.0)) return x == a ? 0 : 1;
  if (x == ts_inf(0.0)) return 0;
  if (x < 1 && a <= 0.5) return ts_igammac_small_(a, x);
  return x < 1 || x < a ? 1 - ts_igamma_series_(a, x) : ts_igammac_fraction_(a, x);
}
TS_FN float ts_igamma(float a, float x) { return (float)ts_igamma((double)a, (double)x); }
TS_FN float ts_igammac(float a, float x) { return (float)ts_igammac((double)a, (double)x); }

// --- Hurwitz zeta, polygamma -------------------------------------------------------------------------

// sum plus that over k >= 0 of (q + k)^-x, by Euler-Maclaurin (DLMF 25.11.5), q > 0, x > 1.
TS_SPECIAL_FN double ts_zeta_positive_(double x, double q, double sum = 0) {
  for (int k = 0; k < 10; ++k, q += 1) {
    double term = ts_pow(q, -x);
    sum += term;
    if (term <= ts_abs(sum) * (TS_EPS * 0.5)) return sum;
  }
  double f = ts_pow(q, -x);
  sum += q * f / (x - 1) + 0.5 * f;
  // B_2k / (2k)!
  const double c[] = {1.0 / 12,       -1.0 / 720,
                      1.0 / 30240,    -1.0 / 1209600,
                      1.0 / 47900160, -691.0 / 1307674368000.0,
                      1.0 / 74724249600.0,           -3617.0 / 10670622842880000.0,
                      43867.0 / 5109094217170944000.0};
  double factor = x;
  f /= q;
  for (int k = 0; k < 9; ++k) {
    double term = c[k] * factor * f;
    sum += term;
    if (ts_abs(term) <= ts_abs(sum) * TS_EPS) break;
    factor *= (x + 2 * k + 1) * (x + 2 * k + 2);
    f /= q * q;
  }
  return sum;
}
TS_SPECIAL_FN double ts_zeta(double x, double q) {
  if (x == 1) return ts_inf(0.0);
  if (!(x > 1) || q != q) return ts_nan(0.0);
  if (q > 0) return ts_zeta_positive_(x, q);
  bool whole = x == ts_floor(x), even = ts_rint(x * 0.5) == x * 0.5;
  if (q == ts_floor(q)) return whole && even ? ts_inf(0.0) : ts_nan(0.0);
  if (!whole) return ts_nan(0.0);
  double sum = 0;
  if (q > -1e4) {
    for (; q < 0; q += 1) sum += ts_pow(q, -x);
    return ts_zeta_positive_(x, q, sum);  // in this order: terms of both signs may cancel
  }
  // The terms of negative base are those of another zeta.
  double part = q - ts_floor(q);
  double below = ts_zeta_positive_(x, 1 - part) - ts_zeta_positive_(x, 1 - q);
  return ts_zeta_positive_(x, part) + (even ? below : -below);
}
TS_FN float ts_zeta(float x, float q) { return (float)ts_zeta((double)x, (double)q); }

TS_SPECIAL_FN double ts_factorial_(double n) {
  double r = 1;
  for (double k = n > 171 ? 171 : n; k > 1; k -= 1) r *= k;
  return r;
}
TS_SPECIAL_FN double ts_polygamma(double n, double x) {
  if (!(n >= 0) || n != ts_floor(n)) return ts_nan(0.0);
  if (n == 0) return ts_digamma(x);
  double sign = ts_fmod(n, 2.0) == 0 ? -1 : 1;
  return sign * ts_factorial_(n) * ts_zeta(n + 1, x);
}
TS_FN float ts_polygamma(float n, float x) { return (float)ts_polygamma((double)n, (double)x); }

// --- incomplete beta ---------------------------------------------------------------------------------

// The continued fraction of DLMF 8.17.22, modified Lentz, times the prefix x^a (1-x)^b / (a B(a, b)).
TS_SPECIAL_FN double ts_betainc_fraction_(double a, double b, double x) {
  double c = 1, d = 1 - (a + b) * x / (a + 1);
  d = d == 0 ? 1e300 : 1 / d;
  double h = d;
  for (int m = 1; m < 100000; ++m) {
    double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    d = 1 + even * d;
    c = 1 + even / c;
    d = d == 0 ? 1e300 : 1 / d;
    c = c == 0 ? 1e-300 : c;
    h *= d * c;
    d = 1 + odd * d;
    c = 1 + odd / c;
    d = d == 0 ? 1e300 : 1 / d;
    c = c == 0 ? 1e-300 : c;
    double step = d * c;
    h *= step;
    if (ts_abs(step - 1) <= 2 * TS_EPS) break;
  }
  double log_prefix = a * ts_log(x) + b * ts_log1p(-x) + ts_lgamma(a + b) -
                      ts_lgamma(a) - ts_lgamma(b);
  return h * ts_exp(log_prefix) / a;
}

TS_SPECIAL_FN double ts_betainc(double a, double b, double x) {
  if (a <= 0 || b <= 0 || !(x >= 0 && x <= 1)) return ts_nan(0.0);
  if (x == 0 || x == 1) return x;
  if (a != a || b != b) return ts_nan(0.0);
  return x < (a + 1) / (a + b + 2) ? ts_betainc_fraction_(a, b, x) : 1 - ts_betainc_fraction_(b, a, 1 - x);
}
TS_FN float ts_betainc(float a, float b, float x) { return (float)ts_betainc((double)a, (double)b, (double)x); }

// --- scaled modified Bessel functions ----------------------------------------------------------------

// exp(-|x|) I_n(x) for n = 0, 1: power series (DLMF 10.25.2; no cancellation) up to |x| = 30, then the
// asymptotic series (10.40.1).
TS_SPECIAL_FN double ts_bessel_ie_(double n, double x) {
  double a = ts_abs(x);
  if (!(a < ts_inf(0.0))) return a != a ? a : 0;
  double r;
  if (a <= 30) {
    double w = a * a * 0.25, term = n == 0 ? 1 : a * 0.5, sum = term;
    for (int k = 1; k < 200 && term > sum * (TS_EPS * 0.25); ++k) sum += term *= w / (k * (k + n));
    r = sum * ts_exp(-a);
  } else {
    double term = 1, sum = 1, before = 2;
    for (int k = 1; k < 60 && ts_abs(term) > TS_EPS * 0.25 && ts_abs(term) < before; ++k) {
      before = ts_abs(term);
      double odd = 2 * k - 1;
      sum += term *= (odd * odd - 4 * n * n) / (8 * k * a);
    }
    r = sum / ts_sqrt(2 * TS_PI * a);
  }
  return x < 0 && n != 0 ? -r : r;
}
TS_FN double ts_bessel_i0e(double x) { return ts_bessel_ie_(0, x); }
TS_FN double ts_bessel_i1e(double x) { return ts_bessel_ie_(1, x); }
TS_FN float ts_bessel_i0e(float x) { return (float)ts_bessel_ie_(0, (double)x); }
TS_FN float ts_bessel_i1e(float x) { return (float)ts_bessel_ie_(1, (double)x); }

#endif  // TS_SPECIAL_H_
