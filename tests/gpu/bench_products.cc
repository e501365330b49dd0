// Times matrix products of many requests whose operands lie in separate allocations: one after the other, on a stream
// each, and as one launch.
// Needs a GPU, but no TensorFlow; build it with custom_ops/{autotune,cublas_batched,cublas_lt,cuda_driver,program}.cc.
//
//   bench_products [COUNT...]     how many products at once
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../../custom_ops/autotune.h"
#include "../../custom_ops/cublas_batched.h"

namespace {

using namespace tf_stitch::cuda;
using Work = std::function<void(Stream)>;

const Driver* g_driver;

void Check(int result, const char* what) {
  if (!result) return;
  printf("%s: %s\n", what, Describe(*g_driver, result).c_str());
  exit(1);
}

void Check(const std::string& error) {
  if (error.empty()) return;
  printf("%s\n", error.c_str());
  exit(1);
}

void UseFirstDevice() {
  std::string error;
  g_driver = LoadDriver(&error);
  if (!g_driver) Check(error);
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  auto retain = reinterpret_cast<int (*)(Context*, Device)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
  Context context;
  Check(retain(&context, 0), "using the first GPU");
  Check(g_driver->CtxPushCurrent(context), "using the first GPU");
}

struct Memory {
  explicit Memory(const std::vector<float>& values) {
    Check(g_driver->MemAlloc(&at, values.size() * 4), "allocating");
    Check(g_driver->MemcpyHtoDAsync(at, values.data(), values.size() * 4, nullptr), "copying");
    Check(g_driver->StreamSynchronize(nullptr), "copying");
  }
  void* at = nullptr;
};

std::vector<float> Read(const void* at, size_t count) {
  static auto copy =
      reinterpret_cast<int (*)(void*, const void*, size_t)>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemcpyDtoH_v2"));
  std::vector<float> out(count);
  Check(g_driver->CtxSynchronize(), "waiting");
  Check(copy(out.data(), at, count * 4), "reading");
  return out;
}

std::vector<float> Random(size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> draw(-1, 1);
  std::vector<float> out(count);
  for (float& v : out) v = draw(rng);
  return out;
}

double Now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Microseconds of a call until the device is done, the median.
double Wall(const std::function<void()>& call) {
  std::vector<double> times;
  for (int i = 0; i < 12; ++i) {
    double begin = Now();
    call();
    Check(g_driver->CtxSynchronize(), "waiting");
    times.push_back(Now() - begin);
  }
  std::nth_element(times.begin(), times.begin() + 6, times.end());
  return times[6];
}

// Microseconds on the device of what `work` enqueues, replayed as a graph.
double OnDevice(Stream stream, const Work& work) {
  constexpr int kTimes = 5;
  work(stream);
  Check(g_driver->StreamSynchronize(stream), "running");
  Graph graph;
  GraphExec exec;
  Check(g_driver->StreamBeginCapture(stream, kCaptureRelaxed), "capturing");
  for (int i = 0; i < kTimes; ++i) work(stream);
  Check(g_driver->StreamEndCapture(stream, &graph), "capturing");
  Check(g_driver->GraphInstantiate(&exec, graph, 0), "instantiating");
  Event begin, end;
  Check(g_driver->EventCreate(&begin, 0) || g_driver->EventCreate(&end, 0), "making events");
  float best = 1e9f;
  for (int i = 0; i < 8; ++i) {
    float ms = 0;
    g_driver->EventRecord(begin, stream);
    Check(g_driver->GraphLaunch(exec, stream), "launching");
    g_driver->EventRecord(end, stream);
    Check(g_driver->EventSynchronize(end), "waiting");
    g_driver->EventElapsedTime(&ms, begin, end);
    best = std::min(best, ms);
  }
  g_driver->GraphExecDestroy(exec);
  g_driver->GraphDestroy(graph);
  return best * 1000 / kTimes;
}

struct Shape {
  const char* name;
  int64_t m, n, k;
};

MatmulShape Product(const Shape& s, int64_t batch) {
  return {1, batch, s.m, s.n, s.k, false, false, false, false, false, true};
}

double WorstError(const std::vector<float>& got, const std::vector<float>& want) {
  double worst = 0, scale = 1e-9;
  for (float w : want) scale = std::max<double>(scale, std::fabs(w));
  for (size_t i = 0; i < got.size(); ++i) worst = std::max<double>(worst, std::fabs(got[i] - want[i]));
  return worst / scale;
}

void Bench(const Shape& s, int64_t count) {
  std::string error;
  std::vector<void*> lhs, rhs, out;
  std::vector<float> a = Random(s.m * s.k, 1), b = Random(s.k * s.n, 2), c(s.m * s.n, NAN);
  for (int64_t i = 0; i < count; ++i) {
    a[0] = static_cast<float>(i);
    lhs.push_back(Memory(a).at);
    rhs.push_back(Memory(b).at);
    out.push_back(Memory(c).at);
  }
  std::vector<void*> table(lhs);
  table.insert(table.end(), rhs.begin(), rhs.end());
  table.insert(table.end(), out.begin(), out.end());
  void* arrays;
  Check(g_driver->MemAlloc(&arrays, table.size() * 8), "allocating");
  Check(g_driver->MemcpyHtoDAsync(arrays, table.data(), table.size() * 8, nullptr), "copying");
  auto** lhs_array = static_cast<void**>(arrays);
  auto **rhs_array = lhs_array + count, **out_array = rhs_array + count;
  void *workspace, *packed;
  Check(g_driver->MemAlloc(&workspace, size_t{33 << 20} * 8), "allocating");
  size_t each = (s.m * s.k + s.k * s.n + s.m * s.n) * 4;
  Check(g_driver->MemAlloc(&packed, each * count), "allocating");
  Check(g_driver->CtxSynchronize(), "waiting");
  std::vector<Stream> streams(count);
  for (Stream& stream : streams) Check(g_driver->StreamCreate(&stream, kStreamNonBlocking), "making a stream");

  double begin = Now();
  auto single = Matmul::Get(Product(s, 1), &error);
  if (!single) return (void)printf("%s: %s\n", s.name, error.c_str());
  double tuned_single = Now() - begin;
  auto run_single = [&](int64_t i, Stream stream) {
    Check(single->Run(lhs[i], rhs[i], nullptr, out[i], static_cast<char*>(workspace) + (i % 8 << 20) * 33, stream));
  };
  double slices = Wall([&] {
    for (int64_t i = 0; i < count; ++i) {  // a request after the other: each waits for its result
      run_single(i, streams[0]);
      g_driver->StreamSynchronize(streams[0]);
    }
  });
  double in_order = OnDevice(streams[0], [&](Stream stream) {
    for (int64_t i = 0; i < count; ++i) run_single(i, stream);
  });
  double side_by_side = Wall([&] {
    for (int64_t i = 0; i < count; ++i) run_single(i, streams[i]);
  });
  std::vector<float> want = Read(out[count - 1], s.m * s.n);

  char* at = static_cast<char*>(packed);
  auto strided = Matmul::Get(Product(s, count), &error);
  double strided_us = !strided ? -1 : OnDevice(streams[0], [&](Stream stream) {
    Check(strided->Run(at, at + s.m * s.k * 4 * count, nullptr, at + (s.m * s.k + s.k * s.n) * 4 * count, workspace,
                       stream));
  });
  MatmulShape pointers = Product(s, count);
  pointers.pointers = true;
  std::string lt_error;
  auto lt = Matmul::Get(pointers, &lt_error);
  double lt_us = !lt ? -1 : OnDevice(streams[0], [&](Stream stream) {
    Check(lt->Run(lhs_array, rhs_array, nullptr, out_array, workspace, stream));
  });
  begin = Now();
  auto batch = PointerBatch::Get(Product(s, count), &error);
  double tuned_batch = Now() - begin;
  if (!batch) return (void)printf("%s: %s\n", s.name, error.c_str());
  auto run_batch = [&](Stream stream) { Check(batch->Run(lhs_array, rhs_array, out_array, workspace, stream)); };
  Check(g_driver->MemcpyHtoDAsync(out[count - 1], c.data(), c.size() * 4, nullptr), "copying");
  double batch_us = OnDevice(streams[0], run_batch);
  double batch_wall = Wall([&] { run_batch(streams[0]); });
  double wrong = WorstError(Read(out[count - 1], s.m * s.n), want);

  printf(
      "%-8s S=%-3d slices %7.0f  in order %7.1f  streams %7.0f | strided %6.1f  Lt pointers %6.1f  batch %6.1f (call "
      "and wait %6.1f) us | error %.1e | chosen in %.0f + %.0f ms %s\n",
      s.name, static_cast<int>(count), slices, in_order, side_by_side, strided_us, lt_us, batch_us, batch_wall, wrong,
      tuned_single / 1e3, tuned_batch / 1e3, lt_error.c_str());
  fflush(stdout);
  for (void* p : table) g_driver->MemFree(p);
  for (void* p : {arrays, workspace, packed}) g_driver->MemFree(p);
  for (Stream stream : streams) g_driver->StreamDestroy(stream);
}

}  // namespace

int main(int argc, char** argv) {
  UseFirstDevice();
  const Shape kShapes[] = {{"conv2", 3136, 64, 576}, {"conv3", 784, 128, 1152}, {"conv4", 196, 256, 2304},
                           {"conv5", 49, 512, 4608}, {"lstm", 1, 4096, 1024},   {"matvec", 1, 256, 256}};
  std::vector<int64_t> counts;
  for (int i = 1; i < argc; ++i) counts.push_back(atoll(argv[i]));
  if (counts.empty()) counts = {2, 16, 64, 128};
  for (const Shape& s : kShapes) {
    for (int64_t count : counts) Bench(s, count);
  }
}
