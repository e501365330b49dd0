#include "flat_json.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <locale>
#include <sstream>

namespace tf_stitch {
namespace {

// Reads from the front of a text; after the first failure nothing more is read.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool failed() const { return !error_.empty(); }
  const std::string& error() const { return error_; }

  void Fail(const std::string& why) {
    if (error_.empty()) error_ = why;
    text_ = {};
  }

  // The next character that is not a space; 0 at the end.
  char Peek() {
    while (!text_.empty() && (text_[0] == ' ' || text_[0] == '\n' || text_[0] == '\t' || text_[0] == '\r')) {
      text_.remove_prefix(1);
    }
    return text_.empty() ? '\0' : text_[0];
  }

  bool Take(char c) {
    if (Peek() != c || failed()) return false;
    text_.remove_prefix(1);
    return true;
  }

  bool TakeWord(std::string_view word) {
    if (text_.substr(0, word.size()) != word) return false;
    text_.remove_prefix(word.size());
    return true;
  }

  std::string String() {
    std::string out;
    if (!Take('"')) return Fail("a string is expected"), out;
    while (!text_.empty() && text_[0] != '"') {
      char c = Next();
      if (c == '\\') {
        Escape(&out);
      } else {
        out += c;
      }
    }
    if (!Take('"')) Fail("a string does not end");
    return out;
  }

  double Number() {
    std::string_view digits = text_.substr(0, text_.find_first_not_of("+-.0123456789eE"));
    std::istringstream in{std::string(digits)};
    in.imbue(std::locale::classic());
    double value = 0;
    if (!(in >> value) || in.peek() != EOF || !std::isfinite(value)) {
      return Fail("a number, a string or true is expected"), 0;
    }
    text_.remove_prefix(digits.size());
    return value;
  }

 private:
  char Next() {
    char c = text_.empty() ? '\0' : text_[0];
    if (!text_.empty()) text_.remove_prefix(1);
    return c;
  }

  void Escape(std::string* out) {
    char c = Next();
    switch (c) {
      case 'n':
        *out += '\n';
        break;
      case 't':
        *out += '\t';
        break;
      case 'r':
        *out += '\r';
        break;
      case 'b':
        *out += '\b';
        break;
      case 'f':
        *out += '\f';
        break;
      case 'u':
        Utf8(CodePoint(), out);
        break;
      default:
        *out += c;
    }
  }

  uint32_t Hex4() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      char c = Next();
      int digit = c >= '0' && c <= '9'   ? c - '0'
                  : c >= 'a' && c <= 'f' ? c - 'a' + 10
                  : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                         : -1;
      if (digit < 0) return Fail("an escape in a string is wrong"), 0;
      value = value * 16 + static_cast<uint32_t>(digit);
    }
    return value;
  }

  uint32_t CodePoint() {
    uint32_t first = Hex4();
    if (first < 0xD800 || first >= 0xDC00 || !TakeWord("\\u")) return first;
    return 0x10000 + ((first - 0xD800) << 10) + (Hex4() & 0x3FF);
  }

  static void Utf8(uint32_t c, std::string* out) {
    if (c < 0x80) {
      *out += static_cast<char>(c);
      return;
    }
    int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static constexpr uint32_t kLead[] = {0, 0xC0, 0xE0, 0xF0};
    *out += static_cast<char>(kLead[more] | (c >> (6 * more)));
    while (more--) *out += static_cast<char>(0x80 | ((c >> (6 * more)) & 0x3F));
  }

  std::string_view text_;
  std::string error_;
};

}  // namespace

std::string FlatJson::Parse(std::string_view text) {
  Reader r(text);
  if (!r.Peek()) return "";
  if (!r.Take('{')) return "it is no JSON object";
  bool first = true;
  while (!r.failed() && !r.Take('}')) {
    if (!first && !r.Take(',')) r.Fail("a comma or the object's end is missing");
    first = false;
    std::string key = r.String();
    if (!r.Take(':')) r.Fail("a colon is missing after '" + key + "'");
    char c = r.Peek();
    if (c == '"') {
      strings_[key] = r.String();
    } else if (r.TakeWord("true")) {
      numbers_[key] = 1;
    } else if (r.TakeWord("false")) {
      numbers_[key] = 0;
    } else {
      numbers_[key] = r.Number();
    }
  }
  if (!r.failed() && r.Peek()) r.Fail("there is text after the object");
  return r.error();
}

std::string NumberJson(double value, int digits) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out.precision(digits);
  out << value;
  return out.str();
}

std::string QuotedJson(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace tf_stitch
