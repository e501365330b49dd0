// NumPy's .npz files: zip archives of .npy arrays (numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
#ifndef TF_STITCH_CUSTOM_OPS_HOST_NPZ_H_
#define TF_STITCH_CUSTOM_OPS_HOST_NPZ_H_

#include <map>
#include <string>

#include "model.h"
#include "tensor.h"

namespace tf_stitch::host {

// The arrays of a file, stored or deflated, as the inputs of `signature`, whose type tells bfloat16 from other bytes.
// Entries of other names are left out.  Throws Failure.
NamedTensors ReadNpz(const std::string& path, const Signature& signature);

// Writes tensors as numpy.savez does.  Throws Failure.
void WriteNpz(const std::string& path, const NamedTensors& tensors);

}  // namespace tf_stitch::host

#endif  // TF_STITCH_CUSTOM_OPS_HOST_NPZ_H_
