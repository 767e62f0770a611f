// Layout of a wire. No other code computes offsets in it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {

// Alignment of scales, codes and the total size, in bytes.
inline constexpr std::size_t kWireAlignment = 16;

inline constexpr std::size_t kScaleBytes = 2;  // a bfloat16

// Upper bound of the elements of a wire: its size in bytes, and the sum of a few such sizes, fit in 64 bits.
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 58;

constexpr std::size_t align_wire(std::size_t num_bytes) {
  return (num_bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

// Layout of `num_elements` encoded values: bfloat16 scales (one per block), padding to 16, packed codes, padding to 16.
// There is no header. The last block may be short. Codes are packed without gaps, from the lowest bit of a byte to its
// highest: an int4 byte holds element 2i in its low and 2i+1 in its high four bits. Padding bytes and the unused bits
// of the last byte are zero. Formats without scales start with the values at offset 0.
class WireLayout {
 public:
  std::int64_t num_blocks = 0;
  std::size_t codes_offset = 0;  // offset of the first code; scales start at 0
  std::size_t codes_bytes = 0;   // without padding
  std::size_t num_bytes = 0;     // size of the wire, a multiple of 16

  // Computes a layout. `dtype`, the type of the values, matters only for ElementKind::exact. Throws ArgumentError
  // unless num_elements is in [0, kMaxElements].
  WireLayout(BlockFormat format, DType dtype, std::int64_t num_elements);

  // Returns the bytes of all scales, without padding.
  std::size_t scales_bytes() const { return static_cast<std::size_t>(num_blocks) * kScaleBytes; }
  // Returns the offset of the scale of the block that holds `element`; 0 without scales.
  std::size_t scale_offset(std::int64_t element) const {
    return block_size_ == 0 ? 0 : static_cast<std::size_t>(element / block_size_) * kScaleBytes;
  }
  // Returns the offset of the code of `element`, a multiple of 8: such codes begin at a whole byte.
  std::size_t code_offset(std::int64_t element) const {
    return codes_offset + static_cast<std::size_t>(element) / 8 * code_bits_;
  }

 private:
  int block_size_;
  std::size_t code_bits_;
};

// Returns the bytes of a whole wire.
inline std::size_t wire_bytes(BlockFormat format, DType dtype, std::int64_t num_elements) {
  return WireLayout(format, dtype, num_elements).num_bytes;
}

}  // namespace zcomm
