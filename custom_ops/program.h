// The executable description of a stitched cluster, as the op reads it from its `program` attr.
//
// Written by tf_stitch/program/serialize.py, where the byte format is described.  Plain C++: neither TensorFlow nor
// Python is needed.  A parsed Program keeps every index in range, so its users need no further checks.
#ifndef TF_STITCH_CUSTOM_OPS_PROGRAM_H_
#define TF_STITCH_CUSTOM_OPS_PROGRAM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tf_stitch {

// Element types carry TensorFlow's DataType numbers, which are stable.  Returns 0 for a type that programs cannot hold.
int DTypeSize(int dtype);
bool IsIntegerDType(int dtype);
bool IsLibraryDType(int dtype);  // of library steps: float16, bfloat16, float32, float64

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
  // The steps that touch it.  Unless it is an input the first one that has work writes it: of plans for several ranges
  // of sizes only one has.
  int32_t first_step = -1, last_step = -1;
};

// What a library step calls.
//   kMatmul: out[b] = op(lhs[b]) @ op(rhs[b]) (+ bias along n), row-major and dense; buffers: lhs, rhs, [bias,] out;
//     dims: batch, m, n, k.
//   kConv: out = conv(x, w) (+ residual) (+ bias along channels) (then ReLU), channels last and dense: x [batch, in...,
//     channels], w [out channels, window..., channels / groups]; buffers: x, w, [bias,] [residual,] out; dims: batch,
//     channels, out channels, in..., out..., window....
//   kConvFilter: dw, the gradient by w of such a convolution: the sum over batch and places of x and of g, what comes
//     back for its result; buffers: x, g, dw, which lie as x, out and w do; dims and flags as kConv's, without bias,
//     residual and ReLU.
enum class LibraryCall : uint8_t { kMatmul = 0, kConv = 1, kConvFilter = 2 };

struct MatmulFlags {
  bool trans_lhs, trans_rhs;          // the operand is stored transposed
  bool broadcast_lhs, broadcast_rhs;  // one matrix for the whole batch
  bool bias;
};

struct ConvFlags {
  bool bias, residual, relu;
  int64_t groups;
  std::vector<int64_t> strides, low, high, dilations;  // by spatial dim; low, high: zeros around x
  size_t spatial() const { return strides.size(); }
};

struct Step {
  enum class Kind : uint8_t { kKernel = 0, kAlias = 1, kLibrary = 2 } kind;
  std::string origin;
  // kKernel, kLibrary
  std::vector<uint32_t> buffers;
  std::vector<ExprId> dims;
  // kLibrary
  LibraryCall call = LibraryCall::kMatmul;
  MatmulFlags matmul{};
  ConvFlags conv{};
  // kKernel
  std::string kernel;
  ExprId blocks = 0, shared_bytes = 0, cost = 0;
  uint32_t threads = 0;
  // kAlias: output buffer `output` is buffer `source` under another shape
  uint32_t source = 0, output = 0;
};

// Kernel steps that one launch runs in phases, with a device-wide barrier between phases: steps [first, end), of which
// the first phases[0] are phase 0, and so on.  Steps of a phase do not depend on each other.  One phase is a pack.
struct Grid {
  std::string kernel;
  struct Keeps {  // what a block of a body can keep on the chip for the next phase
    uint64_t bytes;
    std::vector<uint32_t> inputs;  // the positions of the buffers that it is read from
  };
  std::vector<std::string> bodies;  // the kernels that it holds, by number
  std::vector<Keeps> keeps;         // by body
  std::vector<uint32_t> bases;      // inputs and outputs in whose memory the steps' buffers lie, unless in the arena
  uint32_t first, end;
  std::vector<uint32_t> phases;

  // No barrier: an ordinary launch with all blocks of its steps.  The kernel's name says that it is made for that.
  bool is_pack() const { return phases.size() == 1 && kernel.rfind("ts_pack_", 0) == 0; }
};

enum class GuardKind : uint8_t { kEq = 0, kLe = 1, kDivides = 2 };

struct Guard {
  GuardKind kind;
  ExprId a, b;
  std::string reason;
};

// How requests may be joined along an unknown size (tf_stitch/ir/separable.py proves it): those that agree in all other
// sizes and in the inputs that do not have it.  What it says is checked by who joins them (merge.h): it may be a lie.
struct Batch {
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Place {
    uint32_t axis = kNone;  // of the output; kNone: it does not depend on the batch
    ExprId inner = 0;       // elements of the batch alternate every so many positions of the axis
  };
  uint32_t symbol = 0;
  std::vector<uint32_t> inputs;  // by input: the dim that is the symbol; kNone: the same in all requests
  std::vector<Place> outputs;    // by output
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
  std::vector<Grid> grids;      // by first step
  std::vector<uint32_t> times;  // of each step: when it runs; steps of a phase run at the same time
  std::vector<Guard> guards;
  std::optional<Batch> batch;  // none: requests cannot be joined
  std::vector<Code> code;
  std::string text;
};

// What a library call is called in a program, and in messages.
const char* NameOf(LibraryCall call);
const char* Describe(LibraryCall call);

// What the profiler shows for a step that runs: the kernel or the library call, and the node that its last result comes
// from.
std::string LabelOf(const Step& step);

// The flags of a library step in the order of the format; none for other steps.
std::vector<int64_t> FlagsOf(const Step& step);

// The CRC-32 of zlib and zip files.
uint32_t Crc32(std::string_view data);

// The newest format version that ParseProgram reads.
int ProgramVersion();

// Parses and checks `data`.  Returns false and sets `error` to a phrase that says what is wrong.
bool ParseProgram(std::string_view data, Program* program, std::string* error);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_PROGRAM_H_
