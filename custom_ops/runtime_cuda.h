// Runs programs on a GPU: loads the machine code that fits the device, launches its kernels, replays them as graphs.
//
// Plain C++ over the CUDA driver API (cuda_driver.h).
#ifndef TF_STITCH_CUSTOM_OPS_RUNTIME_CUDA_H_
#define TF_STITCH_CUSTOM_OPS_RUNTIME_CUDA_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "cuda_grid.h"
#include "library_cuda.h"
#include "plan.h"
#include "program.h"

namespace tf_stitch {

// A program's kernels, loaded into one context.  Equal code is loaded once per context, and dropped with its last user
// once the device has finished.
class CudaCode {
 public:
  // Returns null and sets `error` when no code fits the device or it cannot be loaded.
  static std::shared_ptr<CudaCode> Load(const Program& program, cuda::Context context, std::string* error);
  ~CudaCode();

  const cuda::Driver& driver() const { return driver_; }
  cuda::Context context() const { return context_; }
  cuda::Function kernel(size_t step) const { return kernels_[step].function; }
  cuda::Function many(size_t step) const { return kernels_[step].many; }  // null: built without TS_MANY
  int64_t max_shared_bytes(size_t step) const { return kernels_[step].max_shared_bytes; }
  cuda::Function grid_kernel(size_t grid) const { return grids_[grid].function; }
  cuda::Function copy_pieces() const {
    return copy_pieces_;
  }  // what joins requests (merge_cuda.h); null: built without
  int64_t max_shared_bytes_of_grid(size_t grid) const { return grids_[grid].max_shared_bytes; }

  // Records what `enqueue(stream)` enqueues as a graph, which the caller destroys.  "" or the error.
  std::string Capture(const std::function<std::string(cuda::Stream)>& enqueue, cuda::Graph* graph);

 private:
  struct Kernel {
    cuda::Function function = nullptr, many = nullptr;
    int max_shared_bytes = 0;
  };

  CudaCode(const cuda::Driver& driver, cuda::Context context) : driver_(driver), context_(context) {}

  const cuda::Driver& driver_;
  cuda::Context context_;
  std::shared_ptr<void> modules_;  // that the kernels are in
  std::vector<Kernel> kernels_;    // by step; null for steps that are not kernels
  std::vector<Kernel> grids_;      // by grid
  cuda::Function copy_pieces_ = nullptr;
  std::mutex mu_;
  cuda::Stream capturing_ = nullptr;  // made on first use
};

// What a run of a program's plan needs on a GPU: launches made ready, library calls with their algorithms, graphs.
//
// A graph is kept with the addresses that its nodes hold.  TensorFlow's allocator gives a repeated step the same
// addresses, so most runs find a graph that is ready.  Addresses that come for the first time are launched without a
// graph; when they come again a graph is made, or, once there are many, the least recently used graph gets them.  The
// order of a graph's nodes follows from the buffers that the steps read and write.
//
// A library call has to be recorded anew to get other addresses, which costs some 50 us each.  So, where there are any,
// a graph has an arena of its own, within bounds: what lies between steps stays where it is, and only calls that read
// an input or write an output of the program ever move.  Launches of one graph run one after the other, on whichever
// streams, so its arena is never used twice at a time.
class CudaPlan : public PlanExtra {
 public:
  // Is told of a launch outside of graphs: what it runs when it starts, null when it has been made.
  using Observe = std::function<void(const std::string* what)>;

  // Never fails: error() says why the plan cannot run here.  The context must be current.  Without `grids` all steps
  // are launched one by one.
  CudaPlan(const Program& program, const Plan& plan, std::shared_ptr<CudaCode> code, bool tf32, bool grids);
  ~CudaPlan() override;

  const std::string& error() const { return error_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Runs all steps on `stream`.  `memory` has the device address of every buffer; `workspace` has workspace_bytes().
  // With `observe` (may be null) no graph is used.  "" or what failed: the CUDA error, the kernel and the node that it
  // comes from.  `note` gets a reason when this run gave up graphs for good.
  std::string Run(void* const* memory, void* workspace, cuda::Stream stream, bool graphs, const Observe* observe,
                  std::string* note);

  // Replays a graph that holds these addresses.  False, and nothing was enqueued, when there is none; `error` as above.
  bool Replay(void* const* memory, void* workspace, cuda::Stream stream, std::string* error);
  bool has_graphs();  // whether some addresses came again

  // Launches, in order, and what superkernels need of them (coalesce_cuda.h).  Each is a step that has work, or the
  // steps of a grid, of which step() is the first.
  size_t launches() const { return launches_.size(); }
  size_t step(size_t launch) const { return launches_[launch].step; }
  bool is_grid(size_t launch) const { return launches_[launch].grid != nullptr; }
  const std::shared_ptr<CudaCode>& code() const { return code_; }
  bool tf32() const { return tf32_; }
  // The parameter block of a launch that is a step's kernel.
  void AppendWords(size_t launch, void* const* memory, std::vector<uint64_t>* out) const;
  // Enqueues one launch; the context must be current.  "" or what failed.
  std::string Enqueue(size_t launch, void* const* memory, void* workspace, cuda::Stream stream) const;

  // True when a step would get a tensor at an address that it cannot take (wide accesses, the matrix library).
  bool Misaligned(void* const* memory) const;

 private:
  struct Launch {
    size_t step, end;                        // its steps; more than one for a grid
    cuda::Function kernel;                   // null: a library step
    std::unique_ptr<LibraryWork> library;    // of a library step
    size_t first_word;                       // of the kernel's parameter block in words_
    std::unique_ptr<CudaGrid> grid;          // null: no grid
    unsigned blocks, threads, shared_bytes;  // of a kernel
    int64_t workspace_at = 0;                // in the workspace: a library step's own part, a grid's counters
    size_t part = 0;                         // of the workspace, of a library step

    size_t workspace_bytes() const { return library ? library->workspace_bytes() : 0; }
  };
  struct Instance {
    std::vector<void*> addresses;  // that it is for, as Addresses() gives them
    std::vector<void*> memory;     // what its nodes hold; the workspace is last
    cuda::GraphExec exec;
    size_t slot;  // its counters
    void* arena;  // null: it has none of its own
  };
  static constexpr size_t kInstances = 8;
  static constexpr size_t kNoSlot = kInstances;
  // Library steps that need a workspace take turns with as many parts of it, so that neighbours can run side by side.
  static constexpr size_t kParts = 4;

  std::string AddLibraryStep(size_t step, bool tf32);
  std::string AddKernel(size_t step);
  bool AddGrid(size_t grid);
  void PlaceWorkspace();
  void FindWriters();
  bool MustFollow(const Launch& later, const Launch& earlier) const;
  bool MustFollow(const Step& later, const Step& earlier) const;
  bool Overlap(uint32_t x, uint32_t y) const;
  std::vector<uint64_t> Words(void* const* memory, void* workspace, size_t slot) const;
  cuda::KernelNodeParams NodeParams(const Launch& launch, void** parameters) const;
  std::string EnqueueLibraryStep(const Launch& launch, void* const* memory, void* workspace, cuda::Stream stream) const;
  std::string EnqueueKernel(const Launch& launch, uint64_t* words, cuda::Stream stream) const;
  std::string ClearCounters(int64_t at, size_t bytes, void* workspace, cuda::Stream stream) const;
  std::string LaunchAll(void* const* memory, void* workspace, cuda::Stream stream, const Observe* observe) const;

  std::vector<void*> Addresses(void* const* memory, void* workspace) const;
  int64_t OwnBytes() const { return plan_.arena_bytes + workspace_bytes_; }
  std::vector<void*> PlacedIn(void* arena, std::vector<void*> addresses) const;
  void* TakeArena();
  void GiveBack(const std::vector<void*>& arenas);
  Instance* Find(const std::vector<void*>& addresses);
  std::string LaunchFront(cuda::Stream stream);
  std::string MakeGraph(const std::vector<void*>& memory);
  std::string NewInstance(const std::vector<void*>& addresses, void* arena);
  std::string Update(Instance* instance, const std::vector<void*>& addresses, bool fresh);
  std::string Readdress(const std::vector<void*>& addresses, bool* usable);
  std::string Where(const Launch& launch) const;
  std::string Label(const Launch& launch) const;

  const Program& program_;
  const Plan& plan_;
  const std::shared_ptr<CudaCode> code_;
  const bool tf32_;
  std::string error_;
  std::vector<Launch> launches_;      // of steps that have work
  std::vector<const Step*> writers_;  // by buffer: the step that writes it; null for inputs and what no step touches
  std::vector<uint64_t> words_;       // parameter blocks of all kernels; addresses are filled in by each run
  int64_t workspace_bytes_ = 0;
  int64_t counters_at_ = 0, counter_bytes_ = 0;  // in the workspace: the counters of a run outside of graphs
  std::atomic<bool> graphs_{true};

  std::mutex mu_;             // of what follows
  bool owns_arenas_ = false;  // instances do
  cuda::Graph graph_ = nullptr;
  std::vector<void*> graph_memory_;     // what its nodes hold
  std::vector<cuda::GraphNode> nodes_;  // by launch
  std::list<Instance> instances_;       // most recent first
  std::vector<size_t> seen_;            // hashes of addresses that were launched without a graph, oldest first
  int misses_ = 0;                      // runs in a row that found no graph
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_RUNTIME_CUDA_H_
