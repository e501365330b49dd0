// Fuzzes what reads programs: parses and plans them.  Built with sanitizers: a read out of bounds, an overflow or a
// leak ends it with an error.  With libFuzzer (TF_STITCH_LIBFUZZER) this is its target; else it damages programs
// itself.
//
//   fuzz_program SEED ROUNDS FILE...     the files hold sections without the header; 0 rounds replays them as they are
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../custom_ops/grid_table.h"
#include "../../custom_ops/merge.h"
#include "../../custom_ops/plan.h"
#include "../../custom_ops/program.h"

namespace {

int64_t g_parsed = 0, g_usable = 0, g_joined = 0;

// The header that serialize.seal writes; bit by bit, so that it checks the library's own checksum too.
std::string Seal(const std::string& payload) {
  uint32_t crc = 0xFFFFFFFFu;
  for (unsigned char byte : payload) {
    crc ^= byte;
    for (int k = 0; k < 8; ++k) crc = (crc & 1) ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
  }
  crc ^= 0xFFFFFFFFu;
  std::string data = "TFSP\x02";
  for (int i = 0; i < 4; ++i) data += static_cast<char>(crc >> (8 * i));
  return data + payload;
}

// Memory of a request's own for every buffer that is small enough; the others are nowhere.
struct Memory {
  Memory(const tf_stitch::Program& program, const tf_stitch::Plan& plan) {
    for (const tf_stitch::Buffer& b : program.buffers) {
      size_t id = addresses.size();
      addresses.push_back(nullptr);
      if (plan.buffer_bytes[id] > 1 << 16) small = false;
      if (!small || b.backing == tf_stitch::Backing::kArena) continue;
      blocks.emplace_back(static_cast<size_t>(plan.buffer_bytes[id]));
      addresses.back() = blocks.back().data();
    }
  }
  bool small = true;
  std::vector<std::vector<char>> blocks;
  std::vector<void*> addresses;
};

// Joins two requests: whatever the program claims of its batch, copies stay within both sides.
void Join(const tf_stitch::Program& program, const tf_stitch::Signature& one, int64_t rows) {
  if (!program.batch) return;
  tf_stitch::Signature other = tf_stitch::JoinedSignature(program, one, rows);
  auto a = tf_stitch::MakePlan(program, one), b = tf_stitch::MakePlan(program, other);
  if (!a->usable || !b->usable) return;
  tf_stitch::Signature marked = tf_stitch::JoinedSignature(program, one, -12345);
  int64_t together = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    if (marked[i] != one[i] && __builtin_add_overflow(one[i], rows, &together)) return;
  }
  auto whole = tf_stitch::MakePlan(program, tf_stitch::JoinedSignature(program, one, together));
  Memory x(program, *a), y(program, *b);
  if (!whole->usable || !x.small || !y.small) return;
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.batch->inputs[i] == tf_stitch::Batch::kNone) {
      y.addresses[program.inputs[i]] = x.addresses[program.inputs[i]];
    }
  }
  tf_stitch::JoinedRun run;
  if (!run.Lay(program, *whole, {{a.get(), x.addresses.data()}, {b.get(), y.addresses.data()}}).empty()) return;
  if (run.bytes() > 1 << 20) return;
  ++g_joined;
  auto memory = std::make_unique<char[]>(static_cast<size_t>(run.bytes()));
  run.Place(memory.get());
  for (const tf_stitch::Piece& p : run.gathers()) tf_stitch::CopyPiece(p);
  for (const tf_stitch::Piece& p : run.scatters()) tf_stitch::CopyPiece(p);
}

// Plans for small, huge, negative and usual sizes.
void PlanAll(const tf_stitch::Program& program, std::mt19937_64* rng) {
  static constexpr int64_t kSizes[] = {0, 1, 2, 7, 64, 1000, -1, int64_t{1} << 40, INT64_MAX, INT64_MIN};
  size_t length = 0;
  for (uint32_t id : program.inputs) length += program.buffers[id].shape.size();
  for (const auto& s : program.symbols) length += s.kind == tf_stitch::SymbolKind::kValue;
  for (int i = 0; i < 4; ++i) {
    tf_stitch::Signature signature(length);
    int64_t same = kSizes[(*rng)() % 6];
    for (int64_t& v : signature) v = i < 2 ? same : kSizes[(*rng)() % 10];
    auto plan = tf_stitch::MakePlan(program, signature);
    g_usable += plan->usable;
    Join(program, signature, kSizes[(*rng)() % 6]);
    if (plan->usable != plan->why_not.empty()) abort();
    for (size_t k = 0; plan->usable && k < program.buffers.size(); ++k) {  // the arena holds what is placed in it
      const tf_stitch::Buffer& b = program.buffers[k];
      if (b.backing != tf_stitch::Backing::kArena || b.first_step < 0) continue;
      if (plan->arena_offset[k] < 0 || plan->arena_offset[k] + plan->buffer_bytes[k] > plan->arena_bytes) abort();
    }
    for (const tf_stitch::Grid& g : program.grids) {  // every word of a record is in the table
      tf_stitch::GridTable table;
      if (!plan->usable || !tf_stitch::MakeGridTable(program, *plan, g, &table)) continue;
      for (const tf_stitch::GridRecord& r : table.records) {
        if (r.words < 0 || static_cast<size_t>(r.words + r.count) > table.words.size() || r.addresses > r.count)
          abort();
        if (r.begin > r.end || r.end > table.most_blocks || r.kernel < 0) abort();
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string payload(reinterpret_cast<const char*>(data), size);
  tf_stitch::Program program;
  std::string error;
  if (tf_stitch::ParseProgram(Seal(payload), &program, &error)) {
    ++g_parsed;
    std::mt19937_64 rng(size);
    PlanAll(program, &rng);
  } else if (error.empty()) {
    abort();
  }
  return 0;
}

#ifndef TF_STITCH_LIBFUZZER

namespace {

void Damage(std::string* data, std::mt19937_64* rng) {
  size_t at = (*rng)() % data->size();
  switch ((*rng)() % 4) {
    case 0:
      data->erase(at, 1 + (*rng)() % 3);
      break;
    case 1:
      data->insert(at, 1 + (*rng)() % 3, static_cast<char>((*rng)()));
      break;
    default:
      (*data)[at] = static_cast<char>((*rng)() % 3 ? (*rng)() % 8 : (*rng)());
  }
  if (data->empty()) *data = "x";
}

void Test(const std::string& data) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(data.data()), data.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  std::mt19937_64 rng(strtoull(argv[1], nullptr, 10));
  std::vector<std::string> seeds;
  for (int i = 3; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    Test(seeds.back());
  }
  for (int64_t round = atoll(argv[2]); round > 0; --round) {
    std::string data = seeds[rng() % seeds.size()];
    for (uint64_t changes = 1 + rng() % 4; changes && !data.empty(); --changes) Damage(&data, &rng);
    Test(data);
  }
  printf("%lld parsed, %lld plans usable, %lld pairs joined\n", static_cast<long long>(g_parsed),
         static_cast<long long>(g_usable), static_cast<long long>(g_joined));
}

#endif  // TF_STITCH_LIBFUZZER
