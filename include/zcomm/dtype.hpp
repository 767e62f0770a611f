// Value types that a codec reads and writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zcomm {

enum class DType : std::uint8_t { float32, bfloat16, float16 };

// Bytes of one element.
constexpr std::size_t element_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// "float32", "bfloat16", "float16".
std::string_view to_string(DType dtype);

// The inverse of to_string. Throws ArgumentError on any other name.
DType parse_dtype(std::string_view name);

}  // namespace zcomm
