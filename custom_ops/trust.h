// Whether the native code inside a model may run: the environment variable TF_STITCH_ALLOW.
#ifndef TF_STITCH_CUSTOM_OPS_TRUST_H_
#define TF_STITCH_CUSTOM_OPS_TRUST_H_

#include <string>
#include <string_view>

namespace tf_stitch {

// The node attr that holds a program's signature; TensorFlow lets attrs that begin with "_" pass.
constexpr char kSignatureAttr[] = "_tf_stitch_signature";

// Why this process must not run a program, or "".  TF_STITCH_ALLOW: "any" (also when it is not set), "signed" (a key
// in the PEM file that TF_STITCH_KEYS names must have signed the program), "none"; all else counts as "none".  Read
// once per process.
std::string WhyNotAllowed(std::string_view program, std::string_view signature);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_TRUST_H_
