// The process's coalescers, one per device, and whether coalescing is on.
#ifndef TF_STITCH_CUSTOM_OPS_COALESCING_H_
#define TF_STITCH_CUSTOM_OPS_COALESCING_H_

#include <functional>
#include <memory>
#include <string>

#include "coalescer.h"

namespace tf_stitch {

struct CoalescingOptions {
  Coalescer::Options coalescer;
  int workers = 1;                           // superkernels at a time on the CPU
  int lanes = 4;                             // streams on a GPU
  int64_t merge_bytes = int64_t{256} << 20;  // memory of joined runs, on each device
};

// The coalescer of a device, made by `make` on first use; null while coalescing is off.  `key` tells devices apart
// (null: the CPU).
using MakeDevice = std::function<std::unique_ptr<Device>(const CoalescingOptions&)>;
std::shared_ptr<Coalescer> CoalescerOf(const void* key, const MakeDevice& make);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_COALESCING_H_
