// JSON objects of numbers, strings and booleans, without nesting: options and tables of figures.
#ifndef TF_STITCH_CUSTOM_OPS_FLAT_JSON_H_
#define TF_STITCH_CUSTOM_OPS_FLAT_JSON_H_

#include <map>
#include <string>
#include <string_view>

namespace tf_stitch {

class FlatJson {
 public:
  // Reads an object; "" is an empty one.  Returns "" or what is wrong.  true and false are the numbers 1 and 0.
  std::string Parse(std::string_view text);

  const std::map<std::string, double>& numbers() const { return numbers_; }
  const std::map<std::string, std::string>& strings() const { return strings_; }

 private:
  std::map<std::string, double> numbers_;
  std::map<std::string, std::string> strings_;
};

// A string in quotes.
std::string QuotedJson(std::string_view text);

// A number, whatever the process's locale.
std::string NumberJson(double value, int digits = 10);

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_FLAT_JSON_H_
