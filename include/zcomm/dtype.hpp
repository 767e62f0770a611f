// Value types that codecs read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zcomm {

// byte_pairs: codes of 8 bits, two to an element, or anything else in bytes. They are sent exactly or by differences.
enum class DType : std::uint8_t { float32, bfloat16, float16, byte_pairs };

// Tells whether elements are floats, which can be encoded and summed.
constexpr bool is_float(DType dtype) { return dtype <= DType::float16; }

// Returns the bytes of one element.
constexpr std::size_t element_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// Returns the name of the enumerator.
std::string_view to_string(DType dtype);

// Parses a name that to_string returns. Throws ArgumentError on any other.
DType parse_dtype(std::string_view name);

}  // namespace zcomm
