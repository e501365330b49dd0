#include "coalesce_pack.h"

#include <algorithm>
#include <utility>

#include "autotune.h"

namespace tf_stitch {
namespace {

constexpr size_t kPacksKept = 64;  // of a lane: a graph's node takes about a kilobyte

// Products that many requests may share a call for: nothing is added to them, and there is something to sum over.
bool IsPlainProduct(const Step& s, const StepPlan& p) {
  return s.kind == Step::Kind::kLibrary && s.call == LibraryCall::kMatmul && !s.matmul.bias && p.dims[3] > 0;
}

uint64_t Word(const void* address) { return reinterpret_cast<uint64_t>(address); }

}  // namespace

PackedLaunch::PackedLaunch(const Program& program, const Plan& plan, const CudaPlan& ready, size_t launch) {
  size_t step = ready.step(launch);
  const Step& s = program.steps[step];
  const StepPlan& p = plan.steps[step];
  if (ready.is_grid(launch)) return;
  if (s.kind == Step::Kind::kKernel) {
    function = ready.code()->many(step);
    many = function != nullptr;
    blocks = p.blocks;
    shared_bytes = p.shared_bytes;
    threads = s.threads;
    buffers = s.buffers;
    ready.AppendWords(launch, std::vector<void*>(program.buffers.size()).data(), &rest);
    rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(buffers.size()));
    what = "kernel '" + s.kernel + "' of '" + s.origin + "'";
  } else if (IsPlainProduct(s, p)) {
    many = true;
    int dtype = program.buffers[s.buffers[0]].dtype;
    int64_t m = p.dims[1], n = p.dims[2], k = p.dims[3], size = DTypeSize(dtype);
    const MatmulFlags& f = s.matmul;
    batch = p.dims[0];
    product = {dtype, m, n, k, f.trans_lhs, f.trans_rhs, ready.tf32()};
    buffers = {s.buffers[0], s.buffers[1], s.buffers.back()};
    stride = {f.broadcast_lhs ? 0 : m * k * size, f.broadcast_rhs ? 0 : k * n * size, m * n * size};
    what = "the matrix products of '" + s.origin + "'";
  }
}

// --- packs -------------------------------------------------------------------------------------------------

std::unique_ptr<Pack> Pack::Make(const std::vector<PackedLaunch>& launches, size_t begin, size_t end, size_t count,
                                 const std::shared_ptr<CudaCode>& code, bool graphs, cuda::LaneStreams* lane,
                                 std::string* error) {
  std::unique_ptr<Pack> pack(new Pack(code->driver(), lane, begin, count, graphs));
  pack->code_ = code;
  for (size_t i = begin; i < end && error->empty(); ++i) *error = pack->Add(launches[i]);
  if (error->empty() && pack->table_bytes() > cuda::LaneStreams::kTableBytes) *error = "their table would be too large";
  return error->empty() ? std::move(pack) : nullptr;
}

Pack::~Pack() {
  if (graph_) driver_.GraphExecDestroy(graph_);  // one that still runs is freed when it ends
}

std::string Pack::Add(const PackedLaunch& p) {
  if (p.function) {
    at_.push_back(list_.AddKernel(p.function, p.blocks, p.threads, p.shared_bytes, p.words(), count_, p.what));
    return "";
  }
  return list_.AddProducts({p.product}, {count_ * static_cast<size_t>(p.batch)}, p.what, &at_);
}

void Pack::Fill(const std::vector<PackMember>& members, uint64_t* table) const {
  for (size_t i = 0; i < at_.size(); ++i) {
    for (size_t j = 0; j < count_; ++j) {
      const PackMember& m = members[j];
      const PackedLaunch& p = (*m.launches)[begin_ + i];
      if (p.function) {
        uint64_t* to = table + at_[i] + j * p.words();
        for (uint32_t id : p.buffers) *to++ = Word(m.memory[id]);
        std::copy(p.rest.begin(), p.rest.end(), to);
      } else {
        auto batch = static_cast<size_t>(p.batch);
        size_t array = cuda::LaunchList::ArrayWords(count_ * batch);
        for (size_t k = 0; k < p.stride.size(); ++k) {
          const char* matrix = static_cast<const char*>(m.memory[p.buffers[k]]);
          uint64_t* to = table + at_[i] + k * array + j * batch;
          for (size_t b = 0; b < batch; ++b, matrix += p.stride[k]) to[b] = Word(matrix);
        }
      }
    }
  }
}

std::string Pack::Run() {
  if (!graph_ && graphs_ && runs_++ > 0) {
    std::string error = Record();
    if (!error.empty()) {  // graphs are only an optimisation
      graphs_ = false;
      cuda::Note("tf_stitch: superkernels run without CUDA graphs: " + error + ".");
    }
  }
  return graph_ ? RunOn(lane_->main()) : list_.Enqueue();
}

std::string Pack::RunOn(cuda::Stream stream) {
  cuda::Result result = driver_.GraphLaunch(graph_, stream);
  return result ? cuda::Failed(driver_, result, "launching the graph of a superkernel") : "";
}

std::string Pack::Record() {
  auto failed = [&](cuda::Result result, const char* doing) { return cuda::Failed(driver_, result, doing); };
  cuda::Result result = driver_.StreamBeginCapture(lane_->main(), cuda::kCaptureRelaxed);
  if (result) return failed(result, "starting a capture");
  std::string error = list_.Enqueue();
  cuda::Graph graph = nullptr;
  result = driver_.StreamEndCapture(lane_->main(), &graph);
  if (error.empty() && result) error = failed(result, "ending a capture");
  if (error.empty()) {
    result = driver_.GraphInstantiate(&graph_, graph, 0);
    if (result) graph_ = nullptr, error = failed(result, "instantiating a graph");
  }
  if (graph) driver_.GraphDestroy(graph);
  return error;
}

// --- kept packs ----------------------------------------------------------------------------------------------

Pack* PackCache::Find(uint64_t cluster, size_t count) {
  auto found = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& e) { return e.cluster == cluster && e.count == count; });
  if (found == entries_.end()) return nullptr;
  if (!found->pack->is_usable()) {
    entries_.erase(found);
    return nullptr;
  }
  entries_.splice(entries_.begin(), entries_, found);
  return entries_.front().pack.get();
}

Pack* PackCache::Keep(uint64_t cluster, size_t count, std::unique_ptr<Pack> pack) {
  entries_.remove_if([](const Entry& e) { return !e.pack->is_usable(); });
  if (entries_.size() >= kPacksKept) entries_.pop_back();
  entries_.push_front({cluster, count, std::move(pack)});
  return entries_.front().pack.get();
}

}  // namespace tf_stitch
