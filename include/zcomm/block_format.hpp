// How values travel: the element kind and how many elements share a scale.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace zcomm {

enum class ElementKind : std::uint8_t {
  exact,  // the bytes of the values
  bf16,   // a cast to bfloat16, for float32 values
  int8,   // symmetric codes in [-127, 127]
  int4,   // symmetric codes in [-7, 7], two per byte
};

inline constexpr int kMinBlockSize = 32;
inline constexpr int kMaxBlockSize = 4096;

struct BlockFormat {
  ElementKind kind = ElementKind::exact;
  int block_size = 0;  // elements that share a scale; 0 where there are no scales

  // "exact", "bf16", "int8:B" or "int4:B", B a multiple of 32 from 32 to 4096. Throws ArgumentError on anything else.
  static BlockFormat parse(std::string_view text);
  std::string to_string() const;

  bool has_scales() const { return block_size != 0; }
  friend bool operator==(const BlockFormat&, const BlockFormat&) = default;
};

// The formats of the two hops of a hierarchical collective.
struct HopFormats {
  BlockFormat inside;   // between ranks of one node
  BlockFormat between;  // between nodes

  // "INSIDE/BETWEEN", or one format for both hops. Throws ArgumentError on anything else.
  static HopFormats parse(std::string_view text);
  std::string to_string() const;

  bool is_exact() const { return inside.kind == ElementKind::exact && between.kind == ElementKind::exact; }
  friend bool operator==(const HopFormats&, const HopFormats&) = default;
};

}  // namespace zcomm
