// The CUDA driver API through dlopen: no CUDA headers or libraries are needed to build or to load this library.
//
// Declarations follow the public driver API (CUDA 12 and 13, 64-bit entry points); only what is used is here.
#ifndef TF_STITCH_CUSTOM_OPS_CUDA_DRIVER_H_
#define TF_STITCH_CUSTOM_OPS_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace tf_stitch::cuda {

using Result = int;  // CUresult; 0 is success
using Device = int;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Graph = struct GraphTag*;
using GraphNode = struct GraphNodeTag*;
using GraphExec = struct GraphExecTag*;
using Event = struct EventTag*;

constexpr Result kSuccess = 0;
constexpr int kStaticSharedBytes = 1;        // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int kMaxDynamicSharedBytes = 8;    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kMultiprocessors = 16;         // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kComputeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeCapabilityMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr int kCooperativeLaunch = 95;       // CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
constexpr int kMaxSharedBytesPerBlock = 97;  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int kStreamNonBlocking = 1;        // CU_STREAM_NON_BLOCKING
constexpr int kNotFound = 500;               // CUDA_ERROR_NOT_FOUND
constexpr int kNotReady = 600;               // CUDA_ERROR_NOT_READY
constexpr int kCaptureUnsupported = 900;     // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
constexpr int kEventBlockingSync = 1;        // CU_EVENT_BLOCKING_SYNC
constexpr int kEventDisableTiming = 2;       // CU_EVENT_DISABLE_TIMING
constexpr int kNodeIsCooperative = 2;        // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
constexpr int kCaptureRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kCaptureStatusNone = 0;        // CU_STREAM_CAPTURE_STATUS_NONE

// CUDA_KERNEL_NODE_PARAMS_v2.
struct KernelNodeParams {
  Function func;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** kernel_params;
  void** extra;
  void* kern;
  Context ctx;
};

// CUlaunchAttributeValue.
union LaunchAttributeValue {
  char room[64];
  int cooperative;
};

// Entry points of libcuda.so.1, by the names of the driver API without "cu".
struct Driver {
  Result (*Init)(unsigned);
  Result (*GetErrorName)(Result, const char**);
  Result (*GetErrorString)(Result, const char**);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  Result (*CtxGetDevice)(Device*);
  Result (*CtxSynchronize)();
  Result (*CtxGetStreamPriorityRange)(int*, int*);  // least, greatest
  Result (*DeviceGetAttribute)(int*, int, Device);
  Result (*DeviceGetName)(char*, int, Device);
  Result (*DriverGetVersion)(int*);
  Result (*ModuleLoadDataEx)(Module*, const void*, unsigned, int*, void**);
  Result (*ModuleUnload)(Module);
  Result (*ModuleGetFunction)(Function*, Module, const char*);
  Result (*FuncGetAttribute)(int*, int, Function);
  Result (*FuncSetAttribute)(Function, int, int);
  Result (*LaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                         void**);
  Result (*MemAlloc)(void**, size_t);
  Result (*MemFree)(void*);
  Result (*MemAllocHost)(void**, size_t);  // page-locked
  Result (*MemFreeHost)(void*);
  Result (*LaunchCooperativeKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                    Stream, void**);
  Result (*OccupancyMaxActiveBlocksPerMultiprocessor)(int*, Function, int, size_t);
  Result (*MemcpyHtoDAsync)(void*, const void*, size_t, Stream);
  Result (*MemcpyDtoHAsync)(void*, const void*, size_t, Stream);
  Result (*MemcpyDtoDAsync)(void*, const void*, size_t, Stream);
  Result (*MemsetD8Async)(void*, unsigned char, size_t, Stream);
  Result (*StreamCreate)(Stream*, unsigned);
  Result (*StreamCreateWithPriority)(Stream*, unsigned, int);
  Result (*StreamDestroy)(Stream);
  Result (*StreamGetPriority)(Stream, int*);  // below 0: goes before others
  Result (*StreamWaitEvent)(Stream, Event, unsigned);
  Result (*StreamSynchronize)(Stream);
  Result (*StreamGetCtx)(Stream, Context*);
  Result (*StreamIsCapturing)(Stream, int*);
  Result (*StreamBeginCapture)(Stream, int);
  Result (*StreamEndCapture)(Stream, Graph*);
  Result (*ThreadExchangeStreamCaptureMode)(int*);
  Result (*EventCreate)(Event*, unsigned);
  Result (*EventDestroy)(Event);
  Result (*EventRecord)(Event, Stream);
  Result (*EventQuery)(Event);
  Result (*EventSynchronize)(Event);
  Result (*EventElapsedTime)(float*, Event, Event);
  Result (*GraphCreate)(Graph*, unsigned);
  Result (*GraphDestroy)(Graph);
  Result (*GraphAddKernelNode)(GraphNode*, Graph, const GraphNode*, size_t, const KernelNodeParams*);
  Result (*GraphKernelNodeSetAttribute)(GraphNode, int, const LaunchAttributeValue*);
  Result (*GraphAddChildGraphNode)(GraphNode*, Graph, const GraphNode*, size_t, Graph);
  Result (*GraphInstantiate)(GraphExec*, Graph, unsigned long long);
  Result (*GraphExecKernelNodeSetParams)(GraphExec, GraphNode, const KernelNodeParams*);
  Result (*GraphExecChildGraphNodeSetParams)(GraphExec, GraphNode, Graph);
  Result (*GraphExecDestroy)(GraphExec);
  Result (*GraphLaunch)(GraphExec, Stream);
  Result (*GraphGetRootNodes)(Graph, GraphNode*, size_t*);
};

// The driver, or null with the reason in `error` (may be null).  Loaded once.
const Driver* LoadDriver(std::string* error);

// "CUDA_ERROR_NAME (text)" of a result.
std::string Describe(const Driver& driver, Result result);

// "CUDA_ERROR_NAME (text) while DOING".
inline std::string Failed(const Driver& driver, Result result, const std::string& doing) {
  return Describe(driver, result) + " while " + doing;
}

// Whether the device prefers what a stream has to what streams of no priority have.
inline bool GoesFirst(const Driver& driver, Stream stream) {
  int priority = 0;
  return !driver.StreamGetPriority(stream, &priority) && priority < 0;
}

// Makes a context current while it lives.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, Context context) : driver_(driver) { ok_ = !driver.CtxPushCurrent(context); }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  ~ScopedContext() {
    Context popped;
    if (ok_) driver_.CtxPopCurrent(&popped);
  }
  bool ok() const { return ok_; }

 private:
  const Driver& driver_;
  bool ok_;
};

// Lets this thread allocate and load modules while another thread captures.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) { driver_.ThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { driver_.ThreadExchangeStreamCaptureMode(&mode_); }

 private:
  const Driver& driver_;
  int mode_ = kCaptureRelaxed;
};

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_CUDA_DRIVER_H_
