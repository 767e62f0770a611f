// Layout of a wire, the bytes that values are encoded to. No other code computes offsets in it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {

// Alignment of a wire, its scales and its codes, in bytes. The size of a wire is a multiple of it.
inline constexpr std::size_t kWireAlignment = 16;

// Bytes of a scale, a bfloat16.
inline constexpr std::size_t kScaleBytes = 2;

// The most elements of a wire. Its size in bytes, and the sum of a few such sizes, then fit in 64 bits.
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 58;

// Rounds a number of bytes up to a multiple of kWireAlignment.
constexpr std::size_t align_wire(std::size_t num_bytes) {
  return (num_bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

// Layout of `num_elements` encoded values, without a header:
//   1. bfloat16 scales, one per block
//   2. zeros up to a multiple of 16 bytes
//   3. packed codes
//   4. zeros up to a multiple of 16 bytes
//
// The last block may be short. Codes are packed without gaps, from the lowest bit of a byte to its highest. For
// example, an int4 byte holds element 2i in its low four bits and element 2i + 1 in its high four.
// The unused bits of the last byte of codes are zero.
// Formats without scales start with the values at offset 0.
class WireLayout {
 public:
  std::int64_t num_blocks = 0;   // 0 without scales
  std::size_t codes_offset = 0;  // offset of the first code in bytes; scales start at 0
  std::size_t codes_bytes = 0;   // bytes of all codes, without padding
  std::size_t num_bytes = 0;     // bytes of the wire, a multiple of 16

  // Computes a layout. `dtype`, the type of the values, matters only for ElementKind::exact.
  // Throws ArgumentError unless `num_elements` is in [0, kMaxElements] and the kind is in the enumeration.
  // Does not check whether the format is valid.
  WireLayout(BlockFormat format, DType dtype, std::int64_t num_elements);

  // Returns the bytes of all scales, without padding.
  std::size_t scales_bytes() const { return static_cast<std::size_t>(num_blocks) * kScaleBytes; }

  // Returns the offset in bytes of the scale of the block that holds `element`; 0 without scales.
  std::size_t scale_offset(std::int64_t element) const {
    return block_size_ == 0 ? 0 : static_cast<std::size_t>(element / block_size_) * kScaleBytes;
  }

  // Returns the offset in bytes of the code of `element`.
  // Requires `element` to be a multiple of 8, because such codes start at a whole byte.
  std::size_t code_offset(std::int64_t element) const {
    return codes_offset + static_cast<std::size_t>(element) / 8 * code_bits_;
  }

 private:
  int block_size_;
  std::size_t code_bits_;
};

// Returns the bytes of a whole wire, a multiple of kWireAlignment. Throws what the constructor of WireLayout throws.
inline std::size_t wire_bytes(BlockFormat format, DType dtype, std::int64_t num_elements) {
  return WireLayout(format, dtype, num_elements).num_bytes;
}

}  // namespace zcomm
