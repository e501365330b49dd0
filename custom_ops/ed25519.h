// Ed25519 signatures (RFC 8032), checked by a library that is there anyway: BoringSSL inside TensorFlow, else OpenSSL's
// libcrypto.
#ifndef TF_STITCH_CUSTOM_OPS_ED25519_H_
#define TF_STITCH_CUSTOM_OPS_ED25519_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tf_stitch {

using PublicKey = std::array<uint8_t, 32>;

// Whether `signature` (64 bytes) is the key's on `message`.  False with `error` set when no library is found.
bool Ed25519Verify(std::string_view message, std::string_view signature, const PublicKey& key, std::string* error);

// The Ed25519 keys in PEM text ("BEGIN PUBLIC KEY", RFC 8410); other keys and text between blocks are left out.
std::vector<PublicKey> ReadPublicKeys(std::string_view pem);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_ED25519_H_
