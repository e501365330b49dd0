// Index arithmetic of generated kernels.
#ifndef TS_INDEX_H_
#define TS_INDEX_H_

// floor(a / b); 0 when b is 0, as the rewriter's symbolic dims have it.
TS_FN int64_t ts_floordiv(int64_t a, int64_t b) {
  if (b == 0) return 0;
  int64_t q = a / b;
  return q - ((a % b != 0) & ((a < 0) != (b < 0)));
}
TS_FN int64_t ts_floormod(int64_t a, int64_t b) { return b == 0 ? 0 : a - ts_floordiv(a, b) * b; }
TS_FN int64_t ts_imin(int64_t a, int64_t b) { return a < b ? a : b; }
TS_FN int64_t ts_imax(int64_t a, int64_t b) { return a > b ? a : b; }

// An index read from data, made safe: out of [0, n) it sets the status and is clamped.
template <class T>
TS_FN int64_t ts_index(T k, int64_t n, int32_t* status) {
  int64_t i = (int64_t)k;
  if (i < 0 || i >= n) {
    TS_FAIL(status);
    i = i < 0 || n == 0 ? 0 : n - 1;
  }
  return i;
}
template <class T>
TS_FN int64_t ts_clip_index(T k, int64_t n) {
  int64_t i = (int64_t)k;
  return i < 0 || n == 0 ? 0 : i >= n ? n - 1 : i;
}
template <class T>
TS_FN bool ts_in_range(T k, int64_t n) { return (int64_t)k >= 0 && (int64_t)k < n; }

#endif  // TS_INDEX_H_
