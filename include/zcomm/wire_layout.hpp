// The only place that computes a byte of the wire.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {

// Alignment of both parts of a wire and of its total size, in bytes.
inline constexpr std::size_t kWireAlignment = 16;

inline constexpr std::size_t kScaleBytes = 2;  // a bfloat16

constexpr std::size_t align_wire(std::size_t num_bytes) {
  return (num_bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

// The bytes of `num_elements` encoded values: bfloat16 scales (one per block), padding to 16, packed codes, padding to
// 16. No header. The last block may be short. Codes follow each other without gaps, from the lowest bit of a byte to
// its highest: an int4 byte holds element 2i in its low and 2i+1 in its high four bits. Padding bytes and the unused
// bits of a last byte are zero. Formats without scales start with the values at offset 0.
class WireLayout {
 public:
  std::int64_t num_blocks = 0;
  std::size_t codes_offset = 0;  // of the first code; the scales start at 0
  std::size_t codes_bytes = 0;   // without padding
  std::size_t num_bytes = 0;     // of the whole wire, a multiple of 16

  // `dtype`, the type of the values, matters to ElementKind::exact only. Throws ArgumentError if num_elements < 0.
  WireLayout(BlockFormat format, DType dtype, std::int64_t num_elements);

  // Of all scales, without padding.
  std::size_t scales_bytes() const { return static_cast<std::size_t>(num_blocks) * kScaleBytes; }
  // Of the scale of the block that holds `element`; 0 without scales.
  std::size_t scale_offset(std::int64_t element) const {
    return block_size_ == 0 ? 0 : static_cast<std::size_t>(element / block_size_) * kScaleBytes;
  }
  // Of the code of `element`, a multiple of 8: there codes begin at a whole byte.
  std::size_t code_offset(std::int64_t element) const {
    return codes_offset + static_cast<std::size_t>(element) / 8 * code_bits_;
  }

 private:
  int block_size_;
  std::size_t code_bits_;
};

// Of a whole wire.
inline std::size_t wire_bytes(BlockFormat format, DType dtype, std::int64_t num_elements) {
  return WireLayout(format, dtype, num_elements).num_bytes;
}

}  // namespace zcomm
