#include "ed25519.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>

#if __has_include(<openssl/curve25519.h>)
#include <openssl/curve25519.h>  // BoringSSL, in a build with Bazel
#else
// BoringSSL's, as TensorFlow's shared libraries export it; null where they do not.
extern "C" __attribute__((weak)) int ED25519_verify(const uint8_t* message, size_t message_len,
                                                    const uint8_t signature[64], const uint8_t public_key[32]);
#endif

namespace tf_stitch {
namespace {

constexpr size_t kSignatureBytes = 64;

// What is needed of OpenSSL's libcrypto (3 or 1.1).
struct Crypto {
  void* (*new_key)(int type, void* engine, const unsigned char* key, size_t size);
  void (*free_key)(void* key);
  void* (*new_context)();
  void (*free_context)(void* context);
  int (*init)(void* context, void** key_context, const void* type, void* engine, void* key);
  int (*verify)(void* context, const unsigned char* signature, size_t signature_size, const unsigned char* message,
                size_t message_size);
};
constexpr int kEd25519 = 1087;  // EVP_PKEY_ED25519

template <class T>
bool Find(void* library, const char* name, T* function) {
  *function = reinterpret_cast<T>(dlsym(library, name));
  return *function != nullptr;
}

// libcrypto, loaded once; null when it is not there.
const Crypto* LoadCrypto() {
  static const Crypto* const crypto = []() -> const Crypto* {
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
      void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (!library) continue;
      auto* c = new Crypto;
      if (Find(library, "EVP_PKEY_new_raw_public_key", &c->new_key) && Find(library, "EVP_PKEY_free", &c->free_key) &&
          Find(library, "EVP_MD_CTX_new", &c->new_context) && Find(library, "EVP_MD_CTX_free", &c->free_context) &&
          Find(library, "EVP_DigestVerifyInit", &c->init) && Find(library, "EVP_DigestVerify", &c->verify)) {
        return c;
      }
      delete c;
    }
    return nullptr;
  }();
  return crypto;
}

const uint8_t* Bytes(std::string_view s) { return reinterpret_cast<const uint8_t*>(s.data()); }

bool VerifyByLibcrypto(std::string_view message, std::string_view signature, const PublicKey& public_key,
                       std::string* error) {
  const Crypto* c = LoadCrypto();
  if (!c) {
    *error = "no library that can check signatures was found (BoringSSL in TensorFlow, or libcrypto.so.3)";
    return false;
  }
  void* key = c->new_key(kEd25519, nullptr, public_key.data(), public_key.size());
  if (!key) return false;
  void* context = c->new_context();
  bool good = context && c->init(context, nullptr, nullptr, nullptr, key) == 1 &&
              c->verify(context, Bytes(signature), signature.size(), Bytes(message), message.size()) == 1;
  c->free_context(context);
  c->free_key(key);
  return good;
}

// Base64 without regard to white space; false for other characters.
bool Decode(std::string_view text, std::string* out) {
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                : c >= 'a' && c <= 'z' ? c - 'a' + 26
                : c >= '0' && c <= '9' ? c - '0' + 52
                : c == '+'             ? 62
                : c == '/'             ? 63
                                       : -1;
    if (c == '=' || c == '\n' || c == '\r' || c == ' ' || c == '\t') continue;
    if (value < 0) return false;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) *out += static_cast<char>(bits >> (count -= 8));
  }
  return true;
}

}  // namespace

bool Ed25519Verify(std::string_view message, std::string_view signature, const PublicKey& key, std::string* error) {
  if (signature.size() != kSignatureBytes) return false;
#if !__has_include(<openssl/curve25519.h>)
  if (!ED25519_verify) return VerifyByLibcrypto(message, signature, key, error);
#else
  (void)error;
  (void)VerifyByLibcrypto;
#endif
  return ED25519_verify(Bytes(message), message.size(), Bytes(signature), key.data()) == 1;
}

std::vector<PublicKey> ReadPublicKeys(std::string_view pem) {
  constexpr std::string_view kBegin = "-----BEGIN PUBLIC KEY-----", kEnd = "-----END PUBLIC KEY-----";
  // SubjectPublicKeyInfo of id-Ed25519, before the 32 bytes of the key.
  constexpr std::string_view kPrefix("\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00", 12);
  std::vector<PublicKey> out;
  for (size_t at = pem.find(kBegin); at != std::string_view::npos; at = pem.find(kBegin, at)) {
    at += kBegin.size();
    size_t end = pem.find(kEnd, at);
    if (end == std::string_view::npos) break;
    std::string der;
    PublicKey key;
    if (!Decode(pem.substr(at, end - at), &der) || der.size() != kPrefix.size() + key.size()) continue;
    if (std::string_view(der).substr(0, kPrefix.size()) != kPrefix) continue;
    std::copy(der.begin() + kPrefix.size(), der.end(), key.begin());
    out.push_back(key);
  }
  return out;
}

}  // namespace tf_stitch
