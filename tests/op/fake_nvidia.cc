// Stands in for libcuda.so.1, libcublasLt.so.12 and libcudnn.so.9: device memory is host memory, a graph is a list of
// calls, and a convolution is computed from what its descriptors say.  Which algorithms there are, what is wrong with
// each and how long it takes is made up:
//   cuDNN engine 10 needs a compiler, 11 is not deterministic, 12 is the fastest but its ReLU loses NaN, 13 is good,
//   14 is good and slow.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

using Call = std::function<void()>;
struct FakeStream {
  std::vector<std::pair<Call, float>>* captured = nullptr;
};
struct FakeGraph {
  std::vector<std::pair<Call, float>> calls;
};

float g_now = 0;  // milliseconds that the device has worked
std::set<void*> g_streams;
int g_alive = 0;  // pieces of memory, streams, events and graphs that nobody gave back

void Do(void* stream, float ms, Call call) {
  auto* s = static_cast<FakeStream*>(stream);
  if (s && s->captured) {
    s->captured->emplace_back(std::move(call), ms);
  } else {
    call();
    g_now += ms;
  }
}

}  // namespace

extern "C" {

// --- the driver --------------------------------------------------------------------------------------

int fake_alive() { return g_alive; }
int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** s) { return *s = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int, const char** s) { return *s = "fake", 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuCtxGetDevice(int* d) { return *d = 0, 0; }
int cuCtxSynchronize() { return 0; }
int cuDeviceGetAttribute(int* v, int, int) { return *v = 0, 0; }
int cuDeviceGetName(char* name, int n, int) { return strncpy(name, "Fake GPU", n), 0; }
int cuDriverGetVersion(int* v) { return *v = 13000, 0; }
int cuMemAlloc_v2(void** p, size_t n) {
  if (getenv("FAKE_NO_MEMORY")) return 2;
  return *p = aligned_alloc(256, (n + 255) / 256 * 256), ++g_alive, 0;
}
int cuMemFree_v2(void* p) { return free(p), --g_alive, 0; }
int cuMemsetD8Async(void* p, unsigned char v, size_t n, void* s) {
  return Do(s, 0, [=] { memset(p, v, n); }), 0;
}
int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t n, void*) { return memcpy(to, from, n), 0; }
int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t n, void*) { return memcpy(to, from, n), 0; }
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t n, void* s) {
  return Do(s, 0, [=] { memcpy(to, from, n); }), 0;
}
int cuStreamCreate(void** s, unsigned) { return g_streams.insert(*s = new FakeStream), ++g_alive, 0; }
int cuStreamDestroy_v2(void* s) { return g_streams.erase(s), delete static_cast<FakeStream*>(s), --g_alive, 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuStreamIsCapturing(void* s, int* v) { return *v = s && static_cast<FakeStream*>(s)->captured, 0; }
int cuStreamBeginCapture_v2(void* s, int) {
  return static_cast<FakeStream*>(s)->captured = &(new FakeGraph)->calls, ++g_alive, 0;
}
int cuStreamEndCapture(void* s, void** g) {
  auto*& captured = static_cast<FakeStream*>(s)->captured;
  return *g = captured, captured = nullptr, 0;
}
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuGraphDestroy(void* g) { return delete static_cast<FakeGraph*>(g), --g_alive, 0; }
int cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long) {
  return *e = new FakeGraph(*static_cast<FakeGraph*>(g)), ++g_alive, 0;
}
int cuGraphExecDestroy(void* e) { return delete static_cast<FakeGraph*>(e), --g_alive, 0; }
int cuGraphLaunch(void* e, void* s) {
  for (auto& [call, ms] : static_cast<FakeGraph*>(e)->calls) Do(s, ms, call);
  return 0;
}
int cuEventCreate(void** e, unsigned) { return *e = new float, ++g_alive, 0; }
int cuEventDestroy_v2(void* e) { return delete static_cast<float*>(e), --g_alive, 0; }
int cuEventRecord(void* e, void*) { return *static_cast<float*>(e) = g_now, 0; }
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void* a, void* b) {
  return *ms = *static_cast<float*>(b) - *static_cast<float*>(a), 0;
}

}  // extern "C"

// What no test here calls, but must be found.
#define FAKE_MISSING(name) \
  extern "C" int name() { return 999; }
#include "fake_missing.inc"

// --- cuDNN -------------------------------------------------------------------------------------------

namespace {

struct Descriptor {
  int type;
  bool finished = false;
  std::map<int, std::vector<int64_t>> numbers;
  std::map<int, std::vector<float>> floats;
  std::map<int, std::vector<void*>> pointers;
  std::map<int, std::vector<std::shared_ptr<Descriptor>>> links;
};
using Handle = std::shared_ptr<Descriptor>;

struct DnnHandle {
  void* stream = nullptr;
};

Handle& Of(void* d) { return *static_cast<Handle*>(d); }
int64_t Number(const Handle& d, int attribute) { return d->numbers.at(attribute).at(0); }

struct Tensor {
  std::vector<int64_t> dims, strides;
  float* data = nullptr;
  int64_t At(std::vector<int64_t> index) const {
    int64_t at = 0;
    for (size_t i = 0; i < index.size(); ++i) at += (dims[i] == 1 ? 0 : index[i]) * strides[i];
    return at;
  }
};

// Calls `f` with every index of some dims.
void Each(const std::vector<int64_t>& dims, const std::function<void(const std::vector<int64_t>&)>& f) {
  std::vector<int64_t> index(dims.size(), 0);
  for (int64_t d : dims) {
    if (d == 0) return;
  }
  while (true) {
    f(index);
    size_t i = dims.size();
    while (i-- > 0 && ++index[i] == dims[i]) index[i] = 0;
    if (i == SIZE_MAX) return;
  }
}

struct Machine {
  std::map<int64_t, void*> memory;  // by unique id
  std::map<int64_t, std::vector<float>> virtuals;
  bool loses_nan = false;

  Tensor Open(const Handle& d) {
    Tensor t{d->numbers.at(902), d->numbers.at(903)};
    int64_t id = Number(d, 906), size = 1;
    for (int64_t n : t.dims) size *= n;
    if (d->numbers.count(907) && Number(d, 907)) {
      virtuals[id].resize(static_cast<size_t>(size));
      t.data = virtuals[id].data();
    } else {
      t.data = static_cast<float*>(memory.at(id));
    }
    return t;
  }

  void Convolve(const Handle& op) {
    Tensor x = Open(op->links.at(704)[0]), w = Open(op->links.at(703)[0]), y = Open(op->links.at(705)[0]);
    EachProduct(
        op->links.at(702)[0], x, w, y,
        [&](double& sum, int64_t at_x, int64_t at_w, int64_t) { sum += double{x.data[at_x]} * w.data[at_w]; },
        [&](double sum, int64_t at_y) { y.data[at_y] = static_cast<float>(sum); });
  }

  void FilterGradient(const Handle& op) {
    Tensor x = Open(op->links.at(716)[0]), dw = Open(op->links.at(715)[0]), dy = Open(op->links.at(717)[0]);
    std::map<int64_t, double> sums;
    Each(dw.dims, [&](const std::vector<int64_t>& at) { sums[dw.At(at)] = 0; });
    EachProduct(
        op->links.at(714)[0], x, dw, dy,
        [&](double&, int64_t at_x, int64_t at_w, int64_t at_y) { sums[at_w] += double{x.data[at_x]} * dy.data[at_y]; },
        [](double, int64_t) {});
    for (auto [at, sum] : sums) dw.data[at] = static_cast<float>(sum);
  }

  // Calls `product` for the elements of x and w that are multiplied for one of y, and `done` with what it summed up.
  void EachProduct(const Handle& conv, const Tensor& x, const Tensor& w, const Tensor& y,
                   const std::function<void(double&, int64_t, int64_t, int64_t)>& product,
                   const std::function<void(double, int64_t)>& done) {
    const auto &dilations = conv->numbers.at(102), &strides = conv->numbers.at(103), &low = conv->numbers.at(105);
    int64_t groups = x.dims[1] / w.dims[1];
    Each(y.dims, [&](const std::vector<int64_t>& at) {
      double sum = 0;
      Each({w.dims.begin() + 1, w.dims.end()}, [&](const std::vector<int64_t>& tap) {
        std::vector<int64_t> from{at[0], at[1] / (y.dims[1] / groups) * w.dims[1] + tap[0]}, filter{at[1], tap[0]};
        for (size_t i = 0; i + 2 < y.dims.size(); ++i) {
          int64_t p = at[i + 2] * strides[i] - low[i] + tap[i + 1] * dilations[i];
          if (p < 0 || p >= x.dims[i + 2]) return;
          from.push_back(p);
          filter.push_back(tap[i + 1]);
        }
        product(sum, x.At(from), w.At(filter), y.At(at));
      });
      done(sum, y.At(at));
    });
  }

  void Pointwise(const Handle& op) {
    Tensor x = Open(op->links.at(751)[0]), y = Open(op->links.at(753)[0]);
    bool relu = Number(op->links.at(750)[0], 0) == 100;
    bool keeps = relu && Number(op->links.at(750)[0], 2) == 1 && !loses_nan;
    Tensor b = op->links.count(752) ? Open(op->links.at(752)[0]) : x;
    Each(y.dims, [&](const std::vector<int64_t>& at) {
      float v = x.data[x.At(at)];
      y.data[y.At(at)] = !relu ? v + b.data[b.At(at)] : keeps && std::isnan(v) ? v : v > 0 ? v : 0;
    });
  }

  void Run(const Handle& graph) {
    for (const Handle& op : graph->links.at(801)) {
      if (op->type == 10) Convolve(op);
      if (op->type == 11) FilterGradient(op);
      if (op->type == 13) Pointwise(op);
    }
  }
};

constexpr int64_t kEngines[] = {10, 11, 12, 13, 14};

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return 91900; }
const char* cudnnGetErrorString(int) { return "CUDNN_STATUS_FAKE"; }
int cudnnCreate(void** h) { return *h = new DnnHandle, 0; }
// The new stream waits for the old one.
int cudnnSetStream(void* h, void* s) {
  void*& stream = static_cast<DnnHandle*>(h)->stream;
  for (void* one : {stream, s}) {
    if (!one) continue;
    if (!g_streams.count(one)) fprintf(stderr, "a handle's stream is gone\n"), abort();
    if (static_cast<FakeStream*>(one)->captured) fprintf(stderr, "a handle's stream is captured\n"), abort();
  }
  return stream = s, 0;
}
int cudnnBackendCreateDescriptor(int type, void** d) {
  return *d = new Handle(std::make_shared<Descriptor>(Descriptor{type})), 0;
}
int cudnnBackendDestroyDescriptor(void* d) { return delete static_cast<Handle*>(d), 0; }

int cudnnBackendSetAttribute(void* d, int attribute, int type, int64_t count, const void* values) {
  Descriptor& to = *Of(d);
  if (to.finished) return 3;
  for (int64_t i = 0; i < count; ++i) {
    if (type == 3) {
      to.numbers[attribute].push_back(static_cast<const int64_t*>(values)[i]);
    } else if (type == 15) {
      Handle& link = Of(static_cast<void* const*>(values)[i]);
      if (!link->finished) return 3;
      to.links[attribute].push_back(link);
    } else if (type == 0 || type == 6) {
      to.pointers[attribute].push_back(static_cast<void* const*>(values)[i]);
    } else if (type == 4) {
      to.floats[attribute].push_back(static_cast<const float*>(values)[i]);
    } else if (type == 2) {
      to.numbers[attribute].push_back(static_cast<const bool*>(values)[i]);
    } else {
      to.numbers[attribute].push_back(static_cast<const int*>(values)[i]);
    }
  }
  return 0;
}

int cudnnBackendFinalize(void* d) {
  Descriptor& it = *Of(d);
  if (it.type == 5 && getenv("FAKE_NO_PLANS")) return 9;
  if (it.type == 17 && Number(Of(d), 900) != 16) return 3;
  it.finished = true;
  return 0;
}

int cudnnBackendGetAttribute(void* d, int attribute, int, int64_t room, int64_t* count, void* values) {
  const Handle& of = Of(d);
  if (!of->finished) return 3;
  *count = 1;
  if (attribute == 202) {  // configurations of a heuristic
    int64_t n = 0;
    for (int64_t engine : kEngines) {
      if (n == room) break;
      Descriptor& config = *Of(static_cast<void**>(values)[n++]);
      config.links[201] = of->links.at(201);
      config.numbers[1301] = {engine};
      config.finished = true;
    }
    *count = n;
  } else if (attribute == 300) {
    Descriptor& engine = *Of(*static_cast<void**>(values));
    engine.numbers[1301] = of->numbers.at(1301);
    engine.finished = true;
  } else if (attribute == 302) {
    Descriptor& knob = *Of(*static_cast<void**>(values));
    knob.numbers[600] = {2};
    knob.numbers[601] = {7};
    knob.finished = true;
  } else if (attribute == 1301 || attribute == 601) {
    *static_cast<int64_t*>(values) = Number(of, attribute);
  } else if (attribute == 600) {
    *static_cast<int*>(values) = 2;
  } else if (attribute == 402) {
    *static_cast<int64_t*>(values) = 1000;
  } else if (attribute == 1303 || attribute == 1305) {
    int64_t engine = Number(of, 1301);
    int bad = attribute == 1303 ? (engine == 11 ? 4 : -1) : (engine == 10 ? 0 : -1);
    *static_cast<int*>(values) = bad;
    *count = bad >= 0;
  } else {
    return 3;
  }
  return 0;
}

int cudnnBackendExecute(void* handle, void* plan, void* pack) {
  const Handle &config = Of(plan)->links.at(401)[0], &graph = config->links.at(201)[0];
  int64_t engine = Number(config, 1301);
  auto machine = std::make_shared<Machine>();
  machine->loses_nan = engine == 12;
  const Handle& with = Of(pack);
  for (size_t i = 0; i < with->numbers.at(1000).size(); ++i) {
    machine->memory[with->numbers.at(1000)[i]] = with->pointers.at(1001)[i];
  }
  memset(with->pointers.at(1003)[0], 1, 1000);
  float ms = engine == 12 ? 1 : engine == 13 ? 2 : 5;
  Handle kept = graph;
  Do(static_cast<DnnHandle*>(handle)->stream, ms, [machine, kept] { machine->Run(kept); });
  return 0;
}

}  // extern "C"
