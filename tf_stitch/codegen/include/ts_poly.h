// Evaluation of polynomials, coefficients from the constant term up.
#ifndef TS_POLY_H_
#define TS_POLY_H_

#include "ts_types.h"

// c0 + c1 w + c2 w^2 ...
template <class T>
TS_FN T ts_horner_(T, T c0) { return c0; }
template <class T, class... C>
TS_FN T ts_horner_(T w, T c0, C... c) { return ts_horner_(w, (T)c...) * w + c0; }

// Every second coefficient, from the first or from the second one.
template <class T> TS_FN T ts_evens_(T, T c0) { return c0; }
template <class T> TS_FN T ts_evens_(T, T c0, T) { return c0; }
template <class T, class... C>
TS_FN T ts_evens_(T w, T c0, T, C... c) { return ts_evens_(w, (T)c...) * w + c0; }
template <class T> TS_FN T ts_odds_(T, T, T c1) { return c1; }
template <class T> TS_FN T ts_odds_(T, T, T c1, T) { return c1; }
template <class T, class... C>
TS_FN T ts_odds_(T w, T, T c1, C... c) { return ts_odds_(w, (T)c...) * w + c1; }

// The polynomial in two independent halves: half the latency of Horner's rule.
template <class T, class... C>
TS_FN T ts_poly_(T x, C... c) {
  T w = x * x;
  return ts_odds_(w, (T)c...) * x + ts_evens_(w, (T)c...);
}

#endif  // TS_POLY_H_
