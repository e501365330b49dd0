// How the C interface of the scheduler reports failures.
#ifndef TF_STITCH_CUSTOM_OPS_SCHEDULER_ERROR_H_
#define TF_STITCH_CUSTOM_OPS_SCHEDULER_ERROR_H_

#include <string>

namespace tf_stitch {

// Keeps a sentence ("" for success) for tfs_scheduler_last_error in this thread; returns what a C function returns.
int SchedulerResult(std::string error);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_SCHEDULER_ERROR_H_
