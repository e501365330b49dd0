// Requests of one program that run as one, joined along its batch (Program::batch, which tf_stitch/ir/separable.py
// proves): which requests may, and what has to be copied where.
//
// Plain C++.  What a program says of its batch is taken as a claim: sizes that contradict it are refused, so a wrong
// claim costs right answers but never reads or writes outside of a buffer.
#ifndef TF_STITCH_CUSTOM_OPS_MERGE_H_
#define TF_STITCH_CUSTOM_OPS_MERGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan.h"
#include "program.h"
#include "scheduler.h"

namespace tf_stitch {

// The plan for a signature of the request's program, ready to run; null when there is none.
using PlanFor = std::function<std::shared_ptr<const Plan>(const Signature& signature)>;

// Memory that joined runs may take together.
class MergeBudget {
 public:
  explicit MergeBudget(int64_t bytes) : left_(bytes) {}

  // False when there is not so much left.
  bool Take(int64_t bytes) {
    if (left_.fetch_sub(bytes) >= bytes) return true;
    left_ += bytes;
    return false;
  }
  void Give(int64_t bytes) { left_ += bytes; }

 private:
  std::atomic<int64_t> left_;
};

// What requests of one plan share in being joined; kept with the plan.
class Mergeable {
 public:
  // `device` tells apart what takes other times to run.
  Mergeable(const Program& program, const Plan& plan, std::string_view device);

  // The key of a request of this plan: equal for requests that may be joined.  `owner` tells apart programs, `memory`
  // has the address of every buffer.
  MergeKey KeyOf(const void* owner, void* const* memory) const;

 private:
  MergeKey key_;                  // but for addresses
  std::vector<uint32_t> shared_;  // the inputs (by buffer) that have to be the same memory
};

// The signature of requests joined that have `rows` elements along the batch together; `first` is one's own.
Signature JoinedSignature(const Program& program, const Signature& first, int64_t rows);

// Copies `rows` runs of `bytes` bytes; the next run lies a step further on either side.
struct Piece {
  const char* from;
  char* to;
  int64_t rows, bytes, from_step, to_step;
};
void CopyPiece(const Piece& piece);

// A run of a program in place of several: where its buffers lie and what has to be copied before and after it.
class JoinedRun {
 public:
  struct Member {
    const Plan* plan;
    void* const* memory;  // address of every buffer
  };

  // Requests of one program as members, and the rows that they have together; false when one is of another program.
  template <class Own, class Request>
  static bool MembersOf(const std::vector<Request*>& requests, std::vector<Member>* members, int64_t* rows) {
    const Program* program = static_cast<const Own&>(*requests.front()).program;
    for (const Request* request : requests) {
      const auto& r = static_cast<const Own&>(*request);
      if (r.program != program) return false;
      members->push_back({r.plan.get(), r.memory});
      *rows += r.merge.rows;
    }
    return true;
  }

  // What keeps these from being joined as `plan`, or "".
  std::string Lay(const Program& program, const Plan& plan, const std::vector<Member>& members);

  // Memory for inputs, outputs and the arena; a multiple of kArenaAlignment.
  int64_t bytes() const { return bytes_; }

  // Puts the run's own buffers into memory at `base`, a multiple of kArenaAlignment.
  void Place(char* base);

  void* const* memory() const { return memory_.data(); }          // address of every buffer
  const std::vector<Piece>& gathers() const { return gathers_; }  // before it runs
  const std::vector<Piece>& scatters() const { return scatters_; }

 private:
  // A request's part of an input or output: `rows` runs of `bytes` bytes.
  struct Part {
    char* own;   // in the request's memory
    int64_t at;  // in the run's
    int64_t rows, bytes, own_step, step;
  };

  int64_t RowsOf(const Plan& plan) const { return plan.signature[along_]; }
  bool LayInput(uint32_t input);
  bool LayOutput(uint32_t output);
  int64_t Own(uint32_t buffer);
  static int64_t InsideOf(const std::vector<int64_t>& dims, uint32_t axis, int64_t inner);
  bool AddParts(uint32_t buffer, const std::function<int64_t(const Plan&)>& inside_of, std::vector<Part>* parts);

  const Program* program_ = nullptr;
  const Plan* plan_ = nullptr;
  std::vector<Member> members_;
  size_t along_ = 0;  // a place of the batch in signatures
  int64_t bytes_ = 0;
  int64_t arena_at_ = 0;
  std::vector<std::pair<uint32_t, int64_t>> own_;  // inputs and outputs (by buffer) in the run's memory, and where
  std::vector<Part> gathered_, scattered_;
  std::vector<void*> memory_;
  std::vector<Piece> gathers_, scatters_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_MERGE_H_
