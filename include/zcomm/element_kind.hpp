// Kinds of sent values. The header defines no functions: kernels of every instruction set include it, see
// src/codec/cpu/kernels.hpp.
#pragma once

#include <cstdint>

namespace zcomm {

// Element kinds, in the order of the table in block_format.cpp. traits() returns a row of it.
//
// Kinds from int8 on have a bfloat16 scale per block; docs/numerics.md compares their errors.
enum class ElementKind : std::uint8_t {
  exact,  // the bytes of the values, uncompressed
  bf16,   // a cast to bfloat16, which halves float32 values
  int8,   // symmetric codes in [-127, 127]
  int4,   // in [-7, 7], two per byte
  fp8,    // floating-point codes: OCP e4m3, 448 at most
  eden2,  // 2 bits: a rotated block, in the levels that suit normally distributed values best
  eden3,  // 3 bits, eight codes in three bytes
  eden4,  // 4 bits
};

// Number of the kinds above.
inline constexpr int kNumElementKinds = 8;

}  // namespace zcomm
