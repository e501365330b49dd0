#include "autotune.h"

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda_capture.h"
#include "cudnn.h"
#include "environment.h"
#include "files.h"
#include "hash.h"
#include "program.h"

namespace tf_stitch::cuda {
namespace {

constexpr char kHeader[] = "tf_stitch choice 1";
constexpr float kTie = 0.97f;
constexpr size_t kChoicesKept = 1 << 16;
constexpr int kRepeats = 3;  // the shortest counts
constexpr int kAlways = 4;   // candidates that are timed however long it takes: hosts may be busy

thread_local bool t_forbidden = false;

void NoteOnStandardError(const std::string& note) { fprintf(stderr, "%s\n", note.c_str()); }

std::atomic<void (*)(const std::string&)> g_note{&NoteOnStandardError};

// --- timing ------------------------------------------------------------------------------------------

// A stream and two events.
struct Clock {
  explicit Clock(const Driver& driver) : driver(driver), own(driver), stream(own.get()) {
    ok = stream && !driver.EventCreate(&start, 0) && !driver.EventCreate(&end, 0);
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  ~Clock() {
    if (start) driver.EventDestroy(start);
    if (end) driver.EventDestroy(end);
  }

  // Milliseconds of a run of `graph`, or -1.
  float Time(GraphExec graph) const {
    float ms = -1;
    bool timed = !driver.EventRecord(start, stream) && !driver.GraphLaunch(graph, stream) &&
                 !driver.EventRecord(end, stream) && !driver.EventSynchronize(end) &&
                 !driver.EventElapsedTime(&ms, start, end);
    return timed ? ms : -1;
  }

  const Driver& driver;
  const OwnStream own;
  const Stream stream;
  Event start = nullptr, end = nullptr;
  bool ok = false;
};

// A graph of kTuningRounds rounds of one candidate; null when it cannot be captured.
GraphExec GraphOf(const Clock& clock, int candidate, const RunCandidate& run) {
  const Driver& driver = clock.driver;
  // Outside of the capture first: libraries load their kernels when they are used for the first time.
  if (!run(candidate, 0, clock.stream).empty() || driver.StreamSynchronize(clock.stream)) return nullptr;
  auto rounds = [&] {
    std::string error;
    for (int round = 0; round < kTuningRounds && error.empty(); ++round) error = run(candidate, round, clock.stream);
    return error;
  };
  Graph graph = nullptr;
  GraphExec exec = nullptr;
  if (!Capture(driver, clock.stream, rounds, &graph).empty()) return nullptr;
  if (driver.GraphInstantiate(&exec, graph, 0)) exec = nullptr;
  driver.GraphDestroy(graph);
  return exec;
}

// Milliseconds of one candidate's rounds, or -1.
float TimeOf(const Clock& clock, int candidate, const RunCandidate& run) {
  GraphExec graph = GraphOf(clock, candidate, run);
  if (!graph) return -1;
  float best = -1;
  for (int i = 0; i < kRepeats; ++i) {
    float ms = clock.Time(graph);
    if (ms >= 0 && i > 0 && (best < 0 || ms < best)) best = ms;  // the first one warms up
  }
  clock.driver.GraphExecDestroy(graph);
  return best;
}

// --- choices -------------------------------------------------------------------------------------------

std::mutex& ChoicesMutex() {
  static auto& mu = *new std::mutex;
  return mu;
}

std::map<std::string, std::string>& Choices() {
  static auto& choices = *new std::map<std::string, std::string>;
  return choices;
}

// --- the files ---------------------------------------------------------------------------------------

// As tf_stitch/backend/cache.py has it; "" when there is no place for it.
std::string CacheFolder() {
  if (const char* folder = getenv("TF_STITCH_CACHE"); folder && *folder) return folder;
  if (const char* folder = getenv("XDG_CACHE_HOME"); folder && *folder) return std::string(folder) + "/tf_stitch";
  if (const char* home = getenv("HOME"); home && *home) return std::string(home) + "/.cache/tf_stitch";
  return "";
}

std::string PathOf(const std::string& folder, const std::string& key) {
  char name[32];  // the file holds the key too, so that a collision is only a miss
  snprintf(name, sizeof name, "%016" PRIx64, HashOfBytes(key));
  return folder + "/choices/" + name + ".txt";
}

std::string Hex(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (unsigned char c : bytes) out += {kDigits[c >> 4], kDigits[c & 15]};
  return out;
}

bool Unhex(const std::string& hex, std::string* bytes) {
  bytes->clear();
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    char* end = nullptr;
    char pair[3] = {hex[i], hex[i + 1], 0};
    bytes->push_back(static_cast<char>(strtoul(pair, &end, 16)));
    if (end != pair + 2) return false;
  }
  return hex.size() % 2 == 0;
}

std::string Contents(const std::string& key, const std::string& choice) {
  std::string body = std::string(kHeader) + "\n" + key + "\n" + Hex(choice) + "\n";
  char crc[16];
  snprintf(crc, sizeof crc, "%08x\n", Crc32(body));
  return body + crc;
}

bool MakeFolders(const std::string& path) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    mkdir(path.substr(0, at).c_str(), 0777);
  }
  struct stat info;
  return mkdir(path.c_str(), 0777) == 0 || (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode));
}

}  // namespace

bool TuningAllowed() {
  static const bool enabled = IsOn("TF_STITCH_AUTOTUNE", true);
  return enabled && !t_forbidden;
}

NoTuning::NoTuning(bool forbid) : before_(t_forbidden) { t_forbidden = before_ || forbid; }
NoTuning::~NoTuning() { t_forbidden = before_; }

OwnStream::OwnStream(const Driver& driver) : driver_(driver) {
  if (driver.StreamCreate(&stream_, kStreamNonBlocking)) stream_ = nullptr;
}
OwnStream::~OwnStream() {
  if (!stream_) return;
  ForgetStream(stream_);
  driver_.StreamDestroy(stream_);
}

Scratch::Scratch(const Driver& driver, size_t bytes) : driver_(driver) {
  RelaxedCapture relaxed(driver);
  void* memory = nullptr;
  if (driver.MemAlloc(&memory, bytes ? bytes : 1)) return;
  memory_ = static_cast<char*>(memory);
  OwnStream stream(driver);
  if (!stream.get() || driver.MemsetD8Async(memory, 0, bytes, stream.get()) || driver.StreamSynchronize(stream.get())) {
    driver.MemFree(memory);
    memory_ = nullptr;
  }
}

Scratch::~Scratch() {
  RelaxedCapture relaxed(driver_);
  if (memory_) driver_.MemFree(memory_);
}

int Fastest(const Driver& driver, int count, const RunCandidate& run, double milliseconds) {
  using std::chrono::steady_clock;
  static auto& mu = *new std::mutex;  // measurements at the same time would disturb each other
  std::lock_guard<std::mutex> lock(mu);
  RelaxedCapture relaxed(driver);
  Clock clock(driver);
  if (!clock.ok) return -1;
  const auto end = steady_clock::now() + std::chrono::duration<double, std::milli>(milliseconds);
  int best = -1;
  float best_ms = 0;
  for (int i = 0; i < count && (i < kAlways || steady_clock::now() < end); ++i) {
    float ms = TimeOf(clock, i, run);
    if (ms < 0 || (best >= 0 && ms >= best_ms * kTie)) continue;
    best = i;
    best_ms = ms;
  }
  return best;
}

int64_t SizeClass(int64_t size) {
  if (size <= 16) return size;
  int64_t up = 32;
  while (up < size && up < INT64_MAX / 2) up *= 2;
  return up;
}

std::optional<std::string> ReadChoice(const std::string& key) {
  {
    std::lock_guard<std::mutex> lock(ChoicesMutex());
    auto found = Choices().find(key);
    if (found != Choices().end()) return found->second;
  }
  std::string folder = CacheFolder();
  if (folder.empty()) return std::nullopt;
  std::string path = PathOf(folder, key);
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::stringstream all;
  all << file.rdbuf();
  std::istringstream lines(all.str());
  std::string header, stored_key, hex, choice;
  std::getline(lines, header);
  std::getline(lines, stored_key);
  std::getline(lines, hex);
  if (!Unhex(hex, &choice) || header != kHeader || Contents(stored_key, choice) != all.str()) {
    Note("tf_stitch: " + path + " is damaged and not used; it is measured again.");
    return std::nullopt;
  }
  if (stored_key != key) return std::nullopt;
  return choice;
}

void WriteChoice(const std::string& key, const std::string& choice) {
  {
    std::lock_guard<std::mutex> lock(ChoicesMutex());
    if (Choices().size() < kChoicesKept) Choices()[key] = choice;
  }
  std::string folder = CacheFolder();
  if (!folder.empty() && MakeFolders(folder + "/choices") && WriteWhole(PathOf(folder, key), Contents(key, choice))) {
    return;
  }
  Note("tf_stitch: the folder '" + folder + "' cannot be written, so that the algorithms of library calls are chosen " +
       "anew by every process; set TF_STITCH_CACHE to a folder that can be written.");
}

std::string DeviceKey(const Driver& driver) {
  Device device = 0;
  char name[128] = "";
  int version = 0;
  driver.CtxGetDevice(&device);
  driver.DeviceGetName(name, sizeof name, device);
  driver.DriverGetVersion(&version);
  return std::string(name) + ", driver " + std::to_string(version);
}

void SetNoteHandler(void (*handler)(const std::string&)) { g_note = handler; }
void Note(const std::string& note) { g_note.load()(note); }

}  // namespace tf_stitch::cuda
