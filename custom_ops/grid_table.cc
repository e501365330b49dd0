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

int64_t MarkKept(const Grid& grid, int64_t thread_blocks, GridTable* table) {
  std::vector<GridRecord>& records = table->records;
  size_t phases = table->first_record.size();
  auto end_of = [&](size_t phase) { return phase + 1 < phases ? table->first_record[phase + 1] : records.size() - 2; };
  auto single = [&](size_t phase) { return records[end_of(phase) - 1].end <= thread_blocks; };
  auto same = [&](const GridRecord& a, const GridRecord& b) {
    int32_t kernel = a.kernel & (kKeeps - 1);
    if (kernel != (b.kernel & (kKeeps - 1)) || a.begin != b.begin || a.end != b.end) return false;
    const std::vector<uint32_t>& inputs = grid.keeps[static_cast<size_t>(kernel)].inputs;
    return std::all_of(inputs.begin(), inputs.end(), [&](uint32_t i) {
      return table->words[static_cast<size_t>(a.words) + i] == table->words[static_cast<size_t>(b.words) + i];
    });
  };
  int64_t kept = 0;
  for (size_t p = 0; p + 1 < phases; ++p) {
    if (!single(p) || !single(p + 1)) continue;
    for (size_t i = table->first_record[p]; i < end_of(p); ++i) {
      auto bytes = static_cast<int64_t>(grid.keeps[static_cast<size_t>(records[i].kernel & (kKeeps - 1))].bytes);
      auto next = std::find_if(records.begin() + static_cast<int64_t>(end_of(p)),
                               records.begin() + static_cast<int64_t>(end_of(p + 1)),
                               [&](const GridRecord& r) { return bytes && same(records[i], r); });
      if (next == records.begin() + static_cast<int64_t>(end_of(p + 1))) continue;
      next->kernel |= kRecalls;
      if (!(records[i].kernel & kRecalls)) records[i].kernel |= kKeeps;
      kept = std::max(kept, bytes);
    }
  }
  return kept;
}

}  // namespace tf_stitch
