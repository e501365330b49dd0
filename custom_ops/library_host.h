// Library steps on the CPU: plain loops, so that programs with library steps run, and are tested, without a GPU.
#ifndef TF_STITCH_CUSTOM_OPS_LIBRARY_HOST_H_
#define TF_STITCH_CUSTOM_OPS_LIBRARY_HOST_H_

#include <cstdint>

#include "plan.h"
#include "program.h"

namespace tf_stitch {

// Computes blocks [begin, end) of a library step's `plan.blocks`: rows of a matrix product (those of all matrices of
// the batch), places of a convolution's result, rows of its gradient by the filter.  `buffers` are the step's, of
// element type `dtype`.  Half types accumulate in float32 and round once.
void RunLibraryBlocks(const Step& step, int dtype, const StepPlan& plan, void* const* buffers, int64_t begin,
                      int64_t end);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_LIBRARY_HOST_H_
