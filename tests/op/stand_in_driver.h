// What the stand-ins for the CUDA driver have in common, and the programs that run over them: float32 [n, n], with code
// for sm_90.  Kernels are host functions; each program that includes this says when they run.
#ifndef TF_STITCH_TESTS_OP_STAND_IN_DRIVER_H_
#define TF_STITCH_TESTS_OP_STAND_IN_DRIVER_H_

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../../custom_ops/cublas_lt.h"
#include "../../custom_ops/cudnn.h"
#include "../../custom_ops/runtime_cuda.h"
#include "stand_in_load.h"

namespace tf_stitch::cuda {
namespace {

// --- kernels: a parameter block's words are addresses, dims, blocks -------------------------------------

float* At(uint64_t address) { return reinterpret_cast<float*>(address); }
void Axpb(const uint64_t* w) {
  for (uint64_t i = 0; i < w[2]; ++i) At(w[1])[i] = 2 * At(w[0])[i] + 1;
}
void Mul(const uint64_t* w) {
  for (uint64_t i = 0; i < w[3]; ++i) At(w[2])[i] = At(w[0])[i] * At(w[1])[i];
}
constexpr size_t kScratch = 64;  // bytes of a product's workspace
void Multiply(const float* x, const float* y, float* out, uint64_t n) {
  for (uint64_t i = 0; i < n * n; ++i) {
    float sum = 0;
    for (uint64_t k = 0; k < n; ++k) sum += x[i / n * n + k] * y[k * n + i % n];
    out[i] = sum;
  }
}

// --- the driver ------------------------------------------------------------------------------------------

// One device; no streams, memory, launches.
Driver DriverOfOneDevice() {
  Driver d{};
  d.GetErrorName = [](Result, const char** s) { return *s = "CUDA_ERROR_FAKE", 0; };
  d.GetErrorString = [](Result, const char** s) { return *s = "fake", 0; };
  d.CtxPushCurrent = [](Context) { return 0; };
  d.CtxPopCurrent = [](Context*) { return 0; };
  d.CtxGetDevice = [](Device* x) { return *x = 0, 0; };
  d.DeviceGetAttribute = [](int* value, int what, Device) {
    return *value = what == kComputeCapabilityMajor   ? 9
                    : what == kComputeCapabilityMinor ? 0
                    : what == kMultiprocessors        ? 4
                    : what == kCooperativeLaunch      ? 1
                                                      : 232448,
           0;
  };
  d.ModuleLoadDataEx = [](Module*, const void* bytes, unsigned, int*, void**) {
    return memcmp(bytes, "fake", 4) ? 200 : 0;
  };
  d.ModuleUnload = [](Module) { return 0; };
  d.FuncGetAttribute = [](int* value, int, Function) { return *value = 0, 0; };
  d.FuncSetAttribute = [](Function, int, int) { return 0; };
  d.ThreadExchangeStreamCaptureMode = [](int*) { return 0; };
  return d;
}

}  // namespace

// --- libraries -------------------------------------------------------------------------------------------

// Products of [n, n] matrices; each program runs them in its own way.
struct Matmul::Impl {
  uint64_t n;
};
Matmul::Matmul() : impl_(std::make_unique<Impl>()) {}
Matmul::~Matmul() = default;
std::shared_ptr<const Matmul> Matmul::Get(const MatmulShape& shape, std::string*) {
  std::shared_ptr<Matmul> out(new Matmul);
  out->impl_->n = static_cast<uint64_t>(shape.n);
  return out;
}
size_t Matmul::workspace_bytes() const { return kScratch; }

// The drawn programs hold no convolution.
struct Convolution::Impl {};
Convolution::~Convolution() = default;
std::shared_ptr<const Convolution> Convolution::Get(const ConvShape&, std::string*) { return nullptr; }
size_t Convolution::workspace_bytes() const { return 0; }
void PrepareStream(Stream) {}
void ForgetStream(Stream) {}
std::string Convolution::Run(const void*, const void*, const void*, const void*, void*, void*, Stream) const {
  return "";
}

}  // namespace tf_stitch::cuda

namespace tf_stitch {
namespace {

void Must(bool good, const std::string& what) {
  if (good) return;
  fprintf(stderr, "%s\n", what.c_str());
  _Exit(1);  // other threads may run
}

// The program in a file.
struct Loaded {
  Program program;
  std::shared_ptr<CudaCode> code;

  void Load(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::string data(std::istreambuf_iterator<char>(file), {}), error;
    Must(ParseProgram(data, &program, &error), error);
    code = CudaCode::Load(program, nullptr, &error);
    Must(code != nullptr, error);
  }

  // The plan for n, with a CudaPlan.
  std::unique_ptr<Plan> PlanFor(int64_t n, bool grids) const {
    std::unique_ptr<Plan> plan = MakePlan(program, Signature(2 * program.inputs.size(), n));
    Must(plan->usable, plan->why_not);
    auto ready = std::make_unique<CudaPlan>(program, *plan, code, false, grids);
    Must(ready->error().empty(), ready->error());
    plan->extra = std::move(ready);
    return plan;
  }
};

// A run's memory, as the op lays it out.  Inputs and outputs have one element more than they need.
struct Memory {
  Memory(const Program& p, const Plan& plan, const CudaPlan& ready)
      : arena(static_cast<size_t>(plan.arena_bytes + ready.workspace_bytes()) + 1),
        workspace(arena.data() + plan.arena_bytes) {
    auto elements = [&](uint32_t id) { return static_cast<size_t>(plan.buffer_bytes[id]) / 4 + 1; };
    for (uint32_t id : p.inputs) inputs.emplace_back(elements(id));
    for (uint32_t id : p.outputs) outputs.emplace_back(elements(id));
    for (size_t id = 0; id < p.buffers.size(); ++id) {
      const Buffer& b = p.buffers[id];
      addresses.push_back(b.backing == Backing::kInput    ? static_cast<void*>(inputs[b.backing_index].data())
                          : b.backing == Backing::kOutput ? static_cast<void*>(outputs[b.backing_index].data())
                                                          : arena.data() + plan.arena_offset[id]);
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::vector<std::vector<float>> inputs, outputs;
  std::vector<char> arena;
  void* workspace;
  std::vector<void*> addresses;  // by buffer
};

}  // namespace
}  // namespace tf_stitch

#endif  // TF_STITCH_TESTS_OP_STAND_IN_DRIVER_H_
