// Switches in environment variables.
#ifndef TF_STITCH_CUSTOM_OPS_ENVIRONMENT_H_
#define TF_STITCH_CUSTOM_OPS_ENVIRONMENT_H_

#include <cstdlib>
#include <cstring>

namespace tf_stitch {

// Whether a variable turns something on: "0" does not, any other text does, and `otherwise` holds when it is not set or
// empty.
inline bool IsOn(const char* variable, bool otherwise) {
  const char* value = getenv(variable);
  return value && *value ? strcmp(value, "0") != 0 : otherwise;
}

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_ENVIRONMENT_H_
