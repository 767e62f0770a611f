#include "zcomm/wire_layout.hpp"

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

std::size_t code_bytes(BlockFormat format, DType dtype, std::size_t num_elements) {
  switch (format.kind) {
    case ElementKind::exact:
      return num_elements * element_size(dtype);
    case ElementKind::bf16:
      return num_elements * 2;
    case ElementKind::int8:
      return num_elements;
    case ElementKind::int4:
      return num_elements / 2 + num_elements % 2;
  }
  throw ArgumentError("format: got the element kind " + std::to_string(static_cast<int>(format.kind)) +
                      ", expected exact, bf16, int8 or int4");
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
