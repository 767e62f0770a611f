// The only place that computes a byte of the wire.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {

// Alignment of both parts of a wire and of its total size, in bytes.
inline constexpr std::size_t kWireAlignment = 16;

constexpr std::size_t align_wire(std::size_t num_bytes) {
  return (num_bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

// The bytes of `num_elements` encoded values: bfloat16 scales (one per block), padding to 16, packed codes, padding to
// 16. No header. The last block may be short. Codes follow each other without gaps, from the lowest bit of a byte to
// its highest: an int4 byte holds element 2i in its low and 2i+1 in its high four bits. Padding bytes and the unused
// bits of a last byte are zero. Formats without scales start with the values at offset 0.
struct WireLayout {
  std::int64_t num_blocks = 0;
  std::size_t codes_offset = 0;  // of the first code; the scales start at 0
  std::size_t codes_bytes = 0;   // without padding
  std::size_t num_bytes = 0;     // of the whole wire, a multiple of 16

  // `dtype`, the type of the values, matters to ElementKind::exact only. Throws ArgumentError if num_elements < 0.
  WireLayout(BlockFormat format, DType dtype, std::int64_t num_elements);
};

}  // namespace zcomm
