#include "npz.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <regex>
#include <string_view>
#include <vector>

#include "../program.h"
#include "xla/tsl/lib/io/inputstream_interface.h"
#include "xla/tsl/lib/io/zlib_compression_options.h"
#include "xla/tsl/lib/io/zlib_inputstream.h"

namespace tf_stitch::host {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kDirectoryEntry = 0x02014b50, kDirectoryEnd = 0x06054b50;
constexpr int kStored = 0, kDeflated = 8;

// Little-endian numbers at an offset, with bounds.
class Bytes {
 public:
  Bytes(std::string_view data, const std::string& path) : data_(data), path_(path) {}

  [[noreturn]] void Damaged(const std::string& why) const {
    throw Failure("'" + path_ + "' is no readable .npz file: " + why + ".");
  }
  std::string_view Part(size_t at, size_t size) const {
    if (at > data_.size() || size > data_.size() - at) Damaged("it ends too early");
    return data_.substr(at, size);
  }
  uint32_t Number(size_t at, int size) const {
    uint32_t value = 0;
    std::string_view part = Part(at, size);
    for (int i = 0; i < size; ++i) value |= static_cast<uint32_t>(static_cast<uint8_t>(part[i])) << (8 * i);
    return value;
  }
  size_t size() const { return data_.size(); }

 private:
  std::string_view data_;
  const std::string& path_;
};

// What the inflater reads from.
class Memory : public tsl::io::InputStreamInterface {
 public:
  explicit Memory(std::string_view data) : data_(data) {}
  absl::Status ReadNBytes(int64_t n, tsl::tstring* result) override {
    size_t count = std::min(static_cast<size_t>(n), data_.size() - at_);
    result->assign(data_.data() + at_, count);
    at_ += count;
    return count == static_cast<size_t>(n) ? absl::OkStatus() : absl::OutOfRangeError("the end");
  }
  int64_t Tell() const override { return static_cast<int64_t>(at_); }
  absl::Status Reset() override {
    at_ = 0;
    return absl::OkStatus();
  }

 private:
  std::string_view data_;
  size_t at_ = 0;
};

std::string Inflate(std::string_view data, size_t size, const Bytes& file) {
  Memory memory(data);
  tsl::io::ZlibInputStream stream(&memory, 1 << 16, 1 << 16, tsl::io::ZlibCompressionOptions::RAW());
  tsl::tstring out;
  absl::Status status = stream.ReadNBytes(static_cast<int64_t>(size), &out);
  if (!status.ok() || out.size() != size) file.Damaged("an entry cannot be unpacked");
  return std::string(out.data(), out.size());
}

// name -> contents
std::map<std::string, std::string> Unzip(const std::string& data, const std::string& path) {
  Bytes file(data, path);
  if (data.size() < 22) file.Damaged("it is too short");
  size_t end = data.size() - 22;
  while (file.Number(end, 4) != kDirectoryEnd) {
    if (!end--) file.Damaged("it is no zip archive");
  }
  std::map<std::string, std::string> out;
  size_t at = file.Number(end + 16, 4);
  for (uint32_t count = file.Number(end + 10, 2); count; --count) {
    if (file.Number(at, 4) != kDirectoryEntry) file.Damaged("its directory is damaged");
    uint32_t method = file.Number(at + 10, 2), crc = file.Number(at + 16, 4), packed = file.Number(at + 20, 4);
    uint32_t size = file.Number(at + 24, 4), name_size = file.Number(at + 28, 2), local = file.Number(at + 42, 4);
    std::string name(file.Part(at + 46, name_size));
    if (packed == UINT32_MAX || size == UINT32_MAX || local == UINT32_MAX) file.Damaged("it is larger than 4 GB");
    if (file.Number(local, 4) != kLocalHeader) file.Damaged("an entry is damaged");
    std::string_view contents =
        file.Part(size_t{local} + 30 + file.Number(local + 26, 2) + file.Number(local + 28, 2), packed);
    if (method != kStored && method != kDeflated) file.Damaged("an entry is packed in an unknown way");
    if (method == kStored && size != packed) file.Damaged("an entry is damaged");
    // Deflate packs at most 1032 times, so a wild size cannot ask for wild memory.
    if (method == kDeflated && size > uint64_t{packed} * 1032 + 64) file.Damaged("an entry is damaged");
    out[name] = method == kStored ? std::string(contents) : Inflate(contents, size, file);
    if (Crc32(out[name]) != crc) file.Damaged("the checksum of '" + name + "' does not match");
    at += 46 + name_size + file.Number(at + 30, 2) + file.Number(at + 32, 2);
  }
  return out;
}

struct Header {
  std::string descr;
  bool fortran = false;
  std::vector<int64_t> shape;
  size_t size = 0;  // where the elements begin
};

Header ReadHeader(const std::string& data, const std::string& name, const Bytes& file) {
  Bytes npy(data, name);
  if (npy.Part(0, 6) != std::string_view("\x93NUMPY", 6)) file.Damaged("'" + name + "' is no array");
  int wide = npy.Number(6, 1) >= 2 ? 4 : 2;
  size_t length = npy.Number(8, wide);
  std::string text(npy.Part(8 + wide, length));
  Header header;
  header.size = 8 + wide + length;
  std::smatch match;
  static const std::regex descr("'descr': *'([^']*)'"), order("'fortran_order': *True"),
      shape("'shape': *\\(([^)]*)\\)");
  if (!std::regex_search(text, match, descr))
    file.Damaged("'" + name + "' has elements that are no numbers or strings");
  header.descr = match[1];
  header.fortran = std::regex_search(text, order);
  if (!std::regex_search(text, match, shape)) file.Damaged("'" + name + "' has no shape");
  std::string dims = match[1];
  static const std::regex number("[0-9]{1,18}");
  for (std::sregex_iterator it(dims.begin(), dims.end(), number), last; it != last; ++it) {
    header.shape.push_back(std::stoll(it->str()));
  }
  return header;
}

void AppendUtf8(uint32_t c, std::string* out) {
  if (c < 0x80) {
    *out += static_cast<char>(c);
  } else if (c < 0x800) {
    *out += static_cast<char>(0xC0 | c >> 6);
    *out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    *out += static_cast<char>(0xE0 | c >> 12);
    *out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    *out += static_cast<char>(0xF0 | (c >> 18 & 7));
    *out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    *out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

// Elements of NumPy's types S (bytes) and U (characters of 32 bits), without the zeros that fill them up.
std::vector<std::string> Strings(std::string_view data, char kind, size_t width) {
  std::vector<std::string> out;
  size_t bytes = kind == 'U' ? 4 * width : width;
  for (size_t at = 0; bytes && at + bytes <= data.size(); at += bytes) {
    std::string element;
    if (kind == 'S') {
      element = data.substr(at, bytes);
      element.resize(element.find_last_not_of('\0') + 1);
    } else {
      size_t length = width;
      auto character = [&](size_t i) {
        uint32_t c;
        memcpy(&c, data.data() + at + 4 * i, 4);
        return c;
      };
      while (length && !character(length - 1)) --length;
      for (size_t i = 0; i < length; ++i) AppendUtf8(character(i), &element);
    }
    out.push_back(std::move(element));
  }
  return out;
}

Tensor ToTensor(const std::string& data, const Spec& spec, const Bytes& file) {
  Header header = ReadHeader(data, spec.name, file);
  if (header.fortran && header.shape.size() > 1) {
    file.Damaged("'" + spec.name + "' is stored by columns; save numpy.ascontiguousarray of it");
  }
  std::string_view elements = std::string_view(data).substr(header.size);
  int64_t count = 1;
  for (int64_t d : header.shape) {
    if (__builtin_mul_overflow(count, d, &count)) file.Damaged("'" + spec.name + "' has an absurd shape");
  }
  char code = header.descr.size() > 1 ? header.descr[1] : ' ';
  if (spec.dtype == TF_STRING && (code == 'S' || code == 'U')) {
    auto strings = Strings(elements, code, static_cast<size_t>(atoll(header.descr.c_str() + 2)));
    strings.resize(strings.empty() ? std::min<size_t>(count, elements.size() + 1) : strings.size());  // all empty
    if (static_cast<int64_t>(strings.size()) != count) file.Damaged("'" + spec.name + "' ends too early");
    return Tensor(strings, header.shape);
  }
  const DTypeInfo& info = InfoOf(spec.dtype);
  bool any_order = info.size == 1 || info.dtype == TF_BFLOAT16;  // the first character says nothing then
  bool same = header.descr == info.npy || (any_order && header.descr.substr(1) == info.npy + 1);
  if (!same) {
    throw Failure("Input '" + spec.name + "' is " + info.name + " (" + info.npy + "), the request has " + header.descr +
                  ".");
  }
  if (static_cast<uint64_t>(count) * info.size != elements.size()) file.Damaged("'" + spec.name + "' ends too early");
  Tensor out(spec.dtype, header.shape);
  if (!elements.empty()) memcpy(out.data(), elements.data(), elements.size());
  return out;
}

void Append(std::string* out, uint64_t value, int size) {
  for (int i = 0; i < size; ++i) *out += static_cast<char>(value >> (8 * i));
}

std::string ToNpy(const Tensor& tensor) {
  const DTypeInfo& info = InfoOf(tensor.dtype());
  std::string descr = info.npy, elements;
  if (info.kind == 's') {
    size_t width = 1;
    for (int64_t i = 0; i < tensor.size(); ++i) width = std::max(width, tensor.text(i).size());
    descr += std::to_string(width);
    for (int64_t i = 0; i < tensor.size(); ++i) {
      elements += tensor.text(i);
      elements.resize((i + 1) * width, '\0');
    }
  } else if (tensor.bytes()) {
    elements.assign(static_cast<const char*>(tensor.data()), tensor.bytes());
  }
  std::string shape;
  for (int64_t d : tensor.shape()) shape += std::to_string(d) + ",";
  std::string text = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  text.resize((10 + text.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  text += '\n';
  std::string out("\x93NUMPY\x01\x00", 8);
  Append(&out, text.size(), 2);
  return out + text + elements;
}

}  // namespace

NamedTensors ReadNpz(const std::string& path, const Signature& signature) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Failure("'" + path + "' cannot be read.");
  std::string data(std::istreambuf_iterator<char>(file), {});
  NamedTensors out;
  auto entries = Unzip(data, path);
  Bytes bytes(data, path);
  for (const Spec& spec : signature.inputs) {
    auto found = entries.find(spec.name + ".npy");
    if (found != entries.end()) out.emplace(spec.name, ToTensor(found->second, spec, bytes));
  }
  return out;
}

void WriteNpz(const std::string& path, const NamedTensors& tensors) {
  std::string data, directory;
  for (const auto& [key, tensor] : tensors) {
    std::string contents = ToNpy(tensor), name = key + ".npy", common;
    if (data.size() + contents.size() > UINT32_MAX) throw Failure("The answer is larger than the 4 GB of a .npz file.");
    Append(&common, 20, 2);          // version that is needed to read it
    Append(&common, 0, 2);           // flags
    Append(&common, kStored, 2);     // method
    Append(&common, 0x00210000, 4);  // time and date: 1980-01-01
    Append(&common, Crc32(contents), 4);
    Append(&common, contents.size(), 4);
    Append(&common, contents.size(), 4);
    Append(&common, name.size(), 2);
    Append(&common, 0, 2);  // extra
    size_t at = data.size();
    Append(&data, kLocalHeader, 4);
    data += common + name + contents;
    Append(&directory, kDirectoryEntry, 4);
    Append(&directory, 20, 2);
    directory += common;
    Append(&directory, 0, 10);  // comment, disk, attributes
    Append(&directory, at, 4);
    directory += name;
  }
  size_t at = data.size();
  data += directory;
  Append(&data, kDirectoryEnd, 4);
  Append(&data, 0, 4);
  Append(&data, tensors.size(), 2);
  Append(&data, tensors.size(), 2);
  Append(&data, directory.size(), 4);
  Append(&data, at, 4);
  Append(&data, 0, 2);
  std::ofstream file(path, std::ios::binary);
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  if (!file.flush()) throw Failure("'" + path + "' cannot be written.");
}

}  // namespace tf_stitch::host
