// Value types that codecs read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zcomm {

// Type of values. `byte_pairs` has two bytes per element: 8-bit codes, or any other bytes.
// Elements of `byte_pairs` are sent uncompressed or as lossless differences; no other format accepts them.
enum class DType : std::uint8_t { float32, bfloat16, float16, byte_pairs };

// Returns true if elements are floats, which can be encoded and summed.
constexpr bool is_float(DType dtype) { return dtype <= DType::float16; }

// Returns the bytes of one element: 4 for float32, 2 for the others.
constexpr std::size_t element_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// Returns the name of the enumerator. The text stays valid until the process ends.
// Throws ArgumentError if `dtype` is not in the enumeration.
std::string_view to_string(DType dtype);

// Parses a name that to_string() returns. Throws ArgumentError on any other.
DType parse_dtype(std::string_view name);

}  // namespace zcomm
