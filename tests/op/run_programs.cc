// Loads and runs programs from many threads at once, as the op does, and compares with one thread's results.  Built
// with sanitizers.
//
//   run_programs ROUNDS FILE...     the files hold programs with code for this processor
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../custom_ops/plan.h"
#include "../../custom_ops/program.h"
#include "../../custom_ops/runtime_host.h"

namespace {

using tf_stitch::Backing;
using tf_stitch::Buffer;
using tf_stitch::HostCode;
using tf_stitch::Plan;
using tf_stitch::PlanCache;
using tf_stitch::Program;
using tf_stitch::Signature;

[[noreturn]] void Die(const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  exit(1);
}

// Shards on threads of their own.
void ParallelFor(int64_t total, int64_t block, const std::function<void(int64_t, int64_t)>& fn) {
  std::vector<std::thread> threads;
  for (int64_t begin = 0; begin < total; begin += block) {
    auto shard = [&fn, begin, end = std::min(begin + block, total)] { fn(begin, end); };
    if (threads.size() < 3) {
      threads.emplace_back(shard);
    } else {
      shard();
    }
  }
  for (std::thread& t : threads) t.join();
}

// Sizes of all dims and values: equal where dims must be, small.
Signature Sizes(const Program& program, int64_t size) {
  size_t length = 0;
  for (uint32_t id : program.inputs) length += program.buffers[id].shape.size();
  for (const auto& s : program.symbols) length += s.kind == tf_stitch::SymbolKind::kValue;
  return Signature(length, size);
}

using Memory = std::unique_ptr<char, void (*)(void*)>;

// Zeros, aligned as TensorFlow's tensors are.
Memory Allocate(size_t bytes) {
  void* at = nullptr;
  if (posix_memalign(&at, 64, bytes)) Die("no memory");
  memset(at, 0, bytes);
  return Memory(static_cast<char*>(at), free);
}

// One run with inputs of a fixed pattern; the bytes of all outputs, or nothing when the kernels cannot run it.
std::string Run(const Program& program, const HostCode& code, PlanCache* plans, int64_t size, int threads) {
  std::shared_ptr<const Plan> plan = plans->Get(program, Sizes(program, size));
  if (!plan->usable) return "";
  // Allocated one by one, at their exact sizes, so that the address sanitizer sees a byte past the end.
  std::vector<Memory> inputs, outputs;
  auto bytes = [&](uint32_t id) { return static_cast<size_t>(plan->buffer_bytes[id]); };
  std::minstd_rand rng(static_cast<uint32_t>(size + 1));
  for (uint32_t id : program.inputs) {
    inputs.push_back(Allocate(bytes(id)));
    for (size_t i = 0; i < bytes(id); ++i) inputs.back().get()[i] = static_cast<char>(rng() % 60);
  }
  for (uint32_t id : program.outputs) outputs.push_back(Allocate(bytes(id)));
  Memory arena = Allocate(static_cast<size_t>(plan->arena_bytes));
  std::vector<void*> memory;
  for (size_t id = 0; id < program.buffers.size(); ++id) {
    const Buffer& b = program.buffers[id];
    memory.push_back(b.backing == Backing::kInput    ? inputs[b.backing_index].get()
                     : b.backing == Backing::kOutput ? outputs[b.backing_index].get()
                                                     : arena.get() + plan->arena_offset[id]);
  }
  if (tf_stitch::RunHost(program, code, *plan, memory.data(), ParallelFor, threads)) return "status";
  std::string out;
  for (uint32_t id : program.outputs) {
    const char* from = static_cast<const char*>(memory[id]);
    out.append(from, bytes(id));
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int rounds = atoi(argv[1]);
  int64_t ran = 0;
  std::mutex mu;
  for (int i = 2; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    std::string data(std::istreambuf_iterator<char>(file), {}), error;
    Program program;
    if (!tf_stitch::ParseProgram(data, &program, &error)) Die(error);
    bool products = std::any_of(program.steps.begin(), program.steps.end(),
                                [](const tf_stitch::Step& s) { return s.kind == tf_stitch::Step::Kind::kLibrary; });
    const int64_t sizes = products ? 20 : 90;
    auto work = [&](int seed) {
      std::string why;
      std::unique_ptr<HostCode> code = HostCode::Load(program, &why);  // shared underneath: equal code is loaded once
      if (!code) Die(why);
      static std::mutex plans_mu;
      static std::vector<std::unique_ptr<PlanCache>> caches;
      PlanCache* plans;
      {
        std::lock_guard<std::mutex> lock(plans_mu);
        while (caches.size() <= static_cast<size_t>(i)) caches.push_back(std::make_unique<PlanCache>(4));
        plans = caches[i].get();
      }
      PlanCache own;
      for (int round = 0; round < rounds; ++round) {
        int64_t size = (seed * 7 + round * 13) % sizes;
        std::string got = Run(program, *code, plans, size, 4), want = Run(program, *code, &own, size, 1);
        if (got != want) Die(std::string(argv[i]) + ": threads change the result");
        std::lock_guard<std::mutex> lock(mu);
        ran += !got.empty();
      }
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) threads.emplace_back(work, t);
    for (std::thread& t : threads) t.join();
  }
  printf("%lld runs\n", static_cast<long long>(ran));
}
