// The superkernel scheduler's C interface: what tf_stitch/serving calls through ctypes, and what any other host of the
// op library may call.
//
// Every function may be called from any thread.  Those that return int return 0 on success; else
// tfs_scheduler_last_error() has one sentence that says why.
#ifndef TF_STITCH_CUSTOM_OPS_SCHEDULER_C_API_H_
#define TF_STITCH_CUSTOM_OPS_SCHEDULER_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Turns coalescing on: from now on stitched ops hand their programs to one scheduler per device.  It is off when the
// library is loaded, unless the environment variable TF_STITCH_COALESCE is set (to "1", or to the options).  Called
// again it drains the schedulers and starts them with the new options; tenants and their statistics stay.
// `options_json` is an object (or null, or "") with any of these numbers:
//   look_ahead_us   device time that may be enqueued on a GPU ahead of what runs there (200)
//   max_wait_us     what one request may wait for company on the CPU in all, within its slack (100)
//   under_way       superkernels of one kind that run at a time on a GPU while more requests of that kind gather (2)
//   max_pack        problems in one superkernel at most (64)
//   max_instances   requests held at most, per device; the threads that bring more wait (4096)
//   workers         superkernels under way at a time on the CPU, each shared out to TensorFlow's threads (1; 256 at
//                   most)
//   lanes           streams that superkernels of different clusters run on side by side on a GPU (4; 256 at most)
//   alone           1: a request that comes when nothing else is held is run by the thread that brings it; 0: never (1)
//   merge           1: requests of one program that share its weights run as one, joined along their batch, where that
//                   is proven to give their own answers (up to rounding) and measured to be no slower; 0: never;
//                   2: also where that is slower (1)
//   max_merge       elements of a joined batch at most (256)
//   merge_mb        megabytes that joined runs may take at a time, per device (256)
//   drift           measured over estimated time above which a tenant is throttled, relative to all others (2)
// and the string
//   estimates       file that measured times are kept in (the performance library); read now, written when the
//                   scheduler stops ("": none)
int tfs_scheduler_enable(const char* options_json);

// Checks options as tfs_scheduler_enable does, and changes nothing.
int tfs_scheduler_check(const char* options_json);

// Turns coalescing off; waits until all held requests are answered.
void tfs_scheduler_disable(void);

// 1 while coalescing is on.
int tfs_scheduler_enabled(void);

// Sets what a tenant is entitled to, on all devices.  A tenant is the name in the session's metadata
// (ConfigProto.experimental.session_metadata, which TensorFlow Serving sets to the model's name), or the program's name
// where there is none.  Members of the object, all optional:
//   slo_ms          a request without a deadline of its own has this one, from its arrival (0: none)
//   priority        "latency" or "best_effort", which only fills what latency tenants leave ("latency")
//   weight          share of device time against tenants of the same priority (1)
//   max_in_flight   requests that are scheduled at a time; more wait in the tenant's queue (0: no limit)
//   max_queue       requests that wait so at most; more are rejected with ResourceExhausted (0: no limit)
int tfs_scheduler_set_tenant(const char* name, const char* options_json);

// Forgets a tenant: its held requests are answered, later ones of that name have the defaults.
int tfs_scheduler_remove_tenant(const char* name);

// Writes statistics as JSON, cut to `size` bytes with a final zero; returns the bytes that all of it needs, the zero
// included.
//
//   {"enabled": true,
//    "tenants": {NAME: {"priority": "latency", "slo_ms": 20.0, "throttled": false,
//        "requests": N, "completed": N, "rejected": N, "cancelled": N, "failed": N, "missed_deadline": N,
//        "in_flight": N, "queued": N, "device_us": X, "drift": X,
//        "latency_ms": {"bounds": [0.1, ...], "counts": [one more than bounds], "sum": X, "count": N}}},
//    "devices": [{"name": "CPU", "superkernels": N, "steps": N, "coalescing_factor": X, "merged_requests": N,
//        "merged_runs": N, "unmerged_requests": N, "busy_us": X, "busy_share": X, "held": N, "backlog_us": X}]}
//
// `requests` counts arrivals: completed + rejected + cancelled + failed + those still held.  `steps` counts the steps
// of requests that the superkernels held, coalescing_factor is steps over superkernels.  `merged_requests` ran as
// `merged_runs` joined ones; `unmerged_requests` were to, but had to run again by themselves.  busy_share is the share
// of the time since enable() that the device had work.  A tenant's figures add up over devices.
int64_t tfs_scheduler_stats_json(char* buffer, int64_t size);

// Waits until no request is held; 0 then, 1 when `timeout_ms` (negative: no limit) passed before.
int tfs_scheduler_drain(int64_t timeout_ms);

// A matrix product out = lhs @ rhs on the GPU, row-major and dense: lhs m x k, rhs k x n, float32.  Addresses are
// multiples of 16 bytes.
typedef struct {
  const void *lhs, *rhs;
  void* out;
  int64_t m, n, k;
} tfs_product;

// How tfs_run_products runs products that come from as many streams of requests.
enum tfs_products_how {
  TFS_SUPERKERNEL = 0,  // as the scheduler packs them
  TFS_TIMESLICE = 1,    // one after the other, the device waited for in between
  TFS_STREAMS = 2       // each on a stream of its own
};

// Runs `count` products `rounds` times in the calling thread's CUDA context and sets `us` to the microseconds of a
// round, the host's work included: rounds follow each other without waiting (but for TFS_TIMESLICE), as under load. For
// benchmarks.
int tfs_run_products(const tfs_product* products, int64_t count, int tf32, int how, int rounds, double* us);

// Why the last call of this thread failed; "" when it did not.
const char* tfs_scheduler_last_error(void);

#ifdef __cplusplus
}
#endif

#endif  // TF_STITCH_CUSTOM_OPS_SCHEDULER_C_API_H_
