// Library steps on a GPU: what a step calls, made ready for its sizes.
#ifndef TF_STITCH_CUSTOM_OPS_LIBRARY_CUDA_H_
#define TF_STITCH_CUSTOM_OPS_LIBRARY_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "program.h"

namespace tf_stitch {

class LibraryWork {
 public:
  virtual ~LibraryWork() = default;
  virtual size_t workspace_bytes() const = 0;
  // Enqueues the work.  `buffers` has the device addresses of the step's buffers.  "" or the error.
  virtual std::string Run(void* const* buffers, void* workspace, cuda::Stream stream) const = 0;
  // True when every run enqueues the same kernels, so that graphs that hold them can be given other addresses.
  virtual bool has_fixed_nodes() const { return true; }
};

// The work of a library step whose dims have the values `dims`, on the current context's device.  Null with the reason
// in `error` when a library is missing or cannot do it.
std::unique_ptr<LibraryWork> MakeLibraryWork(const Step& step, int dtype, const std::vector<int64_t>& dims,
                                             const cuda::Driver& driver, bool tf32, std::string* error);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_LIBRARY_CUDA_H_
