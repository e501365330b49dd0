#include "trust.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "ed25519.h"

namespace tf_stitch {
namespace {

// Goes before the program in what is signed, so that a signature says what it is for (tf_stitch/signing.py).
constexpr std::string_view kDomain("tf_stitch program\0", 18);

enum class Allow { kAny, kSigned, kNone };

struct Policy {
  Allow allow = Allow::kAny;
  std::string why;  // for kNone
  std::vector<PublicKey> keys;
};

std::string Environment(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

Policy ReadPolicy() {
  std::string allow = Environment("TF_STITCH_ALLOW");
  if (allow.empty() || allow == "any") return {Allow::kAny, "", {}};
  if (allow == "none") return {Allow::kNone, "TF_STITCH_ALLOW=none forbids native code from models", {}};
  if (allow != "signed") {
    return {Allow::kNone, "TF_STITCH_ALLOW is '" + allow + "', which is none of any, signed and none", {}};
  }
  std::string path = Environment("TF_STITCH_KEYS");
  std::ifstream file(path, std::ios::binary);
  if (path.empty() || !file) {
    return {Allow::kNone, "TF_STITCH_ALLOW=signed needs TF_STITCH_KEYS, a readable file of public keys", {}};
  }
  Policy policy{Allow::kSigned, "", ReadPublicKeys(std::string(std::istreambuf_iterator<char>(file), {}))};
  if (policy.keys.empty()) return {Allow::kNone, "'" + path + "' (TF_STITCH_KEYS) holds no Ed25519 public key", {}};
  return policy;
}

}  // namespace

std::string WhyNotAllowed(std::string_view program, std::string_view signature) {
  static const Policy& policy = *new Policy(ReadPolicy());
  if (policy.allow == Allow::kAny) return "";
  if (policy.allow == Allow::kNone) return policy.why;
  if (signature.empty()) return "TF_STITCH_ALLOW=signed, and the model is not signed (see 'tf-stitch sign')";
  std::string message(kDomain), error;
  message += program;
  for (const PublicKey& key : policy.keys) {
    if (Ed25519Verify(message, signature, key, &error)) return "";
  }
  return error.empty() ? "TF_STITCH_ALLOW=signed, and no key in TF_STITCH_KEYS has signed the model as it is" : error;
}

}  // namespace tf_stitch
