// Convolutions' gradients by their filters through cuDNN: results beside the CPU's plain loops, the same bits in every
// run, and times beside the convolution itself.  The values are multiples of 1/4, so that every sum is exact in float32
// and each result has one right rounding; an engine may be off by 1e-5 of the largest result (one is, by 3e-6).
// Needs a GPU, but no TensorFlow; build it with
// custom_ops/{autotune,cublas_lt,cuda_driver,cudnn,library_cuda,library_host,program}.cc.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../custom_ops/autotune.h"
#include "../../custom_ops/cudnn.h"
#include "../../custom_ops/library_cuda.h"
#include "../../custom_ops/library_host.h"

namespace {

using namespace tf_stitch;
using cuda::Driver;

const Driver* g_driver;
int g_wrong = 0;

void Check(int result, const char* what) {
  if (!result) return;
  printf("%s: %s\n", what, cuda::Describe(*g_driver, result).c_str());
  exit(1);
}

void UseFirstDevice() {
  std::string error;
  g_driver = cuda::LoadDriver(&error);
  if (!g_driver) {
    printf("%s\n", error.c_str());
    exit(1);
  }
  auto retain = reinterpret_cast<int (*)(cuda::Context*, cuda::Device)>(
      dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuDevicePrimaryCtxRetain"));
  cuda::Context context;
  Check(retain(&context, 0), "using the first GPU");
  Check(g_driver->CtxPushCurrent(context), "using the first GPU");
}

struct Case {
  const char* name;
  std::vector<int64_t> dims;  // as a library step has them
  ConvFlags flags;
  bool compared;  // else only timed: the CPU's loops take too long
};

ConvFlags Flags(int64_t groups, std::vector<int64_t> strides, std::vector<int64_t> low, std::vector<int64_t> high,
                std::vector<int64_t> dilations = {1, 1}) {
  return {false, false, false, groups, std::move(strides), std::move(low), std::move(high), std::move(dilations)};
}

const Case kCases[] = {
    {"3x3", {4, 16, 24, 14, 14, 14, 14, 3, 3}, Flags(1, {1, 1}, {1, 1}, {1, 1}), true},
    {"3x3, grey image", {8, 1, 32, 28, 28, 26, 26, 3, 3}, Flags(1, {1, 1}, {0, 0}, {0, 0}), true},
    {"7x7/2, colours", {2, 3, 64, 32, 32, 16, 16, 7, 7}, Flags(1, {2, 2}, {2, 2}, {3, 3}), true},
    {"3x3/2, a rest", {3, 8, 16, 12, 15, 5, 7, 3, 3}, Flags(1, {2, 2}, {0, 0}, {0, 0}), true},
    {"3x3/2, SAME", {3, 8, 16, 12, 16, 6, 8, 3, 3}, Flags(1, {2, 2}, {0, 0}, {1, 1}), true},
    {"odd channels", {5, 7, 13, 9, 11, 9, 11, 3, 3}, Flags(1, {1, 1}, {1, 1}, {1, 1}), true},
    {"2x3, dilated", {2, 8, 8, 17, 17, 15, 15, 2, 3}, Flags(1, {1, 1}, {0, 1}, {0, 1}, {2, 2}), true},
    {"groups", {4, 32, 64, 10, 10, 10, 10, 3, 3}, Flags(2, {1, 1}, {1, 1}, {1, 1}), true},
    {"one image", {1, 64, 64, 8, 8, 8, 8, 3, 3}, Flags(1, {1, 1}, {1, 1}, {1, 1}), true},
    {"one place", {16, 64, 32, 3, 3, 1, 1, 3, 3}, Flags(1, {1, 1}, {0, 0}, {0, 0}), true},
    {"no image", {0, 8, 8, 8, 8, 8, 8, 3, 3}, Flags(1, {1, 1}, {1, 1}, {1, 1}), true},
    {"volume", {2, 8, 16, 5, 8, 8, 5, 8, 8, 3, 3, 3}, Flags(1, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}), true},
    {"digits, 2nd layer", {128, 32, 64, 13, 13, 11, 11, 3, 3}, Flags(1, {1, 1}, {0, 0}, {0, 0}), false},
    {"resnet 56x56x64", {32, 64, 64, 56, 56, 56, 56, 3, 3}, Flags(1, {1, 1}, {1, 1}, {1, 1}), false},
    {"resnet 14x14x256", {32, 256, 256, 14, 14, 14, 14, 3, 3}, Flags(1, {1, 1}, {1, 1}, {1, 1}), false},
};

struct Type {
  const char* name;
  int dtype;
  bool tf32;
};
const Type kTypes[] = {{"float32", 1, false}, {"TF32", 1, true}, {"float16", 19, false}, {"bfloat16", 14, false}};

int64_t Product(const int64_t* from, size_t count) {
  int64_t out = 1;
  for (size_t i = 0; i < count; ++i) out *= from[i];
  return out;
}

// Multiples of 1/4 between -2 and 2, which every type holds.
std::vector<char> Values(int64_t count, int dtype, int seed) {
  const size_t element = static_cast<size_t>(DTypeSize(dtype));
  std::vector<char> out(static_cast<size_t>(count) * element);
  for (int64_t i = 0; i < count; ++i) {
    float value = static_cast<float>((i * 7 + i / 13 + seed * 5) % 17) / 4 - 2;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (dtype == 14) bits >>= 16;
    if (dtype == 19 && bits << 1)
      bits = (bits >> 16 & 0x8000) | (((bits >> 23 & 0xFF) - 112) << 10) | (bits >> 13 & 0x3FF);
    memcpy(&out[static_cast<size_t>(i) * element], &bits, element);
  }
  return out;
}

struct Memory {
  explicit Memory(const std::vector<char>& values) : bytes(values.size()) {
    Check(g_driver->MemAlloc(&at, std::max<size_t>(bytes, 16)), "allocating");
    Check(g_driver->MemcpyHtoDAsync(at, values.data(), bytes, nullptr), "copying");
    Check(g_driver->StreamSynchronize(nullptr), "copying");
  }
  ~Memory() { g_driver->MemFree(at); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::vector<char> Read() const {
    std::vector<char> out(bytes);
    Check(g_driver->CtxSynchronize(), "waiting");
    if (bytes) Check(g_driver->MemcpyDtoHAsync(out.data(), at, bytes, nullptr), "reading");
    Check(g_driver->StreamSynchronize(nullptr), "reading");
    return out;
  }
  size_t bytes;
  void* at = nullptr;
};

// Microseconds on the device of what `work` enqueues, replayed as a graph.
double OnDevice(const LibraryWork& work, void* const* buffers, void* workspace) {
  constexpr int kTimes = 10;
  cuda::OwnStream own(*g_driver);
  cuda::PrepareStream(own.get());
  cuda::Graph graph;
  cuda::GraphExec exec;
  Check(g_driver->StreamBeginCapture(own.get(), cuda::kCaptureRelaxed), "capturing");
  for (int i = 0; i < kTimes; ++i) work.Run(buffers, workspace, own.get());
  Check(g_driver->StreamEndCapture(own.get(), &graph), "capturing");
  Check(g_driver->GraphInstantiate(&exec, graph, 0), "instantiating");
  cuda::Event begin, end;
  Check(g_driver->EventCreate(&begin, 0) || g_driver->EventCreate(&end, 0), "making events");
  float best = 1e9f;
  for (int i = 0; i < 5; ++i) {
    float ms = 0;
    g_driver->EventRecord(begin, own.get());
    Check(g_driver->GraphLaunch(exec, own.get()), "launching");
    g_driver->EventRecord(end, own.get());
    Check(g_driver->EventSynchronize(end), "waiting");
    g_driver->EventElapsedTime(&ms, begin, end);
    best = std::min(best, ms);
  }
  g_driver->GraphExecDestroy(exec);
  g_driver->GraphDestroy(graph);
  cuda::ForgetStream(own.get());
  return best * 1000 / kTimes;
}

double ValueOf(const char* at, int dtype) {
  uint32_t bits = 0;
  memcpy(&bits, at, static_cast<size_t>(DTypeSize(dtype)));
  if (dtype == 19)
    bits = (bits & 0x8000) << 16 | (bits & 0x7FFF ? ((bits >> 10 & 31) + 112) << 23 : 0) | (bits & 0x3FF) << 13;
  if (dtype == 14) bits <<= 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// The largest difference of two results over the largest value.
double WorstError(const std::vector<char>& got, const std::vector<char>& want, int dtype) {
  double worst = 0, scale = 1e-9;
  for (size_t i = 0; i < want.size(); i += static_cast<size_t>(DTypeSize(dtype))) {
    double a = ValueOf(&got[i], dtype), b = ValueOf(&want[i], dtype);
    if (!std::isfinite(a)) return INFINITY;
    worst = std::max(worst, std::fabs(a - b));
    scale = std::max(scale, std::fabs(b));
  }
  return worst / scale;
}

// How many elements of two results differ in their bits.
size_t Different(const std::vector<char>& a, const std::vector<char>& b, size_t element) {
  size_t out = 0;
  for (size_t i = 0; i < a.size(); i += element) out += memcmp(&a[i], &b[i], element) != 0;
  return out;
}

void Bench(const Case& c, const Type& t) {
  Step step;
  step.kind = Step::Kind::kLibrary;
  step.call = LibraryCall::kConvFilter;
  step.conv = c.flags;
  const size_t spatial = c.flags.spatial(), element = static_cast<size_t>(DTypeSize(t.dtype));
  const int64_t *in = c.dims.data() + 3, *places = in + spatial, *window = places + spatial;
  const int64_t depth = c.dims[1] / c.flags.groups, rows = c.dims[2] * Product(window, spatial);
  std::vector<char> x = Values(c.dims[0] * Product(in, spatial) * c.dims[1], t.dtype, 1);
  std::vector<char> g = Values(c.dims[0] * Product(places, spatial) * c.dims[2], t.dtype, 2);
  std::vector<char> dw(static_cast<size_t>(rows * depth) * element, static_cast<char>(0xFF));
  std::string error;
  auto work = MakeLibraryWork(step, t.dtype, c.dims, *g_driver, t.tf32, &error);
  if (!work) {
    printf("%-18s %-9s %s\n", c.name, t.name, error.c_str());
    return;
  }
  Memory on_x(x), on_g(g), on_dw(dw), workspace(std::vector<char>(work->workspace_bytes()));
  void* buffers[] = {on_x.at, on_g.at, on_dw.at};
  error = work->Run(buffers, workspace.at, nullptr);
  std::vector<char> got = on_dw.Read();
  printf("%-18s %-9s %s", c.name, t.name, error.c_str());
  for (int i = 0; i < 3; ++i) {
    Memory again(dw);
    void* other[] = {on_x.at, on_g.at, again.at};
    work->Run(other, workspace.at, nullptr);
    if (again.Read() != got) {
      ++g_wrong;
      printf(" NOT THE SAME AGAIN");
    }
  }
  if (c.compared) {
    StepPlan plan;
    plan.dims = c.dims;
    plan.blocks = rows;
    void* host[] = {x.data(), g.data(), dw.data()};
    RunLibraryBlocks(step, t.dtype, plan, host, 0, rows);
    size_t different = Different(got, dw, element);
    const double error = WorstError(got, dw, t.dtype);
    const bool wrong = !(error <= 1e-5);
    g_wrong += wrong;
    printf("%s: %zu of %lld differ, by %.1e at most", wrong ? "WRONG" : "right", different,
           static_cast<long long>(rows * depth), error);
  }
  if (c.dims[0]) printf(", %.1f us", OnDevice(*work, buffers, workspace.at));
  step.call = LibraryCall::kConv;
  Memory w(std::vector<char>(static_cast<size_t>(rows * depth) * element)), y(g);
  void* forward[] = {on_x.at, w.at, y.at};
  auto conv = !c.compared ? MakeLibraryWork(step, t.dtype, c.dims, *g_driver, t.tf32, &error) : nullptr;
  if (conv) {
    Memory room(std::vector<char>(conv->workspace_bytes()));
    printf(", the convolution %.1f us", OnDevice(*conv, forward, room.at));
  }
  printf(", workspace %zu\n", work->workspace_bytes());
  fflush(stdout);
}

}  // namespace

int main() {
  UseFirstDevice();
  for (const Case& c : kCases) {
    for (const Type& t : kTypes) Bench(c, t);
  }
  printf("%d wrong\n", g_wrong);
  return g_wrong ? 1 : 0;
}
