// What kernel text means on the host: a block is one call's loop iteration, its threads are a vectorised loop.
#ifndef TS_HOST_H_
#define TS_HOST_H_

#include "ts_math.h"
#include "ts_grid.h"

struct ts_problem {
  void* const* buffers;
  const int64_t* dims;
  int64_t blocks;
};

#define TS_PRAGMA_(x) _Pragma(#x)
#define TS_KERNEL(name, buffers, dims) \
  extern "C" __attribute__((visibility("default"))) void name( \
      const ts_problem* ts_p, int64_t ts_begin, int64_t ts_end, char* ts_shared, int32_t* ts_status)
#define TS_KERNEL_WIDE(name, buffers, dims, blocks) TS_KERNEL(name, buffers, dims)
// A kernel whose blocks find their problem in a table; `run` calls the blocks.
#define TS_TABLED(run, name, bases, words)                                                                           \
  static void name##_run(int32_t ts_kernel, const ts_problem* ts_p, int64_t ts_block, char* ts_shared,               \
                         int32_t* ts_status);                                                                        \
  extern "C" __attribute__((visibility("default"))) void name(const ts_grid<bases>* p, int64_t blocks, char* shared, \
                                                              int32_t* status) {                                     \
    run<words>(*p, (int32_t)blocks, [&](int32_t kernel, const ts_problem* problem, int64_t block) {                  \
      name##_run(kernel, problem, block, shared, status);                                                            \
    });                                                                                                              \
  }                                                                                                                  \
  static void name##_run(int32_t ts_kernel, const ts_problem* ts_p, int64_t ts_block, char* ts_shared,               \
                         int32_t* ts_status)
// A grid kernel: its thread blocks take turns, phase by phase.  `blocks` is at most TS_GRID_MOST.
#define TS_GRID_MOST 256
#define TS_GRID(name, bases, words, most) TS_TABLED(ts_run_grid, name, bases, words)
// A pack: its blocks run one after the other, whatever their number.
#define TS_PACK(name, bases, words, most) TS_TABLED(ts_run_pack, name, bases, words)
#define TS_CASE(k, name) \
  if (ts_kernel == (k)) return name(ts_p, ts_block, ts_block + 1, ts_shared, ts_status);
#define TS_COPY_PIECES  // requests are joined by plain copies
#define TS_ENTER(bits) typedef int64_t ts_idx; (void)ts_shared; (void)ts_status;
#define TS_IN(T, name, k) const T* __restrict name = (const T*)ts_p->buffers[k];
#define TS_BUFFER(T, k) (const T*)ts_p->buffers[k]
#define TS_OUT(T, name, k) T* __restrict name = (T*)ts_p->buffers[k];
#define TS_DIM(name, k) const ts_idx name = ts_p->dims[k];
#define TS_SHARED(T, name, offset) T* __restrict name = (T*)__builtin_assume_aligned(ts_shared + (offset), 64);

// Blocks [first, first + count) of the kernel are this part's.
#define TS_PART(first, count) if (ts_begin < (first) + (count) && ts_end > (first))
#define TS_MEMBERS(m, first, n, count) for (ts_idx m = 0; m < (n); ++m)
#define TS_BLOCKS(b, first, count)                                                              \
  for (ts_idx b = ts_begin > (first) ? ts_begin - (first) : 0,                                  \
              b##_end = ts_end - (first) < (count) ? ts_end - (first) : (count); b < b##_end; ++b)

// Loops of a stage: rows (shared out over groups of L threads), lanes (the L threads of a group), serial.
#define TS_FOR_(i, off, ext) for (ts_idx i = (off); i < (off) + (ext); ++i)
#define TS_SEVERAL
#define TS_ROWS0(L)
#define TS_ROWS1(i, o, e, L) TS_FOR_(i, o, e)
#define TS_ROWS2(i, o, e, i1, o1, e1, L) TS_FOR_(i, o, e) TS_FOR_(i1, o1, e1)
#define TS_ROWS3(i, o, e, i1, o1, e1, i2, o2, e2, L) TS_FOR_(i, o, e) TS_ROWS2(i1, o1, e1, i2, o2, e2, L)
#define TS_ROWS4(i, o, e, i1, o1, e1, i2, o2, e2, i3, o3, e3, L) \
  TS_FOR_(i, o, e) TS_ROWS3(i1, o1, e1, i2, o2, e2, i3, o3, e3, L)
#define TS_ROWS5(i, o, e, i1, o1, e1, i2, o2, e2, i3, o3, e3, i4, o4, e4, L) \
  TS_FOR_(i, o, e) TS_ROWS4(i1, o1, e1, i2, o2, e2, i3, o3, e3, i4, o4, e4, L)
#define TS_SERIAL(i, off, ext) TS_FOR_(i, off, ext)
#define TS_SPLIT(i, off, ext, L) TS_FOR_(i, off, ext)
#define TS_STEPS(t, off, ext, step) for (ts_idx t = (off); t < (off) + (ext); t += (step))
#define TS_LANES(i, off, ext, L) TS_PRAGMA_(omp simd) TS_FOR_(i, off, ext)
#define TS_LANES_FOLD(i, off, ext, L, ...) TS_PRAGMA_(omp simd __VA_ARGS__) TS_FOR_(i, off, ext)
#define TS_LANES4 TS_LANES
#define TS_LANES_FOLD4 TS_LANES_FOLD
#define TS_ONE(L)

// Products in tiles: text of the CUDA target, here one tile after the other.
#define TS_TILES(t, n, S, W) TS_FOR_(t, 0, n)
#define TS_FEW_TILES TS_TILES
#define TS_SHARES(h, S, W) TS_FOR_(h, 0, S)
#define TS_LOADED(a, n)
#define TS_EACH(i, n) TS_FOR_(i, 0, n)
#define TS_TILE_JOIN(T, a, A, S, W, parts)
#define TS_TILE_OWN(q, base, n, S, W) TS_FOR_(q, 0, n)
#define TS_TILE_SUM(T, a, base, q, A, S, W, parts) (a)[(base) + q]

// Runs of neighbours and row chains: text of the CUDA target, here with the whole row in one array, in which what
// nothing wrote is NaN.
#define TS_LANE_RUNS(off, ext, L, W) TS_STEPS(ts_i, off, ext, W)
#define TS_BATCH_RUNS(T, name, U, ext, W) ts_run<T, W> name[U][(ext) / (W)];
#define TS_BATCH_RUN(name, off, W) name[u][(ts_i - (off)) / (W)]
#define TS_BATCHES(L, n, U) for (ts_idx ts_b = 0, ts_n = (n); ts_b < ts_n; ts_b += (U))
#define TS_BATCH_EACH(u, L, U) TS_FOR_(u, 0, U) if (const ts_idx ts_r = ts_b + u; ts_r < ts_n)
#define TS_RUN_EACH(i, W) TS_FOR_(ts_w, 0, W) if (const ts_idx i = ts_i + ts_w; true)
#define TS_ROW(T, name, n, L, W) \
  T name[n];                     \
  __builtin_memset(name, 0xFF, sizeof name);
#define TS_ROW_TURNS(n, L, W) TS_STEPS(ts_i, 0, n, W)
#define TS_LONG_ROW_TURNS TS_ROW_TURNS
#define TS_ROW_EACH(i, j, W) \
  TS_FOR_(ts_w, 0, W) if (const ts_idx i = ts_i + ts_w, j = i; true)

// Per-lane accumulators: an array of one strip of lanes here, a register of every thread on a GPU.
#define TS_STRIP(L) 256
#define TS_STRIP_ROOM(L) 256
#define TS_STRIP_LANES TS_LANES
#define TS_STRIP_ALL TS_LANES
#define TS_SLOT(i, t) ((i) - (t))

#define TS_READ_KEPT(N, stride, dst, src) ts_read<N, stride>(dst, src);
#define TS_RECALL(a)
#define TS_KEEP(a)
#define TS_GATHER(op, a, L)
#define TS_BARRIER
#define TS_JOIN_SUM(x, L) (x)
#define TS_JOIN_PROD(x, L) (x)
#define TS_JOIN_MAX(x, L) (x)
#define TS_JOIN_MIN(x, L) (x)
#define TS_JOIN_AND(x, L) (x)
#define TS_JOIN_OR(x, L) (x)

template <int N, int stride, class C, class T>
static inline void ts_read(C* dst, const T* src) {
  static_assert((N & (N - 1)) == 0, "a GPU has no accesses of other widths");
  for (int k = 0; k < N; ++k) dst[k * stride] = ts_load(src[k]);
}
// Runs a block of a record's phase that is the record's.
template <int WORDS, class Grid, class Run>
static void ts_run_record(const Grid& p, const ts_record& r, int32_t block, Run run) {
  void* buffers[WORDS];
  int64_t dims[WORDS];
  for (int32_t i = 0; i < r.count; ++i) {
    const int64_t word = ts_word(p.words[r.words + i], i < r.addresses, p.bases);
    if (i < r.addresses) buffers[i] = (void*)word;
    else dims[i - r.addresses] = word;
  }
  const ts_problem problem = {buffers, dims, r.end - r.begin};
  run(r.kernel & TS_BODY, &problem, block - r.begin);
}
// Runs all blocks of a pack, the last one first.
template <int WORDS, class Grid, class Run>
static void ts_run_pack(const Grid& p, int32_t blocks, Run run) {
  for (int32_t b = blocks; b-- > 0;) {
    const ts_record* r = p.records;
    while (r->end <= b) ++r;
    ts_run_record<WORDS>(p, *r, b, run);
  }
}
// Runs all thread blocks of a launch, the last one first.  Where the counters would not let them go on, the status
// becomes that of a bad index.
template <int WORDS, class Grid, class Run>
static void ts_run_grid(const Grid& p, int32_t blocks, Run run) {
  ts_walk walks[TS_GRID_MOST];
  const int32_t end = (int32_t)p.end;
  for (int32_t t = 0; t < blocks; ++t) walks[t] = ts_start(p.records + p.first, end, t);
  for (int32_t phase = p.records[p.first].phase; phase < end; ++phase) {
    for (int32_t t = blocks; t-- > 0;) {
      ts_walk& w = walks[t];
      if (w.at.phase != phase) continue;
      if (p.counters && phase && p.counters[phase] != (uint32_t)(w.at.before < blocks ? w.at.before : blocks)) return;
      for (; w.at.phase == phase; w.block += blocks, ts_seek(w, end, t)) {
        ts_run_record<WORDS>(p, w.at, w.block, run);
      }
      if (p.counters && phase + 1 < end) ++p.counters[phase + 1];
    }
  }
}

#include "ts_index.h"

#endif  // TS_HOST_H_
