#include "program.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace tf_stitch {
namespace {

constexpr char kMagic[4] = {'T', 'F', 'S', 'P'};
constexpr uint8_t kOldest = 2, kVersion = 3;    // that are read; from 3 on a GPU's code may be several images
constexpr size_t kHeader = 9;                   // magic, version, crc32
constexpr uint64_t kMostKept = 1 << 24;         // bytes
constexpr size_t kLargestConvNumber = 1 << 20;  // a stride, padding, dilation or number of groups is below this

enum Section : uint8_t { kNames = 1, kSymbols, kExprs, kBuffers, kSteps, kGuards, kCode, kText, kGrids, kBatch };

// Reads bytes in order.  After the first failure every read gives 0 and `error` keeps the first reason.
class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  bool ok() const { return error_.empty(); }
  bool at_end() const { return data_.empty(); }
  const std::string& error() const { return error_; }

  void Fail(std::string why) {
    if (error_.empty()) error_ = std::move(why);
    data_ = {};
  }

  uint8_t Byte() {
    if (data_.empty()) {
      Fail("it ends too early");
      return 0;
    }
    uint8_t byte = static_cast<uint8_t>(data_[0]);
    data_.remove_prefix(1);
    return byte;
  }

  // LEB128
  uint64_t Unsigned() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      uint64_t byte = Byte();
      if (shift == 63 && byte > 1) break;
      value |= (byte & 0x7F) << shift;
      if (!(byte & 0x80)) return ok() ? value : 0;
    }
    Fail("a number is too long");
    return 0;
  }

  // zigzag
  int64_t Signed() {
    uint64_t u = Unsigned();
    return static_cast<int64_t>(u >> 1) ^ -static_cast<int64_t>(u & 1);
  }

  // A number below `limit`.
  uint32_t Index(size_t limit, const char* what) {
    uint64_t value = Unsigned();
    if (ok() && value >= limit) Fail(std::string(what) + " " + std::to_string(value) + " does not exist");
    return ok() ? static_cast<uint32_t>(value) : 0;
  }

  // The length of a list whose entries take at least one byte each, so a wild length cannot ask for wild memory.
  size_t Count() {
    uint64_t value = Unsigned();
    if (ok() && value > data_.size()) Fail("a list is longer than the data");
    return ok() ? static_cast<size_t>(value) : 0;
  }

  std::string_view Bytes() {
    size_t n = Count();
    std::string_view bytes = data_.substr(0, n);
    data_.remove_prefix(n);
    return bytes;
  }

 private:
  std::string_view data_;
  std::string error_;
};

// Reads the sections in order into a Program.
class Parser {
 public:
  Parser(Program* program, std::string* error) : p_(*program), error_(error) {}

  bool Parse(std::string_view payload) {
    using Method = void (Parser::*)(Reader&);
    static constexpr std::pair<const char*, Method> kSections[] = {
        {"names", &Parser::Names},     {"symbols", &Parser::Symbols}, {"expressions", &Parser::Exprs},
        {"buffers", &Parser::Buffers}, {"steps", &Parser::Steps},     {"guards", &Parser::Guards},
        {"code", &Parser::CodeBlobs},  {"text", &Parser::Text},       {"grids", &Parser::Grids},
        {"batch", &Parser::BatchFacts}};
    Reader all(payload);
    for (uint8_t tag = kNames; tag <= kBatch; ++tag) {
      if (tag == kBatch && all.at_end()) break;  // not every program has one
      const auto& [name, read] = kSections[tag - kNames];
      if (all.Byte() != tag) all.Fail("its sections are out of order");
      Reader section(all.Bytes());
      if (!all.ok()) return Error(all.error());
      (this->*read)(section);
      if (section.ok() && !section.at_end()) section.Fail("it has bytes left over");
      if (!section.ok()) return Error(std::string("section '") + name + "': " + section.error());
    }
    if (!all.at_end()) return Error("it has bytes left over");
    return Link();
  }

 private:
  bool Error(std::string why) {
    *error_ = std::move(why);
    return false;
  }

  std::string Name(Reader& r) {
    uint32_t i = r.Index(names_.size(), "name");
    return r.ok() ? names_[i] : std::string();
  }

  ExprId ExprRef(Reader& r) { return r.Index(p_.exprs.size(), "expression"); }

  std::vector<ExprId> ExprRefs(Reader& r) {
    std::vector<ExprId> out(r.Count());
    for (ExprId& e : out) e = ExprRef(r);
    return out;
  }

  void Names(Reader& r) {
    names_.resize(r.Count());
    for (std::string& name : names_) name = std::string(r.Bytes());
    p_.name = Name(r);
  }

  void Symbols(Reader& r) {
    p_.symbols.resize(r.Count());
    for (Symbol& s : p_.symbols) {
      s.name = Name(r);
      uint8_t flags = r.Byte();
      if (flags > 7) r.Fail("symbol '" + s.name + "' has unknown flags");
      s.kind = (flags & 1) ? SymbolKind::kValue : SymbolKind::kDim;
      s.has_lo = flags & 2;
      s.has_hi = flags & 4;
      s.param = static_cast<uint32_t>(std::min<uint64_t>(r.Unsigned(), UINT32_MAX));
      s.index = r.Unsigned();
      s.lo = s.has_lo ? r.Signed() : 0;
      s.hi = s.has_hi ? r.Signed() : 0;
    }
  }

  void Exprs(Reader& r) {
    p_.exprs.resize(r.Count());
    for (size_t i = 0; i < p_.exprs.size(); ++i) {
      Expr& e = p_.exprs[i];
      uint8_t op = r.Byte();
      if (op > static_cast<uint8_t>(ExprOp::kMax)) r.Fail("operation " + std::to_string(op) + " is not known");
      e.op = static_cast<ExprOp>(op);
      e.b = 0;
      if (e.op == ExprOp::kConst) {
        e.a = r.Signed();
      } else if (e.op == ExprOp::kSymbol) {
        e.a = r.Index(p_.symbols.size(), "symbol");
      } else {
        e.a = r.Index(i, "expression");
        e.b = r.Index(i, "expression");
      }
    }
  }

  void Buffers(Reader& r) {
    p_.buffers.resize(r.Count());
    for (Buffer& b : p_.buffers) {
      uint8_t kind = r.Byte();
      if (kind > static_cast<uint8_t>(BufferKind::kTemp))
        r.Fail("buffer kind " + std::to_string(kind) + " is not known");
      b.kind = static_cast<BufferKind>(kind);
      b.index = r.Index(p_.buffers.size(), "position");
      b.dtype = r.Byte();
      if (r.ok() && !DTypeSize(b.dtype)) r.Fail("element type " + std::to_string(b.dtype) + " is not known");
      b.shape = ExprRefs(r);
      if (b.shape.size() > 254) r.Fail("a buffer has more than 254 dims");
    }
  }

  void Steps(Reader& r) {
    p_.steps.resize(r.Count());
    for (Step& s : p_.steps) {
      uint8_t kind = r.Byte();
      if (kind > static_cast<uint8_t>(Step::Kind::kLibrary))
        r.Fail("step kind " + std::to_string(kind) + " is not known");
      s.kind = static_cast<Step::Kind>(kind);
      s.origin = Name(r);
      if (s.kind == Step::Kind::kAlias) {
        s.source = r.Index(p_.buffers.size(), "buffer");
        s.output = r.Index(p_.buffers.size(), "buffer");
        continue;
      }
      if (s.kind == Step::Kind::kLibrary) {
        Library(r, s);
        continue;
      }
      s.kernel = Name(r);
      s.buffers.resize(r.Count());
      for (uint32_t& b : s.buffers) b = r.Index(p_.buffers.size(), "buffer");
      s.dims = ExprRefs(r);
      s.blocks = ExprRef(r);
      s.shared_bytes = ExprRef(r);
      s.cost = ExprRef(r);
      s.threads = static_cast<uint32_t>(std::min<uint64_t>(r.Unsigned(), UINT32_MAX));
    }
  }

  void Library(Reader& r, Step& s) {
    std::string call = Name(r);
    constexpr LibraryCall kCalls[] = {LibraryCall::kMatmul, LibraryCall::kConv, LibraryCall::kConvFilter};
    auto known = std::find_if(std::begin(kCalls), std::end(kCalls), [&](LibraryCall c) { return call == NameOf(c); });
    if (known == std::end(kCalls)) return r.Fail("the library call '" + call + "' is not known");
    s.call = *known;
    s.buffers.resize(r.Count());
    for (uint32_t& b : s.buffers) b = r.Index(p_.buffers.size(), "buffer");
    s.dims = ExprRefs(r);
    size_t flags = r.Count();
    if (!r.ok()) return;
    size_t operands = s.call == LibraryCall::kMatmul ? MatmulOf(r, s, flags) : ConvOf(r, s, flags);
    if (r.ok()) CheckOperands(r, s, operands);
  }

  // Reads the flags of a matrix product; returns how many buffers it has.
  size_t MatmulOf(Reader& r, Step& s, size_t flags) {
    bool* const all[] = {&s.matmul.trans_lhs, &s.matmul.trans_rhs, &s.matmul.broadcast_lhs, &s.matmul.broadcast_rhs,
                         &s.matmul.bias};
    if (flags != std::size(all)) r.Fail("a matrix product has not 5 flags");
    for (bool* flag : all) *flag = r.Index(2, "flag");
    if (s.dims.size() != 4) r.Fail("a matrix product has not 4 dims");
    return s.matmul.bias ? 4 : 3;
  }

  // The same for a convolution: three flags, groups, and four numbers for each spatial dim.
  size_t ConvOf(Reader& r, Step& s, size_t flags) {
    ConvFlags& f = s.conv;
    size_t spatial = flags >= 4 ? (flags - 4) / 4 : 0;
    if (flags != 4 + 4 * spatial || spatial < 2 || spatial > 3) r.Fail("a convolution has not 12 or 16 flags");
    if (s.dims.size() != 3 + 3 * spatial) r.Fail("a convolution has another number of dims");
    for (bool* flag : {&f.bias, &f.residual, &f.relu}) *flag = r.Index(2, "flag");
    f.groups = r.Index(kLargestConvNumber, "number of groups");
    for (auto* list : {&f.strides, &f.low, &f.high, &f.dilations}) {
      for (size_t i = 0; i < spatial && r.ok(); ++i)
        list->push_back(r.Index(kLargestConvNumber, "stride or padding of"));
    }
    auto positive = [](int64_t v) { return v > 0; };
    if (!f.groups || !std::all_of(f.strides.begin(), f.strides.end(), positive) ||
        !std::all_of(f.dilations.begin(), f.dilations.end(), positive)) {
      r.Fail("a convolution has a stride, a dilation or groups of 0");
    }
    if (s.call == LibraryCall::kConvFilter && (f.bias || f.residual || f.relu)) {
      r.Fail("a convolution's gradient by its filter has a bias, a sum or a ReLU");
    }
    return 3 + f.bias + f.residual;
  }

  // Operands of one element type that libraries have; the last one is written.
  void CheckOperands(Reader& r, const Step& s, size_t count) {
    std::string what = std::string("a ") + Describe(s.call);
    if (s.buffers.size() != count) return r.Fail(what + " has another number of operands");
    int dtype = p_.buffers[s.buffers[0]].dtype;
    if (!IsLibraryDType(dtype)) r.Fail(what + " has elements of type " + std::to_string(dtype));
    for (uint32_t b : s.buffers) {
      if (p_.buffers[b].dtype != dtype) r.Fail(what + " has operands of several types");
    }
    if (p_.buffers[s.buffers.back()].kind == BufferKind::kInput) r.Fail(what + " writes an input");
  }

  void Guards(Reader& r) {
    p_.guards.resize(r.Count());
    for (Guard& g : p_.guards) {
      uint8_t kind = r.Byte();
      if (kind > static_cast<uint8_t>(GuardKind::kDivides))
        r.Fail("guard kind " + std::to_string(kind) + " is not known");
      g.kind = static_cast<GuardKind>(kind);
      g.a = ExprRef(r);
      g.b = ExprRef(r);
      g.reason = Name(r);
    }
  }

  void CodeBlobs(Reader& r) {
    p_.code.resize(r.Count());
    for (Code& c : p_.code) {
      c.target = Name(r);
      c.bytes = std::string(r.Bytes());
    }
  }

  void Text(Reader& r) { p_.text = std::string(r.Bytes()); }

  void Grids(Reader& r) {
    p_.grids.resize(r.Count());
    for (Grid& g : p_.grids) {
      g.kernel = Name(r);
      g.bodies.resize(r.Count());
      g.keeps.resize(g.bodies.size());
      for (size_t i = 0; i < g.bodies.size(); ++i) Body(r, &g.bodies[i], &g.keeps[i]);
      g.bases.resize(r.Count());
      for (uint32_t& b : g.bases) b = r.Index(p_.buffers.size(), "buffer");
      g.first = g.end = r.Index(p_.steps.size(), "step");
      g.phases.resize(r.Count());
      for (uint32_t& count : g.phases) {
        count = 1 + r.Index(p_.steps.size() - g.end, "step of a phase");
        if (r.ok()) g.end += count;
      }
      if (r.ok() && g.phases.empty()) r.Fail("a grid has no phases");
    }
  }

  void Body(Reader& r, std::string* kernel, Grid::Keeps* keeps) {
    *kernel = Name(r);
    keeps->bytes = r.Unsigned();
    if (keeps->bytes > kMostKept) r.Fail("a block keeps more than a device has room for");
    keeps->inputs.resize(r.Count());
    for (uint32_t& i : keeps->inputs) i = r.Index(p_.buffers.size(), "position");
  }

  void BatchFacts(Reader& r) {
    Batch& b = p_.batch.emplace();
    b.symbol = r.Index(p_.symbols.size(), "symbol");
    b.inputs.resize(r.Count());
    for (uint32_t& axis : b.inputs) axis = Axis(r);
    b.outputs.resize(r.Count());
    for (Batch::Place& place : b.outputs) {
      place.axis = Axis(r);
      if (place.axis != Batch::kNone) place.inner = ExprRef(r);
    }
  }

  uint32_t Axis(Reader& r) {
    uint32_t number = r.Index(255, "dim");
    return number ? number - 1 : Batch::kNone;
  }

  // Checks what spans sections, and finds each buffer's backing memory and life.
  bool Link() { return LinkBuffers() && LinkSymbols() && LinkAliases() && LinkLives() && LinkGrids() && LinkBatch(); }

  bool LinkBuffers() {
    std::vector<uint32_t>* lists[] = {&p_.inputs, &p_.outputs, &p_.temps};
    static constexpr const char* kNamesOfKinds[] = {"input", "output", "temp"};
    for (auto* list : lists) list->clear();
    for (const Buffer& b : p_.buffers) {
      auto& list = *lists[static_cast<int>(b.kind)];
      if (list.size() <= b.index) list.resize(b.index + 1, UINT32_MAX);
      uint32_t id = static_cast<uint32_t>(&b - p_.buffers.data());
      if (list[b.index] != UINT32_MAX) {
        return Error(std::string(kNamesOfKinds[static_cast<int>(b.kind)]) + " " + std::to_string(b.index) +
                     " is there twice");
      }
      list[b.index] = id;
    }
    for (int kind = 0; kind < 3; ++kind) {
      for (size_t i = 0; i < lists[kind]->size(); ++i) {
        if ((*lists[kind])[i] == UINT32_MAX) {
          return Error(std::string(kNamesOfKinds[kind]) + " " + std::to_string(i) + " is missing");
        }
      }
    }
    return true;
  }

  bool LinkSymbols() {
    for (const Symbol& s : p_.symbols) {
      if (s.param >= p_.inputs.size()) return Error("symbol '" + s.name + "' reads an input that does not exist");
      const Buffer& input = p_.buffers[p_.inputs[s.param]];
      if (s.kind == SymbolKind::kDim && s.index >= input.shape.size()) {
        return Error("symbol '" + s.name + "' reads a dim that does not exist");
      }
      if (s.kind == SymbolKind::kValue && !IsIntegerDType(input.dtype)) {
        return Error("symbol '" + s.name + "' reads an element of an input that is not of an integer type");
      }
    }
    return true;
  }

  bool LinkAliases() {
    for (Buffer& b : p_.buffers) {
      b.backing = b.kind == BufferKind::kInput    ? Backing::kInput
                  : b.kind == BufferKind::kOutput ? Backing::kOutput
                                                  : Backing::kArena;
      b.backing_index = b.index;
    }
    std::vector<bool> aliased(p_.buffers.size(), false), read(p_.buffers.size(), false);
    for (const Step& s : p_.steps) {
      if (s.kind != Step::Kind::kAlias) continue;
      Buffer& source = p_.buffers[s.source];
      Buffer& output = p_.buffers[s.output];
      if (output.kind != BufferKind::kOutput) return Error("an alias names a buffer that is not an output");
      if (aliased[s.output] || read[s.output] || s.source == s.output) {
        return Error("output " + std::to_string(output.index) + " is an alias twice or of itself");
      }
      aliased[s.output] = true;
      read[s.source] = true;
      if (source.backing == Backing::kArena) {  // the temp lives in this output's memory
        source.backing = Backing::kOutput;
        source.backing_index = output.index;
      } else {
        output.backing = source.backing;
        output.backing_index = source.backing_index;
      }
    }
    return true;
  }

  bool LinkLives() {
    std::vector<bool> touched(p_.buffers.size(), false);
    for (size_t i = 0; i < p_.steps.size(); ++i) {
      const Step& s = p_.steps[i];
      if (s.kind == Step::Kind::kAlias) {
        touched[s.output] = true;
        continue;
      }
      for (uint32_t id : s.buffers) {
        Buffer& b = p_.buffers[id];
        touched[id] = true;
        if (b.first_step < 0) b.first_step = static_cast<int32_t>(i);
        b.last_step = static_cast<int32_t>(i);
      }
    }
    for (uint32_t id : p_.outputs) {
      if (!touched[id]) return Error("output " + std::to_string(p_.buffers[id].index) + " is never written");
    }
    return true;
  }

  // Every dim exists, and those of inputs are the symbol and nothing else.
  bool LinkBatch() {
    if (!p_.batch) return true;
    const Batch& b = *p_.batch;
    if (b.inputs.size() != p_.inputs.size() || b.outputs.size() != p_.outputs.size()) {
      return Error("its batch is of another number of inputs or outputs");
    }
    for (size_t i = 0; i < b.inputs.size(); ++i) {
      if (b.inputs[i] == Batch::kNone) continue;
      const std::vector<ExprId>& shape = p_.buffers[p_.inputs[i]].shape;
      if (b.inputs[i] >= shape.size()) return Error("its batch is a dim that does not exist");
      const Expr& e = p_.exprs[shape[b.inputs[i]]];
      if (e.op != ExprOp::kSymbol || e.a != b.symbol) return Error("its batch is a dim of another size");
    }
    auto is_none = [](uint32_t axis) { return axis == Batch::kNone; };
    if (std::all_of(b.inputs.begin(), b.inputs.end(), is_none)) return Error("its batch is in none of its inputs");
    for (size_t i = 0; i < b.outputs.size(); ++i) {
      if (b.outputs[i].axis != Batch::kNone && b.outputs[i].axis >= p_.buffers[p_.outputs[i]].shape.size()) {
        return Error("its batch is a dim that does not exist");
      }
    }
    return true;
  }

  // Steps run one after the other, but for those of a phase.
  bool LinkGrids() {
    p_.times.assign(p_.steps.size(), 0);
    uint32_t time = 0, step = 0;
    for (const Grid& g : p_.grids) {
      if (g.first < step) return Error("its grids overlap or are out of order");
      GridNames names;
      for (size_t i = 0; i < g.bodies.size(); ++i) {
        const std::vector<uint32_t>& kept = g.keeps[i].inputs;
        size_t positions = kept.empty() ? 0 : size_t{1} + *std::max_element(kept.begin(), kept.end());
        if (!names.bodies.emplace(g.bodies[i], positions).second) return Error("a grid holds a kernel twice");
      }
      for (uint32_t b : g.bases) names.holders.emplace(p_.buffers[b].backing, p_.buffers[b].backing_index);
      while (step < g.first) p_.times[step++] = time++;
      for (uint32_t count : g.phases) {
        for (uint32_t last = step + count; step < last; ++step) {
          p_.times[step] = time;
          if (!CheckStepOfGrid(names, p_.steps[step], last - count, last)) return false;
        }
        ++time;
      }
    }
    while (step < p_.steps.size()) p_.times[step++] = time++;
    return true;
  }

  struct GridNames {
    std::map<std::string_view, size_t> bodies;  // how many buffers each must have
    std::set<std::pair<Backing, uint32_t>> holders;
  };

  // `first` and `last` bound its phase.
  bool CheckStepOfGrid(const GridNames& g, const Step& s, uint32_t first, uint32_t last) {
    auto body = g.bodies.find(s.kernel);
    if (s.kind != Step::Kind::kKernel || body == g.bodies.end()) {
      return Error("a grid has a step whose kernel it does not hold");
    }
    if (s.buffers.size() < body->second) return Error("a grid keeps an operand that a step does not have");
    for (uint32_t id : s.buffers) {
      const Buffer& b = p_.buffers[id];
      if (b.backing != Backing::kArena && !g.holders.count({b.backing, b.backing_index})) {
        return Error("a grid lacks the base of a buffer");
      }
      bool written = b.kind != BufferKind::kInput && b.first_step >= static_cast<int32_t>(first) &&
                     b.first_step < static_cast<int32_t>(last);
      if (written && &p_.steps[b.first_step] != &s) return Error("steps of a phase depend on each other");
    }
    return true;
  }

  Program& p_;
  std::string* error_;
  std::vector<std::string> names_;
};

}  // namespace

uint32_t Crc32(std::string_view data) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (unsigned char byte : data) crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8);
  return crc ^ 0xFFFFFFFFu;
}

bool IsLibraryDType(int dtype) { return dtype == 1 || dtype == 2 || dtype == 14 || dtype == 19; }

const char* NameOf(LibraryCall call) {
  constexpr const char* kNames[] = {"matmul", "conv", "conv_filter"};
  return kNames[static_cast<size_t>(call)];
}

std::string LabelOf(const Step& step) {
  return (step.kind == Step::Kind::kLibrary ? NameOf(step.call) : step.kernel) + " " + step.origin;
}

std::vector<int64_t> FlagsOf(const Step& step) {
  if (step.kind != Step::Kind::kLibrary) return {};
  const MatmulFlags& m = step.matmul;
  if (step.call == LibraryCall::kMatmul) return {m.trans_lhs, m.trans_rhs, m.broadcast_lhs, m.broadcast_rhs, m.bias};
  const ConvFlags& c = step.conv;
  std::vector<int64_t> out{c.bias, c.residual, c.relu, c.groups};
  for (const auto* list : {&c.strides, &c.low, &c.high, &c.dilations})
    out.insert(out.end(), list->begin(), list->end());
  return out;
}

const char* Describe(LibraryCall call) { return call == LibraryCall::kMatmul ? "matrix product" : "convolution"; }

int DTypeSize(int dtype) {
  switch (dtype) {
    case 1:   // float32
    case 3:   // int32
    case 22:  // uint32
      return 4;
    case 2:   // float64
    case 9:   // int64
    case 23:  // uint64
      return 8;
    case 4:   // uint8
    case 6:   // int8
    case 10:  // bool
      return 1;
    case 5:   // int16
    case 14:  // bfloat16
    case 17:  // uint16
    case 19:  // float16
      return 2;
    default:
      return 0;
  }
}

bool IsIntegerDType(int dtype) {
  static constexpr int kIntegers[] = {3, 4, 5, 6, 9, 17, 22, 23};
  return std::find(std::begin(kIntegers), std::end(kIntegers), dtype) != std::end(kIntegers);
}

int ProgramVersion() { return kVersion; }

bool ParseProgram(std::string_view data, Program* program, std::string* error) {
  *program = Program();
  if (data.size() < kHeader || data.substr(0, 4) != std::string_view(kMagic, 4)) {
    *error = "it does not start as a tf_stitch program does";
    return false;
  }
  uint8_t version = static_cast<uint8_t>(data[4]);
  if (version < kOldest || version > kVersion) {
    *error = "it has format version " + std::to_string(version) + ", this library reads versions " +
             std::to_string(kOldest) + " to " + std::to_string(kVersion) +
             (version > kVersion ? "; the op library is older than what wrote it: run 'make build' or install it again"
                                 : "; rewrite the model again");
    return false;
  }
  uint32_t stored = 0;
  for (int i = 0; i < 4; ++i) stored |= static_cast<uint32_t>(static_cast<uint8_t>(data[5 + i])) << (8 * i);
  if (version > kOldest) stored ^= version;  // so that a damaged version is noticed
  if (stored != Crc32(data.substr(kHeader))) {
    *error = "its checksum does not match";
    return false;
  }
  return Parser(program, error).Parse(data.substr(kHeader));
}

}  // namespace tf_stitch
