// Kinds of quantized codes. The header defines no functions: kernels of every instruction set include it, see
// cpu/kernels.hpp.
#pragma once

#include <cstdint>

namespace zcomm {

// Kinds of ElementKind that have scales, in its order.
enum class CodeKind : std::uint8_t { int8, int6, int4, int2, fp8 };
inline constexpr int kNumCodes = 5;

}  // namespace zcomm
