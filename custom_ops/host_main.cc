// A server in small, without Python: the op is linked in, models run through TensorFlow's C API.
//
//   tf_stitch_host signatures MODEL
//   tf_stitch_host run MODEL REQUEST.npz|REQUEST.json|- [--signature S] [--output ANSWER.npz] [--deadline-ms MS]
//   tf_stitch_host load MODEL [--original MODEL] [--signature S] [--inputs FILE] [--threads N] [--requests N]
//       [--deadline-ms MS] [--batches 1,3,17] [--distinct N] [--other-dim N] [--integers-below N] [--tolerance X]
//       [--seed N] [--both] [--max-growth-mb MB]
//
// `run` prints the answer as JSON.  `load` prints one JSON object: answers that are right, wrong, late (past the
// deadline) and failed, requests a second, latencies, resident memory, and how often the op's own kernels and its
// fallback ran.  Answers are compared with those of the original model, or of the first run of this one.  --both sends
// the same load to the original too, first.  Exit status: 0; 1 for a wrong or failed answer or memory that grows by
// more than --max-growth-mb after the first tenth; 2 for wrong usage.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>

#include "flat_json.h"
#include "host/json.h"
#include "host/load.h"
#include "host/model.h"
#include "host/npz.h"
#include "host/tensor.h"

extern "C" void tf_stitch_counters(int64_t* out);

namespace tf_stitch::host {
namespace {

struct Usage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Positional arguments and --name value pairs; what nobody asked for is a usage error.
class Args {
 public:
  Args(int argc, char** argv, const std::set<std::string>& flags) {
    for (int i = 1; i < argc; ++i) {
      std::string arg = argv[i];
      if (arg.rfind("--", 0) != 0) {
        positional_.push_back(arg);
      } else if (flags.count(arg)) {
        named_[arg] = "1";
      } else if (i + 1 < argc) {
        named_[arg] = argv[++i];
      } else {
        throw Usage(arg + " needs a value");
      }
    }
  }
  std::string Positional(size_t i, const char* what) {
    if (i >= positional_.size()) throw Usage(std::string("give ") + what);
    used_ = std::max(used_, i + 1);
    return positional_[i];
  }
  std::string Text(const std::string& name, const std::string& otherwise) {
    auto found = named_.find(name);
    if (found == named_.end()) return otherwise;
    std::string value = found->second;
    named_.erase(found);
    return value;
  }
  int64_t Integer(const std::string& name, int64_t otherwise, int64_t least) {
    return static_cast<int64_t>(Real(name, static_cast<double>(otherwise), static_cast<double>(least)));
  }
  double Real(const std::string& name, double otherwise, double least) {
    std::string text = Text(name, "");
    if (text.empty()) return otherwise;
    char* end = nullptr;
    double value = strtod(text.c_str(), &end);
    if (*end || !(value >= least) || value > 9e15) throw Usage(name + " cannot be '" + text + "'");
    return value;
  }
  void Finish() const {
    if (!named_.empty()) throw Usage(named_.begin()->first + " is not known");
    if (used_ < positional_.size()) throw Usage("'" + positional_[used_] + "' is too much");
  }

 private:
  std::vector<std::string> positional_;
  std::map<std::string, std::string> named_;
  size_t used_ = 0;
};

constexpr char kDefaultSignature[] = "serving_default";

NamedTensors ReadRequest(const std::string& path, const Signature& signature) {
  if (path.size() > 4 && path.compare(path.size() - 4, 4, ".npz") == 0) return ReadNpz(path, signature);
  std::ifstream file(path, std::ios::binary);
  std::istream& in = path == "-" ? std::cin : file;
  if (!in) throw Failure("'" + path + "' cannot be read.");
  return ReadJson(std::string(std::istreambuf_iterator<char>(in), {}), signature);
}

int Signatures(Args* args) {
  std::string folder = args->Positional(1, "the folder of a SavedModel");
  args->Finish();
  Model model(folder, 1);
  auto list = [](const char* what, const std::vector<Spec>& specs) {
    for (const Spec& spec : specs) {
      printf("  %s %s: %s %s\n", what, spec.name.c_str(), InfoOf(spec.dtype).name,
             spec.known_rank ? ShapeText(spec.shape).c_str() : "[...]");
    }
  };
  for (const auto& [name, signature] : model.signatures()) {
    printf("%s\n", name.c_str());
    list("in ", signature.inputs);
    list("out", signature.outputs);
  }
  return 0;
}

int Run(Args* args) {
  std::string folder = args->Positional(1, "the folder of a SavedModel");
  std::string request = args->Positional(2, "a request: a file of .npz or .json, or - for JSON from standard input");
  std::string name = args->Text("--signature", kDefaultSignature), output = args->Text("--output", "");
  int64_t deadline_ms = args->Integer("--deadline-ms", 0, 1);
  args->Finish();
  Model model(folder, 0);
  const Signature& signature = model.signature(name);
  Answer answer = model.Run(signature, ReadRequest(request, signature), deadline_ms);
  if (answer.code != TF_OK) {
    throw Failure("error " + std::to_string(answer.code) + ": " + answer.message);
  }
  if (output.empty()) {
    printf("%s\n", WriteJson(answer.outputs).c_str());
  } else {
    WriteNpz(output, answer.outputs);
  }
  return 0;
}

std::vector<int64_t> Integers(const std::string& text) {
  std::vector<int64_t> out;
  for (const char* at = text.c_str(); *at;) {
    char* end = nullptr;
    out.push_back(strtoll(at, &end, 10));
    if (end == at || out.back() < 0 || (*end && *end != ',')) throw Usage("--batches cannot be '" + text + "'");
    at = *end ? end + 1 : end;
  }
  return out;
}

LoadOptions ReadLoadOptions(Args* args) {
  LoadOptions o;
  o.threads = static_cast<int>(args->Integer("--threads", o.threads, 1));
  o.requests = args->Integer("--requests", o.requests, 1);
  o.deadline_ms = args->Integer("--deadline-ms", 0, 1);
  o.other_dim = args->Integer("--other-dim", o.other_dim, 0);
  o.integers_below = args->Integer("--integers-below", o.integers_below, 1);
  o.distinct = static_cast<int>(args->Integer("--distinct", o.distinct, 1));
  o.tolerance = args->Real("--tolerance", o.tolerance, 0);
  o.seed = static_cast<uint64_t>(args->Integer("--seed", 1, 0));
  o.batches = Integers(args->Text("--batches", "1,3,17"));
  return o;
}

// Requests with the reference's answers.
std::vector<Case> MakeCases(const Model& reference, const Signature& theirs, const Signature& mine,
                            const LoadOptions& options, const std::string& inputs) {
  std::vector<Case> cases;
  auto add = [&](NamedTensors in) {
    Answer answer = reference.Run(theirs, in, 0);
    if (answer.code != TF_OK) throw Failure("The reference fails on a request: " + answer.message);
    cases.push_back({&mine, std::move(in), std::move(answer.outputs)});
  };
  if (!inputs.empty()) {
    add(ReadRequest(inputs, theirs));
    return cases;
  }
  for (int k = 0; k < options.distinct; ++k) {
    for (size_t b = 0; b < options.batches.size(); ++b) {
      add(DrawInputs(theirs, options, options.batches[b], options.seed * 1000003 + k * options.batches.size() + b));
    }
  }
  return cases;
}

std::string Text(const LoadResult& r) {
  char text[1000];
  snprintf(
      text, sizeof text,
      "{\"right\": %lld, \"wrong\": %lld, \"late\": %lld, \"failed\": %lld, \"worst_error\": %.3g, \"seconds\": %.3f, "
      "\"per_second\": %.1f, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"max_ms\": %.3f, \"rss_mb\": {\"before\": %.1f, "
      "\"warm\": %.1f, \"peak\": %.1f, \"after\": %.1f}}",
      static_cast<long long>(r.answered), static_cast<long long>(r.wrong), static_cast<long long>(r.late),
      static_cast<long long>(r.failed), std::isfinite(r.worst_error) ? r.worst_error : 1e300, r.seconds,
      static_cast<double>(r.answered + r.wrong + r.late + r.failed) / r.seconds, r.p50_ms, r.p99_ms, r.largest_ms,
      r.rss_before / 1e6, r.rss_warm / 1e6, r.rss_peak / 1e6, r.rss_after / 1e6);
  return text;
}

int Load(Args* args) {
  std::string folder = args->Positional(1, "the folder of a SavedModel");
  std::string original_folder = args->Text("--original", ""), inputs = args->Text("--inputs", "");
  std::string name = args->Text("--signature", kDefaultSignature);
  double most_growth = args->Real("--max-growth-mb", 1e9, 0);
  bool both = !args->Text("--both", "").empty();
  LoadOptions options = ReadLoadOptions(args);
  args->Finish();
  if (both && original_folder.empty()) throw Usage("--both needs --original");
  if (options.batches.empty()) throw Usage("--batches needs a number");

  Model model(folder, 0);
  std::unique_ptr<Model> original;
  if (!original_folder.empty()) original = std::make_unique<Model>(original_folder, 0);
  const Signature &mine = model.signature(name), &theirs = original ? original->signature(name) : mine;
  std::vector<Case> cases = MakeCases(original ? *original : model, theirs, mine, options, inputs);
  std::optional<LoadResult> reference;
  if (both) {
    std::vector<Case> same = cases;
    for (Case& c : same) c.signature = &theirs;
    reference = RunLoad(*original, same, options);
  }
  if (!both) original.reset();  // its memory is no part of what is watched
  int64_t before[4], after[4];
  tf_stitch_counters(before);
  LoadResult result = RunLoad(model, cases, options);
  tf_stitch_counters(after);
  printf("{\"threads\": %d, \"requests\": %lld, \"model\": %s, \"stitched_runs\": %lld, \"fallback_runs\": %lld",
         options.threads, static_cast<long long>(options.requests), Text(result).c_str(),
         static_cast<long long>(after[0] - before[0]), static_cast<long long>(after[1] - before[1]));
  if (reference) printf(", \"original\": %s", Text(*reference).c_str());
  printf(", \"first_problem\": %s}\n", QuotedJson(result.first_problem).c_str());
  bool grows = (result.rss_after - result.rss_warm) / 1e6 > most_growth;
  if (grows) fprintf(stderr, "tf_stitch_host: the memory of the process grew past --max-growth-mb\n");
  return result.wrong || result.failed || grows ? 1 : 0;
}

int Main(int argc, char** argv) {
  static const std::map<std::string, std::function<int(Args*)>> kCommands = {
      {"signatures", Signatures}, {"run", Run}, {"load", Load}};
  try {
    Args args(argc, argv, {"--both"});
    auto command = kCommands.find(args.Positional(0, "a command: signatures, run or load"));
    if (command == kCommands.end()) throw Usage("the commands are signatures, run and load");
    return command->second(&args);
  } catch (const Usage& error) {
    fprintf(stderr, "tf_stitch_host: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fprintf(stderr, "tf_stitch_host: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace tf_stitch::host

int main(int argc, char** argv) { return tf_stitch::host::Main(argc, argv); }
