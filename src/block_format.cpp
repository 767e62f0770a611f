#include "zcomm/block_format.hpp"

#include <charconv>
#include <iterator>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

// Properties of the kinds, in the order of ElementKind.
constexpr ElementTraits kTraits[] = {
    {"exact", 0, 0.0f, false}, {"bf16", 16, 0.0f, false},  {"int8", 8, 127.0f, true},  {"int4", 4, 7.0f, true},
    {"fp8", 8, 448.0f, false}, {"eden2", 2, 69.0f, false}, {"eden3", 3, 99.0f, false}, {"eden4", 4, 126.0f, false},
};
constexpr std::size_t kNumKinds = std::size(kTraits);
static_assert(kNumKinds == kNumElementKinds);
constexpr std::string_view kStochastic = ":stochastic";

// Returns "exact, bf16, ... or fp8", with `suffix` after the kinds that have scales.
std::string all_kinds(std::string_view suffix) {
  std::string text;
  for (std::size_t i = 0; i < kNumKinds; ++i) {
    if (i > 0) text += i + 1 == kNumKinds ? " or " : ", ";
    text += kTraits[i].name;
    if (kTraits[i].max_code != 0) text += suffix;
  }
  return text;
}

// Parses a number written as to_string would write it; returns -1 for any other text.
int parse_block_size(std::string_view text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  return is_number && text.front() != '0' ? value : -1;
}

bool is_block_size(ElementKind kind, int value) {
  if (rotates_blocks(kind) && (value > kMaxRotation || (value & (value - 1)) != 0)) return false;
  return value >= kMinBlockSize && value <= kMaxBlockSize && value % kMinBlockSize == 0;
}

// Removes `ending` from the end of `text`; returns whether it was there.
bool take(std::string_view& text, std::string_view ending) {
  if (!text.ends_with(ending)) return false;
  text.remove_suffix(ending.size());
  return true;
}

}  // namespace

const ElementTraits& traits(ElementKind kind) {
  const auto index = static_cast<std::size_t>(kind);
  check_argument(index < kNumKinds,
                 [&] { return concat("format: expected ", all_kinds(""), ", got the element kind ", index); });
  return kTraits[index];
}

std::span<const ElementTraits> all_traits() { return kTraits; }

bool BlockFormat::is_valid() const {
  const auto index = static_cast<std::size_t>(kind);
  if (index >= kNumKinds) return false;
  if (kTraits[index].max_code == 0) return *this == BlockFormat{kind};
  return is_block_size(kind, block_size) && (!stochastic || kTraits[index].stochastic);
}

BlockFormat BlockFormat::parse(std::string_view text) {
  std::string_view rest = text;
  BlockFormat format;
  format.stochastic = take(rest, kStochastic);
  const std::string_view name = rest.substr(0, rest.find(':'));
  for (std::size_t i = 0; i < kNumKinds; ++i) {
    if (kTraits[i].name != name) continue;
    format.kind = static_cast<ElementKind>(i);
    if (kTraits[i].max_code == 0) {
      if (text == name) return format;
      break;
    }
    check_argument(rest != name, "format: expected a block size, such as ", name, ":256, got '", text, "'");
    const int block_size = parse_block_size(rest.substr(name.size() + 1));
    if (!is_block_size(format.kind, block_size)) break;
    format.block_size = block_size;
    check_argument(!format.stochastic || kTraits[i].stochastic, "format: expected ", name,
                   " without :stochastic, got '", text, "': it is always rounded to nearest");
    return format;
  }
  throw ArgumentError(
      "format: expected " + all_kinds(":B") + ", got '" + std::string(text) +
      "': B is a multiple of 32 from 32 to 4096, for eden a power of two up to 512; :stochastic may follow "
      "B of int8 and int4");
}

std::string BlockFormat::to_string() const {
  const ElementTraits& kind_traits = traits(kind);
  std::string text(kind_traits.name);
  if (kind_traits.max_code != 0) text += ":" + std::to_string(block_size);
  if (stochastic) text += kStochastic;
  return text;
}

HopFormats HopFormats::parse(std::string_view text) {
  const std::size_t slash = text.find('/');
  const BlockFormat intra_node = BlockFormat::parse(text.substr(0, slash));
  if (slash == std::string_view::npos) return {intra_node, intra_node};
  return {intra_node, BlockFormat::parse(text.substr(slash + 1))};
}

std::string HopFormats::to_string() const {
  return intra_node == inter_node ? intra_node.to_string() : intra_node.to_string() + "/" + inter_node.to_string();
}

}  // namespace zcomm
