// The codec of every instruction set against tests/golden/wires.json, on machines without Python, too.
#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "zcomm/codec.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using Case = std::map<std::string, std::string>;
using Bytes = std::vector<std::byte>;

// Reads a list of objects of strings and numbers, one field per line.
std::vector<Case> read_cases() {
  std::vector<Case> cases;
  std::ifstream file(ZCOMM_GOLDEN_WIRES);
  for (std::string line; std::getline(file, line);) {
    if (line == " {") cases.emplace_back();
    const std::size_t name = line.find('"');
    if (name == std::string::npos) continue;
    const std::size_t end = line.find("\": ", name);
    std::string value = line.substr(end + 3);
    std::erase_if(value, [](char c) { return c == '"' || c == ','; });
    cases.back()[line.substr(name + 1, end - name - 1)] = value;
  }
  return cases;
}

Bytes from_hex(const std::string& text) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::strtoul(text.substr(i, 2).c_str(), nullptr, 16)));
  }
  return bytes;
}

// Memory that is aligned as a wire is.
class Memory {
 public:
  explicit Memory(std::size_t num_bytes) : units_(num_bytes / sizeof(Unit) + 1), num_bytes_(num_bytes) {}
  explicit Memory(const Bytes& bytes) : Memory(bytes.size()) { std::copy(bytes.begin(), bytes.end(), data()); }
  std::byte* data() { return units_.front().bytes; }
  Bytes bytes() { return {data(), data() + num_bytes_}; }

 private:
  struct alignas(kWireAlignment) Unit {
    std::byte bytes[kWireAlignment];
  };
  std::vector<Unit> units_;
  std::size_t num_bytes_;
};

}  // namespace

TEST_CASE("codec: golden wires are those of every instruction set, and decode to the golden values") {
  const std::vector<Case> cases = read_cases();
  REQUIRE(cases.size() >= 30);
  for (const std::string& isa : cpu_isas()) {
    const auto codec = make_cpu_codec(isa);
    for (const Case& golden : cases) {
      CAPTURE(isa);
      CAPTURE(golden.at("format"));
      const BlockFormat format = BlockFormat::parse(golden.at("format"));
      const DType dtype = parse_dtype(golden.at("dtype"));
      Memory values(from_hex(golden.at("values")));
      const auto num_elements = static_cast<std::int64_t>(values.bytes().size() / element_size(dtype));
      Memory wire(wire_bytes(format, dtype, num_elements));
      const Rounding rounding{std::stoull(golden.at("seed")), std::stoll(golden.at("first_element"))};
      const Encode encode{{values.data(), num_elements, dtype}, format, wire.data(), rounding};
      codec->encode({&encode, 1}, {});
      CHECK(wire.bytes() == from_hex(golden.at("wire")));
      for (const char* name : {"float32", "bfloat16", "float16"}) {
        const DType as = parse_dtype(name);
        Memory decoded(static_cast<std::size_t>(num_elements) * element_size(as));
        const Decode decode{{wire.data(), format, dtype}, {decoded.data(), num_elements, as}};
        codec->decode({&decode, 1}, {});
        CHECK(decoded.bytes() == from_hex(golden.at(std::string("as ") + name)));
      }
    }
  }
}

}  // namespace zcomm
