#include "merge.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hash.h"

namespace tf_stitch {
namespace {

int64_t Aligned(int64_t bytes) { return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment; }

// Where an input's dims begin in a signature.
size_t FirstDim(const Program& program, size_t input) {
  size_t position = 0;
  for (size_t i = 0; i < input; ++i) position += program.buffers[program.inputs[i]].shape.size();
  return position;
}

// Positions of a signature that are the batch; none where a program has none.
std::vector<size_t> BatchDims(const Program& program) {
  std::vector<size_t> found;
  if (!program.batch) return found;
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    uint32_t axis = program.batch->inputs[i];
    if (axis != Batch::kNone) found.push_back(FirstDim(program, i) + axis);
  }
  return found;
}

// By input: whether a step reads it, by its own name or as what an output is an alias of.
std::vector<bool> InputsRead(const Program& program) {
  std::vector<bool> read(program.inputs.size(), false);
  for (const Buffer& b : program.buffers) {
    if (b.backing == Backing::kInput && b.first_step >= 0) read[b.backing_index] = true;
  }
  return read;
}

bool IsOwn(const Program& program, uint32_t output) {  // and no alias of something else
  const Buffer& b = program.buffers[program.outputs[output]];
  return b.backing == Backing::kOutput && b.backing_index == output;
}

uint64_t HashOfSteps(const Program& program) {
  uint64_t h = kHashOfNothing;
  for (const Step& s : program.steps) {
    h = Mix(h, HashOfBytes(s.kind == Step::Kind::kLibrary ? NameOf(s.call) : s.kernel));
    for (int64_t flag : FlagsOf(s)) h = Mix(h, static_cast<uint64_t>(flag));
    if (!s.buffers.empty()) h = Mix(h, static_cast<uint64_t>(program.buffers[s.buffers[0]].dtype));
  }
  return h;
}

}  // namespace

Mergeable::Mergeable(const Program& program, const Plan& plan, std::string_view device) {
  std::vector<size_t> along = BatchDims(program);
  if (along.empty()) return;
  key_.rows = plan.signature[along[0]];
  uint64_t h = Mix(HashOfSteps(program), HashOfBytes(device));
  for (int64_t v : JoinedSignature(program, plan.signature, 0)) h = Mix(h, static_cast<uint64_t>(v));
  key_.key = key_.shape = h | 1;  // 0 is none
  std::vector<bool> read = InputsRead(program);
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    uint32_t id = program.inputs[i];
    if (program.batch->inputs[i] == Batch::kNone && read[i] && plan.buffer_bytes[id]) shared_.push_back(id);
  }
}

MergeKey Mergeable::KeyOf(const void* owner, void* const* memory) const {
  MergeKey key = key_;
  if (!key.key) return key;
  key.key = Mix(key.key, reinterpret_cast<uint64_t>(owner));
  for (uint32_t id : shared_) key.key = Mix(key.key, reinterpret_cast<uint64_t>(memory[id]));
  key.key |= 1;
  return key;
}

Signature JoinedSignature(const Program& program, const Signature& first, int64_t rows) {
  Signature joined = first;
  for (size_t position : BatchDims(program)) joined[position] = rows;
  return joined;
}

void CopyPiece(const Piece& piece) {
  for (int64_t i = 0; i < piece.rows; ++i) {
    memcpy(piece.to + i * piece.to_step, piece.from + i * piece.from_step, static_cast<size_t>(piece.bytes));
  }
}

// --- joined runs -------------------------------------------------------------------------------------------

std::string JoinedRun::Lay(const Program& program, const Plan& plan, const std::vector<Member>& members) {
  program_ = &program;
  plan_ = &plan;
  members_ = members;
  std::vector<size_t> along = BatchDims(program);
  if (along.empty()) return "its program has no batch";
  if (!plan.usable) return plan.why_not;
  along_ = along[0];
  int64_t rows = 0;
  for (const Member& m : members) {
    if (JoinedSignature(program, m.plan->signature, RowsOf(plan)) != plan.signature) return "their sizes differ";
    rows += RowsOf(*m.plan);
  }
  if (rows != RowsOf(plan)) return "the plan is for another number of elements";
  memory_.assign(program.buffers.size(), nullptr);
  std::vector<bool> read = InputsRead(program);
  for (uint32_t i = 0; i < program.inputs.size(); ++i) {
    if (read[i] && !LayInput(i)) return "input " + std::to_string(i) + " is not the same in all of them";
  }
  for (uint32_t i = 0; i < program.outputs.size(); ++i) {
    if (IsOwn(program, i) && !LayOutput(i)) return "output " + std::to_string(i) + " is not made of theirs";
  }
  arena_at_ = bytes_;
  bytes_ += Aligned(plan.arena_bytes);
  return "";
}

bool JoinedRun::LayInput(uint32_t input) {
  uint32_t id = program_->inputs[input], axis = program_->batch->inputs[input];
  if (axis != Batch::kNone) {
    auto first = plan_->signature.begin() + static_cast<std::ptrdiff_t>(FirstDim(*program_, input));
    std::vector<int64_t> dims(first, first + static_cast<std::ptrdiff_t>(program_->buffers[id].shape.size()));
    return AddParts(id, [&](const Plan&) { return InsideOf(dims, axis, 1); }, &gathered_);
  }
  memory_[id] = members_[0].memory[id];
  return plan_->buffer_bytes[id] == 0 ||
         std::all_of(members_.begin(), members_.end(), [&](const Member& m) { return m.memory[id] == memory_[id]; });
}

bool JoinedRun::LayOutput(uint32_t output) {
  uint32_t id = program_->outputs[output], axis = program_->batch->outputs[output].axis;
  if (axis != Batch::kNone) {
    auto inside = [&](const Plan& p) { return InsideOf(p.output_dims[output], axis, p.batch_inner[output]); };
    return AddParts(id, inside, &scattered_);
  }
  int64_t at = Own(id), bytes = plan_->buffer_bytes[id];
  for (const Member& m : members_) {  // the whole of it
    if (m.plan->buffer_bytes[id] != bytes) return false;
    if (bytes) scattered_.push_back({static_cast<char*>(m.memory[id]), at, 1, bytes, bytes, bytes});
  }
  return true;
}

// Takes room for an input or output; returns where.
int64_t JoinedRun::Own(uint32_t buffer) {
  int64_t at = bytes_;
  bytes_ += Aligned(plan_->buffer_bytes[buffer]);
  own_.emplace_back(buffer, at);
  return at;
}

// Elements of one element of the batch that lie next to each other; -1 when that is absurd.
int64_t JoinedRun::InsideOf(const std::vector<int64_t>& dims, uint32_t axis, int64_t inner) {
  int64_t inside = inner;
  for (size_t i = axis + 1; i < dims.size(); ++i) {
    if (__builtin_mul_overflow(inside, dims[i], &inside)) return -1;
  }
  return inside;
}

// Every part is what the sizes say, so all copies stay within it and within the whole; else false.
bool JoinedRun::AddParts(uint32_t buffer, const std::function<int64_t(const Plan&)>& inside_of,
                         std::vector<Part>* parts) {
  int64_t at = Own(buffer), total = plan_->buffer_bytes[buffer], rows = RowsOf(*plan_);
  int64_t inside = inside_of(*plan_), row = 0, whole = 0;
  bool sensible = inside > 0 && !__builtin_mul_overflow(inside, DTypeSize(program_->buffers[buffer].dtype), &row) &&
                  !__builtin_mul_overflow(rows, row, &whole) && whole > 0 && total % whole == 0;
  if (total && !sensible) return false;
  int64_t outer = total ? total / whole : 0;
  for (const Member& m : members_) {
    int64_t mine = RowsOf(*m.plan) * (total ? row : 0);
    if (m.plan->buffer_bytes[buffer] != outer * mine) return false;
    if (mine && inside_of(*m.plan) != inside) return false;
    if (outer && mine) parts->push_back({static_cast<char*>(m.memory[buffer]), at, outer, mine, mine, whole});
    at += mine;
  }
  return true;
}

void JoinedRun::Place(char* base) {
  for (const auto& [buffer, at] : own_) memory_[buffer] = base + at;
  for (size_t id = 0; id < memory_.size(); ++id) {
    const Buffer& b = program_->buffers[id];
    memory_[id] = b.backing == Backing::kInput    ? memory_[program_->inputs[b.backing_index]]
                  : b.backing == Backing::kOutput ? memory_[program_->outputs[b.backing_index]]
                                                  : base + arena_at_ + plan_->arena_offset[id];
  }
  gathers_.clear();
  scatters_.clear();
  for (const Part& p : gathered_) gathers_.push_back({p.own, base + p.at, p.rows, p.bytes, p.own_step, p.step});
  for (const Part& p : scattered_) scatters_.push_back({base + p.at, p.own, p.rows, p.bytes, p.step, p.own_step});
}

}  // namespace tf_stitch
