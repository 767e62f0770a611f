// How values are sent: the element kind and how many elements share a scale.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "zcomm/link.hpp"

namespace zcomm {

// In the order of the table in block_format.cpp. `traits` gives a row of it.
enum class ElementKind : std::uint8_t {
  exact,  // the bytes of the values
  bf16,   // a cast to bfloat16, for float32 values
  int8,   // symmetric codes in [-127, 127]
  int6,   // in [-31, 31], four in three bytes
  int4,   // in [-7, 7], two per byte
  int2,   // in [-1, 1], four per byte
  fp8,    // floating-point codes: OCP e4m3, 448 at most
};

struct ElementTraits {
  std::string_view name;
  int code_bits;    // of an element in a wire; 0: as many as its type has
  float max_code;   // the largest code; 0 where there are no scales
  bool stochastic;  // whether codes can be rounded stochastically
};

// Throws ArgumentError on a value that is not in the enumeration.
const ElementTraits& traits(ElementKind kind);

inline constexpr int kMinBlockSize = 32;
inline constexpr int kMaxBlockSize = 4096;

struct BlockFormat {
  ElementKind kind = ElementKind::exact;
  int block_size = 0;       // elements that share a scale; 0 where there are no scales
  bool hadamard = false;    // groups of 32 elements are rotated before they are encoded
  bool stochastic = false;  // codes are rounded up or down at random, so that their mean is right

  // "exact", "bf16" or KIND:B, KIND one of the others and B a multiple of 32 from 32 to 4096, which ":hadamard" and
  // then ":stochastic" (not for fp8) may follow. Throws ArgumentError on anything else.
  static BlockFormat parse(std::string_view text);
  std::string to_string() const;

  // Whether parse() gives it: fields that were set one by one may go together with no format.
  bool is_valid() const;

  bool has_scales() const { return block_size != 0; }
  friend bool operator==(const BlockFormat&, const BlockFormat&) = default;
};

// The formats of the two hops of a hierarchical collective.
struct HopFormats {
  BlockFormat intra_node;  // between ranks of one node
  BlockFormat inter_node;  // between nodes
  // A reduce-scatter in one hop, whatever the topology: every contribution goes to its owner as it is. Both formats are
  // exact then.
  bool direct = false;

  // "INTRA_NODE/INTER_NODE", one format for both hops, or "exact:direct". Throws ArgumentError on anything else.
  static HopFormats parse(std::string_view text);
  std::string to_string() const;

  const BlockFormat& on(Link link) const { return link == Link::intra_node ? intra_node : inter_node; }
  bool is_exact() const { return intra_node.kind == ElementKind::exact && inter_node.kind == ElementKind::exact; }
  friend bool operator==(const HopFormats&, const HopFormats&) = default;
};

}  // namespace zcomm
