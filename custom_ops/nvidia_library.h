// What the libraries of NVIDIA that programs call have in common: they are loaded with dlopen (TensorFlow's GPU wheel
// brings them), keep a handle per device, and number types and operations alike (cuBLAS, cuBLASLt).
#ifndef TF_STITCH_CUSTOM_OPS_NVIDIA_LIBRARY_H_
#define TF_STITCH_CUSTOM_OPS_NVIDIA_LIBRARY_H_

#include <dlfcn.h>

#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda_driver.h"

namespace tf_stitch::cuda {

using LibraryHandle = void*;
using LibraryStatus = int;  // 0: success

// A library's entry points, or why they are not there.
template <class Api>
struct Library {
  Api api{};
  std::string error;
};

// A library's file.
class LibraryFile {
 public:
  // The first of `loaded` that the process has already, whatever the search path says; else the first of `names`.
  LibraryFile(std::initializer_list<const char*> loaded, std::initializer_list<const char*> names) {
    for (const char* name : loaded) {
      if (!handle_) handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    }
    for (const char* name : names) {
      if (!handle_) handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    name_ = *names.begin();
    if (!handle_) error_ = name_ + " cannot be loaded; install tensorflow[and-cuda]";
  }

  // Looks up an entry point; null when the library has none.
  template <class Fn>
  void Find(const char* name, Fn* fn) const {
    *fn = handle_ ? reinterpret_cast<Fn>(dlsym(handle_, name)) : nullptr;
  }

  // As Find, where the library is of no use without it.
  template <class Fn>
  void Need(const char* name, Fn* fn) {
    Find(name, fn);
    if (!*fn && error_.empty()) error_ = name_.substr(0, name_.find(".so")) + " has no " + name;
  }

  // "" or what is missing.
  const std::string& error() const { return error_; }

 private:
  void* handle_ = nullptr;
  std::string name_, error_;
};

// The entry points, loaded by the first call; null with the reason in `error`.
template <class Api>
const Api* LoadOnce(Library<Api> (*load)(), std::string* error) {
  static const Library<Api>& library = *new Library<Api>(load());
  if (library.error.empty()) return &library.api;
  *error = library.error;
  return nullptr;
}

// A library's handle for one device.
template <class Api>
struct DeviceSession {
  const Api* api = nullptr;
  Device device = 0;
  LibraryHandle handle = nullptr;
  std::mutex mu;  // of a handle that holds a stream: one thread at a time may use it
};

// The session of the current context's device; null when its handle cannot be made, with the library's `status`.
template <class Api>
DeviceSession<Api>* SessionHere(const Api& api, LibraryStatus* status) {
  static auto& mu = *new std::mutex;
  static auto& sessions = *new std::map<Device, DeviceSession<Api>>;
  Device device = 0;
  LoadDriver(nullptr)->CtxGetDevice(&device);
  std::lock_guard<std::mutex> lock(mu);
  DeviceSession<Api>& session = sessions[device];
  if (session.handle) return &session;
  session.api = &api;
  session.device = device;
  if ((*status = api.Create(&session.handle))) return session.handle = nullptr, nullptr;
  return &session;
}

// As SessionHere, with the library that the first call loads.  Null with the reason in `error`; `failed` puts a status
// into words.
template <class Api>
DeviceSession<Api>* SessionOfCurrentDevice(Library<Api> (*load)(),
                                           std::string (*failed)(const Api&, LibraryStatus, const char* doing),
                                           std::string* error) {
  const Api* api = LoadOnce(load, error);
  if (!api) return nullptr;
  LibraryStatus status = 0;
  DeviceSession<Api>* session = SessionHere(*api, &status);
  if (!session) *error = failed(*api, status, "making a handle");
  return session;
}

// --- cuBLAS and cuBLASLt -----------------------------------------------------------------------------------------

constexpr int kOpN = 0, kOpT = 1;
constexpr int kCompute32F = 68, kCompute64F = 70, kComputeFastTf32 = 77;

// cudaDataType and compute type of an element type; {-1, -1} for those that have no product.
inline std::pair<int, int> BlasTypes(int dtype, bool tf32) {
  switch (dtype) {
    case 1:
      return {0, tf32 ? kComputeFastTf32 : kCompute32F};
    case 2:
      return {1, kCompute64F};
    case 19:
      return {2, kCompute32F};
    case 14:
      return {14, kCompute32F};
    default:
      return {-1, -1};
  }
}

// The factors 1 and 0 of out = 1 * lhs @ rhs + 0 * out, as a product of a cudaDataType wants them.
struct BlasFactors {
  const void* one;
  const void* zero;
};
inline BlasFactors BlasFactorsOf(int type) {
  static const float floats[] = {1, 0};
  static const double doubles[] = {1, 0};
  return type == 1 ? BlasFactors{&doubles[0], &doubles[1]} : BlasFactors{&floats[0], &floats[1]};
}

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_CUSTOM_OPS_NVIDIA_LIBRARY_H_
