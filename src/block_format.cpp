#include "zcomm/block_format.hpp"

#include <charconv>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

// The number that `text` is, written as to_string would write it; -1 if it is anything else.
int parse_block_size(std::string_view text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  return is_number && text.front() != '0' ? value : -1;
}

}  // namespace

BlockFormat BlockFormat::parse(std::string_view text) {
  if (text == "exact") return {ElementKind::exact, 0};
  if (text == "bf16") return {ElementKind::bf16, 0};
  for (const auto& [prefix, kind] : {std::pair<std::string_view, ElementKind>{"int8:", ElementKind::int8},
                                     std::pair<std::string_view, ElementKind>{"int4:", ElementKind::int4}}) {
    if (!text.starts_with(prefix)) continue;
    const int block_size = parse_block_size(text.substr(prefix.size()));
    if (block_size >= kMinBlockSize && block_size <= kMaxBlockSize && block_size % kMinBlockSize == 0) {
      return {kind, block_size};
    }
  }
  throw ArgumentError("format: got '" + std::string(text) +
                      "', expected exact, bf16, int8:B or int4:B with B a multiple of 32 from 32 to 4096");
}

std::string BlockFormat::to_string() const {
  switch (kind) {
    case ElementKind::exact:
      return "exact";
    case ElementKind::bf16:
      return "bf16";
    case ElementKind::int8:
      return "int8:" + std::to_string(block_size);
    case ElementKind::int4:
      return "int4:" + std::to_string(block_size);
  }
  throw ArgumentError("format: got the element kind " + std::to_string(static_cast<int>(kind)) +
                      ", expected exact, bf16, int8 or int4");
}

HopFormats HopFormats::parse(std::string_view text) {
  const std::size_t slash = text.find('/');
  const BlockFormat inside = BlockFormat::parse(text.substr(0, slash));
  if (slash == std::string_view::npos) return {inside, inside};
  return {inside, BlockFormat::parse(text.substr(slash + 1))};
}

std::string HopFormats::to_string() const {
  return inside == between ? inside.to_string() : inside.to_string() + "/" + between.to_string();
}

}  // namespace zcomm
