#include "json.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "../flat_json.h"
#include "absl/strings/escaping.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

namespace tf_stitch::host {
namespace {

using google::protobuf::ListValue;
using google::protobuf::Value;

// Fills a tensor from nested lists.
class Filler {
 public:
  explicit Filler(const Spec& spec) : spec_(spec), kind_(InfoOf(spec.dtype).kind) {}

  Tensor Fill(const Value& value) {
    for (const Value* v = &value; v->has_list_value(); v = &v->list_value().values(0)) {
      shape_.push_back(v->list_value().values_size());
      if (!shape_.back()) break;
    }
    while (spec_.known_rank && shape_.size() < spec_.shape.size() && !shape_.empty() && !shape_.back()) {
      shape_.push_back(std::max<int64_t>(spec_.shape[shape_.size()], 0));  // [] says nothing of further dims
    }
    if (kind_ == 'c') throw Failure(Where() + "is complex, which JSON requests cannot hold; use .npz.");
    if (kind_ != 's') tensor_ = Tensor(spec_.dtype, shape_);
    Walk(value, 0);
    return kind_ == 's' ? Tensor(strings_, shape_) : tensor_;
  }

 private:
  std::string Where() const { return "Input '" + spec_.name + "' "; }

  void Walk(const Value& value, size_t depth) {
    if (!value.has_list_value()) {
      if (depth != shape_.size()) throw Failure(Where() + "has lists of several depths.");
      return Set(value);
    }
    const ListValue& list = value.list_value();
    if (depth >= shape_.size() || list.values_size() != shape_[depth]) {
      throw Failure(Where() + "has lists of several lengths.");
    }
    for (const Value& v : list.values()) Walk(v, depth + 1);
  }

  void Set(const Value& value) {
    if (kind_ == 's') return strings_.push_back(Text(value));
    if (kind_ == 'b') {
      if (!value.has_bool_value()) throw Failure(Where() + "takes true and false.");
      static_cast<bool*>(tensor_.data())[at_++] = value.bool_value();
      return;
    }
    if (kind_ != 'f') return Integer(value);
    if (value.has_number_value()) return SetElement(tensor_, at_++, value.number_value());
    const std::string& text = value.string_value();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (text == "NaN") return SetElement(tensor_, at_++, std::nan(""));
    if (text == "Infinity" || text == "-Infinity")
      return SetElement(tensor_, at_++, text[0] == '-' ? -kInfinity : kInfinity);
    throw Failure(Where() + "takes numbers.");
  }

  template <class T>
  void Put(const std::string& digits) {
    T number{};
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size()) {
      throw Failure(Where() + "takes integers of type " + InfoOf(spec_.dtype).name + ", not " + digits + ".");
    }
    static_cast<T*>(tensor_.data())[at_++] = number;
  }

  void Integer(const Value& value) {
    std::string digits = value.string_value();
    if (value.has_number_value()) {
      double number = value.number_value();
      if (std::abs(number) > 0x1p53) {
        throw Failure(Where() + "has an integer past 2^53; JSON numbers cannot hold it, put it in quotes.");
      }
      if (number != std::floor(number)) throw Failure(Where() + "takes integers, not " + std::to_string(number) + ".");
      digits = std::to_string(static_cast<int64_t>(number));
    }
    switch (spec_.dtype) {
      case TF_INT8:
        return Put<int8_t>(digits);
      case TF_INT16:
        return Put<int16_t>(digits);
      case TF_INT32:
        return Put<int32_t>(digits);
      case TF_INT64:
        return Put<int64_t>(digits);
      case TF_UINT8:
        return Put<uint8_t>(digits);
      case TF_UINT16:
        return Put<uint16_t>(digits);
      case TF_UINT32:
        return Put<uint32_t>(digits);
      default:
        return Put<uint64_t>(digits);
    }
  }

  std::string Text(const Value& value) {
    if (value.has_string_value()) return value.string_value();
    const auto& fields = value.struct_value().fields();
    auto found = fields.find("b64");
    std::string bytes;
    if (found == fields.end() || !absl::Base64Unescape(found->second.string_value(), &bytes)) {
      throw Failure(Where() + "takes strings, or {\"b64\": ...} for bytes.");
    }
    return bytes;
  }

  const Spec& spec_;
  const char kind_;
  std::vector<int64_t> shape_;
  std::vector<std::string> strings_;
  Tensor tensor_;
  int64_t at_ = 0;
};

// Entries of a batch, each a value or an object of named values, as one list per input.
std::map<std::string, Value> Columns(const ListValue& instances, const Signature& signature) {
  std::map<std::string, Value> out;
  for (const Spec& spec : signature.inputs) {
    ListValue& column = *out[spec.name].mutable_list_value();
    for (const Value& row : instances.values()) {
      bool named = row.has_struct_value() && !row.struct_value().fields().contains("b64");
      if (!named && signature.inputs.size() != 1) throw Failure("Instances must name the inputs: there are several.");
      if (!named) {
        *column.add_values() = row;
        continue;
      }
      auto found = row.struct_value().fields().find(spec.name);
      if (found == row.struct_value().fields().end()) throw Failure("An instance lacks the input '" + spec.name + "'.");
      *column.add_values() = found->second;
    }
  }
  return out;
}

std::string Number(const Tensor& t, int64_t i) {
  const DTypeInfo& info = InfoOf(t.dtype());
  if (info.kind == 'b') return static_cast<bool*>(t.data())[i] ? "true" : "false";
  if (t.dtype() == TF_INT64) return std::to_string(static_cast<int64_t*>(t.data())[i]);
  if (t.dtype() == TF_UINT64) return std::to_string(static_cast<uint64_t*>(t.data())[i]);
  double value = ElementAsDouble(t, i);
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  char text[40];
  snprintf(text, sizeof text, "%.*g", t.dtype() == TF_DOUBLE ? 17 : info.size == 2 && info.kind == 'f' ? 5 : 9, value);
  return info.kind == 'f' && !strpbrk(text, ".e") ? std::string(text) + ".0" : text;
}

bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    unsigned char c = static_cast<unsigned char>(text[i++]);
    int more = c < 0x80 ? 0 : c >= 0xC2 && c < 0xE0 ? 1 : c >= 0xE0 && c < 0xF0 ? 2 : c >= 0xF0 && c < 0xF5 ? 3 : -1;
    if (more < 0 || text.size() - i < static_cast<size_t>(more)) return false;
    for (; more; --more) {
      if ((static_cast<unsigned char>(text[i++]) & 0xC0) != 0x80) return false;
    }
  }
  return true;
}

std::string Element(const Tensor& t, int64_t i) {
  char kind = InfoOf(t.dtype()).kind;
  if (kind == 'c') throw Failure("Complex numbers cannot be written as JSON; use --output FILE.npz.");
  if (kind != 's') return Number(t, i);
  std::string_view text = t.text(i);
  return IsUtf8(text) ? QuotedJson(text) : "{\"b64\": \"" + absl::Base64Escape(text) + "\"}";
}

void Nested(const Tensor& t, const std::vector<int64_t>& shape, size_t depth, int64_t* at, std::string* out) {
  if (depth == shape.size()) {
    *out += Element(t, (*at)++);
    return;
  }
  *out += '[';
  for (int64_t i = 0; i < shape[depth]; ++i) {
    if (i) *out += ", ";
    Nested(t, shape, depth + 1, at, out);
  }
  *out += ']';
}

}  // namespace

NamedTensors ReadJson(const std::string& text, const Signature& signature) {
  google::protobuf::Struct request;
  absl::Status status = google::protobuf::util::JsonStringToMessage(text, &request);
  if (!status.ok()) throw Failure("The request is no JSON object: " + std::string(status.message()) + ".");
  auto find = [&](const char* key) -> const Value* {
    auto found = request.fields().find(key);
    return found == request.fields().end() ? nullptr : &found->second;
  };
  std::map<std::string, Value> values;
  const Value *inputs = find("inputs"), *instances = find("instances");
  if (!inputs == !instances) throw Failure("A JSON request has either \"inputs\" or \"instances\".");
  if (instances) {
    if (!instances->has_list_value())
      throw Failure("\"instances\" is a list, with one entry per element of the batch.");
    values = Columns(instances->list_value(), signature);
  } else if (inputs->has_struct_value() && !inputs->struct_value().fields().contains("b64")) {
    values.insert(inputs->struct_value().fields().begin(), inputs->struct_value().fields().end());
  } else if (signature.inputs.size() == 1) {
    values[signature.inputs[0].name] = *inputs;
  } else {
    throw Failure("\"inputs\" must name the inputs: there are several.");
  }
  NamedTensors out;
  for (const Spec& spec : signature.inputs) {
    auto found = values.find(spec.name);
    if (found != values.end()) out.emplace(spec.name, Filler(spec).Fill(found->second));
  }
  return out;
}

std::string WriteJson(const NamedTensors& tensors) {
  std::string out = "{\"outputs\": {";
  bool first = true;
  for (const auto& [name, tensor] : tensors) {
    if (!std::exchange(first, false)) out += ", ";
    out += QuotedJson(name) + ": ";
    int64_t at = 0;
    Nested(tensor, tensor.shape(), 0, &at, &out);
  }
  return out + "}}";
}

}  // namespace tf_stitch::host
