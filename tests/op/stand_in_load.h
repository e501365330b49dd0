// How a stand-in for the CUDA driver takes the driver's place: each program that includes this says what Make gives.
#ifndef TF_STITCH_TESTS_OP_STAND_IN_LOAD_H_
#define TF_STITCH_TESTS_OP_STAND_IN_LOAD_H_

#include <string>

#include "../../custom_ops/cuda_driver.h"

namespace tf_stitch::cuda {
namespace {

Driver Make();  // the stand-in

}  // namespace

const Driver* LoadDriver(std::string*) {
  static const Driver driver = Make();
  return &driver;
}
std::string Describe(const Driver&, Result) { return "CUDA_ERROR_FAKE (fake)"; }

}  // namespace tf_stitch::cuda

#endif  // TF_STITCH_TESTS_OP_STAND_IN_LOAD_H_
