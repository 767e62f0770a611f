#include "zcomm/wire_layout.hpp"

#include "zcomm/error.hpp"

namespace zcomm {

WireLayout::WireLayout(BlockFormat format, DType dtype, std::int64_t num_elements) : block_size_(format.block_size) {
  check_argument(num_elements >= 0, "num_elements: expected 0 or more, got ", num_elements);
  check_argument(num_elements <= kMaxElements, "num_elements: expected at most ", kMaxElements, ", got ", num_elements);
  if (format.has_scales()) {
    num_blocks = num_elements / format.block_size + (num_elements % format.block_size != 0);
    codes_offset = align_wire(scales_bytes());
  }
  const int bits = traits(format.kind).code_bits;
  code_bits_ = bits == 0 ? element_size(dtype) * 8 : static_cast<std::size_t>(bits);
  // Counts whole bytes of codes: element i has the bits from i * code_bits_ on, from the lowest bit of byte 0.
  const auto count = static_cast<std::size_t>(num_elements);
  codes_bytes = count / 8 * code_bits_ + (count % 8 * code_bits_ + 7) / 8;
  num_bytes = codes_offset + align_wire(codes_bytes);
}

}  // namespace zcomm
