#include "zcomm/wire_layout.hpp"

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

// Codes follow each other without gaps: element i has bits i * code_bits and up, counted from the lowest of byte 0.
std::size_t code_bytes(BlockFormat format, DType dtype, std::size_t num_elements) {
  const int bits = traits(format.kind).code_bits;
  const std::size_t code_bits = bits == 0 ? element_size(dtype) * 8 : static_cast<std::size_t>(bits);
  return num_elements / 8 * code_bits + (num_elements % 8 * code_bits + 7) / 8;
}

}  // namespace

WireLayout::WireLayout(BlockFormat format, DType dtype, std::int64_t num_elements) {
  check_argument(num_elements >= 0,
                 [&] { return "num_elements: got " + std::to_string(num_elements) + ", expected 0 or more"; });
  if (format.has_scales()) {
    num_blocks = num_elements / format.block_size + (num_elements % format.block_size != 0);
    codes_offset = align_wire(static_cast<std::size_t>(num_blocks) * 2);
  }
  codes_bytes = code_bytes(format, dtype, static_cast<std::size_t>(num_elements));
  num_bytes = codes_offset + align_wire(codes_bytes);
}

}  // namespace zcomm
