// Floating-point numbers as PTX instructions make them, from their bits: what C++ has no operator for.
#pragma once

#include <bit>

#include "integers.hpp"

namespace ptx {

inline float as_float(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 as_bits(float value) { return std::bit_cast<u32>(value); }

inline constexpr u32 kAbs = 0x7fffffffu;
inline constexpr u32 kInfinity = 0x7f800000u;
inline bool is_nan(u32 bits) { return (bits & kAbs) > kInfinity; }

// The NaN that an instruction makes: 0x7fffffff, or with Settings::random_nans any.
u32 make_nan();

// To the nearest, ties to even; too large ones to infinity, NaNs as above.
u32 to_float16(float value);
u32 to_bfloat16(float value);
float from_float16(u32 half);

// max.NaN of two 16-bit floats whose infinity has these bits; with `xorsign`, of their magnitudes, with the product's
// sign.
u32 larger_half(u32 a, u32 b, u32 infinity, bool xorsign);
float larger_float(float a, float b, bool xorsign);

// rcp.approx.ftz, with the error that the settings say.
float approximate_reciprocal(float value);

}  // namespace ptx
