// Formats: the element kind of sent values and the number of elements that share a scale.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "zcomm/element_kind.hpp"
#include "zcomm/link.hpp"

namespace zcomm {

struct ElementTraits {
  std::string_view name;
  int code_bits;    // of an element in a wire; 0: the size of its type
  float max_code;   // the largest code; 0 for kinds without scales
  bool stochastic;  // whether codes can be rounded stochastically
};

// Throws ArgumentError on a value that is not in the enumeration.
const ElementTraits& traits(ElementKind kind);
std::span<const ElementTraits> all_traits();

inline constexpr int kMinBlockSize = 32;
inline constexpr int kMaxBlockSize = 4096;

struct BlockFormat {
  ElementKind kind = ElementKind::exact;
  int block_size = 0;       // elements that share a scale; 0 for kinds without scales
  bool hadamard = false;    // rotates groups of 32 elements before encoding
  bool stochastic = false;  // rounds codes up or down at random; their mean is right

  // Parses "exact", "bf16" or KIND:B, with KIND one of the others and B a multiple of 32 from 32 to 4096. After KIND:B,
  // ":hadamard" and then ":stochastic" (not for fp8) may follow. Throws ArgumentError on any other text.
  static BlockFormat parse(std::string_view text);
  std::string to_string() const;

  // Tells whether parse() can return this value; fields that were set one by one may not fit together.
  bool is_valid() const;

  bool has_scales() const { return block_size != 0; }
  friend bool operator==(const BlockFormat&, const BlockFormat&) = default;
};

// Formats by link: those of the two hops of a hierarchical collective, or of the receivers of a flat one.
struct HopFormats {
  BlockFormat intra_node;  // between ranks of one node
  BlockFormat inter_node;  // between nodes

  // Parses "INTRA_NODE/INTER_NODE", or one format for both hops. Throws ArgumentError on anything else.
  static HopFormats parse(std::string_view text);
  std::string to_string() const;

  const BlockFormat& on(Link link) const { return link == Link::intra_node ? intra_node : inter_node; }
  bool is_exact() const { return intra_node.kind == ElementKind::exact && inter_node.kind == ElementKind::exact; }
  friend bool operator==(const HopFormats&, const HopFormats&) = default;
};

}  // namespace zcomm
