// Kernel text as a GPU runs it (ts_cuda.h as it is), on the host: the 256 threads of a block are fibers that take turns
// at barriers and shuffles only.  Each runs as far as it can before the next one does, in the order that TS_ORDER says:
// what one thread writes and another reads or overwrites without a barrier between them is wrong in one of the orders.
// For x86-64.  TS_ORDER: 0 the first thread first, 1 the last one first, 2 another order in every turn.
#ifndef TS_GPU_BLOCK_H_
#define TS_GPU_BLOCK_H_

#include <stdint.h>

// What CUDA declares.
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ thread_local
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(x)
#define memcpy __builtin_memcpy
struct ts_dim3 {
  unsigned x, y;
};
static ts_dim3 threadIdx, blockIdx, gridDim, blockDim;
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T>
static inline T min(T a, T b) {
  return a < b ? a : b;
}

enum { FIBERS = 256, WARP = 32, STACK = 1 << 16 };
enum State { RUNS, AT_BARRIER, AT_SHUFFLE, ENDED };
struct Fiber {
  void* stack;  // where its registers lie while others run
  State state;
  unsigned mask;  // of the shuffle that it waits in,
  int distance;
  char given[16], got[16];
};
static Fiber fibers[FIBERS];
alignas(64) static char stacks[FIBERS][STACK];
static void* scheduler;

// Saves the registers that a call keeps and this stack's top in *from, and goes on with another stack.
extern "C" __attribute__((visibility("hidden"))) void ts_switch(void** from, void* to);
asm(".text\n.hidden ts_switch\n.globl ts_switch\n.type ts_switch, @function\nts_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static __attribute__((noinline)) void wait_as(State state) {
  Fiber& f = fibers[threadIdx.x];
  f.state = state;
  ts_switch(&f.stack, scheduler);
  asm volatile("" ::: "memory");
}
static inline void __syncthreads() { wait_as(AT_BARRIER); }
template <class T>
static __attribute__((noinline)) T __shfl_xor_sync(unsigned mask, T x, int distance) {
  Fiber& f = fibers[threadIdx.x];
  memcpy(f.given, &x, sizeof(T));
  f.mask = mask, f.distance = distance;
  wait_as(AT_SHUFFLE);
  memcpy(&x, f.got, sizeof(T));
  return x;
}
static inline unsigned __ballot_sync(unsigned mask, bool vote) {
  unsigned votes = vote ? 1u << threadIdx.x % WARP : 0;
  for (int distance = 1; distance < WARP; distance *= 2) votes |= __shfl_xor_sync(mask, votes, distance);
  return votes;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline bool __isGlobal(const void*) { return true; }

#include "ts_cuda.h"

// What a host gives another meaning: loads that are to be under way together, rows (what nothing wrote is NaN), and how
// a kernel is called (as ts_host.h).
#undef TS_LOADED
#undef TS_ROW
#undef TS_ENTER
#undef TS_KERNEL_
#undef TS_PACK
#define TS_LOADED(a, n)
#define TS_ROW(T, name, n, L, W)        \
  T name[TS_ROW_TURNS_(n, L, W) * (W)]; \
  __builtin_memset(name, 0xFF, sizeof name);
#define TS_ENTER(bits)                      \
  typedef ts_index_type<bits>::type ts_idx; \
  char* const ts_shared = ts_shared_memory; \
  (void)ts_shared;
#define TS_KERNEL_(name, nb, nd, bounds)                                                                          \
  struct name##_problem {                                                                                         \
    enum { NB = (nb), ND = (nd) };                                                                                \
    int64_t words[NB + ND + 1];                                                                                   \
  };                                                                                                              \
  static void name##_body(const name##_problem& ts_p, int64_t ts_block, int32_t* ts_status, ts_keeper ts_k = {}); \
  extern "C" __attribute__((visibility("default"))) void name(const ts_problem* p, int64_t begin, int64_t end,    \
                                                              char* shared, int32_t* status) {                    \
    static name##_problem problem;                                                                                \
    for (int k = 0; k < (nb); ++k) problem.words[k] = (int64_t)p->buffers[k];                                     \
    for (int k = 0; k < (nd); ++k) problem.words[problem.NB + k] = p->dims[k];                                    \
    ts_shared_memory = shared;                                                                                    \
    for (int64_t b = begin; b < end; ++b)                                                                         \
      if (!run_block([](int64_t block) { name##_body(problem, block, nullptr); }, b)) *status = 1;                \
  }                                                                                                               \
  static void name##_body(const name##_problem& ts_p, int64_t ts_block, int32_t* ts_status, ts_keeper ts_k)
#define TS_PACK(name, bases, words, blocks)                                                                         \
  static void name##_run(int32_t ts_kernel, const int64_t* ts_words, int64_t ts_block, ts_keeper ts_k = {});        \
  extern "C" __attribute__((visibility("default"))) void name(const ts_grid<bases>* p, int64_t count, char* shared, \
                                                              int32_t* status) {                                    \
    static ts_grid<bases> pack;                                                                                     \
    pack = *p;                                                                                                      \
    ts_shared_memory = shared;                                                                                      \
    auto block = [](int64_t b) {                                                                                    \
      blockIdx.x = (unsigned)b;                                                                                     \
      ts_run_pack<words>(                                                                                           \
          pack, [](int32_t kernel, const int64_t* problem, int64_t own) { name##_run(kernel, problem, own); });     \
    };                                                                                                              \
    for (int64_t b = 0; b < count; ++b)                                                                             \
      if (!run_block(block, b)) *status = 1;                                                                        \
  }                                                                                                                 \
  static void name##_run(int32_t ts_kernel, const int64_t* ts_words, int64_t ts_block, ts_keeper ts_k)

struct ts_problem {
  void* const* buffers;
  const int64_t* dims;
  int64_t blocks;
};
static char* ts_shared_memory;
static void (*the_body)(int64_t);
static int64_t the_block;

static void run_fiber() {
  the_body(the_block);
  wait_as(ENDED);
}

static unsigned in_order(unsigned k, unsigned turn) {
  return TS_ORDER == 0 ? k : TS_ORDER == 1 ? FIBERS - 1 - k : (77 * k + 101 * turn) % FIBERS;
}

// Lets the threads of a warp that have all come to the same shuffle go on, and says whether there are any.
static bool shuffle(Fiber* warp) {
  bool any = false;
  for (int lane = 0; lane < WARP; ++lane) {
    const unsigned mask = warp[lane].state == AT_SHUFFLE ? warp[lane].mask : 0;
    const int distance = warp[lane].distance;
    bool all = mask >> lane & 1;
    for (int k = 0; k < WARP; ++k)
      if (mask >> k & 1)
        all &= warp[k].state == AT_SHUFFLE && warp[k].mask == mask && warp[k].distance == distance &&
               (mask >> (k ^ distance) & 1);
    if (!all) continue;
    for (int k = 0; k < WARP; ++k)
      if (mask >> k & 1) memcpy(warp[k].got, warp[k ^ distance].given, sizeof warp[k].got), warp[k].state = RUNS;
    any = true;
  }
  return any;
}

// False when threads wait for each other for ever.
static __attribute__((noinline)) bool run_block(void (*body)(int64_t), int64_t block) {
  the_body = body, the_block = block;
  for (int t = 0; t < FIBERS; ++t) {
    void** top = (void**)(stacks[t] + STACK) - 1;  // as after a call: 8 bytes from a multiple of 16
    *--top = (void*)run_fiber;
    fibers[t].stack = top - 6;
    fibers[t].state = RUNS;
  }
  for (unsigned turn = 0;; ++turn) {
    for (int k = 0; k < FIBERS; ++k) {
      const unsigned t = in_order(k, turn);
      if (fibers[t].state != RUNS) continue;
      threadIdx.x = t;
      ts_switch(&scheduler, fibers[t].stack);
      asm volatile("" ::: "memory");
    }
    int waiting = 0, ended = 0;
    for (const Fiber& f : fibers) waiting += f.state == AT_BARRIER, ended += f.state == ENDED;
    if (ended == FIBERS) return true;
    bool any = waiting == FIBERS;
    if (any)
      for (Fiber& f : fibers) f.state = RUNS;
    else
      for (int w = 0; w < FIBERS; w += WARP) any |= shuffle(fibers + w);
    if (!any) return false;
  }
}

#endif  // TS_GPU_BLOCK_H_
