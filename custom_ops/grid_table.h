// The table that a grid kernel walks (tf_stitch/codegen/include/ts_grid.h), for one plan.
#ifndef TF_STITCH_CUSTOM_OPS_GRID_TABLE_H_
#define TF_STITCH_CUSTOM_OPS_GRID_TABLE_H_

#include <cstdint>
#include <vector>

#include "plan.h"
#include "program.h"

namespace tf_stitch {

// ts_record of ts_grid.h.
struct GridRecord {
  int32_t phase, kernel, words, addresses, count, begin, end, before;
};

constexpr int32_t kKeeps = 1 << 16, kRecalls = 1 << 17;  // added to a record's kernel

// Phases without work are left out.  Two records end the table.
struct GridTable {
  std::vector<GridRecord> records;
  std::vector<int64_t> words;
  std::vector<size_t> first_record;  // of each phase
  int64_t blocks = 0;                // of all phases
  int64_t most_blocks = 0;           // of the phase that has the most
  int64_t shared_bytes = 0;          // of one block
};

// The table of a program's grid; false when it has more blocks or words than its records can count.
bool MakeGridTable(const Program& program, const Plan& plan, const Grid& grid, GridTable* table);

// Marks problems whose operands the next phase finds in shared memory when the grid has so many thread blocks: those of
// the same body, blocks and operands there, if no thread block has two blocks of either phase.  Returns how many bytes
// a block keeps at most.
int64_t MarkKept(const Grid& grid, int64_t thread_blocks, GridTable* table);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_GRID_TABLE_H_
