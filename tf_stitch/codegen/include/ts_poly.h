// Evaluation of polynomials, coefficients from the constant term up.
#ifndef TS_POLY_H_
#define TS_POLY_H_

#include "ts_types.h"

// x y + z, rounded once where the processor can.
#if defined(__CUDACC__)
TS_FN float ts_fma_(float x, float y, float z) { return __fmaf_rn(x, y, z); }
TS_FN double ts_fma_(double x, double y, double z) { return __fma_rn(x, y, z); }
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
TS_FN float ts_fma_(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
TS_FN double ts_fma_(double x, double y, double z) { return __builtin_fma(x, y, z); }
#else
template <class T>
TS_FN T ts_fma_(T x, T y, T z) {
  return x * y + z;
}
#endif

// c0 + c1 w + c2 w^2 ...
template <class T>
TS_FN T ts_horner_(T, T c0) { return c0; }
template <class T, class... C>
TS_FN T ts_horner_(T w, T c0, C... c) { return ts_fma_(ts_horner_(w, (T)c...), w, c0); }

// Every second coefficient, from the first or from the second one.
template <class T> TS_FN T ts_evens_(T, T c0) { return c0; }
template <class T> TS_FN T ts_evens_(T, T c0, T) { return c0; }
template <class T, class... C>
TS_FN T ts_evens_(T w, T c0, T, C... c) { return ts_fma_(ts_evens_(w, (T)c...), w, c0); }
template <class T> TS_FN T ts_odds_(T, T, T c1) { return c1; }
template <class T> TS_FN T ts_odds_(T, T, T c1, T) { return c1; }
template <class T, class... C>
TS_FN T ts_odds_(T w, T, T c1, C... c) { return ts_fma_(ts_odds_(w, (T)c...), w, c1); }

// The polynomial in two independent halves: half the latency of Horner's rule.
template <class T, class... C>
TS_FN T ts_poly_(T x, C... c) {
  T w = x * x;
  return ts_fma_(ts_odds_(w, (T)c...), x, ts_evens_(w, (T)c...));
}

#endif  // TS_POLY_H_
