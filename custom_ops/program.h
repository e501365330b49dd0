// The executable description of a stitched cluster, as the op reads it from its `program` attr.
//
// Written by tf_stitch/program/serialize.py, where the byte format is described.  Plain C++: neither TensorFlow nor
// Python is needed.  A parsed Program keeps every index in range, so its users need no further checks.
#ifndef TF_STITCH_CUSTOM_OPS_PROGRAM_H_
#define TF_STITCH_CUSTOM_OPS_PROGRAM_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tf_stitch {

// Element types carry TensorFlow's DataType numbers, which are stable.  Returns 0 for a type that programs cannot hold.
int DTypeSize(int dtype);
bool IsIntegerDType(int dtype);

enum class SymbolKind : uint8_t { kDim = 0, kValue = 1 };

// An unknown integer, read at run time from dim `index` of input `param`, or from its element `index` (flat).
struct Symbol {
  std::string name;
  SymbolKind kind;
  uint32_t param;
  uint64_t index;
  bool has_lo, has_hi;
  int64_t lo, hi;  // inclusive bounds that the kernels rely on
};

enum class ExprOp : uint8_t { kConst = 0, kSymbol = 1, kAdd = 2, kMul = 3, kDiv = 4, kMod = 5, kMin = 6, kMax = 7 };

// One entry of the expression table.  kConst: `a` is the value.  kSymbol: `a` indexes the symbols.  Others: `a` and
// `b` index earlier entries.  kDiv and kMod round toward minus infinity and give 0 for a zero divisor.
struct Expr {
  ExprOp op;
  int64_t a, b;
};

using ExprId = uint32_t;

enum class BufferKind : uint8_t { kInput = 0, kOutput = 1, kTemp = 2 };

// Where the memory of a buffer comes from.
enum class Backing : uint8_t {
  kInput,   // input tensor `backing_index`
  kOutput,  // the tensor allocated for output `backing_index`
  kArena,   // the program's arena
};

struct Buffer {
  BufferKind kind;
  uint32_t index;
  int dtype;
  std::vector<ExprId> shape;
  Backing backing;
  uint32_t backing_index;
  int32_t first_step = -1, last_step = -1;  // the steps that touch an arena buffer
};

struct Step {
  enum class Kind : uint8_t { kKernel = 0, kAlias = 1 } kind;
  std::string origin;
  // kKernel
  std::string kernel;
  std::vector<uint32_t> buffers;
  std::vector<ExprId> dims;
  ExprId blocks = 0, shared_bytes = 0, cost = 0;
  uint32_t threads = 0;
  // kAlias: output buffer `output` is buffer `source` under another shape
  uint32_t source = 0, output = 0;
};

enum class GuardKind : uint8_t { kEq = 0, kLe = 1, kDivides = 2 };

struct Guard {
  GuardKind kind;
  ExprId a, b;
  std::string reason;
};

struct Code {
  std::string target;  // "x86-64-v3", "aarch64", "sm_90", ...
  std::string bytes;
};

struct Program {
  std::string name;
  std::vector<Symbol> symbols;
  std::vector<Expr> exprs;
  std::vector<Buffer> buffers;
  std::vector<uint32_t> inputs, outputs, temps;  // buffer of each, by index
  std::vector<Step> steps;
  std::vector<Guard> guards;
  std::vector<Code> code;
  std::string text;
};

// Parses and checks `data`.  Returns false and sets `error` to a phrase that says what is wrong.
bool ParseProgram(std::string_view data, Program* program, std::string* error);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_PROGRAM_H_
