// Checks a signature with custom_ops/ed25519.cc, outside TensorFlow: by OpenSSL's libcrypto.
//
//   verify KEYS.pem MESSAGE SIGNATURE     (files) prints the number of keys and of those that signed, or the error
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "../../custom_ops/ed25519.h"

static std::string Read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int main(int, char** argv) {
  std::string error;
  int good = 0;
  auto keys = tf_stitch::ReadPublicKeys(Read(argv[1]));
  for (const auto& key : keys) good += tf_stitch::Ed25519Verify(Read(argv[2]), Read(argv[3]), key, &error);
  printf("%zu %d %s\n", keys.size(), good, error.c_str());
}
