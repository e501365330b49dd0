#include "cuda_driver.h"

#include <dlfcn.h>

namespace tf_stitch::cuda {
namespace {

struct Loaded {
  Driver driver{};
  std::string error;
};

// Looks up one entry point; remembers the first that is missing.
template <class Fn>
void Find(void* library, const char* name, Fn* fn, std::string* error) {
  *fn = reinterpret_cast<Fn>(dlsym(library, name));
  if (!*fn && error->empty()) *error = std::string("libcuda.so.1 has no ") + name + "; update the NVIDIA driver";
}

Loaded Load() {
  Loaded out;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    out.error = "libcuda.so.1 cannot be loaded; install the NVIDIA driver";
    return out;
  }
  Driver& d = out.driver;
  auto find = [&](const char* name, auto* fn) { Find(library, name, fn, &out.error); };
  find("cuInit", &d.Init);
  find("cuGetErrorName", &d.GetErrorName);
  find("cuGetErrorString", &d.GetErrorString);
  find("cuCtxPushCurrent_v2", &d.CtxPushCurrent);
  find("cuCtxPopCurrent_v2", &d.CtxPopCurrent);
  find("cuCtxGetDevice", &d.CtxGetDevice);
  find("cuCtxSynchronize", &d.CtxSynchronize);
  find("cuCtxGetStreamPriorityRange", &d.CtxGetStreamPriorityRange);
  find("cuDeviceGetAttribute", &d.DeviceGetAttribute);
  find("cuDeviceGetName", &d.DeviceGetName);
  find("cuDriverGetVersion", &d.DriverGetVersion);
  find("cuModuleLoadDataEx", &d.ModuleLoadDataEx);
  find("cuModuleUnload", &d.ModuleUnload);
  find("cuModuleGetFunction", &d.ModuleGetFunction);
  find("cuFuncGetAttribute", &d.FuncGetAttribute);
  find("cuFuncSetAttribute", &d.FuncSetAttribute);
  find("cuLaunchKernel", &d.LaunchKernel);
  find("cuMemAlloc_v2", &d.MemAlloc);
  find("cuMemFree_v2", &d.MemFree);
  find("cuMemAllocHost_v2", &d.MemAllocHost);
  find("cuMemFreeHost", &d.MemFreeHost);
  find("cuLaunchCooperativeKernel", &d.LaunchCooperativeKernel);
  find("cuOccupancyMaxActiveBlocksPerMultiprocessor", &d.OccupancyMaxActiveBlocksPerMultiprocessor);
  find("cuMemcpyHtoDAsync_v2", &d.MemcpyHtoDAsync);
  find("cuMemcpyDtoHAsync_v2", &d.MemcpyDtoHAsync);
  find("cuMemcpyDtoDAsync_v2", &d.MemcpyDtoDAsync);
  find("cuMemsetD8Async", &d.MemsetD8Async);
  find("cuStreamCreate", &d.StreamCreate);
  find("cuStreamCreateWithPriority", &d.StreamCreateWithPriority);
  find("cuStreamDestroy_v2", &d.StreamDestroy);
  find("cuStreamGetPriority", &d.StreamGetPriority);
  find("cuStreamWaitEvent", &d.StreamWaitEvent);
  find("cuStreamSynchronize", &d.StreamSynchronize);
  find("cuStreamGetCtx", &d.StreamGetCtx);
  find("cuStreamIsCapturing", &d.StreamIsCapturing);
  find("cuStreamBeginCapture_v2", &d.StreamBeginCapture);
  find("cuStreamEndCapture", &d.StreamEndCapture);
  find("cuThreadExchangeStreamCaptureMode", &d.ThreadExchangeStreamCaptureMode);
  find("cuEventCreate", &d.EventCreate);
  find("cuEventDestroy_v2", &d.EventDestroy);
  find("cuEventRecord", &d.EventRecord);
  find("cuEventQuery", &d.EventQuery);
  find("cuEventSynchronize", &d.EventSynchronize);
  find("cuEventElapsedTime", &d.EventElapsedTime);
  find("cuGraphCreate", &d.GraphCreate);
  find("cuGraphDestroy", &d.GraphDestroy);
  find("cuGraphAddKernelNode_v2", &d.GraphAddKernelNode);
  find("cuGraphKernelNodeSetAttribute", &d.GraphKernelNodeSetAttribute);
  find("cuGraphAddChildGraphNode", &d.GraphAddChildGraphNode);
  find("cuGraphInstantiateWithFlags", &d.GraphInstantiate);
  find("cuGraphExecKernelNodeSetParams_v2", &d.GraphExecKernelNodeSetParams);
  find("cuGraphExecChildGraphNodeSetParams", &d.GraphExecChildGraphNodeSetParams);
  find("cuGraphExecDestroy", &d.GraphExecDestroy);
  find("cuGraphLaunch", &d.GraphLaunch);
  find("cuGraphGetRootNodes", &d.GraphGetRootNodes);
  if (out.error.empty()) {
    Result result = d.Init(0);
    if (result != kSuccess) out.error = "cuInit failed: " + Describe(d, result);
  }
  return out;
}

}  // namespace

const Driver* LoadDriver(std::string* error) {
  static const Loaded& loaded = *new Loaded(Load());
  if (loaded.error.empty()) return &loaded.driver;
  if (error) *error = loaded.error;
  return nullptr;
}

std::string Describe(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.GetErrorName(result, &name);
  driver.GetErrorString(result, &text);
  return std::string(name ? name : "unknown CUDA error") + (text ? std::string(" (") + text + ")" : "");
}

}  // namespace tf_stitch::cuda
