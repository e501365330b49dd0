// tfs_run_products of scheduler_c_api.h: the scheduler's packing of matrix products, and what it is compared with.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autotune.h"
#include "coalescer.h"
#include "cublas_lt.h"
#include "scheduler_c_api.h"
#include "scheduler_error.h"
#include "superkernel_cuda.h"

namespace tf_stitch {
namespace {

using cuda::LaneStreams;
using cuda::LaunchList;
using cuda::ProductShape;

struct Product {
  ProductShape shape;
  const void *lhs, *rhs;
  void* out;
};

bool Same(const ProductShape& a, const ProductShape& b) { return a.m == b.m && a.n == b.n && a.k == b.k; }

constexpr int kFloat = 1;

// Everything that a run needs; made before the clock starts.
class Runner {
 public:
  Runner(const cuda::Driver& driver, cuda::Context context, std::vector<Product> products)
      : driver_(driver), products_(std::move(products)), events_(std::make_shared<cuda::EventPool>(driver, context)) {}

  ~Runner() {
    for (cuda::Stream s : streams_) driver_.StreamDestroy(s);
    for (void* w : workspaces_) driver_.MemFree(w);
  }

  // "" or why it cannot run.
  std::string Prepare(int how, int rounds) {
    how_ = how;
    std::string error;
    lane_ = LaneStreams::Make(driver_, 0, events_, &error);
    if (!lane_ || how == TFS_SUPERKERNEL) return error.empty() ? MakeList(rounds) : error;
    for (const Product& p : products_) {
      cuda::MatmulShape shape{};
      shape.dtype = p.shape.dtype;
      shape.batch = 1;
      shape.m = p.shape.m;
      shape.n = p.shape.n;
      shape.k = p.shape.k;
      shape.tf32 = p.shape.tf32;
      matmuls_.push_back(cuda::Matmul::Get(shape, &error));
      if (!matmuls_.back()) return error;
      cuda::Stream stream = nullptr;
      void* workspace = nullptr;
      if (driver_.StreamCreate(&stream, cuda::kStreamNonBlocking)) return "a stream cannot be made";
      streams_.push_back(stream);
      if (driver_.MemAlloc(&workspace, matmuls_.back()->workspace_bytes() + 256)) return "there is not enough memory";
      workspaces_.push_back(workspace);
    }
    return "";
  }

  std::string Round(size_t round) {
    if (how_ != TFS_SUPERKERNEL) return OneByOne();
    const cuda::HostTable& table = *tables_[round];
    uint64_t* words = table.words();
    for (size_t i = 0; i < products_.size(); ++i) {
      const Product& p = products_[i];
      size_t at = first_[i], array = array_[i];
      words[at] = reinterpret_cast<uint64_t>(p.lhs);
      words[at + array] = reinterpret_cast<uint64_t>(p.rhs);
      words[at + 2 * array] = reinterpret_cast<uint64_t>(p.out);
    }
    return list_->Enqueue(table, lane_->main());
  }

  std::string Wait() { return driver_.CtxSynchronize() ? "the device failed" : ""; }

 private:
  std::string MakeList(int rounds) {
    list_ = std::make_unique<LaunchList>(driver_, lane_.get());
    std::vector<ProductShape> shapes;
    std::vector<size_t> counts, at, group, place;  // by shape; by product
    for (const Product& p : products_) {
      size_t g = 0;
      while (g < shapes.size() && !Same(shapes[g], p.shape)) ++g;
      if (g == shapes.size()) shapes.push_back(p.shape), counts.push_back(0);
      group.push_back(g);
      place.push_back(counts[g]++);
    }
    std::string error = list_->AddProducts(shapes, counts, "a benchmark", &at);
    if (!error.empty()) return error;
    for (size_t i = 0; i < products_.size(); ++i) {
      first_.push_back(at[group[i]] + place[i]);
      array_.push_back(LaunchList::ArrayWords(counts[group[i]]));
    }
    for (int i = 0; i <= rounds; ++i) {
      tables_.push_back(std::make_unique<cuda::HostTable>(driver_, list_->table_bytes()));
      if (!tables_.back()->bytes()) return "there is not enough memory";
    }
    error = list_->Record(lane_->main());  // as a pack is
    if (!error.empty()) cuda::Note("tf_stitch: superkernels run without CUDA graphs: " + error + ".");
    return "";
  }

  std::string OneByOne() {
    std::string error;
    for (size_t i = 0; i < products_.size() && error.empty(); ++i) {
      const Product& p = products_[i];
      error = matmuls_[i]->Run(p.lhs, p.rhs, nullptr, p.out, workspaces_[i], streams_[i]);
      if (how_ == TFS_TIMESLICE && driver_.StreamSynchronize(streams_[i])) error = "the device failed";
    }
    return error;
  }

  const cuda::Driver& driver_;
  const std::vector<Product> products_;
  int how_ = 0;
  std::shared_ptr<cuda::EventPool> events_;
  std::unique_ptr<LaneStreams> lane_;
  std::unique_ptr<LaunchList> list_;
  std::vector<size_t> first_, array_;                     // by product: the word of its lhs, the words of an array
  std::vector<std::unique_ptr<cuda::HostTable>> tables_;  // by round: taken until its copy has run
  std::vector<std::shared_ptr<const cuda::Matmul>> matmuls_;
  std::vector<cuda::Stream> streams_;
  std::vector<void*> workspaces_;
};

std::string Run(const tfs_product* products, int64_t count, bool tf32, int how, int rounds, double* us) {
  std::string error;
  const cuda::Driver* driver = cuda::LoadDriver(&error);
  if (!driver) return error + ".";
  cuda::Context context = nullptr;
  if (driver->CtxPopCurrent(&context) || !context || driver->CtxPushCurrent(context)) {
    return "The calling thread has no CUDA context.";
  }
  if (count < 1 || rounds < 1 || how < TFS_SUPERKERNEL || how > TFS_STREAMS) return "There is nothing to run.";
  std::vector<Product> list;
  for (int64_t i = 0; i < count; ++i) {
    const tfs_product& p = products[i];
    list.push_back({{kFloat, p.m, p.n, p.k, false, false, tf32}, p.lhs, p.rhs, p.out});
  }
  Runner runner(*driver, context, std::move(list));
  error = runner.Prepare(how, rounds);
  if (error.empty()) error = runner.Round(static_cast<size_t>(rounds));  // warms up, with a table of its own
  if (error.empty()) error = runner.Wait();
  Micros begin = NowMicros();
  for (int i = 0; i < rounds && error.empty(); ++i) error = runner.Round(static_cast<size_t>(i));
  std::string after = runner.Wait();  // also after an error: nothing may run when the memory goes
  *us = static_cast<double>(NowMicros() - begin) / rounds;
  if (error.empty()) error = after;
  return error.empty() ? "" : "The products cannot be run: " + error + ".";
}

}  // namespace
}  // namespace tf_stitch

extern "C" int tfs_run_products(const tfs_product* products, int64_t count, int tf32, int how, int rounds, double* us) {
  return tf_stitch::SchedulerResult(tf_stitch::Run(products, count, tf32 != 0, how, rounds, us));
}
