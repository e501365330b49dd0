// Index arithmetic of generated kernels.
#ifndef TS_INDEX_H_
#define TS_INDEX_H_

// Of the wider type of the two: 32 bits where the kernel counts in 32 bits.
template <class A, class B> using ts_wider = decltype(A() + B());

// floor(a / b); 0 when b is 0, as the rewriter's symbolic dims have it.
template <class A, class B>
TS_FN ts_wider<A, B> ts_floordiv(A a, B b) {
  if (b == 0) return 0;
  ts_wider<A, B> q = a / b;
  return q - ((a % b != 0) & ((a < 0) != (b < 0)));
}
template <class A, class B>
TS_FN ts_wider<A, B> ts_floormod(A a, B b) {
  return b == 0 ? 0 : a - ts_floordiv(a, b) * b;
}
template <class A, class B>
TS_FN ts_wider<A, B> ts_imin(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
TS_FN ts_wider<A, B> ts_imax(A a, B b) {
  return a > b ? a : b;
}

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
