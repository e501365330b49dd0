// Files that appear whole or not at all.
#ifndef TF_STITCH_CUSTOM_OPS_FILES_H_
#define TF_STITCH_CUSTOM_OPS_FILES_H_

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <string>

namespace tf_stitch {

// Writes a file beside `path`, which no other thread or process writes, and renames it.  False when that fails; what
// was there before is there still then.
inline bool WriteWhole(const std::string& path, const std::string& contents) {
  static std::atomic<int> count{0};
  const std::string fresh = path + "." + std::to_string(getpid()) + "." + std::to_string(count++);
  std::ofstream file(fresh, std::ios::binary);
  file << contents;
  file.close();
  if (file && rename(fresh.c_str(), path.c_str()) == 0) return true;
  unlink(fresh.c_str());
  return false;
}

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_FILES_H_
