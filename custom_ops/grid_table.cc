#include "grid_table.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace tf_stitch {
namespace {

constexpr int kBaseShift = 48;               // an address word is base << kBaseShift | offset
constexpr int64_t kMost = int64_t{1} << 30;  // blocks of a phase, words

class TableMaker {
 public:
  TableMaker(const Program& program, const Plan& plan, const Grid& grid, GridTable* table)
      : p_(program), plan_(plan), table_(*table) {
    for (size_t i = 0; i < grid.bodies.size(); ++i) kernels_.emplace(grid.bodies[i], static_cast<int32_t>(i));
    for (size_t i = 0; i < grid.bases.size(); ++i) bases_.emplace(HolderOf(grid.bases[i]), static_cast<int64_t>(i) + 1);
  }

  // Adds the phase of steps [first, end).
  bool AddPhase(size_t first, size_t end, int64_t before) {
    blocks_ = 0;
    for (size_t i = first; i < end; ++i) {
      if (!plan_.steps[i].blocks) continue;
      if (!blocks_) table_.first_record.push_back(table_.records.size());
      blocks_ += plan_.steps[i].blocks;
      if (blocks_ > kMost || table_.words.size() > kMost) return false;
      AddProblem(p_.steps[i], plan_.steps[i], before);
    }
    table_.blocks += blocks_;
    table_.most_blocks = std::max(table_.most_blocks, blocks_);
    return true;
  }

  int64_t blocks() const { return blocks_; }

 private:
  using Holder = std::pair<Backing, uint32_t>;

  Holder HolderOf(uint32_t id) const { return {p_.buffers[id].backing, p_.buffers[id].backing_index}; }

  void AddProblem(const Step& s, const StepPlan& plan, int64_t before) {
    auto size = [](size_t n) { return static_cast<int32_t>(n); };
    table_.records.push_back({size(table_.first_record.size() - 1), kernels_.at(s.kernel), size(table_.words.size()),
                              size(s.buffers.size()), size(s.buffers.size() + plan.dims.size()),
                              static_cast<int32_t>(blocks_ - plan.blocks), static_cast<int32_t>(blocks_),
                              static_cast<int32_t>(before)});
    for (uint32_t id : s.buffers) table_.words.push_back(AddressWord(id));
    table_.words.insert(table_.words.end(), plan.dims.begin(), plan.dims.end());
    table_.shared_bytes = std::max(table_.shared_bytes, plan.shared_bytes);
  }

  int64_t AddressWord(uint32_t id) const {
    if (p_.buffers[id].backing == Backing::kArena) return plan_.arena_offset[id];
    return bases_.at(HolderOf(id)) << kBaseShift;
  }

  const Program& p_;
  const Plan& plan_;
  GridTable& table_;
  std::map<std::string, int32_t> kernels_;
  std::map<Holder, int64_t> bases_;
  int64_t blocks_ = 0;  // of the phase at hand
};

}  // namespace

bool MakeGridTable(const Program& program, const Plan& plan, const Grid& grid, GridTable* table) {
  *table = GridTable();
  TableMaker maker(program, plan, grid, table);
  size_t step = grid.first;
  int64_t before = 0;
  for (uint32_t count : grid.phases) {
    if (!maker.AddPhase(step, step + count, before)) return false;
    step += count;
    if (maker.blocks()) before = maker.blocks();
  }
  table->records.resize(table->records.size() + 2,
                        {static_cast<int32_t>(table->first_record.size()), 0, 0, 0, 0, 0, 0, 0});
  return true;
}

}  // namespace tf_stitch
