#include "table_writer.h"

#include <string>

#include "cuda_capture.h"

namespace tf_stitch::cuda {
namespace {

constexpr unsigned kThreads = 128;

unsigned Blocks(unsigned count) { return (count + kThreads - 1) / kThreads; }

std::string NameOf(unsigned words) { return "ts_write_table_" + std::to_string(words); }

// PTX of a kernel whose parameters are `words` words, where they go, and how many of them count; a thread writes one.
std::string KernelOf(unsigned words) {
  return ".visible .entry " + NameOf(words) + "(.param .align 8 .b8 table[" + std::to_string(words * 8) + "]," + R"(
    .param .u64 to, .param .u32 count) {
  .reg .pred %beyond;
  .reg .b32 %i, %block, %thread, %count;
  .reg .b64 %at, %from, %to, %word;
  mov.u32 %block, %ctaid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %i, %block, )" +
         std::to_string(kThreads) + R"(, %thread;
  ld.param.u32 %count, [count];
  setp.ge.u32 %beyond, %i, %count;
  @%beyond ret;
  mul.wide.u32 %at, %i, 8;
  mov.b64 %from, table;
  add.s64 %from, %from, %at;
  ld.param.u64 %word, [%from];
  ld.param.u64 %to, [to];
  cvta.to.global.u64 %to, %to;
  add.s64 %to, %to, %at;
  st.global.u64 [%to], %word;
  ret;
}
)";
}

}  // namespace

TableWriter::TableWriter(const Driver& driver) : driver_(driver) {
  RelaxedCapture relaxed(driver);
  std::string text = ".version 8.1\n.target sm_70\n.address_size 64\n";  // 8.1: parameters of so many bytes
  for (unsigned words : kWords) text += KernelOf(words);
  if (driver.ModuleLoadDataEx(&module_, text.c_str(), 0, nullptr, nullptr)) module_ = nullptr;
  for (size_t i = 0; i < kWords.size() && module_; ++i) {
    if (!driver.ModuleGetFunction(&kernels_[i], module_, NameOf(kWords[i]).c_str())) continue;
    driver.ModuleUnload(module_);
    module_ = nullptr;
  }
}

TableWriter::~TableWriter() {
  RelaxedCapture relaxed(driver_);
  if (module_ && WaitForContext(driver_)) driver_.ModuleUnload(module_);  // tables may still be on their way
}

Function TableWriter::KernelFor(size_t bytes) const {
  size_t fits = 0;
  while (kWords[fits] < bytes / 8) ++fits;
  return kernels_[fits];
}

Result TableWriter::Enqueue(void* to, const void* from, size_t bytes, Stream stream) const {
  auto count = static_cast<unsigned>(bytes / 8);
  void* parameters[] = {const_cast<void*>(from), &to, &count};
  return driver_.LaunchKernel(KernelFor(bytes), Blocks(count), 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr);
}

Result TableWriter::Change(GraphExec graph, GraphNode node, void* to, const void* from, size_t bytes) const {
  auto count = static_cast<unsigned>(bytes / 8);
  void* parameters[] = {const_cast<void*>(from), &to, &count};
  KernelNodeParams changed{};
  changed.func = KernelFor(bytes);
  changed.grid_x = Blocks(count);
  changed.grid_y = changed.grid_z = 1;
  changed.block_x = kThreads;
  changed.block_y = changed.block_z = 1;
  changed.kernel_params = parameters;
  return driver_.GraphExecKernelNodeSetParams(graph, node, &changed);
}

}  // namespace tf_stitch::cuda
