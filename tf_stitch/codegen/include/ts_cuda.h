// What kernel text means on a GPU: a block is a thread block, shared memory is dynamic shared memory.
//
// Threads of a block form groups of L (a power of two up to the block's size): rows go to groups, lanes to the
// threads of a group.
#ifndef TS_CUDA_H_
#define TS_CUDA_H_

#include "ts_math.h"
#include "ts_grid.h"
#include "ts_join.h"

// Where this thread keeps operands that do not change from phase to phase (TS_READ_KEPT), 16 bytes at a time.
struct ts_keeper {
  char* at = nullptr;
  bool keeps = false, recalls = false;
};

// A problem is what one launch of the kernel works on: addresses, dims, number of blocks.  A lone launch passes it by
// value.
#define TS_THREADS 256
#define TS_KERNEL(name, buffers, dims) TS_KERNEL_(name, buffers, dims, __launch_bounds__(TS_THREADS))
// With registers for much under way in each thread: so many blocks run on a multiprocessor at once.
#define TS_KERNEL_WIDE(name, buffers, dims, blocks) \
  TS_KERNEL_(name, buffers, dims, __launch_bounds__(TS_THREADS, blocks))
#define TS_KERNEL_(name, buffers, dims, bounds)                                                          \
  struct name##_problem {                                                                                \
    enum { NB = (buffers), ND = (dims) };                                                                \
    int64_t words[NB + ND + 1];                                                                          \
  };                                                                                                     \
  static __device__ __forceinline__ void name##_body(const name##_problem& ts_p, int64_t ts_block,       \
                                                     int32_t* ts_status, ts_keeper ts_k = {});           \
  extern "C" __global__ void bounds name(const __grid_constant__ name##_problem p) {                     \
    name##_body(p, blockIdx.x, nullptr);                                                                 \
  }                                                                                                      \
  TS_MANY_(name)                                                                                         \
  static __device__ __forceinline__ void name##_body(const name##_problem& ts_p, int64_t ts_block,       \
                                                     int32_t* ts_status, ts_keeper ts_k)
// A text that begins with WITH_MANY (codegen/kernel.py) has for each kernel also name_many, which takes a table of problems
// of equal sizes (a superkernel): blockIdx.y is the problem.
#define TS_MANY_(name)
#define TS_MANY_FORM_(name)                                                                           \
  extern "C" __global__ void __launch_bounds__(TS_THREADS) name##_many(const name##_problem* table) { \
    name##_body(table[blockIdx.y], blockIdx.x, nullptr);                                              \
  }
// A grid kernel: `bases` and `words` are the most bases that a launch names and words that a problem has; `blocks` run
// on a multiprocessor at once.  The text between braces is a TS_CASE for each body.
#define TS_GRID(name, bases, words, blocks)                                                              \
  static __device__ __forceinline__ void name##_run(int32_t ts_kernel, const int64_t* ts_words,          \
                                                    int64_t ts_block, ts_keeper ts_k);                   \
  extern "C" __global__ void __launch_bounds__(TS_THREADS, blocks) name(                                 \
      const __grid_constant__ ts_grid<bases> p) {                                                        \
    ts_run_grid<words>(p, [](int32_t kernel, const int64_t* problem, int64_t block, ts_keeper k) {       \
      name##_run(kernel, problem, block, k);                                                             \
    });                                                                                                  \
  }                                                                                                      \
  static __device__ __forceinline__ void name##_run(int32_t ts_kernel, const int64_t* ts_words,          \
                                                    int64_t ts_block, ts_keeper ts_k)
// A pack: a grid kernel for problems of one phase, launched with all its blocks.
#define TS_PACK(name, bases, words, blocks)                                                              \
  static __device__ __forceinline__ void name##_run(int32_t ts_kernel, const int64_t* ts_words,          \
                                                    int64_t ts_block, ts_keeper ts_k = {});              \
  extern "C" __global__ void __launch_bounds__(TS_THREADS, blocks) name(                                 \
      const __grid_constant__ ts_grid<bases> p) {                                                        \
    ts_run_pack<words>(p, [](int32_t kernel, const int64_t* problem, int64_t block) {                    \
      name##_run(kernel, problem, block);                                                                \
    });                                                                                                  \
  }                                                                                                      \
  static __device__ __forceinline__ void name##_run(int32_t ts_kernel, const int64_t* ts_words,          \
                                                    int64_t ts_block, ts_keeper ts_k)
#define TS_CASE(k, name) \
  if (ts_kernel == (k)) return name##_body(*(const name##_problem*)ts_words, ts_block, nullptr, ts_k);
#define TS_ENTER(bits)                      \
  typedef ts_index_type<bits>::type ts_idx; \
  extern __shared__ __align__(64) char ts_shared[]; \
  __builtin_assume(threadIdx.x < TS_THREADS);
#define TS_IN(T, name, k) const T* __restrict__ name = (const T*)ts_address(ts_p.words[k]);
#define TS_BUFFER(T, k) (const T*)ts_address(ts_p.words[k])
#define TS_OUT(T, name, k) T* __restrict__ name = (T*)ts_address(ts_p.words[k]);
#define TS_DIM(name, k) const ts_idx name = (ts_idx)ts_p.words[ts_p.NB + (k)];
#define TS_SHARED(T, name, offset) T* name = (T*)(ts_shared + (offset));

#define TS_PART(first, count) if (ts_block >= (first) && ts_block < (first) + (count))
#define TS_BLOCKS(b, first, count) if (const ts_idx b = (ts_idx)(ts_block - (first)); true)

// The part is `n` members of `count` blocks each; m is the block's.
#define TS_MEMBERS(m, first, n, count) if (const ts_idx m = (ts_idx)(ts_block - (first)) / (count); true)

#define TS_LANE_(L) ((ts_idx)(threadIdx.x % (L)))
#define TS_GROUP_(L) ((ts_idx)(threadIdx.x / (L)))
#define TS_GROUPS_(L) ((ts_idx)(TS_THREADS / (L)))
#define TS_ROWS0(L) if (TS_GROUP_(L) == 0)
// The step is written so that the compiler sees that no group has two of n rows when there are as many groups.
#define TS_NEXT_(r, n, end, L) ((n) <= TS_GROUPS_(L) ? (end) : (r) + TS_GROUPS_(L))
#define TS_ROWS1(i, o, e, L) \
  for (ts_idx i = (o) + TS_GROUP_(L); i < (o) + (e); i = TS_NEXT_(i, (ts_idx)(e), (o) + (e), L))
#define TS_FLAT_(n, L) \
  for (ts_idx ts_r = TS_GROUP_(L), ts_n = (n); ts_r < ts_n; ts_r = TS_NEXT_(ts_r, ts_n, ts_n, L))
#define TS_ROWS2(i, o, e, i1, o1, e1, L) \
  TS_FLAT_((e) * (e1), L) if (const ts_idx i = (o) + ts_r / (e1), i1 = (o1) + ts_r % (e1); true)
#define TS_ROWS3(i, o, e, i1, o1, e1, i2, o2, e2, L)                                                        \
  TS_FLAT_((e) * (e1) * (e2), L)                                                                            \
  if (const ts_idx i = (o) + ts_r / ((e1) * (e2)), i1 = (o1) + ts_r / (e2) % (e1), i2 = (o2) + ts_r % (e2); true)
#define TS_ROWS4(i, o, e, i1, o1, e1, i2, o2, e2, i3, o3, e3, L)                                             \
  TS_FLAT_((e) * (e1) * (e2) * (e3), L)                                                                     \
  if (const ts_idx i = (o) + ts_r / ((e1) * (e2) * (e3)), i1 = (o1) + ts_r / ((e2) * (e3)) % (e1),          \
                   i2 = (o2) + ts_r / (e3) % (e2), i3 = (o3) + ts_r % (e3); true)
#define TS_ROWS5(i, o, e, i1, o1, e1, i2, o2, e2, i3, o3, e3, i4, o4, e4, L)                                 \
  TS_FLAT_((e) * (e1) * (e2) * (e3) * (e4), L)                                                              \
  if (const ts_idx i = (o) + ts_r / ((e1) * (e2) * (e3) * (e4)),                                            \
                   i1 = (o1) + ts_r / ((e2) * (e3) * (e4)) % (e1), i2 = (o2) + ts_r / ((e3) * (e4)) % (e2), \
                   i3 = (o3) + ts_r / (e4) % (e3), i4 = (o4) + ts_r % (e4); true)
// Loops are unrolled a little: enough loads in flight, and a text of a hundred stages still compiles in seconds.
#define TS_UNROLL_(n) _Pragma(#n)
#define TS_SEVERAL TS_UNROLL_(unroll 4)
#define TS_SERIAL(i, off, ext) TS_UNROLL_(unroll 4) for (ts_idx i = (off); i < (off) + (ext); ++i)
// One row: the groups of threads share a loop, and TS_GATHER joins what their lanes have by an operation.
#define TS_SPLIT(i, off, ext, L) \
  TS_UNROLL_(unroll 8) for (ts_idx i = (off) + TS_GROUP_(L); i < (off) + (ext); i += TS_GROUPS_(L))
#define TS_GATHER(op, a, L) TS_GATHER_##op(a, L)
#define TS_STEPS(t, off, ext, step) for (ts_idx t = (off); t < (off) + (ext); t += (step))
#define TS_LANES(i, off, ext, L) TS_UNROLL_(unroll 4) for (ts_idx i = (off) + TS_LANE_(L); i < (off) + (ext); i += (L))
// Four neighbours for every lane, where the extent is a multiple of 4 L: the compiler makes one wide access of them.
// Buffers begin at multiples of 16 bytes.
#define TS_LANES4(i, off, ext, L)                                                                                   \
  TS_UNROLL_(unroll 2) for (ts_idx i##_four = (off) + 4 * TS_LANE_(L); i##_four < (off) + (ext); i##_four += 4 * (L)) \
    TS_UNROLL_(unroll) for (ts_idx i = i##_four; i < i##_four + 4; ++i)
#define TS_LANES_FOLD4(i, off, ext, L, ...) TS_LANES4(i, off, ext, L)
#define TS_LANES_FOLD(i, off, ext, L, ...) TS_LANES(i, off, ext, L)
#define TS_ONE(L) if (TS_LANE_(L) == 0)

// Products: S threads, W apart, fold one tile together; the others fold other tiles at the same time.  TS_SHARES gives
// each its number among the S, TS_TILE_JOIN adds up what they have in a[A], and every sum is written by the one of them
// that TS_TILE_OWN picks.  A tile beyond the last is the last again, and writes nothing.
#define TS_TILE_(S, W) ((ts_idx)(threadIdx.x % (W) + threadIdx.x / ((S) * (W)) * (W)))
#define TS_SHARE_(S, W) ((ts_idx)(threadIdx.x / (W) % (S)))
#define TS_TILES(t, n, S, W)                                                                  \
  for (ts_idx ts_t0 = 0, ts_tn = (n); ts_t0 < ts_tn; ts_t0 += TS_THREADS / (S))               \
    if (const ts_idx t = ts_imin(ts_t0 + TS_TILE_(S, W), ts_tn - 1); true)
// The same where there are no more tiles than threads to fold them at once: no loop, so what a tile loads can be under
// way before anything else is known of it.
#define TS_FEW_TILES(t, n, S, W)                      \
  if (const ts_idx ts_t0 = 0, ts_tn = (n); ts_tn > 0) \
    if (const ts_idx t = ts_imin(TS_TILE_(S, W), ts_tn - 1); true)
#define TS_SHARES(h, S, W) if (const ts_idx h = TS_SHARE_(S, W); true)
#define TS_LOADED(a, n) TS_EACH(ts_j, n) ts_loaded(a[ts_j]);
#define TS_EACH(i, n) TS_UNROLL_(unroll) for (ts_idx i = 0; i < (n); ++i)
#define TS_TILE_JOIN(T, a, A, S, W, parts) ts_tile_join<A, S, W>(a, (T*)(ts_shared + (parts)));
#define TS_TILE_OWN(q, base, n, S, W)                                                             \
  TS_EACH(ts_own, ((base) + (n)-1) / (S) - (base) / (S) + 1)                                      \
    if (const ts_idx q = TS_SHARE_(S, W) + ((base) / (S) + ts_own) * (S) - (base);                \
        q >= 0 && q < (n) && ts_t0 + TS_TILE_(S, W) < ts_tn)
#define TS_TILE_SUM(T, a, base, q, A, S, W, parts) \
  ts_tile_sum<A, S, W>(a, (base) / (S) + ts_own, (base) + q, (const T*)(ts_shared + (parts)))

// The same by runs of W neighbours from ts_i on, each of which is loaded or stored at once.
#define TS_LANE_RUNS(off, ext, L, W) \
  TS_UNROLL_(unroll 2) for (ts_idx ts_i = (off) + TS_LANE_(L) * (W); ts_i < (off) + (ext); ts_i += (L) * (W))
// Rows that groups of L threads take U at a time, one run of each for every thread: u counts those of a batch, and
// TS_BATCH_RUN is the run at hand.
#define TS_BATCHES(L, n, U) \
  for (ts_idx ts_b = TS_GROUP_(L), ts_n = (n); ts_b < ts_n; ts_b += (U) * TS_GROUPS_(L))
#define TS_BATCH_EACH(u, L, U) TS_EACH(u, U) if (const ts_idx ts_r = ts_b + u * TS_GROUPS_(L); ts_r < ts_n)
#define TS_BATCH_RUNS(T, name, U, ext, W) ts_run<T, W> name[U];
#define TS_BATCH_RUN(name, off, W) name[u]
#define TS_RUN_EACH(i, W) \
  TS_UNROLL_(unroll) for (int ts_w = 0; ts_w < (W); ++ts_w) if (const ts_idx i = ts_i + ts_w; true)

// Row chains: every thread has the same elements of a row in all stages, W neighbours at a time: those from ts_i on, j
// counts them.  Only the last of its turns can reach beyond the row.
#define TS_ROW_TURNS_(n, L, W) (((n) + (L) * (W) - 1) / ((L) * (W)))
#define TS_ROW(T, name, n, L, W) T name[TS_ROW_TURNS_(n, L, W) * (W)];
#define TS_ROW_TURNS(n, L, W)                                                           \
  TS_UNROLL_(unroll) for (int ts_turn = 0; ts_turn < TS_ROW_TURNS_(n, L, W); ++ts_turn) \
    if (const ts_idx ts_i = (ts_turn * (L) + TS_LANE_(L)) * (W); (ts_turn + 1) * (L) * (W) <= (n) || ts_i < (n))
#define TS_LONG_ROW_TURNS(n, L, W) \
  TS_UNROLL_(unroll 4) for (ts_idx ts_i = TS_LANE_(L) * (W), ts_turn = 0; ts_i < (n); ts_i += (L) * (W))
#define TS_ROW_EACH(i, j, W)                                  \
  TS_UNROLL_(unroll) for (int ts_w = 0; ts_w < (W); ++ts_w) \
    if (const ts_idx i = ts_i + ts_w, j = ts_turn * (W) + ts_w; true)

#define TS_STRIP(L) (L)
#define TS_STRIP_ROOM(L) 1
#define TS_STRIP_LANES(i, t, m, L) if (const ts_idx i = (t) + TS_LANE_(L); i < (t) + (m))
#define TS_STRIP_ALL(i, t, m, L) if (const ts_idx i = ts_imin((t) + TS_LANE_(L), (t) + (m)-1); true)
#define TS_SLOT(i, t) 0

#define TS_BARRIER __syncthreads();

template <int bits> struct ts_index_type { typedef int64_t type; };
template <> struct ts_index_type<32> { typedef int32_t type; };

// Folds a value over the L threads of a group; every thread gets the result.  Groups wider than a warp are the
// whole block, and all its threads must come here.
template <int L, class T, class F>
__device__ __forceinline__ T ts_join(T x, F f) {
  constexpr int W = L < 32 ? L : 32;
  const unsigned mask = W == 32 ? 0xffffffffu : ((1u << (W & 31)) - 1u) << (threadIdx.x % 32 / W * W);
#pragma unroll
  for (int d = W / 2; d; d /= 2) x = f(x, __shfl_xor_sync(mask, x, d));
  if constexpr (L > 32) {
    static_assert(L == TS_THREADS, "a group is part of a warp or the block");
    __shared__ T parts[TS_THREADS / 32];
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int w = 1; w < TS_THREADS / 32; ++w) x = f(x, parts[w]);
    __syncthreads();
  }
  return x;
}
// Folds a value over all groups of L threads of the block, lane by lane, for the first group.  All threads come here.
template <int L, class T, class F>
__device__ __forceinline__ T ts_gather(T x, F f) {
  constexpr int W = L < 32 ? 32 : L;  // groups of a warp have joined when the others do
#pragma unroll
  for (int d = L; d < W; d *= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, d));
  __shared__ T parts[TS_THREADS / W * L];
  __syncthreads();
  if (threadIdx.x % W < L) parts[threadIdx.x / W * L + threadIdx.x % W] = x;
  __syncthreads();
  if (threadIdx.x < L) {
#pragma unroll
    for (int k = L; k < TS_THREADS / W * L; k += L) x = f(x, parts[threadIdx.x + k]);
  }
  return x;
}
// Keeps the compiler from putting off loads until their values are needed: many should be under way together.
__device__ __forceinline__ void ts_loaded(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void ts_loaded(double& x) { asm volatile("" : "+d"(x)); }
template <class T> __device__ __forceinline__ void ts_loaded(T&) {}

// N neighbours (a power of two), in the compute type, `stride` apart in dst, by accesses as wide as can be.  src is a
// multiple of N from the buffer's start.
template <int bytes> struct ts_word_of;
template <> struct ts_word_of<1> { typedef uint8_t type; };
template <> struct ts_word_of<2> { typedef uint16_t type; };
template <> struct ts_word_of<4> { typedef uint32_t type; };
template <> struct ts_word_of<8> { typedef uint2 type; };
template <> struct ts_word_of<16> { typedef uint4 type; };
template <int N, int stride, class C, class T>
__device__ __forceinline__ void ts_read(C* dst, const T* src) {
  static_assert((N & (N - 1)) == 0, "there are no accesses of other widths");
  constexpr int bytes = sizeof(T) * N < 16 ? sizeof(T) * N : 16, each = bytes / sizeof(T);
#pragma unroll
  for (int k = 0; k < N; k += each) {
    const typename ts_word_of<bytes>::type word = *(const typename ts_word_of<bytes>::type*)(src + k);
    T part[each];
    memcpy(part, &word, bytes);
#pragma unroll
    for (int j = 0; j < each; ++j) dst[(k + j) * stride] = ts_load(part[j]);
  }
}

// Arrays that are kept: TS_READ_KEPT loads a part of one unless it is recalled, TS_RECALL does that, TS_KEEP keeps it.
#define TS_READ_KEPT(N, stride, dst, src) \
  if (!ts_k.recalls) ts_read<N, stride>(dst, src);
#define TS_RECALL(a) ts_recall(ts_k, a);
#define TS_KEEP(a) ts_keep(ts_k, a);
template <int n>
__device__ __forceinline__ void ts_recall(const ts_keeper& k, float (&a)[n]) {
  if (!k.recalls) return;
#pragma unroll
  for (int j = 0; j < n; j += 4) {
    const float4 four = *(const float4*)(k.at + j * (4 * TS_THREADS));
    a[j] = four.x, a[j + 1] = four.y, a[j + 2] = four.z, a[j + 3] = four.w;
  }
}
template <int n>
__device__ __forceinline__ void ts_keep(ts_keeper& k, const float (&a)[n]) {
  if (k.keeps) {
#pragma unroll
    for (int j = 0; j < n; j += 4) {
      *(float4*)(k.at + j * (4 * TS_THREADS)) = make_float4(a[j], a[j + 1], a[j + 2], a[j + 3]);
    }
  }
  k.at += n * (4 * TS_THREADS);
}

// How many of the S threads of a tile are in one warp.
template <int S, int W> constexpr int ts_near = W >= 32 ? 1 : S < 32 / W ? S : 32 / W;
// Adds up `count` sums over threads that are d, 2 d, ... end / 2 apart.  Of two threads one goes on with the sums of even
// numbers, the other with those of odd ones: thread t ends with those whose number is t modulo the number of threads.
template <int count, int d, int end, class T>
__device__ __forceinline__ void ts_tile_halve(T* a) {
  if constexpr (d < end && count == 1) {
    a[0] += __shfl_xor_sync(0xffffffffu, a[0], d);
    ts_tile_halve<1, 2 * d, end>(a);
  } else if constexpr (d < end) {
    const bool odd = threadIdx.x / d % 2;
#pragma unroll
    for (int i = 0; i < (count + 1) / 2; ++i) {
      const T even_one = a[2 * i], odd_one = 2 * i + 1 < count ? a[2 * i + 1] : T(0);
      a[i] = (odd ? odd_one : even_one) + __shfl_xor_sync(0xffffffffu, odd ? even_one : odd_one, d);
    }
    ts_tile_halve<(count + 1) / 2, 2 * d, end>(a);
  }
}
// Adds up a[0..A) over the S threads of every tile: within warps, and what warps have goes to parts.  Where one warp has
// all of a tile's threads, the k-th sum of share h, number h + k S, is a[k] then.
template <int A, int S, int W, class T>
__device__ __forceinline__ void ts_tile_join(T (&a)[A], T* parts) {
  constexpr int N = ts_near<S, W>, tiles = TS_THREADS / S;
  ts_tile_halve<A, W, W * N>(a);
  if constexpr (N < S) {
    const int share = threadIdx.x / W % S, tile = threadIdx.x % W + threadIdx.x / (S * W) * W;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < (A + N - 1) / N; ++k) {
      const int q = share % N + k * N;
      if (q < A) parts[(share / N * A + q) * tiles + tile] = a[k];
    }
    __syncthreads();
  }
}
// The k-th sum of this thread, number q of its tile.
template <int A, int S, int W, class T>
__device__ __forceinline__ T ts_tile_sum(const T (&a)[A], int k, int q, const T* parts) {
  constexpr int N = ts_near<S, W>, tiles = TS_THREADS / S;
  if constexpr (N == S) return a[k];
  T sum = 0;
#pragma unroll
  for (int w = 0; w < S / N; ++w) sum += parts[(w * A + q) * tiles + threadIdx.x % W + threadIdx.x / (S * W) * W];
  return sum;
}
// A buffer's address.  It lies in global memory, which the compiler cannot see where the word comes from a table.
__device__ __forceinline__ void* ts_address(int64_t word) {
  void* p = __builtin_assume_aligned((void*)word, 16);
  __builtin_assume(__isGlobal(p));
  return p;
}
// What this block has written is seen by those that wait for the counter.  All threads come here.
__device__ __forceinline__ void ts_arrive(uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Returns when the counter has reached `count`; the caller synchronises the block then.
__device__ __forceinline__ void ts_await(const uint32_t* counter, uint32_t count) {
  if (threadIdx.x != 0) return;
  uint32_t seen;
  do {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
// The last thread block of a launch leaves the counters as it found them.
__device__ __forceinline__ void ts_leave(uint32_t* counters, int32_t phases) {
  __shared__ uint32_t left;
  if (threadIdx.x == 0)
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(left) : "l"(counters) : "memory");
  __syncthreads();
  if (left != gridDim.x - 1) return;
  for (int32_t i = threadIdx.x; i <= phases; i += TS_THREADS) counters[i] = 0;
}
// Runs this thread block's share of the phases.  counters[p] counts the thread blocks that are done with the phase
// before p, of those that have work in it; counters[0] those that have left.  A launch with counters is cooperative:
// all its thread blocks are resident.  The next problem's words are fetched while the others arrive.
template <int WORDS, class Grid, class Run>
__device__ __forceinline__ void ts_run_grid(const Grid& p, Run run) {
  extern __shared__ __align__(64) char ts_shared[];
  char* const shared = ts_shared;
  __shared__ int64_t words[2][WORDS];
  const int32_t t = blockIdx.x, end = p.end;
  int32_t phase = p.records[p.first].phase;  // what came before it is done
  int half = 0;
  for (ts_walk w = ts_start(p.records + p.first, end, t); w.at.phase < end; half ^= 1) {
    for (int32_t i = threadIdx.x; i < w.at.count; i += TS_THREADS)
      words[half][i] = ts_word(p.words[w.at.words + i], i < w.at.addresses, p.bases);
    if (w.at.phase != phase) ts_await(p.counters + w.at.phase, min(w.at.before, (int32_t)gridDim.x));
    __syncthreads();
    phase = w.at.phase;
    ts_keeper keeper;
    if (p.kept >= 0) {
      keeper.at = shared + p.kept + 16 * threadIdx.x;
      keeper.keeps = w.at.kernel & TS_KEEPS;
      keeper.recalls = w.at.kernel & TS_RECALLS;
    }
    run(w.at.kernel & TS_BODY, words[half], w.block - w.at.begin, keeper);
    w.block += gridDim.x;
    ts_seek(w, end, t);
    if (w.at.phase != phase && phase + 1 < end) ts_arrive(p.counters + phase + 1);
  }
  if (p.counters) ts_leave(p.counters, end);
}
// The record of the problem that a block of a pack works on: the first that ends behind it.  A warp compares 32 at a time.
__device__ __forceinline__ const ts_record* ts_find(const ts_record* records, int32_t count, int32_t block) {
  while (count > 1) {
    const int32_t share = (count + 31) / 32;
    const int32_t last = min(((int32_t)threadIdx.x % 32 + 1) * share, count) - 1;
    const int32_t passed = __popc(__ballot_sync(0xffffffffu, records[last].end <= block)) * share;
    records += passed;
    count = min(share, count - passed);
  }
  return records;
}
// Runs this thread block's block of a pack.
template <int WORDS, class Grid, class Run>
__device__ __forceinline__ void ts_run_pack(const Grid& p, Run run) {
  __shared__ int64_t words[WORDS];
  const ts_record r = *ts_find(p.records, (int32_t)p.end, (int32_t)blockIdx.x);
  for (int32_t i = threadIdx.x; i < r.count; i += TS_THREADS)
    words[i] = ts_word(p.words[r.words + i], i < r.addresses, p.bases);
  __syncthreads();
  run(r.kernel, words, (int32_t)blockIdx.x - r.begin);
}
template <class T> struct ts_add_op { __device__ T operator()(T a, T b) const { return a + b; } };
template <class T> struct ts_mul_op { __device__ T operator()(T a, T b) const { return a * b; } };
template <class T> struct ts_max_op { __device__ T operator()(T a, T b) const { return ts_max(a, b); } };
template <class T> struct ts_min_op { __device__ T operator()(T a, T b) const { return ts_min(a, b); } };
template <class T> struct ts_and_op { __device__ T operator()(T a, T b) const { return a & b; } };
template <class T> struct ts_or_op { __device__ T operator()(T a, T b) const { return a | b; } };
#define TS_JOIN_(x, L, op) ts_join<L>(x, op<decltype(x)>())
#define TS_JOIN_SUM(x, L) TS_JOIN_(x, L, ts_add_op)
#define TS_JOIN_PROD(x, L) TS_JOIN_(x, L, ts_mul_op)
#define TS_JOIN_MAX(x, L) TS_JOIN_(x, L, ts_max_op)
#define TS_JOIN_MIN(x, L) TS_JOIN_(x, L, ts_min_op)
#define TS_JOIN_AND(x, L) TS_JOIN_(x, L, ts_and_op)
#define TS_JOIN_OR(x, L) TS_JOIN_(x, L, ts_or_op)
#define TS_GATHER_(a, L, op) a = ts_gather<L>(a, op<decltype(+a)>());
#define TS_GATHER_SUM(a, L) TS_GATHER_(a, L, ts_add_op)
#define TS_GATHER_PROD(a, L) TS_GATHER_(a, L, ts_mul_op)
#define TS_GATHER_MAX(a, L) TS_GATHER_(a, L, ts_max_op)
#define TS_GATHER_MIN(a, L) TS_GATHER_(a, L, ts_min_op)
#define TS_GATHER_AND(a, L) TS_GATHER_(a, L, ts_and_op)
#define TS_GATHER_OR(a, L) TS_GATHER_(a, L, ts_or_op)

#include "ts_index.h"

#endif  // TS_CUDA_H_
