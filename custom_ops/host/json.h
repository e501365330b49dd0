// Requests and answers as JSON, in the form of TensorFlow Serving's REST API.
#ifndef TF_STITCH_CUSTOM_OPS_HOST_JSON_H_
#define TF_STITCH_CUSTOM_OPS_HOST_JSON_H_

#include <string>

#include "model.h"
#include "tensor.h"

namespace tf_stitch::host {

// A request: {"inputs": {NAME: nested lists}}, or {"inputs": nested lists} where there is one input, or
// {"instances": [...]} with one entry per element of the batch.  64-bit integers past 2^53 may be strings of digits;
// bytes are {"b64": ...}.  Throws Failure.
NamedTensors ReadJson(const std::string& text, const Signature& signature);

// {"outputs": {NAME: nested lists}}; numbers that are not finite are NaN, Infinity, -Infinity, as Serving has them.
std::string WriteJson(const NamedTensors& tensors);

}  // namespace tf_stitch::host

#endif  // TF_STITCH_CUSTOM_OPS_HOST_JSON_H_
