// Formats: how values are encoded, and how many elements share a scale. docs/wire_format.md specifies the bytes,
// docs/numerics.md the errors.
#pragma once

#include <compare>
#include <span>
#include <string>
#include <string_view>

#include "zcomm/element_kind.hpp"
#include "zcomm/link.hpp"

namespace zcomm {

// Properties of an element kind. All instances are rows of one static table.
struct ElementTraits {
  std::string_view name;  // as BlockFormat::parse() reads it, without a block size
  int code_bits;          // bits of a code; 0: a code has the size of the values' dtype
  float max_code;         // the largest magnitude that a code stands for; 0 for kinds without scales
  bool stochastic;        // whether codes can be rounded stochastically
};

// Returns the properties of `kind`. The reference stays valid until the process ends.
// Throws ArgumentError if `kind` is not in the enumeration.
const ElementTraits& traits(ElementKind kind);

// Returns the properties of all kinds, in the order of ElementKind.
std::span<const ElementTraits> all_traits();

// Limits of a block size, in elements. A block size is also a multiple of the smallest one.
inline constexpr int kMinBlockSize = 32;
inline constexpr int kMaxBlockSize = 4096;

// The most elements that are rotated together. A kind that rotates blocks takes powers of two up to it.
inline constexpr int kMaxRotation = 512;

// Returns true for the kinds of EDEN.
constexpr bool rotates_blocks(ElementKind kind) { return kind >= ElementKind::eden2 && kind <= ElementKind::eden4; }

// Format of encoded values. The default sends values uncompressed.
//
// Every format takes float32, bfloat16 and float16 values; `exact` also takes DType::byte_pairs.
struct BlockFormat {
  ElementKind kind = ElementKind::exact;
  int block_size = 0;       // elements that share a scale; 0 for kinds without scales
  bool stochastic = false;  // rounds codes up or down at random, so that their expected value is the exact one

  // Parses "exact", "bf16", "int8:B", "int4:B", both with an optional ":stochastic", "fp8:B", or "edenK:B".
  // B is the block size in elements: a multiple of 32 from 32 to 4096. K is 2, 3 or 4; there B is a power of two up to
  // 512. Throws ArgumentError on any other text. The message lists what is accepted.
  //
  // Example:
  //   const BlockFormat weights = BlockFormat::parse("int8:256");
  //   const BlockFormat gradients = BlockFormat::parse("int4:128:stochastic");
  //   assert(weights.has_scales() && weights.block_size == 256);
  //   assert(gradients.to_string() == "int4:128:stochastic");
  //   try {
  //     BlockFormat::parse("int8:33");
  //   } catch (const ArgumentError& error) {
  //     std::puts(error.what());
  //   }
  static BlockFormat parse(std::string_view text);

  // Returns the text that parse() reads. Throws ArgumentError if `kind` is not in the enumeration.
  std::string to_string() const;

  // Returns true if parse() can return this value. Fields that were set one by one may not fit together.
  // Codecs and plans throw ArgumentError on a format that is not valid.
  bool is_valid() const;

  // Returns the number of elements that are rotated together, 0 without a rotation. Wires of different formats with
  // equal rotations may be summed before they are rotated back.
  int rotation() const { return rotates_blocks(kind) ? block_size : 0; }

  // Returns true if a wire of this format starts with scales, one per block.
  bool has_scales() const { return block_size != 0; }
  friend bool operator==(const BlockFormat&, const BlockFormat&) = default;
  friend auto operator<=>(const BlockFormat&, const BlockFormat&) = default;
};

// Formats by link. A hierarchical collective uses one per hop; a flat one uses one per receiver.
struct HopFormats {
  BlockFormat intra_node;  // between ranks of one node
  BlockFormat inter_node;  // between nodes

  // Parses "INTRA_NODE/INTER_NODE", or one format for both links.
  // Throws ArgumentError if BlockFormat::parse() refuses a part.
  static HopFormats parse(std::string_view text);

  // Returns the text that parse() reads: one format if both are equal.
  std::string to_string() const;

  // Returns the format on `link`.
  const BlockFormat& on(Link link) const { return link == Link::intra_node ? intra_node : inter_node; }

  // Returns true if both formats send values uncompressed.
  bool is_exact() const { return intra_node.kind == ElementKind::exact && inter_node.kind == ElementKind::exact; }
  friend bool operator==(const HopFormats&, const HopFormats&) = default;
  friend auto operator<=>(const HopFormats&, const HopFormats&) = default;
};

}  // namespace zcomm
