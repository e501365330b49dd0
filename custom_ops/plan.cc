#include "plan.h"

#include <algorithm>
#include <utility>

#include "counters.h"
#include "hash.h"

namespace tf_stitch {
namespace {

constexpr int64_t kLargest = int64_t{1} << 48;  // bytes of a buffer, a launch's blocks: past this something is wrong

bool FloorDiv(int64_t a, int64_t b, int64_t* out) {
  if (b == 0) return *out = 0, true;
  if (b == -1) return !__builtin_sub_overflow(int64_t{0}, a, out);
  int64_t q = a / b;
  *out = q - ((a % b != 0) && ((a < 0) != (b < 0)));
  return true;
}

bool FloorMod(int64_t a, int64_t b, int64_t* out) {
  if (b == 0 || b == -1) return *out = 0, true;
  int64_t r = a % b;
  *out = r + ((r != 0 && (r < 0) != (b < 0)) ? b : 0);
  return true;
}

// Values of all expressions; false when one overflows.
bool Evaluate(const std::vector<Expr>& exprs, const std::vector<int64_t>& symbols, std::vector<int64_t>* values) {
  values->resize(exprs.size());
  int64_t* v = values->data();
  for (size_t i = 0; i < exprs.size(); ++i) {
    const Expr& e = exprs[i];
    bool fits = true;
    switch (e.op) {
      case ExprOp::kConst:
        v[i] = e.a;
        break;
      case ExprOp::kSymbol:
        v[i] = symbols[e.a];
        break;
      case ExprOp::kAdd:
        fits = !__builtin_add_overflow(v[e.a], v[e.b], &v[i]);
        break;
      case ExprOp::kMul:
        fits = !__builtin_mul_overflow(v[e.a], v[e.b], &v[i]);
        break;
      case ExprOp::kDiv:
        fits = FloorDiv(v[e.a], v[e.b], &v[i]);
        break;
      case ExprOp::kMod:
        fits = FloorMod(v[e.a], v[e.b], &v[i]);
        break;
      case ExprOp::kMin:
        v[i] = std::min(v[e.a], v[e.b]);
        break;
      case ExprOp::kMax:
        v[i] = std::max(v[e.a], v[e.b]);
        break;
    }
    if (!fits) return false;
  }
  return true;
}

bool GuardHolds(GuardKind kind, int64_t a, int64_t b) {
  switch (kind) {
    case GuardKind::kEq:
      return a == b;
    case GuardKind::kLe:
      return a <= b;
    case GuardKind::kDivides: {
      int64_t r = 1;
      return b != 0 && FloorMod(a, b, &r) && r == 0;
    }
  }
  return false;
}

// Makes one plan; each method returns false after setting why_not.
class Planner {
 public:
  Planner(const Program& program, const Signature& signature, Plan* plan)
      : p_(program), signature_(signature), plan_(*plan) {}

  void Make() { plan_.usable = Bind() && CheckInputs() && CheckGuards() && Outputs() && Steps() && Arena(); }

 private:
  bool No(std::string why) {
    plan_.why_not = std::move(why);
    return false;
  }

  bool Bind() {
    std::vector<size_t> first_dim(p_.inputs.size());
    size_t position = 0;
    for (size_t i = 0; i < p_.inputs.size(); ++i) {
      first_dim[i] = position;
      position += p_.buffers[p_.inputs[i]].shape.size();
    }
    std::vector<int64_t> symbols;
    for (const Symbol& s : p_.symbols) {
      int64_t value = signature_[s.kind == SymbolKind::kDim ? first_dim[s.param] + s.index : position++];
      if ((s.has_lo && value < s.lo) || (s.has_hi && value > s.hi)) {
        return No("size '" + s.name + "' is " + std::to_string(value) + ", outside the range the kernels are made for");
      }
      symbols.push_back(value);
    }
    return Evaluate(p_.exprs, symbols, &values_) || No("a size is too large for 64 bits");
  }

  bool CheckInputs() {
    size_t position = 0;
    for (uint32_t id : p_.inputs) {
      for (ExprId e : p_.buffers[id].shape) {
        if (signature_[position] != values_[e]) {
          return No("input " + std::to_string(p_.buffers[id].index) + " has a dim of " +
                    std::to_string(signature_[position]) + " where " + std::to_string(values_[e]) + " is expected");
        }
        ++position;
      }
    }
    return true;
  }

  bool CheckGuards() {
    for (const Guard& g : p_.guards) {
      if (!GuardHolds(g.kind, values_[g.a], values_[g.b])) {
        return No("a guard does not hold (" + g.reason + ": " + std::to_string(values_[g.a]) + ", " +
                  std::to_string(values_[g.b]) + ")");
      }
    }
    return true;
  }

  // Bytes of a buffer; -1 when a dim is negative or the size is absurd.
  int64_t BytesOf(const Buffer& b) const {
    int64_t bytes = DTypeSize(b.dtype);
    bool empty = false;
    for (ExprId e : b.shape) {
      int64_t d = values_[e];
      if (d < 0) return -1;
      empty |= d == 0;
      if (d && (__builtin_mul_overflow(bytes, d, &bytes) || bytes > kLargest)) return -1;
    }
    return empty ? 0 : bytes;
  }

  bool Outputs() {
    plan_.output_dims.resize(p_.outputs.size());
    for (size_t i = 0; i < p_.outputs.size(); ++i) {
      const Buffer& b = p_.buffers[p_.outputs[i]];
      for (ExprId e : b.shape) plan_.output_dims[i].push_back(values_[e]);
      if (p_.batch) plan_.batch_inner.push_back(values_[p_.batch->outputs[i].inner]);
    }
    for (const Buffer& b : p_.buffers) {
      int64_t bytes = BytesOf(b);
      plan_.buffer_bytes.push_back(bytes);
      if (bytes < 0) return No("a buffer's size is negative or too large");
      const Buffer& holder =
          p_.buffers[b.backing == Backing::kInput    ? p_.inputs[b.backing_index]
                     : b.backing == Backing::kOutput ? p_.outputs[b.backing_index]
                                                     : static_cast<uint32_t>(&b - p_.buffers.data())];
      if (bytes != BytesOf(holder)) return No("an alias has another size than its source");
    }
    return true;
  }

  bool Steps() {
    plan_.steps.resize(p_.steps.size());
    for (size_t i = 0; i < p_.steps.size(); ++i) {
      const Step& s = p_.steps[i];
      if (s.kind == Step::Kind::kAlias) continue;
      StepPlan& out = plan_.steps[i];
      for (ExprId e : s.dims) out.dims.push_back(values_[e]);
      if (s.kind == Step::Kind::kLibrary) {
        if (!(s.call == LibraryCall::kMatmul ? Matmul(s, &out) : Convolution(s, &out))) return false;
        continue;
      }
      out.blocks = values_[s.blocks];
      out.shared_bytes = values_[s.shared_bytes];
      out.cost = std::max<int64_t>(values_[s.cost], 1);
      if (out.blocks < 0 || out.blocks > kLargest || out.shared_bytes < 0 || out.shared_bytes > kLargest) {
        return No("a launch's size is negative or too large");
      }
    }
    return true;
  }

  // A matrix product's operands must hold what it reads and writes.  Blocks are the rows of all matrices.
  bool Matmul(const Step& s, StepPlan* out) {
    int64_t batch = out->dims[0], m = out->dims[1], n = out->dims[2], k = out->dims[3];
    const MatmulFlags& f = s.matmul;
    uint32_t bias = f.bias ? s.buffers[2] : UINT32_MAX;
    if (!Holds(s.buffers[0], {f.broadcast_lhs ? 1 : batch, m, k}) ||
        !Holds(s.buffers[1], {f.broadcast_rhs ? 1 : batch, k, n}) || (f.bias && !Holds(bias, {n, 1, 1})) ||
        !Holds(s.buffers.back(), {batch, m, n})) {
      return No("an operand of a matrix product is too small");
    }
    out->blocks = n ? batch * m : 0;
    out->cost = out->blocks ? std::max<int64_t>(n * k, 1) : 1;
    return true;
  }

  // The same for a convolution.  Blocks are the places of the result in all images; of a gradient by the filter, the
  // filter's elements but for the channels that are summed over.
  bool Convolution(const Step& s, StepPlan* out) {
    const ConvFlags& f = s.conv;
    const size_t spatial = f.spatial();
    const int64_t *d = out->dims.data(), *in = d + 3, *places = in + spatial, *window = places + spatial;
    std::vector<int64_t> x{d[0], d[1]}, w{d[2], d[1] / f.groups}, y{d[0], d[2]};
    for (size_t i = 0; i < spatial; ++i) {
      int64_t span, room;
      if (window[i] < 1 || __builtin_mul_overflow(window[i] - 1, f.dilations[i], &span) ||
          __builtin_add_overflow(in[i], f.low[i] + f.high[i], &room) || room < 0 || span > kLargest) {
        return No("a convolution's window is empty or too large");
      }
      int64_t fit = room - span - 1;  // as ir.structural.window_dim
      if (places[i] != (fit < 0 ? 0 : fit / f.strides[i] + 1)) return No("a convolution's result has another size");
      x.push_back(in[i]);
      w.push_back(window[i]);
      y.push_back(places[i]);
    }
    if (d[1] % f.groups || d[2] % f.groups) return No("a convolution's groups do not divide its channels");
    const bool gradient = s.call == LibraryCall::kConvFilter;
    std::vector<uint32_t> like_y{gradient ? s.buffers[1] : s.buffers.back()};
    if (f.residual) like_y.push_back(s.buffers[f.bias ? 3 : 2]);
    bool fits = Holds(s.buffers[0], x) && Holds(gradient ? s.buffers[2] : s.buffers[1], w) &&
                (!f.bias || Holds(s.buffers[2], {d[2]}));
    for (uint32_t id : like_y) fits = fits && Holds(id, y);
    if (!fits) return No("an operand of a convolution is too small");
    if (gradient) {
      out->blocks = w[1] ? Product(w) / w[1] : 0;
      out->cost = out->blocks ? std::max<int64_t>(w[1] * (Product(y) / d[2]), 1) : 1;
    } else {
      out->blocks = d[2] ? Product(y) / d[2] : 0;
      out->cost = out->blocks ? std::max<int64_t>(Product(w), 1) : 1;
    }
    return true;
  }

  static int64_t Product(const std::vector<int64_t>& sizes) {  // of sizes that a buffer holds
    int64_t out = 1;
    for (int64_t d : sizes) out *= d;
    return out;
  }

  // True when the sizes are not negative and the buffer has room for their product.
  bool Holds(uint32_t id, const std::vector<int64_t>& sizes) const {
    int64_t bytes = DTypeSize(p_.buffers[id].dtype);
    for (int64_t d : sizes) {
      if (d < 0 || __builtin_mul_overflow(bytes, d, &bytes)) return false;
    }
    return bytes <= BytesOf(p_.buffers[id]);
  }

  // Places arena buffers largest first, each at the lowest offset where nothing alive at the same time lies.
  bool Arena() {
    plan_.arena_offset.assign(p_.buffers.size(), 0);
    struct Placed {
      int64_t begin, end;
      const Buffer* buffer;
    };
    std::vector<std::pair<int64_t, uint32_t>> order;  // (bytes, buffer)
    for (uint32_t id : p_.temps) {
      const Buffer& b = p_.buffers[id];
      if (b.backing != Backing::kArena || b.first_step < 0) continue;
      int64_t bytes = (BytesOf(b) + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
      if (bytes) order.emplace_back(bytes, id);
    }
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<Placed> placed;  // by begin
    for (const auto& [bytes, id] : order) {
      const Buffer& b = p_.buffers[id];
      int64_t at = 0;
      for (const Placed& other : placed) {
        bool together = p_.times[other.buffer->first_step] <= p_.times[b.last_step] &&
                        p_.times[b.first_step] <= p_.times[other.buffer->last_step];
        if (!together || other.end <= at) continue;
        if (other.begin >= at + bytes) break;
        at = other.end;
      }
      plan_.arena_offset[id] = at;
      plan_.arena_bytes = std::max(plan_.arena_bytes, at + bytes);
      if (plan_.arena_bytes > kLargest) return No("the temporaries are too large");
      Placed entry{at, at + bytes, &b};
      placed.insert(std::upper_bound(placed.begin(), placed.end(), entry,
                                     [](const Placed& x, const Placed& y) { return x.begin < y.begin; }),
                    entry);
    }
    return true;
  }

  const Program& p_;
  const Signature& signature_;
  Plan& plan_;
  std::vector<int64_t> values_;
};

}  // namespace

std::unique_ptr<Plan> MakePlan(const Program& program, const Signature& signature) {
  auto plan = std::make_unique<Plan>();
  plan->signature = signature;
  Planner(program, signature, plan.get()).Make();
  return plan;
}

size_t PlanCache::Hash::operator()(const Signature& s) const {
  uint64_t h = kHashOfNothing;
  for (int64_t v : s) h = Mix(h, static_cast<uint64_t>(v));
  return h;
}

std::shared_ptr<const Plan> PlanCache::Get(const Program& program, const Signature& signature) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (const auto* found = plans_.Find(signature)) return *found;
  }
  std::shared_ptr<const Plan> plan = MakePlan(program, signature);  // two threads may both make it: harmless
  ++GlobalCounters().plans;
  std::shared_ptr<const Plan> gone;  // is dropped without the lock: what a GPU keeps with it waits for the device
  std::lock_guard<std::mutex> lock(mu_);
  if (!plans_.Find(signature)) gone = plans_.Add(signature, plan);
  return plan;
}

}  // namespace tf_stitch
